# SPDX-License-Identifier: Apache-2.0
"""The counts of a survey: what a site's vector shows, how vectors add up, and what noise hides."""

import math

import numpy as np
import pytest
import torch
from PIL import Image

from perada.data import ImageMasks, Images, ImageTable
from perada.survey.changes import count_changes, digests_of_patients
from perada.survey.counting import count_facts, survey_images
from perada.survey.facts import read_facts
from perada.survey.findings import compare_with_others, describe_total
from perada.survey.images import SurveyedImage, images_of_source
from perada.survey.layout import MASK_KINDS, Cell, Layout, SurveyTally
from perada.survey.options import SurveyOptions
from perada.survey.recipe import parse_survey
from tests.data.dicom_files import dataset, save
from tests.data.dicom_files import write as write_dicom
from tests.rejections import raises_naming, rejects

CLASSES = ("benign", "malignant")


def layout(**options):
    return Layout(SurveyOptions(**options), CLASSES)


def random_counts(rng, size):
    return rng.integers(0, 12, size)


def test_a_vector_has_no_count_below_the_minimum_and_zero_is_told_apart():
    counts_of_sites = [random_counts(np.random.default_rng(seed), layout().num_counts) for seed in range(4)]
    tallies = [SurveyTally.of_counts(layout(), counts) for counts in counts_of_sites]
    for counts, tally in zip(counts_of_sites, tallies, strict=True):
        vector = tally.vector()
        assert len(vector) == layout().size
        sent = vector[: layout().num_counts]
        assert all(number == 0 or number >= 5 for number in sent)
        again = SurveyTally.of_vector(layout(), vector)
        for (block, name), count in zip(layout().places, counts.tolist(), strict=True):
            expected = Cell(count if count >= 5 else 0, int(0 < count < 5), int(count >= 5))
            assert again.cell(block, name) == expected
    total = SurveyTally.of_vector(layout(), np.sum([tally.vector() for tally in tallies], 0), 4)
    for place, (block, name) in enumerate(layout().places):
        column = [int(counts[place]) for counts in counts_of_sites]
        large = [count for count in column if count >= 5]
        assert total.cell(block, name) == Cell(sum(large), sum(0 < count < 5 for count in column), len(large))
    rest = total.without(tallies[0])
    assert rest.num_sites == 3
    assert (rest.numbers == sum(tally.numbers for tally in tallies[1:])).all()


def picture(folder, name, pixels):
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(file)
    return file


def names_of(facts, *blocks):
    return tuple(facts.names[block] for block in blocks)


def test_facts_of_files_are_those_that_were_written(tmp_path):
    ramp = np.tile(np.arange(100, dtype=np.float64), (70, 1)) / 99
    picture(tmp_path, "benign/8.png", (ramp * 255).astype(np.uint8))
    picture(tmp_path, "benign/16.png", (ramp * 65535 / 16).astype(np.uint16))
    picture(tmp_path, "benign/colour.png", np.zeros((600, 64, 3), np.uint8) + np.uint8(200))
    (tmp_path / "benign/broken.png").write_bytes(b"none")
    header = {"BitsStored": 12, "Modality": "MG", "Manufacturer": "GE MEDICAL", "PixelSpacing": [0.2, 0.2]}
    window = {"WindowCenter": 2048, "WindowWidth": 4096}
    pixels = (ramp * 4095).astype(np.uint16)
    write_dicom(tmp_path / "benign/scan.dcm", pixels, PhotometricInterpretation="MONOCHROME1", **header, **window)
    images = images_of_source(Images(str(tmp_path), layout="{class}/*", size=32))
    facts = {image.path.rpartition("/")[2]: read_facts(image, layout()) for image in images}
    assert names_of(facts["8.png"], "width", "height", "bits", "colours") == ("64 to 127", "64 to 127", "8", "grey")
    greys = ("darkest grey", "median grey", "brightest grey")
    assert names_of(facts["8.png"], *greys) == ("0 to 10 %", "40 to 50 %", "90 to 100 %")
    assert names_of(facts["16.png"], "bits", *greys) == ("16", "0 to 10 %", "0 to 10 %", "0 to 10 %")
    assert names_of(facts["colour.png"], "height", "colours", "median grey") == ("512 to 1023", "colour", "70 to 80 %")
    assert facts["colour.png"].is_blank and not facts["8.png"].is_blank
    assert facts["broken.png"].problem == "no image"
    scan = facts["scan.dcm"]
    assert names_of(scan, "bits", "colours", "modality") == ("12", "MONOCHROME1", "MG")
    assert names_of(scan, "manufacturer", "spacing in mm", "window") == ("ge", "0.1 to 0.25", "in the file")
    assert names_of(scan, *greys) == ("0 to 10 %", "40 to 50 %", "90 to 100 %")


