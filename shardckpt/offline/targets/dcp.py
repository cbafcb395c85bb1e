"""`--to dcp`: a folder that `torch.distributed.checkpoint` loads, cut for any number of ranks, `.metadata` last."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardckpt.boxes import Box, full_box
from shardckpt.errors import NameCollisionError
from shardckpt.format.dcp.writer import SliceChunk, SliceFile, encode_metadata, make_object, slice_files
from shardckpt.format.reader import Reader
from shardckpt.format.torchsave.writer import ArchiveWriter
from shardckpt.manifest import Path, dotted
from shardckpt.offline.select.checkpoint_content import Content
from shardckpt.offline.select.selection import Selection
from shardckpt.offline.write.report import Meter
from shardckpt.offline.write.resolve import row_shard
from shardckpt.offline.write.stream import MemoryBudget, TensorPart, write_parts
from shardckpt.plan.layout.output_files import OutputTensor
from shardckpt.plan.layout.write_plan import LocalTensor, plan_save
from shardckpt.plan.optim.optim_keys import STATE
from shardckpt.plan.optim.output_keys import to_state_paths
from shardckpt.storage.store import Writer


@dataclass(frozen=True, slots=True)
class DcpFile:
    """A `.distcp` file, decided.

    Attributes:
        file: Where its bytes go.
        arrays: Where they come from, by path.
    """

    file: SliceFile
    arrays: Mapping[Path, OutputTensor]

    @property
    def name(self) -> str:
        """In the target."""
        return self.file.name

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        return self.file.nbytes

    @property
    def count(self) -> int:
        """Chunks of tensors in it."""
        return sum(each.archive is not None for each in self.file.slices)

    def write(
        self, reader: Reader, writer: Writer, *, budget: MemoryBudget, allow_overflow: bool, meter: Meter
    ) -> tuple[int, ...]:
        """Write it from start to end; the caller closes the writer.

        Raises:
            CheckpointError: The source's bytes cannot be read, or a cast overflows.
            StorageError: Reading or writing failed.
        """
        sink = _Slices(self.file, writer)
        parts = _parts(self.arrays, (each.what for each in self.file.slices if isinstance(each.what, SliceChunk)))
        write_parts(reader, parts, sink, budget=budget, allow_overflow=allow_overflow, meter=meter)
        sink.close()
        return ()


def _parts(arrays: Mapping[Path, OutputTensor], chunks: Iterable[SliceChunk]) -> Iterable[TensorPart]:
    for chunk in chunks:
        tensor = arrays[chunk.path]
        if tensor.members:
            yield from (TensorPart(member, full_box(member.shape)) for member in tensor.members)
        else:
            yield TensorPart(tensor, chunk.box)


class _Slices:
    """Writes the slices of a file one after the other as the bytes of their elements are given.

    Args:
        file: The file.
        writer: Where it goes.
    """

    def __init__(self, file: SliceFile, writer: Writer) -> None:
        self._slices, self._writer = file.slices, writer
        self._next = self._at = self._missing = 0
        self._archive: ArchiveWriter | None = None
        self._advance()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Take the next bytes of the chunks; they may be the end of one and the start of another."""
        rest = memoryview(data).cast("B")
        while len(rest):
            assert self._archive is not None, "more bytes than the slices have"
            part = rest[: self._missing]
            self._archive.write(part)
            self._missing -= len(part)
            rest = rest[len(part) :]
            self._advance()

    def close(self) -> None:
        """Check that every slice is written."""
        assert self._next == len(self._slices) and self._archive is None, "bytes of a slice were never given"

    def _advance(self) -> None:
        """Write slices until one waits for bytes."""
        while not self._missing:
            if self._archive is not None:
                self._archive.close()
                self._archive = None
            if self._next == len(self._slices):
                return
            what, archive, offset, nbytes = self._slices[self._next]
            self._next += 1
            self._writer.write(bytes(offset - self._at))
            self._at = offset + nbytes
            if archive is None:
                assert not isinstance(what, SliceChunk), "chunks have archives"
                self._writer.write(what.content)
                continue
            assert isinstance(what, SliceChunk), "objects have their bytes"
            self._archive = ArchiveWriter(archive, self._writer.write)
            self._missing = what.nbytes


def build_content(selection: Selection) -> Content:
    """Build the content of a selection as torch would save it: `model` and `optim`."""
    arrays: dict[Path, OutputTensor] = {("model", tensor.name): tensor for tensor in selection.model}
    ties: dict[Path, Path] = {
        ("model", name): ("model", kept) for name, kept in selection.ties.items() if ("model", kept) in arrays
    }
    values: dict[Path, object] = {}
    if selection.groups is not None:
        state, rest = to_state_paths(selection.optim, selection.groups)
        arrays |= {_as_torch(("optim", *path)): tensor for path, tensor in state.items()}
        for path, value in rest.items():
            values |= flatten_value(value, _as_torch(("optim", *path)))
    order: tuple[Path, ...] = tuple(("model", name) for name in selection.order)
    return Content(arrays, ties, values, (*order, *arrays) if order else ())


