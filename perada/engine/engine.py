# SPDX-License-Identifier: Apache-2.0
"""Forward passes of many states through one model, folded into one batch or one client after another, and losses.

Both ways return logits (C, B, K) that can be differentiated with respect to the stacked states, so everything above
(algorithms, optimisers, evaluation) is written once. The loop is the reference for the folded engine. It is also the
fallback when a trained layer has no stacked twin, or when :func:`perada.engine.fold_check.check_fold` finds that a
network mixes the images of a batch.
"""

import copy
import importlib
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from perada.core.checks import OptionError, check_choice, invalid_option
from perada.core.rounds import CohortBatch
from perada.core.seeding import Streams
from perada.core.states import (
    State,
    batch_norms,
    copy_module,
    device_of,
    expand,
    per_client,
    stack_size,
    tied_names,
    to_device_async,
    train_mode,
    unstack,
)
from perada.core.text import abbreviated
from perada.engine.attention import FasterAttention, can_run_faster
from perada.engine.fold import Fold, fold
from perada.engine.frozen_trunk import ConstantModule, FrozenTrunk, find_trunk
from perada.engine.recomputation import RecomputedBlock
from perada.engine.stacked_layers import FoldContext
from perada.tasks import Task

EngineName = Literal["auto", "folded", "loop"]
"""How clients are trained: ``folded`` in one pass, ``loop`` one after another, ``auto`` folded where it is possible."""
NUMBERS_AT_ONCE_CPU = 3 * 2**19
"""Number of values in the images that run at once in evaluation on a CPU: 512 images of 3×32×32."""
NUMBERS_AT_ONCE_GPU = 3 * 2**27
"""The same on a GPU: 131,072 images of 3×32×32."""
NUMBERS_PER_TOKEN = 32
"""Number of values that a token counts as, since the model turns it into a vector."""


