# SPDX-License-Identifier: Apache-2.0
"""Custom tasks of two methods, in every place that asks a task."""

from dataclasses import dataclass

import pytest
import torch
from scipy.special import rel_entr
from torch.nn import functional as F

import perada
from perada.core.checks import OptionError
from perada.data import Digits, Dirichlet, FederatedDataModule
from perada.tasks import ClassTask
from perada.tasks.base import make_task

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
    with pytest.raises(OptionError, match=r"predictions of Margin\(margin=0.5\) cannot be averaged.*average='logits'"):
        fit("fed_ensemble", algorithm_options={"average": "probabilities"})
