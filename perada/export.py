# SPDX-License-Identifier: Apache-2.0
"""Adapters as PEFT folders, written and read."""

import json
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig
from peft.utils.save_and_load import load_peft_weights, set_peft_model_state_dict
from safetensors.torch import load_file, save_file

from perada.backbones import AdaptedModel, Backbone, insert_adapter
from perada.states import State, get_state, set_state, trained_keys

BACKBONE_FILE = "backbone.safetensors"


def save_adapter(adapted: AdaptedModel, state: State, folder: Path) -> None:
    """Write one state as a PEFT folder, which ``peft.PeftModel.from_pretrained`` reads.

    Args:
        adapted: Whose names the state has; its own adapter is left as it was.
        state: The adapter.
        folder: Where to write; made if need be.
    """
    before = get_state(adapted.model)
    try:
        set_state(adapted.model, state)
        adapted.peft_model.save_pretrained(str(folder), save_embedding_layers=False)
    finally:
        set_state(adapted.model, before)


def load_adapter(adapted: AdaptedModel, folder: Path) -> State:
    """Read a PEFT folder into a state; the model's own adapter is left as it was.

    Raises:
        FileNotFoundError: If there is no adapter in ``folder``.
        ValueError: If it is broken, or belongs to another backbone or adapter.
    """
    read_config(folder)
    before = get_state(adapted.model)
    try:
        weights = load_peft_weights(str(folder), device="cpu")
        result = set_peft_model_state_dict(adapted.peft_model, weights)
        loaded = get_state(adapted.model)
    except Exception as error:  # safetensors, PEFT and torch each raise their own types for a file that does not fit
        raise ValueError(
            f"the adapter in {str(folder)!r} cannot be read: {' '.join(str(error).split())[:300]}"
        ) from error
    finally:
        set_state(adapted.model, before)
    names = set(trained_keys(adapted.model))
    lost = [key for key in getattr(result, "missing_keys", []) if any(key.endswith(name) for name in names)]
    extra = getattr(result, "unexpected_keys", [])
    if lost or extra:
        what = f"lacks {lost[0]!r}" if lost else f"has {extra[0]!r}, which the model has not"
        raise ValueError(
            f"the adapter in {str(folder)!r} belongs to another backbone or adapter: it {what}; "
            "load it with the configuration it was made with"
        )
    return loaded


def read_config(folder: Path) -> PeftConfig:
    """Read the configuration of a PEFT folder.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it cannot be read.
    """
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{str(folder)!r} is no adapter folder: it has no {name}; give one that perada saved"
            )
    try:
        config: PeftConfig = PeftConfig.from_pretrained(str(folder))
    except Exception as error:  # a broken JSON file, an unknown method or unknown fields
        raise ValueError(
            f"the adapter configuration in {str(folder)!r} cannot be read: {type(error).__name__} {error}; save it anew"
        ) from error
    return config


def save_backbone(adapted: AdaptedModel, folder: Path) -> None:
    """Write the frozen tensors of a backbone whose weights cannot be had elsewhere."""
    trained = set(trained_keys(adapted.model))
    tensors = {k: v.detach().cpu().clone() for k, v in adapted.model.state_dict().items() if k not in trained}
    save_file(tensors, folder / BACKBONE_FILE)


def load_backbone(backbone: Backbone, config: PeftConfig, folder: Path) -> AdaptedModel:
    """Insert the adapter of ``config``, and read the frozen tensors if ``folder`` holds any.

    Raises:
        ValueError: If the frozen tensors do not belong to the backbone.
    """
    with torch.random.fork_rng(devices=[]):
        adapted = insert_adapter(backbone, config)
    path = folder / BACKBONE_FILE
    if path.is_file():
        try:
            set_state(adapted.model, load_file(path))
        except (KeyError, RuntimeError) as error:
            raise ValueError(f"{str(path)!r} does not fit backbone {backbone.name!r}: {error}") from error
    return adapted


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write readable JSON."""
    path.write_text(json.dumps(content, indent=2) + "\n")
