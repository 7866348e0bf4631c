# SPDX-License-Identifier: Apache-2.0
"""Figures of a comparison: what is drawn where."""

import math

import numpy as np
import pytest
from PIL import Image

from perada.studies.compare.comparison import Comparison
from perada.studies.compare.figures import (
    CLIENTS,
    HOME_AND_ABROAD,
    draw_clients,
    draw_figures,
    draw_home_and_abroad,
    save_figure,
)
from tests.studies.compare.test_verdict import NAMES, records_of, scores


@pytest.fixture
def comparison():
    alone = records_of("standalone", scores(0.9), scores(0.3), megabytes=0)
    shared = records_of("fedavg", scores(0.7), scores(0.7, seed=1))
    return Comparison([*alone, *shared])


def test_rows_are_drawn_at_their_scores_with_the_intervals_of_their_differences(comparison):
    figure = draw_home_and_abroad(comparison, "fedavg")
    (axes,) = figure.axes
    places = {text.get_text(): text.xy for text in axes.texts}
    for row in comparison.rows:
        assert places[row.name] == pytest.approx((100 * row.mean("own"), 100 * row.mean("all")))
    # fedavg is behind on own images, and standalone on those of all: each has one bar, the interval of its difference.
    widths = []
    for container in axes.containers:
        for bars in container[2]:
            (segment,) = bars.get_segments()
            widths.append(float(np.abs(segment[1] - segment[0]).max()))
    expected = []
    for criterion in ("own", "all"):
        (entry,) = comparison.differences(criterion)
        expected.append(100 * (entry.high - entry.low))
    assert sorted(widths) == pytest.approx(sorted(expected))


def test_each_client_has_a_line_between_its_two_scores(comparison):
    figure = draw_clients(comparison, "standalone", "fedavg")
    (axes,) = figure.axes
    standalone, fedavg = (row.scores["own"].mean(0) for row in comparison.rows)
    lines = [line.get_ydata() for line in axes.lines]
    assert np.array(lines) == pytest.approx(100 * np.stack([standalone, fedavg], 1))
    assert [text.get_text() for text in axes.texts] == NAMES
    # All lose.
    assert len({line.get_color() for line in axes.lines}) == 1


def test_a_client_without_a_score_has_no_line():
    personal_scores = scores(0.9)
    personal_scores[:, 2] = math.nan
    records = [records_of(label, personal_scores, scores(0.5)) for label in ("standalone", "fedavg")]
    for record in [*records[0], *records[1]]:
        record["clients"]["personal/local_test"][2] = None
    comparison = Comparison([*records[0], *records[1]])
    (axes,) = draw_clients(comparison, "standalone", "fedavg").axes
    assert [text.get_text() for text in axes.texts] == [name for name in NAMES if name != NAMES[2]]


@pytest.mark.parametrize(("first", "criterion"), [("standalon", "own"), ("standalone", "ouwn")])
def test_unknown_rows_and_criteria_are_rejected(comparison, first, criterion):
    with pytest.raises(ValueError, match=r"standalone|own"):
        draw_clients(comparison, first, "fedavg", criterion)


def test_the_files_are_pictures(comparison, tmp_path):
    figures = draw_figures(comparison)
    assert set(figures) == {HOME_AND_ABROAD, CLIENTS}
    for name, figure in figures.items():
        save_figure(figure, tmp_path / name)
        with Image.open(tmp_path / name) as picture:
            assert min(picture.size) > 400
