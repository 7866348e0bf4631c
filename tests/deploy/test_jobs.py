# SPDX-License-Identifier: Apache-2.0
"""Jobs without training: a secure sum of vectors of integers, who is in it, what leaves, and how often."""

import json
import logging

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from perada.cli.main import main
from perada.deploy.jobs import DeployedJob, decode_counts, encode_counts, job_digest
from perada.deploy.protocol import RejectionError, Request, digest_of_message, pack, read_header
from perada.deploy.server.jobs import JobRun
from perada.deploy.site.file import Limits
from perada.deploy.site.jobs import SiteJob
from perada.deploy.site.worker import SiteWorker
from perada.deploy.state import IMAGES_LEDGER, SITE_LEDGER, SiteStore
from perada.deploy.sums.party import Party
from perada.deploy.transport import Failure, LocalTransport, Terms
from perada.server.sums import SecureSums

VECTORS = {"site0": [5, 0, 7], "site1": [1, 2, 3], "site2": [10, 20, 2**40], "site3": [0, 0, 1]}
JOBS = [DeployedJob("survey", job_digest(f"job {number}".encode()), SecureSums(), 3) for number in range(30)]
JOB = JOBS[0]


class FixedJob(SiteJob):
    """Counts the same numbers every time, and logs the others' sum."""

    permission = "survey"
    limit_name = "max_surveys"

    def __init__(self, job, vector, noise=0.0, **limits):
        super().__init__(job, Limits(**limits))
        self.vector = vector
        self.noise_multiplier = noise
        self.times = 0

    def make_vector(self):
        self.times += 1
        return list(self.vector)

    def compare(self, own_vector, total, num_sites):
        return [f"the {num_sites - 1} others have {(total - np.array(own_vector)).tolist()}"]


class Sites:
    """Workers of a job."""

    def __init__(self, folder, may_send=(), **options):
        self.keys = {name: Ed25519PrivateKey.generate() for name in VECTORS}
        public = {name: key.public_key() for name, key in self.keys.items()}
        self.jobs = {}
        for name, vector in VECTORS.items():
            self.jobs[name] = {job.digest: FixedJob(job, vector, **options) for job in JOBS}
        self.workers = {}
        for name, key in self.keys.items():
            allowed = may_send if name == "site0" else ()
            party = Party(name, key, public)
            log = logging.getLogger(f"perada.site.{name}")
            store = SiteStore(folder / name)
            self.workers[name] = SiteWorker(store, {}, allowed, log, party, jobs=self.jobs[name])

    def run(self, transport=None, job=JOB, **terms):
        transport = transport or LocalTransport(self.workers)
        return JobRun(job, transport, Terms(**{"min_sites": 3, "deadline": 30.0} | terms)).make_sum()


def expected(*names):
    return np.sum([VECTORS[name] for name in names], axis=0).tolist()


def test_the_sum_is_that_of_the_vectors_and_each_site_compares_itself(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "perada.site")
    sites = Sites(tmp_path)
    result = sites.run()
    assert result.sites == sorted(VECTORS)
    assert result.total.tolist() == expected(*VECTORS)
    assert not result.rows and not result.missing
    assert f"the 3 others have {expected('site1', 'site2', 'site3')}" in caplog.text


def test_only_a_site_that_allows_it_sends_its_own_row(tmp_path):
    result = Sites(tmp_path, may_send=("survey",)).run()
    assert {name: row.tolist() for name, row in result.rows.items()} == {"site0": VECTORS["site0"]}


class Deaf(LocalTransport):
    """Does not reach a site for one kind of request."""

    def __init__(self, workers, name, kind):
        super().__init__(workers)
        self.name, self.kind = name, kind

    def exchange(self, messages, enough, deadline):
        reached = {}
        for name, message in messages.items():
            if (name, read_header(message)["kind"]) != (self.name, self.kind):
                reached[name] = message
        replies = super().exchange(reached, enough, deadline)
        return replies | {name: Failure("rejected") for name in messages if name not in reached}


@pytest.mark.parametrize("kind", ["count", "hold", "mask"])
def test_a_site_that_drops_out_is_left_out(tmp_path, kind):
    sites = Sites(tmp_path)
    result = sites.run(Deaf(sites.workers, "site1", kind))
    assert result.total.tolist() == expected("site0", "site2", "site3")
    assert result.missing == {"site1": "rejected"}


def test_too_few_sites_are_an_error_that_names_the_others(tmp_path):
    sites = Sites(tmp_path)
    transport = Deaf(sites.workers, "site1", "count")
    with pytest.raises(TimeoutError, match=r"3 of at least 4 sites .*site1 \(rejected\)"):
        sites.run(transport, min_sites=4, deadline=0.5)


