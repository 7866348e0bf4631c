# SPDX-License-Identifier: Apache-2.0
"""Published sets that come as files: the images of Office-Home, CheXpert and Open Images, the texts of Shakespeare."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from perada.core.checks import check_choice, check_integer, check_number, checked_path, floor_share
from perada.core.seeding import derive_seed
from perada.core.text import quoted
from perada.data.partitions import categories
from perada.data.partitions.shares import Array, split_by_group, stratified_sample
from perada.data.sets.arrays import find_folder
from perada.data.sets.base import ImageSet, Manifest, explain_read_errors
from perada.data.sets.label_columns import VALUES_OF_UNKNOWN
from perada.data.sets.layouts import class_folders
from perada.data.sets.manifest import ImageFiles
from perada.data.sets.table_files import read_table
from perada.tasks.multi_label import UNKNOWN

OFFICE_HOME_DOMAINS = ("Art", "Clipart", "Product", "Real World")
FINDINGS = ("Cardiomegaly", "Edema", "Consolidation", "Atelectasis", "Pleural Effusion")
CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""LEAF's 80 characters. The token of a character is its index."""
_CODE_POINTS = np.array([ord(character) for character in CHARACTERS], dtype=np.uint32)  # ascending
SEQUENCE_LENGTH = 80
"""Number of characters in a sequence."""
TRAIN_SHARE = 0.8
"""Share of a role's speeches in a plain text, from their beginning, that is the training split."""


class OfficeHome(ImageFiles):
    """Office-Home, 15,588 photographs and drawings of 65 classes in four domains (Venkateswara et al., CVPR 2017).

    The column ``domain`` is ``Art``, ``Clipart``, ``Product`` or ``Real World``. The set is published without splits:
    a share of each domain and class, drawn by ``seed``, is the test split.

    Args:
        root: Folder that holds (or is) ``OfficeHomeDataset_10072016``, the folder with one folder for each domain
            (https://www.hemanthdv.org/officeHomeDataset.html).
        test_share: Share of each domain and class that is the test split. PerAda's experiments have 1,656 test images.
        seed: A different seed gives a different test split.
        **options: Options of :class:`.ImageFiles`.
    """

    _source = "https://www.hemanthdv.org/officeHomeDataset.html"

    def __init__(self, root: str = "data", test_share: float = 0.1, seed: int = 0, **options: Any) -> None:
        super().__init__(root, **options)
        check_number("test_share", test_share, gt=0, lt=1, hint="it is a share of the images")
        check_integer("seed", seed, 0, le=None)
        self.test_share = test_share
        self.seed = seed

    def read_manifest(self) -> Manifest:
        """List the images of all domains."""
        root = Path(self.root)
        home = find_folder([root, root / "OfficeHomeDataset_10072016"], "Art") or root
        folder_names = list(OFFICE_HOME_DOMAINS)
        if (home / "RealWorld").is_dir():  # some copies leave out the space
            folder_names = [name.replace(" ", "") for name in OFFICE_HOME_DOMAINS]
        manifest = class_folders([home / name for name in folder_names], home, "{domain}/{class}/**")
        assert manifest.labels is not None and manifest.classes is not None
        domain_index = np.searchsorted(folder_names, manifest.columns["domain"])
        strata = manifest.labels + len(manifest.classes) * domain_index
        num_strata = len(np.unique(strata))
        if len(manifest.classes) != 65 or num_strata != 260:
            raise ValueError(
                f"{home} has {num_strata} class folders with images, of {len(manifest.classes)} classes; Office-Home "
                f"has 260, of 65 classes in 4 domains: fetch it again from {self._source}"
            )
        rng = np.random.default_rng(derive_seed(self.seed, "office_home"))
        split = np.full(len(strata), "train")
        split[stratified_sample(strata, self.test_share, rng)] = "test"
        domains = np.array(OFFICE_HOME_DOMAINS)[domain_index]
        return replace(manifest, columns={"domain": domains}, split=split)


