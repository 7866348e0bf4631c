# SPDX-License-Identifier: Apache-2.0
"""Exports of both models of a client: the code in a model card, and the prediction as one network."""

import re

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import TensorDataset

import perada
from perada.core.checks import OptionError
from perada.data import FederatedData
from perada.results import formats
from perada.results.both_network import BothModelsNetwork
from perada.results.formats import export_model
from perada.results.models import Ensemble, both_predictor
from perada.tasks import Regression, Segmentation
from perada.tasks.base import make_task
from tests.options import sections

OPTIONS = {"rounds": 2, "local_steps": 4, "logger": False, "enable_progress_bar": False, "accelerator": "cpu"}
OPTIONS |= {"lr_local": 0.3, "lr_personal": 0.3, "evaluation": {"prediction": "both", "personal_share": 0.7}}


def images_of(client, count=24, seed=0):
    """Images whose brightness and contrast differ between clients, so that some images of others look foreign."""
    generator = torch.Generator().manual_seed(10 * seed + client)
    images = torch.randint(0, 100 + 40 * client, (count, 3, 32, 32), generator=generator)
    level = torch.randint(0, 60, (count, 1, 1, 1), generator=generator)
    return (images + level).to(torch.uint8)


def federation(targets=None):
    """Two clients, by default with different classes, so that their models differ."""
    train = []
    test = []
    for client in range(2):
        own_targets = targets
        if own_targets is None:
            own_targets = torch.full((24,), 2 * client)
            own_targets[::4] = 1
        train.append(TensorDataset(images_of(client), own_targets))
        test.append(TensorDataset(images_of(client, seed=1), own_targets))
    return FederatedData(train, test, num_classes=3 if targets is None else None)


def fitted(adapter, backbone="test_resnet", data=None, **options):
    arguments = OPTIONS | {"adapter": adapter, "algorithm": "ditto", "pretrained": False} | options
    return perada.finetune(backbone, data or federation(), **sections(**arguments))


@pytest.fixture(scope="module")
def lora():
    return fitted("lora")


def new_images():
    """Images of both clients that no training has seen."""
    return torch.cat([images_of(0, seed=2), images_of(1, seed=2)])


def code_of_card(folder):
    """The second block of a card, which predicts with both models."""
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert "## Predict with both models" in text
    blocks = re.findall(r"```python\n(.*?)\n```", text, re.DOTALL)
    assert len(blocks) == 2
    return blocks[1]


def check_code_of_card(run, folder, monkeypatch, client=0, network=None):
    """Compare the code in a client's card with the run, with a function that makes a network of one's own."""
    monkeypatch.chdir(folder / f"client_{client}")
    names = {"network": network}
    code = code_of_card(folder / f"client_{client}")
    if network is not None:
        code = code.replace("backbone = ...", "backbone = network()")
    exec(code, names)  # what the card tells readers to run
    images = new_images()
    expected = run.predict(images, client, prediction="both")
    # Images of both kinds, or one of the two models would not be compared.
    assert 0 < expected.typical.float().mean() < 1
    personal = run.predict(images, client, prediction="personal").probabilities
    shared = run.predict(images, client, prediction="global").probabilities
    assert (personal - shared).abs().max() > 1e-2
    found, typical = names["predict"](run.preprocessing.batch(list(images)))
    if run.info["task"]["per_pixel"]:
        found = found.movedim(1, -1)
    torch.testing.assert_close(found, expected.probabilities, rtol=0, atol=1e-5)
    assert torch.equal(typical, expected.typical)


def test_the_card_predicts_with_both_models_by_peft_and_timm(lora, tmp_path, monkeypatch):
    lora.export(tmp_path, client=0)
    code = code_of_card(tmp_path / "client_0")
    assert "perada" not in code
    assert "get_submodule" in code
    check_code_of_card(lora, tmp_path, monkeypatch)


