# SPDX-License-Identifier: Apache-2.0
"""Local steps that are captured and repeated train the same states as usual ones, to the bit.

A tape takes the place of CUDA graphs. tests/test_cuda.py says the same of a real GPU.
"""

import sys

import pytest
import torch

from perada.engine.step_graphs import StepGraphs
from perada.federation.settings import LocalTraining
from tests.methods import NAMED
from tests.tape import Tape

from .simulation import Case, case_of, simulate

EVEN = (16, 8, 8)
"""Numbers of images of clients whose batches of 4 are full: three, then one of them train on in the last steps."""
UNEVEN = (16, 3, 10)
"""Numbers of images of which one fills no batch: its rows are padded as long as the others train beside it."""
SGD = {"optimizer": "sgd", "lr": {"personal": 0.1, "local": 0.05}, "momentum": 0.9, "weight_decay": 0.01}


@pytest.fixture
def tape(monkeypatch):
    """A tape, by which steps are captured where that is asked for."""
    tape = Tape()
    monkeypatch.setattr("perada.federation.local_trainer.open_graphs", lambda device, **facts: StepGraphs(tape))
    # A GPU, where steps are captured, has one worker. On a CPU with more threads, chunks would share the tape.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tape
    torch.set_num_threads(threads)


def final_states(case, graphs, rounds=2, training=SGD, **options):
    """All states after some rounds, and the rounds' losses."""
    torch.manual_seed(0)  # LoRA draws its factors from torch's global stream
    simulation = case.simulate(epochs=3, training=LocalTraining(**training, cuda_graphs=graphs), **options)
    losses = []
    for round in range(rounds):
        metrics = simulation.run_round(round).metrics
        losses.append({name: value for name, value in metrics.items() if name.startswith("train/")})
    simulation.personalize()
    federation = simulation.federation
    states = {"global": federation.global_state, "personal": federation.personal_states(range(federation.num_clients))}
    states |= {f"kept {role}": state for role, state in federation.store.gather(range(federation.num_clients)).items()}
    return states, losses


def assert_same(captured, usual):
    states, losses = captured
    expected_states, expected_losses = usual
    assert losses == expected_losses
    assert states.keys() == expected_states.keys()
    for role, state in expected_states.items():
        assert state.keys() == states[role].keys()
        for name, value in state.items():
            assert torch.equal(states[role][name], value), f"{role} {name}"


QUICK = ("perada", "apfl", "scaffold", "fedrep", "pfedme", "fedrod", "moon")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case_of(name), marks=[] if name in QUICK else pytest.mark.slow) for name in NAMED],
    ids=str,
)
def test_captured_steps_train_the_same_states(case, tape):
    """With dropout, moments and BatchNorm."""
    usual = final_states(case, graphs=False, sizes=EVEN)
    assert tape.captured == 0
    captured = final_states(case, graphs=True, sizes=EVEN)
    assert_same(captured, usual)
    assert tape.captured > 0
    assert tape.replayed > tape.captured


@pytest.mark.parametrize("options", [{}, {"clients_per_chunk": 2}, {"engine": "loop"}], ids=str)
def test_clients_of_uneven_sizes_train_the_same_states(options, tape):
    usual = final_states(Case("perada"), graphs=False, sizes=UNEVEN, **options)
    captured = final_states(Case("perada"), graphs=True, sizes=UNEVEN, **options)
    assert_same(captured, usual)
    assert tape.captured > 0


def test_padded_batches_are_not_captured(tape):
    """A GPU gets their counts from pinned memory, which is used for something else by the time of a replay."""
    final_states(Case("perada"), graphs=True, sizes=(4, 3))  # both take three steps a round
    assert tape.captured == 0
    final_states(Case("perada"), graphs=True, sizes=(4, 4))
    assert tape.captured > 0


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_every_optimizer_can_be_captured(optimizer, tape, monkeypatch):
    """Adam counts its steps on the device, of which it believes only GPUs to be capable."""
    # In the package `torch.optim` the name is that of a class.
    monkeypatch.setattr(sys.modules["torch.optim.adam"], "_get_capturable_supported_devices", lambda **_: ["cpu"])
    training = {"optimizer": optimizer, "lr": {"personal": 0.02, "local": 0.01}, "clip_norm": 0.1}
    with monkeypatch.context() as patch:
        # An Adam that is not capturable computes the bias corrections on the host, in double precision.
        patch.setattr("perada.engine.step_graphs.WARM_UP_STEPS", 100)
        usual = final_states(Case("perada"), graphs=True, sizes=EVEN, training=training)
    assert tape.captured == 0
    captured = final_states(Case("perada"), graphs=True, sizes=EVEN, training=training)
    assert_same(captured, usual)
    assert tape.replayed > tape.captured > 0


def test_a_gpu_is_required():
    simulation = simulate("fedavg", training=LocalTraining(**SGD, cuda_graphs=True))
    with pytest.warns(UserWarning, match="without CUDA graphs: training runs on 'cpu'") as caught:
        for round in range(2):
            simulation.run_round(round)
    assert len(caught) == 1
