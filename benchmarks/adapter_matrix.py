# SPDX-License-Identifier: Apache-2.0
"""Every adapter on every family of backbones: folded, in the loop, or refused, and why.

``python -m benchmarks.adapter_matrix --output docs/adapter_matrix.md`` writes the page. Each cell is a call of
``perada.finetune`` with two clients and one local step each, and with ``engine="auto"``. Weights are random, images
small: the table says what runs, not how well it learns.
"""

import argparse
import os
import subprocess
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import peft
import torch
from peft import PeftConfig
from torch.utils.data import TensorDataset

import perada
from perada.core.seeding import generator
from perada.data import FederatedData
from perada.results.report import table

SMALL = ("test_resnet", "test_convnext", "test_efficientnet", "test_vit")
"""Quick to run: those of ``make test``."""
BACKBONES = (
    *SMALL,
    "mobilenetv3_small_050",
    "regnetx_002",
    "deit_tiny_patch16_224",
    "densenet121",
    "resnetv2_18",
    "mixer_s32_224",
    "efficientnet_b0",
    "resnet50",
    "swin_tiny_patch4_window7_224",
)
ADAPTERS: dict[str, str | PeftConfig] = {
    **{
        name: name
        for name in ("residual", "bottleneck", "prompt", "lora", "dual_lora", "ia3", "bias_norm", "head", "full")
    },
    "DoRA": peft.LoraConfig(use_dora=True),
    "AdaLoRA": peft.AdaLoraConfig(total_step=100),
    "VeRA": peft.VeraConfig(r=8),
    "OFT": peft.OFTConfig(),
    "BOFT": peft.BOFTConfig(),
    "LoHa": peft.LoHaConfig(),
    "LoKr": peft.LoKrConfig(),
    "FourierFT": peft.FourierFTConfig(n_frequency=50),
    "HRA": peft.HRAConfig(),
    "MiSS": peft.MissConfig(r=8),
    "LN tuning": peft.LNTuningConfig(),
}
"""perada's own names, and configurations of PEFT's methods, none with ``target_modules``."""
HEAVY = {"OFT", "BOFT", "LoHa", "LoKr", "HRA"}
"""Methods that make a weight as large as a layer's in each pass, and so are tried on the small networks alone."""
SIDE, CLASSES = 64, 3


class Cell(NamedTuple):
    """What became of one adapter on one backbone.

    Attributes:
        verdict: ``folded``, ``loop``, ``refused`` (an error of one line), or ``raw error``.
        why: The warning or the error; empty for ``folded``.
    """

    verdict: str
    why: str = ""


def cell(backbone: str, adapter: str | PeftConfig) -> Cell:
    """Try an adapter on a backbone."""
    random = generator(0, "adapter matrix")

    def images(count: int) -> TensorDataset:
        shape = (count, 3, SIDE, SIDE)
        return TensorDataset(
            torch.randint(0, 256, shape, dtype=torch.uint8, generator=random), torch.arange(count) % CLASSES
        )

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            perada.finetune(
                backbone,
                FederatedData([images(2), images(3)], num_classes=CLASSES),
                adapter=adapter,
                pretrained=False,
                image_size=SIDE,
                algorithm="fedavg",
                rounds=1,
                local_steps=1,
                batch_size=2,
                **quiet,
            )
        except ValueError as error:
            line = str(error)
            return Cell("refused" if "\n" not in line else "raw error", " ".join(line.split()))
        except Exception as error:  # whatever was not foreseen
            return Cell("raw error", f"{type(error).__name__}: {' '.join(str(error).split())}")
    looped = [str(one.message) for one in said if "falls back to the per-client loop" in str(one.message)]
    return Cell("loop", looped[0]) if looped else Cell("folded")


def matrix(backbones: Sequence[str] = BACKBONES, adapters: Sequence[str] = ()) -> dict[tuple[str, str], Cell]:
    """Try adapters, by default all, on backbones; ``{(backbone, adapter): cell}``."""
    tried = [
        (backbone, name)
        for backbone in backbones
        for name in adapters or ADAPTERS
        if backbone in SMALL or name not in HEAVY
    ]
    return {(backbone, name): cell(backbone, ADAPTERS[name]) for backbone, name in tried}


def page(cells: dict[tuple[str, str], Cell], commit: str) -> str:
    """The page that shows a matrix."""
    return "\n".join(_lines(cells, commit)) + "\n"


def _lines(cells: dict[tuple[str, str], Cell], commit: str) -> Iterator[str]:
    backbones, adapters = (list(dict.fromkeys(key[place] for key in cells)) for place in (0, 1))
    counted = Counter(cell.verdict for cell in cells.values())
    yield "# Which adapter runs on which backbone\n"
    yield (
        "This page is generated. Each cell is a run of two clients with one local step each, with random weights, "
        f"images of {SIDE}×{SIDE} pixels and `engine: auto`. It says what runs, not how well it learns.\n"
    )
    yield (
        f"Made by `python -m benchmarks.adapter_matrix --output docs/adapter_matrix.md` at commit {commit} with torch "
        f"{torch.__version__.partition('+')[0]} and PEFT {peft.__version__}.\n"
    )
    yield "- **folded**: all clients of a round train as one batch."
    yield "- **loop**: clients train one after another. The result is the same, and it takes longer."
    yield "- **–**: not tried, since the method makes a weight as large as each layer in every pass."
    yield "- A number stands for the reason below why the adapter is refused.\n"
    yield "Of all cells, " + ", ".join(f"{count} are {verdict}" for verdict, count in counted.most_common()) + ".\n"
    reasons: dict[str, int] = {}

    def shown(backbone: str, adapter: str) -> str:
        found = cells.get((backbone, adapter))
        if found is None or found.verdict in ("folded", "loop"):
            return found.verdict if found else "–"
        number = str(reasons.setdefault(found.why.replace(repr(backbone), "…"), len(reasons) + 1))
        return number if found.verdict == "refused" else f"**{number}**"

    yield table(["backbone", *adapters], [[one, *(shown(one, adapter) for adapter in adapters)] for one in backbones])
    yield "\n## Reasons\n"
    for reason, number in reasons.items():
        yield f"{number}. `{reason}`"


def main() -> None:
    """Run the matrix and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adapter_matrix", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("lightning_logs/adapter_matrix.md"))
    parser.add_argument("--backbones", nargs="*", default=list(BACKBONES), help="timm names.")
    parser.add_argument("--adapters", nargs="*", default=list(ADAPTERS), choices=list(ADAPTERS))
    given = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    cells: dict[tuple[str, str], Cell] = {}
    for backbone in given.backbones:
        for adapter in given.adapters:
            for key, found in matrix([backbone], [adapter]).items():
                cells[key] = found
                print(*key, found.verdict, found.why, sep="\t", flush=True)
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(page(cells, commit))  # of what there is: the rest may take long


if __name__ == "__main__":
    main()
