"""A thread that would spin in `epoll_wait` sleeps instead; one that works in between does not."""

from __future__ import annotations

import os
import subprocess
import sys

import patient_epoll
import pytest

POLLED = """
import resource, select, socket
ours, theirs = socket.socketpair()
poll = select.epoll()
poll.register(ours, select.EPOLLIN)
theirs.send(b"x")
before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
for _ in range(2000):
    assert poll.poll(1) == [(ours.fileno(), select.EPOLLIN)]
    {between}
print(resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before)
"""
UNREAD, READ = "pass", "ours.recv(1); sum(range(5000)); theirs.send(b'x')"


def sleeps(between: str, **environment: str) -> int:
    """Return how often a process slept that polled 2,000 times."""
    command = [sys.executable, "-c", POLLED.format(between=between)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.fixture
def loaded() -> dict[str, str]:
    """The environment of processes that load the library."""
    if patient_epoll.build() is None:
        pytest.skip("it needs Linux and a C compiler: cc, or $CC")
    return patient_epoll.preload({})


def test_polls_for_bytes_that_nobody_reads_sleep(loaded: dict[str, str]) -> None:
    assert sleeps(UNREAD, LD_PRELOAD="") < 500 < sleeps(UNREAD, **loaded)


def test_polls_for_bytes_that_are_read_do_not(loaded: dict[str, str]) -> None:
    assert sleeps(READ, **loaded) < 500


def test_other_libraries_stay_and_it_is_named_once(loaded: dict[str, str]) -> None:
    twice = patient_epoll.preload(patient_epoll.preload({"LD_PRELOAD": "/other.so"}))
    assert twice == {"LD_PRELOAD": f"{loaded['LD_PRELOAD']} /other.so"}
