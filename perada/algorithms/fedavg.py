# SPDX-License-Identifier: Apache-2.0
"""FedAvg (McMahan et al., AISTATS 2017), algorithms that make one change to it, and standalone training."""

from typing import Literal

import torch

from perada.algorithms.base import Algorithm, ClientStep, ServerStep, Stacks, TensorNames
from perada.core.checks import check_choice, check_number
from perada.core.rounds import Phase
from perada.core.states import State, without


class FedAvg(Algorithm):
    """Clients train the received global state; the server averages the results. Clients keep nothing.

    Source: [McMahan et al., AISTATS 2017](https://arxiv.org/abs/1602.05629).
    """


class Standalone(Algorithm):
    """Standalone training: clients train and keep a personal state, send nothing, and the global state is unchanged."""

    inference = "personal"
    roles = ("personal",)
    sends_updates = False
    global_model = False
    unsent = frozenset({"personal"})

    def client_step(self, step: ClientStep) -> None:
        """Take a step on the client's loss."""
        step.descend("personal", step.loss("personal"))


class FedAvgFT(Algorithm):
    """FedAvg+FT: after the last round of FedAvg, every client fine-tunes the global state and keeps the result.

    The fine-tuning has the full ``lr_personal``, whatever the schedule of the rounds. Source: [McMahan et al.,
    AISTATS 2017](https://arxiv.org/abs/1602.05629).

    Args:
        finetune_epochs: Number of epochs of the fine-tuning, > 0.
    """

    def __init__(self, finetune_epochs: float = 1) -> None:
        check_number("finetune_epochs", finetune_epochs, gt=0, hint="FedAvg does not fine-tune")
        self.finetune_epochs = finetune_epochs

    def personalization(self) -> tuple[Algorithm, Phase]:
        """Return standalone training, which starts from the global state."""
        return Standalone(), Phase("personalize", self.finetune_epochs)


class StandaloneHead(Standalone):
    """Standalone training of the head; otherwise only running statistics change, which every pass updates."""

    def trainable_keys(self, role: str, phase: str, tensor_names: TensorNames, round: int) -> tuple[str, ...]:
        """Train the head."""
        return tuple(key for key in tensor_names.parameters if key in tensor_names.head)


class FedBABU(FedAvgFT):
    """FedAvg of the body with a frozen initial head, which every client fine-tunes after the last round.

    Oh et al. (ICLR 2022). The global model is the averaged body with the initial head, which is the same for all
    clients and is never sent back.

    The fine-tuning has the full ``lr_personal``, whatever the schedule of the rounds. Source: [Oh et al., ICLR
    2022](https://arxiv.org/abs/2106.06042).

    Args:
        finetune_epochs: Number of epochs of the fine-tuning, > 0.
        tunes: Which parameters are fine-tuned: those of the ``head``, or ``all``.
    """

    def __init__(self, finetune_epochs: float = 1, tunes: Literal["head", "all"] = "head") -> None:
        super().__init__(finetune_epochs)
        check_choice("tunes", tunes, ("head", "all"))
        self.tunes = tunes

    def check(self, tensor_names: TensorNames, num_clients: int) -> None:
        """Raise a ValueError if the adapter does not train a head, or trains nothing else."""
        trains_head = bool(tensor_names.head)
        trains_body = tensor_names.head != set(tensor_names.parameters)
        if trains_head and trains_body:
            return
        trained = "only the head is" if trains_head else "no head is"
        raise ValueError(
            f"algorithm FedBABU trains the body in its rounds and the head after them, but {trained} trained; choose "
            "an adapter that trains both, such as adapter='full', or a different algorithm"
        )

    def trainable_keys(self, role: str, phase: str, tensor_names: TensorNames, round: int) -> tuple[str, ...]:
        """Train all parameters but those of the head."""
        return tuple(key for key in tensor_names.parameters if key not in tensor_names.head)

    def end_round(
        self,
        trained: Stacks,
        client_state: Stacks,
        received: State,
        tensor_names: TensorNames,
    ) -> tuple[Stacks, State]:
        """Keep nothing; send the body."""
        body = without(trained["local"], tensor_names.head)
        return {}, body

    def personalization(self) -> tuple[Algorithm, Phase]:
        """Return standalone training of the head, or of all parameters, from the global state."""
        phase = Phase("personalize", self.finetune_epochs)
        if self.tunes == "head":
            return StandaloneHead(), phase
        return Standalone(), phase


