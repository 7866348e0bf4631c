# SPDX-License-Identifier: Apache-2.0
"""Public images that clients train on are found, whatever kind of dataset they are in."""

import random
import re

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from perada.data import FederatedData, FederatedDataModule
from perada.data.batches.samples import make_store
from perada.data.checked import CheckedData, first_image_format

GREY = torch.arange(6 * 16, dtype=torch.uint8).view(6, 4, 4)


class Items(Dataset):
    """Tensors as single items; with ``noisy`` a transform of the dataset adds noise."""

    def __init__(self, images, noisy=False, labelled=True):
        self.images = images
        self.noisy = noisy
        self.labelled = labelled

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        image = image + torch.randint(0, 9, image.shape, dtype=image.dtype) if self.noisy else image
        return (image, 0) if self.labelled else image


def tensors(images, labelled=True):
    return TensorDataset(images, torch.zeros(len(images), dtype=torch.int64)) if labelled else TensorDataset(images)


def overlap(clients, public, make, make_public=None, size=None):
    train = make_store([make(images) for images in clients], size=size)
    server = make_store([(make_public or make)(public, labelled=False)], labelled=False, size=size)
    try:
        CheckedData(train, None, server, None, 1, None, False, first_image_format(train)).check_overlap("privacy")
    except ValueError as error:
        index, client, other = re.findall(r"\d+", str(error))
        return int(client), int(index), int(other)
    return None


def noisy_items(images, labelled=True):
    return Items(images, noisy=True, labelled=labelled)


KINDS = {"tensors": tensors, "items": Items, "noisy": noisy_items}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_the_first_image_that_is_also_public_is_found(make):
    clients = [GREY[:2], GREY[[2, 4, 3]], GREY[3:]]
    assert overlap(clients, torch.stack([255 - GREY[0], GREY[3], GREY[4], GREY[4]]), make) == (1, 1, 2)
    assert overlap(clients, GREY[1:2], make) == (0, 1, 0)
    assert overlap(clients, GREY[5:], make) == (2, 2, 0)
    assert overlap(clients, 255 - GREY, make) is None
    changed = GREY.clone()
    changed[:, 3, 3] += 1
    assert overlap(clients, changed, make) is None


@pytest.mark.parametrize("size", [None, 7])
@pytest.mark.parametrize(("make", "make_public"), [(tensors, Items), (Items, tensors), (Items, Items)])
def test_images_are_compared_as_they_are_stored(make, make_public, size):
    """In files or in tensors, with an axis for the one channel or without, resized in training or not."""
    for public in (GREY[2:], GREY[2:].unsqueeze(1)):
        assert overlap([GREY[:2], GREY[2:]], public, make, make_public, size) == (1, 0, 0)
        assert overlap([GREY[:2]], public, make, make_public, size) is None


@pytest.mark.parametrize("make", [tensors, Items])
def test_shape_and_type_are_part_of_an_image(make):
    """The same bytes are other images in another shape or type."""
    floats = torch.arange(1.0, 9.0).view(1, 1, 2, 4)
    assert overlap([floats], floats, make) == (0, 0, 0)
    assert overlap([floats], floats.view(1, 1, 4, 2), make) is None
    assert overlap([floats], floats.view(torch.int32).to(torch.int32).view(torch.uint8).view(1, 1, 2, 16), make) is None
    assert overlap([floats], floats.double(), make) is None
    halves = floats.bfloat16()
    assert overlap([halves], halves, make) == (0, 0, 0)


def test_overlap_over_many_images_agrees_with_a_plain_loop():
    source = torch.Generator().manual_seed(4)
    pool = torch.randint(0, 2, (12_000, 1, 4, 4), dtype=torch.uint8, generator=source)  # 2**16 images: some are twice
    sizes = (5000, 6000)
    public = pool[11_000:]
    known = {}
    for index, image in enumerate(public):
        known.setdefault(tuple(image.flatten().tolist()), index)
    flat = [tuple(image.flatten().tolist()) for image in pool[:11_000]]
    first = next(index for index, image in enumerate(flat) if image in known)
    expected = (int(first >= sizes[0]), first - sizes[0] * (first >= sizes[0]), known[flat[first]])
    assert overlap([pool[:5000], pool[5000:11_000]], public, tensors) == expected
    spared = [image not in known for image in flat]
    clients = [pool[:5000][spared[:5000]], pool[5000:11_000][spared[5000:]]]
    assert overlap(clients, public, tensors) is None
    assert overlap([clients[0], torch.cat([clients[1], public[7:8]])], public, tensors)[:2] == (1, len(clients[1]))


def test_comparing_leaves_the_global_streams_alone():
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    overlap([GREY], GREY[5:], noisy_items)
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]
    assert (np.random.get_state()[1] == state[2]).all()


def test_a_public_set_with_private_images_is_rejected():
    clients = [tensors(GREY[:2]), tensors(GREY[2:4])]
    FederatedDataModule(FederatedData(clients, num_classes=2)).checked.check_overlap("privacy")
    FederatedDataModule(FederatedData(clients, public=tensors(GREY[4:]), num_classes=2)).checked.check_overlap(
        "privacy"
    )
    with pytest.raises(ValueError, match=r"privacy: test image 1 of client 0 .*image 0 of the public set"):
        data = FederatedData(clients, [tensors(GREY[4:])] * 2, tensors(GREY[5:]), num_classes=2)
        FederatedDataModule(data).checked.check_overlap("privacy")
    with pytest.raises(ValueError, match=r"privacy: image 1 of client 1 .*image 0 of the public set") as error:
        FederatedDataModule(FederatedData(clients, public=tensors(GREY[3:]), num_classes=2)).checked.check_overlap(
            "privacy"
        )
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("where", ["public", "server_validation"])
def test_images_that_clients_hold_out_are_theirs_too(where):
    """A held-out image is neither trained nor scored on, and still is a client's."""
    pool = torch.arange(20 * 16).remainder(251).to(torch.uint8).view(20, 4, 4)
    options = {"client_validation": 0.4, "seed": 3}
    clients = [tensors(pool[:10]), tensors(pool[10:])]
    kept = FederatedDataModule(FederatedData(clients, num_classes=2), **options).checked.train
    trained = {tuple(image.flatten().tolist()) for rows in kept.table for image in kept.images[rows : rows + 1]}
    held_out = next(image for image in pool if tuple(image.flatten().tolist()) not in trained)
    server = {where: tensors(held_out.unsqueeze(0))}
    module = FederatedDataModule(FederatedData(clients, num_classes=2, **server), **options)
    with pytest.raises(ValueError, match=rf"held-out image \d+ of client \d .*image 0 .*{where.split('_')[-1]} set"):
        module.checked.check_overlap("privacy")
