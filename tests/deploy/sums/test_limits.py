# SPDX-License-Identifier: Apache-2.0
"""What docs/secure_sums.md says that a server which lies can still do."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import conv2d

from perada.core.states import clone
from perada.deploy.protocol import Request, read_header
from perada.deploy.state import RunState
from perada.deploy.transport import LocalTransport

from .test_deployed_sums import CASES, Liar, asks, parties, updates
from .test_hostile_server import change_message

PAGE = Path(__file__).parents[3] / "docs" / "secure_sums.md"
NAMES = {
    **dict.fromkeys(("moments", "drawn teachers in training mode"), "fedbe"),
    **{
        "fedavg_ft": "fedavg",
        "fedadam": "fedavg",
        "weights": "feddf",
        "feddpa_f": "feddpa",
        "mtl": "multi-task learning",
    },
    **dict.fromkeys(
        (
            "perada_no_kd",
            "running statistics",
            "teachers in training mode",
            "a guarded distillation",
            "augmented public images",
            "prompts",
        ),
        "perada",
    ),
    **{"lg_fedavg": "lg-fedavg", "fedsa_lora": "fedsa-lora", "ffa_lora": "ffa-lora", "ffa": "ffa-lora"},
}
"""As the page calls a case, in lower case, where that is not its own name."""
ALT = {
    **dict.fromkeys(("fedalt_input", "fedalt_output"), "FedAlt"),
    **dict.fromkeys(("fedsim_input", "fedsim_output"), "FedSim"),
    "fedalt_row": "FedALT",
}
"""Those whose names differ by upper case alone."""


def move_state(state, by):
    random = torch.Generator().manual_seed(1)
    return {
        key: value + by * torch.randn(value.shape, generator=random).abs() if value.is_floating_point() else value
        for key, value in state.items()
    }


def sent_after(client, shift):
    """What a site sends in round 1, after a round 0 in which it was given a model that is off by ``shift``."""
    order = Request("train", "0" * 32, client.recipe.digest, 0, 0, 3)
    state = RunState("0" * 32)
    model = client.recipe.template.received
    kept = client.train(order, move_state(model, shift), state, client.protection(None, 0)).trained.client_state
    kept = {role: {key: value.clone() for key, value in part.items()} for role, part in kept.items()}
    state = replace(state, training=replace(state.training, client_state=kept))
    again = replace(order, round=1)
    return client.train(again, move_state(model, 0.1), state, client.protection(None, 1)).trained.sent


@pytest.mark.parametrize("case", CASES)
@pytest.mark.every(42)
def test_the_page_says_whose_updates_depend_on_former_rounds(case, tiny, tmp_path):
    algorithm, options = CASES[case]
    worker = parties(tiny, tmp_path, algorithm, **options).worker(0)
    (client,) = worker.clients.values()
    one = sent_after(client, 0.0)
    other = sent_after(client, 0.2)
    depends = any(not torch.equal(value, other[key]) for key, value in one.items())
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    stateful, _, rest = text.partition("state that the server shaped: ")[2].partition(". What ")
    lists = [part.replace(" and ", ", ").split(", ") for part in (stateful, rest.partition(" send is ")[0])]
    if case in ALT:
        result = [ALT[case] in names for names in lists]
    else:
        result = [NAMES.get(case, case) in map(str.casefold, names) for names in lists]
    assert result == [depends, not depends]


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 3))


@pytest.mark.slow
def test_a_model_that_is_sent_again_without_one_of_the_sites_shows_its_update(tiny, tmp_path):
    """Within one run. A site trains on all its images at once, so that its steps do not depend on the round."""
    deployment = parties(tiny, tmp_path, "fedavg", sizes=(4, 4, 4, 4), net=network)
    workers = deployment.workers(may_send=())
    transport = LocalTransport(workers)
    coordinator = deployment.coordinator(transport, min_sites=3)
    server = coordinator.server
    start = clone(coordinator.server.global_state)
    coordinator._run_round()
    four = clone(server.global_state)
    hidden = updates(workers)["site3"]
    del transport.workers["site3"]
    server.global_state = start
    coordinator._run_round()
    assert [len(record.summed) for record in coordinator.progress.records] == [4, 3]
    for key, value in hidden.items():
        assert float((value - start[key]).abs().max()) > 0.01
        torch.testing.assert_close(4 * four[key] - 3 * server.global_state[key], value, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_model_can_be_made_by_which_a_site_breaks_or_not_as_its_images_are(tiny, tmp_path):
    """Of the sum nothing is read, and two of four sites say that an image of theirs has a bright spot."""
    deployment = parties(tiny, tmp_path, "fedavg", rounds=1, sizes=(4, 4, 4, 4), net=network, loop={"local_epochs": 8})
    workers = deployment.workers(may_send=())
    brightest = {
        name: max(float(conv2d(x[None], torch.ones(1, 1, 3, 3)).max()) for x, _ in deployment.whole.train[place])
        for place, name in enumerate(deployment.names)
    }
    cut = sorted(brightest.values())[2] - 1e-3

    def made_up(given):
        rows = torch.tensor([[1e6], [1e6], [-1e6]]).expand(3, 144).contiguous()
        scale = torch.full_like(given["0.weight"], 1e4)
        return given | {"0.weight": scale, "0.bias": torch.full((4,), -1e4 * cut), "3.weight": rows}

    def lie(_, message):
        return change_message(message, made_up, factor=1e6) if asks(message, "train") else message

    transport = Liar(workers, lie)
    coordinator = deployment.coordinator(transport, min_sites=3)
    coordinator._run_round()
    (record,) = coordinator.progress.records
    said = {name for name, _, reply in transport.seen if read_header(reply)["code"] == "broken"}
    assert record.void and said == {name for name, value in brightest.items() if value > cut}
