# SPDX-License-Identifier: Apache-2.0
"""Noisy gradients: against one backward pass per image, against Opacus, and what they promise."""

from dataclasses import replace

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from perada.adapters import DualLoraConfig
from perada.core.seeding import Streams
from perada.core.states import get_state, parameter_keys, stack
from perada.engine import Engine
from perada.models.adapted import insert_adapter
from perada.models.backbones import build_backbone
from perada.privacy import Privacy
from perada.privacy.gradients import OuterProductGrads
from perada.tasks import Classification

from .opacus_loop import NoisyGradients, NoisyQuery, OpacusGradients

CLASSES = 4
COUNTS = (3, 0, 2)


class Small(nn.Module):
    """A k×k and a 1×1 convolution, group and layer norm, ReLUs in place, a linear head."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, 6)
        self.act = nn.ReLU(inplace=True)
        self.point = nn.Conv2d(6, 5, 1, bias=False)
        self.last = nn.LayerNorm(5)
        self.fc = nn.Linear(5, CLASSES)

    def forward(self, x):
        x = self.act(self.norm(self.conv(x)))
        x = self.point(x).relu_()
        return self.fc(self.last(x.mean((2, 3))))


class UpAndDown(nn.Module):
    """The layers of MONAI's networks: instance normalisation, learned slopes, a transposed convolution."""

    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(3, 6, 3, stride=4, padding=1)
        self.norm = nn.InstanceNorm2d(6, affine=True)
        self.act = nn.PReLU()
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.act_by_channel = nn.PReLU(4)
        self.fc = nn.Linear(4, CLASSES)

    def forward(self, x):
        x = self.act(self.norm(self.down(x)))
        x = self.act_by_channel(self.up(x))
        return self.fc(x.square().mean((2, 3)))


class Shared(nn.Module):
    """A linear layer that is used twice, on three positions of an image."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x):
        x = F.adaptive_avg_pool2d(x, (2, 4)).flatten(2)
        return self.fc(self.inner(self.inner(x).tanh()).mean(1))


class Attends(nn.Module):
    """torch's own attention, with the tokens before the images."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 8, 8)
        self.attn = nn.MultiheadAttention(8, 2)
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x):
        x = self.patches(x).flatten(2).permute(2, 0, 1)
        return self.fc(self.attn(x, x, x)[0].square().mean(0))


def model(kind):
    torch.manual_seed(0)
    if kind == "attention/lora":
        return insert_adapter(build_backbone(Attends(), CLASSES), "lora").model
    if kind == "shared":
        return insert_adapter(build_backbone(Shared(), CLASSES), "full").model
    if kind == "small":
        return insert_adapter(build_backbone(Small(), CLASSES), "full").model
    if kind == "up and down":
        return insert_adapter(build_backbone(UpAndDown(), CLASSES), "full").model
    size = 32 if "vit" in kind else None
    name, adapter = kind.split("/")
    options = {"norm": "group", "train_norms": False} if adapter == "residual" else {}
    backbone = build_backbone(name, CLASSES, pretrained=False, image_size=size)
    return insert_adapter(backbone, CONFIGS.get(adapter, adapter), **options).model


FOLDED_ALONE = ["up and down", "test_vit/ia3", "test_vit/vera", "test_convnext/bias_norm"]
"""Whose layers Opacus does not know."""
CONFIGS = {"vera": peft.VeraConfig(r=4), "gated": DualLoraConfig(r=2, gate=True)}
KINDS = [
    "small",
    "shared",
    "test_vit/lora",
    "attention/lora",
    "test_vit/gated",
    "test_vit/bottleneck",
    "test_vit/prompt",
    "test_vit/bias_norm",
    "test_vit/full",
    "test_resnet/residual",
    "test_resnet/gated",
    "test_resnet/head",
]


def query(net, noise=0.0, seed=0, untrained=()):
    """Three clients with states of their own; two of them have images."""
    generator = torch.Generator().manual_seed(seed)
    single = get_state(net)
    states = [
        {key: value + 0.1 * torch.randn(value.shape, generator=generator) for key, value in single.items()}
        for _ in COUNTS
    ]
    keys = set(parameter_keys(net)) - set(untrained)
    stacked = {key: value.requires_grad_(key in keys) for key, value in stack(states).items()}
    side = 32
    x = torch.randn(len(COUNTS), max(COUNTS), 3, side, side, generator=generator)
    for client, count in enumerate(COUNTS):
        x[client, count:] = 0
    y = torch.randint(CLASSES, (len(COUNTS), max(COUNTS)), generator=generator)
    return NoisyQuery(
        stacked,
        x,
        y,
        COUNTS,
        Streams.derived(10, "dropout", clients=range(len(COUNTS))),
        [torch.Generator().manual_seed(20 + client) for client in range(len(COUNTS))],
        [noise] * len(COUNTS),
        [2.5, 1.5, 4.0],
    )