def test_unapproved_jobs_are_not_answered(tmp_path):
    sites = Sites(tmp_path)
    sites.workers["site1"].jobs = {}
    result = sites.run()
    assert result.missing == {"site1": "unapproved"}


def test_a_site_answers_a_limited_number_of_surveys(tmp_path):
    sites = Sites(tmp_path, max_surveys=2)
    sites.run(job=JOBS[0])
    sites.run(job=JOBS[1])
    with pytest.raises(TimeoutError, match=r"0 of at least 3 sites .*exhausted"):
        sites.run(job=JOBS[2], deadline=0.5)
    assert {jobs[JOBS[2].digest].times for jobs in sites.jobs.values()} == {0}


def test_a_recipe_is_answered_in_one_sum_since_two_would_differ_by_the_row_of_a_site(tmp_path):
    sites = Sites(tmp_path)
    without = Deaf(sites.workers, "site1", "count")
    sites.run(without)
    with pytest.raises(TimeoutError, match=r"1 of at least 3 sites .*site0 \(exhausted\)"):
        sites.run(deadline=0.5)


def test_a_sum_that_failed_before_the_masks_costs_no_survey(tmp_path):
    sites = Sites(tmp_path, max_surveys=1)

    class DeafToAll(LocalTransport):
        def exchange(self, messages, enough, deadline):
            if read_header(next(iter(messages.values())))["kind"] == "shares":
                return {name: Failure("rejected") for name in messages}
            return super().exchange(messages, enough, deadline)

    with pytest.raises(RejectionError):
        sites.run(DeafToAll(sites.workers))
    assert sites.run().total.tolist() == expected(*VECTORS)


def request(kind, run="0" * 32, **fields):
    return pack(Request(kind, run, JOB.digest, of="survey", **fields))


def code(reply):
    return read_header(reply)["code"]


def test_a_vector_is_made_once_in_a_run_and_never_masked_twice(tmp_path):
    sites = Sites(tmp_path)
    kept = []

    class Recording(LocalTransport):
        def exchange(self, messages, enough, deadline):
            kept.extend(message for name, message in messages.items() if name == "site1")
            return super().exchange(messages, enough, deadline)

    result = sites.run(Recording(sites.workers))
    worker = sites.workers["site1"]
    masked = next(message for message in kept if read_header(message)["kind"] == "mask")
    assert code(worker.answer(masked, "again")) == "ok"  # the same bytes, as the server may ask again
    assert code(worker.answer(request("keys", result.run, attempt=1), "again")) == "other"
    # A worker that was restarted has no keys, and offers no new ones for a vector that has left.
    worker.store.close()
    store = SiteStore(worker.store.folder)
    public = {name: key.public_key() for name, key in sites.keys.items()}
    party = Party("site1", sites.keys["site1"], public)
    again = SiteWorker(store, {}, party=party, jobs=sites.jobs["site1"])
    reply = read_header(again.answer(request("count", result.run), "again"))
    assert (reply["code"], reply["sums"]) == ("ok", {})
    assert code(again.answer(request("keys", result.run, attempt=1), "again")) == "other"
    assert sites.jobs["site1"][JOB.digest].times == 1


def test_a_vector_that_left_in_the_clear_is_still_masked_in_one_run_only(tmp_path):
    sites = Sites(tmp_path, may_send=("survey",))
    worker = sites.workers["site0"]
    earlier = "1" * 32
    assert code(worker.answer(request("count", earlier), "x")) == "ok"
    sites.run()
    assert code(worker.answer(request("keys", earlier, attempt=1), "x")) == "other"


def test_requests_out_of_place_are_rejected(tmp_path):
    worker = Sites(tmp_path).workers["site0"]
    assert code(worker.answer(request("mask"), "x")) == "other"
    assert code(worker.answer(request("train"), "x")) == "other"
    total = {"total": torch.zeros(3, dtype=torch.uint64)}
    assert code(worker.answer(request("count"), "x")) == "ok"
    compare = pack(Request("compare", "0" * 32, JOB.digest, of="survey", clients=3), total)
    assert code(worker.answer(compare, "x")) == "other"  # its vector is in no sum
    evaluation = pack(Request("count", "0" * 32, JOB.digest, of="evaluation"))
    assert code(worker.answer(evaluation, "x")) == "other"


