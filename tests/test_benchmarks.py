# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks compare perada with computes the same, and every benchmark runs."""

import importlib
import json
import math
import random
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import yaml
from PIL import Image, ImageOps
from torch.nn import functional

import perada
from benchmarks import prediction_rules, protocol, scanner_tasks
from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.experiments import mean_and_spread
from benchmarks.faults.hostile import _put_link
from benchmarks.faults.job import UNEXPECTED, Job
from benchmarks.faults.labels import LABELS
from benchmarks.faults.processes import Content, JobFailed, Reference, References
from benchmarks.limit import operations
from benchmarks.naive import Naive
from benchmarks.prediction_runs import HeldOutImages, RunOutputs, TrainingImages
from benchmarks.roofline import OperatorMeter
from benchmarks.round import Turns
from benchmarks.workload import Workload
from perada.data import Digits
from perada.federation.both_models import BothModels, personal_share
from perada.federation.typical_images import TypicalImages
from perada.studies.compare.file import leaves
from perada.tasks import Classification


@pytest.mark.slow
def test_the_naive_round_computes_what_perada_computes():
    """Three rounds in float64 without dropout, personal, local and distilled states."""
    backbone = timm.create_model("test_resnet", num_classes=3, zero_init_last=False).double()
    options = {"dropout": 0.0, "target_modules": r"layer.*conv\d"}
    size = {"clients": 5, "sampled": 3, "batch": 4, "steps": 2, "public": 8, "public_batch": 4, "passes": 3}
    work = Workload(backbone, "residual", options, side=32, classes=3, **size)
    device = torch.device("cpu")
    data = work.data(torch.float64)
    naive = Naive(work, work.module().model, data, device)
    start = {key: value.clone() for key, value in naive.global_state.items()}
    turns = Turns({"naive": naive.round}, device)
    run = work.finetune(data, device, rounds=3, callbacks=[turns])
    assert len(naive.personal) >= 4
    for parts in turns.seconds.values():
        assert all(min(parts[part]) > 0 and len(parts[part]) == 2 for part in ("local", "server", "round"))
    moved = 0.0
    for expected, results in [
        (naive.global_state, run.state("global")),
        *((state, run.state("personal", client)) for client, state in naive.personal.items()),
    ]:
        assert expected.keys() == results.keys()
        for key, value in expected.items():
            torch.testing.assert_close(results[key], value, rtol=1e-8, atol=1e-8)
            moved = max(moved, float((value - start[key]).abs().max()))
    assert moved > 0.01


def test_operations_of_a_round():
    """Counted layer by layer for a trained head, whose step has one product more than a forward pass."""
    work = Workload("test_resnet", "head", clients=5, sampled=3, batch=4, steps=2, public=8, passes=5, classes=7)
    model = work.module().model
    counts = []

    def count(layer, inputs, out):
        each = layer.weight[0].numel()  # multiplications for one number of the output
        counts.append(2 * out.numel() * each)

    layers = [layer for layer in model.modules() if isinstance(layer, torch.nn.Conv2d | torch.nn.Linear)]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    model(torch.randn(1, 3, 32, 32))
    for hook in hooks:
        hook.remove()
    passed = sum(counts)
    trained = sum(counts) + counts[-1]
    result = operations(work)
    assert result["local"] == 2 * 3 * 4 * 2 * trained
    assert result["server"] == 3 * 8 * passed + 5 * 8 * trained
    assert result["round"] == result["local"] + result["server"]


