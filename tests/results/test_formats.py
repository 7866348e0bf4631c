# SPDX-License-Identifier: Apache-2.0
"""One model of a run in the formats of other programs."""

import json
import sys

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.utils.data import TensorDataset

import perada
from perada.cli import main
from perada.results import formats
from perada.results.formats import export_model
from tests.disks import no_room
from tests.options import sections
from tests.rejections import rejects


def make_run(tmp_path, adapter, **options):
    random = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (2, 6, 3, 32, 32), generator=random, dtype=torch.uint8)
    sets = [TensorDataset(part, torch.arange(6) % 3) for part in x]
    settings = {"pretrained": False, "rounds": 2, "local_steps": 2, "lr_local": 0.3, "lr_personal": 0.3}
    settings |= {"accelerator": "cpu", "enable_progress_bar": False, "default_root_dir": str(tmp_path)}
    return perada.finetune("test_resnet", perada.FederatedData(sets), **sections(adapter=adapter, **settings | options))


@pytest.fixture(scope="module")
def lora(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    return make_run(folder, "lora"), folder / "lightning_logs" / "version_0"


def logits(model, x):
    with torch.no_grad():
        return model(x)


def test_merged_tensors_fit_the_plain_backbone(lora, tmp_path, capsys):
    run, folder = lora
    main(["export", str(folder), "--client", "1", "--format", "safetensors", "--output", str(tmp_path)])
    assert "The adapter is merged" in capsys.readouterr().out
    plain = timm.create_model("test_resnet", num_classes=3).eval()
    before = plain.state_dict()["layer1.0.conv1.weight"].clone()
    plain.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert not torch.equal(before, plain.state_dict()["layer1.0.conv1.weight"])
    x = torch.randn(3, 3, 32, 32)
    torch.testing.assert_close(logits(plain, x), logits(run.personal(1), x), rtol=0, atol=1e-4)
    assert (logits(plain, x) - logits(run.personal(0), x)).abs().max() > 1e-3
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["preprocessing"]) == run.info["preprocessing"]
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("# The model of client 1 of a run of perada\n")
    assert json.loads(text.split("```json\n")[1].split("```")[0]) == run.info["preprocessing"] | {"classes": None}


FORMS = [("torch-export", "lora", {})]
SLOW = [
    ("torch-export", "residual", {}),
    ("torch-export", "full", {"algorithm": "fed_ensemble"}),
    ("onnx", "lora", {}),
    ("onnx", "residual", {}),
]


@pytest.mark.parametrize(
    ("form", "adapter", "options"), [*FORMS, *(pytest.param(*arguments, marks=pytest.mark.slow) for arguments in SLOW)]
)
def test_files_give_the_runs_logits_for_any_number_of_images(lora, tmp_path, form, adapter, options):
    run = lora[0] if adapter == "lora" else make_run(tmp_path, adapter, **options)
    said = export_model(run, None, form, tmp_path / "out")
    assert ("is merged" in said) == (adapter == "lora")
    x = torch.randn(3, 3, 32, 32)
    expected = logits(run.global_model(), x)
    if form == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx", providers=["CPUExecutionProvider"])
        actual = torch.from_numpy(session.run(None, {"images": x.numpy()})[0])
        recorded = session.get_modelmeta().custom_metadata_map
    else:
        extra = {"metadata.json": ""}
        actual = logits(torch.export.load(tmp_path / "out" / "model.pt2", extra_files=extra).module(), x)
        recorded = json.loads(extra["metadata.json"])
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)
    assert json.loads(recorded["preprocessing"]) == run.info["preprocessing"]


def test_a_file_with_other_logits_is_not_kept(lora, tmp_path, monkeypatch):
    write = formats._write_safetensors

    def wrong(model, x, path, metadata):
        read = write(model, x, path, metadata)
        # By more than 1e-4 of the largest logit.
        return lambda images: read(images) * (1 + 2e-4)

    def failing(*arguments):
        write(*arguments)
        raise KeyError("aten::odd")

    def full(model, x, path, metadata):
        with no_room(1000):
            return write(model, x, path, metadata)

    export_model(lora[0], None, "safetensors", tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert before.keys() == {"model.safetensors", "README.md"}
    for network, kind, message in (
        (wrong, ValueError, r"its logits would differ from the run's by .*, more than"),
        (failing, ValueError, r"cannot be exported as safetensors \(KeyError: 'aten::odd'\)"),
        (full, OSError, rf"{tmp_path.name}' could not be written and is unchanged \(File too large"),
    ):
        monkeypatch.setattr(formats, "_write_safetensors", network)
        with pytest.raises(kind, match=message):
            export_model(lora[0], 1, "safetensors", tmp_path)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("scale", [1e-5, 1e5])
def test_the_tolerance_follows_the_scale_of_the_outputs(lora, tmp_path, monkeypatch, scale):
    run, _ = lora
    personal = type(run).personal

    def scaled(self, client):
        model = personal(self, client)
        with torch.no_grad():
            for parameter in model.get_submodule("fc").parameters():
                parameter.mul_(scale)
        return model

    monkeypatch.setattr(type(run), "personal", scaled)
    write = formats._write_torch_export

    def rounded(model, x, path, metadata):
        read = write(model, x, path, metadata)
        return lambda images: read(images) * (1 + factor)

    monkeypatch.setattr(formats, "_write_torch_export", rounded)
    monkeypatch.setattr(formats, "_merge_adapter", lambda run, model, client: formats._Merged(model, ""))
    factor = 1e-5
    export_model(run, 1, "torch-export", tmp_path / "good")
    factor = 1e-3
    with pytest.raises(ValueError, match="would differ"):
        export_model(run, 1, "torch-export", tmp_path / "wrong")


def test_what_cannot_be_exported_is_said(lora, tmp_path, monkeypatch):
    run, folder = lora
    out = ["--output", str(tmp_path / "out")]
    with rejects("client", 7):
        main(["export", str(folder), *out, "--format", "onnx", "--client", "7"])
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(
        ModuleNotFoundError,
        match=r"^format=onnx .*'perada\[onnx\]'",
    ):
        export_model(run, None, "onnx", tmp_path / "out")
    checkpoint = folder / "checkpoints" / "last.ckpt"
    saved = torch.load(checkpoint, weights_only=True)
    del saved["perada"]["info"]["privacy"]
    torch.save(saved, tmp_path / "checkpoint")
    with pytest.raises(ValueError, match="content is not what perada writes"):
        main(["export", str(tmp_path / "checkpoint"), *out, "--format", "safetensors"])
    assert not (tmp_path / "out").exists()
