# SPDX-License-Identifier: Apache-2.0
"""Private names of other libraries that perada uses: each exists, and does what perada relies on.

A library may change them in any release. So ``pyproject.toml`` has an upper bound for each one below, and if a bound is
raised, these tests show what has changed.
"""

import argparse
import ast
import os
import re
import signal
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import peft
import pytest
import pytorch_lightning as pl
import torch
from jsonargparse import ArgumentParser, DefaultHelpFormatter
from jsonargparse._actions import _ActionConfigLoad
from packaging.requirements import Requirement
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from pytorch_lightning.callbacks import TQDMProgressBar
from pytorch_lightning.cli import LightningCLI
from pytorch_lightning.demos.boring_classes import BoringModel
from pytorch_lightning.plugins.environments import LightningEnvironment, SLURMEnvironment
from pytorch_lightning.strategies import DDPStrategy
from pytorch_lightning.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from torch import nn
from torch.utils.data import DataLoader

import perada.adapters  # registers its methods with PEFT

ROOT = Path(__file__).parents[1]
SEEN = {
    "jsonargparse": "4.53.0",
    "opacus": "1.6.0",
    "peft": "0.21.2",
    "pytorch-lightning": "2.6.6",
    "safetensors": "0.8.0",
    "torch": "2.14.1",
    "transformers": "5.24.0",
}
"""The release in which the names were seen. Those of timm that perada uses are public."""
DOCUMENTED = {"_asdict", "_exit", "_fields", "_replace"}
"""Of Python's named tuples and ``os``: public in spite of the underscore."""


# ------------------------------------------------------------------------------------------------- bounds and names


@pytest.mark.parametrize("library", SEEN)
def test_the_library_has_an_upper_bound(library):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    requirements = [requirement for requirement in map(Requirement, lines) if requirement.name == library]
    assert requirements
    for requirement in requirements:
        assert any(bound.operator in ("<", "==") for bound in requirement.specifier), str(requirement)
        assert SEEN[library] in requirement.specifier


def project_trees() -> Iterator[ast.Module]:
    for folder in ("perada", "adapters", "studies"):
        for path in (ROOT / folder).rglob("*.py"):
            yield ast.parse(path.read_text(encoding="utf-8"))


def test_every_private_name_is_tested_here():
    """Names that the project reads from an object or imports, and defines nowhere itself."""
    defined = set()
    read = set()
    for node in (node for tree in project_trees() for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            defined.add(node.attr)
        elif isinstance(node, ast.Attribute):
            read.add(node.attr)
        elif isinstance(node, ast.alias):
            read.add(node.name.rpartition(".")[2])
    private = {name for name in read - defined - DOCUMENTED if re.fullmatch(r"_[a-zA-Z]\w*", name)}
    # Names of DataLoader's iterator and of compiled modules are read by getattr, and overridden ones are defined.
    tests = Path(__file__).read_text(encoding="utf-8")
    assert {"_signal_connector", "_conv_forward", "_replace_module"} <= private  # what it looks for is found
    assert {name for name in private if not re.search(rf"\b{name}\b", tests)} == set()


# ------------------------------------------------------------------------------------------------- pytorch-lightning


def trainer(**options):
    return pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, **options)


def test_subprocess_script_launcher_has_its_processes_and_starts_them_in_one_method():
    launcher = _SubprocessScriptLauncher(LightningEnvironment(), 2, 1)
    assert launcher.procs == []
    assert callable(launcher._call_children_scripts)


def test_launch_calls_children_scripts(monkeypatch):
    called = []
    monkeypatch.setattr(_SubprocessScriptLauncher, "_call_children_scripts", lambda self: called.append(self))
    monkeypatch.setattr("lightning_fabric.utilities.rank_zero.rank_zero_only.rank", 0, raising=False)
    launcher = _SubprocessScriptLauncher(LightningEnvironment(), 1, 1)
    assert launcher.launch(lambda: 3) == 3
    assert called == [launcher]


def test_configure_launcher_sets_the_launcher():
    strategy = DDPStrategy(parallel_devices=[torch.device("cpu")] * 2, cluster_environment=LightningEnvironment())
    strategy._configure_launcher()
    assert type(strategy._launcher) is _SubprocessScriptLauncher
    assert strategy.launcher is strategy._launcher


def test_accelerator_connector_decides_on_the_distributed_sampler():
    for choice in (True, False):
        assert trainer(use_distributed_sampler=choice)._accelerator_connector.use_distributed_sampler is choice


