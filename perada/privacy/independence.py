# SPDX-License-Identifier: Apache-2.0
"""Whether a network keeps images, and clients, apart: tried on a whole batch before anything is trained."""

import copy
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from perada.core.seeding import Streams, seeded
from perada.core.states import State
from perada.engine.engine import Engine
from perada.engine.fold import draws
from perada.engine.stacked_layers import drop_rate
from perada.privacy.gradients import Query, make_gradients
from perada.privacy.options import Privacy
from perada.privacy.probe import UNCLIPPED, without_noise

Batch = tuple[Tensor, Tensor, tuple[int, ...]]
"""Images (C, B, ...), labels (C, B) or (C, B, K), and the real rows of each client."""
CLOSE = {torch.float64: 1e-7, torch.float32: 1e-4}
"""How far sums over a batch may be from the sums of their parts, relative to the largest number among them."""
SEVERAL = 8
"""Images of a client with which a network is tried, at least."""
DEEPEST = 5
"""Levels of lists and the like in a module's attributes that are looked into."""
REMEDY = "choose a backbone without such a layer, or put it into evaluation mode for good"


def check_one_image(
    options: Privacy, engine: Engine, states: State, x: Tensor, y: Tensor, counts: tuple[int, ...], multilabel: bool
) -> None:
    """Take one image of every client out of a batch, and compare what that does with what the image is alone.

    Privacy rests on it: with one image less, a client's sum of clipped gradients is less by that image's own clipped
    gradient, whose norm is at most the bound, and by nothing else. So is every other client's, whose rows the network
    sees beside. A network that mixes the images of a batch, or remembers those of earlier ones, fails it. All is
    computed in double precision if the network can, without dropout, whose masks go by an image's place.

    The states (C, ...) are of float32 or float64, ``x`` the images (C, B, ...) of a whole batch, ``y`` their labels
    (C, B) or (C, B, K), and ``counts`` the real rows of each client, at least one. A copy of the model is tried.

    Raises:
        ValueError: If the two differ, or the same batch gives another sum after others were seen.
    """
    batch = _several(x, y, counts)
    try:
        trial = _Trial(options, engine, states, batch, multilabel, torch.float64)
    except Exception:  # of a network that names a number format, or has several
        trial = _Trial(options, engine, states, batch, multilabel, None)
    everyone, rest = trial.sums(trial.all), trial.sums(trial.others)
    if trial.remembers() or not trial.close(everyone, trial.sums(trial.all)):
        raise ValueError(
            "privacy: the network keeps something of the images that it sees in training, so that one batch depends on "
            f"earlier ones, by what no noise covers; {REMEDY}"
        )
    if not trial.close({key: value - rest[key] for key, value in everyone.items()}, trial.alone):
        raise ValueError(
            "privacy: an image's output in training depends on the other images of its batch, so that its gradient is "
            f"not its own (a normalisation over the batch, or the like); {REMEDY}"
        )


def check_clients_apart(engine: Engine, states: State, x: Tensor) -> None:
    """Exchange the images (C, B, ...) of one client in a copy of the model, and look whether the others' outputs stay.

    Raises:
        ValueError: If they change.
    """
    try:
        before, after, close = _outputs_of_others(engine, states, x, torch.float64)
    except Exception:  # as above
        before, after, close = _outputs_of_others(engine, states, x, None)
    if not torch.allclose(after, before, rtol=close, atol=close, equal_nan=True):
        raise ValueError(
            "client_privacy: the network mixes the images of all clients that are run as one batch; set engine='loop', "
            f"which runs one after another, or {REMEDY}"
        )


def _outputs_of_others(
    engine: Engine, states: State, x: Tensor, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, float]:
    """Outputs (C − 1, B, K) of all clients but the first, before and after its images change; how close is the same."""
    exact = _exact(engine, dtype)
    stacked = {key: _as(value, dtype) for key, value in states.items()}
    changed = x.clone()
    changed[0] = 1 - changed[0].flip(-1)
    before, after = (_logits(exact, stacked, _as(images, dtype))[1:] for images in (x, changed))
    return before, after, CLOSE[dtype or torch.float32]


def _logits(engine: Engine, states: State, x: Tensor, counts: tuple[int, ...] | None = None) -> Tensor:
    """Outputs (C, B, K) in training; what is drawn for them is the same each time."""
    streams = Streams.derived(0, "probe", clients=range(len(x)), device=x.device)
    with torch.no_grad(), seeded(0, "probe"):
        return engine.logits(states, x, training=True, counts=counts, streams=streams)


def _several(x: Tensor, y: Tensor, counts: tuple[int, ...]) -> Batch:
    """At least so many images of every client that a network could mix them; where it has fewer, others made of them.

    A Poisson sample may hold more images than are expected, and more than one where one is.
    """
    rows, labels = [], []
    for images, targets, count in zip(x, y, counts, strict=True):
        images, targets = images[:count], targets[:count]
        while len(images) < SEVERAL:
            images, targets = torch.cat([images, 2 * images.flip(-1) - 1]), torch.cat([targets, targets])
        rows.append(images)
        labels.append(targets)
    found = tuple(map(len, rows))
    return pad_sequence(rows, batch_first=True), pad_sequence(labels, batch_first=True), found


