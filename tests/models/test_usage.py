# SPDX-License-Identifier: Apache-2.0
"""Networks that do not use what is trained in them are rejected; those that use it in unusual ways are right."""

import contextlib
import copy

import peft
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import perada
from perada.core.states import get_state, trained_keys
from perada.engine.engine import Engine
from perada.engine.fold_check import check_fold
from perada.models.adapted import insert_adapter
from perada.models.backbones import build_backbone
from perada.models.usage import check_usage
from tests.options import sections

IMAGES = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(5))


class Network(nn.Module):
    """Three layers, of which two are called in ways that subclasses change."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.fc1, self.fc2 = nn.Conv2d(3, 8, 4, 4), nn.Linear(32, 16), nn.Linear(16, 16)
        self.add_layers()
        self.head = nn.Linear(16, 3)

    def add_layers(self):
        pass

    def first(self, x):
        return self.fc1(x)

    def second(self, h):
        return self.fc2(h)

    def forward(self, x):
        h = self.first(self.stem(x).relu().flatten(1)).relu()
        return self.head(self.second(h).relu())


class ReadsWeights(Network):
    def first(self, x):
        return F.linear(x, self.fc1.weight, self.fc1.bias)


class ReadsWeightsInEvaluation(Network):
    def first(self, x):
        return self.fc1(x) if self.training else F.linear(x, self.fc1.weight, self.fc1.bias)


class ReadsWeightsWithoutGradients(Network):
    def first(self, x):
        return self.fc1(x) if torch.is_grad_enabled() else F.linear(x, self.fc1.weight, self.fc1.bias)


class ReadsWeightsInInference(Network):
    def first(self, x):
        return F.linear(x, self.fc1.weight, self.fc1.bias) if torch.is_inference_mode_enabled() else self.fc1(x)


class HoldsWeights(Network):
    def add_layers(self):
        self.held = [self.fc1.weight]

    def first(self, x):
        return F.linear(x, self.held[0], self.fc1.bias)


class NeverCalls(Network):
    def add_layers(self):
        self.spare = nn.Linear(16, 16)


class CutsTheGraph(Network):
    def second(self, h):
        return h + self.fc2(h).detach()


class Recomputes(Network):
    def second(self, h):
        return checkpoint(self.fc2, h, use_reentrant=False)


class RecomputesInReentrantWay(Network):
    def second(self, h):
        return checkpoint(self.fc2, h, use_reentrant=True)


class KeepsWeights(Network):
    """In evaluation mode, what it made of the first weights that it saw."""

    def add_layers(self):
        self.made = []

    def second(self, h):
        if self.training:
            self.made.clear()
            return self.fc2(h)
        if not self.made:
            self.made.append(self.fc2(torch.eye(16)))
        return h @ self.made[0]


REJECTED = [
    (ReadsWeights, "lora", "no gradient reaches 'fc1': the network reads"),
    (ReadsWeightsInEvaluation, "lora", "the network uses 'fc1' in training but not in evaluation mode"),
    (
        ReadsWeightsWithoutGradients,
        "lora",
        r"in evaluation mode logits .* without gradients, where it does not call fc1",
    ),
    (ReadsWeightsInInference, "lora", "in evaluation mode logits .* without gradients"),
    (HoldsWeights, "lora", "no gradient reaches 'fc1'"),
    (HoldsWeights, "full", "gradients of 'fc1' are not computed at a client's weights"),
    (NeverCalls, "lora", "no gradient reaches 'spare'"),
    (CutsTheGraph, "lora", "no gradient reaches 'fc2'"),
    (
        Recomputes,
        "lora",
        r"gradients of .*'fc2' are not computed at a client's weights: .*turn gradient checkpointing off",
    ),
    (Recomputes, "full", r"gradients of .* are not computed at a client's weights: .*turn gradient checkpointing off"),
    (KeepsWeights, "lora", "the network retains results of an earlier pass"),
    (KeepsWeights, "full", "the network retains results of an earlier pass"),
]


def adapted(network, adapter="lora"):
    return insert_adapter(build_backbone(network, 3), adapter)


@pytest.mark.every(4)
@pytest.mark.parametrize(("kind", "adapter", "message"), REJECTED)
def test_why_a_network_does_not_use_its_adapter(kind, adapter, message):
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(check_usage(adapted(kind(), adapter), IMAGES).problem)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_what_cannot_be_differentiated_is_rejected():
    problem = check_usage(adapted(RecomputesInReentrantWay()), IMAGES).problem
    assert problem is not None
    assert problem.startswith("it cannot be trained: RuntimeError: When use_reentrant=True")


def data(seed=1):
    random = torch.Generator().manual_seed(seed)

    def part(n):
        y = torch.arange(n) % 3
        return TensorDataset(0.3 * torch.randn(n, 3, 8, 8, generator=random) + y.view(-1, 1, 1, 1), y)

    return perada.FederatedData([part(8), part(6)], [part(3), part(3)])


def finetune(network, adapter="lora", **options):
    common = {"algorithm": "fedavg", "rounds": 1, "local_steps": 2, "batch_size": 4, "lr_local": 0.2}
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    return perada.finetune(network, data(), **sections(adapter=adapter, **common | quiet | options))


@pytest.mark.parametrize(
    "options",
    [{}, {"engine": "loop"}, {"client_privacy": perada.ClientPrivacy(max_norm=1.0, noise_multiplier=1.0, delta=0.1)}],
)
def test_it_is_rejected_before_training_with_a_remedy(options):
    with pytest.raises(ValueError, match=r"^the adapter \(LoraConfig\) .*'ReadsWeights'") as e:
        finetune(ReadsWeights(), **options)
    assert "name other layers in target_modules" in str(e.value)
    assert "\n" not in str(e.value)


def test_tensors_of_the_backbone_that_nothing_uses_are_named():
    with pytest.warns(
        UserWarning,
        match=r"'NeverCalls'.*spare\.weight, spare\.bias",
    ):
        finetune(NeverCalls(), "full")


def test_checking_leaves_no_trace():
    model = adapted(Network())
    before, stream = copy.deepcopy(model.model.state_dict()), torch.get_rng_state()
    assert check_usage(model, IMAGES).problem is None
    assert torch.equal(torch.get_rng_state(), stream)
    after = model.model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert all(parameter.grad is None for parameter in model.model.parameters())


class CallsTwice(Network):
    def second(self, h):
        return self.fc2(self.fc2(h).relu())


class ReadsSettings(Network):
    """Pads by itself, as the MobileNets of transformers do after TensorFlow's."""

    def forward(self, x):
        size = [self.stem.kernel_size[0] - self.stem.stride[0] + self.stem.padding[0]]
        x = F.pad(x, size * 4) if self.stem.groups == 1 and self.stem.dilation == (1, 1) else x
        assert (self.stem.in_channels, self.stem.out_channels) == (3, 8)
        assert (self.fc1.in_features, self.fc1.out_features) == (32, 16)
        return super().forward(x)


