# SPDX-License-Identifier: Apache-2.0
"""Tables in any encoding, folders that systems make, names that look alike, layouts of any depth."""

import unicodedata
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from PIL import Image
from torch.utils.data import TensorDataset

from perada.cli import main
from perada.cli.init import compose_recipe, table_options
from perada.cli.messages import one_line
from perada.core.text import case_variants, look_alike
from perada.data import IID, ByDomain, FederatedData, ImageFolder, Images, ImageTable, UnlabelledFolder
from perada.data.checked import check
from perada.data.partitions.division import Division
from perada.data.sets.layouts import propose_layout
from perada.results.inference import find_images


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_image(path, number=0):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def write_images(*folders, count=4):
    for place, name in enumerate(folders):
        for number in range(count):
            write_image(f"{name}/{number}.png", place * count + number)


TEXT = "path,label,client\nä/1.png,Krähe,Köln\nä/2.png,Möwe,Köln\nä/3.png,Krähe,Łódź\nä/4.png,Möwe,Łódź\n"
WESTERN = TEXT.replace("Łódź", "Metz")


@pytest.fixture
def birds():
    write_images("ä")
    for number in range(1, 5):
        write_image(f"ä/{number}.png", number)


@pytest.mark.every(5)
@pytest.mark.usefixtures("birds")
@pytest.mark.parametrize("ends", ["\n", "\r\n"])
@pytest.mark.parametrize(
    ("content", "encoding"),
    [
        (TEXT.encode(), None),
        (TEXT.encode("utf-8-sig"), None),
        (TEXT.encode("utf-8-sig"), "utf-8"),
        (TEXT.encode("utf-16"), None),
        (TEXT.encode("utf-32"), None),
        (b"\xfe\xff" + TEXT.encode("utf-16-be"), None),
        (b"\xff\xfe" + TEXT.encode("utf-16-le"), "utf-16-le"),
        (TEXT.encode("utf-16-le"), "utf-16-le"),
        (WESTERN.encode("cp1252"), "cp1252"),
        (WESTERN.encode("cp1252"), "latin-1"),
        (TEXT.encode("cp1250", "replace").replace(b"\xe4/", "ä/".encode("cp1250")), "cp1250"),
    ],
)
def test_tables_of_every_encoding(content, encoding, ends):
    Path("t.csv").write_bytes(content if ends == "\n" or b"\0" in content else content.replace(b"\n", b"\r\n"))
    manifest = ImageTable("t.csv", encoding=encoding).read_manifest()
    assert manifest.classes == ("Krähe", "Möwe")
    assert manifest.labels.tolist() == [0, 1, 0, 1]
    assert manifest.columns["client"][0] == "Köln"
    names, paths = find_images(Path("t.csv"), "path", encoding)
    assert names[0] == "ä/1.png" and paths[0].is_file()


@pytest.mark.parametrize(
    ("content", "encoding", "message"),
    [
        (
            WESTERN.encode("cp1252"),
            None,
            r"line 2 has the byte 0xe4, which is 'ä' in Windows-1252, so the file is not UTF-8: ",
        ),
        (WESTERN.encode("cp1252"), "utf-8", r"save it as UTF-8 \(in Excel: CSV UTF-8\), or name its encoding"),
        ("path,label\na,☃\n".encode("utf-16-le"), None, "zero bytes, like UTF-16 without a byte-order mark"),
        (b"path,label\na,\x81\n", "cp1252", "line 2 has the byte 0x81, so the file is not CP1252"),
    ],
)
def test_tables_in_another_encoding_say_what_to_do(content, encoding, message):
    Path("t.csv").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        ImageTable("t.csv", encoding=encoding).read_manifest()


@pytest.mark.parametrize("encoding", ["cp12525", "", "base64", 3])
def test_an_encoding_that_there_is_not(encoding):
    with pytest.raises(ValueError, match=f"encoding={encoding!r} is unknown"):
        ImageTable("t.csv", encoding=encoding)


