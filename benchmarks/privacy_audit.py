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

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
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
IMAGES = 8
"""Of a client."""
CLASSES = 3
PIXELS = 16
CANARY_PIXEL = 0
# With these the canary's gradient is longer than the bound 1, and its direction hardly changes.
BRIGHTNESS = 10.0
LR = 0.01
COUNT_NOISE = 1.5
Clipping = Literal["fixed", "adaptive"]
Fault = Literal["none", "noise / 4", "every batch full"]
LESS: tuple[Fault, ...] = ("none", "noise / 4")


class ErrorRates(NamedTuple):
    """Upper ends of confidence intervals of the rates of errors."""

    false_positive: float
    false_negative: float


class LowerBounds(NamedTuple):
    """Lower bounds on ε at 95 %: of any mechanism, and of a Gaussian one."""

    any_mechanism: float
    gaussian: float


@dataclass(frozen=True)
class Setting:
    """What is audited.

    Attributes:
        clipping: Clipping of whole clients; None for the privacy of images.
        noise_multiplier: σ.
        rate: Probability of an image to be in a batch.
        fault: What is wrong with the run, unknown to its ledgers.
    """

    clipping: Clipping | None
    noise_multiplier: float
    rate: float
    fault: Fault


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
    num_trials = 2000 if quick else 10_000
    settings = _settings()
    if quick:
        settings = settings[:3]
    for setting in settings:
        sigma = setting.noise_multiplier
        if setting.clipping is None:
            subject = "images"
            audits = audit_images(sigma, setting.rate, setting.fault, clients=num_trials, seed=seed, device=device)
        else:
            subject = f"clients, {setting.clipping} clipping"
            audit = audit_clients(sigma, setting.clipping, setting.fault, trials=num_trials, seed=seed)
            audits = {"client": audit}
        for ledger, audit in audits.items():
            yield {
                "of": subject,
                "σ": sigma,
                "q": setting.rate,
                "fault": setting.fault,
                "ledger": ledger,
                "reported ε": round(audit.reported, 2) if np.isfinite(audit.reported) else "inf",  # JSON has none
                "ε at least": round(audit.bound, 2),
                "if Gaussian": round(audit.gaussian, 2) if setting.rate == 1 else "",
                "trials": num_trials,
                "δ": DELTA,
                "seed": seed,
            }


def _settings() -> list[Setting]:
    """Return all settings: images without noise, in full batches and in sampled ones, then whole clients."""
    settings = [Setting(None, 0.0, 1.0, "none")]
    for sigma, fault in itertools.product((1.0, 2.0, 4.0), LESS):
        settings.append(Setting(None, sigma, 1.0, fault))
    for sigma, fault in itertools.product((1.0, 1.5, 2.0), FAULTS):
        settings.append(Setting(None, sigma, 1 / IMAGES, fault))
    for clipping_kind, z, fault in itertools.product(get_args(Clipping), (1.0, 2.0), LESS):
        settings.append(Setting(clipping_kind, z, 1.0, fault))
    return settings


def quiet() -> None:
    """Suppress Lightning's messages on every run."""
    logging.getLogger("pytorch_lightning.utilities.rank_zero").setLevel(logging.ERROR)


