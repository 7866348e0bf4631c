# SPDX-License-Identifier: Apache-2.0
"""Checks of labels against classes and task."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from perada.core.checks import OptionError
from perada.core.text import abbreviated
from perada.data.batches.datasets import location_of
from perada.data.sets.base import class_names
from perada.tasks import Task, describe_labels, task_of_labels


def check_classes(
    labels_of_parts: Mapping[str, list[Tensor]],
    classes: Sequence[str] | None,
    num_classes: int | None,
    task: Task,
    infers_classes: bool,
    sets: Mapping[str, Sequence[Dataset[Any]]],
) -> int:
    """Check that the labels are of the classes, and return the number of classes K.

    Args:
        labels_of_parts: Labels of each client by part of the data.
        classes: Names of the classes, if there are any.
        num_classes: Number of classes; None for the number of names, or else for what the labels show.
        task: What is learnt from the labels.
        infers_classes: Whether the labels are all that is known of the classes.
        sets: Datasets of each client by part of the data.

    Raises:
        ValueError: If the classes, their number and the labels do not match.
    """
    if classes is not None:
        num_classes = num_classes or len(classes)
        class_names("the data", classes, num_classes)
        if num_classes == 1 and task.exclusive:
            raise ValueError(
                f"all images are of one class ({classes[0]}), so nothing can be learned: add images of a second class; "
                "if the label is either present or absent, use vectors of zeros and ones (a list of columns of a table)"
            )
    if infers_classes and (task.exclusive or task.per_pixel):
        _check_inferred_classes(labels_of_parts, task)
    elif task.has_classes and not task.exclusive and not task.per_pixel:
        _warn_of_one_hot(labels_of_parts["training"])
    # The labels of all clients at once, since there may be 100,000 clients.
    merged_labels: dict[str, Tensor] = {}
    for part, labels_of_clients in labels_of_parts.items():
        nonempty = [labels for labels in labels_of_clients if labels.size(0)]
        if nonempty:
            merged_labels[part] = torch.cat(nonempty)
    training_labels = merged_labels["training"]
    if num_classes is None:
        num_classes = max(task.count_classes(labels) for labels in merged_labels.values())
    if not task.fits(training_labels, num_classes):
        num_entries = task.count_classes(training_labels)
        raise ValueError(
            f"{type(task).__name__}: labels have {num_entries} entries but num_classes is {num_classes}: make the two "
            "equal, leave num_classes out, or choose a different task"
        )
    for part, labels in merged_labels.items():
        if len(task.out_of_range(labels, num_classes)):
            _raise_for_owner(part, labels_of_parts[part], num_classes, task, sets[part])
    return num_classes


def check_stray_labels(
    labels_of_parts: Mapping[str, list[Tensor]],
    network_outputs: int,
    task: Task,
    sets: Mapping[str, Sequence[Dataset[Any]]],
) -> None:
    """Raise a ValueError that names the client of a label beyond the network's outputs, if it looks like a mistake.

    It does if no image has the label that would need the next output. Otherwise the network has too few outputs, or
    they were counted wrongly, which is checked when it is built.
    """
    labels = torch.cat([labels for labels in labels_of_parts["training"] if labels.size(0)])
    if task.count_classes(labels) > network_outputs and not (labels == network_outputs).any():
        _raise_for_owner("training", labels_of_parts["training"], network_outputs, task, sets["training"])


def add_absent_classes(num_classes: int, network_outputs: int) -> int:
    """Return the number of classes, with those that no label shows but the network has an output for.

    A network with more than twice as many outputs as labels was probably built for other data, and is rejected later.
    """
    if not num_classes < network_outputs <= 2 * num_classes:
        return num_classes
    warnings.warn(
        f"labels up to {num_classes - 1} imply {num_classes} classes, but the network has {network_outputs} outputs, "
        f"so {network_outputs} classes are assumed: set num_classes={network_outputs} if the labels do not show all "
        f"classes, or build the network with {num_classes} outputs",
        stacklevel=4,
    )
    return network_outputs


def choose_task(task: Task | None, labels: Tensor) -> Task:
    """Return the task, by default that of the labels (N, ...) of a client.

    Raises:
        OptionError: If the labels are not those of the task.
        TypeError: If no task is chosen, and none is the default of the labels.
    """
    if task is None:
        return task_of_labels(labels)
    if not task.fits(labels):
        raise OptionError(
            f"task={task} needs {task.labels_per_image}, but the labels are {_describe_labels(labels)}; choose another "
            "task, or leave it out",
            name="task",
            value=task,
        )
    return task


def fit_task(task: Task, labels_of_parts: Mapping[str, list[Tensor]], num_classes: int, training_images: int) -> Task:
    """Check the task's options and the unknown labels, and compute the options that depend on the training labels.

    If the data are large and do not declare their labels, only some labels are known before training.

    Raises:
        ValueError: If an option does not match the number of classes, no training label is known, or the server's
            labelled images have unknown labels.
    """
    task.check_classes(num_classes)
    server_labels = labels_of_parts.get("validation", [])
    if not task.per_pixel and not all(bool(task.known(labels).all()) for labels in server_labels):
        raise ValueError(
            "the server's validation images have unknown labels (NaN or -1), and each of them is needed; fill them in, "
            "or take these images out"
        )
    training_labels = torch.cat([labels for labels in labels_of_parts["training"] if labels.size(0)])
    if len(training_labels) < training_images:
        if task.uses_all_targets or task.uses_client_counts:
            raise ValueError(
                f"task={task}: weights cannot be balanced, since the labels of the {training_images} training images "
                "are not known before training; give numbers, or data that declare their labels (targets=)"
            )
        return task
    if task.per_pixel:
        classes_of_pixels = training_labels[task.known(training_labels)].unique().tolist()
        if len(classes_of_pixels) < 2:
            raise _make_pixel_class_error(classes_of_pixels)
    elif not bool(task.known(training_labels).any()):
        raise ValueError("all training labels are unknown (NaN or -1), so nothing can be learned; add known labels")
    fitted_task = task.fitted_to(training_labels, num_classes)
    fitted_task.check_targets(training_labels)
    return fitted_task


def _check_inferred_classes(labels_of_parts: Mapping[str, list[Tensor]], task: Task) -> None:
    """Check that labels from which the number of classes is inferred number the classes.

    Raises:
        ValueError: If all training images are of one class, or most of the classes would have no image.

    Warns:
        UserWarning: If some of the classes would have no image, such as class 0 if the labels begin with 1.
    """
    values_of_parts = {}
    for part, labels_of_clients in labels_of_parts.items():
        labels = torch.cat([labels for labels in labels_of_clients if labels.size(0)])
        values_of_parts[part] = labels[task.known(labels)].unique()
    trained = values_of_parts["training"].tolist()
    if task.per_pixel and len(trained) < 2:
        raise _make_pixel_class_error(trained)
    if len(trained) == 1:
        raise ValueError(
            f"all training images have the label {trained[0]}, and nothing can be learned from one class: add images "
            "of a second class, or set num_classes if other clients have them. If the label is either present or "
            "absent, use float vectors (1,) of zeros and ones"
        )
    labels_in_use = torch.cat(list(values_of_parts.values())).unique().tolist()
    num_classes = labels_in_use[-1] + 1
    num_unused = num_classes - len(labels_in_use)
    # Negative labels are rejected later, with the client that has them.
    if labels_in_use[0] >= 0 and num_unused > len(labels_in_use):
        present_labels = abbreviated([str(label) for label in labels_in_use])
        raise ValueError(
            f"the labels go up to {labels_in_use[-1]}, which implies {num_classes} classes, but {num_unused} of them "
            f"have no image (those used are {present_labels}): number the classes from 0 without gaps, remove images "
            f"whose label marks them as unlabelled (often 255), or set num_classes={num_classes} if this is intended"
        )
    # Gaps in the numbers of masks are warned of with the clients' values side by side.
    if labels_in_use[0] >= 0 and num_unused and not task.per_pixel:
        _warn_of_unused_numbers(labels_in_use, num_classes)


def _warn_of_unused_numbers(labels_in_use: Sequence[int], num_classes: int) -> None:
    """Warn about classes that no image has, and which the network gets an output for.

    Args:
        labels_in_use: All labels, ascending.
        num_classes: Number of classes that the labels imply, one more than the largest.
    """
    unused = [str(label) for label in sorted({*range(num_classes)} - {*labels_in_use})]
    noun = "label" if len(unused) == 1 else "labels"
    remedy = "number the classes from 0 without gaps"
    if labels_in_use[0] > 0:
        remedy += f", here by subtracting {labels_in_use[0]} from each label"
    warnings.warn(
        f"no image has the {noun} {abbreviated(unused)}, but labels up to {labels_in_use[-1]} imply {num_classes} "
        f"classes, so the network gets {num_classes} outputs for {len(labels_in_use)} classes: {remedy}, or set "
        f"num_classes={num_classes} if this is intended",
        stacklevel=5,
    )


def warn_of_unknown_labels(task: Task, labels_of_clients: Sequence[Tensor], classes: Sequence[str] | None) -> None:
    """Warn about labels that are unknown in more than half of the training images."""
    nonempty = [labels for labels in labels_of_clients if labels.size(0)]
    if nonempty[0].ndim != 2:
        # Only vectors of labels have unknown ones in part of the images.
        return
    is_known = task.known(torch.cat(nonempty))
    num_images, num_labels = is_known.shape
    names = classes or range(num_labels)
    descriptions = []
    for name, num_known in zip(names, is_known.sum(0).tolist(), strict=True):
        if 2 * num_known < num_images:
            descriptions.append(f"{name} ({num_images - num_known})")
    if descriptions:
        remedy = ""
        if task.has_classes:
            remedy = (
                ". If a blank cell of a table means that the label is absent, set blank=absent "
                "(docs/tasks.md#unknown-labels)"
            )
        warnings.warn(
            f"labels are unknown in more than half of the {num_images} training images: {abbreviated(descriptions)}; "
            f"they are learned from the others only{remedy}",
            stacklevel=4,
        )


def _warn_of_one_hot(labels_of_clients: Sequence[Tensor]) -> None:
    """Warn about vectors that may be one-hot classes, since they are trained as independent labels."""
    labels = torch.cat(list(labels_of_clients))
    num_images, num_labels = labels.shape
    if num_images < 2 or num_labels < 2:
        return
    is_binary = bool(((labels == 0) | (labels == 1)).all())
    if is_binary and bool((labels.sum(1) == 1).all()):
        warnings.warn(
            f"each of the {num_images} training images has exactly one of {num_labels} labels, but they are trained as "
            "independent labels: if they are one-hot classes, pass the classes (labels.argmax(1))",
            stacklevel=4,
        )


def _make_pixel_class_error(class_indices: Sequence[int]) -> ValueError:
    """Return the error for training masks whose pixels have no class, or only one."""
    problem = "are ignored"
    if class_indices:
        problem = f"that count have the class {class_indices[0]}"
    return ValueError(
        f"all pixels of the training masks {problem}, so nothing can be learned; if a value of the masks that stands "
        "for a class is ignored, such as 255, list the values in mask_values, or set another ignore_index of the task"
    )


def _raise_for_owner(
    part: str, labels_of_clients: Sequence[Tensor], num_classes: int, task: Task, datasets: Sequence[Dataset[Any]]
) -> None:
    """Raise a ValueError that names the first client with a label out of range, and the first such mask."""
    for client, labels in enumerate(labels_of_clients):
        owner = "the server" if part == "validation" else f"client {client}"
        if not task.per_pixel:
            check_labels(f"{owner} has the {part} label", labels, num_classes, task)
            continue
        for index, mask in enumerate(labels):
            location = location_of(datasets[client], index)
            prefix = f"{owner}: the mask of {part} image {index}{location} has the class"
            check_labels(prefix, mask, num_classes, task)


def check_labels(prefix: str, labels: Tensor, num_classes: int, task: Task) -> None:
    """Raise a ValueError that begins with ``prefix`` for classes outside 0..K-1, or vectors outside [0, 1]."""
    out_of_range = task.out_of_range(labels, num_classes)
    if len(out_of_range):
        remedy = "correct the label"
        if task.has_classes and not (task.exclusive or task.per_pixel):
            remedy += ", or set task=Regression() to predict numbers"
        if task.exclusive or task.per_pixel:
            remedy += f" or num_classes (now {num_classes})"
        if task.per_pixel:
            remedy += ", or set ignore_index of the task Segmentation to the value of pixels without a class"
        raise ValueError(f"{prefix} {out_of_range[0].item()}, outside {task.describe_range(num_classes)}: {remedy}")


def _describe_labels(labels: Tensor) -> str:
    """Describe labels (N, ...) for messages."""
    try:
        return task_of_labels(labels).labels_per_image
    except TypeError:
        return describe_labels(labels)
