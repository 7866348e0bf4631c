# SPDX-License-Identifier: Apache-2.0
"""What is trained on a GPU is what is trained on the CPU, and within a step the host does not wait for it."""

import warnings

import pytest
import pytorch_lightning as pl
import torch

import perada
from perada.federation.settings import StoreKind
from tests.options import sections

from .algorithms.problems import LORA, finetune, network

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
]

ON_GPU = {"accelerator": "gpu", "devices": 1}


def states(run):
    """All global and personal ones."""
    return run.states("global") + run.states("personal")


def assert_close(found, expected, tolerance):
    for left, right in zip(states(found), states(expected), strict=True):
        assert left.keys() == right.keys()
        for key, value in right.items():
            torch.testing.assert_close(left[key], value, rtol=0, atol=tolerance)


@pytest.mark.parametrize("engine", ["folded", "loop"])
@pytest.mark.parametrize("algorithm", ["perada", "feddf", "scaffold", "moon", "fedrep", "fedbe"])
def test_rounds_are_those_of_the_cpu(algorithm, engine):
    """In float64, dropout included: a client's draws do not depend on the device."""
    here, there = (finetune(algorithm, engine=engine, dropout=0.3, **on) for on in ({}, ON_GPU))
    assert_close(there, here, 1e-9)
    start = network("net").state_dict()
    assert any((value - start[key]).abs().max() > 1e-3 for key, value in states(here)[0].items())


@pytest.mark.parametrize("rule", ["mean", "svd", "lora_fair", "median", "geometric_median"])
def test_rounds_of_lora_are_those_of_the_cpu(rule):
    """Its norms are frozen."""
    here, there = (finetune("fedavg", adapter=LORA, server_rule=rule, **on) for on in ({}, ON_GPU))
    assert_close(there, here, 1e-9)
    assert any(value.abs().max() > 1e-3 for key, value in states(here)[0].items() if "lora_B" in key)


@pytest.mark.parametrize("store", ["host", "disk"])
def test_where_states_are_kept_makes_no_difference(store: StoreKind, tmp_path):
    kept, expected = (
        finetune("perada", client_store=kind, default_root_dir=tmp_path / kind, **ON_GPU) for kind in (store, "device")
    )
    assert_close(kept, expected, 0.0)


class NoWaiting(pl.Callback):
    """An error where the host waits for the GPU within a step, but for the first steps, which prepare much."""

    steps = 0

    def setup(self, trainer, pl_module, stage):
        trainer.callbacks.sort(key=lambda callback: callback is not self)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.current_epoch:
            torch.cuda.set_sync_debug_mode("error")
            self.steps += 1

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        torch.cuda.set_sync_debug_mode("default")

    on_exception = on_train_batch_end


@pytest.mark.parametrize("algorithm", ["perada", "fedavg", "scaffold", "apfl"])
def test_a_local_step_never_waits(algorithm):
    watch = NoWaiting()
    try:
        finetune(algorithm, callbacks=[watch], **ON_GPU)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert watch.steps >= 4


class Waits(pl.Callback):
    """Has torch warn of it where the host waits for the GPU in the second round, its evaluation left out."""

    def on_train_epoch_start(self, trainer, pl_module):
        torch.cuda.set_sync_debug_mode("warn" if trainer.current_epoch == 1 else "default")

    def on_train_epoch_end(self, trainer, pl_module):
        torch.cuda.set_sync_debug_mode("default")


def waits(problem):
    """How often a round's end waits."""
    with warnings.catch_warnings(record=True) as result:
        warnings.simplefilter("always")
        finetune("perada", problem, rounds=2, callbacks=[Waits()], **ON_GPU)
    torch.cuda.set_sync_debug_mode("default")
    places = [f"{one.filename}:{one.lineno}" for one in result if "synchroniz" in str(one.message)]
    return [place for place in places if "pytorch_lightning" not in place]  # its log makes a tensor of each number


def test_the_end_of_a_round_does_not_wait_for_each_tensor():
    few = waits("linear-full")
    many = waits("net-full")
    assert 0 < len(few) and len(many) <= len(few) + 2, "\n".join(many)


@pytest.mark.parametrize(("precision", "bound"), [("bf16-mixed", 0.1), ("16-mixed", 0.02)])
def test_half_precision_stays_near_single_precision(precision, bound, tiny):
    def trained(**options):
        arguments = {"algorithm": "perada", "rounds": 2, **tiny.options, **ON_GPU, "logger": False, **options}
        return perada.finetune(tiny.net(), tiny.data(), **sections(enable_checkpointing=False, **arguments))

    single = trained()
    half = trained(precision=precision)
    before = dict(tiny.net().named_parameters())
    for key, value in single.state("global").items():
        moved = (value - before[key].detach()).norm()
        assert 0 < (half.state("global")[key] - value).norm() < 3 * bound * moved


def test_a_checkpoint_of_a_gpu_is_resumed_on_the_cpu(tmp_path):
    uninterrupted = finetune("ditto", rounds=3, dropout=0.3)
    finetune("ditto", rounds=2, dropout=0.3, enable_checkpointing=True, default_root_dir=tmp_path, **ON_GPU)
    (last,) = tmp_path.rglob("last.ckpt")
    assert_close(finetune("ditto", rounds=3, dropout=0.3, ckpt_path=str(last)), uninterrupted, 1e-9)


def test_what_a_run_gives_is_on_the_cpu():
    """As Lightning leaves the model."""
    run = finetune("ditto", rounds=1, **ON_GPU)
    assert {value.device.type for state in states(run) for value in state.values()} == {"cpu"}
    x = torch.randn(2, 1, 6, 6, dtype=torch.float64)
    assert run.global_model()(x).isfinite().all() and run.personal(0)(x).isfinite().all()


def test_a_saved_run_predicts_the_same_on_both(tmp_path):
    random = torch.Generator().manual_seed(0)
    x = torch.rand(3, 8, 3, 32, 32, generator=random)
    y = torch.arange(8) % 3
    data = perada.FederatedData([torch.utils.data.TensorDataset(one, y) for one in x], num_classes=3)
    arguments = {"algorithm": "ditto", "rounds": 1, "batch_size": 4, "pretrained": False, "logger": False, **ON_GPU}
    trained = perada.finetune(
        "test_resnet", data, **sections(enable_checkpointing=False, enable_progress_bar=False, **arguments)
    )
    run = perada.Run.load(trained.save(tmp_path / "run"))
    for client in (None, 1):
        actual, expected = (run.predict(x[0], client, device=device).probabilities for device in ("cuda", "cpu"))
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-3)  # a GPU convolves in TF32
