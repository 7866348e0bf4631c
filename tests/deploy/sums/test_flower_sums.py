# SPDX-License-Identifier: Apache-2.0
"""Secure sums over Flower with real processes, of which each is killed by SIGKILL at each moment of a sum."""

import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import yaml

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'perada[flower]'")

from perada.cli import main
from perada.cli.flower import recipe_digest
from perada.deploy.server import progress as records
from perada.deploy.state import SITE_STATE, read_state
from perada.studies import deployment
from perada.studies.deployment import ENVIRONMENT, PROGRAM, Demo, demo_recipe, run_demo

from ..parties import Supervisor, Watched
from .test_deployed_sums import mean_of

pytestmark = pytest.mark.slow
FOUR = ("alpha", "beta", "gamma", "delta")


def test_over_flower_it_is_the_simulation_to_the_bit(tmp_path, capfd, monkeypatch):
    assert run_demo(2, recipe_digest, tmp_path / "server", secure_sums=True) == 0
    output = capfd.readouterr().out
    assert "has the status finished:completed" in output and "All processes have ended" in output
    assert "mask (update, attempt 1), round 2: 3 of 3 sites replied in" in output
    saved_run = records.read_saved_run(tmp_path / "server")
    progress = saved_run.progress
    states = saved_run.states
    assert [record.summed for record in progress.records] == [[*deployment.SITES]] * 2

    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(demo_recipe(2, secure_sums=True))
    main(["fit", "--config", "recipe.yaml"])
    (checkpoint,) = tmp_path.rglob("last.ckpt")
    simulated = torch.load(checkpoint, weights_only=True)["perada"]
    assert states["global"].keys() == simulated["federation"]["global"].keys() != set()
    for key, value in simulated["federation"]["global"].items():
        assert torch.equal(states["global"][key], value), key
    for name in ("personal/local_test", "global/global_test"):  # sums of rounded scores
        assert progress.history[-1][name] == pytest.approx(simulated["metrics"]["rounds"][-1][name], abs=1e-5), name


def averaging_recipe(rounds, secure_sums):
    """The recipe of the demonstration, whose global state is the plain mean of what the sites sent."""
    recipe = yaml.safe_load(demo_recipe(rounds, secure_sums))
    recipe["distillation"]["steps"] = 0
    recipe["federated"]["weighting"] = "uniform"
    recipe["training"]["local_epochs"] = 3  # training that lasts for seconds
    return yaml.safe_dump(recipe)


class Killed(Watched, Demo):
    """Four sites and their server, whose processes are killed at moments that their logs say."""

    def begin(self, rounds):
        super().begin(rounds, recipe_digest, True)
        self.wait_for(lambda: self.online() == len(FOUR), "link", "all SuperNodes")

    def command(self, deadline, resume=False):
        """`perada deploy run`, in the background; what it prints goes to the log `run`."""
        words = ["--link", f"127.0.0.1:{self.port}", "--root-certificates", self.folder / "keys" / "ca.crt"]
        words += ["--min-sites", 3, "--deadline", deadline, "--state", self.folder / "server"]
        words += ["--resume"] if resume else []
        self.start("run", [sys.executable, "-u", "-c", PROGRAM, "deploy", "run", self.app, *words])

    def said(self, text, name="run"):
        """Wait until a log says something."""
        self.wait_for(lambda: text in self.log(name).read_text(errors="replace"), name, repr(text), 400)

    def over(self, step, number):
        """Wait until all sites have taken a step of the sum of a round."""
        self.said(f"{step} (update, attempt 1), round {number + 1}: 4 of 4 sites replied")

    def never(self, site, step, number):
        """A site was not asked for a step."""
        assert f"{step} (update, attempt 1), round {number + 1}" not in self.log(f"worker-{site}").read_text()

    def again(self, *sites, before=None):
        """Kill workers ``before`` they were asked for a step of a round, and start them again, as a supervisor does."""
        for site in sites:
            self.kill(f"worker-{site}")
            if before:
                self.never(site, *before)
        for site in sites:
            self.work(site)

    def hold(self, site):
        self.processes[f"worker-{site}"].send_signal(signal.SIGSTOP)

    def go_on(self, site):
        self.processes[f"worker-{site}"].send_signal(signal.SIGCONT)

    def asking(self, site):
        """Id of the ClientApp's process that has connected to a worker which is held."""
        path = str(self.socket(site))

        def connections():
            return sum(line.split()[-1] == path for line in Path("/proc/net/unix").read_text().splitlines()) - 1

        self.wait_for(connections, "run", "a ClientApp at the worker")
        (app,) = self.children(self.processes[f"node-{site}"].pid, "flwr-clientapp")
        return app

    def end_server(self, deadline):
        """Kill the server's process, and resume the run."""
        (server,) = self.children(self.processes["link"].pid, "flwr-serverapp")
        os.kill(server, signal.SIGKILL)
        assert self.processes["run"].wait(300) == 1
        self.command(deadline, resume=True)

    def done(self):
        """Rounds that are over."""
        try:
            return records.read_run_progress(self.folder / "server").done
        except FileNotFoundError:
            return 0

    def closed(self, number):
        """The record of a round once it is over: its sum is that of the updates on the disks of those that it names."""
        self.wait_for(lambda: self.done() > number, "run", f"the end of round {number}", 400)
        saved_run = records.read_saved_run(self.folder / "server")
        progress = saved_run.progress
        kept = {site: read_state(self.folder / f"state-{site}" / SITE_STATE)[0] for site in FOUR}
        record = progress.records[number]
        assert progress.done == number + 1 and {state.training.round for state in kept.values()} == {number}
        result = saved_run.states["global"]
        if record.void:
            expected = self.before
        else:
            expected = mean_of({site: state.summing.update for site, state in kept.items()}, record.summed)
        assert result.keys() == expected.keys() != set()
        for key, value in expected.items():
            assert torch.equal(result[key], value), key
        self.before = result
        return record


