# SPDX-License-Identifier: Apache-2.0
"""Model cards of adapters, with the privacy of the run that made them.

The record of privacy is ``Run.info["privacy"]``, in plain types. It has one or two levels:

- ``sample``: the fields of :class:`perada.privacy.Privacy` as ``options``, and by client ``noise_multipliers``,
  ``sample_rates`` and the ε of both ledgers, ``server`` and ``release``. With ``at_sites`` it is the record of a
  deployment's server, which has neither noise nor rates, and ε only as sites report it.
- ``client``: the fields of :class:`perada.privacy.ClientPrivacy` as ``options``, the ``noise_multiplier``, and
  ``epsilon`` by client. If the server received only noisy sums, ``sums`` has the ``min_sites`` and ``threshold`` of
  :class:`perada.server.SecureSums`.

In the record of a single client's adapter, ``others`` of each level is the largest ε of the other clients.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from huggingface_hub import ModelCard

from perada.core.states import State
from perada.core.text import printable, printable_lines
from perada.federation.typical_images import LEAST_DEVIATION, ComparedMap
from perada.models.backbones import size_to_build
from perada.privacy.options import ClientPrivacy, Privacy, options_of
from perada.results.models import Models
from perada.results.report import (
    TEST_MODE,
    ScoreUnit,
    epsilon_text,
    first_metric,
    mean_and_std,
    percent,
    score_title,
    table,
    unit_of,
)
from perada.results.run_file import check_list
from perada.server import SecureSums

Record = Mapping[str, Any]
UNKNOWN = "unknown"
"""Licence of an adapter without a known licence."""
SCORES = {
    "personal/local_test": "on the client's own test images",
    "personal/global_test": "on the test images of all clients",
}
_CLIENT_LISTS = {"sample": ("noise_multipliers", "sample_rates", "server", "release"), "client": ("epsilon",)}
"""Entries of each level of a privacy record that have one value per client."""
_CARD_START = "<!-- written by perada -->"
_CARD_END = "<!-- end of what perada wrote -->"
_WRITTEN_PART = re.compile(rf"\n*{re.escape(_CARD_START)}.*?{re.escape(_CARD_END)}\n*", re.DOTALL)


def code(value: object) -> str:
    """Format any text as a code span that cannot contain Markdown or HTML.

    >>> code("a`<b>")
    "`a''b'`"
    """
    return f"`{re.sub('[`<>]', chr(39), printable(str(value)))[:100]}`"


PREDICTIONS_IN_CODE = {
    "Classification": "outputs.softmax(1)",
    "MultiLabel": "outputs.sigmoid()",
    "Segmentation": "outputs.softmax(1)",
    "Regression": "outputs",
    "Keypoints": "outputs",
}
"""Python expression of a task's predictions, by the name of its class, without the units of numbers."""


@dataclass(frozen=True)
class BothFiles:
    """What a card states of predictions with both models of a client.

    Attributes:
        state: The client's :meth:`.BothModels.state`.
        compared_maps: The tensors by whose statistics images are compared.
    """

    state: State
    compared_maps: Sequence[ComparedMap]


def prediction_code(task_record: Record) -> str:
    """Return a Python expression of a task's predictions, given the ``outputs`` of a network, from the task's record.

    >>> prediction_code({"class_path": "Regression", "init_args": {"mean": [1.5], "std": None}})
    'outputs + torch.tensor([1.5])'
    """
    expression = PREDICTIONS_IN_CODE[task_record["class_path"]]
    if task_record["class_path"] == "Keypoints":
        points = "outputs.unflatten(1, (-1, 2))"
        scale = _scale_of_keypoints(task_record["init_args"])
        return f"({points} * torch.tensor({scale.half}) + torch.tensor({scale.center})).flatten(1)"
    if task_record["class_path"] == "Regression":
        for name, operator in (("std", "*"), ("mean", "+")):
            numbers = task_record["init_args"].get(name)
            if numbers is not None:
                values = [float(number) for number in (numbers if isinstance(numbers, Sequence) else [numbers])]
                expression += f" {operator} torch.tensor({values})"
    return expression


