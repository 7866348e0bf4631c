# SPDX-License-Identifier: Apache-2.0
"""A round of a deployed run: its sites, their answers, and how it is aggregated and logged."""

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.loggers import Logger
from torch import Tensor

from perada.core.rounds import RoundPlan, make_plan
from perada.core.states import State, laid_out, stack, strides_of, to_device
from perada.deploy.protocol import (
    MAX_STEPS,
    RejectionError,
    Request,
    Response,
    Spec,
    digest_of_message,
    read_header,
    unpack,
)
from perada.deploy.recipe import Recipe
from perada.deploy.server.progress import SCORE_PREFIXES, Member, RoundRecord, RunProgress
from perada.deploy.transport import Failure, Terms, Transport
from perada.federation.server import RoundContext, Server, ServerResult, parameter_counts
from perada.federation.settings import lora_ranks
from perada.privacy.accounting import check_delta_covers
from perada.scores.failed_outputs import REMEDY, describe_failed_teachers
from perada.server import Updates
from perada.server.distill import ServerData
from perada.system.disk_errors import DISK_ERRORS, as_disk_error

UpdatesBySite = Mapping[int, tuple[Response, State]]
"""Responses and updates by the number of the site."""
Facts = Mapping[str, Any]
"""What a site sends beside its update (:class:`perada.deploy.protocol.Response`)."""
TRANSIENT = ("late", "unreachable", "crashed", "disk")
"""Codes of failures after which a request may be sent to the site again in the same round."""
TRAINING_REJECTIONS = ("exhausted", "unapproved", "past", "future", "other", "protocol")
"""Codes of sites that reject a request to train."""
ADMISSION_INTERVAL = 10
"""Number of rounds between two requests to join to a site that was not admitted.

A site that did not answer gets one in every round.
"""

log = logging.getLogger("perada.deploy")


