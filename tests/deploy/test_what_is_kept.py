# SPDX-License-Identifier: Apache-2.0
"""What a deployed run keeps: records of any length, a fine-tuning that is whole, a ledger that is not lost."""

import math

import pytest
import torch

from perada.deploy.protocol import MAX_TABLE_BYTES, read_header
from perada.deploy.server import progress as records
from perada.deploy.state import SITE_FORMAT, SiteStore, read_nested, write_nested
from perada.deploy.transport import Failure, LocalTransport

from .parties import Parties
from .test_rounds import Troubled
from .test_sites import train


def test_a_long_run_of_many_sites_is_read_as_it_was_written(tmp_path):
    """Its records take more bytes than the table of a message may have."""
    names = [f"hospital-{number}" for number in range(60)]
    progress = records.RunProgress("ab" * 16, "cd" * 32, 3000, roster=[records.Member(name, None, 0) for name in names])
    progress.records = [records.RoundRecord(round, names, names, {}, {"hospital-1": math.inf}) for round in range(3000)]
    progress.history = [{"round": float(round), "a": math.inf, "b": math.nan, "c": 0.1} for round in range(3000)]
    records.write_progress(tmp_path, progress, {"global": {"w": torch.ones(2)}, "server": {}})
    assert (tmp_path / records.SERVER_STATE).stat().st_size > MAX_TABLE_BYTES
    saved_run = records.read_saved_run(tmp_path)
    result = saved_run.progress
    assert result.records == progress.records and result.roster == progress.roster
    assert result.history[-1]["a"] == math.inf and math.isnan(result.history[0]["b"]) and result.history[7]["c"] == 0.1
    assert torch.equal(saved_run.states["global"]["w"], torch.ones(2))


def test_a_fine_tuning_with_too_few_sites_can_be_repeated(tiny, tmp_path):
    parties = Parties(tiny, tmp_path, "fedavg_ft", rounds=1)

    def drop_reply(name, message, _):
        return Failure("unreachable") if name != "site0" and read_header(message)["kind"] == "tune" else None

    workers = parties.workers()
    coordinator = parties.coordinator(Troubled(workers, drop_reply), min_sites=2, deadline=1.0)
    with pytest.raises(TimeoutError, match=r"1 of at least 2 sites .*site1 \(not tuned\), site2"):
        coordinator.run()
    coordinator.close()
    again = parties.coordinator(LocalTransport(workers), min_sites=2, resume=True)
    progress = again.run()
    assert progress.tuned and progress.done == 1
    assert [worker.store.current().training.num_rounds for worker in workers.values()] == [2, 2, 2]


def test_a_state_of_another_format_is_rejected_by_both_numbers(tmp_path):
    """It is whole: to take a copy, as of a damaged one, would lose what was spent since."""
    path = tmp_path / "state.safetensors"
    write_nested(path, {"run": "x"}, SITE_FORMAT + 1)
    message = rf"^'{path}' has format {SITE_FORMAT + 1}, but this release of perada reads format {SITE_FORMAT}; read it"
    with pytest.raises(ValueError, match=message):
        read_nested(path, SITE_FORMAT, dict)
    assert read_nested(path, SITE_FORMAT + 1, dict) == {"run": "x"}


def test_tensors_keep_their_memory_layout(tmp_path):
    """A convolution rounds differently in another layout, so that a restarted site would send other bits."""
    contiguous = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5)
    tensors = {
        "channels last": contiguous.contiguous(memory_format=torch.channels_last),
        "transposed": contiguous[0, 0].T,
        "contiguous": contiguous,
        "scalar": torch.tensor(3),
    }
    path = tmp_path / "state"
    write_nested(path, {"tensors": tensors}, SITE_FORMAT)
    restored = read_nested(path, SITE_FORMAT, dict)["tensors"]
    for name, value in tensors.items():
        assert restored[name].stride() == value.stride()
        assert torch.equal(restored[name], value)


def test_a_ledger_that_was_removed_is_missed(tiny, tmp_path):
    worker = Parties(tiny, tmp_path, "ditto", rounds=3).worker(0)
    folder = worker.store.folder
    assert SiteStore(tmp_path / "new").current() is None
    assert read_header(worker.answer(train(worker), ""))["code"] == "ok"
    worker.store.close()
    (folder / "state.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lost its state\.safetensors"):
        SiteStore(folder)
