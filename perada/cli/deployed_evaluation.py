# SPDX-License-Identifier: Apache-2.0
"""Builds evaluations without training for the parties of a deployment, and writes their results at the server."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from perada.cli.deployed_recipes import SiteObjects, evaluated_classes, evaluated_site
from perada.core.text import abbreviated, printable
from perada.deploy.jobs import DeployedJob, job_digest
from perada.deploy.protocol import RejectionError
from perada.deploy.server.jobs import JobResult
from perada.deploy.site.evaluation import SiteEvaluation
from perada.deploy.site.file import SiteFile
from perada.deploy.sums.vector import SPOILED
from perada.evaluation.evaluate import Evaluable, ModelChoice, open_model
from perada.evaluation.outputs import ClientOutputs, digests_of_groups, predict_client
from perada.evaluation.pooled import Summaries
from perada.evaluation.recipe import EvaluationRecipe, check_model_files, parse_evaluation
from perada.evaluation.result import EvaluationResult
from perada.evaluation.rows import POOLED
from perada.evaluation.site_rows import decode_rows, row_size
from perada.survey.changes import DIGEST_BYTES
from perada.system.yaml_files import parse_yaml


@dataclass(frozen=True)
class DeployedEvaluation:
    """An evaluation as server and sites know it.

    Attributes:
        recipe: Its recipe.
        summaries: Layout of what sites add to the sum.
        job: The job.
    """

    recipe: EvaluationRecipe
    summaries: Summaries
    job: DeployedJob


def read_evaluation(text: bytes | str, source: str) -> DeployedEvaluation:
    """Parse the recipe of an evaluation. Its digest covers the models, whose digests it has.

    Args:
        text: Content of its file.
        source: Name of the file in messages.

    Raises:
        ValueError: If it is invalid.
    """
    content = parse_yaml(text, source)
    try:
        recipe = parse_evaluation(content)
        classes = evaluated_classes(recipe.content, source)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    summaries = Summaries(tuple(recipe.models), classes.task, classes.names)
    data = text.encode() if isinstance(text, str) else text
    job = DeployedJob("evaluation", job_digest(data), recipe.secure_sums, summaries.size, row_size(summaries))
    return DeployedEvaluation(recipe, summaries, job)


def make_site_evaluation(path: Path, site_file: SiteFile, evaluation: DeployedEvaluation) -> SiteEvaluation:
    """Build an evaluation with a site's data and the models beside the recipe.

    Raises:
        FileNotFoundError: If a model is missing.
        ValueError: If a model is not the one that the recipe names.
    """
    check_model_files(evaluation.recipe, path.parent)
    return SiteEvaluation(
        evaluation.job,
        site_file.limits,
        evaluation.summaries,
        predict=partial(predict_at_site, path, site_file, evaluation),
        list_patients=partial(digests_at_site, path, site_file, evaluation),
    )


def digests_at_site(path: Path, site_file: SiteFile, evaluation: DeployedEvaluation) -> bytes:
    """Return digests of the patients of a site's test images."""
    site = evaluated_site(path, evaluation.recipe.content, site_file)
    _check_classes(site, evaluation.summaries)
    return digests_of_groups(site.data, 0, DIGEST_BYTES)


def predict_at_site(path: Path, site_file: SiteFile, evaluation: DeployedEvaluation) -> ClientOutputs:
    """Run the models of an evaluation on the test images of a site.

    Raises:
        FileNotFoundError: If a model is missing.
        ValueError: If a model is another than approved or does not fit the images, or there are no test images.
    """
    check_model_files(evaluation.recipe, path.parent)
    site = evaluated_site(path, evaluation.recipe.content, site_file)
    _check_classes(site, evaluation.summaries)
    device = site.cli.trainer.strategy.root_device
    models = {}
    for name, model in evaluation.recipe.models.items():
        model_path: Evaluable = path.parent / model.path
        choice: ModelChoice = model_path if model.prediction is None else (model_path, model.prediction)
        opened = open_model(name, choice, site.data, site.cli.model.backbone)
        # Only a site that is a client of the recipe's own images has a number.
        models[name] = opened.for_client(site_file.data.get("client"), site_file.name, device)
    return predict_client(site_file.name, models, site.data, 0, evaluation.summaries.scores)


def _check_classes(site: SiteObjects, summaries: Summaries) -> None:
    """Raise a ValueError if a site's images have other classes than the recipe, or none of them is a test image."""
    data = site.data
    data.setup()
    names = [str(name) for name in data.classes or range(data.num_classes)]
    if data.task != summaries.task or names != list(summaries.class_names):
        raise ValueError(
            f"the site's images are for {data.task} with {abbreviated(names)}, but the recipe is for {summaries.task} "
            f"with {abbreviated(summaries.class_names)}; name the classes and the task in the recipe"
        )
    if not data.test_size:
        raise ValueError("the site has no test images; add some, or a test_share to its data")


def describe_evaluation(path: Path, site_file: SiteFile, evaluation: DeployedEvaluation) -> list[str]:
    """Return lines on what an evaluation would do at a site; its models run on the site's test images."""
    site_evaluation = make_site_evaluation(path, site_file, evaluation)
    summaries = evaluation.summaries
    min_sites = evaluation.job.options.min_sites
    sent = f"{summaries.size:,} integers, under masks in a sum of at least {min_sites} sites"
    if site_evaluation.permission in site_file.may_send:
        sent += "; may_send has scores, so the server also sees the site's own scores"
    models = []
    for name, model in evaluation.recipe.models.items():
        models.append(f"{printable(name)} ({printable(model.path)}{', the own of each site' if model.own else ''})")
    vector = np.array(site_evaluation.make_vector(), dtype=np.int64)
    own = EvaluationResult(summaries.models, tuple(summaries.rows(site_file.name, vector)))
    return [
        f"models: {', '.join(models)}",
        f"sends {sent}; no noise",
        f"at most {site_evaluation.max_jobs} evaluations are answered (limits: max_evaluations)",
        "the site's own scores, of which nothing is sent now:",
        *str(own).splitlines(),
    ]


def write_evaluation(evaluation: DeployedEvaluation, result: JobResult, folder: Path) -> str:
    """Write the scores of an evaluation, and return them as text.

    Args:
        evaluation: The evaluation.
        result: The sum over sites, and the rows of those that have sent theirs.
        folder: Folder for a subfolder with the files.

    Raises:
        RejectionError: If the sum is not that of images.
    """
    impossible = evaluation.summaries.find_impossible(result.total)
    if impossible:
        raise RejectionError(f"{SPOILED} no images have its {impossible!r}", "other")
    rows = []
    for site, integers in sorted(result.rows.items()):
        rows += decode_rows(evaluation.summaries, site, integers.tolist())
    rows += evaluation.summaries.rows(POOLED, result.total)
    notes = [f"Sites in the sum: {', '.join(map(printable, result.sites))}"]
    if result.missing:
        missing = [f"{printable(name)} ({code})" for name, code in sorted(result.missing.items())]
        notes.append(f"Not in it: {', '.join(missing)}")
    scores = EvaluationResult(evaluation.summaries.models, tuple(rows), tuple(notes))
    written = scores.save(folder / f"evaluation-{result.run[:8]}")
    return f"{scores}\n\nWrote {written}"
