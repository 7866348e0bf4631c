# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: find intact ones, check their content, and load a run from one without its training data."""

import hashlib
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar

import torch
from peft import PeftConfig
from torch import nn

from perada.algorithms import Algorithm
from perada.algorithms.records import algorithm_of
from perada.core.checks import check_integer
from perada.core.ranks import this_rank
from perada.core.states import State, clone, set_state, trained_keys, unstack
from perada.engine.engine import Engine
from perada.federation.federation import Federation
from perada.federation.settings import LocalTraining, Settings, Storage
from perada.federation.store import locate
from perada.models.adapted import AdaptedModel, find_tensor_names, insert_adapter
from perada.models.backbones import build_backbone
from perada.models.spec import ModelSpec, frozen_digest
from perada.models.text_head import TextHead
from perada.results.export import BACKBONE_FILE, CONFIG_FILE, needs_backbone_file, read_backbone
from perada.results.run_file import RUN_FILE, RunFile, naming
from perada.server import Distillation
from perada.system.digests import check_format
from perada.tasks.base import make_task

PartT = TypeVar("PartT")

CHECKPOINT_KEY = "perada"
"""Entry of a Lightning checkpoint with perada's content."""
CHECKPOINT_FORMAT = 1
"""Version of the format of this content."""
# A checkpoint is a zip archive. Its comment, at the end of the file after its length, has the digest of the archive.
MARK = b"perada-sha256:"
COMMENT = len(MARK) + 64
LENGTH = struct.pack("<H", COMMENT)
LAST = "last.ckpt"
PREVIOUS = "last.previous.ckpt"
"""The checkpoint that :data:`LAST` replaced, beside it."""
_RESTORING = "while a checkpoint's content took its place"
_OTHER_CHECKPOINT = "choose a different one, or 'last' for the newest intact one"


def check_intact_file(path: Path) -> None:
    """Raise a ValueError if a checkpoint is truncated or damaged; see :func:`damage_of`."""
    damage = damage_of(path)
    if damage:
        raise ValueError(f"ckpt_path={str(path)!r} {damage}; {_OTHER_CHECKPOINT}")


def damage_of(path: Path) -> str | None:
    """Describe the damage of a checkpoint file, to follow its name; ``None`` if it is intact.

    The digest of the file is compared or, if another program wrote it, the checksum of each tensor in the zip archive.
    """
    with path.open("rb") as file:
        archive_size = max(0, path.stat().st_size - len(LENGTH) - COMMENT)
        file.seek(archive_size)
        end = file.read()
        if end.startswith(LENGTH + MARK):
            file.seek(0)
            digest = hashlib.sha256()
            while block := file.read(min(archive_size - file.tell(), 2**22)):
                digest.update(block)
            # The length of the comment was still 0 when the digest was computed.
            digest.update(b"\0\0")
            if end == LENGTH + MARK + digest.hexdigest().encode():
                return None
            return "is damaged: its content does not match its digest"
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.comment or MARK in end:
                return "is damaged: its end was changed"
            damaged_member = archive.testzip()
    except (zipfile.BadZipFile, OSError, NotImplementedError, RuntimeError) as error:
        return f"is not a checkpoint, or was truncated ({' '.join(str(error).split())[:150]})"
    if damaged_member is None:
        return None
    return f"is damaged: the checksum of {damaged_member!r} in it does not match"


def newest_intact(paths: Iterable[Path], accepts: Callable[[Path], bool] | None = None) -> Path | None:
    """Return the newest intact checkpoint, whatever its name; None if there is none.

    Warns of damaged checkpoints.

    Args:
        paths: The checkpoints.
        accepts: Whether an intact checkpoint may be returned; None to accept all.
    """
    all_paths = set(paths)

    def age(path: Path) -> tuple[int, str, bool]:
        # The checkpoint that last.ckpt replaced is older, regardless of the files' times, which copying changes.
        was_replaced = path.name == PREVIOUS and path.with_name(LAST) in all_paths
        dated_path = path.with_name(LAST) if was_replaced else path
        return dated_path.stat().st_mtime_ns, str(dated_path), not was_replaced

    for path in sorted(all_paths, key=age, reverse=True):
        damage = damage_of(path)
        if damage is None:
            if accepts is None or accepts(path):
                return path
        elif not this_rank():
            warnings.warn(f"{str(path)!r} {damage}, so the previous checkpoint is used, if there is one", stacklevel=2)
    return None


