"""Build `torch.save` files, for all targets that write them."""

from __future__ import annotations

from collections.abc import Sequence

from shardckpt.errors import UnsupportedError
from shardckpt.offline.write.stream import FileSink, OutputFile, TensorPart, TensorStream
from shardckpt.readers.torchsave.writer import ArchiveWriter, TorchArchive, encode_archive


def archive_file(
    name: str, archive: TorchArchive, parts: Sequence[TensorPart], count: int, head: bytes = b""
) -> OutputFile:
    """Return a `torch.save` file with `head`, then `parts`, in its storages."""

    def encode(stream: TensorStream, writer: FileSink) -> bytes:
        sink = ArchiveWriter(archive, writer.write)
        sink.write(head)
        stream.write_parts(parts, sink)
        sink.close()
        return b""

    return OutputFile(name, archive.nbytes, count, encode)


def can_pickle(value: object) -> bool:
    """Return True if a `torch.save` file can store a value exactly."""
    try:
        encode_archive(value)
    except UnsupportedError:
        return False
    return True
