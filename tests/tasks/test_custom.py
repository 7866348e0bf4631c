# SPDX-License-Identifier: Apache-2.0
"""Custom tasks of two methods, in every place that asks a task."""

from dataclasses import dataclass

import pytest
import torch
from scipy.special import rel_entr
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

import perada
from perada.core.checks import OptionError
from perada.data import Digits, Dirichlet, FederatedData, FederatedDataModule
from perada.tasks import ClassTask, Task
from perada.tasks.base import SummedMetric, make_task

RANDOM = torch.Generator().manual_seed(5)
LOGITS = torch.randn(6, 4, generator=RANDOM, dtype=torch.float64)
TEACHER = torch.randn(6, 4, generator=RANDOM, dtype=torch.float64)


@dataclass(frozen=True)
class Margin(ClassTask):
    """Hinge loss, with probabilities in proportion to 2 to the power of the outputs."""

    margin: float = 1.0

    def loss(self, logits, targets):
        return F.multi_margin_loss(logits, targets, margin=self.margin, reduction="none")

    def predictions(self, logits):
        powers = 2**logits
        return powers / powers.sum(-1, keepdim=True)


def fit(algorithm, **options):
    data = FederatedDataModule(
        dataset=Digits(), partition=Dirichlet(num_clients=3, alpha=1.0), public_fraction=0.1, task=Margin(0.5)
    )
    return perada.finetune(
        "test_resnet", data, pretrained=False, algorithm=algorithm, rounds=1, local_steps=1, seed=1, **options
    )


def test_two_methods_define_the_others():
    task = Margin()
    powers = (2**LOGITS).numpy()
    probabilities = powers / powers.sum(-1, keepdims=True)
    assert task.predicted(LOGITS).tolist() == LOGITS.argmax(-1).tolist()
    assert task.confidence(LOGITS).tolist() == pytest.approx(probabilities.max(-1).tolist())
    assert make_task(Margin(0.5).record()) == Margin(0.5)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_distillation_is_scipys_divergence_of_the_tasks_own_probabilities(temperature):
    student = (2 ** (LOGITS / temperature)).numpy()
    teacher = (2 ** (TEACHER / temperature)).numpy()
    student = student / student.sum(-1, keepdims=True)
    teacher = teacher / teacher.sum(-1, keepdims=True)
    expected = rel_entr(teacher, student).sum(-1).mean() * temperature**2
    assert Margin().distillation_loss(LOGITS, TEACHER, temperature).item() == pytest.approx(expected)


def test_distillation_from_a_student_without_any_probability_is_finite():
    student = torch.tensor([[-100.0, 100.0]])
    loss = Margin().distillation_loss(student, -student)
    assert loss.isfinite()


def test_a_custom_task_is_trained_distilled_saved_and_predicted(tmp_path):
    run = fit("perada")
    loaded = perada.Run.load(run.save(tmp_path / "run"))
    predictions = loaded.predict([torch.zeros(3, 8, 8, dtype=torch.uint8)], client=0)
    assert float(predictions.probabilities.sum()) == pytest.approx(1.0, abs=1e-5)
    assert loaded.info["task"]["init_args"] == {"margin": 0.5}


def test_an_ensemble_of_probabilities_is_rejected_at_set_up():
    with pytest.raises(OptionError, match=r"Margin\(margin=0\.5\).*average='logits'"):
        fit("fed_ensemble", algorithm_options={"average": "probabilities"})


@dataclass(frozen=True)
class Spread(Task):
    """The spread of the grey values of an image, a number, by methods that the base class does not have."""

    has_classes = False
    default_metric = "mae"
    labels_per_image = "numbers"

    def loss(self, logits, targets):
        return (logits[:, 0] - targets).abs()

    def predictions(self, logits):
        return logits

    def distillation_loss(self, student, teacher, temperature=1.0):
        return F.l1_loss(student, teacher)

    def blank_targets(self, shape, classes, device):
        return torch.zeros(*shape, device=device)

    def count_classes(self, targets):
        return 1

    def fits(self, targets, classes=None):
        return targets.ndim == 1

    def out_of_range(self, targets, classes):
        return targets[~targets.isfinite()]

    def describe_targets(self, classes):
        return "a number"

    def renumber(self, targets, class_numbers, classes):
        return targets


def test_a_task_of_numbers_that_does_not_say_how_they_move_is_not_trained_on_moved_images():
    sets = [TensorDataset(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.arange(4.0))]
    FederatedDataModule(FederatedData(sets), task=Spread()).setup()
    for options in ({"flip": True}, {"crop_padding": 1}):
        with pytest.raises(OptionError, match=f"{next(iter(options))} would move"):
            FederatedDataModule(FederatedData(sets), task=Spread(), **options)
    with pytest.raises(OptionError, match="zoom_blur would move"):
        FederatedDataModule(FederatedData(sets, sets), task=Spread(), shifts={"blur": "zoom_blur"})


