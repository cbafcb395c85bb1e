"""A request without an answer is named while it is waited for, and no other is."""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from shardckpt.storage import retry
from shardckpt.storage.retry import RequestWatch

COMMAND = """
import shardckpt.storage.retry as watch
watch.FIRST_NOTICE_S = 0.2
from shardckpt_cli.start import main
main()
"""


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> RequestWatch:
    monkeypatch.setattr(retry, "FIRST_NOTICE_S", 0.2)
    caplog.set_level(logging.WARNING, "shardckpt")
    return RequestWatch()


def wait_until(is_so) -> None:
    limit = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_the_request_that_waits_longest_is_named_once_a_minute(watch, caplog):
    with watch.waiting("s3://b/slow"), watch.waiting("s3://b/other"):
        wait_until(lambda: caplog.messages)
        time.sleep(0.5)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("s3://b/slow: no answer for ")


def test_while_others_are_answered_nothing_is_said(watch, caplog, monkeypatch):
    monkeypatch.setattr(retry, "FIRST_NOTICE_S", 2.0)
    with watch.waiting("s3://b/slow"):
        for _ in range(50):
            with watch.waiting("s3://b/quick"):
                time.sleep(0.05)
    assert caplog.messages == []


def test_the_thread_ends_with_the_requests_and_starts_again(watch, caplog):
    def threads() -> list[str]:
        return [each.name for each in threading.enumerate() if each.name == "request watch"]

    for count in (1, 2):
        with watch.waiting("s3://b/x"):
            wait_until(lambda: len(caplog.messages) == count)  # noqa: B023
        wait_until(lambda: not threads())


def test_a_command_says_what_it_waits_for_and_ends_on_a_signal():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/run"
        command = [sys.executable, "-c", COMMAND, "inspect", url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            line = process.stderr.readline()
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate()
    assert line.startswith(f"{url}: no answer for ")
    assert (process.returncode, out) == (143, "")
    assert "terminated" in err
