# SPDX-License-Identifier: Apache-2.0
"""The LightningModule: one frozen backbone with one adapter slot, the local step, and the evaluation of all models."""

import math
from dataclasses import fields
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple, get_args

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from perada.core.checks import check_choice, check_integer, check_number, check_options, invalid_option
from perada.core.rounds import AnyBatch
from perada.core.states import State
from perada.core.text import is_spread
from perada.data import EvalBatch
from perada.engine.engine import Engine, EngineName
from perada.federation.evaluation import Evaluation, own_logits, sample_clients, shared_logits
from perada.federation.federation import Federation
from perada.federation.metrics import Metric, make_metrics, metric_names, score_names
from perada.federation.settings import ClientOptimizer, LocalTraining
from perada.lightning.foreign_callbacks import check_callbacks
from perada.lightning.results import EvaluationResults
from perada.models.adapted import AdaptedModel, AdapterChoice, find_tensor_names
from perada.models.merging import TrainBackbone
from perada.models.spec import ModelSpec, frozen_digest

LRSchedule = Literal["constant", "cosine", "exponential"]


class Task(NamedTuple):
    """What a module is built for."""

    num_classes: int
    multilabel: bool
    seed: int


class FederatedClassifier(pl.LightningModule):
    """Fine-tunes an adapter on a frozen image classifier for every client of a federation.

    Its training step is one local step of every client of the round; :class:`perada.lightning.FederatedLoop` opens and
    closes the rounds. The adapters of clients and server are in :attr:`federation`, which the module owns from the
    first round on; the loop makes it.

    Args:
        backbone: A timm model name, ``hf:`` and a transformers name or folder, ``char_lstm`` for texts, or a module
            that maps images to logits.
        adapter: ``residual``, ``bottleneck``, ``prompt``, ``lora``, ``dual_lora``, ``ia3``, ``head``, ``bias_norm``,
            ``full``, or a PEFT config.
        adapter_options: Options of the adapter named, for example ``{"r": 8}``.
        pretrained: ``True`` for the hub's weights, ``False`` for random ones, or a local file or folder.
        num_classes: Number of classes; by default what the data says.
        image_size: Side of the images in pixels, where the backbone is built for one size (ViT).
        train_backbone: Train the backbone's own parameters beside the adapter's.
        lr_personal: Learning rate η_p of the personal adapters.
        lr_local: Learning rate η_l of the local adapters.
        optimizer: The clients' optimiser, started afresh each round.
        momentum: Of SGD.
        weight_decay: Of the clients' optimiser.
        clip_norm: Largest norm of each client's gradient in a role, with pulls and corrections, as torch's
            ``clip_grad_norm_`` shortens it; unlimited by default.
        lr_schedule: Learning rates over the rounds: constant, cosine to zero, or times ``lr_gamma`` every ``lr_every``.
        lr_gamma: Factor of the exponential schedule.
        lr_every: Rounds between two of its steps.
        engine: ``folded`` trains all clients of a round as one batch, ``loop`` one after another; ``auto`` chooses.
        clients_per_chunk: Clients in one forward and backward pass, to bound memory; by default all of the round's.
        channels_last: Memory format of images and convolutions; by default for backbones of more than one convolution.
        cache_features: Keep what the frozen part before everything trained makes of images that are always the same, so
            that it runs once for each; by default where it is a tenth of the model, at least, and fits the data's
            ``device_cache_mb``.
        torch_compile: Run the model through ``torch.compile``, or its options, such as ``{"mode": "max-autotune"}``. It
            takes minutes at first, and is for GPUs and many rounds; private gradients are not compiled.
        metric: What models are scored by (docs/metrics.md): a name such as ``accuracy``, ``auroc``, ``f1_macro`` or
            ``ece``, or a list of names and of ``{torchmetrics class: options}``; by default accuracy for single-label
            data, AUROC for multi-label.
        global_test_clients: Clients, drawn from the seed, whose personal models are scored on everyone's images: as
            many passes over all test images. All by default; 0 for none.

    Raises:
        ValueError: If an option cannot be used.
    """

    backbone: str | nn.Module

    def __init__(  # noqa: PLR0913  # one argument an option of recipes
        self,
        backbone: str | nn.Module = "resnet18",
        adapter: AdapterChoice = "residual",
        adapter_options: dict[str, Any] | None = None,
        pretrained: bool | str = True,
        num_classes: int | None = None,
        image_size: int | None = None,
        train_backbone: bool = False,
        lr_personal: float = 0.01,
        lr_local: float = 0.01,
        optimizer: ClientOptimizer = "sgd",
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        clip_norm: float | None = None,
        lr_schedule: LRSchedule = "constant",
        lr_gamma: float = 0.99,
        lr_every: int = 10,
        engine: EngineName = "auto",
        clients_per_chunk: int | None = None,
        channels_last: bool | None = None,
        cache_features: bool | None = None,
        torch_compile: bool | dict[str, Any] = False,
        metric: str | list[str | dict[str, Any]] = "auto",
        global_test_clients: int | None = None,
    ) -> None:
        super().__init__()
        check_choice("optimizer", optimizer, get_args(ClientOptimizer))
        check_choice("lr_schedule", lr_schedule, get_args(LRSchedule))
        metric_names(metric)
        check_choice("engine", engine, get_args(EngineName))
        check_number("lr_personal", lr_personal, ge=0)
        check_number("lr_local", lr_local, ge=0)
        check_number("momentum", momentum, ge=0, lt=1)
        check_number("weight_decay", weight_decay, ge=0)
        check_number("clip_norm", None if clip_norm == math.inf else clip_norm, gt=0, optional=True)
        check_number("lr_gamma", lr_gamma, ge=0)
        check_integer("lr_every", lr_every)
        check_integer("clients_per_chunk", clients_per_chunk, optional=True)
        check_integer("global_test_clients", global_test_clients, 0, optional=True, hint="by default all are tested")
        check_options("adapter_options", {} if adapter_options is None else adapter_options, "{'r': 8}")
        check_options("torch_compile", {} if isinstance(torch_compile, bool) else torch_compile, "{'dynamic': True}")
        if not isinstance(pretrained, bool | str):
            raise invalid_option("pretrained", pretrained, "True, False or where the weights are")
        # A network of the caller's is no part of this module: it would be moved and put in training mode with it.
        object.__setattr__(self, "backbone", backbone)
        self.adapter, self.adapter_options = adapter, adapter_options or {}
        self.pretrained, self.num_classes, self.image_size = pretrained, num_classes, image_size
        self.train_backbone: TrainBackbone = train_backbone
        self.lr = {"personal": lr_personal, "local": lr_local}
        self.optimizer, self.momentum, self.weight_decay, self.clip_norm = optimizer, momentum, weight_decay, clip_norm
        self.lr_schedule, self.lr_gamma, self.lr_every = lr_schedule, lr_gamma, lr_every
        self.engine_name, self.clients_per_chunk, self.channels_last = engine, clients_per_chunk, channels_last
        self.torch_compile = torch_compile
        self.cache_features, self.metric, self.global_test_clients = cache_features, metric, global_test_clients
        self.automatic_optimization = False
        self.strict_loading = False
        # Built by build() unless it is set before.
        self.adapted: AdaptedModel | None = None
        self.multilabel = False
        self.seed = 0
        self._task: Task | None = None
        self.metrics: list[Metric] = []
        self.results = EvaluationResults()
        self.federation: Federation | None = None

    def build(self, num_classes: int, multilabel: bool, seed: int, merges: bool = False) -> None:
        """Build backbone, adapter and engine for the data's classes. A second call for the same task does nothing.

        Args:
            num_classes: The data's number of classes K.
            multilabel: Whether an image may have several labels.
            seed: Seed of what is random in head and adapter.
            merges: Whether the algorithm merges LoRA into the backbone, whose adapted weights are then a part of the
                states.

        Raises:
            ValueError: If another number of classes was requested, or the module was built for another task.
        """
        task = Task(num_classes, multilabel, seed)
        if self._task is not None:
            if self._task != task:
                raise ValueError(
                    f"the FederatedClassifier was built for {tuple(self._task)} (classes, multi-label, seed), and not "
                    f"for {tuple(task)}; make a new one"
                )
            return
        if self.num_classes not in (None, num_classes):
            raise ValueError(
                f"num_classes={self.num_classes} does not match the data, whose labels have {num_classes} classes; "
                "correct it"
            )
        self.metrics = make_metrics(self.metric, multilabel, num_classes)
        self._task = task
        self.num_classes = num_classes
        self.multilabel = multilabel
        self.seed = seed
        if not self.train_backbone:
            self.train_backbone = "merged" if merges else False
        if self.adapted is None:
            self.adapted = self.spec.build()
        self.model = self.adapted.model
        channels_last = self.channels_last
        if channels_last is None:
            # A single convolution is a ViT's patch embedding, which gains nothing.
            convolutions = sum(isinstance(module, nn.Conv2d) for module in self.model.modules())
            channels_last = convolutions > 1 and self.adapted.channels_last
        if channels_last:
            self.model.to(memory_format=torch.channels_last)
        compile_options = {} if self.torch_compile is True else self.torch_compile or None
        self._make_engine = partial(Engine, self.model, channels_last=channels_last, compile=compile_options)
        self.engine = self._make_engine(self.engine_name)
        self.tensor_names = find_tensor_names(self.model, self.adapted.backbone.head)
        self.training_options = LocalTraining(
            self.optimizer, self.lr, self.momentum, self.weight_decay, self.clip_norm, multilabel
        )

    def use_loop_engine(self) -> None:
        """Train one client after another, because the network mixes the images of a batch."""
        self.engine = self._make_engine("loop")

    @property
    def spec(self) -> ModelSpec:
        """The options that the network is built from."""
        return ModelSpec(**{field.name: getattr(self, field.name) for field in fields(ModelSpec)})

    def initial_state(self, index: int) -> State:
        """Return the ``index``-th random initialisation of what is trained (:meth:`.ModelSpec.initial_state`)."""
        assert self.adapted is not None
        return self.spec.initial_state(self.adapted, index)

    @cached_property
    def frozen_digest(self) -> str:
        """Hash of all weights that are not trained."""
        return frozen_digest(self.model)

    def rate_factor(self, round: int, rounds: int) -> float:
        """Return the factor of the clients' learning rates in round ``round`` (from 0) of ``rounds``."""
        if self.lr_schedule == "cosine" and rounds > 0:
            return (1 + math.cos(math.pi * round / rounds)) / 2
        if self.lr_schedule == "exponential":
            return self.lr_gamma ** (round // self.lr_every)
        return 1.0

    def training_step(self, batch: AnyBatch, batch_idx: int) -> None:
        """Take one local step of every client that still has one to take in this round."""
        cohort = self._states().cohort
        if cohort is None:
            raise RuntimeError("no round is open: add perada.lightning.FederatedLoop to the Trainer's callbacks")
        cohort.step(batch)
        # The clients' optimisers are not Lightning's, whose count of steps loggers and checkpoints read (2.6.6).
        steps = self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        steps.increment_ready()
        steps.increment_completed()

    def configure_callbacks(self) -> list[pl.Callback]:
        """Add no callback, but check those of the trainer before Lightning sets any of them up."""
        check_callbacks(self.trainer)
        return []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return an optimiser without effect, since Lightning needs one. Clients' optimisers live for one round."""
        return torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.0)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leave the frozen backbone out of checkpoints. The loop saves all that was trained."""
        checkpoint["state_dict"] = {}

    def on_validation_epoch_start(self) -> None:
        """Start an evaluation."""
        federation = self._states()
        everywhere = sample_clients(federation.num_clients, self.global_test_clients, self.seed)
        self._evaluation = Evaluation(federation, self.metrics, everywhere)

    @property
    def score_names(self) -> dict[str, bool]:
        """By name of each score that settings can be chosen by, whether a lower one is better."""
        return score_names(self.metric)

    def validation_step(self, batch: EvalBatch, batch_idx: int) -> None:
        """Run the personal models and the global one on a batch of the test set."""
        self._evaluation.step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        """Log the scores: mean and standard deviation over clients. The progress bar displays some of the means."""
        self.score()
        self.log("round", float(self.trainer.current_epoch))
        shifted = self.results.shifted
        for name, value in self.scores.items():
            is_shifted = shifted is not None and name in shifted.scores
            self.log(name, value, prog_bar=not is_spread(name) and not is_shifted)

    def score(self) -> None:
        """Compute ``results`` from what the validation steps have counted. A collective."""
        self.results.scores, self.results.per_client = self._evaluation.result()
        self.results.details = self._evaluation.details()
        self.results.include_shifted()

    @property
    def scores(self) -> dict[str, float]:
        """Scores of the last evaluation by name, as they are logged."""
        return self.results.scores

    on_test_epoch_start = on_validation_epoch_start
    test_step = validation_step
    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, batch: EvalBatch, batch_idx: int) -> dict[str, Tensor]:
        """Predict a batch with the personal model of each image's owner, and with the global model. A collective.

        Returns:
            Logits (B, K) ``personal`` and, where there is a global model, ``global``; ``owner`` (B,) and labels ``y``
            of the images.
        """
        federation = self._states()
        predictions = {"owner": batch.owner, "y": batch.y}
        if federation.settings.algorithm.global_model:
            predictions["global"] = shared_logits(federation, batch.x)
        if not federation.personalized:
            predictions["personal"] = predictions["global"]
            return predictions
        logits = own_logits(federation, batch)
        if logits is None:
            # None of the owners is on this rank.
            logits = torch.zeros(len(batch.x), self.num_classes or 0, device=batch.x.device)
        # Ranks add up tensors of one number format, also a rank that has no logits of its own.
        dtype = torch.promote_types(torch.float32, next(self.model.parameters()).dtype)
        predictions["personal"] = logits.to(dtype)
        federation.ranks.sum_([predictions["personal"]])
        return predictions

    def _states(self) -> Federation:
        if self.federation is None:
            raise RuntimeError("there are no states: add perada.lightning.FederatedLoop to the Trainer's callbacks")
        return self.federation
