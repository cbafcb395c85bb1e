"""`async_save`: copy a state into staging buffers, which a thread writes.

The training loop waits for copies of CPU memory, but not for copies from devices.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Set
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any, Literal, NamedTuple, SupportsFloat

import torch.distributed as dist
from typing_extensions import Unpack

from shardckpt.checkpoint.save.handle import PENDING_SAVE, AsyncSaveTask, PendingSave, SaveHandle
from shardckpt.checkpoint.save.payload_writer import Source, iter_contents
from shardckpt.checkpoint.save.planner import NO_HOOKS, PlannedSave, PlannedState, SaveHooks, SaveOptions, capture_error
from shardckpt.checkpoint.save.save import SAVERS, SaveParams, SaverCache, check_options
from shardckpt.checkpoint.save.session import SaveSession, StagedSave, WrittenSave
from shardckpt.checkpoint.save.staging import (
    BufferPool,
    StagingArea,
    StagingBuffer,
    buffer_size,
    default_budget,
    is_unpinned,
    make_buffer,
)
from shardckpt.checkpoint.save.write_hooks import install_write_hooks
from shardckpt.checkpoint.stateful.flatten import FlattenedState
from shardckpt.devices import has_streams
from shardckpt.encodings.budget import gc_paused
from shardckpt.errors import UsageError, require_bools, require_keywords
from shardckpt.events.recorder import enter_call
from shardckpt.manifest import Path
from shardckpt.plan.layout.output_files import parse_size

OnBusy = Literal["wait", "raise"]


class AsyncSaveParams(SaveParams, total=False):
    """Keyword parameters of `async_save`."""

    max_staging_bytes: int | str | None
    on_busy: OnBusy
    overlap_staging: bool


class StepSaveParams(AsyncSaveParams, total=False):
    """Keyword parameters of `Checkpointer.async_save`."""

    metrics: Mapping[str, SupportsFloat] | None


def require_known_options(function: str, options: object, *, background: bool, has_metrics: bool = False) -> None:
    """Check options for `async_save` or `save` long before they are used."""
    if not isinstance(options, Mapping):
        raise UsageError(f"{function} must be a dict", found=repr(options), fix="Leave it out for the defaults.")
    known = AsyncSaveParams if background else SaveParams
    require_keywords(function, options, {*known.__annotations__, *(("metrics",) if has_metrics else ())})


# Staging buffers for all background saves of this process, except captures.
BUFFERS = BufferPool(make_buffer, is_unpinned)


class SaveLane(NamedTuple):
    """Background saves that run one at a time; saves in other lanes may run at the same time."""

    name: str  # equal on all ranks
    pending: PendingSave
    buffers: BufferPool[StagingBuffer]
    savers: SaverCache
    # The ranks of a capture send each other the state at a low priority, and let each other copy before they write.
    is_for_captures: bool = False


SAVES = SaveLane("", PENDING_SAVE, BUFFERS, SAVERS)
CAPTURES = SaveLane("captures", PendingSave(), BufferPool(make_buffer, is_unpinned), SaverCache(), True)
LOCAL_CAPTURES = SaveLane("local captures", PendingSave(), BufferPool(make_buffer, is_unpinned), SaverCache(), True)

for _lane in (SAVES, CAPTURES, LOCAL_CAPTURES):
    os.register_at_fork(after_in_child=_lane.buffers.forget)
for _lane in (CAPTURES, LOCAL_CAPTURES):
    os.register_at_fork(after_in_child=_lane.pending.forget)


def async_save(
    state: Any,
    path: str | os.PathLike[str],
    *,
    max_staging_bytes: int | str | None = None,
    on_busy: OnBusy = "wait",
    overlap_staging: bool = False,
    **options: Unpack[SaveParams],
) -> SaveHandle:
    """Save a training state in the background. Collective.

    Every rank in the group calls it. The state may change as soon as it returns. CPU tensors have been copied; device
    tensors are copied before the device runs work that is queued later on the current stream. A process runs one save
    at a time, and waits for it before it exits.

    Errors known before the copy (an existing target, a value that cannot be saved) are raised here, on every rank.
    `result()` raises later errors on every rank, and names the failed rank. If `result()` is not called, the process's
    next `save` or `async_save` raises the error once, and does not save.

    Args:
        state: As for `save`.
        path: As for `save`.
        max_staging_bytes: Maximum memory for the copy on this rank, in bytes or as text such as `"8GB"`; at least
            1 MiB, pinned if the process uses a GPU. By default as much as this rank writes; with a GPU at most half the
            machine's memory, divided by its ranks. A larger state is copied in rounds, each after the previous one has
            been written, and the call returns after the last copy. The memory is kept for the next save.
        on_busy: Whether to wait for a running save or to raise an error, on all ranks.
        overlap_staging: Let the next forward and backward run on a GPU during the copies of parameters and states of
            `torch.optim` optimizers. Optimizer steps, `load_state_dict`, loads by this package and
            `summon_full_params` wait for them. **Other code that writes parameters in place** (averages of weights,
            clipping of weights, a captured graph) **must call `handle.wait_for_staging()` first**, or the checkpoint
            gets values from after the call. All other tensors are copied first, and waited for at once.
        **options: Other parameters for `save`. With a `base`, tensors are hashed before this returns, and only changed
            tensors are copied.

    Returns:
        A handle of the save.

    Raises:
        TargetExistsError: The target exists and `overwrite` is False.
        UnsupportedError: A value in the state cannot be saved; the message contains its dotted path.
        UsageError: A value differs between ranks; or another save is running, and `on_busy` is `"raise"`.
        RankError: Another rank failed or is lost; the message names it.
        StorageError: The storage failed.
    """
    return start_async_save(
        SAVES,
        NO_HOOKS,
        state,
        path,
        options,
        max_staging_bytes=max_staging_bytes,
        on_busy=on_busy,
        overlap_staging=overlap_staging,
    )


def start_async_save(
    lane: SaveLane,
    hooks: SaveHooks,
    state: Any,
    path: str | os.PathLike[str],
    options: SaveParams,
    *,
    max_staging_bytes: int | str | None = None,
    on_busy: OnBusy = "wait",
    overlap_staging: bool = False,
) -> SaveHandle:
    """Save a state in the background, as `async_save`, while saves in other lanes may run. Collective."""
    checked, fault = check_options("async_save", path, options, hooks)
    most = None
    try:
        most = _parse_max_staging_bytes(max_staging_bytes)
        _require_way_when_busy(on_busy)
        require_bools(overlap_staging=overlap_staging)
        checked = replace(checked, overlap_staging=overlap_staging)
    except Exception as error:  # noqa: BLE001  (sent to every rank, then raised)
        fault = fault or error
    task = AsyncSaveTask(checked.path, checked.on_event, is_tolerated=lane.is_for_captures)
    try:
        with enter_call("async_save", checked.path, checked.on_event):
            _copy_and_start(lane, state, task, checked, most, options.get("process_group"), fault, on_busy)
    except BaseException as error:
        task.emit(error)
        raise
    return SaveHandle(task)


def _copy_and_start(
    lane: SaveLane,
    state: Any,
    task: AsyncSaveTask,
    checked: SaveOptions,
    most: int | None,
    group: dist.ProcessGroup | None,
    fault: Exception | None,
    on_busy: OnBusy,
) -> None:
    """Plan with the other ranks, start the thread that writes, and copy the state."""
    with lane.pending.entry, gc_paused():
        with task.phase("waiting"):
            refusal = fault or _refusal(lane, on_busy)
        with task.phase("capture"):
            saver = lane.savers.get(group, refusal)
            task.recorder.values["rank"] = saver.ranks.rank
            last = saver.ranks.background(lane.name, has_low_priority=lane.is_for_captures)
            yields = lane.is_for_captures and saver.ranks.size > 1
            session = SaveSession(saver, checked, last)
            copy = _Copy(task, session, StagingArea(lane.buffers, most), yields=yields)
            lane.pending.start(task, copy.abandon)
            planned, flattened = copy.plan(state, refusal)
            task.recorder.values.update(warnings=session.warnings, has_left=session.has_left)
        if session.has_left:
            copy.release()
            return
        copy.stage(planned, flattened, overlaps=checked.overlap_staging)
        del flattened  # before the next garbage collection


def _parse_max_staging_bytes(max_staging_bytes: int | str | None) -> int | None:
    """Return the copy's budget in bytes, None for no limit. Raises UsageError."""
    most = default_budget() if max_staging_bytes is None else parse_size(max_staging_bytes)
    buffer_size(most)
    return most


