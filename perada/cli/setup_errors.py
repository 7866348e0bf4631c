# SPDX-License-Identifier: Apache-2.0
"""Errors of a run's set-up that do not depend on one another: those of its image sets and its model."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Literal

from perada.data import FederatedDataModule
from perada.data.broken_images import BrokenImagesError
from perada.data.sets.base import ImageSet
from perada.lightning.module import FederatedClassifier
from perada.models.adapted import AdaptedModel

Part = Literal["options", "data", "model", "run"]
"""What is set up one after the other: the objects of the options, the data, the model, and their combination."""
SKIP_BROKEN = "--data.on_broken=skip"
"""Option with which images that cannot be read do not end a set-up."""
MANY_CLASSES = 10
"""Number of classes of a model that is built to find its own errors, if the recipe does not set it."""


def failed_part(data: FederatedDataModule, module: FederatedClassifier) -> Part:
    """Return the part of a run whose set-up failed, after its objects were built; ``run`` if all parts exist."""
    if "checked" not in vars(data):
        return "data"
    if not hasattr(module, "tensor_names"):
        return "model"
    return "run"


def way_around(error: Exception, part: Part) -> str | None:
    """Return an option with which the set-up goes on after an error, to find further ones; None if there is none."""
    if part == "data" and isinstance(error, BrokenImagesError):
        return SKIP_BROKEN
    if part == "model":
        return "--model.pretrained=false"
    return None


def errors_without_data(data: FederatedDataModule, module: FederatedClassifier) -> list[Exception]:
    """Return the errors of each image set and of the model, if the data cannot be divided.

    Args:
        data: The data, which were rejected.
        module: The module, whose network is not built.
    """
    errors = []
    for images in _image_sets(data):
        error = _error_of(partial(_read_list, images))
        if error is not None:
            errors.append(error)
    return [*errors, *_errors_of_model(data, module)]


def _image_sets(data: FederatedDataModule) -> Iterable[ImageSet]:
    """Yield the image sets of a recipe, each of which may lack its files."""
    if data.division is not None:
        yield data.division.dataset
        if data.division.public is not None:
            yield data.division.public
    for shift in data.shifts.values():
        if isinstance(shift, ImageSet):
            yield shift


def _read_list(image_set: ImageSet) -> None:
    """Read the list of a set's images."""
    image_set.download()
    len(image_set)


def _errors_of_model(data: FederatedDataModule, module: FederatedClassifier) -> list[Exception]:
    """Return the errors of the model that do not depend on the data."""
    task = data.chosen_task
    if task is None and data.division is not None:
        task = data.division.dataset.task
    per_pixel = task is not None and task.per_pixel
    num_classes = module.num_classes or data.run_options.num_classes or MANY_CLASSES
    spec = replace(module.spec, num_classes=num_classes, per_pixel=per_pixel)
    error = _error_of(spec.build)
    if error is None:
        return []
    if spec.pretrained is False:
        return [error]
    # Missing weights hide errors of the adapter.
    further_error = _error_of(replace(spec, pretrained=False).build)
    if further_error is None:
        return [error]
    return [error, further_error]


def _error_of(step: Callable[[], AdaptedModel | None]) -> Exception | None:
    """Return the error with which a step rejects its input; None if it succeeds."""
    try:
        step()
    except (ValueError, TypeError, OSError, ImportError) as error:
        return error
    return None
