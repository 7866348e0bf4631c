# SPDX-License-Identifier: Apache-2.0
"""Several recipes, algorithms and seeds one after another, and one table of what came out."""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from perada.backbones import build_backbone
from perada.callbacks import FederatedLoop
from perada.report import SCORES, percent, table

MakeCLI = Callable[[Sequence[str]], Any]

START = "before fine-tuning"
"""The row of the initial model: pretrained backbone, untrained adapter."""
ALGORITHMS = {
    "fedavg": ["--federated.algorithm=FedAvg"],
    "fedavg_ft": ["--federated.algorithm=FedAvgFT"],
    "perada_no_kd": ["--federated.algorithm=PerAda", "--federated.algorithm.distill=false"],
    "perada": ["--federated.algorithm=PerAda"],
    "ditto": ["--federated.algorithm=Ditto"],
    "standalone": ["--federated.algorithm=Standalone"],
}


def compare(
    make_cli: MakeCLI,
    recipes: Sequence[str],
    algorithms: Sequence[str],
    seeds: Sequence[int],
    output: Path | None,
    overrides: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Run each recipe with each algorithm and seed.

    Args:
        make_cli: Builds trainer, model and data from options of ``perada fit``.
        recipes: Names or files.
        algorithms: Keys of :data:`ALGORITHMS`; where empty, each recipe's own.
        seeds: Seeds of the runs.
        output: A JSON file to write each result to as it comes; results that it holds already are not computed again.
        overrides: Options of ``perada fit`` for every run.

    Returns:
        One record a run: its label, seed, scores, numbers of parameters, megabytes, seconds.
    """
    done: list[dict[str, Any]] = json.loads(output.read_text()) if output and output.is_file() else []
    for seed in seeds:
        for recipe in recipes:
            for algorithm in algorithms or [""]:
                name = recipe.removesuffix(".yaml")
                within = f"{name} " if len(recipes) > 1 else ""
                label, start = within + algorithm if algorithm else name, within + START
                wanted = {"label": label, "recipe": recipe, "seed": seed, "overrides": list(overrides)}
                if any(wanted.items() <= record.items() for record in done):
                    continue
                args = ["--config", recipe, *ALGORITHMS.get(algorithm, []), f"--seed_everything={seed}", *overrides]
                print(f"--- {label}, seed {seed}", flush=True)
                first = not any(r["label"] == start and r["seed"] == seed for r in done)
                for record in _run(make_cli, args, first):
                    done.append({**wanted, **({"label": start} if record.pop("start") else {}), **record})
                if output:
                    output.parent.mkdir(parents=True, exist_ok=True)
                    output.write_text(json.dumps(done, indent=1))
    return done


def _run(make_cli: MakeCLI, args: Sequence[str], start: bool) -> list[dict[str, Any]]:
    """Fit once; with ``start`` also score the initial model."""
    cli = make_cli(args)
    loop: FederatedLoop = cli.loop
    records = []
    if start:
        cli.trainer.validate(cli.model, cli.datamodule, verbose=False)
        records.append({"start": True, **cli.model.scores})
    began = time.perf_counter()
    cli.trainer.fit(cli.model, cli.datamodule)
    seconds = time.perf_counter() - began
    whole = build_backbone(cli.model.backbone, cli.model.num_classes, pretrained=False, image_size=cli.model.image_size)
    tensors = [*whole.model.parameters(), *whole.model.buffers()]
    last = loop.history[-1]
    records.append(
        {
            "start": False,
            **cli.model.scores,
            "params/trained": last["params/trained"],
            "params/sent": last["params/sent"],
            "mb_sent": last["comm/up_mb"] / (loop.clients_per_round or loop.num_clients),
            "full/params": sum(p.numel() for p in whole.model.parameters()),
            "full/mb": sum(t.numel() * t.element_size() for t in tensors) / 1e6,
            "seconds_per_round": seconds / len(loop.history),
        }
    )
    return records


def summary(records: Sequence[dict[str, Any]]) -> str:
    """A row for each label, mean over seeds (± standard deviation where there are several)."""
    labels = list(dict.fromkeys(record["label"] for record in records))
    rows = []
    for label in labels:
        runs = [record for record in records if record["label"] == label]
        rows.append([label, *(_over_seeds(runs, name) for name in SCORES), *_costs(runs)])
    header = ["", *SCORES, "trained", "sent", "MB sent", "s / round"]
    full = next((record for record in records if "full/params" in record), None)
    if full is not None:
        rows.append(
            ["full fine-tuning would", "", "", "", *[_count(full["full/params"])] * 2, f"{full['full/mb']:.2f}", ""]
        )
    return table(header, rows) + "\n\nScores in %, trained and sent parameters and MB sent of one client in one round."


def _over_seeds(runs: Sequence[dict[str, Any]], name: str) -> str:
    values = [run[name] for run in runs if name in run]
    if not values:
        return "–"
    return percent(fmean(values)) + (f" ± {percent(pstdev(values))}" if len(values) > 1 else "")


def _costs(runs: Sequence[dict[str, Any]]) -> list[str]:
    last = runs[-1]
    if "params/trained" not in last:
        return ["–", "–", "–", "–"]
    seconds = fmean(run["seconds_per_round"] for run in runs)
    return [_count(last["params/trained"]), _count(last["params/sent"]), f"{last['mb_sent']:.2f}", f"{seconds:.1f}"]


def _count(number: float) -> str:
    return f"{number:,.0f}"


def main(args: Sequence[str], make_cli: MakeCLI) -> None:
    """Run ``perada compare`` with these arguments; ``make_cli`` as in :func:`compare`."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="perada compare",
        description="Run recipes one after another and print one table. Further options go to `perada fit`.",
    )
    parser.add_argument("recipes", nargs="+", help="Recipes or configuration files.")
    parser.add_argument(
        "--algorithms", nargs="+", default=[], choices=list(ALGORITHMS), help="Instead of the recipes' own."
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="Seeds.")
    parser.add_argument("--output", type=Path, help="JSON file of results; what it holds is not computed again.")
    known, overrides = parser.parse_known_args(list(args))
    print(summary(compare(make_cli, known.recipes, known.algorithms, known.seeds, known.output, overrides)))
