# SPDX-License-Identifier: Apache-2.0
"""The folded engine against the loop over clients, and both against the plain model."""

import copy

import peft
import pytest
import timm
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.data import TensorDataset
from transformers import ViTConfig, ViTForImageClassification

import perada
from perada.adapters import DualLoraConfig
from perada.api import make_trainer
from perada.core.seeding import generator
from perada.core.states import expand, get_state, parameter_keys, stack, train_mode
from perada.engine import Engine
from perada.models.adapted import insert_adapter
from perada.models.backbones import build_backbone
from perada.server import Distillation
from tests.options import sections
from tests.rejections import rejects

CLIENTS = 3
ROWS = 5
COUNTS = (5, 3, 4)


def backbone(name, tmp_path):
    if name == "hf_vit":
        config = ViTConfig(
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=24,
            image_size=16,
            patch_size=4,
            num_labels=4,
        )
        ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
        return build_backbone(f"hf:{tmp_path / 'vit'}", 4, pretrained=str(tmp_path / "vit")), 16
    if name == "vit":
        return build_backbone("test_vit", 4, pretrained=False, image_size=32), 32
    if name == "batch_norm":
        layers = [
            nn.Conv2d(3, 6, 3),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(6, 4),
        ]
        return build_backbone(nn.Sequential(*layers), 4), 16
    if name == "module":
        model = nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)
        )
        return build_backbone(model, 4), 16
    model = timm.create_model("resnet18" if name == "resnet18" else "test_resnet", num_classes=4, zero_init_last=False)
    built = build_backbone(model, 4)
    return built, 32


CASES = [
    ("resnet", "residual"),
    pytest.param("resnet18", "residual", marks=pytest.mark.slow),
    ("resnet", "lora"),
    ("resnet", "gated"),
    ("resnet", "head"),
    ("resnet", "bias_norm"),
    ("resnet", "full"),
    ("vit", "lora"),
    ("vit", "gated"),
    ("vit", "bottleneck"),
    ("vit", "prompt"),
    ("vit", "bias_norm"),
    ("vit", "full"),
    ("hf_vit", "lora"),
    ("hf_vit", "bottleneck"),
    ("hf_vit", "prompt"),
    ("hf_vit", "full"),
    ("module", "full"),
    ("module", "bias_norm"),
    ("vit", "ia3"),
    ("resnet", "ia3"),
    ("hf_vit", "ia3"),
    ("vit", "vera"),
    ("vit", "dora"),
    ("resnet", "dora"),
]
CONFIGS = {"gated": DualLoraConfig(gate=True), "vera": peft.VeraConfig(r=8), "dora": peft.LoraConfig(use_dora=True)}


def random_states(model, clients):
    """Different states with tensors that make every layer count."""
    states = []
    for client in range(clients):
        state = get_state(model)
        random = generator(0, "test", client)
        for key, value in state.items():
            if value.is_floating_point():
                noise = torch.randn(value.shape, generator=random)
                state[key] = value + (0.1 * noise.abs() if "running_var" in key else 0.1 * noise)
        states.append(state)
    return states


def leaves(model, states):
    trained = set(parameter_keys(model))
    return {k: v.clone().requires_grad_(k in trained) for k, v in stack(states).items()}


