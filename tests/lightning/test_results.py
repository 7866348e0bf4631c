# SPDX-License-Identifier: Apache-2.0
"""What a run keeps of each client, and the file in its folder that holds it."""

import csv
import json

import pytest
import torch
from pytorch_lightning.loggers import CSVLogger
from torch.utils.data import TensorDataset

import perada
from perada.tasks import Regression
from tests.options import sections


def fit(tiny, path, rounds=2, **options):
    options = tiny.options | {"rounds": rounds, "default_root_dir": path} | options
    return tiny.finetune(options.pop("data", None) or tiny.data(), **options)


def read_run_file(path, version=0):
    return json.loads((path / "lightning_logs" / f"version_{version}" / "run.json").read_text())


@pytest.fixture(scope="module")
def ran(tiny, tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    return fit(tiny, path), path


def test_the_runs_folder_holds_the_metrics(ran):
    run, path = ran
    content = read_run_file(path)
    assert content["metrics"] == run.metrics
    assert content["info"] == run.info
    assert content["command"] == []
    names = {"rounds", "clients", "initial", "by_round", "partition", "predictions"}
    names |= {"global/local_test", "test_images"}
    assert set(run.metrics) == names


def test_the_table_of_rounds_and_the_record_hold_the_same_numbers(ran):
    """To the last bit: a resumed run writes earlier rounds into the table from the record in its checkpoint."""
    run, path = ran
    logged = {}
    with (path / "lightning_logs" / "version_0" / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            numbers = {name: float(text) for name, text in row.items() if text and name not in ("step", "epoch")}
            logged.setdefault(int(row["epoch"]), {}).update(numbers)
    recorded = [{name: value for name, value in row.items() if name != "step"} for row in run.metrics["rounds"]]
    assert [logged[0], logged[1]] == recorded
    needs_double = [value for value in logged[1].values() if value != torch.tensor(value).item()]
    assert needs_double


def test_scores_of_small_errors_keep_their_digits(tiny, tmp_path):
    """An error of 1e-9 is no score of 0."""
    targets = [TensorDataset(torch.randn(4, 1, 2, 2), 1e-9 * torch.randn(4, 1)) for _ in range(2)]
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 1))
    torch.nn.init.zeros_(network[1].weight)
    torch.nn.init.zeros_(network[1].bias)
    data = perada.FederatedDataModule(
        perada.FederatedData(targets, targets), batch_size=4, task=Regression(mean=0.0, std=1e-9)
    )
    options = tiny.options | {"rounds": 1, "default_root_dir": tmp_path, "algorithm": "standalone"}
    run = perada.finetune(network, data, **sections(**options))
    last = run.metrics["clients"]["personal/local_test"]
    assert run.metrics["by_round"][-1]["personal/local_test"] == last
    assert all(0 < score < 1e-7 for score in [*last, *run.metrics["initial"]["personal/local_test"]])


def test_before_is_what_the_initial_models_score(ran, tiny, tmp_path):
    untrained = fit(tiny, tmp_path, rounds=0)
    data = tiny.data()
    expected = []
    for client, test_set in enumerate(data.test):
        x, y = test_set.tensors
        with torch.no_grad():
            expected.append((untrained.personal(client)(x).argmax(-1) == y).float().mean().item())
    assert ran[0].metrics["initial"] == {"personal/local_test": pytest.approx(expected, abs=1e-5)}


def test_every_evaluation_is_kept(ran):
    rounds = ran[0].metrics["by_round"]
    assert [row["round"] for row in rounds] == [0, 1]
    assert rounds[-1]["personal/local_test"] == pytest.approx(
        ran[0].metrics["clients"]["personal/local_test"], abs=1e-5
    )
    for row, record in zip(rounds, ran[0].metrics["rounds"], strict=True):
        mean = sum(row["personal/local_test"]) / 5
        assert mean == pytest.approx(record["personal/local_test"], abs=1e-5)


