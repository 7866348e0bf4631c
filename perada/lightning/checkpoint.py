# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: atomic files with a digest, what they belong to, and runs that resume from them."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins import TorchCheckpointIO

from perada.core.checks import check_choice
from perada.core.files import open_atomic
from perada.core.ranks import Ranks
from perada.data import FederatedDataModule
from perada.data.fingerprints import difference_in_content, difference_in_names, same_training_data
from perada.lightning.module import FederatedClassifier
from perada.lightning.parts import Parts
from perada.results.restore import CHECKPOINT_KEY, LAST, LENGTH, MARK, PREVIOUS, check_intact_file, newest_intact


class WholeCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoints on this machine's disks, written beside their place and put there by one renaming.

    A process that is killed, or a disk that is full, leaves the file before as it was. A digest of the content stands
    in the comment of the zip archive that a checkpoint is, so other programs read these files as they read any. The
    ``last.ckpt`` that is replaced becomes ``last.previous.ckpt``.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:  # noqa: ANN401  # Lightning's
        """Write a checkpoint, as a zip archive with the digest of its bytes as its comment.

        It goes to the disk as it is made: no copy of it is held in memory. An OSError names the file.
        """
        if "://" in str(path):  # of another file system, which has ways of its own
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with open_atomic(target, former=target.with_name(PREVIOUS) if target.name == LAST else None) as file:
            digest = hashlib.sha256()  # of what is to be written, not of what the disk has made of it

            def write(some: bytes) -> int:
                digest.update(some)
                return file.write(some)

            try:
                torch.save(checkpoint, SimpleNamespace(write=write, flush=file.flush))
            except RuntimeError as error:  # torch's own, while it handles what the file raised
                raise (error.__context__ or error) from None
            file.seek(-2, os.SEEK_END)  # the length of the comment, which was 0
            file.write(LENGTH + MARK + digest.hexdigest().encode())

    def load_checkpoint(self, path: str | Path, *options: Any, **others: Any) -> dict[str, Any]:
        """Read a checkpoint; a ValueError says so if it is damaged."""
        if "://" not in str(path):
            check_intact_file(Path(path))
        return super().load_checkpoint(path, *options, **others)


Description = dict[str, dict[str, Any]]
CLIENTS = "clients"
"""What ``resume_allow`` must name for more clients."""
CONTENT = "images"
"""What ``resume_allow`` must name for other images or labels of the same clients."""
KNOWN_LATER = ("precision",)
"""Options of a run that are known once it is set up."""
CLIENT_FIELDS = ("number of clients", "clients' numbers of images", "partition of the data")
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


def find_checkpoint(
    ckpt_path: str | None,
    root: Path,
    here: Description | None = None,
    allowed: Sequence[str] = (),
    training: bool = True,
) -> str | None:
    """Find a checkpoint by its path or, as ``last``, the whole one written last below ``root``.

    Args:
        ckpt_path: The path, ``last`` or None.
        root: Folder with ``lightning_logs``.
        here: What is known of the run before set-up (:func:`described_early`). ``last`` is then the newest checkpoint
            that belongs to it, and one of another run is refused at once.
        allowed: Options that may differ.
        training: Whether training resumes, so that options count.

    Raises:
        FileNotFoundError: If it is not there.
        ValueError: If it is not a checkpoint, only the beginning of one, damaged, or of another run.
    """
    if ckpt_path is None:
        return None
    if not isinstance(ckpt_path, str | Path):
        raise ValueError(f"ckpt_path={ckpt_path!r} cannot be used; give a checkpoint's path, or 'last'")
    if here is not None:
        for name in allowed:
            check_choice("resume_allow", name, (*here["options"], *KNOWN_LATER, CLIENTS, CONTENT))
    if ckpt_path == "last":
        found = list(root.glob("lightning_logs/*/checkpoints/**/*.ckpt"))
        others = dict[Path, str]()

        def belongs(path: Path) -> bool:
            difference = None if here is None else _early_difference(path, here, allowed, training)
            if difference is not None:
                others[path] = difference
            return difference is None

        path = newest_intact(found, belongs)
        if path is None and others:
            newest = next(iter(others))
            raise ValueError(
                f"ckpt_path=last: no checkpoint below {str(root / 'lightning_logs')!r} belongs to this run, and the "
                f"newest, {str(newest)!r}, is refused: {others[newest]}"
            )
        if path is None:
            where = f"{'whole ' if found else ''}checkpoint below {str(root / 'lightning_logs')!r}"
            raise FileNotFoundError(f"ckpt_path=last: there is no {where}; train first, or name one by its path")
        return str(path)
    if not Path(ckpt_path).is_file():
        raise FileNotFoundError(f"ckpt_path={ckpt_path!r} is not there; give a checkpoint's path, or 'last'")
    check_intact_file(Path(ckpt_path))
    if here is not None:
        difference = _early_difference(Path(ckpt_path), here, allowed, training)
        if difference is not None:
            raise ValueError(difference)
    return ckpt_path


