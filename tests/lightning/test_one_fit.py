# SPDX-License-Identifier: Apache-2.0
"""A loop belongs to one module, one data module and one fit: rounds, noise and ledgers begin once."""

import copy
import pickle

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.tuner.tuning import Tuner
from torch import nn
from torch.utils.data import TensorDataset

import perada
from perada.algorithms import PerAda
from perada.lightning import FederatedLoop
from perada.privacy import Privacy, history_epsilon
from tests.options import sections

PIXELS = 16
CLASSES = 3
SIGMA = 1000.0
PLAIN = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
AGAIN = r"this FederatedLoop has already been fitted.*create a new FederatedLoop"
OTHERS = r"FederatedLoop.*FederatedClassifier"


def data(images=8, clients=2):
    random = torch.Generator().manual_seed(0)
    part = TensorDataset(torch.randn(images, 1, 1, PIXELS, generator=random), torch.arange(images) % CLASSES)
    return perada.FederatedDataModule(perada.FederatedData([part] * clients, [part] * clients), batch_size=4)


def module():
    layer = nn.Linear(PIXELS, CLASSES, bias=False)
    nn.init.zeros_(layer.weight)
    return perada.FederatedClassifier(nn.Sequential(nn.Flatten(), layer), "full")


def loop(privacy=True, **options):
    private = Privacy(noise_multiplier=SIGMA, delta=1e-3, secure_rng=False) if privacy is True else privacy or None
    training = perada.Training(lr_local=0.1, lr_personal=0.1)
    return FederatedLoop(PerAda(distill=False), training=training, privacy=private, **options)


def trainer(one, rounds=1, **options):
    return pl.Trainer(callbacks=[one], max_epochs=rounds, **PLAIN | options)


def assert_rejected(message, call):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("privacy", [True, False])
def test_another_fit_is_rejected_and_changes_nothing(privacy):
    """By the same trainer or another one, with or without more rounds, twice and a third time."""
    one = loop(privacy)
    network = module()
    served = data()
    first = trainer(one)
    first.fit(network, served)
    before = one.outcome(network)
    state = before.state("global")
    metrics = copy.deepcopy(before.metrics)
    for other in (first, trainer(one), trainer(one, 5)):
        assert_rejected(AGAIN, lambda other=other: other.fit(network, served))
        assert_rejected(AGAIN, lambda other=other: other.fit(network, data()))
    first.fit_loop.max_epochs = 3
    assert_rejected(AGAIN, lambda: first.fit(network, served))
    after = one.outcome(network)
    assert after.metrics == metrics
    assert all(torch.equal(after.state("global")[key], state[key]) for key in state)


def test_a_trainer_has_one_loop():
    two = pl.Trainer(callbacks=[loop(), loop()], max_epochs=1, **PLAIN)
    assert_rejected(
        "several FederatedLoops",
        lambda: two.fit(module(), data()),
    )


def test_training_in_inference_mode_is_rejected_before_it_begins():
    one = loop()
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"gradients.*inference_mode"):
        trainer(one).fit(module(), data())
    trainer(one).fit(module(), data())


