# SPDX-License-Identifier: Apache-2.0
"""The states of a saved run: one safetensors file for each kind of state, with one row for each client.

A file holds the tensors of a state under their names, with a leading axis of clients. ``run.json`` lists the clients of
a file's rows, and the digest of each row, so that one client is read and checked without reading the others.
"""

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from perada.core.states import State, bytes_of, stack
from perada.results.run_file import RUN_FILE, STATE_FILE, StateIndex, StateRows, first_difference, kind_of
from perada.system.files import writing
from perada.system.tensor_tables import SIZE_BYTES, tensors_begin, with_size

SHARD_BYTES = 2 * 10**9
"""Size in bytes of a file, beyond which the next rows go to another one."""
_BUFFER_BYTES = 2**26
"""Size in bytes of the rows that are in memory while a file is written."""
_RESTORE = "restore an intact copy of the folder, or save the run again"


def write_states(
    folder: Path,
    kind: str,
    state_numbers: Sequence[int],
    state_of: Callable[[int], State],
    used_names: Collection[str] = (),
    shard_bytes: int = SHARD_BYTES,
) -> StateIndex:
    """Write states of equal names, shapes and dtypes, each of which is requested once, in this order.

    Args:
        folder: Folder of the files.
        kind: Kind of the states.
        state_numbers: Number of the client, or of the global model, of each state.
        state_of: Returns a state, given its number.
        used_names: Names of files that must not be used.
        shard_bytes: Maximum size of the tensors of a file in bytes; a single state may be larger.

    Returns:
        The rows of the files that were written.
    """
    index: StateIndex = {}
    if not state_numbers:
        return index
    first_state = state_of(state_numbers[0])
    row_bytes = max(1, sum(value.nbytes for value in first_state.values()))
    rows_of_file = max(1, shard_bytes // row_bytes)
    # The first state is not requested again.
    cached = {state_numbers[0]: first_state}
    shard = 0
    for start in range(0, len(state_numbers), rows_of_file):
        name = None
        while name is None or name in used_names:
            shard += 1
            name = f"{kind}.safetensors" if shard == 1 else f"{kind}_{shard}.safetensors"
        rows = list(state_numbers[start : start + rows_of_file])
        states = (cached.pop(number) if number in cached else state_of(number) for number in rows)
        digests = _write_file(folder / name, len(rows), first_state, states, max(1, _BUFFER_BYTES // row_bytes))
        index[name] = StateRows(rows, digests)
    return index


def _write_file(path: Path, num_rows: int, like: State, states: Iterable[State], rows_of_buffer: int) -> list[str]:
    """Write one file, and return the digests of its rows.

    Args:
        path: The file.
        num_rows: Number of rows.
        like: A state with the names, shapes and dtypes of all.
        states: The states of the rows.
        rows_of_buffer: Number of states in memory.
    """
    layout = _stacked_layout(like, num_rows)
    digests = []
    with writing(path), path.open("wb") as file:
        file.write(layout.header_bytes)
        written = 0
        buffer: list[State] = []
        for state in states:
            digests.append(_digest_of_state(state))
            buffer.append(state)
            if len(buffer) == rows_of_buffer or written + len(buffer) == num_rows:
                # Rows of one tensor are adjacent in the file, so a group of states is written tensor by tensor.
                for name, stacked in stack(buffer).items():
                    file.seek(layout.starts[name] + written * like[name].nbytes)
                    file.write(bytes_of(stacked))
                written += len(buffer)
                buffer = []
    return digests


@dataclass(frozen=True)
class _FileLayout:
    """Where the parts of a file are.

    Attributes:
        header_bytes: The file's first bytes.
        starts: Position in the file of each tensor's first byte.
    """

    header_bytes: bytes
    starts: dict[str, int]


def _stacked_layout(like: State, num_rows: int) -> _FileLayout:
    """Return the layout of a file with some rows of states.

    safetensors has no writer that takes tensors in parts, so its header of one state is scaled to all.
    """
    copies = {name: value.detach().cpu().contiguous().clone() for name, value in like.items()}
    content = save(copies, {"format": "pt"})
    entries = json.loads(content[SIZE_BYTES : tensors_begin(content)])
    for name in like:
        entry = entries[name]
        entry["shape"] = [num_rows, *entry["shape"]]
        entry["data_offsets"] = [offset * num_rows for offset in entry["data_offsets"]]
    text = json.dumps(entries, separators=(",", ":")).encode()
    # Tensors begin at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    header = with_size(text)
    starts = {name: len(header) + entries[name]["data_offsets"][0] for name in like}
    return _FileLayout(header, starts)


def _digest_of_state(state: State) -> str:
    """Return the SHA-256 of a state: of its tensors in the order of their names, each after its name and type."""
    digest = hashlib.sha256()
    for name in sorted(state):
        value = state[name]
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(bytes_of(value))
    return digest.hexdigest()


class StateFiles:
    """Reads the states of one kind from the files of a saved run, one at a time.

    On POSIX systems the files stay open, so that a run can be read on after it was saved again in its own folder.

    Args:
        folder: The run's folder.
        kind: Kind of the states.
        index: Rows of the run's files.
        like: State with the names and shapes of all, and the dtypes in which they are returned; None for the files'.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If a file is truncated or not a safetensors file, or its tensors are not those of ``like``.
    """

    def __init__(self, folder: Path, kind: str, index: StateIndex, like: State | None = None) -> None:
        self._folder = folder
        self._kind = kind
        self._like = like
        self._index: dict[Path, StateRows] = {}
        self._places: dict[int, tuple[Path, int]] = {}
        """File and row of each state, by number."""
        self._files: dict[Path, safe_open] = {}
        for name, part in index.items():
            if kind_of(name) != kind:
                continue
            path = folder / name
            self._index[path] = part
            for row, number in enumerate(part.rows):
                self._places[number] = (path, row)
            file = self._open_file(path)
            _check_tensors(path, file, len(part.rows), like)
            if os.name == "posix":
                self._files[path] = file

    @property
    def numbers(self) -> Collection[int]:
        """Numbers of the states."""
        return self._places.keys()

    def require(self, state_numbers: Iterable[int]) -> None:
        """Raise a ValueError if a state is in no file, according to ``run.json``.

        Args:
            state_numbers: Numbers of the states, which are taken one by one: a broken file may name millions.
        """
        for number in state_numbers:
            if number not in self._places:
                raise ValueError(
                    f"{str(self._folder / RUN_FILE)!r} is broken: its entry 'states' lists no file with {self._kind} "
                    f"state {number}; {_RESTORE}"
                )

    def __call__(self, number: int) -> State:
        """Return a state.

        Raises:
            KeyError: If there is none of that number.
            ValueError: If it was changed since it was written, or has values that are not finite.
        """
        path, row = self._places[number]
        file = self._files.get(path) or self._open_file(path)
        # Copies, since slices share the memory of the file.
        state = {name: rows[row : row + 1][0].clone() for name, rows in _slices_of_file(file).items()}
        digests = self._index[path].sha256
        if digests and _digest_of_state(state) != digests[row]:
            raise ValueError(
                f"{str(path)!r} was changed or damaged since it was written, or belongs to a different run, according "
                f"to the digest of row {row} ({self._kind} state {number}) in run.json; {_RESTORE}"
            )
        for name, value in state.items():
            if not value.isfinite().all():
                raise ValueError(
                    f"{str(path)!r} is broken: {name!r} of row {row} ({self._kind} state {number}) is not finite; "
                    "save the run again"
                )
        if self._like is not None:
            state = {name: state[name].to(value.dtype) for name, value in self._like.items()}
        return state

    def _open_file(self, path: Path) -> safe_open:
        if not path.is_file():
            raise FileNotFoundError(
                f"{str(path)!r}, the {self._kind} states of the run, is missing; copy the entire folder"
            )
        try:
            return safe_open(path, framework="pt")
        except SafetensorError as error:
            raise ValueError(
                f"{str(path)!r} cannot be read, it was truncated or damaged: {error}; {_RESTORE}"
            ) from error


def _slices_of_file(open_file: safe_open) -> dict[str, Any]:
    """Return the tensors of a file by name; only the parts that are indexed are read."""
    # The handle is untyped, since safetensors has no annotations.
    handle: Any = open_file
    return {name: handle.get_slice(name) for name in handle.keys()}


def _check_tensors(path: Path, open_file: safe_open, num_rows: int, like: State | None) -> None:
    """Raise a ValueError if a file has other tensors, or another number of rows, than the run."""
    actual: dict[str, object] = {name: rows.get_shape() for name, rows in _slices_of_file(open_file).items()}
    expected_tensors: Mapping[str, object]
    if like is None:
        expected_tensors = {name: [num_rows, *shape[1:]] for name, shape in actual.items() if isinstance(shape, list)}
    else:
        expected_tensors = {name: [num_rows, *value.shape] for name, value in like.items()}
    difference = first_difference(actual, expected_tensors)
    if difference is not None:
        raise ValueError(
            f"{str(path)!r} belongs to a different backbone or adapter, or to another run: {difference.name!r} is "
            f"{difference.actual}, expected {difference.expected}; load it with the backbone it was created with"
        )


def delete_unlisted(folder: Path, index: Mapping[str, object]) -> list[Path]:
    """Delete the files of states of an earlier run in a folder, which its index does not list, and return them."""
    deleted = []
    for path in sorted(folder.glob("*.safetensors")):
        if STATE_FILE.fullmatch(path.name) and path.name not in index:
            path.unlink(missing_ok=True)
            deleted.append(path)
    return deleted
