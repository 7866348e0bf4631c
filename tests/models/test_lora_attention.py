# SPDX-License-Identifier: Apache-2.0
"""LoRA in torch's ``nn.MultiheadAttention``, against torch with the products in its weights, and against PEFT."""

import copy
from dataclasses import dataclass

import peft
import pytest
import torch
import torchvision
from torch import nn
from torch.func import functional_call
from torch.utils.data import TensorDataset
from transformers import SiglipVisionConfig
from transformers.models.siglip.modeling_siglip import SiglipVisionModel

import perada
from perada.core.seeding import Streams, generator, seeded
from perada.core.states import expand, get_state, parameter_keys, set_state, unstack
from perada.data import FederatedData
from perada.engine import Engine
from perada.engine.fold_check import check_fold
from perada.engine.multihead_attention import AttentionOptions, run_attention
from perada.models.adapted import find_tensor_names, insert_adapter
from perada.models.backbones import build_backbone
from perada.models.blocks import repeated_blocks
from perada.models.lora_attention import products_in_out_projection
from perada.models.unwrapping import unwrapped
from tests.options import sections
from tests.rejections import rejects

CLIENTS, COUNTS, SIDE, SIZE, CLASSES = 3, (4, 3, 4), 32, 8, 3
SEPARATE = {"kdim": 6, "vdim": 4}
PARAMETERS = ["attn.q_proj_weight", "attn.k_proj_weight", "attn.v_proj_weight"]


class Attends(nn.Module):
    """One attention between the patches of an image, whose weights are part of the logits if they are needed."""

    def __init__(self, masked=False, need_weights=False, kdim=None, vdim=None, **options):
        super().__init__()
        self.patches = nn.Conv2d(3, SIZE, 8, 8)
        self.attn = nn.MultiheadAttention(SIZE, 2, kdim=kdim, vdim=vdim, **options)
        self.fc = nn.Linear(SIZE, CLASSES)
        self.sizes = kdim, vdim
        self.batch_first = options.get("batch_first", False)
        self.options = {"need_weights": need_weights}
        if masked:
            self.options |= {"attn_mask": torch.ones(16, 16).triu(1).bool(), "is_causal": True}

    def forward(self, x):
        query = self.patches(x).flatten(2)
        query = query.transpose(1, 2) if self.batch_first else query.permute(2, 0, 1)
        key, value = (query if size is None else query[..., :size] for size in self.sizes)
        out, weights = self.attn(query, key, value, **self.options)
        logits = self.fc(out.mean(1 if self.batch_first else 0))
        return logits if weights is None else logits + weights.square().mean((1, 2))[:, None]


CASES = {
    "batch second": {},
    "batch first": {"batch_first": True},
    "no bias": {"batch_first": True, "bias": False},
    "added keys": {"add_bias_kv": True, "add_zero_attn": True, "masked": True, "need_weights": True},
    "causal": {"batch_first": True, "add_zero_attn": True, "masked": True},
    "weights": {"batch_first": True, "need_weights": True, "masked": True},
    "dropout": {"dropout": 0.3},
    "dropout of weights": {"batch_first": True, "dropout": 0.3, "need_weights": True, "add_bias_kv": True},
    "separate": {**SEPARATE, "dropout": 0.3},
    "separate, batch first": {**SEPARATE, "batch_first": True, "add_bias_kv": True},
}
QUICK_CASES = ("batch second", "dropout of weights", "separate")
cases = pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case not in QUICK_CASES)) for case in CASES]
)


def adapted(case, adapter="lora", dropout=0.0):
    """The network of a case, in double precision, with an adapter in its attention."""
    torch.manual_seed(0)
    network = Attends(**CASES[case]).double()
    if adapter == "lora" and "separate" in case:
        adapter = peft.LoraConfig(r=2, lora_alpha=6, target_parameters=PARAMETERS)
    elif adapter == "lora":
        adapter = peft.LoraConfig(r=2, lora_alpha=6, lora_dropout=dropout, target_modules=["attn"])
    found = insert_adapter(build_backbone(network, CLASSES), adapter)
    found.model.double()
    return network, found


