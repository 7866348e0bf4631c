# SPDX-License-Identifier: Apache-2.0
"""How a round is shared out, and what the processes know of what was sent."""

import random

import pytest
import torch

from perada.core.rounds import Phase, batch_places, make_plan, share_out
from perada.server import Updates, mean


@pytest.mark.parametrize("seed", range(20))
def test_shares_are_a_division_whose_busiest_part_is_near_the_best(seed):
    draw = random.Random(seed)
    sizes = [draw.randint(1, 60) for _ in range(draw.randint(1, 12))]
    ranks = draw.randint(1, 5)
    plan = make_plan(3, range(len(sizes)), sizes, [Phase("one", 1), Phase("two", steps=2)], 4)
    shares = share_out(plan, ranks)
    assert len(shares) == ranks
    assert sorted(client for share in shares for client in share.clients) == list(range(len(sizes)))
    for share in shares:
        assert share.num_batches == max(sum(map(max, part.steps)) for part in shares if part.clients)
        assert [client for client in plan.clients if client in share.clients] == list(share.clients)
        places = [plan.clients.index(client) for client in share.clients]
        assert share.steps == tuple(tuple(phase[place] for place in places) for phase in plan.steps)
    loads = [sum(map(sum, share.steps)) for share in shares]
    least = max(sum(loads) / ranks, *(sum(phase[place] for phase in plan.steps) for place in range(len(sizes))))
    # Graham's bound for longest-first holds against the best division, which gives the busiest at least this.
    assert max(loads) <= (4 / 3 - 1 / (3 * ranks)) * _best(
        [sum(steps) for steps in zip(*plan.steps, strict=True)], ranks, least
    )


def _best(work, ranks, least):
    """Load of the busiest in the best division, by trying all."""
    found = sum(work)
    loads = [0] * ranks

    def place(index):
        nonlocal found
        if max(loads) >= found:
            return
        if index == len(work):
            found = max(loads)
            return
        for rank in range(ranks):
            if loads[rank] not in loads[:rank] and found > least:
                loads[rank] += work[index]
                place(index + 1)
                loads[rank] -= work[index]

    place(0)
    return found


def plain_steps(plan, size):
    """Phase, step and clients of every batch, by loops over chunks of ``size`` clients."""
    steps = []
    for start in range(0, len(plan.clients), size):
        chunk = range(start, min(start + size, len(plan.clients)))
        for phase, steps_of_clients in enumerate(plan.steps):
            step = 0
            while any(steps_of_clients[place] > step for place in chunk):
                steps.append((phase, step, [plan.clients[p] for p in chunk if steps_of_clients[p] > step]))
                step += 1
    return steps


@pytest.mark.parametrize("size", [None, 1, 2, 3, 9])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_chunk_takes_all_its_steps_before_the_next_begins(size, ranks):
    """On each of several ranks, which all have as many batches; those without clients come last."""
    plan = make_plan(0, range(7), [9, 5, 14, 7, 2, 9, 3], [Phase("one", 1), Phase("two", 2)], 4, size)
    shares = share_out(plan, ranks)
    expected = [plain_steps(share, size or 7) for share in shares]
    assert {share.num_batches for share in shares} == {max(map(len, expected))}
    for share, steps in zip(shares, expected, strict=True):
        places = list(batch_places(share))
        assert len(places) == share.num_batches
        for place, (phase, step, clients) in zip(places, steps, strict=False):
            assert (place.phase, place.step) == (phase, step)
            assert list(share.clients[place.start : place.start + place.active]) == clients
        assert all(place.active == 0 for place in places[len(steps) :])


def test_a_part_of_the_updates_has_its_clients_in_their_order():
    sent = {"w": torch.randn(4, 3), "seen": torch.tensor([4, 9, 2, 1])}
    updates = Updates(sent)
    part = updates.part([3, 0], without=("seen",))
    assert part.names == ("w",)
    assert part.num_clients == 2
    shares = torch.tensor([0.25, 0.75], dtype=torch.float64)
    expected = 0.25 * sent["w"][3].double() + 0.75 * sent["w"][0].double()
    assert torch.equal(mean(part, shares)["w"], expected.float())
    assert updates.part([2, 1]).gathered("seen").tolist() == [2, 9]


def test_a_mean_of_many_is_rounded_once():
    """In single precision the small ones would be lost beside the large one."""
    values = torch.tensor([2.0**24, *[1.0] * 8])
    weights = torch.full((9,), 1 / 9, dtype=torch.float64)
    assert mean({"w": values}, weights)["w"] == torch.tensor((2**24 + 8) / 9)
