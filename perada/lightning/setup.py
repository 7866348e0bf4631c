# SPDX-License-Identifier: Apache-2.0
"""Set-up before the first round: checks of data and images, the privacy of the run, and the batches of rounds.

The order of all checks is that of :mod:`perada.federation.setup_checks`.
"""

import math
from itertools import product

import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_info
from torch import Tensor

from perada.algorithms.client_steps import no_counts
from perada.algorithms.dry_run import example_opened
from perada.core.rounds import CohortBatch, sample_cohort
from perada.core.states import images_dtype
from perada.data import FederatedDataModule
from perada.data.batches.features import FeatureStore
from perada.engine.chunk_sizes import Chunks, activation_bytes, chunks_in_memory, clients_in_cache, is_mostly_trained
from perada.engine.frozen_trunk import FrozenTrunk
from perada.engine.loss_scaling import product_seconds
from perada.federation.evaluation import EVERYWHERE_LIMIT, count_everywhere, sample_clients
from perada.federation.settings import Settings
from perada.federation.setup_checks import RunSetup
from perada.federation.workers import trains_side_by_side
from perada.lightning.checks import (
    check_adapter,
    check_batch_norm,
    check_checkpointing,
    check_first_images,
    check_folding,
    dry_run_foreign_classes,
    set_up_feature_cache,
)
from perada.lightning.memory import choose_checkpointing
from perada.lightning.module import FederatedClassifier
from perada.lightning.privacy_setup import (
    check_private,
    check_private_gradients,
    check_trained_norms,
    plan_privacy,
    states_near_initial,
)
from perada.lightning.run_context import RunContext
from perada.lightning.typical_images import announce_unused_prediction
from perada.privacy.model_checks import check_clients_apart, check_one_image, check_products
from perada.privacy.protection import Protection


def set_up_rounds(context: RunContext, stage: str, protection: Protection | None) -> Protection:
    """Check that model, data and algorithm are compatible, and configure the data for rounds.

    The options must have passed :func:`perada.federation.setup_checks.check_run`.

    Args:
        context: The run.
        stage: Lightning's stage: ``fit``, ``validate``, ``test`` or ``predict``.
        protection: The privacy that an earlier set-up planned, if there was one.

    Returns:
        The privacy of the run.

    Raises:
        ValueError: If something does not fit, or the requested privacy cannot be kept.
    """
    settings = context.settings
    data = context.data
    trains = stage == "fit"
    dry_run_foreign_classes(context)
    if trains:
        # An evaluation before the fit may have planned another number of rounds.
        protection = None
    plans_privacy = protection is None
    if protection is None:
        check_private(context)
        with context.precision():
            protection = plan_privacy(context, _number_of_rounds(context))
    # A former set-up may have cached features. The first batch must have images.
    data.use_features(None)
    configure_rounds(context, protection)
    batch = _first_batch(context)
    if settings.algorithm.needs_class_counts and batch.class_counts is None and trains:
        raise no_counts(settings.algorithm)
    check_first_batch(context, batch, trains)
    if trains:
        _choose_checkpointing(context, batch.x)
    trunk = set_up_feature_cache(context, batch.x[0, 0])
    # After these checks the engine may have fallen back to the loop, or run features in place of images.
    chunks = _choose_chunks(context, batch.x[0, 0])
    data.clients_per_chunk = chunks.clients_per_chunk
    data.chunks_at_a_time = chunks.at_a_time
    # Gradients of images were checked with the first batch where the run trains on images.
    needs_gradient_check = trunk is not None or not trains
    if plans_privacy and settings.privacy is not None and needs_gradient_check:
        with context.precision():
            check_private_gradients(settings.privacy, context.module, batch, features=trunk is not None)
    if trunk is not None and trains:
        _announce_cached_features(context, trunk)
    announce_unused_prediction(context)
    if trains:
        _announce_teachers_logits(context, batch.x)
    _choose_models_to_score(context)
    if stage != "predict":
        _announce_sampled_models(context)
    if trains:
        _prepare_trainer(context)
    return protection


