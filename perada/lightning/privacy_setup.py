# SPDX-License-Identifier: Apache-2.0
"""Privacy at set-up: reject everything that would void the guarantee, and plan the accounting."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from perada.algorithms import Algorithm
from perada.core.checks import OptionError
from perada.core.rounds import CohortBatch, sample_cohort
from perada.core.seeding import generator
from perada.core.states import State, expand, get_state
from perada.data import Phase
from perada.lightning.module import FederatedClassifier
from perada.lightning.run_context import RunContext
from perada.lightning.trainer_attributes import callbacks_of
from perada.models.weight_files import SHIPPED_SOURCES
from perada.privacy import Privacy
from perada.privacy.account import Account, QueryPlan
from perada.privacy.accounting import check_delta_covers
from perada.privacy.client_level import ClientLevel
from perada.privacy.clipping import check_precision
from perada.privacy.dry_run_checks import plan_queries
from perada.privacy.model_checks import check_gradients
from perada.privacy.protection import Protection
from perada.results.run_file import DATA_INDEPENDENT_METRICS


def check_private(context: RunContext) -> None:
    """Reject callbacks, data, weights and their options that would void the privacy of training.

    Options of rounds have passed :func:`perada.federation.setup_checks.check_run`.

    Raises:
        ValueError: With the reason and the remedy.
    """
    settings = context.settings
    data = context.data
    if settings.client_privacy is not None:
        check_delta_covers("client_privacy", settings.client_privacy.delta, data.num_clients, "clients")
    if not settings.private:
        return
    _check_options(context)
    _check_server_has_no_client_images(context)
    _check_pretraining(context)
    _check_callbacks(context)
    for key, value in get_state(context.module.model).items():
        if value.is_floating_point():
            check_precision(key, value, settings.privacy_options)
    if settings.privacy is not None:
        # The client with the most images needs the smallest δ.
        largest = max(range(data.num_clients), key=lambda client: data.train_sizes[client])
        subject = f"training images of client {largest}, the largest"
        check_delta_covers("privacy", settings.privacy.delta, data.train_sizes[largest], subject)


def _privacy_error(option_names: str, reason: str) -> OptionError:
    """Return an error that names the options that request privacy (:attr:`.Settings.privacy_options`)."""
    return OptionError(f"{option_names}: {reason}", name=option_names)


def _check_options(context: RunContext) -> None:
    """Reject options whose effect depends on clients' images in a way that no ledger accounts for."""
    settings = context.settings
    options = settings.privacy_options
    data = context.data
    clip_norm = settings.training.clip_norm
    is_sample_level = settings.privacy is not None
    if data.tokens:
        raise _privacy_error(
            options,
            "texts are not supported: networks are checked at set-up on perturbed images, and tokens cannot be "
            "perturbed; train without privacy",
        )
    if getattr(context.trainer.precision_plugin, "scaler", None) is not None:
        raise _privacy_error(
            options,
            "precision='16-mixed' is not supported: the loss scale and the skipped steps depend on clients' images, "
            "which no ledger counts; set precision='bf16-mixed'",
        )
    if settings.algorithm.compares_models:
        raise _privacy_error(
            options,
            f"{type(settings.algorithm).__name__} compares models on the clients' training images, which no ledger "
            "counts; choose assignment='permutation' and keeps='ensemble'",
        )
    if data.evaluate_on == "validation":
        raise _privacy_error(
            options,
            "evaluate_on='validation' scores models on held-out private images for choosing settings, which no ledger "
            "counts; set evaluate_on='test', and choose settings on public data",
        )
    if data.chosen_task is not None and data.chosen_task.uses_all_targets:
        raise _privacy_error(
            options,
            f"task={data.chosen_task} would compute its options from the clients' labels without noise, which no "
            "ledger counts; give them as numbers",
        )
    if is_sample_level and data.chosen_task is not None and data.chosen_task.uses_client_counts:
        raise _privacy_error(
            "privacy",
            f"task={data.chosen_task} would weight an image by the labels of the client's other images, which the "
            "clipping of each image's gradient does not bound; give the weights as numbers",
        )
    if is_sample_level and data.prepare.mixing.mixes:
        raise _privacy_error(
            "privacy",
            "mixup and cutmix mix the images of a batch, so one image would change the gradients of others, which the "
            "clipping of each image's gradient does not bound; leave them out",
        )
    if is_sample_level and data.sampling != "uniform":
        raise _privacy_error(
            "privacy",
            f"sampling={data.sampling!r} draws an image by the classes of the client's other images, so the ledger, "
            "which counts on draws that are independent of them, would not hold; leave it out",
        )
    if is_sample_level and clip_norm is not None:
        raise _privacy_error(
            "privacy",
            f"clip_norm={clip_norm} (of training) would clip again after the noise; leave clip_norm out: "
            "privacy.max_norm clips every image's gradient",
        )


