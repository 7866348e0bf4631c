# SPDX-License-Identifier: Apache-2.0
"""How much one image changes a clipped sum, in networks and states that an attacker would choose."""

from itertools import product

import pytest
import torch
from torch import nn

from perada.core.seeding import Streams
from perada.core.states import get_state, parameter_keys, stack
from perada.engine import Engine
from perada.models.adapted import insert_adapter
from perada.models.backbones import build_backbone
from perada.privacy import Privacy
from perada.privacy.clipping import clipping_factors
from perada.privacy.gradients import OuterProductGrads, PerSampleGrads, Query, SampleGradients
from perada.tasks import Classification

CLASSES = 4
POSITIONS = 16
WIDTH = 64
IMAGES = 6
BOUND = 0.7


class Cancelling(nn.Module):
    """Each image has the same pixels at all positions, which enter its output with alternating signs.

    So the gradient of every layer but the last is 0, as a sum of terms that are as large as the states make them.
    """

    def __init__(self, kind, depth):
        super().__init__()
        self.kind = kind
        if kind == "conv":
            first = nn.Conv2d(3, WIDTH, 4, stride=4)
            rest = [nn.Conv2d(WIDTH, WIDTH, 1) for _ in range(depth - 1)]
        else:
            first = nn.Linear(48, WIDTH)
            rest = [nn.Linear(WIDTH, WIDTH) for _ in range(depth - 1)]
            if kind == "reused":
                rest = rest[:1] * (depth - 1)
        self.layers = nn.ModuleList([first, *rest])
        self.fc = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("signs", torch.tensor([1.0, -1.0]).repeat(POSITIONS // 2), persistent=False)

    def forward(self, x):
        patch = x[:, :, :4, :4]
        x = patch.repeat(1, 1, 4, 4) if self.kind == "conv" else patch.flatten(1).unsqueeze(1).repeat(1, POSITIONS, 1)
        for layer in self.layers:
            x = layer(x)
        if self.kind == "conv":
            x = x.flatten(2).transpose(1, 2)
        return self.fc((x * self.signs.to(x.dtype).view(-1, 1)).sum(1))


def query(net, scale, seed, without=None, dtype=torch.float32):
    """One client with states of this scale, and all images but one.

    That one is made infinite, which leaves it out. If its row were not there at all, products of matrices of another
    size might round the other rows in another way.
    """
    source = torch.Generator().manual_seed(seed)
    state = {
        key: (scale * torch.randn(value.shape, generator=source)).to(dtype) for key, value in get_state(net).items()
    }
    stacked = {key: value.requires_grad_(key in set(parameter_keys(net))) for key, value in stack([state]).items()}
    x = torch.randn(1, IMAGES, 3, 32, 32, generator=source).to(dtype)
    y = torch.randint(CLASSES, (1, IMAGES), generator=source)
    if without is not None:
        x[0, without] = torch.inf
    streams = Streams.derived(0, "dropout", clients=range(1))
    return Query(stacked, x, y, (IMAGES,), streams)


@pytest.mark.parametrize(("depth", "scale"), [(1, 1e4), (1, 1e6), (3, 1e3), (6, 1.0), (6, 100.0), (6, 1e4)])
@pytest.mark.parametrize("kind", ["linear", "conv", "reused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("engine", "clipping"),
    list(product(("folded", "opacus"), ("flat", "per_layer", "automatic"))),
)
@pytest.mark.every(17)
def test_one_image_changes_the_sum_by_its_bound_at_most(engine, clipping, dtype, kind, depth, scale):
    torch.manual_seed(0)
    net = insert_adapter(build_backbone(Cancelling(kind, depth).to(dtype), CLASSES), "full").model
    gradients = SampleGradients(
        Privacy(0.0, max_norm=BOUND, clipping=clipping, engine=engine), Engine(net), Classification()
    )
    for seed in range(3):
        everyone = gradients.sums(query(net, scale, seed, dtype=dtype))
        for without in (0, IMAGES - 1):
            others = gradients.sums(query(net, scale, seed, without, dtype))
            changes = [(everyone[key].double() - others[key].double()).norm() for key in everyone]
            assert float(torch.stack(changes).norm()) <= BOUND * (1 + 1e-5)


def test_the_norm_of_factors_is_an_upper_bound_that_is_tight_where_little_cancels():
    """Against whole numbers, of which double precision has all digits."""
    source = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-(2**12), 2**12, (50, 6, size), generator=source).double() for size in (7, 5))
    b[:25, 3:], a[:25, 3:] = -b[:25, :3], a[:25, :3]
    a[10:25, 3] += 1
    squares = torch.einsum("rno,rni->roi", b, a).square().sum((1, 2))
    assert not squares[:10].any()
    assert squares[10:].all()
    result = OuterProductGrads(a.float(), b.float(), torch.Size([5, 7])).squared_norms()
    assert (result > squares).all()
    assert torch.allclose(result[25:], squares[25:], rtol=1e-10, atol=0)
    assert torch.allclose(result[10:25], squares[10:25], rtol=1e-4, atol=0)


@pytest.mark.parametrize("exponent", [-20, 0, 40])
def test_a_row_whose_terms_cancel_leaves_little_in_the_sum(exponent):
    source = torch.Generator().manual_seed(0)
    a, b = (torch.randn(200, 8, size, generator=source) * 2.0**exponent for size in (7, 5))
    b[:, 4:], a[:, 4:] = -b[:, :4], a[:, :4]
    rows = [OuterProductGrads(a[r : r + 1], b[r : r + 1], torch.Size([5, 7])) for r in range(200)]
    for row in rows:
        factors = clipping_factors(
            {"w": row.squared_norms().sqrt().view(1, 1)}, torch.ones(1, 1, dtype=torch.bool), BOUND
        )
        assert float(row.weighted_sums(factors["w"]).norm()) <= 3e-7 * BOUND
    every = OuterProductGrads(a, b, torch.Size([5, 7]))
    factors = clipping_factors(
        {"w": every.squared_norms().sqrt().view(1, -1)}, torch.ones(1, 200, dtype=torch.bool), BOUND
    )
    assert float(every.weighted_sums(factors["w"]).norm()) <= 200 * 3e-7 * BOUND


def test_parts_of_a_batch_add_up_in_double_precision():
    """Images after a very bright one: a sum in single precision would have no place left for them."""
    net = insert_adapter(build_backbone(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), 2), "full").model
    states = {key: torch.zeros(1, *value.shape).requires_grad_() for key, value in get_state(net).items()}
    x = torch.ones(1, 101, 1, 2, 2)
    x[0, 0] = 2.0**25
    options = Privacy(0.0, max_norm=2.0**30, physical_batch_size=1)
    streams = Streams.derived(0, "dropout", clients=range(1))
    asked = Query(states, x, torch.zeros(1, 101, dtype=torch.long), (101,), streams)
    [weight] = [v for v in SampleGradients(options, Engine(net), Classification()).sums(asked).values() if v.dim() == 3]
    assert torch.equal(weight[0, 1], torch.full((4,), 0.5 * (2.0**25 + 100)))


def test_the_norm_of_a_long_gradient_is_not_too_short():
    """torch's own norm, a running sum in single precision, loses 0.2 % of this one; an image's share would gain it."""
    rows = torch.full((2, 10**7), 2.0**-12.5)
    rows[0, :64] = 1.0
    result = PerSampleGrads(rows).squared_norms().double().sqrt()
    assert torch.allclose(result, rows.double().square().sum(1).sqrt(), rtol=2e-5, atol=0)
