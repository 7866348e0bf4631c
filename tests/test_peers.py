# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks peers`: every framework trains the same, and the figures are those of the processes."""

import ast
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from benchmarks.peers import __main__ as program
from benchmarks.peers import measure, run_perada
from benchmarks.peers.measure import Measurement, measurement_of, missing_packages, run_process
from benchmarks.peers.memory import process_tree, proportional_mb
from benchmarks.peers.networks import (
    body_of,
    build_network,
    head_of,
    train_client,
    train_head_then_body,
    trained_state,
)
from benchmarks.peers.prepare import prepare
from benchmarks.peers.scores import Score, score
from benchmarks.peers.tasks import TASKS, Training, load_task_data, quick_task, save_task_data, unsupported_reason

SLOW = ("start_up", "cnn_1000", "resnet", "residual", "vit_lora")


def plain_rounds(data, rounds):
    """One client after another, and the mean of what they trained: what the peers do."""
    network = build_network(data.task)
    network.load_state_dict(data.initial_state)
    global_state = trained_state(network)
    personal = {}
    for round_number in range(rounds):
        updates = []
        for client in data.cohorts[round_number]:
            batches = data.client_batches(round_number, client)
            start = personal.get(client, data.initial_state)
            if data.task.algorithm == "ditto":
                personal[client] = train_client(network, start, batches, data.task.lr, anchor=global_state)
            if data.task.algorithm == "fedrep":
                personal[client] = train_head_then_body(network, global_state | head_of(start), batches, data.task.lr)
                updates.append(body_of(personal[client]))
            else:
                updates.append(train_client(network, global_state, batches, data.task.lr))
        global_state = {key: torch.stack([update[key] for update in updates]).mean(0) for key in updates[0]}
    if data.task.algorithm == "fedrep":
        personal = {client: global_state | head_of(state) for client, state in personal.items()}
    return global_state, personal


def test_fedrep_trains_the_head_then_the_body_by_hand():
    """Of the first half of the batches only the head moves, then only the body, each by its gradient at that point."""
    data = prepare(quick_task(TASKS["fedrep"]), 1)
    network = build_network(data.task)
    network.load_state_dict(data.initial_state)
    batches = data.client_batches(0, 0)
    assert len(batches) == 2 * data.task.images // data.task.batch_size
    expected = {name: value.clone() for name, value in data.initial_state.items()}
    for step, (x, y) in enumerate(batches):
        leaves = {name: value.clone().requires_grad_() for name, value in expected.items()}
        loss = torch.nn.functional.cross_entropy(torch.func.functional_call(network, leaves, (x,)), y)
        for (name, leaf), gradient in zip(leaves.items(), torch.autograd.grad(loss, leaves.values()), strict=True):
            if name.startswith("fc.") == (step < len(batches) // 2):
                expected[name] = (leaf - data.task.lr * gradient).detach()
    found = train_head_then_body(network, data.initial_state, batches, data.task.lr)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)
        assert not torch.equal(value, data.initial_state[name])


def assert_same_training(task, state, expected, initial):
    """Whole states, since some tensors hardly move: in a ResNet of timm each block begins as its shortcut."""
    assert expected.keys() <= state.keys()
    weights = [key for key in expected if "running" not in key]
    moved = torch.cat([(expected[key] - initial[key]).flatten() for key in weights]).norm()
    distance = torch.cat([(expected[key] - state[key]).flatten() for key in weights]).norm()
    assert moved > 1e-3
    # Rounding errors grow in norms over a few images.
    assert distance <= moved * (2e-2 if task.network == "test_resnet" else 1e-3)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in TASKS])
