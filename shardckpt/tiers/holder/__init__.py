"""Holder: a process that keeps files in shared memory, outside the processes that write them."""

__all__ = ["SCHEME"]

SCHEME = "shardckpt-memory"  # of URLs
