# SPDX-License-Identifier: Apache-2.0
"""A transport that is written outside perada: messages and replies are files in a folder that all parties share."""

import ast
import threading
from pathlib import Path
from time import monotonic, sleep

import pytest
import torch

from perada.deploy.transport import Failure

from .parties import Parties

CLI = Path(__file__).parents[2] / "perada" / "cli"


class FolderTransport:
    """Writes each message into the folder of its site, and waits for a file with the reply."""

    max_bytes = 2**30

    def __init__(self, folder):
        self.folder = folder

    def names(self):
        return sorted(path.name for path in self.folder.iterdir())

    def exchange(self, messages, enough, deadline):
        for name, message in messages.items():
            (self.folder / name / "reply").unlink(missing_ok=True)
            write(self.folder / name / "message", message)
        replies = {}
        end = monotonic() + deadline
        while len(replies) < min(enough, len(messages)) and monotonic() < end:
            for name in messages.keys() - replies.keys():
                file = self.folder / name / "reply"
                if file.exists():
                    replies[name] = file.read_bytes()
            sleep(0.002)
        return {name: replies.get(name, Failure("late")) for name in messages}


class FolderEndpoint:
    """A site's side: answers each message of its folder until it is closed."""

    def __init__(self, folder):
        self.folder = folder
        self.is_closed = threading.Event()

    def serve(self, answer):
        message = self.folder / "message"
        while not self.is_closed.is_set():
            if message.exists():
                content = message.read_bytes()
                message.unlink()
                write(self.folder / "reply", answer(content, "folder"))
            sleep(0.002)


def write(path, content):
    """Write a file that is never seen in part."""
    part = path.with_suffix(".part")
    part.write_bytes(content)
    part.rename(path)


@pytest.fixture
def serve_in_threads():
    """Serves workers, by name, in threads at folders; they end with the test."""
    endpoints = []
    threads = []

    def serve(workers, folder):
        for name, worker in workers.items():
            (folder / name).mkdir(parents=True)
            endpoints.append(FolderEndpoint(folder / name))
            threads.append(threading.Thread(target=endpoints[-1].serve, args=(worker.answer,), daemon=True))
            threads[-1].start()

    yield serve
    for endpoint in endpoints:
        endpoint.is_closed.set()
    for thread in threads:
        thread.join(10)


def test_a_run_over_a_folder_is_that_of_the_transport_in_memory(tiny, tmp_path, serve_in_threads):
    in_memory, workers_in_memory = Parties(tiny, tmp_path / "memory", "perada").deployed()
    parties = Parties(tiny, tmp_path / "folder", "perada")
    workers = parties.workers()
    serve_in_threads(workers, tmp_path / "messages")
    coordinator = parties.coordinator(FolderTransport(tmp_path / "messages"))
    coordinator.run()
    expected = in_memory.progress.history
    assert [record["personal/local_test"] for record in coordinator.progress.history] == [
        record["personal/local_test"] for record in expected
    ]
    for key, value in in_memory.server.global_state.items():
        assert torch.equal(coordinator.server.global_state[key], value), key
    assert workers.keys() == workers_in_memory.keys()


def test_a_site_that_does_not_answer_is_late(tmp_path):
    (tmp_path / "silent").mkdir()
    replies = FolderTransport(tmp_path).exchange({"silent": b"hello"}, enough=1, deadline=0.05)
    assert replies == {"silent": Failure("late")}


def test_only_flowers_own_commands_import_flower():
    """All others reach it through a transport and an endpoint."""
    importing = set()
    for path in CLI.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            if any(name.startswith(("perada.deploy.flower", "flwr")) for name in modules):
                importing.add(path.name)
    assert importing == {"flower.py"}
