# SPDX-License-Identifier: Apache-2.0
"""The ``perada`` program: its commands, its files, its errors."""

import csv
import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import jsonargparse
import pytest
import torch
import yaml

import perada
from perada.algorithms import ALGORITHMS, Algorithm, make_algorithm
from perada.cli import entry_point, main
from perada.cli.main import COMMANDS, STUDIES
from perada.cli.parser import spelt_out
from perada.cli.runs import PeradaCLI
from perada.lightning import FederatedClassifier
from perada.tasks import Classification

QUICKSTART = Path(perada.__file__).parent / "recipes" / "quickstart.yaml"
TINY = {
    "seed_everything": 3,
    "trainer": {"max_epochs": 2, "accelerator": "cpu", "enable_progress_bar": False},
    "model": {"backbone": "test_resnet", "pretrained": False, "adapter": "head"},
    "data": {
        "dataset": "Digits",
        "partition": {"class_path": "Dirichlet", "init_args": {"num_clients": 4, "alpha": 1.0}},
        "train_limit": 80,
        "test_limit": 40,
        "public_fraction": 0.1,
        "image_size": 16,
        "batch_size": 8,
    },
    "federated": {"clients_per_round": 2},
    "training": {"lr_local": 0.1, "lr_personal": 0.1, "local_steps": 2},
    "distillation": {"steps": 1, "batch_size": 4},
}
MINE = '''
from perada import Algorithm

class Boosted(Algorithm):
    """FedAvg that multiplies the mean."""

    def __init__(self, factor: float = 1.0):
        self.factor = factor

    def server_step(self, server):
        return {key: self.factor * value for key, value in super().server_step(server).items()}
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working directory with a recipe."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    return tmp_path


def perada_says(monkeypatch, capsys, *words):
    """Run the program; its exit code and the last line of what it wrote to stderr."""
    monkeypatch.setattr(sys, "argv", ["perada", *words])
    monkeypatch.setattr(sys, "path", list(sys.path))
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        entry_point()
    assert isinstance(stop.value.code, str)  # which Python prints to stderr, and exits with 1
    return stop.value.code


def version(folder, number):
    return folder / "lightning_logs" / f"version_{number}"


def test_fit_fills_the_run_folder_and_prints_the_clients(folder, capsys):
    main(["fit", "--config", "tiny.yaml", "--federated.clients_per_round=3", "--distillation.steps=0"])
    output = capsys.readouterr().out
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in output.splitlines() if line[:1] == "|"]
    assert [row[0] for row in table[2:]] == ["0", "1", "2", "3", "mean ± std"]
    run = version(folder, 0)
    assert "Run folder: ./lightning_logs/version_0" in output
    result = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    saved = {"checkpoints/last.ckpt", "checkpoints/last.previous.ckpt"}
    assert result == {"config.yaml", "metrics.csv", "partition.json", "run.json"} | saved
    words = "perada fit --config tiny.yaml --federated.clients_per_round=3 --distillation.steps=0".split()
    assert json.loads((run / "run.json").read_text())["command"] == words
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["federated"]["clients_per_round"] == 3
    assert config["distillation"]["steps"] == 0
    assert config["seed_everything"] == 3
    partition = json.loads((run / "partition.json").read_text())
    sizes = [len(rows) for rows in partition["train"]]
    assert [row[1] for row in table[2:6]] == [str(size) for size in sizes]
    assert sum(sizes) == 72
    rounds = list(csv.DictReader((run / "metrics.csv").read_text().splitlines()))
    assert {row["epoch"] for row in rounds} == {"0", "1"}


@pytest.mark.slow
def test_the_saved_config_runs_the_same_again(folder):
    main(["fit", "--config", "tiny.yaml"])
    main(["fit", "--config", "lightning_logs/version_0/config.yaml"])
    states = [torch.load(version(folder, n) / "checkpoints" / "last.ckpt", weights_only=True) for n in (0, 1)]
    one, two = (saved["perada"]["federation"]["global"] for saved in states)
    assert all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.slow
def test_ckpt_path_last_goes_on_bit_for_bit(folder):
    main(["fit", "--config", "tiny.yaml", "--trainer.max_epochs=3", "--trainer.default_root_dir=whole"])
    main(["fit", "--config", "tiny.yaml", "--trainer.max_epochs=1"])
    main(["fit", "--config", "tiny.yaml", "--trainer.max_epochs=3", "--ckpt_path", "last"])
    paths = version(folder / "whole", 0), version(folder, 1)
    uninterrupted, resumed = (
        torch.load(path / "checkpoints" / "last.ckpt", weights_only=True)["perada"] for path in paths
    )
    assert uninterrupted["metrics"] == resumed["metrics"]
    kept = uninterrupted["federation"]["clients"]["rows"]
    other = resumed["federation"]["clients"]["rows"]
    assert kept
    assert kept.keys() == other.keys()
    assert all(torch.equal(row, other[client]) for client, row in kept.items())
    partitions = [json.loads((path / "partition.json").read_text()) for path in paths]
    assert partitions[0] == partitions[1]


@pytest.mark.slow
def test_lightnings_default_checkpoint_is_found_too(folder):
    checkpoint = ["--trainer.callbacks+=ModelCheckpoint"]
    main(["fit", "--config", "tiny.yaml", "--trainer.max_epochs=1", *checkpoint])
    assert [path.name for path in (version(folder, 0) / "checkpoints").iterdir()] == ["epoch=0-step=2.ckpt"]
    cli = PeradaCLI(["--config", "tiny.yaml"], run=False)
    assert cli.trainer.max_epochs == 2
    with pytest.warns(UserWarning, match="dirpath"):
        main(["fit", "--config", "tiny.yaml", "--ckpt_path=last", *checkpoint])
    saved = torch.load(version(folder, 1) / "checkpoints" / "epoch=1-step=4.ckpt", weights_only=True)
    assert [record["round"] for record in saved["perada"]["metrics"]["rounds"]] == [0, 1]
    main(["export", "lightning_logs/version_1", "--output", "out"])
    assert perada.Run.load("out").num_clients == 4


def test_fit_test_predict_and_export_agree(folder, capsys):
    main(["fit", "--config", "tiny.yaml"])
    fitted = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    main(["test", "--config", "tiny.yaml", "--ckpt_path", "last"])
    tested = capsys.readouterr().out.splitlines()
    assert [line for line in tested if line.startswith("| ")] == fitted
    main(["predict", "--config", "tiny.yaml", "--ckpt_path", "last"])
    path = Path(capsys.readouterr().out.split("Predictions: ")[1].strip())
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert len(rows) == 40
    assert [int(row["image"]) for row in rows] == list(range(40))
    main(["export", "lightning_logs/version_0", "--output", "out"])
    run = perada.Run.load("out")
    x, y, owner = next(iter(prepare_batches(PeradaCLI(["--config", "tiny.yaml"], run=False).datamodule)))
    for client, row in enumerate(fitted[1:5]):
        mine = owner == client
        predicted = run.personal(client)(x).argmax(1)
        accuracy = [100 * (predicted == y)[part].float().mean().item() for part in (mine, slice(None))]
        assert [float(cell) for cell in row.split("|")[3:5]] == pytest.approx(accuracy, abs=0.01)
        assert [int(row["personal"]) for row, own in zip(rows, mine, strict=True) if own] == predicted[mine].tolist()
    assert [int(row["label"]) for row in rows] == y.tolist()
    assert [int(row["client"]) for row in rows] == owner.tolist()
    assert [int(row["global"]) for row in rows] == run.global_model()(x).argmax(1).tolist()


def prepare_batches(data):
    """Test batches as the trainer's, for a model of three channels."""
    module = perada.FederatedClassifier("test_resnet", pretrained=False)
    module.build(10, Classification(), 0)
    data.configure_rounds(
        seed=3, clients_per_round=None, phases=[perada.data.Phase()], image_config=module.adapted.backbone.image_config
    )
    return [data.prepare(batch) for batch in data.val_dataloader()]


def test_short_class_names_and_their_options(folder):
    words = ["--config", "tiny.yaml", "--federated.algorithm=Ditto", "--federated.algorithm.prox_strength=0.25"]
    cli = PeradaCLI([*words, "--data.partition=IID", "--data.partition.num_clients=3"], run=False)
    assert type(cli.loop.algorithm).__name__ == "Ditto"
    assert cli.loop.algorithm.prox_strength == 0.25
    assert cli.loop.seed == 3
    assert cli.datamodule.partition_dict()["num_clients"] == 3


def test_algorithms_have_the_names_of_the_python_call():
    for name in ALGORITHMS:
        algorithm = make_algorithm(name)
        assert words_of(name) == (type(algorithm).__name__, options_of(algorithm)), name


def words_of(name):
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Algorithm, "federated.algorithm")
    built = parser.instantiate_classes(parser.parse_args(spelt_out([f"--federated.algorithm={name}"])))
    algorithm = built["federated.algorithm"]
    return type(algorithm).__name__, options_of(algorithm)


def options_of(algorithm):
    """What it holds, but for its base and the base's methods."""
    return {k: v for k, v in vars(algorithm).items() if not isinstance(v, Algorithm) and not callable(v)}


def test_names_may_follow_as_words_of_their_own_and_name_the_base_of_an_ensemble(folder):
    words = "--config tiny.yaml --federated.algorithm fed_ensemble --federated.algorithm.base perada"
    words += " --federated.algorithm.base.distill false --federated.server_rule median"
    cli = PeradaCLI(words.split(), run=False)
    algorithm = cli.loop.algorithm
    assert (type(algorithm).__name__, type(algorithm.base).__name__) == ("FedEnsemble", "PerAda")
    assert not algorithm.base.distill
    assert type(cli.loop.server_rule).__name__ == "Median"


def test_server_rules_have_the_names_of_the_python_call(folder):
    words = ["--config", "tiny.yaml", "--federated.algorithm=fedavg", "--federated.server_rule=trimmed_mean"]
    cli = PeradaCLI([*words, "--federated.server_rule.trim=0.4"], run=False)
    assert (type(cli.loop.algorithm).__name__, type(cli.loop.server_rule).__name__) == ("FedAvg", "TrimmedMean")
    assert cli.loop.server_rule.trim == 0.4


def test_an_algorithm_of_the_users_own_module(folder, monkeypatch):
    (folder / "my_module.py").write_text(MINE)
    (folder / "mine.yaml").write_text(
        "federated: {algorithm: {class_path: my_module.Boosted, init_args: {factor: 0.0}}}\n"
    )
    monkeypatch.setattr(sys, "argv", ["perada", "fit", "--config", "tiny.yaml", "--config", "mine.yaml"])
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(folder))])
    entry_point()
    saved = torch.load(version(folder, 0) / "checkpoints" / "last.ckpt", weights_only=True)["perada"]["federation"]
    assert all(not value.any() for value in saved["global"].values())


MINE_AND_ITS_NEIGHBOUR = """
from perada.algorithms import FedAvg
import my_neighbour

class Boosted(FedAvg):
    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

class Rule(my_neighbour.Mean):
    pass
"""


def program(folder, *words, code=0):
    """Run the program as it is installed, in ``folder``; what it printed."""
    command = [str(Path(sys.executable).parent / "perada"), *words]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert ended.returncode == code, ended.stderr[-3000:]
    return ended.stdout + ended.stderr


FIT = ["fit", "--config", "tiny.yaml", "--trainer.max_epochs=1"]


@pytest.mark.parametrize(
    "commands",
    [
        pytest.param([FIT], marks=pytest.mark.slow),
        pytest.param(
            [
                ["--help"],
                FIT,
                ["export", "lightning_logs/version_0", "--output", "out"],
                ["compare", "tiny.yaml", "--jobs", "2", "--trainer.max_epochs=1"],
            ],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_no_file_of_the_folder_is_run_that_no_recipe_names(folder, commands):
    """Whatever libraries look for: what the environment could import and has not, here under its name."""
    seen = "import sys\nopen('run_by_mistake.txt', 'a').write(__name__ + '\\n')\nraise ImportError\n"
    asked = """
        tabulate wandb tensorboard tensorboardX mlflow comet_ml neptune litlogger rich ipywidgets IPython colorama
        pandas pyarrow accelerate bitsandbytes tensorflow jax flax keras onnx onnxruntime deepspeed apex xformers
        flash_attn tiktoken sentencepiece librosa cv2 av decord datasets evaluate ruyaml omegaconf typeshed_client
        docstring_parser argcomplete torch_xla habana_frameworks lightning_habana hydra sitecustomize usercustomize
        a_module_of_ones_own
    """.split()
    missing = [name for name in asked if importlib.util.find_spec(name) is None]
    assert {"tensorflow", "jax", "a_module_of_ones_own"} <= set(missing)
    for name in missing:
        (folder / f"{name}.py").write_text(seen)
    for words in commands:
        program(folder, *words)
    assert not (folder / "run_by_mistake.txt").exists()


@pytest.fixture
def my_module(folder):
    """Two modules in the folder, of which one imports the other."""
    (folder / "my_part.py").write_text(MINE_AND_ITS_NEIGHBOUR)
    (folder / "my_neighbour.py").write_text("from perada.server.rules import Mean\n")
    yield folder
    for name in ("my_part", "my_neighbour"):
        sys.modules.pop(name, None)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "words",
    [
        ["--federated.algorithm=my_part.Boosted"],
        ["--federated.algorithm", "my_part.Boosted"],
        ["--federated", "part.yaml"],
        ["--federated.algorithm", "{class_path: my_part.Boosted, init_args: {factor: 0.5}}"],
        ["--config", "part.json"],
    ],
)
def test_classes_of_the_folder_are_found_where_recipes_and_options_name_them(my_module, words):
    """As class_path, by its short form, as an option, in a file that an option names."""
    (my_module / "part.yaml").write_text("{algorithm: my_part.Boosted}\n")
    (my_module / "part.json").write_text('{"federated": {"algorithm": {"class_path": "my_part.Boosted"}}}')
    before = list(sys.path)
    loop = PeradaCLI(["--config", "tiny.yaml", *words], run=False).loop
    assert type(loop.algorithm).__name__ == "Boosted"
    assert sys.path == before
    assert str(my_module) not in sys.path


def test_a_module_of_the_folder_that_cannot_be_imported_is_named(my_module):
    (my_module / "my_neighbour.py").write_text("raise RuntimeError('not today')\n")
    message = "'Boosted' cannot be imported from 'my_part' in this folder: RuntimeError: not today; fix it"
    with pytest.raises(ValueError, match=message):
        PeradaCLI(["--config", "tiny.yaml", "--federated.algorithm=my_part.Boosted"], run=False)
    assert str(my_module) not in sys.path


@pytest.mark.slow
def test_processes_of_a_comparison_find_classes_of_the_folder(my_module):
    words = ["--federated.algorithm=my_part.Boosted", "--federated.server_rule", "my_part.Rule"]
    notes = textwrap.dedent("""
        import os, pathlib

        def note(what):
            pathlib.Path(f"{what}_used_in_{os.getpid()}").touch()

        Boosted.server_step = lambda self, server: note("algorithm") or FedAvg.server_step(self, server)
        Rule.__call__ = lambda self, given: note("rule") or my_neighbour.Mean.__call__(self, given)
    """)
    with (my_module / "my_part.py").open("a") as module:
        module.write(notes)
    program(my_module, "compare", "tiny.yaml", "--jobs", "2", "--seeds", "0", "1", *words, "--trainer.max_epochs=1")
    assert len(list(my_module.glob("algorithm_used_in_*"))) == 2
    assert len(list(my_module.glob("rule_used_in_*"))) == 2


def test_a_rejected_run_leaves_no_folder(folder, monkeypatch, capsys):
    perada_says(monkeypatch, capsys, "fit", "--config", "tiny.yaml", "--federated.clients_per_round=9")
    assert [path.name for path in folder.iterdir()] == ["tiny.yaml"]


def test_version(capsys):
    main(["--version"])
    own, others = capsys.readouterr().out.splitlines()
    assert own == f"perada {importlib.metadata.version('perada')}"
    libraries = "torch pytorch-lightning peft timm opacus flwr".split()
    for name in libraries:
        there = {each.name for each in importlib.metadata.distributions()} >= {name}
        assert f"{name} {importlib.metadata.version(name) if there else 'not installed'}" in others


@pytest.mark.every(4)
@pytest.mark.parametrize("name", ["quickstart", "chexpert/perada/sample", "shakespeare", "fashion_mnist_small"])
def test_the_printed_configuration_is_the_same_when_it_is_run(folder, capsys, name):
    printed = []
    for words in (["--config", name], ["--config", "printed.yaml"]):
        with pytest.raises(SystemExit):
            main(["fit", *words, "--print_config"])
        printed.append(yaml.safe_load(capsys.readouterr().out))
        (folder / "printed.yaml").write_text(yaml.safe_dump(printed[-1]))
    assert printed[0] == printed[1]


@pytest.mark.slow
def test_without_a_logger_nothing_is_written(folder, capsys):
    main(["fit", "--config", "tiny.yaml", "--trainer.logger=false", "--trainer.max_epochs=1"])
    with pytest.warns(UserWarning, match=r"`perada predict`.*--ckpt_path"):
        main(["predict", "--config", "tiny.yaml", "--trainer.logger=false"])
    assert [path.name for path in folder.iterdir()] == ["tiny.yaml"]
    assert "Run folder" not in capsys.readouterr().out


@pytest.mark.every(3)
@pytest.mark.parametrize("rounds", ["0", "-2"])
@pytest.mark.parametrize("command", ["fit", "check"])
def test_no_rounds_are_rejected(folder, capsys, command, rounds):
    message = f"max_epochs must be an integer >= 1, got {rounds}; it is the number of rounds, --trainer.max_epochs"
    if command == "check":
        with pytest.raises(SystemExit):
            main(["check", "tiny.yaml", f"--trainer.max_epochs={rounds}"])
        assert f"- {message}" in capsys.readouterr().out
    else:
        with pytest.raises(ValueError, match=re.escape(message)):
            main(["fit", "--config", "tiny.yaml", "--trainer.max_epochs", rounds])
    assert [path.name for path in folder.iterdir()] == ["tiny.yaml"]


def test_cp_copies_and_does_not_overwrite(folder, capsys, monkeypatch):
    main(["cp", "quickstart", "new/mine.yaml"])
    assert (folder / "new" / "mine.yaml").read_bytes() == QUICKSTART.read_bytes()
    main(["cp", "quickstart", "new"])
    assert (folder / "new" / "quickstart.yaml").is_file()
    main(["cp", "method/ditto", "other/folder/"])
    assert (folder / "other" / "folder" / "ditto.yaml").is_file()
    (folder / "new" / "mine.yaml").write_text("edited")
    output = perada_says(monkeypatch, capsys, "cp", "quickstart", "new/mine.yaml")
    assert output == "perada: error: 'new/mine.yaml' already exists; choose a different destination or add --force"
    assert (folder / "new" / "mine.yaml").read_text() == "edited"
    main(["cp", "quickstart", "new/mine.yaml", "--force"])
    assert (folder / "new" / "mine.yaml").read_bytes() == QUICKSTART.read_bytes()


@pytest.mark.slow
def test_report_prints_the_rounds(folder, capsys):
    main(["fit", "--config", "tiny.yaml"])
    capsys.readouterr()
    main(["report", "lightning_logs/version_0"])
    assert [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines()][2:] == ["1", "2"]


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("ls", 141),
        ("ls paper", 141),
        ("fit --help", 141),
        ("completion bash", 141),
        pytest.param("schema", 141, marks=pytest.mark.slow),
        ("--help", 141),
        ("deploy", 141),
    ],
)
def test_a_closed_pipe_ends_a_command_without_a_message(folder, words, status):
    """As in ``perada ls | head``."""
    ended = run_into_closed_pipe(words)
    assert (ended.returncode, ended.stderr) == (status, "")


def test_an_error_is_printed_although_the_output_is_not_read(folder):
    ended = run_into_closed_pipe("fti")
    assert (ended.returncode, ended.stderr) == (1, "perada: error: there is no command 'fti'; did you mean 'fit'?\n")


def test_a_closed_pipe_of_errors_ends_a_command_too(folder):
    command = f"{Path(sys.executable).parent / 'perada'} fti 2>&1 | true"
    ended = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, check=False)
    assert ended.stderr == ""


@pytest.mark.parametrize(
    ("redirection", "status", "errors"),
    [
        (">&-", 0, ""),
        ("2>&-", 0, ""),
        (
            ">/dev/full",
            1,
            "perada: error: standard output cannot be written: No space left on device; redirect it to another file\n",
        ),
    ],
)
@pytest.mark.every(2)
def test_an_output_that_cannot_be_written_to_gives_no_traceback(folder, redirection, status, errors):
    command = f"{Path(sys.executable).parent / 'perada'} ls {redirection}"
    ended = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, check=False)
    # The status too: with 2>&-, a traceback could not be seen.
    assert (ended.returncode, ended.stderr) == (status, errors)
    assert ("cifar10" in ended.stdout) is (redirection == "2>&-")


def test_a_closed_pipe_between_processes_is_an_error(monkeypatch, capsys):
    def write_into_closed_pipe():
        with open_pipe_without_reader() as pipe:
            pipe.write(b"x")

    monkeypatch.setattr(sys.modules["perada.cli.main"], "overview", write_into_closed_pipe)
    assert perada_says(monkeypatch, capsys, "ls") == "perada: error: [Errno 32] Broken pipe"


def run_into_closed_pipe(words):
    command = [str(Path(sys.executable).parent / "perada"), *words.split()]
    with open_pipe_without_reader() as pipe:
        return subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, check=False)


def open_pipe_without_reader():
    read_end, write_end = os.pipe()
    os.close(read_end)
    return open(write_end, "wb", buffering=0)


def ending(*words):
    """The status with which the program ends; 0 where it just returns."""
    try:
        main(words)
    except SystemExit as stop:
        return stop.code
    return 0


def leaves(tree, *before):
    """Every command of the tree, as words."""
    for name, (what, _) in tree.items():
        yield from [(*before, name)] if isinstance(what, str) else leaves(what, *before, name)


@pytest.mark.parametrize(("words", "tree"), [([], COMMANDS), (["study"], STUDIES)])
def test_help_lists_the_commands(words, tree, capsys):
    assert ending(*words) == 0
    bare = capsys.readouterr().out
    assert ending(*words, "--help") == 0
    assert capsys.readouterr().out == bare
    listed = bare[bare.index("Available subcommands") :]
    assert re.findall(r"^    (\S+)", listed, flags=re.MULTILINE) == [*tree]
    flat = " ".join(bare.split())
    assert [line for _, line in tree.values() if line not in flat] == []


@pytest.mark.parametrize("words", [*leaves(COMMANDS)], ids=" ".join)
def test_every_command_explains_its_options(words, capsys):
    assert ending(*words, "--help") == 0
    output = capsys.readouterr().out.replace("[options] ", "")
    assert output.startswith(f"usage: perada {' '.join(words)}")
    assert "-h, --help" in output


FIT = ("fit", "--config", "tiny.yaml")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("fti",), "there is no command 'fti'; did you mean 'fit'?"),
        (("xyzzy",), "there is no command 'xyzzy'; `perada --help` lists the commands"),
        (("verison",), "there is no command 'verison'; did you mean 'version'?"),
        (("validate", "--config", "tiny.yaml"), "there is no command 'validate'; did you mean 'test'?"),
        (("forget", "run"), "there is no command 'forget'; did you mean 'clients remove'?"),
        (("personalize", "run"), "there is no command 'personalize'; did you mean 'clients add'?"),
        (("study", "validate"), "there is no command 'validate'; `perada study --help` lists the commands"),
        (("study", "fed-ensembel"), "there is no command 'fed-ensembel'; did you mean 'fed-ensemble'?"),
        (("study", "xyzzy"), "there is no command 'xyzzy'; `perada study --help` lists the commands"),
        (("--long",), "unrecognized arguments: --long"),
        (("ls", "--long"), "unrecognized arguments: --long; `perada ls --help` lists the options"),
        (("report", "x", "--outptu", "y"), "unrecognized arguments: --outptu; did you mean --output?"),
        (("predict",), "the following arguments are required: RUN, --images"),
        (("fit", "--config", "quickstar"), "'quickstar' is neither a file nor a recipe; did you mean 'quickstart'?"),
        (("fit", "--config=none.yaml"), "'none.yaml' is neither a file nor a recipe; `perada ls` lists the recipes"),
        (("cp", "quikstart", "x.yaml"), "did you mean 'quickstart'?"),
        (("report", "nowhere"), "'nowhere' does not exist; pass a run folder, for example lightning_logs/version_0"),
        (("fit",), "no recipe; use perada fit --config RECIPE, with one of those that `perada ls` lists"),
        (("fit", "quickstart"), "'quickstart' is not an option; use perada fit --config quickstart"),
        (("compare", "tiny.yaml", "--output", "."), "--output=. is a folder; choose a file, such as"),
        (
            ("compare", "tiny.yaml", "--output", "tiny.yaml/a.json"),
            "--output=tiny.yaml is a file; choose a folder",
        ),
        (("cp", "quickstart", "tiny.yaml/a.yaml"), "destination=tiny.yaml is a file; choose a folder"),
        (("init", "--output", "tiny.yaml/a.yaml"), "--output=tiny.yaml is a file; choose a folder"),
        (("data", "inspect", ".", "--output", "tiny.yaml/a.png"), "--output=tiny.yaml is a file; choose a folder"),
        (("deploy", "init", "quickstart", "tiny.yaml/a"), "folder=tiny.yaml is a file; choose a folder"),
        (("deploy", "keys", "server", "tiny.yaml/a", "--host=a.org"), "folder=tiny.yaml/a cannot be created, since"),
        (("pretrain", "--output=tiny.yaml/a.safetensors"), "output=tiny.yaml is a file; choose a folder"),
        (("export", "nowhere", "--output", "x"), "'nowhere' does not exist; pass a run: a folder written by"),
        (("export", "."), "the following arguments are required: --output; `perada export --help` explains them"),
        (("study", "fed-ensemble"), "the following arguments are required: --output"),
        (("compare",), "the following arguments are required: RECIPE"),
        (("compare", "tiny.yaml", "--jobs=0"), "jobs: must be a number >0, got 0"),
        (("compare", "tiny.yaml", "--threads", "-1"), "threads: must be a number >0, got -1"),
        (("compare", "tiny.yaml", "--seeds", "0", "x"), "error: --seeds: must be an integer, got 'x'"),
        (("compare", "tiny.yaml", "--algorithms", "perda"), "'perda'"),
        (("pretrain", "--dataset=X", "--output=x"), "error: --dataset: must be one of 'FashionMNIST', 'Digits',"),
        ((*FIT, "--modl.adapter=head"), "unrecognized arguments: --modl.adapter; did you mean --model.adapter?"),
        ((*FIT, "--model.backbone=resnet19"), "backbone 'resnet19' is not a timm model; did you mean resnet18"),
        ((*FIT, "--model.adapter=heads"), "adapter 'heads' is unknown"),
        ((*FIT, "--training.lr_local=-1"), "lr_local must be a finite number >= 0, got -1.0"),
        ((*FIT, "--training.lr_local=fast"), "error: --training.lr_local: must be a number, got 'fast'"),
        ((*FIT, "--model.num_classes=7"), "num_classes=7 does not match"),
        (
            (*FIT, "--training.optimizer=lion"),
            "error: --training.optimizer: must be one of 'sgd', 'adam', 'adamw', got 'lion'",
        ),
        ((*FIT, "--data.partition.alpha=-1"), "alpha must be a finite number > 0, got -1.0"),
        ((*FIT, "--data.partition.beta=1"), "'beta' is not accepted"),
        ((*FIT, "--data.partition.num_clients=100"), "100"),
        (
            (*FIT, "--data.partition=Dirichle"),
            "data.partition: there is no class 'Dirichle'; did you mean 'Dirichlet'?",
        ),
        ((*FIT, "--data.dataset=Digit"), "data.dataset: there is no class 'Digit'; did you mean 'Digits'?"),
        ((*FIT, "--data.public_fraction=0"), "no public set"),
        ((*FIT, "--federated.algorithm=Dito"), "federated.algorithm: there is no class 'Dito'; did you mean 'ditto'?"),
        ((*FIT, "--federated.algorithm=Ditto", "--federated.algorithm.prox=1"), "'prox' is not accepted"),
        (
            (*FIT, "--federated.server_rule=bad.Nope"),
            "error: --federated.server_rule: No module named 'bad'; it must be in",
        ),
        (
            (*FIT, "--federated.server_rule=perada.server.Nope"),
            "error: --federated.server_rule: module 'perada.server' has no attribute 'Nope'",
        ),
        (
            (*FIT, "--federated.server_rule=perada.data.IID"),
            "error: --federated.server_rule: perada.data.IID is not a subclass of ServerRule; use one",
        ),
        (
            (*FIT, "--data.dataset=perada.data.ImageSet"),
            "error: --data.dataset: perada.data.ImageSet is an abstract base class; name one",
        ),
        (
            (*FIT, "--trainer.logger.save_dir=logs"),
            "error: --trainer.logger.save_dir: is an option of a class, but no class is set; set the class of",
        ),
        (
            (*FIT, "--data.dataset=none.yaml"),
            "error: --data.dataset: none.yaml cannot be read; use an existing file",
        ),
        ((*FIT, "--federated.algorithm=Ditto", "--federated.algorithm.prox_strength=-1"), "prox_strength must be"),
        (
            (*FIT, "--federated.clients_per_round=5"),
            "clients_per_round must be an integer >= 1 and <= 4 or None, got 5; there are 4",
        ),
        ((*FIT, "--distillation.lr=-1"), "distillation: lr must be a finite number > 0, got -1.0"),
        ((*FIT, "--trainer.precision=16-true"), "precision='16-true'"),
        ((*FIT, "--trainer.devices=2", "--trainer.strategy=ddp"), "strategy=DDPStrategy"),
        ((*FIT, "--trainer.accumulate_grad_batches=2"), "accumulate_grad_batches=2"),
        ((*FIT, "--trainer.gradient_clip_val=1"), "gradient_clip_val=1"),
        ((*FIT, "--trainer.max_epochs=-2"), "max_epochs"),
        ((*FIT, "--trainer.max_epochs=x"), "error: --trainer.max_epochs: must be an integer, got 'x'"),
        ((*FIT, "--ckpt_path=last"), "ckpt_path=last: there is no checkpoint below 'lightning_logs'"),
        ((*FIT, "--ckpt_path=no.ckpt"), "ckpt_path='no.ckpt' does not exist"),
        ((*FIT, "--ckpt_path=tiny.yaml"), "ckpt_path='tiny.yaml' is not a checkpoint"),
    ],
)
@pytest.mark.every(3)
def test_errors_are_one_line(folder, monkeypatch, capsys, words, message):
    output = perada_says(monkeypatch, capsys, *words)
    assert output.startswith("perada: error: ")
    assert message in output
    assert "\n" not in output
    assert "Traceback" not in capsys.readouterr().err


def test_a_class_of_ones_own_that_lacks_a_method(folder, monkeypatch, capsys):
    Path("unfinished.py").write_text("from perada.data import ImageSet\nclass Unfinished(ImageSet): pass\n")
    monkeypatch.syspath_prepend(str(folder))
    output = perada_says(monkeypatch, capsys, *FIT, "--data.dataset=unfinished.Unfinished")
    end = "data.dataset: unfinished.Unfinished lacks methods (_load_images) that its base class requires; add them"
    assert output == f"perada: error: {end}"


@pytest.mark.parametrize(("number", "status", "said"), [("SIGTERM", 143, "terminated"), ("SIGINT", 130, "interrupted")])
@pytest.mark.every(2)
def test_a_run_that_is_ended_says_how_to_resume(folder, monkeypatch, capsys, number, status, said):
    words = ["fit", "--config", "tiny.yaml", "--distillation.steps=0"]
    main([*words, "--trainer.default_root_dir=whole"])
    step = FederatedClassifier.training_step
    steps = []

    def ended(module, *arguments):
        steps.append(module.trainer.current_epoch)
        if steps.count(1) == 2:
            os.kill(os.getpid(), getattr(signal, number))
        return step(module, *arguments)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr(FederatedClassifier, "training_step", ended)
        patch.setattr(sys, "argv", ["perada", *words])
        entry_point()
    assert end.value.code == status
    assert f"perada: {said}; resume with --ckpt_path last after the last finished round" in capsys.readouterr().err
    main([*words, "--ckpt_path=last"])
    saved = [max((Path(root) / "lightning_logs").rglob("last.ckpt")) for root in ("whole", ".")]
    uninterrupted, resumed = (torch.load(path, weights_only=True)["perada"]["federation"] for path in saved)
    assert resumed["rounds_done"] == uninterrupted["rounds_done"] == 2
    assert all(torch.equal(resumed["global"][key], value) for key, value in uninterrupted["global"].items())


def test_debugging_shows_where_an_error_arose(folder, monkeypatch):
    monkeypatch.setenv("PERADA_DEBUG", "1")
    monkeypatch.setattr(sys, "argv", ["perada", "fti"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ValueError, match="no command"):
        entry_point()


def test_export_of_a_python_run_names_run_save(folder, tiny, monkeypatch, capsys):
    tiny.finetune(rounds=1)
    output = perada_says(monkeypatch, capsys, "export", "lightning_logs/version_0", "--output", "x")
    assert "Run.save" in output


@pytest.mark.slow
def test_programs_say_nothing_about_themselves(folder, capsys, caplog):
    with caplog.at_level(logging.WARNING):
        main(["fit", "--config", "tiny.yaml", "--trainer.max_epochs=1"])
    assert caplog.records == []


@pytest.mark.slow
def test_a_run_folder_with_its_clients_in_files_can_be_moved_and_exported(folder, capsys):
    main(["fit", "--config", "tiny.yaml", "--trainer.default_root_dir=device"])
    main(["fit", "--config", "tiny.yaml", "--federated.client_store=disk"])
    version(folder, 0).rename(folder / "moved")
    for run, output in (("device/lightning_logs/version_0", "one"), ("moved", "two")):
        main(["export", run, "--output", output])
    one = perada.Run.load("one")
    two = perada.Run.load("two")
    for client in range(4):
        expected = one.state("personal", client)
        assert all(torch.equal(value, expected[key]) for key, value in two.state("personal", client).items())
    assert len({tuple(two.state("personal", client)["fc.bias"].tolist()) for client in range(4)}) > 1
