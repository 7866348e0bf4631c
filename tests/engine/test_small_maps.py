# SPDX-License-Identifier: Apache-2.0
"""Convolutions of small maps with trained weights, against one of torch's convolutions for each client."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from perada.core.states import get_state, stack
from perada.engine.fold import fold

CLIENTS = 3
ROWS = 60
MEMORY_FORMATS = [torch.contiguous_format, torch.channels_last]

CONVOLUTIONS = {
    "2x2": (lambda **kw: nn.Conv2d(5, 4, 3, padding=1, **kw), (2, 2)),
    "2x2 to 1x1": (lambda **kw: nn.Conv2d(5, 4, 3, stride=2, padding=1, **kw), (2, 2)),
    "1x2": (lambda **kw: nn.Conv2d(5, 4, 3, padding=1, **kw), (1, 2)),
    "3x3 with a kernel of 5x5": (lambda **kw: nn.Conv2d(5, 4, 5, padding=2, **kw), (3, 3)),
    "kernel of 3x5": (lambda **kw: nn.Conv2d(5, 4, (3, 5), padding=(1, 2), **kw), (2, 3)),
    "without padding": (lambda **kw: nn.Conv2d(5, 4, (2, 4), padding=(1, 0), **kw), (1, 4)),
    "dilated, not all pixels are joined": (lambda **kw: nn.Conv2d(5, 4, 3, padding=2, dilation=2, **kw), (2, 2)),
    "same padding": (lambda **kw: nn.Conv2d(5, 4, 3, padding="same", **kw), (2, 2)),
    "one pixel": (lambda **kw: nn.Conv2d(5, 4, 3, padding=1, **kw), (1, 1)),
    "one pixel, other tap": (lambda **kw: nn.Conv2d(5, 4, (2, 3), stride=2, padding=(1, 2), **kw), (1, 1)),
    "1x1 with stride": (lambda **kw: nn.Conv2d(5, 4, 1, stride=2, **kw), (3, 4)),
    "1x1 with unequal strides": (lambda **kw: nn.Conv2d(5, 4, 1, stride=(3, 1), **kw), (4, 4)),
}


class CountConvolutions(TorchDispatchMode):
    """Counts the convolutions that torch computes, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "convolution" in func.__name__
        return func(*args, **(kwargs or {}))


def clients_of(conv: nn.Conv2d) -> list[nn.Conv2d]:
    """Return copies of a layer with other weights."""
    clients = []
    for _ in range(CLIENTS):
        client = copy.deepcopy(conv)
        for parameter in client.parameters():
            nn.init.normal_(parameter)
        clients.append(client)
    return clients


