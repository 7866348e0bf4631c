# SPDX-License-Identifier: Apache-2.0
"""Images of one's own: what folders and tables say is compared with what was written."""

import re
from collections import Counter
from itertools import chain

import numpy as np
import pytest
import torch

from perada.data import ByDomain, FederatedDataModule, ImageFolder, Images, ImageTable
from perada.data.partitions.shares import hashed_share
from perada.data.sets.image_paths import list_images
from perada.data.sets.layouts import layout_pattern
from perada.results.inference import find_images
from tests.rejections import rejects

from .miniatures import HOSPITALS, write_hospitals, write_jpeg, write_table

FINDINGS = ("benign", "malignant", "normal")


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory):
    root = tmp_path_factory.mktemp("hospitals")
    write_hospitals(root, each=10)
    return root


def place(images, which):
    """Hospital and finding as the colours of an image say."""
    red, green, _ = images[which][0].float().mean((1, 2)).tolist()
    return round(red / 60), round(green / 80)


def test_folders_are_clients_and_classes(hospitals):
    train = Images(str(hospitals), size=8)
    test = train.with_split(False)
    assert (train.classes, train.num_classes) == (FINDINGS, 3)
    for part, least in ((train, 5), (test, 1)):
        said = [(HOSPITALS.index(c), int(k)) for c, k in zip(part.columns["client"], part.labels, strict=True)]
        assert len(Counter(said)) == 12 and min(Counter(said).values()) >= least
        assert [place(part, row) for row in range(len(part))] == said
    assert len({*train.manifest.paths} | {*test.manifest.paths}) == len(train) + len(test) == 120
    assert Images(str(hospitals), seed=1, train=False).manifest.paths != test.manifest.paths
    assert Images(str(hospitals), size=8, gray=True)[0][0].shape == (1, 8, 8)


def test_classes_that_are_named_have_the_order_of_their_names(hospitals, tmp_path):
    """An image keeps its finding, whatever its number; a class may have no image."""
    named = ["other", "normal", "malignant", "benign"]
    train = Images(str(hospitals), size=8, classes=named)
    assert train.classes == train.with_split(False).classes == tuple(named)
    assert train.num_classes == 4
    assert [named[int(k)] for k in train.labels] == [FINDINGS[place(train, row)[1]] for row in range(len(train))]
    findings = {"1.jpg": "b|a", "2.jpg": "b", "3.jpg": ""}
    write_table(tmp_path / "table.csv", [{"path": name, "label": label} for name, label in findings.items()])
    for name in findings:
        write_jpeg(tmp_path / name, 0)
    several = ImageTable(str(tmp_path / "table.csv"), separator="|", classes=["c", "b", "a"])
    rows = [several.labels, several.with_split(False).labels]
    assert sorted(row for part in rows for row in part.tolist()) == [[0, 0, 0], [0, 1, 0], [0, 1, 1]]


def test_a_class_that_is_not_among_the_named_ones_is_rejected_by_name(hospitals):
    with pytest.raises(ValueError, match=r"malignant, normal, .*benign, other"):
        len(Images(str(hospitals), classes=["benign", "other"]))
    with pytest.raises(ValueError, match="'a' twice"):
        Images(str(hospitals), classes=["a", "a"])
    with rejects("Images: classes", "benign"):
        Images(str(hospitals), classes="benign")


def test_each_hospital_is_a_client(hospitals):
    datamodule = FederatedDataModule(dataset=Images(str(hospitals), size=8), partition=ByDomain("client"), batch_size=4)
    datamodule.setup()
    sizes = Counter(datamodule.division.dataset.columns["client"])
    assert (datamodule.num_clients, datamodule.train_sizes) == (4, tuple(sizes[name] for name in HOSPITALS))
    assert torch.equal(
        datamodule.checked.train.item(2, 0)[0], datamodule.division.dataset[sum(datamodule.train_sizes[:2])][0]
    )


