# SPDX-License-Identifier: Apache-2.0
"""Floating-point images that were not prepared: they are used as they are, with a warning."""

import warnings

import pytest
import torch
from torch.utils.data import TensorDataset

from perada.data import FederatedData, FederatedDataModule


class Items(TensorDataset):
    """A dataset that is read item by item."""


def part(low, high, kind=TensorDataset):
    images = torch.linspace(low, high, 48).view(1, 3, 4, 4).repeat(6, 1, 1, 1)
    return kind(images, torch.arange(6) % 2)


@pytest.mark.parametrize("kind", [TensorDataset, Items])
@pytest.mark.parametrize("bounds", [(0.0, 255.0), (-1024.0, 3000.0), (0.0, 65535.0)])
def test_values_that_no_normalised_image_has_are_named(kind, bounds):
    low, high = bounds
    data = FederatedData([part(low, high, kind)])
    with pytest.warns(UserWarning, match=rf"from {low:g} to {high:g}.*uint8"):
        FederatedDataModule(data).setup()


@pytest.mark.parametrize("kind", [TensorDataset, Items])
def test_normalised_images_and_images_from_0_to_1_are_silent(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for low, high in ((-2.5, 2.7), (0.0, 1.0)):
            FederatedDataModule(FederatedData([part(low, high, kind)])).setup()


def test_a_public_set_of_another_range_is_named():
    data = FederatedData([part(0, 1)], public=TensorDataset(part(0, 255).tensors[0]))
    with pytest.warns(UserWarning, match=r"public.* 0 to 255"):
        FederatedDataModule(data).setup()
