# SPDX-License-Identifier: Apache-2.0
"""What PerAda's theorems are about, against loops over models and images in plain torch."""

import re

import pytest
import torch
import torch.nn.functional as F
from pytorch_lightning.callbacks import EarlyStopping
from torch import nn
from torch.func import functional_call
from torch.utils.data import TensorDataset

import perada
from perada.algorithms import make_algorithm
from perada.cli import main
from perada.results.report import title
from perada.studies.report.records import run_report
from tests.options import sections

SIZES = (9, 5, 14, 7)
CLASSES = 3
PROX = 0.7
NAMES = {
    "theory/averaged_distance",
    "theory/distilled_distance",
    "theory/personal_distance",
    "theory/personal_distance_std",
    "theory/ensemble_accuracy",
    "theory/ensemble_error",
    "theory/global_gradient",
    "theory/personal_gradient",
    "theory/personal_gradient_std",
}


def network():
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, CLASSES)]
    return nn.Sequential(*layers).double()


def task(public=True, test=True, multilabel=False):
    random = torch.Generator().manual_seed(1)

    def part(n):
        y = torch.arange(n) % CLASSES
        x = torch.randn(n, 1, 6, 6, generator=random, dtype=torch.float64) + y.view(-1, 1, 1, 1)
        return TensorDataset(x, torch.randint(0, 2, (n, CLASSES), generator=random).float() if multilabel else y)

    shared = TensorDataset(part(260).tensors[0]) if public else None  # more than run at once
    return perada.FederatedData([part(n) for n in SIZES], [part(6) for _ in SIZES] if test else [], shared)


def finetune(algorithm="perada", data=None, rounds=3, **options):
    if algorithm == "perada" and "prox_strength" not in options:
        options["prox_strength"] = PROX
    common = {
        "adapter": "full",
        "batch_size": 4,
        "clients_per_round": 3,
        "lr_personal": 0.2,
        "lr_local": 0.2,
        "distill_lr": 0.01,
        "distill_steps": 3,
        "distill_batch_size": 5,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "accelerator": "cpu",
    }
    return perada.finetune(
        network(), data or task(), **sections(algorithm=algorithm, rounds=rounds, **common | options)
    )


class Plain:
    """The definitions, model after model and image after image."""

    def __init__(self, multilabel=False):
        self.model, self.multilabel = network().eval(), multilabel

    def logits(self, state, x):
        return functional_call(self.model, state, (x.unsqueeze(0),))[0]

    def predict(self, state, x):
        logits = self.logits(state, x)
        return logits.sigmoid() if self.multilabel else logits.softmax(0)

    def distillation_distance(self, g, locals_, images):
        distances = [(self.predict(g, x) - sum(self.predict(h, x) for h in locals_) / len(locals_)) for x in images]
        return sum(float(distance.abs().sum()) for distance in distances) / len(images)

    def personal_distance(self, p, g, images):
        return sum(min(1.0, float((self.predict(p, x) - self.predict(g, x)).abs().sum())) for x in images) / len(images)

    def ensemble(self, locals_, tests):
        right = []
        error = []
        for x, y in (pair for test in tests for pair in zip(*test.tensors, strict=True)):
            logits = sum(self.logits(h, x) for h in locals_) / len(locals_)
            h = sum(self.predict(h, x) for h in locals_) / len(locals_)
            if self.multilabel:
                right += [float((value > 0) == bool(label)) for value, label in zip(logits, y, strict=True)]
                error += [float(1 - p if label else p) for p, label in zip(h, y, strict=True)]
            else:
                right.append(float(logits.argmax() == y))
                error.append(1 - float(h[y]))
        return sum(right) / len(right), sum(error) / len(error)

    def gradient(self, state, data, anchor=None):
        leaves = {key: value.detach().clone() for key, value in state.items()}
        names = [name for name, _ in self.model.named_parameters()]
        for name in names:
            leaves[name].requires_grad_()
        x, y = data.tensors
        loss = F.binary_cross_entropy_with_logits if self.multilabel else F.cross_entropy
        value = loss(functional_call(self.model, leaves, (x,)), y.double() if self.multilabel else y)
        if anchor is not None:
            value = value + PROX / 2 * sum(((leaves[name] - anchor[name]) ** 2).sum() for name in names)
        return torch.cat([part.flatten() for part in torch.autograd.grad(value, [leaves[name] for name in names])])


