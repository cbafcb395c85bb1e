"""The earlier place of what a target's plan consists of, for targets of other packages."""

from __future__ import annotations

from shardckpt.offline.write.conversion import FinalFiles, Hashes, Layout

__all__ = ["FinalFiles", "Hashes", "Layout"]
