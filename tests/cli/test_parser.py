# SPDX-License-Identifier: Apache-2.0
"""Names of options: short ones in recipes and on the command line, and what is proposed for a wrong one."""

import inspect
import json
from argparse import ArgumentError

import pytest
import yaml

import perada
from perada.algorithms import Algorithm, make_algorithm
from perada.api import OPTION_CLASSES
from perada.cli.describe import commands_of_tree
from perada.cli.main import COMMANDS, main
from perada.cli.messages import one_line
from perada.cli.options import TEXTS, options_by_foreign_name
from perada.cli.runs import PeradaCLI

TINY = {
    "trainer": {"accelerator": "cpu"},
    "model": {"backbone": "test_resnet", "pretrained": False, "adapter": "head"},
    "data": {
        "dataset": "Digits",
        "partition": {"class_path": "Dirichlet", "init_args": {"num_clients": 4, "alpha": 1.0}},
        "public_fraction": 0.1,
        "image_size": 16,
    },
    "distillation": {"steps": 1},
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))


def config(*words, recipe=None):
    """The configuration that words and a recipe over the tiny one make."""
    overlay = []
    if recipe is not None:
        with open("overlay.yaml", "w") as file:
            yaml.safe_dump(recipe, file)
        overlay = ["--config", "overlay.yaml"]
    return PeradaCLI(["--config", "tiny.yaml", *overlay, *words], run=False)


def error_line(*words, recipe=None):
    with pytest.raises(Exception) as caught:  # of the parser's own kinds
        config(*words, recipe=recipe)
    return one_line(caught.value)


def test_sections_are_arguments_of_the_python_call():
    arguments = inspect.signature(perada.finetune).parameters
    assert set(OPTION_CLASSES) <= set(arguments)
    fields = {name for kind in OPTION_CLASSES.values() for name in inspect.signature(kind).parameters}
    flat = {"lr_personal", "lr_local", "local_epochs", "local_steps"}
    assert fields & set(arguments) == flat | {"batch_size"}  # of the data, and of the distillation


def test_every_command_of_another_program_stands_for_one_here():
    commands = {" ".join(path) for path, _ in commands_of_tree(COMMANDS)}
    assert set(TEXTS["commands"]) <= commands
    words = [word for names in TEXTS["commands"].values() for word in names.split()]
    assert len(words) == len(set(words)) and not set(words) & set(COMMANDS)


def test_every_name_of_another_program_stands_for_an_option():
    known = {action.dest for action in config().parser._actions}
    for name in {target for targets in options_by_foreign_name().values() for target in targets}:
        above = name.rpartition(".")[0]
        assert name in known or above in known, name


@pytest.mark.parametrize(
    ("word", "name"),
    [("--rounds", "--trainer.max_epochs"), ("--seed", "--seed_everything"), ("--algorithm", "--federated.algorithm")],
)
def test_names_of_python_are_no_options_here_and_the_present_one_is_proposed(word, name):
    assert error_line(f"{word}=3").endswith(f"did you mean {name}?")


@pytest.mark.parametrize("section", OPTION_CLASSES)
def test_sections_of_the_loop_stand_beside_it(section):
    field = next(iter(inspect.signature(OPTION_CLASSES[section]).parameters))
    assert f"there is no option 'federated.{section}'" in error_line(recipe={"federated": {section: {field: 2}}})


@pytest.mark.parametrize("section", ["training", "evaluation", "distillation"])
def test_a_section_that_is_null_has_the_defaults(section):
    assert getattr(config(recipe={section: None}).loop, section) == OPTION_CLASSES[section]()


@pytest.mark.parametrize("name", ["perada", "fedavg_ft", "fedsim"])
def test_algorithms_have_their_names_in_recipes(name):
    algorithm = config(recipe={"federated": {"algorithm": name}}).loop.algorithm
    expected = make_algorithm(name)
    assert type(algorithm) is type(expected)
    assert vars(algorithm) == vars(expected)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("perada_no_kd", "--config method/perada_no_kd: algorithm='perada' with distill=False"),
        ("flexlora", "--config method/flexlora: algorithm='fedavg' with server_rule='svd'"),
    ],
)
def test_a_method_is_a_recipe_and_not_an_algorithm(words, message):
    expected = f"federated.algorithm: there is no algorithm {words!r}; the method of that name is a recipe, {message}"
    assert error_line(f"--federated.algorithm={words}") == expected
    assert expected in error_line(recipe={"federated": {"algorithm": words}})


