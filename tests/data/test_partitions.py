# SPDX-License-Identifier: Apache-2.0
import json
from dataclasses import replace
from functools import partial
from itertools import combinations

import numpy as np
import pytest

from perada.data import IID, BalancedDirichlet, ByDomain, Dirichlet, DominantClass, FromFile, QuantitySkew, Shards
from perada.data.partitions import Split, categories
from perada.data.partitions.shares import apportion, raise_to_minimum, split_by_group, stratified_sample
from tests.rejections import rejects

K = 10


def samples(per_class, **columns):
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(K), per_class))
    return Split(labels, np.arange(len(labels)), columns)


def unbalanced():
    return Split(np.repeat([0, 1], [20, 1]), np.arange(21))


def table(rows, part):
    """Samples of each class (columns) of each client (rows), by plain counting."""
    return np.array(
        [[sum(part.labels[row] == k for row in personal_scores) for k in range(K)] for personal_scores in rows]
    )


def split_table(partition, train_per_class=100, test_per_class=20, seed=0):
    train = samples(train_per_class)
    test = samples(test_per_class)
    rows = partition.split(train, test, seed)
    for client_rows, part in zip(rows, (train, test), strict=True):
        flat = np.concatenate(client_rows)
        assert len(np.unique(flat)) == len(flat) <= len(part)
    return table(rows[0], train), table(rows[1], test)


PARTITIONS = [IID(7), Dirichlet(7, 0.3), Shards(7, 3), DominantClass(7), BalancedDirichlet(7, 0.3), QuantitySkew(7)]


@pytest.mark.parametrize("partition", PARTITIONS, ids=repr)
def test_seeded(partition):
    train = samples(30)
    test = samples(10)

    def flat(seed):
        return [client_rows.tolist() for part in partition.split(train, test, seed) for client_rows in part]

    assert flat(1) == flat(1)
    assert flat(1) != flat(2)


@pytest.mark.parametrize("partition", [IID(7), Dirichlet(7, 0.3), Shards(7, 3), QuantitySkew(7)], ids=repr)
def test_nothing_is_left_over(partition):
    train, test = split_table(partition)
    assert (train.sum(0) == 100).all()
    assert (test.sum(0) == 20).all()


@pytest.mark.every(4)
@pytest.mark.parametrize("alpha", [1e-320, 0.01, 1, 100, 1e9])
@pytest.mark.parametrize(
    ("clients", "expected", "size"), [(7, None, 142), (7, 50, 50), (1, None, 1000), (1000, None, 1)]
)
def test_clients_of_balanced_dirichlet_have_one_size(alpha, clients, expected, size):
    train, test = split_table(BalancedDirichlet(clients, alpha, expected))
    assert (train.sum(1) == size).all()
    assert (train.sum(0) <= 100).all()
    # Of each class a client has the share of the test images that it has of the training images, but for rounding.
    assert (np.abs(test - train / 5) < 1 + 1e-9 + (test.sum(1, keepdims=True) <= 1)).all()


def test_balanced_dirichlet_has_the_proportions_of_its_distribution():
    """With more samples than are drawn, the proportions have mean p and variance p (1 - p) / (alpha + 1)."""
    classes = np.repeat(np.arange(3), [2000, 4000, 14000])
    prior = np.array([0.1, 0.2, 0.7])
    train = Split(classes, np.arange(len(classes)))
    none = Split(classes[:0], np.arange(0))
    for alpha in (0.1, 1.0, 9.0):
        partition = BalancedDirichlet(20, alpha, samples_per_client=100)
        drawn = [rows for seed in range(40) for rows in partition.split(train, none, seed)[0]]
        counts = np.array([np.bincount(classes[rows], minlength=3) for rows in drawn])
        expected = prior * (1 - prior) / (alpha + 1)
        assert counts.mean(0) / 100 == pytest.approx(prior, abs=4 * np.sqrt(expected.max() / len(counts)))
        assert (counts / 100).var(0) == pytest.approx(expected, rel=0.25)


