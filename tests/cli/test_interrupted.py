# SPDX-License-Identifier: Apache-2.0
"""A signal to all processes of a run ends it with the line that says how to resume; a dead worker names its client."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from perada.system import interruption

from ..recipes import recipe

PROGRAM = Path(__file__).with_name("interrupted_program.py")


def run(folder, signal_name, moment, rounds=6):
    """Run the program in a session of its custom_handler; its status and its lines on standard error."""
    parts = recipe(trainer={"max_epochs": rounds, "enable_progress_bar": True})
    images = {"signal_name": signal_name, "moment": moment, "once": str(folder / "once")}
    parts["data"] = {
        "dataset": {"class_path": "interrupted_program.Read", "init_args": images},
        "partition": {"class_path": "IID", "init_args": {"num_clients": 3}},
        "image_size": 16,
        "num_workers": 2,
    }
    parts["federated"] = {"algorithm": "FedAvg"}
    parts["training"] = {"local_steps": 3, "cache_features": False}
    parts["distillation"] = {"steps": 0}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(parts))
    paths = os.pathsep.join([str(PROGRAM.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = subprocess.run(
        [sys.executable, str(PROGRAM), signal_name, moment, "fit", "--config", "recipe.yaml"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        start_new_session=True,
        timeout=300,
        check=False,
    )
    return ended.returncode, ended.stderr.splitlines()


MOMENTS = ["reading", "start", "set-up"]


@pytest.mark.parametrize(("signal_name", "status", "what"), [("INT", 130, "interrupted"), ("TERM", 143, "terminated")])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.slow
def test_a_signal_to_all_processes_ends_the_run_with_the_line_to_resume(tmp_path, signal_name, status, what, moment):
    code, lines = run(tmp_path, signal_name, moment)
    assert code == status
    assert lines[-1] == f"perada: {what}; resume with --ckpt_path last after the last finished round"
    assert not [line for line in lines if "Traceback" in line or "Exception ignored" in line]
    assert len([line for line in lines if line.startswith("Round")]) <= 1


@pytest.mark.parametrize(("signal_name", "signum"), [("INT", signal.SIGINT), ("TERM", signal.SIGTERM)])
@pytest.mark.slow
def test_a_signal_while_workers_end_after_the_last_round_loses_nothing(tmp_path, signal_name, signum):
    code, lines = run(tmp_path, signal_name, "shutdown")
    assert (tmp_path / "once").exists()
    assert code in (0, 128 + signum, -signum)
    assert not [line for line in lines if "Traceback" in line or "Exception ignored" in line]
    record = json.loads((tmp_path / "lightning_logs" / "version_0" / "run.json").read_text())
    assert len(record["metrics"]["rounds"]) == 6


@pytest.mark.slow
def test_a_dead_worker_is_named_with_its_client(tmp_path):
    code, lines = run(tmp_path, "INT", "death")
    assert code == 1
    assert "was terminated by SIGKILL while it was reading sample " in lines[-1] and " of client " in lines[-1]
    assert lines[-1].startswith("perada: error: a process reading images (pid ")
    assert not [line for line in lines if "Traceback" in line]


class Deleted:
    """Receives a Ctrl-C while it is deleted."""

    def __init__(self, signum):
        self.signum = signum

    def __del__(self):
        os.kill(os.getpid(), self.signum)
        time.sleep(0)  # the handler runs here


@pytest.fixture
def handlers(monkeypatch):
    former = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for signum, handler in former.items():
        signal.signal(signum, handler)
    monkeypatch.setattr(interruption, "_watch", interruption._Watch())


@pytest.mark.parametrize(
    ("signum", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, interruption.Terminated)]
)
def test_an_exception_that_python_drops_is_raised_again(handlers, capsys, signum, kind):
    interruption.watch_signals(terminate=True)
    with pytest.raises(kind):
        thing = Deleted(signum)
        del thing
        for _ in range(100):
            time.sleep(0.02)
        pytest.fail("it was lost")
    assert interruption.received_signal() == signum
    assert "Exception ignored" not in capsys.readouterr().err


def test_other_handlers_stay(handlers):
    def custom_handler(signum, frame):
        pass

    signal.signal(signal.SIGINT, custom_handler)
    interruption.watch_signals()
    assert signal.getsignal(signal.SIGINT) is custom_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_signal_that_comes_after_the_death_of_a_worker_is_waited_for(handlers):
    interruption.watch_signals()
    threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
    assert interruption.received_signal(RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed. ")) == 2
    interruption.watch_signals()
    assert interruption.received_signal(RuntimeError("DataLoader worker (pid 1) exited unexpectedly")) is None


def test_a_caught_interrupt_is_raised_at_the_next_step(handlers):
    interruption.watch_signals()
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
    except KeyboardInterrupt:
        pass
    with pytest.raises(KeyboardInterrupt):
        interruption.raise_if_interrupted()
    interruption.watch_signals()
    interruption.raise_if_interrupted()
