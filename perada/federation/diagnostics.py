# SPDX-License-Identifier: Apache-2.0
"""Quantities in PerAda's theorems (Xie et al., CVPR 2024), measured once per round on request.

Shape suffixes: C clients of a round, G global models, B images, K classes. A prediction is a vector of probabilities
(K,), as in section 5: of the softmax or, for several labels an image, of K sigmoids, which the theorems do not treat.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from perada.core.checks import OptionError, check_choice, invalid_option
from perada.core.ranks import Ranks
from perada.core.rounds import CohortBatch, Shares
from perada.core.states import State, as_matrix, device_of, double, per_client, prefix, stack_size
from perada.engine.engine import Engine, client_losses
from perada.federation.chunk import LocalRound
from perada.federation.settings import FederationData, Settings
from perada.scores.accumulation import probabilities
from perada.server import Updates
from perada.server.aggregate import Weighting, client_weights
from perada.tasks import Task

Diagnostic = Literal[
    "distillation_distance", "personal_distance", "ensemble_error", "gradient_norms", "update_norms", "lora_residual"
]
ALL: tuple[Diagnostic, ...] = get_args(Diagnostic)
ON_PUBLIC: frozenset[Diagnostic] = frozenset({"distillation_distance", "personal_distance"})
"""Diagnostics that read the public set."""
IMAGES_AT_ONCE = 256
"""Largest number of public images in one forward pass."""


def check_diagnostics(choice: bool | Sequence[Diagnostic]) -> None:
    """Raise a ValueError unless ``choice`` is true, false or a list of diagnostics."""
    if isinstance(choice, bool):
        return
    if isinstance(choice, str) or not isinstance(choice, Sequence):
        raise invalid_option("diagnostics", choice, f"true, false or a list of {', '.join(ALL)}")
    for name in choice:
        check_choice("diagnostics", name, ALL)


def obstacles(
    settings: Settings, has_public_images: bool, has_test_images: bool, factors: str = ""
) -> dict[Diagnostic, str]:
    """Find the diagnostics that a run cannot measure, each with the reason and the remedy.

    Args:
        settings: The options of the run.
        has_public_images: Whether there are public images.
        has_test_images: Whether there are test images.
        factors: Reason why clients do not send LoRA factors; empty if they do.

    Returns:
        The obstacle of each diagnostic that has one.
    """
    algorithm = settings.algorithm
    name = type(settings.algorithm).__name__
    reasons: dict[Diagnostic, str] = {}
    if factors:
        reasons["lora_residual"] = factors
    averages_models = algorithm.sends_updates and algorithm.global_model and not algorithm.is_ensemble
    if not averages_models:
        reason = (
            f"{name} does not average what clients send into exactly one complete model; choose PerAda, FedAvg, Ditto"
        )
        of_all: dict[Diagnostic, str] = dict.fromkeys(ALL, reason)
        server_sees_updates = not (settings.client_privacy or settings.secure_sums)
        if algorithm.sends_updates and not algorithm.is_ensemble and server_sees_updates:
            # The factors of single layers are enough for it, without a complete model.
            del of_all["lora_residual"]
        return of_all | reasons
    if settings.secure_sums is not None:
        return dict.fromkeys(
            ALL, "with secure_sums nobody may see a client's models; leave diagnostics or secure_sums out"
        )
    if settings.client_privacy is not None:
        reason = (
            "with client_privacy nobody may see a client's models, and no ledger counts them; leave diagnostics "
            "or client_privacy out"
        )
        return dict.fromkeys(ALL, reason)
    if algorithm.inference != "personal":
        reasons["personal_distance"] = f"clients of {name} have no personal models; choose PerAda or Ditto"
    if not has_public_images:
        reasons |= dict.fromkeys(ON_PUBLIC, "the data has no public set; provide one (public=...)")
    if not has_test_images:
        reasons["ensemble_error"] = "the data has no test images; provide some (test=[...])"
    not_compared = _why_not_compared(settings.training.task)
    if not_compared:
        reasons |= dict.fromkeys(("distillation_distance", "personal_distance", "ensemble_error"), not_compared)
    if settings.loss_scaling is not None:
        reasons["gradient_norms"] = "gradients require loss scaling in precision='16-mixed'; set precision='bf16-mixed'"
    if settings.privacy is not None:
        reasons["gradient_norms"] = (
            "they would reveal gradients of private images without noise, which no ledger counts; measure them "
            "without privacy on public data"
        )
        reasons["personal_distance"] = (
            "it would reveal personal models, which the server's ledger does not count, in a log next to that ledger; "
            "measure it without privacy on public data"
        )
    return reasons


def _why_not_compared(task: Task) -> str:
    """Return why the predictions of a task are not compared; empty if they are."""
    if not task.has_classes:
        return "the models predict numbers, and it compares probabilities; measure update_norms"
    if task.per_pixel:
        return "the models predict pixels, and it compares the predictions of images; measure update_norms"
    return ""


def choose_diagnostics(
    choice: bool | Sequence[Diagnostic], obstacles: Mapping[Diagnostic, str]
) -> tuple[Diagnostic, ...]:
    """Return the diagnostics to measure.

    Args:
        choice: True for all that can be measured, False for none, or names.
        obstacles: Reason why a diagnostic cannot be measured, for each such diagnostic.

    Raises:
        OptionError: If a diagnostic that was requested by name cannot be measured.

    >>> choose_diagnostics(True, {"gradient_norms": "they are private", "lora_residual": "no adapter of LoRA"})
    ('distillation_distance', 'personal_distance', 'ensemble_error', 'update_norms')
    """
    if isinstance(choice, bool):
        return tuple(name for name in ALL if choice and name not in obstacles)
    for name in choice:
        if name in obstacles:
            raise OptionError(
                f"diagnostics: {name} cannot be measured: {obstacles[name]}, or remove it from the list",
                name="diagnostics",
            )
    return tuple(name for name in ALL if name in choice)


@dataclass
class DiagnosticsPass:
    """Measures the models of a round on public and on test images.

    Every local and personal model runs in the process that has it, and only sums over models are exchanged.

    Attributes:
        engine: Engine that runs the models.
        federation_data: Public and test images.
        updates: Local models θ_m (C, ...).
        globals: Global models (G, ...), which are the same in all processes; the last one is w.
        personal: Personal models v_m (p, ...) of this process.
        places: Places of these models among the round's clients.
        num_clients: Number of clients of the round.
        task: What the models predict.
    """

    engine: Engine
    federation_data: FederationData
    updates: Updates
    globals: State
    personal: State
    places: Sequence[int]
    num_clients: int
    task: Task

    def measure(self, selected_metrics: Collection[str]) -> dict[str, float]:
        """Measure diagnostics by their names. A collective: all processes must call this."""
        metrics: dict[str, float] = {}
        if ON_PUBLIC & set(selected_metrics):
            metrics |= self._measure_distances(selected_metrics)
        if "ensemble_error" in selected_metrics:
            metrics |= self._ensemble_error()
        return metrics

    @property
    def _model_device(self) -> torch.device:
        """Device of the models."""
        return device_of(self.globals)

    def _measure_distances(self, selected_metrics: Collection[str]) -> dict[str, float]:
        """Measure distances between models in one pass over the public set.

        The ensemble distillation distance of a global model (section 5, before Theorem 1), from 0 to 2, is
        Φ = 1/n Σ_i ‖g(x_i) − 1/C Σ_m h_m(x_i)‖₁. It is measured for the aggregated model and, with distillation, for w.
        The distance of a personal model from w (Theorem 2, second term, without its factor 2), from 0 to 1, is
        1/n Σ_i min(1, ‖p_m(x_i) − g(x_i)‖₁).
        """
        size = self.federation_data.public_size
        places = list(self.places)
        ensemble_distances = torch.zeros(stack_size(self.globals), dtype=torch.float64)
        personal_distances = torch.zeros(self.num_clients, dtype=torch.float64)
        for rows in torch.split(torch.arange(size), IMAGES_AT_ONCE):
            x = self.federation_data.public_images(rows, self._model_device)
            g_GBK = probabilities(self.engine.shared_logits(self.globals, x), self.task)
            if "distillation_distance" in selected_metrics:
                _, h_BK = self._mean_outputs(x, g_GBK.shape[-1])
                ensemble_distances += (g_GBK - h_BK).abs().sum((1, 2)).to(ensemble_distances)
            if places:
                p_CBK = probabilities(self.engine.shared_logits(self.personal, x), self.task)
                distances_CB = (p_CBK - g_GBK[-1]).abs().sum(-1).clamp(max=1)
                personal_distances[places] += distances_CB.sum(1).to(personal_distances)
        self.updates.ranks.sum_([personal_distances])
        metrics: dict[str, float] = {}
        if "distillation_distance" in selected_metrics:
            # The global models are the averaged one and, with distillation, the distilled one.
            metric_names = ["theory/averaged_distance", "theory/distilled_distance"]
            metrics = dict(zip(metric_names, (ensemble_distances / size).tolist(), strict=False))
        if "personal_distance" in selected_metrics:
            metrics |= mean_and_spread("theory/personal_distance", personal_distances / size)
        return metrics

    def _ensemble_error(self) -> dict[str, float]:
        """Measure the ensemble of the local models in one pass over the test images.

        Measured are the accuracy of their averaged logits, and the teachers' error as defined in the proof of Theorem 1
        (C.3): E (1 − 1/C Σ_m h_m(x)_y), averaged over labels if images have several.
        """
        total_hits = 0.0
        total_errors = 0.0
        total = 0.0
        for x, y in self.federation_data.test_batches(self._model_device):
            # A process without local models gets the number of classes from a global model.
            averaged_model = prefix(self.globals, 1)
            classes = self.engine.shared_logits(averaged_model, x[:1]).shape[-1]
            logits, h_BK = self._mean_outputs(x, classes)
            has_label = self.task.known(y)
            hits = (self.task.predicted(logits) == y.long()) & has_label
            errors = self.task.errors(h_BK, y)
            total_hits += float(hits.sum())
            total_errors += float(errors.sum())
            total += float(has_label.sum())
        return {"theory/ensemble_accuracy": total_hits / total, "theory/ensemble_error": total_errors / total}

    def _mean_outputs(self, x: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
        """Average the logits and the probabilities of the local models of all processes. A collective.

        Args:
            x: Images (B, ...).
            num_classes: Number K of classes.

        Returns:
            Mean logits (B, K) and mean probabilities (B, K).
        """
        sums = torch.zeros(2, len(x), num_classes, device=x.device)
        local = {name: value for name, value in self.updates.local_rows.items() if name in self.globals}
        if local and stack_size(local):
            logits = self.engine.shared_logits(local, x)
            sums = torch.stack([double(logits).sum(0), probabilities(logits, self.task).sum(0)])
        sums = double(sums)
        self.updates.ranks.sum_([sums])
        mean_logits, mean_predictions = sums / self.updates.num_clients
        return mean_logits, mean_predictions


def mean_and_spread(name: str, values: Tensor) -> dict[str, float]:
    """Compute the mean and the standard deviation over clients (C,), as metrics."""
    return {name: float(values.mean()), f"{name}_std": float(values.std(correction=0))}


def _per_client(values: Tensor, like: Tensor) -> Tensor:
    """View numbers (C,) so that they broadcast to ``like`` (C, ...), in double precision on its device."""
    return per_client(double(values.to(like.device)), like)


@dataclass(frozen=True)
class FullGradients:
    """Gradients of the mean losses of C clients, each over all of its training images.

    Attributes:
        at_points: The gradients (C, ...) at each of several states.
        num_images: Numbers of training images, (C,).
    """

    at_points: list[State]
    num_images: Tensor


def full_gradients(
    local_round: LocalRound,
    settings: Settings,
    points: Sequence[State],
    batches: Iterable[CohortBatch],
) -> FullGradients:
    """Compute the gradient of every client's mean loss L_m over all of its training images.

    The model is in evaluation mode, in which L_m is a function of the parameters only.

    Args:
        local_round: The clients, with their trained tensors.
        settings: Options of the run.
        points: States (C, ...) at which gradients are computed, such as the global state and the personal states.
        batches: Batches with each training image once.
    """
    engine = local_round.trainer.engine
    tensor_names = local_round.trainer.tensor_names
    clients = stack_size(points[0])
    trained: set[str] = set()
    for role in local_round.opened:
        for phase in local_round.phases:
            trained.update(local_round.algorithm.trainable_keys(role, phase.name, tensor_names, local_round.plan.round))
    gradient_sums: list[State] = []
    for point in points:
        gradient_sums.append({name: torch.zeros_like(point[name]) for name in tensor_names.keys if name in trained})
    num_images = torch.zeros(clients, dtype=torch.float64)
    for batch in batches:
        rows = slice(batch.start, batch.stop)
        num_images[rows] += torch.tensor(batch.counts)
        width = max(batch.counts)
        x = batch.x[:, :width]
        y = batch.y[:, :width]
        for point, sums_of_point in zip(points, gradient_sums, strict=True):
            models = {name: point[name][rows].detach() for name in tensor_names.keys}
            leaves = {name: models[name].clone().requires_grad_() for name in sums_of_point}
            with torch.enable_grad():
                logits = engine.logits(models | leaves, x, counts=batch.counts)
                losses = client_losses(logits, y, batch.counts, settings.training.task, batch.class_counts)
                # Losses are summed over images, since batches have different sizes.
                (losses * torch.tensor(batch.counts, device=losses.device)).sum().backward()
            for name, leaf in leaves.items():
                if leaf.grad is not None:
                    sums_of_point[name][rows] += leaf.grad
    gradients = []
    for sums_of_point in gradient_sums:
        means = {name: double(total) / _per_client(num_images, total) for name, total in sums_of_point.items()}
        gradients.append(means)
    return FullGradients(at_points=gradients, num_images=num_images)


def gradient_norms(
    local_round: LocalRound,
    received: State,
    settings: Settings,
    batches: Iterable[CohortBatch],
    shares: Shares,
    ranks: Ranks,
) -> dict[str, float]:
    """Measure squared norms of the gradients that PerAda's convergence theorems bound, at the start of a round.

    ``theory/global_gradient`` is ‖∇L(w^t)‖², the term e = 0 of Theorem 3 (equations 18 to 20), where L is the mean of
    the L_m over the round's clients with the run's weights (1/M in the paper). ``theory/personal_gradient`` is ‖∇_v
    P_m(v_m^t, w^t)‖², the term s = 0 of Theorem 4, with P_m(v, w) = L_m(v) + λ/2 ‖v − w‖². Its mean and standard
    deviation over clients are measured for algorithms that minimise P_m (:attr:`.Algorithm.personal_pull`), as PerAda
    and Ditto do. Gradients are over all images.

    A collective: all ranks must call this.

    Args:
        local_round: The clients of this rank or, without any, a stand-in whose gradients are left out.
        received: Complete states (C, ...) that they received.
        settings: Options of the run.
        batches: Batches with each of their training images once.
        shares: Division of the round's clients among the ranks.
        ranks: The processes that share the work.
    """
    algorithm = settings.algorithm
    points = [received]
    if algorithm.personal_pull is not None:
        points.append(local_round.client_state["personal"])
    # A stand-in has no batches of its own.
    local_batches = batches if shares.places else ()
    gradients = full_gradients(local_round, settings, points, local_batches)
    square = _squared_mean_gradient(gradients, local_round.received, settings.weighting, shares, ranks)
    metrics = {"theory/global_gradient": square}
    if algorithm.personal_pull is not None:
        personal = local_round.client_state["personal"]
        personal_gradients = {}
        for name, value in gradients.at_points[1].items():
            pull = double(personal[name]) - double(received[name])
            personal_gradients[name] = value + algorithm.personal_pull * pull
        squares = _squared_norms(personal_gradients, shares, ranks)
        metrics |= mean_and_spread("theory/personal_gradient", squares)
    return metrics


def _squared_mean_gradient(
    gradients: FullGradients, tensor_names: Collection[str], weighting: Weighting, shares: Shares, ranks: Ranks
) -> float:
    """Compute the squared norm of the clients' mean gradient at the first point. A collective.

    Args:
        gradients: Gradients of this rank's clients.
        tensor_names: Names of the tensors that count.
        weighting: How clients are weighted.
        shares: Division of the round's clients among the ranks.
        ranks: The processes that share the work.
    """
    places = shares.places
    num_local_clients = len(places)
    num_images = torch.zeros(len(shares.plan.clients), dtype=torch.float64)
    num_images[places] = gradients.num_images[:num_local_clients]
    ranks.sum_([num_images])
    weights = client_weights(weighting, num_images.int().tolist())[places]
    mean_gradient = {}
    for name, value in gradients.at_points[0].items():
        if name in tensor_names:
            mean_gradient[name] = (value[:num_local_clients] * _per_client(weights, value)).sum(0)
    ranks.sum_(mean_gradient.values())
    return float(sum(value.square().sum() for value in mean_gradient.values()))


def _squared_norms(gradients: State, shares: Shares, ranks: Ranks) -> Tensor:
    """Compute the squared norms (C,) of all clients' gradients, of which this rank has (c, ...). A collective."""
    places = shares.places
    squares = torch.zeros(len(shares.plan.clients), dtype=torch.float64)
    for value in gradients.values():
        squares[places] += as_matrix(value[: len(places)]).square().sum(1).to(squares)
    ranks.sum_([squares])
    return squares
