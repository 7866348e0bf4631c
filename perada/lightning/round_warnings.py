# SPDX-License-Identifier: Apache-2.0
"""Warnings about clients and server steps that went wrong in a round, and the limit of failures."""

from collections.abc import Sequence
from typing import NamedTuple

from pytorch_lightning.utilities.rank_zero import rank_zero_warn

from perada.core.checks import OptionError
from perada.federation.server import RoundReport
from perada.federation.settings import Settings
from perada.lightning.run_context import RunContext
from perada.scores.failed_outputs import REMEDY, describe_failed, describe_failed_teachers


def warn_of_failed_clients(when: str, client_ids: list[int], consequence: str, unreadable: dict[int, str]) -> None:
    """Warn of the clients whose training failed, and of the consequence.

    Args:
        when: When it failed, such as ``round 3``.
        client_ids: All clients whose training failed.
        consequence: Consequence for the clients and their adapters.
        unreadable: Those that failed because a sample could not be read, and why. The loss of the others was not
            finite.
    """
    for reason in unreadable.values():
        rank_zero_warn(f"{when}: {reason}; {consequence}")
    diverged = [str(client) for client in client_ids if client not in unreadable]
    if diverged:
        rank_zero_warn(
            f"{when}: the loss of client {', '.join(diverged)} became NaN or infinite; {consequence}. Lower the "
            "learning rate (of the clients, or of the server's rule if all clients diverge), or check the images."
        )


def warn_of_round(
    round: int, report: RoundReport, settings: Settings, client_names: Sequence[str] | None = None
) -> None:
    """Warn of what went wrong in a round.

    In a private run clients whose training failed or whose images cannot be read are not named: others than the clients
    read the logs, and no ledger accounts for it. Outliers and a server step that diverged follow from what clients
    sent, which the ledgers account for.

    Args:
        round: Number of the round, counted from 0.
        report: What happened in it.
        settings: Settings of the run.
        client_names: Names of the clients.
    """
    when = f"round {round + 1}"
    if not settings.private:
        consequence = "its adapter is unchanged and the round continues without it"
        warn_of_failed_clients(when, report.broken_clients, consequence, report.failed)
    if settings.drop_outliers:
        outlier_note = "It was dropped (drop_outliers)."
    else:
        outlier_note = "If this may be deliberate, set drop_outliers or choose a robust server rule."
    for client, ratio in report.server_result.outliers.items():
        rank_zero_warn(
            f"{when}: client {client} sent a change whose norm is {ratio:,.0f} times the round's median. {outlier_note}"
        )
    if report.server_result.failed_teachers:
        teachers = describe_failed_teachers(
            report.server_result.failed_teachers, client_names, anonymous=settings.private
        )
        rank_zero_warn(
            f"{when}: the distillation became NaN or infinite, since the outputs of {teachers} on public images are; "
            f"the round continues with the clients' average. Remedy: {REMEDY}."
        )
    elif report.server_result.diverged:
        rank_zero_warn(
            f"{when}: the distillation became NaN or infinite; the round continues with the clients' average. Lower "
            "its learning rate (distillation.lr)."
        )
    if report.server_result.discarded:
        rank_zero_warn(
            f"{when}: the server's aggregate of the clients' states became NaN or infinite; the global state is "
            f"unchanged. Check {settings.rule.kind} and the options of {settings.algorithm.kind}."
        )


def warn_of_failed_outputs(context: RunContext) -> None:
    """Warn of the models whose outputs have become NaN or infinite since they were scored last."""
    rounds_done = context.federation.rounds_done
    new = [entry for entry in context.results.failed_outputs if entry.since == rounds_done]
    if new:
        message = describe_failed(new, context.data.client_names, anonymous=context.settings.private)
        rank_zero_warn(f"{message}; {REMEDY}")


class Failures(NamedTuple):
    """Numbers of clients drawn in a round, and of those whose training failed."""

    drawn: float
    failed_share: float


class NothingLearnedError(ValueError):
    """A run in which every client failed in every round."""


def check_failures(failures_of_rounds: Sequence[Failures], limit: int | None) -> None:
    """Raise an OptionError if clients have failed more than ``max_failures`` times in all rounds so far."""
    count = int(sum(round.failed_share for round in failures_of_rounds))
    if limit is not None and count > limit:
        raise OptionError(
            f"max_failures={limit}: clients failed {count} times in {len(failures_of_rounds)} rounds (see the "
            "warnings); fix the causes and resume (ckpt_path=last), or raise max_failures",
            name="max_failures",
            value=limit,
        )


def check_anything_learned(failures_of_rounds: Sequence[Failures]) -> None:
    """Raise a NothingLearnedError if every client failed in every round of a run."""
    if failures_of_rounds and all(round.drawn == round.failed_share for round in failures_of_rounds):
        raise NothingLearnedError(
            f"every client failed in all {len(failures_of_rounds)} rounds (see the warnings), so nothing was learned; "
            "fix the data, or lower the learning rates"
        )
