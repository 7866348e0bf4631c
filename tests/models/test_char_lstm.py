# SPDX-License-Identifier: Apache-2.0
"""The LSTM of characters against torch's, alone and stacked, and its adapters."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from perada.core.states import get_state, stack
from perada.engine import Engine
from perada.models.adapted import insert_adapter
from perada.models.backbones import build_backbone
from perada.models.char_lstm import CharLSTM


class Torchs(nn.Module):
    """The same model out of ``torch.nn.LSTM``."""

    def __init__(self, own):
        super().__init__()
        hidden = own.head.in_features
        self.embedding, self.head = own.embedding, own.head
        self.lstm = nn.LSTM(own.embedding.embedding_dim, hidden, len(own.layers), batch_first=True).double()
        for index, layer in enumerate(own.layers):
            for name, linear in (("ih", layer.input), ("hh", layer.recurrent)):
                getattr(self.lstm, f"weight_{name}_l{index}").data.copy_(linear.weight)
                getattr(self.lstm, f"bias_{name}_l{index}").data.copy_(linear.bias)

    def forward(self, tokens):
        return self.head(self.lstm(self.embedding(tokens))[0][:, -1])


def tokens(*shape):
    return torch.randint(0, 80, (*shape, 12), generator=torch.Generator().manual_seed(1))


def test_the_cells_are_torchs():
    network = CharLSTM(hidden=16).double()
    theirs, x = Torchs(network), tokens(5)
    torch.testing.assert_close(network(x), theirs(x), rtol=1e-12, atol=1e-12)
    network(x).square().sum().backward()
    ours = [layer.recurrent.weight.grad.clone() for layer in network.layers]
    theirs(x).square().sum().backward()
    for index, gradient in enumerate(ours):
        torch.testing.assert_close(gradient, getattr(theirs.lstm, f"weight_hh_l{index}").grad, rtol=1e-9, atol=1e-12)


def test_the_size_is_leafs():
    """Embedding 80·8; layers of 4·256·(8 + 256 + 2) and 4·256·(256 + 256 + 2) numbers; head 256·80 + 80."""
    model = build_backbone("char_lstm", 80, pretrained=False).model
    assert sum(p.numel() for p in model.parameters()) == 640 + 272_384 + 526_336 + 20_560


@pytest.mark.parametrize(
    ("adapter", "options", "trained"),
    [
        ("full", {}, 640 + 4 * 16 * (8 + 16 + 2) + 4 * 16 * (16 + 16 + 2) + 17 * 80),
        ("head", {}, 17 * 80),
        ("lora", {"r": 2}, 2 * (8 + 64 + 16 + 64) + 2 * 2 * (16 + 64) + 17 * 80),
    ],
)
def test_stacked_models_are_separate_ones(adapter, options, trained):
    states, models = [], []
    for seed in range(3):
        torch.manual_seed(seed)
        adapted = insert_adapter(build_backbone("char_lstm_16", 80, pretrained=False), adapter, **options)
        models.append(adapted.model.double())
        for parameter in (p for p in models[-1].parameters() if p.requires_grad):
            parameter.data += 0.1 * torch.randn_like(parameter)  # LoRA begins at zero
        states.append(get_state(models[-1]))
    model = models[0]
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == trained
    engine, x = Engine(model, "folded"), tokens(3, 4)
    leaves = {key: value.requires_grad_() for key, value in stack(states).items()}
    logits = engine.logits(leaves, x, training=True)
    logits.square().sum().backward()
    for client, state in enumerate(states):
        parameters = {key: value.requires_grad_() for key, value in state.items()}
        expected = functional_call(model, parameters, (x[client],))
        torch.testing.assert_close(logits[client], expected, rtol=1e-10, atol=1e-10)
        for (key, _), gradient in zip(
            parameters.items(), torch.autograd.grad(expected.square().sum(), list(parameters.values())), strict=True
        ):
            torch.testing.assert_close(leaves[key].grad[client], gradient, rtol=1e-9, atol=1e-10)


def test_what_the_lstm_cannot_have_is_rejected(tmp_path):
    with pytest.raises(FileNotFoundError, match="no pretrained weights for 'char_lstm'"):
        build_backbone("char_lstm")
    with pytest.raises(ValueError, match=r"'residual' does not fit .*'char_lstm_16'"):
        insert_adapter(build_backbone("char_lstm_16", pretrained=False), "residual")
    with pytest.raises(ValueError, match="'char_lstm_0' is not a timm model"):
        build_backbone("char_lstm_0", pretrained=False)


def test_weights_of_a_file_are_taken(tmp_path):
    model = CharLSTM(hidden=16)
    torch.save(model.state_dict(), tmp_path / "model.pth")
    loaded = build_backbone("char_lstm_16", 80, pretrained=str(tmp_path / "model.pth")).model
    assert torch.equal(loaded(tokens(2)), model(tokens(2)))


def test_only_an_embedding_of_the_tokens_given_has_a_twin():
    """Positions are looked up once for all rows: such a network runs client after client."""

    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.positions, self.head = nn.Embedding(80, 4), nn.Embedding(12, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.head((self.tokens(x) + self.positions(torch.arange(12))).mean(1))

    with pytest.warns(UserWarning, match=r"tokens \(Embedding\), positions"):
        assert Engine(Positions()).kind == "loop"
    assert Engine(CharLSTM(hidden=8)).kind == "folded"