class Watched(perada.algorithms.PerAda):
    """PerAda that remembers what the server sees."""

    def server_step(self, server):
        self.sent, self.clients = server.updates.gathered_all(), server.clients
        self.aggregated = server.mean(server.updates, server.weights)
        return server.distill(self.aggregated, server.updates)


def rows(stack):
    return [{key: value[row] for key, value in stack.items()} for row in range(len(next(iter(stack.values()))))]


@pytest.mark.parametrize(
    ("engine", "multilabel", "weighting", "clients_per_chunk"),
    [
        pytest.param("folded", False, "uniform", None, marks=pytest.mark.slow),
        pytest.param("loop", False, "samples", None, marks=pytest.mark.slow),
        ("folded", True, "samples", 2),
    ],
)
def test_the_diagnostics_are_those_of_the_definitions(engine, multilabel, weighting, clients_per_chunk):
    data = task(multilabel=multilabel)
    plain = Plain(multilabel)
    algorithm = Watched(PROX)
    options = {"weighting": weighting, "engine": engine, "clients_per_chunk": clients_per_chunk, "data": data}
    before = finetune(make_algorithm("perada", prox_strength=PROX), rounds=1, prox_strength=None, **options)
    run = finetune(algorithm, rounds=2, diagnostics=True, prox_strength=None, **options)
    result = run.metrics["rounds"][-1]
    images = data.public.tensors[0]
    w = run.state("global")
    locals_ = rows(algorithm.sent)
    assert result["theory/averaged_distance"] == pytest.approx(
        plain.distillation_distance(algorithm.aggregated, locals_, images), rel=1e-9
    )
    assert result["theory/distilled_distance"] == pytest.approx(
        plain.distillation_distance(w, locals_, images), rel=1e-9
    )
    near = torch.tensor(
        [plain.personal_distance(run.state("personal", m), w, images) for m in algorithm.clients], dtype=torch.float64
    )
    assert result["theory/personal_distance"] == pytest.approx(float(near.mean()), rel=1e-9)
    assert result["theory/personal_distance_std"] == pytest.approx(float(near.std(correction=0)), rel=1e-9)
    accuracy, error = plain.ensemble(locals_, data.test)
    assert result["theory/ensemble_accuracy"] == pytest.approx(accuracy, rel=1e-9)
    assert result["theory/ensemble_error"] == pytest.approx(error, rel=1e-9)
    start = before.state("global")
    sizes = torch.tensor([SIZES[m] for m in algorithm.clients], dtype=torch.float64)
    weights = sizes / sizes.sum() if weighting == "samples" else torch.full((3,), 1 / 3, dtype=torch.float64)
    gradients = torch.stack([plain.gradient(start, data.train[m]) for m in algorithm.clients])
    assert result["theory/global_gradient"] == pytest.approx(float((weights @ gradients).square().sum()), rel=1e-9)
    own = torch.stack(
        [plain.gradient(before.state("personal", m), data.train[m], start).square().sum() for m in algorithm.clients]
    )
    assert result["theory/personal_gradient"] == pytest.approx(float(own.mean()), rel=1e-9)
    assert result["theory/personal_gradient_std"] == pytest.approx(float(own.std(correction=0)), rel=1e-9)
    values = [result[name] for name in NAMES]
    assert len({round(value, 6) for value in values}) == len(NAMES)  # no two could be swapped
    assert 0 < result["theory/personal_distance"] < 1


