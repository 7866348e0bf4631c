# SPDX-License-Identifier: Apache-2.0
"""What jsonargparse's errors say: facts for those who handle them, and one plain sentence for those who read them."""

from argparse import ArgumentError

import pytest
import yaml

from perada.cli import main
from perada.cli.messages import one_line
from perada.cli.parser_errors import missing_module, option_error
from perada.cli.runs import PeradaCLI, _option_of
from perada.core.checks import OptionError, check_number

from ..recipes import recipe

FRAGMENTS = (
    "Expected a",
    "Subtypes",
    "Not a valid",
    "value of type",
    "Parser key",
    "NestedArg",
    "Union",
    "Given value",
)


def error_of(tmp_path, *words):
    """The error that a run with these options ends in."""
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe()))
    with pytest.raises(OptionError) as caught:
        PeradaCLI(["--config", str(tmp_path / "tiny.yaml"), *words], run=False)
    return caught.value


LOGGERS = "choose one of CSVLogger, CometLogger, MLFlowLogger, "


@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("words", "option", "message"),
    [
        ("--trainer.logger foo", "trainer.logger", f"there is no class 'foo'; {LOGGERS}"),
        ("--trainer.logger 3", "trainer.logger", f"there is no class '3'; {LOGGERS}"),
        ("--trainer.logger=[foo]", "trainer.logger", f"there is no class 'foo'; {LOGGERS}"),
        ("--trainer.logger csv", "trainer.logger", "there is no class 'csv'; did you mean 'CSVLogger'?"),
        ("--trainer.logger CSVLoger", "trainer.logger", "there is no class 'CSVLoger'; did you mean 'CSVLogger'?"),
        ("--trainer.logger mine.Logger", "trainer.logger", "No module named 'mine'; it must be in the current folder"),
        ("--trainer.logger perada.data.IID", "trainer.logger", "perada.data.IID is not a subclass of Logger; use one"),
        ("--trainer.logger.foo 3", "trainer.logger.foo", "is an option of a class, but no class is set; set the"),
        ("--trainer.callbacks foo", "trainer.callbacks", "there is no class 'foo'; choose one of BackboneFinetuning, "),
        ("--trainer.callbacks=[foo]", "trainer.callbacks", "there is no class 'foo'; choose one of BackboneFinetun"),
        ("--trainer.callbacks EarlyStoping", "trainer.callbacks", "there is no class 'EarlyStoping'; did you mean"),
        ("--trainer.plugins foo", "trainer.plugins", "there is no class 'foo'; choose one of "),
        ("--trainer.strategy foo", "strategy", "choose one of ddp, "),
        ("--trainer.profiler foo", "profiler", "must be one of 'simple', 'advanced', 'pytorch', 'xla'"),
        ("--trainer.gradient_clip_algorithm foo", "gradient_clip_algorithm", "must be one of 'value', 'norm'"),
        ("--trainer.max_time foo", "max_time", "such as 00:12:00:00 for half a day"),
        ("--data.partition foo", "data.partition", "there is no class 'foo'; choose one of BalancedDirichlet, "),
        ("--data.partition Partition", "data.partition", "Partition is an abstract base class"),
        ("--data.public foo", "data.public", "there is no class 'foo'; choose one of CIFAR10, "),
        ("--data.data foo", "data.data", "accepts only Python objects; choose images with data.dataset"),
        ("--federated.algorithm foo", "federated.algorithm", "there is no class 'foo'; choose one of perada, "),
        (
            "--federated.algorithm=FedEnsemble --federated.algorithm.base foo",
            "federated.algorithm.base",
            "there is no class 'foo'; choose",
        ),
        ("--federated.server_rule foo", "federated.server_rule", "there is no class 'foo'; choose one of mean, "),
        ("--distillation foo", "distillation", "must be a mapping of options, {NAME: VALUE}, got"),
        ("--secure_sums foo", "secure_sums", "; its options are min_sites, "),
        (
            "--privacy foo",
            "privacy",
            "must be a mapping of options, {NAME: VALUE}, got 'foo'; its options are ",
        ),
    ],
)
def test_a_plain_word_for_a_class_is_rejected_with_option_value_and_remedy(tmp_path, words, option, message):
    error = error_of(tmp_path, *words.split())
    assert error.option == option
    assert message in one_line(error)
    assert error.remedy and error.remedy in one_line(error)
    assert [fragment for fragment in FRAGMENTS if fragment in one_line(error)] == []


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["--lr_locl=3"], "lr_locl"),
        (["--data.partition.alhpa=3"], "data.partition.alhpa"),
        (["--trainer.logger=CSVLogger", "--trainer.logger.save_dirr=x"], "trainer.logger.save_dirr"),
        (["--trainer.max_epochs", "three"], "trainer.max_epochs"),
    ],
)
def test_the_option_is_a_fact_of_the_error(tmp_path, words, option):
    error = error_of(tmp_path, *words)
    assert error.option == option
    assert [fragment for fragment in FRAGMENTS[1:] if fragment in one_line(error)] == []


