# SPDX-License-Identifier: Apache-2.0
"""Algorithms by name, and what they reject."""

import inspect

import pytest
import torch

from perada.algorithms import (
    ALGORITHMS,
    APFL,
    MTL,
    Algorithm,
    Ditto,
    FedAlt,
    FedAvg,
    FedAvgFT,
    FedBE,
    FedDPA,
    FedDyn,
    FedEnsemble,
    FedProx,
    FedRep,
    FedSim,
    FFALoRA,
    PerAda,
    PFedMe,
    Standalone,
    TensorNames,
    make_algorithm,
)
from perada.algorithms.base import AlgorithmWrapper
from perada.core.states import Factors
from tests.methods import NAMED, make_method
from tests.rejections import rejects

from .problems import LORA, OF_BRANCHES, OF_LORA, finetune

NAN = float("nan")


def test_algorithms_are_made_by_name():
    for name, kind in ALGORITHMS.items():
        assert type(make_algorithm(name)) is kind, name


def test_an_algorithm_is_returned_as_it_is():
    algorithm = Ditto(0.25)
    assert make_algorithm(algorithm) is algorithm
    assert algorithm.prox_strength == 0.25


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("peradda", {}, "algorithm='peradda' is unknown; did you mean 'perada'"),
        ("xyz", {}, "algorithm='xyz' is unknown; choose one of perada, "),
        ("FlexLoRA", {}, "'FlexLoRA' is unknown; the method 'flexlora' is algorithm='fedavg' with server_rule='svd'$"),
        ("flexlora", {}, "'flexlora' is unknown; the method 'flexlora' is algorithm='fedavg' with server_rule='svd'$"),
        ("perada_no_kd", {}, r"'perada_no_kd'.*algorithm='perada'.*distill=False"),
        ("fed_ensemble_perada", {}, "is algorithm='fed_ensemble' with base='perada'$"),
        ("lora_fair", {}, r"algorithm='lora_fair'.*server_rule='lora_fair'"),
        ("fedrod", {"gama": 1}, "unexpected keyword argument 'gama'; its options are gamma$"),
        ("standalone", {"prox_strength": 1.0}, r"algorithm='standalone'.*prox_strength"),
        ("ditto", {"prox_strength": -1.0}, r"prox_strength .*got -1.0"),
        ("ditto", {"prox_strength": NAN}, r"prox_strength .*got nan"),
        ("fedavg_ft", {"finetune_epochs": 0}, r"finetune_epochs .*got 0"),
    ],
)
def test_wrong_names_and_options_are_rejected(name, options, message):
    with pytest.raises(ValueError, match=message):
        make_algorithm(name, **options)


def test_an_error_of_a_constructor_is_not_taken_for_a_wrong_option(monkeypatch):
    class Broken(FedProx):
        def __init__(self, prox_strength: float = 1.0) -> None:
            super().__init__(prox_strength)
            len(prox_strength)

    monkeypatch.setitem(ALGORITHMS, "broken", Broken)
    with pytest.raises(TypeError, match="has no len"):
        make_algorithm("broken", prox_strength=0.5)
    with pytest.raises(ValueError, match=r"'mu'.*prox_strength$"):
        make_algorithm("broken", mu=0.5)


@pytest.mark.parametrize(
    ("kind", "option", "values"),
    [
        (FedProx, "prox_strength", (-0.1, NAN, float("inf"), True, "1")),
        (FedDyn, "alpha", (-0.1, 0.0, NAN, float("inf"))),  # the server divides by it
        (FedBE, "sampler", ("gauss",)),
        (FedBE, "samples", (-1, 2.0)),
        (FedBE, "distill", (1, None)),
        (PerAda, "distill", (1, "no")),
        (FedBE, "average_from", (-0.1, 1.1, NAN)),
        (MTL, "prox_strength", (-0.1, NAN)),
        (PFedMe, "prox_strength", (-0.1, NAN)),
        (PFedMe, "inner_steps", (0, -1)),
        (PFedMe, "beta", (0.0, -0.5, NAN)),
        (APFL, "alpha", (-0.1, 1.1, NAN)),
        (APFL, "lr_alpha", (-0.1, NAN)),
        (FedRep, "head_epochs", (-1, NAN)),
        (FedAlt, "personal_epochs", (-1, NAN)),
        (FedAlt, "split", ("middle",)),
        (FedSim, "split", ("middle",)),
        (FedEnsemble, "modes", (0,)),
        (FedEnsemble, "strata", (0,)),
        (FedEnsemble, "assignment", ("random",)),
        (FedEnsemble, "average", ("votes",)),
        (FedEnsemble, "keeps", ("worst",)),
    ],
)
def test_wrong_values_are_named(kind, option, values):
    for value in values:
        with rejects(option, value):
            kind(**{option: value})


