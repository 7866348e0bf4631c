# SPDX-License-Identifier: Apache-2.0
"""Evaluation of existing models: the scores of runs, of weights and of networks, and what does not fit."""

import csv
import json
import math

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from scipy import stats
from sklearn.metrics import balanced_accuracy_score, brier_score_loss, roc_auc_score
from torch.utils.data import TensorDataset

import perada
from perada.cli.main import main
from perada.data import Digits, Dirichlet, FederatedData, FederatedDataModule, Images
from perada.data.partitions import ByDomain
from perada.data.preprocessing import Preprocessing
from perada.tasks import MultiLabel, Regression, Segmentation
from tests.masks import hospitals
from tests.rejections import raises_naming


@pytest.fixture(scope="module")
def run(tiny):
    return tiny.finetune(
        algorithm="ditto", rounds=3, clients_per_round=None, metric=["accuracy", "auroc"], logger=False
    )


def digits_data(clients=3):
    return FederatedDataModule(
        dataset=Digits(), partition=Dirichlet(clients, alpha=1.0), image_size=32, batch_size=16, test_limit=120
    )


def test_scores_are_those_of_the_run(run, tiny, tmp_path):
    run.save(tmp_path / "saved")
    run.export(tmp_path / "exported")
    models = {
        "ours": run,
        "global": (run, "global"),
        "exported": tmp_path / "exported",
    }
    with pytest.raises(ValueError, match="custom network"):
        perada.evaluate({"saved": tmp_path / "saved"}, tiny.data())
    models["exported"] = perada.Run.load(tmp_path / "exported", backbone=tiny.net())
    result = perada.evaluate(models, tiny.data())
    clients = run.metrics["clients"]
    for number in range(5):
        for model in ("ours", "exported"):
            for score, suffix in (("accuracy", ""), ("auroc", "_auroc")):
                expected = clients[f"personal/local_test{suffix}"][number]
                assert result.find(str(number), model, score).value == pytest.approx(expected, abs=1e-6)
        expected = run.metrics["global/local_test"][number]
        assert result.find(str(number), "global", "accuracy").value == pytest.approx(expected, abs=1e-6)
    final = run.metrics["rounds"][-1]
    assert result.find("pooled", "global", "accuracy").value == pytest.approx(final["global/global_test"], abs=1e-6)
    assert result.find("pooled", "global", "auroc").value == pytest.approx(final["global/global_test_auroc"], abs=0.01)
    difference = result.find("3", "ours", "accuracy", versus="exported")
    assert difference.value == 0 and difference.low < 0 < difference.high


def test_intervals_are_those_of_the_predictions(run, tiny):
    result = perada.evaluate({"global": (run, "global")}, tiny.data())
    images, labels = zip(*(part.tensors for part in tiny.data().test), strict=True)
    labels = torch.cat(labels).numpy()
    probabilities = run.predict(torch.cat(images)).probabilities.double().numpy()
    probabilities /= probabilities.sum(1, keepdims=True)
    right = int((probabilities.argmax(1) == labels).sum())
    accuracy = result.find("pooled", "global", "accuracy")
    expected = stats.binomtest(right, 30).proportion_ci(0.95, "wilson")
    assert (accuracy.low, accuracy.high) == pytest.approx((expected.low, expected.high))
    brier = result.find("pooled", "global", "brier")
    assert brier.value == pytest.approx(brier_score_loss(labels, probabilities, labels=[0, 1, 2]), abs=1e-6)
    balanced = result.find("pooled", "global", "balanced_accuracy")
    assert balanced.value == pytest.approx(balanced_accuracy_score(labels, probabilities.argmax(1)))
    squared = ((probabilities - np.eye(3)[labels]) ** 2).sum(1)
    margin = stats.t.ppf(0.975, 29) * squared.std(ddof=1) / math.sqrt(30)
    assert brier.high - brier.value == pytest.approx(margin, rel=1e-3)
    recall = result.find("pooled", "global", "recall", class_name="1")
    assert recall.value == pytest.approx((probabilities.argmax(1)[labels == 1] == 1).mean())


