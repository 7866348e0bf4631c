# SPDX-License-Identifier: Apache-2.0
"""Stacked twins against separate plain modules: outputs, gradients, running statistics; and the random streams."""

import copy

import pytest
import timm.layers
import torch
from timm.layers import BatchNormAct2d, DropPath
from timm.models.vision_transformer import LayerScale
from torch import nn
from torch.func import functional_call

import perada.models.twins  # noqa: F401  # registers the twins of timm's layers
from perada.core.seeding import Streams
from perada.core.states import get_state, parameter_keys, stack, train_mode
from perada.engine.fold import fold

CLIENTS = 3
ROWS = 4
IMAGE = (6, 5, 5)
TOKENS = (7, 6)
FLAT = (6,)

LAYERS = {
    "linear": (lambda: nn.Linear(6, 5), FLAT),
    "linear on tokens": (lambda: nn.Linear(6, 5), TOKENS),
    "linear without bias": (lambda: nn.Linear(6, 5, bias=False), TOKENS),
    "conv": (lambda: nn.Conv2d(6, 4, 3, stride=2, padding=1), IMAGE),
    "conv without bias": (lambda: nn.Conv2d(6, 4, 3, bias=False), IMAGE),
    "conv 1x1": (lambda: nn.Conv2d(6, 4, 1), IMAGE),
    "conv 1x1 without bias": (lambda: nn.Conv2d(6, 4, 1, bias=False), IMAGE),
    "conv 1x1 with stride": (lambda: nn.Conv2d(6, 4, 1, stride=2), IMAGE),
    "conv 1x1 with padding": (lambda: nn.Conv2d(6, 4, 1, padding=1), IMAGE),
    "conv in groups": (lambda: nn.Conv2d(6, 6, 3, groups=3, padding="same"), IMAGE),
    "conv 1x1 in groups": (lambda: nn.Conv2d(6, 6, 1, groups=2), IMAGE),
    "conv padded by reflection": (lambda: nn.Conv2d(6, 4, 3, padding=1, padding_mode="reflect"), IMAGE),
    "transposed conv": (lambda: nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, output_padding=1), IMAGE),
    "transposed conv without bias": (lambda: nn.ConvTranspose2d(6, 4, 2, stride=2, bias=False), IMAGE),
    "transposed conv in groups": (lambda: nn.ConvTranspose2d(6, 4, 3, groups=2, dilation=2), IMAGE),
    "prelu": (lambda: nn.PReLU(), IMAGE),
    "prelu by channel": (lambda: nn.PReLU(6), IMAGE),
    "prelu, flat": (lambda: nn.PReLU(6), FLAT),
    "instance norm": (lambda: nn.InstanceNorm2d(6, eps=1e-3, affine=True), IMAGE),
    "instance norm 1d": (lambda: nn.InstanceNorm1d(7, affine=True), TOKENS),
    "batch norm 1d": (lambda: nn.BatchNorm1d(6), FLAT),
    "batch norm": (lambda: nn.BatchNorm2d(6, momentum=0.3, eps=1e-3), IMAGE),
    "batch norm, cumulative": (lambda: nn.BatchNorm2d(6, momentum=None), IMAGE),
    "batch norm without statistics": (lambda: nn.BatchNorm2d(6, track_running_stats=False), IMAGE),
    "batch norm and act": (lambda: BatchNormAct2d(6), IMAGE),
    "layer norm": (lambda: nn.LayerNorm(6), TOKENS),
    "layer norm over two axes": (lambda: nn.LayerNorm([7, 6]), TOKENS),
    "timm layer norm": (lambda: timm.layers.LayerNorm(6), TOKENS),
    "timm layer norm of an image": (lambda: timm.layers.LayerNorm2d(6), IMAGE),
    "timm linear": (lambda: timm.layers.Linear(6, 5), TOKENS),
    "group norm": (lambda: nn.GroupNorm(3, 6), IMAGE),
    "group norm, flat": (lambda: nn.GroupNorm(2, 6), FLAT),
    "layer scale": (lambda: LayerScale(6), TOKENS),
}


def close(left, right):
    torch.testing.assert_close(left, right, rtol=1e-11, atol=1e-12)


def freeze(layer, trained):
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(trained in ("all", name))
    return any(parameter.requires_grad for parameter in layer.parameters())


