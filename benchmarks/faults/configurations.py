# SPDX-License-Identifier: Apache-2.0
"""Random configurations: each is run, or refused in one line that names the option, the value, the reason, the remedy.

The options are those of the signatures of ``finetune``, the data module, the partitions, rules and algorithms; for each
there are values that can be used, and for all of them some that rarely can.
"""

import inspect
import math
import random
import signal
import tempfile
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from torch import nn
from torch.utils.data import TensorDataset

import perada
from benchmarks.faults.outcomes import Campaign, Verdict
from perada.algorithms import ALGORITHMS
from perada.data import Digits, Dirichlet, DominantClass, FederatedData, FederatedDataModule, Shards
from perada.data.partitions import IID
from perada.privacy import ClientPrivacy, Privacy
from perada.server import SERVER_RULES, Distillation

SECONDS = 60
WRONG: tuple[Any, ...] = (
    10**12, 10**30, 10**400, 1e308, 1e-30, -1, 0, 0.5, math.nan, math.inf, -math.inf, True, None, "", "abc", "1",
    {}, [], (), [1], {"a": 1},
)  # fmt: skip
"""Values that few options take."""
RIGHT: dict[str, tuple[Any, ...]] = {
    "adapter": ("residual", "bottleneck", "prompt", "lora", "dual_lora", "ia3", "head", "bias_norm", "full"),
    "adapter_options": ({}, {"r": 2}, {"r": "abc"}, {"r": 0}, {"dropout": 0.1}, {"none": 1}),
    "algorithm": tuple(ALGORITHMS),
    "algorithm_options": ({}, {"modes": 2}, {"prox_strength": 0.1}, {"prox_strength": "a"}, {"none": 1}),
    "server_rule": tuple(SERVER_RULES),
    "distillation": (None, {"steps": 1}, {"steps": 1, "temperature": 2}, {"none": 1}, {"steps": -1}),
    "privacy": (None, {"noise_multiplier": 1.0}, {"target_epsilon": 8}, {"max_norm": -1}, {"noise_multiplier": "x"}),
    "client_privacy": (None, {"noise_multiplier": 1.0}, {"noise_multiplier": math.nan}, {"none": 0}),
    "training": (None, {"momentum": 0.9}, {"optimizer": "adam"}, {"engine": "loop"}, {"clip_norm": -1}, {"none": 1}),
    "evaluation": ({"metric": "auroc"}, {"metric": ["accuracy", "ece"]}, {"metric": "none"}, {"diagnostics": True}),
    "rounds": (0, 1, 2),
    "local_steps": (1, 2),
    "local_epochs": (1, 0.5),
    "clients_per_round": (1, 2, 3),
    "batch_size": (1, 4, "full"),
    "image_size": (8, 16),
    "num_classes": (3, 4, 10),
    "pretrained": (False, True, "nowhere.safetensors"),
    "precision": ("32-true", "bf16-mixed", "64-true", "16-mixed"),
    "max_failures": (None, 0, 3),
    "resume_allow": (None, ["training.lr_local"], ["none"]),
    "ckpt_path": (None, "last", "nowhere.ckpt"),
}
ENDLESS = {"rounds", "local_steps", "local_epochs"}
"""Options of which the first wrong value would be right, and take years."""
LEFT_OUT = {"backbone", "data", "trainer", "trainer_kwargs"}  # or too slow to be tried often
PARTITIONS = (IID, Dirichlet, Shards, DominantClass)


@dataclass(frozen=True)
class Call:
    """A call of ``finetune``, and the options in which it differs from what works."""

    options: dict[str, Any]
    make: Callable[..., perada.Run]


def configuration(seed: int, number: int) -> Call:
    """A call of ``finetune`` with random options, which follow from the seed and the number alone."""
    draw = random.Random(f"{seed}/{number}")
    return _divided(draw) if draw.random() < 0.25 else _given(draw)


def try_configurations(campaign: Campaign, seed: int, count: int, seconds: int = SECONDS) -> None:
    """Run random configurations one after another.

    Args:
        campaign: Where the verdicts are recorded.
        seed: Seed of all draws.
        count: Number of configurations.
        seconds: Longest time of one.
    """

    def judge(number: int) -> Verdict:
        call = configuration(seed, number)
        description = ", ".join(f"{name}={value!r}" for name, value in call.options.items())[:300]
        return Verdict(outcome_of(call, seconds), description)

    campaign.try_all("configurations by finetune", count, judge)


def outcome_of(call: Call, seconds: int = SECONDS) -> str:
    """Make a call, and return the outcome."""
    with (
        warnings.catch_warnings(record=True) as caught_warnings,
        tempfile.TemporaryDirectory() as folder,
        limited(seconds),
    ):
        warnings.simplefilter("always")
        try:
            run = call.make(default_root_dir=folder)
        except TimeoutError:
            return f"took more than {seconds} s"
        except (ValueError, TypeError, OSError, ImportError) as error:
            return _outcome_of_refusal(str(error), call.options)
        except Exception as error:  # any other is a bug
            if type(error).__name__ == "MisconfigurationException":  # Lightning rejects an option of its own
                return _outcome_of_refusal(str(error), call.options)
            return f"raw {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    warnings_text = " ".join(str(warning.message) for warning in caught_warnings)
    last_round = run.metrics["rounds"][-1] if run.metrics["rounds"] else {}
    # The standard deviation of one client is NaN.
    broken = [name for name, value in last_round.items() if math.isnan(value) and not name.endswith("_std")]
    if broken and not any(word in warnings_text for word in ("NaN", "test image", "AUROC", "score")):
        return f"{broken[0]} is NaN without a word"
    return "held"


