# SPDX-License-Identifier: Apache-2.0
"""Texts as sequences of characters, by who says them."""

import json
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perada.core.checks import whole_share
from perada.data.sets.base import ImageSet, reading

CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""LEAF's 80 characters; a character's token is its place among them."""
_CODES = np.array(list(map(ord, CHARACTERS)), dtype=np.uint32)  # ascending
LENGTH = 80
"""Characters in a sequence."""
TRAIN_SHARE = 0.8
"""Of what a role says in a plain text, the share at its beginning that is for training."""


class Shakespeare(ImageSet):
    """The plays of Shakespeare by speaking role, in the format of LEAF (https://leaf.cmu.edu; Caldas et al., 2018).

    A sample is 80 characters and the one that follows. The column ``client`` names the role, so that
    ``ByDomain(column="client")`` makes a client of each. Files are ``train/*.json`` and ``test/*.json``, each an object
    with ``users``, ``num_samples`` and ``user_data``: ``{user: {"x": [80 characters, ...], "y": [character, ...]}}``.

    A plain text is read too, where every speech is a paragraph whose first line is the speaker and a colon. Characters
    that LEAF does not have are left out of it. The first 80 % of what a role says are for training, the rest for
    testing; a sequence starts at every character of either part.

    Args:
        root: Folder that holds ``train`` and ``test``, or has them in ``data``, as LEAF's ``preprocess.sh`` leaves it;
            or a plain text file.
        train: The training split, or else the test split.
    """

    num_classes = len(CHARACTERS)

    def __init__(self, root: str = "data/shakespeare", train: bool = True) -> None:
        super().__init__(train)
        self.root = root

    def _load(self) -> tuple[Tensor, Tensor]:
        return self._read[:2]

    @property
    def columns(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """The role of each sample, ``client`` (N,)."""
        return {"client": self._read[2]}

    @cached_property
    def _read(self) -> tuple[Tensor, Tensor, np.ndarray[Any, Any]]:
        """Tokens int64 (N, 80), what follows them int64 (N,), and who says it (N,)."""
        path = Path(self.root)
        if path.is_file():
            found = list(_spoken(path, self.train))
        else:
            found = [one for file in self._files() for one in _samples(file)]
        if not found and self.train:
            raise ValueError(
                f"{str(path)!r} holds no sequence of {LENGTH} characters: give the files of LEAF's data set"
            )
        nothing = ("", torch.empty(0, LENGTH, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
        roles, tokens, labels = zip(nothing, *found, strict=True)
        return torch.cat(tokens), torch.cat(labels), np.repeat(np.array(roles), list(map(len, labels)))

    def _files(self) -> list[Path]:
        split = "train" if self.train else "test"
        found = [sorted((folder / split).glob("*.json")) for folder in (Path(self.root), Path(self.root) / "data")]
        if not any(found):
            raise FileNotFoundError(
                f"{str(self.root)!r} has no {split}/*.json, also not in its folder data: set root to the folder that "
                "LEAF's preprocess.sh wrote (https://leaf.cmu.edu, data set shakespeare)"
            )
        return found[0] or found[1]


def _spoken(path: Path, train: bool) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Each role of a plain text with its sequences (n, 80) in one split, and what follows them (n,)."""
    spoken: dict[str, list[str]] = {}
    for paragraph in re.split(r"\n\s*\n", path.read_text(encoding="utf-8")):
        role, _, speech = paragraph.strip().partition("\n")
        if role.endswith(":") and speech:
            spoken.setdefault(role[:-1], []).append(speech)
    for role, speeches in spoken.items():
        tokens = encode("".join(letter for letter in "\n".join(speeches) if letter in CHARACTERS))
        cut = whole_share(TRAIN_SHARE, len(tokens))
        part = tokens[:cut] if train else tokens[cut:]
        if len(part) > LENGTH:
            windows = part.unfold(0, LENGTH + 1, 1)
            yield role, windows[:, :LENGTH], windows[:, LENGTH]


def _samples(path: Path) -> list[tuple[str, Tensor, Tensor]]:
    """Each role of LEAF's file with its sequences (n, 80), and what follows them (n,)."""
    found = []
    with reading(path, "run LEAF's preprocess.sh again", "a file of LEAF's with users, num_samples and user_data"):
        content = json.loads(path.read_text(encoding="utf-8"))
        for user, size in zip(content["users"], content["num_samples"], strict=True):
            before, after = (content["user_data"][user][name] for name in ("x", "y"))
            if not len(before) == len(after) == size or {*map(len, before)} - {LENGTH} or {*map(len, after)} - {1}:
                raise ValueError(f"{user!r} has not {size} sequences of {LENGTH} characters and one after each")
            if size:
                found.append((str(user), encode("".join(before)).view(-1, LENGTH), encode("".join(after))))
    return found


def encode(text: str) -> Tensor:
    """Tokens int64 (len(text),) of a text: places in :data:`CHARACTERS`; a ValueError if a character is not there.

    >>> encode("To}").tolist()
    [44, 67, 79]
    """
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    places = np.searchsorted(_CODES, codes).clip(max=len(_CODES) - 1)
    wrong = np.flatnonzero(_CODES[places] != codes)
    if len(wrong):
        raise ValueError(f"the character {text[wrong[0]]!r} is none of LEAF's 80")
    return torch.from_numpy(places)
