"""Holders as processes: they outlive their writers, lose nothing complete, keep nothing torn, and end by themselves."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from shardckpt.errors import MissingFileError, NoSpaceError, StorageError, UnsafeError, UsageError
from shardckpt.storage.store import read_bytes
from shardckpt.tiers.holder import holder_connection, holder_process, holder_sockets, holders
from shardckpt.tiers.holder.holder_connection import get_holder_connection
from shardckpt.tiers.holder.holder_ledger import HolderLedger
from shardckpt.tiers.holder.holder_messages import MAX_MESSAGE_BYTES, encode_message
from shardckpt.tiers.holder.holder_sockets import bind_socket, connect_socket, open_socket_folder, socket_folder
from shardckpt.tiers.holder.holder_store import HolderStore
from shardckpt.tiers.holder.holders import find_holders, is_reachable, start_holder, stop_holders

RUN = "processes"
URL = f"shardckpt-memory://{RUN}"
DEADLINE_S = 30.0
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def sockets(tmp_path, monkeypatch):
    """A folder of sockets for one test, whose path is longer than an address may be."""
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    yield folder
    stop_holders()
    assert [name.name for name in (folder / "shardckpt").glob("*.sock")] == []


def start(max_bytes=1 << 20, **options):
    start_holder(RUN, max_bytes, last="COMMIT", **options)
    (info,) = find_holders().running
    return info.pid


def wait_for(condition):
    """Wait until a condition is true; fail after a while."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def count_sockets(pid):
    return sum("socket" in os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir())


@contextmanager
def forked(act, *, user):
    """Run a function in a process of a user, which is killed at the end of the context; yields its id."""
    pid = os.fork()
    if not pid:
        try:
            os.setuid(user)
            act()
        finally:
            os._exit(0)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def run_python(code, **popen):
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, **popen)


WRITER = f"""
import sys, time
from shardckpt.tiers.holder.holder_store import HolderStore
from shardckpt.tiers.holder.holders import start_holder
start_holder("{RUN}", 1 << 20, last="COMMIT")
store = HolderStore("{URL}")
for name in ("step-1/a", "step-1/COMMIT", "step-2/a"):
    with store.create(name) as writer:
        writer.write(name.encode())
store.create("step-3/a").write(b"1" * 1000)
print("written", flush=True)
time.sleep(600)
"""


def test_complete_folders_survive_a_killed_writer_and_torn_ones_do_not():
    with run_python(WRITER, stdout=subprocess.PIPE) as writer:
        assert writer.stdout.readline() == b"written\n"
        store = HolderStore(URL)
        assert [entry.name for entry in store.list()] == ["step-1", "step-2"]
        os.killpg(os.getpgid(find_holders().running[0].pid), 0)  # a session of its own
        assert os.getsid(find_holders().running[0].pid) != os.getsid(writer.pid)
        writer.kill()
    wait_for(lambda: [entry.name for entry in store.list()] == ["step-1"])
    assert read_bytes(store, "step-1/a", 0, 8) == b"step-1/a"
    assert find_holders().running[0].nbytes == len("step-1/a" + "step-1/COMMIT")


def test_of_processes_that_start_a_holder_at_once_one_wins_and_the_others_find_it():
    code = f'from shardckpt.tiers.holder.holders import start_holder; start_holder("{RUN}", 1 << 20, last="COMMIT")'
    racing = [run_python(code) for _ in range(3)]
    assert [process.wait(60) for process in racing] == [0, 0, 0]
    assert len(find_holders().running) == 1


def test_a_holder_is_small_and_keeps_nothing_of_its_starter():
    with open(os.devnull) as kept, socket.socket() as port:
        os.set_inheritable(kept.fileno(), True)
        os.set_inheritable(port.fileno(), True)
        pid = start()
    wait_for(lambda: count_sockets(pid) == 2)  # the one that listens, and that of this process
    kinds = {os.readlink(f"/proc/{pid}/fd/{fd}").split(":")[0] for fd in os.listdir(f"/proc/{pid}/fd")}
    assert kinds <= {"/dev/null", "socket", "anon_inode", str(Path(socket_folder()))}
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    assert int(status["VmRSS"].split()[0]) < 40_000
    assert "torch" not in Path(f"/proc/{pid}/maps").read_text()


