# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: atomic files with a digest, what they belong to, and runs that resume from them."""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins import TorchCheckpointIO

from perada.core.checks import check_choice
from perada.core.files import open_atomic
from perada.data import FederatedDataModule
from perada.federation.settings import Settings
from perada.lightning.module import FederatedClassifier
from perada.results.restore import LAST, LENGTH, MARK, PREVIOUS, check_whole_file, newest_whole

REMEDY = "fix this, and resume with ckpt_path=last, or train again if no round was saved"
"""After an error of the disk."""


class WholeCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoints on this machine's disks, written beside their place and put there by one renaming.

    A process that is killed, or a disk that is full, leaves the file before as it was. A digest of the content stands
    in the comment of the zip archive that a checkpoint is, so other programs read these files as they read any. The
    ``last.ckpt`` that is replaced becomes ``last.previous.ckpt``.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:  # noqa: ANN401  # Lightning's
        """Write a checkpoint; an OSError names the file."""
        if "://" in str(path):  # of another file system, which has ways of its own
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        try:
            _write(checkpoint, Path(path))
        except OSError as error:
            what = f"the checkpoint {str(path)!r} could not be written"
            raise OSError(error.errno, f"{what}: {error.strerror or error}; {REMEDY}") from error

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[..., Any] | None = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint; a ValueError says so if it is damaged."""
        if "://" not in str(path):
            check_whole_file(Path(path))
        return super().load_checkpoint(path, map_location, weights_only)


def write_whole(trainer: pl.Trainer) -> None:
    """Have a trainer write its checkpoints so, unless it was given a way of its own."""
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = WholeCheckpointIO()


class _Hashed:
    """A file that is written from its beginning to its end, with the digest of its bytes.

    torch's writer makes an error of its own of what ``write`` raises: so the first OSError is kept, and nothing is
    written after it.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.digest = file, hashlib.sha256()
        self.error: OSError | None = None

    def write(self, content: bytes) -> int:
        """Write some more."""
        if self.error is None:
            try:
                self.file.write(content)
                self.digest.update(content)
            except OSError as error:
                self.error = error
        return len(content)

    def flush(self) -> None:
        """Nothing to do: the file is flushed at its end."""


def _write(checkpoint: dict[str, Any], target: Path) -> None:
    """Put a checkpoint in its place, as a zip archive with the digest of its bytes as its comment.

    It goes to the disk as it is made: no copy of it is held in memory.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with open_atomic(target, former=target.with_name(PREVIOUS) if target.name == LAST else None) as file:
        hashed = _Hashed(file)
        torch.save(checkpoint, hashed)  # type: ignore[arg-type]  # it needs write and flush
        if hashed.error is not None:
            raise hashed.error
        file.seek(-2, os.SEEK_END)  # the length of the comment, which was 0
        file.write(LENGTH + MARK + hashed.digest.hexdigest().encode())


Described = dict[str, dict[str, Any]]
CLIENTS = "clients"
"""What ``resume_allow`` must name for it."""
OF_CLIENTS = ("number of clients", "clients' numbers of images", "partition of the data")
"""What a checkpoint then need not have in common with the run that loads it."""


class RoundCheckpoint(ModelCheckpoint):
    """Writes ``last.ckpt`` after every round, by default into the run's ``checkpoints``.

    The one before becomes ``last.previous.ckpt``.
    """

    def __init__(self, dirpath: str | None = None) -> None:
        super().__init__(
            dirpath,
            filename=LAST.removesuffix(".ckpt"),
            save_top_k=1,
            save_on_train_epoch_end=True,
            enable_version_counter=False,
        )

    def state_dict(self) -> dict[str, Any]:
        """Nothing: a resumed run writes into its own folder."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing was saved."""


def newest_checkpoint(root: Path) -> Path:
    """The whole checkpoint written last below ``root/lightning_logs``, as :func:`newest_whole` finds it.

    A FileNotFoundError if there is none.
    """
    found = list(root.glob("lightning_logs/*/checkpoints/**/*.ckpt"))
    path = newest_whole(found)
    if path is None:
        where = f"{'whole ' if found else ''}checkpoint below {str(root / 'lightning_logs')!r}"
        raise FileNotFoundError(f"ckpt_path=last: there is no {where}; train first, or name one by its path")
    return path


