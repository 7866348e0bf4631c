# SPDX-License-Identifier: Apache-2.0
"""Features of images: what no trained tensor precedes, found in networks of any kind, and computed once."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.utils.data import Subset, TensorDataset

import perada
import perada.models.twins  # registers the twins of timm's layers
from perada.core.seeding import Streams, generator
from perada.core.states import expand, get_state, parameter_keys
from perada.data import ByDomain, FederatedData, FederatedDataModule, Images
from perada.data.batches.features import BLOCK, FeatureCache, FeatureStore, SharedFeatures, sharing_features
from perada.data.batches.samples import make_store
from perada.data.batches.transforms import Preparation
from perada.engine import Engine
from perada.engine.fold import fold
from perada.engine.frozen_trunk import FrozenTrunk, find_trunk
from perada.engine.without_numbers import share_before_trained
from perada.models.adapted import insert_adapter
from perada.models.backbones import build_backbone
from tests.options import sections

CLIENTS = 3
ROWS = 4
SIDE = 32
CLASSES = 5


class Odd(nn.Module):
    """Arithmetic between modules, a module used twice, a branch around a trained layer."""

    def __init__(self):
        super().__init__()
        self.stem, self.twice = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
        self.side, self.middle, self.fc = nn.Conv2d(4, 6, 3), nn.Conv2d(4, 6, 3), nn.Linear(6, CLASSES)

    def forward(self, x):
        x = F.relu(self.stem(2 * x - 1), inplace=True)
        x = self.twice(self.twice(x)) + 1
        return self.fc((self.middle(x) + self.side(x)).relu().mean((2, 3)))


def odd(*trained):
    torch.manual_seed(0)
    model = Odd().requires_grad_(False)
    for name in trained:
        model.get_submodule(name).requires_grad_(True)
    return model


def adapted(name, adapter):
    torch.manual_seed(0)
    backbone = build_backbone(name, CLASSES, pretrained=False, image_size=SIDE if "vit" in name else None)
    return insert_adapter(backbone, adapter).model


class Remembers(nn.Module):
    def forward(self, x):
        self.seen = x
        return x.exp()


class Peculiar(nn.Module):
    """A frozen stem and body with something between them that features have to take notice of, and a trained head."""

    def __init__(self, way):
        super().__init__()
        torch.manual_seed(0)
        self.way, self.stem, self.body = way, nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.noise, self.memory, self.drop, self.table = nn.RReLU(), Remembers(), nn.Dropout(0.3), nn.Embedding(3, 4)
        self.route, self.pair = nn.Linear(4, 3), nn.ModuleList([nn.Sequential(self.stem, self.body)])
        self.requires_grad_(False)
        self.fc, self.later = nn.Linear(4, CLASSES), nn.Conv2d(3, 4, 1)
        for value in self.later.parameters():  # as an adapter begins
            value.detach().zero_()

    def forward(self, x):
        return self.fc(WAYS[self.way][0](self, x).relu().mean((2, 3)))

    @torch.no_grad()
    def dropped(self, x):
        return self.body(self.drop(self.stem(x)))

    def finite(self, x):
        if not x.isfinite().all():
            raise ValueError("not finite")
        return x

    def branch(self, x):
        return self.body(x) + x if self.training else self.body(x)

    def rare(self, x):
        return x + float(self.training and torch.rand(()) < 1e-6)

    def routed(self, x):
        return x + self.table(self.route(x.mean((2, 3))).argmax(1))[:, :, None, None]


WAYS = {  # and which outputs are features where the head and the routing are trained
    "in place": (lambda net, x: net.body(net.stem(x)).add_(0.5).mul_(2), {"body"}),
    "functional dropout": (lambda net, x: net.body(F.dropout(net.stem(x), 0.3, net.training)), {"stem"}),
    "random layer": (lambda net, x: net.body(net.noise(net.stem(x))), {"stem"}),
    "rarely random": (lambda net, x: net.body(net.rare(net.stem(x))), {"stem"}),
    "layer of training": (lambda net, x: net.body(F.gelu(net.stem(x)) if net.training else net.stem(x)), {"stem"}),
    "branch of training": (lambda net, x: net.branch(net.stem(x)), None),
    "dropout without gradients": (lambda net, x: net.dropped(x), {"stem"}),
    "memory": (lambda net, x: net.body(net.memory(net.stem(x))) + net.memory.seen, None),
    "two names": (lambda net, x: net.pair[0](x), {"pair.0"}),
    "an axis of three": (lambda net, x: net.body(net.stem(x)) + net.table(torch.arange(3)).sum(), {"body"}),
    "looks at the image": (lambda net, x: net.body(net.stem(x)) + net.later(x).mul(0.1), None),
    "rejects NaN": (lambda net, x: net.body(net.finite(net.stem(x))), None),
    "routes by argmax": (lambda net, x: net.body(net.routed(net.stem(x))), {"stem"}),
}


MODELS = {
    "resnet, head": (lambda: adapted("test_resnet", "head"), None),
    "resnet, lora": (lambda: adapted("test_resnet", "lora"), None),
    "resnet, residual": (lambda: adapted("test_resnet", "residual"), ["conv1.0"]),
    "vit, head": (lambda: adapted("test_vit", "head"), None),
    "vit, lora": (lambda: adapted("test_vit", "lora"), None),
    "vit, bottleneck": (lambda: adapted("test_vit", "bottleneck"), None),
    "vit, prompt": (lambda: adapted("test_vit", "prompt"), ["pos_drop"]),
    "odd, middle": (lambda: odd("middle", "fc"), None),
    "odd, head": (lambda: odd("fc"), ["middle", "side"]),
    "odd, side": (lambda: odd("side"), None),
}


@pytest.mark.parametrize("kind", ["folded", "loop"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.every_value
def test_features_stand_for_images(name, kind):
    make, needed = MODELS[name]
    model = make()
    before = get_state(model)
    engine = Engine(model, kind)
    x = torch.randn(CLIENTS, ROWS, 3, SIDE, SIDE, generator=generator(0, "x"))
    prefix = engine.find_trunk(x[0, 0])
    assert prefix is not None and 0 < prefix.share <= 1
    assert all(torch.equal(value, before[key]) for key, value in get_state(model).items())  # the search leaves no trace
    if needed:
        assert sorted(prefix.needed) == needed
    features = engine.features(x.flatten(0, 1)).view(CLIENTS, ROWS, prefix.size)
    states = {key: value.clone() for key, value in expand(before, CLIENTS).items()}
    for key in parameter_keys(model):
        states[key] += 0.05 * torch.randn(states[key].shape, generator=generator(0, key))
    gradients = []
    for inputs in (x, features):
        tensors = {key: value.clone().requires_grad_(key in parameter_keys(model)) for key, value in states.items()}
        streams = Streams.derived(0, "d", clients=range(CLIENTS))
        logits = engine.logits(tensors, inputs, training=True, counts=(4, 2, 3), streams=streams)
        sum(F.cross_entropy(logits[c, :n], torch.arange(n)) for c, n in enumerate((4, 2, 3))).backward()
        gradients.append({key: value.grad for key, value in tensors.items() if value.grad is not None})
        torch.testing.assert_close(engine.logits(states, inputs), Engine(make(), "loop").logits(states, x))
    assert gradients[0].keys() == gradients[1].keys() != set()
    for key, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], gradient, rtol=1e-4, atol=1e-5)


def test_what_broke_the_search_is_logged(caplog):
    caplog.set_level("INFO", "perada")
    assert Engine(Peculiar("rejects NaN")).find_trunk(torch.randn(3, SIDE, SIDE)) is None
    assert "cannot replace images: ValueError: not finite" in caplog.text


def test_nothing_is_found_where_it_would_be_wrong():
    image = torch.randn(3, SIDE, SIDE)
    assert Engine(odd("stem")).find_trunk(image) is None  # everything comes after what is trained
    assert Engine(odd("fc")).find_trunk(image, least_share=1.1) is None
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False, track_running_stats=False)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    assert Engine(model).find_trunk(image).needed == ("0",)  # what the norm gives depends on the batch
    flat = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    flat[0].requires_grad_(False)
    assert Engine(flat).find_trunk(torch.randn(6)) is None  # features would look like images


@pytest.mark.parametrize("name", MODELS)
def test_a_pass_without_numbers_bounds_the_share_of_the_features(name):
    model = MODELS[name][0]()
    before = get_state(model)
    image = torch.randn(3, SIDE, SIDE)
    bound = share_before_trained(model, image)
    assert all(torch.equal(value, before[key]) for key, value in get_state(model).items())
    prefix = Engine(model).find_trunk(image)
    # It counts attention, which passes on a CPU do not, and no matrix products in place of convolutions.
    assert bound is None or 2 * bound >= prefix.share


def test_the_share_before_trained_layers_is_that_of_the_operations():
    model = nn.Sequential(nn.Flatten(), nn.Linear(8, 24, bias=False), nn.Linear(24, 4, bias=False), nn.Identity())
    model[1].requires_grad_(False)
    assert share_before_trained(model, torch.zeros(2, 2, 2)) == 8 * 24 / (8 * 24 + 24 * 4)
    assert share_before_trained(model.requires_grad_(True), torch.zeros(2, 2, 2)) == 0


def test_no_image_is_computed_where_few_frozen_layers_come_first():
    model = nn.Sequential(nn.Flatten(), nn.Linear(8, 2), nn.Linear(2, 400), nn.Linear(400, 4))
    model[1].requires_grad_(False)
    passes = []
    model[3].register_forward_hook(lambda layer, inputs, out: passes.append(out.device.type))
    assert Engine(model).find_trunk(torch.zeros(2, 2, 2), least_share=0.1) is None
    assert passes == ["meta"]
    assert Engine(model).find_trunk(torch.ones(2, 2, 2)).needed == ("1",)
    assert "cpu" in passes


def test_what_comes_after_dropout_is_not_constant():
    layers = [nn.Conv2d(3, 4, 3), nn.Dropout(0.5), nn.Conv2d(4, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(4, 2)).requires_grad_(False)
    model[-1].requires_grad_(True)
    prefix = Engine(model).find_trunk(torch.randn(3, SIDE, SIDE))
    assert prefix is not None and prefix.needed == ("0",)


def folded_with(prefix, model):
    return fold(model, random_only=True, wrap=prefix.wrap).model.eval()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.every(2)
@torch.no_grad()
def test_a_second_model_continues_where_the_first_one_left_the_frozen_layers(name):
    make = MODELS[name][0]
    first = make()
    second = make()
    for parameter in second.parameters():
        if parameter.requires_grad:
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator(0, "second"))
    x = torch.randn(ROWS, 3, SIDE, SIDE, generator=generator(0, "x"))
    prefix = find_trunk(first, x[0])
    first_pass = prefix.run(folded_with(prefix, first), x)
    recorded = {path: output.clone() for path, output in first_pass.outputs.items()}
    logits = prefix.run_from(folded_with(prefix, second), first_pass.outputs)
    assert torch.equal(first_pass.logits, folded_with(prefix, make())(x))
    expected = fold(second, random_only=True).model.eval()(x)
    assert torch.equal(logits, expected) and not torch.equal(logits, first_pass.logits)
    # A third model could continue from the same outputs.
    assert all(torch.equal(output, recorded[path]) for path, output in first_pass.outputs.items())
    assert torch.cat([output.flatten(1) for output in recorded.values()], 1).shape == (ROWS, prefix.size)


@torch.no_grad()
def test_features_can_be_computed_after_a_pass_that_failed():
    model = odd("fc")
    image = torch.randn(3, SIDE, SIDE)
    prefix = find_trunk(model, image)
    with pytest.raises(RuntimeError, match="expected input"):
        prefix.run(folded_with(prefix, model), torch.randn(2, 5, SIDE, SIDE))
    features = prefix.features(folded_with(prefix, model), image.unsqueeze(0))
    assert features.shape == (1, prefix.size)


class TakesSingle(nn.Module):
    """A network that rejects images of any dtype other than float32, as some do that convert them."""

    def __init__(self):
        super().__init__()
        self.stem, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4, CLASSES)

    def forward(self, x):
        if x.dtype != torch.float32:
            raise TypeError(f"images of {x.dtype}")
        return self.fc(self.stem(x).mean((2, 3)))


def test_features_of_lower_precision_stand_for_images_of_their_own_dtype():
    model = TakesSingle().requires_grad_(False)
    model.fc.requires_grad_(True)
    engine = Engine(model)
    images = torch.randn(2, 3, SIDE, SIDE)
    states = expand(get_state(model), 1)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert engine.find_trunk(images[0]) is not None
        features = engine.features(images)
        assert features.dtype == torch.bfloat16
        logits = engine.logits(states, features.unsqueeze(0))
        assert torch.equal(logits, engine.logits(states, images.unsqueeze(0)))


def test_a_store_computes_whole_blocks_once():
    sizes = (BLOCK - 6, 40, 30)
    sets = [TensorDataset(torch.randn(n, 2, 2), torch.arange(n)) for n in sizes]
    plain = make_store(sets)
    asked = []

    def encode(images):
        asked.append(len(images))
        return images.flatten(1).cumsum(1)

    store = FeatureStore(plain, encode, Preparation().prepare_targets)
    for owners, indices in (([0, 0], [3, 200]), ([1, 0, 1], [5, 3, 5]), ([2, 1, 0], [29, 39, 0])):
        owners = torch.tensor(owners)
        indices = torch.tensor(indices)
        x, y = plain.take(owners, indices)
        got, labels = store.take(owners, indices)
        assert torch.equal(got, x.flatten(1).cumsum(1)) and torch.equal(labels, y)
    assert asked == [BLOCK, 64]
    cache = FeatureCache(encode, Preparation().prepare_targets, 4, 4 * 4 * (sum(sizes) + 10), supports=lambda _: True)
    other = make_store([TensorDataset(torch.randn(11, 2, 2), torch.arange(11))])
    assert isinstance(cache(plain), FeatureStore) and cache(plain) is cache(plain)
    assert cache(other) is other  # does not fit beside the first


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Images of two clients and two classes in files."""
    root = tmp_path_factory.mktemp("files")
    for number in range(20):
        path = root / "ab"[number % 2] / f"class_{number // 2 % 2}" / f"{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = torch.randint(0, 256, (SIDE, SIDE, 3), generator=generator(number, "file"), dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(path)
    return root


