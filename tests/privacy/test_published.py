# SPDX-License-Identifier: Apache-2.0
"""What leaves a private run, in folders, on the Hub or on a page, holds nothing of clients' images but the ledgers."""

import json
import re
from functools import cache

import pytest
import torch
from torch.utils.data import TensorDataset

import perada
from perada.cli import main
from perada.lightning.joining import personalize
from perada.results.run import Run
from perada.studies.report.page import write_page
from perada.studies.report.records import RunRecord, read_records
from tests.options import sections

SECTIONS = {
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-3},
    "client_privacy": {"noise_multiplier": 1.0, "delta": 1e-3},
}
SCORE_PREFIXES = ("personal/", "global/", "train/", "theory/", "updates/")


def images(count, seed=0):
    random = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (count, 1, 8, 8), dtype=torch.uint8, generator=random)
    return TensorDataset(pixels, torch.arange(count) % 3)


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))


def fit_run(section, folder=None, **options):
    data = perada.FederatedData([images(12, 1), images(9, 2)], [images(7, 3), images(5, 4)], num_classes=3)
    level = {section: SECTIONS[section]} if section else {}
    logger = {} if folder is not None else {"logger": False}
    return perada.finetune(
        network(), data, **sections(adapter="full", algorithm="ditto", rounds=2, batch_size=4, local_steps=2,
        accelerator="cpu", metric=["accuracy", "recall_per_class"], enable_progress_bar=False, default_root_dir=folder,
        **level | logger | options,
    ))  # fmt: skip


def names(content, above=""):
    """All keys of a JSON file, with those above them."""
    if isinstance(content, list):
        content = dict(enumerate(content))
    if not isinstance(content, dict):
        return {above}
    return {name for key, value in content.items() for name in names(value, f"{above}/{key}")} | {above}


def find_scores(folder):
    """Where files of a folder have a score: a name of one in run.json, or a percentage in a card."""
    result = set()
    for path in sorted(folder.rglob("*")):
        if path.name == "run.json":
            metrics = json.loads(path.read_text())["metrics"]
            result |= {name for name in names(metrics) if any(f"/{kind}" in name for kind in SCORE_PREFIXES)}
            result |= {name for name in metrics if name not in ("rounds", "clients")}
        elif path.suffix == ".md":
            result |= {line for line in path.read_text().splitlines() if re.search(r"\d %", line)}
    return result


@cache
def unlogged(section):
    """A run for tests that change nothing of it."""
    return fit_run(section)


@pytest.mark.parametrize("section", [None, "privacy", "client_privacy"])
def test_a_saved_run_has_scores_only_where_it_is_not_private(tmp_path, section):
    run = unlogged(section)
    assert run.metrics["clients"]["personal/local_test"]  # whoever runs a simulation sees them
    run.export(tmp_path / "saved")
    run.export(tmp_path / "asked", scores=True)
    run.export(tmp_path / "never", scores=False)
    run.export(tmp_path / "alone", client=1)
    assert bool(find_scores(tmp_path / "saved")) == (section is None)
    assert bool(find_scores(tmp_path / "alone")) == (section is None)
    assert find_scores(tmp_path / "asked") and not find_scores(tmp_path / "never")
    if section is not None:
        card = (tmp_path / "saved" / "client_0" / "README.md").read_text()
        assert "Scores are omitted: they depend on the clients' images" in card
        assert "Public and labelled images of the server" in card
        assert ("For a person with k images" in card) == (section == "privacy")
    loaded = Run.load(tmp_path / "saved", backbone=network())
    assert loaded.num_clients == 2 and [row["round"] for row in loaded.metrics["rounds"]] == [0, 1]
    if section == "privacy":
        assert loaded.metrics["clients"]["privacy/release_epsilon"] == run.metrics["clients"]["privacy/release_epsilon"]


