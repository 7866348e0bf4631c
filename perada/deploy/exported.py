# SPDX-License-Identifier: Apache-2.0
"""Export of a deployed run as a :class:`perada.Run`: a site's own models, or the server's global one."""

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from perada.core.states import State, to_device, unstack
from perada.data.medical.reading import DEFAULT_READING
from perada.data.preprocessing import Preprocessing, first_image_set, preprocessing_of, preprocessing_of_set
from perada.deploy.recipe import Recipe, ServerRecipe
from perada.deploy.server.progress import RunProgress
from perada.deploy.site.client import Client
from perada.deploy.state import RunState
from perada.federation.settings import lora_ranks
from perada.lightning.run_record import RunFacts, describe_run
from perada.privacy.accounting import history_epsilon
from perada.results.report import LAST_ROUND
from perada.results.run import Run


def export_site_run(client: Client, run_state: RunState, name: str) -> Run:
    """Return a site's run, of one client: its personal model, and the last global model it received.

    Args:
        client: Recipe of the run, with the site's data.
        run_state: The site's state in the run.
        name: Name of the site.

    Raises:
        ValueError: If the site has not received a global state yet.
    """
    recipe = client.recipe
    data = client.data
    training = run_state.training
    if not run_state.scoring.global_state:
        raise ValueError(f"site {name} has not received a global state yet; export after the first evaluation")
    assert recipe.module.adapted is not None
    shared = to_device(run_state.scoring.global_state, recipe.device)
    stacked_personal = client.personal(shared, run_state)
    account = client.protection(training.account, training.num_rounds).image_account
    privacy: dict[str, Any] = {}
    if account is not None:
        privacy["sample"] = account.record()
    if recipe.loop.client_privacy is not None:
        privacy["client"] = _client_level_of_site(client, training.num_rounds)
    image_set = first_image_set(data.checked)
    facts = RunFacts(
        rounds=training.num_rounds,
        num_clients=1,
        clients_per_round=None,
        num_images=[client.size],
        preprocessing=preprocessing_of(
            data.checked,
            data.prepare,
            getattr(image_set, "full_scale", None),
            getattr(image_set, "medical", DEFAULT_READING),
        ),
        classes=data.classes,
        client_names=[name],
        privacy=privacy or None,
    )
    info = describe_run(client.settings, recipe.module, data, facts)
    if run_state.rank:
        info["lora_ranks"] = [run_state.rank]
    metrics: dict[str, Any] = {"rounds": [], "clients": {}}
    if account is not None:
        for ledger, values in account.epsilons([0]).items():
            metrics["clients"][f"privacy/{ledger}_epsilon"] = values
    personal_of = None
    if stacked_personal is not None:
        personal = unstack(stacked_personal)[0]
        personal_of = lambda _: personal  # noqa: E731  # the state of any client, of which there is one
    state_of_both = client.state_of_both(shared, run_state)
    members = _global_models(recipe, shared, {})
    return Run(recipe.module.adapted, members, personal_of, 1, metrics, info, lambda _: state_of_both)


def export_server_run(recipe: ServerRecipe, progress: RunProgress, saved_states: Mapping[str, Any]) -> Run:
    """Return the server's run of all sites: the global model and the rounds.

    Where clients predict with their own models, these are at the sites, and the run has none of them.

    Args:
        recipe: Recipe whose network is built.
        progress: Progress of the run.
        saved_states: The server's states, as :func:`perada.deploy.server.progress.SavedRun` holds them.
    """
    assert recipe.module.adapted is not None
    settings = recipe.settings()
    algorithm = settings.algorithm
    members = progress.roster
    names = [member.name for member in members]
    sizes = [member.size for member in members if member.size is not None]
    facts = RunFacts(
        rounds=progress.done,
        num_clients=len(members),
        clients_per_round=settings.clients_per_round,
        num_images=sizes if len(sizes) == len(members) else None,
        preprocessing=_preprocessing_of_server(recipe),
        classes=recipe.classes,
        client_names=names,
        privacy=_privacy_of_server(recipe, progress),
    )
    info = describe_run(settings, recipe.module, recipe.data, facts)
    if algorithm.inference == "personal" or algorithm.personalization() is not None:
        info["elsewhere"] = list(range(len(members)))
    known_sizes = [None if settings.private else member.size for member in members]
    ranks = lora_ranks(algorithm, recipe.module.tensor_names, recipe.template.initial, names, known_sizes)
    if ranks:
        info["lora_ranks"] = list(ranks)
    rounds = []
    for row in progress.history:
        rounds.append({name: int(value) if name == "round" else value for name, value in row.items()})
    metrics = {"rounds": rounds, "clients": {LAST_ROUND: [member.last_round for member in members]}}
    models = _global_models(recipe, to_device(saved_states["global"], recipe.device), saved_states["server"])
    return Run(recipe.module.adapted, models, None, len(members), metrics, info)


def _global_models(recipe: Recipe, shared: State, server_states: Mapping[str, State]) -> list[State]:
    """Return the global models whose outputs are averaged; usually one."""
    states = {name: to_device(state, recipe.device) for name, state in server_states.items()}
    return unstack(recipe.loop.algorithm.members(shared, states))


def _preprocessing_of_server(recipe: ServerRecipe) -> Preprocessing:
    """Return how sites preprocess images, as far as the recipe specifies it."""
    division = recipe.data.division
    assert division is not None and recipe.module.adapted is not None
    preparation = replace(recipe.data.prepare, image_config=recipe.module.adapted.backbone.image_config)
    return preprocessing_of_set(division.dataset, preparation)


def _client_level_of_site(client: Client, num_rounds: int) -> dict[str, Any]:
    """Return the privacy of the site as a whole after some rounds, as the record of :mod:`perada.results.cards`.

    Without secure sums the server adds the noise. The site has no ledger of it, so that ε is infinite here.
    """
    loop = client.recipe.loop
    assert loop.client_privacy is not None
    options = replace(loop.client_privacy, secure_rng=True)
    if client.site_privacy is None:
        return {"options": asdict(options), "noise_multiplier": 0.0, "epsilon": [math.inf]}
    spent = history_epsilon({client.site_privacy.cost: num_rounds}, options.delta, options.accountant)
    assert loop.secure_sums is not None
    return {
        "options": asdict(options),
        "noise_multiplier": client.site_privacy.client_level.noise_multiplier,
        "epsilon": [spent],
        "sums": {"min_sites": loop.secure_sums.min_sites, "threshold": loop.secure_sums.threshold},
    }


def _privacy_of_server(recipe: ServerRecipe, progress: RunProgress) -> dict[str, Any] | None:
    """Return the privacy record of the run at the server. An ε that a site does not report counts as infinite."""
    settings = recipe.settings()
    members = progress.roster
    privacy: dict[str, Any] = {}
    if settings.privacy is not None:
        unknown = [0.0] * len(members)
        privacy["sample"] = {
            "options": asdict(settings.privacy),
            "at_sites": True,
            "noise_multipliers": unknown,
            "sample_rates": unknown,
            "server": [member.spent("server") for member in members],
            "release": [member.spent("release") for member in members],
        }
    if settings.client_privacy is not None:
        client_level = recipe.level(len(members))
        assert client_level is not None
        if progress.client_level is not None:
            client_level.load_state_dict(progress.client_level)
        privacy["client"] = client_level.record(len(members))
    return privacy or None
