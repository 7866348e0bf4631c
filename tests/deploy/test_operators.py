# SPDX-License-Identifier: Apache-2.0
"""What an operator sees of many sites, of late ones, of silence, and of former runs."""

import logging

import pytest
import torch
from safetensors.torch import load_file

from perada.cli.deploy_status import format_rounds
from perada.cli.main import main
from perada.deploy.protocol import read_header
from perada.deploy.site.file import Limits, read_site
from perada.deploy.state import RunState, ScoringState, read_state
from perada.deploy.transport import Failure, LocalTransport

from .parties import Parties
from .test_rounds import Troubled
from .test_site_file import PART, write
from .test_sites import only_client, other_run, train


@pytest.mark.slow
def test_fifty_sites_on_one_machine(tiny, tmp_path):
    parties = Parties(tiny, tmp_path, rounds=2, sizes=(4,) * 50, loop={"local_epochs": 1})
    parties.names = [f"site{number:02}" for number in range(50)]  # numbers follow from the order of names
    coordinator, workers = parties.deployed()
    records = coordinator.progress.records
    assert [len(record.answered) for record in records] == [50, 50]
    assert not any(record.failed or record.outside for record in records)
    _, module = parties.simulated()
    expected = module.federation.global_state
    actual = coordinator.server.global_state
    assert all((actual[key] == expected[key]).all() for key in expected)
    assert all(worker.store.current().training.num_rounds == 2 for worker in workers.values())


def test_a_site_late_at_the_join_is_asked_in_the_next_round_and_shown_meanwhile(tiny, tmp_path):
    parties = Parties(tiny, tmp_path, rounds=3)
    joins = []

    def trouble(name, message, number):
        if read_header(message)["kind"] != "join" or name != "site1":
            return None
        joins.append(number)
        return Failure("late") if len(joins) < 2 else None

    coordinator = parties.coordinator(Troubled(parties.workers(), trouble), min_sites=2)
    progress = coordinator.run()
    assert [record.outside for record in progress.records] == [{"site1": "late"}, {}, {}]
    assert sorted(progress.records[1].answered) == ["site0", "site1", "site2"]
    header, _, *rows = [[cell.strip() for cell in line.split("|")] for line in format_rounds(progress).splitlines()]
    assert header[1:-1] == ["round", "sites used", "not joined", "seconds", "MB", "own images %"]
    assert [row[2] for row in rows] == ["2 of 2", "3 of 3", "3 of 3"]
    assert [row[3] for row in rows] == ["site1 (late)", "–", "–"]


def test_a_site_that_is_not_let_in_is_not_asked_each_round(tiny, tmp_path):
    parties = Parties(tiny, tmp_path, rounds=3)
    asked = []

    def trouble(name, message, number):
        if read_header(message)["kind"] == "join" and name == "site1":
            asked.append(number)
            return Failure("rejected")
        return None

    coordinator = parties.coordinator(Troubled(parties.workers(), trouble), min_sites=2)
    progress = coordinator.run()
    assert len(asked) == 1
    assert [record.outside for record in progress.records] == [{"site1": "rejected"}] * 3


def test_waiting_for_sites_is_said_and_its_end_is_one_line(tiny, tmp_path, caplog):
    caplog.set_level(logging.INFO, "perada.deploy")
    coordinator = Parties(tiny, tmp_path, rounds=1).coordinator(LocalTransport({}), min_sites=2, deadline=1.5)
    with pytest.raises(TimeoutError) as raised:
        coordinator.run()
    assert "round 1 waits for sites" in caplog.text and "0 of at least 2 are ready" in caplog.text
    said = str(raised.value)
    assert "\n" not in said and "in 2 s (the deadline is 1.5 s); missing: no other site has ever connected" in said


def test_of_sites_that_will_not_come_back_this_is_said(tiny, tmp_path):
    parties = Parties(tiny, tmp_path, rounds=3)
    workers = parties.workers()
    for name in ("site1", "site2"):
        only_client(workers[name]).limits = Limits(max_rounds=1)
    coordinator = parties.coordinator(LocalTransport(workers), min_sites=2, deadline=60.0)
    with pytest.raises(TimeoutError) as raised:
        coordinator.run()
    assert "answered in 0 s (the deadline is 60 s)" in str(raised.value)
    assert "will not return: end the run here" in str(raised.value)


@pytest.mark.slow
def test_former_runs_of_a_site_are_listed_and_exported(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "a", "a", data=PART | {"client": 0})
    main(["deploy", "check", str(path)])
    digest = capsys.readouterr().out.partition("digest: ")[2][:64]
    write(path.parent, "a", digest, data=PART | {"client": 0})
    for folder in ("one", "two"):
        main(["deploy", "run", "a/recipe.yaml", "--local", str(path), "--folder", folder])
    capsys.readouterr()
    main(["deploy", "status", str(path)])
    output = capsys.readouterr().out
    (former,) = (read_site(path).state / "runs").glob("*.safetensors")
    current = read_state(read_site(path).state / "state.safetensors")[0].run
    assert output.index(current) < output.index(former.stem)
    assert "local" in output  # what the transport calls its runs
    main(["deploy", "export", str(path), "--run", former.stem, "--output", "out"])
    exported = load_file(tmp_path / "out" / "client_0" / "adapter_model.safetensors").values()
    (kept,) = read_state(former)[0].training.client_state.values()
    for value in exported:
        assert any(value.shape == own[0].shape and (value == own[0]).all() for own in kept.values())
    with pytest.raises(ValueError, match=r"run='0'.*`perada deploy status`"):
        main(["deploy", "export", str(path), "--run", "0", "--output", "other"])


@pytest.mark.slow
def test_an_export_while_the_next_run_begins_names_the_former_ones(tmp_path, monkeypatch):
    path = write(tmp_path, "a", data=PART | {"client": 0})
    states = [
        RunState("new"),
        RunState("done", scoring=ScoringState(global_state={"w": torch.zeros(1)})),
        RunState("ended-early"),
    ]
    monkeypatch.setattr("perada.cli.deploy.read_runs", lambda folder: (states, {}))
    with pytest.raises(ValueError, match=r"global state.*--run done$"):
        main(["deploy", "export", str(path), "--output", "out"])
    del states[1]
    with pytest.raises(ValueError, match="global state"):
        main(["deploy", "export", str(path), "--output", "out"])


@pytest.mark.slow
def test_a_site_says_both_ids_of_a_run(tiny, tmp_path, caplog):
    """Flower's, which the server's owner sees, and perada's, under which the site's state is."""
    caplog.set_level(logging.INFO)
    worker = Parties(tiny, tmp_path, rounds=2).worker(0)
    for message, run in ((train(worker), "4711"), (other_run(worker), "4712")):
        worker.answer(message, run)
        order = read_header(message)["run"]
        assert f"run {run} ({order} of perada): train" in caplog.text
        assert worker.store.load(order).transport_run == run
