# SPDX-License-Identifier: Apache-2.0
"""Two LoRA branches beside a layer: their formula, their names, and what PEFT saves."""

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from perada.adapters import DualLoraConfig
from perada.models.adapted import find_tensor_names, insert_adapter
from perada.models.backbones import build_backbone
from perada.models.unwrapping import unwrapped

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
BRANCHES = {
    "linear": (lambda: nn.Linear(5, 4), (7, 3, 5), F.linear),
    "convolution": (
        lambda: nn.Conv2d(5, 4, 3, stride=2, padding=1, dilation=2, padding_mode="reflect"),
        (2, 5, 9, 9),
        lambda x, w: F.conv2d(F.pad(x, [1] * 4, "reflect"), w, stride=2, dilation=2),
    ),
    "pointwise": (lambda: nn.Conv2d(5, 4, 1), (2, 5, 3, 3), F.conv2d),
}


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("kind", BRANCHES)
def test_output_is_that_of_the_formula(kind, gate):
    make, shape, apply = BRANCHES[kind]
    x = torch.randn(shape, dtype=torch.float64)
    plain = make().double()
    network = nn.Sequential(plain, nn.Flatten())
    network.append(nn.Linear(network(x).shape[1], 2).double())
    built = build_backbone(network, 2)
    model = insert_adapter(built, "dual_lora", r=3, lora_alpha=6, gate=gate, target_modules=["0"]).model
    state = model.state_dict()
    for key, value in state.items():
        if "perada_" in key:
            value.copy_(torch.randn(value.shape, dtype=torch.float64))
    adapter_state = {key.split(".")[-2]: value for key, value in state.items() if "perada_" in key}
    # The product of the factors as one dense kernel.
    shared, private = (
        (adapter_state[f"{branch}_B"].flatten(1) @ adapter_state[f"{branch}_A"].flatten(1)).view_as(plain.weight)
        for branch in ("shared", "private")
    )
    dims = 1 if x.dim() == 4 else -1
    weights = apply(x, adapter_state["gate"]).softmax(dims).split(1, dims) if gate else (1.0, 1.0)
    expected = plain(x) + 6 / 3 * (weights[0] * apply(x, shared) + weights[1] * apply(x, private))
    torch.testing.assert_close(model[0](x), expected, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(expected, plain(x))
    torch.testing.assert_close(unwrapped(model)(x), model(x), rtol=0, atol=0)


@pytest.mark.parametrize(("backbone", "gate"), [("vit", True), ("resnet", False)])
def test_targets_are_those_of_lora_and_the_slot_tells_the_branches_apart(make_backbone, backbone, gate):
    lora = insert_adapter(make_backbone(backbone), "lora", r=2)
    dual = insert_adapter(make_backbone(backbone), "dual_lora", r=2, lora_alpha=6, gate=gate)
    assert dual.config.target_modules == lora.config.target_modules
    one, two = (find_tensor_names(each.model, each.backbone.head) for each in (lora, dual))
    assert len(two.factors) == 2 * len(one.factors)
    assert {factors.scale for factors in two.factors} == {3.0}
    factors = {key for pair in two.factors for key in (pair.down, pair.up)}
    gates = {key for key in two.keys if ".gate." in key}
    assert two.shared | two.private == factors | gates == two.adapter
    assert not two.shared & two.private
    assert len(two.shared) == len(two.private - gates)
    assert gates <= two.private and len(gates) == gate * len(one.factors)
    assert one.shared == one.private == frozenset()


def test_factors_give_what_is_added(make_backbone):
    """Without a gate: s·B·A of both branches, added to the weights of the plain network."""
    model = insert_adapter(make_backbone("vit"), "dual_lora", r=2, lora_alpha=6).model.double()
    plain, state = make_backbone("vit").model.double(), model.state_dict()
    tensor_names, x = find_tensor_names(model, "head"), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    for down, up, scale, _ in tensor_names.factors:
        state[up].normal_(std=0.1)
        path = down.split(".perada_")[0]
        plain.get_submodule(path).weight.data += scale * state[up] @ state[down]
    trained = model.head.modules_to_save["default"]
    plain.head.load_state_dict(trained.state_dict())
    torch.testing.assert_close(model.eval()(x), plain.eval()(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"r": 0}, r"r .*got 0"),
        ({"lora_alpha": 0}, r"lora_alpha .*got 0"),
        ({"lora_alpha": float("nan")}, r"lora_alpha .*got nan"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        DualLoraConfig(**options)


def test_what_it_does_not_fit_is_rejected():
    grouped = nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"dual_lora.*'0', a Conv2d"):
        insert_adapter(build_backbone(grouped, 2), "dual_lora", target_modules=["0"])
    with pytest.raises(ValueError, match=r"dual_lora.*Sequential"):
        peft.get_peft_model(grouped, DualLoraConfig())
