# SPDX-License-Identifier: Apache-2.0
"""Faults of 25 kinds, each at one of four sites: who sees them, the site itself and the server, which has sums."""

import csv
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from perada.data import ImageMasks, Images, ImageTable
from perada.survey.counting import survey_images
from perada.survey.findings import compare_with_others, describe_total
from perada.survey.images import images_of_source
from perada.survey.layout import Layout
from perada.survey.options import SurveyOptions
from tests.data.dicom_files import write as write_dicom

SITES = ("north", "east", "south", "west")
ODD = "south"
CLASSES = ("benign", "malignant")
NUM_IMAGES = 24
SIZE = 48


def pixels_of(rng, label):
    """A dark picture with a spot, which is brighter if it is malignant."""
    pixels = rng.integers(10, 60, (SIZE, SIZE))
    pixels[16:32, 16:32] += 60 + 60 * label
    return pixels.astype(np.uint8)


def labels_of_site():
    """A third is malignant."""
    return [int(number % 3 == 0) for number in range(NUM_IMAGES)]


class Photographs:
    """PNG files, and a table with their labels and patients."""

    classes = CLASSES

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir(parents=True)
        rng = np.random.default_rng(SITES.index(folder.name))
        self.rows = []
        for number, label in enumerate(labels_of_site()):
            Image.fromarray(pixels_of(rng, label)).save(folder / f"{number}.png")
            self.rows.append({"path": f"{number}.png", "label": CLASSES[label], "group": f"p{number // 2}"})

    def files(self):
        return sorted(self.folder.glob("*.png"))

    def change_pixels(self, change):
        for file in self.files():
            changed = change(np.asarray(Image.open(file)))
            Image.fromarray(changed).save(file)

    def source(self):
        with (self.folder / "labels.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, ["path", "label", "group"])
            writer.writeheader()
            writer.writerows(self.rows)
        return ImageTable(str(self.folder / "labels.csv"), size=32)


class Masks:
    """PNG files with masks of two classes."""

    classes = ("background", "lesion")

    def __init__(self, folder):
        self.folder = folder
        rng = np.random.default_rng(SITES.index(folder.name))
        for kind in ("images", "masks"):
            (folder / kind).mkdir(parents=True)
        for number in range(NUM_IMAGES):
            Image.fromarray(pixels_of(rng, 1)).save(folder / "images" / f"{number}.png")
            mask = np.zeros((SIZE, SIZE), np.uint8)
            mask[16:32, 16:32] = 1
            Image.fromarray(mask).save(folder / "masks" / f"{number}.png")

    def source(self):
        return ImageMasks(str(self.folder), size=32)


class Scans:
    """DICOM files of 12 bits in folders of classes."""

    classes = CLASSES

    def __init__(self, folder):
        self.folder = folder
        self.write()

    def write(self, bits=12, **elements):
        shutil.rmtree(self.folder, ignore_errors=True)
        rng = np.random.default_rng(SITES.index(self.folder.name))
        for number, label in enumerate(labels_of_site()):
            subfolder = self.folder / CLASSES[label]
            subfolder.mkdir(parents=True, exist_ok=True)
            pixels = pixels_of(rng, label).astype(np.uint16) * 16
            if bits == 8:
                pixels = (pixels // 16).astype(np.uint8)
            header = {"BitsStored": bits, "HighBit": bits - 1, "Modality": "CR", "PatientID": f"{number // 2}"}
            write_dicom(subfolder / f"{number}.dcm", pixels, **(header | elements))

    def source(self):
        return Images(str(self.folder), layout="{class}/*", size=32)


def invert_greys(site):
    site.change_pixels(lambda pixels: 255 - pixels)


def spell_class_differently(site):
    for row in site.rows:
        row["label"] = row["label"].replace("malignant", "Malignant")


def lack_class(site):
    site.rows = [row for row in site.rows if row["label"] == "benign"]


def have_another_class(site):
    for row in site.rows[:8]:
        row["label"] = "unclear"


def have_no_labels(site):
    for row in site.rows:
        row["label"] = ""


def have_copies(site):
    for number in range(6):
        shutil.copy(site.folder / f"{number}.png", site.folder / f"copy{number}.png")
        site.rows.append(site.rows[number] | {"path": f"copy{number}.png"})


def contradict_labels(site):
    have_copies(site)
    for row in site.rows[-6:]:
        row["label"] = "benign" if row["label"] == "malignant" else "malignant"


def truncate_files(site):
    for file in site.files()[:6]:
        file.write_bytes(file.read_bytes()[:-400])


def lose_files(site):
    for file in site.files()[:6]:
        file.unlink()


def have_colours(site):
    site.change_pixels(lambda pixels: np.stack([pixels] * 3, 2))


def shrink(site):
    site.change_pixels(lambda pixels: np.kron(pixels, np.ones((8, 8), np.uint8)))


def have_blank_images(site):
    for file in site.files()[:6]:
        Image.fromarray(np.zeros((SIZE, SIZE), np.uint8)).save(file)


def have_one_patient(site):
    for row in site.rows:
        row["group"] = "anonymous"


def use_12_of_16_bits(site):
    site.change_pixels(lambda pixels: pixels.astype(np.uint16) * 16)


def exchange_classes(site):
    for row in site.rows:
        row["label"] = "benign" if row["label"] == "malignant" else "malignant"


def have_images_of_another_site(site):
    for file in site.files():
        shutil.copy(site.folder.parent / "north" / file.name, file)


def have_another_window(site):
    site.write(WindowCenter=2000, WindowWidth=100)


def have_another_spacing(site):
    site.write(PixelSpacing=[2, 2])


def name_no_patients(site):
    for row in site.rows:
        row["group"] = ""


def mirror(site):
    site.change_pixels(np.fliplr)


def save_masks_as_0_and_255(site):
    for file in (site.folder / "masks").iterdir():
        Image.fromarray(np.asarray(Image.open(file)) * 255).save(file)


def exchange_foreground(site):
    for file in (site.folder / "masks").iterdir():
        Image.fromarray(1 - np.asarray(Image.open(file))).save(file)


def have_8_bits(site):
    site.write(bits=8)


def have_another_modality(site):
    site.write(Modality="US")


def encrypt(site):
    for file in sorted(site.folder.rglob("*.dcm"))[:6]:
        file.write_bytes(np.random.default_rng(0).bytes(2000))


FAULTS = {
    invert_greys: (Photographs, "inverted", "no bin has images of all"),
    spell_class_differently: (Photographs, "spelt differently", "spelt differently"),
    lack_class: (Photographs, "no images of 'malignant'", "'malignant' only at 3 of 4"),
    have_another_class: (Photographs, "other label", "other label"),
    have_no_labels: (Photographs, "no label", "no label"),
    have_copies: (Photographs, "same pixels as", "same pixels as"),
    contradict_labels: (Photographs, "with another label", "with another label"),
    truncate_files: (Photographs, "truncated", "truncated"),
    lose_files: (Photographs, "missing", "missing"),
    have_colours: (Photographs, "colours colour", "colours: grey at 3 of 4"),
    shrink: (Photographs, "width 256 to 511 pixels", "width: no bin"),
    have_blank_images: (Photographs, "one grey level", "one grey level"),
    have_one_patient: (Photographs, "patient has about", None),
    use_12_of_16_bits: (Photographs, "only dark greys", "bits: 8 at 3 of 4"),
    exchange_classes: (Photographs, None, None),
    have_images_of_another_site: (Photographs, None, None),
    save_masks_as_0_and_255: (Masks, "mask_values: [0, 255]", "mask_values: [0, 255]"),
    exchange_foreground: (Masks, "foreground and background", "foreground and background"),
    have_8_bits: (Scans, "bits 8, but 12", "bits: 8 at 1 of 4"),
    have_another_modality: (Scans, "modality US", "modality: CR at 3 of 4"),
    encrypt: (Scans, "encrypted", "encrypted"),
    have_another_window: (Scans, "window in the file, but none", "window: in the file at 1 of 4"),
    have_another_spacing: (Scans, "spacing in mm 1 or more", "spacing in mm: none at 3 of 4"),
    name_no_patients: (Photographs, "no patients", "images without patient at 1 of 4"),
    mirror: (Photographs, None, None),
}
"""The fault, the kind of images, and what the site's own log and the server's page must say of it; None for nothing."""
SEEN_BY_SITES = 22
SEEN_BY_SERVER = 21


def survey(kind, folder, fault=None):
    """What the odd site says of itself, what the others say of themselves, and what the server says."""
    tallies = {}
    for name in SITES:
        site = kind(Path(folder) / name)
        if fault is not None and name == ODD:
            fault(site)
        layout = Layout(SurveyOptions(), kind.classes, has_masks=kind is Masks)
        tallies[name] = survey_images(images_of_source(site.source()), layout)
    first, *others = tallies.values()
    total = first
    for tally in others:
        total = total.plus(tally)
    said = {name: compare_with_others(tally, total.without(tally)) for name, tally in tallies.items()}
    return said.pop(ODD), said, describe_total(total)


@pytest.mark.parametrize("kind", [Photographs, Masks, Scans])
def test_sites_without_a_fault_fit_together(kind, tmp_path):
    own, others, total = survey(kind, tmp_path)
    assert [own, *others.values(), total] == [[]] * 5


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_seen_by_its_site_and_in_the_sums(fault, tmp_path):
    kind, by_site, by_server = FAULTS[fault]
    own, _, total = survey(kind, tmp_path, fault)
    for said, expected in ((own, by_site), (total, by_server)):
        if expected is None:
            assert said == []
        else:
            assert expected in " | ".join(said)


def test_how_many_faults_are_seen_is_in_the_docs():
    page = (Path(__file__).parents[2] / "docs" / "survey.md").read_text(encoding="utf-8")
    sentence = "the site's own log names 22 and the server's page 21"
    assert sentence in page
    assert len(FAULTS) == 25
    assert sum(by_site is not None for _, by_site, _ in FAULTS.values()) == SEEN_BY_SITES
    assert sum(by_server is not None for _, _, by_server in FAULTS.values()) == SEEN_BY_SERVER
