# SPDX-License-Identifier: Apache-2.0
"""Every algorithm against plain loops over rounds, clients and batches, written from its definition.

A new algorithm adds one row to ``ALGORITHMS``: its name or an instance, what ``finetune`` is asked for beside the
common options, and a function of ``references.py`` or ``personal_references.py`` that says what must come out.
"""

from functools import cache

import pytest
import torch
from torch.func import functional_call

from perada.algorithms import (
    APFL,
    FedAlt,
    FedAvgFT,
    FedBABU,
    FedBE,
    FedDPA,
    FedDyn,
    FedEnsemble,
    FedProx,
    FedRep,
    FedROD,
    FedSim,
    Moon,
    PFedMe,
    Scaffold,
    make_algorithm,
)
from perada.data import Phase
from tests.methods import make_method

from . import personal_references, references
from .problems import (
    CLIENTS,
    LR_PERSONAL,
    PROX,
    ROUNDS,
    assert_same,
    distance,
    finetune,
    reference,
)

ALL = ("net-full", "net-adapter", "linear-full", "linear-head")
SOME = ("net-adapter", "linear-full")  # where a second network would say the same
NET = ("net-full", "net-adapter")  # where layers are told apart
INPUT = (*NET, "net-biases")  # LoRA on the input layer is a part of it
BACKBONE = ("net-backbone",)
LORA = ("net-adapter", *BACKBONE)
DUAL = ("net-branches", "net-gate")
MODES = {"modes": references.MODES, "strata": references.STRATA}
PERADA = make_algorithm("perada", prox_strength=PROX, distill=False)

ALGORITHMS = [
    ("fedavg", {}, references.fedavg, ALL),
    ("fedavg", {"weighting": "samples"}, references.fedavg_by_samples, SOME),
    ("fedavg_ft", {}, references.fedavg_ft, ALL),
    ("fedbabu", {}, references.fedbabu, NET),
    (FedBABU(tunes="all"), {}, references.fedbabu_whole, ("net-adapter",)),
    ("standalone", {}, personal_references.standalone, ALL),
    ("ditto", {"prox_strength": PROX}, personal_references.ditto, ALL),
    (
        "perada",
        {"prox_strength": PROX, "distill_batch_size": 3, "distill_until_round": 2},
        personal_references.perada_two_rounds,
        ALL,
    ),
    ("perada_no_kd", {"prox_strength": PROX}, personal_references.ditto, ALL),
    # A batch larger than the public set is the whole set.
    (
        "perada",
        {"prox_strength": PROX, "distill_batch_size": 64, "distill_temperature": 2.0},
        personal_references.perada_all_rounds,
        ALL,
    ),
    (FedProx(PROX), {}, references.fedprox, ALL),
    (FedDyn(0.3), {}, references.feddyn, ALL),
    ("scaffold", {}, references.scaffold, ALL),
    (Scaffold(server_lr=0.5), {}, references.scaffold_half_way, SOME),
    (Moon(mu=2.0), {}, references.moon, ALL),
    ("feddf", {"distill_batch_size": 3}, references.feddf, ALL),
    (FedBE(samples=0), {"distill_batch_size": 3}, references.fedbe_without_samples, ALL),
    (FedBE(samples=0, average_from=0.75), {"distill_batch_size": 3}, references.fedbe_of_last_student, ALL),
    (FedBE(distill=False, samples=0), {}, references.fedbe_no_kd, ALL),
    ("mtl", {"prox_strength": PROX}, personal_references.mtl, ALL),
    (PFedMe(prox_strength=2.0), {}, personal_references.pfedme, ALL),
    (PFedMe(prox_strength=2.0, inner_steps=1, beta=0.5), {}, personal_references.pfedme_half_way, ALL),
    (PFedMe(prox_strength=2.0, restart=True), {}, personal_references.pfedme_restarted, ALL),
    (APFL(alpha=0.3), {}, personal_references.apfl, ALL),
    (APFL(alpha=0.3, lr_alpha=0.5), {}, personal_references.apfl_adapted, ALL),
    ("fedbn", {}, personal_references.fedbn, NET),
    ("lg_fedavg", {}, personal_references.lg_fedavg, NET),
    ("fedrod", {}, personal_references.fedrod, ALL),
    (FedROD(gamma=0.5), {}, personal_references.fedrod_half, SOME),
    ("fedper", {}, personal_references.fedper, NET),
    ("fedrep", {}, personal_references.fedrep, NET),
    (FedRep(head_epochs=0), {}, personal_references.fedrep_without_head, NET),
    (FedRep(head_epochs=3), {}, personal_references.fedrep_long_head, NET),
    (FedAlt("output", personal_epochs=0.5), {}, personal_references.fedalt_output, NET),
    ("fedalt_input", {}, personal_references.fedalt_input, INPUT),
    ("fedalt_adapter", {}, personal_references.fedalt_adapter, BACKBONE),
    ("fedsim_output", {}, personal_references.fedsim_output, NET),
    ("fedsim_input", {}, personal_references.fedsim_input, INPUT),
    ("fedsim_adapter", {}, personal_references.fedsim_adapter, BACKBONE),
    ("ffa_lora", {}, references.ffa_lora, LORA),
    ("fedsa_lora", {}, personal_references.fedsa_lora, LORA),
    ("rolora", {}, references.rolora, LORA),
    ("feddpa", {}, personal_references.feddpa, DUAL[:1]),
    (FedDPA(weight=0.8), {}, personal_references.feddpa_mostly_own, DUAL[:1]),
    ("feddpa_f", {}, personal_references.feddpa_f, DUAL[:1]),
    ("fedalt_row", {}, personal_references.rest_of_world, DUAL),
    (FedSim("branch"), {}, personal_references.fedsim_branch, DUAL),
    (FedAlt("branch"), {}, personal_references.fedalt_branch, DUAL),
    (FedEnsemble(**MODES), {}, references.fed_ensemble, ALL),
    (FedEnsemble(base=FedProx(PROX), **MODES), {}, references.fed_ensemble_of_fedprox, SOME),
    (FedEnsemble(base=PERADA, **MODES), {}, references.fed_ensemble_of_perada, ALL),
    (
        FedEnsemble(base=make_algorithm("perada", prox_strength=PROX), **MODES),
        {"distill_batch_size": 3},
        references.fed_ensemble_of_distilling_perada,
        NET,
    ),
    (FedEnsemble(**MODES), {"server_rule": "fedadam"}, references.fed_ensemble_fedadam, NET),
    (FedEnsemble(assignment="loss", **MODES), {}, references.fed_ensemble_by_loss, NET),
    (FedEnsemble(keeps="best", **MODES), {}, references.fed_ensemble_keeping_the_best, NET),
    ("fedavg", {"server_rule": "median"}, references.fedavg_median, SOME),
    ("fedavg", {"server_rule": "fedadam"}, references.fedavg_fedadam, SOME),
    ("perada_no_kd", {"prox_strength": PROX, "server_rule": "median"}, personal_references.perada_no_kd_median, SOME),
    ("perada_no_kd", {"prox_strength": PROX, "server_rule": "fedadam"}, personal_references.perada_no_kd_fedadam, SOME),
]


