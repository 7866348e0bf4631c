# SPDX-License-Identifier: Apache-2.0
"""Scores that a site shows its own operator: how good its models are on its own test images. They never leave it."""

from dataclasses import replace

import pytest
import torch

from perada.cli.deploy_status import site_status
from perada.deploy.protocol import Request, pack, read_header
from perada.deploy.site.file import SiteFile
from perada.deploy.state import SITE_LEDGER, OwnScores, RunState, SiteTotals, read_state
from perada.deploy.transport import LocalTransport
from perada.tasks import Regression

from .parties import Parties
from .sums.test_noisy_sums import noisy
from .test_deploy_status import cells
from .test_sites import RUN, code, only_client, train


def site_file(worker):
    return SiteFile("north", recipes={}, data={}, state=worker.store.folder)


def own_scores(worker):
    return read_state(worker.store.folder / "state.safetensors").run_state.scoring.own


def evaluation(worker):
    """A message that asks to score the model of the first round."""
    client = only_client(worker)
    shared = {f"shared/{key}": value for key, value in client.recipe.template.initial.items()}
    return pack(Request("evaluate", RUN, client.recipe.digest, 1), shared)


def counted_accuracy(worker, state):
    """Share of a site's test images that a state predicts correctly, image by image."""
    client = only_client(worker)
    correct = 0
    for x, y in client.test_batches(0):
        for image, label in zip(x, y, strict=True):
            logits = client.module.engine.shared_logits(state, image.unsqueeze(0))[0, 0]
            correct += int(logits.argmax()) == int(label)
    return correct / client.test_size


@pytest.mark.parametrize("may_send", [[], ["sizes", "counts"]], ids=["nothing may leave", "counts may leave"])
def test_a_site_sees_the_scores_of_its_models(may_send, tiny, tmp_path):
    parties = Parties(tiny, tmp_path, "ditto", rounds=2)
    workers = parties.workers(may_send=may_send)
    parties.coordinator(LocalTransport(workers)).run()
    worker = workers["site0"]
    client = only_client(worker)
    state = worker.store.current()
    models = {
        "personal": client.personal(state.scoring.global_state, state),
        "global": client.settings.algorithm.members(state.scoring.global_state, {}),
    }
    own = own_scores(worker)
    assert own.num_images == client.test_size
    with torch.no_grad():
        expected = {name: {"accuracy": pytest.approx(counted_accuracy(worker, models[name]))} for name in models}
    assert own.scores == expected

    text = site_status(site_file(worker))
    assert f"Own test images ({client.test_size}), after round 2 of run {state.run}:" in text
    rows = cells(next(part for part in text.split("\n\n") if part.startswith("| model")))
    shown = {row["model"]: float(row["accuracy %"]) for row in rows}
    assert shown == {name: pytest.approx(100 * own.scores[name]["accuracy"], abs=0.005) for name in models}


def test_scores_that_may_not_leave_are_in_no_reply(tiny, tmp_path):
    worker = Parties(tiny, tmp_path, "ditto").worker(0, may_send=[])
    worker.answer(train(worker), "")
    message = evaluation(worker)
    header = read_header(worker.answer(message, ""))
    assert header["facts"] == {}
    assert own_scores(worker).scores["personal"]["accuracy"] is not None
    audit = (worker.store.folder / "audit.jsonl").read_text()
    assert "accuracy" not in audit


def test_a_site_with_client_privacy_sees_them_and_its_ledger_does_not_grow(tiny, tmp_path):
    parties = noisy(tiny, tmp_path, rounds=1)
    workers = parties.workers()
    parties.coordinator(LocalTransport(workers)).run()
    worker = workers["site0"]
    assert own_scores(worker).scores.keys() == {"global"}
    (steps,) = worker.store.totals.ledger.history(SITE_LEDGER).values()
    assert steps == 1  # the noisy sum of the updates


def test_a_test_image_that_cannot_be_read_is_not_reported_by_a_site_that_sends_no_scores(
    tiny, tmp_path, monkeypatch, caplog
):
    """Otherwise the server would learn one bit about the test images."""
    codes = {}
    for place, may_send in enumerate(([], ["counts"])):
        worker = Parties(tiny, tmp_path, "ditto").worker(place, may_send=may_send)
        worker.answer(train(worker), "")

        def unreadable(*_):
            raise OSError("image 3 is truncated")

        monkeypatch.setattr(only_client(worker), "test_batches", unreadable)
        message = evaluation(worker)
        codes[tuple(may_send)] = code(worker.answer(message, ""), message)
        assert own_scores(worker) == OwnScores()
    assert codes == {(): "ok", ("counts",): "failed"}
    assert "image 3 is truncated" in caplog.text
    assert "could not be scored" in caplog.text


def test_the_newest_run_with_scores_is_shown_in_the_unit_of_its_numbers(monkeypatch, tmp_path):
    own = OwnScores(7, {"global": {"mae": 12.3456, "r2": None}}, has_classes=Regression.has_classes)
    fresh = RunState("aa")
    scored = RunState("bb")
    scored = replace(scored, scoring=replace(scored.scoring, round=4, own=own))
    monkeypatch.setattr("perada.cli.deploy_status.read_runs", lambda *_, **__: ([fresh, scored], SiteTotals()))
    text = site_status(SiteFile("north", recipes={}, data={}, state=tmp_path))
    assert "Own test images (7), after round 4 of run bb:" in text
    assert cells(text.split("\n\n")[-1]) == [{"model": "global", "mae": "12.35", "r2": "–"}]


def test_a_site_that_was_not_scored_yet_shows_no_table(tiny, tmp_path):
    worker = Parties(tiny, tmp_path, "ditto").worker(0)
    worker.answer(train(worker), "")
    text = site_status(site_file(worker))
    assert "rounds trained" in text
    assert "Own test images" not in text
