# SPDX-License-Identifier: Apache-2.0
"""Small networks of images and texts with random weights, saved like those of the Hub."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import (
    BertConfig,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    MetaClip2Config,
    MetaClip2Model,
    PreTrainedTokenizerFast,
    SiglipConfig,
    SiglipImageProcessor,
    SiglipModel,
)

WORDS = "a an photo of the cat dog truck golden retriever x ray sketch drawing . [ ] i d".split()
SPECIAL = ["<pad>", "<unk>", "<start>", "<end>"]
VOCABULARY = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
CLASSES = ["cat", "golden_retriever", "truck"]
"""Names of classes, whose words the tokenizer knows."""
SIDE = 32
"""Height and width of the images."""
MEAN = [0.48, 0.45, 0.4]
STD = [0.26, 0.25, 0.27]
LONGEST = 16
"""Largest number of tokens of a text."""
TOWER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each word."""
    tokenizer = Tokenizer(WordLevel(VOCABULARY, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="<start> $A <end>",
        special_tokens=[(word, VOCABULARY[word]) for word in ("<start>", "<end>")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", bos_token="<start>", eos_token="<end>"
    )


def spread_features(network: nn.Module) -> None:
    """Draw larger weights in place: with the usual small initial values, all texts have nearly equal features."""
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.5 if "embedding" in name else parameter.shape[1] ** -0.5)


def save_image_text(kind: str, folder: Path, *, seed: int = 0, side: int = SIDE, tokenizer: bool = True) -> nn.Module:
    """Save a network of transformers with its image processor and tokenizer.

    Args:
        kind: ``clip``, ``metaclip_2`` or ``siglip``, which is also that of SigLIP 2 for images of one size.
        folder: Folder.
        seed: Seed of its weights.
        side: Height and width of its images.
        tokenizer: Whether to save the tokenizer.

    Returns:
        The network in evaluation mode.
    """
    size = {"height": side, "width": side}
    text: dict[str, Any] = TOWER | {"vocab_size": len(VOCABULARY), "max_position_embeddings": LONGEST}
    vision = TOWER | {"image_size": side, "patch_size": 8}
    network: Any
    processor: Any
    torch.manual_seed(seed)
    if kind in ("clip", "metaclip_2"):
        tokens = {"bos_token_id": "<start>", "eos_token_id": "<end>", "pad_token_id": "<pad>"}
        text |= {name: VOCABULARY[word] for name, word in tokens.items()}
        config_class: Any = CLIPConfig if kind == "clip" else MetaClip2Config
        network_class: Any = CLIPModel if kind == "clip" else MetaClip2Model
        network = network_class(config_class(text_config=text, vision_config=vision, projection_dim=24))
        processor = CLIPImageProcessor(size=size, crop_size=size, image_mean=MEAN, image_std=STD)
    else:
        network = SiglipModel(SiglipConfig(text_config=text, vision_config=vision))
        nn.init.constant_(network.logit_scale, 2.0)
        nn.init.constant_(network.logit_bias, -3.0)
        processor = SiglipImageProcessor(size=size, image_mean=MEAN, image_std=STD)
    spread_features(network)
    network.eval().save_pretrained(folder)
    processor.save_pretrained(folder)
    if tokenizer:
        word_tokenizer().save_pretrained(folder)
    plain_network: nn.Module = network
    return plain_network


def save_open_clip(kind: str, folder: Path, *, seed: int = 0, side: int = SIDE) -> nn.Module:
    """Save a network of OpenCLIP with its tokenizer.

    Args:
        kind: ``plain`` for OpenCLIP's own towers, ``biomed`` for towers of timm and transformers as in BiomedCLIP.
        folder: Folder.
        seed: Seed of its weights.
        side: Height and width of its images.

    Returns:
        The network in evaluation mode.
    """
    import open_clip

    # In a folder, the tokenizer is read from there, whatever its name.
    text: dict[str, Any] = {"context_length": LONGEST, "hf_tokenizer_name": "folder"}
    if kind == "plain":
        vision: dict[str, Any] = {"image_size": side, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8}
        text |= {"vocab_size": len(VOCABULARY), "width": 32, "heads": 2, "layers": 2, "pool_type": "last"}
    else:
        config = BertConfig(vocab_size=len(VOCABULARY), max_position_embeddings=LONGEST, pad_token_id=0, **TOWER)
        config.save_pretrained(folder / "text")
        vision = {"timm_model_name": "test_vit", "timm_pool": "", "timm_proj": "linear", "image_size": side}
        text |= {"hf_model_name": str(folder / "text"), "hf_proj_type": "mlp"}
        text["hf_pooler_type"] = "cls_last_hidden_state_pooler"
    model = {"embed_dim": 24, "vision_cfg": vision, "text_cfg": text}
    processing = {"mean": MEAN, "std": STD}
    folder.mkdir(exist_ok=True)
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": model, "preprocess_cfg": processing}))
    word_tokenizer().save_pretrained(folder)
    torch.manual_seed(seed)
    network: nn.Module = open_clip.create_model(f"local-dir:{folder}", pretrained_text=False)
    spread_features(network)
    save_file(network.state_dict(), folder / "open_clip_model.safetensors")
    return network.eval()
