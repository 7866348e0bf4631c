# SPDX-License-Identifier: Apache-2.0
"""Successive halving on held-out images, and the last rung, which trains on all training images."""

import json
import math
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any

from perada.results.report import unit_of
from perada.studies.choose.budget import (
    FEWEST_FINALISTS,
    HELD_OUT_SHARE,
    REDUCTION,
    Cost,
    SearchPlan,
    final_plans,
    fit_plan,
    format_duration,
    growing_plans,
    mean_cost,
    smallest_plan,
)
from perada.studies.choose.candidates import (
    METHODS,
    SETTINGS_OF_LEVEL,
    AdapterLevel,
    Candidate,
    predicting_models,
)
from perada.studies.choose.trials import (
    HeldOutScores,
    Trial,
    best_of,
    choose_method,
    find_record,
    make_trial,
    prefer_both_models,
    rank_candidates,
    read_scores,
)
from perada.studies.compare.entries import ADAPTER, ADAPTER_OPTIONS
from perada.studies.compare.grid import Point
from perada.studies.compare.plan import Job, Plan, Row
from perada.studies.compare.results import Record, Results
from perada.studies.compare.running import CarryOut, Result, RunTask, Segment
from perada.system.files import write_atomic

ROUNDS = "trainer.max_epochs"
FEW_SETTINGS = 6
"""Settings of each method below which adapters are tried one after another, from the cheapest on."""
SHARE_OF_FIRST_LEVEL = 0.6
"""Share of the remaining time for the cheapest adapter, if all rounds fit into it; the rest is for dearer ones."""
PROBE_SHARE = 0.1
"""Share of the budget in which the recipe's adapter must show how long it takes, if there is a cheaper one."""
PROBE_ROUNDS = 2
"""Rounds of each method that are timed before the plan is made: the first one may also compute features."""
TOLERANCE = 0.1
"""Share of the budget by which the last run may exceed it."""


def name_pattern(name: str) -> re.Pattern[str]:
    """Return the pattern of a client's name as a word of its own.

    >>> bool(name_pattern("north").search("images/north/1.png")), bool(name_pattern("a").search("a_b data"))
    (True, False)
    """
    return re.compile(rf"(?<!\w){re.escape(name)}(?!\w)")


class BudgetError(ValueError):
    """The budget of time is too small for any search."""


@dataclass(frozen=True)
class SearchOptions:
    """What a search is asked for.

    Attributes:
        recipe: Name or file of the recipe.
        goal: What the choice shall be good at, one of :data:`~perada.studies.choose.trials.GOALS`.
        budget: Seconds.
        seeds: Seeds of the last rung.
        jobs: Runs at once.
        threads: Threads of each run.
        anonymous: Whether files and output have numbers instead of the names of clients.
    """

    recipe: str
    goal: str
    budget: float
    seeds: tuple[int, ...]
    jobs: int
    threads: int
    anonymous: bool


@dataclass(frozen=True)
class MethodSearch:
    """What is tried of a method.

    Attributes:
        plan: Makes its runs.
        row: Its row.
        candidates: Its settings, the recipe's own first.
        local_epochs: Passes of a client over its images in a round; None if the recipe sets the number of steps.
        levels: The settings of each adapter, the cheapest adapter first, for searches that have no time for all.
        why_other_adapter: Why the method cannot train the recipe's adapter; empty if it can.
    """

    plan: Plan
    row: Row
    candidates: Sequence[Candidate]
    local_epochs: float | None
    levels: Sequence[AdapterLevel]
    why_other_adapter: str = ""

    def first_candidates(self, plan: SearchPlan) -> list[Candidate]:
        """Return the settings with which a search begins."""
        if plan.num_levels:
            return list(self.levels[0].candidates[: plan.num_candidates])
        return list(self.candidates[: plan.num_candidates])

    def trial(self, candidate: Candidate, draw: int, rounds: int, total_rounds: int) -> Trial:
        """Return a trial.

        Args:
            candidate: The setting.
            draw: Number of the draw of held-out images.
            rounds: Rounds after which it is scored.
            total_rounds: Rounds of a complete run.
        """
        point = candidate.point | _length_options(total_rounds) | {"data.client_validation_seed": str(draw)}
        if self.local_epochs is not None:
            # Clients take as many steps as on all training images: if there are few images, a fifth of them may be half
            # of the batches.
            point["training.local_epochs"] = f"{self.local_epochs / (1 - HELD_OUT_SHARE):.6g}"
        return make_trial(self.plan.job(self.row, draw, "tune", point), candidate, draw, rounds)

    def final_job(self, candidate: Candidate, seed: int, total_rounds: int) -> Job:
        """Return the run of a setting on all training images."""
        return self.plan.job(self.row, seed, "run", candidate.point | _length_options(total_rounds))


