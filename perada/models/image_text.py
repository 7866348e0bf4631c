# SPDX-License-Identifier: Apache-2.0
"""Networks of transformers that were trained on images with texts, as classifiers from the names of the classes."""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perada.core.checks import OptionError
from perada.models.text_head import ClassFeatures, TextClassifier, TextHead, TextTower, ZeroShot

if TYPE_CHECKING:
    from transformers import PretrainedConfig

HEAD = "classifier"
"""Full name of the classifier."""
OPEN_CLIP_PREFIX = "open_clip:"
"""Prefix of the names and folders of OpenCLIP's networks."""
SIGLIP = "siglip"
"""Model type of SigLIP, and of SigLIP 2 for images of one size."""
MODEL_TYPES = ("clip", "metaclip_2", SIGLIP)
"""Types of transformers' networks with an image tower and a text tower that are supported."""
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "spiece.model", "tokenizer.model")
"""Files with the vocabulary of a tokenizer, of which one is needed."""
EXAMPLES = "'hf:openai/clip-vit-base-patch16' or 'hf:google/siglip2-base-patch16-224'"


class ImageTextClassifier(nn.Module):
    """The image tower of a network of transformers, and a classifier.

    Names of its tensors are those of the network, so that PEFT reads its adapters into the whole network, too.

    Args:
        network: The network, such as a ``CLIPModel``.
        classifier: Maps the features (B, D) of images to logits (B, K).
    """

    def __init__(self, network: Any, classifier: nn.Module) -> None:  # noqa: ANN401  # transformers gives its networks no common type with both towers
        super().__init__()
        self.vision_model = network.vision_model
        # SigLIP has none: its pooling returns features of the right size.
        self.visual_projection = getattr(network, "visual_projection", None)
        self.classifier = classifier

    def forward(self, pixel_values: Tensor, interpolate_pos_encoding: bool = False) -> Tensor:
        """Map images (B, channels, height, width) to logits (B, K)."""
        outputs = self.vision_model(pixel_values=pixel_values, interpolate_pos_encoding=interpolate_pos_encoding)
        features = outputs.pooler_output
        if self.visual_projection is not None:
            features = self.visual_projection(features)
        logits: Tensor = self.classifier(features)
        return logits


def check_text_backbone(backbone: str | nn.Module) -> None:
    """Raise an OptionError if a backbone is not one by name from transformers or OpenCLIP, with a known text tower."""
    if isinstance(backbone, nn.Module):
        raise _no_text_tower(type(backbone).__name__)
    if isinstance(backbone, str) and not backbone.startswith(("hf:", OPEN_CLIP_PREFIX)):
        raise _no_text_tower(backbone)


def check_text_tower(name: str, model_config: "PretrainedConfig") -> None:
    """Raise an OptionError if a network of transformers has no text tower to compute features of class names."""
    if model_config.model_type not in MODEL_TYPES:
        raise _no_text_tower(name, f" ({model_config.model_type})")


def _no_text_tower(name: str, kind: str = "") -> OptionError:
    """Return the error for a backbone without text tower.

    Args:
        name: Name of the backbone.
        kind: What it is, in brackets after a space.
    """
    return OptionError(
        f"text_head computes the classifier by the text tower of CLIP, MetaCLIP 2, SigLIP or SigLIP 2, but backbone "
        f"{name!r}{kind} has none that is supported; choose for example {EXAMPLES}, or leave text_head out",
        name="text_head",
        value=name,
    )


def classifier_of_transformers(
    network: Any,  # noqa: ANN401  # transformers gives its networks no common type with both towers
    options: TextHead,
    num_classes: int,
    tower: TextTower | None,
) -> ImageTextClassifier:
    """Return the image tower of a network of transformers with a classifier; see :func:`text_classifier`."""
    projection = network.visual_projection if hasattr(network, "visual_projection") else None
    num_features = network.config.vision_config.hidden_size if projection is None else projection.out_features
    return ImageTextClassifier(network, text_classifier(network, options, num_classes, num_features, tower))


