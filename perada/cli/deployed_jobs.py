# SPDX-License-Identifier: Apache-2.0
"""Builds jobs without training, surveys and evaluations, for the parties of a deployment; runs them at the server."""

import hashlib
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

import perada.data
from perada.cli.deploy_status import format_measure
from perada.cli.deployed_evaluation import (
    describe_evaluation,
    make_site_evaluation,
    read_evaluation,
    write_evaluation,
)
from perada.cli.deployed_recipes import check_approved, check_classes_of_job, class_names_of, site_images
from perada.cli.recipes import recipe_text
from perada.core.checks import check_integer
from perada.data.partitions import Partition
from perada.data.partitions.division import Division
from perada.data.sets.base import ImageSet
from perada.data.sets.manifest import OwnImages
from perada.deploy.jobs import DeployedJob, job_digest
from perada.deploy.protocol import JobKind
from perada.deploy.server.jobs import JobRun
from perada.deploy.site.file import Approved, SiteFile
from perada.deploy.site.jobs import SiteJob
from perada.deploy.site.survey import SiteSurvey
from perada.deploy.state import read_runs
from perada.deploy.transport import Terms, Transport
from perada.results.report import epsilon_text
from perada.survey.counting import survey_images
from perada.survey.images import SurveyedImage, images_of_clients, images_of_source
from perada.survey.layout import SurveyTally
from perada.survey.page import Survey, format_survey, write_survey
from perada.survey.recipe import SurveyRecipe, parse_survey
from perada.system.files import check_output_folder
from perada.system.yaml_files import parse_yaml

JOB_SECTIONS: dict[str, JobKind] = {"survey": "survey", "evaluate": "evaluation"}
"""The kind of a job by the section that its recipe has, and recipes for training have not."""
DIVISION_OPTIONS = ("partition", "train_limit", "test_limit", "seed")
"""Options of a site's data that divide a built-in data set among clients."""


def job_kind(content: dict[str, Any]) -> JobKind | None:
    """Return the kind of a job from the content of its recipe; None for a recipe that trains."""
    for section, kind in JOB_SECTIONS.items():
        if section in content:
            return kind
    return None


def kind_of_recipe(name: str) -> JobKind | None:
    """Return the kind of job of the recipe of this name; None for a recipe that trains."""
    return job_kind(parse_yaml(recipe_text(name), name))


def is_site_job(path: Path, site_file: SiteFile) -> bool:
    """Return whether a recipe that a site has approved is for a job without training.

    Raises:
        ValueError: If the file is not the one that was approved, which is checked before its content is read.
    """
    text = path.read_bytes()
    check_approved(path, text, site_file)
    return job_kind(parse_yaml(text, str(path))) is not None


def read_survey(text: bytes | str, source: str) -> SurveyRecipe:
    """Parse the recipe of a survey.

    Args:
        text: Content of its file.
        source: Name of the file in messages.
    """
    content = parse_yaml(text, source)
    dataset = (content.get("data") or {}).get("dataset")
    try:
        return parse_survey(content, class_names_of(dataset))
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def survey_job(recipe: SurveyRecipe, text: bytes) -> DeployedJob:
    """Return what server and sites know of a survey."""
    return DeployedJob("survey", job_digest(text), recipe.secure_sums, recipe.layout.size)


def make_site_job(path: Path, site_file: SiteFile) -> SiteJob:
    """Build a job with a site's data.

    Raises:
        ValueError: If the digest is not the one that was approved, or the recipe is invalid.
    """
    text = path.read_bytes()
    check_approved(path, text, site_file)
    check_classes_of_job(path, text, site_file)
    site_job: SiteJob
    if job_kind(parse_yaml(text, str(path))) == "evaluation":
        site_job = make_site_evaluation(path, site_file, read_evaluation(text, str(path)))
    else:
        recipe = read_survey(text, str(path))
        images = partial(list_site_images, site_file, recipe)
        site_job = SiteSurvey(survey_job(recipe, text), site_file.limits, recipe.layout, images)
    approved = site_file.recipes[path].digest
    if approved not in ("", site_job.job.digest):
        raise ValueError(
            f"{str(path)!r} has the digest {site_job.job.digest}, but the site approves {approved}; correct it"
        )
    return site_job


