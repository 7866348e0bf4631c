# SPDX-License-Identifier: Apache-2.0
"""Private federated training written out in plain torch, from the definition of DP-SGD (Abadi et al. 2016).

One image, one client, one step at a time: draw the stream's batch, take each image's gradient of the single model,
clip, add up, add noise, divide by the number of images expected. A function takes a :class:`PrivateLoop` and returns
the global state and the clients' personal states.
"""

import math
from collections import OrderedDict
from functools import cache

import opacus.accountants.analysis.rdp as opacus_rdp
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import perada
from perada.core.rounds import sample_cohort
from perada.core.seeding import generator
from perada.privacy import poisson_batches
from tests.options import sections

from ..algorithms.problems import (
    BATCH,
    CLASSES,
    CLIENTS,
    CLIENTS_PER_ROUND,
    DISTILL_STEPS,
    EPOCHS,
    LR_LOCAL,
    LR_PERSONAL,
    LR_SERVER,
    PROX,
    QUIET,
    ROUNDS,
    SIZES,
    Reference,
    is_head,
    moved,
    task,
)

BOUND = 0.6
SIGMA = 0.8
SEED = 0
"""The bound lies among the norms of the images' gradients; :class:`PrivateLoop` counts those on either side."""


once = cache(opacus_rdp._compute_rdp)
"""Opacus's RDP of one step at one order, a pure function that takes most of the time of small runs; with a memory."""