class CountedImages(Images):
    """Images that count how often a file is read, and of which some cannot be read the first time."""

    def __init__(self, root):
        super().__init__(root, layout="{client}/{class}/*", test_share=0.2, size=SIDE)
        self.reads = []
        self.broken = []

    def read(self, path):
        self.reads.append(path)
        if path in self.broken:
            self.broken.remove(path)
            raise OSError(path)
        return super().read(path)


def store_of_clients(dataset):
    clients = []
    for name in "ab":
        rows = np.flatnonzero(dataset.columns["client"] == name)
        clients.append(Subset(dataset, rows.tolist()))
    return make_store(clients)


def test_features_of_files_are_computed_once_and_have_the_labels_of_their_images(folder):
    dataset = CountedImages(str(folder))
    plain = store_of_clients(dataset)
    store = FeatureStore(plain, lambda images: images.flatten(1).float(), Preparation().prepare_targets)
    owners, indices = torch.tensor([1, 0, 1]), torch.tensor([3, 0, 2])
    expected, expected_labels = plain.take(owners, indices)
    dataset.reads.clear()
    for _ in range(2):
        features, labels = store.take(owners, indices)
        assert torch.equal(features, expected.flatten(1).float())
        assert torch.equal(labels, expected_labels)
    assert sorted(dataset.reads) == sorted(dataset.files)


