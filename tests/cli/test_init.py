# SPDX-License-Identifier: Apache-2.0
"""`perada init` and `perada schema`: recipes that run, and what editors say of recipes."""

import copy
import json
import shlex
import warnings
from inspect import signature
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import yaml
from PIL import Image

from perada import FederatedClassifier, FederatedLoop
from perada.api import OPTION_CLASSES
from perada.cli import main
from perada.cli.init import QUESTIONS, compose_recipe, read_source
from perada.cli.recipes import RECIPES
from perada.cli.runs import PeradaCLI, build_compared
from perada.data import ImageMasks, Images
from perada.data.batches.features import FeatureStore
from perada.server import ServerRule
from perada.studies.choose.search import Search


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(path):
    return yaml.safe_load(Path(path).read_text())


def write_images(*folders):
    for number, name in enumerate(folders):
        (path := Path(name)).mkdir(parents=True)
        for image in range(10):
            pixels = np.full((8, 8, 3), 20 * number + image, np.uint8)
            Image.fromarray(pixels).save(path / f"{image}.png")


@pytest.fixture(scope="module")
def validator():
    from perada.cli.parser import recipe_schema

    jsonschema.Draft202012Validator.check_schema(recipe_schema())
    return jsonschema.Draft202012Validator(recipe_schema())


SMALL = ["--trainer.logger=false", "--trainer.accelerator=cpu", "--training.local_steps=1", "--data.train_limit=120"]
SMALL += ["--data.test_limit=20", "--trainer.enable_progress_bar=false"]


PRIVATE = ["--algorithm", "fedavg", "--epsilon", "8"]


@pytest.mark.parametrize("words", [[], pytest.param(PRIVATE, marks=pytest.mark.slow)], ids=["perada", "private"])
def test_what_init_writes_runs(words, capsys, validator):
    main(["init", "--yes", "--rounds", "1", "--output", "new/my.yaml", *words])
    assert "perada fit --config new/my.yaml" in capsys.readouterr().out
    written = read("new/my.yaml")
    assert (written["trainer"]["max_epochs"], "privacy" in written) == (1, bool(words))
    assert [*validator.iter_errors(written)] == []
    # A private run rejects it, and FedAvg has one model only.
    assert written.get("evaluation") == (None if words else {"prediction": "both"})
    few = ["--data.partition.num_clients=4", *([] if words else ["--distillation.steps=1"])]
    main(["fit", "--config", "new/my.yaml", *SMALL, *few])
    assert "mean ± std" in capsys.readouterr().out


@pytest.mark.parametrize("algorithm", ["perada", "fedavg"])
def test_the_search_that_is_proposed_can_be_run(algorithm, capsys, monkeypatch):
    searches = []

    def stop(search):
        searches.append(search)
        raise KeyboardInterrupt

    monkeypatch.setattr(Search, "run", stop)
    main(["init", "--yes", "--algorithm", algorithm, "--output", "my.yaml"])
    proposal = capsys.readouterr().out.splitlines()[-1].partition("with: perada ")[2]
    with pytest.raises(KeyboardInterrupt):
        main(shlex.split(proposal))
    # The server has public images only if the recipe's algorithm distils.
    pulled = "perada" if algorithm == "perada" else "perada_no_kd"
    assert {"standalone", "fedavg", "ditto", pulled} <= set(searches[0].methods)
    assert searches[0].options.seeds == (0, 1, 2)
    main(["init", "--yes", "--epsilon", "8", "--output", "private.yaml"])
    assert "perada choose" not in capsys.readouterr().out


def test_answers_are_asked_for(monkeypatch):
    asked, answers = [], iter(["", "classes", "ditto", "7", ""])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or next(answers))
    main(["init"])
    assert len(asked) == len(QUESTIONS) == 5
    written = read("recipe.yaml")
    assert (written["federated"]["algorithm"], written["trainer"]["max_epochs"]) == ("ditto", 7)
    assert "public_fraction" not in written["data"]
    with pytest.raises(FileExistsError, match=r"'recipe\.yaml'.*--force"):
        main(["init", "--yes"])


