"""Leases and the janitor: captures stay while a process uses them, and go after their idle time."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardckpt.errors import StorageError
from shardckpt.tiers.memory import janitor, lease, run_folders
from shardckpt.tiers.memory.janitor import keep_janitor
from shardckpt.tiers.memory.lease import LEASE, hold_lease, lock_unused, open_lease, read_lease
from shardckpt.tiers.memory.run_folders import find_base, list_run_folders
from tests.kit.runs.tier_runs import forget_process, is_alive, wait_for

RUN, OTHER = "0123456789abcdef", "fedcba9876543210"
LONG_S = 3600.0


def find(run: str = RUN) -> Path:
    return Path(find_base(run_folders.SHARED_MEMORY)) / run


def hold(run: str = RUN, idle_s: float = LONG_S, on_unused: Callable[[str], object] = lambda _: None) -> Path:
    hold_lease(str(find(run)), idle_s, 0, on_unused)
    return find(run)


def start() -> int:
    """Start the janitor; return its process id."""
    base = find().parent
    keep_janitor(str(base))
    wait_for(lambda: (base / ".janitor").exists() and (base / ".janitor").read_text() != "" and is_running(base))
    return int((base / ".janitor").read_text())


def is_running(base: Path) -> bool:
    fd = os.open(base / ".janitor", os.O_RDWR)
    try:
        return not lock_unused(fd)
    finally:
        os.close(fd)


@contextmanager
def holding_elsewhere(run: str = RUN, idle_s: float = LONG_S) -> Iterator[int]:
    """Let another process hold a lease within the context; yields its id."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        hold(run, idle_s)
        os.write(writes, b"1")
        signal.pause()
    os.read(reads, 1)
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reads)
        os.close(writes)


def test_a_janitor_removes_captures_after_their_idle_time_and_ends():
    with holding_elsewhere(idle_s=0.5):
        pid = start()
        time.sleep(1.0)
        assert [*list_run_folders()] == [RUN], "a process uses them"
        killed_at = time.monotonic()
    wait_for(lambda: not list_run_folders())
    assert time.monotonic() - killed_at >= 0.4
    wait_for(lambda: not is_alive(pid))


def test_captures_of_another_run_stay_and_one_janitor_watches_both():
    hold(OTHER)
    with holding_elsewhere(idle_s=0.2):
        pid = start()
        assert start() == pid
    wait_for(lambda: [*list_run_folders()] == [OTHER])
    assert is_alive(pid)


def test_a_killed_janitor_loses_nothing_and_the_next_use_starts_another():
    folder = hold()
    (folder / "step-00000001").mkdir()
    first = start()
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: not is_alive(first))
    assert (folder / "step-00000001").is_dir()
    assert start() != first


def test_of_processes_that_start_a_janitor_at_once_one_watches():
    base = hold().parent
    starting = [threading.Thread(target=keep_janitor, args=(str(base),)) for _ in range(3)]
    for thread in starting:
        thread.start()
    for thread in starting:
        thread.join()
    start()
    inode = (base / ".janitor").stat().st_ino
    found = [line for line in Path("/proc/locks").read_text().splitlines() if f":{inode} " in line]
    assert len([line for line in found if "->" not in line]) == 1


def test_a_janitor_is_small_and_keeps_nothing_of_its_starter():
    hold()
    with open(os.devnull) as kept:
        os.set_inheritable(kept.fileno(), True)
        pid = start()
    kinds = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
    assert kinds == {"/dev/null", str(find().parent / ".janitor")}, "and it has no socket"
    assert os.getsid(pid) != os.getsid(0)
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    assert int(status["VmRSS"].split()[0]) < 40_000
    assert "torch" not in Path(f"/proc/{pid}/maps").read_text()


def test_a_janitor_starts_with_an_interpreter_that_needs_the_path_of_its_library(tmp_path, monkeypatch):
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\n[ "$LD_LIBRARY_PATH" = {tmp_path} ] && exec {sys.executable} "$@"\nexit 127\n')
    interpreter.chmod(0o755)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(interpreter))
    hold()
    assert start()


def test_a_janitor_that_cannot_be_started_is_logged_and_captures_stay(monkeypatch, caplog):
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    folder = hold()
    keep_janitor(str(folder.parent))
    assert "no process removes the captures" in caplog.text and folder.is_dir()


