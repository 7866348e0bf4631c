# SPDX-License-Identifier: Apache-2.0
"""The recipe of a survey: a short YAML file that sites read and approve by its digest."""

from dataclasses import dataclass, fields
from typing import Any

from perada.core.checks import check_choice, check_options, checked_names
from perada.server.sums import SecureSums
from perada.survey.layout import Layout
from perada.survey.options import SurveyOptions

SECTIONS = ("survey", "secure_sums", "data")
_OTHER_OPTIONS = ("name", "classes", "masks", "several_labels")
"""Options of the section ``survey`` beside those of :class:`.SurveyOptions`. A name tells two surveys apart."""
_EXAMPLE = "{classes: [benign, malignant]}"


@dataclass(frozen=True)
class SurveyRecipe:
    """What a survey counts.

    Attributes:
        layout: Layout of the counts.
        secure_sums: Options of the secure sum.
        data: How files are read, as in the section ``data`` of a recipe for training; empty for the defaults.
    """

    layout: Layout
    secure_sums: SecureSums
    data: dict[str, Any]


def parse_survey(content: dict[str, Any], class_names: tuple[str, ...] | None = None) -> SurveyRecipe:
    """Parse the content of a survey's recipe.

    Args:
        content: Content of the file.
        class_names: Names of the classes that the section ``data`` names; None if it names none.

    Raises:
        ValueError: If a section or an option is invalid; the message names it.
    """
    for name in content:
        check_choice("section of a survey", name, SECTIONS)
    section = content.get("survey") or {}
    check_options("survey", section, _EXAMPLE)
    option_names = [each.name for each in fields(SurveyOptions)]
    for name in section:
        check_choice("survey", name, [*_OTHER_OPTIONS, *option_names])
    for name in ("masks", "several_labels"):
        check_choice(f"survey: {name}", section.get(name, False), [True, False])
    sums = content.get("secure_sums") or {}
    check_options("secure_sums", sums, "{min_sites: 3}")
    for name in sums:
        check_choice("secure_sums", name, [each.name for each in fields(SecureSums)])
    data = content.get("data") or {}
    check_options("data", data, "{dataset: {class_path: Images, init_args: {size: 224}}}")
    names = checked_names("survey: classes", section.get("classes")) or class_names
    if not names:
        raise ValueError(f"survey: classes is missing; name the classes that sites should have, such as {_EXAMPLE}")
    if len({*names}) < len(names):
        raise ValueError(f"survey: classes={list(names)!r} names a class twice; name each once")
    layout = Layout(
        options=SurveyOptions(**{name: section[name] for name in section if name in option_names}),
        classes=tuple(names),
        has_masks=section.get("masks", False),
        several_labels=section.get("several_labels", False),
    )
    return SurveyRecipe(layout, SecureSums(**sums), data)
