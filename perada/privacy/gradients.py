# SPDX-License-Identifier: Apache-2.0
"""Noisy gradients of many clients: every image's gradient clipped, summed by client, noise added (DP-SGD).

Opacus's hooks give every row's gradient, whole or as factors. The gradient of a linear map's weight for one image is a
sum over its N positions (tokens, pixels) of outer products b_n a_nᵀ of backpropagated and forward activations. Where N
is small, its norm and the clipped sum over images are cheaper to compute from a and b than from the gradients
themselves, which are then never laid out (the ghost norm of Goodfellow 2015 and Li et al. 2022, with the sum of Bu et
al. 2023).

Shape suffixes: C clients, B images a client, R = C·B rows, N positions, I inputs, O outputs.
"""

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from perada.core.checks import OptionError
from perada.core.seeding import Streams
from perada.core.states import Merged, State, train_mode, trained_keys
from perada.engine.engine import Engine, real_rows, row_losses
from perada.engine.fold import fold, shell
from perada.engine.frozen_trunk import Wrapper
from perada.engine.stacked_layers import StackedLayer
from perada.privacy.clipping import factors_of, noisy_mean, summed_products, wide
from perada.privacy.options import Privacy
from perada.server.aggregate import double, double_dtype


@dataclass
class Query:
    """One look at the images of C clients."""

    states: State  # stack (C, ...); those that require gradients are asked about
    x: Tensor  # images (C, B, ...)
    y: Tensor  # labels (C, B) or (C, B, K)
    counts: tuple[int, ...]  # real rows of each client, 0 for a batch without images
    dropout: Streams  # the clients' random streams
    noise: list[torch.Generator] | None = None  # one random stream per client; None for the cryptographic generator
    noise_multipliers: Sequence[float] = ()  # σ of each client
    expected: Sequence[float] = ()  # images expected in each client's batch

    def of(self, rows: slice) -> "Query":
        """The part of some clients, without noise."""
        states = {key: value[rows] for key, value in self.states.items()}
        return Query(states, self.x[rows], self.y[rows], self.counts[rows], self.dropout[rows])

    def slices(self, size: int | None) -> Iterator[tuple[Tensor, Tensor, tuple[int, ...]]]:
        """Images, labels and counts of at most ``size`` rows of each client; none where there is no image at all."""
        widest = max(self.counts)
        for start in range(0, widest, size or max(1, widest)):
            stop = min(start + (size or widest), widest)
            counts = tuple(max(0, min(count, stop) - start) for count in self.counts)
            yield self.x[:, start:stop], self.y[:, start:stop], counts


