# SPDX-License-Identifier: Apache-2.0
"""Write and read adapters as PEFT folders, and share them on the Hub."""

import copy
import json
import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from peft import PeftConfig
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from perada.core.states import Factors, State, get_state, narrowed, set_state, trained_keys, widened
from perada.core.text import quoted
from perada.models.adapted import (
    AdaptedModel,
    find_tensor_names,
    is_adapter_key,
    plain_names,
    saved_tensors,
    tensors_taken_for_saved,
)
from perada.models.image_text import OPEN_CLIP_PREFIX
from perada.models.weight_files import LITE0, SHIPPED_PREFIX
from perada.results.cards import record_of_nobody, record_of_one
from perada.results.run_file import RunFile, first_difference, published
from perada.system.digests import check_sums
from perada.system.files import Scratch

BACKBONE_FILE = "backbone.safetensors"
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
CARD_FILE = "README.md"
CLASS_NAMES_FILE = "config.json"
TYPICAL_NAMES = {
    "mean",
    "scale",
    "examples",
    "num_examples",
    "threshold",
    "neighbors",
    "known_classes",
    "personal_share",
}
"""Names in :meth:`.BothModels.state`."""
_SAVE_AGAIN = "save the run again"
_CARD = "---\nlibrary_name: peft\n---\n"