class _PointScale(NamedTuple):
    """Numbers by which coordinates (x, y) in pixels follow from outputs: center + half · output."""

    center: list[float]
    half: list[float]


def _scale_of_keypoints(task_options: Record) -> _PointScale:
    """Return the scale of the coordinates, from the options of :class:`.Keypoints` in a file that may be hostile."""
    size = task_options["image_size"]
    if isinstance(size, Sequence) and not isinstance(size, str):
        height, width = size
    else:
        # The side of a square.
        height = size
        width = size
    sides = [float(width), float(height)]
    return _PointScale(center=[(side - 1) / 2 for side in sides], half=[side / 2 for side in sides])


class TaskWords(NamedTuple):
    """Words for a task in a card.

    Attributes:
        sentence: Beginning of a sentence that ends with the number of classes and their name.
        targets: Name of the classes after their number; empty for numbers.
        unit: Unit of the scores.
        predictions: How predictions follow from the outputs of the model.
        pipeline_tag: The Hub's name of the task.
    """

    sentence: str
    targets: str
    unit: ScoreUnit
    predictions: str
    pipeline_tag: str


def metric_title(info: Record) -> str:
    """Return the title of the metric of a run's scores, from ``Run.info``."""
    name = first_metric(info)
    # Words from a file may be hostile.
    return score_title(name) if re.fullmatch("[a-z0-9_]+", name) else code(name)


def task_words(task_record: Record) -> TaskWords:
    """Return the words for a task in a card, from its record (:meth:`.Task.record`)."""
    unit = unit_of(task_record)
    if task_record["class_path"] == "Keypoints":
        scale = _scale_of_keypoints(task_record["init_args"])
        return TaskWords(
            sentence="Keypoints in images. The number of coordinates, x and y of each point, is",
            targets="",
            unit=unit,
            predictions=(
                f"the predictions are x = {scale.center[0]:g} + {scale.half[0]:g} · output and "
                f"y = {scale.center[1]:g} + {scale.half[1]:g} · output, in pixels of the prepared image"
            ),
            pipeline_tag="keypoint-detection",
        )
    if not task_record.get("has_classes", True):
        options = task_record["init_args"]
        predictions = "they are the predictions"
        if options.get("std") is not None or options.get("mean") is not None:
            std = _number_text(options.get("std"), 1.0)
            mean = _number_text(options.get("mean"), 0.0)
            predictions = f"the predictions are {mean} + {std} · outputs"
        return TaskWords(
            sentence="Image regression. The number of targets is",
            targets="",
            unit=unit,
            predictions=predictions,
            # The Hub has no task for numbers of images.
            pipeline_tag="other",
        )
    sentence = "Image classification. Each image may have several of"
    predictions = "a softmax over the classes makes probabilities of them"
    pipeline_tag = "image-classification"
    if task_record.get("per_pixel", False):
        sentence = "Image segmentation. Each pixel has one of"
        pipeline_tag = "image-segmentation"
    elif task_record.get("exclusive", True):
        sentence = "Image classification. Each image has one of"
    else:
        predictions = "a sigmoid of each makes probabilities of them"
    return TaskWords(sentence, "classes", unit, predictions, pipeline_tag)


def _number_text(option_value: Sequence[float] | float | None, default: float) -> str:
    """Return a number, or several in brackets, from a file that may be hostile."""
    if isinstance(option_value, Sequence) and not isinstance(option_value, str):
        if len(option_value) == 1:
            return f"{float(option_value[0]):.7g}"
        return f"({', '.join(f'{float(number):.7g}' for number in option_value)})"
    number = default if option_value is None else float(option_value)
    return f"{number:.7g}"