class SampleGradients:
    """Answers queries: gives the noisy gradient (C, ...) of each client's mean loss, for the states asked about.

    All clients are one batch for the stacked model, or each is run ``alone``, by the single one: where the options or
    the training engine say so. The engine's own model stays as it is. A ValueError if the stacked model is not to be
    had.
    """

    def __init__(self, options: Privacy, engine: Engine, multilabel: bool) -> None:
        self.options, self.engine, self.multilabel = options, engine, multilabel
        self.alone = (engine.kind if options.engine == "auto" else options.engine) != "folded"
        if not self.alone and engine.kind != "folded":
            raise OptionError(
                "privacy: engine='folded' needs a training engine that folds; choose privacy engine 'opacus' or "
                "'auto', or set engine (model.engine) to 'folded'",
                name="privacy: engine",
                value="folded",
            )
        frozen = [one for one in chain(engine.model.parameters(), engine.model.buffers()) if not one.requires_grad]
        model = copy.deepcopy(engine.model, {id(one): one for one in frozen}) if self.alone else engine.model
        wrap = None if engine.trunk is None else engine.trunk.wrap
        folded = fold(model, random_only=self.alone, wrap=wrap)
        self._context, self._rows = folded.context, folded.row_keys
        self._merged = {key for key, one in engine.model.named_parameters() if isinstance(one, Merged)}
        for module in folded.model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                rows = parameter.requires_grad and not (
                    self.alone or isinstance(module, StackedLayer)
                )  # one copy a row
                if rows or isinstance(parameter, Merged):  # run without hooks
                    module._parameters[name] = nn.Parameter(parameter.detach(), requires_grad=False)
        places: dict[int, list[str]] = {}
        for place, parameter in model.named_parameters(remove_duplicate=not self.alone):  # tied ones have several
            places.setdefault(id(parameter), []).append(place)
        alike = {keys[0]: keys for keys in places.values()}
        split = apart(folded.model)
        modules = dict(layers(split))
        parts = {key: [one.rpartition(".") for one in alike.get(key, [key])] for key in trained_keys(engine.model)}
        self._owners = {key: [(modules[path], name) for path, _, name in own] for key, own in parts.items()}
        self._model = hooked(split)

    def __call__(self, query: Query) -> State:
        """Answer ``query``."""
        std = [sigma * self.options.max_norm for sigma in query.noise_multipliers]
        return noisy_mean(self.sums(query), std, query.expected, query.noise)

    def sums(self, query: Query) -> State:
        """The sums (C, ...) of clipped gradients, without noise."""
        leaves = {key: value.detach() for key, value in query.states.items() if value.requires_grad}
        summed = {key: double(torch.zeros_like(value)) for key, value in leaves.items()}
        clients, together = len(query.counts), 1 if self.alone else len(query.counts)
        try:
            for first in range(0, clients, together):
                rows = slice(first, first + together)
                self._add(query.of(rows), {key: value[rows] for key, value in summed.items()})
        finally:  # let go of the query's tensors
            for module, name in chain.from_iterable(self._owners.values()):
                parameter = module._parameters.get(name)
                if parameter is not None and hasattr(parameter, "grad_sample"):
                    module._parameters[name] = nn.Parameter(parameter.new_empty(0))
        return {key: value.to(leaves[key].dtype) for key, value in summed.items()}

    def _add(self, query: Query, summed: State) -> None:
        """Add clipped gradients to the clients' sums (C, ...)."""
        for part, (x, y, counts) in enumerate(query.slices(self.options.physical_batch_size)):
            real = real_rows(counts, x.shape[1], x.device)
            samples = self._samples(query, x, y, counts, real, query.dropout.fork("part", part))
            with torch.autocast(x.device.type, enabled=False):
                norms = dict.fromkeys(summed, double(torch.zeros_like(real)))  # no image passed some
                norms |= {key: double(sample.squares()).sqrt().view_as(real) for key, sample in samples.items()}
                factors = factors_of(norms, real, self.options.max_norm, self.options.clipping)
                for key, sample in samples.items():
                    summed[key] += sample.summed(factors[key])

    def _samples(
        self, query: Query, x: Tensor, y: Tensor, counts: tuple[int, ...], real: Tensor, dropout: Streams
    ) -> "dict[str, PerSampleGrads | OuterProductGrads]":
        """Gradient of every row's loss."""
        clients, rows = x.shape[:2]
        self._context.begin(clients, None if self.alone else counts, dropout)
        held: dict[str, nn.Parameter] = {}
        for key, value in query.states.items():
            tensor = value.detach()[0] if self.alone else value.detach()
            if key in self._rows:
                tensor = tensor.repeat_interleave(rows, 0).flatten(0, 1)
            (module, name), *_ = self._owners[key]
            if name in module._buffers:
                module._buffers[name] = tensor
                continue
            # All of them, asked about or not: the hooks want every layer's gradient once they are there.
            held[key] = parameter = nn.Parameter(tensor, requires_grad=key not in self._merged)
            parameter.grad_sample, parameter._forward_counter = None, 0  # type: ignore[attr-defined]  # Opacus's
            for module, name in self._owners[key]:
                module._parameters[name] = parameter
        train_mode(self._model)
        with torch.enable_grad(), quiet():
            logits = self._model(self.engine.format(x.flatten(0, 1)))
            losses = row_losses(wide(logits).view(clients, rows, *logits.shape[1:]), y, self.multilabel)
            losses.where(real, 0).sum().backward()
        samples: dict[str, PerSampleGrads | OuterProductGrads] = {}
        for key, parameter in held.items():
            if query.states[key].requires_grad:
                sample = row_gradients(parameter)
                if key in self._rows and parameter.grad is not None:
                    sample = PerSampleGrads(parameter.grad.view(clients * rows, *query.states[key].shape[1:]))
                if sample is not None:
                    samples[key] = sample
        return samples


