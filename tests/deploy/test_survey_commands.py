# SPDX-License-Identifier: Apache-2.0
"""`perada deploy survey` among sites on this machine, and `perada data survey` of the same images."""

import hashlib
import json
import logging

import numpy as np
import pytest
import yaml
from PIL import Image

from perada.cli.deployed_jobs import job_recipe_digest
from perada.cli.main import main
from perada.deploy.state import SiteStore
from tests.data.dicom_files import write as write_dicom
from tests.rejections import raises_naming

SITES = ("north", "east", "south", "west")
PATIENT = "Mustermann47110815"
RECIPE = {
    "survey": {"classes": ["benign", "malignant"]},
    "data": {"dataset": {"class_path": "Images", "init_args": {"size": 32}}},
}


def write_images(folder, seed):
    """Eight PNG files of each class, and five DICOM files of a patient."""
    rng = np.random.default_rng(seed)
    for label, name in enumerate(RECIPE["survey"]["classes"]):
        (folder / name).mkdir(parents=True)
        for number in range(8):
            pixels = rng.integers(0, 100 + 60 * label, (40, 40)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{PATIENT}{number}_0.png")
    for number in range(5):
        pixels = rng.integers(0, 4000, (40, 40)).astype(np.uint16)
        header = {"PatientID": PATIENT, "PatientName": PATIENT, "StudyInstanceUID": f"1.2.3.{1 + number}47110815"}
        write_dicom(folder / "benign" / f"scan_{number}.dcm", pixels, BitsStored=12, **header)


class Federation:
    """Files of sites that have approved a survey."""

    def __init__(self, folder, recipe=RECIPE, **of_sites):
        self.folder = folder
        self.recipe = folder / "survey.yaml"
        self.recipe.write_text(yaml.safe_dump(recipe))
        self.files = []
        keys = []
        for name in SITES:
            main(["deploy", "keys", "identity", str(folder / "keys"), "--name", name])
            keys.append((folder / "keys" / f"{name}.id.pub").read_text())
        (folder / "keys" / "sites.txt").write_text("".join(keys))
        for seed, name in enumerate(SITES):
            (folder / name).mkdir()
            write_images(folder / name / "images", seed)
            content = {
                "name": name,
                "data": {"root": "images", "layout": "{class}/*"},
                "recipes": [],
                "secure_sums": {"identity": f"../keys/{name}.id", "sites": "../keys/sites.txt"},
            }
            self.files.append(folder / name / "site.yaml")
            self.files[-1].write_text(yaml.safe_dump(content | of_sites.get(name, {})))
        self.approve()

    def approve(self):
        """Have all sites approve the recipe as it is."""
        text = self.recipe.read_bytes()
        digest = job_recipe_digest(str(self.recipe))
        for file in self.files:
            content = yaml.safe_load(file.read_text())
            approved = {"sha256": hashlib.sha256(text).hexdigest(), "digest": digest}
            content["recipes"] = [{"recipe": "../survey.yaml"} | approved]
            file.write_text(yaml.safe_dump(content))

    def survey(self, *options):
        output = self.folder / "surveys"
        words = ["--local", *map(str, self.files), "--folder", str(output), "--min-sites", "4", *options]
        main(["deploy", "survey", str(self.recipe), *words])
        (record,) = output.glob("*.json")
        return json.loads(record.read_text())


def test_a_survey_among_four_sites(tmp_path, capsys, caplog):
    federation = Federation(tmp_path, south={"may_send": ["survey"]})
    record = federation.survey()
    assert record["sites"] == sorted(SITES)
    assert record["together"]["labels"] == {
        "benign": {"count": 4 * 13, "few": 0, "many": 4},
        "malignant": {"count": 4 * 8, "few": 0, "many": 4},
    }
    assert record["together"]["bits"]["12"] == {"count": 20, "few": 0, "many": 4}
    assert list(record["rows"]) == ["south"] and record["rows"]["south"]["images"]["read"]["count"] == 21
    shown = capsys.readouterr().out
    assert "Nothing, as far as counts show it" in shown and "survey-" in shown
    for name in SITES:
        assert f"survey: {name}: the images fit to those of the 3 other sites" in caplog.text


def test_identifiers_of_patients_are_in_no_file_and_no_line(tmp_path, capsys, caplog):
    federation = Federation(tmp_path)
    caplog.set_level(logging.INFO)
    main(["deploy", "check", str(federation.files[0])])
    federation.survey()
    shown = capsys.readouterr()
    assert PATIENT not in caplog.text + shown.out + shown.err and "47110815" not in shown.out
    written = [path for path in tmp_path.rglob("*") if path.is_file() and "images" not in path.parts]
    assert len(written) > 10
    for path in written:
        assert b"47110815" not in path.read_bytes(), path


def test_a_site_whose_greys_are_inverted_is_told_so_by_its_own_log_only(tmp_path, capsys, caplog):
    federation = Federation(tmp_path)
    for file in (tmp_path / "east" / "images").rglob("*.png"):
        Image.fromarray(255 - np.asarray(Image.open(file))).save(file)
    record = federation.survey()
    assert "survey: east: greys seem to be inverted" in caplog.text
    assert caplog.text.count("inverted") == 1
    assert list(record["findings"]) == ["together"]
    assert "east" not in json.dumps(record["findings"])


def test_an_approved_recipe_is_answered_once(tmp_path, capsys):
    federation = Federation(tmp_path)
    federation.survey()
    with raises_naming(TimeoutError, "exhausted"):
        federation.survey("--deadline", "0.5")
    federation.recipe.write_text(yaml.safe_dump(RECIPE | {"survey": RECIPE["survey"] | {"name": "again"}}))
    federation.approve()
    for record in (tmp_path / "surveys").iterdir():
        record.unlink()
    assert federation.survey()["sites"] == sorted(SITES)
    store = SiteStore(tmp_path / "north" / "state")
    assert [job.is_masked for job in store.totals.jobs.values()] == [True, True]
    store.close()
    capsys.readouterr()
    main(["deploy", "status", str(federation.files[0])])
    assert "2 of at most 3 (limits: max_surveys)" in capsys.readouterr().out


def approve_another_survey(federation, name):
    """Have all sites approve the survey under another name, and forget its former results."""
    federation.recipe.write_text(yaml.safe_dump(RECIPE | {"survey": RECIPE["survey"] | {"name": name}}))
    federation.approve()
    for record in (federation.folder / "surveys").iterdir():
        record.unlink()


def test_two_surveys_never_differ_by_one_patient(tmp_path, capsys, caplog):
    federation = Federation(tmp_path)
    assert federation.survey()["together"]["labels"]["malignant"]["count"] == 32
    folder = tmp_path / "east" / "images" / "malignant"
    for number in range(1, 5):
        pixels = np.random.default_rng(number).integers(0, 255, (40, 40))
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"new{number}.png")
        approve_another_survey(federation, f"after {number}")
        with raises_naming(TimeoutError, "exhausted"):
            federation.survey("--deadline", "0.5")
        assert f"{number} patients were added" in caplog.text
    Image.fromarray(np.arange(1600, dtype=np.uint8).reshape(40, 40)).save(folder / "new5.png")
    approve_another_survey(federation, "after 5")
    assert federation.survey()["together"]["labels"]["malignant"]["count"] == 37


