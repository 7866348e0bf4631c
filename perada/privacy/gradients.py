# SPDX-License-Identifier: Apache-2.0
"""Noisy gradients of many clients: every image's gradient clipped, summed by client, noise added (DP-SGD).

Two ways with one result. ``FoldedGradients`` runs all clients as one batch through the stacked model, whose leaf layers
Opacus's hooks give a gradient for every image. ``OpacusGradients`` is the reference: Opacus's own ``DPOptimizer`` on
the single model, one client after another.

Shape suffixes: C clients, B images a client, R = C·B rows.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from perada.core.seeding import Streams
from perada.core.states import State, train_mode, trained_keys
from perada.engine.engine import Engine, real_rows, row_losses
from perada.engine.stacked_layers import Twin
from perada.privacy.clipping import factors_of, noisy_mean, sensitivity, wide
from perada.privacy.hooks import RowGradients, Whole, apart, hooked, layers, quiet, row_gradients
from perada.privacy.options import Privacy
from perada.server.aggregate import double


@dataclass
class Query:
    """One look at the images of C clients.

    Attributes:
        states: Stack (C, ...); those that require gradients are asked about.
        x: Images (C, B, ...).
        y: Labels (C, B) or (C, B, K).
        counts: Real rows of each client, 0 for a batch without images.
        dropout: The clients' random streams.
        noise: One random stream per client; ``None`` for the cryptographic generator.
        noise_multipliers: σ of each client.
        expected: Images expected in each client's batch.
    """

    states: State
    x: Tensor
    y: Tensor
    counts: tuple[int, ...]
    dropout: Streams
    noise: list[torch.Generator] | None
    noise_multipliers: list[float]
    expected: list[float]

    def slices(self, size: int | None) -> Iterator[tuple[Tensor, Tensor, tuple[int, ...]]]:
        """Images, labels and counts of at most ``size`` rows of each client; none where there is no image at all."""
        widest = max(self.counts)
        for start in range(0, widest, size or max(1, widest)):
            stop = min(start + (size or widest), widest)
            counts = tuple(max(0, min(count, stop) - start) for count in self.counts)
            yield self.x[:, start:stop], self.y[:, start:stop], counts


NoisyGradients = Callable[[Query], State]
"""Gives the noisy gradient (C, ...) of each client's mean loss, for the states that are asked about."""


def make_gradients(options: Privacy, engine: Engine, multilabel: bool) -> NoisyGradients:
    """The privacy engine that ``options`` name, on the training engine's model; a ValueError if it cannot run them."""
    chosen = engine.kind if options.engine == "auto" else options.engine
    if chosen != "folded":
        if options.clipping == "automatic":
            raise ValueError(
                "privacy: clipping='automatic' is not among Opacus's, which engine='opacus' (or a training engine that "
                "loops over clients) takes; choose clipping='flat' or engine='folded'"
            )
        return OpacusGradients(options, engine, multilabel)
    if engine.kind != "folded":
        raise ValueError(
            "privacy: engine='folded' needs a training engine that folds; choose privacy engine 'opacus' or 'auto', or "
            "set engine (model.engine) to 'folded'"
        )
    return FoldedGradients(options, engine, multilabel)


class FoldedGradients:
    """All clients at once: the stacked model under Opacus's hooks; the engine's own model stays as it is."""

    def __init__(self, options: Privacy, engine: Engine, multilabel: bool) -> None:
        self.options, self.engine, self.multilabel = options, engine, multilabel
        folded = engine.folded()
        self._context, self._rows = folded.context, folded.row_keys
        for module in folded.model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad and not isinstance(module, Twin):  # run as one copy a row, without hooks
                    module._parameters[name] = nn.Parameter(parameter.detach(), requires_grad=False)
        model = apart(folded.model)
        modules = dict(layers(model))
        parts = {key: key.rpartition(".") for key in trained_keys(engine.model)}
        self._owners = {key: (modules[path], name) for key, (path, _, name) in parts.items()}
        self._model = hooked(model)

    def __call__(self, query: Query) -> State:
        """Answer ``query``."""
        leaves = {key: value.detach() for key, value in query.states.items() if value.requires_grad}
        summed = {key: double(torch.zeros_like(value)) for key, value in leaves.items()}
        try:
            for part, (x, y, counts) in enumerate(query.slices(self.options.physical_batch_size)):
                real = real_rows(counts, x.shape[1], x.device)
                samples = self._samples(query, x, y, counts, real, query.dropout.fork("part", part))
                with torch.autocast(x.device.type, enabled=False):
                    norms = dict.fromkeys(leaves, double(torch.zeros_like(real)))  # no image passed some
                    norms |= {key: double(sample.squares()).sqrt().view_as(real) for key, sample in samples.items()}
                    factors = factors_of(norms, real, self.options.max_norm, self.options.clipping)
                    for key, sample in samples.items():
                        summed[key] += sample.summed(factors[key])
        finally:  # let go of the query's tensors
            for module, name in self._owners.values():
                parameter = module._parameters.get(name)
                if parameter is not None and hasattr(parameter, "grad_sample"):
                    module._parameters[name] = nn.Parameter(parameter.detach()[:0])
        return noisy({key: value.to(leaves[key].dtype) for key, value in summed.items()}, query, self.options)

    def _samples(
        self, query: Query, x: Tensor, y: Tensor, counts: tuple[int, ...], real: Tensor, dropout: Streams
    ) -> dict[str, RowGradients]:
        """Gradient of every row's loss."""
        clients, rows = x.shape[:2]
        self._context.begin(clients, counts, dropout)
        held: dict[str, nn.Parameter] = {}
        for key, value in query.states.items():
            module, name = self._owners[key]
            tensor = value.detach()
            if key in self._rows:
                tensor = tensor.repeat_interleave(rows, 0).flatten(0, 1)
            if name in module._buffers:
                module._buffers[name] = tensor
                continue
            # All of them, asked about or not: the hooks want every layer's gradient once they are there.
            held[key] = parameter = nn.Parameter(tensor)
            parameter.grad_sample, parameter._forward_counter = None, 0  # type: ignore[attr-defined]  # Opacus's
            module._parameters[name] = parameter
        train_mode(self._model)
        with torch.enable_grad(), quiet():
            logits = self._model(self.engine.format(x.flatten(0, 1)))
            losses = row_losses(wide(logits).view(clients, rows, *logits.shape[1:]), y, self.multilabel)
            losses.where(real, 0).sum().backward()
        samples: dict[str, RowGradients] = {}
        for key, parameter in held.items():
            if query.states[key].requires_grad:
                sample = row_gradients(parameter)
                if key in self._rows and parameter.grad is not None:
                    sample = Whole(parameter.grad.view(clients * rows, *query.states[key].shape[1:]))
                if sample is not None:
                    samples[key] = sample
        return samples


