# SPDX-License-Identifier: Apache-2.0
"""`perada deploy status` of a server's folder: void rounds, ε, and no empty columns; and which recipe is exported."""

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from perada.cli import deploy
from perada.cli.deploy_status import run_status
from perada.deploy.protocol import read_header
from perada.deploy.server.progress import Member, RoundRecord, RunProgress, read_saved_run, write_progress
from perada.deploy.server.rounds import epsilon_metrics
from perada.deploy.site.file import Approved
from perada.deploy.state import RunState, ScoringState, read_runs

from .parties import Parties
from .test_hostile_sites import Lying, broken
from .test_rounds import Troubled
from .test_sites import train

NAMES = ["north", "south", "west"]


def cells(text):
    """Cells of a Markdown table, by the header's titles, one dictionary a row."""
    header, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    return [dict(zip(header, row, strict=True)) for row in rows]


def progress_of(records, members=None, metrics=()):
    members = [Member(name, None, 0) for name in NAMES] if members is None else members
    history = [{"round": float(record.round)} | dict(metrics) for record in records]
    return RunProgress("ab", "cd", 5, done=len(records), roster=members, records=records, history=history)


def printed_without_torch(path):
    """Output of `perada deploy status` in a process of its own, which must not import PyTorch."""
    code = (
        "import sys; from perada.cli import main; main(sys.argv[1:]); assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", code, "deploy", "status", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_status_of_a_run_needs_no_torch(tmp_path):
    progress = progress_of([RoundRecord(0, selected=NAMES, answered=NAMES)])
    write_progress(tmp_path, progress, {"global": {"w": torch.ones(2)}, "server": {}})
    assert printed_without_torch(tmp_path) == f"{run_status(progress)}\n"
    saved_run = read_saved_run(tmp_path)
    assert saved_run.progress == progress
    assert saved_run.states["global"]["w"].tolist() == [1, 1]
    saved_run = read_saved_run(tmp_path, with_tensors=False)
    assert saved_run.progress == progress
    assert saved_run.states["global"]["w"] is None


def test_the_status_of_a_site_needs_no_torch(tiny, tmp_path):
    worker = Parties(tiny, tmp_path, rounds=2).worker(0)
    worker.answer(train(worker), "4711")
    worker.store.close()
    folder = worker.store.folder
    (tmp_path / "recipe.yaml").write_text("seed_everything: 1\n")
    file = tmp_path / "site.yaml"
    content = {
        "name": "north",
        "recipes": [{"recipe": "recipe.yaml"}],
        "data": {"root": "x"},
        "state": str(folder),
    }
    file.write_text(json.dumps(content))
    text = printed_without_torch(file)
    assert text.startswith("Site north, the current run first:")
    (row,) = cells(text.split("\n\n")[1].strip())
    assert (row["transport's id"], row["rounds trained"], row["last round"]) == ("4711", "1", "1")
    states, totals = read_runs(folder, with_tensors=False)
    full_states, full_totals = read_runs(folder)
    assert totals.ledger.history(0) == full_totals.ledger.history(0)
    assert states[0].training.round == full_states[0].training.round == 0
    assert full_states[0].training.reply
    assert states[0].training.reply is None


def test_a_void_round_used_no_site():
    records = [
        RoundRecord(0, selected=NAMES, answered=NAMES),
        RoundRecord(1, selected=NAMES, answered=NAMES, void="the new state was not finite"),
        RoundRecord(2, selected=NAMES, answered=NAMES, masked=NAMES, void="too few sites are left"),
        RoundRecord(3, selected=NAMES, answered=NAMES, summed=NAMES[:2]),
    ]
    rows = cells(run_status(progress_of(records)).split("\n\n")[1])
    assert [row["sites used"] for row in rows] == ["3 of 3", "0 of 3", "0 of 3", "2 of 3"]
    assert [record.used for record in records] == [NAMES, [], [], NAMES[:2]]


def test_metrics_of_a_void_round_count_no_site(tiny, tmp_path):
    parties = Parties(tiny, tmp_path, rounds=1)
    coordinator = parties.coordinator(Lying(parties.workers(), broken(*parties.names)), late="skip")
    progress = coordinator.run()
    assert progress.records[0].void == "all broke"
    assert progress.history[0]["deploy/answered"] == 0


def test_columns_without_content_are_left_out():
    members = [Member("north", 10, 0, rounds=2, last_round=2), Member("south", None, 0, rounds=1, last_round=1)]
    (row, _) = cells(run_status(progress_of([RoundRecord(0)], members)).split("\n\n")[-1])
    assert list(row) == ["site", "images", "rounds", "last round"]
    members[1].left = "exhausted"
    (row, _) = cells(run_status(progress_of([RoundRecord(0)], members)).split("\n\n")[-1])
    assert list(row) == ["site", "images", "rounds", "last round", "left"]


def test_the_status_of_a_run_that_has_just_begun_has_no_empty_table():
    assert run_status(progress_of([], [])) == "Run ab: 0 of 5 rounds"


@pytest.mark.parametrize(
    ("spent", "expected"),
    [(3.25, "at most ε 3.25 (release ledger), 3.25 (server ledger)."), (None, "at most ε ∞ (release ledger)")],
)
def test_the_status_of_a_private_run_shows_epsilon(spent, expected):
    members = [Member(name, None, 0, rounds=1, last_round=1) for name in NAMES]
    for member in members:
        member.epsilon = {} if spent is None else {"release": spent, "server": spent}
    text = run_status(progress_of([RoundRecord(0)], members, epsilon_metrics(members)))
    assert expected in text
    assert ("may_send" in text) == (spent is None)


def test_the_status_of_a_run_with_client_privacy_shows_epsilon_also_after_rounds_that_cost_nothing():
    progress = progress_of([RoundRecord(0), RoundRecord(1)])
    progress.history[0]["privacy/client_epsilon_max"] = 1.5
    progress.history[1]["privacy/client_epsilon_max"] = math.nan
    assert run_status(progress).endswith("Whole sites: at most ε 1.50.")


def site_file_of(digests):
    recipes = {Path(f"/srv/{name}.yaml"): Approved("0" * 64, digest) for name, digest in digests.items()}
    return SimpleNamespace(name="north", state=Path("/srv/state"), recipes=recipes)


def exported_recipe(monkeypatch, digests, run_digest, recipe=None, scored=3):
    """Name of the recipe with which a site's run is exported."""
    used = []
    state = RunState("ab", recipe=run_digest, scoring=ScoringState(round=scored, global_state={"w": None}))

    def make_client(path, site_file):
        used.append(path.stem)
        return SimpleNamespace(recipe=SimpleNamespace(digest=digests[path.stem], rounds=3))

    monkeypatch.setattr(deploy, "read_runs", lambda folder: ([state], None))
    monkeypatch.setattr(deploy, "make_client", make_client)
    monkeypatch.setattr(deploy, "export_site_run", lambda client, state, name: None)
    deploy._run_of_site(site_file_of(digests), recipe, None)
    return used


def test_of_several_recipes_the_one_with_the_digest_of_the_run_is_exported(monkeypatch):
    digests = {"first": "1" * 64, "second": "2" * 64, "third": "3" * 64}
    for name, digest in digests.items():
        assert exported_recipe(monkeypatch, digests, digest) == [name]
    with pytest.raises(ValueError, match=r"no recipe .*4444"):
        exported_recipe(monkeypatch, digests, "4" * 64)
    with pytest.raises(ValueError, match=r"'/srv/third\.yaml' is not the recipe .*run ab"):
        exported_recipe(monkeypatch, digests, "1" * 64, "/srv/third.yaml")
    with pytest.raises(ValueError, match=r"'/srv/fourth\.yaml' is not a recipe"):
        exported_recipe(monkeypatch, digests, "1" * 64, "/srv/fourth.yaml")


def test_an_export_of_a_run_that_is_not_over_names_its_round(monkeypatch):
    digests = {"only": "1" * 64}
    with pytest.warns(UserWarning, match=r"run ab .*round 2 of 3"):
        exported_recipe(monkeypatch, digests, "1" * 64, scored=2)
    exported_recipe(monkeypatch, digests, "1" * 64, scored=3)


def test_a_site_has_a_global_state_to_export_from_the_first_evaluation_on(tiny, tmp_path):
    """The run may be stopped at any time."""
    parties = Parties(tiny, tmp_path, rounds=3)
    workers = parties.workers()
    results = {}

    def look(name, message, number):
        header = read_header(message)
        if name == "site0" and header["kind"] == "train":
            current = workers[name].store.current()
            results[header["round"]] = current is not None and bool(current.scoring.global_state)

    parties.coordinator(Troubled(workers, look)).run()
    assert results == {0: False, 1: True, 2: True}
