# SPDX-License-Identifier: Apache-2.0
"""Keypoints: losses and metrics against plain loops, and coordinates against pixels that are marked in the images."""

import copy
import csv
import json
import math

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import TensorDataset

import perada
from perada.core.checks import OptionError
from perada.core.rounds import Phase
from perada.data import IID, FederatedData, FederatedDataModule, ImageSet, ImageTable, Scanners
from perada.data.batches.transforms import prepare_images
from perada.results.cards import prediction_code
from perada.scores.accumulation import Scores
from perada.scores.metrics import make_metrics, score_names
from perada.studies.report.page import write_page
from perada.studies.report.records import read_records
from perada.tasks import Keypoints
from perada.tasks.base import make_task

NAN = float("nan")
HEIGHT = 12
WIDTH = 16
SIZE = (HEIGHT, WIDTH)
OUTPUTS = torch.tensor([[0.5, -0.25, 0.0, 0.75], [0.1, 0.2, -0.3, 0.4], [1.0, -1.0, 0.0, 0.0]])
TARGETS = torch.tensor([[3.0, 4.0, 10.0, 2.5], [NAN, NAN, 7.0, 11.0], [NAN, 3.0, 5.0, NAN]])


class Items(TensorDataset):
    """A dataset that is read item by item."""


def marked(points, height=HEIGHT, width=WIDTH):
    """Black images (N, 3, H, W) with a pixel of value 255 for each point (N, 3, 2), in a channel of its own."""
    images = torch.zeros(len(points), 3, height, width, dtype=torch.uint8)
    for image, points_of_image in zip(images, points.tolist(), strict=True):
        for channel, (x, y) in enumerate(points_of_image):
            image[channel, int(y), int(x)] = 255
    return images


