# SPDX-License-Identifier: Apache-2.0
"""Memory of a step with LoRA on backbones of several sizes: perada's estimate, and the peak of a process."""

import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import growth, in_new_process
from benchmarks.workload import Workload
from perada.core.seeding import Streams
from perada.core.states import clone, expand, get_state, parameter_keys
from perada.engine.engine import Engine
from perada.engine.memory_estimate import MemoryEstimate, count_activations, network_bytes
from perada.models.blocks import repeated_blocks

CASES = {
    name: Workload(f"vit_{size}_patch16_224", "lora", side=224, sampled=8, batch=8)
    for name, size in (("ViT-S/16", "small"), ("ViT-B/16", "base"), ("ViT-L/16", "large"))
}
QUICK_CASES = {"test_vit": Workload("test_vit", "lora", sampled=2, batch=8)}
WARM_UP = Workload("test_vit", "lora", sampled=2, batch=2)
SHARE_TO_MEASURE = 0.6
"""Steps whose estimate is a larger share of the available memory are not measured: others may use the machine."""


def backbone_memory(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Estimate and measure the memory of a network and of a step of clients that share a pass, in bf16-mixed."""
    for name, workload in (QUICK_CASES if quick else CASES).items():
        for recomputes in (False, True):
            estimate: MemoryEstimate = in_new_process(_estimate, workload, recomputes, str(device))
            row: dict[str, Any] = {
                "backbone": name,
                "checkpointing": recomputes,
                "network GB": round(estimate.weight_bytes / 1e9, 2),
                "activations GB": round(estimate.activation_bytes / 1e9, 2),
                "states GB": round(estimate.state_bytes / 1e9, 2),
                "estimate GB": round(estimate.total / 1e9, 2),
            }
            if estimate.total < SHARE_TO_MEASURE * _available_bytes(device):
                megabytes = in_new_process(_measure, workload, recomputes, str(device))
                row["measured GB"] = round(megabytes / 1e3, 2)
                row["estimate / measured"] = round(estimate.total / 1e6 / megabytes, 2)
            yield row


def _available_bytes(device: torch.device) -> int:
    """Return the memory that is available on the GPU or, on Linux, on the machine."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text().splitlines()
    kibibytes = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return kibibytes * 1024


def _make_engine(workload: Workload, recomputes: bool, device: torch.device) -> Engine:
    """Return the folded network of a workload, on the device."""
    model = workload.module().model.to(device)
    recomputed = repeated_blocks(model, str(workload.backbone)) if recomputes else ()
    return Engine(model, "folded", recomputed=recomputed)


def _estimate(workload: Workload, recomputes: bool, device_name: str) -> MemoryEstimate:
    """Return the estimate of ``training.checkpointing: auto``, for SGD without momentum."""
    warnings.simplefilter("ignore")
    device = torch.device(device_name)
    engine = _make_engine(workload, recomputes, device)
    image = torch.randn(3, workload.side, workload.side, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        activations = count_activations(engine, image, workload.batch)
    assert activations is not None
    trained = parameter_keys(engine.model)
    # Each weight has a gradient.
    state_bytes = sum(value.nbytes * (2 if key in trained else 1) for key, value in get_state(engine.model).items())
    return MemoryEstimate(
        weight_bytes=network_bytes(engine),
        state_bytes=workload.sampled * state_bytes,
        activation_bytes=activations.of(workload.sampled * workload.batch),
    )


def _measure(workload: Workload, recomputes: bool, device_name: str) -> float:
    """Return by how many MB the peak memory grows while a network is built and takes two steps."""
    warnings.simplefilter("ignore")
    device = torch.device(device_name)
    # Libraries take memory at their first use.
    _take_steps(WARM_UP, recomputes, device)
    return growth(partial(_take_steps, workload, recomputes, device), device)


def _take_steps(workload: Workload, recomputes: bool, device: torch.device) -> None:
    """Build a network, and run two forward and backward passes of all clients together."""
    engine = _make_engine(workload, recomputes, device)
    trained = parameter_keys(engine.model)
    states = clone(expand(get_state(engine.model), workload.sampled))
    leaves = {key: value.requires_grad_(key in trained) for key, value in states.items()}
    images = torch.randn(workload.sampled, workload.batch, 3, workload.side, workload.side, device=device)
    streams = Streams.derived(0, "dropout", clients=range(workload.sampled), device=device)
    for _ in range(2):
        with torch.autocast(device.type, torch.bfloat16):
            logits = engine.logits(leaves, images, training=True, streams=streams)
        logits.float().square().mean((1, 2)).sum().backward()
        for leaf in leaves.values():
            leaf.grad = None
