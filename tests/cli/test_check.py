# SPDX-License-Identifier: Apache-2.0
"""`perada check`: all that would be rejected or warned of, at once, without training."""

import re
import warnings

import pytest
import yaml
from PIL import Image

from perada.cli import main

from ..recipes import recipe

WRONG = {
    "lerning_rate": 3,
    "trainer": {"max_epochs": "many"},
    "model": {"lr_locl": 3},
    "data": {"batch_size": -3, "partition": {"init_args": {"alhpa": 3}}},
    "federated": {"clients_per_round": 9, "weighting": "sample"},
    "privacy": {"noise_multiplier": 1.0, "target_epsilon": 3},
    "training": {"optimizer": "lion"},
    "distillation": {"stesp": 2},
}

PUBLIC = {"class_path": "Photographs", "init_args": {"count": 12, "size": 16, "gray": True}}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe(data={"public": PUBLIC})))
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(WRONG))


def check_output(capsys, *words, code=0):
    """What is said, line by line."""
    try:
        main(["check", *words])
        ended = 0
    except SystemExit as end:
        ended = end.code
    assert ended == code
    return capsys.readouterr().out.splitlines()


def test_every_option_that_is_rejected_is_named_at_once(capsys, tmp_path):
    words = ["--trainer.precision=64", "--xyz", "3", "--training.lr_personal=-1"]
    first, *said, _, last = check_output(capsys, "tiny.yaml", "wrong.yaml", *words, code=1)
    expected = [
        "training.optimizer: must be one of 'sgd', 'adam', 'adamw', got 'lion'",
        "Option 'alhpa' is not accepted",
        "Option 'stesp' is not accepted; did you mean distillation.steps?",
        "federated.weighting: must be one of 'uniform', 'samples', got 'sample'",
        "trainer.max_epochs: must be an integer, got",
        "unrecognized arguments: --xyz",
        "does not accept option 'lr_locl'; did you mean training.lr_local?",
        "'lerning_rate' is not accepted; did you mean training.lr_local or training.lr_personal or distillation.lr",
        "privacy: noise_multiplier=1.0 and target_epsilon=3.0 are both set: set exactly one of them",
        "lr_personal must be a finite number >= 0, got -1.0",
        "batch_size must be an integer >= 1 or 'full', got -3",
        "precision='64-true' is not supported: it casts all weights",
        "clients_per_round must be an integer >= 1 and <= 3 or None, got 9",
    ]
    assert [[text for text in expected if text in line] for line in said].count([]) == 0
    assert [text for text in expected if text not in "\n".join(said)] == []
    assert first == f"Errors ({len(said)}):" and len(said) == len(expected)
    assert last == "The recipe is invalid."
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny.yaml", "wrong.yaml"]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "words", [["tiny.yaml", "--trainer.max_epochs", "7"], ["--trainer.max_epochs=7", "--config", "tiny.yaml"]], ids=str
)
def test_what_can_be_run_is_described_and_nothing_is_trained(capsys, tmp_path, monkeypatch, words):
    monkeypatch.setattr("perada.federation.federation.Federation.begin_round", None)  # no round can be begun
    (said,) = check_output(capsys, *words)
    assert said == "The recipe is valid: 3 clients, 60 training images, 7 rounds."
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny.yaml", "wrong.yaml"]


def test_warnings_of_the_set_up_are_said(capsys, monkeypatch):
    def warned(*_):
        warnings.warn("something looks odd", stacklevel=2)

    monkeypatch.setattr("perada.lightning.setup.check_first_images", warned)
    one, said, _, last = check_output(capsys, "tiny.yaml", "--federated.algorithm=fedavg", "--distillation.steps=0")
    assert one == "Warnings (1):" and last.startswith("The recipe is valid: ")
    assert said == "- something looks odd"


def test_what_would_not_be_private_is_said(capsys):
    words = [
        "--federated.algorithm=fedavg",
        "--distillation.steps=0",
        "--privacy.noise_multiplier=1",
        "--privacy.delta=0.5",
    ]
    words += ["--data.public=null", "--data.public_fraction=0.2"]
    said = check_output(capsys, "tiny.yaml", *words, code=1)
    assert said[0] == "Errors (2):"
    assert any(line.startswith("- privacy: delta=0.5 must be below 1 / ") for line in said)
    assert any(line.startswith("- public_fraction=0.2 cannot be used in a private run") for line in said)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data.dataset=Digts"], "data.dataset: there is no class 'Digts'; did you mean 'Digits'?"),
        (["--model.adapter=bottleneck"], "adapter 'bottleneck' does not fit backbone 'test_resnet'"),
        (
            ["--federated.algorithm=fedbn", "--federated.server_rule=kurm"],
            "federated.server_rule: there is no class 'kurm'",
        ),
    ],
)
def test_what_follows_from_an_option_that_was_left_out_is_not_said(capsys, words, message):
    said = check_output(capsys, "tiny.yaml", *words, code=1)
    assert said[0] == "Errors (1):" and message in said[1]


