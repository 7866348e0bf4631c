# SPDX-License-Identifier: Apache-2.0
"""Local steps captured as CUDA graphs against steps that the host starts kernel by kernel."""

import statistics
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks.arithmetic import arithmetics
from benchmarks.round import RESNET, SMALL, VIT_GPU, Turns
from benchmarks.timing import ratio
from benchmarks.workload import Workload

EPOCHS = 6
"""Passes over the images in a round, since the first steps of each chunk of clients are taken without a graph."""

FALLBACK = "cuda_graphs: local steps are taken without CUDA graphs"
"""Beginning of the warning that steps are not captured."""


def step_graphs(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """ResNet-18 at 32×32 with 1, 8 and 16 clients, and ViT-S/16 at 224×224 with 8: local training of a round."""
    if quick:
        works = [replace(SMALL, passes=0)]
    else:
        works = [replace(RESNET, sampled=clients, passes=0) for clients in (1, 8, 16)]
        works.append(replace(VIT_GPU, passes=0))
    for work in works:
        for arithmetic in arithmetics(device, quick):
            with arithmetic.active():
                usual = _run(work, device, arithmetic.precision, repeats, graphs=False)
                captured = _run(work, device, arithmetic.precision, repeats, graphs=True)
            steps = EPOCHS * work.steps
            # Each client trains a personal and a local model.
            images = 2 * work.sampled * work.batch * steps
            yield {
                "model": f"{work.backbone}, {work.adapter}, {work.side}×{work.side}",
                "clients": f"{work.sampled} × {work.batch}",
                "steps": steps,
                "precision": arithmetic.name,
                # If not, both took the same steps: elsewhere than on a GPU of NVIDIA, or if a capture failed.
                "captured": captured["captured"],
                "usual / captured": ratio(usual["local"], captured["local"]),
                "images per second": round(images / statistics.median(captured["local"])),
                "peak MB, usual": usual["memory"],
                "peak MB, captured": captured["memory"],
                "seconds": {
                    "usual": round(statistics.median(usual["local"]), 4),
                    "captured": round(statistics.median(captured["local"]), 4),
                },
            }


def _run(work: Workload, device: torch.device, precision: str, repeats: int, *, graphs: bool) -> dict[str, Any]:
    """Return the seconds of local training by round after the first, the peak memory, and if steps were captured."""
    is_gpu = device.type == "cuda"
    if is_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    turns = Turns({}, device)
    with warnings.catch_warnings(record=True) as raised:
        # Whatever filters are set.
        warnings.filterwarnings("always", FALLBACK)
        work.finetune(
            work.data(),
            device,
            rounds=1 + repeats,
            precision=precision,
            callbacks=[turns],
            training={"local_epochs": EPOCHS, "cuda_graphs": graphs},
        )
    gave_up = False
    for warning in raised:
        is_fallback = str(warning.message).startswith(FALLBACK)
        gave_up |= is_fallback
        # Without a GPU it is no news.
        if is_gpu or not is_fallback:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    memory = round(torch.cuda.max_memory_allocated(device) / 1e6) if is_gpu else 0
    return {"local": turns.seconds["perada"]["local"], "memory": memory, "captured": graphs and not gave_up}