class Routes(Network):
    """A layer that only some images reach."""

    def add_layers(self):
        self.expert = nn.Linear(16, 16)

    def second(self, h):
        chosen = (h.sum(1) * 100).long() % 2 == 0
        return self.fc2(h) + torch.where(chosen.unsqueeze(1), self.expert(h), 0) if chosen.any() else self.fc2(h)


class DropsAtRandom(Network):
    def add_layers(self):
        self.drop = nn.Dropout(0.5)

    def second(self, h):
        return self.drop(F.dropout(self.fc2(h), 0.3, self.training))


class AlwaysRandom(Network):
    def second(self, h):
        return F.dropout(self.fc2(h), 0.5, True)


@pytest.mark.every(4)
@pytest.mark.parametrize("kind", [Network, CallsTwice, ReadsSettings, Routes, DropsAtRandom, AlwaysRandom])
@pytest.mark.parametrize("adapter", ["lora", "full"])
def test_what_is_used_is_accepted(kind, adapter):
    usage = check_usage(adapted(kind(), adapter), IMAGES)
    assert (usage.problem, usage.unused) == (None, ())


class SameLayer(Network):
    """One layer under two names."""

    def add_layers(self):
        self.again = self.fc2

    def second(self, h):
        return self.again(self.fc2(h).relu())


