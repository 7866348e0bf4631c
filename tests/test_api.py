# SPDX-License-Identifier: Apache-2.0
"""``perada.finetune``: what it accepts, what it returns, what it writes, what it rejects."""

import inspect
import json
import os
import re
import signal

import pytest
import pytorch_lightning as pl
import torch
import yaml
from peft import LoraConfig
from torch import nn
from torch.utils.data import TensorDataset

import perada
from perada import Training
from perada.api import argument_texts, to_yaml_value
from perada.cli import main
from perada.cli.runs import PeradaCLI
from perada.server import Distillation, SecureSums
from perada.system.digests import check_sealed
from tests.options import sections


@pytest.fixture
def call(tiny, tmp_path):
    """``finetune`` with tiny defaults; what it writes goes to the test's folder."""

    def finetune(backbone=None, data=None, **options):
        backbone = tiny.net() if backbone is None else backbone
        data = tiny.data() if data is None else data
        return perada.finetune(
            backbone, data, **sections(**({"default_root_dir": str(tmp_path)} | tiny.options | options))
        )

    return finetune


def test_no_rounds_return_the_initial_states(call, tiny):
    run = call(rounds=0)
    initial = tiny.net().state_dict()
    for state in (run.state("global"), *(run.state("personal", client) for client in range(5))):
        assert state.keys() == initial.keys()
        assert all(torch.equal(state[key], initial[key]) for key in initial)
    assert run.num_clients == 5
    assert run.metrics["rounds"] == []


def test_a_program_that_is_terminated_has_the_status_of_that(call):
    class Terminated(pl.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as end:
        call(rounds=3, logger=False, callbacks=[Terminated()])
    assert end.value.code == 143


def test_two_calls_agree_whatever_torchs_global_stream(call):
    torch.manual_seed(1)
    first = call(rounds=2, logger=False)
    torch.manual_seed(2)
    second = call(rounds=2, logger=False)
    other = call(rounds=2, logger=False, seed=1)
    assert first.metrics == second.metrics
    for client in range(5):
        one = first.state("personal", client)
        two = second.state("personal", client)
        assert all(torch.equal(one[key], two[key]) for key in one)
    assert not torch.equal(first.state("global")["7.weight"], other.state("global")["7.weight"])


def test_the_callers_network_and_data_stay_as_they_were(call, tiny):
    net = tiny.net()
    data = tiny.data()
    net.eval()
    call(net, data, rounds=1, logger=False)
    assert not any(module.training for module in net.modules())
    assert all(torch.equal(value, tiny.net().state_dict()[key]) for key, value in net.state_dict().items())
    assert all(torch.equal(a.tensors[0], b.tensors[0]) for a, b in zip(data.train, tiny.data().train, strict=True))


@pytest.mark.slow
def test_rates_fall_as_python_says(call, tiny):
    """Times 0 after one round, the rates leave what that round made."""
    options = {"data": tiny.data(public=False), "algorithm": "fedavg", "distill_steps": None, "logger": False}
    one, more = (call(rounds=r, lr_schedule="exponential", lr_gamma=0.0, lr_every=1, **options) for r in (1, 3))
    initial = call(rounds=0, **options).state("global")
    for key, value in one.state("global").items():
        assert torch.equal(value, more.state("global")[key]) and not torch.equal(value, initial[key])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (0.03, 0.1, 0.9)),
        ({"training": {"local_steps": 1}}, (0.03, 0.1, 0.9)),
        ({"adapter": "full"}, (0.03, 0.03, 0.9)),
        ({"adapter": "full", "training": {"momentum": 0.5}}, (0.01, 0.01, 0.5)),
        ({"adapter": LoraConfig(r=2, target_modules=["5"], modules_to_save=["7"])}, (0.03, 0.03, 0.9)),
        ({"lr_local": 0.2}, (0.01, 0.2, 0.0)),
        ({"training": {"momentum": 0.5}}, (0.01, 0.01, 0.5)),
        ({"training": {"optimizer": "adamw"}}, (0.01, 0.01, 0.0)),
        ({"training": Training()}, (0.01, 0.01, 0.0)),
        ({"privacy": {"noise_multiplier": 1.0, "secure_rng": False}}, (0.03, 0.1, 0.9)),
    ],
)
@pytest.mark.filterwarnings("ignore:secure_rng=False:UserWarning")
def test_rates_that_nobody_sets_are_those_of_init(tiny, options, expected):
    options = {"adapter": "head"} | options
    run = perada.finetune(tiny.net(), tiny.data(public=False), rounds=0, logger=False, **options)
    training = run.info["training"]
    assert (training["lr_personal"], training["lr_local"], training["momentum"]) == expected


