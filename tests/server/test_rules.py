# SPDX-License-Identifier: Apache-2.0
"""Server rules against torch's optimisers, scipy, numpy, plain loops and closed forms."""

import copy
import io
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats

from perada.server import (
    SERVER_RULES,
    Aggregation,
    FedAdagrad,
    FedAdam,
    FedAvgM,
    FedYogi,
    Mean,
    Median,
    ModifiedLocalGD,
    ServerRule,
    TrimmedMean,
    client_weights,
    make_rule,
    mean,
)
from tests.rejections import rejects

CLIENTS = 6
ROUNDS = 5
PARAMETERS = frozenset({"w", "scalar"})


def uploads(seed, clients=CLIENTS, dtype=torch.float64):
    """What clients send: parameters, a running variance, a counter."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(clients, 3, 2, generator=generator, dtype=dtype),
        "running_var": torch.rand(clients, 4, generator=generator, dtype=dtype) * 1e-3,
        "seen": torch.randint(0, 99, (clients,), generator=generator),
        "scalar": torch.randn(clients, generator=generator, dtype=dtype),
    }


def start(dtype=torch.float64):
    return {key: value[0] + 1 for key, value in uploads(99, dtype=dtype).items()} | {"elsewhere": torch.zeros(2)}


def weights(clients=CLIENTS):
    return client_weights("samples", range(1, clients + 1))


def run(rule, rounds=ROUNDS, dtype=torch.float64, state=None, first=0, previous=None):
    """States after each round; and what the rule keeps."""
    previous = previous or start(dtype)
    state = {} if state is None else state
    states = []
    for round in range(first, first + rounds):
        aggregation = Aggregation(uploads(round, dtype=dtype), weights(), previous, PARAMETERS, round, state)
        previous = previous | rule(aggregation)
        states.append(previous)
    return states, state


def numpy_mean(updates):
    return {key: np.average(value.double().numpy(), axis=0, weights=weights()) for key, value in updates.items()}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


RULES = {
    "mean": Mean(),
    "median": Median(),
    "trimmed": TrimmedMean(0.2),
    "momentum": FedAvgM(0.7, 0.5),
    "adagrad": FedAdagrad(0.3, 0.4, 1e-2),
    "adam": FedAdam(0.3, 0.4, 0.6, 1e-2),
    "yogi": FedYogi(0.3, 0.4, 0.6, 1e-2),
    "modified": ModifiedLocalGD(),
    "adam on median": FedAdam(0.3, 0.4, 0.6, 1e-2, aggregate=Median()),
    "momentum on adam": FedAvgM(0.7, 0.5, aggregate=FedAdam(0.3, 0.4, 0.6, 1e-2)),
    "modified on adam": ModifiedLocalGD(aggregate=FedAdam(0.3, 0.4, 0.6, 1e-2)),
    "modified on modified": ModifiedLocalGD(0.5, aggregate=ModifiedLocalGD(0.5)),
}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


@pytest.mark.parametrize("clients", [1, 2, 5, 8])
def test_median_is_numpys(clients):
    updates = uploads(0, clients)
    out = Median()(Aggregation(updates, weights(clients), start(), PARAMETERS, 0))
    for key in ("w", "running_var", "scalar"):
        np.testing.assert_array_equal(out[key].numpy(), np.median(updates[key].numpy(), axis=0))


@pytest.mark.parametrize(("clients", "trim"), [(6, 0.2), (10, 0.1), (5, 0.4), (7, 0.3)])
def test_trimmed_mean_is_scipys(clients, trim):
    updates = uploads(0, clients)
    out = TrimmedMean(trim)(Aggregation(updates, weights(clients), start(), PARAMETERS, 0))
    for key in ("w", "running_var", "scalar"):
        np.testing.assert_allclose(
            out[key].numpy(), stats.trim_mean(updates[key].numpy(), trim, axis=0), rtol=1e-12, atol=0
        )


@pytest.mark.parametrize("nonsense", [math.inf, -math.inf, math.nan, 1e30])
@pytest.mark.parametrize("rule", [Median(), TrimmedMean(0.2)])
def test_robust_rules_shrug_off_one_client_that_sends_nonsense(rule, nonsense):
    updates = uploads(0)
    updates["w"][2] = nonsense
    honest = np.delete(updates["w"].numpy(), 2, axis=0)
    out = rule(Aggregation(updates, weights(), start(), PARAMETERS, 0))["w"].numpy()
    assert (out >= honest.min(0)).all()
    assert (out <= honest.max(0)).all()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("lr", [1.0, 0.3])
def test_momentum_is_torchs_sgd_on_the_difference(lr, momentum):
    states, _ = run(FedAvgM(lr, momentum))
    for key in PARAMETERS:
        leaf = torch.nn.Parameter(start()[key].clone())
        optimizer = torch.optim.SGD([leaf], lr=lr, momentum=momentum)
        for round, state in enumerate(states):
            leaf.grad = leaf.detach() - torch.as_tensor(numpy_mean(uploads(round))[key])
            optimizer.step()
            torch.testing.assert_close(state[key], leaf.detach(), rtol=1e-12, atol=1e-12)


def test_adagrad_is_torchs_on_the_difference():
    """By default: torch's has no momentum."""
    states, _ = run(FedAdagrad(0.3, tau=1e-2))
    leaf = torch.nn.Parameter(start()["w"].clone())
    optimizer = torch.optim.Adagrad([leaf], lr=0.3, initial_accumulator_value=1e-4, eps=1e-2)
    for round, state in enumerate(states):
        leaf.grad = leaf.detach() - torch.as_tensor(numpy_mean(uploads(round))["w"])
        optimizer.step()
        torch.testing.assert_close(state["w"], leaf.detach(), rtol=1e-12, atol=1e-12)


