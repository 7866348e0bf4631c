# SPDX-License-Identifier: Apache-2.0
"""An audit of the reported ε: who can tell which clients hold a canary proves a lower bound on it.

Half of a run's clients, drawn by coin flips, hold a canary: an image that lights up a pixel which is dark in all
others. The rest hold a black image in its place. Through a linear layer without bias that has no gradient, so they are
as with one image less, while their number of images, which is taken as known, stays the same. Clients do not depend on
one another: one run is as many trials as it has clients. Nothing but the canary and the noise moves the weights of its
pixel, and the score is how far they went along the canary's clipped gradient. What is scored is what the ledgers are
about: what a client sent (``server``), and that and its personal state together (``release``).

Whoever says "canary" above a threshold errs at two rates, which (ε, δ)-privacy keeps from both being small. The
threshold is chosen on one half of the trials. The rates are those of the other half, at the upper ends of their
Clopper-Pearson intervals, which hold together at 95 %. Canaries with gradients of their own, and the bound for Gaussian
mechanisms, are as in Nasr et al. (USENIX Security 2023, https://arxiv.org/abs/2302.07956).
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple, get_args
from unittest.mock import patch

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import betaincinv, log_ndtr, ndtr, ndtri
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import perada
from perada.algorithms import PerAda, ServerStep
from perada.core.rounds import RoundPlan
from perada.core.seeding import generator
from perada.core.states import State
from perada.privacy import client_level, clipping
from perada.privacy.sampling import poisson_batches
from perada.server import Updates

DELTA = 1e-3
IMAGES, CLASSES, PIXELS, CANARY_PIXEL = 8, 3, 16, 0
BRIGHT, LR = 10.0, 0.01  # the canary's gradient is longer than the bound 1, and its direction hardly changes
COUNT_NOISE = 1.5
Clipping = Literal["fixed", "adaptive"]
Fault = Literal["none", "noise / 4", "every batch full"]
LESS: tuple[Fault, ...] = ("none", "noise / 4")


class Audit(NamedTuple):
    """What a ledger reported, and what is proved of it.

    Attributes:
        reported: ε.
        bound: Lower bound on ε at 95 %, whatever the mechanism is.
        gaussian: The same for a Gaussian mechanism: images in full batches, whole clients. It is mostly higher.
    """

    reported: float
    bound: float
    gaussian: float


def privacy_audit(device: torch.device, repeats: int, quick: bool, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Audit single images in ``perada.finetune`` and whole clients in ``ClientLevel``, honest ones and faulty ones.

    Args:
        device: Where the runs go.
        repeats: Not used.
        quick: 2,000 trials in each audit instead of 10,000, and the first settings only.
        seed: Of data and runs.
    """
    quiet()
    settings: list[tuple[Clipping | None, float, float, Fault]] = [(None, 0.0, 1.0, "none")]
    settings += [(None, sigma, 1.0, fault) for sigma in (1.0, 2.0, 4.0) for fault in LESS]
    settings += [(None, sigma, 1 / IMAGES, fault) for sigma in (1.0, 1.5, 2.0) for fault in FAULTS]
    settings += [(kind, z, 1.0, fault) for kind in get_args(Clipping) for z in (1.0, 2.0) for fault in LESS]
    clients = 2000 if quick else 10_000
    for kind, sigma, rate, fault in settings[: 3 if quick else None]:
        if kind is None:
            audits = audit_images(sigma, rate, fault, clients=clients, seed=seed, device=device)
        else:
            audits = {"client": audit_clients(sigma, kind, fault, trials=clients, seed=seed)}
        for ledger, audit in audits.items():
            yield {
                "of": "images" if kind is None else f"clients, {kind} clipping",
                "σ": sigma,
                "q": rate,
                "fault": fault,
                "ledger": ledger,
                "reported ε": round(audit.reported, 2) if np.isfinite(audit.reported) else "inf",  # JSON has none
                "ε at least": round(audit.bound, 2),
                "if Gaussian": round(audit.gaussian, 2) if rate == 1 else "",
                "trials": clients,
                "δ": DELTA,
                "seed": seed,
            }


def quiet() -> None:
    """Leave out Lightning's greetings of every run."""
    logging.getLogger("pytorch_lightning.utilities.rank_zero").setLevel(logging.ERROR)


