# SPDX-License-Identifier: Apache-2.0
"""The page of a search, ``choice.md``: the advice, the verdict with its figures, and everything that was tried."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from perada.core.checks import check_installed
from perada.core.text import printable_lines
from perada.results.report import table, unit_of
from perada.studies.choose.budget import format_duration
from perada.studies.choose.candidates import METHODS, predicting_models
from perada.studies.choose.search import Search
from perada.studies.choose.summary import ALONE, advice, email, goal_text, list_lines, row_of
from perada.studies.choose.trials import HeldOutScores, best_of, lead, read_scores
from perada.studies.compare.comparison import EVERYONE, OWN, Comparison, NotComparableError
from perada.studies.compare.figures import CLIENTS, HOME_AND_ABROAD, draw_clients, draw_home_and_abroad, save_figure
from perada.studies.compare.grid import Point
from perada.studies.compare.results import Record
from perada.studies.compare.verdict import verdict

PAGE = "choice.md"
FEW_TEST_IMAGES = 100


@dataclass(frozen=True)
class ImageCounts:
    """Numbers of images of all clients together."""

    num_clients: int
    train: int
    held_out: int
    test: int


def compared(records: Sequence[Record]) -> Comparison | None:
    """Return the comparison of the runs of the last rung; None if they cannot be compared."""
    try:
        return Comparison(records)
    except NotComparableError:
        return None


def find_second(search: Search, chosen: HeldOutScores) -> HeldOutScores | None:
    """Return the best held-out scores of another method; None if there is none."""
    method = chosen.candidate.method
    return best_of([scores for scores in search.best_of_method.values() if scores.candidate.method != method])


def write_search_page(folder: Path, search: Search, image_counts: ImageCounts, interrupted: bool) -> str:
    """Write the page and its figures.

    Args:
        folder: Folder of the search.
        search: The search, which has chosen a setting.
        image_counts: Numbers of images.
        interrupted: Whether the search was ended before it was done.

    Returns:
        What the terminal shows: the advice and the verdict.
    """
    chosen = search.chosen
    assert chosen is not None
    records = search.results.records
    metric = str(records[0].get("metric", ""))
    comparison = compared(records)
    second = find_second(search, chosen)
    goal = search.options.goal
    parts = ["# Which method suits these images", *_warn_of_few_rounds(search)]
    parts += advice(comparison, chosen, second, goal=goal, metric=metric)
    if interrupted:
        parts.append("**The search was interrupted.** The same command goes on.")
    shown = list(parts[1:])
    judgement = verdict(records)
    if judgement:
        parts += ["## Verdict on the test images", judgement]
        shown.append(judgement)
    parts += _draw_figures(folder, comparison, chosen, second)
    parts += ["## To paste into an e-mail", _format_email(search, image_counts, comparison, metric)]
    parts += ["## What the methods do", _describe_methods(search)]
    parts += ["## What was tried", *_describe_trials(search, chosen)]
    parts += ["## How it was done", _describe_procedure(search, image_counts)]
    parts += ["## Files", _describe_files()]
    text = printable_lines("\n\n".join(parts))
    (folder / PAGE).write_text(f"{text}\n", encoding="utf-8")
    return printable_lines("\n\n".join(shown))


def _warn_of_few_rounds(search: Search) -> list[str]:
    """Return a paragraph that stands before the advice if the budget was too small for the recipe's rounds."""
    assert search.plan is not None
    rounds = search.plan.rounds
    recipe_rounds = search.largest_plan.rounds
    if rounds == recipe_rounds:
        return []
    return [
        f"**The budget allowed only {rounds} of the recipe's {recipe_rounds} rounds.** After all rounds another method "
        "may be better, and scores that are hardly better than guessing tell nothing. Allow more time, or choose "
        "smaller images (`--data.image_size`), a smaller network (`--model.backbone`), or an adapter in fewer layers "
        "(`--model.adapter`)."
    ]


def _draw_figures(
    folder: Path, comparison: Comparison | None, chosen: HeldOutScores, second: HeldOutScores | None
) -> list[str]:
    """Draw the figures that the comparison has the scores for, and return what the page shows."""
    for name in (HOME_AND_ABROAD, CLIENTS):
        # An earlier command may have written it.
        (folder / name).unlink(missing_ok=True)
    if comparison is None:
        return []
    try:
        check_installed("figures", "studies", "matplotlib")
    except ModuleNotFoundError:
        return ["Figures need `pip install 'perada[studies]'`; the same command then adds them."]
    row = row_of(comparison, chosen.candidate.method, chosen.way)
    parts = []
    if row is not None and {OWN, EVERYONE} <= set(comparison.criteria):
        save_figure(draw_home_and_abroad(comparison, row.name), folder / HOME_AND_ABROAD)
        parts.append(f"![Scores on own images and on all clients' images]({HOME_AND_ABROAD})")
    alone = row_of(comparison, ALONE, "personal")
    together = row
    if row is alone and second is not None:
        together = row_of(comparison, second.candidate.method, second.way)
    if together is not None and alone is not None and alone is not together and OWN in comparison.criteria:
        save_figure(draw_clients(comparison, alone.name, together.name), folder / CLIENTS)
        parts.append(f"![Own images of each client, trained alone and together]({CLIENTS})")
    return parts


def _format_email(search: Search, image_counts: ImageCounts, comparison: Comparison | None, metric: str) -> str:
    """Return the paragraph for an e-mail as a quotation."""
    chosen = search.chosen
    assert chosen is not None and search.plan is not None
    text = email(
        comparison,
        chosen,
        find_second(search, chosen),
        metric=metric,
        num_clients=image_counts.num_clients,
        num_train=image_counts.train,
        num_test=image_counts.test,
        rounds=search.plan.rounds,
    )
    return f"> {text}"


