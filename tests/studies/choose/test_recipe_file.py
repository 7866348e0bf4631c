# SPDX-License-Identifier: Apache-2.0
"""The recipe that a search hands over."""

import yaml

from perada.cli.runs import build_compared
from perada.studies.choose.recipe_file import format_recipe, recipe_words
from tests import recipes


def test_a_written_recipe_configures_the_same_run(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(recipes.recipe(data={"public_fraction": 0.2}, distillation={"steps": 3})))
    args = ["--config", str(path), "--trainer.logger=false", "--federated.algorithm=null"]
    args += ["--federated.algorithm=Ditto", "--federated.algorithm.prox_strength=0.3", "--training.lr_local=0.07"]
    args += ["--model.adapter=residual", '--model.adapter_options={"last_blocks": 2}', "--seed_everything=4"]
    words = recipe_words(args, "both", 1)
    cli = build_compared(words)
    comments = {"training.lr_local": "a reason", "federated.algorithm.prox_strength": "a pull", "data": "the images"}
    text = format_recipe(cli, ["the top", "two lines"], comments)
    written = tmp_path / "written.yaml"
    written.write_text(text)

    again = build_compared(["--config", str(written)])
    former = cli.config.clone()
    read = again.config.clone()
    for config in (former, read):
        config.pop("config")
    assert read.as_dict() == former.as_dict()

    lines = text.splitlines()
    assert lines[:2] == ["# the top", "# two lines"]
    for option, comment in (("lr_local: 0.07", "a reason"), ("prox_strength: 0.3", "a pull"), ("data:", "the images")):
        (place,) = [number for number, line in enumerate(lines) if line.strip() == option]
        assert lines[place - 1].strip() == f"# {comment}"
    # What a reader looks for, also where it is the default; but not every default.
    assert "seed_everything: 0" in lines
    assert "  adapter: residual" in lines
    assert "in_memory" not in text
    assert "trust_region" not in text
