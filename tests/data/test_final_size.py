# SPDX-License-Identifier: Apache-2.0
"""Files are resized once, to the image_size of the data module: compared with one interpolation in float32."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Subset

from perada.data import ByDomain, FederatedData, FederatedDataModule, ImageMasks, Images, ImageTable, UnlabelledFolder

SIDE = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write six images of noise, 50 pixels high and 70 wide, for each of two clients, as folders and as a table."""
    root = tmp_path_factory.mktemp("images")
    random = np.random.default_rng(0)
    rows = ["path,label,client"]
    for client in ("north", "south"):
        for number in range(6):
            name = f"{client}/{'cat' if number % 2 else 'dog'}/{number}.png"
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(random.integers(0, 256, (50, 70, 3), dtype=np.uint8)).save(root / name)
            rows.append(f"{name},{number % 2},{client}")
    (root / "table.csv").write_text("\n".join(rows))
    return root


def resized_once(path):
    """Read an image with Pillow and resize it once, before rounding."""
    pixels = torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1)[None].float()
    return torch.nn.functional.interpolate(pixels, size=(SIDE, SIDE), mode="bilinear", antialias=True)[0]


def assert_resized_once(images, paths):
    """Compare images (N, 3, side, side) with the files: they differ by rounding only, which a second step would not."""
    expected = torch.stack([resized_once(path) for path in paths])
    torch.testing.assert_close(images.float(), expected, rtol=0, atol=1)


def stored_images(store, client):
    """Return the images of a client as they are stored for training, before they are scaled."""
    count = store.sizes[client]
    images, _ = store.take(torch.full((count,), client), torch.arange(count))
    return images


@pytest.mark.parametrize("options", [{}, {"size": 224}, {"size": 8}, {"size": 40, "in_memory": True}], ids=str)
def test_files_of_a_set_are_resized_once(folder, options):
    images = Images(str(folder), layout="{client}/{class}/*", **options)
    data = FederatedDataModule(dataset=images, partition=ByDomain("client"), image_size=SIDE)
    data.setup()
    split = images.with_split(True)
    for client, name in enumerate(("north", "south")):
        paths = [path for path in split.files if f"/{name}/" in path]
        assert_resized_once(stored_images(data.checked.train, client), paths)
    assert [tuple(step[:2]) for step in data.preprocessing.resize] == [(SIDE, SIDE)]


def test_files_of_tables_public_sets_and_own_datasets_are_resized_once(folder):
    table = ImageTable(str(folder / "table.csv"), client="client", size=224)
    public = UnlabelledFolder(str(folder), size=100)
    clients = FederatedData([Subset(table, [0, 1]), Subset(table, [2, 3])], public=public)
    data = FederatedDataModule(clients, image_size=SIDE)
    data.setup()
    assert_resized_once(stored_images(data.checked.train, 0), table.files[:2])
    assert_resized_once(stored_images(data.checked.public, 0), public.files)
    # Subsets of one set stay Subsets of one set, which is read once.
    assert data.data.train[0].dataset is data.data.train[1].dataset
    # The caller's objects are unchanged.
    assert table.size == 224 and clients.train[0].dataset is table


def test_masks_are_resized_once(tmp_path):
    """A column of one pixel is kept by the nearest neighbour from 48 to 16 pixels, and lost on the way through 224."""
    mask = np.zeros((48, 48), dtype=np.uint8)
    mask[:, 1::3] = 1
    for number in range(4):
        for name, pixels in (("images", mask * 200), ("masks", mask)):
            (tmp_path / name).mkdir(exist_ok=True)
            Image.fromarray(pixels).save(tmp_path / name / f"{number}.png")
    images = ImageMasks(str(tmp_path), size=10).with_size(16)
    nearest = torch.from_numpy(mask)[1::3, 1::3].long()
    assert torch.equal(images[0][1].long(), nearest)


def test_the_same_size_and_other_datasets_are_unchanged(folder):
    images = Images(str(folder), layout="{client}/{class}/*", size=SIDE)
    data = FederatedDataModule(dataset=images, partition=ByDomain("client"), image_size=SIDE)
    assert data.division.dataset is images
    data = FederatedDataModule(dataset=images, partition=ByDomain("client"))
    assert data.division.dataset is images
