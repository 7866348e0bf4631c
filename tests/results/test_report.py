# SPDX-License-Identifier: Apache-2.0
"""Tables of what a run measured."""

import json
import math

import pytest

from perada.results.report import client_table, mode_line, percent, table, title
from perada.studies.report.records import run_report


def cells(text):
    """The cells of a Markdown table, without its rule."""
    lines = text.splitlines()
    assert len({len(line) for line in lines}) == 1
    assert set(lines[1]) <= set("|-:")
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in [lines[0], *lines[2:]]]


def test_an_ensembles_models_have_a_line_and_columns(tmp_path):
    scores = {"global/best_mode": 0.5, "global/worst_mode": 0.25, "global/entropy": 1.0}
    assert mode_line(scores) == "best mode 50.00, worst mode 25.00, entropy of the modes 1.0000 nats"
    assert mode_line({"global/global_test": 0.5}) == ""
    header = ["epoch", "global/global_test", *scores]
    (tmp_path / "metrics.csv").write_text(f"{','.join(header)}\n0,0.4,0.5,0.25,1.0\n")
    cells = run_report(tmp_path).splitlines()[-1].split("|")
    assert [cell.strip() for cell in cells[2:-1]] == ["40.00", "50.00", "25.00", "1.0000 nats"]


def test_shifts_have_columns_and_tables(tmp_path):
    header = ["epoch", "personal/fog", "personal/fog_std", "global/fog"]
    (tmp_path / "metrics.csv").write_text(f"{','.join(header)}\n0,,,\n1,0.5,0.1,0.25\n")
    curve = {"severity": [1, 4], "personal": [0.75, 0.25], "personal_std": [0.0, 0.1], "global": [0.5, 0.0]}
    noise = {"severity": [4], "personal": [0.4], "personal_std": [0.0], "global": [0.3]}
    (tmp_path / "shifts.json").write_text(json.dumps({"bad": {"fog": curve, "shot_noise": noise}}))
    rounds, personal, shared = map(cells, run_report(tmp_path).split("\n\n"))
    assert rounds == [["round", "fog, personal models", "fog, global model"], ["1", "", ""], ["2", "50.00", "25.00"]]
    assert personal == [
        ["bad, personal models", "severity 1", "severity 4", "mean"],
        ["fog", "75.00", "25.00", "50.00"],
        ["shot_noise", "–", "40.00", "40.00"],
    ]
    assert [row[-1] for row in shared] == ["mean", "25.00", "30.00"]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"bad": {"fog": {"personal": [1]}}}',
        '{"bad": {"fog": {"severity": [1], "global": ["x"]}}}',
        '{"bad": 3}',
    ],
)
def test_broken_shifts_are_named(tmp_path, text):
    (tmp_path / "metrics.csv").write_text("epoch,global/fog\n0,0.5\n")
    (tmp_path / "shifts.json").write_text(text)
    with pytest.raises(ValueError, match=r"shifts\.json' is broken"):
        run_report(tmp_path)


def test_the_weighted_f1_is_a_score_and_no_weighted_mean(tmp_path):
    header = [
        "epoch",
        "personal/local_test_f1_weighted",
        "personal/local_test_f1_weighted_weighted",
        "personal/fog_std",
    ]
    (tmp_path / "metrics.csv").write_text(f"{','.join(header)}\n0,0.5,0.25,0.1\n")
    assert cells(run_report(tmp_path)) == [["round", "own images, weighted F1"], ["1", "50.00"]]
    assert title(header[2]) == "own images, weighted F1, weighted by images"


def test_table_is_markdown():
    text = table(["name", "x"], [["a", "1.50"], ["longer", ""]])
    assert cells(text) == [["name", "x"], ["a", "1.50"], ["longer", ""]]
    assert text.splitlines()[1] == "|--------|-----:|"


def test_percent():
    assert [percent(value) for value in (0.0, 0.12345, 1.0, math.nan)] == ["0.00", "12.35", "100.00", "–"]


