# SPDX-License-Identifier: Apache-2.0
"""Batches of private training: streams that are independent, counts that are binomial, padding that is zero."""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch.utils.data import Dataset, TensorDataset

from perada.core.rounds import PrivateSampling, sampling_rate
from perada.data import CohortBatch, FederatedData, FederatedDataModule, Phase
from perada.privacy import passes, poisson_batches

# The numbers of samples stand for images, and are larger than pixels.
pytestmark = pytest.mark.filterwarnings("ignore:the floating-point images of the training set:UserWarning")

SIZES = (7, 20, 3, 11, 20)
B = 4
PERADA = PrivateSampling((("personal", "local"),))
TWO_PHASES = PrivateSampling((("personal",), ("local", "personal")))


def number_samples(sizes=SIZES):
    """Client m's sample i is the number 1000 m + i + 0.5, so that a batch shows where each row comes from."""
    return [
        TensorDataset(1000.0 * client + torch.arange(size).view(-1, 1) + 0.5, torch.arange(size) % 3)
        for client, size in enumerate(sizes)
    ]


def datamodule(private=PERADA, steps=(30,), data=None, sizes=SIZES, batch_size=B, seed=5):
    module = FederatedDataModule(data or FederatedData(number_samples(sizes)), batch_size=batch_size)
    phases = [Phase(str(index), steps=number) for index, number in enumerate(steps)]
    module.configure_rounds(seed=seed, clients_per_round=None, phases=phases, private=private)
    return module


def drawn_samples(loader):
    """For each stream and client the batches as lists of sample numbers; the padding is checked on the way."""
    seen = {}
    steps_of_phases = Counter()
    for item in loader:
        phase = next(iter(item.values())).phase
        for name, batch in item.items():
            assert isinstance(batch, CohortBatch)
            assert (batch.phase, batch.step) == (phase, steps_of_phases[phase])
            assert batch.x.shape[:2] == batch.y.shape == (len(batch.clients), max(1, *batch.counts))
            for row, (client, count) in enumerate(zip(batch.clients, batch.counts, strict=True)):
                numbers = batch.x[row, :count, 0] - 0.5 - 1000 * client
                assert (batch.y[row, :count] == numbers % 3).all()
                assert not batch.x[row, count:].any()
                assert not batch.y[row, count:].any()
                seen.setdefault((name, client), []).append(numbers.int().tolist())
        steps_of_phases[phase] += 1
    return seen