@pytest.mark.parametrize(
    ("folders", "clients", "layout"),
    [
        (["it's mine/north/cat", "it's mine/north/dog", "it's mine/south/cat"], 2, "{client}/{class}/*"),
        (["it's mine/cat", "it's mine/dog"], 3, "{class}/*"),
    ],
)
def test_folders_are_understood(folders, clients, layout):
    write_images(*folders)
    (path := Path("mine.yaml")).write_text(compose_recipe("it's mine", "perada", "3", ""))
    assert read(path)["data"]["dataset"]["init_args"] == {"root": "it's mine", "layout": layout}
    words = [] if clients == 2 else ["--data.partition.num_clients=3"]  # there are few images
    cli = PeradaCLI(
        ["--config", "mine.yaml", "--data.public_fraction=0", "--model.pretrained=false", *words], run=False
    )
    assert len(cli.datamodule.partition_dict()["train"]) == clients


def test_tables_are_understood():
    for name, header in (("clients.csv", "path,label,client"), ("plain.csv", "path,label")):
        write_images(f"{name}.images")
        rows = [f"{name}.images/{number}.png,{number % 2},{number % 3}" for number in range(10)]
        rows = [",".join(row.split(",")[: header.count(",") + 1]) for row in rows]
        Path(name).write_text("\n".join([header, *rows]))
        data = yaml.safe_load(compose_recipe(name, "fedavg", "3", ""))["data"]
        assert data["dataset"] == {"class_path": "ImageTable", "init_args": {"table": name}}
        assert data["partition"]["class_path"] == ("ByDomain" if "client" in header else "Dirichlet")


def write_scans(foreground=255):
    """Two hospitals with eight images and masks each, and a table of them with the age of the patient."""
    rows = ["path,mask_path,site,age"]
    for hospital in ("north", "south"):
        for kind in ("images", "masks"):
            Path(f"scans/{hospital}/{kind}").mkdir(parents=True)
        for number in range(8):
            image = np.full((32, 32, 3), 100 + 10 * number + len(rows), np.uint8)
            mask = np.zeros((32, 32), np.uint8)
            mask[4:16, 4 + number : 16] = foreground
            Image.fromarray(image).save(f"scans/{hospital}/images/{number}.png")
            Image.fromarray(mask).save(f"scans/{hospital}/masks/{number}.png")
            place = f"scans/{hospital}"
            rows.append(f"{place}/images/{number}.png,{place}/masks/{number}.png,{hospital},{20 + 1.5 * len(rows)}")
    Path("masks.csv").write_text("\n".join(rows))
    columns = [row.split(",") for row in rows]
    Path("ages.csv").write_text("\n".join(f"{path},{age}" for path, _, _, age in columns))


def test_the_frozen_network_sees_each_image_of_a_first_recipe_only_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in range(24):
        path = tmp_path / "images" / "ab"[number % 2] / f"class_{number // 2 % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (9 * number, 40, 200)).save(path)
    Path("recipe.yaml").write_text(compose_recipe("images", "perada", "1", ""))
    cli = build_compared(
        [
            "--config",
            "recipe.yaml",
            "--trainer.logger=false",
            "--model.backbone=test_resnet",
            "--model.pretrained=false",
        ]
    )
    cli.trainer.fit(cli.model, cli.datamodule)
    data = cli.datamodule
    for store in (data.checked.train, data.checked.test, data.checked.public):
        assert isinstance(data.samples_of(store), FeatureStore)