def test_a_changed_recipe_is_not_approved(tmp_path, capsys):
    federation = Federation(tmp_path)
    federation.recipe.write_text(yaml.safe_dump(RECIPE | {"survey": RECIPE["survey"] | {"min_count": 1}}))
    with raises_naming(ValueError, "SHA-256"):
        federation.survey()


def test_a_survey_with_noise_needs_a_budget_and_is_counted(tmp_path, capsys):
    recipe = RECIPE | {"survey": RECIPE["survey"] | {"noise_multiplier": 0.05, "images_per_patient": 1}}
    limits = {"limits": {"max_epsilon": 10000}}
    federation = Federation(tmp_path, recipe, **dict.fromkeys(SITES, limits))
    record = federation.survey()
    assert record["noise"] == pytest.approx(2 * 0.05 * np.sqrt(23), rel=0.2)
    assert abs(record["together"]["labels"]["malignant"]["count"] - 32) < 5 * record["noise"]
    capsys.readouterr()
    main(["deploy", "audit", str(tmp_path / "north" / "state")])
    (masked,) = [line for line in capsys.readouterr().out.splitlines() if "mask (survey)" in line]
    assert float(masked.split("|")[-2]) > 100  # a small multiplier


def test_what_a_survey_would_send_is_shown_before_it_is_approved(tmp_path, capsys):
    federation = Federation(tmp_path)
    content = yaml.safe_load(federation.files[0].read_text())
    del content["recipes"][0]["sha256"], content["recipes"][0]["digest"]
    federation.files[0].write_text(yaml.safe_dump(content))
    capsys.readouterr()
    main(["deploy", "check", str(federation.files[0])])
    shown = capsys.readouterr().out
    assert "not approved" in shown and job_recipe_digest(str(federation.recipe)) in shown
    assert "at least 3 sites" in shown and "max_surveys" in shown
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown.splitlines() if line.startswith("  |")]
    assert ["labels", "malignant", "8"] in rows
    assert "Nothing, as far as counts show it" in shown
    assert not (tmp_path / "north" / "state").exists()