def find_clients(saved_states: dict[str, Any], path: str | Path | None) -> None:
    """Update the paths of clients' files in the saved states of a federation to the folder of the checkpoint."""
    for name in ("clients", "tuned"):
        if path is not None and saved_states[name] is not None:
            saved_states[name] = locate(saved_states[name], Path(path))


def contents(saved: Any) -> dict[str, Any]:  # noqa: ANN401  # whatever a file holds
    """Check perada's content of a checkpoint and return it.

    Raises:
        ValueError: If it was not written by perada.
    """
    if saved is None:
        raise ValueError(
            "the checkpoint was not written by perada: it contains no federation; pass one of a perada run"
        )
    with naming("the checkpoint's content is not what perada writes", _OTHER_CHECKPOINT):
        check_format("the checkpoint", saved["format"], CHECKPOINT_FORMAT)
        for row in (saved, *saved["metrics"]["rounds"]):
            check_integer("step", row["step"], 0)
        RunFile(saved["belongs"]["number of clients"], saved["info"], saved["metrics"]).check()
        if "privacy" not in saved["info"]:
            raise KeyError("privacy")
        if not isinstance(saved["data"]["train"], dict):
            raise TypeError("the fingerprint of the training data must be a dictionary")
    content: dict[str, Any] = saved
    return content


@contextmanager
def restoring() -> Iterator[None]:
    """Mark errors while the content of a checkpoint is restored, for :func:`plain_data`."""
    try:
        yield
    except Exception as error:
        error.add_note(_RESTORING)
        raise


@contextmanager
def plain_data(ckpt_path: str | None, trainer: Any = None) -> Iterator[None]:  # noqa: ANN401  # a pl.Trainer
    """Turn errors from a checkpoint with code, or data that perada does not write, into one-line ValueErrors.

    Code in a checkpoint is never run.

    Args:
        ckpt_path: The checkpoint, for messages; None if there is none.
        trainer: Consider only errors while this trainer restores a checkpoint; None to consider all.
    """
    if trainer is not None:
        # Lightning 2.x has no hook around the restoration.
        connector = trainer._checkpoint_connector
        for name in ("_restore_modules_and_callbacks", "restore_training_state"):
            setattr(connector, name, restoring()(getattr(connector, name)))
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        is_relevant = trainer is None or _RESTORING in getattr(error, "__notes__", ())
        if ckpt_path is None or isinstance(error, torch.distributed.DistError) or not is_relevant:
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(
            f"ckpt_path={ckpt_path!r}: its content is not what perada writes ({reason}); {_OTHER_CHECKPOINT}"
        ) from error
    except UnpicklingError as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"ckpt_path={ckpt_path!r} contains more than tensors and plain data, and is not loaded because it could "
            f"run arbitrary code ({reason}); if you trust it, and your own callback added that data, pass "
            "weights_only=False to Trainer.fit, or --weights_only=false on the command line"
        ) from error


@dataclass(frozen=True)
class RestoredRun:
    """The parts of a run that a checkpoint contains.

    Attributes:
        adapted: The model.
        global_states: States of the global models.
        personal_state: Returns the personal state of a client; None if clients have none.
        num_clients: Number of clients.
        metrics: ``Run.metrics``.
        info: ``Run.info``.
        states_of_both: What each client needs to predict with both models, by its number.
    """

    adapted: AdaptedModel
    global_states: list[State]
    personal_state: Callable[[int], State] | None
    num_clients: int
    metrics: dict[str, Any]
    info: dict[str, Any]
    states_of_both: dict[int, State]


