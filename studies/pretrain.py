# SPDX-License-Identifier: Apache-2.0
"""Small backbones for machines without a model hub: a timm model trained from scratch on small grey images.

The weights in ``perada/models/weights/`` were made here; the card beside them names the command.
"""

import hashlib
import platform
import subprocess
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from jsonargparse import ArgumentParser
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from perada.core.rounds import ImageConfig
from perada.core.seeding import generator, seeded
from perada.data.batches.transforms import draw_crops, prepare_images
from perada.data.sets.arrays import Digits, FashionMNIST
from perada.data.sets.base import ImageSet
from perada.models.backbones import build_backbone
from perada.studies.shapes import Shapes
from perada.system.files import check_output_file
from perada.tasks.geometry import augment

__all__ = ["PretrainSettings", "pretrain"]

SetName = Literal["FashionMNIST", "Digits", "Shapes"]
OptimizerName = Literal["sgd", "adamw"]


@dataclass(frozen=True)
class ImageSource:
    """How cards refer to an image set: its name, and its reference with the licence."""

    name: str
    reference: str


SOURCES: dict[SetName, ImageSource] = {
    "FashionMNIST": ImageSource(
        "Fashion-MNIST",
        "[Fashion-MNIST](https://github.com/zalandoresearch/fashion-mnist) (Xiao, Rasul, Vollgraf, 2017; MIT licence)",
    ),
    "Digits": ImageSource(
        "scikit-learn's digits",
        "[scikit-learn's digits](https://archive.ics.uci.edu/dataset/80) (Alpaydin, Kaynak, 1998; CC BY 4.0)",
    ),
    "Shapes": ImageSource(
        "perada's random shapes",
        "none but formulas (`perada.studies.shapes.Shapes`), after Kataoka et al. (ACCV 2020, CVPR 2022)",
    ),
}

PADDING = 2
"""Largest shift of a training image, in pixels."""
MOMENTUM = 0.9
WEIGHT_DECAY: dict[OptimizerName, float] = {"sgd": 5e-4, "adamw": 0.05}
OPTIMIZERS: dict[OptimizerName, str] = {"sgd": f"SGD with Nesterov momentum {MOMENTUM}", "adamw": "AdamW"}
"""The optimizers' names in cards."""


@dataclass(frozen=True, kw_only=True)
class PretrainSettings:
    """Options of ``perada pretrain``.

    Args:
        output: File to write, ending in ``.safetensors``; the card is written next to it, ending in ``.md``.
        dataset: The images; scikit-learn's digits and random shapes require no files.
        backbone: Name of a timm model.
        root: Folder of the four Fashion-MNIST files; by default where Debian's package puts them.
        download: Fetch the files to ``root`` if they are missing.
        epochs: Passes over the training images.
        batch_size: Images in a step.
        optimizer: ``sgd``, with momentum, or ``adamw``, which vision transformers need.
        lr: Maximum learning rate of the schedule; use about 0.002 for ``adamw``.
        image_size: Height and width to which the images are resized, in pixels.
        seed: Seed of the initial weights, the order of the images and their augmentation.
    """

    output: Path
    dataset: SetName = "FashionMNIST"
    backbone: str = "test_resnet"
    root: str | None = None
    download: bool = False
    epochs: int = 8
    batch_size: int = 256
    optimizer: OptimizerName = "sgd"
    lr: float = 0.1
    image_size: int = 32
    seed: int = 0