def sign(x):
    return (x > 0) - (x < 0)


NEXT_V = {
    "adagrad": lambda v, delta: v + delta**2,
    "adam": lambda v, delta: 0.6 * v + 0.4 * delta**2,
    "yogi": lambda v, delta: v - 0.4 * delta**2 * sign(v - delta**2),
}


def adaptive_loop(kind, x, targets):
    """One coordinate of Reddi et al., Algorithm 2, in Python's floats: eta 0.3, beta1 0.4, beta2 0.6, tau 0.01."""
    m = 0.0
    v = 0.01**2
    path = []
    for target in targets:
        delta = target - x
        m = 0.4 * m + 0.6 * delta
        v = NEXT_V[kind](v, delta)
        x += 0.3 * m / (math.sqrt(v) + 0.01)
        path.append(x)
    return path


@pytest.mark.parametrize("aggregate", ["mean", "median"])
@pytest.mark.parametrize("kind", NEXT_V)
def test_adaptive_rules_are_a_loop_over_coordinates(kind, aggregate):
    rule = copy.copy(RULES[kind])
    rule.aggregate = make_rule(aggregate)
    states, _ = run(rule)
    for coordinate in np.ndindex(3, 2):
        sent = [uploads(round)["w"].numpy()[:, *coordinate] for round in range(ROUNDS)]
        targets = [np.average(u, weights=weights()) if aggregate == "mean" else np.median(u) for u in sent]
        expected = adaptive_loop(kind, start()["w"][coordinate].item(), map(float, targets))
        assert [s["w"][coordinate].item() for s in states] == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize("kind", ["momentum", "adagrad", "adam", "yogi", "momentum on adam"])
def test_optimisers_leave_statistics_and_counters_to_the_aggregate(kind):
    states, kept = run(RULES[kind])
    for round, state in enumerate(states):
        sent = uploads(round)
        torch.testing.assert_close(
            state["running_var"], torch.as_tensor(numpy_mean(sent)["running_var"]), rtol=1e-12, atol=0
        )
        assert state["running_var"].min() > 0
        assert state["seen"] == sent["seen"].max()
    assert {key for entry in kept.values() for key in entry} == PARAMETERS


@pytest.mark.parametrize(("alpha", "power"), [(None, 1.0), (None, 0.5), (0.3, 1.0)])
def test_modified_local_gd_is_its_closed_form(alpha, power):
    states, _ = run(ModifiedLocalGD(alpha, power))
    for k, state in enumerate(states, 1):
        share = alpha if alpha else 1 - 1 / (k + 1) ** power
        target = numpy_mean(uploads(k - 1))
        for key in ("w", "scalar", "running_var"):
            expected = (1 - share) * start()[key].numpy() + share * target[key]
            np.testing.assert_allclose(state[key].numpy(), expected, rtol=1e-13)
        assert state["seen"] == uploads(k - 1)["seen"].max()


