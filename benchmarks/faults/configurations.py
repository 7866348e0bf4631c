# SPDX-License-Identifier: Apache-2.0
"""Random configurations: each is run, or rejected in one line with the option, the value, the reason and the remedy.

The options are those in the signatures of ``finetune``, the data module, the partitions, tasks, rules and algorithms.
Their values are drawn from valid ones of each option, and from values that few options accept.
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
from benchmarks.faults.labels import DEFAULT_LABELS, LABELS, NUM_OUTPUTS, make_labels
from benchmarks.faults.outcomes import REPORTED, SURVIVED, Campaign, Verdict
from perada.algorithms import ALGORITHMS
from perada.data import Digits, Dirichlet, DominantClass, FederatedData, FederatedDataModule, Shards
from perada.data.partitions import IID
from perada.privacy import ClientPrivacy, Privacy
from perada.server import SERVER_RULES, Distillation
from perada.tasks import Classification, MultiLabel, Regression, Segmentation, Task

SECONDS = 60
WRONG: tuple[Any, ...] = (
    10**12, 10**30, 10**400, 1e308, 1e-30, -1, 0, 0.5, math.nan, math.inf, -math.inf, True, None, "", "abc", "1",
    {}, [], (), [1], {"a": 1},
)  # fmt: skip
"""Values that few options accept."""
TYPICAL: dict[str, tuple[Any, ...]] = {
    "adapter": ("residual", "bottleneck", "prompt", "lora", "dual_lora", "ia3", "head", "bias_norm", "full"),
    "adapter_options": ({}, {"r": 2}, {"r": "abc"}, {"r": 0}, {"dropout": 0.1}, {"none": 1}),
    "algorithm": tuple(ALGORITHMS),
    "algorithm_options": ({}, {"modes": 2}, {"prox_strength": 0.1}, {"prox_strength": "a"}, {"none": 1}),
    "server_rule": tuple(SERVER_RULES),
    "distillation": (None, {"steps": 1}, {"steps": 1, "temperature": 2}, {"none": 1}, {"steps": -1}),
    "privacy": (None, {"noise_multiplier": 1.0}, {"target_epsilon": 8}, {"max_norm": -1}, {"noise_multiplier": "x"}),
    "client_privacy": (None, {"noise_multiplier": 1.0}, {"noise_multiplier": math.nan}, {"none": 0}),
    "training": (None, {"momentum": 0.9}, {"optimizer": "adam"}, {"engine": "loop"}, {"clip_norm": -1}, {"none": 1}),
    "class_weights": ([1.0, 2.0, 3.0], "balanced", "balanced_per_client", [1.0], [0, 0, 0], [1, 1, math.nan]),
    "positive_weights": ([1.0, 2.0, 3.0], "balanced", "balanced_per_client", [1.0], [-1, 1, 1]),
    "ignore_index": (None, 255, 0, 3),
    "mean": (None, 20.0, [20.0, 20.0, 20.0], [1.0], [1, 1, math.inf]),
    "std": (None, 5.0, [5.0, 10.0, 20.0], [1.0], [1, 1, 0]),
    "standardize": (None, "all"),
    "distill_stride": (1, 2, 100),
    "evaluation": (
        {"metric": "auroc"},
        {"metric": "mae"},
        {"metric": ["dice", "miou"]},
        {"metric": ["accuracy", "ece"]},
        {"metric": "none"},
        {"diagnostics": True},
    ),
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
"""Values of options that are valid, or nearly so."""
ENDLESS = {"rounds", "local_steps", "local_epochs"}
"""Options for which the first of the wrong values is valid, and would take years."""
LEFT_OUT = {"backbone", "data", "trainer", "trainer_kwargs"}
"""Arguments of ``finetune`` that are fixed here, or too slow to be varied."""
LEFT_OUT_OF_MODULE = {
    "data",
    "dataset",
    "partition",
    "public",
    "shifts",
    "num_workers",
    "return",
    "device_cache_mb",
}
"""The same of the data module, with the entry of its hints that is no argument."""
SIDE = 8
"""Height and width of an image in pixels."""
TASKS: dict[str, type[Task]] = {
    DEFAULT_LABELS: Classification,
    "weighted classes": Classification,
    "unknown labels": MultiLabel,
    "numbers": Regression,
    "masks": Segmentation,
}
"""Tasks that fit the kinds of labels."""
PARTITIONS = (IID, Dirichlet, Shards, DominantClass)


@dataclass(frozen=True)
class Call:
    """A call of ``finetune``.

    Attributes:
        options: The random options in which it differs from a valid call.
        make: Makes the call, with further options.
        labels: Kind of labels.
    """

    options: dict[str, Any]
    make: Callable[..., perada.Run]
    labels: str = DEFAULT_LABELS


def configuration(seed: int, number: int) -> Call:
    """Return a call of ``finetune`` with random options, which follow from the seed and the number."""
    draw = random.Random(f"{seed}/{number}")
    kind = draw.random()
    if kind < 0.2:
        return _call_on_partition(draw)
    if kind < 0.4:
        return _call_with_task(draw)
    return _call_on_tensors(draw)


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
        return Verdict(outcome_of(call, seconds), f"{call.labels}: {description}")

    campaign.try_all("configurations by finetune", count, judge)


def outcome_of(call: Call, seconds: int = SECONDS) -> str:
    """Make a call, and return the outcome."""
    options = call.options
    task = LABELS[call.labels].task
    if task is not None:
        # Tasks of labels are options of a valid call, which may not go with the random ones.
        options = {"task": task} | options
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
            return _outcome_of_rejection(str(error), options)
        except Exception as error:  # any other is a bug
            if type(error).__name__ == "MisconfigurationException":  # Lightning rejects an option of its own
                return _outcome_of_rejection(str(error), options)
            return f"raw {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    warnings_text = " ".join(str(warning.message) for warning in caught_warnings)
    last_round = run.metrics["rounds"][-1] if run.metrics["rounds"] else {}
    # The standard deviation of one client is NaN.
    broken = [name for name, value in last_round.items() if math.isnan(value) and not name.endswith("_std")]
    if broken and not any(word in warnings_text for word in ("NaN", "test image", "AUROC", "score")):
        return f"{broken[0]} is NaN without a word"
    return SURVIVED


def _outcome_of_rejection(message: str, options: dict[str, Any]) -> str:
    """Check that an error is one line that names an option of the call, or its value, and a remedy."""
    if "\n" in message.strip():
        return f"several lines: {message.splitlines()[0][:150]}"
    plain_message = message.lower().replace("_", " ")
    if not any(name.lower().replace("_", " ") in plain_message for name in _names_in(options)):
        return f"names no option: {message[:200]}"
    if not any(mark in message for mark in (";", ":", ",")):
        return f"no remedy: {message[:200]}"
    return REPORTED


def _names_in(options: dict[str, Any]) -> list[str]:
    """Return what a message may call the options of a call: their names, those in sections and classes, and words."""
    names: list[str] = []
    classes: list[type] = [partition for partition in PARTITIONS if partition.__name__ == options.get("partition")]
    rule = options.get("server_rule")
    if isinstance(rule, str) and rule in SERVER_RULES:
        classes.append(SERVER_RULES[rule])
    for options_class in classes:
        names += inspect.signature(options_class).parameters
    if "task" in options:
        # Labels that do not fit the task are described by themselves: "client 0 has the training label nan".
        names.append("label")
    for name, value in options.items():
        names += [name, name.removesuffix("_options"), name.removeprefix("client_")]
        if isinstance(value, dict):
            names += value
        elif isinstance(value, Task):
            names += inspect.signature(type(value)).parameters
        elif isinstance(value, str) and value:
            names.append(value)
    return names


def _call_on_tensors(draw: random.Random) -> Call:
    """Return a call with clients' tensors, a small network, and one to four random options."""
    signature = inspect.signature(perada.finetune)
    hints = get_type_hints(perada.finetune)
    names = [name for name in signature.parameters if name not in LEFT_OUT]
    options = {name: _value(draw, name, hints.get(name)) for name in draw.sample(names, draw.randint(1, 4))}
    if draw.random() < 0.1:
        options["precision"] = draw.choice(TYPICAL["precision"])

    labels = draw.choice(list(LABELS))

    def call(**further_options: Any) -> perada.Run:
        base = {"adapter": "head", "task": LABELS[labels].task, "batch_size": 4} | SHORT
        return perada.finetune(_network(labels), _data(labels), **base | options | QUIET | further_options)

    return Call(options, call, labels)


