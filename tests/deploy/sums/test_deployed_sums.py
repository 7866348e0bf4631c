# SPDX-License-Identifier: Apache-2.0
"""Deployed runs whose server sees sums alone."""

import hashlib
from dataclasses import replace

import pytest
import torch

from perada.algorithms import FedBE, FFALoRA, PerAda
from perada.deploy.protocol import Response, pack, read_header
from perada.deploy.state import read_state
from perada.deploy.transport import Failure, LocalTransport
from perada.server import Distillation
from perada.server.rules import FedAdam
from perada.server.sums import SecureSums
from tests.algorithms.problems import ADAPTER_OF, MERGING, OF_LORA
from tests.methods import NAMED

from ..parties import Parties
from ..test_parity import assert_equal, normalized, vit
from ..test_rounds import Troubled, equal, state


class Liar(LocalTransport):
    """Passes on what ``lie(name, message)`` makes of a message, and keeps all replies."""

    def __init__(self, workers, lie=lambda name, message: message):
        super().__init__(workers)
        self.lie = lie
        self.seen = []

    def exchange(self, messages, enough, deadline):
        result = super().exchange({name: self.lie(name, one) for name, one in messages.items()}, enough, deadline)
        self.seen += [(name, read_header(messages[name])["kind"], reply) for name, reply in result.items()]
        changed = {name for name in messages if self.lie(name, messages[name]) != messages[name]}
        for name in changed & result.keys():  # or the coordinator, which is honest, would not take the answer
            answer = Response.read(read_header(result[name]))
            if answer.code == "ok":
                result[name] = pack(replace(answer, answers=hashlib.sha256(messages[name]).hexdigest()))
        return result


NONE = {"fedbe", "fedbe_no_kd", "fed_ensemble", "standalone", "het_lora", *MERGING}
OF_TRANSFORMERS = {"fedalt_adapter", "fedsim_adapter"}
LORA = {"module": {"adapter": "lora"}}
GUARDED = {"distillation": Distillation(steps=4, batch_size=5, lr=0.05, teacher_mode="train", guard="predictions")}
AUGMENTED = {"crop_padding": 1, "flip": True, "augment_public": True}
TRAINING_TEACHERS = {"distillation": Distillation(steps=4, batch_size=5, lr=0.05, teacher_mode="train")}
CASES = {
    name: (name, {"module": {"adapter": "lora" if name in OF_LORA else "dual_lora"}} if name in ADAPTER_OF else {})
    for name in sorted(set(NAMED) - NONE - OF_TRANSFORMERS - {"fedbn"})
} | {
    "fedbn": ("fedbn", {"net": normalized}),
    "weights": ("feddf", {"loop": {"weighting": "samples"}}),
    "fedadam": ("fedavg", {"loop": {"server_rule": FedAdam()}}),
    "ffa": (FFALoRA(PerAda()), LORA),
    "moments": (FedBE(samples=2, moments=True), {}),
    "running statistics": ("perada", {"net": normalized, "loop": {"weighting": "samples"}, "sizes": (8, 5, 12)}),
    "teachers in training mode": ("perada", {"net": normalized, "loop": TRAINING_TEACHERS, "sizes": (8, 5, 12)}),
    "augmented public images": ("perada", {"net": normalized, "data": AUGMENTED, "sizes": (8, 5, 12)}),
    "a guarded distillation": ("perada", {"net": normalized, "loop": GUARDED, "sizes": (8, 5, 12)}),
    "drawn teachers in training mode": (FedBE(samples=2, moments=True), {"net": normalized, "loop": TRAINING_TEACHERS}),
    "prompts": ("perada", {"net": vit, "module": {"adapter": "prompt"}}),
}


def parties(tiny, tmp_path, algorithm="perada", *, loop=None, secure=None, **options):
    return Parties(tiny, tmp_path, algorithm, loop={"secure_sums": secure or SecureSums(), **(loop or {})}, **options)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.every(60)
def test_a_deployed_run_equals_its_simulation(case, tiny, tmp_path):
    algorithm, options = CASES[case]
    assert_equal(parties(tiny, tmp_path, algorithm, rounds=3, every=3, **options))


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["fedavg", "perada"])
def test_also_with_those_that_were_drawn(algorithm, tiny, tmp_path):
    arguments = {"loop": {"clients_per_round": 3, "seed": 5}, "sizes": (9, 5, 14, 7)}
    assert_equal(parties(tiny, tmp_path, algorithm, **arguments), min_sites=3)


FOUR = (9, 5, 14, 7)
STEPS = ("shares", "hold", "mask", "confirm", "reveal")
"""What a sum asks at its first attempt; keys for it come with the training."""


def asks(message, kind, attempt=None):
    header = read_header(message)
    return header["kind"] == kind and attempt in (None, header["attempt"])


