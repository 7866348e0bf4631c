# SPDX-License-Identifier: Apache-2.0
"""Sets with DICOM files: mixed with others, patients as groups, frames, no identifiers, and one preprocessing."""

import csv
import hashlib
import io
import json
import sys
import warnings
from collections import defaultdict

import numpy as np
import pytest
import torch
from PIL import Image

import perada
from perada.cli import main
from perada.data import ByDomain, FederatedDataModule, ImageFolder, Images, ImageTable, UnlabelledFolder
from perada.data.batches.transforms import read_image
from perada.data.broken_images import without_broken
from perada.data.medical import dicom, reading
from perada.data.medical.facts import header_facts
from perada.data.medical.reading import MedicalReading, medical_kind
from perada.data.preprocessing import Preprocessing
from perada.data.sets.medical_rows import SALT_VARIABLE
from tests.data.dicom_files import TEST_FILES, linear, pydicom, write
from tests.rejections import raises_naming, rejects

SIDE = 8
NAME = "Quetzalcoatl^Xochitl"
NUMBERS = ("MRN7741903", "MRN7741904", "MRN7741905", "MRN7741906", "MRN7741907")
BIRTH = "19330417"
ACCESSION = "ACC55501"
STUDY = "1.2.826.0.1.3680043.8.498.7741"
IDENTIFIERS = (NAME, "Quetzalcoatl", "Xochitl", *NUMBERS, BIRTH, ACCESSION, STUDY)


def pixels_of(seed):
    return np.random.default_rng(seed).integers(-500, 500, (SIDE, SIDE)).astype(np.int16)


def hospitals(root, extension=".dcm"):
    """Two hospitals with two classes, five patients each, and files that differ between the hospitals."""
    number = 0
    for client, manufacturer, bits in (("north", "Alpha", 16), ("south", "Beta", 12)):
        for label in ("benign", "malignant"):
            for patient in NUMBERS:
                for _ in range(2):
                    number += 1
                    write(
                        root / client / label / f"{number:03d}{extension}", pixels_of(number),
                        PatientID=patient, PatientName=NAME, PatientBirthDate=BIRTH, AccessionNumber=ACCESSION,
                        StudyInstanceUID=f"{STUDY}.{int(patient[-2:])}", Manufacturer=manufacturer, BitsStored=bits,
                        WindowCenter="0", WindowWidth="800" if client == "north" else "900",
                        RescaleSlope="1", RescaleIntercept="0", PixelSpacing=["0.5", "0.5"],
                    )  # fmt: skip
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return hospitals(tmp_path_factory.mktemp("hospitals"))


def patient_of(path):
    return pydicom.dcmread(path).PatientID


def test_dicom_files_are_read_beside_others(tmp_path):
    for part in ("train", "test"):
        values = pixels_of(1)
        write(tmp_path / part / "a" / "1.dcm", values, WindowCenter="0", WindowWidth="600")
        # As a PACS exports them: the name is a UID, and a DICOMDIR lists the files.
        write(tmp_path / part / "a" / "1.2.840.7", values, WindowCenter="0", WindowWidth="600")
        (tmp_path / part / "a" / "DICOMDIR").write_bytes((TEST_FILES / "dicomdirtests" / "DICOMDIR").read_bytes())
        grey = np.rint(linear(values, 0, 600)).astype(np.uint8)
        (tmp_path / part / "b").mkdir()
        Image.fromarray(grey).save(tmp_path / part / "b" / "2.png")
    images = ImageFolder(str(tmp_path), size=SIDE)
    assert sorted(file.rpartition("/")[2] for file in images.files) == ["1.2.840.7", "1.dcm", "2.png"]
    shown = [image for image, _ in images]
    assert (shown[0] == shown[1]).all() and (shown[1] == shown[2]).all()
    assert len(UnlabelledFolder(str(tmp_path), size=SIDE)) == 6