class FedProx(Algorithm):
    """FedAvg whose clients minimise loss + μ/2 ||w_m − w||², with w as received (Li et al., MLSys 2020, Equation 2).

    Source: [Li et al., MLSys 2020](https://arxiv.org/abs/1812.06127).

    Args:
        prox_strength: Strength μ of the pull. With 0 this is FedAvg.
    """

    def __init__(self, prox_strength: float = 0.1) -> None:
        check_number("prox_strength", prox_strength, ge=0, hint="0 does not pull")
        self.prox_strength = prox_strength

    def client_step(self, step: ClientStep) -> None:
        """Take a step on the loss and the pull towards the received state (Equation 2)."""
        loss = step.loss("local")
        step.descend("local", loss, pull=(self.prox_strength, step.received))


class FedDF(Algorithm):
    """FedAvg, after which the ensemble of the clients' models is distilled into the average on public images.

    Lin et al. (NeurIPS 2020), Algorithm 1: the student starts from the average, and its teacher is the mean of the
    clients' logits. Without distillation steps this is FedAvg.

    Source: [Lin et al., NeurIPS 2020](https://arxiv.org/abs/2006.07242).
    """

    uses_distillation = True


class FedDyn(Algorithm):
    """FedAvg with a dynamic regulariser that makes the clients' optima agree with the server's.

    Acar et al. (ICLR 2021), Algorithm 1. w is the received global model and w_m the model of client m. The client keeps
    h_m and the server keeps h, which are both initially zero:

    1. A client minimises loss − <h_m, w_m> + α/2 ||w_m − w||² and sends w_m.
    2. It keeps h_m ← h_m − α (w_m − w).
    3. The server sets h ← h − α/M Σ (w_m − w), summed over the clients of the round, where M is the number of all.
    4. The new global model is mean(w_m) − h/α.

    Running statistics of norms are averaged.

    It is meant for the plain mean: its fixed point is the uniform average of the clients' objectives, even with
    ``weighting: samples``. Source: [Acar et al., ICLR 2021](https://arxiv.org/abs/2111.04263).

    Args:
        alpha: Strength α of the regulariser, > 0.
    """

    def __init__(self, alpha: float = 0.1) -> None:
        check_number("alpha", alpha, gt=0, hint="the server divides by it")
        self.alpha = alpha

    def initial_client_state(self, initial: State, tensor_names: TensorNames) -> Stacks:
        """Keep h_m, which is initially zero."""
        return {"gradient": {key: torch.zeros_like(initial[key]) for key in tensor_names.parameters}}

    def client_step(self, step: ClientStep) -> None:
        """Take a step on the regularised loss."""
        # The gradient of −<h_m, w_m> is −h_m.
        minus_h = {key: -h for key, h in step.client_state["gradient"].items()}
        loss = step.loss("local")
        step.descend("local", loss, pull=(self.alpha, step.received), slope=minus_h)

    def end_round(
        self,
        trained: Stacks,
        client_state: Stacks,
        received: State,
        tensor_names: TensorNames,
    ) -> tuple[Stacks, State]:
        """Keep h_m − α (w_m − w); send w_m."""
        w = received
        w_m = trained["local"]
        new_h = {}
        for key, h in client_state["gradient"].items():
            change = w_m[key] - w[key]
            new_h[key] = h - self.alpha * change
        return {"gradient": new_h}, w_m

    def server_step(self, server: ServerStep) -> State:
        """Update h, and return mean(w_m) − h/α."""
        average = server.mean(server.updates, server.weights)
        h_before = server.state.get("gradient", {})
        new_h = {}
        corrected = {}
        for key in server.tensor_names.parameters:
            changes = server.updates.gathered(key) - server.previous[key]  # w_m − w, (C, ...)
            sum_of_changes = changes.sum(0)
            h = h_before.get(key, torch.zeros_like(sum_of_changes))
            new_h[key] = h - self.alpha / server.num_clients * sum_of_changes
            corrected[key] = average[key] - new_h[key] / self.alpha
        server.state["gradient"] = new_h
        return average | corrected
