# SPDX-License-Identifier: Apache-2.0
"""``Run.predict``: images as they come, through the run's own preprocessing and models."""

import csv
import json
import shutil

import numpy as np
import pytest
import timm
import torch
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file
from torch.utils.data import TensorDataset

import perada
from perada.results.inference import Predictions, find_images
from tests.digests import undigested
from tests.options import sections
from tests.rejections import rejects

SIZES = (9, 6, 12)


def parts(seed, classes=3, multilabel=False, shape=(3, 20, 24)):
    """One set a client of images whose brightness tells the class."""
    random = torch.Generator().manual_seed(seed)
    sets = []
    for size in SIZES:
        y = torch.arange(size) % classes
        x = torch.randint(0, 120, (size, *shape), generator=random) + 60 * y.view(-1, 1, 1, 1)
        labels = torch.stack([y == 1, y > 0, y < 2], 1).float() if multilabel else y
        sets.append(TensorDataset(x.to(torch.uint8), labels))
    return sets


@pytest.fixture(scope="module")
def run(tiny):
    data = perada.FederatedDataModule(perada.FederatedData(parts(1), parts(2)), image_size=32, batch_size=4)
    settings = tiny.options | {"rounds": 2, "logger": False, "pretrained": False, "batch_size": None}
    settings |= {"adapter": "lora", "distill_steps": None, "local_steps": 3, "algorithm": "perada_no_kd"}
    return perada.finetune("test_resnet", data, **sections(**settings))


def grey_run(tiny, algorithm="fedavg", multilabel=False):
    """A run of a small network of one channel."""
    sets = parts(1, multilabel=multilabel, shape=(1, 8, 8))
    settings = tiny.options | {"rounds": 1, "logger": False, "distill_steps": None, "local_steps": 1}
    return tiny.finetune(perada.FederatedData(sets), algorithm=algorithm, **settings)


@pytest.fixture(scope="module")
def saved_run(run, tmp_path_factory):
    return run.export(tmp_path_factory.mktemp("saved"))


def plain_logits(saved, name, images):
    """What timm's model with PEFT's adapter makes of pixels (H, W, 3) that are resized and normalised here."""
    plain = timm.create_model("test_resnet", num_classes=3)
    plain.load_state_dict(load_file(saved / "backbone.safetensors"), strict=True)
    model = PeftModel.from_pretrained(plain, str(saved / name)).eval()
    config = timm.data.resolve_model_data_config(timm.create_model("test_resnet"))
    ready = []
    for pixels in images:
        x = torch.tensor(pixels).permute(2, 0, 1).float()[None] / 255
        x = torch.nn.functional.interpolate(x, (32, 32), mode="bilinear", antialias=True)[0]
        ready.append((x - torch.tensor(config["mean"]).view(3, 1, 1)) / torch.tensor(config["std"]).view(3, 1, 1))
    with torch.no_grad():
        return model(torch.stack(ready))


@pytest.mark.parametrize("client", [None, 1])
def test_files_are_predicted_as_by_the_plain_model(saved_run, tmp_path, client):
    images = np.random.default_rng(0).integers(0, 256, (5, 20, 24, 3), dtype=np.uint8)
    paths = [tmp_path / f"{number}.png" for number in range(5)]
    for path, pixels in zip(paths, images, strict=True):
        Image.fromarray(pixels).save(path)
    actual = perada.Run.load(saved_run).predict(paths, client, batch_size=2)
    expected = plain_logits(saved_run, "global" if client is None else f"client_{client}", images).softmax(1)
    assert expected.std(0).min() > 1e-4  # images matter
    torch.testing.assert_close(actual.probabilities, expected, rtol=0, atol=1e-6)
    assert actual.labels.tolist() == expected.argmax(1).tolist()
    assert actual.paths == tuple(map(str, paths))


def test_the_runs_own_test_images_have_the_accuracy_that_the_run_reports(run):
    reported = run.metrics["clients"]["personal/local_test"]
    assert max(reported) > 0.5
    for client, part in enumerate(parts(2)):
        x, y = part.tensors
        result = run.predict(x, client)
        assert (result.labels == y).float().mean().item() == pytest.approx(reported[client], abs=1e-7)
        assert torch.equal(run.predict(list(x), client, batch_size=5).labels, result.labels)


