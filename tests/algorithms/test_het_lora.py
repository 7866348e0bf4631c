# SPDX-License-Identifier: Apache-2.0
"""HetLoRA against loops in which every client has a network of its own rank; padding, counts, export, rejections."""

import json

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn

import perada
from perada.algorithms import (
    ALGORITHMS,
    Ditto,
    FedAvg,
    FedBE,
    FedEnsemble,
    FedRep,
    FFALoRA,
    HetLoRA,
    PerAda,
    PFedMe,
    Scaffold,
    make_algorithm,
)
from perada.lightning import FederatedClassifier
from perada.privacy import ClientPrivacy, Privacy
from perada.server import Mean
from tests.options import sections

from .problems import CLASSES, CLIENTS, QUIET, SIZES, assert_equal, assert_same, task

R = 3
ALPHA = 6
RANKS = (3, 1, 2, 1)
LR = 0.1
LR_OWN = 0.2
PROX = 0.7
WIDTHS = {"one": (36, 6), "two": (6, 5)}
LAYERS = LoraConfig(r=R, lora_alpha=ALPHA, target_modules=[*WIDTHS], init_lora_weights=True)
HEAD = ("fc.modules_to_save.default.weight", "fc.modules_to_save.default.bias")
pytestmark = pytest.mark.filterwarnings("ignore:.*none of its clients has a LoRA rank above:UserWarning")
QUIETLY = pytest.mark.filterwarnings(
    "ignore:.*(delta=|secure_rng|test mode|repeat|times the round's median).*:UserWarning"
)


def a(layer):
    return f"{layer}.lora_A.default.weight"


def b(layer):
    return f"{layer}.lora_B.default.weight"


