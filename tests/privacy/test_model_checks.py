# SPDX-License-Identifier: Apache-2.0
"""The trial of a network at set-up: a whole batch, tightly, twice. What mixes images or remembers them is rejected."""

import collections
import contextlib

import numpy as np
import pytest
import torch
from timm.models.convnext import ConvNeXt
from torch import nn
from torch.utils.data import TensorDataset

import perada
from perada.core.states import expand, get_state
from perada.engine import Engine
from perada.privacy import Privacy
from perada.privacy.model_checks import check_clients_apart, check_gradients, check_one_image
from perada.tasks import Classification
from tests.options import sections

from ..algorithms.problems import QUIET

MIXES = "privacy: an image's output in training depends on the other images of its batch"
REMEMBERS = "privacy: the network retains state from the images that it sees in training"
SIZES = (40, 25, 33)
BATCH = 16
CLASSES = 3


pytestmark = pytest.mark.usefixtures("quick_epsilon")


class Network(nn.Module):
    """A network in which ``between`` stands between two layers, the second one trained by every adapter."""

    def __init__(self, between):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.between, self.fc = nn.Linear(36, 8), between, nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.fc(self.between(self.first(x.flatten(1)).tanh()))


def layer(function):
    """A module without parameters that runs a function of itself and its input."""
    return type(function.__name__, (nn.Module,), {"forward": function})()


def mixes_a_little(self, x):
    return x + 0.004 * x.mean(0)


def mixes_hardly(self, x):
    return x + 1e-5 * x.mean(0)


def mixes_many(self, x):
    return x + 0.1 * x.mean(0) if len(x) > 4 else x


def mixes_neighbours(self, x):
    return x + 0.1 * x.roll(1, 0)


def mixes_pairs(self, x):
    even = x.clone()
    even[: len(x) // 2 * 2 : 2] += 0.1 * x[1 : len(x) // 2 * 2 : 2]
    return even


def mixes_backward_alone(self, x):
    mean = x.mean(0)
    return x + mean - mean.detach()


def mixes_halves_of_a_large_batch(self, x):
    half = len(x) // 2
    return torch.cat([x[:half], x[half:] + 0.05 * x[: len(x) - half]])


def mixes_by_rank(self, x):
    """Sorts nothing, but scales an image by how many of the batch have a larger sum."""
    sums = x.sum(1)
    return x * (1 + 0.01 * (sums[None] > sums[:, None]).sum(1, keepdim=True))


MIXING = [
    mixes_a_little,
    mixes_hardly,
    mixes_many,
    mixes_neighbours,
    mixes_pairs,
    mixes_backward_alone,
    mixes_halves_of_a_large_batch,
    mixes_by_rank,
]


def averages_in_an_attribute(self, x):
    """The images of earlier batches move those of later ones. The first batch, and its own images, it leaves alone."""
    if self.training:
        before = getattr(self, "average", None)
        self.average = x.detach().mean(0)
        return x if before is None else x - 0.01 * before
    return x


def writes_down_only(self, x):
    """What is written down in training would be used in evaluation, or be published."""
    if self.training:
        self.total = getattr(self, "total", 0.0) + float(x.detach().sum())
    return x


def counts_in_a_list(self, x):
    if not hasattr(self, "seen"):
        self.seen = []
    self.seen.append(x.detach().mean(0))
    return x


def fills_a_memory(self, x):
    if not hasattr(self, "memory"):
        self.memory = collections.deque(maxlen=512)
    self.memory.extend(x.detach().mean(1).tolist())
    return x - 0.1 * sum(self.memory) if len(self.memory) == 512 else x


def averages_in_an_array(self, x):
    if not hasattr(self, "held"):
        self.held = {"average": np.zeros(x.shape[1])}
    self.held["average"] += x.detach().double().mean(0).numpy()
    return x


REMEMBERING = [averages_in_an_attribute, writes_down_only, counts_in_a_list, fills_a_memory, averages_in_an_array]


def federation(dtype=torch.float32):
    random = torch.Generator().manual_seed(1)

    def part(n):
        return TensorDataset(torch.randn(n, 1, 6, 6, generator=random, dtype=dtype), torch.arange(n) % CLASSES)

    return perada.FederatedData([part(n) for n in SIZES], num_classes=CLASSES)


def train(between, privacy=None, **options):
    common = {"adapter": "full", "algorithm": "perada_no_kd", "rounds": 1, "batch_size": BATCH}
    level = {"privacy": {"noise_multiplier": 1.0, "delta": 1e-3} | (privacy or {})}
    return perada.finetune(Network(between), federation(), **sections(**common | level | QUIET | options))


@pytest.mark.parametrize("engine", ["folded", "loop"])
@pytest.mark.parametrize("function", MIXING, ids=lambda function: function.__name__)
@pytest.mark.every(3)
def test_a_network_that_mixes_images_is_rejected(function, engine):
    with pytest.raises(ValueError, match=MIXES) as error:
        train(layer(function), engine=engine)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "options", [{"batch_size": 1}, {"batch_size": 1, "engine": "loop"}, {"batch_size": 3}], ids=str
)
@pytest.mark.parametrize("function", MIXING, ids=lambda function: function.__name__)
@pytest.mark.every(5)
def test_it_is_rejected_where_one_image_is_expected_in_a_batch(function, options):
    """A Poisson sample may hold more."""
    with pytest.raises(ValueError, match=MIXES):
        train(layer(function), **options)


