# SPDX-License-Identifier: Apache-2.0
"""Several global models: their first states, their scores, which a client takes and keeps, what is saved."""

from collections import OrderedDict
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel
from torch import nn
from torch.utils.data import TensorDataset

import perada
from perada.algorithms import FedBE, FedEnsemble, PerAda
from perada.data import FederatedDataModule, Phase
from perada.server import ServerRule, TrimmedMean
from tests.methods import make_method
from tests.options import sections

SIZES = (9, 4, 14, 6)
CLASSES = 3
MODES = 3
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
COMMON = {"batch_size": 4, "lr_personal": 0.1, "lr_local": 0.1, "clients_per_round": 3, "distill_steps": 2}


@cache
def task():
    random = torch.Generator().manual_seed(3)

    def part(n, shift):
        labels = torch.arange(n) * (shift + 1) % CLASSES
        return TensorDataset(torch.randn(n, 1, 6, 6, generator=random, dtype=torch.float64), labels)

    train, test = ([part(n, m) for m, n in enumerate(sizes)] for sizes in (SIZES, (5, 5, 5, 5)))
    return perada.FederatedData(train, test, TensorDataset(part(6, 0).tensors[0]), num_classes=CLASSES)


def network():
    torch.manual_seed(0)
    layers = {
        "conv": nn.Conv2d(1, 4, 3),
        "norm": nn.BatchNorm2d(4),
        "act": nn.Tanh(),
        "pool": nn.AdaptiveAvgPool2d(1),
        "flat": nn.Flatten(),
        "fc": nn.Linear(4, CLASSES),
    }
    return nn.Sequential(OrderedDict(layers)).double()


def frozen(state):
    model = network().eval().requires_grad_(False)
    model.load_state_dict(state)
    return model


def finetune(algorithm, rounds=2, adapter="full", **options):
    return perada.finetune(
        network(), task(), **sections(adapter=adapter, algorithm=algorithm, rounds=rounds, **COMMON | options, **QUIET)
    )


def images():
    return torch.cat([part.tensors[0] for part in task().test]), torch.cat([part.tensors[1] for part in task().test])


def test_modes_start_from_random_heads_of_the_same_network():
    modes = finetune(FedEnsemble(modes=MODES), rounds=0).states("global")
    assert torch.equal(modes[0]["fc.weight"], network().fc.weight)
    for one, other in ((0, 1), (1, 2)):
        assert not torch.equal(modes[one]["fc.weight"], modes[other]["fc.weight"])
        assert torch.equal(modes[one]["conv.weight"], modes[other]["conv.weight"])
    again = finetune(FedEnsemble(modes=MODES), rounds=0).states("global")
    assert all(torch.equal(mode[key], other[key]) for mode, other in zip(modes, again, strict=True) for key in mode)
    seeded = finetune(FedEnsemble(modes=MODES), rounds=0, seed=1).states("global")
    assert not torch.equal(modes[1]["fc.weight"], seeded[1]["fc.weight"])


def test_modes_of_a_network_without_weights_differ_everywhere():
    modes = finetune(FedEnsemble(modes=2), rounds=0, pretrained=False).states("global")
    assert not torch.equal(modes[0]["conv.weight"], modes[1]["conv.weight"])


def test_modes_differ_in_their_adapters():
    adapter = LoraConfig(r=2, target_modules=["conv"], init_lora_weights=True)
    modes = finetune(FedEnsemble(modes=2), rounds=0, adapter=adapter).states("global")
    assert not torch.equal(modes[0]["conv.lora_A.default.weight"], modes[1]["conv.lora_A.default.weight"])
    assert all(not mode["conv.lora_B.default.weight"].any() for mode in modes)  # LoRA starts as the identity


@pytest.mark.every(2)
@pytest.mark.parametrize("adapter", ["full", "lora"])
def test_modes_have_heads_of_their_own_also_where_the_weights_bring_one_that_fits(adapter):
    data = perada.FederatedData([TensorDataset(-torch.ones(4, 3, 8, 8), torch.arange(4))] * 2, num_classes=10)
    options = {"pretrained": "perada:fashion_test_resnet", "adapter": adapter, "algorithm": FedEnsemble(modes=3)}
    modes = perada.finetune("test_resnet", data, **sections(rounds=0, **options, **QUIET)).states("global")
    (head,) = {name for name in modes[0] if name.endswith("weight") and name.startswith("fc.")}
    assert len({float(mode[head].sum()) for mode in modes}) == 3
    body = {name for name in modes[0] if "fc." not in name and "lora_" not in name}
    assert all(torch.equal(modes[0][name], mode[name]) for mode in modes for name in body)