def _length_options(total_rounds: int) -> Point:
    """Return the options that set the length of a run, and leave out the scores before its end."""
    # The scores after the last round are computed in any case.
    return {ROUNDS: str(total_rounds), "trainer.check_val_every_n_epoch": str(total_rounds)}


class SearchState:
    """The file from which a search goes on: its plan, and the time that was spent.

    Args:
        path: The file.
        fixed_options: Options that must be the same when the search goes on.

    Raises:
        ValueError: If the file is of a search with other options.
    """

    def __init__(self, path: Path, fixed_options: dict[str, Any]) -> None:
        self.path = path
        self.fixed_options = fixed_options
        self.seconds = 0.0
        self.budget = 0.0
        self.plan: SearchPlan | None = None
        if not path.is_file():
            return
        saved = json.loads(path.read_text(encoding="utf-8"))
        for name, value in fixed_options.items():
            if saved["fixed_options"].get(name) != value:
                saved_value = saved["fixed_options"].get(name)
                raise ValueError(
                    f"{str(path.parent)!r} has a search with {name} {saved_value!r}, but now it is "
                    f"{value!r}; name another folder with --output, or delete this one"
                )
        self.seconds = saved["seconds"]
        self.budget = saved["budget"]
        if saved["plan"] is not None:
            fields = dict(saved["plan"])
            fields["methods"] = tuple(fields["methods"])
            fields["seeds"] = tuple(fields["seeds"])
            self.plan = SearchPlan(**fields)

    def write(self) -> None:
        """Write the file."""
        content = {
            "fixed_options": self.fixed_options,
            "budget": self.budget,
            "seconds": self.seconds,
            "plan": None if self.plan is None else asdict(self.plan),
        }
        write_atomic(self.path, json.dumps(content, indent=1).encode())


