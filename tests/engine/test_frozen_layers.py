# SPDX-License-Identifier: Apache-2.0
"""Frozen layers against torch's own."""

import copy

import pytest
import timm
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from perada.core.states import train_mode
from perada.engine import Engine
from perada.engine.fold import fold
from perada.engine.frozen_layers import FrozenConv2d, input_gradient
from perada.models.twins import FrozenConv2dSame


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_frozen_batch_norm_is_torchs_and_keeps_no_input(affine, half, memory_format):
    norm = nn.BatchNorm2d(6, affine=affine)
    for value in (*norm.parameters(), norm.running_mean, norm.running_var):
        nn.init.uniform_(value, 0.5, 2)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), norm, nn.ReLU(inplace=True), nn.Conv2d(6, 2, 1))
    model[1].requires_grad_(False)
    plain = copy.deepcopy(model)
    folded = train_mode(fold(model, random_only=True).model)
    assert folded[1] is not norm
    plain.train()[1].eval()
    x = torch.randn(4, 3, 8, 8).to(memory_format=memory_format)
    kept = []

    def keep(value):
        kept.append(value.data_ptr())
        return value

    inputs = []
    folded[1].register_forward_pre_hook(lambda module, given: inputs.append(given[0]))
    with torch.autocast("cpu", torch.bfloat16, enabled=half), saved_tensors_hooks(keep, lambda value: value):
        ours = folded(x)
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        theirs = plain(x)
    assert torch.equal(ours, theirs)
    ours.float().square().sum().backward()
    theirs.float().square().sum().backward()
    for got, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert got.grad is None if expected.grad is None else torch.equal(got.grad, expected.grad)
    assert inputs[0].data_ptr() not in kept


def test_a_folded_frozen_batch_norm_follows_the_model():
    norm = nn.BatchNorm2d(3).requires_grad_(False)
    folded = fold(nn.Sequential(norm), random_only=True).model
    norm.double()
    nn.init.constant_(norm.running_mean, 2.0)
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    torch.testing.assert_close(folded(x), (x - 2) / (1 + norm.eps) ** 0.5)


def test_one_layer_serves_both_memory_formats_in_turn():
    """The matrix of a small map has its rows in the order of the map's memory: one for each format is kept."""
    conv = nn.Conv2d(8, 6, 3, padding=1).requires_grad_(False)
    layer = FrozenConv2d(conv)
    x = torch.randn(5, 8, 2, 2)
    expected = conv(x)
    for memory_format in (torch.contiguous_format, torch.channels_last, torch.contiguous_format):
        torch.testing.assert_close(layer(x.to(memory_format=memory_format)), expected)
    assert len(layer._cache) == 2  # otherwise torch's own convolution was compared with itself


def test_a_norm_without_running_statistics_stays_as_it_is():
    norm = nn.BatchNorm2d(3, track_running_stats=False).requires_grad_(False)
    assert fold(nn.Sequential(norm)).model[0] is norm


SHAPES = [
    # in, out, kernel, stride, padding, dilation, (H, W): all are matrix products
    (5, 4, 3, 1, 1, 1, (1, 1)),
    (5, 4, 3, 1, 1, 1, (2, 2)),
    (5, 4, 3, 2, 1, 1, (2, 2)),
    (5, 4, 3, 1, 2, 2, (2, 2)),
    (5, 4, 3, 2, 2, 1, (1, 3)),
    (5, 4, 5, 1, 2, 1, (3, 3)),
    (5, 4, (5, 3), (2, 1), (2, 0), (1, 1), (2, 3)),
    (5, 4, (3, 5), 1, "same", 1, (2, 3)),
    (5, 4, (4, 3), 1, "same", 1, (2, 2)),  # one row of padding above, two below
    (5, 4, 1, 2, 0, 1, (1, 1)),
    (5, 4, 7, 2, 3, 1, (4, 5)),
    (5, 4, 3, 1, 2, 1, (1, 1)),  # nine pixels of one
]
PLAIN = [
    (5, 4, 3, 1, 1, 1, (3, 3), {}),
    (5, 4, 3, 1, 1, 1, (8, 8), {}),
    (5, 4, 7, 1, 3, 1, (4, 5), {}),  # a matrix eight times as large as the weights
    (5, 4, 3, 1, 40, 1, (1, 1), {}),  # 700 times
    (6, 4, 3, 1, 1, 1, (2, 2), {"groups": 2}),
    (5, 4, 3, 1, 1, 1, (2, 2), {"padding_mode": "circular"}),
]


