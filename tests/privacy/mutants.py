# SPDX-License-Identifier: Apache-2.0
"""Mistakes that privacy would not survive, made by hand: one in each row, and the tests that must notice it."""

from typing import NamedTuple


class Mutant(NamedTuple):
    """A mistake.

    Attributes:
        file: Below perada/.
        before: What stands there once.
        after: What is put in its place.
        tests: Files below tests/ of which one test must fail, without ``.py``.
    """

    file: str
    before: str
    after: str
    tests: str


CLIPPING = "privacy/test_clipping privacy/test_gradients"
PRECISION = "privacy/test_noise_precision"
TRAINING = "privacy/test_private_training"
LEDGERS = "privacy/test_private_ledgers privacy/test_budgets"
CLIENT = "privacy/test_client_level"
BEGUN = "privacy/test_begun_rounds"
SEEDED = "privacy/test_seeded_noise"
REFUSALS = "privacy/test_private_refusals"
ONE_FIT = "callbacks/test_one_fit"
BATCHES = "data/test_private_batches"

MUTANTS = [
    # The norm of a gradient, and what it is clipped to.
    Mutant(
        "privacy/clipping.py",
        "joint = torch.stack([norm.square() for norm in norms.values()]).sum(dim=0).sqrt()",
        "joint = torch.stack(list(norms.values())).amax(dim=0)",
        CLIPPING,
    ),
    Mutant("privacy/clipping.py", "(bound / (norms + 1e-6)).clamp(max=1.0)", "(bound / (norms + 1e-6))", CLIPPING),
    Mutant("privacy/clipping.py", "max_norm / math.sqrt(len(gradients))", "max_norm", CLIPPING),
    Mutant("privacy/clipping.py", ".all(0)\n    if method", ".any(0)\n    if method", CLIPPING),
    Mutant("privacy/clipping.py", "max_norm / (joint + gamma)", "max_norm / (joint + gamma).clamp(min=1)", CLIPPING),
    Mutant("privacy/clipping.py", "math.hypot(*bounds)", "max(bounds)", CLIPPING),
    # The noise.
    Mutant("privacy/clipping.py", "exact + std * noise", "exact + std**2 * noise", CLIPPING),
    Mutant("privacy/clipping.py", "if not std:", "if std < 1e-2:", f"{CLIPPING} {TRAINING}"),
    Mutant("privacy/clipping.py", "secure_noise(row) if", "secure_noise(row[:1]) if", f"{CLIPPING} {PRECISION}"),
    Mutant("privacy/clipping.py", "rows, factors = wide(rows), factors.to(wide(rows).dtype)\n", "", PRECISION),
    Mutant("privacy/clipping.py", "value.dtype.itemsize < 4", "value.dtype.itemsize < 2", PRECISION),
    Mutant("privacy/clipping.py", "exact = double(row)", "exact = row", PRECISION),
    Mutant(
        "privacy/gradients.py",
        "[sigma * sensitivity(options.max_norm) for",
        "[sigma for",
        f"privacy/test_gradients {TRAINING}",
    ),
    Mutant(
        "privacy/gradients.py",
        "noisy_mean(summed, std, query.expected, query.noise)",
        "noisy_mean(summed, std, [float(max(1, n)) for n in query.counts], query.noise)",
        f"privacy/test_gradients {TRAINING}",
    ),
    Mutant("privacy/gradients.py", "self.options.max_norm / len(leaves) ** 0.5", "self.options.max_norm", CLIPPING),
    Mutant("privacy/gradients.py", "[bound / len(leaves) ** 0.5] * len(leaves)", "[bound] * len(leaves)", CLIPPING),
    Mutant("privacy/gradients.py", "                _leave_out_broken(leaves)\n", "", CLIPPING),
    Mutant("privacy/gradients.py", "signal_skip_step(start != starts[-1])", "signal_skip_step(False)", CLIPPING),
    Mutant(
        "privacy/gradients.py",
        'query.dropout.fork("part", part))\n                with',
        "query.dropout)\n                with",
        CLIPPING,
    ),
    Mutant(
        "privacy/hooks.py",
        "b = left_out(self.b, factors) * factors.reshape(-1, 1, 1)",
        "b = left_out(self.b, factors)",
        CLIPPING,
    ),
    Mutant(
        "privacy/hooks.py",
        "torch.bmm(a, a.transpose(1, 2)) * torch.bmm(b, b.transpose(1, 2))",
        "(a * a).sum(2, True) * (b * b).sum(2, True)",
        CLIPPING,
    ),
    Mutant("privacy/hooks.py", "(torch.cat([part[side] for part in parts], 1) for", "(parts[-1][side] for", CLIPPING),
    # Where the noise comes from: other numbers for every run, round, client and role.
    Mutant("privacy/training.py", "if not training.account.options.secure_rng:", "if True:", SEEDED),
    Mutant("privacy/training.py", 'f"{purpose}-{stream}", plan.round', "purpose, plan.round", TRAINING),
    Mutant("privacy/training.py", "plan.round, client) for client", "0, client) for client", f"{ONE_FIT} {TRAINING}"),
    Mutant("privacy/training.py", "plan.round, client) for client", "plan.round, 0) for client", TRAINING),
    Mutant("privacy/training.py", '"tuning-noise" if tuning else "noise"', '"noise"', TRAINING),
    Mutant(
        "privacy/training.py",
        "[account.noise_multipliers[client] for client in clients]",
        "[account.noise_multipliers[row] for row, _ in enumerate(clients)]",
        f"{TRAINING} {LEDGERS}",
    ),
    Mutant(
        "privacy/training.py",
        "[expected_batch_size(account.sizes[client], account.rate(client)) for client in clients]",
        "[float(max(1, count)) for count in counts]",
        TRAINING,
    ),
    Mutant("privacy/training.py", "> self._queries[batch.phase].get(stream, 0):", "> 99:", REFUSALS),
    Mutant(
        "cohort.py",
        "secrets.randbits(256) if private is not None and private.secure else seed",
        "seed",
        SEEDED,
    ),
    Mutant("cohort.py", "in roles if cohort.private is None else ():", "in roles:", TRAINING),
    Mutant(
        "cohort.py",
        "        if self.private is not None:\n            counts",
        "        if False:\n            counts",
        f"{TRAINING} {BEGUN} test_federation",
    ),
    Mutant(
        "seeding.py",
        "fresh.set_state(_state(seed, purpose, *ids))",
        "fresh.manual_seed(derive_seed(seed, purpose, *ids) % 2**63)",
        "test_seeding",
    ),
    Mutant(
        "seeding.py",
        "json.dumps([int(seed), purpose, *map(int, ids)])",
        '"/".join(map(str, [seed, purpose, *ids]))',
        "test_seeding",
    ),
    Mutant("seeding.py", "json.dumps([int(seed), purpose", "json.dumps([int(seed) % 2**32, purpose", "test_seeding"),
    Mutant(
        "seeding.py",
        "json.dumps([int(seed), purpose, *map(int, ids)])",
        "json.dumps([int(seed), purpose, *map(int, ids[:1])])",
        "test_seeding",
    ),
    Mutant(
        "seeding.py",
        "_digest(4 * _WORDS, seed, purpose, *ids)",
        "_digest(4, seed, purpose, *ids) * _WORDS",
        "test_seeding",
    ),
    Mutant("seeding.py", "return cls(seeds, gammas | 1)", "return cls(seeds)", "test_seeding"),
    Mutant("seeding.py", "self.seeds + low, self.gammas + high", "self.seeds + low, self.gammas", "test_seeding"),
    Mutant(
        "seeding.py",
        "signed=True) for part in (digest[:8]",
        "signed=True) % 256 for part in (digest[:8]",
        "test_seeding",
    ),
    Mutant(
        "privacy/randomness.py",
        "ssl.RAND_bytes(8 * count)",
        '__import__("random").Random(0).randbytes(8 * count)',
        "privacy/test_randomness",
    ),
    Mutant("privacy/randomness.py", "_BITS = 53", "_BITS = 24", "privacy/test_randomness"),
    Mutant("privacy/randomness.py", "(-2 / draws)", "(-2)", "privacy/test_randomness"),
    Mutant("privacy/randomness.py", "2 * math.pi)", "math.pi)", "privacy/test_randomness"),
    Mutant(
        "privacy/randomness.py", "length.mul_(v.sin_()).sum(0)", "(length * v.cos()).sum(0)", "privacy/test_randomness"
    ),
    Mutant(
        "privacy/randomness.py",
        "_normal(like.numel(), 4 if like",
        "_normal(like.numel(), 1 if like",
        f"privacy/test_randomness {PRECISION}",
    ),
    # Which images are in a batch, and how they are changed at random.
    Mutant("privacy/sampling.py", "secure_uniform((images,)) if secure else", "", f"privacy/test_sampling {BATCHES}"),
    Mutant("privacy/sampling.py", "secure_permutation(images) if secure else", "", f"privacy/test_sampling {BATCHES}"),
    Mutant("privacy/sampling.py", 'f"poisson/{role}"', '"poisson"', f"privacy/test_sampling {BATCHES}"),
    Mutant("privacy/sampling.py", 'f"shuffle/{role}"', '"shuffle"', f"privacy/test_sampling {BATCHES}"),
    Mutant("privacy/sampling.py", "(draw() < sample_rate)", "(draw() < 1.5 * sample_rate)", "privacy/test_sampling"),
    Mutant("privacy/sampling.py", "return math.ceil(steps /", "return math.floor(steps /", "privacy/test_sampling"),
    Mutant("data/private_batches.py", "secrets.randbits(256) if sampling.secure else seed", "seed", BATCHES),
    Mutant("data/private_batches.py", 'derive_seed(self._items, f"stream/{name}")', "0", BATCHES),
    Mutant(
        "data/private_batches.py",
        "poisson_batches(size, rate, steps, seed=seed, role=name, round=round, client=client, secure=secure)",
        "poisson_batches(size, rate, steps, seed=seed, role=name, round=round, client=client)",
        BATCHES,
    ),
    Mutant(
        "data/preparation.py",
        "secrets.randbits(256) if self.secure and stream is not None else self.seed",
        "self.seed",
        "data/test_transforms data/test_private_batches",
    ),
    Mutant(
        "data/preparation.py",
        "if stream is None else batch.counts",
        "",
        "data/test_transforms data/test_private_batches",
    ),
    # The account of single images.
    Mutant(
        "privacy/account.py", "self.noise_multipliers[client] / looks**0.5", "self.noise_multipliers[client]", LEDGERS
    ),
    Mutant(
        "privacy/account.py",
        'rate = self.rate(client) if self.options.sampling == "poisson" else 1.0\n        for looks',
        "rate = self.rate(client)\n        for looks",
        LEDGERS,
    ),
    Mutant(
        "privacy/account.py",
        "not tuning and stream not in training.unsent",
        "not tuning and not training.unsent",
        LEDGERS,
    ),
    Mutant("privacy/account.py", "limit = min((given", "limit = max((given", LEDGERS),
    Mutant(
        "privacy/account.py",
        "history[sigma, rate] += times * steps",
        "history[sigma, rate] += steps",
        f"{LEDGERS} {BEGUN}",
    ),
    Mutant("privacy/account.py", "(True, 0 if tuned else 1)", "(True, 0)", f"{LEDGERS} {BEGUN}"),
    Mutant(
        "privacy/account.py",
        "for client in plan.clients for row in",
        "for client in plan.clients[:1] for row in",
        LEDGERS,
    ),
    Mutant(
        "privacy/account.py",
        '        self.noise_multipliers = list(state["noise_multipliers"])\n',
        "",
        f"{LEDGERS} {BEGUN}",
    ),
    Mutant(
        "privacy/account.py", "return [min(pair) for pair in", "return [max(pair) for pair in", f"{BEGUN} {LEDGERS}"
    ),
    Mutant(
        "privacy/account.py",
        'list(state.get("least_noise", state["noise_multipliers"]))',
        "list(self.noise_multipliers)",
        f"{BEGUN} {LEDGERS}",
    ),
    Mutant("privacy/account.py", "if plan.steps != counted:", "if False:", f"{ONE_FIT} {LEDGERS}"),
    Mutant("privacy/account.py", "known[key] = sigma * looks**0.5", "known[key] = sigma", LEDGERS),
    Mutant(
        "privacy/account.py",
        "sum(e.steps for e in entries) + sum(e.steps for e in after)",
        "sum(e.steps for e in entries)",
        LEDGERS,
    ),
    Mutant("privacy/account.py", "passes(size, rows, taken[stream])", "passes(size, rows, 1)", LEDGERS),
    Mutant(
        "privacy/account.py",
        "tuple(sizes) != self.sizes or batch_size",
        "tuple(sizes) != self.sizes and batch_size",
        ONE_FIT,
    ),
    Mutant("privacy/account.py", "if epsilon > target * ROUNDING:", "if False:", f"{LEDGERS} {BEGUN}"),
    Mutant("privacy/account.py", 'return sent or self.options.ledger == "release"', "return sent", LEDGERS),
    # ε.
    Mutant("privacy/accounting.py", "if segments[0][0] == 0:", "if segments[-1][0] == 0:", "privacy/test_accounting"),
    Mutant(
        "privacy/accounting.py",
        "        self.release.add(client, noise_multiplier, sample_rate, steps)\n",
        "        if not sent:\n            self.release.add(client, noise_multiplier, sample_rate, steps)\n",
        "privacy/test_accounting",
    ),
    Mutant(
        "privacy/accounting.py",
        "[float(noise_multiplier), float(sample_rate)] += steps",
        "[float(noise_multiplier), float(sample_rate)] = steps",
        "privacy/test_accounting",
    ),
    Mutant("privacy/accounting.py", "sum(steps * _step_rdp", "sum(_step_rdp", "privacy/test_accounting"),
    Mutant(
        "privacy/accounting.py",
        "frozenset(self.history(client).items())",
        "frozenset(self.history(client))",
        "privacy/test_accounting",
    ),
    Mutant("privacy/accounting.py", "list(segments)\n", "list(segments)[:1]\n", "privacy/test_accounting"),
    Mutant(
        "privacy/calibration.py", "plan[float(rate)] += count", "plan[float(rate)] = count", "privacy/test_calibration"
    ),
    # Whole clients.
    Mutant(
        "privacy/client_level.py",
        "secure, ranks = self.options.secure_rng,",
        "secure, ranks = False,",
        f"{CLIENT} {SEEDED}",
    ),
    Mutant(
        "privacy/client_level.py",
        "factors = (max_norm / norms).clamp(max=1.0)",
        "factors = torch.ones_like(norms)",
        CLIENT,
    ),
    Mutant(
        "privacy/client_level.py",
        "self.norm * noise / math.sqrt(len(clients))",
        "self.norm * noise / len(clients)",
        CLIENT,
    ),
    Mutant(
        "privacy/client_level.py",
        "self.norm * noise / math.sqrt(len(clients))",
        "noise / math.sqrt(len(clients))",
        CLIENT,
    ),
    Mutant(
        "privacy/client_level.py",
        "noise, count_noise = self._split(len(clients))",
        "noise, count_noise = self.noise_multiplier, self._split(len(clients))[1]",
        CLIENT,
    ),
    Mutant(
        "privacy/client_level.py", '"client privacy", round, clients[place]', '"client privacy", clients[place]', CLIENT
    ),
    Mutant("privacy/client_level.py", '"client privacy", round, clients[place]', '"client privacy", round', CLIENT),
    Mutant(
        "privacy/client_level.py",
        "torch.where(norms <= max_norm, 0.5, -0.5)",
        "torch.where(norms <= max_norm, 1.0, 0.0)",
        CLIENT,
    ),
    Mutant("privacy/client_level.py", ".where(finite.view(shape), 0)", "", CLIENT),
    Mutant(
        "privacy/client_level.py",
        "for client in clients:\n            self.ledger",
        "for client in clients[:-1]:\n            self.ledger",
        CLIENT,
    ),
    Mutant("privacy/client_level.py", "        self.noise_multiplier = noise\n", "", f"{BEGUN} {CLIENT}"),
    Mutant("privacy/client_level.py", "if epsilon > target * ROUNDING:", "if False:", f"{BEGUN} {CLIENT}"),
    Mutant("privacy/client_level.py", "return float(min([", "return float(max([", f"{BEGUN} {CLIENT}"),
    Mutant("privacy/client_level.py", "self._after(client, 1) <=", "self._after(client, 0) <=", f"{BEGUN} {CLIENT}"),
    Mutant(
        "privacy/client_level.py",
        "self.noise_multiplier if noise_multiplier is None else noise_multiplier",
        "self.noise_multiplier",
        f"{BEGUN} {CLIENT}",
    ),
    Mutant("privacy/client_level_refusals.py", "not rule.function_of_mean or not", "not", CLIENT),
    Mutant("privacy/client_level_refusals.py", " or not only_the_mean_counts(rule)", "", CLIENT),
    Mutant("privacy/client_level_refusals.py", 'if weighting != "uniform":', "if False:", f"{CLIENT} {REFUSALS}"),
    Mutant(
        "privacy/client_level_refusals.py", "if algorithm.distills and distils:", "if False:", f"{CLIENT} {REFUSALS}"
    ),
    Mutant("federation.py", "            own = expand(mean, len(places))\n", "", CLIENT),
    Mutant("federation.py", "            good = list(range(len(plan.clients)))\n", "", f"{CLIENT} {BEGUN}"),
    # What is counted, and when.
    Mutant("federation.py", "        settings.protection.spend(plan, self.ranks)\n", "", TRAINING),
    Mutant(
        "federation.py", "            protection.spend(plan, self.ranks, tuning=True)\n", "", f"{TRAINING} {LEDGERS}"
    ),
    Mutant(
        "federation.py", '"privacy": self.settings.protection.state_dict()', '"privacy": None', f"{TRAINING} {BEGUN}"
    ),
    Mutant("privacy/protection.py", "else list(plan.clients),", "else list(plan.clients)[:-1],", f"{BEGUN} {CLIENT}"),
    Mutant("privacy/protection.py", 'if entry["id"] in self.counted:', "if False:", BEGUN),
    Mutant(
        "privacy/protection.py",
        "for name, entry in known.items() if name not in self.counted",
        "for entry in ()",
        BEGUN,
    ),
    Mutant("privacy/protection.py", "if ranks.rank == 0 and not self.test_mode else []", "if False else []", BEGUN),
    Mutant("privacy/protection.py", 'self.counted = list(saved.get("counted", []))', "self.counted = []", BEGUN),
    Mutant("privacy/protection.py", "if there != here:", "if False:", SEEDED),
    Mutant(
        "privacy/protection.py",
        "if (saved[name] is None) != (own is None):",
        "if False:",
        f"{TRAINING} {REFUSALS} {BEGUN} {LEDGERS}",
    ),
    Mutant("privacy/protection.py", "return not all(self._secure_rng", "return not any(self._secure_rng", SEEDED),
    Mutant(
        "privacy/protection.py",
        "return able if self.clients is None or tuning else self.clients.affordable(able)",
        "return able",
        BEGUN,
    ),
    Mutant(
        "privacy/protection.py",
        '"noise_multiplier": self.clients.least_noise',
        '"noise_multiplier": self.clients.noise_multiplier',
        f"{BEGUN} {CLIENT} privacy/test_private_export",
    ),
    Mutant("privacy/journal.py", 'file.write(b"\\n" * cut + ', "file.write(", BEGUN),
    Mutant("privacy/journal.py", "if path in self.own:", "if False:", BEGUN),
    Mutant("callbacks/journals.py", "Journal(own, earlier)", "Journal(own)", BEGUN),
    Mutant("callbacks/journals.py", "Path(checkpoint).parent / JOURNAL]", "Path(checkpoint) / JOURNAL]", BEGUN),
    # One loop, one fit.
    Mutant("callbacks/federated_loop.py", 'if stage == "fit" and self._began:', "if False:", ONE_FIT),
    Mutant("callbacks/federated_loop.py", "if plan.round != federation.rounds_done:", "if False:", ONE_FIT),
    Mutant(
        "callbacks/federated_loop.py",
        "if module.federation is not None and module.federation is not self._federation:",
        "if False:",
        ONE_FIT,
    ),
    Mutant(
        "callbacks/federated_loop.py", 'self.protection is None or stage == "fit"', "self.protection is None", ONE_FIT
    ),
    Mutant(
        "callbacks/federated_loop.py",
        "            keep_journal(trainer, federation_of(module), self._journals)\n",
        "",
        BEGUN,
    ),
    # What is refused.
    Mutant("privacy/rehearsal.py", "self.queries[stream] += 1", "self.queries[stream] = 1", f"{REFUSALS} {LEDGERS}"),
    Mutant("privacy/rehearsal.py", "if not torch.equal(one[key], two[key]):", "if False:", REFUSALS),
    Mutant("privacy/rehearsal.py", "REHEARSED = 3", "REHEARSED = 1", REFUSALS),
    Mutant("privacy/probe.py", "torch.float64: 1e-7", "torch.float64: 1e-2", "privacy/test_probe"),
    Mutant(
        "privacy/probe.py",
        "if trial.remembers() or not trial.close(everyone, trial.sums(trial.all)):",
        "if False:",
        "privacy/test_probe",
    ),
    Mutant("privacy/probe.py", "if trial.remembers() or not trial.close(", "if not trial.close(", "privacy/test_probe"),
    Mutant("privacy/probe.py", "if not trial.close({key", "if False and not trial.close({key", "privacy/test_probe"),
    Mutant("privacy/probe.py", "    changed[0] = 1 - changed[0].flip(-1)\n", "", "privacy/test_probe"),
    Mutant(
        "privacy/probe.py", "if not torch.equal(buffer, before[name]):", "if False:", f"{REFUSALS} privacy/test_probe"
    ),
    Mutant("callbacks/protect.py", "            check_precision(key, value)\n", "            pass\n", PRECISION),
    Mutant("callbacks/protect.py", "        data.check_public_overlap()\n", "        pass\n", REFUSALS),
    Mutant("callbacks/protect.py", 'if loop.weighting == "samples":', "if False:", REFUSALS),
    Mutant("callbacks/protect.py", "if module.clip_norm is not None:", "if False:", REFUSALS),
    Mutant("callbacks/protect.py", "if loop.algorithm.compares:", "if False:", REFUSALS),
    Mutant("callbacks/protect.py", 'if data.evaluates_on == "validation":', "if False:", REFUSALS),
    Mutant(
        "callbacks/protect.py",
        "            check_unsent(algorithm, module.slot, initial, phases, queries, clients)\n",
        "",
        REFUSALS,
    ),
    Mutant(
        "callbacks/protect.py",
        "None if protection is None or not protection.limited else protection.affordable",
        "None",
        f"{BEGUN} {LEDGERS}",
    ),
    Mutant(
        "privacy/options.py",
        "physical_batch_size: int | None = None\n    secure_rng: bool = True",
        "physical_batch_size: int | None = None\n    secure_rng: bool = False",
        SEEDED,
    ),
    Mutant(
        "privacy/options.py",
        'accountant: Accountant = "rdp"\n    secure_rng: bool = True',
        'accountant: Accountant = "rdp"\n    secure_rng: bool = False',
        SEEDED,
    ),
    # What is written, and what is read.
    Mutant("outcome.py", "None if protection.test_mode else loop.seed", "loop.seed", SEEDED),
    Mutant("callbacks/checkpoint.py", "disguised(seed, partition) if disguise else seed", "seed", SEEDED),
    Mutant(
        "privacy_card.py",
        'any(not level["options"]["secure_rng"] for',
        'any(not level["options"] for',
        f"{SEEDED} test_privacy_card",
    ),
    Mutant(
        "privacy_card.py",
        'epsilon_text(max(server)), "all that',
        'epsilon_text(fmean(server)), "all that',
        "test_privacy_card",
    ),
    Mutant("store/files.py", "known is None or known[1] != str(client) or", "", "test_untrusted"),
    Mutant("store/files.py", " or path.is_symlink()", "", "test_untrusted"),
    Mutant("store/files.py", "        check_row(path, layout)\n        files", "        files", "test_untrusted"),
    Mutant("cli.py", "config.weights_only = True", "config.weights_only = False", "test_untrusted"),
]
