# SPDX-License-Identifier: Apache-2.0
"""Runs with rules on the products of LoRA's factors against plain loops with dense products; rejections at set-up."""

import re

import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint

import perada
from perada.algorithms import FedEnsemble, FFALoRA
from perada.data import Phase
from perada.privacy import ClientPrivacy, Privacy
from perada.results.report import title
from perada.server import SVD, LoRAFair, NormClipping
from perada.studies.report.records import run_report

from .problems import BATCH, LORA, LR_LOCAL, SIZES, assert_equal, finetune, reference, task

A = "conv.lora_A.default.weight"
B = "conv.lora_B.default.weight"
SCALE = LORA.lora_alpha / LORA.r


def product(state):
    return SCALE * state[B].flatten(1) @ state[A].flatten(1)


def svd(updates, weights, ref):
    mean = ref.mean(updates, weights)
    mean_product = ref.mean([{"": product(update)} for update in updates], weights)[""]
    u, s, vt = torch.linalg.svd(mean_product / SCALE, full_matrices=False)
    signs = torch.tensor([1.0 if row[row.abs().argmax()] > 0 else -1.0 for row in vt]).double()
    up = (u * s * signs)[:, : LORA.r]
    down = (vt * signs[:, None])[: LORA.r]
    return mean | {A: down.reshape(mean[A].shape), B: up.reshape(mean[B].shape)}


def lora_fair(updates, weights, ref):
    mean = ref.mean(updates, weights)
    mean_product = ref.mean([{"": product(update)} for update in updates], weights)[""]
    up = mean[B].flatten(1)
    down = mean[A].flatten(1)
    # The ridge regression as least squares on more rows.
    rows = torch.cat([down.T, 0.1 * torch.eye(LORA.r).double()])
    expected = torch.cat([(mean_product / SCALE).T, 0.1 * up.T])
    return mean | {B: torch.linalg.lstsq(rows, expected).solution.T.reshape(mean[B].shape)}


def loop(rule, together, weighted):
    """FedAvg with a rule: the global state, and for each round the residual of the means and the error of the rule."""
    ref = reference("net-adapter")
    served = perada.FederatedDataModule(task(), batch_size=BATCH)
    served.configure_rounds(seed=0, clients_per_round=together, phases=[Phase(epochs=2)])
    w = ref.initial
    result = []
    for round in range(3):
        client_batches = ref.batches(served.plan(round))
        updates = [ref.train(w, client_batches[m], LR_LOCAL) for m in client_batches]
        weights = [SIZES[m] for m in client_batches] if weighted else None
        mean_product = ref.mean([{"": product(update)} for update in updates], weights)[""]
        w = rule(updates, weights, ref)
        mean = ref.mean(updates, weights)
        errors = [float((mean_product - product(state)).norm() / mean_product.norm()) for state in (mean, w)]
        result.append(errors)
    return w, result


@pytest.mark.every(11)
@pytest.mark.parametrize("engine", ["folded", "loop"])
@pytest.mark.parametrize(("together", "weighted"), [(2, True), (None, False)])
@pytest.mark.parametrize(("rule", "plain"), [("svd", svd), (LoRAFair(0.01), lora_fair), ("mean", None)])
def test_runs_equal_a_loop_with_dense_products(rule, plain, together, weighted, engine):
    weighting = "samples" if weighted else "uniform"
    options = {"weighting": weighting, "clients_per_round": together, "diagnostics": ["lora_residual"]}
    run = finetune("fedavg", "net-adapter", engine, server_rule=rule, **options)
    expected, errors = loop(plain or (lambda updates, weights, ref: ref.mean(updates, weights)), together, weighted)
    state = run.state("global")
    assert state.keys() == expected.keys()
    for key, value in state.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-9, atol=1e-9)
    for record, (by_name, left) in zip(run.metrics["rounds"], errors, strict=True):
        assert record["updates/lora_residual"] == pytest.approx(by_name, rel=1e-7)
        assert record.get("updates/lora_error", by_name) == pytest.approx(left, rel=1e-7)
        assert left < by_name or plain is None


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["perada", "ditto", "scaffold", "fedper", "feddyn", "apfl", "fedprox"])
def test_the_rule_goes_with_other_algorithms(algorithm):
    """What is distilled, or moved on from the result, is another matter."""
    for rule in (SVD(), LoRAFair()):
        run = finetune(algorithm, "net-adapter", server_rule=rule, rounds=2, diagnostics=["lora_residual"])
        assert all(0 < record["updates/lora_error"] < 1 for record in run.metrics["rounds"])
        assert all(record["updates/lora_residual"] > 0 for record in run.metrics["rounds"])


def test_each_of_several_global_models_is_aggregated_so():
    run = finetune(FedEnsemble(modes=2, strata=2), "net-adapter", server_rule=SVD(), rounds=2)
    assert all("updates/lora_error" in record for record in run.metrics["rounds"])


