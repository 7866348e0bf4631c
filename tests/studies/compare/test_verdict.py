# SPDX-License-Identifier: Apache-2.0
"""The advice below a comparison: which row to take, and what chance may explain."""

import json

import numpy as np
import pytest
import yaml

from perada.cli import main
from perada.studies.compare.comparison import Comparison, NotComparableError
from perada.studies.compare.results import Results
from perada.studies.compare.verdict import verdict
from tests import recipes
from tests.rejections import rejects

NAMES = ["north", "south", "east", "west", "centre", "coast"]


def records_of(label, personal, everyone=None, *, both=None, megabytes=0.1, names=NAMES, seeds=(0, 1, 2), **fields):
    """Records of a row: ``own`` and ``everyone`` are scores (S, M) with each seed."""
    records = []
    for place, seed in enumerate(seeds):
        clients = {"personal/local_test": list(personal[place])}
        if everyone is not None:
            clients["personal/global_test"] = list(everyone[place])
        if both is not None:
            clients["both/local_test"] = list(both[place])
            if everyone is not None:
                clients["both/global_test"] = list(everyone[place])
        record = {
            "stage": "run",
            "label": label,
            "seed": seed,
            "args": [label, str(seed)],
            "variant": [],
            "point": {},
            "chosen_by": ["personal/local_test", "personal/global_test"],
            "clients": clients,
            "client_test_images": [20] * len(personal[place]),
            "client_names": list(names),
            "metric": "accuracy",
            "mb_sent": megabytes,
        }
        records.append(record | fields)
    return records


def scores(mean, noise=0.002, num_seeds=3, num_clients=6, seed=0):
    random = np.random.default_rng([seed, int(1000 * mean)])
    return mean + noise * random.normal(size=(num_seeds, num_clients))


def advice(text):
    """The sentences by their criterion."""
    lines = [line.removeprefix("- ") for line in text.splitlines() if line.startswith("- ")]
    return dict(line.split(": ", 1) for line in lines if ": " in line)


def test_the_best_row_is_named_for_each_purpose():
    alone = records_of("standalone", scores(0.9), scores(0.3), megabytes=0)
    average = records_of("fedavg", scores(0.7), scores(0.7))
    text = verdict([*alone, *average])
    sentences = advice(text)
    assert sentences["Own images"].startswith("standalone (90.")
    assert sentences["Own images"].endswith("It is better than all others.")
    assert sentences["All clients' images"].startswith("fedavg (")
    assert sentences["Mean of the two"].startswith("fedavg (")
    assert text.startswith("Which row to take, judged on 6 clients with 3 seeds:")


def test_rows_that_chance_may_explain_are_level_and_the_cheapest_is_named():
    first = records_of("ditto", scores(0.900, noise=0.03), megabytes=0.12)
    second = records_of("standalone", scores(0.899, noise=0.03, seed=2), megabytes=0)
    third = records_of("fedavg", scores(0.3))
    text = verdict([*first, *second, *third])
    sentence = advice(text)["Own images"]
    best, other = ("ditto", "standalone") if sentence.startswith("ditto") else ("standalone", "ditto")
    assert f"Chance may explain its lead over {other}." in sentence
    assert "fedavg" not in sentence
    assert ("Of these, standalone sends least (nothing)." in sentence) == (best == "ditto")
    table = [line for line in text.splitlines() if line.startswith("| ")]
    marked = {line.split("|")[1].strip(): "≈" in line for line in table}
    assert (marked[other], marked["fedavg"]) == (True, False)


def test_one_seed_does_not_tell_which_method_is_better():
    first = records_of("a", scores(0.9, num_seeds=1), seeds=[0])
    second = records_of("b", scores(0.5, num_seeds=1), seeds=[0])
    text = verdict([*first, *second])
    assert advice(text)["Own images"].endswith("ahead of all others in this run.")
    assert "better" not in text
    assert "--seeds 0 1 2" in text


