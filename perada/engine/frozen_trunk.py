# SPDX-License-Identifier: Apache-2.0
"""The part of a model that no trained tensor precedes, whose outputs for an image stay the same for the whole run.

It is the complete backbone if only a head is trained, and the stem and the first frozen layers if adapters are. It is
found by experiments, so that any model will do. A module is *constant* if its output on examples stays the same when
the trained tensors, the mode or the other images change, and no random number is drawn before it. A constant module is
*needed* if the logits change without its output. In the end, features must give the same logits as their images.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from perada.core.states import clone, tied_names, train_mode
from perada.engine.fold import draws, fold
from perada.engine.stacked_layers import StackedDropout
from perada.engine.substitutes import WrappingSubstitute


class _Enough(Exception):
    """Raised to end a pass through the model early, when all features have been computed."""


class FrozenTrunk:
    """The constant modules of a model, and their outputs in the pass under way.

    The *features* of an image are the needed outputs, flattened and concatenated: (F,).

    Attributes:
        shapes: Shape of each constant module's output for one image, by path.
        needed: Paths of the modules whose outputs are the features.
        image: Shape of an image.
        share: Share of a forward pass's floating-point operations that features save.
        size: F.
        spoil: Fill outputs that should not be used, and blank images, with NaN, to find out whether they are used.
    """

    def __init__(
        self, shapes: dict[str, torch.Size], needed: tuple[str, ...], image: torch.Size, share: float = 0.0
    ) -> None:
        self.shapes = shapes
        self.needed = needed
        self.image = image
        self.share = share
        self.size = sum(shapes[path].numel() for path in needed)
        self.rows = 0
        self.spoil = False
        # Outputs that are cut from features, while a pass runs on features.
        self._given: dict[str, Tensor] | None = None
        self._formats: dict[str, tuple[torch.dtype, torch.memory_format]] = {}
        # Outputs that are recorded, while features are computed.
        self._recorded: dict[str, Tensor] | None = None

    def wrap(self, module: nn.Module, path: str) -> nn.Module:
        """Return the replacement of the module at ``path`` in a folded model."""
        if path in self.shapes:
            return ConstantModule(module, path, self)
        return module

    def parts(self, features: Tensor) -> dict[str, Tensor]:
        """Split features (R, F) into the flattened outputs of the needed modules."""
        sizes = [self.shapes[path].numel() for path in self.needed]
        return dict(zip(self.needed, torch.split(features, sizes, 1), strict=True))

    def holds(self, x_R: Tensor) -> bool:
        """Return whether rows are features (R, F) instead of images."""
        return x_R.dim() == 2 and x_R.shape[1] == self.size

    def feed(self, x_R: Tensor) -> Tensor:
        """Return the model's input: images (R, ...) as they are, or a blank image for each row of features.

        The modules' outputs are copies of the features, since a model may change them in place.
        """
        self._given = None
        if not self.holds(x_R):
            return x_R
        self.rows = len(x_R)
        self._given = {}
        for path, part in self.parts(x_R).items():
            dtype, layout = self._formats.get(path, (part.dtype, torch.contiguous_format))
            self._given[path] = part.view(-1, *self.shapes[path]).to(dtype, copy=True, memory_format=layout)
        blank = torch.nan if self.spoil else 0.0
        return x_R.new_full((), blank).expand(self.rows, *self.image)

    def features(self, model: nn.Module, x_R: Tensor) -> Tensor:
        """Compute features (R, F) of images (R, ...) by a model with this trunk's :class:`ConstantModule` instances."""
        self._given = None
        self._recorded = {}
        with suppress(_Enough), torch.no_grad():
            model.eval()(x_R)
        outputs = self._recorded
        self._recorded = None
        self._formats = {path: (value.dtype, _layout(value)) for path, value in outputs.items()}
        return torch.cat([outputs[path].flatten(1) for path in self.needed], 1)

    def output(self, path: str, run: Callable[[], Tensor], like: Tensor) -> Tensor:
        """Return the output of the module at ``path`` in this pass.

        Args:
            path: Path of the module.
            run: Computes the output.
            like: Tensor with the number format and device of the output.
        """
        if self._given is not None:
            if path in self._given:
                return self._given[path]
            # The values of an output that is not needed are not used, but it must have the right shape.
            shape = (self.rows, *self.shapes[path])
            if self.spoil:
                return like.new_full(shape, torch.nan)
            return like.new_empty(shape)
        out = run()
        if self._recorded is not None and path in self.needed:
            self._recorded[path] = out.clone()
            if len(self._recorded) == len(self.needed):
                raise _Enough
        return out


