# SPDX-License-Identifier: Apache-2.0
"""FedEx-LoRA and FLoRA against plain loops that average whole weights W + s·B·A."""

import copy
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel
from pytorch_lightning.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

import perada
from perada.algorithms import FedEnsemble, FedExLoRA, FFALoRA, FLoRA, HetLoRA, ServerStep, make_algorithm
from perada.core.states import Merged, get_state
from perada.data import Phase
from perada.models.adapted import find_tensor_names, insert_adapter
from perada.models.backbone import Backbone
from perada.privacy import ClientPrivacy, Privacy
from perada.server import Mean, Updates
from tests.options import sections

from .problems import BATCH, CLASSES, CLIENTS, CLIENTS_PER_ROUND, QUIET, SIZES, assert_equal, task

RANK = 2
ALPHA = 3
LR = 1.0
ROUNDS = 3
SCALE = ALPHA / RANK
LORA = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["conv", "layer"])
METHODS = ("fedex_lora", "flora")
LAYERS = ("conv", "layer")
HEAD = "fc.modules_to_save.default."


def network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        layers = {
            "conv": nn.Conv2d(1, 4, 3, bias=True),
            "bend": nn.Tanh(),
            "flat": nn.Flatten(),
            "layer": nn.Linear(64, 6, bias=False),
            "turn": nn.Tanh(),
            "fc": nn.Linear(6, CLASSES),
        }
        return nn.Sequential(OrderedDict(layers)).double()


def run(algorithm, net=None, **options):
    common = {"adapter": LORA, "rounds": ROUNDS, "clients_per_round": CLIENTS_PER_ROUND, "batch_size": BATCH}
    return perada.finetune(
        net or network(),
        task(),
        **sections(algorithm=algorithm, **common | {"local_epochs": 2, "lr_local": LR} | QUIET | options),
    )


def base(layer):
    return f"{layer}.base_layer.weight"


def factors(state, layer):
    return state[f"{layer}.lora_B.default.weight"], state[f"{layer}.lora_A.default.weight"]


def product(state, layer):
    up, down = factors(state, layer)
    return SCALE * (up.flatten(1) @ down.flatten(1)).view(len(up), *down.shape[1:])


def merged_weights(state):
    """The plain network's tensors that a state stands for."""
    weights = {layer: state[base(layer)] + product(state, layer) for layer in LAYERS}
    return weights | {name: state[HEAD + name] for name in ("weight", "bias")}


def logits(state, x):
    own = merged_weights(state)
    x = F.conv2d(x, own["conv"], network().conv.bias.detach()).tanh().flatten(1)
    return F.linear(F.linear(x, own["layer"]).tanh(), own["weight"], own["bias"])


def train_by_sgd(state, batches):
    """Plain SGD on the factors and the head, with W as it is."""
    state = {key: value.clone().requires_grad_("base_layer" not in key) for key, value in state.items()}
    leaves = [value for value in state.values() if value.requires_grad]
    for x, y in batches:
        gradients = torch.autograd.grad(F.cross_entropy(logits(state, x), y), leaves)
        with torch.no_grad():
            for leaf, gradient in zip(leaves, gradients, strict=True):
                leaf -= LR * gradient
    return {key: value.detach() for key, value in state.items()}


def batches_of_rounds(per_round):
    served = perada.FederatedDataModule(task(), batch_size=BATCH)
    served.configure_rounds(seed=0, clients_per_round=per_round, phases=[Phase(epochs=2)])
    for round in range(ROUNDS):
        plan = served.plan(round)
        client_batches = {client: [] for client in plan.clients}
        for batch in served.cohort_loader(plan):
            for row, (client, count) in enumerate(zip(batch.clients, batch.counts, strict=True)):
                client_batches[client].append((batch.x[row, :count], batch.y[row, :count]))
        yield client_batches


def weighted_mean(weights, values):
    return sum(weight * value for weight, value in zip(weights, values, strict=True))


def follow(method, state, per_round, by_samples, restarts):
    """The states after each round, and the plain networks that are the dense means."""
    for round, batches in enumerate(batches_of_rounds(per_round)):
        updates = [train_by_sgd(state, client_batches) for client_batches in batches.values()]
        sizes = [SIZES[m] if by_samples else 1 for m in batches]
        weights = [size / sum(sizes) for size in sizes]
        dense = {
            key: weighted_mean(weights, [merged_weights(update)[key] for update in updates])
            for key in merged_weights(state)
        }
        state = {key: weighted_mean(weights, [update[key] for update in updates]) for key in state}
        if method == "flora":
            state |= restarts[round]
        state |= {base(layer): dense[layer] - product(state, layer) for layer in LAYERS}
        yield state, dense


