# SPDX-License-Identifier: Apache-2.0
"""A site's operator sees the classes in its masks, and masks of background and ignored pixels only are rejected."""

import pytest
import torch
from torch.utils.data import TensorDataset

from perada.cli.deploy_check import format_mask_values
from perada.data import FederatedData, FederatedDataModule

SIZE = 4


def site(masks, **options):
    """The data of a site."""
    images = torch.zeros(len(masks), 3, SIZE, SIZE, dtype=torch.uint8)
    part = TensorDataset(images, masks)
    data = FederatedDataModule(FederatedData([part], [part], **options))
    data.setup()
    return data


def test_classes_are_shown_with_their_share_of_the_pixels():
    masks = torch.zeros(2, SIZE, SIZE, dtype=torch.uint8)
    masks[0] = 1
    masks[0, 0] = 255
    assert format_mask_values(site(masks, classes=["none", "lung"])) == (
        "0 (none) 50 %, 1 (lung) 37.5 %, 255 (ignored) 12.5 %"
    )
    assert format_mask_values(site(masks)) == "0 50 %, 1 37.5 %, 255 (ignored) 12.5 %"


def test_other_labels_have_no_values():
    assert format_mask_values(site(torch.tensor([0, 1]))) == ""


def test_a_site_that_writes_its_foreground_as_255_is_rejected():
    masks = torch.zeros(2, SIZE, SIZE, dtype=torch.uint8)
    masks[:, 0] = 255
    with pytest.raises(ValueError, match=r"255, .*mask_values"):
        site(masks, classes=["none", "lung"])