def _call_with_task(draw: random.Random) -> Call:
    """Return a call with a task that has random options, and random options of the data module and of ``finetune``."""
    labels = draw.choice(list(LABELS))
    task_class = TASKS[labels] if draw.random() < 0.8 else draw.choice(list(TASKS.values()))
    task_hints = get_type_hints(task_class.__init__)
    task_names = list(inspect.signature(task_class).parameters)
    sampled_names = draw.sample(task_names, draw.randint(0, min(3, len(task_names))))
    task_options = {name: _value(draw, name, task_hints[name]) for name in sampled_names}
    module_options: dict[str, Any] = {}
    for name, values in {"sampling": ("uniform", "balanced"), "mixup": (0.0, 0.2), "flip": (False, True)}.items():
        if draw.random() < 0.3:
            module_options[name] = draw.choice(values)
    options: dict[str, Any] = {}
    for name in ("algorithm", "adapter", "privacy", "client_privacy", "distillation", "evaluation", "server_rule"):
        if draw.random() < 0.2:
            options[name] = draw.choice(TYPICAL[name])

    def call(**further_options: Any) -> perada.Run:
        data = FederatedDataModule(_data(labels), task=task_class(**task_options), batch_size=4, **module_options)
        base = {"adapter": "head"} | SHORT
        return perada.finetune(_network(labels), data, **base | options | QUIET | further_options)

    return Call({"task": task_class.__name__} | task_options | module_options | options, call, labels)


