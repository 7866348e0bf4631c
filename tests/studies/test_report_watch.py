# SPDX-License-Identifier: Apache-2.0
"""`perada report --watch` on a folder that grows, as a run's does."""

import csv
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from perada.cli import main
from perada.deploy.transport import LocalTransport
from perada.studies.report import watch as watching
from perada.studies.report.records import RunRecord
from tests.deploy.parties import Parties

HEADER = "epoch,personal/local_test,step\n"
RELOADS = 'http-equiv="refresh"'


def wait_for(condition, seconds=60):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_the_page_follows_the_rounds_and_ends_with_the_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(watching, "SETTLING_LOOKS", 2)
    (tmp_path / "config.yaml").write_text("trainer: {max_epochs: 2}\n")
    table = tmp_path / "page" / "rounds.csv"
    follower = threading.Thread(
        target=watching.watch, args=([tmp_path], tmp_path / "page"), kwargs={"interval": 0.05}, daemon=True
    )
    follower.start()
    time.sleep(0.2)
    assert follower.is_alive() and not table.exists()
    (tmp_path / "metrics.csv").write_text(HEADER + "0,0.25,1\n")
    wait_for(table.exists)
    wait_for((tmp_path / "page" / "index.html").exists)
    assert RELOADS in (tmp_path / "page" / "index.html").read_text()
    time.sleep(0.3)  # more looks than end a finished run
    assert follower.is_alive()
    (tmp_path / "metrics.csv").write_text(HEADER + "0,0.25,1\n1,0.5,3\n")
    follower.join(60)
    assert not follower.is_alive()
    assert [line.split(",")[:2] for line in table.read_text().splitlines()[1:]] == [["1", "0.25"], ["2", "0.5"]]
    assert RELOADS not in (tmp_path / "page" / "index.html").read_text()
    printed = capsys.readouterr().out
    assert printed.count("Waiting for the first round.") == 1
    assert printed.endswith("The run is finished.\n")


