# SPDX-License-Identifier: Apache-2.0
"""Makes a task's data: images, initial weights, and the clients and batches of each round, which are perada's."""

import torch
from torch import Tensor

from benchmarks.peers.networks import build_network
from benchmarks.peers.run_perada import SEED, adapter_options, image_size, plain_state
from benchmarks.peers.tasks import NUM_CLASSES, State, Task, TaskData
from perada.core.rounds import batch_indices, sample_cohort
from perada.lightning.module import FederatedClassifier
from perada.tasks import Classification

TEST_IMAGES = 200
NOISE = 2.0
"""Standard deviation of the noise on an image of its class, whose own is 1."""


def prepare(task: Task, rounds: int) -> TaskData:
    """Return the data of a task that is trained for ``rounds`` rounds, the same in every process."""
    random = torch.Generator().manual_seed(0)
    image_shape = (task.channels, task.side, task.side)
    prototypes = torch.randn(NUM_CLASSES, *image_shape, generator=random)

    def draw(num_images: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(0, NUM_CLASSES, (num_images,), generator=random)
        images = torch.randn(num_images, *image_shape, generator=random)
        return images.mul_(NOISE).add_(prototypes[labels]), labels

    images, labels = draw(task.clients * task.images)
    test_images, test_labels = draw(TEST_IMAGES if task.side < 100 else TEST_IMAGES // 4)
    cohorts = []
    batches = []
    for round_number in range(rounds):
        cohort = sample_cohort(SEED, round_number, task.clients, task.clients_per_round)
        client_batches = []
        for client in cohort:
            indices = batch_indices(task.images, task.batch_size, task.steps, SEED, "batches", round_number, client)
            client_batches.append(indices)
        cohorts.append(cohort)
        batches.append(torch.stack(client_batches))
    return TaskData(
        task=task,
        images=images.view(task.clients, task.images, *image_shape),
        labels=labels.view(task.clients, task.images),
        test_images=test_images,
        test_labels=test_labels,
        initial_state=_initial_state(task),
        cohorts=cohorts,
        batches=batches,
    )


def _initial_state(task: Task) -> State:
    """Return the network's weights before the first round."""
    if task.network == "fedavg_cnn":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            return build_network(task).state_dict()
    module = FederatedClassifier(task.network, task.adapter, adapter_options(task), False, image_size=image_size(task))
    module.build(NUM_CLASSES, Classification(), SEED)
    return plain_state(task, module.model.state_dict())
