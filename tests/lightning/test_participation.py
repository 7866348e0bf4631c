# SPDX-License-Identifier: Apache-2.0
"""When clients took part last, against the cohorts that the seed draws, and what runs say of models that are old."""

import json
import math
import re
import warnings

import numpy as np
import pytest
import torch

import perada
from perada.cli import main
from perada.core.rounds import sample_cohort
from perada.federation.participation import STALE, Participation
from perada.results.clients import forget

from .test_failing_clients import Later, federation
from .test_growth import named_clients

SECTIONS = {
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-3},
    "client_privacy": {"noise_multiplier": 1.0, "delta": 1e-3},
}


def fit(tiny, rounds=4, data=None, **options):
    settings = tiny.options | {"algorithm": "ditto", "logger": False, "distill_steps": None, "distill_batch_size": None}
    settings |= {"enable_checkpointing": False} | options
    return tiny.finetune(data or tiny.data(public=False), rounds=rounds, **settings)


def last_rounds(rounds, clients=5, size=2, seed=0):
    """The last round of each client by the rule that draws cohorts, with a plain loop."""
    last = [0] * clients
    for round in range(rounds):
        for client in sample_cohort(seed, round, clients, size):
            last[client] = round + 1
    return last


def mean_over(values, chosen):
    return sum(value for value, taken in zip(values, chosen, strict=True) if taken) / sum(chosen)