def moved(model, seed=0):
    """States (C, ...) of the clients away from the initial one, in which products of factors are zero."""
    states = {}
    for key, value in expand(get_state(model), CLIENTS).items():
        noise = torch.randn(value.shape, generator=generator(seed, key), dtype=value.dtype)
        states[key] = (value + 0.3 * noise).requires_grad_(key in parameter_keys(model))
    return states


def images():
    return torch.randn(CLIENTS, max(COUNTS), 3, SIDE, SIDE, generator=generator(0, "x"), dtype=torch.float64)


def passes(model, kind, recomputed=()):
    """Logits and gradients of the clients in training and evaluation."""
    engine = Engine(model, kind, recomputed=recomputed)
    results = []
    for training in (True, False):
        states = moved(model)
        streams = Streams.derived(0, "dropout", clients=range(CLIENTS))
        logits = engine.logits(states, images(), training=training, counts=COUNTS, streams=streams)
        real = [logits[client, :count] for client, count in enumerate(COUNTS)]
        trained = [states[key] for key in parameter_keys(model)]
        results += [*real, *torch.autograd.grad(torch.cat(real).square().sum(), trained)]
    return results


def assert_close(results, expected):
    for result, reference in zip(results, expected, strict=True):
        largest = float(reference.detach().abs().max())
        assert largest > 0
        torch.testing.assert_close(result, reference, rtol=1e-9, atol=1e-11 * largest)


def load_first(model):
    """Put the second client's state into the model, and return it."""
    state = {key: value.detach() for key, value in unstack(moved(model))[1].items()}
    set_state(model, state)
    return state


@cases
@pytest.mark.parametrize("adapter", ["lora", "bias_norm", "full"])
@pytest.mark.every(4)
def test_folded_clients_are_those_of_the_loop(case, adapter):
    _, found = adapted(case, adapter, dropout=0.2)
    assert_close(passes(found.model, "folded"), passes(found.model, "loop"))


def products(found, network):
    """The tensors of the plain network, with the products of the factors added to its weights."""
    tensors = {key: value.detach().clone() for key, value in network.named_parameters()}
    scale = 6 / 2
    leaves = dict(found.model.named_parameters())
    added = {}
    for key in leaves:
        path, is_factor, _ = key.partition(".lora_A.default.")
        if not is_factor:
            continue
        product = scale * leaves[f"{path}.lora_B.default.weight"] @ leaves[key]
        if path.endswith("out_proj"):
            added["attn.out_proj.weight"] = products_in_out_projection() * product
        elif "separate" in path or "attn.in_proj_weight" not in tensors:
            depth = path.count("base_layer")
            added[PARAMETERS[len(PARAMETERS) - 1 - depth]] = product
        else:
            added["attn.in_proj_weight"] = product
    for name in ("weight", "bias"):
        tensors[f"fc.{name}"] = leaves[f"fc.modules_to_save.default.{name}"]
    return {key: value + added.get(key, 0) for key, value in tensors.items()}


@cases
def test_outputs_and_gradients_are_torchs_with_the_products_in_its_weights(case):
    network, found = adapted(case)
    load_first(found.model)
    trained = [parameter for parameter in found.model.parameters() if parameter.requires_grad]
    network.eval()
    found.model.eval()
    results = []
    for logits in (found.model(images()[0]), functional_call(network, products(found, network), (images()[0],))):
        results.append([logits, *torch.autograd.grad(logits.square().sum(), trained)])
    assert_close(*results)


@cases
def test_peft_reads_merges_and_unwraps_what_is_saved(case, tmp_path):
    network, found = adapted(case)
    load_first(found.model)
    found.peft_model.save_pretrained(tmp_path)
    expected = found.model.eval()(images()[0])
    plain = peft.PeftModel.from_pretrained(copy.deepcopy(network), tmp_path).eval()
    assert not type(plain.base_model.model.attn).__module__.startswith("perada")
    merged = copy.deepcopy(found.peft_model).merge_and_unload(safe_merge=True).eval()
    assert type(merged.attn) is nn.MultiheadAttention
    for other in (plain, merged, unwrapped(found.model), unwrapped(plain.base_model.model)):
        assert_close([other(images()[0])], [expected])