class RecordingPerAda(PerAda):
    """PerAda without distillation, which keeps what the clients sent."""

    def __init__(self) -> None:
        super().__init__(prox_strength=0.0, distill=False)
        self.sent: list[State] = []

    def server_step(self, server: ServerStep) -> State:
        """Keep the changes (C, ...) of a round's clients, and aggregate."""
        changes = {}
        for key, states in server.updates.gathered_all().items():
            changes[key] = states - server.previous[key]
        self.sent.append(changes)
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
    has_canary = torch.rand(clients, generator=generator(seed, "audit/coins")) < 0.5
    layer = nn.Linear(PIXELS, CLASSES, bias=False)
    nn.init.zeros_(layer.weight)
    algorithm = RecordingPerAda()
    batch_size = round(IMAGES * rate)
    is_gpu = device is not None and device.type == "cuda"
    with FAULTS[fault]():
        run = perada.finetune(
            nn.Sequential(nn.Flatten(), layer),
            perada.FederatedData([canary_images(bool(canary), seed) for canary in has_canary], num_classes=CLASSES),
            adapter="full",
            algorithm=algorithm,
            rounds=2,
            batch_size=batch_size,
            local_steps=1 if rate == 1 else 4,
            lr_personal=LR,
            lr_local=LR,
            privacy=perada.Privacy(noise_multiplier=sigma, delta=DELTA, secure_rng=False),
            seed=seed,
            accelerator="gpu" if is_gpu else "cpu",
            logger=False,
            enable_progress_bar=False,
        )
    (key,) = run.state("personal", 0)
    personal_changes = torch.stack([run.state("personal", client)[key] for client in range(clients)])
    sent_changes = torch.stack([changes[key] for changes in algorithm.sent]).sum(0)
    score_of_sent = along_canary(sent_changes.cpu()) * batch_size / LR
    score_of_personal = along_canary(personal_changes.cpu()) * batch_size / LR
    scores = {"server": score_of_sent, "release": score_of_sent + score_of_personal}
    audits = {}
    for ledger, score in scores.items():
        reported = max(run.metrics["clients"][f"privacy/{ledger}_epsilon"])
        bounds = lower_bounds(score, has_canary.numpy(), DELTA)
        audits[ledger] = Audit(reported, bounds.any_mechanism, bounds.gaussian)
    return audits


def canary_images(canary: bool, seed: int) -> Dataset[Any]:
    """Return a client's images: noise with a dark pixel, the same for all clients, then the canary or a black image."""
    x = torch.randn(IMAGES, 1, 1, PIXELS, generator=generator(seed, "audit/images"))
    x[..., CANARY_PIXEL] = 0
    x[-1] = 0
    x[-1, ..., CANARY_PIXEL] = BRIGHTNESS * canary
    return TensorDataset(x, torch.arange(IMAGES) % CLASSES)


def along_canary(change: torch.Tensor) -> np.ndarray:
    """Return how far changes (C, K, pixels) of the weights go down the canary's gradient at the start, (C,)."""
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
    options = perada.ClientPrivacy(
        noise_multiplier=z,
        delta=DELTA,
        secure_rng=False,
        clipping=kind,
        count_noise=COUNT_NOISE if kind == "adaptive" else None,
    )
    std = z if kind == "fixed" else client_level.split_noise(z, COUNT_NOISE)
    takes_part = torch.rand(trials, generator=generator(seed, "audit/clients")) < 0.5
    clients = range(4)
    num_clients = len(clients)
    scores = np.zeros(trials)
    received = {"weight": torch.zeros(num_clients, 2)}
    with FAULTS[fault]():
        for trial in range(trials):
            level = client_level.ClientLevel(options, seed * trials + trial, num_clients)
            first_change = [0.0, 9.0 if takes_part[trial] else torch.nan]
            sent = {"weight": torch.tensor([first_change] + [[0.5, 0.0]] * (num_clients - 1))}
            for round_number in range(2):
                norm_before = level.norm
                level.spend(level.round_costs(RoundPlan(round_number, tuple(clients), ())))
                mean = level.privatized(Updates(sent), received, round_number, clients)["weight"].mean(0)
                votes = -num_clients * np.log(level.norm / norm_before) / options.clip_lr
                # Each by the difference that the client makes, 1 and -1/2, over the variance of its noise.
                scores[trial] += num_clients * float(mean[1]) / norm_before / std**2 - votes / 2 / COUNT_NOISE**2
    bounds = lower_bounds(scores, takes_part.numpy(), DELTA)
    return Audit(max(level.epsilons(clients)["server"]), bounds.any_mechanism, bounds.gaussian)


