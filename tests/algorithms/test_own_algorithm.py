# SPDX-License-Identifier: Apache-2.0
"""The algorithm of docs/algorithms.md that is written outside the package, run from a recipe as shown there."""

import json
import re
from pathlib import Path

import torch
import yaml

from perada.cli import main

ROOT = Path(__file__).parents[2]


def blocks(language):
    text = (ROOT / "docs" / "algorithms.md").read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_an_algorithm_of_ones_own_runs_from_a_recipe(tmp_path, monkeypatch):
    (code,), section = blocks("python"), blocks("yaml")[-1]
    assert len(code.splitlines()) < 40
    (tmp_path / "my_methods.py").write_text(code)
    recipe = yaml.safe_load((ROOT / "recipes" / "quickstart.yaml").read_text())
    recipe["federated"] |= yaml.safe_load(section)["federated"]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(recipe))
    small = """
        --trainer.max_epochs=2 --trainer.accelerator=cpu --trainer.enable_progress_bar=false
        --trainer.check_val_every_n_epoch=1 --federated.clients_per_round=2 --federated.local_epochs=1
        --data.train_limit=200 --data.test_limit=40 --data.partition.num_clients=4 --data.public=null
        --data.image_size=16 --data.batch_size=8
    """.split()
    monkeypatch.chdir(tmp_path)
    main(["fit", "--config", "mine.yaml", *small])
    saved = torch.load(tmp_path / "lightning_logs" / "version_0" / "checkpoints" / "last.ckpt")["perada"]["federation"]
    rows, header = saved["clients"]["rows"], json.loads(saved["clients"]["header"][8:])
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
