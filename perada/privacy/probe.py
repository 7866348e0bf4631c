# SPDX-License-Identifier: Apache-2.0
"""Whether private gradients can be had of a model, and of the device: tried before anything is trained."""

from dataclasses import replace

import torch
from torch import Tensor

from perada.core.seeding import Streams, generator, seeded
from perada.core.states import State
from perada.engine.engine import Engine
from perada.engine.losses import row_losses
from perada.privacy.gradients import Query, make_gradients
from perada.privacy.options import Privacy

UNCLIPPED = 1e9
"""A bound that no gradient of the trials reaches."""


def check_gradients(options: Privacy, engine: Engine, states: State, x: Tensor, y: Tensor, multilabel: bool) -> None:
    """Compare the sum of all images' gradients, neither clipped nor noisy, with what one backward pass gives.

    They differ where Opacus's hooks do not see how a parameter is used: it would get noise and nothing else. Of the
    states (C, ...) what is trained requires gradients; the images are (C, B, ...), their labels (C, B) or (C, B, K).

    Raises:
        ValueError: If they differ or cannot be had, if a pass through the model changes a tensor of it, or if it draws
            from torch's global stream.
    """
    clients, rows = x.shape[:2]
    dropout = Streams.derived(0, "probe", clients=range(clients), device=x.device)
    noise = [torch.Generator(x.device) for _ in range(clients)]
    _check_streams(engine, states, x, dropout)
    before = {name: buffer.clone() for name, buffer in engine.model.named_buffers()}
    with torch.enable_grad():
        logits = engine.logits(states, x, training=True, streams=dropout.fork("part", 0))
        asked = {key: value for key, value in states.items() if value.requires_grad}
        found = torch.autograd.grad(row_losses(logits, y, multilabel).sum(), list(asked.values()), allow_unused=True)
    query = Query(states, x, y, (rows,) * clients, dropout, noise, [0.0] * clients, [1.0] * clients)
    gradients = make_gradients(replace(without_noise(options, UNCLIPPED), physical_batch_size=None), engine, multilabel)
    try:
        got = gradients(query)
    except Exception as error:  # a layer may fail under the hooks in any way
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(
            f"privacy cannot be used with this model and adapter: Opacus's hooks fail on it ({reason}); choose the "
            "adapter lora, bottleneck, residual (norm='group') or head"
        ) from error
    largest = max((float(value.abs().max()) for value in found if value is not None), default=0.0)
    for key, expected in zip(asked, found, strict=True):
        wanted = torch.zeros_like(asked[key]) if expected is None else expected
        if not torch.allclose(got[key], wanted, rtol=1e-2, atol=1e-2 * float(wanted.abs().max()) + 1e-5 * largest):
            raise ValueError(
                f"privacy cannot be used with this model: the images' gradients of {key!r} do not add up to that "
                "of their batch, since Opacus's hooks do not see how it is used (its layer is not called, or not on a "
                "batch); choose an adapter that leaves it out, such as lora, bottleneck or head"
            )
    for name, buffer in engine.model.named_buffers():
        if not torch.equal(buffer, before[name]):
            raise ValueError(
                f"privacy cannot be used with this model: a pass through it in training changes {name!r}, by what no "
                "noise covers; put that layer into evaluation mode for good, or choose another backbone"
            )


def _check_streams(engine: Engine, states: State, x: Tensor, dropout: Streams) -> None:
    """Refuse a model whose outputs follow torch's global stream, and not the clients' own alone."""
    outputs = []
    for seed in (0, 1, 0):
        with torch.no_grad(), seeded(seed, "probe"):
            outputs.append(engine.logits(states, x, training=True, streams=dropout.fork("part", 0)))
    one, other, again = outputs
    if torch.equal(one, again) and not torch.allclose(one, other, equal_nan=True):
        raise ValueError(
            "privacy cannot be used with this model: it draws from torch's global stream of random numbers (F.dropout "
            "or the like), which others may foretell, and which goes by an image's place in the batch; use nn.Dropout "
            "as a module, or set the rates (such as drop_rate or attn_drop_rate) to 0"
        )


def check_products(device: torch.device) -> None:
    """Look whether products of float32 matrices on a device have the digits of float32.

    A clipped sum is such a product. With fewer digits an image's part in it is longer than the bound, many times so
    where its terms cancel.

    Raises:
        ValueError: If they have not.
    """
    a = torch.rand(2, 256, 256, generator=generator(0, "probe"))
    with torch.autocast(device.type, enabled=False):
        found, exact = torch.bmm(a.to(device), a.to(device)).cpu(), torch.bmm(a.double(), a.double())
    if float((found / exact - 1).abs().max()) > 1e-5:
        raise ValueError(
            "privacy: products of float32 matrices are computed with fewer digits here, so that an image may have more "
            "than its share of a clipped sum; leave torch.set_float32_matmul_precision at 'highest', and TF32 off for "
            "matrix products (precision='bf16-mixed' is fine: sums are made in float32)"
        )


def without_noise(options: Privacy, bound: float) -> Privacy:
    """The options of a trial: no noise, and another bound; with that of no gradient, flat clipping."""
    clipping = "flat" if bound == UNCLIPPED else options.clipping
    return replace(options, noise_multiplier=0.0, target_epsilon=None, max_norm=bound, clipping=clipping)
