"""Holder: a process that keeps files in shared memory, outside of the processes that write them."""
