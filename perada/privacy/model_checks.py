# SPDX-License-Identifier: Apache-2.0
"""Checks of a network at set-up, before private training: it keeps images, and clients, apart.

They compute gradients of a few images in two ways, and compare. What an algorithm and a server rule do is checked in
:mod:`perada.privacy.dry_run_checks`.
"""

import copy
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from perada.core.checks import OptionError
from perada.core.seeding import Streams, generator, seeded
from perada.core.states import State, is_finite
from perada.engine.engine import Engine, row_losses
from perada.engine.fold import without_dropout
from perada.privacy.gradients import Query, SampleGradients
from perada.privacy.options import Privacy

T = TypeVar("T")
UNCLIPPED = 1e9
"""A bound that no gradient of the checks reaches."""
TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-4}
"""Largest difference of sums over a batch from the sums of their parts, relative to the largest number among them."""
MIN_IMAGES = 8
"""Smallest number of images of a client that a network is checked with."""
MAX_DEPTH = 5
"""Levels of lists and the like in a module's attributes that are looked into."""
REMEDY = "choose a backbone without such a layer, or keep that layer in evaluation mode permanently"


@dataclass(frozen=True)
class _Batch:
    """Images of C clients.

    Attributes:
        x: Images (C, B, ...).
        y: Labels (C, B) or (C, B, K).
        counts: Real rows of each client.
    """

    x: Tensor
    y: Tensor
    counts: tuple[int, ...]


def check_gradients(options: Privacy, engine: Engine, states: State, x: Tensor, y: Tensor, multilabel: bool) -> None:
    """Compare the sum of all images' gradients, unclipped and without noise, with the result of one backward pass.

    They differ where Opacus's hooks do not see how a parameter is used: it would get noise and nothing else.

    Args:
        options: The section ``privacy``.
        engine: Runs the model.
        states: States (C, ...), in which what is trained requires gradients.
        x: Images (C, B, ...).
        y: Labels (C, B) or (C, B, K).
        multilabel: Whether images have several labels.

    Raises:
        ValueError: If they differ or cannot be computed, or if the model draws from torch's global stream.
    """
    clients, rows = x.shape[:2]
    dropout = Streams.derived(0, "probe", clients=range(clients), device=x.device)
    _check_streams(engine, states, x)
    trained = {key: value for key, value in states.items() if value.requires_grad}
    with torch.enable_grad():
        logits = engine.logits(states, x, training=True, streams=dropout.fork("part", 0))
        loss = row_losses(logits, y, multilabel).sum()
        gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    expected_sums: State = {}
    for key, gradient in zip(trained, gradients, strict=True):
        # There is no gradient of a parameter that the images do not pass through.
        expected_sums[key] = torch.zeros_like(trained[key]) if gradient is None else gradient
    if not is_finite(expected_sums):
        raise OptionError(
            "privacy: the gradients of a client's first image are not finite, so per-image gradients cannot be "
            "checked; look for far too large values in the images, or normalise them",
            name="privacy",
        )
    unclipped = replace(options, max_norm=UNCLIPPED, clipping="flat", physical_batch_size=None)
    sample_gradients = SampleGradients(unclipped, engine, multilabel)
    try:
        sums = sample_gradients.sums(Query(states, x, y, (rows,) * clients, dropout))
    except Exception as error:  # a layer may fail under the hooks in any way
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(
            f"privacy does not support this model with this adapter: Opacus's hooks fail ({reason}); choose the "
            "adapter lora, bottleneck, residual (norm='group') or head"
        ) from error
    largest = max((float(expected.abs().max()) for expected in expected_sums.values()), default=0.0)
    for key, expected in expected_sums.items():
        # A small gradient may be the difference of large terms, so the largest of all gives a tolerance too.
        tolerance = 1e-2 * float(expected.abs().max()) + 1e-5 * largest
        if not torch.allclose(sums[key], expected, rtol=1e-2, atol=tolerance):
            raise ValueError(
                f"privacy does not support this model: the per-image gradients of {key!r} do not add up to the "
                "batch's, since Opacus's hooks do not see how it is used (its layer is not called, or not on a "
                "batch); choose an adapter that leaves it out, such as lora, bottleneck or head"
            )