@pytest.mark.parametrize(
    ("layout", "path", "fields"),
    [
        ("{client}/{class}/*", "a/b/1.png", {"client": "a", "class": "b"}),
        ("{client}/{class}/*", "a/b/c/1.png", None),
        ("{client}/{class}/**", "a/b/c/1.png", {"client": "a", "class": "b"}),
        ("**/{class}/*.png", "b/1.png", {"class": "b"}),
        ("**/{class}/*.png", "x/y/b/1.png", {"class": "b"}),
        ("**/{class}/*.png", "x/y/b/1.jpg", None),
        ("{split}/{class}/{group}_v?.jpg", "train/b/p7_v1.jpg", {"split": "train", "class": "b", "group": "p7"}),
        ("{client}_{class}_*", "a_b_c_1.png", {"client": "a", "class": "b"}),
        ("a.b/{class}/*", "axb/c/1.png", None),
    ],
)
def test_a_layout_stands_for_paths(layout, path, fields):
    match = layout_pattern(layout).fullmatch(path)
    assert (match.groupdict() if match else None) == fields


def write(root, *paths):
    for number, path in enumerate(paths):
        write_jpeg(root / path, number)
    return str(root)


def names(images):
    return [path.rpartition("/")[2] for path in images.manifest.paths]


def test_a_split_of_ones_own_is_kept(tmp_path):
    root = write(tmp_path, "Train/b/1.jpg", "Train/a/2.jpg", "test/a/3.jpg", ".hidden/a/4.jpg")
    (tmp_path / "Train" / "notes.txt").write_text("no image")
    train = Images(root, layout="{split}/{class}/*")
    assert (names(train), train.labels.tolist(), train.columns) == (["2.jpg", "1.jpg"], [0, 1], {})
    assert names(train.with_split(False)) == ["3.jpg"]
    write(tmp_path, "valid/a/5.jpg", "valid/b/6.jpg")
    with pytest.warns(UserWarning, match="2 validation images"):
        assert names(Images(root, layout="{split}/{class}/*")) == ["2.jpg", "1.jpg"]
    (tmp_path / "test" / "a" / "3.jpg").unlink()
    assert names(Images(root, layout="{split}/{class}/*", train=False)) == ["5.jpg", "6.jpg"]


def test_classes_that_are_numbers_are_sorted_as_numbers(tmp_path):
    root = write(tmp_path, *(f"{number}/{i}.jpg" for number in (10, 9, 1) for i in range(2)))
    assert Images(root, layout="{class}/*").classes == ("1", "9", "10")


def test_no_patient_is_on_both_sides(tmp_path):
    random = np.random.default_rng(0)
    root = write(
        tmp_path, *(f"h{p % 3}/{'ab'[p % 2]}/p{p}_{i}.jpg" for p in range(40) for i in range(random.integers(1, 5)))
    )
    images = Images(root, layout="{client}/{class}/{group}_*", test_share=0.25)
    assert images.group_column == "group"
    train, test = (set(part.columns["group"]) for part in (images, images.with_split(False)))
    assert not train & test
    assert len(train | test) == 40
    total = len(images) + len(images.with_split(False))
    assert abs(len(images.with_split(False)) - total / 4) < 3 * (0.1875 * 7.5 * 40) ** 0.5  # of patients with 1 to 4
    assert {*images.with_split(False).columns["client"]} == {"h0", "h1", "h2"}


def choose_keys(keys, share, seed, clients=None, classes=None, known=None):
    clients = clients or [0] * len(keys)
    classes = classes or [[]] * len(keys)
    return {keys[row] for row in hashed_share(keys, clients, classes, share, seed, known, protect_classes=True)}


@pytest.mark.parametrize("share", [0.1, 0.2, 0.5])
@pytest.mark.parametrize("size", [2, 3, 12, 13, 60, 400])
@pytest.mark.every(10)
def test_an_image_that_comes_or_goes_moves_no_other(size, share):
    """But for one where a client has a single test image, or a single one to train on, and nothing is remembered."""
    moved = 0
    for seed in range(100):
        keys = [f"image {number}" for number in range(size + 1)]
        less = choose_keys(keys[:-1], share, seed)
        more = choose_keys(keys, share, seed)
        assert 0 < len(less) < size
        changed = (less ^ more) - {keys[-1]}
        assert len(changed) <= 1
        assert not changed or len(less) in (1, size - 1)
        moved += bool(changed)
        known = {key: key in less for key in keys[:-1]}
        assert choose_keys(keys, share, seed, known=known) - {keys[-1]} == less
    expected = 100 * ((1 - share) ** size + share**size)  # clients where the hashes alone choose none, or all
    assert moved <= 1.5 * expected + 3
    assert moved == 0 or size < 60


