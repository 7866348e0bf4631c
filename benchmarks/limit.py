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

COUNTED_IMAGES = 4
"""Images in the passes whose operations are counted."""


def limit(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Local training, the server and the round: ResNet-18, EfficientNet-Lite0 and ViT-S."""
    size = _product_size(device, quick)
    if quick:
        works = [SMALL]
    else:
        works = [RESNET, LITE0, VIT if device.type == "cpu" else VIT_GPU]
    for work in works:
        needed = operations(work)
        computed = _computed_operations(work, device)
        for arithmetic in arithmetics(device, quick):
            turns = Turns({}, device)
            with arithmetic.active():
                # The machine's speed may drift during the rounds.
                peak_before = best_product(device, arithmetic.dtype, size)
                work.finetune(
                    work.data(), device, rounds=1 + repeats, precision=arithmetic.precision, callbacks=[turns]
                )
                peak_after = best_product(device, arithmetic.dtype, size)
            peak = max(peak_before, peak_after)
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
    work = SMALL if quick else replace(RESNET, clients=8, steps=1, public=128)
    size = _product_size(device, quick)
    for arithmetic in (FP32, BF16):
        data = work.data()
        turns = Turns({"naive": Naive(work, work.module().model, data, device).round}, device)
        work.finetune(data, device, rounds=3, precision=arithmetic.precision, callbacks=[turns])
        perada_seconds = turns.seconds["perada"]
        naive_seconds = turns.seconds["naive"]
        row: dict[str, Any] = {
            "precision": arithmetic.name,
            "product, GFLOP/s": round(best_product(device, arithmetic.dtype, size) / 1e9),
            "seconds of a round": round(statistics.median(perada_seconds["round"]), 2),
        }
        for part, times in perada_seconds.items():
            row[f"naive fp32 / perada, {part}"] = ratio(naive_seconds[part], times)
        yield row


def operations(work: Workload) -> dict[str, float]:
    """Return the floating-point operations that the parts of a round need.

    Each image is passed as often as the algorithm asks: locally for both roles of each client; at the server each
    public image through each teacher once, and the student's steps.
    """
    model = work.module().model
    x = torch.randn(COUNTED_IMAGES, 3, work.side, work.side)
    with FlopCounterMode(display=False) as forward_counter, torch.no_grad():
        model.eval()(x)
    with FlopCounterMode(display=False) as training_counter:
        F.cross_entropy(model(x), torch.zeros(COUNTED_IMAGES, dtype=torch.long)).backward()
    forward_pass = forward_counter.get_total_flops() / COUNTED_IMAGES
    training_step = training_counter.get_total_flops() / COUNTED_IMAGES
    local = 2 * work.sampled * work.batch * work.steps * training_step
    server = work.sampled * work.public * forward_pass + work.passes * work.public * training_step
    return {"local": local, "server": server, "round": local + server}


def _computed_operations(work: Workload, device: torch.device) -> dict[str, float]:
    """Return the floating-point operations of the parts of perada's second round, in single precision."""
    # The counter sees only its own thread: a single one makes perada train there.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with FlopCounterMode(display=False) as counter:
            turns = Turns({}, device, lambda _: counter.get_total_flops())
            work.finetune(work.data(), device, rounds=2, callbacks=[turns])
    finally:
        torch.set_num_threads(threads)
    return {part: counts[0] for part, counts in turns.seconds["perada"].items()}


def _product_size(device: torch.device, quick: bool) -> int:
    """Return the rows of the matrices of the product; on a GPU small products are dominated by their start."""
    if quick:
        return 256
    return 8192 if device.type == "cuda" else 2048


def best_product(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Return the most floating-point operations a second in 20 products of square matrices."""
    a = torch.randn(size, size, device=device).to(dtype)
    b = torch.randn(size, size, device=device).to(dtype)
    times = []
    for _ in range(20):
        started_at = clock(device)
        a @ b
        times.append(clock(device) - started_at)
    return 2 * size**3 / min(times)