@cache
def _load_template(name: str) -> jinja2.Template:
    """Load a template of this package, with the functions that templates call."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("perada.results"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"code": code, "repr": repr}
    environment.globals |= {"table": table, "percent": percent, "epsilon": epsilon_text, "mean_and_std": mean_and_std}
    environment.globals["TEST_MODE"] = TEST_MODE
    environment.globals |= {"task_words": task_words, "metric_title": metric_title}
    environment.globals |= {"prediction_code": prediction_code, "least_deviation": LEAST_DEVIATION}
    return environment.get_template(f"{name}.md.j2")


def render_template(name: str, **content: Any) -> str:
    """Render a template of this package, stripped, with at most one empty line in a row, and safe to show."""
    text = printable_lines(_load_template(name).render(content))
    return re.sub(r"\n{3,}", "\n\n", text).strip()


class Cards:
    """Writes the model cards of a run's adapters, READMEs with the Hub's header.

    Args:
        run: The run.
        base: Name of the backbone on the Hub or in timm; None for the user's own network.
        with_scores: Whether the cards have scores.
        license: Licence of the adapters in the Hub's notation.
        needs_perada: Whether PEFT knows the adapter only after ``import perada.adapters``.
    """

    def __init__(
        self, run: Models, base: str | None, with_scores: bool, license: str, needs_perada: bool = True
    ) -> None:
        self.run = run
        self.base = base
        self.with_scores = with_scores
        self.license = license
        info = run.info
        self._clients_with_adapter = run.own_clients()
        self._images = (info.get("training") or {}).get("images", [])
        """Number of training images of each client of the rounds."""
        self._images_of_joined = {record["client"]: record["images"] for record in info.get("joined", [])}
        self._facts = {
            "info": {"algorithm": "unknown", "classes": None} | info,
            "images": sum(self._images),
            "clients": len(self._images),
            "base": base,
            "needs_perada": needs_perada,
            # The position embeddings of some backbones depend on the image size.
            "img_size": size_to_build(info["backbone"], info["built_for"]),
        }

    def write(self, path: Path, client: int | None, backbone: str | None, both_files: BothFiles | None = None) -> None:
        """Write the card of an adapter.

        In an existing card only the header's fields and the part that perada wrote are replaced.

        Args:
            path: The card.
            client: The adapter's client; None for the global adapter.
            backbone: Path of the backbone's weights relative to the card; None if they can be downloaded.
            both_files: What is beside a client's adapter to predict with both models; None without it.
        """
        self._write_card(path, self._compose_text(client, backbone, both_files))

    def write_run(self, path: Path) -> None:
        """Write the card of a run with the states of all clients; see :meth:`write`."""
        text = render_template(
            "run",
            scores=_collect_scores(self.run.metrics, None) if self.with_scores else None,
            num_clients=self.run.num_clients,
            privacy=privacy_lines(self.run.info.get("privacy"), self._images_of_joined),
            **self._facts,
        )
        self._write_card(path, text)

    def _write_card(self, path: Path, written_text: str) -> None:
        """Write a card, or replace the header's fields and the part that perada wrote in an existing one."""
        text = "---\nlibrary_name: peft\n---\n"
        if path.is_file():
            text = path.read_text(encoding="utf-8")
        hub_name = None
        if self.run.info["pretrained"] is True and self.base is not None and "/" in self.base:
            hub_name = self.base
        pipeline_tag = task_words(self.run.info["task"]).pipeline_tag
        with_header = _set_header(text, self.license, hub_name, pipeline_tag)
        other_parts = "\n\n".join(filter(None, _WRITTEN_PART.split(with_header))).rstrip()
        written_part = f"{_CARD_START}\n{written_text}\n{_CARD_END}\n"
        path.write_text(f"{other_parts}\n\n{written_part}", encoding="utf-8")

    def _compose_text(self, client: int | None, backbone: str | None, both_files: BothFiles | None) -> str:
        info = self.run.info
        names = info.get("clients")
        client_images = None
        if client in self._images_of_joined:
            client_images = self._images_of_joined[client]
        elif client is not None and client < len(self._images):
            client_images = self._images[client]
        client_name: object = client
        if client is not None and names and names[client] != str(client):
            client_name = code(names[client])
        elif not names and "adapter_of" in info:
            client_name = code(info["adapter_of"])
        # A copy of the global adapter reveals no more of a client than that.
        private_client = client if client in self._clients_with_adapter else None
        scores = _collect_scores(self.run.metrics, client) if self.with_scores else None
        return render_template(
            "adapter",
            client=client,
            client_name=client_name,
            client_images=client_images,
            joined=client in self._images_of_joined,
            scores=scores,
            backbone=backbone,
            both=both_files,
            privacy=privacy_card(info.get("privacy"), private_client, self._images_of_joined, client_name),
            **self._facts,
        )