def test_ctrl_c_ends_it_with_status_0_and_a_page_that_stays(tmp_path):
    (tmp_path / "metrics.csv").write_text(HEADER + "0,0.25,1\n")
    page = tmp_path / "report" / "index.html"
    command = [sys.executable, "-m", "perada", "report", str(tmp_path), "--watch"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
    try:
        assert process.stdout.readline() == f"Page: {page}\n"
        wait_for(lambda: page.exists() and RELOADS in page.read_text(), 120)
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.stdout.close()
    assert process.returncode == 0
    assert "Stopped following" in rest and "Traceback" not in rest
    assert RELOADS not in page.read_text()


def test_a_file_that_stays_broken_is_an_error(tmp_path):
    (tmp_path / "metrics.csv").write_text(HEADER + "0,a word,1\n")
    with pytest.raises(ValueError, match="a word"):
        watching.watch([tmp_path], tmp_path / "page", interval=0.01)


def test_folders_that_cannot_be_followed_are_rejected(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        main(["report", str(tmp_path / "nowhere"), "--watch"])
    (tmp_path / "version_0").mkdir()
    (tmp_path / "version_0" / "metrics.csv").write_text(HEADER)
    with pytest.raises(FileNotFoundError, match=r"'.*version_0'"):
        main(["report", str(tmp_path), "--watch"])
    with pytest.raises(NotADirectoryError, match="--watch needs"):
        main(["report", str(tmp_path / "version_0" / "metrics.csv"), "--watch", "--output", str(tmp_path / "page")])
    with pytest.raises(ValueError, match="add --output"):
        main(["report", str(tmp_path / "version_0" / "metrics.csv"), "--open"])


def test_the_path_is_printed_before_the_page_is_drawn_and_opened(tmp_path, capsys, monkeypatch):
    from perada.studies.report import page

    (tmp_path / "metrics.csv").write_text(HEADER + "0,0.25,1\n")
    steps = []
    draw = page.write_page
    monkeypatch.setattr(
        page, "write_page", lambda *args, **options: (steps.append(capsys.readouterr().out), draw(*args, **options))[1]
    )
    monkeypatch.setattr("webbrowser.open", steps.append)
    main(["report", str(tmp_path), "--open"])
    path = tmp_path / "report" / "index.html"
    assert steps == [f"Page: {path}\n", path.as_uri()]
    assert "No browser could be started" in capsys.readouterr().out  # append returns None


def test_a_deployed_run_is_followed_to_its_last_score(tiny, tmp_path, monkeypatch, capsys):
    """The server is not slowed down: a look is taken each time that it has written its files, in the same thread."""
    monkeypatch.setattr(watching, "SETTLING_LOOKS", 1)
    parties = Parties(tiny, tmp_path, "fedavg", rounds=3)
    coordinator = parties.coordinator(LocalTransport(parties.workers()))
    page = tmp_path / "page" / "index.html"
    rows_at_look = []
    saves = threading.Semaphore(0)
    looks = threading.Semaphore(0)

    def look(seconds):
        if (tmp_path / "page" / "rounds.csv").exists():
            lines = (tmp_path / "page" / "rounds.csv").read_text().splitlines()
            rows_at_look.append([line.split(",")[0] for line in lines[1:]])
            assert RELOADS in page.read_text()
        looks.release()
        assert saves.acquire(timeout=60)

    def save(write=coordinator._save_progress):
        write()
        assert looks.acquire(timeout=60)
        saves.release()

    monkeypatch.setattr(watching, "time", SimpleNamespace(sleep=look))
    monkeypatch.setattr(coordinator, "_save_progress", save)
    follower = threading.Thread(
        target=watching.watch, args=([tmp_path / "server"], tmp_path / "page"), kwargs={"interval": 2.0}, daemon=True
    )
    follower.start()
    coordinator.run()
    for _ in range(3):  # looks without a change, the last of which ends it
        saves.release()
    follower.join(60)
    coordinator.close()
    assert not follower.is_alive()
    assert {tuple(rows) for rows in rows_at_look} == {("1",), ("1", "2"), ("1", "2", "3")}
    assert rows_at_look == sorted(rows_at_look, key=len)
    with (tmp_path / "server" / "metrics.csv").open() as file:
        last = list(csv.DictReader(file))[-1]
    with (tmp_path / "page" / "rounds.csv").open() as file:
        drawn = list(csv.DictReader(file))[-1]
    assert float(drawn["personal/local_test"]) == pytest.approx(float(last["personal/local_test"]), rel=1e-5)
    assert RELOADS not in page.read_text()
    assert capsys.readouterr().out.endswith("The run is finished.\n")


def test_without_a_number_of_rounds_a_run_is_never_finished(tmp_path):
    rounds = [{"round": 0}, {"round": 1}]
    for config in ("", "trainer: 3", "trainer: {max_epochs: -1}", "trainer: {max_epochs: 3}"):
        assert not watching.has_all_rounds(RunRecord("run", tmp_path, rounds=rounds, config=config))
    assert watching.has_all_rounds(RunRecord("run", tmp_path, rounds=rounds, config="trainer: {max_epochs: 2}"))


def test_a_page_is_titled_by_recipe_and_date_and_keeps_raw_names_as_tooltips(tmp_path):
    from perada.studies.report.page import write_page

    (tmp_path / "metrics.csv").write_text("")
    os.utime(tmp_path / "metrics.csv", (1_700_000_000, 1_700_000_000))
    command = ["perada", "fit", "--config", "digits", "--config=method/ditto.yaml"]
    record = RunRecord("version_0", tmp_path, {}, [{"round": 0, "personal/local_test": 0.5}], command=command)
    text = write_page(tmp_path / "page", [record]).read_text(encoding="utf-8")
    day = time.strftime("%Y-%m-%d", time.localtime(1_700_000_000))
    assert f"<h1>digits + ditto, run version_0, {day}</h1>" in text
    assert 'title="personal/local_test">own images</th>' in text
