# SPDX-License-Identifier: Apache-2.0
"""The scores on shifted test sets, recomputed by plain loops, and when they are taken."""

import csv
import json
from statistics import fmean, pstdev

import imagecorruptions
import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from sklearn.metrics import f1_score, roc_auc_score
from torch.utils.data import TensorDataset

import perada
from perada.algorithms import FedEnsemble, Standalone
from perada.api import make_trainer
from perada.cli import main
from perada.core.seeding import derive_seed
from perada.data import Corruptions, ImageSet, LabelShift
from perada.engine.engine import Engine
from perada.federation.evaluation import sample_clients
from perada.lightning import FederatedLoop
from perada.lightning.module import FederatedClassifier
from tests.options import sections

CLASSES = 3
SEED = 4


def stripes(count, seed, multilabel=False):
    """Noise with a bar whose row is the class; several bars where there are several labels."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % CLASSES
    truth = torch.nn.functional.one_hot(labels, CLASSES)
    if multilabel:
        truth = (torch.rand(count, CLASSES, generator=draw) > 0.5).long()
        truth[0], truth[1] = 0, 1
    images = torch.randint(0, 160, (count, 1, 32, 32), generator=draw, dtype=torch.uint8)
    for image, row in zip(images, truth, strict=True):
        for k in row.nonzero().flatten().tolist():
            image[:, 10 * k : 10 * k + 4] += 80
    return images, truth.float() if multilabel else labels


class Stripes(ImageSet):
    """Another set of the same classes."""

    num_classes = CLASSES

    def __init__(self, multilabel: bool = False, train: bool = True):
        super().__init__(train)
        self.multilabel = multilabel

    def _load_images(self):
        return stripes(10 if self.train else 13, 90, self.multilabel)


def network(seed=0):
    torch.manual_seed(seed)
    layers = torch.nn.Conv2d(1, 4, 5, stride=3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(400, CLASSES)
    return torch.nn.Sequential(*layers)


def federation(multilabel=False):
    sizes = (9, 0, 6, 4)
    train = [TensorDataset(*stripes(8, seed, multilabel)) for seed in range(4)]
    test = [TensorDataset(*stripes(max(n, 2), 10 + n, multilabel)) for n in sizes]
    test[1] = torch.utils.data.Subset(test[1], [])
    return perada.FederatedData(train, test)


def shifts(multilabel=False):
    return {
        "dim": Corruptions(["gaussian_noise", "contrast"], [2, 5]),
        "others": LabelShift(),
        "new": Stripes(multilabel),
    }


def run(algorithm="ditto", multilabel=False, when="end", given=None, rounds=2, logger=False, lr=0.02, **options):
    data = perada.FederatedDataModule(
        federation(multilabel),
        shifts=shifts(multilabel) if given is None else given,
        shifts_when=when,
        batch_size=4,
        eval_batch_size=7,
    )
    fixed = {"adapter": "full", "lr_personal": lr, "lr_local": lr, "seed": SEED, "rounds": rounds, "logger": logger}
    quiet = {"accelerator": "cpu", "enable_progress_bar": False}
    return perada.finetune(network(), data, **sections(algorithm=algorithm, **fixed, **quiet, **options))


def corrupted(image, kind, severity, place):
    """The library's own corruption of an image, drawn from the stream that docs/shifts.md names."""
    seed = derive_seed(SEED, f"shift/{kind}", severity, place)
    np.random.seed(np.frombuffer(derive_seed(seed, "numpy").to_bytes(16, "little"), dtype=np.uint32))
    result = imagecorruptions.corrupt(np.stack([image[0].numpy()] * 3, -1), severity, kind)
    return torch.from_numpy(result[..., 1:2].transpose(2, 0, 1).copy())


def logits(model, image):
    with torch.no_grad():
        return model((image[None].float() / 255 - 0.5) / 0.5)[0]


def accuracy(model, images, labels):
    right = [int(logits(model, image).argmax()) == int(label) for image, label in zip(images, labels, strict=True)]
    return sum(right) / len(right)


def auroc(model, images, labels):
    scores = torch.stack([logits(model, image) for image in images]).double().sigmoid().numpy()
    known = [k for k in range(CLASSES) if 0 < labels[:, k].sum() < len(labels)]
    return fmean(roc_auc_score(labels[:, k].numpy(), scores[:, k]) for k in known)


