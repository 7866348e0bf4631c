# SPDX-License-Identifier: Apache-2.0
"""A round of a deployed run: sites are asked, their answers checked and aggregated, and metrics taken and logged."""

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from pytorch_lightning.loggers import Logger
from torch import Tensor

from perada.core.rounds import RoundPlan, make_plan
from perada.core.states import State, stack, to_device
from perada.deploy.protocol import STEPS, RefusalError, Request, Response, Spec, digest, read_header, unpack
from perada.deploy.recipe import Recipe
from perada.deploy.server.progress import Member, RoundRecord, RunProgress
from perada.deploy.transport import Failure, Terms, Transport
from perada.federation.server import RoundReport, Server, parameter_counts
from perada.federation.settings import lora_ranks
from perada.privacy.accounting import check_delta_covers
from perada.server import Updates
from perada.server.distill import ServerData

Got = Mapping[int, tuple[Response, State]]
"""Answers and updates by the number of the site."""
Facts = Mapping[str, Any]
"""What a site says beside its update (:class:`perada.deploy.protocol.Response`)."""
PASSING = ("late", "unreachable", "crashed")
"""Codes after which a site may be asked again in the same round."""
UNTRAINED = ("exhausted", "unapproved", "past", "future", "other", "protocol")
"""Codes of sites that have refused to train."""
REPEAT = 10
"""A site that was not let in is asked again in each tenth round; one that did not answer, in the next."""

log = logging.getLogger("perada.deploy")


class Roster:
    """The sites of a run, whose numbers are their places in ``progress.roster``; ``outside`` are those not in it."""

    def __init__(self, progress: RunProgress, terms: Terms, recipe: Recipe) -> None:
        self.progress, self.terms = progress, terms
        self.settings, self.batch_size = recipe.settings(), recipe.data.batch_size
        self.level = recipe.level(terms.min_sites)  # a target is for a site that takes part in every round
        if self.level is not None and progress.level is not None:
            self.level.load_state_dict(progress.level)
        self.outside: dict[str, str] = {}  # why a site that is connected has not joined
        self._model = recipe.settings().algorithm, recipe.module.slot, recipe.template.initial

    @property
    def lora_ranks(self) -> tuple[int, ...]:
        """The sites' ranks of LoRA; empty where they have the adapter's."""
        return self._ranks(self.progress.roster)

    def _ranks(self, members: Sequence[Member]) -> tuple[int, ...]:
        sizes = [None if self.settings.private else member.size for member in members]
        return lora_ranks(*self._model, [member.name for member in members], sizes)

    @property
    def numbers(self) -> dict[str, int]:
        """The number of each site."""
        return {member.name: number for number, member in enumerate(self.progress.roster)}

    def newcomers(self, names: Iterable[str]) -> list[str]:
        """Those of ``names`` that are to be asked to join now."""
        known = set(self.numbers)
        if len(known) >= self.terms.min_sites and self.progress.done % REPEAT:
            known |= {name for name, reason in self.outside.items() if reason not in PASSING}
        return sorted(set(names) - known)

    def admit(self, answers: Mapping[str, Response], failed: Mapping[str, str]) -> None:
        """Let those of the newcomers join who answered as they should."""
        progress = self.progress
        for name in sorted({*answers, *failed}):
            if reason := failed.get(name) or self._objection(name, answers[name]):
                self.outside[name] = reason
                log.warning("site %s does not join: %s", name, reason, extra={"site": name})
            else:
                self.outside.pop(name, None)
                progress.labels = answers[name].facts["labels"]
                progress.roster.append(Member(name, answers[name].facts.get("size"), progress.done))

    def _objection(self, name: str, answer: Response) -> str:
        """Why a site is not let in; empty if it is."""
        labels, size = answer.facts.get("labels"), answer.facts.get("size")
        try:
            self._ranks([*self.progress.roster, Member(name, size, self.progress.done)])
            if self.settings.client_privacy is not None:  # the more sites there are, the smaller delta must be
                sites = len(self.progress.roster) + 1
                check_delta_covers("client_privacy", self.settings.client_privacy.delta, sites, "sites with this one")
        except ValueError as error:
            return str(error)
        if labels is None or self.progress.labels not in ("", labels):
            return "it has other classes than the recipe, or the sites before it"
        if size is None:
            weighted = self.settings.weighting == "samples" and self.settings.secure_sums is None
            return "weighting='samples' needs its size, which it does not send" if weighted else ""
        steps = sum(make_plan(0, [0], [size], self.settings.phases, self.batch_size).lengths) if size else 0
        return "" if 0 < steps <= STEPS else f"it says that it has {size} images, which cannot be"

    def eligible(self, names: Sequence[str]) -> list[int]:
        """Numbers of the sites that may be asked, of those that are connected."""
        roster, last = self.progress.roster, self.progress.done - 1
        present = [number for number, member in enumerate(roster) if member.name in names and not member.left]
        if self.level is not None:
            present = self.level.affordable(present)
        ready = [number for number in present if last < 0 or roster[number].late != last]
        return ready if self.terms.late == "skip" and len(ready) >= self.terms.min_sites else present

    def plan(self, clients: Sequence[int]) -> RoundPlan:
        """A round of so many of the sites; those that do not say their size count as one image."""
        sizes = [member.size or 1 for member in self.progress.roster]
        return make_plan(self.progress.done, clients, sizes, self.settings.phases, self.batch_size)

    def note_tuned(self, answers: Mapping[str, Response], failed: Mapping[str, str]) -> None:
        """Write down what the fine-tuning cost the sites, which only their release ledgers count.

        Args:
            answers: Of the sites that did it, by name.
            failed: Codes of the others that were asked.
        """
        for member in self.progress.roster:
            if member.name in answers:
                member.epsilon = answers[member.name].facts.get("epsilon", member.epsilon)
            elif failed.get(member.name, "exhausted") not in UNTRAINED:
                # It may have trained, and nobody here knows.
                member.epsilon = member.epsilon | {"release": None}

    def note(self, record: RoundRecord, got: Mapping[int, Response]) -> None:
        """Write down who took part, who was late and who is not to be asked any more."""
        for client, answer in got.items():
            member = self.progress.roster[client]
            member.rounds += 1
            member.last_round = record.round + 1
            member.epsilon = answer.facts.get("epsilon", member.epsilon)
        for member in self.progress.roster:
            code = record.failed.get(member.name)
            if code in ("exhausted", "unapproved"):
                member.left = code
            if code == "late":
                member.late = record.round
            if code == "broken":
                # It has spent as much as for an update, and its reply says nothing of that: its next one will.
                member.epsilon = {"server": None, "release": None}