@pytest.mark.parametrize(("foreground", "values"), [(255, {"mask_values": [0, 255]}), (1, {})])
def test_masks_are_found_in_folders_and_tables(foreground, values):
    write_scans(foreground)
    table_options = {"table": "masks.csv", "client": "site", "mask": "mask_path"}
    for images, expected in (("scans", {"root": "scans"}), ("masks.csv", table_options)):
        written = yaml.safe_load(compose_recipe(images, "perada", "3", ""))
        assert written["data"]["dataset"]["init_args"] == expected | values
        assert written["data"]["task"]["class_path"] == "Segmentation"
        assert written["data"]["partition"]["class_path"] == "ByDomain"
        assert written["model"]["backbone"] == "smp:unet-resnet18"
        assert yaml.safe_load(compose_recipe(images, "perada", "3", "", "masks")) == written


@pytest.mark.parametrize(
    ("images", "task", "options"),
    [
        ("ages.csv", "", {"table": "ages.csv", "numbers": "age"}),
        ("masks.csv", "numbers", {"table": "masks.csv", "client": "site", "numbers": "age"}),
    ],
)
def test_numbers_are_found_in_tables(images, task, options):
    write_scans()
    data = yaml.safe_load(compose_recipe(images, "perada", "3", "", task))["data"]
    assert data["dataset"] == {"class_path": "ImageTable", "init_args": options}
    assert data["task"] == {"class_path": "Regression", "init_args": {"standardize": "all"}}
    assert data["partition"]["class_path"] == ("ByDomain" if "client" in options else "IID")
    private = yaml.safe_load(compose_recipe(images, "perada", "3", "8", task))["data"]
    assert "standardize" not in private["task"]["init_args"]


def test_the_task_decides_between_columns():
    """A column of whole numbers may be a class or a number, and a table may have labels of both kinds."""
    write_images("scans")
    header = "path,grade,edema,fracture"
    rows = [f"scans/{number}.png,{number % 3},{number % 2},{number // 5}" for number in range(10)]
    Path("t.csv").write_text("\n".join([header, *rows]))
    expected = {"": ["edema", "fracture"], "labels": ["edema", "fracture"]}
    for task, label in expected.items():
        data = yaml.safe_load(compose_recipe("t.csv", "fedavg", "3", "", task))["data"]
        assert data["dataset"]["init_args"] == {"table": "t.csv", "label": label}
    Path("t.csv").write_text("\n".join(["path,label", *[row[: row.index(",") + 2] for row in rows]]))
    for task, column in {"": {}, "classes": {}, "numbers": {"numbers": "label"}}.items():
        data = yaml.safe_load(compose_recipe("t.csv", "fedavg", "3", "", task))["data"]
        assert data["dataset"]["init_args"] == {"table": "t.csv"} | column


FEW_STEPS = ["--model.pretrained=false", "--data.image_size=32", "--trainer.logger=false", "--trainer.accelerator=cpu"]
FEW_STEPS += ["--training.local_steps=1", "--distillation.steps=1", "--trainer.enable_progress_bar=false"]
FEW_STEPS += ["--data.public_fraction=0.3"]  # of few images