def run_stacked(conv: nn.Conv2d, clients: list[nn.Conv2d], x_R: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the outputs of the folded layer, and the stacked state that it used."""
    folded = fold(conv)
    folded.context.num_clients = CLIENTS
    state = {name: value.requires_grad_() for name, value in stack([get_state(client) for client in clients]).items()}
    return functional_call(folded.model, state, (x_R,)), state


@pytest.mark.parametrize("memory_format", MEMORY_FORMATS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_outputs_and_gradients_are_those_of_each_clients_convolution(name, bias, memory_format):
    torch.manual_seed(0)
    make, size = CONVOLUTIONS[name]
    conv = make(bias=bias).double()
    clients = clients_of(conv)
    x_R = torch.randn(CLIENTS * ROWS, 5, *size, dtype=torch.float64).to(memory_format=memory_format).requires_grad_()

    with CountConvolutions() as mode:
        out, state = run_stacked(conv, clients, x_R)
        of_out = torch.randn_like(out)
        gradients = torch.autograd.grad(out, [x_R, *state.values()], of_out)
    assert mode.count == 0

    expected = torch.cat([client(x) for client, x in zip(clients, x_R.chunk(CLIENTS), strict=True)])
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    (expected_x_gradient,) = torch.autograd.grad(expected, [x_R], of_out, retain_graph=True)
    torch.testing.assert_close(gradients[0], expected_x_gradient, rtol=1e-12, atol=1e-12)
    for gradient, parameter_name in zip(gradients[1:], state, strict=True):
        parameters = [client.get_parameter(parameter_name) for client in clients]
        expected_gradient = torch.stack(torch.autograd.grad(expected, parameters, of_out, retain_graph=True))
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "size", "rows"),
    [
        # Copying the weights to a matrix would take longer than few images save.
        (lambda: nn.Conv2d(5, 4, 3, padding=1), (2, 2), 28),
        # Most taps of the kernel fall on pixels.
        (lambda: nn.Conv2d(5, 4, 3, padding=1), (3, 3), ROWS),
        (lambda: nn.Conv2d(5, 4, 3, padding=1, padding_mode="circular"), (2, 2), ROWS),
        (lambda: nn.Conv2d(4, 4, 3, padding=1, groups=2), (2, 2), ROWS),
    ],
)
def test_other_convolutions_are_those_of_torch(make, size, rows):
    conv = make()
    clients = clients_of(conv)
    x_R = torch.randn(CLIENTS * rows, conv.in_channels, *size)
    with CountConvolutions() as mode:
        out, _ = run_stacked(conv, clients, x_R)
    assert mode.count == CLIENTS
    assert torch.equal(out, torch.cat([client(x) for client, x in zip(clients, x_R.chunk(CLIENTS), strict=True)]))


def test_one_image_more_is_enough_for_the_product():
    conv = nn.Conv2d(5, 4, 3, padding=1)
    with CountConvolutions() as mode:
        run_stacked(conv, clients_of(conv), torch.randn(CLIENTS * 29, 5, 2, 2))
    assert mode.count == 0


def test_one_layer_serves_maps_of_two_sizes_in_turn():
    torch.manual_seed(0)
    conv = nn.Conv2d(5, 4, 5, padding=2).double()
    folded = fold(conv)
    folded.context.num_clients = 1
    state = stack([get_state(conv)])
    for size in ((3, 3), (2, 3), (3, 2), (3, 3)):
        x_R = torch.randn(ROWS, 5, *size, dtype=torch.float64)
        torch.testing.assert_close(functional_call(folded.model, state, (x_R,)), conv(x_R), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["2x2", "2x2 to 1x1", "one pixel"])
def test_under_autocast_the_error_and_the_dtype_are_those_of_bfloat16(name):
    torch.manual_seed(0)
    make, size = CONVOLUTIONS[name]
    conv = make()
    clients = clients_of(conv)
    x_R = torch.randn(CLIENTS * ROWS, 5, *size).requires_grad_()
    expected = torch.cat([client(x) for client, x in zip(clients, x_R.chunk(CLIENTS), strict=True)])
    with torch.autocast("cpu", torch.bfloat16):
        out, state = run_stacked(conv, clients, x_R)
        by_torch = torch.cat([client(x) for client, x in zip(clients, x_R.chunk(CLIENTS), strict=True)])
    assert out.dtype == by_torch.dtype == torch.bfloat16
    error_of_torch = (by_torch.float() - expected).norm()
    assert (out.float() - expected).norm() < 1.5 * error_of_torch
    gradients = torch.autograd.grad(out.float().square().sum(), list(state.values()))
    assert all(gradient.dtype == torch.float32 for gradient in gradients)


def test_gradients_can_be_differentiated():
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 3, 3, padding=1, bias=False).double()
    folded = fold(conv)
    folded.context.num_clients = 1
    x_R = torch.randn(8, 2, 2, 1, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(1, 3, 2, 3, 3, dtype=torch.float64, requires_grad=True)

    def run(x_R: Tensor, weight: Tensor) -> Tensor:
        return functional_call(folded.model, {"weight": weight}, (x_R,))

    torch.testing.assert_close(run(x_R, weight), F.conv2d(x_R, weight[0], padding=1))
    assert torch.autograd.gradgradcheck(run, (x_R, weight))
