# SPDX-License-Identifier: Apache-2.0
"""Classes go by their names: a site's folders have the recipe's numbers, or the site is rejected."""

from dataclasses import replace

import numpy as np
import pytest
import yaml
from PIL import Image

from perada.cli.deploy import make_client
from perada.cli.deployed_recipes import server_recipe, site_recipe
from perada.deploy.recipe import labels_digest
from perada.deploy.site.file import read_site
from perada.system.yaml_files import iterate_strings
from perada.tasks import Classification
from tests.rejections import rejects

from .parties import Parties
from .test_hostile_sites import Lying, lie_of
from .test_site_file import RECIPE

CLASSES = ["malignant", "benign", "normal"]
BRIGHT = {"malignant": 40, "benign": 120, "normal": 200}


def write_site(folder, recipe, images):
    """A site's file, with images whose brightness tells their class."""
    for name, bright in images.items():
        (folder / "images" / name).mkdir(parents=True)
        for number in range(6):
            pixels = np.full((32, 32, 3), bright + number, np.uint8)
            Image.fromarray(pixels).save(folder / "images" / name / f"{number}.png")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    data = {"root": "images", "layout": "{class}/*"}
    content = {"name": "a", "recipes": [{"recipe": "recipe.yaml"}], "data": data}
    (folder / "site.yaml").write_text(yaml.safe_dump(content))
    return folder / "recipe.yaml", read_site(folder / "site.yaml")


def naming(**options):
    """A recipe that names its classes."""
    dataset = {"class_path": "Images", "init_args": {"root": "nowhere", "classes": CLASSES}}
    data = {"dataset": dataset, "partition": RECIPE["data"]["partition"], "image_size": 32, "batch_size": 8}
    return RECIPE | {"data": data} | options


def test_a_site_that_misses_a_class_has_the_others_by_their_names(tmp_path):
    path, given = write_site(tmp_path, naming(), {name: BRIGHT[name] for name in ("normal", "benign")})
    data = site_recipe(path, given).data
    data.setup()
    assert (data.num_classes, data.classes) == (3, CLASSES)
    seen = set()
    images = data.checked.train.datasets[0]
    for image, label in (images[row] for row in range(len(images))):
        bright = float(image.float().mean())
        name = min(BRIGHT, key=lambda one: abs(BRIGHT[one] - bright))
        assert int(label) == CLASSES.index(name)
        seen.add(name)
    assert seen == {"normal", "benign"}


def test_a_site_with_another_class_is_rejected_by_name(tmp_path):
    path, given = write_site(tmp_path, naming(), {"normal": 200, "melanoma": 40})
    with pytest.raises(ValueError, match=r"melanoma, .*malignant, benign, normal"):
        site_recipe(path, given)


def test_a_recipe_on_a_set_whose_classes_are_known_names_them(tmp_path):
    path, given = write_site(tmp_path, RECIPE, {"3": 40, "1": 120})
    data = site_recipe(path, given).data
    data.setup()
    assert data.classes == list("0123456789")
    assert server_recipe(str(path)).classes == tuple("0123456789")


def test_the_server_counts_the_classes_that_a_recipe_names(tmp_path):
    path, _ = write_site(tmp_path, naming(), {"normal": 200})
    given = server_recipe(str(path))  # the folder of its images is not there
    assert (given.num_classes, given.classes) == (3, tuple(CLASSES))
    client = make_client(path, read_site(tmp_path / "site.yaml"))
    assert client.labels == labels_digest(3, Classification(), CLASSES)


def test_who_joins_first_with_other_classes_does_not_keep_the_rest_out(tiny, tmp_path):
    parties = Parties(tiny, tmp_path, rounds=1)
    parties.whole = replace(parties.whole, classes=CLASSES)
    transport = Lying(parties.workers(), lie_of("site0", "join", labels="0" * 64))
    coordinator = parties.coordinator(transport, classes=CLASSES, min_sites=2, deadline=5.0)
    assert coordinator.run().records[0].answered == ["site1", "site2"]


@pytest.mark.parametrize("option", ["federated", "federated.algorithm", "distillation", "model"])
def test_a_recipe_that_leaves_options_to_a_file_is_rejected(option, tmp_path):
    """The digest that a site approves would not cover them, such as the noise of a private recipe."""
    (tmp_path / "options").write_text("local_steps: 1\n")
    recipe = naming()
    section, *rest = option.split(".")
    name = str(tmp_path / "options")
    recipe[section] = name if not rest else recipe[section] | {rest[0]: name}
    path, given = write_site(tmp_path, recipe, {"normal": 200})
    for read in (lambda: site_recipe(path, given), lambda: server_recipe(str(path))):
        with pytest.raises(ValueError, match=rf"file .*{option}.*digest"):
            read()


def test_a_recipe_of_aliases_is_read_in_no_time(tmp_path):
    """Nine of the nine before, nine times over: 9⁹ words; and a list that holds itself."""
    lists = [
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" if n else f"a0: &a0 [{', '.join('x' * 9)}]" for n in range(9)
    ]
    assert len(list(iterate_strings(yaml.safe_load("\n".join(lists))))) == 9
    assert list(iterate_strings(yaml.safe_load("a: &a [b, *a]"))) == [("a", "b")]


def test_a_client_that_the_partition_does_not_have_is_rejected(tmp_path):
    path, _ = write_site(tmp_path, RECIPE, {"1": 40})
    data = {key: RECIPE["data"][key] for key in ("dataset", "partition", "train_limit", "test_limit")} | {"client": 2}
    content = {"name": "a", "recipes": [{"recipe": "recipe.yaml"}], "data": data}
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(content))
    with rejects("data: client", 2):
        site_recipe(path, read_site(tmp_path / "site.yaml"))


NOISE = {"noise_multiplier": 1.0}


@pytest.mark.parametrize("section", [None, "privacy", "client_privacy"])
def test_a_site_of_a_private_recipe_has_the_public_set_to_compare(tmp_path, section):
    private = {section: NOISE} if section else {}
    recipe = naming() | private
    recipe["data"] = recipe["data"] | {"public": {"class_path": "Photographs", "init_args": {"count": 3, "size": 16}}}
    path, given = write_site(tmp_path, recipe, {"normal": 200})
    assert (site_recipe(path, given).public is None) == (section is None)


@pytest.mark.every(3)
@pytest.mark.parametrize("section", ["privacy", "client_privacy"])
@pytest.mark.parametrize(
    ("options", "message", "kind"),
    [
        (
            {"public": {"class_path": "ImageFolder", "init_args": {"root": "gone"}}},
            "public set is missing at this site",
            OSError,
        ),
        ({"public_fraction": 0.1}, r"public_fraction=0\.1", ValueError),
        ({"validation_fraction": 0.1}, r"privacy: validation_fraction=0\.1 would hand a share", ValueError),
    ],
)
def test_a_site_of_a_private_recipe_rejects_what_it_cannot_compare(tmp_path, section, options, message, kind):
    recipe = naming() | {section: NOISE}
    recipe["data"] = recipe["data"] | options
    path, given = write_site(tmp_path, recipe, {"normal": 200})
    with pytest.raises(kind, match=message):
        site_recipe(path, given)
