# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: which is whole, what they hold, and the run in one, without the data that it was trained on."""

import hashlib
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from peft import PeftConfig
from torch import nn

from perada.algorithms import Algorithm
from perada.algorithms.joining import algorithm_of
from perada.core.checks import check_integer
from perada.core.digests import check_format
from perada.core.ranks import this_rank
from perada.core.states import State, clone, set_state, trained_keys, unstack
from perada.engine.engine import Engine
from perada.federation.federation import Federation
from perada.federation.settings import LocalTraining, Settings, Storage
from perada.federation.store import locate
from perada.models.adapted import AdaptedModel, find_tensor_names, insert_adapter
from perada.models.backbones import build_backbone
from perada.models.spec import ModelSpec, frozen_digest
from perada.results.export import BACKBONE_FILE, CONFIG_FILE, own_weights, read_backbone
from perada.results.run_file import RUN_FILE, RunFile, naming
from perada.server import Distillation

CHECKPOINT_KEY, CHECKPOINT_FORMAT = "perada", 1
"""Where a checkpoint of Lightning's has what perada puts into it, and the format of that."""
MARK = b"perada-sha256:"
COMMENT = len(MARK) + 64
LENGTH = struct.pack("<H", COMMENT)  # stands before the comment of a zip archive
LAST = "last.ckpt"
PREVIOUS = "last.previous.ckpt"
"""The checkpoint that :data:`LAST` replaced, beside it."""
_RESTORING = "while a checkpoint's content took its place"
_OTHER = "give another, or 'last' for the newest that is whole"


def check_intact_file(path: Path) -> None:
    """Refuse a checkpoint that is cut off or whose bytes are not those that were written, by a ValueError.

    Of one that another program wrote the checksums are compared that each tensor has in a zip archive.
    """
    if damage := damage_of(path):
        raise ValueError(f"ckpt_path={str(path)!r} {damage}; {_OTHER}")


def damage_of(path: Path) -> str | None:
    """What is wrong with a checkpoint file, to stand behind its name; ``None`` if it is as it was written."""
    with path.open("rb") as file:
        content = max(0, path.stat().st_size - len(LENGTH) - COMMENT)
        file.seek(content)
        end = file.read()
        if end.startswith(LENGTH + MARK):
            file.seek(0)
            digest = hashlib.sha256()
            while block := file.read(min(content - file.tell(), 2**22)):
                digest.update(block)
            digest.update(b"\0\0")
            whole = end == LENGTH + MARK + digest.hexdigest().encode()
            return None if whole else "is damaged: its content does not have the digest it names"
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.comment or MARK in end:
                return "is damaged: its end is not as it was written"
            broken = archive.testzip()
    except (zipfile.BadZipFile, OSError, NotImplementedError, RuntimeError) as error:
        return f"is not a checkpoint, or was cut off ({' '.join(str(error).split())[:150]})"
    return None if broken is None else f"is damaged: the checksum of {broken!r} in it does not fit"


def newest_intact(paths: Iterable[Path], suits: Callable[[Path], bool] | None = None) -> Path | None:
    """The checkpoint written last that is whole and suits, whatever its name; None if there is none.

    Damaged ones are left out with a warning. Where a folder has ``last.ckpt``, what that replaced is older, whatever
    the times of the files say: copying changes them.
    """
    found = set(paths)

    def age(path: Path) -> tuple[int, str, bool]:
        replaced = path.name == PREVIOUS and path.with_name(LAST) in found
        shown = path.with_name(LAST) if replaced else path
        return shown.stat().st_mtime_ns, str(shown), not replaced

    for path in sorted(found, key=age, reverse=True):
        damage = damage_of(path)
        if damage is None:
            if suits is None or suits(path):
                return path
            continue
        if not this_rank():
            what = f"{str(path)!r} {damage}, so the checkpoint before it is taken, if there is one"
            warnings.warn(what, stacklevel=2)
    return None


def find_clients(states: dict[str, Any], path: str | Path | None) -> None:
    """Let the saved states of a federation name its clients' files where they are now, beside the checkpoint."""
    for name in ("clients", "tuned"):
        if path is not None and states[name] is not None:
            states[name] = locate(states[name], Path(path))


