# SPDX-License-Identifier: Apache-2.0
"""Runs whose clients predict with both models: scores by a plain loop over images, and what is rejected."""

import logging
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.neighbors import NearestNeighbors

import perada
from perada.core.checks import OptionError
from perada.federation.both_models import Weights, logits_of_both
from perada.federation.typical_images import LEAST_DEVIATION
from perada.lightning import typical_images
from perada.tasks import Classification
from tests.options import sections

OPTIONS = {"evaluation": {"prediction": "both"}, "logger": False, "rounds": 2}


def fitted(tiny, data=None, algorithm="ditto", **options):
    used = tiny.options | OPTIONS | options | {"distill_steps": None, "distill_batch_size": None}
    return perada.finetune(tiny.net(), tiny.data() if data is None else data, algorithm=algorithm, **sections(**used))


def shifted(tiny, test=True):
    """Clients with different brightness, so that some images of others look foreign; one with few images."""
    data = tiny.data(sizes=(19, 5, 24, 17, 30), test=test)
    for parts in filter(None, (data.train, data.test)):
        for client, part in enumerate(parts):
            images, labels = part.tensors
            parts[client] = torch.utils.data.TensorDataset(images + 6 * (client % 3) + labels.view(-1, 1, 1, 1), labels)
    return data


def alike(tiny):
    """Clients with the same kind of images, for which one model does well."""
    return tiny.data(sizes=(19, 5, 24, 17, 30))


def pixel_statistics(images):
    """Mean and logarithm of the deviation of the pixels: all layers are trained, so there are no frozen maps."""
    pixels = images.double().numpy().reshape(len(images), -1)
    return np.stack([pixels.mean(1), np.log(pixels.std(1) + LEAST_DEVIATION)], 1)


def is_typical_by_hand(training_images, images):
    """The rule, by scikit-learn's search of neighbours."""
    if len(training_images) < 10:
        return torch.ones(len(images), dtype=torch.bool)
    examples = pixel_statistics(training_images)
    deviation = np.maximum(examples.std(0), 0.1 * examples.std(0).mean())
    search = NearestNeighbors(n_neighbors=3).fit(examples / deviation)
    among_examples, _ = search.kneighbors()
    threshold = np.quantile(among_examples[:, -1], 0.99)
    distances, _ = search.kneighbors(pixel_statistics(images) / deviation)
    return torch.tensor(distances[:, -1] <= threshold)


def share_by_hand(run, images, labels):
    """Weight of the personal model: a half, and twice the share of training images that the global model gets wrong."""
    with torch.no_grad():
        predicted = run.global_model()(images).argmax(-1)
    wrong = sum(int(class_predicted != label) for class_predicted, label in zip(predicted, labels, strict=True))
    return min(1, 0.5 + 2 * wrong / len(labels))


def mixed_by_hand(personal, shared, share, training_labels):
    """Probabilities (B, K) of typical images, class by class, from those of both models.

    Of a class with fewer than 3 training images only the global model speaks, as far as it is right at home.
    """
    numbers = Counter(training_labels.tolist())
    trust = min(1, 2 * (1 - share))
    rows = []
    for of_personal, of_shared in zip(personal.tolist(), shared.tolist(), strict=True):
        unknown = {number for number in range(len(of_shared)) if numbers[number] < 3}
        rest = 1 - trust * sum(of_shared[number] for number in unknown)
        row = []
        for number, probability in enumerate(of_shared):
            completed = rest * of_personal[number]
            if number in unknown:
                completed += trust * probability
            row.append(share * completed + (1 - share) * probability)
        rows.append(row)
    return torch.tensor(rows)


def predicted_by_hand(run, client, is_typical, share, images, training_labels):
    """Classes that a client predicts with both models."""
    with torch.no_grad():
        personal = run.personal(client)(images).softmax(-1)
        shared = run.global_model()(images).softmax(-1)
    mixture = mixed_by_hand(personal, shared, share, training_labels)
    return torch.where(is_typical.unsqueeze(1), mixture, shared).argmax(-1)