class Looks:
    """Looks of one janitor, with a clock that tests set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.seen = float(int(time.monotonic())), {}  # sums of whole seconds are exact
        monkeypatch.setattr(janitor.time, "monotonic", lambda: self.now)

    def look(self, after_s: float = 0.0, **options: float) -> list[str]:
        """Look after some seconds; return the runs that are left."""
        self.now += after_s
        janitor.look_at(str(find()), self.seen, **options)
        return [*list_run_folders()]


def test_captures_are_idle_from_the_look_that_first_finds_nobody(monkeypatch):
    looks = Looks(monkeypatch)
    hold()
    assert looks.look() == looks.look(2 * LONG_S) == [RUN], "in use"
    forget_process()
    assert looks.look(LONG_S) == looks.look(LONG_S - 1.0) == [RUN]
    assert looks.look(1.0) == []


def test_a_process_that_came_and_went_between_two_looks_counts(monkeypatch):
    looks = Looks(monkeypatch)
    for _ in range(3):
        hold()
        forget_process()
        assert looks.look() == looks.look(LONG_S - 1.0) == [RUN]
    assert looks.look(1.0) == []


def test_a_janitor_that_starts_anew_trusts_no_time_that_another_wrote(monkeypatch):
    looks = Looks(monkeypatch)
    hold()
    forget_process()
    looks.look()
    looks.seen.clear()
    assert looks.look(2 * LONG_S) == [RUN]
    assert looks.look(LONG_S) == []


def test_the_start_of_another_run_removes_captures_that_nobody_has_used_for_minutes(monkeypatch):
    looks, most_s = Looks(monkeypatch), janitor.SUPERSEDED_S
    hold()
    forget_process()
    looks.look()
    assert looks.look(most_s - 1.0, most_s=most_s) == [RUN]
    assert looks.look(1.0) == [RUN], "no run has started"
    assert looks.look(most_s=most_s) == []


def test_a_janitor_notices_the_start_of_another_run(monkeypatch):
    hold()
    forget_process()
    limits: list[float] = []

    def note(folder: str, seen: dict[str, object], most_s: float) -> float:
        limits.append(most_s)
        seen[folder] = None
        return 1.0

    def start_other(_seconds: float) -> None:
        if len(limits) == 1:
            hold(OTHER)
        elif len(limits) > 4:
            (find().parent / ".janitor").unlink()

    monkeypatch.setattr(janitor, "look_at", note)
    monkeypatch.setattr(janitor.time, "sleep", start_other)
    janitor.watch(str(find().parent))
    assert limits == [float("inf"), *[janitor.SUPERSEDED_S] * 2, *[float("inf")] * 2]


@pytest.mark.parametrize("content", [b"", b"junk", b"[1]", b'["x", 1, 2]', b"[1e999, 1, 1e999]", b"[" * 100_000])
def test_a_missing_or_damaged_lease_starts_now(content):
    folder = hold()
    forget_process()
    (folder / LEASE).write_bytes(content)
    janitor.look_at(str(folder), {})
    fd = open_lease(str(folder))
    found = read_lease(fd)
    os.close(fd)
    assert 0.0 <= time.monotonic() - found.used_at < 60.0 and found.idle_s == lease.IDLE_S


def test_captures_in_a_full_file_system_are_held_and_removed_after_their_idle_time(monkeypatch):
    looks = Looks(monkeypatch)
    hold()
    forget_process()

    def fill(_fd: int, _data: bytes, _offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(lease.os, "pwrite", fill)
    hold()
    assert looks.look() == looks.look(2 * LONG_S) == [RUN], "in use"
    forget_process()
    assert looks.look() == looks.look(LONG_S - 1.0) == [RUN]
    assert looks.look(1.0) == []


def test_a_process_that_comes_while_its_captures_are_removed_makes_another_folder(monkeypatch):
    """It opens the lease before the removal, and gets the lock after it."""
    folder = hold()
    forget_process()
    (folder / "step-00000001").mkdir()
    looks, lock = Looks(monkeypatch), lease._lock
    looks.look()
    left: list[list[str]] = []

    def remove_between(fd: int, kind: int) -> bool:
        if not left:
            left.append([])
            left[0] = looks.look(most_s=0.0)
        return lock(fd, kind)

    monkeypatch.setattr(lease, "_lock", remove_between)
    hold()
    assert left == [[]] and [*list_run_folders()] == [RUN] and not (folder / "step-00000001").exists()
    assert looks.look(LONG_S) == looks.look(LONG_S) == [RUN], "the process holds the lease of the new folder"


def test_only_a_process_that_is_alone_may_remove_what_others_left():
    seen: list[str] = []
    with holding_elsewhere():
        hold(on_unused=seen.append)
        assert seen == []
    forget_process()
    hold(on_unused=seen.append)
    assert seen == [str(find())]
    hold(on_unused=seen.append)
    assert len(seen) == 1, "once"


def test_a_forked_process_keeps_no_lease_of_its_parent():
    script = f"""
import os, sys, time
sys.path.insert(0, {str(Path(__file__).resolve().parents[3])!r})
from shardckpt.tiers.memory import run_folders
from shardckpt.tiers.memory.lease import hold_lease
run_folders.SHARED_MEMORY = {run_folders.SHARED_MEMORY!r}
hold_lease({str(find())!r}, 60.0, 0, lambda _: None)
if os.fork() == 0:
    print("ready", flush=True)
    time.sleep(60)
os._exit(0)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        process.wait(30)
        fd = open_lease(str(find()))
        wait_for(lambda: lock_unused(fd))
        os.close(fd)
        os.killpg(process.pid, signal.SIGKILL)


def test_a_lease_that_somebody_locks_for_long_is_an_error_within_the_time_limit(monkeypatch):
    monkeypatch.setattr(lease, "_LOCK_S", 0.2)
    hold()
    forget_process()
    fd = open_lease(str(find()))
    assert lock_unused(fd)
    with pytest.raises(StorageError, match="another process locks the lease"):
        hold()
    os.close(fd)
    hold()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_janitor_leaves_folders_of_other_users_alone(tmp_path):
    base = hold().parent
    theirs = tmp_path / "theirs"
    (theirs / OTHER).mkdir(parents=True)
    os.chown(theirs, 65534, 65534)
    (base / "at-00000000").symlink_to(theirs)
    forget_process()
    hold(idle_s=0.01)
    forget_process()
    janitor.watch(str(base))
    assert not list_run_folders() and (theirs / OTHER).is_dir()
