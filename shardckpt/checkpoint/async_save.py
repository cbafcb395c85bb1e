"""`async_save`: the loop waits for one copy in memory; a thread writes and publishes it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Literal

import torch.distributed as dist

from shardckpt.checkpoint.collecting import collector_at_rest
from shardckpt.checkpoint.corridor import Cargo, Corridor, attempted
from shardckpt.checkpoint.handle import BACKGROUND, Course, OnEvent, SaveHandle
from shardckpt.checkpoint.save import BaseOf, how_to, saver_of
from shardckpt.checkpoint.staging import Pool, Stage, block_size, make_block
from shardckpt.errors import UsageError
from shardckpt.plan.sizes import parse_size

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
    how = how_to(path, overwrite, checksums, about, base, digests, trainable_only, base_rules)
    most = None if budget is None else parse_size(budget)
    block_size(most)
    if on_busy not in ("wait", "raise"):
        raise UsageError("no way to deal with a save under way", found=repr(on_busy), expected="'wait' or 'raise'")
    course = Course(how.path, on_event)
    with BACKGROUND.entry, collector_at_rest():
        with course.phase("waiting"):
            refusal = _refusal(on_busy)
        with course.phase("capture"):
            saver = saver_of(group, refusal)
            corridor = Corridor(saver, how, saver.behind(group))
            with saver.star.in_step(), corridor.taken_back():
                corridor.agree(state, refusal)
        BACKGROUND.begin(course)
        _stage(course, corridor, most)
    return SaveHandle(course)


def _refusal(on_busy: OnBusy) -> Exception | None:
    """Return why this rank cannot save now, after waiting for a save under way if that is what to do."""
    busy = BACKGROUND.busy_with
    if busy and on_busy == "raise":
        return UsageError("another save is under way", where=busy, fix="Ask for its result, or pass on_busy='wait'.")
    BACKGROUND.wait()
    return BACKGROUND.unheard()


def _stage(course: Course, corridor: Corridor, budget: int | None) -> None:
    """Copy the state while a thread waits for it; a failure to copy reaches the ranks through that thread."""
    stage = Stage(BUFFERS, budget)
    promise: Future[Cargo] = Future()
    try:
        course.start(lambda: _write(course, corridor, stage, promise))
    except RuntimeError as error:  # no thread can be had; the others have to hear of it
        with corridor.taken_back():
            corridor.finish(error)
    try:
        with course.phase("staging"):
            cargo = corridor.cargo()
            promise.set_result(cargo)
            stage.fill(cargo.payloads, corridor.arrays)
    except BaseException as error:
        failure = error if isinstance(error, Exception) else InterruptedError("the copy of the state was interrupted")
        if not promise.done():
            promise.set_exception(failure)
        stage.fail(failure)
        if not isinstance(error, Exception):
            raise
    finally:
        corridor.let_go()


def _write(course: Course, corridor: Corridor, stage: Stage, promise: Future[Cargo]) -> None:
    """Write what is copied, then publish it. On the saver's thread."""

    def transfer() -> bytes:
        with course.phase("write"):
            return corridor.transfer(promise.result(), stage.blocks)

    with corridor.taken_back():
        said = attempted(transfer)
        stage.close()  # the loop may be waiting for a buffer
        with course.phase("publish"):
            corridor.finish(said)