def ask(
    transport: Transport,
    messages: Mapping[str, bytes],
    enough: int,
    seconds: float,
    expected: Mapping[str, Spec],
    record: RoundRecord,
) -> tuple[dict[str, tuple[Response, State]], dict[str, str]]:
    """Send messages to sites by name, and take what comes back within so many ``seconds``, or until it is ``enough``.

    Megabytes are added to the ``record``.

    Returns:
        The answers that have the tensors ``expected`` of each site, in the order in which they came, and the codes of
        all others.
    """
    answers: dict[str, tuple[Response, State]] = {}
    record.down += sum(map(len, messages.values())) / 1e6
    begin = time.monotonic()
    found = transport.exchange(messages, enough, max(0.001, seconds))
    log.info("%s in %.1f s", _said(messages, found), time.monotonic() - begin)
    failed = {name: "late" for name in messages if name not in found}
    for name, reply in found.items():
        if isinstance(reply, Failure):
            failed[name] = reply.code
            continue
        record.up += len(reply) / 1e6
        try:
            answer = Response.read(read_header(reply))  # first of all its protocol
            _, state = unpack(reply, expected[name] if answer.code == "ok" else {})
            if answer.answers != digest(messages[name]):
                raise RefusalError("it answers another message")
        except RefusalError as error:
            log.warning("site %s: %s: %s", name, error.code, error)
            failed[name] = error.code
            continue
        if answer.code == "ok":
            answers[name] = answer, state
        else:
            failed[name] = answer.code
    return answers, failed


def _said(messages: Mapping[str, bytes], found: Mapping[str, bytes | Failure]) -> str:
    """What was asked, and who replied."""
    order = Request.read(read_header(next(iter(messages.values()))))
    others = [f"{name} {reply.code}" for name, reply in found.items() if isinstance(reply, Failure)]
    replied = f"{len(found) - len(others)} of {len(messages)} sites replied"
    return f"{order}: {', '.join([replied, *others])}"


