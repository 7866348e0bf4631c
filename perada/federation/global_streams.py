# SPDX-License-Identifier: Apache-2.0
"""The random streams that belong to the process, from which a network of the caller's own may draw."""

import pickle
import random

import numpy as np
import torch


class GlobalStreams:
    """The states of the global random streams of torch (on the CPU), NumPy and Python at one moment.

    A network of the caller's own may draw from any of them. They belong to the process: several threads draw in an
    order that changes from run to run.
    """

    def __init__(self) -> None:
        self._torch_state = torch.default_generator.get_state()
        self._numpy_state = np.random.get_state(legacy=False)
        self._python_state = random.getstate()

    def are_unchanged(self) -> bool:
        """Return whether nothing has been drawn since."""
        now = GlobalStreams()
        return (
            torch.equal(self._torch_state, now._torch_state)
            # NumPy's state is a dictionary with an array, which == would not compare to one value.
            and pickle.dumps(self._numpy_state) == pickle.dumps(now._numpy_state)
            and self._python_state == now._python_state
        )

    def restore(self) -> None:
        """Set the streams to these states again."""
        torch.default_generator.set_state(self._torch_state)
        np.random.set_state(self._numpy_state)
        random.setstate(self._python_state)