class Watched(PerAda):
    """PerAda without distillation, which keeps what the clients sent."""

    def __init__(self) -> None:
        super().__init__(prox_strength=0.0, distill=False)
        self.sent: list[State] = []

    def server_step(self, server: ServerStep) -> State:
        """Keep the changes (C, ...) of a round's clients, and go on as PerAda does."""
        self.sent.append({key: value - server.previous[key] for key, value in server.updates.gathered_all().items()})
        return super().server_step(server)


def audit_images(
    sigma: float,
    rate: float = 1.0,
    fault: Fault = "none",
    *,
    clients: int,
    seed: int = 0,
    device: torch.device | None = None,
) -> dict[str, Audit]:
    """Run ``perada.finetune`` for two rounds, in which half of the clients hold a canary.

    Args:
        sigma: Noise multiplier.
        rate: Probability of an image to be in a batch. With 1 a round has one local step, else four.
        fault: What is wrong with the run, unknown to its ledgers.
        clients: Number of trials.
        seed: Of data and run.
        device: CUDA or the CPU.

    Returns:
        The audit of each ledger.
    """
    present = torch.rand(clients, generator=generator(seed, "audit/coins")) < 0.5
    layer = nn.Linear(PIXELS, CLASSES, bias=False)
    nn.init.zeros_(layer.weight)
    watched, rows = Watched(), round(IMAGES * rate)
    with FAULTS[fault]():
        run = perada.finetune(
            nn.Sequential(nn.Flatten(), layer),
            perada.FederatedData([canary_images(bool(held), seed) for held in present], num_classes=CLASSES),
            adapter="full",
            algorithm=watched,
            rounds=2,
            batch_size=rows,
            local_steps=1 if rate == 1 else 4,
            lr_personal=LR,
            lr_local=LR,
            privacy=perada.Privacy(noise_multiplier=sigma, delta=DELTA, secure_rng=False),
            seed=seed,
            accelerator="gpu" if device is not None and device.type == "cuda" else "cpu",
            logger=False,
            enable_progress_bar=False,
        )
    (key,) = run.state("personal", 0)
    personal = torch.stack([run.state("personal", client)[key] for client in range(clients)])
    local = torch.stack([sent[key] for sent in watched.sent]).sum(0)
    server, own = (along_canary(change.cpu()) * rows / LR for change in (local, personal))
    spent = {name: max(run.metrics["clients"][f"privacy/{name}_epsilon"]) for name in ("server", "release")}
    scores = {"server": server, "release": server + own}
    return {name: Audit(spent[name], *lower_bounds(scores[name], present.numpy(), DELTA)) for name in spent}


def canary_images(canary: bool, seed: int) -> Dataset[Any]:
    """A client's images: noise with a dark pixel, the same for all clients, then the canary or a black image."""
    x = torch.randn(IMAGES, 1, 1, PIXELS, generator=generator(seed, "audit/images"))
    x[..., CANARY_PIXEL] = 0
    x[-1] = 0
    x[-1, ..., CANARY_PIXEL] = BRIGHT * canary
    return TensorDataset(x, torch.arange(IMAGES) % CLASSES)


def along_canary(change: torch.Tensor) -> np.ndarray:
    """How far changes (C, K, pixels) of the weights go down the canary's gradient at the start, (C,)."""
    gradient = torch.full((CLASSES,), 1 / CLASSES, dtype=torch.float64)
    gradient[(IMAGES - 1) % CLASSES] -= 1
    return np.asarray(-(change[..., CANARY_PIXEL].double() @ (gradient / gradient.norm())))


