# SPDX-License-Identifier: Apache-2.0
"""Networks that people fine-tune, each with several adapters: trained for a round, saved, merged and exported.

``python -m benchmarks.backbone_list --output docs/adapter_matrix.md`` writes a table into the page. Each network is
built by its name in timm, from a folder of transformers, and as a small module. All weights are random.
"""

import argparse
import copy
import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import timm
import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import perada
from benchmarks.image_text import CLASSES as CLASS_NAMES
from benchmarks.image_text import save_image_text, save_open_clip
from perada import Run
from perada.core.seeding import generator, seeded
from perada.data import FederatedData
from perada.models.backbones import build_backbone
from perada.models.text_head import TextHead
from perada.results.formats import export_model
from perada.results.report import table

ADAPTERS = ("lora", "head", "bias_norm", "prompt", "residual", "bottleneck")
START = "<!-- generated: python -m benchmarks.backbone_list -->"
END = "<!-- /generated -->"
TITLE = "Networks that are often fine-tuned"
FORMS = ("timm", "hf", "text", "open_clip", "module")
"""By name in timm in full size; from a folder of transformers; from such a folder and from one of OpenCLIP with a head
from class names; and as an ``nn.Module`` of timm in a small size."""
CLASSES = len(CLASS_NAMES)
TOLERANCE = 1e-4
"""Largest difference of logits, relative to the largest one."""
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "accelerator": "cpu",
}
VIT = {"embed_dim": 32, "depth": 2, "num_heads": 2}
HF_VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "patch_size": 16,
}
HF_STAGES = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1]}
HF_WINDOWS = {"patch_size": 4, "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 2], "window_size": 4}


@dataclass(frozen=True)
class Network:
    """A network of the list.

    Attributes:
        timm: Its name in timm.
        small: Options of timm that make a small network of it.
        model_type: Its name in transformers; None if it is not there.
        config: Options of its configuration there.
        side: Height and width of its images.
        other_side: Another size, to which its positions are interpolated if it has any.
        sized: Whether timm builds it for one size of images.
        image_text: Its kind in :func:`.save_image_text`; None if it is not there.
        open_clip: Its kind in :func:`.save_open_clip`; None if it is not there.
    """

    timm: str
    small: dict[str, Any] = field(default_factory=dict)
    model_type: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    side: int = 64
    other_side: int = 96
    sized: bool = True
    image_text: str | None = None
    open_clip: str | None = None


NETWORKS = {
    "DINOv2": Network("vit_small_patch14_dinov2", VIT, "dinov2", {**HF_VIT, "patch_size": 14}, 56, 84),
    "DINOv2 with registers": Network(
        "vit_small_patch14_reg4_dinov2", VIT, "dinov2_with_registers", {**HF_VIT, "patch_size": 14}, 56, 84
    ),
    "DINOv3": Network("vit_small_patch16_dinov3", VIT, "dinov3_vit", HF_VIT),
    "SigLIP 2": Network(
        "vit_base_patch16_siglip_224.v2_webli", VIT, "siglip", {"vision_config": HF_VIT}, image_text="siglip"
    ),
    "CLIP": Network(
        "vit_base_patch32_clip_224", VIT, "clip", {"vision_config": HF_VIT}, image_text="clip", open_clip="plain"
    ),
    # BiomedCLIP's tower is this network of timm, with weights that OpenCLIP saves.
    "BiomedCLIP": Network("vit_base_patch16_224", VIT, open_clip="biomed"),
    "MAE": Network("vit_base_patch16_224.mae", VIT, "vit_mae", HF_VIT),
    "ViT": Network("vit_tiny_patch16_224", VIT, "vit", HF_VIT),
    "Swin V2": Network(
        "swinv2_tiny_window8_256",
        {"embed_dim": 16, "depths": (1, 2), "num_heads": (2, 2), "window_size": 4},
        "swinv2",
        HF_WINDOWS,
    ),
    "ConvNeXt V2": Network(
        "convnextv2_atto", {"depths": (1, 1, 2, 1), "dims": (8, 16, 24, 32)}, "convnextv2", HF_STAGES, sized=False
    ),
    "EVA-02": Network("eva02_tiny_patch14_224", VIT, side=56, other_side=84),
    "BEiT v2": Network("beitv2_base_patch16_224", VIT, "beit", HF_VIT),
    "MobileNetV4": Network("mobilenetv4_conv_small", sized=False),
    "EfficientViT": Network("efficientvit_b0", sized=False),
}


class Finding(NamedTuple):
    """What a network does with an adapter.

    Attributes:
        verdict: ``folded``, ``loop``, or ``rejected``.
        why: The warning or the error; empty for ``folded``.
    """

    verdict: str
    why: str = ""


@dataclass
class Trained:
    """A run of one round, and its network without the adapter.

    Attributes:
        run: The run.
        plain: A network like that of the run before training.
        images: Prepared images (B, ...).
        finding: How its clients were trained.
    """

    run: Run
    plain: nn.Module
    images: Tensor
    finding: Finding


def forms_of(name: str) -> tuple[str, ...]:
    """Return the forms in which a network is built."""
    network = NETWORKS[name]
    exists = {
        "timm": True,
        "hf": network.model_type is not None,
        "text": network.image_text is not None,
        "open_clip": network.open_clip is not None,
        "module": True,
    }
    return tuple(form for form in FORMS if exists[form])


def save_transformer(name: str, folder: Path) -> None:
    """Save a small network of transformers with random weights."""
    from transformers import AutoConfig, AutoModel, AutoModelForImageClassification

    network = NETWORKS[name]
    assert network.model_type is not None
    options = copy.deepcopy(network.config)
    options.get("vision_config", options)["image_size"] = network.side
    config = AutoConfig.for_model(network.model_type, **options)
    config.num_labels = CLASSES
    with seeded(0, "backbone list"):
        try:
            model = AutoModelForImageClassification.from_config(config)
        except ValueError:
            # transformers has no classifier of this kind.
            model = AutoModel.from_config(config)
    model.save_pretrained(folder)


def choose_backbone(name: str, form: str, side: int, channels: int, folder: Path) -> tuple[str | nn.Module, bool]:
    """Return a network as it is passed to ``finetune``, and whether it has weights in a file."""
    network = NETWORKS[name]
    if form == "timm":
        return network.timm, False
    if form == "hf":
        save_transformer(name, folder)
        return f"hf:{folder}", True
    if form == "text":
        assert network.image_text is not None
        save_image_text(network.image_text, folder, side=network.side)
        return f"hf:{folder}", True
    if form == "open_clip":
        assert network.open_clip is not None
        save_open_clip(network.open_clip, folder, side=network.side)
        return f"open_clip:{folder}", True
    options = dict(network.small)
    if network.sized:
        options["img_size"] = side
    with seeded(0, "backbone list"):
        module: nn.Module = timm.create_model(network.timm, num_classes=CLASSES, in_chans=channels, **options)
    return module, False


def train(name: str, form: str, adapter: str, folder: Path, *, other_side: bool = False, channels: int = 3) -> Trained:
    """Train a network for one round of one step on two clients.

    Args:
        name: Name of the network.
        form: One of ``FORMS``.
        adapter: Name of the adapter.
        folder: Empty folder for its weights.
        other_side: Whether images have another size than the one that the network, or its weights, were made for.
        channels: Channels of the images.

    Raises:
        ValueError: If perada rejects it.
    """
    network = NETWORKS[name]
    side = network.other_side if other_side else network.side
    random = generator(0, "backbone list")

    def dataset(count: int) -> TensorDataset:
        images = torch.randint(0, 256, (count, channels, side, side), dtype=torch.uint8, generator=random)
        return TensorDataset(images, torch.arange(count) % CLASSES)

    text_head = None
    if form in ("text", "open_clip"):
        text_head = TextHead(class_names=CLASS_NAMES, train_logit_scale=True)
    backbone, pretrained = choose_backbone(name, form, side, channels, folder)
    data = FederatedData([dataset(2), dataset(3)], num_classes=CLASSES)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = perada.finetune(
            backbone,
            data,
            adapter=adapter,
            pretrained=pretrained,
            image_size=side if form != "module" else None,
            text_head=text_head,
            algorithm="fedavg",
            rounds=1,
            local_steps=1,
            batch_size=2,
            lr_local=0.1,
            **QUIET,
        )
    finding = Finding("folded")
    for warning in caught:
        if "falls back to the per-client loop" in str(warning.message):
            finding = Finding("loop", str(warning.message))
    if form != "module":
        # Networks by name have three channels, to which grey images are repeated.
        channels = 3
    with seeded(0, "plain"):
        plain = build_backbone(
            backbone,
            CLASSES,
            pretrained=pretrained,
            image_size=side if form != "module" else None,
            text_head=text_head,
        ).model
    images = torch.randn(2, channels, side, side, generator=generator(0, "images"))
    return Trained(run, plain, images, finding)


def largest_difference(logits: Tensor, expected: Tensor) -> float:
    """Return the largest difference of logits, relative to the largest expected one."""
    return float((logits - expected).abs().max() / expected.abs().max())


def differences(trained: Trained, folder: Path, onnx: bool = True) -> dict[str, float]:
    """Return how much the logits of other readings of a run differ from those of its global model.

    Args:
        trained: The run.
        folder: Folder for the files.
        onnx: Whether it is exported to ONNX, too.
    """
    model = trained.run.global_model().eval()
    # The frozen weights of a network by name are random, too.
    weights = {}
    for key, value in model.state_dict().items():
        parts = [part for part in key.split(".") if part not in ("base_layer", "original_module")]
        weights[".".join(parts)] = value
    trained.plain.load_state_dict({key: weights[key] for key in trained.plain.state_dict()})
    with torch.no_grad():
        expected = model(trained.images)
        trained.run.export(folder / "peft")
        read = PeftModel.from_pretrained(trained.plain, folder / "peft" / "global").eval()
        found = {"peft": largest_difference(read(trained.images), expected)}
        try:
            merged = trained.run.merged(None).eval()
            found["merged"] = largest_difference(merged(trained.images), expected)
        except NotImplementedError:
            pass  # PEFT has no merged form of adapters with nonlinear layers
    if onnx:
        # It compares the logits itself.
        export_model(trained.run, None, "onnx", folder / "onnx")
    return found


def examine(name: str, form: str, adapter: str, *, onnx: bool = True) -> Finding:
    """Train an adapter, compare all readings of the result, and return how its clients were trained.

    Raises:
        AssertionError: If a reading computes something else.
    """
    with TemporaryDirectory() as folder:
        try:
            trained = train(name, form, adapter, Path(folder) / "weights")
        except ValueError as error:
            return Finding("rejected", " ".join(str(error).split()))
        for reading, difference in differences(trained, Path(folder), onnx).items():
            assert difference <= TOLERANCE, f"{name} {form} {adapter}: {reading} differs by {difference:.1g}"
        return trained.finding


def examine_images(name: str, form: str, *, other_side: bool = False, channels: int = 3) -> Finding:
    """Train LoRA on images of another size or with other channels, and compare with what PEFT reads."""
    with TemporaryDirectory() as folder:
        try:
            trained = train(name, form, "lora", Path(folder) / "weights", other_side=other_side, channels=channels)
        except ValueError as error:
            return Finding("rejected", " ".join(str(error).split()))
        found = differences(trained, Path(folder), onnx=False)
        assert max(found.values()) <= TOLERANCE, f"{name} {form}: {found}"
        return trained.finding


IMAGES: dict[str, dict[str, Any]] = {
    "another size": {"other_side": True},
    "1 channel": {"channels": 1},
    "4 channels": {"channels": 4},
}
COLUMNS = (*ADAPTERS, *IMAGES)


def find(name: str, form: str, column: str) -> Finding:
    """Return what one cell of the table shows."""
    if column in IMAGES:
        return examine_images(name, form, **IMAGES[column])
    # Of the merged adapters, one is enough: they leave the same network.
    return examine(name, form, column, onnx=column in ("lora", "residual", "bottleneck"))


def label(name: str, form: str) -> str:
    """Return how a row of the table calls the form of a network."""
    network = NETWORKS[name]
    if form == "timm":
        return f"`{network.timm}`"
    if form == "hf":
        return f"`hf:`, {network.model_type}"
    if form == "text":
        return f"`hf:`, {network.image_text}, `text_head`"
    if form == "open_clip":
        return "`open_clip:`, `text_head`"
    return "module"


Findings = dict[tuple[str, str, str], Finding]
"""Findings by the names of network, form and column."""


def cells() -> Iterator[tuple[str, str, str]]:
    """Yield the cells that are examined: all of small networks, and LoRA in those of full size, which take longer."""
    for name in NETWORKS:
        for form in forms_of(name):
            for column in COLUMNS:
                if form != "timm" or column == "lora":
                    yield name, form, column


def section(findings: Findings) -> str:
    """Return the section of the page with the table and the reasons in it."""
    reasons: dict[str, int] = {}
    rows = []
    for name in NETWORKS:
        for form in forms_of(name):
            row = [name, label(name, form)]
            for column in COLUMNS:
                row.append(_word(findings.get((name, form, column)), reasons))
            rows.append(row)
    lines = [
        START,
        "",
        f"## {TITLE}",
        "",
        f"Networks by name in timm have their full size, the others a small one of the same structure, and {CLASSES} "
        "classes. Each cell is a run of two clients with one step each, whose global model computes the same if it is "
        "read by PEFT, merged (where PEFT can) and, for `lora`, `residual` and `bottleneck`, exported to ONNX. "
        "The last three columns are LoRA on images of another size than that of the weights, on grey ones, and on "
        "ones of four channels. A dash: not tested, since the module is of the same structure. BiomedCLIP's tower is "
        "a ViT-B/16 of timm. In EVA-02, BEiT v2 and Swin V2 of timm, LoRA by default adapts only the output "
        "projection of the attention ([adapted layers](adapters.md#adapted-layers)).",
        "",
        table(["network", "as", *COLUMNS], rows),
        "",
    ]
    for reason, number in reasons.items():
        lines.append(f"{number}. `{reason}`")
    lines += ["", END, ""]
    return "\n".join(lines)


def _word(finding: Finding | None, reasons: dict[str, int]) -> str:
    """Return the word of the table for a finding, and number its reason in ``reasons`` if it is a rejection."""
    if finding is None:
        return "–"
    if finding.verdict != "rejected":
        return finding.verdict
    reason = re.sub(r"backbone '[^']*'", "backbone …", finding.why)
    reason = re.sub(r", not \w+;", ";", reason)
    reason = re.sub(r"of shape \(\d+, \d+, \d+\)", "of shape …", reason)
    return f"rejected ({reasons.setdefault(reason, len(reasons) + 1)})"


def with_section(page: str, new_section: str) -> str:
    """Return a page whose section on these networks is replaced, or added at its end."""
    before, has_section, rest = page.partition(START)
    if not has_section:
        return f"{page.rstrip()}\n\n{new_section}"
    return before + new_section + rest.partition(f"{END}\n")[2]


def main() -> None:
    """Examine all networks and write the section into a page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.backbone_list", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("docs/adapter_matrix.md"))
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    findings: Findings = {}
    for cell in cells():
        findings[cell] = find(*cell)
        print(*cell, *findings[cell], sep="\t", flush=True)
    page = options.output.read_text(encoding="utf-8")
    options.output.write_text(with_section(page, section(findings)), encoding="utf-8")


if __name__ == "__main__":
    main()