def setup_of_run(data: FederatedDataModule, module: FederatedClassifier, settings: Settings) -> RunSetup:
    """Return what is known of a simulated run before any image is read.

    Args:
        data: The data module, set up.
        module: The module, whose network is built.
        settings: Options of the rounds.
    """
    return RunSetup(
        settings=settings,
        prediction=module.evaluation.prediction,
        tensor_names=module.tensor_names,
        initial_state=module.initial_state,
        num_classes=data.num_classes,
        num_clients=data.num_clients,
        fewest_clients=min(data.num_clients, settings.clients_per_round or data.num_clients),
        num_public=data.public_size,
        num_labelled=data.validation_size,
    )


def _number_of_rounds(context: RunContext) -> int | None:
    """Return the trainer's number of rounds; None if it is open."""
    rounds = context.trainer.max_epochs
    if rounds is None or rounds < 0:
        return None
    return rounds


def configure_rounds(context: RunContext, protection: Protection) -> None:
    """Configure how the data draws clients and batches, which differs if training is private."""
    images = protection.image_account
    context.data.configure_rounds(
        seed=context.settings.seed,
        clients_per_round=context.settings.clients_per_round,
        phases=context.settings.phases,
        image_config=context.adapted.backbone.image_config,
        private=None if images is None else images.sampling(),
        eligible=protection.affordable if protection.limited else None,
        # Images of NumPy are often in double precision, and networks rarely are.
        dtype=images_dtype(context.module.model),
    )


def _choose_chunks(context: RunContext, first_image: Tensor | None) -> Chunks:
    """Choose how many clients train together, and how many such chunks train side by side.

    Args:
        context: The run.
        first_image: A prepared image of the run (channels, height, width). Not needed if training is private.
    """
    settings = context.settings
    engine = context.module.engine
    on_cpu = context.trainer.strategy.root_device.type == "cpu"
    # Chunks that may train at a time: one for each thread, or a single one that uses all of them.
    threads = 1
    if on_cpu and trains_side_by_side(engine, settings):
        threads = torch.get_num_threads()
    if not engine.runs_together:
        return Chunks(1)
    mostly_trained = is_mostly_trained(context.module.model)
    if settings.clients_per_chunk is not None:
        # Behind a frozen backbone, the option bounds the memory of a pass. Several at a time would take more.
        return Chunks(settings.clients_per_chunk, threads if mostly_trained else 1)
    if not on_cpu:
        return Chunks(None)
    clients_per_round = settings.clients_per_round or context.data.num_clients
    if mostly_trained:
        # At least one chunk for each thread, also where the threads divide the passes of one chunk after another.
        share_of_thread = math.ceil(clients_per_round / torch.get_num_threads())
        return Chunks(min(_clients_in_cache(context), share_of_thread), threads)
    if settings.private:
        # Private training limits the images in a pass by what their gradients take.
        return Chunks(None)
    assert first_image is not None
    image_bytes = activation_bytes(context.module.model, first_image, engine.recomputed)
    if image_bytes is None:
        return Chunks(None)
    client_bytes = image_bytes * _images_in_step(context) * _models_in_step(context)
    return chunks_in_memory(client_bytes, clients_per_round, threads)


def _choose_checkpointing(context: RunContext, images: Tensor) -> None:
    """Choose gradient checkpointing with ``checkpointing="auto"``, and check it if it is used.

    Args:
        context: The run.
        images: Prepared training images of some clients (C, B, ...).
    """
    if context.module.training_options.checkpointing != "auto":
        return
    image = images[0, 0]
    chunks = _choose_chunks(context, image)
    if choose_checkpointing(context, image, _images_in_step(context), _models_in_step(context), chunks):
        check_checkpointing(context, images)


def _images_in_step(context: RunContext) -> int:
    """Return the number of images of a client in a step, at most."""
    batch_size = context.data.batch_size
    if isinstance(batch_size, str):
        # "full": all images of a client.
        return max(context.data.train_sizes)
    return batch_size


