# SPDX-License-Identifier: Apache-2.0
"""Digests of what a change of names and layout must leave equal: final states, recipes, help texts, messages.

``python -m tests.net save FILE`` writes them before a change, ``python -m tests.net compare FILE`` names what differs
after it. Digests of states hold for one machine and one version of torch, so the file is never committed.
"""

import argparse
import ast
import hashlib
import io
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch

import perada
from perada.algorithms.registry import methods
from perada.cli.describe import describe
from perada.cli.recipes import combinations, is_comparison, shipped_recipes
from perada.cli.runs import PeradaCLI
from perada.core.states import State
from perada.data import Digits, Dirichlet, FederatedDataModule, Photographs
from perada.server.rules import SERVER_RULES, TrimmedMean
from tests.options import sections

ROOT = Path(__file__).parents[1]
LORA_ONLY = {"ffa_lora", "fedsa_lora", "rolora", "fedex_lora", "flora", "het_lora", "flexlora", "lora_fair"}
DUAL_LORA = {"feddpa", "feddpa_f", "fedalt_row"}
FULL_MODEL = {"fedbn", "fedalt_input", "fedsim_input", "fedalt_output", "fedsim_output", "lg_fedavg"}
ADAPTER_AND_BACKBONE = {"fedalt_adapter", "fedsim_adapter"}


def state_digest(state: State) -> str:
    """SHA-256 of the names, dtypes, shapes and bytes of a state's tensors, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest()[:16]


def text_digest(text: str) -> str:
    """SHA-256 of a text, cut to 16 letters."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def small_data(clients: int = 4, **options: Any) -> FederatedDataModule:
    """Build a federation with 120 training images in all, and 16 public images."""
    return FederatedDataModule(
        dataset=Digits(),
        partition=Dirichlet(clients, alpha=0.5),
        public=Photographs(16, gray=True),
        train_limit=120,
        test_limit=40,
        image_size=16,
        batch_size=8,
        **options,
    )


def run_digest(data: FederatedDataModule | None = None, **arguments: Any) -> str:
    """Train for two rounds of two steps and return the digest of all clients' and global states and metrics."""
    options: dict[str, Any] = {
        "pretrained": False,
        "rounds": 2,
        "clients_per_round": 3,
        "local_steps": 2,
        "momentum": 0.9,
        "distillation": {"steps": 2, "batch_size": 8},
        "accelerator": "cpu",
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "logger": False,
    }
    run = perada.finetune(
        arguments.pop("backbone", "test_resnet"), data or small_data(), **sections(**options | arguments)
    )
    parts: list[Any] = [state_digest(state) for state in run.states("global")]
    if run.personalized:
        parts += [state_digest(state) for state in run.states("personal")]
    parts.append({name: values for name, values in run.metrics.items() if "time" not in name})
    return text_digest(json.dumps(parts, sort_keys=True, default=str))


def arguments_of(algorithm: str) -> dict[str, Any]:
    """Return the adapter that an algorithm needs, as arguments of `finetune`."""
    if algorithm in DUAL_LORA:
        return {"algorithm": algorithm, "adapter": "dual_lora"}
    if algorithm in LORA_ONLY:
        return {"algorithm": algorithm, "adapter": "lora"}
    if algorithm in FULL_MODEL:
        return {"algorithm": algorithm, "adapter": "full"}
    if algorithm in ADAPTER_AND_BACKBONE:
        return {"algorithm": algorithm, "adapter": "residual", "train_backbone": True}
    return {"algorithm": algorithm, "adapter": "residual"}