def test_the_gradient_of_stacked_weights_lies_in_memory_as_they_do():
    folded = fold(nn.Linear(6, 5, bias=False).double())
    folded.context.num_clients = CLIENTS
    x = torch.randn(CLIENTS, ROWS, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(CLIENTS, 5, 6, dtype=torch.float64, requires_grad=True)
    of_out = torch.randn(CLIENTS * ROWS, 5, dtype=torch.float64)

    def run(x, weight):
        return functional_call(folded.model, {"weight": weight}, (x.flatten(0, 1),))

    (gradient,) = torch.autograd.grad(run(x, weight), [weight], of_out)
    assert gradient.is_contiguous()
    close(gradient, torch.einsum("cno,cni->coi", of_out.view(CLIENTS, ROWS, 5), x))
    assert torch.autograd.gradgradcheck(run, (x, weight))  # what a user's algorithm may ask for


def test_the_slope_of_a_stacked_prelu_is_also_the_gradient_at_zero():
    folded = fold(nn.PReLU().double())
    folded.context.num_clients = 2
    x = torch.zeros(2, 1, dtype=torch.float64, requires_grad=True)
    slopes = torch.tensor([[0.25], [0.5]], dtype=torch.float64)
    functional_call(folded.model, {"weight": slopes}, (x,)).sum().backward()
    assert x.grad.flatten().tolist() == [0.25, 0.5]


def test_a_transposed_convolution_takes_the_size_of_its_output():
    single = nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1).double()
    folded = fold(single)
    folded.context.num_clients = 2
    x = torch.randn(4, 2, 5, 5, dtype=torch.float64)
    stacked = stack([get_state(single)] * 2)
    out = functional_call(folded.model, stacked, (x,), {"output_size": [10, 10]})
    close(out, single(x, output_size=[10, 10]))


def test_an_instance_norm_with_running_statistics_has_no_stacked_version():
    folded = fold(nn.Sequential(nn.InstanceNorm2d(3, affine=True, track_running_stats=True)))
    assert folded.missing == {"0": "InstanceNorm2d"}


@pytest.mark.parametrize("trained", ["all", "weight", "bias"])
@pytest.mark.parametrize("counts", [None, (4, 2, 3)])
@pytest.mark.parametrize(("name", "together"), [(n, t) for n in LAYERS for t in (False, True) if "batch" in n or not t])
@pytest.mark.every(3)
def test_twin_equals_separate_modules(name, together, counts, trained):
    make, shape = LAYERS[name]
    single = nn.Sequential(make().double())
    if not freeze(single[0], trained):
        return  # the layer has no such parameter
    if trained != "all":
        with torch.no_grad():
            for parameter in single.parameters():
                parameter.add_(torch.randn_like(parameter))
    separate = []
    for _ in range(CLIENTS):
        module = copy.deepcopy(single)
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter))
        separate.append(module)
    x = torch.randn(CLIENTS, ROWS, *shape, dtype=torch.float64).requires_grad_()
    weight = torch.randn(CLIENTS, ROWS, *single(x[0].detach()).shape[1:], dtype=torch.float64)
    real = [ROWS] * CLIENTS if counts is None else counts

    keys = parameter_keys(single)
    stacked = {k: v.requires_grad_(k in keys) for k, v in stack([get_state(m) for m in separate]).items()}
    folded = fold(single)
    assert not folded.missing
    folded.context.num_clients = CLIENTS
    folded.context.counts = counts
    folded.context.together = together
    out = torch.zeros_like(weight)
    for step in range(2):  # two steps: a cumulative mean of statistics differs from the second on
        out = functional_call(train_mode(folded.model), stacked, (x.flatten(0, 1) * (1 + step),)).view_as(weight)
    sum((out[c, :n] * weight[c, :n]).sum() for c, n in enumerate(real)).backward()
    gradient_x, x.grad = x.grad, None

    for client, (module, rows) in enumerate(zip(separate, real, strict=True)):
        train_mode(module)
        for step in range(2):
            expected = module(x[client, :rows] * (1 + step))
        close(out[client, :rows], expected)
        (expected * weight[client, :rows]).sum().backward()
        for key, parameter in module.named_parameters():
            if parameter.requires_grad:
                close(stacked[key].grad[client], parameter.grad)
        for key, buffer in module.named_buffers():
            close(stacked[key][client], buffer)
        close(gradient_x[client, :rows], x.grad[client, :rows])

    folded.model.eval()
    out = functional_call(folded.model, stacked, (x.flatten(0, 1),)).view_as(weight)
    for client, (module, rows) in enumerate(zip(separate, real, strict=True)):
        close(out[client, :rows], module.eval()(x[client, :rows]))


def test_frozen_modules_are_shared_and_the_single_model_stays_as_it_is():
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Linear(2, 2)), nn.Flatten(), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    before = dict(model.named_modules())
    folded = fold(model).model
    assert folded[0][1] is model[0][1]
    assert folded[0][2] is model[0][2]
    assert folded[0][0].weight is model[0][0].weight
    assert folded[2] is not model[2]
    assert dict(model.named_modules()) == before
    assert type(model[2]) is nn.Linear


