# SPDX-License-Identifier: Apache-2.0
"""Whether a network can be folded: a folded pass compared with one client after another.

The stacked layers keep clients apart, but what stands between them in a network's own ``forward`` may not.
``h - h.mean(0)`` takes the mean over everyone's images, ``if h.mean() > 0`` decides for all.
"""

import copy

import torch
from torch import Tensor, nn

from perada.core.seeding import Streams, seeded
from perada.core.states import expand, get_state
from perada.engine.engine import Engine

FAILS = "it fails on the images of two clients"
ROWS = 2  # of a client: enough for a BatchNorm, few enough for a large model on a CPU


def check_fold(model: nn.Module, x: Tensor, channels_last: bool = False) -> str | None:
    """Compare a folded pass with one client after another.

    The single model's trained layers have stacked twins; ``x`` are prepared images of some clients (C, B, ...), or
    texts. It gives why the model cannot be folded; ``None`` if both agree, or nothing can be said.
    """
    found = _difference(model, x, channels_last, 1e-4)
    if found is None or found.startswith(FAILS):
        return found
    # The two round otherwise, by much in TF32. What differs in double precision too is a finding.
    device = torch.device("cpu") if x.device.type == "mps" else x.device
    exact = x.to(device, torch.float64 if x.is_floating_point() else x.dtype)
    return _difference(copy.deepcopy(model).to(device, torch.float64), exact, channels_last, 1e-6)


def _difference(model: nn.Module, x: Tensor, channels_last: bool, tolerance: float) -> str | None:
    folded, loop = (Engine(model, kind, channels_last=channels_last) for kind in ("folded", "loop"))
    two = x[:2, :ROWS] if len(x) > 1 else torch.stack([x[0, :ROWS], x[0, :ROWS].flip(-1)])
    training = _repeats(loop, two, True)
    if not training and not _repeats(loop, two, False):
        return None  # such as one that draws from torch's global stream, so that no two passes agree
    # Where something asks for a sign, the negated images of one client decide otherwise.
    for batch in (two, torch.stack([two[0], -two[1]])) if two.is_floating_point() else (two,):
        alone = _logits(loop, batch, training)
        try:
            together = _logits(folded, batch, training)
        except Exception as error:  # whatever the network does with the images of two clients
            return f"{FAILS} ({type(error).__name__}: {' '.join(str(error).split())[:150]})"
        size, moved = float(alone.abs().max()), float((together - alone).abs().max())
        if not moved <= tolerance * max(size, 1e-6):
            return (
                f"it mixes the images of a batch: logits of up to {size:.2g} change by {moved:.2g} where another "
                "client's images are in it"
            )
    return None


def _repeats(engine: Engine, x: Tensor, training: bool) -> bool:
    """Whether passes that differ in torch's global stream alone give the same; not if they fail, as of one image."""
    try:
        return torch.equal(_logits(engine, x, training), _logits(engine, x, training, seed=1))
    except Exception:  # whatever a network does
        return False


def _logits(engine: Engine, x: Tensor, training: bool, seed: int = 0) -> Tensor:
    states = {key: value.clone() for key, value in expand(get_state(engine.model), len(x)).items()}
    with torch.no_grad(), seeded(seed, "fold check"):
        return engine.logits(states, x, training=training, streams=Streams.derived(0, "fold check", clients=(0, 1)))
