# SPDX-License-Identifier: Apache-2.0
"""What a private run writes says how many images a client has, and not how many of each class."""

import json

import pytest
import torch

from perada.cli.main import main
from perada.data import Digits

from .private_loop import once

FIT = [
    "--data.train_limit=300",
    "--data.test_limit=120",
    "--data.partition.num_clients=3",
    "--model.adapter=head",
    "--trainer.max_epochs=1",
    "--trainer.check_val_every_n_epoch=1",
    "--trainer.enable_progress_bar=false",
    "--federated.clients_per_round=null",
    "--training.local_epochs=1",
    "--distillation.steps=0",
]


def counts(folder):
    """Images of each client and class, from the positions in ``partition.json``."""
    division = json.loads((folder / "partition.json").read_text())
    labels = {part: Digits().with_split(part == "train").labels for part in ("train", "test")}
    rows = [own[places].bincount(minlength=10).tolist() for part, own in labels.items() for places in division[part]]
    return [row for row in rows if sum(map(bool, row)) > 3]


def written_texts(folder):
    """All that is in files of text, and in checkpoints, without white space."""
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".ckpt":
            yield path, str(torch.load(path, weights_only=True)["perada"]).replace(" ", "")
        elif path.is_file() and path.name != "partition.json" and path.suffix not in (".safetensors", ".png"):
            yield path, "".join(path.read_text(errors="replace").split())


@pytest.mark.parametrize("private", [True, False])
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
@pytest.mark.every(2)
def test_class_counts_are_in_no_file_of_a_private_run(tmp_path, monkeypatch, private):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("opacus.accountants.analysis.rdp._compute_rdp", once)
    options = ["--privacy.noise_multiplier=1", "--privacy.delta=1e-4"] if private else []
    main(["fit", "--config", "digits", *FIT, *options])
    run = tmp_path / "lightning_logs" / "version_0"
    main(["export", str(run), "--output", "adapters"])
    main(["report", str(run), "--output", "page"])
    rows = counts(run)
    assert len(rows) >= 3
    table = {path for row in rows for path, text in written_texts(tmp_path) if ",".join(map(str, row)) in text}
    confusions = {
        path for path, text in written_texts(tmp_path) if "confusion" in text and path.suffix in (".json", ".ckpt")
    }
    names = {"run.json", "last.ckpt"}
    if private:
        assert not table
        assert not confusions
        assert "images of each client and class" not in (tmp_path / "page" / "index.html").read_text()
    else:  # the search finds them where they are
        assert names <= {path.name for path in table}
        assert names <= {path.name for path in confusions}
