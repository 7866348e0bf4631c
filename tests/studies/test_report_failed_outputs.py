# SPDX-License-Identifier: Apache-2.0
"""Pages of runs in which outputs of a model are NaN or infinite: it is named, and no mean over the others is shown."""

import csv
import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import perada
from perada.studies.report import figures
from perada.studies.report.page import write_page
from perada.studies.report.records import RoundScores, RunRecord, read_records, run_report
from perada.studies.report.several import comparison
from tests.options import sections

BRIGHT = 9.0
NAMES = ["north", "south", "west"]
OWN = "personal/local_test"


class FailsOnBrightImages(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(48, 2)

    def forward(self, x):
        pixels = x.flatten(1)
        is_bright = (pixels.amax(1) == BRIGHT).unsqueeze(1)
        return torch.where(is_bright, torch.nan, self.head(pixels))


@pytest.fixture(scope="module")
def failed_run(tmp_path_factory):
    """The folder of a run in which the global model fails on two images of the second client."""
    root = tmp_path_factory.mktemp("failed")
    labels = torch.arange(6) % 2
    train = [TensorDataset(torch.zeros(6, 3, 4, 4), labels) for _ in NAMES]
    test = [TensorDataset(torch.zeros(6, 3, 4, 4), labels) for _ in NAMES]
    test[1].tensors[0][:2, :, 0, 0] = BRIGHT
    data = perada.FederatedData(train, test, client_names=NAMES)
    options = {"algorithm": "fedavg", "adapter": "full", "rounds": 2, "local_steps": 1, "batch_size": 6}
    options |= {"default_root_dir": root, "enable_progress_bar": False, "accelerator": "cpu"}
    with pytest.warns(UserWarning, match="NaN or infinite"):
        perada.finetune(FailsOnBrightImages(), data, **sections(**options))
    return root / "lightning_logs" / "version_0"


def test_the_page_names_the_client_and_has_no_mean(failed_run, tmp_path):
    text = write_page(tmp_path, read_records(failed_run)).read_text(encoding="utf-8")
    assert "the global model on 2 test images of client 1 (&#39;south&#39;), since round 1" in text
    assert "own images</dt><dd>–</dd>" in text
    with (tmp_path / "clients.csv").open(encoding="utf-8") as file:
        score_of = {row["client"]: row[OWN] for row in csv.DictReader(file)}
    assert score_of == {"north": "0.5", "west": "0.5", "south": ""}
    with (tmp_path / "rounds.csv").open(encoding="utf-8") as file:
        assert [row[OWN] for row in csv.DictReader(file)] == ["", ""]
    assert "client 1 ('south')" in run_report(failed_run)


def test_a_page_before_the_first_run_file_has_no_earlier_score(tmp_path):
    (tmp_path / "metrics.csv").write_text(f"epoch,step,{OWN}\n0,1,0.25\n1,2,nan\n")
    text = write_page(tmp_path / "page", read_records(tmp_path)).read_text(encoding="utf-8")
    assert "own images</dt><dd>–</dd>" in text
    assert "NaN or infinite" in text


def test_the_band_of_clients_has_a_gap(tmp_path):
    record = RunRecord("run", tmp_path, {"clients": NAMES, "num_classes": 2})
    record.rounds = [{"round": 0, OWN: 0.5}, {"round": 1, OWN: math.nan}]
    record.by_round = [RoundScores(0, [0.5, math.nan, 0.5]), RoundScores(1, [0.5, math.nan, 0.5])]
    lowest, highest = figures._client_band(record)
    # In the first round a client without test images has no score, which is no reason for a gap.
    assert lowest.y[0] == highest.y[0] == 50
    assert math.isnan(lowest.y[1]) and math.isnan(highest.y[1])


def test_a_shifted_set_on_which_a_model_fails_has_a_row(tmp_path):
    record = RunRecord("run", tmp_path, {"clients": NAMES, "num_classes": 2})
    record.rounds = [{"round": 0, OWN: 0.5, "personal/fog": math.nan, "personal/fog_std": math.nan}]
    write_page(tmp_path / "page", [record])
    assert (tmp_path / "page" / "shift_means.csv").read_text().splitlines()[1:] == ["personal/fog,,"]
    assert record.undefined_scores == ["personal/fog"]


def record_of_seed(folder, name, own_scores, mean):
    """A run of one round with scores of three clients and their mean."""
    record = RunRecord(f"{name}_run", folder, {"clients": NAMES, "num_classes": 2, "algorithm": name}, row_name=name)
    record.rounds = [{"round": 0, OWN: 0.5}, {"round": 1, OWN: mean}]
    record.scores_of_clients = {OWN: own_scores}
    return record


def test_runs_side_by_side_have_no_mean_over_those_that_are_left(tmp_path):
    healthy = record_of_seed(tmp_path, "first", [0.5, 0.75, 1.0], 0.75)
    failed = record_of_seed(tmp_path, "second", [0.5, math.nan, 1.0], math.nan)
    twin = record_of_seed(tmp_path, "second", [0.5, 0.75, 1.0], 0.75)
    scores, differences = comparison([healthy, failed, twin])
    (first_row, second_row) = scores.tables[0].rows
    mean_column = scores.tables[0].column_names.index(OWN)
    assert first_row[mean_column] == 0.75
    assert math.isnan(second_row[mean_column]) and math.isnan(second_row[mean_column + 1])
    (difference,) = differences.tables[0].rows
    assert math.isnan(difference[3]) and math.isnan(difference[4])
    text = write_page(tmp_path / "page", [healthy, failed, twin]).read_text(encoding="utf-8")
    assert "second_run: There is no mean" in text
    assert "first_run: There is no mean" not in text
