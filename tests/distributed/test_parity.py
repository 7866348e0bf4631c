# SPDX-License-Identifier: Apache-2.0
"""What two processes compute is what one computes."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from .job import CASES, QUICK, results, run

pytestmark = pytest.mark.slow  # two processes that start anew take half a minute
ROOT = Path(__file__).parents[2]
OTHERS = [case for case in CASES if case not in QUICK]


def run_job(folder, cases):
    """What a job of two processes found, which wrote it into ``folder``."""
    run("perada", rounds=2, logger=True, default_root_dir=str(folder / "one"))
    (checkpoint,) = (folder / "one").rglob("last.ckpt")
    shutil.copy(checkpoint, folder / "one.ckpt")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    job = [*torchrun, "-m", "tests.distributed.job", folder, *cases]
    done = subprocess.run(job, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(folder / "found.pt", weights_only=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("job")


@pytest.fixture(scope="module")
def quick_results(folder):
    return run_job(folder, QUICK)


@pytest.fixture(scope="module")
def found_by_the_others(tmp_path_factory):
    return run_job(tmp_path_factory.mktemp("others"), OTHERS)


def compare(two, one, **tolerance):
    for role in ("global", "personal"):
        assert len(two[role]) == len(one[role])
        for left, right in zip(two[role], one[role], strict=True):
            assert left.keys() == right.keys()
            for key in left:
                torch.testing.assert_close(left[key], right[key], **tolerance)
    assert len(two["metrics"]["rounds"]) == len(one["metrics"]["rounds"])
    for left, right in zip(two["metrics"]["rounds"], one["metrics"]["rounds"], strict=True):
        # Steps count the batches of a process, of which each of two processes has fewer if clients train in turn.
        assert 0 < left["step"] <= right["step"]
        assert left == pytest.approx(right | {"step": left["step"]}, rel=1e-5, nan_ok=True)
    assert two["metrics"]["clients"].keys() == one["metrics"]["clients"].keys()
    for name, values in two["metrics"]["clients"].items():
        assert values == pytest.approx(one["metrics"]["clients"][name], nan_ok=True)
    assert two["metrics"].get("shifts") == one["metrics"].get("shifts")
    assert two["info"] == one["info"]


def tolerance(case):
    """Return the tolerance of a case: 0, unless the order of a sum depends on the number of processes."""
    largest = 0.0
    if "double" in case:
        # Sums of double precision are not rounded to the precision of the states.
        largest = 1e-9
    if case == "private images":
        # The images of a padded batch are summed in its order.
        largest = 1e-6
    return {"rtol": largest, "atol": largest}


@pytest.mark.parametrize("case", QUICK)
def test_two_processes_do_what_one_does(case, quick_results):
    compare(quick_results[case], results(run(case)), **tolerance(case))


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS)
def test_two_processes_do_what_one_does_whatever_the_method(case, found_by_the_others):
    compare(found_by_the_others[case], results(run(case)), **tolerance(case))


def test_two_processes_go_on_from_the_checkpoint_of_one(quick_results):
    compare(quick_results["resumed"], results(run("perada", rounds=4)), rtol=0, atol=0)


def test_secure_processes_keep_one_ledger_and_one_journal(folder, quick_results):
    """What they cost is what one process costs, and a round begun by an earlier branch is counted in the next."""
    first, resumed, resumed_again = quick_results["secure"]
    for result, rounds in ((first, 2), (resumed, 3)):
        of_one_process = results(run("secure", rounds=rounds))
        for name, values in result["metrics"]["clients"].items():
            if "epsilon" in name:
                assert values == pytest.approx(of_one_process["metrics"]["clients"][name])
        assert result["info"]["sample"]["release"] == of_one_process["info"]["sample"]["release"]
    lines = (folder / "secure" / "lightning_logs" / "version_0" / "checkpoints" / "privacy_ledger.jsonl").read_text()
    assert [json.loads(line)["round"] for line in lines.splitlines()] == [0, 1, 2, 2]
    for section, ledger in (("client", "epsilon"), ("sample", "release")):
        once = np.array(resumed["info"][section][ledger])
        twice = np.array(resumed_again["info"][section][ledger])
        assert (twice >= once).all()
        # Round 2 has three clients.
        assert int((twice > once).sum()) == 3


def test_one_process_goes_on_from_the_checkpoint_of_two(folder, quick_results):
    (checkpoint,) = (folder / "lightning_logs").rglob("last.ckpt")
    resumed = run("perada", rounds=4, ckpt_path=str(checkpoint))
    compare(results(resumed), results(run("perada", rounds=4)), rtol=0, atol=0)
