# SPDX-License-Identifier: Apache-2.0
"""Training of a client that joins a run after its last round."""

from perada.algorithms.base import Algorithm, ClientSideWrapper, Stacks, TensorNames
from perada.algorithms.fedavg import Standalone
from perada.core.rounds import Phase
from perada.core.states import State


class Joining(ClientSideWrapper):
    """The client's side of another algorithm, without anything that is sent: the server's state does not change.

    The client receives, trains, keeps and predicts with the same states as in the base.

    Args:
        base: The other algorithm.

    Attributes:
        global_model: Whether the run's global model, which does not change, is scored, too: only where the client
            predicts with both models.
    """

    inference = "personal"
    sends_updates = False
    global_model = False
    unsent = frozenset({"personal", "local", "own"})

    def end_round(
        self,
        trained: Stacks,
        client_state: Stacks,
        received: State,
        tensor_names: TensorNames,
    ) -> tuple[Stacks, State]:
        """Keep the states of the base; send nothing."""
        new_client_state, _ = self.base.end_round(trained, client_state, received, tensor_names)
        return new_client_state, {}


def joining(algorithm: Algorithm, phases: tuple[Phase, ...]) -> tuple[Joining, tuple[Phase, ...]]:
    """Return the algorithm with which a client joins a finished run, and the phases of its rounds.

    An algorithm chooses them by :meth:`.Algorithm.joining`. Otherwise the client trains as after the last round, if
    there is such a training; else it fine-tunes the global model, as in FedAvg+FT, if clients predict with it; else it
    trains like the clients of the run. It sends nothing.

    Args:
        algorithm: Algorithm of the run.
        phases: Phases of the run's rounds.

    Raises:
        ValueError: If the run has several global models, and so no single state to start from.
    """
    if algorithm.modes > 1:
        raise ValueError(
            f"a client cannot join a run of {type(algorithm).__name__}, whose global models are averaged: there is no "
            "single state to start from; include the client in a new run instead"
        )
    chosen = algorithm.joining(phases)
    if chosen is None:
        chosen = _default_training(algorithm, phases)
    chosen_algorithm, chosen_phases = chosen
    if isinstance(chosen_algorithm, Joining):
        return chosen_algorithm, chosen_phases
    return Joining(chosen_algorithm), chosen_phases


def _default_training(algorithm: Algorithm, phases: tuple[Phase, ...]) -> tuple[Algorithm, tuple[Phase, ...]]:
    """Return the training of a client that joins a run whose algorithm does not choose any; see :func:`joining`."""
    tuning = algorithm.personalization()
    if tuning is not None:
        tuned, phase = tuning
        return tuned, (phase,)
    if algorithm.inference == "global":
        return Standalone(), phases
    return algorithm, phases