def _check_streams(engine: Engine, states: State, x: Tensor) -> None:
    """Raise a ValueError if the outputs depend on torch's global generator, not only on the clients' streams."""
    with_seed_0 = _logits(engine, states, x, seed=0)
    with_seed_1 = _logits(engine, states, x, seed=1)
    again_with_seed_0 = _logits(engine, states, x, seed=0)
    is_repeatable = torch.equal(with_seed_0, again_with_seed_0)
    if is_repeatable and not torch.allclose(with_seed_0, with_seed_1, equal_nan=True):
        raise ValueError(
            "privacy does not support this model: it draws from torch's global random generator (F.dropout or "
            "similar), whose draws are predictable and depend on an image's position in the batch; use nn.Dropout as "
            "a module, or set the rates (such as drop_rate or attn_drop_rate) to 0"
        )


def check_products(device: torch.device) -> None:
    """Check that a device multiplies float32 matrices in full float32 precision.

    A clipped sum is such a product. With fewer digits an image's part in it is longer than the bound, many times so
    where its terms cancel.

    Raises:
        ValueError: If it has fewer digits, as with TF32.
    """
    a = torch.rand(2, 256, 256, generator=generator(0, "probe"))
    on_device = a.to(device)
    with torch.autocast(device.type, enabled=False):
        product = torch.bmm(on_device, on_device).cpu()
        exact = torch.bmm(a.double(), a.double())
    largest_relative_error = float((product / exact - 1).abs().max())
    if largest_relative_error > 1e-5:
        raise OptionError(
            "privacy: float32 matrix products are computed with reduced precision here, so an image may contribute "
            "more than its share to a clipped sum; leave torch.set_float32_matmul_precision at 'highest' and TF32 off "
            "for matrix products (precision='bf16-mixed' is fine: sums are computed in float32)",
            name="privacy",
        )


def check_one_image(
    options: Privacy,
    engine: Engine,
    states: State,
    x: Tensor,
    y: Tensor,
    counts: tuple[int, ...],
    multilabel: bool,
) -> None:
    """Remove one image of every client from a batch, and compare the change with that image's gradient.

    Privacy rests on it: with one image less, a client's sum of clipped gradients is less by that image's own clipped
    gradient, whose norm is at most the bound, and by nothing else. So is every other client's, whose rows are beside it
    in the network. A network that mixes the images of a batch, or remembers those of earlier ones, does not pass. All
    is computed on a copy of the model, in double precision if the network can, without dropout, whose masks go by an
    image's place.

    Args:
        options: The section ``privacy``.
        engine: Runs the model.
        states: States (C, ...) of float32 or float64.
        x: Images (C, B, ...) of a whole batch.
        y: Labels (C, B) or (C, B, K).
        counts: Real rows of each client, at least one.
        multilabel: Whether images have several labels.

    Raises:
        ValueError: If the two differ, or the same batch gives another sum after others were seen.
    """
    batch = _at_least_min_images(x, y, counts)
    trial = _in_best_precision(lambda dtype: _OneImageTrial(options, engine, states, batch, multilabel, dtype))
    sums_of_all = trial.sums(trial.all_rows)
    sums_of_others = trial.sums(trial.other_rows)
    if trial.remembers_images() or not trial.is_close(sums_of_all, trial.sums(trial.all_rows)):
        raise OptionError(
            "privacy: the network retains state from the images that it sees in training, so one batch depends on "
            f"earlier ones, which no noise covers; {REMEDY}",
            name="privacy",
        )
    # What the removed images contributed to the sums.
    differences = {key: value - sums_of_others[key] for key, value in sums_of_all.items()}
    if not trial.is_close(differences, trial.gradients_of_removed):
        raise OptionError(
            "privacy: an image's output in training depends on the other images of its batch, so there is no gradient "
            f"of a single image (a normalisation over the batch, or similar); {REMEDY}",
            name="privacy",
        )