def test_each_way_to_predict_is_a_row():
    personal_scores = scores(0.8)
    records = records_of("perada", personal_scores, scores(0.5), both=scores(0.9))
    comparison = Comparison(records)
    assert [row.name for row in comparison.rows] == ["perada, personal model", "perada, both models"]
    assert comparison.best("own").name == "perada, both models"
    assert comparison.rows[0].mean("own") == pytest.approx(personal_scores.mean())


def test_who_gains_and_who_loses_is_named():
    alone = records_of("standalone", np.full((3, 6), 0.8), np.full((3, 6), 0.2), megabytes=0)
    personal_scores = np.array([[0.9, 0.7, 0.8, 0.85, 0.81, 0.82]] * 3)
    text = verdict([*alone, *records_of("perada", personal_scores, np.full((3, 6), 0.6))])
    assert (
        "With perada instead of standalone, own images gain at 4 (north +10.0, west +5.0, coast +2.0, ...) and lose at "
        "1 (south −10.0), of 6 clients."
    ) in text


def test_differences_are_paired_and_have_the_sign_of_the_reference():
    base = scores(0.5, noise=0.2)
    comparison = Comparison([*records_of("a", base + 0.01), *records_of("b", base)])
    (entry,) = comparison.differences("own", reference="b")
    assert (entry.first, entry.second) == ("b", "a")
    assert entry.mean == pytest.approx(-0.01)
    assert entry.is_significant  # the same at each client, although clients differ by 20 points
    with rejects("reference", "c"):
        comparison.differences("own", reference="c")
    with rejects("criterion", "global"):
        comparison.differences("global")


def test_p_values_are_corrected_for_all_columns():
    first = scores(0.52, noise=0.05)
    second = scores(0.5, noise=0.05)
    (alone,) = Comparison([*records_of("a", first), *records_of("b", second)]).differences("own")
    assert alone.adjusted_p_value == alone.p_value
    # The same scores in three columns: three equal p-values, each times three.
    three = Comparison([*records_of("a", first, first), *records_of("b", second, second)])
    for criterion in ("own", "all", "mean"):
        (entry,) = three.differences(criterion)
        assert entry.p_value == pytest.approx(alone.p_value)
        assert entry.adjusted_p_value == pytest.approx(min(1, 3 * alone.p_value))


def test_clients_without_a_score_are_left_out_of_all_rows():
    first = scores(0.9)
    second = scores(0.5)
    records = [*records_of("a", first), *records_of("b", second)]
    records[1]["clients"]["personal/local_test"][2] = None
    (entry,) = Comparison(records).differences("own")
    complete = [0, 1, 3, 4, 5]
    assert entry.mean == pytest.approx((first[:, complete] - second[:, complete]).mean())
    assert entry.of_clients == pytest.approx(
        [*(first - second).mean(0)[:2], np.nan, *(first - second).mean(0)[3:]], nan_ok=True
    )
    for record in records:
        record["mb_sent"] = 0.0 if record["label"] == "b" else 0.1
    assert "own images gain at 5 (" in verdict(records)


@pytest.mark.parametrize("fields", [{"failed_outputs": "client 2 has none"}, {"diverged": True}])
def test_a_row_of_which_a_model_has_no_score_is_left_out(fields):
    """On the clients that are left it would be the best."""
    records = [*records_of("a", scores(0.7)), *records_of("b", scores(0.5)), *records_of("broken", scores(0.9))]
    records[-1]["clients"]["personal/local_test"][2] = None
    records[-1] |= fields
    comparison = Comparison(records)
    assert [row.name for row in comparison.rows] == ["a", "b"]
    assert comparison.best("own").mean("own") == pytest.approx(scores(0.7).mean())
    assert "Left out, since a run diverged or a model has no score: broken." in verdict(records)


