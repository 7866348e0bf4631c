# SPDX-License-Identifier: Apache-2.0
"""Deployed runs whose server sees sums alone."""

import pytest

from perada.algorithms import ALGORITHMS, FFALoRA, PerAda
from perada.server.rules import FedAdam
from perada.server.sums import SecureSums
from tests.algorithms.problems import ADAPTER_OF, MERGING, OF_LORA

from ..parties import Parties
from ..test_parity import assert_equal, normalized, vit

NONE = {"fedbe", "fedbe_no_kd", "fed_ensemble", "standalone", "het_lora", "flexlora", "lora_fair", *MERGING}
OF_TRANSFORMERS = {"fedalt_adapter", "fedsim_adapter"}
LORA = {"module": {"adapter": "lora"}}
CASES = {
    name: (name, {"module": {"adapter": "lora" if name in OF_LORA else "dual_lora"}} if name in ADAPTER_OF else {})
    for name in sorted(set(ALGORITHMS) - NONE - OF_TRANSFORMERS - {"fedbn"})
} | {
    "fedbn": ("fedbn", {"net": normalized}),
    "weights": ("feddf", {"loop": {"weighting": "samples"}}),
    "fedadam": ("fedavg", {"loop": {"server_rule": FedAdam()}}),
    "ffa": (FFALoRA(PerAda()), LORA),
    "running statistics": ("perada", {"net": normalized, "loop": {"weighting": "samples"}, "sizes": (8, 5, 12)}),
    "prompts": ("perada", {"net": vit, "module": {"adapter": "prompt"}}),
}


def parties(tiny, tmp_path, algorithm="perada", *, loop=None, secure=None, **options):
    return Parties(tiny, tmp_path, algorithm, loop={"secure_sums": secure or SecureSums(), **(loop or {})}, **options)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.every(6)
def test_a_deployed_run_equals_its_simulation(case, tiny, tmp_path):
    algorithm, options = CASES[case]
    assert_equal(parties(tiny, tmp_path, algorithm, rounds=3, every=3, **options))


@pytest.mark.parametrize("algorithm", ["fedavg", "perada"])
def test_also_with_those_that_were_drawn(algorithm, tiny, tmp_path):
    given = {"loop": {"clients_per_round": 3, "seed": 5}, "sizes": (9, 5, 14, 7)}
    assert_equal(parties(tiny, tmp_path, algorithm, **given), min_sites=3)
