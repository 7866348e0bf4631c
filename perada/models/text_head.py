# SPDX-License-Identifier: Apache-2.0
"""Classifiers made from the names of the classes, for networks that were trained on images with texts."""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perada.core.checks import OptionError, OptionTypeError, check_choice, checked_names
from perada.core.states import add_to_digest
from perada.core.text import quoted, value_text

DEFAULT_TEMPLATE = "a photo of a {}."
"""Prompt of CLIP's paper (Radford et al., ICML 2021)."""
PLACEHOLDER = "{}"
"""Part of a template that stands for the name of a class."""
PROMPTS_PER_PASS = 256
"""Largest number of prompts that go through a text tower at once."""


@dataclass(frozen=True)
class TextTower:
    """A text tower with its tokenizer.

    Attributes:
        weights: The tower's tensors by name.
        tokenize: Returns the inputs (N, ...) of the tower for N texts.
        encode: Returns the features (N, D) of texts from these inputs.
    """

    weights: Mapping[str, Tensor]
    tokenize: Callable[[list[str]], tuple[Tensor, ...]]
    encode: Callable[..., Tensor]


class ClassFeatures(NamedTuple):
    """Features of the classes.

    Attributes:
        features: Normalised features (K, D), in float32.
        source: SHA-256 (32,) of what they were computed from: the text tower and the tokens of the prompts, as bytes.
    """

    features: Tensor
    source: Tensor


@dataclass(frozen=True)
class TextHead:
    """Options of a classifier from the names of the classes, for backbones with a text tower, such as CLIP.

    Each name is put into the templates, and the text tower computes the features of these prompts. Those of a class are
    normalised, averaged over the templates, and normalised again. The logits of an image are the cosines of its
    features with those of the classes, times the scale of the pretrained network, plus its bias if it has one. Before
    training, this is zero-shot classification. The text tower is not needed afterwards, and not kept.

    Args:
        templates: Prompts with ``{}`` in place of the name of a class.
        class_names: Names for the prompts, in the order of the classes' numbers; by default the data's. An underscore
            becomes a space.
        train_logit_scale: Whether to train the scale of the logits, and their bias.
        train_features: Whether to train the difference of the classes' features from those of the prompts, which is
            zero at first, as Yu et al. (Task Residual, CVPR 2023) do.

    Raises:
        ValueError: If an option cannot be used.

    >>> TextHead(templates=["an X-ray of {}."]).prompts(["a_hand"])
    [['an X-ray of a hand.']]
    """

    templates: list[str] = field(default_factory=lambda: [DEFAULT_TEMPLATE])
    class_names: list[str] | None = None
    train_logit_scale: bool = False
    train_features: bool = False

    def __post_init__(self) -> None:
        templates = checked_names("text_head: templates", self.templates)
        if templates is None:
            raise OptionTypeError(
                f"text_head: templates must be a list of prompts, got None; leave it out for {DEFAULT_TEMPLATE!r}",
                name="templates",
                value=None,
            )
        for template in templates:
            if PLACEHOLDER not in template:
                raise OptionError(
                    f"text_head: templates has {template!r}, without {PLACEHOLDER} for the name of a class; write for "
                    f"example {DEFAULT_TEMPLATE!r}",
                    name="templates",
                    value=template,
                )
        names = checked_names("text_head: class_names", self.class_names)
        object.__setattr__(self, "templates", templates)
        object.__setattr__(self, "class_names", names)
        check_choice("train_logit_scale", self.train_logit_scale, [False, True])
        check_choice("train_features", self.train_features, [False, True])
        if names is not None:
            _check_distinct(names)

    @property
    def is_trained(self) -> bool:
        """Whether a part of the classifier is trained."""
        return self.train_logit_scale or self.train_features

    def for_classes(self, classes: Sequence[str] | None, num_classes: int) -> "TextHead":
        """Return these options with a name for each class.

        Args:
            classes: Names of the data's classes; None if they have none.
            num_classes: Number of classes.

        Raises:
            OptionError: If names are missing, there are too many of them, or two are equal.
        """
        names = self.class_names
        source = "class_names"
        if names is None:
            names = None if classes is None else list(classes)
            source = "the data"
        if names is None:
            raise OptionError(
                "text_head: the data do not name their classes; list the names in class_names of text_head, in the "
                "order of the classes' numbers",
                name="class_names",
                value=None,
            )
        if len(names) != num_classes:
            raise OptionError(
                f"text_head: {source} {'have' if source == 'the data' else 'has'} {len(names)} names "
                f"({value_text(names)}), but there are {num_classes} classes; list one name for each in class_names",
                name="class_names",
                value=names,
            )
        _check_distinct(names)
        return replace(self, class_names=names)

    def prompts(self, names: Sequence[str]) -> list[list[str]]:
        """Return the prompts of each class, one for each template."""
        prompts_of_classes = []
        for name in names:
            spoken = _spoken_name(name)
            prompts_of_classes.append([template.replace(PLACEHOLDER, spoken) for template in self.templates])
        return prompts_of_classes

    def class_features(self, tower: TextTower) -> ClassFeatures:
        """Compute the features of the classes by a text tower."""
        prompts_of_classes = self.prompts(self.class_names or ())
        prompts: list[str] = []
        for prompts_of_class in prompts_of_classes:
            prompts += prompts_of_class
        digest = hashlib.sha256()
        for name, value in sorted(tower.weights.items()):
            add_to_digest(digest, name, value)
        features = []
        with torch.no_grad():
            for start in range(0, len(prompts), PROMPTS_PER_PASS):
                inputs = tower.tokenize(prompts[start : start + PROMPTS_PER_PASS])
                for number, tokens in enumerate(inputs):
                    add_to_digest(digest, f"inputs {number}", tokens)
                features.append(tower.encode(*inputs).float())
        of_prompts = F.normalize(torch.cat(features), dim=-1)
        of_classes = of_prompts.view(len(prompts_of_classes), len(self.templates), -1).mean(1)
        # Templates that are grouped differently could have the same tokens.
        digest.update(str(len(self.templates)).encode())
        source = torch.tensor(list(digest.digest()), dtype=torch.uint8)
        return ClassFeatures(F.normalize(of_classes, dim=-1), source)


