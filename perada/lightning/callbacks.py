# SPDX-License-Identifier: Apache-2.0
"""Callbacks in addition to the loop: progress of the rounds, as bars or lines, and a table of predictions."""

import csv
import math
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ProgressBar, TQDMProgressBar
from torch import Tensor
from tqdm import tqdm

from perada.core.rounds import EvalBatch
from perada.core.text import is_spread, number_cells
from perada.data import FederatedDataModule
from perada.lightning.federated_loop import PROGRESS_METRICS, FederatedLoop
from perada.lightning.module import FederatedClassifier
from perada.lightning.trainer_attributes import callbacks_of
from perada.results.inference import save_mask, save_picture
from perada.results.report import ENTROPY, SCORE_GROUPS, SHARES, cell, title, title_with_metric, unit_of
from perada.scores.accumulation import finite_outputs
from perada.system.files import writing

_ROUNDING = 1e-3
"""Rounding errors of images in [0, 1], whose normalisation is undone."""


def _round_title(trainer: pl.Trainer) -> str:
    """Return the title of the current round for the progress bar."""
    # Rounds are displayed from 1. They are counted from 0 in metrics.csv and in what seeds are derived from.
    number = trainer.current_epoch + 1
    if trainer.max_epochs is not None and trainer.max_epochs > 0:
        return f"Round {number}/{trainer.max_epochs}"
    return f"Round {number}"


