# SPDX-License-Identifier: Apache-2.0
"""The code in the documentation runs."""

import re
from pathlib import Path

import torch

import perada

ROOT = Path(__file__).parents[1]


def code(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


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


def test_the_papers_epsilon():
    (source,) = [block for block in code("docs/privacy.md") if "mean_epsilon" in block]
    names: dict[str, object] = {}
    exec(source, names)
    for name in ("server", "release", "equal"):
        said = re.search(rf"^{name} = .*# (.*)$", source, flags=re.MULTILINE)
        assert said is not None
        assert [f"{value:.2f}" for value in names[name]] == said[1].split(", ")