@pytest.mark.parametrize(("name", "adapter"), CASES)
@pytest.mark.every(2)
def test_folded_equals_plain_model_run_client_by_client(name, adapter, tmp_path):
    built, size = backbone(name, tmp_path)
    options = {"dropout": 0.0} if adapter == "residual" else {}
    # In double precision: with so few images the statistics of BatchNorm amplify rounding errors.
    model = insert_adapter(built, CONFIGS.get(adapter, adapter), **options).model.double()
    states = random_states(model, CLIENTS)
    x = torch.randn(CLIENTS, ROWS, 3, size, size, generator=generator(0, "x"), dtype=torch.float64)
    engine = Engine(model, "folded")
    stacked = leaves(model, states)
    logits = engine.logits(stacked, x, training=True, counts=COUNTS)
    real = torch.arange(ROWS) < torch.tensor(COUNTS)[:, None]
    logits[real].square().sum().backward()
    for client, count in enumerate(COUNTS):
        plain = leaves(model, [states[client]])
        train_mode(model)
        alone = {k: v[0] for k, v in plain.items()}
        expected = functional_call(model, alone, (x[client, :count],))
        torch.testing.assert_close(logits[client, :count], expected, rtol=1e-8, atol=1e-9)
        expected.square().sum().backward()
        largest = max(value.grad.norm() for value in plain.values() if value.grad is not None)
        for key in plain:
            if stacked[key].grad is not None:
                gradient = plain[key].grad[0]
                error = (stacked[key].grad[client] - gradient).norm()
                # Attention does not depend on the keys' bias: its gradient is rounding error of the others.
                assert error < 1e-7 * gradient.norm() + 1e-12 * largest, (client, key, error / gradient.norm())
            else:
                torch.testing.assert_close(stacked[key][client], plain[key][0], rtol=1e-8, atol=1e-9)


def separate_datasets(size, classes=4, sizes=(12, 6, 18), dtype=torch.float32):
    random = generator(0, "data")

    def part(n):
        return TensorDataset(torch.randn(n, 3, size, size, generator=random, dtype=dtype), torch.arange(n) % classes)

    public = TensorDataset(torch.randn(6, 3, size, size, generator=random, dtype=dtype))
    return perada.FederatedData([part(n) for n in sizes], public=public, num_classes=classes)


def finetune(model, size, adapter, engine, rounds=2, **options):
    common = {
        "algorithm": "perada",
        "batch_size": 8,
        "lr_personal": 0.002,
        "lr_local": 0.002,
        "distill_steps": 2,
        "distill_batch_size": 4,
        "distill_lr": 0.002,
        "distill_optimizer": "sgd",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "accelerator": "cpu",
    }
    options = common | {"data": separate_datasets(size)} | options
    return perada.finetune(model, **sections(adapter=adapter, engine=engine, rounds=rounds, **options))


def roles(run):
    return [run.state("global"), *(run.state("personal", client) for client in range(run.num_clients))]


def difference(left, right, keys):
    """Norm of the difference of two states, relative to the first one's."""
    norm = sum(left[key].double().square().sum() for key in keys).sqrt()
    return float(sum((left[key].double() - right[key].double()).square().sum() for key in keys).sqrt() / norm)


@pytest.mark.parametrize(
    ("name", "adapter", "options"),
    [
        ("resnet", "residual", {"dropout": 0.3, "init_std": 0.05}),
        pytest.param("resnet18", "residual", {"dropout": 0.3, "init_std": 0.05}, marks=pytest.mark.slow),
        pytest.param("resnet", "head", {}, marks=pytest.mark.slow),
        pytest.param("resnet", "full", {}, marks=pytest.mark.slow),
        pytest.param("vit", "lora", {"lora_dropout": 0.2}, marks=pytest.mark.slow),
        pytest.param("vit", "bottleneck", {"dropout": 0.2}, marks=pytest.mark.slow),
        pytest.param("vit", "full", {}, marks=pytest.mark.slow),
        ("hf_vit", "lora", {}),
        pytest.param("vit", "ia3", {}, marks=pytest.mark.slow),
        pytest.param("vit", peft.VeraConfig(r=8, vera_dropout=0.2), {}, marks=pytest.mark.slow),
        pytest.param("resnet", peft.LoraConfig(use_dora=True, lora_dropout=0.2), {}, marks=pytest.mark.slow),
    ],
)
def test_two_rounds_folded_equal_two_rounds_of_the_loop(name, adapter, options, tmp_path):
    """In single precision; dropout is on, both engines drawing from the same streams.

    Small rates and eight images or six: with higher rates and fewer images training itself is chaotic (it multiplies
    a rounding error in a BatchNorm of three values by 10**10 in these two rounds, in either engine).
    """
    built, size = backbone(name, tmp_path)
    model = built.model
    start, folded, loop = (
        finetune(model, size, adapter, engine, rounds, adapter_options=options)
        for engine, rounds in (("loop", 0), ("folded", 2), ("loop", 2))
    )
    for before, one, other in zip(roles(start), roles(folded), roles(loop), strict=True):
        parameters = [key for key in before if "running_" not in key and before[key].is_floating_point()]
        statistics = [key for key in before if "running_" in key]
        for keys in filter(None, (parameters, statistics)):
            assert difference(one, other, keys) < 1e-5
            assert difference(before, other, keys) > 1e-4  # and much more than that was learned
        counters = [key for key in before if not before[key].is_floating_point()]
        assert all(torch.equal(one[key], other[key]) for key in counters)


