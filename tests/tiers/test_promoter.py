"""Promotion from a tier to a farther one: the same bytes, bounded, and nothing leaves its tier before."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import xxhash

import shardckpt
from shardckpt import Checkpointer, Local, PeerMemory
from shardckpt.errors import ChecksumError, NoSpaceError, StorageError, UnsupportedError
from shardckpt.events import FallbackEvent, PromotionEvent
from shardckpt.native import stored_folders
from shardckpt.storage.linux_syscalls import LOW_PRIORITY
from shardckpt.storage.resolve_url import open_store
from shardckpt.storage.store import read_bytes
from shardckpt.tiers import capture_tier, promoter
from shardckpt.tiers.memory_tier import MemoryTier
from shardckpt.tiers.promoter import Promotion
from tests.kit.runs.tier_runs import forget_process, make_state

DEADLINE_S = 30.0


class Run:
    """A run with both tiers, and its events."""

    def __init__(self, folder: Path, *, local_every: int = 2, **options: object) -> None:
        self.local = folder / "local"
        self.events: list[shardckpt.events.OperationEvent] = []
        tiers = [PeerMemory(max_bytes="1GB", **options), Local(self.local, every=local_every, keep_last=2)]
        self.ck = Checkpointer(folder / "run", save_every=100, tiers=tiers, on_event=self.events.append)

    def save(self, *steps: int) -> None:
        for step in steps:
            self.ck.save(step, make_state(step))

    def list(self, kind: type) -> list:
        return [event for event in self.events if isinstance(event, kind)]

    def list_local(self) -> list[int]:
        return [step.number for step in shardckpt.ls(self.local).complete]


def test_a_step_of_both_tiers_is_saved_once_and_copied_byte_for_byte(tmp_path):
    run = Run(tmp_path, local_every=1)
    run.save(1)
    run.ck.wait()
    memory, local = run.ck.durability(1).copies
    assert (memory.tier, local.tier) == ("memory", "local") and memory.save == local.save
    stores = [open_store(copy.path) for copy in (memory, local)]
    names = {entry.name for entry in stores[0].list()}
    assert names == {entry.name for entry in stores[1].list()} and "COMMIT" in names
    for name in names:
        first, second = (read_bytes(store, name, 0, store.size(name)) for store in stores)
        assert first == second
    assert [event.path for event in run.list(shardckpt.events.SaveEvent)] == [memory.path]
    (event,) = run.list(PromotionEvent)
    assert (event.path, event.source, event.tier, event.step) == (local.path, memory.path, "local", 1)
    assert event.nbytes > 1200 and event.seconds > 0 and event.error is None
    assert local.verified_at >= memory.verified_at
    shardckpt.stop_tiers()
    forget_process()
    into = {"w": torch.zeros(300), "step": 0}
    assert run.ck.restore(into) == 1 and into["step"] == 1 and into["w"][7] == 1


def test_a_promotion_hashes_each_byte_once(tmp_path, monkeypatch):
    """It compares what it reads with the hashes of the capture, and computes no others for the copy."""
    hashed: list[int] = []
    digest, hasher = xxhash.xxh3_64_digest, xxhash.xxh3_64

    def note(data) -> None:
        if threading.current_thread().name == "shardckpt-promote":
            hashed.append(memoryview(data).nbytes)

    class CountingHasher:
        def __init__(self, data=b"") -> None:
            note(data)
            self._hasher = hasher(data)

        def update(self, data) -> None:
            note(data)
            self._hasher.update(data)

        def __getattr__(self, name: str) -> object:
            return getattr(self._hasher, name)

    monkeypatch.setattr(xxhash, "xxh3_64_digest", lambda data: note(data) or digest(data))
    monkeypatch.setattr(xxhash, "xxh3_64", CountingHasher)
    run = Run(tmp_path, local_every=1)
    run.ck.save(1, {"w": torch.arange(1 << 20)})
    run.ck.wait()
    assert run.ck.durability(1).copies[1].tier == "local"
    assert sum(hashed) == sum(file.stat().st_size for file in run.local.glob("step-*/*.safetensors")) > 8 << 20


def begin_a_copy(run: Run, may_copy: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save two steps, of which the first begins to be copied; copies go on once they may."""
    begun, copy = threading.Event(), promoter.copy_stored_step

    def copy_later(*args: object) -> int:
        begun.set()
        assert may_copy.wait(DEADLINE_S)
        return copy(*args)

    monkeypatch.setattr(promoter, "copy_stored_step", copy_later)
    run.save(2, 3)
    assert begun.wait(DEADLINE_S)


