# SPDX-License-Identifier: Apache-2.0
"""What share of the machine's speed a round reaches: model FLOP utilisation of its parts.

Utilisation as Chowdhery et al. define it (PaLM, 2022, appendix B): the floating-point operations that the model needs,
however they are computed, for each second, as a share of the peak. The peak is the best speed of a plain matrix product
in the same run, and not a figure of the maker's. A model whose frozen weights have no gradient needs fewer operations
than three forward passes: torch's counter says how many.
"""

import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.round import LITE0, RESNET, VIT, VIT_GPU, Turns
from benchmarks.timing import clock
from benchmarks.workload import Workload

COUNTED = 4  # images in the passes whose operations are counted


def limit(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Utilisation of local training, the server and the round: ResNet-18, EfficientNet-Lite0 and ViT-S."""
    works: tuple[Workload, ...] = (RESNET, LITE0, VIT if device.type == "cpu" else VIT_GPU)
    if quick:
        works = (replace(RESNET, backbone="test_resnet", clients=4, sampled=2, batch=16, public=32, public_batch=16),)
    for work in works:
        needed = operations(work)
        for precision, dtype in (("32-true", torch.float32), ("bf16-mixed", torch.bfloat16)):
            before = best_product(device, dtype, 256 if quick else 2048)
            turns = Turns({}, device)
            work.finetune(work.data(), device, rounds=1 + repeats, precision=precision, callbacks=[turns])
            peak = max(before, best_product(device, dtype, 256 if quick else 2048))
            seconds = {part: statistics.median(times) for part, times in turns.seconds["perada"].items()}
            yield {
                "model": f"{work.backbone}, {work.adapter}, {work.side}×{work.side}",
                "precision": precision,
                "peak, GFLOP/s": round(peak / 1e9),
                **{f"{part}, GFLOP": round(count / 1e9, 1) for part, count in needed.items()},
                **{f"{part}, seconds": round(seconds[part], 3) for part in needed},
                **{f"{part}, at the peak": round(count / peak, 3) for part, count in needed.items()},
                **{f"{part}, utilisation": round(count / peak / seconds[part], 3) for part, count in needed.items()},
            }


def operations(work: Workload) -> dict[str, float]:
    """Floating-point operations of the parts of a round, each image passed as often as the algorithm asks.

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


def best_product(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """The most floating-point operations a second in 20 products of square matrices."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    times = []
    for _ in range(20):
        began = clock(device)
        a @ b
        times.append(clock(device) - began)
    return 2 * size**3 / min(times)
