# SPDX-License-Identifier: Apache-2.0
"""Several global models in a round: what they predict together, how they compare, how they are distilled into one."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from perada.engine import Engine
from perada.loss_scaling import LossScales
from perada.losses import client_losses
from perada.ranks import Ranks
from perada.rounds import CohortBatch
from perada.server import Distillation, Updates
from perada.server.aggregate import double
from perada.states import State, expand, send, unstack


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


def ensemble(logits: Tensor, average: Literal["logits", "probabilities"], multilabel: bool) -> Tensor:
    """Logits of the ensemble of K models.

    Args:
        logits: (K, ..., classes).
        average: ``logits``, or ``probabilities``: those of the result are the mean of the models' probabilities.
        multilabel: Whether each class has a Bernoulli probability of its own.

    Returns:
        (..., classes).

    >>> ensemble(torch.tensor([[0.0, 2.0], [2.0, 0.0]]), "probabilities", False).softmax(-1).tolist()
    [0.5, 0.5]
    """
    if len(logits) == 1:
        return logits[0]
    if average == "logits":
        return logits.mean(0)
    if not multilabel:
        return logits.log_softmax(-1).logsumexp(0)
    return F.logsigmoid(logits).logsumexp(0) - F.logsigmoid(-logits).logsumexp(0)


def compare(engine: Engine, members: State, batches: Iterable[CohortBatch], clients: int, multilabel: bool) -> Tensor:
    """Mean loss of each of K models on each client's images, in evaluation mode.

    Args:
        engine: Runs the states.
        members: Stack (K, ...).
        batches: Of C clients, whose active ones are a prefix; rows beyond a client's count are not looked at.
        clients: C.
        multilabel: Whether labels are 0/1 per class.

    Returns:
        Losses (C, K).
    """
    states = unstack(members)
    device = next(iter(members.values())).device
    losses, rows = torch.zeros(clients, len(states), device=device), torch.zeros(clients, device=device)
    with torch.no_grad():
        for batch in batches:
            active, counts = len(batch.clients), torch.tensor(batch.counts, device=device)
            for index, state in enumerate(states):
                logits = engine.logits(expand(state, active), batch.x, counts=batch.counts)
                losses[:active, index] += counts * client_losses(logits, batch.y, batch.counts, multilabel)
            rows[:active] += counts
    return losses / rows.unsqueeze(1)