@pytest.mark.slow
def test_every_benchmark_runs(tmp_path):
    """Each in its quick mode, as the command runs it."""
    output = tmp_path / "benchmarks.json"
    command = [sys.executable, "-m", "benchmarks", "--quick", "--device", "cpu", "--output", str(output)]
    ended = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    rows = json.loads(output.read_text())
    there = set(BENCHMARKS) if find_spec("flwr") else set(BENCHMARKS) - {"deploy"}
    assert {row["benchmark"] for row in rows} == there
    for row in rows:
        assert {"machine", "threads", "load", "commit", "torch"} < row.keys()
        ratios = [value for name, value in row.items() if " / " in name or name.startswith("gain")]
        assert all(value > 0 for value in ratios), row
        without = (
            "round_profile",
            "private_memory",
            "privacy_audit",
            "privacy_trials",
            "prediction_detectors",
            "prediction_weights",
            "prediction_rules",
            "private_rates",
            "defaults",
            "advice_aa",
            "advice_known",
            "choice_known",
            "choice_folders",
            "first_adapters",
            "first_rates",
            "start_up",
            "few_shot",
            "rare_classes",
            "unknown_labels",
            "rotation_angle",
            "segmentation",
            "growth",
            "deploy",
            "attacks",
            "limit",
            "roofline",
        )
        assert ratios or row["benchmark"] in without
    early, late, _ = (row for row in rows if row["benchmark"] == "growth")
    assert early["rounds"] < late["rounds"] and early["open files"] == late["open files"]
    assert late["resident MB"] < early["resident MB"] + 20
    for row in (row for row in rows if row["benchmark"] == "limit"):
        for kind in ("GFLOP", "computed", "seconds"):
            parts = [row[f"{part}, {kind}"] for part in ("local", "server", "round")]
            assert min(parts) > 0 and parts[2] == pytest.approx(parts[0] + parts[1], abs=3e-4)
        assert row["round, computed"] <= row["round, GFLOP"]  # a ResNet at 32×32 ends in maps of one pixel
    resnet_rows = [row for row in rows if row["benchmark"] == "round_resnet"]
    assert [row["precision"] for row in resnet_rows] == ["32-true", "bf16-mixed"]
    for row in resnet_rows:
        seconds = row["seconds"]["perada"]
        assert seconds["round"] == pytest.approx(seconds["local"] + seconds["server"], abs=2e-4)
        assert row["perada / limit, local"] == pytest.approx(
            seconds["local"] / row["seconds"]["limit"]["local"], rel=0.05
        )


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["1", "today"])
def test_no_fault_of_the_quick_campaign_falls(seed):
    """Kills, damaged files, a full disk, random configurations and command lines."""
    command = [sys.executable, "-m", "benchmarks", "faults", "--quick", "--seed", seed]
    ended = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-1000:]
    assert "| bit flipped: checkpoint" in ended.stdout


def test_digits_are_rotated_counter_clockwise_by_their_targets():
    rotated = scanner_tasks._rotated_digits(Digits(), 20, torch.Generator().manual_seed(0))
    rows = torch.randperm(len(Digits()), generator=torch.Generator().manual_seed(0))[:20]
    for row, image, angle in zip(rows, rotated.images, rotated.targets.tolist(), strict=True):
        digit = Image.fromarray(Digits().images[row, 0].numpy()).resize((24, 24), Image.Resampling.BILINEAR)
        framed = ImageOps.expand(digit, 4)
        # Pillow's angles are counter-clockwise too.
        expected = framed.rotate(angle, Image.Resampling.BILINEAR)
        opposite = framed.rotate(-angle, Image.Resampling.BILINEAR)
        distance = np.abs(image[0].numpy().astype(float) - np.asarray(expected)).mean()
        assert distance < 3
        assert abs(angle) < 5 or distance < np.abs(image[0].numpy().astype(float) - np.asarray(opposite)).mean()


def test_masks_of_pasted_digits_are_moved_with_their_pixels():
    pictures = scanner_tasks._pasted_digits(Digits(), 10, torch.Generator().manual_seed(0))
    assert torch.equal(pictures.targets > 0, pictures.images[:, 0] >= scanner_tasks.MIN_GREY)
    assert pictures.targets.unique().tolist() == [0, 1, 2]
    turned = scanner_tasks._scanned(pictures, "turned")
    assert torch.equal(turned.targets, pictures.targets.rot90(dims=(1, 2)))
    assert torch.equal(turned.images, pictures.images.rot90(dims=(2, 3)))
    negative = scanner_tasks._scanned(pictures, "negative")
    assert torch.equal(negative.targets, pictures.targets)
    assert torch.equal(negative.images, 255 - pictures.images)


def test_scores_over_seeds_have_the_sample_deviation():
    scores = [71.2, 74.9, 70.3]
    assert mean_and_spread(scores) == f"{np.mean(scores):.1f} ± {np.std(scores, ddof=1):.1f}"
    assert mean_and_spread([71.25]) == "71.2"


def test_a_benchmark_goes_on_from_the_scores_of_its_commit(tmp_path):
    runs = iter([{"score": 1.0}, {"score": 2.0}])
    for commit, expected in (("a", 1.0), ("a", 1.0), ("b", 2.0), ("a", 1.0)):
        log = scanner_tasks.RunLog(tmp_path / "runs.jsonl", commit)
        assert log.scores("segmentation/fedavg", lambda: next(runs)) == {"score": expected}


