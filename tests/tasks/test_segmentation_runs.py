# SPDX-License-Identifier: Apache-2.0
"""Training, distillation and prediction of masks, from data to scores."""

import copy
import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

import perada
from perada.core.checks import OptionError
from perada.core.rounds import Phase
from perada.core.states import get_state, stack
from perada.data import FederatedData, FederatedDataModule
from perada.data.batches.transforms import prepare_images
from perada.engine.engine import Engine
from perada.models.adapted import insert_adapter
from perada.models.backbones import build_backbone
from perada.results.formats import export_model
from perada.server.distill import Distillation, TeacherBatches
from perada.tasks import Segmentation
from perada.tasks.geometry import augment
from tests.masks import SIZE, UNet, dice_loss, hospitals, squares


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return UNet()


def fit(network, data=None, algorithm="fedavg", adapter="full", *, engine="auto", **options):
    options = {"rounds": 1, "local_steps": 1, "lr_local": 0.1, "seed": 1} | options
    if data is None:
        data = FederatedDataModule(hospitals(), batch_size="full")
    return perada.finetune(
        network, data, pretrained=False, algorithm=algorithm, adapter=adapter, training={"engine": engine}, **options
    )


@pytest.mark.parametrize("engine", ["folded", "loop"])
@pytest.mark.parametrize("loss", ["cross_entropy", "dice"])
def test_a_round_equals_a_loop_over_clients(network, engine, loss):
    data = FederatedDataModule(hospitals(), batch_size="full", task=Segmentation(loss))
    run = fit(network, data, engine=engine)
    updates = []
    for dataset in hospitals().train:
        images, masks = dataset.tensors
        model = copy.deepcopy(network)
        logits = model(prepare_images(images))
        if loss == "cross_entropy":
            value = F.cross_entropy(logits, masks.long())
        else:
            value = dice_loss(logits, masks)
        value.backward()
        updates.append([parameter - 0.1 * parameter.grad for parameter in model.parameters()])
    trained = dict(run.global_model().named_parameters())
    for (name, _), *values in zip(network.named_parameters(), *updates, strict=True):
        torch.testing.assert_close(trained[name], torch.stack(values).mean(0), rtol=1e-4, atol=1e-5)


def test_perada_distils_saves_and_predicts(network, tmp_path):
    data = FederatedDataModule(
        hospitals(), batch_size=8, flip=True, crop_padding=2, task=Segmentation("both", distill_stride=2)
    )
    run = fit(network, data, "perada", "lora", local_steps=2, distillation={"steps": 2, "batch_size": 4})
    scores = run.metrics["rounds"][-1]
    assert 0 < scores["personal/local_test"] < 1
    loaded = perada.Run.load(run.save(tmp_path / "run"), backbone=network)
    images = squares(3, 9).tensors[0]
    predictions = loaded.predict(images, client=1)
    assert predictions.labels.shape == (3, SIZE, SIZE)
    assert torch.equal(predictions.labels, run.personal(1)(prepare_images(images)).argmax(1))
    torch.testing.assert_close(predictions.probabilities.sum(-1), torch.ones(3, SIZE, SIZE))


def test_scores_are_those_of_the_models(network):
    run = fit(network, algorithm="fedper", evaluation={"metric": ["accuracy", "miou"]})
    for client, dataset in enumerate(hospitals().test):
        images, masks = dataset.tensors
        predicted = run.personal(client)(prepare_images(images)).argmax(1)
        expected = float((predicted == masks).double().mean())
        assert run.metrics["clients"]["personal/local_test"][client] == pytest.approx(expected)


def test_masks_are_mirrored_and_shifted_with_their_images():
    _, masks = squares(2, 1).tensors
    marked = masks.unsqueeze(1).repeat(1, 3, 1, 1) * 100
    crops = torch.tensor([[0, 6, 1], [3, 3, 0]])
    moved_images = augment(marked, crops, 3)
    moved_masks = augment(masks.unsqueeze(1), crops, 3, border=255)[:, 0]
    inside = moved_masks != 255
    assert torch.equal(moved_images[:, 0][inside], moved_masks[inside] * 100)
    assert (moved_images[:, 0][~inside] == 0).all()
    assert torch.equal(moved_masks[1], masks[1])


