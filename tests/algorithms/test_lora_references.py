# SPDX-License-Identifier: Apache-2.0
"""Methods about LoRA against plain loops with torch's optimisers, dense products and a network written out by hand.

Two clients take part in each round, or two of three. Layers are convolutions and a linear one, of several ranks and
scales, or one with groups. A batch has all images of a client.
"""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig
from torch import nn
from torch.utils.data import TensorDataset

import perada
from perada.algorithms import Ditto, FedSALoRA, FFALoRA, FLoRA, HetLoRA, PerAda
from perada.data import Phase
from perada.server import LoRAFair
from tests.options import sections

from .problems import CLASSES, QUIET

ROUNDS = 3
STEPS = 3
PROX = 0.7
STRENGTH = 0.01
OPTIMIZERS = {
    "sgd": {"lr_local": 0.3, "lr_personal": 0.2},
    "momentum": {"lr_local": 0.05, "lr_personal": 0.04, "momentum": 0.9},
    "adamw": {"lr_local": 0.02, "lr_personal": 0.03, "optimizer": "adamw", "weight_decay": 0.1},
}
FEDERATIONS = {"all": ((5, 8), None, False), "some": ((5, 8, 6), 2, True)}
LAYERS = ("conv", "many", "layer")
RANKS = {"conv": 3, "many": 2, "layer": 4}
ALPHAS = {"conv": 3, "many": 5, "layer": 3}
HEAD = "fc.modules_to_save.default."


class Net(nn.Module):
    def __init__(self, groups):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            self.conv = nn.Conv2d(1, 4, 3, padding=1)
            self.many = nn.Conv2d(4, 6, 3, stride=2, groups=groups, bias=False)
            self.layer, self.fc = nn.Linear(24, 8), nn.Linear(8, CLASSES)
        self.double()

    def forward(self, x):
        x = self.many(self.conv(x).tanh()).tanh().flatten(1)
        return self.fc(self.layer(x).tanh())


def a(layer):
    return f"{layer}.lora_A.default.weight"


def b(layer):
    return f"{layer}.lora_B.default.weight"


def base(layer):
    return f"{layer}.base_layer.weight"


DOWNS = [a(layer) for layer in LAYERS]
UPS = [b(layer) for layer in LAYERS]


