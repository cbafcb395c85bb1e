"""Limit the time for calls that have no limit, such as calls to a torch store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


def run_within(seconds: float, work: Callable[[], T]) -> T:
    """Return a function's result, or raise its exception or TimeoutError, within a time limit."""
    ended: SimpleQueue[Callable[[], T]] = SimpleQueue()

    # The main thread can handle signals while another thread, abandoned at the limit, runs the call.
    def run() -> None:
        try:
            value = work()
        except BaseException as error:  # noqa: BLE001  (raised by whoever waits)
            ended.put(_raiser(error))
        else:
            ended.put(lambda: value)

    threading.Thread(target=run, name="time limit", daemon=True).start()
    try:
        result = ended.get(timeout=seconds)
    except Empty:
        raise TimeoutError(f"no answer after {seconds:g} s") from None
    return result()


def _raiser(error: BaseException) -> Callable[[], Any]:
    def raise_it() -> Any:
        raise error

    return raise_it
