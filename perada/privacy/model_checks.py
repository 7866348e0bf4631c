# SPDX-License-Identifier: Apache-2.0
"""Checks of a network before private training: no image, and no client, may affect the gradients of another.

The gradients of a few images are computed in two ways and compared. Algorithms and server rules are checked in
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
from perada.core.states import State, is_finite, without_autocast
from perada.engine.engine import Engine, row_losses
from perada.engine.fold import without_dropout
from perada.engine.precision import coarsest_dtype, is_half, unit_roundoff
from perada.privacy.gradients import Query, SampleGradients
from perada.privacy.options import Privacy
from perada.tasks import Task

T = TypeVar("T")
UNCLIPPED = 1e9
"""A clipping bound that no gradient reaches in these checks."""
TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-4}
"""Largest difference between two results that should be equal, relative to their largest element, by dtype."""
HALF_ROUNDOFFS = 0.5
"""The same for all other dtypes, in units of their roundoff. Products are accumulated in float32, so a kernel for
another batch size rounds only few activations to the other neighbour; more would hide that a network mixes images."""
GRADIENT_TOLERANCE = 1e-2
"""Largest difference between a sum of per-image gradients and the batch's gradient, relative to the largest element."""
GRADIENT_ROUNDOFFS = 32
"""The same in units of the roundoff u, where that is more. Each rounding changes an activation by up to u of its size,
and the errors of L roundings in a row add up like a random walk, to about √L u: 32 u after a thousand of them."""
CANCELLATION = 1e-5
"""The part of the model's largest gradient by which a gradient may differ as well, or the roundoff, where that is more.
A small gradient may be the difference of large terms, whose rounding errors are in proportion to their own size."""
MIN_IMAGES = 8
"""Smallest number of images per client with which a network is checked."""
MAX_DEPTH = 5
"""How many levels of nested containers in a module's attributes are compared."""
REMEDY = "choose a backbone without such a layer, or keep that layer in evaluation mode permanently"


@dataclass(frozen=True)
class _Batch:
    """Images of C clients.

    Attributes:
        x: Images (C, B, ...).
        y: Labels (C, B) or (C, B, K).
        counts: Number of real rows of each client; the others are padding.
    """

    x: Tensor
    y: Tensor
    counts: tuple[int, ...]


def check_gradients(
    privacy: Privacy,
    engine: Engine,
    states: State,
    x: Tensor,
    y: Tensor,
    task: Task,
) -> None:
    """Check that per-image gradients add up to the gradient of the batch, which one backward pass computes.

    They do not where Opacus's hooks miss a use of a parameter, which would then be trained on noise only.

    Args:
        privacy: The section ``privacy``.
        engine: Engine that runs the model.
        states: States (C, ...) of C clients, whose trained tensors require gradients.
        x: Images (C, B, ...).
        y: Targets (C, B, ...).
        task: Computes the loss of an image.

    Raises:
        ValueError: If they differ or cannot be computed, or if the model draws from torch's global generator.
    """
    _check_streams(engine, states, x)
    expected_sums = _batch_gradients(engine, states, x, y, task)
    if not is_finite(expected_sums):
        raise OptionError(
            "privacy: the gradients of a client's first image are not finite, so per-image gradients cannot be "
            "checked; look for far too large values in the images, or normalise them",
            name="privacy",
        )
    try:
        sums = _unclipped_sums(privacy, engine, states, x, y, task)
    except OptionError:  # of options that cannot be combined, with a remedy of its own
        raise
    except Exception as error:  # layers fail under the hooks with errors of any kind
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(
            f"privacy does not support this model with this adapter: Opacus's hooks fail ({reason}); choose the "
            "adapter lora, bottleneck, residual (norm='group') or head"
        ) from error
    dtype = coarsest_dtype(engine.model)
    wrong = _wrong_sum(sums, expected_sums, dtype)
    if wrong is None and is_half(dtype):
        # The rounding of half precision would hide a use that contributes little to a gradient.
        wrong = _wrong_sum_in_better_precision(privacy, engine, states, x, y, task)
    if wrong is not None:
        raise ValueError(
            f"privacy does not support this model: the per-image gradients of {wrong!r} do not add up to the "
            "batch's, since Opacus's hooks do not see how it is used (its layer is not called, or not on a "
            "batch); choose an adapter that leaves it out, such as lora, bottleneck or head"
        )