def test_counts_are_binomial_and_streams_have_their_own():
    seen = drawn_samples(datamodule(steps=(1500,)).train_dataloader())
    assert set(seen) == {(name, client) for name in ("personal", "local") for client in range(5)}
    for (_, client), batches in seen.items():
        size = SIZES[client]
        counts = np.array([len(batch) for batch in batches])
        if size <= B:
            assert set(counts) == {size}
            continue
        expected = 1500 * stats.binom(size, B / size).pmf(np.arange(size + 1))
        classes = np.cumsum(expected) // 20  # neighbours are put together, so that a class has at least about 20
        classes = np.minimum(classes, (1500 - expected[::-1].cumsum()[::-1]) // 20)
        groups = np.unique(classes, return_inverse=True)[1]
        observed = np.bincount(groups, np.bincount(counts, minlength=size + 1))
        assert stats.chisquare(observed, np.bincount(groups, expected)).pvalue > 0.005
        assert (observed > 0).sum() > 4
        assert all(batch == sorted(set(batch)) for batch in batches)
    for client in (0, 1, 3, 4):
        one, other = (_members(seen[name, client], SIZES[client]) for name in ("personal", "local"))
        q = B / SIZES[client]
        z = ((one - q) * (other - q)).sum() / (q * (1 - q) * np.sqrt(one.size))
        assert abs(z) < 3
        assert abs(((one - q) * (one - q)).sum() / (q * (1 - q) * np.sqrt(one.size))) > 30  # what equal streams give


def _members(batches, size):
    rows = np.zeros((len(batches), size))
    for row, batch in zip(rows, batches, strict=True):
        row[batch] = 1
    return rows


def test_batches_are_those_of_the_sampler():
    seen = drawn_samples(datamodule().cohort_loader(datamodule().plan(3)))
    for (name, client), batches in seen.items():
        rate = min(1, B / SIZES[client])
        expected = poisson_batches(SIZES[client], rate, 30, seed=5, role=name, round=3, client=client)
        assert batches == [batch.tolist() for batch in expected]


def test_full_batches_hold_every_image_in_every_step():
    module = datamodule(batch_size="full")
    for (_, client), batches in drawn_samples(module.train_dataloader()).items():
        assert batches == [list(range(SIZES[client]))] * 30


def test_sampling_rate():
    """q = B / n, at most 1: what batches are drawn with and what the ledgers count."""
    assert [sampling_rate(size, 4) for size in (7, 20, 4, 3)] == [4 / 7, 4 / 20, 1.0, 1.0]


@pytest.mark.parametrize("private", [PERADA, replace(PERADA, sampling="shuffle")])
def test_batches_are_functions_of_seed_round_client_and_stream(private):
    module = datamodule(private)
    together = drawn_samples(module.cohort_loader(module.plan(2)))
    # The same in another process, or a resumed run.
    assert drawn_samples(datamodule(private).cohort_loader(module.plan(2))) == together
    for client in range(5):
        alone = drawn_samples(module.cohort_loader(module.plan_for([client], 2)))
        assert alone == {key: batches for key, batches in together.items() if key[1] == client}
    local = datamodule(replace(private, streams=(("local",),)))
    assert drawn_samples(local.cohort_loader(module.plan(2))) == {
        key: batches for key, batches in together.items() if key[0] == "local"
    }
    for other in (module.cohort_loader(module.plan(1)), datamodule(private, seed=6).cohort_loader(module.plan(2))):
        changed = drawn_samples(other)
        assert all(changed[key] != together[key] for key in together if SIZES[key[1]] > B)


@pytest.mark.parametrize("sampling", ["poisson", "shuffle"])
def test_streams_run_on_over_the_phases_they_are_in(sampling):
    """``local`` begins at its first batch, though ``personal`` has taken steps before; ``personal`` goes on."""
    private = replace(TWO_PHASES, sampling=sampling)
    module = datamodule(private, steps=(5, 7))
    items = list(module.train_dataloader())
    assert [list(item) for item in items] == [["personal"]] * 5 + [["local", "personal"]] * 7
    assert [next(iter(item.values())).phase for item in items] == [0] * 5 + [1] * 7
    seen = drawn_samples(items)
    one_phase = drawn_samples(
        datamodule(PrivateSampling((("personal", "local"),), sampling), steps=(12,)).train_dataloader()
    )
    for client in range(5):
        assert seen["personal", client] == one_phase["personal", client]
        assert seen["local", client] == one_phase["local", client][:7]


@pytest.mark.parametrize("secure", [False, True])
def test_shuffled_streams_use_each_image_once_in_a_pass(secure):
    private = replace(TWO_PHASES, sampling="shuffle", secure=secure)
    for (name, client), batches in drawn_samples(datamodule(private, steps=(5, 7)).train_dataloader()).items():
        begun = 0
        used = set()
        for batch in batches:
            if not used or len(used) == SIZES[client]:
                begun = begun + 1
                used = set()
            assert len(batch) == min(B, SIZES[client] - len(used))
            assert not used & set(batch)
            used |= set(batch)
        assert begun == passes(SIZES[client], B, 12 if name == "personal" else 7)


def test_secure_batches_are_new_each_time_and_equal_within_a_loader():
    module = datamodule(replace(PERADA, secure=True))
    loader = module.train_dataloader()
    first = drawn_samples(loader)
    assert drawn_samples(loader) == first
    again = drawn_samples(module.train_dataloader())
    assert all(again[key] != first[key] for key in first if SIZES[key[1]] > B)


class Pictures(Dataset):
    """Map-style samples: a number in an image of 2×3, with noise from the global streams if asked for."""

    def __init__(self, size, noisy=False):
        self.size = size
        self.noisy = noisy

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        value = float(index + 1) + (torch.rand(()).item() + random.random() + np.random.rand() if self.noisy else 0)
        return torch.full((1, 2, 3), value), index % 3


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.every(2)
def test_any_number_of_workers_gives_the_same_batches(secure, monkeypatch):
    loaded = []
    for workers in (0, 2):
        if secure:  # the same bytes for both modules: what is left to differ is the workers
            monkeypatch.setattr("ssl.RAND_bytes", random.Random(0).randbytes)
            monkeypatch.setattr("secrets.randbits", random.Random(1).getrandbits)
        data = FederatedData([Pictures(size, noisy=True) for size in (9, 30)])
        module = FederatedDataModule(data, batch_size=2, num_workers=workers)
        private = replace(PERADA, secure=secure)
        module.configure_rounds(seed=3, clients_per_round=None, phases=[Phase(steps=12)], private=private)
        loaded.append(list(module.train_dataloader()))
    for one, other in zip(*loaded, strict=True):
        assert list(one) == list(other) == ["personal", "local"]
        for name in one:
            for mine, yours in zip(one[name], other[name], strict=True):
                assert torch.equal(mine, yours) if isinstance(mine, torch.Tensor) else mine == yours


def test_what_a_dataset_draws_differs_between_streams():
    data = FederatedData([Pictures(4, noisy=True)])
    (item,) = datamodule(steps=(1,), data=data).train_dataloader()
    assert item["personal"].counts == item["local"].counts == (4,)  # all images, in order, in both
    assert not (item["personal"].x == item["local"].x).any()


class Shaken(Dataset):
    """Images numbered from ``first`` on, each with a transform at random: all but the first image of the whole set."""

    def __init__(self, first):
        self.numbers = range(first, 6)

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        number = self.numbers[index]
        return torch.tensor(
            [[[number + random.random() / 2, number + np.random.rand() / 2, number + torch.rand(()) / 2]]]
        ), 0


@pytest.mark.parametrize("secure", [False, True])
def test_secure_transforms_of_a_dataset_do_not_go_by_a_known_key(secure):
    """By a known key one tells what every other image became, with image 0 and without it. No clipping bounds that."""

    def draw():
        data = FederatedData([Shaken(0)], num_classes=2)
        module = FederatedDataModule(data, batch_size="full")
        private = replace(PERADA, secure=secure)
        module.configure_rounds(seed=3, clients_per_round=None, phases=[Phase(steps=2)], private=private)
        return [batch["local"].x[0].flatten(1) for batch in module.train_dataloader()]

    (one, later), (again, _) = draw(), draw()
    assert torch.equal(one.floor(), again.floor())  # the same images
    assert not (one == later).any()  # a step draws anew
    assert torch.equal(one, again) != secure
    assert not secure or not (one == again).any()


@pytest.mark.parametrize("mapped", [False, True])
def test_steps_without_any_image(mapped):
    """A rate of 1/500 leaves most steps without an image of either client: they are steps like any other."""
    sizes = (500, 500)
    data = FederatedData([Pictures(size) for size in sizes]) if mapped else None
    module = datamodule(data=data, sizes=sizes, batch_size=1, steps=(40,))
    items = list(module.train_dataloader())
    empty = [batch for item in items for batch in item.values() if batch.counts == (0, 0)]
    assert len(items) == 40
    assert 5 < len(empty) < 25  # e**-2 of 80 are 10.8
    image = (1, 2, 3) if mapped else (1,)
    for batch in empty:
        assert batch.x.shape == (2, 1, *image)
        assert (batch.x.dtype, batch.y.dtype, batch.y.shape) == (torch.float32, torch.int64, (2, 1))
        assert not batch.x.any()
        assert not batch.y.any()
        assert not module.prepare({"local": batch})["local"].x.any()


def images(sizes, side=6, seed=0):
    source = torch.Generator().manual_seed(seed)
    return [
        TensorDataset(
            torch.randint(1, 256, (size, 1, side, side), dtype=torch.uint8, generator=source),
            torch.randint(0, 3, (size,), generator=source),
        )
        for size in sizes
    ]


def prepare_module(private=PERADA, **options):
    module = FederatedDataModule(FederatedData(images((9, 30, 14))), batch_size=3, **options)
    module.configure_rounds(seed=3, clients_per_round=None, phases=[Phase(steps=20)], private=private)
    return module


def test_padding_is_zero_once_prepared():
    module = prepare_module(flip=True, crop_padding=1, image_size=8)
    least = set()
    for item in module.train_dataloader():
        ready = module.on_after_batch_transfer(item, 0)
        assert list(ready) == ["personal", "local"]
        for name, batch in ready.items():
            assert batch.counts == item[name].counts
            assert batch.x.shape == (3, max(1, *batch.counts), 1, 8, 8)
            assert batch.x.dtype == torch.float32
            for row, count in enumerate(batch.counts):
                assert not batch.x[row, count:].any()
                assert batch.x[row, :count].flatten(1).any(1).all()
            least.add(min(batch.counts))
    assert 0 in least


def test_without_augmentation_images_are_only_scaled():
    module = prepare_module()
    for item in module.train_dataloader():
        for name, batch in module.prepare(item).items():
            for row, count in enumerate(batch.counts):
                expected = item[name].x[row, :count].float() / 127.5 - 1
                torch.testing.assert_close(batch.x[row, :count], expected)


def test_augmentation_is_each_clients_and_each_streams_own():
    module = prepare_module(flip=True, crop_padding=1)
    together = [module.prepare(item) for item in module.cohort_loader(module.plan(1))]
    for client in range(3):
        alone = [module.prepare(item) for item in module.cohort_loader(module.plan_for([client], 1))]
        for one, all_of_them in zip(alone, together, strict=True):
            for name, batch in one.items():
                row = all_of_them[name].clients.index(client)
                count = batch.counts[0]
                assert torch.equal(batch.x[0, :count], all_of_them[name].x[row, :count])
    item = next(item for item in module.train_dataloader() if min(item["local"].counts) > 1)
    twice = module.prepare({"personal": item["local"], "local": item["local"]})
    assert not torch.equal(twice["personal"].x, twice["local"].x)


def test_secure_augmentation_does_not_follow_from_the_seed():
    module = prepare_module(flip=True, crop_padding=1)
    private = replace(PERADA, secure=True)
    item = next(item for item in module.train_dataloader() if min(item["local"].counts) > 1)
    secure = prepare_module(private, flip=True, crop_padding=1)
    assert torch.equal(module.prepare(item)["local"].x, module.prepare(item)["local"].x)
    drawn = [secure.prepare(item)["local"].x for _ in range(3)]
    assert not (torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[1], drawn[2]))


def test_without_privacy_nothing_is_changed():
    plain = datamodule(private=None)
    for batch in plain.train_dataloader():
        assert isinstance(batch, CohortBatch)
    assert drawn_samples(plain.cohort_loader(plain.plan(0), PERADA)) == drawn_samples(datamodule().train_dataloader())


def test_streams_are_named_for_each_phase():
    words = r"private .*got 2"
    with pytest.raises(ValueError, match=words):
        datamodule(TWO_PHASES).train_dataloader()
    plain = datamodule(private=None)
    with pytest.raises(ValueError, match=words):
        plain.cohort_loader(plain.plan(0), TWO_PHASES)