def test_a_cell_may_hold_any_character():
    """Neither a line separator nor a form feed ends a row, and a quoted line end does not either."""
    write_image("1.png")
    Path("t.csv").write_text('path,label\n1.png,"a\u2028b\x0cc\nd"\n', encoding="utf-8", newline="")
    assert ImageTable("t.csv").listing.columns["label"] == ["a\u2028b\x0cc\nd"]


@pytest.mark.parametrize(("written", "stored"), [("NFC", "NFD"), ("NFD", "NFC")])
def test_paths_in_another_normalisation_are_found(written, stored):
    write_image(unicodedata.normalize(stored, "Häuser/1.png"))
    Path("t.csv").write_text(unicodedata.normalize(written, "path,label\nHäuser\\1.png,a\n"), encoding="utf-8")
    assert Path(ImageTable("t.csv").read_manifest().paths[0]).is_file()
    Path("u.csv").write_text(unicodedata.normalize(written, "path\nHäuser/1.png\n"), encoding="utf-8")
    assert find_images(Path("u.csv"))[1][0].is_file()


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("label", "[1, yes]", r"""no column '\[1, yes\]'.*'--label=\["1", "yes"\]' on the command line"""),
        ("label", "[yes,no]", r"""label: \["yes", "no"\] in a recipe"""),
        ("client", "[1]", r"quote each name"),
    ],
)
def test_lists_on_the_command_line_that_yaml_reads_otherwise(option, value, message):
    Path("t.csv").write_text("path,label,1,yes\nx.png,a,0,1\n")
    with pytest.raises(ValueError, match=message):
        ImageTable("t.csv", **{option: value}).check_column(option, value)


@pytest.mark.parametrize("option", ["label", "classes"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1, 2], "1 is not a string: YAML reads it as a number or a date"),
        ([1.5], "1.5 is not a string: YAML reads it as a number or a date"),
        ([True, False], "True is not a string: YAML reads yes, no, on, off, true and false as Booleans"),
        (["a", None], "None is not a string: YAML reads null and ~ as nothing"),
    ],
)
def test_lists_in_recipes_say_to_quote(option, value, message):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(ImageTable, "table")
    with pytest.raises(Exception, match="Parser key") as error:
        parser.parse_object({"table": {"table": "t.csv", option: value}})
    assert message in one_line(error.value) and "put it in quotes" in one_line(error.value)


SYSTEM = ["$RECYCLE.BIN", "$Recycle.Bin", "System Volume Information", "lost+found", "@eaDir", "#recycle", "#snapshot"]
SYSTEM += ["RECYCLER", "__MACOSX", ".Trashes", ".ipynb_checkpoints", ".Spotlight-V100", "found.000", "@Recycle"]


@pytest.mark.every(4)
@pytest.mark.parametrize("name", SYSTEM)
def test_folders_of_the_system_are_neither_clients_nor_classes(name):
    write_images("data/north/cat", "data/north/dog", "data/south/cat", "data/south/dog")
    write_images(f"data/{name}/cat", f"data/north/{name}", f"data/north/cat/{name}", count=1)
    with pytest.warns(UserWarning, match="Rename") as caught:
        images = Images("data", size=8)
        data = Division(images, ByDomain("client")).share_out()
    assert name in str(caught[0].message)
    assert list(data.client_names) == ["north", "south"] and list(data.classes) == ["cat", "dog"]
    with pytest.warns(UserWarning, match="are skipped"):
        assert len(UnlabelledFolder("data")) == 16
    with pytest.warns(UserWarning, match="are skipped"):
        assert ImageFolder("data/north").classes == ("cat", "dog")
    with pytest.warns(UserWarning, match="are skipped"):
        assert set(ImageFolder("data", domains=True).columns["domain"]) == {"north", "south"}
    with pytest.warns(UserWarning, match="are skipped"):
        assert len(find_images(Path("data"))[0]) == 16


