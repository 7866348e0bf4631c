# SPDX-License-Identifier: Apache-2.0
"""The server of a deployed run: it asks sites over a transport, and closes rounds with those who answered."""

import logging
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from perada.algorithms import ensemble_of
from perada.core.ranks import Ranks
from perada.core.rounds import RoundPlan, make_plan
from perada.core.states import State, stack
from perada.data.batches.preparation import Preparation
from perada.data.one_client import ServerImages
from perada.deploy import records
from perada.deploy.asking import PASSING, PAUSE, Terms, ask
from perada.deploy.codec import Spec, pack, spec_of
from perada.deploy.files import Lock
from perada.deploy.measures import mean_scores, measured
from perada.deploy.messages import Answer, Kind, Order
from perada.deploy.recipe import Recipe, is_plain, laid_out
from perada.deploy.records import Progress, Record
from perada.deploy.roster import Roster
from perada.deploy.transport import Transport
from perada.federation.changes import changes, far
from perada.federation.round_report import RoundReport
from perada.federation.server import Server
from perada.privacy.rehearsal import check_client_level
from perada.server import Updates


class Coordinator:
    """Runs the rounds of a recipe over a transport. What it knows is on its disk after each round.

    Args:
        recipe: Of which the data's options are used, not its images.
        transport: To the sites.
        folder: Of the run.
        terms: When rounds are closed.
        public: Public images, for algorithms that distil; by default none.
        num_classes: Number of classes.
        multilabel: Whether images have several labels.
        resume: Go on with the run in the folder.

    Raises:
        ValueError: If the recipe cannot be deployed, or the folder holds another run.
        FileNotFoundError: If there is nothing to resume.
    """

    def __init__(
        self,
        recipe: Recipe,
        transport: Transport,
        folder: Path,
        terms: Terms,
        *,
        public: Dataset[Any] | None = None,
        num_classes: int,
        multilabel: bool = False,
        resume: bool = False,
    ) -> None:
        self.recipe, self.transport, self.folder, self.terms = recipe, transport, folder, terms
        self.log = logging.getLogger("perada.deploy")
        recipe.build(num_classes, multilabel)
        module, loop = recipe.module, recipe.loop
        self.settings = recipe.settings()
        assert module.adapted is not None
        data, (padding, flip) = recipe.data, recipe.data.augmentation
        self.images = ServerImages(
            public, Preparation(module.adapted.backbone.image, data.image_size, padding, flip, loop.seed)
        )
        self._check()
        self.server = Server(module.engine, module.slot, module.initial_state, self.settings)
        if not resume and (folder / records.STATE).exists():
            raise ValueError(f"{str(folder)!r} holds a run; resume it (resume), or give another folder")
        self._lock = Lock(folder, "server")
        if resume:
            self.progress, states = records.read(folder)
            if (self.progress.recipe, self.progress.rounds) != (recipe.digest, recipe.rounds):
                raise ValueError(f"{str(folder)!r} holds a run of another recipe or other weights; give its own")
            first = self.server.global_state
            states["global"] = laid_out(states["global"], first, self.progress.plain)
            self.server.load_state_dict(states)
        else:
            self.progress = Progress(secrets.token_hex(16), recipe.digest, recipe.rounds)
        self.level = recipe.level(terms.min_sites)
        if self.level is not None and self.progress.level is not None:
            self.level.load_state_dict(self.progress.level)
        self.roster = Roster(self.progress, transport, terms, self.settings, self.level, lambda: self._order("join"))

    def _check(self) -> None:
        """Refuse, by a ValueError, what cannot be deployed."""
        settings, algorithm, terms = self.settings, self.settings.algorithm, self.terms
        name = type(algorithm).__name__
        if algorithm.distills and settings.distillation.steps and not self.images.public_size:
            raise ValueError(
                f"{name} distils and the server has no public set; give data.public, an image set of its own"
            )
        if algorithm.distills and settings.distillation.validate_every:
            raise ValueError("distillation: validate_every needs labelled images on the server; set it to 0")
        try:
            settings.rule.check(max(1, terms.min_sites // ensemble_of(algorithm).modes))
        except ValueError as error:
            raise ValueError(f"min_sites={terms.min_sites}: {error}") from None
        if settings.privacy is not None and settings.weighting == "samples":
            raise ValueError("privacy: weighting='samples' shows the sites' numbers of images; choose 'uniform'")
        if settings.client_privacy is not None:
            distils = bool(settings.distillation.steps)
            check_client_level(algorithm, settings.rule, settings.weighting, distils)

    def close(self) -> None:
        """Let others have the folder."""
        self._lock.close()

    def run(self) -> Progress:
        """Train all rounds that are left, and score.

        Raises:
            TimeoutError: If fewer than ``min_sites`` sites answered in time. It names those that are missing; the
                run can be resumed.
        """
        progress, every = self.progress, self.recipe.trainer.check_val_every_n_epoch or 1
        while progress.done < progress.rounds:
            if progress.done and progress.done % every == 0 and progress.scored < progress.done:
                self._evaluate()
            self._round()
        if self.settings.algorithm.personalization() and not progress.tuned:
            self._everyone("tune", self.server.global_state, {})
            progress.tuned, progress.scored = True, -1
            self._save()
        if progress.scored < progress.done:
            self._evaluate()
        return progress

    # Asking

    def _order(self, kind: Kind, client: int = 0, **given: Any) -> Order:
        progress = self.progress
        clients = max(1, len(progress.roster))
        given["plain"] = is_plain(self.server.global_state)
        return Order(kind, progress.run, progress.recipe, progress.done, client, clients, **given)

    # A round

    def _round(self) -> None:
        """Ask, wait, and close."""
        progress, terms, begin = self.progress, self.terms, time.monotonic()
        end, record = begin + terms.deadline, Record(self.progress.done)
        order = self.roster.gather(end)
        numbers = {member.name: number for number, member in enumerate(progress.roster)}
        names = [progress.roster[number].name for number in order]
        if not progress.asked:  # else it was asked before a crash, and sites know these messages
            progress.asked = names[: self.roster.sample]
            progress.lengths = self._lengths([numbers[name] for name in progress.asked])
        self._save()
        spare = [name for name in names if name not in progress.asked]
        asked, got = list(progress.asked), dict[str, tuple[Answer, State]]()
        while True:
            hard = [name for name, code in record.failed.items() if code not in PASSING and code != "broken"]
            while spare and sum(name not in hard for name in asked) < len(progress.asked):
                asked.append(spare.pop(0))
            pending = [name for name in asked if name not in got and record.failed.get(name) in (None, *PASSING)]
            answered = len(got) + sum(code == "broken" for code in record.failed.values())
            wanted = (terms.min_sites if terms.late == "skip" else answered + len(pending)) - answered
            if not pending or wanted <= 0:
                break
            messages = {name: self._message(numbers[name]) for name in pending}
            expected = spec_of(self.recipe.template.sent)
            found, failed = ask(
                self.transport, messages, min(wanted, len(pending)), end - time.monotonic(), expected, record
            )
            for name, (answer, state) in found.items():
                if self._fits(state):
                    got[name] = answer, state
                    record.failed.pop(name, None)
                else:
                    failed[name] = "malformed"
            record.failed |= failed
            if time.monotonic() >= end:
                break
            if not found and failed:
                time.sleep(min(PAUSE, max(0.0, end - time.monotonic())))
        if terms.late == "skip" and len(got) > terms.min_sites:
            for name in list(got)[terms.min_sites :]:  # the first k count
                del got[name]
                record.failed[name] = "late"
        answered = len(got) + sum(code == "broken" for code in record.failed.values())
        if answered < terms.min_sites:
            missing = {name: record.failed.get(name, "late") for name in asked if name not in got}
            raise TimeoutError(self.roster.too_few(answered, missing))
        record.asked, record.answered = asked, list(got)
        self._close(record, {numbers[name]: pair for name, pair in got.items()}, numbers)
        record.seconds = time.monotonic() - begin
        progress.history[-1]["deploy/seconds"] = record.seconds
        self._save()
        self._log(progress.history[-1])

    def _lengths(self, clients: Sequence[int]) -> list[int]:
        """Steps of each phase of the longest of ``clients``, if all of them say their sizes."""
        sizes = [self.progress.roster[client].size for client in clients]
        if self.settings.privacy is not None or any(size is None for size in sizes):
            return []
        return list(self._plan(clients).lengths)

    def _plan(self, clients: Sequence[int]) -> RoundPlan:
        sizes = [member.size or 1 for member in self.progress.roster]
        return make_plan(self.progress.done, clients, sizes, self.settings.phases, self.recipe.data.batch_size)

    def _message(self, client: int) -> bytes:
        """What a site is sent in a round: a function of the states and of whom was asked first."""
        factor = self.recipe.module.rate_factor(self.progress.done, self.progress.rounds)
        order = self._order("train", client, factor=factor, lengths=tuple(self.progress.lengths))
        if ensemble_of(self.settings.algorithm).compares:
            return pack(order.header(), self.server.global_state)
        received = self.server.sending(RoundPlan(self.progress.done, (client,), ((0,),)), len(self.progress.roster))
        return pack(order.header(), {key: value[0] for key, value in received.items()})

    def _fits(self, state: State) -> bool:
        """Whether the whole numbers that travel beside the model, such as a mode's, can be meant."""
        modes = ensemble_of(self.settings.algorithm).modes
        beside = (value for key, value in state.items() if key not in self.recipe.module.slot.keys)
        return all(value.is_floating_point() or int(value.max()) < modes for value in beside)

    def _close(self, record: Record, got: Mapping[int, tuple[Answer, State]], numbers: Mapping[str, int]) -> None:
        """Make the next global state of the answers, and note what there is to note."""
        progress, server = self.progress, self.server
        broken = [numbers[name] for name, code in record.failed.items() if code == "broken"]
        counted = [*got, *broken] if self.level is not None else list(got)  # who broke depends on images
        metrics: dict[str, float] = {}
        report = RoundReport([])
        if counted:
            plan = self._plan(counted)
            states = [self._row(got, client) for client in plan.clients]
            sent = stack(states) if states[0] else {}
            received = server.sending(plan, len(progress.roster))
            if self.level is not None:
                self.level.spend(plan.clients)
                sent = server.privatized(self.level, sent, received, plan, list(range(len(plan.clients))))
                metrics |= self.level.metrics()
                progress.level = self.level.state_dict()
            elif sent:
                everyone = list(range(len(plan.clients)))
                slot = self.recipe.module.slot.parameters
                found = changes(slot, sent, received, everyone, everyone, len(everyone), Ranks(), cosines=False)
                record.far = {progress.roster[client].name: times for client, times in far(found[0], plan).items()}
            far_off = record.far if self.recipe.loop.refuse_far else {}
            rows = [row for row, one in enumerate(plan.clients) if progress.roster[one].name not in far_off]
            clients = [plan.clients[row] for row in rows]
            sizes = [progress.roster[client].size or 1 for client in clients]
            updates = Updates(sent, list(range(len(plan.clients))), len(plan.clients)).part(rows)
            with self.recipe.context():
                given = progress.done, clients, len(progress.roster), updates, sizes, self.images, report
                server.close(*given, noisy=self.level is not None)
        record.void = "all broke" if not counted else "the new state was not finite" if report.broken_server else ""
        self._note(record, got)
        metrics |= report.metrics | measured(self.recipe, record, progress.roster, [a.facts for a, _ in got.values()])
        progress.history.append({"round": float(progress.done), **metrics})
        progress.records.append(record)
        progress.done, progress.asked, progress.lengths = progress.done + 1, [], []
        for problem in filter(None, [record.void, "the distillation diverged" if report.diverged else ""]):
            self.log.warning("round %d: %s", record.round, problem)

    def _row(self, got: Mapping[int, tuple[Answer, State]], client: int) -> State:
        """What a client sent; NaN of one whose training broke, which privacy of whole clients counts as no change."""
        if client in got:
            return {key: value.to(self.recipe.device) for key, value in got[client][1].items()}
        sent = self.recipe.template.sent
        return {key: value * math.nan if value.is_floating_point() else value for key, value in sent.items()}

    def _note(self, record: Record, got: Mapping[int, tuple[Answer, State]]) -> None:
        """Write down who took part, who was late and who is not to be asked any more."""
        for client, (answer, _) in got.items():
            member = self.progress.roster[client]
            member.rounds += 1
            member.epsilon = answer.facts.get("epsilon", member.epsilon)
        for member in self.progress.roster:
            code = record.failed.get(member.name)
            if code in ("exhausted", "unapproved"):
                member.left = code
            if code in ("late", "busy"):
                member.late = record.round

    # What comes after rounds

    def _everyone(self, kind: Kind, tensors: State, expected: Spec) -> dict[str, Answer]:
        """Ask all sites that are there, within the deadline; those that fail are asked again while there is time."""
        progress, end = self.progress, time.monotonic() + self.terms.deadline
        record, got = Record(progress.done), dict[str, Answer]()
        numbers = {member.name: number for number, member in enumerate(progress.roster)}
        pending = [name for name in numbers if name in self.transport.names()]
        while pending:
            messages = {name: pack(self._order(kind, numbers[name]).header(), tensors) for name in pending}
            found, failed = ask(self.transport, messages, len(pending), end - time.monotonic(), expected, record)
            got |= {name: answer for name, (answer, _) in found.items()}
            pending = [name for name, code in failed.items() if code in PASSING]
            for name, code in failed.items():
                self.log.warning("%s: site %s: %s", kind, name, code)
            if time.monotonic() >= end:
                break
            if pending and not found:
                time.sleep(min(PAUSE, max(0.0, end - time.monotonic())))
        return got

    def _evaluate(self) -> None:
        """Have sites score the models on their own test images, and add up what they send."""
        tensors = {f"shared/{key}": value for key, value in self.server.global_state.items()}
        many = ensemble_of(self.settings.algorithm)
        members, plain = self.server.members(), many.members(self.server.global_state, {})
        if self.settings.algorithm.global_model and not _equal(members, plain):
            tensors |= {f"members/{key}": value for key, value in members.items()}
        answers = self._everyone("evaluate", tensors, {})
        found = mean_scores(self.recipe.module.metrics, [answer.facts for answer in answers.values()])
        if self.progress.history:
            self.progress.history[-1] |= found
        self.progress.scored = self.progress.done
        self._save()
        self._log(found)

    def _log(self, metrics: Mapping[str, float]) -> None:
        """Tell the recipe's loggers of the last round; ``metrics.csv`` has it anyway."""
        for logger in self.recipe.trainer.loggers:
            logger.log_metrics({"round": self.progress.done - 1.0, **metrics}, step=self.progress.done - 1)
            logger.save()

    def _save(self) -> None:
        self.progress.plain = is_plain(self.server.global_state)
        records.write(self.folder, self.progress, self.server.state_dict())


def _equal(left: State, right: State) -> bool:
    return all(left[key].shape == right[key].shape and torch.equal(left[key], right[key]) for key in left)