@pytest.mark.parametrize(
    ("algorithm", "fixed_share"), [("ditto", 0.7), ("ditto", 0.0), ("ditto", None), ("fedavg_ft", None)]
)
def test_scores_are_those_of_a_plain_loop(tiny, algorithm, fixed_share):
    make_data = alike if fixed_share is None else shifted
    data = make_data(tiny)
    evaluation = {"prediction": "both", "personal_share": fixed_share}
    run = fitted(tiny, make_data(tiny), algorithm, evaluation=evaluation, rounds=12, clients_per_round=None)
    clients = run.metrics["clients"]
    test_sets = [part.tensors for part in data.test]
    shares_typical = []
    shares_typical_of_all = []
    confusion = {}
    shares = []
    for client, (own_images, own_labels) in enumerate(test_sets):
        training_images, training_labels = data.train[client].tensors
        share = fixed_share
        if fixed_share is None:
            share = share_by_hand(run, training_images, training_labels)
            shares.append(share)
        is_typical = is_typical_by_hand(training_images, own_images)
        predicted = predicted_by_hand(run, client, is_typical, share, own_images, training_labels)
        for label, prediction in zip(own_labels.tolist(), predicted.tolist(), strict=True):
            key = client, label, prediction
            confusion[key] = confusion.get(key, 0) + 1
        right = predicted == own_labels
        assert clients["both/local_test"][client] == pytest.approx(float(right.float().mean()), abs=1e-6)
        shares_typical.append(float(is_typical.float().mean()))

        all_images = torch.cat([images for images, _ in test_sets])
        all_labels = torch.cat([labels for _, labels in test_sets])
        is_typical = is_typical_by_hand(training_images, all_images)
        right = predicted_by_hand(run, client, is_typical, share, all_images, training_labels) == all_labels
        assert clients["both/global_test"][client] == pytest.approx(float(right.float().mean()), abs=1e-6)
        shares_typical_of_all.append(float(is_typical.float().mean()))
        if client != 1 and fixed_share is not None:
            assert 0 < is_typical.float().mean() < 1
    assert clients["typical/local_test"] == pytest.approx(shares_typical)
    assert clients["typical/global_test"] == pytest.approx(shares_typical_of_all)
    predictions = run.metrics["predictions"]["both"]
    assert {tuple(row[:3]): row[3] for row in predictions["confusion"]} == confusion
    assert sum(predictions["calibration"]["right"]) == sum(
        count for (_, label, prediction), count in confusion.items() if label == prediction
    )
    assert fixed_share is not None or len({*shares}) > 1
    last = run.metrics["rounds"][-1]
    for name in ("both/local_test", "both/global_test", "typical/local_test", "typical/global_test"):
        assert last[name] == pytest.approx(np.mean(clients[name]))
    assert last["both/local_test_std"] == pytest.approx(np.std(clients["both/local_test"]))


@pytest.mark.parametrize("share", [0.0, 0.5, 0.8, 1.0])
def test_probabilities_are_those_of_the_rule(share):
    """Of typical images, by hand; those of other images are the global model's."""
    generator = torch.Generator().manual_seed(0)
    personal = torch.randn(6, 5, generator=generator)
    shared = torch.randn(6, 5, generator=generator)
    training_labels = torch.tensor([0] * 7 + [1] * 3 + [2] * 2 + [4])  # classes 2, 3 and 4 have fewer than 3 images
    known_classes = torch.tensor([[True, True, False, False, False]])
    is_typical = torch.tensor([True, True, True, True, False, False])
    weights = Weights(torch.tensor([share], dtype=torch.double), known_classes)
    logits = logits_of_both(Classification(), personal, shared, is_typical, weights)
    expected = mixed_by_hand(personal.softmax(-1), shared.softmax(-1), share, training_labels)
    torch.testing.assert_close(logits.softmax(-1)[:4], expected[:4], check_dtype=False)
    torch.testing.assert_close(logits[4:], shared[4:])


def test_other_scores_are_the_same_without(tiny):
    with_both = fitted(tiny, shifted(tiny))
    without = fitted(tiny, shifted(tiny), evaluation={})
    for name, scores in without.metrics["clients"].items():
        assert with_both.metrics["clients"][name] == scores
    added = with_both.metrics["clients"].keys() - without.metrics["clients"].keys()
    assert added == {"both/local_test", "both/global_test", "typical/local_test", "typical/global_test"}


@pytest.mark.parametrize(("threshold", "personal_share"), [(math.inf, 1.0), (math.nan, 1.0)])
def test_a_detector_that_says_always_or_never_costs_nothing(tiny, monkeypatch, threshold, personal_share):
    """All images typical: the personal model. None: the global one."""
    original = typical_images.TypicalImages.of

    def without_threshold(statistics):
        return replace(original(statistics), threshold=torch.tensor(threshold), neighbors=1)

    monkeypatch.setattr(typical_images.TypicalImages, "of", without_threshold)
    run = fitted(tiny, evaluation={"prediction": "both", "personal_share": personal_share})
    clients = run.metrics["clients"]
    if threshold > 0:
        assert clients["both/local_test"] == clients["personal/local_test"]
        assert clients["both/global_test"] == clients["personal/global_test"]
        return
    assert clients["both/local_test"] == run.metrics["global/local_test"]
    assert clients["both/global_test"] == pytest.approx([run.metrics["rounds"][-1]["global/global_test"]] * 5)