def test_rows_of_a_table_that_training_rejects_are_counted(tmp_path):
    rng = np.random.default_rng(0)
    for number in range(6):
        picture(tmp_path, f"{number}.png", rng.integers(0, 255, (20, 20), dtype=np.uint8))
    rows = ["path,label,group", "0.png,benign,a", "1.png,Benign,a", "2.png,,b", "3.png,cyst,", "4.png,n/a,b"]
    rows += ["gone.png,malignant,c", "5.png,malignant,c"]
    (tmp_path / "labels.csv").write_text("\n".join(rows))
    images = images_of_source(ImageTable(str(tmp_path / "labels.csv"), size=16))
    tally = survey_images(images, layout(min_count=1))
    counts = {(block, name): cell.count for block, name, cell in tally.rows()}
    expected = {"benign": 1, "malignant": 1, "spelt differently": 1, "other label": 1, "no label": 2}
    assert {name: count for (block, name), count in counts.items() if block == "labels"} == expected
    assert counts["unreadable", "missing"] == 1 and counts["images", "read"] == 6
    assert counts["patients", "patients"] == 3 and counts["patients", "images without patient"] == 1


def test_reasons_are_told_from_the_messages_of_readers(tmp_path):
    pixels = np.arange(400, dtype=np.uint16).reshape(20, 20)
    whole = write_dicom(tmp_path / "a (1)" / "scan.dcm", pixels).read_bytes()
    (tmp_path / "a (1)" / "truncated.dcm").write_bytes(whole[:-300])
    (tmp_path / "a (1)" / "unknown.dcm").write_bytes(b"encrypted, perhaps" * 100)
    report = dataset(pixels)
    del report.PixelData
    save(tmp_path / "a (1)" / "report.dcm", report)
    picture(tmp_path, "a (1)/whole.png", np.arange(2500, dtype=np.uint8).reshape(50, 50))
    (tmp_path / "a (1)" / "cut.png").write_bytes((tmp_path / "a (1)" / "whole.png").read_bytes()[:-60])
    picture(tmp_path, "a (1)/float.tiff", np.full((20, 20), 7.0, np.float32))
    images = images_of_source(Images(str(tmp_path), layout="{class}/*", size=16))
    problems = {image.path.rpartition("/")[2]: read_facts(image, layout()).problem for image in images}
    assert problems == {
        "scan.dcm": "",
        "whole.png": "",
        "truncated.dcm": "damaged or truncated",
        "unknown.dcm": "encrypted or another format",
        "report.dcm": "no pixel data",
        "cut.png": "damaged or truncated",
        "float.tiff": "values out of range",
    }


def test_kinds_of_masks(tmp_path):
    rng = np.random.default_rng(0)
    square = np.zeros((20, 20), np.uint8)
    square[5:9, 5:9] = 1
    masks = {"numbers": square, "white": square * 255, "others": square * 7, "empty": square * 0, "small": square[:18]}
    for name, mask in masks.items():
        picture(tmp_path, f"images/{name}.png", rng.integers(0, 255, (20, 20), dtype=np.uint8))
        picture(tmp_path, f"masks/{name}.png", mask)
    chosen = Layout(SurveyOptions(min_count=1), ("background", "lesion"), has_masks=True)
    tally = survey_images(images_of_source(ImageMasks(str(tmp_path), size=16)), chosen)
    assert {name: tally.cell("values of masks", name).count for name in MASK_KINDS} == dict.fromkeys(MASK_KINDS, 1)
    assert tally.cell("labels", "background").count == 5 and tally.cell("labels", "lesion").count == 2


def test_images_without_masks_are_images_without_labels(tmp_path):
    rng = np.random.default_rng(0)
    for number in range(4):
        picture(tmp_path, f"images/{number}.png", rng.integers(0, 255, (20, 20), dtype=np.uint8))
        if number:
            picture(tmp_path, f"masks/{number}.png", np.ones((20, 20), np.uint8))
    chosen = Layout(SurveyOptions(min_count=1), ("background", "lesion"), has_masks=True)
    tally = survey_images(images_of_source(ImageMasks(str(tmp_path), size=16)), chosen)
    assert tally.cell("images", "read").count == 4 and tally.cell("labels", "no label").count == 1