@pytest.mark.parametrize("chunk", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_chunks_of_clients_change_nothing(chunk):
    sizes = (9, 4, 11, 4, 6)
    model = backbone("resnet", None)[0].model.double()
    data = separate_datasets(16, sizes=sizes, dtype=torch.float64)

    def run(clients_per_chunk):
        module = perada.FederatedClassifier(model, "residual", {"dropout": 0.3, "init_std": 0.05})
        training = perada.Training(local_epochs=1, engine="folded", clients_per_chunk=clients_per_chunk)
        loop = perada.FederatedLoop(training=training, distillation=Distillation(2, 4))
        trainer = make_trainer(
            loop,
            2,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        trainer.fit(module, datamodule=perada.FederatedDataModule(data, batch_size=4))
        return loop.outcome(module)

    for one, other in zip(roles(run(None)), roles(run(chunk)), strict=True):
        for key in one:
            torch.testing.assert_close(one[key], other[key], rtol=1e-7, atol=1e-9)


LOHA = peft.LoHaConfig()


def test_a_method_without_twins_takes_the_loop_and_says_why():
    model = backbone("vit", None)[0].model
    with pytest.warns(
        UserWarning,
        match=r"engine='auto'.*blocks\.0\.attn\.qkv\.hada_w1_a .* and \d+ more",
    ):
        auto = finetune(model, 32, LOHA, "auto", rounds=1, lr_personal=0.1)
    loop = finetune(model, 32, LOHA, "loop", rounds=1, lr_personal=0.1)
    start = finetune(model, 32, LOHA, "loop", rounds=0)
    assert all(torch.equal(a[k], b[k]) for a, b in zip(roles(auto), roles(loop), strict=True) for k in a)
    scale = next(key for key in start.state("global") if "hada" in key)
    assert not torch.equal(start.state("personal", 0)[scale], loop.state("personal", 0)[scale])


def test_a_method_without_twins_cannot_be_folded():
    with pytest.raises(ValueError, match=r"engine='folded'.*qkv\.hada_"):
        finetune(backbone("vit", None)[0].model, 32, LOHA, "folded")


def test_two_adapters_of_ia3_are_not_folded():
    """The twin knows one; a second, or one that is merged, leaves the layer as it is."""
    adapted = insert_adapter(backbone("vit", None)[0], "ia3")
    assert Engine(adapted.model, "auto").kind == "folded"
    adapted.peft_model.add_adapter("second", adapted.config)
    with pytest.raises(ValueError, match=r"ia3_l \(ParameterDict\)"):
        Engine(adapted.model, "folded")


def test_unknown_engines_are_rejected():
    with rejects("engine", "vmap"):
        Engine(nn.Linear(1, 1), "vmap")


@pytest.mark.parametrize("algorithm", ["perada", pytest.param("fedavg_ft", marks=pytest.mark.slow)])
@pytest.mark.parametrize("engine", ["folded", pytest.param("loop", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "adapter"), [("batch_norm", "full"), ("vit", "lora"), ("module", "full")])
@pytest.mark.every(3)
def test_half_precision_learns_what_single_precision_does(name, adapter, engine, algorithm, tmp_path):
    built, size = backbone(name, tmp_path)
    options = {"algorithm": algorithm, "lr_personal": 0.05, "lr_local": 0.05, "distill_lr": 0.05, "local_epochs": 3}
    start, full, half = (
        finetune(built.model, size, adapter, engine, rounds, precision=precision, **options)
        for rounds, precision in ((0, "32-true"), (1, "32-true"), (1, "bf16-mixed"))
    )
    for before, exact, rough in zip(roles(start), roles(full), roles(half), strict=True):
        keys = [key for key in before if "running_" not in key and before[key].is_floating_point()]
        moved = {key: exact[key] - before[key] for key in keys}
        error = difference(moved, {key: rough[key] - before[key] for key in keys}, keys)
        assert 1e-5 < error < 0.25  # lower precision was used, and it learned the same
        assert all(rough[key].dtype == torch.float32 for key in keys)


@pytest.mark.slow
def test_engines_agree_in_half_precision():
    """A deep network with BatchNorm, where half precision itself is far from single precision."""
    model = backbone("resnet", None)[0].model
    start, folded, loop, exact = (
        finetune(model, 32, "residual", engine, rounds, precision=precision, local_steps=1, batch_size="full")
        for engine, rounds, precision in (
            ("loop", 0, "32-true"),
            ("folded", 1, "bf16-mixed"),
            ("loop", 1, "bf16-mixed"),
            ("loop", 1, "32-true"),
        )
    )
    for before, *after in zip(roles(start), roles(folded), roles(loop), roles(exact), strict=True):
        keys = [key for key in before if "running_" not in key and before[key].is_floating_point()]
        one, other, single = ({key: state[key] - before[key] for key in keys} for state in after)
        assert difference(other, one, keys) < 0.1 * difference(other, single, keys)


def test_many_states_on_the_same_images_in_parts():
    built, size = backbone("resnet", None)
    model = insert_adapter(built, "residual").model.double()
    states = random_states(model, 5)
    x = torch.randn(6, 3, size, size, dtype=torch.float64)
    for kind in ("folded", "loop"):
        engine = Engine(model, kind)
        for rows in (13, 4, 6):  # two states at once, four images and then two of one state, all images of one state
            out = engine.shared_logits(stack(states), x, rows)
            assert not out.requires_grad
            for state, logits in zip(states, out, strict=True):
                torch.testing.assert_close(logits, functional_call(model.eval(), state, (x,)))


class Scaled(nn.Module):
    """A container with a buffer of its own around a trained layer."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 4)
        self.register_buffer("scale", torch.ones(4), persistent=False)

    def forward(self, x):
        return self.inner(x) * self.scale


@pytest.mark.parametrize("kind", ["folded", "loop"])
def test_the_engine_follows_a_model_to_another_device(kind):
    model = nn.Sequential(nn.Flatten(), Scaled())
    engine = Engine(model, kind)
    model.to("meta")
    states = stack([get_state(model)] * 2)
    assert engine.logits(states, torch.empty(2, 5, 3, device="meta")).device.type == "meta"


@pytest.mark.parametrize("kind", ["folded", "loop"])
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("channels", [1, 3])
def test_all_layers_get_maps_with_the_channels_last(channels, trained, kind):
    """Also behind images of one channel, which have both formats: max pooling takes ten times as long without."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(channels, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 2))
    model[0].requires_grad_(trained)
    engine = Engine(model.to(memory_format=torch.channels_last), kind, channels_last=True)
    formats = []

    def note_format(module, args):
        formats.append(args[0].is_contiguous(memory_format=torch.channels_last) and not args[0].is_contiguous())

    engine.runs[2].register_forward_pre_hook(note_format)
    states = {name: value.contiguous() for name, value in expand(get_state(model), 2).items()}
    x = torch.randn(2, 5, channels, 8, 8)
    logits = engine.logits(states, x)
    assert formats
    assert all(formats)
    plain = copy.deepcopy(model).to(memory_format=torch.contiguous_format)
    for client in range(2):
        torch.testing.assert_close(logits[client], plain(x[client]))
