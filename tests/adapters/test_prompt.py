# SPDX-License-Identifier: Apache-2.0
"""Visual prompts: the forward pass written out, networks that they fit, and rounds of training by plain loops."""

from functools import cache

import peft
import pytest
import timm
import torch
import torch.nn.functional as F
from pytorch_lightning.callbacks import ModelCheckpoint
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import perada
from perada.adapters import PromptConfig
from perada.algorithms import FedAlt, FedSim
from perada.core.states import get_state
from perada.engine.engine import Engine
from perada.models.adapted import insert_adapter
from perada.models.backbones import build_backbone
from perada.models.unwrapping import unwrapped
from perada.privacy import Privacy
from tests.algorithms import personal_references, references
from tests.algorithms.problems import (
    BATCH,
    CLASSES,
    CLIENTS,
    CLIENTS_PER_ROUND,
    DISTILL_STEPS,
    EPOCHS,
    LR_LOCAL,
    LR_PERSONAL,
    LR_SERVER,
    PROX,
    QUIET,
    ROUNDS,
    Reference,
    assert_equal,
    assert_same,
    distance,
    task,
)
from tests.options import sections

WIDTH, DEPTH, HEADS, TOKENS, PATCH = 8, 3, 2, 4, 3
KINDS = {
    "deep": {"tokens": TOKENS},
    "shallow": {"tokens": TOKENS, "deep": False},
    "last": {"tokens": TOKENS, "last_blocks": 2},
    "late": {"tokens": TOKENS, "deep": False, "last_blocks": 2},
    "middle": {"tokens": TOKENS, "deep": False, "target_modules": r"blocks\.[01]"},
}
PLACES = {"deep": (0, 1, 2), "shallow": (0,), "last": (1, 2), "late": (1,), "middle": (0,)}
TO_THE_END = {"shallow": 2, "late": 2, "middle": 1}