class Roster:
    """The sites of a run, whose numbers are their indices in ``progress.roster``.

    Args:
        progress: Progress of the run.
        terms: Terms of the run.
        recipe: Recipe of the run.

    Attributes:
        client_level: Client-level privacy; None if the recipe has none.
        outside: Why connected sites have not joined, by name.
    """

    def __init__(self, progress: RunProgress, terms: Terms, recipe: Recipe) -> None:
        self.progress = progress
        self.terms = terms
        self.settings = recipe.settings()
        self.batch_size = recipe.data.batch_size
        # The noise of a target ε is calibrated for a site that takes part in every round.
        self.client_level = recipe.level(terms.min_sites)
        if self.client_level is not None and progress.client_level is not None:
            self.client_level.load_state_dict(progress.client_level)
        self.outside: dict[str, str] = {}
        self._tensor_names = recipe.module.tensor_names
        self._initial = recipe.template.initial

    @property
    def lora_ranks(self) -> tuple[int, ...]:
        """LoRA rank of each site; empty if all have the adapter's rank."""
        return self._lora_ranks(self.progress.roster)

    def _lora_ranks(self, members: Sequence[Member]) -> tuple[int, ...]:
        """Return the LoRA rank of each member."""
        names = [member.name for member in members]
        sizes: list[int | None] = [None] * len(members)
        if not self.settings.private:
            sizes = [member.size for member in members]
        return lora_ranks(self.settings.algorithm, self._tensor_names, self._initial, names, sizes)

    @property
    def numbers(self) -> dict[str, int]:
        """Number of each site, by its name."""
        return {member.name: number for number, member in enumerate(self.progress.roster)}

    def newcomers(self, names: Iterable[str]) -> list[str]:
        """Return the sites that should be asked to join now.

        Args:
            names: Names of the connected sites.
        """
        # With enough members, sites with a lasting reason not to join are asked only in some rounds.
        skipped = set(self.numbers)
        if len(skipped) >= self.terms.min_sites and self.progress.done % ADMISSION_INTERVAL:
            skipped |= {name for name, reason in self.outside.items() if reason not in TRANSIENT}
        return sorted(set(names) - skipped)

    def admit(self, responses: Mapping[str, Response], failed: Mapping[str, str]) -> None:
        """Admit new sites to the run, or record why they cannot join.

        Args:
            responses: Responses of the sites that answered, by name.
            failed: Codes of the others, by name.
        """
        progress = self.progress
        for name in sorted({*responses, *failed}):
            reason = failed.get(name) or self._reason_against(name, responses[name])
            if reason:
                self.outside[name] = reason
                # A failed disk has been logged, with the time of the next attempt.
                if reason != "disk":
                    log.warning("site %s cannot join: %s", name, reason, extra={"site": name})
                continue
            self.outside.pop(name, None)
            facts = responses[name].facts
            progress.labels = facts["labels"]
            progress.roster.append(Member(name, facts.get("size"), progress.done))
        if not progress.done and not progress.selected:
            # Before the first round, numbers follow from the names, even if a site could not join at once.
            progress.roster.sort(key=lambda member: member.name)

    def _reason_against(self, name: str, response: Response) -> str:
        """Return the reason why a site cannot join; "" if it can."""
        labels = response.facts.get("labels")
        size = response.facts.get("size")
        members = self.progress.roster
        try:
            self._lora_ranks([*members, Member(name, size, self.progress.done)])
            client_privacy = self.settings.client_privacy
            if client_privacy is not None:
                # With every further site, delta must be smaller.
                check_delta_covers("client_privacy", client_privacy.delta, len(members) + 1, "sites with this one")
        except ValueError as error:
            return str(error)
        if labels is None or self.progress.labels not in ("", labels):
            return "its classes differ from those of the recipe or of earlier sites"
        if size is None:
            needs_size = self.settings.weighting == "samples" and self.settings.secure_sums is None
            if needs_size:
                return "weighting='samples' needs its size, which it does not send"
            return ""
        num_steps = 0
        if size:
            plan = make_plan(0, [0], [size], self.settings.phases, self.batch_size)
            num_steps = plan.num_batches
        if not 0 < num_steps <= MAX_STEPS:
            return f"it reports an impossible number of images, {size}"
        return ""

    def eligible(self, names: Sequence[str]) -> list[int]:
        """Return the numbers of the sites that may be selected for a round.

        Args:
            names: Names of the connected sites.
        """
        last_round = self.progress.done - 1
        members = self.progress.roster
        eligible = [number for number, member in enumerate(members) if member.name in names and not member.left]
        if self.client_level is not None:
            eligible = self.client_level.affordable(eligible)
        if self.terms.late == "skip" and last_round >= 0:
            punctual = [number for number in eligible if members[number].late != last_round]
            if len(punctual) >= self.terms.min_sites:
                return punctual
        return eligible

    def plan(self, clients: Sequence[int]) -> RoundPlan:
        """Return the plan of a round for sites given by their numbers.

        A site that does not report its size is planned with one image.
        """
        sizes = [member.size or 1 for member in self.progress.roster]
        return make_plan(self.progress.done, clients, sizes, self.settings.phases, self.batch_size)

    def note_tuned(self, responses: Mapping[str, Response], failed: Mapping[str, str]) -> None:
        """Record the privacy cost of the fine-tuning, which only the sites' release ledgers count.

        Args:
            responses: Responses of the sites that were fine-tuned, by name.
            failed: Codes of the other sites that received a request.
        """
        for member in self.progress.roster:
            if member.name in responses:
                member.epsilon = responses[member.name].facts.get("epsilon", member.epsilon)
            elif failed.get(member.name, "exhausted") not in TRAINING_REJECTIONS:
                # The site may have trained without the server knowing, so its ε is unknown.
                member.epsilon = member.epsilon | {"release": None}

    def note_round(self, record: RoundRecord, responses: Mapping[int, Response]) -> None:
        """Record which sites took part in a round, which were late, and which have left the run."""
        for client, response in responses.items():
            member = self.progress.roster[client]
            member.rounds += 1
            member.last_round = record.round + 1
            member.epsilon = response.facts.get("epsilon", member.epsilon)
        for member in self.progress.roster:
            code = record.failed.get(member.name)
            if code in ("exhausted", "unapproved"):
                member.left = code
            if code == "late":
                member.late = record.round
            if code == "broken":
                # The site has spent this round's ε; its new total is unknown until its next reply.
                member.epsilon = {"server": None, "release": None}


