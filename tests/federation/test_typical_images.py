# SPDX-License-Identifier: Apache-2.0
"""Images that look like a client's training images: their statistics, distances and threshold, by plain loops."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.neighbors import NearestNeighbors
from torch import nn

from perada.core.checks import OptionError
from perada.engine.engine import Engine
from perada.federation.typical_images import CENTRAL_EXAMPLES, LEAST_DEVIATION, ImageStatistics, TypicalImages

RANDOM = torch.Generator().manual_seed(0)


def by_hand(maps):
    """Mean and logarithm of the deviation of each channel of maps (B, C, ...), by NumPy in double precision."""
    rows = []
    for image in maps.double().numpy():
        channels = image.reshape(len(image), -1)
        rows.append([*channels.mean(1), *np.log(channels.std(1) + LEAST_DEVIATION)])
    return np.array(rows)


class ChannelsLast(nn.Module):
    """Frozen maps (B, H, W, C) before a trained head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 5)
        self.head = nn.Linear(5, 2)

    def forward(self, x):
        maps = self.embed(x.movedim(1, -1))
        return self.head(maps.flatten(1, 2).amax(1))


class Tokens(nn.Module):
    """Frozen tokens (B, N, C) before a trained head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.embed(x).amax(1))


def network(kind):
    torch.manual_seed(3)
    if kind == "maps":
        model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 2, 3), nn.Flatten(), nn.Linear(2 * 4 * 8, 2))
        model[0].requires_grad_(False)
        return model, lambda x: model[1](model[0](x))
    if kind == "maps with channels last":
        model = ChannelsLast()
        model.embed.requires_grad_(False)
        return model, lambda x: model.embed(x.movedim(1, -1)).movedim(-1, 1)
    if kind == "tokens":
        model = Tokens()
        model.embed.requires_grad_(False)
        return model, lambda x: model.embed(x).movedim(2, 1)
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(2 * 6 * 10, 2))
    return model, lambda x: x


@pytest.mark.parametrize("kind", ["maps", "maps with channels last", "tokens", "nothing frozen"])
def test_statistics_are_means_and_log_deviations_of_each_channel(kind):
    model, frozen_maps = network(kind)
    if kind == "tokens":
        x = torch.randint(11, (6, 9), generator=RANDOM)
    else:
        x = torch.randn(6, 3, 8, 12, generator=RANDOM)
    statistics = ImageStatistics.of(Engine(model), x[0])(x)
    with torch.no_grad():
        expected = by_hand(frozen_maps(x))
    np.testing.assert_allclose(statistics.numpy(), expected, rtol=1e-4, atol=1e-5)


def test_vectors_have_no_deviation():
    """Of a frozen backbone with a trained head."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 2))
    model[1].requires_grad_(False)
    x = torch.randn(4, 3, 2, 2, generator=RANDOM)
    statistics = ImageStatistics.of(Engine(model), x[0])(x)
    with torch.no_grad():
        torch.testing.assert_close(statistics, model[2](model[1](x.flatten(1))))


def test_features_have_the_statistics_of_their_images():
    model, _ = network("maps")
    engine = Engine(model)
    x = torch.randn(5, 3, 8, 12, generator=RANDOM)
    of_images = ImageStatistics.of(engine, x[0])(x)
    assert engine.find_trunk(x[0]) is not None
    with_cache = ImageStatistics.of(engine, x[0])
    torch.testing.assert_close(with_cache(engine.features(x)), of_images)
    torch.testing.assert_close(with_cache(x), of_images)


def test_texts_need_a_frozen_layer():
    model = Tokens()
    with pytest.raises(OptionError, match="all layers"):
        ImageStatistics.of(Engine(model, engine_name="loop"), torch.arange(9))


def scaled_by_hand(examples, statistics):
    """Statistics centred and scaled by those of the examples."""
    mean, deviation = examples.mean(0), examples.std(0)
    deviation = np.maximum(deviation, 0.1 * deviation.mean())
    return (statistics - mean) / deviation


@pytest.mark.parametrize("num_examples", [10, 50])
def test_distances_are_those_to_the_third_nearest_example(num_examples):
    examples = torch.randn(num_examples, 6, generator=RANDOM) * torch.tensor([1.0, 2.0, 3.0, 1.0, 0.01, 5.0])
    others = 3 * torch.randn(20, 6, generator=RANDOM)
    typical = TypicalImages.of(examples)
    scaled = scaled_by_hand(examples.double().numpy(), examples.double().numpy())
    search = NearestNeighbors(n_neighbors=3).fit(scaled)
    distances, _ = search.kneighbors(scaled_by_hand(examples.double().numpy(), others.double().numpy()))
    np.testing.assert_allclose(typical.distances(others).numpy(), distances[:, -1], rtol=1e-4)
    # Without a query, scikit-learn leaves each example out of its own neighbors.
    among_examples, _ = search.kneighbors()
    threshold = np.quantile(among_examples[:, -1], 0.99)
    assert float(typical.threshold) == pytest.approx(threshold, rel=1e-4)
    expected = distances[:, -1] <= threshold
    assert typical.contains(others).tolist() == expected.tolist()
    ratios = distances[:, -1] / threshold
    np.testing.assert_allclose(typical.distance_ratios(others).numpy(), ratios, rtol=2e-4)