def text_classifier(
    network: Any,  # noqa: ANN401  # transformers gives its networks no common type with both towers
    options: TextHead,
    num_classes: int,
    num_features: int,
    tower: TextTower | None,
) -> TextClassifier:
    """Return the classifier that the text tower of a network computes.

    Args:
        network: The network, with its ``logit_scale`` and, if it has one, its ``logit_bias``.
        options: Options of the classifier.
        num_classes: Number of classes K.
        num_features: Number of features D that both towers end in.
        tower: The text tower; None for random features, to be replaced by those of a file.
    """
    if tower is None:
        text = ClassFeatures(
            F.normalize(torch.randn(num_classes, num_features), dim=-1), torch.zeros(32, dtype=torch.uint8)
        )
    else:
        text = options.for_classes(None, num_classes).class_features(tower)
    bias = getattr(network, "logit_bias", None)
    zero_shot = ZeroShot(
        text,
        logit_scale=float(network.logit_scale.detach()),
        logit_bias=None if bias is None else float(bias.detach()),
    )
    return TextClassifier(zero_shot, options)


def text_tower(name: str, network: Any, source: str, load_options: dict[str, Any]) -> TextTower:  # noqa: ANN401  # transformers gives its networks no common type with both towers
    """Return the text tower of a network with its tokenizer.

    Args:
        name: Name of the backbone.
        network: The network, a ``CLIPModel`` or another of ``MODEL_TYPES``.
        source: Name or folder of its files.
        load_options: Options for reading them.

    Raises:
        FileNotFoundError: If there are no files of a tokenizer.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **load_options)
    except (OSError, ValueError) as error:
        raise _no_tokenizer(name, source, str(error)) from error
    if 2 * len(tokenizer) < network.config.text_config.vocab_size:
        # Without files transformers 5.24 makes a tokenizer that knows only special tokens.
        raise _no_tokenizer(name, source, "there is no vocabulary")
    is_siglip = network.config.model_type == SIGLIP
    longest = network.config.text_config.max_position_embeddings
    network.eval()

    def tokenize(texts: list[str]) -> tuple[Tensor, ...]:
        if is_siglip:
            # SigLIP was trained on lower case, and the tokenizers of SigLIP 2 do not all convert to it.
            texts = [text.lower() for text in texts]
        for text, tokens in zip(texts, tokenizer(texts)["input_ids"], strict=True):
            check_prompt_length(text, len(tokens), longest)
        if is_siglip:
            # It was trained on texts of full length, without a mask.
            batch = tokenizer(texts, padding="max_length", max_length=longest, return_tensors="pt")
            return (batch["input_ids"],)
        batch = tokenizer(texts, padding=True, return_tensors="pt")
        return batch["input_ids"], batch["attention_mask"]

    def encode(*inputs: Tensor) -> Tensor:
        features: Tensor = network.get_text_features(*inputs).pooler_output
        return features

    return TextTower(weights_of_text(network), tokenize, encode)


def weights_of_text(network: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a network that are not those of its image tower."""
    weights = {}
    for name, value in network.state_dict().items():
        if not name.startswith(("vision_model.", "visual_projection.", "visual.")):
            weights[name] = value
    return weights


def _no_tokenizer(name: str, source: str, reason: str) -> FileNotFoundError:
    """Return the error for a backbone whose tokenizer cannot be read from its files."""
    return FileNotFoundError(
        f"text_head needs the tokenizer of backbone {name!r}, which cannot be read from {source!r}: "
        f"{' '.join(reason.split()).removesuffix('.')}; add its files, such as tokenizer.json, or leave text_head out"
    )


def check_prompt_length(prompt: str, num_tokens: int, longest: int) -> None:
    """Raise an OptionError if a prompt has more tokens than the text tower reads."""
    if num_tokens > longest:
        raise OptionError(
            f"text_head: the prompt {prompt!r} has {num_tokens} tokens, but the text tower reads {longest} at most; "
            "shorten the template, or the name in class_names",
            name="templates",
            value=prompt,
        )