@pytest.mark.parametrize("base", [Standalone(), FedAvgFT(), FedRep(), FedEnsemble(modes=2, keeps="best")])
def test_modes_of_what_has_no_global_model_are_rejected(base):
    with pytest.raises(ValueError, match=rf"base={type(base).__name__}.*modes"):
        FedEnsemble(base=base)


def test_the_best_mode_is_not_kept_beside_a_model_of_the_clients_own():
    with pytest.raises(ValueError, match=r"base=Ditto.*keeps='best'"):
        FedEnsemble(base=Ditto(), keeps="best")


@pytest.mark.parametrize(
    ("algorithm", "problem", "options", "message"),
    [
        *[(name, "net-full", {}, "the trained parameters contain none.*choose adapter='lora'") for name in OF_LORA],
        *[
            (name, "net-adapter", {}, "the trained parameters contain none.*choose adapter='dual_lora'")
            for name in OF_BRANCHES
        ],
        *[(name, "net-gate", {}, "the adapter's gate does so too; set gate=False") for name in OF_BRANCHES[:2]],
        (
            FFALoRA(FedDPA()),
            "net-branches",
            {},
            "FedDPA requires both factors of its branches; remove the wrapper that freezes",
        ),
        (FedSim("branch"), "net-adapter", {}, "nothing to keep: clients keep the private branch.*adapter='dual_lora'"),
        ("fedbn", "linear-full", {}, "FedBN has nothing to keep: .*normalisation"),
        ("fedbn", "net-full", {"adapter": LORA}, "FedBN has nothing to keep: .*normalisation"),
        ("lg_fedavg", "linear-head", {}, "LGFedAvg has nothing to keep"),
        ("fedbabu", "linear-full", {}, "FedBABU trains the body in its rounds .* only the head is trained"),
        ("fedper", "linear-head", {}, "FedPer has nothing to send: .*head"),
        ("fedrep", "linear-head", {}, "FedRep has nothing to send: .*head"),
        ("fedalt_output", "linear-full", {}, "FedAlt has nothing to send"),
        ("fedalt_input", "net-full", {"adapter": "head"}, "FedAlt has nothing to keep: .*input layer"),
        ("fedsim_input", "net-full", {"adapter": "head"}, "FedSim has nothing to keep: .*input layer"),
        ("fedsim_adapter", "net-full", {}, "FedSim has nothing to keep: .*adapter"),
        (FedEnsemble(strata=5), "net-full", {}, r"strata=5.*4"),
    ],
)
def test_splits_that_leave_nothing_are_rejected_at_set_up(algorithm, problem, options, message):
    with pytest.raises(ValueError, match=message) as error:
        finetune(algorithm, problem, rounds=0, **options)
    assert "\n" not in str(error.value)


