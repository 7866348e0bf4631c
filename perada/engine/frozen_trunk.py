# SPDX-License-Identifier: Apache-2.0
"""The part of a model that no trained tensor precedes: what it makes of an image stays the same for the whole run.

All of the backbone where only a head is trained; the stem and the first frozen layers where adapters are. It is found
by trying, so that no model has to be known. A module is *constant* whose output on examples stays the same when what is
trained, the mode or the other images change, and no random number has been drawn before it. Of the constant modules
those are *needed* without whose output the logits change. In the end features must give the logits of their images.
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
    """Leaves a pass through the model early: all that was wanted has been computed."""


class FrozenTrunk:
    """The constant modules of a model, and their outputs in the pass under way.

    *Features* of an image are the needed outputs, flattened and laid side by side: (F,).

    Attributes:
        shapes: Output of each constant module for one image, by path.
        needed: Paths of those whose outputs are the features.
        share: Share of a forward pass's floating-point operations that features save.
        spoil: Whether outputs that nobody should look at are NaN, and blank images, while that is tried out.
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
        self._given: dict[str, Tensor] | None = None
        self._kinds: dict[str, tuple[torch.dtype, torch.memory_format]] = {}
        self._seen: dict[str, Tensor] | None = None

    def wrap(self, module: nn.Module, path: str) -> nn.Module:
        """What stands in a folded model for the module at ``path``."""
        return ConstantModule(module, path, self) if path in self.shapes else module

    def parts(self, features: Tensor) -> dict[str, Tensor]:
        """What of the features (R, F) each module gave, still flattened."""
        sizes = [self.shapes[path].numel() for path in self.needed]
        return dict(zip(self.needed, torch.split(features, sizes, 1), strict=True))

    def holds(self, x_R: Tensor) -> bool:
        """Whether rows are features (R, F) instead of images."""
        return x_R.dim() == 2 and x_R.shape[1] == self.size

    def feed(self, x_R: Tensor) -> Tensor:
        """What to give to the model: images (R, ...) as they are, or in the place of features a blank image each.

        The model gets copies of the features, which it may change in place as it may its own modules' outputs.
        """
        self._given = None
        if not self.holds(x_R):
            return x_R
        self.rows = len(x_R)
        self._given = {}
        for path, part in self.parts(x_R).items():
            dtype, layout = self._kinds.get(path, (part.dtype, torch.contiguous_format))
            self._given[path] = part.view(-1, *self.shapes[path]).to(dtype, copy=True, memory_format=layout)
        return x_R.new_full((), torch.nan if self.spoil else 0.0).expand(self.rows, *self.image)

    def features(self, model: nn.Module, x_R: Tensor) -> Tensor:
        """Features (R, F) of images (R, ...), through a model with this trunk's :class:`ConstantModule` instances."""
        self._given = None
        self._seen = {}
        with suppress(_Enough), torch.no_grad():
            model.eval()(x_R)
        seen = self._seen
        self._seen = None
        self._kinds = {path: (value.dtype, _layout(value)) for path, value in seen.items()}
        return torch.cat([seen[path].flatten(1) for path in self.needed], 1)

    def output(self, path: str, run: Callable[[], Tensor], like: Tensor) -> Tensor:
        """What the module at ``path`` gives in this pass."""
        if self._given is not None:
            # Nobody looks at what is not needed, but it must have the right shape.
            if path in self._given:
                return self._given[path]
            shape = (self.rows, *self.shapes[path])
            return like.new_full(shape, torch.nan) if self.spoil else like.new_empty(shape)
        out = run()
        if self._seen is not None and path in self.needed:
            self._seen[path] = out.clone()
            if len(self._seen) == len(self.needed):
                raise _Enough
        return out