def to_torch_path(path: Path) -> Path:
    """Return a path as torch has it: numbers count lists, but those of an optimizer's parameters are keys."""
    return tuple(str(key) if i and path[i - 1] == STATE and isinstance(key, int) else key for i, key in enumerate(path))


def _as_torch(path: Path) -> Path:
    """Keys of dicts are text for torch, numbers count lists: a parameter's number is a key."""
    return tuple(map(str, path))


def flatten_value(value: Any, path: Path) -> dict[Path, object]:
    """Flatten a value as torch's planner does: dicts, and lists that hold dicts."""
    found: dict[Path, object] = {}
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            made = flatten_value(inner, (*path, str(key)))
            if not found.keys().isdisjoint(made):
                raise NameCollisionError("two keys of a dict read alike as text", where=dotted(path), found=repr(key))
            found |= made
    elif isinstance(value, list) and _is_opened(value):
        for i, inner in enumerate(value):
            found |= flatten_value(inner, (*path, i))
    else:
        found[path] = value
    return found


def _is_opened(value: list[Any]) -> bool:
    return any(isinstance(each, dict) or (isinstance(each, list) and _is_opened(each)) for each in value)


def plan_ranks(content: Content, world_size: int, *, most_bytes: int, unique_suffix: str = "") -> list[DcpFile]:
    """Cut tensors as `torch.chunk` does, in their first dimension; each rank gets a file at least.

    Args:
        content: What is saved.
        world_size: For how many ranks.
        most_bytes: Bytes of a file after which another begins.
        unique_suffix: Put into every name, where the usual ones may still be read by somebody.

    Raises:
        UnsupportedError: A value or a type that torch would not read back.
    """
    held = [
        [LocalTensor(path, t.shape, t.dtype, tuple(_rows(t, world_size, rank))) for path, t in content.arrays.items()]
        for rank in range(world_size)
    ]
    plan = plan_save(held)
    boxes = [[(plan.arrays[task.array].path, task.box) for task in tasks] for tasks in plan.tasks]
    return _files(content, boxes, most_bytes, unique_suffix)


def plan_as_stored(content: Content, *, most_bytes: int, unique_suffix: str = "") -> list[DcpFile]:
    """Cut tensors as the source has them: a rank for each of its files, a chunk for each piece."""
    sources = dict.fromkeys(p.file for t in content.arrays.values() for m in t.output_parts for p in m.entry.pieces)
    rank_of = {file: rank for rank, file in enumerate(sources)}
    boxes: list[list[tuple[Path, Box]]] = [[] for _ in sources or ("",)]
    for path, tensor in content.arrays.items():
        pieces = [p for p in tensor.entry.pieces if p.box.volume]
        if not pieces or not tensor.shape:
            boxes[rank_of[pieces[0].file] if pieces else 0].append((path, full_box(tensor.shape)))
        for piece in pieces if tensor.shape else ():
            boxes[rank_of[piece.file]].append((path, piece.box))
    return _files(content, boxes, most_bytes, unique_suffix)


def encode_content_metadata(files: Sequence[DcpFile], content: Content) -> bytes:
    """Return the content of `.metadata`."""
    return encode_metadata((each.file for each in files), content.ties, content.order or tuple(content.arrays))


def _files(
    content: Content, boxes: Sequence[Sequence[tuple[Path, Box]]], most_bytes: int, unique_suffix: str
) -> list[DcpFile]:
    items = [make_object(path, value) for path, value in content.values.items()]
    files: list[DcpFile] = []
    for rank, mine in enumerate(boxes):
        chunks = [SliceChunk(path, content.arrays[path].shape, content.arrays[path].dtype, box) for path, box in mine]
        made = slice_files(rank, chunks, items if rank == 0 else (), most_bytes=most_bytes, unique_suffix=unique_suffix)
        files += [DcpFile(file, content.arrays) for file in made]
    return files


def _rows(tensor: OutputTensor, world_size: int, rank: int) -> Iterable[Box]:
    """Return what a rank holds: its rows, or all of what cannot be cut."""
    shape = tensor.shape
    if not shape or 0 in shape or tensor.members:
        return (full_box(shape),)
    rows = row_shard(shape, world_size, rank)
    return (rows,) if rows.volume else ()