def test_signal_connector_has_the_flag_that_the_trainer_reports():
    built = trainer()
    assert not built.received_sigterm
    built._signal_connector.received_sigterm = True
    assert built.received_sigterm


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals go to the main thread")
@pytest.mark.parametrize(
    ("number", "method", "environment"),
    [
        (signal.SIGTERM, "_sigterm_notifier_fn", LightningEnvironment),
        (signal.SIGUSR1, "_slurm_sigusr_handler_fn", SLURMEnvironment),
    ],
)
def test_signal_connector_calls_its_method_at_a_signal(monkeypatch, number, method, environment):
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)}
    connector = trainer()._signal_connector
    monkeypatch.setattr(connector.trainer._accelerator_connector, "cluster_environment", environment())
    received = []
    setattr(connector, method, lambda signum, frame: received.append(signum))
    signal.signal(number, signal.SIG_DFL)  # Lightning leaves a handler of the caller's in place
    try:
        connector.register_signal_handlers()
        os.kill(os.getpid(), number)
        assert received == [number]
    finally:
        connector.teardown()
        for each, handler in before.items():
            signal.signal(each, handler)


def test_checkpoint_connector_restores_in_two_methods(tmp_path):
    options = {"limit_train_batches": 1, "limit_val_batches": 0, "enable_checkpointing": False}
    first = trainer(max_epochs=1, **options)
    first.fit(BoringModel())
    first.save_checkpoint(tmp_path / "one.ckpt")
    resumed = trainer(max_epochs=2, **options)
    called = []
    for name in ("_restore_modules_and_callbacks", "restore_training_state"):
        original = getattr(resumed._checkpoint_connector, name)

        def recorded(*args, name=name, original=original, **kwargs):
            called.append(name)
            return original(*args, **kwargs)

        setattr(resumed._checkpoint_connector, name, recorded)
    resumed.fit(BoringModel(), ckpt_path=tmp_path / "one.ckpt", weights_only=True)
    assert called == ["_restore_modules_and_callbacks", "restore_training_state"]


def test_the_progress_bar_knows_whether_bars_are_left():
    for leave in (True, False):
        assert TQDMProgressBar(leave=leave)._leave is leave


def test_a_checkpoint_has_the_counters_of_the_fit_loop():
    fitted = trainer(max_epochs=1, limit_train_batches=2, limit_val_batches=0, enable_checkpointing=False)
    fitted.fit(BoringModel())
    progress = fitted.fit_loop.state_dict()
    assert progress["epoch_loop.state_dict"]["_batches_that_stepped"] == 2
    assert progress["epoch_loop.batch_progress"].keys() >= {"total", "current", "is_last_batch"}
    for name in ("epoch_progress", "epoch_loop.manual_optimization.optim_step_progress"):
        assert progress[name].keys() >= {"total", "current"}


@pytest.mark.filterwarnings("ignore:LightningCLI's args parameter is intended:UserWarning")  # sys.argv is pytest's
def test_lightning_cli_has_the_methods_that_perada_overrides_and_calls(monkeypatch):
    called = []
    for name in ("_parse_ckpt_path", "_run_subcommand"):
        monkeypatch.setattr(LightningCLI, name, lambda self, *args, name=name: called.append((name, *args)))
    args = ["fit", "--trainer.accelerator=cpu", "--trainer.logger=false"]
    # Without these options it would warn, or write files.
    options = {"save_config_callback": None, "seed_everything_default": False, "load_from_checkpoint_support": False}
    cli = LightningCLI(BoringModel, args=args, **options)
    assert called == [("_parse_ckpt_path",), ("_run_subcommand", "fit")]
    assert cli._get(cli.config_init, "trainer").accelerator == "cpu"
    assert {"fit", "validate", "test", "predict"} <= cli._subcommand_parsers.keys()


# ------------------------------------------------------------------------------------------------- PEFT, transformers


@pytest.mark.parametrize(
    "name",
    [
        "_create_and_replace",
        "_get_adapter_state_dict",
        "_prepare_adapter_config",
        "_remap_adapter_state_dict_for_load",
        "_remove_adapter_name_from_key",
        "_replace_module",
    ],
)
def test_tuners_have_the_methods_that_adapters_override_or_call(name):
    assert callable(getattr(BaseTuner, name))


