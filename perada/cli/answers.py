# SPDX-License-Identifier: Apache-2.0
"""Answers to the questions of `perada init`. Nothing large is imported, so that a wrong one is found at once."""

from pathlib import Path
from typing import Literal, get_args

import yaml

from perada.cli.sources import TABLES
from perada.core.checks import check_choice, check_integer
from perada.privacy.accounting import check_target_epsilon

TaskName = Literal["classes", "labels", "numbers", "masks"]
"""What is learnt from the labels: one class or several labels per image, numbers, or a class for each pixel."""
TASKS = get_args(TaskName)


def check_answer(name: str, answer: str) -> None:
    """Check one answer, as it was typed; an empty one for images, task or epsilon is valid.

    Raises:
        ValueError: If it is invalid.
        FileNotFoundError: If the images are not there.
    """
    if name == "algorithm":
        from perada.algorithms import make_algorithm

        make_algorithm(answer)
    elif name == "rounds":
        check_integer("rounds", yaml.safe_load(answer))
    elif name == "epsilon" and answer:
        check_target_epsilon("epsilon", yaml.safe_load(answer))
    elif name == "task" and answer:
        check_choice("task", answer, TASKS)
    elif name == "images" and answer:
        _check_images(Path(answer))


def _check_images(path: Path) -> None:
    """Raise a FileNotFoundError unless a path is a folder or a table."""
    is_table = path.is_file() and path.suffix.lower() in TABLES
    if not path.is_dir() and not is_table:
        problem = "is not a table of a known format" if path.exists() else "does not exist"
        raise FileNotFoundError(f"images={str(path)!r} {problem}; pass a folder or a table ({', '.join(TABLES)})")
