# SPDX-License-Identifier: Apache-2.0
"""What a private run says of its privacy: the section of a model card, and the lines beside an export.

The record is ``Run.info["privacy"]``, in plain types: ``sample`` with the fields of :class:`perada.privacy.Privacy` as
``options``, ``noise_multipliers``, ``sample_rates`` and the ε of both ledgers, ``server`` and ``release``, by client;
``client`` with the fields of :class:`perada.privacy.ClientPrivacy` as ``options``, ``noise_multiplier`` and ``epsilon``
by client. Either may be missing. Beside a single client's adapter, ``others`` of each is the largest ε of all others.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from perada.privacy.options import ClientPrivacy, Privacy, options_of
from perada.results.report import TEST_MODE, epsilon_text, mean_and_std, table

Record = Mapping[str, Any]
_TWICE = (
    "This client joined when the rounds were over, and its ε counts what it trained then. If its images were in the "
    "rounds before, such as those of a client that was removed since, what they cost there is added to it."
)


def check_record(record: Any, num_clients: int) -> None:  # noqa: ANN401  # whatever a file holds
    """Look at a record that was read from a file, which anyone may have written, before any of it is shown.

    Raises:
        ValueError, KeyError or TypeError: If it is not the record of a private run of so many clients.
    """
    lists = {"sample": ("noise_multipliers", "sample_rates", "server", "release"), "client": ("epsilon",)}
    for level, of_each in record.items():
        if level == "sample":
            options_of(Privacy, "privacy", dict(of_each["options"]))
        else:
            options_of(ClientPrivacy, "client_privacy", dict(of_each["options"]))
        for name in lists[level]:
            if not isinstance(of_each[name], list) or len(of_each[name]) != num_clients:
                raise ValueError(f"privacy: {name} has {len(of_each[name])} values for {num_clients} clients")
            _check_numbers(name, of_each[name])
        _check_numbers("others", [of_each["others"]] if "others" in of_each else [])
    if "client" in record:
        _check_numbers("noise_multiplier", [record["client"]["noise_multiplier"]])


def _check_numbers(name: str, values: Sequence[Any]) -> None:
    for value in values:
        if isinstance(value, bool) or not float(value) >= 0:
            raise ValueError(f"privacy: {name} is {value!r}, not a number of 0 or more")


def is_test_mode(record: Record | None) -> bool:
    """Whether any noise followed from the run's seed."""
    return any(not level["options"]["secure_rng"] for level in (record or {}).values())


def joined_record(record: Record, own: Record | None) -> dict[str, Any]:
    """The record of a run that a client has joined, of which alone ``own`` is.

    The client has sent nothing: nobody learns of it as a whole from the global adapter.
    """
    found = {level: dict(content) for level, content in record.items()}
    if "sample" in found:
        assert own is not None
        for name in ("noise_multipliers", "sample_rates", "server", "release"):
            found["sample"][name] = [*found["sample"][name], *own["sample"][name]]
    if "client" in found:
        found["client"]["epsilon"] = [*found["client"]["epsilon"], 0.0]
    return found


def privacy_card(record: Record | None, client: int | None, joined: Collection[int] = (), called: object = None) -> str:
    """The section "Privacy" of the model card of a client's adapter, or of the global one, as Markdown.

    There is no line break at its end, and nothing at all where training was not private. Clients that ``joined`` when
    the rounds were over sent nothing. The client is ``called`` something else than its number where that is given.
    """
    if not record:
        return ""
    warning = [f"> **{TEST_MODE}**"] if is_test_mode(record) else []
    name = client if called is None else called
    sample = _sample(record["sample"], client, joined, name) if "sample" in record else []
    whole = _whole_clients(record["client"], client, joined, name) if "client" in record else []
    again = [_TWICE] if client is not None and client in joined else []
    return "\n\n".join(["## Privacy", *warning, *sample, *whole, *again, limits(record)])


