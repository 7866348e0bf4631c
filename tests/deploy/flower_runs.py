# SPDX-License-Identifier: Apache-2.0
"""Runs of the demonstration's sites in one process, which runs over Flower are compared with."""

import torch

from perada.cli import main
from perada.cli.flower import recipe_digest
from perada.deploy.server.progress import read_saved_run
from perada.studies.deployment import SITES, site_file


def run_in_one_process(folder, recipe_text):
    """Return what the server has saved after a run of a recipe by the demonstration's sites."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(recipe_text)
    digest = recipe_digest(str(recipe))
    files = [str(site_file(folder, place, recipe, digest)) for place in range(len(SITES))]
    main(["deploy", "run", str(recipe), "--folder", str(folder / "local"), "--min-sites", "3", "--local", *files])
    return read_saved_run(folder / "local")


def assert_same_bits(actual, expected):
    """Assert that two states have the same tensors."""
    assert actual.keys() == expected.keys() != set()
    assert all(torch.equal(actual[key], value) for key, value in expected.items())