@pytest.mark.parametrize(
    ("images", "words"),
    [
        ("ages.csv", ["--model.backbone=test_resnet"]),
        pytest.param("scans", [], marks=pytest.mark.slow),
        pytest.param("masks.csv", [], marks=pytest.mark.slow),
    ],
)
def test_what_init_writes_for_numbers_and_masks_runs(images, words, capsys, validator):
    if not words:
        pytest.importorskip("segmentation_models_pytorch")
    write_scans()
    main(["init", "--yes", "--rounds=1", f"--images={images}"])
    assert [*validator.iter_errors(read("recipe.yaml"))] == []
    main(["fit", "--config", "recipe.yaml", *FEW_STEPS, *words])
    assert "mean ± std" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("images", "epsilon", "task", "message"),
    [
        ("", "", "masks", "task='masks' needs images with masks, but the digits have classes"),
        ("scans", "", "numbers", r"task='numbers' needs a table \(.csv, .*\) of the images with their numbers"),
        ("scans", "8", "", "epsilon='8' cannot be combined with masks"),
        ("ages.csv", "", "masks", "the column of the masks cannot be inferred from 'path', 'age'; rename it to 'mask'"),
        ("masks.csv", "", "labels", "the column of the labels cannot be inferred"),
    ],
)
def test_tasks_that_the_images_do_not_allow(images, epsilon, task, message):
    write_scans()
    with pytest.raises(ValueError, match=message):
        compose_recipe(images, "perada", "3", epsilon, task)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"task": "boxes"}, "task must be one of 'classes', 'labels', 'numbers', 'masks', got 'boxes'"),
        ({"images": "nowhere"}, "images='nowhere' does not exist; pass a folder or a table"),
        ({"algorithm": "dito"}, "algorithm='dito' is unknown; did you mean 'ditto'?"),
        ({"rounds": "many"}, "rounds must be an integer.*, got 'many'"),
        ({"epsilon": "-1"}, "epsilon must be a finite number > 0 and <= 50, got -1"),
    ],
)
def test_answers_that_cannot_be_used(answer, message):
    words = [f"--{name}={value}" for name, value in answer.items()]
    with pytest.raises((ValueError, FileNotFoundError), match=message.replace("?", r"\?")):
        main(["init", "--yes", *words])


def test_options_are_checked_before_the_first_question_and_answers_before_the_next(monkeypatch):
    questions = []
    answers = iter(["nowhere"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: questions.append(question) or next(answers))
    with pytest.raises(ValueError, match=r"rounds must be an integer >= 1, got 0"):
        main(["init", "--rounds=0"])
    assert questions == []
    with pytest.raises(StopIteration):  # of the answers
        main(["init"])
    assert questions == [questions[0]] * 2
    assert not Path("recipe.yaml").exists()


def test_shipped_recipes_fit_the_schema(validator):
    paths = sorted(RECIPES.rglob("*.yaml"))
    assert len(paths) > 40
    wrong = {path.name: error.message for path in paths for error in validator.iter_errors(read(path))}
    assert wrong == {}


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (["trainer", "rounds"], 3),
        (["trainer", "max_epochs"], "many"),
        (["rounds"], 3),
        (["training", "optimizer"], "lion"),
        (["model", "lr_locl"], 0.1),
        (["data", "partition", "class"], "Dirichlet"),
        (["federated", "algorithm"], "fedagv"),
        (["distillation", "stesp"], 3),
        (["federated", "distillation"], {"steps": 3}),
        (["privacy"], {"epsilon": 3}),
        (["distillation", "steps"], "many"),
        (["federated", "algorithm"], "JoiningRestOfWorld"),  # of the library's own
    ],
)
def test_the_schema_rejects_what_is_wrong(validator, keys, value):
    content = read(RECIPES / "digits.yaml")
    assert validator.is_valid(content)
    inner = changed = copy.deepcopy(content)
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    assert not validator.is_valid(changed)


def test_the_schema_has_the_defaults_of_the_classes_that_take_the_options(capsys):
    main(["schema"])
    shown = json.loads(capsys.readouterr().out)["properties"]
    kinds = {"model": FederatedClassifier, "federated": FederatedLoop} | OPTION_CLASSES
    for section, kind in kinds.items():
        options = shown[section].get("anyOf", [shown[section]])[0]["properties"]
        parameters = signature(kind).parameters
        defaults = {name: parameters[name].default for name in parameters if name not in OPTION_CLASSES}
        told = {name: option["default"] for name, option in options.items() if "default" in option}
        assert told == {name: defaults[name] for name in told} and len(told) >= len(defaults) - 2


def test_the_schema_explains_options(capsys):
    main(["schema"])
    shown = json.loads(capsys.readouterr().out)["properties"]
    assert shown["trainer"]["properties"]["max_epochs"]["description"] == "Communication rounds."
    assert "learning rate" in shown["training"]["properties"]["lr_local"]["description"].lower()


