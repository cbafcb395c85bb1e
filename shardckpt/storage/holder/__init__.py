"""Holder: a process that keeps files in shared memory, outside of the processes that write them."""

__all__ = ["SCHEME"]

SCHEME = "shardckpt-memory"  # scheme of the URLs of held files
