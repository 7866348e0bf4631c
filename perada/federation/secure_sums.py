# SPDX-License-Identifier: Apache-2.0
"""Secure sums at set-up: checks that an algorithm's server needs only sums over the clients."""

from perada.algorithms import Algorithm, TensorNames
from perada.algorithms.dry_run import example_sent, server_follows_from_mean
from perada.core.states import State
from perada.federation.settings import Settings
from perada.server.aggregate import ServerRule


def check_secure_sums(
    settings: Settings, tensor_names: TensorNames, initial: State, fewest_clients: int | None
) -> None:
    """Check that algorithm, rule and options need only sums over a round's clients.

    Args:
        settings: Settings of the run; without ``secure_sums`` nothing is checked.
        tensor_names: Names of the state's tensors.
        initial: The algorithm's initial state.
        fewest_clients: Smallest number of clients in a round; None if it is unknown.

    Raises:
        ValueError: If they need more.
    """
    secure = settings.secure_sums
    algorithm = settings.algorithm
    rule = settings.rule
    if secure is None:
        return
    name = type(algorithm).__name__
    instead = "or leave secure_sums out"
    if not algorithm.sends_updates:
        raise _incompatible_choice(f"{name}: its clients send nothing; leave secure_sums out")
    if algorithm.compares_models:
        raise _incompatible_choice(
            f"{name}: it compares models by the clients' losses, which are not sums; choose PerAda, {instead}"
        )
    if fewest_clients is not None and fewest_clients < secure.min_sites:
        raise _incompatible_choice(
            f"clients_per_round={fewest_clients}: more than {secure.threshold:g} of them, and at least "
            f"{secure.min_sites}, must stay until the end; raise clients_per_round, {instead}"
        )
    if not rule.function_of_mean:
        raise _incompatible_choice(
            f"the server rule {rule.kind}: it inspects single updates; choose 'mean' or 'fedavgm', {instead}"
        )
    if not _follows_from_mean(algorithm, rule, tensor_names, initial):
        raise _incompatible_choice(
            f"{name}: its server step is not a function of the mean of the clients' updates, as found in a dry run at "
            f"set-up; choose PerAda, FedAvg or Ditto, {instead}"
        )


def _incompatible_choice(reason: str) -> ValueError:
    """Return the error for a choice that secure sums rule out, including the remedy."""
    return ValueError(f"secure_sums does not support {reason}")


def _follows_from_mean(algorithm: Algorithm, rule: ServerRule, tensor_names: TensorNames, initial: State) -> bool:
    """Return whether a server's steps need only the mean of what clients send."""
    sent = example_sent(algorithm, tensor_names, initial)
    try:
        return server_follows_from_mean(algorithm, rule, tensor_names, initial, sent)
    except Exception:  # the server's step needs what a sum does not have
        return False
