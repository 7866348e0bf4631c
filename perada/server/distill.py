# SPDX-License-Identifier: Apache-2.0
"""Ensemble distillation of the clients' models into the server's on unlabelled images (PerAda, Algorithm 1, 19–21)."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from perada.core.ranks import Ranks
from perada.core.states import State, expand, send
from perada.engine.engine import Engine
from perada.engine.loss_scaling import LossScales
from perada.engine.masked_optimizers import MaskedAdam, MaskedOptimizer, MaskedSGD
from perada.server.aggregate import Updates, double

ServerOptimizer = Literal["adam", "sgd"]
ONLY = slice(0, 1)
"""The student among the states that are scaled."""


def ensemble_logits(engine: Engine, teachers: State, x: Tensor) -> Tensor:
    """Mean over C teachers of their logits on the same images, in evaluation mode.

    Args:
        engine: Runs the states.
        teachers: Stack (C, ...).
        x: Images (B, channels, height, width).

    Returns:
        Logits (B, K): the logits are averaged, not the probabilities, in double precision before they are rounded.
    """
    logits = engine.shared_logits(teachers, x)
    return double(logits).mean(0).to(logits)


def distillation_loss(student: Tensor, teacher: Tensor, temperature: float = 1.0, multilabel: bool = False) -> Tensor:
    """Kullback-Leibler divergence of the student from the teacher, mean over images.

    Args:
        student: Logits (B, K).
        teacher: Logits (B, K).
        temperature: Both logits are divided by it; the loss is multiplied by its square (Hinton et al., 2015).
        multilabel: Each of the K logits is a Bernoulli probability of its own; their divergences are averaged over K.

    Returns:
        A scalar.

    >>> distillation_loss(torch.ones(2, 3), torch.zeros(2, 3)).item()
    0.0
    """
    student, teacher = student / temperature, teacher / temperature
    if not multilabel:
        logs = F.log_softmax(student, -1), F.log_softmax(teacher, -1)
        return F.kl_div(*logs, log_target=True, reduction="batchmean") * temperature**2
    # KL(Bernoulli(p) || Bernoulli(q)) = cross-entropy(p, q) - entropy(p)
    p = teacher.sigmoid()
    cross_entropy = F.binary_cross_entropy_with_logits(student, p)
    return (cross_entropy - F.binary_cross_entropy_with_logits(teacher, p)) * temperature**2


@dataclass(frozen=True)
class Distillation:
    """How the server distils.

    Attributes:
        steps: Steps R a round; 0 switches distillation off.
        batch_size: Public images a step, or ``"full"``.
        lr: Learning rate η_g.
        optimizer: ``"adam"`` or ``"sgd"``, started afresh each round.
        schedule: ``"cosine"`` lets the rate fall to zero over the R steps of a round, or ``"constant"``.
        temperature: Softens both distributions.
        until_round: Rounds from this one on (counted from 0) are not distilled; ``None`` distils every round.
        validate_every: Score the student every so many steps, and after the last one, on the labelled
            ``server_validation`` set, keep the best and fall back to the average where none is better; 0 (the paper
            assumes no labels on the server) never does.
        share_steps: Divide the images of each step among several devices and add up their gradients, which pays for
            large batches. Results are then those of one device but for rounding, which Adam makes larger wherever a
            gradient is nearly zero; without it all devices take all steps alike.
    """

    steps: int = 500
    batch_size: int | Literal["full"] = 128
    lr: float = 1e-3
    optimizer: ServerOptimizer = "adam"
    schedule: Literal["cosine", "constant"] = "cosine"
    temperature: float = 1.0
    until_round: int | None = None
    validate_every: int = 0
    share_steps: bool = False

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        for name, bad, remedy in (
            ("steps", not _whole(self.steps, 0), "give 0 to switch distillation off, or a positive number"),
            ("batch_size", not _whole(self.batch_size, 1) and self.batch_size != "full", "give 1 or more, or 'full'"),
            ("lr", not _positive(self.lr), "give a positive learning rate"),
            ("temperature", not _positive(self.temperature), "give a positive temperature"),
            ("until_round", not _whole(self.until_round, 0) and self.until_round is not None, "give 0 or more"),
            ("optimizer", self.optimizer not in ("adam", "sgd"), "choose 'adam' or 'sgd'"),
            ("schedule", self.schedule not in ("cosine", "constant"), "choose 'cosine' or 'constant'"),
            ("validate_every", not _whole(self.validate_every, 0), "give 0 for never, or a number of steps"),
        ):
            if bad:
                raise ValueError(f"distillation: {name}={getattr(self, name)!r} cannot be used; {remedy}")

    def active(self, round: int) -> bool:
        """Whether round ``round`` (from 0) is distilled."""
        return self.steps > 0 and (self.until_round is None or round < self.until_round)

    def learning_rate(self, step: int) -> float:
        """Learning rate of step ``step`` (from 0) of a round.

        >>> [round(Distillation(steps=2, lr=1.0).learning_rate(step), 3) for step in range(2)]
        [1.0, 0.5]
        """
        if self.schedule == "constant":
            return self.lr
        return self.lr * (1 + math.cos(math.pi * step / self.steps)) / 2

    def run(
        self,
        engine: Engine,
        student: State,
        parameters: tuple[str, ...],
        batches: Iterator[tuple[Tensor, Tensor]],
        *,
        multilabel: bool = False,
        validate: Callable[[State], float] | None = None,
        average_from: float | None = None,
        scales: LossScales | None = None,
        shared: tuple[Ranks, int] | None = None,
    ) -> State:
        """Distil into ``student``.

        The student runs in evaluation mode: public images do not move its running statistics, and nothing is dropped.

        Args:
            engine: Runs the student.
            student: State to start from; it is not changed.
            parameters: Names of the tensors to train.
            batches: Images (B, channels, height, width) and the teachers' mean logits (B, K), a pair a step.
            multilabel: See :func:`distillation_loss`.
            validate: Score of a state, higher is better; used as :attr:`validate_every` says.
            average_from: The result is the mean of the student's states after the steps whose index is at least this
                share of :attr:`steps`, instead of the last state (stochastic weight averaging).
            scales: The student's loss scale, in float16.
            shared: The processes among which the images of a step are divided, and their number on all of them.

        Returns:
            The refined state.
        """
        state = {key: value.detach().clone().unsqueeze(0) for key, value in student.items()}
        leaves = [state[key].requires_grad_() for key in parameters if key in state]
        optimizer = self._make_optimizer(leaves, scales is not None)
        best = (validate(student), student) if validate and self.validate_every else None
        averages: State = {}
        first = self.steps if average_from is None else math.ceil(round(average_from * self.steps, 9))
        for step, (x, teacher) in enumerate(batches):
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate(step)
            logits = engine.logits(state if scales is None else scales.enter(state, ONLY), x.unsqueeze(0))
            logits = logits if scales is None else scales.leave(logits, ONLY)
            loss = distillation_loss(logits[0], teacher, self.temperature, multilabel)
            optimizer.zero_grad()
            if shared is not None:
                loss = loss * (len(x) / shared[1])
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no types there
            gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
            if shared is not None:
                shared[0].sum_(gradients)
            if scales is not None and isinstance(optimizer, MaskedOptimizer):
                optimizer.step_rows(scales.update(gradients, ONLY))
            else:
                optimizer.step()
            if step >= first:
                for key, value in _first({key: state[key] for key in parameters if key in state}).items():
                    averages[key] = averages.get(key, value).lerp(value, 1 / (step - first + 1))
            if best and validate and ((step + 1) % self.validate_every == 0 or step + 1 == self.steps):
                reached = _first(state) | averages
                best = max(best, (validate(reached), reached), key=lambda pair: pair[0])
        return best[1] if best else _first(state) | averages

    def _make_optimizer(self, leaves: list[Tensor], masked: bool) -> torch.optim.Optimizer:
        if masked:
            return MaskedAdam(leaves, self.lr) if self.optimizer == "adam" else MaskedSGD(leaves, self.lr)
        kind = torch.optim.Adam if self.optimizer == "adam" else torch.optim.SGD
        return kind(leaves, lr=self.lr, fused=True)


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and value >= least


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and 0 < value < math.inf


def _first(stacked: State) -> State:
    return {key: value.detach()[0].clone() for key, value in stacked.items()}


class ServerData(Protocol):
    """What the server needs of the data (:class:`perada.data.FederatedDataModule` has it)."""

    def public_indices(self, round: int, steps: int, batch_size: int | Literal["full"]) -> Tensor:
        """Positions in the public set (steps, B)."""

    def public_images(self, indices: Tensor, device: torch.device) -> Tensor:
        """Prepared public images (len(indices), channels, height, width)."""

    def validation_batches(self, device: torch.device) -> Iterable[tuple[Tensor, Tensor]]:
        """Prepared images and labels of the server's validation set."""


