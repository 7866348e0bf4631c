# SPDX-License-Identifier: Apache-2.0
"""Facts about the machine that a measured value depends on."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch


def machine_facts(device: str) -> dict[str, Any]:
    """Return the facts that a measured value depends on: machine, threads and versions.

    The load is the mean number of threads that were ready to run in the last minute.
    """
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    if device == "cuda":
        machine = torch.cuda.get_device_name()
    return {
        "machine": machine,
        "instructions": " ".join([torch.backends.cpu.get_cpu_capability(), *narrow_instructions()]),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
        "commit": commit.stdout.strip(),
        "torch": torch.__version__,
    }


def narrow_instructions() -> list[str]:
    """Return the processor's instruction sets for narrow numbers, by their names in Linux; none on other systems."""
    cpu_info = Path("/proc/cpuinfo")
    if not cpu_info.is_file():
        return []
    flags = set(cpu_info.read_text().split())
    return sorted(flags & {"avx512_bf16", "avx512_fp16", "avx_vnni", "amx_bf16", "amx_int8", "amx_tile", "bf16"})
