# SPDX-License-Identifier: Apache-2.0
"""The algorithms and the rule in the documentation that are written outside the package, run as shown there."""

import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml

from perada.algorithms import FedAvg
from perada.cli import main
from perada.data import Phase
from perada.server import FedAvgM

from .problems import CLASSES, SIZES, finetune, task

ROOT = Path(__file__).parents[2]


def blocks(language, page="algorithms", above=""):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    return re.findall(rf"{above}```{language}\n(.*?)```", text, re.DOTALL)


def write_blocks(page, file):
    """What the blocks of a page put into a file."""
    names = {"__name__": file}
    exec("".join(blocks("python", page, rf"<!-- file: {file}\.py -->\n")), names)
    return names


def train_state(tiny, **options):
    settings = tiny.options | {"distill_steps": None, "logger": False, "check_val_every_n_epoch": 9} | options
    (state,) = tiny.finetune(tiny.data(public=False, test=False), **settings).states("global")
    return {name: value for name, value in state.items() if value.is_floating_point()}


@pytest.mark.slow
def test_the_momentum_of_both_examples_is_that_of_fedavgm(tiny):
    """With the paper's rate of 1, the server's momentum on the mean change is FedAvgM."""
    steady = write_blocks("algorithms", "my_methods")["Steady"]
    rule = write_blocks("extending", "mine")["Momentum"]
    arguments = {"rounds": 4, "local_steps": 2}
    expected = train_state(tiny, algorithm="fedavg", server_rule=FedAvgM(lr=1.0, momentum=0.5), **arguments)
    plain = train_state(tiny, algorithm="fedavg", **arguments)
    runs = [train_state(tiny, algorithm=steady(push=0.0, momentum=0.5), **arguments)]
    runs.append(train_state(tiny, algorithm="fedavg", server_rule=rule(0.5), **arguments))
    for name, value in expected.items():
        assert not torch.allclose(plain[name], value, atol=1e-3)
        for results in runs:
            torch.testing.assert_close(results[name], value, atol=1e-6, rtol=1e-5)


def test_the_example_that_remembers_on_the_clients(tiny):
    """All clients take one step a round: the push moves their mean by its strength · η · the last round's change."""
    steady = write_blocks("algorithms", "my_methods")["Steady"]
    arguments = {"clients_per_round": None, "local_steps": 1}
    start, first, second = (train_state(tiny, algorithm="fedavg", rounds=rounds, **arguments) for rounds in range(3))
    pushed = train_state(tiny, algorithm=steady(push=2.0, momentum=0.0), rounds=2, **arguments)
    for name, value in pushed.items():
        moved = 2.0 * tiny.options["lr_local"] * (first[name] - start[name])
        assert moved.abs().max() > 1e-5
        torch.testing.assert_close(value, second[name] + moved, atol=1e-6, rtol=1e-5)


class Prototypes(FedAvg):
    """Sums of a last phase in which nothing is trained, and something else for each client (docs/extending.md)."""

    def phases(self, epochs, steps):
        return (*super().phases(epochs, steps), Phase("sums", epochs=1))

    def trainable_keys(self, role, phase, tensor_names, round):
        return () if phase == "sums" else tensor_names.parameters

    def broadcast(self, sending):
        own = [sending.state[f"{client}/sent"]["means"] for client in sending.clients] if sending.state else None
        zeros = torch.zeros(len(sending.clients), CLASSES, CLASSES, dtype=torch.float64)
        return super().broadcast(sending) | {"mine/last": torch.stack(own) if own else zeros}

    def begin_round(self, kept, received, tensor_names):
        last = received["mine/last"]
        local = {name: value for name, value in received.items() if name != "mine/last"}
        return {"local": local, "sums": {"last": last, "means": torch.zeros_like(last)}}

    def client_step(self, step):
        if step.phase != "sums":
            return super().client_step(step)
        hot = F.one_hot(step.labels, CLASSES).double()
        step.states["sums"]["means"] += step.mean(hot.unsqueeze(-1) * step.logits("local").detach().unsqueeze(-2))

    def end_round(self, trained, kept, received, tensor_names):
        return {}, trained["local"] | {f"mine/{name}": value for name, value in trained["sums"].items()}

    def server_step(self, server):
        sent = server.updates
        names = ["mine/last", "mine/means"]
        gathered = sent.gathered_all()
        self.seen = {
            client: {name: value[row] for name, value in gathered.items()} for row, client in enumerate(server.clients)
        }
        for client, own in self.seen.items():
            server.state[f"{client}/sent"] = {"means": own["mine/means"]}
        return server.mean(sent.part(range(len(server.clients)), without=names), server.weights)


@pytest.mark.parametrize("engine", ["folded", "loop"])
def test_a_last_phase_sums_over_the_trained_model_and_each_client_receives_its_own(engine):
    """Batches hold all of a client's images, so that a sum is the mean over them."""
    seen = []
    for rounds in (1, 2):
        algorithm = Prototypes()
        finetune(algorithm, "linear-full", engine, rounds=rounds, clients_per_round=None, batch_size=max(SIZES))
        seen.append(algorithm.seen)
    for client, data in enumerate(task().train):
        x, y = (torch.stack([torch.as_tensor(row[place]) for row in data]) for place in (0, 1))
        for own in (after[client] for after in seen):
            logits = x.flatten(1) @ own["fc.weight"].T + own["fc.bias"]
            means = F.one_hot(y, CLASSES).double().T @ logits / len(y)
            torch.testing.assert_close(own["mine/means"], means, rtol=0, atol=1e-12)
        assert torch.equal(seen[1][client]["mine/last"], seen[0][client]["mine/means"])
        assert not seen[0][client]["mine/last"].any()


@pytest.mark.slow
def test_an_algorithm_of_ones_own_runs_from_a_recipe(tmp_path, monkeypatch):
    parts = blocks("python", above=r"<!-- file: my_methods\.py -->\n")
    section = blocks("yaml")[-1]
    code = "".join(parts)
    (tmp_path / "my_methods.py").write_text(code)
    recipe = yaml.safe_load((ROOT / "recipes" / "digits.yaml").read_text())
    recipe["federated"] |= yaml.safe_load(section)["federated"]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(recipe))
    small = """
        --trainer.max_epochs=2 --trainer.accelerator=cpu --trainer.enable_progress_bar=false
        --trainer.check_val_every_n_epoch=1 --federated.clients_per_round=2 --training.local_epochs=1
        --data.train_limit=200 --data.test_limit=40 --data.partition.num_clients=4 --data.public=null
        --data.image_size=16 --data.batch_size=8
    """.split()
    monkeypatch.chdir(tmp_path)
    main(["fit", "--config", "mine.yaml", *small])
    saved = torch.load(tmp_path / "lightning_logs" / "version_0" / "checkpoints" / "last.ckpt")["perada"]["federation"]
    rows = saved["clients"]["rows"]
    header = json.loads(saved["clients"]["header"][8:])
    names = set(header) - {"__metadata__"}
    assert len(names) == 2
    assert all(name.startswith("personal/fc.") for name in names)
    assert len(rows) >= 2
    one, other, *_ = (row.view(torch.float32) for row in rows.values())
    for name in names:
        start, stop = (place // 4 for place in header[name]["data_offsets"])
        assert not torch.equal(one[start:stop], other[start:stop])
    used = (tmp_path / "lightning_logs" / "version_0" / "config.yaml").read_text()
    assert "class_path: my_methods.FedPerProx" in used
    assert "mu: 0.05" in used