def _check_callbacks(context: RunContext) -> None:
    """Reject callbacks that stop training or choose a checkpoint by metrics that depend on clients' images."""
    for callback in callbacks_of(context.trainer):
        monitor = getattr(callback, "monitor", None)
        if isinstance(monitor, str) and monitor not in DATA_INDEPENDENT_METRICS:
            raise _privacy_error(
                context.settings.privacy_options,
                f"{type(callback).__name__} selects by {monitor!r}, which may depend on clients' private images in a "
                "way that no ledger counts; train for a fixed number of rounds and keep the last checkpoint",
            )


def _check_server_has_no_client_images(context: RunContext) -> None:
    """Raise an OptionError if the server holds clients' images, whatever it does with them.

    Distillation, server rules that look at predictions, and diagnostics all read the server's images, and a user's own
    rule may do so too. So what the server has is checked, and not who reads it.
    """
    division = context.data.division
    for option in ("public_fraction", "validation_fraction"):
        share = 0.0 if division is None else getattr(division, option)
        if share:
            labels = " with their labels" if option == "validation_fraction" else ""
            raise OptionError(
                f"{option}={share} cannot be used in a private run: it would hand a share of the clients' own images "
                f"to the server{labels} without clipping, noise or a ledger; set it to 0 and provide public images "
                "from a different source (data.public), or turn distillation off (distillation.steps=0)",
                name=option,
                value=share,
            )
    context.data.checked.check_overlap(context.settings.privacy_options)


def _check_pretraining(context: RunContext) -> None:
    """Raise an OptionError if the module's weights were pretrained on the clients' images."""
    data = context.data
    datasets: Sequence[Dataset[Any]] = []
    if data.division is not None:
        datasets = [data.division.dataset]
    elif data.data is not None:
        datasets = data.data.train
    check_pretraining(context.module.pretrained, datasets, context.settings.privacy_options)


def check_pretraining(pretrained: bool | str, datasets: Iterable[Dataset[Any]], option_names: str) -> None:
    """Raise an OptionError if weights that perada ships were trained on the images of one of these datasets.

    The frozen backbone would contain what the ledgers promise to hide. What other weights were trained on is not known
    here.

    Args:
        pretrained: The option.
        datasets: The clients' images.
        option_names: The options that request privacy, for the message.
    """
    trained_on = SHIPPED_SOURCES.get(str(pretrained))
    if trained_on is None:
        return
    for dataset in datasets:
        if any(type(source).__name__ == trained_on for source in _wrapped_datasets(dataset)):
            raise OptionError(
                f"{option_names}: pretrained={pretrained!r} was trained on the images of {trained_on}, which the "
                "clients of this run hold, and no ledger counts that; use weights that were trained on other images",
                name="pretrained",
                value=pretrained,
            )


def _wrapped_datasets(dataset: Dataset[Any]) -> Iterator[object]:
    """Yield a dataset and those that it wraps, such as that of a Subset and the parts of a ConcatDataset."""
    pending: list[object] = [dataset]
    seen = set[int]()
    while pending:
        source = pending.pop()
        if source is None or id(source) in seen:
            continue
        seen.add(id(source))
        yield source
        pending.append(getattr(source, "dataset", None))
        datasets = getattr(source, "datasets", None)
        if isinstance(datasets, list | tuple):
            pending += datasets