class _RoundClock:
    """Measures rounds, and describes each in a line.

    A line has the round, its seconds including evaluation, an estimate of the time left from the mean of the rounds
    before, and the scores if the round was scored: means over the clients, without their spread.
    """

    def __init__(self) -> None:
        self._first_round: int | None = None
        self._fit_started_at = 0.0
        self._round_started_at = 0.0

    def start_round(self, trainer: pl.Trainer) -> None:
        """Start the clock of a round."""
        self._round_started_at = time.monotonic()
        if self._first_round is None:
            # A run that is resumed begins after 0.
            self._first_round = trainer.current_epoch
            self._fit_started_at = self._round_started_at

    def line(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> str:
        """Describe the round that has just ended."""
        assert self._first_round is not None
        now = time.monotonic()
        fields = [f"{now - self._round_started_at:.1f} s"]
        rounds_left = (trainer.max_epochs or 0) - 1 - trainer.current_epoch
        if rounds_left > 0:
            seconds_per_round = (now - self._fit_started_at) / (trainer.current_epoch + 1 - self._first_round)
            fields.append(f"{tqdm.format_interval(seconds_per_round * rounds_left)} left")
        record = _last_record(trainer)
        for name, value in record.items():
            if name.startswith(SCORE_GROUPS) and not is_spread(name):
                fields.append(f"{_title_of(name, pl_module)} {_with_unit(name, value, pl_module)}")
        for name in PROGRESS_METRICS:
            if name in record:
                fields.append(f"{title(name)} {_with_unit(name, record[name], pl_module)}")
        return f"{_round_title(trainer)}: {', '.join(fields)}"


class RoundProgressBar(TQDMProgressBar):
    """Lightning's bar over the local steps of a round, under one line for each round that has ended.

    The lines stay, and have room for scores that a bar would cut off in a narrow terminal.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._clock = _RoundClock()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the round's bar.

        This replaces Lightning's method, which would draw the bar once with the title of an epoch.
        """
        self._clock.start_round(trainer)
        if self._leave:
            self.train_progress_bar = self.init_train_tqdm()
        self.train_progress_bar.reset(total=int(self.total_train_batches))
        self.train_progress_bar.set_description(_round_title(trainer))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the round above the bar. Lightning validates before this hook, so the scores are available."""
        super().on_train_epoch_end(trainer, pl_module)
        if self.is_enabled:
            # The bar is erased, and drawn again below the line.
            self.train_progress_bar.write(self._clock.line(trainer, pl_module), file=sys.stderr)

    def get_metrics(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """Return what stands at the end of the bar: nothing of perada's, since the lines above have the scores."""
        metrics = super().get_metrics(trainer, pl_module)
        return {name: value for name, value in metrics.items() if "/" not in name}


class RoundLines(ProgressBar):
    """Prints one line per round to standard error, for output that goes to a file or a pipe."""

    def __init__(self) -> None:
        super().__init__()
        self.enabled = True
        self._clock = _RoundClock()

    def disable(self) -> None:
        """Print nothing."""
        self.enabled = False

    def enable(self) -> None:
        """Print lines."""
        self.enabled = True

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock of the round."""
        self._clock.start_round(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the round. Lightning validates before this hook, so the scores are available."""
        if self.enabled:
            print(self._clock.line(trainer, pl_module), file=sys.stderr, flush=True)


def _title_of(name: str, pl_module: pl.LightningModule) -> str:
    """Return the title of a metric for people, with the name of what the module is scored by."""
    # There are no metrics before the data are set up.
    if isinstance(pl_module, FederatedClassifier) and pl_module.metrics:
        return title_with_metric(name, pl_module.metrics[0].name)
    return title(name)


def _with_unit(name: str, value: float, pl_module: pl.LightningModule) -> str:
    """Format a metric for people: scores in percent, or in the targets' units if the module predicts numbers."""
    if not name.startswith(SCORE_GROUPS) or name == ENTROPY:
        return cell(name, value)
    unit = SHARES
    if isinstance(pl_module, FederatedClassifier):
        unit = unit_of(pl_module.task.record())
    return unit.text(value)


def _last_record(trainer: pl.Trainer) -> dict[str, float]:
    """Return the metrics of the last round; empty without a loop or a round."""
    for callback in callbacks_of(trainer):
        if isinstance(callback, FederatedLoop) and callback.history:
            return callback.history[-1]
    return {}


def round_progress() -> RoundProgressBar | RoundLines:
    """Return a progress bar in a terminal or a notebook, and a line printer elsewhere."""
    if sys.stderr.isatty() or "ipykernel" in sys.modules:
        return RoundProgressBar()
    return RoundLines()


MAX_FOREIGN_PICTURES = 4
"""Number of a client's most foreign test images that are written as pictures."""
FOREIGN_FOLDER = "predictions/foreign"
MAX_EXAMPLES = 3
"""Number of a client's test images that are written as pictures because the prediction is right, and because it is
wrong."""
EXAMPLE_FOLDER = "predictions/examples"
MAX_PUBLIC_PICTURES = 8
"""Number of public images that are written as pictures."""
PUBLIC_FOLDER = "predictions/public"


@dataclass(frozen=True)
class _ForeignImage:
    """A test image that does not look like its client's training images.

    Attributes:
        number: Number of the image in the table.
        distance_ratio: See :meth:`.TypicalImages.distance_ratios`.
    """

    number: int
    distance_ratio: float


class PredictionFile(pl.Callback):
    """Writes ``predictions.csv`` into the run's folder when the trainer predicts, with a row for each test image.

    Columns: ``image`` (counted over all clients' test sets, in order of client), ``client`` who owns it, ``label``, and
    what the owner's ``personal`` and the ``global`` model predict (where there is one). The 0/1 labels of a multi-label
    image, and several numbers, are separated by spaces. Masks, and then also the images (``picture``), are PNG files
    beside the table, which has their paths. A cell is empty if outputs of the model for the image are NaN or infinite.

    If an image has one class, there are PNG files of the first images of each client whose class is predicted
    correctly, and of the first ones whose class is not (``example_picture``), and of some public images.

    If clients predict with both models, the column ``both`` has that prediction, and ``distance`` the distance of each
    image to its owner's training images, above 1 for an image that does not look like them. Of each client's most
    distant ones there are PNG files (``foreign_picture``).

    Attributes:
        path: The table, once it is written.
        failed: Number of images with such outputs by model and by the client of the images.
    """

    path: Path | None = None
    failed: Counter[tuple[str, int]]

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start an empty table."""
        self._header: list[str] = []
        # Without a prediction, an entry is None.
        self._rows: list[list[Any]] = []
        self.failed = Counter()
        self._distance_ratios: list[float] = []
        # The most distant ones of each client.
        self._foreign_images: dict[int, list[_ForeignImage]] = {}
        # Numbers of images by client and whether the prediction is right.
        self._examples: dict[tuple[int, bool], list[int]] = {}

    def on_predict_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,  # noqa: ANN401  # as Lightning declares it
        batch: object,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Add the rows of a batch: with ``return_predictions=False`` Lightning keeps none."""
        predictions: Mapping[str, Tensor] = outputs
        if "distance_ratio" in predictions:
            self._keep_foreign_images(predictions)
        models = [name for name in ("personal", "global", "both") if name in predictions]
        labels = predictions["y"]
        assert isinstance(pl_module, FederatedClassifier)
        task = pl_module.task
        columns = [predictions["owner"], labels]
        has_prediction = [torch.ones(len(labels), dtype=torch.bool)] * 2
        for name in models:
            logits = predictions[name]
            columns.append(task.predicted(logits))
            is_finite = finite_outputs(logits).cpu()
            has_prediction.append(is_finite)
            if name == "both":
                # It fails where one of its two models does, which are counted themselves.
                continue
            for owner in predictions["owner"].cpu()[~is_finite].tolist():
                self.failed[name, owner] += 1
        self._header = ["image", "client", "label", *models]
        if task.per_pixel:
            self._header.insert(2, "picture")
            assert isinstance(batch, EvalBatch)
            self._add_masks(trainer, columns, has_prediction, _pictures_of(batch.x, trainer))
            return
        if task.has_classes and task.exclusive:
            # A client predicts with both models if it can, and otherwise with its personal one.
            logits = predictions["both" if "both" in models else "personal"]
            is_right = (task.predicted(logits) == labels.to(logits.device)) & finite_outputs(logits)
            self._keep_examples(is_right.cpu(), predictions["owner"])
        entries_of_columns = []
        for column, is_predicted in zip(columns, has_prediction, strict=True):
            cells: list[Any] = []
            for value, predicted in zip(column.tolist(), is_predicted.tolist(), strict=True):
                cells.append(value if predicted else None)
            entries_of_columns.append(cells)
        for entries_of_row in zip(*entries_of_columns, strict=True):
            self._rows.append([len(self._rows), *entries_of_row])

    def _keep_foreign_images(self, predictions: Mapping[str, Tensor]) -> None:
        """Add the distances of a batch, and keep its images that are among the most distant ones of their clients."""
        first_number = len(self._distance_ratios)
        ratios = predictions["distance_ratio"].tolist()
        self._distance_ratios += ratios
        for row, owner in enumerate(predictions["owner"].tolist()):
            if ratios[row] > 1:
                images = [*self._foreign_images.get(owner, []), _ForeignImage(first_number + row, ratios[row])]
                images.sort(key=lambda kept: -kept.distance_ratio)
                self._foreign_images[owner] = images[:MAX_FOREIGN_PICTURES]

    def _keep_examples(self, is_right: Tensor, owners: Tensor) -> None:
        """Keep the images of a batch that are among the first of their clients with a right or a wrong prediction.

        Args:
            is_right: Mask (B,) of the images whose class is predicted correctly.
            owners: Their clients (B,). The rows of the batch come next in the table.
        """
        first_number = len(self._rows)
        for row, owner in enumerate(owners.tolist()):
            examples = self._examples.setdefault((owner, bool(is_right[row])), [])
            if len(examples) < MAX_EXAMPLES:
                examples.append(first_number + row)

    def _add_distances(self, folder: Path, trainer: pl.Trainer) -> None:
        """Write the pictures of the most distant images, and add the columns with the distances and their paths."""
        image_numbers: list[int] = []
        for images in self._foreign_images.values():
            image_numbers += [image.number for image in images]
        path_of_image = _write_test_pictures(folder, FOREIGN_FOLDER, sorted(image_numbers), trainer)
        self._header += ["distance", "foreign_picture"]
        for number, row in enumerate(self._rows):
            ratio = self._distance_ratios[number]
            row += ["" if math.isnan(ratio) else f"{ratio:.4g}", path_of_image.get(number, "")]

    def _add_examples(self, folder: Path, trainer: pl.Trainer) -> None:
        """Write the pictures of the examples, and add the column with their paths."""
        image_numbers: list[int] = []
        for examples in self._examples.values():
            image_numbers += examples
        path_of_image = _write_test_pictures(folder, EXAMPLE_FOLDER, sorted(image_numbers), trainer)
        self._header.append("example_picture")
        for number, row in enumerate(self._rows):
            row.append(path_of_image.get(number, ""))

    def _add_masks(
        self, trainer: pl.Trainer, class_masks: Sequence[Tensor], has_prediction: Sequence[Tensor], pictures: Tensor
    ) -> None:
        """Write the images and masks of a batch, and add a row with their paths for each image.

        Args:
            trainer: The trainer.
            class_masks: The owners (B,), the masks (B, H, W), and the masks that the models predict.
            has_prediction: For each of them a mask (B,) of the images that have an entry.
            pictures: The images uint8 (B, Ch, H, W).
        """
        # log_dir is a collective: all processes read it, and rank 0 writes.
        folder = trainer.log_dir if trainer.loggers else None
        owners, *masks_of_columns = class_masks
        for row, owner in enumerate(owners.tolist()):
            image = len(self._rows)
            cells = [str(image), str(owner)]
            paths = [f"predictions/{name}/{image:06d}.png" for name in self._header[2:]]
            # The header has the pictures in front of the masks.
            for position, is_predicted in enumerate(has_prediction[1:], start=1):
                if not is_predicted[row]:
                    paths[position] = ""
            cells += paths
            if folder and trainer.is_global_zero:
                picture_path, *mask_paths = paths
                save_picture(pictures[row], Path(folder) / picture_path)
                for masks, path in zip(masks_of_columns, mask_paths, strict=True):
                    if path:
                        save_mask(masks[row], Path(folder) / path)
            self._rows.append(cells)

    def on_predict_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the table."""
        # log_dir is a collective: all processes read it, and rank 0 writes.
        folder = trainer.log_dir if trainer.loggers else None
        if not self._header or not folder or not trainer.is_global_zero:
            return
        if self._distance_ratios:
            self._add_distances(Path(folder), trainer)
        if self._examples:
            self._add_examples(Path(folder), trainer)
            _write_public_pictures(Path(folder), trainer)
        self.path = Path(folder) / "predictions.csv"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with writing(self.path), self.path.open("w", newline="", encoding="utf-8") as file:
            # How many digits numbers need depends on the whole column.
            cells_of_columns = [_csv_cells(entries) for entries in zip(*self._rows, strict=True)]
            csv.writer(file).writerows([self._header, *zip(*cells_of_columns, strict=True)])


def _write_test_pictures(
    folder: Path, subfolder: str, image_numbers: Sequence[int], trainer: pl.Trainer
) -> dict[int, str]:
    """Write test images as PNG files, and return the path of each by its number in the table.

    Returns:
        The paths; empty if the inputs are texts, or not those of a :class:`.FederatedDataModule`.
    """
    datamodule = getattr(trainer, "datamodule", None)
    if not image_numbers or not isinstance(datamodule, FederatedDataModule):
        return {}
    path_of_image: dict[int, str] = {}
    for start in range(0, len(image_numbers), datamodule.eval_batch_size):
        batch = image_numbers[start : start + datamodule.eval_batch_size]
        x = datamodule.pictures("test", torch.tensor(batch))
        if not _has_pictures(x):
            return {}
        for number, picture in zip(batch, _pictures_of(x, trainer), strict=True):
            path_of_image[number] = f"{subfolder}/{number:06d}.png"
            save_picture(picture, folder / path_of_image[number])
    return path_of_image


def _write_public_pictures(folder: Path, trainer: pl.Trainer) -> None:
    """Write some of the server's public images, spread evenly over the set, as PNG files; none without a set."""
    datamodule = getattr(trainer, "datamodule", None)
    if not isinstance(datamodule, FederatedDataModule) or not datamodule.public_size:
        return
    num_pictures = min(MAX_PUBLIC_PICTURES, datamodule.public_size)
    positions = torch.arange(num_pictures) * datamodule.public_size // num_pictures
    x = datamodule.pictures("public", positions)
    if not _has_pictures(x):
        return
    for position, picture in zip(positions.tolist(), _pictures_of(x, trainer), strict=True):
        save_picture(picture, folder / PUBLIC_FOLDER / f"{position:06d}.png")


def _has_pictures(x: Tensor) -> bool:
    """Return whether inputs (B, ...) are grey or colour images, and not texts."""
    return x.dim() == 4 and x.shape[1] in (1, 3)


def _pictures_of(images: Tensor, trainer: pl.Trainer) -> Tensor:
    """Return prepared images (B, Ch, H, W) as uint8: normalised images as they were before it.

    Images that were prepared otherwise are scaled so that black and white are the smallest and the largest value.
    """
    x = images.float().cpu()
    datamodule = getattr(trainer, "datamodule", None)
    image = datamodule.prepare.image_config if isinstance(datamodule, FederatedDataModule) else None
    if image is not None and len(image.mean) == x.shape[1]:
        mean = torch.tensor(image.mean).view(-1, 1, 1)
        std = torch.tensor(image.std).view(-1, 1, 1)
        restored: Tensor = x * std + mean
        if float(restored.min()) >= -_ROUNDING and float(restored.max()) <= 1 + _ROUNDING:
            return (255 * restored).round().clamp(0, 255).to(torch.uint8)
    low = x.amin((1, 2, 3), keepdim=True)
    high = x.amax((1, 2, 3), keepdim=True)
    scaled: Tensor = 255 * (x - low) / (high - low).clamp(min=_ROUNDING)
    return scaled.round().to(torch.uint8)


def _csv_cells(cells: Sequence[Any]) -> list[str]:
    """Return the cells of a column: labels, paths, 0/1 labels, or numbers; empty for None.

    Several labels or numbers (K,) of an image are separated by spaces.

    >>> _csv_cells([3, None]), _csv_cells([[0.0, 1.5], None, [1.0, 2.0]])
    (['3', ''], ['0 1.5', '', '1 2'])
    """
    present = [entry for entry in cells if entry is not None]
    if present and isinstance(present[0], list):
        columns = [_csv_cells(column) for column in zip(*present, strict=True)]
        texts = iter([" ".join(cells) for cells in zip(*columns, strict=True)])
    elif present and isinstance(present[0], float):
        # 0/1 labels are floats too.
        texts = iter(number_cells(present))
    else:
        texts = iter([str(entry) for entry in present])
    return ["" if entry is None else next(texts) for entry in cells]
