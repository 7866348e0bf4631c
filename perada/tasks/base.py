# SPDX-License-Identifier: Apache-2.0
"""The interface of a task: everything that training, distillation, evaluation and reports must know of labels."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from perada.core.checks import OptionError
from perada.core.states import double
from perada.tasks.geometry import ImageMoves, Size, resize_masks

Average = Literal["logits", "probabilities"]
"""Which outputs of several models are averaged."""


class SummedMetric(ABC):
    """A metric that is computed from statistics of the images, so that an evaluation need not store all predictions.

    The statistics are the sums of :meth:`summands` unless a metric overrides :meth:`statistics`, :meth:`combine`,
    :meth:`to_sums` and :meth:`from_sums`, because sums would lose digits.
    """

    lower_is_better: ClassVar[bool] = False
    """Whether a lower score is better."""

    @abstractmethod
    def summands(self, predicted: Tensor, targets: Tensor) -> Tensor:
        """Return S numbers for each image, whose sums over images determine the score.

        Args:
            predicted: Predictions (p, N, ...) of p models in the form of targets.
            targets: Targets (N, ...).

        Returns:
            Summands (p, N, S).
        """

    @abstractmethod
    def score(self, statistics: Tensor) -> Tensor:
        """Compute scores (...), or (..., K) of the classes, from statistics (..., S).

        A score is NaN if it is not defined, for example for a class that does not occur.
        """

    def statistics(
        self, predicted: Tensor, targets: Tensor, groups: Tensor, num_groups: int, counted: Tensor | None = None
    ) -> Tensor:
        """Return the statistics (p, G, S) of a batch for each model and group of images.

        Args:
            predicted: Predictions (p, N, ...) of p models in the form of targets.
            targets: Targets (N, ...).
            groups: Group (N,) of each image.
            num_groups: Number G of groups.
            counted: Mask (N,) of the images to include; by default all.
        """
        summands = double(self.summands(predicted, targets))
        if counted is not None:
            # A product with 0 would keep the NaN of images that do not count.
            summands = summands.where(counted.unsqueeze(-1), 0)
        return sum_by_group(summands, groups, num_groups)

    def combine(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the statistics (..., S) of the images of both arguments together."""
        return first + second

    def to_sums(self, statistics: Tensor) -> Tensor:
        """Return the sums (..., S) of the summands, which can be added up without knowing the parts."""
        return statistics

    def from_sums(self, sums: Tensor) -> Tensor:
        """Return statistics (..., S) from the sums of the summands."""
        return sums

    def is_possible(self, statistics: Tensor, max_images: float, max_pixels: float) -> bool:
        """Return whether statistics (S,) can be those of images; a dishonest site of a deployment may report others.

        Args:
            statistics: The statistics.
            max_images: Largest number of images that they may be of.
            max_pixels: Largest number of pixels of an image.
        """
        return bool(statistics.isfinite().all())


