# SPDX-License-Identifier: Apache-2.0
"""Wrong calls of the Python API are rejected at once; unusual but right ones work, and their runs can be saved."""

import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import TensorDataset

import perada
from perada import FederatedData, FederatedDataModule, Run, personalize
from perada.algorithms import Ditto, FedBE, FedEnsemble, FFALoRA, HetLoRA, make_algorithm
from perada.core.checks import OptionTypeError
from perada.core.text import value_text
from perada.data import (
    CIFAR10,
    CIFAR10C,
    IID,
    STL10,
    CheXpert,
    Digits,
    Dirichlet,
    HuggingFace,
    ImageFolder,
    ImageMasks,
    Images,
    ImageTable,
    OfficeHome,
    OpenImage,
    Photographs,
    Shakespeare,
)
from perada.server import Distillation, ModifiedLocalGD, TrimmedMean, make_rule
from perada.tasks import Classification, MultiLabel, Regression, Segmentation
from tests.rejections import ANY_VALUE, raises_naming, rejects

IMAGES = torch.arange(12 * 3 * 4 * 4).view(12, 3, 4, 4).remainder(251).byte()
LABELS = torch.arange(12) % 2
CLIENT = TensorDataset(IMAGES, LABELS)


class Network(nn.Sequential):
    """A network of two classes."""

    def __init__(self, classes=2):
        super().__init__(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, classes))


def finetune(data=None, backbone=None, **options):
    data = data or FederatedData([CLIENT, CLIENT], [CLIENT, CLIENT], classes=["a", "b"], client_names=["x", "y"])
    defaults = {"adapter": "full", "pretrained": False, "algorithm": "fedavg", "rounds": 1, "local_steps": 1}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
    return perada.finetune(backbone or Network(), data, **defaults | quiet | options)


@pytest.fixture(scope="module")
def run():
    return finetune()


@pytest.mark.parametrize(
    ("option", "value", "facts"),
    [
        ("algorithm", Ditto, ["Ditto(...)"]),
        ("server_rule", TrimmedMean, ["TrimmedMean(...)"]),
        ("lr_local", torch.tensor(0.1), [".item()"]),
        ("lr_local", np.float64("nan"), []),
        ("rounds", np.array([3]), []),
        ("train_backbone", "yes", ["merged"]),
        ("epochs", 3, ["rounds", "local_epochs"]),
        ("acelerator", "cpu", ["did you mean accelerator?"]),
        ("max_epochs", 3, ["rounds=1"]),
    ],
)
def test_wrong_options_of_finetune(option, value, facts):
    with rejects(option, value, *facts):
        finetune(**{option: value})


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("data", CLIENT),
        ("backbone", Network),
        ("distillation", Distillation),
        ("evaluation", "accuracy"),
        ("adapter", None),
    ],
)
def test_arguments_of_finetune_of_a_wrong_type(argument, value):
    with raises_naming(TypeError, argument, value_text(value)):
        finetune(**{argument: value})


def test_wrong_sections_of_finetune():
    with raises_naming(ValueError, "privacy", "noise_multiplier", "target_epsilon"):
        finetune(privacy={})
    with rejects("distillation: share_steps", "x"):
        finetune(distillation={"share_steps": "x"})


def test_networks_without_finite_weights_are_rejected_before_training():
    broken = Network()
    broken[4].weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"^backbone 'Network' .*NaN or infinity.*'4\.weight'"):
        finetune(backbone=broken)
    with torch.device("meta"):
        empty = Network()
    with pytest.raises(ValueError, match=r"^backbone 'Network' .*no values.*'0\.weight'"):
        finetune(backbone=empty)