def _batch_gradients(engine: Engine, states: State, x: Tensor, y: Tensor, task: Task) -> State:
    """Return the gradients (C, ...) of each client's summed loss from one backward pass, by name."""
    trained = {key: value for key, value in states.items() if value.requires_grad}
    with torch.enable_grad():
        logits = engine.logits(states, x, training=True, streams=_dropout_streams(x).fork("part", 0))
        loss = row_losses(logits, y, task).sum()
        gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    gradients_by_name: State = {}
    for key, gradient in zip(trained, gradients, strict=True):
        # allow_unused=True gives None for parameters that the logits do not depend on.
        gradients_by_name[key] = torch.zeros_like(trained[key]) if gradient is None else gradient
    return gradients_by_name


def _unclipped_sums(privacy: Privacy, engine: Engine, states: State, x: Tensor, y: Tensor, task: Task) -> State:
    """Return the sums (C, ...) of per-image gradients, which no bound clips, by name."""
    clients, rows = x.shape[:2]
    unclipped = replace(privacy, max_norm=UNCLIPPED, clipping="flat", physical_batch_size=None)
    sample_gradients = SampleGradients(unclipped, engine, task)
    return sample_gradients.sums(Query(states, x, y, (rows,) * clients, _dropout_streams(x)))


def _dropout_streams(x: Tensor) -> Streams:
    """Return the random streams of the clients for images (C, B, ...), the same in every call."""
    return Streams.derived(0, "probe", clients=range(len(x)), device=x.device)


def _wrong_sum(sums: State, expected_sums: State, dtype: torch.dtype) -> str | None:
    """Return the name of the first sum that differs from the expected one by more than rounding; None if all agree.

    Args:
        sums: Sums (C, ...) of per-image gradients.
        expected_sums: Gradients (C, ...) of the batch.
        dtype: The least precise dtype that they were computed in.
    """
    roundoff = unit_roundoff(dtype)
    relative = max(GRADIENT_TOLERANCE, GRADIENT_ROUNDOFFS * roundoff)
    largest = max((float(expected.abs().max()) for expected in expected_sums.values()), default=0.0)
    absolute = max(CANCELLATION, roundoff) * largest
    for key, expected in expected_sums.items():
        tolerance = relative * float(expected.abs().max()) + absolute
        # "> tolerance" would accept a difference that is NaN.
        is_close = float((sums[key] - expected).abs().max()) <= tolerance
        if not is_close:
            return key
    return None


def _wrong_sum_in_better_precision(
    privacy: Privacy,
    engine: Engine,
    states: State,
    x: Tensor,
    y: Tensor,
    task: Task,
) -> str | None:
    """Compare gradients as :func:`check_gradients` does, in double precision or at least without autocast.

    Returns:
        The name of a wrong sum; None if all agree, or if the network runs in the run's precision only.
    """
    if engine.trunk is not None:
        # A copy of the model has no trunk, so it cannot run on features. The images themselves were checked before.
        return None
    for dtype in (torch.float64, None):
        try:
            with without_autocast(x.device):
                exact_engine = _engine_without_dropout(engine, dtype)
                exact_states = _states_to_dtype(states, dtype)
                exact_x = _to_dtype(x, dtype)
                expected_sums = _batch_gradients(exact_engine, exact_states, exact_x, y, task)
                sums = _unclipped_sums(privacy, exact_engine, exact_states, exact_x, y, task)
                return _wrong_sum(sums, expected_sums, coarsest_dtype(exact_engine.model))
        except Exception:  # a network with a fixed dtype fails with errors of any kind
            continue
    return None


def _check_streams(engine: Engine, states: State, x: Tensor) -> None:
    """Raise a ValueError if the outputs depend on torch's global generator, not only on the clients' streams."""
    with_seed_0 = _training_logits(engine, states, x, seed=0)
    with_seed_1 = _training_logits(engine, states, x, seed=1)
    again_with_seed_0 = _training_logits(engine, states, x, seed=0)
    # A network that remembers images is not repeatable either; check_one_image reports it.
    is_repeatable = torch.equal(with_seed_0, again_with_seed_0)
    if is_repeatable and not torch.allclose(with_seed_0, with_seed_1, equal_nan=True):
        raise ValueError(
            "privacy does not support this model: it draws from torch's global random generator (F.dropout or "
            "similar), whose draws are predictable and depend on an image's position in the batch; use nn.Dropout as "
            "a module, or set the rates (such as drop_rate or attn_drop_rate) to 0"
        )


