# SPDX-License-Identifier: Apache-2.0
"""`commands.json` is what the parsers say, and help, rejections and completion need no more than it."""

import json
import subprocess
import sys
from importlib.metadata import version

import pytest

from perada.cli import describe, main, options
from perada.cli.completion import completion, proposals
from perada.cli.main import COMMANDS, EXISTING
from perada.cli.options import check_recipe, reject_unknown_options, stored_commands

REMEDY = "run python -m perada.cli.describe"
LARGE = {"torch", "numpy", "pytorch_lightning", "torchmetrics", "transformers", "timm", "peft", "matplotlib"}
LEAVES = [" ".join(path) for path, _ in describe.commands_of_tree(COMMANDS)]
SCRIPT = """
import atexit, json, sys
atexit.register(lambda: print(json.dumps([*sys.modules]), file=sys.stderr))
from perada.cli import entry_point
entry_point()
"""


@pytest.fixture(scope="module")
def described():
    return describe.describe()


def without_lightning(names):
    """Options that do not depend on Lightning's version; another one may have others."""
    if stored_commands()["lightning"] == version("pytorch-lightning"):
        return names
    return {name: values for name, values in names.items() if not name.startswith("trainer.")}


def test_the_file_has_every_command_and_option(described):
    assert list(stored_commands()["commands"]) == LEAVES, REMEDY
    expected = without_lightning(described["recipe_options"])
    assert without_lightning(stored_commands()["recipe_options"]) == expected, REMEDY


@pytest.mark.parametrize("command", LEAVES)
def test_help_in_the_file_is_what_the_parser_prints(command, described, capsys):
    # Words, since versions of Python break lines of a usage at other places.
    live = " ".join(described["commands"][command]["help"]).split()
    assert " ".join(stored_commands()["commands"][command]["help"]).split() == live, REMEDY
    with pytest.raises(SystemExit, match="0"):
        main([*command.split(), "--help"])
    assert capsys.readouterr().out.split() == live
    assert stored_commands()["commands"][command]["options"] == described["commands"][command]["options"], REMEDY


def test_a_changed_option_is_noticed(monkeypatch):
    """The comparison above can fail: an option that a parser gains is in what it says of itself."""
    monkeypatch.setitem(COMMANDS, "ls", ("cli.doctor:doctor", "x"))
    assert "--imports" in describe._describe_command(("ls",), "cli.doctor:doctor", "x")["options"]
    assert "--imports" not in stored_commands()["commands"]["ls"]["options"]


@pytest.mark.every(16)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("fit --help", "usage: perada fit"),
        ("test -h", "usage: perada test"),
        ("fit --config quickstart --help", "usage: perada fit"),
        ("compare --help", "usage: perada compare"),
        ("clients add --help", "usage: perada clients add"),
        ("deploy keys site --help", "usage: perada deploy keys site"),
        ("study local-gd --help", "usage: perada study local-gd"),
        ("fit --config quickstart --trainer.max_epoch 3", "--trainer.max_epoch; did you mean --trainer.max_epochs?"),
        ("test --ckpt_pth x", "--ckpt_pth; did you mean --ckpt_path?"),
        ("export run --outptu x", "--outptu; did you mean --output?"),
        ("compare quickstart --seds 3", "--seds; did you mean --seeds?"),
        ("deploy run app --xyzzy", "--xyzzy; `perada deploy run --help` lists the options"),
        ("fit --config wrong.yaml", "wrong.yaml: there is no option 'trainer.max_epoch'; did you mean trainer.max_ep"),
        ("fit --config missing.yaml", "'missing.yaml' is neither a file nor a recipe"),
        ("compare tab.yaml", "tab.yaml, line 2: a tab"),
        ("completion bash", "complete -o default -C"),
    ],
)
def test_answers_that_need_no_parser_import_nothing_large(tmp_path, words, message):
    (tmp_path / "wrong.yaml").write_text("trainer:\n  max_epoch: 3\n")
    (tmp_path / "tab.yaml").write_text("compare:\n\trecipes: [quickstart]\n")
    command = [sys.executable, "-c", SCRIPT, *words.split()]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    *said, modules = ended.stderr.splitlines()
    assert message in ended.stdout + "".join(said)
    assert {*json.loads(modules)} & LARGE == set()


