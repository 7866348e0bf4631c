# SPDX-License-Identifier: Apache-2.0
"""Published sets that come as files: the images of Office-Home, CheXpert and Open Images, the texts of Shakespeare."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perada.core.checks import check_integer, check_number, floor_share
from perada.core.seeding import derive_seed
from perada.data.partitions import categories
from perada.data.partitions.shares import Array, of_each_stratum, whole_groups
from perada.data.sets.arrays import find_folder
from perada.data.sets.base import ImageSet, Manifest, reading
from perada.data.sets.folders import class_folders
from perada.data.sets.manifest import ImageFiles
from perada.data.sets.tables import read_table

OFFICE_HOME_DOMAINS = ("Art", "Clipart", "Product", "Real World")
FINDINGS = ("Cardiomegaly", "Edema", "Consolidation", "Atelectasis", "Pleural Effusion")
CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""LEAF's 80 characters; a character's token is its place among them."""
_CODES = np.array(list(map(ord, CHARACTERS)), dtype=np.uint32)  # ascending
LENGTH = 80  # characters in a sequence
TRAIN_SHARE = 0.8  # of what a role says in a plain text, at its beginning


class OfficeHome(ImageFiles):
    """Office-Home, 15,588 photographs and drawings of 65 classes in four domains (Venkateswara et al., CVPR 2017).

    The column ``domain`` says which of ``Art``, ``Clipart``, ``Product`` and ``Real World`` an image is of. The set is
    published without splits: of each domain and class, a share drawn by ``seed`` is the test split.

    Args:
        root: Folder that holds (or is) ``OfficeHomeDataset_10072016``, the folder with one folder for each domain
            (https://www.hemanthdv.org/officeHomeDataset.html).
        test_share: Share of each domain and class that is the test split. PerAda's experiments have 1,656 test images.
        seed: Another seed, another test split.
        **options: Those of :class:`.ImageFiles`.
    """

    _source = "https://www.hemanthdv.org/officeHomeDataset.html"

    def __init__(self, root: str = "data", test_share: float = 0.1, seed: int = 0, **options: Any) -> None:
        super().__init__(root, **options)
        check_number("test_share", test_share, gt=0, lt=1, hint="a share of the images")
        self.test_share, self.seed = test_share, seed

    def read_manifest(self) -> Manifest:
        """List the images of all domains."""
        home = find_folder([Path(self.root), Path(self.root) / "OfficeHomeDataset_10072016"], "Art") or Path(self.root)
        spelt = {name.replace(" ", "") if (home / "RealWorld").is_dir() else name: name for name in OFFICE_HOME_DOMAINS}
        found = class_folders([home / domain for domain in spelt], home, "{domain}/{class}/**")
        assert found.labels is not None and found.classes is not None
        places = np.searchsorted([*spelt], found.columns["domain"])
        strata = found.labels + len(found.classes) * places
        if len(found.classes) != 65 or len(np.unique(strata)) != 260:
            raise ValueError(
                f"{home} has images of {len(found.classes)} classes in its domains, {len(np.unique(strata))} in all; "
                f"Office-Home has 260: fetch it again from {self._source}"
            )
        held = of_each_stratum(strata, self.test_share, np.random.default_rng(derive_seed(self.seed, "office_home")))
        split = np.full(len(places), "train")
        split[held] = "test"
        return replace(found, columns={"domain": np.array(OFFICE_HOME_DOMAINS)[places]}, split=split)


