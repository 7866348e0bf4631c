# SPDX-License-Identifier: Apache-2.0
"""``perada compare``: every recipe, algorithm and seed once, and one table."""

import json

import pytest

from perada.cli import main
from perada.compare import summary

TINY = """
trainer: {max_epochs: 1, accelerator: cpu, enable_progress_bar: false, logger: false}
model: {backbone: test_resnet, pretrained: false, adapter: head}
data:
  dataset: Digits
  partition: {class_path: IID, init_args: {num_clients: 3}}
  train_limit: 60
  test_limit: 30
  public_fraction: 0.2
  image_size: 16
federated: {clients_per_round: 2, local_steps: 1, distillation: {steps: 1, batch_size: 4}}
"""


def rows(text):
    """The table's rows by their first cell."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    split = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip(split[0][1:], row[1:], strict=True)) for row in split[2:]}


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    return "tiny.yaml"


def test_each_algorithm_and_seed_once_and_not_again(recipe, tmp_path, capsys):
    words = ["compare", recipe, "--algorithms", "fedavg", "ditto", "--seeds", "0", "1", "--output", "out/r.json"]
    main([*words[:4], "--seeds", "0", "--output", "out/r.json", "--model.lr_local=0.2"])
    partial = json.loads((tmp_path / "out" / "r.json").read_text())
    assert [(record["label"], record["seed"]) for record in partial] == [("before fine-tuning", 0), ("fedavg", 0)]
    capsys.readouterr()
    main([*words, "--model.lr_local=0.2"])
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if line.startswith("---")] == [
        "--- ditto, seed 0",
        "--- fedavg, seed 1",
        "--- ditto, seed 1",
    ]
    records = json.loads((tmp_path / "out" / "r.json").read_text())
    assert records[:2] == partial
    table = rows(shown)
    assert list(table) == ["before fine-tuning", "fedavg", "ditto", "full fine-tuning would"]
    scores = [100 * r["personal/local_test"] for r in records if r["label"] == "ditto"]
    mean, spread = sum(scores) / 2, abs(scores[0] - scores[1]) / 2
    assert table["ditto"]["personal/local_test"] == f"{mean:.2f} ± {spread:.2f}"
    head = 96 * 10 + 10  # test_resnet's features and 10 classes
    assert (table["ditto"]["trained"], table["ditto"]["sent"]) == (f"{2 * head:,}", f"{head:,}")
    assert table["fedavg"]["trained"] == f"{head:,}"
    assert float(table["fedavg"]["MB sent"]) == pytest.approx(4 * head / 1e6, abs=0.005)


def test_recipes_keep_their_own_algorithm(recipe, capsys):
    main(["compare", recipe, "--federated.algorithm=Standalone"])
    table = rows(capsys.readouterr().out)
    assert list(table)[:2] == ["before fine-tuning", "tiny"]
    assert table["tiny"]["sent"] == "0"


def test_summary_marks_what_is_not_known():
    records = [
        {"label": "before fine-tuning", "seed": 0, "personal/local_test": 0.5},
        {"label": "x", "seed": 0, "personal/local_test": 0.25, "params/trained": 1234.0, "params/sent": 5.0,
         "mb_sent": 0.5, "seconds_per_round": 1.25},
    ]  # fmt: skip
    table = rows(summary(records))
    assert table["before fine-tuning"]["personal/local_test"] == "50.00"
    assert table["before fine-tuning"]["global/global_test"] == "–"
    assert table["x"]["trained"] == "1,234"
    assert table["x"]["s / round"] == "1.2"


def test_unknown_algorithm_is_refused(recipe, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["compare", recipe, "--algorithms", "perda"])
    assert stop.value.code == 2
    assert "perda" in capsys.readouterr().err


def test_two_recipes_have_rows_of_their_own(recipe, tmp_path, capsys):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tiny.yaml").write_text(TINY)
    main(["compare", recipe, "other/tiny.yaml", "--algorithms", "standalone"])
    assert list(rows(capsys.readouterr().out))[:4] == [
        "tiny before fine-tuning",
        "tiny standalone",
        "other/tiny before fine-tuning",
        "other/tiny standalone",
    ]
