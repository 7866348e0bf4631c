# SPDX-License-Identifier: Apache-2.0
"""Small backbones for machines without a model hub: a timm model trained from scratch on small grey images.

The weights in ``perada/models/weights/`` were made here; the card beside them names the command.
"""

import hashlib
import os
import platform
import subprocess
from collections.abc import Callable
from functools import partial
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
from perada.data.batches.transforms import augment, draw_crops, prepare_images
from perada.data.sets.arrays import Digits, FashionMNIST
from perada.data.sets.base import ImageSet
from perada.models.backbones import build_backbone
from perada.studies.shapes import Shapes

__all__ = ["pretrain"]

SetName = Literal["FashionMNIST", "Digits", "Shapes"]
Optimizer = Literal["sgd", "adamw"]
SOURCES: dict[SetName, tuple[str, str]] = {
    "FashionMNIST": (
        "Fashion-MNIST",
        "[Fashion-MNIST](https://github.com/zalandoresearch/fashion-mnist) (Xiao, Rasul, Vollgraf, 2017; MIT licence)",
    ),
    "Digits": (
        "scikit-learn's digits",
        "[scikit-learn's digits](https://archive.ics.uci.edu/dataset/80) (Alpaydin, Kaynak, 1998; CC BY 4.0)",
    ),
    "Shapes": (
        "perada's random shapes",
        "none but formulas (`perada.studies.shapes.Shapes`), after Kataoka et al. (ACCV 2020, CVPR 2022)",
    ),
}
"""Name and reference of each set."""

PADDING = 2  # pixels by which training images are shifted, at most
WEIGHT_DECAY: dict[Optimizer, float] = {"sgd": 5e-4, "adamw": 0.05}
MOMENTUM = 0.9
OPTIMIZERS: dict[Optimizer, str] = {"sgd": f"SGD with Nesterov momentum {MOMENTUM}", "adamw": "AdamW"}
"""What cards call them."""