@pytest.mark.parametrize(
    "words",
    [
        "--data.partition.alpha=0.1",
        "--trainer.callbacks+=EarlyStopping",
        "--trainer.callbacks.monitor=x",
        "--distillation.steps=3",
        "--model.adapter_options.r=3",
        "--privacy.max_norm=1",
        "--privacy.help",
        "--data data.yaml",
        "--print_config=comments",
        "-- --xyz",
    ],
)
def test_what_only_a_parser_can_judge_is_left_to_it(words):
    reject_unknown_options("fit", words.split())
    reject_unknown_options("compare", ["quickstart", "--algorithms", "ditto", *words.split()])


def test_options_of_another_version_of_lightning_are_left_to_the_parser(monkeypatch, tmp_path):
    monkeypatch.setattr(options, "version", lambda name: "999")
    reject_unknown_options("fit", ["--trainer.new_option=3"])
    (tmp_path / "new.yaml").write_text("trainer: {new_option: 3}")
    check_recipe(tmp_path / "new.yaml")


@pytest.mark.parametrize("recipe", ["model: 3", "federated: [1]"])
def test_a_section_that_is_none_is_rejected(recipe, tmp_path):
    (tmp_path / "wrong.yaml").write_text(recipe)
    with pytest.raises(ValueError, match=r"wrong\.yaml: '(model|federated)'"):
        check_recipe(tmp_path / "wrong.yaml")


@pytest.mark.parametrize(
    ("line", "current", "words"),
    [
        ("perada ", "", [*COMMANDS, "--help"]),
        ("perada te", "te", ["test"]),
        ("perada clients ", "", ["add", "remove", "--help"]),
        ("perada deploy keys s", "s", ["server", "site", "sign"]),
        ("perada fit --config quick", "quick", ["quickstart"]),
        ("perada fit --config=quick", "quick", ["quickstart"]),
        ("perada fit --config=quick", "--config=quick", ["--config=quickstart"]),
        ("perada fit --trainer.max_e", "--trainer.max_e", ["--trainer.max_epochs"]),
        ("perada fit --federated.algorithm feddp", "feddp", ["feddpa", "feddpa_f"]),
        ("perada fit --data.partition Dir", "Dir", ["Dirichlet"]),
        ("perada fit --training.channels_last ", "", ["true", "false", "null"]),
        ("perada compare quickst", "quickst", ["quickstart"]),
        ("perada compare quickstart --algorithms ditto flex", "flex", ["flexlora"]),
        ("perada export --form", "--form", ["--format"]),
        ("perada export run --format o", "o", ["onnx"]),
        ("perada export ", "", []),  # the shell proposes files
        ("perada fit 'open", "'open", []),
    ],
)
def test_a_shell_is_offered(line, current, words):
    assert proposals(line, current) == words


def test_bash_asks_the_program_and_zsh_by_way_of_bash(monkeypatch, capsys):
    for shell in ("bash", "zsh"):
        main(["completion", shell])
        assert capsys.readouterr().out.splitlines()[-1] == "complete -o default -C 'perada completion words' perada"
    monkeypatch.setenv("COMP_LINE", "perada fit --print_c ignored")
    monkeypatch.setenv("COMP_POINT", "20")
    completion(None, ["words", "perada", "--print_c", "fit"])
    assert capsys.readouterr().out == "--print_config\n"


def test_bash_accepts_the_script():
    main_script = subprocess.run(
        ["bash", "-c", f"{describe_script()}\ncomplete -p perada"], capture_output=True, text=True, check=True
    )
    assert "perada completion words" in main_script.stdout


def describe_script():
    from perada.cli.completion import SCRIPTS

    return SCRIPTS["bash"]


@pytest.mark.parametrize("command", EXISTING)
def test_a_path_that_does_not_exist_is_rejected_before_the_command_is_imported(command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.modules["perada.cli.main"], "import_module", None)
    with pytest.raises(FileNotFoundError, match="'nothing' does not exist"):
        main([*command.split(), "nothing"])