def _require_way_when_busy(on_busy: Any) -> None:
    if on_busy not in ("wait", "raise"):
        raise UsageError("`on_busy` must be 'wait' or 'raise'", found=repr(on_busy))


def _refusal(lane: SaveLane, on_busy: OnBusy) -> Exception | None:
    """Return why this rank cannot save now; wait for a running save if requested."""
    pending = lane.pending
    busy = pending.busy_with
    if busy and on_busy == "raise":
        return UsageError("another save is under way", where=busy, fix="Ask for its result, or pass on_busy='wait'.")
    pending.wait()
    # An earlier capture's tier reports its failure, and the capture may be of another run.
    return None if lane.is_for_captures else pending.unretrieved_error()


def _hook_writers(flattened: PlannedState) -> Set[Path]:
    """Return the arrays whose copies only writers wait for, and install the writers' hooks."""
    assert isinstance(flattened, FlattenedState), "a save with `overlap_staging` is not traced"
    deferred = flattened.find_step_written() if any(map(has_streams, flattened.devices)) else set()
    if deferred:
        install_write_hooks(flattened.modules.values())
    return deferred


class _Copy:
    """The copied state, which the call makes and the saver's thread writes."""

    def __init__(self, task: AsyncSaveTask, session: SaveSession, staging: StagingArea, *, yields: bool) -> None:
        self._task, self._session, self._staging, self._yields = task, session, staging, yields
        self._staged: SimpleQueue[StagedSave | Exception] = SimpleQueue()
        self._is_complete = self._is_claimed = False

    def plan(self, state: Any, refusal: Exception | None) -> tuple[PlannedSave, PlannedState]:
        """Plan with the other ranks. Collective; an error is raised on all ranks."""
        try:
            return self._session.plan(state, refusal)
        except Exception:
            self._claim()
            self._session.rollback()
            raise
        except BaseException:
            self.abandon()
            raise

    def release(self) -> None:
        """End the save on a rank that leaves: the others write and commit it."""
        self._is_complete = True
        self._task.emit(None)

    def stage(self, planned: PlannedSave, flattened: PlannedState, *, overlaps: bool) -> None:
        """Start the thread and copy the state; if the copy fails, the save fails."""
        try:
            has_thread = self._start(planned)
            with self._task.phase("staging"):
                staged = self._session.stage(planned, flattened)
                self._staged.put(staged)
                if has_thread:
                    deferred = _hook_writers(flattened) if overlaps else frozenset()
                    self._staging.fill(staged.files, flattened, deferred)
            self._is_complete = True
        except Exception as error:
            self._fail(error)
            if self._is_claimed:
                raise
        except BaseException:
            self.abandon()
            raise
        if not has_thread:  # the process starts no more threads, so the call writes the state itself
            self._task.run(lambda: self._write(planned, partial(iter_contents, state=flattened)))

    def abandon(self) -> None:
        """Abandon the save unless everything is copied, after a signal ended the call."""
        if self._is_complete or self._is_claimed:
            return
        if self._claim():
            self._session.leave()
        else:
            self._fail(InterruptedError("the copy of the state was interrupted"))

    def _claim(self) -> bool:
        # A signal may end the call at any point. Whoever claims the rest of the save rolls it back and sends the other
        # ranks the reason: the thread, or the call if the thread has not started.
        self._is_claimed = self._is_claimed or self._task.claim()
        return self._is_claimed

    def _start(self, planned: PlannedSave) -> bool:
        """Start the thread; return False if the process ends and starts no more threads."""
        try:
            return self._task.start(lambda: self._write(planned))
        except RuntimeError as error:  # a thread cannot be started; other ranks have to know
            if self._claim():
                with self._session.rollback_on_error():
                    self._session.commit(planned, error)
            return True

    def _fail(self, error: Exception) -> None:
        """Send the thread the error that ended the copy."""
        self._staged.put(error)
        self._staging.fail(error)

    def _write(self, planned: PlannedSave, source: Source | None = None) -> None:
        """Write and publish the copy, or the state from `source`."""

        def transfer() -> WrittenSave:
            with self._task.phase("write"):
                staged = self._staged.get()
                if isinstance(staged, Exception):
                    raise staged
                if source is None:
                    self._wait_for_copies()
                written = self._session.write(planned, staged, source or self._staging.blocks, is_background=True)
                self._task.recorder.values["nbytes"] = written.nbytes
                return written

        with self._session.rollback_on_error():
            written = capture_error(transfer)
            self._staging.close()  # the call may be waiting for a buffer
            with self._task.phase("publish"):
                self._session.commit(planned, written)

    def _wait_for_copies(self) -> None:
        """Wait for this rank's copy, and as long again for other ranks, which may have started later."""
        start = time.monotonic()
        self._staging.wait()
        # The training loop does not wait meanwhile, and the slowest rank delays all.
        if self._yields and self._staging.is_filled:
            time.sleep(time.monotonic() - start)