def test_distance_ratios_without_a_scale():
    """Of too few images, of images that are all equal, and of outputs that are NaN."""
    few = TypicalImages.of(torch.randn(9, 4, generator=RANDOM))
    assert few.distance_ratios(torch.ones(2, 4)).tolist() == [0, 0]
    equal = TypicalImages.of(torch.ones(12, 4))
    assert equal.distance_ratios(torch.tensor([[1.0, 1, 1, 1], [1.0, 1, 1, 1.1]])).tolist() == [0, torch.inf]
    assert equal.distance_ratios(torch.full((1, 4), torch.nan)).isnan().all()


def test_almost_all_new_images_of_the_same_kind_are_typical_and_hardly_any_of_another():
    examples = torch.randn(200, 20, generator=RANDOM)
    typical = TypicalImages.of(examples)
    same = typical.contains(torch.randn(1000, 20, generator=RANDOM)).float().mean()
    other = typical.contains(torch.randn(1000, 20, generator=RANDOM) + 2).float().mean()
    assert 0.96 < same < 0.999
    assert other < 0.01


@pytest.mark.parametrize("num_examples", [10, CENTRAL_EXAMPLES, 300])
def test_single_images_are_compared_with_the_distance_to_the_third_nearest_example(num_examples):
    """Also those at the threshold to the bit, which central examples must not decide otherwise."""
    examples = torch.randn(num_examples, 30, generator=RANDOM)
    direction = torch.randn(60, 30, generator=RANDOM)
    others = torch.cat([examples[:60], torch.linspace(0, 3, 60).unsqueeze(1) * direction])
    typical = TypicalImages.of(examples)
    scaled = (others - typical.mean) / typical.scale
    differences = torch.cdist(scaled, typical.examples, compute_mode="donot_use_mm_for_euclid_dist")
    third = differences.sort(1).values[:, 2]
    for threshold in (typical.threshold, third.median(), torch.nextafter(third.median(), torch.tensor(0.0))):
        limited = replace(typical, threshold=threshold)
        found = [bool(limited.contains(image.unsqueeze(0))) for image in others]
        assert found == (third <= threshold).tolist()
        assert 0 < sum(found) < len(others)


@pytest.mark.parametrize("copies", [1, 4])
@pytest.mark.parametrize("offset", [0, 1000])
def test_many_images_are_compared_as_one_at_a_time(copies, offset):
    """Copies of training images have distances of 0 to one another, so that the threshold is 0."""
    examples = torch.randn(60, 50, generator=RANDOM).repeat(copies, 1) + offset
    typical = TypicalImages.of(examples)
    assert (typical.threshold == 0) == (copies == 4)
    direction = torch.randn(60, 50, generator=RANDOM)
    near = examples[:60] + 1e-3 * direction
    others = examples[:60] + torch.linspace(0, 3, 60).unsqueeze(1) * direction
    broken = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30]).unsqueeze(1).expand(4, 50)
    images = torch.cat([examples, near, others, broken])
    one_at_a_time = torch.cat([typical.contains(image.unsqueeze(0)) for image in images])
    assert torch.equal(typical.contains(images), one_at_a_time)
    assert one_at_a_time[: len(examples)].float().mean() > 0.9 and not one_at_a_time[-4:].any()
    assert 0 < one_at_a_time[-64:-4].sum() < 60


def test_images_at_the_threshold_are_typical():
    """Whole numbers, whose distances are exact: an image at 3, with its third nearest example at 0."""
    examples = torch.arange(12.0).unsqueeze(1)
    typical = TypicalImages(torch.zeros(1), torch.ones(1), examples, torch.tensor(3.0), neighbors=3)
    # The third one is beyond the threshold by the last bit of its distance, which a product may lose.
    images = torch.tensor([[-1.0], [-1.0001], [-1 - 2**-22], [12.0], [12.0001], [5.5]])
    assert typical.contains(images).tolist() == [True, False, False, True, False, True]


@pytest.mark.parametrize("num_examples", [1, 2, 9])
def test_a_few_images_tell_nothing(num_examples):
    typical = TypicalImages.of(torch.randn(num_examples, 4, generator=RANDOM))
    assert typical.contains(100 * torch.randn(5, 4, generator=RANDOM)).all()


@pytest.mark.parametrize("num_examples", [10, 30])
def test_equal_images_are_typical_and_others_are_not(num_examples):
    typical = TypicalImages.of(torch.ones(num_examples, 4))
    assert typical.contains(torch.tensor([[1.0, 1, 1, 1], [1.0, 1, 1, 1.1]])).tolist() == [True, False]


def test_an_image_with_nan_is_not_typical():
    typical = TypicalImages.of(torch.randn(19, 4, generator=RANDOM))
    assert not typical.contains(torch.full((1, 4), torch.nan)).any()


def test_padded_states_compare_alike():
    examples = torch.randn(19, 4, generator=RANDOM)
    others = 2 * torch.randn(40, 4, generator=RANDOM)
    typical = TypicalImages.of(examples)
    state = typical.state(num_rows=25)
    assert state["examples"].shape == (25, 4)
    assert all(value.isfinite().all() for value in state.values())
    restored = TypicalImages.from_state(state)
    assert torch.equal(restored.distances(others), typical.distances(others))
    assert restored.contains(others).tolist() == typical.contains(others).tolist()
    assert 0 < restored.contains(others).sum() < 40
