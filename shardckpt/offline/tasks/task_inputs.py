"""What a task reads and writes, as data: with it, a task neither opens the source nor plans again.

The folder of a plan has a block of JSON for each task, back to back. The plan has their ends and digests, so a task
reads its own alone. The commit plans again, and requires equal blocks.
"""

from __future__ import annotations

import hashlib
import operator
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, NamedTuple

from shardckpt.boxes import Box, full_box, intersect
from shardckpt.encodings import typed_json
from shardckpt.encodings.typed_json import OMITTED
from shardckpt.errors import FormatError
from shardckpt.manifest import Manifest, Piece, Span, TensorEntry, dotted
from shardckpt.native.reader import NativeReader, find_hashes
from shardckpt.native.records import ArrayRecord, Count, Dtype, FileRecord, require_hashes, require_rows
from shardckpt.native.verified_store import VerifiedStore
from shardckpt.offline.tasks.task_plan import MAX_PLAN_BYTES, Block, TaskPlan
from shardckpt.offline.write.conversion import ConversionPlan, Layout, WriteSettings
from shardckpt.offline.write.stream import OutputFile, PlainContent
from shardckpt.plan.layout.coverage import locate
from shardckpt.plan.layout.output_files import OutputTensor
from shardckpt.reader import Reader
from shardckpt.storage.resolve_url import open_place
from shardckpt.storage.store import read_bytes

__all__ = ["INPUTS", "TaskInput", "describe_blocks", "encode_inputs", "open_input", "read_inputs"]

INPUTS = "inputs"  # file in the folder of a plan


class _InputFile(NamedTuple):
    """A file of the source."""

    name: str
    nbytes: Count
    version: str  # as of `read_version`
    hashes: Annotated[bytes | None, OMITTED] = None  # of its blocks or groups, in a native step


class _Box(NamedTuple):
    """A box in a tensor."""

    offset: tuple[Count, ...]
    size: tuple[Count, ...]


class _InputTensor(NamedTuple):
    """A tensor to write, from contiguous pieces."""

    dtype: Dtype  # as written
    stored: ArrayRecord
    box: Annotated[_Box | None, OMITTED] = None  # the part that is written; None for all


class _PlainFile(NamedTuple):
    """A file to write: a header, and full tensors or one part of each."""

    name: str
    header: bytes
    tensors: tuple[_InputTensor, ...]
    is_hashed: Annotated[bool, OMITTED] = False  # it has parts


@dataclass(frozen=True, slots=True)
class TaskInput:
    """What one task reads and writes.

    Attributes:
        source: Path or URL of the folder with the source's files.
        others: Digest over other files that the plan reads, as of `digest_paths`.
        settings: How files are written.
        files: The source's files that the task reads.
        parts: The files that it writes.
    """

    source: str
    others: str
    settings: WriteSettings
    files: tuple[_InputFile, ...]
    parts: tuple[_PlainFile, ...]

    @property
    def versions(self) -> dict[str, str]:
        """Version of each of the source's files when the plan was made."""
        return {file.name: file.version for file in self.files}


def encode_inputs(
    plan: TaskPlan, conversion: ConversionPlan, layout: Layout, versions: Mapping[str, str], others: str
) -> list[bytes]:
    """Return the block of each task; none if the files are more than copied and cast pieces of plain files."""
    reader = conversion.reader
    contents = {file.name: file.plain for file in layout.payload}
    if not _is_plain_source(reader) or not all(map(_is_plain, contents.values())):
        return []
    hashes = {file.place: file.hashes for file in reader.contents.files} if isinstance(reader, NativeReader) else {}
    files = {
        name: _InputFile(name, size, versions.get(name, ""), hashes.get(name))
        for name, size in reader.manifest.files.items()
    }
    new, blocks, left = TaskInput(reader.store.url, others, conversion.settings, (), ()), [], MAX_PLAN_BYTES
    for task in plan.tasks:
        parts = {part.name: contents[part.name] for part in task}
        blocks.append(typed_json.dump(_with_parts(new, parts, files)))
        left -= len(blocks[-1])
        if left < 0:  # hashes of files that all tasks read
            return []
    return blocks


def _is_plain_source(reader: Reader) -> bool:
    """Return True if a task can open the store of a source by itself."""
    store = reader.raw_store
    has_own = store is reader.store or isinstance(reader, NativeReader)
    return has_own and type(store) is type(open_place(store.url)) and not reader.manifest.elsewhere


def _is_plain(content: PlainContent | None) -> bool:
    return content is not None and all(
        tensor.change is None and all(type(piece.layout) is Span for piece in tensor.entry.pieces)
        for tensor in content.tensors
    )


def _with_parts(
    new: TaskInput, contents: Mapping[str, PlainContent | None], files: Mapping[str, _InputFile]
) -> TaskInput:
    numbers: dict[str, int] = {}
    parts = tuple(
        _PlainFile(name, content.header, tuple(_describe_tensors(content, numbers)), content.boxes is not None)
        for name, content in contents.items()
        if content is not None
    )
    return replace(new, files=tuple(files[name] for name in numbers), parts=parts)


