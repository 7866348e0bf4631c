# SPDX-License-Identifier: Apache-2.0
"""Small runs, the same on one process and on several; as a script, one process of a job that writes their results."""

import os
import sys
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import torch
from peft import LoraConfig
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.utils.data import TensorDataset

import perada
from perada.adapters import DualLoraConfig
from perada.algorithms import FedEnsemble, FFALoRA, HetLoRA, PerAda
from perada.data import Corruptions, ImageSet
from perada.server import SVD, FedAdam, FLTrust, LoRAFair
from perada.tasks import Segmentation
from tests.masks import UNet, squares
from tests.options import sections

SIZES = (9, 5, 14, 7, 20)
CLASSES = 3
QUICK = (
    "perada",
    "a process without clients",
    "teachers in training mode",
    "steps shared in double precision",
    "private clients",
)
DISTILS = {"distill_steps": 3, "distill_batch_size": 4}
COUNTED = {"noise_multiplier": 0.5, "clipping": "adaptive", "max_norm": 0.05, "count_noise": 2.0, "delta": 0.01}
DUAL = DualLoraConfig(r=2, target_modules=["conv"])
LORA = LoraConfig(r=2, target_modules=["conv"])


def vit(norm: bool, dtype: torch.dtype) -> nn.Module:
    """A small ViT."""
    torch.manual_seed(0)
    sizes = {"img_size": 8, "patch_size": 4, "in_chans": 1, "embed_dim": 8, "depth": 2, "num_heads": 2}
    return VisionTransformer(**sizes, num_classes=CLASSES).to(dtype)


def unet(norm: bool, dtype: torch.dtype) -> nn.Module:
    """A small U-Net with GroupNorm."""
    torch.manual_seed(0)
    return UNet().to(dtype)


