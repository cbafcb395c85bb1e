"""Compatibility module: earlier import path of the classes of a target's plan, for targets of other packages."""

from __future__ import annotations

from shardckpt.offline.write.conversion import FinalFiles, Hashes, Layout

__all__ = ["FinalFiles", "Hashes", "Layout"]
