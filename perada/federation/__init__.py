# SPDX-License-Identifier: Apache-2.0
"""A round of a federation without Lightning: states, local training, the server step, evaluation."""

from perada.federation.federation import Federation
from perada.federation.options import Evaluation, Training

__all__ = ["Evaluation", "Federation", "Training"]
