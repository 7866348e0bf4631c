# SPDX-License-Identifier: Apache-2.0
"""Differentially private training: its options, and its parts: sampling, clipping, noise and the account of its cost.

Opacus is imported when it is first needed, because that takes seconds.
"""

from perada.privacy.accounting import ACCOUNTANTS, Ledger, Ledgers, calibrate, history_epsilon
from perada.privacy.clipping import noisy_mean
from perada.privacy.options import ClientPrivacy, Privacy
from perada.privacy.sampling import (
    passes,
    poisson_batches,
    secure_permutation,
    secure_uniform,
    shuffled_batches,
)

__all__ = [
    "ACCOUNTANTS",
    "ClientPrivacy",
    "Ledger",
    "Ledgers",
    "Privacy",
    "calibrate",
    "history_epsilon",
    "noisy_mean",
    "passes",
    "poisson_batches",
    "secure_permutation",
    "secure_uniform",
    "shuffled_batches",
]