def test_the_app_of_a_survey_is_written_like_that_of_a_recipe(tmp_path, capsys):
    federation = Federation(tmp_path)
    main(["deploy", "init", str(federation.recipe), str(tmp_path / "app")])
    assert job_recipe_digest(str(federation.recipe)) in capsys.readouterr().out
    site = yaml.safe_load((tmp_path / "app" / "site" / "site.yaml").read_text())
    assert site["secure_sums"]


def test_a_recipe_that_trains_is_no_survey(tmp_path):
    federation = Federation(tmp_path)
    with raises_naming(ValueError, "'digits'"):
        main(["deploy", "survey", "digits", "--local", str(federation.files[0])])


def test_a_survey_of_the_clients_of_a_simulation_has_the_same_counts(tmp_path, capsys):
    federation = Federation(tmp_path)
    together = federation.survey()["together"]
    root = tmp_path / "all"
    root.mkdir()
    for name in SITES:
        (root / name).symlink_to(tmp_path / name / "images")
    capsys.readouterr()
    options = ["--data.dataset", "Images", "--data.dataset.root", str(root), "--data.dataset.size", "32"]
    options += ["--data.partition", "ByDomain", "--json", "--min-count", "5"]
    main(["data", "survey", "--config", "quickstart", *options])
    record = json.loads(capsys.readouterr().out)
    assert record["together"] == together
    assert record["sites"] == sorted(SITES)


def test_a_survey_of_built_in_images(capsys):
    options = ["--data.train_limit", "40", "--data.test_limit", "20"]
    main(["data", "survey", "--config", "quickstart", *options, "--json"])
    record = json.loads(capsys.readouterr().out)
    assert record["together"]["images"]["read"]["count"] == 60
    assert sum(cell["count"] for cell in record["together"]["labels"].values()) == 60


def test_sites_that_are_clients_of_a_built_in_data_set(tmp_path, capsys):
    federation = Federation(tmp_path, {"survey": {"classes": [str(digit) for digit in range(10)]}})
    partition = {"class_path": "IID", "init_args": {"num_clients": 4}}
    data = {"dataset": "Digits", "partition": partition, "train_limit": 200, "test_limit": 40}
    for client, file in enumerate(federation.files):
        content = yaml.safe_load(file.read_text())
        file.write_text(yaml.safe_dump(content | {"data": data | {"client": client}}))
    record = federation.survey()
    assert record["together"]["images"]["read"]["count"] == 240
    assert record["together"]["bits"] == {"8": {"count": 240, "few": 0, "many": 4}}