class Net(nn.Module):
    """Two layers and a head."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.one, self.two, self.fc = nn.Linear(36, 6), nn.Linear(6, 5), nn.Linear(5, CLASSES)
        self.double()

    def forward(self, x):
        return self.fc(self.two(self.one(x.flatten(1)).tanh()).tanh())


def run(algorithm, **options):
    common = {"adapter": LAYERS, "rounds": 3, "clients_per_round": 3, "batch_size": 4, "local_epochs": 2}
    common |= {"lr_personal": LR_OWN, "lr_local": LR, "distill_lr": 0.5, "distill_optimizer": "sgd", "distill_steps": 3}
    return perada.finetune(Net(), task(), **sections(algorithm=algorithm, **common | QUIET | options))


def start():
    return run("fedavg", rounds=0).state("global")


NET = Net()


def logits(state, x):
    x = x.flatten(1)
    for name in WIDTHS:
        layer = getattr(NET, name)
        x = (F.linear(x, layer.weight, layer.bias) + ALPHA / R * x @ state[a(name)].T @ state[b(name)].T).tanh()
    return F.linear(x, *(state[name] for name in HEAD))


def train_by_loop(state, batches, lr, prox=0.0, anchor=None):
    for x, y in batches:
        leaves = {key: value.detach().requires_grad_() for key, value in state.items()}
        gradients = torch.autograd.grad(F.cross_entropy(logits(leaves, x), y), list(leaves.values()))
        pulls = {key: prox * (value - anchor[key]) if prox else 0 for key, value in state.items()}
        state = {
            key: state[key] - lr * (gradient + pulls[key]) for key, gradient in zip(leaves, gradients, strict=True)
        }
    return state


def small(state, rank):
    """Of a rank that the tensors have, too."""
    cut = {a(name): state[a(name)][:rank] for name in WIDTHS} | {b(name): state[b(name)][:, :rank] for name in WIDTHS}
    return state | cut


def large(state):
    rank = len(state[a("one")])
    padded = {a(name): F.pad(state[a(name)], (0, 0, 0, R - rank)) for name in WIDTHS}
    return state | padded | {b(name): F.pad(state[b(name)], (0, R - rank)) for name in WIDTHS}


def mean(values, weights):
    return sum(w * value for w, value in zip(weights, values, strict=True)) / sum(weights)


def average_by_norms(sent, weights):
    """By norms of the products, layer by layer; the head by the weights."""
    w = {name: mean([update[name] for update in sent], weights) for name in HEAD}
    for layer in WIDTHS:
        norms = [float((update[b(layer)] @ update[a(layer)]).norm()) for update in sent]
        for name in (a(layer), b(layer)):
            w[name] = mean([large(update)[name] for update in sent], norms)
    return w


def decomposed(sent, weights):
    """FlexLoRA: the mean of the products, formed and decomposed; the largest number of a row of A is positive."""
    w = {name: mean([update[name] for update in sent], weights) for name in HEAD}
    for layer in WIDTHS:
        u, values, vt = torch.linalg.svd(mean([update[b(layer)] @ update[a(layer)] for update in sent], weights))
        signs = vt[:R].gather(1, vt[:R].abs().argmax(1, keepdim=True)).sign()
        w |= {a(layer): signs * vt[:R], b(layer): u[:, :R] * values[:R] * signs.T}
    return w


def loop(rounds, prox=None, weighted=False, merge=average_by_norms):
    """Global state, and what clients predict with, all as large as the adapter."""
    w = start()
    personal = [small(start(), rank) for rank in RANKS]
    for batches in rounds:
        sent = []
        for m, images in batches.items():
            received = small(w, RANKS[m])
            sent.append(train_by_loop(received, images, LR))
            if prox is not None:
                personal[m] = train_by_loop(personal[m], images, LR_OWN, prox, received)
        w = merge(sent, [SIZES[m] if weighted else 1 for m in batches])
    return w, [large(small(w, rank) if prox is None else state) for rank, state in zip(RANKS, personal, strict=True)]


def batches_of(clients):
    """Batches of so many clients in each round."""
    served = perada.FederatedDataModule(task(), batch_size=4)
    served.configure_rounds(seed=0, clients_per_round=clients, phases=[perada.data.Phase(epochs=2)])
    rounds = []
    for round in range(3):
        plan = served.plan(round)
        rounds.append({m: [] for m in plan.clients})
        for batch in served.cohort_loader(plan):
            for row, (m, count) in enumerate(zip(batch.clients, batch.counts, strict=True)):
                rounds[-1][m].append((batch.x[row, :count], batch.y[row, :count]))
    return rounds


@pytest.mark.every(8)
@pytest.mark.parametrize("engine", ["folded", "loop"])
@pytest.mark.parametrize("part", [3, None])
@pytest.mark.parametrize(("base", "prox"), [(FedAvg(), None), (Ditto(PROX), PROX)])
def test_clients_have_networks_of_their_own_rank(base, prox, part, engine):
    weighted = part is None
    options = {"engine": engine, "clients_per_round": part, "weighting": "samples" if weighted else "uniform"}
    result = run(HetLoRA(base, list(RANKS)), **options)
    w, personal = loop(batches_of(part), prox, weighted)
    assert_same(result.state("global"), w, "global")
    for m in CLIENTS:
        assert_same(result.state("personal", m), personal[m], f"client {m}")
        x = task().public[:][0]
        torch.testing.assert_close(result.personal(m)(x), logits(small(personal[m], RANKS[m]), x), rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("base", "prox"), [(FedAvg(), None), (Ditto(PROX), PROX)])
@pytest.mark.parametrize("part", [3, None])
def test_the_servers_rule_may_be_flexloras(base, prox, part):
    result = run(HetLoRA(base, list(RANKS)), server_rule="svd", clients_per_round=part)
    w, personal = loop(batches_of(part), prox, merge=decomposed)
    assert_same(result.state("global"), w, "global")
    for m in CLIENTS:
        assert_same(result.state("personal", m), personal[m], f"client {m}")


def test_ranks_that_no_client_of_a_round_has_are_lost_by_name_and_not_by_svd():
    """As the paper's zero-padding says; a column of B and a row of A that are zero have no gradient."""
    ranks = {str(m): 2 if m in batches_of(3)[0] else R for m in CLIENTS}
    with pytest.warns(UserWarning, match=r"round 1.*rank above 2"):
        result = run(HetLoRA(ranks=ranks), rounds=1)
    assert_equal(result.state("global"), large(small(result.state("global"), 2)))
    result = run(HetLoRA(ranks=ranks), rounds=1, server_rule="svd").state("global")
    assert all(result[a(layer)].norm(dim=1).allclose(torch.ones(R).double()) for layer in WIDTHS)


