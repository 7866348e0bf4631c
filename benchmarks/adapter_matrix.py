# SPDX-License-Identifier: Apache-2.0
"""Every adapter on every family of backbones: folded, in the loop, or rejected, and why.

``python -m benchmarks.adapter_matrix --output docs/adapter_matrix.md`` writes the page. Each cell is a call of
``perada.finetune`` with two clients and one local step each, and with ``engine="auto"``. Weights are random, images
small: the table says what runs, not how well it learns.
"""

import argparse
import os
import re
import subprocess
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import peft
import torch
from peft import PeftConfig
from torch.utils.data import TensorDataset

import perada
from benchmarks import backbone_list
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
OUTCOMES = ("folded", "loop", "rejected", "not tested")
HEAVY = {"OFT", "BOFT", "LoHa", "LoKr", "HRA"}
"""Methods that make a weight as large as a layer's in each pass, and so are tried on the small networks only."""
SIDE = 64
CLASSES = 3
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "accelerator": "cpu",
}
"""Options of a trainer that prints and writes nothing."""


class Cell(NamedTuple):
    """Outcome of one adapter on one backbone.

    Attributes:
        verdict: ``folded``, ``loop``, ``rejected`` (an error of one line), or ``raw error``.
        why: The warning or the error; empty for ``folded``.
    """

    verdict: str
    why: str = ""


def cell(backbone: str, adapter: str | PeftConfig) -> Cell:
    """Train an adapter on a backbone for one local step, and return the outcome."""
    random = generator(0, "adapter matrix")

    def dataset(count: int) -> TensorDataset:
        images = torch.randint(0, 256, (count, 3, SIDE, SIDE), dtype=torch.uint8, generator=random)
        return TensorDataset(images, torch.arange(count) % CLASSES)

    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        try:
            perada.finetune(
                backbone,
                FederatedData([dataset(2), dataset(3)], num_classes=CLASSES),
                adapter=adapter,
                pretrained=False,
                image_size=SIDE,
                algorithm="fedavg",
                rounds=1,
                local_steps=1,
                batch_size=2,
                **QUIET,
            )
        except ValueError as error:
            message = str(error)
            verdict = "raw error" if "\n" in message else "rejected"
            return Cell(verdict, " ".join(message.split()))
        except Exception as error:  # an error without a message for users
            return Cell("raw error", f"{type(error).__name__}: {' '.join(str(error).split())}")
    for warning in caught_warnings:
        message = str(warning.message)
        if "falls back to the per-client loop" in message:
            return Cell("loop", message)
    return Cell("folded")


def matrix(backbones: Sequence[str] = BACKBONES, adapters: Sequence[str] = ()) -> dict[tuple[str, str], Cell]:
    """Try adapters on backbones.

    Args:
        backbones: Names of backbones.
        adapters: Names of adapters; all of them if there are none.

    Returns:
        The outcomes by the names of backbone and adapter. Heavy methods on large backbones are left out.
    """
    cells: dict[tuple[str, str], Cell] = {}
    for backbone in backbones:
        for adapter in adapters or ADAPTERS:
            if backbone in SMALL or adapter not in HEAVY:
                cells[backbone, adapter] = cell(backbone, ADAPTERS[adapter])
    return cells


def page(cells: dict[tuple[str, str], Cell], commit: str) -> str:
    """Return the page that shows a matrix."""
    return "\n".join(_lines(cells, commit)) + "\n"


def _lines(cells: dict[tuple[str, str], Cell], commit: str) -> Iterator[str]:
    backbones = list(dict.fromkeys(backbone for backbone, _ in cells))
    adapters = list(dict.fromkeys(adapter for _, adapter in cells))
    yield "# Which adapter runs on which backbone\n"
    yield "<!-- generated: python -m benchmarks.adapter_matrix -->\n"
    yield (
        "This page shows which adapter runs on which backbone, not how well it learns. Each outcome is that of a run "
        f"of two clients with one local step each, with random weights, images of {SIDE}×{SIDE} pixels and "
        "`engine: auto`.\n"
    )
    yield "- **folded**: all clients of a round train as one batch."
    yield "- **loop**: clients train one after another, which gives the same result and takes longer."
    yield "- **rejected**: the run ends with an error, whose [number](#reasons) is in brackets."
    yield "- **not tested**: too slow (it builds a full-size weight for every layer).\n"
    yield "## By adapter\n"
    yield "Numbers of backbones with each outcome:\n"
    yield table(["adapter", *OUTCOMES], _counts_by_adapter(cells, backbones, adapters))
    yield ""
    # Numbers of the reasons, in the order in which the sections mention them.
    reasons: dict[str, int] = {}
    for names, adapters_by_outcome in _group_backbones(cells, backbones, adapters, reasons).items():
        title = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        yield f"## {title}\n"
        if len(names) > 1:
            yield f"The same for {', '.join(f'`{name}`' for name in names)}.\n"
        for outcome, found in adapters_by_outcome:
            yield f"- **{outcome}**: {', '.join(found)}"
        yield ""
    yield "## Reasons\n"
    for reason, number in reasons.items():
        yield f"{number}. `{reason}`"
    yield "\n<!-- /generated -->\n\n## Provenance\n"
    torch_version = torch.__version__.partition("+")[0]
    command = "`python -m benchmarks.adapter_matrix --output docs/adapter_matrix.md`"
    yield table(["command", "commit", "torch", "PEFT"], [[command, commit, torch_version, peft.__version__]])


