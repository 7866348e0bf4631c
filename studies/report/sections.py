# SPDX-License-Identifier: Apache-2.0
"""The sections of one run's page: an introduction, figures, and the tables behind them."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from perada.results.report import (
    ENTROPY,
    LAST_ROUND,
    PRIVACY,
    SCORE_GROUPS,
    SCORES,
    TYPICAL_SHARES,
    ScoreUnit,
    epsilon_text,
    round_text,
    shift_names,
    title,
)
from perada.studies.report import (
    class_figures,
    example_figures,
    figures,
    foreign_images,
    mask_figures,
    number_figures,
)
from perada.studies.report.baselines import predicted_scores, predicts_with_both
from perada.studies.report.contrasts import ALONE
from perada.studies.report.facts import (
    accuracies,
    confusion_tables,
    count_images,
    expected_calibration_error,
    megabytes_sent,
    model_of_confusion,
    model_title,
    most_frequent_mistakes,
    right_counts,
)
from perada.studies.report.figures import GLOBAL_SCORE, OWN_SCORE
from perada.studies.report.plotting import RenderedFigure
from perada.studies.report.records import PAGE_SHARES, Counts, RunRecord

Cell = str | int | float
MAX_ROWS = 200
"""Largest number of rows of a table in the page; the table's file has all rows."""
MAX_MISTAKES = 2
"""Largest number of equally frequent mistakes that a cell names."""
MAX_SETTING_DEPTH = 5
"""Largest depth of settings in settings that have rows of their own, so that a broken file cannot exhaust the stack."""
SPREAD = "± "
"""Beginning of the header of a column with the standard deviations of the column before it."""
BEFORE = "before: "
"""Beginning of the header of a column with scores before training."""


@dataclass
class Table:
    """A table of the page, and its CSV file.

    Attributes:
        name: Name of the file, without an extension.
        caption: Caption in the page.
        column_names: Names of the columns.
        rows: Texts, integers, and scores, which the page shows in ``unit``. The page shows a column whose name
            begins with :data:`SPREAD` in the cells of the column before it.
        plain: Columns whose numbers are not scores.
        shares: Columns of shares of images, which are in % whatever the unit of scores.
        metric_axis: Whether the columns, or the first cells of the rows, are metrics. The file has their names, the
            page their titles.
        unit: How the page shows scores.
        opened: Whether the table is unfolded at first.
    """

    name: str
    caption: str
    column_names: list[str]
    rows: list[list[Cell]]
    plain: Sequence[str] = ()
    shares: Sequence[str] = ()
    metric_axis: Literal["", "columns", "rows"] = ""
    unit: ScoreUnit = PAGE_SHARES
    opened: bool = False

    @property
    def visible_columns(self) -> list[int]:
        """The columns that the page has."""
        return [column for column, name in enumerate(self.column_names) if not name.startswith(SPREAD)]

    def title_of(self, column: int) -> str:
        """Return the title of a column in the page."""
        name = self.column_names[column]
        if self.metric_axis != "columns":
            return name
        if name.startswith(BEFORE):
            return BEFORE + title(name.removeprefix(BEFORE))
        return title(name)

    def tooltip_of(self, column: int) -> str:
        """Return the name of a column in the file where the page has another; otherwise an empty text."""
        name = self.column_names[column]
        return "" if self.title_of(column) == name else name

    def row_tooltip_of(self, row: Sequence[Cell]) -> str:
        """Return the name of a row in the file where the page has another; otherwise an empty text."""
        name = row[0]
        if self.metric_axis != "rows" or not isinstance(name, str) or title(name) == name:
            return ""
        return name

    def is_text(self, column: int) -> bool:
        """Return whether a column holds texts."""
        if column == 0:
            return True
        return bool(self.rows) and isinstance(self.rows[0][column], str)

    def text_of(self, row: Sequence[Cell], column: int) -> str:
        """Return the text of a cell in the page, with the standard deviation if there is one."""
        metric = str(row[0]) if self.metric_axis == "rows" else self.column_names[column]
        is_share = metric in self.shares or metric.startswith(TYPICAL_SHARES)
        unit = PAGE_SHARES if is_share else self.unit
        text = self._format_cell(column, row[column], unit)
        next_column = column + 1
        if next_column == len(row) or not self.column_names[next_column].startswith(SPREAD):
            return text
        spread = row[next_column]
        if isinstance(spread, float) and math.isnan(spread):
            return text
        return f"{text} ± {self._format_cell(column, spread, unit)}"

    def _format_cell(self, column: int, cell: Cell, unit: ScoreUnit) -> str:
        if isinstance(cell, str):
            is_metric = self.metric_axis == "rows" and column == 0
            return title(cell) if is_metric else cell
        name = self.column_names[column]
        if name == LAST_ROUND:
            return round_text(cell)
        if isinstance(cell, int):
            return f"{cell:,}"
        if math.isnan(cell):
            return "–"
        if name not in self.plain:
            return unit.number(cell)
        if "ε" in name:
            return epsilon_text(cell)
        is_large_integer = cell >= 1000 and cell == int(cell)
        return f"{cell:,.0f}" if is_large_integer else f"{cell:.4g}"


