# SPDX-License-Identifier: Apache-2.0
"""Networks of one's own as people have them: heads of any name, several GPUs, other number formats."""

from collections import OrderedDict

import peft
import pytest
import timm
import torch
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.utils.data import TensorDataset

import perada
from perada.models.adapted import insert_adapter
from perada.models.backbones import build_backbone
from perada.models.usage import check_usage
from perada.results.formats import export_model
from tests.options import sections

IMAGES = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(5))


class Network(nn.Module):
    """Its head's name is the end of other names."""

    def __init__(self, head="out"):
        super().__init__()
        torch.manual_seed(0)
        self.name = head
        self.layout, self.dropout, self.mix = nn.Linear(192, 16), nn.Dropout(0.1), nn.Linear(16, 16)
        self.add_module(head, nn.Linear(16, 3))

    def forward(self, x):
        h = self.dropout(self.layout(x.flatten(1)).relu())
        return getattr(self, self.name)(self.mix(h).relu())


def finetune(network, adapter="lora", **options):
    random = torch.Generator().manual_seed(1)

    def part(n):
        y = torch.arange(n) % 3
        return TensorDataset(0.3 * torch.randn(n, 3, 8, 8, generator=random) + y.view(-1, 1, 1, 1), y)

    data = perada.FederatedData([part(8), part(6)], [part(3), part(3)])
    common = {"algorithm": "ditto", "rounds": 1, "local_steps": 2, "batch_size": 4, "accelerator": "cpu"}
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return perada.finetune(network, data, **sections(adapter=adapter, **common | quiet | options))


ADAPTERS = ["lora", "ia3", peft.LoHaConfig(), peft.OFTConfig(oft_block_size=4), peft.VeraConfig(r=4)]


@pytest.mark.parametrize("head", ["out", "dropout_out", "A", "x", "t", "ix"])
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.every(4)
def test_a_head_may_have_any_name(tmp_path, head, adapter):
    run = finetune(Network(head), adapter, engine="loop")
    trained = {key for key in run.state("global") if "modules_to_save" in key}
    assert trained == {f"{head}.modules_to_save.default.weight", f"{head}.modules_to_save.default.bias"}
    assert not torch.equal(
        run.state("global")[f"{head}.modules_to_save.default.bias"], Network(head).get_submodule(head).bias
    )
    run.save(tmp_path / "saved")
    loaded = perada.Run.load(tmp_path / "saved", backbone=Network(head))
    with torch.no_grad():
        expected = run.personal(1)(IMAGES)
        assert torch.equal(loaded.personal(1)(IMAGES), expected)
        assert torch.allclose(run.merged(1)(IMAGES), expected, atol=1e-6)


class TwoHeads(Network):
    """A second head, whose name ends like the first one's, and which the loss does not reach."""

    def __init__(self, head="head", second="aux_head"):
        super().__init__(head)
        self.second = second
        self.add_module(second, nn.Linear(16, 2))

    def forward(self, x):
        return super().forward(x) + 0 * getattr(self, self.second)(self.layout(x.flatten(1))).sum()


@pytest.mark.parametrize(("head", "second"), [("head", "aux_head"), ("x", "mixture"), ("fc", "pre_fc")])
@pytest.mark.parametrize("adapter", ["lora", "ia3", "full", peft.LoHaConfig()])
@pytest.mark.every(4)
def test_peft_reads_an_adapter_beside_a_head_whose_name_ends_alike(tmp_path, head, second, adapter):
    run = finetune(TwoHeads(head, second), adapter, engine="loop")
    run.export(tmp_path / "exported")
    loaded = peft.PeftModel.from_pretrained(TwoHeads(head, second), str(tmp_path / "exported" / "client_1"))
    assert torch.allclose(loaded.eval()(IMAGES), run.merged(1).eval()(IMAGES), atol=1e-6)
    again = perada.Run.load(tmp_path / "exported", backbone=TwoHeads(head, second))
    assert torch.equal(again.merged(1).eval()(IMAGES), run.merged(1).eval()(IMAGES))


class UnusedSecondHead(Network):
    """A second head with as many outputs, which is defined after the first one and not called."""

    def __init__(self, second):
        super().__init__("head")
        self.add_module(second, nn.Linear(16, 3))