def test_a_table_lists_dicom_files_with_a_window_for_all(root, tmp_path):
    with open(tmp_path / "table.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "label"])
        for path in sorted(root.rglob("*.dcm")):
            rows.writerow([path, path.parent.name])
    images = ImageTable(str(tmp_path / "table.csv"), size=SIDE, window=[100, 300], gray=True)
    for row in range(0, len(images), 3):
        expected = linear(pydicom.dcmread(images.files[row]).pixel_array, 100, 300)
        assert np.abs(images[row][0][0].numpy() - expected).max() <= 0.5


@pytest.mark.parametrize("group", ["patient", "study"])
def test_files_of_a_patient_are_on_one_side(root, group):
    images = Images(str(root), size=SIDE, dicom_group=group, test_share=0.4)
    sides = defaultdict(set)
    for side in (images, images.with_split(False)):
        assert len(side)
        for file in side.files:
            sides[patient_of(file)].add(side.train)
    assert {*map(len, sides.values())} == {1}
    # Validation images, too, are whole groups.
    assert images.group_column == "group" and len({*images.columns["group"]}) == len({*map(patient_of, images.files)})


def test_without_groups_each_file_has_its_side(root):
    images = Images(str(root), size=SIDE, dicom_group=None, test_share=0.4)
    assert images.group_column is None
    sides = {patient_of(file) for file in images.files} & {patient_of(file) for file in images.with_split(False).files}
    assert sides


def test_a_patient_on_both_sides_of_a_given_split_is_rejected(tmp_path):
    for part, number in (("train", 0), ("train", 1), ("test", 1)):
        for label in ("a", "b"):
            write(tmp_path / part / label / f"{number}.dcm", pixels_of(number), PatientID=NUMBERS[number])
    with pytest.raises(ValueError, match="both training and test images of the group") as caught:
        ImageFolder(str(tmp_path), size=SIDE).manifest  # noqa: B018  # read when it is first used
    assert not any(word in str(caught.value) for word in IDENTIFIERS)


def test_other_images_keep_their_side_when_dicom_files_come(root, tmp_path):
    for label in ("benign", "malignant"):
        for number in range(30):
            path = tmp_path / "north" / label / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels_of(number).view(np.uint16)).save(path)
    before = {*Images(str(tmp_path), size=SIDE).with_split(False).files}
    for path in (root / "north").rglob("*.dcm"):
        (tmp_path / path.relative_to(root)).write_bytes(path.read_bytes())
    after = {*Images(str(tmp_path), size=SIDE).with_split(False).files}
    assert before == {file for file in after if file.endswith(".png")}


def test_a_salt_changes_what_identities_are(root, monkeypatch):
    identities = set(Images(str(root), size=SIDE).identities.tolist())
    plain = {hashlib.sha256(number.encode()).hexdigest() for number in NUMBERS}
    monkeypatch.setenv(SALT_VARIABLE, "a secret")
    salted = set(Images(str(root), size=SIDE).identities.tolist())
    assert not identities & plain and not identities & salted


def test_a_single_identifier_is_warned_of(tmp_path):
    for label in ("a", "b"):
        for number in range(4):
            write(tmp_path / "north" / label / f"{number}.dcm", pixels_of(number), PatientID="ANONYMOUS")
    with pytest.warns(UserWarning, match="north .*patient.*dicom_group") as caught:
        Images(str(tmp_path), size=SIDE, classes=["a", "b"]).manifest  # noqa: B018  # read when it is first used
    assert "ANONYMOUS" not in str(caught[0].message)


