# SPDX-License-Identifier: Apache-2.0
"""Regression: losses and metrics against closed forms and scikit-learn, and fits against plain loops."""

import copy
import csv
import json
import subprocess
import sys
from dataclasses import replace
from typing import get_args
from unittest.mock import Mock

import numpy as np
import pytest
import scipy.stats
import torch
from huggingface_hub import ModelCard
from sklearn import metrics as sklearn_metrics
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import perada
from perada.core.checks import OptionError
from perada.data import ByDomain, Corruptions, FederatedData, FederatedDataModule, ImageSet, Scanners
from perada.data.batches.transforms import prepare_images
from perada.data.sets.scanners import DEVICES, MOVING, scan
from perada.lightning import FederatedClassifier, PredictionFile
from perada.results.cards import render_template
from perada.results.formats import export_model
from perada.results.report import unit_of
from perada.scores.accumulation import Scores
from perada.scores.metrics import make_metrics, score_names
from perada.studies.report.page import write_page
from perada.studies.report.records import read_records
from perada.tasks import Classification, Regression, Segmentation, task_of_labels
from perada.tasks.base import make_task
from perada.tasks.regression import Movement
from tests.rejections import rejects

OUTPUTS = torch.tensor([[0.5, -3.0], [2.0, 0.25], [-1.0, 0.0]])
TARGETS = torch.tensor([[12.0, 4.0], [8.0, 5.0], [10.0, 3.5]])
SETTINGS = {"mean": (10.0, 4.0), "std": (2.0, 0.5)}


def network(outputs=1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 6), nn.Tanh(), nn.Linear(6, outputs))


def brightness(images, targets=1):
    """Numbers around 50 that follow from the images."""
    means = images.float().mean((2, 3))
    values = 50 + (means - 127) / 4
    return values[:, 0] if targets == 1 else values[:, :targets]


def hospital(seed, images=8, targets=1):
    random = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (images, 3, 8, 8), generator=random, dtype=torch.uint8)
    return TensorDataset(pixels, brightness(pixels, targets))


def hospitals(targets=1):
    return FederatedData(
        [hospital(seed, targets=targets) for seed in (0, 1)],
        [hospital(seed, 5 + seed, targets) for seed in (2, 3)],
        public=hospital(4, targets=targets),
    )


def fit(data=None, algorithm="fedavg", adapter="full", *, task=None, engine="auto", model=None, **options):
    if data is None:
        data = FederatedDataModule(hospitals(), batch_size="full", task=task or Regression())
    options = {"rounds": 1, "local_steps": 1, "lr_local": 0.1, "seed": 1} | options
    return perada.finetune(
        model or network(),
        data,
        pretrained=False,
        algorithm=algorithm,
        adapter=adapter,
        training={"engine": engine},
        **options,
    )


@pytest.mark.parametrize(
    ("options", "of_deviation"),
    [
        ({"loss_function": "squared"}, lambda d: d**2),
        ({"loss_function": "absolute"}, abs),
        (
            {"loss_function": "huber", "delta": 0.75},
            lambda d: d**2 / 2 if abs(d) <= 0.75 else 0.75 * (abs(d) - 0.375),
        ),
    ],
)
def test_losses_are_means_over_standardised_targets(options, of_deviation):
    losses = Regression(**options, **SETTINGS).loss(OUTPUTS, TARGETS)
    for row, outputs in enumerate(OUTPUTS.tolist()):
        expected = 0.0
        for target in range(2):
            z = (TARGETS[row, target].item() - SETTINGS["mean"][target]) / SETTINGS["std"][target]
            expected += of_deviation(outputs[target] - z) / 2
        assert losses[row].item() == pytest.approx(expected, rel=1e-6)


def test_predictions_are_in_the_units_of_the_targets():
    task = Regression(**SETTINGS)
    expected = np.array(OUTPUTS.tolist()) * [2.0, 0.5] + [10.0, 4.0]
    np.testing.assert_allclose(task.predictions(OUTPUTS), expected, rtol=1e-6)
    z = (TARGETS - torch.tensor(SETTINGS["mean"])) / torch.tensor(SETTINGS["std"])
    assert task.loss(z, TARGETS).abs().max() < 1e-12
    members = torch.stack([OUTPUTS, 3 * OUTPUTS])
    for average in ("logits", "probabilities"):
        mean_prediction = task.predictions(members).mean(0)
        torch.testing.assert_close(task.predictions(task.ensemble(members, average)), mean_prediction)