def test_an_ensemble_names_its_base():
    base = {"class_path": "perada", "init_args": {"distill": False}}
    algorithm = {"class_path": "fed_ensemble", "init_args": {"base": base, "modes": 2}}
    recipe = {"federated": {"algorithm": algorithm}}
    made = config(recipe=recipe).loop.algorithm
    assert (made.modes, type(made.base).__name__, made.base.distill) == (2, "PerAda", False)
    assert isinstance(made, Algorithm)


@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("recipe", "meant"),
    [
        ({"trainer": {"rounds": 3}}, "trainer.max_epochs"),
        ({"trianer": {"max_epochs": 3}}, "trainer.max_epochs"),
        ({"round": 3}, "trainer.max_epochs"),
        ({"max_epochs": 3}, "trainer.max_epochs"),
        ({"epochs": 3}, "trainer.max_epochs or training.local_epochs"),
        ({"model": {"lr": 1}}, "training.lr_local or training.lr_personal or distillation.lr"),
        ({"model": {"learning_rate": 1}}, "training.lr_local or training.lr_personal or distillation.lr"),
        ({"model": {"lr_locl": 1}}, "training.lr_local"),
        ({"data": {"dataest": "Digits"}}, "data.dataset"),
        ({"federated": {"clients": 3}}, "data.partition.num_clients"),
        ({"distillation": {"stesp": 3}}, "distillation.steps"),
        ({"distillation": {"learning_rate": 3}}, "distillation.lr"),
        (
            {"federated": {"algorithm": {"class_path": "Ditto", "init_args": {"lambda": 3}}}},
            "federated.algorithm.prox_strength",
        ),
        ({"data": {"partition": {"init_args": {"alhpa": 3}}}}, "data.partition.alpha"),
        ({"privacy": {"sigma": 3}}, "privacy.noise_multiplier"),
        ({"client_privacy": {"epsilon": 3}}, "client_privacy.target_epsilon"),
    ],
    ids=json.dumps,
)
def test_a_wrong_key_of_a_recipe_proposes_the_nearest(recipe, meant):
    assert error_line(recipe=recipe).endswith(f"; did you mean {meant}?")


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("--num_rounds 3", "--trainer.max_epochs"),
        ("--trainer.rounds=3", "--trainer.max_epochs"),
        ("--lerning_rate=3", "--training.lr_local or --training.lr_personal or --distillation.lr"),
        ("--modl.adapter=head", "--model.adapter"),
        ("--trainer.max_epoch=3", "--trainer.max_epochs"),  # the beginning of an option, which argparse would take
        ("--round 3", "--trainer.max_epochs"),
        ("--clients 4", "--data.partition.num_clients"),
        ("--lambda=3", "--federated.algorithm.prox_strength"),
    ],
)
def test_a_wrong_option_proposes_the_nearest(words, meant):
    assert error_line(*words.split()).endswith(f"; did you mean {meant}?")


def test_a_class_without_such_an_option_names_those_that_it_has():
    assert error_line("--federated.server_rule", "trimmed_mean", "--federated.server_rule.xyzzy", "3").endswith(
        "its options are trim"
    )


def test_a_class_is_rejected_under_the_name_that_was_typed():
    assert error_line("--federated.algorithm", "xyzzy").startswith("--federated.algorithm: there is no class 'xyzzy'; ")
    assert error_line("--privacy", "true").startswith("--privacy: must be a mapping of options")


def test_a_choice_that_there_is_not_is_named_as_help_names_it():
    with pytest.raises(ArgumentError, match=r"SHELL: .*'csh'"):
        main(["completion", "csh"])


