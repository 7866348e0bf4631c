# SPDX-License-Identifier: Apache-2.0
"""Plain loops over rounds, clients and batches for the algorithms of one or several global models, and server rules.

A function takes a :class:`Reference` and returns the global state and the clients' personal states. Where an ensemble
predicts, it returns the list of its states, and no personal states where clients have none. A client that was never
sampled keeps what it started with.
"""

import torch
import torch.nn.functional as F
from torch.func import functional_call

from perada.algorithms import FedAvg, FedEnsemble, FedProx, make_algorithm
from perada.algorithms.ensembles import mode_schedule

from .problems import (
    CLIENTS,
    DISTILL_STEPS,
    LR_LOCAL,
    LR_PERSONAL,
    PROX,
    SIZES,
    finetune,
    is_down,
    is_head,
    is_up,
    moved,
)


def everyone(w):
    return w, [w for _ in CLIENTS]


def fedavg(ref, weighted=False, prox=0.0, rule=None):
    w = ref.initial
    for batches in ref.rounds:
        updates = [ref.train(w, client_batches, LR_LOCAL, prox, anchor=w) for client_batches in batches.values()]
        w = rule(updates, w) if rule else ref.mean(updates, [SIZES[m] for m in batches] if weighted else None)
    return everyone(w)


def ffa_lora(ref):
    w = ref.initial
    for batches in ref.rounds:
        w = ref.mean(
            [
                ref.train(w, client_batches, LR_LOCAL, which=lambda key: not is_down(key))
                for client_batches in batches.values()
            ]
        )
    return everyone(w)


def rolora(ref):
    w = ref.initial
    for idle, batches in zip((is_down, is_up, is_down), ref.rounds, strict=True):
        updates = [
            ref.train(w, client_batches, LR_LOCAL, which=lambda key, idle=idle: not idle(key))
            for client_batches in batches.values()
        ]
        w = ref.mean(updates)
    return everyone(w)


def fedavg_by_samples(ref):
    return fedavg(ref, weighted=True)


def fedavg_ft(ref):
    w, _ = fedavg(ref)
    return w, [ref.train(w, ref.last[m], LR_PERSONAL) for m in CLIENTS]


def fedbabu(ref, tuned=lambda key: is_head(key)):
    w = ref.initial

    def is_body(key):
        return not is_head(key)

    for batches in ref.rounds:
        updates = [ref.train(w, client_batches, LR_LOCAL, which=is_body) for client_batches in batches.values()]
        w = {key: value if is_body(key) else w[key] for key, value in ref.mean(updates).items()}
    return w, [ref.train(w, ref.last[m], LR_PERSONAL, which=tuned) for m in CLIENTS]


def fedbabu_whole(ref):
    return fedbabu(ref, tuned=lambda key: True)


def fedprox(ref):
    return fedavg(ref, prox=PROX)


def feddyn(ref, alpha=0.3):
    w = ref.initial
    server = ref.zeros()
    clients = [ref.zeros() for _ in CLIENTS]
    for batches in ref.rounds:
        updates = []
        for m, client_batches in batches.items():
            slope = {key: -value for key, value in clients[m].items()}
            update = ref.train(w, client_batches, LR_LOCAL, alpha, anchor=w, slope=slope)
            drift = ref.difference(update, w)
            clients[m] = {key: value - alpha * drift[key] for key, value in clients[m].items()}
            server = {key: value - alpha / len(SIZES) * drift[key] for key, value in server.items()}
            updates.append(update)
        mean = ref.mean(updates)
        w = mean | {key: mean[key] - server[key] / alpha for key in server}
    return everyone(w)


def moon(ref, mu=2.0, tau=0.5):
    """One image at a time; the representation is what ``fc`` is given."""
    w = ref.initial
    previous = ref.copies()

    def represented(state, x, train):
        model = ref.model.train(train)
        results = []
        hook = model.get_submodule(ref.head).register_forward_pre_hook(lambda _, args: results.append(args[0]))
        logits = functional_call(model, state, (x,))
        hook.remove()
        return logits, results[0]

    for batches in ref.rounds:
        updates = []
        for m, client_batches in batches.items():
            local = w
            for x, y in client_batches:
                with torch.no_grad():
                    others = [represented(state, x, False)[1] for state in (w, previous[m])]

                def loss(leaves, x=x, y=y, others=others):
                    logits, z = represented(leaves, x, True)
                    total = F.cross_entropy(logits, y)
                    for row, near, far in zip(z, *others, strict=True):
                        near, far = (torch.exp(row @ one / row.norm() / one.norm() / tau) for one in (near, far))
                        total = total - mu / len(z) * torch.log(near / (near + far))
                    return total

                gradient, local = ref._pass(local, loss)
                local = moved(local, gradient, LR_LOCAL)
            previous[m] = local
            updates.append(local)
        w = ref.mean(updates)
    return everyone(w)


def scaffold(ref, server_lr=1.0):
    """Option II as it is printed: c_i ← c_i − c + (x − y) / (K η)."""
    w = ref.initial
    server = ref.zeros()
    clients = [ref.zeros() for _ in CLIENTS]
    for batches in ref.rounds:
        updates = []
        changes = []
        for m, client_batches in batches.items():
            update = ref.train(w, client_batches, LR_LOCAL, slope=ref.difference(server, clients[m]))
            drift = ref.difference(w, update)
            after = {k: c - server[k] + drift[k] / (len(client_batches) * LR_LOCAL) for k, c in clients[m].items()}
            changes.append(ref.difference(after, clients[m]))
            clients[m] = after
            updates.append(update)
        share = len(batches) / len(SIZES)
        server = {k: c + share * sum(change[k] for change in changes) / len(changes) for k, c in server.items()}
        mean = ref.mean(updates)
        w = mean | {k: w[k] + server_lr * (mean[k] - w[k]) for k in server}
    return everyone(w)