def test_a_patient_with_other_files_labels_or_masks_has_changed(tmp_path):
    rng = np.random.default_rng(0)
    for number in range(6):
        picture(tmp_path, f"{number}.png", rng.integers(0, 255, (20, 20), dtype=np.uint8))

    def digests(rows):
        (tmp_path / "labels.csv").write_text("\n".join(["path,label,group", *rows]))
        return digests_of_patients(images_of_source(ImageTable(str(tmp_path / "labels.csv"), size=16)))

    rows = ["0.png,benign,a", "1.png,benign,a", "2.png,benign,b", "3.png,malignant,c"]
    before = digests(rows)
    assert count_changes(before, digests(rows[::-1])) == 0
    renamed = [row.replace(",a", ",x") for row in rows]
    assert count_changes(before, digests(renamed)) == 0  # a patient is what is known of it
    assert count_changes(before, digests(rows[1:])) == 1
    assert count_changes(before, digests(rows[2:])) == 1
    assert count_changes(before, digests([*rows, "4.png,benign,b"])) == 1
    assert count_changes(before, digests([*rows, "4.png,benign,d", "5.png,benign,e"])) == 2
    assert count_changes(before, digests([rows[0].replace("benign", "malignant"), *rows[1:]])) == 1


def random_images(rng, num_patients):
    """Images without files, several of a patient, of which some are equal."""
    images = []
    for patient in range(num_patients):
        for _ in range(int(rng.integers(1, 5))):
            label = (CLASSES[int(rng.integers(2))],)
            images.append(SurveyedImage(Stored(int(rng.integers(6))), "", 0, label, group=f"p{patient}"))
    return images


class Stored(torch.utils.data.Dataset):
    """A set of one image of random pixels."""

    def __init__(self, seed):
        self.image = torch.randint(0, 255, (1, 20, 20), dtype=torch.uint8, generator=torch.manual_seed(seed))

    def __getitem__(self, index):
        return self.image, 0


def test_a_patient_changes_the_counts_by_at_most_what_the_noise_is_for():
    chosen = layout(noise_multiplier=1.0, images_per_patient=4)
    bound = chosen.options.deviation(chosen.cells_per_image)
    assert bound == pytest.approx(4 * math.sqrt(chosen.cells_per_image))
    for seed in range(30):
        images = random_images(np.random.default_rng(seed), 5)
        counts = count_facts(images, [read_facts(image, chosen) for image in images], chosen)
        for patient in range(5):
            rest = [image for image in images if image.group != f"p{patient}"]
            counts_without = count_facts(rest, [read_facts(image, chosen) for image in rest], chosen)
            assert np.linalg.norm(counts - counts_without) <= bound


def test_with_noise_no_more_images_of_a_patient_are_counted_and_small_counts_are_not_shown():
    chosen = layout(noise_multiplier=0.001, images_per_patient=2)
    images = [image for image in random_images(np.random.default_rng(1), 40)] * 3
    tally = survey_images(images, chosen)
    assert tally.cell("images", "read").count == 80
    assert tally.numbers[1:].sum() == 0
    noisy = SurveyTally.with_noise(layout(noise_multiplier=3.0), np.zeros(chosen.num_counts, np.int64))
    deviation = layout(noise_multiplier=3.0).options.deviation(chosen.cells_per_image)
    sample = noisy.numbers[0]
    assert abs(sample.std() / deviation - 1) < 0.3
    assert sum(1 for _ in noisy.rows()) <= 2  # three deviations


def test_a_site_with_few_images_is_compared_without_wrong_findings():
    counts = {("images", "read"): 3, ("labels", "benign"): 2, ("labels", "malignant"): 1, ("bits", "8"): 3}
    exact = np.zeros(layout().num_counts, np.int64)
    for pair, count in counts.items():
        exact[layout().places[pair]] = count
    small = SurveyTally.of_counts(layout(), exact)
    large = SurveyTally.of_counts(layout(), exact * 100)
    others = large.plus(large)
    assert compare_with_others(small, others) == []
    assert describe_total(others.plus(small)) == []
    assert small.cell("labels", "benign").describe(5) == "fewer than 5"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_count", 0),
        ("grey_bins", 1),
        ("sizes", [64, 32]),
        ("sizes", 5),
        ("sizes", [True, 512]),
        ("noise_multiplier", -1.0),
        ("images_per_patient", 0),
    ],
)
def test_invalid_options_are_rejected(name, value):
    with rejects(f"survey: {name}", value):
        SurveyOptions(**{name: value})


def test_the_recipe_of_a_survey():
    recipe = parse_survey({"survey": {"classes": ["a", "b"], "min_count": 8, "name": "spring"}})
    assert recipe.layout.classes == ("a", "b") and recipe.layout.options.min_count == 8
    with raises_naming(ValueError, "classes"):
        parse_survey({"survey": {}})
    with raises_naming(ValueError, "minimum"):
        parse_survey({"survey": {"minimum": 1}})
    with raises_naming(ValueError, "model"):
        parse_survey({"survey": {"classes": ["a"]}, "model": {}})
    with raises_naming(ValueError, "'a', 'a'"):
        parse_survey({"survey": {"classes": ["a", "a"]}})
