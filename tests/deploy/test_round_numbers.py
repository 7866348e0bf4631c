# SPDX-License-Identifier: Apache-2.0
"""People see rounds counted from 1, wherever one is named."""

import logging
import re

import pytest

from perada.cli.deploy_status import run_status
from perada.cli.main import main
from perada.deploy.protocol import Request, pack
from perada.deploy.server.progress import read_run_progress

from .parties import Parties
from .test_sites import train

NAMED = re.compile(r"round (\d+)")


@pytest.mark.slow
def test_logs_status_and_audit_count_the_rounds_of_a_run_from_one(tiny, tmp_path, caplog, capsys):
    caplog.set_level(logging.INFO)
    deployment = Parties(tiny, tmp_path, "ditto", rounds=3)
    _, workers = deployment.deployed()
    trained = [line for line in caplog.messages if line.startswith("train, ")]
    assert [NAMED.search(line)[1] for line in trained] == ["1", "2", "3"]
    scored = [line for line in caplog.messages if line.startswith("evaluate, ")]
    assert [NAMED.search(line)[1] for line in scored] == ["1", "2", "3"]
    assert {*NAMED.findall(caplog.text)} == {"1", "2", "3"}

    progress = read_run_progress(tmp_path / "server")
    table = run_status(progress).split("\n\n")[1].splitlines()[2:]
    assert [line.split("|")[1].strip() for line in table] == ["1", "2", "3"]
    assert [row["round"] for row in progress.history] == [0, 1, 2]  # for programs

    for worker in workers.values():
        worker.store.close()
    main(["deploy", "audit", str(tmp_path / "site0")])
    rows = [[cell.strip() for cell in line.split("|")] for line in capsys.readouterr().out.splitlines()]
    audited = {row[5]: [] for row in rows if len(row) > 5}
    for row in rows:
        if len(row) > 5:
            audited[row[5]].append(row[4])
    assert audited["train"] == audited["evaluate"] == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (("train", 7), "the recipe has 2 rounds, but round 8 was requested"),
        (("train", 0), "round 1 was already trained for a different message"),
        (("tune", 0), "the recipe has no fine-tuning at this point"),
    ],
)
def test_a_rejection_names_the_round_that_the_server_shows(tiny, tmp_path, caplog, order, message):
    worker = Parties(tiny, tmp_path, rounds=2).worker(0)
    worker.answer(train(worker, 0), "")
    kind, round = order
    run = worker.store.current().run
    digest = next(iter(worker.clients))
    worker.answer(pack(Request(kind, run, digest, round, 0, 3)), "")
    assert message in caplog.text