@lru_cache(8)  # most clients of a run have the same header, and parsing its YAML takes longer than all else
def _set_header(text: str, license: str, base: str | None, pipeline_tag: str) -> str:
    """Set the fields of the header that the Hub reads."""
    card = ModelCard(text, ignore_metadata_errors=True)
    header = card.data.to_dict()  # type: ignore[no-untyped-call]  # of huggingface_hub
    if license == UNKNOWN:
        license = header.get("license", UNKNOWN)
    header |= {
        "library_name": "peft",
        "license": license,
        "pipeline_tag": pipeline_tag,
        "tags": ["federated-learning", "perada"],
    }
    if base is not None:
        header["base_model"] = base
    # The Hub accepts names of its own repositories only.
    if "/" not in (header.get("base_model") or ""):
        header.pop("base_model", None)
    card.data = type(card.data)(**header)
    return str(card).rstrip() + "\n"


def _collect_scores(metrics: Record, client: int | None) -> dict[str, float]:
    """Return the scores of a client, or of the global adapter, by a description of the test images."""
    scores: dict[str, float] = {}
    if client is None:
        rounds = metrics.get("rounds") or [{}]
        scores[SCORES["personal/global_test"]] = rounds[-1].get("global/global_test", math.nan)
    else:
        for name, description in SCORES.items():
            if name in metrics["clients"]:
                scores[description] = metrics["clients"][name][client]
    return {description: score for description, score in scores.items() if not math.isnan(score)}


def check_record(record: Any, num_clients: int) -> None:  # noqa: ANN401  # whatever a file holds
    """Validate a privacy record from an untrusted file before any of it is shown.

    Raises:
        ValueError, KeyError or TypeError: If it is not the record of a private run of so many clients.
    """
    for level, content in record.items():
        options_class = Privacy if level == "sample" else ClientPrivacy
        options_of(options_class, level, dict(content["options"]))
        values_by_client = [content[name] for name in _CLIENT_LISTS[level]]
        check_list(values_by_client, None, num_clients)
        numbers = [content.get("others", 0)]
        if level == "client":
            numbers.append(content["noise_multiplier"])
        for values in values_by_client:
            numbers += values
        if content.get("sums"):
            SecureSums(**content["sums"])
        for number in numbers:
            if isinstance(number, bool) or not float(number) >= 0:
                raise ValueError(f"privacy: {level} has a value that is not a number >= 0")


def is_test_mode(record: Record | None) -> bool:
    """Return whether any noise was derived from the run's seed."""
    return any(not level["options"]["secure_rng"] for level in (record or {}).values())


def joined_record(record: Record, client_record: Record) -> dict[str, Any]:
    """Return the record of a run with one more client.

    The client has sent nothing, so the global adapter reveals nothing of it: its ε of the level ``client`` is 0.

    Args:
        record: The run's record.
        client_record: The record of the run of the new client only.
    """
    joined = {}
    for level, content in record.items():
        joined[level] = dict(content)
        for name in _CLIENT_LISTS[level]:
            new_values = [0.0]
            if level == "sample":
                new_values = client_record["sample"][name]
            joined[level][name] = [*content[name], *new_values]
    return joined