def states_of(federation: Federation) -> tuple[list[State], Callable[[int], State] | None]:
    """Return the states of the global models, and a function that returns a client's personal state.

    The function is None if clients have no personal states.
    """
    global_states = unstack(clone(federation.server.members()))
    if not federation.personalized:
        return global_states, None

    def personal_state(client: int) -> State:
        (state,) = unstack(federation.personal_states([client]))
        return state

    return global_states, personal_state


def restored(path: Path, algorithm: Algorithm | None = None, backbone: nn.Module | None = None) -> RestoredRun:
    """Load a run from a checkpoint, or from the newest intact one in the folder of a fit.

    Args:
        path: The checkpoint, or the folder.
        algorithm: The run's algorithm, if it is not one of perada's.
        backbone: The network, if the run was made with the caller's own.

    Raises:
        FileNotFoundError: If there is no checkpoint.
        ValueError: If it cannot be read, or was written with another algorithm or network.
    """
    path = checkpoint_of(path)
    check_intact_file(path)
    with plain_data(str(path)):
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        saved = contents(checkpoint.get(CHECKPOINT_KEY))
        info = saved["info"]
        if algorithm is None:
            algorithm = algorithm_of(info["training"]["algorithm"])
        spec = ModelSpec(
            backbone=_restore_network(path, info, backbone),
            num_classes=info["num_classes"],
            pretrained=info["pretrained"],
            image_size=info["built_for"],
            adapter=_check_available(path, "PEFT configuration", info["adapter"]),
            train_backbone=info["train_backbone"],
            adapter_options=info["adapter_options"],
            # A private run in test mode does not save it.
            seed=info["seed"] or 0,
            per_pixel=make_task(info["task"]).per_pixel,
            text_head=_text_head_of(info),
        )
    # Errors of the caller's own network are not the checkpoint's.
    error_context = plain_data(str(path)) if backbone is None else nullcontext()
    with error_context:
        adapted = spec.build()
    _check_belongs(path, saved, adapted, algorithm)
    with plain_data(str(path)):
        federation = _restore_federation(path, saved, spec, adapted, algorithm)
        global_states, personal_state = states_of(federation)
        return RestoredRun(
            adapted=adapted,
            global_states=global_states,
            personal_state=personal_state,
            num_clients=federation.num_clients,
            metrics=saved["metrics"],
            info=info,
            states_of_both=saved.get("states of both", {}),
        )


def _check_belongs(path: Path, saved: dict[str, Any], adapted: AdaptedModel, algorithm: Algorithm) -> None:
    """Raise a ValueError if a checkpoint was written with a different algorithm or network."""
    model_state = adapted.model.state_dict()
    trained = find_tensor_names(adapted.model, *adapted.backbone.head_modules).keys
    trained_shapes = {key: list(model_state[key].shape) for key in trained}
    weights_remedy = "put the run's weights at the path that it names"
    if saved["info"]["seed"] is None:
        weights_remedy = (
            "it belongs to a private run in test mode, whose frozen weights depend on its seed, which is not saved; "
            "save the result of perada.finetune with Run.save, or start from pretrained weights"
        )
    network_remedy = "pass the run's network as backbone=, and put its weights at the path that it names"
    for fact, actual, remedy in (
        ("algorithm", algorithm.kind, "pass the run's as algorithm="),
        ("trained tensors", trained_shapes, network_remedy),
        ("frozen weights", frozen_digest(adapted.model), weights_remedy),
    ):
        if saved["belongs"].get(fact) != actual:
            raise ValueError(f"{str(path)!r} was written with different {fact}; {remedy}")


def checkpoint_of(path: Path) -> Path:
    """Return the path of a checkpoint file, or of the newest intact one in the folder of a fit.

    Raises:
        FileNotFoundError: If there is none.
    """
    if path.is_file():
        return path
    newest = newest_intact((path / "checkpoints").rglob("*.ckpt"))
    if newest is not None:
        return newest
    if (path / CONFIG_FILE).is_file() and (path.absolute().parent / RUN_FILE).is_file():
        raise FileNotFoundError(
            f"{str(path)!r} is one adapter of a run; pass its parent folder, {str(path.parent)!r}, and choose the "
            "client"
        )
    raise FileNotFoundError(
        f"{str(path)!r} is not a finished run: it has neither adapters with a {RUN_FILE} nor an intact checkpoint; "
        "pass a folder written by `perada fit` or Run.save"
    )


