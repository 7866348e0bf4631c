# SPDX-License-Identifier: Apache-2.0
"""Published image sets whose images are files: Office-Home, CheXpert, Open Images."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

from perada.core.checks import check_number, check_whole
from perada.core.seeding import derive_seed
from perada.data.partitions.by_label import categories
from perada.data.partitions.shares import Array, of_each_stratum, whole_groups
from perada.data.sets.folders import subfolders
from perada.data.sets.manifest import ImageFiles, Manifest
from perada.data.sets.readers import find_folder
from perada.data.sets.tables import read_csv

OFFICE_HOME_DOMAINS = ("Art", "Clipart", "Product", "Real World")
FINDINGS = ("Cardiomegaly", "Edema", "Consolidation", "Atelectasis", "Pleural Effusion")
_LIKE = "CheXpert-v1.0-small/train/patient00001/study1/view1_frontal.jpg"


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

    Raises:
        FileNotFoundError: When the set is first read, if a file or folder is missing.
        ValueError: If an option is out of range or, when it is first read, a file is damaged.
    """

    _source = "https://www.hemanthdv.org/officeHomeDataset.html"

    def __init__(
        self,
        root: str = "data",
        test_share: float = 0.1,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(root, **options)
        check_number("test_share", test_share, above=0, below=1, hint="a share of the images")
        self.test_share, self.seed = test_share, seed

    @cached_property
    def manifest(self) -> Manifest:
        """The images of the split in ``self.train``."""
        home = find_folder([Path(self.root), Path(self.root) / "OfficeHomeDataset_10072016"], "Art") or Path(self.root)
        tops = [self._domain(home, name) for name in OFFICE_HOME_DOMAINS]
        classes = sorted({folder.name for top in tops for folder in subfolders(top)})
        if len(classes) != 65:
            raise ValueError(
                f"{home} has folders of {len(classes)} classes in its domains, and Office-Home has 65: fetch it again "
                f"from {self._source}"
            )
        numbers = {name: number for number, name in enumerate(classes)}
        found = [make_dataset(str(top), numbers, IMG_EXTENSIONS, allow_empty=True) for top in tops]
        for top, samples in zip(tops, found, strict=True):
            missing = sorted(numbers.keys() - {classes[number] for _, number in samples})
            if missing:
                raise FileNotFoundError(
                    f"{top / missing[0]} has no images, and every class of Office-Home has some in every domain: fetch "
                    f"it again from {self._source}"
                )
        paths, labels = zip(*(sample for samples in found for sample in samples), strict=True)
        domains = np.repeat(OFFICE_HOME_DOMAINS, [len(samples) for samples in found])
        strata = np.array(labels) + 65 * np.repeat(np.arange(4), [len(samples) for samples in found])
        held = of_each_stratum(strata, self.test_share, np.random.default_rng(derive_seed(self.seed, "office_home")))
        rows = np.setdiff1d(np.arange(len(paths)), held) if self.train else held
        return Manifest(list(paths), np.array(labels), tuple(classes), {"domain": domains}).rows(rows)

    def _domain(self, home: Path, name: str) -> Path:
        places = [home / spelt for spelt in dict.fromkeys((name, name.replace(" ", "")))]
        for place in places:
            if place.is_dir():
                return place
        raise FileNotFoundError(
            f"{' or '.join(map(str, places))} does not exist: set root to the folder with Office-Home's folders "
            f"{', '.join(OFFICE_HOME_DOMAINS)} (from {self._source})"
        )


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

    Raises:
        FileNotFoundError: When the set is first read, if a file or folder is missing.
        ValueError: If an option is out of range or, when it is first read, a file is damaged.
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
        check_number("test_share", test_share, least=0, below=1, hint="a share of the images in train.csv")
        check_whole("merge_below", merge_below, 0)
        self.frontal_only, self.test_share, self.merge_below, self.seed = frontal_only, test_share, merge_below, seed

    @cached_property
    def manifest(self) -> Manifest:
        """The images of the split in ``self.train``."""
        places = [Path(self.root) / name for name in ("", "CheXpert-v1.0-small", "CheXpert-v1.0")]
        home = find_folder(places, "train.csv") or places[1]
        paths, patients, labels = self._read(home / "train.csv")
        train = np.arange(len(paths))
        if self.test_share:
            rng = np.random.default_rng(derive_seed(self.seed, "chexpert"))
            test, train = whole_groups(patients, [round(self.test_share * len(paths))], rng, least=1)
        training_labels = labels[train]
        if self.train or self.test_share:
            rows = train if self.train else test
            paths, patients, labels = [paths[row] for row in rows], patients[rows], labels[rows]
        else:
            paths, patients, labels = self._read(home / "valid.csv")
        _, category = categories(training_labels, labels, self.merge_below)
        columns = {"patient": patients, "category": category}
        return Manifest(paths, labels.astype(np.float32), FINDINGS, columns)

    def _read(self, table: Path) -> tuple[list[str], Array, Array]:
        """Files, patients (N,) and labels (N, 5) of a table."""
        names, views, *found = read_columns(table, ["Path", "Frontal/Lateral", *FINDINGS], self._source)
        labels = np.stack(found, axis=1)
        # What a report does not mention is blank; -1 is uncertain.
        known = {"": 0, "0.0": 0, "1.0": 1, "-1.0": 1, "0": 0, "1": 1, "-1": 1}
        wrong = np.argwhere(~np.isin(labels, list(known)))
        if len(wrong):
            row, column = wrong[0]
            raise ValueError(
                f"{table}, row {row + 2}, has {str(labels[row, column])!r} under {FINDINGS[column]}, and blank, 0.0, "
                f"1.0 or -1.0 is expected: fetch it again from {self._source}"
            )
        parts = [name.split("/") for name in names.tolist()]
        for number, own in enumerate(parts, 2):
            if len(own) != 5 or not own[2].startswith("patient") or ".." in own:
                raise ValueError(
                    f"{table}, row {number}, has the path {'/'.join(own)!r}, and one like {_LIKE!r} is expected: fetch "
                    f"it again from {self._source}"
                )
        rows = np.flatnonzero((views == "Frontal") | (not self.frontal_only))
        if not len(rows):
            raise ValueError(f"{table} has no frontal views: set frontal_only to false")
        numbers = np.vectorize(known.get, otypes=[np.int64])(labels[rows])
        home = str(table.parent)
        paths = ["/".join((home, *parts[row][1:])) for row in rows]  # a Path of each would take seconds
        return paths, np.array([parts[row][2] for row in rows]), numbers


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

    Raises:
        FileNotFoundError: When the set is first read, if a file or folder is missing.
        ValueError: If an option is out of range or, when it is first read, a file is damaged.
    """

    _source = "https://github.com/SymbioticLab/FedScale/tree/master/benchmark/dataset/open_images"

    def __init__(
        self,
        root: str = "data",
        test_share: float = 0.0,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(root, **options)
        check_number("test_share", test_share, least=0, below=1, hint="a share of each uploader's images")
        self.test_share, self.seed = test_share, seed

    @cached_property
    def manifest(self) -> Manifest:
        """The images of the split in ``self.train``."""
        paths, clients, labels = self._read("train")
        num_classes = int(labels.max()) + 1
        rows = np.arange(len(paths))
        if self.test_share:
            rng = np.random.default_rng(derive_seed(self.seed, "open_image"))
            held = of_each_stratum(clients, self.test_share, rng)
            rows = np.setdiff1d(rows, held) if self.train else held
        else:
            others = self._read("test")
            num_classes = max(num_classes, int(others[2].max()) + 1)
            if not self.train:
                (paths, clients, labels), rows = others, np.arange(len(others[0]))
        return Manifest(paths, labels, None, {"client": clients}, num_classes=num_classes).rows(rows)

    def _read(self, part: str) -> tuple[list[str], Array, Array]:
        """Files, uploaders (N,) and classes (N,) of a part."""
        table = Path(self.root) / "client_data_mapping" / f"{part}.csv"
        clients, files, labels = read_columns(table, ["client_id", "sample_path", "label_id"], self._source)
        wrong = np.flatnonzero(~np.char.isdigit(labels))
        if len(wrong):
            raise ValueError(
                f"{table}, row {wrong[0] + 2}, has the label_id {str(labels[wrong[0]])!r}, and a whole number from 0 "
                f"is expected: fetch it again from {self._source}"
            )
        for row, file in enumerate(files.tolist(), 2):
            if file.startswith("/") or ".." in file.split("/"):
                raise ValueError(
                    f"{table}, row {row}, has the path {file!r}, which leaves the folder: fetch it again from "
                    f"{self._source}"
                )
        return [f"{self.root}/{part}/{file}" for file in files.tolist()], clients, labels.astype(np.int64)


def read_columns(path: Path, names: Sequence[str], source: str) -> list[Array]:
    """Read columns of a csv file with a header: an array (N,) of strings for each of ``names``.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If a column is missing, a row has another number of fields than the header, or there are no rows.
    """
    again = f"fetch it again from {source}"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: set root to the folder that holds it, or {again}")
    columns, _ = read_csv(path, again)
    missing = [name for name in names if name not in columns]
    if missing:
        raise ValueError(f"{path} has no column {missing[0]!r} among {list(columns)}: {again}")
    return [columns[name] for name in names]
