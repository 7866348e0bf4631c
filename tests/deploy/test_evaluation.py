# SPDX-License-Identifier: Apache-2.0
"""`perada deploy evaluate` among sites on this machine: the same scores as a simulation, and what leaves a site."""

import hashlib
import json
import logging
import math
import shutil

import numpy as np
import pytest
import timm
import torch
import yaml
from PIL import Image

import perada
from perada.cli.deployed_jobs import job_recipe_digest
from perada.cli.main import main
from perada.data import FederatedDataModule, Images
from perada.data.partitions import ByDomain
from perada.deploy.protocol import RejectionError
from perada.deploy.site.evaluation import SiteEvaluation
from perada.deploy.state import IMAGES_LEDGER, SITE_LEDGER, SiteStore
from perada.evaluation.recipe import model_digest
from perada.privacy.accounting import history_epsilon
from tests.rejections import raises_naming

SITES = ("east", "north", "south", "west")
CLASSES = ["benign", "malignant"]


def write_images(folder, seed):
    """Patients with two images each, more at each further site; the last has few malignant ones."""
    random = np.random.default_rng(seed)
    for split, patients in (("train", 6), ("test", 12 + 4 * seed)):
        for patient in range(patients):
            label = int(patient < 4) if seed == 3 and split == "test" else patient % 2
            target = folder / split / CLASSES[label]
            target.mkdir(parents=True, exist_ok=True)
            for number in range(2):
                pixels = random.integers(0, 160 + 60 * label, (32, 32)).astype(np.uint8)
                Image.fromarray(pixels).save(target / f"{split}{patient}of{seed}_{number}.png")