class ConstantModule(WrappingSubstitute):
    """Replaces a constant module."""

    def __init__(self, original: nn.Module, path: str, trunk: FrozenTrunk) -> None:
        super().__init__(original)
        self.path = path
        self.trunk = trunk

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Return the output of the original, computed now or cut from the features of this pass."""
        return self.trunk.output(self.path, lambda: self.original(x, *args, **kwargs), x)


def _layout(value: Tensor) -> torch.memory_format:
    if value.dim() != 4 or value.is_contiguous():
        return torch.contiguous_format
    if value.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    return torch.contiguous_format


def find_trunk(model: nn.Module, image: Tensor, least_share: float = 0.0) -> FrozenTrunk | None:
    """Find the constant modules of the single model, and which of them are needed.

    Args:
        model: The single model.
        image: A prepared example (channels, height, width).
        least_share: Share of a pass's floating-point operations that features must save.

    Returns:
        The trunk; None if there are no constant modules, or passes with features fail, give other logits, or save less.
    """
    # For a text, the same tokens in another order.
    third_image = 0.5 * image if image.is_floating_point() else image.roll(1)
    x_R = torch.stack([image, image.flip(-1), third_image])
    try:
        return _find(model, x_R, least_share)
    except Exception as error:  # the code of a model between its modules can fail in any way
        failed = f"{type(error).__name__}: {error}"
        logging.getLogger(__name__).info("features of the model's frozen part cannot replace images: %s", failed)
        return None


def _find(model: nn.Module, x_R: Tensor, least_share: float) -> FrozenTrunk | None:
    shapes = _constant(model, x_R)
    if not shapes:
        return None
    trunk = FrozenTrunk(shapes, tuple(shapes), x_R.shape[1:])
    trunk.spoil = True
    module = fold(model, random_only=True, wrap=trunk.wrap).model
    with FlopCounterMode(display=False) as pass_flops, torch.no_grad():
        expected = module.eval()(x_R)
    with FlopCounterMode(display=False) as trunk_flops:
        features = trunk.features(module, x_R)
    share = trunk_flops.get_total_flops() / max(1, pass_flops.get_total_flops())
    if share < least_share:
        return None
    needed = _needed(trunk, module, features, expected)
    if not needed:
        return None
    # Try again with only the needed features.
    trunk = FrozenTrunk(shapes, needed, x_R.shape[1:], share)
    if x_R.dim() == 2 and trunk.size == x_R.shape[1]:
        # Features could not be distinguished from images by their shape.
        return None
    module = fold(model, random_only=True, wrap=trunk.wrap).model
    features = trunk.features(module, x_R)
    of_two_images = trunk.features(module, x_R[:2])
    if not torch.allclose(of_two_images, features[:2], 1e-3, 1e-3 * float(features.abs().max())):
        # An image's features depend on the other images.
        return None
    if not _features_replace_images(trunk, module, features, x_R):
        return None
    return trunk


def _features_replace_images(trunk: FrozenTrunk, module: nn.Module, features: Tensor, x_R: Tensor) -> bool:
    """Return whether features give the logits of their images in evaluation and training mode, without our dropout.

    Trained tensors are changed, since a branch may be zero at first. Other images pass in between, since modules may
    have a memory.
    """
    tensors = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    for name, parameter in module.named_parameters():
        moved = parameter + 0.01 if parameter.requires_grad else parameter
        tensors[name] = moved.detach().clone()
    tied = tied_names(module)

    def logits(rows_R: Tensor) -> Tensor:
        with torch.no_grad(), torch.random.fork_rng([x_R.device] if x_R.is_cuda else []):
            torch.manual_seed(0)
            # Copies, since a pass may write to buffers.
            copies = clone(tensors)
            copies |= {name: copies[first] for name, first in tied.items()}
            out: Tensor = functional_call(module, copies, (trunk.feed(rows_R),), tie_weights=False)
            return out

    trunk.spoil = True
    for mode in (nn.Module.eval, train_mode):
        for part in mode(module).modules():
            part.training &= not isinstance(part, StackedDropout)
        expected = logits(x_R)
        logits(x_R.flip(0))
        if not torch.equal(logits(features), expected):
            return False
    trunk.spoil = False
    return True


class _Output(NamedTuple):
    """Facts about a module's output in a pass.

    Attributes:
        shape: Its shape.
        number: A fingerprint of each row.
        norm: The norm of each row.
        changing: Whether it depends on trained tensors or random numbers.
    """

    shape: torch.Size
    number: Tensor
    norm: Tensor
    changing: bool


def _constant(model: nn.Module, x_R: Tensor) -> dict[str, torch.Size]:
    """Find the outermost constant modules, in the order of their calls, with the shapes of one image's outputs."""
    first = _outputs(model, x_R, training=False)
    second = _outputs(model, x_R[:2], training=True)
    modules = dict(model.named_modules())
    constant: dict[str, torch.Size] = {}
    for path, output in first.items():
        other = second.get(path)
        if output is None or other is None or isinstance(modules[path], nn.Identity):
            continue
        if _agree(output, other, len(x_R)):
            constant[path] = output.shape[1:]
    inner: set[nn.Module] = set()
    for path in constant:
        inner.update(part for part in modules[path].modules() if part is not modules[path])
    return {path: shape for path, shape in constant.items() if modules[path] not in inner}