def described_early(loop: Any, module: FederatedClassifier, data: FederatedDataModule) -> Description:  # noqa: ANN401  # a FederatedLoop, which imports this
    """What :func:`described` will say, as far as it is known before anything is set up."""
    belongs: dict[str, Any] = {"algorithm": loop.algorithm.kind, "server rule": loop.server_rule.kind}
    if not loop.test_mode:
        belongs["seed"] = loop.seed
    if data.data is not None:
        belongs["number of clients"] = len(data.data.train)
    options = {
        **{f"lr_{role}": rate for role, rate in module.lr.items()},
        **{name: getattr(module, name) for name in ("optimizer", "momentum", "weight_decay", "clip_norm")},
        "lr_schedule": [module.lr_schedule, module.lr_gamma, module.lr_every],
        "batch_size": data.batch_size,
        "image_size": data.image_size,
        "augmentation": [data.prepare.crop_padding, data.prepare.flip, data.prepare.augment_public],
        **{name: getattr(loop, name) for name in ("clients_per_round", "weighting", "drop_outliers")},
        "local_training": repr(loop.phases),
        "algorithm": repr(loop.algorithm),
        "server_rule": repr(loop.server_rule),
        "secure_sums": repr(loop.secure_sums),
        **{f"distillation.{name}": value for name, value in asdict(loop.distillation).items()},
    }
    info = {name: getattr(module, name) for name in ("backbone", "adapter")}
    partition = {}
    if data.division is not None:
        partition = {"dataset": repr(data.division.dataset), "partition": repr(data.division.partition)}
    return {"belongs": belongs, "options": options, "info": info, "partition": partition}


def _early_difference(path: Path, here: Description, allowed: Sequence[str], training: bool) -> str | None:
    """Why a checkpoint is of another run, by what is known before set-up; None if it may be of this one.

    Whatever cannot be read here is left to the checks of the checkpoint that is loaded.
    """
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)[CHECKPOINT_KEY]
        for name, value in here["info"].items():
            former = saved["info"][name]
            if isinstance(value, str) and isinstance(former, str) and value != former:
                return _of_another_run(f"its {name} {_difference(former, value)}", training)
        recorded = path.parent.parent / "partition.json"
        record = json.loads(recorded.read_text(encoding="utf-8")) if recorded.is_file() else {}
        for name, value in here["partition"].items():
            if CLIENTS not in allowed and record.get(name, value) != value:
                return _of_another_run(f"its {name} {_difference(record[name], value)}", training)
        free = CLIENT_FIELDS if CLIENTS in allowed else ()
        if isinstance(saved["belongs"]["seed"], str):  # a mark of a secret seed, of a run in the test mode of privacy
            free = (*free, "seed")
        return _first_difference(saved, here, training, allowed, free)
    except Exception:  # of any file, which may hold anything
        return None


