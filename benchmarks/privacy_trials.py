# SPDX-License-Identifier: Apache-2.0
"""What the audit of one run does not see: noise that is drawn again, streams that are one, noise that is rounded away.

**Differences.** Noise that two releases share is gone from their difference, whatever each shows alone. So two releases
are made in which the canary's gradient stands once, and their difference is audited. A canary shows itself once where
the learning rate is high: after one step it is fitted, and its gradient is 0. Two rounds of what is sent, the local and
the personal adapter of one round (which takes two steps, the personal one at the high rate), and two fits at the two
rates are compared. All else is as in :mod:`benchmarks.privacy_audit`.

**Streams.** Of many clients' streams no two may share a draw.

**Precision.** 20,000 images of one gradient give a sum of which, in half precision, the noise is less than the last
digit. The difference of two runs is that of their noises.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, get_args
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

HIGH, LOW = 100.0, 0.01
"""Learning rates at which a canary's gradient stands in one step, and in all of them."""
LARGE = 20_000
Pair = Literal["rounds", "roles", "fits"]
PrivacyEngine = Literal["folded", "opacus"]
PRECISIONS = (("32-true", torch.float32), ("bf16-mixed", torch.float32), ("32-true", torch.float64))


def privacy_trials(device: torch.device, repeats: int, quick: bool, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Run all trials, of perada as it is and with the fault that each is to see.

    Args:
        device: Not used: noise is drawn on the CPU.
        repeats: Not used.
        quick: 1,000 clients and 200,000 streams instead of 5,000 and a million.
        seed: Of data and runs.
    """
    quiet()
    clients = 1000 if quick else 5000
    for pair in get_args(Pair):
        for repeated in (False, True):
            audit = audit_difference(pair, 2.0, repeated, clients=clients, seed=seed)
            yield {
                "of": f"difference of two {pair}",
                "fault": "noise drawn again" if repeated else "none",
                "reported ε": round(audit.reported, 2),
                "ε at least": round(audit.bound, 2),
                "if Gaussian": round(audit.gaussian, 2),
                "trials": clients,
            }
    count = 200_000 if quick else 1_000_000
    for short in (False, True):
        yield {
            "of": "streams that share their first draw",
            "fault": "seeds of 32 bits" if short else "none",
            "found": shared_streams(count, short),
            "trials": count,
        }
    for engine in get_args(PrivacyEngine):
        for precision, dtype in PRECISIONS:
            for rounded in (False, True) if dtype == torch.float32 else (False,):
                lost, ratio = measured_noise(engine, precision, dtype, rounded)
                yield {
                    "of": f"noise of engine {engine}, {precision}, {str(dtype).removeprefix('torch.')}",
                    "fault": "added in bfloat16" if rounded else "none",
                    "found": f"{100 * lost:.0f} % of coordinates without, {ratio:.3f} of the stated std",
                    "trials": LARGE,
                }


def audit_difference(pair: Pair, sigma: float, repeated: bool, *, clients: int, seed: int = 0) -> Audit:
    """Audit the difference of two releases, in one of which the canary stands once more.

    Args:
        pair: Which two.
        sigma: Noise multiplier.
        repeated: Whether the second draws the noise of the first, unknown to the ledgers.
        clients: Number of trials.
        seed: Of data and runs.

    Returns:
        What the ledgers reported of both releases together, and what is proved.
    """
    present = torch.rand(clients, generator=generator(seed, "trials/coins")) < 0.5
    data = perada.FederatedData([canary_images(bool(held), seed) for held in present], num_classes=CLASSES)

    def run(lr_personal: float, lr_local: float, rounds: int, steps: int) -> tuple[perada.Run, list[np.ndarray]]:
        layer = nn.Linear(PIXELS, CLASSES, bias=False)
        nn.init.zeros_(layer.weight)
        recording = RecordingPerAda()
        done = perada.finetune(
            nn.Sequential(nn.Flatten(), layer),
            data,
            adapter="full",
            algorithm=recording,
            rounds=rounds,
            batch_size="full",
            local_steps=steps,
            lr_personal=lr_personal,
            lr_local=lr_local,
            # Two fits share their noise if they follow from one seed.
            privacy=perada.Privacy(noise_multiplier=sigma, delta=DELTA, secure_rng=pair == "fits" and not repeated),
            seed=seed,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
        )
        sent = [along_canary(next(iter(state.values()))) * IMAGES / lr_local for state in recording.sent]
        return done, sent

    fault: Callable[[], AbstractContextManager[object]] = (lambda: _drawn_again(pair)) if repeated else nullcontext
    with fault():
        if pair == "rounds":
            done, (first, second) = run(LOW, HIGH, rounds=2, steps=1)
            scores, spent = first - second, done.metrics["clients"]["privacy/server_epsilon"]
        elif pair == "roles":
            done, (local,) = run(HIGH, LOW, rounds=1, steps=2)
            (key,) = done.state("personal", 0)
            own = torch.stack([done.state("personal", client)[key] for client in range(clients)])
            scores = local - along_canary(own) * IMAGES / HIGH
            spent = done.metrics["clients"]["privacy/release_epsilon"]
        else:
            (_, (low,)), (_, (high,)) = (run(LOW, rate, rounds=1, steps=2) for rate in (LOW, HIGH))
            scores, spent = low - high, [history_epsilon({(sigma, 1.0): 4}, DELTA)]
    return Audit(max(spent), *lower_bounds(scores, present.numpy(), DELTA))


@contextmanager
def _drawn_again(pair: Pair) -> Iterator[None]:
    """Noise whose streams do not tell the two releases apart."""

    def again(seed: int, purpose: str, round: int, client: int) -> torch.Generator:
        return generator(seed, "noise" if pair == "roles" else purpose, 0 if pair == "rounds" else round, client)

    with patch.object(protection, "generator", again):
        yield


def shared_streams(count: int, short: bool) -> int:
    """Of so many streams of clients and rounds, those whose first draw another one has too.

    Args:
        count: Number of streams, a multiple of 1,000 clients.
        short: Whether torch's own seeding is used, which keeps 32 bits on the CPU.
    """

    def first(round: int, client: int) -> float:
        key = 0, "noise-local", round, client
        stream = torch.Generator().manual_seed(derive_seed(*key) % 2**63) if short else generator(*key)
        return float(torch.rand((), generator=stream, dtype=torch.float64))

    drawn = {first(*divmod(index, 1000)) for index in range(count)}
    return count - len(drawn)


def measured_noise(engine: PrivacyEngine, precision: str, dtype: torch.dtype, rounded: bool) -> tuple[float, float]:
    """The noise of a step of 20,000 images, from the difference of two runs.

    Args:
        engine: Of the private gradients.
        precision: Of the trainer.
        dtype: Of the trained weights.
        rounded: Whether the noise is added in bfloat16.

    Returns:
        Share of the coordinates that got none, and its standard deviation over the one that is stated.
    """
    layer = nn.Linear(500, CLASSES, bias=False)
    nn.init.zeros_(layer.weight)
    images = TensorDataset(torch.ones(LARGE, 1, 1, 500, dtype=dtype), torch.zeros(LARGE, dtype=torch.long))
    weights = []
    with _added_in_half() if rounded else nullcontext():
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
    return float((noise == 0).double().mean()), float(noise.square().mean().sqrt())


@contextmanager
def _added_in_half() -> Iterator[None]:
    plain = clipping.with_noise

    def with_noise(row: torch.Tensor, std: float, *others: Any) -> torch.Tensor:
        if not std:  # the trial of the network at set-up, which would see it
            return plain(row, std, *others)
        return (row.bfloat16() + plain(torch.zeros_like(row), std, *others).bfloat16()).to(row.dtype)

    with patch.object(clipping, "with_noise", with_noise):
        yield