NO_BASES = {
    "het_lora",
    # HetLoRA rejects several global models, and the mean of complete branches.
    "fedbe",
    "fed_ensemble",
    "fedalt_row",
    # They need other layers or adapters than one LoRA under a trained head, or merge it into the weights.
    "fedbn",
    "fedalt",
    "fedsim",
    "feddpa",
    "feddpa_f",
    "fedex_lora",
    "flora",
}
BASES = [name for name in ALGORITHMS if name not in NO_BASES]
BASE_OPTIONS = {"apfl": {"lr_alpha": 0.3}}
ADAM = {"optimizer": "adamw", "weight_decay": 0.1}


@pytest.mark.parametrize("options", [{}, ADAM], ids=["sgd", "adamw"])
@pytest.mark.parametrize("base", BASES)
@pytest.mark.every(21)
def test_padding_is_as_if_it_were_not_there(base, options, monkeypatch):
    """Rank 2 in an adapter of rank 3, or 2 of the same scale."""
    first = start()
    made = FederatedClassifier.initial_state

    def initial(module, index):
        rank = len(made(module, index)[a("one")])
        return {key: value.contiguous().clone() for key, value in small(first, rank).items()}

    monkeypatch.setattr(FederatedClassifier, "initial_state", initial)
    least = LoraConfig(r=2, lora_alpha=ALPHA * 2 / R, target_modules=[*WIDTHS])

    def train_with(adapter):
        return run(HetLoRA(make_algorithm(base, **BASE_OPTIONS.get(base, {})), [2]), adapter=adapter, **options)

    actual = train_with(LAYERS)
    expected = train_with(least)
    assert_same(small(actual.state("global"), 2), expected.state("global"), "global")
    for m in CLIENTS:
        state = actual.state("personal", m)
        assert_same(small(state, 2), expected.state("personal", m), f"client {m}")
        assert_equal(state, large(small(state, 2)))


@pytest.mark.every(3)
@pytest.mark.parametrize("base", [FedAvg(), PerAda(), FedRep()])
def test_whole_ranks_change_nothing_under_a_rule_that_is_not_of_the_mean(base):
    actual, expected = (run(one, server_rule="median") for one in (HetLoRA(base, [R]), base))
    assert_equal(actual.state("global"), expected.state("global"))
    for m in CLIENTS:
        assert_equal(actual.state("personal", m), expected.state("personal", m))


@pytest.mark.every(5)
@QUIETLY
@pytest.mark.parametrize("base", [Ditto(), PFedMe(), FedAvg()])
@pytest.mark.parametrize("section", [Privacy, ClientPrivacy])
def test_noise_does_not_reach_the_padding(base, section, monkeypatch):
    sent = []
    rule = Mean.__call__
    monkeypatch.setattr(
        Mean, "__call__", lambda own, given: sent.append(given.updates.gathered_all()) or rule(own, given)
    )
    private = section(noise_multiplier=0.7, max_norm=0.5, delta=1e-3, secure_rng=False)
    name = "privacy" if section is Privacy else "client_privacy"
    result = run(HetLoRA(base, [1]), clients_per_round=None, **{name: private})
    states = result.states("personal")
    if section is Privacy:
        states += [{key: value[m] for key, value in own.items()} for own in sent[-3:] for m in CLIENTS]
    for state in states:
        assert_equal(state, large(small(state, 1)))
        assert state[b("two")][:, 0].all()


@pytest.mark.parametrize(
    ("base", "times"),
    [
        (Scaffold(), 1),
        pytest.param(Ditto(), 2, marks=pytest.mark.slow),
        pytest.param(FedAvg(), 1, marks=pytest.mark.slow),
    ],
)
def test_what_a_client_has_is_counted(base, times):
    head = CLASSES * 6
    factors = sum(map(sum, WIDTHS.values()))
    result = run(HetLoRA(base, list(RANKS)))
    for batches, row in zip(batches_of(3), result.metrics["rounds"], strict=True):
        num_values = head + factors * sum(RANKS[m] for m in batches) / 3
        twice = 1 + isinstance(base, Scaffold)
        assert row["params/trained"] == pytest.approx(times * num_values)
        assert row["params/sent"] == pytest.approx(twice * num_values)
        assert row["comm/up_mb"] == pytest.approx(3 * 8 * twice * num_values / 1e6)
        assert row["comm/down_mb"] == pytest.approx(3 * 8 * (twice * num_values + 1) / 1e6)  # the rank goes along


