# SPDX-License-Identifier: Apache-2.0
"""Networks that return more than logits."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import perada
from perada.models.backbones import build_backbone
from perada.results.formats import export_model
from tests.options import sections

WAYS = {
    "alone": lambda logits, h: logits,
    "first": lambda logits, h: (logits, h),
    "last": lambda logits, h: [None, h, logits],
    "dict": lambda logits, h: {"loss": None, "logits": logits},
    "object": lambda logits, h: SimpleNamespace(logits=logits, hidden=h),
}


class Net(nn.Module):
    def __init__(self, way=None, seed=0):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.stem, self.head = nn.Conv2d(3, 6, 4, 2), nn.Linear(6, 3)
        self.way = way or WAYS["alone"]

    def forward(self, x):
        h = self.stem(x).relu().mean((2, 3))
        return self.way(self.head(h), h)


def trained(way, **options):
    random = torch.Generator().manual_seed(0)
    sets = [TensorDataset(torch.randn(n, 3, 8, 8, generator=random), torch.arange(n) % 3) for n in (6, 9)]
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    arguments = {"adapter": "head", "rounds": 2, "batch_size": 4, "distill_steps": 2, "distill_optimizer": "sgd"}
    data = perada.FederatedData(sets, sets, TensorDataset(torch.randn(5, 3, 8, 8, generator=random)))
    return perada.finetune(Net(WAYS[way]), data, **sections(**arguments | options, **quiet))


@pytest.mark.parametrize("options", [{"engine": "folded"}, {"engine": "loop"}, {"cache_features": False}])
@pytest.mark.every(3)
def test_a_run_is_that_of_the_logits_alone(options, tmp_path):
    expected = trained("alone", **options)
    x = torch.randn(4, 3, 8, 8)
    for way in list(WAYS)[1:]:
        run = trained(way, **options)
        for role in ("global", "personal"):
            got, wanted = (one.state(role, None if role == "global" else 1) for one in (run, expected))
            torch.testing.assert_close(got, wanted)
        saved = perada.Run.load(run.save(tmp_path / way), backbone=Net(WAYS[way], seed=5))
        exported = tmp_path / f"{way} exported"
        assert "differ from the run's by at most" in export_model(saved, 1, "torch-export", exported)
        torch.testing.assert_close(saved.predict(x).probabilities, expected.predict(x).probabilities)


@pytest.mark.parametrize(
    ("way", "words"),
    [
        (
            lambda logits, h: (logits, logits + 1),
            r"returns \[a tensor of shape \(2, 3\), a tensor of shape \(2, 3\)\], and 2 of its parts are logits",
        ),
        (
            lambda logits, h: {"out": logits},
            r"'Net' .*'out'.*\(2, 3\).* 0 of",
        ),
    ],
)
def test_what_holds_no_logits_is_one_line(way, words):
    with pytest.raises(TypeError, match=words) as caught:
        build_backbone(Net(way)).model(torch.randn(2, 3, 8, 8))
    assert "\n" not in str(caught.value)
