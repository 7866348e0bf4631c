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
    if not algorithm.sends_updates:
        raise _incompatible(f"{name}: its clients send nothing; leave it out")
    if algorithm.compares_models:
        raise _incompatible(
            f"{name}: it compares models on the clients' images, and their losses are no sums; choose PerAda, {instead}"
        )
    if settings.drop_outliers:
        raise _incompatible(f"drop_outliers=True: it compares single updates; leave it out, {instead}")
    if drawn < secure.min_sites:
        raise _incompatible(
            f"clients_per_round={drawn}: more than {secure.threshold:g} of them, and at least {secure.min_sites}, must "
            f"be there to the end; take more, {instead}"
        )
    if not rule.function_of_mean:
        raise _incompatible(
            f"the server rule {rule.kind}: it looks at single updates; choose 'mean' or 'fedavgm', {instead}"
        )
    if not _follows_from_mean(algorithm, rule, tensor_names, initial):
        raise _incompatible(
            f"{name}: what its server makes of the clients' updates does not follow from their mean, as a trial at "
            f"set-up shows; choose PerAda, FedAvg or Ditto, {instead}"
        )


def _incompatible(reason: str) -> ValueError:
    """Return the error for a choice that secure sums rule out, given with the remedy."""
    return ValueError(f"secure_sums cannot be used with {reason}")


def _follows_from_mean(algorithm: Algorithm, rule: ServerRule, tensor_names: TensorNames, initial: State) -> bool:
    """Return whether a server's steps need no more than the mean of what clients send."""
    sent = example_sent(algorithm, tensor_names, initial)
    try:
        return server_follows_from_mean(algorithm, rule, tensor_names, initial, sent)
    except Exception:  # the server's step needs what a sum does not have
        return False