class Plain:
    """The federation, written out."""

    def __init__(self, federation, optimizer, engine, groups=1):
        self.sizes, self.together, self.weighted = FEDERATIONS[federation]
        random = torch.Generator().manual_seed(1)
        clients = [
            (torch.randn(n, 1, 6, 6, generator=random).double(), torch.randint(0, CLASSES, (n,), generator=random))
            for n in self.sizes
        ]
        self.data = perada.FederatedData([TensorDataset(*client) for client in clients], num_classes=CLASSES)
        self.clients, self.options, self.net, self.engine = clients, OPTIMIZERS[optimizer], Net(groups), engine
        patterns = {"rank_pattern": {"many": 2, "layer": 4}, "alpha_pattern": {"many": 5}}
        self.adapter = LoraConfig(r=3, lora_alpha=3, use_rslora=groups == 1, target_modules=[*LAYERS], **patterns)
        self.ranks = RANKS if groups == 1 else {"conv": 3, "many": 2, "layer": 4}
        self.scale = {n: ALPHAS[n] / (math.sqrt(self.ranks[n]) if groups == 1 else self.ranks[n]) for n in LAYERS}
        served = perada.FederatedDataModule(self.data, batch_size="full")
        served.configure_rounds(seed=0, clients_per_round=self.together, phases=[Phase(steps=STEPS)])
        self.rounds = [list(served.plan(round).clients) for round in range(ROUNDS)]

    def run(self, algorithm, rounds=ROUNDS, **options):
        common = {"adapter": self.adapter, "engine": self.engine, "rounds": rounds, "local_steps": STEPS}
        common |= {"clients_per_round": self.together, "batch_size": "full"}
        common |= {"weighting": "samples" if self.weighted else "uniform"}
        return perada.finetune(
            self.net, self.data, **sections(algorithm=algorithm, **common | self.options | QUIET | options)
        )

    def logits(self, state, x):
        def run(name, x):
            layer = getattr(self.net, name)
            factors = (state[a(name)], state[b(name)])
            weight = state.get(base(name), layer.weight.detach())
            bias = layer.bias
            bias = None if bias is None else bias.detach()
            if isinstance(layer, nn.Linear):
                return F.linear(x, weight, bias) + self.scale[name] * (x @ factors[0].T @ factors[1].T)
            inner = F.conv2d(x, factors[0], None, layer.stride, layer.padding)
            outer = F.conv2d(inner, factors[1], groups=layer.groups)
            return F.conv2d(x, weight, bias, layer.stride, layer.padding, 1, layer.groups) + self.scale[name] * outer

        x = run("many", run("conv", x).tanh()).tanh().flatten(1)
        return F.linear(run("layer", x).tanh(), state[HEAD + "weight"], state[HEAD + "bias"])

    def train(self, state, client, idle=(), anchor=None):
        """With λ/2 ‖v − anchor‖² where there is one, at the personal rate."""
        options, (x, y) = SimpleNamespace(**self.options), self.clients[client]
        leaves = {key: value.clone().requires_grad_(key not in idle) for key, value in state.items()}
        trained = {key: value for key, value in leaves.items() if value.requires_grad and "base_layer" not in key}
        rate = options.lr_local if anchor is None else options.lr_personal
        if "momentum" in self.options or "optimizer" not in self.options:
            optimizer = torch.optim.SGD(trained.values(), rate, momentum=self.options.get("momentum", 0), foreach=False)
        else:
            optimizer = torch.optim.AdamW(trained.values(), rate, weight_decay=options.weight_decay, foreach=False)
        for _ in range(STEPS):
            loss = F.cross_entropy(self.logits(leaves, x), y)
            for key, value in trained.items() if anchor is not None else ():
                loss = loss + PROX / 2 * (value - anchor[key]).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return {key: value.detach() for key, value in leaves.items()}

    def shares(self, clients):
        sizes = [self.sizes[m] if self.weighted else 1 for m in clients]
        return [size / sum(sizes) for size in sizes]

    def blocks(self, state, layer):
        """B and A as matrices, of each group."""
        groups = getattr(getattr(self.net, layer), "groups", 1)
        return list(zip(*(state[one(layer)].flatten(1).chunk(groups) for one in (b, a)), strict=True))

    def product(self, state, layer):
        return self.scale[layer] * torch.cat([up @ down for up, down in self.blocks(state, layer)])

    def large(self, state):
        """Factors filled up with zeros."""
        state = dict(state)
        for layer in LAYERS:
            down = state[a(layer)]
            up = state[b(layer)]
            more = self.ranks[layer] - len(down) if getattr(getattr(self.net, layer), "groups", 1) == 1 else 0
            state[a(layer)] = torch.cat([down, down.new_zeros(more, *down.shape[1:])])
            state[b(layer)] = torch.cat([up, up.new_zeros(len(up), more, *up.shape[2:])], 1)
        return state

    def mean(self, updates, shares):
        updates = [self.large(update) for update in updates]
        return {key: sum(s * one[key] for s, one in zip(shares, updates, strict=True)) for key in updates[0]}

    def products(self, updates, shares, layer):
        return sum(share * self.product(one, layer) for share, one in zip(shares, updates, strict=True))

    def lost(self, updates, shares, state):
        """Of the mean of the products, by a state."""
        products = {layer: self.products(updates, shares, layer) for layer in LAYERS}
        off = sum(float((value - self.product(state, layer)).square().sum()) for layer, value in products.items())
        return math.sqrt(off / sum(float(value.square().sum()) for value in products.values()))

    def svd(self, updates, shares, w):
        """Rows of A of the dense decomposition; where it has fewer, those of w, by Gram and Schmidt."""
        state = self.mean(updates, shares)
        for layer in LAYERS:
            ups = []
            downs = []
            groups = len(self.blocks(state, layer))
            dense = (self.products(updates, shares, layer) / self.scale[layer]).chunk(groups)
            for matrix, (_, old) in zip(dense, self.blocks(w, layer), strict=True):
                _, values, vt = torch.linalg.svd(matrix, full_matrices=False)
                rank = min(len(old), len(values))
                count = min(rank, int((values > 1e-12 * values[0]).sum()))
                rows = list(vt[:count])
                for row in old[count:rank]:
                    for other in rows * 2:
                        row = row - (other @ row) * other
                    rows.append(row / row.norm())
                down = torch.stack([row * row[row.abs().argmax()].sign() for row in rows])
                down = torch.cat([down, torch.zeros(len(old) - rank, down.shape[1]).double()])
                ups.append((matrix @ down.T) * (torch.arange(len(old)) < count))
                downs.append(down)
            state[a(layer)] = torch.cat(downs).view_as(state[a(layer)])
            state[b(layer)] = torch.cat(ups).view_as(state[b(layer)])
        return state

    def fair(self, updates, shares, w):
        """The ridge regression as least squares on more rows."""
        state = self.mean(updates, shares)
        for layer in LAYERS:
            ups = []
            pairs = self.blocks(state, layer)
            dense = (self.products(updates, shares, layer) / self.scale[layer]).chunk(len(pairs))
            for matrix, (up, down) in zip(dense, pairs, strict=True):
                rows = torch.cat([down.T, math.sqrt(STRENGTH) * torch.eye(len(down)).double()])
                expected = torch.cat([matrix.T, math.sqrt(STRENGTH) * up.T])
                ups.append(torch.linalg.lstsq(rows, expected).solution.T)
            state[b(layer)] = torch.cat(ups).view_as(state[b(layer)])
        return state

    def by_norm(self, updates, shares, w):
        """HetLoRA's: factors by the norms of the products."""
        state = self.mean(updates, shares)
        for layer in LAYERS:
            norms = [float(self.product(update, layer).norm()) for update in updates]
            other = self.mean(updates, [norm / sum(norms) for norm in norms])
            state |= {one(layer): other[one(layer)] for one in (a, b)}
        return state

    def cut(self, state, rank):
        cut = {a(layer): state[a(layer)][:rank] for layer in LAYERS}
        return state | cut | {b(layer): state[b(layer)][:, :rank] for layer in LAYERS}

    def averaging(self, merge=None, idle=((), ()), personal=False, ranks=None):
        """FedAvg or Ditto: the global state, what clients predict with, and what was lost in each round."""
        first = self.run("fedavg", rounds=0).state("global")
        ranks = (ranks or [9] * 3)[: len(self.sizes)]
        w = first
        own = [self.cut(first, rank) if rank < 9 else first for rank in ranks]
        records = []
        for round, clients in enumerate(self.rounds):
            frozen = idle[round % 2]
            updates = []
            shares = self.shares(clients)
            for m in clients:
                received = self.cut(w, ranks[m]) if ranks[m] < 9 else w
                updates.append(self.train(received, m, frozen))
                if personal:
                    own[m] = self.train(own[m], m, frozen, received)
            by_name = self.mean(updates, shares)
            w = merge(updates, shares, w) if merge else by_name
            records.append([self.lost(updates, shares, state) for state in (by_name, w)])
        seen = own if personal else [self.cut(w, rank) if rank < 9 else w for rank in ranks]
        return w, [self.large(state) for state in seen], records

    def fedsa(self):
        first = self.run("fedavg", rounds=0).state("global")
        shared = {key: first[key] for key in DOWNS}
        personal = [first for _ in self.sizes]
        for clients in self.rounds:
            updates = {m: self.train(personal[m] | shared, m) for m in clients}
            for m, update in updates.items():
                personal[m] = update
            mean = self.mean(updates.values(), self.shares(clients))
            shared = {key: mean[key] for key in DOWNS}
        return None, [state | shared for state in personal], []

    def merging(self, algorithm, ranks=None):
        """FedEx-LoRA and FLoRA by dense means of W + s·B·A; the A that FLoRA draws are the run's."""
        result = [self.run(algorithm, rounds=rounds).state("global") for rounds in range(ROUNDS + 1)]
        w = result[0]
        for round, clients in enumerate(self.rounds):
            shares = self.shares(clients)
            updates = [self.train(self.cut(w, ranks[m]) if ranks else w, m) for m in clients]
            mean = self.mean(updates, shares)
            if algorithm != "fedex_lora":
                mean |= {key: result[round + 1][key] for key in DOWNS} | {key: 0 * mean[key] for key in UPS}
            for layer in LAYERS:
                change = self.products(updates, shares, layer) - self.product(mean, layer)
                mean[base(layer)] = w[base(layer)] + change.view_as(w[base(layer)])
            w = mean
        return w, None, []


