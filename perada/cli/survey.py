# SPDX-License-Identifier: Apache-2.0
"""``perada data survey``: a survey of the clients of a simulation, all of whose counts may be seen."""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import reduce

from jsonargparse import ArgumentParser

from perada.cli.data import recipe_division
from perada.core.checks import check_integer
from perada.core.text import printable, printable_json
from perada.data import ByDomain
from perada.data.partitions.division import Division
from perada.data.sets.manifest import OwnImages
from perada.survey.counting import survey_images
from perada.survey.images import SurveyedImage, images_of_clients, images_of_source
from perada.survey.layout import Layout, SurveyTally
from perada.survey.options import SurveyOptions
from perada.survey.page import Survey, format_survey, survey_record


def survey_clients(parser: ArgumentParser, words: list[str]) -> None:
    """Count the images of each client of a recipe, and print where clients do not fit together."""
    output_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for each in (parser, output_parser):
        each.add_argument("--min-count", type=int, default=1, help="Counts below it are shown as fewer, as at sites.")
        each.add_argument("--json", action="store_true", help="Print the result as JSON.")
    output_options, words = output_parser.parse_known_args(words)
    check_integer("--min-count", output_options.min_count, 1)
    if not any(word.startswith("--config") for word in words):
        parser.add_argument("--config", required=True, help="Recipe, as for `perada fit`, and its options.")
        parser.parse_args(words)
    result = survey_division(recipe_division(words), SurveyOptions(min_count=output_options.min_count))
    if output_options.json:
        print(printable_json(json.dumps(survey_record(result), ensure_ascii=False)))
    else:
        print(format_survey(result))
    sys.stdout.flush()


def survey_division(division: Division, options: SurveyOptions) -> Survey:
    """Survey the clients of a division.

    Args:
        division: The images, and how they are divided.
        options: Options of the survey.
    """
    dataset = division.dataset
    if isinstance(dataset, OwnImages) and isinstance(division.partition, ByDomain) and dataset.names_clients:
        # Images that training would reject are counted, too.
        images: dict[str, list[SurveyedImage]] = {}
        for image in images_of_source(dataset):
            images.setdefault(image.client, []).append(image)
        images = dict(sorted(images.items()))
        classes = _classes_of_most(images)
    else:
        data = division.share_out()
        images = images_of_clients(data)
        classes = tuple(data.classes or map(str, range(data.num_classes or 0)))
    has_masks = any(image.mask is not None for images_of_client in images.values() for image in images_of_client)
    if has_masks:
        data = division.share_out()
        classes = tuple(data.classes or map(str, range(data.num_classes or 2)))
    several = any(len(image.labels or ()) > 1 for images_of_client in images.values() for image in images_of_client)
    layout = Layout(options, classes, has_masks=has_masks, several_labels=several)
    rows = {printable(name): survey_images(images_of_client, layout) for name, images_of_client in images.items()}
    return Survey(reduce(SurveyTally.plus, rows.values()), rows, sites=list(rows))


def _classes_of_most(images: Mapping[str, Sequence[SurveyedImage]]) -> tuple[str, ...]:
    """Return the labels that at least half of the clients have, in order."""
    num_clients = Counter[str]()
    for images_of_client in images.values():
        num_clients.update({label for image in images_of_client for label in image.labels or ()})
    return tuple(sorted(label for label, count in num_clients.items() if 2 * count >= len(images)))