def test_peft_calls_what_adapters_override(monkeypatch):
    """Each with what the overrides take: the tests of adapters would fail in stranger ways."""
    network = nn.Sequential()
    network.add_module("conv1", nn.Conv2d(3, 4, 3))
    called = []
    model_class = perada.adapters.residual.ResidualModel
    selective_class = perada.adapters.selective.SelectiveModel
    hooks = {
        model_class: ("_prepare_adapter_config", "_create_and_replace"),
        selective_class: ("_get_adapter_state_dict", "_remove_adapter_name_from_key"),
    }
    for owner, names in hooks.items():
        for name in names:
            original = getattr(owner, name)

            def recorded(*args, name=name, original=original, **kwargs):
                called.append(name)
                return original(*args, **kwargs)

            wrapper = staticmethod(recorded) if owner is selective_class else recorded
            monkeypatch.setattr(owner, name, wrapper)
    peft.get_peft_model(network, perada.adapters.ResidualConfig(target_modules=["conv1"], train_norms=False))
    selected = peft.get_peft_model(nn.Sequential(nn.Linear(2, 2)), perada.adapters.SelectiveConfig(select=["bias"]))
    assert peft.get_peft_model_state_dict(selected, save_embedding_layers=False).keys() == {"base_model.model.0.bias"}
    assert called == [name for names in hooks.values() for name in names]


def test_layers_move_adapters_and_know_the_active_one():
    layer = perada.adapters.residual.ResidualLayer(
        nn.Conv2d(2, 2, 1), "local", perada.adapters.ResidualConfig(norm="none")
    )
    assert callable(BaseTunerLayer._move_adapter_to_device_of_base_layer)
    layer._active_adapter = "other"
    assert layer.active_adapters == ["other"]


def test_vera_casts_its_input():
    layer = peft.get_peft_model(nn.Sequential(nn.Linear(4, 4)), peft.VeraConfig(target_modules=["0"], r=2)).base_model
    vera = layer.model[0]
    assert vera._cast_input_dtype(torch.ones(1, 4, dtype=torch.float64), torch.float32).dtype == torch.float32


def test_transformers_marks_networks_with_an_adapter():
    from transformers import PreTrainedModel

    assert PreTrainedModel._hf_peft_config_loaded is False


# ------------------------------------------------------------------------------------------------- torch


def test_convolutions_take_other_weights():
    conv = nn.Conv2d(3, 4, 3, padding=1)
    x = torch.randn(2, 3, 5, 5)
    assert torch.equal(
        conv._conv_forward(x, 2 * conv.weight, None), nn.functional.conv2d(x, 2 * conv.weight, padding=1)
    )
    assert isinstance(conv, nn.modules.conv._ConvNd)
    assert not isinstance(nn.Linear(1, 1), nn.modules.conv._ConvNd)


def test_transposed_convolutions_compute_their_output_padding():
    conv = nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1)
    x = torch.randn(1, 2, 5, 5)
    # A map of 5 pixels becomes one of (5 - 1) * 2 - 2 * 1 + 3 = 9, so an output of 10 takes a padding of 1.
    assert list(conv._output_padding(x, [10, 9], [2, 2], [1, 1], [3, 3], 2, [1, 1])) == [1, 0]


def test_convolutions_have_their_padding_by_side():
    conv = nn.Conv2d(3, 4, (3, 4), padding="same")
    # (left, right, top, bottom): 1 of the 3 that a kernel of 4 columns needs goes left.
    assert list(conv._reversed_padding_repeated_twice) == [1, 2, 1, 1]


def test_batch_and_instance_norms_have_a_base_class():
    base = nn.modules.batchnorm._NormBase
    assert all(issubclass(kind, base) for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.InstanceNorm2d))
    assert not issubclass(nn.LayerNorm, base)


def test_modules_keep_tensors_children_and_hooks_in_dictionaries():
    norm = nn.BatchNorm1d(2)
    assert norm._parameters.keys() == {"weight", "bias"}
    assert norm._buffers.keys() == {"running_mean", "running_var", "num_batches_tracked"}
    model = nn.Sequential(norm)
    assert model._modules == {"0": norm}
    model.register_forward_hook(lambda *_: None)
    model.register_forward_pre_hook(lambda *_: None)
    model.register_full_backward_hook(lambda *_: None)
    model.register_full_backward_pre_hook(lambda *_: None)
    for hooks in (model._forward_hooks, model._forward_pre_hooks, model._backward_hooks, model._backward_pre_hooks):
        assert len(hooks) == 1


