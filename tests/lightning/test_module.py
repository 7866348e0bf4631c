# SPDX-License-Identifier: Apache-2.0
"""The LightningModule: options, building, learning rates over the rounds, scores."""

import math

import pytest
import pytorch_lightning as pl
import timm
import torch
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.utils.data import TensorDataset

from perada import FederatedClassifier, FederatedData, FederatedDataModule, finetune
from perada.algorithms import make_algorithm
from perada.api import make_trainer
from perada.core.rounds import EvalBatch
from perada.core.states import get_state
from perada.federation import Evaluation, Training
from perada.lightning import FederatedLoop
from perada.lightning import module as lightning_module
from perada.models.adapted import find_tensor_names
from perada.tasks import Classification
from tests.options import fields_among, sections
from tests.rejections import rejects


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("optimizer", "rmsprop"),
        ("lr_schedule", "step"),
        ("metric", "f1"),
        ("engine", "vmap"),
        ("lr_personal", -0.1),
        ("lr_local", math.nan),
        ("momentum", -0.5),
        ("momentum", 1.0),
        ("lr_gamma", math.inf),
        ("weight_decay", -1.0),
        ("clip_norm", 0.0),
        ("clip_norm", math.nan),
        ("lr_every", 0),
        ("global_test_clients", -1),
        ("clients_per_chunk", 0),
    ],
)
def test_wrong_options_are_rejected(option, value):
    with rejects(option, value):
        Training(**fields_among({option: value}, Training))
        Evaluation(**fields_among({option: value}, Evaluation))


def test_learning_rates_over_the_rounds():
    cosine = Training(lr_schedule="cosine")
    assert [cosine.rate_factor(round, 4) for round in range(4)] == pytest.approx(
        [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]
    )
    steps = Training(lr_schedule="exponential", lr_gamma=0.5, lr_every=2)
    assert [steps.rate_factor(round, 9) for round in range(5)] == [1, 1, 0.5, 0.5, 0.25]
    assert Training().rate_factor(7, 9) == 1


def test_schedule_reaches_the_clients(tiny):
    def personal(rounds):
        training = Training(lr_schedule="exponential", lr_gamma=0.0, lr_every=1)
        loop = FederatedLoop(make_algorithm("standalone"), training=training)
        module = FederatedClassifier(tiny.net(), "full")
        trainer = make_trainer(loop, rounds, accelerator="cpu", enable_progress_bar=False, logger=False)
        trainer.fit(module, FederatedDataModule(tiny.data()))
        return loop.outcome(module).state("personal", 3)

    start, one, two = (personal(rounds) for rounds in range(3))
    assert not torch.equal(start["7.weight"], one["7.weight"])
    assert all(torch.equal(one[key], two[key]) for key in one)  # from round 1 on, the rate is 0


