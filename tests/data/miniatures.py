# SPDX-License-Identifier: Apache-2.0
"""Small image sets on disk, with the names, columns and file formats of the published ones."""

import csv
import io
from itertools import pairwise

import numpy as np
from PIL import Image

DOMAINS = ("Art", "Clipart", "Product", "Real World")
CHEXPERT_HEADER = (
    "Path,Sex,Age,Frontal/Lateral,AP/PA,No Finding,Enlarged Cardiomediastinum,Cardiomegaly,Lung Opacity,Lung Lesion,"
    "Edema,Consolidation,Pneumonia,Atelectasis,Pneumothorax,Pleural Effusion,Pleural Other,Fracture,Support Devices"
).split(",")
FINDINGS = ("Cardiomegaly", "Edema", "Consolidation", "Atelectasis", "Pleural Effusion")
NUMBER = {"": 0, "0.0": 0, "1.0": 1, "-1.0": 1}  # U-Ones


def write_jpeg(path, colour):
    """One colour all over, which JPEG keeps up to rounding: a grey value, or red, green and blue."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = io.BytesIO()
    Image.new("L" if isinstance(colour, int) else "RGB", (6, 4), colour).save(file, "jpeg", quality=95)
    path.write_bytes(file.getvalue())


def write_office_home(root, each=5, real_world="Real World"):
    """So many images of every domain and class, whose red is the domain, green the class and blue the number."""
    for place, domain in enumerate((*DOMAINS[:3], real_world)):
        for label in range(65):
            for number in range(each):
                folder = root / domain / f"Class_{label:02d}"
                write_jpeg(folder / f"{number + 1:05d}.jpg", (60 * place, 3 * label, 40 * number))


def write_chexpert(home, patients=60, valid=6):
    """Patients with one to four images, all of one grey value a patient, and findings at random.

    Returns:
        The rows of ``train.csv`` and of ``valid.csv``, as dictionaries.
    """
    random = np.random.default_rng(0)
    written = []
    for part, (first, last) in zip(("train", "valid"), pairwise([1, patients + 1, patients + valid + 1]), strict=True):
        rows = []
        for patient in range(first, last):
            for view in range(random.integers(1, 5)):
                kind = "frontal" if view % 2 == 0 else "lateral"
                inside = f"{part}/patient{patient:05d}/study1/view{view + 1}_{kind}.jpg"
                write_jpeg(home / inside, 3 * patient)
                drawn = random.choice(["", "0.0", "1.0", "-1.0"], len(CHEXPERT_HEADER), p=[0.5, 0.2, 0.2, 0.1])
                row = dict(zip(CHEXPERT_HEADER, drawn.tolist(), strict=True))
                row |= {"Path": f"{home.name}/{inside}", "Sex": "Female", "Age": "68"}
                rows.append(row | {"Frontal/Lateral": kind.title(), "AP/PA": "AP" if view % 2 == 0 else ""})
        write_table(home / f"{part}.csv", rows)
        written.append(rows)
    return written


def write_open_image(root, uploaders=12):
    """Uploaders with three to eight images and labels from 0 to 4, whose red is the uploader and green the label."""
    random = np.random.default_rng(0)
    written = []
    for part, counts in (("train", random.integers(3, 9, uploaders)), ("test", [2] * (uploaders - 1))):
        rows = []
        for client, count in enumerate(counts):
            for number in range(count):
                label = int(random.integers(5))
                name = f"{part}{client:04x}{number:04x}.jpg"
                write_jpeg(root / part / name, (20 * client, 50 * label, 0))
                rows.append({"client_id": client, "sample_path": name, "label_name": f"/m/0{label}", "label_id": label})
        order = random.permutation(len(rows))
        written.append([rows[place] for place in order])
        write_table(root / "client_data_mapping" / f"{part}.csv", written[-1])
    return written


HOSPITALS = ("hospital_a", "hospital_b", "hospital_c", "hospital_d")


def write_hospitals(root, each=6):
    """So many images of each hospital and of three findings, whose red is the hospital, green the finding."""
    for place, hospital in enumerate(HOSPITALS):
        for label, finding in enumerate(("benign", "malignant", "normal")):
            for number in range(each):
                write_jpeg(root / hospital / finding / f"{number:04d}.jpg", (60 * place, 80 * label, 20 * number))


def write_table(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, rows[0], lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
