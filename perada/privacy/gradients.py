# SPDX-License-Identifier: Apache-2.0
"""Gradients of many clients for DP-SGD: the gradient of every image is clipped, and summed by client.

Opacus's hooks return the gradient of every row, materialised or as outer products. For one image, the gradient of a
linear map's weight is a sum over its N positions (tokens, pixels) of outer products b_n a_nᵀ of backpropagated and
forward activations. If N is small, the norm and the clipped sum over images are cheaper to compute from a and b, and
the gradients are never materialised (the ghost norm of Goodfellow 2015 and Li et al. 2022, with the sum of Bu et al.
2023).

Shapes: C clients, B images per client, R = C·B rows, N positions, I inputs, O outputs.
"""

import copy
import math
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from perada.core.checks import OptionError
from perada.core.seeding import Streams
from perada.core.states import Merged, State, copy_module, double, double_dtype, train_mode, trained_keys
from perada.engine.engine import Engine, real_rows, row_losses
from perada.engine.fold import fold, shell
from perada.engine.stacked_layers import StackedLayer
from perada.engine.substitutes import WrappingSubstitute
from perada.privacy.accounting import import_opacus
from perada.privacy.clipping import at_least_float32, clipping_factors, sum_outer_products
from perada.privacy.options import Privacy
from perada.tasks import Task

Sampler = Callable[[Any, list[Tensor], Tensor], dict[nn.Parameter, Tensor]]
"""Function for Opacus of a layer, its inputs and the gradient of its output that returns per-sample gradients."""


@dataclass(frozen=True)
class Query:
    """A batch of C clients, and the states at which its clipped gradients are computed.

    Attributes:
        states: States (C, ...); gradients are computed for the tensors that require them.
        x: Images (C, B, ...).
        y: Labels (C, B), or (C, B, K) with several labels per image.
        counts: Number of real rows of each client, which come first; 0 for a batch without images.
        dropout: Random streams of the clients.
    """

    states: State
    x: Tensor
    y: Tensor
    counts: tuple[int, ...]
    dropout: Streams

    def of_client(self, client: int) -> "Query":
        """Return the query of one client, with a client axis of size 1."""
        row = slice(client, client + 1)
        return Query(
            states={key: value[row] for key, value in self.states.items()},
            x=self.x[row],
            y=self.y[row],
            counts=self.counts[row],
            dropout=self.dropout[row],
        )

    def blocks(self, max_rows: int | None) -> Iterator["Query"]:
        """Split the rows of the batch into blocks.

        Args:
            max_rows: Maximum number of rows per client in a block; None for a single block.

        Yields:
            A query for each block; none if no client has rows.
        """
        longest = max(self.counts)
        max_rows = max_rows or max(1, longest)
        for index, start in enumerate(range(0, longest, max_rows)):
            stop = min(start + max_rows, longest)
            # The real rows of a client may end within the block or before it.
            counts = [max(0, min(count, stop) - start) for count in self.counts]
            yield replace(
                self,
                x=self.x[:, start:stop],
                y=self.y[:, start:stop],
                counts=tuple(counts),
                dropout=self.dropout.fork("part", index),
            )


@dataclass(frozen=True)
class _Place:
    """A place of a state's tensor in the hooked model, of which a tied parameter has several.

    Attributes:
        module: Module that has the tensor.
        name: Name of the tensor in the module.
    """

    module: nn.Module
    name: str


