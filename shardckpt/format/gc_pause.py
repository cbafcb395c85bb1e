"""Pause Python's garbage collector while many small objects are created."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disable the cyclic garbage collector; reference counting still frees objects.

    New objects trigger the collector again and again, over all objects of the process: up to half of the time to open a
    large checkpoint.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
