# SPDX-License-Identifier: Apache-2.0
"""Office-Home, CheXpert and OpenImage: images that stay on disk, with whom or what each belongs to."""

import re
from collections import Counter

import numpy as np
import pytest
import torch

from perada.data import ByDomain, CheXpert, Dirichlet, FederatedDataModule, ImageFolder, OfficeHome, OpenImage, Phase
from perada.tasks import MultiLabel
from tests.rejections import rejects

from .miniatures import DOMAINS, FINDINGS, NUMBER, write_chexpert, write_jpeg, write_office_home, write_open_image


@pytest.fixture(scope="module")
def office_home(tmp_path_factory):
    root = tmp_path_factory.mktemp("office")
    write_office_home(root / "OfficeHomeDataset_10072016")
    return root


@pytest.fixture(scope="module")
def chexpert(tmp_path_factory):
    root = tmp_path_factory.mktemp("chexpert")
    return root, *write_chexpert(root / "CheXpert-v1.0-small")


@pytest.fixture(scope="module")
def open_image(tmp_path_factory):
    root = tmp_path_factory.mktemp("open_image")
    return root, *write_open_image(root)


def drawn_as(image, *steps):
    """What an image of one colour was drawn from; JPEG is off by a little."""
    return tuple(round(float(channel.float().mean()) / step) for channel, step in zip(image, steps, strict=False))


def test_office_home_has_its_labels_domains_and_a_share_of_each_for_testing(office_home):
    train = OfficeHome(str(office_home), size=8, test_share=0.2)
    test = train.with_split(False)
    assert (train.num_classes, train.images, train[0][0].shape) == (65, None, (3, 8, 8))
    seen = []
    for part, each in ((train, 4), (test, 1)):
        drawn = [drawn_as(part[i][0], 60, 3, 40) for i in range(len(part))]
        assert [DOMAINS[domain] for domain, _, _ in drawn] == part.columns["domain"].tolist()
        assert [label for _, label, _ in drawn] == part.labels.tolist()
        assert set(Counter((domain, label) for domain, label, _ in drawn).values()) == {each}
        seen += drawn
    assert sorted(seen) == [(d, label, i) for d in range(4) for label in range(65) for i in range(5)]
    other = OfficeHome(str(office_home / "OfficeHomeDataset_10072016"), size=8, test_share=0.2, seed=1, train=False)
    assert other.manifest.paths != test.manifest.paths
    assert OfficeHome(str(office_home), test_share=0.2, train=False).manifest.paths == test.manifest.paths


@pytest.mark.slow
def test_each_domain_of_office_home_is_a_client_and_no_image_is_read_for_its_label(office_home, monkeypatch):
    reads = []
    read = OfficeHome.read
    monkeypatch.setattr(OfficeHome, "read", lambda self, path: reads.append(path) or read(self, path))
    dataset = OfficeHome(str(office_home), size=8, test_share=0.2)
    datamodule = FederatedDataModule(dataset=dataset, partition=ByDomain())
    record = datamodule.partition_dict()
    assert datamodule.train_sizes == (260,) * 4
    assert len(set(reads)) == 1300  # each once, to see that all can be
    # The first image of every client, in training and in testing, and one of each part to see that it is uint8.
    assert len(reads[1300:]) == 8 + 2
    of = [{dataset.columns["domain"][row] for row in client_rows} for client_rows in record["train"]]
    assert of == [{domain} for domain in DOMAINS]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_workers_read_the_same_batches(office_home):
    def batches(workers):
        datamodule = FederatedDataModule(
            dataset=OfficeHome(str(office_home), size=8), partition=ByDomain(), batch_size=8, num_workers=workers,
            train_limit=80, test_limit=20,
        )  # fmt: skip
        datamodule.configure_rounds(seed=0, clients_per_round=2, phases=[Phase(epochs=1)])
        return [*datamodule.train_dataloader(), *datamodule.val_dataloader()]

    for one, two in zip(batches(0), batches(2), strict=True):
        assert torch.equal(one.x, two.x)
        assert torch.equal(one.y, two.y)


def test_office_home_that_is_not_all_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"/Art .*root"):
        len(OfficeHome(str(tmp_path)))
    write_office_home(tmp_path, each=1, real_world="RealWorld")
    assert set(OfficeHome(str(tmp_path)).columns["domain"]) == set(DOMAINS)
    (tmp_path / "Clipart" / "Class_31" / "00001.jpg").unlink()
    with pytest.raises(ValueError, match=r"259 .*65 classes; .*260, .*https://"):
        len(OfficeHome(str(tmp_path)))
    write_jpeg(tmp_path / "Art" / "Zebra" / "00001.jpg", 0)
    with pytest.raises(ValueError, match=r"260 .*66 classes; .*260"):
        len(OfficeHome(str(tmp_path)))
    (tmp_path / "RealWorld").rename(tmp_path / "World")
    with pytest.raises(FileNotFoundError, match="Real World"):
        len(OfficeHome(str(tmp_path)))