def run_fingerprint(parts: Parts) -> dict[str, dict[str, Any]]:
    """What a checkpoint says of its run, in plain types.

    It ``belongs`` to runs that have these in common, with a mark in the place of a seed that is not to be told; its
    ``options`` change what rounds compute, by the names that users give them.
    """
    settings, data, module, training = parts.settings, parts.data, parts.module, parts.settings.training
    model = module.model.state_dict()
    partition = hashlib.sha256(json.dumps(data.partition_dict(), sort_keys=True).encode()).hexdigest()[:16]
    belongs = {
        "backbone": parts.adapted.backbone.name,
        "adapter": type(parts.adapted.config).__name__,
        "algorithm": settings.algorithm.kind,
        "server rule": settings.rule.kind,
        "seed": disguised(settings.seed, partition) if settings.test_mode else settings.seed,
        "number of classes": data.num_classes,
        "number of clients": data.num_clients,
        "clients' numbers of images": list(data.train_sizes),
        "partition of the data": partition,
        "trained tensors": {key: list(model[key].shape) for key in module.tensor_names.keys},
        "frozen weights": module.frozen_digest,
    }
    options = {
        **{f"lr_{role}": rate for role, rate in training.lr.items()},
        **{name: getattr(training, name) for name in ("optimizer", "momentum", "weight_decay", "clip_norm")},
        "lr_schedule": [module.lr_schedule, module.lr_gamma, module.lr_every],
        "precision": str(module.trainer.precision),
        "batch_size": data.batch_size,
        "image_size": data.image_size,
        "augmentation": [data.prepare.crop_padding, data.prepare.flip, data.prepare.augment_public],
        **{name: getattr(settings, name) for name in ("clients_per_round", "weighting", "drop_outliers")},
        "local_training": repr(settings.phases),
        "algorithm": repr(settings.algorithm),
        "server_rule": repr(settings.rule),
        "secure_sums": repr(settings.secure_sums),
        **{f"distillation.{name}": value for name, value in asdict(settings.distillation).items()},
    }
    return {"belongs": belongs, "options": options}


def cross_rank_fingerprint(parts: Parts, done: int) -> dict[str, Any]:
    """What must be the same in all processes of a job, with ``done`` rounds behind it, by name, in plain types."""
    said, trainer = run_fingerprint(parts), parts.trainer
    return {
        **said["belongs"],
        **said["options"],
        "number of rounds (max_epochs)": trainer.max_epochs,
        "number of rounds behind it": done,
        "check_val_every_n_epoch": trainer.check_val_every_n_epoch,
        "limit_val_batches": trainer.limit_val_batches,
        "eval_batch_size": parts.data.eval_batch_size,
        "global_test_clients": parts.module.global_test_clients,
        "metric": parts.module.metric,
        "privacy": repr((parts.settings.privacy, parts.settings.client_privacy)),
    }


def check_alike(ranks: Ranks, mine: dict[str, Any]) -> None:
    """Refuse, by a ValueError that names the first difference, processes that are about to train different things."""
    for rank, other in enumerate(ranks.gather(mine)):
        for name, value in mine.items():
            if name == "data":
                # Datasets that return other images each time are compared by names and labels only.
                theirs = other.get(name, {})
                differs = bool(difference_in_names(theirs, value) or difference_in_content(theirs, value))
            else:
                differs = other.get(name) != value
            if differs:
                who = f"process {rank} has another {name} than process {ranks.rank}"
                raise ValueError(f"{who}: data and options must be alike in all; draw from a fixed seed in your script")


