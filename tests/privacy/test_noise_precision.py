# SPDX-License-Identifier: Apache-2.0
"""The noise that is really added, in each precision and engine, measured on what a run gives back.

20,000 images with one and the same gradient give a sum so large that in half precision the noise would be less than its
last digit. The difference of two runs is that of their noises, for nothing else differs.
"""

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from scipy import stats
from torch import nn
from torch.utils.data import TensorDataset

import perada
from perada.privacy import noisy_mean
from perada.privacy.clipping import with_noise
from perada.privacy.gradients import PerSampleGrads
from tests.options import sections

from ..algorithms.problems import QUIET

PIXELS = 400
CLASSES = 5
BOUND = 0.5
SIGMA = 1.5
LEVEL = 1e-6


pytestmark = pytest.mark.usefixtures("quick_epsilon")


def network(dtype=torch.float32):
    layer = nn.Linear(PIXELS, CLASSES, bias=False)
    nn.init.zeros_(layer.weight)
    return nn.Sequential(nn.Flatten(), layer).to(dtype)


def federation(images, dtype=torch.float32):
    x = torch.ones(images, 1, 1, PIXELS, dtype=dtype)
    return perada.FederatedData([TensorDataset(x, torch.zeros(images, dtype=torch.long))], num_classes=CLASSES)


def mixed_network(dtype):
    """A network whose first layer has another number format; one that has no float32 is converted to it."""
    return nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, 4).to(dtype), Widened(), nn.Linear(4, CLASSES))


def train(images, dtype, make=network, **options):
    common = {"adapter": "full", "algorithm": "fedavg", "batch_size": "full", "lr_local": 1.0, "rounds": 1}
    run = perada.finetune(make(dtype), federation(images, dtype), **sections(**common | QUIET | options))
    return next(iter(run.state("global").values()))


PRECISIONS = [(torch.float32, "32-true"), (torch.float32, "bf16-mixed"), (torch.float64, "32-true")]
NOISES = [
    pytest.param(engine, *precision, marks=[pytest.mark.slow] * (engine == "opacus"))
    for engine in ("folded", "opacus", "clients")
    for precision in PRECISIONS
]


@pytest.mark.parametrize(("engine", "dtype", "precision"), NOISES)
@pytest.mark.every(6)
def test_all_coordinates_get_the_stated_noise(engine, dtype, precision):
    images = 20_000
    options = {"noise_multiplier": SIGMA, "max_norm": BOUND, "delta": 1e-5}
    if engine == "clients":
        # of the one client's change
        chosen = {"client_privacy": options}
        std = SIGMA * BOUND
    else:
        chosen = {"privacy": options | {"engine": engine, "physical_batch_size": 5000}}
        std = SIGMA * BOUND / images  # of the mean gradient, and of the weights after a step of rate 1
    first, second, third = (train(images, dtype, precision=precision, **chosen).double() for _ in range(3))
    noise = ((first - second) / 2**0.5 / std).flatten().numpy()
    assert ((first != second) | (first != third)).all()  # two alone are alike somewhere once in twenty times: rounding
    assert len(np.unique(noise)) > 0.9 * noise.size  # each has its own; some are alike once they are rounded
    low, high = stats.chi2(noise.size).ppf([LEVEL / 2, 1 - LEVEL / 2])
    assert low < np.square(noise).sum() < high
    assert stats.kstest(noise, "norm").pvalue > LEVEL
    # The rest is the clipped sum: every image's gradient has the norm of the bound.
    mean = (first + second).flatten() / 2
    assert float(mean.norm()) == pytest.approx(BOUND, rel=0.02 if engine != "clients" else 100)