def test_counts_of_classes_are_those_of_the_data(ran, tiny):
    sizes = {"train": tiny.sizes, "test": (6,) * 5}
    expected = {part: [[len(range(k, n, 3)) for k in range(3)] for n in own] for part, own in sizes.items()}
    assert ran[0].metrics["partition"] == expected


@pytest.mark.parametrize("who", ["personal", "global"])
def test_confusion_gives_the_accuracies(ran, who):
    right = [0] * 5
    every = [0] * 5
    for client, true, predicted, count in ran[0].metrics["predictions"][who]["confusion"]:
        right[client] += count * (true == predicted)
        every[client] += count
    assert every == [6] * 5
    metrics = ran[0].metrics
    expected = metrics["clients"]["personal/local_test"] if who == "personal" else metrics["global/local_test"]
    assert [one / 6 for one in right] == pytest.approx(expected, abs=1e-6)


@pytest.mark.slow
def test_a_resumed_run_knows_what_was_before(ran, tiny, tmp_path):
    fit(tiny, tmp_path, rounds=1)
    checkpoint = tmp_path / "lightning_logs" / "version_0" / "checkpoints" / "last.ckpt"
    resumed = fit(tiny, tmp_path, ckpt_path=str(checkpoint))
    assert resumed.metrics == ran[0].metrics
    assert read_run_file(tmp_path, 1)["metrics"] == ran[0].metrics


def test_without_test_images_only_the_partition_is_known(tiny, tmp_path):
    run = fit(tiny, tmp_path, data=tiny.data(test=False))
    assert set(run.metrics) == {"rounds", "clients", "partition"}


def test_a_fine_tuned_model_replaces_the_last_evaluation(tiny, tmp_path):
    run = fit(tiny, tmp_path, algorithm="fedavg_ft")
    assert [row["round"] for row in run.metrics["by_round"]] == [0, 1]
    assert run.metrics["by_round"][-1]["personal/local_test"] == pytest.approx(
        run.metrics["clients"]["personal/local_test"], abs=1e-5
    )


@pytest.mark.every(2)
@pytest.mark.parametrize("scanned", [True, False])
def test_labels_that_only_reading_would_tell_are_counted_where_they_are_read_anyway(
    tiny, tmp_path, monkeypatch, scanned
):
    class Lazy(torch.utils.data.Dataset):
        def __init__(self, inner):
            self.inner = inner

        def __len__(self):
            return len(self.inner)

        def __getitem__(self, index):
            return self.inner[index]

    data = tiny.data()
    counts = [torch.bincount(one.tensors[1], minlength=3).tolist() for one in data.train]
    data = perada.data.FederatedData([Lazy(one) for one in data.train], data.test, data.public, num_classes=3)
    if not scanned:
        monkeypatch.setattr("perada.data.labels.SCAN_LIMIT", 0)
    result = fit(tiny, tmp_path, rounds=1, data=data).metrics.get("partition", {})
    assert result.get("train") == (counts if scanned else None)


def test_loggers_have_the_round(tiny, tmp_path):
    fit(tiny, tmp_path, logger=CSVLogger(tmp_path))
    header, *lines = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()
    place = [header.split(",").index(name) for name in ("round", "epoch")]
    rounds = [[float(line.split(",")[column]) for column in place] for line in lines]
    assert rounds
    assert all(round == epoch for round, epoch in rounds)
    assert {round for round, _ in rounds} == {0, 1}


def test_the_history_is_a_frame(ran):
    pandas = pytest.importorskip("pandas")
    frame = ran[0].history()
    rounds = ran[0].metrics["rounds"]
    assert isinstance(frame, pandas.DataFrame)
    assert frame.index.tolist() == [0, 1]
    assert frame["personal/local_test"].tolist() == [row["personal/local_test"] for row in rounds]
    assert frame.loc[1, "step"] == rounds[1]["step"]


def test_a_run_of_no_rounds_has_an_empty_history(tiny, tmp_path):
    pytest.importorskip("pandas")
    assert len(fit(tiny, tmp_path, rounds=0).history()) == 0