IDLE = {"ffa": (DOWNS, DOWNS), "rolora": (DOWNS, UPS)}
MIXED = [1, 3, 4]
LOW = [1, 1, 2]
RULES = {"svd": {"server_rule": "svd"}, "fair": {"server_rule": LoRAFair(STRENGTH)}}
METHODS = {
    "fedavg": ("fedavg", {}, Plain.averaging),
    "ditto": (Ditto(PROX), {}, lambda own: own.averaging(personal=True)),
    "ffa": (FFALoRA(), {}, lambda own: own.averaging(idle=IDLE["ffa"])),
    "ffa-ditto": (FFALoRA(Ditto(PROX)), {}, lambda own: own.averaging(idle=IDLE["ffa"], personal=True)),
    "ffa-perada": (
        FFALoRA(PerAda(PROX, distill=False)),
        {},
        lambda own: own.averaging(idle=IDLE["ffa"], personal=True),
    ),
    "rolora": ("rolora", {}, lambda own: own.averaging(idle=IDLE["rolora"])),
    "fedsa": (FedSALoRA(), {}, Plain.fedsa),
    "svd": ("fedavg", RULES["svd"], lambda own: own.averaging(own.svd)),
    "svd-ditto": (Ditto(PROX), RULES["svd"], lambda own: own.averaging(own.svd, personal=True)),
    "fair": ("fedavg", RULES["fair"], lambda own: own.averaging(own.fair)),
}
WITHOUT_GROUPS = {
    "fedex": ("fedex_lora", {}, lambda own: own.merging("fedex_lora")),
    "flora": ("flora", {}, lambda own: own.merging("flora")),
    "flora-ranks": (HetLoRA(FLoRA(), MIXED), {}, lambda own: own.merging(HetLoRA(FLoRA(), MIXED), MIXED)),
    "het": (HetLoRA(ranks=MIXED), {}, lambda own: own.averaging(own.by_norm, ranks=MIXED)),
    "het-ditto": (
        HetLoRA(Ditto(PROX), MIXED),
        {},
        lambda own: own.averaging(own.by_norm, personal=True, ranks=MIXED),
    ),
    "het-svd": (HetLoRA(ranks=MIXED), RULES["svd"], lambda own: own.averaging(own.svd, ranks=MIXED)),
    "low-svd": (HetLoRA(ranks=LOW), RULES["svd"], lambda own: own.averaging(own.svd, ranks=LOW)),
}