def test_a_module_used_twice_has_one_twin():
    layer = nn.Linear(3, 3)
    folded = fold(nn.Sequential(layer, nn.Tanh(), layer)).model
    assert folded[0] is folded[2]


def test_trained_modules_without_a_twin_are_named():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(3))

    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Sequential(Scale()), "c": nn.PReLU()})
    model["c"].requires_grad_(False)
    assert fold(model).missing == {"b.0": "Scale"}
    assert fold(Scale()).missing == {"the model itself": "Scale"}


def test_a_norm_whose_activation_is_trained_has_no_twin():
    norm = BatchNormAct2d(4, act_layer=nn.PReLU)
    norm.requires_grad_(True)
    assert set(fold(nn.Sequential(norm)).missing) == {"0"}
    norm.act.requires_grad_(False)
    assert not fold(nn.Sequential(norm)).missing


def streams(*seeds):
    return Streams.derived(0, "test", clients=seeds)


def drop(layer, x, seeds, counts=None):
    folded = fold(nn.Sequential(layer))
    folded.context.begin(len(seeds), counts, streams(*seeds))
    return folded.model.train()(x.flatten(0, 1)).view_as(x)


@pytest.mark.parametrize("p", [0.1, 0.3, 0.9])
def test_dropout_has_its_rate_and_keeps_the_mean(p):
    n = 40_000
    out = drop(nn.Dropout(p), torch.ones(2, 4, n // 4), (0, 1))
    kept = out != 0
    torch.testing.assert_close(out[kept].unique(), torch.tensor([1 / (1 - p)]))
    error = 5 * (p * (1 - p) / n) ** 0.5  # five standard deviations
    assert ((kept.double().flatten(1).mean(1) - (1 - p)).abs() < error).all()
    # Clients' masks are independent of each other, and so are a mask's neighbours (cut from one draw).
    both = (kept[0] & kept[1]).double().mean()
    neighbours = (kept[..., 1:] & kept[..., :-1]).double().mean()
    assert abs(both - (1 - p) ** 2) < error
    assert abs(neighbours - (1 - p) ** 2) < error


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Dropout(0.4), (6,)),
        (nn.Dropout(0.4), (5, 3, 3)),
        (nn.Dropout2d(0.4), (20, 2, 2)),
        (nn.Dropout1d(0.4), (20, 2)),
        (DropPath(0.4), (3, 2)),
    ],
)
def test_masks_do_not_depend_on_the_other_clients(layer, shape):
    x = torch.rand(3, 8, *shape) + 1
    torch.manual_seed(1)
    before = torch.get_rng_state()
    together = drop(layer, x, (5, 6, 7), (8, 3, 5))
    assert torch.equal(torch.get_rng_state(), before)  # nothing is taken from the global stream
    assert torch.equal(drop(layer, x[1:2, :3], (6,))[0], together[1, :3])
    assert torch.equal(drop(layer, x[2:, :5], (7,))[0], together[2, :5])
    # In the loop over clients the single model, with its random layers alone replaced, draws the same masks.
    looped = fold(nn.Sequential(layer), random_only=True)
    looped.context.begin(1, None, streams(5))
    assert torch.equal(looped.model.train()(x[0]), together[0])
    dropped = (together[0] == 0).double().mean()
    assert 0 < dropped < 1


def test_channel_dropout_and_stochastic_depth_drop_as_a_whole():
    channels = drop(nn.Dropout2d(0.5), torch.ones(1, 9, 7, 2, 2), (0,))[0]
    assert set(channels.flatten(2).mean(2).flatten().tolist()) == {0.0, 2.0}
    for layer, kept in ((DropPath(0.5), 2.0), (DropPath(0.5, scale_by_keep=False), 1.0)):
        rows = drop(layer, torch.ones(2, 30, 7, 2), (0, 1))
        assert set(rows.flatten(2).mean(2).flatten().tolist()) == {0.0, kept}


def test_dropout_of_everything_of_nothing_and_in_evaluation():
    x = torch.randn(2, 3, 4)
    assert drop(nn.Dropout(1.0), x, (0, 1)).count_nonzero() == 0
    layer = nn.Dropout(0.0)
    assert fold(nn.Sequential(layer)).model[0] is layer
    folded = fold(nn.Sequential(nn.Dropout(0.5)))
    folded.context.num_clients = 2
    assert torch.equal(folded.model.eval()(x.flatten(0, 1)), x.flatten(0, 1))
