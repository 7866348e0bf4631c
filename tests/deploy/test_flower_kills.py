# SPDX-License-Identifier: Apache-2.0
"""Every party is killed by SIGKILL in mid-round, with real workers; the bits are those of a run in peace."""

import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import yaml

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'perada[flower]'")

from perada.cli.flower import recipe_digest
from perada.deploy.audit import HEAD, LOG
from perada.deploy.server import progress as records
from perada.deploy.state import SITE_STATE, SiteStore, read_state
from perada.studies.deployment import ENVIRONMENT, PROGRAM, SITES, Demo, demo_recipe

from .flower_runs import assert_same_bits, run_in_one_process
from .parties import Supervisor, Watched

pytestmark = pytest.mark.slow
ROUNDS = 6


def long_rounds(rounds, secure_sums=False):
    """The recipe of the demonstration, with rounds that last for seconds."""
    recipe = yaml.safe_load(demo_recipe(rounds, secure_sums))
    recipe["training"]["local_epochs"] = 8
    recipe["trainer"]["check_val_every_n_epoch"] = 3
    return yaml.safe_dump(recipe)


class Killed(Watched, Demo):
    """Three sites, of which beta can be held in the middle of a round."""

    def command(self, resume):
        """`perada deploy run`, in the background; what it prints goes to the log `run`."""
        self.log("run").unlink(missing_ok=True)
        words = ["--link", f"127.0.0.1:{self.port}", "--root-certificates", self.folder / "keys" / "ca.crt"]
        words += ["--min-sites", 3, "--deadline", 400, "--state", self.folder / "server"]
        words += ["--resume"] if resume else []
        self.start("run", [sys.executable, "-c", PROGRAM, "deploy", "run", self.app, *words])

    def state(self, site):
        return read_state(self.folder / f"state-{site}" / SITE_STATE)[0]

    def hold(self, number):
        """Stop beta's worker in the middle of a round; its round cannot end before it goes on."""
        log = self.log("worker-beta")
        self.wait_for(lambda: f"train, round {number + 1}" in log.read_text(), "run", f"round {number} at beta", 400)
        self.processes["worker-beta"].send_signal(signal.SIGSTOP)
        assert self.state("beta").training.round == number - 1, "the round was over before it could be held"

    def go_on(self):
        self.processes["worker-beta"].send_signal(signal.SIGCONT)

    def closed(self):
        return records.read_run_progress(self.folder / "server").done


def test_every_party_is_killed_in_mid_round(tmp_path, monkeypatch):
    monkeypatch.setattr("perada.studies.deployment.demo_recipe", long_rounds)
    with tempfile.TemporaryDirectory(prefix="pd") as folder, Killed(Path(folder), SITES, ENVIRONMENT) as demo:
        demo.begin(ROUNDS, recipe_digest)
        demo.command(resume=False)

        demo.hold(1)
        (app,) = demo.children(demo.processes["node-beta"].pid, "flwr-clientapp")
        os.kill(app, signal.SIGKILL)
        demo.go_on()

        demo.hold(2)
        demo.kill("worker-beta")
        assert demo.closed() == 2
        demo.work("beta")

        demo.wait_for(lambda: demo.closed() > 2, "run", "the end of round 2", 400)
        demo.hold(3)
        demo.kill("node-beta")
        demo.go_on()
        demo.wait_for(Supervisor(demo, "beta").let_in, "run", "the restarted SuperNode", 400)

        demo.hold(4)
        (server,) = demo.children(demo.processes["link"].pid, "flwr-serverapp")
        os.kill(server, signal.SIGKILL)
        assert demo.processes["run"].wait(300) == 1
        assert demo.closed() == 4
        demo.go_on()
        demo.command(resume=True)

        demo.hold(5)
        link = demo.processes["link"].pid
        group = [pid for name in ("flwr-serverapp", "flower-superexec") for pid in demo.children(link, name)]
        demo.kill("link")
        for pid in group:  # as systemd does with what a service leaves
            os.kill(pid, signal.SIGKILL)
        demo.kill("run")
        assert demo.closed() == 5
        demo.go_on()
        demo.start_link()
        demo.command(resume=True)
        assert demo.processes["run"].wait(600) == 0, demo.log("run").read_text()[-2000:]

        killed_run = records.read_saved_run(demo.folder / "server")
        sites = {site: demo.state(site) for site in SITES}
        for site in SITES:
            demo.kill(f"worker-{site}")
            book = SiteStore(demo.folder / f"state-{site}")
            assert book.totals.ledger.history(0) == {(0.0, 1.0): ROUNDS}  # one entry a round
            book.close()
            assert sorted(path.name for path in book.folder.iterdir()) == [HEAD, LOG, "lock", SITE_STATE]
        said = demo.log("worker-beta").read_text()
    assert said.count("train, round 2\n") >= 2  # asked again after the ClientApp's death, and not trained again
    local_run = run_in_one_process(tmp_path, long_rounds(ROUNDS))
    assert killed_run.progress.done == local_run.progress.done == ROUNDS
    assert_same_bits(killed_run.states["global"], local_run.states["global"])
    assert without_times(killed_run.progress) == without_times(local_run.progress)
    for site, state in sites.items():
        other = read_state(tmp_path / f"state-{site}" / SITE_STATE)[0]
        assert state.training.num_rounds == other.training.num_rounds == ROUNDS
        for role in other.training.client_state:
            assert_same_bits(state.training.client_state[role], other.training.client_state[role])


def without_times(progress):
    names = ("seconds", "_mb")  # a message that is sent again is counted again
    return [{key: value for key, value in row.items() if not key.endswith(names)} for row in progress.history]