def lower_bounds(scores: np.ndarray, present: np.ndarray, delta: float) -> LowerBounds:
    """Return lower bounds on ε at 95 %.

    If (ε, δ)-private, FPR + e^ε · FNR ≥ 1 − δ and e^ε · FPR + FNR ≥ 1 − δ (Kairouz et al., ICML 2015). A Gaussian
    mechanism of μ has Φ⁻¹(1 − FPR) − Φ⁻¹(FNR) ≤ μ at every threshold, and the least such μ is converted to ε.

    Args:
        scores: Of n independent trials, (n,).
        present: Which had the canary, (n,).
        delta: δ.
    """

    def epsilon_of_any(half: int, threshold: float) -> float:
        rates = error_rates(scores[half::2], present[half::2], threshold)
        first_bound = (1 - delta - rates.false_negative) / rates.false_positive
        second_bound = (1 - delta - rates.false_positive) / rates.false_negative
        return float(np.log(max(1.0, first_bound, second_bound)))

    def mu_of_gaussian(half: int, threshold: float) -> float:
        rates = error_rates(scores[half::2], present[half::2], threshold)
        return float(ndtri(1 - rates.false_positive) - ndtri(rates.false_negative))

    # A threshold that was chosen on the trials that it is judged by would prove too much.
    thresholds = np.quantile(scores[::2], np.linspace(0, 1, 401))
    threshold_of_any = max(thresholds, key=partial(epsilon_of_any, 0))
    threshold_of_gaussian = max(thresholds, key=partial(mu_of_gaussian, 0))
    mu = mu_of_gaussian(1, threshold_of_gaussian)
    return LowerBounds(epsilon_of_any(1, threshold_of_any), gaussian_epsilon(mu, delta))


def error_rates(scores: np.ndarray, present: np.ndarray, threshold: float) -> ErrorRates:
    """Return upper ends of both rates, each exceeded with a probability of at most 2.5 % (Clopper-Pearson)."""
    is_positive = scores > threshold
    return ErrorRates(_upper_end(is_positive[~present]), _upper_end(~is_positive[present]))


def _upper_end(is_error: np.ndarray) -> float:
    """Return the upper end of the confidence interval of an error's probability."""
    num_errors = int(is_error.sum())
    num_correct = len(is_error) - num_errors
    if num_correct == 0:
        return 1.0
    return float(betaincinv(num_errors + 1, num_correct, 0.975))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the ε with δ = Φ(−ε / μ + μ / 2) − e^ε · Φ(−ε / μ − μ / 2) (Dong, Roth and Su 2022, corollary 1)."""

    def excess(epsilon: float) -> float:
        return float(ndtr(-epsilon / mu + mu / 2) - np.exp(epsilon + log_ndtr(-epsilon / mu - mu / 2)) - delta)

    if mu <= 0 or excess(0) <= 0:
        return 0.0
    return float(brentq(excess, 0, 500))


@contextmanager
def _less_noise() -> Iterator[None]:
    """Add a quarter of the noise, for images and for clients."""
    original = clipping.with_noise

    def with_noise(row: torch.Tensor, std: float, *arguments: Any) -> torch.Tensor:
        return original(row, std / 4, *arguments)

    with patch.object(clipping, "with_noise", with_noise), patch.object(client_level, "with_noise", with_noise):
        yield


def _full_batches() -> AbstractContextManager[object]:
    """Put all images into every batch, whatever the sample rate."""

    def full(images: int, rate: float, steps: int, **options: Any) -> list[torch.Tensor]:
        return poisson_batches(images, 1.0, steps, **options)

    return patch("perada.data.batches.round_batches.poisson_batches", full)


FAULTS: dict[Fault, Callable[[], AbstractContextManager[object]]] = {
    "none": nullcontext,
    "noise / 4": _less_noise,
    "every batch full": _full_batches,
}