@dataclass
class PerSampleGrads:
    """Gradients (R, ...) of the rows for one parameter, as they are."""

    rows: Tensor

    def squares(self) -> Tensor:
        """Squared norm (R,) of each."""
        return self.rows.flatten(1).square().sum(1)

    def summed(self, factors: Tensor) -> Tensor:
        """Sum (C, ...) over each client's rows, times their factors (C, B); see :func:`.left_out`.

        In double precision where the device has it. With the factors of :func:`.factors_of`, one image more or less
        changes the sums by the bound at most, but for rounding: see :func:`.summed_products`.
        """
        ones = self.rows.new_ones(1, 1, 1).expand(len(self.rows), 1, 1)
        found = summed_products(self.rows.reshape(len(self.rows), 1, -1), ones, factors)
        return found.view(len(factors), *self.rows.shape[1:])


@dataclass
class OuterProductGrads:
    """Gradients of a linear map's weight (O, I, ...), which has this shape, as factors: row r has Σ_n b_rn a_rnᵀ.

    They are the inputs a (R, N, I), and the gradients b (R, N, O) by the outputs.
    """

    a: Tensor
    b: Tensor
    shape: torch.Size

    def squares(self) -> Tensor:
        """Upper bound of each squared norm (R,), Σ_nm (a_n · a_m)(b_n · b_m) and a bound of its rounding error.

        The terms may cancel, to 0 even, and leave a rounding error in the sum of rows that is as large as the terms. So
        a row's factor must be small if S = Σ_n ‖a_n‖‖b_n‖ is large. By Cauchy and Schwarz's inequality the rounding
        error here is at most (I + O + N²) 2⁻⁵³ S² to first order (Higham 2002, section 3.1); eight times that is added.
        Then S times the factor is at most C / √(8 (I + O + N²) 2⁻⁵³), and the rounding error of a row in
        :func:`~perada.privacy.clipping.summed_products` at most 64 √(2⁻⁵³ / 8) C < 3e-7 C.
        """
        a, b = self.a.double(), self.b.double()
        squares = (torch.bmm(a, a.transpose(1, 2)) * torch.bmm(b, b.transpose(1, 2))).sum((1, 2))
        lengths = (a.square().sum(2) * b.square().sum(2)).sqrt().sum(1)
        slack = 2**-50 * (a.shape[2] + b.shape[2] + a.shape[1] ** 2)
        return squares.clamp(min=0) + slack * lengths.square()

    def summed(self, factors: Tensor) -> Tensor:
        """As :meth:`PerSampleGrads.summed`."""
        return summed_products(self.a, self.b, factors).view(len(factors), *self.shape)


def row_gradients(parameter: nn.Parameter) -> PerSampleGrads | OuterProductGrads | None:
    """What the hooks left in a stacked layer's parameter; ``None`` if it took no part."""
    parts: list[tuple[Tensor, Tensor]] = getattr(parameter, "factors", [])
    if parts:  # a layer that was used twice has more positions
        a, b = (torch.cat([part[side] for part in parts], 1) for side in (0, 1))
        return OuterProductGrads(wide(a), wide(b), parameter.shape[1:])
    rows = parameter.grad_sample  # type: ignore[attr-defined]  # Opacus's
    return None if rows is None else PerSampleGrads(wide(rows))


@contextmanager
def quiet() -> Iterator[None]:
    """Silence what torch says of hooked layers whose input is an image, and of attention under Opacus's fallback."""
    with warnings.catch_warnings():
        for begins in ("grad and param do not obey", "There is a performance drop", "Full backward hook is firing"):
            warnings.filterwarnings("ignore", begins, UserWarning)
        yield