def hospital(seed, count=8, kind=TensorDataset):
    """Images with three points on whole pixels, as coordinates and as marks."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randint(0, WIDTH, (count, 3), generator=random)
    y = torch.randint(0, HEIGHT, (count, 3), generator=random)
    points = torch.stack([x, y], -1)
    return kind(marked(points), points.flatten(1).float())


def hospitals(kind=TensorDataset):
    return FederatedData(
        [hospital(seed, kind=kind) for seed in (0, 1)],
        [hospital(seed, 5, kind) for seed in (2, 3)],
        public=hospital(4, kind=kind),
    )


def network(outputs=6):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * HEIGHT * WIDTH, 6), nn.Tanh(), nn.Linear(6, outputs))


def fit(algorithm="fedavg", adapter="full", *, task=None, data=None, engine="auto", model=None, **options):
    if data is None:
        data = FederatedDataModule(hospitals(), batch_size="full", task=task or Keypoints(SIZE))
    options = {"rounds": 1, "local_steps": 1, "lr_local": 0.1, "seed": 1} | options
    return perada.finetune(
        model or network(),
        data,
        pretrained=False,
        algorithm=algorithm,
        adapter=adapter,
        training={"engine": engine},
        **options,
    )


def pixels_of(z, length):
    """Coordinate of an output: −1 and 1 are the edges of the image, whose first pixel has its centre at 0."""
    return (z + 1) / 2 * length - 0.5


@pytest.mark.parametrize("loss_function", ["squared", "absolute"])
def test_the_loss_is_the_mean_over_the_known_coordinates(loss_function):
    losses = Keypoints(SIZE, loss_function).loss(OUTPUTS, TARGETS)
    for row, outputs in enumerate(OUTPUTS.tolist()):
        terms = []
        for point in (0, 1):
            x, y = TARGETS[row, 2 * point : 2 * point + 2].tolist()
            if math.isnan(x) or math.isnan(y):
                continue
            deviations = [outputs[2 * point] - ((x + 0.5) / 8 - 1), outputs[2 * point + 1] - ((y + 0.5) / 6 - 1)]
            terms += [d**2 if loss_function == "squared" else abs(d) for d in deviations]
        expected = sum(terms) / len(terms) if terms else 0.0
        assert losses[row].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("loss_function", ["squared", "absolute"])
def test_an_unknown_point_has_no_gradient(loss_function):
    outputs = OUTPUTS.clone().requires_grad_()
    Keypoints(SIZE, loss_function).loss(outputs, TARGETS).sum().backward()
    assert outputs.grad.isfinite().all()
    assert outputs.grad[1].tolist()[:2] == [0.0, 0.0] and outputs.grad[1, 2:].all()
    assert outputs.grad[2].tolist() == [0.0] * 4


def test_outputs_are_positions_between_the_edges_of_the_image():
    predicted = Keypoints(SIZE).predictions(OUTPUTS)
    for outputs, coordinates in zip(OUTPUTS.tolist(), predicted.tolist(), strict=True):
        for place, (z, coordinate) in enumerate(zip(outputs, coordinates, strict=True)):
            assert coordinate == pytest.approx(pixels_of(z, (WIDTH, HEIGHT)[place % 2]))
    standardized = Keypoints(SIZE).loss(OUTPUTS, predicted)
    assert standardized.abs().max() < 1e-12


def places_of_marks(image):
    """(x, y) of the brightest pixel of each channel of an image; None for a channel without a mark."""
    places = []
    for channel in image:
        row, column = np.unravel_index(int(channel.argmax()), channel.shape)
        places.append((float(column), float(row)) if channel.max() > channel.min() else None)
    return places


@pytest.mark.parametrize("options", [{"flip": True}, {"crop_padding": 3}, {"flip": True, "crop_padding": 3}])
@pytest.mark.parametrize("kind", [TensorDataset, Items])
def test_points_move_with_the_pixels_that_they_mark(options, kind):
    """Point 0 and point 1 change places in a mirrored image."""
    data = FederatedDataModule(
        FederatedData([hospital(0, 40, kind)]), batch_size="full", task=Keypoints(SIZE, mirrored=[1, 0, 2]), **options
    )
    data.setup()
    data.configure_rounds(seed=3, clients_per_round=None, phases=[Phase("local", steps=1)])
    batch = data.first_batch([0])
    originals = [tuple(map(tuple, row.view(3, 2).tolist())) for row in hospital(0, 40).tensors[1]]
    num_moved = num_exchanged = num_unknown = 0
    for image, target in zip(batch.x[0], batch.y[0].view(-1, 3, 2).tolist(), strict=True):
        places = places_of_marks(image)
        exchanged = [places[1], places[0], places[2]]
        result = [None if math.isnan(x) else (x, y) for x, y in target]
        assert all(math.isnan(x) == math.isnan(y) for x, y in target)
        assert result in (places, exchanged)
        num_exchanged += result != places
        num_unknown += None in result
        num_moved += tuple(result) not in originals
    assert num_moved > 20
    assert (5 < num_exchanged < 35) if "flip" in options else num_exchanged == 0
    assert (num_unknown > 0) == ("crop_padding" in options)


def test_an_unknown_point_stays_unknown_when_it_is_moved():
    images, points = hospital(0).tensors
    points[::2, :2] = NAN
    data = FederatedDataModule(
        FederatedData([TensorDataset(images, points)]),
        batch_size="full",
        task=Keypoints(SIZE, mirrored=[1, 0, 2]),
        flip=True,
    )
    data.setup()
    data.configure_rounds(seed=3, clients_per_round=None, phases=[Phase("local", steps=1)])
    unknown = data.first_batch([0]).y[0].isnan().view(-1, 3, 2).all(-1)
    assert unknown.sum() == 4 and not unknown[:, 2].any()
    assert 0 < int(unknown[:, 1].sum()) < 4  # those of mirrored images


def test_points_that_are_mostly_unknown_are_warned_of():
    images, points = hospital(0).tensors
    points[1:, :2] = NAN
    data = FederatedDataModule(FederatedData([TensorDataset(images, points)]), task=Keypoints(SIZE))
    with pytest.warns(UserWarning, match=r"8 training images: 0 \(7\), 1 \(7\)"):
        data.setup()


def blobs(centers, height, width):
    """Images (N, 3, H, W) with a bell curve around the centre (x, y) of each."""
    rows = torch.arange(height).view(-1, 1)
    columns = torch.arange(width)
    images = []
    for x, y in centers.tolist():
        image = (-((columns - x) ** 2 + (rows - y) ** 2) / 8).exp() * 250
        images.append(image.expand(3, -1, -1).to(torch.uint8))
    return torch.stack(images)


def center_of_mass(image):
    """(x, y) of the mean of the pixels of an image (H, W), weighted by their values."""
    weights = image / image.sum()
    rows = torch.arange(image.shape[0]).view(-1, 1)
    columns = torch.arange(image.shape[1])
    return [float((weights * columns).sum()), float((weights * rows).sum())]


CENTERS = torch.tensor([[14.0, 13.0], [20.25, 11.5], [24.0, 18.0], [17.5, 16.25]])


@pytest.mark.parametrize("kind", [TensorDataset, Items])
@pytest.mark.parametrize("size", [24, 48])
def test_points_are_scaled_with_their_images(kind, size):
    data = FederatedDataModule(
        FederatedData([kind(blobs(CENTERS, 32, 40), CENTERS)]), batch_size=4, task=Keypoints(size), image_size=size
    )
    data.setup()
    data.configure_rounds(seed=3, clients_per_round=None, phases=[Phase("local", steps=1)])
    images, points = next(iter(data.examples(0, 4)))
    assert images.shape[-2:] == (size, size)
    for image, point in zip(images, points.tolist(), strict=True):
        assert center_of_mass(image[0] * 0.5 + 0.5) == pytest.approx(point, abs=0.1)


def table_of_files(folder):
    """A table of images of two sizes with the centre of the blob in each, in pixels of its file."""
    rows = ["path,x,y"]
    for number, center in enumerate(CENTERS):
        height, width = ((32, 40), (40, 48))[number % 2]
        pixels = blobs(center.unsqueeze(0), height, width)[0]
        Image.fromarray(pixels.movedim(0, -1).numpy()).save(folder / f"{number}.png")
        rows.append(f"{number}.png,{center[0]},{center[1]}")
    table = folder / "table.csv"
    table.write_text("\n".join(rows))
    return str(table)


def test_points_of_files_of_several_sizes_are_scaled_by_the_size_of_each(tmp_path):
    images = ImageTable(table_of_files(tmp_path), numbers=["x", "y"], test_share=0.3, seed=1)
    data = FederatedDataModule(dataset=images, partition=IID(1), task=Keypoints(24), image_size=24, eval_batch_size=4)
    data.setup()
    data.configure_rounds(seed=3, clients_per_round=None, phases=[Phase("local", steps=1)])
    count = 0
    for batches in (data.examples(0, 4), data.test_batches()):
        for image, point in ((image, point) for batch in batches for image, point in zip(*batch, strict=True)):
            assert center_of_mass(image[0] * 0.5 + 0.5) == pytest.approx(point.tolist(), abs=0.1)
            count += 1
    assert count == len(CENTERS)


def test_files_that_are_resized_in_memory_are_rejected(tmp_path):
    images = ImageTable(table_of_files(tmp_path), numbers=["x", "y"], in_memory=True, test_share=0.3)
    data = FederatedDataModule(dataset=images, partition=IID(1), task=Keypoints(24), image_size=24)
    with pytest.raises(OptionError, match=r"ImageTable.*in_memory: false"):
        data.setup()


def test_metrics_equal_a_loop_over_images_and_points():
    random = np.random.default_rng(0)
    truth = random.uniform(0, 12, (40, 3, 2))
    predicted = truth + random.normal(0, 2, (40, 3, 2))
    truth[random.random((40, 3)) < 0.3] = NAN
    truth[:, 2] = NAN
    task = Keypoints(12, pck_threshold=2.0)
    names = ["mean_distance", "mean_distance_per_keypoint", "pck", "pck_per_keypoint"]
    scores = Scores(make_metrics(names, task, 6), task)
    outputs = torch.tensor((predicted.reshape(40, 6) - 5.5) / 6)
    for rows in (slice(0, 17), slice(17, 40)):
        scores.update(outputs[rows].unsqueeze(0), torch.tensor(truth).flatten(1)[rows])
    results = {name: values[0, 0].tolist() for name, values in scores.all().items()}
    distances_of_points = []
    for point in (0, 1):
        is_known = [row for row in range(40) if not math.isnan(truth[row, point, 0])]
        distances_of_points.append([math.dist(predicted[row, point], truth[row, point]) for row in is_known])
    means = [sum(distances) / len(distances) for distances in distances_of_points]
    shares = [sum(d <= 2.0 for d in distances) / len(distances) for distances in distances_of_points]
    assert results["mean_distance_per_keypoint"][:2] == pytest.approx(means)
    assert results["pck_per_keypoint"][:2] == pytest.approx(shares)
    assert math.isnan(results["mean_distance_per_keypoint"][2]) and math.isnan(results["pck_per_keypoint"][2])
    assert results["mean_distance"] == pytest.approx(sum(means) / 2)
    assert results["pck"] == pytest.approx(sum(shares) / 2)


def test_sums_that_no_images_can_have_are_noticed():
    distance, pck = make_metrics(["mean_distance", "pck"], Keypoints(12), 4)
    sums = torch.tensor([3.0, 1.0, 5.0, 4.0], dtype=torch.float64)
    assert distance.summed.is_possible(sums, 5, 1) and pck.summed.is_possible(sums, 5, 1)
    assert not distance.summed.is_possible(sums, 4, 1)
    assert not distance.summed.is_possible(-sums, 5, 1)
    assert not pck.summed.is_possible(sums.flip(0), 5, 1)
    assert not pck.summed.is_possible(sums * NAN, 5, 1)


def test_a_lower_distance_and_a_higher_share_are_better():
    names = score_names(["mean_distance", "pck"])
    assert names["personal/local_test"] and not names["personal/local_test_pck"]


@pytest.mark.parametrize("engine", ["folded", "loop"])
def test_a_round_equals_a_loop_over_clients(engine):
    run = fit(engine=engine)
    updates = []
    for dataset in hospitals().train:
        images, points = dataset.tensors
        model = network()
        halves = torch.tensor([WIDTH / 2, HEIGHT / 2]).repeat(3)
        z = (points + 0.5) / halves - 1
        (model(prepare_images(images)) - z).square().mean().backward()
        updates.append([parameter - 0.1 * parameter.grad for parameter in model.parameters()])
    trained = dict(run.global_model().named_parameters())
    for (name, _), *values in zip(network().named_parameters(), *updates, strict=True):
        torch.testing.assert_close(trained[name], torch.stack(values).mean(0), rtol=1e-4, atol=1e-5)


def test_perada_distils_saves_and_predicts_in_the_pixels_of_each_image(tmp_path):
    model = network()
    data = FederatedDataModule(hospitals(), batch_size=4, task=Keypoints(SIZE, mirrored=[1, 0, 2]), flip=True)
    run = fit("perada", "lora", data=data, model=copy.deepcopy(model), local_steps=3, distillation={"steps": 3})
    images, points = hospitals().test[1].tensors
    outputs = run.personal(1)(prepare_images(images)).detach().double()
    halves = torch.tensor([WIDTH / 2, HEIGHT / 2]).repeat(3)
    predicted = (outputs + 1) * halves - 0.5
    distances = (predicted - points).view(-1, 3, 2).norm(dim=-1)
    assert run.metrics["clients"]["personal/local_test"][1] == pytest.approx(float(distances.mean()), rel=1e-5)
    loaded = perada.Run.load(run.save(tmp_path / "run"), backbone=model)
    predictions = loaded.predict(images, client=1)
    torch.testing.assert_close(predictions.labels.double(), predicted, rtol=1e-4, atol=1e-4)
    with predictions.to_csv(tmp_path / "predictions.csv").open() as file:
        header, first, *_ = csv.reader(file)
    assert header == ["image", *map(str, range(6))]
    assert [float(cell) for cell in first[1:]] == pytest.approx(predicted[0].tolist(), rel=1e-4)
    card = (tmp_path / "run" / "README.md").read_text()
    assert "Keypoints in images. The number of coordinates, x and y of each point, is 6.\n" in card


def test_predictions_are_scaled_to_images_of_other_sizes(tmp_path):
    """The model gets squares of 12 pixels. Images of one colour are the same to it in any size."""
    data = FederatedDataModule(hospitals(), batch_size=4, task=Keypoints(12), image_size=12)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 12 * 12, 6))
    run = fit(data=data, model=model)
    small = np.full((12, 12, 3), 70, dtype=np.uint8)
    large = np.full((48, 24, 3), 70, dtype=np.uint8)
    path = tmp_path / "large.png"
    Image.fromarray(large).save(path)
    of_small = run.predict([small], client=0).labels.view(3, 2)
    for image in (large, Image.fromarray(large), path):
        of_large = run.predict([image], client=0).labels.view(3, 2)
        stretched = (of_small + 0.5) * torch.tensor([2.0, 4.0]) - 0.5
        torch.testing.assert_close(of_large, stretched, rtol=1e-5, atol=1e-4)


def test_the_code_of_a_card_computes_the_predictions():
    task = Keypoints(SIZE)
    code = prediction_code(json.loads(json.dumps(task.record())))
    computed = eval(code, {"outputs": OUTPUTS, "torch": torch})
    torch.testing.assert_close(computed, task.predictions(OUTPUTS))


@pytest.mark.slow
def test_the_report_leaves_unknown_points_out(tmp_path):
    data = hospitals()
    for dataset in data.test:
        dataset.tensors[1][0, :2] = NAN
        dataset.tensors[1][:, 4:] = NAN
    run = fit("ditto", data=FederatedDataModule(data, batch_size=4, task=Keypoints(SIZE)))
    write_page(tmp_path / "page", read_records(run.save(tmp_path / "run")))
    with (tmp_path / "page" / "residuals.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["model"] == "personal models"]
    assert [int(row["test images"]) for row in rows] == [8, 8, 10, 10, 0, 0]
    predicted = [run.predict(dataset.tensors[0], client).labels for client, dataset in enumerate(data.test)]
    residuals = torch.cat(predicted) - torch.cat([dataset.tensors[1] for dataset in data.test])
    means = residuals.nanmean(0)[:4].tolist()
    assert [float(row["mean residual"]) for row in rows[:4]] == pytest.approx(means, rel=1e-3)


def test_private_training_takes_unknown_and_moved_points():
    data = FederatedDataModule(
        hospitals(), batch_size=4, task=Keypoints(SIZE, mirrored=[1, 0, 2]), flip=True, crop_padding=4
    )
    run = fit(data=data, privacy={"noise_multiplier": 1.0, "delta": 1e-3, "max_norm": 1.0}, local_steps=3)
    assert all(value.isfinite().all() for value in run.state("global").values())
    assert math.isfinite(run.metrics["rounds"][-1]["personal/local_test"])


def test_options_are_recorded():
    task = Keypoints([12, 16], "absolute", mirrored=[1, 0, 2], pck_threshold=2)
    assert make_task(json.loads(json.dumps(task.record()))) == task
    assert repr(Keypoints(12)) == "Keypoints(image_size=12)"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_size": 0}, "image_size must be"),
        ({"image_size": [12, 0]}, "image_size must be"),
        ({"image_size": "large"}, "image_size must be"),
        ({"loss_function": "cubic"}, "loss_function"),
        ({"mirrored": 3}, "mirrored must be"),
        ({"mirrored": [0, 3, 1]}, "mirrored must be"),
        ({"mirrored": [1, 2, 0]}, "point 0 becomes point 1, but point 1 becomes point 2"),
        ({"pck_threshold": 0}, "pck_threshold must be"),
    ],
)
def test_options_out_of_range_are_rejected(options, message):
    with pytest.raises(OptionError, match=message):
        Keypoints(**{"image_size": 12} | options)


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        (Keypoints(SIZE), {"flip": True}, "set mirrored of the task Keypoints"),
        (Keypoints(SIZE, mirrored=[1, 0]), {}, "mirrored must be a list of 3 numbers"),
        (Keypoints(SIZE), {"mixup": 0.2}, "cannot be mixed"),
        (Keypoints(SIZE), {"cutmix": 0.2}, "cannot be mixed"),
        (Keypoints(SIZE), {"shifts": {"blur": "zoom_blur"}}, "zoom_blur would move"),
        (Keypoints(HEIGHT), {}, r"image_size=12 of the task Keypoints.*12 × 16 pixels.*image_size=\[12, 16\]"),
        (Keypoints(SIZE), {"image_size": 8}, r"8 × 8 pixels.*image_size=8 of the task"),
        (Keypoints(SIZE), {"sampling": "balanced"}, "needs the class of each training image"),
    ],
)
def test_what_would_make_targets_wrong_is_rejected(task, options, message):
    with pytest.raises(ValueError, match=message):
        FederatedDataModule(hospitals(), task=task, **options).setup()


class Marked(ImageSet):
    """Images with marks, as a set."""

    def _load_images(self):
        return hospital(int(self.train)).tensors


def test_scanners_that_move_images_are_rejected():
    with pytest.raises(OptionError, match=r"would move .*clients' images"):
        FederatedDataModule(dataset=Scanners(Marked()), partition=IID(2), task=Keypoints(SIZE))


@pytest.mark.parametrize("kind", [TensorDataset, Items])
@pytest.mark.parametrize("value", [-3.0, 30.0, float("inf")])
def test_coordinates_outside_of_the_image_are_rejected(kind, value):
    images, points = hospital(0).tensors
    points[3, 2] = value
    data = FederatedDataModule(FederatedData([kind(images, points)]), batch_size="full", task=Keypoints(SIZE))
    with pytest.raises(ValueError, match=r"outside"):
        data.setup()
        data.configure_rounds(seed=3, clients_per_round=None, phases=[Phase("local", steps=2)])
        data.first_batch([0])


@pytest.mark.parametrize("targets", [torch.zeros(8, 3), torch.zeros(8, 3, 2), torch.zeros(8, dtype=torch.int64)])
def test_targets_of_another_form_are_rejected(targets):
    data = FederatedDataModule(FederatedData([TensorDataset(hospital(0).tensors[0], targets)]), task=Keypoints(SIZE))
    with pytest.raises(OptionError, match="coordinates"):
        data.setup()


def test_texts_have_no_keypoints():
    texts = TensorDataset(torch.zeros(8, 5, dtype=torch.int64), torch.zeros(8, 2))
    with pytest.raises(OptionError, match="positions"):
        FederatedDataModule(FederatedData([texts]), task=Keypoints(5)).setup()


def test_the_error_rate_is_the_mean_distance_in_half_the_longer_side():
    rates = Keypoints(SIZE).error_rates(OUTPUTS, TARGETS)
    for row, outputs in enumerate(OUTPUTS.tolist()):
        distances = []
        for point in (0, 1):
            target = TARGETS[row, 2 * point : 2 * point + 2].tolist()
            if not any(map(math.isnan, target)):
                x, y = outputs[2 * point : 2 * point + 2]
                distances.append(math.dist((pixels_of(x, WIDTH), pixels_of(y, HEIGHT)), target))
        expected = min(1.0, sum(distances) / len(distances) / (WIDTH / 2)) if distances else 0.0
        assert rates[row].item() == pytest.approx(expected, rel=1e-5)
