# SPDX-License-Identifier: Apache-2.0
"""Image towers of OpenCLIP's networks, with its own towers and in the form of BiomedCLIP."""

import logging
import warnings

import pytest
import torch
from peft import PeftModel
from torch import nn
from torch.utils.data import TensorDataset

import perada
from benchmarks.image_text import CLASSES, LONGEST, MEAN, SIDE, STD, save_open_clip
from perada import Run
from perada.data import FederatedData
from perada.engine.fold_check import check_fold
from perada.lightning.module import FederatedClassifier
from perada.models.adapted import insert_adapter
from perada.models.backbones import build_backbone
from perada.models.text_head import TextHead
from perada.models.usage import check_usage
from perada.results.formats import export_model
from tests.rejections import raises_naming

open_clip = pytest.importorskip("open_clip", reason="needs the extra open-clip")
KINDS = ("plain", "biomed")
TEXTS = ["a photo of a cat.", "a photo of a golden retriever.", "a photo of a truck."]
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
TEXT_HEAD = {"class_names": CLASSES, "train_logit_scale": True, "train_features": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    for kind, folder in folders.items():
        save_open_clip(kind, folder)
    return folders


def images(count=3):
    return torch.randn(count, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))


def read_network(folder):
    return open_clip.create_model(f"local-dir:{folder}", require_pretrained=True).eval()


def logits_of(network, folder, x):
    """OpenCLIP's own logits of images for the prompts of the classes."""
    return network.get_logits(x, open_clip.get_tokenizer(f"local-dir:{folder}")(TEXTS))[0]


def finetune(folder, adapter="lora", **options):
    def dataset(seed):
        random = torch.Generator().manual_seed(seed)
        pixels = torch.randint(0, 256, (4, 3, SIDE, SIDE), dtype=torch.uint8, generator=random)
        return TensorDataset(pixels, torch.arange(4) % len(CLASSES))

    data = FederatedData([dataset(0), dataset(1)], num_classes=len(CLASSES))
    training = {"algorithm": "fedavg", "rounds": 1, "local_steps": 1, "batch_size": 2, "lr_local": 0.1}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return perada.finetune(f"open_clip:{folder}", data, adapter=adapter, **training | QUIET | options)


@pytest.mark.parametrize("kind", KINDS)
def test_without_training_logits_are_those_of_open_clip(folders, kind):
    folder = folders[kind]
    handlers = list(logging.getLogger().handlers)
    built = build_backbone(f"open_clip:{folder}", text_head=TextHead(class_names=CLASSES))
    assert logging.getLogger().handlers == handlers
    x = images()
    with torch.no_grad():
        expected = logits_of(read_network(folder), folder, x)
        torch.testing.assert_close(built.model(x), expected, rtol=1e-5, atol=1e-5)
    assert expected.std(1).min() > 0.05
    image = built.image_config
    assert (image.input_size[1:], image.mean, image.std) == ((SIDE, SIDE), tuple(MEAN), tuple(STD))


@pytest.mark.parametrize("kind", KINDS)
def test_a_linear_head_reads_the_features(folders, kind):
    model = build_backbone(f"open_clip:{folders[kind]}", 5).model
    x = images()
    with torch.no_grad():
        features = read_network(folders[kind]).encode_image(x)
        torch.testing.assert_close(model(x), model.classifier(features))


def test_positions_are_interpolated_to_another_image_size(folders):
    options = TextHead(class_names=CLASSES)
    larger = build_backbone(f"open_clip:{folders['plain']}", text_head=options, image_size=2 * SIDE)
    network = open_clip.create_model(f"local-dir:{folders['plain']}", force_image_size=2 * SIDE).eval()
    x = torch.randn(2, 3, 2 * SIDE, 2 * SIDE)
    with torch.no_grad():
        torch.testing.assert_close(larger.model(x), logits_of(network, folders["plain"], x), rtol=1e-5, atol=1e-5)
    assert larger.image_config.input_size == (3, 2 * SIDE, 2 * SIDE)


@pytest.mark.parametrize(
    ("kind", "adapter"),
    [
        *((kind, adapter) for kind in KINDS for adapter in ("lora", "head", "bottleneck", "prompt")),
        ("biomed", "bias_norm"),
    ],
)
def test_clients_train_together(folders, kind, adapter):
    built = build_backbone(f"open_clip:{folders[kind]}", text_head=TextHead(**TEXT_HEAD))
    adapted = insert_adapter(built, adapter)
    x = images(2)
    usage = check_usage(adapted, x)
    assert (usage.problem, usage.unused, usage.merging) == (None, (), None)
    assert check_fold(adapted.model, torch.stack([x, x.flip(0)])) is None


