# SPDX-License-Identifier: Apache-2.0
"""A disk on which there is no room: every command names the file that it could not write."""

import pytest
import torch

from perada.cli import main
from perada.results.inference import Predictions
from perada.results.run_file import write_json
from perada.studies.compare.results import Results
from perada.system.files import write_atomic
from tests.disks import no_room

PREDICTIONS = Predictions(torch.full((9, 2), 0.5), torch.zeros(9, dtype=torch.long), ("dark", "light"))
WRITERS = {
    "copied.yaml": lambda path: main(["cp", "quickstart", str(path)]),
    "asked.yaml": lambda path: main(["init", "--yes", "--output", str(path)]),
    "drawn.png": lambda path: main(["data", "inspect", "--config", "quickstart", "--output", str(path)]),
    "predictions.csv": PREDICTIONS.to_csv,
    "results.json": lambda path: write_json(path, {"numbers": [1.0] * 20}),
    "state.safetensors": lambda path: write_atomic(path, bytes(100)),
    "table.json": lambda path: Results(path).add({"stage": "run", "args": [], "recipe": "r", "seed": 0}),
}


@pytest.mark.every(3)
@pytest.mark.usefixtures("capsys")  # else pytest's own file has no room for what is printed
@pytest.mark.parametrize("name", WRITERS)
def test_it_names_the_file(tmp_path, name):
    path = tmp_path / name
    with no_room(20), pytest.raises(OSError, match=rf"File too large: '{path}'$"):
        WRITERS[name](path)