def test_the_share_is_met_but_for_chance_in_each_client_and_class():
    rng = np.random.default_rng(0)
    keys = [f"image {number}" for number in range(4000)]
    clients = rng.integers(0, 4, 4000)
    labels = rng.integers(0, 5, 4000)
    drawn = np.isin(np.arange(4000), hashed_share(keys, clients.tolist(), labels[:, None].tolist(), 0.3, 3))
    for client in range(4):
        for label in range(5):
            is_of_group = (clients == client) & (labels == label)
            assert abs(drawn[is_of_group].sum() - 0.3 * is_of_group.sum()) < 4 * (0.21 * is_of_group.sum()) ** 0.5
    other = np.isin(np.arange(4000), hashed_share(keys, clients.tolist(), labels[:, None].tolist(), 0.3, 4))
    assert abs((drawn & other).sum() - 360) < 4 * (0.09 * 0.91 * 4000) ** 0.5  # another seed, another choice


@pytest.mark.parametrize("share", [0.05, 0.9])
def test_no_client_lacks_test_images_and_none_is_drawn_whole(share):
    """Plain counts of small clients of several classes, some of whose images belong to groups across clients."""
    clients = [0] * 3 + [1] * 5 + [2]
    classes = [[0], [0], [1], [0], [1], [1], [0, 2], [2], [0]]
    for seed in range(200):
        keys = list("abcdefghi") if seed % 2 else list("abcdefghb")
        own = choose_keys(keys, share, seed, clients, classes)
        left = [row for row, key in enumerate(keys) if key not in own]
        assert {clients[row] for row in left} == {0, 1, 2}
        assert {one for row in left for one in classes[row]} == {0, 1, 2}
        assert {client for client, key in zip(clients, keys, strict=True) if key in own} >= {0, 1}
    assert choose_keys(["a", "b"], share, 0, classes=[[0], [1]]) == set()  # each is the last of its class