@pytest.fixture
def four(monkeypatch):
    monkeypatch.setattr(deployment, "SITES", FOUR)
    monkeypatch.setattr(deployment, "demo_recipe", averaging_recipe)
    with tempfile.TemporaryDirectory(prefix="pd") as folder, Killed(Path(folder), FOUR, ENVIRONMENT) as made:
        yield made
        print(made.log("run").read_text(), made.log("worker-beta").read_text())  # for who asks why it failed


def test_a_worker_is_killed_at_each_moment_of_a_sum(four):
    """Its keys are gone with it, and it is in the sum only if its part had been sent."""
    without = ["alpha", "delta", "gamma"]
    everyone = sorted(FOUR)
    four.begin(7)
    four.command(deadline=500)

    four.said("train, round 1", "worker-beta")  # before it has keys
    four.again("beta")
    assert four.closed(0).summed == everyone

    four.over("shares", 1)
    four.again("beta", before=("mask", 1))
    record = four.closed(1)
    assert (record.summed, record.failed) == (without, {"beta": "other"})

    four.over("mask", 2)
    four.again("beta", before=("confirm", 2))
    record = four.closed(2)
    assert (record.summed, record.failed) == (everyone, {})

    four.over("confirm", 3)
    four.again("beta", before=("reveal", 3))
    assert four.closed(3).summed == everyone

    # Nothing was masked, so the sum begins again, with the restarted workers.
    four.over("shares", 4)
    four.again("beta", "gamma", before=("hold", 4))
    assert four.closed(4).summed == everyone

    four.over("hold", 5)
    four.again("beta", "gamma", before=("mask", 5))
    record = four.closed(5)
    assert record.summed == []
    assert record.void == "secure sum: 2 of 4 sites sent their part, but 3 are required"

    assert four.closed(6).summed == everyone
    assert four.processes["run"].wait(400) == 0, four.log("run").read_text()[-3000:]


def test_a_clientapp_and_a_supernode_are_killed_in_a_sum(four):
    """They have no keys: their site stays in it. What the worker made for a ClientApp that died, the next one gets."""
    everyone = sorted(FOUR)
    four.begin(4)
    four.command(deadline=600)  # the default, of which each step waits a seventh

    for number, (step, next_step) in enumerate((("shares", "hold"), ("hold", "mask"))):
        four.over(step, number)
        four.hold("beta")
        four.never("beta", next_step, number)
        os.kill(four.asking("beta"), signal.SIGKILL)
        four.go_on("beta")
        four.said(f"{next_step} (update, attempt 1), round {number + 1}: 3 of 4 sites replied, beta crashed")
        four.said(f"{next_step} (update, attempt 1), round {number + 1}: 1 of 1 sites replied")
        assert four.closed(number).summed == everyone

    for number, step in ((2, "shares"), (3, "confirm")):
        four.over(step, number)
        four.kill("node-beta")
        four.wait_for(Supervisor(four, "beta").let_in, "run", "the restarted SuperNode", 300)
        assert four.closed(number).summed == everyone

    assert four.processes["run"].wait(400) == 0, four.log("run").read_text()[-3000:]
    assert four.done() == 4


def test_the_server_is_killed_at_each_moment_of_a_sum_and_a_site_comes_back_late(four):
    everyone = sorted(FOUR)
    four.begin(5)
    four.command(deadline=500)
    for number, step in enumerate(("shares", "mask", "confirm")):
        four.over(step, number)
        four.end_server(deadline=500)
        record = four.closed(number)
        assert (record.summed, record.void) == (everyone, "")

    four.over("shares", 3)
    four.hold("beta")
    four.said("hold (update, attempt 1), round 4: 3 of 4 sites replied, beta late")
    four.go_on("beta")
    record = four.closed(3)
    four.never("beta", "mask", 3)  # whoever asked it is gone, and so it masks nothing
    assert (record.summed, record.failed) == (["alpha", "delta", "gamma"], {"beta": "late"})
    assert four.closed(4).summed == everyone
    assert four.processes["run"].wait(400) == 0, four.log("run").read_text()[-3000:]
    assert four.done() == 5
