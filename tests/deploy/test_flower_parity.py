# SPDX-License-Identifier: Apache-2.0
"""A run over Flower, with TLS and authentication, is to the bit the run of the same sites in one process."""

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'perada[flower]'")

from perada.cli import main
from perada.cli.demo import SITES, demo_recipe, run_demo, site_file
from perada.cli.flower import recipe_digest
from perada.deploy import records


@pytest.mark.slow
def test_over_flower_or_in_one_process(tmp_path, monkeypatch, capfd):
    assert run_demo(1, tmp_path / "flower") == 0
    said = capfd.readouterr().out
    assert "is finished:completed" in said
    assert "3 of 3 sites replied" in said
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(demo_recipe(1))
    digest = recipe_digest(str(recipe))
    files = [str(site_file(tmp_path, place, recipe, digest)) for place in range(len(SITES))]
    main(["deploy", "run", str(recipe), "--folder", str(tmp_path / "local"), "--min-sites", "3", "--local", *files])
    (over, states), (here, expected) = (records.read(tmp_path / folder) for folder in ("flower", "local"))
    assert [member.name for member in over.roster] == [member.name for member in here.roster] == list(SITES)
    assert states["global"].keys() == expected["global"].keys()
    assert all(torch.equal(states["global"][key], value) for key, value in expected["global"].items())
    untimed = [{name: value for name, value in row.items() if "seconds" not in name} for row in over.history]
    assert untimed == [{name: value for name, value in row.items() if "seconds" not in name} for row in here.history]