def products(function):
    """Numbers of multiplications of convolutions and of matrix products in a call."""
    with FlopCounterMode(display=False) as counter:
        function()
    counts = {str(key): value for key, value in counter.get_flop_counts()["Global"].items()}
    convolved = sum(value for key, value in counts.items() if "conv" in key)
    return convolved, sum(counts.values()) - convolved


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("bias", [False, True])
def test_a_frozen_convolution_of_a_small_map_is_a_matrix_product_with_the_same_outputs_and_gradients(
    shape, memory_format, bias
):
    *sizes, dilation, map_size = shape
    conv = nn.Conv2d(*sizes, dilation, bias=bias, dtype=torch.float64).requires_grad_(False)
    x = torch.randn(6, 5, *map_size, dtype=torch.float64).to(memory_format=memory_format).requires_grad_()
    frozen = fold(nn.Sequential(conv), random_only=True).model
    ours = frozen(x)
    theirs = conv(x)
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(theirs)
    got, expected = (torch.autograd.grad((out * weights).sum(), x)[0] for out in (ours, theirs))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    convolved, multiplied = products(lambda: frozen(x.detach()))
    assert convolved == 0 < multiplied


@pytest.mark.parametrize("shape", PLAIN, ids=str)
def test_other_convolutions_stay_convolutions(shape):
    *sizes, dilation, map_size, options = shape
    conv = nn.Conv2d(*sizes, dilation, **options).requires_grad_(False)
    x = torch.randn(2, sizes[0], *map_size)
    frozen = fold(nn.Sequential(conv), random_only=True).model
    assert torch.equal(frozen(x), conv(x))
    if "padding_mode" not in options:
        assert products(lambda: frozen(x))[1] == 0


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_small_maps_under_autocast_have_the_error_of_bfloat16_and_its_dtype(memory_format):
    conv = nn.Conv2d(64, 64, 3, padding=1).requires_grad_(False)
    x = torch.randn(32, 64, 2, 2).to(memory_format=memory_format)
    frozen = fold(nn.Sequential(conv), random_only=True).model
    with torch.autocast("cpu", torch.bfloat16):
        ours = frozen(x)
        theirs = conv(x)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    exact = conv(x)
    assert (ours - exact).norm() <= 1.1 * (theirs - exact).norm()
    torch.testing.assert_close(frozen(x), exact)  # back in single precision, by a matrix of its own
    with torch.autocast("cpu", torch.bfloat16):
        assert frozen(x.double().float()).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert fold(nn.Sequential(conv.double()), random_only=True).model(x.double()).dtype == torch.float64


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("autocast", [True, False])
def test_the_gradient_of_a_strided_depthwise_convolution_is_as_exact_as_the_number_format(memory_format, autocast):
    conv = nn.Conv2d(6, 12, 3, 2, 1, groups=6).requires_grad_(False)
    conv.weight.copy_(conv.weight.bfloat16())  # a weight that both formats have
    exact = copy.deepcopy(conv).double()
    half = copy.deepcopy(conv).bfloat16()
    conv = conv if autocast else half
    x = torch.randn(4, 6, 9, 9).bfloat16().to(memory_format=memory_format)
    x = (x.float() if autocast else x).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = FrozenConv2d(conv)(x)
    assert out.dtype == torch.bfloat16 and torch.equal(out, half(x.detach().bfloat16()))
    assert type(out.grad_fn).__name__ == "_StridedDepthwiseBackward"
    upstream = torch.randn_like(out)
    (gradient,) = torch.autograd.grad(out, x, upstream)
    inner = x.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(exact(inner), inner, upstream.double())
    assert gradient.dtype == x.dtype
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-6 if autocast else 2**-8, atol=1e-6)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("kernel, side", [(3, 8), (3, 9), (5, 7)])
def test_a_strided_depthwise_convolution_with_timms_padding_has_the_same_output_and_a_gradient_of_single_precision(
    memory_format, kernel, side
):
    conv = timm.layers.Conv2dSame(6, 6, kernel, stride=2, groups=6).requires_grad_(False)
    conv.weight.copy_(conv.weight.bfloat16())  # a weight that both formats have
    exact = copy.deepcopy(conv).double()
    folded = fold(nn.Sequential(conv), random_only=True).model
    assert isinstance(folded[0], FrozenConv2dSame)
    x = torch.randn(4, 6, side, side).bfloat16().float().to(memory_format=memory_format).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = folded(x)
        assert torch.equal(out, conv(x))
    assert type(out.grad_fn).__name__ == "_StridedDepthwiseBackward"
    upstream = torch.randn_like(out)
    (gradient,) = torch.autograd.grad(out, x, upstream)
    inner = x.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(exact(inner), inner, upstream.double())
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-6, atol=1e-6)
    # Single precision is torch's own.
    assert torch.equal(folded(x), conv(x))
    assert type(folded(x).grad_fn).__name__ == "ConvolutionBackward0"