class CheXpert(ImageFiles):
    """CheXpert, 223,414 chest radiographs of 64,540 patients, with five labels each (Irvin et al., AAAI 2019).

    The labels are Cardiomegaly, Edema, Consolidation, Atelectasis and Pleural Effusion: 1 where the report affirms the
    finding, or is uncertain (U-Ones, unless ``unknown`` is set), else 0. Images are grey. Columns: ``patient``, whose
    images stay together wherever images are held out, and ``category``, the number of an image's combination of labels
    under U-Ones. Combinations with few training images share the last number (PerAda, Xie et al., CVPR 2024, which gets
    19 categories).

    Args:
        root: Folder that holds (or is) ``CheXpert-v1.0-small`` or ``CheXpert-v1.0``, with ``train.csv`` and
            ``valid.csv`` (https://stanfordmlgroup.github.io/competitions/chexpert).
        frontal_only: Leave out the lateral views.
        test_share: Share of the images in ``train.csv`` that is the test split, drawn patient by patient by ``seed``.
            With 0 the test split is ``valid.csv``, of 234 images.
        merge_below: Combinations of labels with fewer training images are merged into one category.
        unknown: What to do with uncertain labels (Irvin et al., AAAI 2019), also of test images from ``train.csv``:
            ``ones`` (U-Ones) or ``zeros`` (U-Zeros) take them as present or absent, ``ignore`` leaves them out of loss
            and scores (U-Ignore). Findings that the report does not mention are absent.
        seed: A different seed gives a different test split.
        **options: Options of :class:`.ImageFiles`.
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
        unknown: Literal["ignore", "zeros", "ones"] = "ones",
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(root, **options)
        check_number("test_share", test_share, ge=0, lt=1, hint="it is a share of the images in train.csv")
        check_integer("merge_below", merge_below, 0)
        check_choice("unknown", unknown, ["ignore", "zeros", "ones"])
        check_choice("frontal_only", frontal_only, [True, False])
        check_integer("seed", seed, 0, le=None)
        self.frontal_only = frontal_only
        self.test_share = test_share
        self.merge_below = merge_below
        self.unknown = unknown
        self.seed = seed

    def read_manifest(self) -> Manifest:
        """List the rows of ``train.csv``, and of ``valid.csv`` if this is the test split."""
        candidates = [Path(self.root) / name for name in ("", "CheXpert-v1.0-small", "CheXpert-v1.0")]
        home = find_folder(candidates, "train.csv") or candidates[1]
        tables = [home / "train.csv"]
        if not self.test_share:
            tables.append(home / "valid.csv")
        patterns = {
            # such as CheXpert-v1.0-small/train/patient00001/study1/view1_frontal.jpg
            "Path": r"[^/]+/(?!\.\.)[^/]+/patient[^/]+/(?!\.\.)[^/]+/[^/]+",
            "Frontal/Lateral": ".*",
        }
        # Blank if a report does not mention the finding.
        patterns |= dict.fromkeys(FINDINGS, r"(-?1|0)?(\.0)?")
        split, columns = read_columns(tables, patterns, self._source)

        is_used = (columns["Frontal/Lateral"] == "Frontal") | (not self.frontal_only)
        split = split[is_used]
        if len(np.unique(split)) < len(tables):
            raise ValueError(f"a table in {home} has no frontal views: set frontal_only to false")
        findings = np.stack([columns[name][is_used] for name in FINDINGS], axis=1)
        is_unknown = np.isin(findings, ["-1", "-1.0"])
        is_present = np.isin(findings, ["1", "1.0"])
        labels = is_present.astype(np.float32)
        labels[is_unknown] = VALUES_OF_UNKNOWN.get(self.unknown, UNKNOWN)
        paths = []
        patients = []
        # Strings, since a Path object of each of the 223,414 images would take seconds.
        for name in columns["Path"][is_used].tolist():
            _, *folders = name.split("/")
            paths.append("/".join((str(home), *folders)))
            patients.append(folders[1])
        patient_column = np.array(patients)
        if self.test_share:
            rng = np.random.default_rng(derive_seed(self.seed, "chexpert"))
            num_test = round(self.test_share * len(paths))
            test_rows, _ = split_by_group(patient_column, [num_test], rng, min_groups=1)
            split[test_rows] = "test"
        # The combinations are those of the policy U-Ones in any case, so that every policy has the same clients.
        combinations = (is_present | is_unknown).astype(np.int64)
        _, category = categories(combinations[split == "train"], combinations, self.merge_below)
        return Manifest(
            paths,
            labels=labels,
            classes=FINDINGS,
            columns={"patient": patient_column, "category": category},
            split=split,
        )


class OpenImage(ImageFiles):
    """Photographs of Open Images divided by uploader, as in FedScale (Lai et al., ICML 2022).

    The column ``client`` is the uploader. Labels are FedScale's ``label_id``.

    Args:
        root: Folder with ``client_data_mapping/train.csv`` and ``test.csv``, which have the columns ``client_id``,
            ``sample_path``, ``label_name`` and ``label_id``, and with their images in ``train`` and ``test``
            (https://github.com/SymbioticLab/FedScale/tree/master/benchmark/dataset/open_images).
        test_share: Share of each uploader's images in ``train.csv`` that is the test split, drawn by ``seed``, and none
            of an uploader with very few. With 0 the test split is ``test.csv``.
        seed: A different seed gives a different test split.
        **options: Options of :class:`.ImageFiles`.
    """

    _source = "https://github.com/SymbioticLab/FedScale/tree/master/benchmark/dataset/open_images"

    def __init__(self, root: str = "data", test_share: float = 0.0, seed: int = 0, **options: Any) -> None:
        super().__init__(root, **options)
        check_number("test_share", test_share, ge=0, lt=1, hint="it is a share of each uploader's images")
        check_integer("seed", seed, 0, le=None)
        self.test_share = test_share
        self.seed = seed

    def read_manifest(self) -> Manifest:
        """List the rows of both tables, or of ``train.csv`` if a share of it is the test split."""
        folder = Path(self.root) / "client_data_mapping"
        tables = [folder / "train.csv"]
        if not self.test_share:
            tables.append(folder / "test.csv")
        patterns = {
            "client_id": ".*",
            "sample_path": r"(?!/|(.*/)?\.\.(/|$)).+",  # relative, and without ".."
            "label_id": r"\d+",
        }
        split, columns = read_columns(tables, patterns, self._source)
        clients = columns["client_id"]
        paths = []
        for folder_name, file in zip(split.tolist(), columns["sample_path"].tolist(), strict=True):
            paths.append(f"{self.root}/{folder_name}/{file}")
        if self.test_share:
            rng = np.random.default_rng(derive_seed(self.seed, "open_image"))
            split[stratified_sample(clients, self.test_share, rng)] = "test"
        labels = columns["label_id"].astype(np.int64)
        return Manifest(
            paths,
            labels=labels,
            columns={"client": clients},
            split=split,
            num_classes=int(labels.max()) + 1,
        )


def read_columns(tables: list[Path], patterns: Mapping[str, str], source: str) -> tuple[Array, dict[str, Array]]:
    """Read columns of a table for training and, if there is a second one, of a table for testing.

    Args:
        tables: The files.
        patterns: Columns to read, with a regular expression that each of their cells must match.
        source: Address that messages point to.

    Returns:
        The split (N,), ``train`` or ``test``, of all rows, and the columns (N,) by name.

    Raises:
        FileNotFoundError: If a file does not exist.
        ValueError: If a file is not a table, a column is missing, or a cell does not match.
    """
    remedy = f"fetch it again from {source}"
    columns_of_tables = []
    for path in tables:
        columns, row_numbers = read_table(path, remedy)
        for name, pattern in patterns.items():
            if name not in columns:
                raise ValueError(f"{path} has no column {name!r} among {quoted(columns)}: {remedy}")
            matches = re.compile(pattern).fullmatch
            for row_number, cell in zip(row_numbers.tolist(), columns[name].tolist(), strict=True):
                if not matches(cell):
                    raise ValueError(f"{path}, row {row_number}: invalid {name} {cell!r}: {remedy}")
        columns_of_tables.append(columns)
    first_column = next(iter(patterns))
    sizes = [len(columns[first_column]) for columns in columns_of_tables]
    split = np.repeat(["train", "test"][: len(tables)], sizes)
    return split, {name: np.concatenate([columns[name] for columns in columns_of_tables]) for name in patterns}


class Shakespeare(ImageSet):
    """The plays of Shakespeare by speaking role, in the format of LEAF (https://leaf.cmu.edu; Caldas et al., 2018).

    A sample is 80 characters, its label the character that follows. The column ``client`` names the role, so that
    ``ByDomain(column="client")`` makes each role a client. Files are ``train/*.json`` and ``test/*.json``, each an
    object with ``users``, ``num_samples`` and ``user_data``: ``{user: {"x": [80 characters, ...], "y": [character,
    ...]}}``.

    Plain text files are supported too, in which every speech is a paragraph whose first line is the speaker and a
    colon. Characters outside LEAF's 80 are dropped. The first 80 % of a role's speeches are the training split, the
    remainder is the test split; a sequence starts at every character of either part.

    Args:
        root: Folder with ``train`` and ``test``, or with these in ``data``, as LEAF's ``preprocess.sh`` leaves it; or a
            plain text file.
        train: Whether to load the training split or the test split.
    """

    num_classes = len(CHARACTERS)

    def __init__(self, root: str = "data/shakespeare", train: bool = True) -> None:
        super().__init__(train)
        checked_path("root", root)
        self.root = root

    def _load_images(self) -> tuple[Tensor, Tensor]:
        tokens, labels, _ = self._tokens_and_roles
        return tokens, labels

    @property
    def columns(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """The role of each sample, ``client`` (N,)."""
        _, _, roles = self._tokens_and_roles
        return {"client": roles}

    @cached_property
    def _tokens_and_roles(self) -> tuple[Tensor, Tensor, np.ndarray[Any, Any]]:
        """Return tokens int64 (N, 80), the tokens that follow them int64 (N,), and the roles (N,)."""
        path = Path(self.root)
        samples: list[_RoleSamples] = []
        if path.is_file():
            samples += _read_plain_text(path, self.train)
        else:
            for file in self._find_files():
                samples += _read_leaf_file(file)
        if not samples and self.train:
            raise ValueError(
                f"{str(path)!r} contains no sequence of {SEQUENCE_LENGTH} characters: use the files of LEAF's data set"
            )
        # The first tensor makes torch.cat accept a test split without samples.
        tokens = torch.cat([torch.empty(0, SEQUENCE_LENGTH, dtype=torch.int64), *(part.tokens for part in samples)])
        labels = torch.cat([torch.empty(0, dtype=torch.int64), *(part.labels for part in samples)])
        role_names = np.array(["", *(part.role for part in samples)])
        sizes = [0, *(len(part.labels) for part in samples)]
        return tokens, labels, np.repeat(role_names, sizes)

    def _find_files(self) -> list[Path]:
        split = "train" if self.train else "test"
        for folder in (Path(self.root), Path(self.root) / "data"):
            files = sorted((folder / split).glob("*.json"))
            if files:
                return files
        raise FileNotFoundError(
            f"{str(self.root)!r} has no {split}/*.json, nor does its folder data: set root to the folder that LEAF's "
            "preprocess.sh wrote (https://leaf.cmu.edu, data set shakespeare)"
        )


class _RoleSamples(NamedTuple):
    """The samples of one role: sequences int64 (n, 80), and the token int64 (n,) that follows each."""

    role: str
    tokens: Tensor
    labels: Tensor


def _read_plain_text(path: Path, train: bool) -> Iterator[_RoleSamples]:
    """Yield the samples of each role in one split of a plain text."""
    speeches_of_role: dict[str, list[str]] = {}
    for paragraph in re.split(r"\n\s*\n", path.read_text(encoding="utf-8")):
        role, _, speech = paragraph.strip().partition("\n")
        if role.endswith(":") and speech:
            speeches_of_role.setdefault(role[:-1], []).append(speech)
    for role, speeches in speeches_of_role.items():
        text = "\n".join(speeches)
        tokens = encode("".join(character for character in text if character in CHARACTERS))
        num_train = floor_share(TRAIN_SHARE, len(tokens))
        part = tokens[:num_train] if train else tokens[num_train:]
        if len(part) > SEQUENCE_LENGTH:
            windows = part.unfold(0, SEQUENCE_LENGTH + 1, 1)
            yield _RoleSamples(role, windows[:, :SEQUENCE_LENGTH], windows[:, SEQUENCE_LENGTH])


def _read_leaf_file(path: Path) -> Iterator[_RoleSamples]:
    """Yield the samples of each role in a file of LEAF's."""
    with explain_read_errors(
        path, "run LEAF's preprocess.sh again", "a file of LEAF's with users, num_samples and user_data"
    ):
        content = json.loads(path.read_text(encoding="utf-8"))
        for user, size in zip(content["users"], content["num_samples"], strict=True):
            sequences = content["user_data"][user]["x"]
            next_characters = content["user_data"][user]["y"]
            complete = len(sequences) == len(next_characters) == size
            complete = complete and all(len(sequence) == SEQUENCE_LENGTH for sequence in sequences)
            complete = complete and all(len(character) == 1 for character in next_characters)
            if not complete:
                raise ValueError(
                    f"{user!r} does not have {size} sequences of {SEQUENCE_LENGTH} characters and one character after "
                    "each"
                )
            if size:
                tokens = encode("".join(sequences)).view(-1, SEQUENCE_LENGTH)
                yield _RoleSamples(str(user), tokens, encode("".join(next_characters)))


def encode(text: str) -> Tensor:
    """Encode a text as tokens int64 (len(text),), indices in :data:`CHARACTERS`.

    Raises:
        ValueError: If the text has another character.

    >>> encode("To}").tolist()
    [44, 67, 79]
    """
    code_points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    tokens = np.searchsorted(_CODE_POINTS, code_points).clip(max=len(_CODE_POINTS) - 1)
    unknown = np.flatnonzero(_CODE_POINTS[tokens] != code_points)
    if len(unknown):
        raise ValueError(f"the character {text[unknown[0]]!r} is not one of LEAF's 80")
    return torch.from_numpy(tokens)
