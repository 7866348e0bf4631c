# SPDX-License-Identifier: Apache-2.0
"""A run says beforehand how long its models are scored, where that is minutes."""

import logging
import time

import pytest

import perada
from perada.federation.evaluation import EvaluationPass
from perada.lightning import scoring
from tests.options import sections


@pytest.mark.parametrize(
    ("seconds", "batches", "models", "everywhere", "expected"),
    [
        (0.5, 100, 50, 50, None),
        (2.0, 100, 50, 50, "scoring 50 personal models, 50 of them on all test images takes about 3 min each time"),
        (60.0, 120, 50, 50, "takes about 2.0 hours each time (120 batches, the first took 60.0 s)"),
        (60.0, 2, 0, 0, "scoring the global model takes about 2 min each time"),
    ],
)
def test_the_time_of_all_batches_is_that_of_the_first_times_their_number(
    seconds, batches, models, everywhere, expected
):
    notice = scoring.scoring_notice(seconds, batches, models, everywhere)
    if expected is None:
        assert notice is None
        return
    assert expected in notice
    assert "check_val_every_n_epoch" in notice
    assert ("global_test_clients=10" in notice) == (everywhere > 10)


def test_a_run_says_it_once_and_right_after_the_first_batch(tiny, tmp_path, caplog, monkeypatch):
    """Each batch takes 50 ms, and two are two thousandths of a minute: with that limit the notice is due."""
    monkeypatch.setattr(scoring, "LONG_SCORING", 0.05)
    step = EvaluationPass.step
    scored = []

    def slow(evaluation, batch, index):
        if evaluation.everywhere:  # not the scores of the initial models on their own clients' images
            time.sleep(0.05)
            scored.append(len([record for record in caplog.records if "scoring 5 personal" in record.getMessage()]))
        step(evaluation, batch, index)

    monkeypatch.setattr(EvaluationPass, "step", slow)
    data = perada.FederatedDataModule(tiny.data(), batch_size=4, eval_batch_size=6)
    options = {name: value for name, value in tiny.options.items() if name != "batch_size"}
    with caplog.at_level(logging.INFO):
        perada.finetune(tiny.net(), data, **sections(rounds=2, **options, default_root_dir=tmp_path))
    assert len(scored) >= 4
    assert scored[0] == 0 and set(scored[1:]) == {1}
    (notice,) = [record.getMessage() for record in caplog.records if "personal models" in record.getMessage()]
    assert "5 of them on all test images" in notice


def test_a_short_one_is_not_mentioned(tiny, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        perada.finetune(tiny.net(), tiny.data(), **sections(rounds=1, **tiny.options, default_root_dir=tmp_path))
    assert not [record for record in caplog.records if "takes about" in record.getMessage()]