def test_a_large_mean_keeps_the_digits_of_half_precision_outputs():
    task = Regression(mean=5000.0, std=2.0)
    outputs = torch.tensor([[0.5]], dtype=torch.bfloat16)
    assert task.loss(outputs, torch.tensor([5001.0])).item() == 0
    assert task.predicted(outputs).item() == 5001


def test_integers_are_numbers():
    outputs = torch.tensor([[3.5], [1.0]])
    assert Regression().loss(outputs, torch.tensor([3, -1])).tolist() == [0.25, 4.0]


def test_distillation_is_the_mean_squared_difference_of_outputs():
    teacher = OUTPUTS.flip(0)
    expected = np.square(np.array(OUTPUTS.tolist()) - np.array(teacher.tolist())).mean()
    for temperature in (1.0, 3.0):
        value = Regression(**SETTINGS).distillation_loss(OUTPUTS, teacher, temperature)
        assert value.item() == pytest.approx(expected, rel=1e-6)


def test_all_targets_give_mean_and_standard_deviation():
    fitted = Regression(standardize="all").fitted_to(TARGETS, 2)
    assert fitted.mean == pytest.approx(np.mean(TARGETS.tolist(), 0))
    assert fitted.std == pytest.approx(np.std(TARGETS.tolist(), 0))
    assert make_task(fitted.record()) == fitted
    with pytest.raises(OptionError, match="target 1"):
        Regression(standardize="all").fitted_to(torch.tensor([[1.0, 2.0], [3.0, 2.0]]), 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_function": "cubic"}, "loss_function"),
        ({"delta": 0}, "delta must be"),
        ({"std": 0}, "std must be"),
        ({"std": [1.0, -1.0]}, "std must be"),
        ({"mean": "far"}, "mean must be"),
        ({"mean": []}, "mean must be"),
        ({"standardize": "each"}, "standardize"),
        ({"standardize": "all", "mean": 1}, "standardize must be None where mean or std are set"),
    ],
)
def test_options_out_of_range_are_rejected(options, message):
    with pytest.raises(OptionError, match=message):
        Regression(**options)


def test_metrics_equal_those_of_scikit_learn():
    random = np.random.default_rng(0)
    truth = random.normal([1000.0, 3.0], [5.0, 0.1], (40, 2)).astype(np.float32)
    predicted = (truth + random.normal(0, [4.0, 0.2], (40, 2))).astype(np.float32)
    task = Regression(mean=(1000.0, 3.0))
    names = [f"{name}{suffix}" for name in ("mae", "mse", "rmse", "r2", "pearson") for suffix in ("", "_per_target")]
    scores = Scores(make_metrics(names, task, 2), task)
    outputs = torch.tensor(predicted - np.float32([1000.0, 3.0]))
    for rows in (slice(0, 17), slice(17, 40)):
        scores.update(outputs[rows].unsqueeze(0), torch.tensor(truth)[rows])
    results = scores.all()
    exact_truth = truth.astype(float)
    exact = predicted.astype(float)
    mse = sklearn_metrics.mean_squared_error(exact_truth, exact, multioutput="raw_values")
    expected = {
        "mae": sklearn_metrics.mean_absolute_error(exact_truth, exact, multioutput="raw_values"),
        "mse": mse,
        "rmse": np.sqrt(mse),
        "r2": sklearn_metrics.r2_score(exact_truth, exact, multioutput="raw_values"),
        "pearson": [np.corrcoef(exact_truth[:, k], exact[:, k])[0, 1] for k in range(2)],
    }
    for name, values in expected.items():
        np.testing.assert_allclose(results[f"{name}_per_target"][0, 0], values, rtol=2e-4)
        np.testing.assert_allclose(results[name][0, 0], np.mean(values), rtol=2e-4)