@pytest.mark.every(7)
@pytest.mark.parametrize("engine", ["folded", "loop"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("per_round", "weighting"), [(2, "uniform"), (3, "samples"), (len(SIZES), "uniform")], ids=["two", "three", "all"]
)
def test_the_global_model_is_the_mean_of_whole_weights(method, engine, per_round, weighting):
    options = {"engine": engine, "clients_per_round": per_round, "weighting": weighting}
    actual = [run(method, rounds=rounds, **options).state("global") for rounds in range(ROUNDS + 1)]
    restarts = [{key: value for key, value in state.items() if "lora_" in key} for state in actual[1:]]
    wanted = follow(method, actual[0], per_round, weighting == "samples", restarts)
    for state, (expected, dense) in zip(actual[1:], wanted, strict=True):
        for key in state.keys() | expected.keys():
            torch.testing.assert_close(state[key], expected[key], rtol=1e-9, atol=1e-9, msg=key)
        for key, value in merged_weights(state).items():
            torch.testing.assert_close(value, dense[key], rtol=1e-9, atol=1e-9, msg=key)
    assert all(float((actual[-1][base(layer)] - actual[0][base(layer)]).norm()) > 1e-3 for layer in LAYERS)


def test_flora_stacks_factors_of_several_ranks():
    """Clients of ranks 2 and 1 in turn: what is cut is zero, and has no gradient."""
    before, after = (run(HetLoRA(FLoRA(), [2, 1]), rounds=rounds).state("global") for rounds in (0, 1))
    updates = []
    for client, client_batches in next(batches_of_rounds(CLIENTS_PER_ROUND)).items():
        state = {key: value.clone() for key, value in before.items()}
        for layer in LAYERS if client % 2 else ():
            factors(state, layer)[1][1:] = 0
        updates.append(train_by_sgd(state, client_batches))
    for layer in LAYERS:
        dense = sum(merged_weights(update)[layer] for update in updates) / len(updates)
        torch.testing.assert_close(merged_weights(after)[layer], dense, rtol=1e-9, atol=1e-9)


def test_one_round_by_hand():
    """Two clients of weights 1/4 and 3/4, rank 1: of the products, mean(B)·mean(A) lacks 3/16 (B₁ − B₂)(A₁ − A₂)."""
    adapted = insert_adapter(
        Backbone(nn.Sequential(OrderedDict(layer=nn.Linear(2, 2), fc=nn.Linear(2, 2))), "two", "fc", None),
        LoraConfig(r=1, lora_alpha=2, target_modules=["layer"]),
        train_backbone="merged",
    )
    tensor_names = find_tensor_names(adapted.model, "fc")
    previous = get_state(adapted.model)
    (pair,) = tensor_names.factors
    up = torch.tensor([[[1.0], [2.0]], [[3.0], [-2.0]]])
    down = torch.tensor([[[1.0, 0.0]], [[5.0, 4.0]]])
    updates = Updates({pair.up: up, pair.down: down})
    weights = torch.tensor([0.25, 0.75], dtype=torch.float64)

    def after(algorithm):
        known = previous, updates, weights, {}, Mean(), None
        step = ServerStep(0, (0, 1), 2, tensor_names, 0, *known)
        return algorithm.server_step(step)

    state = after(FedExLoRA())
    assert torch.equal(state[pair.up], torch.tensor([[2.5], [-1.0]]))
    assert torch.equal(state[pair.down], torch.tensor([[4.0, 3.0]]))
    lacks = 2 * 3 / 16 * torch.tensor([[8.0, 8.0], [-16.0, -16.0]])  # (−2, 4)ᵀ (−4, −4)
    torch.testing.assert_close(state[pair.base], previous[pair.base] + lacks)
    state = after(FLoRA())
    merged = 2 * torch.tensor([[11.5, 9.0], [-7.0, -6.0]])  # (1, 2)ᵀ (1, 0) / 4 + 3 (3, −2)ᵀ (5, 4) / 4
    torch.testing.assert_close(state[pair.base], previous[pair.base] + merged)
    assert not state[pair.up].any()


def test_factors_begin_anew_as_peft_draws_them():
    """A is uniform within ±1/√n; it is another one in each round and of each layer, and B is zero."""
    wide = LoraConfig(r=64, target_modules=["conv", "layer"])
    one, two = (run("flora", rounds=rounds, adapter=wide, lr_local=0.0).state("global") for rounds in (1, 2))
    for layer, inputs in (("conv", 9), ("layer", 64)):
        drawn = [factors(state, layer)[1] * inputs**0.5 for state in (one, two)]
        assert not any(factors(state, layer)[0].any() for state in (one, two))
        for value in drawn:
            assert 0.95 < float(value.abs().max()) <= 1
            assert abs(float(value.mean())) < 0.1
            assert abs(float(value.square().mean()) - 1 / 3) < 0.05
        assert not torch.equal(*drawn)
    assert torch.equal(one[base("layer")], two[base("layer")])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["folded", "loop"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning")
def test_a_run_is_resumed_to_the_last_bit(method, engine, tmp_path):
    def saved(rounds, **options):
        checkpoint = {"callbacks": [ModelCheckpoint(tmp_path, "saved")], "enable_checkpointing": True}
        return run(method, rounds=rounds, engine=engine, momentum=0.5, **checkpoint | options)

    whole = run(method, engine=engine, momentum=0.5)
    saved(2)
    again = saved(ROUNDS, ckpt_path=str(tmp_path / "saved.ckpt"))
    assert_equal(again.state("global"), whole.state("global"))
    assert again.metrics == whole.metrics


@pytest.mark.every(2)
@pytest.mark.parametrize("method", METHODS)
def test_clients_share_one_copy_of_the_weights(method, monkeypatch):
    seen = []

    def step(self, step):
        seen.extend((step.states["local"][base(layer)], step.received[base(layer)]) for layer in LAYERS)
        step.descend("local", step.loss("local"))

    monkeypatch.setattr(type(make_algorithm(method)), "client_step", step)
    result = run(method, rounds=2, clients_per_chunk=2)
    assert seen
    for own, received in seen:
        assert own.data_ptr() == received.data_ptr()
        assert len(own) == 1 or own.stride(0) == 0
        assert not own.requires_grad
    numbers = RANK * (4 + 9) + RANK * (6 + 64) + CLASSES * 7
    weights = 4 * 9 + 6 * 64
    for round in result.metrics["rounds"]:
        assert round["params/trained"] == round["params/sent"] == numbers
        assert round["comm/up_mb"] == pytest.approx(CLIENTS_PER_ROUND * 8 * numbers / 1e6)
        assert round["comm/down_mb"] == pytest.approx(CLIENTS_PER_ROUND * 8 * (numbers + weights) / 1e6)


@pytest.mark.every(2)
@pytest.mark.parametrize("method", METHODS)
def test_plain_peft_loads_what_was_merged(method, tmp_path):
    """The backbone of the file beside the adapter, and the adapter on it; and the run is read again."""
    actual = run(method)
    x = task().public[:][0]
    actual.export(tmp_path)
    for folder, expected in {"global": actual.global_model(), "client_1": actual.personal(1)}.items():
        plain = network()
        plain.load_state_dict(load_file(tmp_path / folder / "backbone.safetensors"))
        model = PeftModel.from_pretrained(plain, str(tmp_path / folder)).eval()
        torch.testing.assert_close(model(x), expected(x), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(model(x), logits(actual.state("global"), x), rtol=1e-9, atol=1e-9)
        without = PeftModel.from_pretrained(network(), str(tmp_path / folder)).eval()
        assert float((without(x) - expected(x)).detach().abs().max()) > 1e-4
    torch.testing.assert_close(actual.merged(None)(x), actual.global_model()(x), rtol=1e-9, atol=1e-9)
    again = perada.Run.load(tmp_path, backbone=network())
    assert_equal(again.state("global"), actual.state("global"))
    assert torch.equal(again.global_model()(x), actual.global_model()(x))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_checkpoint_is_read_without_the_data(method, tmp_path):
    callback = ModelCheckpoint(tmp_path, "saved")
    options = {"r": RANK, "target_modules": list(LAYERS)}
    result = run(method, adapter="lora", adapter_options=options, callbacks=[callback], enable_checkpointing=True)
    again = perada.Run.load(tmp_path / "saved.ckpt", backbone=network())
    assert_equal(again.state("global"), result.state("global"))


@pytest.mark.every(4)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("engine", ["folded", "loop"])
@pytest.mark.filterwarnings("ignore:.*(delta=|secure_rng|test mode|repeat).*:UserWarning")
def test_noise_of_images_is_that_of_the_frozen_weights(method, engine):
    """The first round is one of FedAvg on frozen weights, but for what is merged; the next ones are finite."""
    privacy = Privacy(noise_multiplier=0.7, max_norm=0.5, delta=1e-3, secure_rng=False)
    options = {"privacy": privacy, "engine": engine}
    plain, result = (run(name, rounds=1, **options).state("global") for name in ("fedavg", method))
    for key, value in plain.items():
        if "lora_" not in key or method == "fedex_lora":
            torch.testing.assert_close(result[key], value, rtol=1e-12, atol=1e-12)
    later = run(method, **options).state("global")
    assert all(value.isfinite().all() for value in later.values())
    assert not torch.equal(later[base("layer")], result[base("layer")])


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_each_of_several_global_models_has_its_weights(method):
    """With one mode this is the method; with two, folding is the loop."""
    alone = run(FedEnsemble(make_algorithm(method), modes=1)).states("global")
    assert_equal(alone[0], run(method).state("global"))
    ensemble = FedEnsemble(make_algorithm(method), modes=2)
    result = [run(ensemble, engine=engine, clients_per_round=4).states("global") for engine in ("folded", "loop")]
    for one, other in zip(*result, strict=True):
        for key in one:
            torch.testing.assert_close(one[key], other[key], rtol=1e-9, atol=1e-9)
    assert not torch.equal(result[0][0][base("layer")], result[0][1][base("layer")])


@pytest.mark.slow
def test_a_client_that_joins_trains_factors_on_merged_weights():
    def single(data):
        x, y = data[:]
        return TensorDataset(x.float(), y)

    data = perada.FederatedData([single(client) for client in task().train], num_classes=CLASSES)
    options = {"adapter": LORA, "rounds": 2, "batch_size": BATCH, "lr_local": LR} | QUIET
    result = perada.finetune(network().float(), data, **sections(algorithm="fedex_lora", **options))
    alone = perada.FederatedData([single(task().train[0])], num_classes=CLASSES)
    joined = perada.personalize(result, alone, "late", accelerator="cpu")
    state = joined.state("personal", len(CLIENTS))
    before = result.state("global")
    for layer in LAYERS:
        assert torch.equal(state[base(layer)], before[base(layer)])
        assert not torch.equal(factors(state, layer)[0], factors(before, layer)[0])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.filterwarnings("ignore:LoRA adapter added to ConvNd layer with groups:UserWarning")
def test_what_cannot_be_merged_is_rejected(method):
    name = type(make_algorithm(method)).__name__
    for options, message in (
        ({"adapter": "head"}, f"algorithm {name} requires LoRA factors A and B.* adapter='lora'"),
        ({"train_backbone": True}, f"algorithm {name} cannot merge 'conv.lora_B.* without train_backbone"),
        ({"adapter": "dual_lora"}, f"algorithm {name} cannot merge .*shared_B.*choose adapter='lora'"),
        ({"server_rule": "median"}, f"{name} does not support server_rule=Median: it merges the exact mean"),
        (
            {"client_privacy": ClientPrivacy(noise_multiplier=1.0, max_norm=1.0, delta=1e-3)},
            f"client_privacy does not support {name}: it merges the products",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            run(method, rounds=1, **options)
    groups = nn.Sequential(OrderedDict(network().named_children()))
    groups.conv = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 1, groups=2)).double()
    with pytest.raises(ValueError, match=r"merge 'conv\.1\.lora_B\.default\.weight'"):
        run(method, groups, adapter=LoraConfig(r=2, target_modules=["conv.1", "layer"]), rounds=1)
    with pytest.raises(ValueError, match=f"base={name} already"):
        FFALoRA(make_algorithm(method))


def test_merged_weights_are_in_states_and_not_trained():
    adapted = insert_adapter(Backbone(network().float(), "net", "fc", None), LORA, train_backbone="merged")
    tensor_names = find_tensor_names(adapted.model, "fc")
    assert tensor_names.merged == {base(layer) for layer in LAYERS} == set(adapted.beside)
    assert tensor_names.merged < set(tensor_names.keys)
    assert not tensor_names.merged & set(tensor_names.parameters)
    copied = copy.deepcopy(adapted.model).to(memory_format=torch.channels_last)
    assert isinstance(copied.conv.base_layer.weight, Merged)
