"""A save in the background: a snapshot at the call, bounded memory, failures heard once, collectives kept apart."""

from __future__ import annotations

import contextlib
import gc
import os
import posix
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardckpt
from shardckpt.checkpoint.save import async_save, payload_writer, planner, session, staging
from shardckpt.checkpoint.save.async_save import BUFFERS, _Copy
from shardckpt.checkpoint.save.handle import AsyncSaveTask
from shardckpt.checkpoint.save.staging import StagingArea
from shardckpt.checkpoint.stateful.tensor_bytes import join_small
from shardckpt.native.payload import FileHasher, PayloadFile, build_payloads
from shardckpt.offline.verify import verify
from shardckpt.state import model_state_dict, optim_state_dict
from shardckpt.storage.linux_syscalls import LOW_PRIORITY
from tests.kit.damage.interruptions import interrupted_by
from tests.kit.models.states import FRONT_ENDS, Net, differing, flat, step, whole
from tests.kit.ranks.harness import mark, outcomes, raised_everywhere, run, since, stored_bytes
from tests.kit.ranks.interpreters import RunScript

MIB = 1 << 20
STARTS_THREADS = pytest.mark.skipif(
    (3, 12) <= sys.version_info < (3, 12, 2), reason="a process that ends starts no thread before Python 3.12.2"
)


@contextmanager
def writes(act) -> Iterator[None]:
    """Do something before every larger write to the disk."""
    original = os.write

    def write(fd: int, data) -> int:
        if len(data) > 2000:
            act()
        return original(fd, data)

    os.write = write
    try:
        yield
    finally:
        os.write = original


@contextmanager
def held_back() -> Iterator[threading.Event]:
    """Let no write through before the event is set, at the latest when the block ends."""
    go = threading.Event()
    with writes(lambda: go.wait(20)):
        try:
            yield go
        finally:
            go.set()


def full() -> None:
    raise OSError(28, "No space left on device")


def threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("shardckpt")]