def test_without_the_option_nothing_is_measured_and_with_it_all_else_is_the_same(monkeypatch):
    seen = []
    images = perada.FederatedDataModule.public_images

    def counted(self, indices, device="cpu"):
        seen.append(len(indices))
        return images(self, indices, device)

    monkeypatch.setattr(perada.FederatedDataModule, "public_images", counted)
    monkeypatch.setattr(perada.FederatedDataModule, "test_batches", lambda *_: pytest.fail("the test images were read"))
    off = finetune(diagnostics=False)
    read, seen[:] = sum(seen), []
    on = finetune(diagnostics=["distillation_distance", "personal_distance"])
    assert sum(seen) == read + 3 * 260  # one pass a round
    for record, expected in zip(on.metrics["rounds"], off.metrics["rounds"], strict=True):
        measured = {name for name in record if name.startswith("theory/")}
        assert measured == {name for name in NAMES if "distance" in name}
        assert {name: value for name, value in record.items() if name not in measured} == expected
    assert all(torch.equal(value, off.state("global")[key]) for key, value in on.state("global").items())


@pytest.mark.slow
def test_gradients_and_errors_change_nothing_either():
    off = finetune()
    on = finetune(diagnostics=["gradient_norms", "ensemble_error"])
    for role in [("global",), *(("personal", m) for m in range(4))]:
        assert all(torch.equal(value, off.state(*role)[key]) for key, value in on.state(*role).items())
    assert {name for name in on.metrics["rounds"][0] if name.startswith("theory/")} == {
        name for name in NAMES if "distance" not in name
    }


def test_equal_models_are_at_no_distance_and_a_round_at_the_optimum_has_no_gradient():
    """Rates of zero leave all models as they were; λ then multiplies nothing, and both objectives' gradients agree."""
    still = {"lr_personal": 0.0, "lr_local": 0.0, "distill_steps": 0, "clients_per_round": 1, "adapter": "head"}
    (result,) = finetune(rounds=1, diagnostics=True, **still).metrics["rounds"]
    assert result["theory/averaged_distance"] == result["theory/personal_distance"] == 0.0
    assert "theory/distilled_distance" not in result or result["theory/distilled_distance"] == 0.0
    assert result["theory/global_gradient"] == pytest.approx(result["theory/personal_gradient"], rel=1e-12)
    assert result["theory/personal_gradient_std"] == 0.0


