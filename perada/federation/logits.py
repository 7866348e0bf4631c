# SPDX-License-Identifier: Apache-2.0
"""What the models of a federation say of images: which model runs on which image, and in what company."""

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from perada.algorithms import ensemble_of
from perada.core.batches import EvalBatch
from perada.core.states import send
from perada.engine.ensembles import ensemble
from perada.federation.federation import Federation

GROUP = 32
"""Clients whose states are gathered at once."""


def everywhere_logits(
    federation: Federation, everywhere: Sequence[int], x: Tensor
) -> Iterator[tuple[Sequence[int], Sequence[int], Tensor]]:
    """Run personal models of this process on the same images, some at a time.

    Yields:
        Places in ``everywhere``, the clients there, and the logits (p, B, K) of their models.
    """
    owned = set(federation.owned())
    running = [(place, client) for place, client in enumerate(everywhere) if client in owned]
    for start in range(0, len(running), GROUP):
        places, clients = zip(*running[start : start + GROUP], strict=True)
        yield places, clients, federation.engine.shared_logits(federation.personal_states(clients), x)


def shared_logits(federation: Federation, x: Tensor) -> Tensor:
    """Logits (B, K) of the global model."""
    average, multilabel = ensemble_of(federation.settings.algorithm).average, federation.settings.training.multilabel
    return ensemble(federation.engine.shared_logits(federation.members(), x), average, multilabel)


def own_logits(federation: Federation, batch: EvalBatch) -> Tensor | None:
    """Logits (B, K) of each image by its owner's personal model: each image runs once.

    Stretches of one owner's images are stacked with others that are at most twice as long. Logits are zero for images
    whose owner another process has, and ``None`` where that goes for all.
    """
    stretches = [(owner, len(list(rows))) for owner, rows in groupby(batch.owner.tolist())]
    counts = torch.tensor([count for _, count in stretches])
    starts, here = counts.cumsum(0) - counts, set(federation.owned())
    alike: dict[int, list[int]] = {}
    for place, (owner, count) in enumerate(stretches):
        if owner in here:
            alike.setdefault(count.bit_length(), []).append(place)
    logits = None
    for places in alike.values():
        for begin in range(0, len(places), GROUP):
            part = places[begin : begin + GROUP]
            step = torch.arange(int(counts[part].max()))
            rows = starts[part, None] + step.minimum(counts[part, None] - 1)  # the last image fills what is too short
            real = (step < counts[part, None]).flatten().nonzero().flatten()
            states = federation.personal_states([stretches[place][0] for place in part])
            with torch.no_grad():
                run = federation.engine.logits(states, batch.x[send(rows, batch.x.device)]).flatten(0, 1)
            logits = run.new_zeros(len(batch.x), *run.shape[1:]) if logits is None else logits
            logits[send(rows.flatten()[real], run.device)] = run[send(real, run.device)]
    return logits
