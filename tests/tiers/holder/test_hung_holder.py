"""Holders that do not answer: their processes are known without asking them, ended, and replaced."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardckpt.errors import StorageError, UsageError
from shardckpt.tiers.holder import holder_connection, holders
from shardckpt.tiers.holder.holder_connection import HolderBusyError, get_holder_connection
from shardckpt.tiers.holder.holder_sockets import connect_socket, open_socket_folder, socket_folder
from shardckpt.tiers.holder.holder_store import HolderStore
from shardckpt.tiers.holder.holders import HungHolder, end_peer, find_holders, read_peer_pid, start_holder, stop_holders

RUN = "hanging"
URL = f"shardckpt-memory://{RUN}"
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def sockets(tmp_path, monkeypatch):
    """A folder of sockets for one test, and short limits."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for module in (holder_connection, holders):
        monkeypatch.setattr(module, "TIMEOUT_S", 0.3)
    monkeypatch.setattr(holders, "STALL_S", 0.3)
    monkeypatch.setattr(holders, "TERM_S", 0.3)
    yield tmp_path / "shardckpt"
    stop_holders()


def start() -> int:
    """Start a holder with one file; return its process id."""
    start_holder(RUN, 1 << 20, last="COMMIT")
    with HolderStore(URL).create("step-1/COMMIT") as writer:
        writer.write(b"1")
    (found,) = find_holders().running
    return found.pid


