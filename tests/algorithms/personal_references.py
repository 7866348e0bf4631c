# SPDX-License-Identifier: Apache-2.0
"""Plain loops over rounds, clients and batches for the algorithms whose clients keep something of their own.

See ``references.py`` for what the functions take and return.
"""

import torch
import torch.nn.functional as F
from torch.func import functional_call

from perada.data import Phase

from .problems import (
    CLASSES,
    CLIENTS,
    EPOCHS,
    LR_LOCAL,
    LR_PERSONAL,
    PROX,
    PUBLIC,
    ROUNDS,
    SIZES,
    chosen,
    is_adapter,
    is_head,
    is_input_layer,
    is_norm,
    is_private,
    is_shared,
    is_up,
    moved,
    only,
    task,
)
from .references import fedadam, median


def standalone(ref):
    personal = ref.copies()
    for batches in ref.rounds:
        for m, client_batches in batches.items():
            personal[m] = ref.train(personal[m], client_batches, LR_PERSONAL)
    return ref.initial, personal


def ditto(ref, until_round=0, rule=None, **distillation):
    w = ref.initial
    personal = ref.copies()
    for round, batches in enumerate(ref.rounds):
        updates = []
        for m, client_batches in batches.items():
            personal[m] = ref.train(personal[m], client_batches, LR_PERSONAL, PROX, anchor=w)
            updates.append(ref.train(w, client_batches, LR_LOCAL))
        w = rule(updates, w) if rule else ref.mean(updates)
        if round < until_round:
            w = ref.distil(w, updates, round, **distillation)[-1]
    return w, personal


def perada_two_rounds(ref):
    return ditto(ref, until_round=2, batch_size=3)


def perada_all_rounds(ref):
    return ditto(ref, until_round=ROUNDS, batch_size=PUBLIC, temperature=2.0)


def mtl(ref):
    personal = ref.copies()
    centre = ref.initial
    for batches in ref.rounds:
        for m, client_batches in batches.items():
            personal[m] = ref.train(personal[m], client_batches, LR_PERSONAL, PROX, anchor=centre)
        centre = ref.mean(personal)
    return centre, personal


def pfedme(ref, strength=2.0, inner_steps=3, beta=1.0, restart=False):
    w = ref.initial
    personal = ref.copies()
    for batches in ref.rounds:
        updates = []
        for m, client_batches in batches.items():
            outer = theta = w
            for x, y in client_batches:
                theta = outer if restart else theta
                for _ in range(inner_steps):
                    theta = ref.train(theta, [(x, y)], LR_PERSONAL, strength, anchor=outer)
                statistics = {key: value for key, value in theta.items() if key not in ref.trained}
                outer = moved(outer, ref.difference(outer, theta), LR_LOCAL * strength) | statistics
            personal[m] = theta
            updates.append(outer)
        mean = ref.mean(updates)
        w = {key: (1 - beta) * w[key] + beta * new if new.is_floating_point() else new for key, new in mean.items()}
    return w, personal


def pfedme_half_way(ref):
    return pfedme(ref, inner_steps=1, beta=0.5)


def pfedme_restarted(ref):
    return pfedme(ref, restart=True)


def apfl(ref, alpha=0.3, lr_alpha=0.0):
    w = ref.initial
    own_states = ref.copies()
    personal = ref.copies()
    alphas = [alpha] * len(SIZES)

    def mixture(m, local):
        return own_states[m] | {k: alphas[m] * own_states[m][k] + (1 - alphas[m]) * local[k] for k in ref.trained}

    for batches in ref.rounds:
        updates = []
        for m, client_batches in batches.items():
            local = w
            for x, y in client_batches:
                slope, mixed = ref.gradient(mixture(m, local), x, y)
                gradient, after = ref.gradient(local, x, y)
                apart = ref.difference(own_states[m], local)
                descent = sum(float((slope[key] * apart[key]).sum()) for key in slope)
                v = {
                    key: value - LR_PERSONAL * alphas[m] * slope[key]
                    for key, value in own_states[m].items()
                    if key in slope
                }
                own_states[m] = mixed | v  # the statistics are those of the mixture's passes
                local = moved(after, gradient, LR_LOCAL)
                alphas[m] = min(1.0, max(0.0, alphas[m] - lr_alpha * descent))
            personal[m] = mixture(m, local)
            updates.append(local)
        w = ref.mean(updates)
    return w, personal


