# SPDX-License-Identifier: Apache-2.0
"""Requests to train a round, or to fine-tune."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from perada.algorithms.base import Stacks
from perada.core.states import State, narrowed, widened
from perada.deploy.protocol import (
    RejectionError,
    Request,
    Response,
    pack,
    spec_of,
    unpack,
)
from perada.deploy.site.budget import add_step_without_noise, explain_image_epsilon
from perada.deploy.site.client import Client, TrainingResult
from perada.deploy.site.file import Limits
from perada.deploy.site.handler import ImageHandler
from perada.deploy.site.incoming import (
    Incoming,
    digest_for_all_sites,
    factors_to_cut,
    finite_or_none,
    lay_out,
    pack_response,
)
from perada.deploy.state import IMAGES_LEDGER, SITE_LEDGER, RunState, SummingState, TrainingState
from perada.privacy.account import Account, StepCost
from perada.privacy.accounting import Ledger
from perada.privacy.protection import Protection


@dataclass(frozen=True)
class _Outgoing:
    """What may leave a site after a training.

    Attributes:
        update: The update; empty after a fine-tuning.
        losses: Losses by role; empty if they may not leave.
        is_usable: Whether the server may use the update.
    """

    update: State
    losses: dict[str, Any]
    is_usable: bool


class TrainingHandler(ImageHandler):
    """Trains rounds, and commits each with what it has spent and its reply."""

    def train(self, client: Client, incoming: Incoming, run_state: RunState) -> RunState:
        """Train a round, or fine-tune, and commit the client's state, what it has spent and the reply in one step."""
        request = incoming.request
        self.permissions.check_images(client, run_state, self.log)
        received = _unpack_received(client, incoming.content, request)
        protection = client.protection(run_state.training.account, run_state.training.num_rounds)
        sampling = self._check_limits(client.limits, run_state, protection)
        ledger = deepcopy(self.store.totals.ledger)
        costs = self._affordable_costs(client, request, protection, ledger)

        result = client.train(request, received, run_state, protection)
        facts = self.permissions.allowed_facts("epsilon", _count_costs(protection.image_account, costs, ledger))
        if client.site_privacy is None:
            # The update leaves without site-level noise; if training failed, the server learns at least that.
            add_step_without_noise(ledger, SITE_LEDGER)
        # This must follow _count_costs(), which updates the account that is saved here.
        training = _training_after(run_state.training, client, incoming, protection, result)

        outgoing = self._outgoing_update(client, request, received, result)
        summing = run_state.summing
        sent = outgoing.update
        if client.settings.secure_sums is not None:
            # The update and the losses leave under masks only.
            summing = _with_summand(summing, request, received, outgoing)
            sent = {}
        elif outgoing.losses:
            facts["losses"] = outgoing.losses
        reply = pack(Response("ok", incoming.digest, facts), sent)
        problem = _problem_of_training(result)
        problem_of_reply = _problem_of_reply(reply, sent)
        if problem_of_reply:
            problem = problem_of_reply
        if problem:
            self.log.warning("round %d: %s", request.display_round, problem)
        if problem_of_reply or not outgoing.is_usable:
            reply = pack_response("broken", incoming.digest)
            summing = replace(summing, update={})
        run_state = replace(run_state, training=replace(training, reply=reply), summing=summing)
        totals = self.store.totals
        self.store.commit(run_state, replace(totals, ledger=ledger, rounds=totals.rounds + 1, sampling=sampling))
        return run_state

    def _affordable_costs(
        self, client: Client, request: Request, protection: Protection, ledger: Ledger
    ) -> Sequence[StepCost]:
        """Return the costs of a round for the ledgers of the site's images.

        Raises:
            RejectionError: If these, or the ledger of the site as a whole, cannot afford the round, or its norm is out
                of range.
        """
        costs = client.costs(request, protection, ledger)
        if costs is None:
            raise _exhausted_images(client, ledger)
        if client.site_privacy is not None and request.kind != "tune":
            client.site_privacy.check_norm(request.norm)
            client.site_privacy.check_budget(self.store.totals.ledger)
        return costs

    def _outgoing_update(
        self, client: Client, request: Request, received: State, training_result: TrainingResult
    ) -> _Outgoing:
        """Return what may leave the site after a training.

        Args:
            client: The client.
            request: The request to train.
            received: The state that the server sent.
            training_result: The result of the training.
        """
        trained = training_result.trained
        tuning = request.kind == "tune"
        is_usable = bool(trained.accepted[0]) or tuning
        losses: dict[str, Any] = {}
        if is_usable and training_result.losses:
            losses = self.permissions.allowed_facts("losses", training_result.losses)
        update: State = {}
        if not tuning:
            update = {key: value[0] for key, value in trained.sent.items()}
            update = narrowed(update, factors_to_cut(client, request), request.rank)
        adds_noise = client.settings.secure_sums is not None and client.site_privacy is not None
        if adds_noise and not is_usable:
            # Nobody may see that training broke: the site sends what it received, so that it adds noise only.
            update = {key: received.get(key, value) for key, value in update.items()}
            is_usable = True
        return _Outgoing(update, losses, is_usable)

    def _check_limits(self, limits: Limits, run_state: RunState, protection: Protection) -> str | None:
        """Check the site's limits of rounds and runs, and that private batches are drawn as before.

        Returns:
            How private batches of all runs are drawn; None if none was drawn.

        Raises:
            RejectionError: If a limit is reached.
        """
        totals = self.store.totals
        num_runs = len(self.store.runs)
        if limits.max_rounds is not None and totals.rounds >= limits.max_rounds:
            raise RejectionError(
                f"{totals.rounds} of max_rounds={limits.max_rounds} rounds have been trained, over all runs",
                "exhausted",
            )
        if not run_state.training.num_rounds and num_runs >= limits.max_runs:
            raise RejectionError(
                f"{num_runs} of max_runs={limits.max_runs} runs already exist, and this is a new one", "exhausted"
            )
        if protection.image_account is None:
            return totals.sampling
        sampling = protection.image_account.options.sampling
        if totals.sampling not in (None, sampling):
            # One ledger cannot account for two ways of drawing batches.
            raise RejectionError(
                f"batches were drawn with sampling={totals.sampling!r} before, but this recipe uses {sampling!r}",
                "exhausted",
            )
        return sampling


