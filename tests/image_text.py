# SPDX-License-Identifier: Apache-2.0
"""Small networks of images and texts with random weights, saved like those of the Hub."""

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
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
    # With the small initial values of transformers, all texts have nearly equal features.
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=0.5 if "embedding" in name else parameter.shape[1] ** -0.5)
    network.eval().save_pretrained(folder)
    processor.save_pretrained(folder)
    if tokenizer:
        word_tokenizer().save_pretrained(folder)
    return network