def test_head_and_adapter_are_drawn_from_the_seed_alone():
    def built(seed, noise):
        torch.manual_seed(noise)
        before = torch.get_rng_state()
        module = FederatedClassifier("test_resnet", pretrained=False)
        module.build(3, Classification(), seed)
        assert torch.equal(torch.get_rng_state(), before)
        return get_state(module.model)

    first = built(0, 1)
    same = built(0, 2)
    other = built(1, 1)
    assert all(torch.equal(first[key], same[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


def test_another_number_of_classes_than_the_data_is_rejected():
    module = FederatedClassifier("test_resnet", pretrained=False, num_classes=7)
    with pytest.raises(ValueError, match=r"num_classes=7 .*10 classes"):
        module.build(10, Classification(), 0)


def test_a_module_built_for_other_data_is_rejected():
    module = FederatedClassifier("test_resnet", pretrained=False)
    module.build(10, Classification(), 0)
    module.build(10, Classification(), 0)
    with pytest.raises(ValueError, match=r"10 classes, task=Classification\(\) and seed=0, .*3 classes"):
        module.build(3, Classification(), 0)


def test_slot_sorts_names():
    model = timm.create_model("test_resnet", num_classes=3).requires_grad_(False)
    model.bn1.requires_grad_(True)
    model.fc.requires_grad_(True)
    tensor_names = find_tensor_names(model, "fc")
    norm = {f"bn1.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}
    assert set(tensor_names.keys) == norm | {"fc.weight", "fc.bias"}
    assert set(tensor_names.parameters) == {"bn1.weight", "bn1.bias", "fc.weight", "fc.bias"}
    assert tensor_names.head == {"fc.weight", "fc.bias"}
    assert tensor_names.norms == norm


@pytest.mark.parametrize("what", ["fit", "validate"])
def test_without_the_loop_the_missing_callback_is_named(tiny, what):
    module = FederatedClassifier(tiny.net(), "head")
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = pl.Trainer(max_epochs=1, num_sanity_val_steps=0, enable_model_summary=False, **options)
    with pytest.raises(RuntimeError, match=r"perada\.lightning\.FederatedLoop"):
        getattr(trainer, what)(module, datamodule=FederatedDataModule(tiny.data()))


def multilabel(tiny):
    data = tiny.data()
    for part in (*data.train, *data.test):
        x, y = part.tensors
        part.tensors = (x, torch.stack([y == 0, y > 0, y == 2], 1).float())
    return data


@pytest.mark.every(3)
@pytest.mark.parametrize(("metric", "several"), [("accuracy", False), ("auroc", False), ("auto", True)])
def test_scores_are_those_of_every_model_alone(tiny, metric, several):
    data = multilabel(tiny) if several else tiny.data()
    training = Training(lr_personal=0.3, local_steps=3)
    loop = FederatedLoop(make_algorithm("ditto"), training=training, evaluation=Evaluation(metric=metric))
    module = FederatedClassifier(tiny.net(), "full")
    trainer = make_trainer(loop, 1, accelerator="cpu", enable_progress_bar=False, logger=False)
    trainer.fit(module, datamodule=FederatedDataModule(data, eval_batch_size=7))
    run = loop.outcome(module)

    def score(model, parts):
        x, y = (torch.cat([part.tensors[i] for part in parts]) for i in (0, 1))
        with torch.no_grad():
            logits = model(x)
        if metric == "accuracy":
            return float((logits.argmax(1) == y).float().mean())
        truth = y if several else nn.functional.one_hot(y, 3)
        probabilities = logits.sigmoid() if several else logits.softmax(1)
        return roc_auc_score(truth, probabilities, average="macro")

    local = [score(run.personal(client), data.test[client : client + 1]) for client in range(5)]
    everywhere = [score(run.personal(client), data.test) for client in range(5)]
    assert run.metrics["clients"]["personal/local_test"] == pytest.approx(local)
    assert run.metrics["clients"]["personal/global_test"] == pytest.approx(everywhere)
    last = run.metrics["rounds"][-1]
    assert last["personal/global_test"] == pytest.approx(sum(everywhere) / 5)
    assert last["personal/global_test_std"] == pytest.approx(
        torch.tensor(everywhere).std(correction=0).item(), abs=1e-6
    )
    assert last["global/global_test"] == pytest.approx(score(run.global_model(), data.test))


def test_where_clients_share_the_global_model_each_has_its_scores(tiny):
    run = finetune(
        tiny.net(), tiny.data(), **sections(**(tiny.options | {"algorithm": "fedavg", "rounds": 1, "logger": False}))
    )
    assert len(run.metrics["clients"]["personal/global_test"]) == 5
    assert len(run.metrics["clients"]["personal/local_test"]) == 5
    assert len(set(run.metrics["clients"]["personal/global_test"])) == 1


@pytest.mark.parametrize(("trained", "half"), [(torch.float32, False), (torch.float32, True), (torch.float64, False)])
def test_processes_add_predictions_of_one_dtype(tiny, monkeypatch, trained, half):
    """A process without rows adds zeros to the others' logits, which are half as long under autocast."""
    added = []
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3)).to(trained)
    module = FederatedClassifier(net, "full")
    parts = [TensorDataset(x.to(trained), y) for x, y in (part.tensors for part in tiny.data().train)]
    data = FederatedDataModule(FederatedData(parts), batch_size=4)
    training = Training(lr_personal=0.1, lr_local=0.1, local_steps=1)
    loop = FederatedLoop(make_algorithm("ditto"), clients_per_round=2, training=training)
    trainer = make_trainer(loop, 1, logger=False, accelerator="cpu", enable_progress_bar=False)
    trainer.fit(module, data)
    monkeypatch.setattr(module.federation.ranks, "sum_", added.extend)
    images = torch.randn(2, 1, 8, 8).to(trained)
    batch = EvalBatch(images, torch.zeros(2, dtype=torch.long), torch.tensor([1, 3]))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=half):
        logits = module.predict_step(batch, 0)["personal"]
        monkeypatch.setattr(lightning_module, "own_logits", lambda *_: None)  # as where a process holds no owner
        zeros = module.predict_step(batch, 0)["personal"]
    wide = torch.float64 if trained == torch.float64 else torch.float32
    assert [(rows.dtype, rows.shape) for rows in added] == [(wide, (2, 3))] * 2
    assert logits.any() and not zeros.any()
