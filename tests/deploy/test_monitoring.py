# SPDX-License-Identifier: Apache-2.0
"""Metrics of a run as Prometheus reads them, and logs as lines of JSON."""

import json
import logging
import math
import socket
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from urllib.request import urlopen

import pytest

pytest.importorskip("prometheus_client", reason="pip install 'perada[monitoring]'")

from prometheus_client.parser import text_string_to_metric_families

from perada.cli import deploy as commands
from perada.cli.main import main
from perada.deploy.flower.app import write_app
from perada.deploy.flower.running import CommandOutcome, Link, run_app
from perada.deploy.monitoring import JsonLines, Monitoring, as_json_line, stamp
from perada.deploy.protocol import pack, read_header
from perada.deploy.server.metrics import CountingTransport, serving
from perada.deploy.server.progress import read_run_progress
from perada.deploy.transport import Failure, LocalTransport, Terms
from perada.server.sums import SecureSums
from perada.studies.deployment import free_port

from .parties import Parties
from .test_flower_commands import certificate
from .test_rounds import Troubled
from .test_site_file import PART, write
from .test_sites import private

LABELS = ("site", "code", "direction", "ledger", "name", "run", "recipe")


def scraped(port, address="127.0.0.1"):
    """Samples by name and labels, as Prometheus' own parser reads them."""
    with urlopen(f"http://{address}:{port}/metrics", timeout=10) as reply:
        assert reply.headers["Content-Type"].startswith("text/plain; version=")
        text = reply.read().decode()
    families = text_string_to_metric_families(text)
    return {
        (sample.name.removeprefix("perada_"), *(sample.labels[label] for label in LABELS if label in sample.labels)): (
            sample.value
        )
        for family in families
        for sample in family.samples
    }


def test_what_is_scraped_is_what_the_run_keeps(tiny, tmp_path):
    parties = Parties(tiny, tmp_path, "ditto", rounds=2)
    sent = {"up": dict.fromkeys(parties.names, 0), "down": dict.fromkeys(parties.names, 0)}

    class Weighed(LocalTransport):
        def exchange(self, messages, enough, deadline):
            result = super().exchange(messages, enough, deadline)
            for name in messages:
                sent["down"][name] += len(messages[name])
                sent["up"][name] += len(result[name])
            return result

    counted = CountingTransport(Weighed(parties.workers()))
    port = free_port()
    coordinator = parties.coordinator(counted)
    progress = coordinator.progress
    with serving(progress, counted, port, "127.0.0.1"):
        assert scraped(port)["rounds_done",] == 0 and scraped(port)["rounds_planned",] == 2
        coordinator._run_round()
        assert scraped(port)["rounds_done",] == 1
        coordinator.run()
        result = scraped(port)
    assert result["run_info", progress.run, progress.recipe] == 1
    assert (result["rounds_done",], result["rounds_void",]) == (2, 0)
    assert result["round_seconds_count",] == 2
    assert result["round_seconds_sum",] == pytest.approx(sum(record.seconds for record in progress.records))
    assert result["last_round_seconds",] == progress.records[-1].seconds
    for name in parties.names:
        assert result["replies_total", name, "ok"] == 1 + 2 + 2  # it joined, trained twice and was scored twice
        for direction in ("up", "down"):
            assert result["bytes_total", name, direction] == sent[direction][name] > 0
        assert (
            result["site_connected", name] == result["site_in_last_round", name] == 1
            and result["site_rounds", name] == 2
        )
    row = progress.history[-1]
    scores = {key[1]: value for key, value in result.items() if key[0] == "score"}
    assert scores == {key: row[key] for key in row if key.startswith(("personal/", "global/"))} != {}
    assert not any(key[0] in ("epsilon", "run_epsilon") for key in result)
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))  # it is free


