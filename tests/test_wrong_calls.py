# SPDX-License-Identifier: Apache-2.0
"""Wrong calls of the Python API are rejected at once; unusual but right ones work, and their runs can be saved."""

import re
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
    ("options", "message"),
    [
        ({"data": CLIENT}, r"^data must be a FederatedData or a FederatedDataModule, got a TensorDataset"),
        ({"backbone": Network}, r"got the class Network \(create it: Network\(...\)\)"),
        ({"algorithm": Ditto}, r"^algorithm must be a name .*, got the class Ditto \(create it"),
        (
            {"server_rule": TrimmedMean},
            r"^server_rule=the class TrimmedMean \(create it: TrimmedMean\(...\)\) is unknown",
        ),
        ({"distillation": Distillation}, r"^distillation must be of type Distillation .*, got the class Distillation"),
        ({"evaluation": "accuracy"}, r"^evaluation must be of type Evaluation or a dictionary .*, got 'accuracy'"),
        ({"adapter": None}, r"^adapter must be one of residual, .* or a PeftConfig, got None"),
        ({"lr_local": torch.tensor(0.1)}, r"^lr_local .*, got a tensor of the number 0.1 \(pass its .item\(\)\)"),
        ({"lr_local": np.float64("nan")}, r"^lr_local must be a finite number >= 0, got nan$"),
        ({"rounds": np.array([3])}, r"^rounds must be an integer >= 0, got an array of shape \(1,\)"),
        ({"train_backbone": "yes"}, r"^train_backbone must be one of False, True, 'merged', got 'yes'"),
        ({"epochs": 3}, r"^epochs=3 is neither an option of perada.finetune nor .*; rounds and local_epochs are"),
        ({"acelerator": "cpu"}, r"^acelerator='cpu' is neither an option .*; did you mean accelerator\?"),
        ({"max_epochs": 3}, r"^max_epochs=3 contradicts rounds=1; set rounds"),
        ({"privacy": {}}, r"^privacy: neither noise_multiplier nor target_epsilon is set: set exactly one"),
        ({"distillation": {"share_steps": "x"}}, r"^distillation: share_steps must be one of True, False, got 'x'"),
    ],
)
def test_wrong_options_of_finetune(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        finetune(**options)


def test_networks_without_finite_weights_are_rejected_before_training():
    broken = Network()
    broken[4].weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"^backbone 'Network' has NaN or infinity in '4.weight'; load intact weights"):
        finetune(backbone=broken)
    with torch.device("meta"):
        empty = Network()
    with pytest.raises(ValueError, match=r"^backbone 'Network' has no values in '0.weight', .* load its weights first"):
        finetune(backbone=empty)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (IMAGES.movedim(1, -1), r"shape \(4, 4, 3\) .* takes 3 channels instead of 4; .* image.permute\(2, 0, 1\)"),
        (IMAGES[:, :1], r"takes 3 channels instead of 1; convert grey images with image.convert\('RGB'\)"),
        (
            IMAGES.flatten(1) / 255,
            r"images of shape \(48,\) .*do not fit .*; pass images of shape \(channels, height",
        ),
        (IMAGES[:, :2] / 255, r"takes 3 channels instead of 2; convert them to 3 channels, or pass a network for 2"),
    ],
)
def test_images_of_other_channels_name_the_remedy(images, message):
    with pytest.raises(ValueError, match=message) as error:
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


