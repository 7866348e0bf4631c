# SPDX-License-Identifier: Apache-2.0
"""The plane through three modes: its geometry, its losses against plain loops, and a barrier in closed form."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from perada.cli import main
from perada.studies import fed_ensemble_plane as plane_study
from perada.studies.fed_ensemble_plane import PlaneSettings, barrier, loss_at, plane_through


def test_points_of_the_plane_are_the_modes_and_keep_their_distances():
    points = torch.randn(3, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plane = plane_through(*points)
    coordinates = [plane.coordinates(point) for point in points]
    for point, (x, y) in zip(points, coordinates, strict=True):
        torch.testing.assert_close(plane.point(x, y), point)
    assert coordinates[0] == (0.0, 0.0)
    assert coordinates[1][1] == pytest.approx(0, abs=1e-12)
    for one in range(3):
        for other in range(3):
            expected = (points[one] - points[other]).norm().item()
            assert math.dist(coordinates[one], coordinates[other]) == pytest.approx(expected)


def test_modes_on_one_line_are_rejected():
    one = torch.arange(4.0, dtype=torch.float64)
    with pytest.raises(ValueError, match="three modes"):
        plane_through(one, 2 * one, 3 * one)


class Product(nn.Module):
    """Two logits ± a b x, which (a, b) = (1, 1) and (-1, -1) compute alike, and (0, 0) not at all."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.ones(1))
        self.b = nn.Parameter(torch.ones(1))

    def forward(self, x):
        logit = self.a * self.b * x.flatten()
        return torch.stack([logit, -logit], 1)


def test_the_barrier_between_two_modes_that_compute_the_same_has_its_closed_form():
    network = Product()
    like = {name: value.detach() for name, value in network.named_parameters()}
    images = torch.full((4, 1, 1, 1), 3.0)
    labels = torch.zeros(4, dtype=torch.long)
    first = torch.tensor([1.0, 1.0], dtype=torch.float64)
    shares = [0.0, 0.25, 0.5, 0.75, 1.0]
    losses = [loss_at(network, (1 - 2 * share) * first, like, images, labels) for share in shares]
    expected = [math.log1p(math.exp(-6 * (1 - 2 * share) ** 2)) for share in shares]
    assert losses == pytest.approx(expected, abs=1e-6)
    assert barrier(losses) == pytest.approx(math.log(2) - math.log1p(math.exp(-6)), abs=1e-6)


def test_the_loss_of_a_vector_of_weights_is_that_of_the_network_with_them():
    network = plane_study.convolutional_network(2, 8, 8, 3)
    like = {name: value.detach() for name, value in network.named_parameters()}
    vector = torch.cat([value.flatten() for value in like.values()]) * 0.5
    # more images than one chunk holds
    images = torch.rand(2100, 1, 8, 8)
    labels = torch.arange(2100) % 3
    actual = loss_at(network, vector, like, images, labels)
    with torch.no_grad():
        for value in network.parameters():
            value.mul_(0.5)
        expected = F.cross_entropy(network(images), labels).item()
    assert actual == pytest.approx(expected, rel=1e-5)


def test_options_that_give_no_plane_are_rejected():
    with pytest.raises(ValueError, match=r"modes .*3, .*2"):
        PlaneSettings(modes=2)
    with pytest.raises(ValueError, match=r"grid and line .*2, got 1 and 17"):
        PlaneSettings(grid=1)


@pytest.mark.slow
def test_the_quick_study_writes_losses_of_its_own_modes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plane_study, "QUICK", PlaneSettings("digits", train_images=100, clients=3, modes=3, rounds=3,
                                                            local_steps=2, grid=3, line=3))  # fmt: skip
    main(["study", "fed-ensemble-plane", f"--output={tmp_path / 'out'}", "--quick", "--seed=4"])
    written = json.loads((tmp_path / "out" / "fed_ensemble_plane.json").read_text())
    assert written["settings"]["seed"] == 4
    assert (len(written["x"]), len(written["y"])) == (3, 3)
    assert [len(row) for row in written["loss"]] == [3, 3, 3]
    for pair in written["pairs"]:
        ends = [written["mode_loss"][mode] for mode in pair["modes"]]
        assert [pair["losses"][0], pair["losses"][-1]] == pytest.approx(ends)
        assert pair["distance"] > 0
    assert (tmp_path / "out" / "fed_ensemble_plane.png").read_bytes().startswith(b"\x89PNG")
    assert "Test accuracy in %: modes" in capsys.readouterr().out