class TestSnapshot:
    def test_what_changes_after_the_call_never_reaches_the_files(self, tmp_path: Path) -> None:
        model = nn.Linear(300, 200)
        optim = torch.optim.Adam(model.parameters())
        model(torch.rand(2, 300)).sum().backward()
        optim.step()
        state = {
            "model": model,
            "optim": optim,
            "turned": torch.rand(200, 300).t(),
            "array": np.arange(5000.0),
            "history": [1, {"loss": 0.5}],
        }
        before = {"turned": state["turned"].clone(), "weight": model.weight.detach().clone()}
        moment = optim.state[model.weight]["exp_avg"].clone()
        with held_back():
            handle = shardckpt.async_save(state, tmp_path / "c")
            assert not handle.done()
            with torch.no_grad():
                for tensor in (model.weight, model.bias, state["turned"], optim.state[model.weight]["exp_avg"]):
                    tensor.fill_(7)
            state["array"][:] = 7
            state["history"][1]["loss"] = state["history"][0] = 7
        handle.result()
        found = shardckpt.load(tmp_path / "c")
        assert torch.equal(found["turned"], before["turned"])
        assert torch.equal(found["model"]["weight"], before["weight"])
        assert torch.equal(found["optim"]["state"]["weight"]["exp_avg"], moment)
        assert np.array_equal(found["array"], np.arange(5000.0))
        assert found["history"] == [1, {"loss": 0.5}]
        assert verify(str(tmp_path / "c")).ok

    def test_the_files_are_those_of_save(self, tmp_path: Path) -> None:
        state = {"model": nn.Linear(50, 40), "t": torch.rand(3000), "step": 3}
        shardckpt.save(state, tmp_path / "a")
        shardckpt.async_save(state, tmp_path / "b", custom_metadata={"note": "x"}).result()
        names = [sorted(file.name[-12:] for file in (tmp_path / each).iterdir()) for each in "ab"]
        assert names[0] == names[1] and "index.json" in str(names)
        assert shardckpt.diff(str(tmp_path / "a"), str(tmp_path / "b")).equal

    def test_a_state_larger_than_the_budget_is_copied_in_rounds_while_the_call_waits(self, tmp_path: Path) -> None:
        state = {f"t{n}": torch.rand(300_000) for n in range(4)}
        expected = {name: tensor.clone() for name, tensor in state.items()}
        handles = []
        with held_back() as go:
            call = threading.Thread(
                target=lambda: handles.append(shardckpt.async_save(state, tmp_path / "c", max_staging_bytes="1MiB"))
            )
            call.start()
            call.join(0.3)
            assert call.is_alive(), "the call does not wait for the writer, so it has not copied all"
            go.set()
            call.join(20)
        for tensor in state.values():
            tensor.zero_()
        handles[0].result()
        assert BUFFERS.nbytes <= MIB
        found = shardckpt.load(tmp_path / "c")
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())

    def test_fifty_saves_make_no_new_buffer_and_hold_no_more_memory(self, tmp_path: Path) -> None:
        state = {"model": nn.Linear(1000, 500), "long": torch.rand(200_000)}

        def save(number: int) -> None:
            shardckpt.async_save({**state, "step": number}, tmp_path / "c", overwrite=True).result()

        for number in range(3):
            save(number)
        gc.collect()
        made, held, resident = BUFFERS.made, stored_bytes(), resident_bytes()
        for number in range(50):
            save(number)
        assert (BUFFERS.made, stored_bytes(), threads()) == (made, held, [])
        assert resident_bytes() - resident < 2 * MIB, "a leaked copy of this state would be 140 MiB"

    def test_a_handle_and_what_it_saved_keep_no_part_of_the_state(self, tmp_path: Path) -> None:
        held, buffers = stored_bytes(), BUFFERS.nbytes
        state = {"t": torch.rand(100_000)}
        with held_back():
            handle = shardckpt.async_save(state, tmp_path / "c")
            del state
            assert stored_bytes() - held == BUFFERS.nbytes - buffers
        handle.result()


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_buffer_is_written_by_one_call_and_hashed_by_few_tasks_if_hashes_wait(tmp_path: Path) -> None:
    """Beside Python code, each call that releases the interpreter's lock waits for it."""
    tasks = []
    split = FileHasher.split

    def recorded(hasher: FileHasher, data: memoryview, most: int) -> list:
        tasks.extend(found := split(hasher, data, most))
        return found

    state = {"t": torch.ones(72 * MIB)}  # two buffers
    with (
        patch.object(payload_writer, "perf_counter", count().__next__),  # each hash waits for a second
        patch.object(os, "write", wraps=os.write) as write,
        patch.object(FileHasher, "split", recorded),
    ):
        shardckpt.async_save(state, tmp_path / "c").result()
    sizes = [len(call.args[1]) for call in write.call_args_list]
    assert [nbytes for nbytes in sizes if nbytes > MIB] == [256 * MIB, 32 * MIB]
    assert len(tasks) <= 12
    assert verify(str(tmp_path / "c")).ok


