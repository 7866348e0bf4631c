# SPDX-License-Identifier: Apache-2.0
"""What `perada deploy run` prints of Flower's lines, and that it says what happened where the SuperLink dies."""

import json
import logging
import sys
import threading
import time

import pytest

from perada.deploy.flower import running
from perada.deploy.flower.app import write_app
from perada.deploy.flower.running import CommandOutcome, Link, follow, run_app
from perada.deploy.monitoring import FlowerLines, Monitoring, as_json_line, json_logs
from perada.deploy.transport import Terms

from .test_flower_commands import certificate

TRACEBACK = """Traceback (most recent call last):
  File "app.py", line 3, in main
    serve()
ValueError: no room

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "app.py", line 5, in main
    raise RuntimeError("stopped\\nhere") from None
RuntimeError: stopped
here"""


def parse_records(text):
    """The records of lines of another program, each of which must be one line of JSON."""
    lines = FlowerLines()
    result = [line for one in text.split("\n") for line in lines.feed(f"{one}\n")]
    return [json.loads(line) for line in [*result, *lines.flush()]]


def flower_record(level, message, stamped):
    """A record as flwr 1.41 and 1.42 write it."""
    colours = {"DEBUG": 94, "INFO": 92, "WARNING": 93, "ERROR": 91, "CRITICAL": 95}
    stamp = "2026-11-26 13:00:00,123" if stamped else ""
    return f"\x1b[{colours[level]}m{level} {stamp}\x1b[0m: {' ' * (8 - len(level))} {message}"


@pytest.mark.parametrize("stamped", [False, True])
@pytest.mark.parametrize("level", ["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"])
def test_a_record_of_flower_keeps_its_level(level, stamped):
    (line,) = parse_records(flower_record(level, "it: is so", stamped))
    assert (line["level"], line["message"], line["logger"]) == (level, "it: is so", "flwr")
    assert "exception" not in line


def test_what_has_no_level_is_information_and_json_stays_as_it_is():
    ours = json.dumps({"level": "ERROR", "message": "ours"})
    lines = parse_records(f"Loading project\n\n{ours}\n{{lvl='INFO', msg='x'}}\nINFORMATION: none")
    assert [(line["level"], line["message"]) for line in lines] == [
        ("INFO", "Loading project"),
        ("ERROR", "ours"),
        ("INFO", "{lvl='INFO', msg='x'}"),
        ("INFO", "INFORMATION: none"),
    ]


@pytest.mark.parametrize("after", ["", flower_record("INFO", "next", False), '{"message": "next"}'])
@pytest.mark.parametrize("before", ["", "ERROR", "INFO"])
def test_a_traceback_is_in_one_line(before, after):
    first = flower_record(before, "ServerApp failed", False) + "\n" if before else ""
    lines = parse_records(first + TRACEBACK + ("\n" + after if after else ""))
    if after:
        assert lines.pop()["message"] == "next"
    if before == "INFO":  # it is another record's
        assert lines.pop(0)["message"] == "ServerApp failed"
    (line,) = lines
    assert line["level"] == "ERROR" and line["exception"] == TRACEBACK
    assert line["message"] == ("ServerApp failed" if before == "ERROR" else "RuntimeError: stopped\nhere")


def test_further_lines_of_an_error_are_in_its_line_and_those_of_other_programs_are_not():
    text = "\n".join([flower_record("ERROR", "", False), "Exit Code: 305", "", "See the page", "Flower's end"])
    (line,) = parse_records(text)
    assert (line["level"], line["message"]) == ("ERROR", "Exit Code: 305\n\nSee the page\nFlower's end")
    lines = parse_records(flower_record("INFO", "a", False) + "\n    b\nSuccessfully started run 42")
    assert [line["message"] for line in lines] == ["a\n    b", "Successfully started run 42"]


def program(tmp_path, monkeypatch, run, listed):
    """A shell script in the place of `flwr`; ``listed`` is what it does for `flwr list`."""
    file = tmp_path / "flwr"
    file.write_text(f"#!/bin/sh\nif [ $1 = list ]; then {listed}; else {run}; fi\n")
    file.chmod(0o755)
    monkeypatch.setattr(running, "program", lambda name: file)


@pytest.mark.parametrize("log_format", ["text", "json"])
@pytest.mark.parametrize(
    ("listed", "status", "reason"),
    [
        ("""echo '{"success": false, "error-message": "Connection refused"}'""", "does not answer", "--database"),
        ("""echo '{"success": false, "error-message": "x"}'; exit 1""", "does not answer", "--database"),
        ("true", "does not answer", "--database"),
        ("echo no JSON", "does not answer", "--database"),
        ("echo '[]'", "does not answer", "--database"),
        pytest.param("exec sleep 30", "does not answer", "--database", marks=pytest.mark.slow),  # two seconds each
        ("""echo '{"success": true, "runs": []}'""", "has no such run", "without the --database"),
        (
            """echo '{"success": true, "runs": [{"status": "finished:failed"}]}'""",
            "has the status finished:failed",
            "suspended",
        ),
    ],
)
def test_a_superlink_that_died_is_said(listed, status, reason, log_format, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(running, "_LIST_TIMEOUT", 2)
    program(tmp_path, monkeypatch, "echo Successfully started run 42; exit 1", listed)
    write_app(tmp_path / "federation", "x", "seed_everything: 3\n", "ab" * 32, "localhost")
    link = Link("localhost:1", certificate(tmp_path))
    assert run_app(tmp_path / "federation" / "app", link, Terms(), Monitoring(log_format=log_format)) == 1
    out, err = capfd.readouterr()
    assert status in out and reason in out and "with --resume" in out and "Traceback" not in out + err
    if log_format == "json":
        assert all(json.loads(line)["logger"] == "flwr" for line in out.splitlines())


def test_lines_are_shown_when_they_come_and_a_record_that_may_go_on_after_a_moment(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(running, "_PAUSE", 0.1)
    text = flower_record("ERROR", "first", False)
    program(tmp_path, monkeypatch, f"printf '%s\\n' '{text}' more; sleep 0.6; printf 'ε end'", "true")
    seen = []
    real = print

    def noted(line, **options):
        seen.append((time.monotonic(), json.loads(line)))
        real(line, **options)

    monkeypatch.setattr(running, "print", noted, raising=False)
    assert follow(["run"], {"PATH": "/usr/bin:/bin"}, FlowerLines()) == CommandOutcome(None, interrupted=False)
    (early, first), (late, last) = seen
    assert first["message"] == "first\nmore" and last["message"] == "ε end"
    assert late - early > 0.2


def test_an_error_of_ours_is_a_line_of_json_too(capsys):
    with pytest.raises(SystemExit) as end, json_logs(sys.stdout, (ValueError,)):
        raise KeyError("runs")
    (line,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert end.value.code == 1 and line["level"] == "ERROR" and line["message"] == "KeyError: 'runs'"
    assert line["exception"].startswith("Traceback") and line["exception"].endswith("KeyError: 'runs'")
    before = threading.excepthook
    with json_logs(sys.stdout, ()):
        thread = threading.Thread(target=lambda: {}["x"], name="reply of st-marys")
        thread.start()
        thread.join()
        logging.getLogger("flwr").warning("hi")
    first, second = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert "reply of st-marys" in first["message"] and "KeyError" in first["exception"]
    assert second["level"] == "WARNING"
    assert threading.excepthook is before


def test_one_line_is_one_line():
    assert json.loads(as_json_line(flower_record("CRITICAL", "x", True)))["level"] == "CRITICAL"
    assert as_json_line("\n") == ""
