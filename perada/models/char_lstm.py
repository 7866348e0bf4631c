# SPDX-License-Identifier: Apache-2.0
"""A small language model of characters, as LEAF and Fed-ensemble train on Shakespeare."""

import re

import torch
from torch import Tensor, nn

VOCABULARY = 80
"""Characters of :class:`perada.data.Shakespeare`."""
EMBEDDING = 8
LAYERS = 2
_NAME = re.compile(r"char_lstm(?:_([1-9]\d*))?")


class Characters(nn.Embedding):
    """An embedding of the tokens that the model is given, (B, L).

    It has a stacked twin. Other embeddings have none: what they look up, such as positions, may be the same for all
    rows, and could not be divided by client.
    """


class LSTMLayer(nn.Module):
    """One LSTM layer, computed cell by cell out of two linear layers: what ``torch.nn.LSTM`` computes.

    ``input`` is W_ih with b_ih, ``recurrent`` W_hh with b_hh; their rows are the input, forget, cell and output gates.
    Linear layers have a stacked twin, per-image gradients and LoRA, and vectorise over clients on every device. torch's
    own layer has none of these: its kernels take one model's weights. The initial values are those of ``nn.Linear``.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.input, self.recurrent = nn.Linear(width, 4 * hidden), nn.Linear(hidden, 4 * hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states (B, L, hidden) after each of L steps of (B, L, width)."""
        gates = self.input(x)
        h = c = gates.new_zeros(len(x), self.hidden)
        outputs = []
        for step in gates.unbind(1):
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
        num_classes: Characters that may follow.
        hidden: Width of the LSTM layers.
    """

    def __init__(self, num_classes: int = VOCABULARY, hidden: int = 256) -> None:
        super().__init__()
        self.embedding = Characters(VOCABULARY, EMBEDDING)
        self.layers = nn.ModuleList([LSTMLayer(hidden if layer else EMBEDDING, hidden) for layer in range(LAYERS)])
        self.head = nn.Linear(hidden, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, num_classes) of what follows int64 tokens (B, L) from 0 to 79."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x[:, -1])
        return logits


def hidden_of(name: str) -> int | None:
    """Width that the name of a backbone asks for; None if it names another backbone.

    >>> [hidden_of(name) for name in ("char_lstm", "char_lstm_64", "resnet18")]
    [256, 64, None]
    """
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[1] or 256)
