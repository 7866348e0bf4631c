# SPDX-License-Identifier: Apache-2.0
"""Over Flower, the options of monitoring reach the server's process, and the sites' logs are whole at the end."""

import json
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'perada[flower]'")
pytest.importorskip("prometheus_client", reason="pip install 'perada[monitoring]'")

from cryptography import x509
from prometheus_client.parser import text_string_to_metric_families

from perada.cli import main
from perada.cli.flower import recipe_digest
from perada.deploy.server.progress import read_run_progress
from perada.studies.deployment import ENVIRONMENT, SITES, Demo, free_port
from perada.system.files import LOCK

pytestmark = pytest.mark.slow


def test_a_run_over_flower_is_watched(capsys):
    port = free_port()
    scrapes = []
    over = threading.Event()

    def scrape():
        while not over.wait(0.5):
            with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as reply:
                scrapes.append(reply.read().decode())

    with tempfile.TemporaryDirectory(prefix="pd") as folder, Demo(Path(folder), SITES, ENVIRONMENT) as demo:
        demo.begin(1, recipe_digest)
        capsys.readouterr()
        thread = threading.Thread(target=scrape)
        thread.start()
        words = ["--link", f"127.0.0.1:{demo.port}", "--root-certificates", str(demo.folder / "keys" / "ca.crt")]
        words += ["--min-sites", "3", "--deadline", "400", "--state", str(demo.folder / "server")]
        words += ["--metrics-port", str(port), "--log-format", "json"]
        try:
            with pytest.raises(SystemExit) as end:
                main(["deploy", "run", str(demo.app), *words])
        finally:
            over.set()
            thread.join()
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        progress = read_run_progress(demo.folder / "server")
        certificate = x509.load_pem_x509_certificate((demo.folder / "keys" / "server.pem").read_bytes())
        for site in SITES:
            main(["deploy", "audit", str(demo.folder / f"state-{site}"), "--json"])
            left = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
            assert [line["request"]["kind"] for line in left] == ["join", "train", "evaluate"]
            assert {line["run"] for line in left} == {progress.run}
    assert end.value.code == 0
    ours = [line for line in lines if line["logger"] == "perada.deploy"]
    assert {line["run"] for line in ours} == {progress.run} and {line["logger"] for line in lines} <= {
        "perada.deploy",
        "flwr",
    }
    families = [family for text in scrapes for family in text_string_to_metric_families(text)]
    samples = {(sample.name, *sample.labels.values()) for family in families for sample in family.samples}
    assert {("perada_site_connected", site) for site in SITES} <= samples
    assert "perada_rounds_planned 1.0" in scrapes[0]
    name = "perada_superlink_certificate_expiry_timestamp_seconds"
    (expiry,) = {sample.value for family in families if family.name == name for sample in family.samples}
    assert expiry == certificate.not_valid_after_utc.timestamp()


def test_a_superlink_that_is_killed_is_said_in_lines_of_json(capfd):
    """`flwr list` ends with status 0 then, and its answer has no runs."""
    with tempfile.TemporaryDirectory(prefix="pd") as folder, Demo(Path(folder), SITES, ENVIRONMENT) as demo:
        demo.begin(1, recipe_digest)
        capfd.readouterr()
        words = ["--link", f"127.0.0.1:{demo.port}", "--root-certificates", str(demo.folder / "keys" / "ca.crt")]
        words += ["--min-sites", "9", "--deadline", "400", "--state", str(demo.folder / "server")]

        def kill_link():
            """Kill the SuperLink once the server's process, which then waits for nine sites, has locked its folder."""
            demo.wait_for((demo.folder / "server" / LOCK).exists, "link", "the server's process", 300)
            demo.kill("link")

        killer = threading.Thread(target=kill_link)
        killer.start()
        try:
            with pytest.raises(SystemExit) as end:
                main(["deploy", "run", str(demo.app), *words, "--log-format", "json"])
        finally:
            killer.join()
    output = capfd.readouterr()
    lines = [json.loads(line) for line in output.out.splitlines()]
    assert end.value.code == 1 and "Traceback" not in output.err
    *_, status, remedy = [line["message"] for line in lines]
    assert status.endswith("has the status unknown: the SuperLink does not answer")
    assert "restart it with the same --database" in remedy