def _unpack_received(client: Client, message: bytes, request: Request) -> State:
    """Return the state that the server sent to be trained, as it lies in the server's memory."""
    template = client.recipe.template
    tuning = request.kind == "tune"
    full = template.initial if tuning else template.received
    # The server cuts the adapter to the site's rank during rounds, but sends it in full for fine-tuning.
    expected = full if tuning else narrowed(full, factors_to_cut(client, request), request.rank)
    tensors = unpack(message, spec_of(expected)).tensors
    widened_tensors = {key: widened(value, full[key].shape) for key, value in tensors.items()}
    return lay_out(widened_tensors, request)


def _training_after(
    training: TrainingState,
    client: Client,
    incoming: Incoming,
    protection: Protection,
    training_result: TrainingResult,
) -> TrainingState:
    """Return the state of a site's training after a round, or a fine-tuning.

    If the training broke, the client keeps its former personal state.

    Args:
        training: The state before.
        client: The client.
        incoming: The request.
        protection: The protection of the training, whose account has counted it.
        training_result: Its result.
    """
    request = incoming.request
    new_training = replace(
        training,
        round=request.round,
        num_rounds=training.num_rounds + 1,
        request_digest=incoming.digest,
        fingerprint=client.fingerprint,
    )
    if protection.image_account is not None:
        new_training = replace(new_training, account=protection.image_account.state_dict())
    if bool(training_result.trained.finite[0]):
        new_training = _with_client_state(new_training, training_result.trained.client_state, request.kind == "tune")
    return new_training


def _with_summand(summing: SummingState, request: Request, received: State, outgoing: _Outgoing) -> SummingState:
    """Return the state of a site's secure sums with what it is to add to the next one.

    Args:
        summing: The state before.
        request: The request to train.
        received: The state that the server sent.
        outgoing: What may leave the site under masks.
    """
    heard = {str(request.round): digest_for_all_sites(request, received)}
    return replace(
        summing,
        update=outgoing.update,
        received=received,
        norm=request.norm,
        losses=outgoing.losses,
        heard=summing.heard | heard,
    )


def _problem_of_reply(reply: bytes, sent: State) -> str:
    """Return why the server would not accept a reply; empty if it would."""
    try:
        unpack(reply, spec_of(sent))
    except RejectionError as error:
        return f"the result of the training cannot be sent: {error}"
    return ""


def _problem_of_training(training_result: TrainingResult) -> str:
    """Return what went wrong while the site trained, for its log; empty if nothing did."""
    if not bool(training_result.trained.finite[0]):
        return f"{training_result.failure or 'the training became NaN or infinite'}; the personal state is unchanged"
    if training_result.failure:
        return f"{training_result.failure}; it was left out of all batches"
    return ""


def _with_client_state(training: TrainingState, client_state: Stacks, tuning: bool) -> TrainingState:
    """Return a site's training with the states (1, ...) that the client keeps, by role."""
    kept: Stacks = {}
    for role, state in client_state.items():
        # Contiguous like those in the store of a simulation: rounding depends on strides.
        kept[role] = {key: value.cpu().contiguous() for key, value in state.items()}
    if tuning:
        return replace(training, tuned_state=kept)
    return replace(training, client_state=kept)


def _count_costs(account: Account | None, costs: Sequence[StepCost], ledger: Ledger) -> dict[str, Any]:
    """Charge the cost of a round to the site's images, in the run and in the ledger of all runs.

    Returns:
        The run's ε as a fact of the response; nothing without privacy.
    """
    if account is None:
        add_step_without_noise(ledger, IMAGES_LEDGER)
        return {}
    account.spend(costs)
    for _, sigma, rate, steps, _ in costs:
        ledger.add(IMAGES_LEDGER, sigma, rate, steps)
    return {"epsilon": {name: finite_or_none(values[0]) for name, values in account.epsilons([0]).items()}}


def _exhausted_images(client: Client, ledger: Ledger) -> RejectionError:
    """Return the error for a round that the ε of the site's images cannot afford."""
    reason = explain_image_epsilon(ledger)
    if reason and client.budget.max_epsilon is not None:
        return RejectionError(f"max_epsilon={client.budget.max_epsilon:g} cannot be met: {reason}", "exhausted")
    return RejectionError(
        "another round would exceed the largest ε that the recipe allows in this run, or the site over all runs "
        "(max_epsilon; by default that of one complete run)",
        "exhausted",
    )