def test_a_pass_leaves_the_frozen_weights_as_they_are():
    """PEFT's own layer adds the product to them and subtracts it again."""
    _, found = adapted("batch first")
    load_first(found.model)
    attention = found.model.attn.base_layer
    weight, values = attention.in_proj_weight, attention.in_proj_weight.clone()
    found.model(images()[0])
    assert attention.in_proj_weight is weight
    assert torch.equal(weight, values)


def test_adapters_are_merged_and_unmerged_in_place():
    _, found = adapted("batch first")
    load_first(found.model)
    found.model.eval()
    expected = found.model(images()[0])
    found.model.attn.merge(safe_merge=True)
    merged = found.model(images()[0])
    assert_close([merged], [expected])
    factor = found.model.attn.lora_B["default"].weight
    trained_factor = factor.detach().clone()
    with torch.no_grad():
        factor.zero_()  # no effect while it is merged
        assert torch.equal(found.model(images()[0]), merged)
        factor.copy_(trained_factor)
    found.model.attn.unmerge()
    assert_close([found.model(images()[0])], [expected])


def test_without_the_adapter_it_is_the_plain_network():
    network, found = adapted("batch first")
    load_first(found.model)
    network.fc = found.model.fc.original_module
    with found.peft_model.disable_adapter():
        assert_close([found.model.eval()(images()[0])], [network.eval()(images()[0])])


def test_factors_name_the_weights_and_scales_of_both_projections():
    network, found = adapted("batch first")
    state = load_first(found.model)
    merged = copy.deepcopy(found.peft_model).merge_and_unload()
    factors = find_tensor_names(found.model, "fc").factors
    assert [factor.base for factor in factors] == [
        "attn.base_layer.in_proj_weight",
        "attn.base_layer.out_proj.base_layer.weight",
    ]
    for factor, name in zip(factors, ("in_proj_weight", "out_proj.weight"), strict=True):
        expected = merged.attn.get_parameter(name) - network.attn.get_parameter(name)
        torch.testing.assert_close(factor.scale * state[factor.up] @ state[factor.down], expected)


@dataclass
class Masks:
    """Arguments of an attention of 2 images with 5 queries and 7 keys."""

    attn_mask: str | None = None
    key_padding: str | None = None

    def options(self, average):
        random = generator(0, "masks")
        masks = {}
        if self.attn_mask is not None:
            shape = (2 * 2, 5, 7) if "3" in self.attn_mask else (5, 7)
            masks["attn_mask"] = torch.randn(shape, generator=random, dtype=torch.float64)
        if self.key_padding is not None:
            masks["key_padding_mask"] = torch.randn(2, 7, generator=random, dtype=torch.float64)
        for name, kind in (("attn_mask", self.attn_mask), ("key_padding_mask", self.key_padding)):
            if kind is not None and "bool" in kind:
                masks[name] = masks[name] > 0.8
        return {**masks, "need_weights": average is not None, "average_attn_weights": bool(average)}


