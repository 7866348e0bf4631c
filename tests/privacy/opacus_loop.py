# SPDX-License-Identifier: Apache-2.0
"""The reference for noisy gradients: Opacus's own ``DPOptimizer`` on the single model, one client after another."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from perada.core.states import train_mode
from perada.engine.engine import row_losses
from perada.privacy.clipping import at_least_float32, noisy_mean
from perada.privacy.gradients import (
    Query,
    SampleGradients,
    clone_outputs,
    silence_hook_warnings,
    with_grad_sample_hooks,
)


@dataclass(frozen=True)
class NoisyQuery(Query):
    """A query, with the noise and the expected batch of each client."""

    generators: list[torch.Generator] | None = None
    noise_multipliers: Sequence[float] = ()
    expected_batch: Sequence[float] = ()


class NoisyGradients(SampleGradients):
    """What is tested, with the noise that a private round adds."""

    def __call__(self, query):
        std = [sigma * self.options.max_norm for sigma in query.noise_multipliers]
        return noisy_mean(self.sums(query), std, query.expected_batch, query.generators)


class OpacusGradients:
    """The reference: Opacus on the engine's single model, whose parameters are put back, one client after another."""

    def __init__(self, options, engine, task):
        self.options = options
        self.engine = engine
        self.task = task
        folded = engine.folded(random_only=True)
        self._context, self._model = folded.context, clone_outputs(folded.model)

    def __call__(self, query):
        """Answer ``query``."""
        parameters = dict(self.engine.model.named_parameters())
        before = {key: (p.data, p.requires_grad) for key, p in parameters.items() if key in query.states}
        gradients = {key: torch.zeros_like(v) for key, v in query.states.items() if v.requires_grad}
        try:
            for client in range(len(query.counts)):
                for key in before:
                    parameters[key].requires_grad_(key in gradients)
                    parameters[key].data = query.states[key][client].detach()
                for key, summed in self._client(query, client, parameters, sorted(gradients)).items():
                    gradients[key][client] = summed
        finally:
            for key, (data, trained) in before.items():
                parameters[key].data = data
                parameters[key].grad = None
                parameters[key].requires_grad_(trained)
        std = [sigma * self.options.max_norm for sigma in query.noise_multipliers]
        return noisy_mean(gradients, std, query.expected_batch, query.generators)

    def _client(self, query, client, parameters, keys):
        """The sum of clipped gradients, by a step of Opacus's optimizer without noise."""
        from opacus.optimizers import DPOptimizer, DPPerLayerOptimizer

        leaves = [parameters[key] for key in keys]  # Opacus gives them attributes
        kind = DPOptimizer
        bound = self.options.max_norm
        if self.options.clipping == "per_layer":
            kind = DPPerLayerOptimizer
            bound = [bound / len(leaves) ** 0.5] * len(leaves)
        sgd = torch.optim.SGD(leaves, lr=0.0)
        optimizer = kind(sgd, noise_multiplier=0.0, max_grad_norm=bound, expected_batch_size=1)
        count = query.counts[client]
        x = query.x[client, :count]
        y = query.y[client, :count]
        size = self.options.physical_batch_size or max(1, count)
        model = with_grad_sample_hooks(self._model)
        try:
            train_mode(model)
            starts = range(0, max(1, count), size)
            for part, start in enumerate(starts):
                self._context.begin(1, None, query.dropout[client : client + 1].fork("part", part))
                optimizer.zero_grad()
                if count:
                    with torch.enable_grad(), silence_hook_warnings():
                        logits = at_least_float32(model(self.engine.format(x[start : start + size])))
                        losses = row_losses(logits.unsqueeze(0), y[None, start : start + size], self.task)
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


def _leave_out_broken(leaves):
    """Put zeros in the place of every image's gradient that is not finite; all in single precision at least."""
    samples = [at_least_float32(leaf.grad_sample) for leaf in leaves]
    finite = torch.stack([sample.flatten(1).isfinite().all(1) for sample in samples]).all(0)
    for leaf, sample in zip(leaves, samples, strict=True):
        leaf.grad_sample = sample.where(finite.view(-1, *[1] * (sample.dim() - 1)), 0)
