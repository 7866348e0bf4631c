# SPDX-License-Identifier: Apache-2.0
"""The walks in docs/architecture.md, of a batch and of the global adapter, are those of a traced round."""

import re
import sys
from pathlib import Path

import torch
from pytorch_lightning import Callback
from torch.utils.data import TensorDataset

import perada
from perada.lightning import FederatedLoop

ROOT = Path(perada.__file__).parent
CLIENTS, ROWS, SIDE = 3, 5, 17  # none of these stands for anything else in the round


def some(value, holds, depth=3):
    """Whether a value is one of those looked for, or holds one, in lists and dictionaries too."""
    if holds(value):
        return True
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return depth > 0 and any(some(one, holds, depth - 1) for one in list(inside)[:8])


class Walks(Callback):
    """Notes the files whose functions hold the batch, or a state of what is trained, from opening a round to its end.

    The batch counts from the rows that are read to the clients' losses: all with C, B or C·B at the front.
    """

    def __init__(self):
        self.batch, self.state, self.key = set(), set(), ""

    def is_batch(self, value):
        if not isinstance(value, torch.Tensor) or value.ndim < 2:
            return False
        return value.shape[0] == CLIENTS * ROWS or value.shape[:2] == (CLIENTS, ROWS)

    def is_state(self, value):
        return isinstance(value, dict) and isinstance(value.get(self.key), torch.Tensor)

    def note(self, frame, event, result):
        path = frame.f_code.co_filename
        if event != "return" or not path.startswith(f"{ROOT}/"):
            return
        held = [value for name, value in frame.f_locals.items() if name != "self"] + [result]
        name = path.removeprefix(f"{ROOT}/")
        name = name if name.startswith("adapters/") else f"perada/{name}"
        if not self.closing and any(some(value, self.is_batch) for value in held):
            self.batch.add(name)
        if any(some(value, self.is_state) for value in held):
            self.state.add(name)


def traced(monkeypatch):
    walks, draw = Walks(), torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (2 * CLIENTS + 1, 10, 3, SIDE, SIDE), generator=draw, dtype=torch.uint8)
    sets = [TensorDataset(one, torch.arange(10) % 4) for one in images]
    begin, close = FederatedLoop.on_train_epoch_start, FederatedLoop.on_train_batch_end

    def beginning(loop, trainer, module):
        walks.key, walks.closing = module.tensor_names.keys[0], False
        sys.setprofile(walks.note)
        begin(loop, trainer, module)

    def closing(loop, *given):
        walks.closing = True
        try:
            close(loop, *given)
        finally:
            sys.setprofile(None)

    monkeypatch.setattr(FederatedLoop, "on_train_epoch_start", beginning)
    monkeypatch.setattr(FederatedLoop, "on_train_batch_end", closing)
    data = perada.FederatedData(sets[:CLIENTS], sets[CLIENTS:-1], public=TensorDataset(images[-1], torch.zeros(10)))
    options = {"rounds": 1, "local_steps": 1, "batch_size": ROWS, "distill_steps": 1, "distill_batch_size": 4}
    quiet = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu", "pretrained": False}
    perada.finetune("test_resnet", data, **options, **quiet)
    return walks


def table(title):
    """The files in the second column of the table below a heading."""
    page = (ROOT.parent / "docs" / "architecture.md").read_text()
    section = page.split(f"## {title}\n")[1].split("\n## ")[0]
    rows = [line.split("|")[3] for line in section.splitlines() if re.match(r"\|\s+\d+ \|", line)]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_the_tables_name_the_files_of_a_round(monkeypatch):
    walks = traced(monkeypatch)
    assert table("The way of a batch") == walks.batch
    assert table("The way of w") == walks.state