def network(dropout=0.0):
    """As that of ``problems``, with GroupNorm in the place of BatchNorm; in float64."""
    layers = {
        "conv": nn.Conv2d(1, 4, 3),
        "act": nn.Tanh(),
        "norm": nn.GroupNorm(2, 4),
        "bend": nn.Tanh(),
        "pool": nn.AdaptiveAvgPool2d(1),
        "flat": nn.Flatten(),
        "drop": nn.Dropout(dropout),
        "fc": nn.Linear(4, CLASSES),
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        for layer in layers.values():
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()
    return nn.Sequential(OrderedDict(layers)).double()


def seeded(privacy):
    """Options whose draws follow from the run's seed, unless they say otherwise."""
    return {"secure_rng": False} | privacy if isinstance(privacy, dict) else privacy


def train(algorithm, privacy, rounds=ROUNDS, dropout=0.0, net=None, data=None, **options):
    """``perada.finetune`` on the small problem; in the test mode, whose draws a plain loop can repeat."""
    options |= {name: seeded(options[name]) for name in ("client_privacy",) if name in options}
    common = {
        "adapter": "full",
        "clients_per_round": CLIENTS_PER_ROUND,
        "batch_size": BATCH,
        "local_epochs": EPOCHS,
        "lr_personal": LR_PERSONAL,
        "lr_local": LR_LOCAL,
        "distill_steps": 0,
        "distill_lr": LR_SERVER,
        "distill_optimizer": "sgd",
        "seed": SEED,
    }
    return perada.finetune(
        net or network(dropout),
        data or task(),
        **sections(
            algorithm=algorithm,
            rounds=rounds,
            privacy=seeded(privacy),
            **common | QUIET | options,
        ),
    )


def steps_of(client, epochs=EPOCHS, sizes=SIZES):
    """Local steps of an epoch times ``epochs``: as many batches as it takes to hold that many passes."""
    return math.ceil(epochs * sizes[client] / min(sizes[client], BATCH))


def rate(client, sizes=SIZES):
    """Probability q of an image to be in a batch."""
    return min(1.0, BATCH / sizes[client])


class PrivateLoop(Reference):
    """The plain ingredients; the server's side is that of :class:`Reference`.

    Attributes:
        sigma: Noise multiplier.
        clipped: How many images had a gradient above the bound.
        whole: How many had not.
    """

    def __init__(self, sigma=0.0, bound=BOUND):
        start = train("fedavg", None, rounds=0)
        self.model, self.initial = start.global_model(), start.state("global")
        self.trained = sorted(self.initial)
        self.sigma = sigma
        self.bound = bound
        self.clipped = 0
        self.whole = 0
        self.served = perada.FederatedDataModule(task(), batch_size=BATCH)

    def cohort(self, round):
        return sample_cohort(SEED, round, len(SIZES), CLIENTS_PER_ROUND)

    def stream(self, role, round, client, steps):
        return Stream(self, role, round, client, steps)

    def image_gradient(self, state, x, y, names):
        leaves = {key: value.clone().requires_grad_(key in names) for key, value in state.items()}
        loss = F.cross_entropy(functional_call(self.model.train(), leaves, (x.unsqueeze(0),)), y.unsqueeze(0))
        return dict(zip(names, torch.autograd.grad(loss, [leaves[name] for name in names]), strict=True))


class Stream:
    """What one client's training of one role in one round sees of its images: batches and noise, in their order."""

    def __init__(self, loop, role, round, client, steps):
        self.loop, self.client, self.n, self.q = loop, client, SIZES[client], rate(client)
        self.batches = iter(poisson_batches(self.n, self.q, steps, seed=SEED, role=role, round=round, client=client))
        self.noise = generator(SEED, f"noise-{role}", round, client)

    def next(self):
        """Go to the next batch."""
        self.batch = next(self.batches)
        return self

    def gradient(self, state, which=lambda key: True):
        """The noisy gradient of the batch at hand, for the parameters that ``which`` names."""
        names = [key for key in self.loop.trained if which(key)]
        total = {key: torch.zeros_like(state[key]) for key in names}
        x, y = task().train[self.client][:]
        for image in self.batch.tolist():
            gradient = self.loop.image_gradient(state, x[image], y[image], names)
            norm = math.sqrt(sum(float(g.square().sum()) for g in gradient.values()))
            self.loop.clipped += norm > self.loop.bound
            self.loop.whole += norm <= self.loop.bound
            factor = min(1.0, self.loop.bound / (norm + 1e-6))  # Opacus's 1e-6
            for key, g in gradient.items():
                total[key] += factor * g
        if self.loop.sigma:
            for key in sorted(names):
                noise = torch.randn(total[key].shape, generator=self.noise, dtype=torch.float64)
                total[key] += self.loop.sigma * self.loop.bound * noise
        return {key: value / (self.n * self.q) for key, value in total.items()}


def pulled(gradient, state, anchor, strength):
    """λ (v − w) comes on top of the clipped and noisy gradient: it depends on no image."""
    return {key: g + strength * (state[key] - anchor[key]) for key, g in gradient.items()}


def descend(stream, steps, state, lr, anchor=None, strength=0.0, which=lambda key: True):
    for _ in range(steps):
        gradient = stream.next().gradient(state, which)
        state = moved(state, gradient if anchor is None else pulled(gradient, state, anchor, strength), lr)
    return state


def fedavg(loop):
    w = loop.initial
    for round in range(ROUNDS):
        w = loop.mean(
            [
                descend(loop.stream("local", round, m, n), n, w, LR_LOCAL)
                for m in loop.cohort(round)
                for n in [steps_of(m)]
            ]
        )
    return w, [w for _ in CLIENTS]


def scaffold(loop):
    """Control variates are made of noisy gradients alone."""
    w = loop.initial
    server = loop.zeros()
    clients = [loop.zeros() for _ in CLIENTS]
    for round in range(ROUNDS):
        updates = []
        change = loop.zeros()
        for m in loop.cohort(round):
            local = w
            n = steps_of(m)
            stream = loop.stream("local", round, m, n)
            for _ in range(n):
                push = loop.difference(server, clients[m])
                gradient = stream.next().gradient(local)
                local = moved(local, {key: gradient[key] + push[key] for key in push}, LR_LOCAL)
            after = {key: loop.difference(w, local)[key] / (n * LR_LOCAL) - push[key] for key in push}
            change = {key: change[key] + after[key] - clients[m][key] for key in change}
            clients[m] = after
            updates.append(local)
        server = {key: value + change[key] / len(SIZES) for key, value in server.items()}
        w = loop.mean(updates)
    return w, [w for _ in CLIENTS]


def ditto(loop, distil=False):
    w = loop.initial
    personal = loop.copies()
    for round in range(ROUNDS):
        updates = []
        for m in loop.cohort(round):
            n = steps_of(m)
            stream = loop.stream("personal", round, m, n)
            personal[m] = descend(stream, n, personal[m], LR_PERSONAL, anchor=w, strength=PROX)
            updates.append(descend(loop.stream("local", round, m, n), n, w, LR_LOCAL))
        w = loop.mean(updates)
        if distil:
            w = loop.distil(w, updates, round, 3)[-1]
    return w, personal


def perada_distilled(loop):
    return ditto(loop, distil=True)


def apfl(loop, alpha=0.3, lr_alpha=0.5):
    """α follows the noisy gradient, which is all that it sees of the images."""
    w = loop.initial
    own = loop.copies()
    personal = loop.copies()
    alphas = [alpha] * len(SIZES)

    def mixture(m, local):
        return {key: alphas[m] * own[m][key] + (1 - alphas[m]) * local[key] for key in local}

    for round in range(ROUNDS):
        updates = []
        for m in loop.cohort(round):
            local = w
            n = steps_of(m)
            streams = [loop.stream(role, round, m, n) for role in ("personal", "local")]
            for _ in range(n):
                slope = streams[0].next().gradient(mixture(m, local))
                descent = sum(float((slope[key] * (own[m][key] - local[key])).sum()) for key in slope)
                own[m] = moved(own[m], slope, LR_PERSONAL * alphas[m])
                local = moved(local, streams[1].next().gradient(local), LR_LOCAL)
                alphas[m] = min(1.0, max(0.0, alphas[m] - lr_alpha * descent))
            personal[m] = mixture(m, local)
            updates.append(local)
        w = loop.mean(updates)
    return w, personal


def pfedme(loop, strength=2.0, inner_steps=3):
    w = loop.initial
    personal = loop.copies()
    for round in range(ROUNDS):
        updates = []
        for m in loop.cohort(round):
            outer = w
            theta = w
            n = steps_of(m)
            stream = loop.stream("personal", round, m, n)
            for _ in range(n):
                batch = stream.next()
                for _ in range(inner_steps):
                    theta = moved(theta, pulled(batch.gradient(theta), theta, outer, strength), LR_PERSONAL)
                outer = moved(outer, loop.difference(outer, theta), LR_LOCAL * strength)
            personal[m] = theta
            updates.append(outer)
        w = loop.mean(updates)
    return w, personal


def fedalt_output(loop):
    """One stream for both phases, the second going on where the first ends."""
    w = loop.initial
    heads = [{key: loop.initial[key] for key in loop.trained if is_head(key)} for _ in CLIENTS]
    for round in range(ROUNDS):
        updates = []
        for m in loop.cohort(round):
            n = steps_of(m)
            stream = loop.stream("local", round, m, 2 * n)
            state = w | heads[m]
            state = descend(stream, n, state, LR_PERSONAL, which=is_head)
            state = descend(stream, n, state, LR_LOCAL, which=lambda key: not is_head(key))
            heads[m] = {key: state[key] for key in heads[m]}
            updates.append(state)
        w = w | {key: value for key, value in loop.mean(updates).items() if not is_head(key)}
    return w, [w | head for head in heads]


def fedsim_output(loop):
    """One gradient of both parts, clipped as one; a rate for each."""
    w = loop.initial
    heads = [{key: loop.initial[key] for key in loop.trained if is_head(key)} for _ in CLIENTS]
    for round in range(ROUNDS):
        updates = []
        for m in loop.cohort(round):
            n = steps_of(m)
            stream = loop.stream("local", round, m, n)
            state = w | heads[m]
            for _ in range(n):
                gradient = stream.next().gradient(state)
                rates = {key: LR_PERSONAL if is_head(key) else LR_LOCAL for key in gradient}
                state = {key: value - rates[key] * gradient[key] for key, value in state.items()}
            heads[m] = {key: state[key] for key in heads[m]}
            updates.append(state)
        w = w | {key: value for key, value in loop.mean(updates).items() if not is_head(key)}
    return w, [w | head for head in heads]


@cache
def expected(reference, sigma):
    """What the loop comes to: global state, personal states, and the loop with its counts."""
    loop = PrivateLoop(sigma)
    return *reference(loop), loop


DISTILLED = {"distill_steps": DISTILL_STEPS, "distill_batch_size": 3}
