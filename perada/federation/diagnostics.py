# SPDX-License-Identifier: Apache-2.0
"""What PerAda's theorems are about (Xie et al., CVPR 2024), measured once a round where that is asked for.

Shape suffixes: C clients of a round, G global models, B images, K classes. A prediction is a vector of probabilities
(K,), as in section 5: of the softmax or, for several labels an image, of K sigmoids, which the theorems do not treat.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from perada.algorithms import PerAda
from perada.core.checks import OptionError, check_choice
from perada.core.ranks import Ranks
from perada.core.rounds import CohortBatch, Shares
from perada.core.states import State
from perada.engine.engine import Engine, client_losses
from perada.federation.cohort import Cohort
from perada.federation.scores import probabilities
from perada.federation.settings import FederationData, Settings
from perada.server import Updates
from perada.server.aggregate import client_weights, double

Diagnostic = Literal[
    "distillation_distance", "personal_distance", "ensemble_error", "gradient_norms", "update_norms", "lora_residual"
]
ALL: tuple[Diagnostic, ...] = get_args(Diagnostic)
ON_PUBLIC: frozenset[Diagnostic] = frozenset({"distillation_distance", "personal_distance"})
"""Those that read the public set."""
ROWS = 256
"""Public images that run at once."""


def check_asked(asked: bool | Sequence[Diagnostic]) -> None:
    """Refuse, by a ValueError, what is neither yes, no, nor a list of diagnostics."""
    if isinstance(asked, bool):
        return
    if isinstance(asked, str) or not isinstance(asked, Sequence):
        raise OptionError(
            f"diagnostics={asked!r} cannot be used; give true, false, or a list of {', '.join(ALL)}",
            name="diagnostics",
            value=asked,
        )
    for name in asked:
        check_choice("diagnostics", name, ALL)


def obstacles(settings: Settings, public: bool, test: bool, factors: str = "") -> dict[Diagnostic, str]:
    """Why a run cannot measure some diagnostics, and what to do.

    ``public`` and ``test`` say which images it has, ``factors`` what its clients lack to send factors of LoRA.
    """
    algorithm = settings.algorithm
    name = type(settings.algorithm).__name__
    lack: dict[Diagnostic, str] = {"lora_residual": factors} if factors else {}
    if not (algorithm.sends_updates and algorithm.global_model) or algorithm.is_ensemble:
        reason = f"{name} does not average what clients send into exactly one whole model; choose PerAda, FedAvg, Ditto"
        found: dict[Diagnostic, str] = dict.fromkeys(ALL, reason)
        if (
            algorithm.sends_updates
            and not algorithm.is_ensemble
            and not (settings.client_privacy or settings.secure_sums)
        ):
            del found["lora_residual"]  # needs no whole model
        return found | lack
    if settings.secure_sums is not None:
        return dict.fromkeys(ALL, "with secure_sums nobody may see a client's models; leave diagnostics out")
    if settings.client_privacy is not None:
        reason = "with client_privacy nobody may see a client's models, and no ledger counts it; leave diagnostics out"
        return dict.fromkeys(ALL, reason)
    found = lack
    if algorithm.inference != "personal":
        found["personal_distance"] = f"clients of {name} have no personal models; choose PerAda or Ditto"
    if not public:
        found |= dict.fromkeys(ON_PUBLIC, "the data has no public set; give one (public=...)")
    if not test:
        found["ensemble_error"] = "the data has no test images; give some (test=[...])"
    if settings.loss_scaling is not None:
        found["gradient_norms"] = "gradients need scaled losses in precision='16-mixed'; give 'bf16-mixed'"
    if settings.privacy is not None:
        found["gradient_norms"] = (
            "they would show gradients of private images without noise, which no ledger counts; measure them without "
            "privacy, on data that are not private"
        )
        found["personal_distance"] = (
            "it would show personal models, which the server's ledger does not count, in a log beside that ledger; "
            "measure it without privacy, on data that are not private"
        )
    return found


def choose(asked: bool | Sequence[Diagnostic], obstacles: Mapping[Diagnostic, str]) -> tuple[Diagnostic, ...]:
    """What to measure: all that can be, or what was asked for by name, which is a ValueError where it cannot be.

    >>> choose(True, {"gradient_norms": "they are private", "lora_residual": "no adapter of LoRA"})
    ('distillation_distance', 'personal_distance', 'ensemble_error', 'update_norms')
    """
    if isinstance(asked, bool):
        return tuple(name for name in ALL if asked and name not in obstacles)
    for name in asked:
        if name in obstacles:
            raise OptionError(
                f"diagnostics: {name} cannot be measured: {obstacles[name]}, or take it out of the list",
                name="diagnostics",
            )
    return tuple(name for name in ALL if name in asked)


@dataclass
class DiagnosticsPass:
    """Measures the models of a round on public and on test images.

    Every local and personal model runs on the process that holds it; sums over them are all that travels.
    """

    engine: Engine
    data: FederationData
    updates: Updates  # the local models θ_m (C, ...)
    globals: State  # global models (G, ...), the same on all processes; the last is w
    personal: State  # the personal models v_m (p, ...) of this process
    places: Sequence[int]  # where they stand among the round's clients
    clients: int  # of the round
    multilabel: bool

    def measure(self, names: Collection[str]) -> dict[str, float]:
        """The metrics asked for by ``names``; all processes call it."""
        found = self._distances(names) if ON_PUBLIC & set(names) else {}
        return found | (self._ensemble_error() if "ensemble_error" in names else {})

    def _distances(self, names: Collection[str]) -> dict[str, float]:
        """One pass over the public set.

        The ensemble distillation distance of a global model (section 5, before Theorem 1), from 0 to 2, is
        Φ = 1/n Σ_i ‖g(x_i) − 1/C Σ_m h_m(x_i)‖₁: of the aggregated model and, where there was distillation, of w. The
        distance of a personal model from w (Theorem 2, second term, without its factor 2), from 0 to 1, is
        1/n Σ_i min(1, ‖p_m(x_i) − g(x_i)‖₁).
        """
        size = self.data.public_size
        own = list(self.places)
        device = next(iter(self.globals.values())).device
        far = torch.zeros(_rows(self.globals), dtype=torch.float64)
        near = torch.zeros(self.clients, dtype=torch.float64)
        for rows in torch.split(torch.arange(size), ROWS):
            x = self.data.public_images(rows, device)
            g_GBK = probabilities(self.engine.shared_logits(self.globals, x), self.multilabel)
            if "distillation_distance" in names:
                _, h_BK = self._means(x, g_GBK.shape[-1])
                far += (g_GBK - h_BK).abs().sum((1, 2)).to(far)
            if own:
                p_CBK = probabilities(self.engine.shared_logits(self.personal, x), self.multilabel)
                near[own] += (p_CBK - g_GBK[-1]).abs().sum(-1).clamp(max=1).sum(1).to(near)
        self.updates.ranks.sum_([near])
        found = {}
        if "distillation_distance" in names:
            models = ["theory/averaged_distance", "theory/distilled_distance"]
            found = dict(zip(models, (far / size).tolist(), strict=False))  # without distillation only the first
        if "personal_distance" in names:
            found |= mean_and_spread("theory/personal_distance", near / size)
        return found

    def _ensemble_error(self) -> dict[str, float]:
        """One pass of the local models over the test images.

        The accuracy of their averaged logits, and the errors of the teachers as the proof of Theorem 1 has them (C.3):
        E (1 − 1/C Σ_m h_m(x)_y); for several labels an image the mean over labels.
        """
        right = missed = total = 0.0
        for x, y in self.data.test_batches(next(iter(self.globals.values())).device):
            classes = self.engine.shared_logits({k: v[:1] for k, v in self.globals.items()}, x[:1]).shape[-1]
            logits, h_BK = self._means(x, classes)
            if self.multilabel:
                hits = (logits > 0) == y.bool()
                errors = (h_BK - y).abs()
            else:
                hits = logits.argmax(-1) == y
                errors = 1 - h_BK.gather(1, y.unsqueeze(1))
            right = right + float(hits.sum())
            missed = missed + float(errors.sum())
            total = total + hits.numel()
        return {"theory/ensemble_accuracy": right / total, "theory/ensemble_error": missed / total}

    def _means(self, x: Tensor, classes: int) -> tuple[Tensor, Tensor]:
        """Means over the local models of all processes of their logits and of their predictions, (B, K) each."""
        sums = torch.zeros(2, len(x), classes, device=x.device)
        local = {key: value for key, value in self.updates.own.items() if key in self.globals}
        if _rows(local):
            logits = self.engine.shared_logits(local, x)
            sums = torch.stack([double(logits).sum(0), probabilities(logits, self.multilabel).sum(0)])
        sums = double(sums)
        self.updates.ranks.sum_([sums])
        means = sums / self.updates.clients
        return means[0], means[1]


def _rows(stack: State) -> int:
    return len(next(iter(stack.values()))) if stack else 0


def mean_and_spread(name: str, values: Tensor) -> dict[str, float]:
    """Mean and standard deviation over clients (C,), as metrics."""
    return {name: float(values.mean()), f"{name}_std": float(values.std(correction=0))}


def _per_client(values: Tensor, like: Tensor) -> Tensor:
    """Numbers (C,) in double precision, so that they multiply (C, ...)."""
    return double(values.to(like.device)).view(-1, *[1] * (like.dim() - 1))


def full_gradients(
    cohort: Cohort, settings: Settings, roles: Sequence[State], batches: Iterable[CohortBatch]
) -> tuple[list[State], Tensor]:
    """Gradient (C, ...), for each role, of every client's mean loss L_m over all of its training images.

    The numbers of images (C,) come with them. The model is in evaluation mode: L_m is then a function of the parameters
    alone. In each batch, the active clients are a prefix of the C; rows beyond a client's count are not looked at.
    """
    engine = cohort.engine
    tensor_names = cohort.tensor_names
    clients = len(next(iter(roles[0].values())))
    given = [(role, phase.name) for role in cohort.example_states for phase in cohort.phases]
    names = {
        name for asked in given for name in cohort.algorithm.trainable_keys(*asked, tensor_names, cohort.plan.round)
    }
    whole = [{key: state[key] for key in tensor_names.keys} for state in roles]
    stacks = [{k: v.detach().clone().requires_grad_(k in names) for k, v in state.items()} for state in whole]
    together = 1 if engine.kind == "loop" else settings.clients_per_chunk or clients
    rows = torch.zeros(clients, dtype=torch.float64)
    for batch in batches:
        rows[: len(batch.clients)] += torch.tensor(batch.counts)
        for start in range(0, len(batch.clients), together):
            counts = batch.counts[start : start + together]
            part = slice(start, start + len(counts))
            x = batch.x[part, : max(counts)]
            y = batch.y[part, : max(counts)]
            for stack in stacks:
                with torch.enable_grad():
                    logits = engine.logits({key: value[part] for key, value in stack.items()}, x, counts=counts)
                    losses = client_losses(logits, y, counts, settings.training.multilabel)
                    (losses * torch.tensor(counts, device=losses.device)).sum().backward()
    found = []
    for stack in stacks:
        leaves = {key: leaf for key, leaf in stack.items() if leaf.requires_grad}
        sums = {key: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for key, leaf in leaves.items()}
        found.append({key: double(total) / _per_client(rows, total) for key, total in sums.items()})
    return found, rows


def gradient_norms(
    cohort: Cohort,
    received: State,
    settings: Settings,
    batches: Iterable[CohortBatch],
    shares: Shares,
    ranks: Ranks,
) -> dict[str, float]:
    """Squared norms of the gradients that PerAda's convergence theorems bound, at the start of a round.

    ``theory/global_gradient`` is ‖∇L(w^t)‖², the term e = 0 of Theorem 3 (equations 18 to 20): L is the mean of the L_m
    over the round's clients, by the run's weights (1/M in the paper). ``theory/personal_gradient`` is
    ‖∇_v P_m(v_m^t, w^t)‖², the term s = 0 of Theorem 4, with P_m(v, w) = L_m(v) + λ/2 ‖v − w‖²: its mean over clients,
    and the standard deviation; only of PerAda and Ditto, whose objective that is. The gradients are full ones, of the
    clients of the ``cohort``, or a stand-in, who ``received`` these whole states and whose training images come in
    ``batches``, each once. All ranks call it.
    """
    algorithm = settings.algorithm
    here = shares.places
    clients = len(shares.plan.clients)
    roles = [received] + ([cohort.kept["personal"]] if isinstance(algorithm, PerAda) else [])
    gradients, rows = full_gradients(cohort, settings, roles, batches if here else ())
    own = len(here)
    images = torch.zeros(clients, dtype=torch.float64)
    images[here] = rows[:own]
    ranks.sum_([images])
    weights = client_weights(settings.weighting, images.int().tolist())[here]
    sent = {key: value for key, value in gradients[0].items() if key in cohort.received}
    total = {key: (value[:own] * _per_client(weights, value)).sum(0) for key, value in sent.items()}
    ranks.sum_(total.values())
    found = {"theory/global_gradient": float(sum(value.square().sum() for value in total.values()))}
    if isinstance(algorithm, PerAda):
        norms = torch.zeros(clients, dtype=torch.float64)
        for key, value in gradients[1].items():
            pull = double(cohort.kept["personal"][key]) - double(received[key])
            norms[here] += (value + algorithm.prox_strength * pull)[:own].flatten(1).square().sum(1).to(norms)
        ranks.sum_([norms])
        found |= mean_and_spread("theory/personal_gradient", norms)
    return found