@pytest.mark.parametrize("name", ["mtl", "apfl", "feddyn", "fedbe_no_kd", "fedrep", "fedbn", "standalone", "fedavg_ft"])
def test_what_belongs_to_one_model_cannot_be_repeated(name):
    base = make_method(name)
    with pytest.raises(ValueError, match=rf"base={type(base).__name__}.*modes"):
        FedEnsemble(base)


@pytest.mark.parametrize("base", ["perada", PerAda])
def test_a_base_is_an_algorithm(base):
    with pytest.raises(ValueError, match=r"base=.* is not an algorithm; pass an Algorithm object, such as PerAda\(\)"):
        FedEnsemble(base)


def test_a_robust_rule_that_does_nothing_says_so(monkeypatch):
    monkeypatch.setattr("perada.data.broken_images._find_broken", lambda *_: {})  # images that become NaN after set-up
    with pytest.raises(ValueError, match=r"trim=0\.4 .*1 clients"):
        finetune(FedEnsemble(modes=3), server_rule=TrimmedMean(0.4))  # of 3 clients a round
    images, labels = task().train[0].tensors
    lost = TensorDataset(images * float("nan"), labels)
    data = perada.FederatedData([*task().train[1:], lost], num_classes=CLASSES)
    options = COMMON | {"clients_per_round": None, "server_rule": TrimmedMean(0.3), "adapter": "full"}
    with pytest.warns(UserWarning) as caught:
        perada.finetune(network(), data, **sections(algorithm="fedavg", rounds=1, **options, **QUIET))
    message = "round 1: the server rule cannot be applied: trim=0.3 drops none of 3 clients"
    assert any(str(warning.message).startswith(message) for warning in caught)


@pytest.mark.every(2)
@pytest.mark.parametrize("average", ["logits", "probabilities"])
def test_scores_are_those_of_the_modes_and_of_their_average(average):
    run = finetune(FedEnsemble(modes=MODES, average=average))
    x, y = images()
    logits = []
    for state in run.states("global"):
        logits.append(frozen(state)(x))
    outputs = torch.stack(logits if average == "logits" else [logit.softmax(1) for logit in logits]).mean(0)
    p = outputs.softmax(1) if average == "logits" else outputs
    scores = [float((logit.argmax(1) == y).double().mean()) for logit in logits]
    last = run.metrics["rounds"][-1]
    assert last["global/global_test"] == pytest.approx(float((p.argmax(1) == y).double().mean()))
    assert (last["global/best_mode"], last["global/worst_mode"]) == pytest.approx((max(scores), min(scores)))
    assert last["global/entropy"] == pytest.approx(float(-(p * p.log()).sum(1).mean()))
    assert last["personal/global_test"] == pytest.approx(last["global/global_test"])
    torch.testing.assert_close(run.global_model()(x).softmax(1).detach(), p)
    torch.testing.assert_close(run.personal(2)(x).softmax(1).detach(), p)


def test_one_model_has_no_best_and_worst():
    assert not {"global/best_mode", "global/entropy"} & set(finetune("fedavg").metrics["rounds"][-1])


@pytest.mark.every(2)
@pytest.mark.parametrize("engine", ["folded", "loop"])
def test_a_client_takes_and_keeps_the_mode_with_the_least_loss_on_its_images(engine):
    algorithm = FedEnsemble(modes=MODES, assignment="loss", keeps="best")
    seed = 8  # clients differ in their best mode
    start = finetune(algorithm, rounds=0, seed=seed).states("global")
    run = finetune(algorithm, rounds=1, lr_local=0.01, engine=engine, seed=seed)
    served = FederatedDataModule(task(), batch_size=4)
    served.configure_rounds(seed=seed, clients_per_round=3, phases=[Phase()])
    plan = served.plan(0)
    best = {}
    for client in plan.clients:
        x, y = task().train[client][:]
        losses = []
        for state in start:
            losses.append(float(F.cross_entropy(frozen(state)(x), y)))
        best[client] = losses.index(min(losses))
    assert len(set(best.values())) > 1
    modes = run.states("global")
    for mode in range(MODES):
        moved = any(not torch.equal(modes[mode][key], start[mode][key]) for key in modes[mode])
        assert moved == (mode in best.values())
    for client in range(len(SIZES)):
        personal = run.state("personal", client)
        assert all(torch.equal(personal[key], modes[best.get(client, 0)][key]) for key in personal)
    sent = finetune(FedEnsemble(modes=MODES), rounds=1).metrics["rounds"][0]["comm/down_mb"]
    assert run.metrics["rounds"][0]["comm/down_mb"] == pytest.approx(MODES * sent, rel=0.05)


