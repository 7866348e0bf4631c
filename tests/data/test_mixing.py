# SPDX-License-Identifier: Apache-2.0
"""Mixup and CutMix against plain loops over images."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import perada
from perada.core.checks import OptionError
from perada.core.rounds import CohortBatch
from perada.data import FederatedData, FederatedDataModule
from perada.data.batches.mixing import Mixing
from perada.tasks import Classification, MultiLabel

CLASSES = 4
COUNTS = (5, 3)


def batch(clients=(0, 1), counts=COUNTS, step=0):
    """Images whose pixels all have the value of their index, and padding of zeros."""
    width = max(counts)
    x = torch.zeros(len(clients), width, 2, 8, 8)
    y = torch.zeros(len(clients), width, dtype=torch.int64)
    for place, (client, count) in enumerate(zip(clients, counts, strict=True)):
        for row in range(count):
            x[place, row] = 1 + 10 * client + row
            y[place, row] = (client + row) % CLASSES
    return CohortBatch(clients, x, y, counts, phase=0, step=step)


def mix_batch(options, **changes):
    return Mixing(**options)(batch(**changes), seed=3, task=Classification(), num_classes=CLASSES)


@pytest.mark.parametrize("options", [{"mixup": 0.4}, {"cutmix": 1.0}, {"mixup": 0.4, "cutmix": 1.0}], ids=str)
def test_an_image_is_mixed_with_one_image_of_its_client_and_targets_in_proportion(options):
    plain = batch()
    for step in range(6):
        result = mix_batch(options, step=step)
        for place, count in enumerate(COUNTS):
            for row in range(count):
                values = result.x[place, row]
                pixel = plain.x[place, row, 0, 0, 0]
                # Targets are one-hot vectors mixed by λ: find the partner and λ that explain the pixels.
                explained = []
                for partner in range(count):
                    other = plain.x[place, partner, 0, 0, 0]
                    share = 1.0 if pixel == other else float(((values - other) / (pixel - other)).double().mean())
                    target = torch.zeros(CLASSES)
                    target[plain.y[place, row]] += share
                    target[plain.y[place, partner]] += 1 - share
                    is_between = -1e-5 <= share <= 1 + 1e-5
                    explained.append(is_between and torch.allclose(target, result.y[place, row], atol=1e-5))
                assert any(explained), (step, place, row)
        assert not result.x[1, COUNTS[1] :].any()


def test_cutmix_replaces_one_rectangle():
    found_rectangle = False
    plain = batch()
    for step in range(10):
        result = mix_batch({"cutmix": 1.0}, step=step)
        replaced = (result.x != plain.x)[0].any(0).any(0)
        if not replaced.any():
            continue
        found_rectangle = True
        rows = replaced.any(1).nonzero().flatten().tolist()
        columns = replaced.any(0).nonzero().flatten().tolist()
        assert replaced[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all()
        assert replaced.sum() == len(rows) * len(columns)
        changed = (result.x != plain.x)[0].flatten(1).any(1)
        target_of_own = result.y[0].gather(1, plain.y[0].unsqueeze(1)).squeeze(1)
        # Of two images of different classes the target has the share of the pixels that were kept.
        expected = 1 - replaced.double().mean()
        pure = [value for value, differs in zip(target_of_own.tolist(), changed.tolist(), strict=True) if differs]
        assert any(value == pytest.approx(float(expected)) for value in pure)
    assert found_rectangle


def test_draws_depend_on_client_and_step_only():
    together = mix_batch({"mixup": 1.0})
    alone = mix_batch({"mixup": 1.0}, clients=(1,), counts=(3,))
    torch.testing.assert_close(together.x[1, :3], alone.x[0], rtol=0, atol=0)
    torch.testing.assert_close(together.y[1, :3], alone.y[0], rtol=0, atol=0)
    assert not torch.equal(together.x, mix_batch({"mixup": 1.0}, step=1).x)
    assert torch.equal(together.x, mix_batch({"mixup": 1.0}).x)


def test_the_loss_of_a_mixed_target_is_the_mix_of_the_losses():
    random = torch.Generator().manual_seed(1)
    logits = torch.randn(6, CLASSES, generator=random)
    first = torch.tensor([0, 1, 2, 3, 0, 1])
    second = torch.tensor([3, 3, 2, 1, 1, 0])
    share = torch.full((1, 1), 0.3)
    for task in (Classification(), Classification(label_smoothing=0.1, class_weights=[1.0, 2.0, 0.5, 3.0])):
        target = task.mix(first.unsqueeze(0), second.unsqueeze(0), share, CLASSES)[0]
        expected = 0.3 * task.loss(logits, first) + 0.7 * task.loss(logits, second)
        torch.testing.assert_close(task.loss(logits, target), expected)

    labels = torch.randint(0, 2, (6, CLASSES), generator=random).float()
    others = torch.randint(0, 2, (6, CLASSES), generator=random).float()
    task = MultiLabel(positive_weights=[1.0, 2.0, 0.5, 3.0])
    target = task.mix(labels.unsqueeze(0), others.unsqueeze(0), share, CLASSES)[0]
    expected = 0.3 * task.loss(logits, labels) + 0.7 * task.loss(logits, others)
    torch.testing.assert_close(task.loss(logits, target), expected)


@pytest.mark.parametrize("unknown", [math.nan, -1.0])
def test_a_mix_with_an_unknown_label_is_unknown(unknown):
    task = MultiLabel()
    labels = torch.tensor([[[unknown, 1.0]], [[0.0, 1.0]]])
    others = torch.tensor([[[1.0, 1.0]], [[unknown, 0.0]]])
    target = task.mix(labels, others, torch.full((2, 1), 0.25), 2)
    assert task.known(target).tolist() == [[[False, True]], [[False, True]]]
    assert target[1, 0, 1] == 0.25


def client(seed):
    random = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.rand(6, 3, 8, 8, generator=random), torch.randint(0, 3, (6,), generator=random))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 3))


@pytest.mark.parametrize("engine", ["folded", "loop"])
def test_a_step_on_mixed_images_equals_a_plain_loop(engine):
    data = FederatedDataModule(
        FederatedData([client(0), client(1)], num_classes=3), batch_size="full", mixup=0.5, cutmix=1.0
    )
    model = network()
    run = perada.finetune(
        model, data, adapter="full", algorithm="fedavg", rounds=1, local_steps=1, lr_local=0.1,
        training={"engine": engine, "momentum": 0.0}, logger=False,
    )  # fmt: skip

    data.setup()
    expected = []
    for place in range(2):
        prepared = data.first_batch((place,))
        plain = data.data.train[place].tensors[0]
        unmixed = [any(torch.equal(image, other) for other in plain) for image in prepared.x[0]]
        assert not all(unmixed)
        copy = network()
        loss = F.cross_entropy(copy(prepared.x[0]), prepared.y[0])
        loss.backward()
        with torch.no_grad():
            expected.append(copy[1].weight - 0.1 * copy[1].weight.grad)
    torch.testing.assert_close(run.global_model()[1].weight, torch.stack(expected).mean(0))


def fit_mixed(rounds, **options):
    data = FederatedDataModule(
        FederatedData([client(0), client(1)], num_classes=3), batch_size=4, mixup=0.5, cutmix=1.0
    )
    return perada.finetune(
        network(), data, **{"adapter": "full", "algorithm": "fedavg", "rounds": rounds, "logger": False} | options
    )


def test_a_run_on_mixed_images_resumes_bit_by_bit(tmp_path):
    fit_mixed(1, logger=True, default_root_dir=str(tmp_path))
    (checkpoint,) = tmp_path.rglob("last.ckpt")
    resumed = fit_mixed(3, ckpt_path=str(checkpoint))
    uninterrupted = fit_mixed(3)
    assert torch.equal(resumed.global_model()[1].weight, uninterrupted.global_model()[1].weight)


def test_mixing_is_rejected_with_the_privacy_of_images():
    data = FederatedDataModule(FederatedData([client(0), client(1)], num_classes=3), mixup=0.2)
    with pytest.raises(OptionError, match="mixup and cutmix"):
        perada.finetune(
            network(), data, adapter="full", algorithm="fedavg", rounds=1, privacy={"noise_multiplier": 1.0}
        )


def test_focal_losses_and_vectors_are_rejected():
    data = FederatedData([client(0), client(1)], num_classes=3)
    module = FederatedDataModule(data, task=Classification(focal_gamma=2.0), mixup=0.2)
    with pytest.raises(ValueError, match=r"focal_gamma=2\.0.*mixup or cutmix"):
        module.setup()
    with pytest.raises(OptionError, match="mixup must"):
        Mixing(mixup=-0.1)
    vectors = FederatedData([TensorDataset(torch.rand(4, 7), torch.tensor([0, 1, 0, 1]))])
    with pytest.raises(ValueError, match="mixup and cutmix"):
        FederatedDataModule(vectors, mixup=0.2).setup()
