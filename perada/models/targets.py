# SPDX-License-Identifier: Apache-2.0
"""Which layers a method of PEFT adapts where nobody names them."""

import re

from peft import IA3Config, LNTuningConfig, LoraConfig, PeftConfig
from torch import nn

from perada.adapters.blocks import check_last_blocks, reached
from perada.adapters.residual.model import block_convolutions
from perada.models.char_lstm import CharLSTM

ATTENTION = re.compile(
    r".*(attn\.(qkv|proj)|attention\.[qkvo]_proj|attention\.(query|key|value)|attention\.output\.dense)"
)
IA3_SCALED = re.compile(r".*(attn\.qkv|attention\.[kv]_proj|attention\.(key|value))")
IA3_FEEDFORWARD = re.compile(r".*mlp\.fc2")
CONVOLUTIONS = {"LORA", "IA3", "LOHA", "LOKR", "OFT", "BOFT", "HRA"}
"""PEFT's methods that adapt convolutions too; the others know linear layers alone."""


def fill_targets(model: nn.Module, name: str, head: str, config: PeftConfig, last_blocks: int | None) -> None:
    """Choose the layers to adapt, and write them into ``config.target_modules``.

    In a network of a known family these are the layers of its attention, or the main convolutions of its blocks; IA3
    takes what its paper does. In any other network they are all linear layers but the head, or all convolutions without
    groups but the first: the kind that holds more of the parameters. LN tuning takes all norms.

    Raises:
        ValueError: If there is no layer that the method adapts.
    """
    check_last_blocks(last_blocks)
    within = reached(model, last_blocks)
    modules = [(path, module) for path, module in model.named_modules() if path in within and _usable(model, path)]
    linears = [path for path, module in modules if isinstance(module, nn.Linear) and path != head]
    every = dict(modules)
    known = [path for path in block_convolutions(model) if path in every and every[path].groups == 1]
    targets = [path for path in linears if ATTENTION.fullmatch(path)]
    if isinstance(config, LNTuningConfig):
        targets = [
            path
            for path, module in modules
            if "Norm" in type(module).__name__ and any(True for _ in module.parameters(recurse=False))
        ]
    elif isinstance(config, IA3Config):
        targets = [path for path in linears if IA3_SCALED.fullmatch(path)]
        feedforward = [path for path in linears if IA3_FEEDFORWARD.fullmatch(path)]
        targets += feedforward
        if config.feedforward_modules is None:
            config.feedforward_modules = feedforward
    elif isinstance(model, CharLSTM):
        targets = linears
    convolves = str(getattr(config.peft_type, "value", config.peft_type)) in CONVOLUTIONS
    if not targets and not isinstance(config, LNTuningConfig):
        targets = known if convolves and known else _main_layers(modules, linears) if convolves else linears
    if not targets:
        norms = isinstance(config, LNTuningConfig)
        what = "normalisation layers" if norms else "layers and convolutions" if convolves else "layers"
        raise ValueError(
            f"{type(config).__name__} adapts {'' if norms else 'linear '}{what}, and backbone {name!r} has none for it "
            f"besides the head: choose another adapter, such as {'bias_norm' if convolves else 'lora'!r} or 'full'"
        )
    vars(config)["target_modules"] = _unmistakable(model, targets)


def check_attention(model: nn.Module, name: str) -> None:
    """Refuse, by a ValueError, adapters in or around torch's own attention, which does not call its layers."""
    for path, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention) and (
            path.endswith(".base_layer") or any("base_layer" in part.split(".") for part, _ in module.named_modules())
        ):
            raise ValueError(
                f"an adapter cannot be put into {path.removesuffix('.base_layer')!r} of backbone {name!r}, an "
                "nn.MultiheadAttention: it reads its layers' weights instead of calling them; name other layers in "
                "target_modules, or choose 'bias_norm' or 'full'"
            )


def _usable(model: nn.Module, path: str) -> bool:
    """Whether a layer is called, which torch's attention does not do with those in it."""
    parts = path.split(".")
    owners = (model.get_submodule(".".join(parts[:end])) for end in range(len(parts)))
    return not any(isinstance(owner, nn.MultiheadAttention) for owner in owners)


def _main_layers(modules: list[tuple[str, nn.Module]], linears: list[str]) -> list[str]:
    """Linear layers, or convolutions without groups but the first: the kind that holds more of the parameters."""
    every = dict(modules)
    convolutions = [path for path, module in modules if isinstance(module, nn.Conv2d)]
    mixing = [path for path in convolutions[1:] if every[path].groups == 1]

    def size(paths: list[str]) -> int:
        return sum(parameter.numel() for path in paths for parameter in every[path].parameters())

    if not linears and not mixing:
        return convolutions[:1]
    return linears if size(linears) >= size(mixing) else mixing


def _unmistakable(model: nn.Module, targets: list[str]) -> list[str] | str:
    """The names, or an expression for them where PEFT, which compares the ends of names, would find others too."""
    chosen, ends = set(targets), tuple(f".{path}" for path in targets)
    if any(path.endswith(ends) for path, _ in model.named_modules() if path not in chosen):
        return "|".join(map(re.escape, targets))
    return targets


def contiguous_only(config: PeftConfig) -> bool:
    """Whether a method's convolutions fail on tensors in the memory format ``channels_last``, seen in PEFT 0.21."""
    method = str(getattr(config.peft_type, "value", config.peft_type))
    return method in {"BOFT", "OFT", "HRA"} or (isinstance(config, LoraConfig) and config.use_dora)
