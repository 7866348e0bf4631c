# SPDX-License-Identifier: Apache-2.0
"""Steps that are captured and repeated change the same numbers as steps that are run, to the bit."""

import pytest
import torch

from perada.engine.step_graphs import WARM_UP_STEPS, StepGraph, StepGraphs, open_graphs
from tests.tape import Tape

CUDA = torch.device("cuda")


class Model:
    """A linear model with moments, which counts its steps on the host and its losses on the device."""

    def __init__(self):
        random = torch.Generator().manual_seed(0)
        self.weight = torch.randn(4, 3, generator=random).requires_grad_()
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1, momentum=0.9)
        self.loss_sum = torch.zeros(())
        self.calls = 0

    def step(self, x, y):
        self.calls += 1
        self.optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(x @ self.weight, y)
        loss.backward()
        self.optimizer.step()
        self.loss_sum += loss.detach()
        return f"step {self.calls}"


def batches(count):
    random = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(5, 4, generator=random), torch.randint(3, (5,), generator=random)


def test_replayed_steps_are_those_that_the_function_takes():
    expected = Model()
    for x, y in batches(7):
        expected.step(x, y)

    model = Model()
    tape = Tape()
    graph = StepGraph(StepGraphs(tape))
    results = []
    for x, y in batches(7):
        buffers = graph.buffer("x", x), graph.buffer("y", y)
        results.append(graph.step(lambda buffers=buffers: model.step(*buffers)))
    assert torch.equal(model.weight, expected.weight)
    assert torch.equal(model.loss_sum, expected.loss_sum)
    # The function ran in the steps before the capture and in the capture, and its last result stands for all others.
    assert (tape.captured, tape.replayed) == (1, 7 - WARM_UP_STEPS)
    assert model.calls == WARM_UP_STEPS + 1
    assert results == ["step 1", "step 2", *["step 3"] * 5]


def test_buffers_stay_in_their_places():
    graph = StepGraph(StepGraphs(Tape()))
    first = torch.tensor([1.0, 2.0])
    buffer = graph.buffer("x", first)
    assert graph.buffer("x", torch.tensor([3.0, 4.0])) is buffer
    assert buffer.tolist() == [3.0, 4.0]
    assert first.tolist() == [1.0, 2.0]  # a batch is not changed


def test_a_step_that_cannot_be_captured_is_taken_once_and_said_once():
    model = Model()
    graphs = StepGraphs(Tape())
    graph = StepGraph(graphs)

    def waits():
        # Before anything changes: a GPU would have done nothing either.
        if model.calls >= WARM_UP_STEPS:
            float(model.loss_sum)
        model.step(*next(iter(batches(1))))

    for _ in range(WARM_UP_STEPS):
        graph.step(waits)
    with pytest.warns(UserWarning, match="a step could not be captured: aten._local_scalar_dense") as caught:
        graph.step(waits)
        graph.step(waits)
    assert len(caught) == 1
    assert model.calls == WARM_UP_STEPS + 2
    assert graphs.capture is None


@pytest.mark.parametrize(
    ("device", "options", "reason"),
    [
        ("cpu", {}, "runs on 'cpu'"),
        ("meta", {}, "runs on 'meta'"),
        ("cuda", {"private": True}, "private"),
        ("cuda", {"scaled": True}, "bf16-mixed"),
        ("cuda", {"compiled": True}, "torch_compile"),
    ],
)
def test_what_cannot_be_captured_is_said_with_its_reason(device, options, reason):
    facts = {"private": False, "scaled": False, "compiled": False} | options
    with pytest.warns(UserWarning, match=f"without CUDA graphs: .*{reason}"):
        graphs = open_graphs(torch.device(device), **facts)
    assert graphs.capture is None