@pytest.mark.every(2)
@pytest.mark.filterwarnings("ignore:.*times the round's median")  # pFedMe's rate is too large here
@pytest.mark.parametrize(
    ("algorithm", "measured"),
    [
        ("fedavg", {"averaged_distance", "ensemble_accuracy", "ensemble_error", "global_gradient"}),
        (
            "pfedme",
            {"averaged_distance", "personal_distance", "personal_distance_std"}
            | {"ensemble_accuracy", "ensemble_error", "global_gradient"},
        ),
        ("fedrep", set()),
        ("fed_ensemble", set()),
    ],
)
def test_all_that_an_algorithm_allows_is_measured(algorithm, measured):
    options = {"algorithm_options": {"modes": 2}} if algorithm == "fed_ensemble" else {}
    (result,) = finetune(algorithm, rounds=1, diagnostics=True, **options).metrics["rounds"]
    names = {name.removeprefix("theory/") for name in result if name.startswith("theory/")}
    assert names == measured


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"diagnostics": "all"}, "diagnostics must be true, false or a list of distillation_distance, personal_"),
        ({"diagnostics": ["norms"]}, "diagnostics must be one of 'distillation_distance', 'personal_distance', "),
        (
            {"diagnostics": ["personal_distance"], "data": task(public=False), "distill_steps": 0},
            "diagnostics: personal_distance cannot be measured: the data has no public set; provide one",
        ),
        (
            {"diagnostics": ["ensemble_error"], "data": task(test=False)},
            "ensemble_error cannot be measured: the data has no test images",
        ),
        ({"algorithm": "fedavg", "diagnostics": ["personal_distance"]}, "clients of FedAvg have no personal models"),
        ({"algorithm": "standalone", "diagnostics": ["ensemble_error"]}, "Standalone does not average what clients"),
        (
            {
                "diagnostics": ["gradient_norms"],
                "adapter": "head",
                "privacy": {"noise_multiplier": 1.0, "secure_rng": False},
            },
            "gradient_norms cannot be measured: they would reveal gradients of private images without noise",
        ),
        (
            {
                "algorithm": "fedavg",
                "diagnostics": ["ensemble_error"],
                "client_privacy": {"noise_multiplier": 1.0, "secure_rng": False},
            },
            "with client_privacy nobody may see a client's models",
        ),
    ],
)
def test_what_cannot_be_measured_is_rejected_at_setup(options, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        finetune(**options)
    assert "\n" not in str(caught.value)


def private(**options):
    noisy = {"noise_multiplier": 1.0, "secure_rng": False, "delta": 0.01}
    return finetune(adapter="head", rounds=1, privacy=noisy, diagnostics=True, **options)


@pytest.mark.filterwarnings("ignore:privacy. ", "ignore:.*secure_rng.*")
def test_private_runs_measure_neither_gradients_nor_personal_models(caplog):
    with caplog.at_level("INFO", logger="pytorch_lightning"):
        (result,) = private().metrics["rounds"]
    assert {name for name in result if name.startswith("theory/")} == {
        name for name in NAMES if "gradient" not in name and "personal_distance" not in name
    }
    messages = sorted(record.getMessage() for record in caplog.records if "diagnostics" in record.getMessage())
    assert messages[0].startswith("diagnostics: skipping gradient_norms: they would reveal gradients of private images")
    assert messages[1].startswith("diagnostics: skipping personal_distance: it would reveal personal models")


def test_private_runs_do_not_measure_on_images_that_clients_train_on():
    data = task()
    data.public = TensorDataset(data.train[0].tensors[0])
    with pytest.raises(ValueError, match="public"):
        private(data=data, algorithm="ditto")


def test_private_runs_do_not_choose_by_the_error_of_the_ensemble():
    stop = EarlyStopping("theory/ensemble_error", check_on_train_epoch_end=True)
    with pytest.raises(ValueError, match=r"EarlyStopping.*'theory/ensemble_error'"):
        private(callbacks=[stop])


@pytest.mark.slow
def test_resumed_runs_measure_the_same_bits_and_the_report_shows_them(tmp_path):
    def train(rounds, folder, **options):
        where = {"logger": True, "enable_checkpointing": True, "default_root_dir": str(tmp_path / folder)}
        return finetune(rounds=rounds, diagnostics=True, **where | options)

    uninterrupted = train(4, "whole")
    train(2, "half")
    (saved,) = (tmp_path / "half").rglob("last.ckpt")
    resumed = train(4, "half", ckpt_path=str(saved))
    assert resumed.metrics == uninterrupted.metrics
    assert all(record.keys() >= NAMES for record in uninterrupted.metrics["rounds"])
    assert perada.Run.load(uninterrupted.save(tmp_path / "run"), backbone=network()).metrics == uninterrupted.metrics
    table = [line.split("|")[1:-1] for line in run_report(tmp_path / "whole/lightning_logs/version_0").splitlines()]
    header, _, *lines = [[cell.strip() for cell in row] for row in table]
    assert {title(name) for name in NAMES} <= set(header)
    for record, line in zip(uninterrupted.metrics["rounds"], lines, strict=True):
        shown = dict(zip(header, line, strict=True))
        gradient = float(shown[title("theory/global_gradient")])
        assert gradient == pytest.approx(record["theory/global_gradient"], rel=1e-3)
        accuracy = 100 * record["theory/ensemble_accuracy"]
        assert float(shown[title("theory/ensemble_accuracy")]) == pytest.approx(accuracy, abs=0.006)


def test_the_command_line_takes_names(capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--config", "digits", "--evaluation.diagnostics=[gradient_norms]", "--print_config"])
    assert "diagnostics:\n  - gradient_norms" in capsys.readouterr().out