@pytest.mark.slow
def test_codes_of_sites_that_do_not_answer_are_counted(tiny, tmp_path):
    parties = Parties(tiny, tmp_path, rounds=2)

    def trouble(name, message, number):
        kind = read_header(message)["kind"]
        if name == "site1" and kind == "train":
            return Failure("unreachable")
        if name == "site2" and kind == "train" and read_header(message)["round"] == 0:
            return pack({"code": 'a"b\nperada_rounds_done 99', "answers": "ab" * 32, "facts": {}, "sums": {}})
        return None

    counted = CountingTransport(Troubled(parties.workers(), trouble))
    port = free_port()
    coordinator = parties.coordinator(counted, min_sites=1, deadline=2.0)
    with serving(coordinator.progress, counted, port, "127.0.0.1"):
        coordinator.run()
        result = scraped(port)
    assert result["replies_total", "site1", "unreachable"] >= 2
    assert result["replies_total", "site2", "malformed"] == 1 and result["rounds_done",] == 2
    assert {key[2] for key in result if key[0] == "replies_total"} == {
        "ok",
        "unreachable",
        "malformed",
        "other",
    }
    assert [result["site_in_last_round", name] for name in parties.names] == [1, 0, 1]


@pytest.mark.every(2)
@pytest.mark.parametrize("may_send", [(), ("epsilon",)])
def test_epsilon_is_there_where_a_site_says_it(may_send, tiny, tmp_path):
    parties = private(tiny, tmp_path)
    parties.rounds = 1
    workers = {name: parties.worker(n, may_send if n else ()) for n, name in enumerate(parties.names)}
    counted = CountingTransport(LocalTransport(workers))
    port = free_port()
    coordinator = parties.coordinator(counted)
    with serving(coordinator.progress, counted, port, "127.0.0.1"):
        coordinator.run()
        result = scraped(port)
    sites = {key[1]: value for key, value in result.items() if key[0] == "epsilon" and key[2] == "release"}
    assert [*sites] == (parties.names[1:] if may_send else [])
    for name, value in sites.items():
        (client,) = workers[name].clients.values()
        protection = client.protection(workers[name].store.current().training.account, 1)
        assert value == pytest.approx(protection.image_account.epsilons([0])["release"][0])
    of_run = [value for key, value in result.items() if key[0] == "run_epsilon"]
    assert of_run and all(math.isinf(value) for value in of_run)  # the first site never says it


@pytest.mark.slow
def test_who_is_in_the_last_sum_is_told(tiny, tmp_path):
    parties = Parties(tiny, tmp_path, rounds=1, sizes=(9, 5, 14, 7), loop={"secure_sums": SecureSums()})

    def gone(name, message, _):
        return Failure("unreachable") if name == "site2" and read_header(message)["kind"] == "shares" else None

    counted = CountingTransport(Troubled(parties.workers(), gone))
    port = free_port()
    coordinator = parties.coordinator(counted, min_sites=3, deadline=10.0)
    with serving(coordinator.progress, counted, port, "127.0.0.1"):
        coordinator.run()
        result = scraped(port)
    assert [result["site_in_last_round", name] for name in parties.names] == [1, 1, 0, 1]


