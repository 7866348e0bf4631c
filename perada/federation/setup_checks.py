# SPDX-License-Identifier: Apache-2.0
"""The checks of a run's options at set-up, in one list for simulations, servers and sites.

Whoever sets up a run checks it in this order:

1. Its options, by :func:`check_run`, in the order of :data:`RUN_CHECKS`. These need the names of the model's tensors,
   but no image.
2. In a simulation, classes that are written outside perada, in a dry run.
3. Data, weights and options that would void its privacy (:func:`perada.lightning.privacy_setup.check_private`).
4. The images of its first batch (:func:`perada.lightning.setup.check_first_batch`).

A check may rely on all earlier ones having passed.
"""

import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property

from perada.algorithms import Algorithm, TensorNames
from perada.algorithms.dry_run import example_sent
from perada.core.checks import OptionError
from perada.core.states import State
from perada.federation.both_models import check_both_models
from perada.federation.options import Prediction
from perada.federation.outliers import check_drop_outliers
from perada.federation.secure_sums import check_secure_sums
from perada.federation.settings import (
    Settings,
    check_average,
    check_distilled_batch_norm,
    check_rule,
    check_sent_factors,
    check_server_images,
)
from perada.privacy.dry_run_checks import check_client_level


@dataclass(frozen=True, kw_only=True)
class RunSetup:
    """What is known of a run at set-up, before any image is read.

    Attributes:
        settings: Options of the rounds.
        prediction: Which models predict for a client.
        tensor_names: Names of the model's tensors.
        initial_state: Returns the state of a newly built model, given the index of its random initialisation.
        num_classes: Number of classes.
        num_clients: Number of all clients; None in a deployment, which further sites may join.
        fewest_clients: Smallest number of clients in a round; None at a site, which is not told.
        fewest_clients_source: Option that sets this number, and its value, for errors; "" for that of a simulation.
        num_public: Number of the server's public images; None at a site, which may lack them.
        num_labelled: Number of the server's labelled images; None at a site.
    """

    settings: Settings
    prediction: Prediction
    tensor_names: TensorNames
    initial_state: Callable[[int], State]
    num_classes: int
    num_clients: int | None
    fewest_clients: int | None
    fewest_clients_source: str = ""
    num_public: int | None
    num_labelled: int | None

    @cached_property
    def initial(self) -> State:
        """The algorithm's initial global state."""
        return self.settings.algorithm.initial(self.initial_state)


def check_run(setup: RunSetup) -> None:
    """Raise an error for options that the model, the clients or other options of a run do not support.

    Args:
        setup: What is known of the run.

    Raises:
        ValueError: By the first check of :data:`RUN_CHECKS` that fails. The message contains a remedy.
    """
    for check in RUN_CHECKS:
        check(setup)


def names_sent(algorithm: Algorithm, tensor_names: TensorNames, initial: State) -> Collection[str]:
    """Return the names that a client sends in the first round; empty if the adapter has no LoRA factors.

    Args:
        algorithm: The algorithm.
        tensor_names: Names of the model's tensors.
        initial: The algorithm's initial global state.
    """
    if not tensor_names.factors:
        return ()
    return example_sent(algorithm, tensor_names, initial).keys()


def _check_algorithm(setup: RunSetup) -> None:
    """Run the algorithm's own check."""
    # A deployment does not limit the number of sites, so it has enough clients for any algorithm.
    num_clients = sys.maxsize if setup.num_clients is None else setup.num_clients
    setup.settings.algorithm.check(setup.tensor_names, num_clients)


def _check_outliers(setup: RunSetup) -> None:
    """Check the option ``drop_outliers``."""
    settings = setup.settings
    check_drop_outliers(settings.drop_outliers, settings.client_privacy, settings.secure_sums)


def _check_weighting(setup: RunSetup) -> None:
    """Reject weights that would reveal secret numbers of images. Client-level privacy has a check of its own."""
    settings = setup.settings
    if settings.privacy is not None and settings.weighting == "samples":
        raise OptionError(
            "privacy: weighting='samples' reveals the clients' numbers of images without noise; choose "
            "weighting='uniform'",
            name="privacy",
        )


def _check_size_of_rounds(setup: RunSetup) -> None:
    """Check that a round has enough clients for the server rule."""
    if setup.fewest_clients is None:
        return
    settings = setup.settings
    try:
        # Each of several global models is aggregated from its share of a round's clients.
        settings.rule.check(max(1, setup.fewest_clients // settings.algorithm.modes))
    except ValueError as error:
        if not setup.fewest_clients_source:
            raise
        raise ValueError(f"{setup.fewest_clients_source}: {error}") from None


def _check_factors(setup: RunSetup) -> None:
    """Check that clients send the LoRA factors that the server rule requires."""
    settings = setup.settings
    if settings.rule.needs_factors:
        names = names_sent(settings.algorithm, setup.tensor_names, setup.initial)
        check_sent_factors(settings, setup.tensor_names, names)


def _check_rule_of_algorithm(setup: RunSetup) -> None:
    """Check that the algorithm supports the server rule."""
    check_rule(setup.settings)


def _check_average_of_ensemble(setup: RunSetup) -> None:
    """Check that the task defines the average that ensembles take."""
    check_average(setup.settings)


def _check_images_of_server(setup: RunSetup) -> None:
    """Check that the server has the images that it needs."""
    if setup.num_public is not None and setup.num_labelled is not None:
        check_server_images(setup.settings, setup.num_public, setup.num_labelled)


def _check_batch_norm_of_server(setup: RunSetup) -> None:
    """Check that distillation has enough images for statistics."""
    if setup.num_public is not None:
        check_distilled_batch_norm(setup.settings, setup.tensor_names, setup.num_public)


def _check_sums(setup: RunSetup) -> None:
    """Check that secure sums are sufficient, if the run has any."""
    if setup.settings.secure_sums is not None:
        check_secure_sums(setup.settings, setup.tensor_names, setup.initial, setup.fewest_clients)


def _check_privacy_of_clients(setup: RunSetup) -> None:
    """Check that client-level privacy protects all that clients send, if the run has it."""
    settings = setup.settings
    if settings.client_privacy is not None:
        distills = bool(settings.distillation.steps)
        check_client_level(settings.algorithm, settings.rule, settings.weighting, distills)


def _check_prediction(setup: RunSetup) -> None:
    """Check that clients can predict with both models, if they are asked to."""
    check_both_models(setup.settings, setup.prediction, setup.num_classes)


RUN_CHECKS: tuple[Callable[[RunSetup], None], ...] = (
    # All others may call the algorithm, which may fail on tensors that it does not support.
    _check_algorithm,
    _check_outliers,
    _check_weighting,
    # Those of secure sums and of client-level privacy run the server rule, which may fail on these.
    _check_size_of_rounds,
    _check_factors,
    _check_rule_of_algorithm,
    _check_average_of_ensemble,
    _check_images_of_server,
    # The former reports a public set that is missing, this one a public set that is too small.
    _check_batch_norm_of_server,
    # Client-level privacy can be combined with secure sums, and has more exceptions.
    _check_sums,
    _check_privacy_of_clients,
    _check_prediction,
)
"""All checks of options, in their order."""