def test_the_thread_runs_nothing_before_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = []

    def copy(tensors: Iterable[torch.Tensor]) -> Iterator[bytes | torch.Tensor]:
        time.sleep(0.05)
        yield from join_small(tensors)
        order.append("copied")

    def build(*arguments: Any) -> tuple[PayloadFile, ...]:
        order.append("built headers")
        return build_payloads(*arguments)

    monkeypatch.setattr(staging, "join_small", copy)
    monkeypatch.setattr(session, "build_payloads", build)
    shardckpt.async_save({"t": torch.arange(9)}, str(tmp_path / "step")).result(30)
    assert order == ["copied", "built headers"]


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python starts no thread, as in `atexit` since 3.12."""

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)


@pytest.mark.usefixtures("no_threads")
class TestWithoutThreads:
    def test_the_call_saves_a_state_that_is_larger_than_its_buffers(self, tmp_path: Path) -> None:
        state = {"t": torch.rand(1_000_000), "step": 7}
        handle = shardckpt.async_save(state, tmp_path / "c", max_staging_bytes="1MiB")
        assert handle.done()
        handle.result()
        assert not differing(shardckpt.load(tmp_path / "c"), state)
        assert handle.timings.write > 0

    def test_an_error_is_raised_by_the_result_and_nothing_is_left(self, tmp_path: Path) -> None:
        with patch.object(session, "write_payloads", side_effect=OSError("no disk")):
            handle = shardckpt.async_save({"t": torch.rand(9)}, tmp_path / "c")
        with pytest.raises(OSError, match="no disk"):
            handle.result()
        assert not list(tmp_path.iterdir())
        shardckpt.async_save({"t": torch.rand(9)}, tmp_path / "c").result()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a priority belongs to the process")
def test_threads_of_a_background_save_have_a_lower_priority_than_those_of_another(
    tmp_path: Path,
) -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    found: set[tuple[str, int]] = set()
    split = FileHasher.split

    def note(kind: str) -> None:
        found.add((kind, os.getpriority(os.PRIO_PROCESS, 0) - own))

    def hashing(hasher: FileHasher, data: memoryview, most: int) -> list[Callable[[], None]]:
        return [lambda task=task: [note("hash"), task()] for task in split(hasher, data, most)]

    state = {"t": torch.ones(4 * MIB)}
    with patch.object(FileHasher, "split", hashing), writes(lambda: note("write")):
        shardckpt.async_save(state, tmp_path / "background").result()
        assert found == {(kind, min(LOW_PRIORITY, 19 - own)) for kind in ("write", "hash")}
        found.clear()
        shardckpt.save(state, tmp_path / "foreground")
    assert found == {("write", 0), ("hash", 0)}
    assert os.getpriority(os.PRIO_PROCESS, 0) == own


class TestOutcome:
    def test_a_handle_tells_when_it_is_done_and_what_took_how_long(self, tmp_path: Path) -> None:
        events = []
        with held_back() as go:
            handle = shardckpt.async_save({"t": torch.rand(9000)}, tmp_path / "c", on_event=events.append)
            assert not handle.done()
            with pytest.raises(TimeoutError, match=r"not done after 0\.1"):
                handle.result(timeout=0.1)
            assert handle.timings.write == 0 and handle.timings.stall > 0
            go.set()
            assert handle.result() is None
        assert handle.done() and handle.path == str(tmp_path / "c")
        times = handle.timings
        assert times.write > 0.1 and times.publish > 0
        assert times.stall == times.waiting + times.capture + times.staging
        (event,) = events
        assert set(event.phases) == {"waiting", "capture", "staging", "write", "publish"}
        assert event.error is None and event.is_background and event.seconds >= times.write

    def test_a_callback_that_fails_costs_no_checkpoint(self, tmp_path: Path, caplog) -> None:
        def broken(event) -> None:
            raise KeyError(event.operation)

        shardckpt.async_save({"t": torch.rand(3)}, tmp_path / "c", on_event=broken).result()
        assert torch.is_tensor(shardckpt.load(tmp_path / "c")["t"])
        assert f"on_event failed at the save of {tmp_path / 'c'}" in caplog.text

    def test_a_full_disk_is_raised_by_result_and_nothing_is_left(self, tmp_path: Path) -> None:
        shardckpt.save({"t": torch.ones(3)}, tmp_path / "c")
        events = []
        with writes(full):
            handle = shardckpt.async_save(
                {"t": torch.rand(9000)}, tmp_path / "c", overwrite=True, on_event=events.append
            )
            for _ in range(2):
                with pytest.raises(OSError, match="No space left"):
                    handle.result()
        assert handle.done() and [type(each.error) for each in events] == [shardckpt.errors.NoSpaceError]
        assert os.listdir(tmp_path) == ["c"]
        assert torch.equal(shardckpt.load(tmp_path / "c")["t"], torch.ones(3))
        shardckpt.async_save({"t": torch.zeros(3)}, tmp_path / "c", overwrite=True).result()

    @pytest.mark.parametrize("verb", ["save", "async_save"])
    def test_a_failure_nobody_asked_about_is_raised_by_the_next_save_once(self, tmp_path: Path, verb: str) -> None:
        with writes(full):
            shardckpt.async_save({"t": torch.rand(9000)}, tmp_path / "a")
            wait_for_no_thread()
        with pytest.raises(
            shardckpt.errors.StorageError, match=r"in the background to .*a, failed: .*No space left"
        ) as caught:
            getattr(shardckpt, verb)({"t": torch.rand(3)}, tmp_path / "b")
        assert "No space left" in str(caught.value.__cause__)
        assert os.listdir(tmp_path) == []
        later = getattr(shardckpt, verb)({"t": torch.rand(3)}, tmp_path / "b")
        if later is not None:
            later.result()
        assert os.listdir(tmp_path) == ["b"]

    def test_a_copy_that_fails_is_raised_by_result(self, tmp_path: Path, monkeypatch) -> None:
        def too_much(nbytes: int) -> None:
            raise MemoryError("no memory for a buffer")

        monkeypatch.setattr(BUFFERS, "_make", too_much)
        BUFFERS.forget()
        handle = shardckpt.async_save({"t": torch.rand(9000)}, tmp_path / "c")
        with pytest.raises(MemoryError, match="no memory for a buffer"):
            handle.result()
        assert os.listdir(tmp_path) == []

    @pytest.mark.timeout(60)
    def test_a_writer_that_fails_ends_a_call_that_waits_for_buffers(self, tmp_path: Path) -> None:
        with writes(full):
            handle = shardckpt.async_save({"t": torch.rand(1_000_000)}, tmp_path / "c", max_staging_bytes="1MiB")
            with pytest.raises(OSError, match="No space left"):
                handle.result()
        assert os.listdir(tmp_path) == []

    def test_what_is_known_before_anything_is_copied_is_raised_by_the_call(self, tmp_path: Path) -> None:
        shardckpt.save({"t": torch.ones(3)}, tmp_path / "c")
        with pytest.raises(FileExistsError):
            shardckpt.async_save({"t": torch.rand(3)}, tmp_path / "c")
        with pytest.raises(shardckpt.errors.UnsupportedError, match=r"a\.b"):
            shardckpt.async_save({"a": {"b": object()}}, tmp_path / "d")
        for wrong in (
            {"max_staging_bytes": "12 parsecs"},
            {"max_staging_bytes": 5},
            {"on_busy": "hope"},
            {"on_event": 5},
        ):
            with pytest.raises(shardckpt.errors.UsageError, match=next(iter(wrong)) if "on_event" in wrong else None):
                shardckpt.async_save({"t": torch.rand(3)}, tmp_path / "d", **wrong)
        assert os.listdir(tmp_path) == ["c"]


def ctrl_c(*_args: object, **_options: object) -> None:
    raise KeyboardInterrupt


def after(method):
    """Return a method that does what it does, and is ended by a signal before it returns."""

    def interrupted(*args, **options):
        method(*args, **options)
        raise KeyboardInterrupt

    return interrupted


def once_claimed(patch, method):
    """Return a method that waits until the thread has claimed the save, which otherwise nobody continues."""
    claim, is_claimed = AsyncSaveTask.claim, threading.Event()

    def claim_and_note(self) -> bool:
        is_first = claim(self)
        is_claimed.set()
        return is_first

    def wait_and_run(*args):
        assert is_claimed.wait(30)
        return method(*args)

    patch.setattr(AsyncSaveTask, "claim", claim_and_note)
    return wait_and_run


INTERRUPTIONS = {
    "while the state is traced": (planner, "trace_state", ctrl_c),
    "while the state is flattened": (planner, "flatten_state", ctrl_c),
    "before the thread is started": (threading.Thread, "start", ctrl_c),
    "when the thread was started": (threading.Thread, "start", after(threading.Thread.start)),
    "when ranks have agreed": (session.SaveSession, "plan", after(session.SaveSession.plan)),
    "before anything is copied": (session.SaveSession, "stage", ctrl_c),
    "while it is copied": (StagingArea, "fill", ctrl_c),
    "when it was copied": (StagingArea, "fill", after(StagingArea.fill)),
    "while that is told": (_Copy, "_fail", ctrl_c),
}


@pytest.mark.timeout(60)
class TestInterrupted:
    """A signal may end the call at any point: the save is taken back, the next one works, the process can end."""

    @pytest.mark.parametrize("when", INTERRUPTIONS)
    def test_a_call_that_a_signal_ends_leaves_nothing_and_the_next_save_works(
        self, tmp_path: Path, monkeypatch, when: str
    ) -> None:
        shardckpt.save({"t": torch.ones(3)}, tmp_path / "c")
        state = {"t": torch.rand(9000), when: "a key that no cached plan has"}
        with monkeypatch.context() as patch:
            patch.setattr(*INTERRUPTIONS[when])
            if when == "while that is told":
                patch.setattr(StagingArea, "fill", ctrl_c)
            if when == "when it was copied":
                patch.setattr(StagingArea, "fill", after(once_claimed(patch, StagingArea.fill)))
            with pytest.raises(KeyboardInterrupt):
                shardckpt.async_save(state, tmp_path / "c", overwrite=True)
        with contextlib.suppress(shardckpt.ShardckptError):  # which says, once, that the one before was interrupted
            shardckpt.save({"t": torch.zeros(3)}, tmp_path / "d", overwrite=True)
        shardckpt.async_save({"t": torch.zeros(3)}, tmp_path / "d", overwrite=True).result()
        assert sorted(os.listdir(tmp_path)) == ["c", "d"] and threads() == []
        found = shardckpt.load(tmp_path / "c")["t"]
        assert torch.equal(found, state["t"] if when == "when it was copied" else torch.ones(3))

    def test_a_signal_handler_that_saves_while_the_state_is_copied_ends_that_save(self, tmp_path: Path) -> None:
        fill = StagingArea.fill

        def save_and_fill(self, *args) -> None:
            StagingArea.fill = fill
            with pytest.raises(shardckpt.errors.RankError, match="the copy of the state was interrupted"):
                shardckpt.save({"t": torch.ones(3)}, tmp_path / "last")
            shardckpt.save({"t": torch.ones(3)}, tmp_path / "last")
            fill(self, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StagingArea, "fill", once_claimed(patch, save_and_fill))
            handle = shardckpt.async_save({"t": torch.rand(9000)}, tmp_path / "c")
        with pytest.raises(InterruptedError):
            handle.result()
        assert os.listdir(tmp_path) == ["last"]


def wait_for_no_thread() -> None:
    while threads():
        time.sleep(0.01)


class TestBusy:
    def test_a_second_save_waits_for_the_first(self, tmp_path: Path) -> None:
        with held_back() as go:
            first = shardckpt.async_save({"t": torch.rand(9000)}, tmp_path / "a")
            threading.Timer(0.2, go.set).start()
            second = shardckpt.async_save({"t": torch.rand(9000)}, tmp_path / "b")
            assert first.done()
        second.result()
        assert second.timings.waiting > 0.1
        assert sorted(os.listdir(tmp_path)) == ["a", "b"]

    def test_save_waits_too(self, tmp_path: Path) -> None:
        with held_back() as go:
            first = shardckpt.async_save({"t": torch.rand(9000)}, tmp_path / "a")
            threading.Timer(0.2, go.set).start()
            shardckpt.save({"t": torch.rand(3)}, tmp_path / "b")
            assert first.done()

    @pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("the step took too long")])
    def test_a_save_goes_on_after_a_signal_has_ended_a_wait_for_it(self, tmp_path: Path, error: BaseException) -> None:
        with held_back() as go:
            handle = shardckpt.async_save({"t": torch.rand(9000)}, tmp_path / "a")
            with interrupted_by(error), pytest.raises(type(error)):
                handle.result()
            assert not handle.done()
            threading.Timer(0.2, go.set).start()
            later = shardckpt.async_save({"t": torch.rand(9000)}, tmp_path / "b")
            assert handle.done()
        later.result()
        assert sorted(os.listdir(tmp_path)) == ["a", "b"]

    def test_or_it_is_refused_and_the_first_goes_on(self, tmp_path: Path) -> None:
        with held_back():
            first = shardckpt.async_save({"t": torch.rand(9000)}, tmp_path / "a")
            with pytest.raises(shardckpt.errors.UsageError, match="another save is under way"):
                shardckpt.async_save({"t": torch.rand(9000)}, tmp_path / "b", on_busy="raise")
        first.result()
        assert os.listdir(tmp_path) == ["a"]
        shardckpt.async_save({"t": torch.rand(9000)}, tmp_path / "b", on_busy="raise").result()


ENDS = """
import sys, os, time, torch, shardckpt
original = os.write
def slow(fd, data):
    if len(data) > 100_000:
        time.sleep(0.2)
        {fault}
    return original(fd, data)
