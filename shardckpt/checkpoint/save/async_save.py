"""`async_save`: the loop waits for a copy in memory, not for those from devices; a thread writes and publishes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from queue import SimpleQueue
from typing import Any, Literal

import torch.distributed as dist

from shardckpt.checkpoint.save.handle import PENDING_SAVE, AsyncSaveTask, OnEvent, SaveHandle, require_on_event
from shardckpt.checkpoint.save.save import EARLIER_NAMES, GetBase, SaveArguments, saver_for
from shardckpt.checkpoint.save.session import PlannedSave, SaveSession, StagedSave, WrittenSave, capture_error
from shardckpt.checkpoint.save.staging import (
    BufferPool,
    StagingArea,
    buffer_size,
    default_budget,
    is_unpinned,
    make_buffer,
)
from shardckpt.checkpoint.stateful.flatten import FlattenedState
from shardckpt.deprecation import renamed_params
from shardckpt.errors import UsageError
from shardckpt.format.gc_pause import gc_paused
from shardckpt.plan.layout.output_files import parse_size

OnBusy = Literal["wait", "raise"]

BUFFERS = BufferPool(make_buffer, is_unpinned)
"""Of this process, for every save in the background."""

os.register_at_fork(after_in_child=BUFFERS.forget)


@renamed_params(**EARLIER_NAMES, budget="max_staging_bytes")
def async_save(
    state: Any,
    path: str,
    *,
    overwrite: bool = False,
    checksums: bool = True,
    process_group: dist.ProcessGroup | None = None,
    custom_metadata: Mapping[str, str] | None = None,
    base: str | os.PathLike[str] | GetBase | None = None,
    store_digests: bool = False,
    trainable_only: bool = False,
    base_key_map: Mapping[str, str] | None = None,
    max_staging_bytes: int | str | None = None,
    on_busy: OnBusy = "wait",
    on_event: OnEvent | None = None,
) -> SaveHandle:
    """Save what a training run holds, in the background. Collective: every rank of the group calls it.

    When this returns, the state may change at once: what is in this machine's memory has been copied; what is on a
    device is copied before the device runs anything that is queued later on the stream that is current in the call. One
    save a process is under way at a time. A process that ends waits for it.

    What can be known before anything is copied (a target that exists, a value that cannot be saved) is raised here, on
    every rank. Whatever fails later is raised by `result()` on every rank, naming the one that failed; if nobody asks,
    by the next `save` or `async_save` of the process, once, which saves nothing then.

    Args:
        state: As for `save`.
        path: As for `save`.
        overwrite: As for `save`.
        checksums: As for `save`.
        process_group: As for `save`.
        custom_metadata: As for `save`.
        base: As for `save`; tensors are hashed before this returns, and copied if they changed.
        store_digests: As for `save`.
        trainable_only: As for `save`.
        base_key_map: As for `save`.
        max_staging_bytes: Bytes of memory that the copy on this rank may take, pinned if the process uses a GPU, or a
            size such as `"8GB"`; 1 MiB at least. None for as much as this rank writes; on a GPU that is at most half of
            the machine's memory, divided by its ranks. A state that does not fit is copied in rounds, each when the one
            before has been written: the call returns when the last one is under way. The memory is kept for the next
            save.
        on_busy: What to do while another save is under way: wait for it, or raise. One rank's refusal is raised on all.
        on_event: Called with a `SaveEvent` when a phase has ended, on the thread that went through it.

    Returns:
        Where to ask for the result.

    Raises:
        TargetExistsError: The target exists and `overwrite` is false.
        UnsupportedError: Something in the state cannot be saved; the message names its dotted path.
        UsageError: A value differs between ranks; another save is under way, and `on_busy` is `"raise"`.
        RankError: Another rank failed or is gone; the message names it.
        StorageError: The storage failed.
    """
    arguments = SaveArguments(
        path, overwrite, checksums, custom_metadata, base, store_digests, trainable_only, base_key_map
    )
    options, fault = arguments.check()
    most = None
    try:
        most = _parse_max_staging_bytes(max_staging_bytes)
        _require_way_when_busy(on_busy)
        require_on_event(on_event)
    except Exception as error:  # noqa: BLE001  (sent to every rank, then raised)
        fault = fault or error
    task = AsyncSaveTask(options.path, on_event if callable(on_event) else None)
    with PENDING_SAVE.entry, gc_paused():
        with task.phase("waiting"):
            refusal = fault or _refusal(on_busy)
        with task.phase("capture"):
            saver = saver_for(process_group, refusal)
            copy = _Copy(task, SaveSession(saver, options, saver.channels.background_coordinator(process_group)), most)
            PENDING_SAVE.begin(task, copy.abandon)
            planned, flattened = copy.plan(state, refusal)
        copy.stage(planned, flattened)
        del flattened  # before the collector looks through it
    return SaveHandle(task)


def _parse_max_staging_bytes(max_staging_bytes: int | str | None) -> int | None:
    """Return how many bytes the copy may take, None for no limit. Raises UsageError."""
    most = default_budget() if max_staging_bytes is None else parse_size(max_staging_bytes)
    buffer_size(most)
    return most


def _require_way_when_busy(on_busy: Any) -> None:
    if on_busy not in ("wait", "raise"):
        raise UsageError("`on_busy` must be 'wait' or 'raise'", found=repr(on_busy))


def _refusal(on_busy: OnBusy) -> Exception | None:
    """Return why this rank cannot save now, after waiting for a save under way if that is what to do."""
    busy = PENDING_SAVE.busy_with
    if busy and on_busy == "raise":
        return UsageError("another save is under way", where=busy, fix="Ask for its result, or pass on_busy='wait'.")
    PENDING_SAVE.wait()
    return PENDING_SAVE.unretrieved_error()


class _Copy:
    """The copy of a state, made by the call and written by the saver's thread.

    A signal may end the call at any point. The save is then rolled back by the thread, which sends the other ranks
    why, or by the call where the thread has not started: whoever claims the rest of the save.

    Args:
        task: The save, as its caller sees it.
        session: The save, as the ranks do it.
        budget: Bytes that the copy may take; None for no limit.
    """

    def __init__(self, task: AsyncSaveTask, session: SaveSession, budget: int | None) -> None:
        self._task, self._session = task, session
        self._staging = StagingArea(BUFFERS, budget)
        self._staged: SimpleQueue[StagedSave | Exception] = SimpleQueue()
        self._is_complete = self._is_claimed = False

    def plan(self, state: Any, refusal: Exception | None) -> tuple[PlannedSave, FlattenedState]:
        """Plan with the other ranks. Collective; a failure is raised on all."""
        try:
            return self._session.plan(state, refusal)
        except Exception:
            self._claim()
            self._session.rollback()
            raise
        except BaseException:
            self.abandon()
            raise

    def stage(self, planned: PlannedSave, flattened: FlattenedState) -> None:
        """Start the thread, and copy the state for it; an error of the copy fails the save."""
        try:
            self._start(planned)
            with self._task.phase("staging"):
                staged = self._session.stage(planned, flattened)
                self._staged.put(staged)
                self._staging.fill(staged.files, flattened.arrays)
            self._is_complete = True
        except Exception as error:
            self._fail(error)
            if self._is_claimed:
                raise
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Give the save up unless all is copied: a signal has ended the call."""
        if self._is_complete or self._is_claimed:
            return
        if self._claim():
            self._session.leave()
        else:
            self._fail(InterruptedError("the copy of the state was interrupted"))

    def _claim(self) -> bool:
        self._is_claimed = self._is_claimed or self._task.claim()
        return self._is_claimed

    def _start(self, planned: PlannedSave) -> None:
        try:
            self._task.start(lambda: self._write(planned))
        except RuntimeError as error:  # no thread can be had; the others have to hear of it
            if self._claim():
                with self._session.rollback_on_error():
                    self._session.commit(planned, error)

    def _fail(self, error: Exception) -> None:
        """Send the thread the reason why no more data will come."""
        self._staged.put(error)
        self._staging.fail(error)

    def _write(self, planned: PlannedSave) -> None:
        """Write the copy, then publish it. On the saver's thread."""

        def transfer() -> WrittenSave:
            with self._task.phase("write"):
                staged = self._staged.get()
                if isinstance(staged, Exception):
                    raise staged
                return self._session.write(planned, staged, self._staging.blocks)

        with self._session.rollback_on_error():
            written = capture_error(transfer)
            self._staging.close()  # the call may be waiting for a buffer
            with self._task.phase("publish"):
                self._session.commit(planned, written)