def test_a_killed_holder_leaves_no_memory_and_its_socket_is_removed_by_the_next_one(sockets):
    pid = start()
    store = HolderStore(URL)
    with store.create("step-1/COMMIT") as writer:
        writer.write(b"1")
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: is_gone(pid))
    assert store.list() == [] and find_holders() == ((), ())
    with pytest.raises(MissingFileError):
        store.size("step-1/COMMIT")
    with pytest.raises(StorageError, match="no holder of this run listens"):
        store.create("a")
    assert start() != pid
    assert HolderStore(URL).list() == []


def test_a_holder_that_is_stopped_by_a_signal_is_an_error_within_the_time_limit(monkeypatch):
    monkeypatch.setattr(holder_connection, "TIMEOUT_S", 1.0)
    monkeypatch.setattr(holder_connection, "_PAUSE_S", 0.0)
    pid = start()
    HolderStore(URL).list()
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(StorageError, match="does not answer"):
            HolderStore(URL).create("a")
    finally:
        os.kill(pid, signal.SIGCONT)
    HolderStore(URL).create("a").abort()


def test_more_bytes_than_the_maximum_are_refused_with_the_name_of_the_limit():
    start(1000)
    with (
        pytest.raises(NoSpaceError, match=r"expected at most 1000 bytes.*max_bytes"),
        HolderStore(URL).create("a") as writer,
    ):
        writer.write(b"1" * 1001)
    with HolderStore(URL).create("a") as writer:
        writer.write(b"1" * 1000)
    start(2000)
    assert find_holders().running[0].max_bytes == 2000


def test_a_refused_reservation_is_given_back_and_a_smaller_file_fits(monkeypatch):
    ledger = HolderLedger(1000, "COMMIT")
    with socket.socket(socket.AF_UNIX) as listening:
        holder = holder_process.Holder(RUN, listening, ledger, 60.0)
        number = ledger.create(1, "a", is_new=False)
        monkeypatch.setattr(holder_process, "read_available_bytes", lambda _: 500)
        with pytest.raises(NoSpaceError, match="too little free memory"):
            holder._op_reserve(1, {"number": number, "nbytes": 900})
        assert ledger.nbytes == 0
        holder._op_reserve(1, {"number": number, "nbytes": 400})
        assert ledger.nbytes == 400


def test_no_process_can_change_a_file_that_has_appeared():
    start()
    store = HolderStore(URL)
    writer = store.create("a")
    writer.write(b"123")
    memory = writer._memory
    writer.close()
    for act in (lambda: os.pwrite(memory.fd, b"4", 0), lambda: os.ftruncate(memory.fd, 0)):
        with pytest.raises(PermissionError):
            act()
    assert read_bytes(store, "a", 0, 3) == b"123"


def test_a_holder_without_clients_ends_after_its_idle_time_and_frees_its_name(sockets):
    name = sockets / "shardckpt" / f"{RUN}.sock"
    holders._start_process([RUN, str(1 << 20), "0.2", "COMMIT"])  # no client that could come too late
    wait_for(lambda: not name.exists())
    assert find_holders() == ((), ())


def test_a_holder_with_a_client_stays_until_its_idle_time_after_that(sockets):
    pid = start(idle_s=DEADLINE_S / 4)
    holder_connection.get_holder_connection(RUN).close()
    wait_for(lambda: is_gone(pid))
    assert find_holders() == ((), ())


def test_stopping_ends_one_run_or_all_and_an_unknown_run_is_an_error():
    pid = start()
    start_holder("other", 1 << 20, last="COMMIT")
    assert stop_holders(idle_s=60.0) == [], "both have a client"
    assert stop_holders(RUN) == [RUN]
    wait_for(lambda: is_gone(pid))
    with pytest.raises(UsageError, match="no holder of this run"):
        stop_holders(RUN)
    assert [info.run for info in find_holders().running] == ["other"]
    assert stop_holders() == ["other"]