ADAPTERS = {
    "alike": LAYERS,
    "patterns": LoraConfig(
        r=2, lora_alpha=ALPHA, rank_pattern={"one": 3}, alpha_pattern={"two": 5}, target_modules=[*WIDTHS]
    ),
    "stabilised": LoraConfig(r=R, lora_alpha=ALPHA, use_rslora=True, target_modules=[*WIDTHS]),
}


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("base", [FedAvg(), Ditto(), FedRep()])
@pytest.mark.every(9)
def test_plain_peft_loads_adapters_of_each_clients_rank(base, adapter, tmp_path):
    result = run(HetLoRA(base, list(RANKS)), adapter=ADAPTERS[adapter], rounds=2)
    x = task().public[:][0]
    result.export(tmp_path)
    again = perada.Run.load(tmp_path, backbone=Net())
    for m in CLIENTS:
        config = json.loads((tmp_path / f"client_{m}" / "adapter_config.json").read_text())
        ranks = [config["rank_pattern"].get(f"^{name}", config["r"]) for name in WIDTHS]
        assert ranks == [min(RANKS[m], 3), min(RANKS[m], 2 if adapter == "patterns" else 3)]
        model = PeftModel.from_pretrained(Net(), str(tmp_path / f"client_{m}")).eval()
        assert [model.get_submodule(f"base_model.model.{name}").r["default"] for name in WIDTHS] == ranks
        torch.testing.assert_close(model(x), result.personal(m)(x), rtol=1e-9, atol=1e-9)
        assert_equal(again.state("personal", m), result.state("personal", m))
    assert_equal(again.state("global"), result.state("global"))
    saved = json.loads((tmp_path / "run.json").read_text())
    assert saved["info"]["lora_ranks"] == list(RANKS)


def test_an_adapter_of_another_rank_is_not_read(tmp_path):
    run(HetLoRA(Ditto(), list(RANKS)), rounds=1).export(tmp_path)
    path = tmp_path / "run.json"
    content = json.loads(path.read_text())
    content["info"]["lora_ranks"] = [1, *RANKS[1:]]
    path.write_text(json.dumps(perada.system.digests.sealed({k: v for k, v in content.items() if k != "sha256"})))
    with pytest.raises(ValueError, match="client_0' belongs to a different"):
        perada.Run.load(tmp_path, backbone=Net())


@pytest.mark.slow
@pytest.mark.parametrize("base", [FedAvg, Ditto])
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning")
def test_a_run_is_resumed(base, tmp_path):
    def saved(rounds, **options):
        checkpoint = {"callbacks": [ModelCheckpoint(tmp_path, "saved")], "enable_checkpointing": True}
        return run(HetLoRA(base(), list(RANKS)), rounds=rounds, momentum=0.5, **checkpoint | options)

    expected = run(HetLoRA(base(), list(RANKS)), momentum=0.5)
    saved(1)
    again = saved(3, ckpt_path=str(tmp_path / "saved.ckpt"))
    assert_equal(again.state("global"), expected.state("global"))
    for m in CLIENTS:
        assert_equal(again.state("personal", m), expected.state("personal", m))
    assert again.metrics == expected.metrics


def test_ranks_are_dealt():
    def ranks(most=8, **options):
        return [HetLoRA(**options).lora_rank(m, name, 5, most) for m, name in enumerate("abcd")]

    assert ranks() == [8, 4, 2, 8]
    assert ranks(most=2) == [2, 1, 1, 2]
    assert ranks(ranks=[5, 1]) == [5, 1, 5, 1]
    assert ranks(ranks={"d": 4, "a": 1, 1: 2, "2": 3}) == [1, 2, 3, 4]
    by_size = HetLoRA(ranks=[1, 2, 8], sizes=[6, 14])
    assert [by_size.lora_rank(0, "a", size, 8) for size in (1, 5, 6, 13, 14, 99)] == [1, 1, 2, 2, 8, 8]


