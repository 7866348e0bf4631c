# SPDX-License-Identifier: Apache-2.0
"""The socket between a ClientApp and a site's worker: what passes, what is turned away, what never gets through."""

import os
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from perada.deploy.flower import socket as module
from perada.deploy.flower.socket import MAX_NAME_BYTES, TRANSFER_TIMEOUT, Listener, ask_worker, supervised
from perada.deploy.transport import FAILURE_CODES, Failure


@pytest.fixture
def path():
    """A short path in a folder of our own: tmp_path may be longer than a socket's path can be."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "site.sock"


@contextmanager
def worker(path, answer, max_bytes=1000):
    with Listener(path, max_bytes) as listener:
        thread = threading.Thread(target=listener.serve, args=(answer,))
        thread.start()
        try:
            yield listener
        finally:
            listener.close()
            thread.join(5)


def echo(message, run):
    return run.encode() + b":" + message[::-1]


def raw(path, sent, ends=True):
    """What comes back for bytes that are no proper request."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(5)
        connection.connect(str(path))
        connection.sendall(sent)
        if ends:
            connection.shutdown(socket.SHUT_WR)
        got = b""
        while part := connection.recv(1000):
            got += part
        return got


def head(mark=b"PRDA", kind=0, name=0, length=0):
    return mark + struct.pack(">BHQ", kind, name, length)


def test_a_message_and_its_run_reach_the_worker_and_the_answer_comes_back(path):
    with worker(path, echo):
        assert ask_worker(path, b"abc", "run é", 5) == "run é:cba".encode()
        assert ask_worker(path, b"", "", 5) == b":"
        assert ask_worker(path, b"x" * 1000, "r", 5) == b"r:" + b"x" * 1000


def test_the_socket_is_closed_to_others_and_goes_with_its_worker(path):
    before = os.umask(0)
    try:
        with worker(path, echo):
            assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    finally:
        os.umask(before)
    assert not path.exists()
    assert ask_worker(path, b"abc", "r", 5) == Failure("unreachable")


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (head()[:7], "crashed"),
        (head(length=10) + b"abc", "crashed"),
        (head(mark=b"GET "), "malformed"),
        (head(kind=1), "malformed"),  # a code is an answer, not a request
        (head(kind=len(FAILURE_CODES) + 1), "malformed"),
        (head(name=MAX_NAME_BYTES + 1), "malformed"),
        (head(name=1) + b"\xff", "malformed"),
        (head(length=1001), "rejected"),
        (head(length=2**63), "rejected"),
    ],
)
def test_what_is_no_request_is_turned_away_and_the_next_one_answered(path, sent, code):
    with worker(path, echo):
        assert raw(path, sent) == head(kind=1 + FAILURE_CODES.index(code))
        assert ask_worker(path, b"abc", "r", 5) == b"r:cba"


def test_a_message_that_is_too_long_is_rejected_before_it_is_read(path):
    with worker(path, echo):
        assert ask_worker(path, b"x" * 10_000_000, "r", 5) == Failure("rejected")


def test_who_sends_a_byte_now_and_then_does_not_keep_others_out(path, monkeypatch):
    monkeypatch.setattr("perada.deploy.flower.socket.TRANSFER_TIMEOUT", 0.5)
    with worker(path, echo), socket.socket(socket.AF_UNIX) as slow:
        slow.connect(str(path))
        stop = threading.Event()

        def drip():
            for byte in head(length=100) + b"x" * 100:
                if stop.wait(0.1):
                    return
                with suppress(OSError):
                    slow.sendall(bytes([byte]))

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            assert ask_worker(path, b"abc", "r", 5) == b"r:cba"
        finally:
            stop.set()
            thread.join(5)


def test_a_request_for_which_memory_does_not_suffice_is_not_the_last(path, monkeypatch):
    real = module._read_exactly

    def short(connection, length, end):
        got = real(connection, length, end)
        if got == b"large":
            raise MemoryError
        return got

    monkeypatch.setattr(module, "_read_exactly", short)
    with worker(path, echo):
        assert raw(path, head(length=5) + b"large") == head(kind=1 + FAILURE_CODES.index("malformed"))
        assert ask_worker(path, b"abc", "r", 5) == b"r:cba"


def test_a_message_that_has_expired_is_late(path):
    """As where the site's clock is ahead."""
    with worker(path, echo):
        assert ask_worker(path, b"x" * 1000, "r", -1.0) == Failure("late")


def test_an_answer_that_is_too_long_is_rejected(path):
    with worker(path, lambda message, run: b"x" * 50):
        assert ask_worker(path, b"", "r", 5, max_bytes=49) == Failure("rejected")
        assert ask_worker(path, b"", "r", 5, max_bytes=50) == b"x" * 50


def test_a_reason_stays_at_the_site(path, caplog):
    def fails(message, run):
        raise ValueError("patient 4711 has no image")

    with worker(path, fails):
        assert raw(path, head(), ends=False) == head(kind=1 + FAILURE_CODES.index("crashed"))
        assert ask_worker(path, b"", "r", 5) == Failure("crashed")
    assert "patient 4711" in caplog.text


