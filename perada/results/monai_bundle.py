# SPDX-License-Identifier: Apache-2.0
"""The files of a MONAI bundle beside its ONNX file: metadata, the configuration of an inference, and its code.

The layout and the keys are those of the specification of MONAI 1.6
(https://docs.monai.io/en/stable/mb_specification.html).
"""

import json
import shutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from perada.core.checks import OptionError
from perada.data.preprocessing import Preprocessing
from perada.tasks import Task

MODEL_FILE = "models/model.onnx"
README_FILE = "docs/README.md"
METADATA_FILE = "configs/metadata.json"
INFERENCE_FILE = "configs/inference.json"
SCRIPTS = ("scripts/__init__.py", "scripts/image_files.py", "scripts/networks.py")
BUNDLE_FILES = (MODEL_FILE, METADATA_FILE, INFERENCE_FILE, *SCRIPTS)
"""All files but the README."""
_SCHEMA = "https://project-monai.github.io/schema/meta_schema_20240725.json"
_SCRIPTS_FOLDER = Path(__file__).parent / "monai_scripts"
_TESTED_VERSIONS = {"monai": "1.6.1", "pytorch-ignite": "0.5.5"}
"""Versions that are recorded if these packages, which perada does not need, are not installed."""
_IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff")
_ONE = "image"
_OUTPUT = "pred"

Config = dict[str, Any]


@dataclass(frozen=True)
class BundleFacts:
    """What the files of a bundle state about its model.

    Attributes:
        preprocessing: Preprocessing of the images.
        task: What the model predicts.
        outputs: Names of the model's K outputs.
        title: Which model it is.
        description: A sentence on the run that trained it.
    """

    preprocessing: Preprocessing
    task: Task
    outputs: tuple[str, ...]
    title: str
    description: str


def write_bundle_files(folder: Path, facts: BundleFacts) -> None:
    """Write all files of a bundle but the ONNX file and the README.

    Args:
        folder: The bundle, which has the folders of these files.
        facts: What they state about the model.

    Raises:
        OptionError: If MONAI's transforms do not compute the predictions of the task.
    """
    files = {METADATA_FILE: _make_metadata(facts), INFERENCE_FILE: _make_inference(facts)}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=4, ensure_ascii=False) + "\n", encoding="utf-8")
    for script in SCRIPTS:
        shutil.copyfile(_SCRIPTS_FOLDER / Path(script).name, folder / script)


def _version_of(package: str) -> str:
    """Return the version of a package that is installed, or else the one that bundles are tested with."""
    try:
        return version(package)
    except PackageNotFoundError:
        return _TESTED_VERSIONS[package]


def _make_metadata(facts: BundleFacts) -> Config:
    """Return the content of ``metadata.json``."""
    return {
        "schema": _SCHEMA,
        "version": "0.1.0",
        "changelog": {"0.1.0": f"exported by perada {version('perada')}"},
        "monai_version": _version_of("monai"),
        "pytorch_version": version("torch").partition("+")[0],
        "numpy_version": version("numpy"),
        "required_packages_version": {name: _version_of(name) for name in ("onnxruntime", "pillow", "pytorch-ignite")},
        "name": facts.title,
        "task": f"{facts.task.labels_per_image}: {', '.join(facts.outputs)}",
        "description": facts.description,
        "authors": "not stated",
        "copyright": "not stated",
        "intended_use": "Research. Not for diagnosis, unless its users have validated it for this.",
        "network_data_format": {
            "inputs": {_ONE: _input_format(facts.preprocessing)},
            "outputs": {_OUTPUT: _output_format(facts)},
            "post_processed_outputs": {_OUTPUT: _prediction_format(facts)},
        },
    }


def _input_format(preprocessing: Preprocessing) -> Config:
    """Return the format of prepared images."""
    channels, height, width = preprocessing.shape
    names = {1: ["grey"], 3: ["red", "green", "blue"]}.get(
        channels, [f"channel {number}" for number in range(channels)]
    )
    value_range: list[float] = []
    if preprocessing.kind == "uint8":
        scales = list(zip(preprocessing.mean, preprocessing.std, strict=True))
        value_range = [min(-mean / std for mean, std in scales), max((1 - mean) / std for mean, std in scales)]
    return {
        "type": "image",
        "format": "magnitude",
        "modality": "n/a",
        "num_channels": channels,
        "spatial_shape": [height, width],
        "dtype": "float32",
        "value_range": value_range,
        "is_patch_data": False,
        "channel_def": _numbered_names(names),
    }