class SampleGradients:
    """Computes the sum (C, ...) of the clipped gradients of each client's images.

    All clients run as one batch through the stacked model, or one by one through the single model if the options or the
    training engine require it. The engine's own model is not changed.

    Args:
        privacy: The section ``privacy``, with the clipping bound, the method and the engine.
        engine: Engine that runs the model in training.
        task: Computes the loss of an image.

    Attributes:
        one_by_one: Whether clients run one by one.

    Raises:
        ValueError: If the options require the stacked model but the training engine does not fold, or if it recomputes
            blocks.
    """

    def __init__(self, privacy: Privacy, engine: Engine, task: Task) -> None:
        if engine.is_recomputing:
            raise OptionError(
                "checkpointing=True saves no memory in private training, which keeps the inputs of trained layers for "
                "the gradients of single images; set training.checkpointing to false, and lower "
                "privacy.physical_batch_size",
                name="checkpointing",
                value=True,
            )
        self.options = privacy
        self.engine = engine
        self.task = task
        engine_kind: str = privacy.engine
        if engine_kind == "auto":
            engine_kind = engine.kind
        self.one_by_one = engine_kind != "folded"
        if not self.one_by_one and engine.kind != "folded":
            raise OptionError(
                "privacy: engine='folded' requires a folded training engine; choose engine='opacus' or 'auto' for "
                "privacy, or set the training engine (training.engine) to 'folded'",
                name="privacy: engine",
                value="folded",
            )
        model = engine.model
        if self.one_by_one:
            # Hooks are registered on modules. Folding creates new modules for those that are trained, but the single
            # model must be copied, so that training does not run the hooks.
            model = _copy_sharing_frozen(engine.model)
        wrap = None
        if engine.trunk is not None:
            wrap = engine.trunk.wrap
        folded = fold(model, random_only=self.one_by_one, wrap=wrap)
        self._context = folded.context
        self._row_keys = folded.row_keys
        self._merged = {key for key, value in engine.model.named_parameters() if isinstance(value, Merged)}
        self._hide_from_hooks(folded.model)

        names_of_keys = {key: [key] for key in trained_keys(engine.model)}
        if self.one_by_one:
            # Only in the single model is a parameter at several places: tied layers have one twin.
            tied = _tied_parameters(model)
            for key in names_of_keys:
                names_of_keys[key] = tied.get(key, [key])
        with_clones = clone_outputs(folded.model)
        self._places = _find_places(with_clones, names_of_keys)
        self._model = with_grad_sample_hooks(with_clones)

    def _hide_from_hooks(self, model: nn.Module) -> None:
        """Freeze the parameters whose per-sample gradients do not come from Opacus's hooks.

        These are parameters that the stacked model repeats for each row, whose ordinary gradient has a row for each
        image already, and weights that only the server changes.
        """
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                is_row_parameter = False
                if not self.one_by_one and not isinstance(module, StackedLayer):
                    is_row_parameter = parameter.requires_grad
                if is_row_parameter or isinstance(parameter, Merged):
                    module._parameters[name] = nn.Parameter(parameter.detach(), requires_grad=False)

    def sums(self, query: Query) -> State:
        """Return the sums (C, ...) of clipped gradients for the states that require gradients, by name."""
        try:
            if not self.one_by_one:
                return self._clipped_sums(query)
            sums_of_clients = []
            for client in range(len(query.counts)):
                sums_of_clients.append(self._clipped_sums(query.of_client(client)))
        finally:
            self._release_tensors()
        joined: State = {}
        for key in sums_of_clients[0]:
            joined[key] = torch.cat([sums[key] for sums in sums_of_clients])
        return joined

    def _release_tensors(self) -> None:
        """Release the memory of a query's tensors and their gradients, which the model's parameters refer to."""
        for place in chain.from_iterable(self._places.values()):
            parameter = place.module._parameters.get(place.name)
            if parameter is not None and hasattr(parameter, "grad_sample"):
                place.module._parameters[place.name] = nn.Parameter(parameter.new_empty(0))

    def _clipped_sums(self, query: Query) -> State:
        """Return the sums (C, ...) of clipped gradients of clients that run in one pass."""
        trained = {key: value.detach() for key, value in query.states.items() if value.requires_grad}
        # In double precision, the sum depends on the size of the blocks only in bits that are rounded away.
        totals = {key: double(torch.zeros_like(value)) for key, value in trained.items()}
        for block in query.blocks(self.options.physical_batch_size):
            is_real = real_rows(block.counts, block.x.shape[1], block.x.device)
            samples = self._sample_gradients(block, is_real)
            with torch.autocast(block.x.device.type, enabled=False):
                # A parameter that the pass did not use has a gradient of norm 0.
                norms = dict.fromkeys(totals, double(torch.zeros_like(is_real)))
                for key, sample in samples.items():
                    norms[key] = double(sample.squared_norms()).sqrt().view_as(is_real)
                factors = clipping_factors(norms, is_real, self.options.max_norm, self.options.clipping)
                for key, sample in samples.items():
                    totals[key] += sample.weighted_sums(factors[key])
        return {key: total.to(trained[key].dtype) for key, total in totals.items()}

    def _sample_gradients(self, block: Query, is_real: Tensor) -> "dict[str, PerSampleGrads | OuterProductGrads]":
        """Return the gradients of each row's loss, for the trained parameters that the pass used.

        Args:
            block: A block of a query.
            is_real: Mask (C, B) that is false for padding, whose loss is left out.
        """
        clients, rows = block.x.shape[:2]
        counts: tuple[int, ...] | None = block.counts
        if self.one_by_one:
            # In the single model only dropout has twins, which do not distinguish padding from real rows.
            counts = None
        self._context.begin(clients, counts, block.dropout)
        parameters = self._put_into_model(block.states, rows)
        train_mode(self._model)
        with torch.enable_grad(), silence_hook_warnings():
            x_R = self.engine.format(block.x.flatten(0, 1))
            logits = at_least_float32(self.engine.logits_of(self._model(x_R)))
            logits = logits.reshape(clients, rows, *logits.shape[1:])
            losses = row_losses(logits, block.y, self.task)
            losses.where(is_real, 0).sum().backward()
        samples: dict[str, PerSampleGrads | OuterProductGrads] = {}
        for key, parameter in parameters.items():
            state = block.states[key]
            if not state.requires_grad:
                continue
            if key in self._row_keys and parameter.grad is not None:
                # The ordinary gradient of a parameter that was repeated for every row consists of the rows' gradients.
                samples[key] = PerSampleGrads(parameter.grad.view(clients * rows, *state.shape[1:]))
                continue
            sample = collect_sample_gradients(parameter)
            if sample is not None:
                samples[key] = sample
        return samples

    def _put_into_model(self, states: State, num_rows: int) -> dict[str, nn.Parameter]:
        """Put the clients' tensors into the hooked model.

        Args:
            states: States (C, ...).
            num_rows: Number of rows of each client, for which some parameters are repeated.

        Returns:
            The new parameters by name.
        """
        parameters: dict[str, nn.Parameter] = {}
        for key, value in states.items():
            tensor = value.detach()
            if self.one_by_one:
                tensor = tensor[0]
            if key in self._row_keys:
                tensor = tensor.repeat_interleave(num_rows, 0).flatten(0, 1)
            first_place = self._places[key][0]
            if first_place.name in first_place.module._buffers:
                first_place.module._buffers[first_place.name] = tensor
                continue
            # Even if their gradients are not used: Opacus's hooks require this of every layer that they are on.
            parameter = nn.Parameter(tensor, requires_grad=key not in self._merged)
            # Opacus sets these attributes when it registers hooks, but this parameter is new.
            parameter.grad_sample = None  # type: ignore[attr-defined]  # Opacus's
            parameter._forward_counter = 0  # type: ignore[attr-defined]  # Opacus's
            parameters[key] = parameter
            for place in self._places[key]:
                place.module._parameters[place.name] = parameter
        return parameters


