"""Which verbs can be planned, and how their work is shared."""

from __future__ import annotations

from importlib import import_module

from shardckpt.errors import UsageError
from shardckpt.offline.tasks.work import Work
from shardckpt.offline.tasks.written_files import FileWork

__all__ = ["find_work"]

_WRITTEN = {
    "consolidate": "shardckpt.offline.consolidate",
    "convert": "shardckpt.offline.consolidate",
    "merge_adapter": "shardckpt.offline.merge_adapter",
    "rekey": "shardckpt.offline.rekey",
    "reshard": "shardckpt.offline.reshard",
}


def find_work(verb: str) -> Work:
    """Return how a verb's work is shared. Raises UsageError for other verbs."""
    home = _WRITTEN.get(verb)
    if home is None:
        raise UsageError("a plan needs a verb that can be shared", found=repr(verb), expected=", ".join(_WRITTEN))
    return FileWork(getattr(import_module(home), verb))