os.write = slow
shardckpt.async_save({{"t": torch.arange(400_000)}}, sys.argv[1])
print("the script is over", flush=True)
{end}
"""


class TestProcess:
    @pytest.mark.parametrize("first", ["thread", "call"])
    def test_a_process_ends_whose_call_was_ended_by_a_signal_when_the_thread_had_started(
        self, run_script: RunScript, tmp_path: Path, first: str
    ) -> None:
        """A thread that was started may not run yet: then the call takes the save back, and the thread does nothing."""
        script = """
import signal, sys, threading, torch, shardckpt
from shardckpt.checkpoint.save.handle import AsyncSaveTask
claim, start, turns = AsyncSaveTask.claim, threading.Thread.start, {True: threading.Event(), False: threading.Event()}
def is_thread():
    return threading.current_thread().name == "shardckpt-save"
def claim_in_turn(self):
    if is_thread() == (sys.argv[2] == "call"):
        assert turns[not is_thread()].wait(120)
    won = claim(self)
    turns[is_thread()].set()
    return won
def start_and_signal(self):
    start(self)
    if self.name == "shardckpt-save":
        signal.raise_signal(signal.SIGINT)
AsyncSaveTask.claim, threading.Thread.start = claim_in_turn, start_and_signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a suite in the background of a shell ignores
shardckpt.async_save({"t": torch.rand(9000)}, sys.argv[1])
"""
        done = run_script(script, str(tmp_path / "c"), first)
        assert "KeyboardInterrupt" in done.stderr and "AssertionError" not in done.stderr
        assert ("the copy of the state was interrupted" in done.stderr) == (first == "thread")
        assert os.listdir(tmp_path) == []

    @STARTS_THREADS
    def test_a_process_that_ends_waits_for_its_save(self, run_script: RunScript, tmp_path: Path) -> None:
        done = run_script(ENDS.format(end="raise KeyError('in the loop')", fault=""), str(tmp_path / "c"))
        assert (done.stdout, done.returncode) == ("the script is over\n", 1)
        assert torch.equal(shardckpt.load(tmp_path / "c")["t"], torch.arange(400_000))
        assert "shutdown" not in done.stderr

    @STARTS_THREADS
    def test_a_failure_nobody_can_ask_about_is_printed_and_nothing_is_left(
        self, run_script: RunScript, tmp_path: Path
    ) -> None:
        fault = 'raise OSError(28, "No space left on device")'
        done = run_script(ENDS.format(end="", fault=fault), str(tmp_path / "c"))
        assert "in the background" in done.stderr and "No space left" in done.stderr
        assert "before this one" not in done.stderr, "there is none"
        assert os.listdir(tmp_path) == []

    def test_a_process_that_is_cut_off_leaves_nothing_under_the_target(self, tmp_path: Path) -> None:
        def child(rank: int, world: int) -> None:
            with held_back():
                shardckpt.async_save({"t": torch.rand(9000)}, tmp_path / "c")
                os._exit(1)

        outcomes(1, child)
        assert [name[:11] for name in os.listdir(tmp_path)] == [".c.partial-"]
        shardckpt.save({"t": torch.ones(2)}, tmp_path / "c")
        assert os.listdir(tmp_path) == ["c"], "the next save removes what the dead one wrote"

    def test_a_forked_process_does_not_keep_the_buffers_of_its_parent(self, tmp_path: Path) -> None:
        shardckpt.async_save({"t": torch.rand(9000)}, tmp_path / "a").result()
        assert BUFFERS.nbytes > 0

        def child(rank: int, world: int) -> tuple[int, int]:
            inherited = BUFFERS.nbytes
            shardckpt.async_save({"t": torch.rand(9000)}, tmp_path / "b", max_staging_bytes="1MiB").result()
            return inherited, BUFFERS.nbytes

        assert run(1, child) == [(0, MIB // 4)]
        assert BUFFERS.nbytes > 0

    def test_a_forked_process_neither_waits_for_nor_inherits_a_save(self, tmp_path: Path) -> None:
        with held_back():
            handle = shardckpt.async_save({"t": torch.rand(9000)}, tmp_path / "a")

            def child(rank: int, world: int) -> list[str]:
                os.write = posix.write
                with pytest.raises(shardckpt.errors.UsageError, match="another process"):
                    handle.result()
                shardckpt.async_save({"t": torch.rand(9000)}, tmp_path / "b", on_busy="raise").result()
                return threads()

            assert run(1, child) == [[]]
        handle.result()
        assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def built(face: str):
    torch.manual_seed(0)
    model = FRONT_ENDS[face](Net((1,)))
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    step(model, optim)
    return model, optim


def looked_at(model: nn.Module, optim) -> tuple[dict, dict]:
    weights = {name: whole(value) for name, value in model_state_dict(model, "FULL").items()}
    return weights, flat(optim_state_dict(model, optim, "FULL"))


class TestRanks:
    @pytest.mark.parametrize("face", ["flat", "in place", "ddp"])
    def test_training_goes_on_while_the_snapshot_is_saved(self, tmp_path: Path, face: str) -> None:
        def body(rank: int, world: int):
            model, optim = built(face)
            expected = looked_at(model, optim)
            sums, old = [], {"t": torch.zeros(3)}
            shardckpt.save({"t": torch.ones(3)}, tmp_path / "old")
            with held_back() as go:
                handle = shardckpt.async_save({"model": model, "optim": optim}, tmp_path / "c")
                was_meanwhile = not handle.done()
                shardckpt.load(old, tmp_path / "old")
                while not agreed(handle.done()) or len(sums) < 5:
                    step(model, optim, len(sums))
                    total = torch.tensor([float(rank + len(sums))])
                    dist.all_reduce(total)
                    sums.append(float(total) - 2 * len(sums))
                    go.set()
            handle.result()
            return expected, sums, was_meanwhile, int(old["t"].sum())

        told = run(2, body)
        for _, sums, was_meanwhile, old in told:
            assert was_meanwhile and set(sums) == {1.0}, "a collective of the loop met one of the saver"
            assert old == 3
        expected = told[0][0]
        nest = shardckpt.load(tmp_path / "c")
        assert differing(nest["model"], expected[0]) == []
        assert differing(flat(nest["optim"]), expected[1]) == []

    def test_it_costs_no_more_messages_than_a_save_and_none_on_the_training_group(self, tmp_path: Path) -> None:
        def body(rank: int, world: int):
            state = {"t": torch.rand(20_000) * 0, "own": shardckpt.RNGState()}
            counts = []
            for number in range(2):
                shardckpt.save(state, tmp_path / f"s{number}")
                shardckpt.async_save(state, tmp_path / f"a{number}", max_staging_bytes="1MiB").result()
            for verb in (shardckpt.save, shardckpt.async_save):
                start = mark()
                handle = verb(state, tmp_path / verb.__name__)
                if handle is not None:
                    handle.result()
                counts.append([call.op for call in since(start)])
            return counts

        for sync, background in run(2, body):
            assert sync == background and set(sync) == {"send", "recv"}

    def test_a_rank_whose_writer_fails_is_named_by_every_result(self, tmp_path: Path) -> None:
        shardckpt.save({"old": torch.arange(3)}, tmp_path / "c")

        def body(rank: int, world: int) -> None:
            state = {f"t{n}": torch.full((50_000,), float(n)) for n in range(4)}
            with writes(full if rank == 1 else lambda: None):
                handle = shardckpt.async_save(state, tmp_path / "c", overwrite=True)
                handle.result()

        first, second = raised_everywhere(2, body)
        assert "rank 1" in first.message and "No space left" in first.message
        assert second.is_a(OSError) and "No space left" in second.message
        assert torch.equal(shardckpt.load(tmp_path / "c")["old"], torch.arange(3))
        assert os.listdir(tmp_path) == ["c"]

    def test_one_rank_that_did_not_ask_stops_the_next_save_of_all(self, tmp_path: Path) -> None:
        def body(rank: int, world: int) -> list[str]:
            state = {"t": torch.full((50_000,), 1.0)}
            with writes(full):
                handle = shardckpt.async_save(state, tmp_path / "a")
                if rank == 0:
                    with pytest.raises((OSError, shardckpt.errors.RankError)):
                        handle.result()
            told = []
            with pytest.raises((OSError, shardckpt.errors.RankError)) as caught:
                shardckpt.async_save(state, tmp_path / "b")
            told.append(str(caught.value))
            shardckpt.async_save(state, tmp_path / "c").result()
            return told

        for told in run(2, body):
            assert all("in the background to" in each and "No space left" in each for each in told)
        assert os.listdir(tmp_path) == ["c"]

    def test_a_rank_that_is_busy_refuses_for_all(self, tmp_path: Path) -> None:
        def body(rank: int, world: int) -> bool:
            state = {f"t{n}": torch.full((50_000,), float(n)) for n in range(4)}
            with held_back():
                handle = shardckpt.async_save(state, tmp_path / "a")
                with pytest.raises(shardckpt.errors.UsageError, match="another save is under way"):
                    shardckpt.async_save(state, tmp_path / "b", on_busy="raise")
            handle.result()
            return True

        assert run(2, body) == [True, True]
        assert os.listdir(tmp_path) == ["a"]

    def test_a_call_that_a_signal_ends_on_one_rank_fails_on_all_and_the_next_one_works(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The next message of that rank is not taken for the one that the other waits for."""

        def body(rank: int, world: int) -> list[str]:
            found = []
            shardckpt.save({"t": torch.zeros(9000)}, tmp_path / "c")
            for name in ("c", "d"):
                with monkeypatch.context() as patched:
                    if rank == 1 and name == "c":
                        patched.setattr(session.SaveSession, "plan", after(session.SaveSession.plan))
                    try:
                        shardckpt.async_save({"t": torch.ones(9000)}, tmp_path / name, overwrite=True).result()
                        found.append("saved")
                    except BaseException as error:  # noqa: BLE001
                        found.append(type(error).__name__)
            return found

        assert run(2, body, group_timeout=12.0) == [["RankError", "saved"], ["KeyboardInterrupt", "saved"]]
        assert sorted(os.listdir(tmp_path)) == ["c", "d"]
        assert [float(shardckpt.load(tmp_path / name)["t"].sum()) for name in ("c", "d")] == [0.0, 9000.0]

    @pytest.mark.parametrize("gone", [0, 1])
    def test_a_rank_killed_meanwhile_is_named_within_the_timeout(self, tmp_path: Path, gone: int) -> None:
        shardckpt.save({"old": torch.arange(3)}, tmp_path / "c")

        def body(rank: int, world: int) -> float:
            state = {f"t{n}": torch.full((50_000,), float(n)) for n in range(4)}
            shardckpt.async_save(state, tmp_path / "d").result()
            with writes(lambda: os._exit(1) if rank == gone else None):
                handle = shardckpt.async_save(state, tmp_path / "c", overwrite=True)
                start = time.monotonic()
                with pytest.raises(shardckpt.errors.RankError, match=f"rank {gone}"):
                    handle.result()
            return time.monotonic() - start

        found = outcomes(3, body, group_timeout=2.5)
        left = [each for each in found if each.rank != gone]
        assert all(each.value is not None and each.value < 30.0 for each in left), left
        assert torch.equal(shardckpt.load(tmp_path / "c")["old"], torch.arange(3))