def test_wrong_objects():
    with pytest.raises(TypeError, match=r"^trainer must be of type Trainer or None, got 'gpu'"):
        perada.finetune(Network(), FederatedData([CLIENT]), trainer="gpu")
    for options, message in (
        ({"training": {"lr_local": 0.1}}, r"^training must be of type Training or None, got {'lr_local': 0.1}; for"),
        ({"privacy": perada.ClientPrivacy(noise_multiplier=1)}, r"^privacy must be of type Privacy or None"),
        ({"server_rule": "median"}, r"^server_rule must be of type ServerRule or None, got 'median'"),
        ({"algorithm": []}, r"^algorithm=\[\] is not an algorithm; pass an Algorithm object"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            perada.FederatedLoop(**options)
    for wrapper in (HetLoRA, FedEnsemble, FFALoRA):
        with pytest.raises(ValueError, match=r"^base=\[\] is not an algorithm"):
            wrapper(base=[])
    for option in ("channels_last", "cache_features"):
        with pytest.raises(ValueError, match=rf"^{option} must be one of None, True, False, got 'no'"):
            perada.Training(**{option: "no"})


def test_wrong_options_of_data_modules():
    for options, message in (
        ({}, r"^dataset and partition must be set: pass a dataset"),
        ({"dataset": Digits()}, r"^partition must be set"),
        ({"dataset": Digits}, r"^dataset must be of type ImageSet or None, got the class Digits \(create it"),
        ({"data": [CLIENT]}, r"^data must be of type FederatedData or None, got \[a TensorDataset\]"),
        (
            {"data": FederatedData([CLIENT]), "device_cache_mb": "2 GB"},
            r"^device_cache_mb must be a finite number >= 0",
        ),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            FederatedDataModule(**options)
    share = FederatedDataModule(dataset=Digits(), partition=IID(2), train_limit=60, public_fraction=1e-6)
    with pytest.raises(ValueError, match=r"^public_fraction must be a share of at least one of 60 training images"):
        share.setup()


def test_wrong_options_of_image_sets(tmp_path):
    for make, message in (
        (lambda: ImageFolder(None), r"^root must be a path, got None"),
        (lambda: ImageFolder(""), r"^root must be a path, got ''"),
        (lambda: Images("x", sizes=3), r"^Images has no option 'sizes'; did you mean size\?"),
        (lambda: Images("x", layout=None), r"^layout must be a non-empty string, got None"),
        (lambda: ImageTable(None), r"^table must be a path, got None"),
        (lambda: ImageTable("t.csv", label=None), r"^label must be the name of a column or a list of names, got None"),
        (lambda: ImageTable("t.csv", label=[1]), r"^label must be the name of a column or a list of names, got \[1\]"),
        (lambda: ImageTable("t.csv", separator=""), r"^separator must be a non-empty string or None, got ''"),
        (lambda: HuggingFace(None), r"^name must be a non-empty string, got None"),
        (lambda: HuggingFace("a/b", label=["x"]), r"^label must be a non-empty string or None, got \['x'\]"),
        (lambda: HuggingFace("a/b", splits=[]), r"^splits must be a list of names .*, at least one, or None, got \[\]"),
        (lambda: HuggingFace("a/b", splits="train"), r"^splits must be a list of names .*, got 'train'"),
        (lambda: HuggingFace("a/b", numbers=[]), r"^numbers must be the name of a column or a list of names, got \[\]"),
        (lambda: ImageFolder("x", domains="no"), r"^domains must be one of True, False, got 'no'"),
        (lambda: ImageFolder("x", seed=0.5), r"^seed must be an integer >= 0, got 0.5"),
        (lambda: ImageFolder("x", gray="no"), r"^gray must be one of True, False, got 'no'"),
        (lambda: ImageMasks("x", masks=["y"]), r"^masks must be a non-empty string or None, got \['y'\]"),
        (lambda: CIFAR10(download="no"), r"^download must be one of True, False, got 'no'"),
        (lambda: CIFAR10(train="no"), r"^train must be one of True, False, got 'no'"),
        (lambda: CIFAR10(["data"]), r"^root must be a path, got \['data'\]"),
        (lambda: CIFAR10C("fog", root=3), r"^root must be a path, got 3"),
        (lambda: STL10(unlabelled="no"), r"^unlabelled must be one of True, False, got 'no'"),
        (lambda: Shakespeare(3), r"^root must be a path, got 3"),
        (lambda: CheXpert(frontal_only="no"), r"^frontal_only must be one of True, False, got 'no'"),
        (lambda: OfficeHome(seed="a"), r"^seed must be an integer >= 0, got 'a'"),
        (lambda: OpenImage(seed="a"), r"^seed must be an integer >= 0, got 'a'"),
        (lambda: Photographs(gray="no"), r"^gray must be one of True, False, got 'no'"),
        (lambda: Photographs(seed=-1), r"^seed must be an integer >= 0, got -1"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            make()
    (tmp_path / "partition.json").write_text("[]")
    module = FederatedDataModule(dataset=Digits(), partition=perada.data.FromFile(tmp_path / "partition.json"))
    with pytest.raises((ValueError, AttributeError), match=r"is not a partition of a dataset \(it has no entries\)"):
        module.setup()


def test_options_of_tasks_may_be_arrays():
    for weights in (torch.tensor([1.0, 2.0]), np.array([1, 2]), range(1, 3)):
        assert Classification(class_weights=weights) == Classification(class_weights=(1.0, 2.0))
        assert MultiLabel(positive_weights=weights) == MultiLabel(positive_weights=(1.0, 2.0))
    assert Regression(mean=np.array([1.0, 2.0]), std=torch.tensor([1.0, 2.0])).std == (1.0, 2.0)
    assert repr(Regression("huber", delta=np.float64(2))) == "Regression(loss_function='huber', delta=2.0)"
    with pytest.raises(ValueError, match="include_background must be one of True, False, got 'no'"):
        Segmentation(include_background="no")


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
    made = finetune(
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
    made.save(tmp_path / "saved")
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


def test_wrong_calls_of_runs_change_nothing(run, tmp_path):
    file = tmp_path / "file"
    file.write_text("content")
    for write in (run.save, run.export):
        for folder, message in (
            (None, r"^folder must be a path, got None"),
            (3, r"^folder must be a path, got 3"),
            ("", r"^folder must be a path, got ''"),
            ("a\0b", r"^folder must be a path, got 'a\\x00b'"),
            (file, "is a file; choose a folder"),
            (file / "below", "cannot be created, since .* is a file; choose a folder"),
        ):
            with pytest.raises((ValueError, TypeError, OSError), match=message):
                write(folder)
        for options, message in (
            ({"scores": "no"}, r"^scores must be one of True, False, None, got 'no'"),
            ({"license": None}, r"^license must be a non-empty string, got None"),
        ):
            with pytest.raises(ValueError, match=message):
                write(tmp_path / "new", **options)
    assert file.read_text() == "content"
    assert list(tmp_path.iterdir()) == [file]


def test_wrong_calls_of_load(run, tmp_path):
    run.save(tmp_path / "run")
    for options, message in (
        ({"folder": None}, r"^folder must be a path, got None"),
        (
            {"folder": tmp_path / "run", "algorithm": "perada"},
            r"^algorithm must be of type Algorithm or None, got 'perada'",
        ),
        (
            {"folder": tmp_path / "run", "backbone": "resnet18"},
            r"^backbone must be of type Module or None, got 'resnet18'",
        ),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            Run.load(**options)
    named = finetune(backbone="test_resnet", adapter="head")
    named.save(tmp_path / "named")
    with pytest.raises(
        ValueError, match=r"a run with the backbone 'test_resnet', which is built by name; leave backbone"
    ):
        Run.load(tmp_path / "named", backbone=Network())
    (tmp_path / "run" / "run.json").write_text("null")
    with pytest.raises(ValueError, match=r"run.json' is broken \(ValueError: it has no entries\)"):
        Run.load(tmp_path / "run")


def test_wrong_calls_of_predict(run, tmp_path):
    for options, message in (
        ({"images": None}, r"^an image must be a tensor, an array or a PIL image, got None"),
        ({"images": CLIENT}, r"got a TensorDataset; pass the images without labels, such as \[image for image, _ in"),
        ({"images": [CLIENT[0]]}, r"; pass the images without labels"),
        ({"images": {"image": IMAGES[0]}}, r"; pass the images without labels"),
        ({"images": torch.full((1, 3, 4, 4), torch.nan)}, r"a sample has NaN or infinity; leave it out, or correct it"),
        ({"images": IMAGES, "device": None}, "^device='None' is not the name of a device; use cpu, or a GPU"),
        ({"images": IMAGES, "broken": []}, r"^broken must be of type dict or None, got \[\]"),
        ({"images": IMAGES, "client": torch.tensor(0)}, r"^client must be .*, got a tensor of the number 0"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            run.predict(**{"client": 0} | options)
    predictions = run.predict(IMAGES, "x")
    with pytest.raises(TypeError, match=r"^path must be a path, got None"):
        predictions.to_csv(None)
    with pytest.raises(IsADirectoryError, match=re.escape(f"path={tmp_path} is a folder; choose a file")):
        predictions.to_csv(tmp_path)
    assert predictions.to_csv(tmp_path / "new" / "p.csv").is_file()


def test_wrong_calls_of_personalize(run):
    data = FederatedData([CLIENT], client_names=["new"])
    for arguments, message in (
        (("run", data), r"^run must be a Run, got 'run'; load a saved one with Run.load\(folder\)"),
        ((run, [CLIENT], "new"), r"^data must be of type FederatedData, got \[a TensorDataset\]; for example"),
        ((run, FederatedDataModule(data)), r"^data must be of type FederatedData"),
        ((run, data, 7), r"^name must be of type str or None, got 7"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            personalize(*arguments)
    for options, message in (
        ({"algorithm": "ditto"}, r"^algorithm must be of type Algorithm or None, got 'ditto'; for example PerAda\(\)"),
        ({"progress": "yes"}, r"^progress must be one of True, False, got 'yes'"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            personalize(run, data, **options)
    with pytest.raises(TypeError, match=r"^the client, sample 1: the label is 'c'; use one of a, b"):
        personalize(run, FederatedData([[(IMAGES[0], "a"), (IMAGES[1], "c")]]), "new")
    with pytest.raises(TypeError, match=r"^the client, sample 0: the item is a tensor of shape \(3, 4, 4\)"):
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
    with pytest.raises(
        ValueError, match=rf"^{re.escape(option)} has no effect with {re.escape(other)}; leave it out, or "
    ):
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
    with pytest.raises(TypeError, match=rf"^FederatedData: {option} must be a list of names .*, at least one, or None"):
        FederatedData([CLIENT], **{option: []})