@pytest.mark.parametrize("adapter", ["full", "head"])
@pytest.mark.parametrize("engine", ["folded", "loop"])
@pytest.mark.parametrize("function", REMEMBERING, ids=lambda function: function.__name__)
@pytest.mark.every(3)
def test_a_network_that_remembers_images_is_rejected(function, engine, adapter):
    with pytest.raises(ValueError, match=REMEMBERS) as error:
        train(layer(function), engine=engine, adapter=adapter)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("function", [mixes_a_little, mixes_many], ids=lambda function: function.__name__)
def test_mixing_in_the_frozen_part_is_rejected_too(function):
    """What is frozen may be computed once an image and kept, in batches of their own."""
    with pytest.raises(ValueError, match=MIXES):
        train(layer(function), adapter="head")


class Alone(nn.Module):
    """Normalises each image by itself, and counts nothing but the shape that it saw last."""

    def forward(self, x):
        self.shape = tuple(x.shape[1:])
        return (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 0.1)


class Annotated(nn.Module):
    """Attributes that are no numbers, one of which holds itself."""

    def __init__(self):
        super().__init__()
        self.names = np.array(["a", "b"])
        self.date = np.datetime64("2026-01-01")
        self.itself = []
        self.itself.append(self.itself)

    def forward(self, x):
        return x


@pytest.mark.parametrize(
    "between", [Alone, Annotated, lambda: nn.GroupNorm(2, 8), lambda: nn.Dropout(0.5), nn.Identity]
)
@pytest.mark.parametrize(
    ("privacy", "options"),
    [
        ({}, {}),
        pytest.param({"clipping": "automatic"}, {}, marks=pytest.mark.slow),
        ({"clipping": "per_layer", "physical_batch_size": 3}, {}),
        pytest.param({"engine": "opacus"}, {}, marks=pytest.mark.slow),
        pytest.param({}, {"batch_size": 1}, marks=pytest.mark.slow),
        ({}, {"batch_size": "full", "clients_per_chunk": 2}),
    ],
)
@pytest.mark.every(6)
def test_other_networks_pass(between, privacy, options):
    assert len(train(between(), privacy, **options).metrics["rounds"]) == 1


class OfOneFormat(nn.Module):
    """Names a number format, so that it cannot be tried in double precision."""

    def forward(self, x):
        if x.dtype != torch.float32:
            raise TypeError("float32 only")
        return x


class OfOneFormatMixing(OfOneFormat):
    def forward(self, x):
        return super().forward(x) + 0.004 * x.mean(0)


def test_a_network_of_one_number_format_is_tried_in_that():
    assert len(train(OfOneFormat()).metrics["rounds"]) == 1
    with pytest.raises(ValueError, match=MIXES):
        train(OfOneFormatMixing())


