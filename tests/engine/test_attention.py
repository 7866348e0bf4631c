# SPDX-License-Identifier: Apache-2.0
"""Attention in bfloat16 on a processor, against its formula in double precision and against torch's."""

import copy

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from perada.core.states import expand, get_state
from perada.engine import Engine, attention
from perada.engine.attention import FasterAttention

BF16_ERROR = 2**-8
"""Relative error of a number that is rounded to bfloat16."""


@pytest.fixture(params=[True, False], ids=["amx", "no_amx"])
def amx(request, monkeypatch):
    """A processor with AMX, or one without; both ways run on any."""
    monkeypatch.setattr(attention, "has_bfloat16_products", lambda: request.param)
    return request.param


def inputs(*shapes, dtype=torch.bfloat16):
    random = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=random).to(dtype).requires_grad_() for shape in shapes]


def attended(query, key, value, faster=True, **options):
    """The output, and the gradients of a sum that weighs its numbers differently."""
    with torch.autocast("cpu", torch.bfloat16):
        if faster:
            with FasterAttention():
                out = F.scaled_dot_product_attention(query, key, value, **options)
        else:
            out = F.scaled_dot_product_attention(query, key, value, **options)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return out, *torch.autograd.grad(out, (query, key, value), weights)


def relative_error(value, expected):
    return ((value.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("shapes", "scale"),
    [
        (((2, 3, 17, 8),) * 3, None),
        (((2, 3, 17, 8), (2, 3, 5, 8), (2, 3, 5, 6)), None),  # to other tokens, of another size
        (((3, 9, 16),) * 3, 0.5),
    ],
)
def test_outputs_and_gradients_are_those_of_the_formula(shapes, scale, dtype, amx):
    query, key, value = inputs(*shapes, dtype=dtype)
    results = attended(query, key, value, scale=scale)
    assert all(result.dtype == dtype for result in results[1:])
    assert results[0].dtype == torch.bfloat16

    # Of the numbers that autocast rounds.
    exact = [tensor.detach().bfloat16().double().requires_grad_() for tensor in (query, key, value)]
    weights = torch.softmax(exact[0] @ exact[1].mT * (scale or shapes[0][-1] ** -0.5), -1)
    out = weights @ exact[2]
    gradient = torch.linspace(-1, 1, out.numel(), dtype=torch.bfloat16).view(out.shape).double()
    expected = (out, *torch.autograd.grad(out, exact, gradient))
    for result, reference in zip(results, expected, strict=True):
        assert relative_error(result, reference.detach()) < 4 * BF16_ERROR


def test_the_scores_of_all_pairs_of_tokens_are_not_kept(amx):
    query, key, value = inputs(*((2, 3, 50, 4),) * 3)
    sizes = []

    def keep(tensor):
        sizes.append(tensor.numel())
        return tensor

    # Not around the backward pass, which keeps what it needs for itself only.
    with torch.autocast("cpu", torch.bfloat16), FasterAttention(), saved_tensors_hooks(keep, lambda tensor: tensor):
        F.scaled_dot_product_attention(query, key, value)
    assert sizes
    assert max(sizes) <= query.numel()


@pytest.mark.parametrize(
    "options",
    [{"attn_mask": torch.ones(6, 6).tril().bool()}, {"is_causal": True}, {"dropout_p": 0.5}],
    ids=["mask", "causal", "dropout"],
)
def test_masks_and_dropout_are_torchs(options, amx):
    tensors = inputs(*((2, 2, 6, 8),) * 3)
    torch.manual_seed(0)
    ours = attended(*tensors, **options)
    torch.manual_seed(0)
    theirs = attended(*tensors, faster=False, **options)
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("precision", ["no gradient", "single", "double"])
def test_what_needs_no_gradient_or_is_not_half_is_torchs(precision, amx):
    dtype = {"single": torch.float32, "double": torch.float64}.get(precision, torch.bfloat16)
    tensors = inputs(*((2, 2, 6, 8),) * 3, dtype=dtype)
    if precision == "no gradient":
        tensors = [tensor.detach() for tensor in tensors]
    with torch.autocast("cpu", torch.bfloat16, enabled=precision != "single"):
        expected = F.scaled_dot_product_attention(*tensors)
        with FasterAttention():
            out = F.scaled_dot_product_attention(*tensors)
    assert torch.equal(out, expected)


def test_scores_that_would_not_fit_memory_are_not_computed_at_once(monkeypatch):
    monkeypatch.setattr(attention, "has_bfloat16_products", lambda: True)
    tensors = inputs(*((2, 2, 6, 8),) * 3)
    monkeypatch.setattr(attention, "MOST_WEIGHTS", 2 * 2 * 6 * 6)
    assert type(attended(*tensors)[0].grad_fn).__name__ == "_ProductAttentionBackward"
    monkeypatch.setattr(attention, "MOST_WEIGHTS", 2 * 2 * 6 * 6 - 1)
    assert type(attended(*tensors)[0].grad_fn).__name__ != "_ProductAttentionBackward"


def gradients(engine, states, x, half):
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        logits = engine.logits(states, x, training=True)
    trained = [value for value in states.values() if value.requires_grad]
    return torch.autograd.grad(logits.square().sum(), trained)


def test_clients_of_a_vit_train_with_it(amx):
    """Gradients of its linear layers have about the error that they have with torch's attention in bfloat16."""
    torch.manual_seed(0)
    model = timm.create_model("test_vit", img_size=32, num_classes=3).requires_grad_(False)
    trained = set()
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.requires_grad_(True)
            trained.add(f"{path}.weight")
    states = {}
    for name, value in expand(get_state(model), 2).items():
        states[name] = value.clone().requires_grad_(name in trained)
    x = torch.randn(2, 4, 3, 32, 32)
    exact = gradients(Engine(model), states, x, half=False)
    engine = Engine(model)
    faster = gradients(engine, states, x, half=True)
    assert engine._calls_attention
    plain_engine = Engine(model)
    plain_engine._calls_attention = False
    plain = gradients(plain_engine, states, x, half=True)
    assert not all(map(torch.equal, faster, plain))

    def total_error(values):
        squared = [(value - expected).square().sum() for value, expected in zip(values, exact, strict=True)]
        return torch.stack(squared).sum().sqrt().item()

    assert 0 < total_error(faster) < 1.25 * total_error(plain)


def test_networks_without_attention_are_asked_once():
    engine = Engine(nn.Sequential(nn.Flatten(), nn.Linear(12, 2)))
    states = {name: value.clone().requires_grad_() for name, value in expand(get_state(engine.model), 2).items()}
    x = torch.randn(2, 4, 3, 2, 2)
    gradients(engine, states, x, half=False)
    assert engine._calls_attention  # not known yet
    gradients(engine, states, x, half=True)
    assert not engine._calls_attention
    assert not copy.copy(engine)._calls_attention