def test_perada_trains_what_a_plain_loop_trains(name, tmp_path):
    """The same weights, clients and batches, so the same states: with the names of the peers' networks."""
    rounds = 2
    file = tmp_path / "task.pt"
    save_task_data(prepare(quick_task(TASKS[name]), rounds), file)
    data = load_task_data(file)
    training = run_perada.run(data, rounds, torch.get_num_threads(), tmp_path)
    assert len(training.round_starts) == rounds
    assert sorted([*training.round_starts, training.ended]) == [*training.round_starts, training.ended]
    global_state, personal = plain_rounds(data, rounds)
    assert_same_training(data.task, training.global_state, global_state, data.initial_state)
    assert set(training.personal_states) == set(personal)
    for client, state in personal.items():
        assert_same_training(data.task, training.personal_states[client], state, data.initial_state)
    expected = score(data, Training([], 0.0, global_state, personal, {}))
    assert score(data, training).loss == pytest.approx(expected.loss, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["pfl", "flower"])
@pytest.mark.parametrize("name", ["cnn", "ditto", "fedrep"])
def test_a_peer_trains_what_a_plain_loop_trains(framework, name, tmp_path):
    for package in measure.MODULES[framework]:
        install = f"pip install '{measure.PACKAGES[framework]}'"
        pytest.importorskip(package, reason=f"{package} is not installed: {install}")
    reason = unsupported_reason(framework, TASKS[name])
    if reason:
        pytest.skip(reason)
    file = tmp_path / "task.pt"
    save_task_data(prepare(quick_task(TASKS[name]), 2), file)
    data = load_task_data(file)
    training = run_process(sys.executable, framework, tmp_path, 2, 1).training
    global_state, personal = plain_rounds(data, 2)
    assert_same_training(data.task, training.global_state, global_state, data.initial_state)
    assert set(training.personal_states) == set(personal)
    for client, state in personal.items():
        assert_same_training(data.task, training.personal_states[client], state, data.initial_state)


class Arrays(dict):
    """Flower's record of arrays, as far as a client uses it."""

    def to_torch_state_dict(self):
        return dict(self)


class Message:
    """Flower's message, which is sent to a node or is a reply."""

    def __init__(self, content, dst_node_id=None, message_type="", reply_to=None):
        self.content = content
        self.dst_node_id = dst_node_id
        self.message_type = message_type
        self.reply_to = reply_to

    def has_error(self):
        return False


class App:
    """Flower's app, which leaves its functions as they are."""

    def train(self):
        return lambda function: function

    query = train


class PflDataset:
    """pfl's images of one client."""

    def __init__(self, raw_data, user_id):
        self.raw_data = raw_data
        self.user_id = user_id


class PflFederatedDataset:
    """pfl's clients, whom its sampler draws."""

    def __init__(self, make_dataset, sampler):
        self.make_dataset = make_dataset
        self.sampler = sampler


STAND_INS = {
    "ArrayRecord": Arrays,
    "ClientApp": App,
    "ConfigRecord": dict,
    "Dataset": PflDataset,
    "FederatedDataset": PflFederatedDataset,
    "Message": Message,
    "MessageType": SimpleNamespace(TRAIN="train", QUERY="query"),
    "MetricRecord": dict,
    "RecordDict": dict,
}
"""What stands for the names that a peer's file imports from a framework; for all others, a class without anything."""