@pytest.mark.parametrize("in_recipe", [False, True], ids=["words", "recipe"])
@pytest.mark.parametrize(
    ("options", "names"),
    [
        (
            {"privacy.noise_multiplier": -1, "privacy.delta": 5, "privacy.max_norm": -2, "data.public_fraction": 0},
            ["noise_multiplier -1.0", "delta 5.0", "max_norm -2.0"],
        ),
        (
            {"data.partition.class_path": "Dirichlet", "data.partition.init_args.num_clients": -3}
            | {"data.partition.init_args.alpha": -1, "data.partition.init_args.min_per_client": -2},
            ["num_clients -3", "alpha -1.0", "min_per_client -2"],
        ),
        (
            {"client_privacy.noise_multiplier": -1, "client_privacy.delta": 5, "client_privacy.max_norm": -2}
            | {"data.public_fraction": 0},
            ["noise_multiplier -1.0", "delta 5.0", "max_norm -2.0"],
        ),
        (
            {"distillation.steps": -1, "distillation.lr": -3} | {"distillation.temperature": 0},
            ["steps -1", "lr -3.0", "temperature 0.0"],
        ),
    ],
    ids=["privacy", "partition", "client_privacy", "distillation"],
)
@pytest.mark.every(8)
def test_every_error_of_one_object_is_named(capsys, tmp_path, in_recipe, options, names):
    words = []
    if in_recipe:
        nested = {}
        for path, value in options.items():
            *sections, key = path.split(".")
            place = nested
            for name in sections:
                place = place.setdefault(name, {})
            place[key] = value
        (tmp_path / "more.yaml").write_text(yaml.safe_dump(nested))
        words = ["more.yaml"]
    else:
        words = [f"--{path}={value}" for path, value in options.items()]
    said = "\n".join(check_output(capsys, "tiny.yaml", *words, code=1))
    for name in names:
        option, value = name.split()
        assert re.search(rf"{option} must be .*, got {re.escape(value)}\b", said), (name, said)
    assert said.startswith(f"Errors ({len(names)}):")


@pytest.mark.slow
def test_the_noise_and_the_epsilon_of_a_private_recipe_are_printed(capsys):
    """Poisson batches of 8 of 20 images, one step a round, 4 rounds: σ is the one that Opacus itself calibrates."""
    from opacus.accountants import RDPAccountant

    words = [
        "--federated.algorithm=fedavg",
        "--distillation.steps=0",
        "--data.batch_size=8",
        "--data.public_fraction=0",
        "--trainer.max_epochs=4",
    ]
    words += ["--privacy.noise_multiplier=2", "--privacy.delta=0.01"]
    said = check_output(capsys, "tiny.yaml", *words)
    accountant = RDPAccountant()
    accountant.history = [(2.0, 0.4, 4)]
    epsilon = f"{accountant.get_epsilon(0.01):.2f}"
    expected = (
        f"privacy: noise multiplier σ = 2; after 4 rounds ε = at most {epsilon} (server ledger), {epsilon} (release"
    )
    assert said[-1].startswith(expected)
    assert "δ = 0.01" in said[-1]


def test_the_noise_of_a_target_and_of_whole_clients_is_printed(capsys):
    words = [
        "--federated.algorithm=fedavg",
        "--distillation.steps=0",
        "--trainer.max_epochs=4",
        "--data.public_fraction=0",
        "--privacy.delta=0.01",
    ]
    target = check_output(capsys, "tiny.yaml", *words, "--privacy.target_epsilon=3")[-1]
    assert "privacy: noise multiplier σ = " in target
    assert float(target.split("at most ")[1].split(" ")[0]) == pytest.approx(3, abs=0.02)
    words = [*words[:-1], "--client_privacy.delta=0.01"]
    line = check_output(
        capsys, "tiny.yaml", *words, "--client_privacy.noise_multiplier=3", "--client_privacy.max_norm=1"
    )[-1]
    assert line.startswith("client_privacy: noise multiplier σ = 3; after 4 rounds ε = at most ")


def test_a_recipe_has_to_be_given():
    with pytest.raises(ValueError, match="perada ls"):
        main(["check", "--trainer.max_epochs=3"])