def _counts_by_adapter(
    cells: dict[tuple[str, str], Cell], backbones: Sequence[str], adapters: Sequence[str]
) -> list[list[str]]:
    """Return a row for each adapter: its name, and how many backbones have each outcome."""
    rows = []
    for adapter in adapters:
        counts = Counter(_outcome(cells.get((backbone, adapter))) for backbone in backbones)
        rows.append([adapter, *(str(counts[outcome]) for outcome in OUTCOMES)])
    return rows


AdaptersByOutcome = tuple[tuple[str, tuple[str, ...]], ...]
"""Each outcome that occurs, with its adapters; a rejected one is followed by the number of its reason."""


def _group_backbones(
    cells: dict[tuple[str, str], Cell], backbones: Sequence[str], adapters: Sequence[str], reasons: dict[str, int]
) -> dict[tuple[str, ...], AdaptersByOutcome]:
    """Put backbones together on which all adapters have the same outcome, and number new reasons in ``reasons``."""
    names_by_outcomes: dict[AdaptersByOutcome, list[str]] = {}
    for backbone in backbones:
        found: dict[str, list[str]] = {outcome: [] for outcome in OUTCOMES}
        for adapter in adapters:
            outcome_cell = cells.get((backbone, adapter))
            outcome = _outcome(outcome_cell)
            text = adapter
            if outcome_cell is not None and outcome == "rejected":
                text += f" ({_number_reason(outcome_cell, backbone, reasons)})"
            found[outcome].append(text)
        outcomes = tuple((outcome, tuple(names)) for outcome, names in found.items() if names)
        names_by_outcomes.setdefault(outcomes, []).append(backbone)
    return {tuple(names): outcomes for outcomes, names in names_by_outcomes.items()}


def _outcome(cell: Cell | None) -> str:
    """Return the word of the page for a cell; None stands for an adapter that was not tried."""
    if cell is None:
        return "not tested"
    return cell.verdict if cell.verdict in ("folded", "loop") else "rejected"


def _number_reason(cell: Cell, backbone: str, reasons: dict[str, int]) -> str:
    """Return the number of a rejection's reason, a new one if ``reasons`` lacks it; in bold for a raw error."""
    # Without the names of the backbone and of its class, reasons of several backbones are one.
    reason = re.sub(r", not \w+;", ";", cell.why.replace(repr(backbone), "…"))
    number = reasons.setdefault(reason, len(reasons) + 1)
    return str(number) if cell.verdict == "rejected" else f"**{number}**"


def main() -> None:
    """Run the matrix and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adapter_matrix", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("lightning_logs/adapter_matrix.md"))
    parser.add_argument("--backbones", nargs="*", default=list(BACKBONES), help="timm names.")
    parser.add_argument("--adapters", nargs="*", default=list(ADAPTERS), choices=list(ADAPTERS))
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    commit = git.stdout.strip()
    cells: dict[tuple[str, str], Cell] = {}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    # The section of benchmarks.backbone_list stays at the end of the page.
    other_sections = ""
    if options.output.is_file():
        _, has_section, section = options.output.read_text().partition(backbone_list.START)
        other_sections = f"\n{has_section}{section}"
    for backbone in options.backbones:
        for adapter in options.adapters:
            new_cells = matrix([backbone], [adapter])
            cells |= new_cells
            for outcome in new_cells.values():
                print(backbone, adapter, outcome.verdict, outcome.why, sep="\t", flush=True)
        # After each backbone, since the others may take long.
        options.output.write_text(page(cells, commit) + other_sections)


if __name__ == "__main__":
    main()