class _Classifier(pl.LightningModule):
    """Trains all parameters on shifted and mirrored images, with one rise and fall of the learning rate.

    Args:
        model: The backbone with its head.
        image_config: The backbone's image format.
        settings: Optimizer, learning rate and seed.
        steps: Steps of the whole training.
    """

    def __init__(self, model: nn.Module, image_config: ImageConfig, settings: PretrainSettings, steps: int) -> None:
        super().__init__()
        self.model = model
        self.image = image_config
        self.settings = settings
        self.steps = steps

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        crops = draw_crops(len(images), True, PADDING, generator(self.settings.seed, "augment", self.global_step))
        loss = F.cross_entropy(self(augment(images, crops, PADDING)), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def forward(self, images: Tensor) -> Tensor:
        """Map uint8 images (B, 1, H, W) to logits (B, K)."""
        logits: Tensor = self.model(prepare_images(images, self.image, self.image.input_size[-1]))
        return logits

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        accuracy = (self(images).argmax(-1) == labels).float().mean()
        self.log("test/accuracy", accuracy, on_epoch=True, batch_size=len(labels))

    def configure_optimizers(self) -> pl.utilities.types.OptimizerLRScheduler:
        parameters = self.model.parameters()
        lr = self.settings.lr
        weight_decay = WEIGHT_DECAY[self.settings.optimizer]
        optimizer: torch.optim.Optimizer
        if self.settings.optimizer == "adamw":
            optimizer = torch.optim.AdamW(parameters, lr, weight_decay=weight_decay)
        else:
            optimizer = torch.optim.SGD(parameters, lr, MOMENTUM, weight_decay=weight_decay, nesterov=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _training_loader(data: ImageSet, batch_size: int, seed: int) -> DataLoader[Any]:
    """Return a loader of shuffled full batches."""
    sampler = RandomSampler(data, generator=generator(seed, "batches"))
    return _make_loader(data, BatchSampler(sampler, batch_size, drop_last=True))


def _test_loader(data: ImageSet) -> DataLoader[Any]:
    """Return a loader of all images in order."""
    return _make_loader(data, BatchSampler(SequentialSampler(data), batch_size=1000, drop_last=False))


def _make_loader(data: ImageSet, sampler: BatchSampler) -> DataLoader[Any]:
    """Return a loader that gathers each batch by its indices."""
    # A loader without a generator takes a seed from the global stream, even if it has nothing to draw.
    return DataLoader(data, sampler=sampler, batch_size=None, generator=torch.Generator())


def pretrain(settings: PretrainSettings) -> Path:
    """Train a timm image classifier from scratch on grey images, on the CPU, and write its weights and a card.

    Two runs on one machine with equal settings and number of threads write the same bytes.

    Args:
        settings: The options.

    Returns:
        The file of the weights.

    Raises:
        ValueError: If ``settings.output`` does not end in ``.safetensors``.
        OSError: If it cannot be written.
        FileNotFoundError: If the data are missing.
    """
    output = settings.output
    if output.suffix != ".safetensors":
        raise ValueError(f"output={output} must end in .safetensors, the format of the weights")
    check_output_file("output", output, "weights.safetensors")
    data = _image_set(settings)
    data.download()
    assert data.num_classes is not None  # the images of all sets are labelled
    loader = _training_loader(data.with_split(True), settings.batch_size, settings.seed)
    test_images = data.with_split(False)
    with seeded(settings.seed, "pretrain"):
        backbone = build_backbone(settings.backbone, data.num_classes, pretrained=False, image_size=settings.image_size)
    assert backbone.image_config is not None  # timm's models have one
    model = backbone.model.requires_grad_(True).train()
    classifier = _Classifier(model, backbone.image_config, settings, steps=settings.epochs * len(loader))
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=settings.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(classifier, loader)
    (scores,) = trainer.test(classifier, _test_loader(test_images))

    output.parent.mkdir(parents=True, exist_ok=True)
    save_file({key: value.contiguous() for key, value in model.state_dict().items()}, output)
    card = _format_card(
        settings,
        image_config=backbone.image_config,
        num_classes=data.num_classes,
        num_test_images=len(test_images),
        accuracy=scores["test/accuracy"],
    )
    output.with_suffix(".md").write_text(card, encoding="utf-8")
    return output


def _image_set(settings: PretrainSettings) -> ImageSet:
    if settings.dataset == "FashionMNIST":
        return FashionMNIST(settings.root, settings.download)
    return Digits() if settings.dataset == "Digits" else Shapes()


def _command_words(settings: PretrainSettings) -> str:
    """Return the options of the command that made the weights, without the location of the data."""
    words = []
    for name, value in vars(settings).items():
        if name not in ("root", "download"):
            words.append(f"--{name}={value}")
    return " ".join(words)


def _format_card(
    settings: PretrainSettings, *, image_config: ImageConfig, num_classes: int, num_test_images: int, accuracy: float
) -> str:
    """Return the model card: a description of the weights, how they were made, and how to load them."""
    file = settings.output
    source = SOURCES[settings.dataset]
    optimizer = OPTIMIZERS[settings.optimizer]
    weight_decay = WEIGHT_DECAY[settings.optimizer]
    side = image_config.input_size[-1]
    return f"""# {file.name}

timm's `{settings.backbone}` with a head for the {num_classes} classes of {source.name}, trained from scratch by perada.

| | |
|---|---|
| accuracy on the {num_test_images:,} test images | {accuracy:.4f} |
| command | `perada pretrain {_command_words(settings)}` |
| commit | {_current_commit()} |
| seed | {settings.seed} |
| machine | {platform.system()} {platform.machine()}, {_processor_name()}, {torch.get_num_threads()} threads |
| software | Python {platform.python_version()}, torch {version("torch")}, timm {version("timm")} |
| size | {file.stat().st_size:,} bytes |
| SHA-256 | `{hashlib.sha256(file.read_bytes()).hexdigest()}` |

**Images**: uint8 grey images to [0, 1], repeated to three channels, resized to {side}×{side} pixels (bilinear,
antialiased), minus {image_config.mean}, over {image_config.std}.
In training they are shifted by up to {PADDING} pixels and mirrored at random.

**Training**: all parameters, cross-entropy, {optimizer} and weight decay {weight_decay}, the
learning rate rising once and falling (`torch.optim.lr_scheduler.OneCycleLR`).

**Use**: a starting point for demonstrations and tests on small grey images; it has seen no colour and no photograph.

```python
overlay = {{"file": "{file.name}", "num_classes": {num_classes}}}  # without the number timm drops the head
timm.create_model("{settings.backbone}", pretrained=True, num_classes={num_classes}, pretrained_cfg_overlay=overlay)
```

or, with a new head for other classes, as perada's `backbone: {settings.backbone}` with `pretrained: {file.name}`.

**Data**: {source.reference}.
**Licence** of the weights: Apache-2.0.
"""


def _current_commit() -> str:
    """Return the commit of this checkout, with ``-dirty`` if tracked files differ; without a checkout the version."""
    this_file = Path(__file__)
    git = ["git", "-C", str(this_file.parent)]
    try:
        # A checkout of something else may surround an installed package.
        subprocess.run([*git, "ls-files", "--error-unmatch", this_file.name], check=True, capture_output=True)
        completed = subprocess.run(
            [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"], check=True, capture_output=True
        )
    except (OSError, subprocess.CalledProcessError):
        return f"perada {version('perada')}"
    return completed.stdout.decode().strip()


def _processor_name() -> str:
    """Return the name of the processor."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "processor unknown"


def main(parser: ArgumentParser, words: list[str]) -> None:
    """Run ``perada pretrain``."""
    parser.add_argument("--config", action="config", help="Configuration file with the options below.")
    parser.add_class_arguments(PretrainSettings, as_group=False)
    options = parser.parse_args(words)
    del options.config
    pretrain(PretrainSettings(**options))