def pooled(multilabel=False):
    """All test images in order of client, their labels and owners."""
    parts = [(client, *item) for client, part in enumerate(federation(multilabel).test) for item in part]
    return [x for _, x, _ in parts], torch.stack([y for _, _, y in parts]), [client for client, _, _ in parts]


@pytest.mark.every(2)
@pytest.mark.parametrize("multilabel", [False, True])
def test_the_scores_are_those_of_the_exported_models(tmp_path, multilabel):
    saved = run(multilabel=multilabel).save(tmp_path / "run")
    loaded = perada.Run.load(saved, backbone=network(seed=1))
    score = auroc if multilabel else accuracy
    images, labels, owners = pooled(multilabel)
    last = loaded.metrics["rounds"][-1]
    clients = loaded.metrics["clients"]
    kinds = loaded.metrics["shifts"]
    models = [loaded.personal(client) for client in range(4)]
    shared = loaded.global_model()

    curves = {}
    for kind in ("gaussian_noise", "contrast"):
        for severity in (2, 5):
            dim = [corrupted(image, kind, severity, place) for place, image in enumerate(images)]
            curves[kind, severity] = [score(model, dim, labels) for model in [*models, shared]]
    assert len({tuple(values) for values in curves.values()}) > 1
    close = {"abs": 1e-6}
    means = [fmean(values) for values in zip(*curves.values(), strict=True)]
    assert clients["personal/dim"] == pytest.approx(means[:4], **close)
    assert last["personal/dim"] == pytest.approx(fmean(means[:4]), **close)
    assert last["personal/dim_std"] == pytest.approx(pstdev(means[:4]), **close)
    assert last["global/dim"] == pytest.approx(means[4], **close)
    assert set(kinds) == {"dim"}
    for kind, results in kinds["dim"].items():
        assert results["severity"] == [2, 5]
        own = [curves[kind, severity] for severity in (2, 5)]
        assert results["personal"] == pytest.approx([fmean(values[:4]) for values in own], **close)
        assert results["personal_std"] == pytest.approx([pstdev(values[:4]) for values in own], **close)
        assert results["global"] == pytest.approx([values[4] for values in own], **close)

    def of_others(model, client):
        rows = [row for row, owner in enumerate(owners) if owner != client]
        return score(model, [images[row] for row in rows], labels[rows])

    others = [of_others(model, client) for client, model in enumerate(models)]
    assert clients["personal/others"] == pytest.approx(others, **close)
    assert last["global/others"] == pytest.approx(fmean(of_others(shared, client) for client in range(4)), **close)
    new = stripes(13, 90, multilabel)
    assert clients["personal/new"] == pytest.approx([score(model, *new) for model in models], **close)
    assert last["global/new"] == pytest.approx(score(shared, *new), **close)


@pytest.mark.slow
def test_every_metric_scores_the_shifts():
    """Macro F1 of each client's model on another set and on the others' images, again by scikit-learn."""
    arguments = {"new": Stripes(), "others": LabelShift()}
    result = run(given=arguments, metric=["accuracy", "f1_macro"])
    last = result.metrics["rounds"][-1]
    clients = result.metrics["clients"]
    (images, labels, owners), new = pooled(), stripes(13, 90)

    def f1(model, images, labels):
        predicted = [int(logits(model, image).argmax()) for image in images]
        return f1_score(labels.tolist(), predicted, average="macro")

    for client in range(4):
        model = result.personal(client)
        rows = [row for row, owner in enumerate(owners) if owner != client]
        theirs = f1(model, [images[row] for row in rows], labels[rows])
        assert clients["personal/new_f1_macro"][client] == pytest.approx(f1(model, *new), abs=1e-6)
        assert clients["personal/others_f1_macro"][client] == pytest.approx(theirs, abs=1e-6)
        assert clients["personal/new"][client] == pytest.approx(accuracy(model, *new))
    assert last["global/new_f1_macro"] == pytest.approx(f1(result.global_model(), *new), abs=1e-6)


def scores(run):
    """The last round's scores on shifts, with those of each kind and each client."""
    last = {name: value for name, value in run.metrics["rounds"][-1].items() if name.endswith(("dim", "others", "new"))}
    clients = {name: run.metrics["clients"][name] for name in last if name in run.metrics["clients"]}
    return last, clients, run.metrics["shifts"]


