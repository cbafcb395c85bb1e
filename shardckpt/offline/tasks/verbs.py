"""Which verbs can be planned, and how their work is shared."""

from __future__ import annotations

from importlib import import_module

from shardckpt.errors import UsageError
from shardckpt.offline.tasks.computed_values import ComputedWork, Undo
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
_COMPUTED = {
    "copy": "shardckpt.offline.copy",
    "diff": "shardckpt.offline.diff",
    "history": "shardckpt.offline.run_history.history",
    "stats": "shardckpt.offline.stats",
    "verify": "shardckpt.offline.verify",
}


def find_work(verb: str) -> Work:
    """Return how a verb's work is shared. Raises UsageError for other verbs."""
    home = _WRITTEN.get(verb) or _COMPUTED.get(verb)
    if home is None:
        known = ", ".join(sorted({*_WRITTEN, *_COMPUTED}))
        raise UsageError("a plan needs a verb that can be shared", found=repr(verb), expected=known)
    call = getattr(import_module(home), verb)
    if verb in _WRITTEN:
        return FileWork(call)
    if verb != "copy":
        return ComputedWork(call)
    copies = import_module("shardckpt.offline.tasks.copied_folders")
    return ComputedWork(call, Undo(copies.CopiedFolder, copies.find_copies, copies.remove_copies))
