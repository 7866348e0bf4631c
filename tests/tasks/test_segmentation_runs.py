# SPDX-License-Identifier: Apache-2.0
"""Training, distillation and prediction of masks, from data to scores."""

import copy

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

import perada
from perada.core.checks import OptionError
from perada.core.rounds import Phase
from perada.data import FederatedData, FederatedDataModule
from perada.data.batches.transforms import augment, prepare_images
from perada.tasks import Segmentation
from tests.masks import SIZE, UNet, hospitals, squares


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
            p = logits.softmax(1)
            g = F.one_hot(masks.long(), 3).movedim(-1, 1)
            dice = (2 * (p * g).sum((2, 3)) + 1) / (p.sum((2, 3)) + g.sum((2, 3)) + 1)
            value = (1 - dice.mean(1)).mean()
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


def test_masks_are_resized_by_nearest_neighbour_with_their_images():
    data = FederatedDataModule(hospitals(), batch_size=4, image_size=SIZE // 2)
    data.setup()
    for images, masks in data.test_batches():
        assert images.shape[-2:] == masks.shape[-2:] == (SIZE // 2, SIZE // 2)
        assert set(masks.unique().tolist()) <= {0, 1, 2}


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
    with pytest.raises(ValueError, match=r"masks of client 0 are read one by one.*set num_classes"):
        FederatedDataModule(FederatedData([Pairs(squares(3, 0))])).setup()


def test_a_mask_with_an_unknown_class_is_named(network):
    images, masks = squares(3, 0).tensors
    masks[1, 0, 0] = 7
    with pytest.raises(
        ValueError, match=r"client 0: the mask of training image 1 has the class 7, outside 0..2.*num_classes \(now 3\)"
    ):
        FederatedDataModule(FederatedData([TensorDataset(images, masks)], num_classes=3)).setup()
    data = FederatedData([Pairs(TensorDataset(images, masks))], num_classes=3)
    with pytest.raises(ValueError, match=r"client 0, sample 1: the mask has the class 7, outside 0..2"):
        fit(network, FederatedDataModule(data, batch_size="full"))


def test_masks_of_another_size_are_rejected():
    images, masks = squares(3, 0).tensors
    with pytest.raises(ValueError, match=r"masks are \(32, 16\), but their images are \(32, 32\)"):
        FederatedDataModule(FederatedData([TensorDataset(images, masks[:, :, :16])])).setup()


def test_mixed_images_are_rejected():
    with pytest.raises(ValueError, match=r"targets of Segmentation.* cannot be mixed; leave mixup and cutmix out"):
        FederatedDataModule(hospitals(), mixup=0.2).setup()


@pytest.mark.parametrize("task", [Segmentation(), None])
def test_a_network_of_the_other_kind_is_rejected(task):
    if task is None:
        data = FederatedData([TensorDataset(squares(6, 0).tensors[0], torch.arange(6) % 2)])
        with pytest.raises(OptionError, match="classifies pixels, but the labels are not masks"):
            perada.finetune("smp:unet-resnet18", data, pretrained=False)
    else:
        with pytest.raises(OptionError, match="classifies images, but the task is to classify pixels"):
            perada.finetune("test_resnet", hospitals(), pretrained=False, task=task)


def test_algorithms_that_count_classes_are_rejected(network):
    with pytest.raises(ValueError, match="class"):
        fit(network, algorithm="fedrod")
