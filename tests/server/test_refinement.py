# SPDX-License-Identifier: Apache-2.0
"""What several models predict together, and distilling one model into itself."""

from typing import ClassVar

import pytest
import torch
from scipy.stats import entropy
from torch import nn

from perada.core.ranks import Ranks
from perada.core.states import get_state
from perada.engine import Engine
from perada.server import Distillation, Distiller
from perada.tasks import Classification, MultiLabel

LOGITS = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_logits_are_averaged():
    expected = sum(LOGITS[k] for k in range(4)) / 4
    torch.testing.assert_close(Classification().ensemble(LOGITS, "logits"), expected)
    torch.testing.assert_close(MultiLabel().ensemble(LOGITS, "logits"), expected)


def test_probabilities_are_averaged():
    softmax = torch.stack([row.exp() / row.exp().sum(-1, keepdim=True) for row in LOGITS]).mean(0)
    torch.testing.assert_close(Classification().ensemble(LOGITS, "probabilities").softmax(-1), softmax)
    sigmoid = (1 / (1 + (-LOGITS).exp())).mean(0)
    torch.testing.assert_close(MultiLabel().ensemble(LOGITS, "probabilities").sigmoid(), sigmoid)


@pytest.mark.parametrize("average", ["logits", "probabilities"])
def test_one_model_is_its_own_ensemble(average):
    assert torch.equal(Classification().ensemble(LOGITS[:1], average), LOGITS[0])


def test_probabilities_near_zero_are_averaged_without_overflow():
    far = torch.tensor([[0.0, -2000.0], [0.0, -1000.0]])
    assert Classification().ensemble(far, "probabilities").softmax(-1).tolist() == [1.0, 0.0]
    assert MultiLabel().ensemble(far, "probabilities").isfinite().all()


def entropy_of(logits, task):
    return task.entropy(task.predictions(logits))


def test_entropy_equals_scipys():
    p = LOGITS[0].softmax(-1)
    torch.testing.assert_close(entropy_of(LOGITS[0], Classification()), torch.as_tensor(entropy(p.numpy(), axis=-1)))
    q = LOGITS[0].sigmoid().numpy()
    labels = [entropy([value, 1 - value]) for value in q.flatten()]
    expected = torch.tensor(labels, dtype=torch.float64).view(5, 3).mean(-1)
    torch.testing.assert_close(entropy_of(LOGITS[0], MultiLabel()), expected)


def test_entropy_of_a_certain_prediction_is_zero():
    assert entropy_of(torch.tensor([[1e4, -1e4]]), Classification()).tolist() == [0.0]


def test_a_model_is_not_distilled_into_itself():
    """Its gradient is zero but for rounding, which Adam would turn into steps of full length."""
    state = {"w": torch.ones(2)}
    same = {"w": state["w"].unsqueeze(0)}
    options = Distillation(steps=3)
    assert Distiller(None, options, ("w",), None)(state, same) is state  # neither is asked for anything


class OfTwo(Ranks):
    """One of two processes, as far as it can be told from the other."""

    rank = 1
    size = 2

    def sum_(self, tensors):
        """The other one has nothing to add."""

    broadcast_ = sum_


@pytest.mark.parametrize(("share", "rows"), [(False, 5), (True, 2)])
def test_each_process_takes_its_part_of_a_steps_images(share, rows):
    class Public:
        asked: ClassVar = []

        def public_indices(self, round, steps, batch_size):
            return torch.arange(8).repeat(steps)[: steps * batch_size].view(steps, batch_size)

        def public_images(self, indices, device):
            self.asked.append(indices.tolist())
            return torch.randn(len(indices), 4)

    net = nn.Linear(4, 3)
    state = get_state(net)
    teachers = {key: torch.stack([value, value + 1]) for key, value in state.items()}
    options = Distillation(steps=3, batch_size=5, share_steps=share)
    data = Public()
    data.asked.clear()
    Distiller(Engine(net), options, tuple(state), data, ranks=OfTwo())(state, teachers)
    steps = data.public_indices(0, 3, 5).tolist()
    assert data.asked[1:] == ([row[1::2] for row in steps] if share else steps)
    assert len(data.asked[-1]) == rows