def test_it_answers_one_at_a_time_and_of_those_that_wait_the_newest(path):
    began = threading.Event()
    go = threading.Event()
    seen = []
    got = {}

    def slow(message, run):
        seen.append(message)
        began.set()
        go.wait(5)
        return message

    def client(message):
        got[message] = ask_worker(path, message, "r", 5)

    with worker(path, slow) as listener:
        threads = []
        for message in (b"first", b"second", b"third"):
            thread = threading.Thread(target=client, args=(message,))
            thread.start()
            threads.append(thread)
            assert began.wait(5)
            if message != b"first":
                wait_until(
                    lambda message=message: listener._waiting is not None and listener._waiting.message == message
                )
        wait_until(lambda: b"second" in got)
        go.set()
        for thread in threads:
            thread.join(5)
    assert seen == [b"first", b"third"]
    assert got == {b"first": b"first", b"second": Failure("late"), b"third": b"third"}


def wait_until(there):
    end = time.monotonic() + 5
    while not there():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_nobody_waits_for_any_more_is_not_begun(path):
    began = threading.Event()
    go = threading.Event()
    seen = []

    def slow(message, run):
        seen.append(message)
        began.set()
        go.wait(5)
        return message

    with worker(path, slow) as listener:
        first = threading.Thread(target=ask_worker, args=(path, b"first", "r", 5))
        first.start()
        assert began.wait(5)
        assert ask_worker(path, b"second", "r", 0.2) == Failure("late")
        assert listener._waiting is not None
        go.set()
        first.join(5)
        assert ask_worker(path, b"third", "r", 5) == b"third"
    assert seen == [b"first", b"third"]


def test_a_worker_that_dies_at_work(path):
    code = (
        "import os, sys; from perada.deploy.flower.socket import Listener\n"
        "Listener(sys.argv[1]).serve(lambda message, run: os._exit(9))"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(path)])
    wait_until(path.exists)
    wait_until(lambda: ask_worker(path, b"", "r", 5) == Failure("crashed"))
    process.wait(5)
    assert path.exists()  # it could not remove it
    assert ask_worker(path, b"", "r", 5) == Failure("unreachable")
    with worker(path, echo):  # and the next worker takes its place
        assert ask_worker(path, b"abc", "r", 5) == b"r:cba"


@pytest.mark.parametrize("mode", [0o660, 0o606, 0o777, 0o601])
def test_a_socket_that_is_open_to_others_is_not_used(path, mode):
    with worker(path, echo):
        path.chmod(mode)
        assert ask_worker(path, b"abc", "r", 5) == Failure("rejected")


def test_neither_a_link_nor_a_file_is_a_socket(path):
    with worker(path, echo):
        link = path.with_name("link")
        file = path.with_name("file")
        link.symlink_to(path)
        file.write_text("")
        file.chmod(0o600)
        assert ask_worker(link, b"abc", "r", 5) == Failure("rejected")
        assert ask_worker(file, b"abc", "r", 5) == Failure("rejected")


def test_a_socket_of_another_user_is_not_used(path, monkeypatch):
    with worker(path, echo):
        monkeypatch.setattr(os, "geteuid", lambda: path.lstat().st_uid + 1)
        assert ask_worker(path, b"abc", "r", 5) == Failure("rejected")


def test_places_where_no_socket_can_be(path):
    with pytest.raises(OSError, match="too long"):
        Listener(path.with_name("x" * 110))
    with pytest.raises(FileNotFoundError, match="none"):
        Listener(path.parent / "none" / "site.sock")
    path.write_text("notes")
    with pytest.raises(ValueError, match="not a socket"):
        Listener(path)
    assert path.read_text() == "notes"
    path.unlink()
    path.parent.chmod(0o702)
    with pytest.raises(ValueError, match="chmod 700"):
        Listener(path)
    path.parent.chmod(0o700)
    target = path.with_name("elsewhere")
    path.symlink_to(target)
    with pytest.raises(ValueError, match="not a socket"):
        Listener(path)
    assert not target.exists()


def test_a_second_worker_is_rejected_and_the_first_goes_on(path):
    with worker(path, echo):
        with pytest.raises(ValueError, match="another worker"):
            Listener(path)
        assert ask_worker(path, b"abc", "r", 5) == b"r:cba"


def test_a_socket_that_a_supervisor_opened(path, monkeypatch):
    """As systemd hands it on: descriptor 3, and two variables of the environment."""
    code = (
        "import os, sys; os.dup2(int(sys.argv[1]), 3); os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='1')\n"
        "from perada.deploy.flower.socket import Listener\n"
        "def answer(message, run):\n    listener.close()\n    return message * 2\n"
        "with Listener(None) as listener: listener.serve(answer)"
    )
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(str(path))
        path.chmod(0o600)
        opened.listen()
        process = subprocess.Popen([sys.executable, "-c", code, str(opened.fileno())], pass_fds=[opened.fileno()])
        assert ask_worker(path, b"ab", "r", TRANSFER_TIMEOUT) == b"abab"
        assert process.wait(5) == 0
    assert path.exists()  # it is the supervisor's
    monkeypatch.setenv("LISTEN_PID", str(os.getpid() + 1))
    assert not supervised()