def test_client_table_leaves_missing_scores_out_of_the_mean():
    scores = {"personal/local_test": [0.5, math.nan, 1.0], "other": [0.0, 0.25, 0.5]}
    assert cells(client_table(scores, [7, 8, 9])) == [
        ["client", "training images", "own images", "other"],
        ["0", "7", "50.00", "0.00"],
        ["1", "8", "–", "25.00"],
        ["2", "9", "100.00", "50.00"],
        ["mean ± std", "", "75.00 ± 25.00", "25.00 ± 20.41"],
    ]


def test_of_many_clients_the_first_are_shown_and_the_spread_of_all():
    scores = {"personal/local_test": [client / 100 for client in range(101)]}
    rows = cells(client_table(scores, range(1, 102)))
    assert [row[0] for row in rows] == ["client", *map(str, range(20)), "… 81 more", "mean ± std"]
    assert rows[20] == ["19", "20", "19.00"]
    assert rows[-1][2] == "50.00 ± 29.15"  # √((101² − 1) / 12) / 100
    assert len(cells(client_table({}, range(20)))) == 1 + 20 + 1


def test_client_table_without_any_score():
    (*_, last) = cells(client_table({"personal/local_test": [math.nan, math.nan]}, [1, 2]))
    assert last == ["mean ± std", "", "– ± –"]


def test_epsilon_is_a_number_and_no_share():
    scores = {
        "personal/local_test": [0.5, 1.0],
        "privacy/server_epsilon": [1.0, 2.5],
        "privacy/release_epsilon": [3.0, math.inf],
    }
    assert cells(client_table(scores, [7, 8])) == [
        ["client", "training images", "own images", "ε server", "ε release"],
        ["0", "7", "50.00", "1.00", "3.00"],
        ["1", "8", "100.00", "2.50", "∞"],
        ["mean ± std", "", "75.00 ± 25.00", "1.75 ± 0.75", "∞"],
    ]


def test_run_report_shows_epsilon(tmp_path):
    (tmp_path / "metrics.csv").write_text(
        "epoch,step,personal/local_test,privacy/server_epsilon_mean,privacy/release_epsilon_mean,"
        "privacy/release_epsilon_max,privacy/client_epsilon_max,privacy/client_norm\n"
        "0,2,0.5,,,,,\n"
        "0,2,,1.234,2.0,2.5,0.5,1.0\n"
        "1,5,0.75,2.345,inf,inf,0.625,1.0\n"
    )
    assert cells(run_report(tmp_path)) == [
        ["round", "own images", "ε server", "ε release", "ε client (max)"],
        ["1", "50.00", "1.23", "2.00", "0.50"],
        ["2", "75.00", "2.35", "∞", "0.62"],
    ]


def test_run_report_joins_the_rows_of_a_round(tmp_path):
    (tmp_path / "metrics.csv").write_text(
        "epoch,step,train/local_loss,personal/local_test,personal/local_test_std,global/global_test\n"
        "1,5,0.25,,,\n"
        "0,2,,0.5,0.1,0.25\n"
        "0,2,0.75,,,\n"
        "1,5,,0.625,0.2,\n"
        "1,5,,0.75,0.2,\n"
    )
    assert cells(run_report(tmp_path)) == [
        ["round", "training loss, local", "own images", "global model"],
        ["1", "0.7500", "50.00", "25.00"],
        ["2", "0.2500", "75.00", ""],
    ]


def test_run_report_of_a_real_run(tiny, tmp_path):

    run = tiny.finetune(rounds=2, default_root_dir=str(tmp_path))
    header, *rounds = cells(run_report(tmp_path / "lightning_logs" / "version_0"))
    assert header[0] == "round"
    for record, row in zip(run.metrics["rounds"], rounds, strict=True):
        assert row[0] == str(record["round"] + 1)
        for heading, cell in zip(header[1:], row[1:], strict=True):
            name = next(name for name in record if title(name) == heading)
            shown = f"{record[name]:.4f}" if name.startswith("train/") else f"{100 * record[name]:.2f}"
            assert float(cell) == pytest.approx(float(shown), abs=0.011)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"has no metrics.csv; pass a run folder"),
        ("", "no training rounds"),
        ("name,x\na,1\n", "no training rounds"),
    ],
)
def test_run_report_of_something_else_is_rejected(tmp_path, content, message):
    if content is not None:
        (tmp_path / "metrics.csv").write_text(content)
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        run_report(tmp_path)