@pytest.mark.parametrize("engine", ["folded", pytest.param("opacus", marks=pytest.mark.slow), "loop"])
@pytest.mark.parametrize(
    "adapter", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("lora", "full")), "bottleneck", "head"]
)
@pytest.mark.slow
def test_computing_in_half_precision_trains_in_single(adapter, engine):
    """Of a real backbone, whose layers the trainer's precision casts."""
    random = torch.Generator().manual_seed(0)
    part = TensorDataset(torch.randn(4, 3, 32, 32, generator=random), torch.arange(4) % 3)
    options = {"engine": "loop"} if engine == "loop" else {}
    run = perada.finetune(
        "test_vit",
        perada.FederatedDataModule(perada.FederatedData([part] * 2, num_classes=3), batch_size=2, image_size=32),
        **sections(
            adapter=adapter,
            pretrained=False,
            algorithm="perada_no_kd",
            rounds=1,
            local_steps=1,
            precision="bf16-mixed",
            privacy={"noise_multiplier": 1.0, "delta": 1e-3, "engine": "auto" if engine == "loop" else engine},
            **options | {name: value for name, value in QUIET.items() if name != "precision"},
        ),
    )
    assert {value.dtype for value in run.state("global").values() if value.is_floating_point()} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("section", ["privacy", "client_privacy"])
@pytest.mark.parametrize("engine", ["folded", "opacus", "loop"])
def test_weights_in_half_precision_are_rejected_at_set_up(engine, section, dtype):
    level = {"noise_multiplier": SIGMA, "delta": 1e-5}
    options = {"engine": "loop"} if engine == "loop" else {}
    if section == "privacy" and engine != "loop":
        level["engine"] = engine
    rounds = Rounds()
    with pytest.raises(ValueError, match=r"'1\.weight' is b?float16") as error:
        train(8, dtype, mixed_network, callbacks=[rounds], **{section: level}, **options)
    assert "\n" not in str(error.value)
    assert not rounds.begun


class Rounds(pl.Callback):
    begun = False

    def on_fit_start(self, trainer, pl_module):
        self.begun = True


def test_frozen_weights_may_be_in_half_precision():
    run = perada.finetune(
        mixed_network(torch.bfloat16),
        federation(8, torch.bfloat16),
        **sections(
            adapter="head",
            algorithm="fedavg",
            rounds=1,
            privacy={"noise_multiplier": SIGMA},
            **QUIET,
        ),
    )
    assert {value.dtype for value in run.state("global").values()} == {torch.float32}


class Widened(nn.Module):
    def forward(self, x):
        return x.float()


def test_parts_for_use_alone_sum_in_double_precision_and_reject_half():
    summed = PerSampleGrads(torch.ones(5000, 3, dtype=torch.bfloat16)).weighted_sums(torch.full((1, 5000), 0.25))
    assert summed.dtype == torch.float64
    assert summed.tolist() == [[1250.0] * 3]
    with pytest.raises(ValueError, match="'w' is bfloat16"):
        noisy_mean({"w": summed.bfloat16()}, 1.0, [1.0], None)


def test_the_noise_is_rounded_once_together_with_the_sum():
    """A sum of 2**24 has no room for less than 2; noise of 0.4, rounded to its place, would be lost or doubled."""
    summed = {"w": torch.full((1, 200_000), 2.0**24)}
    actual = noisy_mean(summed, 0.4, [2.0**24], None)["w"].double()[0]
    steps = ((actual - 1) * 2.0**24).round()
    # The law of the rounded sum: below 2**24 the places are 1 apart, above it 2.
    expected = {-1.0: stats.norm.cdf(-0.5 / 0.4) - stats.norm.cdf(-1.5 / 0.4), 2.0: stats.norm.sf(1 / 0.4)}
    for step, share in expected.items():
        count = int((steps == step).sum())
        assert stats.binomtest(count, len(steps), share).pvalue > LEVEL


@pytest.mark.parametrize("source", [None, torch.Generator().manual_seed(0)], ids=["secure", "seeded"])
def test_a_noisy_sum_has_the_digits_of_double_precision_until_it_is_stored(source):
    noisy = with_noise(torch.full((1000,), 3.0), 0.1, source)
    assert noisy.dtype == torch.float64
    assert int((noisy != noisy.float()).sum()) > 900
