# SPDX-License-Identifier: Apache-2.0
"""Adapters as PEFT folders, written, read and shared on the Hub."""

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

from perada.core.digests import check_sums
from perada.core.files import Scratch
from perada.core.states import Factors, State, get_state, narrowed, set_state, trained_keys, widened
from perada.models.adapted import AdaptedModel, find_tensor_names, is_adapter_key, plain_names, saved_tensors
from perada.models.weight_files import LITE0, SHIPPED
from perada.results.cards import of_nobody, of_one
from perada.results.run_file import RunFile, published

BACKBONE_FILE = "backbone.safetensors"
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
CARD_FILE = "README.md"
NAMES_FILE = "config.json"
_PATTERNS = ("rank_pattern", "alpha_pattern")
_AGAIN = "save the run again"
_CARD = "---\nlibrary_name: peft\n---\n"


class PeftFolders:
    """The PEFT folders of one model, whose own adapter is left as it was: PEFT looks through the model once for all.

    Args:
        adapted: The model.
        base: What configurations call its backbone.
    """

    def __init__(self, adapted: AdaptedModel, base: str | None = None) -> None:
        self._adapted, self._base = adapted, base
        self._tensors = saved_tensors(adapted)
        full = adapted.model.state_dict()
        own = {full[key].data_ptr(): key for key in trained_keys(adapted.model)}
        named = self._tensors.items()  # fixed projections and the like are in no state
        self._keys = {name: own[value.data_ptr()] for name, value in named if value.data_ptr() in own}

    @cached_property
    def _config(self) -> str:
        self._adapted.peft_model.peft_config["default"].base_model_name_or_path = self._base
        with Scratch() as folder:
            (folder / CARD_FILE).write_text(_CARD, encoding="utf-8")  # else a template is compiled
            with warnings.catch_warnings():  # as in saved_tensors
                warnings.filterwarnings("ignore", "Adapter .* have invalid shape", UserWarning)
                self._adapted.peft_model.save_pretrained(str(folder), save_embedding_layers=False)
            return (folder / CONFIG_FILE).read_text(encoding="utf-8")

    @cached_property
    def _factors(self) -> tuple[Factors, ...]:
        return find_tensor_names(self._adapted.model, self._adapted.backbone.head).factors

    def _cut(self, tensors: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
        """Tensors without what is beyond a rank."""
        own = narrowed({key: tensors[name] for name, key in self._keys.items()}, self._factors, rank)
        return {name: own.get(self._keys.get(name, ""), value) for name, value in tensors.items()}

    def _options(self, rank: int) -> dict[str, Any]:
        """Fields of the configuration of LoRA that was cut to a rank, by which the scale of each layer stays."""
        full, layers = self._adapted.model.state_dict(), {}
        for pair in self._factors:
            own = min(rank, full[pair.down].shape[0])
            alpha = pair.scale * (math.sqrt(own) if getattr(self._adapted.config, "use_rslora", False) else own)
            layers[pair.down.partition(".lora_A.")[0]] = own, int(alpha) if alpha.is_integer() else alpha
        several, (rank, alpha) = len({*layers.values()}) > 1, next(iter(layers.values()))
        # "^": PEFT compares the ends of names, and a layer's may be the end of another's.
        named = {f"^{layer}": own for layer, own in layers.items()}
        patterns = {name: {layer: own[place] for layer, own in named.items()} for place, name in enumerate(_PATTERNS)}
        options = {"r": rank, "lora_alpha": alpha} | (patterns if several else {name: {} for name in _PATTERNS})
        if hasattr(self._adapted.config, "init_lora_weights"):
            options["init_lora_weights"] = True  # PEFT draws by "orthogonal" of even ranks alone
        return options

    def save(self, state: State, folder: Path, classes: Sequence[str] | None = None, rank: int | None = None) -> None:
        """Write one state as a folder, which ``peft.PeftModel.from_pretrained`` reads; with a ``rank``, cut to that.

        Where the backbone was trained too, its tensors are in ``backbone.safetensors`` beside the adapter. The names of
        the classes are ``id2label`` and ``label2id`` in ``config.json``, as transformers writes them: PEFT's own
        configuration has no place for them.
        """
        folder.mkdir(parents=True, exist_ok=True)
        keys = self._keys
        tensors = {name: state[keys[name]] if name in keys else own for name, own in self._tensors.items()}
        config = self._config
        if rank is not None:
            tensors = self._cut(tensors, rank)
            config = json.dumps(json.loads(config) | self._options(rank), indent=2, sort_keys=True)
        _save(tensors, folder / WEIGHTS_FILE)
        (folder / CONFIG_FILE).write_text(config, encoding="utf-8")
        if not (folder / CARD_FILE).is_file():
            (folder / CARD_FILE).write_text(_CARD, encoding="utf-8")
        if self._adapted.beside:
            save_backbone(self._adapted, folder, state)
        if classes:
            names = {str(number): name for number, name in enumerate(classes)}
            content = {"id2label": names, "label2id": {name: number for number, name in enumerate(classes)}}
            (folder / NAMES_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def load(self, folder: Path, config: PeftConfig, rank: int | None = None) -> State:
        """Read a folder into a state; what was cut to a ``rank`` is zero beyond it.

        Raises:
            FileNotFoundError: If there is no adapter in ``folder``.
            ValueError: If it is broken, belongs to another backbone or adapter, or its configuration is not ``config``.
        """
        adapted, found, weights = self._adapted, read_config(folder), _tensors_of(folder / WEIGHTS_FILE)
        tensors: Mapping[str, Tensor] = self._tensors
        if rank is not None:
            tensors, config = self._cut(tensors, rank), copy.copy(config)
            vars(config).update(self._options(rank))
        own, needed = _described(found, weights), _described(config, tensors)
        for what in needed | own:
            here, there = (told.get(what, "missing") for told in (own, needed))
            if here != there:
                raise ValueError(
                    f"the adapter in {str(folder)!r} belongs to another backbone or adapter: {what} is {here}, of the "
                    f"run it is {there}; load it with the configuration it was made with"
                )
        for name, value in weights.items():
            if not value.isfinite().all():
                raise ValueError(f"the adapter in {str(folder)!r} is broken: {name!r} is not finite; {_AGAIN}")
        state = get_state(adapted.model)
        for name, key in self._keys.items():
            state[key] = widened(weights[name].to(state[key].dtype), state[key].shape)
        for name in self._tensors.keys() - self._keys:
            self._tensors[name].copy_(weights[name])
        if adapted.beside:
            tensors = read_backbone(adapted, folder / BACKBONE_FILE, set(adapted.beside))
            set_state(adapted.model, {key: value for key, value in tensors.items() if key not in state})
            state |= {key: tensors[key].to(state[key].dtype) for key in adapted.beside}
        return state


def _described(config: PeftConfig, tensors: Mapping[str, Tensor]) -> dict[str, object]:
    """What all adapters of a run have in common: options, and shapes of tensors."""
    ignored = {"auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision"}
    options = {f"its {name}": value for name, value in vars(config).items() if name not in ignored}
    told = {name: sorted(map(str, value)) if isinstance(value, list) else value for name, value in options.items()}
    return told | {repr(name): list(tensor.shape) for name, tensor in tensors.items()}


def _tensors_of(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error}; {_AGAIN}") from error


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors; safetensors takes neither views nor two names of one tensor."""
    whole = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    path.write_bytes(save(whole, {"format": "pt"}))  # by which an error of the disk is an OSError


def own_weights(info: Mapping[str, Any]) -> bool:
    """Whether the backbone's weights are random, the caller's or in a file, so that a folder must hold them."""
    source, backbone = info["pretrained"], info["backbone"]
    if not source or backbone is None:
        return True
    file = isinstance(source, str) and source != LITE0 and not source.startswith(SHIPPED)
    return file and not backbone.startswith("hf:")  # whose configuration is read from there too


def base_name(adapted: AdaptedModel, pretrained: object) -> str | None:
    """What the Hub, or timm, calls the backbone; None for a network of the caller's own."""
    name, config = adapted.backbone.name, getattr(adapted.model, "pretrained_cfg", None)
    if name.startswith("hf:"):
        return name.removeprefix("hf:")
    if config is None:
        return None
    return (config.get("hf_hub_id") if pretrained is True else None) or name


def read_config(folder: Path) -> PeftConfig:
    """Read the configuration of a PEFT folder.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it cannot be read, or a file of the folder is not what was written.
    """
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{str(folder)!r} is not an adapter folder: it has no {name}; give one that perada saved"
            )
    check_sums(folder, (CONFIG_FILE, WEIGHTS_FILE), free=(CARD_FILE,))
    try:
        config: PeftConfig = PeftConfig.from_pretrained(str(folder))
        copy.deepcopy(config)  # as inserting it does, which lists within lists within lists do not survive
    except Exception as error:  # a broken JSON file, an unknown method or unknown fields
        reason = " ".join(f"{type(error).__name__} {error}".split())[:300]
        raise ValueError(
            f"the adapter configuration in {str(folder)!r} cannot be read: {reason}; save it again"
        ) from error
    return config


def save_backbone(adapted: AdaptedModel, folder: Path, state: State | None = None) -> None:
    """Write a backbone whose weights cannot be had elsewhere, or with a ``state`` one that was trained.

    The file has the names of the plain backbone, and all of its tensors: ``timm.create_model(..., checkpoint_path=)``
    and ``pretrained=`` read it. A trained head is in the adapter; here the backbone's first one stands.
    """
    model = adapted.model.state_dict() | (state or {})
    names = plain_names(adapted)
    trained = {*trained_keys(adapted.model)}
    # Frozen tensors of the adapter itself, such as random projections, which not every method saves.
    own = {key: key for key in model if is_adapter_key(key) and key not in trained}
    _save({plain: model[key] for plain, key in (names | own).items()}, folder / BACKBONE_FILE)


def read_backbone(adapted: AdaptedModel, path: Path, needed: set[str]) -> State:
    """The tensors of a file by their names in the model, with those that are ``needed`` among them."""
    if not path.is_file():
        raise FileNotFoundError(f"{str(path)!r} is missing, the backbone's trained weights; copy the whole folder")
    tensors = _tensors_of(path)
    names, full = plain_names(adapted), adapted.model.state_dict()
    found = {names.get(key, key): value for key, value in tensors.items()}
    wrong = [key for key, value in found.items() if key not in full or value.shape != full[key].shape]
    for key in [*wrong, *sorted(needed - found.keys())]:
        raise ValueError(
            f"{str(path)!r} does not fit backbone {adapted.backbone.name!r}: {key!r} is missing in one of them, or of "
            "another shape; load it with the one it was made with"
        )
    return found


_OF_CLIENTS = ("_worst", "_p10", "_recent", "_client")
"""Endings of metrics of a round that are of one client or a few."""


def shared_part(
    info: Mapping[str, Any], metrics: Mapping[str, Any], num_clients: int, client: int | None, scores: bool
) -> RunFile:
    """What ``run.json`` says beside an adapter that is shared: of no client but the one whose adapter it is.

    With the global adapter there are no clients' names and scores; the ε of all clients are there in the order of their
    size, since they say what it reveals. Beside a client's adapter, ``adapter_of`` says whose it is. Without ``scores``
    there are none.
    """
    left_out = ("clients", "lora_ranks", "joined", "forgotten", "elsewhere", "own_adapters", "adapter_of")
    if not scores:
        info = published(info, metrics)[0]
    kept: dict[str, Any] = {key: value for key, value in info.items() if key not in left_out} | {"clients": None}
    kept["training"] = {name: value for name, value in info["training"].items() if name != "images"}
    privacy = info.get("privacy") or {}
    if client is None:
        kept["privacy"] = of_nobody(privacy) or None
        rounds = [
            {name: value for name, value in row.items() if not name.endswith(_OF_CLIENTS)}
            for row in (metrics["rounds"] if scores else [])
        ]
        return RunFile(num_clients, kept, {"rounds": rounds, "clients": {}}, shared=True)
    names = info.get("clients")
    kept["clients"] = [names[client]] if names else None
    kept["adapter_of"] = info.get("adapter_of", names[client] if names else str(client))
    kept["privacy"] = of_one(privacy, client) or None
    kept |= {"joined": [record | {"client": 0} for record in info.get("joined", []) if record["client"] == client]}
    own = {name: [values[client]] for name, values in metrics["clients"].items()} if scores else {}
    return RunFile(1, kept, {"rounds": [], "clients": own}, shared=True)


def push(write: Callable[[Path], None], repo: str, what: str, private: bool, token: str | None) -> str:
    """Upload what ``write`` puts into a folder, and say on standard error ``what`` leaves; return the address.

    Raises:
        ValueError: If the repository is to be private, exists, and is public.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    url = api.create_repo(repo, private=private, exist_ok=True)
    hidden = api.repo_info(repo).private  # one that was there already stays as it is
    if private and not hidden:
        raise ValueError(
            f"repo={repo!r} is there already and public, and nothing was uploaded: make it private on the Hub, give "
            "another name, or private=False to publish the adapter"
        )
    print(f"perada: uploading to the {'private' if hidden else 'public'} repository {repo!r}: {what}", file=sys.stderr)
    with Scratch() as folder:
        write(folder)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Upload an adapter")
    return str(url)
