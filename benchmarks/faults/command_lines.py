# SPDX-License-Identifier: Apache-2.0
"""Random command lines of ``perada fit``: each is run, or refused in one line that names what was asked for."""

import contextlib
import io
import os
import random
import sys
import tempfile
from pathlib import Path
from unittest import mock

from benchmarks.faults.configurations import limited
from benchmarks.faults.outcomes import Campaign
from perada.cli import entry_point

BASE = (
    "--config digits --trainer.max_epochs=1 --training.local_steps=1 --data.train_limit=100 --data.test_limit=40 "
    "--trainer.accelerator=cpu --trainer.enable_progress_bar=false --distillation.steps=1"
).split()
OPTIONS = (
    "data.batch_size", "data.image_size", "data.public_fraction", "data.seed", "data.client_validation",
    "data.partition.init_args.alpha", "data.partition.init_args.num_clients", "data.partition", "data.dataset",
    "training.lr_local", "training.lr_personal", "training.momentum", "model.adapter", "model.backbone",
    "training.optimizer",
    "training.engine", "evaluation.metric", "training.clip_norm", "training.clients_per_chunk", "federated.algorithm",
    "federated.clients_per_round", "training.local_epochs", "federated.weighting", "federated.server_rule",
    "distillation.temperature", "distillation.lr", "privacy.noise_multiplier",
    "federated.client_store", "evaluation.diagnostics", "federated.max_failures", "federated.drop_outliers",
    "federated.resume_allow", "trainer.precision", "seed_everything", "ckpt_path", "no.such.option",
)  # fmt: skip
VALUES = ("", "abc", "-1", "0", "0.5", "2", "nan", "inf", "null", "true", "{}", "[]", "[1]", "1e12", "last", "median")


def try_command_lines(campaign: Campaign, seed: int, count: int, seconds: int = 60) -> None:
    """Run them one after another in this process."""

    def judge(number: int) -> tuple[str, str]:
        draw = random.Random(f"line/{seed}/{number}")
        names = draw.sample(OPTIONS, draw.randint(1, 2))
        words = [f"--{name}={draw.choice(VALUES)}" for name in names]
        return _judged(words, names, seconds), " ".join(words)

    campaign.each("command lines of perada fit", count, judge)


def _judged(words: list[str], names: list[str], seconds: int) -> str:
    here, said = Path.cwd(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said), limited(seconds):
                with mock.patch.object(sys, "argv", ["perada", "fit", *BASE, *words]):
                    entry_point()
        except SystemExit as end:
            if not end.code:
                return "held"
            message = str(end.code)
        except TimeoutError:
            return f"took more than {seconds} s"
        except Exception as error:  # what should not be
            return f"raw {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        else:
            return "held"
        finally:
            os.chdir(here)
    if "\n" in message.strip():
        return f"several lines: {message[:150]}"
    parts = [part for name in names for part in (name, *name.split("."))] + [word.partition("=")[2] for word in words]
    plain = message.replace("_", " ")
    return (
        "named"
        if any(part and part.replace("_", " ") in plain for part in parts)
        else f"names nothing: {message[:200]}"
    )