def test_noise_does_not_cancel_in_the_difference_of_two_rounds():
    """Of one fit of two rounds, on clients whose images have no gradient: seeded noise is another in each round."""
    states = []

    class Kept(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            states.append(next(iter(pl_module.federation.global_state.values())).clone())

    dark = TensorDataset(torch.zeros(8, 1, 1, PIXELS), torch.arange(8) % CLASSES)
    served = perada.FederatedDataModule(perada.FederatedData([dark] * 2), batch_size=4)
    one = loop()
    network = module()
    pl.Trainer(callbacks=[one, Kept()], max_epochs=2, **PLAIN).fit(network, served)
    moves = states[0], states[1] - states[0]
    size = float(moves[0].norm())
    assert float((moves[1] - moves[0]).norm()) > size
    assert float((moves[1] + moves[0]).norm()) > size


def test_a_loop_does_not_change_its_module_or_data():
    one = loop()
    network = module()
    served = data()
    trainer(one).fit(network, served)
    for call in (trainer(one).validate, trainer(one).test):
        assert_rejected(OTHERS, lambda call=call: call(module(), served))
    for call in (trainer(one).validate, trainer(one).test):
        assert_rejected(OTHERS, lambda call=call: call(network, data()))
    other = loop()
    assert_rejected(OTHERS, lambda: trainer(other).fit(network, served))
    # Nor one with the very same algorithm, whose states it would take for its own.
    same = FederatedLoop(one.algorithm, privacy=one.privacy)
    assert_rejected(OTHERS, lambda: trainer(same).fit(network, served))
    trainer(one).validate(network, served, verbose=False)
    trainer(one).test(network, served, verbose=False)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
@pytest.mark.every(3)
def test_copies_of_a_loop(copied):
    """One made before the fit is a loop of its own, with a history of its own; one made after it has been fitted."""
    fresh = loop()
    network = module()
    served = data()
    early = copied(fresh)
    trainer(fresh).fit(network, served)
    assert_rejected(OTHERS, lambda: trainer(early).fit(network, served))
    trainer(early).fit(module(), served)
    assert len(fresh.history) == len(early.history) == 1
    late = copy.copy(fresh)
    assert_rejected(AGAIN, lambda: trainer(late).fit(network, served))
    assert_rejected(AGAIN, lambda: trainer(late).fit(module(), served))


def test_a_copy_of_all_objects_after_the_fit_has_been_fitted():
    one = loop()
    network = module()
    served = data()
    trainer(one).fit(network, served)
    other, own, its = copy.deepcopy((one, network, served))
    assert_rejected(AGAIN, lambda: trainer(other).fit(own, its))


def test_one_data_module_serves_one_loop_after_the_other():
    served = data()
    runs = [perada.finetune(module().backbone, served, **sections(adapter="full", rounds=1, **PLAIN)) for _ in range(3)]
    first, *others = [next(iter(run.state("global").values())) for run in runs]
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.slow
@pytest.mark.parametrize("privacy", [{"noise_multiplier": 4.0}, {"target_epsilon": 4.0}])
def test_an_evaluation_before_the_fit_does_not_fix_its_plan(privacy):
    """Validated by a trainer of one round, or of 1,000 as by default, and fitted for three."""
    expected = None
    for before in (None, 1, 1000):
        one = loop(Privacy(delta=1e-3, **privacy))
        network = module()
        served = data()
        if before:
            trainer(one, before).validate(network, served, verbose=False)
        trainer(one, 3).fit(network, served)
        record = one.outcome(network).info["privacy"]["sample"]
        (sigma, *_), (spent, *_) = record["noise_multipliers"], record["release"]
        assert spent == pytest.approx(history_epsilon({(sigma, 0.5): 2 * 2 * 3}, 1e-3), rel=1e-9)
        assert expected in (None, (sigma, spent))
        expected = sigma, spent
        assert spent <= privacy.get("target_epsilon", 100)


@pytest.mark.slow
def test_what_was_loaded_for_an_evaluation_is_not_trained_from_the_first_round(tmp_path):
    one = loop()
    network = module()
    served = data()
    saving = trainer(one, 2)
    saving.fit(network, served)
    saved = str(tmp_path / "saved.ckpt")
    saving.save_checkpoint(saved)
    other = loop()
    own = module()
    its = data()
    trainer(other, 3).validate(own, its, ckpt_path=saved, verbose=False)
    assert_rejected("holds 2 rounds of a checkpoint that was evaluated", lambda: trainer(other, 3).fit(own, its))
    trainer(other, 3).fit(own, its, ckpt_path=saved)
    assert [record["round"] for record in other.history] == [0, 1, 2]
    again = loop()
    its_own = module()
    theirs = data()
    trainer(again, 3).fit(its_own, theirs, ckpt_path=saved)
    (one,), (two,) = (made.outcome(net).state("global").values() for net, made in ((own, other), (its_own, again)))
    assert torch.equal(one, two)


def test_a_trainer_that_has_counted_other_epochs_is_rejected():
    network = module()
    served = data()
    shared = trainer(loop(), 1)
    shared.fit(network, served)
    shared.callbacks[:] = [loop()]
    shared.fit_loop.max_epochs = 2
    assert_rejected(
        "round 2 cannot be trained after 0 rounds: the Trainer's own count differs",
        lambda: shared.fit(module(), data()),
    )


class Meddler(pl.Callback):
    """Changes the data under way."""

    def __init__(self, change):
        self.change = change

    def on_train_epoch_end(self, trainer, pl_module):
        self.change(trainer.datamodule)


def use_for_another_run(served):
    perada.finetune(module().backbone, served, **sections(adapter="full", rounds=1, local_steps=9, **PLAIN))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda served: setattr(served, "batch_size", 8), "batch_size=8 .*, but the ledgers assume batch_size=4"),
        (use_for_another_run, r"round 2 has \(\(9, 9\),\) client steps .* the ledgers count \(\(2, 2\),\)"),
    ],
)
def test_data_that_change_under_way_are_rejected(change, message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        pl.Trainer(callbacks=[loop(), Meddler(change)], max_epochs=2, **PLAIN).fit(module(), data())


def test_trial_steps_are_rejected():
    message = "BatchSizeFinder is not supported"
    tuned = trainer(loop())
    assert_rejected(message, lambda: Tuner(tuned).scale_batch_size(module(), datamodule=data()))
    finding = pl.Trainer(callbacks=[loop(), pl.callbacks.BatchSizeFinder()], max_epochs=1, **PLAIN)
    assert_rejected(message, lambda: finding.fit(module(), data()))