def test_what_is_spent_is_in_the_ledgers(tmp_path):
    sites = Sites(tmp_path / "plain")
    sites.run()
    ledger = sites.workers["site0"].store.totals.ledger
    assert ledger.history(IMAGES_LEDGER) == {(0.0, 1.0): 1}
    assert ledger.history(SITE_LEDGER) == {(0.0, 1.0): 1}
    sites = Sites(tmp_path / "noisy", noise=8.0, max_epsilon=2.0, max_surveys=100)
    sites.run()
    assert sites.workers["site0"].store.totals.ledger.history(IMAGES_LEDGER) == {(8.0, 1.0): 1}
    for job in JOBS[1:]:
        try:
            sites.run(job=job, deadline=0.5)
        except TimeoutError as error:
            assert "exhausted" in str(error)
            break
    num_answered = sites.workers["site0"].store.totals.ledger.history(IMAGES_LEDGER)[8.0, 1.0]
    from perada.privacy.accounting import history_epsilon

    assert history_epsilon({(8.0, 1.0): num_answered}, 1e-5, "rdp") <= 2.0
    assert history_epsilon({(8.0, 1.0): num_answered + 1}, 1e-5, "rdp") > 2.0


@pytest.mark.parametrize(
    ("noise", "limits"), [(0.0, {"max_epsilon": 8.0}), (8.0, {}), (0.0, {"max_site_epsilon": 8.0})]
)
def test_a_site_with_a_budget_answers_only_with_noise(tmp_path, noise, limits):
    worker = Sites(tmp_path, noise=noise, **limits).workers["site0"]
    assert code(worker.answer(request("count"), "x")) == "exhausted"
    assert not worker.store.totals.jobs


def test_the_audit_log_names_the_job_and_what_left(tmp_path, capsys):
    sites = Sites(tmp_path, may_send=("survey",))
    sites.run()
    main(["deploy", "audit", str(tmp_path / "site0")])
    rows = [[cell.strip() for cell in line.split("|")] for line in capsys.readouterr().out.splitlines() if "|" in line]
    left = {row[5]: row[8] for row in rows}
    assert left["count (survey)"] == "row; advert"
    assert left["mask (survey)"] == "1 tensors, 0.000 MB under masks"
    assert left["compare (survey)"] == "–"
    main(["deploy", "audit", str(tmp_path / "site1"), "--json"])
    entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (masked,) = [entry for entry in entries if entry["request"]["kind"] == "mask"]
    assert masked["request"]["recipe"] == JOB.digest and masked["left"]["tensors"] == {"masked": 8 * 4}


def test_a_sum_with_a_wrong_number_of_sites_is_rejected():
    total = encode_counts([1, 2]) + encode_counts([3, 4])
    assert decode_counts(total, 2).tolist() == [4, 6]
    with pytest.raises(RejectionError, match="claims 2 sites instead of 3"):
        decode_counts(total, 3)
    with pytest.raises(ValueError, match=r"1099511627777"):
        encode_counts([2**40 + 1])


def test_noise_may_make_counts_negative():
    total = encode_counts([-3]) + encode_counts([1])
    assert decode_counts(total, 2).tolist() == [-2]


def test_messages_of_jobs_have_a_digest_of_the_recipe_and_weights():
    assert job_digest(b"a") != job_digest(b"b") != job_digest(b"b", "weights")
    assert len(job_digest(b"a")) == 64 and digest_of_message(b"a") != job_digest(b"a")


def test_a_run_cannot_be_continued_with_another_recipe(tmp_path):
    sites = Sites(tmp_path)
    result = sites.run()
    step = Request("keys", result.run, JOBS[1].digest, of="survey", attempt=1)
    # The vector has left under masks for its own recipe, so no second sum may have it.
    assert code(sites.workers["site0"].answer(pack(step), "x")) == "other"


def test_limits_hold_for_runs_that_were_begun_side_by_side(tmp_path):
    sites = Sites(tmp_path, max_surveys=1)
    other_sums = [lambda: sites.run(job=JOBS[1])]

    class Interrupting(LocalTransport):
        """Makes another sum after the sites have counted, and before they send anything under masks."""

        def exchange(self, messages, enough, deadline):
            if read_header(next(iter(messages.values())))["kind"] == "shares" and other_sums:
                other_sums.pop()()
            return super().exchange(messages, enough, deadline)

    with pytest.raises(RejectionError):
        sites.run(Interrupting(sites.workers), deadline=2.0)
    for worker in sites.workers.values():
        assert [record.recipe for record in worker.store.totals.jobs.values() if record.has_left] == [JOBS[1].digest]


def test_the_reply_to_a_comparison_does_not_tell_how_it_went(tmp_path, caplog):
    sites = Sites(tmp_path)
    result = sites.run()
    sites.jobs["site0"][JOB.digest].compare = lambda *_: 1 / 0
    total = {"total": torch.zeros(3, dtype=torch.uint64)}
    forged = pack(Request("compare", result.run, JOB.digest, of="survey", clients=4), total)
    assert code(sites.workers["site0"].answer(forged, "x")) == "ok"
    assert "ZeroDivisionError" in caplog.text
