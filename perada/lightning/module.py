# SPDX-License-Identifier: Apache-2.0
"""The LightningModule: one frozen backbone with one adapter slot, the local step, and the evaluation of all models."""

from collections.abc import Sequence
from dataclasses import fields
from functools import cached_property, partial
from pathlib import PurePath
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from perada.core.checks import (
    OptionError,
    check_choice,
    check_options,
    invalid_option,
    use_plain_numbers,
    without_effect,
)
from perada.core.rounds import AnyBatch
from perada.core.states import State
from perada.core.text import is_spread, plain_number
from perada.data import EvalBatch
from perada.engine.engine import make_engine
from perada.federation.both_models import BothModels
from perada.federation.evaluation import EvaluationPass, own_logits, shared_logits
from perada.federation.federation import Federation
from perada.federation.options import Evaluation, Training
from perada.lightning.exact_log import log_exactly
from perada.lightning.foreign_callbacks import check_callbacks
from perada.lightning.results import EvaluationResults
from perada.models.adapted import AdaptedModel, find_tensor_names
from perada.models.blocks import repeated_blocks
from perada.models.configurations import AdapterChoice
from perada.models.image_text import check_text_backbone
from perada.models.merging import TrainBackbone
from perada.models.spec import ModelSpec, frozen_digest
from perada.models.text_head import TextHead
from perada.scores.failed_outputs import dated
from perada.scores.metrics import Metric, make_metrics
from perada.tasks import Classification, Task


class BuildArguments(NamedTuple):
    """What a module was built for. A second build must agree with the first."""

    num_classes: int
    task: Task
    seed: int

    def describe(self) -> str:
        """Describe the arguments for a message."""
        return f"{self.num_classes} classes, task={self.task} and seed={self.seed}"


