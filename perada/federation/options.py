# SPDX-License-Identifier: Apache-2.0
"""Options of local training and of evaluation: the sections ``training`` and ``evaluation`` of a recipe."""

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from perada.core.checks import OptionError, check_choice, check_integer, check_number, check_options, use_plain_numbers
from perada.engine.engine import EngineName, engine_class
from perada.federation.diagnostics import Diagnostic, check_diagnostics
from perada.federation.settings import ClientOptimizer, LocalTraining
from perada.scores.metrics import metric_names
from perada.tasks import Task

LRSchedule = Literal["constant", "cosine", "exponential"]
Prediction = Literal["personal", "global", "both"]


@dataclass(frozen=True)
class Training:
    """Local training of clients in a round, and how it is computed.

    Args:
        lr_personal: Learning rate η_p of the personal adapters.
        lr_local: Learning rate η_l of the local adapters.
        optimizer: ``sgd``, ``adam`` or ``adamw``; its state is reset in each round.
        momentum: Momentum of SGD.
        weight_decay: Weight decay of the optimizer.
        clip_norm: Maximum norm of a client's gradient in a role, including pulls and corrections, as in torch's
            ``clip_grad_norm_``; unlimited by default.
        lr_schedule: Learning rate over the rounds: constant, cosine to zero, or times ``lr_gamma`` every ``lr_every``.
        lr_gamma: Factor of the exponential schedule.
        lr_every: Rounds between two steps of the exponential schedule.
        local_epochs: Passes of a sampled client over its data in a round.
        local_steps: Local steps in a round, instead of epochs.
        engine: ``folded`` trains all clients of a round as one batch, ``loop`` one after another; ``auto`` chooses. An
            engine of your own has the path of its class, such as ``mine.MyEngine``.
        clients_per_chunk: Number of clients that train together; the next ones begin when these have finished. By
            default all of the round, or on a CPU as many as fit its caches if most of the model is trained, and as many
            as keep 384 MB of activations in a step behind a frozen backbone.
        channels_last: Memory format of images and convolutions; by default on if the backbone has several convolutions.
        cache_features: Compute the frozen layers before all trained ones only once for each image that is not
            augmented; by default where they are at least a tenth of the model, and the features fit the data's
            ``device_cache_mb``.
        torch_compile: Run the model through ``torch.compile``, or its options, such as ``{"mode": "reduce-overhead"}``
            for CUDA graphs. The first rounds take minutes, so it is for GPUs and many rounds; private gradients are not
            compiled.
        checkpointing: Gradient checkpointing: a pass keeps only the inputs of the network's repeated blocks, which run
            again in the backward pass. Gradients are the same; a step takes less memory and a quarter to a half longer
            (docs/memory.md). ``auto`` estimates the memory of a step at set-up, and turns it on if the device has less.
            Not for private gradients.

    Raises:
        ValueError: If an option is out of range.

    >>> Training(lr_personal=0.1, local_steps=5).local_steps
    5
    """

    lr_personal: float = 0.01
    lr_local: float = 0.01
    optimizer: ClientOptimizer = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float | None = None
    lr_schedule: LRSchedule = "constant"
    lr_gamma: float = 0.99
    lr_every: int = 10
    local_epochs: float = 1
    local_steps: int | None = None
    engine: EngineName | str = "auto"
    clients_per_chunk: int | None = None
    channels_last: bool | None = None
    cache_features: bool | None = None
    torch_compile: bool | dict[str, Any] = False
    checkpointing: bool | Literal["auto"] = False

    def __post_init__(self) -> None:
        use_plain_numbers(self)
        check_number("lr_personal", self.lr_personal, ge=0)
        check_number("lr_local", self.lr_local, ge=0)
        check_choice("optimizer", self.optimizer, get_args(ClientOptimizer))
        check_number("momentum", self.momentum, ge=0, lt=1)
        check_number("weight_decay", self.weight_decay, ge=0)
        is_unlimited = self.clip_norm == math.inf
        check_number("clip_norm", None if is_unlimited else self.clip_norm, gt=0, optional=True)
        check_choice("lr_schedule", self.lr_schedule, get_args(LRSchedule))
        check_number("lr_gamma", self.lr_gamma, ge=0)
        check_integer("lr_every", self.lr_every)
        check_number("local_epochs", self.local_epochs, gt=0)
        check_integer("local_steps", self.local_steps, optional=True)
        engine_class(self.engine)
        check_integer("clients_per_chunk", self.clients_per_chunk, optional=True)
        compile_options = {} if isinstance(self.torch_compile, bool) else self.torch_compile
        check_options("torch_compile", compile_options, "{'dynamic': True}")
        check_choice("channels_last", self.channels_last, (None, True, False))
        check_choice("cache_features", self.cache_features, (None, True, False))
        check_choice("checkpointing", self.checkpointing, (True, False, "auto"))
        if self.checkpointing is True and self.torch_compile not in (False, None):
            raise OptionError(
                f"checkpointing=True cannot be combined with torch_compile={self.torch_compile!r}: compiled passes do "
                "not record what a block depends on; leave one of them out",
                name="checkpointing",
                value=True,
            )

    @property
    def epochs_per_round(self) -> float | None:
        """Passes over a client's data in a round; None where ``local_steps`` are set instead."""
        return self.local_epochs if self.local_steps is None else None

    def rate_factor(self, round: int, rounds: int) -> float:
        """Return the factor of the learning rates in a round, counted from 0, of ``rounds``."""
        if self.lr_schedule == "cosine" and rounds > 0:
            return (1 + math.cos(math.pi * round / rounds)) / 2
        if self.lr_schedule == "exponential":
            return self.lr_gamma ** (round // self.lr_every)
        return 1.0

    def local_training(self, task: Task) -> LocalTraining:
        """Return the options of a client's steps in a task."""
        return LocalTraining(
            optimizer=self.optimizer,
            lr={"personal": self.lr_personal, "local": self.lr_local},
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            clip_norm=self.clip_norm,
            task=task,
        )


@dataclass(frozen=True)
class Evaluation:
    """Evaluation of models. Its frequency is an option of the trainer, ``check_val_every_n_epoch``.

    Args:
        metric: Metric of the scores (docs/metrics.md): a name such as ``accuracy``, ``auroc``, ``f1_macro`` or
            ``ece``, or a list of names and of ``{torchmetrics class: options}``; by default that of the
            task: accuracy for one class per image, AUROC for several labels.
        global_test_clients: Number of clients, drawn from the seed, whose personal models are scored on the test images
            of all clients, each in a separate pass; 0 for none. By default all, or as many as take no more than
            10,000,000 forward passes (docs/metrics.md).
        prediction: Models with which clients predict after the run: ``personal``, ``global``, or ``both``, which is the
            global model for images that do not look like those that the client trained on, and a mean of both models'
            predictions for others (docs/prediction.md). With ``both``, these predictions are scored too.
        personal_share: Weight of the personal model's prediction in that mean, between 0 and 1. By default each client
            has its own, which is the larger the more of its training images the global model gets wrong.
        diagnostics: Diagnostics of PerAda's theorems to measure in each round, or true for all (docs/diagnostics.md).

    Raises:
        ValueError: If an option is out of range.

    >>> Evaluation(metric="f1_macro", prediction="both").prediction
    'both'
    """

    metric: str | list[str | dict[str, Any]] = "auto"
    global_test_clients: int | None = None
    prediction: Prediction = "personal"
    personal_share: float | None = None
    diagnostics: bool | list[Diagnostic] = False

    def __post_init__(self) -> None:
        use_plain_numbers(self)
        metric_names(self.metric)
        check_integer(
            "global_test_clients", self.global_test_clients, 0, optional=True, hint="by default all are scored"
        )
        check_choice("prediction", self.prediction, get_args(Prediction))
        check_number("personal_share", self.personal_share, ge=0, le=1, optional=True)
        check_diagnostics(self.diagnostics)