def test_prompts_in_open_clips_own_tower(folders):
    """Deep prompts, written out with the blocks of OpenCLIP."""
    model = insert_adapter(build_backbone(f"open_clip:{folders['plain']}", 3), "prompt", tokens=2).model
    visual = read_network(folders["plain"]).visual
    x = images()
    with torch.no_grad():
        patches = visual.conv1(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([visual.class_embedding.expand(len(x), 1, -1), patches], 1) + visual.positional_embedding
        tokens = visual.ln_pre(tokens)
        for number, block in enumerate(visual.transformer.resblocks):
            prompts = model.get_submodule(f"visual.transformer.resblocks.{number}.perada_prompt_enter.default").prompts
            inserted = prompts.weight.expand(len(x), -1, -1)
            output = block(torch.cat([tokens[:, :1], inserted, tokens[:, 1:]], 1))
            tokens = torch.cat([output[:, :1], output[:, 3:]], 1)
        features = visual.ln_post(tokens[:, 0]) @ visual.proj
        torch.testing.assert_close(model(x), model.classifier(features), rtol=1e-5, atol=1e-5)


def test_prompts_in_a_tower_of_timm_are_those_of_the_network_alone(folders):
    """The trunk of the tower is a network of timm, which is given the same prompts."""
    model = insert_adapter(build_backbone(f"open_clip:{folders['biomed']}", 3), "prompt", tokens=2).model
    trunk = read_network(folders["biomed"]).visual.trunk
    trunk.reset_classifier(3, global_pool="token")
    alone = insert_adapter(build_backbone(trunk, 3), "prompt", tokens=2).model
    own_state = model.state_dict()
    state = {key: own_state[f"visual.trunk.{key}"] for key in alone.state_dict() if f"visual.trunk.{key}" in own_state}
    assert sum("prompts" in key for key in state) == len(trunk.blocks)
    alone.load_state_dict(state, strict=False)
    features = {}
    for name, network in (("alone", alone), ("tower", model.visual.trunk)):
        network.norm.register_forward_hook(lambda _, __, output, name=name: features.update({name: output}))
    x = images()
    with torch.no_grad():
        alone(x)
        model(x)
    torch.testing.assert_close(features["tower"], features["alone"])


@pytest.mark.parametrize("kind", KINDS)
def test_saved_adapters_fit_the_whole_network_of_open_clip(folders, kind, tmp_path):
    run = finetune(folders[kind], text_head={"class_names": CLASSES})
    run.export(tmp_path / "peft")
    network = read_network(folders[kind])
    with warnings.catch_warnings():
        # The network has no classifier, since its texts are the classes.
        warnings.simplefilter("ignore")
        read = PeftModel.from_pretrained(network, tmp_path / "peft" / "global")
    x = images()
    model = run.global_model()
    run.save(tmp_path / "run")
    with torch.no_grad():
        logits = model(x)
        expected = logits_of(read.get_base_model().eval(), folders[kind], x)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(Run.load(tmp_path / "run").global_model()(x), logits)
        torch.testing.assert_close(run.merged(None).eval()(x), logits, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_onnx(folders, kind, tmp_path):
    # The logits of the file are compared there.
    export_model(finetune(folders[kind], text_head=TEXT_HEAD), None, "onnx", tmp_path)
    assert list(tmp_path.glob("*.onnx"))


def test_without_weights_only_the_shape_is_right(folders):
    for head in (None, TextHead(class_names=CLASSES)):
        state = build_backbone(f"open_clip:{folders['plain']}", 3, pretrained=False, text_head=head).model.state_dict()
        same = build_backbone(f"open_clip:{folders['plain']}", 3, text_head=head).model.state_dict()
        assert {key: value.shape for key, value in state.items()} == {key: value.shape for key, value in same.items()}
        trained = "visual.transformer.resblocks.0.mlp.c_fc.weight"
        assert not torch.equal(state[trained], same[trained])


def test_rejections(folders, tmp_path):
    with raises_naming(FileNotFoundError, str(tmp_path)):
        build_backbone(f"open_clip:{tmp_path}", 3)
    config = (folders["plain"] / "open_clip_config.json").read_text()
    (tmp_path / "open_clip_config.json").write_text(config)
    with raises_naming(FileNotFoundError, str(tmp_path)):
        build_backbone(f"open_clip:{tmp_path}", 3)
    with raises_naming(ValueError, "in_chans", 1):
        build_backbone(f"open_clip:{folders['plain']}", 3, in_chans=1)
    long = TextHead(["a photo of " + "the " * LONGEST + "{}."], CLASSES)
    with raises_naming(ValueError, "cat", LONGEST):
        build_backbone(f"open_clip:{folders['plain']}", text_head=long)
    FederatedClassifier(f"open_clip:{folders['plain']}", text_head=TextHead())


def test_only_the_image_tower_is_kept(folders):
    model = build_backbone(f"open_clip:{folders['biomed']}", text_head=TextHead(class_names=CLASSES)).model
    assert not any(isinstance(module, nn.Embedding) for module in model.modules())