def test_a_file_that_cannot_be_read_is_tried_again_when_its_features_are_needed_next(folder):
    dataset = CountedImages(str(folder))
    plain = store_of_clients(dataset)
    first_of_second_client = int(np.flatnonzero(dataset.columns["client"] == "b")[0])
    dataset.broken.append(dataset.files[first_of_second_client])
    store = FeatureStore(plain, lambda images: images.flatten(1).float(), Preparation().prepare_targets)
    owners, indices = torch.tensor([0, 1]), torch.tensor([0, 0])
    _, _, errors = store.read(owners, indices)
    assert list(errors) == [1]
    features, _, errors = store.read(owners, indices)
    assert not errors
    assert torch.equal(features, plain.take(owners, indices)[0].flatten(1).float())


def test_only_images_that_are_the_same_whenever_they_are_read_have_features(folder):
    class Noisy(Images):
        is_repeatable = False

    options = {"layout": "{client}/{class}/*", "test_share": 0.2, "size": SIDE}
    partition = ByDomain(column="client")

    def has_features(dataset, **options):
        data = FederatedDataModule(dataset=dataset, partition=partition, image_size=SIDE, **options)
        data.setup()
        data.use_features(lambda images: images.flatten(1), 3 * SIDE**2, (3, SIDE, SIDE))
        return isinstance(data.samples_of(data.checked.train), FeatureStore)

    assert has_features(Images(str(folder), **options))
    assert not has_features(Noisy(str(folder), **options))
    # Worker processes read images, and have no network.
    assert not has_features(Images(str(folder), **options), num_workers=1)
    assert not has_features(Images(str(folder), **options), flip=True)


