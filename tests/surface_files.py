# SPDX-License-Identifier: Apache-2.0
"""What is in the files of a run, by key, read from those that a small one writes."""

import json
from pathlib import Path

import torch
import yaml
from torch.utils.data import TensorDataset

import perada
from perada.results.restore import CHECKPOINT_FORMAT, CHECKPOINT_KEY
from perada.system.digests import check_sealed
from tests.surface import Parts


def files(folder: Path) -> dict[str, Parts]:
    """Files of a fit, of a saved run and of an adapter, and the keys of those that are perada's own."""
    created = []
    random = torch.Generator().manual_seed(0)
    for size in (6, 5):
        created.append(
            TensorDataset(torch.randint(0, 256, (size, 3, 8, 8), generator=random).byte(), torch.arange(size) % 2)
        )
    public = TensorDataset(torch.randint(0, 256, (4, 3, 8, 8), generator=random).byte())
    data = perada.FederatedData(created, created, public, classes=["cat", "dog"], client_names=["north", "south"])
    run = perada.finetune(
        "test_resnet", data, pretrained=False, rounds=1, local_steps=1, distillation={"steps": 1}, batch_size=4,
        image_size=32, enable_progress_bar=False, accelerator="cpu", default_root_dir=str(folder),
    )  # fmt: skip
    fit = folder / "lightning_logs" / "version_0"
    saved = run.save(folder / "saved")
    exported = run.export(folder / "exported")
    content = read(fit / "run.json")
    kept = torch.load(fit / "checkpoints" / "last.ckpt", weights_only=True)[CHECKPOINT_KEY]
    return {
        "folder of a fit": list_files(fit),
        "folder of Run.save": list_files(saved),
        "folder of Run.export": {
            name.replace("client_0", "client_N"): "" for name in list_files(exported) if "client_1" not in name
        },
        "run.json": keys(content, f"format {content['format']}"),
        "run.json: info": keys(content["info"]),
        "run.json: info.training": keys(content["info"]["training"]),
        "run.json: info.preprocessing": keys(content["info"]["preprocessing"]),
        "run.json: metrics": keys(content["metrics"]),
        "run.json: metrics.clients": keys(content["metrics"]["clients"]),
        "config.yaml": keys(yaml.safe_load((fit / "config.yaml").read_text())),
        "partition.json": keys(read(fit / "partition.json")),
        "metrics.csv": dict.fromkeys(sorted((fit / "metrics.csv").read_text().splitlines()[0].split(",")), ""),
        f"checkpoint: {CHECKPOINT_KEY}": keys(kept, f"format {CHECKPOINT_FORMAT}"),
    }


def read(path: Path) -> dict:
    return check_sealed(json.loads(path.read_text()))


def list_files(folder: Path) -> Parts:
    return {path.relative_to(folder).as_posix(): "" for path in sorted(folder.rglob("*")) if path.is_file()}


def keys(content: dict, whole: str = "") -> Parts:
    return {"": whole} | {str(key): "" for key in sorted(content)}