def sum_by_group(values: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """Add up values (p, N, S) of images over the groups (N,) that they belong to: (p, G, S)."""
    sums = values.new_zeros(len(values), num_groups, values.shape[-1])
    return sums.index_add_(1, groups, values)


class Task(ABC):
    """What the network predicts for an image, and how predictions are compared with targets.

    A task has no state. Its options are the fields of a frozen dataclass, so tasks with the same options are equal.
    Letters of shapes: N images, K outputs of the network, such as classes, and M models.

    A custom task of one class per image is a subclass of :class:`.ClassTask`, which needs two methods.
    """

    has_classes: ClassVar[bool] = True
    """Whether targets are classes or labels, so that predictions are right or wrong and can be counted. Only then are
    :meth:`entropy`, :meth:`confidence`, :meth:`errors`, :meth:`presence` and :meth:`class_counts` called."""
    exclusive: ClassVar[bool] = False
    """Whether an image has exactly one of the classes, so that predictions can be counted by class."""
    per_pixel: ClassVar[bool] = False
    """Whether there is a prediction for each pixel: logits (N, H, W, K), where the network returns (N, K, H, W)."""
    has_positions: ClassVar[bool] = False
    """Whether targets are positions in the image, as masks and coordinates are. They change when its content is moved
    or scaled (:meth:`moved`, :meth:`resized`), and have to fit its size (:meth:`check_positions`)."""
    default_metric: ClassVar[str]
    """Metric of the scores unless the option ``metric`` selects others."""
    metric_prefix: ClassVar[str]
    """Prefix of the torchmetrics classes for this task, such as ``Multiclass``."""
    metric_size_option: ClassVar[str]
    """Option of these classes for the number of classes K."""
    labels_per_image: ClassVar[str]
    """How messages describe the labels, such as ``one class per image``."""

    @abstractmethod
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Compute the loss of each image by itself.

        Images must not be mixed: means over real rows, weights of clients and the per-image gradients of differential
        privacy rest on it.

        Args:
            logits: Logits (N, K).
            targets: Targets (N, ...).

        Returns:
            Losses (N,).
        """

    @abstractmethod
    def predictions(self, logits: Tensor) -> Tensor:
        """Compute the predictions from logits, both (..., K), in the dtype of the logits: of classes, probabilities."""

    def predicted(self, logits: Tensor) -> Tensor:
        """Return predictions in the form of targets, such as the most likely class, from logits (..., K)."""
        return self.predictions(logits)

    def entropy(self, probabilities: Tensor) -> Tensor:
        """Compute the entropy (N,) of predictions, in nats, from probabilities (N, K)."""
        raise self._no_classes()

    def ensemble(self, logits: Tensor, average: Average) -> Tensor:
        """Average the outputs of M models.

        Args:
            logits: Their logits (M, ..., K).
            average: Which outputs are averaged: ``logits`` or ``probabilities``.

        Returns:
            Logits (..., K) of the ensemble. They are not finite where some logits of a model are not.
        """
        if len(logits) == 1:
            return logits[0]
        if average == "logits":
            return logits.mean(0)
        # Infinite logits are probabilities of 0 and 1, whose mean with others may have finite logits.
        is_finite = logits.isfinite().all(0).all(-1, keepdim=True)
        return torch.where(is_finite, self.logits_of_mean_predictions(logits), torch.nan)

    def logits_of_mean_predictions(self, logits: Tensor) -> Tensor:
        """Return logits (..., K) that predict the mean of what M models predict, from their logits (M, ..., K).

        Raises:
            OptionError: If the task does not define them.
        """
        raise OptionError(
            f"the predictions of {self} cannot be averaged, since logits_of_mean_predictions is not defined for it; "
            "set average='logits', or define the method",
            name="average",
            value="probabilities",
        )

    def mixture(self, first: Tensor, second: Tensor, share: Tensor) -> Tensor:
        """Return logits (..., K) that predict a weighted mean of what two models predict.

        Args:
            first: Logits (..., K) of the first model.
            second: Logits (..., K) of the second model.
            share: Weights of the first model's predictions, between 0 and 1, of a shape that broadcasts with the
                logits. The second has the rest.

        Raises:
            OptionError: If the task does not define them.
        """
        raise OptionError(
            f"the predictions of two models cannot be mixed, since mixture is not defined for {self}; set "
            "evaluation.prediction to personal or global, or define the method",
            name="prediction",
            value="both",
        )

    def known_classes(self, targets: Tensor, num_classes: int) -> Tensor:
        """Return a mask (K,) of the classes that a client knows, given the targets (N, ...) of its training images.

        A mask without elements, which is the default, stands for a task of which each model knows everything.
        """
        return torch.zeros(0, dtype=torch.bool)

    def completed(self, personal: Tensor, shared: Tensor, known_classes: Tensor, trust: Tensor) -> Tensor:
        """Return logits (..., K) of a personal model that leaves classes that its client does not know to another one.

        Args:
            personal: Logits (..., K) of the personal model.
            shared: Logits (..., K) of the global model.
            known_classes: Mask of the classes that the client knows, of a shape that broadcasts with the logits.
            trust: How far the global model is trusted, from 0 to 1, of a shape (..., 1) that broadcasts with them.
        """
        return personal

    @abstractmethod
    def distillation_loss(self, student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
        """Compute how far the student is from the teacher, averaged over images: a scalar.

        For probabilities, it is the Kullback-Leibler divergence. Logits are divided by the temperature, and the loss is
        multiplied by its square (Hinton et al., 2015), which keeps the size of the gradients.

        Args:
            student: Logits (N, K) of the student.
            teacher: Logits (N, K) of the teacher.
            temperature: Temperature, which softens both distributions if it is above 1.
        """

    def distilled(self, logits: Tensor) -> Tensor:
        """Return the part of logits (..., K) that student and teachers are compared by; all of them by default."""
        return logits

    def confidence(self, logits: Tensor) -> Tensor:
        """Return the probability that the model gives to each of its own predictions, from logits (N, K).

        Returns:
            Probabilities of the shape of :meth:`predicted`.
        """
        raise self._no_classes()

    def errors(self, probabilities: Tensor, targets: Tensor) -> Tensor:
        """Return one minus the probability of each target.

        Args:
            probabilities: Probabilities (N, K).
            targets: Targets (N, ...).

        Returns:
            Errors between 0 and 1, of the shape of the targets.
        """
        raise self._no_classes()

    def error_rates(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return how wrong the prediction for each image is, (N,), from 0 (right) to 1.

        It is the share of the image's known targets that are predicted wrongly.

        Args:
            logits: Logits (N, K).
            targets: Targets (N, ...).
        """
        counts = self.known(targets)
        is_wrong = (self.predicted(logits) != targets) & counts
        num_wrong = is_wrong.flatten(1).sum(1) if is_wrong.dim() > 1 else is_wrong
        num_known = counts.flatten(1).sum(1) if counts.dim() > 1 else counts
        return num_wrong / num_known.clamp(min=1)

    def presence(self, targets: Tensor, num_classes: int) -> Tensor:
        """Return targets (N, ...) as an indicator (N, K) of the classes that each image has."""
        raise self._no_classes()

    def mix(self, targets: Tensor, others: Tensor, shares: Tensor, num_classes: int) -> Tensor:
        """Mix the targets of pairs of images, for mixup and CutMix.

        Args:
            targets: Targets (C, B, ...).
            others: Targets of the images that they are mixed with.
            shares: Share (C, 1) of the first of each pair.
            num_classes: Number of classes K.

        Returns:
            Targets that :meth:`loss` accepts: the loss of a mixed target is the mix of the losses.

        Raises:
            ValueError: If the loss of the task is not linear in the target.
        """
        raise ValueError(f"the targets of {self} cannot be mixed; leave mixup and cutmix out")

    def class_counts(self, targets: Tensor, num_classes: int) -> Tensor:
        """Count the images (K,) that have each class, in targets (N, ...)."""
        raise self._no_classes()

    @abstractmethod
    def blank_targets(self, shape: Sequence[int], num_classes: int, device: torch.device) -> Tensor:
        """Return valid targets for images of leading shape ``shape``, for dry runs without data."""

    def summed_metrics(self, num_classes: int) -> Mapping[str, SummedMetric]:
        """Return metrics of this task by name, in addition to those of torchmetrics."""
        return {}

    def check_targets(self, targets: Tensor) -> None:
        """Raise an OptionError if the known training targets (N, ...) cannot be learned with the options."""
        return

    def check_augmentation(self, options: Sequence[str]) -> None:
        """Raise an OptionError if random changes of the training images would make their targets wrong.

        Classes do not depend on them. Targets with positions are moved by :meth:`moved`. A task of numbers without
        positions has to define this method, since only it knows whether a mirrored image has the same number.

        Args:
            options: The data module's options that are set, of ``flip`` and ``crop_padding``.
        """
        if not (self.has_classes or self.has_positions):
            self.check_moved_images(options, "training images")

    def check_moved_images(self, changes: Sequence[str], description: str) -> None:
        """Raise an OptionError if changes of images that move their content would make the targets wrong.

        Classes do not depend on them.

        Args:
            changes: Corruptions or scanners that move the content of images, without their targets.
            description: What these images are, for the message.
        """
        if changes and (self.has_positions or not self.has_classes):
            names = " and ".join(changes)
            raise OptionError(
                f"{names} would move the content of {description}, but not the targets of {self}: leave {names} out",
                name=changes[0],
                value=True,
            )

    def moved(self, targets: Tensor, moves: ImageMoves) -> Tensor:
        """Return targets (N, ...) of images that are shifted and mirrored.

        By default masks are moved like their images, with :attr:`border_target` outside of them, and targets without
        positions stay the same.

        Args:
            targets: The targets.
            moves: How the images are moved, which has methods for masks and for points.
        """
        if self.has_positions and self.per_pixel:
            return moves.move_masks(targets, self.border_target)
        return targets

    def resized(self, targets: Tensor, size: Size, new_size: Size) -> Tensor:
        """Return targets of images that are resized.

        By default masks are resized by nearest neighbour, and targets without positions stay the same.

        Args:
            targets: Targets (..., *T) of images of one size, with any leading axes.
            size: Height and width of the images.
            new_size: Their height and width after they are resized.
        """
        if self.has_positions and self.per_pixel:
            return resize_masks(targets, new_size)
        return targets

    def in_own_pixels(self, predictions: Tensor, prepared_size: Size, own_sizes: Sequence[Size]) -> Tensor:
        """Return predictions (N, ...) of positions in the pixels of the images that were passed; by default unchanged.

        Args:
            predictions: Predictions for N images, which the model got in one size.
            prepared_size: Height and width of the images that the model got.
            own_sizes: Height and width of each image before it was resized.
        """
        return predictions

    def check_positions(self, targets: Tensor, size: Size) -> None:
        """Raise a ValueError if targets with positions (N, ...) do not fit images of this height and width."""
        if self.per_pixel and tuple(targets.shape[-2:]) != size:
            raise ValueError(
                f"masks are {tuple(targets.shape[-2:])}, but their images are {size}; use masks of the size of the "
                "images"
            )

    def check_prepared_size(self, size: Size) -> None:
        """Raise an OptionError if an option does not match the height and width of the images that the model gets."""
        return

    @property
    def border_target(self) -> int:
        """Target of the pixels that augmentation adds around an image, if there is a prediction for each pixel."""
        return 0

    @property
    def uses_all_targets(self) -> bool:
        """Whether an option is computed from the training targets of all clients (:meth:`fitted_to`)."""
        return False

    @property
    def uses_client_counts(self) -> bool:
        """Whether the loss depends on the class counts of each image's client (:meth:`client_loss`)."""
        return False

    def client_loss(self, logits: Tensor, targets: Tensor, class_counts: Tensor) -> Tensor:
        """Compute the losses (N,) in training where :attr:`uses_client_counts`; images must not be mixed.

        Args:
            logits: Logits (N, K).
            targets: Targets (N, ...).
            class_counts: Number (N, K) of training images of each class that the client of each image has.
        """
        return self.loss(logits, targets)

    def fitted_to(self, targets: Tensor, num_classes: int) -> "Task":
        """Return the task with numbers in place of options that depend on all clients' training targets.

        Args:
            targets: Training targets (N, ...) of all clients.
            num_classes: Number of classes K.

        Raises:
            ValueError: If the targets do not determine them.
        """
        return self

    def check_classes(self, num_classes: int) -> None:
        """Raise an OptionError if an option does not match the number of classes K."""
        # The options of most custom tasks are the same for any number.
        return

    def known(self, targets: Tensor) -> Tensor:
        """Return a mask, of the shape of the targets, that is false for unknown labels."""
        return torch.ones_like(targets, dtype=torch.bool)

    def out_of_range(self, targets: Tensor, num_classes: int) -> Tensor:
        """Return those of the known targets, or of their entries, that are not between 0 and the largest label."""
        values = targets[self.known(targets)]
        return values[~((values >= 0) & (values <= self.largest_label(num_classes)))]

    def largest_label(self, num_classes: int) -> int:
        """Return the largest number that a label, or an entry of a vector of labels, may be."""
        raise self._no_classes()

    def describe_range(self, num_classes: int) -> str:
        """Describe the numbers that :meth:`out_of_range` accepts, such as ``0..9``."""
        return f"0..{self.largest_label(num_classes)}"

    @abstractmethod
    def count_classes(self, targets: Tensor) -> int:
        """Return the number of classes that targets (N, ...) show."""

    @abstractmethod
    def fits(self, targets: Tensor, num_classes: int | None = None) -> bool:
        """Return whether targets (N, ...) have the shape and type that this task needs, with K classes if given."""

    @abstractmethod
    def describe_targets(self, num_classes: int) -> str:
        """Describe valid targets for messages, such as ``10 classes``."""

    @abstractmethod
    def renumber(self, targets: Tensor, class_numbers: Sequence[int], num_classes: int) -> Tensor:
        """Convert targets of a client that knows some of the classes to the numbers of the run.

        Args:
            targets: Targets (N, ...) of the client.
            class_numbers: The run's number of each of the client's classes.
            num_classes: The run's number of classes K.
        """

    def _no_classes(self) -> TypeError:
        return TypeError(f"{self} does not count classes")

    def __repr__(self) -> str:
        """Return the class and the options that were set."""
        set_options: list[str] = []
        if is_dataclass(self):
            for field in fields(self):
                value = getattr(self, field.name)
                if value != field.default:
                    set_options.append(f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(set_options)})"

    def record(self) -> dict[str, Any]:
        """Return name and options as JSON, from which :func:`make_task` creates the task.

        Also part of it is what reports need, which are written even where the class of a custom task is not imported.
        """
        options: dict[str, Any] = {}
        if is_dataclass(self):
            options = asdict(self)
        return {
            "class_path": type(self).__name__,
            "init_args": options,
            "has_classes": self.has_classes,
            "exclusive": self.exclusive,
            "per_pixel": self.per_pixel,
            "default_metric": self.default_metric,
        }


