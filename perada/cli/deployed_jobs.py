# SPDX-License-Identifier: Apache-2.0
"""Builds jobs without training, such as a survey, for the parties of a deployment, and runs them at the server."""

import hashlib
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

import perada.data
from perada.cli.deploy_status import format_measure
from perada.cli.deployed_recipes import check_approved, class_names_of, site_images
from perada.cli.recipes import recipe_text
from perada.core.checks import check_integer
from perada.data.partitions import Partition
from perada.data.partitions.division import Division
from perada.data.sets.base import ImageSet
from perada.data.sets.manifest import OwnImages
from perada.deploy.jobs import Job, job_digest
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
from perada.survey.layout import Tally
from perada.survey.page import Survey, format_counts, format_survey, write_survey
from perada.survey.recipe import SurveyRecipe, parse_survey
from perada.system.files import check_output_folder
from perada.system.yaml_files import parse_yaml

JOB_SECTIONS: dict[str, JobKind] = {"survey": "survey"}
"""The kind of a job by the section that its recipe has, and recipes for training have not."""
DIVISION_OPTIONS = ("partition", "train_limit", "test_limit", "seed")
"""Options of a site's data that divide a built-in data set among clients."""


def job_kind(content: dict[str, Any]) -> JobKind | None:
    """Return the kind of a job from the content of its recipe; None for a recipe that trains."""
    for section, kind in JOB_SECTIONS.items():
        if section in content:
            return kind
    return None


def is_job(name: str) -> bool:
    """Return whether the recipe of this name is for a job without training."""
    return job_kind(parse_yaml(recipe_text(name), name)) is not None


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


def survey_job(recipe: SurveyRecipe, text: bytes) -> Job:
    """Return what server and sites know of a survey."""
    return Job("survey", job_digest(text), recipe.secure_sums, recipe.layout.size)


def make_site_job(path: Path, site_file: SiteFile) -> SiteJob:
    """Build a job with a site's data.

    Raises:
        ValueError: If the digest is not the one that was approved, or the recipe is invalid.
    """
    text = path.read_bytes()
    check_approved(path, text, site_file)
    recipe = read_survey(text, str(path))
    job = survey_job(recipe, text)
    approved = site_file.recipes[path].digest
    if approved not in ("", job.digest):
        raise ValueError(f"{str(path)!r} has the digest {job.digest}, but the site approves {approved}; correct it")
    return SiteSurvey(job, site_file.limits, recipe.layout, partial(list_site_images, site_file, recipe))


def describe_job(path: Path, site_file: SiteFile) -> list[str]:
    """Return lines on what a job would do at a site, as `perada deploy check` prints them; the images are read."""
    text = path.read_bytes()
    site_survey = make_site_job(path, site_file)
    assert isinstance(site_survey, SiteSurvey)
    digests = Approved(hashlib.sha256(text).hexdigest(), site_survey.job.digest)
    is_approved = site_file.recipes[path] == digests
    layout = site_survey.layout
    min_sites = site_survey.job.options.min_sites
    sent = f"{layout.num_counts} counts, under masks in a sum of at least {min_sites} sites"
    if site_survey.permission in site_file.may_send:
        sent += "; may_send has survey, so the server also sees the site's own counts"
    noise = "no noise"
    if site_survey.noise_multiplier:
        spent = epsilon_text(site_survey.budget.epsilon(site_survey.cost))
        noise = f"noise of the site's own, so that a survey spends ε ≤ {spent} {format_measure(site_file.limits)}"
    _, totals = read_runs(site_file.state, with_tensors=False)
    rejection = site_survey.explain_rejection(totals.ledger)
    rejected = [f"will be rejected: {rejection}"] if rejection else []
    exact = replace(layout, options=replace(layout.options, noise_multiplier=None, min_count=1))
    own = survey_images(list_site_images(site_file, read_survey(text, str(path))), exact)
    counts = format_counts(Survey(own)).splitlines()
    return [
        f"{path.name}: {'approved' if is_approved else 'not approved: add this to the site file'}",
        f"sha256: {digests.sha256}",
        f"digest: {digests.digest}",
        f"sends {sent}; counts from 1 to {layout.options.min_count - 1} leave as 'fewer'; {noise}",
        f"at most {site_survey.max_jobs} surveys are answered (limits: max_surveys)",
        *rejected,
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
    return survey_job(read_survey(text, name), text).digest


def run_job(name: str, transport: Transport, folder: Path, terms: Terms) -> str:
    """Run a job over a transport, write its result to a folder, and return it as text.

    Raises:
        TimeoutError: If too few sites answered.
        RejectionError: If their sum cannot be used.
    """
    text = recipe_text(name).encode()
    recipe = read_survey(text, name)
    check_output_folder("folder", folder)
    job_run = JobRun(survey_job(recipe, text), transport, terms)
    result = job_run.make_sum()
    total = Tally.of_vector(recipe.layout, result.total, len(result.sites))
    rows = {site: Tally.of_vector(recipe.layout, row) for site, row in result.rows.items()}
    survey = Survey(total, rows, result.missing, result.sites)
    page = write_survey(survey, folder, f"survey-{job_run.run[:8]}")
    return f"{format_survey(survey)}\n\nWrote {page} and {page.with_suffix('.json').name}"