class _Classifier(pl.LightningModule):
    """Trains all parameters: one rise and fall of the learning rate within ``steps``, shifts and mirroring."""

    def __init__(
        self, model: nn.Module, image: ImageConfig, optimizer: Optimizer, lr: float, steps: int, seed: int
    ) -> None:
        super().__init__()
        self.model, self.image, self.optimizer = model, image, optimizer
        self.lr, self.steps, self.seed = lr, steps, seed

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        crops = draw_crops(len(images), True, PADDING, generator(self.seed, "augment", self.global_step))
        loss = F.cross_entropy(self(augment(images, crops, PADDING)), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def forward(self, images: Tensor) -> Tensor:
        """Map uint8 images (B, 1, H, W) to logits (B, K)."""
        logits: Tensor = self.model(prepare_images(images, self.image, self.image.input_size[-1]))
        return logits

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        hits = (self(images).argmax(-1) == labels).float().mean()
        self.log("test/accuracy", hits, on_epoch=True, batch_size=len(labels))

    def configure_optimizers(self) -> pl.utilities.types.OptimizerLRScheduler:
        parameters, decay = self.model.parameters(), WEIGHT_DECAY[self.optimizer]
        optimizer: torch.optim.Optimizer
        if self.optimizer == "adamw":
            optimizer = torch.optim.AdamW(parameters, self.lr, weight_decay=decay)
        else:
            optimizer = torch.optim.SGD(parameters, self.lr, MOMENTUM, weight_decay=decay, nesterov=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.lr, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _loader(data: ImageSet, batch_size: int, shuffled_by: torch.Generator | None) -> DataLoader[Any]:
    """Batches gathered by index, in order or, given a generator, shuffled and full."""
    order = SequentialSampler(data) if shuffled_by is None else RandomSampler(data, generator=shuffled_by)
    batches = BatchSampler(order, batch_size, drop_last=shuffled_by is not None)
    # A loader without a generator takes a seed from the global stream, even where it has nothing to draw.
    return DataLoader(data, sampler=batches, batch_size=None, generator=torch.Generator())


def pretrain(
    *,
    output: Path,
    dataset: SetName = "FashionMNIST",
    backbone: str = "test_resnet",
    root: str | None = None,
    download: bool = False,
    epochs: int = 8,
    batch_size: int = 256,
    optimizer: Optimizer = "sgd",
    lr: float = 0.1,
    image_size: int = 32,
    seed: int = 0,
) -> Path:
    """Train a timm image classifier from scratch on grey images, on the CPU, and write weights and card.

    Two runs on one machine with equal arguments and number of threads write the same bytes.

    Args:
        output: File to write, ending in ``.safetensors``; the card stands beside it, ending in ``.md``.
        dataset: The images; scikit-learn's digits and random shapes need no file.
        backbone: Name of a timm model.
        root: Folder of the four Fashion-MNIST files; by default where Debian's package puts them.
        download: Fetch the files to ``root`` if they are missing.
        epochs: Passes over the training images.
        batch_size: Images in a step.
        optimizer: ``sgd``, with momentum, or ``adamw``, which vision transformers need.
        lr: Highest learning rate of the schedule; about 0.002 for ``adamw``.
        image_size: Height and width to which the images are resized, in pixels.
        seed: Of the initial weights, the order of the images and their augmentation.

    Returns:
        ``output``.

    Raises:
        ValueError: If ``output`` does not end in ``.safetensors``.
        FileNotFoundError: If the data are not there.
    """
    if output.suffix != ".safetensors":
        raise ValueError(f"output is {output}: weights are written as safetensors, so end the name in .safetensors")
    sets: dict[SetName, Callable[[], ImageSet]]
    sets = {"FashionMNIST": partial(FashionMNIST, root, download), "Digits": Digits, "Shapes": Shapes}
    data = sets[dataset]()
    data.download()
    assert data.num_classes is not None  # each of them is labelled
    train, test = (data.with_split(part) for part in (True, False))
    loader = _loader(train, batch_size, generator(seed, "batches"))
    with seeded(seed, "pretrain"):
        built = build_backbone(backbone, data.num_classes, pretrained=False, image_size=image_size)
    model, image = built.model.requires_grad_(True).train(), built.image
    assert image is not None  # a name, not a network of the caller's own
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=epochs, logger=False, enable_checkpointing=False, enable_model_summary=False
    )
    classifier = _Classifier(model, image, optimizer, lr, epochs * len(loader), seed)
    trainer.fit(classifier, loader)
    (scores,) = trainer.test(classifier, _loader(test, 1000, None))
    output.parent.mkdir(parents=True, exist_ok=True)
    save_file({key: value.contiguous() for key, value in model.state_dict().items()}, output)
    arguments: dict[str, Any] = {"output": output, "dataset": dataset, "backbone": backbone, "epochs": epochs}
    arguments |= {"batch_size": batch_size, "optimizer": optimizer, "lr": lr, "image_size": image_size, "seed": seed}
    card = _card(arguments, image, data.num_classes, len(test), scores["test/accuracy"])
    output.with_suffix(".md").write_text(card, encoding="utf-8")
    return output


def _card(arguments: dict[str, Any], image: ImageConfig, classes: int, tested: int, accuracy: float) -> str:
    """Model card: what the weights are, what made them with which arguments of :func:`pretrain`, how to load them."""
    file, backbone, optimizer = arguments["output"], arguments["backbone"], arguments["optimizer"]
    words = " ".join(f"--{key}={value}" for key, value in arguments.items())
    (name, reference), side = SOURCES[arguments["dataset"]], image.input_size[-1]
    return f"""# {file.name}

timm's `{backbone}` with a head for the {classes} classes of {name}, trained from scratch by perada.

| | |
|---|---|
| accuracy on the {tested:,} test images | {accuracy:.4f} |
| command | `perada pretrain {words}` |
| commit | {_commit()} |
| seed | {arguments["seed"]} |
| machine | {platform.system()} {platform.machine()}, {_processor()}, {torch.get_num_threads()} threads |
| software | Python {platform.python_version()}, torch {version("torch")}, timm {version("timm")} |
| size | {file.stat().st_size:,} bytes |
| SHA-256 | `{hashlib.sha256(file.read_bytes()).hexdigest()}` |

**Images**: uint8 grey images to [0, 1], repeated to three channels, resized to {side}×{side} pixels (bilinear,
antialiased), minus {image.mean}, over {image.std}.
In training they are shifted by up to {PADDING} pixels and mirrored at random.

**Training**: all parameters, cross-entropy, {OPTIMIZERS[optimizer]} and weight decay {WEIGHT_DECAY[optimizer]}, the
learning rate rising once and falling (`torch.optim.lr_scheduler.OneCycleLR`).

**Use**: a starting point for demonstrations and tests on small grey images; it has seen no colour and no photograph.

```python
overlay = {{"file": "{file.name}", "num_classes": {classes}}}  # without the number timm drops the head
timm.create_model("{backbone}", pretrained=True, num_classes={classes}, pretrained_cfg_overlay=overlay)
```

or, with a new head for other classes, as perada's `backbone: {backbone}` with `pretrained: {file.name}`.

**Data**: {reference}.
**Licence** of the weights: Apache-2.0.
"""


def _commit() -> str:
    """Commit of this checkout, ending in ``-dirty`` if tracked files differ; the version where there is no checkout."""
    here = Path(__file__)
    try:
        git = ["git", "-C", os.fspath(here.parent)]
        subprocess.run([*git, "ls-files", "--error-unmatch", here.name], check=True, capture_output=True)
        described = subprocess.run(
            [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"], check=True, capture_output=True
        )
    except (OSError, subprocess.CalledProcessError):
        return f"perada {version('perada')}"
    return described.stdout.decode().strip()


def _processor() -> str:
    """Name of the processor."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "processor unknown"


def main(parser: ArgumentParser, words: list[str]) -> None:
    """Run ``perada pretrain``."""
    parser.add_argument("--config", action="config", help="Configuration file with the options below.")
    parser.add_function_arguments(pretrain, as_group=False)
    given = parser.parse_args(words)
    del given.config
    pretrain(**given)