def test_several_metrics_and_sampled_clients(tiny):
    evaluation = OPTIONS["evaluation"] | {"metric": ["auroc", "ece", "f1_per_class"], "global_test_clients": 2}
    run = fitted(tiny, shifted(tiny), evaluation=evaluation)
    everyone = fitted(tiny, shifted(tiny), evaluation=evaluation | {"global_test_clients": None})
    for suffix in ("", "_ece", "_f1_per_class"):
        local = f"both/local_test{suffix}"
        assert run.metrics["clients"][local] == pytest.approx(everyone.metrics["clients"][local], abs=1e-6)
        scores = np.array(run.metrics["clients"][f"both/global_test{suffix}"])
        of_everyone = np.array(everyone.metrics["clients"][f"both/global_test{suffix}"])
        assert np.isfinite(scores).sum() == 2
        assert scores[np.isfinite(scores)] == pytest.approx(of_everyone[np.isfinite(scores)])
    assert "both/local_test_f1_per_class" in run.metrics["per_class"]


def test_a_resumed_run_has_the_same_scores(tiny, tmp_path):
    uninterrupted = fitted(tiny, shifted(tiny), rounds=3)
    first = {"default_root_dir": str(tmp_path), "logger": True, "rounds": 3, "max_time": None}
    fitted(tiny, shifted(tiny), **(first | {"rounds": 2}))
    resumed = fitted(tiny, shifted(tiny), rounds=3, default_root_dir=str(tmp_path), logger=True, ckpt_path="last")
    for name in ("both/local_test", "both/global_test", "typical/local_test"):
        assert resumed.metrics["clients"][name] == uninterrupted.metrics["clients"][name]


@pytest.mark.parametrize("algorithm", ["FedAvg", "Standalone", "FedPer"])
def test_clients_with_one_model_have_no_such_scores(tiny, caplog, algorithm):
    with caplog.at_level(logging.INFO):
        run = fitted(tiny, algorithm=algorithm.lower())
    assert f"prediction='both' has no effect with {algorithm}" in caplog.text
    assert not any(name.startswith("both/") for name in run.metrics["rounds"][-1])


@pytest.mark.parametrize("privacy", ["privacy", "client_privacy"])
def test_private_runs_reject_it(tiny, privacy):
    with pytest.raises(OptionError, match=rf"prediction='both'.*{privacy}"):
        fitted(tiny, **{privacy: {"noise_multiplier": 1.0}})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prediction": "all"}, "prediction must be one of"),
        ({"personal_share": 1.5}, "personal_share"),
        ({"personal_share": -1}, "personal_share"),
    ],
)
def test_other_values_are_rejected(options, message):
    with pytest.raises(OptionError, match=message):
        perada.Evaluation(**options)


class Breaking(torch.utils.data.Dataset):
    """Images one of which cannot be read any more after set-up."""

    broken = False

    def __init__(self, part):
        self.part = part

    def __len__(self):
        return len(self.part)

    def __getitem__(self, index):
        if index == 3 and self.broken:
            raise OSError("image 3 is damaged")
        return self.part[index]


def test_an_image_that_cannot_be_read_is_no_example(tiny, monkeypatch):
    clients = tiny.data()
    images, labels = clients.train[2].tensors
    clients.train[2] = Breaking(clients.train[2])
    data = perada.FederatedDataModule(clients, eval_batch_size=4)
    data.setup()
    monkeypatch.setattr(Breaking, "broken", True)
    read_images, read_labels = map(torch.cat, zip(*data.examples(2, limit=300), strict=True))
    readable = [index for index in range(len(images)) if index != 3]
    torch.testing.assert_close(read_images, images[readable])
    assert read_labels.tolist() == labels[readable].tolist()


def test_examples_are_spread_over_the_training_set(tiny):
    clients = tiny.data()
    images, _ = clients.train[4].tensors
    data = perada.FederatedDataModule(clients)
    data.setup()
    ((batch, _),) = data.examples(4, limit=5)
    torch.testing.assert_close(batch, images[[0, 4, 8, 12, 16]])
