# SPDX-License-Identifier: Apache-2.0
"""Three sites over a real SuperLink, with TLS and authentication, and what kills each of the parties.

The sites add 1, 2 and 3 to the server's tensor, whose mean is then 2 larger: after R rounds it is 2·R, if and only if
each round was closed once, with all three.
"""

import json
import os
import re
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'perada[flower]'")

from perada.deploy.flower.keys import write_site_keys
from perada.deploy.flower.running import program
from perada.studies.deployment import LINK, Loopback

from .parties import Supervisor, Watched

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
SITES = ["alpha", "beta", "gamma"]


class Stubs(Watched, Loopback):
    """Three sites with stub workers."""

    def begin(self):
        self.write_keys()
        self.start_link()
        for site in SITES:
            self.register(site)
            self.work(site)
            self.start_node(site)
        return self

    def work(self, site, seconds=0.0):
        """Start a worker, in the place of the one that there is."""
        number = SITES.index(site) + 1
        self.start(f"worker-{site}", [sys.executable, HERE / "stub_worker.py", self.socket(site), number, seconds])

    def trained(self, site):
        """Rounds that a site's worker began, in their order."""
        return [int(number) for number in re.findall(r"round (\d+)", self.log(f"worker-{site}").read_text())]

    def run(self, state, rounds=3, length=10, **options):
        """Start a run in the background: its process, whose output is in the log `run`."""
        app = self.folder / "app"
        shutil.rmtree(app, ignore_errors=True)
        shutil.copytree(HERE / "stub_app", app)
        (app / "perada_app" / "recipe.yaml").write_text(f"rounds: {rounds}\nlength: {length}\n")
        arguments = {"state": str(self.folder / state)} | options
        words = " ".join(f"{key}={json.dumps(value)}" for key, value in arguments.items())
        self.log("run").unlink(missing_ok=True)
        for site in SITES:
            self.log(f"worker-{site}").write_text("")
        self.start("run", [program("flwr"), "run", app, LINK, "--stream", "-c", words])

    def said(self):
        return self.log("run").read_text()

    def until(self, text, seconds=180):
        """Wait until the run says something."""
        self.wait_for(lambda: re.search(text, self.said()), "run", text, seconds)

    def until_begun(self, site, number, seconds=180):
        self.wait_for(lambda: number in self.trained(site), "run", f"round {number} at {site}", seconds)

    def result(self, seconds=300):
        """First and last entry of the tensor at the end of the run."""
        try:
            self.until("RESULT", seconds)
        finally:
            print(self.said())
        return re.search(r"RESULT (\S+) (\S+)", self.said()).groups()


@pytest.fixture(scope="module")
def sites():
    with tempfile.TemporaryDirectory(prefix="fl") as folder, Stubs(Path(folder), SITES) as stubs:
        yield stubs.begin()
    assert stubs.alive() == []


def test_three_sites_run(sites):
    sites.run("three", rounds=3, length=2_000_000)  # 8 MB: more than one of Flower's chunks
    assert sites.result() == ("6", "6")
    assert [sites.trained(site) for site in SITES] == [[0, 1, 2]] * 3
    assert sites.said().count("'replied'") == 9


def test_a_killed_supernode_comes_back(sites):
    sites.work("beta", 8)
    sites.run("node", rounds=2, deadline=90.0)
    sites.until_begun("beta", 1)
    sites.kill("node-beta")
    sites.wait_for(Supervisor(sites, "beta").let_in, "link", "the restarted SuperNode", 180)
    assert sites.result() == ("4", "4")
    sites.work("beta")


def test_a_killed_client_app_leaves_its_worker_alive(sites):
    sites.work("beta", 8)
    worker = sites.processes["worker-beta"]
    sites.run("client", rounds=2, deadline=90.0)
    sites.until_begun("beta", 1)
    for pid in sites.children(sites.processes["node-beta"].pid, "flwr-clientapp"):
        os.kill(pid, signal.SIGKILL)
    assert sites.result() == ("4", "4")
    assert worker.poll() is None
    assert "'beta': 'crashed'" in sites.said()
    sites.work("beta")


def test_a_killed_worker_is_a_code_and_its_successor_goes_on(sites):
    sites.work("beta", 8)
    sites.run("worker", rounds=2)
    sites.until_begun("beta", 1)
    sites.work("beta")
    assert sites.result() == ("4", "4")
    assert "'beta': 'crashed'" in sites.said()


def test_a_killed_server_app_is_resumed(sites):
    sites.work("beta", 8)
    sites.run("server", rounds=2)
    sites.until_begun("beta", 1)
    for pid in sites.children(sites.processes["link"].pid, "flwr-serverapp"):
        os.kill(pid, signal.SIGKILL)
    sites.processes["run"].wait(120)
    assert "finished:failed" in sites.runs().values()
    sites.run("server", rounds=2, resume=True)
    assert sites.result() == ("4", "4")
    assert "ROUND 0" not in sites.said()
    sites.work("beta")


def test_a_killed_superlink_is_resumed(sites):
    sites.work("beta", 8)
    sites.run("link", rounds=2)
    sites.until_begun("beta", 1)
    sites.kill("link")
    sites.kill("run")
    sites.start_link()
    sites.run("link", rounds=2, resume=True)
    assert sites.result() == ("4", "4")
    assert "ROUND 0" not in sites.said()
    sites.work("beta")


def test_a_straggler_is_skipped_trains_nothing_stale_and_comes_back(sites):
    sites.work("gamma", 25)
    sites.run("late", rounds=4, deadline=20.0, late="skip")
    sites.until("ROUND 1 ")
    sites.work("gamma")
    sites.result()
    rounds = re.findall(r"ROUND (\d) \{.*'gamma': '(\w+)'", sites.said())
    assert rounds[0] == ("0", "late")
    assert rounds[-1] == ("3", "replied")
    assert sites.trained("gamma") == sorted(set(sites.trained("gamma")))


def test_nothing_of_a_reason_reaches_the_server(sites):
    sites.start("worker-beta", [sys.executable, HERE / "stub_worker.py", sites.socket("beta"), -1, 0])
    sites.run("canary", rounds=1, late="skip", min_sites=3)
    sites.until("RESULT")
    assert "'beta': 'crashed'" in sites.said()
    assert "patient 4711" in sites.log("worker-beta").read_text()
    files = [sites.log("run"), sites.log("link"), *sites.folder.glob("link.db*")]
    assert len(files) >= 3
    assert [file.name for file in files if b"patient 4711" in file.read_bytes()] == []
    sites.work("beta")


def test_a_key_that_is_not_registered_is_rejected(sites):
    keys = sites.folder / "keys"
    write_site_keys(keys, "mallory")
    sites.start_node("mallory")
    assert sites.processes["node-mallory"].wait(60) == 1
    assert "mallory.key' is not registered" in sites.log("node-mallory").read_text()
    assert all("SuperNode ID" in sites.log(f"node-{site}").read_text() for site in SITES)  # which says that it is in
    assert "SuperNode ID" not in sites.log("node-mallory").read_text()
    assert sites.online() == 3
