"""`async_save`: the loop waits for one copy in memory; a thread writes and publishes it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from queue import SimpleQueue
from typing import Any, Literal

import torch.distributed as dist

from shardckpt.checkpoint.save.handle import BACKGROUND, Course, OnEvent, SaveHandle
from shardckpt.checkpoint.save.save import BaseOf, checked_how, saver_for
from shardckpt.checkpoint.save.session import Cargo, Corridor, attempted
from shardckpt.checkpoint.save.staging import Pool, Stage, block_size, make_block
from shardckpt.errors import UsageError
from shardckpt.gc_pause import gc_paused
from shardckpt.plan.layout.sizes import parse_size

OnBusy = Literal["wait", "raise"]

BUFFERS = Pool(make_block)
"""Of this process, for every save in the background."""

os.register_at_fork(after_in_child=BUFFERS.forget)


def async_save(
    state: Any,
    path: str,
    *,
    overwrite: bool = False,
    checksums: bool = True,
    group: dist.ProcessGroup | None = None,
    about: Mapping[str, str] | None = None,
    base: str | os.PathLike[str] | BaseOf | None = None,
    digests: bool = False,
    trainable_only: bool = False,
    base_rules: Mapping[str, str] | None = None,
    budget: int | str | None = None,
    on_busy: OnBusy = "wait",
    on_event: OnEvent | None = None,
) -> SaveHandle:
    """Save what a training run holds, in the background. Collective: every rank of the group calls it.

    When this returns, all that is saved has been copied: the state may change at once. One save a process is under way
    at a time. A process that ends waits for it.

    What can be known before anything is copied (a target that exists, a value that cannot be saved) is raised here, on
    every rank. Whatever fails later is raised by `result()` on every rank, naming the one that failed; if nobody asks,
    by the next `save` or `async_save` of the process, once, which saves nothing then.

    Args:
        state: As `save` takes it.
        path: As `save` takes it.
        overwrite: As `save` takes it.
        checksums: As `save` takes it.
        group: As `save` takes it.
        about: As `save` takes it.
        base: As `save` takes it; what may lie there is hashed before this returns, and not copied if it does.
        digests: As `save` takes it.
        trainable_only: As `save` takes it.
        base_rules: As `save` takes it.
        budget: Bytes of memory that the copy on this rank may take, or a size such as `"8GB"`; 1 MiB at least. None for
            as much as this rank writes. A state that does not fit is copied in rounds, each when the one before has
            been written: the call returns when the last one is copied. The memory is kept for the next save.
        on_busy: What to do while another save is under way: wait for it, or raise. One rank's refusal is raised on all.
        on_event: Called with a `SaveEvent` when a phase has ended, on the thread that went through it.

    Returns:
        Where to ask for the result.

    Raises:
        TargetExistsError: Something lies there and `overwrite` is false.
        UnsupportedError: Something in the state cannot be saved; the message names its dotted path.
        UsageError: A value differs between ranks; another save is under way, and `on_busy` is `"raise"`.
        RankError: Another rank failed or is gone; the message names it.
        StorageError: The storage failed.
    """
    how, fault = checked_how(path, overwrite, checksums, about, base, digests, trainable_only, base_rules)
    most = None
    try:
        most = _most_staged(budget)
        _require_way_when_busy(on_busy)
    except Exception as error:  # noqa: BLE001  (told to every rank, then raised)
        fault = fault or error
    course = Course(how.path, on_event)
    with BACKGROUND.entry, gc_paused():
        with course.phase("waiting"):
            refusal = fault or _refusal(on_busy)
        with course.phase("capture"):
            saver = saver_for(group, refusal)
            copy = _Copy(course, Corridor(saver, how, saver.channels.background(group)), most)
            BACKGROUND.begin(course, copy.abandon)
            copy.agree(state, refusal)
        copy.make()
    return SaveHandle(course)


def _most_staged(budget: int | str | None) -> int | None:
    """Return how many bytes the copy may take, None for no limit. Raises UsageError."""
    most = None if budget is None else parse_size(budget)
    block_size(most)
    return most


def _require_way_when_busy(on_busy: Any) -> None:
    if on_busy not in ("wait", "raise"):
        raise UsageError("no way to deal with a save under way", found=repr(on_busy), expected="'wait' or 'raise'")


def _refusal(on_busy: OnBusy) -> Exception | None:
    """Return why this rank cannot save now, after waiting for a save under way if that is what to do."""
    busy = BACKGROUND.busy_with
    if busy and on_busy == "raise":
        return UsageError("another save is under way", where=busy, fix="Ask for its result, or pass on_busy='wait'.")
    BACKGROUND.wait()
    return BACKGROUND.unheard()


class _Copy:
    """The copy of a state, made by the call and written by the saver's thread.

    A signal may end the call at any point. What ranks have agreed on is then taken back by the thread, which tells them
    why, or by the call where the thread has not begun: whoever claims the rest of the save.

    Args:
        course: How the save goes.
        corridor: The save.
        budget: Bytes that the copy may take; None for no limit.
    """

    def __init__(self, course: Course, corridor: Corridor, budget: int | None) -> None:
        self._course, self._corridor = course, corridor
        self._stage = Stage(BUFFERS, budget)
        self._cargo: SimpleQueue[Cargo | Exception] = SimpleQueue()
        self._is_whole = self._is_claimed = False

    def agree(self, state: Any, refusal: Exception | None) -> None:
        """Plan with the other ranks. Collective; a failure is raised on all."""
        try:
            self._corridor.agree(state, refusal)
        except Exception:
            self._claim()
            self._corridor.take_back()
            raise
        except BaseException:
            self.abandon()
            raise

    def make(self) -> None:
        """Start the thread, and copy the state for it; that the copy fails is the save's failure, which it tells."""
        try:
            self._start()
            with self._course.phase("staging"):
                cargo = self._corridor.cargo()
                self._cargo.put(cargo)
                self._stage.fill(cargo.payloads, self._corridor.arrays)
            self._is_whole = True
        except Exception as error:
            self._fail(error)
            if self._is_claimed:
                raise
        except BaseException:
            self.abandon()
            raise
        finally:
            self._corridor.let_go()

    def abandon(self) -> None:
        """Give the save up unless all is copied: a signal has ended the call."""
        if self._is_whole or self._is_claimed:
            return
        if self._claim():
            self._corridor.leave()
        else:
            self._fail(InterruptedError("the copy of the state was interrupted"))

    def _claim(self) -> bool:
        self._is_claimed = self._is_claimed or self._course.claim()
        return self._is_claimed

    def _start(self) -> None:
        try:
            self._course.start(self._write)
        except RuntimeError as error:  # no thread can be had; the others have to hear of it
            if self._claim():
                with self._corridor.taken_back():
                    self._corridor.finish(error)

    def _fail(self, error: Exception) -> None:
        """Tell the thread that no more will come, and why."""
        self._cargo.put(error)
        self._stage.fail(error)

    def _write(self) -> None:
        """Write what is copied, then publish it. On the saver's thread."""

        def transfer() -> bytes:
            with self._course.phase("write"):
                cargo = self._cargo.get()
                if isinstance(cargo, Exception):
                    raise cargo
                return self._corridor.transfer(cargo, self._stage.blocks)

        with self._corridor.taken_back():
            said = attempted(transfer)
            self._stage.close()  # the call may be waiting for a buffer
            with self._course.phase("publish"):
                self._corridor.finish(said)