@pytest.mark.every(4)
@pytest.mark.parametrize("name", SYSTEM)
def test_folders_of_the_system_without_images_are_not_mentioned(name):
    write_images("data/cat", "data/dog")
    for place in (f"data/{name}", f"data/cat/{name}"):
        Path(place).mkdir()
        for file in ("desktop.ini", "Thumbs.db", ".DS_Store", "._1.png"):
            Path(place, file).write_bytes(b"x")
    for file in ("desktop.ini", "Thumbs.db", ".DS_Store", "._1.png"):
        Path("data/cat", file).write_bytes(b"x")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ImageFolder("data").classes == ("cat", "dog")
        assert ImageFolder("data").manifest.classes == ("cat", "dog")


ALIKE = [
    ("caf\xe9", "cafe\u0301"),
    ("cat", "cat\u200b"),
    ("cat", "\ufeffcat"),
    ("cat", "cat "),
    ("big cat", "big\xa0cat"),
    ("big cat", "big  cat"),
    ("co-op", "co\u2011op"),
    ("cat", "c\xadat"),
    ("cat", "c\u0430t"),
    ("heart", "heart\ufe0f"),
]


@pytest.mark.parametrize(("one", "other"), ALIKE)
def test_names_that_look_alike_are_warned_of(one, other):
    assert look_alike([one, "dog", other, one]) == [[one, other]]
    message = "look the same but are different"
    write_images(f"clients/{one}/x", f"clients/{other}/x", f"clients/{one}/y")
    with pytest.warns(UserWarning, match=rf"the clients .* {message} clients") as caught:
        Division(Images("clients", size=8), ByDomain("client")).share_out()
    # Both are shown so that they can be told apart.
    assert ascii(one) in str(caught[0].message) and ascii(other) in str(caught[0].message)
    write_images(f"classes/{one}", f"classes/{other}", "classes/z")
    with pytest.warns(UserWarning, match=rf"the classes .* {message} classes"):
        Division(ImageFolder("classes", size=8), IID(1)).share_out()
    labels = [one, other, "dog"]
    items = [{"image": torch.zeros(3, 8, 8, dtype=torch.uint8), "label": label} for label in labels]
    with pytest.warns(UserWarning, match=r"labels .*look the same"):
        check(FederatedData([items]))
    rows = "".join(f"classes/z/{number}.png,a,{group}\n" for number, group in enumerate([one, other, "p", "q"]))
    Path("t.csv").write_text(f"path,label,patient\n{rows}", encoding="utf-8")
    with pytest.warns(UserWarning, match=r"groups .*look the same"):
        _ = ImageTable("t.csv", group="patient").manifest
    with pytest.raises(ValueError, match=r"class .*different name"):
        _ = ImageFolder("classes", classes=[one, "z", "dog"]).manifest