def check_products(device: torch.device, option_names: str) -> None:
    """Check that a device multiplies float32 matrices in full precision.

    A clipped sum is such a product. With a reduced precision an image's contribution could exceed the clipping bound,
    and many times over where terms cancel.

    Args:
        device: Device of the training.
        option_names: The options that request privacy, for the message.

    Raises:
        ValueError: If the precision is reduced, as with TF32.
    """
    # The inputs are generated on the CPU, where products have full precision.
    a = torch.rand(2, 256, 256, generator=generator(0, "probe"))
    on_device = a.to(device)
    with torch.autocast(device.type, enabled=False):
        product = torch.bmm(on_device, on_device).cpu()
        exact = torch.bmm(a.double(), a.double())
    largest_relative_error = float((product / exact - 1).abs().max())
    if largest_relative_error > 1e-5:
        raise OptionError(
            f"{option_names}: float32 matrix products are computed with reduced precision here, so an image may "
            "contribute more than its share to a clipped sum; leave torch.set_float32_matmul_precision at 'highest' "
            "and TF32 off for matrix products (precision='bf16-mixed' is fine: sums are computed in float32)",
            name=option_names,
        )


def check_one_image(
    privacy: Privacy,
    engine: Engine,
    states: State,
    x: Tensor,
    y: Tensor,
    counts: tuple[int, ...],
    task: Task,
) -> None:
    """Check that removing an image from a batch changes the sum of clipped gradients by that image's gradient only.

    The privacy guarantee rests on this: the change must be the image's own clipped gradient, whose norm is at most the
    bound. One image of every client is removed at the same time, since the rows of all clients run through the network
    together. A network that mixes the images of a batch, or remembers those of earlier batches, does not pass.

    A copy of the model is used, in double precision if the network supports it. Dropout is turned off, because an
    image's mask depends on its place in the batch.

    Args:
        privacy: The section ``privacy``.
        engine: Engine that runs the model.
        states: States (C, ...) of C clients in float32 or float64.
        x: Images (C, B, ...) of a batch.
        y: Targets (C, B, ...).
        counts: Number of real rows of each client, at least one; the others are padding.
        task: Computes the loss of an image.

    Raises:
        ValueError: If the change is another one, or if the same batch gives another sum after others were seen.
    """
    batch = _at_least_min_images(x, y, counts)

    def find_problem(dtype: torch.dtype | None) -> str | None:
        return _OneImageTrial(privacy, engine, states, batch, task, dtype).problem()

    problem = _in_best_precision(find_problem, x.device)
    if problem is not None:
        raise OptionError(f"privacy: {problem}; {REMEDY}", name="privacy")


def check_clients_apart(engine: Engine, states: State, x: Tensor) -> None:
    """Check that one client's images do not change the outputs of the other clients.

    Args:
        engine: Engine that runs the model.
        states: States (C, ...) of C clients.
        x: Images (C, B, ...).

    Raises:
        ValueError: If they do.
    """
    # Other images for the first client.
    changed = x.clone()
    changed[0] = 1 - changed[0].flip(-1)

    def others_are_unchanged(dtype: torch.dtype | None) -> bool:
        copied_engine = _engine_without_dropout(engine, dtype)
        copied_states = {key: _to_dtype(value, dtype) for key, value in states.items()}
        before = _training_logits(copied_engine, copied_states, _to_dtype(x, dtype))[1:]
        after = _training_logits(copied_engine, copied_states, _to_dtype(changed, dtype))[1:]
        largest = float(before.nan_to_num(0.0, 0.0, 0.0).abs().max())
        # This holds in half precision too: the passes have the same shape, so the rows of the others are rounded alike.
        tolerance = TOLERANCES[dtype or torch.float32] * largest
        return torch.allclose(after, before, rtol=0.0, atol=tolerance, equal_nan=True)

    if not _in_best_precision(others_are_unchanged, x.device):
        raise OptionError(
            "client_privacy: the network mixes the images of all clients that are run as one batch; set "
            f"engine='loop', which runs them one after another, or {REMEDY}",
            name="client_privacy",
        )


def _in_best_precision(trial: Callable[[torch.dtype | None], T], device: torch.device) -> T:
    """Call a trial in double precision or, if the network does not support that, as precisely as it can run.

    Args:
        trial: Function of the dtype to convert the network to; None for the network's own.
        device: Device of the network.
    """
    for dtype in (torch.float64, None):
        try:
            with without_autocast(device):
                return trial(dtype)
        except Exception:  # a network with a fixed dtype, or several, fails with errors of any kind
            continue
    # Weights of several dtypes may run under autocast only.
    return trial(None)


