# SPDX-License-Identifier: Apache-2.0
"""What a private run exports is what was trained: not the adapter it began with, and what plain PEFT predicts with."""

from itertools import product

import pytest
import timm
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.utils.data import TensorDataset
from transformers import ViTConfig, ViTForImageClassification

import perada
from tests.options import sections

from ..algorithms.problems import QUIET

SIZE = 32
CLASSES = 3


pytestmark = pytest.mark.usefixtures("quick_epsilon")


def federation():
    random = torch.Generator().manual_seed(0)

    def images(n):
        y = torch.arange(n) % CLASSES
        return TensorDataset(torch.randn(n, 3, SIZE, SIZE, generator=random) + y.view(-1, 1, 1, 1), y)

    return perada.FederatedData([images(12), images(7)], [images(9), images(6)], num_classes=CLASSES)


def small_vit(folder):
    """A folder of transformers with random weights, large enough for single precision to see what attention learns."""
    torch.manual_seed(2)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = ViTConfig(**sizes, initializer_range=0.3, image_size=SIZE, patch_size=8, num_labels=CLASSES)
    ViTForImageClassification(config).save_pretrained(folder)
    return folder


def plain_peft(kind, run, client, vit):
    """The adapter by PEFT alone, on a fresh network with the frozen weights of the run."""
    folder = str(run / f"client_{client}")
    if kind == "transformers":
        return PeftModel.from_pretrained(
            ViTForImageClassification.from_pretrained(vit, num_labels=CLASSES), folder
        ).eval()
    network = timm.create_model("test_vit", num_classes=CLASSES, img_size=SIZE)
    unfit = network.load_state_dict(load_file(run / "backbone.safetensors"), strict=False)
    assert not unfit.unexpected_keys
    assert all(name.startswith("head.") for name in unfit.missing_keys)
    return PeftModel.from_pretrained(network, folder).eval()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # read by PEFT
@pytest.mark.parametrize(
    ("kind", "sigma", "engine"),
    [
        ("transformers", 0.5, "folded"),
        *(
            pytest.param(kind, sigma, engine, marks=pytest.mark.slow)
            for kind, sigma, engine in product(["timm", "transformers"], [0.0, 0.5], ["folded", "opacus"])
            if (kind, sigma, engine) != ("transformers", 0.5, "folded")
        ),
    ],
)
def test_exported_lora_is_what_was_trained(tmp_path, kind, sigma, engine):
    if kind == "timm":
        backbone = {"backbone": "test_vit", "pretrained": False, "image_size": SIZE}
    else:
        backbone = {"backbone": f"hf:{small_vit(tmp_path / 'vit')}"}
    options = {"adapter": "lora", "algorithm": "perada_no_kd", "batch_size": 4, "local_steps": 3, "lr_local": 0.2}
    options |= {"lr_personal": 0.2, "seed": 1} | QUIET
    privacy = {"noise_multiplier": sigma, "max_norm": 0.5, "delta": 1e-3, "engine": engine}

    def train(rounds):
        return perada.finetune(**sections(data=federation(), rounds=rounds, privacy=privacy, **backbone, **options))

    run = train(2)
    start = train(0).state("global")
    assert any("lora_A" in key for key in start)
    assert any("lora_B" in key for key in start)
    for state in (run.state("global"), run.state("personal", 0), run.state("personal", 1)):
        assert [key for key in state if torch.equal(state[key], start[key])] == []
    folder = run.export(tmp_path / "run")
    for client, test in enumerate(federation().test):
        exported = plain_peft(kind, folder, client, tmp_path / "vit")
        x, y = test[:]
        with torch.no_grad():
            predicted = exported(x) if kind == "timm" else exported(x).logits
            assert torch.equal(predicted, run.personal(client)(x))
        accuracy = float((predicted.argmax(1) == y).double().mean())
        assert run.metrics["clients"]["personal/local_test"][client] == pytest.approx(accuracy)
        saved = load_file(folder / f"client_{client}" / "adapter_model.safetensors")
        assert all(bool(value.abs().max() > 0) for key, value in saved.items() if "lora_B" in key)
        assert f"client {client}" in (folder / f"client_{client}" / "README.md").read_text()
