# SPDX-License-Identifier: Apache-2.0
"""States against a plain model's own ``state_dict``."""

import pytest
import timm
import torch
from torch import nn

from perada.core import states
from perada.models.adapted import insert_adapter
from perada.models.backbones import build_backbone


def network():
    """Trained: the second norm and the last layer's weight. Frozen: the rest."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, 3))
    model.requires_grad_(False)
    model[2].requires_grad_(True)
    model[4].weight.requires_grad_(True)
    return model


def test_a_state_is_the_trained_parameters_and_the_statistics_of_trained_norms():
    model = network()
    statistics = ["2.running_mean", "2.running_var", "2.num_batches_tracked"]
    assert states.parameter_keys(model) == ("2.weight", "2.bias", "4.weight")
    assert states.trained_keys(model) == ("2.weight", "2.bias", *statistics, "4.weight")


def test_buffers_that_are_not_saved_are_not_part_of_a_state():
    model = nn.Linear(2, 2)
    model.register_buffer("scratch", torch.zeros(3), persistent=False)
    model.register_buffer("kept", torch.zeros(3))
    assert states.trained_keys(model) == ("weight", "bias", "kept")


def test_state_is_a_copy_and_comes_back_into_the_model():
    model = network()
    saved = states.get_state(model)
    frozen = model[0].weight.clone()
    expected = {key: value.clone() for key, value in saved.items()}
    with torch.no_grad():
        for parameter in model[2].parameters():
            parameter.add_(1)
    assert not torch.equal(model[2].weight, saved["2.weight"])
    states.set_state(model, saved)
    assert all(torch.equal(model.state_dict()[key], expected[key]) for key in expected)
    assert torch.equal(model[0].weight, frozen)


def test_a_foreign_state_is_rejected_by_name():
    with pytest.raises(KeyError, match=r"no tensor named 'adapter\.weight'"):
        states.set_state(network(), {"adapter.weight": torch.zeros(1)})


def test_frozen_norms_stay_in_evaluation_mode_and_trained_ones_do_not():
    model = states.train_mode(network())
    assert [module.training for module in model] == [True, False, True, True, True]
    before = model[1].running_mean.clone()
    model[:3](torch.randn(4, 1, 5, 5) + 3)
    assert torch.equal(model[1].running_mean, before)
    assert model[2].num_batches_tracked == 1


def test_stacks_come_apart_as_they_were_put_together():
    parts = [{"w": torch.randn(2, 3), "n": torch.tensor(i)} for i in range(4)]
    stacked = states.stack(parts)
    assert stacked["w"].shape == (4, 2, 3)
    for part, again in zip(parts, states.unstack(stacked), strict=True):
        assert torch.equal(part["w"], again["w"])
        assert part["n"] == again["n"]
    assert torch.equal(states.prefix(stacked, 2)["w"], stacked["w"][:2])
    assert states.prefix(stacked, 2)["w"].data_ptr() == stacked["w"].data_ptr()


def test_gather_copies_only_the_rows_named():
    store = {"w": torch.arange(5.0)}
    rows = states.gather(store, [4, 1])
    assert rows["w"].tolist() == [4, 1]
    rows["w"] += 10
    assert store["w"].tolist() == [0, 1, 2, 3, 4]


def test_expand_holds_one_copy():
    state = {"w": torch.randn(3)}
    expanded = states.expand(state, 1000)
    assert expanded["w"].shape == (1000, 3)
    assert expanded["w"].untyped_storage().nbytes() == 12


def test_partition_and_sizes():
    state = {"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.int64)}
    inside = states.select(state, ["b", "absent"])
    outside = states.without(state, ["b", "absent"])
    assert (list(inside), list(outside)) == (["b"], ["a"])
    assert states.numel(state) == 10
    assert states.megabytes(state) == pytest.approx((6 * 4 + 4 * 8) / 1e6)


def test_trained_norms_that_peft_wraps_are_in_training_mode():
    """The wrappers of ``modules_to_save`` answer for the norm inside them, but own no parameter themselves."""
    model = timm.create_model("test_resnet", num_classes=3)
    model = insert_adapter(build_backbone(model, 3), "residual").model
    norms = {name: m for name, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)}
    before = {name: norm.running_mean.clone() for name, norm in norms.items()}
    states.train_mode(model)(torch.randn(4, 3, 32, 32))
    moved = {name for name, norm in norms.items() if not torch.equal(norm.running_mean, before[name])}
    trained = {name for name, norm in norms.items() if norm.weight.requires_grad}
    assert moved == trained
    assert any("modules_to_save" in name for name in trained)
    assert any("residual" in name for name in trained)
    assert trained != set(norms)


def test_a_clone_shares_no_memory_and_no_graph():
    weight = torch.ones(2, requires_grad=True)
    state = {"trained": weight * 2, "kept": torch.ones(2)}
    copied = states.clone(state)
    with torch.no_grad():
        for value in state.values():
            value.zero_()
    assert {key: value.tolist() for key, value in copied.items()} == {"trained": [2, 2], "kept": [1, 1]}
    assert not copied["trained"].requires_grad


class NormWithActivation(nn.BatchNorm1d):
    """As timm has them: the activation is a part of the norm."""

    def __init__(self):
        super().__init__(2)
        self.act = nn.PReLU()

    def forward(self, x):
        return self.act(super().forward(x))


def test_a_frozen_norm_stays_in_evaluation_mode_though_a_layer_in_it_is_trained():
    model = nn.Sequential(NormWithActivation()).requires_grad_(False)
    model[0].act.requires_grad_(True)
    states.train_mode(model)
    model(torch.randn(8, 2) + 5)
    assert model[0].running_mean.tolist() == [0, 0]


def test_strides_of_dimensions_of_size_one_may_be_any():
    laid_out = states.laid_out({"w": torch.arange(3.0).view(1, 3)}, {"w": [7, 1]})["w"]
    assert laid_out.stride() == (7, 1)
    assert laid_out.tolist() == [[0, 1, 2]]
    with pytest.raises(ValueError, match=r"strides \[7, 1\] of 'w'"):
        states.laid_out({"w": torch.zeros(2, 3)}, {"w": [7, 1]})


def test_a_layer_of_a_lower_rank_is_not_cut():
    factors = [
        states.Factors("low.lora_A.w", "low.lora_B.w", 1.0),
        states.Factors("high.lora_A.w", "high.lora_B.w", 1.0),
    ]
    ranks = {"low": 2, "high": 5}
    state = {}
    for layer, rank in ranks.items():
        state |= {f"{layer}.lora_A.w": torch.randn(rank, 4), f"{layer}.lora_B.w": torch.randn(6, rank)}
    cut = states.narrowed(state, factors, 3)
    assert torch.equal(cut["low.lora_A.w"], state["low.lora_A.w"])
    assert torch.equal(cut["low.lora_B.w"], state["low.lora_B.w"])
    assert torch.equal(cut["high.lora_A.w"], state["high.lora_A.w"][:3])
    assert torch.equal(cut["high.lora_B.w"], state["high.lora_B.w"][:, :3])
