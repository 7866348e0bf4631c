# SPDX-License-Identifier: Apache-2.0
"""A small character-level language model, as LEAF and Fed-ensemble train on Shakespeare."""

import re

import torch
from torch import Tensor, nn

VOCABULARY = 80
"""Number of characters of :class:`perada.data.Shakespeare`."""
EMBEDDING = 8
"""Number of features of an embedded character."""
LAYERS = 2
"""Number of LSTM layers."""
_NAME = re.compile(r"char_lstm(?:_([1-9]\d*))?")


class Characters(nn.Embedding):
    """An embedding of the tokens (B, L) of a batch.

    This is a separate class because only its inputs have a row for each row of the batch, so that they can be divided
    by client. Other embeddings, such as those of positions, may have the same input for all rows.
    """


class LSTMLayer(nn.Module):
    """One LSTM layer, computed step by step from two linear layers; equivalent to ``torch.nn.LSTM``.

    ``input`` has W_ih and b_ih, and ``recurrent`` has W_hh and b_hh, with rows in the order input, forget, cell and
    output gate. Initial values are those of ``nn.Linear``.

    Linear layers can be stacked for many clients, have per-sample gradients, and support LoRA. None of this is possible
    with torch's LSTM, whose kernels take the weights of a single model.

    Args:
        width: Number of features of the input.
        hidden: Number of features of the hidden state.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.input = nn.Linear(width, 4 * hidden)
        self.recurrent = nn.Linear(hidden, 4 * hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map inputs (B, L, width) of L steps to the hidden states (B, L, hidden) after each of them."""
        # This part of the gates does not depend on the hidden state, so it is one product for all steps.
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
        num_classes: Number of characters that are predicted.
        hidden: Number of features of the hidden states.
    """

    def __init__(self, num_classes: int = VOCABULARY, hidden: int = 256) -> None:
        super().__init__()
        self.embedding = Characters(VOCABULARY, EMBEDDING)
        widths = [EMBEDDING] + [hidden] * (LAYERS - 1)
        self.layers = nn.ModuleList([LSTMLayer(width, hidden) for width in widths])
        self.head = nn.Linear(hidden, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (B, num_classes) of the next character for tokens (B, L), int64 from 0 to 79."""
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