@cache
def answer(function, problem):
    return function(reference(problem))


# Quick are the first row of each class of algorithms, on one network and folded, and some that loop over the clients.
LOOPED = ("fedavg", "scaffold", "fed_ensemble", "perada_two_rounds")
QUICK_PROBLEMS = {"net-adapter", "net-backbone", "net-branches"}


def engine_cases():
    algorithms = set()
    for name, options, function, problems in ALGORITHMS:
        algorithm = type(make_method(name))
        is_first = algorithm not in algorithms
        algorithms.add(algorithm)
        first_problem = next((problem for problem in problems if problem in QUICK_PROBLEMS), None)
        for problem in problems:
            quick = {
                "folded": is_first and problem == first_problem,
                "loop": problem == "net-full" and function.__name__ in LOOPED,
            }
            for engine, is_quick in quick.items():
                case_id = f"{function.__name__}-{problem}-{engine}"
                marks = [] if is_quick else [pytest.mark.slow]
                yield pytest.param(name, options, function, problem, engine, id=case_id, marks=marks)


@pytest.mark.parametrize(("name", "options", "function", "problem", "engine"), list(engine_cases()))
def test_equals_its_definition(name, options, function, problem, engine):
    w, personal = answer(function, problem)
    run = finetune(name, problem, engine, **options)
    shared = run.states("global")
    for k, (state, expected) in enumerate(zip(shared, [w] if isinstance(w, dict) else w, strict=True)):
        assert_same(state, expected, f"global {k}")
    for m in CLIENTS if personal is not None else ():
        assert_same(run.state("personal", m), personal[m], f"personal {m}")
    # The comparison would be empty if nothing moved: only Standalone's global state stays.
    initial = reference(problem).initial
    assert (distance(shared[0], initial) > 0.1) == (name != "standalone")
    assert personal is None or max(distance(state, initial) for state in personal) > 0.1


def test_clients_that_were_never_sampled_keep_the_initial_state():
    run = finetune("ditto", rounds=1)
    (left_out,) = set(CLIENTS) - set(reference("net-full").rounds[0])
    assert distance(run.state("personal", left_out), reference("net-full").initial) == 0


def test_fine_tuning_for_longer_is_asked_of_the_algorithm():
    ref = reference("net-full")
    w, _ = answer(references.fedavg, "net-full")
    batches = ref.batches(ref.served.plan_for(CLIENTS, ROUNDS, [Phase(epochs=2.5)]))
    run = finetune(FedAvgFT(finetune_epochs=2.5))
    for m in CLIENTS:
        expected = ref.train(w, batches[m], LR_PERSONAL)
        assert_same(run.state("personal", m), expected, f"personal {m}")
        assert distance(expected, w) > 0.1


def test_the_pull_leaves_running_statistics_alone():
    """A pull so strong that v = w after every step: statistics are still those of the client's own batches."""
    ref = reference("net-full")
    run = finetune("ditto", rounds=1, prox_strength=1 / LR_PERSONAL, local_epochs=None, local_steps=1)
    (m, batches), *_ = ref.rounds[0].items()
    x = batches[0][0]
    features = functional_call(ref.model.conv, {k[5:]: v for k, v in ref.initial.items() if k[:5] == "conv."}, (x,))
    expected = 0.9 * ref.initial["norm.running_mean"] + 0.1 * features.tanh().mean((0, 2, 3))
    torch.testing.assert_close(run.state("personal", m)["norm.running_mean"], expected)