class PeftFolders:
    """Writes and reads the PEFT folders of one model, whose adapter is not changed.

    PEFT searches the model for the adapter's tensors once, and not for each folder.

    Args:
        adapted: The model.
        base_model: Name of its backbone in the configurations.
    """

    def __init__(self, adapted: AdaptedModel, base_model: str | None = None) -> None:
        self._adapted = adapted
        self._base = base_model
        # PEFT would also search the folder for modules whose names end like the head's.
        self._tensors = tensors_taken_for_saved(adapted) | saved_tensors(adapted)
        model_state = adapted.model.state_dict()
        key_by_address = {model_state[key].data_ptr(): key for key in trained_keys(adapted.model)}
        self._keys: dict[str, str] = {}
        """Name in a state of each trained tensor, by its name in a folder."""
        for name, tensor in self._tensors.items():
            # Fixed tensors, such as random projections, are in no state.
            if tensor.data_ptr() in key_by_address:
                self._keys[name] = key_by_address[tensor.data_ptr()]

    @property
    def fixed(self) -> State:
        """The tensors that PEFT saves but no state has, such as random projections; they are those of the model."""
        return {name: tensor for name, tensor in self._tensors.items() if name not in self._keys}

    @cached_property
    def config(self) -> str:
        """The configuration file that PEFT writes."""
        self._adapted.peft_model.peft_config["default"].base_model_name_or_path = self._base
        with Scratch() as folder:
            # PEFT compiles a template for the model card unless there is one.
            (folder / CARD_FILE).write_text(_CARD, encoding="utf-8")
            with warnings.catch_warnings():  # see saved_tensors
                warnings.filterwarnings("ignore", "Adapter .* have invalid shape", UserWarning)
                self._adapted.peft_model.save_pretrained(str(folder), save_embedding_layers=False)
            return (folder / CONFIG_FILE).read_text(encoding="utf-8")

    @cached_property
    def _lora_factors(self) -> tuple[Factors, ...]:
        return find_tensor_names(self._adapted.model, *self._adapted.backbone.head_modules).factors

    def _truncate_factors(self, tensors: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
        """Return the tensors of a folder with LoRA's factors cut to a rank."""
        state = {key: tensors[name] for name, key in self._keys.items()}
        truncated = narrowed(state, self._lora_factors, rank)
        result = dict(tensors)
        for name, key in self._keys.items():
            if key in truncated:
                result[name] = truncated[key]
        return result

    def _truncated_options(self, rank: int) -> dict[str, Any]:
        """Return the options of LoRA that was cut to a rank, with which each layer keeps its scale."""
        model_state = self._adapted.model.state_dict()
        uses_rslora = getattr(self._adapted.config, "use_rslora", False)
        ranks: dict[str, int] = {}
        alphas: dict[str, float] = {}
        for pair in self._lora_factors:
            layer = pair.down.partition(".lora_A.")[0]
            layer_rank = min(rank, model_state[pair.down].shape[0])
            # PEFT scales by alpha / rank, or alpha / sqrt(rank) for rsLoRA.
            alpha = pair.scale * (math.sqrt(layer_rank) if uses_rslora else layer_rank)
            ranks[layer] = layer_rank
            alphas[layer] = int(alpha) if alpha.is_integer() else alpha
        options: dict[str, Any] = {
            "r": next(iter(ranks.values())),
            "lora_alpha": next(iter(alphas.values())),
            "rank_pattern": {},
            "alpha_pattern": {},
        }
        if len({*zip(ranks.values(), alphas.values(), strict=True)}) > 1:
            # "^": PEFT matches the ends of names, and a layer's name may be the end of another's.
            options["rank_pattern"] = {f"^{layer}": layer_rank for layer, layer_rank in ranks.items()}
            options["alpha_pattern"] = {f"^{layer}": alpha for layer, alpha in alphas.items()}
        if hasattr(self._adapted.config, "init_lora_weights"):
            options["init_lora_weights"] = True  # PEFT's "orthogonal" supports even ranks only
        return options

    def save(self, state: State, folder: Path, classes: Sequence[str] | None = None, rank: int | None = None) -> None:
        """Write one state as a folder that ``peft.PeftModel.from_pretrained`` reads.

        If the backbone was trained, too, its tensors are in ``backbone.safetensors`` beside the adapter. The names of
        the classes are ``id2label`` and ``label2id`` in ``config.json``, as transformers writes them, since PEFT's
        configuration has no field for them.

        Args:
            state: The state.
            folder: The folder, which is created if it does not exist.
            classes: Names of the classes, if there are any.
            rank: Rank to cut LoRA's factors to; None keeps the adapter's.
        """
        folder.mkdir(parents=True, exist_ok=True)
        tensors = dict(self._tensors)
        for name, key in self._keys.items():
            tensors[name] = state[key]
        config = self.config
        if rank is not None:
            tensors = self._truncate_factors(tensors, rank)
            config = json.dumps(json.loads(config) | self._truncated_options(rank), indent=2, sort_keys=True)
        _save_tensors(tensors, folder / WEIGHTS_FILE)
        (folder / CONFIG_FILE).write_text(config, encoding="utf-8")
        if not (folder / CARD_FILE).is_file():
            (folder / CARD_FILE).write_text(_CARD, encoding="utf-8")
        if self._adapted.beside:
            save_backbone(self._adapted, folder, state)
        if classes:
            content = {
                "id2label": {str(number): name for number, name in enumerate(classes)},
                "label2id": {name: number for number, name in enumerate(classes)},
            }
            (folder / CLASS_NAMES_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def load(self, folder: Path, config: PeftConfig, rank: int | None = None) -> State:
        """Read a folder into a state.

        Args:
            folder: The folder.
            config: The configuration that the folder must have.
            rank: Rank that LoRA's factors were cut to, which are filled up with zeros; None for the adapter's.

        Raises:
            FileNotFoundError: If there is no adapter in the folder.
            ValueError: If the adapter is broken, or belongs to another backbone or adapter.
        """
        # The configuration first, with which the digests of all files are compared.
        actual_config = read_config(folder)
        weights = _load_tensors(folder / WEIGHTS_FILE)
        expected_tensors: Mapping[str, Tensor] = self._tensors
        expected_config = config
        if rank is not None:
            expected_tensors = self._truncate_factors(self._tensors, rank)
            expected_config = copy.copy(config)
            vars(expected_config).update(self._truncated_options(rank))
        _check_equal_facts(
            folder, _shared_facts(actual_config, weights), _shared_facts(expected_config, expected_tensors)
        )
        for name, value in weights.items():
            if not value.isfinite().all():
                raise ValueError(f"the adapter in {str(folder)!r} is broken: {name!r} is not finite; {_SAVE_AGAIN}")
        state = get_state(self._adapted.model)
        for name, key in self._keys.items():
            state[key] = widened(weights[name].to(state[key].dtype), state[key].shape)
        for name in self._tensors.keys() - self._keys:
            self._tensors[name].copy_(weights[name])
        if self._adapted.beside:
            backbone = read_backbone(self._adapted, folder / BACKBONE_FILE, set(self._adapted.beside))
            set_state(self._adapted.model, {key: value for key, value in backbone.items() if key not in state})
            state |= {key: backbone[key].to(state[key].dtype) for key in self._adapted.beside}
        return state


def save_typical(state: State, path: Path) -> None:
    """Write what a client needs to predict with both models; see :meth:`.BothModels.state`."""
    # The number of empty rows would reveal that of other clients' images.
    num_examples = int(state["num_examples"])
    _save_tensors({**state, "examples": state["examples"][:num_examples]}, path)


def load_typical(path: Path) -> State:
    """Read what :func:`save_typical` wrote.

    Raises:
        FileNotFoundError: If the file is missing.
        ValueError: If it cannot be read, or has other tensors.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{str(path)!r} is missing; copy the entire folder")
    state = _load_tensors(path)
    if state.keys() != TYPICAL_NAMES:
        raise ValueError(f"{str(path)!r} must have the tensors {quoted(sorted(TYPICAL_NAMES))}; {_SAVE_AGAIN}")
    return state


def _shared_facts(config: PeftConfig, tensors: Mapping[str, Tensor]) -> dict[str, object]:
    """Return the facts that all adapters of a run share, by their names in messages: options and tensor shapes."""
    ignored = {"auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision"}
    shared_facts: dict[str, object] = {}
    for name, value in vars(config).items():
        if name not in ignored:
            # PEFT writes sets as lists in any order.
            if isinstance(value, list):
                value = sorted(map(str, value))
            shared_facts[f"its {name}"] = value
    for name, tensor in tensors.items():
        shared_facts[repr(name)] = list(tensor.shape)
    return shared_facts


def _check_equal_facts(folder: Path, actual: Mapping[str, object], expected_facts: Mapping[str, object]) -> None:
    """Raise a ValueError if an adapter's options or tensors differ from the run's."""
    difference = first_difference(actual, expected_facts)
    if difference is not None:
        raise ValueError(
            f"the adapter in {str(folder)!r} belongs to a different backbone or adapter: {difference.name} is "
            f"{difference.actual}, expected {difference.expected}; load it with the configuration it was created with"
        )


def _load_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error}; {_SAVE_AGAIN}") from error


def _save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors to a file."""
    # safetensors rejects views, and tensors that share memory.
    copies = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    # Unlike save_file, write_bytes raises an OSError if the disk fails.
    path.write_bytes(save(copies, {"format": "pt"}))


def needs_backbone_file(info: Mapping[str, Any]) -> bool:
    """Return whether the backbone's weights are random, the caller's or from a file, and so are saved with the run."""
    pretrained = info["pretrained"]
    backbone = info["backbone"]
    if not pretrained or backbone is None:
        return True
    is_file = isinstance(pretrained, str) and pretrained != LITE0 and not pretrained.startswith(SHIPPED_PREFIX)
    # The configuration of a folder of transformers or OpenCLIP is read from there, too.
    return is_file and not backbone.startswith(("hf:", OPEN_CLIP_PREFIX))


def base_name(adapted: AdaptedModel, pretrained: object) -> str | None:
    """Return the backbone's name on the Hub or in timm; None for the caller's own network."""
    name = adapted.backbone.name
    if name.startswith("hf:"):
        return name.removeprefix("hf:")
    timm_config = getattr(adapted.model, "pretrained_cfg", None)
    if timm_config is None:
        return None
    if pretrained is True and timm_config.get("hf_hub_id"):
        hub_name: str = timm_config["hf_hub_id"]
        return hub_name
    return name


def is_of_perada(config: PeftConfig) -> bool:
    """Return whether an adapter is one of perada's, which PEFT knows only after ``import perada.adapters``."""
    return type(config).__module__.startswith("perada.")


def read_config(folder: Path) -> PeftConfig:
    """Read the configuration of a PEFT folder.

    Raises:
        FileNotFoundError: If the configuration or the weights are missing.
        ValueError: If it cannot be read, or a file of the folder was changed.
    """
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{str(folder)!r} is not an adapter folder: it has no {name}; pass one saved by perada"
            )
    check_sums(folder, (CONFIG_FILE, WEIGHTS_FILE), free=(CARD_FILE,))
    return parse_config(folder)


def parse_config(folder: Path) -> PeftConfig:
    """Read the file ``adapter_config.json`` in a folder.

    Raises:
        FileNotFoundError: If it is missing.
        ValueError: If it cannot be read.
    """
    if not (folder / CONFIG_FILE).is_file():
        raise FileNotFoundError(f"{str(folder)!r} has no {CONFIG_FILE}; copy the entire folder")
    try:
        config: PeftConfig = PeftConfig.from_pretrained(str(folder))
        # PEFT copies it when it inserts the adapter, which fails for deeply nested lists in a malicious file.
        copy.deepcopy(config)
    except Exception as error:  # a broken JSON file, an unknown method or unknown fields
        reason = " ".join(f"{type(error).__name__} {error}".split())[:300]
        raise ValueError(
            f"the adapter configuration in {str(folder)!r} cannot be read: {reason}; save it again"
        ) from error
    return config


def save_backbone(adapted: AdaptedModel, folder: Path, state: State | None = None) -> None:
    """Write the weights of a backbone that cannot be downloaded, or that was trained.

    The file has all tensors of the plain backbone under its names, so that ``timm.create_model(..., checkpoint_path=)``
    and ``pretrained=`` read it. A trained head is in the adapter; the file has the backbone's original head.

    Args:
        adapted: The model.
        folder: Folder of the file.
        state: Trained tensors by their names in the model; None for the model's own.
    """
    model_state = adapted.model.state_dict() | (state or {})
    key_by_plain_name = dict(plain_names(adapted))
    trained = {*trained_keys(adapted.model)}
    # Frozen tensors of the adapter, such as random projections: not every method of PEFT saves them.
    key_by_plain_name |= {key: key for key in model_state if is_adapter_key(key) and key not in trained}
    tensors = {name: model_state[key] for name, key in key_by_plain_name.items()}
    _save_tensors(tensors, folder / BACKBONE_FILE)


def read_backbone(adapted: AdaptedModel, path: Path, needed: set[str]) -> State:
    """Read a backbone file.

    Args:
        adapted: The model.
        path: The file.
        needed: Names in the model of tensors that the file must have.

    Returns:
        The tensors by their names in the model.

    Raises:
        FileNotFoundError: If the file is missing.
        ValueError: If it belongs to another backbone.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"{str(path)!r} is missing, which contains the backbone's trained weights; copy the entire folder"
        )
    key_by_plain_name = plain_names(adapted)
    full = adapted.model.state_dict()
    tensors = {key_by_plain_name.get(name, name): value for name, value in _load_tensors(path).items()}
    mismatched = [key for key, value in tensors.items() if key not in full or value.shape != full[key].shape]
    mismatched += sorted(needed - tensors.keys())
    if mismatched:
        raise ValueError(
            f"{str(path)!r} does not match backbone {adapted.backbone.name!r}: {mismatched[0]!r} is missing in one of "
            "them, or has a different shape; load it with the backbone it was created with"
        )
    return tensors


_ENDINGS_OF_FEW_CLIENTS = ("_worst", "_p10", "_recent", "_client")
"""Endings of metrics of a round that reveal the score of one client or a few."""
_NOT_SHARED = ("clients", "lora_ranks", "joined", "forgotten", "elsewhere", "own_adapters", "adapter_of")
"""Entries of ``Run.info`` that reveal other clients."""


def shared_run_file(
    info: Mapping[str, Any], metrics: Mapping[str, Any], num_clients: int, client: int | None, with_scores: bool
) -> RunFile:
    """Build the ``run.json`` of a shared adapter. It reveals no client other than the adapter's.

    With the global adapter it has no names and scores of clients. The ε of all clients are sorted by size: they state
    what the adapter reveals. With a client's adapter, ``adapter_of`` names the client.

    Args:
        info: ``Run.info``.
        metrics: ``Run.metrics``.
        num_clients: Number of clients of the run.
        client: The client whose adapter is shared; None for the global adapter.
        with_scores: Whether scores are shared.
    """
    if not with_scores:
        info, _ = published(info, metrics)
    shared_content: dict[str, Any] = {key: value for key, value in info.items() if key not in _NOT_SHARED}
    shared_content["clients"] = None
    shared_content["training"] = {name: value for name, value in info["training"].items() if name != "images"}
    privacy = info.get("privacy") or {}
    if client is None:
        shared_content["privacy"] = record_of_nobody(privacy) or None
        rounds = []
        for row in metrics["rounds"] if with_scores else []:
            rounds.append({name: value for name, value in row.items() if not name.endswith(_ENDINGS_OF_FEW_CLIENTS)})
        return RunFile(num_clients, shared_content, {"rounds": rounds, "clients": {}}, shared=True)

    client_name = str(client)
    names = info.get("clients")
    if names:
        client_name = names[client]
        shared_content["clients"] = [client_name]
    shared_content["adapter_of"] = info.get("adapter_of", client_name)
    shared_content["privacy"] = record_of_one(privacy, client) or None
    # The client is number 0 of the shared run.
    joined = [record for record in info.get("joined", []) if record["client"] == client]
    shared_content["joined"] = [record | {"client": 0} for record in joined]
    client_metrics = {}
    if with_scores:
        client_metrics = {name: [values[client]] for name, values in metrics["clients"].items()}
    return RunFile(1, shared_content, {"rounds": [], "clients": client_metrics}, shared=True)


def push_folder(write: Callable[[Path], None], repo: str, description: str, private: bool, token: str | None) -> str:
    """Upload a folder to the Hub, after printing a description of the upload to standard error.

    Args:
        write: Writes the content into an empty folder.
        repo: Name of the repository, which is created if it does not exist.
        description: What is uploaded.
        private: Whether the repository must be private.
        token: Token of the Hub; None for that of ``hf auth login``.

    Returns:
        The address of the repository.

    Raises:
        ValueError: If the repository must be private, exists, and is public.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    url = api.create_repo(repo, private=private, exist_ok=True)
    is_private = api.repo_info(repo).private  # create_repo does not change one that exists
    if private and not is_private:
        raise ValueError(
            f"repo={repo!r} already exists and is public, so nothing was uploaded: make it private on the Hub, choose "
            "a different name, or pass private=False to publish the adapter"
        )
    visibility = "private" if is_private else "public"
    print(f"perada: uploading to the {visibility} repository {repo!r}: {description}", file=sys.stderr)
    with Scratch() as folder:
        write(folder)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Upload an adapter")
    return str(url)