def protocol_records():
    """Results of two rows and three seeds, as `perada compare` writes them."""
    scores = {"defaults": (0.7, 0.75, 0.71), "all together": (0.5, 0.6, 0.4)}
    names = (*protocol.SCORE_NAMES, *protocol.OTHER_SCORES.values())
    return [
        {"stage": "run", "seed": seed, "varied": {"variant": variant}}
        | {name: value + place / 100 for place, name in enumerate(names)}
        for seed in range(3)
        for variant, value in ((name, own[seed]) for name, own in scores.items())
    ] + [{"stage": "start", "varied": {"variant": "defaults"}}]


def test_the_table_of_the_protocol_has_sample_deviations_and_each_clients_best_round(monkeypatch):
    looks = [{"round": 0, "personal/local_test": [0.9, 0.2]}, {"round": 1, "personal/local_test": [0.5, 0.6]}]
    monkeypatch.setattr(protocol, "scored_every_round", lambda record: looks)
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in protocol.table(protocol_records()).splitlines()
    ]
    table = {cells[0]: cells[1:] for cells in lines[2:]}
    # sqrt((0.02² + 0.03² + 0.01²) / 2) = 0.026
    assert table["defaults"] == ["72.0 ± 2.6", "73.0 ± 2.6", "74.0 ± 2.6"]
    assert table["all together"][0] == "50.0 ± 10.0"
    assert table["defaults, scored as C, each client's best round"][0] == "75.0 ± 0.0"
    assert table["defaults, scored as I, weighted by test images"][0] == "75.0 ± 2.6"
    assert table["all together, scored as J, clients that took part lately"][0] == "54.0 ± 10.0"


def test_all_differences_of_the_protocol_together_are_those_of_its_rows():
    content = yaml.safe_load((Path(perada.__file__).parent / "recipes" / f"{protocol.COMPARISON}.yaml").read_text())
    variants = content["compare"]["variants"]
    together = dict(leaves(variants.pop("all together")))
    each = [dict(leaves(changes)) for changes in variants.values()]
    assert together == {name: value for changes in each for name, value in changes.items()}
    assert len(together) == sum(map(len, each))
    assert set(protocol.READ_FROM) == {"defaults", "all together"}


def test_the_roofline_counts_the_operations_and_bytes_of_each_class_of_operators():
    meter = OperatorMeter(torch.device("cpu"))
    images = 2
    heads = 3
    tokens = 5
    width = 8
    query = torch.randn(images, heads, tokens, width)
    a = torch.randn(4, 6)
    b = torch.randn(6, 10)
    with meter:
        a @ b
        functional.scaled_dot_product_attention(query, query, query)
        a.t()  # a view, which moves nothing
        torch.cat([a, a])
    usage = meter.usage
    assert usage["product"].flops == 2 * 4 * 6 * 10
    assert usage["product"].moved_bytes == 4 * (4 * 6 + 6 * 10 + 4 * 10)
    # A product of queries and keys, and one with the values.
    assert usage["attention"].flops == 2 * (2 * images * heads * tokens * tokens * width)
    assert usage["copy"].calls == 1 and usage["copy"].moved_bytes == 4 * (4 * 6) * 4
    assert usage["other"].moved_bytes == 0