def _copy_sharing_frozen(model: nn.Module) -> nn.Module:
    """Return a copy of a model that shares the frozen parameters and the buffers."""
    return copy_module(model, lambda tensor: None if tensor.requires_grad else tensor)


def _tied_parameters(model: nn.Module) -> dict[str, list[str]]:
    """Return all names of each parameter, by the first of them."""
    names_of_tensor: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of_tensor.setdefault(id(parameter), []).append(name)
    return {aliases[0]: aliases for aliases in names_of_tensor.values()}


def _find_places(model: nn.Module, names_of_key: dict[str, list[str]]) -> dict[str, list[_Place]]:
    """Return the places of tensors in a model.

    Args:
        model: The model, whose layers may be wrapped in :class:`_ClonedOutput`.
        names_of_key: All names of each tensor, by its key.

    Returns:
        The places of each tensor, by its key.
    """
    modules = dict(_modules_behind_clones(model))
    places_of_module: dict[str, list[_Place]] = {}
    for key, aliases in names_of_key.items():
        places_of_module[key] = []
        for alias in aliases:
            path, _, name = alias.rpartition(".")
            places_of_module[key].append(_Place(modules[path], name))
    return places_of_module


@dataclass(frozen=True)
class PerSampleGrads:
    """Materialised per-sample gradients of one parameter.

    Attributes:
        rows: Gradient (R, ...) of each row.
    """

    rows: Tensor

    def squared_norms(self) -> Tensor:
        """Return the squared norm (R,) of each row's gradient."""
        return self.rows.flatten(1).square().sum(1)

    def weighted_sums(self, factors: Tensor) -> Tensor:
        """Return the weighted sum over each client's rows.

        With the factors of :func:`.clipping_factors`, one image more or less changes the sums by the bound at most, up
        to rounding: see :func:`.sum_outer_products`.

        Args:
            factors: Factor (C, B) of each row. A row with factor 0 is left out, even if it is not finite.

        Returns:
            The sums (C, ...), in double precision where the device supports it.
        """
        # A flattened gradient is its outer product with 1.
        num_rows = len(self.rows)
        flat = self.rows.reshape(num_rows, 1, -1)
        ones = self.rows.new_ones(1, 1, 1).expand(num_rows, 1, 1)
        sums = sum_outer_products(flat, ones, factors)
        return sums.view(len(factors), *self.rows.shape[1:])