def coloured(root, files):
    """Images by path, each of its own colours."""
    for path, number in files.items():
        write_jpeg(root / path, (number % 16 * 16, number // 16 * 16, 128))
    return str(root)


@pytest.mark.parametrize("seed", range(4))
def test_a_new_image_a_new_name_and_a_copy_change_no_former_test_image(tmp_path, seed):
    files = {f"{'ab'[number % 2]}/{number}.jpg": number for number in range(60)}
    root = coloured(tmp_path / "before", files)
    before = {*names(Images(root, "{class}/*", seed=seed, train=False))}
    assert 3 <= len(before) <= 24
    for number in range(60, 66):
        coloured(tmp_path / "before", {f"a/{number // 2}n{number}.jpg": number})  # in between the others
        test = {*names(Images(root, "{class}/*", seed=seed, train=False))}
        assert {name for name in test if "n" not in name} == before
    moved = coloured(tmp_path / "moved", {f"a/scan_{number}.jpg": number for number in range(60)} | {"b/1_copy.jpg": 1})
    test = {*names(Images(moved, "{class}/*", seed=seed, train=False, classes=["a", "b"]))}
    expected = {f"scan_{name}" for name in before}
    assert test == expected | ({"1_copy.jpg"} if "1.jpg" in before else set())


def test_one_hospital_alone_has_the_test_images_that_it_has_among_others(tmp_path):
    """As a folder, in a table and in its own ImageFolder, with other names of clients and orders of classes."""
    layout = {f"h{number % 3}/{'abc'[number // 3 % 3]}/{number}.jpg": number for number in range(150)}
    root = coloured(tmp_path / "all", layout)
    together = Images(root, train=False)
    table = [{"path": f"all/{path}", "label": path[3], "client": path[:2]} for path in reversed(layout)]
    write_table(tmp_path / "table.csv", table)
    assert sorted(names(ImageTable(str(tmp_path / "table.csv"), train=False))) == sorted(names(together))
    for client in ("h0", "h1", "h2"):
        own = [name for name, of in zip(names(together), together.columns["client"], strict=True) if of == client]
        alone = Images(f"{root}/{client}", "{class}/*", classes=["c", "b", "a", "z"], train=False)
        assert sorted(names(alone)) == sorted(own)
        assert sorted(names(ImageFolder(f"{root}/{client}", train=False))) == sorted(own)


def test_a_new_image_moves_no_validation_image_and_groups_stay_whole(tmp_path):
    files = {
        f"h{p % 2}/{'ab'[p // 2 % 2]}/p{p}_{view}.jpg": 3 * p + view for p in range(60) for view in range(p % 3 + 1)
    }
    root = coloured(tmp_path, files)

    def parts():
        datamodule = FederatedDataModule(
            dataset=Images(root, "{client}/{class}/{group}_*", size=4),
            partition=ByDomain("client"),
            client_validation=0.25,
        )
        record = datamodule.partition_dict()
        train = names(datamodule.division.dataset)
        test = names(datamodule.division.dataset.with_split(False))
        held_out, kept = (
            [[train[row] for row in own] for own in record[part]] for part in ("client_validation", "train")
        )
        assert all(held_out) and all(kept)
        return [{*chain(*held_out)}, {*chain(*kept)}, {*test}]

    before = parts()
    coloured(tmp_path, {"h0/a/p0_9.jpg": 200, "h1/b/p99_0.jpg": 201})  # of a patient who is there, and of a new one
    after = parts()
    assert [part - {"p0_9.jpg", "p99_0.jpg"} for part in after] == before
    patients = [{name.split("_")[0] for name in part} for part in after]
    assert not patients[0] & patients[1] | patients[0] & patients[2] | patients[1] & patients[2]


@pytest.mark.parametrize(
    ("paths", "layout", "error", "message"),
    [
        (
            ["a/b/1.jpg"],
            "{klass}/*",
            ValueError,
            r"^layout: field=\'klass\' is unknown; did you mean \'class\'\?",
        ),
        (["a/b/1.jpg"], "{client}/*", ValueError, r"has no \{class\}: add it where the class is"),
        (["a/b/1.jpg"], "{class}/{class}/*", ValueError, r"the field \{class\} twice; replace one of them with \*"),
        (["a/b/1.jpg"], "{class}/*", FileNotFoundError, r"such as a/b/1\.jpg, do not match the layout '\{class\}/\*'"),
        ([], "{class}/*", FileNotFoundError, "has no images: set root to a folder with .jpg"),
        (
            ["x/a/1.jpg"],
            "{split}/{class}/*",
            ValueError,
            r"x/a/1\.jpg: split must be one of train, training, test, .*, got 'x'",
        ),
        (
            ["train/a/1.jpg"],
            "{split}/{class}/*",
            ValueError,
            "has no test images in its split: add some, or leave the s",
        ),
        (
            ["train/a/1.jpg", "test/a/2.jpg", "test/b/3.jpg"],
            "{split}/{class}/*",
            ValueError,
            "has no training images of b, among 2 classes: add some",
        ),
        (
            ["train/a/p_1.jpg", "test/a/p_2.jpg"],
            "{split}/{class}/{group}_*",
            ValueError,
            "both training and test images of the group p: put all",
        ),
    ],
)
def test_folders_that_cannot_be_used_are_named(tmp_path, paths, layout, error, message):
    root = write(tmp_path, *paths)
    with pytest.raises(error, match=message):
        len(Images(root, layout=layout))


def test_other_rejections(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"not a folder.*root"):
        len(Images(str(tmp_path / "none")))
    with rejects("test_share", 1.5):
        Images(str(tmp_path), test_share=1.5)
    root = write(tmp_path, "a/1.jpg", "a/2.jpg", "3.jpg")
    with pytest.warns(UserWarning, match=r"1 of 3 images.*3\.jpg"):
        assert len(Images(root, layout="{class}/*")) == 1


def test_images_of_kinds_that_are_not_read_are_counted(tmp_path):
    root = write(
        tmp_path, "north/a/1.jpg", "north/b/2.jpg", "north/a/3.gif", "north/b/4.TGA", "north/b/5.tga", "north/Thumbs.db"
    )
    left = r"files in .* are skipped \(1 \.gif, 2 \.tga\): convert them to PNG or TIFF to use them"
    with pytest.warns(UserWarning, match=left):
        assert len(Images(root, layout="{client}/{class}/*", test_share=0.5).read_manifest().paths) == 2
    with pytest.warns(UserWarning, match=left):
        assert find_images(tmp_path)[0] == ["north/a/1.jpg", "north/b/2.jpg"]


def rows(count=12):
    return [
        {"file": f"{n}.jpg", "diagnosis": "yx"[n % 2], "site": f"s{n % 3}", "part": "test" if n > 8 else "train",
         "patient": f"p{n // 3}", "odd": n % 2, "many": "|".join("abc"[: n % 4])}
        for n in range(count)
    ]  # fmt: skip


def table(tmp_path, table_rows, name="mine.csv"):
    write(tmp_path, *(row["file"] for row in rows()))
    write_table(tmp_path / name, table_rows)
    return str(tmp_path / name)


def test_a_table_names_all(tmp_path):
    table_set = ImageTable(table(tmp_path, rows()), path="file", label="diagnosis", client="site", split="part", size=4)
    for images, expected in ((table_set, rows()[:9]), (table_set.with_split(False), rows()[9:])):
        assert images.labels.tolist() == [{"x": 0, "y": 1}[row["diagnosis"]] for row in expected]
        assert images.columns["client"].tolist() == [row["site"] for row in expected]
        assert [round(float(images[i][0].float().mean())) for i in range(len(images))] == [
            int(row["file"].split(".")[0]) for row in expected
        ]
    assert (table_set.classes, table_set.group_column) == (("x", "y"), None)
    (tmp_path / "lists").mkdir()
    elsewhere = table(tmp_path, rows(), "lists/mine.csv")
    grouped = ImageTable(elsewhere, folder=str(tmp_path), path="file", label="diagnosis", group="patient")
    assert not {*grouped.columns["group"]} & {*grouped.with_split(False).columns["group"]}


def test_labels_of_several_kinds(tmp_path):
    path = table(tmp_path, rows())
    several = ImageTable(path, path="file", label="many", separator="|", split="part")
    assert several.classes == ("a", "b", "c")
    assert several.labels.tolist() == [[float(n % 4 > k) for k in range(3)] for n in range(9)]
    columns = ImageTable(path, path="file", label=["odd"], split="part")
    assert (columns.classes, columns.labels.tolist()) == (("odd",), [[float(n % 2)] for n in range(9)])


def test_several_labels_without_a_separator_are_noticed(tmp_path):
    table_rows = rows()
    for row, labels in zip(table_rows, ["edema", "mass", "edema;mass", "mass; edema"] * 3, strict=True):
        row["diagnosis"] = labels
    path = table(tmp_path, table_rows)
    with pytest.warns(UserWarning, match=r"mine\.csv: .*diagnosis.*separator=';'"):
        assert len(ImageTable(path, path="file", label="diagnosis").classes) == 4
    assert len(ImageTable(path, path="file", label="diagnosis", separator=";").classes) == 2
    table_rows[0]["diagnosis"] = ""
    with pytest.raises(ValueError, match=r"row 2: diagnosis .*separator=';'"):
        len(ImageTable(table(tmp_path, table_rows), path="file", label="diagnosis"))


def test_spreadsheets_and_tabs_are_read(tmp_path):
    text = "path\tlabel\tclient\n0.jpg\ta\tone\n\n1.jpg\tb\ttwo\n2.jpg\ta\tone\n3.jpg\tb\ttwo\n"
    write(tmp_path, *(f"{n}.jpg" for n in range(4)))
    (tmp_path / "t.tsv").write_bytes(b"\xef\xbb\xbf" + text.encode())
    (tmp_path / "semicolons.csv").write_text(text.replace("\t", ";").replace("\n", "\r\n"))
    (tmp_path / "tabs.csv").write_text(text)
    for name in ("t.tsv", "semicolons.csv", "tabs.csv"):
        table_set = ImageTable(str(tmp_path / name), test_share=0.5)
        both = sorted(names(table_set) + names(table_set.with_split(False)))
        assert (both, {*table_set.columns["client"]}) == ([f"{n}.jpg" for n in range(4)], {"one", "two"})


def test_lists_of_a_parquet_file_are_several_labels(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    write(tmp_path, *(f"{n}.jpg" for n in range(4)))
    result = [["b"], ["a", "b, c"], [], None]
    content = [{"path": f"{n}.jpg", "label": result[n], "split": ("train", "test")[n > 1]} for n in range(4)]
    parquet.write_table(arrow.Table.from_pylist(content), tmp_path / "t.parquet")
    table_set = ImageTable(str(tmp_path / "t.parquet"))
    assert (table_set.classes, table_set.labels.tolist()) == (("a", "b", "b, c"), [[0, 1, 0], [1, 0, 1]])
    assert table_set.with_split(False).labels.tolist() == [[0, 0, 0], [0, 0, 0]]


def test_one_class_alone_is_rejected_for_training(tmp_path):
    write(tmp_path, *(f"a/x/{n}.jpg" for n in range(4)))
    datamodule = FederatedDataModule(dataset=Images(str(tmp_path), size=8), partition=ByDomain("client"), batch_size=4)
    with pytest.raises(ValueError, match=r"one class \(x\)"):
        datamodule.setup()


def test_measured_numbers_are_no_classes(tmp_path):
    write(tmp_path, *(f"{n}.jpg" for n in range(6)))
    for values, rejected in (
        ("0.1 0.2 -3e-1 0.4 0.5 6", True),
        ("0.5 1.5 0.5 1.5 0.5 1.5", False),
        ("1 2 3 4 5 6", False),
    ):
        lines = "".join(f"{n}.jpg,{value},x\n" for n, value in enumerate(values.split()))
        (tmp_path / "t.csv").write_text("path,label,x\n" + lines)
        table_set = ImageTable(str(tmp_path / "t.csv"), test_share=0.1)
        if rejected:
            with pytest.raises(ValueError, match=r"label .*6 different numbers.*0\.1"):
                len(table_set)
        else:
            assert len(table_set.classes) == len(set(values.split()))


def test_paths_with_backslashes_are_found(tmp_path):
    write(tmp_path, "a/0.jpg", "a/1.jpg")
    (tmp_path / "t.csv").write_text("path,label,split\na\\0.jpg,x,train\na\\1.jpg,x,test\n")
    assert ImageTable(str(tmp_path / "t.csv")).manifest.paths == [f"{tmp_path}/a/0.jpg"]


def test_a_link_to_a_folder_above_is_not_followed(tmp_path):
    write(tmp_path, "root/a/x/0.jpg", "root/a/x/1.jpg", "other/y/0.jpg")
    (tmp_path / "root" / "a" / "loop").symlink_to("..")
    (tmp_path / "root" / "a" / "x" / "self").symlink_to(".")
    (tmp_path / "root" / "b").symlink_to(tmp_path / "other")
    assert list_images(tmp_path / "root") == ["a/x/0.jpg", "a/x/1.jpg", "b/y/0.jpg"]


@pytest.mark.parametrize(
    ("file", "proposal"),
    [
        ("a/Test/c/1.jpg", r": set a layout that matches, such as \{client\}/\{split\}/\{class\}/\*$"),
        ("c/1.jpg", r": set a layout that matches, such as \{class\}/\*$"),
        ("a/b/c/1.jpg", r": set a layout that matches, such as \{client\}/\*\*/\{class\}/\*$"),
        ("train/test/c/1.jpg", ": set a layout that matches$"),
        ("1.jpg", ": set a layout that matches$"),
    ],
)
def test_a_layout_is_proposed(tmp_path, file, proposal):
    write(tmp_path, file, file.replace("1", "2"))
    with pytest.raises(FileNotFoundError, match=proposal):
        len(Images(str(tmp_path)))


def test_parquet_says_the_same(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    text = ImageTable(table(tmp_path, rows()), path="file", label="diagnosis", client="site", split="part")
    parquet.write_table(arrow.Table.from_pylist(rows()), tmp_path / "mine.parquet")
    table_set = ImageTable(str(tmp_path / "mine.parquet"), path="file", label="diagnosis", client="site", split="part")
    assert (table_set.manifest.paths, table_set.labels.tolist()) == (text.manifest.paths, text.labels.tolist())
    assert table_set.columns["client"].tolist() == text.columns["client"].tolist()


@pytest.mark.parametrize(
    ("change", "options", "error", "message"),
    [
        ({}, {"label": "diagnoses"}, ValueError, r"mine\.csv.*'diagnoses'.*'diagnosis'"),
        ({}, {"label": "q"}, ValueError, r"'q'.*'file'.*'diagnosis'"),
        ({"file": "9.jpg"}, {}, ValueError, r"mine\.csv, rows 4, 11: files occur more than once"),
        (
            {"file": "no.jpg"},
            {},
            ValueError,
            r"mine\.csv, row 4: .*/no\.jpg does not exist; correct the path, or set fo",
        ),
        ({"file": ""}, {}, ValueError, r"row 4: file is empty; fill in the file's path"),
        ({"diagnosis": ""}, {}, ValueError, r"row 4: diagnosis is empty; fill in a label, or take the row out$"),
        (
            {},
            {"label": "label"},
            ValueError,
            r"mine\.csv.*'label'.*'file'.*'diagnosis'",
        ),
        ({"part": "later"}, {}, ValueError, r"2.*'later'"),
        ({"odd": 2}, {"label": ["odd"]}, ValueError, r"row 4: odd .*'2'"),
        ({"site": ""}, {"client": "site"}, ValueError, r"row 4: site is empty; fill it in"),
    ],
)
def test_rows_that_cannot_be_used_are_named(tmp_path, change, options, error, message):
    table_rows = rows()
    table_rows[2] |= change
    path = table(tmp_path, table_rows)
    with pytest.raises(error, match=message):
        len(ImageTable(path, **{"path": "file", "label": "diagnosis", "split": "part"} | options))


def test_tables_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.csv.*\.csv, \.tsv"):
        len(ImageTable(str(tmp_path / "none.csv")))
    (tmp_path / "short.csv").write_text("path,label\n1.jpg\n")
    with pytest.raises(ValueError, match=r"short\.csv.*row 2 .*1 fields.* 2\)"):
        len(ImageTable(str(tmp_path / "short.csv")))


@pytest.mark.parametrize("kind", ["csv", "tsv", "parquet"])
def test_two_columns_of_one_name_are_rejected(tmp_path, kind):
    table = tmp_path / f"images.{kind}"
    if kind == "parquet":
        arrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(arrow.Table.from_arrays([["a.png"], ["x"], ["y"]], ["path", "label", "label"]), table)
    else:
        mark = "," if kind == "csv" else "\t"
        table.write_text("\n".join([mark.join(["path", "label", "label"]), mark.join(["a.png", "x", "y"])]))
    with pytest.raises(ValueError, match=r"several columns .*'label'"):
        ImageTable(str(table)).with_split(True).labels  # noqa: B018  # it is read


def test_a_file_in_two_spellings_is_one_file(tmp_path):
    write(tmp_path, "a/0.png", "a/1.png", "2.png")
    (tmp_path / "link.png").symlink_to("a/0.png")
    (tmp_path / "linked").symlink_to("a")
    spellings = ["./a/0.png", "a/../a/0.png", "a//0.png", "a\\0.png", "link.png", "linked/0.png"]
    spellings += [str(tmp_path / "a" / "0.png")]
    table = tmp_path / "table.csv"
    for spelling in spellings:
        table.write_text(f"path,label\na/0.png,x\na/1.png,y\n{spelling},y\n")
        with pytest.raises(ValueError, match=rf"rows 2, 4: a/0\.png and {re.escape(spelling)}"):
            len(ImageTable(str(table)))
    # Two files of the same content are two files; `perada data inspect` names them.
    (tmp_path / "copy.png").write_bytes((tmp_path / "a" / "0.png").read_bytes())
    table.write_text("path,label\na/0.png,x\na/1.png,y\ncopy.png,x\n2.png,y\n")
    images = ImageTable(str(table))
    assert len(images) + len(images.with_split(False)) == 4


def test_a_disk_without_case_has_one_file(tmp_path, monkeypatch):
    """As on macOS and Windows, where both names open the same file."""
    write(tmp_path, "A.png", "b.png")
    monkeypatch.setattr("os.path.exists", lambda path: True)
    monkeypatch.setattr("os.path.isfile", lambda path: True)
    monkeypatch.setattr("os.path.samefile", lambda path, other: path.lower() == other.lower())
    (tmp_path / "table.csv").write_text("path,label\nA.png,x\nb.png,y\na.png,y\n")
    with pytest.raises(ValueError, match=r"rows 2, 4: A\.png and a\.png"):
        ImageTable(str(tmp_path / "table.csv")).read_manifest()