def find_checkpoint(ckpt_path: str | None, root: Path) -> str | None:
    """The path of a checkpoint asked for as ``last`` or by its path.

    Raises:
        FileNotFoundError: If it is not there.
        ValueError: If it is not a checkpoint, only the beginning of one, or damaged.
    """
    if ckpt_path is None:
        return None
    if not isinstance(ckpt_path, str | Path):
        raise ValueError(f"ckpt_path={ckpt_path!r} cannot be used; give a checkpoint's path, or 'last'")
    if ckpt_path == "last":
        return str(newest_checkpoint(root))
    if not Path(ckpt_path).is_file():
        raise FileNotFoundError(f"ckpt_path={ckpt_path!r} is not there; give a checkpoint's path, or 'last'")
    check_whole_file(Path(ckpt_path))
    return ckpt_path


def belonging(
    settings: Settings, data: FederatedDataModule, module: FederatedClassifier, disguise: bool = False
) -> dict[str, Any]:
    """What a checkpoint must have in common with the run that loads it, in plain types.

    With ``disguise`` a mark of the seed stands in its place.
    """
    assert module.adapted is not None
    model = module.model.state_dict()
    partition = hashlib.sha256(json.dumps(data.partition_dict(), sort_keys=True).encode()).hexdigest()[:16]
    return {
        "backbone": module.adapted.backbone.name,
        "adapter": type(module.adapted.config).__name__,
        "algorithm": settings.algorithm.kind,
        "server rule": settings.rule.kind,
        "seed": disguised(settings.seed, partition) if disguise else settings.seed,
        "number of classes": data.num_classes,
        "number of clients": data.num_clients,
        "clients' numbers of images": list(data.train_sizes),
        "partition of the data": partition,
        "trained tensors": {key: list(model[key].shape) for key in module.slot.keys},
        "frozen weights": module.frozen_digest,
    }


def training_options(settings: Settings, data: FederatedDataModule, module: FederatedClassifier) -> dict[str, Any]:
    """Options that change what rounds compute, by the names that users give them, in plain types."""
    training = settings.training
    return {
        **{f"lr_{role}": rate for role, rate in training.lr.items()},
        "optimizer": training.optimizer,
        "momentum": training.momentum,
        "weight_decay": training.weight_decay,
        "clip_norm": training.clip_norm,
        "lr_schedule": [module.lr_schedule, module.lr_gamma, module.lr_every],
        "precision": str(module.trainer.precision),
        "batch_size": data.batch_size,
        "image_size": data.image_size,
        "augmentation": list(data.augmentation),
        "clients_per_round": settings.clients_per_round,
        "weighting": settings.weighting,
        "local_training": repr(settings.phases),
        "algorithm": repr(settings.algorithm),
        "server_rule": repr(settings.rule),
        "refuse_far": settings.refuse_far,
        **{f"distillation.{name}": value for name, value in asdict(settings.distillation).items()},
    }


def described(settings: Settings, data: FederatedDataModule, module: FederatedClassifier, disguise: bool) -> Described:
    """What a checkpoint says of its run."""
    return {
        "belongs": belonging(settings, data, module, disguise),
        "options": training_options(settings, data, module),
    }


def check_saved(saved: Described, here: Described, test_mode: bool, training: bool, allowed: Sequence[str]) -> None:
    """Compare what :func:`described` said when a checkpoint was written with what it says now.

    A ValueError names the first difference. Options count where ``training`` resumes, but for those that are
    ``allowed``; a name among these must be that of an option, or ``clients`` for more clients. In the ``test_mode`` of
    privacy, who only evaluates need not know the seed.
    """
    for name in allowed:
        check_choice("resume_allow", name, (*here["options"], CLIENTS))
    more = CLIENTS in allowed and saved["belongs"]["number of clients"] != here["belongs"]["number of clients"]
    for name, value in here["belongs"].items():
        if more and name in OF_CLIENTS:
            continue
        former = saved["belongs"].get(name)
        if former != value and not (name == "seed" and test_mode and not training):
            remedy = "resume with the configuration that wrote it"
            if not training:
                remedy = (
                    "give the configuration that wrote it; other test images belong in data.shifts (docs/shifts.md)"
                )
            raise ValueError(
                f"the checkpoint belongs to another run: its {name} {_difference(former, value)}; {remedy}"
            )
    former = saved.get("options", {})  # not in checkpoints of former versions
    for name, value in here["options"].items():
        if training and name in former and former[name] != value and name not in allowed:
            raise ValueError(
                f"the checkpoint belongs to a run with {name}={_short(former[name])}, and here it is {_short(value)}; "
                f"resume with the former, or accept the change by resume_allow=[{name!r}] "
                f"(--federated.resume_allow=[{name}])"
            )


