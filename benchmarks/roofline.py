# SPDX-License-Identifier: Apache-2.0
"""Which operators take the time of a step, and the least time that arithmetic and memory would allow each.

The roofline model (Williams, Waterman and Patterson, CACM 2009): an operator takes at least its floating-point
operations divided by the speed of a plain matrix product, and at least the bytes of its inputs and outputs divided by
the bandwidth of a copy. Both peaks are measured in the same run. An operator that finds its inputs in a cache can be
faster than the second limit. Views count no bytes.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks.arithmetic import BF16, FP32, Arithmetic
from benchmarks.limit import best_product
from benchmarks.round import LITE0, RESNET, SMALL, VIT
from benchmarks.timing import clock
from benchmarks.workload import Workload
from perada.core.seeding import Streams
from perada.core.states import State, expand, get_state
from perada.engine import Engine

CLASSES = {
    "attention": ("scaled_dot_product",),
    "norm": ("batch_norm", "layer_norm", "group_norm"),
    "convolution": ("convolution",),
    "product": ("mm",),
    "copy": ("copy", "cat", "clone", "pad"),
    "pooling": ("pool",),
    "activation": ("threshold", "relu", "hardtanh", "gelu", "silu", "clamp"),
    "sum or product of elements": ("add", "mul", "sub", "div"),
}
"""Parts of the names of the operators of each class; the first class that fits counts, and "other" if none does."""
WARM_UP_STEPS = 2


@dataclass
class Usage:
    """What the operators of one class use in a step."""

    calls: int = 0
    seconds: float = 0.0
    flops: int = 0
    moved_bytes: int = 0


class OperatorMeter(TorchDispatchMode):
    """Times each operator below autograd and autocast, and counts its operations and bytes.

    Attributes:
        usage: By class of operators.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.usage: dict[str, Usage] = defaultdict(Usage)

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401  # an overload of an operator, which torch gives no public type
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401  # whatever the operator returns
        """Run an operator and add what it used."""
        options = kwargs or {}
        started_at = clock(self.device)
        output = func(*args, **options)
        seconds = clock(self.device) - started_at

        usage = self.usage[operator_class(func.__name__)]
        usage.calls += 1
        usage.seconds += seconds
        count_flops = flop_registry.get(func.overloadpacket)
        if count_flops is not None:
            usage.flops += count_flops(*args, **options, out_val=output)
        if not func.is_view:
            usage.moved_bytes += _tensor_bytes((args, options, output))
        return output


def operator_class(name: str) -> str:
    """Return the class of an operator, such as "convolution" for ``convolution_backward.default``."""
    for class_name, parts in CLASSES.items():
        if any(part in name for part in parts):
            return class_name
    return "other"


def _tensor_bytes(values: object) -> int:
    """Return the bytes of all tensors in nested tuples, lists and dictionaries."""
    total = 0
    for value in tree_leaves(values):
        if isinstance(value, Tensor):
            total += value.numel() * value.element_size()
    return total


def roofline(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """A local step of a round's clients and a step of the student, forward and backward, by class of operators."""
    works = [SMALL] if quick else [RESNET, LITE0, VIT]
    size = 256 if quick else 2048
    bandwidth = best_copy(device, megabytes=1 if quick else 256)
    for work in works:
        student = replace(work, sampled=1, batch=work.public_batch)
        for arithmetic in (FP32, BF16):
            peak = best_product(device, arithmetic.dtype, size)
            for part, step_work in (("local step", work), ("student's step", student)):
                step = {"model": work.backbone, "part": part, "precision": arithmetic.name}
                usage = _measure(step_work, arithmetic, device, repeats)
                total = sum(of_class.seconds for of_class in usage.values())
                for name, of_class in sorted(usage.items(), key=lambda item: -item[1].seconds):
                    yield step | {
                        "operators": name,
                        "calls": of_class.calls,
                        "ms": round(1e3 * of_class.seconds, 2),
                        "share": round(of_class.seconds / total, 3),
                        "GFLOP": round(of_class.flops / 1e9, 2),
                        "MB": round(of_class.moved_bytes / 1e6, 1),
                        "ms by arithmetic": round(1e3 * of_class.flops / peak, 2),
                        "ms by memory": round(1e3 * of_class.moved_bytes / bandwidth, 2),
                    }


def best_copy(device: torch.device, megabytes: int) -> float:
    """Return the most bytes a second, read and written, in 20 copies of a tensor."""
    source = torch.randn(megabytes * 2**18, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(20):
        started_at = clock(device)
        target.copy_(source)
        times.append(clock(device) - started_at)
    return 2 * source.numel() * source.element_size() / min(times)


def _measure(work: Workload, arithmetic: Arithmetic, device: torch.device, repeats: int) -> dict[str, Usage]:
    """Return what the fastest of some steps of a round's clients used, by class of operators."""
    model = work.module().model.to(device)
    engine = Engine(model, channels_last=work.backbone != VIT.backbone)
    clients = work.sampled
    x = torch.randn(clients, work.batch, 3, work.side, work.side, device=device)
    states: State = {}
    for key, value in expand(get_state(model), clients).items():
        is_trained = value.is_floating_point() and "running" not in key
        states[key] = value.clone().requires_grad_(is_trained)
    trained = [value for value in states.values() if value.requires_grad]

    usages = []
    for _ in range(WARM_UP_STEPS + repeats):
        streams = Streams.derived(0, "benchmark", clients=tuple(range(clients)))
        meter = OperatorMeter(device)
        with meter:
            with torch.autocast(device.type, torch.bfloat16, enabled=arithmetic is BF16):
                logits = engine.logits(states, x, training=True, streams=streams)
            torch.autograd.grad(logits.float().sum(), trained)
        usages.append(meter.usage)
    measured = usages[WARM_UP_STEPS:]
    return min(measured, key=lambda usage: sum(of_class.seconds for of_class in usage.values()))
