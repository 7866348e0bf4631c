# SPDX-License-Identifier: Apache-2.0
"""MONAI bundles: what MONAI itself computes with one, and the keys that its specification asks for."""

import csv
import json
import sys
from dataclasses import dataclass

import jsonschema
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import perada
from perada.cli import main
from perada.results.formats import export_model
from perada.results.monai_scripts.image_files import to_8_bits
from perada.tasks import ClassTask, MultiLabel, Regression, Segmentation
from tests.options import sections
from tests.rejections import rejects

pytest.importorskip("onnxruntime")

# What the schema of 2024-07-25 at https://project-monai.github.io/schema requires.
TENSOR = {
    "type": "object",
    "properties": {
        "type": {"type": "string"},
        "format": {"type": "string"},
        "num_channels": {"type": "integer"},
        "spatial_shape": {"type": "array", "items": {"type": ["string", "integer"]}},
        "dtype": {"type": "string"},
        "value_range": {"type": "array", "items": {"type": "number"}},
        "is_patch_data": {"type": "boolean"},
        "channel_def": {"type": "object"},
    },
}
TENSOR["required"] = list(TENSOR["properties"])
TENSORS = {"type": "object", "patternProperties": {"^.+$": TENSOR}, "minProperties": 1}
FORMATS = {
    "type": "object",
    "properties": {"inputs": TENSORS, "outputs": TENSORS, "post_processed_outputs": TENSORS},
    "required": ["inputs", "outputs"],
}
TEXTS = ["schema", "version", "monai_version", "pytorch_version", "numpy_version"]
TEXTS += ["task", "description", "authors", "copyright"]
SCHEMA = {
    "type": "object",
    "properties": {name: {"type": "string", "minLength": 1} for name in TEXTS}
    | {
        "changelog": {"type": "object", "additionalProperties": {"type": "string"}},
        "required_packages_version": {"type": "object", "additionalProperties": {"type": "string"}},
        "network_data_format": FORMATS,
    },
}
SCHEMA["required"] = list(SCHEMA["properties"])


def make_run(folder, targets, channels=3, size=48, network="test_resnet", **options):
    random = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (2, 6, channels, size, size), generator=random, dtype=torch.uint8)
    # Clients whose images differ in brightness.
    sets = [TensorDataset(images // (client + 1), targets) for client, images in enumerate(x)]
    settings = {"pretrained": False, "rounds": 2, "local_steps": 4, "lr_local": 0.3, "lr_personal": 0.3}
    settings |= {"accelerator": "cpu", "enable_progress_bar": False, "default_root_dir": str(folder)}
    settings |= {"adapter": "lora"} | options
    return perada.finetune(network, perada.FederatedData(sets), **sections(**settings))


def write_images(folder):
    """Grey and coloured images of different sizes, one of them to be rotated."""
    folder.mkdir()
    random = np.random.default_rng(0)
    pixels = [random.integers(0, 256, shape, dtype=np.uint8) for shape in ((40, 70, 3), (90, 33), (48, 48, 3))]
    Image.fromarray(pixels[0]).save(folder / "a.png")
    rotated = Image.Exif()
    rotated[0x0112] = 6  # the tag Orientation
    Image.fromarray(pixels[1]).save(folder / "b.jpg", exif=rotated)
    Image.fromarray(pixels[2]).save(folder / "c.png")
    return sorted(folder.iterdir())


def run_bundle(folder, images, monkeypatch):
    """Run a bundle's inference by MONAI, and return the folder of its predictions."""
    pytest.importorskip("ignite", reason="pytorch-ignite is not installed: pip install pytorch-ignite")
    bundle = pytest.importorskip("monai.bundle", reason="MONAI is not installed: pip install monai")
    # Where MONAI puts the code of a bundle, and what it keeps of another test's.
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    for name in [name for name in sys.modules if name.partition(".")[0] == "scripts"]:
        monkeypatch.delitem(sys.modules, name)
    workflow = bundle.ConfigWorkflow(
        str(folder / "configs" / "inference.json"),
        workflow_type="inference",
        bundle_root=str(folder),
        dataset_dir=str(images),
        output_dir=str(folder / "eval"),
    )
    workflow.initialize()
    assert workflow.check_properties() == []
    workflow.run()
    return folder / "eval"


def read_numbers(folder):
    with (folder / "predictions.csv").open(encoding="utf-8") as file:
        rows = list(csv.reader(file))
    return [row[0] for row in rows], torch.tensor([[float(cell) for cell in row[1:]] for row in rows])


@pytest.mark.filterwarnings("ignore:::monai", "ignore:NvImgCodecPydicomReader")
@pytest.mark.parametrize(
    ("options", "targets"),
    [
        ({"channels": 1, "image_size": 32}, torch.arange(6) % 3),
        pytest.param(
            {"task": MultiLabel()}, torch.eye(3).repeat(2, 1).index_fill(0, torch.tensor(5), 1), marks=pytest.mark.slow
        ),
        pytest.param({"task": Regression()}, 7 + 3 * torch.randn(6, 2), marks=pytest.mark.slow),
        pytest.param({"adapter": "residual", "size": 32}, torch.arange(6) % 3, marks=pytest.mark.slow),
    ],
)
def test_monai_predicts_what_the_run_predicts(tmp_path, monkeypatch, options, targets):
    run = make_run(tmp_path / "run", targets, **options)
    export_model(run, 1, "monai", tmp_path / "bundle")
    images = write_images(tmp_path / "images")
    files, found = read_numbers(run_bundle(tmp_path / "bundle", tmp_path / "images", monkeypatch))
    assert files == [str(path) for path in images]
    expected = run.predict(images, client=1).probabilities
    torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-5)
    assert (expected - run.predict(images, client=0).probabilities).abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:::monai", "ignore:NvImgCodecPydicomReader")
@pytest.mark.parametrize("channels", [3, 4])
def test_arrays_are_read_where_image_files_were_not_trained_on(tmp_path, monkeypatch, channels):
    # Prepared images, or 8 bits in channels that image files do not have.
    images = torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    if channels == 4:
        images = torch.randint(0, 256, (6, 4, 32, 32), dtype=torch.uint8)
    data = perada.FederatedData([TensorDataset(images, torch.arange(6) % 3)] * 2)
    network = nn.Sequential(
        nn.Conv2d(channels, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )
    options = {"adapter": "full", "rounds": 1, "local_steps": 2}
    options |= {"logger": False, "enable_progress_bar": False, "accelerator": "cpu"}
    run = perada.finetune(network, data, **sections(**options))
    export_model(run, 0, "monai", tmp_path / "bundle")
    (tmp_path / "arrays").mkdir()
    for number, image in enumerate(images):
        np.save(tmp_path / "arrays" / f"{number}.npy", image.numpy())
    _, found = read_numbers(run_bundle(tmp_path / "bundle", tmp_path / "arrays", monkeypatch))
    torch.testing.assert_close(found, run.predict(images, client=0).probabilities, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:::monai", "ignore:NvImgCodecPydicomReader")
def test_masks_of_monai_are_those_of_the_run(tmp_path, monkeypatch):
    network = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1))
    masks = torch.randint(0, 3, (6, 48, 40), generator=torch.Generator().manual_seed(1))
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (6, 3, 48, 40), generator=random, dtype=torch.uint8)
    data = perada.FederatedData([TensorDataset(images, masks)] * 2)
    options = {"task": Segmentation(), "num_classes": 3, "adapter": "full", "rounds": 1, "local_steps": 2}
    options |= {"logger": False, "enable_progress_bar": False, "accelerator": "cpu"}
    run = perada.finetune(network, data, **sections(**options))
    export_model(run, None, "monai", tmp_path / "bundle")
    paths = write_images(tmp_path / "images")
    folder = run_bundle(tmp_path / "bundle", tmp_path / "images", monkeypatch)
    expected = run.predict(paths).labels
    for path, mask in zip(paths, expected, strict=True):
        found = np.asarray(Image.open(folder / f"{path.stem}_mask.png"))
        assert np.array_equal(found, mask.numpy())
    assert expected.unique().numel() > 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:::monai", "ignore:NvImgCodecPydicomReader")
