# SPDX-License-Identifier: Apache-2.0
"""An engine that is written outside perada, and named by its path in the options."""

import sys
import textwrap

import pytest
import torch

import perada
from perada.core.checks import OptionError
from perada.engine.engine import engine_class
from perada.federation.options import Training

OWN_ENGINE = """
    import torch

    from perada.engine import Engine

    SIZES_IN_TRAINING = []


    class Vmapped(Engine):
        default_name = "loop"
        runs_together = True

        def run_clients(self, states, x, call, counts, streams):
            if torch.is_grad_enabled():
                SIZES_IN_TRAINING.append(len(x))

            def run(state, images):
                return self.run_client(state, images, call, None)

            return torch.vmap(run)(states, x)


    class OneByOne(Engine):
        default_name = "loop"

        def run_clients(self, states, x, call, counts, streams):
            if torch.is_grad_enabled():
                SIZES_IN_TRAINING.append(len(x))
            logits = []
            for client, images in enumerate(x):
                state = {name: value[client] for name, value in states.items()}
                stream = None if streams is None else streams[client : client + 1]
                logits.append(self.run_client(state, images, call, stream))
            return torch.stack(logits)
"""


@pytest.fixture
def own_engine(tmp_path, monkeypatch):
    """The module with the engines, which only its path names."""
    (tmp_path / "engine_of_a_user.py").write_text(textwrap.dedent(OWN_ENGINE))
    monkeypatch.syspath_prepend(tmp_path)
    engine_class("engine_of_a_user.Vmapped")
    yield sys.modules["engine_of_a_user"]
    del sys.modules["engine_of_a_user"]


def network(dropout=0.0):
    """A small network in double precision."""
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten()]
    return torch.nn.Sequential(*layers, torch.nn.Dropout(dropout), torch.nn.Linear(16, 3)).double()


def train_round(tiny, net, engine):
    """The states and scores after a round with an engine."""
    run = perada.finetune(
        net,
        tiny.data(),
        adapter="full",
        algorithm="ditto",
        rounds=1,
        batch_size=4,
        lr_personal=0.1,
        lr_local=0.1,
        training={"engine": engine},
    )
    states = [run.state("global"), *(run.state("personal", client) for client in range(run.num_clients))]
    return states, run.metrics["clients"]


@pytest.mark.parametrize(("name", "dropout", "clients_in_pass"), [("Vmapped", 0.0, 5), ("OneByOne", 0.3, 1)])
def test_a_round_is_that_of_the_loop(name, dropout, clients_in_pass, own_engine, tiny):
    states, scores = train_round(tiny, network(dropout), f"engine_of_a_user.{name}")
    expected_states, expected_scores = train_round(tiny, network(dropout), "loop")
    # The clients of a round train in one pass only if the engine says so.
    assert max(own_engine.SIZES_IN_TRAINING) == clients_in_pass
    for state, expected in zip(states, expected_states, strict=True):
        for key, value in expected.items():
            torch.testing.assert_close(state[key], value, rtol=1e-12, atol=1e-14)
    assert scores == expected_scores


@pytest.mark.parametrize(
    "engine", ["vmap", "engine_of_a_user.Nothing", "engine_of_a_user.torch", "engine_of_nobody.Vmapped", 3]
)
def test_what_is_no_engine_is_rejected_by_the_options(engine, own_engine):
    with pytest.raises(OptionError, match=r"^engine must be one of .* or the path of a subclass") as caught:
        Training(engine=engine)
    assert caught.value.value == engine