def test_few_images_of_a_class_are_said_and_not_ranked(run, tiny):
    result = perada.evaluate({"ours": run}, tiny.data())
    row = result.find("0", "ours", "auroc")
    assert row.support == 2 and not row.is_ranked and row.record()["too_few"]
    assert "too few: 2" in str(result)
    assert result.find("pooled", "ours", "auroc").is_ranked


def test_weights_of_a_vendor(tmp_path):
    torch.manual_seed(0)
    network = timm.create_model("test_resnet", num_classes=10).eval()
    torch.save(
        {"state_dict": {f"module.{key}": value for key, value in network.state_dict().items()}}, tmp_path / "v.pt"
    )
    save_file(network.state_dict(), tmp_path / "v.safetensors")
    data = digits_data()
    models = {"pt": tmp_path / "v.pt", "safetensors": str(tmp_path / "v.safetensors")}
    result = perada.evaluate(models, data, backbone="test_resnet")

    config = timm.data.resolve_model_data_config(network)
    preprocessing = Preprocessing.from_record(
        data.preprocessing.record() | {"mean": list(config["mean"]), "std": list(config["std"]), "shape": [3, 32, 32]}
    )
    for client in range(3):
        images, labels = zip(*data.test_batches_of(client), strict=True)
        with torch.no_grad():
            logits = network(preprocessing.batch(list(torch.cat(images))))
        labels = torch.cat(labels)
        truth = np.eye(10)[labels]
        occurring = truth.any(0)
        expected = roc_auc_score(truth[:, occurring], logits.double().softmax(1)[:, occurring], average="macro")
        for name in models:
            assert result.find(str(client), name, "auroc").value == pytest.approx(expected, abs=1e-9)
            accuracy = float((logits.argmax(1) == labels).double().mean())
            assert result.find(str(client), name, "accuracy").value == accuracy


