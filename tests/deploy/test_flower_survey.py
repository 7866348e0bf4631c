# SPDX-License-Identifier: Apache-2.0
"""A survey over Flower, with real processes, has the counts of the same sites in one process."""

import json
import tempfile
from pathlib import Path

import pytest
import yaml

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'perada[flower]'")

from perada.cli.flower import recipe_digest
from perada.cli.main import main
from perada.deploy.flower.app import write_app
from perada.studies.deployment import ENVIRONMENT, SITES, Demo, demo_recipe, site_file, write_sites

pytestmark = pytest.mark.slow


def write_survey_recipe(path):
    """Write a survey of the images in the recipe of the demonstration, and return its digest."""
    data = yaml.safe_load(demo_recipe(1))["data"]
    content = {"survey": {"classes": [str(digit) for digit in range(10)]}, "data": data}
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return recipe_digest(str(path))


class Surveyed(Demo):
    """The three sites of the demonstration, which have approved a survey."""

    def begin(self):
        """Write recipe, app and keys, and start the SuperLink and the sites."""
        self.recipe = self.folder / "survey.yaml"
        self.app = self.folder / "federation" / "app"
        self.digest = write_survey_recipe(self.recipe)
        write_app(self.app.parent, "survey", self.recipe.read_text(encoding="utf-8"), self.digest, "localhost")
        self.write_keys()
        write_sites(self.folder / "keys")
        self.start_link()
        for site in SITES:
            self.work(site)
            self.register(site)
            self.start_node(site)
        for site in SITES:
            self.wait_for(self.socket(site).exists, f"worker-{site}", "the worker's socket")


def test_a_survey_over_flower_has_the_counts_of_one_process(tmp_path, capfd):
    with tempfile.TemporaryDirectory(prefix="ps") as folder, Surveyed(Path(folder), SITES, ENVIRONMENT) as running:
        running.begin()
        link = ["--link", f"127.0.0.1:{running.port}", "--root-certificates", f"{folder}/keys/ca.crt"]
        with pytest.raises(SystemExit) as ended:
            main(["deploy", "survey", str(running.app), *link, "--deadline", "300"])
        assert ended.value.code == 0
        (record,) = Path(folder).rglob("survey-*.json")
        over_flower = json.loads(record.read_text())
        for site in SITES:
            log = running.log(f"worker-{site}").read_text()
            assert f"survey: {site}: " in log
        assert "What does not fit" in capfd.readouterr().out
    # These sites have other state folders, so the same recipe is answered again.
    recipe = tmp_path / "survey.yaml"
    digest = write_survey_recipe(recipe)
    write_sites(tmp_path / "keys")
    files = [str(site_file(tmp_path, place, recipe, digest)) for place in range(len(SITES))]
    main(["deploy", "survey", str(recipe), "--local", *files, "--folder", str(tmp_path / "local")])
    (record,) = (tmp_path / "local").glob("survey-*.json")
    assert json.loads(record.read_text()) == over_flower