def _check_available(
    path: Path,
    what: str,
    part: PartT | None,
    remedy: str = "save the result of perada.finetune with Run.save",
) -> PartT:
    """Return a part of a run; raise if it is the caller's own, which the run's files do not contain."""
    if part is None:
        raise ValueError(f"{str(path)!r} belongs to a run with a custom {what}, which it does not contain; {remedy}")
    return part


def _restore_network(path: Path, info: dict[str, Any], backbone: nn.Module | None) -> Any:  # noqa: ANN401  # a name, or a network
    """Return the backbone of a saved run: its name, or the caller's own network."""
    network = info["backbone"] if backbone is None else backbone
    if backbone is not None and info["backbone"] is not None:
        raise ValueError(
            f"{str(path)!r} belongs to a run with the backbone {info['backbone']!r}, which is built by name; leave "
            "backbone out"
        )
    remedy = "pass one of the same class as backbone="
    if path.is_file():
        # A checkpoint, which commands read too. They cannot be given a network, but can read what Run.save writes.
        remedy += ", or save the result of perada.finetune with Run.save"
    return _check_available(path, "network", network, remedy)


def _restore_federation(
    path: Path, saved: dict[str, Any], spec: ModelSpec, adapted: AdaptedModel, algorithm: Algorithm
) -> Federation:
    """Build a federation with the states of the server and the clients. Its training options are not used."""
    clients = saved["belongs"]["number of clients"]
    settings = Settings(
        algorithm,
        LocalTraining("sgd", {"local": 0.0}),
        Distillation(steps=0),
        "uniform",
        (),
        0,
        storage=Storage(num_clients=clients),
        lora_ranks=tuple(saved["info"].get("lora_ranks", ())),
    )
    federation = Federation(
        Engine(adapted.model, "loop"),
        find_tensor_names(adapted.model, *adapted.backbone.head_modules),
        lambda index: spec.initial_state(adapted, index),
        settings,
        clients,
    )
    find_clients(saved["federation"], path)
    federation.load_state_dict(saved["federation"] | {"privacy": None})
    return federation


def _text_head_of(info: dict[str, Any]) -> TextHead | None:
    """Return the options of a run's head from class names; None if it is linear."""
    record = info.get("text_head")
    return None if record is None else TextHead(**record)


def rebuilt(folder: Path, info: dict[str, Any], backbone: nn.Module | None, config: PeftConfig) -> AdaptedModel:
    """Build the network of a saved run with its adapter.

    Args:
        folder: The run's folder.
        info: ``Run.info``.
        backbone: The network, if it was the caller's own.
        config: The adapter's configuration.

    Raises:
        FileNotFoundError: If its weights are missing.
        ValueError: If it was the caller's own and is not given, or its weights do not match.
    """
    network = _restore_network(folder, info, backbone)
    path = folder / BACKBONE_FILE
    if not path.is_file() and (not info["pretrained"] or info["backbone"] is None):
        raise FileNotFoundError(
            f"{str(folder)!r} has no {BACKBONE_FILE}, the frozen weights that its adapters were trained on; copy the "
            "entire folder"
        )
    pretrained = info["pretrained"]
    if path.is_file() and needs_backbone_file(info):
        # All weights are in the file.
        pretrained = False
    built = build_backbone(
        network,
        info["num_classes"],
        pretrained=pretrained,
        image_size=info["built_for"],
        per_pixel=make_task(info["task"]).per_pixel,
        text_head=_text_head_of(info),
    )
    with torch.random.fork_rng(devices=[]):
        adapted = insert_adapter(built, config, train_backbone=info["train_backbone"])
    if path.is_file():
        # Trained tensors are in the adapters' folders.
        frozen = set(adapted.model.state_dict()) - set(trained_keys(adapted.model))
        set_state(adapted.model, read_backbone(adapted, path, frozen))
    return adapted
