# SPDX-License-Identifier: Apache-2.0
"""Requests for jobs without training: the site's vector, its part in the secure sum, and the comparison with others."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from perada.core.states import State
from perada.core.text import printable
from perada.deploy.jobs import TOTAL_NAME, Counts, DeployedJob, encode_counts
from perada.deploy.protocol import (
    SUM_KINDS,
    RejectionError,
    Request,
    Response,
    pack,
    tensor_sizes,
    unpack,
)
from perada.deploy.site.budget import SiteBudget, add_step_without_noise
from perada.deploy.site.file import Limits
from perada.deploy.site.incoming import finite_or_none
from perada.deploy.site.permissions import Permissions
from perada.deploy.state import IMAGES_LEDGER, SITE_LEDGER, JobRecord, SiteStore
from perada.privacy.accounting import History, Ledger

if TYPE_CHECKING:
    from perada.deploy.sums.keys import SumTerms
    from perada.deploy.sums.party import Party
    from perada.deploy.sums.vector import Uint64Vector


class SiteJob(ABC):
    """A job that a site has approved, with its data.

    Args:
        job: What server and sites know of it.
        limits: Limits of the site.

    Attributes:
        permission: What of :data:`.MAY_SEND` allows the site's own vector to leave in the clear.
        limit_name: Option of the site's limits that is the largest number of jobs of this kind.
        noise_multiplier: Noise in its vectors, relative to the largest change by one patient; 0 for none.
        min_changes: Smallest number of patients by which two jobs may differ, if they differ; 0 for any.
        is_of_training_images: Whether the ε of single images covers its vectors. As in training, it does not cover
            scores of test images, which only the ledger of the site as a whole counts.
    """

    permission: str
    limit_name: str
    noise_multiplier: float = 0.0
    min_changes: int = 0
    is_of_training_images: bool = True

    def __init__(self, job: DeployedJob, limits: Limits) -> None:
        self.job = job
        self.limits = limits

    @property
    def max_jobs(self) -> int:
        """Largest number of jobs of this kind that the site answers, of all recipes together."""
        return int(getattr(self.limits, self.limit_name))

    def explain_rejection(self, ledger: Ledger) -> str:
        """Return why the site's budget does not allow the job; an empty text if it does.

        Args:
            ledger: What all runs and jobs have spent.
        """
        limits = self.limits
        kind = self.job.kind
        if limits.max_site_epsilon is not None:
            return (
                f"max_site_epsilon={limits.max_site_epsilon:g} limits what is learnt of the site as a whole, which no "
                f"{kind} protects"
            )
        if not self.is_of_training_images:
            return ""
        if limits.max_epsilon is None:
            if self.noise_multiplier:
                return f"the {kind} has noise, so the site must limit its ε: set limits: max_epsilon"
            return ""
        if not self.noise_multiplier:
            return f"max_epsilon={limits.max_epsilon:g} limits the ε of the site's images, and this {kind} has no noise"
        if not self.budget.affords(ledger.history(IMAGES_LEDGER), self.cost):
            return f"max_epsilon={limits.max_epsilon:g} cannot afford another {kind}"
        return ""

    @property
    def cost(self) -> History:
        """The step that one job with noise adds to the ledger of the site's images, as {(σ, q): steps}."""
        return {(self.noise_multiplier, 1.0): 1}

    @property
    def budget(self) -> SiteBudget:
        """What the site allows to be spent on its images."""
        return SiteBudget(self.limits, self.limits.max_epsilon, {})

    @abstractmethod
    def make_vector(self) -> list[int]:
        """Return the site's vector (V,), with its noise. It is called once per run of the job."""

    def digests_of_patients(self) -> bytes:
        """Return digests of the patients that are counted; empty if changes of them do not matter."""
        return b""

    def count_changes(self, before: bytes, after: bytes) -> int:
        """Return how many patients differ between two results of :meth:`digests_of_patients`."""
        return 0

    def own_row(self, vector: list[int]) -> list[int]:
        """Return what leaves in the clear if the site's file allows it (R,), by default the vector."""
        return vector

    def compare(self, own_vector: Sequence[int], total: Counts, num_sites: int) -> list[str]:
        """Return how the site differs from the others, for its own log.

        Args:
            own_vector: What the site added to the sum.
            total: The sum, according to the server.
            num_sites: Number of sites in it.
        """
        return []


