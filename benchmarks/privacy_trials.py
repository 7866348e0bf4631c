# SPDX-License-Identifier: Apache-2.0
"""Faults that the audit of one run does not detect: noise drawn twice, streams that coincide, noise rounded away.

**Differences.** Noise that two releases share is gone from their difference, whatever each shows alone. So two releases
are made in which the canary's gradient stands once, and their difference is audited. A canary shows itself once where
the learning rate is high: after one step it is fitted, and its gradient is 0. Two rounds of what is sent, the local and
the personal adapter of one round (which takes two steps, the personal one at the high rate), and two fits at the two
rates are compared. All else is as in :mod:`benchmarks.privacy_audit`.

**Streams.** Of many clients' streams no two may share a draw.

**Precision.** 20,000 images of one gradient give a sum of which, in half precision, the noise is less than the last
digit. The difference of two runs is that of their noises.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import perada
from benchmarks.privacy_audit import (
    CLASSES,
    DELTA,
    IMAGES,
    PIXELS,
    Audit,
    RecordingPerAda,
    along_canary,
    canary_images,
    lower_bounds,
    quiet,
)
from perada.core.seeding import derive_seed, generator
from perada.privacy import clipping, history_epsilon, protection

HIGH = 100.0
"""Learning rate at which a canary is fitted after one step, so that its gradient is in the first step only."""
LOW = 0.01
"""Learning rate at which the canary's gradient is in all steps."""
LARGE = 20_000
"""Number of images in a sum whose noise is below the last digit of half precision."""
Pair = Literal["rounds", "roles", "fits"]
PrivacyEngine = Literal["folded", "opacus"]
PRECISIONS = (("32-true", torch.float32), ("bf16-mixed", torch.float32), ("32-true", torch.float64))