@pytest.mark.every(2)
@pytest.mark.parametrize("algorithm", ["ffa_lora", "rolora"])
def test_with_one_factor_alike_there_is_no_residual(algorithm):
    run = finetune(algorithm, "net-adapter", diagnostics=["lora_residual"])
    assert all(record["updates/lora_residual"] < 1e-14 for record in run.metrics["rounds"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning")
@pytest.mark.parametrize("rule", [SVD(), LoRAFair()])
def test_a_run_is_resumed_to_the_bit(tmp_path, rule):
    def run(rounds, **options):
        saves = {"callbacks": [ModelCheckpoint(tmp_path, "saved")], "enable_checkpointing": True, "server_rule": rule}
        return finetune("fedavg", "net-adapter", rounds=rounds, momentum=0.5, **saves | options)

    uninterrupted = run(4)
    run(2)
    again = run(4, ckpt_path=str(tmp_path / "saved.ckpt"))
    assert_equal(again.state("global"), uninterrupted.state("global"))
    assert again.metrics == uninterrupted.metrics
    with pytest.raises(ValueError, match="rule"):
        run(6, ckpt_path=str(tmp_path / "saved.ckpt"), server_rule="median")


NOISE = {"noise_multiplier": 0.5, "max_norm": 0.5, "delta": 1e-3, "secure_rng": False}


@pytest.mark.filterwarnings("ignore:.*(delta=|secure_rng|test mode|repeat).*:UserWarning")
def test_images_are_private_and_clients_are_not():
    private = {"adapter": LORA, "server_rule": SVD(), "rounds": 2, "privacy": Privacy(**NOISE)}
    run = finetune("fedavg", "net-full", **private, diagnostics=["lora_residual"])
    assert all(0 < record["updates/lora_error"] < 1 for record in run.metrics["rounds"])
    for rule in (SVD(), LoRAFair(), NormClipping(aggregate=SVD())):
        message = f"the server rule {rule.kind}: it is not a function of the clients' mean"
        with pytest.raises(ValueError, match=rf"client_privacy.*{message}"):
            finetune("fedavg", "net-adapter", server_rule=rule, client_privacy=ClientPrivacy(**NOISE))


@pytest.mark.parametrize(
    ("algorithm", "problem", "options", "message"),
    [
        (
            "fedavg",
            "net-full",
            {"server_rule": "svd"},
            "server_rule=SVD on Mean: the adapter has no LoRA factors",
        ),
        ("fedavg", "net-biases", {"server_rule": NormClipping(aggregate=LoRAFair())}, "choose adapter='lora', without"),
        (
            "fedsa_lora",
            "net-adapter",
            {"server_rule": "svd"},
            "clients of FedSALoRA do not send both A and B of a layer",
        ),
        (
            "rolora",
            "net-adapter",
            {"server_rule": "lora_fair"},
            "clients of RoLoRA do not send both A and B of a layer",
        ),
        (FFALoRA(), "net-adapter", {"server_rule": "svd"}, "clients of FFALoRA of FedAvg do not send both A and B"),
        ("standalone", "net-adapter", {"server_rule": "svd"}, "clients of Standalone do not send both A and B"),
        (
            "fedalt_row",
            "net-branches",
            {"server_rule": "svd"},
            "clients of RestOfWorld send shifted means of factors",
        ),
        (
            "fedavg",
            "net-full",
            {"diagnostics": ["lora_residual"]},
            "lora_residual cannot be measured: the adapter has no LoRA factors",
        ),
        (
            "fedsa_lora",
            "net-adapter",
            {"diagnostics": ["lora_residual"]},
            "clients of FedSALoRA do not send both A and B",
        ),
        (
            "fed_ensemble",
            "net-adapter",
            {"diagnostics": ["lora_residual"]},
            "FedEnsemble does not average what clients send",
        ),
        ("standalone", "net-adapter", {"diagnostics": ["lora_residual"]}, "Standalone"),
        ("fedalt_row", "net-adapter", {"diagnostics": ["lora_residual"]}, "choose adapter='dual_lora'"),
        (
            "fedavg",
            "net-adapter",
            {"diagnostics": ["lora_residual"], "client_privacy": ClientPrivacy(**NOISE)},
            "with client_privacy nobody may see a client's models",
        ),
    ],
)
def test_what_cannot_be_is_rejected_at_setup(algorithm, problem, options, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        finetune(algorithm, problem, **options)
    assert "\n" not in str(caught.value)


def test_all_diagnostics_say_nothing_of_lora_where_there_is_none(caplog):
    with caplog.at_level("INFO", logger="pytorch_lightning"):
        (record,) = finetune("fedavg", "net-full", rounds=1, diagnostics=True).metrics["rounds"]
    assert "updates/lora_residual" not in record
    assert not [one for one in caplog.records if "lora" in one.getMessage()]
    (record,) = finetune("fedavg", "net-adapter", rounds=1, diagnostics=True).metrics["rounds"]
    assert record["updates/lora_residual"] > 0


def test_the_report_of_a_run_shows_both(tmp_path):
    options = {"server_rule": SVD(), "diagnostics": ["lora_residual"], "rounds": 2}
    run = finetune("fedavg", "net-adapter", logger=True, default_root_dir=str(tmp_path), **options)
    table = [line.split("|")[1:-1] for line in run_report(tmp_path / "lightning_logs/version_0").splitlines()]
    header, _, *lines = [[cell.strip() for cell in row] for row in table]
    for record, line in zip(run.metrics["rounds"], lines, strict=True):
        for name in ("updates/lora_error", "updates/lora_residual"):
            assert float(line[header.index(title(name))]) == pytest.approx(record[name], rel=1e-3)
