# SPDX-License-Identifier: Apache-2.0
"""Tasks of tests that are parametrised over the kind of labels."""

from perada.tasks import Classification, MultiLabel, Task


def task_of(multilabel: bool) -> Task:
    """Return the task for several labels per image, or for one class."""
    return MultiLabel() if multilabel else Classification()