HOSTILE = {
    "junk": b"\xff\x00junk",
    "a list": b"[1, 2]",
    "deep": b"[" * 60_000,
    "too long": b'"' + b"x" * MAX_MESSAGE_BYTES + b'"',
    "no op": b"{}",
    "an unknown op": b'{"op": "__class__"}',
    "a private name": b'{"op": "hello__"}',
    "another type": b'{"op": "create", "name": 3, "is_new": false}',
    "a huge number": json.dumps({"op": "reserve", "number": 1, "nbytes": 1 << 80}).encode(),
    "a negative number": b'{"op": "close", "number": -1}',
    "an unknown number": b'{"op": "close", "number": 99}',
    "a name outside": b'{"op": "create", "name": "../../etc/x", "is_new": false}',
}


def test_hostile_messages_are_refused_and_the_holder_goes_on():
    start()
    with open_socket_folder(socket_folder(), is_made=False) as folder_fd:
        for case, data in HOSTILE.items():
            with connect_socket(folder_fd, RUN, 5.0) as client:
                client.send(data)
                answer = client.recv(1 << 16)
                assert answer == b"" or "error" in json.loads(answer), case
    with HolderStore(URL).create("a") as writer:
        writer.write(b"1")
    assert find_holders().running[0].nbytes == 1


