# SPDX-License-Identifier: Apache-2.0
"""Sites whose LoRA has ranks of their own, by their names."""

import torch
from safetensors.torch import load

from perada.algorithms import HetLoRA
from perada.deploy.protocol import read_header
from perada.deploy.state import read_state
from perada.deploy.transport import LocalTransport

from .parties import Parties

RANKS = {"site0": 3, "site2": 1}


class Seen(LocalTransport):
    """Keeps what is sent in rounds, by site."""

    def __init__(self, workers):
        super().__init__(workers)
        self.asked = {}
        self.answered = {}

    def exchange(self, messages, enough, seconds):
        result = super().exchange(messages, enough, seconds)
        for name, message in messages.items():
            if read_header(message)["kind"] == "train":
                self.asked[name], self.answered[name] = message, result[name]
        return result


def shapes(message):
    return {key.partition(".lora_")[2]: tuple(value.shape) for key, value in load(message).items() if "lora_" in key}


def test_ranks_go_by_the_names_of_sites_and_only_they_travel(tiny, tmp_path):
    parties = Parties(tiny, tmp_path, HetLoRA(ranks=RANKS), module={"adapter": "lora"})
    workers = parties.workers()
    transport = Seen(workers)
    coordinator = parties.coordinator(transport, min_sites=2)
    progress = coordinator.run()
    coordinator.close()
    assert [member.name for member in progress.roster] == list(RANKS)
    assert "has no rank for client 'site1'" in coordinator.roster.outside["site1"]
    for name, rank in RANKS.items():
        for message in (transport.asked[name], transport.answered[name]):
            actual = shapes(message)
            assert actual and all(shape[key.startswith("B")] == rank for key, shape in actual.items())
        (client,) = workers[name].clients.values()
        state = read_state(workers[name].store.folder / "state.safetensors")[0]
        assert state.rank == rank
        own = client.personal(coordinator.server.global_state, state)
        shared = coordinator.server.global_state
        for pair in client.module.tensor_names.factors:
            assert torch.equal(own[pair.down][0, :rank], shared[pair.down][:rank])
            assert not own[pair.down][0, rank:].any()
            assert not own[pair.up][0, :, rank:].any()
    row = progress.history[-1]
    tensor_names = coordinator.recipe.module.tensor_names
    state = coordinator.server.global_state
    ranked = {
        name: state[name].shape[axis] for pair in tensor_names.factors for axis, name in enumerate((pair.down, pair.up))
    }
    expected = sum(
        state[key].numel() * 2 / ranked[key] if key in ranked else state[key].numel() for key in tensor_names.parameters
    )
    assert row["params/sent"] == row["params/trained"] == expected  # ranks 3 and 1 are 2 on average