def test_a_step_stays_in_memory_until_it_is_copied_and_leaves_then(tmp_path, monkeypatch):
    run, may_copy = Run(tmp_path), threading.Event()
    begin_a_copy(run, may_copy, monkeypatch)
    run.save(5, 7)
    run.ck._saver._captures._tiers[0].settle()
    (held,) = shardckpt.list_tiers().runs
    assert held.steps == (2, 7), "the rules would keep 7 alone"
    assert [copy.tier for copy in run.ck.durability(2).copies] == ["memory"], "nothing is claimed before the copy"
    may_copy.set()
    run.ck.wait()
    assert [held.steps for held in shardckpt.list_tiers().runs] == [(7,)] and run.list_local() == [2]


def test_a_tier_that_is_too_slow_gives_up_its_oldest_step_with_an_event(tmp_path, monkeypatch):
    run, may_copy = Run(tmp_path), threading.Event()
    begin_a_copy(run, may_copy, monkeypatch)
    run.save(4, 6, 8, 9)
    run.ck._saver._captures._tiers[0].settle()
    (given_up,) = run.list(FallbackEvent)
    assert given_up.step == 4 and "newer steps wait" in given_up.warnings[0]
    may_copy.set()
    run.ck.wait()
    assert [event.step for event in run.list(PromotionEvent)] == [2, 6, 8]
    assert run.list_local() == [6, 8] and run.ck.durability(4).copies == ()


def test_a_copy_that_fails_is_one_warning_an_event_and_no_claim(tmp_path, monkeypatch):
    def refuse(*args: object) -> int:
        raise NoSpaceError("no space")

    run = Run(tmp_path)
    with monkeypatch.context() as full, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        full.setattr(promoter, "copy_stored_step", refuse)
        run.save(2, 3)
        run.ck.wait()
    assert sum("not captured in" in str(each.message) for each in warned) == 1
    (event,) = run.list(PromotionEvent)
    assert isinstance(event.error, NoSpaceError) and run.ck.durability(2).copies == ()
    run.save(4, 6)
    run.ck.wait()
    assert run.list_local() == [6], "one attempt is left out"