def image_gradients(net, asked, client):
    """One backward pass for each of a client's images."""
    net.eval()
    for index in range(asked.counts[client]):
        leaves = {
            key: value[client].detach().requires_grad_(value.requires_grad) for key, value in asked.states.items()
        }
        logits = functional_call(net, leaves, (asked.x[client, index : index + 1],))
        loss = F.cross_entropy(logits, asked.y[client, index : index + 1])
        expected = {key: value for key, value in leaves.items() if value.requires_grad}
        grads = torch.autograd.grad(loss, list(expected.values()), allow_unused=True)
        yield {key: torch.zeros_like(expected[key]) if g is None else g for key, g in zip(expected, grads, strict=True)}


def by_hand(net, asked, clipping, bound):
    """The sum of clipped gradients over the expected batch, image by image."""
    result = {key: torch.zeros_like(value) for key, value in asked.states.items() if value.requires_grad}
    for client in range(len(asked.counts)):
        for gradient in image_gradients(net, asked, client):
            norm = torch.cat([g.flatten() for g in gradient.values()]).norm()
            for key, g in gradient.items():
                if clipping == "flat":
                    factor = min(1.0, bound / float(norm + 1e-6))
                elif clipping == "automatic":
                    factor = bound / float(norm + 0.01)
                else:
                    factor = min(1.0, bound / len(gradient) ** 0.5 / float(g.norm() + 1e-6))
                result[key][client] += factor * g / asked.expected_batch[client]
    return result


def assert_same(got, expected, tolerance=1e-5):
    assert set(got) == set(expected)
    scale = max(float(value.abs().max()) for value in expected.values())
    assert scale > 0
    for key, value in expected.items():
        assert torch.allclose(got[key], value, rtol=tolerance, atol=tolerance * scale), key