@pytest.mark.parametrize("name", ["a long name " * 12, "comma, {brace}: #hash", "'quoted' \"twice\"", "ümläut 日本"])
def test_paths_of_any_length_and_letters_are_written_whole(name):
    folder = name.strip()
    write_images(f"{folder}/0", f"{folder}/1")
    assert yaml.safe_load(compose_recipe(folder, "perada", "3", ""))["data"]["dataset"]["init_args"]["root"] == folder


def test_a_class_of_ones_own_hides_none_of_ours(capsys):
    """Whatever its name is, and whether or not its module is still loaded."""
    members = {"__module__": "gone", "__call__": lambda self, given: given.previous}
    rules = [type(name, (ServerRule,), members) for name in ("Krum", "Mine")]
    main(["schema"])
    said = capsys.readouterr().out
    assert '"Krum"' in said
    assert '"Mine"' not in said
    del rules


@pytest.mark.parametrize(
    ("algorithm", "images", "words"),
    [
        ("perada", "hospitals", ["--model.pretrained=false"]),
        pytest.param("ditto", "hospitals", ["--model.pretrained=false"], marks=pytest.mark.slow),
        pytest.param("perada", "", [], marks=pytest.mark.slow),
        pytest.param("ditto", "", [], marks=pytest.mark.slow),
    ],
)
def test_a_private_recipe_gives_the_server_none_of_the_clients_images(algorithm, images, words):
    """On digits it distils on photographs, on images of one's own not at all; its set-up has no objection."""
    write_images("hospitals/north/cat", "hospitals/north/dog", "hospitals/south/cat", "hospitals/south/dog")
    for folder in ("hospitals", ""):
        for name in ("perada", "ditto"):
            written = yaml.safe_load(compose_recipe(folder, name, "2", "3"))
            assert not {"public_fraction", "validation_fraction"} & set(written["data"])
            assert ("public" in written["data"]) == (not folder and name == "perada")
    Path("private.yaml").write_text(compose_recipe(images, algorithm, "2", "3"))
    main(["check", "private.yaml", *words, "--data.image_size=32", "--model.backbone=test_resnet"])


HOSPITALS = [f"{hospital}/{label}" for hospital in ("aachen", "bonn", "celle") for label in ("benign", "malignant")]


@pytest.mark.parametrize("top", ["hospitals", "2024/hospitals"])
def test_a_folder_above_the_clients_is_rejected_with_the_one_below(top):
    write_images(*[f"archive/{top}/{name}" for name in HOSPITALS], "archive/figures")
    below = f"archive/{top.split('/')[0]}"
    if top == "hospitals":
        with pytest.raises(ValueError, match=below):
            main(["init", "--yes", "--images", "archive"])
        with pytest.raises(FileNotFoundError, match=rf"70 images .*{below}"):
            main(["data", "inspect", "archive"])
        write_images("archive/public/photographs")
        with pytest.raises(FileNotFoundError, match=rf"70 of 80 images .*{below}"):
            main(["data", "inspect", "archive"])
    main(["init", "--yes", "--images", f"archive/{top}", "--output", "below.yaml"])
    assert read("below.yaml")["data"]["partition"]["class_path"] == "ByDomain"


def test_a_folder_two_levels_above_the_clients_is_rejected_with_that_of_the_clients():
    write_images(*[f"archive/2024/hospitals/{name}" for name in HOSPITALS])
    with pytest.raises(ValueError, match=r"60 of 60 images .*'2024/hospitals'.*--images archive/2024/hospitals,"):
        main(["init", "--yes", "--images", "archive"])


def test_folders_of_years_in_several_hospitals_are_not_too_high(capsys):
    write_images("images/north/2023/a", "images/north/2024/b", "images/north/2025/a", "images/south/2023/b")
    main(["init", "--yes", "--images", "images"])
    assert "2 clients (north, south)" in capsys.readouterr().out


