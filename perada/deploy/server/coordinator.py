# SPDX-License-Identifier: Apache-2.0
"""The server of a deployed run: it asks sites over a transport, and closes rounds with those who answered."""

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load

from perada.core.files import FolderLock
from perada.core.rounds import RoundPlan, sample_cohort
from perada.core.states import State, narrowed, strides_of, widened
from perada.deploy.protocol import (
    SUM_KINDS,
    RefusalError,
    Request,
    RequestKind,
    Response,
    digest,
    max_message_size,
    pack,
    read_header,
    spec_of,
)
from perada.deploy.recipe import ServerRecipe, labels_digest
from perada.deploy.scores import mean_scores, summed_scores
from perada.deploy.server.progress import (
    SERVER_STATE,
    RoundRecord,
    RunProgress,
    participation_of,
    read_progress,
    read_sum,
    write_progress,
    write_sum,
)
from perada.deploy.server.rounds import (
    PASSING,
    Roster,
    ask,
    close_round,
    epsilons,
    log_each,
    log_round,
)
from perada.deploy.sums.progress import MAX_HEARD_ROUNDS
from perada.deploy.sums.vector import SPOILED, Contents, SumResult, check_cryptography
from perada.deploy.transport import Terms, Transport
from perada.federation.cohort import Site
from perada.federation.secure_sums import check_secure_sums
from perada.federation.server import FAR, Server
from perada.federation.settings import check_distilled_batch_norm, check_factors, check_rule, check_server_images
from perada.privacy.accounting import check_delta_covers
from perada.privacy.rehearsal import check_client_level
from perada.server.sums import SecureSums

PAUSE = 0.5
"""Seconds between two attempts."""
SAID = 30.0
"""Seconds between two lines that say what is waited for."""

MOVES = 20
"""Of so many secure sums is it remembered how far they moved the model."""
SPOILED_ROUNDS = 2
"""After so many spoiled rounds in a row the model from before the last sum is put back."""

log = logging.getLogger("perada.deploy")


