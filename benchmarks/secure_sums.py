# SPDX-License-Identifier: Apache-2.0
"""What a secure sum costs: bytes and seconds at a site and at the server, beside states that are sent in the clear."""

from collections.abc import Iterator
from statistics import fmean
from typing import Any

import torch

from perada.deploy.sums.vector import check_cryptography

ALL = 10**8
"""Up to so many numbers of all sites together each site masks its own, and the sum is compared with a plain one."""


def secure_sums(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Give the costs of a round by sites and numbers, on the CPU, with all sites there and with one that goes.

    The site that goes sent its shares, and does not send its part. Of three sites none may go. Beyond ``ALL`` numbers
    only ``repeats`` sites mask theirs, and the vector of the first stands for those of the others, whose work is equal.
    Without the packages for keys and shares it gives nothing.
    """
    try:
        check_cryptography()
    except ImportError:
        return
    for sites in (3, 4) if quick else (3, 10, 30, 100):
        for numbers in (1_000,) if quick else (10**5, 10**6, 10**7):
            masking = sites if sites * numbers <= (3_000 if quick else ALL) else min(sites, repeats)
            for dropped in (0, 1) if sites > 3 else (0,):
                yield row(sites, numbers, masking, dropped)


def row(sites: int, numbers: int, masking: int, dropped: int) -> dict[str, Any]:
    """Return the costs of one round; seconds are the processor's, those at a site the median over the sites.

    Args:
        sites: Number of sites.
        numbers: Numbers of a state.
        masking: Sites that really mask their vectors.
        dropped: Sites that drop out.
    """
    from benchmarks.summing_sites import Federation

    federation = Federation(sites)
    plain = federation.plain(numbers, masking)
    secure = federation.secure(numbers, masking, dropped)
    return {
        "sites": sites,
        "numbers": numbers,
        "gone": dropped,
        "vectors masked": masking,
        "MB up": round(secure.up / sites, 3),
        "MB down": round(secure.down / sites, 3),
        "MB at the server": round(secure.up + secure.down, 1),
        **{f"bytes: {message}": round(fmean(sizes)) for message, sizes in secure.messages.items()},
        "up / plain": round(secure.up / plain.up, 3),
        "down / plain": round(secure.down / plain.down, 3),
        "s at a site": round(sum(secure.of_site().values()), 4),
        **{f"site: {step}": round(seconds, 4) for step, seconds in secure.of_site().items()},
        "s at the server": round(sum(secure.server.values()), 4),
        **{f"server: {step}": round(seconds, 4) for step, seconds in secure.server.items()},
        "plain: s at a site": round(sum(plain.of_site().values()), 4),
        "plain: s at the server": round(sum(plain.server.values()), 4),
    }
