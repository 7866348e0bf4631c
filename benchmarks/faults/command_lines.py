# SPDX-License-Identifier: Apache-2.0
"""Random command lines of ``perada fit``: each is run, or rejected in one line that names what was asked for."""

import contextlib
import io
import os
import random
import sys
import tempfile
from pathlib import Path
from unittest import mock

from benchmarks.faults.configurations import limited
from benchmarks.faults.outcomes import REPORTED, SURVIVED, Campaign, Verdict
from perada.cli import entry_point

BASE = (
    "--config digits --trainer.max_epochs=1 --training.local_steps=1 --data.train_limit=100 --data.test_limit=40 "
    "--trainer.accelerator=cpu --trainer.enable_progress_bar=false --distillation.steps=1"
).split()
OPTIONS = (
    "data.batch_size", "data.image_size", "data.public_fraction", "data.seed", "data.client_validation",
    "data.task", "data.task.init_args.label_smoothing", "data.task.init_args.class_weights", "data.sampling",
    "data.mixup", "data.partition.init_args.alpha", "data.partition.init_args.num_clients", "data.partition",
    "data.dataset",
    "training.lr_local", "training.lr_personal", "training.momentum", "model.adapter", "model.backbone",
    "training.optimizer",
    "training.engine", "evaluation.metric", "training.clip_norm", "training.clients_per_chunk", "federated.algorithm",
    "federated.clients_per_round", "training.local_epochs", "federated.weighting", "federated.server_rule",
    "distillation.temperature", "distillation.lr", "privacy.noise_multiplier",
    "federated.client_store", "evaluation.diagnostics", "federated.max_failures", "federated.drop_outliers",
    "federated.resume_allow", "trainer.precision", "seed_everything", "ckpt_path", "no.such.option",
)  # fmt: skip
VALUES = (
    "", "abc", "-1", "0", "0.5", "2", "nan", "inf", "null", "true", "{}", "[]", "[1]", "1e12", "last", "median",
    "balanced", "Classification", "Segmentation", "Regression",
)  # fmt: skip


def try_command_lines(campaign: Campaign, seed: int, count: int, seconds: int = 60) -> None:
    """Run random command lines one after another in this process.

    Args:
        campaign: Where the verdicts are recorded.
        seed: Seed of all draws.
        count: Number of command lines.
        seconds: Longest time of one.
    """

    def judge(number: int) -> Verdict:
        random_source = random.Random(f"line/{seed}/{number}")
        names = random_source.sample(OPTIONS, random_source.randint(1, 2))
        words = [f"--{name}={random_source.choice(VALUES)}" for name in names]
        return Verdict(_outcome_of(words, names, seconds), " ".join(words))

    campaign.try_all("command lines of perada fit", count, judge)


def _outcome_of(words: list[str], names: list[str], seconds: int) -> str:
    """Run ``perada fit`` with words that give values to options, and return the outcome."""
    working_directory = Path.cwd()
    output = contextlib.redirect_stdout(io.StringIO())
    errors = contextlib.redirect_stderr(io.StringIO())
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            with output, errors, limited(seconds):
                with mock.patch.object(sys, "argv", ["perada", "fit", *BASE, *words]):
                    entry_point()
        except SystemExit as end:
            if not end.code:
                return SURVIVED
            message = str(end.code)
        except TimeoutError:
            return f"took more than {seconds} s"
        except Exception as error:  # any other is a bug
            return f"raw {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        else:
            return SURVIVED
        finally:
            os.chdir(working_directory)
    if "\n" in message.strip():
        return f"several lines: {message[:150]}"
    # A message may name an option by one part of its name, or by its value.
    parts = [word.partition("=")[2] for word in words]
    for name in names:
        parts += [name, *name.split(".")]
    plain_message = message.replace("_", " ")
    if any(part and part.replace("_", " ") in plain_message for part in parts):
        return REPORTED
    return f"names nothing: {message[:200]}"