def hang(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    while is_alive(pid):
        time.sleep(0.01)


def start_elsewhere() -> None:
    """Start the holder from another process."""
    code = f'from shardckpt.tiers.holder.holders import start_holder; start_holder("{RUN}", 1 << 20, last="COMMIT")'
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


LISTEN = """
import signal, socket, sys, time
{}
listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listening.bind(sys.argv[1])
listening.listen()
print("listens", flush=True)
time.sleep(600)
"""


@contextmanager
def listening(path: Path, before: str = "") -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    """A process that listens and accepts nothing, with a connection to it."""
    command = [sys.executable, "-c", LISTEN.format(before), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"listens\n"
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
                client.connect(str(path))
                yield process, client
        finally:
            process.kill()


def connect(timeout_s: float = 5.0) -> socket.socket:
    with open_socket_folder(socket_folder(), is_made=False) as folder_fd:
        return connect_socket(folder_fd, RUN, timeout_s)


def test_a_holder_that_hangs_is_listed_with_its_process_beside_those_that_answer():
    pid = start()
    start_holder("other", 1 << 20, last="COMMIT")
    hang(pid)
    found = find_holders()
    assert found.hung == (HungHolder(RUN, URL, pid),)
    assert [holder.run for holder in found.running] == ["other"]


def test_all_holders_that_hang_have_one_time_limit_together(monkeypatch):
    pids = [start()]
    start_holder("other", 1 << 20, last="COMMIT")
    pids += [holder.pid for holder in find_holders().running if holder.run == "other"]
    for pid in pids:
        hang(pid)
    limits = []
    settimeout = socket.socket.settimeout
    monkeypatch.setattr(socket.socket, "settimeout", lambda *args: limits.append(args[1]) or settimeout(*args))
    assert len(find_holders().hung) == 2
    assert sorted(limits)[0] < 0.1, "of the second one's limit nothing is left"


def test_stopping_ends_a_stopped_holder_by_sigterm_and_it_removes_its_socket(sockets):
    pid = start()
    hang(pid)
    assert stop_holders(RUN) == [RUN]
    assert not is_alive(pid) and not [*sockets.glob("*.sock")]
    with pytest.raises(UsageError, match="no holder of this run"):
        stop_holders(RUN)


def test_a_process_that_ignores_sigterm_is_killed(tmp_path):
    with listening(tmp_path / "s", "signal.signal(signal.SIGTERM, signal.SIG_IGN)") as (process, client):
        assert read_peer_pid(client) == process.pid
        end_peer(client, RUN)
        assert process.wait() == -signal.SIGKILL


def test_no_other_process_is_ended_when_the_holder_has_ended_meanwhile(tmp_path, monkeypatch):
    """The number of the process may be that of another one by then."""
    with listening(tmp_path / "s") as (process, client), listening(tmp_path / "other") as (other, _):
        process.kill()
        process.wait()
        monkeypatch.setattr(holders, "read_peer_pid", lambda _: other.pid)
        end_peer(client, RUN)
        assert other.poll() is None


def test_a_process_of_another_namespace_is_not_ended_and_the_error_says_what_to_do(monkeypatch):
    hang(pid := start())
    with monkeypatch.context() as patched:
        patched.setattr(holders, "read_peer_pid", lambda _: 0)
        with pytest.raises(StorageError, match=r"is not ended.*in the container that started it"):
            stop_holders(RUN)
    assert is_alive(pid)


def test_a_process_that_is_killed_and_does_not_end_is_an_error(monkeypatch):
    hang(pid := start())
    with monkeypatch.context() as patched:
        patched.setattr(holders, "_wait_for", lambda *_: False)
        with pytest.raises(StorageError, match=f"was killed and has not ended.*{pid}"):
            stop_holders(RUN)


def start_again(attempts: list[str]) -> int:
    """Start the holder once it is known if it hangs; return the process that was replaced.

    Args:
        attempts: Gets the fault of each call that the check in the background made fail.
    """
    while True:
        try:
            return start_holder(RUN, 1 << 20, last="COMMIT")
        except HolderBusyError as error:
            attempts.append(str(error))
            time.sleep(0.02)


def test_a_start_replaces_a_holder_that_hangs_and_names_its_process():
    hang(pid := start())
    assert start_again(attempts := []) == pid and "did not answer within" in attempts[0]
    assert not is_alive(pid) and HolderStore(URL).list() == []
    assert start_holder(RUN, 1 << 20, last="COMMIT") == 0


def test_one_start_waits_for_a_hung_holder_and_others_meanwhile_send_no_request(monkeypatch):
    hang(start())
    requests, go_on, ask = [], threading.Event(), holder_connection.HolderConnection._ask
    end_hung = holders._end_hung_holder
    monkeypatch.setattr(holders, "_end_hung_holder", lambda run: go_on.wait(60) and end_hung(run))
    monkeypatch.setattr(holder_connection.HolderConnection, "_ask", lambda *args: requests.append(args) or ask(*args))
    for _ in range(4):
        with pytest.raises(HolderBusyError, match="It is asked again in the background"):
            start_holder(RUN, 1 << 20, last="COMMIT")
    assert len(requests) == 1
    go_on.set()
    start_again([])


def test_a_start_that_waits_for_the_request_of_another_thread_waits_no_longer():
    start()
    connection = get_holder_connection(RUN)
    with connection._lock, pytest.raises(HolderBusyError):
        start_holder(RUN, 1 << 20, last="COMMIT")
    assert start_again([]) == 0, "it answers the check"


def test_a_holder_that_answers_the_second_request_is_not_replaced(monkeypatch):
    hang(pid := start())
    ask = holders.ask_holders

    def go_on(*args):
        os.kill(pid, signal.SIGCONT)
        return ask(*args)

    monkeypatch.setattr("shardckpt.tiers.holder.holders.ask_holders", go_on)
    assert start_again([]) == 0 and is_alive(pid)
    assert [entry.name for entry in HolderStore(URL).list()] == ["step-1"]


def test_a_process_whose_holder_was_replaced_by_another_reaches_the_new_one_at_once():
    store = HolderStore(URL)
    hang(start())
    with pytest.raises(StorageError, match="does not answer"):
        store.create("a")
    stop_holders()
    start_elsewhere()
    store.create("a").abort()


def test_a_request_to_a_killed_holder_goes_to_the_next_one_unless_a_writer_sends_it():
    kill(start())
    start_elsewhere()
    writer = HolderStore(URL).create("a")
    kill(find_holders().running[0].pid)
    start_elsewhere()
    with pytest.raises(StorageError, match="no holder of this run listens"):
        writer.write(b"1")


def test_many_clients_may_wait_for_a_holder_that_hangs():
    hang(start())
    for _ in range(1000):
        connect().close()  # it waits all the same
    (found,) = find_holders().hung
    assert found.pid


def test_a_holder_with_too_many_waiting_is_listed_with_a_way_to_find_its_process(monkeypatch):
    hang(start())

    def refuse(*_):
        raise BlockingIOError

    with monkeypatch.context() as patched:
        patched.setattr(socket.socket, "connect", refuse)
        assert find_holders().hung == (HungHolder(RUN, URL, 0),)
        with pytest.raises(StorageError, match=f"too many connections.*ss -xlp . grep {RUN}"):
            stop_holders(RUN)
