# SPDX-License-Identifier: Apache-2.0
"""Deployed runs that segment images, with and without secure sums, against their simulations."""

import pytest
import torch

from perada.data import FederatedData
from perada.deploy.protocol import read_header
from perada.deploy.transport import LocalTransport
from perada.server import Distillation, SecureSums
from perada.tasks import Segmentation
from tests.masks import UNet, squares

from .parties import Parties
from .test_hostile_sites import Lying, lie_of, with_facts
from .test_parity import assert_equal

METRICS = ["dice", "miou", "iou_per_class", "accuracy"]


SIZE = 16


def unet():
    torch.manual_seed(0)
    return UNet()


def parties(tiny, tmp_path, algorithm="perada", *, secure=False, every=1, task=None, **loop):
    options = {
        "net": unet,
        "data": {"task": task or Segmentation("both", distill_stride=2)},
        "module": {"metric": METRICS},
        "loop": loop | ({"secure_sums": SecureSums()} if secure else {}),
    }
    deployment = Parties(tiny, tmp_path, algorithm, every=every, **options)
    deployment.whole = FederatedData(
        train=[squares(count, client, 20 * client, SIZE) for client, count in enumerate((9, 5, 8))],
        test=[squares(count, 100 + client, 20 * client, SIZE) for client, count in enumerate((5, 3, 4))],
        public=squares(8, 7, 10, SIZE),
    )
    return deployment


@pytest.mark.parametrize("algorithm", ["perada", pytest.param("fedavg", marks=pytest.mark.slow)])
@pytest.mark.parametrize("secure", [False, True], ids=["plain", "secure"])
def test_a_deployed_run_equals_its_simulation(algorithm, secure, tiny, tmp_path):
    loop, coordinator = assert_equal(parties(tiny, tmp_path, algorithm, secure=secure))
    suffixes = ["", "_std", "_weighted"]
    if not secure:
        suffixes += ["_worst", "_p10"]
    for expected, results in zip(loop.history, coordinator.progress.history, strict=True):
        for metric in ("", *(f"_{name}" for name in METRICS[1:])):
            names = [f"personal/local_test{metric}{suffix}" for suffix in suffixes]
            for name in [*names, f"global/global_test{metric}"]:
                # A standard deviation is a root of a small difference of numbers in fixed point.
                assert results[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-5 if secure else 0), name


@pytest.mark.slow
@pytest.mark.parametrize("secure", [False, True], ids=["plain", "secure"])
def test_distillation_equals_the_simulations_where_kernels_depend_on_the_memory_layout(secure, tiny, tmp_path):
    """The encoder runs channels last, and its convolutions round differently for contiguous weights."""
    pytest.importorskip("segmentation_models_pytorch")
    deployment = parties(tiny, tmp_path, secure=secure)
    module = {"adapter": "lora", "pretrained": False, "metric": METRICS}
    deployment.options |= {"net": lambda: "smp:unet-resnet18", "module": module}
    deployment.whole = FederatedData(
        train=[squares(count, client, 20 * client, 32) for client, count in enumerate((9, 5, 8))],
        test=[squares(3, 100 + client, 20 * client, 32) for client in range(3)],
        public=squares(8, 7, 10, 32),
    )
    assert_equal(deployment)


def test_the_global_models_sums_are_pooled_and_not_its_scores(tiny, tmp_path):
    """A plain loop over the masks of all sites; the mean of the sites' scores is another number."""
    deployment = parties(tiny, tmp_path, "fedavg")
    coordinator, _ = deployment.deployed()
    model = unet()
    model.load_state_dict(coordinator.server.global_state)
    model.eval()
    intersections = torch.zeros(3)
    unions = torch.zeros(3)
    of_sites = []
    for dataset in deployment.whole.test:
        images, masks = dataset.tensors
        with torch.no_grad():
            predicted = model((images.float() / 255 - 0.5) / 0.5).argmax(1)
        both = torch.stack([((predicted == k) & (masks == k)).sum() for k in range(3)])
        either = torch.stack([((predicted == k) | (masks == k)).sum() for k in range(3)])
        intersections += both
        unions += either
        of_sites.append(float((both / either).mean()))
    pooled = float((intersections / unions).mean())
    assert coordinator.progress.history[-1]["global/global_test_miou"] == pytest.approx(pooled, rel=1e-5)
    assert abs(pooled - sum(of_sites) / 3) > 1e-4