def test_a_layout_that_selects_images_of_each_folder_is_used(capsys):
    write_images(*[f"all/{name}" for name in HOSPITALS])
    main(["data", "inspect", "all", "--layout", "{client}/{class}/3.*"])
    assert "54 of 60 images" in capsys.readouterr().out


def test_what_was_found_and_assumed_is_printed(capsys):
    write_images(*[f"all/{name}" for name in HOSPITALS])
    Path("all/bonn/benign/broken.png").write_text("no image")
    main(["init", "--yes", "--images", "all"])
    shown = capsys.readouterr().out
    assert "61 images, 3 clients (aachen, bonn, celle), learning classes: 2 (benign, malignant)" in shown
    assert "1 file cannot be read: all/bonn/benign/broken.png" in shown
    assert "layout: {client}/{class}/*" in shown


def test_options_for_layout_and_encoding_are_written():
    write_images("all/benign/aachen", "all/malignant/bonn")
    main(["init", "--yes", "--images", "all", "--layout", "{class}/{client}/*", "--output", "layout.yaml"])
    assert read("layout.yaml")["data"]["dataset"]["init_args"]["layout"] == "{class}/{client}/*"
    rows = ["path,label,client", *[f"all/benign/aachen/{n}.png,{'ja' if n % 2 else 'nein'},Köln" for n in range(10)]]
    Path("table.csv").write_text("\n".join(rows), encoding="cp1252")
    main(["init", "--yes", "--images", "table.csv", "--encoding", "cp1252", "--output", "table.yaml"])
    assert read("table.yaml")["data"]["dataset"]["init_args"]["encoding"] == "cp1252"
    for words in (["--images", "all", "--encoding", "cp1252"], ["--images", "table.csv", "--layout", "{class}/*"]):
        with pytest.raises(ValueError, match=words[2]):
            main(["init", "--yes", "--output", "other.yaml", *words])


def test_a_wrong_answer_is_asked_again(monkeypatch, capsys):
    answers = iter(["nothing", "", "", "perda", "ditto", "0", "3", ""])
    monkeypatch.setattr("builtins.input", lambda question: next(answers))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    main(["init"])
    shown = capsys.readouterr().out
    assert [line.split("=")[0].split()[0] for line in shown.splitlines() if "try again" in line] == [
        "images",
        "algorithm",
        "rounds",
    ]
    recipe = read("recipe.yaml")
    assert recipe["trainer"]["max_epochs"] == 3
    assert recipe["federated"]["algorithm"] == "ditto"


def test_answers_that_end_early_are_no_traceback(monkeypatch):
    monkeypatch.setattr("builtins.input", lambda question: (_ for _ in ()).throw(EOFError))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    with pytest.raises(ValueError, match="--images"):
        main(["init"])


def write_pairs(folder, values=(0, 255), count=8, suffix=".png", images="images", masks="masks"):
    """Write images of a client with a mask each, whose quarter has the second value."""
    for name in (images, masks):
        Path(folder, name).mkdir(parents=True, exist_ok=True)
    for number in range(count):
        image = np.full((32, 32, 3), number, np.uint8)
        image[0, 0] = sum(folder.encode()) % 256  # no client has the images of another one
        Image.fromarray(image).save(Path(folder, images, f"{number}.png"))
        mask = np.full((32, 32), values[0], np.uint8)
        mask[3:19, 3:19] = values[1]
        Image.fromarray(mask).save(Path(folder, masks, f"{number}{suffix}"))


def write_labels(*names):
    """A table of images of two clients with these labels in turn."""
    Path("pictures").mkdir()
    rows = ["path,label,client"]
    for number in range(40):
        Image.fromarray(np.full((8, 8), number, np.uint8)).save(f"pictures/{number}.png")
        rows.append(f"pictures/{number}.png,{names[number % len(names)]},{number // 20}")
    Path("labels.csv").write_text("\n".join(rows))


