# SPDX-License-Identifier: Apache-2.0
"""What is written beside adapters: model cards, and what a private run says of its privacy.

The record of privacy is ``Run.info["privacy"]``, in plain types: ``sample`` with the fields of
:class:`perada.privacy.Privacy` as ``options``, ``noise_multipliers``, ``sample_rates`` and the ε of both ledgers,
``server`` and ``release``, by client; ``client`` with the fields of :class:`perada.privacy.ClientPrivacy` as
``options``, ``noise_multiplier`` and ``epsilon`` by client, and with ``sums``, the ``min_sites`` and ``threshold`` of
:class:`perada.server.SecureSums`, where the server was given noisy sums alone. Either may be missing. With ``at_sites``
the record of ``sample`` is that of a deployment's server, which knows neither noise nor rates, and ε only as sites tell
it. Beside a single client's adapter, ``others`` of each is the largest ε of all others.
"""

import math
import re
from collections.abc import Collection, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import ModelCard

from perada.core.text import printable
from perada.models.backbones import size_to_build
from perada.privacy.options import ClientPrivacy, Privacy, options_of
from perada.results.models import Models
from perada.results.report import TEST_MODE, epsilon_text, mean_and_std, percent, table
from perada.results.run_file import check_list
from perada.server import SecureSums

Record = Mapping[str, Any]
UNKNOWN = "unknown"
"""Licence of an adapter of which nobody said it."""
SCORES = {
    "personal/local_test": "on the client's own test images",
    "personal/global_test": "on the test images of all clients",
}
_LISTS = {"sample": ("noise_multipliers", "sample_rates", "server", "release"), "client": ("epsilon",)}
_CARD_START, _CARD_END = "<!-- written by perada -->", "<!-- end of what perada wrote -->"
_WRITTEN = re.compile(rf"\n*{re.escape(_CARD_START)}.*?{re.escape(_CARD_END)}\n*", re.DOTALL)


def code(value: object) -> str:
    """Any text as a code span, in which nothing is Markdown or HTML.

    >>> code("a`<b>")
    "`a''b'`"
    """
    return f"`{re.sub('[`<>]', chr(39), printable(str(value)))[:100]}`"


@cache
def _template(name: str) -> jinja2.Template:
    """A template beside this file, with what it may call."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("perada.results"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"code": code, "repr": repr}
    made.globals |= {"table": table, "percent": percent, "epsilon": epsilon_text, "mean_and_std": mean_and_std}
    made.globals["TEST_MODE"] = TEST_MODE
    return made.get_template(f"{name}.md.j2")


def rendered(name: str, **content: Any) -> str:
    """The text that a template makes, without breaks at its ends."""
    return re.sub(r"\n{3,}", "\n\n", _template(name).render(content)).strip()


class Cards:
    """The cards of a run's adapters, READMEs with the Hub's header.

    Args:
        run: The run.
        base: What the Hub or timm calls the backbone, None for a network of one's own.
        scores: Whether scores are told.
        license: Of the adapters, as the Hub writes licences.
    """

    def __init__(self, run: Models, base: str | None, scores: bool, license: str) -> None:
        self.run, self.base, self.scores, self.license = run, base, scores, license
        info, self._own = run.info, run.own_clients()
        self._images = (info.get("training") or {}).get("images", [])
        self._came = {record["client"]: record["images"] for record in info.get("joined", [])}
        self._facts = {
            "info": {"algorithm": "unknown", "classes": None} | info,
            "images": sum(self._images),
            "clients": len(self._images),
            "base": base,
            "img_size": size_to_build(info["backbone"], info["built_for"]),  # positions are embedded for it
        }

    def write(self, path: Path, client: int | None, backbone: str | None) -> None:
        """Write the card of a client's adapter, or of the global one (None).

        Of one that somebody wrote before only the header's fields and what perada wrote are replaced. ``backbone`` is
        where its weights are, seen from the card, None where they can be had elsewhere.
        """
        text = path.read_text(encoding="utf-8") if path.is_file() else "---\nlibrary_name: peft\n---\n"
        on_hub = self.run.info["pretrained"] is True and self.base is not None and "/" in self.base
        headed = _headed(text, self.license, self.base if on_hub else None)
        others = "\n\n".join(filter(None, _WRITTEN.split(headed))).rstrip()
        written = f"{_CARD_START}\n{self._text(client, backbone)}\n{_CARD_END}\n"
        path.write_text(f"{others}\n\n{written}", encoding="utf-8")

    def _text(self, client: int | None, backbone: str | None) -> str:
        info, names, images = self.run.info, self.run.info.get("clients"), self._images
        own_images = images[client] if client is not None and client < len(images) else None
        called: object = client
        if client is not None and names and names[client] != str(client):
            called = code(names[client])
        elif not names and "adapter_of" in info:
            called = code(info["adapter_of"])
        own = client if client in self._own else None
        return rendered(
            "adapter",
            client=client,
            called=called,
            own_images=self._came.get(client, own_images),
            joined=client in self._came,
            scores=_scores(self.run.metrics, client) if self.scores else None,
            backbone=backbone,
            privacy=privacy_card(info.get("privacy"), own, self._came, called),
            **self._facts,
        )


@lru_cache(8)  # the same for most clients of a run, and YAML takes longer than all else
def _headed(text: str, license: str, base: str | None) -> str:
    """A card with the header that the Hub reads."""
    card = ModelCard(text, ignore_metadata_errors=True)
    before = card.data.to_dict()  # type: ignore[no-untyped-call]  # of huggingface_hub
    merged = before | {
        "library_name": "peft",
        "license": before.get("license", UNKNOWN) if license == UNKNOWN else license,
        "pipeline_tag": "image-classification",
        "tags": ["federated-learning", "perada"],
    }
    if base is not None:
        merged["base_model"] = base
    if not (merged.get("base_model") and "/" in merged["base_model"]):
        merged.pop("base_model", None)
    card.data = type(card.data)(**merged)
    return str(card).rstrip() + "\n"


def _scores(metrics: Record, client: int | None) -> dict[str, float]:
    """A client's own scores by what they are on; of the global adapter those on everyone's images."""
    if client is None:
        last: Record = (metrics.get("rounds") or [{}])[-1]
        found = {SCORES["personal/global_test"]: last.get("global/global_test", math.nan)}
    else:
        own = metrics["clients"]
        found = {where: own[name][client] for name, where in SCORES.items() if name in own}
    return {where: score for where, score in found.items() if not math.isnan(score)}


def check_record(record: Any, num_clients: int) -> None:  # noqa: ANN401  # whatever a file holds
    """Look at a record that was read from a file, which anyone may have written, before any of it is shown.

    Raises:
        ValueError, KeyError or TypeError: If it is not the record of a private run of so many clients.
    """
    for level, of_each in record.items():
        lists = [of_each[name] for name in _LISTS[level]]
        options_of(Privacy if level == "sample" else ClientPrivacy, level, dict(of_each["options"]))
        check_list(lists, None, num_clients)
        single = [of_each.get("others", 0), *([of_each["noise_multiplier"]] if level == "client" else [])]
        if sums := of_each.get("sums"):
            SecureSums(**sums)
        if any(isinstance(value, bool) or not float(value) >= 0 for values in (*lists, single) for value in values):
            raise ValueError(f"privacy: {level} has a value that is not a number of 0 or more")


def is_test_mode(record: Record | None) -> bool:
    """Whether any noise followed from the run's seed."""
    return any(not level["options"]["secure_rng"] for level in (record or {}).values())