@pytest.mark.parametrize("names", [["A", "a"], ["1", "10"], ["a b", "ab"], ["é", "e"], ["cat", "cats"]])
def test_names_that_a_reader_can_tell_apart_are_not(names):
    assert look_alike(names) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ones = TensorDataset(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.arange(2))
        FederatedData([ones], classes=names)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("hospital", "Hospital"),
        ("hospital", "Hospital "),
        ("st. mary", "ST. MARY"),
        ("caf\xe9", "CAFE\u0301"),
        ("\xfcnal", "\xdcNAL"),
        ("north\xa0wing", "North  Wing"),
    ],
)
def test_names_that_differ_only_in_case_are_warned_of(one, other):
    """Of clients in folders, of classes in folders, of labels that are words, of groups in a table, and by name."""
    assert case_variants([one, "dog", other, one]) == [[one, other]]
    message = "are different {} but differ only in capitals and spaces".format
    write_images(f"clients/{one}/x", f"clients/{other}/x", f"clients/{one}/y")
    with pytest.warns(UserWarning, match=message("clients,")) as caught:
        Division(Images("clients", size=8), ByDomain("client")).share_out()
    assert ascii(one) in str(caught[0].message) and ascii(other) in str(caught[0].message)
    write_images(f"classes/{one}", f"classes/{other}", "classes/z")
    with pytest.warns(UserWarning, match=message("classes,")):
        Division(ImageFolder("classes", size=8), IID(1)).share_out()
    items = [{"image": torch.zeros(3, 8, 8, dtype=torch.uint8), "label": label} for label in (one, other, "dog")]
    with pytest.warns(UserWarning, match=message("labels,")):
        check(FederatedData([items]))
    rows = "".join(f"classes/z/{number}.png,a,{group}\n" for number, group in enumerate([one, other, "p", "q"]))
    Path("t.csv").write_text(f"path,label,patient\n{rows}", encoding="utf-8")
    with pytest.warns(UserWarning, match=message("groups,")):
        _ = ImageTable("t.csv", group="patient").manifest
    ones = TensorDataset(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.arange(2))
    with pytest.warns(UserWarning, match=message("clients,")):
        FederatedData([ones, ones], client_names=[one, other])


def test_names_of_one_letter_may_differ_in_case():
    """An alphabet has classes A and a. Three names are one warning, beside that of two that look the same."""
    assert case_variants(["A", "a", "b", "B "]) == []
    assert case_variants(["Cat", "cat", "cat "]) == [["Cat", "cat", "cat "]]
    assert case_variants(["cat", "cat "]) == []  # these look the same, which has a warning of its own


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("file", "layout"),
    [
        ("cat/1.png", "{class}/*"),
        ("site/cat/1.png", "{client}/{class}/*"),
        ("site/2024/cat/1.png", "{client}/**/{class}/*"),
        ("site/2024/may/cat/1.png", "{client}/**/{class}/*"),
        ("site/2024/may/3/cat/1.png", "{client}/**/{class}/*"),
        ("train/site/2024/may/cat/1.png", "{split}/{client}/**/{class}/*"),
        ("site/2024/train/cat/1.png", "{client}/**/{split}/{class}/*"),
        ("site/2024/cat/train/1.png", "{client}/**/{class}/{split}/*"),
        ("1.png", ""),
    ],
)
def test_layouts_of_any_depth_are_proposed(file, layout):
    assert propose_layout([file]) == layout
    if layout:
        for part in ("cat", "dog"):
            write_image("data/" + file.replace("cat", part), len(part) + ord(part[0]))
        with pytest.raises(FileNotFoundError, match="set a layout") as error:
            _ = Images("data", layout="{client}/x/{class}/y/*").manifest
        assert layout in str(error.value)


def test_the_layout_that_fits_most_files_is_proposed():
    files = ["a.png", "north/cat/1.png", "north/2024/cat/1.png", "north/2024/may/cat/1.png", "south/dog/1.png"]
    assert propose_layout(files) == "{client}/**/{class}/*"


def test_init_reads_deep_folders_and_names_what_it_cannot_read():
    write_images("data/north/2024/may/cat", "data/north/2024/may/dog", "data/south/2023/june/cat")
    options = yaml.safe_load(compose_recipe("data", "fedavg", "3", ""))["data"]["dataset"]["init_args"]
    assert options == {"root": "data", "layout": "{client}/**/{class}/*"}
    write_images("flat")
    with pytest.raises(ValueError, match=r"'flat'.*4 images"):
        compose_recipe("flat", "fedavg", "3", "")
    write_images("twice/train/val/cat")
    with pytest.raises(ValueError, match=r"'train/val/cat/0\.png'.*layout"):
        compose_recipe("twice", "fedavg", "3", "")