@pytest.mark.parametrize("second", ["aux_head", "AuxLogits", "auxiliary"])
def test_an_auxiliary_head_is_not_the_head(second):
    assert build_backbone(UnusedSecondHead(second), 3).head == "head"
    # The only linear layer is the head, whatever its name.
    assert build_backbone(nn.Sequential(OrderedDict(flat=nn.Flatten(), aux=nn.Linear(16, 3))), 3).head == "aux"


def test_a_head_that_peft_cannot_find_is_named(tmp_path):
    run = finetune(Network("out"), "lora")
    with pytest.warns(UserWarning, match=r"PEFT.*'mix\.lora_dropout'.*'out'"):
        run.export(tmp_path / "exported")
    assert perada.Run.load(tmp_path / "exported", backbone=Network("out")).info == run.info
    beside = finetune(TwoHeads(), "lora", adapter_options={"target_modules": ["mix", "aux_head"]}, train_backbone=True)
    with pytest.warns(UserWarning, match=r"'aux_head'.*'head'"):
        beside.export(tmp_path / "beside")


def test_other_modules_to_save_are_kept():
    config = peft.LoraConfig(target_modules=["mix"], modules_to_save=["layout", "out"])
    model = insert_adapter(build_backbone(Network(), 3), config).model
    trained = {name.partition(".")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"layout", "mix", "out"}
    assert type(model.dropout) is nn.Dropout


@pytest.mark.parametrize(("value", "expected"), [(6.0, 6), (6, 6), (16.0, 16)])
def test_a_number_without_a_fraction_is_an_integer(value, expected):
    alpha = insert_adapter(build_backbone(Network(), 3), "lora", lora_alpha=value).config.lora_alpha
    assert (alpha, type(alpha)) == (expected, int)


@pytest.mark.parametrize("value", [6.5, "6", float("nan"), float("inf"), True])
def test_another_one_is_rejected(value):
    with pytest.raises(ValueError, match=r"adapter_options: lora_alpha .*int.*'lora',"):
        insert_adapter(build_backbone(Network(), 3), "lora", lora_alpha=value)


def partly_parallel():
    network = Network()
    network.mix = nn.DataParallel(network.mix)
    return network


@pytest.mark.every(3)
@pytest.mark.parametrize("make", [lambda: nn.DataParallel(Network()), partly_parallel])
@pytest.mark.parametrize("adapter", ["lora", "full"])
def test_data_parallel_is_taken_off(make, adapter):
    expected, run = (finetune(network, adapter).state("global") for network in (Network(), make()))
    assert run.keys() == expected.keys()
    assert all(torch.equal(run[key], value) for key, value in expected.items())


@pytest.mark.every(4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("adapter", ["lora", "full"])
def test_weights_of_a_half_format_become_float32(dtype, adapter):
    name = str(dtype).removeprefix("torch.")
    network = Network().to(dtype)
    with pytest.warns(UserWarning, match=rf"'Network'.*{name}, .*float32"):
        run = finetune(network, adapter)
    expected = finetune(Network().to(dtype).float(), adapter).state("global")
    assert all(torch.equal(value, expected[key]) for key, value in run.state("global").items())
    assert next(network.parameters()).dtype == dtype  # the caller's own stays as it is


@pytest.mark.parametrize("name", ["beit_base_patch16_224", "eva02_tiny_patch14_224", "swinv2_tiny_window8_256"])
@pytest.mark.every(3)
def test_layers_whose_weights_are_read_get_no_lora(name):
    size = 64
    model = insert_adapter(build_backbone(name, 3, pretrained=False, image_size=size), "lora").model
    wrapped = {path.removesuffix(".lora_A") for path, _ in model.named_modules() if path.endswith(".lora_A")}
    assert wrapped
    assert all(path.endswith("attn.proj") for path in wrapped)
    with torch.no_grad():
        for value in model.parameters():
            value += 0.01  # Swin V2 begins with norms of weight 0 behind what is adapted
        before = model.eval()(torch.ones(1, 3, size, size))
        for key, value in model.named_parameters():
            value += "lora_B" in key
        assert not torch.equal(model(torch.ones(1, 3, size, size)), before)


class AuxiliaryLast(Network):
    """A layer that was made after the head is its last linear one."""

    def __init__(self):
        super().__init__("head")
        self.gate = nn.Linear(16, 16)

    def forward(self, x):
        h = self.mix(self.layout(x.flatten(1)).relu())
        return self.head(h * self.gate(h).sigmoid())


def test_the_head_is_the_last_layer_with_as_many_outputs_as_classes():
    assert build_backbone(AuxiliaryLast(), 3).head == "head"
    assert build_backbone(AuxiliaryLast()).head == "gate"
    run = finetune(AuxiliaryLast(), num_classes=3)
    assert {key.partition(".")[0] for key in run.state("global") if "modules_to_save" in key} == {"head"}


class WeightNormalised(Network):
    def __init__(self):
        super().__init__()
        with pytest.warns(FutureWarning):
            self.mix = nn.utils.weight_norm(self.mix)


class Lazy(Network):
    def __init__(self):
        super().__init__()
        self.out = nn.LazyLinear(3)


class NamedLikeALayerOfPEFT(Network):
    def __init__(self):
        super().__init__()
        self.base_layer = nn.Linear(4, 3)


class WithAModuleNamedLikeALayerOfPEFT(Network):
    def __init__(self):
        super().__init__()
        self.block = nn.ModuleDict({"original_module": nn.Linear(4, 4)})


def traced():
    return torch.jit.trace(Network().eval(), IMAGES)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            WeightNormalised,
            r"'mix.weight'.*torch.nn.utils.parametrizations.weight_norm",
        ),
        (Lazy, r"has no shape for 'out.weight' yet; call the network once"),
        (NamedLikeALayerOfPEFT, r"'base_layer'.*PEFT"),
        (WithAModuleNamedLikeALayerOfPEFT, r"'block.original_module'.*PEFT"),
        (traced, "compiled by TorchScript"),
    ],
)
def test_a_network_that_cannot_be_copied_or_adapted_is_rejected(make, message):
    with pytest.raises(ValueError, match=message):
        build_backbone(make(), 3)