def test_clients_and_classes_by_name(run, tmp_path):
    x = parts(2)[0].tensors[0][:4]
    numbered = run.predict(x, 2)
    assert numbered.classes == ("0", "1", "2")
    assert torch.equal(run.predict(x, "2").probabilities, numbered.probabilities)
    named = perada.Run(run._adapted, run._global, run._personal, 3, run.metrics, dict(run.info))
    named.info |= {"clients": ["north", "south", "0"], "classes": ["ant", "bee", "cat"]}
    result = named.predict(x, "0")
    assert torch.equal(result.probabilities, numbered.probabilities)
    assert result.names == [("ant", "bee", "cat")[label] for label in numbered.labels]
    with pytest.raises(ValueError, match=r"client='nort'.*'north'\?"):
        named.predict(x, "nort")
    with pytest.raises(ValueError, match=r"client='north'.* 0"):
        run.predict(x, "north")
    with rejects("client", 3):
        run.predict(x, "3")
    rows = list(csv.DictReader(result.to_csv(tmp_path / "out.csv").read_text().splitlines()))
    assert [row["image"] for row in rows] == ["0", "1", "2", "3"]
    assert [row["predicted"] for row in rows] == result.names
    written = [[float(row[f"p({name})"]) for name in ("ant", "bee", "cat")] for row in rows]
    torch.testing.assert_close(torch.tensor(written), result.probabilities, rtol=0, atol=1e-6)


def test_several_labels(tiny):
    run = grey_run(tiny, multilabel=True)
    x = parts(2, shape=(1, 8, 8))[0].tensors[0]
    result = run.predict(x, 0)
    prepared = run.preprocessing.batch(list(x))
    with torch.no_grad():
        logits = run.personal(0)(prepared)
    torch.testing.assert_close(result.probabilities, 1 / (1 + (-logits).exp()))
    assert torch.equal(result.labels, (logits > 0).long())
    example = Predictions(torch.tensor([[0.9, 0.2, 0.7], [0.1, 0.2, 0.3]]), torch.tensor([[1, 0, 1], [0, 0, 0]]), "abc")
    assert example.names == ["a|c", ""]


def test_what_cannot_be_predicted_is_said(tiny, run, tmp_path):
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(ValueError, match=r"broken\.png is not a readable image"):
        run.predict([tmp_path / "broken.png"])
    with pytest.raises(FileNotFoundError, match=r"missing\.png does not exist"):
        run.predict("missing.png")
    with pytest.raises(ValueError, match="no images"):
        run.predict([])
    with pytest.raises(TypeError, match="an image must be a tensor, an array or a PIL image, got 7"):
        run.predict(7)
    with pytest.raises(ValueError, match="Standalone has no global model"):
        grey_run(tiny, "standalone").predict(torch.zeros(1, 8, 8, dtype=torch.uint8))


def test_images_are_listed(tmp_path):
    for name in ("b/2.PNG", "a/1.jpg", "note.txt"):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    names, paths = find_images(tmp_path / "images")
    assert names == ["a/1.jpg", "b/2.PNG"]
    assert paths == [tmp_path / "images" / name for name in names]
    table = tmp_path / "table.csv"
    table.write_text("note,path\nx,images/a/1.jpg\ny,/elsewhere/2.png\n")
    assert find_images(table)[1] == [tmp_path / "images" / "a" / "1.jpg", tmp_path.__class__("/elsewhere/2.png")]
    (tmp_path / "table.tsv").write_text("note\tpath\nx, y\timages/a/1.jpg\n")
    assert find_images(tmp_path / "table.tsv")[0] == ["images/a/1.jpg"]
    for text, message in (
        ("file\na\n", "no column 'path' among"),
        ("path,b\n,2\n", "row 2, has no path"),
        ("path\n", "no rows"),
    ):
        table.write_text(text)
        with pytest.raises(ValueError, match=message):
            find_images(table)
    table.write_bytes(b"path\n\xff\xfe\n")
    with pytest.raises(ValueError, match=r"table\.csv.*line 2 .*0xff"):
        find_images(table)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        find_images(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="no images: set root"):
        find_images(tmp_path / "empty")


def test_a_broken_record_in_the_file_is_named(saved_run, tmp_path):
    folder = shutil.copytree(saved_run, tmp_path / "copy")
    text = (undigested(folder) / "run.json").read_text()
    (folder / "run.json").write_text(text.replace('"kind": "uint8"', '"kind": "video"'))
    with pytest.raises(ValueError, match=r"run\.json'.*preprocessing: kind .*'video'"):
        perada.Run.load(folder)
    content = json.loads(text)
    del content["info"]["preprocessing"]
    (folder / "run.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"run\.json'.*'preprocessing'"):
        perada.Run.load(folder)
