# SPDX-License-Identifier: Apache-2.0
"""Shares of secrets: put together as PyCryptodome does it, many at once, and with some that are wrong."""

import itertools
import random
import time

import pytest

pytest.importorskip("Crypto")
from Crypto.Protocol.SecretSharing import Shamir

from perada.deploy.sums import shares


def dealt(threshold, sites, seed=0):
    secret = random.Random(seed).randbytes(16)
    return secret, dict(enumerate(shares.split(secret, threshold, sites)))


@pytest.mark.every(3)
@pytest.mark.parametrize(("threshold", "sites"), [(1, 1), (2, 3), (3, 3), (7, 10), (67, 100), (90, 300)])
def test_the_bytes_are_those_of_pycryptodome(threshold, sites):
    secret, dealt_shares = dealt(threshold, sites)
    for seed in range(2):
        places = random.Random(seed).sample(range(sites), threshold)
        some = {place: dealt_shares[place] for place in places}
        expected = Shamir.combine([(place + 1, share) for place, share in some.items()])
        assert shares.combine(some) == expected == secret
    wrong = some | {places[0]: bytes(16)}  # also where the result means nothing
    assert shares.combine(wrong) == Shamir.combine([(place + 1, share) for place, share in wrong.items()])


def test_coefficients_are_computed_once_for_all_secrets(monkeypatch):
    """Of 100 sites each has a secret, of which the same 67 sites hold the shares."""
    secrets = [dealt(67, 100, seed) for seed in range(3)]
    shares.lagrange_coefficients.cache_clear()
    for secret, dealt_shares in secrets:
        assert shares.combine({place: dealt_shares[place] for place in range(67)}) == secret
    assert shares.lagrange_coefficients.cache_info().misses == 1


def test_many_secrets_take_a_fraction_of_their_time_in_pycryptodome():
    _, dealt_shares = dealt(67, 100)
    some = {place: dealt_shares[place] for place in range(67)}
    begin = time.process_time()
    Shamir.combine([(place + 1, share) for place, share in some.items()])
    once = time.process_time() - begin
    begin = time.process_time()
    for _ in range(10):
        shares.combine(some)
    assert time.process_time() - begin < 5 * once


def test_a_product_is_that_of_polynomials_modulo_the_one_of_the_field():
    def slow(a, b):
        product = 0
        for bit in range(128):
            product ^= (a << bit) * (b >> bit & 1)
        for bit in range(255, 127, -1):
            product ^= (2**128 + 0b10000111 << bit - 128) * (product >> bit & 1)
        return product

    draw = random.Random(3)
    for _ in range(50):
        a = draw.getrandbits(128)
        b = draw.getrandbits(draw.choice([1, 7, 128]))
        assert shares.multiply(a, b) == shares.multiply(b, a) == slow(a, b)


@pytest.mark.parametrize("wrong", range(4))
def test_a_secret_is_found_as_long_as_enough_shares_are_right(wrong):
    """Whichever they are, of nine shares of which six are needed."""
    secret, dealt_shares = dealt(6, 9)
    for places in itertools.islice(itertools.combinations(range(9), wrong), 0, None, 5):
        some = dealt_shares | {place: random.Random(place).randbytes(16) for place in places}
        result = shares.recover(some, 6, lambda candidate: candidate == secret)
        assert result == secret


@pytest.mark.slow
def test_what_cannot_be_found_is_none_and_takes_a_bounded_time():
    secret, dealt_shares = dealt(67, 100)
    assert shares.recover({place: dealt_shares[place] for place in range(66)}, 67, lambda candidate: True) is None
    asked = []
    assert shares.recover(dealt_shares, 67, lambda candidate: asked.append(candidate)) is None
    assert len(asked) == shares.MAX_SUBSETS and set(asked) == {secret}