def test_balanced_dirichlet_fills_up_from_other_classes():
    """All samples are given away, although hardly any client asks for just what is left."""
    train, _ = split_table(BalancedDirichlet(10, 0.01))
    assert (train.sum(0) == 100).all() and (train.sum(1) == 100).all()
    assert ((train > 0).sum(1) <= 2).sum() >= 7
    with pytest.raises(ValueError, match=r"7 clients.*200.*1400.*1000"):
        split_table(BalancedDirichlet(7, 1.0, 200))


@pytest.mark.parametrize(("clients", "alpha", "least", "size"), [(20, 1.0, 2, 50), (20, 0.05, 5, 50), (7, 9.0, 3, 142)])
def test_clients_of_balanced_dirichlet_have_some_samples_of_each_class(clients, alpha, least, size):
    train, test = split_table(BalancedDirichlet(clients, alpha, min_per_class=least))
    assert (train.sum(1) == size).all()
    assert train.min() >= least
    assert (train.sum(0) <= 100).all()
    assert (np.abs(test - train / 5) < 1 + 1e-9).all()


def test_the_rest_of_balanced_dirichlet_has_the_proportions_of_its_distribution():
    """Beyond the minimum the proportions have mean 1/K and variance (1/K)(1 - 1/K) / (alpha + 1)."""
    labels = np.repeat(np.arange(4), 5000)
    train = Split(labels, np.arange(len(labels)))
    none = Split(labels[:0], np.arange(0))
    partition = BalancedDirichlet(20, 1.0, samples_per_client=120, min_per_class=5)
    drawn = [rows for seed in range(40) for rows in partition.split(train, none, seed)[0]]
    rest = np.array([np.bincount(labels[rows], minlength=4) for rows in drawn]) - 5
    assert (rest >= 0).all() and (rest.sum(1) == 100).all()
    assert (rest / 100).mean(0) == pytest.approx([0.25] * 4, abs=0.05)
    assert (rest / 100).var(0) == pytest.approx([0.25 * 0.75 / 2] * 4, rel=0.25)


def test_a_minimum_of_each_class_that_balanced_dirichlet_cannot_give():
    with pytest.raises(ValueError, match=r"100 samples.*min_per_class=6.*20 clients"):
        split_table(BalancedDirichlet(20, min_per_class=6))
    words = r"min_per_class=3 .*10 classes.* 30 .* 20"
    with pytest.raises(ValueError, match=words):
        split_table(BalancedDirichlet(20, samples_per_client=20, min_per_class=3))
    with rejects("min_per_class", -1):
        BalancedDirichlet(min_per_class=-1)


def test_quantity_skew_has_the_sizes_of_its_distribution():
    """A share has mean 1/M and variance (1/M)(1 - 1/M)/(M·alpha + 1), and classes are as in the whole."""
    for alpha in (0.3, 1.0, 20.0):
        train = np.stack([split_table(QuantitySkew(5, alpha, 1), seed=seed)[0] for seed in range(60)])
        shares = train.sum(2) / 1000
        assert shares.var() == pytest.approx(0.2 * 0.8 / (5 * alpha + 1), rel=0.35)
        expected = train.sum(2, keepdims=True) / K
        # Hypergeometric: the variance is below that of a binomial distribution.
        assert (np.abs(train - expected) < 5 * np.sqrt(expected * 0.9) + 1).all()


def test_quantity_skew_keeps_the_minimum_and_the_test_shares():
    train, test = split_table(QuantitySkew(20, 0.05, 5))
    assert train.sum() == 1000 and test.sum() == 200
    assert train.sum(1).min() == 5 and test.sum(1).min() >= 1
    expected = np.maximum(train.sum(1) / 5, 1)
    assert (np.abs(test.sum(1) - expected)[test.sum(1) < test.sum(1).max()] <= 1).all()
    with pytest.raises(ValueError, match=r"20 clients.*51.*1020"):
        split_table(QuantitySkew(20, min_per_client=51))