def test_a_port_that_is_taken_is_named(tiny, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"metrics_port={port}.*'127\.0\.0\.1'"):
            serving(None, None, port, "127.0.0.1").__enter__()
    for options in ({"metrics_port": -1}, {"metrics_port": 70000}, {"log_format": "xml"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            Monitoring(**options)


def approved(folder, name, client):
    """A site's file that approves its recipe."""
    path = write(folder, name, data=PART | {"client": client})
    (recipe,) = commands.read_site(path).recipes
    digest = commands.make_client(recipe, commands.read_site(path)).recipe.digest
    return write(folder, name, digest, data=PART | {"client": client}, may_send=["sizes", "counts"])


def lines_of(text):
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.slow
def test_a_local_run_serves_metrics_and_logs_json(tmp_path, capsys, monkeypatch):
    files = [str(approved(tmp_path / name, name, n)) for n, name in enumerate(("alpha", "beta"))]
    port = free_port()
    seen = []
    root = logging.root.handlers[:]
    real = commands.Coordinator._save_progress
    monkeypatch.setattr(
        commands.Coordinator, "_save_progress", lambda self: (real(self), seen.append(scraped(port)))[0]
    )
    capsys.readouterr()
    words = [
        "deploy",
        "run",
        str(tmp_path / "alpha" / "recipe.yaml"),
        "--folder",
        str(tmp_path / "run"),
        "--local",
        *files,
    ]
    main([*words, "--metrics-port", str(port), "--log-format", "json"])
    assert [one["rounds_done",] for one in seen] == [0, 1, 1] and seen[-1]["site_connected", "beta"] == 1
    progress = read_run_progress(tmp_path / "run")
    lines = lines_of(capsys.readouterr().out)
    now = datetime.now(UTC)
    names = {"time", "level", "logger", "message", "run", "round", "site"}
    assert lines and all(line.keys() == names for line in lines)
    assert all(timedelta() <= now - datetime.fromisoformat(line["time"]) < timedelta(minutes=5) for line in lines)
    sites = [(line["site"], line["run"], line["round"]) for line in lines if line["logger"].startswith("perada.site")]
    for name in ("alpha", "beta"):
        # The first line says that the site has a new state, before any run.
        assert [one for one in sites if one[0] == name] == [
            (name, None, None),
            *((name, progress.run, n) for n in (0, 0, 1)),
        ]
    server = [line for line in lines if line["logger"] == "perada.deploy"]
    assert {line["run"] for line in server} == {progress.run} and {line["round"] for line in server} == {0, 1}
    assert logging.root.handlers == root
    with pytest.raises(SystemExit) as end:
        main([*words, "--log-format", "json"])
    (line,) = [line for line in lines_of(capsys.readouterr().out) if line["level"] == "ERROR"]
    assert end.value.code == 1 and "already contains a run; resume it" in line["message"]


def test_without_the_library_the_extra_is_named(tmp_path, monkeypatch):
    path = approved(tmp_path / "alpha", "alpha", 0)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    words = ["deploy", "run", str(tmp_path / "alpha" / "recipe.yaml"), "--folder", str(tmp_path / "run"), "--local"]
    with pytest.raises(ImportError, match=r"prometheus_client, .*'perada\[monitoring\]'"):
        main([*words, str(path), "--metrics-port", "9100"])


def test_a_line_says_what_it_is_about_and_stays_one_line():
    log = logging.Logger("perada.site.a")
    said = []
    handler = logging.Handler()
    handler.setFormatter(JsonLines())
    handler.emit = lambda record: said.append(handler.format(record))
    log.addHandler(handler)
    stamp(log, lambda: {"site": "wrong"})
    stamp(log, lambda: {"site": "a", "round": 3})
    log.info("two\nlines %s", "ε", extra={"round": 4})
    try:
        raise ValueError("x\ny")
    except ValueError:
        log.exception("failed")
    assert all("\n" not in line for line in said)
    first, second = map(json.loads, said)
    assert (first["message"], first["site"], first["round"], first["run"]) == ("two\nlines ε", "a", 4, None)
    assert second["level"] == "ERROR" and second["exception"].endswith("ValueError: x\ny")
    line = json.loads(as_json_line("\x1b[93mWARNING \x1b[0m:  hi\n"))
    assert (line["level"], line["message"], line["logger"]) == ("WARNING", "hi", "flwr")
    assert as_json_line('{"message": "ours"}\n') == '{"message": "ours"}'


def test_options_reach_the_app_and_an_app_of_another_version_is_named(tmp_path, monkeypatch):
    folder = tmp_path / "federation"
    answers = []
    write_app(folder, "x", "seed_everything: 3\n", "ab" * 32, "localhost")
    monkeypatch.setattr("perada.deploy.flower.running.check_flower", lambda: None)

    def note_command(words, *_):
        answers.append(words)
        return CommandOutcome(run=None, interrupted=False)

    monkeypatch.setattr("perada.deploy.flower.running.follow", note_command)
    link = Link("localhost:8000", certificate(tmp_path))
    watch = Monitoring(9100, "0.0.0.0", "json")
    assert run_app(folder / "app", link, Terms(), watch) == 1
    config = dict(item.split("=") for item in answers[0][-1].split())
    assert Monitoring.of({key: json.loads(value) for key, value in config.items()}) == replace(
        watch, superlink="localhost:8000"
    )
    file = folder / "app" / "pyproject.toml"
    file.write_text(
        "\n".join(
            line for line in file.read_text().splitlines() if not line.startswith(("metrics", "log_", "superlink"))
        )
    )
    assert run_app(folder / "app", link, Terms()) == 1
    assert "metrics_port" not in answers[1][-1] and "min_sites" in answers[1][-1]
    with pytest.raises(ValueError, match=r"metrics_port.*`perada deploy init RECIPE FOLDER`"):
        run_app(folder / "app", link, Terms(), watch)
