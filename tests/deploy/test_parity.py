# SPDX-License-Identifier: Apache-2.0
"""A deployed run gives the bits of its simulation."""

import csv
import math

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

from perada.algorithms import Ditto, FedAvgFT, FedBE, FedEnsemble, FFALoRA, HetLoRA, PerAda
from perada.cli.deploy_status import format_rounds, run_status
from perada.core.rounds import sample_cohort
from perada.data import FederatedData
from perada.deploy.server.rounds import _update_of
from perada.deploy.state import read_state
from perada.deploy.transport import LocalTransport
from perada.federation.cohort import Cohort
from perada.server import Distillation
from perada.server.rules import SVD, FedAdam, LoRAFair, Median
from tests.methods import NAMED

from ..algorithms.problems import ADAPTER_OF, OF_LORA
from .parties import Parties


def shared(run):
    return run.server.global_state


def personal(coordinator, workers, name):
    """The state that a site predicts with, from the file on its disk."""
    (client,) = workers[name].clients.values()
    state = read_state(workers[name].store.folder / "state.safetensors")[0]
    return client.personal(shared(coordinator), state)


def assert_equal(parties, tolerance=0.0, personalized=True, **terms):
    loop, module = parties.simulated()
    federation = module.federation
    coordinator, workers = parties.deployed(**terms)
    pairs = [(federation.global_state, shared(coordinator))]
    if personalized and federation.personalized:
        for place, name in enumerate(parties.names):
            pairs.append((federation.personal_states([place]), personal(coordinator, workers, name)))
    for expected, results in pairs:
        assert expected.keys() == results.keys()
        for key, value in expected.items():
            if tolerance:
                torch.testing.assert_close(results[key], value, rtol=0, atol=tolerance)
            else:
                assert torch.equal(results[key], value), key
    return loop, coordinator


