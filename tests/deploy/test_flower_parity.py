# SPDX-License-Identifier: Apache-2.0
"""A run over Flower, with TLS and authentication, is to the bit the run of the same sites in one process."""

import os
import signal
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'perada[flower]'")

from perada.cli.flower import recipe_digest
from perada.deploy.flower.running import program
from perada.deploy.server import progress as records
from perada.deploy.state import SITE_STATE, read_state
from perada.studies.deployment import ENVIRONMENT, LINK, SITES, Demo, demo_recipe, run_demo

from .flower_runs import assert_same_bits, run_in_one_process
from .parties import Watched

pytestmark = pytest.mark.slow


class Watching(Watched, Demo):
    """The demonstration, whose processes can be looked at."""


def without_times(progress):
    return [{name: value for name, value in row.items() if "seconds" not in name} for row in progress.history]


def test_over_flower_or_in_one_process(tmp_path, capfd):
    assert run_demo(1, recipe_digest, tmp_path / "flower") == 0
    output = capfd.readouterr().out
    assert "has the status finished:completed" in output
    assert "3 of 3 sites replied" in output
    flower_run = records.read_saved_run(tmp_path / "flower")
    local_run = run_in_one_process(tmp_path, demo_recipe(1))
    for run in (flower_run, local_run):
        assert [member.name for member in run.progress.roster] == list(SITES)
    assert_same_bits(flower_run.states["global"], local_run.states["global"])
    assert without_times(flower_run.progress) == without_times(local_run.progress)


def test_a_worker_and_the_server_are_killed_in_mid_round(tmp_path):
    """The personal states too are those of a run in which nothing happened."""
    here = tmp_path / "here"
    here.mkdir()
    with tempfile.TemporaryDirectory(prefix="pd") as folder, Watching(Path(folder), SITES, ENVIRONMENT) as demo:
        demo.begin(2, recipe_digest)
        words = [program("flwr"), "run", demo.app, LINK, "--stream", "-c"]
        config = f'min_sites=3 deadline=300.0 state="{demo.folder}/server"'
        demo.start("run", [*words, config])
        log = demo.log("worker-beta")
        demo.wait_for(lambda: "train, round 2" in log.read_text(), "run", "round 2 at beta", 300)
        demo.kill("worker-beta")
        (server,) = demo.children(demo.processes["link"].pid, "flwr-serverapp")
        os.kill(server, signal.SIGKILL)
        demo.work("beta")
        demo.processes["run"].wait(180)
        demo.start("run", [*words, f"{config} resume=true"])
        demo.wait_for(lambda: "| 1     |" in demo.log("run").read_text(), "run", "the table of rounds", 300)
        killed_run = records.read_saved_run(demo.folder / "server")
        sites = [read_state(demo.folder / f"state-{site}" / SITE_STATE)[0] for site in SITES]
    local_run = run_in_one_process(here, demo_recipe(2))
    assert_same_bits(killed_run.states["global"], local_run.states["global"])
    assert without_times(killed_run.progress) == without_times(local_run.progress)
    for site, state in zip(SITES, sites, strict=True):
        other = read_state(here / f"state-{site}" / SITE_STATE)[0]
        assert state.training.num_rounds == other.training.num_rounds == 2
        assert state.training.client_state.keys() == other.training.client_state.keys() != set()
        for role in other.training.client_state:
            assert_same_bits(state.training.client_state[role], other.training.client_state[role])
