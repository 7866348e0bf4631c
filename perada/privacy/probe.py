# SPDX-License-Identifier: Apache-2.0
"""Whether private gradients can be had of a model and a device, and whether a network keeps images, and clients, apart.

All of it is tried before anything is trained.
"""

import copy
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from perada.core.checks import OptionError
from perada.core.seeding import Streams, generator, seeded
from perada.core.states import State
from perada.engine.engine import Engine, row_losses
from perada.engine.fold import without_dropout
from perada.privacy.gradients import Query, SampleGradients
from perada.privacy.options import Privacy

T = TypeVar("T")
UNCLIPPED = 1e9
"""A bound that no gradient of the trials reaches."""
Batch = tuple[Tensor, Tensor, tuple[int, ...]]
"""Images (C, B, ...), labels (C, B) or (C, B, K), and the real rows of each client."""
CLOSE = {torch.float64: 1e-7, torch.float32: 1e-4}
"""How far sums over a batch may be from the sums of their parts, relative to the largest number among them."""
SEVERAL = 8
"""Images of a client with which a network is tried, at least."""
DEEPEST = 5
"""Levels of lists and the like in a module's attributes that are looked into."""
REMEDY = "choose a backbone without such a layer, or put it into evaluation mode for good"


def check_gradients(options: Privacy, engine: Engine, states: State, x: Tensor, y: Tensor, multilabel: bool) -> None:
    """Compare the sum of all images' gradients, neither clipped nor noisy, with what one backward pass gives.

    They differ where Opacus's hooks do not see how a parameter is used: it would get noise and nothing else. Of the
    states (C, ...) what is trained requires gradients; the images are (C, B, ...), their labels (C, B) or (C, B, K).

    A ValueError if they differ or cannot be had, or if the model draws from torch's global stream.
    """
    clients, rows = x.shape[:2]
    dropout = Streams.derived(0, "probe", clients=range(clients), device=x.device)
    _check_streams(engine, states, x)
    with torch.enable_grad():
        logits = engine.logits(states, x, training=True, streams=dropout.fork("part", 0))
        asked = {key: value for key, value in states.items() if value.requires_grad}
        found = torch.autograd.grad(row_losses(logits, y, multilabel).sum(), list(asked.values()), allow_unused=True)
    if not all(value.isfinite().all() for value in found if value is not None):
        raise OptionError(
            "privacy: the gradients of a client's first image are not finite, so that those of single images cannot be "
            "checked; look for values in the images that are far too large, or normalise them",
            name="privacy",
        )
    tried = replace(options, max_norm=UNCLIPPED, clipping="flat", physical_batch_size=None)
    gradients = SampleGradients(tried, engine, multilabel)
    try:
        got = gradients.sums(Query(states, x, y, (rows,) * clients, dropout))
    except Exception as error:  # a layer may fail under the hooks in any way
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(
            f"privacy cannot be used with this model and adapter: Opacus's hooks fail on it ({reason}); choose the "
            "adapter lora, bottleneck, residual (norm='group') or head"
        ) from error
    largest = max((float(value.abs().max()) for value in found if value is not None), default=0.0)
    for key, expected in zip(asked, found, strict=True):
        wanted = torch.zeros_like(asked[key]) if expected is None else expected
        if not torch.allclose(got[key], wanted, rtol=1e-2, atol=1e-2 * float(wanted.abs().max()) + 1e-5 * largest):
            raise ValueError(
                f"privacy cannot be used with this model: the images' gradients of {key!r} do not add up to that "
                "of their batch, since Opacus's hooks do not see how it is used (its layer is not called, or not on a "
                "batch); choose an adapter that leaves it out, such as lora, bottleneck or head"
            )


def _check_streams(engine: Engine, states: State, x: Tensor) -> None:
    """Refuse a model whose outputs follow torch's global stream, and not the clients' own alone."""
    one, other, again = (_logits(engine, states, x, seed=seed) for seed in (0, 1, 0))
    if torch.equal(one, again) and not torch.allclose(one, other, equal_nan=True):
        raise ValueError(
            "privacy cannot be used with this model: it draws from torch's global stream of random numbers (F.dropout "
            "or the like), which others may foretell, and which goes by an image's place in the batch; use nn.Dropout "
            "as a module, or set the rates (such as drop_rate or attn_drop_rate) to 0"
        )


def check_products(device: torch.device) -> None:
    """Refuse, by a ValueError, a device on which products of float32 matrices have fewer digits than float32.

    A clipped sum is such a product. With fewer digits an image's part in it is longer than the bound, many times so
    where its terms cancel.
    """
    a = torch.rand(2, 256, 256, generator=generator(0, "probe"))
    with torch.autocast(device.type, enabled=False):
        found, exact = torch.bmm(a.to(device), a.to(device)).cpu(), torch.bmm(a.double(), a.double())
    if float((found / exact - 1).abs().max()) > 1e-5:
        raise OptionError(
            "privacy: products of float32 matrices are computed with fewer digits here, so that an image may have more "
            "than its share of a clipped sum; leave torch.set_float32_matmul_precision at 'highest', and TF32 off for "
            "matrix products (precision='bf16-mixed' is fine: sums are made in float32)",
            name="privacy",
        )