def test_the_exported_statistics_are_those_of_the_client_only(lora, tmp_path):
    lora.export(tmp_path, client=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["backbone.safetensors", "client_1", "global"]
    tensors = load_file(tmp_path / "client_1" / "typical.safetensors")
    assert tensors.keys() == lora._state_of_both(1).keys()
    assert len(tensors["examples"]) == 24
    assert "typical.safetensors" in (tmp_path / "client_1" / "SHA256SUMS").read_text(encoding="utf-8")
    assert not (tmp_path / "global" / "typical.safetensors").exists()


CASES = [
    pytest.param("residual", "test_resnet", {}, id="an adapter of perada"),
    pytest.param("full", "test_resnet", {}, id="pixels"),
    pytest.param("lora", "test_vit", {"image_size": 32}, id="tokens", marks=pytest.mark.slow),
    pytest.param("lora", "test_convnext", {"image_size": 32}, id="channels last", marks=pytest.mark.slow),
    pytest.param("head", "test_resnet", {}, id="vectors", marks=pytest.mark.slow),
    pytest.param("lora", "test_resnet", {"train_backbone": True}, id="backbones of their own", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("adapter", "backbone", "options"), CASES)
def test_the_card_predicts_whatever_images_are_compared_by(tmp_path, monkeypatch, adapter, backbone, options):
    run = fitted(adapter, backbone, **options)
    run.export(tmp_path)
    check_code_of_card(run, tmp_path, monkeypatch)


def test_a_card_converts_numbers_into_the_units_of_the_targets(tmp_path, monkeypatch):
    generator = torch.Generator().manual_seed(5)
    data = federation(targets=torch.randn(24, 2, generator=generator))
    run = fitted("lora", data=data, task=Regression(mean=(10.0, -3.0), std=(2.0, 0.5)))
    run.export(tmp_path)
    check_code_of_card(run, tmp_path, monkeypatch)


def classifier_of_pixels():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(8, 3, 1))


def test_masks_are_predicted_with_both_models(tmp_path, monkeypatch):
    masks = torch.randint(0, 3, (24, 32, 32), generator=torch.Generator().manual_seed(6))
    data = federation(targets=masks)
    data.train[0] = TensorDataset(images_of(0), masks.clamp(max=1))
    run = fitted("head", classifier_of_pixels(), data, task=Segmentation(), num_classes=3)
    run.export(tmp_path)
    check_code_of_card(run, tmp_path, monkeypatch, network=classifier_of_pixels)
    logits, typical = outputs_of_network(run, 0)
    expected = run.predict(new_images(), 0)
    assert torch.equal(typical, expected.typical)
    torch.testing.assert_close(logits.softmax(1), expected.probabilities.movedim(-1, 1), rtol=0, atol=1e-5)


def test_a_client_with_few_images_finds_all_typical(tmp_path, monkeypatch):
    data = federation()
    data.train[0] = TensorDataset(images_of(0, count=9), torch.arange(9) % 3)
    run = fitted("lora", data=data)
    run.export(tmp_path)
    monkeypatch.chdir(tmp_path / "client_0")
    names = {}
    exec(code_of_card(tmp_path / "client_0"), names)
    images = new_images()
    found, typical = names["predict"](run.preprocessing.batch(list(images)))
    assert typical.all()
    # And not as many rows as the other client has.
    assert len(load_file(tmp_path / "client_0" / "typical.safetensors")["examples"]) == 9
    torch.testing.assert_close(found, run.predict(images, 0).probabilities, rtol=0, atol=1e-5)


def test_without_both_models_the_export_is_as_before(lora, tmp_path):
    folder = lora.export(tmp_path / "run")
    assert (folder / "client_0" / "typical.safetensors").is_file()
    lora.export(folder, prediction="personal")
    assert not (folder / "client_0" / "typical.safetensors").exists()
    card = (folder / "client_0" / "README.md").read_text(encoding="utf-8")
    assert "## Predict with both models" not in card
    lora.export(tmp_path / "one", client=0, prediction="personal")
    assert not (tmp_path / "one" / "global").exists()


@pytest.mark.filterwarnings("error")
def test_an_algorithm_without_two_models_is_exported_plainly(tmp_path):
    run = fitted("lora", algorithm="fedavg", rounds=1)
    run.export(tmp_path / "run")
    assert not list(tmp_path.rglob("typical.safetensors"))
    with pytest.raises(OptionError, match=r"prediction='both'.*statistics"):
        run.export(tmp_path / "other", prediction="both")
    assert not (tmp_path / "other" / "client_0").exists()


def test_a_task_that_only_perada_knows_is_exported_plainly(lora, tmp_path, monkeypatch):
    monkeypatch.setitem(lora.info, "task", lora.info["task"] | {"class_path": "Counting"})
    with pytest.warns(UserWarning, match="2 of 2 clients"):
        lora.export(tmp_path / "run")
    assert not list(tmp_path.rglob("typical.safetensors"))
    with pytest.raises(OptionError, match=r"exported.*Counting"):
        lora.export(tmp_path / "other", prediction="both")


def test_tensors_of_one_network_do_not_hold_both_models(lora, tmp_path):
    with pytest.raises(OptionError, match=r"'both'.*format='safetensors'"):
        export_model(lora, 0, "safetensors", tmp_path / "out", "both")
    with pytest.raises(OptionError, match=r"prediction='both'.*client=None"):
        export_model(lora, None, "onnx", tmp_path / "out", "both")
    assert not (tmp_path / "out").exists()
    note = export_model(lora, 0, "safetensors", tmp_path / "out")
    assert "It is the client's personal model only." in note


def outputs_of_network(run, client):
    """The outputs of the network that is exported, for new images."""
    state = run._state_of_both(client)
    predictor = both_predictor(run, client, state, torch.device("cpu"))
    task = make_task(run.info["task"])
    personal = run.personal(client)
    network = BothModelsNetwork(personal, run.global_model(), state, predictor.compared_maps, task).eval()
    with torch.no_grad():
        return network(run.preprocessing.batch(list(new_images())))


def check_outputs(run, client, logits, typical):
    """Compare the outputs of a network for new images with the run's."""
    expected = run.predict(new_images(), client, prediction="both")
    assert 0 < expected.typical.float().mean() < 1
    torch.testing.assert_close(logits.softmax(1), expected.probabilities, rtol=0, atol=1e-5)
    assert torch.equal(typical, expected.typical)


@pytest.mark.parametrize("adapter", ["lora", "full"])
def test_one_network_predicts_with_both_models(lora, adapter):
    run = lora if adapter == "lora" else fitted(adapter)
    logits, typical = outputs_of_network(run, 0)
    check_outputs(run, 0, logits, typical)


def bytes_of(tensors):
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("num_members", [1, 3])
def test_one_network_has_the_frozen_weights_once(lora, num_members):
    state = lora._state_of_both(0)
    personal = lora.personal(0)
    trained = [parameter for parameter in personal.parameters() if parameter.requires_grad]
    members = [lora.global_model() for _ in range(num_members)]
    for number, member in enumerate(members):
        for parameter in member.parameters():
            if parameter.requires_grad:
                parameter.data += 1 + number
    shared = Ensemble(members, "logits", make_task(lora.info["task"])) if num_members > 1 else members[0]
    size = bytes_of(personal.parameters()) + num_members * bytes_of(trained)
    network = BothModelsNetwork(personal, shared, state, [], make_task(lora.info["task"]))
    assert bytes_of(network.parameters()) == size


@pytest.mark.slow
@pytest.mark.parametrize("form", ["onnx", "torch-export"])
@pytest.mark.parametrize("adapter", ["lora", "full"])
def test_a_file_predicts_with_both_models(lora, tmp_path, form, adapter):
    run = lora if adapter == "lora" else fitted(adapter)
    export_model(run, 0, form, tmp_path)
    x = run.preprocessing.batch(list(new_images()))
    if form == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        assert names == ["logits", "typical"]
        logits, typical = map(torch.from_numpy, session.run(None, {"images": x.numpy()}))
    else:
        with torch.no_grad():
            logits, typical = torch.export.load(tmp_path / "model.pt2").module()(x)
    check_outputs(run, 0, logits, typical)
    assert "`typical` (B,)" in (tmp_path / "README.md").read_text(encoding="utf-8")


def sizes_of_files(run, folder, form, name):
    """Bytes of the files with one model of a client and with both."""
    sizes = []
    for prediction in ("personal", "both"):
        export_model(run, 0, form, folder / prediction, prediction)
        sizes.append((folder / prediction / name).stat().st_size)
    return sizes


@pytest.mark.slow
@pytest.mark.parametrize("backbone", ["test_resnet", pytest.param("test_vit", id="weights that ONNX has transposed")])
def test_a_file_of_both_models_holds_the_frozen_weights_once(tmp_path, backbone):
    import onnx

    run = fitted("lora", backbone, image_size=32)
    sizes_of_files(run, tmp_path / "onnx", "onnx", "model.onnx")
    initializers = onnx.load(tmp_path / "onnx" / "both" / "model.onnx").graph.initializer
    contents = [(tensor.data_type, tuple(tensor.dims), tensor.raw_data) for tensor in initializers]
    assert len(contents) == len({*contents})
    frozen = bytes_of(p for p in run.personal(0).parameters() if not p.requires_grad)
    # The graph itself is as large as the weights of so small a network.
    assert sum(len(data) for _, _, data in contents) < 1.5 * frozen
    one, both = sizes_of_files(run, tmp_path / "export", "torch-export", "model.pt2")
    # With a second copy it would be almost twice that.
    assert both < one + frozen


def test_a_wrong_personal_model_is_noticed_though_no_sample_is_typical(lora, tmp_path, monkeypatch):
    def forward(self, images):
        logits, typical = right(self, images)
        return torch.where(typical.unsqueeze(1), logits + 1e-2, logits), typical

    right = BothModelsNetwork.forward
    written = []

    def write(model, x, path, metadata):
        written.append(model(x)[1].float().mean().item())
        path.write_bytes(b"")
        return model

    monkeypatch.setattr(formats, "_write_torch_export", write)
    export_model(lora, 0, "torch-export", tmp_path / "right")
    # The file that is kept is the last one, with the client's own threshold.
    assert written == [0.5, 0.0]
    monkeypatch.setattr(BothModelsNetwork, "forward", forward)
    with pytest.raises(ValueError, match=r"differ.* by 1"):
        export_model(lora, 0, "torch-export", tmp_path / "wrong")
    assert not (tmp_path / "wrong" / "model.pt2").exists()