@pytest.mark.parametrize("algorithm", [pytest.param("fedavg", marks=pytest.mark.slow), "ditto", "perada"])
def test_a_deployed_run_equals_its_simulation(algorithm, tiny, tmp_path):
    loop, _ = assert_equal(Parties(tiny, tmp_path, algorithm))
    with (tmp_path / "server" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(loop.history) == 2
    for row, expected in zip(rows, loop.history, strict=True):
        for name in ("params/trained", "params/sent", "train/local_loss", "personal/local_test", "global/global_test"):
            assert math.isclose(float(row[name]), expected[name], rel_tol=1e-6), name


def vit():
    torch.manual_seed(0)
    sizes = {"img_size": 8, "patch_size": 4, "in_chans": 1, "embed_dim": 8, "depth": 2, "num_heads": 2}
    return VisionTransformer(**sizes, num_classes=3)


OTHERS = sorted(set(NAMED) - {"fedavg", "ditto", "perada", "fedalt_adapter", "fedsim_adapter", "fedbn"})
VARIANTS = {
    "sampled": ("perada", {"loop": {"clients_per_round": 2, "seed": 5}}),
    "weights": ("feddf", {"loop": {"weighting": "samples"}}),
    "median": ("fedavg", {"loop": {"server_rule": Median()}}),
    "fedadam": ("fedavg", {"loop": {"server_rule": FedAdam()}}),
    "by loss": (FedEnsemble(modes=2, assignment="loss"), {}),
    "best mode": (FedEnsemble(modes=2, keeps="best"), {}),
    "modes of PerAda": (FedEnsemble(PerAda(), modes=2), {}),
    "products of factors": ("fedavg", {"loop": {"server_rule": SVD()}, "module": {"adapter": "lora"}}),
    "ffa": (FFALoRA(PerAda()), {"module": {"adapter": "lora"}}),
    "ensemble of ffa": (FFALoRA(FedBE(distill=False)), {"module": {"adapter": "lora"}}),
    "ranks": (HetLoRA(Ditto(), [3, 1]), {"module": {"adapter": "lora"}}),
    "ranks, tuned": (HetLoRA(FedAvgFT(), [3, 1]), {"module": {"adapter": "lora"}}),
    "lora_fair": ("perada", {"loop": {"server_rule": LoRAFair()}, "module": {"adapter": "lora"}}),
    "prompts": ("perada", {"net": vit, "module": {"adapter": "prompt"}}),
    "private prompts": ("lg_fedavg", {"net": vit, "module": {"adapter": "prompt"}}),
    "rates": ("ditto", {"module": {"lr_schedule": "cosine", "optimizer": "adam", "momentum": 0.0}}),
    "held out": ("fedrep", {"loop": {"local_steps": 3}}),
}


def test_sites_took_part_last_when_their_simulations_clients_did(tiny, tmp_path):
    parties = Parties(tiny, tmp_path, "ditto", rounds=4, loop={"clients_per_round": 1, "seed": 5})
    loop, coordinator = assert_equal(parties, min_sites=1)
    progress = coordinator.progress
    last = [0, 0, 0]
    for round in range(4):
        (client,) = sample_cohort(5, round, 3, 1)
        last[client] = round + 1
    assert len(set(last)) == 3
    assert [member.last_round for member in progress.roster] == last
    assert loop.context.federation.last_rounds == last
    for results, expected in zip(progress.history, loop.history, strict=True):
        assert results["personal/local_test_recent"] == pytest.approx(expected["personal/local_test_recent"])
    lines = [line.split("|") for line in run_status(progress).partition("| site ")[2].splitlines()[2:]]
    assert [cells[4].strip() for cells in lines] == [str(one) if one else "never" for one in last]
    rounds = [line.split("|")[1].strip() for line in format_rounds(progress).splitlines()[2:]]
    assert rounds == ["1", "2", "3", "4"]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", OTHERS)
def test_every_algorithm_equals_its_simulation(algorithm, tiny, tmp_path):
    adapter = "lora" if algorithm in OF_LORA else "dual_lora"
    options = {"module": {"adapter": adapter}} if algorithm in ADAPTER_OF else {}
    loop, coordinator = assert_equal(Parties(tiny, tmp_path, algorithm, rounds=3, every=3, **options))
    actual = coordinator.progress.history[-1]
    for name in ("personal/local_test", "global/global_test"):
        expected = loop.history[-1].get(name)
        assert actual.get(name) == (expected if expected is None else pytest.approx(expected, rel=1e-6)), name


def test_names_that_sites_send_may_change_from_round_to_round(tiny, tmp_path):
    recipe = Parties(tiny, tmp_path, "rolora", module={"adapter": "lora"}).coordinator(LocalTransport({})).recipe
    factors = recipe.module.tensor_names.factors
    for round in range(4):
        sent = recipe.sent(round)
        for pair in factors:
            assert (pair.up in sent, pair.down in sent) == (round % 2 == 0, round % 2 == 1)
        assert _update_of(recipe, {}, 0, round).keys() == sent.keys()  # of a site whose training broke


def normalized():
    torch.manual_seed(0)
    convolution = torch.nn.Conv2d(1, 4, 3, stride=2)
    norm = torch.nn.BatchNorm2d(4)
    return torch.nn.Sequential(convolution, norm, torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(36, 3))


@pytest.mark.parametrize("algorithm", sorted(set(NAMED) - {"fedalt_adapter", "fedsim_adapter", *ADAPTER_OF}))
@pytest.mark.every(40)
def test_running_statistics_equal_those_of_a_simulation(algorithm, tiny, tmp_path):
    assert_equal(Parties(tiny, tmp_path, algorithm, sizes=(8, 5), net=normalized))


@pytest.mark.every(2)
@pytest.mark.parametrize("algorithm", ["perada", FedEnsemble(PerAda(), modes=2)])
def test_teachers_in_training_mode_equal_those_of_a_simulation(algorithm, tiny, tmp_path):
    loop = {"distillation": Distillation(steps=3, batch_size=4, lr=0.05, teacher_mode="train")}
    assert_equal(Parties(tiny, tmp_path, algorithm, sizes=(8, 5), net=normalized, loop=loop))


@pytest.mark.every(2)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_augmented_public_images_equal_those_of_a_simulation(mode, tiny, tmp_path):
    loop = {"distillation": Distillation(steps=3, batch_size=4, lr=0.05, teacher_mode=mode)}
    data = {"crop_padding": 1, "flip": True, "augment_public": True}
    assert_equal(Parties(tiny, tmp_path, "perada", sizes=(8, 5), net=normalized, loop=loop, data=data))


def test_a_server_rejects_to_distil_a_batch_norm_on_single_images(tiny, tmp_path):
    loop = {"distillation": Distillation(steps=3, batch_size=1, teacher_mode="train")}
    parties = Parties(tiny, tmp_path, "perada", sizes=(8, 5), net=normalized, loop=loop)
    with pytest.raises(ValueError, match=r"batch_size is 1, .*BatchNorm"):
        parties.coordinator(LocalTransport({}))


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_options_of_rounds_are_those_of_a_simulation(variant, tiny, tmp_path):
    algorithm, options = VARIANTS[variant]
    terms = {"min_sites": 2} if variant == "sampled" else {}
    assert_equal(Parties(tiny, tmp_path, algorithm, rounds=3, every=3, **options), **terms)


@pytest.mark.parametrize("algorithm", ["fedavg", pytest.param("ditto", marks=pytest.mark.slow)])
def test_a_folded_simulation_is_equal_but_for_rounding(algorithm, tiny, tmp_path):
    assert_equal(Parties(tiny, tmp_path, algorithm, engine="folded"), tolerance=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["perada", "fedbn", "fedalt_adapter", "fedsim_adapter"])
def test_a_residual_network_in_channels_last_with_augmentation(algorithm, tiny, tmp_path):
    """Its weights' memory format does not travel, and some clients have fewer images than a batch."""
    random = torch.Generator().manual_seed(0)

    def images(n):
        drawn = torch.randint(0, 256, (n, 1, 8, 8), generator=random, dtype=torch.uint8)
        return torch.utils.data.TensorDataset(drawn, torch.arange(n) % 3)

    options = {"net": lambda: "test_resnet", "data": {"image_size": 32, "crop_padding": 2, "flip": True}}
    options["module"] = {"adapter": "residual", "pretrained": False, "image_size": 32, "lr_local": 0.01}
    options["module"]["train_backbone"] = algorithm.endswith("adapter")
    parties = Parties(tiny, tmp_path, algorithm, sizes=(6, 3), **options)
    parties.whole = FederatedData([images(6), images(3)], [images(4), images(4)], images(8))
    assert_equal(parties)


def convolutions():
    """A network of two convolutions."""
    torch.manual_seed(0)
    first = torch.nn.Conv2d(1, 4, 3, padding=1)
    second = torch.nn.Conv2d(4, 6, 3, stride=2, padding=1)
    pooled = torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten()
    return torch.nn.Sequential(first, torch.nn.ReLU(), second, torch.nn.ReLU(), *pooled, torch.nn.Linear(24, 3))


MIXED = ["fedex_lora", "feddpa", "feddpa_f", "flora", "fedalt_row"]


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("algorithm", [*MIXED, "ditto", "fed_ensemble", "scaffold"])
@pytest.mark.every(16)
def test_each_tensor_lies_in_memory_as_in_the_simulation(algorithm, resumed, tiny, tmp_path, monkeypatch):
    """The last bits depend on it, on some machines: some tensors of a state are in channels_last and others are not."""
    seen = {}
    usual = Cohort.__init__

    def watched(self, local_round, sums=None):
        for row, client in enumerate(local_round.plan.clients):
            stacks = {"received": local_round.received, **local_round.client_state}
            strides = {
                role: {key: value[row].stride() for key, value in stack.items()} for role, stack in stacks.items()
            }
            seen.setdefault((local_round.plan.round, client), []).append(strides)
        usual(self, local_round, sums)

    monkeypatch.setattr(Cohort, "__init__", watched)
    adapter = "lora" if algorithm in OF_LORA else "dual_lora" if algorithm in ADAPTER_OF else "full"
    module = {"adapter": adapter, "channels_last": True}
    if adapter != "full":
        module["adapter_options"] = {"target_modules": ["0", "2", "6"], "r": 2}
    parties = Parties(tiny, tmp_path, algorithm, sizes=(8, 5), net=convolutions, module=module)
    loop, module = parties.simulated()
    transport = LocalTransport(parties.workers())
    if resumed:
        coordinator = parties.coordinator(transport)
        coordinator._run_round()
        coordinator.close()
        coordinator = parties.coordinator(transport, resume=True)
    else:
        coordinator = parties.coordinator(transport)
    coordinator.run()
    assert loop.history and {round for round, _ in seen} >= {0, 1}
    for strides in seen.values():
        simulated, deployed = strides
        assert simulated == deployed
    for key, value in module.federation.global_state.items():
        assert value.stride() == coordinator.server.global_state[key].stride()
        assert torch.equal(value, coordinator.server.global_state[key])
    if algorithm in MIXED:
        layouts = {value.is_contiguous() for value in coordinator.server.global_state.values() if value.dim() == 4}
        assert algorithm not in ("fedex_lora", "flora") or layouts == {True, False}