CASES = {
    "perada": {"algorithm": "perada", **DISTILS},
    "shifts": {"algorithm": "ditto", "shifted": True, "global_test_clients": 4, "prediction": "both"},
    "perada in double precision": {"algorithm": "perada", "dtype": torch.float64, **DISTILS},
    "both models": {"algorithm": "ditto", "prediction": "both", "clients_per_round": 3},
    "a process without clients": {"algorithm": "perada", "clients_per_round": 1, "diagnostics": True, **DISTILS},
    "teachers in training mode": {
        "algorithm": "perada",
        "distillation": {"steps": 3, "batch_size": 5, "teacher_mode": "train"},
        "distill_steps": None,
    },
    "a guarded distillation": {
        "algorithm": "perada",
        "distillation": {"steps": 3, "batch_size": 5, "guard": "predictions"},
        "distill_steps": None,
    },
    "steps shared in double precision": {
        "algorithm": "perada",
        "dtype": torch.float64,
        "distillation": {"steps": 3, "batch_size": 5, "share_steps": True, "teacher_mode": "train"},
        "distill_steps": None,
        "diagnostics": True,
    },
    "many clients": {"algorithm": "perada_no_kd", "clients_per_round": None, "weighting": "samples"},
    "loop": {"algorithm": "perada", "engine": "loop", "clients_per_chunk": 1, **DISTILS},
    "server optimiser": {"algorithm": "fedavg", "server_rule": FedAdam(lr=0.1)},
    "median": {"algorithm": "fedavg", "server_rule": "median"},
    "trust": {"algorithm": "perada", "server_rule": FLTrust(labels=False), "clients_per_round": 1, **DISTILS},
    "trust of modes": {
        "algorithm": FedEnsemble(PerAda(), modes=2),
        "server_rule": FLTrust(False, 5),
        "clients_per_round": 4,
        **DISTILS,
    },
    "products of factors": {
        "algorithm": "fedavg",
        "adapter": LoraConfig(r=2, target_modules=["conv"], init_lora_weights=True),
        "server_rule": SVD(),
        "diagnostics": ["lora_residual"],
        "engine": "loop",
    },
    "lora_fair": {"algorithm": "perada", "adapter": LORA, "server_rule": LoRAFair(), "weighting": "samples", **DISTILS},
    "ranks under SVD": {
        "algorithm": HetLoRA(ranks=[2, 1]),
        "adapter": LORA,
        "server_rule": SVD(),
        "weighting": "samples",
        "clients_per_round": 4,
    },
    "fedavg_ft": {"algorithm": "fedavg_ft"},
    "feddyn": {"algorithm": "feddyn"},
    "scaffold": {"algorithm": "scaffold", "algorithm_options": {"server_lr": 0.7}},
    "moon": {"algorithm": "moon", "augmented": True},
    "mixed images, drawn by class": {"algorithm": "ditto", "mixed": True},
    "fedrod": {"algorithm": "fedrod"},
    "masks": {"algorithm": "perada", "net": unet, "masks": True, "metric": ["dice", "miou", "accuracy"], **DISTILS},
    "fedbe": {"algorithm": "fedbe", **DISTILS},
    "fedper": {"algorithm": "fedper", "weighting": "samples"},
    "fedbabu": {"algorithm": "fedbabu"},
    "fedrep": {"algorithm": "fedrep", "augmented": True},
    "ffa_lora": {
        "algorithm": FFALoRA(PerAda()),
        "adapter": LORA,
        "clients_per_round": 1,
        "diagnostics": True,
        **DISTILS,
    },
    "fedsa_lora": {"algorithm": "fedsa_lora", "adapter": LORA},
    "rolora": {"algorithm": "rolora", "adapter": LORA, "diagnostics": True},
    "feddpa": {"algorithm": "feddpa", "adapter": DUAL},
    "feddpa_f": {"algorithm": "feddpa_f", "adapter": DUAL},
    "fedalt_row": {"algorithm": "fedalt_row", "adapter": replace(DUAL, gate=True), "clients_per_round": 1},
    "het_lora": {"algorithm": HetLoRA(PerAda(), [2, 1]), "adapter": LORA, **DISTILS},
    "fedex_lora": {"algorithm": "fedex_lora", "adapter": LORA, "weighting": "samples", "diagnostics": True},
    "flora": {"algorithm": "flora", "adapter": LORA, "engine": "loop"},
    "prompts": {"algorithm": "perada", "adapter": "prompt", "net": vit, **DISTILS},
    "secure sums": {
        "algorithm": "perada",
        "secure_sums": {},
        "weighting": "samples",
        "clients_per_round": 4,
        **DISTILS,
    },
    "apfl": {"algorithm": "apfl", "algorithm_options": {"lr_alpha": 0.1}},
    "modes": {"algorithm": FedEnsemble(PerAda(), modes=2), "clients_per_round": 4, **DISTILS},
    "compared modes": {"algorithm": FedEnsemble(modes=2, assignment="loss", keeps="best")},
    "private images": {
        "algorithm": "perada_no_kd",
        "privacy": {"noise_multiplier": 1.0, "secure_rng": False},
        "norm": False,
    },
    "private clients": {
        "algorithm": "fedavg",
        "client_privacy": COUNTED | {"secure_rng": False},
    },
    "private sums": {
        "algorithm": "fedavg",
        "client_privacy": COUNTED | {"secure_rng": False},
        "secure_sums": {},
        "clients_per_round": 4,
    },
}
SECURE = {"algorithm": "perada_no_kd", "privacy": {"noise_multiplier": 1.0}, "client_privacy": COUNTED, "norm": False}
"""No two of these runs draw alike."""


def network(norm: bool, dtype: torch.dtype) -> nn.Module:
    """A network with dropout, and with a BatchNorm."""
    torch.manual_seed(0)
    layers = OrderedDict(
        conv=nn.Conv2d(1, 4, 3),
        norm=nn.BatchNorm2d(4) if norm else nn.Identity(),
        act=nn.ReLU(),
        pool=nn.AdaptiveAvgPool2d(2),
        flat=nn.Flatten(),
        drop=nn.Dropout(0.3),
        fc=nn.Linear(16, CLASSES),
    )
    return nn.Sequential(layers).to(dtype)


def federation(dtype: torch.dtype) -> perada.FederatedData:
    """Five unequal clients."""
    random = torch.Generator().manual_seed(1)

    def part(n):
        y = torch.arange(n) % CLASSES
        return TensorDataset(
            torch.randn(n, 1, 8, 8, generator=random, dtype=torch.float64).to(dtype) + y.view(-1, 1, 1, 1), y
        )

    return perada.FederatedData(
        [part(n) for n in SIZES], [part(n) for n in (6, 4, 7, 5, 3)], TensorDataset(part(12).tensors[0])
    )