@pytest.mark.parametrize("words", [["--xyzzy"], ["deploy", "--xyzzy"], ["deploy", "keys", "--xyzzy"]])
def test_an_option_before_a_command_is_rejected_with_where_to_look(words):
    with pytest.raises(ArgumentError, match="--xyzzy"):
        main(words)


@pytest.mark.parametrize("words", ["--xyzzy=3", "--model.xyzzy=3"])
def test_nothing_is_proposed_for_what_is_like_nothing(words):
    assert "did you mean" not in error_line(words)


@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--trainer.max_epochs three", "--trainer.max_epochs: must be an integer, got 'three'"),
        ("--trainer.max_epochs=2.5", "--trainer.max_epochs: must be an integer, got '2.5'"),
        ("--seed_everything abc", "--seed_everything: must be true or false, or an integer, got 'abc'"),
        ("--data.batch_size many", "--data.batch_size: must be an integer, or 'full', got 'many'"),
        ("--training.lr_local fast", "--training.lr_local: must be a number, got 'fast'"),
        ("--training.channels_last maybe", "--training.channels_last: must be true or false, got 'maybe'"),
        ("--training.optimizer sdg", "--training.optimizer: must be one of 'sgd', 'adam', 'adamw', got 'sdg'"),
        ("--model.adapter_options 3", "--model.adapter_options: must be a mapping, {NAME: VALUE}, got '3'"),
        ("--distillation.steps abc", "--distillation.steps: must be an integer, got 'abc'"),
        (
            "--federated.algorithm=PerAda --federated.algorithm.prox_strength x",
            "--federated.algorithm.prox_strength: must be a number, got 'x'",
        ),
        ("--privacy.target_epsilon x", "--privacy.target_epsilon: must be a number, got 'x'"),
        ("--trainer.max_epochs", "--trainer.max_epochs: a value is missing; write --trainer.max_epochs VALUE"),
        (
            "--training.lr_local --seed_everything 3",
            "--training.lr_local: a value is missing; write --training.lr_local VALUE",
        ),
        ("--trainer.max_epochs", "--trainer.max_epochs: a value is missing; write --trainer.max_epochs VALUE"),
        (
            "--federated.server_rule.nope 3",
            "--federated.server_rule.nope: is an option of a class, but no class is set; set the class of "
            "--federated.server_rule first, with --federated.server_rule=CLASS",
        ),
    ],
)
def test_a_value_of_a_wrong_type_is_named_with_the_option_as_typed(words, message):
    assert error_line(*words.split()) == message


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"trainer": {"max_epochs": "three"}}, "trainer.max_epochs: must be an integer, got 'three'"),
        ({"training": {"lr_local": "fast"}}, "training.lr_local: must be a number, got 'fast'"),
    ],
)
def test_so_it_is_in_a_recipe(recipe, message):
    assert error_line(recipe=recipe) == message


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--trainer.accelerator=gpuu", "accelerator must be one of 'auto', 'cpu', "),
        ("--trainer.accelerator=tpu", "accelerator='tpu' is not available: torch finds no such device on this machine"),
        ("--trainer.devices=0", "devices must be an integer >= 1, "),
        ("--trainer.devices=abc", "devices must be an integer >= 1, "),
        ("--trainer.devices=[] --trainer.accelerator=cpu", "devices must be an integer >= 1, "),
        ("--trainer.devices=0,1 --trainer.accelerator=cpu", "devices must be an integer >= 1, "),
        ("--trainer.strategy=dpp", "strategy='dpp' is unknown; did you mean 'ddp'"),
        ("--federated.algorithm=fedpac", "--federated.algorithm: there is no class 'fedpac'; choose one of perada, "),
        ("--evaluation.metric=F1Score", "metric='F1Score' is unknown: did you mean MulticlassF1Score"),
        ("--evaluation.metric=Accuracy", "metric='Accuracy' is unknown: did you mean accuracy"),
    ],
)
def test_devices_and_names_are_rejected_in_our_words(words, message):
    assert error_line(*words.split()).startswith(message)
