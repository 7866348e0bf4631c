# SPDX-License-Identifier: Apache-2.0
"""What `--help` shows of the commands that run recipes."""

import inspect
import re
from pathlib import Path
from typing import Literal

import pytest

from perada import Evaluation, FederatedClassifier, FederatedLoop, Training
from perada.api import OPTION_CLASSES
from perada.cli import main
from perada.cli.help_format import HelpFormatter, new_parser
from perada.cli.options import stored_commands
from perada.cli.parser import MOST_USED, TRAINER_TEXTS
from perada.cli.runs import PeradaCLI
from perada.data import FederatedDataModule


def help_output(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert not ended.value.code
    return capsys.readouterr().out


def options(text):
    """The names that stand at the beginning of a line."""
    lines = [line for line in text.splitlines() if line.startswith("  -")]
    return [word.strip(",").removeprefix("--") for line in lines for word in line.split() if word.startswith("-")]


@pytest.mark.parametrize("command", ["test", "predict"])
def test_a_command_makes_no_parser_of_the_others(command, capsys):
    with pytest.raises(SystemExit):
        PeradaCLI([command, "--help"])
    assert f"perada {command}" in capsys.readouterr().out
    parts = next(parts for (subcommand, *_), parts in PeradaCLI.parsers.items() if subcommand == command)
    assert [*parts["_subcommand_parsers"]] == [command]


@pytest.mark.parametrize("command", ["fit", "test"])
def test_help_is_short_and_has_every_option_of_ours(command, capsys):
    text = help_output(capsys, command, "--help")
    assert len(text.splitlines()) < 300
    assert "torch.nn.modules" not in text
    classes = {"model": FederatedClassifier, "data": FederatedDataModule, "federated": FederatedLoop}
    classes |= {"training": Training, "evaluation": Evaluation}
    expected = {f"{section}.{name}" for section, kind in classes.items() for name in inspect.signature(kind).parameters}
    linked = {"model.image_size", "federated.seed", "data.data", *(f"federated.{name}" for name in OPTION_CLASSES)}
    assert expected - linked <= set(options(text))


def test_what_most_need_comes_first(capsys):
    result = options(help_output(capsys, "fit", "--help"))
    assert [name for name in result if name in MOST_USED] == MOST_USED
    assert max(result.index(name) for name in MOST_USED) < min(
        map(result.index, {*result} & {"training.momentum", "data.flip"})
    )


def test_all_has_those_of_lightning_and_a_word_finds_some(capsys):
    every = help_output(capsys, "fit", "--help=all")
    assert "--trainer.sync_batchnorm" in every
    assert "--trainer.sync_batchnorm" not in help_output(capsys, "fit", "--help", "--config", "quickstart")
    assert options(help_output(capsys, "fit", "--help", "lr_local")) == ["training.lr_local"]
    assert options(help_output(capsys, "fit", "--help", "sync_b")) == ["trainer.sync_batchnorm"]


def test_what_is_explained_here_is_an_option_and_a_word_in_no_name_is_rejected(capsys):
    known = {action.dest for action in PeradaCLI(["--config", "quickstart"], run=False).parser._actions}
    assert {*TRAINER_TEXTS, *MOST_USED} <= known
    with pytest.raises(ValueError, match="--help xyzzy"):
        main(["fit", "--help", "xyzzy"])


PYTHON = re.compile(
    r"<class|\btype: |\w\[(?:str|int|float|'|\.\.\.)|Union\[|``|:\w+:`|\x08|Path to a configuration|\bNone\b|\bFalse\b"
)
"""What a reader of help would have to know Python, Sphinx or jsonargparse for."""


@pytest.mark.parametrize("command", stored_commands()["commands"])
def test_no_help_needs_python(command):
    text = " ".join("\n".join(stored_commands()["commands"][command]["help"]).split())
    assert PYTHON.findall(text) == []


@pytest.mark.parametrize(
    "words", ["--data.partition.help=Dirichlet", "--privacy.help", "--federated.algorithm.help=PerAda"]
)
def test_no_help_of_a_class_needs_python(words, capsys):
    text = help_output(capsys, "fit", words)
    assert "(default: " in text
    assert PYTHON.findall(text.partition("\n")[2]) == []


def test_help_of_all_options_adds_no_types(capsys):
    text = help_output(capsys, "fit", "--help=all")
    for python in ("<class", "Union[", "(type: "):
        assert python not in text


@pytest.mark.parametrize(("command", "use"), [("test", "to score"), ("predict", "that predict"), ("fit", "resume")])
def test_a_checkpoint_is_explained_by_its_use(command, use, capsys):
    with pytest.raises(SystemExit):
        PeradaCLI([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    described = text.partition("--ckpt_path Checkpoint ")[2].partition(" --")[0]
    assert use in described
    assert ("resume" in described) is (command == "fit")


def test_options_are_shown_as_they_are_typed():
    parser = new_parser("perada x")
    parser.add_argument("where", type=Path, help="A.")
    parser.add_argument("-r", "--rounds", type=int | None, default=None, help="B.")
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="``C``.")
    parser.add_argument("--names", type=list[str] | None, default=None, help="D.")
    parser.add_argument("--kind", type=Literal["one", "two"], required=True, help="A :class:`~a.b.Kind`.")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1], help="E.")
    parser.add_argument("--ages", type=tuple[int, ...], default=(1, 2), help="F.")
    parser.add_argument("--fast", type=bool, default=False, help="G.")
    parser.add_argument("--force", action="store_true", help="H.")
    assert parser.formatter_class is HelpFormatter
    options = [" ".join(line.split()) for line in parser.format_help().splitlines()]
    for line in (
        "WHERE A.",
        "-r, --rounds N B.",
        "--folder PATH C. (default: runs)",
        "--names [NAME,...] D.",
        "--kind {one,two} A Kind. (required)",
        "--seeds N [N ...] E. (default: 0 1)",
        "--ages [N,...] F. (default: [1, 2])",
        "--fast {true,false} G. (default: false)",
        "--force H.",
    ):
        assert line in options
