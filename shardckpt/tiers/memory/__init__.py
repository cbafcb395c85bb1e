"""Captures in the memory of a node: the run's folder, its lease, and the janitor, which removes unused captures."""

__all__ = ["SCHEME"]

SCHEME = "shardckpt-memory"  # of URLs, which every node maps to its own folder