def describe_job(path: Path, site_file: SiteFile) -> list[str]:
    """Return lines on what a job would do at a site, as `perada deploy check` prints them; the images are read."""
    text = path.read_bytes()
    site_job = make_site_job(path, site_file)
    digests = Approved(hashlib.sha256(text).hexdigest(), site_job.job.digest)
    is_approved = site_file.recipes[path] == digests
    lines = [
        f"{path.name}: {'approved' if is_approved else 'not approved: add this to the site file'}",
        f"sha256: {digests.sha256}",
        f"digest: {digests.digest}",
    ]
    _, totals = read_runs(site_file.state, with_tensors=False)
    rejection = site_job.explain_rejection(totals.ledger)
    if rejection:
        lines.append(f"will be rejected: {rejection}")
    if isinstance(site_job, SiteSurvey):
        recipe = read_survey(text, str(path))
        return lines + _describe_survey(site_job, list_site_images(site_file, recipe), site_file)
    return lines + describe_evaluation(path, site_file, read_evaluation(text, str(path)))


def _describe_survey(site_survey: SiteSurvey, images: Sequence[SurveyedImage], site_file: SiteFile) -> list[str]:
    """Return lines on what a survey would send of a site with these images."""
    layout = site_survey.layout
    min_sites = site_survey.job.options.min_sites
    sent = f"{layout.num_counts} counts, under masks in a sum of at least {min_sites} sites"
    if site_survey.permission in site_file.may_send:
        sent += "; may_send has survey, so the server also sees the site's own counts"
    noise = "no noise"
    if site_survey.noise_multiplier:
        spent = epsilon_text(site_survey.budget.epsilon(site_survey.cost))
        noise = f"noise of the site's own, so that a survey spends ε ≤ {spent} {format_measure(site_file.limits)}"
    exact = replace(layout, options=replace(layout.options, noise_multiplier=None, min_count=1))
    counts = format_survey(Survey(survey_images(images, exact))).splitlines()
    return [
        f"sends {sent}; counts from 1 to {layout.options.min_count - 1} leave as 'fewer'; {noise}",
        f"at most {site_survey.max_jobs} surveys are answered (limits: max_surveys)",
        "the site's own counts, of which nothing is sent now:",
        *counts,
    ]


def list_site_images(site_file: SiteFile, recipe: SurveyRecipe) -> list[SurveyedImage]:
    """List all images of a site."""
    site_data = {key: value for key, value in site_file.data.items() if key != "client"}
    if "dataset" in site_data:
        division = _parse_division(site_data)
        division.download()
        clients = list(images_of_clients(division.share_out()).values())
        index = site_file.data.get("client", 0)
        check_integer("data: client", index, 0, le=len(clients) - 1, hint="it is a client's number in the partition")
        return clients[index]
    # Classes of which the recipe does not know are counted, too.
    entry = site_images(site_file.name, site_data, recipe.data, None)
    image_set = getattr(perada.data, entry["class_path"])(**entry["init_args"])
    assert isinstance(image_set, OwnImages)
    return images_of_source(image_set)


def _parse_division(site_data: dict[str, Any]) -> Division:
    """Build the division of a built-in data set, of which a site is a client."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--dataset", type=ImageSet)
    parser.add_argument("--partition", type=Partition)
    entries = {key: site_data[key] for key in ("dataset", "partition") if key in site_data}
    objects = parser.instantiate_classes(parser.parse_object(entries))
    names = [each.name for each in fields(Division)]
    options = {key: site_data[key] for key in DIVISION_OPTIONS if key in site_data and key in names[2:]}
    return Division(objects.dataset, objects.partition, **options)


def job_recipe_digest(name: str) -> str:
    """Return the digest of a job that sites approve."""
    text = recipe_text(name).encode()
    if kind_of_recipe(name) == "evaluation":
        return read_evaluation(text, name).job.digest
    return survey_job(read_survey(text, name), text).digest


def run_job(name: str, transport: Transport, folder: Path, terms: Terms) -> str:
    """Run a job over a transport, write its result to a folder, and return it as text.

    Raises:
        TimeoutError: If too few sites answered.
        RejectionError: If their sum cannot be used.
    """
    text = recipe_text(name).encode()
    check_output_folder("folder", folder)
    if kind_of_recipe(name) == "evaluation":
        evaluation = read_evaluation(text, name)
        return write_evaluation(evaluation, JobRun(evaluation.job, transport, terms).make_sum(), folder)
    recipe = read_survey(text, name)
    result = JobRun(survey_job(recipe, text), transport, terms).make_sum()
    total = SurveyTally.of_vector(recipe.layout, result.total, len(result.sites))
    rows = {site: SurveyTally.of_vector(recipe.layout, row) for site, row in result.rows.items()}
    survey = Survey(total, rows, result.missing, result.sites)
    page = write_survey(survey, folder, f"survey-{result.run[:8]}")
    return f"{format_survey(survey)}\n\nWrote {page} and {page.with_suffix('.json').name}"