def by_hand(rows, least):
    """Labels and the combinations that a plain count keeps apart."""
    labels = [tuple(NUMBER[row[name]] for name in FINDINGS) for row in rows]
    return labels, [combination for combination, count in Counter(labels).items() if count >= least]


def test_chexpert_labels_and_meta_categories(chexpert):
    root, train_rows, valid_rows = chexpert
    labels, kept = by_hand(train_rows, 6)
    assert 3 < len(kept) < len(set(labels))
    assert any(row["Edema"] == "-1.0" for row in train_rows)
    train = CheXpert(str(root), size=8, merge_below=6)
    assert train.labels.dtype == torch.float32
    assert train.labels.tolist() == [list(map(float, label)) for label in labels]
    valid = train.with_split(False)
    valid_labels, _ = by_hand(valid_rows, 0)
    assert valid.labels.tolist() == [list(map(float, label)) for label in valid_labels]
    category = {}
    both = zip([*labels, *valid_labels], [*train.columns["category"], *valid.columns["category"]], strict=True)
    for label, number in both:
        assert category.setdefault(label if label in kept else "rare", number) == number
    assert sorted(category.values()) == list(range(len(kept) + 1))
    assert category["rare"] == len(kept)
    for part, rows in ((train, train_rows), (valid, valid_rows)):
        assert part.columns["patient"].tolist() == [row["Path"].split("/")[2] for row in rows]
        for index in (0, len(rows) - 1):
            assert part[index][0].shape == (1, 8, 8)
            assert drawn_as(part[index][0], 3) == (int(rows[index]["Path"].split("/")[2].removeprefix("patient")),)
    assert CheXpert(str(root)).num_classes == 5


def test_chexpert_of_frontal_views_and_of_the_full_size(chexpert, tmp_path):
    root, train_rows, _ = chexpert
    frontal = CheXpert(str(root / "CheXpert-v1.0-small"), frontal_only=True)
    assert len(frontal) == sum(row["Frontal/Lateral"] == "Frontal" for row in train_rows) < len(train_rows)
    assert all(path.endswith("_frontal.jpg") for path in frontal.manifest.paths)
    write_chexpert(tmp_path / "CheXpert-v1.0", patients=3, valid=1)
    assert drawn_as(CheXpert(str(tmp_path), size=8)[0][0], 3) == (1,)


def test_a_test_table_without_frontal_views_is_rejected(tmp_path):
    write_chexpert(tmp_path / "CheXpert-v1.0", patients=3, valid=1)
    table = tmp_path / "CheXpert-v1.0" / "valid.csv"
    table.write_text(table.read_text().replace("Frontal,", "Oblique,"))
    with pytest.raises(ValueError, match=r"CheXpert-v1\.0.*frontal_only"):
        len(CheXpert(str(tmp_path), frontal_only=True))


def test_no_patient_of_chexpert_is_on_two_sides(chexpert):
    root, train_rows, _ = chexpert
    train = CheXpert(str(root), test_share=0.25)
    test = train.with_split(False)
    patients = [set(part.columns["patient"]) for part in (train, test)]
    assert len(train) + len(test) == len(train_rows)
    assert not patients[0] & patients[1]
    assert abs(len(test) - len(train_rows) / 4) <= 2.5  # half of a patient's images, and rounding
    assert set(CheXpert(str(root), test_share=0.25, seed=1, train=False).columns["patient"]) != patients[1]
    datamodule = FederatedDataModule(
        dataset=CheXpert(str(root), size=8, test_share=0.2, merge_below=6), client_validation=0.3,
        partition=Dirichlet(3, 5.0, column="category"), validation_fraction=0.1,
    )  # fmt: skip
    record = datamodule.partition_dict()
    columns = datamodule.division.dataset.columns["patient"]
    for kept, held_out in zip(record["train"], record["client_validation"], strict=True):
        assert held_out
        assert not set(columns[kept]) & set(columns[held_out])
    clients = np.concatenate(record["train"] + record["client_validation"])
    assert record["server_validation"]
    assert not set(columns[record["server_validation"]]) & set(columns[clients])
    assert (datamodule.task, datamodule.num_classes) == (MultiLabel(), 5)