@pytest.mark.parametrize("part", ["saved", "exported"])
def test_every_link_out_of_a_folder_can_be_put(tmp_path, part):
    """Also those in place of files that exist only while a run is saved."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").touch()
    descriptions = set()
    for seed in range(60):
        folder = tmp_path / str(seed) / part
        (folder / "client_0").mkdir(parents=True)
        for name in ("run.json", "client_0/adapter_config.json"):
            (folder / name).touch()
        description = _put_link(random.Random(seed), folder.parent, part, outside)
        path, _, target = description.partition(" -> ")
        assert (folder.parent / path).resolve() == (outside if target == "outside" else outside / "secret")
        descriptions.add(path.removeprefix(f"{part}/"))
    assert descriptions == {
        "run.json",
        "client_0",
        "client_0/adapter_config.json",
        "client_0/.adapter_config.json.partial",
        ".run.json.partial",
        ".perada-saved",
        ".perada-saving",
    }


@pytest.mark.parametrize("labels", list(LABELS))
def test_a_small_run_of_the_campaign_learns_each_kind_of_labels(tmp_path, labels):
    run = Job(rounds=1, labels=labels).train(tmp_path, logger=False)
    scores = run.metrics["rounds"][-1]
    assert all(math.isfinite(value) for name, value in scores.items() if name.startswith(("global/", "personal/")))


def test_an_error_that_is_no_rejection_is_not_taken_for_one(tmp_path):
    """A job that cannot be private is replaced by another one, but not a job that ends in a bug."""
    references = References(tmp_path)
    job = Job(private="images", labels="masks")
    references.results[job] = JobFailed("privacy: not supported")
    references.results[replace(job, private="none")] = JobFailed(f"{UNEXPECTED}RuntimeError: sizes differ")
    with pytest.raises(JobFailed, match="sizes differ"):
        references.possible(job)
    references.results[replace(job, private="none")] = JobFailed("masks are not supported")
    plain_job = replace(job, labels="classes")
    references.results[plain_job] = Reference(Content([], {}, []), 1.0, 1, 1)
    assert references.possible(job) == plain_job


@pytest.mark.parametrize("module", sorted(set(BENCHMARKS.values())))
def test_each_benchmark_can_be_imported(module):
    """With the names that it imports from other benchmarks, which otherwise only minutes of a slow test would check."""
    if module == "deploy":
        pytest.importorskip("flwr")
    functions = importlib.import_module(f"benchmarks.{module}")
    for name in (name for name, place in BENCHMARKS.items() if place == module):
        assert callable(getattr(functions, name))


def test_help_lists_each_benchmark_once(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        main()
    text = capsys.readouterr().out
    assert "[]" not in text
    assert max(map(len, text.splitlines())) <= 100
    listed = text.partition("names:\n")[2].replace("\n", " ").split(",")
    assert [name.strip() for name in listed] == list(BENCHMARKS)


def test_unknown_benchmarks_are_rejected(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["benchmarks", "start_up", "privacy_adit"])
    with pytest.raises(SystemExit, match=r"^2$"):
        main()
    assert "NAME='privacy_adit' is unknown; did you mean 'privacy_audit'?" in capsys.readouterr().err


CLIENTS = 3
IMAGES = 40
CLASSES = 4


@pytest.fixture
def outputs_of_a_run():
    """Random outputs; the images of each client have statistics around its number, and so do its training images."""
    random = torch.Generator().manual_seed(0)

    def draw(*shape):
        return 2 * torch.randn(*shape, dtype=torch.double, generator=random)

    owners = torch.arange(IMAGES) % CLIENTS
    held_out = HeldOutImages(
        targets=torch.randint(CLASSES, (IMAGES,), generator=random),
        owners=owners,
        personal=draw(CLIENTS, IMAGES, CLASSES),
        shared=draw(IMAGES, CLASSES),
        statistics=(4 * owners.unsqueeze(1) + draw(IMAGES, 5)).float(),
        features=draw(IMAGES, 6).float(),
    )
    training = []
    for client in range(CLIENTS):
        targets = torch.randint(CLASSES, (30,), generator=random)
        # Each client lacks a class.
        targets[targets == client] = CLASSES - 1
        # The global model is right on nearly all of them.
        shared = draw(30, CLASSES) + 4 * functional.one_hot(targets, CLASSES)
        statistics = (4 * client + draw(30, 5)).float()
        training.append(TrainingImages(targets, draw(30, CLASSES), shared, statistics, draw(30, 6).float()))
    return RunOutputs(held_out, training)


def test_the_rule_of_perada_that_others_are_compared_with_is_that_of_evaluations(outputs_of_a_run):
    held_out = outputs_of_a_run.held_out
    typical_images = {}
    personal_shares = {}
    for client, images in enumerate(outputs_of_a_run.training):
        known_classes = torch.tensor([int((images.targets == number).sum()) >= 3 for number in range(CLASSES)])
        typical_images[client] = replace(TypicalImages.of(images.statistics), known_classes=known_classes)
        errors = sum(int(row.argmax()) != int(label) for row, label in zip(images.shared, images.targets, strict=True))
        personal_shares[client] = personal_share(errors / len(images.targets))
    assert len(set(personal_shares.values())) > 1
    both = BothModels(Classification(), None, typical_images, personal_shares)
    clients = range(CLIENTS)
    is_typical = both.typical(clients, held_out.statistics)
    assert is_typical.any() and not is_typical.all()
    weights = both.weights(clients, torch.device("cpu")).of_batches()
    assert not weights.known_classes.all()
    expected = both.logits(held_out.personal, held_out.shared, is_typical, weights).softmax(-1)
    torch.testing.assert_close(prediction_rules.PERADA(outputs_of_a_run), expected)


def test_scores_of_rules_are_means_over_clients(outputs_of_a_run):
    held_out = outputs_of_a_run.held_out
    probabilities = held_out.personal.softmax(-1)
    scores = prediction_rules.RuleScores.of(outputs_of_a_run, probabilities)
    for client in range(CLIENTS):
        right = {"own": [], "all": []}
        losses = {"own": [], "all": []}
        for image in range(IMAGES):
            target = int(held_out.targets[image])
            for name in ("own", "all") if held_out.owners[image] == client else ("all",):
                right[name].append(int(probabilities[client, image].argmax()) == target)
                losses[name].append(-math.log(probabilities[client, image, target]))
        assert float(scores.own[client]) == pytest.approx(np.mean(right["own"]))
        assert float(scores.everyone[client]) == pytest.approx(np.mean(right["all"]))
        assert float(scores.own_loss[client]) == pytest.approx(np.mean(losses["own"]))
        assert float(scores.everyone_loss[client]) == pytest.approx(np.mean(losses["all"]))


def test_weights_of_fedthe_are_optimized_for_each_image(outputs_of_a_run):
    """One image at a time, with Adam written out and central differences for gradients."""
    held_out = outputs_of_a_run.held_out
    result = prediction_rules.fedthe_weight(outputs_of_a_run)
    centres = [images.features.double().mean(0).numpy() for images in outputs_of_a_run.training]
    centre = np.mean(centres, 0)

    def softmax(values):
        powers = np.exp(values - np.max(values))
        return powers / powers.sum()

    for client, image in ((0, 0), (1, 7), (2, 5)):
        p = held_out.personal[client, image].numpy()
        q = held_out.shared[image].numpy()
        h = held_out.features[image].double().numpy()
        cosine = softmax(p) @ softmax(q) / np.linalg.norm(softmax(p)) / np.linalg.norm(softmax(q))
        distances = np.array([np.linalg.norm(h - centres[client]), np.linalg.norm(h - centre)])

        def loss(both, p=p, q=q, cosine=cosine, distances=distances):
            weights = softmax(both)
            mixed = softmax(weights[0] * p + weights[1] * q)
            return cosine * -(mixed * np.log(mixed)).sum() + (1 - cosine) * weights @ distances

        both = np.zeros(2)
        mean = np.zeros(2)
        square = np.zeros(2)
        for step in range(1, 21):
            gradient = np.array([(loss(both + d) - loss(both - d)) / 2e-5 for d in 1e-5 * np.eye(2)])
            mean = 0.9 * mean + 0.1 * gradient
            square = 0.999 * square + 0.001 * gradient**2
            both = both - 0.1 * (mean / (1 - 0.9**step)) / (np.sqrt(square / (1 - 0.999**step)) + 1e-8)
        assert abs(softmax(both)[0] - 0.5) > 0.05
        assert float(result[client, image]) == pytest.approx(softmax(both)[0], abs=1e-5)


def test_distances_to_the_gaussian_are_those_of_its_shrunk_covariance(outputs_of_a_run):
    examples = outputs_of_a_run.training[1].statistics.double()
    images = outputs_of_a_run.held_out.statistics[:6].double()
    result = prediction_rules.mahalanobis(examples, images)
    scale = examples.numpy().std(0)
    scaled = (examples.numpy() - examples.numpy().mean(0)) / scale
    covariance = np.cov(scaled.T)
    shrunk = 0.8 * covariance + 0.2 * np.diag(np.diag(covariance)) + 0.01 * np.eye(5)
    for image, distance in zip(images.numpy(), result, strict=True):
        from_mean = (image - examples.numpy().mean(0)) / scale
        assert float(distance) == pytest.approx(from_mean @ np.linalg.inv(shrunk) @ from_mean)


def test_no_held_out_image_chooses_how_it_is_predicted(outputs_of_a_run):
    """A rule that needs held-out images does not depend on the labels or the scores of those that it is scored on."""
    for client in range(CLIENTS):
        is_predicted = torch.zeros(IMAGES, dtype=torch.int)
        for predicted, known in prediction_rules.splits_of(outputs_of_a_run, client):
            assert known.any() and not (predicted & known & outputs_of_a_run.is_own[client]).any()
            assert not (known & ~outputs_of_a_run.is_own[client]).any()
            is_predicted += predicted
        assert (is_predicted == 1).all()
    own = outputs_of_a_run.is_own[0].nonzero().flatten().tolist()
    targets = outputs_of_a_run.held_out.targets.clone()
    targets[own[0]] = (targets[own[0]] + 1) % CLASSES
    changed = replace(outputs_of_a_run, held_out=replace(outputs_of_a_run.held_out, targets=targets))
    before = prediction_rules.likeliest_weight(outputs_of_a_run)[0]
    after = prediction_rules.likeliest_weight(changed)[0]
    assert torch.equal(before[own[::2]], after[own[::2]])
