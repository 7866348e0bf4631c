# SPDX-License-Identifier: Apache-2.0
"""FedAvg (McMahan et al., AISTATS 2017), algorithms that add one thing to it, and training alone."""

from typing import Literal

import torch

from perada.algorithms.base import Algorithm, ClientStep, ServerStep, Stacks, TensorNames
from perada.core.checks import check_choice, check_number
from perada.core.rounds import Phase
from perada.core.states import State, partition


class FedAvg(Algorithm):
    """Clients train the received global state; the server averages the results. Clients keep nothing."""


class Standalone(Algorithm):
    """Clients train and keep their personal state. They send nothing, and the global state stays as it began."""

    inference = "personal"
    roles = ("personal",)
    sends_updates = False
    global_model = False
    unsent = frozenset({"personal"})

    def client_step(self, step: ClientStep) -> None:
        """A step on the client's own loss."""
        step.descend("personal", step.loss("personal"))


class FedAvgFT(Algorithm):
    """FedAvg+FT: after the last round of FedAvg, every client fine-tunes the global state and keeps the result.

    Args:
        finetune_epochs: Epochs of that fine-tuning, above 0.
    """

    def __init__(self, finetune_epochs: float = 1) -> None:
        check_number("finetune_epochs", finetune_epochs, gt=0, hint="FedAvg does not fine-tune")
        self.finetune_epochs = finetune_epochs

    def personalization(self) -> tuple[Algorithm, Phase]:
        """Standalone training that starts from the global state."""
        return Standalone(), Phase("personalize", self.finetune_epochs)


class HeadAlone(Standalone):
    """Standalone training of the head; the rest stays, but for running statistics, which follow the passes."""

    def trainable_keys(self, role: str, phase: str, tensor_names: TensorNames, round: int) -> tuple[str, ...]:
        """The head."""
        return tuple(key for key in tensor_names.parameters if key in tensor_names.head)


class FedBABU(FedAvgFT):
    """FedAvg of the body under a head that stays as it began, and which every client fine-tunes after the last round.

    Oh et al. (ICLR 2022). The global model is the averaged body with the initial head. That head is the
    same for all and is never sent back.

    Args:
        finetune_epochs: Epochs of the fine-tuning, above 0.
        tunes: What is fine-tuned: the ``head``, or ``all``.
    """

    def __init__(self, finetune_epochs: float = 1, tunes: Literal["head", "all"] = "head") -> None:
        super().__init__(finetune_epochs)
        check_choice("tunes", tunes, ("head", "all"))
        self.tunes = tunes

    def check(self, tensor_names: TensorNames, num_clients: int) -> None:
        """Refuse a model of which no head, or nothing but the head, is trained."""
        if not tensor_names.head or tensor_names.head == set(tensor_names.parameters):
            lacking = "nothing but the head is" if tensor_names.head else "no head is"
            raise ValueError(
                f"algorithm FedBABU trains the body in its rounds and the head after them, and {lacking} trained; "
                "choose an adapter that trains both, such as adapter='full', or another algorithm"
            )

    def trainable_keys(self, role: str, phase: str, tensor_names: TensorNames, round: int) -> tuple[str, ...]:
        """All but the head."""
        return tuple(key for key in tensor_names.parameters if key not in tensor_names.head)

    def end_round(
        self, trained: Stacks, client_state: Stacks, received: State, tensor_names: TensorNames
    ) -> tuple[Stacks, State]:
        """Send all but the head."""
        return {}, partition(trained["local"], tensor_names.head)[1]

    def personalization(self) -> tuple[Algorithm, Phase]:
        """Training alone, of the head or of all, that starts from the global state."""
        return HeadAlone() if self.tunes == "head" else Standalone(), Phase("personalize", self.finetune_epochs)


class FedProx(Algorithm):
    """FedAvg whose clients minimise loss + μ/2 ||w_m − w||², with w as received (Li et al., MLSys 2020, Equation 2).

    Args:
        prox_strength: μ. With 0 this is FedAvg.
    """

    def __init__(self, prox_strength: float = 0.1) -> None:
        check_number("prox_strength", prox_strength, ge=0, hint="0 does not pull")
        self.prox_strength = prox_strength

    def client_step(self, step: ClientStep) -> None:
        """A step on the loss and the pull towards the received state."""
        step.descend("local", step.loss("local"), pull=(self.prox_strength, step.received))


class FedDF(Algorithm):
    """FedAvg, then the ensemble of the clients' models is distilled into the average on public images.

    Lin et al. (NeurIPS 2020), Algorithm 1: the student starts as the average, and its teacher is the mean of the
    clients' logits. Without distillation steps this is FedAvg.
    """

    uses_distillation = True


class FedDyn(Algorithm):
    """FedAvg with a dynamic regulariser that makes the clients' optima agree with the server's (their Algorithm 1).

    A client minimises loss − <h_m, w_m> + α/2 ||w_m − w||², then takes h_m ← h_m − α (w_m − w). The server takes
    h ← h − α/M Σ (w_m − w) over the round's clients, then w ← mean(w_m) − h/α. Running statistics of norms are
    averaged.

    Args:
        alpha: α, above 0.
    """

    def __init__(self, alpha: float = 0.1) -> None:
        check_number("alpha", alpha, gt=0, hint="the server divides by it")
        self.alpha = alpha

    def initial_client_state(self, initial: State, tensor_names: TensorNames) -> Stacks:
        """h_m, zero at first."""
        return {"gradient": {key: torch.zeros_like(initial[key]) for key in tensor_names.parameters}}

    def client_step(self, step: ClientStep) -> None:
        """A step on the regularised loss."""
        slope = {key: -value for key, value in step.client_state["gradient"].items()}
        step.descend("local", step.loss("local"), pull=(self.alpha, step.received), slope=slope)

    def end_round(
        self, trained: Stacks, client_state: Stacks, received: State, tensor_names: TensorNames
    ) -> tuple[Stacks, State]:
        """Update h_m, send w_m."""
        local = trained["local"]
        gradient = {key: h - self.alpha * (local[key] - received[key]) for key, h in client_state["gradient"].items()}
        return {"gradient": gradient}, local

    def server_step(self, server: ServerStep) -> State:
        """Update h, and correct the mean by it."""
        average = server.mean(server.updates, server.weights)
        before = server.state.get("gradient", {})
        gradient = {}
        for name in server.tensor_names.parameters:
            change = (server.updates.gathered(name) - server.previous[name]).sum(0)
            h = before.get(name, torch.zeros_like(change))
            gradient[name] = h - self.alpha / server.num_clients * change
        server.state["gradient"] = gradient
        return average | {name: average[name] - h / self.alpha for name, h in gradient.items()}