def test_distillation_defaults_to_whether_there_is_a_public_set(call, tiny):
    without = call(data=tiny.data(public=False), rounds=1, logger=False, distill_steps=None)
    off = call(data=tiny.data(public=False), rounds=1, logger=False, distill_steps=0)
    on = call(rounds=1, logger=False, distill_steps=None, distill_batch_size="full")
    assert torch.equal(without.state("global")["7.weight"], off.state("global")["7.weight"])
    assert not torch.equal(without.state("global")["7.weight"], on.state("global")["7.weight"])


def test_run_folder(call, tmp_path, tiny):
    config = LoraConfig(r=2, target_modules=["5"], modules_to_save=["7"])
    run = call(rounds=1, adapter=config, algorithm=perada.make_algorithm("perada", prox_strength=0.5), max_time=None)
    folder = tmp_path / "lightning_logs" / "version_0"
    result = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert result == {"config.yaml", "metrics.csv", "partition.json", "run.json", "checkpoints/last.ckpt"}
    written = yaml.safe_load((folder / "config.yaml").read_text())
    assert written["trainer"]["max_epochs"] == 1
    assert written["trainer"]["accelerator"] == "cpu"
    assert written["training"]["momentum"] == 0.9
    assert "LoraConfig" in written["model"]["adapter"]
    assert "Conv2d" in written["model"]["backbone"]
    assert written["federated"]["algorithm"]["init_args"] == {"prox_strength": 0.5, "distill": True}
    assert written["seed_everything"] == 0
    assert written["ckpt_path"] is None
    assert written["data"] == "FederatedData of 5 clients"
    with pytest.raises(ValueError, match="custom network"):
        main(["export", str(folder), "--output", str(tmp_path / "adapters")])
    partition = check_sealed(json.loads((folder / "partition.json").read_text()))
    assert partition == {"num_clients": 5, "train_sizes": [9, 5, 14, 7, 20], "test_sizes": [6] * 5, "public_size": 12}
    assert len(run.metrics["rounds"]) == 1


def test_secure_sums_stand_in_config_yaml_as_in_a_recipe():
    arguments = {"min_sites": 4, "threshold": 0.75, "fraction_bits": 20}
    assert to_yaml_value(SecureSums(**arguments)) == arguments


