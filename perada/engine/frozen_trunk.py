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
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from perada.core.states import clone, tied_names, train_mode
from perada.engine.fold import draws, fold
from perada.engine.stacked_layers import StackedDropout


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
        return Constant(module, path, self) if path in self.shapes else module

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
        """Features (R, F) of images (R, ...), through a model with this prefix's :class:`Constant` modules."""
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


class Wrapper(nn.Module):
    """Stands in a model for one of its modules."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original = original

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # whatever it is there
        """Whatever else is asked of the original, as by a parent that reads its options."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("original"), name)


class Constant(Wrapper):
    """Stands in for a constant module."""

    def __init__(self, original: nn.Module, path: str, prefix: FrozenTrunk) -> None:
        super().__init__(original)
        self.path = path
        self.prefix = prefix

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        """What the original gives, computed now or given before."""
        return self.prefix.output(self.path, lambda: self.original(x, *args, **kwargs), x)


def _layout(value: Tensor) -> torch.memory_format:
    last = value.dim() == 4 and not value.is_contiguous() and value.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


def find_trunk(model: nn.Module, image: Tensor, least_share: float = 0.0) -> FrozenTrunk | None:
    """Find the constant modules of the single model, and which of them are needed.

    ``None`` where there are none, or passes with features fail, would not give the same logits or save less than
    ``least_share`` of a pass's floating-point operations. The example (channels, height, width) is prepared.
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
    prefix = FrozenTrunk(shapes, tuple(shapes), x_R.shape[1:])
    prefix.spoil = True
    module = fold(model, random_only=True, wrap=prefix.wrap).model
    with FlopCounterMode(display=False) as whole, torch.no_grad():
        expected = module.eval()(x_R)
    with FlopCounterMode(display=False) as saved:
        features = prefix.features(module, x_R)
    share = saved.get_total_flops() / max(1, whole.get_total_flops())
    needed = _needed(prefix, module, features, expected) if share >= least_share else ()
    found = FrozenTrunk(shapes, needed, x_R.shape[1:], share)
    if not needed or (x_R.dim() == 2 and found.size == x_R.shape[1]):
        return None  # in the second case features could not be told from images
    module = fold(model, random_only=True, wrap=found.wrap).model
    features = found.features(module, x_R)
    alone = found.features(module, x_R[:2])
    same = torch.allclose(alone, features[:2], 1e-3, 1e-3 * float(features.abs().max()))
    return found if same and _stand_for(found, module, features, x_R) else None


def _stand_for(prefix: FrozenTrunk, module: nn.Module, features: Tensor, x_R: Tensor) -> bool:
    """Whether features give the logits of their images in evaluation and training mode, but for our dropout.

    What is trained is moved, for a branch may begin at zero. Other images pass in between, for modules may remember.
    """
    tensors = {
        key: (value + 0.01 if value.requires_grad else value).detach().clone()
        for key, value in [*module.named_parameters(), *module.named_buffers()]
    }

    tied = tied_names(module)

    def logits(given_R: Tensor) -> Tensor:
        with torch.no_grad(), torch.random.fork_rng([x_R.device] if x_R.is_cuda else []):
            torch.manual_seed(0)
            own = clone(tensors)
            own |= {name: own[first] for name, first in tied.items()}
            out: Tensor = functional_call(module, own, (prefix.feed(given_R),), tie_weights=False)
            return out

    prefix.spoil = True
    for mode in (nn.Module.eval, train_mode):
        for part in mode(module).modules():
            part.training &= not isinstance(part, StackedDropout)
        expected, _, got = (logits(given_R) for given_R in (x_R, x_R.flip(0), features))
        if not torch.equal(got, expected):
            return False
    prefix.spoil = False
    return True


class _Output(NamedTuple):
    """What a module gave in a pass: its shape, one number and the norm of each row, whether it may change."""

    shape: torch.Size
    number: Tensor
    norm: Tensor
    changing: bool


def _constant(model: nn.Module, x_R: Tensor) -> dict[str, torch.Size]:
    """Shape of one image's output of the outermost modules that depend on nothing trained, in order of their calls."""
    first, again = (_outputs(model, x, training) for x, training in ((x_R, False), (x_R[:2], True)))

    def constant(path: str) -> bool:
        one = first[path]
        two = again.get(path)
        if one is None or two is None or one.changing or two.changing:
            return False
        if (len(one.number), len(two.number)) != (len(x_R), 2) or one.shape[1:] != two.shape[1:]:
            return False
        return bool(((one.number[:2] - two.number).abs() <= 1e-3 * one.norm[:2]).all())

    modules = dict(model.named_modules())
    found = [path for path in first if constant(path) and not isinstance(modules[path], nn.Identity)]
    inner = {part for path in found for part in modules[path].modules() if part is not modules[path]}
    return {path: out.shape[1:] for path in found if modules[path] not in inner and (out := first[path]) is not None}


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
    for module in (train_mode(model) if training else model.eval()).modules():
        module.training &= not draws(module)
    try:
        with torch.enable_grad(), torch.random.fork_rng([x_R.device] if cuda else []):
            before = drawn()
            functional_call(model, tensors, (x_R,), tie_weights=False)
    finally:
        for hook in hooks:
            hook.remove()
    return outputs


def _needed(prefix: FrozenTrunk, module: nn.Module, features: Tensor, expected: Tensor) -> tuple[str, ...]:
    """Paths whose outputs the logits depend on; none where the features of all paths do not give the same logits."""
    given = prefix.parts(features)

    def same(spoilt: set[str]) -> bool:
        parts = [torch.full_like(part, torch.nan) if path in spoilt else part for path, part in given.items()]
        with torch.no_grad():
            return torch.equal(module(prefix.feed(torch.cat(parts, 1))), expected)

    if not same(set()):
        return ()
    spoilt: set[str] = set()
    for path in given:
        if same(spoilt | {path}):
            spoilt.add(path)
    return tuple(path for path in given if path not in spoilt)
