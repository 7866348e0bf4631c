# SPDX-License-Identifier: Apache-2.0
"""Which of a site's images are test images: as in a simulation, and as before when others come or go."""

from hashlib import sha256

import numpy as np
import pytest
import yaml
from PIL import Image
from torch.utils.data import Subset

from perada.cli.deploy import make_worker
from perada.cli.deployed_recipes import site_recipe
from perada.cli.main import main
from perada.data import ByDomain, FederatedDataModule, Images
from perada.data.partitions.division import hold_out
from perada.deploy.site.file import read_site

from .test_classes import naming

LABELS = ("benign", "malignant", "normal")


def draw(root, numbers, layout="{label}/{number}.png"):
    """Images that all differ, with three classes in turn."""
    for number in numbers:
        path = root / layout.format(label=LABELS[number % 3], number=number, patient=number // 2)
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)


def site(folder, root, layout="{class}/*", **options):
    """A site's file, for a recipe whose image set has ``options``."""
    folder.mkdir(exist_ok=True)
    recipe = naming()
    recipe["data"]["dataset"]["init_args"] |= options.pop("set", {})
    recipe["data"] |= options.pop("data", {})
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    entry = {"recipe": "recipe.yaml"}
    content = {"name": "a", "recipes": [entry], "data": {"root": str(root), "layout": layout} | options}
    path = folder / "site.yaml"
    path.write_text(yaml.safe_dump(content))
    entry |= {"digest": build_recipe(path).digest, "sha256": sha256((folder / "recipe.yaml").read_bytes()).hexdigest()}
    path.write_text(yaml.safe_dump(content))
    return path


def build_recipe(path):
    site_options = read_site(path)
    recipe = site_recipe(next(iter(site_options.recipes)), site_options)
    recipe.data.setup()
    recipe.build(recipe.data.num_classes, recipe.data.task)
    return recipe


def files(subset):
    return {subset.dataset.manifest.paths[row].rpartition("/")[2] for row in subset.indices}


def served_names(path):
    """Names of the test and training images of a site that starts."""
    worker = make_worker(read_site(path))
    worker.store.close()
    (client,) = worker.clients.values()
    return [files(client.data.data.test[0]), files(client.data.data.train[0])]


def site_messages(caplog):
    return [record.message for record in caplog.records if record.name == "perada.site.a"]


@pytest.mark.parametrize("layout", ["{label}/{number}.png", "{label}/p{patient}_{number}.png"])
@pytest.mark.every(2)
def test_a_site_scores_the_test_images_that_a_simulation_scores(layout, tmp_path):
    """With the share, the seed and the held-out images of the recipe, in folders of clients or in one's own."""
    fields = "{class}/{group}_*" if "patient" in layout else "{class}/*"
    for client in range(3):
        draw(tmp_path / "all" / f"h{client}", range(40 * client, 40 * client + 40), layout)
    options = {"test_share": 0.3, "seed": 4}
    data = {"client_validation": 0.2, "seed": 9}
    images = Images(str(tmp_path / "all"), "{client}/" + fields, **options)
    datamodule = FederatedDataModule(dataset=images, partition=ByDomain("client"), **data)
    record = datamodule.partition_dict()
    train = images.manifest.paths
    test = images.with_split(False).manifest.paths
    for client in range(3):
        path = site(tmp_path / f"site{client}", tmp_path / "all" / f"h{client}", fields, set=options, data=data)
        recipe = build_recipe(path)
        kept = {part: {own[row].rpartition("/")[2] for row in record[part][client]} for part, own in
                (("train", train), ("client_validation", train), ("test", test))}  # fmt: skip
        assert files(recipe.data.data.test[0]) == kept["test"]
        assert files(recipe.data.data.train[0]) == kept["train"] | kept["client_validation"]
        assert recipe.data.train_sizes == (len(kept["train"]),)
        ((own,), _) = hold_out(recipe.data.data.train, recipe.data.client_validation, recipe.data.seed)
        assert files(Subset(own.dataset.dataset, np.array(own.dataset.indices)[own.indices])) == kept["train"]


@pytest.mark.slow
def test_no_image_changes_sides_when_others_come_or_go_and_the_site_is_told(tmp_path, caplog, capsys):
    root = tmp_path / "images"
    draw(root, range(12))
    path = site(tmp_path / "site", root)
    test, train = served_names(path)
    assert len(test | train) == 12 and len(test) > 0
    assert served_names(path) == [test, train] and not site_messages(caplog)
    for number in range(12, 24):
        draw(root, [number])
        now = served_names(path)
        assert test <= now[0] and train <= now[1]
        test, train = now
        (message,) = site_messages(caplog)
        assert (
            f"1 new, 0 missing since the last start; {len(train)} for training and {len(test)} for testing" in message
        )
        caplog.clear()
    gone = sorted(train)[0]
    next(root.rglob(gone)).unlink()
    main(["deploy", "check", str(path)])
    assert "the images have changed: 0 new, 1 missing since the last start" in capsys.readouterr().out
    assert served_names(path) == [test, train - {gone}]


@pytest.mark.parametrize(
    ("seed", "more"), [(0, 2), *(pytest.param(seed, 6, marks=pytest.mark.slow) for seed in (0, 2, 5))]
)
def test_what_a_site_remembers_outweighs_what_a_hash_says(seed, more, tmp_path):
    """A client of two images has one of them to test on, whatever its hash is, and keeps it."""
    root = tmp_path / "images"
    draw(root, range(2))
    path = site(tmp_path / "site", root, seed=seed)
    test, train = served_names(path)
    assert len(test) == len(train) == 1
    for number in range(2, 2 + more):
        draw(root, [number])
        now = served_names(path)
        assert test <= now[0] and train <= now[1]
        test, train = now


def test_a_split_that_cannot_be_read_is_rejected(tmp_path):
    draw(tmp_path / "images", range(6))
    path = site(tmp_path / "site", tmp_path / "images")
    served_names(path)
    file = tmp_path / "site" / "state" / "split.json"
    assert file.stat().st_mode & 0o077 == 0
    file.write_text('{"test_share=0.2, seed=0": 3}')
    with pytest.raises(ValueError, match=r"split\.json' is damaged"):
        served_names(path)