def _output_format(facts: BundleFacts) -> Config:
    """Return the format of the network's outputs."""
    return {
        "type": "image" if facts.task.per_pixel else "tuples",
        "format": "logits" if facts.task.has_classes else "numbers",
        "num_channels": len(facts.outputs),
        "spatial_shape": list(facts.preprocessing.shape[1:]) if facts.task.per_pixel else [],
        "dtype": "float32",
        "value_range": [],
        "is_patch_data": False,
        "channel_def": _numbered_names(facts.outputs),
    }


def _prediction_format(facts: BundleFacts) -> Config:
    """Return the format of what the configuration writes: masks, probabilities or numbers."""
    outputs = _output_format(facts)
    if facts.task.per_pixel:
        return outputs | {"format": "segmentation", "num_channels": 1, "value_range": [0, len(facts.outputs) - 1]}
    if facts.task.has_classes:
        return outputs | {"type": "probabilities", "format": "classes", "value_range": [0, 1]}
    return outputs


def _numbered_names(names: list[str] | tuple[str, ...]) -> dict[str, str]:
    return {str(number): name for number, name in enumerate(names)}


def _make_inference(facts: BundleFacts) -> Config:
    """Return the content of ``inference.json``, whose evaluator writes predictions of a folder of images."""
    suffixes = _IMAGE_SUFFIXES if reads_image_files(facts.preprocessing) else (".npy",)
    return {
        "imports": ["$import pathlib", "$import torch"],
        "bundle_root": ".",
        "dataset_dir": "$@bundle_root + '/images'",
        "output_dir": "$@bundle_root + '/eval'",
        "device": "$torch.device('cpu')",
        "providers": ["CPUExecutionProvider"],
        "batch_size": 16,
        "network_def": {
            "_target_": "scripts.networks.OnnxNetwork",
            "path": f"$@bundle_root + '/{MODEL_FILE}'",
            "providers": "@providers",
        },
        "files": "$sorted(str(path) for path in pathlib.Path(@dataset_dir).rglob('*') "
        f"if path.suffix.lower() in {suffixes})",
        "preprocessing": {"_target_": "Compose", "transforms": _make_transforms(facts.preprocessing)},
        "dataset": {
            "_target_": "Dataset",
            "data": f"$[{{'{_ONE}': path}} for path in @files]",
            "transform": "@preprocessing",
        },
        "dataloader": {
            "_target_": "DataLoader",
            "dataset": "@dataset",
            "batch_size": "@batch_size",
            "shuffle": False,
            "num_workers": 0,
        },
        "inferer": {"_target_": "SimpleInferer"},
        "postprocessing": {"_target_": "Compose", "transforms": _make_postprocessing(facts)},
        "handlers": _make_handlers(facts.task),
        "evaluator": {
            "_target_": "SupervisedEvaluator",
            "device": "@device",
            "val_data_loader": "@dataloader",
            "network": "@network_def",
            "inferer": "@inferer",
            "postprocessing": "@postprocessing",
            "val_handlers": "@handlers",
        },
        "run": ["$@evaluator.run()"],
    }


def reads_image_files(preprocessing: Preprocessing) -> bool:
    """Return whether image files have the channels of the training images; otherwise arrays are read."""
    return preprocessing.kind == "uint8" and preprocessing.channels in (1, 3)