def _models_in_step(context: RunContext) -> int:
    """Return how many models a client trains in the same step, at most."""
    algorithm = context.settings.algorithm
    tensor_names = context.module.tensor_names
    opened = example_opened(algorithm, tensor_names, algorithm.initial(context.module.initial_state))
    most = 1
    # Some algorithms train other parameters in odd rounds than in even ones.
    for round, phase in product((0, 1), context.settings.phases):
        trained = [role for role in opened if algorithm.trainable_keys(role, phase.name, tensor_names, round)]
        most = max(most, len(trained))
    return most


def _clients_in_cache(context: RunContext) -> int:
    """Return how many clients fit the processor's caches, by what one client of the run trains at a time."""
    settings = context.settings
    algorithm = settings.algorithm
    tensor_names = context.module.tensor_names
    opened = example_opened(algorithm, tensor_names, algorithm.initial(context.module.initial_state))
    state_bytes = 0
    for state in opened.values():
        # Weights that only the server merges into are one tensor for all clients.
        state_bytes += sum(value.nbytes for key, value in state.items() if key not in tensor_names.merged)
    trained_bytes = 0
    # Some algorithms train other parameters in odd rounds than in even ones.
    for round, phase in product((0, 1), settings.phases):
        bytes_of_phase = 0
        for role, state in opened.items():
            keys = set(algorithm.trainable_keys(role, phase.name, tensor_names, round))
            bytes_of_phase += sum(value.nbytes for key, value in state.items() if key in keys)
        trained_bytes = max(trained_bytes, bytes_of_phase)
    return clients_in_cache(state_bytes, trained_bytes)


def _first_batch(context: RunContext) -> CohortBatch:
    """Return the first batch of client 0 or, where training is private, of all clients of a forward pass."""
    settings = context.settings
    if not settings.private:
        return context.data.first_batch([0])
    # Whether clients are kept apart is checked with as many as are folded in a round.
    cohort = sample_cohort(settings.seed, 0, context.data.num_clients, settings.clients_per_round)
    return context.data.first_batch(cohort[: _choose_chunks(context, None).clients_per_chunk])


def check_first_batch(context: RunContext, batch: CohortBatch, trains: bool) -> None:
    """Run a round's first images through the model and, for private training, check each image's influence.

    Args:
        context: The run.
        batch: The first local step of some clients.
        trains: Whether the run trains, and does not only evaluate.

    Raises:
        ValueError: If an image does not pass, or private training would not be private.
    """
    check_first_images(context, batch.x)
    if not context.settings.private:
        check_folding(context, batch.x)
    elif trains:
        # In place of falling back to the loop, a network that mixes images is rejected.
        with context.precision():
            _check_images_apart(context, batch)
    check_batch_norm(context)
    check_adapter(context, batch.x)
    check_checkpointing(context, batch.x)


def _check_images_apart(context: RunContext, batch: CohortBatch) -> None:
    """Raise a ValueError if one image influences the gradients of others, or one client those of others."""
    privacy = context.settings.privacy
    module = context.module
    if privacy is not None:
        check_trained_norms(module)
        check_private_gradients(privacy, module, batch)
    # On the device that it will train on: at set-up the model may be elsewhere.
    check_products(context.trainer.strategy.root_device, context.settings.privacy_options)
    x = context.on_model_device(batch.x)
    y = context.on_model_device(batch.y)
    states = states_near_initial(module, len(batch.clients))
    if privacy is not None:
        check_one_image(privacy, module.engine, states, x, y, batch.counts, module.task)
    elif module.engine.kind == "folded" and len(batch.clients) > 1:
        check_clients_apart(module.engine, states, x)


def _choose_models_to_score(context: RunContext) -> None:
    """Choose the clients whose models are scored on everyone's images."""
    data = context.data
    module = context.module
    count = count_everywhere(data.num_clients, _num_test_images(context), module.evaluation.global_test_clients)
    module.everywhere = sample_clients(data.num_clients, count, module.seed)