def close_round(
    recipe: Recipe,
    server: Server,
    roster: Roster,
    images: ServerData,
    record: RoundRecord,
    got: Got,
    summed: Tensor | None = None,
) -> None:
    """Make the next global state of what sites sent, and write the round into the progress.

    After a secure sum the states in ``got`` are its mean, and ``summed`` is as of :meth:`.Server.close`.
    """
    progress, level, metrics, report = roster.progress, roster.level, dict[str, float](), RoundReport([])
    broken = [number for name, number in roster.numbers.items() if record.failed.get(name) == "broken"]
    counted = [*got, *broken] if level is not None and not recipe.noisy else list(got)  # who broke depends on images
    if level is not None and recipe.noisy:  # what came under masks has cost, also where the round is void
        masked = [roster.numbers[name] for name in record.masked]
        level.spend(level.cost(roster.plan(masked)) if masked else [])
    if counted:
        plan = roster.plan(counted)
        everyone, sizes = list(range(len(plan.clients))), [member.size or 1 for member in progress.roster]
        states = [_row(recipe, got, client, plan.round) for client in plan.clients]
        sent, received = stack(states) if states[0] else {}, server.sending(plan, len(sizes))
        if level is not None and not recipe.noisy:
            level.spend(level.cost(plan))
        with recipe.context():
            both = Updates(sent, everyone, len(everyone)), Updates(received, everyone, len(everyone))
            server.close(plan, *both, everyone, level, sizes, images, report, summed=summed)
        record.far = {progress.roster[client].name: times for client, times in report.far.items()}
    if level is not None and (counted or record.masked):
        metrics |= level.metrics()
        progress.level = level.state_dict()
    nothing = record.void or "all broke"
    record.void = nothing if not counted else "the new state was not finite" if report.broken_server else ""
    answers = {client: answer for client, (answer, _) in got.items()}
    roster.note(record, answers)
    ranks = server.ranks_of(list(got))
    metrics |= report.metrics | measured(
        recipe, record, progress.roster, [one.facts for one in answers.values()], ranks
    )
    progress.history.append({"round": float(progress.done), **metrics})
    progress.records.append(record)
    progress.done, progress.asked = progress.done + 1, []
    for problem in filter(None, [record.void, "the distillation diverged" if report.diverged else ""]):
        log.warning("round %d: %s", record.round + 1, problem)


def _row(recipe: Recipe, got: Got, client: int, round: int) -> State:
    """What a client sent; NaN of one whose training broke, which privacy of whole clients counts as no change."""
    if client in got and recipe.noisy:  # the mean of changes, in double precision
        whole = {key: value for key, value in recipe.sent(round).items() if not value.is_floating_point()}
        return whole | got[client][1]
    if client in got:
        return to_device(got[client][1], recipe.device)
    sent = recipe.sent(round).items()
    return {key: value * math.nan if value.is_floating_point() else value for key, value in sent}


def measured(
    recipe: Recipe, record: RoundRecord, roster: Sequence[Member], facts: Sequence[Facts], ranks: Sequence[int] = ()
) -> dict[str, float]:
    """Metrics of a round, from the facts of the sites that count in it, and their ranks of LoRA, if any."""
    template, loop = recipe.template, recipe.loop
    given = loop.algorithm, loop.phases, recipe.module.slot, record.round
    found = parameter_counts(*given, template.opened, recipe.sent(record.round), ranks)
    found |= {"comm/up_mb": record.up, "comm/down_mb": record.down}
    found |= {"deploy/asked": float(len(record.asked)), "deploy/answered": float(len(record.answered))}
    for role in template.opened:
        losses = [fact["losses"][role] for fact in facts if role in fact.get("losses", {})]
        if losses and len(losses) == len(facts):
            found[f"train/{role}_loss"] = float(torch.tensor(losses).mean())
    return found | (epsilons(roster) if loop.privacy is not None else {})


def epsilons(roster: Sequence[Member]) -> dict[str, float]:
    """Mean and largest ε of the sites of a private run.

    Sites that do not tell theirs are not left out: the others' would pass for that of all.
    """
    metrics = {}
    for ledger in ("release", "server"):
        spent = torch.tensor([member.spent(ledger) for member in roster])
        metrics[f"privacy/{ledger}_epsilon_mean"] = float(spent.mean())
        metrics[f"privacy/{ledger}_epsilon_max"] = float(spent.max())
    return metrics


def log_each(loggers: list[Logger], method: str, *given: object, **named: object) -> None:
    """Call a method of each logger. One that fails is named and left out from then on: rounds are not lost for it."""
    for logger in list(loggers):
        try:
            getattr(logger, method)(*given, **named)
        except Exception as error:  # a disk that is full, a service that is away
            log.warning("%s is left out: %s (%s)", type(logger).__name__, error, type(error).__name__)
            loggers.remove(logger)


def log_round(loggers: list[Logger], row: Mapping[str, float]) -> None:
    """Log metrics of the round ``row["round"]``, which is the step too, by the names of a simulation; no NaN."""
    given = {name: value for name, value in row.items() if not math.isnan(value)} | {"epoch": row["round"]}
    log_each(loggers, "log_metrics", given, step=int(row["round"]))
    log_each(loggers, "save")
