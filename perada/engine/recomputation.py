# SPDX-License-Identifier: Apache-2.0
"""Gradient checkpointing: blocks of a network that run again in the backward pass, which saves their activations.

A forward pass keeps only the inputs of such a block (Chen et al., 2016, arXiv 1604.06174). When the block runs again,
the network no longer has what this pass had: torch has put back the module's own tensors, and other passes may have run
since, with other clients, modes and random streams. So each call of a block is recorded with everything it depends on,
which is in force again while the block is recomputed.

The switches of timm and transformers recompute blocks with the weights that the network has in the backward pass, so
they stay off.
"""

from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from perada.engine.attention import FasterAttention
from perada.engine.fold import shell
from perada.engine.frozen_trunk import FrozenTrunk
from perada.engine.stacked_layers import FoldContext
from perada.engine.substitutes import FrozenSubstitute


class RecomputedBlock(FrozenSubstitute):
    """Runs a block of a folded model, and again in the backward pass.

    It has the tensors and children of the block under their names, so that the clients' tensors reach them.

    Args:
        block: The block, in which trained layers have been replaced by their twins.
        context: Facts about the current pass.
        trunk: The frozen trunk of the model; None if there is none.
    """

    def __init__(self, block: nn.Module, context: FoldContext, trunk: FrozenTrunk | None) -> None:
        # A copy, since the single model may have the block, too.
        copied = shell(block, dict(block._modules))
        super().__init__(copied)
        self.context = context
        self.trunk = trunk
        # The same dictionaries, in which torch puts the clients' tensors before a pass.
        self._parameters = copied._parameters
        self._buffers = copied._buffers
        self._modules = copied._modules

    def forward(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401  # the block's
        """Run the block."""
        block: nn.Module = self.original[0]
        # The block itself is no child, so train() and eval() do not reach it.
        block.training = self.training
        if not torch.is_grad_enabled() or not self._needs_gradient(args, options):
            return block(*args, **options)
        # A network may extend a list of features after the call, as DenseNets do.
        arguments = [_copy_container(argument) for argument in args]
        keywords = {name: _copy_container(option) for name, option in options.items()}
        call = _RecordedCall(block, self.context, self.trunk)
        output = checkpoint(partial(block, **keywords), *arguments, use_reentrant=False, context_fn=call.contexts)
        call.finish()
        return output

    def _needs_gradient(self, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
        """Return whether the backward pass goes through the block."""
        block: nn.Module = self.original[0]
        if any(parameter.requires_grad for parameter in block.parameters()):
            return True
        arguments = [*args, *options.values()]
        return any(isinstance(argument, Tensor) and argument.requires_grad for argument in arguments)


def _copy_container(argument: Any) -> Any:  # noqa: ANN401  # arguments of a block are of any type
    """Return a copy of a list or dictionary with the same items, and anything else as it is."""
    if type(argument) in (list, dict):
        return argument.copy()
    return argument


@dataclass
class _RecordedTensor:
    """A parameter or buffer as it was in a call.

    Attributes:
        container: Dictionary of the module, in which the tensor is.
        name: Name of the tensor in the module.
        value: The tensor; of a buffer that the call changed, a copy of its former value.
        version: Number of torch's in-place changes of the tensor before the call.
        changes: Whether the call itself changed it.
    """

    container: dict[str, Any]
    name: str
    value: Tensor
    version: int
    changes: bool = False


class _RecordedCall:
    """The facts that a call of a block depends on, besides its arguments and torch's global random streams.

    As a context manager, it puts these facts in force again. torch enters it each time the block is recomputed.

    Args:
        block: The block.
        context: Facts about the current pass.
        trunk: The frozen trunk of the model; None if there is none.
    """

    def __init__(self, block: nn.Module, context: FoldContext, trunk: FrozenTrunk | None) -> None:
        self._context = context
        self._facts = replace(context)
        self._trunk = trunk
        self._features = None if trunk is None else trunk.feature_pass
        self._modules = list(block.modules())
        self._modes = [module.training for module in self._modules]
        self._tensors: list[_RecordedTensor] = []
        # Copies of buffers before the call, which may change them.
        self._former_buffers: list[tuple[_RecordedTensor, Tensor]] = []
        for module in self._modules:
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self._record_tensor(module._parameters, name, parameter)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    recorded = self._record_tensor(module._buffers, name, buffer)
                    # torch does not count changes of running statistics in evaluation or training mode.
                    recorded.changes = module.training and "running_mean" in module._buffers
                    self._former_buffers.append((recorded, buffer.clone()))
        self._previous: ExitStack | None = None

    def _record_tensor(self, container: dict[str, Any], name: str, tensor: Tensor) -> _RecordedTensor:
        """Add a tensor to those that the call depends on, and return its record."""
        recorded = _RecordedTensor(container, name, tensor, tensor._version)
        self._tensors.append(recorded)
        return recorded

    def finish(self) -> None:
        """End the recorded call: keep former values of only the buffers that it changed."""
        for recorded, former_value in self._former_buffers:
            recorded.changes |= recorded.value._version != recorded.version
            if recorded.changes:
                recorded.value = former_value
        self._former_buffers.clear()

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the contexts in which torch runs the block, and in which it runs the block again."""
        return nullcontext(), self

    def __enter__(self) -> None:
        with ExitStack() as stack:
            self._put_back_tensors(stack)
            for module, mode in zip(self._modules, self._modes, strict=True):
                stack.callback(setattr, module, "training", module.training)
                module.training = mode
            stack.callback(self._context.restore, replace(self._context))
            self._context.restore(self._facts)
            if self._trunk is not None:
                stack.callback(setattr, self._trunk, "feature_pass", self._trunk.feature_pass)
                self._trunk.feature_pass = self._features
            if self._facts.faster_attention:
                stack.enter_context(FasterAttention())
            # What is on the stack stays in force until the exit.
            self._previous = stack.pop_all()

    def _put_back_tensors(self, stack: ExitStack) -> None:
        """Put the tensors of the call into the modules, and have ``stack`` restore those that are there now."""
        for recorded in self._tensors:
            if not recorded.changes and recorded.value._version != recorded.version:
                raise RuntimeError(
                    f"the tensor {recorded.name!r} of shape {tuple(recorded.value.shape)} was changed in place between "
                    "the forward and the backward pass, which runs its block again with checkpointing=True; compute "
                    "gradients before changing tensors, or set training.checkpointing to false"
                )
            stack.callback(recorded.container.__setitem__, recorded.name, recorded.container[recorded.name])
            # A copy, since the block changes it again.
            recorded.container[recorded.name] = recorded.value.clone() if recorded.changes else recorded.value

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        raised_error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._previous is not None
        self._previous.close()