def test_a_site_that_sends_only_counts_sends_no_score_and_has_one(tiny, tmp_path):
    deployment = parties(tiny, tmp_path, "fedavg")
    honest = parties(tiny, tmp_path / "honest", "fedavg").deployed()[0].progress.history[-1]
    replies = []

    def note(name, kind, reply, _):
        if kind == "evaluate":
            replies.append(read_header(reply)["facts"])
        return reply

    coordinator = deployment.coordinator(Lying(deployment.workers(may_send=["counts"]), note))
    coordinator.run()
    assert {"counts", "sums", "tests"} == set(replies[-1])
    assert set(replies[-1]["sums"]["global"]) == {"dice", "miou", "iou_per_class"}
    for name in ("personal/local_test", "personal/local_test_miou", "global/global_test"):
        assert coordinator.progress.history[-1][name] == pytest.approx(honest[name])


IMPOSSIBLE = {
    "negative": [-1.0, 0, 0, 10, 0, 0, 10, 0, 0],
    "more in both than in one": [11.0, 0, 0, 10, 0, 0, 10, 0, 0],
    "other numbers of pixels": [1.0, 0, 0, 10, 0, 0, 11, 0, 0],
    "more pixels than the images have": [1e6, 0, 0, 1e6, 0, 0, 1e6, 0, 0],
    "too few numbers": [1.0, 0, 0],
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
@pytest.mark.every(2)
def test_sums_that_no_images_can_have_are_left_out(case, tiny, tmp_path, caplog):
    deployment = parties(tiny, tmp_path, "fedavg")
    deployment.rounds = 1
    deployment.options["data"]["image_size"] = SIZE
    lie = lie_of("site1", "evaluate", sums={"global": {"miou": IMPOSSIBLE[case]}}, scores={})
    coordinator = deployment.coordinator(Lying(deployment.workers(), lie))
    (row,) = coordinator.run().history
    assert "evaluate: site site1: malformed: 'miou' of the global model has" in caplog.text
    assert 0 <= row["global/global_test_miou"] <= 1


def test_more_images_of_a_class_than_there_are_images_are_left_out(tiny, tmp_path, caplog):
    deployment = parties(tiny, tmp_path, "fedavg")
    deployment.rounds = 1

    def lie(who, what, reply, _):
        if (who, what) != ("site1", "evaluate"):
            return reply
        sums = read_header(reply)["facts"]["sums"]
        return with_facts(reply, sums={"global": sums["global"] | {"dice": [6.0, 6.0, 6.0, 6.0, 6.0, 6.0]}})

    deployment.coordinator(Lying(deployment.workers(), lie)).run()
    assert "'dice' of the global model has sums that no 3 test images can have" in caplog.text


@pytest.mark.parametrize("sums", [{"miou": "many"}, {"miou": [None]}, {"miou": [1e31]}, {"miou": [0.0] * 2**17}])
@pytest.mark.every(2)
def test_what_are_no_sums_is_malformed(sums, tiny, tmp_path, caplog):
    deployment = parties(tiny, tmp_path, "fedavg")
    deployment.rounds = 1
    deployment.coordinator(Lying(deployment.workers(), lie_of("site1", "evaluate", sums={"global": sums}))).run()
    assert "site site1: malformed" in caplog.text


def test_a_vector_holds_the_logits_of_the_grid(tiny, tmp_path):
    deployment = parties(tiny, tmp_path, secure=True, task=Segmentation(distill_stride=4))
    recipe = deployment.coordinator(LocalTransport({})).recipe
    contents = recipe.contents(0, recipe.public_images())
    assert contents.logits == (8, 4, 4, 3)  # images, pixels of every fourth row and column, classes


def test_a_vector_larger_than_a_message_is_rejected_with_what_lowers_it(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("perada.deploy.recipe.MAX_MESSAGE_BYTES", 10**4)
    deployment = parties(tiny, tmp_path, secure=True, distillation=Distillation(steps=3, batch_size=4))
    expected = r"GB.*8 public images.*distill_str"
    with pytest.raises(ValueError, match=expected):
        deployment.coordinator(LocalTransport({}))