@pytest.mark.slow
def test_default_run_folder_is_below_the_working_directory(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call(rounds=1, default_root_dir=None)
    assert [path.name for path in tmp_path.iterdir()] == ["lightning_logs"]


def test_without_a_logger_nothing_is_written(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = call(rounds=1, logger=False, default_root_dir=None)
    assert list(tmp_path.iterdir()) == []
    assert len(run.metrics["rounds"]) == 1


def test_ckpt_path_last_goes_on_from_the_newest_run(call, tmp_path):
    uninterrupted = call(rounds=3, default_root_dir=str(tmp_path / "whole"))
    call(rounds=1)
    call(rounds=2, ckpt_path="last")
    run = call(rounds=3, ckpt_path="last")
    assert run.metrics == uninterrupted.metrics
    assert all(torch.equal(value, uninterrupted.state("global")[key]) for key, value in run.state("global").items())


def test_a_trainer_of_the_callers_own(call, tiny, tmp_path):
    options = {key: value for key, value in tiny.options.items() if key not in ("accelerator", "enable_progress_bar")}
    trainer = pl.Trainer(
        accelerator="cpu", enable_progress_bar=False, default_root_dir=tmp_path, log_every_n_steps=1,
        num_sanity_val_steps=0, enable_model_summary=False, logger=pl.loggers.CSVLogger(tmp_path),
    )  # fmt: skip
    run = perada.finetune(tiny.net(), tiny.data(), **sections(rounds=2, trainer=trainer, **options))
    assert run.metrics == call(rounds=2, logger=False).metrics
    (saved,) = (tmp_path / "lightning_logs" / "version_0" / "checkpoints").glob("*.ckpt")
    assert torch.load(saved, weights_only=True)["perada"]["metrics"]["rounds"] == run.metrics["rounds"]
    with pytest.raises(ValueError, match="already has a FederatedLoop"):  # whatever else is asked for
        perada.finetune(tiny.net(), tiny.data(), **sections(rounds=5, trainer=trainer, **options))
    assert len([callback for callback in trainer.callbacks if isinstance(callback, perada.FederatedLoop)]) == 1
    with pytest.raises(ValueError, match=r"'precision'.*trainer="):
        perada.finetune(
            tiny.net(), tiny.data(), **sections(trainer=pl.Trainer(logger=False), precision="bf16-mixed", **options)
        )


@pytest.mark.every(2)
@pytest.mark.parametrize(("every", "scored"), [(3, [2]), (1, [0, 1, 2])])
def test_a_trainer_evaluates_as_often_as_it_was_made_to_and_the_config_records_it(tiny, tmp_path, every, scored):
    trainer = pl.Trainer(
        max_epochs=3, accelerator="cpu", enable_progress_bar=False, default_root_dir=tmp_path, log_every_n_steps=1,
        num_sanity_val_steps=0, enable_model_summary=False, check_val_every_n_epoch=every,
        logger=pl.loggers.CSVLogger(tmp_path),
    )  # fmt: skip
    options = {key: value for key, value in tiny.options.items() if key not in ("accelerator", "enable_progress_bar")}
    run = perada.finetune(tiny.net(), tiny.data(), **sections(rounds=3, trainer=trainer, **options))
    assert [row["round"] for row in run.metrics["rounds"] if "global/global_test" in row] == scored
    (config,) = tmp_path.rglob("config.yaml")
    written = yaml.safe_load(config.read_text())["trainer"]
    assert written == {"max_epochs": 3, "check_val_every_n_epoch": every}


def test_a_trainer_made_for_another_number_of_rounds_is_rejected(tiny, tmp_path):
    options = {key: value for key, value in tiny.options.items() if key not in ("accelerator", "enable_progress_bar")}
    trainer = pl.Trainer(max_epochs=5, accelerator="cpu", default_root_dir=tmp_path, logger=False)
    with pytest.raises(ValueError, match="max_epochs=5 and rounds=2"):
        perada.finetune(tiny.net(), tiny.data(), **sections(rounds=2, trainer=trainer, **options))
    assert trainer.max_epochs == 5


@pytest.mark.slow
def test_sanity_validation_before_training_is_no_part_of_the_history(call):
    assert call(rounds=1, num_sanity_val_steps=1, logger=False).metrics == call(rounds=1, logger=False).metrics


def test_a_datamodule_has_its_own_batch_size(call, tiny, one_thread):
    module = perada.FederatedDataModule(tiny.data(), batch_size=2)
    run = call(data=module, rounds=1, logger=False, clients_per_round=None, batch_size=None)
    # All clients are in one chunk, whose steps are those of the longest: 20 images.
    assert run.metrics["rounds"][0]["step"] == 10
    with pytest.raises(
        ValueError,
        match=r"batch_size=4 .*batch_size=2; .*FederatedDataModule",
    ):
        call(data=perada.FederatedDataModule(tiny.data(), batch_size=2), batch_size=4)


@pytest.fixture
def one_thread():
    """A single thread, so that all clients of a round are in one chunk: otherwise each thread has its own."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.every(4)
@pytest.mark.parametrize(("own", "given"), [(None, 32), (32, 16), (None, 0), (None, float("nan"))])
def test_a_datamodule_has_its_own_image_size(tiny, own, given):
    setting = "with image_size=32" if own else "without image_size"
    data = perada.FederatedDataModule(tiny.data(), batch_size=2, image_size=own)
    with pytest.raises(ValueError, match=rf"^image_size={given} .*{setting}"):
        perada.finetune("test_resnet", data, pretrained=False, image_size=given)


def test_a_vit_is_built_for_the_image_size_of_the_datamodule(tiny):
    images = [TensorDataset(torch.randint(0, 256, (4, 3, 8, 8)).byte(), torch.arange(4) % 2) for _ in range(2)]
    data = perada.FederatedDataModule(perada.FederatedData(images, []), batch_size=2, image_size=48)
    run = perada.finetune("test_vit", data, pretrained=False, adapter="head", rounds=0, logger=False)
    assert run.info["built_for"] == 48
    assert run.global_model().pos_embed.shape[1] == 1 + (48 // 16) ** 2


@pytest.mark.every(3)
@pytest.mark.parametrize(("low", "high", "warned"), [(0, 1, True), (-1, 1, False), (0, 2, False)])
def test_images_that_nobody_normalised_are_warned_of(low, high, warned, recwarn):
    images = torch.empty(6, 3, 28, 28).uniform_(low, high)
    data = perada.FederatedData([TensorDataset(images, torch.arange(6) % 2)], [])
    options = {"adapter": "head", "rounds": 0, "logger": False, "accelerator": "cpu"}
    perada.finetune("test_resnet", data, **sections(pretrained="perada:fashion_test_resnet", **options))
    said = [
        str(w.message) for w in recwarn.list if "have values from 0 to 1, but the weights of backbone" in str(w.message)
    ]
    assert len(said) == warned
    perada.finetune("test_resnet", data, **sections(pretrained=False, **options))
    assert len([w for w in recwarn.list if "have values from 0 to 1" in str(w.message)]) == warned


def test_a_network_may_know_more_classes_than_the_labels_show(call, tiny):
    data = tiny.data()
    for part in [*data.train, *data.test]:
        part.tensors[1].clamp_(max=1)
    with pytest.warns(UserWarning, match=r"2 classes, .*3 outputs, .*num_classes=3"):
        assert call(data=data, rounds=1, logger=False).info["num_classes"] == 3
    assert call(data=data, rounds=1, logger=False, num_classes=3).info["num_classes"] == 3


def test_public_images_that_do_not_fit_are_rejected_before_training(call, tiny):
    data = tiny.data()
    data.public = torch.utils.data.TensorDataset(torch.randn(4, 3, 8, 8))
    with pytest.raises(ValueError, match=r"public .*\(3, 8, 8\)"):
        call(data=data, logger=False)


def labelled(tiny, client, value):
    data = tiny.data()
    data.train[client].tensors[1][0] = value
    return data


def shaped(tiny, *shape):
    data = tiny.data()
    data.train[2] = TensorDataset(torch.zeros(4, *shape), torch.zeros(4, dtype=torch.int64))
    return data


def emptied(tiny):
    data = tiny.data()
    data.train[3] = TensorDataset(torch.zeros(0, 1, 8, 8), torch.zeros(0, dtype=torch.int64))
    return data


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backbone": "resnet19"}, "'resnet19' is not a timm model"),
        ({"adapter": "residuals"}, "adapter 'residuals' is unknown; choose one of"),
        ({"adapter": "lora", "adapter_options": {"rank": 2}}, "adapter 'lora' has no option 'rank'"),
        ({"algorithm": "perda"}, "algorithm='perda' is unknown; did you mean 'perada'"),
        (
            {"algorithm": "fedavg", "algorithm_options": {"prox_strength": 1.0}},
            r"algorithm='fedavg'.*prox_strength",
        ),
        (
            {"algorithm_options": {"prox_strength": -1.0}},
            "prox_strength must be a finite number >= 0, got -1.0",
        ),
        (
            {"algorithm": perada.make_algorithm("ditto"), "algorithm_options": {"prox_strength": 2.0}},
            "prox_strength=2.0.*combined with an algorithm",
        ),
        ({"clients_per_round": 6}, "clients_per_round must be an integer >= 1 and <= 5 or None, got 6"),
        ({"clients_per_round": 0}, r"clients_per_round .*got 0"),
        ({"data": emptied}, "client 3 has no training samples"),
        ({"num_classes": 4}, "num_classes"),
        ({"num_classes": 2}, "label"),
        ({"data": lambda tiny: labelled(tiny, 1, -1)}, "client 1 has the training label -1"),
        ({"data": lambda tiny: shaped(tiny, 1, 9, 8)}, "client 2"),
        ({"data": lambda tiny: shaped(tiny, 2, 8, 8)}, "client 2"),
        ({"data": lambda tiny: tiny.data(public=False)}, "no public set"),
        ({"rounds": -1}, r"rounds .*got -1"),
        ({"rounds": 1.5}, "rounds must be .*got 1.5"),
        (
            {"check_val_every_n_epoch": 0},
            "check_val_every_n_epoch must be an integer >= 1 or None, got 0; set limit_val_batches=0",
        ),
        ({"batch_size": 0}, "batch_size must be .*got 0"),
        ({"local_epochs": 0}, "epochs must be .*got 0"),
        ({"local_steps": 0}, "steps must be .*got 0"),
        ({"lr_personal": -0.1}, "lr_personal must be a finite number >= 0, got -0.1"),
        ({"lr_local": -0.1}, "lr_local must be a finite number >= 0, got -0.1"),
        ({"distillation": {"lr": -0.1}}, r"distillation: lr .*got -0.1"),
        ({"distill_steps": -1}, "steps must be an integer >= 0, got -1"),
        ({"distill_temperature": 0.0}, "temperature must be a finite number >= 0.001 .*, got 0.0"),
        (
            {"distill_temperature": 10**12},
            "temperature must be a finite number >= 0.001 and <= .*, got 1000000000000",
        ),
        (
            {"algorithm_options": {"prox_strength": 10**30}},
            r"prox_strength .*got 10+",
        ),
        ({"lr_local": 1e300}, "lr_local must be a finite number >= 0 and <= 3.4e.38, got 1e.300"),
        ({"distill_steps": 10**400}, "steps must be an integer >= 0 and <= 1000000000000, got 10+…"),
        ({"distill_optimizer": "adagrad"}, r"optimizer .*got 'adagrad'"),
        ({"optimizer": "adagrad"}, r"optimizer .*got 'adagrad'"),
        ({"weighting": "size"}, "weighting must be one of .*, got 'size'"),
        ({"engine": "vmap"}, "engine must be one of .*, got 'vmap'"),
        ({"privacy": {"epsilon": 1}}, "privacy has no option 'epsilon'"),
        ({"pretrained": "missing.safetensors", "backbone": "test_resnet"}, "missing.safetensors"),
        ({"backbone": "test_resnet", "pretrained": True}, "pretrained: false"),
        ({"precision": "16-true"}, "precision='16-true'"),
        ({"devices": 2, "strategy": "ddp"}, "strategy=DDPStrategy"),
        ({"ckpt_path": "nowhere.ckpt"}, "ckpt_path='nowhere.ckpt' does not exist"),
        ({"ckpt_path": "last"}, "there is no checkpoint below"),
    ],
)
def test_wrong_inputs_are_named_on_one_line_at_set_up(call, tiny, options, message):
    options = {key: value(tiny) if callable(value) and key == "data" else value for key, value in options.items()}
    with pytest.raises((ValueError, FileNotFoundError), match=message) as error:
        call(**({"rounds": 1, "logger": False} | options))
    assert "\n" not in str(error.value)


def test_a_label_beyond_the_outputs_of_the_network_names_its_client(call, tiny):
    with pytest.raises(ValueError, match=r"client 1 .*label 7"):
        call(data=labelled(tiny, 1, 7), rounds=1, logger=False)


def test_images_of_the_wrong_size_for_the_backbone_are_rejected_at_set_up(call, tiny):
    data = tiny.data()
    for part in (*data.train, *data.test, data.public):
        part.tensors = (part.tensors[0].expand(-1, 3, -1, -1), *part.tensors[1:])
    with pytest.raises(ValueError, match=r"\(3, 8, 8\).*'test_vit'.*image_size"):
        call("test_vit", data, pretrained=False, rounds=1, logger=False, adapter="head")
    with pytest.raises(ValueError, match=r"\(3, 8, 8\).*'Sequential'"):
        call(tiny.net(), data, rounds=1, logger=False)


def test_a_network_that_does_not_return_logits_is_rejected(call, tiny):
    net = nn.Sequential(tiny.net(), nn.Unflatten(1, (1, 3)))
    with pytest.raises(ValueError, match=r"\(1, 1, 3\) .*\(1, 3\)"):
        call(net, rounds=1, logger=False, adapter="head")


def test_a_network_without_linear_head_is_rejected(call):
    with pytest.raises(ValueError, match=r"no nn.Linear"):
        call(backbone=nn.Flatten(), rounds=1, logger=False)
    with pytest.raises(TypeError, match=r"backbone must be a timm name, .*, got 3"):
        call(backbone=3, rounds=1, logger=False)


@pytest.mark.slow
def test_the_options_that_were_given_in_python_are_a_configuration_for_the_program(call, tmp_path):
    """All of it but the data and what is an object in Python: the program's parser reads it back to the same values."""
    call(rounds=2, lr_local=0.2, privacy={"noise_multiplier": 1.5}, weight_decay=0.25, algorithm="ditto")
    written = yaml.safe_load((tmp_path / "lightning_logs" / "version_0" / "config.yaml").read_text())
    written["data"] = {"dataset": "Digits", "partition": "IID"}
    written["model"]["backbone"] = "test_resnet"
    written["trainer"].pop("default_root_dir")
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(written))
    cli = PeradaCLI(["--config", str(tmp_path / "mine.yaml")], run=False)
    assert type(cli.loop.algorithm).__name__ == "Ditto"
    assert (cli.trainer.max_epochs, cli.loop.training.lr_local, cli.loop.training.weight_decay) == (2, 0.2, 0.25)
    assert cli.loop.privacy == perada.Privacy(noise_multiplier=1.5)


def test_sections_are_given_as_objects_or_as_fields(call, tiny):
    distillation = {"steps": 3, "batch_size": 4, "lr": 0.01, "temperature": 2.0}
    training = {"momentum": 0.5, "lr_local": 0.2}
    none = {"distill_steps": None, "distill_batch_size": None, "momentum": None, "lr_local": None, "lr_personal": None}
    as_fields = {"distillation": distillation, "training": training}
    as_objects = {"distillation": Distillation(**distillation), "training": perada.Training(**training)}
    flat = {"distillation": distillation, "training": {"momentum": 0.5}, "lr_local": 0.2}
    runs = [call(rounds=1, logger=False, **none | options) for options in (as_fields, as_objects, flat)]
    for run in runs[1:]:
        assert all(torch.equal(value, runs[0].state("global")[key]) for key, value in run.state("global").items())
    with pytest.raises(ValueError, match=r"distillation .*'step'"):
        call(**(none | {"distillation": {"step": 3}}))


@pytest.mark.parametrize("training", [perada.Training(), {"lr_local": 0.1}])
def test_an_option_that_is_given_beside_its_section_is_rejected(tiny, training):
    with pytest.raises(ValueError, match=r"lr_local=0\.2 .*training="):
        perada.finetune(tiny.net(), tiny.data(), lr_local=0.2, training=training)


def test_every_default_is_that_of_the_class_that_is_built():
    own = {"batch_size", "num_classes", "algorithm", "server_rule"}  # None or a name stands for the class's default
    arguments = {name: one.default for name, one in inspect.signature(perada.finetune).parameters.items()}
    built = (perada.FederatedLoop, perada.FederatedClassifier, perada.FederatedDataModule)
    compared = [
        (name, one.default, arguments[name])
        for kind in built
        for name, one in inspect.signature(kind).parameters.items()
        if name in arguments and name not in own | {"data", "backbone"}
    ]
    assert len(compared) >= 20  # the fields of sections are compared by their dataclasses' own defaults
    assert [row for row in compared if row[1] != row[2]] == []
    assert perada.FederatedLoop().distillation == Distillation()
    assert isinstance(perada.FederatedLoop().algorithm, type(perada.make_algorithm(arguments["algorithm"])))
    assert type(perada.FederatedLoop().server_rule).__name__.lower() == arguments["server_rule"]
    assert inspect.signature(perada.FederatedDataModule).parameters["batch_size"].default == 64


def test_help_explains_every_argument_and_says_what_the_class_says():
    said = argument_texts(perada.finetune)
    assert {*said} - {"**trainer_kwargs"} == {*inspect.signature(perada.finetune).parameters} - {"trainer_kwargs"}


def norms():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"batch_size": 1}, "batch_size is 1"),
        ({"sizes": (6, 1, 4)}, "client 1 has 1 training image"),
        ({"distillation": {"batch_size": 1}}, "distillation: batch_size is 1"),
        ({"public": 1}, "the public set has 1 image"),
    ],
)
def test_batches_of_one_image_are_rejected_where_a_batch_norm_is_trained(call, tiny, options, reason):
    options = dict(options)
    data = tiny.data(sizes=options.pop("sizes", None))
    if "public" in options:
        data.public = TensorDataset(data.public.tensors[0][: options.pop("public")])
    common = {"rounds": 1, "logger": False, "distill_steps": None, "distill_batch_size": None}
    mode = {"distillation": {"steps": 1, "student_mode": "train"} | options.pop("distillation", {})}
    message = f"{reason}, but the adapter trains BatchNorm layers, which require at least 2 images per batch"
    with pytest.raises(ValueError, match=message):
        call(norms(), data, **common | mode | options)
    if "distillation" in reason or "public" in reason:
        evaluated = {"distillation": mode["distillation"] | {"student_mode": "eval", "teacher_mode": "eval"}}
        assert len(call(norms(), data, **common | evaluated).metrics["rounds"]) == 1
        assert len(call(tiny.net(), data, **common | mode).metrics["rounds"]) == 1


def test_an_image_that_is_left_after_others_are_held_out_is_rejected_with_that_reason(call, tiny):
    data = perada.FederatedDataModule(tiny.data(sizes=(6, 2, 4)), client_validation=0.5, num_classes=3)
    cause = "client 1 has 1 training image, since client_validation=0.5 holds out the others, but the adapter trains"
    with pytest.raises(ValueError, match=re.escape(cause)):
        call(norms(), data, rounds=1, logger=False, batch_size=None)


@pytest.mark.slow
def test_steps_on_one_image_are_distilled_where_teachers_see_those_of_all_steps(call, tiny):
    options = {"distillation": {"steps": 2, "batch_size": 1}, "distill_steps": None, "distill_batch_size": None}
    assert len(call(norms(), tiny.data(), rounds=1, logger=False, **options).metrics["rounds"]) == 1
