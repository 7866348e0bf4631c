# SPDX-License-Identifier: Apache-2.0
"""Shamir's sharing of 128-bit secrets: PyCryptodome splits them, and many are put together at once here.

``Shamir.combine`` computes the Lagrange coefficients anew for each secret, which takes nearly all of its time. They
depend only on whose shares are combined, so that those of a round's many secrets are computed once.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache, reduce
from itertools import combinations, islice

from Crypto.Protocol.SecretSharing import Shamir

SECRET_SIZE = 16
"""Bytes of a secret that is shared, and of a share: the sharing is over a field of 2¹²⁸ elements."""
SUBSETS = 200
"""How many sets of shares are tried for one secret. Each takes milliseconds at 100 sites."""
_POLYNOMIAL = 2**128 + 2**7 + 2**2 + 2 + 1
"""The field is that of polynomials over GF(2) modulo this one, as in PyCryptodome; bit i is the coefficient of x^i."""


def split(secret: bytes, threshold: int, sites: int) -> list[bytes]:
    """Split a secret into one share for each site, by place.

    Any ``threshold`` of the shares determine the secret, and fewer say nothing about it.
    """
    return [share for _, share in Shamir.split(threshold, sites, secret)]


def combine(shares: Mapping[int, bytes]) -> bytes:
    """Return the secret that exactly as many shares as its threshold determine.

    Args:
        shares: Shares by place, counted from 0.
    """
    places = tuple(sorted(shares))
    secret = 0
    for place, coefficient in zip(places, lagrange_coefficients(places), strict=True):
        secret ^= multiply(int.from_bytes(shares[place], "big"), coefficient)
    return secret.to_bytes(SECRET_SIZE, "big")


def recover(shares: Mapping[int, bytes], threshold: int, is_secret: Callable[[bytes], bool]) -> bytes | None:
    """Return the secret of which at least ``threshold`` of the shares are right.

    Args:
        shares: Shares by place, counted from 0. Some may be wrong: whoever made them may have lied.
        threshold: How many shares determine the secret.
        is_secret: Compares a candidate with what is public of the secret.

    Returns:
        The secret; None if none of the sets of shares that were tried gives it.
    """
    candidates = combinations(sorted(shares), threshold)
    for places in islice(candidates, SUBSETS):
        secret = combine({place: shares[place] for place in places})
        if is_secret(secret):
            return secret
    return None


@lru_cache(maxsize=2 * SUBSETS)
def lagrange_coefficients(places: tuple[int, ...]) -> list[int]:
    """Return the factors of the shares at these places in the value of their polynomial at zero.

    A place p stands for the element p + 1, since the polynomial's value at zero is the secret.
    """
    points = [place + 1 for place in places]
    product = reduce(multiply, points, 1)
    # The coefficient of a point x is the product of all other points y / (x + y), in a field where minus is plus.
    denominators = [reduce(multiply, (point ^ other for other in points if other != point), point) for point in points]
    return [multiply(product, inverse) for inverse in _inverses(denominators)]


def multiply(a: int, b: int) -> int:
    """Multiply two elements of the field. It is quick where one of them is small, and its time shows which."""
    small, large = sorted((a, b))
    product = 0
    while small:
        if small & 1:
            product ^= large
        small >>= 1
        large <<= 1
        if large >> 128:
            large ^= _POLYNOMIAL
    return product


def _inverses(elements: list[int]) -> list[int]:
    """Invert all elements by one inversion of their product, and three products each."""
    products = [1]
    for element in elements:
        products.append(multiply(products[-1], element))
    # The field has 2¹²⁸ elements, in which x to the power of 2¹²⁸ − 2 is the inverse of x.
    inverse, square = 1, products[-1]
    for _ in range(127):
        square = multiply(square, square)
        inverse = multiply(inverse, square)
    inverses = []
    for element, before in zip(reversed(elements), reversed(products[:-1]), strict=True):
        inverses.append(multiply(inverse, before))
        inverse = multiply(inverse, element)
    return inverses[::-1]