def test_tensors_count_their_changes_in_place():
    tensor = torch.zeros(2)
    before = tensor._version
    tensor.add_(1)
    assert tensor._version > before


def test_a_compiled_module_has_its_original():
    network = nn.Linear(2, 2)
    assert torch.compile(network)._orig_mod is network


def test_an_iterator_over_batches_has_its_worker_processes():
    loader = DataLoader([1, 2], num_workers=1)
    iterator = iter(loader)
    (worker,) = iterator._workers
    assert worker.pid
    assert list(iterator)


# ------------------------------------------------------------------------------------------------- others


class Layer:
    def __init__(self, size: int = 1) -> None:
        self.size = size


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--rate", "argument --rate: expected one argument"),
        ("--rte=1", "unrecognized arguments: --rte=1"),
        ("--rate=fast", "Parser key \"rate\":\n  Expected a <class 'float'>. Got value: fast"),
        ("--mode=c", "Parser key \"mode\":\n  Expected a typing.Literal['a', 'b']. Got value: c"),
        (
            "--layer=nowhere.Thing",
            "Parser key \"layer\":\n  Problem with given class_path 'nowhere.Thing':\n    No module named 'nowhere'",
        ),
        (
            "--layer=argparse.Thing",
            "Parser key \"layer\":\n  Problem with given class_path 'argparse.Thing':\n"
            "    module 'argparse' has no attribute 'Thing'",
        ),
        (
            "--layer=argparse.Action",
            'Parser key "layer":\n  Import path argparse.Action does not correspond to a subclass of Layer',
        ),
        ("--print_config=foo", 'Invalid option "foo" for --print_config'),
        ("--layer=Layr", 'Parser key "layer":\n  Expected a dot import path string: Layr'),
        (
            f'--layer={{"class_path": "{__name__}.Layer", "init_args": {{"sizes": 3}}}}',
            f"Parser key \"layer\":\n  Problem with given class_path '{__name__}.Layer':\n"
            "    Option 'sizes' is not accepted",
        ),
    ],
)
def test_jsonargparse_words_its_errors_as_the_program_reads_them(word, message):
    """``perada/cli/parser_errors.py`` finds options and values in these texts, since the errors have no attributes."""
    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--config", action="config")
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--mode", type=Literal["a", "b"], default="a")
    parser.add_argument("--layer", type=Layer)
    with pytest.raises(argparse.ArgumentError) as error:
        parser.parse_args([word])
    assert str(error.value) == message


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
def test_opacus_counts_passes_at_parameters():
    from opacus import GradSampleModule

    module = GradSampleModule(nn.Linear(2, 1))
    weight = module._module.weight
    out = module(torch.ones(3, 2)) + module(torch.ones(3, 2))
    assert weight._forward_counter == 2
    seen = []
    module._module.bias.register_hook(lambda gradient: seen.append(hasattr(weight, "_current_grad_sample")))
    out.sum().backward()
    assert weight._forward_counter == 0
    assert weight.grad_sample.shape == (3, 1, 2)
    assert not hasattr(weight, "_current_grad_sample")  # it becomes grad_sample after the last use


def test_safetensors_has_its_names_of_dtypes():
    from safetensors.torch import _TYPES

    assert (_TYPES["F32"], _TYPES["BF16"]) == (torch.float32, torch.bfloat16)


def test_argparse_lists_a_parsers_actions():
    parser = argparse.ArgumentParser(add_help=False)
    action = parser.add_argument("--rounds")
    assert parser._actions == [action]
    assert parser._option_string_actions == {"--rounds": action}


def test_a_formatter_of_help_formats_values_and_jsonargparse_adds_an_option_for_a_file():
    formatter = DefaultHelpFormatter("perada")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Layer, "layer")
    (action,) = [action for action in parser._actions if isinstance(action, _ActionConfigLoad)]
    assert action.option_strings == ["--layer"]
    assert formatter._format_args(action, "FILE") == action.metavar == "CONFIG"
    assert formatter._get_help_string(action) == action.help
    assert formatter._get_default_metavar_for_optional(action) == "LAYER"
    assert formatter._get_default_metavar_for_positional(action) == "layer"
    assert formatter._metavar_formatter(action, "LAYER")(2) == (action.metavar, action.metavar)
    assert callable(formatter._format_action_invocation)