NUM_BOXES = 3
SIDE = 8


class BoxCount(SummedMetric):
    """Mean difference of the numbers of predicted and of true boxes."""

    lower_is_better = True

    def summands(self, predicted, targets):
        num_predicted = (predicted[..., 4] >= 0).sum(-1)
        num_true = (targets[..., 4] >= 0).sum(-1)
        return torch.stack([(num_predicted - num_true).abs(), torch.ones_like(num_predicted)], -1)

    def score(self, statistics):
        return statistics[..., 0] / statistics[..., 1]


@dataclass(frozen=True)
class Boxes(Spread):
    """Boxes (x, y, width, height, class), padded to three of class −1, from a map of their centres."""

    per_pixel = True
    has_positions = True
    default_metric = "box_count"
    labels_per_image = "boxes (B, 5)"

    def loss(self, logits, targets):
        is_center = self.centers(targets, logits.shape[1:3])
        return F.binary_cross_entropy_with_logits(logits[..., 0], is_center, reduction="none").mean((1, 2))

    def centers(self, boxes, size):
        """A map (N, H, W) with 1 at the centre of each box."""
        maps = torch.zeros(len(boxes), *size)
        for image, boxes_of_image in zip(maps, boxes.tolist(), strict=True):
            for x, y, _, _, number in boxes_of_image:
                if number >= 0:
                    image[min(int(y), size[0] - 1), min(int(x), size[1] - 1)] = 1
        return maps

    def predicted(self, logits):
        scores, places = logits[..., 0].flatten(-2).topk(NUM_BOXES)
        rows = places // logits.shape[-2]
        columns = places % logits.shape[-2]
        ones = torch.ones_like(scores)
        return torch.stack([columns, rows, ones, ones, torch.where(scores > 0, 0, -1)], -1)

    def blank_targets(self, shape, classes, device):
        return torch.full((shape[0], NUM_BOXES, 5), -1.0, device=device)

    def fits(self, targets, classes=None):
        return targets.ndim == 3 and targets.shape[2] == 5

    def moved(self, targets, moves):
        points = moves.move_points(targets[..., :2])
        return torch.cat([points, targets[..., 2:]], -1)

    def resized(self, targets, size, new_size):
        factors = torch.tensor([new_size[1] / size[1], new_size[0] / size[0]]).repeat(2)
        return torch.cat([targets[..., :4] * factors, targets[..., 4:]], -1)

    def check_positions(self, targets, size):
        if (targets[..., 0] > size[1]).any():
            raise ValueError("a box is outside of its image")

    def check_augmentation(self, options):
        return

    def summed_metrics(self, classes):
        return {"box_count": BoxCount()}


def scenes(seed, count=6):
    """Images of one to three bright pixels, with a box around each."""
    random = torch.Generator().manual_seed(seed)
    images = torch.zeros(count, 3, SIDE, SIDE, dtype=torch.uint8)
    boxes = torch.full((count, NUM_BOXES, 5), -1.0)
    for number in range(count):
        for place in range(1 + number % NUM_BOXES):
            x, y = torch.randint(0, SIDE, (2,), generator=random).tolist()
            images[number, :, y, x] = 255
            boxes[number, place] = torch.tensor([x, y, 1, 1, 0])
    return images, boxes


class Items(Dataset):
    """A dataset that is read item by item."""

    def __init__(self, *tensors):
        self.tensors = tensors

    def __len__(self):
        return len(self.tensors[0])

    def __getitem__(self, index):
        return self.tensors[0][index], self.tensors[1][index]


@pytest.mark.parametrize("kind", [TensorDataset, Items])
@pytest.mark.parametrize("options", [{}, {"image_size": 2 * SIDE, "flip": True}])
def test_padded_lists_of_boxes_are_targets(kind, options):
    """Batches and scores have no say in the shape of targets."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(4, 1, 1))
    data = FederatedDataModule(
        FederatedData([kind(*scenes(0)), kind(*scenes(1))], [kind(*scenes(2)), kind(*scenes(3))]),
        batch_size=4,
        task=Boxes(),
        num_classes=1,
        **options,
    )
    run = perada.finetune(
        network, data, pretrained=False, algorithm="ditto", adapter="full", rounds=1, local_steps=2, seed=1
    )
    for client, dataset in enumerate((scenes(2), scenes(3))):
        images, boxes = dataset
        predicted = run.predict(images, client=client).labels
        expected = ((predicted[..., 4] >= 0).sum(1) - (boxes[..., 4] >= 0).sum(1)).abs().double().mean()
        assert run.metrics["clients"]["personal/local_test"][client] == pytest.approx(float(expected))
