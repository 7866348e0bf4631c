# SPDX-License-Identifier: Apache-2.0
"""Heads from class names: logits of transformers' own CLIP and SigLIP, what is trained, saved and read again."""

import copy
import re
import warnings
from dataclasses import replace

import pytest
import torch
from peft import PeftModel
from torch.utils.data import TensorDataset
from transformers import AutoModel, CLIPVisionConfig, CLIPVisionModel, SiglipModel, ViTConfig, ViTForImageClassification

import perada
from benchmarks.image_text import CLASSES, LONGEST, MEAN, SIDE, STD, save_image_text, word_tokenizer
from perada import Run
from perada.core.states import get_state
from perada.data import FederatedData
from perada.engine.fold_check import check_fold
from perada.lightning.module import FederatedClassifier
from perada.models.adapted import insert_adapter
from perada.models.backbones import build_backbone
from perada.models.configurations import AdapterChoice
from perada.models.spec import ModelSpec, frozen_digest
from perada.models.text_head import TextHead, ZeroShot
from perada.models.usage import check_usage
from perada.privacy import Privacy
from perada.results.formats import export_model
from tests.rejections import raises_naming, rejects

KINDS = ("clip", "siglip")
IMAGES = torch.randn(3, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
TEMPLATES = ["a photo of the {}.", "a sketch of a {}."]
EVERYTHING = {"train_logit_scale": True, "train_features": True}
QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "accelerator": "cpu",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in (*KINDS, "metaclip_2")}
    for kind, folder in folders.items():
        save_image_text(kind, folder)
    return folders


def read_network(folder):
    """The network of a folder, as transformers reads it."""
    return AutoModel.from_pretrained(folder).eval()


def tokens(network, texts):
    """The arguments of transformers' network for texts."""
    if isinstance(network, SiglipModel):
        batch = word_tokenizer()(texts, padding="max_length", max_length=LONGEST, return_tensors="pt")
        return {"input_ids": batch["input_ids"]}
    batch = word_tokenizer()(texts, padding=True, return_tensors="pt")
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}


def build(folder, **options):
    return build_backbone(f"hf:{folder}", text_head=TextHead(**{"class_names": CLASSES} | options))


def adapted(folder, adapter: AdapterChoice = "lora", **options):
    torch.manual_seed(0)
    return insert_adapter(build(folder, **options), adapter)


def data():
    def dataset(count, seed):
        random = torch.Generator().manual_seed(seed)
        images = torch.randint(0, 256, (count, 3, SIDE, SIDE), dtype=torch.uint8, generator=random)
        return TensorDataset(images, torch.arange(count) % len(CLASSES))

    return FederatedData([dataset(4, 0), dataset(5, 1)], test=[dataset(6, 2), dataset(9, 3)], num_classes=len(CLASSES))


