# SPDX-License-Identifier: Apache-2.0
"""The code in the documentation runs."""

import re
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import perada
from perada import Algorithm

ROOT = Path(__file__).parents[1]


def code(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


def test_an_algorithm_of_ones_own():
    (source,) = code("docs/algorithms.md")
    names = {"Algorithm": Algorithm}
    exec(source, names)
    parts = [TensorDataset(torch.randn(6, 1, 4, 4), torch.arange(6) % 3) for _ in range(2)]
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.ReLU(), nn.Linear(5, 3))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    run = perada.finetune(
        network, perada.FederatedData(parts), adapter="full", algorithm=names["FedAvgHeadless"](), rounds=2, **quiet
    )
    heads = [run.state("personal", client)["3.weight"] for client in range(2)]
    assert not torch.equal(*heads)
    torch.testing.assert_close(run.state("global")["3.weight"], sum(heads) / 2)


def test_the_readmes_example(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (source,) = code("README.md")
    small = source.replace("rounds=3", "rounds=1").replace("local_epochs=5", "local_steps=1")
    assert small.count("rounds=1") == small.count("local_steps=1") == 1
    names: dict[str, object] = {}
    exec(small.replace("distill_steps=30", "distill_steps=1, distill_batch_size=8"), names)
    run = names["run"]
    assert isinstance(run, perada.Run)
    assert run.num_clients == 20
    assert names["model"](torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert (tmp_path / "my_run" / "client_19" / "adapter_model.safetensors").is_file()
