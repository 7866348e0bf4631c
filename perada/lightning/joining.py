# SPDX-License-Identifier: Apache-2.0
"""A client that joins a finished run: it trains a model of its own, and nothing else changes."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pytorch_lightning.utilities.rank_zero import rank_zero_warn

from perada.algorithms import Algorithm
from perada.algorithms.joining import algorithm_of, joining
from perada.core.checks import check_integer, check_number
from perada.core.rounds import Phase
from perada.data import FederatedData, FederatedDataModule
from perada.data.preprocessing import joining_data
from perada.lightning.callbacks import make_trainer
from perada.lightning.federated_loop import FederatedLoop
from perada.lightning.module import FederatedClassifier
from perada.lightning.setup import check_pretraining
from perada.privacy import Privacy
from perada.results.run import Run

SCORE = "personal/local_test"
OPTIONS = ("optimizer", "momentum", "weight_decay", "clip_norm", "lr_schedule", "lr_gamma", "lr_every", "metric")


def personalize(
    run: Run,
    data: FederatedData,
    name: str | None = None,
    *,
    rounds: int | None = None,
    local_steps: int | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    algorithm: Algorithm | None = None,
    seed: int = 0,
    accelerator: str | None = None,
    progress: bool = False,
) -> Run:
    """Let a client join a finished run: it trains a personal model from the global state, as the run's clients did.

    It has the run's algorithm with its λ, and its learning rates, optimiser, batch size and local steps. The global
    state and the other clients stay as they are. What is trained is said in :func:`perada.algorithms.joining.joining`:
    PerAda's clients train v from w on loss + λ/2 ||v − w||². Where the run was private in single images, so is this:
    with its noise multiplier (or its target), clipping and δ, and an ε that follows from the client's own number of
    images. Limits are of the release ledger, since nothing is sent.

    Args:
        run: The run. It stays as it is.
        data: The client's images, as one client or among others by ``name``. Labels are the run's, by the names of the
            classes where the data have names. Images are prepared as the run's were.
        name: What the client is to be called; by default what the data call it.
        rounds: Rounds of local training; by default as many as a client of the run took part in on average, and one
            where clients had no models of their own.
        local_steps: Local steps in a round, instead of the run's.
        batch_size: Images in a step, instead of the run's.
        lr: Learning rate, instead of the run's.
        algorithm: The run's, where it is not perada's own; another one trains otherwise.
        seed: Of batches and dropout.
        accelerator: ``cpu``, ``gpu`` and so on; by default a GPU if there is one.
        progress: Show a bar.

    Returns:
        The run with one more client, the last. ``info["joined"][-1]`` says how it came: its number, name, images and
        rounds, and the scores ``before`` and ``after`` on its test images (``None`` without any).

    Raises:
        ValueError: If the name is taken, the images or classes do not fit the run, the run has no one state to begin
            with, or its privacy cannot be kept.
    """
    check_integer("rounds", rounds, optional=True)
    check_integer("local_steps", local_steps, optional=True)
    check_integer("batch_size", batch_size, optional=True)
    check_number("lr", lr, ge=0, optional=True)
    check_name(run, name)
    how, info = run.info["training"], run.info
    base = algorithm_of(how["algorithm"]) if algorithm is None else algorithm
    ours, phases = joining(base, tuple(Phase(**phase) for phase in how["phases"]))
    if local_steps is not None:
        phases = tuple(Phase(phase.name, steps=local_steps) for phase in phases)
    if rounds is None:
        taken = how["rounds"] * (how["clients_per_round"] or how["num_clients"]) / how["num_clients"]
        rounds = 1 if base.inference == "global" else max(1, math.ceil(taken))
    if info.get("privacy"):
        # Before the images are copied into memory, after which nobody sees where they are from.
        check_pretraining(info["pretrained"], [data.train[data.find(name)[0]]])
    own = joining_data(data, name, run.preprocessing, info.get("classes"), info["num_classes"], info["multilabel"])
    assert own.client_names is not None
    name = own.client_names[0]
    check_name(run, name)
    served = FederatedDataModule(
        own,
        batch_size=how["batch_size"] if batch_size is None else batch_size,
        image_size=run.preprocessing.last_size,
        num_classes=info["num_classes"],
        crop_padding=how["crop_padding"],
        flip=how["flip"],
    )
    given: dict[str, Any] = {rate: how[rate] if lr is None else lr for rate in ("lr_personal", "lr_local")}
    adapted = run.adapted()
    module = FederatedClassifier(adapted.backbone.name, **given | {option: how[option] for option in OPTIONS})
    module.adapted = adapted
    sample = (info.get("privacy") or {}).get("sample")
    privacy = None if sample is None else replace(Privacy(**sample["options"]), ledger="release")
    loop = FederatedLoop(ours, privacy=privacy, seed=seed)
    loop.phases = phases
    options: dict[str, Any] = {"logger": False, "devices": 1, "num_nodes": 1, "enable_progress_bar": progress}
    options |= {} if accelerator is None else {"accelerator": accelerator}
    trainer = make_trainer(loop, rounds, rounds, **options)
    trainer.fit(module, datamodule=served)
    found = loop.outcome(module)
    scored = loop.measured.initial, found.metrics["clients"]
    before, after = (own[SCORE][0] if SCORE in own and served.val_dataloader() else None for own in scored)
    if before is not None and after is not None:
        lower_is_better = module.metrics[0].lower_is_better
        worse = after > before if lower_is_better else after < before
        # Scores before training are kept with five digits.
        if worse and not math.isclose(after, before, abs_tol=1e-4):
            images = sum(served.checked.test.sizes) if served.checked.test is not None else 0
            rank_zero_warn(
                f"client {name!r}: its personal model is worse than the global model on its {images} test images, "
                f"{100 * after:.2f} % after {100 * before:.2f} %; use the global model for it, or train less or "
                "otherwise (rounds, local_steps, lr)"
            )
    steps = rounds * sum(phase.local_steps(served.train_sizes[0], served.batch_size) for phase in phases)
    told = {"name": name, "images": served.train_sizes[0], "algorithm": base.kind, "rounds": rounds, "steps": steps}
    return run.with_client(found, told | {"before": before, "after": after})


def check_name(run: Run, name: str | None) -> None:
    """Refuse, by a ValueError, the name or the number of a client that the run has."""
    names: Sequence[str] = run.info.get("clients") or list(map(str, range(run.num_clients)))
    taken = name is not None and (name in names or (name.isdecimal() and int(name) < run.num_clients))
    if taken or name == "":
        raise ValueError(f"name={name!r} is that of a client of the run, or empty; choose another name")
