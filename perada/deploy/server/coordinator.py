# SPDX-License-Identifier: Apache-2.0
"""The server of a deployed run: it sends requests to sites, and closes rounds with those that answered."""

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from perada.core.rounds import RoundPlan, sample_cohort
from perada.core.states import State, narrowed, strides_of, widened
from perada.deploy.protocol import (
    SUM_KINDS,
    Request,
    RequestKind,
    Response,
    Spec,
    max_message_size,
    pack,
    spec_of,
)
from perada.deploy.recipe import ServerRecipe, labels_digest
from perada.deploy.server import SERVER_STATE
from perada.deploy.server.progress import (
    RoundRecord,
    RunProgress,
    SavedRun,
    read_saved_run,
    write_progress,
)
from perada.deploy.server.rounds import (
    TRANSIENT,
    Roster,
    SiteReplies,
    ask_sites,
    close_round,
    epsilon_metrics,
    log_each,
    log_round,
)
from perada.deploy.server.scored_rounds import ScoredRounds
from perada.deploy.server.summed_rounds import SummedRounds
from perada.deploy.server.waits import SiteWaits, next_wait
from perada.deploy.sums.vector import check_cryptography
from perada.deploy.transport import Terms, Transport
from perada.federation.both_models import without_both_models
from perada.federation.local_trainer import LocalTrainer
from perada.federation.server import Server
from perada.federation.setup_checks import RunSetup, check_run
from perada.privacy.accounting import check_delta_covers
from perada.server.sums import SecureSums
from perada.system.disk_errors import DiskError, naming_disk
from perada.system.files import FolderLock

PAUSE = 0.5
"""Seconds between two attempts."""
LOG_INTERVAL = 30.0
"""Seconds between two log lines about sites that are waited for."""

ResultT = TypeVar("ResultT")

log = logging.getLogger("perada.deploy")


@dataclass(frozen=True)
class _Replies:
    """What sites answered.

    Attributes:
        selected: The sites that were sent a request, spare ones among them.
        answered: Responses and tensors by the name of the site, in the order in which they came.
    """

    selected: list[str]
    answered: dict[str, tuple[Response, State]]


@dataclass(frozen=True)
class _RepliesOfAll:
    """What came of a request to all connected sites.

    Attributes:
        responses: Responses of the sites that answered, by name.
        failed: Codes of the other sites, by name.
    """

    responses: dict[str, Response]
    failed: dict[str, str]