def checkpoint(folder):
    (path,) = folder.rglob("last.ckpt")
    return str(path)


@pytest.mark.slow
def test_a_resumed_run_has_the_same_scores(tmp_path):
    where = {"logger": True, "default_root_dir": str(tmp_path / "half")}
    run(rounds=1, **where)
    half = checkpoint(tmp_path)
    uninterrupted = run(logger=True, default_root_dir=str(tmp_path / "whole"))
    resumed = run(ckpt_path=half)
    assert scores(resumed) == scores(uninterrupted)
    assert len(scores(uninterrupted)[0]) == 6
    done = run(ckpt_path=checkpoint(tmp_path / "whole"), given={"others": "label_shift"})  # nothing left to train
    assert done.metrics["rounds"][-1]["personal/others"] == scores(uninterrupted)[0]["personal/others"]
    assert "shifts" not in done.metrics  # those of the checkpoint were of shifts that this run does not have
    assert "personal/new" not in done.metrics["clients"]
    again = run(ckpt_path=checkpoint(tmp_path / "whole"))
    assert scores(again) == scores(uninterrupted)


def folders(root):
    return sorted(root.rglob("metrics.csv"), key=lambda path: path.parent.name)


def columns(path):
    with path.open() as file:
        return [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]


@pytest.mark.slow
def test_a_checkpoint_is_tested_on_what_the_fit_was(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    small = ["--data.train_limit=100", "--data.test_limit=20", "--data.image_size=32", "--data.partition.num_clients=8"]
    small += ["--training.local_steps=1", "--distillation.steps=0", "--trainer.enable_progress_bar=false"]
    small += [
        "--data.shifts={hazy: {class_path: Corruptions, init_args: {kinds: fog, severities: [1, 4]}}, o: label_shift}"
    ]
    small += ["--trainer.max_epochs=1", "--trainer.accelerator=cpu"]
    main(["fit", "--config", "digits", *small])
    fitted = capsys.readouterr().out
    main(["test", "--config", "digits", *small, "--ckpt_path", "last"])
    tested = capsys.readouterr().out
    tables = [line for line in fitted.splitlines() if line.startswith("|")]
    assert [line for line in tested.splitlines() if line.startswith("|")] == tables
    assert any("hazy, personal models" in line and "severity 4" in line for line in tables)
    first, second = (columns(path)[-1] for path in folders(tmp_path))
    names = {
        f"{role}/{shift}{end}" for role in ("personal", "global") for shift in ("hazy", "o") for end in ("", "_std")
    }
    assert {name for name in first if name in names} == names - {"global/hazy_std", "global/o_std"}
    assert {name: second[name] for name in names & first.keys()} == {name: first[name] for name in names & first.keys()}
    both = [json.loads((path.parent / "shifts.json").read_text()) for path in folders(tmp_path)]
    assert both[0] == both[1]
    main(["report", str(folders(tmp_path)[0].parent)])
    report = capsys.readouterr().out
    assert "severity 4" in report
    assert "o, global model" in report
    with pytest.raises(ValueError, match=r"partition .*data\.shifts"):
        main(["test", "--config", "digits", *small, "--data.test_limit=19", "--ckpt_path", "last"])


@pytest.mark.slow
def test_when_they_are_scored(tmp_path):
    def rounds(when):
        result = run(when=when, given={"others": "label_shift"})
        return ["personal/others" in record for record in result.metrics["rounds"]]

    assert rounds("end") == [False, True]
    assert rounds("evaluation") == [True, True]
    assert rounds("test") == [False, False]


@pytest.mark.slow
def test_only_the_sample_runs_on_shifted_images():
    some = run(global_test_clients=2)
    uninterrupted = run()
    sampled = sample_clients(4, 2, SEED)
    for name in ("dim", "others", "new"):
        values = some.metrics["clients"][f"personal/{name}"]
        assert [client for client, value in enumerate(values) if value == value] == sampled
        assert [values[client] for client in sampled] == [
            uninterrupted.metrics["clients"][f"personal/{name}"][client] for client in sampled
        ]
        assert some.metrics["rounds"][-1][f"global/{name}"] == uninterrupted.metrics["rounds"][-1][f"global/{name}"]
    none = run(global_test_clients=0)
    assert not [name for name in none.metrics["clients"] if name not in ("personal/local_test", "last_round")]
    assert scores(none)[0] == {name: v for name, v in scores(uninterrupted)[0].items() if name.startswith("global/")}
    assert set(none.metrics["shifts"]["dim"]["contrast"]) == {"severity", "global"}


@pytest.mark.slow
def test_an_ensemble_and_models_without_a_server():
    modes = run(FedEnsemble(modes=2))
    members = modes.global_model()
    new = stripes(13, 90)
    assert modes.metrics["rounds"][-1]["global/new"] == pytest.approx(accuracy(members, *new))
    assert modes.metrics["clients"]["personal/new"] == pytest.approx([accuracy(members, *new)] * 4)
    images, labels, owners = pooled()
    rows = [[row for row, owner in enumerate(owners) if owner != client] for client in range(4)]
    others = [accuracy(members, [images[r] for r in own], labels[own]) for own in rows]
    assert modes.metrics["clients"]["personal/others"] == pytest.approx(others)
    alone = run(Standalone())
    assert not [name for name in alone.metrics["rounds"][-1] if name.startswith("global/")]
    assert "personal/dim" in alone.metrics["rounds"][-1]
    assert "global" not in alone.metrics["shifts"]["dim"]["contrast"]


@pytest.mark.slow
def test_features_and_images_give_the_same_scores(monkeypatch):
    encoded = []
    features = Engine.features
    monkeypatch.setattr(Engine, "features", lambda self, x: encoded.append(len(x)) or features(self, x))

    def fit(cache):
        data = perada.FederatedDataModule(federation(), shifts=shifts(), batch_size=4, eval_batch_size=7)
        options = {"adapter": "head", "seed": SEED, "rounds": 1, "logger": False, "accelerator": "cpu"}
        return perada.finetune(
            network(), data, **sections(algorithm="ditto", cache_features=cache, enable_progress_bar=False, **options)
        )

    plain = fit(False)
    assert encoded == []
    cached = fit(True)
    for left, right in zip(scores(cached)[:2], scores(plain)[:2], strict=True):
        assert left.keys() == right.keys()
        for name, values in left.items():
            assert values == pytest.approx(right[name], abs=1e-6)
    assert sum(encoded) == 4 * 8 + 19 + 4 * 19 + 13  # each image once: training, test, four corruptions, the other set


class Stop(pl.Callback):
    """Ends training after the first round."""

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.should_stop = True


@pytest.mark.slow
def test_models_that_are_fine_tuned_after_an_early_stop_are_scored_afresh():
    tuned = run("fedavg_ft", when="evaluation", rounds=3, callbacks=[Stop()], lr=0.2)
    assert len(tuned.metrics["rounds"]) == 1
    new = stripes(13, 90)
    result = tuned.metrics["clients"]["personal/new"]
    assert result == pytest.approx([accuracy(tuned.personal(client), *new) for client in range(4)])
    assert result != pytest.approx([accuracy(tuned.global_model(), *new)] * 4)


@pytest.mark.slow
def test_private_training_is_scored_alike():
    private = run("perada_no_kd", privacy={"noise_multiplier": 1.0, "secure_rng": False})
    assert {"personal/dim", "global/dim"} <= private.metrics["rounds"][-1].keys()


def test_an_image_that_does_not_fit_the_network_is_rejected():
    class Wide(Stripes):
        def _load_images(self):
            images, labels = super()._load_images()
            return images.repeat(1, 1, 1, 2), labels

    with pytest.raises(ValueError, match="'wide'"):
        run(given={"wide": Wide()}, rounds=1)


@pytest.mark.slow
def test_two_rounds_of_draws_are_not_disturbed():
    """The shifts draw from no stream that training draws from."""
    plain = run(given={}, when="evaluation")
    shifted = run(when="evaluation")
    for left, right in zip(plain.states("personal"), shifted.states("personal"), strict=True):
        assert all(torch.equal(left[name], right[name]) for name in left)


def test_test_without_a_fit_scores_the_initial_models():
    loop = FederatedLoop(Standalone())
    module = FederatedClassifier(network(), "full")
    trainer = make_trainer(loop, 1, accelerator="cpu", enable_progress_bar=False, logger=False)
    data = perada.FederatedDataModule(federation(), shifts=shifts(), shifts_when="test", eval_batch_size=7)
    (result,) = trainer.test(module, datamodule=data, verbose=False)
    assert result["personal/new"] == pytest.approx(accuracy(network(), *stripes(13, 90)))