def test_where_warnings_are_errors_a_copy_that_fails_ends_no_later_copies(tmp_path, monkeypatch):
    def refuse(*args: object) -> int:
        raise NoSpaceError("no space")

    run = Run(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with monkeypatch.context() as full:
            full.setattr(promoter, "copy_stored_step", refuse)
            run.save(2)
            run.ck.wait()
        run.save(4, 6)
        run.ck.wait()
    assert run.list_local() == [6], "one attempt is left out"
    assert [held.steps for held in shardckpt.list_tiers().runs] == [(6,)], "nothing waits for a copy"


def test_a_step_that_is_saved_again_while_it_is_copied_is_no_fault_of_the_tier(tmp_path, monkeypatch):
    run, begun, may_read = Run(tmp_path), threading.Event(), threading.Event()
    read = stored_folders.read_blocks

    def read_later(*args):
        if not begun.is_set():
            begun.set()
            assert may_read.wait(DEADLINE_S)
        return read(*args)

    monkeypatch.setattr(stored_folders, "read_blocks", read_later)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.ck.save(2, make_state(1))
        run.ck._saver._captures._tiers[0].settle()
        assert begun.wait(DEADLINE_S)
        run.ck.save(2, make_state(2), overwrite=True)
        run.ck._saver._captures._tiers[0].settle()
        may_read.set()
        run.ck.wait()
    (given_up,) = run.list(FallbackEvent)
    assert given_up.step == 2 and "saved again" in given_up.warnings[0]
    assert [(event.step, event.error) for event in run.list(PromotionEvent)] == [(2, None)]
    assert shardckpt.load(run.local / "step-00000002")["w"][0] == 2
    run.save(4)
    run.ck.wait()
    assert run.list_local() == [2, 4], "no step is left out"


@contextlib.contextmanager
def memory_refused() -> Iterator[None]:
    """Let memory take no step within the context: the folder takes it."""

    def refuse(*_: object) -> None:
        raise StorageError("the folder cannot be used")

    with pytest.MonkeyPatch.context() as patch, pytest.warns(UserWarning, match="not captured in memory"):
        patch.setattr(MemoryTier, "open_node", refuse)
        yield


def test_a_copy_does_not_replace_a_later_save_of_its_step_in_the_folder(tmp_path, monkeypatch):
    run, may_copy = Run(tmp_path), threading.Event()
    begin_a_copy(run, may_copy, monkeypatch)
    with memory_refused():
        run.ck.save(2, make_state(22), overwrite=True)
    run.ck._saver._captures._tiers[1].settle()
    may_copy.set()
    run.ck.wait()
    (given_up,) = [event for event in run.list(FallbackEvent) if "saved again" in event.warnings[0]]
    assert given_up.step == 2 and not run.list(PromotionEvent)
    assert [copy.tier for copy in run.ck.durability(2).copies] == ["local"]
    assert shardckpt.load(run.local / "step-00000002")["step"] == 22


def test_a_process_that_restored_nothing_claims_no_copy_of_an_earlier_save(tmp_path):
    run = Run(tmp_path)
    run.save(2)
    run.ck.wait()
    with memory_refused():
        run.ck.save(2, make_state(22), overwrite=True)
    run.ck.wait()
    assert [copy.tier for copy in Run(tmp_path).ck.durability(2).copies] == ["local"]


def test_a_save_into_the_folder_commits_after_a_copy_that_replaces_its_step(tmp_path, monkeypatch):
    run, is_replacing, may_end = Run(tmp_path), threading.Event(), threading.Event()
    write = stored_folders.write_commit

    def write_late(*args: object) -> int:
        is_replacing.set()
        assert may_end.wait(DEADLINE_S)
        return write(*args)

    monkeypatch.setattr(stored_folders, "write_commit", write_late)
    run.save(2)
    assert is_replacing.wait(DEADLINE_S)
    with memory_refused():
        run.ck.save(2, make_state(22), overwrite=True)
    assert not run.ck._saver._captures._tiers[1].pending.handle._task.join(0.2), (
        "the training does not wait, the capture does"
    )
    may_end.set()
    run.ck.wait()
    assert shardckpt.load(run.local / "step-00000002")["step"] == 22


@pytest.mark.parametrize("is_of_tier", [True, False])
def test_a_copy_is_not_given_up_for_a_later_save_that_fails(tmp_path, monkeypatch, is_of_tier):
    run, may_copy = Run(tmp_path), threading.Event()
    begin_a_copy(run, may_copy, monkeypatch)

    def fail(*args: object, **options: object) -> None:
        raise StorageError("i/o error")

    with monkeypatch.context() as failing:
        if is_of_tier:
            failing.setattr(capture_tier, "start_async_save", fail)
        with memory_refused(), contextlib.nullcontext() if is_of_tier else pytest.raises(UnsupportedError):
            run.ck.save(2, make_state(22) if is_of_tier else {"x": object()}, overwrite=True)
    may_copy.set()
    run.ck.wait()
    assert shardckpt.load(run.local / "step-00000002")["step"] == 2


def test_copies_that_are_outdated_take_no_place_of_others(tmp_path, monkeypatch):
    run, may_copy = Run(tmp_path), threading.Event()
    begin_a_copy(run, may_copy, monkeypatch)
    run.save(4, 6)
    for value in (66, 666):
        run.ck.save(6, make_state(value), overwrite=True)
    run.ck._saver._captures._tiers[0].settle()
    may_copy.set()
    run.ck.wait()
    assert run.list_local() == [4, 6] and shardckpt.load(run.local / "step-00000006")["step"] == 666


def test_a_capture_that_completes_behind_a_later_save_of_its_step_is_not_copied(tmp_path):
    run = Run(tmp_path)
    memory, local = run.ck._saver._captures._tiers
    promoter = run.ck._saver._captures._promoter
    late = promoter.note_capture(2, memory)
    with memory_refused():
        run.save(2)
    run.ck.wait()
    before = shardckpt.ls(run.local)
    promoter.add(Promotion(2, memory, local, capture=late))
    run.ck.wait()
    (given_up,) = [event for event in run.list(FallbackEvent) if "saved again" in event.warnings[0]]
    assert given_up.step == 2 and shardckpt.ls(run.local) == before


def test_a_capture_that_is_damaged_in_memory_is_not_copied(tmp_path, monkeypatch):
    run, write = Run(tmp_path), os.write

    def write_flipped(fd: int, data: memoryview) -> int:
        changed = bytearray(data)
        changed[-1] ^= len(changed) > 1000  # the data alone, which was hashed before
        return write(fd, changed)

    with monkeypatch.context() as flipped, pytest.warns(UserWarning, match="not captured in"):
        flipped.setattr(os, "write", write_flipped)
        run.save(2)
        run.ck.wait()
    (event,) = run.list(PromotionEvent)
    assert isinstance(event.error, ChecksumError) and not (run.local / "step-00000002").exists()


def test_a_step_that_memory_does_not_take_is_captured_in_the_folder_itself(tmp_path):
    run = Run(tmp_path, every=3)
    run.save(2, 6)
    run.ck.wait()
    assert run.list_local() == [2, 6]
    assert [event.step for event in run.list(PromotionEvent)] == [6]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a priority belongs to the process")
def test_a_save_copies_its_step_itself_where_python_starts_no_more_threads(tmp_path, monkeypatch):
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    run = Run(tmp_path, local_every=1)
    run.save(1)
    run.ck.wait()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    run.save(2)
    assert run.list_local() == [1, 2]
    run.ck.wait()


def test_captures_promotions_and_saves_in_the_root_run_below_the_training(tmp_path):
    own, found = os.getpriority(os.PRIO_PROCESS, 0), set()

    def note(event: shardckpt.events.OperationEvent) -> None:
        found.add((event.operation, event.path.partition("://")[0], os.getpriority(os.PRIO_PROCESS, 0) - own))

    tiers = [PeerMemory(max_bytes="1GB"), Local(tmp_path / "local")]
    ck = Checkpointer(tmp_path / "run", save_every=1, tiers=tiers, on_event=note)
    ck.save(1, make_state(1))
    ck.wait()
    low = min(LOW_PRIORITY, 19 - own)
    local, root = str(tmp_path / "local" / "step-00000001"), str(tmp_path / "run" / "step-00000001")
    assert found == {("save", "shardckpt-memory", low), ("promotion", local, low), ("save", root, low)}
    assert os.getpriority(os.PRIO_PROCESS, 0) == own


ENDING_SCRIPT = """
import sys, threading
import torch
from shardckpt import Checkpointer, Local, PeerMemory
from shardckpt.tiers import capture_tier, promoter
from shardckpt.tiers.memory import run_folders

run_folders.SHARED_MEMORY = sys.argv[2]
copy, is_ending = promoter._copy, threading.Event()

def copy_late(*args):
    is_ending.wait()
    return copy(*args)

promoter._copy = copy_late
folder = sys.argv[1]
tiers = [PeerMemory(every=1, max_bytes="1GB"), Local(folder + "/local", every=1, keep_last=5)]
ck = Checkpointer(folder + "/run", save_every=100, tiers=tiers)
for step in (1, 2):
    ck.save(step, {"w": torch.ones(300)})
threading._register_atexit(is_ending.set)
"""


def test_a_process_that_ends_without_wait_waits_for_its_copies(tmp_path, memory):
    command = [sys.executable, "-c", ENDING_SCRIPT, str(tmp_path), str(memory)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert [step.number for step in shardckpt.ls(tmp_path / "local").complete] == [1, 2]