def segmented() -> perada.FederatedDataModule:
    """Five clients with a mask for each image."""
    train = [squares(n, client, 10 * client, size=16) for client, n in enumerate(SIZES)]
    test = [squares(n, 10 + client, 10 * client, size=16) for client, n in enumerate((6, 4, 7, 5, 3))]
    data = perada.FederatedData(train, test, squares(12, 20, size=16))
    task = Segmentation("both", distill_stride=2)
    return perada.FederatedDataModule(data, batch_size=4, crop_padding=2, flip=True, task=task)


class Other(ImageSet):
    """Another set of three classes."""

    num_classes = CLASSES

    def _load_images(self):
        return (torch.arange(11 * 32 * 32) % 255).view(11, 1, 32, 32).byte(), torch.arange(11) % CLASSES


def make_shifted_data() -> perada.FederatedDataModule:
    """Five clients with uint8 images that may be corrupted, and shifts of each sort."""
    random = torch.Generator().manual_seed(2)

    def parts(sizes):
        labels = [torch.arange(n) % CLASSES for n in sizes]
        drawn = [torch.randint(0, 200, (len(y), 1, 32, 32), generator=random, dtype=torch.uint8) for y in labels]
        return [TensorDataset(x + 25 * y.view(-1, 1, 1, 1).byte(), y) for x, y in zip(drawn, labels, strict=True)]

    data = perada.FederatedData(parts(SIZES), parts((6, 4, 7, 5, 3)))
    shifts = {"hazy": Corruptions(["fog", "shot_noise"], [1, 4]), "others": "label_shift", "new": Other()}
    return perada.FederatedDataModule(data, batch_size=4, eval_batch_size=6, shifts=shifts, shifts_when="evaluation")


def run(case: str, devices: int = 1, rounds: int = 3, **extra) -> perada.Run:
    """Run a case."""
    options = {"adapter": "full", "norm": True, "dtype": torch.float32, "clients_per_round": 3, "distill_steps": 0}
    options |= CASES.get(case, SECURE) | extra
    norm = options.pop("norm")
    dtype = options.pop("dtype")
    net = options.pop("net", network)
    data = federation(dtype)
    if options.pop("masks", False):
        data = segmented()
    if options.pop("augmented", False):
        data = perada.FederatedDataModule(data, batch_size=4, crop_padding=2, flip=True)
    if options.pop("mixed", False):
        data = perada.FederatedDataModule(data, batch_size=4, mixup=0.4, cutmix=1.0, sampling="balanced")
    if options.pop("shifted", False):
        data = make_shifted_data()
    return perada.finetune(
        net(norm, dtype),
        data,
        **sections(
            batch_size=4,
            lr_personal=0.05,
            lr_local=0.05,
            momentum=0.9,
            rounds=rounds,
            devices=devices,
            accelerator="cpu",
            enable_progress_bar=False,
            **{"logger": False, "adapter": "full"} | options,
        ),
    )


def results(run: perada.Run) -> dict:
    """All that a run leaves."""
    return {
        "global": run.states("global"),
        "personal": [] if run._personal is None else run.states("personal"),
        "metrics": run.metrics,
        "info": run.info["privacy"],
    }


def main(folder: Path, cases: list[str]) -> None:
    """Run cases on the processes that torchrun started, and one of them in two parts."""
    rank = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
    found = {}
    for case in cases:
        done = run(case, size)
        if rank == 0:
            found[case] = results(done)
    where = {"logger": True, "default_root_dir": str(folder)}
    run("perada", size, 2, **where)  # a checkpoint to go on from on one process
    alone = {"ckpt_path": str(folder / "one.ckpt"), "default_root_dir": str(folder / "from_one")}
    done = run("perada", size, 4, **{**where, **alone})  # from one process
    secure = run("secure", size, 2, logger=True, default_root_dir=str(folder / "secure"))
    saved = str(folder / "secure" / "lightning_logs" / "version_0" / "checkpoints" / "last.ckpt")
    more = {"logger": True, "default_root_dir": str(folder / "secure more"), "ckpt_path": saved}
    again = run("secure", size, 3, **more)  # a branch, whose round the next one counts too
    third = run("secure", size, 3, **more)
    if rank == 0:
        found["secure"] = [results(one) for one in (secure, again, third)]
        found["resumed"] = results(done)
        torch.save(found, folder / "found.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