def _relative_tolerance(model: nn.Module) -> float:
    """Return the largest difference between two results of a model that should be equal, relative to the largest."""
    dtype = coarsest_dtype(model)
    return TOLERANCES.get(dtype, HALF_ROUNDOFFS * unit_roundoff(dtype))


def _training_logits(
    engine: Engine, states: State, x: Tensor, counts: tuple[int, ...] | None = None, seed: int = 0
) -> Tensor:
    """Return logits (C, B, K) in training mode.

    Args:
        engine: Engine that runs the model.
        states: States (C, ...) of C clients.
        x: Images (C, B, ...).
        counts: Number of real rows of each client; None for all.
        seed: Seed of torch's global generator. The clients' own streams are the same in every call.
    """
    streams = Streams.derived(0, "probe", clients=range(len(x)), device=x.device)
    with torch.no_grad(), seeded(seed, "probe"):
        return engine.logits(states, x, training=True, counts=counts, streams=streams)


def _at_least_min_images(x: Tensor, y: Tensor, counts: tuple[int, ...]) -> _Batch:
    """Add changed copies of a client's images until it has at least :data:`MIN_IMAGES`.

    With a single image, a network would have nothing to mix, but a Poisson sample may have more images than expected.

    Args:
        x: Images (C, B, ...).
        y: Labels (C, B) or (C, B, K).
        counts: Number of real rows of each client.
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
    """Sums of clipped gradients of a batch, of the batch without one image per client, and of the removed images.

    Args:
        privacy: The section ``privacy``.
        engine: Engine whose model is copied.
        states: States (C, ...) of C clients.
        batch: Images of the clients.
        task: Computes the loss of an image.
        dtype: Dtype of the computation; None for the network's own.

    Attributes:
        all_rows: Indices (C, B) of all rows.
        other_rows: Indices (C, B − 1) without the row that is removed from each client.
        gradients_of_removed: Clipped gradients (C, ...) of the removed images, each of which is a batch by itself.
    """

    def __init__(
        self,
        privacy: Privacy,
        engine: Engine,
        states: State,
        batch: _Batch,
        task: Task,
        dtype: torch.dtype | None,
    ) -> None:
        self._engine = _engine_without_dropout(engine, dtype)
        self._batch = replace(batch, x=_to_dtype(batch.x, dtype))
        self._tolerance = _relative_tolerance(self._engine.model)
        self._states = _states_to_dtype(states, dtype)
        clients = len(batch.counts)
        self.all_rows = torch.arange(batch.x.shape[1]).expand(clients, -1)
        # The image is taken from the middle, so that the places of later rows change.
        removed_rows = torch.tensor(batch.counts).unsqueeze(1) // 2
        self.other_rows = self.all_rows[self.all_rows != removed_rows].view(clients, -1)
        one_each = (1,) * clients
        # The bound is the median of the gradients' norms, so that some gradients are clipped and some are not.
        unclipped = replace(privacy, max_norm=UNCLIPPED, clipping="flat")
        self._gradients = SampleGradients(unclipped, self._engine, task)
        gradients = self._sums_of_rows(removed_rows, one_each)
        squared_norms = [gradient.flatten(1).square().sum(1) for gradient in gradients.values()]
        norms = torch.stack(squared_norms).sum(0).sqrt()
        # A bound must not be 0.
        self._bound = float(norms.median()) or 1.0
        self._gradients = SampleGradients(replace(privacy, max_norm=self._bound), self._engine, task)
        self.gradients_of_removed = self._sums_of_rows(removed_rows, one_each)

    def sums(self, rows: Tensor) -> State:
        """Return the sums (C, ...) of the clipped gradients of some rows.

        Args:
            rows: :attr:`all_rows` or :attr:`other_rows`.
        """
        num_removed = self._batch.x.shape[1] - rows.shape[1]
        counts = [count - num_removed for count in self._batch.counts]
        return self._sums_of_rows(rows, tuple(counts))

    def _sums_of_rows(self, rows: Tensor, counts: tuple[int, ...]) -> State:
        """Return the sums (C, ...) of the clipped gradients of some rows.

        Args:
            rows: Indices (C, B) of each client's rows.
            counts: How many of them are real, for each client; the others are padding.
        """
        device = self._batch.x.device
        clients = torch.arange(len(counts), device=device).unsqueeze(1)
        rows = rows.to(device)
        streams = Streams.derived(0, "probe", clients=range(len(counts)), device=device)
        query = Query(self._states, self._batch.x[clients, rows], self._batch.y[clients, rows], counts, streams)
        # A network that draws from torch's global generator draws the same numbers each time.
        with seeded(0, "probe"):
            return self._gradients.sums(query)

    def problem(self) -> str | None:
        """Return why an image influences more than its own gradient; None if it does not."""
        sums_of_all = self.sums(self.all_rows)
        sums_of_others = self.sums(self.other_rows)
        if self.remembers_images() or not self.is_close(sums_of_all, self.sums(self.all_rows)):
            return (
                "the network retains state from the images that it sees in training, so one batch depends on earlier "
                "ones, which no noise covers"
            )
        # The contributions of the removed images to the sums.
        differences = {key: value - sums_of_others[key] for key, value in sums_of_all.items()}
        if not self.is_close(differences, self.gradients_of_removed):
            return (
                "an image's output in training depends on the other images of its batch, so there is no gradient of a "
                "single image (a normalisation over the batch, or similar)"
            )
        return None

    def remembers_images(self) -> bool:
        """Return whether a pass leaves something in the network's modules that depends on the images."""
        x = self._batch.x
        other_x = 1 - x.flip(-1)
        _training_logits(self._engine, self._states, x, self._batch.counts)
        contents = _contents_of(self._engine.runs)
        _training_logits(self._engine, self._states, other_x, self._batch.counts)
        return contents != _contents_of(self._engine.runs)

    def is_close(self, sums: State, other_sums: State) -> bool:
        """Return whether two sums (C, ...) are equal up to rounding errors."""
        largest = max(self._bound, *(float(value.abs().max()) for value in sums.values()))
        for key, value in sums.items():
            difference = float((value - other_sums[key]).abs().max())
            # A comparison with NaN is false, so that NaN is never close.
            if not difference <= self._tolerance * largest:
                return False
        return True


