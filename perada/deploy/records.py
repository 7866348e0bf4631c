# SPDX-License-Identifier: Apache-2.0
"""What the server keeps of a deployed run: its states, the roster, and what happened in each round."""

import csv
import io
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load

from perada.core.files import write_atomic
from perada.core.states import State
from perada.deploy.codec import header_of, pack

STATE = "server.safetensors"
METRICS = "metrics.csv"
FORMAT = 1


@dataclass
class Member:
    """A site of the roster; its place there is its number in the run.

    Attributes:
        name: As the transport knows it.
        size: Training images; None where the site does not say.
        joined: The first round that it could take part in.
        left: Why it takes part no more; empty if it does.
        late: The last round in which it did not answer in time, or -1.
        rounds: Rounds that it took part in.
        epsilon: Its ε by ledger, as it last said.
    """

    name: str
    size: int | None
    joined: int
    left: str = ""
    late: int = -1
    rounds: int = 0
    epsilon: dict[str, float | None] = field(default_factory=dict)


@dataclass
class Record:
    """What happened in a round.

    Attributes:
        round: Counted from 0.
        asked: Names of the sites that were sent to.
        answered: Those of whom the answer counted.
        failed: Code of each other site.
        far: Sites whose change was so many times as long as the median.
        outside: Why sites that were connected did not take part: they have not joined.
        void: Why the global state stayed as it was; empty if it moved.
        seconds: From the first message to the new state.
        up, down: Megabytes of replies and messages.
    """

    round: int
    asked: list[str] = field(default_factory=list)
    answered: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    far: dict[str, float] = field(default_factory=dict)
    outside: dict[str, str] = field(default_factory=dict)
    void: str = ""
    seconds: float = 0.0
    up: float = 0.0
    down: float = 0.0


@dataclass
class Progress:
    """How far a run is.

    Attributes:
        run: Its id.
        recipe: Digest of its recipe.
        rounds: How many it has.
        done: Rounds that are over.
        tuned: Whether the fine-tuning after them is.
        scored: The round after which models were last scored, or -1.
        roster: All sites that ever joined, in the order of their numbers.
        labels: The digest of the classes that all sites have.
        records: Of each round.
        history: Metrics of each round.
        asked: Sites asked in the round that is under way, in their order.
        lengths: Its phases' steps.
        plain: Whether the tensors of the global state are laid out row by row.
        level: Ledger of the privacy of whole clients; None where there is none.
    """

    run: str
    recipe: str
    rounds: int
    done: int = 0
    tuned: bool = False
    scored: int = -1
    roster: list[Member] = field(default_factory=list)
    labels: str = ""
    records: list[Record] = field(default_factory=list)
    history: list[dict[str, float]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    plain: bool = False
    level: dict[str, Any] | None = None


def write(folder: Path, progress: Progress, states: dict[str, Any]) -> None:
    """Write the states of the server and how far it is, all at once, and the metrics beside them."""
    header = asdict(progress) | {"format": FORMAT, "server": list(states["server"])}
    header["history"] = [{key: _plain(value) for key, value in row.items()} for row in header["history"]]
    for record in header["records"]:
        record["far"] = {name: _plain(times) for name, times in record["far"].items()}
    tensors = {f"global/{key}": value for key, value in states["global"].items()}
    for name, state in states["server"].items():
        tensors |= {f"server/{len(name)}/{name}/{key}": value for key, value in state.items()}
    if progress.history:  # first: a run that was killed in between writes them again
        write_atomic(folder / METRICS, _csv(progress.history).encode(), private=True)
    write_atomic(folder / STATE, pack(header, tensors), private=True)


def read(folder: Path) -> tuple[Progress, dict[str, Any]]:
    """What :func:`write` wrote.

    Raises:
        FileNotFoundError: If there is nothing.
        ValueError: If it is damaged.
    """
    path = folder / STATE
    if not path.is_file():
        raise FileNotFoundError(f"{str(folder)!r} holds no deployed run: it has no {STATE}; give the folder of one")
    content = path.read_bytes()
    try:
        header = header_of(content, len(content))
        if header.pop("format") != FORMAT:
            raise KeyError(f"another format than {FORMAT}")
        names, tensors = header.pop("server"), load(content)
        header["roster"] = [Member(**member) for member in header["roster"]]
        header["records"] = [Record(**record) for record in header["records"]]
        header["history"] = [{key: _number(value) for key, value in row.items()} for row in header["history"]]
        for record in header["records"]:
            record.far = {name: _number(times) for name, times in record.far.items()}
        server = {name: _part(tensors, f"server/{len(name)}/{name}/") for name in names}
        states = {"global": _part(tensors, "global/"), "server": server}
        return Progress(**header), states
    except Exception as error:  # whatever a damaged file gives
        raise ValueError(
            f"{str(path)!r} is damaged ({type(error).__name__}: {error}); restore it from a copy"
        ) from error


def _plain(value: float) -> float | str | None:
    """A number for JSON, which knows neither NaN nor infinities."""
    return value if math.isfinite(value) else None if math.isnan(value) else str(value)


def _number(value: float | str | None) -> float:
    return math.nan if value is None else float(value)


def _part(tensors: State, prefix: str) -> State:
    return {key[len(prefix) :]: value for key, value in tensors.items() if key.startswith(prefix)}


def _csv(history: list[dict[str, float]]) -> str:
    """The rounds as a simulation's ``metrics.csv`` has them."""
    names = sorted({name for row in history for name in row} - {"round", "step"})
    text = io.StringIO()
    writer = csv.DictWriter(text, ["epoch", "round", "step", *names], restval="", lineterminator="\n")
    writer.writeheader()
    for row in history:
        values = {name: value for name, value in row.items() if not math.isnan(value)}
        writer.writerow({"epoch": int(row["round"]), **values, "round": row["round"]})
    return text.getvalue()
