"""Saves in the background that do not end before somebody waits for them."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from shardckpt.checkpoint.save.handle import AsyncSaveTask
from shardckpt.checkpoint.save.session import SaveSession

_DEADLINE_S = 30.0


@contextmanager
def holding_saves(act: Callable[[], object] = str) -> Iterator[None]:
    """Hold each save in the background before its commit until a call waits for it; then act, and go on."""
    awaited: defaultdict[str, threading.Event] = defaultdict(threading.Event)
    join, commit, training = AsyncSaveTask.join, SaveSession.commit, threading.current_thread()

    def wait(task: AsyncSaveTask, timeout: float | None = None) -> bool:
        awaited[task.path].set()
        return join(task, timeout)

    def commit_late(session: SaveSession, *args: object) -> None:
        if threading.current_thread() is not training:
            awaited[session._options.path].wait(_DEADLINE_S)
            act()
        commit(session, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncSaveTask, "join", wait)
        patch.setattr(SaveSession, "commit", commit_late)
        try:
            yield
        finally:
            for event in awaited.values():
                event.set()
