"""Handle signals during a block, also in forks and while the main thread waits in C code."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from types import FrameType
from typing import Any

from shardckpt.errors import UsageError

_handlers_before: list[dict[int, Any]] = []  # of each `watch_signals`, the outermost first
_wakeups_before: list[int] = []  # of each `wake_on_signals`, the outermost first


@contextmanager
def watch_signals(numbers: tuple[int, ...], note: Callable[[], object]) -> Iterator[None]:
    """Call a function for each signal inside the context; restore the handlers on exit."""
    before: dict[int, Any] = {}

    def handle(_number: int, _frame: FrameType | None) -> None:
        note()

    try:
        for number in numbers:
            before[number] = _set_handler(number, handle)
        _handlers_before.append(before)
        yield
    finally:
        _restore_handlers(before)
        _handlers_before[:] = filter(None, _handlers_before)


@contextmanager
def wake_on_signals(fd: int) -> Iterator[int]:
    """Write each signal's number to a socket when it comes; yield the socket that got them before, or -1."""
    # Python calls handlers on the main thread alone, and there only once C code returns, as that of a collective.
    before = signal.set_wakeup_fd(fd, warn_on_full_buffer=False)
    _wakeups_before.append(before)
    try:
        yield before
    finally:
        if _wakeups_before:  # in a fork they are gone
            _wakeups_before.pop()
        signal.set_wakeup_fd(before)


def require_signals(numbers: Sequence[object]) -> tuple[int, ...]:
    """Return signals as their numbers."""
    known = signal.valid_signals()
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int) or number not in known:
            fix = "Pass members of the module signal, such as signal.SIGTERM."
            raise UsageError("each argument must be a signal's number", found=repr(number), fix=fix)
    return tuple(number for number in numbers if isinstance(number, int))


def _set_handler(number: int, handler: Callable[[int, FrameType | None], None]) -> Any:
    try:
        return signal.signal(number, handler)
    except (ValueError, OSError) as error:
        fix = "On other threads, pass a function as `deadline`."
        raise UsageError(
            "this signal cannot be handled here", found=error, expected="the main thread", fix=fix
        ) from error


def _restore_handlers(before: dict[int, Any]) -> None:
    while before:
        number, handler = before.popitem()
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


_masks = threading.local()  # signals that a thread blocked before it began to fork


def _block_before_fork() -> None:
    """Block watched signals: a child that gets one before its handlers are restored would ignore it."""
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, [*chain.from_iterable(_handlers_before)])


def _unblock_after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _restore_handlers_in_child() -> None:
    """Make a fork end as it would outside the blocks: `multiprocessing` ends its daemons and pools by SIGTERM."""
    while _wakeups_before:  # the sockets are the parent's, which would take a fork's signal for its own
        signal.set_wakeup_fd(_wakeups_before.pop())
    while _handlers_before:
        numbers = [*_handlers_before[-1]]
        _restore_handlers(_handlers_before.pop())
        for number in numbers:  # schedulers send these to loader workers too, which must live until the save
            if number != signal.SIGTERM and signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, signal.SIG_IGN)
    _unblock_after_fork()


os.register_at_fork(
    before=_block_before_fork, after_in_parent=_unblock_after_fork, after_in_child=_restore_handlers_in_child
)