def test_a_folder_that_others_may_use_is_refused(sockets):
    start()
    stop_holders()
    folder = sockets / "shardckpt"
    folder.chmod(0o755)
    with pytest.raises(UnsafeError, match="who alone may use it"):
        find_holders()
    with pytest.raises(UnsafeError, match="who alone may use it"):
        start()
    folder.chmod(0o700)
    folder.rename(sockets / "moved")
    folder.symlink_to(sockets / "moved")
    with pytest.raises(StorageError):
        find_holders()
    folder.unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_client_refuses_a_holder_of_another_user(tmp_path):
    tmp_path.chmod(0o777)
    folder = os.open(tmp_path, os.O_RDONLY)

    def listen():
        holding = bind_socket(folder, RUN)
        holding.listen()
        time.sleep(60)

    def connect():
        try:
            connect_socket(folder, RUN, 1.0).close()
        except FileNotFoundError:
            return False
        except ConnectionRefusedError:  # it is bound, and does not listen yet
            return False
        return True

    with forked(listen, user=65534), pytest.raises(UnsafeError, match="belongs to another user"):
        wait_for(connect)
    os.unlink(tmp_path / f"{RUN}.sock")
    with forked(listen, user=os.geteuid()):
        wait_for(connect)
    os.close(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_holder_answers_no_process_of_another_user(sockets):
    start()
    folder = os.open(sockets / "shardckpt", os.O_RDONLY)
    os.fchmod(folder, 0o755)  # as if the permissions of the folder did not hold others off
    os.chmod(sockets / "shardckpt" / f"{RUN}.sock", 0o666)
    answers = {}
    for user in (os.geteuid(), 65534):
        reads, writes = os.pipe()

        def ask(writes=writes):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
                client.connect(f"/proc/self/fd/{folder}/{RUN}.sock")
                with suppress(OSError):
                    client.send(encode_message({"op": "hello", "id": 1}))
                    os.write(writes, client.recv(MAX_MESSAGE_BYTES)[:1])

        with forked(ask, user=user) as pid:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        os.close(writes)
        answers[user] = os.read(reads, 1)
        os.close(reads)
    os.fchmod(folder, 0o700)
    os.close(folder)
    assert answers == {os.geteuid(): b"{", 65534: b""}


def test_a_holder_has_no_socket_of_a_network():
    pid = start()
    found = {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()}
    inodes = {link.removeprefix("socket:[").rstrip("]") for link in found if link.startswith("socket:")}
    local = {line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
    assert inodes and inodes <= local


def test_the_holder_of_a_newer_run_ends_those_that_no_process_uses(monkeypatch):
    older = start()
    holder_connection._forget_connections()
    monkeypatch.setattr(holders, "SUPERSEDED_S", 0.0)
    start_holder("newer", 1 << 20, last="COMMIT")
    wait_for(lambda: is_gone(older))
    (left,) = find_holders().running
    assert left.run == "newer"


def test_nodes_of_two_names_have_holders_of_their_own(monkeypatch):
    start()
    monkeypatch.setenv("SHARDCKPT_NODE", "b")
    assert find_holders() == ((), ())
    start_holder(RUN, 1 << 20, last="COMMIT")
    assert len(find_holders().running) == 1
    stop_holders()
    monkeypatch.setenv("SHARDCKPT_NODE", "../b")
    with pytest.raises(UsageError, match="SHARDCKPT_NODE"):
        find_holders()
    monkeypatch.delenv("SHARDCKPT_NODE")
    assert len(find_holders().running) == 1


def test_a_holder_listens_in_the_folder_for_temporary_files_that_its_client_uses(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # as TMP, TEMP or a script set it
    start()
    assert (Path(socket_folder()) / f"{RUN}.sock").exists()
    stop_holders()


def test_without_a_folder_for_temporary_files_there_is_no_folder_of_sockets(monkeypatch):
    with monkeypatch.context() as container:
        container.delenv("XDG_RUNTIME_DIR")
        container.setattr(tempfile, "tempdir", None)
        container.setattr(tempfile, "_candidate_tempdir_list", list)
        with pytest.raises(StorageError, match=r"no folder can be used for the sockets .* Set TMPDIR"):
            start()


def test_machines_that_share_the_folder_for_temporary_files_have_their_own_holders(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own, boot_id = socket_folder(), tmp_path / "boot_id"
    boot_id.write_text("0fb4b1f2-another machine\n")
    monkeypatch.setattr(holder_sockets, "_BOOT_ID", str(boot_id))
    assert Path(socket_folder()).parent == Path(own).parent
    assert socket_folder() != own


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
class TestNamesThatAnotherUserHasTaken:
    @pytest.fixture(autouse=True)
    def first(self, tmp_path, monkeypatch):
        monkeypatch.delenv("XDG_RUNTIME_DIR")
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        return Path(socket_folder())

    @pytest.mark.parametrize("kind", ["folder", "file", "link", "pipe"])
    def test_the_next_free_name_is_used_also_once_the_first_is_free_again(self, kind, first):
        make = {
            "folder": Path.mkdir,
            "file": Path.touch,
            "link": lambda path: path.symlink_to("/tmp"),
            "pipe": os.mkfifo,
        }
        for name in (first, f"{first}+1"):
            make[kind](Path(name))
            os.chown(name, 65534, 65534, follow_symlinks=False)
        assert start()
        assert Path(socket_folder()) == Path(f"{first}+2")
        first.rmdir() if kind == "folder" else first.unlink()
        assert [info.run for info in find_holders().running] == [RUN], "the folder that is there is found first"
        stop_holders()

    def test_where_all_are_taken_the_error_says_what_the_user_can_do(self, first, monkeypatch):
        monkeypatch.setattr(holder_sockets, "_NAMES", 2)
        for name in (first, f"{first}+1"):
            os.mkdir(name)
            os.chown(name, 65534, 65534)
        with pytest.raises(UnsafeError, match=r"must belong to this user.* Set XDG_RUNTIME_DIR"):
            find_holders()
        first.rmdir()


def test_a_holder_starts_with_an_interpreter_that_needs_the_path_of_its_library(tmp_path, monkeypatch):
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\n[ "$LD_LIBRARY_PATH" = {tmp_path} ] && exec {sys.executable} "$@"\nexit 127\n')
    interpreter.chmod(0o755)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(interpreter))
    assert start()


def test_a_new_process_finds_a_holder_whose_socket_is_the_same_without_a_message():
    start()
    connection = get_holder_connection(RUN)
    path = Path(socket_folder()) / f"{RUN}.sock"
    other = path.with_suffix(".moved")
    assert connection.has_same_socket()
    path.rename(other)
    assert not connection.has_same_socket()
    assert not is_reachable(RUN)
    other.rename(path)
    assert is_reachable(RUN), "its time of change is another, but it is the same holder"


def test_a_further_start_of_a_holder_sends_one_message(monkeypatch):
    start()
    sent = []
    send = holder_connection.send
    monkeypatch.setattr(holder_connection, "send", lambda *args: sent.append(args[1]["op"]) or send(*args))
    start_holder(RUN, 1 << 20, last="COMMIT")
    assert sent == ["limit"]
