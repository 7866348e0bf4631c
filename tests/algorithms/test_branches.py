# SPDX-License-Identifier: Apache-2.0
"""FedDPA and FedALT on two LoRA branches; their plain loops are in ``personal_references.py``."""

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from torch.func import functional_call
from torch.utils.data import TensorDataset

import perada
from perada.adapters import DualLoraConfig
from perada.algorithms import FedDPA, FedDPAF, FedEnsemble, HetLoRA, RestOfWorld
from tests.options import sections

from .problems import CLASSES, CLIENTS, QUIET, finetune, is_private, network, reference, task
from .references import fedavg

PATH = "conv.perada_dual_lora.default"
A_SHARED, B_SHARED, A_OWN, B_OWN = (f"{PATH}.{b}_{f}.weight" for b in ("shared", "private") for f in "AB")
GATE = DualLoraConfig(r=2, lora_alpha=16, gate=True, target_modules=["conv"])
BRANCHES = DualLoraConfig(r=2, lora_alpha=16, target_modules=["conv"])
ADAPTERS = [(FedDPA(0.3), BRANCHES), (FedDPAF(0.3), BRANCHES), (RestOfWorld(), BRANCHES), (RestOfWorld(), GATE)]


def two_clients():
    return perada.FederatedData(task().train[:2], num_classes=CLASSES)


def row(rounds, data=None, **options):
    options_of_row = {"adapter": GATE, "batch_size": 4, "local_epochs": 1, "lr_personal": 0.2} | QUIET | options
    return perada.finetune(
        network("net"), data or two_clients(), **sections(algorithm="fedalt_row", rounds=rounds, **options_of_row)
    )


@pytest.mark.every(2)
@pytest.mark.parametrize("engine", ["folded", "loop"])
def test_the_rest_of_a_world_of_two_is_the_other_one(engine):
    before, after = (row(rounds, engine=engine) for rounds in (1, 2))
    for client, other in ((0, 1), (1, 0)):
        seen = after.state("personal", client)
        sent = before.state("personal", other)
        for mine, theirs in ((A_SHARED, A_OWN), (B_SHARED, B_OWN)):
            torch.testing.assert_close(seen[mine], sent[theirs], rtol=0, atol=1e-15)
            assert not torch.equal(seen[theirs], sent[theirs])


def test_the_server_holds_the_mean_of_all_also_of_those_not_drawn():
    run = finetune("fedalt_row", "net-gate")
    for key in (A_OWN, B_OWN):
        mean = sum(run.state("personal", m)[key] for m in CLIENTS) / len(CLIENTS)
        torch.testing.assert_close(run.state("global")[key], mean, rtol=0, atol=1e-15)


def test_a_client_that_never_took_part_has_what_it_began_with():
    run = finetune("fedalt_row", "net-gate", rounds=1)
    ref = reference("net-gate")
    (left_out,) = set(CLIENTS) - set(ref.rounds[0])
    for key, value in run.state("personal", left_out).items():
        assert torch.equal(value, ref.initial[key]), key


def test_one_client_has_no_rest_of_the_world():
    with pytest.raises(ValueError, match="only one client"):
        row(1, perada.FederatedData(task().train[:1], num_classes=CLASSES))


def test_a_rest_of_the_world_has_whole_branches():
    with pytest.raises(ValueError, match=r"base=RestOfWorld .*complete branches"):
        HetLoRA(RestOfWorld())


@pytest.mark.parametrize("rule", ["median", "fedavgm", "norm_clipping"])
def test_what_is_no_mean_has_no_own_part_to_take_out(rule):
    with pytest.raises(ValueError, match=r"RestOfWorld.*server_rule=\w+"):
        row(1, server_rule=rule)


@pytest.mark.parametrize("algorithm", [FedDPA(), FedDPAF()])
def test_a_gate_would_weight_a_second_time(algorithm):
    with pytest.raises(ValueError, match=rf"algorithm {type(algorithm).__name__} weights the branches .* gate=False"):
        finetune(algorithm, adapter=GATE)


@pytest.mark.every(2)
@pytest.mark.parametrize("base", [FedDPA(), FedDPAF()])
def test_ranks_of_clients_hold_for_both_branches(base):
    run = finetune(HetLoRA(base, ranks=[1, 2]), adapter=BRANCHES, rounds=2)
    for m in CLIENTS:
        state = run.state("personal", m)
        for a, b in ((A_SHARED, B_SHARED), (A_OWN, B_OWN)):
            assert state[b].flatten(1).any(0).tolist() == state[a].flatten(1).any(1).tolist() == [True, m % 2 == 1]


def test_modes_of_feddpa_are_trained():
    run = finetune(FedEnsemble(FedDPA(), modes=2, strata=2), "net-branches", rounds=2)
    one, two = run.states("global")
    assert one[B_SHARED].any() and two[B_SHARED].any() and not torch.equal(one[B_SHARED], two[B_SHARED])
    assert not one[B_OWN].any() and run.state("personal", 0)[B_OWN].any()


