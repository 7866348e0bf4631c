# SPDX-License-Identifier: Apache-2.0
"""Public images that are shifted and mirrored: one image for teachers and student, another one in each step."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import perada
from perada.core.states import get_state, parameter_keys, stack
from perada.data import FederatedData, FederatedDataModule
from perada.data.batches.transforms import Preparation
from perada.engine import Engine
from perada.server import Distillation, DistillationRound, Distiller
from tests.options import sections
from tests.rejections import rejects

COUNT = 7
PADDING = 1


def drawn_images(count, *, seed=0, side=4):
    source = torch.Generator().manual_seed(seed)
    return torch.randint(1, 256, (count, 1, side, side), dtype=torch.uint8, generator=source)


class OneByOne(Dataset):
    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index]


def make_datamodule(public=None, **options):
    clients = [TensorDataset(drawn_images(4, seed=client), torch.arange(4) % 3) for client in (1, 2)]
    options = {"batch_size": 2, "crop_padding": PADDING, "flip": True, "augment_public": True} | options
    return FederatedDataModule(FederatedData(clients, public=public or OneByOne(drawn_images(COUNT))), **options)


def versions(image, padding=PADDING, flip=True):
    """Every image (H, W) that shifting and mirroring can make of one, by plain slices of the padded image."""
    side = image.shape[-1]
    padded = torch.zeros(side + 2 * padding, side + 2 * padding, dtype=image.dtype)
    padded[padding : padding + side, padding : padding + side] = image
    created = []
    for top, left in itertools.product(range(2 * padding + 1), repeat=2):
        window = padded[top : top + side, left : left + side]
        created.append(window)
        if flip:
            created.append(window.flip(1))
    return created


def as_stored(images):
    """Undo the scaling of prepared images."""
    return ((images + 1) * 127.5).round().to(torch.uint8)


@pytest.mark.parametrize("kind", [OneByOne, TensorDataset])
def test_each_step_sees_a_version_of_each_image_and_all_versions_occur(kind):
    stored = drawn_images(COUNT)
    datamodule = make_datamodule(kind(stored))
    seen = {position: set() for position in range(COUNT)}
    for round in range(6):
        indices = datamodule.public_indices(round, steps=20, batch_size="full")
        assert (indices % COUNT).sort(dim=1).values.tolist() == [list(range(COUNT))] * 20
        for rows in indices:
            for index, image in zip(rows.tolist(), as_stored(datamodule.public_images(rows)), strict=True):
                position = index % COUNT
                known = versions(stored[position, 0])
                result = [number for number, version in enumerate(known) if torch.equal(version, image[0])]
                assert result
                seen[position].add(result[0])
    # 120 draws of 18 versions: one of them is missing with probability 18 · (17/18)^120 = 0.02.
    assert all(len(numbers) >= 16 for numbers in seen.values())


def test_versions_are_drawn_for_each_image_of_a_step_by_itself():
    datamodule = make_datamodule(TensorDataset(drawn_images(1).repeat(40, 1, 1, 1)))
    (rows,) = datamodule.public_indices(0, steps=1, batch_size="full")
    assert len(datamodule.public_images(rows).unique(dim=0)) > 10  # of 18


def test_an_index_names_one_image_however_it_is_read():
    datamodule = make_datamodule()
    indices = datamodule.public_indices(2, steps=3, batch_size=5).flatten()
    assert torch.equal(datamodule.public_indices(2, 3, 5).flatten(), indices)
    together = datamodule.public_images(indices)
    alone = torch.cat([datamodule.public_images(index.reshape(1)) for index in indices])
    assert torch.equal(together, alone)
    again = make_datamodule()
    assert torch.equal(again.public_images(indices.flip(0)), together.flip(0))
    assert not set(indices.tolist()) & set(datamodule.public_indices(3, 3, 5).flatten().tolist())


@pytest.mark.parametrize(("options", "padding"), [({"flip": False}, PADDING), ({"crop_padding": 0}, 0)])
def test_public_images_are_changed_as_clients_images_are(options, padding):
    stored = drawn_images(COUNT)
    datamodule = make_datamodule(OneByOne(stored), **options)
    for rows in datamodule.public_indices(0, 20, "full"):
        for index, image in zip(rows.tolist(), as_stored(datamodule.public_images(rows)), strict=True):
            known = versions(stored[index % COUNT, 0], padding, flip=options.get("flip", True))
            assert any(torch.equal(version, image[0]) for version in known)


@pytest.mark.parametrize("augment", [False, True])
def test_positions_stand_for_the_stored_images(augment):
    """Diagnostics and checks look at the set itself."""
    datamodule = make_datamodule(augment_public=augment)
    images = datamodule.public_images(torch.arange(COUNT))
    assert torch.equal(as_stored(images), drawn_images(COUNT))
    if not augment:
        assert int(datamodule.public_indices(4, 5, 3).max()) < COUNT


@pytest.mark.parametrize("kind", ["folded", "loop"])
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_teachers_and_student_see_the_same_images(kind, mode):
    def network():
        layers = nn.Conv2d(1, 3, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)
        return nn.Sequential(*layers)

    torch.manual_seed(0)
    student, *teachers = [network() for _ in range(3)]
    datamodule = make_datamodule()
    options = Distillation(3, batch_size=4, lr=0.1, optimizer="sgd", schedule="constant", teacher_mode=mode)
    distiller = Distiller(Engine(network(), kind), options, parameter_keys(student), datamodule, DistillationRound(1))
    refined = distiller(get_state(student), stack([get_state(teacher) for teacher in teachers]))

    plain = copy.deepcopy(student).eval()
    steps = torch.optim.SGD(plain.parameters(), lr=0.1)
    for rows in datamodule.public_indices(1, 3, 4):
        x = datamodule.public_images(rows)
        with torch.no_grad():
            target = sum(copy.deepcopy(teacher).train(mode == "train")(x) for teacher in teachers) / 2
        steps.zero_grad()
        divergence = target.softmax(1) * (target.log_softmax(1) - plain(x).log_softmax(1))
        (divergence.sum() / len(x)).backward()
        steps.step()
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(refined[key], value, rtol=1e-4, atol=1e-5)


DISTILS = {"distill_steps": 3, "distill_batch_size": 5, "distill_lr": 0.05}


def federation():
    """Two clients and a public set of images."""
    clients = [TensorDataset(drawn_images(8, seed=seed, side=8), torch.arange(8) % 3) for seed in (1, 2)]
    return FederatedData(clients, clients, TensorDataset(drawn_images(9, side=8)))


def fit(tiny, data=None, **changes):
    options = {"batch_size": 4, "crop_padding": 1, "flip": True, "augment_public": True, "num_classes": 3}
    data = FederatedDataModule(data or federation(), **options | changes.pop("data_options", {}))
    arguments = tiny.options | DISTILS | {"rounds": 2} | changes
    del arguments["batch_size"]  # the datamodule has its own
    return perada.finetune(tiny.net(), data, **sections(**arguments))


@pytest.mark.slow
def test_a_resumed_run_has_the_same_bits_and_keeps_its_augmentation(tiny, tmp_path):
    uninterrupted = fit(tiny)
    options = {"logger": True, "default_root_dir": str(tmp_path)}
    fit(tiny, rounds=1, **options)
    (saved,) = tmp_path.rglob("last.ckpt")
    resumed = fit(tiny, ckpt_path=str(saved), **options)
    (expected,) = uninterrupted.states("global")
    for key, value in resumed.states("global")[0].items():
        assert torch.equal(value, expected[key])
    (plain,) = fit(tiny, data_options={"augment_public": False}).states("global")
    assert any(not torch.equal(value, expected[key]) for key, value in plain.items())
    with pytest.raises(ValueError, match="augmentation="):
        fit(tiny, ckpt_path=str(saved), data_options={"augment_public": False}, **options)


@pytest.mark.slow
def test_features_are_not_kept_of_augmented_public_images(tiny):
    """The frozen layers see each changed image; only test images are always the same."""
    results = []
    for cache_features in (True, False):
        options = {"adapter": "head", "pretrained": False, "cache_features": cache_features}
        data = FederatedDataModule(federation(), batch_size=4, flip=True, augment_public=True, image_size=32)
        arguments = tiny.options | DISTILS | options | {"rounds": 2}
        del arguments["batch_size"]
        run = perada.finetune("test_resnet", data, **sections(**arguments))
        results.append(run.states("global")[0])
    for key, value in results[0].items():
        torch.testing.assert_close(value, results[1][key], rtol=1e-4, atol=1e-5)


def test_augmented_public_images_cost_private_training_nothing(tiny):
    """The public images are changed by the run's seed in private runs as well: they are nobody's."""
    private = {"noise_multiplier": 1.0, "max_norm": 1.0, "delta": 0.01}
    epsilon = []
    for augment_public in (False, True):
        run = fit(tiny, privacy=private, data_options={"augment_public": augment_public})
        epsilon.append(run.metrics["rounds"][-1]["privacy/release_epsilon_max"])
    assert epsilon[0] == epsilon[1] > 0


def test_augmentation_of_public_images_needs_something_to_do():
    with pytest.raises(ValueError, match=r"augment_public=True.*flip or crop_padding"):
        make_datamodule(flip=False, crop_padding=0)
    with rejects("augment_public", True):
        Preparation(augment_public=True)


def test_augmentation_of_public_vectors_is_rejected():
    datamodule = make_datamodule(TensorDataset(torch.rand(5, 6)))
    with pytest.raises(ValueError, match=r"\(6,\).*crop_padding, flip, mixup and cutmix"):
        datamodule.setup()
