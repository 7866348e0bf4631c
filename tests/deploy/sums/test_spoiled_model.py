# SPDX-License-Identifier: Apache-2.0
"""What one site's wrong numbers do to the model, and to the rounds after."""

import pytest
import torch

from perada.deploy.protocol import read_header
from perada.deploy.transport import LocalTransport

from .test_deployed_sums import FOUR, asks, parties
from .test_lying_sites import number, place_of


def adds_always(worker, change, rounds):
    """Have a site add what ``change`` makes of its vector in these rounds."""
    (client,) = worker.clients.values()
    make = client.update_vector

    def changed_vector(state, *arguments):
        vector = make(state, *arguments)
        if state.training.round in rounds:
            change(vector, client.recipe.contents(state.training.round, client.public_images))
        return vector

    client.update_vector = changed_vector


def all_numbers(value):
    def change(vector, contents):
        vector[: place_of(contents)] = number(value)

    return change


def one_number(value):
    def change(vector, _):
        vector[0] = number(value)

    return change


@pytest.mark.parametrize("change", [all_numbers(1e6), one_number(1e6), one_number(-1e6), all_numbers(1e5)])
@pytest.mark.parametrize("liar_in", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.every(24)
def test_numbers_out_of_proportion_are_not_taken(change, liar_in, tiny, tmp_path):
    deployment = parties(tiny, tmp_path, "fedavg", rounds=4, sizes=FOUR, every=4)
    workers = deployment.workers(may_send=())
    adds_always(workers["site0"], change, liar_in)
    records = deployment.coordinator(LocalTransport(workers)).run().records
    for record in records:
        assert bool(record.void) == (record.round in liar_in)
        if record.void:
            assert "it moves the model by" in record.void and record.summed == []


@pytest.mark.every(2)
@pytest.mark.parametrize("resumes", [False, True])
def test_a_model_that_most_sites_cannot_train_is_put_back(resumes, tiny, tmp_path, monkeypatch):
    """Also after the server was started again. The bound is taken away here, since it does not know each such model."""
    deployment = parties(tiny, tmp_path, "fedavg", rounds=4, sizes=FOUR, every=4)
    workers = deployment.workers(may_send=())
    adds_always(workers["site0"], all_numbers(1e6), [1])
    coordinator = deployment.coordinator(LocalTransport(workers))
    monkeypatch.setattr(type(coordinator.summed_rounds), "_check_move", lambda *_: None)
    coordinator._run_round()
    before = {key: value.clone() for key, value in coordinator.server.global_state.items()}
    coordinator._run_round()
    if resumes:
        coordinator.close()
        coordinator = deployment.coordinator(LocalTransport(workers), resume=True)
    spoiled = coordinator.server.global_state
    assert any(float((spoiled[key] - before[key]).abs().max()) > 1e5 for key in before)
    coordinator._run_round()
    restored = coordinator.server.global_state
    assert all(torch.equal(restored[key], before[key]) for key in before)
    coordinator._run_round()
    voids = [record.void for record in coordinator.progress.records]
    assert [bool(void) for void in voids] == [False, False, True, False]
    assert "the model from before the last sum was restored" in voids[2]


def test_one_site_that_spoils_a_round_does_not_take_the_model_back(tiny, tmp_path):
    """Or it could undo each round of the others by spoiling the next one."""
    deployment = parties(tiny, tmp_path, "fedavg", rounds=4, sizes=FOUR, every=4)
    workers = deployment.workers(may_send=())
    adds_always(workers["site0"], all_numbers(2.0**36), [1, 3])
    coordinator = deployment.coordinator(LocalTransport(workers))
    coordinator._run_round()
    first = {key: value.clone() for key, value in coordinator.server.global_state.items()}
    coordinator._run_round()
    assert coordinator.progress.records[1].void and coordinator.summed_rounds.states_before
    assert all(torch.equal(value, first[key]) for key, value in coordinator.server.global_state.items())


@pytest.mark.slow
@pytest.mark.parametrize("step", ["train", "shares", "hold", "mask", "confirm", "reveal"])
def test_two_runs_over_the_same_sites_do_not_void_each_other(step, tiny, tmp_path):
    """The second trains and sums two rounds as the first is at a step, and the first then goes on."""
    deployment = parties(tiny, tmp_path, "fedavg", sizes=FOUR)
    workers = deployment.workers(may_send=())
    other = parties(tiny, tmp_path / "other", "fedavg", sizes=FOUR)
    second = other.coordinator(LocalTransport(workers))

    class Between(LocalTransport):
        def exchange(self, messages, enough, deadline):
            if any(asks(message, step) for message in messages.values()) and second.progress.done < 2:
                second._run_round()
            return super().exchange(messages, enough, deadline)

    first = deployment.coordinator(Between(workers))
    first.run()
    for coordinator in (first, second):
        assert [record.summed for record in coordinator.progress.records] == [deployment.names] * 2
        assert not any(record.void for record in coordinator.progress.records)


@pytest.mark.slow
def test_steps_of_two_runs_that_take_turns(tiny, tmp_path):
    """Each step of the one comes between two of the other."""
    from threading import Condition, Thread

    deployment = parties(tiny, tmp_path, "fedavg", sizes=FOUR)
    workers = deployment.workers(may_send=())
    turn = Condition()
    whose = [0]
    over = [False, False]

    class InTurn(LocalTransport):
        def __init__(self, workers, place):
            super().__init__(workers)
            self.place = place

        def exchange(self, messages, enough, deadline):
            with turn:
                turn.wait_for(lambda: whose[0] == self.place or over[1 - self.place], timeout=60)
                result = super().exchange(messages, enough, deadline)
                whose[0] = 1 - self.place
                turn.notify_all()
            return result

    coordinators = [
        parties(tiny, tmp_path / str(place), "fedavg", sizes=FOUR).coordinator(InTurn(workers, place))
        for place in range(2)
    ]

    def run(place):
        try:
            coordinators[place].run()
        finally:
            with turn:
                over[place] = True
                turn.notify_all()

    threads = [Thread(target=run, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for coordinator in coordinators:
        assert [record.summed for record in coordinator.progress.records] == [deployment.names] * 2


@pytest.mark.slow
def test_a_site_keeps_keys_of_a_bounded_number_of_runs(tiny, tmp_path):
    from perada.deploy.sums import party

    deployment = parties(tiny, tmp_path, "fedavg", rounds=1, sizes=FOUR)
    workers = deployment.workers(may_send=())
    for place in range(party.MAX_RUNS + 2):
        coordinator = parties(tiny, tmp_path / str(place), "fedavg", rounds=1, sizes=FOUR).coordinator(
            LocalTransport(workers)
        )
        coordinator.run()
        assert len(workers["site0"].sums.party._sums) == min(place + 1, party.MAX_RUNS)


class Stopped(Exception):
    """The server's process ends."""


@pytest.mark.parametrize("kind", ["hold", "mask", "confirm", "reveal"])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("change", ["comes back", "goes"])
@pytest.mark.slow
def test_a_server_that_was_stopped_goes_on_with_the_sites_that_it_had(kind, after, change, tiny, tmp_path):
    """A fifth site comes back before the server does, or one of the four is gone then."""
    deployment = parties(tiny, tmp_path, "fedavg", rounds=2, sizes=(*FOUR, 6, 5), every=2)
    workers = deployment.workers(may_send=())
    away = "site4"

    class Ends(LocalTransport):
        def exchange(self, messages, enough, deadline):
            second = any(header.get("round") == 1 for header in map(read_header, messages.values()))
            if second and change == "comes back":
                self.workers.pop(away, None)
            stops = second and any(asks(message, kind) for message in messages.values())
            if stops and not after:
                raise Stopped
            result = super().exchange(messages, enough, deadline)
            if stops:
                raise Stopped
            return result

    coordinator = deployment.coordinator(Ends(dict(workers)), min_sites=3, deadline=6)
    with pytest.raises(Stopped):
        coordinator.run()
    coordinator.close()
    if change == "goes":
        workers.pop(away)
    again = deployment.coordinator(LocalTransport(workers), resume=True, min_sites=3, deadline=6)
    again.run()
    (_, record) = again.progress.records
    if change == "comes back":
        there = [*deployment.names] if kind == "hold" else [name for name in deployment.names if name != away]
        assert not record.void and {*record.summed} >= {*there} - {away}
    elif kind in ("hold", "mask") and not (kind == "mask" and after):
        assert not record.void and away not in record.summed
    elif record.void:
        assert f"sent their part again after the restart; missing: {away}" in record.void