class FederatedClassifier(pl.LightningModule):
    """Fine-tunes an adapter on a frozen image classifier for every client of a federation.

    Its training step is one local step of every client of the round; :class:`perada.lightning.FederatedLoop` opens and
    closes the rounds. The adapters of clients and server are in :attr:`federation`, which the module owns from the
    first round on; the loop makes it.

    Args:
        backbone: A timm model name, ``hf:`` and a transformers name or folder, ``open_clip:`` and a name or folder of
            OpenCLIP, ``char_lstm`` for texts, or a module that maps images to logits.
        adapter: A name, such as ``residual``, ``lora`` or ``full`` (docs/adapters.md has all), or a PEFT config.
        adapter_options: Options of the named adapter, for example ``{"r": 8}``.
        pretrained: Load weights from the Hub, or from this local file or folder; otherwise they are random.
        num_classes: Number of classes; by default that of the data.
        image_size: Side of the images in pixels, where the backbone is built for one size (ViT).
        train_backbone: Train the backbone's parameters in addition to the adapter's.
        text_head: Head from the names of the classes, for ``hf:`` and ``open_clip:`` backbones with a text tower
            (docs/adapters.md); by default a linear one.

    Raises:
        ValueError: If an option cannot be used.

    >>> FederatedClassifier("test_resnet", adapter="head", pretrained=False).adapter
    'head'
    """

    backbone: str | nn.Module

    def __init__(
        self,
        backbone: str | nn.Module = "resnet18",
        adapter: AdapterChoice = "residual",
        adapter_options: dict[str, Any] | None = None,
        pretrained: bool | str = True,
        num_classes: int | None = None,
        image_size: int | None = None,
        train_backbone: bool = False,
        text_head: TextHead | None = None,
    ) -> None:
        super().__init__()
        check_options("adapter_options", {} if adapter_options is None else adapter_options, "{'r': 8}")
        # Recipes and files hold a path as text.
        pretrained = str(pretrained) if isinstance(pretrained, PurePath) else pretrained
        if not isinstance(pretrained, bool | str):
            raise invalid_option("pretrained", pretrained, "True, False or the location of the weights")
        if isinstance(pretrained, str) and isinstance(backbone, nn.Module):
            raise without_effect("pretrained", pretrained, "a network as backbone", "load the weights into it yourself")
        check_choice("train_backbone", train_backbone, [False, True, "merged"])
        if text_head is not None and pretrained is False:
            raise OptionError(
                "text_head computes the head by a pretrained text tower, which pretrained=False leaves random; set "
                "pretrained to true or to a folder, or leave text_head out",
                name="text_head",
                value=text_head,
            )
        if text_head is not None:
            check_text_backbone(backbone)
        # A network of the caller's is no part of this module: it would be moved and put in training mode with it.
        object.__setattr__(self, "backbone", backbone)
        self.adapter = adapter
        self.adapter_options = {name: plain_number(value) for name, value in (adapter_options or {}).items()}
        self.pretrained = pretrained
        self.num_classes = num_classes
        self.image_size = image_size
        use_plain_numbers(self)
        self.train_backbone: TrainBackbone = train_backbone
        # build() fills in the names of the data's classes.
        self.text_head = text_head
        self.automatic_optimization = False
        self.strict_loading = False
        # The options of the loop, which build() takes over.
        self.training_options = Training()
        self.evaluation = Evaluation()
        # Built by build() unless it is set before.
        self.adapted: AdaptedModel | None = None
        self.task: Task = Classification()
        self.seed = 0
        self.per_pixel = False
        self._built_for: BuildArguments | None = None
        self.metrics: list[Metric] = []
        # Clients whose models are scored on everyone's images, chosen at set-up.
        self.everywhere: list[int] = []
        self.results = EvaluationResults()
        self.federation: Federation | None = None
        # The loop sets it if clients predict with both models.
        self.both: BothModels | None = None

    def build(
        self,
        num_classes: int,
        task: Task,
        seed: int,
        *,
        classes: Sequence[str] | None = None,
        merges: bool = False,
        training: Training | None = None,
        evaluation: Evaluation | None = None,
    ) -> None:
        """Build backbone, adapter and engine for the data's classes.

        A second call with the same arguments does nothing.

        Args:
            num_classes: The data's number of classes K.
            task: What the network predicts.
            seed: Seed of what is random in head and adapter.
            classes: Names of the data's classes, if they are known, for a head from them.
            merges: Whether the algorithm merges LoRA into the backbone, whose adapted weights are then a part of the
                states.
            training: How training is computed.
            evaluation: Options of evaluation.

        Raises:
            ValueError: If another number of classes was requested, or the module was built with other arguments.
        """
        arguments = BuildArguments(num_classes, task, seed)
        if self._built_for is not None:
            if self._built_for != arguments:
                raise ValueError(
                    f"the FederatedClassifier was built for {self._built_for.describe()}, not for "
                    f"{arguments.describe()}; create a new one"
                )
            return
        if self.num_classes not in (None, num_classes):
            raise ValueError(
                f"num_classes={self.num_classes} does not match the data, whose labels have {num_classes} classes; "
                "correct num_classes"
            )
        self.training_options = training or Training()
        self.evaluation = evaluation or Evaluation()
        self.metrics = make_metrics(self.evaluation.metric, task, num_classes)
        self._built_for = arguments
        self.num_classes = num_classes
        self.task = task
        self.seed = seed
        self.per_pixel = task.per_pixel
        if not self.train_backbone:
            self.train_backbone = "merged" if merges else False
        if self.text_head is not None:
            self.text_head = self.text_head.for_classes(classes, num_classes)
        if self.adapted is None:
            self.adapted = self.spec.build()
        self.model = self.adapted.model
        channels_last = self.training_options.channels_last
        if channels_last is None:
            # A single convolution is a ViT's patch embedding, which gains nothing.
            convolutions = sum(isinstance(module, nn.Conv2d) for module in self.model.modules())
            channels_last = convolutions > 1 and self.adapted.channels_last
        if channels_last:
            self.model.to(memory_format=torch.channels_last)
        torch_compile = self.training_options.torch_compile
        compile_options = {} if torch_compile is True else torch_compile or None
        recomputed: tuple[str, ...] = ()
        if self.training_options.checkpointing is True:
            recomputed = repeated_blocks(self.model, self.adapted.backbone.name)
        self._make_engine = partial(
            make_engine,
            model=self.model,
            channels_last=channels_last,
            per_pixel=self.per_pixel,
            compile=compile_options,
            recomputed=recomputed,
        )
        self.engine = self._make_engine(self.training_options.engine)
        self.tensor_names = find_tensor_names(self.model, *self.adapted.backbone.head_modules)

    def use_loop_engine(self) -> None:
        """Train one client after another, because the network mixes the images of a batch."""
        self.engine = self._make_engine("loop")

    def use_checkpointing(self) -> None:
        """Recompute the network's blocks in the backward pass, because a step would not fit the memory otherwise.

        Raises:
            OptionError: If the network has no repeated blocks.
        """
        assert self.adapted is not None
        recomputed = repeated_blocks(self.model, self.adapted.backbone.name)
        kind = self.engine.kind
        self._make_engine = partial(self._make_engine, recomputed=recomputed)
        # A network that mixes the images of a batch has fallen back to the loop already.
        self.engine = self._make_engine("loop" if kind == "loop" else self.training_options.engine)

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

    def training_step(self, batch: AnyBatch, batch_idx: int) -> None:
        """Take one local step for every client that has steps left in this round."""
        cohort = self._existing_federation().cohort
        if cohort is None:
            raise RuntimeError("no round is open: add perada.lightning.FederatedLoop to the Trainer's callbacks")
        cohort.step(batch)
        # The clients' optimisers are not Lightning's, whose count of steps loggers and checkpoints read (2.6.6).
        steps = self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        steps.increment_ready()
        steps.increment_completed()

    def configure_callbacks(self) -> list[pl.Callback]:
        """Return no callbacks, but check the trainer's before Lightning sets any of them up."""
        check_callbacks(self.trainer)
        return []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return a dummy optimiser, since Lightning requires one. Clients' optimisers live for one round."""
        return torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.0)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leave the frozen backbone out of checkpoints. The loop saves all that was trained."""
        checkpoint["state_dict"] = {}

    def on_validation_epoch_start(self) -> None:
        """Start an evaluation."""
        self._evaluation = EvaluationPass(self._existing_federation(), self.metrics, self.everywhere, self.both)

    def validation_step(self, batch: EvalBatch, batch_idx: int) -> None:
        """Run the personal models and the global one on a batch of the test set."""
        self._evaluation.step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        """Log the scores: mean and standard deviation over clients. The progress bar displays some of the means."""
        self.score()
        log_exactly(self, "round", float(self.trainer.current_epoch))
        shifted = self.results.shifted
        for name, value in self.scores.items():
            is_shifted = shifted is not None and name in shifted.scores
            log_exactly(self, name, value, prog_bar=not is_spread(name) and not is_shifted)

    def score(self) -> None:
        """Compute ``results`` from the counts of the validation steps. A collective."""
        results = self.results
        results.scores, results.per_client = self._evaluation.result()
        results.details = self._evaluation.details()
        results.failed_outputs = dated(self._evaluation.failed_outputs(), results.failed_outputs)
        self.results.include_shifted()

    @property
    def scores(self) -> dict[str, float]:
        """Scores of the last evaluation by name, as logged."""
        return self.results.scores

    on_test_epoch_start = on_validation_epoch_start
    test_step = validation_step
    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, batch: EvalBatch, batch_idx: int) -> dict[str, Tensor]:
        """Predict a batch with the personal model of each image's owner, and with the global model. A collective.

        Returns:
            Logits (B, K) of the models, ``personal`` and ``global``, as far as there are such models; ``owner`` (B,)
            and labels ``y`` of the images. If clients predict with both models, also the logits ``both`` of that
            prediction, and ``distance_ratio`` (B,), above 1 for images that do not look like their owner's
            (:meth:`.TypicalImages.distance_ratios`).
        """
        federation = self._existing_federation()
        predictions = {"owner": batch.owner, "y": batch.y}
        if federation.settings.algorithm.global_model:
            predictions["global"] = shared_logits(federation, batch.x)
        if not federation.personalized:
            predictions["personal"] = predictions["global"]
            return predictions
        logits = own_logits(federation, batch)
        if logits is None:
            # None of the owners is on this rank.
            pixels = batch.y.shape[1:] if self.task.per_pixel else ()
            logits = torch.zeros(len(batch.x), *pixels, self.num_classes or 0, device=batch.x.device)
        # Ranks add up tensors of one number format, including a rank that has no logits.
        dtype = torch.promote_types(torch.float32, next(self.model.parameters()).dtype)
        predictions["personal"] = logits.to(dtype)
        federation.ranks.sum_([predictions["personal"]])
        if self.both is not None:
            statistics = self.both.statistics(batch.x)
            owners = batch.owner.cpu()
            is_typical = self.both.typical_of_owners(owners, statistics)
            weights = self.both.weights(owners.tolist(), batch.x.device)
            predictions["both"] = self.both.logits(predictions["personal"], predictions["global"], is_typical, weights)
            predictions["distance_ratio"] = self.both.distance_ratios_of_owners(owners, statistics)
        return predictions

    def _existing_federation(self) -> Federation:
        """Return the federation; raise a RuntimeError if the loop has not created it."""
        if self.federation is None:
            raise RuntimeError(
                "the states of server and clients are missing: add perada.lightning.FederatedLoop to "
                "the Trainer's callbacks"
            )
        return self.federation