class SameWeight(Network):
    """Two layers with one weight."""

    def add_layers(self):
        self.again = nn.Linear(16, 16)
        self.again.weight = self.fc2.weight

    def second(self, h):
        return self.again(self.fc2(h).relu())


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, h):
        return h + self.linear(h).relu()


class SameBlock(Network):
    """One block that runs three times."""

    def add_layers(self):
        self.blocks = nn.ModuleList([Residual()] * 3)

    def second(self, h):
        for block in self.blocks:
            h = block(h)
        return self.fc2(h)


TIED = [SameLayer, SameWeight, SameBlock]


@pytest.mark.parametrize("kind", TIED)
def test_merged_tied_layers_compute_what_the_personal_model_does(kind):
    run = finetune(kind(), lr_local=1.0)
    with torch.no_grad():
        expected, merged = run.global_model()(IMAGES), run.merged(None)(IMAGES)
        initial = kind().eval()(IMAGES)
    assert float((expected - initial).abs().max()) > 0.05  # the adapter does something
    assert torch.allclose(merged, expected, atol=1e-5)


@pytest.mark.every(4)
@pytest.mark.parametrize("kind", TIED)
@pytest.mark.parametrize("engine", ["folded", "loop"])
def test_trained_tied_layers_are_those_of_plain_sgd(kind, engine):
    """Full fine-tuning of one client in one step, against torch's own."""
    network = kind()
    run = finetune(network, "full", engine=engine, local_steps=1, batch_size="full", lr_local=0.1)
    steps = []
    for part in data().train:
        x, y = part.tensors
        plain = copy.deepcopy(network)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        F.cross_entropy(plain(x), y).backward()
        optimizer.step()
        steps.append(plain.state_dict())
    state = run.state("global")
    assert state.keys() == set(dict(network.named_parameters()))
    for key, value in state.items():
        assert torch.allclose(value, (steps[0][key] + steps[1][key]) / 2, atol=1e-6)


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", [*TIED, Network])
@pytest.mark.parametrize("engine", ["folded", "loop"])
def test_an_engine_leaves_tied_parameters_in_their_places(kind, engine):
    model = adapted(kind(), "full").model
    before = {name: parameter for name, parameter in model.named_parameters(remove_duplicate=False)}
    states = {key: torch.stack([value, value + 1]) for key, value in get_state(model).items()}
    Engine(model, engine).logits(states, torch.stack([IMAGES, IMAGES]))
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is parameter for name, parameter in before.items())


def test_a_tied_parameter_is_in_a_state_once():
    assert trained_keys(adapted(SameWeight(), "full").model).count("fc2.weight") == 1
    assert "again.weight" not in trained_keys(adapted(SameWeight(), "full").model)


@pytest.mark.parametrize("kind", [SameLayer, SameWeight])
def test_a_server_that_merges_leaves_the_other_place_alone(kind):
    run = finetune(kind(), peft.LoraConfig(target_modules=["fc2"]), algorithm="fedex_lora", lr_local=1.0)
    states = dict(run.global_model().named_parameters(remove_duplicate=False))
    assert torch.equal(states["again.weight"], dict(kind().named_parameters(remove_duplicate=False))["again.weight"])
    assert not torch.equal(states["fc2.base_layer.weight"], states["again.weight"])


class ReadsAndCalls(Network):
    def second(self, h):
        return self.fc2(h) + F.linear(h, self.fc2.weight.t())


def test_what_would_be_merged_wrongly_is_rejected():
    with pytest.warns(UserWarning, match=r"adapter \(LoraConfig\) .*merged"):
        run = finetune(ReadsAndCalls())
    with pytest.raises(NotImplementedError, match=r"merged .*reads the layer's weights"):
        run.merged(None)