@pytest.mark.parametrize("ratio", [1, 3e3, 1e4, 1e6])
@pytest.mark.parametrize("center", [None, 7.0])
def test_r2_and_pearson_keep_their_digits_where_the_mean_is_large(ratio, center):
    """Also of targets far from zero without ``mean=``, or with one that is far off, in batches, ranks and groups."""
    random = np.random.default_rng(0)
    truth = ratio + random.normal(0, 1, (120, 2))
    predicted = truth + random.normal(0, 0.6, (120, 2))
    task = Regression(mean=center)
    names = ["r2_per_target", "pearson_per_target"]
    outputs = torch.tensor(predicted) - (center or 0)
    groups = torch.tensor(random.integers(0, 2, 120))
    ranks = [Scores(make_metrics(names, task, 2), task, num_groups=2) for _ in range(2)]
    for number, rows in enumerate(torch.arange(120).split(25)):
        ranks[number % 2].update(outputs[rows].unsqueeze(0), torch.tensor(truth)[rows], groups[rows])
    ranks[0]._statistics.merge(OfRanks(ranks[1]._statistics.on_cpu()))
    for group in range(2):
        is_member = (groups == group).numpy()
        r2 = sklearn_metrics.r2_score(truth[is_member], predicted[is_member], multioutput="raw_values")
        pearson = [scipy.stats.pearsonr(truth[is_member, k], predicted[is_member, k]).statistic for k in range(2)]
        results = ranks[0].all()
        np.testing.assert_allclose(results["r2_per_target"][0, group], r2, rtol=1e-6)
        np.testing.assert_allclose(results["pearson_per_target"][0, group], pearson, rtol=1e-6)


class OfRanks:
    """Ranks of which another process has these statistics."""

    def __init__(self, others):
        self.others = others

    def gather(self, value):
        return [value, self.others]


def test_statistics_of_sites_add_up_as_sums():
    """As in a secure sum, which can only add: with a center near the mean no digits are lost."""
    random = np.random.default_rng(1)
    truth = torch.tensor(50 + random.normal(0, 3, 40))
    predicted = truth + torch.tensor(random.normal(0, 2, 40))
    metrics = make_metrics(["r2", "pearson", "mae"], Regression(mean=48), 1)
    everyone = torch.zeros(40, dtype=torch.int64)
    for metric in metrics:
        summed = metric.summed

        def of(rows, summed=summed):
            return summed.statistics(predicted[rows].view(1, -1, 1), truth[rows], everyone[rows], 1)[0, 0]

        parts = [of(slice(0, 9)), of(slice(9, 40))]
        summands = summed.summands(predicted.view(1, -1, 1), truth)[0].sum(0)
        total = summed.to_sums(parts[0]) + summed.to_sums(parts[1])
        torch.testing.assert_close(total, summands)
        expected = summed.score(of(slice(0, 40)))
        torch.testing.assert_close(summed.score(summed.from_sums(total)), expected)
        torch.testing.assert_close(summed.score(summed.combine(*parts)), expected)
        assert summed.is_possible(summed.from_sums(total), 40, 1)
        assert not summed.is_possible(summed.from_sums(total), 39, 1)


@pytest.mark.parametrize("seed", range(3))
def test_sums_without_a_digit_of_the_variation_have_no_score(seed):
    """Of a secure sum around 0 of numbers around 1e10, whose squares differ in digits that doubles do not have."""
    # Differences of such sums are above 0 for some numbers and below for others.
    truth = 1e10 + torch.randn(20, generator=torch.Generator().manual_seed(seed)).double()
    for metric in make_metrics(["r2", "pearson"], Regression(), 1):
        sums = metric.summed.summands((truth + 0.1).view(1, -1, 1), truth)[0].sum(0)
        statistics = metric.summed.from_sums(sums)
        variations = statistics[2:4]  # of predictions and of targets
        assert variations.isnan().all()
        assert not metric.summed.is_possible(statistics, 20, 1)
        assert metric.summed.score(statistics).isnan()