def _to_dtype(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Convert a floating-point tensor to a dtype; None keeps its own. Other tensors are returned as they are."""
    if not value.is_floating_point():
        return value
    return value.to(dtype)


def _states_to_dtype(states: State, dtype: torch.dtype | None) -> State:
    """Return copies of states in a dtype (None for their own) that require gradients where the states do."""
    copies: State = {}
    for key, value in states.items():
        copies[key] = _to_dtype(value, dtype).detach().requires_grad_(value.requires_grad)
    return copies


def _engine_without_dropout(engine: Engine, dtype: torch.dtype | None) -> Engine:
    """Return an engine on a copy of the model in a dtype (None for its own), without dropout and without a trunk."""
    model = without_dropout(copy.deepcopy(engine.model))
    if dtype is not None:
        model.to(dtype)
    channels_last = engine.memory_format == torch.channels_last
    return type(engine)(model, engine.kind, channels_last=channels_last, per_pixel=engine.per_pixel)


def _contents_of(model: nn.Module) -> list[Any]:
    """Return the buffers and attributes of a model's modules, in a form that can be compared."""
    contents = []
    for module in model.modules():
        attributes = {}
        for name, value in vars(module).items():
            if name not in ("_parameters", "_modules", "_buffers"):
                attributes[name] = _comparable_content(value)
        contents.append((_comparable_content(module._buffers), attributes))
    return contents


def _comparable_content(value: object, depth: int = 0) -> object:
    """Return a value that is equal for equal contents; None for objects that are neither numbers, texts nor containers.

    Args:
        value: An attribute, or an item of one.
        depth: Number of containers around it.
    """
    if isinstance(value, Tensor):
        # The sum as a text, since NaN is not equal to itself.
        return str(value.detach().double().sum().item()), tuple(value.shape)
    if hasattr(value, "tobytes"):
        # A NumPy array, or similar.
        return value.tobytes()
    if depth > MAX_DEPTH:
        # A container may contain itself.
        return None
    if isinstance(value, dict):
        return {str(key): _comparable_content(item, depth + 1) for key, item in value.items()}
    if isinstance(value, Collection) and not isinstance(value, str | bytes):
        return [_comparable_content(item, depth + 1) for item in value]
    if isinstance(value, int | float | str):
        return value
    return None