@dataclass(frozen=True)
class SiteReplies:
    """What sites replied to messages.

    Attributes:
        responses: Response and tensors of each site that replied as requested, by name.
        failed: Codes of all other sites, by name.
    """

    responses: dict[str, tuple[Response, State]]
    failed: dict[str, str]


def ask_sites(
    transport: Transport,
    messages: Mapping[str, bytes],
    enough: int,
    seconds: float,
    spec_of_site: Mapping[str, Spec],
    record: RoundRecord,
) -> SiteReplies:
    """Send messages to sites, and check their replies.

    Args:
        transport: Transport of the run.
        messages: Message to each site, by name.
        enough: Number of replies after which the others are not awaited.
        seconds: Maximum waiting time.
        spec_of_site: Names, dtypes and shapes of the tensors that each site's response must have.
        record: Record of the round, to which the megabytes are added.

    Returns:
        The responses in the order of arrival, and the codes of all other sites.
    """
    responses: dict[str, tuple[Response, State]] = {}
    record.down += sum(map(len, messages.values())) / 1e6
    begin = time.monotonic()
    replies = transport.exchange(messages, enough, max(0.001, seconds))
    log.info("%s in %.1f s", _describe_exchange(messages, replies), time.monotonic() - begin)
    failed = {name: "late" for name in messages if name not in replies}
    for name, reply in replies.items():
        if isinstance(reply, Failure):
            failed[name] = reply.code
            continue
        record.up += len(reply) / 1e6
        try:
            # The header is read first, since a reply with another protocol or an error has no tensors.
            response = Response.read(read_header(reply))
            spec = spec_of_site[name] if response.code == "ok" else {}
            state = unpack(reply, spec).tensors
            if response.answers != digest_of_message(messages[name]):
                raise RejectionError("it answers a different message")
        except RejectionError as error:
            log.warning("site %s: %s: %s", name, error.code, error)
            failed[name] = error.code
            continue
        if response.code == "ok":
            responses[name] = response, state
        else:
            failed[name] = response.code
    return SiteReplies(responses, failed)


def _describe_exchange(messages: Mapping[str, bytes], replies: Mapping[str, bytes | Failure]) -> str:
    """Return a log line about a request: what was requested, and which sites did not reply."""
    request = Request.read(read_header(next(iter(messages.values()))))
    failures = [f"{name} {reply.code}" for name, reply in replies.items() if isinstance(reply, Failure)]
    replied = f"{len(replies) - len(failures)} of {len(messages)} sites replied"
    return f"{request}: {', '.join([replied, *failures])}"


def close_round(
    recipe: Recipe,
    server: Server,
    roster: Roster,
    server_data: ServerData,
    record: RoundRecord,
    updates: UpdatesBySite,
    summed_logits: Tensor | None = None,
) -> None:
    """Compute the next global state from the sites' updates, and add the round to the progress.

    Args:
        recipe: Recipe of the run.
        server: The server, whose state is changed.
        roster: Sites of the run.
        server_data: Public images.
        record: Record of the round.
        updates: Responses and updates by the number of the site. After a secure sum every update is the mean of all.
        summed_logits: Sum of the sites' logits after a secure sum, the ``logit_sum`` of a
            :class:`~perada.federation.server.RoundContext`.
    """
    progress = roster.progress
    client_level = roster.client_level
    _spend_masked(recipe, roster, record)
    counted = _counted_sites(recipe, roster, record, updates)
    result = ServerResult()
    if counted:
        result = _aggregate_updates(recipe, server, roster, server_data, counted, updates, summed_logits)
    _note_result(roster, record, counted, result, private=server.settings.private)

    responses = {client: response for client, (response, _) in updates.items()}
    roster.note_round(record, responses)
    facts = [response.facts for response in responses.values()]

    metrics: dict[str, float] = {}
    # A round that cost nothing does not change the client-level privacy.
    if client_level is not None:
        metrics |= client_level.metrics()
        if counted or record.masked:
            progress.client_level = client_level.state_dict()
    metrics |= result.metrics
    metrics |= round_metrics(recipe, record, progress.roster, facts, server.ranks_of(list(updates)))
    _append_round(progress, record, metrics)