def make_task(record: Mapping[str, Any]) -> Task:
    """Create the task of a record.

    Only classes that are defined already are created, so that a file cannot make perada import code.

    Args:
        record: What :meth:`Task.record` returned.

    Raises:
        ValueError: If there is no task of this name, or it rejects the options.

    >>> make_task({"class_path": "MultiLabel", "init_args": {}})
    MultiLabel()
    """
    name = record["class_path"]
    task_classes = _concrete_tasks(Task)
    if name not in task_classes:
        defined_names = ", ".join(sorted(task_classes))
        raise ValueError(
            f"the task {name!r} is not defined; import the module that defines it first (defined are {defined_names})"
        )
    try:
        return task_classes[name](**record["init_args"])
    except TypeError as error:
        raise ValueError(
            f"the task {name!r} does not accept its recorded options: {error}; use the version of perada, or of the "
            "module that defines it, with which it was recorded"
        ) from error


def _concrete_tasks(parent: type) -> dict[str, type[Task]]:
    """Return the concrete classes below ``parent`` by name."""
    class_of_name: dict[str, type[Task]] = {}
    children: Sequence[type[Task]] = parent.__subclasses__()
    for child in children:
        if not inspect.isabstract(child):
            class_of_name[child.__name__] = child
        class_of_name |= _concrete_tasks(child)
    return class_of_name