def check_one_image(
    options: Privacy, engine: Engine, states: State, x: Tensor, y: Tensor, counts: tuple[int, ...], multilabel: bool
) -> None:
    """Take one image of every client out of a batch, and compare what that does with what the image is alone.

    Privacy rests on it: with one image less, a client's sum of clipped gradients is less by that image's own clipped
    gradient, whose norm is at most the bound, and by nothing else. So is every other client's, whose rows the network
    sees beside. A network that mixes the images of a batch, or remembers those of earlier ones, fails it. All is
    computed in double precision if the network can, without dropout, whose masks go by an image's place.

    The states (C, ...) are of float32 or float64, ``x`` the images (C, B, ...) of a whole batch, ``y`` their labels
    (C, B) or (C, B, K), and ``counts`` the real rows of each client, at least one. A copy of the model is tried. A
    ValueError if the two differ, or the same batch gives another sum after others were seen.
    """
    batch = _several(x, y, counts)
    trial = _precisely(lambda dtype: _Trial(options, engine, states, batch, multilabel, dtype))
    everyone, rest = trial.sums(trial.all), trial.sums(trial.others)
    if trial.remembers() or not trial.close(everyone, trial.sums(trial.all)):
        raise OptionError(
            "privacy: the network keeps something of the images that it sees in training, so that one batch depends on "
            f"earlier ones, by what no noise covers; {REMEDY}",
            name="privacy",
        )
    if not trial.close({key: value - rest[key] for key, value in everyone.items()}, trial.alone):
        raise OptionError(
            "privacy: an image's output in training depends on the other images of its batch, so that its gradient is "
            f"not its own (a normalisation over the batch, or the like); {REMEDY}",
            name="privacy",
        )


def check_clients_apart(engine: Engine, states: State, x: Tensor) -> None:
    """Refuse, by a ValueError, a network where the outputs of others change with one client's images (C, B, ...)."""
    changed = x.clone()
    changed[0] = 1 - changed[0].flip(-1)

    def outputs(dtype: torch.dtype | None) -> tuple[Tensor, Tensor, float]:
        exact, stacked = _exact(engine, dtype), {key: _as(value, dtype) for key, value in states.items()}
        before, after = (_logits(exact, stacked, _as(images, dtype))[1:] for images in (x, changed))
        return before, after, CLOSE[dtype or torch.float32]

    before, after, close = _precisely(outputs)
    if not torch.allclose(after, before, rtol=close, atol=close, equal_nan=True):
        raise OptionError(
            "client_privacy: the network mixes the images of all clients that are run as one batch; set engine='loop', "
            f"which runs one after another, or {REMEDY}",
            name="client_privacy",
        )


def _precisely(trial: Callable[[torch.dtype | None], T]) -> T:
    """A trial in double precision or, where the network names a number format or has several, in its own."""
    try:
        return trial(torch.float64)
    except Exception:  # each fails in its own way
        return trial(None)


def _logits(engine: Engine, states: State, x: Tensor, counts: tuple[int, ...] | None = None, seed: int = 0) -> Tensor:
    """Outputs (C, B, K) in training. Clients draw alike each time; ``seed`` is for torch's global stream."""
    streams = Streams.derived(0, "probe", clients=range(len(x)), device=x.device)
    with torch.no_grad(), seeded(seed, "probe"):
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
    return pad_sequence(rows, batch_first=True), pad_sequence(labels, batch_first=True), tuple(map(len, rows))


class _Trial:
    """Clipped sums of a batch, of all of it but one image a client, and of those images.

    Rows are the indices of ``all`` (C, B), and of the ``others`` (C, B − 1) when one image is taken out of each client.
    Those that are taken out ``alone`` have these clipped gradients (C, ...).
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
        flat = replace(options, max_norm=UNCLIPPED, clipping="flat")
        self._gradients = SampleGradients(flat, self.engine, multilabel)
        unclipped = self._sums(out, (1,) * len(counts))
        norms = torch.stack([value.flatten(1).square().sum(1) for value in unclipped.values()]).sum(0).sqrt()
        self.bound = float(norms.median()) or 1.0  # so that some are clipped and some are not
        self._gradients = SampleGradients(replace(options, max_norm=self.bound), self.engine, multilabel)
        self.alone = self._sums(out, (1,) * len(counts))

    def sums(self, rows: Tensor) -> State:
        """Clipped sums (C, ...) of the rows (C, B or B − 1)."""
        less = self.x.shape[1] - rows.shape[1]
        return self._sums(rows, tuple(count - less for count in self.counts))

    def _sums(self, rows: Tensor, counts: tuple[int, ...]) -> State:
        clients = range(len(counts))
        places = torch.tensor(clients).unsqueeze(1).to(self.x.device), rows.to(self.x.device)
        streams = Streams.derived(0, "probe", clients=clients, device=self.x.device)
        with seeded(0, "probe"):  # what draws from torch's global stream draws alike
            return self._gradients.sums(Query(self.states, self.x[places], self.y[places], counts, streams))

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
    model = without_dropout(copy.deepcopy(engine.model))
    if dtype is not None:
        model.to(dtype)
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