def simulated_data(folder):
    images = Images(folder / "all", layout="{client}/{split}/{class}/{group}_*", size=32, gray=True, classes=CLASSES)
    return FederatedDataModule(dataset=images, partition=ByDomain("client"), image_size=32)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with the images of all sites, a run of a simulation, and the weights of a vendor."""
    folder = tmp_path_factory.mktemp("sites")
    for seed, name in enumerate(SITES):
        write_images(folder / "all" / name, seed)
    run = perada.finetune(
        "test_resnet",
        simulated_data(folder),
        pretrained="perada:fashion_test_resnet",
        adapter="head",
        algorithm="ditto",
        rounds=1,
        local_epochs=2,
        logger=False,
        enable_progress_bar=False,
    )
    run.save(folder / "ours")
    torch.manual_seed(0)
    torch.save(timm.create_model("test_resnet", num_classes=2).state_dict(), folder / "vendor.pt")
    return folder


class Federation:
    """Files of sites that have approved an evaluation."""

    def __init__(self, trained, folder, name="first", **of_sites):
        self.folder = folder
        self.trained = trained
        for path in ("ours", "vendor.pt"):
            (folder / path).symlink_to(trained / path)
        self.content = {
            "evaluate": {
                "name": name,
                "models": {
                    "own": {"path": "ours", "sha256": model_digest(trained / "ours")},
                    "common": {"path": "ours", "sha256": model_digest(trained / "ours"), "prediction": "global"},
                    "vendor": {"path": "vendor.pt", "sha256": model_digest(trained / "vendor.pt")},
                },
            },
            "model": {"backbone": "test_resnet"},
            "data": {
                "dataset": {"class_path": "Images", "init_args": {"size": 32, "gray": True, "classes": CLASSES}},
                "image_size": 32,
            },
        }
        self.recipe = folder / "evaluation.yaml"
        self.files = []
        keys = []
        for site in SITES:
            main(["deploy", "keys", "identity", str(folder / "keys"), "--name", site])
            keys.append((folder / "keys" / f"{site}.id.pub").read_text())
        (folder / "keys" / "sites.txt").write_text("".join(keys))
        for site in SITES:
            (folder / site).mkdir()
            content = {
                "name": site,
                "data": {"root": str(trained / "all" / site), "layout": "{split}/{class}/{group}_*"},
                "recipes": [],
                "accelerator": "cpu",
                "secure_sums": {"identity": f"../keys/{site}.id", "sites": "../keys/sites.txt"},
            }
            self.files.append(folder / site / "site.yaml")
            self.files[-1].write_text(yaml.safe_dump(content | of_sites.get(site, {})))
        self.write_recipe()

    def write_recipe(self):
        """Write the recipe, and have all sites approve it."""
        self.recipe.write_text(yaml.safe_dump(self.content, sort_keys=False))
        text = self.recipe.read_bytes()
        approved = {"sha256": hashlib.sha256(text).hexdigest(), "digest": job_recipe_digest(str(self.recipe))}
        for file in self.files:
            content = yaml.safe_load(file.read_text())
            content["recipes"] = [{"recipe": "../evaluation.yaml"} | approved]
            file.write_text(yaml.safe_dump(content))

    def evaluate(self, *options):
        output = self.folder / "evaluations"
        words = ["--local", *map(str, self.files), "--folder", str(output), *(options or ("--min-sites", "4"))]
        main(["deploy", "evaluate", str(self.recipe), *words])
        (record,) = output.glob("*/evaluation.json")
        return json.loads(record.read_text())


def rows_of(record, client):
    """The rows of a client by what they are about."""
    rows = {}
    for row in record["rows"]:
        if row["client"] == client:
            rows[row["model"], row["versus"], row["score"], row["class_name"]] = row
    return rows


def test_pooled_scores_are_those_of_a_simulation_to_the_bit(trained, tmp_path, caplog, capsys):
    record = Federation(trained, tmp_path).evaluate()
    run = perada.Run.load(trained / "ours")
    models = {"own": run, "common": (run, "global"), "vendor": trained / "vendor.pt"}
    simulated = perada.evaluate(models, simulated_data(trained), backbone="test_resnet")
    expected = rows_of(simulated.record(), "pooled")
    assert rows_of(record, "pooled") == expected
    assert len(expected) > 20
    own = expected["own", None, "accuracy", None]
    assert own["images"] == 2 * (12 + 16 + 20 + 24) and own["support"] == own["images"] / 2
    # No site sends its own row, but each site's log has it beside those of the others.
    assert {row["client"] for row in record["rows"]} == {"pooled"}
    for site in SITES:
        value = simulated.find(site, "own", "accuracy").value
        assert f"evaluation: {site}: own: accuracy {value:.3f} [" in caplog.text
    assert "at the 3 others" in caplog.text


def test_only_a_site_that_allows_scores_sends_its_own_row(trained, tmp_path, capsys):
    federation = Federation(trained, tmp_path, west={"may_send": ["scores"]})
    record = federation.evaluate()
    assert {row["client"] for row in record["rows"]} == {"west", "pooled"}
    run = perada.Run.load(trained / "ours")
    simulated = perada.evaluate({"own": run, "common": (run, "global")}, simulated_data(trained))
    row = rows_of(record, "west")["own", None, "accuracy", None]
    expected = simulated.find("west", "own", "accuracy")
    assert (row["value"], row["low"], row["high"]) == pytest.approx(
        (expected.value, expected.low, expected.high), abs=1e-6
    )
    # The numbers of images are not sent, apart from whether they suffice: only four patients are malignant.
    assert row["images"] == 0 and row["support"] == 10 and not row["too_few"]
    auroc = rows_of(record, "west")["own", None, "auroc", None]
    assert auroc["too_few"] and auroc["support"] == 0
    assert auroc["value"] == pytest.approx(simulated.find("west", "own", "auroc").value, abs=0.02)
    shown = capsys.readouterr().out
    assert "| west   |      – |" in shown
    assert "too few" in shown and "Sites in the sum: east, north, south, west" in shown


def test_the_audit_log_names_the_evaluation_and_its_size(trained, tmp_path, capsys):
    federation = Federation(trained, tmp_path)
    federation.evaluate()
    capsys.readouterr()
    main(["deploy", "audit", str(tmp_path / "north" / "state")])
    shown = capsys.readouterr().out
    assert "count (evaluation)" in shown and "mask (evaluation)" in shown
    store = SiteStore(tmp_path / "north" / "state")
    (job,) = store.totals.jobs.values()
    assert job.kind == "evaluation" and job.is_masked and not job.is_open
    store.close()


def test_an_approved_evaluation_is_answered_once(trained, tmp_path, capsys):
    federation = Federation(trained, tmp_path, **{site: {"limits": {"max_evaluations": 1}} for site in SITES})
    federation.evaluate()
    with raises_naming(TimeoutError, "exhausted"):
        federation.evaluate("--min-sites", "4", "--deadline", "0.5")
    federation.content["evaluate"]["name"] = "again"
    federation.write_recipe()
    with raises_naming(TimeoutError, "exhausted"):
        federation.evaluate("--min-sites", "4", "--deadline", "0.5")


def test_the_ledger_of_training_images_is_not_spent_by_scores_of_test_images(trained, tmp_path):
    limits = {site: {"limits": {"max_epsilon": 3}} for site in SITES}
    Federation(trained, tmp_path, **limits).evaluate()
    store = SiteStore(tmp_path / "north" / "state")
    assert not store.totals.ledger.history(IMAGES_LEDGER)
    assert math.isinf(history_epsilon(store.totals.ledger.history(SITE_LEDGER), 1e-5, "rdp"))
    store.close()


@pytest.mark.parametrize(("num_patients", "rejected"), [(0, False), (1, True), (5, False)])
def test_two_evaluations_do_not_differ_by_few_patients(trained, tmp_path, num_patients, rejected):
    root = tmp_path / "images"
    shutil.copytree(trained / "all" / "north", root)
    data = {"root": str(root), "layout": "{split}/{class}/{group}_*"}
    federation = Federation(trained, tmp_path, north={"data": data})
    federation.evaluate()
    for patient in range(num_patients):
        for image in (root / "test").rglob(f"test{patient}of1_*.png"):
            image.unlink()
    federation.content["evaluate"]["name"] = "again"
    federation.write_recipe()
    shutil.rmtree(tmp_path / "evaluations")
    words = ["--min-sites", "3", "--deadline", "20"]
    record = federation.evaluate(*words)
    assert any("north (exhausted)" in note for note in record["notes"]) == rejected


def test_a_site_that_is_protected_as_a_whole_is_not_evaluated(trained, tmp_path):
    limits = {site: {"limits": {"max_site_epsilon": 3}} for site in SITES}
    federation = Federation(trained, tmp_path, **limits)
    with raises_naming(TimeoutError, "exhausted"):
        federation.evaluate("--min-sites", "4", "--deadline", "0.5")


def test_another_model_than_approved_is_not_evaluated(trained, tmp_path):
    federation = Federation(trained, tmp_path)
    (tmp_path / "vendor.pt").unlink()
    torch.manual_seed(1)
    torch.save(timm.create_model("test_resnet", num_classes=2).state_dict(), tmp_path / "vendor.pt")
    with raises_naming(ValueError, "vendor", model_digest(trained / "vendor.pt")):
        federation.evaluate()
    (tmp_path / "vendor.pt").unlink()
    with raises_naming(FileNotFoundError, "vendor.pt"):
        federation.evaluate()


def test_each_site_may_have_its_own_model(trained, tmp_path, capsys):
    federation = Federation(trained, tmp_path)
    run = perada.Run.load(trained / "ours")
    run.export(tmp_path / "exported")
    federation.content["evaluate"]["models"] = {"mine": {"path": "exported", "own": True}}
    federation.write_recipe()
    record = federation.evaluate()
    simulated = perada.evaluate({"mine": run}, simulated_data(trained))
    row = rows_of(record, "pooled")["mine", None, "accuracy", None]
    assert row["value"] == simulated.find("pooled", "mine", "accuracy").value


def test_what_an_evaluation_would_send_is_shown_before_it_is_approved(trained, tmp_path, capsys):
    federation = Federation(trained, tmp_path, east={"may_send": ["scores"]})
    content = yaml.safe_load(federation.files[0].read_text())
    del content["recipes"][0]["sha256"], content["recipes"][0]["digest"]
    federation.files[0].write_text(yaml.safe_dump(content))
    capsys.readouterr()
    main(["deploy", "check", str(federation.files[0])])
    shown = capsys.readouterr().out
    assert "not approved" in shown and job_recipe_digest(str(federation.recipe)) in shown
    assert "at least 3 sites" in shown and "max_evaluations" in shown and "the server also sees" in shown
    assert "| east" in shown and "accuracy (interval of 95 %)" in shown
    assert not (tmp_path / "east" / "state").exists()


def test_the_app_of_an_evaluation_is_written_like_that_of_a_recipe(trained, tmp_path, capsys):
    federation = Federation(trained, tmp_path)
    main(["deploy", "init", str(federation.recipe), str(tmp_path / "app")])
    assert job_recipe_digest(str(federation.recipe)) in capsys.readouterr().out
    assert yaml.safe_load((tmp_path / "app" / "site" / "site.yaml").read_text())["secure_sums"]


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"models": {}}, ["models"]),
        ({"models": {"a": {"path": "/etc/passwd"}}}, ["a", "path", "/etc/passwd"]),
        ({"models": {"a": {"path": "../vendor.pt"}}}, ["a", "path", "../vendor.pt"]),
        ({"models": {"a": {"path": "x", "sha256": "12"}}}, ["a", "sha256", "12"]),
        ({"models": {"a": {"path": "x", "sha256": 64 * "0", "own": True}}}, ["a", "sha256", "own"]),
        ({"models": {"a": {"path": "x", "prediction": "best"}}}, ["a", "prediction", "best"]),
        ({"model": {"a": {"path": "x"}}}, ["model"]),
    ],
)
def test_mistakes_in_a_recipe(tmp_path, change, facts):
    recipe = tmp_path / "evaluation.yaml"
    recipe.write_text(yaml.safe_dump({"evaluate": change, "data": {"dataset": "Digits"}}))
    with raises_naming(ValueError, recipe, *facts):
        job_recipe_digest(str(recipe))


def test_a_model_without_a_digest_is_rejected_with_it(trained, tmp_path):
    federation = Federation(trained, tmp_path)
    del federation.content["evaluate"]["models"]["vendor"]["sha256"]
    federation.write_recipe()
    with raises_naming(ValueError, "vendor", "sha256", model_digest(trained / "vendor.pt")):
        main(["deploy", "check", str(federation.files[0])])


def test_code_of_a_recipe_that_is_not_approved_is_not_run(trained, tmp_path, monkeypatch):
    federation = Federation(trained, tmp_path)
    (tmp_path / "their_task.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')\nclass TheirTask: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    federation.content["data"]["task"] = {"class_path": "their_task.TheirTask"}
    federation.recipe.write_text(yaml.safe_dump(federation.content))
    content = yaml.safe_load(federation.files[0].read_text())
    content["recipes"] = [{"recipe": "../evaluation.yaml"}]
    federation.files[0].write_text(yaml.safe_dump(content))
    with raises_naming(ValueError, "their_task.TheirTask", "not approved"):
        main(["deploy", "check", str(federation.files[0])])
    assert not (tmp_path / "was_run").exists()


def test_a_recipe_of_another_kind_is_no_evaluation(trained, tmp_path):
    federation = Federation(trained, tmp_path)
    with raises_naming(ValueError, "'digits'", "evaluate"):
        main(["deploy", "evaluate", "digits", "--local", str(federation.files[0])])
    with raises_naming(ValueError, federation.recipe, "survey"):
        main(["deploy", "survey", str(federation.recipe), "--local", str(federation.files[0])])


def test_a_sum_that_a_site_has_spoiled_is_rejected(trained, tmp_path, monkeypatch):
    federation = Federation(trained, tmp_path)
    make_vector = SiteEvaluation.make_vector

    def spoiled(self):
        vector = make_vector(self)
        return [-1000, *vector[1:]]

    monkeypatch.setattr(SiteEvaluation, "make_vector", spoiled)
    with raises_naming(RejectionError, "spoiled", "groups"):
        federation.evaluate()


def test_no_name_of_a_patient_leaves_or_is_written(trained, tmp_path, capsys, caplog):
    caplog.set_level(logging.INFO)
    federation = Federation(trained, tmp_path)
    federation.evaluate()
    assert "test11of1" not in caplog.text + capsys.readouterr().out
    for path in tmp_path.rglob("*"):
        if path.is_file() and not path.is_symlink():
            assert b"test11of1" not in path.read_bytes(), path