@pytest.mark.parametrize(
    ("frames", "expected"), [("middle", [3]), ("all", [1, 2, 3, 4, 5]), (2, [1, 3, 5]), (9, [1])], ids=str
)
def test_frames_of_a_file_are_images_of_one_group(tmp_path, frames, expected):
    stack = np.stack([np.full((SIDE, SIDE), 10 * number, np.uint8) for number in range(1, 6)])
    for part in ("train", "test"):
        for label in ("a", "b"):
            write(tmp_path / part / label / f"{part}.dcm", stack, PatientID=f"{part}{label}")
            Image.fromarray(stack[int(label == "b")]).save(tmp_path / part / label / "x.png")
    images = ImageFolder(str(tmp_path), size=SIDE, frames=frames, gray=True)
    shown = [int(images[row][0].unique()) for row in range(len(images)) if ".png" not in images.files[row]]
    assert shown == [10 * number for number in expected] * 2
    groups = images.columns["group"].tolist()
    assert len({*groups}) == 4
    assert len({*images.identities.tolist()}) == 4
    # The digests in a fingerprint differ between frames.
    assert len({images.digest(file) for file in images.files}) == len(images)


def test_frames_without_any_identifier_are_a_group(tmp_path):
    stack = np.stack([pixels_of(number) for number in range(4)])
    for label in ("a", "b"):
        for number in range(5):
            write(tmp_path / "north" / label / f"{number}.dcm", stack + np.int16(number))
    images = Images(str(tmp_path), size=SIDE, frames="all", test_share=0.4)
    other = images.with_split(False)
    train, test = ({file.rpartition("#")[0] for file in side.files} for side in (images, other))
    assert len(images) + len(other) == 40 and len(train) + len(test) == 10 and not train & test


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"window": "lungs"}, "window"),
        ({"frames": 0}, "frames"),
        ({"frames": "first"}, "frames"),
        ({"axis": "z"}, "axis"),
        ({"foreground_only": "yes"}, "foreground_only"),
        ({"dicom_group": "name"}, "dicom_group"),
    ],
)
def test_invalid_options_are_rejected(options, name):
    with rejects(name, options[name]):
        Images("images", **options)


def test_foreground_without_masks_is_rejected(root):
    with rejects("foreground_only", True):
        Images(str(root), foreground_only=True).manifest  # noqa: B018  # read when it is first used


