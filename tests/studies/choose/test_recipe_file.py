# SPDX-License-Identifier: Apache-2.0
"""The recipe that a search hands over."""

import pytest
import yaml

from perada.cli.runs import build_compared
from perada.studies.choose.recipe_file import format_recipe, recipe_words
from tests import recipes

COMMENTS = {"training.lr_local": "a reason", "federated.algorithm.prox_strength": "a pull", "data": "the images"}


@pytest.fixture(scope="module")
def configured(tmp_path_factory):
    """A configured run whose options differ from the defaults in several sections."""
    path = tmp_path_factory.mktemp("recipe") / "tiny.yaml"
    path.write_text(yaml.safe_dump(recipes.recipe(data={"public_fraction": 0.2}, distillation={"steps": 3})))
    args = ["--config", str(path), "--trainer.logger=false", "--federated.algorithm=null"]
    args += ["--federated.algorithm=Ditto", "--federated.algorithm.prox_strength=0.3", "--training.lr_local=0.07"]
    args += ["--model.adapter=residual", '--model.adapter_options={"last_blocks": 2}', "--seed_everything=4"]
    return build_compared(recipe_words(args, "both", 1))


@pytest.fixture(scope="module")
def text(configured):
    """The recipe that is written for the run."""
    return format_recipe(configured, ["the top", "two lines"], COMMENTS)


def test_a_written_recipe_configures_the_same_run(tmp_path, configured, text):
    path = tmp_path / "written.yaml"
    path.write_text(text)
    original = configured.config.clone()
    read = build_compared(["--config", str(path)]).config.clone()
    for config in (original, read):
        config.pop("config")
    assert read.as_dict() == original.as_dict()


def test_comments_are_above_the_recipe_and_above_the_options_that_they_are_about(text):
    lines = text.splitlines()
    assert lines[:2] == ["# the top", "# two lines"]
    for option, comment in (("lr_local: 0.07", "a reason"), ("prox_strength: 0.3", "a pull"), ("data:", "the images")):
        (index,) = [index for index, line in enumerate(lines) if line.strip() == option]
        assert lines[index - 1].strip() == f"# {comment}"


def test_a_recipe_has_the_options_that_readers_look_for_and_no_other_defaults(text):
    lines = text.splitlines()
    assert "seed_everything: 0" in lines
    assert "  adapter: residual" in lines
    assert "in_memory" not in text
    assert "trust_region" not in text