def test_the_matrix_of_a_small_map_follows_the_weights():
    conv = nn.Conv2d(3, 2, 3, padding=1).requires_grad_(False)
    frozen = fold(nn.Sequential(conv), random_only=True).model
    x = torch.randn(2, 3, 2, 2)
    with torch.inference_mode():
        torch.testing.assert_close(frozen(x), conv(x))
    again = x.clone().requires_grad_()
    frozen(again).sum().backward()  # not with a tensor of inference mode
    conv.load_state_dict({key: torch.randn_like(value) for key, value in conv.state_dict().items()})
    torch.testing.assert_close(frozen(x), conv(x))
    conv.double()
    torch.testing.assert_close(frozen(x.double()), conv(x.double()))
    conv.weight.data = torch.randn_like(conv.weight)
    torch.testing.assert_close(frozen(x.double()), conv(x.double()))
    assert frozen(x.new_zeros(0, 3, 2, 2).double()).shape == (0, 2, 2, 2)
    assert frozen[0].weight is conv.weight
    assert list(frozen.state_dict()) == list(frozen.named_parameters()) == []


def test_no_more_than_two_matrices_of_a_layer_are_kept():
    conv = nn.Conv2d(3, 2, 5, padding=2).requires_grad_(False)
    frozen = fold(nn.Sequential(conv), random_only=True).model
    for side in (1, 2, 3, 2, 1):
        x = torch.randn(2, 3, side, side)
        torch.testing.assert_close(frozen(x), conv(x))
    assert len(frozen[0]._cache) == 2


def test_a_convolution_with_a_hook_runs_it_whenever_it_was_registered():
    conv = nn.Conv2d(3, 2, 3, padding=1).requires_grad_(False)
    seen = []
    x = torch.randn(2, 3, 1, 1)
    frozen = fold(nn.Sequential(conv), random_only=True).model
    plain = frozen(x)
    handle = conv.register_forward_hook(lambda module, given, out: seen.append(1) or out + 1)
    torch.testing.assert_close(frozen(x), plain + 1)
    assert seen
    handle.remove()
    torch.testing.assert_close(frozen(x), plain)