def imported_with_stand_ins(file, monkeypatch):
    """Import a peer's file as if its framework were installed: names of it are stand-ins, all else is real."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or node.module.partition(".")[0] not in ("pfl", "flwr"):
            continue
        module = ModuleType(node.module)
        for alias in node.names:
            setattr(module, alias.name, STAND_INS.get(alias.name, type(alias.name, (), {})))
        monkeypatch.setitem(sys.modules, node.module, module)
    spec = importlib.util.spec_from_file_location(f"{file.stem}_with_stand_ins", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PEERS = Path(run_perada.__file__).parent


@pytest.mark.parametrize("name", ["run_pfl", "run_flower"])
def test_a_peers_file_is_called_as_peradas(name, monkeypatch):
    module = imported_with_stand_ins(PEERS / f"{name}.py", monkeypatch)
    assert inspect.signature(module.run) == inspect.signature(run_perada.run)


def test_pfl_gets_each_clients_images_in_the_order_of_its_batches(monkeypatch):
    run_pfl = imported_with_stand_ins(PEERS / "run_pfl.py", monkeypatch)
    data = prepare(quick_task(TASKS["cnn_1000"]), 2)
    dataset = run_pfl._federated_dataset(data)
    for round_number, cohort in enumerate(data.cohorts):
        for client in cohort:
            served = dataset.make_dataset(dataset.sampler())
            images, labels = served.raw_data
            expected = data.client_batches(round_number, client)
            assert served.user_id == str(client)
            assert torch.equal(images, torch.cat([x for x, _ in expected]))
            assert torch.equal(labels, torch.cat([y for _, y in expected]))


@pytest.mark.parametrize("name", ["ditto", "fedrep"])
def test_flowers_clients_train_what_a_plain_loop_trains(tmp_path, monkeypatch, name):
    """Its messages go to the clients of the plan, and what those reply averages to the plain loop's states."""
    run_flower = imported_with_stand_ins(PEERS / "run_flower.py", monkeypatch)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    rounds = 2
    file = tmp_path / "task.pt"
    save_task_data(prepare(quick_task(TASKS[name]), rounds), file)
    data = load_task_data(file)
    nodes = {1000 + client: SimpleNamespace(state={}) for client in range(data.task.clients)}
    grid = SimpleNamespace(get_node_ids=lambda: reversed(nodes))
    strategy = SimpleNamespace(file=file)
    global_state = data.initial_state
    for round_number, cohort in enumerate(data.cohorts):
        messages = run_flower.PlannedFedAvg.messages(
            strategy, "train", cohort, round_number, grid, Arrays(global_state)
        )
        assert [message.dst_node_id for message in messages] == [1000 + client for client in cohort]
        replies = run_flower._checked(run_flower.train(message, nodes[message.dst_node_id]) for message in messages)
        updates = [reply.content["arrays"] for reply in replies]
        global_state = {key: torch.stack([update[key] for update in updates]).mean(0) for key in updates[0]}
    expected, personal = plain_rounds(data, rounds)
    assert_same_training(data.task, global_state, expected, data.initial_state)
    assert personal
    for client, state in personal.items():
        message = Message({"config": {}})
        reply = run_flower.personal_model(message, nodes[1000 + client])
        # FedRep's clients keep the head only.
        assert len(reply.content["arrays"]) == {"ditto": len(state), "fedrep": 2}[name]
        assert_same_training(data.task, global_state | reply.content["arrays"], state, data.initial_state)


def process_of(seconds, start=1.0):
    """A process that began at 10, whose rounds took so many seconds."""
    starts = [10.0 + start]
    for each in seconds[:-1]:
        starts.append(starts[-1] + each)
    training = Training(starts, starts[-1] + seconds[-1], {}, {}, {"torch": "2"})
    return measurement_of(training, 10.0, 0.0)


def test_figures_of_a_process():
    process = process_of([9.0, 2.0, 4.0, 3.0], start=2.5)
    assert process.seconds_to_first_round == 2.5
    assert process.first_round_seconds == 9.0
    assert process.round_seconds == pytest.approx(3.0)
    assert process_of([9.0]).round_seconds == 9.0


def test_the_table_has_ratios_to_perada_in_the_same_turn():
    ours = tuple(process_of([9.0, seconds]) for seconds in (1.0, 2.0, 4.0))
    theirs = tuple(process_of([9.0, seconds]) for seconds in (2.0, 2.0, 2.0))
    outcomes = [
        program.Outcome("perada", "", ours, 100.4, Score(1.0, 0.5)),
        program.Outcome("pfl", "pfl has no personalised method"),
        program.Outcome("flower", "", theirs, 300.0, Score(1.1, 0.51234)),
    ]
    rows = program.rows_of("cnn", outcomes)
    assert [row.get("round, s") for row in rows] == [2.0, None, 2.0]
    assert rows[2]["round / perada's"] == 1.0  # the median of 2, 1 and 1/2
    text = program.markdown(rows)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line]
    assert cells[0] == ["framework", *(name for name in rows[0] if name in cells[0][1:])]
    assert cells[2][:4] == ["perada", "2.0", "1.0", "100"]
    assert set(cells[3][1:]) == {"–"}
    assert cells[4][-2:] == ["1.1", "0.512"]
    assert text.endswith("pfl: pfl has no personalised method")
    (warning,) = program.warnings_of(outcomes)
    assert warning.startswith("flower's loss differs from perada's by 10.0%")
    assert program.warnings_of(outcomes[1:]) == []