class Coordinator:
    """Runs the rounds of a recipe over a transport, and saves its state after each round.

    Args:
        recipe: Recipe of the run.
        transport: Transport to the sites.
        folder: State folder.
        terms: Terms of the run.

    Attributes:
        progress: Progress of the run.
        server: Server with the global state.
        roster: Sites of the run.
        sample: Number of sites that are asked in a round; None for all.
        summed_rounds: Secure sums of the run.
        scored_rounds: Scores of the models on the sites' test images.

    Raises:
        ValueError: If the recipe cannot be deployed, or the folder holds another run.
        FileNotFoundError: If there is nothing to resume.
        OSError: If another server uses the folder, or it cannot be read or written.
    """

    def __init__(self, recipe: ServerRecipe, transport: Transport, folder: Path, terms: Terms) -> None:
        self.recipe = recipe
        self.transport = transport
        self.folder = folder
        self.terms = terms
        recipe.build(recipe.num_classes, recipe.task)
        module = recipe.module
        self.settings = recipe.settings()
        self.sample = terms.sample or self.settings.clients_per_round
        self.public_images = recipe.public_images()
        self._check_terms()
        check_run(self._run_setup())
        no_effect = without_both_models(self.settings, recipe.loop.evaluation.prediction)
        if no_effect is not None:
            log.info("%s", no_effect)
        self.server = Server(LocalTrainer(module.engine, module.tensor_names, self.settings), module.initial_state)
        if not terms.resume and (folder / SERVER_STATE).exists():
            raise ValueError(
                f"{str(folder)!r} already contains a run; resume it (resume), or choose a different folder"
            )
        with naming_disk(folder):
            self._lock = FolderLock(folder, "server")
        states_before: dict[str, Any] = {}
        self._waits = SiteWaits(terms.deadline)
        try:
            with naming_disk(folder):
                if terms.resume:
                    saved_run = self._resume_run()
                    self.progress = saved_run.progress
                    states_before = saved_run.states.get("former", {})
                else:
                    self.progress = self._begin_run()
        except (ValueError, OSError):
            self._lock.close()
            raise
        transport.max_bytes = self._max_reply_size()
        self.loggers = list(recipe.loggers)
        # Each start logs all rounds of the run.
        for row in self.progress.history:
            log_round(self.loggers, row)
        self.roster = Roster(self.progress, terms, recipe)
        self.summed_rounds = SummedRounds(
            recipe=recipe,
            settings=self.settings,
            server=self.server,
            roster=self.roster,
            progress=self.progress,
            public_images=self.public_images,
            folder=folder,
            ask=self._ask_for_sum,
            retry_on_disk_failure=self._retry_on_disk_failure,
            states_before=states_before,
        )
        self.scored_rounds = ScoredRounds(
            recipe=recipe,
            settings=self.settings,
            server=self.server,
            roster=self.roster,
            progress=self.progress,
            summed_rounds=self.summed_rounds,
            sites_per_round=self.sample,
        )

    def _begin_run(self) -> RunProgress:
        """Return the progress of a new run."""
        recipe = self.recipe
        progress = RunProgress(secrets.token_hex(16), recipe.digest, recipe.rounds, has_classes=recipe.task.has_classes)
        if recipe.classes is not None:
            progress.labels = labels_digest(recipe.num_classes, recipe.task, recipe.classes)
        return progress

    def _resume_run(self) -> SavedRun:
        """Restore the states of an interrupted run, and return what was saved of it."""
        saved_run = read_saved_run(self.folder)
        progress = saved_run.progress
        if (progress.recipe, progress.rounds) != (self.recipe.digest, self.recipe.rounds):
            raise ValueError(
                f"{str(self.folder)!r} contains a run of a different recipe or different weights; use the original ones"
            )
        self.server.load_state_dict(saved_run.states)
        for member in progress.roster:
            # A site that has lied may have been repaired meanwhile.
            member.lie = ""
        return saved_run

    def _max_reply_size(self) -> int:
        """Return the largest size of a reply. Tensors may differ between odd and even rounds."""
        recipe = self.recipe
        if self.settings.secure_sums is None:
            return max(max_message_size(recipe.sent(round)) for round in range(2))
        vector_size = max(recipe.contents(round, self.public_images).size for round in range(2))
        return max_message_size({}) + 8 * vector_size

    def _check_terms(self) -> None:
        """Check that the recipe can be deployed on these terms.

        Raises:
            ValueError: If it cannot.
        """
        settings = self.settings
        terms = self.terms
        if self.sample is not None and self.sample < terms.min_sites:
            raise ValueError(
                f"min_sites={terms.min_sites} cannot be met: the recipe's clients_per_round asks only {self.sample} "
                "sites per round; set sample, the number of sites to ask, or lower min_sites"
            )
        if settings.secure_sums is not None:
            self._check_terms_of_sums(settings.secure_sums)
        if settings.client_privacy is not None:
            check_delta_covers("client_privacy", settings.client_privacy.delta, terms.min_sites, "sites (min_sites)")

    def _check_terms_of_sums(self, secure_sums: SecureSums) -> None:
        """Raise a ValueError if the terms do not support secure sums."""
        check_cryptography()
        if self.terms.min_sites < secure_sums.min_sites:
            raise ValueError(
                f"min_sites={self.terms.min_sites} must be at least {secure_sums.min_sites}, the min_sites of the "
                "recipe's secure_sums; raise it"
            )
        if self.terms.late == "skip":
            raise ValueError("secure_sums does not support late='skip': its steps wait for all sites; use 'wait'")

    def _run_setup(self) -> RunSetup:
        """Return what the server knows of the run before any site joins."""
        module = self.recipe.module
        return RunSetup(
            settings=self.settings,
            prediction=module.evaluation.prediction,
            tensor_names=module.tensor_names,
            initial_state=module.initial_state,
            num_classes=self.recipe.num_classes,
            num_clients=None,
            fewest_clients=self.terms.min_sites,
            fewest_clients_source=f"min_sites={self.terms.min_sites}",
            num_public=self.public_images.public_size,
            num_labelled=0,
        )

    def close(self) -> None:
        """Finalize the loggers and unlock the folder."""
        log_each(self.loggers, "finalize", "success")
        self._lock.close()

    def run(self) -> RunProgress:
        """Train all remaining rounds, fine-tune if the recipe does, and score.

        Raises:
            TimeoutError: If fewer than ``min_sites`` answered in time; it names those that are missing, and the run can
                be resumed.
            OSError: If the disk failed for a whole deadline; the run can be resumed.
        """
        progress = self.progress
        score_interval = self.recipe.trainer.check_val_every_n_epoch or 1
        while progress.done < progress.rounds:
            if progress.done and progress.done % score_interval == 0 and progress.scored < progress.done:
                self._evaluate_sites()
            self._run_round()
        if self.settings.algorithm.personalization() and not progress.tuned:
            self._tune_sites()
        if progress.scored < progress.done:
            self._evaluate_sites()
        return progress

    def _tune_sites(self) -> None:
        """Have all sites fine-tune after the last round."""
        progress = self.progress
        begin = time.monotonic()
        state = self.server.global_state
        replies = self._ask_everyone("tune", state, strides=strides_of(state))
        tuned = replies.responses
        self.roster.note_tuned(tuned, replies.failed)
        if len(tuned) < self.terms.min_sites:
            missing = {name: "not tuned" for name in self.roster.numbers if name not in tuned}
            raise TimeoutError(self._too_few_message("fine-tuning", len(tuned), missing, begin))
        if self.settings.privacy is not None:
            progress.history[-1] |= epsilon_metrics(progress.roster)
        progress.tuned = True
        # The tuned models have not been scored.
        progress.scored = -1
        self._save_progress()

    # Asking

    def _make_request(self, kind: RequestKind, client: int = 0, **fields: Any) -> Request:
        """Return a request to a site; ``fields`` are those specific to its kind."""
        progress = self.progress
        ranks = self.roster.lora_ranks
        return Request(
            kind=kind,
            run=progress.run,
            recipe=progress.recipe,
            round=progress.done,
            client=client,
            clients=max(1, len(progress.roster)),
            rank=ranks[client] if ranks else 0,
            **fields,
        )

    def _ask_until_enough(
        self,
        names: Sequence[str],
        message_for: Callable[[str], bytes],
        expected_for: Callable[[str], State],
        end: float,
        record: RoundRecord,
        enough: int | None = None,
        spare: Sequence[str] = (),
    ) -> _Replies:
        """Ask sites until all or enough have answered, or time runs out.

        A site whose failure is transient is asked again, after a while if its disk failed; one that fails for good is
        replaced by a spare one.

        Args:
            names: Sites to ask.
            message_for: Returns the message for a site.
            expected_for: Returns an example of the tensors that a site must send.
            end: When the time is over, as of ``time.monotonic``.
            record: Record that gets the codes of sites that failed.
            enough: Number of responses after which not to wait for others; None for all.
            spare: Sites that may be asked in place of others, in this order.
        """
        selected = list(names)
        spare = list(spare)
        num_places = len(selected)
        responses: dict[str, tuple[Response, State]] = {}
        asked_sites: set[str] = set()
        while True:
            while spare and _count_places_taken(selected, record) < num_places:
                selected.append(spare.pop(0))
            pending = [name for name in selected if name not in responses and _may_answer(name, record)]
            num_wanted = len(pending)
            if enough is not None:
                num_wanted = min(num_wanted, enough - len(responses))
            if num_wanted <= 0:
                return _Replies(selected, responses)
            # A site whose disk failed waits before it is asked again, and not before it is asked something new.
            waiting = asked_sites - set(self._waits.due(asked_sites, time.monotonic()))
            due = [name for name in pending if name not in waiting]
            if not due:
                # The disks of all remaining sites have failed.
                _sleep_until(min(end, self._waits.next_due(pending, time.monotonic())))
                if time.monotonic() >= end:
                    return _Replies(selected, responses)
                continue
            messages = {name: message_for(name) for name in due}
            specs = {name: spec_of(expected_for(name)) for name in due}
            num_wanted = min(num_wanted, len(due))
            replies = ask_sites(self.transport, messages, num_wanted, end - time.monotonic(), specs, record)
            asked_sites.update(due)
            self._reject_invalid_modes(replies)
            self._note_disks(replies)
            responses |= replies.responses
            for name in replies.responses:
                # It may have failed when it was asked before.
                record.failed.pop(name, None)
            record.failed |= replies.failed
            if time.monotonic() >= end:
                return _Replies(selected, responses)
            if replies.failed and not replies.responses:
                _pause_before_retry(end)

    def _note_disks(self, replies: SiteReplies) -> None:
        """Record which sites' disks failed, so that these sites are not asked again at once."""
        for name in replies.responses:
            self._waits.note_answer(name)
        for name, code in replies.failed.items():
            if code != "disk":
                continue
            wait = self._waits.note_failure(name, time.monotonic())
            log.warning(
                "site %s cannot use its disk, and its log names the file; it is asked again in %.1f s at the earliest",
                name,
                wait,
                extra={"site": name},
            )

    def _reject_invalid_modes(self, replies: SiteReplies) -> None:
        """Move replies with numbers of modes that the run does not have to the failed ones."""
        for name, (_, state) in list(replies.responses.items()):
            if not self._has_valid_modes(state):
                del replies.responses[name]
                replies.failed[name] = "malformed"

    def _has_valid_modes(self, state: State) -> bool:
        """Return whether the integers sent with the model are numbers of modes that the run has.

        Negative ones are rejected where the reply is unpacked.
        """
        num_modes = self.settings.algorithm.modes
        for key, value in state.items():
            is_of_model = key in self.recipe.module.tensor_names.keys or value.is_floating_point()
            # A masked vector may have any numbers.
            is_masked = value.dtype == torch.uint64
            if is_of_model or is_masked:
                continue
            if int(value.max()) >= num_modes:
                return False
        return True

    def _ask_everyone(self, kind: RequestKind, tensors: State, **fields: Any) -> _RepliesOfAll:
        """Ask all connected sites, within the deadline."""
        numbers = self.roster.numbers
        record = RoundRecord(self.progress.done)
        connected = self.transport.names()
        names = [name for name in numbers if name in connected]
        end = time.monotonic() + self.terms.deadline

        def message_for(name: str) -> bytes:
            return pack(self._make_request(kind, numbers[name], **fields), tensors)

        replies = self._ask_until_enough(names, message_for, lambda _: {}, end, record)
        for name, code in record.failed.items():
            log.warning("%s: site %s: %s", kind, name, code, extra={"site": name})
        responses = {name: replies.answered[name][0] for name in names if name in replies.answered}
        return _RepliesOfAll(responses, record.failed)

    def _gather_sites(self, end: float) -> list[int]:
        """Wait until enough sites are connected.

        Returns:
            The numbers of the sites that may be asked, in the order in which the recipe draws them.

        Raises:
            TimeoutError: If there are too few at the time ``end``.
        """
        progress = self.progress
        min_sites = self.terms.min_sites
        begin = time.monotonic()
        next_log = 0.0
        while True:
            connected = self.transport.names()
            # Messages already sent state the number of sites, so nobody may join now.
            if not progress.selected:
                # A site that never answers must not take half of every round.
                share = 1 / 2 if len(progress.roster) < min_sites else 1 / 10
                self._admit_newcomers(connected, (end - time.monotonic()) * share)
            eligible = self.roster.eligible(connected)
            if len(eligible) >= min_sites or time.monotonic() >= end:
                break
            if time.monotonic() >= next_log:
                next_log = time.monotonic() + LOG_INTERVAL
                self._log_waiting(len(eligible), end)
            _pause_before_retry(end)
        if len(eligible) < min_sites:
            missing = self._missing_members(eligible)
            raise TimeoutError(self._too_few_message(f"round {progress.done + 1}", len(eligible), missing, begin))
        num_sites = len(progress.roster)
        # All sites are drawn in order if some may be left out, since spare ones follow those that are asked.
        num_drawn = num_sites if self.sample else None
        return sample_cohort(self.settings.seed, progress.done, num_sites, num_drawn, lambda _: eligible)

    def _log_waiting(self, num_ready: int, end: float) -> None:
        """Log that the round waits for sites, at most until the time ``end``."""
        outside = ", ".join(f"{name} ({reason})" for name, reason in self.roster.outside.items())
        log.info(
            "round %d waits for sites, for at most %.0f s more: %d of at least %d are ready; connected but not "
            "joined: %s",
            self.progress.done + 1,
            end - time.monotonic(),
            num_ready,
            self.terms.min_sites,
            outside or "none",
        )

    def _missing_members(self, eligible: Sequence[int]) -> dict[str, str]:
        """Return why the members that are not eligible are missing, by their names."""
        missing = {}
        for number, member in enumerate(self.progress.roster):
            if number not in eligible:
                missing[member.name] = member.left or "unreachable"
        return missing

    def _admit_newcomers(self, connected: Sequence[str], seconds: float) -> None:
        """Ask connected sites that are not in the run to join it."""
        newcomers = self._waits.due(self.roster.newcomers(connected), time.monotonic())
        if not newcomers:
            return
        messages = dict.fromkeys(newcomers, pack(self._make_request("join")))
        specs: dict[str, Spec] = {name: {} for name in newcomers}
        record = RoundRecord(self.progress.done)
        replies = ask_sites(self.transport, messages, len(newcomers), seconds, specs, record)
        self._note_disks(replies)
        self.roster.admit({name: response for name, (response, _) in replies.responses.items()}, replies.failed)

    def _too_few_message(self, task: str, num_answered: int, missing: Mapping[str, str], begin: float) -> str:
        """Return the message of the error that too few sites answered a task, which started at ``begin``."""
        missing = {**missing, **self.roster.outside}
        names = ", ".join(f"{name} ({code})" for name, code in missing.items())
        num_returning = sum(code not in ("exhausted", "unapproved") for code in missing.values())
        if missing and num_answered + num_returning < self.terms.min_sites:
            remedy = (
                "Sites that are exhausted or have not approved the recipe will not return: end the run here, or lower "
                "min_sites"
            )
        else:
            remedy = "Resume when they are back, or lower min_sites"
        return (
            f"{task}: {num_answered} of at least {self.terms.min_sites} sites answered in "
            f"{time.monotonic() - begin:.0f} s (the deadline is {self.terms.deadline:g} s); missing: "
            f"{names or 'no other site has ever connected'}. {remedy}"
        )

    # A round

    def _run_round(self) -> None:
        """Train one round with the sites that answer in time."""
        progress = self.progress
        begin = time.monotonic()
        end = begin + self.terms.deadline
        record = RoundRecord(progress.done)
        drawn = self._gather_sites(end)
        self.server.lora_ranks = self.roster.lora_ranks
        self.summed_rounds.check_honest_sites()
        names = [progress.roster[number].name for number in drawn]
        # After a crash the same sites receive the same messages again, which they recognise.
        if not progress.selected:
            progress.selected = names[: self.sample]
        if self.settings.secure_sums is not None:
            number_of_first = self.roster.numbers[progress.selected[0]]
            self.summed_rounds.note_sent(self._training_message(number_of_first))
        # The selection is saved before sites are asked, so that a restarted server asks the same ones.
        save_begin = time.monotonic()
        self._save_progress()
        # The sites have as much time as ever if the server waited for its disk.
        end += time.monotonic() - save_begin
        answered = self._ask_to_train(record, names, end, begin)
        if self.settings.secure_sums is None:
            self._close_round(record, answered)
        else:
            self.summed_rounds.close(record, answered)
        record.seconds = time.monotonic() - begin
        progress.history[-1]["deploy/seconds"] = record.seconds
        self._save_progress()
        log_round(self.loggers, progress.history[-1])

    def _ask_to_train(
        self,
        record: RoundRecord,
        names: Sequence[str],
        end: float,
        begin: float,
    ) -> dict[str, tuple[Response, State]]:
        """Have sites train, and record who did.

        Args:
            record: Record of the round.
            names: Sites that may be asked, in the order drawn.
            end: When the deadline is over.
            begin: When the round has begun.

        Returns:
            Responses and updates; without updates for a secure sum, to which they are sent later.

        Raises:
            TimeoutError: If too few did.
        """
        progress = self.progress
        terms = self.terms
        numbers = self.roster.numbers
        spare = [name for name in names if name not in progress.selected]
        full_update = self.recipe.sent(record.round)

        def message_for(name: str) -> bytes:
            return self._training_message(numbers[name])

        def expected_for(name: str) -> State:
            if self.settings.secure_sums is not None:
                return {}
            return self._narrow_state(full_update, numbers[name])

        # Sites whose training broke do not count here: they answer quickly, and must take nobody's place.
        enough = terms.min_sites if terms.late == "skip" else None
        replies = self._ask_until_enough(progress.selected, message_for, expected_for, end, record, enough, spare)
        if terms.late == "skip":
            # Replies beyond the first ones that are needed do not count.
            for name in list(replies.answered)[terms.min_sites :]:
                del replies.answered[name]
                record.failed[name] = "late"
        self._check_enough_trained(replies, record, begin)
        self._record_participation(replies, record)
        return replies.answered

    def _check_enough_trained(self, replies: _Replies, record: RoundRecord, begin: float) -> None:
        """Raise a TimeoutError if too few sites trained in a round that began at ``begin``."""
        num_trained = len(replies.answered) + sum(code == "broken" for code in record.failed.values())
        if num_trained >= self.terms.min_sites:
            return
        missing = {}
        for name in replies.selected:
            if name not in replies.answered:
                missing[name] = record.failed.get(name, "late")
        raise TimeoutError(self._too_few_message(f"round {self.progress.done + 1}", num_trained, missing, begin))

    def _record_participation(self, replies: _Replies, record: RoundRecord) -> None:
        """Record which sites were asked, which have answered, and which were not connected."""
        record.selected = replies.selected
        record.answered = [name for name in replies.selected if name in replies.answered]
        record.outside = dict(self.roster.outside)
        connected = set(self.transport.names())
        record.away = []
        for member in self.progress.roster:
            is_absent = member.name not in connected and member.name not in replies.selected
            if is_absent and not member.left:
                record.away.append(member.name)

    def _close_round(self, record: RoundRecord, answered: Mapping[str, tuple[Response, State]]) -> None:
        """Close a round with the sites' updates."""
        numbers = self.roster.numbers
        full_update = self.recipe.sent(record.round)
        updates = {}
        # Updates are in the order of the requests: rounding must not depend on which site answered first.
        for name in record.answered:
            response, state = answered[name]
            widened_state = {key: widened(value, full_update[key].shape) for key, value in state.items()}
            updates[numbers[name]] = (response, widened_state)
        close_round(self.recipe, self.server, self.roster, self.public_images, record, updates)

    def _ask_for_sum(
        self,
        summand: str,
        record: RoundRecord,
        kind: RequestKind,
        attempt: int,
        contents: Mapping[str, dict[str, Any]],
        vector_size: int,
    ) -> dict[str, tuple[Response, State]]:
        """Request a step of a secure sum from sites; an :class:`.AskForSum`."""
        from perada.deploy.server.summing import MASKED_VECTOR_NAME

        numbers = self.roster.numbers
        expected: State = {}
        if vector_size:
            expected[MASKED_VECTOR_NAME] = torch.zeros(vector_size, dtype=torch.uint64)

        def message_for(name: str) -> bytes:
            return pack(self._make_request(kind, numbers[name], attempt=attempt, of=summand, sums=contents[name]))

        # A record of its own: a site that failed in an earlier step is asked in this one.
        step_record = RoundRecord(record.round)
        end = time.monotonic() + self.terms.deadline / len(SUM_KINDS)
        replies = self._ask_until_enough(list(contents), message_for, lambda _: expected, end, step_record)
        if kind == "mask":
            record.masked = sorted({*record.masked, *replies.answered})
        record.failed |= step_record.failed
        record.up += step_record.up
        record.down += step_record.down
        return replies.answered

    def _training_message(self, client: int) -> bytes:
        """Return the message to a site in a round. It depends only on the states and on which sites are asked."""
        progress = self.progress
        if self.settings.algorithm.compares_models:
            state = self.server.global_state
            narrowed_state = state
        else:
            received = self.server.broadcast(RoundPlan(progress.done, (client,), ((0,),)), len(progress.roster))
            state = {key: value[0] for key, value in received.items()}
            narrowed_state = self._narrow_state(state, client)
        clipping_norm = 0.0
        client_level = self.roster.client_level
        if client_level is not None and self.recipe.noisy:
            clipping_norm = client_level.norm
        request = self._make_request(
            "train",
            client,
            factor=self.recipe.loop.training.rate_factor(progress.done, progress.rounds),
            norm=clipping_norm,
            strides=strides_of(state),
        )
        return pack(request, narrowed_state)

    def _narrow_state(self, state: State, client: int) -> State:
        """Cut a state that is sent to or by a site to the rank of the site's LoRA."""
        ranks = self.server.lora_ranks
        if not ranks:
            return state
        return narrowed(state, self.recipe.module.tensor_names.factors, ranks[client])

    def _evaluate_sites(self) -> None:
        """Have sites score the models on their own test images, and average what they send."""
        progress = self.progress
        models = self.scored_rounds.models_to_score()
        replies = self._ask_everyone(
            "evaluate", models.tensors, models=models.num_members, strides=strides_of(self.server.global_state)
        )
        scores = self.scored_rounds.average(replies.responses)
        progress.history[-1] |= scores
        progress.scored = progress.done
        self._save_progress()
        log_round(self.loggers, scores | {"round": progress.history[-1]["round"]})

    def _save_progress(self) -> None:
        """Write the states and the progress."""
        states = self.server.state_dict()
        if self.summed_rounds.states_before:
            states["former"] = self.summed_rounds.states_before
        self._retry_on_disk_failure(lambda: write_progress(self.folder, self.progress, states))

    def _retry_on_disk_failure(self, access: Callable[[], ResultT]) -> ResultT:
        """Read or write files of the run. If the disk fails, wait for it, at most for a deadline.

        Args:
            access: Reads or writes them, and may be called again.

        Returns:
            Its result.

        Raises:
            OSError: If the disk fails for longer.
        """
        end = time.monotonic() + self.terms.deadline
        wait: float | None = None
        while True:
            try:
                self._lock.check_in_place()
                with naming_disk(self.folder):
                    result = access()
            except DiskError as error:
                if time.monotonic() >= end:
                    raise OSError(f"{error}; then resume the run") from error
                if wait is None:
                    log.error("%s; the run waits for it, for at most %.0f s", error, self.terms.deadline)
                wait = next_wait(wait, self.terms.deadline)
                _sleep_until(min(end, time.monotonic() + wait))
                continue
            if wait is not None:
                log.info("%s can be read and written again; the run continues", self.folder)
            return result


def _pause_before_retry(end: float) -> None:
    """Wait before the next attempt, at most until the time ``end``."""
    _sleep_until(min(end, time.monotonic() + PAUSE))


def _sleep_until(end: float) -> None:
    """Wait until the time ``end``, as of ``time.monotonic``."""
    time.sleep(max(0.0, end - time.monotonic()))


def _may_answer(name: str, record: RoundRecord) -> bool:
    """Return whether a site can still answer: it has not failed yet, or a failure is transient."""
    return record.failed.get(name) in (None, *TRANSIENT)


def _count_places_taken(selected: Sequence[str], record: RoundRecord) -> int:
    """Count the selected sites that are not to be replaced by spare ones.

    A site whose training broke keeps its place: it has taken part.
    """
    return sum(_may_answer(name, record) or record.failed[name] == "broken" for name in selected)