@pytest.mark.parametrize(
    ("word", "proposal"),
    [
        ("--federated.distillation.steps=3", "--distillation.steps"),
        ("--federated.training.lr_local=3", "--training.lr_local"),
        ("--federated.privacy.max_norm=3", "--privacy.max_norm"),
    ],
)
def test_an_option_of_a_section_that_the_loop_takes_is_found_in_its_section(tmp_path, word, proposal):
    assert one_line(error_of(tmp_path, word)) == f"unrecognized arguments: {word}; did you mean {proposal}?"
    with pytest.raises(ArgumentError, match=rf"unrecognized.*{proposal}\?"):
        main(["fit", word])


def test_a_flag_that_print_config_does_not_have_is_rejected(tmp_path):
    error = error_of(tmp_path, "--print_config=foo")
    assert (error.option, error.value) == ("print_config", "foo")
    assert one_line(error).startswith(
        "--print_config: must be skip_default, skip_unset or both with a comma between, got 'foo'"
    )


def test_a_message_about_something_else_is_left_alone():
    assert option_error("the disk is full", {}, ["training.lr_local"]) is None
    assert missing_module("No module named 'mine'") is None
    text = "Problem with given class_path 'mine.Net':\n  No module named 'mine'"
    assert missing_module(text) == ("mine.Net", "mine")


def test_handlers_read_the_attributes_and_not_the_text():
    """`perada check` leaves out the option that an error holds, whatever its message looks like."""
    recipes = [{"training": {"lr_local": 3, "lr_personal": 4}}]
    about_one = OptionError("lr_personal=4 looks odd, since another one is rejected", name="lr_local", value=3)
    result = _option_of(about_one, recipes, [])
    assert result is not None
    result.remove()
    assert recipes == [{"training": {"lr_personal": 4}}]
    assert _option_of(ValueError("lr_personal must be smaller, got 4"), recipes, []) is None


def test_an_error_of_a_section_has_the_section_in_its_option():
    with pytest.raises(OptionError) as caught:
        check_number("privacy: max_norm", -2, gt=0)
    assert (caught.value.option, caught.value.value) == ("privacy.max_norm", -2)
    assert str(caught.value) == f"privacy: max_norm {caught.value.remedy}, got -2"


@pytest.mark.parametrize(
    ("base", "option", "remedy"),
    [
        ("fedvag", "federated.algorithm.base", "did you mean 'fedavg'?"),
        ({"class_path": "Dito"}, "federated.algorithm.base", "did you mean 'ditto'?"),
        (
            {"class_path": "Ditto", "init_args": {"prox_strenth": 1.0}},
            "federated.algorithm.base",
            "did you mean federated.algorithm.base.prox_strength?",
        ),
    ],
    ids=["word", "class", "option"],
)
def test_a_misspelt_nested_class_or_option_is_named_with_its_place(tmp_path, base, option, remedy):
    algorithm = {"class_path": "FFALoRA", "init_args": {"base": base}}
    path = tmp_path / "nested.yaml"
    path.write_text(yaml.safe_dump({"federated": {"algorithm": algorithm}}))
    message = str(error_of(tmp_path, "--config", str(path)))
    assert message.startswith(f"{option}: ") and message.endswith(remedy)