class Search:
    """A search for the method, adapter and settings that suit the images of a recipe.

    Optuna's SuccessiveHalvingPruner is not used: it compares a trial with those that happen to be done before it and
    over all methods together, so a method that learns slowly would be dropped as a whole and the result would depend on
    the number of jobs. It also cannot let a trial go on from its checkpoint.

    Each run computes the outputs of frozen layers again. That is a part of its first round, a few percent of the time
    of a search, and not worth a store that all runs share.

    Args:
        options: What is asked for.
        methods: What is tried of each method.
        largest_plan: The plan if time did not matter.
        results: Results of earlier commands; each new one is added.
        search_state: The rest of what was done by earlier commands.
        carry_out: See :func:`perada.studies.compare.running.task_runner`.
        names: Names of the clients, which reasons of failed runs must not have in an anonymous search.

    Attributes:
        plan: What is tried; None before the methods were timed.
        failed_methods: Why methods are left out, by name.
        notes: What was left out for lack of time.
        ran_out_of_time: Whether the trials ended before all settings were tried.
    """

    def __init__(
        self,
        *,
        options: SearchOptions,
        methods: dict[str, MethodSearch],
        largest_plan: SearchPlan,
        results: Results,
        search_state: SearchState,
        carry_out: CarryOut,
        names: Sequence[str],
    ) -> None:
        self.options = options
        self.methods = methods
        self.largest_plan = largest_plan
        self.results = results
        self.state = search_state
        self.carry_out = carry_out
        self.names = names
        self.plan: SearchPlan | None = None
        self.failed_methods: dict[str, str] = {}
        self.notes: list[str] = []
        self.ran_out_of_time = False
        self.held_out_scores: dict[str, list[HeldOutScores]] = {}
        self.finalists: list[Candidate] = []
        self._started_at = time.time() - search_state.seconds
        # The command goes on as it began, unless there is more time.
        goes_on = search_state.plan is not None and search_state.budget == options.budget
        self._tries_cheapest_first = goes_on and search_state.plan is not None and search_state.plan.num_levels > 0
        self._scored_rounds = 0
        self._trials_folder = search_state.path.parent / "trials"

    @property
    def trial_records(self) -> list[Record]:
        """Results of trials that are a part of the plan; those with which methods were timed may have more rounds."""
        assert self.plan is not None
        records = []
        for record in self.results.records:
            if record["stage"] == "tune" and record["point"][ROUNDS] == str(self.plan.rounds):
                records.append(record)
        return records

    @property
    def is_largest(self) -> bool:
        """Whether everything was tried that would be if time did not matter."""
        if self.plan is None or self.ran_out_of_time:
            return False
        return replace(self.plan, methods=(), num_finalists=0) == replace(
            self.largest_plan, methods=(), num_finalists=0
        )

    @property
    def elapsed(self) -> float:
        """Seconds that were spent, by earlier commands too."""
        return time.time() - self._started_at

    @property
    def end_by(self) -> float:
        """Time at which a run is ended."""
        return self._started_at + (1 + TOLERANCE) * self.options.budget

    def run(self) -> None:
        """Time the methods, search, and train the finalists.

        Raises:
            BudgetError: If the budget is too small.
        """
        self._time_methods()
        self.plan = self._make_plan()
        self._note_what_is_left_out(self.plan)
        self.state.plan = self.plan
        self.state.budget = self.options.budget
        self._write_state()
        self._print_plan()
        if self.plan.num_levels:
            self._search_cheapest_first(self.plan)
        else:
            self._run_all_settings(self.plan)
        self._train_finalists(self.plan)

    def _run_all_settings(self, plan: SearchPlan) -> None:
        """Run the rungs of a plan, and those of a larger one if time is left."""
        self.plan = plan
        self._run_rungs(self.plan)
        while (larger := self._find_larger_plan(self.plan)) is not None:
            # Trials were faster than measured, and what was tried is a part of the larger search.
            self.plan = larger
            self.state.plan = larger
            self._write_state()
            print(f"\nTime is left, so the search becomes larger: {larger.describe()}.", flush=True)
            self._run_rungs(larger)

    def _search_cheapest_first(self, plan: SearchPlan) -> None:
        """Run the rungs with the cheapest adapter, then dearer ones, and other settings of the cheapest in the rest.

        Args:
            plan: The plan; if the search goes on, with the levels and settings that an earlier command had time for.
        """
        self.plan = replace(plan, num_levels=1, num_added=0)
        self._run_rungs(self.plan)
        if self.plan.rounds < self.largest_plan.rounds or self.ran_out_of_time or not self.best_of_method:
            self.notes.append("dearer adapters were not tried: the budget is too small")
            return
        self._try_dearer_adapters(plan.num_levels)
        self._add_settings(plan.num_added)

    def _try_dearer_adapters(self, num_levels_before: int) -> None:
        """Try the best setting of each method with dearer adapters.

        Each adapter is tried with all methods or with none. It keeps the rates and λ that were best with the cheapest.

        Args:
            num_levels_before: Adapters that an earlier command tried.
        """
        assert self.plan is not None
        most_levels = max(len(self.methods[method].levels) for method in self.plan.methods)
        while self.plan.num_levels < most_levels:
            climbed = self._candidates_of_next_level(self.plan)
            title = self._title_of_next_level(self.plan)
            if self.plan.num_levels >= num_levels_before:
                if not self._has_time_for_level(climbed, self.plan):
                    self.notes.append(f"dearer adapters, from {title} on, were not tried: the budget is too small")
                    return
                print(f"\nTime is left, so the next adapter is tried: {title}.", flush=True)
            self._run_complete(climbed, replace(self.plan, num_levels=self.plan.num_levels + 1))

    def _add_settings(self, num_added_before: int) -> None:
        """Try other rates and λ with the cheapest adapter while there is time.

        Args:
            num_added_before: Settings of each method that an earlier command added.
        """
        assert self.plan is not None
        for place in range(self.plan.num_candidates, len(SETTINGS_OF_LEVEL)):
            added = [self.methods[method].levels[0].candidates[place] for method in self.best_of_method]
            trials = [trial for candidate in added for trial in self._trials_of(candidate, self.plan)]
            if self.plan.num_added >= num_added_before:
                if not self._has_time_for(trials, self.plan):
                    return
                print("\nTime is left, so another setting of each method is tried.", flush=True)
            self._run_complete(added, replace(self.plan, num_added=self.plan.num_added + 1))

    def _run_complete(self, candidates: Sequence[Candidate], plan: SearchPlan) -> None:
        """Run settings for all rounds, beside those that were scored before, as a part of a larger plan."""
        self.plan = plan
        self.state.plan = plan
        self._write_state()
        trials = [trial for candidate in candidates for trial in self._trials_of(candidate, plan)]
        self._run_trials(trials)
        held_out_scores: dict[str, list[HeldOutScores]] = {method: [] for method in plan.methods}
        self._collect_scores(trials, plan.rounds, held_out_scores)
        for method, scores_of_method in held_out_scores.items():
            self.held_out_scores.setdefault(method, []).extend(scores_of_method)

    def _trials_of(self, candidate: Candidate, plan: SearchPlan) -> list[Trial]:
        """Return the complete trials of a setting on all draws."""
        search = self.methods[candidate.method]
        return [search.trial(candidate, draw, plan.rounds, plan.rounds) for draw in range(plan.num_draws)]

    def _candidates_of_next_level(self, plan: SearchPlan) -> list[Candidate]:
        """Return the best setting of each method with the next adapter; none for methods that have no dearer one."""
        candidates = []
        for method, best in self.best_of_method.items():
            levels = self.methods[method].levels
            if len(levels) <= plan.num_levels:
                continue
            for level in levels:
                if best.candidate in level.candidates:
                    place = level.candidates.index(best.candidate)
                    candidates.append(levels[plan.num_levels].candidates[place])
                    break
        return candidates

    def _title_of_next_level(self, plan: SearchPlan) -> str:
        """Return the next adapter in words."""
        for method in plan.methods:
            levels = self.methods[method].levels
            if len(levels) > plan.num_levels:
                return levels[plan.num_levels].title
        return ""

    def tried_levels(self, method: str) -> Sequence[AdapterLevel]:
        """Return the adapters that were tried with a method, if they were tried one after another."""
        assert self.plan is not None
        return self.methods[method].levels[: self.plan.num_levels]

    def _has_time_for_level(self, candidates: Sequence[Candidate], plan: SearchPlan) -> bool:
        """Time the first setting of an adapter, and return whether there is time for all of them and the last rung."""
        if not candidates:
            return True
        first = candidates[0]
        former = self.cost(first.method)
        rounds = min(PROBE_ROUNDS, plan.rounds)
        probe = self.methods[first.method].trial(first, 0, rounds, plan.rounds)
        (record,) = self._run_trials([probe])
        if "failed" in record:
            return False
        cost = cost_of([record])
        seconds = 0.0
        costs: dict[str, Cost] = {}
        for candidate in candidates:
            # The others are expected to become dearer by as much.
            own = self.cost(candidate.method) if candidate is not first else former
            costs[candidate.method] = Cost(
                per_run=max(own.per_run, own.per_run + cost.per_run - former.per_run),
                per_round=own.per_round * max(1.0, cost.per_round / former.per_round),
            )
            for trial in self._trials_of(candidate, plan):
                if not self._is_done(trial.job):
                    seconds += costs[candidate.method].seconds(plan.rounds)
        all_costs = {method: costs.get(method, self.cost(method)) for method in plan.methods}
        finals = replace(plan, num_finalists=min(FEWEST_FINALISTS, len(plan.methods)))
        seconds += finals.final_seconds(all_costs)
        return self.elapsed + seconds / self.options.jobs <= self.options.budget

    def _time_methods(self) -> None:
        """Train the first setting of each method for a few rounds, which are a part of its trial."""
        rounds = min(PROBE_ROUNDS, self.largest_plan.rounds)
        first_method = self.largest_plan.methods[0]
        # The first method tells whether a search is possible at all, and whether the recipe's adapter is too dear. The
        # others run at once, as the trials will: they take longer beside each other than alone.
        if not self._tries_cheapest_first:
            self._time_recipe(first_method, rounds)
        remaining = [method for method in self.largest_plan.methods if method not in self.failed_methods]
        if self._tries_cheapest_first:
            self._time_rounds([first_method], rounds)
        self._time_rounds([method for method in remaining if method != first_method], rounds)
        if not self.working_methods:
            reasons = "; ".join(f"{method}: {reason}" for method, reason in self.failed_methods.items())
            raise ValueError(f"no method could be trained: {reasons}")

    def _first_candidate(self, method: str) -> Candidate:
        """Return the setting of a method that is timed, and with which its search begins."""
        search = self.methods[method]
        return search.levels[0].candidates[0] if self._tries_cheapest_first else search.candidates[0]

    def _time_recipe(self, method: str, rounds: int) -> None:
        """Time the recipe's own adapter, and find out whether cheaper ones must be tried first."""
        search = self.methods[method]
        is_cheapest = search.candidates[0] in search.levels[0].candidates
        end_by = self.end_by
        if not is_cheapest:
            end_by = min(end_by, time.time() + PROBE_SHARE * self.options.budget)
        trial = search.trial(search.candidates[0], 0, rounds, self.largest_plan.rounds)
        (record,) = self._run_trials([trial], end_by)
        out_of_time = str(record.get("failed", "")).startswith("OutOfTimeError")
        if out_of_time and not is_cheapest:
            # It did not fail: it was only stopped.
            self.results.records.remove(record)
            self.notes.append(
                f"the recipe's adapter: {rounds} rounds took more than {PROBE_SHARE:.0%} of the budget, so cheaper "
                "adapters were tried first"
            )
            self._tries_cheapest_first = True
            return
        if not self._accept_timing(method, record, rounds):
            return
        plan = fit_plan(
            self.largest_plan,
            dict.fromkeys(self.largest_plan.methods, self.cost(method)),
            self.options.budget - self.elapsed,
            self.options.jobs,
        )
        fewest_settings = min(FEW_SETTINGS, self.largest_plan.num_candidates)
        has_few = plan is None or plan.rounds < self.largest_plan.rounds or plan.num_candidates < fewest_settings
        self._tries_cheapest_first = has_few and len(search.levels) > 1
        if not self._tries_cheapest_first or is_cheapest:
            self._check_budget(method)

    def _time_rounds(self, methods: Sequence[str], rounds: int) -> None:
        """Train the first settings of methods for some rounds."""
        trials = []
        for method in methods:
            trials.append(
                self.methods[method].trial(self._first_candidate(method), 0, rounds, self.largest_plan.rounds)
            )
        for trial, record in zip(trials, self._run_trials(trials), strict=True):
            if self._accept_timing(trial.candidate.method, record, rounds):
                self._check_budget(trial.candidate.method)

    def _accept_timing(self, method: str, record: Record, rounds: int) -> bool:
        """Return whether a method could be timed; if not, it is left out.

        Raises:
            BudgetError: If the budget was over before.
        """
        if "failed" not in record:
            return True
        if record["failed"].startswith("OutOfTimeError"):
            raise BudgetError(
                f"--budget {format_duration(self.options.budget)} is over before {rounds} rounds of "
                f"{method} were trained; allow much more, or choose a smaller network or smaller images"
            )
        self.failed_methods[method] = record["failed"]
        return False

    @property
    def working_methods(self) -> tuple[str, ...]:
        """The methods that could be trained."""
        return tuple(method for method in self.largest_plan.methods if method not in self.failed_methods)

    def _check_budget(self, method: str) -> None:
        """Raise a BudgetError if the smallest search would take too long even if all methods were as fast as one."""
        cost = self.cost(method)
        smallest = smallest_plan(self.largest_plan)
        needed = smallest.seconds(dict.fromkeys(smallest.methods, cost), self.options.jobs)
        if method == min(smallest.methods, key=list(METHODS).index) and needed > self.options.budget:
            raise self._too_small(needed)

    def _too_small(self, needed: float) -> BudgetError:
        return BudgetError(
            f"--budget {format_duration(self.options.budget)} is too small: the smallest search, with "
            f"{smallest_plan(self.largest_plan).rounds} rounds, needs about {format_duration(self.elapsed + needed)}; "
            "allow that, or choose smaller images (--data.image_size) or a smaller network (--model.backbone)"
        )

    def cost(self, method: str) -> Cost:
        """Return what runs of a method cost, from its trials: those with its best adapter if cheap ones come first."""
        records = [record for record in self.results.records if record["label"] == method]
        if self._tries_cheapest_first:
            best = self.best_of_method.get(method)
            candidate = self._first_candidate(method) if best is None else best.candidate
            same_adapter = [
                record for record in records if _adapter_of(record["point"]) == _adapter_of(candidate.point)
            ]
            records = same_adapter or records
        return cost_of(records)

    def costs(self) -> dict[str, Cost]:
        """Return what runs of each method cost."""
        return {method: self.cost(method) for method in self.working_methods}

    def _make_plan(self) -> SearchPlan:
        """Return the largest plan that fits into the rest of the budget, or the plan of an earlier command."""
        if self.state.plan is not None and self.state.budget == self.options.budget:
            return self.state.plan
        methods = self.working_methods
        num_finalists = min(self.largest_plan.num_finalists, len(methods))
        largest = replace(self.largest_plan, methods=methods, num_finalists=num_finalists)
        costs = self.costs()
        remaining = self.options.budget - self.elapsed
        plan = None
        if self._tries_cheapest_first:
            num_candidates = min(largest.num_candidates, len(SETTINGS_OF_LEVEL))
            largest = replace(largest, num_candidates=num_candidates, num_levels=1)
            plan = fit_plan(largest, costs, SHARE_OF_FIRST_LEVEL * remaining, self.options.jobs)
            if plan is not None and plan.rounds < largest.rounds:
                plan = None
        plan = plan or fit_plan(largest, costs, remaining, self.options.jobs)
        if plan is None:
            raise self._too_small(smallest_plan(largest).seconds(costs, self.options.jobs))
        return plan

    def _note_what_is_left_out(self, plan: SearchPlan) -> None:
        """Note methods and rounds for which the budget is too small."""
        for method in self.working_methods:
            reason = self.methods[method].why_other_adapter
            if reason:
                adapter = self.methods[method].levels[0].title
                self.notes.append(f"{method} was not tried with the recipe's adapter, but with {adapter}: {reason}")
            if method not in plan.methods:
                self.notes.append(f"{method} was not tried: the budget is too small for more methods")
        if plan.rounds < self.largest_plan.rounds:
            self.notes.append(
                f"runs have {plan.rounds} of the recipe's {self.largest_plan.rounds} rounds: the budget is too small "
                "for more, and methods that learn slowly may gain most from them"
            )

    def _print_plan(self) -> None:
        assert self.plan is not None
        costs = self.costs()
        rates = ", ".join(f"{method} {cost.per_round:.2g} s" for method, cost in costs.items())
        expected = self.plan.seconds({name: costs[name] for name in self.plan.methods}, self.options.jobs)
        print(f"Measured for one round: {rates}.")
        print(f"Plan for {format_duration(self.options.budget)}: {self.plan.describe()}.")
        if self.plan.rounds < self.largest_plan.rounds:
            print(f"Only {self.plan.rounds} of the recipe's {self.largest_plan.rounds} rounds fit into the budget.")
        print(f"Spent so far: {format_duration(self.elapsed)}; expected to take another {format_duration(expected)}.")
        full = replace(self.largest_plan, methods=self.plan.methods)
        if full != self.plan and not self.plan.num_levels:
            needed = self.elapsed + full.seconds(costs, self.options.jobs)
            print(f"The largest search would need {format_duration(needed)}.")
        print("Ctrl-C ends with a verdict on what is there; the same command goes on.", flush=True)

    def _run_rungs(self, plan: SearchPlan) -> None:
        """Run the rungs, and keep the best settings of each method.

        All methods have one setting each in turn, so that they have as many if time runs out.
        """
        remaining: dict[str, list[Candidate]] = {}
        for method in plan.methods:
            remaining[method] = self.methods[method].first_candidates(plan)
        for number, rung in enumerate(plan.rungs):
            scores_of_rung: dict[str, list[HeldOutScores]] = {method: [] for method in plan.methods}
            num_in_rung = max(len(candidates) for candidates in remaining.values())
            for place in range(num_in_rung):
                trials: list[Trial] = []
                for method, candidates in remaining.items():
                    if place < len(candidates):
                        for draw in range(plan.num_draws):
                            trials.append(self.methods[method].trial(candidates[place], draw, rung.rounds, plan.rounds))
                is_first = number == 0 and place == 0
                if not is_first and not self._has_time_for(trials, plan):
                    self.ran_out_of_time = True
                    self.notes.append(
                        f"after {rung.rounds} rounds, {place} of {num_in_rung} settings of each method were scored: "
                        "time ran out"
                    )
                    break
                self._run_trials(trials)
                self._collect_scores(trials, rung.rounds, scores_of_rung)
                if rung.rounds >= self._scored_rounds:
                    # A larger search begins with fewer rounds than the one before it has scores for.
                    self._scored_rounds = rung.rounds
                    self.held_out_scores = {method: scores for method, scores in scores_of_rung.items() if scores}
            for method, scores in scores_of_rung.items():
                ranked = rank_candidates(scores)
                remaining[method] = ranked[: math.ceil(len(ranked) / REDUCTION)]
            if not any(remaining.values()):
                break

    def _collect_scores(
        self, trials: Sequence[Trial], rounds: int, scores_of_rung: dict[str, list[HeldOutScores]]
    ) -> None:
        """Add the scores of settings to those of their methods."""
        records_by_candidate: dict[str, list[Record]] = {}
        candidates_by_name: dict[str, Candidate] = {}
        for trial in trials:
            record = find_record(self.results, trial.job)
            assert record is not None
            records_by_candidate.setdefault(trial.candidate.name, []).append(record)
            candidates_by_name[trial.candidate.name] = trial.candidate
        for name, candidate in candidates_by_name.items():
            scores_of_rung[candidate.method] += read_scores(
                candidate, rounds, records_by_candidate[name], self.options.goal
            )

    def _find_larger_plan(self, plan: SearchPlan) -> SearchPlan | None:
        """Return the largest plan with more settings or draws for which there is time after a search; None if none."""
        if self.ran_out_of_time:
            return None
        costs = {method: self.cost(method) for method in plan.methods}
        left = self.options.budget - self.elapsed
        for larger in growing_plans(plan, self.largest_plan):
            finals = replace(larger, num_finalists=min(FEWEST_FINALISTS, len(plan.methods)), seeds=self.options.seeds)
            seconds = larger.search_seconds(costs) - plan.search_seconds(costs) + finals.final_seconds(costs)
            if seconds / self.options.jobs <= left:
                return larger
        return None

    def _has_time_for(self, trials: Sequence[Trial], plan: SearchPlan) -> bool:
        """Return whether trials can be run before the last rung must begin."""
        costs = {method: self.cost(method) for method in plan.methods}
        seconds = 0.0
        for trial in trials:
            if self._is_done(trial.job):
                continue
            cost = costs[trial.candidate.method]
            seconds += cost.seconds(trial.rounds - self._rounds_done(trial))
        smallest = replace(plan, num_finalists=min(plan.num_finalists, FEWEST_FINALISTS))
        seconds += smallest.final_seconds(costs)
        return self.elapsed + seconds / self.options.jobs <= self.options.budget

    def _rounds_done(self, trial: Trial) -> int:
        """Return how many rounds of a trial were trained in former rungs."""
        rounds = 0
        for record in self.results.records:
            # All lengths of a trial have the same arguments.
            if record["args"] == trial.job.args:
                rounds_of_record = int(record["varied"]["rounds"])
                if rounds_of_record < trial.rounds:
                    rounds = max(rounds, rounds_of_record)
        return rounds

    @property
    def best_of_method(self) -> dict[str, HeldOutScores]:
        """The best held-out scores of each method, after as many rounds for all."""
        best_by_method: dict[str, HeldOutScores] = {}
        for method, scores in self.held_out_scores.items():
            best = best_of(scores)
            if best is not None:
                best_by_method[method] = prefer_both_models(best, scores, self.options.goal)
        return best_by_method

    @property
    def chosen(self) -> HeldOutScores | None:
        """What the held-out images choose; None before any setting was scored."""
        best = self.best_of_method
        return choose_method(best) if best else None

    def _train_finalists(self, plan: SearchPlan) -> None:
        """Train the best settings of the best methods on all training images, seed after seed."""
        if not self.best_of_method:
            return
        plan = self._plan_last_rung(plan)
        self.finalists = self._find_finalists(plan.num_finalists)
        self._drop_former_last_rung(plan)
        methods = [candidate.method for candidate in self.finalists]
        for number, seed in enumerate(plan.seeds):
            pending = []
            for candidate in self.finalists:
                job = self.methods[candidate.method].final_job(candidate, seed, plan.rounds)
                if not self._is_done(job):
                    pending.append(_PlannedRun(job, None))
            one_seed = replace(plan, seeds=(seed,)).final_seconds(self.costs(), methods)
            needed = one_seed * len(pending) / len(methods) / self.options.jobs
            if number > 0 and self.elapsed + needed > (1 + TOLERANCE) * self.options.budget:
                self._note_missing_seeds(self.options.seeds[number:])
                return
            self._execute_runs(pending)
        self._note_missing_seeds(self.options.seeds[len(plan.seeds) :])

    def _drop_former_last_rung(self, plan: SearchPlan) -> None:
        """Leave out runs of a smaller search in this folder, whose last rung had other settings or fewer rounds."""
        planned_args = []
        for candidate in self.finalists:
            method = self.methods[candidate.method]
            for seed in self.options.seeds:
                planned_args.append(method.final_job(candidate, seed, plan.rounds).args)
        records = self.results.records
        self.results.records = [
            record for record in records if record["stage"] != "run" or record["args"] in planned_args
        ]

    def _plan_last_rung(self, plan: SearchPlan) -> SearchPlan:
        """Return the plan with the methods and seeds of the last rung for which there is time now."""
        smallest = plan
        for smallest in final_plans(plan, self.options.seeds):
            finalists = self._find_finalists(smallest.num_finalists)
            seconds = 0.0
            for seed in smallest.seeds:
                for candidate in finalists:
                    job = self.methods[candidate.method].final_job(candidate, seed, plan.rounds)
                    if not self._is_done(job):
                        one_run = replace(smallest, seeds=(seed,))
                        seconds += one_run.final_seconds(self.costs(), [candidate.method])
            if self.elapsed + seconds / self.options.jobs <= self.options.budget:
                return smallest
        return smallest

    def _find_finalists(self, number: int) -> list[Candidate]:
        """Return the best settings of the methods that are best on held-out images, and of training alone."""
        best = self.best_of_method
        chosen = choose_method(best)
        # The choice comes first, also among equal ones.
        ranked = sorted(best.values(), key=lambda scores: (scores is not chosen, -scores.merit))
        finalists = [scores.candidate for scores in ranked[:number]]
        alone = best.get("standalone")
        if alone is not None and alone.candidate not in finalists:
            # Training alone tells what a federation gains.
            finalists[-1] = alone.candidate
        return finalists

    def _note_missing_seeds(self, seeds: Sequence[int]) -> None:
        if seeds:
            noun = "seed" if len(seeds) == 1 else "seeds"
            self.notes.append(f"the last rung lacks {noun} {', '.join(map(str, seeds))}: time ran out")

    def _run_trials(self, trials: Sequence[Trial], end_by: float | None = None) -> list[Record]:
        """Run the trials that have no result, and return the records of all.

        Args:
            trials: The trials.
            end_by: Time at which they are ended; None for the end of the search.
        """
        runs = []
        for trial in trials:
            if not self._is_done(trial.job):
                segment = Segment(
                    trial.rounds, self._locate_checkpoint(trial, trial.rounds), self._last_checkpoint(trial)
                )
                runs.append(_PlannedRun(trial.job, segment))
        self._execute_runs(runs, end_by)
        records = []
        for trial in trials:
            record = find_record(self.results, trial.job)
            assert record is not None
            records.append(record)
        return records

    def _is_done(self, job: Job) -> bool:
        """Return whether a run has a result."""
        record = find_record(self.results, job)
        return record is not None and "failed" not in record

    def _locate_checkpoint(self, trial: Trial, rounds: int) -> Path:
        """Return the file of a trial after some rounds."""
        # All lengths of a trial have the same arguments.
        digest = sha256(json.dumps(trial.job.args).encode()).hexdigest()[:16]
        return self._trials_folder / f"{trial.candidate.method}-{digest}-{rounds}.ckpt"

    def _last_checkpoint(self, trial: Trial) -> Path | None:
        """Return the newest file of a trial from before it is scored; None if there is none."""
        for rounds in range(trial.rounds - 1, 0, -1):
            path = self._locate_checkpoint(trial, rounds)
            if path.is_file():
                return path
        return None

    def _execute_runs(self, runs: Sequence["_PlannedRun"], end_by: float | None = None) -> None:
        """Execute runs, and write each result when it is available."""
        end_by = self.end_by if end_by is None else end_by
        tasks = []
        for run in runs:
            tasks.append(RunTask(run.job.args, False, run.segment, end_by, recipe_digest=run.job.digest))
        for number, result in self.carry_out(tasks):
            if result is None:
                self._print_progress(runs[number])
            else:
                self._record_result(runs[number].job, result)

    def _record_result(self, job: Job, result: Result) -> None:
        """Add the result of a run."""
        if "failed" in result:
            result = result | {"failed": self._without_names(result["failed"])}
            print(f"\n{job.label} failed: {result['failed']}", file=sys.stderr, flush=True)
        resources = {"seconds": result["seconds"], "threads": self.options.threads}
        self.results.add(vars(job) | resources | result.get("run", result))
        self._write_state()

    def _without_names(self, reason: str) -> str:
        """Replace the names of clients in a reason if the search is anonymous."""
        if not self.options.anonymous:
            return reason
        # Longer names come first, since one name may be a part of another.
        for name in sorted(self.names, key=len, reverse=True):
            reason = name_pattern(name).sub(f"client {self.names.index(name)}", reason)
        return reason

    def _write_state(self) -> None:
        self.state.seconds = self.elapsed
        self.state.write()

    def _print_progress(self, run: "_PlannedRun") -> None:
        """Print the number and the name of a run, the time, and the best so far, in one line."""
        job = run.job
        if run.segment is None:
            what = f"{job.label} on all training images, seed {job.seed}"
        else:
            what = f"{job.label}, setting {job.varied['setting']}, up to round {run.segment.last_round}"
        left = max(0.0, self.options.budget - self.elapsed)
        times = f"{format_duration(self.elapsed)} of {format_duration(self.options.budget)}"
        line = f"[{times}, at most {format_duration(left)} left] {what}"
        chosen = self.chosen
        if chosen is not None:
            unit = unit_of(self.results.records[0])
            score = unit.text(chosen.mean)
            models = predicting_models(chosen.candidate.method, chosen.way)
            line += f"; best so far: {chosen.candidate.method}, {models}, {score} on held-out images"
        if sys.stdout.isatty():
            print(f"\r\x1b[K{line}", end="", flush=True)
        else:
            print(line, flush=True)


def cost_of(records: Sequence[Record]) -> Cost:
    """Return what runs cost, from the records of trials among some records."""
    costs = []
    for record in records:
        durations = record.get("seconds_of_rounds")
        if durations:
            per_run = record["seconds"] - sum(durations)
            costs.append(Cost(per_run, median(durations[1:] or durations)))
    return mean_cost(costs)


def _adapter_of(point: Point) -> tuple[str | None, str | None]:
    """Return the options of the adapter of a setting; None for those of the recipe."""
    return point.get(ADAPTER), point.get(ADAPTER_OPTIONS)


@dataclass(frozen=True)
class _PlannedRun:
    """A run, and the segment of it that is trained; None for all of it."""

    job: Job
    segment: Segment | None
