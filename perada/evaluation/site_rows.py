# SPDX-License-Identifier: Apache-2.0
"""The rows that a site sends of its own scores, if its file allows it: values with intervals."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from perada.core.text import printable
from perada.evaluation.pooled import LARGEST, Integers, Summaries
from perada.evaluation.rows import AUROC, RECALL, ScoreRow, pairs_of
from perada.scores.intervals import FEWEST

_SCALE = 10**6
"""Values are rounded to multiples of one divided by this."""
_MISSING = -LARGEST
"""Stands for NaN, and for a row that there is not."""
_WIDTH = 4
"""Integers of a row: value, both ends of the interval, and whether the support suffices to rank."""


class RowKey(NamedTuple):
    """What a row is about."""

    model: str
    versus: str | None
    score: str
    class_name: str | None


def row_keys(summaries: Summaries) -> list[RowKey]:
    """Return what the rows of a site may be about, in order."""
    scores = [score.name for score in summaries.scores]
    if summaries.auroc_classes:
        scores.append(AUROC)
    keys = []
    for model in summaries.models:
        keys += [RowKey(model, None, score, None) for score in scores]
        for score in (RECALL, AUROC):
            if scores != [score] and AUROC in scores:
                keys += [RowKey(model, None, score, name) for name in summaries.class_names]
    for first, second in pairs_of(summaries.models):
        keys += [RowKey(first, second, score, None) for score in scores]
    return keys


def encode_rows(summaries: Summaries, summary: Integers) -> list[int]:
    """Return a site's own rows as integers.

    How many images they rest on is not among them, but follows from Wilson's intervals.

    Args:
        summaries: Layout of the summary.
        summary: Summary (V,) of the site.
    """
    rows = {}
    for row in summaries.rows("", summary):
        rows[RowKey(row.model, row.versus, row.score, row.class_name)] = row
    integers: list[int] = []
    for key in row_keys(summaries):
        row_of_key = rows.get(key)
        if row_of_key is None:
            integers += [_MISSING] * _WIDTH
            continue
        integers += [_as_integer(value) for value in (row_of_key.value, row_of_key.low, row_of_key.high)]
        integers.append(int(row_of_key.is_ranked))
    return integers


def _as_integer(value: float) -> int:
    """Return a value as an integer; a large one as missing."""
    scaled = value * _SCALE
    return round(scaled) if math.isfinite(scaled) and abs(scaled) < LARGEST else _MISSING


def decode_rows(summaries: Summaries, site: str, integers: Sequence[int]) -> list[ScoreRow]:
    """Return the rows of a site. Their numbers of images are 0, since they are not sent."""
    rows = []
    for place, key in enumerate(row_keys(summaries)):
        value, low, high, is_ranked = (int(each) for each in integers[_WIDTH * place : _WIDTH * (place + 1)])
        if value == _MISSING == is_ranked:
            continue
        numbers = [math.nan if each == _MISSING else each / _SCALE for each in (value, low, high)]
        rows.append(
            ScoreRow(
                client=printable(site),
                model=key.model,
                versus=key.versus,
                score=key.score,
                class_name=key.class_name,
                value=numbers[0],
                low=numbers[1],
                high=numbers[2],
                support=FEWEST if is_ranked == 1 else 0,
                images=0,
            )
        )
    return rows


def row_size(summaries: Summaries) -> int:
    """Return the number of integers of a site's own rows."""
    return _WIDTH * len(row_keys(summaries))