def _describe_methods(search: Search) -> str:
    """Return the list of the methods of the tables in words."""
    lines = [f"`{method}`: {METHODS[method].sentence}" for method in search.largest_plan.methods]
    lines.append(
        "*both models*: images that look like a client's own are judged by its own model, others with the help of the "
        "shared one (docs/prediction.md)."
    )
    return list_lines(lines)


def _describe_trials(search: Search, chosen: HeldOutScores) -> list[str]:
    """Return the choice on held-out images, the table of all settings, and what failed."""
    best = sorted(search.best_of_method.values(), key=lambda scores: -scores.merit)
    unit = unit_of(search.results.records[0])
    rows = []
    for scores in best:
        behind = "chosen"
        if scores is not chosen:
            difference = lead(chosen, scores)
            # Subtracting from 0 keeps a zero from becoming −0.
            behind = f"{unit.number(0.0 - difference.mean)} ± {unit.number(difference.standard_error)}"
        rows.append(
            [
                scores.candidate.method,
                predicting_models(scores.candidate.method, scores.way),
                str(scores.candidate.number),
                unit.number(scores.mean),
                behind,
                "yes" if scores.candidate in search.finalists else "no",
            ]
        )
    header = ["method", "predicts with", "setting", "held-out score", "behind the choice", "in the last rung"]
    parts = [
        f"The best setting of each method after {chosen.rounds} rounds, by {goal_text(search.options.goal)}, on images "
        "that the clients held out of training. ± is the standard error of the difference, paired by client and draw.",
        table(header, rows, left_columns=2),
        "Every setting, and the rounds after which it was dropped:",
        _list_settings(search),
    ]
    failures = [f"{method}: not tried, since {reason}" for method, reason in search.failed_methods.items()]
    for record in search.results.records:
        if "failed" in record and record["label"] not in search.failed_methods:
            setting = record["varied"].get("setting")
            what = f"seed {record['seed']}" if setting is None else f"setting {setting}"
            failures.append(f"{record['label']}, {what}: {record['failed']}")
    failures += search.notes
    if failures:
        parts += ["Left out or failed:", list_lines(failures)]
    return parts


def _list_settings(search: Search) -> str:
    """Return a table of all settings that were scored, with their last held-out scores."""
    last_records: dict[tuple[str, int], list[Record]] = {}
    for record in search.trial_records:
        key = (record["label"], int(record["varied"]["setting"]))
        former = last_records.get(key, [])
        former_rounds = int(former[0]["varied"]["rounds"]) if former else 0
        rounds = int(record["varied"]["rounds"])
        if rounds > former_rounds:
            last_records[key] = [record]
        elif rounds == former_rounds:
            former.append(record)
    rows = []
    for (method, number), records in sorted(last_records.items()):
        candidate = search.methods[method].candidates[number]
        rounds_text = records[0]["varied"]["rounds"]
        rows.append([method, str(number), *_setting_cells(candidate.point), rounds_text, _score_cell(search, records)])
    header = ["method", "setting", "adapter", "rates", "λ", "rounds", "held-out score"]
    return table(header, rows, left_columns=1)


def _setting_cells(point: Point) -> list[str]:
    """Return the adapter, the rates and λ of a setting for a table."""
    if not point:
        return ["the recipe's", "the recipe's", ""]
    adapter = point.get("model.adapter", "the recipe's")
    blocks = point.get("model.adapter_options", "null").removeprefix('{"last_blocks": ').removesuffix("}")
    if blocks != "null":
        adapter += f", last {blocks} blocks" if blocks != "1" else ", last block"
    rates = "the recipe's"
    if "training.lr_local" in point:
        rates = f"{point['training.lr_local']}, {point['training.lr_personal']}"
    return [adapter, rates, point.get("federated.algorithm.prox_strength", "")]


def _score_cell(search: Search, records: Sequence[Record]) -> str:
    """Return the mean held-out score of a setting by its best way to predict, or that it failed."""
    record = records[0]
    candidate = search.methods[record["label"]].candidates[int(record["varied"]["setting"])]
    scores = best_of(read_scores(candidate, int(record["varied"]["rounds"]), records, search.options.goal))
    if scores is None:
        return "failed" if any("failed" in record for record in records) else "diverged"
    return unit_of(record).number(scores.mean)


def _describe_procedure(search: Search, image_counts: ImageCounts) -> str:
    """Return the procedure with its limits."""
    plan = search.plan
    lines = [
        f"{image_counts.num_clients} clients with {image_counts.train} training images and {image_counts.test} test "
        "images.",
    ]
    if plan is not None:
        lines.append(f"Plan: {plan.describe()}.")
    lines += [
        f"Settings were chosen on images that clients held out, {image_counts.held_out} in a draw. Trials read no test "
        "image; the last rung is scored on these.",
        f"Time: {format_duration(search.elapsed)} of {format_duration(search.options.budget)}.",
        "All methods have as many settings and as many rounds.",
    ]
    if image_counts.test < FEW_TEST_IMAGES:
        lines.append(
            f"With {image_counts.test} test images, only large differences can be told from chance: the standard error "
            "of a share of 80 % is about "
            f"{40 / max(1, image_counts.test) ** 0.5:.0f} percentage points."
        )
    return list_lines(lines)


def _describe_files() -> str:
    return list_lines(
        [
            "`best.yaml`: the recipe, for `perada fit --config`",
            "`recipes`: a recipe for each method of the last rung",
            "`results.json`: all runs, for `perada report` and `perada.Comparison.from_file`",
        ]
    )