def _outcome_of_refusal(message: str, options: dict[str, Any]) -> str:
    """Check that a refusal is one line that names a given option, or its value, and a remedy."""
    if "\n" in message.strip():
        return f"several lines: {message.splitlines()[0][:150]}"
    names = [part for name in options for part in (name, name.removesuffix("_options"))]
    names += [key for value in options.values() if isinstance(value, dict) for key in value]
    kinds = [kind for kind in PARTITIONS if kind.__name__ == options.get("partition")]
    kinds += [
        SERVER_RULES[rule] for rule in [options.get("server_rule")] if isinstance(rule, str) and rule in SERVER_RULES
    ]
    names += [name for kind in kinds for name in inspect.signature(kind).parameters]
    names += [str(value) for value in options.values() if isinstance(value, str) and value]
    plain = message.lower().replace("_", " ")
    if not any(name.lower().replace("_", " ") in plain for name in names):
        return f"names no option: {message[:200]}"
    return "named" if any(mark in message for mark in (";", ":", ",")) else f"no remedy: {message[:200]}"


def _given(draw: random.Random) -> Call:
    """A call with clients' own tensors, a small network, and some options that differ from what works."""
    signature = inspect.signature(perada.finetune)
    hints = get_type_hints(perada.finetune)
    names = [name for name in signature.parameters if name not in LEFT_OUT]
    options = {name: _value(draw, name, hints.get(name)) for name in draw.sample(names, draw.randint(1, 4))}
    if draw.random() < 0.1:
        options["precision"] = draw.choice(RIGHT["precision"])

    def call(**more: Any) -> perada.Run:
        base = {"adapter": "head", "rounds": 1, "local_steps": 1, "algorithm": "fedavg", "batch_size": 4}
        return perada.finetune(_network(), _data(), **base | options | QUIET | more)

    return Call(options, call)


def _divided(draw: random.Random) -> Call:
    """A call with digits that a partition divides, whose options and the data module's are drawn."""
    kind = draw.choice(PARTITIONS)
    own = [name for name in inspect.signature(kind).parameters if name != "num_clients"]
    of_partition = {name: _value(draw, name, get_type_hints(kind.__init__).get(name)) for name in own}
    of_partition = {name: of_partition[name] for name in draw.sample(own, draw.randint(0, len(own)))}
    if draw.random() < 0.3:
        of_partition["num_clients"] = draw.choice(WRONG)
    hints = get_type_hints(FederatedDataModule.__init__)
    left_out = {"data", "dataset", "partition", "public", "shifts", "num_workers", "return", "device_cache_mb"}
    names = [name for name in hints if name not in left_out]
    of_module = {name: _value(draw, name, hints[name]) for name in draw.sample(names, draw.randint(0, 3))}

    def call(**more: Any) -> perada.Run:
        partition = kind(**{"num_clients": 3} | of_partition)
        data = FederatedDataModule(
            dataset=Digits(), partition=partition, **{"train_limit": 60, "test_limit": 30, "batch_size": 8} | of_module
        )
        network = nn.Sequential(nn.Flatten(), nn.LazyLinear(10))
        network(torch.zeros(1, 1, 8, 8))
        return perada.finetune(
            network, data, adapter="head", rounds=1, local_steps=1, algorithm="fedavg", **QUIET | more
        )

    return Call({"partition": kind.__name__} | of_partition | of_module, call)


QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def _value(draw: random.Random, name: str, hint: object) -> object:
    """A value of an option: half of the time one that its type, or ``RIGHT``, says can be used."""
    if draw.random() < 0.5:
        return draw.choice(WRONG[1:] if name in ENDLESS else WRONG)
    return draw.choice(RIGHT.get(name) or _of_type(hint))


def _of_type(hint: object) -> tuple[object, ...]:
    """Some values of a type."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(value for one in get_args(hint) for value in _of_type(one))
    known: dict[Any, tuple[Any, ...]] = {
        int: (1, 2, 3),
        float: (0.01, 0.1, 0.5, 1.0),
        bool: (False, True),
        str: ("mean", "no_such"),
        Privacy: (Privacy(noise_multiplier=1.0),),
        ClientPrivacy: (ClientPrivacy(1.0),),
        Distillation: (Distillation(1),),
    }
    return known.get(hint, (None,))


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3))


def _data() -> FederatedData:
    random = torch.Generator().manual_seed(0)

    def part(count: int) -> TensorDataset:
        return TensorDataset(torch.randn(count, 1, 8, 8, generator=random), torch.arange(count) % 3)

    public = TensorDataset(torch.randn(6, 1, 8, 8, generator=random))
    return FederatedData([part(count) for count in (6, 9, 5)], [part(4) for _ in range(3)], public)


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise a TimeoutError after so many seconds."""

    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