@dataclass(frozen=True)
class OuterProductGrads:
    """Per-sample gradients of a linear map's weight as sums of outer products: Σ_n b_rn a_rnᵀ for row r.

    Attributes:
        inputs: Inputs a (R, N, I) of the map.
        output_grads: Gradients b (R, N, O) of its outputs.
        weight_shape: Shape (O, I, ...) of the weight.
    """

    inputs: Tensor
    output_grads: Tensor
    weight_shape: torch.Size

    def squared_norms(self) -> Tensor:
        """Return an upper bound (R,) of each row's squared norm: Σ_nm (a_n · a_m)(b_n · b_m) plus its rounding error.

        The terms may cancel, even to 0, but the rounding error of the row in the sum over rows is as large as the
        terms. The clipping factor must therefore be small if S = Σ_n ‖a_n‖‖b_n‖ is large. By the Cauchy–Schwarz
        inequality, the rounding error here is at most (I + O + N²) 2⁻⁵³ S² to first order (Higham 2002, section 3.1),
        of which eight times is added. Then S times the factor is at most C / √(8 (I + O + N²) 2⁻⁵³), where C is the
        clipping bound, and the rounding error of a row in :func:`~perada.privacy.clipping.sum_outer_products` is at
        most 64 √(2⁻⁵³ / 8) C < 3e-7 C.
        """
        a = self.inputs.double()
        b = self.output_grads.double()
        _, positions, inputs = a.shape  # N and I
        outputs = b.shape[2]  # O
        gram_a = torch.bmm(a, a.transpose(1, 2))  # a_n · a_m, (R, N, N)
        gram_b = torch.bmm(b, b.transpose(1, 2))  # b_n · b_m
        squares = (gram_a * gram_b).sum((1, 2))
        squared_lengths = a.square().sum(2) * b.square().sum(2)  # ‖a_n‖²‖b_n‖², (R, N)
        lengths = squared_lengths.sqrt().sum(1)  # S
        # Eight times 2⁻⁵³.
        slack = 2**-50 * (inputs + outputs + positions**2)
        return squares.clamp(min=0) + slack * lengths.square()

    def weighted_sums(self, factors: Tensor) -> Tensor:
        """Return the weighted sum (C, ...) over each client's rows, like :meth:`PerSampleGrads.weighted_sums`."""
        sums = sum_outer_products(self.inputs, self.output_grads, factors)
        return sums.view(len(factors), *self.weight_shape)


def collect_sample_gradients(parameter: nn.Parameter) -> PerSampleGrads | OuterProductGrads | None:
    """Return the per-sample gradients that the hooks stored on a parameter; None if the pass did not use it."""
    uses: list[_LayerUse] = getattr(parameter, "layer_uses", [])
    if uses:
        # If a layer was used twice, the positions of both uses are summed over.
        inputs = torch.cat([use.inputs for use in uses], dim=1)
        output_grads = torch.cat([use.output_grads for use in uses], dim=1)
        return OuterProductGrads(at_least_float32(inputs), at_least_float32(output_grads), parameter.shape[1:])
    rows = parameter.grad_sample  # type: ignore[attr-defined]  # Opacus's
    if rows is None:
        return None
    return PerSampleGrads(at_least_float32(rows))


@contextmanager
def silence_hook_warnings() -> Iterator[None]:
    """Silence torch's warnings about hooked layers whose input is an image, and attention that Opacus replaces."""
    with warnings.catch_warnings():
        for message in ("grad and param do not obey", "There is a performance drop", "Full backward hook is firing"):
            warnings.filterwarnings("ignore", message, UserWarning)
        yield