def scaffold_half_way(ref):
    return scaffold(ref, server_lr=0.5)


def feddf(ref, batch_size=3):
    w = ref.initial
    for round, batches in enumerate(ref.rounds):
        updates = [ref.train(w, client_batches, LR_LOCAL) for client_batches in batches.values()]
        w = ref.distil(ref.mean(updates), updates, round, batch_size)[-1]
    return everyone(w)


def fedbe_without_samples(ref, average_from=0.5, batch_size=3):
    w = ref.initial
    for round, batches in enumerate(ref.rounds):
        updates = [ref.train(w, client_batches, LR_LOCAL) for client_batches in batches.values()]
        mean = ref.mean(updates)
        path = ref.distil(mean, [*updates, mean], round, batch_size)
        w = ref.mean([state for step, state in enumerate(path) if step >= average_from * DISTILL_STEPS])
    return everyone(w)


def fedbe_of_last_student(ref):
    return fedbe_without_samples(ref, average_from=0.75)


def fedbe_no_kd(ref):
    """The last round's clients and their mean predict together."""
    w = ref.initial
    for batches in ref.rounds:
        updates = [ref.train(w, client_batches, LR_LOCAL) for client_batches in batches.values()]
        w = ref.mean(updates)
    return [*updates, w], None


def median(ref):
    """Sort by hand: three clients a round, so the middle one."""

    def rule(updates, w):
        mean = ref.mean(updates)
        out = {}
        for key, value in mean.items():
            low = updates[0][key]
            middle = updates[1][key]
            high = updates[2][key]
            ordered = low.minimum(middle).maximum(low.maximum(middle).minimum(high))
            out[key] = ordered if value.is_floating_point() else value
        return out

    return rule


def fedadam(ref, lr=0.1, beta1=0.9, beta2=0.99, tau=1e-3):
    """Reddi et al. 2021, Algorithm 2; running statistics take the mean."""
    first = ref.zeros()
    second = {key: value + tau**2 for key, value in ref.zeros().items()}

    def rule(updates, w):
        mean = ref.mean(updates)
        out = dict(mean)
        for key in ref.trained:
            delta = mean[key] - w[key]
            first[key] = beta1 * first[key] + (1 - beta1) * delta
            second[key] = beta2 * second[key] + (1 - beta2) * delta**2
            out[key] = w[key] + lr * first[key] / (second[key].sqrt() + tau)
        return out

    return rule


def fedavg_median(ref):
    return fedavg(ref, rule=median(ref))


def fedavg_fedadam(ref):
    return fedavg(ref, rule=fedadam(ref))


MODES = 3
STRATA = 3


def fed_ensemble(ref, base=None, prox=0.0, personal_prox=None, by_loss=False, keeps_best=False, finish=None, rule=None):
    """Each client trains the mode that the schedule gives it; a mode that nobody had stays as it is.

    ``by_loss`` gives a client the mode that does best on its images instead, ``keeps_best`` lets it predict with that
    one. ``finish(mean, updates, round)`` is what the server does with a mode's mean; ``rule(ref)`` makes the rule of
    one mode, in place of the mean.
    """
    start = finetune(FedEnsemble(base=base or FedAvg(), modes=MODES, strata=STRATA), ref.problem, rounds=0)
    modes = start.states("global")
    personal = start.states("personal") if personal_prox is not None else None
    best = [0 for _ in CLIENTS]
    rules = [rule(ref) if rule else lambda updates, w: ref.mean(updates) for _ in modes]
    for round, batches in enumerate(ref.rounds):
        given = mode_schedule(0, round, len(SIZES), MODES, STRATA).tolist()
        updates = [[] for _ in modes]
        for m, client_batches in batches.items():
            losses = [ref.loss(mode, m) for mode in modes]
            best[m] = losses.index(min(losses))
            k = best[m] if by_loss else given[m]
            if personal is not None:
                personal[m] = ref.train(personal[m], client_batches, LR_PERSONAL, personal_prox, anchor=modes[k])
            updates[k].append(ref.train(modes[k], client_batches, LR_LOCAL, prox, anchor=modes[k]))
        for k, had in enumerate(updates):
            if had:
                mean = rules[k](had, modes[k])
                modes[k] = finish(mean, had, round) if finish else mean
    return modes, [modes[k] for k in best] if keeps_best else personal


def fed_ensemble_by_loss(ref):
    return fed_ensemble(ref, by_loss=True)


def fed_ensemble_keeping_the_best(ref):
    return fed_ensemble(ref, keeps_best=True)


def fed_ensemble_fedadam(ref):
    return fed_ensemble(ref, rule=fedadam)


def fed_ensemble_of_distilling_perada(ref):
    def finish(mean, updates, round):
        return ref.distil(mean, updates, round, batch_size=3)[-1]

    base = make_algorithm("perada", prox_strength=PROX)
    return fed_ensemble(ref, base=base, personal_prox=PROX, finish=finish)


def fed_ensemble_of_fedprox(ref):
    return fed_ensemble(ref, base=FedProx(PROX), prox=PROX)


def fed_ensemble_of_perada(ref):
    return fed_ensemble(ref, base=make_algorithm("perada", prox_strength=PROX, distill=False), personal_prox=PROX)
