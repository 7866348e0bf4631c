# SPDX-License-Identifier: Apache-2.0
"""What a run measured, as frames of pandas."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pandas import DataFrame


def rounds_frame(rounds: Sequence[dict[str, Any]]) -> "DataFrame":
    """The rounds (see :meth:`perada.Run.history`)."""
    try:
        import pandas
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"Run.history needs pandas, which is not installed ({error}); pip install 'perada[report]', or use "
            "Run.metrics['rounds']"
        ) from error
    return pandas.DataFrame(rounds, columns=None if rounds else ["round"]).set_index("round")
