# SPDX-License-Identifier: Apache-2.0
"""The model card of an exported adapter: what it is for, on what data it was trained, its scores, how it is loaded."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from perada.core.text import printable
from perada.results.clients import joined_clients
from perada.results.export import with_section
from perada.results.privacy_card import privacy_card

SCORES = {
    "personal/local_test": "on the client's own test images",
    "personal/global_test": "on the test images of all clients",
}


@dataclass(frozen=True)
class Subject:
    """What a card is of.

    Attributes:
        info: ``Run.info``.
        metrics: ``Run.metrics``; None to leave the scores out.
        client: Number of the client; None for the global adapter.
        own: Whether the client's adapter is its own, and no copy of the global one.
        base: What the Hub or timm calls the backbone; None for a network of one's own.
        backbone: Where the backbone's weights are, seen from the card; None where they can be had elsewhere.
        license: Of the adapter, as the Hub writes licences.
    """

    info: Mapping[str, Any]
    metrics: Mapping[str, Any] | None
    client: int | None
    own: bool
    base: str | None
    backbone: str | None = None
    license: str = "unknown"


def write_card(path: Path, of: Subject, blank: bool) -> None:
    """Write the card's header and its text into a README.

    Of a file that somebody wrote before (not ``blank``) only the header's fields and what perada wrote are replaced.
    """
    text = path.read_text(encoding="utf-8") if path.is_file() else "---\n---\n"
    headed = _headed(text, json.dumps(header(of)), blank)
    path.write_text(with_section(headed, card_text(of)), encoding="utf-8")


@lru_cache(8)  # the same for most clients of a run, and YAML takes longer than all else
def _headed(text: str, fields: str, blank: bool) -> str:
    """A card with these fields, in JSON, in its header, and without its text if that is ``blank``."""
    card, new = ModelCard(text, ignore_metadata_errors=True), json.loads(fields)
    before = card.data.to_dict()  # type: ignore[no-untyped-call]  # of huggingface_hub
    merged = before | new
    if new["license"] == Subject.license:  # nobody said it now
        merged["license"] = before.get("license", Subject.license)
    if not (merged.get("base_model") and "/" in merged["base_model"]):
        merged.pop("base_model", None)
    card.data = type(card.data)(**merged)
    if blank:
        card.text = ""
    return str(card).rstrip() + "\n"


def header(of: Subject) -> dict[str, Any]:
    """The YAML header that the Hub reads; a base model is named where its weights are the Hub's."""
    base = of.base if of.info["pretrained"] is True and of.base and "/" in of.base else None
    return {
        "library_name": "peft",
        "license": of.license,
        "pipeline_tag": "image-classification",
        "tags": ["federated-learning", "perada"],
    } | ({"base_model": base} if base else {})


def card_text(of: Subject) -> str:
    """The card as Markdown, without the header. What a run's files say in words stands in code spans."""
    info, training = of.info, of.info.get("training") or {}
    classes = info.get("classes")
    names = f": {', '.join(map(code, classes[:50]))}{' …' if len(classes) > 50 else ''}" if classes else ""
    kind = "Each image may have several of" if info["multilabel"] else "Each image has one of"
    whose = "The global adapter" if of.client is None else f"The adapter of client {_called(of)}"
    blocks = [
        f"# {whose}",
        f"{whose} of a federated run of perada with {code(info.get('algorithm', 'unknown'))}, on the backbone "
        f"{code(info['backbone'] or 'a network of its own')}.",
        f"## Task\n\nImage classification. {kind} {info['num_classes']} classes{names}.",
        f"## Data\n\n{_data(of, training)}",
        f"## Scores\n\n{_scores(of)}",
        f"## How to load it\n\n{_loading(of)}",
        privacy_card(info.get("privacy"), of.client if of.own else None, joined_clients(info), _called(of)),
    ]
    return "\n\n".join(filter(None, blocks))


def code(value: object) -> str:
    """Any text as a code span, in which nothing is Markdown or HTML.

    >>> code("a`<b>")
    "`a''b'`"
    """
    return f"`{re.sub('[`<>]', chr(39), printable(str(value)))[:100]}`"


def _called(of: Subject) -> str:
    names = of.info.get("clients")
    if not names and "adapter_of" in of.info:
        return code(of.info["adapter_of"])
    number = str(of.client)
    return code(names[of.client]) if names and of.client is not None and names[of.client] != number else number


def _data(of: Subject, training: Mapping[str, Any]) -> str:
    """Whose images it was trained on."""
    images = list(training.get("images", []))
    came = {record["client"]: record["images"] for record in of.info.get("joined", [])}
    whole = f"{sum(images)} training images of {len(images)} clients" if images else "the images of all clients"
    if of.client is None:
        return f"It was trained on {whole}, none of which left its client."
    own = came.get(of.client, images[of.client] if of.client < len(images) else None)
    count = "the client's own images" if own is None else f"the client's own {own} training images"
    if of.client in came:
        return f"It was trained on {count}, from the global adapter of a finished run, that is, {whole}."
    return f"It was trained on {count} and, by way of the global adapter, on {whole}."


def _scores(of: Subject) -> str:
    """Its own scores; of the global adapter those on everyone's images."""
    if of.metrics is None:
        return "They are left out: scores follow from the clients' images, and their privacy does not cover them."
    metric = "AUROC" if of.info["multilabel"] else "accuracy"
    if of.client is None:
        last: Mapping[str, Any] = (of.metrics.get("rounds") or [{}])[-1]
        found = {"on the test images of all clients": last.get("global/global_test", math.nan)}
    else:
        values = of.metrics.get("clients", {})
        found = {where: values[name][of.client] for name, where in SCORES.items() if name in values}
    lines = [f"- {metric} {where}: {100 * value:.2f} %" for where, value in found.items() if not math.isnan(value)]
    return "\n".join(lines) or "It was not scored."


def _loading(of: Subject) -> str:
    classes = of.info["num_classes"]
    if of.base is None:
        first, backbone = "import peft, perada.adapters", "backbone = ...  # the network that the run was made with"
    elif str(of.info["backbone"]).startswith("hf:"):
        first = "import peft, perada.adapters, transformers"
        made = f"from_pretrained({of.base!r}, num_labels={classes}, ignore_mismatched_sizes=True)"
        backbone = f"backbone = transformers.AutoModelForImageClassification.{made}"
    elif of.backbone or of.info["pretrained"] is True:
        first, name = "import peft, perada.adapters, timm", str(of.info["backbone"])
        weights = f"checkpoint_path={of.backbone!r}" if of.backbone else "pretrained=True"
        backbone = f"backbone = timm.create_model({name!r}, num_classes={classes}, {weights})"
    else:
        first, given = "import peft, perada.adapters, perada.models.backbones as zoo", of.info["pretrained"]
        backbone = f"backbone = zoo.build_backbone({of.info['backbone']!r}, {classes}, pretrained={given!r}).model"
    lines = [first, backbone, 'model = peft.PeftModel.from_pretrained(backbone, ".").eval()']
    return (
        "In this folder:\n\n```python\n" + "\n".join(lines) + "\n```\n\nThe model maps images that are prepared as "
        "`preprocessing` in `run.json` says to logits."
    )