def refine(
    engine: Engine,
    options: Distillation,
    data: ServerData,
    round: int,
    student: State,
    teachers: Mapping[str, Tensor],
    parameters: tuple[str, ...],
    *,
    multilabel: bool,
    ranks: Ranks | None = None,
    average_from: float | None = None,
    progress: Callable[[Tensor], Iterable[Tensor]] = iter,
    scales: LossScales | None = None,
) -> State:
    """Distil the ensemble of ``teachers`` into ``student``; each public image passes the teachers once.

    Every rank runs its part of the teachers; the sum of their logits is all that travels. The student's steps are taken
    by all ranks alike.

    Args:
        engine: Runs the states.
        options: How; rounds that are not to be distilled leave the student as it is.
        data: Public images, and the server's validation set.
        round: Counted from 0.
        student: State to start from; it is not changed.
        teachers: Stack (C, ...), the same on all ranks, or what the clients of all ranks sent.
        parameters: Names of the tensors to train.
        multilabel: Whether labels are 0/1 per class.
        ranks: The processes; by default one alone.
        average_from: See :meth:`perada.server.Distillation.run`.
        progress: Wraps the steps in a progress bar.
        scales: The student's loss scale, in float16.
    """
    ranks = ranks or Ranks()
    sent = teachers if isinstance(teachers, Updates) else Updates.known(teachers, ranks)
    alone = sent.clients == 1 and all(torch.equal(value, sent[key][0]) for key, value in student.items())
    if alone or not options.active(round):
        return student  # its own only teacher: Adam would turn rounding errors into steps of full length
    device = next(iter(student.values())).device

    indices = data.public_indices(round, options.steps, options.batch_size)
    divided = options.share_steps and 1 < ranks.size <= indices.shape[1]

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        used, positions = torch.unique(indices, return_inverse=True)
        parts = [_own_sum(engine, sent.own, student, data.public_images(part, device)) for part in used.split(256)]
        total = torch.cat([part for part, _ in parts])
        ranks.sum_([total])
        logits = (total / sent.clients).to(parts[0][1])
        own = slice(ranks.rank, None, ranks.size) if divided else slice(None)
        for step, rows in enumerate(progress(indices)):
            yield data.public_images(rows[own], device), logits[send(positions[step, own], device)]

    def accuracy(state: State) -> float:
        right = total = 0
        for x, y in data.validation_batches(device):
            logits = engine.shared_logits(expand(state, 1), x)[0]
            hits = (logits > 0) == y.bool() if y.dim() > 1 else logits.argmax(-1) == y
            right, total = right + int(hits.sum()), total + hits.numel()
        return right / total

    with torch.enable_grad():
        refined = options.run(
            engine,
            student,
            parameters,
            batches(),
            multilabel=multilabel,
            validate=accuracy if options.validate_every else None,
            average_from=average_from,
            scales=scales,
            shared=(ranks, indices.shape[1]) if divided else None,
        )
    ranks.broadcast_(refined.values())  # some kernels of a GPU do not give the same bits twice
    return refined


def _own_sum(engine: Engine, teachers: State, student: State, x: Tensor) -> tuple[Tensor, torch.dtype]:
    """Sum (B, K) of the logits of this rank's teachers in double precision, and the dtype of the logits.

    A rank may have no teacher: it then gives zeros, whose shape it takes from the student's logits.
    """
    some = len(next(iter(teachers.values()))) > 0
    logits = engine.shared_logits(teachers if some else expand(student, 1), x)
    return double(logits if some else torch.zeros_like(logits)).sum(0), logits.dtype
