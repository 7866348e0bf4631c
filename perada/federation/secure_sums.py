# SPDX-License-Identifier: Apache-2.0
"""Secure sums at set-up: an algorithm's server must need no more of the clients than sums."""

from perada.algorithms import Algorithm, TensorNames
from perada.algorithms.dry_run import example_sent, server_follows_from_mean
from perada.core.states import State
from perada.federation.settings import Settings
from perada.server.aggregate import ServerRule


def check_secure_sums(settings: Settings, tensor_names: TensorNames, initial: State, clients: int) -> None:
    """Check that algorithm, rule and options need no more of the clients than sums over a round's.

    Args:
        settings: Settings of the run; without ``secure_sums`` nothing is checked.
        tensor_names: Names of the state's tensors.
        initial: The algorithm's initial state.
        clients: Number of all clients.

    Raises:
        ValueError: If they need more.
    """
    secure = settings.secure_sums
    algorithm = settings.algorithm
    rule = settings.rule
    if secure is None:
        return
    name = type(algorithm).__name__
    drawn = min(clients, settings.clients_per_round or clients)
    instead = "or leave secure_sums out"
    reasons = {
        f"{name}: its clients send nothing; leave it out": not algorithm.sends_updates,
        f"{name}: it compares models on the clients' images, and their losses are no sums; choose PerAda, {instead}": (
            algorithm.compares_models
        ),
        f"drop_outliers=True: it compares single updates; leave it out, {instead}": settings.drop_outliers,
        f"clients_per_round={drawn}: more than {secure.threshold:g} of them, and at least {secure.min_sites}, must be "
        f"there to the end; take more, {instead}": drawn < secure.min_sites,
        f"the server rule {rule.kind}: it looks at single updates; choose 'mean' or 'fedavgm', {instead}": (
            not rule.function_of_mean
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(f"secure_sums cannot be used with {reason}")
    if not _follows_from_mean(algorithm, rule, tensor_names, initial):
        raise ValueError(
            f"secure_sums cannot be used with {name}: what its server makes of the clients' updates does not follow "
            f"from their mean, as a trial at set-up shows; choose PerAda, FedAvg or Ditto, {instead}"
        )


def _follows_from_mean(algorithm: Algorithm, rule: ServerRule, tensor_names: TensorNames, initial: State) -> bool:
    """Return whether a server's steps need no more than the mean of what clients send."""
    sent = example_sent(algorithm, tensor_names, initial)
    try:
        return server_follows_from_mean(algorithm, rule, tensor_names, initial, sent)
    except Exception:  # the server's step needs what a sum does not have
        return False
