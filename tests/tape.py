# SPDX-License-Identifier: Apache-2.0
"""Does on a CPU what CUDA graphs do on a GPU: records operations with the memory that they use, and repeats them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

T = TypeVar("T")
aten = torch.ops.aten
READS = (aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default)
"""Operations for whose result the host waits, which are errors in a capture."""


class Tape:
    """A ``Capture`` on a CPU.

    Nothing that the function does on the host is repeated, as with a graph. So a value that the host computes anew in
    each step, or a tensor that is put in the place of another, shows in the results.

    Attributes:
        captured: Number of captures.
        replayed: Number of replays.
    """

    def __init__(self) -> None:
        self.captured = 0
        self.replayed = 0

    def warm_up(self, function: Callable[[], T]) -> T:
        return function()

    def capture(self, function: Callable[[], T]) -> Callable[[], T]:
        recording = Recording()
        with recording:
            result = function()
        recording.undo()
        self.captured += 1

        def replay() -> T:
            recording.repeat()
            self.replayed += 1
            return result

        return replay


@dataclass(frozen=True)
class Operation:
    """One operation with its arguments and results, which keep their memory."""

    function: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    results: Any

    def written(self) -> Iterator[Tensor]:
        """Yield the tensors that the operation changes in place."""
        yield from written_tensors(self.function, self.arguments, self.options)


class Recording(TorchDispatchMode):
    """Records all operations, of backward passes and optimisers too."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in READS:
            raise RuntimeError(f"{func} in a capture: the host would wait for the device")
        for tensor in written_tensors(func, args, kwargs):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._before:
                self._before[storage.data_ptr()] = (storage, storage.clone())
        results = func(*args, **kwargs)
        self.operations.append(Operation(func, args, kwargs, results))
        return results

    def undo(self) -> None:
        """Give all memory the contents that it had before the recording: a capture computes nothing."""
        for storage, before in self._before.values():
            storage.copy_(before)

    def repeat(self) -> None:
        """Run the operations again on the same memory."""
        with torch.no_grad():
            for operation in self.operations:
                results = operation.function(*operation.arguments, **operation.options)
                for place, value in zip(tree_leaves(operation.results), tree_leaves(results), strict=True):
                    # Views, and what was changed in place, are where they were.
                    if isinstance(place, Tensor) and storage_of(place) != storage_of(value):
                        place.copy_(value)


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def written_tensors(function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operation changes in place, by its schema."""
    values = dict(zip([argument.name for argument in function._schema.arguments], arguments, strict=False)) | options
    for argument in function._schema.arguments:
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        # This one changes running statistics, of which its schema says nothing.
        is_statistic = function is aten.native_batch_norm.default and argument.name.startswith("running_")
        if is_written or is_statistic:
            for leaf in tree_leaves(values.get(argument.name)):
                if isinstance(leaf, Tensor):
                    yield leaf
