# SPDX-License-Identifier: Apache-2.0
"""What `perada deploy check` says of a site: time, memory, and the ε of a whole run."""

import mmap
import time

import pytest

from perada.cli.deploy_check import format_memory, format_privacy, measure_step
from perada.privacy.accounting import history_epsilon

from .parties import Parties
from .test_sites import only_client, private, state_bytes


def test_a_step_is_measured_and_nothing_is_kept(tiny, tmp_path, monkeypatch):
    worker = Parties(tiny, tmp_path, "ditto").worker(0)
    client = only_client(worker)
    without = measure_step(client)
    real = client.train

    def large(*arguments, **named):
        with mmap.mmap(-1, 400_000_000) as held:  # not torch's, which may have as much that it freed
            for page in range(0, len(held), mmap.PAGESIZE):
                held[page] = 1
            time.sleep(0.3)
            return real(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(client, "train", large)
        more = measure_step(client)
    after = measure_step(client)
    assert more.memory - without.memory == pytest.approx(0.4, abs=0.1)
    with monkeypatch.context() as patch:
        patch.setattr("sys.platform", "darwin")  # where the system counts bytes
        assert measure_step(client).memory < after.memory / 100
    assert after.memory < more.memory - 0.3  # of that step, not of all that ever was
    assert more.seconds >= 0.3
    assert more.num_steps == 5  # two passes through 9 images, by 4
    assert state_bytes(worker) is None
    assert format_memory(more) == f"{more.memory:.2f} GB"
    assert format_memory(more._replace(device_memory=1.5)).endswith(" GB, and 1.50 GB on the GPU")


def test_the_cost_of_a_whole_run_is_said_before_it_begins(tiny, tmp_path):
    each = 2 * 5  # roles; batches of 4 in two passes through 9 images
    whole, three = (history_epsilon({(1.0, 4 / 9): each * rounds}, 1e-4, "rdp") for rounds in (4, 3))
    said = format_privacy(only_client(private(tiny, tmp_path).worker(0, delta=1e-4)))
    assert said == (
        f"yes: a run of 4 rounds spends ε ≤ {whole:.2f} at δ = 0.0001, by rdp; that is its limit over all runs"
    )
    stopped = history_epsilon({(1.0, 4 / 9): each * 3}, 1e-3, "rdp") * 1.01  # at the recipe's δ
    limits = {"delta": 1e-4, "max_epsilon": 100}
    said = format_privacy(only_client(private(tiny, tmp_path / "b", max_epsilon=stopped).worker(0, **limits)))
    assert said.endswith(f"ε ≤ {three:.2f} at δ = 0.0001, by rdp; its limit over all runs is 100")
