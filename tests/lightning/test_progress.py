# SPDX-License-Identifier: Apache-2.0
"""What a run says of its progress where there is no terminal, and what a rejected one leaves behind."""

import re
import sys

from perada.lightning import RoundLines, RoundProgressBar, round_progress
from tests.rejections import rejects

SHOWN = {
    "personal/local_test": "own images",
    "personal/global_test": "all clients' images",
    "global/global_test": "global model",
}
"""The scores for which a line has room."""


def test_a_file_gets_a_line_for_each_round(tiny, tmp_path, capsys):
    options = tiny.options | {"enable_progress_bar": True, "default_root_dir": tmp_path, "check_val_every_n_epoch": 2}
    run = tiny.finetune(rounds=4, **options)
    error_output = capsys.readouterr().err
    assert "\r" not in error_output
    lines = [line for line in error_output.splitlines() if line.startswith("Round ")]
    assert [line.split(":")[0] for line in lines] == [f"Round {n}/4" for n in range(1, 5)]
    assert all(re.match(r"Round \d/4: \d+\.\d s", line) for line in lines)
    assert [" left" in line for line in lines] == [True, True, True, False]
    for line, record in zip(lines, run.metrics["rounds"], strict=True):
        shown = dict(re.findall(r", ([^,]+) ([\d.]+) %", line))
        assert shown == {words: f"{100 * record[name]:.2f}" for name, words in SHOWN.items() if name in record}
    assert ["own images" in line for line in lines] == [False, True, False, True]


def test_a_terminal_gets_the_same_lines_above_its_bar(tiny, tmp_path, capsys):
    options = tiny.options | {"default_root_dir": tmp_path, "check_val_every_n_epoch": 2}
    options |= {"enable_progress_bar": True, "callbacks": [RoundProgressBar()]}
    run = tiny.finetune(rounds=2, **options)
    # Bars end with a carriage return, or move the cursor up.
    shown = re.split(r"[\r\n]|\x1b\[A", capsys.readouterr().err)
    lines = [line for line in shown if re.match(r"Round \d/2: \d+\.\d s", line)]
    assert [line.split(":")[0] for line in lines] == ["Round 1/2", "Round 2/2"]
    scores = dict(re.findall(r", ([^,]+) ([\d.]+) %", lines[1]))
    record = run.metrics["rounds"][1]
    assert scores == {words: f"{100 * record[name]:.2f}" for name, words in SHOWN.items()}
    # The bar itself, which a narrow terminal cuts off, repeats none of them.
    assert not any("own images" in line for line in shown if line not in lines)


def test_a_terminal_and_a_notebook_get_bars(monkeypatch):
    assert isinstance(round_progress(), RoundLines)
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    assert isinstance(round_progress(), RoundProgressBar)
    monkeypatch.delitem(sys.modules, "ipykernel")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert isinstance(round_progress(), RoundProgressBar)


def test_a_rejected_run_leaves_no_folder(tiny, tmp_path):
    options = tiny.options | {"default_root_dir": tmp_path}
    with rejects("clients_per_round", 9):
        tiny.finetune(rounds=1, **options | {"clients_per_round": 9})
    assert [*tmp_path.iterdir()] == []
    tiny.finetune(rounds=1, **options)
    with rejects("clients_per_round", 9):
        tiny.finetune(rounds=1, **options | {"clients_per_round": 9})
    assert [path.name for path in (tmp_path / "lightning_logs").iterdir()] == ["version_0"]