def _call_on_partition(draw: random.Random) -> Call:
    """Return a call with digits that a partition divides, with random options of the partition and the data module."""
    partition_class = draw.choice(PARTITIONS)
    partition_hints = get_type_hints(partition_class.__init__)
    names = [name for name in inspect.signature(partition_class).parameters if name != "num_clients"]
    values = {name: _value(draw, name, partition_hints.get(name)) for name in names}
    partition_options = {name: values[name] for name in draw.sample(names, draw.randint(0, len(names)))}
    if draw.random() < 0.3:
        partition_options["num_clients"] = draw.choice(WRONG)
    hints = get_type_hints(FederatedDataModule.__init__)
    module_names = [name for name in hints if name not in LEFT_OUT_OF_MODULE]
    sampled_names = draw.sample(module_names, draw.randint(0, 3))
    module_options = {name: _value(draw, name, hints[name]) for name in sampled_names}

    def call(**further_options: Any) -> perada.Run:
        partition = partition_class(**{"num_clients": 3} | partition_options)
        limits = {"train_limit": 60, "test_limit": 30, "batch_size": 8}
        data = FederatedDataModule(dataset=Digits(), partition=partition, **limits | module_options)
        network = nn.Sequential(nn.Flatten(), nn.LazyLinear(10))
        network(torch.zeros(1, 1, 8, 8))
        return perada.finetune(network, data, adapter="head", **SHORT | QUIET | further_options)

    return Call({"partition": partition_class.__name__} | partition_options | module_options, call)


SHORT: dict[str, Any] = {"rounds": 1, "local_steps": 1, "algorithm": "fedavg"}
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def _value(draw: random.Random, name: str, hint: object) -> object:
    """Draw a value of an option: half of the time one that few options accept, else a typical one."""
    if draw.random() < 0.5:
        wrong_values = WRONG[1:] if name in ENDLESS else WRONG
        return draw.choice(wrong_values)
    return draw.choice(TYPICAL.get(name) or _values_of_type(hint))


def _values_of_type(hint: object) -> tuple[object, ...]:
    """Return some values of a type."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    if get_origin(hint) in (Union, types.UnionType):
        values: list[object] = []
        for member in get_args(hint):
            values += _values_of_type(member)
        return tuple(values)
    by_type: dict[Any, tuple[Any, ...]] = {
        int: (1, 2, 3),
        float: (0.01, 0.1, 0.5, 1.0),
        bool: (False, True),
        str: ("mean", "no_such"),
        Privacy: (Privacy(noise_multiplier=1.0),),
        ClientPrivacy: (ClientPrivacy(1.0),),
        Distillation: (Distillation(1),),
        Task: (Classification(), MultiLabel(), Segmentation(), Regression()),
    }
    return by_type.get(hint, (None,))


def _network(labels: str) -> nn.Module:
    """Return a small network for the labels of :func:`_data`, with the same weights each time."""
    torch.manual_seed(0)
    if labels == "masks":
        return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, NUM_OUTPUTS, 1))
    layers = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, NUM_OUTPUTS)]
    return nn.Sequential(*layers)


def _data(labels: str) -> FederatedData:
    """Return random images of three clients, with labels of a kind."""
    generator = torch.Generator().manual_seed(0)

    def dataset(count: int) -> TensorDataset:
        images = torch.randn(count, 1, SIDE, SIDE, generator=generator)
        return TensorDataset(images, make_labels(labels, count, generator, SIDE))

    public = TensorDataset(torch.randn(6, 1, SIDE, SIDE, generator=generator))
    train = [dataset(count) for count in (6, 9, 5)]
    test = [dataset(4) for _ in range(3)]
    return FederatedData(train, test, public)


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise a TimeoutError after so many seconds."""

    def stop(*_: object) -> None:
        raise TimeoutError

    handler_before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler_before)