class Engine:
    """Runs stacked states through one shared model.

    A subclass overrides :meth:`run_clients`, and recipes name it by its path (docs/extending.md).

    Args:
        model: The model of a single client, in which only the adapter is trained; ``model(x)`` returns logits (B, K).
        engine_name: ``"folded"`` runs all clients as one batch, ``"loop"`` one client after another, and ``"auto"``
            folds if every trained layer has a stacked version; by default :attr:`default_name`.
        channels_last: Run images in the channels-last memory format.
        per_pixel: Whether the model returns logits (B, K, H, W) of pixels. The engine returns them with the classes
            last, (B, H, W, K), as tasks and the server expect logits.
        compile: Options of ``torch.compile``, which then compiles the pass of full batches; ``None`` not to compile.
        recomputed: Paths of the blocks of the model that run again in the backward pass instead of keeping their
            activations (:mod:`~perada.engine.recomputation`).

    Attributes:
        default_name: The ``engine_name`` of engines that are made without one, such as those of a subclass.
        kind: ``"folded"`` or ``"loop"``.
        trunk: The frozen trunk, once :meth:`find_trunk` has found one.

    Raises:
        ValueError: If ``engine_name`` is unknown, or is ``"folded"`` and a trained layer has no stacked twin.
    """

    default_name: ClassVar[EngineName] = "auto"

    def __init__(
        self,
        model: nn.Module,
        engine_name: EngineName | None = None,
        *,
        channels_last: bool = False,
        per_pixel: bool = False,
        compile: dict[str, Any] | None = None,
        recomputed: Collection[str] = (),
    ) -> None:
        if engine_name is None:
            engine_name = self.default_name
        check_choice("engine", engine_name, get_args(EngineName))
        self.model = model
        self.memory_format = torch.channels_last if channels_last else torch.preserve_format
        self.per_pixel = per_pixel
        self.recomputed = frozenset(recomputed)
        self.trunk: FrozenTrunk | None = None
        folded = self.folded()
        if folded.missing:
            layers = [f"{path} ({name})" for path, name in folded.missing.items()]
            message = f"trained layers without a stacked version: {abbreviated(layers, 4)}"
            if engine_name == "folded":
                raise OptionError(
                    f"engine='folded' cannot run {message}; use engine='loop' or 'auto'", name="engine", value="folded"
                )
            if engine_name == "auto":
                warnings.warn(f"engine='auto' falls back to the per-client loop: {message}", stacklevel=2)
        self.kind: Literal["folded", "loop"] = "folded"
        self._fold = folded
        if engine_name == "loop" or folded.missing:
            self.kind = "loop"
            # The loop runs the single model, but its dropout layers must draw from the clients' streams too.
            self._fold = self.folded(random_only=True)
        self._single = model
        self._tied = tied_names(model)
        # Whether the network calls torch's attention, until the first pass in bfloat16 shows that it does not.
        self._calls_attention = True
        self._full_batch: ModelCall = _call_with_tensors
        if compile is not None:
            self._full_batch = torch.compile(_call_with_tensors, **compile)

    def copy(self) -> "Engine":
        """Return an engine with its own modules and the same tensors, whose passes may run in another thread.

        Modules keep facts about the current pass, such as whether they are in training mode.
        """
        assert self.trunk is None, "a frozen trunk belongs to the modules in which it was found"
        other = copy.copy(self)
        other.model = copy_module(self.model, lambda tensor: tensor)
        other._single = other.model
        other._fold = other.folded(random_only=self.kind == "loop")
        return other

    @property
    def runs_together(self) -> bool:
        """Whether several clients take less time in one pass than in one pass each, so that they train together."""
        return self.kind == "folded"

    @property
    def is_recomputing(self) -> bool:
        """Whether blocks of the model run again in the backward pass."""
        return bool(self.recomputed)

    @property
    def is_compiled(self) -> bool:
        """Whether passes of full batches are compiled."""
        return self._full_batch is not _call_with_tensors

    @property
    def runs(self) -> nn.Module:
        """The module through which passes run: the stacked model, or the single one with per-client dropout layers."""
        return self._fold.model

    def folded(self, random_only: bool = False) -> Fold:
        """Fold the model, with the frozen trunk if one was found, and with the blocks that are recomputed."""
        context = FoldContext()
        return fold(self.model, random_only=random_only, wrap=partial(self._wrap_module, context), context=context)

    def _wrap_module(self, context: FoldContext, module: nn.Module, module_path: str) -> nn.Module:
        """Return the module to use at ``module_path`` of a folded model, whose passes have the context."""
        if self.trunk is not None:
            module = self.trunk.wrap(module, module_path)
        # The output of a constant module has no gradient.
        if module_path in self.recomputed and not isinstance(module, ConstantModule):
            return RecomputedBlock(module, context, self.trunk)
        return module

    def find_trunk(self, image: Tensor, least_share: float = 0.0) -> FrozenTrunk | None:
        """Find the part of the model before all trained tensors, whose features may from then on replace images.

        Args:
            image: A prepared image (channels, height, width) on the model's device.
            least_share: Share of a forward pass's floating-point operations that the features must save.

        Returns:
            The trunk, which is the same in later calls; None if there is none.
        """
        if self.trunk is None:
            self.trunk = find_trunk(self.model, image, least_share)
            if self.trunk is None:
                return None
            self._fold = self.folded(random_only=self.kind == "loop")
            self._single = self.folded(random_only=True).model
        return self.trunk

    def features(self, x: Tensor) -> Tensor:
        """Compute features (B, F) of images (B, channels, height, width), which other methods accept in their place."""
        assert self.trunk is not None, "call find_trunk first"
        return self.trunk.features(self._single, self.format(x))

    def logits(
        self,
        states: State,
        x: Tensor,
        *,
        training: bool = False,
        counts: Sequence[int] | None = None,
        streams: Streams | None = None,
        batch_statistics: bool = False,
    ) -> Tensor:
        """Compute the logits of C states, each on its own images.

        Args:
            states: States (C, ...). Training mode updates the running statistics among them in place.
            x: Images (C, B, channels, height, width), or their features (C, B, F).
            training: Run the model in training mode, with batch statistics and dropout.
            counts: Number of real rows of each client, whose other rows are padding; ``None`` if all are real.
            streams: Random streams of the clients for this pass; required in training mode with dropout.
            batch_statistics: In evaluation mode, normalise by the statistics of each state's images wherever training
                mode would (:func:`~perada.core.states.batch_norms`). Running statistics are not updated, and dropout is
                off.

        Returns:
            Logits (C, B, K) in float32 or float64; rows beyond a client's count are meaningless.
        """
        return self._compute_logits(states, x, self._full_batch, training, counts, streams, batch_statistics)

    def _compute_logits(
        self,
        states: State,
        x: Tensor,
        full_batch: "ModelCall",
        training: bool,
        counts: Sequence[int] | None,
        streams: Streams | None,
        batch_statistics: bool = False,
    ) -> Tensor:
        """Compute logits like :meth:`logits`, calling the model by ``full_batch`` on batches without padding."""
        # None stands for batches without padding, which stacked layers run faster.
        real_counts: tuple[int, ...] | None = None
        if counts is not None and any(count != x.shape[1] for count in counts):
            real_counts = tuple(counts)
        if training:
            train_mode(self._fold.model)
        else:
            self._fold.model.eval()
            if batch_statistics:
                # These norms use batch statistics in training mode only, in which they also update buffers.
                for norm in batch_norms(self._fold.model):
                    norm.train()
                states = self._with_copied_buffers(states)
        if self._calls_attention and full_batch is _call_with_tensors and can_run_faster(x):
            attention = FasterAttention()
            self._fold.context.faster_attention = True
            with attention:
                logits = self.run_clients(states, x, full_batch, real_counts, streams)
            self._fold.context.faster_attention = False
            # In networks without attention, later passes save its time, which every function of torch takes.
            self._calls_attention = attention.was_called
        else:
            logits = self.run_clients(states, x, full_batch, real_counts, streams)
        # Losses and metrics of half precision would be too coarse.
        if logits.dtype in (torch.float16, torch.bfloat16):
            return logits.float()
        return logits

    def outputs(
        self,
        states: State,
        x: Tensor,
        head: str,
        *,
        training: bool = False,
        counts: Sequence[int] | None = None,
        streams: Streams | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute logits like :meth:`logits`, together with the inputs of the head (representations).

        Args:
            states: States (C, ...).
            x: Images (C, B, channels, height, width), or their features (C, B, F).
            head: Full name of the head in the model.
            training: Run the model in training mode.
            counts: Number of real rows of each client; ``None`` if all are real.
            streams: Random streams of the clients for this pass.

        Returns:
            Logits (C, B, K) and representations (C, B, D).
        """
        head_inputs: list[Tensor] = []
        module = self._fold.model.get_submodule(head)
        hook = module.register_forward_pre_hook(lambda _, args: head_inputs.append(args[0]))
        try:
            # This model is not compiled, since a compiler may leave out the hook.
            logits = self._compute_logits(states, x, _call_with_tensors, training, counts, streams)
        finally:
            hook.remove()
        clients, rows = x.shape[:2]
        if self.kind == "folded":
            # A single pass ran all clients.
            representations = head_inputs[0].reshape(clients, rows, -1)
        else:
            # Each client had a pass of its real rows.
            padded_inputs = [_pad_rows(head_input.flatten(1), rows) for head_input in head_inputs]
            representations = torch.stack(padded_inputs)
        return logits, representations.to(logits.dtype)

    def _with_copied_buffers(self, states: State) -> State:
        """Return states with copies of the buffers, which norms update in place in training mode."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        copied = dict(states)
        for key, value in states.items():
            if key not in parameters:
                copied[key] = value.clone(memory_format=torch.contiguous_format)
        return copied

    @property
    def has_batch_norms(self) -> bool:
        """Whether norms with batch statistics would make the logits of an image depend on its batch."""
        return bool(batch_norms(self.model))

    def shared_logits(
        self,
        states: State,
        x: Tensor,
        max_rows: int | None = None,
        *,
        batch_statistics: bool = False,
    ) -> Tensor:
        """Compute logits of C states on the same images, in evaluation mode and without gradients.

        Args:
            states: States (C, ...).
            x: Images (B, ...) or their features (B, F).
            max_rows: Maximum number of rows that run at once, where an image is a row for each state. If there are more
                images, one state at a time runs on groups of them. By default 512 images of 32×32 on a CPU, since
                larger batches do not fit its caches, and 131,072 on a GPU; fewer for larger images, at least 16. A
                token of a text counts as 32 numbers, since the model turns it into a vector.
            batch_statistics: Normalise by the statistics of all the images, as in :meth:`logits`; these then run
                together, whatever ``max_rows`` is.

        Returns:
            Logits (C, B, K).
        """
        if max_rows is None:
            numbers_per_row = x[0].numel()
            if not x.is_floating_point():
                numbers_per_row *= NUMBERS_PER_TOKEN
            numbers_at_once = NUMBERS_AT_ONCE_GPU if x.is_cuda else NUMBERS_AT_ONCE_CPU
            max_rows = max(16, numbers_at_once // numbers_per_row)
        states_at_once = max(1, max_rows // len(x))
        images_at_once = max_rows
        if batch_statistics:
            # Statistics of groups would differ from those of all images.
            images_at_once = len(x)
        num_states = stack_size(states)
        logits_of_states = []
        with torch.no_grad():
            for start in range(0, num_states, states_at_once):
                stop = min(start + states_at_once, num_states)
                state_group = {name: value[start:stop] for name, value in states.items()}
                logits_of_images = []
                for image_group in x.split(images_at_once):
                    # All states run on the same images, so this is a view.
                    images = image_group.expand(stop - start, *image_group.shape)
                    logits_of_images.append(self.logits(state_group, images, batch_statistics=batch_statistics))
                logits_of_states.append(torch.cat(logits_of_images, 1))
        return torch.cat(logits_of_states)

    def run_clients(
        self,
        states: State,
        x: Tensor,
        call: "ModelCall",
        counts: tuple[int, ...] | None,
        streams: Streams | None,
    ) -> Tensor:
        """Compute the logits of C states, each on its own images. The model is in training or evaluation mode already.

        Args:
            states: States (C, ...). In training mode, running statistics among them are updated in place.
            x: Images (C, B, channels, height, width), or their features (C, B, F).
            call: Calls the model with tensors in place of its own.
            counts: Number of real rows of each client; None if all are real.
            streams: Random streams of the clients for dropout; None without dropout.

        Returns:
            Logits (C, B, K); rows beyond a client's count are meaningless.
        """
        if self.kind == "folded":
            return self._run_folded(states, x, call, counts, streams)
        return self._run_one_by_one(states, x, call, counts, streams)

    def run_client(self, state: State, images: Tensor, call: "ModelCall", streams: Streams | None) -> Tensor:
        """Compute the logits (R, K) of one state by the single model, for an engine of the kind ``"loop"``.

        Args:
            state: State of the client, tensors by the names of the single model.
            images: Its real images (R, channels, height, width), or their features (R, F).
            call: Calls the model, as in :meth:`run_clients`.
            streams: Random stream of the client, as one of length 1; None without dropout.
        """
        self._fold.context.begin(1, None, streams)
        return self.logits_of(call(self._fold.model, state, self.format(images), self._tied))

    def _run_folded(
        self,
        states: State,
        x: Tensor,
        full_batch: "ModelCall",
        counts: tuple[int, ...] | None,
        streams: Streams | None,
    ) -> Tensor:
        """Run all clients as one batch of C·B rows; the arguments are those of :meth:`_compute_logits`."""
        clients, rows = x.shape[:2]
        # Padded batches are not compiled: the numbers of real rows differ, and each would be compiled anew.
        call = full_batch
        if counts is not None:
            call = _call_with_tensors
        # One call for all clients' norms, for a GPU and for compiled code; a loop over clients is faster on a CPU.
        together = x.is_cuda or call is not _call_with_tensors
        self._fold.context.begin(clients, counts, streams, together=together)
        tensors = dict(states)
        # These parameters broadcast over the batch, so every row gets a copy of its client's.
        for name in self._fold.row_keys & states.keys():
            tensors[name] = states[name].repeat_interleave(rows, 0).flatten(0, 1)
        output = call(self._fold.model, tensors, self.format(x.flatten(0, 1)), self._tied)
        logits = self.logits_of(output)
        return logits.reshape(clients, rows, *logits.shape[1:])

    def logits_of(self, output: Tensor) -> Tensor:
        """Return logits (R, ..., K) for the output of the model."""
        if self.per_pixel:
            return classes_last(output)
        return output

    def format(self, x: Tensor) -> Tensor:
        """Return the model's input for images or features (B, ...), in the engine's memory format."""
        if self.trunk is not None:
            x = self.trunk.feed(x)
        if x.dim() == 4:
            return x.to(memory_format=self.memory_format)
        return x

    def _run_one_by_one(
        self,
        states: State,
        x: Tensor,
        full_batch: "ModelCall",
        counts: tuple[int, ...] | None,
        streams: Streams | None,
    ) -> Tensor:
        """Run one client after another, each on its real rows; the arguments are those of :meth:`_compute_logits`."""
        outputs = []
        for client, images in enumerate(x):
            real_images = images
            if counts is not None:
                real_images = images[: counts[client]]
            client_streams: Streams | None = None
            if streams is not None:
                client_streams = streams[client : client + 1]
            state = {name: value[client] for name, value in states.items()}
            logits = self.run_client(state, real_images, full_batch, client_streams)
            outputs.append(_pad_rows(logits, len(images)))
        return torch.stack(outputs)


def engine_class(engine_name: str) -> type[Engine]:
    """Return the class of an engine by the option ``engine``.

    Args:
        engine_name: One of :data:`EngineName`, or the path of a subclass of :class:`Engine`, such as ``mine.MyEngine``.

    Raises:
        OptionError: If there is no such engine.

    >>> engine_class("folded").__name__
    'Engine'
    """
    if engine_name in get_args(EngineName):
        return Engine
    names = ", ".join(repr(name) for name in get_args(EngineName))
    requirement = f"one of {names}, or the path of a subclass of perada.engine.Engine, such as 'mine.MyEngine'"
    if not isinstance(engine_name, str) or "." not in engine_name:
        raise invalid_option("engine", engine_name, requirement)
    module_name, _, class_name = engine_name.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise invalid_option("engine", engine_name, requirement, f"{error}") from error
    named_class = getattr(module, class_name, None)
    if not (isinstance(named_class, type) and issubclass(named_class, Engine)):
        raise invalid_option("engine", engine_name, requirement)
    return named_class


def make_engine(engine_name: str, model: nn.Module, **options: Any) -> Engine:
    """Return an engine by the option ``engine`` (:func:`engine_class`).

    Args:
        engine_name: The option.
        model: The model of a single client.
        options: Further arguments of :class:`Engine`.
    """
    chosen_class = engine_class(engine_name)
    if chosen_class is Engine:
        return Engine(model, cast(EngineName, engine_name), **options)
    return chosen_class(model, **options)


def classes_last(output: Tensor) -> Tensor:
    """Return logits (R, H, W, K) of pixels for the output (R, K, H, W) of a network.

    Raises:
        ValueError: If the output has other axes.
    """
    if output.dim() != 4:
        raise ValueError(
            f"the network returns {tuple(output.shape)}, but a segmentation network must return logits (B, classes, "
            "height, width); choose a different backbone"
        )
    return output.movedim(1, -1)


ModelCall = Callable[[nn.Module, State, Tensor, Mapping[str, str]], Tensor]
"""Function of a module, its state, the images (R, ...) and its tied names that returns the logits (R, K)."""


def _call_with_tensors(module: nn.Module, tensors: State, x_R: Tensor, tied: Mapping[str, str]) -> Tensor:
    """Call a module with other tensors in place of its own.

    Args:
        module: The module.
        tensors: Tensors by name; names that are missing keep their own.
        x_R: Images (R, ...).
        tied: The module's :func:`~perada.core.states.tied_names`.

    Returns:
        Logits (R, K).
    """
    if tied:
        tensors = dict(tensors)
        for name, first_name in tied.items():
            if first_name in tensors:
                tensors[name] = tensors[first_name]
    # With tie_weights=True torch finds tied names by itself, but does not restore the tensors of a module that occurs
    # in several places.
    logits: Tensor = functional_call(module, tensors, (x_R,), tie_weights=False)
    return logits


def _pad_rows(values: Tensor, num_rows: int) -> Tensor:
    """Append rows of zeros to values (B, ...) until there are ``num_rows`` rows."""
    padding = values.new_zeros(num_rows - len(values), *values.shape[1:])
    if len(padding) == 0:
        return values
    return torch.cat([values, padding])


def row_losses(logits: Tensor, y: Tensor, task: Task) -> Tensor:
    """Compute the loss of every row, padding included.

    Args:
        logits: Logits (C, B, K).
        y: Targets (C, B, ...).
        task: Computes the loss of an image.

    Returns:
        Losses (C, B).
    """
    losses = task.loss(logits.flatten(0, 1), y.flatten(0, 1))
    return losses.view(y.shape[:2])


def client_losses(
    logits: Tensor, y: Tensor, counts: Sequence[int], task: Task, class_counts: Tensor | None = None
) -> Tensor:
    """Compute each client's task loss, the mean over its real rows.

    Args:
        logits: Logits (C, B, K).
        y: Targets (C, B, ...).
        counts: Number of real rows of each client, which come first.
        task: Computes the loss of an image.
        class_counts: Number (C, K') of each client's training images of each class, without the last classes if no
            client has them; only for a task that uses them.

    Returns:
        Losses (C,).
    """
    if class_counts is None or not task.uses_client_counts:
        return client_means(row_losses(logits, y, task), counts)
    missing_classes = logits.shape[-1] - class_counts.shape[1]
    counts_of_rows = F.pad(class_counts, (0, missing_classes)).repeat_interleave(y.shape[1], 0)
    losses = task.client_loss(logits.flatten(0, 1), y.flatten(0, 1), counts_of_rows)
    return client_means(losses.view(y.shape[:2]), counts)


def client_means(values: Tensor, counts: Sequence[int]) -> Tensor:
    """Average values over the real rows of each client.

    Args:
        values: Values (C, B, ...).
        counts: Number of real rows of each client, which come first.

    Returns:
        Means (C, ...).
    """
    if all(count == values.shape[1] for count in counts):
        return values.mean(1)
    real = real_rows(counts, values.shape[1], values.device)
    while real.dim() < values.dim():
        real = real.unsqueeze(-1)
    sums = values.where(real, 0).sum(1)
    num_rows = to_device_async(torch.tensor(counts), values.device)
    return sums / per_client(num_rows, sums)


def real_rows(counts: Sequence[int], num_rows: int, device: torch.device) -> Tensor:
    """Return a mask (C, B) that is true for rows with an image and false for padding.

    Args:
        counts: Number of real rows of each client.
        num_rows: Number B of rows of each client.
        device: Device of the mask.

    >>> real_rows((2, 1), 2, torch.device("cpu")).tolist()
    [[True, True], [True, False]]
    """
    num_real = to_device_async(torch.tensor(counts), device)
    return torch.arange(num_rows, device=device) < num_real.unsqueeze(1)


def losses_of_members(
    engine: Engine, members: State, batches: Iterable[CohortBatch], num_clients: int, task: Task
) -> Tensor:
    """Compute the mean loss of each of K models on the images of each of C clients, in evaluation mode.

    Args:
        engine: Engine that runs the models.
        members: States (K, ...) of the models.
        batches: The clients' images.
        num_clients: Number C of clients.
        task: Computes the loss of an image.

    Returns:
        Losses (C, K).
    """
    models = unstack(members)
    device = device_of(members)
    loss_sums = torch.zeros(num_clients, len(models), device=device)
    num_images = torch.zeros(num_clients, device=device)
    with torch.no_grad():
        for batch in batches:
            rows = slice(batch.start, batch.stop)
            counts = torch.tensor(batch.counts, device=device)
            for index, model in enumerate(models):
                logits = engine.logits(expand(model, len(batch.clients)), batch.x, counts=batch.counts)
                mean_losses = client_losses(logits, batch.y, batch.counts, task)
                loss_sums[rows, index] += counts * mean_losses
            num_images[rows] += counts
    return loss_sums / num_images.unsqueeze(1)