def compare(method, federation, optimizer, engine, groups):
    plain = Plain(federation, optimizer, engine, groups)
    algorithm, options, loop = (METHODS | WITHOUT_GROUPS)[method]
    w, personal, records = loop(plain)
    diagnostics = {"diagnostics": ["lora_residual"]} if records else {}
    result = plain.run(algorithm, **options | diagnostics)
    expected = [("global", w)] * (w is not None)
    expected += [(f"client {m}", state) for m, state in enumerate(personal or ())]
    for name, state in expected:
        seen = result.state("global") if name == "global" else result.state("personal", int(name.split()[1]))
        assert seen.keys() == state.keys(), name
        for key, value in seen.items():
            # Of svd, A's rows are as exact as their singular values are far from 0.
            atol = 1e-10 if options.get("server_rule") == "svd" else 1e-12
            torch.testing.assert_close(value, state[key], rtol=1e-9, atol=atol, msg=lambda m, key=key: f"{key}: {m}")
    for record, (by_name, left) in zip(result.metrics["rounds"], records, strict=False):
        assert record["updates/lora_residual"] == pytest.approx(by_name, rel=1e-9, abs=1e-14)
        assert record.get("updates/lora_error", left) == pytest.approx(left, rel=1e-9, abs=1e-14)


@pytest.mark.parametrize("engine", ["folded", "loop"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("federation", FEDERATIONS)
@pytest.mark.parametrize("method", METHODS | WITHOUT_GROUPS)
@pytest.mark.filterwarnings("ignore:round .* none of its clients has a LoRA rank above:UserWarning")
@pytest.mark.every(136)
def test_three_rounds(method, federation, optimizer, engine):
    compare(method, federation, optimizer, engine, groups=1)


@pytest.mark.parametrize("engine", ["folded", "loop"])
@pytest.mark.parametrize("federation", FEDERATIONS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.filterwarnings("ignore:LoRA adapter added to ConvNd layer with groups:UserWarning")
@pytest.mark.slow
def test_three_rounds_with_groups(method, federation, engine):
    compare(method, federation, "sgd", engine, groups=2)