def test_one_line_names_the_extra_where_it_is_missing(root, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(ModuleNotFoundError, match=r"north/benign/001\.dcm.*perada\[medical\]"):
        Images(str(root), size=SIDE).manifest  # noqa: B018  # read when it is first used
    with pytest.raises(ModuleNotFoundError, match=r"perada\[medical\]"):
        read_image(root / "north" / "benign" / "001.dcm", "")
    for path in root.rglob("*.dcm"):
        target = tmp_path / path.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
        Image.fromarray(np.zeros((4, 4), np.uint8)).save(target.with_suffix(".png"))
    with pytest.warns(UserWarning, match=r"40 DICOM.*perada\[medical\]"):
        assert all(file.endswith(".png") for file in Images(str(tmp_path), size=SIDE).read_manifest().paths)


def test_broken_files_are_skipped_or_named(root, tmp_path):
    for path in root.rglob("*.dcm"):
        target = tmp_path / path.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    broken = tmp_path / "north" / "benign" / "001.dcm"
    broken.write_bytes(broken.read_bytes()[:-20])
    report = tmp_path / "south" / "malignant" / "report.dcm"
    report.write_bytes((TEST_FILES / "reportsi.dcm").read_bytes())
    images = Images(str(tmp_path), size=SIDE, classes=["benign", "malignant"], dicom_group=None, test_share=0.4)
    data = FederatedDataModule(dataset=images, partition=ByDomain("client")).division.share_out()
    with raises_naming(ValueError, "001.dcm", "truncated", "report.dcm", "on_broken"):
        without_broken(data, "raise", 0)
    with pytest.warns(UserWarning, match="2 images cannot be read"):
        kept = without_broken(data, "skip", 0)
    counts = [sum(len(part) for part in parts) for parts in (data.train, data.test, kept.train, kept.test)]
    assert sum(counts[:2]) - sum(counts[2:]) == 2


def test_the_reading_is_part_of_the_preprocessing(root):
    images = Images(str(root), size=SIDE, window=[50, 200], frames=3, gray=True)
    module = FederatedDataModule(dataset=images, partition=ByDomain("client"), batch_size=4)
    module.setup()
    record = json.loads(json.dumps(module.preprocessing.record()))
    assert record["medical"] == {"window": [50.0, 200.0], "frames": 3, "axis": "axial"}
    preprocessing = Preprocessing.from_record(record)
    assert preprocessing.medical == MedicalReading((50.0, 200.0), 3)
    for row in range(0, len(images), 5):
        assert (preprocessing.stored(images.files[row]) == images[row][0]).all()
        assert preprocessing.own_size(images.files[row]) == (SIDE, SIDE)
    # A run of an earlier version.
    del record["medical"]
    assert Preprocessing.from_record(record).medical == MedicalReading()


def files_below(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def test_no_file_and_no_message_has_an_identifier(root, tmp_path, monkeypatch, capsys):
    """Nor has one a hash of an identifier without salt, or the salted one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    options = [
        "--config=images/fedavg", f"--data.dataset.root={root}", "--data.dataset.size=32", "--data.image_size=32",
        "--model.backbone=test_resnet", "--model.pretrained=false", "--trainer.max_epochs=1",
        "--data.dataset.window=[0, 700]", "--data.batch_size=4", "--trainer.accelerator=cpu",
        "--trainer.default_root_dir=out",
    ]  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main(["fit", *options])
        folder = next((tmp_path / "out").rglob("run.json")).parent
        main(["data", "inspect", str(root), "--json"])
        main(["predict", str(folder), "--images", str(root), "--client", "north", "--output", "predictions.csv"])
    images = Images(str(root), size=SIDE)
    identities = images.identities.tolist()
    # Messages may name groups.
    assert {*images.columns["group"]} <= {*images.files}
    hashes = [kind(word.encode()).hexdigest() for word in IDENTIFIERS for kind in (hashlib.sha256, hashlib.md5)]
    output = "".join(capsys.readouterr()).encode()
    contents = {str(path): path.read_bytes() for path in files_below(tmp_path)} | {"output": output}
    assert len(contents) > 8 and any("predictions" in name for name in contents)
    for name, content in contents.items():
        for word in (*IDENTIFIERS, *hashes, *identities):
            assert word.encode() not in content, f"{name} has {word}"
    run = json.loads((folder / "run.json").read_text())
    assert run["info"]["preprocessing"]["medical"]["window"] == [0.0, 700.0]


def test_errors_have_no_value_of_a_header(tmp_path):
    """Damage may move a name into the place of a number."""
    path = write(tmp_path / "x.dcm", pixels_of(0), RescaleSlope="1", RescaleIntercept="0", WindowCenter="40")
    content = path.read_bytes()
    for keyword in ("RescaleSlope", "WindowCenter"):
        tag = pydicom.datadict.tag_for_keyword(keyword)
        place = content.index(tag.to_bytes(4, "big")[1::-1] + tag.to_bytes(4, "big")[:1:-1])
        name = NAME.encode() + b" "
        length = int.from_bytes(content[place + 6 : place + 8], "little")
        moved = content[: place + 6] + len(name).to_bytes(2, "little") + name + content[place + 8 + length :]
        (tmp_path / "y.dcm").write_bytes(moved)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with pytest.raises(ValueError, match=keyword) as error:
                read_image(tmp_path / "y.dcm", "")
        assert "Quetzal" not in f"{error.value}{[str(warning.message) for warning in caught]}"


def test_contents_without_a_file_are_read_and_described(root):
    """As of sets of Hugging Face."""
    content = io.BytesIO((root / "south" / "benign" / "021.dcm").read_bytes())
    assert medical_kind(content) == "DICOM"
    assert read_image(content, "").shape == (1, SIDE, SIDE)
    facts = header_facts(content, "DICOM")
    assert facts["manufacturer"] == "Beta" and facts["size"] == f"{SIDE} x {SIDE}"


def test_inspection_says_how_scanners_differ(root, capsys):
    main(["data", "inspect", str(root)])
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if line.startswith("- ")]
    assert any("north" in line and "Alpha" in line and "width 800" in line and "0.5 x 0.5" in line for line in lines)
    differing = printed.partition("What differs")[2]
    for name, north, south in (("manufacturer", "Alpha", "Beta"), ("bits", "16 of 16", "12 of 16")):
        assert any(line.startswith(f"- {name}") and north in line and south in line for line in differing.splitlines())
    assert "photometric" not in differing and "modality" not in differing
    main(["data", "inspect", str(root), "--json"])
    headers = json.loads(capsys.readouterr().out)["headers"]
    assert [client["manufacturer"] for client in headers] == [{"Alpha": 20}, {"Beta": 20}]


@pytest.fixture(scope="module")
def run_folder(root, tmp_path_factory):
    """A saved run that was trained on each second frame of a window."""
    images = Images(str(root), size=32, window=[0, 300], frames=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = perada.finetune(
            "test_resnet", FederatedDataModule(dataset=images, partition=ByDomain("client"), batch_size=4),
            pretrained=False, adapter="head", algorithm="fedavg", rounds=1, logger=False,
            enable_progress_bar=False, accelerator="cpu",
        )  # fmt: skip
    folder = tmp_path_factory.mktemp("run")
    run.export(folder)
    return folder


def test_a_saved_run_predicts_files_and_frames_as_it_was_trained(run_folder, tmp_path, capsys):
    stack = np.stack([pixels_of(number) for number in range(5)])
    write(tmp_path / "scans" / "cine.dcm", stack)
    grey = [np.rint(linear(stack[index], 0, 300)).astype(np.uint8) for index in (0, 2, 4)]
    main(["predict", str(run_folder), "--images", str(tmp_path / "scans"), "--output", str(tmp_path / "p.csv")])
    with open(tmp_path / "p.csv") as file:
        rows = list(csv.reader(file))[1:]
    assert [row[0] for row in rows] == ["cine.dcm#1", "cine.dcm#3", "cine.dcm#5"]
    run = perada.Run.load(run_folder)
    expected = run.predict([torch.from_numpy(image).unsqueeze(0) for image in grey])
    paths = [str(tmp_path / "scans" / f"cine.dcm#{number}") for number in (1, 3, 5)]
    assert torch.equal(run.predict(paths).probabilities, expected.probabilities)


def test_a_recipe_is_written_for_dicom_files(root, tmp_path, capsys):
    main(["init", "--images", str(root), "--output", str(tmp_path / "recipe.yaml"), "--yes"])
    assert "{client}/{class}" in (tmp_path / "recipe.yaml").read_text()
    assert not any(word in capsys.readouterr().out for word in IDENTIFIERS)


def test_set_up_decodes_each_file_once_and_parses_it_once(root, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    decoded = []
    parsed = []
    decode = reading.decode_dicom
    parse = dicom.read_dataset

    def counted_decode(source, *arguments):
        decoded.append(str(source))
        return decode(source, *arguments)

    def counted_parse(*arguments, **options):
        parsed.append(arguments)
        return parse(*arguments, **options)

    monkeypatch.setattr(reading, "decode_dicom", counted_decode)
    monkeypatch.setattr(dicom, "read_dataset", counted_parse)
    images = Images(str(root), size=SIDE)
    FederatedDataModule(dataset=images, partition=ByDomain("client"), batch_size=4).setup()
    files = len([*root.rglob("*.dcm")])
    # A few images of each client are looked at again.
    assert len({*decoded}) == files and len(decoded) <= 1.25 * files
    assert len(parsed) == len(decoded)