def check_saved(saved: dict[str, Any], parts: Parts, training: bool, allowed: Sequence[str]) -> None:
    """Refuse, by a ValueError, a checkpoint of which :func:`described` said other things than it says now.

    Options count where ``training`` resumes, but for those that are ``allowed``, as may be ``clients`` for more
    clients and ``images`` for other images of the same clients. In the test mode of privacy, who only evaluates need
    not know the seed.
    """
    here = run_fingerprint(parts)
    for name in allowed:
        check_choice("resume_allow", name, (*here["options"], CLIENTS, CONTENT))
    more = CLIENTS in allowed and saved["belongs"]["number of clients"] != here["belongs"]["number of clients"]
    free: Sequence[str]
    if more:
        free = CLIENT_FIELDS
    elif parts.settings.test_mode and not training:
        free = ("seed",)
    else:
        free = ()
    for name, value in here["belongs"].items():
        former = saved["belongs"].get(name)
        if name == "clients' numbers of images" and not more:
            # Names before numbers: clients in another order usually differ in both.
            _check_names(saved["data"], parts.data.fingerprint, training)
        if former != value and name not in free:
            raise ValueError(_of_another_run(f"its {name} {_difference(former, value)}", training))
    if not more:
        _check_content(saved["data"], parts.data.fingerprint, parts, training, allowed)
    difference = _first_difference(saved, here | {"belongs": {}}, training, allowed, free)
    if difference is not None:
        raise ValueError(difference)


def _first_difference(
    saved: dict[str, Any], here: Description, training: bool, allowed: Sequence[str], free: Sequence[str]
) -> str | None:
    """The message on the first thing in which a checkpoint differs from a run that loads it; None if there is none."""
    for name, value in here["belongs"].items():
        former = saved["belongs"].get(name)
        if former != value and name not in free:
            return _of_another_run(f"its {name} {_difference(former, value)}", training)
    for name, value in here["options"].items() if training else ():
        former = saved["options"].get(name)
        if former != value and name not in allowed:
            return (
                f"the checkpoint belongs to a run with {name}={_short(former)}, and here it is {_short(value)}; resume "
                f"with the former, or accept the change by resume_allow=[{name!r}] (--federated.resume_allow=[{name}])"
            )
    return None


def _of_another_run(difference: str, training: bool) -> str:
    remedy = "give the configuration that wrote it"
    if not training:
        remedy += "; other test images belong in data.shifts (docs/shifts.md)"
    return f"the checkpoint belongs to another run: {difference}; {remedy}"


def _check_names(former: dict[str, Any], here: dict[str, Any], training: bool) -> None:
    """Refuse clients or classes with other names or in another order: states and noise are known by their numbers."""
    difference = difference_in_names(former, here)
    if difference is None:
        return
    if training:
        raise ValueError(f"the checkpoint belongs to another run: {difference}")
    raise ValueError(_of_another_run(difference, training))


def _check_content(
    former: dict[str, Any], here: dict[str, Any], parts: Parts, training: bool, allowed: Sequence[str]
) -> None:
    """Refuse other images or labels than those that the run was trained on, unless they are allowed."""
    difference = difference_in_content(former, here)
    ledgers_count_on = training and parts.settings.private
    if difference is None or (CONTENT in allowed and not ledgers_count_on):
        return
    if not training:
        raise ValueError(_of_another_run(difference, training))
    if ledgers_count_on:
        raise ValueError(
            f"the checkpoint belongs to a private run on other data: {difference}; its noise and its ledgers are of "
            "the former images. Give these in the former order, or start anew"
        )
    raise ValueError(
        f"the checkpoint belongs to a run on other data: {difference}; give the former data in the former order, "
        f"or accept the change by resume_allow=[{CONTENT!r}] (--federated.resume_allow=[{CONTENT}])"
    )


@cache
def disguised(seed: int, salt: str) -> str:
    """A mark of a seed that is not to be told: it can be compared, and costs 50 ms to be tried."""
    return hashlib.scrypt(str(seed).encode(), salt=salt.encode(), n=2**14, r=8, p=1, dklen=16).hex()


