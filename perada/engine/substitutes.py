# SPDX-License-Identifier: Apache-2.0
"""Base classes of modules that replace another module in a model."""

from abc import ABC, abstractmethod
from typing import Any

from torch import nn


class Substitute(nn.Module, ABC):
    """Base class of modules that replace another one, to which all unknown attributes are forwarded.

    Parents read options of their children, such as ``stride``, and adapters the weight of the layer that they wrap.
    """

    @abstractmethod
    def _replaced_module(self) -> nn.Module:
        """Return the replaced module.

        This is a method because an AttributeError in a property would call ``__getattr__``, which calls this.
        """

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # attributes are of any type
        """Return an attribute of the replaced module if this one does not have it."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._replaced_module(), name)


class WrappingSubstitute(Substitute):
    """Holds the replaced module as a child, so that passes can run through it."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original = original

    def _replaced_module(self) -> nn.Module:
        # The lookup of `self.original` would recurse if there is no such child yet, as while unpickling.
        replaced = nn.Module.__getattr__(self, "original")
        assert isinstance(replaced, nn.Module)
        return replaced


class FrozenSubstitute(Substitute):
    """Replaces a layer without trained parameters, and leaves its tensors where they are.

    The layer is no child: the names of tensors stay those of the single model.
    """

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        # In a list, since an attribute that is a module would become a child.
        self.original: list[Any] = [original]

    def _replaced_module(self) -> nn.Module:
        replaced: nn.Module = self.__dict__["original"][0]
        return replaced