def test_an_error_of_the_program_is_none_of_the_recipe(monkeypatch):
    def broken(*_):
        raise KeyError("mistake")

    monkeypatch.setattr("perada.lightning.setup.check_first_images", broken)
    with pytest.raises(KeyError, match="mistake"):
        main(["check", "tiny.yaml"])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("trainer:\n  max_epochs 3\n", "max_epochs 3"),
        ("data:\n  dataset: {class_path: null, init_args: {root: x}}\n", "data.dataset"),
        ("federated:\n  algorithm: {class_path: [fedavg]}\n", "federated.algorithm"),
    ],
)
def test_a_section_without_options_and_a_class_without_name_are_named(tmp_path, text, value):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=value):
        main(["check", str(path)])


def write_hospitals(folder):
    """Write six images of two classes for each of two hospitals, one of which is no image."""
    for hospital in ("north", "south"):
        for name in ("cat", "dog"):
            (folder / hospital / name).mkdir(parents=True)
            for number in range(3):
                Image.new("RGB", (20, 16), (number, 10 * len(hospital), 30)).save(
                    folder / hospital / name / f"{number}.png"
                )
    (folder / "north" / "cat" / "0.png").write_bytes(b"no image")


HOSPITALS = {
    "dataset": {"class_path": "Images", "init_args": {"root": "images", "size": 16}},
    "partition": {"class_path": "ByDomain", "init_args": {"column": "client"}},
    "train_limit": None,
    "test_limit": None,
    "image_size": None,
}


def write_recipe(path, data, **parts):
    path.write_text(yaml.safe_dump(recipe(data=HOSPITALS | data, **parts)))


def test_broken_images_missing_weights_and_the_algorithm_are_named_at_once(capsys, tmp_path):
    write_hospitals(tmp_path / "images")
    parts = {"model": {"pretrained": "none.pt"}, "federated": {"algorithm": {"class_path": "PerAda"}}}
    write_recipe(tmp_path / "hospitals.yaml", {}, **parts)
    words = ["hospitals.yaml", "--federated.algorithm.init_args.prox_strength=-3"]
    lines = check_output(capsys, *words, code=1)
    # The number of errors shows that none was added by skipping the image and by random weights.
    assert lines[0] == "Errors (4):" and not any("Warnings" in line for line in lines)
    expected = ["prox_strength must be .* got -3", r"1 image .*north/cat/0\.png", r"none\.pt", "no public set"]
    for text, line in zip(expected, lines[1:5], strict=True):
        assert re.search(text, line), (text, line)


def test_every_set_and_the_model_are_examined_if_the_data_cannot_be_read(capsys, tmp_path):
    public = {"class_path": "UnlabelledFolder", "init_args": {"root": "nowhere", "size": 16}}
    parts = {"model": {"pretrained": "none.pt", "adapter": "lroa"}}
    write_recipe(tmp_path / "hospitals.yaml", {"public": public}, **parts)
    lines = check_output(capsys, "hospitals.yaml", code=1)
    assert lines[0] == "Errors (4):"
    for text, line in zip(["images", "nowhere", "none.pt", "'lroa'"], lines[1:5], strict=True):
        assert text in line


@pytest.mark.parametrize("words", [[], ["--data.dataset.init_args.root", "images"]], ids=["recipe", "words"])
def test_classes_of_data_that_do_not_exist_cause_no_further_errors(capsys, tmp_path, words):
    data = {"dataset": {"class_path": "Imgaes"}, "partition": {"class_path": "ByDomian"}}
    write_recipe(tmp_path / "hospitals.yaml", data, model={"pretrained": "none.pt"})
    lines = check_output(capsys, "hospitals.yaml", *words, code=1)
    assert lines[0] == "Errors (3):"
    for text in ("'Imgaes'", "'ByDomian'", "none.pt"):
        assert sum(text in line for line in lines) == 1


def test_a_decimal_comma_is_named(capsys, tmp_path):
    (tmp_path / "mine.yaml").write_text("training: {lr_local: 0,01}")
    with pytest.raises(SystemExit):
        main(["check", "mine.yaml"])
    assert "write decimals with a point" in capsys.readouterr().out


def test_data_that_are_null_are_one_error(capsys, tmp_path):
    write_recipe(tmp_path / "null.yaml", {"dataset": None}, model={"pretrained": "none.pt"})
    lines = check_output(capsys, "null.yaml", code=1)
    assert lines[0] == "Errors (2):"
    assert lines[1].startswith("- dataset must be set") and "none.pt" in lines[2]


@pytest.mark.parametrize(
    "section", ["federated: {algorithm: {class_path: null}}", "trainer: {logger: {class_path: null}}"]
)
def test_a_class_without_a_name_is_named_also_in_a_recipe_over_another(tmp_path, section):
    (tmp_path / "over.yaml").write_text(section)
    with pytest.raises(ValueError, match=r"over\.yaml: class_path.*None"):
        main(["check", "digits", "--config", "over.yaml"])
