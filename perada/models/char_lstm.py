# SPDX-License-Identifier: Apache-2.0
"""A small character-level language model, as LEAF and Fed-ensemble train on Shakespeare."""

import re

import torch
from torch import Tensor, nn

VOCABULARY = 80
"""Number of characters of :class:`perada.data.Shakespeare`."""
EMBEDDING = 8
"""Features of an embedded character."""
LAYERS = 2
_NAME = re.compile(r"char_lstm(?:_([1-9]\d*))?")


class Characters(nn.Embedding):
    """An embedding of the tokens (B, L) of a batch.

    A class of its own, since only this embedding can run for many clients at once: the tokens of others, such as
    positions, may be the same for all rows of a batch, so that the rows could not be divided by client.
    """


class LSTMLayer(nn.Module):
    """One LSTM layer, computed step by step from two linear layers; equivalent to ``torch.nn.LSTM``.

    ``input`` has W_ih and b_ih, ``recurrent`` W_hh and b_hh. Their rows are the input, forget, cell and output gates.

    Linear layers run for many clients at once, have per-sample gradients, and can have LoRA. None of this works with
    torch's own layer, whose kernels take the weights of one model. Initial values are those of ``nn.Linear``.

    Args:
        width: Features of the input.
        hidden: Features of the hidden state.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.input = nn.Linear(width, 4 * hidden)
        self.recurrent = nn.Linear(hidden, 4 * hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map L steps (B, L, width) to the hidden states (B, L, hidden) after them."""
        # The inputs do not depend on the hidden state: one product for all steps.
        input_gates = self.input(x)
        h = input_gates.new_zeros(len(x), self.hidden)
        c = h
        outputs = []
        for step in input_gates.unbind(1):
            i, f, g, o = (step + self.recurrent(h)).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            outputs.append(h)
        return torch.stack(outputs, 1)


class CharLSTM(nn.Module):
    """An embedding of characters, two LSTM layers, and a linear head on the last hidden state.

    The model of LEAF for Shakespeare (Caldas et al., 2018) and of Fed-ensemble (Shi et al., 2021, section 7): embedding
    8, two layers of 256.

    Args:
        num_classes: Number of characters to choose the next one from.
        hidden: Features of the hidden states.
    """

    def __init__(self, num_classes: int = VOCABULARY, hidden: int = 256) -> None:
        super().__init__()
        self.embedding = Characters(VOCABULARY, EMBEDDING)
        widths = [EMBEDDING] + [hidden] * (LAYERS - 1)
        self.layers = nn.ModuleList([LSTMLayer(width, hidden) for width in widths])
        self.head = nn.Linear(hidden, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (B, num_classes) of the character after int64 tokens (B, L) from 0 to 79."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x[:, -1])
        return logits


def hidden_of(name: str) -> int | None:
    """Return the hidden size in the name of a CharLSTM; None for the name of any other backbone.

    >>> [hidden_of(name) for name in ("char_lstm", "char_lstm_64", "resnet18")]
    [256, 64, None]
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return int(match[1] or 256)