@pytest.mark.parametrize("adapter", ["head", "lora"])
def test_weights_that_perada_exported(adapter, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained = perada.finetune(
        "test_resnet",
        digits_data(),
        pretrained="perada:fashion_test_resnet",
        adapter=adapter,
        algorithm="fedavg",
        rounds=1,
        local_steps=2,
        logger=False,
        enable_progress_bar=False,
    )
    trained.save("run")
    main(["export", "run", "--format", "safetensors", "--output", "weights"])
    result = perada.evaluate(
        {"run": trained, "weights": "weights/model.safetensors"}, digits_data(), backbone="test_resnet"
    )
    for client in ("0", "1", "2", "pooled"):
        for score in ("accuracy", "brier", "auroc"):
            row = result.find(client, "run", score)
            assert result.find(client, "weights", score).value == pytest.approx(row.value, abs=1e-4)


def test_weights_that_do_not_fit(tmp_path):
    network = timm.create_model("test_resnet", num_classes=7)
    torch.save(network.state_dict(), tmp_path / "seven.pt")
    with raises_naming(ValueError, tmp_path / "seven.pt", "head"):
        perada.evaluate({"vendor": tmp_path / "seven.pt"}, digits_data(), backbone="test_resnet")
    with raises_naming(ValueError, tmp_path / "seven.pt", "backbone"):
        perada.evaluate({"vendor": tmp_path / "seven.pt"}, digits_data())
    with raises_naming(FileNotFoundError, "missing.pt"):
        perada.evaluate({"vendor": "missing.pt"}, digits_data(), backbone="test_resnet")


def test_a_client_that_the_run_does_not_know_gets_the_global_model(tiny):
    named = tiny.data()
    named.client_names = ["a", "b", "c", "d", "e"]
    run = tiny.finetune(named, algorithm="ditto", rounds=1, clients_per_round=None, logger=False)
    others = tiny.data()
    others.client_names = ["e", "x", "c", "d", "a"]
    result = perada.evaluate({"ours": run, "global": (run, "global")}, others)
    assert any("ours" in note and "x" in note for note in result.notes)
    assert result.find("x", "ours", "brier", versus="global").value == 0
    images, labels = others.test[0].tensors
    right = (run.predict(images, "e").labels == labels).double().mean()
    assert result.find("e", "ours", "accuracy").value == float(right)
    with raises_naming(ValueError, "ours", "x", "personal"):
        perada.evaluate({"ours": (run, "personal")}, others)


def test_models_of_other_classes_are_rejected(run, tiny):
    four = [TensorDataset(torch.randn(8, 1, 8, 8), torch.arange(8) % 4)]
    with raises_naming(ValueError, "ours", 3, 4):
        perada.evaluate({"ours": run}, FederatedData(four, four))
    renamed = tiny.data()
    renamed.classes = ["cat", "dog", "cow"]
    named = tiny.finetune(renamed, algorithm="fedavg", rounds=1, logger=False)
    reordered = tiny.data()
    reordered.classes = ["dog", "cat", "cow"]
    with raises_naming(ValueError, "ours", "cat, dog, cow", "dog, cat, cow"):
        perada.evaluate({"ours": named}, reordered)


def test_wrong_calls(run, tiny):
    with raises_naming(TypeError, "models"):
        perada.evaluate(run, tiny.data())
    with raises_naming(ValueError, "models"):
        perada.evaluate({}, tiny.data())
    with raises_naming(TypeError, "data"):
        perada.evaluate({"ours": run}, tiny.data().test)
    with raises_naming(ValueError, "no test images"):
        perada.evaluate({"ours": run}, tiny.data(test=False))
    with raises_naming(TypeError, "ours"):
        perada.evaluate({"ours": 3}, tiny.data())
    with raises_naming(ValueError, "ours", "prediction", "ensemble"):
        perada.evaluate({"ours": (run, "ensemble")}, tiny.data())
    with raises_naming(ValueError, "net", "global"):
        perada.evaluate({"net": (Lines(3), "global")}, tiny.data())


class Lines(torch.nn.Module):
    """Outputs that follow from the mean of an image, or NaN for dark ones."""

    def __init__(self, outputs, breaks_below=-math.inf):
        super().__init__()
        self.outputs = outputs
        self.breaks_below = breaks_below

    def forward(self, x):
        mean = x.flatten(1).mean(1, keepdim=True)
        return torch.arange(1, self.outputs + 1) * mean.where(mean > self.breaks_below, torch.nan)


def test_a_model_with_nan_has_no_scores_and_the_others_keep_theirs(tiny):
    data = tiny.data()
    images, labels = data.test[1].tensors
    data.test[1] = TensorDataset(images - 5, labels)
    result = perada.evaluate({"good": Lines(3), "broken": Lines(3, breaks_below=-3)}, data)
    assert math.isnan(result.find("1", "broken", "accuracy").value)
    assert not math.isnan(result.find("1", "good", "accuracy").value)
    assert not math.isnan(result.find("0", "broken", "accuracy").value)
    assert math.isnan(result.find("pooled", "broken", "accuracy").value)
    assert not math.isnan(result.find("pooled", "good", "accuracy").value)
    assert any("broken" in note and "1" in note for note in result.notes)


def test_a_client_without_test_images_has_no_rows(run, tiny):
    data = tiny.data()
    images, labels = data.test[2].tensors
    data.test[2] = TensorDataset(images[:0], labels[:0])
    result = perada.evaluate({"ours": run}, data)
    assert "2" not in {row.client for row in result.rows}
    assert result.find("pooled", "ours", "accuracy").images == 24


def test_several_labels_of_which_some_are_unknown():
    random = torch.Generator().manual_seed(0)
    images = torch.randn(60, 1, 4, 4, generator=random)
    targets = torch.randint(-1, 2, (60, 2), generator=random).float()
    parts = [TensorDataset(images[:40], targets[:40]), TensorDataset(images[40:], targets[40:])]
    data = FederatedDataModule(FederatedData(parts, parts), task=MultiLabel())
    result = perada.evaluate({"lines": Lines(2)}, data)
    scores = (torch.tensor([1.0, 2.0]) * images.flatten(1).mean(1, keepdim=True)).sigmoid()
    for k in range(2):
        is_known = targets[:40, k] >= 0
        expected = roc_auc_score(targets[:40, k][is_known], scores[:40, k][is_known])
        assert result.find("0", "lines", "auroc", class_name=str(k)).value == pytest.approx(expected)
    is_known = targets >= 0
    right = ((scores > 0.5) == targets)[is_known].double().mean()
    assert result.find("pooled", "lines", "accuracy").value == pytest.approx(float(right))


def test_numbers_and_masks():
    random = torch.Generator().manual_seed(0)
    parts = []
    for _ in range(2):
        images = torch.randn(30, 1, 4, 4, generator=random)
        parts.append(TensorDataset(images, 500 + 100 * torch.randn(30, 1, generator=random)))
    task = Regression(mean=500.0, std=100.0)
    data = FederatedDataModule(FederatedData(parts, parts), task=task)
    result = perada.evaluate({"lines": Lines(1), "twice": Lines(1)}, data)
    errors = [(500 + 100 * part.tensors[0].flatten(1).mean(1, keepdim=True) - part.tensors[1]).abs() for part in parts]
    assert result.find("0", "lines", "mae").value == pytest.approx(float(errors[0].mean()), rel=1e-5)
    pooled = result.find("pooled", "lines", "mae")
    every_error = torch.cat(errors).double()
    assert pooled.value == pytest.approx(float(every_error.mean()), rel=1e-5)
    margin = stats.t.ppf(0.975, 59) * float(every_error.std()) / math.sqrt(60)
    assert pooled.high - pooled.value == pytest.approx(margin, rel=1e-3)
    assert result.find("pooled", "lines", "rmse", versus="twice").value == 0

    masks = FederatedDataModule(hospitals(), task=Segmentation())
    network = torch.nn.Conv2d(3, 3, 1)
    result = perada.evaluate({"network": network}, masks)
    rows = [result.find(client, "network", "dice") for client in ("0", "1", "2")]
    pooled = result.find("pooled", "network", "dice")
    # All clients have as many images, and each image has both squares or nearly so.
    assert pooled.value == pytest.approx(np.mean([row.value for row in rows]), abs=0.02)
    assert pooled.low < pooled.value < pooled.high


def test_images_of_a_patient_count_together(tmp_path):
    random = np.random.default_rng(0)
    for client in ("north", "south"):
        for patient in range(12):
            folder = tmp_path / client / "test" / str(patient % 2) / f"p{patient}"
            train = tmp_path / client / "train" / str(patient % 2) / f"q{patient}"
            for target in (folder, train):
                target.mkdir(parents=True)
            pixels = random.integers(0, 256, (8, 8), dtype=np.uint8)
            for copy in range(3):
                Image.fromarray(pixels).save(folder / f"{copy}.png")
            Image.fromarray(pixels).save(train / "0.png")
    images = Images(tmp_path, layout="{client}/{split}/{class}/{group}/*", size=8, gray=True)
    data = FederatedDataModule(dataset=images, partition=ByDomain("client"))
    result = perada.evaluate({"lines": Lines(2)}, data)
    row = result.find("north", "lines", "accuracy")
    assert (row.support, row.images) == (12, 36)
    # The interval is that of 12 images, and not of 36, but for a factor of (n - 1) / n.
    expected = stats.binomtest(round(12 * row.value), 12).proportion_ci(0.95, "wilson")
    assert (row.low, row.high) == pytest.approx((expected.low, expected.high), abs=0.03)
    pooled = result.find("pooled", "lines", "accuracy")
    expected = stats.binomtest(round(24 * pooled.value), 24).proportion_ci(0.95, "wilson")
    assert (pooled.low, pooled.high) == pytest.approx((expected.low, expected.high), abs=0.02)


def test_files_have_each_row(run, tiny, tmp_path):
    result = perada.evaluate({"ours": run, "=global": (run, "global")}, tiny.data())
    result.save(tmp_path / "out")
    record = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    rows = list(csv.DictReader((tmp_path / "out" / "evaluation.csv").read_text().splitlines()))
    assert len(record["rows"]) == len(rows) == len(result.rows)
    assert record["models"] == ["ours", "=global"]
    first = result.rows[0]
    assert float(rows[0]["value"]) == first.value == record["rows"][0]["value"]
    # A spreadsheet would run what begins with =.
    assert not any(cell.startswith("=") for row in rows for cell in row.values())