def updates(workers):
    """What the sites trained last, from their disks."""
    return {
        name: read_state(worker.store.folder / "state.safetensors").run_state.summing.update
        for name, worker in workers.items()
    }


def mean_of(updates, names):
    """By a plain loop, in multiples of 2^-24; counters are whole."""
    results = {}
    for key in updates[names[0]]:
        total = sum((updates[name][key].double() * 2**24).round() for name in names)
        mean = total / 2**24 / len(names)
        kind = updates[names[0]][key].dtype
        results[key] = (mean if kind.is_floating_point else mean.round()).to(kind)
    return results


@pytest.mark.every(5)
@pytest.mark.parametrize("step", STEPS)
def test_who_goes_at_a_step_is_in_the_sum_or_not_and_the_sum_is_right(step, deployment):
    workers = deployment.workers()

    def drop_reply(name, message, _):
        return Failure("malformed") if name == "site1" and asks(message, step) else None

    coordinator = deployment.coordinator(Troubled(workers, drop_reply), min_sites=3)
    (record,) = coordinator.run().records
    there = [name for name in deployment.names if name != "site1" or step in ("confirm", "reveal")]
    assert (record.summed, record.void) == (there, "")
    assert record.failed == ({} if step in ("confirm", "reveal") else {"site1": "malformed"})
    expected = mean_of(updates(workers), there)
    for key, value in coordinator.server.global_state.items():
        assert torch.equal(value, expected[key]), key
    assert len(record.answered) == 4  # all have trained


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_with_too_few_at_a_step_the_round_is_void_and_the_run_continues(step, tiny, tmp_path):
    deployment = parties(tiny, tmp_path, "fedavg", sizes=FOUR)

    def gone(name, message, _):
        lost = name in ("site1", "site2") and asks(message, step) and read_header(message)["round"] == 0
        return Failure("malformed") if lost else None

    coordinator = deployment.coordinator(Troubled(deployment.workers(), gone), min_sites=3)
    first, second = coordinator.run().records
    assert first.summed == [] and first.void.startswith("secure sum: 2 of ")
    assert second.summed == deployment.names and not second.void


@pytest.mark.slow
@pytest.mark.parametrize(("step", "attempt"), [("shares", 0), ("keys", 1)])
def test_a_sum_is_begun_again_where_nothing_was_masked(step, attempt, tiny, tmp_path):
    """Of three sites all are needed; one of them restarts in between, once or twice."""
    deployment = parties(tiny, tmp_path, "perada", rounds=1)
    workers = deployment.workers()

    def restarted(name, message, _):
        if name == "site1" and (asks(message, "shares", attempt=0) or asks(message, step, attempt)):
            workers[name].store.close()
            transport.workers[name] = workers[name] = deployment.worker(1)

    transport = Troubled(workers, restarted)
    coordinator = deployment.coordinator(transport)
    coordinator.run()
    assert coordinator.progress.records[0].summed == deployment.names
    plain = parties(tiny, tmp_path / "plain", "perada", rounds=1).deployed()[0]
    assert equal(state(coordinator), state(plain))


@pytest.mark.slow
def test_a_worker_that_restarts_after_its_training_has_other_keys_in_the_same_sum(deployment):
    """Its answer that is on the disk has none: the answer that comes again has those of the new process."""
    workers = deployment.workers()
    lost = []

    class Loses(LocalTransport):
        def exchange(self, messages, enough, deadline):
            result = super().exchange(messages, enough, deadline)
            if not lost and any(asks(message, "train") for message in messages.values()):
                lost.append(result["site1"])
                result["site1"] = Failure("crashed")
                workers["site1"].store.close()
                self.workers["site1"] = workers["site1"] = deployment.worker(1)
            return result

    transport = Loses(workers)
    coordinator = deployment.coordinator(transport)
    (record,) = coordinator.run().records
    assert record.summed == deployment.names and record.failed == {}
    kept = read_state(workers["site1"].store.folder / "state.safetensors").run_state.training.reply
    assert b"advert" in lost[0] and b"advert" not in kept


@pytest.mark.every(5)
@pytest.mark.parametrize("step", STEPS)
def test_a_site_whose_reply_was_lost_is_asked_again_and_replies_the_same(step, deployment):
    """As when the ClientApp is killed: the worker goes on, and the server is told that something crashed."""
    replies = []

    class LosesOne(LocalTransport):
        def exchange(self, messages, enough, deadline):
            results = super().exchange(messages, enough, deadline)
            header = read_header(messages["site1"])  # it is asked at every step
            if (header["kind"], header["of"]) == (step, "update"):
                replies.append(results["site1"])
                if len(replies) == 1:
                    results["site1"] = Failure("crashed")
            return results

    (record,) = deployment.coordinator(LosesOne(deployment.workers()), min_sites=3).run().records
    assert (record.summed, record.failed, record.void) == (deployment.names, {}, "")
    first, second = replies
    assert first == second