def test_equal_targets_have_no_correlation():
    task = Regression()
    scores = Scores(make_metrics(["r2", "pearson", "mae"], task, 1), task)
    # In doubles, the mean of three times 0.1 is not 0.1.
    scores.update(torch.tensor([[[1.0], [2.0], [3.0]]]), torch.tensor([0.1, 0.1, 0.1], dtype=torch.float64))
    results = scores.all()
    assert results["r2"].isnan().all()
    assert results["pearson"].isnan().all()
    assert results["mae"].item() == pytest.approx(1.9)


def test_a_lower_error_is_better():
    names = score_names(["mae", "r2", "rmse", "mse_per_target"])
    assert names["personal/local_test"]
    assert not names["personal/local_test_r2"]
    assert names["global/global_test_rmse"]
    assert names["personal/local_test_mse_per_target_worst"]
    run = fit(task=Regression(mean=50, std=10), evaluation={"metric": ["mae", "r2"]})
    last = run.metrics["rounds"][-1]
    of_clients = run.metrics["clients"]
    assert last["personal/local_test_worst"] == pytest.approx(max(of_clients["personal/local_test"]))
    assert last["personal/local_test_r2_worst"] == pytest.approx(min(of_clients["personal/local_test_r2"]))


@pytest.mark.parametrize("metric", ["accuracy", "auroc", "ece", "dice", "MulticlassF1Score"])
def test_metrics_of_classes_are_rejected(metric):
    with pytest.raises(OptionError, match=r"numbers; .*mae, mse"):
        make_metrics(metric, Regression(), 1)


@pytest.mark.parametrize("engine", ["folded", "loop"])
@pytest.mark.parametrize("targets", [1, 2])
def test_a_round_equals_a_loop_over_clients(engine, targets):
    data = FederatedDataModule(hospitals(targets), batch_size="full", task=Regression("huber", 0.5, mean=50, std=2))
    run = fit(data, engine=engine, model=network(targets))
    updates = []
    for dataset in hospitals(targets).train:
        images, numbers = dataset.tensors
        model = network(targets)
        z = (numbers.view(len(images), targets) - 50) / 2
        F.huber_loss(model(prepare_images(images)), z, delta=0.5).backward()
        updates.append([parameter - 0.1 * parameter.grad for parameter in model.parameters()])
    trained = dict(run.global_model().named_parameters())
    for (name, _), *values in zip(network(targets).named_parameters(), *updates, strict=True):
        torch.testing.assert_close(trained[name], torch.stack(values).mean(0), rtol=1e-4, atol=1e-5)


def test_perada_distils_saves_and_predicts(tmp_path):
    model = network(2)
    data = FederatedDataModule(hospitals(2), batch_size=4, task=Regression(standardize="all"))
    run = fit(data, "perada", "lora", model=copy.deepcopy(model), local_steps=3, distillation={"steps": 3})
    for client, dataset in enumerate(hospitals(2).test):
        images, numbers = dataset.tensors
        all_numbers = torch.cat([dataset.tensors[1] for dataset in hospitals(2).train]).double()
        outputs = run.personal(client)(prepare_images(images)).double()
        predicted = outputs * all_numbers.std(0, correction=0) + all_numbers.mean(0)
        expected = (predicted - numbers).abs().mean().item()
        assert run.metrics["clients"]["personal/local_test"][client] == pytest.approx(expected, rel=1e-5)
    loaded = perada.Run.load(run.save(tmp_path / "run"), backbone=model)
    images = hospitals(2).test[1].tensors[0]
    predictions = loaded.predict(images, client=1)
    torch.testing.assert_close(predictions.labels.double(), predicted, rtol=1e-5, atol=1e-4)
    path = predictions.to_csv(tmp_path / "predictions.csv")
    with path.open() as file:
        header, first, *_ = csv.reader(file)
    assert header == ["image", "0", "1"]
    assert [float(cell) for cell in first[1:]] == pytest.approx(predicted[0].tolist(), rel=1e-4)


def test_numbers_need_the_task():
    with pytest.raises(TypeError, match=r"float32.*Regression\(\)"):
        task_of_labels(torch.tensor([1.5]))
    with pytest.raises(TypeError, match=r"Regression\(\)"):
        FederatedDataModule(hospitals()).setup()