def protection(record: Record | None, client: int | None) -> str:
    """In a few words, what protects those behind one adapter, a client's own or (None) the global one."""
    nothing = "without differential privacy: it may reveal images that it was trained on"
    if not record:
        return nothing
    if is_test_mode(record):
        return "with noise that follows from the seed, which protects nothing: use it for tests alone"
    found = []
    if "sample" in record:
        sample = record["sample"]
        worst = max(_floats(sample["server"])) if client is None else _floats(sample["release"])[client]
        if math.isfinite(worst):
            found.append(f"single images: ε at most {epsilon_text(worst)} at δ = {sample['options']['delta']:g}")
    if "client" in record and client is None:
        level = record["client"]
        worst = max(_floats(level["epsilon"]))
        if math.isfinite(worst):
            found.append(f"whole clients: ε at most {epsilon_text(worst)} at δ = {level['options']['delta']:g}")
    if not found:
        return nothing
    return f"with differential privacy of {', and of '.join(found)}, as the card says"


def privacy_lines(record: Record | None, joined: Collection[int] = ()) -> str:
    """What releasing all adapters of a run costs, a line for each kind of privacy; nothing where there was none.

    Clients that ``joined`` when the rounds were over sent nothing.
    """
    lines: list[str] = []
    if not record:
        return ""
    if "sample" in record:
        sample, delta = record["sample"], record["sample"]["options"]["delta"]
        told = [
            f"ε {mean_and_std(values)}, at most {epsilon_text(max(values))} ({name} ledger, {what})"
            for name, what in (("release", "personal adapters"), ("server", "the global adapter alone"))
            for values in [_floats(sample[name]) if name == "release" else _of_senders(sample[name], joined)]
        ]
        lines.append(f"Privacy of an image of a client at δ = {delta:g}: {'; '.join(told)}.")
    if "client" in record:
        values, delta = _of_senders(record["client"]["epsilon"], joined), record["client"]["options"]["delta"]
        lines.append(
            f"Privacy of a client as a whole at δ = {delta:g}: ε {mean_and_std(values)}, at most "
            f"{epsilon_text(max(values))} (the global adapter alone; nothing is guaranteed of a client's own)."
        )
    return "\n".join([*lines, TEST_MODE] if is_test_mode(record) else lines)


def _floats(values: Sequence[float | str]) -> list[float]:
    """Numbers; JSON has no infinity, so that a file holds the word."""
    return [float(value) for value in values]


def _of_senders(values: Sequence[float | str], joined: Collection[int]) -> list[float]:
    """The numbers of clients that took part in the rounds."""
    return [value for client, value in enumerate(_floats(values)) if client not in joined]


def _largest_of_others(level: Record, name: str, client: int) -> float | None:
    """The largest ε of all clients but one; None where there is no other."""
    others = [value for other, value in enumerate(_floats(level[name])) if other != client]
    others += _floats([level["others"]]) if "others" in level else []
    return max(others, default=None)


def of_one(record: Record, client: int) -> dict[str, dict[str, Any]]:
    """The record beside the adapter of one client: its own figures, and the largest ε of the others."""
    found = {}
    for level, content in record.items():
        largest = _largest_of_others(content, "server" if level == "sample" else "epsilon", client)
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
            found["sample"][name] = [extreme(_floats(values))] * len(values)
    return found


def _sample(sample: Record, client: int | None, joined: Collection[int], called: object) -> list[str]:
    """Of single images."""
    options, release = sample["options"], _floats(sample["release"])
    server = _floats(sample["server"])
    neighbours = {
        "poisson": "one image is added to a client's training images or taken out of them",
        "shuffle": "one of a client's training images is made void, its place among the others staying",
    }[options["sampling"]]
    intro = (
        "Differential privacy for single images: what can be learnt from the adapter changes little, as bounded by ε "
        f"and δ = {options['delta']:g}, if {neighbours}."
    )
    if client is None:
        counts, sent = "all that clients sent, of which this is made", _of_senders(server, joined)
        row = ["server", counts, mean_and_std(sent), epsilon_text(max(sent))]
        figures = table(["ledger", "counts", "ε over clients: mean ± std", "largest"], [row], left=2)
        whose = "The largest ε holds for an image of any client."
    else:
        seen = "those who see only that, or what is made of it"
        rows = [
            ["release", "all that the client trained", "whoever gets this adapter", epsilon_text(release[client])],
            ["server", "what the client sent", seen, epsilon_text(server[client])],
        ]
        figures = table(["ledger", "counts", "holds against", "ε"], rows, left=3)
        largest = _largest_of_others(sample, "server", client)
        whose = f"This is for the images of client {called}, whose adapter it is."
        if largest is not None:
            whose += " Images of other clients reached it through the server alone: "
            whose += f"their ε is at most {epsilon_text(largest)}."
    return [intro, figures, whose, _dp_sgd(sample, client, joined)]


