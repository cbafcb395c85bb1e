"""Compatibility module with the earlier import path of a plan's classes."""

from __future__ import annotations

from shardckpt.offline.write.conversion import FinalFiles, Hashes, Layout

__all__ = ["FinalFiles", "Hashes", "Layout"]