class Items(TensorDataset):
    """A dataset that is read item by item."""


@pytest.mark.parametrize("kind", [TensorDataset, Items])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_missing_name_the_client(kind, value):
    images, numbers = hospital(0).tensors
    numbers[3] = value
    data = FederatedDataModule(FederatedData([hospital(1), kind(images, numbers)]), task=Regression())
    with pytest.raises(ValueError, match=rf"client 1 .*label {value},"):
        data.setup()


def test_targets_move_to_their_places_in_the_run():
    task = Regression()
    targets = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert task.renumber(targets, [2, 0, 1], 3).tolist() == [[2.0, 3.0, 1.0], [5.0, 6.0, 4.0]]
    with pytest.raises(ValueError, match="2 of the run's 3 targets"):
        task.renumber(targets[:, :2], [0, 2], 3)


def test_targets_of_another_form_are_rejected():
    masks = TensorDataset(hospital(0).tensors[0], torch.zeros(8, 8, 8, dtype=torch.uint8))
    with pytest.raises(OptionError, match=r"numbers, .*one class per pixel"):
        FederatedDataModule(FederatedData([masks]), task=Regression()).setup()
    with pytest.raises(OptionError, match=r"mean .*1"):
        FederatedDataModule(hospitals(), task=Regression(mean=(1.0, 2.0))).setup()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "fedrod"}, "requires each client's number of images per class"),
        (
            {"algorithm": "perada", "adapter": "lora", "distillation": {"guard": "predictions"}},
            "labels are numbers; leave guard out",
        ),
        ({"evaluation": {"diagnostics": ["ensemble_error"]}}, "the models predict numbers"),
    ],
)
def test_what_needs_classes_is_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        fit(**options)


def test_mixed_images_are_rejected():
    with pytest.raises(ValueError, match=r"Regression\(\) .*mixed"):
        FederatedDataModule(hospitals(), task=Regression(), mixup=0.2).setup()


@pytest.mark.parametrize("options", [{"flip": True}, {"crop_padding": 2}, {"flip": True, "crop_padding": 2}])
def test_numbers_that_may_move_with_the_image_are_not_trained_on_moved_images(options):
    names = list(options)
    task = Regression(mean=50)
    with pytest.raises(OptionError, match=rf"{' and '.join(names)} would move .*invariant_to=") as rejected:
        FederatedDataModule(hospitals(), task=task, **options)
    assert rejected.value.name == names[0]
    for name in names:
        if len(names) > 1:
            with pytest.raises(OptionError, match=r"leave .* out"):
                FederatedDataModule(hospitals(), task=replace(task, invariant_to=name), **options)
    # The remedy that the message names is accepted, also from a recipe's list.
    stated = replace(task, invariant_to=names)
    FederatedDataModule(hospitals(), task=stated, **options).setup()
    assert make_task(json.loads(json.dumps(stated.record()))) == stated
    assert replace(task, invariant_to="flip").invariant_to == ("flip",)
    with rejects("invariant_to", "rotation"):
        Regression(invariant_to=["rotation"])


def test_ages_are_trained_on_mirrored_images():
    data = FederatedDataModule(
        hospitals(), batch_size=4, flip=True, crop_padding=1, task=Regression(invariant_to=["flip", "crop_padding"])
    )
    run = fit(data)
    assert run.info["task"]["init_args"]["invariant_to"] == ("flip", "crop_padding")


MILLISECONDS = 1_700_000_000_000 + 1000 * torch.arange(24)


def test_time_stamps_are_integers_with_a_mean():
    """They are standardised in double precision: float32 has every 131,072nd of them."""
    task = Regression(standardize="all").fitted_to(MILLISECONDS, 1)
    task.check_targets(MILLISECONDS)
    expected = (np.arange(24) - 11.5) / np.std(np.arange(24))
    outputs = torch.zeros(24, 1)
    np.testing.assert_allclose(task.loss(outputs, MILLISECONDS), expected**2, rtol=1e-6)
    z = torch.tensor(expected, dtype=torch.float32).unsqueeze(1)
    np.testing.assert_allclose(task.predicted(z)[:, 0], MILLISECONDS, rtol=0, atol=1e-2)


