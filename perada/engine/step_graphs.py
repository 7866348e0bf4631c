# SPDX-License-Identifier: Apache-2.0
"""Local steps as CUDA graphs: what a step does on the GPU is recorded once, and then repeated by a single call.

A step starts thousands of kernels one after another, and if the network is small, the host takes longer to start them
than the GPU takes to run them. A graph is started at once.

A graph repeats the same operations on the same memory. Inputs that change from step to step are therefore copied to
buffers with a fixed place (:meth:`StepGraph.buffer`), and states, moments and losses are changed in place. What the
step does on the host is not repeated, so the function that takes it returns a record of that.
"""

import warnings
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

WARM_UP_STEPS = 2
"""Steps that are taken without a graph before one is captured.

The first one creates the optimiser's moments, and libraries allocate their workspaces. The second one runs as all
later ones do.
"""


class Capture(Protocol):
    """Records the work of functions on the device."""

    def warm_up(self, function: Callable[[], T]) -> T:
        """Call a function in the way in which it will be captured later, and return its result."""

    def capture(self, function: Callable[[], T]) -> Callable[[], T]:
        """Record the work of a function without doing it.

        Args:
            function: Called once. Its work must not depend on values that are on the device.

        Returns:
            A function that does the work, and returns the result of the recorded call.

        Raises:
            RuntimeError: If the work cannot be recorded.
        """


class CudaCapture:
    """Captures CUDA graphs of one device.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._last_graph: torch.cuda.CUDAGraph | None = None

    def warm_up(self, function: Callable[[], T]) -> T:
        """Call a function on the stream on which graphs are captured, in order with all other work."""
        # The backward pass runs on the streams of the forward pass, and libraries have a workspace for each stream.
        # Neither may be new in a capture.
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = function()
        current.wait_stream(self._stream)
        return result

    def capture(self, function: Callable[[], T]) -> Callable[[], T]:
        """Capture a graph of the function's work; see :meth:`Capture.capture`."""
        graph = torch.cuda.CUDAGraph()
        # Graphs that are never replayed at the same time may share their memory. torch keeps the memory only as long as
        # one of its graphs, so the last one stays until the next is captured.
        pool = None
        if self._last_graph is not None:
            pool = self._last_graph.pool()
        # Other threads, such as that which copies batches to pinned memory, go on during the capture. By default their
        # calls would be errors.
        with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
            result = function()
        self._last_graph = graph

        def replay() -> T:
            graph.replay()
            return result

        return replay


class StepGraph(Generic[T]):
    """Steps of one kind: the first ones are taken as usual, all later ones by a graph of the next.

    Args:
        graphs: The run's graphs.

    Attributes:
        last_result: Result of the last step; None before the first one.
    """

    def __init__(self, graphs: "StepGraphs") -> None:
        self.last_result: T | None = None
        self._graphs = graphs
        self._buffers: dict[str, Tensor] = {}
        self._num_steps = 0
        self._replay: Callable[[], T] | None = None

    def buffer(self, name: str, value: Tensor) -> Tensor:
        """Copy an input of the next step to its buffer, whose place stays the same, and return the buffer."""
        buffer = self._buffers.get(name)
        if buffer is None:
            self._buffers[name] = value.clone()
        else:
            buffer.copy_(value)
        return self._buffers[name]

    def step(self, function: Callable[[], T]) -> T:
        """Take a step.

        Args:
            function: Takes the step with the tensors that :meth:`buffer` returned.

        Returns:
            The result of the function, or of the call in which the graph was captured.
        """
        self.last_result = self._run_step(function)
        return self.last_result

    def _run_step(self, function: Callable[[], T]) -> T:
        capture = self._graphs.capture
        if self._replay is not None:
            return self._replay()
        if capture is None:
            return function()
        if self._num_steps < WARM_UP_STEPS:
            self._num_steps += 1
            return capture.warm_up(function)
        try:
            self._replay = capture.capture(function)
        except RuntimeError as error:
            # Nothing was computed: what is recorded is not done.
            first_line = str(error).partition("\n")[0]
            self._graphs.give_up(f"a step could not be captured: {first_line}")
            return function()
        return self._replay()


class StepGraphs:
    """The graphs of a run's local steps.

    Attributes:
        capture: Records steps; None if steps are taken without graphs from now on.
    """

    def __init__(self, capture: Capture | None) -> None:
        self.capture = capture

    def give_up(self, reason: str) -> None:
        """Take all further steps without graphs, and warn of it."""
        self.capture = None
        warnings.warn(f"cuda_graphs: local steps are taken without CUDA graphs: {reason}", stacklevel=2)


def open_graphs(device: torch.device, *, private: bool, scaled: bool, compiled: bool) -> StepGraphs:
    """Return the graphs of a run, or warn why its steps cannot be captured.

    Args:
        device: The device that trains.
        private: Whether gradients are private.
        scaled: Whether losses are scaled, as in float16.
        compiled: Whether the network is compiled.
    """
    reason = ""
    if device.type != "cuda":
        reason = f"training runs on {device.type!r}; they require an NVIDIA GPU"
    elif private:
        reason = "private training draws noise and counts gradients on the host in every step"
    elif scaled:
        reason = "with precision='16-mixed' clients skip steps; set precision='bf16-mixed'"
    elif compiled:
        reason = "torch_compile may capture graphs of its own; choose one of the two options"
    graphs = StepGraphs(None)
    if reason:
        graphs.give_up(reason)
    else:
        graphs.capture = CudaCapture(device)
    return graphs
