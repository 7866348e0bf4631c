# SPDX-License-Identifier: Apache-2.0
"""The memory of a run's local steps: its estimate, and the automatic choice of gradient checkpointing."""

import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_info
from torch import Tensor

from perada.algorithms.dry_run import example_opened
from perada.core.checks import OptionError
from perada.engine.chunk_sizes import Chunks
from perada.engine.memory_estimate import MemoryEstimate, count_activations, network_bytes, optimizer_numbers
from perada.federation.settings import host_memory
from perada.lightning.run_context import RunContext

USABLE = 0.8
"""Share of the memory that local steps may take by the estimate, without checkpointing."""


def choose_checkpointing(context: RunContext, image: Tensor, images_in_step: int, models: int, chunks: Chunks) -> bool:
    """Turn on gradient checkpointing with ``checkpointing="auto"`` if the local steps would not fit the memory.

    The estimate is logged.

    Args:
        context: The run.
        image: A prepared image (channels, height, width).
        images_in_step: Number of images of a client in a step.
        models: Number of models that a client trains in the same step.
        chunks: How clients train together without checkpointing.

    Returns:
        Whether it was turned on.
    """
    settings = context.settings
    module = context.module
    if module.training_options.checkpointing != "auto" or module.engine.is_recomputing:
        return False
    if settings.private or module.engine.is_compiled:
        rank_zero_info("checkpointing=auto: off, since private gradients and compiled passes do not support it")
        return False
    clients = chunks.clients_per_chunk or settings.clients_per_round or context.data.num_clients
    clients *= chunks.at_a_time
    estimate = estimate_memory(context, image, images_in_step * models, clients)
    if estimate is None:
        rank_zero_info("checkpointing=auto: off, since the network's activations cannot be counted")
        return False
    rank_zero_info(estimate.describe(clients))
    available = usable_bytes(context.trainer.strategy.root_device)
    if estimate.total <= available:
        return False
    try:
        module.use_checkpointing()
    except OptionError as error:
        rank_zero_info(f"checkpointing=auto: off, although only {available / 1e6:,.0f} MB can be used: {error}")
        return False
    rank_zero_info(f"checkpointing=auto: on, since only {available / 1e6:,.0f} MB can be used")
    return True


def estimate_memory(context: RunContext, image: Tensor, images_in_step: int, num_clients: int) -> MemoryEstimate | None:
    """Estimate what the local steps of clients that train at a time take.

    Args:
        context: The run.
        image: A prepared image (channels, height, width).
        images_in_step: Number of images of a client in a step, those of each model counted.
        num_clients: Number of clients that train at a time.

    Returns:
        The estimate; None if the activations cannot be counted.
    """
    settings = context.settings
    engine = context.module.engine
    with context.precision():
        activations = count_activations(engine, context.on_model_device(image), images_in_step)
    if activations is None:
        return None
    options = context.module.training_options
    # A gradient for each weight, besides itself and what the optimiser stores.
    copies = 1 + optimizer_numbers(options.optimizer, options.momentum)
    tensor_names = context.module.tensor_names
    opened = example_opened(settings.algorithm, tensor_names, settings.algorithm.initial(context.module.initial_state))
    state_bytes = 0
    for state in opened.values():
        for key, value in state.items():
            if key not in tensor_names.merged:
                state_bytes += value.nbytes * (1 + copies if key in tensor_names.parameters else 1)
    clients_in_pass = num_clients if engine.runs_together else 1
    return MemoryEstimate(
        weight_bytes=network_bytes(engine),
        state_bytes=num_clients * state_bytes,
        activation_bytes=activations.of(clients_in_pass * images_in_step),
        public_logit_bytes=public_logit_bytes(context, image),
    )


def public_logit_bytes(context: RunContext, image: Tensor) -> int:
    """Return the bytes of the teachers' logits of public images at the server; 0 if there are none.

    Args:
        context: The run.
        image: A prepared image (channels, height, width), which public ones are as large as.
    """
    settings = context.settings
    distillation = settings.distillation
    if not (settings.algorithm.uses_distillation and distillation.steps and context.data.public_size):
        return 0
    num_images = context.data.public_size
    if not isinstance(distillation.batch_size, str):
        num_images = min(num_images, distillation.steps * distillation.batch_size)
    task = settings.training.task
    axes = (*image.shape[1:], context.data.num_classes) if task.per_pixel else (context.data.num_classes,)
    numbers = task.distilled(torch.empty(axes, device="meta")).numel()
    # Sums over the teachers are in double precision.
    return num_images * numbers * 8


def usable_bytes(device: torch.device) -> int:
    """Return the memory in bytes that local steps may take on a device."""
    if device.type == "cuda":
        return int(USABLE * torch.cuda.mem_get_info(device)[0])
    return int(USABLE * host_memory())
