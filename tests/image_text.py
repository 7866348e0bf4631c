# SPDX-License-Identifier: Apache-2.0
"""Small networks of images and texts with random weights, saved like those of the Hub."""

import json

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    PreTrainedTokenizerFast,
    SiglipConfig,
    SiglipImageProcessor,
    SiglipModel,
)

WORDS = "a an photo of the cat dog truck golden retriever x ray sketch drawing . [ ] i d".split()
SPECIAL = ["<pad>", "<unk>", "<start>", "<end>"]
SIDE = 32
MEAN = [0.48, 0.45, 0.4]
STD = [0.26, 0.25, 0.27]
LONGEST = 16
TOWER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
CLASSES = ["cat", "golden_retriever", "truck"]


def word_tokenizer():
    """A tokenizer with a token for each word."""
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="<start> $A <end>", special_tokens=[("<start>", 2), ("<end>", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", bos_token="<start>", eos_token="<end>"
    )


def spread_features(network):
    """Draw larger weights: with the usual small initial values, all texts have nearly equal features."""
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=0.5 if "embedding" in name else parameter.shape[1] ** -0.5)


def save_image_text(kind, folder, seed=0, tokenizer=True):
    """Save a small network, its tokenizer and its image processor, and return the network in evaluation mode."""
    size = {"height": SIDE, "width": SIDE}
    text = TOWER | {"vocab_size": len(SPECIAL) + len(WORDS), "max_position_embeddings": LONGEST}
    vision = TOWER | {"image_size": SIDE, "patch_size": 8}
    torch.manual_seed(seed)
    if kind == "clip":
        text |= {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
        network = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=24))
        processor = CLIPImageProcessor(size=size, crop_size=size, image_mean=MEAN, image_std=STD)
    else:
        network = SiglipModel(SiglipConfig(text_config=text, vision_config=vision))
        torch.nn.init.constant_(network.logit_scale, 2.0)
        torch.nn.init.constant_(network.logit_bias, -3.0)
        processor = SiglipImageProcessor(size=size, image_mean=MEAN, image_std=STD)
    spread_features(network)
    network.eval().save_pretrained(folder)
    processor.save_pretrained(folder)
    if tokenizer:
        word_tokenizer().save_pretrained(folder)
    return network


OPEN_CLIP_TEXT = {"context_length": LONGEST, "hf_tokenizer_name": "folder"}


def save_open_clip(kind, folder, seed=0):
    """Save a small network of OpenCLIP with its tokenizer and return it.

    Args:
        kind: ``plain`` for OpenCLIP's own towers, ``biomed`` for towers of timm and transformers as in BiomedCLIP.
        folder: Folder.
        seed: Seed of its weights.
    """
    open_clip = pytest.importorskip("open_clip", reason="needs the extra open-clip")
    words = len(SPECIAL) + len(WORDS)
    if kind == "plain":
        vision = {"image_size": SIDE, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8}
        text = {"vocab_size": words, "width": 32, "heads": 2, "layers": 2, "pool_type": "last", **OPEN_CLIP_TEXT}
    else:
        config = BertConfig(vocab_size=words, max_position_embeddings=LONGEST, pad_token_id=0, **TOWER)
        config.save_pretrained(folder / "text")
        vision = {"timm_model_name": "test_vit", "timm_pool": "", "timm_proj": "linear", "image_size": 160}
        text = {"hf_model_name": str(folder / "text"), "hf_proj_type": "mlp", **OPEN_CLIP_TEXT}
        text["hf_pooler_type"] = "cls_last_hidden_state_pooler"
    model = {"embed_dim": 24, "vision_cfg": vision, "text_cfg": text}
    processing = {"mean": MEAN, "std": STD}
    folder.mkdir(exist_ok=True)
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": model, "preprocess_cfg": processing}))
    word_tokenizer().save_pretrained(folder)
    torch.manual_seed(seed)
    network = open_clip.create_model(f"local-dir:{folder}", pretrained_text=False)
    spread_features(network)
    save_file(network.state_dict(), folder / "open_clip_model.safetensors")
    return network.eval()
