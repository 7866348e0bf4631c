# SPDX-License-Identifier: Apache-2.0
"""What share of the machine's speed a round reaches, of what the model needs and of what is really computed.

Model FLOP utilisation as Chowdhery et al. define it (PaLM, 2022, appendix B): the floating-point operations that the
model needs, however they are computed, for each second, as a share of the peak. Hardware utilisation counts those that
are computed: fewer, where a convolution of a small map is a matrix product. The peak is the best speed of a plain
matrix product in the same run, and not a figure of the maker's. Where weights are frozen, a training step needs fewer
operations than three forward passes: torch's counter says how many. It knows products, convolutions and attention.
"""

import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.arithmetic import BF16, FP32, arithmetics
from benchmarks.naive import Naive
from benchmarks.round import LITE0, RESNET, SMALL, VIT, VIT_GPU, Turns
from benchmarks.timing import clock, ratio
from benchmarks.workload import Workload

COUNTED = 4  # images in the passes whose operations are counted


def limit(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Local training, the server and the round: ResNet-18, EfficientNet-Lite0 and ViT-S."""
    size = _size(device, quick)
    for work in (SMALL,) if quick else (RESNET, LITE0, VIT if device.type == "cpu" else VIT_GPU):
        needed, computed = operations(work), _computed(work, device)
        for arithmetic in arithmetics(device, quick):
            turns = Turns({}, device)
            with arithmetic.active():
                before = best_product(device, arithmetic.dtype, size)
                options: dict[str, Any] = {"rounds": 1 + repeats, "precision": arithmetic.precision}
                work.finetune(work.data(), device, callbacks=[turns], **options)
                peak = max(before, best_product(device, arithmetic.dtype, size))
            row: dict[str, Any] = {
                "model": f"{work.backbone}, {work.adapter}, {work.side}×{work.side}",
                "precision": arithmetic.name,
                "peak, GFLOP/s": round(peak / 1e9),
            }
            for part, times in turns.seconds["perada"].items():
                seconds = statistics.median(times)
                row |= {
                    f"{part}, GFLOP": round(needed[part] / 1e9, 4),
                    f"{part}, computed": round(computed[part] / 1e9, 4),
                    f"{part}, seconds": round(seconds, 4),
                    f"{part}, seconds at the peak": round(needed[part] / peak, 4),
                    f"{part}, utilisation": round(needed[part] / peak / seconds, 3),
                    f"{part}, hardware utilisation": round(computed[part] / peak / seconds, 3),
                }
            yield row


def machine(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Which precision to take here, and what perada gains, in about two minutes: ResNet-18 in two short rounds."""
    work, size = SMALL if quick else replace(RESNET, clients=8, steps=1, public=128), _size(device, quick)
    for arithmetic in (FP32, BF16):
        data = work.data()
        turns = Turns({"naive": Naive(work, work.module().model, data, device).round}, device)
        work.finetune(data, device, rounds=3, precision=arithmetic.precision, callbacks=[turns])
        own, naive = turns.seconds["perada"], turns.seconds["naive"]
        yield {
            "precision": arithmetic.name,
            "product, GFLOP/s": round(best_product(device, arithmetic.dtype, size) / 1e9),
            "seconds of a round": round(statistics.median(own["round"]), 2),
            **{f"naive fp32 / perada, {part}": ratio(naive[part], own[part]) for part in own},
        }


def operations(work: Workload) -> dict[str, float]:
    """Floating-point operations that the parts of a round need, each image passed as often as the algorithm asks.

    Locally that is both roles of each client; at the server, each public image through each teacher once, and the
    student's steps.
    """
    model, x = work.module().model, torch.randn(COUNTED, 3, work.side, work.side)
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        model.eval()(x)
    with FlopCounterMode(display=False) as training:
        F.cross_entropy(model(x), torch.zeros(COUNTED, dtype=torch.long)).backward()
    passed, trained = (counter.get_total_flops() / COUNTED for counter in (forward, training))
    local = 2 * work.sampled * work.batch * work.steps * trained
    server = work.sampled * work.public * passed + work.passes * work.public * trained
    return {"local": local, "server": server, "round": local + server}


def _computed(work: Workload, device: torch.device) -> dict[str, float]:
    """Floating-point operations of the parts of perada's second round, in single precision."""
    with FlopCounterMode(display=False) as counter:
        turns = Turns({}, device, lambda _: counter.get_total_flops())
        work.finetune(work.data(), device, rounds=2, callbacks=[turns])
    return {part: counts[0] for part, counts in turns.seconds["perada"].items()}


def _size(device: torch.device, quick: bool) -> int:
    """Rows of the matrices of the product; a GPU spends more time on starting small ones than on multiplying them."""
    return 256 if quick else 8192 if device.type == "cuda" else 2048


def best_product(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """The most floating-point operations a second in 20 products of square matrices."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    times = []
    for _ in range(20):
        began = clock(device)
        a @ b
        times.append(clock(device) - began)
    return 2 * size**3 / min(times)