class CheXpert(ImageFiles):
    """CheXpert, 223,414 chest radiographs of 64,540 patients, with five labels each (Irvin et al., AAAI 2019).

    The labels are Cardiomegaly, Edema, Consolidation, Atelectasis and Pleural Effusion: 1 where the report affirms it
    or is uncertain (U-Ones), or else 0. Images are grey. Columns: ``patient``, whose images stay together wherever
    images are set aside, and ``category``, the number of the combination of labels that an image has. Combinations with
    few training images have one number, the last (PerAda, Xie et al., CVPR 2024, where 19 numbers come out).

    Args:
        root: Folder that holds (or is) ``CheXpert-v1.0-small`` or ``CheXpert-v1.0``, with ``train.csv`` and
            ``valid.csv`` (https://stanfordmlgroup.github.io/competitions/chexpert).
        frontal_only: Leave the lateral views out.
        test_share: Share of the images in ``train.csv``, of whole patients drawn by ``seed``, that is the test split.
            0: the test split is ``valid.csv``, of 234 images.
        merge_below: Combinations of labels with fewer training images are one category.
        seed: Another seed, another test split.
        **options: Those of :class:`.ImageFiles`.
    """

    group_column = "patient"
    mode = "L"
    _source = "https://stanfordmlgroup.github.io/competitions/chexpert"

    def __init__(
        self,
        root: str = "data",
        frontal_only: bool = False,
        test_share: float = 0.0,
        merge_below: int = 2000,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(root, **options)
        check_number("test_share", test_share, ge=0, lt=1, hint="a share of the images in train.csv")
        check_integer("merge_below", merge_below, 0)
        self.frontal_only, self.test_share, self.merge_below, self.seed = frontal_only, test_share, merge_below, seed

    def read_manifest(self) -> Manifest:
        """List the rows of ``train.csv``, and of ``valid.csv`` where this is the test split."""
        places = [Path(self.root) / name for name in ("", "CheXpert-v1.0-small", "CheXpert-v1.0")]
        home = find_folder(places, "train.csv") or places[1]
        # such as CheXpert-v1.0-small/train/patient00001/study1/view1_frontal.jpg
        kinds = {"Path": r"[^/]+/(?!\.\.)[^/]+/patient[^/]+/(?!\.\.)[^/]+/[^/]+", "Frontal/Lateral": ".*"}
        kinds |= dict.fromkeys(FINDINGS, r"(-?1|0)?(\.0)?")  # blank where a report does not mention it
        tables = [home / "train.csv"] if self.test_share else [home / "train.csv", home / "valid.csv"]
        split, (names, views, *found) = read_columns(tables, kinds, self._source)
        rows = np.flatnonzero((views == "Frontal") | (not self.frontal_only))
        labels = np.isin(np.stack(found, axis=1)[rows], ["1", "1.0", "-1", "-1.0"]).astype(np.int64)
        split = split[rows]
        if len({*split.tolist()}) < len(tables):
            raise ValueError(f"a table in {home} has no frontal views: set frontal_only to false")
        parts = [name.split("/") for name in names[rows].tolist()]
        paths = ["/".join((str(home), *part[1:])) for part in parts]  # a Path of each would take seconds
        patients = np.array([part[2] for part in parts])
        if self.test_share:
            rng = np.random.default_rng(derive_seed(self.seed, "chexpert"))
            split[whole_groups(patients, [round(self.test_share * len(paths))], rng, least=1)[0]] = "test"
        _, category = categories(labels[split == "train"], labels, self.merge_below)
        return Manifest(paths, labels.astype(np.float32), FINDINGS, {"patient": patients, "category": category}, split)


class OpenImage(ImageFiles):
    """Photographs of Open Images with those who uploaded them, as FedScale divides them (Lai et al., ICML 2022).

    The column ``client`` is the uploader. Labels are FedScale's ``label_id``.

    Args:
        root: Folder with ``client_data_mapping/train.csv`` and ``test.csv``, which have the columns ``client_id``,
            ``sample_path``, ``label_name`` and ``label_id``, and with their images in ``train`` and ``test``
            (https://github.com/SymbioticLab/FedScale/tree/master/benchmark/dataset/open_images).
        test_share: Share of each uploader's images in ``train.csv``, drawn by ``seed``, that is the test split; none of
            an uploader with very few. 0: the test split is ``test.csv``.
        seed: Another seed, another test split.
        **options: Those of :class:`.ImageFiles`.
    """

    _source = "https://github.com/SymbioticLab/FedScale/tree/master/benchmark/dataset/open_images"

    def __init__(self, root: str = "data", test_share: float = 0.0, seed: int = 0, **options: Any) -> None:
        super().__init__(root, **options)
        check_number("test_share", test_share, ge=0, lt=1, hint="a share of each uploader's images")
        self.test_share, self.seed = test_share, seed

    def read_manifest(self) -> Manifest:
        """List the rows of both tables, or of ``train.csv`` where a share of it is the test split."""
        names = {"client_id": ".*", "sample_path": r"(?!/|(.*/)?\.\.(/|$)).+", "label_id": r"\d+"}
        folder = Path(self.root) / "client_data_mapping"
        tables = [folder / "train.csv"] if self.test_share else [folder / "train.csv", folder / "test.csv"]
        split, (clients, files, labels) = read_columns(tables, names, self._source)
        paths = [f"{self.root}/{side}/{file}" for side, file in zip(split.tolist(), files.tolist(), strict=True)]
        if self.test_share:
            rng = np.random.default_rng(derive_seed(self.seed, "open_image"))
            split[of_each_stratum(clients, self.test_share, rng)] = "test"
        numbers = labels.astype(np.int64)
        return Manifest(paths, numbers, None, {"client": clients}, split, num_classes=int(numbers.max()) + 1)


def read_columns(tables: list[Path], expected: Mapping[str, str], source: str) -> tuple[Array, list[Array]]:
    """The split (N,) of the rows of a table for training and of one for testing, and their columns (N,).

    The cells of each column must be as a regular expression says.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is no table, or a column or a cell is not what is expected.
    """
    again, found = f"fetch it again from {source}", []
    for path in tables:
        columns, numbers = read_table(path, again)
        for name, pattern in expected.items():
            if name not in columns:
                raise ValueError(f"{path} has no column {name!r} among {list(columns)}: {again}")
            fits = re.compile(pattern).fullmatch
            for number, cell in zip(numbers.tolist(), columns[name].tolist(), strict=True):
                if not fits(cell):
                    raise ValueError(f"{path}, row {number}: {name} is {cell!r}, which cannot be used: {again}")
        found.append([columns[name] for name in expected])
    split = np.repeat(["train", "test"][: len(found)], [len(own[0]) for own in found])
    return split, [np.concatenate(parts) for parts in zip(*found, strict=True)]


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
        cut = floor_share(TRAIN_SHARE, len(tokens))
        part = tokens[:cut] if train else tokens[cut:]
        if len(part) > LENGTH:
            windows = part.unfold(0, LENGTH + 1, 1)
            yield role, windows[:, :LENGTH], windows[:, LENGTH]


def _samples(path: Path) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Each role of LEAF's file with its sequences (n, 80), and what follows them (n,)."""
    with reading(path, "run LEAF's preprocess.sh again", "a file of LEAF's with users, num_samples and user_data"):
        content = json.loads(path.read_text(encoding="utf-8"))
        for user, size in zip(content["users"], content["num_samples"], strict=True):
            before, after = (content["user_data"][user][name] for name in ("x", "y"))
            if not len(before) == len(after) == size or {*map(len, before)} - {LENGTH} or {*map(len, after)} - {1}:
                raise ValueError(f"{user!r} has not {size} sequences of {LENGTH} characters and one after each")
            if size:
                yield str(user), encode("".join(before)).view(-1, LENGTH), encode("".join(after))


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