def _dp_sgd(sample: Record, client: int | None, joined: Collection[int]) -> str:
    """The mechanism."""
    options = sample["options"]
    noise, rates = (_of_senders(sample[name], joined) for name in ("noise_multipliers", "sample_rates"))
    if client is not None:
        noise, rates = (_floats([sample[name][client]]) for name in ("noise_multipliers", "sample_rates"))
    rates = [rate for rate in rates if rate] or rates  # that of a client that was forgotten is not kept
    drawn = {
        "poisson": f"draws each image with probability {_range(rates)} (Poisson sampling)",
        "shuffle": "takes images in random order (no amplification is claimed; a pass counts as one step with all)",
    }[options["sampling"]]
    bound = f"{options['max_norm']:g}"
    clipped = {
        "flat": f"clips each image's gradient to the norm {bound}",
        "per_layer": f"clips each image's gradient to the norm {bound} / √L for each of L parameters",
        "automatic": f"scales each image's gradient to about the norm {bound}",
    }[options["clipping"]]
    return (
        f"Mechanism: DP-SGD. A step {drawn}, {clipped} and adds Gaussian noise to their sum, whose standard deviation "
        f"is {bound} times the noise multiplier {_range(noise)}. {_accounted(options, min(noise))}"
    )


def _whole_clients(level: Record, client: int | None, joined: Collection[int], called: object) -> list[str]:
    """Of clients as a whole."""
    options, epsilon, noise = level["options"], _of_senders(level["epsilon"], joined), float(level["noise_multiplier"])
    intro = (
        "Differential privacy for clients as a whole: what can be learnt from the global adapter changes little, as "
        f"bounded by ε and δ = {options['delta']:g}, if a client's part is taken out of every round's sum."
    )
    if client is None:
        row = [mean_and_std(epsilon), epsilon_text(max(epsilon))]
        figures = table(["ε over clients: mean ± std", "largest"], [row], left=0)
        whose = "It holds against those who see what the server computes, not against the server."
    else:
        largest = _largest_of_others(level, "epsilon", client)
        text = "–" if largest is None else epsilon_text(largest)
        figures = table(["largest ε of the other clients"], [[text]], left=0)
        whose = f"This adapter is client {called}'s own: **as a whole, that client is not protected by it.**"
    bound = {
        "fixed": f"to the norm {options['max_norm']:g}",
        "adaptive": f"to a norm that follows the quantile {options['quantile']:g} of the clients'",
    }[options["clipping"]]
    mechanism = (
        f"Mechanism: the change that a client sends is clipped {bound}, and the sum over the clients of a round gets "
        f"Gaussian noise; noise multiplier {noise:g}, without amplification. {_accounted(options, noise)}"
    )
    return [intro, figures, whose, mechanism]


def _accounted(options: Mapping[str, Any], noise: float) -> str:
    """By what, and a warning where there was nothing to account for."""
    nothing = "" if noise else " **There was no noise, so that nothing is guaranteed.**"
    return f"ε is of Opacus's accountant `{options['accountant']}`.{nothing}"


def limits(record: Record) -> str:
    """What is not covered."""
    points = ["The numbers of clients and of each client's images are taken as known."]
    if any(level["options"]["accountant"] == "gdp" for level in record.values()):
        points.append("The accountant `gdp` is an approximation, which can report too little.")
    points += [
        "ε is of this one run. Settings chosen by several runs on the same images cost more.",
        "ε is of adapters, not of training losses or scores that the run logged.",
    ]
    return "\n".join(["Not covered:", "", *(f"- {point}" for point in points)])


def _range(values: Sequence[float]) -> str:
    """The numbers' range.

    >>> _range([0.5, 0.25]), _range([0.5, 0.5])
    ('0.25 to 0.5', '0.5')
    """
    low, high = (f"{bound:.4g}" for bound in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"