@pytest.mark.parametrize("adapter", ["full", "lora"])
def test_a_network_in_double_precision_trains_and_predicts_in_it(tmp_path, adapter):
    """On images in single precision, and after it was saved; the files that it is exported to compute the same."""
    network = Network().double()
    run = finetune(network, adapter)
    images = 0.3 * IMAGES
    predictions = run.predict(images, client=1)
    with torch.no_grad():
        expected = run.personal(1)(images.double()).softmax(-1)
    assert expected.dtype == torch.float64
    torch.testing.assert_close(predictions.probabilities, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(run.predict(images.double(), client=1).probabilities, expected, rtol=1e-12, atol=0)
    loaded = perada.Run.load(run.save(tmp_path / "run"), backbone=Network().double())
    torch.testing.assert_close(loaded.predict(images, client=1).probabilities, expected, rtol=1e-12, atol=0)
    for form in ("safetensors", "torch-export", "onnx"):
        assert "differ from the run's by at most" in export_model(run, 1, form, tmp_path / form)


class Complex(Network):
    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.ones(8, 5, dtype=torch.complex64))

    def forward(self, x):
        return super().forward(torch.fft.irfft2(torch.fft.rfft2(x) * self.filter, s=(8, 8)))


def test_complex_parameters_are_rejected_where_they_are_trained():
    with pytest.raises(ValueError, match=r"filter.*complex"):
        finetune(Complex(), "full", engine="loop")
    finetune(Complex(), "head", engine="loop")


def doubled(module, arguments, output):
    return 2 * output


class Hooked(Network):
    """What a hook does to the layer's own output it does to the merged adapter's too."""

    def __init__(self):
        super().__init__()
        self.mix.register_forward_hook(doubled)


class NamesAFormat(Hooked):
    def forward(self, x):
        return super().forward(x.float())


@pytest.mark.parametrize("kind", [Hooked, NamesAFormat])
@pytest.mark.filterwarnings("ignore:the adapter .* cannot be merged")
def test_a_wrong_merge_is_rejected_however_little_was_trained(kind):
    run = finetune(kind(), lr_local=1e-6, lr_personal=1e-6)
    with pytest.raises(NotImplementedError, match="different outputs"):
        run.merged(0)


def inside_data_parallel():
    return nn.DataParallel(torch.compile(Network()))


def around_data_parallel():
    return torch.compile(nn.DataParallel(Network()))


def with_compiled_parts():
    network = Network()
    network.layout = torch.compile(network.layout)
    network.out = torch.compile(network.out)
    return network