class OpacusGradients:
    """The reference: Opacus on the engine's single model, whose parameters are put back, one client after another."""

    def __init__(self, options: Privacy, engine: Engine, multilabel: bool) -> None:
        self.options, self.engine, self.multilabel = options, engine, multilabel
        folded = engine.folded(random_only=True)
        self._context, self._model = folded.context, apart(folded.model)

    def __call__(self, query: Query) -> State:
        """Answer ``query``."""
        parameters = dict(self.engine.model.named_parameters())
        before = {key: (p.data, p.requires_grad) for key, p in parameters.items() if key in query.states}
        gradients: State = {key: torch.zeros_like(v) for key, v in query.states.items() if v.requires_grad}
        try:
            for client in range(len(query.counts)):
                for key in before:
                    parameters[key].requires_grad_(key in gradients)
                    parameters[key].data = query.states[key][client].detach()
                for key, summed in self._client(query, client, parameters, sorted(gradients)).items():
                    gradients[key][client] = summed
        finally:
            for key, (data, trained) in before.items():
                parameters[key].data, parameters[key].grad = data, None
                parameters[key].requires_grad_(trained)
        return noisy(gradients, query, self.options)

    def _client(self, query: Query, client: int, parameters: dict[str, nn.Parameter], keys: list[str]) -> State:
        """The sum of clipped gradients, by a step of Opacus's optimizer without noise."""
        from opacus.optimizers import DPOptimizer, DPPerLayerOptimizer

        leaves: list[Any] = [parameters[key] for key in keys]  # Opacus gives them attributes
        kind: Any = DPOptimizer
        bound: Any = self.options.max_norm
        if self.options.clipping == "per_layer":
            kind, bound = DPPerLayerOptimizer, [bound / len(leaves) ** 0.5] * len(leaves)
        sgd = torch.optim.SGD(leaves, lr=0.0)
        optimizer = kind(sgd, noise_multiplier=0.0, max_grad_norm=bound, expected_batch_size=1)
        count = query.counts[client]
        x, y = query.x[client, :count], query.y[client, :count]
        size = self.options.physical_batch_size or max(1, count)
        model = hooked(self._model)
        try:
            train_mode(model)
            starts = range(0, max(1, count), size)
            for part, start in enumerate(starts):
                self._context.begin(1, None, query.dropout[client : client + 1].fork("part", part))
                optimizer.zero_grad()
                if count:
                    with torch.enable_grad(), quiet():
                        logits = wide(model(self.engine.format(x[start : start + size])))
                        losses = row_losses(logits.unsqueeze(0), y[None, start : start + size], self.multilabel)
                        losses.sum().backward()
                for leaf in leaves:  # of what no image passed
                    if leaf.grad_sample is None:
                        leaf.grad_sample = leaf.new_zeros((len(x[start : start + size]), *leaf.shape))
                _leave_out_broken(leaves)
                optimizer.signal_skip_step(start != starts[-1])
                with torch.autocast(x.device.type, enabled=False):
                    optimizer.pre_step()
            return {key: leaf.grad.clone() for key, leaf in zip(keys, leaves, strict=True) if leaf.grad is not None}
        finally:
            model.to_standard_module()


def noisy(summed: State, query: Query, options: Privacy) -> State:
    """The noisy mean (C, ...) of each client's clipped sum (C, ...)."""
    std = [sigma * sensitivity(options.max_norm) for sigma in query.noise_multipliers]
    return noisy_mean(summed, std, query.expected, query.noise)


def _leave_out_broken(leaves: list[Any]) -> None:
    """Put zeros in the place of every image's gradient that is not finite; all in single precision at least."""
    samples = [wide(leaf.grad_sample) for leaf in leaves]
    finite = torch.stack([sample.flatten(1).isfinite().all(1) for sample in samples]).all(0)
    for leaf, sample in zip(leaves, samples, strict=True):
        leaf.grad_sample = sample.where(finite.view(-1, *[1] * (sample.dim() - 1)), 0)