def states() -> Iterator[tuple[str, Callable[[], str]]]:
    """Name every small run, with a function that returns its digest."""
    for algorithm, method in methods().items():
        rule = method.server_rule or "mean"
        for engine in ("folded", "loop"):
            arguments = arguments_of(algorithm) | {"algorithm": method.make(), "server_rule": rule, "engine": engine}
            yield f"state/{algorithm}/{engine}", lambda arguments=arguments: run_digest(**arguments)
    for rule in SERVER_RULES:
        arguments = {"algorithm": "fedavg", "adapter": "lora" if rule in ("svd", "lora_fair") else "head"}
        arguments |= {"server_rule": TrimmedMean(0.2) if rule == "trimmed_mean" else rule, "clients_per_round": 5}
        labelled = {"validation_fraction": 0.1} if rule == "fltrust" else {}
        yield (
            f"state/rule/{rule}",
            lambda arguments=arguments, labelled=labelled: run_digest(small_data(6, **labelled), **arguments),
        )
    noise = {"noise_multiplier": 1.0, "max_norm": 1.0, "secure_rng": False}
    others: dict[str, dict[str, Any]] = {
        "lora": {"adapter": "lora"},
        "vit_lora": {"backbone": "test_vit", "adapter": "lora"},
        "full": {"adapter": "full"},
        "chunks": {"clients_per_chunk": 1},
        "cached": {"adapter": "head", "cache_features": True},
        "secure_sums": {"secure_sums": {}},
        "privacy": {"adapter": "head", "privacy": noise},
        "client_privacy": {
            "algorithm": "fedavg",
            "client_privacy": {"noise_multiplier": 1.0, "max_norm": 1.0, "secure_rng": False},
        },
        "diagnostics": {"diagnostics": True},
        "samples": {"weighting": "samples"},
        "student_train": {"distillation": {"steps": 2, "batch_size": 8, "student_mode": "train"}},
        "adamw": {"optimizer": "adamw", "weight_decay": 0.01, "clip_norm": 1.0},
    }
    for name, arguments in others.items():
        yield f"state/option/{name}", lambda arguments=arguments: run_digest(**arguments)


def recipes() -> Iterator[tuple[str, Callable[[], str]]]:
    """Name recipes so that every file is read, with a function that returns the digest of the resolved options."""

    def resolved(name: str) -> str:
        output = io.StringIO()
        with redirect_stdout(output):
            try:
                PeradaCLI(["fit", "--config", name, "--print_config"])
            except SystemExit:
                pass
        return text_digest(output.getvalue())

    # Every file once by itself, and every method and kind of privacy over a data set.
    names = [name for name, path in shipped_recipes().items() if not is_comparison(path)]
    names += combinations("cifar10")
    names += combinations("cifar10/perada")
    for name in names:
        yield f"recipe/{name}", lambda name=name: resolved(name)


def help_texts() -> Iterator[tuple[str, Callable[[], str]]]:
    """Name every command, with a function that returns the digest of its help text and options."""
    for command, facts in describe()["commands"].items():
        yield f"help/{command}", lambda facts=facts: text_digest(json.dumps(facts, sort_keys=True))


def messages() -> Iterator[tuple[str, Callable[[], str]]]:
    """Name every test file, with a function that returns the digest of the messages that it matches."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        patterns = [
            ast.unparse(keyword.value)
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call)
            for keyword in node.keywords
            if keyword.arg == "match"
        ]
        if patterns:
            name = path.relative_to(ROOT).as_posix()
            yield f"messages/{name}", lambda patterns=patterns: text_digest("\n".join(patterns))


def measure(prefix: str) -> dict[str, str]:
    """Return the digest of every entry whose name begins with the prefix; of one that fails, its message."""
    digests: dict[str, str] = {}
    parts = {"messages": messages, "help": help_texts, "recipe": recipes, "state": states}
    for part_name, part in parts.items():
        if prefix and not prefix.startswith(part_name):
            continue
        for name, digest in part():
            if not name.startswith(prefix):
                continue
            began = time.perf_counter()
            try:
                with redirect_stderr(io.StringIO()):
                    digests[name] = digest()
            except Exception as error:
                digests[name] = f"{type(error).__name__}: {str(error)[:300]}"
            print(f"{name}: {digests[name]} ({time.perf_counter() - began:.1f} s)", flush=True)
    return digests


def main() -> int:
    """Save digests, or compare them with saved ones. Returns the number of differences, at most 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.net", description=__doc__)
    parser.add_argument("action", choices=["save", "compare"])
    parser.add_argument("file", type=Path, help="JSON file with the digests")
    parser.add_argument("--prefix", default="", help="only entries whose names begin with this, such as state/perada")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    digests = measure(options.prefix)
    if options.action == "save":
        options.file.write_text(json.dumps(digests, indent=1))
        print(f"Wrote {len(digests)} digests to {options.file}")
        return 0
    saved = {
        name: value for name, value in json.loads(options.file.read_text()).items() if name.startswith(options.prefix)
    }
    different = sorted(name for name in saved.keys() | digests.keys() if saved.get(name) != digests.get(name))
    for name in different:
        print(f"DIFFERENT {name}: {saved.get(name)} before, {digests.get(name)} now")
    print(f"{len(different)} of {len(saved.keys() | digests.keys())} differ")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