def apfl_adapted(ref):
    return apfl(ref, lr_alpha=0.5)


def partly_shared(ref, is_own, phases, local_training):
    """Clients keep ``is_own`` and share the rest: what a client trains from is the global state with its own part."""
    w = ref.initial
    own_parts = [chosen(ref.initial, is_own) for _ in CLIENTS]
    for batches in ref.rounds_in_phases(phases):
        updates = []
        for m, client_batches in batches.items():
            state = local_training(w | own_parts[m], *client_batches)
            own_parts[m] = chosen(state, is_own)
            updates.append(state)
        w = w | chosen(ref.mean(updates), lambda key: not is_own(key))
    return w, [w | part for part in own_parts]


ONE_PHASE = [Phase(epochs=EPOCHS)]


def fedbn(ref):
    return partly_shared(
        ref, is_norm, ONE_PHASE, lambda state, client_batches: ref.train(state, client_batches, LR_LOCAL)
    )


def lg_fedavg(ref):
    return partly_shared(
        ref, lambda key: not is_head(key), ONE_PHASE, lambda s, client_batches: ref.train(s, client_batches, LR_LOCAL)
    )


def fedsa_lora(ref):
    def is_own(key):
        return is_up(key) or is_head(key)

    return partly_shared(
        ref, is_own, ONE_PHASE, lambda state, client_batches: ref.train(state, client_batches, LR_LOCAL)
    )


def in_turn(ref, is_own, own_epochs=EPOCHS):
    """First what is the client's own, with the rest frozen, then the rest."""

    def local_training(state, first, second):
        state = ref.train(state, first, LR_PERSONAL, which=is_own)
        return ref.train(state, second, LR_LOCAL, which=lambda key: not is_own(key))

    return partly_shared(ref, is_own, [Phase(epochs=own_epochs), Phase(epochs=EPOCHS)], local_training)


def fedrep(ref):
    return in_turn(ref, is_head)


def fedrep_without_head(ref):
    def body(state, client_batches):
        return ref.train(state, client_batches, LR_LOCAL, which=lambda key: not is_head(key))

    return partly_shared(ref, is_head, ONE_PHASE, body)


def fedrep_long_head(ref):
    return in_turn(ref, is_head, own_epochs=3)


def fedalt_output(ref):
    return in_turn(ref, is_head, own_epochs=0.5)


def fedalt_input(ref):
    return in_turn(ref, is_input_layer)


def fedalt_adapter(ref):
    return in_turn(ref, is_adapter)


def at_once(ref, is_own):
    def local_training(state, client_batches):
        for x, y in client_batches:
            gradient, state = ref.gradient(state, x, y)
            state = moved(state, only(gradient, is_own), LR_PERSONAL)
            state = moved(state, only(gradient, lambda key: not is_own(key)), LR_LOCAL)
        return state

    return partly_shared(ref, is_own, ONE_PHASE, local_training)


def fedsim_output(ref):
    return at_once(ref, is_head)


def fedrod(ref, gamma=1.0):
    """Two networks: the generic one, and a head of one's own on what its head is given."""
    w = ref.initial
    heads = [{key: ref.zeros()[key] for key in ref.trained if is_head(key)} for _ in CLIENTS]
    weight, bias = sorted(heads[0], reverse=True)
    for batches in ref.rounds:
        updates = []
        for m, client_batches in batches.items():
            labels = task().train[m][:][1].tolist()
            prior = torch.tensor([float(labels.count(k)) for k in range(CLASSES)], dtype=torch.float64) ** gamma
            local = w
            for x, y in client_batches:
                found = []
                hook = ref.model.get_submodule(ref.head).register_forward_pre_hook(
                    lambda _, a, found=found: found.append(a[0])
                )

                def balanced(leaves, x=x, y=y, prior=prior, found=found):
                    logits = functional_call(ref.model.train(), leaves, (x,))
                    found.append(logits)
                    shares = prior * logits.exp() / (prior * logits.exp()).sum(1, keepdim=True)
                    return -shares[range(len(y)), y].log().mean()

                gradient, after = ref._pass(local, balanced)
                hook.remove()
                features, logits = (one.detach() for one in found)
                error = (logits + features @ heads[m][weight].T + heads[m][bias]).softmax(1) - F.one_hot(y, CLASSES)
                slope = {weight: error.T @ features / len(y), bias: error.mean(0)}
                heads[m] = moved(heads[m], slope, LR_PERSONAL)
                local = moved(after, gradient, LR_LOCAL)
            updates.append(local)
        w = ref.mean(updates)
    return w, [w | {key: w[key] + value for key, value in head.items()} for head in heads]