@pytest.mark.parametrize(
    ("images", "facts"),
    [
        (IMAGES.movedim(1, -1), ["(4, 4, 3)", "3 channels", 4, "image.permute(2, 0, 1)"]),
        (IMAGES[:, :1], ["3 channels", 1, "image.convert('RGB')"]),
        (IMAGES.flatten(1) / 255, ["(48,)", "(channels, height, width)"]),
        (IMAGES[:, :2] / 255, ["3 channels", 2, "a network for 2"]),
    ],
)
def test_images_of_other_channels_name_the_remedy(images, facts):
    with raises_naming(ValueError, *facts) as error:
        finetune(FederatedData([TensorDataset(images, LABELS)] * 2))
    assert "Given groups" not in str(error.value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_floating_point_images_of_another_type_are_converted(dtype):
    """Training and prediction see the same numbers as those of float32, up to the rounding of the type."""
    images = (IMAGES.float() / 251 - 0.5).to(dtype)
    torch.manual_seed(0)
    network = Network()
    runs = [
        finetune(FederatedData([TensorDataset(x, LABELS)] * 2), network, lr_local=1.0) for x in (images, images.float())
    ]
    for key, value in runs[0].state("global").items():
        assert torch.equal(value, runs[1].state("global")[key]), key
    assert torch.equal(runs[0].predict(images, 0).probabilities, runs[1].predict(images.float(), 0).probabilities)


@pytest.mark.parametrize(
    ("call", "option", "value"),
    [
        (perada.FederatedLoop, "training", {"lr_local": 0.1}),
        (perada.FederatedLoop, "privacy", perada.ClientPrivacy(noise_multiplier=1)),
        (perada.FederatedLoop, "server_rule", "median"),
        (perada.FederatedLoop, "algorithm", []),
        (HetLoRA, "base", []),
        (FedEnsemble, "base", []),
        (FFALoRA, "base", []),
        (perada.Training, "channels_last", "no"),
        (perada.Training, "cache_features", "no"),
        (FederatedDataModule, "dataset", Digits),
        (FederatedDataModule, "data", [CLIENT]),
        (partial(FederatedDataModule, FederatedData([CLIENT])), "device_cache_mb", "2 GB"),
        (ImageFolder, "root", None),
        (ImageFolder, "root", ""),
        (partial(Images, "x"), "layout", None),
        (ImageTable, "table", None),
        (partial(ImageTable, "t.csv"), "label", None),
        (partial(ImageTable, "t.csv"), "label", [1]),
        (partial(ImageTable, "t.csv"), "separator", ""),
        (HuggingFace, "name", None),
        (partial(HuggingFace, "a/b"), "label", ["x"]),
        (partial(HuggingFace, "a/b"), "splits", []),
        (partial(HuggingFace, "a/b"), "splits", "train"),
        (partial(HuggingFace, "a/b"), "numbers", []),
        (partial(ImageFolder, "x"), "domains", "no"),
        (partial(ImageFolder, "x"), "seed", 0.5),
        (partial(ImageFolder, "x"), "gray", "no"),
        (partial(ImageMasks, "x"), "masks", ["y"]),
        (CIFAR10, "download", "no"),
        (CIFAR10, "train", "no"),
        (CIFAR10, "root", ["data"]),
        (partial(CIFAR10C, "fog"), "root", 3),
        (STL10, "unlabelled", "no"),
        (Shakespeare, "root", 3),
        (CheXpert, "frontal_only", "no"),
        (OfficeHome, "seed", "a"),
        (OpenImage, "seed", "a"),
        (Photographs, "gray", "no"),
        (Photographs, "seed", -1),
        (Segmentation, "include_background", "no"),
        (partial(perada.finetune, Network(), FederatedData([CLIENT])), "trainer", "gpu"),
    ],
)
def test_wrong_options_of_objects(call, option, value):
    with rejects(option, value):
        call(**{option: value})


def test_options_that_are_missing_or_unknown():
    with raises_naming(ValueError, "dataset and partition"):
        FederatedDataModule()
    with raises_naming(ValueError, "partition must be set"):
        FederatedDataModule(dataset=Digits())
    with raises_naming(TypeError, "Images", "'sizes'", "did you mean size?"):
        Images("x", sizes=3)


def test_what_is_wrong_only_for_the_data_is_rejected_when_they_are_read(tmp_path):
    share = FederatedDataModule(dataset=Digits(), partition=IID(2), train_limit=60, public_fraction=1e-6)
    with rejects("public_fraction", 1e-6, "60 training images"):
        share.setup()
    path = tmp_path / "partition.json"
    path.write_text("[]")
    with raises_naming(ValueError, path, "no entries"):
        FederatedDataModule(dataset=Digits(), partition=perada.data.FromFile(path)).setup()


def test_options_of_tasks_may_be_arrays():
    for weights in (torch.tensor([1.0, 2.0]), np.array([1, 2]), range(1, 3)):
        assert Classification(class_weights=weights) == Classification(class_weights=(1.0, 2.0))
        assert MultiLabel(positive_weights=weights) == MultiLabel(positive_weights=(1.0, 2.0))
    assert Regression(mean=np.array([1.0, 2.0]), std=torch.tensor([1.0, 2.0])).std == (1.0, 2.0)
    assert repr(Regression("huber", delta=np.float64(2))) == "Regression(loss_function='huber', delta=2.0)"


def test_numbers_of_numpy_are_stored_as_numbers_of_python(tmp_path):
    """In files, and in the options that a resumed run is compared by."""
    data = FederatedDataModule(
        dataset=Digits(),
        partition=Dirichlet(np.int64(3), np.float64(0.5)),
        train_limit=np.int64(90),
        test_limit=np.int32(30),
        batch_size=np.int64(8),
        image_size=np.int64(8),
        seed=np.int64(1),
        public_fraction=np.float64(0.1),
    )
    trained_run = finetune(
        data,
        "test_resnet",
        adapter="lora",
        adapter_options={"r": np.int64(2)},
        algorithm="perada",
        algorithm_options={"prox_strength": np.float64(0.5)},
        rounds=np.int64(1),
        lr_local=np.float64(0.25),
        local_steps=np.int64(1),
        distillation={"steps": np.int64(1), "lr": np.float64(0.001)},
        evaluation={"global_test_clients": np.int64(1)},
        clients_per_round=np.int64(2),
        drop_outliers=np.bool_(False),
        seed=np.int64(4),
        logger=True,
        enable_checkpointing=True,
        default_root_dir=tmp_path / "root",
    )
    trained_run.save(tmp_path / "saved")
    loaded = Run.load(tmp_path / "saved")
    images = np.zeros((2, 8, 8), dtype=np.uint8)
    assert loaded.predict(list(images), client=np.int64(1), batch_size=np.int64(2)).labels.shape == (2,)
    (checkpoint,) = (tmp_path / "root").rglob("*.ckpt")
    assert Run.load(checkpoint).num_clients == 3
    assert "np." not in (checkpoint.parents[1] / "config.yaml").read_text()
    assert "np." not in (tmp_path / "saved" / "run.json").read_text()
    for options in (make_algorithm("ditto", prox_strength=np.float64(0.5)), make_rule(TrimmedMean(np.float64(0.1)))):
        assert "np." not in repr(options)
    assert repr(HetLoRA(ranks=[1, 2])) == repr(HetLoRA(ranks=[1, 2]))


def test_private_runs_with_numbers_of_numpy_can_be_saved(tmp_path):
    privacy = {"noise_multiplier": np.float64(1), "max_norm": np.float32(1), "delta": np.float64(1e-3)}
    finetune(privacy=privacy).save(tmp_path / "saved")
    assert Run.load(tmp_path / "saved", backbone=Network()).info["privacy"]["sample"]["options"]["max_norm"] == 1.0


@pytest.mark.parametrize("method", ["save", "export"])
def test_wrong_calls_of_runs_change_nothing(run, tmp_path, method):
    write = getattr(run, method)
    file = tmp_path / "file"
    file.write_text("content")
    for folder in (None, 3, "", "a\0b"):
        with rejects("folder", folder):
            write(folder)
    for folder in (file, file / "below"):
        with raises_naming(NotADirectoryError, f"folder={folder}", "choose a folder"):
            write(folder)
    for option, value in {"scores": "no", "license": None}.items():
        with rejects(option, value):
            write(tmp_path / "new", **{option: value})
    assert file.read_text() == "content"
    assert list(tmp_path.iterdir()) == [file]


def test_wrong_calls_of_load(run, tmp_path):
    with rejects("folder", None):
        Run.load(None)
    run.save(tmp_path / "run")
    for option, value in {"algorithm": "perada", "backbone": "resnet18"}.items():
        with rejects(option, value):
            Run.load(tmp_path / "run", **{option: value})
    named = finetune(backbone="test_resnet", adapter="head")
    named.save(tmp_path / "named")
    with pytest.raises(ValueError, match=r"'test_resnet'.*leave backbone"):
        Run.load(tmp_path / "named", backbone=Network())
    (tmp_path / "run" / "run.json").write_text("null")
    with pytest.raises(ValueError, match=r"run\.json' is broken"):
        Run.load(tmp_path / "run")


def test_wrong_calls_of_predict(run, tmp_path):
    for images, error, facts in (
        (None, TypeError, ["an image", None]),
        (CLIENT, TypeError, ["a TensorDataset", "without labels"]),
        ([CLIENT[0]], TypeError, ["without labels"]),
        ({"image": IMAGES[0]}, TypeError, ["without labels"]),
        (torch.full((1, 3, 4, 4), torch.nan), ValueError, ["a sample", "NaN"]),
    ):
        with raises_naming(error, *facts):
            run.predict(images, 0)
    with raises_naming(ValueError, "device='None'", "cpu"):
        run.predict(IMAGES, 0, device=None)
    for option, value in {"broken": [], "client": torch.tensor(0)}.items():
        with rejects(option, value):
            run.predict(IMAGES, **{"client": 0, option: value})
    predictions = run.predict(IMAGES, "x")
    with rejects("path", None, error=OptionTypeError):
        predictions.to_csv(None)
    with pytest.raises(IsADirectoryError, match=re.escape(f"{tmp_path} is a folder")):
        predictions.to_csv(tmp_path)
    assert predictions.to_csv(tmp_path / "new" / "p.csv").is_file()


def test_wrong_calls_of_personalize(run):
    data = FederatedData([CLIENT], client_names=["new"])
    module = FederatedDataModule(data)
    for option, value, fact in (
        ("run", "run", "Run.load(folder)"),
        ("data", [CLIENT], "FederatedData"),
        ("data", module, "FederatedData"),
        ("name", 7, "name"),
        ("algorithm", "ditto", "PerAda()"),
        ("progress", "yes", "progress"),
    ):
        with rejects(option, value, fact):
            personalize(**{"run": run, "data": data, option: value})
    with pytest.raises(TypeError, match=r"^the client, sample 1: .*'c'; .*a, b"):
        personalize(run, FederatedData([[(IMAGES[0], "a"), (IMAGES[1], "c")]]), "new")
    with pytest.raises(TypeError, match=r"^the client, sample 0: .*\(3, 4, 4\)"):
        personalize(run, FederatedData([[IMAGES[0]]]), "new")


def test_a_client_joins_with_items_in_any_form(run):
    """Words are the run's classes, and dictionaries and PIL images are read as in training."""
    words = [(image, "ab"[label]) for image, label in CLIENT]
    dictionaries = [
        {"image": Image.fromarray(image.permute(1, 2, 0).numpy()), "label": np.int64(label)} for image, label in CLIENT
    ]
    options = {"rounds": np.int64(1), "local_steps": np.int64(1), "lr": np.float32(0.5), "accelerator": "cpu"}
    states = []
    for dataset in (CLIENT, words, dictionaries):
        states.append(personalize(run, FederatedData([dataset]), "new", **options).state("personal", 2))
    for state in states[1:]:
        assert all(torch.equal(value, states[0][key]) for key, value in state.items())


def test_paths_of_weights(tmp_path):
    """A path object is written into files as text."""
    network = perada.lightning.module.FederatedClassifier("test_resnet", pretrained=Path("weights.pt"))
    assert network.pretrained == "weights.pt"
    assert repr(Images(tmp_path, size=np.int64(8))) == f"Images(root={str(tmp_path)!r}, size=8)"


@pytest.mark.parametrize(
    ("make", "option", "other"),
    [
        (lambda run: run.state("global", 0), "client=0", "role='global'"),
        (lambda run: finetune(local_epochs=2), "local_epochs=2", "local_steps=1"),
        (lambda run: finetune(pretrained="weights.pt"), "pretrained='weights.pt'", "a network as backbone"),
        (lambda run: ImageTable("t.csv", mask_values=[0, 255]), "mask_values=(0, 255)", "mask=None"),
        (lambda run: HuggingFace("a/b", mask_values=[0, 255]), "mask_values=(0, 255)", "mask=None"),
        (lambda run: ImageTable("t.csv", blank="absent"), "blank='absent'", "label='label'"),
        (lambda run: Regression(delta=2.0), "delta=2.0", "loss_function='squared'"),
        (lambda run: Segmentation(dice_smoothing=2.0), "dice_smoothing=2.0", "loss_function='cross_entropy'"),
        (lambda run: FedBE(distill=False, average_from=0.2), "average_from=0.2", "distill=False"),
        (lambda run: ModifiedLocalGD(alpha=0.5, power=2.0), "power=2.0", "alpha=0.5"),
        (lambda run: private_clients(quantile=0.3), "client_privacy: quantile=0.3", "clipping='fixed'"),
        (lambda run: private_clients(clip_lr=0.3), "client_privacy: clip_lr=0.3", "clipping='fixed'"),
        (lambda run: private_clients(count_noise=3.0), "client_privacy: count_noise=3.0", "clipping='fixed'"),
    ],
)
def test_an_option_that_another_one_makes_ineffective_is_rejected(run, make, option, other):
    with rejects(option.rpartition("=")[0], ANY_VALUE, option, other):
        make(run)


def private_clients(**options):
    return perada.ClientPrivacy(noise_multiplier=1.0, **options)


def test_effective_options_are_accepted():
    private_clients(clipping="adaptive", quantile=0.3, clip_lr=0.3, count_noise=3.0)
    Regression("huber", delta=2.0)
    Segmentation("both", dice_smoothing=2.0)
    FedBE(average_from=0.2)
    ModifiedLocalGD(power=2.0)
    HuggingFace("a/b", mask="mask", mask_values=[0, 255])


@pytest.mark.parametrize("option", ["classes", "client_names"])
def test_an_empty_list_of_names_is_not_no_names(option):
    with rejects(f"FederatedData: {option}", [], error=OptionTypeError):
        FederatedData([CLIENT], **{option: []})