def _render_privacy(
    name: str, record: Record, client: int | None, joined: Collection[int] = (), client_name: object = None
) -> str:
    """Render a template on the privacy of an adapter.

    Args:
        name: Name of the template.
        record: The privacy record.
        client: The adapter's client; None for the global adapter.
        joined: Clients that joined after the rounds, and sent nothing.
        client_name: Name of the client in the text; its number by default.
    """
    levels: dict[str, Any] = {"sample": None, "client": None}
    for level, content in record.items():
        values = {"sums": None, "at_sites": False} | dict(content)
        sent = {}  # the values of the clients that took part in the rounds
        for list_name in _CLIENT_LISTS[level]:
            numbers = [float(number) for number in content[list_name]]
            values[list_name] = numbers
            sent[list_name] = [number for index, number in enumerate(numbers) if index not in joined]
        values["sent"] = sent
        values["others"] = _largest_of_others(level, content, client)
        levels[level] = values
    text = _load_template(name).render(
        sample_level=levels["sample"],
        client_level=levels["client"],
        client=client,
        joined=joined,
        client_name=client if client_name is None else client_name,
        test_mode=is_test_mode(record),
    )
    return printable_lines(text).strip()


def privacy_card(
    record: Record | None, client: int | None, joined: Collection[int] = (), client_name: object = None
) -> str:
    """Return the section "Privacy" of an adapter's model card as Markdown, empty if training was not private.

    Args:
        record: The privacy record.
        client: The adapter's client; None for the global adapter.
        joined: Clients that joined after the rounds, and sent nothing.
        client_name: Name of the client in the text; its number by default.
    """
    if not record:
        return ""
    return _render_privacy("privacy_card", record, client, joined, client_name)


def privacy_lines(record: Record | None, joined: Collection[int] = ()) -> str:
    """Return the privacy costs of releasing all adapters of a run, one line per level; empty without privacy."""
    if not record:
        return ""
    return _render_privacy("privacy_lines", record, None, joined)


def protection(record: Record | None, client: int | None) -> str:
    """Return a few words on the protection of an adapter, that of a client or the global one (None)."""
    return _render_privacy("protection", record or {}, client)


def _largest_of_others(level: str, privacy_record: Record, client: int | None) -> float | None:
    """Return the largest ε of all other clients; None if there are none."""
    # Only what a client sent can reach another client's adapter.
    ledger = "server" if level == "sample" else "epsilon"
    values = privacy_record[ledger]
    others = [float(value) for other, value in enumerate(values) if other != client]
    if "others" in privacy_record:
        others.append(float(privacy_record["others"]))
    return max(others, default=None)


def record_of_one(record: Record, client: int) -> dict[str, dict[str, Any]]:
    """Return the record for the shared adapter of one client: its own values, and the largest ε of the others."""
    shared: dict[str, dict[str, Any]] = {}
    for level, content in record.items():
        shared[level] = {}
        for name, value in content.items():
            # Lists have one value per client.
            if isinstance(value, list):
                shared[level][name] = [value[client]]
            else:
                shared[level][name] = value
        largest_of_others = _largest_of_others(level, content, client)
        if largest_of_others is not None:
            shared[level]["others"] = largest_of_others
    return shared


def record_of_nobody(record: Record) -> dict[str, dict[str, Any]]:
    """Return the record for the shared global adapter: the ε of all clients, without a link to any client.

    Rates and noise multipliers are replaced by their extremes, with which ε would be no smaller, since a rate reveals a
    client's number of images.
    """
    shared = {level: dict(content) for level, content in record.items()}
    for level, name in (("sample", "server"), ("sample", "release"), ("client", "epsilon")):
        if level in shared:
            shared[level][name] = sorted(shared[level][name], key=float, reverse=True)
    if "sample" in shared:
        rates = [float(rate) for rate in shared["sample"]["sample_rates"]]
        multipliers = [float(multiplier) for multiplier in shared["sample"]["noise_multipliers"]]
        shared["sample"]["sample_rates"] = [max(rates)] * len(rates)
        shared["sample"]["noise_multipliers"] = [min(multipliers)] * len(multipliers)
    return shared
