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


def test_a_foreign_state_is_refused_by_name():
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
    inside, outside = states.partition(state, ["b", "absent"])
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