def test_the_initial_state_is_remembered_even_if_it_is_overwritten_in_place():
    previous = start()
    state = {}
    initial = previous["w"].clone()
    for round in range(2):
        out = ModifiedLocalGD(0.5)(Aggregation(uploads(round), weights(), previous, PARAMETERS, round, state))
        for key, value in out.items():
            previous[key].copy_(value)
    expected = (initial.numpy() + numpy_mean(uploads(1))["w"]) / 2
    np.testing.assert_allclose(previous["w"].numpy(), expected, rtol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inner", [Mean(), Median()])
@pytest.mark.parametrize("outer", [FedAvgM, ModifiedLocalGD])
def test_neutral_options_change_no_bit(outer, inner, dtype):
    rule = FedAvgM(1.0, 0.0, inner) if outer is FedAvgM else ModifiedLocalGD(1.0, aggregate=inner)
    assert all(equal(one, other) for one, other in zip(run(rule, 3, dtype)[0], run(inner, 3, dtype)[0], strict=True))


def test_the_mean_is_the_mean():
    states, kept = run(Mean())
    assert not kept
    assert all(equal(s, start() | mean(uploads(r), weights())) for r, s in enumerate(states))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@every_rule
def test_half_and_single_precision_follow_double(rule, dtype):
    """The same sequence of rounds on the rounded numbers in float64, up to what the dtype can hold after each round."""
    state = {}
    exact_state = {}
    previous = start(dtype)
    for round in range(ROUNDS):
        sent = uploads(round, dtype=dtype)
        exact = {key: value.double() if value.is_floating_point() else value for key, value in sent.items()}
        wide = {key: value.double() for key, value in previous.items()}
        out = rule(Aggregation(sent, weights(), previous, PARAMETERS, round, state))
        expected = rule(Aggregation(exact, weights(), wide, PARAMETERS, round, exact_state))
        for key, value in out.items():
            assert value.dtype == sent[key].dtype
            if value.is_floating_point():
                room = 4 * torch.finfo(dtype).eps
                torch.testing.assert_close(value.double(), expected[key], rtol=room, atol=room)
            else:
                assert value == sent[key].max()
        previous = previous | out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", [FedAvgM(0.3), FedAdam(0.1, tau=1e-5), FedYogi(0.1, tau=1e-5), ModifiedLocalGD(0.3)])
def test_half_precision_is_rounded_once(rule, dtype):
    """The step of one client's small change is computed in a wider format, in which neither τ² nor Δ² is zero."""
    generator = torch.Generator().manual_seed(0)
    previous = torch.randn(200, generator=generator).to(dtype)
    update = (previous.double() * (1 + 2**-6 * torch.randn(200, generator=generator, dtype=torch.float64))).to(dtype)

    def step(convert):
        aggregation = Aggregation(
            {"w": convert(update[None])}, weights(1), {"w": convert(previous)}, frozenset({"w"}), round=0, state={}
        )
        return rule(aggregation)["w"]

    exact = step(torch.Tensor.double)
    assert torch.equal(step(torch.clone), exact.to(dtype))


def test_the_middle_of_two_large_numbers_fits_in_half_precision():
    largest = torch.tensor([[60000.0], [60000.0]], dtype=torch.float16)
    aggregation = Aggregation(
        {"w": largest}, weights(2), {"w": torch.zeros(1, dtype=torch.float16)}, frozenset({"w"}), 0
    )
    assert Median()(aggregation)["w"].item() == largest[0].item()


@every_rule
def test_shapes_names_and_inputs(rule):
    updates = uploads(0)
    previous = start()
    before = copy.deepcopy((updates, previous))
    out = rule(Aggregation(updates, weights(), previous, PARAMETERS, 0))
    assert list(out) == list(updates)
    assert {key: value.shape for key, value in out.items()} == {key: v.shape[1:] for key, v in updates.items()}
    assert equal(updates, before[0])
    assert equal(previous, before[1])


@every_rule
def test_a_saved_and_loaded_state_goes_on_where_it_was(rule):
    straight, _ = run(rule, 4)
    half, state = run(rule, 2)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    resumed, _ = run(copy.deepcopy(rule), 2, state=loaded, first=2, previous=half[-1])
    assert all(equal(one, other) for one, other in zip(straight[2:], resumed, strict=True))


def test_the_rules_of_a_composition_keep_their_tensors_apart():
    """Momentum on Adam: Adam moves as it would alone from the same states, and momentum is SGD on that move."""
    rule = RULES["momentum on adam"]
    adam = RULES["adam"]
    previous = start()
    state = {}
    inner = {}
    u = 0.0
    for round in range(ROUNDS):
        sent = uploads(round)
        target = adam(Aggregation(sent, weights(), previous, PARAMETERS, round, inner))
        u = 0.5 * u + (target["w"] - previous["w"])
        out = rule(Aggregation(sent, weights(), previous, PARAMETERS, round, state))
        torch.testing.assert_close(out["w"], previous["w"] + 0.7 * u, rtol=1e-12, atol=1e-12)
        previous = previous | out


def test_a_part_of_the_names_is_enough():
    sent = {"w": uploads(0)["w"]}
    for rule in RULES.values():
        assert list(rule(Aggregation(sent, weights(), start(), PARAMETERS, 0))) == ["w"]


def test_rules_say_whether_weights_count():
    unweighted = {name for name in SERVER_RULES if not make_rule(name).weighted}
    assert unweighted == {"median", "trimmed_mean", "krum", "fltrust"}
    assert not FedAdam(aggregate=Median()).weighted
    assert not ModifiedLocalGD(aggregate=FedAvgM(aggregate=TrimmedMean())).weighted


@pytest.mark.parametrize("rule", [TrimmedMean(), FedAdam(aggregate=TrimmedMean(0.1))])
def test_too_few_clients_to_trim_are_rejected(rule):
    rule.check(10)
    with pytest.raises(ValueError, match=r"trim=0\.1 .*9 clients"):
        rule.check(9)


@pytest.mark.parametrize("clients", [1, 2, 100])
def test_other_rules_take_any_number_of_clients(clients):
    """They accept it at set-up, and what they make of that many updates is finite."""
    of_many_clients = {"trimmed_mean", "krum"}
    of_labelled_images_or_factors = {"fltrust", "svd", "lora_fair"}
    for name in SERVER_RULES.keys() - of_many_clients - of_labelled_images_or_factors:
        rule = make_rule(name)
        rule.check(clients)
        sent = {"w": uploads(0, clients)["w"]}
        result = rule(Aggregation(sent, weights(clients), start(), PARAMETERS, 0))
        assert result["w"].shape == (3, 2)
        assert result["w"].isfinite().all(), name


@pytest.mark.parametrize(
    ("rule", "option", "value"),
    [
        (TrimmedMean, "trim", 0.0),
        (TrimmedMean, "trim", 0.5),
        (FedAvgM, "lr", 0.0),
        (FedAvgM, "momentum", 1.0),
        (FedAvgM, "momentum", -0.1),
        (FedAvgM, "aggregate", "median"),
        (FedAdagrad, "tau", 0.0),
        (FedAdagrad, "beta1", 1.0),
        (FedAdam, "lr", math.nan),
        (FedAdam, "lr", math.inf),
        (FedAdam, "beta2", 1.0),
        (FedYogi, "beta2", -1.0),
        (ModifiedLocalGD, "alpha", 0.0),
        (ModifiedLocalGD, "alpha", 1.1),
        (ModifiedLocalGD, "power", 0.0),
    ],
)
def test_options_that_cannot_work_are_rejected(rule, option, value):
    with rejects(option, value):
        rule(**{option: value})


def test_rules_have_names():
    for name, rule in SERVER_RULES.items():
        assert type(make_rule(name)) is rule
        assert isinstance(make_rule(name), ServerRule)
    own = FedAdam(lr=1.0)
    assert make_rule(own) is own


def test_unknown_names_are_rejected():
    with rejects("server_rule", "medain"):
        make_rule("medain")
    with rejects("server_rule", "bulyan"):
        make_rule("bulyan")


@pytest.mark.parametrize(("trim", "clients"), [("0.29", 100), ("0.07", 100), ("0.35", 20), ("0.1", 9)])
def test_the_share_that_is_trimmed_is_the_decimal_number_that_was_given(trim, clients):
    """0.29 · 100 is 28.999999999999996 in floating point."""
    cut = math.floor(Fraction(trim) * clients)
    values = 2.0 ** torch.arange(clients)
    kept = TrimmedMean(float(trim))._reduce_sorted(values.double().unsqueeze(1))
    torch.testing.assert_close(kept, values[cut : clients - cut].double().mean(0, keepdim=True), rtol=1e-12, atol=0)