@pytest.mark.parametrize("average", [None, True, False])
@pytest.mark.parametrize(
    "masks", [Masks(), Masks("bool"), Masks("float 3"), Masks("bool 3", "bool"), Masks(None, "float")]
)
@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True, "add_zero_attn": True}, {"kdim": 6, "vdim": 4}])
def test_masks_and_weights_are_torchs(options, masks, average):
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(SIZE, 2, batch_first=True, **options).double()
    inputs = [
        torch.randn(2, length, size, dtype=torch.float64)
        for length, size in ((5, SIZE), (7, attention.kdim), (7, attention.vdim))
    ]
    arguments = masks.options(average)
    results = run_attention(attention, *inputs, AttentionOptions(**arguments))
    for result, expected in zip(results, attention(*inputs, **arguments), strict=True):
        assert (result is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


def test_one_image_without_a_batch():
    attention = nn.MultiheadAttention(SIZE, 2).double()
    x = torch.randn(5, SIZE, dtype=torch.float64)
    results = run_attention(attention, x, x, x, AttentionOptions())
    for result, expected in zip(results, attention(x, x, x), strict=True):
        torch.testing.assert_close(result, expected)


def test_a_mask_is_not_guessed():
    x = torch.randn(2, 5, SIZE)
    with pytest.raises(RuntimeError, match="is_causal=True"):
        run_attention(nn.MultiheadAttention(SIZE, 2), x, x, x, AttentionOptions(is_causal=True))


class Encoder(nn.Module):
    """torch's encoder, whose fast path reads the weights of the attention."""

    def __init__(self, **options):
        super().__init__()
        self.patches = nn.Conv2d(3, SIZE, 8, 8)
        layer = nn.TransformerEncoderLayer(SIZE, 2, 16, batch_first=True, **options)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.fc = nn.Linear(SIZE, CLASSES)

    def forward(self, x):
        return self.fc(self.encoder(self.patches(x).flatten(2).mT).mean(1))


class Block(nn.Module):
    """A block of OpenCLIP's towers."""

    def __init__(self, batch_first):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(SIZE), nn.LayerNorm(SIZE)
        self.attn = nn.MultiheadAttention(SIZE, 2, batch_first=batch_first)
        self.mlp = nn.Sequential()
        for name, layer in (("c_fc", nn.Linear(SIZE, 16)), ("gelu", nn.GELU()), ("c_proj", nn.Linear(16, SIZE))):
            self.mlp.add_module(name, layer)

    def forward(self, x):
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class Tower(nn.Module):
    """A vision tower of OpenCLIP's structure. The former layout has the tokens first, the newer one the images."""

    def __init__(self, batch_first=True):
        super().__init__()
        self.conv1 = nn.Conv2d(3, SIZE, 8, 8, bias=False)
        self.class_embedding = nn.Parameter(torch.randn(SIZE))
        self.positional_embedding = nn.Parameter(torch.randn(17, SIZE))
        self.resblocks = nn.Sequential(Block(batch_first), Block(batch_first))
        self.ln_post, self.head = nn.LayerNorm(SIZE), nn.Linear(SIZE, CLASSES)
        self.batch_first = batch_first

    def forward(self, x):
        x = self.conv1(x).flatten(2).mT
        x = torch.cat([self.class_embedding.expand(len(x), 1, -1), x], 1) + self.positional_embedding
        if self.batch_first:
            x = self.resblocks(x)
        else:
            x = self.resblocks(x.transpose(0, 1)).transpose(0, 1)
        return self.head(self.ln_post(x[:, 0]))


class Siglip(nn.Module):
    """transformers' SigLIP, which pools by one attention of torch with a learned query."""

    def __init__(self):
        super().__init__()
        sizes = {"hidden_size": SIZE, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        self.tower = SiglipVisionModel(SiglipVisionConfig(**sizes, image_size=SIDE, patch_size=8))
        self.classifier = nn.Linear(SIZE, CLASSES)

    def forward(self, x):
        return self.classifier(self.tower(x).pooler_output)


NETWORKS = {
    "tower": Tower,
    "tokens first": lambda: Tower(batch_first=False),
    "encoder": Encoder,
    "norm first": lambda: Encoder(norm_first=True, activation="gelu"),
    "torchvision": lambda: torchvision.models.VisionTransformer(SIDE, 8, 2, 2, SIZE, 16, num_classes=CLASSES),
    "siglip": Siglip,
}
IN_ATTENTION = {
    "tower": r".*attn",
    "tokens first": r".*attn",
    "encoder": r".*self_attn",
    "norm first": r".*self_attn",
    "torchvision": r".*self_attention",
    "siglip": r".*head\.attention",
}
networks = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("tower", "encoder"))) for name in NETWORKS]
)


def network_of(name):
    torch.manual_seed(0)
    return NETWORKS[name]().double()