def check_clients_apart(engine: Engine, states: State, x: Tensor) -> None:
    """Check that the outputs of the other clients do not change with one client's images.

    Args:
        engine: Runs the model.
        states: States (C, ...).
        x: Images (C, B, ...).

    Raises:
        ValueError: If they do.
    """
    changed = x.clone()
    changed[0] = 1 - changed[0].flip(-1)

    def others_are_unchanged(dtype: torch.dtype | None) -> bool:
        copied_engine = _engine_without_dropout(engine, dtype)
        copied_states = {key: _to_dtype(value, dtype) for key, value in states.items()}
        before = _logits(copied_engine, copied_states, _to_dtype(x, dtype))[1:]
        after = _logits(copied_engine, copied_states, _to_dtype(changed, dtype))[1:]
        tolerance = TOLERANCES[dtype or torch.float32]
        return torch.allclose(after, before, rtol=tolerance, atol=tolerance, equal_nan=True)

    if not _in_best_precision(others_are_unchanged):
        raise OptionError(
            "client_privacy: the network mixes the images of all clients that are run as one batch; set "
            f"engine='loop', which runs them one after another, or {REMEDY}",
            name="client_privacy",
        )


def _in_best_precision(trial: Callable[[torch.dtype | None], T]) -> T:
    """Run a trial in float64 or, if the network cannot compute in it, with None for the network's dtype."""
    try:
        return trial(torch.float64)
    except Exception:  # networks that name a dtype, or have several, each fail in their own way
        return trial(None)


def _logits(engine: Engine, states: State, x: Tensor, counts: tuple[int, ...] | None = None, seed: int = 0) -> Tensor:
    """Return outputs (C, B, K) in training mode.

    Args:
        engine: Runs the model.
        states: States (C, ...).
        x: Images (C, B, ...).
        counts: Real rows of each client; None for all.
        seed: Seed of torch's global stream. The clients' own streams are the same in every call.
    """
    streams = Streams.derived(0, "probe", clients=range(len(x)), device=x.device)
    with torch.no_grad(), seeded(seed, "probe"):
        return engine.logits(states, x, training=True, counts=counts, streams=streams)


def _at_least_min_images(x: Tensor, y: Tensor, counts: tuple[int, ...]) -> _Batch:
    """Return enough images of every client that a network could mix them, adding changed copies if needed.

    A Poisson sample may hold more images than are expected, and more than one where one is.
    """
    rows = []
    labels = []
    for images, targets, count in zip(x, y, counts, strict=True):
        images = images[:count]
        targets = targets[:count]
        while len(images) < MIN_IMAGES:
            images = torch.cat([images, 2 * images.flip(-1) - 1])
            targets = torch.cat([targets, targets])
        rows.append(images)
        labels.append(targets)
    new_counts = tuple(len(images) for images in rows)
    return _Batch(pad_sequence(rows, batch_first=True), pad_sequence(labels, batch_first=True), new_counts)