class _Apart(Wrapper):
    """Hands out a copy of what a hooked layer gives, which the network may then change in place."""

    def forward(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401  # the layer's
        return self.original(*args, **options).clone()


def apart(module: nn.Module) -> nn.Module:
    """A copy of the containers in which each layer that Opacus will hook is set apart."""
    if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
        return _Apart(module)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return module
    return shell(module, {name: child and apart(child) for name, child in module._modules.items()})


def layers(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """All modules by the path that they have in the network, the wrappers being none."""
    if isinstance(module, _Apart):
        module = module.original
    yield path, module
    for name, child in module._modules.items():
        if child is not None:
            yield from layers(child, f"{path}.{name}" if path else name)


def hooked(model: nn.Module) -> Any:  # noqa: ANN401  # opacus.GradSampleModule, imported late since that takes seconds
    """``model`` under Opacus's hooks, the stacked layers in its registry."""
    from opacus.grad_sample import GradSampleModule

    twins = {type(module) for module in model.modules() if isinstance(module, StackedLayer)}
    samplers = _samplers() | dict.fromkeys(twins, _sample_gradients)
    train_mode(model)
    # A class of its own: Opacus's registry is of the whole process.
    return type("Hooked", (GradSampleModule,), {"GRAD_SAMPLERS": samplers})(model, loss_reduction="sum", strict=False)


def _samplers() -> dict[type[nn.Module], Callable[..., dict[nn.Parameter, Tensor]]]:
    """Opacus's samplers, but for that of convolutions."""
    from opacus.grad_sample import GradSampleModule

    return {**GradSampleModule.GRAD_SAMPLERS, nn.Conv2d: _conv_gradients}


def _conv_gradients(layer: nn.Conv2d, activations: list[Tensor], backprops: Tensor) -> dict[nn.Parameter, Tensor]:
    """Opacus's sampler of convolutions, which takes channels-last tensors for contiguous ones (seen in 1.6.0)."""
    from opacus.grad_sample.conv import compute_conv_grad_sample

    plain = [activations[0].contiguous()], backprops.contiguous()
    found: dict[nn.Parameter, Tensor] = compute_conv_grad_sample(layer, *plain)
    return found


def _sample_gradients(layer: StackedLayer, activations: list[Tensor], backprops: Tensor) -> dict[nn.Parameter, Tensor]:
    """Gradient (R, ...) of every row for a stacked layer's parameters, as Opacus's registry wants it.

    It does not depend on the client, so that Opacus's sampler for the layer's original gives it. Where there is none,
    every row is taken for a client of its own. Where factors are cheaper they are kept, and Opacus gets an empty one.
    """
    original = layer.original[0]
    names = {parameter: name for name, parameter in original.named_parameters(recurse=False)}
    weight: Any = None if "weight" in layer.frozen else getattr(layer, "weight", None)
    used = weight is not None and (hasattr(weight, "factors"), hasattr(weight, "_current_grad_sample"))
    factors = _factors(original, activations[0], backprops, used[0]) if used and used != (False, True) else None
    if factors is not None:
        weight.factors = [*getattr(weight, "factors", []), factors]
        found = {weight: backprops.new_empty(len(backprops), 0)}
        if original.bias is not None and original.bias.requires_grad:
            found[layer.bias] = factors[1].sum(1)
        return found
    samplers = _samplers()
    kinds = type(original).__mro__ if layer.like_torch else ()  # timm subclasses torch's
    kind = next((kind for kind in kinds if kind in samplers), None)
    if kind is not None:
        samples = samplers[kind](original, activations, backprops)
        return {getattr(layer, names[parameter]): sample for parameter, sample in samples.items()}
    rows, clients = len(backprops), layer.context.clients
    own: dict[str, nn.Parameter] = {name: getattr(layer, name) for name in names.values() if name not in layer.frozen}
    each = {name: value.detach().repeat_interleave(rows // clients, 0).requires_grad_() for name, value in own.items()}
    bare = copy.copy(layer)  # without Opacus's hooks
    bare._parameters, bare._forward_hooks, bare._backward_hooks = dict(layer._parameters), OrderedDict(), OrderedDict()
    counts, layer.context.clients, layer.context.counts = layer.context.counts, rows, None
    try:
        with torch.enable_grad():
            out = functional_call(bare, each, tuple(activations))
        gradients = torch.autograd.grad(out, list(each.values()), backprops)
    finally:
        layer.context.clients, layer.context.counts = clients, counts
    return {own[name]: gradient for name, gradient in zip(each, gradients, strict=True)}


def _factors(layer: nn.Module, x: Tensor, backprops: Tensor, always: bool) -> tuple[Tensor, Tensor] | None:
    """The factors a (R, N, I) and b (R, N, O) of a layer that is a linear map of positions, if they are the cheaper.

    ``always`` if there are some already, of an earlier use of the layer; never where the device has no double.
    """
    if double_dtype(x.device) is not torch.float64:
        return None
    if type(layer) is nn.Linear:
        a, b = x.reshape(len(x), -1, x.shape[-1]), backprops.reshape(len(x), -1, backprops.shape[-1])
    elif type(layer) is nn.Conv2d and layer.groups == 1 and layer.padding_mode == "zeros":
        if isinstance(layer.padding, str) or not (always or 2 * backprops[0, 0].numel() ** 2 < layer.weight.numel()):
            return None
        a = F.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride).transpose(1, 2)
        b = backprops.flatten(2).transpose(1, 2)
    else:
        return None
    return (a, b) if always or 2 * a.shape[1] ** 2 < a.shape[2] * b.shape[2] else None