def test_a_bundle_of_both_models_predicts_like_the_run(tmp_path, monkeypatch):
    evaluation = {"prediction": "both", "personal_share": 0.7}
    run = make_run(tmp_path / "run", torch.arange(6) % 3, algorithm="ditto", evaluation=evaluation)
    export_model(run, 1, "monai", tmp_path / "bundle")
    images = write_images(tmp_path / "images")
    _, found = read_numbers(run_bundle(tmp_path / "bundle", tmp_path / "images", monkeypatch))
    torch.testing.assert_close(found, run.predict(images, client=1).probabilities, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundle")
    run = make_run(folder, torch.arange(6) % 3)
    main(["export", str(folder / "lightning_logs" / "version_0"), "--client=1", "--format=monai", f"--output={folder}"])
    return run, folder


def test_metadata_have_the_keys_of_the_specification(exported):
    _, folder = exported
    metadata = json.loads((folder / "configs" / "metadata.json").read_text(encoding="utf-8"))
    jsonschema.validate(metadata, SCHEMA)
    formats = metadata["network_data_format"]
    assert formats["inputs"]["image"]["num_channels"] == 3
    assert formats["inputs"]["image"]["spatial_shape"] == [48, 48]
    assert formats["outputs"]["pred"]["channel_def"] == {"0": "0", "1": "1", "2": "2"}
    assert (folder / "docs" / "README.md").read_text(encoding="utf-8").startswith("# The model of client 1 of a run")
    assert "import perada" not in "".join(path.read_text() for path in (folder / "scripts").iterdir())


def test_a_bundle_replaces_only_a_bundle(exported, tmp_path):
    run, folder = exported
    export_model(run, 0, "monai", folder)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "inference.json").write_text("{}")
    with pytest.raises(FileExistsError, match=r"inference\.json"):
        export_model(run, 0, "monai", tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] == ["configs", "inference.json"]


@dataclass(frozen=True, repr=False)
class Ranked(ClassTask):
    """Classes whose probabilities are no softmax."""

    metric_prefix = "Multiclass"

    def loss(self, logits, targets):
        return F.multi_margin_loss(logits, targets, reduction="none")

    def predictions(self, logits):
        return F.normalize(logits.sigmoid(), p=1, dim=-1)


@pytest.mark.slow
def test_a_task_with_other_probabilities_is_rejected(tmp_path):
    run = make_run(tmp_path / "run", torch.arange(6) % 3, task=Ranked())
    with rejects("format", "monai"):
        export_model(run, None, "monai", tmp_path / "bundle")
    assert not list((tmp_path / "bundle").iterdir())


@pytest.mark.parametrize("image", [Image.new("I;16", (4, 4)), Image.new("F", (4, 4)), Image.new("RGBA", (4, 4))])
def test_images_that_the_bundle_would_read_differently_are_rejected(image):
    with pytest.raises(ValueError, match=f"mode {image.mode} "):
        to_8_bits(image, "RGB")