def test_rows_that_are_equal_have_no_sign():
    text = verdict([*records_of("a", scores(0.7)), *records_of("b", scores(0.7) - 1e-13)])
    assert "≈ 0 [0, 0]" in text
    assert "−0" not in text


def test_no_client_with_a_score_is_no_comparison():
    records = [*records_of("a", scores(0.9)), *records_of("b", scores(0.5))]
    for record in records:
        record["clients"]["personal/local_test"] = [None] * 6
    assert "No advice" in verdict(records)


def test_errors_are_better_if_they_are_lower():
    chosen_by = ["-personal/local_test"]
    fields = {"has_classes": False, "metric": "mae", "chosen_by": chosen_by}
    low = records_of("low", scores(2.0), **fields)
    high = records_of("high", scores(5.0), **fields)
    text = verdict([*low, *high])
    assert advice(text)["Own images"].startswith("low (2")
    assert "Lower scores are better" in text
    assert "−3 [" in text


def test_rows_with_other_test_images_are_not_compared():
    first = records_of("a", scores(0.9))
    second = records_of("b", scores(0.5), client_test_images=[21] * 6)
    text = verdict([*first, *second])
    assert text == "No advice on which row to take: a and b have different test images with seed 0."


def test_seeds_that_a_row_lacks_are_left_out():
    first = scores(0.9)
    second = scores(0.5)
    records = [*records_of("a", first), *records_of("b", second)[1:]]
    comparison = Comparison(records)
    assert comparison.seeds == [1, 2]
    (entry,) = comparison.differences("own")
    assert entry.mean == pytest.approx((first[1:] - second[1:]).mean())


def test_there_is_no_advice_on_one_row():
    assert verdict(records_of("a", scores(0.9))) == ""
    assert verdict([]) == ""
    with pytest.raises(NotComparableError, match="one row"):
        Comparison(records_of("a", scores(0.9)))


def test_names_of_clients_cannot_control_the_terminal():
    names = ["a\x1b[2J", *NAMES[1:]]
    alone = records_of("standalone", np.full((3, 6), 0.8), megabytes=0, names=names)
    records = records_of("perada", np.full((3, 6), 0.9), names=names)
    assert "\x1b" not in verdict([*alone, *records])


SCANNERS = {
    "dataset": {"class_path": "Scanners", "init_args": {"dataset": "Digits", "kinds": ["plain", "negative"]}},
    "partition": {"class_path": "ByDomain", "init_args": {"column": "scanner"}},
}


def test_a_comparison_ends_with_advice_and_its_file_has_the_clients(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipes.recipe(data=SCANNERS)))
    words = ["compare", "tiny.yaml", "--algorithms", "standalone", "fedavg", "--output", "r.json"]
    main(words)
    text = capsys.readouterr().out
    assert "Which row to take, judged on 2 clients with one seed" in text
    records = [record for record in json.loads((tmp_path / "r.json").read_text()) if record["stage"] == "run"]
    for record in records:
        own = record["clients"]["personal/local_test"]
        assert np.mean(own) == pytest.approx(record["personal/local_test"])
        assert len(record["client_test_images"]) == len(own)
    comparison = Comparison.from_file(tmp_path / "r.json")
    assert comparison.client_names == ["negative", "plain"]
    means = {record["label"]: record["personal/local_test"] for record in records}
    (entry,) = comparison.differences("own", reference="fedavg")
    assert entry.mean == pytest.approx(means["fedavg"] - means["standalone"])
    with pytest.raises(FileNotFoundError, match=r"nowhere\.json"):
        Comparison.from_file("nowhere.json")

    # The same command without names takes them out of the results that it already has.
    main([*words, "--anonymous"])
    assert "negative" not in capsys.readouterr().out
    assert "negative" not in [
        name for record in Results(tmp_path / "r.json").records for name in record.get("client_names") or []
    ]
    assert Comparison.from_file(tmp_path / "r.json").client_names == ["client 0", "client 1"]