@cache
def disguised(seed: int, salt: str) -> str:
    """A mark of a seed that is not to be told: it can be compared, and costs 50 ms to be tried."""
    return hashlib.scrypt(str(seed).encode(), salt=salt.encode(), n=2**14, r=8, p=1, dklen=16).hex()


def resume(checkpoint: dict[str, Any], rounds: int, step: int, max_epochs: int) -> None:
    """Let training resume from a checkpoint after its ``rounds`` whole rounds; ``step`` is the last optimiser step.

    A ValueError if it cannot, or fewer rounds are asked for than it has behind it.
    """
    if "loops" not in checkpoint:
        raise ValueError(
            "the checkpoint was saved with save_weights_only=True, which leaves out how far training was; it can be "
            "evaluated, and training can resume from one that was saved without"
        )
    if rounds > max_epochs >= 0:
        raise ValueError(
            f"the checkpoint has {rounds} rounds behind it, more than max_epochs={max_epochs} asks for; give at least "
            f"{rounds}"
        )
    to_round_boundary(checkpoint["loops"]["fit_loop"], rounds, step)


def to_round_boundary(loop: dict[str, Any], rounds: int, step: int) -> None:
    """Let the saved state of Lightning's loop say that ``rounds`` rounds are over and the next has not begun.

    A checkpoint written within a round, or between its end and the end of its epoch, is thereby one of the end of the
    last whole round.
    """
    for count in ("total", "current"):
        loop["epoch_progress"][count] = dict.fromkeys(loop["epoch_progress"][count], rounds)
        batches = loop["epoch_loop.batch_progress"]
        batches[count] = dict.fromkeys(batches[count], step if count == "total" else 0)
        steps = loop["epoch_loop.manual_optimization.optim_step_progress"]
        steps[count] = dict.fromkeys(steps[count], step if count == "total" else 0)
    batches["is_last_batch"] = False
    loop["epoch_loop.state_dict"]["_batches_that_stepped"] = step


def _difference(saved: object, here: object) -> str:
    """Say how two values differ, of dictionaries and lists only the first place."""
    if isinstance(saved, dict) and isinstance(here, dict):
        for key in {**saved, **here}:
            if saved.get(key) != here.get(key):
                return f"have {key!r} of shape {saved.get(key)}, here it is {here.get(key)}"
    return f"is {_short(saved)}, here it is {_short(here)}"


def _short(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def grown(saved: dict[str, Any], data: FederatedDataModule, allowed: Sequence[str]) -> dict[str, Any]:
    """What a checkpoint holds, for a run with its clients and others, where that is ``allowed``.

    Clients are known by name where both runs have names, or else by number. The others start from the global state.
    What was scored or fine-tuned is left out: it is of the former clients alone.

    Raises:
        ValueError: If a client is gone or has another number of images, or the run is private.
    """
    former = saved["belongs"]
    if CLIENTS not in allowed or former["number of clients"] == data.num_clients:
        return saved
    names, here = saved["info"].get("clients"), data.client_names
    if names is not None and here is not None:
        gone = next((name for name in names if name not in here), None)
        numbers = [] if gone else [here.index(name) for name in names]
    else:
        names, numbers = None, list(range(former["number of clients"]))
        gone = data.num_clients if data.num_clients < len(numbers) else None
    if gone is not None:
        raise ValueError(
            f"client {gone!r} of the checkpoint is not among the {data.num_clients} clients of this run; resume with "
            "all of its clients and others"
        )
    for old, new in enumerate(numbers):
        images = former["clients' numbers of images"][old], data.train_sizes[new]
        if images[0] != images[1]:
            who = names[old] if names else old
            raise ValueError(
                f"client {who} had {images[0]} training images when the checkpoint was written, and here it has "
                f"{images[1]}; give the former clients the images that they had (such as by ByDomain)"
            )
    ledgers = saved["federation"]["privacy"] or {}
    if len(numbers) < data.num_clients and (ledgers.get("images") or ledgers.get("clients")):
        raise ValueError(
            f"the checkpoint is of a private run of {len(numbers)} clients, and here there are {data.num_clients}: its "
            "noise and its ledgers are of these clients; start anew, or let the others join by perada personalize"
        )
    federation = saved["federation"] | {"tuned": None, "numbers": numbers}
    nothing: dict[str, Any] = {key: {} for key in ("scores", "per_client", "per_class", "shifted", "measured")}
    return saved | {"federation": federation} | nothing