class ConstantModule(WrappingSubstitute):
    """Takes the place of a constant module."""

    def __init__(self, original: nn.Module, path: str, trunk: FrozenTrunk) -> None:
        super().__init__(original)
        self.path = path
        self.trunk = trunk

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Return the output of the original, computed now or cut from the features of this pass."""
        return self.trunk.output(self.path, lambda: self.original(x, *args, **kwargs), x)


def _layout(value: Tensor) -> torch.memory_format:
    last = value.dim() == 4 and not value.is_contiguous() and value.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


def find_trunk(model: nn.Module, image: Tensor, least_share: float = 0.0) -> FrozenTrunk | None:
    """Find the constant modules of the single model, and which of them are needed.

    Args:
        model: The single model.
        image: A prepared example (channels, height, width).
        least_share: Share of a pass's floating-point operations that features must save.

    Returns:
        None where there are none, or passes with features fail, give other logits, or save less.
    """
    third = 0.5 * image if image.is_floating_point() else image.roll(1)  # of a text, the same tokens in another order
    x_R = torch.stack([image, image.flip(-1), third])
    try:
        return _find(model, x_R, least_share)
    except Exception as error:  # the model does something else between its modules, each in its own way
        failed = f"{type(error).__name__}: {error}"
        logging.getLogger(__name__).info("features of the model's frozen part cannot stand for images: %s", failed)
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
    # Once more with only the features that are needed.
    trunk = FrozenTrunk(shapes, needed, x_R.shape[1:], share)
    if x_R.dim() == 2 and trunk.size == x_R.shape[1]:
        return None  # features could not be told from images
    module = fold(model, random_only=True, wrap=trunk.wrap).model
    features = trunk.features(module, x_R)
    of_two_images = trunk.features(module, x_R[:2])
    if not torch.allclose(of_two_images, features[:2], 1e-3, 1e-3 * float(features.abs().max())):
        return None  # an image's features depend on the other images
    return trunk if _stand_for(trunk, module, features, x_R) else None


def _stand_for(trunk: FrozenTrunk, module: nn.Module, features: Tensor, x_R: Tensor) -> bool:
    """Whether features give the logits of their images in evaluation and training mode, but for our dropout.

    What is trained is moved, for a branch may begin at zero. Other images pass in between, for modules may remember.
    """
    tensors = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    for name, parameter in module.named_parameters():
        moved = parameter + 0.01 if parameter.requires_grad else parameter
        tensors[name] = moved.detach().clone()
    tied = tied_names(module)

    def logits(rows_R: Tensor) -> Tensor:
        with torch.no_grad(), torch.random.fork_rng([x_R.device] if x_R.is_cuda else []):
            torch.manual_seed(0)
            copies = clone(tensors)  # a pass may write to buffers
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
    """What a module gave in a pass: its shape, one number and the norm of each row, whether it may change."""

    shape: torch.Size
    number: Tensor
    norm: Tensor
    changing: bool


def _constant(model: nn.Module, x_R: Tensor) -> dict[str, torch.Size]:
    """Shape of one image's output of the outermost modules that depend on nothing trained, in order of their calls."""
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
    """Whether a module gave the same for the first two rows in both passes."""
    if output.changing or of_two.changing:
        return False
    if len(output.number) != rows or len(of_two.number) != 2 or output.shape[1:] != of_two.shape[1:]:
        return False
    return bool(((output.number[:2] - of_two.number).abs() <= 1e-3 * output.norm[:2]).all())


def _outputs(model: nn.Module, x_R: Tensor, training: bool) -> dict[str, _Output | None]:
    """What modules give in a pass that leaves no trace, by path; ``None`` where it cannot be a feature."""
    outputs: dict[str, _Output | None] = {}
    cuda = x_R.is_cuda

    def drawn() -> Tensor:
        return torch.cuda.get_rng_state(x_R.device) if cuda else torch.get_rng_state()

    hooks = []
    for path, module in model.named_modules():

        def note(module: nn.Module, _: object, out: object, path: str = path) -> object:
            if not isinstance(out, Tensor) or not out.is_floating_point() or out.dim() == 0 or path in outputs:
                outputs[path] = None
                return out
            if draws(module):
                out = (1 - out if training else out).detach().requires_grad_()  # as if trained: another one each time
            exact = out.detach().cpu().double()  # the device may have none
            rows = exact.flatten(1) if out.dim() > 1 else exact.unsqueeze(1)
            number = rows @ torch.arange(rows.shape[1]).double().cos()
            changing = out.requires_grad or not torch.equal(drawn(), before)
            outputs[path] = _Output(out.shape, number, rows.norm(dim=1), changing)
            return out

        hooks.append(module.register_forward_hook(note))
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
            before = drawn()
            functional_call(model, tensors, (x_R,), tie_weights=False)
    finally:
        for hook in hooks:
            hook.remove()
    return outputs


def _needed(trunk: FrozenTrunk, module: nn.Module, features: Tensor, expected: Tensor) -> tuple[str, ...]:
    """Paths whose outputs the logits depend on; none where the features of all paths do not give the same logits."""
    parts_of = trunk.parts(features)

    def same(spoilt: set[str]) -> bool:
        parts = [torch.full_like(part, torch.nan) if path in spoilt else part for path, part in parts_of.items()]
        with torch.no_grad():
            return torch.equal(module(trunk.feed(torch.cat(parts, 1))), expected)

    if not same(set()):
        return ()
    spoilt: set[str] = set()
    for path in parts_of:
        if same(spoilt | {path}):
            spoilt.add(path)
    return tuple(path for path in parts_of if path not in spoilt)