def test_ranks_by_name_and_size_in_a_run():
    data = perada.FederatedData(task().train, num_classes=CLASSES, client_names=["a", "b", "c", "d"])
    options = {"adapter": LAYERS, "rounds": 1, "batch_size": 4} | QUIET
    by_name = HetLoRA(ranks={"a": 3, "b": 1, "c": 2, "d": 3})
    assert perada.finetune(Net(), data, **sections(algorithm=by_name, **options)).info["lora_ranks"] == [3, 1, 2, 3]
    by_size = HetLoRA(ranks=[1, 2, 3], sizes=[6, 10])
    assert perada.finetune(Net(), data, **sections(algorithm=by_size, **options)).info["lora_ranks"] == [2, 1, 3, 2]


def test_a_client_that_joins_has_the_whole_rank():
    single = perada.FederatedData(
        [torch.utils.data.TensorDataset(*(t.float() if t.is_floating_point() else t for t in task().train[0][:]))],
        num_classes=CLASSES,
    )
    data = perada.FederatedData([single.train[0]] * 2, num_classes=CLASSES)
    options = {"adapter": LAYERS, "rounds": 1, "batch_size": 4} | QUIET
    result = perada.finetune(Net().float(), data, **sections(algorithm=HetLoRA(Ditto(), [1, 2]), **options))
    joined = perada.personalize(result, single, "late", accelerator="cpu")
    assert joined.info["lora_ranks"] == [1, 2]
    assert joined.state("personal", 2)[b("one")][:, :2].any()


def test_tuples_will_do():
    by_size = HetLoRA(ranks=(1, 2), sizes=(6,))
    assert [by_size.lora_rank(client, str(client), size, 2) for client, size in enumerate((5, 6))] == [1, 2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HetLoRA("fedavg"), "base='fedavg' is not an algorithm"),
        (lambda: HetLoRA(FedBE()), "base=FedBE has several global models"),
        (lambda: HetLoRA(HetLoRA()), "base=HetLoRA assigns LoRA ranks to clients.*use only one HetLoRA"),
        (lambda: FFALoRA(HetLoRA()), r"base=HetLoRA.*LoRA.*HetLoRA.*base=FFALoRA"),
        (
            lambda: FedEnsemble(HetLoRA()),
            r"base=HetLoRA.*LoRA.*HetLoRA.*FedEnsemble",
        ),
        (lambda: HetLoRA(ranks=[]), r"ranks .*got \[\]"),
        (lambda: HetLoRA(ranks=4), r"ranks .*got 4"),
        (lambda: HetLoRA(ranks="4"), r"ranks .*got '4'"),
        (lambda: HetLoRA(ranks=[1, 2], sizes=5), r"sizes .*got 5"),
        (lambda: HetLoRA(ranks=[1], sizes=[]), r"sizes .*got \[\]"),
        (lambda: HetLoRA(ranks=[1, 2, 3], sizes=[5]), r"sizes .*got \[5\]"),
        (lambda: HetLoRA(ranks=[2, 0]), r"ranks .*got 0"),
        (lambda: HetLoRA(ranks=[2, 3], sizes=[4, 4]), r"sizes .*got \[4, 4\]"),
        (
            lambda: HetLoRA(ranks={"a": 1}, sizes=[4]),
            "sizes must be increasing numbers of images, one fewer than",
        ),
        (
            lambda: run(HetLoRA(ranks=[2, 4])),
            r"client '1' has rank 4, but the adapter only has r=3; set the adapter's r to the largest",
        ),
        (lambda: run(HetLoRA(ranks={"0": 2})), "has no rank for client '1'; add it, or use a list"),
        (
            lambda: run(
                HetLoRA(ranks=[2, 3], sizes=[4]), privacy=Privacy(noise_multiplier=1, delta=1e-3, secure_rng=False)
            ),
            "requires the number of images of client '0', which is not declared or is private; set ranks by name",
        ),
        (lambda: run(HetLoRA(), adapter="head"), r"HetLoRA.*LoRA.*adapter='lora'"),
    ],
)
@QUIETLY
def test_what_cannot_be_is_rejected(make, message):
    with pytest.raises(ValueError, match=message):
        make()
