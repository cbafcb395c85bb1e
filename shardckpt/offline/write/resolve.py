"""Full arrays of an open checkpoint: located, proven complete, and read block by block."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from shardckpt.boxes import Box, Shape, chunk_box, contiguous_blocks, full_box
from shardckpt.dtypes import bits, nbytes
from shardckpt.format.chunk_reader import PieceReader, ReadItem
from shardckpt.format.reader import Reader
from shardckpt.manifest import Manifest, TensorEntry
from shardckpt.plan.layout.copy_plan import as_bytes
from shardckpt.plan.layout.coverage import locate


def row_shard(shape: Shape, ranks: int, rank: int) -> Box:
    """Return the rows of a rank as `torch.chunk` splits them; the box may be empty.

    Args:
        shape: Of the array, of one dimension at least, in elements.
        ranks: How many there are.
        rank: Which.
    """
    return chunk_box(shape, 0, ranks, rank)


def same_bits(reader: Reader, manifest: Manifest, a: TensorEntry, b: TensorEntry) -> bool:
    """Return True if two arrays of one checkpoint hold the same bits, block by block."""
    from_a, from_b = locate(reader, manifest, [a, b])
    return all(x == y for x, y in zip(read_blocks(reader, from_a), read_blocks(reader, from_b), strict=True))


def read_blocks(reader: Reader, entry: TensorEntry, block_bytes: int = 1 << 22) -> Iterator[bytearray]:
    """Yield the bytes of a resolved array in row-major order, block by block.

    Args:
        reader: The open checkpoint.
        entry: With resolved pieces.
        block_bytes: Most bytes of a block.

    Raises:
        CheckpointError: The bytes cannot be read.
    """
    if bits(entry.stored) % 8:
        entry = as_bytes(entry)
    pieces = PieceReader(reader.store)
    most = max(block_bytes * 8 // bits(entry.stored), 1)
    for box in contiguous_blocks(full_box(entry.shape), most) if prod(entry.shape) else ():
        buffer = bytearray(nbytes(entry.stored, box.volume))
        pieces.fill([ReadItem(entry.pieces, box, entry.stored, memoryview(buffer))])
        yield buffer