def finetune(folder, adapter="lora", text_head=None, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return perada.finetune(
            f"hf:{folder}",
            data(),
            adapter=adapter,
            text_head={"class_names": CLASSES} | (text_head or {}),
            **{"algorithm": "fedavg", "rounds": 1, "local_steps": 2, "batch_size": 2, "lr_local": 0.1}
            | QUIET
            | options,
        )


@pytest.mark.parametrize("kind", [*KINDS, "metaclip_2"])
def test_without_training_logits_are_those_of_transformers(folders, kind):
    network = read_network(folders[kind])
    built = build(folders[kind])
    prompts = ["a photo of a cat.", "a photo of a golden retriever.", "a photo of a truck."]
    with torch.no_grad():
        expected = network(pixel_values=IMAGES, **tokens(network, prompts)).logits_per_image
        torch.testing.assert_close(built.model(IMAGES), expected, rtol=1e-5, atol=1e-5)
    # Networks with random weights may have nearly equal logits for everything.
    assert expected.std(1).min() > 0.05
    assert (built.image_config.mean, built.image_config.std) == (tuple(MEAN), tuple(STD))
    assert not any("text_model" in name for name, _ in built.model.named_modules())


@pytest.mark.parametrize("kind", KINDS)
def test_features_of_templates_are_averaged(folders, kind):
    network = read_network(folders[kind])
    expected = []
    for name in ("cat", "golden retriever", "truck"):
        of_class = []
        for template in TEMPLATES:
            text = template.replace("{}", name)
            with torch.no_grad():
                features = network.get_text_features(**tokens(network, [text])).pooler_output[0]
            of_class.append(features / features.norm())
        mean = sum(of_class) / len(of_class)
        expected.append(mean / mean.norm())
    head = build(folders[kind], templates=TEMPLATES).model.classifier
    torch.testing.assert_close(head.zero_shot.text_features, torch.stack(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_positions_are_interpolated_to_another_image_size(folders, kind):
    network = read_network(folders[kind])
    options = TextHead(class_names=CLASSES)
    larger = build_backbone(f"hf:{folders[kind]}", text_head=options, image_size=2 * SIDE).model
    images = torch.randn(2, 3, 2 * SIDE, 2 * SIDE, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        features = network.get_image_features(pixel_values=images, interpolate_pos_encoding=True).pooler_output
        expected = larger.classifier(features)
        torch.testing.assert_close(larger(images), expected)


def test_letters_of_siglip_are_lower_case(folders):
    plain = build(folders["siglip"]).model.classifier.zero_shot.text_features
    capitals = build(
        folders["siglip"], class_names=[name.upper() for name in CLASSES]
    ).model.classifier.zero_shot.text_features
    assert torch.equal(plain, capitals)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_a_trained_head(folders, kind):
    network = read_network(folders[kind])
    head = build(folders[kind], **EVERYTHING).model.classifier
    features = torch.randn(4, head.zero_shot.text_features.shape[1], generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        before = head(features)
        for parameter in head.parameters():
            assert not parameter.any()
            parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
        weight = head.zero_shot.text_features + head.feature_offset
        scale = (network.logit_scale + head.scale_offset).exp()
        expected = scale * features / features.norm(dim=1, keepdim=True) @ weight.T
        if kind == "siglip":
            expected += network.logit_bias + head.bias_offset
        torch.testing.assert_close(head(features), expected)
        assert (head(features) - before).abs().max() > 0.1
        head.reset_parameters()
        assert torch.equal(head(features), before)


@pytest.mark.parametrize(
    ("options", "trained"),
    [
        ({}, set()),
        ({"train_logit_scale": True}, {"scale_offset", "bias_offset"}),
        ({"train_features": True}, {"feature_offset"}),
        (EVERYTHING, {"scale_offset", "bias_offset", "feature_offset"}),
    ],
)
def test_what_of_the_head_is_trained(folders, options, trained):
    state = get_state(adapted(folders["siglip"], **options).model)
    in_head = {name.removeprefix("classifier.modules_to_save.default.") for name in state if "classifier" in name}
    assert in_head == trained


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("adapter", "options"),
    [
        ("lora", {}),
        ("lora", EVERYTHING),
        ("head", EVERYTHING),
        ("bias_norm", {"train_logit_scale": True}),
        ("bottleneck", {"train_features": True}),
        ("prompt", EVERYTHING),
        ("ia3", {}),
    ],
)
def test_clients_train_together(folders, kind, adapter, options):
    model = adapted(folders[kind], adapter, **options)
    usage = check_usage(model, IMAGES)
    assert (usage.problem, usage.unused, usage.merging) == (None, (), None)
    assert check_fold(model.model, torch.stack([IMAGES, IMAGES.flip(0)])) is None


def test_lora_is_in_the_attention(folders):
    names = {name.partition(".lora_")[0] for name in get_state(adapted(folders["clip"]).model)}
    blocks = [f"vision_model.encoder.layers.{block}.self_attn" for block in range(2)]
    assert names == {f"{block}.{layer}_proj" for block in blocks for layer in ("q", "k", "v", "out")}


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_stand_before_the_patches(folders, kind):
    """Deep prompts, written out with the blocks of transformers."""
    model = adapted(folders[kind], "prompt").model
    plain = build(folders[kind]).model
    tower = plain.vision_model
    start = 1 if kind == "clip" else 0
    with torch.no_grad():
        tokens_of_image = tower.embeddings(IMAGES)
        if kind == "clip":
            tokens_of_image = tower.pre_layrnorm(tokens_of_image)
        for number, block in enumerate(tower.encoder.layers):
            prompts = model.get_submodule(f"vision_model.encoder.layers.{number}.perada_prompt_enter.default").prompts
            inserted = prompts.weight.expand(len(IMAGES), -1, -1)
            parts = [tokens_of_image[:, :start], inserted, tokens_of_image[:, start:]]
            output = block(torch.cat(parts, 1), None)
            tokens_of_image = torch.cat([output[:, :start], output[:, start + inserted.shape[1] :]], 1)
        if kind == "clip":
            features = plain.visual_projection(tower.post_layernorm(tokens_of_image[:, 0]))
        else:
            features = tower.head(tower.post_layernorm(tokens_of_image))
        torch.testing.assert_close(model(IMAGES), plain.classifier(features), rtol=1e-5, atol=1e-5)
        assert (model(IMAGES) - plain(IMAGES)).abs().max() > 1e-3


def test_frozen_weights_of_sites_cover_the_texts(folders, tmp_path):
    digest = frozen_digest(adapted(folders["clip"]).model)
    assert frozen_digest(adapted(folders["clip"]).model) == digest
    for changed in ({"templates": TEMPLATES}, {"class_names": CLASSES[::-1]}, {"class_names": ["cat", "dog", "truck"]}):
        for options in ({}, EVERYTHING):
            reference = digest if not options else frozen_digest(adapted(folders["clip"], **options).model)
            assert frozen_digest(adapted(folders["clip"], **options, **changed).model) != reference
    network = read_network(folders["clip"])
    with torch.no_grad():
        network.text_projection.weight[0] += 1
    save_image_text("clip", tmp_path)
    network.save_pretrained(tmp_path)
    assert frozen_digest(adapted(tmp_path).model) != digest


def test_frozen_weights_of_sites_do_not_depend_on_the_last_digits_of_features(folders):
    """Processors of another kind add in another order."""
    model = adapted(folders["clip"]).model
    digest = frozen_digest(model)
    for module in model.modules():
        if isinstance(module, ZeroShot):
            module.text_features *= 1 + 1e-6
    assert frozen_digest(model) == digest
    with torch.no_grad():
        model.vision_model.post_layernorm.weight[0] += 1e-6
    assert frozen_digest(model) != digest


@pytest.mark.parametrize("kind", KINDS)
def test_scores_before_training_are_zero_shot(folders, kind):
    run = finetune(folders[kind])
    network = read_network(folders[kind])
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    prompts = ["a photo of a cat.", "a photo of a golden retriever.", "a photo of a truck."]
    accuracies = []
    for dataset in data().test:
        images, labels = dataset.tensors
        with torch.no_grad():
            prepared = (images / 255 - mean) / std
            logits = network(pixel_values=prepared, **tokens(network, prompts)).logits_per_image
        accuracies.append(float((logits.argmax(1) == labels).double().mean()))
    assert run.metrics["initial"]["personal/local_test"] == pytest.approx(accuracies)


@pytest.mark.parametrize("kind", KINDS)
def test_saved_adapters_fit_the_whole_network_of_transformers(folders, kind, tmp_path):
    run = finetune(folders[kind])
    run.export(tmp_path)
    network = read_network(folders[kind])
    with warnings.catch_warnings():
        # The network has no classifier, since its texts are the classes.
        warnings.simplefilter("ignore")
        read = PeftModel.from_pretrained(network, tmp_path / "global").eval()
    prompts = ["a photo of a cat.", "a photo of a golden retriever.", "a photo of a truck."]
    model = run.global_model()
    with torch.no_grad():
        logits = model(IMAGES)
        expected = read(pixel_values=IMAGES, **tokens(network, prompts)).logits_per_image
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        assert (logits - build(folders[kind]).model(IMAGES)).abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_run_is_read_again(folders, kind, tmp_path):
    run = finetune(folders[kind], text_head=EVERYTHING)
    run.save(tmp_path)
    read = Run.load(tmp_path)
    assert read.info["text_head"] == {"class_names": CLASSES, "templates": ["a photo of a {}."]} | EVERYTHING
    with torch.no_grad():
        assert torch.equal(read.global_model()(IMAGES), run.global_model()(IMAGES))
        merged = read.merged(None).eval()
        torch.testing.assert_close(merged(IMAGES), run.global_model()(IMAGES), rtol=1e-4, atol=1e-4)


def test_the_model_card_loads_the_model(folders, tmp_path, monkeypatch):
    run = finetune(folders["siglip"], text_head=EVERYTHING | {"templates": TEMPLATES}, image_size=2 * SIDE)
    run.export(tmp_path)
    monkeypatch.chdir(tmp_path / "global")
    code = re.search(r"```python\n(.*?)\n```", (tmp_path / "global" / "README.md").read_text(), re.DOTALL)[1]
    names = {}
    exec(code, names)  # what the card tells readers to run
    images = torch.randn(2, 3, 2 * SIDE, 2 * SIDE)
    with torch.no_grad():
        torch.testing.assert_close(names["model"](images), run.global_model()(images))


def test_a_record_of_other_options_is_rejected(folders, tmp_path):
    run = finetune(folders["clip"])
    for change in ({"templates": "a {}"}, {"class_names": ["cat"]}, {"train_features": "no"}, {"path": "/etc/passwd"}):
        changed = copy.deepcopy(run)
        changed.info["text_head"] |= change
        folder = tmp_path / next(iter(change))
        with raises_naming((ValueError, TypeError, KeyError), "run.json"):
            changed.save(folder)
            Run.load(folder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_onnx(folders, kind, tmp_path):
    # The logits of the file are compared there.
    export_model(finetune(folders[kind], text_head=EVERYTHING), None, "onnx", tmp_path)
    assert list(tmp_path.glob("*.onnx"))


def test_a_checkpoint_is_restored(folders, tmp_path):
    checkpoints = {"default_root_dir": tmp_path, "enable_checkpointing": True, "logger": True}
    run = finetune(folders["clip"], text_head={"train_logit_scale": True}, **QUIET | checkpoints)
    (folder,) = (tmp_path / "lightning_logs").iterdir()
    read = Run.load(folder)
    with torch.no_grad():
        assert torch.equal(read.global_model()(IMAGES), run.global_model()(IMAGES))


@pytest.mark.filterwarnings("ignore:.*(delta=|secure_rng|test mode|repeat).*:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_private_gradients_without_noise_are_those_of_training(folders, kind):
    """A bound that no gradient reaches, all images in each batch: DP-SGD is then gradient descent."""
    pytest.importorskip("opacus")
    options = {"text_head": EVERYTHING, "local_steps": 3, "batch_size": 64, "lr_local": 0.1}
    plain = finetune(folders[kind], **options).state("global")
    privacy = Privacy(noise_multiplier=1e-9, max_norm=1e3, delta=1e-3, secure_rng=False)
    private = finetune(folders[kind], privacy=privacy, **options).state("global")
    for name, value in plain.items():
        torch.testing.assert_close(private[name], value, rtol=0, atol=3e-6)
        # Offsets are zero at first. That of the bias stays, since a softmax is the same with any.
        if name.endswith(("feature_offset", "scale_offset")):
            assert value.abs().max() > 1e-5


@pytest.mark.parametrize("algorithm", ["fedper", "moon", "fedrod"])
def test_algorithms_about_the_head(folders, algorithm):
    """The head is no linear layer, which FedROD needs, and has no tensors for others if it is fixed."""
    with raises_naming(ValueError, {"fedper": "FedPer", "moon": "Moon", "fedrod": "FedROD"}[algorithm]):
        finetune(folders["clip"], algorithm=algorithm)
    if algorithm == "fedrod":
        with raises_naming(ValueError, "FedROD", "classifier.modules_to_save.default.feature_offset"):
            finetune(folders["clip"], text_head={"train_features": True}, algorithm=algorithm)
    else:
        run = finetune(folders["clip"], text_head={"train_logit_scale": True}, algorithm=algorithm)
        assert run.metrics["clients"]


def test_other_initialisations_keep_the_head(folders):
    options = TextHead(class_names=CLASSES, **EVERYTHING)
    spec = ModelSpec(f"hf:{folders['clip']}", len(CLASSES), adapter="lora", text_head=options)
    model = spec.build()
    first, second = spec.initial_state(model, 0), spec.initial_state(model, 1)
    for name in first:
        is_random = ".lora_A." in name
        assert torch.equal(first[name], second[name]) != is_random, name


def test_without_weights_only_the_shape_is_right(folders):
    options = TextHead(class_names=CLASSES)
    model = build_backbone(f"hf:{folders['clip']}", 3, pretrained=False, text_head=options).model
    same = build(folders["clip"]).model
    assert {key: value.shape for key, value in model.state_dict().items()} == {
        key: value.shape for key, value in same.state_dict().items()
    }


def test_names_come_from_the_data(folders):
    module = FederatedClassifier(f"hf:{folders['clip']}", "lora", text_head=TextHead())
    module.build(3, perada.tasks.Classification(), 0, classes=CLASSES)
    assert module.text_head == TextHead(class_names=CLASSES)
    module = FederatedClassifier(f"hf:{folders['clip']}", "lora", text_head=TextHead())
    with raises_naming(ValueError, "class_names", "text_head"):
        module.build(3, perada.tasks.Classification(), 0)
    module = FederatedClassifier(f"hf:{folders['clip']}", "lora", text_head=TextHead())
    with raises_naming(ValueError, "cat", 2, 3, "class_names"):
        module.build(3, perada.tasks.Classification(), 0, classes=["cat", "dog"])


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"templates": ["a photo."]}, ["templates", "a photo."]),
        ({"templates": "a {}"}, ["templates", "a {}"]),
        ({"templates": []}, ["templates"]),
        ({"templates": None}, ["templates", None]),
        ({"class_names": ["cat", "dog", "cat"]}, ["class_names", "'cat'"]),
        ({"class_names": ["big_cat", "big cat"]}, ["class_names", "'big cat'"]),
        ({"class_names": ["cat", 3]}, ["class_names"]),
        ({"class_names": "cat"}, ["class_names", "'cat'"]),
        ({"train_logit_scale": "yes"}, ["train_logit_scale", "'yes'"]),
        ({"train_features": 2}, ["train_features", 2]),
    ],
)
def test_bad_options_are_named(options, facts):
    with raises_naming(ValueError, *facts):
        TextHead(**options)


def test_a_prompt_that_is_too_long_is_named(folders):
    template = "a photo of " + "the " * LONGEST + "{}."
    with raises_naming(ValueError, "cat", LONGEST, "class_names"):
        build(folders["clip"], templates=[template])


def test_networks_without_text_tower_are_rejected(tmp_path):
    config = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    ViTForImageClassification(ViTConfig(**config, image_size=32, patch_size=8)).save_pretrained(tmp_path / "vit")
    vision = CLIPVisionConfig(**config, image_size=32, patch_size=8)
    CLIPVisionModel(vision).save_pretrained(tmp_path / "tower")
    for folder, kind in (("vit", "vit"), ("tower", "clip_vision_model")):
        with raises_naming(ValueError, str(tmp_path / folder), kind, "text_head"):
            build(tmp_path / folder)
    for backbone in ("test_vit", torch.nn.Linear(3, 3)):
        with raises_naming(ValueError, "text_head", backbone if isinstance(backbone, str) else "Linear"):
            FederatedClassifier(backbone, text_head=TextHead())


def test_a_folder_without_tokenizer_is_named(tmp_path):
    save_image_text("clip", tmp_path, tokenizer=False)
    with raises_naming(FileNotFoundError, str(tmp_path), "tokenizer", "text_head"):
        build(tmp_path)


def test_a_head_that_nothing_trains_is_rejected(folders):
    with rejects("adapter", "head", "train_logit_scale", "train_features"):
        adapted(folders["clip"], "head")


def test_random_weights_are_rejected():
    with raises_naming(ValueError, "text_head", "pretrained=False"):
        FederatedClassifier("hf:any", pretrained=False, text_head=TextHead())


def test_options_are_not_shared():
    options = TextHead(class_names=CLASSES)
    changed = replace(options, templates=TEMPLATES)
    assert copy.deepcopy(options) == options != changed