def _spend_masked(recipe: Recipe, roster: Roster, record: RoundRecord) -> None:
    """Count the privacy cost of the masked vectors that arrived, which they have even if the round is void."""
    client_level = roster.client_level
    if client_level is None or not recipe.noisy or not record.masked:
        return
    masked = [roster.numbers[name] for name in record.masked]
    costs = client_level.round_costs(roster.plan(masked))
    client_level.spend(costs)


def _counted_sites(recipe: Recipe, roster: Roster, record: RoundRecord, updates: UpdatesBySite) -> list[int]:
    """Return the numbers of the sites whose updates are aggregated."""
    counted = list(updates)
    if roster.client_level is not None and not recipe.noisy:
        # Whether training fails depends on images, so a site whose training failed must be counted too.
        counted += [number for name, number in roster.numbers.items() if record.failed.get(name) == "broken"]
    return counted


def _note_result(
    roster: Roster, record: RoundRecord, counted: Sequence[int], server_result: ServerResult, private: bool
) -> None:
    """Record the outliers of a round and why it is void, and log what went wrong."""
    members = roster.progress.roster
    if not counted:
        # A failed secure sum has already stated its reason.
        record.void = record.void or "all broke"
    else:
        record.outliers = {members[client].name: multiple for client, multiple in server_result.outliers.items()}
        record.void = "the new state was not finite" if server_result.discarded else ""
    if record.void:
        log.warning("round %d: %s", record.round + 1, record.void)
    if server_result.failed_teachers:
        names = [member.name for member in members]
        teachers = describe_failed_teachers(server_result.failed_teachers, names, anonymous=private)
        log.warning(
            "round %d: the distillation diverged, since the outputs of %s on public images are NaN or infinite; %s",
            record.round + 1,
            teachers,
            REMEDY,
        )
    elif server_result.diverged:
        log.warning("round %d: the distillation diverged", record.round + 1)


def _append_round(progress: RunProgress, record: RoundRecord, metrics: Mapping[str, float]) -> None:
    """Add a completed round to the progress."""
    progress.history.append({"round": float(progress.done), **metrics})
    progress.records.append(record)
    progress.done += 1
    progress.selected = []


def _aggregate_updates(
    recipe: Recipe,
    server: Server,
    roster: Roster,
    server_data: ServerData,
    counted: Sequence[int],
    updates: UpdatesBySite,
    summed_logits: Tensor | None,
) -> ServerResult:
    """Compute the next global state from the updates of the sites that count."""
    plan = roster.plan(counted)
    everyone = list(range(len(plan.clients)))
    sizes = [member.size or 1 for member in roster.progress.roster]
    states = [_update_of(recipe, updates, client, plan.round) for client in plan.clients]
    received = server.broadcast(plan, len(sizes))
    update_rows: State = {}
    if states[0]:
        update_rows = _laid_out_as(received, stack(states))
    # The updates are those of all sites, even if the algorithm sends nothing.
    site_updates = Updates(update_rows, everyone, len(everyone))
    context = RoundContext(
        plan=plan,
        received=site_updates.replace(received),
        train_sizes=sizes,
        server_data=server_data,
        level=roster.client_level,
        logit_sum=summed_logits,
    )
    if roster.client_level is not None and not recipe.noisy:
        roster.client_level.spend(roster.client_level.round_costs(plan))
    with recipe.context():
        return server.aggregate(context, site_updates, valid=everyone)


def _laid_out_as(received: State, sent: State) -> State:
    """Copy what C sites sent (C, ...) into the memory layout of what they had received, as it is in a simulation.

    What comes over a network is contiguous, and the last bits of a teacher's outputs depend on the layout.
    """
    received_of_same_shape = {}
    for name, value in sent.items():
        if name in received and received[name].shape == value.shape:
            received_of_same_shape[name] = received[name]
    return laid_out(sent, strides_of(received_of_same_shape))


