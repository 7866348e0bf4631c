# SPDX-License-Identifier: Apache-2.0
"""What clients train and send, counted: the same bits in every process."""

from fractions import Fraction
from zlib import crc32

import torch

from perada.algorithms import FedAvg, TensorNames
from perada.core.states import Factors
from perada.data import Phase
from perada.federation.server import megabytes_of_clients, parameter_counts

SIZES = (7, 11, 13, 29, 64, 192)
RANKS = (8, 4, 2)


class Ordered(FedAvg):
    def __init__(self, order):
        self.order = order

    def trainable_keys(self, role, phase, tensor_names, round):
        return self.order


def test_counts_do_not_depend_on_the_order_of_names():
    """Means over ranks are fractions, whose sum in the order of a set would differ from process to process."""
    shapes = {f"{n}.{factor}": (8, n) if factor == "A" else (n, 8) for n in SIZES for factor in "AB"}
    state = {name: torch.zeros(shape) for name, shape in shapes.items()}
    tensor_names = TensorNames(
        tuple(state), tuple(state), factors=tuple(Factors(f"{n}.A", f"{n}.B", 1.0) for n in SIZES)
    )
    opened = {"local": {name: value[None] for name, value in state.items()}}
    phases = [Phase("train", 1, None)]

    def counted(seed):
        order = sorted(state, key=lambda name: crc32(f"{seed}{name}".encode()))
        sent = {name: state[name] for name in order}
        counts = parameter_counts(Ordered(order), phases, tensor_names, 0, opened, sent, RANKS)
        return counts["params/trained"], counts["params/sent"], megabytes_of_clients(sent, tensor_names, RANKS, 3)

    (result,) = {counted(seed) for seed in range(50)}
    numbers = 2 * sum(SIZES) * Fraction(sum(RANKS), 3)
    assert all(abs(count - numbers) < 1e-9 for count in result[:2])
    assert abs(result[2] - 3 * 4 * numbers / 10**6) < 1e-12