@pytest.mark.parametrize("kind", [TensorDataset, Items])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_numbers_that_float32_cannot_tell_apart_are_rejected(kind, dtype):
    images = hospital(0).tensors[0]
    data = FederatedData([kind(images, MILLISECONDS[: len(images)].to(dtype))])
    with pytest.raises((OptionError, ValueError), match=r"float32\s+cannot tell apart"):
        FederatedDataModule(data, task=Regression()).setup()


def test_the_remedies_for_numbers_that_float32_cannot_tell_apart_are_accepted():
    images = hospital(0).tensors[0]
    stamps = MILLISECONDS[: len(images)]
    FederatedDataModule(FederatedData([TensorDataset(images, stamps)]), task=Regression(standardize="all")).setup()
    differences = (stamps - stamps[0]).double()
    FederatedDataModule(FederatedData([TensorDataset(images, differences)]), task=Regression()).setup()


def test_cards_name_the_task_and_the_scores_in_the_units_of_the_targets(tmp_path):
    run = fit(task=Regression(mean=50, std=10), model=network())
    run.save(tmp_path / "run")
    score = run.metrics["rounds"][-1]["global/global_test"]
    card = (tmp_path / "run" / "README.md").read_text()
    assert "Image regression. The number of targets is 1.\n" in card
    assert f"- MAE on the test images of all clients: {score:.4g}\n" in card
    assert "%" not in card
    assert ModelCard(card).data.pipeline_tag == "other"  # the Hub has no task for numbers of images


def test_lines_of_rounds_have_no_percent(capsys):
    run = fit(task=Regression(mean=50, std=10))
    score = run.metrics["rounds"][-1]["global/global_test"]
    lines = capsys.readouterr().err
    assert f"global model, MAE {score:.4g}" in lines
    assert "%" not in lines


def test_a_report_has_no_percent_and_no_classes(tmp_path):
    run = fit(task=Regression(mean=50, std=10))
    folder = run.save(tmp_path / "run")
    command = [sys.executable, "-m", "perada", "report", str(folder), "--output", str(tmp_path / "page")]
    subprocess.run(command, check=True, capture_output=True)
    (page,) = (tmp_path / "page").glob("*.html")
    text = page.read_text()
    assert "Scores are MAE." in text
    assert "1 target," in text
    assert f"{run.metrics['clients']['personal/local_test'][0]:.4g}" in text
    assert "Confusion" not in text