def _update_of(recipe: Recipe, updates: UpdatesBySite, client: int, round: int) -> State:
    """Return what a client sent; NaN if its training failed, which client-level privacy counts as no change."""
    example = recipe.sent(round)
    if client not in updates:
        nothing_finite = {}
        for key, value in example.items():
            nothing_finite[key] = value * math.nan if value.is_floating_point() else value
        return nothing_finite
    _, update = updates[client]
    if recipe.noisy:
        # Changes are averaged in double precision; integers are not part of the mean.
        integers = {key: value for key, value in example.items() if not value.is_floating_point()}
        return integers | update
    return to_device(update, recipe.device)


def round_metrics(
    recipe: Recipe,
    record: RoundRecord,
    roster: Sequence[Member],
    facts_of_sites: Sequence[Facts],
    lora_ranks: Sequence[int] = (),
) -> dict[str, float]:
    """Return the metrics of a round.

    Args:
        recipe: Recipe of the run.
        record: Record of the round.
        roster: Sites of the run.
        facts_of_sites: Facts of the sites that count in the round.
        lora_ranks: Their ranks of LoRA, if they have their own.
    """
    loop = recipe.loop
    opened = recipe.template.opened
    sent = recipe.sent(record.round)
    metrics = parameter_counts(
        loop.algorithm, loop.phases, recipe.module.tensor_names, record.round, opened, sent, lora_ranks
    )
    metrics["comm/up_mb"] = record.up
    metrics["comm/down_mb"] = record.down
    metrics["deploy/selected"] = float(len(record.selected))
    metrics["deploy/answered"] = float(len(record.used))
    for role in opened:
        losses = [fact["losses"][role] for fact in facts_of_sites if role in fact.get("losses", {})]
        if losses and len(losses) == len(facts_of_sites):
            metrics[f"train/{role}_loss"] = float(torch.tensor(losses).mean())
    if loop.privacy is not None:
        metrics |= epsilon_metrics(roster)
    return metrics


def epsilon_metrics(roster: Sequence[Member]) -> dict[str, float]:
    """Return the mean and largest ε of the sites of a private run.

    A site that does not report its ε makes them infinite: the ε of the others must not be taken for that of all.
    """
    metrics = {}
    for ledger in ("release", "server"):
        spent = torch.tensor([member.spent(ledger) for member in roster])
        metrics[f"privacy/{ledger}_epsilon_mean"] = float(spent.mean())
        metrics[f"privacy/{ledger}_epsilon_max"] = float(spent.max())
    return metrics


def log_each(loggers: list[Logger], method_name: str, *args: object, **kwargs: object) -> None:
    """Call a method of each logger. One that fails is removed with a warning, so that it costs no rounds.

    A logger whose disk fails is called again in the next round.
    """
    for logger in list(loggers):
        try:
            getattr(logger, method_name)(*args, **kwargs)
        except Exception as error:  # a full disk, or a service that cannot be reached
            if isinstance(error, OSError) and error.errno in DISK_ERRORS:
                disk_error = as_disk_error(error, Path(logger.save_dir or "."))
                log.warning("%s: %s; it is used again in the next round", type(logger).__name__, disk_error)
                continue
            log.warning(
                "%s failed and is not used any more: %s (%s)", type(logger).__name__, error, type(error).__name__
            )
            loggers.remove(logger)


def log_round(loggers: list[Logger], row: Mapping[str, float]) -> None:
    """Log the metrics of a round under the names of a simulation; ``row["round"]`` is the step.

    NaN is left out, except for scores: the last number would look like the score of this round.
    """
    metrics = {}
    for name, value in row.items():
        if name.startswith(SCORE_PREFIXES) or not math.isnan(value):
            metrics[name] = value
    metrics["epoch"] = row["round"]
    log_each(loggers, "log_metrics", metrics, step=int(row["round"]))
    log_each(loggers, "save")