@pytest.mark.every(6)
@pytest.mark.parametrize(("clients", "size"), [(20, 8), (5, 2), (5, 5), (5, None), (1, 1), (7, 3)])
@pytest.mark.parametrize("rounds", [1, 2, 3, 8, 30])
def test_recent_and_stale_clients_are_those_of_a_plain_loop(clients, size, rounds):
    cohorts = [sample_cohort(3, round, clients, size) for round in range(rounds)]
    last = last_rounds(rounds, clients, size, seed=3)
    participation = Participation(last, rounds, size)
    turn = -(-clients // (size or clients))  # as many rounds as it takes to draw as many clients as there are
    lately = {client for cohort in cohorts[-turn:] for client in cohort}
    assert participation.recent == [client in lately for client in range(clients)]
    # A model is stale if none of the last rounds // 2 + 1 rounds trained it, or half of an odd number rounded up.
    half = math.floor(rounds / 2) + 1
    young = {client for cohort in cohorts[-half:] for client in cohort} if half <= rounds else set(range(clients))
    if rounds == 1:
        young = set(cohorts[0])
    assert participation.stale == [client for client in range(clients) if client not in young]


def test_the_warning_names_clients_their_rounds_and_the_remedy():
    participation = Participation([8, 2, 0, 4], 8, clients_per_round=2)
    text = participation.warning(["north", "south", "east", "west"])
    assert re.match(STALE, text)
    assert text.startswith("2 of 4 clients have not taken part for more than half of the 8 rounds")
    assert "(client south since round 2, east never)" in text
    assert text.endswith("train more rounds, or draw more clients per round with clients_per_round (now 2)")
    assert "client 1 since round 2, 2 never" in participation.warning()
    assert "south" not in participation.warning(["north", "south", "east", "west"], anonymous=True)
    assert Participation([8, 8, 8, 4], 8, clients_per_round=2).warning() is None  # half, and not more
    failed = Participation([8, 0], 8).warning()
    assert failed.endswith("so their training failed or their privacy budget is spent")


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ditto", "perada_no_kd", "fedavg", "fedavg_ft", "standalone"])
def test_the_last_rounds_are_those_of_the_cohorts_that_were_drawn(tiny, algorithm):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = fit(tiny, 5, algorithm=algorithm)
    last = last_rounds(5)
    assert run.metrics["clients"]["last_round"] == last
    assert run.metrics["test_images"] == [6] * 5
    recent = [one > 2 for one in last]  # 5 clients, 2 in a round: the last 3 rounds
    assert not all(recent)
    scores = run.metrics["clients"]["personal/local_test"]
    row = run.metrics["rounds"][-1]
    assert row["personal/local_test_recent"] == pytest.approx(mean_over(scores, recent))
    said = [str(one.message) for one in caught if re.match(STALE, str(one.message))]
    keeps = algorithm not in ("fedavg", "fedavg_ft")  # others predict with the newest global model, or one made of it
    stale = [client for client, one in enumerate(last) if 5 - one > 2.5]
    assert stale
    assert len(said) == keeps
    for client in stale if keeps else ():
        assert f"{client} since round {last[client]}" in said[0] or f"{client} never" in said[0]


@pytest.mark.slow
def test_the_score_of_recent_clients_is_that_of_each_round(tiny):
    run = fit(tiny, 5, seed=2)
    for number, row in enumerate(run.metrics["rounds"]):
        recent = [one > max(0, number + 1 - 3) for one in last_rounds(number + 1, seed=2)]
        scores = run.metrics["by_round"][number]["personal/local_test"]
        assert row["personal/local_test_recent"] == pytest.approx(mean_over(scores, recent), abs=1e-5)


@pytest.mark.slow
def test_where_all_take_part_all_are_recent(tiny):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        run = fit(tiny, 3, clients_per_round=None)
    assert run.metrics["clients"]["last_round"] == [3] * 5
    assert all(row["personal/local_test_recent"] == row["personal/local_test"] for row in run.metrics["rounds"])


@pytest.mark.slow
def test_a_client_that_never_took_part_is_not_recent(tiny):
    seed = next(seed for seed in range(50) if last_rounds(2, seed=seed).count(0) == 2)
    with pytest.warns(UserWarning, match="not taken part"):
        run = fit(tiny, 2, seed=seed)
    last = run.metrics["clients"]["last_round"]
    assert last == last_rounds(2, seed=seed) and last.count(0) == 2
    scores = run.metrics["clients"]["personal/local_test"]
    assert run.metrics["rounds"][-1]["personal/local_test_recent"] == pytest.approx(
        mean_over(scores, [one > 0 for one in last])
    )
    untrained = fit(tiny, 0, seed=seed)
    assert "last_round" not in untrained.metrics["clients"]


@pytest.mark.slow
def test_a_resumed_run_knows_who_took_part_before(tiny, tmp_path):
    options = {"logger": True, "enable_checkpointing": None, "default_root_dir": str(tmp_path)}
    fit(tiny, 2, **options)
    resumed = fit(tiny, 3, ckpt_path="last", **options)
    assert resumed.metrics["clients"]["last_round"] == last_rounds(3)
    at_once = fit(tiny, 3)
    assert [row["personal/local_test_recent"] for row in resumed.metrics["rounds"]] == [
        row["personal/local_test_recent"] for row in at_once.metrics["rounds"]
    ]
    loaded = perada.Run.load(tmp_path / "lightning_logs" / "version_1", backbone=tiny.net())
    assert loaded.metrics["clients"]["last_round"] == last_rounds(3)


@pytest.mark.slow
def test_clients_keep_their_last_rounds_where_a_run_resumes_with_more(tiny, tmp_path):
    options = {"logger": True, "enable_checkpointing": None, "default_root_dir": str(tmp_path), "clients_per_round": 1}
    first = fit(tiny, 2, data=named_clients(tiny, list("bdf")), **options)
    more = named_clients(tiny, list("abcdf"))
    resumed = fit(tiny, 2, data=more, ckpt_path="last", resume_allow=["clients"], **options)
    former = dict(zip("bdf", first.metrics["clients"]["last_round"], strict=True))
    assert sorted(former.values()) == sorted(last_rounds(2, clients=3, size=1))
    assert resumed.metrics["clients"]["last_round"] == [former.get(name, 0) for name in "abcdf"]


@pytest.mark.filterwarnings("ignore:round 3:UserWarning", "ignore:round 4:UserWarning")
def test_a_client_that_failed_keeps_its_model_and_its_last_round(tiny):
    data = federation(tiny, RuntimeError("gone"))
    run = fit(tiny, 4, data=data, clients_per_round=None, callbacks=[Later(data.train[1], 2)])
    assert run.metrics["clients"]["last_round"] == [4, 2, 4]
    scores = run.metrics["clients"]["personal/local_test"]
    assert run.metrics["rounds"][-1]["personal/local_test_recent"] == pytest.approx((scores[0] + scores[2]) / 2)


@pytest.mark.every(2)
@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.filterwarnings("ignore:privacy. delta")
def test_a_private_run_says_nothing_that_depends_on_who_failed(tiny, tmp_path, section):
    """Whoever was drawn counts; no name is in the warning; nothing of it is in what is published."""
    runs = []
    for spoilt in (False, True):
        data = federation(tiny, None, bad=None)
        if spoilt:
            data.train[1].bad = 2
            data.train[1].after = 9
            data.train[1].what = lambda x, y: (torch.full_like(x, 3e38), y)
        options = {"data": data, "clients_per_round": 1, "callbacks": [Later(data.train[1], 0)]}
        level = {section: SECTIONS[section] | {"max_norm": 1e-3}}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            runs.append(fit(tiny, 3, **options, **level))
        said = [str(one.message) for one in caught if re.match(STALE, str(one.message))]
        stale = [one for one in last_rounds(3, clients=3, size=1) if 3 - one > 1.5]
        assert len(said) == bool(stale)
        assert all("(client" not in text and f"{len(stale)} of 3" in text for text in said)
    last = last_rounds(3, clients=3, size=1)
    assert runs[0].metrics["clients"]["last_round"] == runs[1].metrics["clients"]["last_round"] == last
    runs[0].save(tmp_path / "saved")
    content = (tmp_path / "saved" / "run.json").read_text()
    assert not any(word in content for word in ("last_round", "_recent", "test_images"))


@pytest.mark.slow
def test_a_client_that_was_forgotten_or_joined_has_no_last_round(tiny, tmp_path):
    run = fit(tiny, 3)
    run.save(tmp_path / "saved")
    forget(tmp_path / "saved", 2)
    content = json.loads((tmp_path / "saved" / "run.json").read_text())["metrics"]
    last = last_rounds(3)
    assert content["clients"]["last_round"] == [*last[:2], None, *last[3:]]
    assert content["test_images"] == [6, 6, 0, 6, 6]
    alone = fit(tiny, 1, data=tiny.data(sizes=(9,), public=False), clients_per_round=None)
    how = {"name": "new", "images": 9, "algorithm": "Ditto", "rounds": 1, "steps": 1, "before": 0.5, "after": 0.5}
    joined = run.with_client(alone, how).metrics
    assert joined["clients"]["last_round"][:5] == last and math.isnan(joined["clients"]["last_round"][5])
    assert joined["test_images"] == [6] * 6


def test_the_table_of_clients_shows_last_rounds_and_what_the_mean_hides(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = [
        "--model.backbone=test_resnet", "--model.pretrained=false", "--model.adapter=head", "--data.image_size=32",
        "--data.dataset=Digits", "--data.partition=Dirichlet", "--data.partition.num_clients=5",
        "--data.partition.alpha=0.1", "--data.train_limit=300", "--data.batch_size=8", "--training.local_steps=1",
        "--federated.algorithm=Ditto", "--federated.clients_per_round=1", "--trainer.max_epochs=2",
        "--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu",
    ]  # fmt: skip
    main(["fit", *options])
    output = capsys.readouterr().out
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in output.splitlines() if line.startswith("|")]
    place = table[0].index("last round")
    last = last_rounds(2, size=1)
    assert [row[place] for row in table[2:7]] == [str(one) if one else "never" for one in last]
    assert table[7][place] == ""
    metrics = json.loads((tmp_path / "lightning_logs" / "version_0" / "run.json").read_text())["metrics"]
    scores = metrics["clients"]["personal/local_test"]
    sizes = metrics["test_images"]
    assert max(sizes) > 10 * min(size for size in sizes if size)
    known = [client for client in range(5) if sizes[client]]
    weighted = np.average([scores[c] for c in known], weights=[sizes[c] for c in known])
    assert f"Weighted by these numbers, the mean of own images is {100 * weighted:.2f}." in output
    recent = [scores[c] for c in known if last[c]]
    assert f"that took part in the last 2 rounds: {100 * sum(recent) / len(recent):.2f}." in output