def test_global_branches_are_those_of_fedavg_without_the_private_one():
    """The plain loop of FedAvg trains both; with B and A of the private branch at zero, that one stays there."""
    ref = reference("net-branches")
    initial, ref.initial = ref.initial, {k: v * 0 if is_private(k) else v for k, v in ref.initial.items()}
    try:
        w, _ = fedavg(ref)
    finally:
        ref.initial = initial
    assert all(not value.any() for key, value in w.items() if is_private(key))
    for algorithm in ("feddpa", "feddpa_f"):
        actual = finetune(algorithm, "net-branches").state("global")
        for key, value in actual.items():
            expected = initial[key] if is_private(key) else w[key]
            torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-11)


def test_the_global_gradient_is_that_of_the_global_branch():
    """‖∇L‖² by what is sent, at the initial state: the mean over clients of their gradients on all their images."""
    run = finetune("feddpa", "net-branches", rounds=1, diagnostics=["gradient_norms"])
    ref = reference("net-branches")
    means = []
    for m in ref.rounds[0]:
        leaves = {key: value.clone().requires_grad_(key in ref.trained) for key, value in ref.initial.items()}
        x, y = task().train[m][:]
        F.cross_entropy(functional_call(ref.model.eval(), leaves, (x,)), y).backward()
        means.append({key: leaves[key].grad for key in ref.trained if not is_private(key)})
    squares = sum(float((sum(mean[key] for mean in means) / len(means)).square().sum()) for key in means[0])
    assert run.metrics["rounds"][0]["theory/global_gradient"] == pytest.approx(squares, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_weights_at_their_ends(weight):
    """With 0 a client predicts with the global branch alone, with 1 with its own."""
    for algorithm in (FedDPA(weight), FedDPAF(weight)):
        state = finetune(algorithm, "net-branches").state("personal", 0)
        assert bool(state[B_SHARED].any()) == (weight == 0)
        assert bool(state[B_OWN].any()) == (weight == 1)


def test_branches_count_in_what_is_trained_and_sent():
    a = 2 * 9
    b = 4 * 2
    head = 4 * CLASSES + CLASSES
    gate = 2 * 9
    for algorithm, adapter, trained, sent, received in (
        ("feddpa", BRANCHES, 2 * (a + b + head), a + b + head, a + b + head),
        ("feddpa_f", BRANCHES, a + b + head, a + b + head, a + b + head),
        ("fedalt_row", GATE, a + b + head + gate, a + b, a + b + 1),
    ):
        result = finetune(algorithm, adapter=adapter, rounds=1).metrics["rounds"][0]
        assert result["params/trained"] == trained
        assert result["params/sent"] == sent
        assert result["comm/up_mb"] == pytest.approx(3 * 8 * sent / 1e6)
        assert result["comm/down_mb"] == pytest.approx(3 * 8 * received / 1e6)


@pytest.mark.every(4)
@pytest.mark.parametrize(("algorithm", "adapter"), ADAPTERS)
def test_plain_peft_loads_complete_adapters(algorithm, adapter, tmp_path):
    result = finetune(algorithm, adapter=adapter)
    x = task().public[:][0]
    result.export(tmp_path)
    for m in CLIENTS:
        model = PeftModel.from_pretrained(network("net"), str(tmp_path / f"client_{m}")).eval()
        torch.testing.assert_close(model(x), result.personal(m)(x), rtol=1e-9, atol=1e-9)
    if algorithm.global_model:
        model = PeftModel.from_pretrained(network("net"), str(tmp_path / "global")).eval()
        torch.testing.assert_close(model(x), result.global_model()(x), rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "adapter"), ADAPTERS)
def test_a_client_joins(algorithm, adapter):
    def single(data):
        x, y = data[:]
        return TensorDataset(x.float(), y)

    data = perada.FederatedData([single(client) for client in task().train], num_classes=CLASSES)
    options = {"adapter": adapter, "batch_size": 4, "local_epochs": 1} | QUIET
    result = perada.finetune(network("net").float(), data, **sections(algorithm=algorithm, rounds=2, **options))
    alone = perada.FederatedData([single(task().train[0])], num_classes=CLASSES)
    joined = perada.personalize(result, alone, "late", accelerator="cpu")
    personal = joined.state("personal", len(CLIENTS))
    w = result.state("global")
    assert personal[B_OWN].any()
    if isinstance(algorithm, RestOfWorld):  # all clients are others to it
        assert torch.equal(personal[A_SHARED], w[A_OWN]) and torch.equal(personal[B_SHARED], w[B_OWN])
        assert (personal[B_OWN] - w[B_OWN]).norm() > 0.1 * w[B_OWN].norm()
    elif isinstance(algorithm, FedDPAF):
        torch.testing.assert_close(personal[B_SHARED], 0.7 * w[B_SHARED])
    for key, value in joined.state("global").items():
        assert torch.equal(value, w[key]), key