HEADERS = [
    ("path,label", {}),
    ("path,label,client", {}),
    ("file,finding,hospital", {"path": "file", "label": "finding", "client": "hospital"}),
    ("Image Path,Diagnosis,Patient ID", {"path": "Image Path", "label": "Diagnosis", "group": "Patient ID"}),
    ("filename,species", {"path": "filename", "label": "species"}),
    ("photo,class", {"path": "photo", "label": "class"}),
    ("label,path,site", {"client": "site"}),
]


@pytest.mark.every(4)
@pytest.mark.parametrize(("header", "expected"), HEADERS)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_init_reads_the_header_of_a_table(header, expected, encoding):
    write_images("scans", count=24)
    kinds = {"path": range(24), "label": "ab", "client": ["north", "south"], "group": range(12)}
    roles = {expected.get(role, role): role for role in kinds}
    rows = [header]
    for number in range(24):
        cells = {"path": f"scans/{number}.png", "label": "ab"[number % 2], "client": f"site {number % 3}"}
        cells |= {"group": f"p{number // 2}"}
        rows.append(",".join(cells[roles[name]] for name in header.split(",")))
    Path("t.csv").write_text("\n".join(rows) + "\n", encoding=encoding)
    assert table_options("t.csv") == {"table": "t.csv"} | expected
    written = yaml.safe_load(compose_recipe("t.csv", "fedavg", "3", ""))
    assert written["data"]["dataset"] == {"class_path": "ImageTable", "init_args": {"table": "t.csv"} | expected}
    has_clients = "client" in header or "client" in expected
    assert (written["data"]["partition"]["class_path"] == "ByDomain") == has_clients


def test_init_finds_columns_of_zeros_and_ones_several_labels_and_another_folder():
    write_images("scans", count=4)
    rows = [f"scans/{number}.png,{number % 2},{number // 2},{number}" for number in range(4)]
    Path("t.csv").write_text("\n".join(["path,edema,fracture,age", *rows]))
    assert table_options("t.csv") == {"table": "t.csv", "label": ["edema", "fracture"]}
    labels = ["a|b", "a", "b", ""]
    rows = [f"scans/{number}.png,{labels[number]}" for number in range(4)]
    Path("tables").mkdir()
    Path("tables/t.csv").write_text("\n".join(["path,labels", *rows]))
    expected = {"table": "tables/t.csv", "folder": ".", "label": "labels", "separator": "|"}
    assert table_options("tables/t.csv") == expected
    assert "separator" in compose_recipe("tables/t.csv", "fedavg", "3", "")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("a,b\n1,2\n", "images='t.csv' has no column of image files among 'a', 'b'; rename the column to 'path'"),
        ("path,x,y2\n0.png,1,5\n1.png,2,6\n", "the column of the labels cannot be inferred from 'path', 'x', 'y2'"),
        ("path,label\nmissing.png,a\n", "missing.png does not exist; correct the path, or set folder"),
        ("path,label\n0.png,\n1.png,a\n", "label is empty; fill in a label"),
    ],
)
def test_init_names_what_a_table_lacks(table, message):
    write_images(".", count=2)
    Path("t.csv").write_text(table)
    with pytest.raises(ValueError, match=message):
        compose_recipe("t.csv", "fedavg", "3", "")


@pytest.mark.slow
@pytest.mark.parametrize("header", ["file,finding,hospital", "filename,species"])
def test_check_accepts_what_init_writes_for_a_table(header, capsys):
    write_images("scans", count=40)
    columns = len(header.split(","))
    rows = [",".join([f"scans/{n}.png", "ab"[n % 2], f"site {n % 3}"][:columns]) for n in range(40)]
    Path("t.csv").write_text("\n".join([header, *rows]))
    main(["init", "--yes", "--images=t.csv"])
    small = [
        "--model.backbone=test_resnet",
        "--model.pretrained=false",
        "--data.image_size=32",
        "--trainer.accelerator=cpu",
    ]
    main(["check", "--config", "recipe.yaml", *small])
    assert "error" not in capsys.readouterr().out.lower()