def resume(checkpoint: dict[str, Any], rounds: int, step: int, max_epochs: int) -> None:
    """Let training resume from a checkpoint after its ``rounds`` whole rounds; ``step`` is the last optimiser step.

    The saved state of Lightning's loop is made to say that these rounds are over and the next has not begun, also where
    it was written within a round, or between its end and the end of its epoch. A ValueError if training cannot resume,
    or fewer rounds are asked for than are over.
    """
    if "loops" not in checkpoint:
        raise ValueError(
            "the checkpoint was saved with save_weights_only=True, and can only be evaluated; resume from another"
        )
    if rounds > max_epochs >= 0:
        raise ValueError(
            f"the checkpoint has {rounds} rounds behind it, more than max_epochs={max_epochs} asks for; give at least "
            f"{rounds}"
        )
    loop = checkpoint["loops"]["fit_loop"]
    for count in ("total", "current"):
        loop["epoch_progress"][count] = dict.fromkeys(loop["epoch_progress"][count], rounds)
        batches = loop["epoch_loop.batch_progress"]
        batches[count] = dict.fromkeys(batches[count], step if count == "total" else 0)
        steps = loop["epoch_loop.manual_optimization.optim_step_progress"]
        steps[count] = dict.fromkeys(steps[count], step if count == "total" else 0)
    batches["is_last_batch"] = False
    loop["epoch_loop.state_dict"]["_batches_that_stepped"] = step


def _difference(saved: object, here: object) -> str:
    """Say how two values differ, of dictionaries only the first place."""
    if isinstance(saved, dict) and isinstance(here, dict):
        key = next(key for key in {**saved, **here} if saved.get(key) != here.get(key))
        return f"have {key!r} of shape {saved.get(key)}, here it is {here.get(key)}"
    return f"is {_short(saved)}, here it is {_short(here)}"


def _short(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def remap_clients(saved: dict[str, Any], data: FederatedDataModule, allowed: Sequence[str]) -> dict[str, Any]:
    """What a checkpoint holds, for a run with its clients and others, where that is ``allowed``.

    Clients are known by name where both runs have names, or else by number. The others start from the global state.
    What was scored or fine-tuned is left out: it is of the former clients alone. A ValueError if one of these is gone
    or has another number of images, or the run is private.
    """
    former = saved["belongs"]
    names, here = saved["info"].get("clients"), cast(Sequence[int | str] | None, data.client_names)
    if CLIENTS not in allowed or former["number of clients"] == data.num_clients:
        return saved
    if names is None or here is None:
        names, here = range(former["number of clients"]), range(data.num_clients)
    places = {name: place for place, name in enumerate(here)}
    numbers = []
    for number, (name, images) in enumerate(zip(names, former["clients' numbers of images"], strict=True)):
        found = data.train_sizes[places[name]] if name in places else "none"
        if images != found:
            raise ValueError(
                f"client {name} had {images} training images when the checkpoint was written, and here it has {found}; "
                "resume with all former clients, with the images that they had, and others"
            )
        if CONTENT not in allowed and not same_training_data(saved["data"], number, data.fingerprint, places[name]):
            raise ValueError(
                f"client {name} has other training images or labels than when the checkpoint was written; resume with "
                "all former clients, with the images that they had, and others, or accept the change by "
                f"resume_allow=[{CLIENTS!r}, {CONTENT!r}]"
            )
        numbers.append(places[name])
    ledgers = saved["federation"]["privacy"] or {}
    if ledgers.get("images") or ledgers.get("clients"):
        raise ValueError(
            f"the checkpoint is of a private run of {len(numbers)} clients, and here there are {data.num_clients}: its "
            "noise and its ledgers are of these clients; start anew, or let the others join by perada personalize"
        )
    federation = saved["federation"] | {"tuned": None, "numbers": numbers}
    metrics = {"rounds": saved["metrics"]["rounds"], "clients": {}}
    return saved | {"federation": federation, "metrics": metrics, "scores": {}, "shifted": {}}