def dying(deployment, workers, step):
    """A transport to sites. The worker of site1 dies as it is first asked for a step, and another takes its place."""
    died = []

    def dies(name, message, _):
        if name == "site1" and not died and asks(message, step):
            died.append(name)
            workers[name].store.close()
            transport.workers[name] = workers[name] = deployment.worker(1)

    transport = Troubled(workers, dies)
    return transport


@pytest.mark.slow
@pytest.mark.parametrize("step", ["mask", "confirm", "reveal"])
def test_a_worker_that_died_over_its_masks_is_out_of_the_sum(step, tiny, tmp_path):
    """Its keys are gone with it. Before its part was sent it does not count; after, the others take its mask away."""
    deployment = parties(tiny, tmp_path, "fedavg", sizes=FOUR)
    coordinator = deployment.coordinator(dying(deployment, deployment.workers(), step), min_sites=3)
    first, second = coordinator.run().records
    assert ("site1" in first.summed) == (step != "mask")
    assert first.void == second.void == "" and second.summed == deployment.names


class Stopped(Exception):
    """The server's process ends."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["train", *STEPS])
@pytest.mark.parametrize("after", [False, True])
def test_a_server_that_was_stopped_in_a_sum_resumes_to_the_same_bits(kind, after, tiny, tmp_path):
    deployment = parties(tiny, tmp_path, "perada", sizes=FOUR)
    workers = deployment.workers()

    class Ends(LocalTransport):
        def exchange(self, messages, enough, deadline):
            stops = any(asks(message, kind) and read_header(message)["round"] == 1 for message in messages.values())
            if stops and not after:
                raise Stopped
            result = super().exchange(messages, enough, deadline)
            if stops:
                raise Stopped
            return result

    coordinator = deployment.coordinator(Ends(workers))
    with pytest.raises(Stopped):
        coordinator.run()
    coordinator.close()
    again = deployment.coordinator(LocalTransport(workers), resume=True)
    again.run()
    assert [record.void for record in again.progress.records] == ["", ""]
    plain = parties(tiny, tmp_path / "plain", "perada", sizes=FOUR).deployed()[0]
    assert equal(state(again), state(plain))


@pytest.mark.slow
def test_a_server_that_was_stopped_with_all_workers_has_a_void_round(tiny, tmp_path):
    """Their keys are gone, and what was masked once is not masked again."""
    deployment = parties(tiny, tmp_path, "fedavg", sizes=FOUR)
    workers = deployment.workers()

    def stop(name, message, _):
        if asks(message, "confirm"):
            raise Stopped

    with pytest.raises(Stopped):
        deployment.coordinator(Troubled(workers, stop)).run()
    for worker in workers.values():
        worker.store.close()
    workers = deployment.workers()
    again = deployment.coordinator(LocalTransport(workers), resume=True)
    first, second = again.run().records
    assert first.void.startswith("secure sum: 0 of") or "sites sent their keys" in first.void
    assert second.summed == deployment.names


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["fedavg", "perada"])
def test_scores_are_those_of_the_simulation_and_no_site_tells_its_own(algorithm, tiny, tmp_path):
    deployment = parties(tiny, tmp_path, algorithm, module={"metric": ["accuracy", "auroc"]})
    loop, _ = deployment.simulated()
    coordinator = deployment.coordinator(Liar(deployment.workers()))
    coordinator.run()
    result = coordinator.progress.history[-1]
    names = [name for name in result if name.startswith(("personal/", "global/"))]
    assert {"personal/local_test", "personal/local_test_std", "global/global_test"} <= set(names)
    for name in names:
        assert result[name] == pytest.approx(loop.history[-1][name], abs=1e-5), name
    for _, kind, reply in coordinator.transport.seen:
        assert read_header(reply)["facts"].keys() <= ({"size", "tests", "labels"} if kind == "join" else set()), kind


@pytest.mark.slow
@pytest.mark.parametrize(("silent", "scored"), [(1, True), (2, False)])
def test_scores_are_of_the_sites_that_allow_it_if_they_are_enough(silent, scored, deployment, caplog):
    workers = {
        name: deployment.worker(place, may_send=() if place < silent else ("counts",))
        for place, name in enumerate(deployment.names)
    }
    (row,) = deployment.coordinator(LocalTransport(workers)).run().history
    assert ("global/global_test" in row) == scored
    assert ("no scores after round 1" in caplog.text) != scored
    if scored:
        counts = [
            read_state(workers[name].store.folder / "state.safetensors").run_state.scoring.metrics
            for name in deployment.names[1:]
        ]
        right, total = (sum(count[f"global/{what}"] for count in counts) for what in ("right", "all"))
        assert row["global/global_test"] == pytest.approx(right / total, abs=1e-6)