@dataclass
class JobHandler:
    """Answers requests for jobs.

    Attributes:
        store: State folder of the site.
        permissions: What the site allows.
        party: The site among those that it hides among; None without secure sums.
        log: Log for reasons, which never leave the site.
    """

    store: SiteStore
    permissions: Permissions
    party: "Party | None"
    log: logging.Logger

    def answer(self, site_job: SiteJob, request: Request, message: bytes, message_digest: str) -> bytes:
        """Return the reply to a request; raise a RejectionError if the site rejects it."""
        # It also checks that the state is the one that this process wrote.
        self.store.current()
        if request.job != site_job.job.kind:
            raise RejectionError(f"{request.kind} was requested of a recipe for a job ({site_job.job.kind})", "other")
        if request.kind == "count":
            unpack(message, {})
            return self._answer_count(site_job, request, message_digest)
        record = self.store.totals.jobs.get(request.run)
        if record is None:
            raise RejectionError(f"nothing was counted in run {request.run}", "other")
        if record.recipe != request.recipe:
            # Else a vector would be in the sums of several recipes, over other sites in each.
            raise RejectionError(f"run {request.run} was begun with another recipe", "other")
        if request.kind in SUM_KINDS:
            return self._take_step(site_job, request, message_digest, record)
        if request.kind == "compare":
            return self._log_comparison(site_job, message, message_digest, record)
        raise RejectionError(f"{request.kind} cannot be requested of a job without training", "other")

    def spent(self, site_job: SiteJob) -> dict[str, float | None] | None:
        """Return the ε of the site's images over all runs and jobs, as the audit log has it; None without noise."""
        if not site_job.noise_multiplier:
            return None
        epsilon = site_job.budget.epsilon(self.store.totals.ledger.history(IMAGES_LEDGER))
        return {"spent": finite_or_none(epsilon), "delta": site_job.limits.delta}

    def _answer_count(self, site_job: SiteJob, request: Request, message_digest: str) -> bytes:
        """Make the site's vector, unless it was made before, and offer keys for the secure sum."""
        record = self.store.totals.jobs.get(request.run)
        if record is None:
            self._check_limits(site_job, request)
            patients = site_job.digests_of_patients()
            self._check_changes(site_job, patients)
            record = JobRecord(site_job.job.kind, request.recipe, site_job.make_vector(), patients)
        if record.recipe != request.recipe:
            raise RejectionError(f"run {request.run} was begun with another recipe", "other")
        facts: dict[str, Any] = {}
        if site_job.permission in self.permissions.may_send:
            facts["row"] = site_job.own_row(record.vector)
            record = replace(record, is_open=True)
        self._commit_record(site_job, request.run, record)
        keys: dict[str, Any] = {}
        if self.party is not None:
            terms = _terms_of_sum(site_job, replace(request, attempt=0))
            keys = self.party.offer_keys(terms, _no_claims(), begin=not record.is_masked)
        return pack(Response("ok", message_digest, facts, keys))

    def _check_limits(self, site_job: SiteJob, request: Request) -> None:
        """Raise a RejectionError if the site may not begin another job.

        The sums of two jobs over different sites differ by the vectors of single sites, and those of one job before
        and after a patient was added differ by this patient. So a recipe is answered in one sum only, and the number of
        recipes is limited.
        """
        kind = site_job.job.kind
        answered = self._find_answered(request.recipe)
        if answered is not None:
            raise RejectionError(
                f"this recipe was answered in run {answered}; to repeat the {kind}, approve a recipe with another name",
                "exhausted",
            )
        num_left = sum(record.kind == kind and record.has_left for record in self.store.totals.jobs.values())
        if num_left >= site_job.max_jobs:
            raise RejectionError(
                f"{num_left} jobs of the kind {kind} were answered, and {site_job.limit_name}={site_job.max_jobs} "
                "allows no more",
                "exhausted",
            )
        reason = site_job.explain_rejection(self.store.totals.ledger)
        if reason:
            raise RejectionError(reason, "exhausted")

    def _find_answered(self, recipe_digest: str) -> str | None:
        """Return the run in which the vector of a recipe has left under masks; None if it has not."""
        for run, record in self.store.totals.jobs.items():
            if record.is_masked and record.recipe == recipe_digest:
                return run
        return None

    def _check_changes(self, site_job: SiteJob, patients: bytes) -> None:
        """Raise a RejectionError if few patients have changed since a former job of this kind.

        The difference of the two sums would be theirs.

        Args:
            site_job: The job.
            patients: Digests of the patients that it counts.
        """
        for run, record in self.store.totals.jobs.items():
            if not record.has_left or record.kind != site_job.job.kind:
                continue
            num_changed = site_job.count_changes(record.patients, patients)
            if 0 < num_changed < site_job.min_changes:
                raise RejectionError(
                    f"{num_changed} patients were added, removed or changed since run {run}, and sums that differ by "
                    f"fewer than {site_job.min_changes} would show them; wait until more have changed",
                    "exhausted",
                )

    def _commit_record(self, site_job: SiteJob, run: str, record: JobRecord) -> None:
        """Commit the vector, which is made once, and its cost if it is about to leave for the first time."""
        totals = self.store.totals
        former = totals.jobs.get(run)
        if record == former:
            return
        ledger = deepcopy(totals.ledger)
        had_left = former is not None and former.has_left
        if record.has_left and not had_left:
            noise = site_job.noise_multiplier
            if noise:
                ledger.add(IMAGES_LEDGER, noise, 1.0, 1)
            elif site_job.is_of_training_images:
                add_step_without_noise(ledger, IMAGES_LEDGER)
            add_step_without_noise(ledger, SITE_LEDGER)
        jobs = {run: record}
        for other, kept in totals.jobs.items():
            # A job whose vector never left is over as soon as its recipe is run again.
            is_over = not kept.has_left and kept.recipe == record.recipe
            if other != run and not is_over:
                jobs[other] = kept
        self.store.commit_totals(replace(totals, ledger=ledger, jobs=jobs))

    def _take_step(self, site_job: SiteJob, request: Request, message_digest: str, record: JobRecord) -> bytes:
        """Take a step of the secure sum."""
        party = self.party
        if party is None:
            raise RejectionError("the site's file has no section secure_sums", "other")
        terms = _terms_of_sum(site_job, request)
        reply = party.saved_reply(terms, message_digest)
        answered = self._find_answered(request.recipe)
        may_repeat = reply is not None and answered == request.run
        if answered is not None and request.kind in ("keys", "mask") and not may_repeat:
            # The difference of two sums over other sites would be the vector of a single site.
            raise RejectionError(f"secure sum: the vector was already sent under masks in run {answered}", "other")
        if reply is None:
            if request.kind == "mask" and not record.has_left:
                # Other jobs may have been answered since this one was counted.
                self._check_limits(site_job, request)
                self._check_changes(site_job, record.patients)
            reply = self._make_reply(party, site_job, request, terms, message_digest, record)
            # The reply is made before the commit, which may fail: a step is taken once, so its reply is made once.
            party.save_reply(terms, message_digest, reply)
        if tensor_sizes(reply):
            # The commit precedes sending: the vector and its cost must be known after a crash.
            self._commit_record(site_job, request.run, replace(record, is_masked=True))
        return reply

    def _make_reply(
        self,
        party: "Party",
        site_job: SiteJob,
        request: Request,
        terms: "SumTerms",
        message_digest: str,
        record: JobRecord,
    ) -> bytes:
        """Take a step of the secure sum, and return the reply, which has a tensor only if it has the masked vector."""
        from perada.deploy.sums.party import StepReply
        from perada.deploy.sums.site import Objection

        def make_vector(num_sites: int, metric_names: Collection[str]) -> "Uint64Vector":
            return encode_counts(record.vector)

        try:
            step_reply = party.step(request, terms, _no_claims(), make_vector)
        except Objection as objection:
            # The server learns which sites are objected to, and not why.
            self.log.warning("run %s: %s", request.run, objection)
            step_reply = StepReply({"objects": objection.names})
        tensors: State = {}
        if step_reply.masked_vector is not None:
            tensors = {"masked": torch.from_numpy(step_reply.masked_vector)}
        if request.kind == "reveal":
            self.log.info("%s: sites in the sum: %s", site_job.job.kind, ", ".join(party.survivors(terms)))
        return pack(Response("ok", message_digest, sums=step_reply.content), tensors)

    def _log_comparison(self, site_job: SiteJob, message: bytes, message_digest: str, record: JobRecord) -> bytes:
        """Log how the site differs from the others. The reply says nothing of it."""
        if not record.is_masked:
            raise RejectionError("a sum is to be compared, but the site's vector is in none", "other")
        request_and_total = unpack(message, {TOTAL_NAME: ("U64", (site_job.job.size,))})
        num_sites = int(Request.read(request_and_total.header).clients)
        total = request_and_total.tensors[TOTAL_NAME].numpy().view(np.int64)
        try:
            lines = site_job.compare(record.vector, total, num_sites)
        except Exception:
            # A server could choose sums for which only some vectors fail, and learn this one from the code.
            self.log.exception("%s: the sum that the server sent cannot be compared", site_job.job.kind)
            lines = []
        for line in lines:
            name = self.party.name if self.party is not None else "this site"
            self.log.warning("%s: %s: %s", site_job.job.kind, name, printable(line))
        return pack(Response("ok", message_digest))


def _terms_of_sum(site_job: SiteJob, request: Request) -> "SumTerms":
    """Return the terms of the sum that a request is about, from the site's own recipe."""
    from perada.deploy.sums.keys import SumTerms

    job = site_job.job
    return SumTerms(request.run, 0, job.digest, job.options, request.attempt, of=job.kind)


def _no_claims() -> Any:  # noqa: ANN401  # the type is in a module that imports cryptography
    """Return what a site states beside its keys: nothing, since all sites are sent the same."""
    from perada.deploy.sums.keys import SiteClaims

    return SiteClaims()
