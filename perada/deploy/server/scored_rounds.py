# SPDX-License-Identifier: Apache-2.0
"""Rounds whose models are scored at the sites: which models sites get, and how their scores are averaged."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from perada.core.states import State, stack_size
from perada.deploy.protocol import RejectionError, Response
from perada.deploy.recipe import ServerRecipe
from perada.deploy.scores import impossible_sums, mean_scores, scores_of_sums
from perada.deploy.server.progress import RoundRecord, RunProgress, participation_of
from perada.deploy.server.rounds import Roster
from perada.deploy.server.summed_rounds import SummedRounds
from perada.federation.server import Server
from perada.federation.settings import Settings
from perada.scores.failed_outputs import REMEDY

log = logging.getLogger("perada.deploy")


@dataclass(frozen=True)
class ModelsToScore:
    """What sites receive to score.

    Attributes:
        tensors: The global state, with names in ``shared/``, and the members of an ensemble, in ``members/``.
        num_members: Number of these members; 0 if they follow from the global state.
    """

    tensors: State
    num_members: int


@dataclass(frozen=True)
class ScoredRounds:
    """Averages the scores of the models on the sites' own test images.

    Attributes:
        recipe: Recipe of the run.
        settings: Options of the run.
        server: Server with the global state.
        roster: Sites of the run.
        progress: Progress of the run.
        summed_rounds: Secure sums of the run.
        sites_per_round: Number of sites that are asked in a round; None for all.
    """

    recipe: ServerRecipe
    settings: Settings
    server: Server
    roster: Roster
    progress: RunProgress
    summed_rounds: SummedRounds
    sites_per_round: int | None

    def models_to_score(self) -> ModelsToScore:
        """Return what sites receive to score."""
        state = self.server.global_state
        tensors = {f"shared/{key}": value for key, value in state.items()}
        members = self._ensemble_members(state)
        if not members:
            return ModelsToScore(tensors, 0)
        tensors |= {f"members/{key}": value for key, value in members.items()}
        return ModelsToScore(tensors, stack_size(members))

    def average(self, responses: Mapping[str, Response]) -> dict[str, float]:
        """Return the scores of a round as metrics.

        Args:
            responses: What the sites answered, by name. Those with impossible sums are left out.
        """
        possible_responses = self._without_impossible_sums(responses)
        self._warn_of_failed_outputs(possible_responses)
        if self.settings.secure_sums is None or self.recipe.noisy:
            return self._mean_scores(possible_responses)
        return self._scores_of_sum(possible_responses)

    def _ensemble_members(self, state: State) -> State:
        """Return the global models (models, ...) to be scored; nothing if they follow from the global state."""
        algorithm = self.settings.algorithm
        if not algorithm.global_model:
            return {}
        members = self.server.members()
        derived = algorithm.members(state, {})
        for key, value in members.items():
            if value.shape != derived[key].shape or not torch.equal(value, derived[key]):
                return members
        return {}

    def _warn_of_failed_outputs(self, responses: Mapping[str, Response]) -> None:
        """Log the sites at which outputs of a model are NaN or infinite, so that there is no score of it."""
        for name, response in responses.items():
            for model in response.facts.get("failed_models", ()):
                if model == "both":
                    # One of the two models has failed, too.
                    continue
                log.warning(
                    "round %d: outputs of the %s model are NaN or infinite for test images of site %s, so it has no "
                    "score, and means over the sites are NaN; %s",
                    self.progress.done,
                    model,
                    name,
                    REMEDY,
                    extra={"site": name},
                )

    def _without_impossible_sums(self, responses: Mapping[str, Response]) -> dict[str, Response]:
        """Return the responses to an evaluation, without those with sums that no test images can have."""
        recipe = self.recipe
        possible = {}
        for name, response in responses.items():
            problem = impossible_sums(recipe.module.metrics, recipe.num_summands, response.facts, recipe.max_pixels)
            if problem:
                log.warning("evaluate: site %s: malformed: %s", name, problem, extra={"site": name})
            else:
                possible[name] = response
        return possible

    def _mean_scores(self, responses: Mapping[str, Response]) -> dict[str, float]:
        """Average the scores that sites have sent."""
        recent_by_number = participation_of(self.progress, self.sites_per_round).recent
        recent = [recent_by_number[self.roster.numbers[name]] for name in responses]
        facts = [response.facts for response in responses.values()]
        return mean_scores(self.recipe.module.metrics, facts, recent, self.recipe.predicts_with_both)

    def _scores_of_sum(self, responses: Mapping[str, Response]) -> dict[str, float]:
        """Compute scores from a secure sum over the sites; if it fails, from what they have sent outside of it."""
        recipe = self.recipe
        candidates: dict[str, tuple[Response, State]] = {}
        for name, response in responses.items():
            if response.sums.get("adds"):
                candidates[name] = (response, {})
        try:
            contents = recipe.contents_of_scores()
            result = self.summed_rounds.add_up("scores", RoundRecord(self.progress.done), candidates, contents).result
        except RejectionError as rejection:
            log.warning("no scores after round %d: %s", self.progress.done, rejection)
            return self._mean_scores(responses)
        for model, name in (("that the site predicts with", "own/failed"), ("global", "global/failed")):
            num_failed = round(result.totals.get(name, 0))
            if num_failed:
                model_text = f"{model} model" if model == "global" else f"model {model}"
                log.warning(
                    "round %d: outputs of the %s are NaN or infinite at %d of %d sites, so it has no score; %s",
                    self.progress.done,
                    model_text,
                    num_failed,
                    len(candidates),
                    REMEDY,
                )
        return scores_of_sums(
            recipe.module.metrics, recipe.num_summands, result, recipe.max_pixels, recipe.predicts_with_both
        )
