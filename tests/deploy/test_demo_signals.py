# SPDX-License-Identifier: Apache-2.0
"""`perada deploy demo` that is ended from outside leaves neither processes nor keys."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="keys need it: pip install 'perada[flower]'")

PROGRAM = """
from pathlib import Path
from perada.studies import deployment as flower
from perada.deploy.flower import running

def begin(self, rounds, *_):
    self.app = self.folder
    self.write_keys()
    words = ["sh", "-c", "sleep 300 & wait"]
    for name in ("link", "node"):
        self.start(name, words)
    self.port = 1
    print(self.folder, *(one.pid for one in self.processes.values()), flush=True)

flower.Demo.begin = begin
running.program = lambda name: Path("/bin/sleep")
flower.run_app = lambda *_: running.follow(["301"], {})
flower.run_demo(1, None)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_all_processes_and_deletes_the_keys(kind):
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as process:
        folder, *pids = process.stdout.readline().split()
        assert list(Path(folder).rglob("*.key"))
        below = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        end = time.monotonic() + 60
        while not any(b"301" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in below.read_text().split()):
            assert time.monotonic() < end  # until it waits for its run
            time.sleep(0.05)
        time.sleep(0.2)
        process.send_signal(kind)
        assert process.wait(30) == 128 + kind
    assert not Path(folder).exists()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    mark = os.fsencode(folder)
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            assert mark not in (entry / "environ").read_bytes()
        except OSError:
            continue