@pytest.mark.parametrize("partition", [BalancedDirichlet, QuantitySkew])
@pytest.mark.parametrize("alpha", [0, -1, float("nan"), "much", None, True])
def test_concentrations_that_cannot_be_used(partition, alpha):
    with rejects("alpha", alpha):
        partition(alpha=alpha)


def test_iid_shares_are_equal():
    train, test = split_table(IID(7))
    assert sorted(train.sum(1)) == [142, 143, 143, 143, 143, 143, 143]
    # A client's count of a class is hypergeometric: mean 14.3, standard deviation 3.3.
    assert (np.abs(train - 100 / 7) < 5 * 3.3).all()
    assert set(test.sum(1)) == {28, 29}


@pytest.mark.parametrize("alpha", [0.01, 0.1, 1, 100])
def test_dirichlet_gives_train_and_test_the_same_proportions(alpha):
    train, test = split_table(Dirichlet(5, alpha, min_per_client=1), 1000, 200)
    # Rounding moves less than one sample of a class; a client without any test sample gets one.
    assert (np.abs(test - train / 5) < 1 + 1e-9 + (test.sum(1, keepdims=True) <= 1)).all()
    assert test.sum(1).min() >= 1


@pytest.mark.slow
def test_dirichlet_concentration_is_as_asked():
    """A share has mean 1/M and variance (1/M)(1 - 1/M)/(M·alpha + 1)."""
    for alpha in (0.1, 1.0, 50.0):
        shares = np.stack([split_table(Dirichlet(5, alpha, 1), 400, 1, seed)[0] / 400 for seed in range(15)])
        expected = 0.2 * 0.8 / (5 * alpha + 1)
        assert shares.var() == pytest.approx(expected, rel=0.25)


@pytest.mark.parametrize("minimum", [1, 10, 50])
def test_dirichlet_minimum_holds_even_where_it_takes_everything(minimum):
    train, test = split_table(Dirichlet(20, 0.02, min_per_client=minimum))
    assert train.sum(1).min() >= minimum
    assert (train.sum(0) == 100).all()
    assert test.sum(1).min() >= 1


def test_dirichlet_minimum_per_class():
    train, _ = split_table(Dirichlet(20, 0.02, min_per_class=2))
    assert train.min() >= 2
    assert (train.sum(0) == 100).all()
    train, _ = split_table(Dirichlet(20, 0.02, min_per_class=2, min_per_client=45))
    assert train.min() >= 2
    assert train.sum(1).min() >= 45


def test_shards_have_their_number_of_classes_and_share_them_evenly():
    train, test = split_table(Shards(20, 3))
    assert ((train > 0).sum(1) == 3).all()
    assert ((train > 0).sum(0) == 6).all()
    assert set(train[train > 0]) == {16, 17}
    assert ((test > 0) <= (train > 0)).all()


def test_shards_with_as_many_classes_as_there_are():
    train, _ = split_table(Shards(4, K))
    assert (train == 25).all()


