# SPDX-License-Identifier: Apache-2.0
"""Results of the last evaluation, which the module logs and a checkpoint keeps."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from perada.scores.failed_outputs import FailedOutputs


@dataclass(frozen=True)
class ShiftScores:
    """Scores on the shifted test sets.

    Attributes:
        scores: Scores by name, as they are logged.
        per_client: Scores of each client (M,) by name.
        kinds: By shift and kind of corruption, the scores at each severity.
        repr_of_shift: The ``repr`` of each shift by name: scores of other shifts are outdated.
        seconds: Time that scoring took.
    """

    scores: dict[str, float]
    per_client: dict[str, Tensor]
    kinds: dict[str, dict[str, Any]]
    repr_of_shift: dict[str, str]
    seconds: float

    def state_dict(self) -> dict[str, Any]:
        """Return the entry ``shifted`` of a checkpoint."""
        return {
            "scores": self.scores,
            "per_client": self.per_client,
            "kinds": self.kinds,
            "of": self.repr_of_shift,
            "seconds": self.seconds,
        }

    @classmethod
    def from_state_dict(cls, saved: dict[str, Any]) -> "ShiftScores | None":
        """Return the scores of a checkpoint's entry ``shifted``; None if it is empty."""
        if not saved:
            return None
        return cls(saved["scores"], saved["per_client"], saved["kinds"], saved["of"], saved["seconds"])


@dataclass
class EvaluationResults:
    """Results of the last evaluation of a run's models.

    Attributes:
        scores: Scores by name, as they are logged.
        per_client: Scores of each client (M,) by name.
        details: Numbers of images, confusions and scores of classes (:meth:`.Evaluation.details`).
        shifted: Scores on shifted test sets; None if there are none since the models last changed.
        failed_outputs: Models whose outputs were NaN or infinite for some images.
    """

    scores: dict[str, float] = field(default_factory=dict)
    per_client: dict[str, Tensor] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    shifted: ShiftScores | None = None
    failed_outputs: list[FailedOutputs] = field(default_factory=list)

    def include_shifted(self) -> None:
        """Add the scores on shifted test sets, if any, to the others."""
        if self.shifted is not None:
            # New dictionaries: a logger may hold the former ones.
            self.scores = self.scores | self.shifted.scores
            self.per_client = self.per_client | self.shifted.per_client