def joined_record(record: Record, own: Record) -> dict[str, Any]:
    """The record of a run that a client has joined, of which alone ``own`` is.

    The client has sent nothing: nobody learns of it as a whole from the global adapter.
    """
    found = {level: dict(content) for level, content in record.items()}
    for level, content in found.items():
        for name in _LISTS[level]:
            content[name] = [*content[name], *(own["sample"][name] if level == "sample" else [0.0])]
    return found


def _words(record: Record, client: int | None, joined: Collection[int], called: object = None) -> Any:  # noqa: ANN401  # macros
    """The texts on a record's numbers, of which ``sent`` are those of the clients that took part in the rounds."""
    levels: dict[str, Any] = {"sample": None, "client": None}
    for level, content in record.items():
        lists = {name: [float(value) for value in content[name]] for name in _LISTS[level]}
        sent = {name: [one for number, one in enumerate(own) if number not in joined] for name, own in lists.items()}
        of_others = {"others": _largest_of_others(level, content, client)}
        levels[level] = {"sums": None, "at_sites": False} | dict(content) | lists | {"sent": sent} | of_others
    return _template("privacy").make_module(
        {
            "sample": levels["sample"],
            "whole": levels["client"],
            "client": client,
            "joined": joined,
            "called": client if called is None else called,
            "test_mode": is_test_mode(record),
        }
    )


def privacy_card(record: Record | None, client: int | None, joined: Collection[int] = (), called: object = None) -> str:
    """The section "Privacy" of the model card of a client's adapter, or of the global one, as Markdown.

    There is no line break at its end, and nothing at all where training was not private. Clients that ``joined`` when
    the rounds were over sent nothing. The client is ``called`` something else than its number where that is given.
    """
    return str(_words(record, client, joined, called).card()).strip() if record else ""


def privacy_lines(record: Record | None, joined: Collection[int] = ()) -> str:
    """What releasing all adapters of a run costs, a line for each kind of privacy; nothing where there was none."""
    return str(_words(record, None, joined).lines()).strip() if record else ""


def protection(record: Record | None, client: int | None) -> str:
    """In a few words, what protects those behind one adapter, a client's own or (None) the global one."""
    return str(_words(record or {}, client, ()).protection()).strip()


def _largest_of_others(level: str, content: Record, client: int | None) -> float | None:
    """The largest ε of all clients but one; None where there is no other."""
    values = content["server" if level == "sample" else "epsilon"]
    others = [float(value) for other, value in enumerate(values) if other != client]
    return max([*others, float(content["others"])] if "others" in content else others, default=None)


def of_one(record: Record, client: int) -> dict[str, dict[str, Any]]:
    """The record beside the adapter of one client: its own figures, and the largest ε of the others."""
    found = {}
    for level, content in record.items():
        largest = _largest_of_others(level, content, client)
        found[level] = {name: [value[client]] if isinstance(value, list) else value for name, value in content.items()}
        found[level] |= {} if largest is None else {"others": largest}
    return found


def of_nobody(record: Record) -> dict[str, dict[str, Any]]:
    """The record beside the global adapter where it is shared: ε of all clients, and what says whose is whose left out.

    Rates and noise are the extremes that ε was not smaller for, since a rate tells how many images a client has.
    """
    found = {level: dict(content) for level, content in record.items()}
    for level, name in (("sample", "server"), ("sample", "release"), ("client", "epsilon")):
        if level in found:
            found[level][name] = sorted(found[level][name], key=float, reverse=True)
    if "sample" in found:
        for name, extreme in (("sample_rates", max), ("noise_multipliers", min)):
            values = found["sample"][name]
            found["sample"][name] = [extreme(map(float, values))] * len(values)
    return found