def damaged_table(folder, change):
    write_chexpert(folder, patients=2, valid=1)
    table = folder / "train.csv"
    table.write_text(change(table.read_text()))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text.replace("Edema", "Oedema"), r"train\.csv.*'Edema'.*'Path'"),
        (
            lambda text: re.sub(r"\n.*$", "", text.strip()) + "\nCheX",
            r"train\.csv cannot be read \(row \d+ has 1 fields, but the header has 19\), .*: fetch it again from https",
        ),
        (
            lambda text: text.splitlines()[0],
            r"train\.csv cannot be read \(there are no rows\), expected a table .*: fetch it again from https://",
        ),
        (lambda text: "", r"train\.csv cannot be read \(there are no rows\), .*: fetch it again"),
        (
            lambda text: text.replace("patient00001", "00001"),
            r"row 2: invalid Path '.*/00001/.*': fetch it again",
        ),
        (
            lambda text: text.replace("0.0", "0.5"),
            r"row \d+: invalid [CEAP].* '0\.5': fetch it again from https",
        ),
        (lambda text: text.replace("Frontal,", "Oblique,"), r"has no frontal views: set frontal_only to false"),
    ],
)
def test_damaged_tables_are_named(tmp_path, change, words):
    damaged_table(tmp_path / "CheXpert-v1.0-small", change)
    with pytest.raises(ValueError, match=words) as caught:
        len(CheXpert(str(tmp_path), frontal_only=True))
    assert "\n" not in str(caught.value)


def test_files_that_are_missing_or_no_images_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"CheXpert-v1\.0-small/train\.csv does not exist.*https"):
        len(CheXpert(str(tmp_path)))
    write_chexpert(tmp_path / "CheXpert-v1.0-small", patients=2, valid=1)
    images = CheXpert(str(tmp_path))
    first, second = (tmp_path / "CheXpert-v1.0-small" / "train" / f"patient0000{i}" / "study1" for i in (1, 2))
    for file in first.iterdir():
        file.unlink()
    for file in second.iterdir():
        file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(FileNotFoundError, match=r"patient00001/.*jpg does not exist.*https://stan"):
        images[0]
    with pytest.raises(ValueError, match=r"patient00002/.*jpg is not a readable image"):
        images[len(images) - 1]
    (tmp_path / "CheXpert-v1.0-small" / "train.csv").write_bytes(b"\xff\xd8")
    with pytest.raises(ValueError, match=r"train\.csv.*0xff"):
        len(CheXpert(str(tmp_path)))
    for name in ("a", "b"):
        write_jpeg(tmp_path / "folder" / "train" / name / "0.jpg", (1, 2, 3))
        write_jpeg(tmp_path / "folder" / "test" / name / "0.jpg", (1, 2, 3))
    (tmp_path / "folder" / "train" / "a" / "0.jpg").write_bytes(b"")
    with pytest.raises(ValueError, match=r"a/0\.jpg is not a readable image"):
        ImageFolder(str(tmp_path / "folder"))[0]


def test_open_image_is_divided_by_uploader(open_image):
    root, train_rows, test_rows = open_image
    dataset = OpenImage(str(root), size=8)
    assert (dataset.num_classes, dataset.labels.tolist()) == (5, [row["label_id"] for row in train_rows])
    for part, rows in ((dataset, train_rows), (dataset.with_split(False), test_rows)):
        drawn = [drawn_as(part[i][0], 20, 50) for i in range(len(part))]
        assert drawn == [(row["client_id"], row["label_id"]) for row in rows]
    datamodule = FederatedDataModule(dataset=dataset, partition=ByDomain("client"))
    record = datamodule.partition_dict()
    of = [Counter(train_rows[row]["client_id"] for row in client_rows) for client_rows in record["train"]]
    assert sorted(of, key=min) == [{k: n} for k, n in sorted(Counter(row["client_id"] for row in train_rows).items())]
    of_test = [{test_rows[row]["client_id"] for row in client_rows} for client_rows in record["test"]]
    assert of_test == [
        set() if 11 in client_rows else {*client_rows} for client_rows in of
    ]  # the last uploader has no test images


def test_open_image_may_test_on_a_share_of_each_uploaders_images(open_image):
    root, train_rows, _ = open_image
    train = OpenImage(str(root), test_share=0.4)
    test = train.with_split(False)
    counts = Counter(str(row["client_id"]) for row in train_rows)
    assert Counter(test.columns["client"]) == {client: round(0.4 * count) for client, count in counts.items()}
    assert sorted(train.manifest.paths + test.manifest.paths) == sorted(OpenImage(str(root)).manifest.paths)
    assert train.num_classes == 5


def test_open_image_that_is_damaged_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"client_data_mapping/train\.csv does not exist.*github\.com"):
        len(OpenImage(str(tmp_path)))
    write_open_image(tmp_path, uploaders=2)
    table = tmp_path / "client_data_mapping" / "test.csv"
    table.write_text(re.sub(r",\d\n", ",dog\n", table.read_text(), count=1))
    with pytest.raises(ValueError, match=r"test\.csv, row 2: .*label_id 'dog'"):
        len(OpenImage(str(tmp_path)))


@pytest.mark.parametrize(
    ("dataset", "option", "value"),
    [
        (OfficeHome, "test_share", 0),
        (CheXpert, "test_share", 1),
        (CheXpert, "merge_below", -1),
        (OpenImage, "test_share", -0.1),
        (OpenImage, "size", 0),
    ],
)
def test_options(dataset, option, value):
    with rejects(option, value):
        dataset(**{option: value})
