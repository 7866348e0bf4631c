# SPDX-License-Identifier: Apache-2.0
"""FFA-LoRA, FedSA-LoRA and RoLoRA: exact means, what is sent, noise; their plain loops are in ``references.py``."""

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import TensorDataset

import perada
from perada.algorithms import (
    APFL,
    MTL,
    Ditto,
    FedAlt,
    FedAvg,
    FedAvgFT,
    FedBE,
    FedDF,
    FedDyn,
    FedEnsemble,
    FedPer,
    FedRep,
    FedSALoRA,
    FFALoRA,
    LGFedAvg,
    PerAda,
    PFedMe,
    RoLoRA,
    Scaffold,
    Standalone,
)
from perada.privacy import ClientPrivacy, Privacy
from perada.server import Mean
from tests.options import sections

from .problems import CLASSES, CLIENTS, QUIET, assert_equal, assert_same, finetune, reference, task

WIDTH = 36
RANK = 2
ALPHA = 3
LAYER = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["layer"], init_lora_weights=True)
A = "layer.lora_A.default.weight"
B = "layer.lora_B.default.weight"


class Square(nn.Module):
    """A layer as wide as its input, and a head."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.layer, self.fc = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.double()

    def forward(self, x):
        return self.fc(self.layer(x.flatten(1)).tanh())


class Fixed(nn.Module):
    """x → x Wᵀ + b, of which nothing is a parameter."""

    def __init__(self, weight, bias):
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class Features(nn.Module):
    """``Square`` with LoRA whose A is a part of the backbone: B is a linear layer on the features s·A·x."""

    def __init__(self, square, a):
        super().__init__()
        self.base = Fixed(square.layer.weight.detach().clone(), square.layer.bias.detach().clone())
        self.down = Fixed(ALPHA / RANK * a, torch.zeros(RANK).double())
        self.layer = nn.Linear(RANK, WIDTH, bias=False).double()
        nn.init.zeros_(self.layer.weight)
        self.fc = square.fc

    def forward(self, x):
        x = x.flatten(1)
        return self.fc((self.base(x) + self.layer(self.down(x))).tanh())


def run(algorithm, net=None, **options):
    common = {"adapter": LAYER, "rounds": 3, "clients_per_round": 3, "batch_size": 4, "local_epochs": 1}
    common |= {"lr_personal": 0.2, "lr_local": 0.1, "distill_lr": 0.5, "distill_optimizer": "sgd", "distill_steps": 3}
    return perada.finetune(net or Square(), task(), **sections(algorithm=algorithm, **common | QUIET | options))


def start():
    return run("fedavg", rounds=0).state("global")


def plain(state):
    """Names of ``Features``."""
    assert_equal({A: state[A]}, {A: start()[A]}, "A")
    names = {B: "layer.weight", "fc.modules_to_save.default.weight": "fc.weight"}
    names |= {"fc.modules_to_save.default.bias": "fc.bias"}
    return {names.get(key, key): value for key, value in state.items() if key != A}


BASES = {
    "fedavg": FedAvg,
    "feddyn": FedDyn,
    "scaffold": Scaffold,
    "feddf": FedDF,
    "fedbe": lambda: FedBE(samples=0),
    "fedbe_no_kd": lambda: FedBE(samples=0, distill=False),
    "fedavg_ft": FedAvgFT,
    "standalone": Standalone,
    "mtl": MTL,
    "ditto": Ditto,
    "pfedme": PFedMe,
    "apfl": lambda: APFL(lr_alpha=0.3),
    "lg_fedavg": LGFedAvg,
    "fedper": FedPer,
    "fedrep": FedRep,
    "fedalt_input": lambda: FedAlt("input"),
    "perada": PerAda,
}
PRIVATE = {"privacy": Privacy(noise_multiplier=0.7, max_norm=0.5, delta=1e-3, secure_rng=False)}
CLIENT = {"client_privacy": ClientPrivacy(noise_multiplier=0.3, max_norm=0.5, delta=1e-3, secure_rng=False)}
QUIETLY = pytest.mark.filterwarnings("ignore:.*(delta=|secure_rng|test mode|repeat).*:UserWarning")


def same(base, options):
    result = run(FFALoRA(base()), **options)
    expected = run(base(), Features(Square(), start()[A]), **options | {"adapter": "full"})
    for state, other in zip(result.states("global"), expected.states("global"), strict=True):
        assert_same(plain(state), other, "global")
    for m in CLIENTS if len(result.states("global")) == 1 else ():
        assert_same(plain(result.state("personal", m)), expected.state("personal", m), f"personal {m}")
        images = task().public[:][0]
        torch.testing.assert_close(result.personal(m)(images), expected.personal(m)(images), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("engine", ["folded", pytest.param("loop", marks=pytest.mark.slow)])
@pytest.mark.parametrize("base", BASES)
@pytest.mark.every(34)
def test_ffa_is_the_base_on_features_of_a(base, engine):
    """Also of personal models, which have their A."""
    same(BASES[base], {"engine": engine})


@QUIETLY
@pytest.mark.parametrize("base", ["fedavg", "ditto", "apfl", "fedrep", "mtl"])
@pytest.mark.parametrize("privacy", [PRIVATE, CLIENT], ids=["images", "clients"])
@pytest.mark.every(10)
def test_noise_is_that_of_the_base_on_features_of_a(base, privacy):
    """The same gradients are clipped, and the same noise is drawn: A has no part in either."""
    same(BASES[base], privacy)


def residual(aggregation):
    """‖mean(BA) − mean(B)·mean(A)‖ / ‖mean(BA)‖, with what clients did not send as all of them had it."""
    updates = aggregation.updates.completed(aggregation.previous)
    means = updates.mean(aggregation.weights)
    norm = sum(
        weight * b @ a
        for weight, b, a in zip(aggregation.weights, updates.gathered(B), updates.gathered(A), strict=True)
    )
    return float((norm - means[B] @ means[A]).norm() / norm.norm())


@pytest.mark.parametrize("algorithm", ["fedavg", "ffa_lora", "rolora"])
def test_means_of_products_are_products_of_means(algorithm, monkeypatch):
    results = []

    def averaged(_, aggregation):
        results.append(residual(aggregation))
        return aggregation.updates.mean(aggregation.weights)

    monkeypatch.setattr(Mean, "__call__", averaged)
    # Keeps single updates, which the rule that is put in its place looks at.
    monkeypatch.setattr(FedAvg, "mean_is_enough", False)
    run(algorithm, rounds=4)
    assert len(results) == 4
    assert min(results) > 1e-3 if algorithm == "fedavg" else max(results) < 1e-14


@pytest.mark.slow
@pytest.mark.parametrize("base", [PerAda(), FedAvg()])
def test_each_of_several_global_models_has_its_a(base):
    modes = {"modes": 2, "strata": 2}
    first = run(FedEnsemble(base, **modes), rounds=0).states("global")
    result = [
        run(one).states("global") for one in (FFALoRA(FedEnsemble(base, **modes)), FedEnsemble(FFALoRA(base), **modes))
    ]
    for before, one, other in zip(first, *result, strict=True):
        assert_equal(one, other)
        assert torch.equal(one[A], before[A])
        assert not torch.equal(one[B], before[B])
    assert not torch.equal(first[0][A], first[1][A])


def sizes(found, round):
    row = found.metrics["rounds"][round]
    return [row[name] for name in ("params/trained", "params/sent", "comm/up_mb")]


WHOLE_FACTORS = 2 * RANK * WIDTH
HEAD_NUMBERS = CLASSES * (WIDTH + 1)


@pytest.mark.parametrize(
    ("algorithm", "trained", "sent"),
    [
        (FFALoRA(Ditto()), WHOLE_FACTORS + 2 * HEAD_NUMBERS, WHOLE_FACTORS // 2 + HEAD_NUMBERS),
        ("rolora", WHOLE_FACTORS // 2 + HEAD_NUMBERS, WHOLE_FACTORS // 2 + HEAD_NUMBERS),
        ("fedsa_lora", WHOLE_FACTORS + HEAD_NUMBERS, WHOLE_FACTORS // 2),
        pytest.param("fedavg", *[WHOLE_FACTORS + HEAD_NUMBERS] * 2, marks=pytest.mark.slow),
        pytest.param("ffa_lora", *[WHOLE_FACTORS // 2 + HEAD_NUMBERS] * 2, marks=pytest.mark.slow),
    ],
)
def test_half_of_loras_numbers_are_trained_and_sent(algorithm, trained, sent):
    clients = 3
    bytes_ = 8
    result = run(algorithm, rounds=2)
    for round in range(2):
        assert sizes(result, round) == [trained, sent, pytest.approx(clients * bytes_ * sent / 1e6)]


HEAD = "fc.modules_to_save.default.weight", "fc.modules_to_save.default.bias"
OWN = {"fedsa_lora": {B, *HEAD}}
IDLE = {"ffa_lora": ({A}, {A}, {A}), "rolora": ({A}, {B}, {A}), "fedsa_lora": ((), (), ())}


@pytest.mark.every(2)
@pytest.mark.parametrize("engine", ["folded", "loop"])
@pytest.mark.parametrize("algorithm", IDLE)
def test_three_rounds_of_two_clients_by_hand(algorithm, engine):
    """All clients take part, and take two steps a round on all of their images."""
    data = [client[:] for client in task().train[:2]]
    square = Square()
    first = start()
    private_names = OWN.get(algorithm, set())

    def loss(state, x, y):
        x = x.flatten(1)
        hidden = square.layer(x) + ALPHA / RANK * (x @ state[A].T @ state[B].T)
        return F.cross_entropy(hidden.tanh() @ state[HEAD[0]].T + state[HEAD[1]], y)

    shared = first
    kept = [first, first]
    for idle in IDLE[algorithm]:
        ends = []
        for m, (x, y) in enumerate(data):
            state = {key: (kept[m] if key in private_names else shared)[key].detach() for key in first}
            for _ in range(2):
                leaves = {key: value.clone().requires_grad_(key not in idle) for key, value in state.items()}
                names = [key for key in leaves if key not in idle]
                gradients = torch.autograd.grad(loss(leaves, x, y), [leaves[key] for key in names])
                state |= {key: state[key] - 0.1 * value for key, value in zip(names, gradients, strict=True)}
            ends.append(state)
        shared = {key: (ends[0][key] + ends[1][key]) / 2 for key in first}
        kept = ends
    actual = perada.finetune(
        Square(),
        perada.FederatedData([TensorDataset(*client) for client in data], num_classes=CLASSES),
        **sections(
            algorithm=algorithm,
            **{"adapter": LAYER, "engine": engine, "rounds": 3, "batch_size": 16, "local_steps": 2, "lr_local": 0.1}
            | QUIET,
        ),
    )
    for m in range(2):
        expected = {key: (kept[m] if key in private_names else shared)[key] for key in first}
        assert_same(actual.state("personal", m), expected, f"client {m}")


@pytest.mark.every(3)
@QUIETLY
@pytest.mark.parametrize("options", [{}, PRIVATE, CLIENT], ids=["plain", "images", "clients"])
def test_factors_take_turns(options):
    """Noise too is added to the factor whose turn it is."""
    result = [run("rolora", rounds=rounds, **options).state("global") for rounds in range(4)]
    moved = [(not torch.equal(one[A], two[A]), not torch.equal(one[B], two[B])) for one, two in pairwise(result)]
    assert moved == [(False, True), (True, False), (False, True)]  # B first: A has no gradient where B is zero


@pytest.mark.slow
@pytest.mark.parametrize("half", [1, 2])
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning")
def test_a_run_is_resumed_in_the_turn_of_either_factor(tmp_path, half):
    def saved(rounds, **options):
        checkpoint = {"callbacks": [ModelCheckpoint(tmp_path, "saved")], "enable_checkpointing": True}
        return run("rolora", rounds=rounds, momentum=0.5, **checkpoint | options)

    uninterrupted = run("rolora", rounds=4, momentum=0.5)
    saved(half)
    again = saved(4, ckpt_path=str(tmp_path / "saved.ckpt"))
    assert_equal(again.state("global"), uninterrupted.state("global"))
    assert again.metrics == uninterrupted.metrics


@pytest.mark.slow
@QUIETLY
def test_noise_of_clients_reaches_the_product_once():
    """E‖ΔW‖² of noise alone after T rounds: s²·Tσ²·out·‖A‖² with A frozen, and + s²·(Tσ²)²·out·in·r with LoRA.

    σ is the deviation of the noise in the mean of a round. Without training the second one is that of
    s·B·A, with A and B sums of T draws: the first of A is what A was.
    """
    rounds = 6
    clients = 3
    multiplier = 2.0
    norm = 1.0
    width = 256
    rank = 16
    sigma2 = (multiplier * norm / clients) ** 2

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.fc = nn.Linear(WIDTH, width).double(), nn.Linear(width, CLASSES).double()

        def forward(self, x):
            return self.fc(self.layer(x.flatten(1)).tanh())

    adapter = LoraConfig(r=rank, lora_alpha=rank, target_modules=["layer"])
    private = ClientPrivacy(noise_multiplier=multiplier, max_norm=norm, delta=1e-3, secure_rng=False)
    options = {"adapter": adapter, "rounds": rounds, "lr_local": 0.0, "local_epochs": None, "local_steps": 1}
    torch.manual_seed(0)
    net = Wide()
    squares = {}
    for algorithm in ("fedavg", "ffa_lora"):
        result = run(algorithm, net, client_privacy=private, **options).state("global")
        squares[algorithm] = float((result[B] @ result[A]).square().sum())
    first = run("fedavg", net, **options | {"rounds": 0}).state("global")[A]
    once = rounds * sigma2 * width * float(first.square().sum())
    twice = once + (rounds * sigma2) ** 2 * width * WIDTH * rank
    assert math.isclose(squares["ffa_lora"], once, rel_tol=0.1)
    assert math.isclose(squares["fedavg"], twice, rel_tol=0.1)
    assert twice > 10 * once


@pytest.mark.parametrize("base", [FFALoRA(), FedSALoRA(), RoLoRA()])
def test_what_says_itself_what_becomes_of_a_is_no_base(base):
    with pytest.raises(ValueError, match=f"base={type(base).__name__} already"):
        FFALoRA(base)


def test_a_base_is_an_algorithm():
    with pytest.raises(ValueError, match="base='fedavg' is not an algorithm"):
        FFALoRA("fedavg")


@pytest.mark.every(4)
@pytest.mark.parametrize("algorithm", [FFALoRA(), FFALoRA(Ditto()), FedSALoRA(), RoLoRA()])
def test_plain_peft_loads_complete_adapters(algorithm, tmp_path):
    actual = run(algorithm)
    x = task().public[:][0]
    actual.export(tmp_path)
    clients = CLIENTS if algorithm.inference == "personal" else ()
    for folder, wanted in [("global", None)] * algorithm.global_model + [(f"client_{m}", m) for m in clients]:
        model = PeftModel.from_pretrained(Square(), str(tmp_path / folder)).eval()
        expected = actual.global_model() if wanted is None else actual.personal(wanted)
        torch.testing.assert_close(model(x), expected(x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "base", [FedRep(), *(pytest.param(one, marks=pytest.mark.slow) for one in (Ditto(), FedAvg()))]
)
def test_a_client_that_joins_trains_b_on_the_same_a(base):
    def single(data):
        x, y = data[:]
        return TensorDataset(x.float(), y)

    data = perada.FederatedData([single(client) for client in task().train], num_classes=CLASSES)
    options = {"adapter": LAYER, "rounds": 1, "batch_size": 4, "local_epochs": 1} | QUIET
    result = perada.finetune(Square().float(), data, **sections(algorithm=FFALoRA(base), **options))
    alone = perada.FederatedData([single(task().train[0])], num_classes=CLASSES)
    joined = perada.personalize(result, alone, "late", accelerator="cpu")
    state = joined.state("personal", len(CLIENTS))
    before = result.state("global")
    assert torch.equal(state[A], before[A])
    assert torch.equal(state[B], before[B]) == isinstance(base, FedRep)  # who shares B, and trains a head
    assert not torch.equal(state["fc.modules_to_save.default.bias"], before["fc.modules_to_save.default.bias"])


def test_clients_without_a_part_keep_their_own():
    result = finetune("fedsa_lora", "net-adapter", rounds=1)
    ref = reference("net-adapter")
    (left_out,) = set(CLIENTS) - set(ref.rounds[0])
    state = result.state("personal", left_out)
    shared = result.state("global")
    for key, value in state.items():
        is_private = "lora_B" in key or key.startswith("fc.")
        assert torch.equal(value, ref.initial[key] if is_private else shared[key]), key
