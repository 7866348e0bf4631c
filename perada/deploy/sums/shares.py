# SPDX-License-Identifier: Apache-2.0
"""Shamir's secret sharing of 128-bit secrets: PyCryptodome splits them, and this module recovers many at once.

PyCryptodome's ``Shamir.combine`` computes the Lagrange coefficients for each secret, which takes nearly all of its
time. They only depend on whose shares are combined, so this module computes them once for all secrets of a round.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache, reduce
from itertools import combinations, islice

from Crypto.Protocol.SecretSharing import Shamir

SECRET_SIZE = 16
"""Bytes of a secret, and of a share of it: the field has 2¹²⁸ elements."""
MAX_SUBSETS = 200
"""How many sets of shares are tried for one secret. Each takes milliseconds with 100 sites."""
_POLYNOMIAL = 2**128 + 2**7 + 2**2 + 2 + 1
"""The field is that of polynomials over GF(2) modulo this one, as in PyCryptodome; bit i is the coefficient of x^i."""


def split(secret: bytes, threshold: int, sites: int) -> list[bytes]:
    """Split a secret into one share for each site.

    Any ``threshold`` of the shares determine the secret, and fewer reveal nothing about it.
    """
    return [share for _, share in Shamir.split(threshold, sites, secret)]


def combine(share_of_point: Mapping[int, bytes]) -> bytes:
    """Recover a secret from exactly as many shares as its threshold.

    Args:
        share_of_point: Shares by the index of their site.
    """
    indices = tuple(sorted(share_of_point))
    secret = 0
    for index, coefficient in zip(indices, lagrange_coefficients(indices), strict=True):
        # Addition in a field of characteristic 2 is XOR.
        secret ^= multiply(int.from_bytes(share_of_point[index], "big"), coefficient)
    return secret.to_bytes(SECRET_SIZE, "big")


def recover(share_of_point: Mapping[int, bytes], threshold: int, is_secret: Callable[[bytes], bool]) -> bytes | None:
    """Recover a secret from shares of which at least ``threshold`` are correct.

    Args:
        share_of_point: Shares by the index of their site. Some may be wrong, since their dealer may have lied.
        threshold: How many shares determine the secret.
        is_secret: Compares a candidate with what is public about the secret.

    Returns:
        The secret; None if no set of shares that was tried yields it.
    """
    candidates = combinations(sorted(share_of_point), threshold)
    for indices in islice(candidates, MAX_SUBSETS):
        secret = combine({index: share_of_point[index] for index in indices})
        if is_secret(secret):
            return secret
    return None


@lru_cache(maxsize=2 * MAX_SUBSETS)
def lagrange_coefficients(indices: tuple[int, ...]) -> list[int]:
    """Return the coefficients of the shares of these sites in the value of their polynomial at zero.

    The share of index i is the polynomial's value at i + 1, since its value at zero is the secret.
    """
    points = [index + 1 for index in indices]
    product = reduce(multiply, points, 1)
    # The coefficient of a point x is the product of y / (x + y) over all other points y; minus is plus in this field.
    # The product of all points divided by x · Π (x + y) is the same.
    denominators = []
    for point in points:
        differences = [point ^ other for other in points if other != point]
        denominators.append(reduce(multiply, differences, point))
    return [multiply(product, inverse) for inverse in _invert_all(denominators)]


def multiply(a: int, b: int) -> int:
    """Multiply two elements of the field.

    It is fast if one of them is small. Its time depends on the elements, which only the server computes with.
    """
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


def _invert_all(elements: list[int]) -> list[int]:
    """Invert all elements with a single inversion, of their product, and three multiplications for each element."""
    # Each product is that of the elements before an element.
    products = [1]
    for element in elements:
        products.append(multiply(products[-1], element))
    # x to the power of 2¹²⁸ − 2 is the inverse of x, since the field has 2¹²⁸ elements.
    inverse = 1
    square = products[-1]
    for _ in range(127):
        square = multiply(square, square)
        inverse = multiply(inverse, square)
    inverses = []
    for element, product_before in zip(reversed(elements), reversed(products[:-1]), strict=True):
        inverses.append(multiply(inverse, product_before))
        inverse = multiply(inverse, element)
    return inverses[::-1]