def test_images_of_another_number_format_are_rejected_as_by_torch():
    conv = nn.Conv2d(3, 2, 3, padding=1).requires_grad_(False)
    frozen = fold(nn.Sequential(conv), random_only=True).model
    for dtype in (torch.bfloat16, torch.float64):
        with pytest.raises(RuntimeError) as theirs:
            conv(torch.randn(2, 3, 1, 1, dtype=dtype))
        with pytest.raises(RuntimeError) as ours:
            frozen(torch.randn(2, 3, 1, 1, dtype=dtype))
        assert str(ours.value) == str(theirs.value)


def test_a_matrix_does_not_outlive_its_weights():
    conv = nn.Conv2d(3, 2, 3, padding=1).requires_grad_(False)
    frozen = fold(nn.Sequential(conv), random_only=True).model
    x = torch.randn(2, 3, 1, 1)
    one, two = (torch.randn_like(conv.weight) for _ in range(2))
    for weight in (one, two):
        conv.weight.data = weight
        torch.testing.assert_close(frozen(x), conv(x))
    one.data.fill_(3.0)  # as another tensor that has got the address of the first
    conv.weight.data = one
    torch.testing.assert_close(frozen(x), conv(x))


@pytest.mark.parametrize("options", [(3, 1, 1, 1), (3, 2, 1, 1), (5, 1, 4, 2), ((5, 3), 1, (2, 1), 1)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_trained_convolutions_of_one_pixel_are_one_batched_product(options, bias):
    conv = nn.Conv2d(5, 4, *options, bias=bias, dtype=torch.float64)
    engine = Engine(nn.Sequential(conv), "folded")
    states = {
        key: torch.randn(3, *value.shape, dtype=torch.float64) for key, value in engine.model.state_dict().items()
    }
    x = torch.randn(3, 6, 5, 1, 1, dtype=torch.float64)
    for value in states.values():
        value.requires_grad_()
    ours = engine.logits(states, x)
    theirs = Engine(nn.Sequential(conv), "loop").logits(states, x)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(ours)
    for got, expected in zip(
        *(torch.autograd.grad((o * weights).sum(), list(states.values())) for o in (ours, theirs)), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    assert products(lambda: engine.logits(states, x))[0] == 0


@pytest.mark.parametrize("name", ["resnet18", "convnext_atto", "regnetx_002", "mobilenetv3_small_050"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_networks_of_timm_have_the_same_logits_and_gradients_of_their_images(name, memory_format):
    model = timm.create_model(name, num_classes=3).double().eval().requires_grad_(False)
    for value in model.parameters():
        if value.dim() == 1:  # else the last norm of a block is zero, and what is before it does not count
            nn.init.uniform_(value, 0.3, 1.2)
    x = torch.randn(3, 3, 32, 32, dtype=torch.float64).to(memory_format=memory_format).requires_grad_()
    frozen = fold(model, random_only=True).model.eval()
    ours = frozen(x)
    theirs = model(x)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12 * float(theirs.detach().abs().max()))
    got, expected = (torch.autograd.grad(out.square().sum(), x)[0] for out in (ours, theirs))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12 * float(expected.abs().max()))
    assert any(isinstance(layer, FrozenConv2d) and layer._cache for layer in frozen.modules())


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_the_gradient_of_a_frozen_batch_norm_on_other_devices(affine, memory_format):
    """A GPU has no gradient without a batch's statistics; computed here on the CPU, against autograd's."""
    norm = nn.BatchNorm2d(6, affine=affine).double().eval()
    for value in norm.state_dict().values():
        nn.init.uniform_(value.data, 0.5, 2) if value.is_floating_point() else None
    x = torch.randn(4, 6, 3, 2).double().to(memory_format=memory_format).requires_grad_()
    gradient = torch.randn(4, 6, 3, 2).double().to(memory_format=memory_format)
    (expected,) = torch.autograd.grad(norm(x), x, gradient)
    actual = input_gradient(gradient, norm.weight, norm.running_var, norm.eps)
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=0)
