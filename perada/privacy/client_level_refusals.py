# SPDX-License-Identifier: Apache-2.0
"""What privacy of whole clients cannot be used with."""

from perada.algorithms import Algorithm, FedBE, FedEnsemble
from perada.server.rules import ServerRule


def check_client_level(algorithm: Algorithm, rule: ServerRule, weighting: str, distils: bool) -> None:
    """Refuse what makes more of the clients' updates than their uniform mean, which alone has all of the noise.

    An algorithm of your own is judged by its ``sends``, ``distills`` and ``modes`` alone: its ``server_step`` must not
    look at single rows of the updates.

    Args:
        algorithm: The algorithm.
        rule: The server's rule.
        weighting: ``uniform`` or ``samples``.
        distils: Whether there are distillation steps.

    Raises:
        ValueError: If it cannot be private.
    """
    name = type(algorithm).__name__
    inner = algorithm.base if isinstance(algorithm, FedEnsemble) else algorithm
    sample_level = "or protect single images instead (the section privacy)"
    if not algorithm.sends:
        raise ValueError(f"client_privacy cannot be used with {name}: its clients send nothing; leave it out")
    if weighting != "uniform":
        raise ValueError(
            f"client_privacy cannot be used with weighting={weighting!r}: a client's number of images is private; "
            "choose weighting='uniform'"
        )
    if not rule.weighted:
        raise ValueError(
            f"client_privacy cannot be used with the server rule {rule.kind}: it is not a function of the clients' "
            "mean, which alone has the noise; choose a rule on the mean, such as 'mean' or 'fedavgm'"
        )
    if isinstance(inner, FedBE) and not inner.distill:
        raise ValueError(
            f"client_privacy cannot be used with {name}(distill=False): its ensemble holds single clients' updates "
            f"and models drawn from them; choose FedAvg, {sample_level}"
        )
    if algorithm.distills and distils:
        raise ValueError(
            f"client_privacy cannot be used with {name} with distillation: the teachers are single clients' updates, "
            "which have only a share of the noise; choose PerAda(distill=False), or set distillation.steps=0, "
            f"{sample_level}"
        )
    if algorithm.modes > 1:
        raise ValueError(
            f"client_privacy cannot be used with {name}(modes={algorithm.modes}): a mode's mean is over a part of the "
            f"clients, with a part of the noise; set modes=1, {sample_level}"
        )
