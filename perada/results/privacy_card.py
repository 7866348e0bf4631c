# SPDX-License-Identifier: Apache-2.0
"""What a private run says of its privacy: the section of a model card, and the lines beside an export.

The record is ``Run.info["privacy"]``, in plain types: ``sample`` with the fields of :class:`perada.privacy.Privacy` as
``options``, ``noise_multipliers``, ``sample_rates`` and the ε of both ledgers, ``server`` and ``release``, by client;
``client`` with the fields of :class:`perada.privacy.ClientPrivacy` as ``options``, ``noise_multiplier`` and ``epsilon``
by client. Either may be missing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from perada.privacy.options import ClientPrivacy, Privacy, options_of
from perada.results.report import TEST_MODE, epsilon_text, mean_and_std, table

Record = Mapping[str, Any]


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


def privacy_card(record: Record | None, client: int | None) -> str:
    """The section "Privacy" of the model card of a client's adapter, or of the global one, as Markdown.

    There is no line break at its end, and nothing at all where training was not private.
    """
    if not record:
        return ""
    warning = [f"> **{TEST_MODE}**"] if is_test_mode(record) else []
    sample = _sample(record["sample"], client) if "sample" in record else []
    whole = _whole_clients(record["client"], client) if "client" in record else []
    return "\n\n".join(["## Privacy", *warning, *sample, *whole, _limits(record)])


def privacy_lines(record: Record | None) -> str:
    """What releasing all adapters of a run costs, a line for each kind of privacy; nothing where there was none."""
    lines: list[str] = []
    if not record:
        return ""
    if "sample" in record:
        sample, delta = record["sample"], record["sample"]["options"]["delta"]
        told = [
            f"ε {mean_and_std(values)}, at most {epsilon_text(max(values))} ({name} ledger, {what})"
            for name, what in (("release", "personal adapters"), ("server", "the global adapter alone"))
            for values in [_floats(sample[name])]
        ]
        lines.append(f"Privacy of an image of a client at δ = {delta:g}: {'; '.join(told)}.")
    if "client" in record:
        values, delta = _floats(record["client"]["epsilon"]), record["client"]["options"]["delta"]
        lines.append(
            f"Privacy of a client as a whole at δ = {delta:g}: ε {mean_and_std(values)}, at most "
            f"{epsilon_text(max(values))} (the global adapter alone; nothing is guaranteed of a client's own)."
        )
    return "\n".join([*lines, TEST_MODE] if is_test_mode(record) else lines)


def _floats(values: Sequence[float | str]) -> list[float]:
    """Numbers; JSON has no infinity, so that a file holds the word."""
    return [float(value) for value in values]


def _sample(sample: Record, client: int | None) -> list[str]:
    """Of single images."""
    options, server, release = sample["options"], _floats(sample["server"]), _floats(sample["release"])
    neighbours = {
        "poisson": "one image is added to a client's training images or taken out of them",
        "shuffle": "one of a client's training images is made void, its place among the others staying",
    }[options["sampling"]]
    intro = (
        "Differential privacy for single images: what can be learnt from the adapter changes little, as bounded by ε "
        f"and δ = {options['delta']:g}, if {neighbours}."
    )
    if client is None:
        counts = "all that clients sent, of which this is made"
        row = ["server", counts, mean_and_std(server), epsilon_text(max(server))]
        figures = table(["ledger", "counts", "ε over clients: mean ± std", "largest"], [row], left=2)
        whose = "The largest ε holds for an image of any client."
    else:
        seen = "those who see only that, or what is made of it"
        rows = [
            ["release", "all that the client trained", "whoever gets this adapter", epsilon_text(release[client])],
            ["server", "what the client sent", seen, epsilon_text(server[client])],
        ]
        figures = table(["ledger", "counts", "holds against", "ε"], rows, left=3)
        others = [value for other, value in enumerate(server) if other != client]
        whose = f"This is for the images of client {client}, whose adapter it is."
        if others:
            largest = epsilon_text(max(others))
            whose += f" Images of other clients reached it through the server alone: their ε is at most {largest}."
    return [intro, figures, whose, _dp_sgd(sample, client)]


def _dp_sgd(sample: Record, client: int | None) -> str:
    """The mechanism."""
    options = sample["options"]
    chosen = slice(None) if client is None else slice(client, client + 1)
    noise, rates = _floats(sample["noise_multipliers"][chosen]), _floats(sample["sample_rates"][chosen])
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


def _whole_clients(level: Record, client: int | None) -> list[str]:
    """Of clients as a whole."""
    options, epsilon, noise = level["options"], _floats(level["epsilon"]), float(level["noise_multiplier"])
    intro = (
        "Differential privacy for clients as a whole: what can be learnt from the global adapter changes little, as "
        f"bounded by ε and δ = {options['delta']:g}, if a client's part is taken out of every round's sum."
    )
    if client is None:
        row = [mean_and_std(epsilon), epsilon_text(max(epsilon))]
        figures = table(["ε over clients: mean ± std", "largest"], [row], left=0)
        whose = "It holds against those who see what the server computes, not against the server."
    else:
        others = [value for other, value in enumerate(epsilon) if other != client]
        largest = epsilon_text(max(others)) if others else "–"
        figures = table(["largest ε of the other clients"], [[largest]], left=0)
        whose = f"This adapter is client {client}'s own: **as a whole, that client is not protected by it.**"
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


def _limits(record: Record) -> str:
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
