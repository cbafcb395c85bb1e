"""Pause Python's garbage collector while very many small objects are created."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disable the cyclic garbage collector inside; reference counts free objects as always.

    New objects set the collector off again and again, over all objects of the process: up to half of the time of a
    large checkpoint.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