@pytest.mark.parametrize("section", [None, "privacy", pytest.param("client_privacy", marks=pytest.mark.slow)])
def test_a_run_folder_has_scores_of_classes_only_where_it_is_not_private(tmp_path, section):
    run = fit_run(section, tmp_path)
    assert ("per_class" in run.metrics) == (section is None)
    (file,) = tmp_path.rglob("run.json")
    (checkpoint,) = tmp_path.rglob("last.ckpt")
    saved = torch.load(checkpoint, weights_only=True)["perada"]["metrics"]
    for metrics in (json.loads(file.read_text())["metrics"], saved):
        assert ("per_class" in metrics) == (section is None)
        assert ("partition" in metrics) == (section is None)


# The noise, which is drawn anew in each run, decides how good the new model is.
@pytest.mark.filterwarnings("ignore:client 'new'. its personal model is worse:UserWarning")
@pytest.mark.parametrize("section", [None, "privacy"])
def test_a_client_that_joins_brings_scores_only_where_the_run_is_not_private(tmp_path, section):
    run = unlogged(section)
    newcomers = perada.FederatedData([images(8, 5)], [images(6, 6)], num_classes=3, client_names=["new"])
    joined = personalize(run, newcomers, rounds=1, accelerator="cpu")
    assert joined.info["joined"][0]["after"] is not None
    joined.export(tmp_path / "all")
    run.export(tmp_path / "grown")
    joined.add_client(tmp_path / "grown", 2)
    for folder in ("all", "grown"):
        (record,) = json.loads((tmp_path / folder / "run.json").read_text())["info"]["joined"]
        assert (record["before"] is None, record["after"] is None) == (section is not None,) * 2
        assert bool(find_scores(tmp_path / folder)) == (section is None)


@pytest.mark.parametrize("section", [None, "privacy", pytest.param("client_privacy", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_a_page_has_scores_only_where_the_run_is_not_private(tmp_path, capsys, section):
    fit_run(section, tmp_path / "logs")
    folder = next((tmp_path / "logs").rglob("run.json")).parent
    for name, words, shown in (("plain", [], section is None), ("asked", ["--scores=true"], True)):
        main(["report", str(folder), "--output", str(tmp_path / name), *words])
        page = (tmp_path / name / "index.html").read_text(encoding="utf-8")
        tables = "".join(path.read_text() for path in (tmp_path / name).glob("*.csv"))
        assert ("own images</dt>" in page, "local_test" in tables) == (shown, shown)
        assert ("own images<" in page) == ("last round<" in page) == shown
        assert ("_loss" in tables) == (section is None)
    if section is not None:
        assert "left out" in capsys.readouterr().out
        page = (tmp_path / "plain" / "index.html").read_text(encoding="utf-8")
        assert "ε" in page and "Scores, losses and diagnostics are left out" in page
    main(["report", str(folder)])  # on the screen of whoever holds the run
    assert "| own images |" in capsys.readouterr().out


def test_a_page_on_private_runs_of_a_comparison_has_no_scores(tmp_path):
    rows = [{"round": 0, "personal/local_test": 0.7531, "privacy/release_epsilon_max": 2.5}]
    records = [RunRecord(f"run {number}", tmp_path, rounds=rows, row_name=f"run {number}") for number in (1, 2)]
    assert "75.3" not in write_page(tmp_path / "page", records).read_text(encoding="utf-8")
    assert "75.3" in write_page(tmp_path / "asked", records, with_scores=True).read_text(encoding="utf-8")


def test_records_of_private_runs_keep_what_ledgers_count(tmp_path):
    fit_run("privacy", tmp_path)
    (record,) = read_records(next(tmp_path.rglob("run.json")).parent)
    kept = record.published()
    assert {name for row in kept.rounds for name in row} == {
        name for row in record.rounds for name in row if not name.startswith(SCORE_PREFIXES)
    }
    scores_of_clients = record.scores_of_clients.items()
    assert kept.scores_of_clients == {name: own for name, own in scores_of_clients if name.startswith("privacy/")}
    assert kept.scores_of_clients and not (kept.by_round or kept.initial or kept.global_local or kept.calibration)