def check_trained_norms(module: FederatedClassifier) -> None:
    """Raise an OptionError if BatchNorm layers are trained privately."""
    trained = [key.removesuffix(".running_var") for key in module.tensor_names.keys if key.endswith("running_var")]
    if not trained:
        return
    remedy = (
        "choose lora, bottleneck or head, a residual adapter with norm='group' and train_norms=False "
        "(adapter_options), or a backbone with LayerNorm or GroupNorm"
    )
    decoder = module.adapted.backbone.decoder if module.adapted is not None else None
    if decoder is not None and any(name.startswith(f"{decoder}.") for name in trained):
        # It is trained as part of the head, whatever the adapter.
        remedy = (
            "choose 'smp:fpn-ENCODER', whose decoder has GroupNorm, with the adapter lora, or pass a network such as "
            "segmentation_models_pytorch.Unet(..., decoder_use_norm=False)"
        )
    raise _privacy_error(
        "privacy",
        f"{trained[0]!r} and {len(trained) - 1} more are trained BatchNorm layers: an image's gradient then depends on "
        f"the other images of its batch; {remedy}",
    )


def check_private_gradients(
    privacy: Privacy,
    module: FederatedClassifier,
    batch: CohortBatch,
    features: bool = False,
) -> None:
    """Raise a ValueError if private gradients cannot be computed for the model.

    They are tried for two clients with two images each, all made of the first image of the batch.

    Args:
        privacy: The options.
        module: The module, whose network is built.
        batch: The first local step of some clients.
        features: Whether features of the images are trained on.
    """
    image = batch.x[0, 0].to(next(module.model.parameters()).device)
    images = torch.stack([image, 1 - image.flip(-1), 2 * image, image.flip(-1)])
    if features:
        images = module.engine.features(images)
    label = batch.y[0, 0].to(image.device)
    x = images.view(2, 2, *images.shape[1:])
    y = label.expand(2, 2, *label.shape)
    check_gradients(privacy, module.engine, states_near_initial(module, 2), x, y, module.task)


def states_near_initial(module: FederatedClassifier, num_clients: int) -> State:
    """Return states (C, ...) near the initial one in which every trained parameter has an effect.

    Most adapters start as zero, so that some of their gradients are zero too.
    """
    source = generator(0, "probe")
    states = {key: value.clone() for key, value in expand(get_state(module.model), num_clients).items()}
    for key in module.tensor_names.parameters:
        value = states[key]
        # The noise is drawn on the CPU, so that it is the same on every device.
        noise = torch.randn(value.shape, generator=source, dtype=value.dtype)
        states[key] = (value + 0.02 * noise.to(value.device)).requires_grad_()
    return states


def plan_privacy(context: RunContext, rounds: int | None) -> Protection:
    """Plan the image-level and the client-level privacy of a run, as far as it has them.

    Args:
        context: The run.
        rounds: Number of rounds; None if it is not fixed.

    Raises:
        ValueError: If the privacy cannot be provided, for example if a target requires a number of rounds.
    """
    settings = context.settings
    num_clients = context.data.num_clients

    def planned_rounds(start: int) -> list[int]:
        """Return the number of rounds from ``start`` on that each client is drawn for."""
        counts = Counter[int]()
        for round in range(start, rounds or 0):
            counts.update(sample_cohort(settings.seed, round, num_clients, settings.clients_per_round))
        return [counts[client] for client in range(num_clients)]

    images = None
    if settings.privacy is not None:
        initial = settings.algorithm.initial(context.module.initial_state)
        tuning = settings.algorithm.personalization()

        def queries_of(algorithm: Algorithm, phases: tuple[Phase, ...]) -> QueryPlan:
            """Return the gradients that a client requests in the phases of a round, or of the fine-tuning."""
            return plan_queries(algorithm, context.module.tensor_names, initial, phases, num_clients, rounds)

        images = Account(
            settings.privacy,
            context.data.train_sizes,
            context.data.batch_size,
            round_queries=queries_of(settings.algorithm, settings.phases),
            tuning_queries=None if tuning is None else queries_of(tuning[0], (tuning[1],)),
            planned=None if rounds is None else planned_rounds,
        )
    clients = None
    if settings.client_privacy is not None:
        largest_count = 0
        if settings.client_privacy.target_epsilon is not None:
            largest_count = max(planned_rounds(0))
        clients = ClientLevel(
            settings.client_privacy,
            settings.seed,
            num_clients=settings.clients_per_round or num_clients,
            rounds=largest_count,
            planned=planned_rounds,
            secure_sums=settings.secure_sums,
        )
    return Protection(images, clients)
