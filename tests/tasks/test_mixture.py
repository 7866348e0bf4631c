# SPDX-License-Identifier: Apache-2.0
"""The mixture of two models' predictions: the weighted mean of the probabilities, or of the numbers."""

import pytest
import torch

from perada.core.checks import OptionError
from perada.tasks import Classification, MultiLabel, Regression, Segmentation
from perada.tasks.class_task import ClassTask

TASKS = {
    "classification": (Classification(), (7, 4)),
    "several labels": (MultiLabel(), (7, 4)),
    "segmentation": (Segmentation(), (3, 5, 6, 4)),
    "numbers": (Regression(mean=(3.0, -2.0), std=(5.0, 0.1)), (7, 2)),
}


@pytest.mark.parametrize("share", [0.0, 0.2, 0.8, 1.0])
@pytest.mark.parametrize("name", TASKS)
def test_it_predicts_the_weighted_mean_of_what_both_predict(name, share):
    task, shape = TASKS[name]
    random = torch.Generator().manual_seed(0)
    first = 4 * torch.randn(shape, generator=random, dtype=torch.double)
    second = 4 * torch.randn(shape, generator=random, dtype=torch.double)
    mixed = task.predictions(task.mixture(first, second, torch.tensor(share, dtype=torch.double)))
    expected = share * task.predictions(first) + (1 - share) * task.predictions(second)
    torch.testing.assert_close(mixed, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_classes_that_a_model_rules_out(share):
    """Their logits are minus infinity, their probability is that of the other model alone."""
    first = torch.tensor([[0.0, -torch.inf, -torch.inf]])
    second = torch.tensor([[0.25, 0.75, 0.0]]).log()
    mixed = Classification().mixture(first, second, torch.tensor(share)).softmax(-1)
    expected = share * torch.tensor([[1.0, 0.0, 0.0]]) + (1 - share) * torch.tensor([[0.25, 0.75, 0.0]])
    torch.testing.assert_close(mixed, expected)


@pytest.mark.parametrize("trust", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("known", [[0, 1, 2, 3], [1, 2], [3], []])
def test_classes_that_a_client_does_not_know_are_left_to_the_other_model(known, trust):
    """Each probability by itself; all classes may be known, or none."""
    random = torch.Generator().manual_seed(0)
    personal = 4 * torch.randn(6, 4, generator=random, dtype=torch.double)
    shared = 4 * torch.randn(6, 4, generator=random, dtype=torch.double)
    # The other model may rule a class out.
    shared[2, 1] = -torch.inf
    mask = torch.tensor([number in known for number in range(4)])
    trust_of_images = torch.full((6, 1), trust, dtype=torch.double)
    actual = Classification().completed(personal, shared, mask, trust_of_images).softmax(-1)
    for image in range(6):
        p = personal[image].softmax(0).tolist()
        q = shared[image].softmax(0).tolist()
        unknown_probability = sum(q[number] for number in range(4) if number not in known)
        for number in range(4):
            expected = (1 - trust * unknown_probability) * p[number]
            if number not in known:
                expected += trust * q[number]
            assert float(actual[image, number]) == pytest.approx(expected, rel=1e-10, abs=1e-12)


def test_a_client_knows_classes_of_three_images():
    targets = torch.tensor([4, 0, 0, 0, 2, 2, 4, 4, 4])
    assert Classification().known_classes(targets, 6).tolist() == [True, False, False, False, True, False]
    # Other tasks have no classes of whole images.
    for task in (MultiLabel(), Segmentation(), Regression()):
        assert len(task.known_classes(targets, 6)) == 0


@pytest.mark.parametrize("name", TASKS)
def test_an_output_that_is_nan_is_not_hidden(name):
    task, shape = TASKS[name]
    first = torch.zeros(shape)
    first[0] = torch.nan
    mixed = task.mixture(first, torch.zeros(shape), torch.tensor(0.5))
    assert mixed[0].isnan().all()
    assert mixed[1:].isfinite().all()


def test_a_task_that_does_not_define_it_says_so():
    class Thresholds(ClassTask):
        def loss(self, logits, targets):
            return logits.sum(-1)

        def predictions(self, logits):
            return logits.sigmoid()

    with pytest.raises(OptionError, match=r"mixture.*Thresholds"):
        Thresholds().mixture(torch.zeros(1, 3), torch.zeros(1, 3), torch.tensor(0.5))
