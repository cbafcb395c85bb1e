"""Verbs without a job: consolidate, convert, inspect, verify, diff. One process, no model, no torch.

The package can be called: `shardckpt.convert(src, dst)` is the verb, `shardckpt.convert.export` a module of the room.
Both names are decided, and importing a submodule binds the package to `shardckpt.convert` whenever it likes.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallableRoom(ModuleType):
    """A package that passes calls on to the verb of its own name."""

    def __call__(self, src: str, dst: str, **options: Any) -> Any:
        from shardckpt.convert.export import convert  # noqa: PLC0415  (the room is bound before its modules load)

        return convert(src, dst, **options)


sys.modules[__name__].__class__ = _CallableRoom