def privacy_trials(device: torch.device, repeats: int, quick: bool, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Run all trials, each with perada as it is and with the fault that it is to detect.

    Args:
        device: Not used: noise is drawn on the CPU.
        repeats: Not used.
        quick: 1,000 clients and 200,000 streams instead of 5,000 and a million.
        seed: Of data and runs.
    """
    quiet()
    clients = 1000 if quick else 5000
    for pair in get_args(Pair):
        for is_repeated in (False, True):
            audit = audit_difference(pair, 2.0, is_repeated, clients=clients, seed=seed)
            yield {
                "of": f"difference of two {pair}",
                "fault": "noise drawn again" if is_repeated else "none",
                "reported ε": round(audit.reported, 2),
                "ε at least": round(audit.bound, 2),
                "if Gaussian": round(audit.gaussian, 2),
                "trials": clients,
            }
    count = 200_000 if quick else 1_000_000
    for is_short in (False, True):
        yield {
            "of": "streams that share their first draw",
            "fault": "seeds of 32 bits" if is_short else "none",
            "found": shared_streams(count, is_short),
            "trials": count,
        }
    for engine in get_args(PrivacyEngine):
        for precision, dtype in PRECISIONS:
            # The fault is tried in single precision only.
            faults = (False, True) if dtype == torch.float32 else (False,)
            for is_rounded in faults:
                noise = measured_noise(engine, precision, dtype, is_rounded)
                yield {
                    "of": f"noise of engine {engine}, {precision}, {str(dtype).removeprefix('torch.')}",
                    "fault": "added in bfloat16" if is_rounded else "none",
                    "found": f"{100 * noise.missing:.0f} % of coordinates without, {noise.std:.3f} of the stated std",
                    "trials": LARGE,
                }


@dataclass(frozen=True)
class Releases:
    """A run, and what each of its rounds sent of the canary.

    Attributes:
        run: The run.
        scores: For each round, the canary's component of each client's update, in units of one image's gradient.
    """

    run: perada.Run
    scores: list[np.ndarray]


def audit_difference(pair: Pair, sigma: float, is_repeated: bool, *, clients: int, seed: int = 0) -> Audit:
    """Audit the difference of two releases, of which one contains the canary's gradient once more than the other.

    Args:
        pair: The two releases: ``rounds`` of one run, ``roles`` of one round, or ``fits``.
        sigma: Noise multiplier.
        is_repeated: Whether the second release gets the noise of the first, which the ledgers do not know of.
        clients: Number of trials.
        seed: Seed of data and runs.

    Returns:
        The ε that the ledgers reported for both releases together, and the ε that is proved.
    """
    has_canary = torch.rand(clients, generator=generator(seed, "trials/coins")) < 0.5
    datasets = [canary_images(bool(is_in), seed) for is_in in has_canary]
    data = perada.FederatedData(datasets, num_classes=CLASSES)
    # Two fits share their noise if it follows from one seed.
    secure_rng = pair == "fits" and not is_repeated
    privacy = perada.Privacy(noise_multiplier=sigma, delta=DELTA, secure_rng=secure_rng)

    def release(lr_personal: float, lr_local: float, rounds: int, steps: int) -> Releases:
        layer = nn.Linear(PIXELS, CLASSES, bias=False)
        nn.init.zeros_(layer.weight)
        recording = RecordingPerAda()
        run = perada.finetune(
            nn.Sequential(nn.Flatten(), layer),
            data,
            adapter="full",
            algorithm=recording,
            rounds=rounds,
            batch_size="full",
            local_steps=steps,
            lr_personal=lr_personal,
            lr_local=lr_local,
            privacy=privacy,
            seed=seed,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
        )
        scores = [along_canary(next(iter(state.values()))) * IMAGES / lr_local for state in recording.sent]
        return Releases(run, scores)

    fault = _drawn_again(pair) if is_repeated else nullcontext()
    with fault:
        if pair == "rounds":
            releases = release(LOW, HIGH, rounds=2, steps=1)
            difference = releases.scores[0] - releases.scores[1]
            epsilon = max(releases.run.metrics["clients"]["privacy/server_epsilon"])
        elif pair == "roles":
            releases = release(HIGH, LOW, rounds=1, steps=2)
            personal_states = [releases.run.state("personal", client) for client in range(clients)]
            (key,) = personal_states[0]
            personal_weights = torch.stack([state[key] for state in personal_states])
            difference = releases.scores[0] - along_canary(personal_weights) * IMAGES / HIGH
            epsilon = max(releases.run.metrics["clients"]["privacy/release_epsilon"])
        else:
            low = release(LOW, LOW, rounds=1, steps=2)
            high = release(LOW, HIGH, rounds=1, steps=2)
            difference = low.scores[0] - high.scores[0]
            # No ledger knows both fits; each takes two steps.
            epsilon = history_epsilon({(sigma, 1.0): 4}, DELTA)
    bounds = lower_bounds(difference, has_canary.numpy(), DELTA)
    return Audit(epsilon, *bounds)


@contextmanager
def _drawn_again(pair: Pair) -> Iterator[None]:
    """Draw the noise of two releases from the same streams."""

    def same_generator(seed: int, purpose: str, round: int, client: int) -> torch.Generator:
        if pair == "roles":
            purpose = "noise"
        if pair == "rounds":
            round = 0
        return generator(seed, purpose, round, client)

    with patch.object(protection, "generator", same_generator):
        yield


def shared_streams(count: int, is_short: bool) -> int:
    """Return how many of the streams of clients and rounds share their first draw with another stream.

    Args:
        count: Number of streams, those of 1,000 clients in each round.
        is_short: Whether the streams are seeded as torch does, which uses 32 bits on the CPU.
    """
    first_draws: set[float] = set()
    for index in range(count):
        round, client = divmod(index, 1000)
        if is_short:
            seed = derive_seed(0, "noise-local", round, client) % 2**63
            stream = torch.Generator().manual_seed(seed)
        else:
            stream = generator(0, "noise-local", round, client)
        first_draws.add(float(torch.rand((), generator=stream, dtype=torch.float64)))
    return count - len(first_draws)


class MeasuredNoise(NamedTuple):
    """The noise of a step: the share of coordinates that got none, and its standard deviation over the stated one."""

    missing: float
    std: float


def measured_noise(engine: PrivacyEngine, precision: str, dtype: torch.dtype, is_rounded: bool) -> MeasuredNoise:
    """Measure the noise of a step of 20,000 images by the difference of two runs.

    Args:
        engine: Engine of the private gradients.
        precision: Precision of the trainer.
        dtype: dtype of the trained weights.
        is_rounded: Whether the noise is added in bfloat16.
    """
    layer = nn.Linear(500, CLASSES, bias=False)
    nn.init.zeros_(layer.weight)
    images = TensorDataset(torch.ones(LARGE, 1, 1, 500, dtype=dtype), torch.zeros(LARGE, dtype=torch.long))
    weights = []
    fault = _added_in_half() if is_rounded else nullcontext()
    with fault:
        for _ in range(2):
            run = perada.finetune(
                nn.Sequential(nn.Flatten(), layer).to(dtype),
                perada.FederatedData([images], num_classes=CLASSES),
                adapter="full",
                algorithm="fedavg",
                rounds=1,
                batch_size="full",
                lr_local=1.0,
                privacy=perada.Privacy(1.0, engine=engine, physical_batch_size=5000),
                precision=precision,
                accelerator="cpu",
                logger=False,
                enable_progress_bar=False,
            )
            weights.append(next(iter(run.state("global").values())).double())
    noise = (weights[0] - weights[1]) / 2**0.5 * LARGE
    missing = float((noise == 0).double().mean())
    return MeasuredNoise(missing, std=float(noise.square().mean().sqrt()))


@contextmanager
def _added_in_half() -> Iterator[None]:
    """Add noise in bfloat16."""
    original = clipping.with_noise

    def with_noise(row: torch.Tensor, std: float, *others: Any) -> torch.Tensor:
        # The dry run of the network at set-up has no noise, and would detect the rounding.
        if not std:
            return original(row, std, *others)
        noise = original(torch.zeros_like(row), std, *others)
        return (row.bfloat16() + noise.bfloat16()).to(row.dtype)

    with patch.object(clipping, "with_noise", with_noise):
        yield