def contents(saved: Any) -> dict[str, Any]:  # noqa: ANN401  # whatever a file holds
    """What perada put into a checkpoint, after looking at its numbers; a ValueError if it is nothing of the kind."""
    if saved is None:
        raise ValueError("the checkpoint was not written by perada: it holds no federation; give one of a perada run")
    with naming("the checkpoint does not hold what perada writes", _OTHER):
        check_format("the checkpoint", saved["format"], CHECKPOINT_FORMAT)
        for row in (saved, *saved["metrics"]["rounds"]):
            check_integer("step", row["step"], 0)
        RunFile(saved["belongs"]["number of clients"], saved["info"], saved["metrics"]).check()
        if "privacy" not in saved["info"]:
            raise KeyError("privacy")
        if not isinstance(saved["data"]["train"], dict):
            raise TypeError("the fingerprint of the training data must be a dictionary")
    found: dict[str, Any] = saved
    return found


@contextmanager
def restoring() -> Iterator[None]:
    """Mark the errors that come up while a checkpoint's content takes its place, for :func:`plain_data`."""
    try:
        yield
    except Exception as error:
        error.add_note(_RESTORING)
        raise


@contextmanager
def plain_data(ckpt_path: str | None, trainer: Any = None) -> Iterator[None]:  # noqa: ANN401  # a pl.Trainer
    """Say in one line, by a ValueError, that a checkpoint holds more than data, or other data than perada writes.

    No code that it brings is run. With a ``trainer`` this is of what it restores, else of all that is done in here.
    """
    if trainer is not None:
        connector = trainer._checkpoint_connector
        for name in ("_restore_modules_and_callbacks", "restore_training_state"):
            setattr(connector, name, restoring()(getattr(connector, name)))
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        marked = trainer is None or _RESTORING in getattr(error, "__notes__", ())
        if ckpt_path is None or isinstance(error, torch.distributed.DistError) or not marked:
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(f"ckpt_path={ckpt_path!r} does not hold what perada writes ({reason}); {_OTHER}") from error
    except UnpicklingError as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"ckpt_path={ckpt_path!r} holds more than tensors and plain data, and is not read, since it could run any "
            f"code ({reason}); if you trust it, and a callback of your own put that there, give weights_only=False to "
            "Trainer.fit, or --weights_only=false to the program"
        ) from error


def states_of(federation: Federation) -> tuple[list[State], Callable[[int], State] | None]:
    """The global models, and what gives a client's own state; None where clients have none."""
    models = unstack(clone(federation.server.members()))
    if not federation.personalized:
        return models, None
    return models, lambda client: unstack(federation.personal_states([client]))[0]


def restored(path: Path, algorithm: Algorithm | None = None, backbone: nn.Module | None = None) -> tuple[Any, ...]:
    """The run whose checkpoint is at ``path``, or the newest whole one in a fit's folder there, as it was then.

    Args:
        path: The checkpoint, or the folder.
        algorithm: The run's, where it is not perada's own.
        backbone: The network, where the run was made with one of the caller's own.

    Returns:
        What a :class:`perada.Run` is made of.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it cannot be read, or what was given is not the run's.
    """
    path = _checkpoint(path)
    check_intact_file(path)
    with plain_data(str(path)):
        saved = contents(torch.load(path, map_location="cpu", weights_only=True).get(CHECKPOINT_KEY))
        info = saved["info"]
        algorithm = algorithm_of(info["training"]["algorithm"]) if algorithm is None else algorithm
        spec = ModelSpec(
            _network(path, info, backbone),
            info["num_classes"],
            info["pretrained"],
            info["built_for"],
            _known(path, "PEFT configuration", info["adapter"]),
            info["train_backbone"],
            info["adapter_options"],
            info["seed"] or 0,
        )
    with plain_data(str(path)) if backbone is None else nullcontext():
        adapted = spec.build()
    trained = find_tensor_names(adapted.model, adapted.backbone.head).keys
    weights = "put the run's weights where it names them"
    if info["seed"] is None:
        weights = (
            "it is of a private run in test mode, and its frozen weights follow from its seed, which is not written; "
            "save what perada.finetune returned with Run.save, or begin with pretrained weights"
        )
    for what, remedy, here in (
        ("algorithm", "give the run's own as algorithm=", algorithm.kind),
        (
            "trained tensors",
            "give the run's own network as backbone=, and its weights where it names them",
            {key: list(adapted.model.state_dict()[key].shape) for key in trained},
        ),
        ("frozen weights", weights, frozen_digest(adapted.model)),
    ):
        if saved["belongs"].get(what) != here:
            raise ValueError(f"{str(path)!r} was written with other {what}; {remedy}")
    with plain_data(str(path)):
        federation = _federation(path, saved, spec, adapted, algorithm)
        return adapted, *states_of(federation), federation.num_clients, saved["metrics"], info


