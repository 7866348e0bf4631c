# SPDX-License-Identifier: Apache-2.0
"""Networks whose forward passes mix the images of a batch are not folded: a client's results are those of it alone."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import perada
from perada.engine.fold_check import check_fold
from perada.models.adapted import insert_adapter
from perada.models.backbones import build_backbone
from tests.options import sections


class Net(nn.Module):
    """A network of one's own, with something between its layers."""

    def __init__(self, between):
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 3)
        self.between = between

    def forward(self, x):
        return self.fc(self.norm(self.between(self.conv(x))).relu().mean((2, 3)))


def centred(h):
    return h - h.mean(0)


def centred_a_little(h):
    return h - 0.01 * h.mean(0)


def asks_for_a_sign(h):
    return h if h.mean() > 0 else -2 * h


MIXING = [centred, centred_a_little, asks_for_a_sign]


def data():
    random = torch.Generator().manual_seed(1)

    def part(n, shift):
        y = torch.arange(n) % 3
        return TensorDataset(torch.randn(n, 1, 8, 8, generator=random) + y.view(-1, 1, 1, 1) - shift, y)

    return perada.FederatedData([part(n, k) for k, n in enumerate((9, 12, 10))], [part(3, k) for k in range(3)])


def finetune(between, **options):
    torch.manual_seed(0)
    common = {"adapter": "full", "rounds": 2, "local_epochs": 1, "batch_size": 5, "lr_personal": 0.1, "lr_local": 0.1}
    quiet = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu"}
    return perada.finetune(Net(between), data(), **sections(**common | quiet | options))


@pytest.mark.parametrize("between", MIXING)
def test_a_network_that_mixes_images_takes_the_loop(between):
    wanted = finetune(between, algorithm="ditto", engine="loop")
    with pytest.warns(UserWarning, match=r"engine='auto'.*'Net': it mixes"):
        run = finetune(between, algorithm="ditto")
    for role in ("global", "personal"):
        for state, expected in zip(run.states(role), wanted.states(role), strict=True):
            for key, value in expected.items():
                assert torch.equal(state[key], value)
    assert run.metrics == wanted.metrics


@pytest.mark.parametrize("between", MIXING)
def test_it_is_not_folded_either_where_that_is_asked_for(between):
    with pytest.raises(ValueError, match=r"engine='folded'.*'Net': it mixes"):
        finetune(between, algorithm="fedavg", engine="folded")


def test_what_fails_in_a_folded_batch_takes_the_loop():
    """timm resamples the positions of a ViT with dynamic_img_size, which takes them for those of one image."""
    torch.manual_seed(0)
    images = perada.FederatedData([TensorDataset(torch.randn(8, 3, 64, 64), torch.arange(8) % 3) for _ in range(2)], [])
    options = {"adapter": "full", "pretrained": False, "rounds": 1, "local_steps": 1, "batch_size": 4, "logger": False}
    options |= {"algorithm": "fedavg", "enable_progress_bar": False, "accelerator": "cpu"}
    with pytest.warns(UserWarning, match=r"'test_vit': .*\(\w+Error:"):
        run = perada.finetune("test_vit", images, **sections(**options))
    expected = perada.finetune("test_vit", images, **sections(**options | {"engine": "loop"}))
    for key, value in expected.state("global").items():
        assert torch.equal(run.state("global")[key], value)


@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "net"])
def test_networks_that_keep_images_apart_are_folded(name, clients):
    torch.manual_seed(0)
    dropping = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 5))
    options = {"pretrained": False, "image_size": 32 if name == "test_vit" else None}
    backbone = build_backbone(dropping, 5) if name == "net" else build_backbone(name, 5, **options)
    adapter = {"test_resnet": "full", "test_vit": "lora", "net": "full"}[name]
    model = insert_adapter(backbone, adapter).model
    assert check_fold(model, torch.randn(clients, 6, 3, 32, 32)) is None


@pytest.mark.parametrize(("layers", "images"), [((), 1), ((nn.BatchNorm1d(8),), 2)])
def test_only_batch_statistics_need_more_than_one_image_of_a_client(layers, images):
    rows = set()
    first = nn.Flatten()
    first.register_forward_hook(lambda layer, inputs, out: rows.add(len(out)))
    network = nn.Sequential(first, nn.Linear(12, 8), *layers, nn.Linear(8, 3))
    model = insert_adapter(build_backbone(network, 3), "full").model
    assert check_fold(model, torch.randn(2, 6, 3, 2, 2)) is None
    assert max(rows) == 2 * images  # two clients in a folded pass


def test_a_network_that_draws_from_the_global_stream_is_compared_where_it_does_not():
    layers = [nn.Flatten(), nn.Linear(64, 3)]

    class Noisy(nn.Sequential):
        def forward(self, x):
            return super().forward(x + torch.randn_like(x) * self.training)

    assert (
        check_fold(insert_adapter(build_backbone(Noisy(*layers), 3), "full").model, torch.randn(2, 6, 1, 8, 8)) is None
    )


class OnlyHalf(Net):
    """A network that computes in bfloat16 only, so that no pass in double precision can decide."""

    def forward(self, x):
        if x.dtype != torch.bfloat16:
            raise TypeError(f"images of {x.dtype}")
        return super().forward(x)


def rounded_by_kernel(h):
    """Differs by a roundoff of bfloat16 for more than one image, as where another kernel is chosen."""
    return h * (1 + 2**-7) if len(h) > 1 else h


@pytest.mark.parametrize(("between", "folds"), [(nn.Identity(), True), (rounded_by_kernel, True), (centred, False)])
def test_rounding_of_a_network_with_a_fixed_half_precision_is_no_mixing(between, folds):
    torch.manual_seed(0)
    model = OnlyHalf(between).bfloat16()
    model.norm = nn.Identity()
    reason = check_fold(model, torch.randn(2, 2, 1, 8, 8, dtype=torch.bfloat16))
    assert reason is None if folds else reason.startswith("it mixes the images of a batch")


def test_a_network_that_fails_for_single_clients_too_does_not_fail_because_of_two():
    def fail(h):
        raise ValueError("an image of this size")

    assert check_fold(Net(fail), torch.randn(2, 2, 1, 8, 8)) is None