def agreed(is_done: bool) -> bool:
    """Tell whether all ranks are done, so that they leave the loop together."""
    all_done = torch.tensor([int(is_done)])
    dist.all_reduce(all_done, dist.ReduceOp.MIN)
    return bool(all_done)


@pytest.mark.parametrize(("yields", "is_filled"), [(True, True), (True, False), (False, True)])
def test_a_capture_lets_other_ranks_copy_first_unless_its_own_loop_waits_for_it(yields, is_filled, monkeypatch):
    slept: list[float] = []
    stage = SimpleNamespace(wait=lambda: None, is_filled=is_filled)
    monkeypatch.setattr(async_save.time, "sleep", slept.append)
    _Copy(None, None, stage, yields=yields)._wait_for_copies()
    assert bool(slept) == (yields and is_filled)


def test_captures_of_several_ranks_let_others_copy_first_and_other_saves_do_not(tmp_path):
    def body(rank: int, world: int) -> list[bool]:
        seen: list[bool] = []
        wait = _Copy._wait_for_copies

        def note(self) -> None:
            seen.append(self._yields)
            wait(self)

        _Copy._wait_for_copies = note
        for lane in (async_save.SAVES, async_save.CAPTURES):
            path = tmp_path / lane.name / "c"
            async_save.start_async_save(lane, planner.NO_HOOKS, {"x": torch.arange(9)}, path, {}).result()
        return seen

    assert run(2, body) == [[False, True]] * 2


def test_a_background_save_that_failed_without_a_text_is_named_by_its_error_class(tmp_path: Path):
    class StoppedError(Exception):
        pass

    state = {"w": torch.ones(3)}
    with patch.object(session, "encode_commit", side_effect=StoppedError):
        handle = shardckpt.async_save(state, tmp_path / "x")
        handle._task.join()
    with pytest.raises(shardckpt.errors.RankError, match=r"in the background to .*/x, failed: StoppedError$"):
        shardckpt.save(state, tmp_path / "y")
