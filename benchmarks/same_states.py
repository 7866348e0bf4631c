# SPDX-License-Identifier: Apache-2.0
"""Whether a device trains to the states that the CPU trains to, in single precision.

No two processors add up in the same order, and each local step multiplies what was rounded before it. How far two right
results may be apart is therefore measured and not guessed: the CPU runs in float64, too, and the device's states may be
ten times as far from those as the CPU's own float32 states are, or ``FLOOR`` where these happen to be nearer.
"""

import copy
from collections.abc import Iterator
from typing import Any

import timm
import torch
from torch import nn
from torch.utils.data import TensorDataset

import perada
from benchmarks.arithmetic import FP32, TF32, Arithmetic
from perada.algorithms.registry import methods
from perada.core.states import State
from perada.data import FederatedData
from perada.results.run import Run

METHODS = ("perada", "perada_no_kd", "standalone", "fedavg", "fedavg_ft", "fedbn", "ditto", "fedrep", "scaffold")
MODELS = {"test_resnet, residual": ("test_resnet", "residual"), "test_vit, LoRA": ("test_vit", "lora")}
NEEDS_NORMS = ("fedbn",)
"""Algorithms that keep trained norms, of which LoRA has none."""
MARGIN = 10.0
"""How many times as far from float64 as the CPU's float32 states those of the device may be."""
FLOOR = 1e-5
"""Relative distance that is always allowed: some hundred times the unit of rounding of float32."""
CLIENTS = 4
CLASSES = 4
SIDE = 32
BATCH = 16
STEPS = 4


def same_states(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Compare all global and personal states after three rounds, by algorithm and model.

    Raises:
        RuntimeError: At the end, if some states are too far from those in float64.
    """
    models = list(MODELS)
    algorithms: tuple[str, ...] = METHODS
    if quick:
        models = models[:1]
        algorithms = algorithms[:2]
    too_far = []
    for model in models:
        backbone, adapter = MODELS[model]
        for algorithm in algorithms:
            if algorithm in NEEDS_NORMS and adapter == "lora":
                continue
            network = _network(backbone)
            start = _train(network, adapter, algorithm, rounds=0)
            exact = _train(network.double(), adapter, algorithm)
            network = network.float()
            on_cpu = _distance(_train(network, adapter, algorithm), exact, start)
            on_device = _distance(_train(network, adapter, algorithm, device), exact, start)
            bound = max(MARGIN * on_cpu, FLOOR)
            row = {
                "model": model,
                "algorithm": algorithm,
                "CPU, fp32 to float64": on_cpu,
                "device, fp32 to float64": on_device,
                "bound": bound,
                "within": on_device <= bound,
            }
            if device.type == "cuda":
                with_tf32 = _train(network, adapter, algorithm, device, TF32)
                row["device, tf32 to float64"] = _distance(with_tf32, exact, start)
            if on_device > bound:
                too_far.append(f"{algorithm} on {model}: {on_device:.1e} and not {bound:.1e}")
            yield row | {"bound / device": round(bound / max(on_device, 1e-12), 3)}
    if too_far:
        raise RuntimeError(f"states on {device} are too far from those in float64: {'; '.join(too_far)}")


def _network(backbone: str) -> nn.Module:
    """Return a small network with the same random weights each time."""
    options = {"img_size": SIDE} if "vit" in backbone else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network: nn.Module = timm.create_model(backbone, num_classes=CLASSES, **options)
    return network


def _train(
    network: nn.Module,
    adapter: str,
    algorithm: str,
    device: torch.device | None = None,
    arithmetic: Arithmetic = FP32,
    rounds: int = 3,
) -> Run:
    """Train a copy of the network in its own dtype, on the CPU by default."""
    accelerator = "gpu" if device is not None and device.type == "cuda" else "cpu"
    dtype = next(network.parameters()).dtype
    random = torch.Generator().manual_seed(0)

    def images(count: int) -> torch.Tensor:
        return torch.randn(count, 3, SIDE, SIDE, generator=random).to(dtype)

    labels = torch.arange(BATCH * STEPS) % CLASSES
    clients = [TensorDataset(images(len(labels)), labels) for _ in range(CLIENTS)]
    data = FederatedData(clients, public=TensorDataset(images(64)), num_classes=CLASSES)
    with arithmetic.active():
        return perada.finetune(
            copy.deepcopy(network),
            data,
            adapter=adapter,
            algorithm=methods()[algorithm].make(),
            rounds=rounds,
            local_steps=STEPS,
            batch_size=BATCH,
            lr_personal=0.05,
            lr_local=0.05,
            training={"momentum": 0.9},
            # Adam would turn the rounding of a gradient that is nearly zero into steps of full length.
            distillation={"steps": 4, "batch_size": 32, "optimizer": "sgd", "lr": 0.05},
            accelerator=accelerator,
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )


def _states(run: Run) -> list[State]:
    """Return all global and personal states of a run."""
    return run.states("global") + run.states("personal")


def _distance(run: Run, exact: Run, start: Run) -> float:
    """Return the largest distance of a state from the exact one, relative to how far that one moved from the start."""
    distances = []
    for state, exact_state, initial_state in zip(_states(run), _states(exact), _states(start), strict=True):
        moved = _squared_distance(initial_state, exact_state)
        if moved:
            distances.append((_squared_distance(state, exact_state) / moved) ** 0.5)
    return max(distances)


def _squared_distance(state: State, exact_state: State) -> float:
    """Return the squared Euclidean distance of two states, without counters and other integers."""
    total = 0.0
    for name, value in exact_state.items():
        if value.is_floating_point():
            total += float((state[name].double() - value).square().sum())
    return total