def _agree(output: _Output, of_two: _Output, rows: int) -> bool:
    """Return whether a module's outputs for the first two rows are the same in both passes."""
    if output.changing or of_two.changing:
        return False
    if len(output.number) != rows or len(of_two.number) != 2 or output.shape[1:] != of_two.shape[1:]:
        return False
    difference = (output.number[:2] - of_two.number).abs()
    return bool((difference <= 1e-3 * output.norm[:2]).all())


def _outputs(model: nn.Module, x_R: Tensor, training: bool) -> dict[str, _Output | None]:
    """Return facts about all modules' outputs, by path; ``None`` for an output that cannot be a feature.

    The pass leaves the model and torch's global stream as they were.
    """
    outputs: dict[str, _Output | None] = {}
    cuda = x_R.is_cuda

    def rng_state() -> Tensor:
        if cuda:
            return torch.cuda.get_rng_state(x_R.device)
        return torch.get_rng_state()

    hooks = []
    for path, module in model.named_modules():

        def record(module: nn.Module, _: object, out: object, path: str = path) -> object:
            if not isinstance(out, Tensor) or not out.is_floating_point() or out.dim() == 0 or path in outputs:
                outputs[path] = None
                return out
            if draws(module):
                # Dropout is treated like a trained module, whose output differs between the two passes.
                out = (1 - out if training else out).detach().requires_grad_()
            # On the CPU, since the device may have no double precision.
            exact = out.detach().cpu().double()
            rows = exact.flatten(1) if out.dim() > 1 else exact.unsqueeze(1)
            fingerprints = rows @ torch.arange(rows.shape[1]).double().cos()
            changing = out.requires_grad or not torch.equal(rng_state(), initial_rng_state)
            outputs[path] = _Output(out.shape, fingerprints, rows.norm(dim=1), changing)
            return out

        hooks.append(module.register_forward_hook(record))
    tensors = {key: value.detach().clone() for key, value in model.named_buffers()}
    for key, value in model.named_parameters():
        if value.requires_grad:
            tensors[key] = (0.1 - value if training else value).detach().requires_grad_()
    tensors |= {name: tensors[first] for name, first in tied_names(model).items() if first in tensors}
    if training:
        train_mode(model)
    else:
        model.eval()
    for module in model.modules():
        module.training &= not draws(module)
    try:
        with torch.enable_grad(), torch.random.fork_rng([x_R.device] if cuda else []):
            initial_rng_state = rng_state()
            functional_call(model, tensors, (x_R,), tie_weights=False)
    finally:
        for hook in hooks:
            hook.remove()
    return outputs


def _needed(trunk: FrozenTrunk, module: nn.Module, features: Tensor, expected: Tensor) -> tuple[str, ...]:
    """Find the paths on whose outputs the logits depend; none if the features of all paths change the logits."""
    parts = trunk.parts(features)

    def gives_expected_logits_without(spoilt: set[str]) -> bool:
        values = []
        for path, part in parts.items():
            values.append(torch.full_like(part, torch.nan) if path in spoilt else part)
        with torch.no_grad():
            return torch.equal(module(trunk.feed(torch.cat(values, 1))), expected)

    if not gives_expected_logits_without(set()):
        return ()
    not_needed: set[str] = set()
    for path in parts:
        if gives_expected_logits_without(not_needed | {path}):
            not_needed.add(path)
    return tuple(path for path in parts if path not in not_needed)
