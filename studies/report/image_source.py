# SPDX-License-Identifier: Apache-2.0
"""Which images a run was trained on, where its configuration names a published set or simulated scanners."""

from typing import Any

import yaml

from perada.studies.report.records import RunRecord

PUBLISHED = {
    "Digits": "scikit-learn’s handwritten digits",
    "MNIST": "the handwritten digits of MNIST",
    "FashionMNIST": "the pictures of clothes of Fashion-MNIST",
    "CIFAR10": "the photographs of CIFAR-10",
    "CIFAR100": "the photographs of CIFAR-100",
    "STL10": "the photographs of STL-10",
    "OfficeHome": "the pictures of Office-Home",
    "CheXpert": "the chest X-rays of CheXpert",
    "OpenImage": "the photographs of Open Images",
    "Shakespeare": "the lines of Shakespeare",
}
"""What the published sets that ship with perada hold, by the names of their classes."""
SIMULATED_SCANNERS = "Scanners"
"""Class that simulates scanners."""
MAX_NESTED_SETS = 10
"""Largest number of sets within one another, so that a broken file cannot exhaust the stack."""


def describe_images(record: RunRecord) -> str:
    """Return a sentence that the images are those of a published set, or their scanners simulated.

    Returns:
        Empty for the images of others, and for runs without a configuration.
    """
    names = names_of_sets(record.config)
    parts = [PUBLISHED[name] for name in names if name in PUBLISHED]
    sentence = ""
    if parts:
        sentence = f"The images are {parts[0]}, divided among simulated participants"
    if SIMULATED_SCANNERS in names:
        scanners = "the scanners, which change how they look, are simulated, too"
        sentence = (
            f"{sentence}; {scanners}" if sentence else "The scanners, which change how images look, are simulated"
        )
    return f"{sentence}." if sentence else ""


def names_of_sets(config_text: str) -> list[str]:
    """Return the classes of the training images in the text of a ``config.yaml``, the outermost first.

    >>> names_of_sets("data: {dataset: {class_path: perada.data.Scanners, init_args: {dataset: Digits}}}")
    ['Scanners', 'Digits']
    """
    try:
        content = yaml.safe_load(config_text)
    except yaml.YAMLError:
        return []
    data = content.get("data") if isinstance(content, dict) else None
    entry: Any = data.get("dataset") if isinstance(data, dict) else None
    names: list[str] = []
    while entry is not None and len(names) < MAX_NESTED_SETS:
        options: Any = None
        if isinstance(entry, dict):
            options = entry.get("init_args")
            entry = entry.get("class_path")
        if not isinstance(entry, str):
            break
        names.append(entry.rpartition(".")[2])
        entry = options.get("dataset") if isinstance(options, dict) else None
    return names
