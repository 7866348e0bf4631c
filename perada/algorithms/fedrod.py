# SPDX-License-Identifier: Apache-2.0
"""FedROD (Chen and Chao, ICLR 2022): a generic model that is fair to all classes, with an additional private head."""

import torch

from perada.algorithms.base import Algorithm, ClientStep, Stacks, TensorNames
from perada.core.checks import check_number
from perada.core.states import State, double, expand, stack_size
from perada.core.text import quoted


class FedROD(Algorithm):
    """Federated robust decoupling, with linear personal heads.

    A client trains the received model θ_m on the balanced softmax (Ren et al., NeurIPS 2020),
    −log( n_y^γ exp g_y / Σ_c n_c^γ exp g_c ), where g are its logits and n_c the client's number of training images of
    class c, and sends it. Its personal head φ_m is trained on the cross-entropy of the logits g + φ_m(f), where f are
    the features that the head receives; no gradient flows to g and f. A client predicts with the newest global model
    and φ_m: both heads are linear, so their sum is one linear head.

    Both losses are computed from the same pass, before either step. The paper leaves open where φ_m starts; here it is
    0, so that a client starts with the global model. φ_m has the learning rate of the personal role. The paper's
    hypernetwork, which computes φ_m from the n_c, is not implemented.

    It needs each client's number of images per class, so one label per image. Private training of single images
    rejects it. Source: [Chen and Chao, ICLR 2022](https://arxiv.org/abs/2107.00778).

    Args:
        gamma: Exponent γ of the class counts. With 0 the global model is that of FedAvg.
    """

    inference = "personal"
    roles = ("personal", "local")
    needs_class_counts = True

    def __init__(self, gamma: float = 1.0) -> None:
        check_number("gamma", gamma, ge=0, hint="0 does not balance")
        self.gamma = gamma

    def check(self, tensor_names: TensorNames, num_clients: int) -> None:
        """Raise a ValueError unless the head is trained as a linear layer, with a weight and at most a bias."""
        trains_weight = f"{tensor_names.head_module}.weight" in tensor_names.head
        if not trains_weight or len(tensor_names.head) > 2:
            raise ValueError(
                "algorithm FedROD adds a second linear head to a trained one, but the trained tensors of the head are "
                f"{quoted(sorted(tensor_names.head))}; choose an adapter that trains its weight, such as "
                "adapter='full', or a different algorithm"
            )

    def initial_client_state(self, initial: State, tensor_names: TensorNames) -> Stacks:
        """Keep φ_m, which is initially zero."""
        return {"personal": {key: torch.zeros_like(initial[key]) for key in sorted(tensor_names.head)}}

    def client_step(self, step: ClientStep) -> None:
        """Take a step on θ_m with the balanced softmax, and one on φ_m with the cross-entropy."""
        logits, features = step.outputs("local")
        personal_logits = logits.detach()
        for value in step.states["personal"].values():
            if value.dim() == 3:
                # The weight (C, K, F).
                personal_logits = personal_logits + features.detach() @ value.mT
            else:
                # The bias (C, K).
                personal_logits = personal_logits + value.unsqueeze(1)
        # n_c^γ exp g_c is exp(g_c + log n_c^γ). In double precision, so that rounding is the same for any number of
        # clients.
        class_counts = double(step.class_counts(logits.shape[-1]))  # n_c, (C, K)
        balance = class_counts**self.gamma
        balanced_logits = logits + balance.log().to(logits).unsqueeze(1)
        step.descend("local", step.loss(balanced_logits))
        step.descend("personal", step.loss(personal_logits))

    def personal(self, client_state: Stacks, global_state: State) -> State:
        """Predict with the global model, with φ_m added to its head."""
        personal_head = client_state["personal"]
        models = expand(global_state, stack_size(personal_head))
        heads = {}
        for key, value in personal_head.items():
            heads[key] = models[key] + value
        return models | heads
