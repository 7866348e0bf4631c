# SPDX-License-Identifier: Apache-2.0
"""Traits that a configuration written outside perada states: which layers it adapts, and where its head is listed."""

from dataclasses import dataclass
from typing import ClassVar

import peft
import pytest
from peft import LoraConfig
from torch import nn

from perada.adapters import AdapterTraits, SelectiveConfig
from perada.core.checks import OptionError
from perada.models.adapted import insert_adapter
from perada.models.backbones import build_backbone
from perada.models.targets import traits_of


@dataclass
class NormLora(LoraConfig):
    """LoRA that is not supported, and says so."""

    traits: ClassVar[AdapterTraits] = AdapterTraits(unsupported="it is a test; choose adapter='lora'")


@dataclass
class LinearLora(LoraConfig):
    """LoRA of linear layers only, also where convolutions have more parameters."""

    traits: ClassVar[AdapterTraits] = AdapterTraits(channels_last=False)


@dataclass
class OwnSelection(SelectiveConfig):
    """A selection under another class, whose traits are inherited."""


def network():
    layers = [nn.Conv2d(3, 8, 3), nn.Conv2d(8, 64, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return build_backbone(nn.Sequential(*layers, nn.Linear(64, 6), nn.Linear(6, 4)), num_classes=4)


def adapted_layers(model):
    return [name for name, module in model.named_modules() if hasattr(module, "lora_A")]


def test_the_layers_that_a_method_adapts_follow_from_its_traits():
    assert adapted_layers(insert_adapter(network(), LoraConfig(r=2)).model) == ["1"]
    adapted = insert_adapter(network(), LinearLora(r=2))
    assert adapted_layers(adapted.model) == ["4"]
    assert not adapted.channels_last and insert_adapter(network(), LoraConfig(r=2)).channels_last


def test_an_unsupported_method_is_rejected_with_its_reason():
    with pytest.raises(ValueError, match=r"NormLora.*adapter='lora'"):
        insert_adapter(network(), NormLora(r=2))


def test_a_method_that_lists_the_head_selects_what_is_trained():
    config = OwnSelection(select=["norm"], modules=["5"])
    trained = [
        name for name, value in insert_adapter(network(), config).model.named_parameters() if value.requires_grad
    ]
    assert trained and all(name.startswith("5.") for name in trained)
    with pytest.raises(OptionError, match="weights of the backbone"):
        insert_adapter(network(), config, train_backbone=True)


def test_peft_types_with_traits_are_those_of_peft():
    """A method that PEFT renamed would silently get the defaults."""
    from perada.models.targets import PEFT_TRAITS

    assert set(PEFT_TRAITS) <= {member.value for member in peft.PeftType}
    assert traits_of(peft.VeraConfig()) == AdapterTraits()
    assert traits_of(peft.LNTuningConfig()).adapts_norms