def images(n, seed):
    return torch.randint(0, 256, (n, 3, SIDE, SIDE), generator=generator(seed, "i"), dtype=torch.uint8)


def federation(**options):
    train = [TensorDataset(images(n, n), torch.arange(n) % CLASSES) for n in (9, 14, 6)]
    test = [TensorDataset(images(5, 50 + n), torch.arange(5)) for n in range(3)]
    data = FederatedData(train, test, TensorDataset(images(12, 99)))
    return FederatedDataModule(data, batch_size=4, **options)


def run(data, adapter="head", net="test_resnet", **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    options = {"rounds": 3, "clients_per_round": 2, "distill_steps": 4, "distill_batch_size": 5} | options
    return perada.finetune(net, data, **sections(adapter=adapter, pretrained=False, **options, **quiet))


@pytest.mark.parametrize("engine", ["loop", "folded"])
@pytest.mark.parametrize("privacy", [None, {"noise_multiplier": 0.5, "max_norm": 1.0, "secure_rng": False}])
@pytest.mark.every_value
def test_a_run_is_the_same_with_features(engine, privacy):
    with_features, without = (
        run(federation(), engine=engine, privacy=privacy, distill_optimizer="sgd", cache_features=use)
        for use in (True, False)
    )
    for role, client in (("global", None), ("personal", 0), ("personal", 1), ("personal", 2)):
        for key, value in without.state(role, client).items():
            torch.testing.assert_close(with_features.state(role, client)[key], value, rtol=1e-5, atol=1e-6)
    assert with_features.metrics["rounds"][-1].keys() == without.metrics["rounds"][-1].keys()


def test_a_run_on_files_is_the_same_with_features_and_has_them(folder, caplog):
    caplog.set_level("INFO", "pytorch_lightning")
    runs = []
    for use in (None, False):
        dataset = Images(str(folder), layout="{client}/{class}/*", test_share=0.2, size=SIDE)
        data = FederatedDataModule(dataset=dataset, partition=ByDomain(column="client"), batch_size=4)
        runs.append(run(data, algorithm="ditto", rounds=2, clients_per_round=None, cache_features=use))
    assert sum("frozen layers before all trained ones" in record.message for record in caplog.records) == 1
    with_features, without = runs
    for key, value in without.state("personal", 1).items():
        torch.testing.assert_close(with_features.state("personal", 1)[key], value, rtol=1e-5, atol=1e-6)


def test_runs_that_share_features_are_those_that_compute_their_own(folder, monkeypatch):
    computed = []
    original = FrozenTrunk.features

    def counted(trunk, model, x):
        computed.append(len(x))
        return original(trunk, model, x)

    def train(algorithm, **options):
        dataset = Images(str(folder), layout="{client}/{class}/*", test_share=0.2, size=SIDE)
        data = FederatedDataModule(dataset=dataset, partition=ByDomain(column="client"), batch_size=4)
        return run(data, algorithm=algorithm, rounds=1, clients_per_round=None, **options)

    alone = [train("ditto"), train("fedavg")]
    monkeypatch.setattr(FrozenTrunk, "features", counted)
    with sharing_features(SharedFeatures(limit_bytes=2**20)):
        together = [train("ditto"), train("fedavg")]
        num_of_two = sum(count > 3 for count in computed)
        train("fedavg", adapter="residual", adapter_options={"last_blocks": 1})
    # Training and test images; the search for the trunk has three images.
    assert num_of_two == 2
    assert sum(count > 3 for count in computed) == 4
    for first, second in zip(alone, together, strict=True):
        for key, value in first.state("global").items():
            assert torch.equal(second.state("global")[key], value)


def test_shared_features_keep_to_their_limit():
    shared = SharedFeatures(limit_bytes=2 * 4 * 10)
    made = [shared.get_or_compute(key, lambda: torch.ones(10)) for key in ("a", "b", "c", "a", "c")]
    assert made[3] is made[0]
    assert made[4] is not made[2]


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("data", "options", "said"),
    [({}, {}, 1), ({}, {"cache_features": False}, 0), ({"flip": True}, {}, 0), ({"device_cache_mb": 0}, {}, 0)],
)
def test_one_line_says_that_training_images_pass_the_frozen_layers_once(caplog, data, options, said):
    caplog.set_level("INFO", "pytorch_lightning")
    run(federation(**data), rounds=1, **options)
    lines = [record.message for record in caplog.records if "frozen layers before all trained ones" in record.message]
    assert len(lines) == said
    assert all(
        "% of a forward pass) are computed once per image; training.cache_features=false" in line for line in lines
    )


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_peculiar_networks_find_what_stays_the_same(way, channels_last):
    net = Peculiar(way)
    net.route.requires_grad_(way == "routes by argmax")
    net.to(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    drawn = torch.get_rng_state()
    prefix = Engine(net, channels_last=channels_last).find_trunk(images(1, 0)[0] / 255)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert (prefix and set(prefix.needed)) == WAYS[way][1]


@pytest.mark.parametrize("engine", ["folded", "loop"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.every(9)
def test_peculiar_networks_train_alike_with_features(way, engine):
    states = []
    for use in (None, False):
        net = Peculiar(way)
        torch.manual_seed(1)  # of randomness that is not ours
        trained = run(federation(), net=net, rounds=2, engine=engine, cache_features=use, distill_optimizer="sgd")
        states.append([trained.state("global"), *trained.states("personal")])
    for got, expected in zip(*states, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.every(2)
@pytest.mark.parametrize(("options", "once"), [({}, ["train", "test", "public"]), ({"flip": True}, ["test", "public"])])
def test_the_frozen_part_sees_each_image_once(monkeypatch, options, once):
    data = federation(**options)
    seen = []
    features = Engine.features
    monkeypatch.setattr(Engine, "features", lambda self, x: seen.append(len(x)) or features(self, x))
    run(data)
    sizes = {"train": 29, "test": 15, "public": 12}
    assert sorted(seen) == sorted(sizes[name] for name in once)


def test_images_of_another_size_stay_images():
    """Of the server, or of another datamodule that a trained model is given."""
    scores = []
    for use in (None, False):
        train = [TensorDataset(images(n, n), torch.arange(n) % CLASSES) for n in (9, 14)]
        public = TensorDataset(F.interpolate(images(12, 99).float(), 48).byte())
        trained = run(FederatedData(train, [], public), "lora", rounds=1, batch_size=4, cache_features=use)
        scores.append(trained.state("global"))
    torch.testing.assert_close(*scores, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_kept_is_rejected_or_left():
    with pytest.raises(ValueError, match=r"frozen layers.*cache_features.*\(head, lora\)"):
        run(federation(), adapter="full", cache_features=True)
    data = federation()
    run(data, adapter="residual", rounds=1)  # the stem alone is not worth it
    assert data._features is None