def vit(**options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        sizes = {"img_size": 6, "patch_size": PATCH, "in_chans": 1, "embed_dim": WIDTH, "depth": DEPTH}
        net = VisionTransformer(**sizes, num_heads=HEADS, mlp_ratio=2, num_classes=CLASSES, **options).double()
        for parameter in net.parameters():
            nn.init.normal_(parameter, std=0.4)
        return net


def prompted(kind, net=None, **options):
    torch.manual_seed(2)
    return insert_adapter(build_backbone(net or vit(), CLASSES), "prompt", **KINDS[kind] | options)


class ByHand(nn.Module):
    """The network of ``vit`` written out; its tensors have the names of the adapted one."""

    def __init__(self, kind, state):
        super().__init__()
        self.kind, self.plain = kind, dict(vit().named_parameters())
        self.names = {}
        for key, value in state.items():
            holder, (*path, last) = self, key.split(".")
            for part in path:
                if part not in holder._modules:
                    holder.add_module(part, nn.Module())
                holder = holder._modules[part]
            holder.register_parameter(last, nn.Parameter(value.clone()))

    def forward(self, x):
        w = self.plain
        patches = x.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH).flatten(2, 3).movedim(1, 2).flatten(2)
        e = patches @ w["patch_embed.proj.weight"].flatten(1).T + w["patch_embed.proj.bias"]
        cls, e = w["cls_token"][0] + w["pos_embed"][0, :1], e + w["pos_embed"][0, 1:]
        cls, z = cls.expand(len(x), 1, WIDTH), e[:, :0]
        for i in range(DEPTH):
            if i in PLACES[self.kind]:
                (held,) = self.get_submodule(f"blocks.{i}.perada_prompt_enter.default.prompts").parameters()
                z = torch.stack([held] * len(x))
            out = self.block(i, torch.cat([cls, z, e], 1))
            cls, z, e = out[:, :1], out[:, 1 : 1 + z.shape[1]], out[:, 1 + z.shape[1] :]
            if i == TO_THE_END.get(self.kind, i):
                z = z[:, :0]
        head = self.get_submodule("head.modules_to_save.default")
        return self.norm("norm", cls[:, 0]) @ head.weight.T + head.bias

    def norm(self, name, x):
        x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return x * self.plain[f"{name}.weight"] + self.plain[f"{name}.bias"]

    def linear(self, name, x):
        return x @ self.plain[f"{name}.weight"].T + self.plain[f"{name}.bias"]

    def block(self, i, x):
        qkv = self.linear(f"blocks.{i}.attn.qkv", self.norm(f"blocks.{i}.norm1", x))
        outs = []
        for h in range(HEADS):
            q, k, v = (qkv[..., n * WIDTH :][..., h * WIDTH // HEADS : (h + 1) * WIDTH // HEADS] for n in range(3))
            outs.append((q @ k.transpose(1, 2) / (WIDTH // HEADS) ** 0.5).softmax(2) @ v)
        x = x + self.linear(f"blocks.{i}.attn.proj", torch.cat(outs, 2))
        hidden = F.gelu(self.linear(f"blocks.{i}.mlp.fc1", self.norm(f"blocks.{i}.norm2", x)))
        return x + self.linear(f"blocks.{i}.mlp.fc2", hidden)


IMAGES = torch.randn(5, 1, 6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_paper_written_out(kind):
    adapted = prompted(kind)
    state = get_state(adapted.model)
    keys = {f"blocks.{i}.perada_prompt_enter.default.prompts.weight" for i in PLACES[kind]}
    assert {key for key in state if not key.startswith("head.")} == keys
    assert all(state[key].shape == (TOKENS, WIDTH) for key in keys)
    by_hand = ByHand(kind, state)
    logits = adapted.model(IMAGES)
    torch.testing.assert_close(logits, by_hand(IMAGES), rtol=0, atol=1e-12)
    assert (logits - vit()(IMAGES)).abs().max() > 1e-2
    for net in (adapted.model, by_hand):
        net(IMAGES).square().sum().backward()
    for key, parameter in adapted.model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, by_hand.get_parameter(key).grad, rtol=0, atol=1e-11)
    torch.testing.assert_close(unwrapped(adapted.model)(IMAGES), logits, rtol=0, atol=0)


def test_they_start_as_in_the_paper():
    bound = (6 / (PATCH * PATCH + WIDTH)) ** 0.5
    model = prompted("shallow", tokens=4000).model
    weight = model.blocks[0].perada_prompt_enter["default"].prompts.weight
    assert 0.999 * bound < weight.abs().max() <= bound
    assert float(weight.detach().var()) == pytest.approx(bound**2 / 3, rel=0.02)


def test_dropout_is_drawn_for_each_image():
    enter = prompted("deep", dropout=0.5).model.train().blocks[0].perada_prompt_enter["default"]
    x = IMAGES.new_ones(200, 5, WIDTH)
    out = enter(x)
    assert out[:, 0].eq(1).all()
    assert out[:, 1 + TOKENS :].eq(1).all()
    dropped = out[:, 1 : 1 + TOKENS] == 0
    assert 0.45 < dropped.double().mean() < 0.55
    assert not dropped.all(0).any()
    kept = out[:, 1 : 1 + TOKENS].where(~dropped, 2 * enter.prompts.weight)
    torch.testing.assert_close(kept, 2 * enter.prompts.weight.expand(200, -1, -1))


@pytest.mark.every(4)
@pytest.mark.parametrize("kind", ["deep", "shallow"])
@pytest.mark.parametrize(
    "options",
    [
        {"class_token": False, "global_pool": "avg"},
        {"reg_tokens": 2},
        {"reg_tokens": 2, "global_pool": "map", "pre_norm": True},
        {"global_pool": "avg", "pool_include_prefix": True, "no_embed_class": True},
        {"dynamic_img_size": True},
    ],
)
def test_without_a_say_they_change_nothing(kind, options):
    """Prompts whose keys no query likes: the others' outputs are those of the plain network, wherever they stand."""
    net = vit(**options)
    for block in net.blocks:  # the prompts' keys are far off: a feature that the others do not have
        block.attn.forward = masked(block.attn, net.num_prefix_tokens)
    plain = vit(**options)(IMAGES)
    torch.testing.assert_close(prompted(kind, net).model(IMAGES), plain, rtol=0, atol=1e-12)


def masked(attention, start):
    """timm's attention with a mask over the tokens at the prompts' places."""
    own = type(attention).forward

    def forward(x, **_):
        mask = torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype)
        mask[:, start : start + TOKENS] = -torch.inf
        return own(attention, x, attn_mask=mask)

    return forward


@pytest.mark.parametrize("name", ["deit_tiny_distilled_patch16_224", "vit_tiny_r_s16_p8_224", "vit_large_patch32_224"])
@pytest.mark.slow
def test_other_networks_of_timm(tmp_path, name):
    """One with two tokens for classes, one on a ResNet, and one of so many blocks that PEFT shortens lists of them."""

    def make():
        torch.manual_seed(0)
        return build_backbone(name, 3, pretrained=False, image_size=64)

    try:
        adapted = insert_adapter(make(), "prompt", tokens=2)
    except ValueError as error:
        assert "classifiers" in str(error)  # two heads
        return
    x = torch.randn(2, 3, 64, 64)
    adapted.model.eval()
    adapted.peft_model.save_pretrained(tmp_path, save_embedding_layers=False)
    loaded = peft.PeftModel.from_pretrained(make().model, tmp_path)
    assert torch.equal(loaded.eval()(x), adapted.model(x))
    assert len([key for key in get_state(adapted.model) if "prompts" in key]) == len(adapted.model.blocks)


def test_two_adapters_together_and_in_turn():
    model = peft.get_peft_model(vit(), PromptConfig(tokens=2), "deep")
    model.add_adapter("shallow", PromptConfig(tokens=3, deep=False))
    network = model.base_model
    alone = {}
    for name in ("deep", "shallow"):
        network.set_adapter(name)
        alone[name] = model(IMAGES)
    network.set_adapter(["deep", "shallow"])
    both = model(IMAGES)
    network.set_adapter(["shallow", "deep"])
    torch.testing.assert_close(model(IMAGES), both, rtol=0, atol=1e-12)
    assert min((both - one).abs().max() for one in alone.values()) > 1e-3
    network.set_adapter("deep")
    model.delete_adapter("shallow")
    assert torch.equal(model(IMAGES), alone["deep"])
    model.delete_adapter("deep")
    assert torch.equal(network.model(IMAGES), vit()(IMAGES))


def test_prompts_on_prompts():
    first = unwrapped(prompted("deep").model)
    again = insert_adapter(build_backbone(first, CLASSES), "prompt", tokens=2)
    assert sum("prompts" in key for key in get_state(again.model)) == DEPTH
    with again.peft_model.disable_adapter():
        torch.testing.assert_close(again.model(IMAGES), first(IMAGES), rtol=0, atol=0)
    shallow = unwrapped(prompted("shallow").model)
    with pytest.raises(ValueError, match=r"prompts.*another run"):
        insert_adapter(build_backbone(shallow, CLASSES), "prompt")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 0}, r"tokens .*got 0"),
        ({"tokens": True}, r"tokens .*got True"),
        ({"dropout": 1.0}, r"dropout .*got 1\.0"),
        ({"last_blocks": 0}, r"last_blocks .*got 0"),
        (
            {"target_modules": "("},
            r"target_modules .*got '\(' \(.*\)",
        ),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        PromptConfig(**options)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "test_resnet",
            {},
            r"VisionTransformers.*ResNet.*'lora'",
        ),
        ("test_vit_relpos", {}, "not VisionTransformerRelPos"),
        ("test_vit", {"target_modules": "norm"}, r"'norm'.*'blocks\.0'.*'blocks\.5'"),
        ("test_vit", {"last_blocks": 7}, r"last_blocks=7, .*VisionTransformer .*6 blocks"),
        ("test_vit", {"last_blocks": 1, "target_modules": "x"}, "both specify which layers to adapt"),
    ],
)
def test_rejections(name, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        insert_adapter(build_backbone(timm.create_model(name, num_classes=3), 3), "prompt", **options)
    assert "\n" not in str(caught.value)


class PromptReference(Reference):
    """The plain ingredients, with the network written out."""

    def __init__(self, kind):
        self.kind = kind
        self.initial = run("fedavg", kind, rounds=0).state("global")
        self.model = ByHand(kind, self.initial)
        self.trained = sorted(self.initial)
        self.served = perada.FederatedDataModule(task(), batch_size=BATCH)
        self.rounds = [
            {m: batches for m, (batches,) in client_batches.items()}
            for client_batches in self.rounds_in_phases(personal_references.ONE_PHASE)
        ]


@cache
def prompt_reference(kind):
    return PromptReference(kind)


@cache
def answer(function, kind):
    return function(prompt_reference(kind))


def run(algorithm, kind, engine="folded", **options):
    common = {"clients_per_round": CLIENTS_PER_ROUND, "batch_size": BATCH, "local_epochs": EPOCHS, "rounds": ROUNDS}
    common |= {"lr_personal": LR_PERSONAL, "lr_local": LR_LOCAL, "distill_lr": LR_SERVER, "distill_optimizer": "sgd"}
    common |= {"adapter": "prompt", "adapter_options": KINDS[kind], "distill_steps": DISTILL_STEPS, "engine": engine}
    return perada.finetune(vit(), task(), **sections(algorithm=algorithm, **common | QUIET | options))


def is_prompt(key):
    return "perada_prompt" in key


def private_prompts(ref):
    return personal_references.partly_shared(
        ref,
        is_prompt,
        personal_references.ONE_PHASE,
        lambda state, client_batches: ref.train(state, client_batches, LR_LOCAL),
    )


def private_head(ref):
    return personal_references.at_once(ref, lambda key: not is_prompt(key))


DEFINITIONS = [
    ("fedavg", {}, references.fedavg),
    ("perada_no_kd", {"prox_strength": PROX}, personal_references.ditto),
    (
        "perada",
        {"prox_strength": PROX, "distill_batch_size": 3, "distill_until_round": 2},
        personal_references.perada_two_rounds,
    ),
    ("lg_fedavg", {}, private_prompts),
    ("fedper", {}, private_head),
]


@pytest.mark.parametrize("engine", ["folded", "loop"])
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("kind", ["deep", "shallow", "late"])
@pytest.mark.parametrize(("name", "options", "function"), DEFINITIONS, ids=[one[0] for one in DEFINITIONS])
@pytest.mark.every(25)
def test_rounds_equal_a_plain_loop(name, options, function, kind, cached, engine):
    w, personal = answer(function, kind)
    found = run(name, kind, engine, cache_features=cached, **options)
    assert_same(found.state("global"), w, "global")
    for m in CLIENTS:
        assert_same(found.state("personal", m), personal[m], f"personal {m}")
    assert distance(found.state("global"), prompt_reference(kind).initial) > 0.01


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning")
@pytest.mark.parametrize(("algorithm", "kind"), [("perada", "deep"), ("lg_fedavg", "shallow"), ("fedper", "late")])
def test_a_checkpoint_goes_on_to_the_bit(tmp_path, algorithm, kind):
    def train(folder, rounds, **more):
        saved = {"enable_checkpointing": True, "callbacks": [ModelCheckpoint(folder, "saved")], "rounds": rounds}
        return run(algorithm, kind, momentum=0.5, **saved | more)

    uninterrupted, _ = train(tmp_path / "whole", 4), train(tmp_path / "half", 2)
    resumed = train(tmp_path / "half", 4, ckpt_path=str(tmp_path / "half" / "saved.ckpt"))
    for state, expected in zip(resumed.states("global"), uninterrupted.states("global"), strict=True):
        assert_equal(state, expected)
    for m in CLIENTS:
        assert_equal(resumed.state("personal", m), uninterrupted.state("personal", m))


@pytest.mark.slow
@pytest.mark.parametrize("make", [FedSim, pytest.param(FedAlt, marks=pytest.mark.slow)])
def test_private_prompts_on_a_backbone_that_is_shared(make):
    with pytest.raises(ValueError, match=r"split='adapter'.*train_backbone"):
        run(make("adapter"), "deep")
    folded, looped = (run(make("adapter"), "deep", engine, train_backbone=True) for engine in ("folded", "loop"))
    for m in CLIENTS:
        assert_same(folded.state("personal", m), looped.state("personal", m), f"personal {m}")
    prompts = [{k: v for k, v in folded.state("personal", m).items() if is_prompt(k)} for m in CLIENTS]
    shared = [{k: v for k, v in folded.state("personal", m).items() if not is_prompt(k)} for m in CLIENTS]
    assert "blocks.0.base_layer.attn.qkv.weight" in shared[0]
    assert_equal(shared[0], shared[1])
    assert distance(prompts[0], prompts[1]) > 0.1


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", ["deep", "late"])
def test_features_are_those_before_the_first_prompts(kind):
    model = prompted(kind).model
    prefix = Engine(model).find_trunk(IMAGES[0])
    assert prefix is not None
    assert prefix.needed == (("pos_drop",) if kind == "deep" else ("blocks.0",))


@pytest.mark.every(2)
@pytest.mark.filterwarnings("ignore:.*(delta=|secure_rng|test mode|repeat).*:UserWarning")
@pytest.mark.parametrize("kind", ["deep", "shallow"])
def test_private_gradients_without_noise_are_those_of_training(kind):
    """A bound that no gradient reaches, all images in each batch: DP-SGD is then gradient descent."""
    options = {"rounds": 1, "clients_per_round": len(CLIENTS), "batch_size": 64, "local_epochs": 1}
    plain = run("fedavg", kind, **options)
    private = run(
        "fedavg",
        kind,
        **options,
        privacy=Privacy(noise_multiplier=1e-9, max_norm=1e3, delta=1e-3, secure_rng=False),
    )
    torch.testing.assert_close(private.state("global"), plain.state("global"), rtol=0, atol=1e-4)
