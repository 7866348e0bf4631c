# SPDX-License-Identifier: Apache-2.0
"""How a round is shared out, and what the processes know of what was sent."""

import random

import pytest
import torch

from perada.core.rounds import Phase, active_steps, make_plan, share_out
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
        assert share.lengths == plan.lengths
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
    found, loads = sum(work), [0] * ranks

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


def test_the_steps_of_a_share_stand_where_the_whole_round_has_them():
    plan = make_plan(0, range(4), [9, 5, 14, 7], [Phase("one", 1), Phase("two", 2)], 4)
    whole = list(active_steps(plan))
    for share in share_out(plan, 3):
        steps = list(active_steps(share))
        assert [step[:2] for step in steps] == [step[:2] for step in whole]
        for (_, _, own), (_, _, active) in zip(steps, whole, strict=True):
            assert set(share.clients[:own]) == set(share.clients) & set(plan.clients[:active])


def test_a_part_of_the_updates_has_its_clients_in_their_order():
    sent = {"w": torch.randn(4, 3), "seen": torch.tensor([4, 9, 2, 1])}
    updates = Updates(sent)
    part = updates.part([3, 0], without=("seen",))
    assert part.names == ("w",)
    assert part.clients == 2
    shares = torch.tensor([0.25, 0.75], dtype=torch.float64)
    expected = 0.25 * sent["w"][3].double() + 0.75 * sent["w"][0].double()
    assert torch.equal(mean(part, shares)["w"], expected.float())
    assert updates.part([2, 1]).gathered("seen").tolist() == [2, 9]


def test_a_mean_of_many_is_rounded_once():
    """In single precision the small ones would be lost beside the large one."""
    values = torch.tensor([2.0**24, *[1.0] * 8])
    weights = torch.full((9,), 1 / 9, dtype=torch.float64)
    assert mean({"w": values}, weights)["w"] == torch.tensor((2**24 + 8) / 9)
