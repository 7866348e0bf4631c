# SPDX-License-Identifier: Apache-2.0
"""Forward passes of many states through one model, folded into one batch or one client after another, and losses.

Both give a tensor of logits (C, B, K) that can be differentiated with respect to the stacked states, so everything
above (algorithms, optimisers, evaluation) is written once. The loop is the oracle of the folded engine, and what runs
when a trained layer has no stacked twin, or when :func:`perada.engine.fold_check.check_fold` finds that a network mixes
the images of a batch.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from perada.core.checks import OptionError, check_choice
from perada.core.rounds import CohortBatch
from perada.core.seeding import Streams
from perada.core.states import (
    State,
    batch_norms,
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
from perada.engine.fold import Fold, fold
from perada.engine.frozen_trunk import FrozenTrunk, find_trunk

EngineName = Literal["auto", "folded", "loop"]
NUMBERS_AT_ONCE_CPU = 3 * 2**19
"""Number of values in the images that run at once in evaluation: 512 images of 3×32×32."""
NUMBERS_AT_ONCE_GPU = 3 * 2**27
NUMBERS_PER_TOKEN = 32


class Engine:
    """Runs stacked states through one shared model.

    Args:
        model: The single model, frozen but for its adapter slot; ``model(x)`` gives logits (B, K).
        kind: ``"folded"`` runs all clients as one batch, ``"loop"`` one client after another, ``"auto"`` folds where
            every trained layer has a stacked version.
        channels_last: Run the images in that memory format.
        compile: Options of ``torch.compile``, which then runs full batches; ``None``: it is not used.

    Raises:
        ValueError: If ``kind`` is unknown, or is ``"folded"`` and a trained layer has no stacked twin.
    """

    def __init__(
        self,
        model: nn.Module,
        kind: EngineName = "auto",
        *,
        channels_last: bool = False,
        compile: dict[str, Any] | None = None,
    ) -> None:
        check_choice("engine", kind, get_args(EngineName))
        self.model = model
        self.memory_format = torch.channels_last if channels_last else torch.preserve_format
        folded = fold(model)
        if folded.missing:
            layers = [f"{path} ({name})" for path, name in folded.missing.items()]
            message = f"trained layers without a stacked version: {abbreviated(layers, 4)}"
            if kind == "folded":
                raise OptionError(
                    f"engine='folded' cannot run {message}; use engine='loop' or 'auto'", name="engine", value="folded"
                )
            if kind == "auto":
                warnings.warn(f"engine='auto' falls back to the per-client loop: {message}", stacklevel=2)
        self.kind: Literal["folded", "loop"] = "folded"
        self._fold = folded
        if kind == "loop" or folded.missing:
            self.kind = "loop"
            # The loop runs the single model, but its dropout layers must draw from the clients' streams too.
            self._fold = fold(model, random_only=True)
        self.trunk: FrozenTrunk | None = None
        self._single = model
        self._tied = tied_names(model)
        self._full_batch: ModelCall = _call
        if compile is not None:
            self._full_batch = torch.compile(_call, **compile)

    @property
    def runs(self) -> nn.Module:
        """The module through which passes run: the stacked model, or the single one with per-client dropout layers."""
        return self._fold.model

    def folded(self, random_only: bool = False) -> Fold:
        """Fold the model again, with the frozen trunk if one was found."""
        if self.trunk is None:
            return fold(self.model, random_only=random_only)
        return fold(self.model, random_only=random_only, wrap=self.trunk.wrap)

    def find_trunk(self, image: Tensor, least_share: float = 0.0) -> FrozenTrunk | None:
        """Find the part of the model that no trained tensor precedes. From then on, its features may replace images.

        Args:
            image: An example (channels, height, width), prepared and on the model's device.
            least_share: Share of a pass's floating-point operations that it must save to be used.

        Returns:
            The trunk, which is searched once; None if there is none.
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
            states: Stack with leading axis C; in training, running statistics in it are updated in place.
            x: Images (C, B, channels, height, width), or their features (C, B, F).
            training: Training mode: batch statistics, dropout.
            counts: Number of real rows of each client; its other rows are padding. ``None``: all are real.
            streams: The clients' random streams for this pass, needed in training where there is dropout.
            batch_statistics: In evaluation mode, normalise by the statistics of each state's images wherever training
                would (:func:`~perada.core.states.batch_norms`). Running statistics stay as they are, and nothing is
                dropped.

        Returns:
            Logits (C, B, K), in single precision at least; rows beyond a client's count are meaningless.
        """
        return self._logits(states, x, self._full_batch, training, counts, streams, batch_statistics)

    def _logits(
        self,
        states: State,
        x: Tensor,
        full_batch: "ModelCall",
        training: bool,
        counts: Sequence[int] | None,
        streams: Streams | None,
        batch_statistics: bool = False,
    ) -> Tensor:
        """Compute logits like :meth:`logits`; ``full_batch`` calls the model where no row is padding."""
        real_counts: tuple[int, ...] | None = None
        if counts is not None and any(count != x.shape[1] for count in counts):
            real_counts = tuple(counts)
        if training:
            train_mode(self._fold.model)
        else:
            self._fold.model.eval()
            if batch_statistics:
                for norm in batch_norms(self._fold.model):
                    norm.train()
                states = self._with_own_buffers(states)
        run = self._folded if self.kind == "folded" else self._loop
        logits = run(states, x, full_batch, real_counts, streams)
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
        """Compute logits (C, B, K) like :meth:`logits`, and the inputs (C, B, F) of the module called ``head``."""
        head_inputs: list[Tensor] = []
        module = self._fold.model.get_submodule(head)
        hook = module.register_forward_pre_hook(lambda _, args: head_inputs.append(args[0]))
        try:
            # Not compiled: a compiler may leave out the hook.
            logits = self._logits(states, x, _call, training, counts, streams)
        finally:
            hook.remove()
        clients, rows = x.shape[:2]
        if self.kind == "folded":
            # One pass of all clients.
            representations = head_inputs[0].reshape(clients, rows, -1)
        else:
            # A pass for each client, without its rows of padding.
            padded_inputs = [_padded(head_input.flatten(1), rows) for head_input in head_inputs]
            representations = torch.stack(padded_inputs)
        return logits, representations.to(logits.dtype)

    def _with_own_buffers(self, states: State) -> State:
        """Copy the buffers that a norm updates in training mode: running statistics and counter."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        copied = dict(states)
        for key, value in states.items():
            if key not in parameters:
                copied[key] = value.clone(memory_format=torch.contiguous_format)
        return copied

    @property
    def has_batch_norms(self) -> bool:
        """Return whether the logits of an image depend on its batch if norms use batch statistics."""
        return bool(batch_norms(self.model))

    def shared_logits(
        self,
        states: State,
        x: Tensor,
        rows: int | None = None,
        *,
        batch_statistics: bool = False,
    ) -> Tensor:
        """Compute logits of C states on the same images, in evaluation mode and without gradients.

        Args:
            states: Stack (C, ...).
            x: Images (B, ...) or their features.
            rows: Largest number of rows that run at once, where an image counts once for each state. If there are more
                images than that, one state at a time runs on groups of them. By default 512 images of 32×32 on a CPU,
                whose caches larger batches outgrow, and 131,072 on a GPU; fewer for larger images, at least 16. A token
                of a text counts as 32 numbers, since the model turns it into a vector.
            batch_statistics: Normalise by the statistics of all the images, as in :meth:`logits`, which run at once
                then.

        Returns:
            Logits (C, B, K).
        """
        if rows is None:
            numbers_per_row = x[0].numel()
            if not x.is_floating_point():
                numbers_per_row *= NUMBERS_PER_TOKEN
            numbers_at_once = NUMBERS_AT_ONCE_GPU if x.is_cuda else NUMBERS_AT_ONCE_CPU
            rows = max(16, numbers_at_once // numbers_per_row)
        states_at_once = max(1, rows // len(x))
        images_at_once = rows
        if batch_statistics:
            # The statistics are those of all images.
            images_at_once = len(x)
        num_states = stack_size(states)
        logits_of_states = []
        with torch.no_grad():
            for start in range(0, num_states, states_at_once):
                stop = min(start + states_at_once, num_states)
                some_states = {name: value[start:stop] for name, value in states.items()}
                logits_of_images = []
                for some_images in x.split(images_at_once):
                    # A view: each state is run on the same images.
                    images = some_images.expand(stop - start, *some_images.shape)
                    logits_of_images.append(self.logits(some_states, images, batch_statistics=batch_statistics))
                logits_of_states.append(torch.cat(logits_of_images, 1))
        return torch.cat(logits_of_states)

    def _folded(
        self,
        states: State,
        x: Tensor,
        full_batch: "ModelCall",
        counts: tuple[int, ...] | None,
        streams: Streams | None,
    ) -> Tensor:
        """Run all clients as one batch."""
        clients, rows = x.shape[:2]
        # A compiler would start again for each padded batch, since the shapes of the real rows differ.
        call = full_batch if counts is None else _call
        together = x.is_cuda or call is not _call
        self._fold.context.begin(clients, counts, streams, together=together)
        tensors = dict(states)
        for name in self._fold.row_keys & states.keys():
            tensors[name] = states[name].repeat_interleave(rows, 0).flatten(0, 1)
        logits = call(self._fold.model, tensors, self.format(x.flatten(0, 1)), self._tied)
        return logits.view(clients, rows, *logits.shape[1:])

    def format(self, x: Tensor) -> Tensor:
        """Return the model's input for images, in the engine's memory format, or for features of images."""
        if self.trunk is not None:
            x = self.trunk.feed(x)
        if x.dim() == 4:
            return x.to(memory_format=self.memory_format)
        return x

    def _loop(
        self,
        states: State,
        x: Tensor,
        full_batch: "ModelCall",
        counts: tuple[int, ...] | None,
        streams: Streams | None,
    ) -> Tensor:
        """Run one client after another."""
        outputs = []
        for client, images in enumerate(x):
            real_images = images
            if counts is not None:
                real_images = images[: counts[client]]
            client_streams: Streams | None = None
            if streams is not None:
                client_streams = streams[client : client + 1]
            self._fold.context.begin(1, None, client_streams)
            state = {name: value[client] for name, value in states.items()}
            logits = full_batch(self._fold.model, state, self.format(real_images), self._tied)
            outputs.append(_padded(logits, len(images)))
        return torch.stack(outputs)


ModelCall = Callable[[nn.Module, State, Tensor, Mapping[str, str]], Tensor]
"""Calls a module, its state, the images and the tied names, and returns the logits."""


def _call(module: nn.Module, tensors: State, x_R: Tensor, tied: Mapping[str, str]) -> Tensor:
    """Call ``module`` with other ``tensors`` by name; ``tied`` are its :func:`~perada.core.states.tied_names`.

    torch would find these itself, but would then not put the tensors of a module that stands in several places back.
    """
    if tied:
        tensors = dict(tensors)
        for name, first_name in tied.items():
            if first_name in tensors:
                tensors[name] = tensors[first_name]
    logits: Tensor = functional_call(module, tensors, (x_R,), tie_weights=False)
    return logits


def _padded(values: Tensor, rows: int) -> Tensor:
    """Append rows of zeros to values (B, ...) up to a number of rows."""
    padding = values.new_zeros(rows - len(values), *values.shape[1:])
    if len(padding) == 0:
        return values
    return torch.cat([values, padding])


def row_losses(logits: Tensor, y: Tensor, multilabel: bool) -> Tensor:
    """Compute the loss (C, B) of every image, padding included.

    Args:
        logits: Logits (C, B, K).
        y: Classes (C, B) for the cross-entropy or, if ``multilabel``, labels (C, B, K) of 0 and 1.
        multilabel: Compute the binary cross-entropy instead, mean over labels.
    """
    if multilabel:
        losses_of_labels = F.binary_cross_entropy_with_logits(logits, y.to(logits), reduction="none")
        return losses_of_labels.mean(-1)
    losses = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
    return losses.view(y.shape)


def client_losses(logits: Tensor, y: Tensor, counts: Sequence[int], multilabel: bool) -> Tensor:
    """Compute each client's task loss (C,): the mean of :func:`row_losses` over its ``counts`` real rows."""
    return client_means(row_losses(logits, y, multilabel), counts)


def client_means(values: Tensor, counts: Sequence[int]) -> Tensor:
    """Compute each client's mean (C, ...) of ``values`` (C, B, ...) over its first ``counts`` rows, the real ones."""
    if all(count == values.shape[1] for count in counts):
        return values.mean(1)
    real = real_rows(counts, values.shape[1], values.device)
    while real.dim() < values.dim():
        real = real.unsqueeze(-1)
    sums = values.where(real, 0).sum(1)
    num_rows = to_device_async(torch.tensor(counts), values.device)
    return sums / per_client(num_rows, sums)


def real_rows(counts: Sequence[int], rows: int, device: torch.device) -> Tensor:
    """Return a mask (C, B), true where a row holds an image rather than padding.

    >>> real_rows((2, 1), 2, torch.device("cpu")).tolist()
    [[True, True], [True, False]]
    """
    num_real = to_device_async(torch.tensor(counts), device)
    return torch.arange(rows, device=device) < num_real.unsqueeze(1)


def ensemble(logits: Tensor, average: Literal["logits", "probabilities"], multilabel: bool) -> Tensor:
    """Average the outputs of K models.

    Args:
        logits: Their logits (K, ..., classes).
        average: Whether ``logits`` or ``probabilities`` are averaged.
        multilabel: Whether probabilities are those of each class's own Bernoulli.

    Returns:
        Logits (..., classes) of the ensemble.

    >>> ensemble(torch.tensor([[0.0, 2.0], [2.0, 0.0]]), "probabilities", False).softmax(-1).tolist()
    [0.5, 0.5]
    """
    if len(logits) == 1:
        return logits[0]
    if average == "logits":
        return logits.mean(0)
    # Sums of probabilities in place of means, since a common factor does not change what logits stand for.
    if not multilabel:
        return logits.log_softmax(-1).logsumexp(0)
    log_sum_present = F.logsigmoid(logits).logsumexp(0)
    log_sum_absent = F.logsigmoid(-logits).logsumexp(0)
    return log_sum_present - log_sum_absent


def compare(engine: Engine, members: State, batches: Iterable[CohortBatch], clients: int, multilabel: bool) -> Tensor:
    """Compute the mean losses (C, K) of K models on each of C clients' images, in evaluation mode.

    Args:
        engine: Runs the models.
        members: The models (K, ...).
        batches: The clients' images; rows beyond a client's count are padding.
        clients: C.
        multilabel: Whether images have several labels.
    """
    models = unstack(members)
    device = device_of(members)
    loss_sums = torch.zeros(clients, len(models), device=device)
    num_images = torch.zeros(clients, device=device)
    with torch.no_grad():
        for batch in batches:
            rows = slice(batch.start, batch.stop)
            counts = torch.tensor(batch.counts, device=device)
            for index, model in enumerate(models):
                logits = engine.logits(expand(model, len(batch.clients)), batch.x, counts=batch.counts)
                mean_losses = client_losses(logits, batch.y, batch.counts, multilabel)
                loss_sums[rows, index] += counts * mean_losses
            num_images[rows] += counts
    return loss_sums / num_images.unsqueeze(1)