def _spoken_name(name: str) -> str:
    """Return the name of a class as it is written in a prompt."""
    return " ".join(name.replace("_", " ").split())


def _check_distinct(names: Sequence[str]) -> None:
    """Raise an OptionError if two classes would have the same prompts."""
    counts = Counter(_spoken_name(name) for name in names)
    doubled = [name for name, count in counts.items() if count > 1]
    if doubled:
        raise OptionError(
            f"text_head: several classes are called {quoted(doubled[:5])}, so that no prompt tells them apart; give "
            "each its own name in class_names",
            name="class_names",
            value=doubled[0],
        )


class ZeroShot(nn.Module):
    """The tensors of a zero-shot classifier, which are not trained.

    Args:
        text: Features of the classes.
        logit_scale: Logarithm of the logits' scale.
        logit_bias: Bias of the logits; None for none.
    """

    text_features: Tensor
    text_source: Tensor
    logit_scale: Tensor
    logit_bias: Tensor | None

    def __init__(self, text: ClassFeatures, logit_scale: float, logit_bias: float | None) -> None:
        super().__init__()
        self.register_buffer("text_features", text.features)
        self.register_buffer("text_source", text.source)
        self.register_buffer("logit_scale", torch.tensor([logit_scale]))
        self.register_buffer("logit_bias", None if logit_bias is None else torch.tensor([logit_bias]))


class TextClassifier(nn.Module):
    """Classify image features by their cosines with the features of the classes.

    What is trained are offsets, which are zero at first. So the zero-shot classifier is a part of the frozen weights,
    and a weight decay pulls towards it.

    Args:
        zero_shot: The classifier before training.
        options: What is trained.
    """

    feature_offset: nn.Parameter | None
    scale_offset: nn.Parameter | None
    bias_offset: nn.Parameter | None

    def __init__(self, zero_shot: ZeroShot, options: TextHead) -> None:
        super().__init__()
        self.zero_shot = zero_shot
        is_trained = {
            "feature_offset": options.train_features,
            "scale_offset": options.train_logit_scale,
            "bias_offset": options.train_logit_scale and zero_shot.logit_bias is not None,
        }
        initial = {
            "feature_offset": zero_shot.text_features,
            "scale_offset": zero_shot.logit_scale,
            "bias_offset": zero_shot.logit_bias,
        }
        for name, value in initial.items():
            offset = nn.Parameter(torch.zeros_like(value)) if value is not None and is_trained[name] else None
            self.register_parameter(name, offset)

    def reset_parameters(self) -> None:
        """Return to the zero-shot classifier."""
        for offset in self.parameters():
            nn.init.zeros_(offset)

    def forward(self, x: Tensor) -> Tensor:
        """Map image features (B, D) to logits (B, K)."""
        directions = F.normalize(x, dim=-1)
        features = self.zero_shot.text_features
        if self.feature_offset is not None:
            features = features + self.feature_offset
        log_scale = self.zero_shot.logit_scale
        if self.scale_offset is not None:
            log_scale = log_scale + self.scale_offset
        logits = F.linear(directions, features) * log_scale.exp()
        if self.zero_shot.logit_bias is not None:
            logits = logits + self.zero_shot.logit_bias
        if self.bias_offset is not None:
            logits = logits + self.bias_offset
        return logits