@pytest.mark.parametrize(
    "make", [lambda: torch.compile(Network()), inside_data_parallel, around_data_parallel, with_compiled_parts]
)
def test_a_compiled_network_is_the_network_inside(make):
    compiled = make()
    backbone = build_backbone(compiled, 3)
    assert (backbone.name, backbone.head) == ("Network", "out")
    adapted = insert_adapter(backbone, "lora")
    assert list(adapted.model.state_dict()) == list(
        insert_adapter(build_backbone(Network(), 3), "lora").model.state_dict()
    )
    assert any("_orig_mod" in key for key in compiled.state_dict())  # the caller's own stays as it is


def small_vit(num_classes, name="vit_tiny_patch16_224", **options):
    return timm.create_model(name, img_size=32, depth=1, embed_dim=64, num_heads=2, num_classes=num_classes, **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: small_vit(0), r"built with num_classes=0.*reset_classifier\(3\)"),
        (lambda: small_vit(1000), r"num_classes=3.*'head'.*has 1000.*num_classes=1000"),
        (lambda: small_vit(7), r"num_classes=3.*'head'.*has 7.*num_classes=7"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 1000)), "'1' .* 1000 outputs.*set num_classes=1000"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 2)), "'1' .* 2 outputs"),
    ],
)
def test_a_network_with_more_outputs_than_classes_is_rejected(make, message):
    with pytest.raises(ValueError, match=message):
        finetune(make())


def test_more_outputs_than_labels_may_be_asked_for():
    network = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.Linear(16, 5))
    with pytest.warns(UserWarning, match=r"3 classes, .*5 outputs"):
        finetune(network)
    assert finetune(network, num_classes=5).state("global")["2.modules_to_save.default.bias"].shape == (5,)


def test_the_classifier_that_timm_names_is_the_head():
    model = small_vit(3)
    model.auxiliary = nn.Linear(64, 3)
    assert build_backbone(model, 3).head == "head"
    two_heads = small_vit(3, "deit_tiny_distilled_patch16_224")
    with pytest.raises(ValueError, match=r"\('head', 'head_dist'\)"):
        build_backbone(two_heads, 3)


def test_a_network_made_from_its_class_has_one_classifier_too():
    """Its configuration, which names the classifiers, is missing."""
    sizes = {"img_size": 32, "patch_size": 16, "embed_dim": 16, "depth": 1, "num_heads": 2}
    with pytest.raises(ValueError, match=r"\('head', 'head_dist'\)"):
        build_backbone(VisionTransformerDistilled(num_classes=3, **sizes), 3)
    assert build_backbone(VisionTransformer(num_classes=3, **sizes), 3).head == "head"


SMALL_TRANSFORMERS = {
    "vit_tiny_patch16_224": {"depth": 1},
    "eva02_tiny_patch14_224": {"depth": 1},
    "beitv2_base_patch16_224": {"depth": 1, "embed_dim": 96, "num_heads": 3},
    "swinv2_tiny_window8_256": {"depths": (1, 1), "embed_dim": 24, "num_heads": (1, 2)},
}


@pytest.mark.parametrize("name", SMALL_TRANSFORMERS)
@pytest.mark.parametrize("adapter", ["lora", "ia3"])
@pytest.mark.every(2)
def test_the_layers_that_a_module_calls_are_adapted(name, adapter):
    """The image size is known from the module, whatever size the images of the run have."""
    model = timm.create_model(name, img_size=56, num_classes=3, **SMALL_TRANSFORMERS[name])
    adapted = insert_adapter(build_backbone(model, 3), adapter)
    assert check_usage(adapted, torch.randn(1, 3, 56, 56)).problem is None
    adapted_qkv = any(path.endswith("attn.qkv.base_layer") for path, _ in adapted.model.named_modules())
    assert adapted_qkv == (name == "vit_tiny_patch16_224")


class ReadsWeights(nn.Module):
    """An own network that reads the weights of one of its layers."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, 4)
        self.read = nn.Linear(8, 8)
        self.called = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        h = self.stem(x).mean((2, 3))
        h = nn.functional.linear(h, self.read.weight)
        return self.head(self.called(h).relu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_layers_of_an_own_network_that_are_not_called_get_no_lora(dtype):
    model = insert_adapter(build_backbone(ReadsWeights().to(dtype), 3), "lora").model
    assert [path for path, _ in model.named_modules() if path.endswith("lora_A")] == ["called.lora_A"]