def test_a_run_with_several_global_models_is_saved_and_loaded(tmp_path):
    adapter = LoraConfig(r=2, target_modules=["conv"], modules_to_save=["norm"])
    run = finetune(FedEnsemble(PerAda(), modes=2), adapter=adapter)
    run.export(tmp_path)
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {
        "global_0",
        "global_1",
        *(f"client_{m}" for m in range(len(SIZES))),
    }
    back = perada.Run.load(tmp_path, backbone=network())
    x, _ = images()
    assert torch.equal(back.global_model()(x), run.global_model()(x))
    assert torch.equal(back.personal(1)(x), run.personal(1)(x))
    alone = PeftModel.from_pretrained(network(), str(tmp_path / "global_1")).eval()
    member = run.global_model().members[1]
    torch.testing.assert_close(alone(x), member(x))
    with pytest.raises(ValueError, match=r"2 states; .*states\('global'\)"):
        back.state("global")


def test_clients_that_share_an_ensemble_have_no_folders(tmp_path):
    run = finetune(FedBE(samples=1, distill=False))
    assert len(run.states("global")) == 1 + 3 + 1
    run.export(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [f"global_{k}" for k in range(5)]
    back = perada.Run.load(tmp_path, backbone=network())
    x, _ = images()
    assert torch.equal(back.personal(3)(x), run.personal(3)(x))
    with pytest.raises(ValueError, match="5 states"):
        back.state("personal", 0)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (FedEnsemble(modes=3), "its algorithm is 'FedEnsemble of 2 modes of FedAvg.*here .*3 modes"),
        (FedEnsemble(PerAda(), modes=2), "here .*of PerAda"),
        (FedEnsemble(modes=2, assignment="loss"), "assigned by permutation.*assigned by loss"),
    ],
)
def test_a_checkpoint_with_other_modes_is_rejected(tmp_path, monkeypatch, algorithm, message):
    monkeypatch.chdir(tmp_path)
    options = COMMON | {"enable_progress_bar": False, "accelerator": "cpu"}
    perada.finetune(network(), task(), **sections(adapter="full", algorithm=FedEnsemble(modes=2), rounds=1, **options))
    with pytest.raises(ValueError, match=message):
        perada.finetune(
            network(), task(), **sections(adapter="full", algorithm=algorithm, rounds=2, ckpt_path="last", **options)
        )


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            {"server_rule": "fedavgm"},
            {"server_rule": "fedadam"},
            "server rule is 'FedAvgM on Mean', here 'FedAdam",
        ),
        ({"algorithm": "fedbe_no_kd"}, {"algorithm": "fedbe"}, "'FedBE without distillation', here 'FedBE with"),
    ],
)
def test_a_checkpoint_of_another_server_is_rejected(tmp_path, monkeypatch, before, after, message):
    monkeypatch.chdir(tmp_path)
    options = COMMON | {"algorithm": "fedavg", "adapter": "full", "enable_progress_bar": False, "accelerator": "cpu"}
    perada.finetune(network(), task(), **sections(rounds=1, **options | before))
    with pytest.raises(ValueError, match=message):
        perada.finetune(network(), task(), **sections(rounds=2, ckpt_path="last", **options | after))


@pytest.mark.parametrize("name", ["fedrep", "lg_fedavg", "standalone"])
def test_methods_without_a_global_model_do_not_give_one(name, tmp_path):
    run = finetune(name, rounds=1)
    assert "global/global_test" not in run.metrics["rounds"][-1]
    run.export(tmp_path)
    for one in (run, perada.Run.load(tmp_path, backbone=network())):
        with pytest.raises(ValueError, match=r"no global model: .*personal\(client\)"):
            one.global_model()


class Explodes(ServerRule):
    def __call__(self, aggregation):
        scale = float("inf") if aggregation.round == 1 else 1.0
        return {
            key: value.mean(0) * scale if value.is_floating_point() else value[0]
            for key, value in aggregation.updates.gathered_all().items()
        }


def test_a_server_step_that_is_not_finite_is_not_taken():
    with pytest.warns(UserWarning, match=r"round 2: .*Explodes"):
        two = finetune("fedavg", rounds=2, server_rule=Explodes())
    one = finetune("fedavg", rounds=1, server_rule=Explodes())
    assert all(torch.equal(value, one.state("global")[key]) for key, value in two.state("global").items())
    assert all(value.isfinite().all() for value in two.state("global").values())