@networks
def test_networks_made_of_it(name, tmp_path):
    network = network_of(name)
    config = peft.LoraConfig(r=2, lora_dropout=0.2, target_modules=IN_ATTENTION[name])
    found = insert_adapter(build_backbone(network, CLASSES), config)
    model = found.model.double()
    assert check_fold(model, images()) is None
    expected = passes(model, "loop")
    assert_close(passes(model, "folded"), expected)
    if name != "siglip":  # it has one block
        recomputed = passes(model, "loop", repeated_blocks(model, name))
        assert all(map(torch.equal, recomputed, expected))

    # Evaluation without gradients, in which torch's encoders take their fast path.
    load_first(model)
    model.eval()
    logits = model(images()[0]).detach()
    with torch.inference_mode():
        inferred = model(images()[0])
    found.peft_model.save_pretrained(tmp_path)
    plain = peft.PeftModel.from_pretrained(copy.deepcopy(network), tmp_path).eval()
    merged = copy.deepcopy(found.peft_model).merge_and_unload(safe_merge=True).eval()
    with torch.no_grad():
        assert_close([inferred.clone(), merged(images()[0])], [logits] * 2)
    torch.backends.mha.set_fastpath_enabled(False)  # it bypasses PEFT's layers
    try:
        assert_close([plain(images()[0])], [logits])
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


@networks
def test_default_layers_include_the_attention(name):
    found = insert_adapter(build_backbone(network_of(name), CLASSES), "lora")
    named = found.config.target_modules
    names = [path for path, module in network_of(name).named_modules() if isinstance(module, nn.MultiheadAttention)]
    assert set(names) <= set(named)


def finetune(network, **options):
    part = TensorDataset(torch.rand(6, 3, SIDE, SIDE, generator=generator(0, "part")), torch.arange(6) % CLASSES)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    common = {"algorithm": "fedavg", "rounds": 1, "local_steps": 2, "batch_size": 3, "lr_local": 0.3}
    config = peft.LoraConfig(r=2, target_modules=r".*attn")
    federated = FederatedData([part, part], num_classes=CLASSES)
    with seeded(0, "network"):
        return perada.finetune(network, federated, **sections(adapter=config, **(common | quiet | options)))


def states_of(run):
    return [run.state("global")[key] for key in sorted(run.state("global"))]


@pytest.mark.parametrize(
    "options",
    [
        {"algorithm": "fedavg"},
        pytest.param({"algorithm": "fedavg", "checkpointing": True}, marks=pytest.mark.slow),
        pytest.param({"algorithm": "fedex_lora"}, marks=pytest.mark.slow),
    ],
)
def test_a_run_is_that_of_the_loop(options):
    torch.manual_seed(0)
    network = Tower()
    folded, loop = (states_of(finetune(network, engine=kind, **options)) for kind in ("folded", "loop"))
    for one, other in zip(folded, loop, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")
def test_options_without_effect_are_rejected():
    config = peft.LoraConfig(target_modules=["attn"], lora_bias=True)
    with rejects("lora_bias", True, "'attn'"):
        insert_adapter(build_backbone(Attends(batch_first=True), CLASSES), config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (peft.LoraConfig(target_modules=["attn"], use_dora=True), "DoRA"),
        (peft.LoraConfig(target_modules=["attn"], use_bdlora=peft.BdLoraConfig(["attn"], nblocks=2)), "use_bdlora"),
        (peft.IA3Config(target_modules=["attn"], feedforward_modules=[]), "MultiheadAttention"),
        (peft.LoraConfig(target_parameters=["attn.out_proj.weight"]), "'attn' of backbone 'Attends'"),
    ],
)
def test_what_cannot_be_adapted_is_named(config, message):
    with pytest.raises(ValueError, match=message):
        insert_adapter(build_backbone(Attends(batch_first=True), CLASSES), config)


def test_separate_projections_are_named_one_by_one():
    with pytest.raises(ValueError, match=r"'LoraConfig'.*target_parameters"):
        insert_adapter(build_backbone(Attends(**SEPARATE), CLASSES), peft.LoraConfig(target_modules=["attn"]))
