"""A target's content as torch saves it: values, tensors and their archive."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shardckpt.errors import UnsupportedError
from shardckpt.manifest import UNREAD, Path, dotted
from shardckpt.offline.targets.base import describe_lost, require_allowed
from shardckpt.offline.write.stream import FileSink, OutputFile, TensorPart, TensorStream
from shardckpt.plan.layout.coverage import locate
from shardckpt.plan.layout.output_files import OutputTensor
from shardckpt.reader import Reader
from shardckpt.readers.torchsave.writer import TYPES, ArchiveWriter, TorchArchive, encode_archive


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


@dataclass(frozen=True, slots=True)
class Content:
    """Content to write."""

    arrays: Mapping[Path, OutputTensor]
    ties: Mapping[Path, Path]  # further path of a tensor to its path in `arrays`
    values: Mapping[Path, object]
    order: tuple[Path, ...] = ()  # tensors in the order that readers see, with tied ones
    left_out: tuple[str, ...] = ()  # values that the target cannot store


def _keep_path(path: Path) -> Path:
    return path


def _keep_value(value: object, path: Path) -> Mapping[Path, object]:
    return {path: value}


def full_content(
    reader: Reader,
    title: str,
    *,
    allow_loss: bool,
    holds_value: Callable[[object], bool] = can_pickle,
    placed: Callable[[Path], Path] = _keep_path,
    leaves: Callable[[object, Path], Mapping[Path, object]] = _keep_value,
) -> Content:
    """Return a checkpoint's content after checking that it is complete."""
    manifest = reader.manifest
    lost = [f"{dotted(path)}, of type {e.dtype}" for path, e in manifest.tensors.items() if e.dtype not in TYPES]
    paths = [path for path, e in manifest.tensors.items() if path not in manifest.aliases and e.dtype in TYPES]
    entries = locate(reader, manifest, [manifest.tensors[path] for path in paths])
    values: dict[Path, object] = {}
    for path, entry in manifest.objects.items():
        value = reader.load_object(entry) if entry.value is UNREAD else entry.value
        for leaf, each in leaves(value, placed(path)).items():
            if holds_value(each):
                values[leaf] = each
            else:
                lost.append(describe_lost(leaf, each))
    require_allowed(lost, title, allow_loss=allow_loss)
    kept = set(paths)
    return Content(
        {placed(path): OutputTensor(dotted(path), e, e.dtype) for path, e in zip(paths, entries, strict=True)},
        {placed(path): placed(first) for path, first in manifest.aliases.items() if first in kept},
        values,
        tuple(map(placed, manifest.tensors)),
        tuple(f"left out: {what}" for what in lost),
    )