class Encoder(nn.Module):
    """A network around torch's own encoder, whose fast path reads the weights of its layers."""

    def __init__(self, nested=False, **options):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.1, **options)
        self.embed = nn.Linear(48, 16)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)
        self.head, self.nested = nn.Linear(16, 3), nested

    def forward(self, x):
        tokens = x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).reshape(len(x), 4, 48)
        padding = torch.zeros(len(x), 4, dtype=torch.bool) if self.nested else None
        if padding is not None:
            padding[:, 3] = True
        return self.head(self.encoder(self.embed(tokens), src_key_padding_mask=padding)[:, :3].mean(1))


ENCODERS = [{}, {"norm_first": True}, {"nested": True}, {"activation": "gelu"}]
ADAPTERS = [
    "lora",
    "ia3",
    "full",
    peft.LoraConfig(target_modules=["linear1"], modules_to_save=["encoder.layers.1.linear2"]),
    peft.LNTuningConfig(target_modules=["norm1", "norm2"]),
]


@pytest.mark.filterwarnings("ignore:engine='auto' falls back to the per-client loop")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("options", ENCODERS)
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.every(12)
def test_an_encoder_of_torch_predicts_with_its_adapter(options, adapter):
    run = finetune(Encoder(**options), adapter, lr_local=0.5)
    model = run.global_model()
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        expected = model(IMAGES).detach()
        merged = run.merged(None)(IMAGES)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.allclose(model(IMAGES), expected, atol=1e-5)
    assert torch.allclose(run.predict(list(IMAGES)).probabilities, expected.softmax(-1), atol=1e-5)
    assert torch.allclose(merged, expected, atol=1e-5)


class InReverse(nn.Module):
    """Evaluation only: rows in another order, which is another client's in a fold."""

    def forward(self, h):
        return h if self.training else h.flip(0)


def test_what_only_evaluation_mixes_takes_the_loop():
    network = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), InReverse(), nn.Linear(8, 3))
    found = check_fold(adapted(network, "full").model, torch.stack([IMAGES, IMAGES + 1]))
    assert found is not None
    assert found.startswith("it mixes the images of a batch")


class OneClientsWeights(nn.Linear):
    """A layer of one's own that, folded, would have the first client's weights for all."""


def test_states_are_told_apart_in_the_trial_of_the_fold(monkeypatch):
    from perada.engine import fold
    from perada.engine.stacked_layers import StackedLinear

    class FirstOnly(StackedLinear):
        def forward(self, x_R):
            return F.linear(x_R, self.weight[0], self.bias[0])

    monkeypatch.setitem(fold.TWINS, OneClientsWeights, FirstOnly)
    network = nn.Sequential(nn.Flatten(), OneClientsWeights(192, 8), nn.ReLU(), nn.Linear(8, 3))
    assert check_fold(adapted(network, "full").model, torch.stack([IMAGES, IMAGES])) is not None


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "test_resnet"])
def test_gradient_checkpointing_of_timm_is_turned_off(name):
    network = timm.create_model(name, num_classes=3)
    network.set_grad_checkpointing(True)
    with pytest.warns(UserWarning, match=r"gradient checkpointing.*'\w+'"):
        backbone = build_backbone(network, 3)
    assert backbone.model.grad_checkpointing is False
    assert network.grad_checkpointing is True  # the caller's own stays as it is


class Grouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.mix, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=4), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.mix(self.stem(x).relu()).relu().mean((2, 3)))


@pytest.mark.filterwarnings("ignore:LoRA adapter added to ConvNd layer with groups > 1")
@pytest.mark.parametrize(
    "adapter",
    [peft.LoraConfig(target_modules=["mix"]), peft.OFTConfig(target_modules=["stem"], oft_block_size=0, r=1)],
)
def test_what_cannot_be_merged_is_one_line_with_a_remedy(adapter):
    with pytest.warns(UserWarning, match="merged") if isinstance(adapter, peft.OFTConfig) else contextlib.nullcontext():
        run = finetune(Grouped(), adapter, engine="loop")
    with pytest.raises(NotImplementedError, match=r"^the adapter \(\w+\) .*merged"):
        run.merged(0)
