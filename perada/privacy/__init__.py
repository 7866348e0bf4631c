# SPDX-License-Identifier: Apache-2.0
"""Differentially private training: its options, sampling, clipping, noise and the account of its cost.

Where to read:

- Options of a recipe are in ``options``; what they rule out is checked at set-up in ``dry_run_checks`` (algorithm and
  server rule) and ``model_checks`` (network).
- Privacy of single images: ``sampling`` draws batches, ``gradients`` clips and sums, ``clipping`` adds noise.
- Privacy of whole clients: ``client_level``, with secure sums also ``client_sums``.
- ``accounting`` turns noisy steps into ε, ``account`` plans and limits them for each client, ``protection`` holds both
  levels of a run, and ``journal`` is the file of rounds that were begun.

Opacus is imported when it is first needed, because that takes seconds, and so is PyTorch, which ``accounting`` does not
need.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

_PUBLIC_MODULES = ("accounting", "options", "clipping", "sampling")
"""Modules with the public names, those without PyTorch first."""


def __getattr__(name: str) -> object:
    """Import a public name when it is first used."""
    if name in __all__:
        for module_name in _PUBLIC_MODULES:
            module = import_module(f"perada.privacy.{module_name}")
            if hasattr(module, name):
                # From now on Python finds the name without this function.
                globals()[name] = value = getattr(module, name)
                return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names, also before they are used."""
    return sorted({*globals(), *__all__})