def test_only_personalised_algorithms_keep_states():
    """On a network with LoRA of two branches, of which the names say what they are."""
    shared = Factors("shared_A.weight", "shared_B.weight", 1.0)
    private = Factors("private_A.weight", "private_B.weight", 1.0)
    names = ("in", "bn", *shared[:2], *private[:2], "fc")
    tensor_names = TensorNames(
        keys=names,
        parameters=names,
        head=frozenset({"fc"}),
        norms=frozenset({"bn"}),
        input=frozenset({"in"}),
        adapter=frozenset({*shared[:2], *private[:2]}),
        factors=(shared, private),
        shared=frozenset(shared[:2]),
        private=frozenset(private[:2]),
    )
    all_down = {shared.down, private.down}
    all_up = {shared.up, private.up}
    state = {key: torch.zeros(1) for key in tensor_names.keys}
    everything = set(state)
    kept = {}
    for name in NAMED:
        algorithm = make_method(name)
        if name != "fed_ensemble":  # keeps what its base does
            kept[name] = {
                key
                for personal in algorithm.initial_client_state(state, tensor_names).values()
                for key in personal
                if key in state
            }
    assert kept == {
        "perada": everything,
        "perada_no_kd": everything,
        "ditto": everything,
        "standalone": everything,
        "mtl": everything,
        "pfedme": everything,
        "apfl": everything,
        "fedavg": set(),
        "fedavg_ft": set(),
        "fedbabu": set(),
        "fedprox": set(),
        "feddyn": everything,
        "scaffold": everything,
        "moon": everything,
        "feddf": set(),
        "fedbe": set(),
        "fedbe_no_kd": set(),
        "fedbn": {"bn"},
        "lg_fedavg": everything - {"fc"},
        "fedper": {"fc"},
        "fedrod": {"fc"},
        "fedrep": {"fc"},
        "fedalt_input": {"in"},
        "fedalt_output": {"fc"},
        "fedalt_adapter": all_down | all_up,
        "fedsim_input": {"in"},
        "fedsim_output": {"fc"},
        "fedsim_adapter": all_down | all_up,
        "ffa_lora": set(),
        "fedsa_lora": all_up | {"fc"},
        "rolora": set(),
        "feddpa": everything - {shared.down, shared.up},
        "feddpa_f": set(),
        "fedalt_row": everything,
        "het_lora": set(),
        "fedex_lora": set(),
        "flora": set(),
    }


def test_who_distils_and_who_sends():
    assert {name for name in NAMED if make_method(name).uses_distillation} == {"perada", "feddf", "fedbe"}
    assert [name for name in NAMED if not make_method(name).sends_updates] == ["standalone"]
    assert PerAda().personalization() is None
    assert FedAvgFT(3).personalization()[1].epochs == 3


def test_an_ensemble_is_told_by_its_members():
    """Also one of somebody else's, which is averaged like ours."""
    ensembles = {name for name in NAMED if make_method(name).is_ensemble}
    assert ensembles == {"fedbe", "fedbe_no_kd", "fed_ensemble"}
    own = type("Own", (Algorithm,), {"members": lambda self, global_state, server_state: server_state["three"]})()
    three = {"w": torch.arange(3.0)}
    assert own.is_ensemble and own.members({}, {"three": three}) is three
    assert Ditto().members({"w": torch.ones(2)}, {})["w"].shape == (1, 2)


def test_a_wrapper_passes_on_all_that_its_base_has():
    base = FedAvg()
    for name in Algorithm.__annotations__:
        setattr(base, name, object())
    # A client joins a run of the wrapper, not of its base, and HetLoRA's clients have ranks that its base lacks.
    own = ("lora_rank", "joining")
    methods = [name for name, value in vars(Algorithm).items() if inspect.isfunction(value) and name not in own]
    calls = []
    for name in methods:
        setattr(base, name, lambda *arguments, name=name: calls.append((name, arguments)) or (name, "result"))
    wrapper = AlgorithmWrapper(base)
    for name in Algorithm.__annotations__:
        if name != "personal_pull":  # of other tensors than the wrapper's
            assert getattr(wrapper, name) is getattr(base, name)
    assert wrapper.personal_pull is None
    for name in methods:
        arguments = tuple(object() for _ in inspect.signature(getattr(base.__class__, name)).parameters)[1:]
        result = getattr(wrapper, name)(*arguments)
        assert calls.pop() == (name, arguments)
        assert result == (None if name in ("check", "client_step") else (name, "result"))
    assert len(methods) > 10


def test_a_wrapper_of_what_is_no_algorithm_is_rejected():
    with pytest.raises(ValueError, match="base='fedavg' is not an algorithm"):
        AlgorithmWrapper("fedavg")
