"""A copy is read where it stays if its writer has memory for it, and written otherwise."""

from __future__ import annotations

from shardckpt.checkpoint.peers.copy_step import _copy_range
from shardckpt.storage.store import Read


class Source:
    """A file of 100 bytes."""

    def read(self, reads: list[Read]) -> None:
        for _, offset, buffer in reads:
            buffer[:] = bytes(range(100))[offset : offset + len(buffer)]


class MemoryWriter:
    """A writer with memory for some bytes; others are written."""

    def __init__(self, memory: memoryview | None) -> None:
        self.memory, self.written = memory, b""

    def extend(self, nbytes: int) -> memoryview | None:
        return None if self.memory is None else self.memory[:nbytes]

    def write(self, data: memoryview) -> None:
        self.written += bytes(data)


def test_a_range_is_read_into_the_memory_of_its_writer_and_not_copied_again():
    buffer = memoryview(bytearray(10))
    memory = memoryview(bytearray(20))
    for writer, filled, written in (
        (MemoryWriter(memory), bytes(range(5, 15)) + bytes(10), b""),
        (MemoryWriter(None), bytes(20), bytes(range(5, 15))),
    ):
        memory[:] = bytes(20)
        _copy_range(Source(), Read("file", 5, buffer), writer)
        assert (bytes(memory), writer.written) == (filled, written)
        assert bytes(buffer) == (written or bytes(10))