def _describe_tensors(content: PlainContent, numbers: dict[str, int]) -> Iterator[_InputTensor]:
    """Yield tensors as data; new source files get the next numbers."""
    for tensor, part in zip(content.tensors, content.boxes or [None] * len(content.tensors), strict=True):
        full, pieces = _find_needed(tensor, part)
        rows = array("Q")
        for box, file, layout in pieces:
            start = _move(box, full).offset
            rows.extend((numbers.setdefault(file, len(numbers)), layout.offset, *start, *box.size))
        record = ArrayRecord((tensor.name,), tensor.entry.stored, full.size, rows)
        yield _InputTensor(tensor.dtype, record, None if part is None else _Box(*_move(part, full)))


def _find_needed(tensor: OutputTensor, part: Box | None) -> tuple[Box, Sequence[Piece]]:
    """Return the pieces with elements of a part, and the box that they fill; all pieces if they fill none."""
    full, pieces = full_box(tensor.shape), tensor.entry.pieces
    needed = [piece for piece in pieces if part is not None and intersect(piece.box, part) is not None]
    if part is None or not needed or not part.size:
        return full, pieces
    offset = tuple(map(min, zip(*(piece.box.offset for piece in needed), strict=True)))
    stop = map(max, zip(*(piece.box.stop for piece in needed), strict=True))
    filled = Box(offset, tuple(map(operator.sub, stop, offset)))
    return (filled, needed) if sum(piece.box.volume for piece in needed) == filled.volume else (full, pieces)


def _move(box: Box, start: Box) -> Box:
    """Return a box with its offset from the start of another."""
    return Box(tuple(map(operator.sub, box.offset, start.offset)), box.size)


def describe_blocks(blocks: Sequence[bytes]) -> tuple[Block, ...]:
    """Return the ends and digests of blocks that are stored back to back."""
    end, found = 0, []
    for block in blocks:
        end += len(block)
        found.append(Block(end, _digest(block)))
    return tuple(found)


def _digest(block: bytes) -> str:
    return hashlib.sha256(block).hexdigest()


def read_inputs(plan: TaskPlan, names: set[str]) -> Iterator[TaskInput]:
    """Yield the inputs of the tasks that have some of the named parts, with these parts alone.

    Raises:
        FormatError: A block is not the one that was planned.
        StorageError: It cannot be read.
    """
    store, start = open_place(plan.folder), 0
    for block, task in zip(plan.inputs, plan.tasks, strict=True):
        wanted = {part.name for part in task}.intersection(names)
        if wanted:
            data, where = read_bytes(store, INPUTS, start, block.end - start), f"{plan.folder}/{INPUTS}"
            if _digest(data) != block.digest:
                raise _not_planned_error(where, "another digest")
            found = typed_json.load(TaskInput, data, where=where)
            parts = tuple(part for part in found.parts if part.name in wanted)
            if sorted(part.name for part in parts) != sorted(wanted):
                raise _not_planned_error(where, "other parts")
            yield replace(found, parts=parts)
        start = block.end


def _not_planned_error(where: str, found: str) -> FormatError:
    return FormatError("a task's input must be as planned", where=where, found=found, fix="Make a new plan.")


def open_input(found: TaskInput, planned: Mapping[str, int]) -> tuple[Reader, list[OutputFile]]:
    """Return a reader of a task's source files, and the files to write, whose sizes are planned.

    Raises:
        CheckpointError: The pieces are not in the files, or do not cover the tensors; or a file has another size.
    """
    store, where = open_place(found.source), found.source
    sizes, names = {file.name: file.nbytes for file in found.files}, [file.name for file in found.files]
    records = [require_hashes(FileRecord(*file[:2], file.hashes), where) for file in found.files]
    hashes = {record.name: hashed for record in records if (hashed := find_hashes(record)) is not None}
    reader = Reader(VerifiedStore(store, hashes) if hashes else store, Manifest("plan", sizes, {}))
    files = []
    for part in found.parts:
        read = partial(_read_entry, names=names, where=f"{where} to {part.name}")
        entries = locate(reader, reader.manifest, [read(tensor.stored) for tensor in part.tensors])
        tensors = zip(entries, part.tensors, strict=True)
        made = tuple(OutputTensor(dotted(entry.path), entry, tensor.dtype) for entry, tensor in tensors)
        boxes = tuple(_read_box(tensor, f"{where} to {part.name}") for tensor in part.tensors)
        files.append(PlainContent(part.header, made, boxes if part.is_hashed else None).plan_file(part.name))
        if files[-1].nbytes != planned[part.name]:
            raise _not_planned_error(part.name, f"{files[-1].nbytes} bytes")
    return reader, files


def _read_box(tensor: _InputTensor, where: str) -> Box:
    box = full_box(tensor.stored.shape) if tensor.box is None else Box(*tensor.box)
    if not box.within(tensor.stored.shape):
        raise _not_planned_error(where, f"a part at {box}")
    return box


def _read_entry(record: ArrayRecord, *, names: Sequence[str], where: str) -> TensorEntry:
    require_rows(record, len(names), where)
    return TensorEntry(record.path, record.shape, record.dtype, record.pieces(names))