def _checkpoint(path: Path) -> Path:
    """A checkpoint file itself, or the newest whole one of a fit's folder."""
    found = path if path.is_file() else newest_intact((path / "checkpoints").rglob("*.ckpt"))
    if found is not None:
        return found
    if (path / CONFIG_FILE).is_file() and (path.absolute().parent / RUN_FILE).is_file():
        raise FileNotFoundError(
            f"{str(path)!r} is one adapter of a run; give the folder that it is in, {str(path.parent)!r}, and choose "
            "the client"
        )
    raise FileNotFoundError(
        f"{str(path)!r} is not a finished run: it has neither adapters beside a {RUN_FILE} nor a whole checkpoint; "
        "give a folder that `perada fit` or Run.save wrote"
    )


def _known(path: Path, what: str, part: Any, remedy: str = "") -> Any:  # noqa: ANN401  # a name, or the caller's own
    """A part of the run, which its files lack where it was one of the caller's own."""
    if part is None:
        raise ValueError(
            f"{str(path)!r} is of a run with a {what} of your own, which is not in it; {remedy}save what "
            "perada.finetune returned with Run.save"
        )
    return part


def _network(path: Path, info: dict[str, Any], backbone: nn.Module | None) -> Any:  # noqa: ANN401  # a name, or a network
    network = info["backbone"] if backbone is None else backbone
    return _known(path, "network", network, "give one of the same class as backbone=, or ")


def _federation(
    path: Path, saved: dict[str, Any], spec: ModelSpec, adapted: AdaptedModel, algorithm: Algorithm
) -> Federation:
    """The states of server and clients, for none of whom anything will be trained."""
    clients, training = saved["belongs"]["number of clients"], LocalTraining("sgd", {"local": 0.0})
    settings = Settings(
        algorithm,
        training,
        Distillation(steps=0),
        "uniform",
        (),
        0,
        storage=Storage(clients=clients),
        lora_ranks=tuple(saved["info"].get("lora_ranks", ())),
    )
    federation = Federation(
        Engine(adapted.model, "loop"),
        find_tensor_names(adapted.model, adapted.backbone.head),
        lambda index: spec.initial_state(adapted, index),
        settings,
        clients,
    )
    find_clients(saved["federation"], path)
    federation.load_state_dict(saved["federation"] | {"privacy": None})
    return federation


def rebuilt(folder: Path, info: dict[str, Any], backbone: nn.Module | None, config: PeftConfig) -> AdaptedModel:
    """The network of the run in ``folder``, with an adapter; ``backbone`` where it was one of the caller's own.

    Raises:
        FileNotFoundError: If its weights are missing.
        ValueError: If it was one of the caller's own, which was not given, or its weights are others.
    """
    network, path = _network(folder, info, backbone), folder / BACKBONE_FILE
    if not path.is_file() and (not info["pretrained"] or info["backbone"] is None):
        raise FileNotFoundError(
            f"{str(folder)!r} has no {BACKBONE_FILE}, the frozen weights that its adapters were trained on; copy "
            "the whole folder"
        )
    pretrained = False if path.is_file() and own_weights(info) else info["pretrained"]
    built = build_backbone(network, info["num_classes"], pretrained=pretrained, image_size=info["built_for"])
    with torch.random.fork_rng(devices=[]):
        adapted = insert_adapter(built, config, train_backbone=info["train_backbone"])
    if path.is_file():
        frozen = set(adapted.model.state_dict()) - set(trained_keys(adapted.model))
        set_state(adapted.model, read_backbone(adapted, path, frozen))
    return adapted