def audit_clients(z: float, kind: Clipping, fault: Fault = "none", *, trials: int, seed: int = 0) -> Audit:
    """Make two rounds of four clients private, in half of the trials without the part of one of them.

    That client sends a change along a direction of its own, or what is not finite, which is neither summed nor counted.
    The score is the server's mean along that direction and, with adaptive clipping, how the published norm moved.

    Args:
        z: Noise multiplier.
        kind: Of clipping, ``fixed`` or ``adaptive``.
        fault: What is wrong, unknown to the ledger.
        trials: Number of trials.
        seed: Of coins and noise.
    """
    counted = {"clipping": kind, "count_noise": COUNT_NOISE}
    options = perada.ClientPrivacy(noise_multiplier=z, delta=DELTA, secure_rng=False, **counted)
    std = z if kind == "fixed" else client_level.split_noise(z, COUNT_NOISE)
    present = torch.rand(trials, generator=generator(seed, "audit/clients")) < 0.5
    clients, scores = range(4), np.zeros(trials)
    received = {"weight": torch.zeros(len(clients), 2)}
    with FAULTS[fault]():
        for trial, held in enumerate(present):
            level = client_level.ClientLevel(options, seed * trials + trial, len(clients))
            sent = {"weight": torch.tensor([[0.0, 9.0 if held else torch.nan]] + [[0.5, 0.0]] * (len(clients) - 1))}
            for round in range(2):
                before = level.norm
                level.spend(level.round_costs(RoundPlan(round, tuple(clients), ())))
                mean = level.privatized(Updates(sent), received, round, clients)["weight"].mean(0)
                votes = -len(clients) * np.log(level.norm / before) / options.clip_lr
                # Each by the difference that the client makes, 1 and -1/2, over the variance of its noise.
                scores[trial] += len(clients) * float(mean[1]) / before / std**2 - votes / 2 / COUNT_NOISE**2
    return Audit(max(level.epsilons(clients)["server"]), *lower_bounds(scores, present.numpy(), DELTA))


def lower_bounds(scores: np.ndarray, present: np.ndarray, delta: float) -> tuple[float, float]:
    """Lower bounds on ε at 95 %: of any mechanism, and of a Gaussian one.

    If (ε, δ)-private, FPR + e^ε · FNR ≥ 1 − δ and e^ε · FPR + FNR ≥ 1 − δ (Kairouz et al., ICML 2015). A Gaussian
    mechanism of μ has Φ⁻¹(1 − FPR) − Φ⁻¹(FNR) ≤ μ at every threshold, and the least such μ is converted to ε.

    Args:
        scores: Of n independent trials, (n,).
        present: Which had the canary, (n,).
        delta: δ.
    """

    def measure(gaussian: bool, half: int, threshold: float) -> float:
        fpr, fnr = error_rates(scores[half::2], present[half::2], threshold)
        if gaussian:
            return float(ndtri(1 - fpr) - ndtri(fnr))
        return float(np.log(max(1.0, (1 - delta - fnr) / fpr, (1 - delta - fpr) / fnr)))

    thresholds = np.quantile(scores[::2], np.linspace(0, 1, 401))
    any_best, best = (max(thresholds, key=partial(measure, gaussian, 0)) for gaussian in (False, True))
    return measure(False, 1, any_best), gaussian_epsilon(measure(True, 1, best), delta)


def error_rates(scores: np.ndarray, present: np.ndarray, threshold: float) -> tuple[float, float]:
    """Upper ends of false positive and false negative rate, each passed with a probability of at most 2.5 %."""
    guessed = scores > threshold
    rates = []
    for wrong in (guessed[~present], ~guessed[present]):
        errors = int(wrong.sum())
        rates.append(1.0 if errors == len(wrong) else float(betaincinv(errors + 1, len(wrong) - errors, 0.975)))
    return rates[0], rates[1]


def gaussian_epsilon(mu: float, delta: float) -> float:
    """ε with δ = Φ(−ε / μ + μ / 2) − e^ε · Φ(−ε / μ − μ / 2) (Dong, Roth and Su 2022, corollary 1)."""

    def excess(epsilon: float) -> float:
        return float(ndtr(-epsilon / mu + mu / 2) - np.exp(epsilon + log_ndtr(-epsilon / mu - mu / 2)) - delta)

    return float(brentq(excess, 0, 500)) if mu > 0 and excess(0) > 0 else 0.0


@contextmanager
def _less_noise() -> Iterator[None]:
    """A quarter of the noise, for images and for clients."""
    plain = clipping.with_noise

    def with_noise(row: torch.Tensor, std: float, *others: Any) -> torch.Tensor:
        return plain(row, std / 4, *others)

    with patch.object(clipping, "with_noise", with_noise), patch.object(client_level, "with_noise", with_noise):
        yield


def _full_batches() -> AbstractContextManager[object]:
    """All images in every batch, whatever the sample rate is said to be."""

    def full(images: int, rate: float, steps: int, **of: Any) -> list[torch.Tensor]:
        return poisson_batches(images, 1.0, steps, **of)

    return patch("perada.data.batches.samples.poisson_batches", full)


FAULTS: dict[Fault, Callable[[], AbstractContextManager[object]]] = {
    "none": nullcontext,
    "noise / 4": _less_noise,
    "every batch full": _full_batches,
}
