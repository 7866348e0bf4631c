# SPDX-License-Identifier: Apache-2.0
"""Small federations for tests of the distillation."""

import torch
from torch.utils.data import TensorDataset

import perada


def three_clients():
    """Three clients with different numbers of noise images of three classes, and ten public images."""
    random = torch.Generator().manual_seed(3)

    def part(n):
        x = torch.randn(n, 1, 5, 5, generator=random, dtype=torch.float64)
        return TensorDataset(x, torch.arange(n) % 3)

    return perada.FederatedData([part(n) for n in (9, 4, 6)], public=TensorDataset(part(10).tensors[0]))