INIT = ["init", "--yes", "--algorithm", "fedavg", "--images"]


@pytest.mark.parametrize(
    ("write", "images", "message", "remedy"),
    [
        (lambda: write_labels("NA", "OK"), "labels.csv", "the class 'NA', which marks a missing", "--classes=[NA, OK]"),
        (
            lambda: write_images("all/0/NA", "all/0/OK", "all/1/NA", "all/1/OK"),
            "all",
            "the class 'NA', which marks a missing",
            "--classes=[NA, OK]",
        ),
        (
            lambda: [write_pairs("scans/a", (0, 1)), write_pairs("scans/b", (0, 255)), write_pairs("scans/c", (0, 1))],
            "scans",
            r"no recipe was written: the training masks of client 1 \('b'\) have only class 0 and 255",
            "--mask_values=[0, 1]",
        ),
        (
            lambda: [write_pairs("scans/a", suffix=".jpg"), write_pairs("scans/b", suffix=".jpg")],
            "scans",
            r"\d.jpg is a JPEG file, whose compression changes the numbers",
            None,
        ),
        (
            lambda: [write_pairs("scans/a", (0, 0)), write_pairs("scans/b", (0, 0))],
            "scans",
            "nothing can be learned",
            None,
        ),
    ],
    ids=["table", "folders", "values", "jpeg", "one class"],
)
def test_no_recipe_is_written_that_training_rejects(write, images, message, remedy):
    write()
    with pytest.raises(ValueError, match=message):
        main([*INIT, images])
    assert not Path("recipe.yaml").exists()
    if remedy is not None:
        with warnings.catch_warnings():
            # That 255 marks pixels without a class at one client only is confirmed here.
            warnings.filterwarnings("ignore", "the training masks of client 1")
            main([*INIT, images, remedy])
            data = PeradaCLI(["--config", "recipe.yaml", "--model.pretrained=false"], run=False).datamodule
            data.setup()
        name, _, value = remedy.removeprefix("--").partition("=")
        assert read("recipe.yaml")["data"]["dataset"]["init_args"][name] == yaml.safe_load(value)
        assert data.num_classes == 2


def test_warnings_of_training_are_shown():
    for name, values in (("a", (0, 1)), ("b", (1, 0)), ("c", (0, 1))):
        write_pairs(f"scans/{name}", values)
    with pytest.warns(UserWarning, match=r"client 1 \('b'\).*swapped"):
        main([*INIT, "scans"])
    assert Path("recipe.yaml").exists()


def test_values_of_masks_are_for_masks():
    write_images("all/0/a", "all/0/b")
    with pytest.raises(ValueError, match=r"--mask_values=\[0, 1\]"):
        main([*INIT, "all", "--mask_values=[0, 1]"])
    write_labels("a", "b")
    with pytest.raises(ValueError, match=r"mask_values.*mask=None"):
        main([*INIT, "labels.csv", "--mask_values=[0, 1]"])


@pytest.mark.parametrize("top", ["project", "project/2024"])
def test_a_folder_above_the_clients_masks_is_rejected_with_the_one_below(top):
    for name in ("north", "south"):
        write_pairs(f"all/{top}/{name}")
    with pytest.raises(ValueError, match=rf"north, south, .*--images all/{top}$"):
        main([*INIT, "all"])
    with pytest.warns(UserWarning, match=rf"'project'.*root.* all/{top}$"):
        ImageMasks("all").read_manifest()
    main([*INIT, f"all/{top}"])
    assert read("recipe.yaml")["data"]["partition"]["class_path"] == "ByDomain"


@pytest.mark.parametrize("folders", [["all/north/train", "all/north/test"], ["all/north", "all/south"], ["all/north"]])
def test_folders_of_clients_and_splits_are_not_too_high(folders):
    for folder in folders:
        write_pairs(folder)
    ImageMasks("all").read_manifest()


