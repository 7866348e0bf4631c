# SPDX-License-Identifier: Apache-2.0
"""Families of timm and transformers with LoRA in the layers that perada chooses: all of it is trained and used."""

import pytest
import torch

from perada.engine.fold_check import check_fold
from perada.models.adapted import insert_adapter
from perada.models.backbones import build_backbone
from perada.models.usage import check_usage

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TIMM = (
    "beit_base_patch16_224 mobileone_s0 cait_xxs24_224 coat_tiny convit_tiny convmixer_768_32 convnext_atto "
    "deit_tiny_patch16_224 densenet121 dla46x_c dpn48b edgenext_xx_small efficientnet_b0 efficientvit_b0 "
    "efficientvit_m0 eva02_tiny_patch14_224 fasternet_t0 fastvit_t8 focalnet_tiny_srf gcvit_xxtiny ghostnet_050 "
    "hardcorenas_b hgnetv2_b0 hiera_tiny_224 hrnet_w18_small iformer_t inception_next_atto rexnet_100 selecsls42 "
    "seresnet18 shvit_s1 starnet_s1 swin_tiny_patch4_window7_224 swinv2_tiny_window8_256 tiny_vit_5m_224 "
    "twins_svt_small visformer_tiny vit_tiny_patch16_224 vit_tiny_r_s16_p8_224 vit_relpos_small_patch16_224 "
    "vitamin_small_224 ese_vovnet19b_slim xception41 xcit_nano_12_p16_224 test_maxvit test_coatnet regnetx_002 "
    "pit_ti_224 pvt_v2_b0 mobilevit_xxs mobilevitv2_050 resnest14d nextvit_small"
).split()
TRANSFORMERS = (
    "beit clip convnext convnextv2 data2vec-vision deit dinov2 dinov2_with_registers focalnet hgnet_v2 ijepa levit "
    "mobilenet_v1 mobilenet_v2 poolformer pvt pvt_v2 regnet resnet segformer swin swinv2 vit"
).split()
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "image_size": 64,
    "patch_size": 16,
}
STAGES = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1]}
WINDOWS = {"patch_size": 4, "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 2], "window_size": 4, "image_size": 64}
# Configurations whose options have other names, depend on one another, or must name the class of the network.
OPTIONS = {
    "convnext": STAGES,
    "convnextv2": STAGES,
    "deit": SMALL | {"architectures": ["DeiTForImageClassification"]},
    "levit": {"image_size": 64, "architectures": ["LevitForImageClassification"]},
    "swin": WINDOWS,
    "swinv2": WINDOWS,
}


def small_transformer(kind):
    """A network of transformers with random weights, as small as its configuration can make it."""
    from transformers import AutoConfig, AutoModelForImageClassification

    config = AutoConfig.for_model(kind, **OPTIONS.get(kind, {}))
    parts = () if kind in OPTIONS else (config, getattr(config, "vision_config", None))
    for part in parts:
        for option, value in SMALL.items():
            if isinstance(getattr(part, option, None), int):
                setattr(part, option, value)
    config.num_labels = 3
    return AutoModelForImageClassification.from_config(config)


def check(backbone):
    adapted = insert_adapter(backbone, "lora")
    images = torch.randn(2, 2, 3, 64, 64)
    usage = check_usage(adapted, images.flatten(0, 1))
    assert (usage.problem, usage.unused, usage.merging) == (None, (), None)
    assert check_fold(adapted.model, images) is None


@pytest.mark.parametrize("name", TIMM)
def test_timm(name):
    check(build_backbone(name, 3, pretrained=False, image_size=64))


@pytest.mark.parametrize("kind", TRANSFORMERS)
def test_transformers(kind):
    check(build_backbone(small_transformer(kind), 3))
