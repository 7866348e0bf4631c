# SPDX-License-Identifier: Apache-2.0
"""What a deployment leaves as a :class:`perada.Run`: at a site its own models, at the server the global one."""

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from perada.core.states import State, to_device, unstack
from perada.data.preprocessing import Preprocessing, preprocessing_of, preprocessing_of_set
from perada.deploy.recipe import Recipe, ServerRecipe
from perada.deploy.server.progress import RunProgress
from perada.deploy.site.client import Client
from perada.deploy.state import RunState
from perada.federation.settings import lora_ranks
from perada.lightning.scoring import describe_run
from perada.privacy.accounting import history_epsilon
from perada.results.report import LAST_ROUND
from perada.results.run import Run


def export_site_run(client: Client, state: RunState, name: str) -> Run:
    """The run of one client that a site has trained: its personal model, and the global one that it was last told.

    Args:
        client: The recipe of the run, with the site's data.
        state: Where the site is in the run.
        name: What the site is called.

    Raises:
        ValueError: If the site was told no global state yet.
    """
    recipe, data = client.recipe, client.data
    if not state.shared:
        raise ValueError(f"site {name} was told no global state yet; export when the run is over")
    assert recipe.module.adapted is not None
    shared = to_device(state.shared, recipe.device)
    personal = client.personal(shared, state)
    protection = client.protection(state.account, state.trained)
    privacy: dict[str, Any] = {} if protection.images is None else {"sample": protection.images.record()}
    if recipe.loop.client_privacy is not None:
        privacy["client"] = _level_of_site(client, state)
    info = describe_run(
        client.settings,
        recipe.module,
        data,
        rounds=state.trained,
        num_clients=1,
        clients_per_round=None,
        images=[client.size],
        preprocessing=preprocessing_of(data.checked, data.prepare, _full_scale(client)),
        classes=data.classes,
        client_names=[name],
        privacy=privacy or None,
    )
    if state.rank:
        info["lora_ranks"] = [state.rank]
    own = None if personal is None else unstack(personal)[0]
    epsilons = {} if protection.images is None else protection.images.epsilons([0])
    scores = {f"privacy/{ledger}_epsilon": values for ledger, values in epsilons.items()}
    return Run(
        recipe.module.adapted,
        _members(recipe, shared, {}),
        None if own is None else lambda _: own,
        1,
        {"rounds": [], "clients": scores},
        info,
    )


def export_server_run(recipe: ServerRecipe, progress: RunProgress, states: Mapping[str, Any]) -> Run:
    """The run of all sites as the server has it: the global model and the rounds.

    Where clients predict with models of their own, these are at the sites, and the run has none of them.

    Args:
        recipe: Whose network is built.
        progress: How far the run is.
        states: The server's, as :func:`perada.deploy.server.progress.read_progress` gives them.
    """
    assert recipe.module.adapted is not None
    members, settings = progress.roster, recipe.settings()
    sizes = [member.size for member in members if member.size is not None]
    info = describe_run(
        settings,
        recipe.module,
        recipe.data,
        rounds=progress.done,
        num_clients=len(members),
        clients_per_round=settings.clients_per_round,
        images=sizes if len(sizes) == len(members) else None,
        preprocessing=_preprocessing_of_server(recipe),
        classes=recipe.classes,
        client_names=[member.name for member in members],
        privacy=_privacy_of_server(recipe, progress),
    )
    if settings.algorithm.inference == "personal" or settings.algorithm.personalization() is not None:
        info["elsewhere"] = list(range(len(members)))
    ranks = lora_ranks(
        settings.algorithm,
        recipe.module.slot,
        recipe.template.initial,
        [member.name for member in members],
        [None if settings.private else member.size for member in members],
    )
    if ranks:
        info["lora_ranks"] = list(ranks)
    rounds = [
        {name: int(value) if name == "round" else value for name, value in row.items()} for row in progress.history
    ]
    models = _members(recipe, to_device(states["global"], recipe.device), states["server"])
    metrics = {"rounds": rounds, "clients": {LAST_ROUND: [member.last_round for member in members]}}
    return Run(recipe.module.adapted, models, None, len(members), metrics, info)


def _members(recipe: Recipe, shared: State, server: Mapping[str, State]) -> list[State]:
    """The global models whose outputs are averaged; usually one."""
    held = {name: to_device(state, recipe.device) for name, state in server.items()}
    return unstack(recipe.loop.algorithm.members(shared, held))


def _full_scale(client: Client) -> float | None:
    """The value of white in the site's files."""
    dataset: Any = client.data.checked.train
    dataset = dataset.datasets[0] if hasattr(dataset, "datasets") else None
    while hasattr(dataset, "dataset"):  # a Subset
        dataset = dataset.dataset
    found: float | None = getattr(dataset, "full_scale", None)
    return found


def _preprocessing_of_server(recipe: ServerRecipe) -> Preprocessing:
    """What sites do to images, as far as the recipe says."""
    division = recipe.data.division
    assert division is not None and recipe.module.adapted is not None
    preparation = replace(recipe.data.prepare, image=recipe.module.adapted.backbone.image)
    return preprocessing_of_set(division.dataset, preparation)


def _level_of_site(client: Client, state: RunState) -> dict[str, Any]:
    """The privacy of the site as a whole, as the record of :mod:`perada.results.cards`.

    Without secure sums the noise is the server's, whose ledger the site does not know: ε is infinite here.
    """
    options = client.recipe.loop.client_privacy
    assert options is not None
    options = replace(options, secure_rng=True)
    if client.level is None:
        return {"options": asdict(options), "noise_multiplier": 0.0, "epsilon": [math.inf]}
    spent = history_epsilon({client.level.cost: state.trained}, options.delta, options.accountant)
    sums = client.recipe.loop.secure_sums
    assert sums is not None
    hidden = {"min_sites": sums.min_sites, "threshold": sums.threshold}
    return {
        "options": asdict(options),
        "noise_multiplier": client.level.level.noise_multiplier,
        "epsilon": [spent],
        "sums": hidden,
    }


def _privacy_of_server(recipe: ServerRecipe, progress: RunProgress) -> dict[str, Any] | None:
    """What the server knows of the run's privacy. The ε of a site that does not tell it counts as infinite."""
    privacy, settings = dict[str, Any](), recipe.settings()
    members = progress.roster
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
        level = recipe.level(len(members))
        assert level is not None
        if progress.level is not None:
            level.load_state_dict(progress.level)
        privacy["client"] = level.record(len(members))
    return privacy or None