class OtherKernel(torch.autograd.Function):
    """The identity, with gradients in every second backward pass of autocast that are 8 bfloat16 roundoffs larger.

    So much may differ between two kernels at the end of a deep network.
    """

    backward_passes = 0

    @staticmethod
    def forward(ctx, x):
        ctx.is_rounded = torch.is_autocast_enabled("cpu")
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        OtherKernel.backward_passes += 1
        if ctx.is_rounded and OtherKernel.backward_passes % 2 == 0:
            gradient = gradient * (1 + 8 * 2**-8)
        return gradient


def problem(network, images=2):
    """A network's engine, states near its own, images and labels of two clients."""
    engine = Engine(network, "loop")
    random = torch.Generator().manual_seed(0)
    states = {}
    for key, value in expand(get_state(network), 2).items():
        states[key] = (value + 0.02 * torch.randn(value.shape, generator=random)).requires_grad_()
    x = torch.randn(2, images, 1, 6, 6, generator=random)
    return engine, states, x, torch.arange(2 * images).view(2, images) % CLASSES


class InBoth(nn.Module):
    """Uses a layer's weight a second time without calling the layer, which changes its gradient by a twentieth."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.fc = nn.Linear(36, 8, bias=False), nn.Linear(8, CLASSES)

    def forward(self, x):
        x = x.flatten(1)
        return self.fc(self.inner(x) + 0.05 * nn.functional.linear(x, self.inner.weight))


def autocast(dtype):
    return torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext()


def rounded_by_kernel(self, x):
    return OtherKernel.apply(x)


def test_the_rounding_of_half_precision_is_no_wrong_gradient():
    engine, states, x, y = problem(Network(layer(rounded_by_kernel)))
    with autocast(torch.bfloat16):
        check_gradients(Privacy(1.0), engine, states, x, y, Classification())
    # Eight roundoffs of bfloat16 are 64 of float16, more than rounding explains.
    with autocast(torch.float16), pytest.raises(ValueError, match="add up"):
        check_gradients(Privacy(1.0), engine, states, x, y, Classification())


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_a_use_that_the_hooks_miss_is_noticed_in_half_precision(dtype):
    engine, states, x, y = problem(InBoth())
    with autocast(dtype), pytest.raises(ValueError, match=r"'inner\.weight' do not add up"):
        check_gradients(Privacy(1.0), engine, states, x, y, Classification())


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_blocks_with_weights_of_their_own_have_per_image_gradients_in_half_precision(dtype):
    """Opacus has no sampler for a block of ConvNeXt, which scales its branch by a weight."""
    torch.manual_seed(0)
    net = ConvNeXt(num_classes=CLASSES, depths=(1, 1, 1, 1), dims=(4, 4, 4, 4), ls_init_value=0.5, in_chans=1)
    engine = Engine(net, "loop")
    states = {key: value.requires_grad_() for key, value in expand(get_state(net), 2).items()}
    x = torch.randn(2, 2, 1, 32, 32)
    y = torch.tensor([[0, 1], [2, 0]])
    with autocast(dtype):
        check_gradients(Privacy(1.0, engine="opacus"), engine, states, x, y, Classification())


class RoundedByBatch(OfOneFormat):
    """Rounds as a kernel may that is another one for another number of images."""

    def forward(self, x):
        x = super().forward(x)
        if torch.is_autocast_enabled("cpu"):
            x = x * (1 + 0.002 * (len(x) % 3))
        return x


@pytest.mark.parametrize("mixes", [False, True])
def test_a_network_of_one_number_format_is_tried_without_autocast(mixes):
    between = nn.Sequential(RoundedByBatch(), layer(mixes_a_little) if mixes else nn.Identity())
    engine, states, x, y = problem(Network(between), images=5)
    rejected = pytest.raises(ValueError, match=MIXES) if mixes else contextlib.nullcontext()
    with autocast(torch.bfloat16), rejected:
        check_one_image(Privacy(1.0), engine, states, x, y, (5, 3), Classification())


@pytest.mark.parametrize("scale", [1e-6, 1e6])
@pytest.mark.parametrize("mixes", [False, True])
def test_clients_are_kept_apart_at_any_scale_of_the_outputs(scale, mixes):
    """In single precision, whose rounding errors grow with the outputs."""
    network = Network(nn.Sequential(OfOneFormat(), layer(mixes_a_little) if mixes else nn.Identity()))
    network.fc.weight.data *= scale
    network.fc.bias.data.zero_()
    engine = Engine(network)
    states = expand(get_state(network), 2)
    rejected = pytest.raises(ValueError, match="mixes") if mixes else contextlib.nullcontext()
    with rejected:
        check_clients_apart(engine, states, torch.randn(2, 5, 1, 6, 6))


@pytest.mark.parametrize("engine", ["folded", "loop"])
def test_dropout_from_the_global_stream_is_rejected(engine):
    def drops(self, x):
        return nn.functional.dropout(x, 0.5, self.training)

    with pytest.raises(ValueError, match=r"random generator .*drop_rate") as error:
        train(layer(drops), engine=engine)
    assert "\n" not in str(error.value)


class OfTwoFormats(nn.Module):
    """A frozen layer in half precision between others, as of a large backbone."""

    def __init__(self):
        super().__init__()
        self.coarse = nn.Linear(8, 8).to(torch.bfloat16)

    def forward(self, x):
        return self.coarse(x.to(torch.bfloat16)).float()


class OfTwoFormatsMixing(OfTwoFormats):
    def forward(self, x):
        return super().forward(x) + 0.02 * x.mean(0)


@pytest.mark.every(2)
@pytest.mark.parametrize("section", ["privacy", "client_privacy"])
def test_a_network_of_two_number_formats_is_tried_in_these(section):
    level = {"privacy": None, section: {"noise_multiplier": 1.0, "delta": 1e-3}}
    options = {"adapter": "head", "algorithm": "fedavg", "rounds": 1, "batch_size": BATCH} | level | QUIET
    assert len(perada.finetune(Network(OfTwoFormats()), federation(), **sections(**options)).metrics["rounds"]) == 1
    with pytest.raises(ValueError, match=r"the other images of its batch|mixes the images of all clients"):
        perada.finetune(Network(OfTwoFormatsMixing()), federation(), **sections(**options))


@pytest.mark.parametrize("section", ["privacy", "client_privacy"])
def test_products_with_fewer_digits_than_float32_are_rejected(monkeypatch, section):
    """As of torch.set_float32_matmul_precision("medium") where the processor has them, and of TF32."""
    exact = torch.bmm

    def rounded(a, b):
        half = [value.bfloat16().float() if value.dtype == torch.float32 else value for value in (a, b)]
        return exact(*half)

    monkeypatch.setattr(torch, "bmm", rounded)
    level = {"privacy": None, section: {"noise_multiplier": 1.0, "delta": 1e-3}}
    with pytest.raises(ValueError, match=rf"{section}: float32 .*torch\.set_float32_matmul_precision"):
        train(nn.Identity(), algorithm="fedavg", **level)


def test_clients_that_share_a_batch_are_kept_apart():
    """Whole clients are protected where a network mixes their images only if they are run one after another."""
    level = {"noise_multiplier": 1.0, "delta": 1e-3}
    options = {"adapter": "full", "algorithm": "fedavg", "rounds": 1, "batch_size": BATCH, "client_privacy": level}
    with pytest.raises(ValueError, match=r"client_privacy: .*mixes .*engine='loop'"):
        perada.finetune(Network(layer(mixes_a_little)), federation(), **sections(**options | QUIET))
    for more in ({"engine": "loop"}, {"clients_per_chunk": 1}):
        perada.finetune(Network(layer(mixes_a_little)), federation(), **sections(**options | QUIET | more))
    perada.finetune(Network(nn.BatchNorm1d(8)), federation(), **sections(**options | QUIET))  # each client's own


def test_the_model_itself_is_left_as_it_was():
    network = Network(nn.Dropout(0.5)).requires_grad_(False)
    network.fc.requires_grad_(True)
    engine = Engine(network)
    before = {key: value.clone() for key, value in network.state_dict().items()}
    states = {key: value.clone().requires_grad_() for key, value in expand(get_state(network), 2).items()}
    x = torch.randn(2, 5, 1, 6, 6)
    y = torch.arange(10).view(2, 5) % CLASSES
    check_one_image(Privacy(1.0), engine, states, x, y, (5, 3), Classification())
    assert network.between.p == 0.5
    assert {value.dtype for value in network.state_dict().values()} == {torch.float32}
    assert all(torch.equal(network.state_dict()[key], value) for key, value in before.items())