@pytest.mark.parametrize("folders", [["all/north", "all/south"], ["all"], ["all/north/x", "all/south/x"]])
def test_masks_beside_their_images_are_no_images(folders):
    for folder in folders:
        write_pairs(folder, suffix="_mask.png", images=".", masks=".")
    message = r"of \d+ images in all are named like masks of others, such as .*0_mask.png .*called masks beside folders"
    with pytest.raises(ValueError, match=message):
        main([*INIT, "all"])
    with pytest.raises(ValueError, match=message):
        main(["data", "inspect", "all"])
    with pytest.raises(ValueError, match=message):
        main([*INIT, "all", "--task", "masks"])


def test_masks_beside_their_images_are_left_out_or_declared():
    for folder in ("all/north", "all/south"):
        write_pairs(folder, suffix="_mask.png", images=".", masks=".")
    with pytest.warns(UserWarning, match="16 of 32 images"):
        assert len(Images("all", layout="{class}/?.png").read_manifest().paths) == 16
    assert len(Images("all", layout="{class}/*", classes=["north", "south"]).read_manifest().paths) == 32


def test_masks_beside_their_images_can_be_moved_to_folders():
    write_pairs("all/north", suffix="_mask.png")
    write_pairs("all/south", suffix="_mask.png")
    main([*INIT, "all"])
    assert read("recipe.yaml")["data"]["dataset"]["class_path"] == "ImageMasks"


@pytest.mark.parametrize(
    ("images", "masks", "suffix", "message"),
    [
        ("ct", "masks", ".png", "class 'masks', whose files .* in 'ct', such as .*masks/0.png and .*ct/0.png"),
        ("ct", "gt", "_gt.png", "class 'gt', whose files .* in 'ct', .*rename 'ct' to 'images'"),
        ("img", "gt", "_other.png", r"no mask has the name of an image \(.*img/0.png, .*gt/0_other.png\)"),
    ],
)
def test_a_folder_of_masks_is_no_class(images, masks, suffix, message):
    for name in ("north", "south"):
        write_pairs(f"all/{name}", suffix=suffix, images=images, masks=masks)
    for words in ([*INIT, "all"], ["data", "inspect", "all"]):
        with pytest.raises(ValueError, match=message):
            main(words)
    main([*INIT, "all", f"--classes=[{images}, {masks}]"])
    assert read("recipe.yaml")["data"]["dataset"]["class_path"] == "Images"


def test_classes_with_and_without_masks_are_classes():
    write_images("all/0/mask", "all/0/no_mask", "all/1/mask", "all/1/no_mask")
    main([*INIT, "all"])
    assert read("recipe.yaml")["data"]["dataset"]["class_path"] == "Images"


@pytest.mark.parametrize(
    ("shapes", "expected_size"),
    [
        ([(8, 8)], 64),
        ([(28, 28)], 128),  # four times 28, and a multiple of 32
        ([(20, 32)], 128),
        ([(33, 32)], 160),
        ([(56, 56)], 224),
        ([(2000, 10)], 224),
        ([(8, 8), (32, 32), (3000, 2000)], 128),  # one photograph among small images
    ],
    ids=str,
)
def test_small_images_are_enlarged_at_most_four_times(shapes, expected_size):
    for name in ("north/cat", "north/dog", "south/cat", "south/dog"):
        folder = Path("all", name)
        folder.mkdir(parents=True)
        for number in range(9):
            height, width = shapes[number % len(shapes)]
            Image.new("L", (width, height), number).save(folder / f"{number}.png")
        (folder / "broken.png").write_bytes(b"no image")
    source = read_source("all")
    assert len(source.unreadable_files) == 4
    recipe = yaml.safe_load(compose_recipe("all", "fedavg", "1", "", inferred_source=source))
    assert recipe["data"]["image_size"] == expected_size