@pytest.mark.parametrize("targets", [1, 2])
def test_a_report_draws_predicted_against_true_numbers_and_residuals(tmp_path, targets):
    data = replace(hospitals(targets), classes=["age", "weight"][:targets])
    run = fit(
        FederatedDataModule(data, batch_size=4, task=Regression(mean=50, std=10)), "ditto", model=network(targets)
    )
    write_page(tmp_path / "page", read_records(run.save(tmp_path / "run")))
    predicted = [run.predict(dataset.tensors[0], client).labels for client, dataset in enumerate(data.test)]
    residuals = torch.cat(predicted) - torch.cat([dataset.tensors[1].view(-1, targets) for dataset in data.test])
    with (tmp_path / "page" / "residuals.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["model"] == "personal models"]
    assert [row["number"] for row in rows] == ["age", "weight"][:targets]
    for row, values in zip(rows, residuals.T, strict=True):
        assert int(row["test images"]) == len(values)
        assert float(row["mean residual"]) == pytest.approx(float(values.mean()), rel=1e-4)
        assert float(row["standard deviation"]) == pytest.approx(float(values.std(correction=0)), rel=1e-4)
    text = (tmp_path / "page" / "index.html").read_text()
    assert "Predicted numbers" in text
    mean = float(residuals[:, 0].mean())
    assert f"age: residuals have mean {mean:.4g} and standard deviation" in text
    for name in ("predicted_and_true", "residuals"):
        assert (tmp_path / "page" / f"{name}.png").stat().st_size > 1000


def test_the_record_of_a_private_run_has_no_counts_of_numbers():
    run = fit(task=Regression(mean=50, std=10), privacy={"noise_multiplier": 1.0, "delta": 1e-3, "max_norm": 1.0})
    assert run.metrics["predictions"] == {"personal": {}, "global": {}} or run.metrics["predictions"] == {"global": {}}


def test_a_client_that_joins_is_scored_in_the_units_of_the_targets(tmp_path):
    model = network()
    run = fit(algorithm="ditto", model=copy.deepcopy(model), task=Regression(mean=50, std=20), local_steps=3)
    newcomer = FederatedData([hospital(7)], [hospital(8, 6)])
    joined = perada.personalize(run, newcomer, "newcomer", rounds=1, local_steps=3, lr=0.05)
    images, numbers = newcomer.test[0].tensors
    predicted = joined.predict(images, client="newcomer").labels.flatten()
    record = joined.info["joined"][-1]
    assert record["after"] == pytest.approx(float((predicted - numbers).abs().mean()), rel=1e-4)
    text = render_template(
        "joined",
        record=record,
        client=2,
        sample_level=None,
        folder=tmp_path,
        unit=unit_of(joined.info["task"]),
        metric="MAE",
    )
    assert (
        f"newcomer (8 images): {record['before']:.4g} before, {record['after']:.4g} after on its own test images (MAE)."
        in text
    )


def test_a_client_whose_error_grows_is_warned_of(recwarn):
    run = fit(algorithm="ditto", model=network(), task=Regression(mean=50, std=20), local_steps=3)
    newcomer = FederatedData([hospital(7)], [hospital(8, 6)])
    joined = perada.personalize(run, newcomer, "newcomer", rounds=1, local_steps=5, lr=3.0)
    record = joined.info["joined"][-1]
    assert record["after"] > record["before"]
    warnings = [str(warning.message) for warning in recwarn if "is worse than the global model" in str(warning.message)]
    assert len(warnings) == 1
    assert f"{record['after']:.4g} after {record['before']:.4g}" in warnings[0]


def test_a_resumed_run_is_the_same_to_the_bit(tmp_path):
    def data():
        return FederatedDataModule(hospitals(), batch_size=4, task=Regression("huber", standardize="all"))

    model = network()
    straight = fit(data(), "perada", model=copy.deepcopy(model), rounds=4, distillation={"steps": 2})
    options = {"distillation": {"steps": 2}, "default_root_dir": tmp_path, "enable_checkpointing": True}
    fit(data(), "perada", model=copy.deepcopy(model), rounds=2, **options)
    resumed = fit(data(), "perada", model=copy.deepcopy(model), rounds=4, ckpt_path="last", **options)
    for kind, client in (("global", None), ("personal", 0), ("personal", 1)):
        state = straight.state(kind, client)
        for key, value in resumed.state(kind, client).items():
            assert torch.equal(value, state[key]), key


def test_an_exported_model_returns_standardised_outputs(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    run = fit(task=Regression(mean=50, std=20), model=network(), rounds=2)
    export_model(run, None, "onnx", tmp_path / "model")
    images = hospitals().test[0].tensors[0]
    session = onnxruntime.InferenceSession(str(tmp_path / "model" / "model.onnx"))
    (outputs,) = session.run(None, {"images": prepare_images(images).numpy()})
    expected = 50 + 20 * torch.from_numpy(outputs).double()
    torch.testing.assert_close(expected, run.predict(images).labels, rtol=1e-4, atol=1e-3)
    recorded = json.loads(session.get_modelmeta().custom_metadata_map["task"])
    assert recorded["init_args"]["std"] == 20
    assert "the predictions are 50 + 20 · outputs" in (tmp_path / "model" / "README.md").read_text()


class AgesAtRandom(ImageSet):
    """Grey images with a number each."""

    def _load_images(self):
        random = torch.Generator().manual_seed(int(self.train))
        images = torch.randint(256, (12, 1, 32, 32), dtype=torch.uint8, generator=random)
        return images, torch.rand(12, generator=random)


@pytest.mark.parametrize("kinds", ["elastic_transform", ["fog", "zoom_blur"], "main", "all"])
def test_numbers_that_may_move_with_the_image_are_not_scored_on_moved_images(kinds):
    moving = [name for name in ("elastic_transform", "zoom_blur") if kinds in ("main", "all", name) or name in kinds]
    shifts = {"hazy": Corruptions(kinds, [1])}
    with pytest.raises(OptionError, match=rf"{moving[0]} .*shifts: 'hazy'.*invariant_to="):
        FederatedDataModule(hospitals(), task=Regression(), shifts=shifts)
    # The remedies that the message names are accepted.
    FederatedDataModule(hospitals(), task=Regression(invariant_to=moving), shifts=shifts)
    FederatedDataModule(hospitals(), task=Regression(), shifts={"hazy": Corruptions(["fog", "glass_blur"], [1])})
    with pytest.raises(OptionError, match="but not the masks"):
        FederatedDataModule(hospitals(), task=Segmentation(), shifts=shifts)
    FederatedDataModule(hospitals(), task=Classification(), shifts=shifts)


@pytest.mark.parametrize("kinds", [["plain", "turned"], ["negative+mirrored"], 12])
def test_numbers_that_may_move_with_the_image_are_not_read_by_scanners_that_move_it(kinds):
    scanners = Scanners(AgesAtRandom(), kinds=kinds)
    with pytest.raises(OptionError, match=r"(turned|mirrored).*invariant_to="):
        FederatedDataModule(dataset=scanners, partition=ByDomain("scanner"), task=Regression())
    with pytest.raises(OptionError, match=r"(turned|mirrored).*shifts: 'site'.*invariant_to="):
        FederatedDataModule(hospitals(), task=Regression(), shifts={"site": scanners})
    invariant = Regression(invariant_to=scanners.movements)
    FederatedDataModule(dataset=scanners, partition=ByDomain("scanner"), task=invariant)


@pytest.mark.parametrize("name", [name for name in DEVICES if name != "lit"])
def test_moving_scanners_are_those_after_which_a_spot_is_elsewhere(name):
    image = torch.full((1, 1, 32, 32), 16, dtype=torch.uint8)
    image[:, :, 0:8, 8:16] = 240

    def block_of_spot(pixels):
        means = F.avg_pool2d(pixels.float(), 8)
        return int((means - means.median()).abs().argmax())

    moves = block_of_spot(scan(image, name, [0])) != block_of_spot(image)
    assert moves == (name in MOVING)
    assert not moves or name in get_args(Movement)


@pytest.mark.parametrize("count", [24, 1])
@pytest.mark.parametrize("targets", [1, 2])
def test_predictions_of_a_recipe_have_the_digits_of_time_stamps(count, targets, tmp_path):
    stamps = MILLISECONDS[:count].double().unsqueeze(1)
    lengths = torch.linspace(36, 37, count).double().unsqueeze(1)
    numbers = torch.cat([stamps, lengths], 1)[:, :targets]
    task = Regression(mean=(2.0**41, 0.0)[:targets], std=(1000.0, 1.0)[:targets])
    outputs = (numbers - torch.tensor(task.mean).double()) / torch.tensor(task.std)
    module = Mock(spec=FederatedClassifier, task=task)
    trainer = Mock(loggers=[None], log_dir=tmp_path, is_global_zero=True)
    file = PredictionFile()
    file.on_predict_start(trainer, module)
    for rows in torch.arange(count).split(5):
        batch = {"owner": torch.zeros(len(rows), dtype=torch.int64), "y": numbers[rows], "global": outputs[rows]}
        file.on_predict_batch_end(trainer, module, batch, None, 0)
    file.on_predict_epoch_end(trainer, module)
    with (tmp_path / "predictions.csv").open() as table:
        for row, expected in zip(csv.DictReader(table), numbers.tolist(), strict=True):
            for column in ("label", "global"):
                assert [float(cell) for cell in row[column].split()] == pytest.approx(expected, rel=1e-12, abs=1e-5)