def fedrod_half(ref):
    return fedrod(ref, gamma=0.5)


def fedper(ref):
    return fedsim_output(ref)


def fedsim_branch(ref):
    return at_once(ref, is_private)


def fedalt_branch(ref):
    return in_turn(ref, is_private)


def emptied(state, which):
    return {key: torch.zeros_like(value) if which(key) else value for key, value in state.items()}


def mixed(state, weight):
    """Both B, weighted."""
    shares = {"shared_B": 1 - weight, "private_B": weight}
    return {key: value * shares.get(key.split(".")[-2], 1) for key, value in state.items()}


def feddpa(ref, weight=0.5):
    w = ref.initial
    own_parts = [chosen(ref.initial, lambda key: not is_shared(key)) for _ in CLIENTS]
    for batches in ref.rounds:
        updates = []
        for m, client_batches in batches.items():
            for x, y in client_batches:
                gradient, after = ref.gradient(mixed(w | own_parts[m], weight), x, y)
                slope = {k: weight * v if k.endswith("private_B.weight") else v for k, v in gradient.items()}
                statistics = {key: value for key, value in after.items() if key not in ref.trained}
                own_parts[m] = moved(own_parts[m], slope, LR_PERSONAL) | chosen(statistics, lambda k: not is_shared(k))
            updates.append(
                ref.train(emptied(w, is_private), client_batches, LR_LOCAL, which=lambda key: not is_private(key))
            )
        w = w | chosen(ref.mean(updates), lambda key: not is_private(key))
    return w, [mixed(w | part, weight) for part in own_parts]


def feddpa_mostly_own(ref):
    return feddpa(ref, 0.8)


def feddpa_f(ref, weight=0.5):
    w = ref.initial
    for batches in ref.rounds:
        updates = [
            ref.train(w, client_batches, LR_LOCAL, which=lambda key: not is_private(key))
            for client_batches in batches.values()
        ]
        w = w | chosen(ref.mean(updates), lambda key: not is_private(key))
    copied = w | {key.replace("shared", "private"): value for key, value in w.items() if is_shared(key)}
    personal = []
    for m in CLIENTS:
        client_batches = ref.train(
            emptied(copied, is_shared), ref.last[m], LR_PERSONAL, which=lambda key: not is_shared(key)
        )
        personal.append(mixed(copied | chosen(client_batches, lambda key: not is_shared(key)), weight))
    return w, personal


def rest_of_world(ref):
    """The server knows everybody's branch."""

    def is_factor(key):
        return ".private_" in key

    states = ref.copies()
    for batches in ref.rounds:
        factors = [chosen(state, is_factor) for state in states]
        for m, client_batches in batches.items():
            others = ref.mean([one for n, one in enumerate(factors) if n != m])
            row = {key.replace("private", "shared"): value for key, value in others.items()}
            states[m] = ref.train(states[m] | row, client_batches, LR_PERSONAL, which=lambda key: not is_shared(key))
    return ref.initial | ref.mean([chosen(state, is_factor) for state in states]), states


def fedsim_input(ref):
    return at_once(ref, is_input_layer)


def fedsim_adapter(ref):
    return at_once(ref, is_adapter)


def perada_no_kd_median(ref):
    return ditto(ref, rule=median(ref))


def perada_no_kd_fedadam(ref):
    return ditto(ref, rule=fedadam(ref))