class _OneImageTrial:
    """Clipped sums of a batch, of the batch without one image per client, and of those images.

    Args:
        options: The section ``privacy``.
        engine: Runs the model, of which a copy is made.
        states: States (C, ...).
        batch: Images of the clients.
        multilabel: Whether images have several labels.
        dtype: What to compute in; None for the network's own dtype.

    Attributes:
        all_rows: Indices (C, B) of all rows.
        other_rows: Indices (C, B − 1) without the row that is removed from each client.
        gradients_of_removed: Clipped gradients (C, ...) of the removed images, each computed in a batch of its own.
    """

    def __init__(
        self,
        options: Privacy,
        engine: Engine,
        states: State,
        batch: _Batch,
        multilabel: bool,
        dtype: torch.dtype | None,
    ) -> None:
        self._engine = _engine_without_dropout(engine, dtype)
        self._batch = replace(batch, x=_to_dtype(batch.x, dtype))
        self._tolerance = TOLERANCES[dtype or torch.float32]
        self._states: State = {}
        for key, value in states.items():
            self._states[key] = _to_dtype(value, dtype).detach().requires_grad_(value.requires_grad)
        clients = len(batch.counts)
        self.all_rows = torch.arange(batch.x.shape[1]).expand(clients, -1)
        # From the middle: the rows behind it move up by one.
        removed_rows = torch.tensor(batch.counts).unsqueeze(1) // 2
        self.other_rows = self.all_rows[self.all_rows != removed_rows].view(clients, -1)
        one_each = (1,) * clients
        # The median norm is the bound, so that some gradients are clipped and some are not.
        unclipped = replace(options, max_norm=UNCLIPPED, clipping="flat")
        self._gradients = SampleGradients(unclipped, self._engine, multilabel)
        gradients = self._sums_of_rows(removed_rows, one_each)
        squared_norms = [gradient.flatten(1).square().sum(1) for gradient in gradients.values()]
        norms = torch.stack(squared_norms).sum(0).sqrt()
        self._bound = float(norms.median()) or 1.0
        self._gradients = SampleGradients(replace(options, max_norm=self._bound), self._engine, multilabel)
        self.gradients_of_removed = self._sums_of_rows(removed_rows, one_each)

    def sums(self, rows: Tensor) -> State:
        """Return the clipped sums (C, ...) of :attr:`all_rows` or :attr:`other_rows`."""
        num_removed = self._batch.x.shape[1] - rows.shape[1]
        counts = [count - num_removed for count in self._batch.counts]
        return self._sums_of_rows(rows, tuple(counts))

    def _sums_of_rows(self, rows: Tensor, counts: tuple[int, ...]) -> State:
        """Return the clipped sums (C, ...) of rows (C, B), of which the first ``counts`` are real."""
        device = self._batch.x.device
        clients = torch.arange(len(counts), device=device).unsqueeze(1)
        rows = rows.to(device)
        streams = Streams.derived(0, "probe", clients=range(len(counts)), device=device)
        query = Query(self._states, self._batch.x[clients, rows], self._batch.y[clients, rows], counts, streams)
        # A network that draws from torch's global stream draws the same each time.
        with seeded(0, "probe"):
            return self._gradients.sums(query)

    def remembers_images(self) -> bool:
        """Return whether passes on different images leave different state in the network's modules."""
        x = self._batch.x
        other_x = 1 - x.flip(-1)
        _logits(self._engine, self._states, x, self._batch.counts)
        contents = _contents_of(self._engine.runs)
        _logits(self._engine, self._states, other_x, self._batch.counts)
        return contents != _contents_of(self._engine.runs)

    def is_close(self, sums: State, other_sums: State) -> bool:
        """Return whether two sums are the same up to rounding."""
        largest = max(self._bound, *(float(value.abs().max()) for value in sums.values()))
        for key, value in sums.items():
            difference = float((value - other_sums[key]).abs().max())
            # A comparison with NaN is false, so that NaN is never close.
            if not difference <= self._tolerance * largest:
                return False
        return True


def _to_dtype(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Convert a floating-point tensor; None keeps its dtype."""
    if not value.is_floating_point():
        return value
    return value.to(dtype)


def _engine_without_dropout(engine: Engine, dtype: torch.dtype | None) -> Engine:
    """Return an engine on a copy of the model in ``dtype`` that draws no random numbers and takes images."""
    model = without_dropout(copy.deepcopy(engine.model))
    if dtype is not None:
        model.to(dtype)
    return Engine(model, engine.kind, channels_last=engine.memory_format == torch.channels_last)


def _contents_of(model: nn.Module) -> list[Any]:
    """Return what a model's modules hold in addition to parameters: buffers, numbers and tensors in attributes.

    In values that can be compared.
    """
    contents = []
    for module in model.modules():
        attributes = {}
        for name, value in vars(module).items():
            if name not in ("_parameters", "_modules", "_buffers"):
                attributes[name] = _comparable(value)
        contents.append((_comparable(module._buffers), attributes))
    return contents


def _comparable(value: object, depth: int = 0) -> Any:  # noqa: ANN401  # whatever an attribute is
    """Return a value that is equal for equal contents; None for objects that neither are nor hold numbers."""
    if isinstance(value, Tensor):
        # As text, since NaN is not equal to itself.
        return str(value.detach().double().sum().item()), tuple(value.shape)
    if hasattr(value, "tobytes"):
        # An array of NumPy's, or the like.
        return value.tobytes()
    if depth > MAX_DEPTH:
        # It may hold itself.
        return None
    if isinstance(value, dict):
        return {str(key): _comparable(item, depth + 1) for key, item in value.items()}
    if isinstance(value, Collection) and not isinstance(value, str | bytes):
        return [_comparable(item, depth + 1) for item in value]
    if isinstance(value, int | float | str):
        return value
    return None
