# SPDX-License-Identifier: Apache-2.0
"""The smallest recipe of a run on digits, for tests to change."""

from typing import Any


def recipe(**parts: dict[str, Any]) -> dict[str, Any]:
    """A recipe for three clients; what is given for a part, such as ``federated``, is added to it."""
    plain: dict[str, dict[str, Any]] = {
        "trainer": {"max_epochs": 1, "accelerator": "cpu", "enable_progress_bar": False},
        "model": {"backbone": "test_resnet", "pretrained": False, "adapter": "head"},
        "data": {
            "dataset": "Digits",
            "partition": {"class_path": "IID", "init_args": {"num_clients": 3}},
            "train_limit": 60,
            "test_limit": 30,
            "image_size": 16,
        },
        "training": {"local_steps": 1},
    }
    return {name: plain.get(name, {}) | parts.get(name, {}) for name in {**plain, **parts}}
