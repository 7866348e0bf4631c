# SPDX-License-Identifier: Apache-2.0
"""The end of a deployed round: the next global state is made of the answers, and what there is to note is noted."""

import logging
import math
from collections.abc import Mapping

from perada.core.ranks import Ranks
from perada.core.states import State, stack
from perada.deploy.measures import measured
from perada.deploy.messages import Answer
from perada.deploy.recipe import Recipe
from perada.deploy.records import Record
from perada.deploy.roster import Roster
from perada.federation.changes import changes, far
from perada.federation.round_report import RoundReport
from perada.federation.server import Server
from perada.server import Updates
from perada.server.distill import ServerData

log = logging.getLogger("perada.deploy")

Got = Mapping[int, tuple[Answer, State]]
"""Answers and updates by the number of the site."""


def close_round(recipe: Recipe, server: Server, roster: Roster, images: ServerData, record: Record, got: Got) -> None:
    """Make the next global state of what sites sent, and write the round into the progress."""
    progress, level, metrics, report = roster.progress, roster.level, dict[str, float](), RoundReport([])
    broken = [number for name, number in roster.numbers.items() if record.failed.get(name) == "broken"]
    counted = [*got, *broken] if level is not None else list(got)  # who broke depends on images
    if counted:
        plan = roster.plan(counted)
        everyone = list(range(len(plan.clients)))
        states = [_row(recipe, got, client) for client in plan.clients]
        sent = stack(states) if states[0] else {}
        received = server.sending(plan, len(progress.roster))
        if level is not None:
            level.spend(plan.clients)
            sent = server.privatized(level, sent, received, plan, everyone)
            metrics |= level.metrics()
            progress.level = level.state_dict()
        elif sent:
            slot = recipe.module.slot.parameters
            found = changes(slot, sent, received, everyone, everyone, len(everyone), Ranks(), cosines=False)
            record.far = {progress.roster[client].name: times for client, times in far(found[0], plan).items()}
        far_off = record.far if recipe.loop.refuse_far else {}
        rows = [row for row, one in enumerate(plan.clients) if progress.roster[one].name not in far_off]
        clients = [plan.clients[row] for row in rows]
        sizes = [progress.roster[client].size or 1 for client in clients]
        updates = Updates(sent, everyone, len(plan.clients)).part(rows)
        with recipe.context():
            given = progress.done, clients, len(progress.roster), updates, sizes, images, report
            server.close(*given, noisy=level is not None)
    record.void = "all broke" if not counted else "the new state was not finite" if report.broken_server else ""
    answers = {client: answer for client, (answer, _) in got.items()}
    roster.note(record, answers)
    metrics |= report.metrics | measured(recipe, record, progress.roster, [one.facts for one in answers.values()])
    progress.history.append({"round": float(progress.done), **metrics})
    progress.records.append(record)
    progress.done, progress.asked, progress.lengths = progress.done + 1, [], []
    for problem in filter(None, [record.void, "the distillation diverged" if report.diverged else ""]):
        log.warning("round %d: %s", record.round, problem)


def _row(recipe: Recipe, got: Got, client: int) -> State:
    """What a client sent; NaN of one whose training broke, which privacy of whole clients counts as no change."""
    if client in got:
        return {key: value.to(recipe.device) for key, value in got[client][1].items()}
    sent = recipe.template.sent
    return {key: value * math.nan if value.is_floating_point() else value for key, value in sent.items()}
