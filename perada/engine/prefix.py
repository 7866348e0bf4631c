# SPDX-License-Identifier: Apache-2.0
"""The part of a model that no trained tensor precedes: what it makes of an image stays the same for the whole run.

All of the backbone where only a head is trained; the stem and the first frozen layers where adapters are
(:mod:`perada.engine.prefix_search` finds it).
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn


class _Enough(Exception):
    """Leaves a pass through the model early: all that was wanted has been computed."""


class Prefix:
    """The constant modules of a model, and their outputs in the pass under way.

    *Features* of an image are the needed outputs, flattened and laid side by side: (F,).

    Attributes:
        shapes: Output of each constant module for one image, by path.
        needed: Paths of those whose outputs are the features.
        image: Shape of one image.
        share: Share of a forward pass's floating-point operations that features save.
        size: F.
        spoil: Whether outputs that nobody should look at are NaN, and blank images, while that is tried out.
    """

    def __init__(
        self, shapes: dict[str, torch.Size], needed: tuple[str, ...], image: torch.Size, share: float = 0.0
    ) -> None:
        self.shapes, self.needed, self.image, self.share = shapes, needed, image, share
        self.size = sum(shapes[path].numel() for path in needed)
        self.rows, self.spoil = 0, False
        self._given: dict[str, Tensor] | None = None
        self._kinds: dict[str, tuple[torch.dtype, torch.memory_format]] = {}
        self._seen: dict[str, Tensor] | None = None

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
        self._given, self._seen = None, {}
        with suppress(_Enough), torch.no_grad():
            model.eval()(x_R)
        seen, self._seen = self._seen, None
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

    def __init__(self, original: nn.Module, path: str, prefix: Prefix) -> None:
        super().__init__(original)
        self.path, self.prefix = path, prefix

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        """What the original gives, computed now or given before."""
        return self.prefix.output(self.path, lambda: self.original(x, *args, **kwargs), x)


def _layout(value: Tensor) -> torch.memory_format:
    last = value.dim() == 4 and not value.is_contiguous() and value.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format