def _num_test_images(context: RunContext) -> int:
    """Return the number of all clients' test images, in the largest of the test set and the shifted ones."""
    sizes = [context.data.test_size]
    for condition in context.data.conditions:
        sizes.append(sum(condition.store.sizes))
    return max(sizes)


def _announce_sampled_models(context: RunContext) -> None:
    """Log that not all personal models are scored on everyone's images, if the user did not set how many."""
    clients = context.data.num_clients
    count = len(context.module.everywhere)
    if context.module.evaluation.global_test_clients is not None or count == clients:
        return
    # Federation.personalized would not do: it holds only after the fine-tuning, whose models are scored as well.
    if not context.settings.has_personal_models:
        return
    images = _num_test_images(context)
    rank_zero_info(
        f"evaluation: {clients:,} personal models on all {images:,} test images would take {clients * images:,} "
        f"forward passes each time, more than {EVERYWHERE_LIMIT:,}, so those of {count:,} clients, drawn from the "
        "seed, are scored on all images, and each client's on its own; score all of them with "
        f"global_test_clients={clients} (--evaluation.global_test_clients={clients})"
    )


def _announce_cached_features(context: RunContext, trunk: FrozenTrunk) -> None:
    """Log that features of the frozen trunk are cached, if they fit into the cache."""
    if isinstance(context.data.samples_of(context.data.checked.train), FeatureStore):
        rank_zero_info(
            f"caching features: the frozen layers before all trained ones ({trunk.share:.0%} of a forward pass) are "
            "computed once per image; training.cache_features=false turns this off"
        )


def _announce_teachers_logits(context: RunContext, images: Tensor) -> None:
    """Log how much memory the teachers' logits of pixels take, if there are any.

    Args:
        context: The run.
        images: Prepared training images (C, B, channels, height, width), which public images are as large as.
    """
    settings = context.settings
    task = settings.training.task
    distillation = settings.distillation
    if not (task.per_pixel and settings.algorithm.uses_distillation and distillation.steps):
        return
    num_images = context.data.public_size
    if not isinstance(distillation.batch_size, str):
        num_images = min(num_images, distillation.steps * distillation.batch_size)
    height, width = images.shape[-2:]
    example = torch.empty(height, width, context.data.num_classes, device="meta")
    numbers = task.distilled(example).numel()
    # Sums over the teachers are in double precision.
    megabytes = num_images * numbers * 8 / 1e6
    rank_zero_info(
        f"distillation: the teachers' logits of {num_images:,} public images take {megabytes:,.1f} MB on the server, "
        f"{numbers:,} numbers for each; a larger distill_stride of the task lowers them"
    )
    if settings.secure_sums is not None:
        # Sites mask 64-bit integers.
        rank_zero_info(f"secure_sums: in a deployment, each site sends {megabytes:,.1f} MB of these logits per round")


def _prepare_trainer(context: RunContext) -> None:
    """Configure the trainer for rounds, and warn of a precision that is not faster."""
    trainer = context.trainer
    if trainer.precision == "bf16-mixed" and trainer.strategy.root_device.type == "cpu":
        announce_slow_bfloat16(product_seconds(torch.float32), product_seconds(torch.bfloat16))
    if not context.data.val_dataloader():
        trainer.limit_val_batches = 0  # or Lightning would warn that there is nothing to validate on
    # Every round has its own clients and number of steps.
    trainer.reload_dataloaders_every_n_epochs = 1  # type: ignore[attr-defined]  # Lightning sets it without declaring it


def announce_slow_bfloat16(single_seconds: float, half_seconds: float) -> None:
    """Log that bfloat16 is not faster than single precision, with the time of a matrix product in each."""
    if half_seconds > single_seconds:
        rank_zero_info(
            f"precision='bf16-mixed' is not faster on this processor: a matrix product takes {1e3 * half_seconds:.1f} "
            f"ms in bfloat16 and {1e3 * single_seconds:.1f} ms in single precision; precision='32-true' is also more "
            "exact"
        )