@pytest.mark.parametrize(
    ("clients", "fraction", "main", "others"), [(20, 0.5, 25, (2, 3)), (10, 0.82, 82, (2, 2)), (10, 1.0, 100, (0, 0))]
)
def test_dominant_class_has_its_fraction(clients, fraction, main, others):
    train, test = split_table(DominantClass(clients, fraction))
    largest = train.argmax(1)
    assert (np.bincount(largest, minlength=K) == clients // K).all()
    assert (train.max(1) == main).all()
    rest = np.sort(train, axis=1)[:, :-1]
    assert rest.min() >= others[0]
    assert rest.max() <= others[1] + 1
    assert (np.abs(train.sum(1) - 1000 / clients) <= 2).all()
    assert (np.abs(test.max(1) - main / 5) <= 1).all()


def test_dominant_class_with_more_of_some_classes_than_clients():
    train, _ = split_table(DominantClass(13, 0.5))
    assert (np.abs(train.max(1) / train.sum(1) - 0.5) < 0.02).all()
    assert (train.sum(0) <= 100).all()


def test_by_domain():
    domains = np.array(["sketch", "photo"])[np.arange(1000) % 2]
    train = samples(100, domain=domains)
    test = samples(20, domain=np.array(["sketch", "photo"])[np.arange(200) % 2])
    rows, test_rows = ByDomain(clients_per_domain=2).split(train, test, 0)
    assert [set(domains[client_rows]) for client_rows in rows] == [{"photo"}, {"photo"}, {"sketch"}, {"sketch"}]
    assert [len(client_rows) for client_rows in rows] == [250] * 4
    assert [len(client_rows) for client_rows in test_rows] == [50] * 4


def test_by_domain_of_thousands_of_clients_gives_each_its_own_rows():
    names = np.random.default_rng(0).permutation(np.repeat([f"uploader {i}" for i in range(5000)], 8))
    train = samples(4000, client=names)
    test = samples(1, client=np.array(["uploader 7", "nobody", *["uploader 3"] * 8]))
    with pytest.warns(UserWarning, match="1 of 10 test samples"):
        rows, test_rows = ByDomain("client").split(train, test, 0)
    strangers = samples(1, client=np.array(["nobody"] * 10))
    with pytest.warns(UserWarning, match="10 of 10 test samples"):
        ByDomain("client").split(train, strangers, 0)
    order = sorted(set(names.tolist()))
    for client in (0, 1, 2500, 4999):
        assert sorted(rows[client]) == [row for row, name in enumerate(names) if name == order[client]]
    assert sorted(np.concatenate(rows)) == list(range(40_000))
    assert {order[client]: sorted(client_rows) for client, client_rows in enumerate(test_rows) if len(client_rows)} == {
        "uploader 3": list(range(2, 10)),
        "uploader 7": [0],
    }


def test_dirichlet_divides_by_a_column_in_place_of_the_labels():
    wards = np.array(["east", "west", "north"])
    train = samples(300, ward=wards[np.arange(3000) % 3])
    test = samples(30, ward=wards[np.arange(300) % 3])
    by_name = Dirichlet(5, 0.3, column="ward").split(train, test, 1)
    number = {name: place for place, name in enumerate(sorted(wards))}
    as_labels = [Split(np.array([number[name] for name in part.columns["ward"]]), part.index) for part in (train, test)]
    by_label = Dirichlet(5, 0.3).split(*as_labels, 1)
    for client_rows, same in zip([*by_name[0], *by_name[1]], [*by_label[0], *by_label[1]], strict=True):
        assert client_rows.tolist() == same.tolist()
    objects = [replace(part, columns={"ward": part.columns["ward"].astype(object)}) for part in (train, test)]
    assert [client_rows.tolist() for client_rows in Dirichlet(5, 0.3, column="ward").split(*objects, 1)[0]] == [
        client_rows.tolist() for client_rows in by_name[0]
    ]
    alone = Dirichlet(5, 0.3, column="ward").split(train, Split(test.labels[:0], test.index[:0]), 1)
    assert [client_rows.tolist() for client_rows in alone[0]] == [client_rows.tolist() for client_rows in by_name[0]]
    with pytest.raises(ValueError, match="no column 'bed'"):
        split_table(Dirichlet(5, 0.3, column="bed"))


def test_rare_values_of_a_column_are_one_class():
    train = Split(np.zeros(14, int), np.arange(14), {"ward": np.repeat(["a", "b", "c", "d"], [6, 5, 2, 1])})
    rows, _ = Dirichlet(3, 1.0, merge_below=3, min_per_class=1, column="ward").split(train, train, 0)
    assert [len({"ab".find(ward) for ward in train.columns["ward"][client_rows]}) for client_rows in rows] == [3, 3, 3]
    with pytest.raises(ValueError, match=r"smallest class.* 1 samples"):
        Dirichlet(3, 1.0, min_per_class=1, column="ward").split(train, train, 0)


@pytest.mark.parametrize("seed", range(5))
def test_whole_groups_come_as_close_to_what_is_asked_for_as_they_can(seed):
    groups = np.random.default_rng(seed).integers(0, 300, 2000)
    parts = split_by_group(groups, [200, 600], np.random.default_rng(seed))
    assert sorted(np.concatenate(parts)) == list(range(2000))
    for first, second in combinations(parts, 2):
        assert not set(groups[first]) & set(groups[second])
    largest = np.bincount(groups).max()
    assert abs(len(parts[0]) - 200) <= largest / 2
    assert abs(len(parts[0]) + len(parts[1]) - 800) <= largest / 2


def test_groups_of_one_row_give_the_rows_of_a_permutation():
    parts = split_by_group(np.arange(50), [10, 5], np.random.default_rng(3))
    order = np.random.default_rng(3).permutation(50)
    for part, expected in zip(parts, np.split(order, [10, 15]), strict=True):
        assert part.tolist() == sorted(expected)
    assert [
        len(part) for part in split_by_group(np.repeat([1, 2], 8), [1], np.random.default_rng(0), min_groups=1)
    ] == [8, 8]


def test_of_each_stratum_its_share_is_drawn_without_bias():
    strata = np.random.default_rng(0).permutation(np.repeat(np.arange(4), [100, 40, 7, 1]))
    drawn = [stratified_sample(strata, 0.3, np.random.default_rng(seed)) for seed in range(300)]
    for rows in drawn[:20]:
        assert np.bincount(strata[rows], minlength=4).tolist() == [30, 12, 2, 0]
        assert rows.tolist() == sorted(set(rows.tolist()))
    # How often one of the 100 is drawn: binomial, 300 · 0.3, standard deviation 7.9.
    often = np.bincount(np.concatenate(drawn), minlength=148)[strata == 0]
    assert (np.abs(often - 90) < 5 * 7.9).all()


@pytest.mark.every(4)
@pytest.mark.parametrize(
    "partition", [IID(10_000), Dirichlet(10_000, 0.05), Shards(10_000, 2), DominantClass(10_000)], ids=repr
)
def test_ten_thousand_clients(partition):
    train = samples(6000)
    test = samples(1000)
    rows, test_rows = partition.split(train, test, 0)
    assert len(rows) == len(test_rows) == 10_000
    assert min(map(len, rows)) >= 2
    assert min(map(len, test_rows)) >= (0 if isinstance(partition, DominantClass) else 1)
    flat = np.concatenate(rows)
    assert len(np.unique(flat)) == len(flat) == 60_000


def test_apportioning_is_exact_and_without_bias():
    shares = np.random.default_rng(0).dirichlet(np.ones(7))
    draws = np.stack([apportion(10, shares, np.random.default_rng(seed)) for seed in range(4000)])
    assert (draws.sum(1) == 10).all()
    assert (np.abs(draws - 10 * shares) < 1).all()
    # A rounded share varies by at most 1/2: 4 standard errors of 4,000 draws.
    assert (np.abs(draws.mean(0) - 10 * shares) < 4 * 0.5 / np.sqrt(4000)).all()


def test_the_minimum_comes_first_from_what_nobody_has():
    counts = np.array([[0, 0], [4, 4]])
    raised = raise_to_minimum(counts, 3, np.array([[0.0, 1.0], [1.0, 1.0]]), spare=np.array([5, 2]))
    assert raised.tolist() == [[0, 3], [4, 3]]


def test_combinations_of_labels_are_classes_and_rare_ones_one_class():
    train = np.repeat(np.array([[0, 0], [0, 1], [1, 0], [1, 1]]), [6, 5, 2, 1], axis=0)
    test = np.array([[1, 1], [0, 0], [1, 0], [0, 1]])
    ids, test_ids = categories(train, test, merge_below=3)
    assert np.bincount(ids).tolist() == [6, 5, 3]
    assert test_ids.tolist() == [2, 0, 2, 1]
    rows, _ = Dirichlet(3, 1.0).split(Split(train, np.arange(14)), Split(test, np.arange(4)), 0)
    assert sorted(np.concatenate(rows)) == list(range(14))


def test_classes_that_only_the_test_set_has_are_left_out():
    train = Split(np.repeat([0, 2], 10), np.arange(20))
    test = Split(np.repeat([0, 1, 2, 3], 4), np.arange(16))
    for partition in (Dirichlet(3, 1.0), Shards(2, 1), DominantClass(2)):
        _, rows = partition.split(train, test, 0)
        dealt = test.labels[np.concatenate(rows)]
        assert (dealt == 0).sum() == (dealt == 2).sum() == 4


def test_from_file(tmp_path):
    path = tmp_path / "partition.json"
    path.write_text(json.dumps({"train": [[12, 10], [15]], "test": [[3], []]}))
    train = Split(np.zeros(5, int), np.array([10, 11, 12, 15, 17]))
    rows, test_rows = FromFile(str(path)).split(train, Split(np.zeros(4, int), np.arange(4)), 0)
    assert [client_rows.tolist() for client_rows in rows] == [[2, 0], [3]]
    assert [client_rows.tolist() for client_rows in test_rows] == [[3], []]


@pytest.mark.parametrize(
    ("call", "option", "value"),
    [
        (IID, "num_clients", 0),
        (partial(Dirichlet, 5), "alpha", 0),
        (partial(Dirichlet, 5), "alpha", -1.0),
        (partial(Dirichlet, 5), "alpha", float("nan")),
        (partial(Dirichlet, 5, 1), "min_per_client", 0),
        (partial(DominantClass, 5), "fraction", 1.5),
        (partial(Shards, 5), "classes_per_client", 0),
    ],
)
def test_wrong_options_are_rejected(call, option, value):
    with rejects(option, value):
        call(**{option: value})


@pytest.mark.parametrize(
    ("divide", "words"),
    [
        (lambda: split_table(IID(1001)), r"1001 clients.*1000.*num_clients"),
        (lambda: split_table(Dirichlet(501, 1)), "501 clients with at least 2 .* need 1002"),
        (lambda: split_table(Dirichlet(60, 1, min_per_class=2)), "smallest class has 100 samples"),
        (lambda: split_table(Shards(20, 11)), "at most 10 classes per client"),
        (lambda: split_table(Shards(2, 2)), "at least one client for every class"),
        (lambda: split_table(Shards(600, 5), 100), "a class has 100 samples for 300 clients"),
        (lambda: DominantClass(5).split(unbalanced(), unbalanced(), 0), "21 samples of 2 classes are too few for 5"),
        (lambda: split_table(ByDomain("hospital")), "no column 'hospital'"),
        (
            lambda: ByDomain("d", 3).split(samples(1, d=np.arange(10)), samples(1), 0),
            "domain 0 has 1 samples for 3 clients",
        ),
    ],
)
def test_what_cannot_be_divided_is_named(divide, words):
    with pytest.raises(ValueError, match=words) as caught:
        divide()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not a partition"),
        ('{"num_clients": 2, "train_sizes": [1, 2]}', "is not a partition"),
        ('{"train": [[0], [7]], "test": []}', "assigns sample 7 to client 1"),
        ('{"train": [[-1]], "test": []}', "assigns sample -1 to client 0"),
    ],
)
def test_files_that_do_not_fit(tmp_path, text, words):
    path = tmp_path / "partition.json"
    path.write_text(text)
    part = Split(np.zeros(5, int), np.arange(5))
    with pytest.raises(ValueError, match=words):
        FromFile(str(path)).split(part, part, 0)


def test_a_file_that_is_not_there(tmp_path):
    part = Split(np.zeros(5, int), np.arange(5))
    with pytest.raises(FileNotFoundError, match=r"partition\.json .*earlier run"):
        FromFile(str(tmp_path / "none")).split(part, part, 0)


def test_numbers_are_not_divided_by_class():
    numbers = Split(np.linspace(20.0, 80.0, 40, dtype=np.float32), np.arange(40))
    with pytest.raises(ValueError, match=r"Dirichlet.*numbers"):
        Dirichlet(4, alpha=0.5).split(numbers, numbers, 0)
    train_rows, _ = IID(4).split(numbers, numbers, 0)
    assert sorted(np.concatenate(train_rows)) == list(range(40))