def test_training_batches_are_augmented_with_their_masks():
    _, masks = squares(16, 1).tensors
    images = (masks * 100).unsqueeze(1)
    data = FederatedDataModule(
        FederatedData([TensorDataset(images, masks)]), batch_size="full", flip=True, crop_padding=3
    )
    data.setup()
    data.configure_rounds(seed=2, clients_per_round=None, phases=[Phase("local", steps=1)])
    batch = data.first_batch([0])
    inside = batch.y != 255
    # Images are normalised with mean and standard deviation 0.5.
    pixels = ((batch.x[:, :, 0] * 0.5 + 0.5) * 255).round()
    assert torch.equal(pixels[inside], batch.y[inside] * 100.0)
    assert 0 < int((~inside).sum()) < inside.numel()
    assert not torch.equal(batch.y[0], masks)


def test_masks_are_resized_by_nearest_neighbour_with_their_images(network):
    data = FederatedDataModule(hospitals(), batch_size=4, image_size=SIZE // 2)
    data.setup()
    for images, masks in data.test_batches():
        assert images.shape[-2:] == masks.shape[-2:] == (SIZE // 2, SIZE // 2)
        assert set(masks.unique().tolist()) <= {0, 1, 2}
    # Then features are served in place of images.
    assert fit(network, data, adapter="head").metrics["rounds"]


@pytest.mark.parametrize("adapter", ["full", "head"])
def test_masks_of_images_that_are_not_resized_keep_their_size(network, adapter):
    """``image_size`` resizes uint8 images only. With a head, features are served in place of images."""
    random = torch.Generator().manual_seed(0)

    def dataset(count):
        images = torch.rand(count, 3, 16, 16, generator=random)
        return TensorDataset(images, torch.randint(0, 3, (count, 16, 16), generator=random))

    clients = FederatedData([dataset(4), dataset(5)], [dataset(3), dataset(2)], server_validation=dataset(2))
    data = FederatedDataModule(clients, batch_size=2, image_size=SIZE)
    data.setup()
    for _, masks in data.test_batches():
        assert masks.shape[-2:] == (16, 16)
    for images, masks in data.validation_batches():
        assert images.shape[-2:] == masks.shape[-2:] == (16, 16)
    scores = fit(network, data, adapter=adapter).metrics["rounds"][-1]
    without_size = FederatedDataModule(clients, batch_size=2)
    kept_size = fit(network, without_size, adapter=adapter).metrics["rounds"][-1]
    assert scores == kept_size


class Pairs(Dataset):
    """Pairs that are read one by one."""

    def __init__(self, pairs):
        self.pairs = pairs

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        return self.pairs[index]


def test_masks_that_are_read_one_by_one_train_the_same(network):
    in_memory = hospitals()
    read = FederatedData(
        [Pairs(dataset) for dataset in in_memory.train], [Pairs(dataset) for dataset in in_memory.test], num_classes=3
    )
    expected = fit(network).metrics["clients"]["personal/local_test"]
    run = fit(network, FederatedDataModule(read, batch_size="full"))
    assert run.metrics["clients"]["personal/local_test"] == pytest.approx(expected)


def test_the_number_of_classes_is_needed_where_masks_are_read_one_by_one():
    with pytest.raises(ValueError, match=r"client 0 .*num_classes"):
        FederatedDataModule(FederatedData([Pairs(squares(3, 0))])).setup()


def test_a_mask_with_an_unknown_class_is_named(network):
    images, masks = squares(3, 0).tensors
    masks[1, 0, 0] = 7
    with pytest.raises(ValueError, match=r"client 0: .*training image 1 .*class 7, .*0\.\.2.*num_classes \(now 3\)"):
        FederatedDataModule(FederatedData([TensorDataset(images, masks)], num_classes=3)).setup()
    data = FederatedData([Pairs(TensorDataset(images, masks))], num_classes=3)
    with pytest.raises(ValueError, match=r"client 0, sample 1: .*class 7, .*0\.\.2"):
        fit(network, FederatedDataModule(data, batch_size="full"))


def test_masks_of_another_size_are_rejected():
    images, masks = squares(3, 0).tensors
    with pytest.raises(ValueError, match=r"\(32, 16\), .*\(32, 32\)"):
        FederatedDataModule(FederatedData([TensorDataset(images, masks[:, :, :16])])).setup()


def test_mixed_images_are_rejected():
    with pytest.raises(ValueError, match=r"Segmentation.*mixup and cutmix"):
        FederatedDataModule(hospitals(), mixup=0.2).setup()


@pytest.mark.parametrize("task", [Segmentation(), None])
def test_a_network_of_the_other_kind_is_rejected(task):
    if task is None:
        data = FederatedData([TensorDataset(squares(6, 0).tensors[0], torch.arange(6) % 2)])
        with pytest.raises(OptionError, match="not masks"):
            perada.finetune("smp:unet-resnet18", data, pretrained=False)
    else:
        with pytest.raises(OptionError, match="classifies images"):
            perada.finetune("test_resnet", hospitals(), pretrained=False, task=task)


def test_algorithms_that_count_classes_are_rejected(network):
    with pytest.raises(ValueError, match="class"):
        fit(network, algorithm="fedrod")


def test_predicted_masks_are_files_of_the_size_of_their_images(network, tmp_path):
    run = fit(network)
    images = squares(3, 9).tensors[0]
    names = ["a/1.png", "a/1.jpg", "b/2.png"]
    sizes = [(32, 32), (40, 20), (16, 64)]
    for name, size, image in zip(names, sizes, images, strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).resize(size).save(tmp_path / name)
    predictions = run.predict([tmp_path / name for name in names], client=0)
    relative = replace(predictions, paths=tuple(names), sources=predictions.paths)
    folder = relative.save_masks(tmp_path / "masks")
    written = ["a/1.png.png", "a/1.jpg.png", "b/2.png"]
    for row, (name, size) in enumerate(zip(written, sizes, strict=True)):
        with Image.open(folder / name) as mask:
            assert mask.size == size
            if row == 0:
                assert np.array_equal(np.array(mask), predictions.labels[row].numpy())
    absolute = predictions.save_masks(tmp_path / "others")
    assert sorted(path.name for path in absolute.iterdir()) == ["000000_1.png", "000001_1.png", "000002_2.png"]
    with pytest.raises(ValueError, match="save_masks"):
        predictions.to_csv(tmp_path / "table.csv")


@pytest.mark.parametrize("engine", ["folded", "loop"])
def test_private_sums_are_those_of_clipped_gradients_of_images(network, engine):
    """Without noise, the update is the sum of the clipped gradients divided by the mean batch size."""
    data = FederatedData([squares(6, 0)], [squares(2, 1)])
    privacy = {"noise_multiplier": 1e-6, "max_norm": 0.01, "delta": 1e-5, "sampling": "shuffle"}
    run = fit(network, FederatedDataModule(data, batch_size="full"), adapter="head", engine=engine, privacy=privacy)
    images, masks = data.train[0].tensors
    model = copy.deepcopy(network).requires_grad_(False)
    model.out.requires_grad_(True)
    parameters = list(model.out.parameters())
    sums = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in parameters]
    for image, mask in zip(images, masks, strict=True):
        loss = F.cross_entropy(model(prepare_images(image.unsqueeze(0))), mask.long().unsqueeze(0))
        gradients = torch.autograd.grad(loss, parameters)
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for total, gradient in zip(sums, gradients, strict=True):
            total += gradient * min(1.0, 0.01 / float(norm))
    trained = run.global_model().out
    for parameter, total, value in zip(parameters, sums, (trained.weight, trained.bias), strict=True):
        change = (value - parameter).double()
        torch.testing.assert_close(change, -0.1 * total / 6, rtol=1e-2, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning")
def test_a_resumed_run_is_the_same_to_the_bit(network, tmp_path):
    options = {"adapter": "lora", "algorithm": "perada", "distillation": {"steps": 1, "batch_size": 4}}
    data = {"batch_size": 4, "flip": True, "crop_padding": 2}
    through = fit(network, FederatedDataModule(hospitals(), **data), rounds=2, **options)
    callbacks = [ModelCheckpoint(tmp_path / "checkpoints")]
    fit(
        network,
        FederatedDataModule(hospitals(), **data),
        rounds=1,
        default_root_dir=tmp_path,
        enable_checkpointing=True,
        callbacks=callbacks,
        **options,
    )
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    resumed = fit(
        network,
        FederatedDataModule(hospitals(), **data),
        rounds=2,
        callbacks=[ModelCheckpoint(tmp_path / "checkpoints")],
        ckpt_path=str(checkpoint),
        **options,
    )
    for client in range(3):
        for value, expected in zip(
            resumed.state("personal", client).values(), through.state("personal", client).values(), strict=True
        ):
            assert torch.equal(value, expected)


@pytest.mark.filterwarnings("ignore:client .* its personal model is worse:UserWarning")
def test_a_client_that_joins_equals_a_plain_loop(network):
    data = FederatedDataModule(hospitals(), batch_size="full", task=Segmentation("both"))
    run = fit(network, data, algorithm="ditto", algorithm_options={"prox_strength": 0.7})
    newcomer = FederatedData([squares(6, 50, 30)], [squares(4, 51, 30)])
    joined = perada.personalize(run, newcomer, "newcomer", rounds=1, local_steps=2, lr=0.05)
    images, masks = newcomer.train[0].tensors
    model = copy.deepcopy(run.global_model()).requires_grad_(True).train()
    anchor = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(2):
        logits = model(prepare_images(images))
        loss = F.cross_entropy(logits, masks.long()) + dice_loss(logits, masks)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient, start in zip(model.parameters(), gradients, anchor, strict=True):
                parameter -= 0.05 * (gradient + 0.7 * (parameter - start))
    state = joined.state("personal", "newcomer")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(state[name], parameter.detach(), rtol=1e-4, atol=1e-6)
    test_images, test_masks = newcomer.test[0].tensors
    predicted = joined.predict(test_images, client="newcomer").labels
    dice_of_classes = []
    for k in range(3):
        of_images = []
        for prediction, mask in zip(predicted == k, test_masks == k, strict=True):
            if mask.any():
                of_images.append(2 * float((prediction & mask).sum()) / float(prediction.sum() + mask.sum()))
        dice_of_classes.append(sum(of_images) / len(of_images))
    assert joined.info["joined"][-1]["after"] == pytest.approx(sum(dice_of_classes) / 3, rel=1e-5)
    for client in range(3):
        for name, value in run.state("personal", client).items():
            assert torch.equal(joined.state("personal", client)[name], value)


def test_teachers_run_on_few_images_at_once_and_keep_the_grid(network, monkeypatch):
    engine = Engine(insert_adapter(build_backbone(network, 3, per_pixel=True), "head").model, "loop", per_pixel=True)
    states = stack([get_state(engine.model)] * 2)
    images = prepare_images(squares(5, 3).tensors[0])
    monkeypatch.setattr("perada.server.distill.DENSE_BATCH", 2)
    batches = TeacherBatches.of_steps(torch.tensor([[0, 3, 1], [4, 1, 2]]), Distillation(), engine)
    task = Segmentation(distill_stride=8)
    (logits,) = batches.logits(engine, states, lambda rows: images[rows], task)
    with torch.no_grad():
        expected = network.eval()(images).movedim(1, -1)[:, ::8, ::8]
    torch.testing.assert_close(logits, expected.expand(2, *expected.shape))


@pytest.mark.parametrize("mode", ["public", "train"])
def test_teachers_with_batch_statistics_run_on_all_images_of_a_batch_at_once(mode, monkeypatch):
    """Fewer images would have other statistics."""
    network = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    engine = Engine(insert_adapter(build_backbone(network, 3, per_pixel=True), "full").model, "loop", per_pixel=True)
    images = prepare_images(squares(5, 3).tensors[0])
    monkeypatch.setattr("perada.server.distill.DENSE_BATCH", 2)
    steps = torch.tensor([[0, 1, 2, 3, 4]])
    batches = TeacherBatches.of_steps(steps, Distillation(teacher_mode=mode), engine)
    states = stack([get_state(engine.model)])
    (logits,) = batches.logits(engine, states, lambda rows: images[rows], Segmentation(distill_stride=1))
    with torch.no_grad():
        convolved = network[0](images)
        mean = convolved.mean((0, 2, 3), keepdim=True)
        variance = convolved.var((0, 2, 3), correction=0, keepdim=True)
        expected = ((convolved - mean) / (variance + network[1].eps).sqrt()).movedim(1, -1)
    torch.testing.assert_close(logits[0], expected, rtol=1e-4, atol=1e-4)


def test_models_of_all_clients_run_in_groups_that_fit_in_memory(network, monkeypatch):
    expected = fit(network, algorithm="standalone", adapter="head").metrics
    monkeypatch.setattr("perada.federation.evaluation.PIXELS_AT_ONCE", 1)
    assert fit(network, algorithm="standalone", adapter="head").metrics["clients"] == expected["clients"]


def test_the_memory_of_teachers_logits_is_announced(network, caplog):
    data = FederatedDataModule(hospitals(), batch_size=4, task=Segmentation(distill_stride=4))
    with caplog.at_level("INFO"):
        fit(network, data, "perada", "head", distillation={"steps": 1, "batch_size": 4})
    # 4 images, 8 x 8 pixels, 3 classes, 8 bytes
    assert "logits of 4 public images take 0.0 MB on the server, 192 numbers for each" in caplog.text
    assert "secure_sums" not in caplog.text


def test_the_logits_that_sites_send_under_masks_are_announced(network, caplog):
    data = FederatedDataModule(hospitals(), batch_size=4)
    with caplog.at_level("INFO"):
        fit(network, data, "perada", "head", distillation={"steps": 2, "batch_size": 4}, secure_sums={})
    # 8 images, 32 x 32 pixels, 3 classes, 8 bytes
    assert "secure_sums: in a deployment, each site sends 0.2 MB of these logits per round" in caplog.text


def test_what_compares_predictions_of_images_is_rejected(network):
    options = {"algorithm": "perada", "adapter": "head"}
    with pytest.raises(ValueError, match=r"guard='predictions'.*one class per pixel"):
        fit(network, **options, distillation={"steps": 1, "guard": "predictions"})
    with pytest.raises(ValueError, match=r"personal_distance.*pixels"):
        fit(network, **options, distillation={"steps": 1}, evaluation={"diagnostics": ["personal_distance"]})


@pytest.mark.slow  # the exporter of ONNX takes seconds to load
@pytest.mark.parametrize("backbone", ["module", "smp:unet-resnet18"])
def test_onnx_has_the_logits_of_each_pixel_for_any_number_of_images(network, backbone, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    if backbone.startswith("smp:"):
        pytest.importorskip("segmentation_models_pytorch")
        network = backbone
    federated = replace(hospitals(2), classes=("background", "red", "green"))
    data = FederatedDataModule(federated, batch_size="full", task=Segmentation("both"))
    run = fit(network, data, "fedper", "lora", local_steps=2)
    summary = export_model(run, 1, "onnx", tmp_path / "model")
    assert "The adapter is merged" in summary
    session = onnxruntime.InferenceSession(tmp_path / "model" / "model.onnx")
    for count in (1, 3):
        images = squares(count, 9).tensors[0]
        (logits,) = session.run(None, {"images": run.preprocessing.batch(list(images)).numpy()})
        assert logits.shape == (count, 3, SIZE, SIZE)
        predictions = run.predict(images, client=1)
        probabilities = torch.from_numpy(logits).softmax(1).movedim(1, -1)
        torch.testing.assert_close(probabilities, predictions.probabilities, rtol=0, atol=1e-4)
        assert np.mean(logits.argmax(1) == predictions.labels.numpy()) > 0.999
    metadata = session.get_modelmeta().custom_metadata_map
    assert json.loads(metadata["classes"]) == ["background", "red", "green"]
    assert json.loads(metadata["task"])["init_args"]["ignore_index"] == 255
    text = (tmp_path / "model" / "README.md").read_text()
    assert "to outputs (B, 3, H, W); a softmax over the classes makes probabilities of them" in text


@pytest.mark.parametrize("metric", ["auto", "miou"])
def test_cards_name_task_and_metric_and_load_a_named_network(metric, tmp_path, monkeypatch):
    pytest.importorskip("segmentation_models_pytorch")
    data = FederatedDataModule(replace(hospitals(2), classes=("background", "red", "green")), batch_size="full")
    run = fit("smp:unet-resnet18", data, "fedper", "lora", evaluation={"metric": metric})
    run.export(tmp_path)
    card = ModelCard.load(tmp_path / "client_1" / "README.md")
    assert card.data.pipeline_tag == "image-segmentation"
    assert "Image segmentation. Each pixel has one of 3 classes: `background`, `red`, `green`." in card.text
    score = 100 * run.metrics["clients"]["personal/local_test"][1]
    name = "Dice" if metric == "auto" else "mean IoU"
    assert f"- {name} on the client's own test images: {score:.2f} %" in card.text
    lines = re.search(r"```python\n(.*?)\n```", card.text, re.DOTALL)[1]
    monkeypatch.chdir(tmp_path / "client_1")
    loaded = {}
    exec(lines, loaded)
    images = prepare_images(squares(2, 9).tensors[0])
    with torch.no_grad():
        torch.testing.assert_close(loaded["model"](images), run.personal(1)(images), rtol=0, atol=1e-5)