@pytest.mark.parametrize("kind", [*KINDS, *FOLDED_ALONE])
@pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic"])
@pytest.mark.every(11)
def test_folded_is_the_loop_over_images(kind, clipping):
    net = model(kind)
    asked = query(net)
    norms = sorted(
        float(torch.cat([g.flatten() for g in gradient.values()]).norm())
        for client in range(len(COUNTS))
        for gradient in image_gradients(net, asked, client)
    )
    bound = norms[len(norms) // 2]  # some are clipped, some are not
    answer = NoisyGradients(Privacy(0.0, max_norm=bound, clipping=clipping), Engine(net), Classification())(asked)
    assert_same(answer, by_hand(net, asked, clipping, bound))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("noise", [0.0, 0.7])
@pytest.mark.every(9)
def test_folded_equals_opacus(kind, clipping, noise):
    net = model(kind)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    options = Privacy(0.0, max_norm=0.5, clipping=clipping)
    answers = [
        make(options, Engine(net), Classification())(query(net, noise)) for make in (NoisyGradients, OpacusGradients)
    ]
    assert_same(*answers)
    for key, value in net.state_dict().items():  # neither leaves a trace in the model
        assert torch.equal(value, before[key])
    assert all(not hasattr(p, "grad_sample") and p.grad is None for p in net.parameters())
    assert {key for key, p in net.named_parameters() if p.requires_grad} == set(parameter_keys(net))


@pytest.mark.parametrize("kind", ["small", "test_vit/lora", "test_resnet/residual"])
@pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic"])
def test_one_image_moves_the_sum_by_at_most_the_bound(kind, clipping):
    net = model(kind)
    bound = 0.05
    gradients = NoisyGradients(Privacy(0.0, max_norm=bound, clipping=clipping), Engine(net), Classification())
    asked = query(net)
    without = replace(query(net), counts=(2, 0, 2))  # the first client without its last image
    size = asked.expected_batch[0]
    sums = [{key: value[0] * size for key, value in gradients(each).items()} for each in (asked, without)]
    moved = torch.cat([(sums[0][key] - sums[1][key]).flatten() for key in sums[0]]).norm()
    assert 0.1 * bound < moved <= bound * (1 + 1e-5)


@pytest.mark.parametrize("engine", ["folded", "opacus"])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_an_image_that_breaks_is_left_out(engine, clipping):
    net = model("small")
    gradients = NoisyGradients(
        Privacy(0.0, max_norm=0.5, clipping=clipping, engine=engine), Engine(net), Classification()
    )
    asked = query(net)
    asked.x[0, 2] = torch.inf
    without = replace(query(net), counts=(2, 0, 2))
    answers = gradients(asked), gradients(without)
    for key, value in answers[0].items():
        assert value.isfinite().all()
        assert torch.allclose(value, answers[1][key], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("engine", ["folded", "opacus"])
@pytest.mark.parametrize("kind", ["small", "test_vit/full"])
def test_only_what_is_asked_about_counts(engine, kind):
    """As in a phase of FedAlt, which trains the head alone: its norm alone is clipped."""
    net = model(kind)
    head = [key for key in parameter_keys(net) if key.startswith(("fc.", "head."))]
    asked = query(net, untrained=set(parameter_keys(net)) - set(head))
    answer = NoisyGradients(Privacy(0.0, max_norm=0.3, engine=engine), Engine(net), Classification())(asked)
    assert set(answer) == set(head)
    assert_same(answer, by_hand(net, asked, "flat", 0.3))


@pytest.mark.parametrize("engine", ["folded", "opacus"])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.slow
def test_the_physical_batch_changes_nothing(engine, size):
    net = model("test_vit/bottleneck")
    answers = [
        NoisyGradients(
            Privacy(0.0, max_norm=0.3, physical_batch_size=limit, engine=engine), Engine(net), Classification()
        )(query(net, 0.5))
        for limit in (None, size)
    ]
    assert_same(*answers)


def test_dropout_is_each_clients_own_in_both():
    net = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(3 * 32 * 32, CLASSES))
    net = insert_adapter(build_backbone(net, CLASSES), "full").model
    options = Privacy(0.0, max_norm=0.3)
    assert_same(
        *(make(options, Engine(net), Classification())(query(net)) for make in (NoisyGradients, OpacusGradients))
    )
    dry = insert_adapter(build_backbone(nn.Sequential(nn.Flatten(), nn.Identity(), net[2]), CLASSES), "full").model
    with pytest.raises(AssertionError):  # and it was there
        assert_same(
            NoisyGradients(options, Engine(net), Classification())(query(net)), by_hand(dry, query(dry), "flat", 0.3)
        )


@pytest.mark.parametrize("engine", ["folded", "opacus"])
def test_in_half_precision_the_bound_still_holds(engine):
    net = model("test_vit/lora")
    bound = 0.05
    gradients = NoisyGradients(Privacy(0.0, max_norm=bound, engine=engine), Engine(net), Classification())
    with torch.autocast("cpu", torch.bfloat16):
        answer = gradients(query(net))
    for client, count in enumerate(COUNTS):
        total = torch.cat([value[client].flatten() for value in answer.values()]).norm()
        assert total * query(net).expected_batch[client] <= bound * count * (1 + 1e-5)
        assert all(value.dtype == torch.float32 for value in answer.values())


class Twice(nn.Module):
    """A linear layer on the channels' means and on the pixels, and one that is not used at all."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 12)
        self.unused = nn.Linear(3, 3)
        self.fc = nn.Linear(12, CLASSES)

    def forward(self, x):
        pixels = F.adaptive_avg_pool2d(x, 5).flatten(2).transpose(1, 2)
        return self.fc(self.inner(x.mean((2, 3))).tanh() + self.inner(pixels).tanh().mean(1))


@pytest.mark.parametrize("engine", ["folded", "opacus"])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_a_layer_used_in_two_ways_and_one_not_at_all(engine, clipping):
    torch.manual_seed(0)
    net = insert_adapter(build_backbone(Twice(), CLASSES), "full").model
    asked = query(net)
    answer = NoisyGradients(
        Privacy(0.0, max_norm=0.2, clipping=clipping, engine=engine), Engine(net), Classification()
    )(asked)
    assert_same(answer, by_hand(net, asked, clipping, 0.2))


def strided_layers(padding):
    layers = [nn.Conv2d(3, 6, 3, stride=2, padding=padding), nn.ReLU(), nn.Conv2d(6, 8, 3), nn.ReLU()]
    return [*layers, nn.Conv2d(8, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES)]


def layers_of_one_position(groups):
    layers = [nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 8, 3, padding=1, groups=groups), nn.ReLU()]
    return [*layers, nn.Flatten(), nn.Linear(8, CLASSES)]


@pytest.mark.parametrize("engine", ["folded", "opacus"])
@pytest.mark.parametrize(
    ("make_layers", "argument"),
    [(strided_layers, 0), (strided_layers, 1), (layers_of_one_position, 1), (layers_of_one_position, 8)],
)
def test_convolutions_whose_activations_are_channels_last(engine, make_layers, argument):
    torch.manual_seed(0)
    net = nn.Sequential(*make_layers(argument))
    net = insert_adapter(build_backbone(net, CLASSES), "full").model.to(memory_format=torch.channels_last)
    asked = query(net)
    answer = NoisyGradients(
        Privacy(0.0, max_norm=0.2, engine=engine), Engine(net, channels_last=True), Classification()
    )(asked)
    assert_same(answer, by_hand(net, asked, "flat", 0.2))


def test_factors_whose_terms_cancel():
    """Σ b = 0 at equal large inputs: the gradient is small, its terms are not."""
    generator = torch.Generator().manual_seed(0)
    a = 2400 + torch.randn(2, 4, 6, generator=generator)
    b = torch.randn(2, 4, 5, generator=generator)
    b -= b.mean(1, keepdim=True)
    product = torch.einsum("rno,rni->roi", b.double(), a.double())
    assert torch.allclose(
        OuterProductGrads(a, b, torch.Size([5, 6])).squared_norms().double(), product.square().sum((1, 2)), rtol=1e-5
    )


@pytest.mark.parametrize("engine", ["folded", "opacus"])
def test_opacus_registry_stays_as_it_is(engine):
    from opacus.grad_sample import GradSampleModule

    before = dict(GradSampleModule.GRAD_SAMPLERS)
    net = model("small")
    NoisyGradients(Privacy(0.0, engine=engine), Engine(net), Classification())(query(net))
    assert before == GradSampleModule.GRAD_SAMPLERS