@dataclass
class Section:
    """A part of the page under a heading.

    Attributes:
        key: Its id in the page.
        title: Its heading.
        intro: A paragraph before the figures.
        figures: Its figures.
        tables: Its tables.
        text: Preformatted text after the tables.
        opened: Whether the tables are unfolded at first.
        technical: Whether the section is folded, for readers who know the method.
    """

    key: str
    title: str
    intro: str
    figures: list[RenderedFigure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    text: str = ""
    opened: bool = False
    technical: bool = False


_NOT_COVERED = (
    "This page itself is not covered: its scores and numbers of images follow exactly from the clients' images. Share "
    "it only with those who may know them."
)
_LEFT_OUT = (
    "Scores, losses and diagnostics are left out, since they follow from the clients' images and no ledger counts "
    "them; --scores=true shows them. Numbers of images are taken as known."
)


def sections(record: RunRecord, prefix: str = "") -> list[Section]:
    """Return the sections that a run has data for.

    Args:
        record: The run.
        prefix: Beginning of the names of the sections' files.
    """
    all_sections = [
        _report_clients(record, prefix),
        _report_pictures(record, prefix),
        _report_confusion(record, prefix),
        _report_numbers(record, prefix),
        _report_masks(record, prefix),
        _report_foreign_images(record, prefix),
        _report_shifts(record, prefix),
        _report_partition(record, prefix),
        _report_privacy(record, prefix),
        _report_rounds(record, prefix),
        _report_calibration(record, prefix),
        _report_communication(record, prefix),
        _report_settings(record, prefix),
    ]
    for section in all_sections:
        for table in section.tables:
            table.unit = record.unit
    return [section for section in all_sections if section.figures or section.tables or section.text]


def _draw_figures(record: RunRecord, prefix: str, functions: Sequence[figures.DrawFigure]) -> list[RenderedFigure]:
    """Return the figures that a run has data for; each is named after its function."""
    rendered = []
    for function in functions:
        figure = function(record, f"{prefix}{function.__name__}")
        if figure is not None:
            rendered.append(figure)
    return rendered


def _tables_with_rows(*tables: Table) -> list[Table]:
    return [table for table in tables if table.rows]


def _report_rounds(record: RunRecord, prefix: str) -> Section:
    scores = [name for name in SCORES if name in record.metric_names]
    others = [name for name in record.metric_names if name not in (*scores, "round", "step")]
    names = [*scores, *others]
    rows: list[list[Cell]] = []
    for metrics in record.rounds:
        rows.append([int(metrics["round"]) + 1, *(metrics.get(name, math.nan) for name in names)])
    table = Table(
        name=f"{prefix}rounds",
        caption="Measurements of each round",
        column_names=["round", *names],
        rows=rows,
        plain=[name for name in names if not _is_score(name)],
        metric_axis="columns",
    )
    scores_title = record.unit.label("Scores")
    curves = _draw_figures(record, prefix, [figures.curves])
    losses = _draw_figures(record, prefix, [figures.losses])
    sentences = []
    if curves:
        sentences.append(
            f"{scores_title} after each round; round 0 is before training. The band leaves out the tenth of the "
            "clients with the lowest scores and the tenth with the highest."
        )
    if losses:
        sentences.append("A loss is what training reduces; it has no unit.")
    return Section(
        key="rounds",
        title="Rounds",
        intro=" ".join(sentences),
        figures=[*curves, *losses],
        tables=_tables_with_rows(table),
        technical=True,
    )


def _is_score(name: str) -> bool:
    """Return whether a metric is a share, which is shown in %; the entropy of the modes is in nats."""
    return name.startswith((*SCORE_GROUPS, TYPICAL_SHARES)) and name != ENTROPY


def _report_clients(record: RunRecord, prefix: str) -> Section:
    measurements: dict[str, Sequence[float]] = {}
    if OWN_SCORE in record.initial:
        measurements[f"{BEFORE}{OWN_SCORE}"] = record.initial[OWN_SCORE]
    measurements |= record.scores_of_clients
    if record.global_local:
        measurements["global/local_test"] = record.global_local
    scores = predicted_scores(record).own
    contrast = None if record.baselines is None else record.baselines.contrast_with(ALONE)
    summary = _summary_of_clients(record, prefix)

    header = ["client"]
    if record.train_sizes:
        header.append("training images")
    header += measurements
    rows: list[list[Cell]] = []
    for client in _clients_by_score(len(record.client_names), scores):
        row: list[Cell] = [record.client_names[client]]
        if record.train_sizes:
            row.append(record.train_sizes[client])
        row += [values[client] for values in measurements.values()]
        rows.append(row)
    tables = _tables_with_rows(summary)
    if measurements:
        table = Table(
            name=f"{prefix}clients",
            caption="All measurements of each client, sorted by its score",
            column_names=header,
            rows=rows,
            plain=[name for name in measurements if name.startswith(PRIVACY) or name == LAST_ROUND],
            metric_axis="columns",
        )
        tables.append(table)
    before = figures.before_and_after if contrast is None else figures.alone_and_together
    before_figures = _draw_figures(record, prefix, [before])
    global_figures = _draw_figures(record, prefix, [figures.personal_and_global])
    return Section(
        key="clients",
        title="Clients",
        intro=_introduce_clients(
            record,
            shows_change=bool(before_figures),
            shows_global=bool(global_figures),
            has_counts="right" in summary.column_names,
            has_baseline=contrast is not None,
        ),
        figures=[*before_figures, *global_figures],
        tables=tables,
    )


def _summary_of_clients(record: RunRecord, prefix: str) -> Table:
    """Return the table of what each client predicts correctly, without rows if there are no counts and no baseline."""
    scores = predicted_scores(record).own
    counts = right_counts(record, scores)
    contrast = None if record.baselines is None else record.baselines.contrast_with(ALONE)
    header = ["client", "own test images"]
    if counts:
        header += ["right", "95 % interval"]
    if contrast is not None:
        header.append(ALONE)
    if record.train_sizes:
        header.append("training images")
    rows: list[list[Cell]] = []
    if counts or contrast is not None:
        for client in _clients_by_score(len(scores), scores):
            row: list[Cell] = [record.client_names[client], scores[client]]
            if counts:
                count = counts[client]
                row += ["–", "–"] if count is None else [count.text, count.interval_text]
            if contrast is not None:
                row.append(float(contrast.baseline.scores["own"].mean(0)[client]))
            if record.train_sizes:
                row.append(record.train_sizes[client])
            rows.append(row)
    return Table(
        name=f"{prefix}clients_right",
        caption=f"What each client predicts correctly{record.unit.label('')}, lowest first",
        column_names=header,
        rows=rows,
        opened=True,
    )


def _introduce_clients(
    record: RunRecord, *, shows_change: bool, shows_global: bool, has_counts: bool, has_baseline: bool
) -> str:
    """Return the paragraph on the scores of each client, about the figures and tables that the section has."""
    sentences = []
    if shows_change and has_baseline:
        sentences.append(
            "The first figure has each client’s own test images, in this run and if the client trains alone."
        )
    elif shows_change:
        sentences.append(
            "The first figure has each client’s personal model on the client’s own test images, before the first round "
            "and after the last."
        )
    if shows_global:
        sentences.append(
            "The second compares the personal model with the global one, that of the server, on the same images: above "
            "the line, the personal model is better."
        )
    if has_counts:
        predictor = "with its two models" if predicts_with_both(record) else "with its model"
        sentences.append(
            f"In the table, “right” counts the test images that a client, {predictor}, predicts correctly. The 95 % "
            "interval is the share that can be expected on many more images like them: with few test images it is wide."
        )
    if record.undefined_note:
        sentences.append(record.undefined_note)
    if LAST_ROUND in record.scores_of_clients:
        sentences.append("A personal model dates from the last round in which its client took part.")
    return " ".join(sentences)


def _report_pictures(record: RunRecord, prefix: str) -> Section:
    intro = ""
    if record.predicted_examples:
        predictor = "with its two models" if predicts_with_both(record) else "with its model"
        intro = (
            f"The first test images that each client, {predictor}, predicts correctly (✓), and the first that it does "
            "not (✗, the predicted class, and the true one in parentheses). They are not chosen by hand; a client with "
            "few mistakes has fewer images on the right."
        )
    if record.public_pictures:
        intro += (
            " The second figure has some of the server’s public images. The server owns them, their labels are unknown "
            "or not used, and it teaches the global model on them what the clients’ models predict."
        )
    if intro:
        intro += " Share this page only with those who may see the images."
    return Section(
        key="images",
        title="Images and predictions",
        intro=intro.strip(),
        figures=_draw_figures(record, prefix, [example_figures.predicted_images, example_figures.public_images]),
    )


def _clients_by_score(num_clients: int, client_scores: Sequence[float]) -> list[int]:
    """Return the clients, lowest score first; clients without a score come last."""

    def sort_key(client: int) -> float:
        if not client_scores or math.isnan(client_scores[client]):
            return math.inf
        return client_scores[client]

    return sorted(range(num_clients), key=sort_key)


def _report_partition(record: RunRecord, prefix: str) -> Section:
    tables = []
    for part, counts in record.partition.items():
        rows: list[list[Cell]] = []
        for name, images_of_class in zip(record.client_names, counts, strict=True):
            rows.append([name, *images_of_class, sum(images_of_class)])
        part_title = "Training" if part == "train" else "Test"
        sum_title = "all labels" if record.several_labels else "all"
        table = Table(
            name=f"{prefix}partition_{_file_name_part(part)}",
            caption=f"{part_title} images of each client and class",
            column_names=["client", *record.class_names, sum_title],
            rows=rows,
        )
        tables.append(table)
    intro = (
        "Number of training images of each client and class. Clients differ in how many images they have and of what, "
        "which is why a model of their own can help."
    )
    if record.several_labels:
        intro = "Number of images of each client and label. An image with several labels is counted for each."
    return Section(
        key="partition",
        title="Images of each client",
        intro=intro,
        figures=_draw_figures(record, prefix, [class_figures.partition]),
        tables=tables,
    )


def _report_confusion(record: RunRecord, prefix: str) -> Section:
    predictors = {
        "personal": "The predictions are those of the personal models.",
        "global": "The predictions are those of the global model.",
        "both": "The predictions are those that clients make, with both of their models; the tables have each model.",
    }
    return Section(
        key="confusion",
        title="Mistakes",
        intro="Which class was taken for which (a confusion matrix): rows are the true classes of the test images, "
        "columns the predicted ones, and numbers are images. Right predictions are on the diagonal; the colour is the "
        f"share of the row. {predictors.get(model_of_confusion(record) or '', '')}".strip(),
        figures=_draw_figures(record, prefix, [class_figures.confusion, class_figures.confusion_by_client]),
        tables=[_mistakes_table(record, model, prefix) for model in record.confusion],
    )


def _mistakes_table(record: RunRecord, model: str, prefix: str) -> Table:
    """Return the table of the clients' most frequent mistakes, least accurate client first."""
    tables = confusion_tables(record, model)
    accuracy = accuracies(tables)
    rows: list[list[Cell]] = []
    for client in sorted(tables, key=lambda client: accuracy[client]):
        table = tables[client]
        mistake = _most_frequent_mistake(table, record.class_names)
        rows.append([record.client_names[client], count_images(table), accuracy[client], mistake])
    model_texts = {
        "personal": "each client’s own model",
        "global": "the global model",
        "both": "both models of each client together",
    }
    return Table(
        name=f"{prefix}mistakes_{_file_name_part(model)}",
        caption=f"Mistakes of {model_texts.get(model, model_title(model))} on the client’s images",
        column_names=["client", "test images", "accuracy", "most frequent mistake"],
        rows=rows,
    )


def _most_frequent_mistake(table: Counts, class_names: Sequence[str]) -> str:
    worst = most_frequent_mistakes(table)
    if not worst:
        return "–"
    num_images = worst[0].num_images
    first = worst[:MAX_MISTAKES]
    texts = [f"{class_names[mistake.label]} taken for {class_names[mistake.predicted]}" for mistake in first]
    if len(worst) > len(first):
        texts.append(f"{len(worst) - len(first)} more")
    each = " each" if len(worst) > 1 else ""
    return f"{', '.join(texts)}: {num_images}{each}"


def _report_calibration(record: RunRecord, prefix: str) -> Section:
    rows: list[list[Cell]] = []
    errors = []
    for model, bins in record.calibration.items():
        errors.append(f"{model_title(model)} {100 * expected_calibration_error(bins):.1f} %")
        for count, right, confidence in zip(bins["count"], bins["right"], bins["confidence"], strict=True):
            if count:
                rows.append([model, int(count), confidence, right / count])
    table = Table(
        name=f"{prefix}calibration",
        caption="Bins of confidence",
        column_names=["model", "predictions", "mean confidence", "right"],
        rows=rows,
    )
    return Section(
        key="calibration",
        title="Confidence",
        intro="Whether a model’s confidence can be believed (calibration): of predictions that it gives 80 %, 80 % "
        "should be right. Below the line, the model is overconfident. The expected calibration error (ECE) is the mean "
        f"distance from the line: {', '.join(errors)}.",
        figures=_draw_figures(record, prefix, [class_figures.calibration]),
        tables=_tables_with_rows(table),
        technical=True,
    )


def _report_numbers(record: RunRecord, prefix: str) -> Section:
    rows: list[list[Cell]] = []
    for model, bins_of_targets in record.numbers.items():
        for bins, target in zip(bins_of_targets, record.class_names, strict=True):
            rows.append([model_title(model), target, bins.num_images, bins.residual_mean, bins.residual_std])
    table = Table(
        name=f"{prefix}residuals",
        caption="Residuals of each number, over all clients",
        column_names=["model", "number", "test images", "mean residual", "standard deviation"],
        rows=rows,
    )
    return Section(
        key="numbers",
        title="Predicted numbers",
        intro="Predictions against true values: on the line, they are equal. A residual is a prediction minus the true "
        "value. The figures are drawn from counts; the outermost bins also count what lies beyond.",
        figures=_draw_figures(record, prefix, [number_figures.predicted_and_true, number_figures.residuals]),
        tables=_tables_with_rows(table),
    )


def _report_masks(record: RunRecord, prefix: str) -> Section:
    return Section(
        key="masks",
        title="Masks",
        intro="Test images of some clients, with the true mask and the predicted ones. Share this page only with those "
        "who may see them.",
        figures=_draw_figures(record, prefix, [mask_figures.masks]),
    )


def _report_communication(record: RunRecord, prefix: str) -> Section:
    rows: list[list[Cell]] = []
    for metrics, megabytes in zip(record.rounds, megabytes_sent(record), strict=True):
        own_score = metrics.get(OWN_SCORE, math.nan)
        global_score = metrics.get(GLOBAL_SCORE, math.nan)
        rows.append([int(metrics["round"]) + 1, megabytes, own_score, global_score])
    rendered = _draw_figures(record, prefix, [figures.communication])
    tables = []
    # Without the figure there is nothing to compare: nothing was sent, or there are no scores.
    if rendered:
        table = Table(
            name=f"{prefix}communication",
            caption="Megabytes sent, up and down, by all clients together",
            column_names=["round", "MB sent so far", OWN_SCORE, GLOBAL_SCORE],
            rows=rows,
            plain=["MB sent so far"],
            metric_axis="columns",
        )
        tables.append(table)
    return Section(
        key="communication",
        title="Communication",
        intro="Scores against the megabytes that all clients and the server have sent so far.",
        figures=rendered,
        tables=tables,
        technical=True,
    )


def _report_shifts(record: RunRecord, prefix: str) -> Section:
    means: list[list[Cell]] = []
    for name in _shifted_scores(record):
        means.append([name, record.last(name), record.last(f"{name}_std")])
    table_of_means = Table(
        name=f"{prefix}shift_means",
        caption="Scores on each shifted test set",
        column_names=["score", "mean over clients", "std over clients"],
        rows=means,
        metric_axis="rows",
    )
    score_rows: list[list[Cell]] = []
    for shift, curve_of_kind in record.shifts.items():
        for kind, curve in curve_of_kind.items():
            for model in ("personal", "global", "both"):
                if model in curve:
                    for severity, score in zip(curve["severity"], curve[model], strict=True):
                        score_rows.append([shift, kind, int(severity), model, score])
    table_of_kinds = Table(
        name=f"{prefix}shifts",
        caption="By kind of corruption and severity",
        column_names=["shift", "kind", "severity", "model", "score"],
        rows=score_rows,
    )
    return Section(
        key="shifts",
        title="Changed images",
        intro="All models on test images that were changed on purpose, such as by noise or fog (shifted test sets), "
        "which training images were not. Severity 1 is mild, 5 is strong. A model to rely on loses little.",
        figures=_draw_figures(record, prefix, [figures.shifts]),
        tables=_tables_with_rows(table_of_means, table_of_kinds),
    )


def _report_foreign_images(record: RunRecord, prefix: str) -> Section:
    shares_of_shifts: dict[str, dict[int, float]] = {}
    for shift in foreign_images.shifts_with_shares(record):
        shares = foreign_images.foreign_shares(record, f"{TYPICAL_SHARES}{shift}")
        shares_of_shifts[shift] = {foreign.client: foreign.share for foreign in shares}
    shares_of_own = foreign_images.foreign_shares(record)
    has_others = any(not math.isnan(foreign.share_of_others) for foreign in shares_of_own)
    rows: list[list[Cell]] = []
    for foreign in shares_of_own:
        row: list[Cell] = [record.client_names[foreign.client]]
        if record.test_images:
            row.append(record.test_images[foreign.client])
        row.append(foreign.share)
        if has_others:
            row.append(foreign.share_of_others)
        row += [share_of_client.get(foreign.client, math.nan) for share_of_client in shares_of_shifts.values()]
        rows.append(row)
    share_columns = ["own images", *shares_of_shifts]
    if has_others:
        share_columns.insert(1, "other clients' images")
    header = ["client", *share_columns]
    if record.test_images:
        header.insert(1, "test images")
    table = Table(
        name=f"{prefix}foreign_images",
        caption="Share of the images that look foreign to each client, in %",
        column_names=header,
        rows=rows,
        shares=share_columns,
    )
    intro = (
        "Share of each client's test images that do not look like its training images. For these, a client predicts "
        "with the global model, and for others with a mean of both models."
    )
    if has_others:
        intro += (
            " Of the test images of other clients, those that look foreign are left to the global model, and the rest "
            "are taken for the client's own."
        )
    if record.foreign_examples:
        intro += " Share this page only with those who may see the images."
    return Section(
        key="foreign_images",
        title="Images that look foreign",
        intro=intro,
        figures=_draw_figures(record, prefix, [foreign_images.foreign_images, foreign_images.foreign_pictures]),
        tables=_tables_with_rows(table),
    )


def _shifted_scores(record: RunRecord) -> list[str]:
    """Return the names of the scores on shifted test sets that some round has."""
    names = []
    for name in shift_names(record.metric_names):
        _, _, test_set = name.partition("/")
        if not test_set.startswith(("local_test", "global_test")):
            names.append(name)
    return names


def _report_privacy(record: RunRecord, prefix: str) -> Section:
    privacy = record.info.get("privacy")
    rendered = _draw_figures(record, prefix, [figures.epsilon])
    if not privacy:
        intro = _LEFT_OUT if record.without_scores else ""
        return Section(key="privacy", title="Privacy", intro=intro, figures=rendered)

    # These imports load torch and timm, which takes longer than drawing the page, so most pages do without.
    from perada.results.cards import check_record, privacy_lines
    from perada.results.clients import joined_clients

    try:
        check_record(privacy, len(record.client_names))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{str(record.folder)!r}: its privacy record is damaged ({error}); choose a different run"
        ) from error

    epsilons: dict[str, Sequence[float]] = {}
    if "sample" in privacy:
        epsilons["ε server"] = privacy["sample"]["server"]
        epsilons["ε release"] = privacy["sample"]["release"]
    if "client" in privacy:
        epsilons["ε client"] = privacy["client"]["epsilon"]
    rows: list[list[Cell]] = []
    for client, name in enumerate(record.client_names):
        rows.append([name, *(float(values[client]) for values in epsilons.values())])
    table = Table(
        name=f"{prefix}privacy",
        caption="The privacy ledgers of each client",
        column_names=["client", *epsilons],
        rows=rows,
        plain=list(epsilons),
    )
    lines = privacy_lines(privacy, joined_clients(record.info)).splitlines()
    lines.append(_LEFT_OUT if record.without_scores else _NOT_COVERED)
    return Section(key="privacy", title="Privacy", intro=" ".join(lines), figures=rendered, tables=[table])


