# SPDX-License-Identifier: Apache-2.0
"""Networks of segmentation_models_pytorch by name, and segmentation networks of the caller's own."""

import pytest
import torch
from torch import nn
from torchvision.models.segmentation import fcn_resnet50

import perada
from perada.core.checks import OptionError
from perada.models.adapted import find_tensor_names, insert_adapter
from perada.models.backbones import build_backbone
from tests.masks import SIZE, UNet, hospitals

IMAGES = torch.rand(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))


def build(name="smp:unet-resnet18", classes=5):
    pytest.importorskip("segmentation_models_pytorch")
    return build_backbone(name, classes, pretrained=False, per_pixel=True)


@pytest.mark.parametrize("name", ["smp:unet-resnet18", "smp:fpn-resnet18", "smp:deeplabv3plus-mobilenet_v2"])
def test_networks_by_name(name):
    built = build(name)
    assert built.model(IMAGES).shape == (2, 5, SIZE, SIZE)
    assert built.model.get_submodule(built.head).out_channels == 5
    assert not any(parameter.requires_grad for parameter in built.model.parameters())


@pytest.mark.parametrize("adapter", ["residual", "lora", "head"])
def test_adapters_are_in_the_encoder_and_the_decoder_is_part_of_the_head(adapter):
    built = build()
    adapted = insert_adapter(built, adapter)
    names = find_tensor_names(adapted.model, *built.head_modules)
    assert all(name.startswith("encoder.") for name in names.adapter)
    assert bool(names.adapter) == (adapter != "head")
    head = {name for name in names.parameters if name in names.head}
    assert {name.split(".")[0] for name in head} == {"decoder", "segmentation_head"}
    outside = {name for name in names.keys if not name.startswith("encoder.")}
    assert outside == names.head
    decoder = build().model.decoder
    assert sum("decoder." in name for name in head) == len(list(decoder.parameters()))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smp:unett-resnet18", "unknown architecture 'unett'"),
        ("smp:unet-resnet19", "unknown encoder 'resnet19'"),
    ],
)
def test_unknown_names_are_rejected(name, message):
    with pytest.raises(OptionError, match=message):
        build(name)


def test_missing_weights_are_named(monkeypatch):
    smp = pytest.importorskip("segmentation_models_pytorch")

    def fail(*arguments, **options):
        raise OSError("no connection")

    monkeypatch.setattr(smp, "create_model", fail)
    with pytest.raises(FileNotFoundError, match="'smp:unet-resnet18': OSError"):
        build_backbone("smp:unet-resnet18", 2, per_pixel=True)


def test_the_head_of_a_module_is_its_last_convolution_with_a_class_per_output():
    built = build_backbone(UNet(classes=4), 4, per_pixel=True)
    assert built.head == "out"
    adapted = insert_adapter(built, "lora")
    names = find_tensor_names(adapted.model, *built.head_modules)
    assert names.head_module == "out.modules_to_save.default"
    assert not any(name.startswith("out.") for name in names.adapter)
    with pytest.raises(OptionError, match=r"num_classes=5, .*'out'.*'UNet'.*4 outputs"):
        build_backbone(UNet(classes=4), 5, per_pixel=True)


def test_torchvisions_outputs_are_supported():
    network = fcn_resnet50(weights=None, weights_backbone=None, num_classes=3)
    built = build_backbone(network, 3, per_pixel=True)
    assert built.head == "classifier.4"
    assert torch.equal(built.model(IMAGES), network.eval()(IMAGES)["out"])


class Half(UNet):
    """Logits of half the resolution."""

    def forward(self, x):
        return super().forward(x)[:, :, ::2, ::2]


class Pooled(UNet):
    """Logits of the image."""

    def forward(self, x):
        return super().forward(x).mean((2, 3))


@pytest.mark.parametrize(("network", "shape"), [(Half, r"\(1, 3, 16, 16\)"), (Pooled, r"\(1, 3\)")])
def test_outputs_of_another_shape_are_rejected(network, shape):
    with pytest.raises(ValueError, match=rf"{shape} .*\(1, 3, 32, 32\)"):
        perada.finetune(network(), hospitals(), pretrained=False, adapter="head", rounds=1)


def test_a_network_without_convolution_has_no_head():
    with pytest.raises(OptionError, match="no convolution"):
        build_backbone(nn.Sequential(nn.Linear(3, 3)), 3, per_pixel=True)


def test_a_named_network_is_trained_saved_and_loaded(tmp_path):
    pytest.importorskip("segmentation_models_pytorch")
    options = {"rounds": 1, "local_steps": 1, "seed": 1, "distillation": {"steps": 1}}
    run = perada.finetune("smp:unet-resnet18", hospitals(2), pretrained=False, **options)
    loaded = perada.Run.load(run.save(tmp_path / "run"))
    assert torch.equal(loaded.personal(1)(IMAGES), run.personal(1)(IMAGES))
    assert not torch.equal(run.personal(0)(IMAGES), run.personal(1)(IMAGES))