def _make_transforms(preprocessing: Preprocessing) -> list[Config]:
    """Return MONAI's transforms that prepare an image as :meth:`.Preprocessing.batch` does."""
    if not reads_image_files(preprocessing):
        # Arrays (channels, H, W).
        transforms: list[Config] = [{"_target_": "LoadImaged", "keys": _ONE, "reader": "NumpyReader", "channel_dim": 0}]
    else:
        transforms = [
            {
                "_target_": "LoadImaged",
                "keys": _ONE,
                "reader": "PILReader",
                # (H, W) as in perada, not (W, H).
                "reverse_indexing": False,
                "converter": {
                    "_target_": "scripts.image_files.to_8_bits",
                    "_mode_": "callable",
                    "mode": "L" if preprocessing.channels == 1 else "RGB",
                },
            }
        ]
    transforms.append({"_target_": "EnsureChannelFirstd", "keys": _ONE})
    if preprocessing.kind != "uint8":
        return transforms
    for step in preprocessing.resize:
        if step.rounded:
            transforms.append(_make_resize(step.height, step.width, rounded=True))
    transforms.append(
        {
            "_target_": "ScaleIntensityRanged",
            "keys": _ONE,
            "a_min": 0.0,
            "a_max": 255.0,
            "b_min": 0.0,
            "b_max": 1.0,
        }
    )
    if preprocessing.last_size is not None:
        transforms.append(_make_resize(preprocessing.last_size, preprocessing.last_size, rounded=False))
    num_channels = preprocessing.shape[0]
    if num_channels != preprocessing.channels:
        transforms.append({"_target_": "RepeatChanneld", "keys": _ONE, "repeats": num_channels})
    transforms.append(
        {
            "_target_": "NormalizeIntensityd",
            "keys": _ONE,
            "subtrahend": list(preprocessing.mean),
            "divisor": list(preprocessing.std),
            "channel_wise": True,
        }
    )
    return transforms


def _make_resize(height: int, width: int, *, rounded: bool) -> Config:
    """Return the transform that resizes an image, bilinear with antialiasing, which MONAI's ``Resized`` lacks.

    Args:
        height: New height.
        width: New width.
        rounded: Whether the values are integers from 0 to 255, before and after.
    """
    resize = f"torch.nn.functional.interpolate({{}}, ({height}, {width}), mode='bilinear', antialias=True)[0]"
    function = f"$lambda image: {resize.format('image[None]')}"
    if rounded:
        # PyTorch resizes integers in their own arithmetic, whose results differ by up to 1 from those of numbers.
        function = f"$lambda image: {resize.format('image[None].to(torch.uint8)')}.float()"
    return {"_target_": "Lambdad", "keys": _ONE, "func": function}


def _make_postprocessing(facts: BundleFacts) -> list[Config]:
    """Return MONAI's transforms from outputs of the network to predictions.

    Raises:
        OptionError: If there are none.
    """
    task = facts.task
    num_outputs = len(facts.outputs)
    if not task.has_classes:
        # Predictions of numbers are affine functions of the outputs.
        offset = task.predictions(torch.zeros(1, num_outputs, dtype=torch.float64))[0]
        factor = task.predictions(torch.ones(1, num_outputs, dtype=torch.float64))[0] - offset
        return [
            {
                "_target_": "Lambdad",
                "keys": _OUTPUT,
                "func": f"$lambda outputs: torch.tensor({offset.tolist()}) + torch.tensor({factor.tolist()}) * outputs",
            }
        ]
    logits = torch.randn(8, num_outputs, generator=torch.Generator().manual_seed(0))
    activations = {"softmax": logits.softmax(-1), "sigmoid": logits.sigmoid()}
    expected = task.predictions(logits)
    activation = next((name for name, values in activations.items() if torch.allclose(values, expected)), None)
    if activation is None:
        raise OptionError(
            f"format='monai' is not supported for the task {task}, whose probabilities are neither the softmax nor the "
            "sigmoid of the outputs; choose the format onnx",
            name="format",
            value="monai",
        )
    transforms: list[Config] = [{"_target_": "Activationsd", "keys": _OUTPUT, activation: True}]
    if task.per_pixel:
        transforms.append({"_target_": "AsDiscreted", "keys": _OUTPUT, "argmax": True})
        # Files of Pillow are written from (W, H).
        transforms.append({"_target_": "Transposed", "keys": _OUTPUT, "indices": [0, 2, 1]})
        transforms.append(
            {
                "_target_": "SaveImaged",
                "keys": _OUTPUT,
                "output_dir": "@output_dir",
                "output_postfix": "mask",
                "output_ext": ".png",
                "output_dtype": "$torch.uint8",
                "resample": False,
                "separate_folder": False,
                "data_root_dir": "@dataset_dir",
            }
        )
    return transforms


def _make_handlers(task: Task) -> list[Config]:
    """Return the handlers of the evaluator: predictions that are not masks go into a table."""
    if task.per_pixel:
        return []
    return [
        {
            "_target_": "ClassificationSaver",
            "output_dir": "@output_dir",
            "filename": "predictions.csv",
            "batch_transform": f"$lambda batch: [sample['{_ONE}'].meta for sample in batch]",
            "output_transform": f"$lambda outputs: [output['{_OUTPUT}'] for output in outputs]",
        }
    ]