def _report_settings(record: RunRecord, prefix: str) -> Section:
    rows: list[list[Cell]] = []
    for name, value in record.info.items():
        if name not in ("classes", "clients", "privacy"):  # other sections have them
            rows += _setting_rows(name, value)
    table = Table(name=f"{prefix}run", caption="The run", column_names=["setting", "value"], rows=rows)
    parts = []
    if record.command:
        parts.append(f"# the command\n{shlex.join(record.command)}")
    if record.config:
        if record.command:
            config_file = shlex.quote(str(record.folder / "config.yaml"))
            parts.append(f"# the same again\nperada fit --config {config_file}")
        parts.append(f"# config.yaml\n{record.config}")
    return Section(
        key="settings",
        title="Settings",
        intro="The options of the run, by their names in recipes.",
        tables=_tables_with_rows(table),
        text="\n\n".join(parts),
        technical=True,
    )


def _setting_rows(name: str, value: object, depth: int = 0) -> list[list[Cell]]:
    """Return a row for each setting in a value, with the names of nested ones after a dot, as options are typed."""
    if not isinstance(value, dict) or depth == MAX_SETTING_DEPTH:
        return [[name, str(value)]]
    rows: list[list[Cell]] = []
    for key, nested_value in value.items():
        rows += _setting_rows(f"{name}.{key}", nested_value, depth + 1)
    return rows


def _file_name_part(name: str) -> str:
    """Return the ASCII letters and digits of a name that comes from a file, as a safe part of a file's name."""
    return "".join(letter for letter in name if letter.isascii() and letter.isalnum())
