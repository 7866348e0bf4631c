# SPDX-License-Identifier: Apache-2.0
"""Adapters on the Hub, by way of a small server that speaks its interface."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import pytest
import torch

import perada
from perada.algorithms import FedAvg, HetLoRA
from perada.cli import main

from .test_model_card import finetuned, plain_run

COMMIT = "1" * 40


class Hub(BaseHTTPRequestHandler):
    """Repositories in memory: made, committed to in one request, listed, and read file by file."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        repos = self.server.repos
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
            if name in repos:
                self.answer({"url": f"{self.server.url}/{name}", "error": "it is there"}, 409)
                return
            repos[name] = {"private": asked.get("private"), "visibility": asked.get("visibility"), "files": {}}
            self.answer({"url": f"{self.server.url}/{name}", "id": name, "name": name})
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            self.answer({"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]})
        else:
            name = "/".join(self.path.split("/")[3:5])
            for line in filter(None, body.splitlines()):
                item = json.loads(line)
                if item["key"] == "file":
                    repos[name]["files"][item["value"]["path"]] = base64.b64decode(item["value"]["content"])
            self.answer(
                {"commitUrl": f"{self.server.url}/{name}/commit/{COMMIT}", "commitOid": COMMIT, "success": True}
            )

    def do_GET(self):
        path = self.path.split("?")[0]
        if path.startswith("/api/models/"):
            name = "/".join(path.split("/")[3:5])
            files = self.server.repos[name]["files"]
            siblings = [{"rfilename": file, "size": len(content)} for file, content in files.items()]
            tree = [
                {"type": "file", "path": f, "size": len(c), "oid": hashlib.sha1(c).hexdigest()}
                for f, c in files.items()
            ]
            asked = self.server.repos[name]
            private = bool(asked["private"]) or asked["visibility"] == "private"
            about = {"id": name, "modelId": name, "sha": COMMIT, "private": private, "siblings": siblings}
            self.answer(tree if "/tree/" in path else about)
            return
        name, file = path[1:].split("/resolve/")
        content = self.server.repos[name]["files"][file.partition("/")[2]]
        self.send_response(200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET

    def answer(self, content, status=200):
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch, tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.repos, server.url = {}, f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()  # else it ends after half a second
    for module in (huggingface_hub.constants, huggingface_hub.file_download, huggingface_hub.hf_api):
        for name, value in (("ENDPOINT", server.url), ("HF_HUB_OFFLINE", False)):
            monkeypatch.setattr(module, name, value, raising=False)
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    yield server
    server.shutdown()
    server.server_close()


def test_a_named_clients_adapter_goes_to_the_hub_and_comes_back(hub, capsys):
    run = plain_run()
    run.push_to_hub("me/south", client="south", license="mit", token="hf_x")
    error_output = capsys.readouterr().err
    assert "uploading to the private repository 'me/south': the adapter of client south" in error_output
    assert "without differential privacy" in error_output
    repo = hub.repos["me/south"]
    assert repo["private"] is True or repo["visibility"] == "private"
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md", "run.json"} <= repo["files"].keys()
    assert not any(b"north" in content for content in repo["files"].values())
    result = perada.Run.from_hub("me/south", token="hf_x")
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(result.personal("south")(x), run.personal("south")(x))
    assert result.num_clients == 1
    score = run.metrics["clients"]["personal/local_test"][1]
    assert result.metrics["clients"]["personal/local_test"] == [score]
    with pytest.raises(ValueError, match="only that of client 'south'; pass client=0"):
        result.global_model()
    with pytest.raises(ValueError, match="only that of client 'south'; pass client=0"):
        result.push_to_hub("me/global", token="hf_x")


def test_the_command_does_the_same(hub, tmp_path, monkeypatch, capsys):
    plain_run().export(tmp_path / "saved")
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    main(["push", str(tmp_path / "saved"), "me/south", "--client=south", "--license=mit"])
    assert capsys.readouterr().out.strip().endswith("me/south")
    repo = hub.repos["me/south"]
    assert (repo.get("private") is True or repo["visibility"] == "private") and b"license: mit" in repo["files"][
        "README.md"
    ]
    main(["push", str(tmp_path / "saved"), "me/all", "--public"])
    assert hub.repos["me/all"].get("private") is not True
    with pytest.raises(FileNotFoundError, match="finished"):
        main(["push", str(tmp_path), "me/none"])
    assert set(hub.repos) == {"me/south", "me/all"}


def test_no_personal_adapter_goes_unless_its_client_is_named(hub):
    run = plain_run()
    run.push_to_hub("me/all", token="hf_x")
    files = hub.repos["me/all"]["files"]
    assert not any(b"north" in content or b"south" in content for content in files.values())
    result = perada.Run.from_hub("me/all", token="hf_x")
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(result.global_model()(x), run.global_model()(x))


def test_an_unknown_client_is_rejected_before_anything_leaves(hub):
    with pytest.raises(ValueError, match="client='west' is unknown"):
        plain_run().push_to_hub("me/west", client="west", token="hf_x")
    assert hub.repos == {}


def test_a_public_repository_that_is_there_gets_no_private_adapter(hub):
    run = plain_run()
    run.push_to_hub("me/all", private=False, token="hf_x")
    hub.repos["me/all"]["files"].clear()
    with pytest.raises(ValueError, match=r"'me/all' .*public"):
        run.push_to_hub("me/all", token="hf_x")
    assert hub.repos["me/all"]["files"] == {}
    run.push_to_hub("me/all", private=False, token="hf_x")
    assert "run.json" in hub.repos["me/all"]["files"]


def rows(card):
    """The figures of a card's table of ledgers, by ledger."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in card.splitlines() if line[0:1] == "|"]
    return {row[0]: row[-1] for row in cells if row[0] in ("release", "server")}


def test_what_a_private_adapter_costs_is_the_same_after_the_hub(hub, tmp_path, capsys):
    """ε of its client's images by the release ledger, those of others by the server's; and no score goes along."""
    run = finetuned("head", privacy={"noise_multiplier": 1.0, "delta": 1e-3}, metric=["accuracy"])
    sample = run.info["privacy"]["sample"]
    release = sample["release"][1]
    server = sample["server"]
    assert release > server[1] > 0
    run.push_to_hub("me/south", client="south", token="hf_x")
    assert f"single images: ε at most {release:.2f} at δ = 0.001" in capsys.readouterr().err
    perada.Run.from_hub("me/south", token="hf_x").export(tmp_path / "again")
    again = perada.Run.load(tmp_path / "again")
    assert again.info["adapter_of"] == "south"
    again.push_to_hub("me/twice", client=0, token="hf_x")
    cards = [hub.repos[name]["files"]["README.md"].decode() for name in ("me/south", "me/twice")]
    for card in [*cards, (tmp_path / "again" / "README.md").read_text()]:
        assert "# The adapter of client `south`" in card
        assert rows(card) == {"release": f"{release:.2f}", "server": f"{server[1]:.2f}"}
        assert f"only through the server: their ε is at most {server[0]:.2f}" in card
        assert "accuracy" not in card
    for name in ("me/south", "me/twice"):
        record = json.loads(hub.repos[name]["files"]["run.json"])["metrics"]
        assert record == {"rounds": [], "clients": {}}
    run.push_to_hub("me/scores", client="south", scores=True, token="hf_x")
    assert "accuracy" in hub.repos["me/scores"]["files"]["README.md"].decode()


def test_the_global_adapter_takes_nothing_of_single_clients_along(hub):
    run = finetuned("head", privacy={"noise_multiplier": 1.0, "delta": 1e-3}, batch_size=4)
    run.push_to_hub("me/all", scores=True, token="hf_x")
    content = json.loads(hub.repos["me/all"]["files"]["run.json"])
    (row,) = content["metrics"]["rounds"]
    assert row["personal/local_test"] == run.metrics["rounds"][0]["personal/local_test"]
    assert not [name for name in row if name.endswith(("_worst", "_p10", "_client"))]
    sample = run.info["privacy"]["sample"]
    privacy_record = content["info"]["privacy"]["sample"]
    assert sample["sample_rates"][0] != sample["sample_rates"][1]
    assert privacy_record["sample_rates"] == [max(sample["sample_rates"])] * 2
    assert privacy_record["server"] == sorted(sample["server"], reverse=True)


@pytest.mark.parametrize(
    ("options", "client", "words"),
    [
        ({"client_privacy": {"noise_multiplier": 1.0, "max_norm": 1.0, "delta": 1e-3}}, 0, "without differential"),
        ({"client_privacy": {"noise_multiplier": 1.0, "max_norm": 1.0, "delta": 1e-3}}, None, "of whole clients: ε at"),
        ({"privacy": {"noise_multiplier": 0.0, "delta": 1e-3}}, None, "without differential privacy"),
    ],
)
def test_the_line_says_what_protects_the_adapter(hub, capsys, options, client, words):
    finetuned("head", **options).push_to_hub("me/it", client=client, token="hf_x")
    assert f"It was trained {words}" in capsys.readouterr().err.replace("with differential privacy of", "of")


@pytest.mark.slow
def test_test_mode_is_warned_of(hub, capsys):
    run = finetuned("head", privacy={"noise_multiplier": 1.0, "delta": 1e-3, "secure_rng": False})
    with pytest.warns(UserWarning, match="Test mode"):
        run.push_to_hub("me/it", token="hf_x")
    assert "which protects nothing" in capsys.readouterr().err


@pytest.fixture(scope="module")
def run_of_two_ranks():
    return finetuned(adapter="lora", algorithm=HetLoRA(FedAvg(), [3, 2]))


@pytest.mark.parametrize("client", [None, "south"])
def test_of_the_other_clients_ranks_nothing_leaves(hub, client, run_of_two_ranks):
    """A rank tells what a client's machine can hold: beside one adapter there is no list of all."""
    run = run_of_two_ranks
    assert run.info["lora_ranks"] == [3, 2]
    run.push_to_hub("me/adapter", client=client, token="hf_x")
    content = json.loads(hub.repos["me/adapter"]["files"]["run.json"])
    assert "lora_ranks" not in content["info"]
    images = torch.randn(2, 3, 32, 32)
    shared = perada.Run.from_hub("me/adapter", token="hf_x")
    model = run.global_model() if client is None else run.personal(client)
    copy = shared.global_model() if client is None else shared.personal(client)
    with torch.no_grad():
        assert torch.equal(copy(images), model(images))