def test_the_command_writes_what_it_measured(monkeypatch, tmp_path, capsys):
    """Processes take turns after one for the memory; a framework that fails leaves the others."""
    calls = []

    def fake(python, framework, folder, rounds, threads, sample_memory=False):
        calls.append((framework, rounds, sample_memory))
        if framework == "flower" and not sample_memory:
            raise RuntimeError("flower ended with status 1: ...no room")
        data = load_task_data(folder / "task.pt")
        training = Training([1.0, 2.0], 4.0, data.initial_state, {}, {"torch": "2"})
        return Measurement(0.5, 1.0, 2.0, 700.0 if sample_memory else 0.0, training)

    small = quick_task(TASKS["cnn"])
    monkeypatch.setattr(program, "TASKS", {"cnn": small})
    monkeypatch.setattr(program, "run_process", fake)
    monkeypatch.setattr(program, "missing_packages", lambda python, framework: "no pfl" * (framework == "pfl"))
    output = tmp_path / "peers.json"
    program.main(["--task", "cnn", "--turns", "2", "--peer-python", "python9", "--output", str(output)])
    assert calls == [
        ("perada", 2, True),
        ("flower", 2, True),
        ("perada", 2, False),
        ("flower", 2, False),
        ("perada", 2, False),
    ]
    ours, pfl, flower = json.loads(output.read_text())
    assert {"machine", "threads", "load", "commit", "torch", "description", "loss", "accuracy"} < ours.keys()
    assert (ours["round, s"], ours["peak, MB"], ours["turns"]) == (2.0, 700, 2)
    assert (pfl["reason"], flower["reason"]) == ("no pfl", "flower ended with status 1: ...no room")
    assert "pfl is left out: no pfl" in capsys.readouterr().out


def test_a_missing_framework_is_named_with_the_way_to_install_it(monkeypatch):
    assert missing_packages(sys.executable, "perada") == ""
    monkeypatch.setitem(measure.MODULES, "pfl", ("torch", "no_such_module"))
    text = missing_packages(sys.executable, "pfl")
    assert text.startswith(
        f"{sys.executable} has no no_such_module; install it by {sys.executable} -m pip install 'pfl["
    )
    assert "cannot be started" in missing_packages("/no/such/python", "pfl")
    assert unsupported_reason("pfl", TASKS["ditto"]) and not unsupported_reason("flower", TASKS["ditto"])


def test_a_process_that_fails_says_why(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho arguments: $@\necho no room\nexit 3\n")
    python.chmod(0o755)
    with pytest.raises(RuntimeError, match=r"(?s)pfl ended with status 3: \.\.\.arguments: .*\nno room$") as caught:
        run_process(str(python), "pfl", tmp_path, 2, 1, sample_memory=True)
    assert f"-m benchmarks.peers.runner pfl {tmp_path} 2 1\n" in str(caught.value)


def test_memory_is_that_of_the_children_too():
    code = (
        "import subprocess, sys; child = subprocess.Popen(['sleep', '60']); print(child.pid, flush=True); child.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        child = int(process.stdout.readline())
        assert process_tree(process.pid) == [process.pid, child]
        both = proportional_mb([process.pid, child])
        lone = proportional_mb([child])
        os.kill(child, 9)
    assert both > lone > 0
    assert proportional_mb([process.pid]) == 0


def test_every_task_is_in_the_documentation():
    page = (measure.ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    # The table of tasks ends at the first empty line. A later table has measurements of some of them.
    table = page.partition("\n| `--task` |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(TASKS)
