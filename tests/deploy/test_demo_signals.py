# SPDX-License-Identifier: Apache-2.0
"""`perada deploy demo` that is ended from outside leaves neither processes nor keys."""

import os
import signal
import subprocess
import sys
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
    print("started", self.folder, *(one.pid for one in self.processes.values()), flush=True)

flower.Demo.begin = begin
running.program = lambda name: Path("/bin/sh")
flower.run_app = lambda *_: running.follow(["-c", "echo waits for its run; exec /bin/sleep 301"], {})
flower.run_demo(1, None)
"""


def line_from(process, beginning):
    """The first line of a program's output with this beginning."""
    for line in process.stdout:
        if line.startswith(beginning):
            return line
    raise AssertionError(f"the program ended before it printed {beginning!r}")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_all_processes_and_deletes_the_keys(kind):
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as process:
        _, folder, *pids = line_from(process, "started").split()
        assert list(Path(folder).rglob("*.key"))
        line_from(process, "waits for its run")
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