class _Trial:
    """Clipped sums of a batch, of all of it but one image a client, and of those images.

    Attributes:
        all: Indices of rows (C, B).
        others: Indices (C, B − 1), of those left when one is taken out of each.
        alone: Clipped gradients (C, ...) of the images that are taken out.
    """

    def __init__(
        self, options: Privacy, engine: Engine, states: State, batch: Batch, multilabel: bool, dtype: torch.dtype | None
    ) -> None:
        x, self.y, self.counts = batch
        self.engine, self.x, counts = _exact(engine, dtype), _as(x, dtype), self.counts
        self._close = CLOSE[dtype or torch.float32]
        self.states = {key: _as(v, dtype).detach().requires_grad_(v.requires_grad) for key, v in states.items()}
        rows = torch.arange(x.shape[1]).expand(len(counts), -1)
        out = torch.tensor(counts).unsqueeze(1) // 2  # from the middle: those behind it move up
        self.all, self.others = rows, rows[rows != out].view(len(counts), -1)
        self._gradients = make_gradients(without_noise(options, UNCLIPPED), self.engine, multilabel)
        unclipped = self._sums(out, (1,) * len(counts))
        norms = torch.stack([value.flatten(1).square().sum(1) for value in unclipped.values()]).sum(0).sqrt()
        self.bound = float(norms.median()) or 1.0  # so that some are clipped and some are not
        self._gradients = make_gradients(without_noise(options, self.bound), self.engine, multilabel)
        self.alone = self._sums(out, (1,) * len(counts))

    def sums(self, rows: Tensor) -> State:
        """Clipped sums (C, ...) of the rows (C, B or B − 1)."""
        less = self.x.shape[1] - rows.shape[1]
        return self._sums(rows, tuple(count - less for count in self.counts))

    def _sums(self, rows: Tensor, counts: tuple[int, ...]) -> State:
        clients = range(len(counts))
        places = torch.tensor(clients).unsqueeze(1).to(self.x.device), rows.to(self.x.device)
        streams = Streams.derived(0, "probe", clients=clients, device=self.x.device)
        sources = [torch.Generator() for _ in clients]  # there is no noise to be drawn from them
        none, ones = [0.0] * len(counts), [1.0] * len(counts)
        query = Query(self.states, self.x[places], self.y[places], counts, streams, sources, none, ones)
        with seeded(0, "probe"):  # what draws from torch's global stream draws alike
            return self._gradients(query)

    def remembers(self) -> bool:
        """Whether a pass changes what the network's modules hold, beside parameters."""
        seen = []
        for x in (self.x, 1 - self.x.flip(-1)):
            _logits(self.engine, self.states, x, self.counts)
            seen.append(_held(self.engine.runs))
        return seen[0] != seen[1]

    def close(self, one: State, other: State) -> bool:
        """Whether two sums are the same but for rounding."""
        largest = max(self.bound, *(float(value.abs().max()) for value in one.values()))
        return all(float((one[key] - other[key]).abs().max()) <= self._close * largest for key in one)


def _as(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value


def _exact(engine: Engine, dtype: torch.dtype | None) -> Engine:
    """An engine on a copy of the model in ``dtype`` that draws no random numbers, and takes images, not features."""
    model = copy.deepcopy(engine.model)
    if dtype is not None:
        model.to(dtype)
    for module in model.modules():
        if draws(module):
            setattr(module, "p" if drop_rate(module) == getattr(module, "p", None) else "drop_prob", 0.0)
    return Engine(model, engine.kind, channels_last=engine.memory_format == torch.channels_last)


def _held(model: nn.Module) -> list[Any]:
    """What a model's modules hold: buffers, and numbers and tensors in attributes of their own."""

    def told(value: Any, depth: int = 0) -> Any:  # noqa: ANN401  # whatever an attribute is
        if isinstance(value, Tensor):
            return str(value.detach().double().sum().item()), tuple(value.shape)  # NaN is not equal to itself
        if hasattr(value, "tobytes"):  # an array of NumPy's, or the like
            return value.tobytes()
        if depth > DEEPEST:  # it may hold itself
            return None
        if isinstance(value, dict):
            return {str(key): told(item, depth + 1) for key, item in value.items()}
        if isinstance(value, Collection) and not isinstance(value, str | bytes):
            return [told(item, depth + 1) for item in value]
        return value if isinstance(value, int | float | str) else None

    apart = ("_parameters", "_modules", "_buffers")
    return [
        (told(module._buffers), {name: told(value) for name, value in vars(module).items() if name not in apart})
        for module in model.modules()
    ]
