# SPDX-License-Identifier: Apache-2.0
"""A task through Flower's simulation: one Ray actor of one thread for each thread of the others.

FedAvg is Flower's strategy. Ditto and FedRep are written as Flower's examples write personalised methods: a client
keeps its personal model, or its head, in the state of its context.
"""

import os
import time
from collections.abc import Iterable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn

from benchmarks.peers.networks import body_of, build_network, head_of, train_client, train_head_then_body, trained_state
from benchmarks.peers.tasks import TASK_FILE, State, TaskData, Training, load_task_data, scored_clients

NODE_TIMEOUT = 60.0
"""Seconds in which all nodes must be registered."""

client_app = ClientApp()


@cache
def _client_side(file: str) -> tuple[TaskData, nn.Module]:
    """Return the data and the network, which are loaded once for each actor and not at each message."""
    torch.set_num_threads(1)
    data = load_task_data(file)
    network = build_network(data.task)
    network.load_state_dict(data.initial_state)
    return data, network


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Train the received model, and in Ditto the personal one, and return the former; of FedRep's, the body."""
    config = message.content["config"]
    data, network = _client_side(config["file"])
    batches = data.client_batches(config["round"], config["client"])
    received = dict(message.content["arrays"].to_torch_state_dict())
    lr = data.task.lr
    personal = data.initial_state
    if "personal" in context.state:
        personal = dict(context.state["personal"].to_torch_state_dict())
    if data.task.algorithm == "fedrep":
        trained = train_head_then_body(network, received | head_of(personal), batches, lr)
        context.state["personal"] = ArrayRecord(head_of(trained))
        local = body_of(trained)
    else:
        if data.task.algorithm == "ditto":
            trained = train_client(network, personal, batches, lr, anchor=received)
            context.state["personal"] = ArrayRecord(trained)
        local = train_client(network, received, batches, lr)
    metrics = MetricRecord({"num-examples": data.task.images})
    return Message(RecordDict({"arrays": ArrayRecord(local), "metrics": metrics}), reply_to=message)


@client_app.query()
def personal_model(message: Message, context: Context) -> Message:
    """Return the personal model, or FedRep's head."""
    content = RecordDict({"arrays": context.state["personal"], "config": message.content["config"]})
    return Message(content, reply_to=message)


class PlannedFedAvg(FedAvg):
    """Flower's FedAvg with the clients of a plan. Clients are the nodes in the order of their numbers."""

    def __init__(self, data: TaskData, file: Path) -> None:
        super().__init__(fraction_evaluate=0.0, min_available_nodes=data.task.clients)
        self.data = data
        self.file = file
        self.round_starts: list[float] = []

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Record when the round begins, and send the model to its clients."""
        self.round_starts.append(time.monotonic())
        round_number = server_round - 1
        return self.messages(MessageType.TRAIN, self.data.cohorts[round_number], round_number, grid, arrays)

    def messages(
        self, kind: str, clients: list[int], round_number: int, grid: Grid, arrays: ArrayRecord | None = None
    ) -> list[Message]:
        """Return a message for each client, with the arrays if there are any."""
        nodes = sorted(grid.get_node_ids())
        messages = []
        for client in clients:
            config = ConfigRecord({"file": str(self.file), "round": round_number, "client": client})
            content = RecordDict({"config": config})
            if arrays is not None:
                content["arrays"] = arrays
            messages.append(Message(content, dst_node_id=nodes[client], message_type=kind))
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average the replies; one that failed ends the run."""
        return super().aggregate_train(server_round, _checked(replies))


def _await_nodes(grid: Grid, clients: int) -> None:
    """Wait until all nodes are registered: a plan names clients by their place among all nodes.

    Raises:
        TimeoutError: If some are still missing after ``NODE_TIMEOUT`` seconds.
    """
    deadline = time.monotonic() + NODE_TIMEOUT
    while len(list(grid.get_node_ids())) < clients:
        if time.monotonic() > deadline:
            raise TimeoutError(f"fewer than {clients} nodes are registered after {NODE_TIMEOUT} s")
        time.sleep(0.05)


def _checked(replies: Iterable[Message]) -> list[Message]:
    """Return replies; raise if one is an error."""
    checked = list(replies)
    for reply in checked:
        if reply.has_error():
            raise RuntimeError(f"a client of Flower's failed: {reply.error.reason}")
    return checked


def run(data: TaskData, rounds: int, threads: int, folder: Path) -> Training:
    """Train with Flower's FedAvg; the arguments are those of :func:`benchmarks.peers.run_perada.run`."""
    network = build_network(data.task)
    network.load_state_dict(data.initial_state)
    strategy = PlannedFedAvg(data, folder / TASK_FILE)
    outcome: dict[str, Any] = {}
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        arrays = ArrayRecord(trained_state(network))
        _await_nodes(grid, data.task.clients)
        result = strategy.start(grid, arrays, num_rounds=rounds)
        outcome["ended"] = time.monotonic()
        outcome["global"] = dict(result.arrays.to_torch_state_dict())
        outcome["personal"] = {}
        for client, state in _personal_states(strategy, grid, scored_clients(data, rounds), rounds).items():
            # The server's body completes a head of FedRep.
            outcome["personal"][client] = outcome["global"] | state

    run_simulation(
        server_app,
        client_app,
        num_supernodes=data.task.clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": threads, "include_dashboard": False, "_temp_dir": ray_folder(folder)},
        },
    )
    if "personal" not in outcome:
        raise RuntimeError("Flower's ServerApp ended before its last round; see above")
    return Training(
        round_starts=strategy.round_starts,
        ended=outcome["ended"],
        global_state=outcome["global"],
        personal_states=outcome["personal"],
        versions={"flwr": version("flwr"), "ray": version("ray"), "torch": str(torch.__version__)},
    )


def ray_folder(folder: Path) -> str | None:
    """Return where Ray may put its files. Its sockets have at most 107 characters; None is Ray's own place."""
    path = os.fspath(folder / "ray")
    return path if len(path) < 40 else None


def _personal_states(strategy: PlannedFedAvg, grid: Grid, clients: list[int], rounds: int) -> dict[int, State]:
    """Ask clients for what is personal of their models."""
    if not clients:
        return {}
    replies = grid.send_and_receive(strategy.messages(MessageType.QUERY, clients, rounds - 1, grid))
    states = {}
    for reply in _checked(replies):
        client = int(reply.content["config"]["client"])
        states[client] = dict(reply.content["arrays"].to_torch_state_dict())
    return states