class Coordinator:
    """Runs the rounds of a recipe over a transport. What it knows is on its disk after each round.

    Raises:
        ValueError: If the recipe cannot be deployed, or the folder holds another run.
        FileNotFoundError: If there is nothing to resume.
    """

    def __init__(self, recipe: ServerRecipe, transport: Transport, folder: Path, terms: Terms) -> None:
        self.recipe, self.transport, self.folder, self.terms = recipe, transport, folder, terms
        classes, multilabel = recipe.classes, recipe.multilabel
        recipe.build(recipe.num_classes, multilabel)
        module = recipe.module
        self.settings = recipe.settings()
        self.sample = terms.sample or self.settings.clients_per_round
        self.images = recipe.public_images()
        self._check()
        self.server = Server(Site(module.engine, module.slot, self.settings), module.initial_state)
        if not terms.resume and (folder / SERVER_STATE).exists():
            raise ValueError(f"{str(folder)!r} holds a run; resume it (resume), or give another folder")
        self._lock = FolderLock(folder, "server")
        self._former: dict[str, Any] = {}  # states from before the last secure sum; empty if there are none
        if terms.resume:
            self.progress, states = read_progress(folder)
            if (self.progress.recipe, self.progress.rounds) != (recipe.digest, recipe.rounds):
                raise ValueError(f"{str(folder)!r} holds a run of another recipe or other weights; give its own")
            self.server.load_state_dict(states)
            if "former" in states:
                self._former = states["former"]
            for member in self.progress.roster:  # a site that was mended meanwhile may take part again
                member.lied = ""
        else:
            self.progress = RunProgress(secrets.token_hex(16), recipe.digest, recipe.rounds)
            self.progress.labels = "" if classes is None else labels_digest(recipe.num_classes, multilabel, classes)
        transport.most = max(max_message_size(recipe.sent(round)) for round in range(2))
        if self.settings.secure_sums is not None:
            transport.most = max_message_size({}) + 8 * max(
                recipe.contents(round, self.images).size for round in range(2)
            )
        self.loggers = list(recipe.loggers)
        for row in self.progress.history:  # each start logs the whole run
            log_round(self.loggers, row)
        self.roster = Roster(self.progress, terms, recipe)

    def _check(self) -> None:
        """Refuse, by a ValueError, what cannot be deployed."""
        settings, algorithm, terms = self.settings, self.settings.algorithm, self.terms
        check_server_images(settings, self.images.public_size, 0)
        check_distilled_batch_norm(settings, self.recipe.module.slot, self.images.public_size)
        check_factors(settings, self.recipe.module.slot, self.recipe.template.sent)
        check_rule(settings)
        if self.sample is not None and self.sample < terms.min_sites:
            raise ValueError(
                f"min_sites={terms.min_sites} cannot be had: the recipe's clients_per_round asks {self.sample} sites "
                "a round; give sample, the sites to ask, or ask for fewer"
            )
        try:
            settings.rule.check(max(1, terms.min_sites // algorithm.modes))
        except ValueError as error:
            raise ValueError(f"min_sites={terms.min_sites}: {error}") from None
        if settings.privacy is not None and settings.weighting == "samples":
            raise ValueError("privacy: weighting='samples' shows the sites' numbers of images; choose 'uniform'")
        if settings.secure_sums is not None:
            self._check_sums(settings.secure_sums)
        if settings.client_privacy is not None:
            check_delta_covers("client_privacy", settings.client_privacy.delta, terms.min_sites, "sites (min_sites)")
            check_client_level(algorithm, settings.rule, settings.weighting, bool(settings.distillation.steps))

    def _check_sums(self, options: SecureSums) -> None:
        check_cryptography()
        if self.terms.min_sites < options.min_sites:
            raise ValueError(
                f"min_sites={self.terms.min_sites} is less than the {options.min_sites} of the recipe's secure_sums; "
                "give as many, or more"
            )
        if self.terms.late == "skip":
            raise ValueError("late='skip' cannot be used with secure_sums, whose steps wait for all; give 'wait'")
        sites, module = self.sample or max(self.terms.min_sites, options.min_sites), self.recipe.module
        check_secure_sums(self.settings, module.slot, self.recipe.template.initial, sites)

    def close(self) -> None:
        """Let others have the folder."""
        log_each(self.loggers, "finalize", "success")
        self._lock.close()

    def run(self) -> RunProgress:
        """Train all rounds that are left, and score.

        A TimeoutError names who is missing if fewer than ``min_sites`` answered in time; the run can be resumed.
        """
        progress, every = self.progress, self.recipe.trainer.check_val_every_n_epoch or 1
        while progress.done < progress.rounds:
            if progress.done and progress.done % every == 0 and progress.scored < progress.done:
                self._evaluate()
            self._round()
        if self.settings.algorithm.personalization() and not progress.tuned:
            begin, state = time.monotonic(), self.server.global_state
            failed: dict[str, str] = {}
            tuned = self._everyone("tune", state, failed, strides=strides_of(state))
            self.roster.note_tuned(tuned, failed)
            if len(tuned) < self.terms.min_sites:
                missing = {name: "not tuned" for name in self.roster.numbers if name not in tuned}
                raise TimeoutError(self._too_few("fine-tuning", len(tuned), missing, begin))
            if self.settings.privacy is not None:
                progress.history[-1] |= epsilons(progress.roster)
            progress.tuned, progress.scored = True, -1
            self._save()
        if progress.scored < progress.done:
            self._evaluate()
        return progress

    # Asking

    def _order(self, kind: RequestKind, client: int = 0, **given: Any) -> Request:
        progress = self.progress
        if ranks := self.roster.lora_ranks:
            given["rank"] = ranks[client]
        return Request(
            kind, progress.run, progress.recipe, progress.done, client, max(1, len(progress.roster)), **given
        )

    def _ask(
        self,
        asked: list[str],
        message: Callable[[str], bytes],
        expected: Callable[[str], State],
        end: float,
        record: RoundRecord,
        least: int | None = None,
        spare: Sequence[str] = (),
    ) -> dict[str, tuple[Response, State]]:
        """Ask sites until all answered, or ``least`` of them, or the time is over, and give what came, in this order.

        Who fails in passing is asked again; for who fails for good a ``spare`` site is added to those ``asked``. Codes
        of those that failed are written into ``record``.
        """
        got, places, spare = dict[str, tuple[Response, State]](), len(asked), list(spare)
        while True:
            hard = [name for name, code in record.failed.items() if code not in (*PASSING, "broken")]
            while spare and sum(name not in hard for name in asked) < places:
                asked.append(spare.pop(0))
            pending = [name for name in asked if name not in got and record.failed.get(name) in (None, *PASSING)]
            wanted = len(pending) if least is None else least - len(got)
            if not pending or wanted <= 0:
                return got
            messages, seconds = {name: message(name) for name in pending}, end - time.monotonic()
            tensors = {name: spec_of(expected(name)) for name in pending}
            found, failed = ask(self.transport, messages, min(wanted, len(pending)), seconds, tensors, record)
            for name in [name for name, (_, state) in found.items() if not self._fits(state)]:
                del found[name]
                failed[name] = "malformed"
            got |= found
            record.failed = {name: code for name, code in record.failed.items() if name not in found} | failed
            if time.monotonic() >= end:
                return got
            if not found and failed:
                time.sleep(min(PAUSE, max(0.0, end - time.monotonic())))

    def _fits(self, state: State) -> bool:
        """Tell whether the integers that travel beside the model are numbers of modes that the run has.

        Negative ones are rejected where the reply is unpacked.
        """
        num_modes = self.settings.algorithm.modes
        for key, value in state.items():
            is_masked = value.dtype == torch.uint64  # any number is possible under masks
            if key in self.recipe.module.slot.keys or value.is_floating_point() or is_masked:
                continue
            if int(value.max()) >= num_modes:
                return False
        return True

    def _everyone(
        self, kind: RequestKind, tensors: State, failed: dict[str, str] | None = None, **given: Any
    ) -> dict[str, Response]:
        """Ask all sites that are there, within the deadline; codes of those without an answer come into ``failed``."""
        numbers, record = self.roster.numbers, RoundRecord(self.progress.done)
        asked = [name for name in numbers if name in self.transport.names()]
        end = time.monotonic() + self.terms.deadline

        def message(name: str) -> bytes:
            return pack(self._order(kind, numbers[name], **given), tensors)

        got = self._ask(asked, message, lambda _: {}, end, record)
        for name, code in record.failed.items():
            log.warning("%s: site %s: %s", kind, name, code, extra={"site": name})
        if failed is not None:
            failed.update(record.failed)
        return {name: answer for name, (answer, _) in got.items()}

    def _gather_sites(self, end: float) -> list[int]:
        """Wait until enough sites are there, and give the numbers of those that may be asked, in the order drawn."""
        progress, terms, said, begin = self.progress, self.terms, 0.0, time.monotonic()
        while True:
            names = self.transport.names()
            if not progress.asked:  # else sites know this round's messages, which say how many sites there are
                # A site that never answers must not take half of every round.
                part = 2 if len(progress.roster) < terms.min_sites else 10
                self._admit(names, (end - time.monotonic()) / part)
            able = self.roster.eligible(names)
            if len(able) >= terms.min_sites or time.monotonic() >= end:
                break
            if time.monotonic() >= said:
                said = time.monotonic() + SAID
                outside = ", ".join(f"{name} ({reason})" for name, reason in self.roster.outside.items())
                log.info(
                    "round %d waits for sites, %.0f s more: %d of at least %d are there; connected, not joined: %s",
                    *(progress.done + 1, end - time.monotonic(), len(able), terms.min_sites, outside or "none"),
                )
            time.sleep(min(PAUSE, max(0.0, end - time.monotonic())))
        if len(able) < terms.min_sites:
            missing = {m.name: m.left or "unreachable" for n, m in enumerate(progress.roster) if n not in able}
            raise TimeoutError(self._too_few(f"round {progress.done + 1}", len(able), missing, begin))
        total = len(progress.roster)
        return sample_cohort(self.settings.seed, progress.done, total, total if self.sample else None, lambda _: able)

    def _admit(self, names: Sequence[str], seconds: float) -> None:
        if new := self.roster.newcomers(names):
            messages = dict.fromkeys(new, pack(self._order("join")))
            answers, failed = ask(
                self.transport, messages, len(new), seconds, {name: {} for name in new}, RoundRecord(self.progress.done)
            )
            self.roster.admit({name: answer for name, (answer, _) in answers.items()}, failed)

    def _too_few(self, what: str, have: int, missing: Mapping[str, str], begin: float) -> str:
        """What is said when something that was begun then cannot be ended."""
        missing = {**missing, **self.roster.outside}
        named = ", ".join(f"{name} ({code})" for name, code in missing.items()) or "no other site was ever connected"
        gone = have + sum(code not in ("exhausted", "unapproved") for code in missing.values()) < self.terms.min_sites
        back = "Those that are exhausted or do not approve the recipe will not come back:"
        remedy = f"{back} end the run here, or" if missing and gone else "Resume when they are back, or"
        return (
            f"{what}: {have} of at least {self.terms.min_sites} sites answered in "
            f"{time.monotonic() - begin:.0f} s (the deadline is {self.terms.deadline:g} s); missing: {named}. {remedy} "
            "ask for fewer (min_sites)"
        )

    # A round

    def _round(self) -> None:
        progress, terms, begin = self.progress, self.terms, time.monotonic()
        end, record = begin + terms.deadline, RoundRecord(self.progress.done)
        order = self._gather_sites(end)
        numbers, skip, whole = self.roster.numbers, terms.late == "skip", self.recipe.sent(record.round)
        self.server.lora_ranks = self.roster.lora_ranks
        self._check_honest()
        names = [progress.roster[number].name for number in order]
        if not progress.asked:  # else it was asked before a crash, and sites know these messages
            progress.asked = names[: self.sample]
        if self.settings.secure_sums is not None:
            self._note_told(progress.asked[0])
        self._save()
        asked, spare = list(progress.asked), [name for name in names if name not in progress.asked]
        least = terms.min_sites if skip else None  # to say "broken" is quick, and takes nobody's place
        given = lambda name: self._narrowed(whole, numbers[name]), end, record, least, spare
        secure = self.settings.secure_sums is not None
        given = (lambda _: {}, *given[1:]) if secure else given
        got = self._ask(asked, lambda name: self._message(numbers[name]), *given)
        for name in list(got)[terms.min_sites :] if skip else []:  # the first k count
            del got[name]
            record.failed[name] = "late"
        answered = len(got) + sum(code == "broken" for code in record.failed.values())
        if answered < terms.min_sites:
            missing = {name: record.failed.get(name, "late") for name in asked if name not in got}
            raise TimeoutError(self._too_few(f"round {progress.done + 1}", answered, missing, begin))
        record.asked, record.answered, record.outside = asked, list(got), dict(self.roster.outside)
        connected = set(self.transport.names())
        record.away = [
            member.name
            for member in progress.roster
            if not member.left and member.name not in connected and member.name not in asked
        ]
        by_number = {
            numbers[name]: (answer, {key: widened(value, whole[key].shape) for key, value in state.items()})
            for name, (answer, state) in got.items()
        }
        summed = None
        if secure:
            try:
                contents = self.recipe.contents(record.round, self.images)
                record.summed, summed = self._sum("update", record, got, contents)
                self._check_move(summed.mean)
            except RefusalError as refusal:
                record.summed, summed, record.void = [], None, str(refusal)
            # After a restart a site may be in the sum whose answer to the training did not come a second time.
            silent = Response("ok", digest(b"")), dict[str, torch.Tensor]()
            answers = {name: got.get(name, silent)[0] for name in record.summed}
            by_number = {numbers[name]: (answers[name], summed.mean) for name in answers} if summed else {}
        former = deepcopy(self.server.state_dict()) if secure else {}
        logits = None if summed is None else torch.empty(0) if summed.logits is None else summed.logits
        close_round(self.recipe, self.server, self.roster, self.images, record, by_number, logits)
        if secure:
            self._keep_or_restore(record, former)
        if summed is not None:
            progress.history[-1] |= {f"train/{role}_loss": loss for role, loss in summed.numbers.items()}
        record.seconds = time.monotonic() - begin
        progress.history[-1]["deploy/seconds"] = record.seconds
        self._save()
        log_round(self.loggers, progress.history[-1])

    def _check_move(self, mean: State) -> None:
        """Refuse the mean of a secure sum that is out of all proportion, since one site may have made it so.

        A mean of numbers that each could be meant may still be a model that no site can train: then each later round
        would be void. It is refused if it moves the model by so many times its own norm, and, once there were sums
        before, by so many times as much as the largest of those. Noisy sums may be of any size.
        """
        progress = self.progress
        if self.recipe.noisy:
            return
        factor = self.recipe.module.rate_factor(progress.done, progress.rounds)
        received: State = {}
        if not self.settings.algorithm.compares:  # else what a site receives depends on its images
            plan = RoundPlan(progress.done, (0,), ((0,),))
            received = self.server.sending(plan, max(1, len(progress.roster)))
        move, size = 0.0, 0.0
        for key, value in mean.items():
            if not value.is_floating_point() or key.endswith(("running_mean", "running_var")):
                continue  # statistics of images may be of any size
            before = received[key][0].to("cpu", torch.float64) if key in received else torch.zeros(())
            if before.shape != value.shape:
                before = torch.zeros_like(value, dtype=torch.float64)
            move += float((value.double() - before).square().sum())
            size += float(before.square().sum())
        move, size = move**0.5, size**0.5
        times = FAR if progress.moves else FAR**2
        limit = times * max(1.0, size)
        if progress.moves and factor > 0:
            limit = max(limit, FAR * factor * max(progress.moves))
        if move > limit:
            raise RefusalError(
                f"{SPOILED} has moved the model by {move:.3g}, and {limit:.3g} would be {times:g} times its norm, or "
                "what it was moved by before",
                "other",
            )
        if factor > 0:
            progress.moves = [*progress.moves, move / factor][-MOVES:]

    def _keep_or_restore(self, record: RoundRecord, former: dict[str, Any]) -> None:
        """Keep the states before a secure sum, and put them back where the new ones turn out to be spoiled.

        They are if most sites cannot train them. A sum that cannot be read may also be the doing of one site in this
        round, so that the states are put back only after several such rounds in a row.
        """
        progress = self.progress
        if not record.void:
            self._former, progress.spoiled = former, 0
            return
        broken = sum(code == "broken" for code in record.failed.values())
        most_broke = 2 * broken > len(record.asked)
        progress.spoiled += most_broke or record.void.startswith(SPOILED)
        if self._former and (most_broke or progress.spoiled >= SPOILED_ROUNDS):
            self.server.load_state_dict(self._former)
            self._former, progress.spoiled = {}, 0
            record.void += "; the model from before the last sum was put back"
            log.warning("round %d: the model from before the last secure sum was put back", record.round + 1)

    def _check_honest(self) -> None:
        """End the run before sites train for a sum that cannot be made, since too few are left that did not lie."""
        options = self.settings.secure_sums
        liars = {member.name: member.lied for member in self.progress.roster if member.lied}
        if options is None or not liars or len(self.progress.roster) - len(liars) >= options.min_sites:
            return
        named = "; ".join(f"site {name}: {reason}" for name, reason in liars.items())
        raise TimeoutError(
            f"round {self.progress.done + 1}: a secure sum needs {options.min_sites} sites, and too few are left "
            f"without those that lied in one ({named}). Find out why they did, and resume the run: they are asked "
            "again then"
        )

    def _note_told(self, name: str) -> None:
        """Keep the digest of what sites are told in this round, as they say it of themselves in later ones."""
        message = self._message(self.roster.numbers[name])
        order = replace(Request.read(read_header(message)), client=0)
        self.progress.told[str(order.round)] = digest(pack(order, load(message)))
        for old in sorted(self.progress.told, key=int)[:-MAX_HEARD_ROUNDS]:
            del self.progress.told[old]

    def _sum(
        self, of: str, record: RoundRecord, trained: Mapping[str, tuple[Response, State]], contents: Contents
    ) -> tuple[list[str], SumResult]:
        """Who of those that ``trained`` is in a secure sum, and what it says; the record gets the codes of the others.

        Raises:
            Refused: If too few were there at a step.
        """
        from perada.deploy.server.summing import LIED, MASKED, SecureSum
        from perada.deploy.sums.keys import SumTerms

        options, progress, numbers = contents.options, self.progress, self.roster.numbers
        liars = {member.name for member in progress.roster if member.lied}
        record.failed |= {name: LIED for name in trained if name in liars}
        trained = {name: answer for name, answer in trained.items() if name not in liars}

        def ask_step(
            kind: RequestKind, attempt: int, said: Mapping[str, dict[str, Any]], size: int
        ) -> dict[str, tuple[Response, State]]:
            def message(name: str) -> bytes:
                return pack(self._order(kind, numbers[name], attempt=attempt, of=of, sums=said[name]))

            expected = {MASKED: torch.zeros(size, dtype=torch.uint64)} if size else {}
            own, end = RoundRecord(record.round), time.monotonic() + self.terms.deadline / len(SUM_KINDS)
            found = self._ask(list(said), message, lambda _: expected, end, own)
            if kind == "mask":
                record.masked = sorted(found)
            record.failed |= own.failed
            record.up, record.down = record.up + own.up, record.down + own.down
            return found

        def terms(attempt: int) -> SumTerms:
            return SumTerms(progress.run, progress.done, progress.recipe, options, attempt, of=of)

        state = read_sum(self.folder, progress.run, progress.done, of)
        made = SecureSum(
            ask_step,
            terms,
            trained,
            contents.size,
            state=state,
            save=lambda state: write_sum(self.folder, progress.run, state),
            truth=progress.told,
        )
        there: list[str] = []
        try:
            there, total = made.run()
        finally:
            for name in there:
                record.failed.pop(name, None)
            record.failed |= made.failed
            for member in progress.roster:
                member.lied = made.lied.get(member.name, member.lied)
        return there, contents.opened(total, len(there))

    def _message(self, client: int) -> bytes:
        """What a site is sent in a round: a function of the states and of whom was asked first."""
        progress, given = self.progress, self.server.global_state
        factor = self.recipe.module.rate_factor(progress.done, progress.rounds)
        norm = self.roster.level.norm if self.roster.level is not None and self.recipe.noisy else 0.0
        if self.settings.algorithm.compares:
            order = self._order("train", client, factor=factor, norm=norm, strides=strides_of(given))
            return pack(order, given)
        received = self.server.sending(RoundPlan(progress.done, (client,), ((0,),)), len(progress.roster))
        given = {key: value[0] for key, value in received.items()}
        order = self._order("train", client, factor=factor, norm=norm, strides=strides_of(given))
        return pack(order, self._narrowed(given, client))

    def _narrowed(self, state: State, client: int) -> State:
        """What of a state travels to a site or from it, whose LoRA may have a rank of its own."""
        ranks = self.server.lora_ranks
        return narrowed(state, self.recipe.module.slot.factors, ranks[client]) if ranks else state

    def _evaluate(self) -> None:
        """Have sites score the models on their own test images, and add up what they send."""
        state, algorithm, models = self.server.global_state, self.settings.algorithm, 0
        tensors = {f"shared/{key}": value for key, value in state.items()}
        members, plain = self.server.members(), algorithm.members(state, {})
        equal = (members[key].shape == plain[key].shape and torch.equal(members[key], plain[key]) for key in members)
        if algorithm.global_model and not all(equal):
            tensors |= {f"members/{key}": value for key, value in members.items()}
            models = len(next(iter(members.values())))
        answers = self._everyone("evaluate", tensors, models=models, strides=strides_of(state))
        metrics = self.recipe.module.metrics
        lately = participation_of(self.progress, self.sample).recent
        recent = [lately[self.roster.numbers[name]] for name in answers]
        scores = mean_scores(metrics, [answer.facts for answer in answers.values()], recent)
        if self.settings.secure_sums is not None and not self.recipe.noisy:  # else sites tell no scores
            try:
                contents = self.recipe.contents_of_scores()
                adds = {
                    name: (answer, dict[str, torch.Tensor]())
                    for name, answer in answers.items()
                    if answer.sums.get("adds")
                }
                summed = self._sum("scores", RoundRecord(self.progress.done), adds, contents)[1]
                scores = summed_scores(metrics, summed.numbers)
            except RefusalError as refusal:
                log.warning("no scores after round %d: %s", self.progress.done, refusal)
        self.progress.history[-1] |= scores
        self.progress.scored = self.progress.done
        self._save()
        log_round(self.loggers, scores | {"round": self.progress.history[-1]["round"]})

    def _save(self) -> None:
        states = self.server.state_dict()
        if self._former:
            states["former"] = self._former
        write_progress(self.folder, self.progress, states)