class _ClonedOutput(WrappingSubstitute):
    """Wraps a layer and returns a copy of its output, which the network may change in place.

    torch forbids in-place changes of the output of a layer with a backward hook.
    """

    def forward(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401  # the layer's
        return self.original(*args, **options).clone()


def clone_outputs(module: nn.Module) -> nn.Module:
    """Return a model in which every layer that Opacus will hook returns a copy of its output.

    Containers are copied, layers are wrapped, and everything without trained parameters is shared.
    """
    if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
        return _ClonedOutput(module)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return module
    children: dict[str, nn.Module | None] = {}
    for name, child in module._modules.items():
        # torch registers an optional child that is absent as None.
        children[name] = None
        if child is not None:
            children[name] = clone_outputs(child)
    return shell(module, children)


def _modules_behind_clones(module: nn.Module, module_path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules with their paths in the network without :class:`_ClonedOutput`."""
    if isinstance(module, _ClonedOutput):
        module = module.original
    yield module_path, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _modules_behind_clones(child, f"{module_path}.{name}" if module_path else name)


def with_grad_sample_hooks(model: nn.Module) -> nn.Module:
    """Return the model in a GradSampleModule of Opacus, with a sampler for every class of stacked layers in it."""
    import_opacus()
    from opacus.grad_sample import GradSampleModule

    stacked_classes = {type(module) for module in model.modules() if isinstance(module, StackedLayer)}
    samplers = _samplers_by_layer() | dict.fromkeys(stacked_classes, _sample_stacked_layer)
    train_mode(model)

    class Hooked(GradSampleModule):  # type: ignore[misc]  # Opacus has no types
        """A GradSampleModule with its own registry of samplers; that of its base is shared by the whole process."""

        GRAD_SAMPLERS = samplers

        def capture_backprops_hook(
            self, module: nn.Module, inputs: object, output_grads: tuple[Tensor, ...], **options: Any
        ) -> None:
            """Compute the per-sample gradients of a module.

            Modules without a sampler are run again for each row, in the precision of their parameters. Opacus would do
            so in that of the outputs' gradients, which is lower under autocast, and in which timm's norms fail.
            """
            if not hasattr(module, "ft_compute_sample_grad"):
                super().capture_backprops_hook(module, inputs, output_grads, **options)
                return
            dtype = next(module.parameters()).dtype
            first_grad, *other_grads = output_grads
            with torch.autocast(first_grad.device.type, enabled=False):
                super().capture_backprops_hook(module, inputs, (first_grad.to(dtype), *other_grads), **options)

    hooked: nn.Module = Hooked(model, loss_reduction="sum", strict=False)
    return hooked


def _samplers_by_layer() -> dict[type[nn.Module], Sampler]:
    """Return Opacus's samplers by class of layer, with perada's sampler for convolutions."""
    import_opacus()
    from opacus.grad_sample import GradSampleModule

    return {**GradSampleModule.GRAD_SAMPLERS, nn.Conv2d: _sample_conv2d}


def _sample_conv2d(layer: nn.Conv2d, activations: list[Tensor], backprops: Tensor) -> dict[nn.Parameter, Tensor]:
    """Return the per-sample gradients of a convolution, computed by Opacus's sampler."""
    from opacus.grad_sample.conv import compute_conv_grad_sample

    # Opacus 1.6.0 reads channels-last tensors as if they were contiguous. A map of one position may be both, and
    # becomes channels-last again when Opacus pads it, unless it has the strides of a contiguous tensor.
    images = activations[0].contiguous().flatten().view(activations[0].shape)
    samples: dict[nn.Parameter, Tensor] = compute_conv_grad_sample(layer, [images], backprops.contiguous())
    return samples


def _sample_stacked_layer(
    layer: StackedLayer,
    activations: list[Tensor],
    backprops: Tensor,
) -> dict[nn.Parameter, Tensor]:
    """Return the per-sample gradients of a stacked layer's parameters, as a sampler of Opacus.

    Given the input of a row and the gradient of its output, the row's gradient does not depend on the parameters of its
    client. It can therefore be computed by Opacus's sampler for the original layer.
    """
    samples = _record_outer_product(layer, activations[0], backprops)
    if samples is not None:
        return samples
    original = layer.original[0]
    samplers = _samplers_by_layer()
    # timm's layers are subclasses of torch's, and computed in the same way unless their twin overrides it.
    classes = type(original).__mro__ if layer.like_torch else ()
    for layer_class in classes:
        if layer_class in samplers:
            samples_of_original = samplers[layer_class](original, activations, backprops)
            # Opacus looks gradients up by the parameters of the stacked layer, which have the names of the original's.
            samples_of_layer = {}
            for name, parameter in original.named_parameters(recurse=False):
                if parameter in samples_of_original:
                    samples_of_layer[getattr(layer, name)] = samples_of_original[parameter]
            return samples_of_layer
    return _sample_by_autograd(layer, activations, backprops)


def _sample_by_autograd(
    layer: StackedLayer,
    activations: list[Tensor],
    backprops: Tensor,
) -> dict[nn.Parameter, Tensor]:
    """Return the per-sample gradients of a layer without a sampler, by running each row as a separate client."""
    original = layer.original[0]
    clients = layer.context.num_clients
    rows = len(backprops)
    trained: dict[str, nn.Parameter] = {}
    repeated: dict[str, Tensor] = {}
    for name, _ in original.named_parameters(recurse=False):
        if name not in layer.frozen:
            trained[name] = getattr(layer, name)
            repeated[name] = trained[name].detach().repeat_interleave(rows // clients, 0).requires_grad_()
    # A call of the layer itself would run the hooks again.
    without_hooks = copy.copy(layer)
    without_hooks._parameters = dict(layer._parameters)
    without_hooks._forward_hooks = OrderedDict()
    without_hooks._backward_hooks = OrderedDict()
    counts = layer.context.counts
    layer.context.num_clients = rows
    layer.context.counts = None
    try:
        with torch.enable_grad():
            output = functional_call(without_hooks, repeated, tuple(activations))
        gradients = torch.autograd.grad(output, list(repeated.values()), backprops)
    finally:
        layer.context.num_clients = clients
        layer.context.counts = counts
    return {trained[name]: gradient for name, gradient in zip(repeated, gradients, strict=True)}


@dataclass(frozen=True)
class _LayerUse:
    """One use of a linear map in a pass.

    Attributes:
        inputs: Inputs a (R, N, I) of the map.
        output_grads: Gradients b (R, N, O) of its outputs.
    """

    inputs: Tensor
    output_grads: Tensor


def _record_outer_product(layer: StackedLayer, x: Tensor, backprops: Tensor) -> dict[nn.Parameter, Tensor] | None:
    """Store the factors of a layer's gradients on its weight, if that is cheaper than to materialise the gradients.

    Args:
        layer: The stacked layer.
        x: Its input (R, ...).
        backprops: Gradient (R, ...) of its output.

    Returns:
        Gradients for Opacus: an empty one of the weight, and that of the bias. None if nothing was stored.
    """
    weight: Any = None if "weight" in layer.frozen else getattr(layer, "weight", None)
    if weight is None:
        return None
    # All uses of a layer in one pass must be stored in the same form, since their gradients are added.
    is_recorded = hasattr(weight, "layer_uses")
    # Opacus sets this attribute when it stores the gradients of an earlier use.
    is_materialised = hasattr(weight, "_current_grad_sample") and not is_recorded
    if is_materialised:
        return None
    original = layer.original[0]
    use = _layer_use(original, x, backprops, is_recorded)
    if use is None:
        return None
    weight.layer_uses = [*getattr(weight, "layer_uses", []), use]
    samples: dict[nn.Parameter, Tensor] = {weight: backprops.new_empty(len(backprops), 0)}
    if original.bias is not None and original.bias.requires_grad:
        bias: Any = layer.bias
        samples[bias] = use.output_grads.sum(1)
    return samples


def _layer_use(layer: nn.Module, x: Tensor, backprops: Tensor, always: bool) -> _LayerUse | None:
    """Return the inputs and output gradients of a layer by position, if it is a linear map of each position.

    Args:
        layer: The original layer.
        x: Its input (R, ...).
        backprops: Gradient (R, ...) of its output.
        always: Whether to return them even if a gradient (O, I) of each row is cheaper.

    Returns:
        The inputs and gradients. None for other layers, if materialised gradients are cheaper, or if the device does
        not support double precision.
    """
    if double_dtype(x.device) is not torch.float64:
        return None
    if type(layer) is nn.Linear:
        positions = math.prod(x.shape[1:-1])
    elif type(layer) is nn.Conv2d and layer.groups == 1 and layer.padding_mode == "zeros":
        # F.unfold below accepts only numbers.
        if isinstance(layer.padding, str):
            return None
        positions = math.prod(backprops.shape[2:])
    else:
        return None
    # The norm takes two Gram matrices (N, N) for each row, a materialised gradient is a matrix (O, I).
    is_cheaper = 2 * positions**2 < layer.weight.numel()
    if not is_cheaper and not always:
        return None
    if isinstance(layer, nn.Linear):
        inputs = x.reshape(len(x), -1, x.shape[-1])
        output_grads = backprops.reshape(len(x), -1, backprops.shape[-1])
        return _LayerUse(inputs, output_grads)
    assert not isinstance(layer.padding, str)  # see above
    patches = F.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    # In both, the last axis is the position.
    return _LayerUse(patches.transpose(1, 2), backprops.flatten(2).transpose(1, 2))
