# SPDX-License-Identifier: Apache-2.0
"""The part of a model that no trained tensor precedes: what it makes of an image stays the same for the whole run.

All of the backbone where only a head is trained; the stem and the first frozen layers where adapters are. It is found
by trying, so that no model has to be known: a module whose output on an example does not depend on anything trained is
*constant*, and of the constant modules those are *needed* without whose output the logits change.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode


class _Enough(Exception):
    """Leaves a pass through the model early: all that was wanted has been computed."""


class Prefix:
    """The constant modules of a model, and their outputs in the pass under way.

    *Features* of an image are the needed outputs, flattened and laid side by side: (F,).

    Args:
        shapes: Output of each constant module for one image, by path.
        needed: Paths of those whose outputs are the features.
        image: Shape of one image.
        share: Share of a forward pass's floating-point operations that features save.

    Attributes:
        size: F.
    """

    def __init__(
        self, shapes: dict[str, torch.Size], needed: tuple[str, ...], image: torch.Size, share: float = 0.0
    ) -> None:
        self.shapes, self.needed, self.image, self.share = shapes, needed, image, share
        self.size = sum(shapes[path].numel() for path in needed)
        self.rows = 0
        self._given: dict[str, Tensor] | None = None
        self._dtypes: dict[str, torch.dtype] = {}
        self._seen: dict[str, Tensor] | None = None

    def holds(self, x_R: Tensor) -> bool:
        """Whether rows are features (R, F) instead of images."""
        return x_R.dim() == 2 and x_R.shape[1] == self.size

    def feed(self, x_R: Tensor) -> Tensor:
        """What to give to the model: images (R, ...) as they are, or in the place of features a blank image each."""
        self._given = None
        if not self.holds(x_R):
            return x_R
        parts = torch.split(x_R, [self.shapes[path].numel() for path in self.needed], 1)
        self.rows = len(x_R)
        self._given = {
            path: part.view(-1, *self.shapes[path]).to(self._dtypes.get(path, part.dtype))
            for path, part in zip(self.needed, parts, strict=True)
        }
        return x_R.new_zeros(()).expand(self.rows, *self.image)

    def features(self, model: nn.Module, x_R: Tensor) -> Tensor:
        """Features (R, F) of images (R, ...).

        Args:
            model: A model with this prefix's :class:`Constant` modules.
            x_R: Images.
        """
        self._given, self._seen = None, {}
        try:
            with torch.no_grad():
                model.eval()(x_R)
        except _Enough:
            pass
        seen, self._seen = self._seen, None
        self._dtypes = {path: value.dtype for path, value in seen.items()}
        return torch.cat([seen[path].flatten(1) for path in self.needed], 1)

    def output(self, path: str, run: Callable[[], Tensor], like: Tensor) -> Tensor:
        """What the module at ``path`` gives in this pass."""
        if self._given is not None:
            # Nobody looks at what is not needed, but it must have the right shape.
            blank = like.new_empty
            return self._given[path] if path in self._given else blank(self.rows, *self.shapes[path])
        out = run()
        if self._seen is not None and path in self.needed:
            self._seen[path] = out.clone()
            if len(self._seen) == len(self.needed):
                raise _Enough
        return out


class Constant(nn.Module):
    """Stands in a model for one of its constant modules."""

    def __init__(self, original: nn.Module, path: str, prefix: Prefix) -> None:
        super().__init__()
        self.original, self.path, self.prefix = original, path, prefix

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # whatever it is there
        """Whatever else is asked of the original, as by a parent that reads its options."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("original"), name)

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        """What the original gives, computed now or given before."""
        return self.prefix.output(self.path, lambda: self.original(x, *args, **kwargs), x)


def find_prefix(
    model: nn.Module,
    build: Callable[[Prefix], nn.Module],
    image: Tensor,
    random: Callable[[nn.Module], bool],
    least_share: float = 0.0,
) -> Prefix | None:
    """Find the constant modules of a model, and which of them are needed.

    Args:
        model: The single model; ``requires_grad`` tells what is trained.
        build: The model with a prefix's :class:`Constant` modules in their places.
        image: An example (channels, height, width), prepared.
        random: Whether a module draws random numbers in training.
        least_share: Share of a forward pass's floating-point operations that features must save.

    Returns:
        The prefix, or ``None`` where there is none, or passes with features would not give the same logits.
    """
    x_R = torch.stack([image, image.flip(-1), 0.5 * image])
    shapes = _constant(model, x_R, random)
    if not shapes:
        return None
    full = tuple(shapes)
    prefix = Prefix(shapes, full, image.shape)
    module = build(prefix)
    try:
        with FlopCounterMode(display=False) as whole, torch.no_grad():
            expected = module.eval()(x_R)
        with FlopCounterMode(display=False) as saved:
            features = prefix.features(module, x_R)
        share = saved.get_total_flops() / max(1, whole.get_total_flops())
        needed = _needed(prefix, module, features, expected) if share >= least_share else ()
    except (RuntimeError, TypeError, IndexError, AttributeError):  # the model does something between its modules
        return None
    found = Prefix(shapes, needed, image.shape, share)
    if not needed or (image.dim() == 1 and found.size == len(image)):
        return None  # in the second case features could not be told from images
    module = build(found)
    features = found.features(module, x_R)
    alone = found.features(module, x_R[:2])
    return found if torch.allclose(alone, features[:2], 1e-3, 1e-3 * float(features.abs().max())) else None


def _constant(model: nn.Module, x_R: Tensor, random: Callable[[nn.Module], bool]) -> dict[str, torch.Size]:
    """Shape of one image's output of the outermost modules that depend on nothing trained, in order of their calls."""
    outputs: dict[str, list[object]] = {}
    hooks = []
    for path, module in model.named_modules():

        def note(module: nn.Module, _: object, out: object, path: str = path) -> object:
            if isinstance(out, Tensor) and out.is_floating_point() and random(module):
                out = out.detach().requires_grad_()  # as if trained: it is another one each time
            outputs.setdefault(path, []).append(out)
            return out

        hooks.append(module.register_forward_hook(note))
    try:
        with torch.enable_grad():
            model.eval()(x_R)
    finally:
        for hook in hooks:
            hook.remove()

    def constant(path: str) -> bool:
        given = outputs.get(path, [])
        out = given[0] if len(given) == 1 else None
        if not isinstance(out, Tensor) or not out.is_floating_point() or out.requires_grad:
            return False
        return out.dim() > 0 and len(out) == len(x_R)

    paths = {path for path in outputs if constant(path)}
    outermost = [path for path in outputs if path in paths and not any(other in paths for other in _above(path))]
    first = {path: outputs[path][0] for path in outermost}
    return {path: out.shape[1:] for path, out in first.items() if isinstance(out, Tensor)}


def _above(path: str) -> Iterator[str]:
    while "." in path:
        path = path.rpartition(".")[0]
        yield path


def _needed(prefix: Prefix, module: nn.Module, features: Tensor, expected: Tensor) -> tuple[str, ...]:
    """Paths whose outputs the logits depend on; none where the features of all paths do not give the same logits."""
    sizes = [prefix.shapes[path].numel() for path in prefix.needed]
    given = dict(zip(prefix.needed, torch.split(features, sizes, 1), strict=True))

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
