"""Target `dcp`: a folder that `torch.distributed.checkpoint` loads.

Any number of ranks can load it; `.metadata` is written last.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardckpt.boxes import Box, chunk_box, full_box
from shardckpt.encodings.pickle_stubs import Ordered
from shardckpt.errors import NameCollisionError
from shardckpt.manifest import Path, dotted
from shardckpt.native.payload import PayloadChunk
from shardckpt.offline.select.selection import Selection
from shardckpt.offline.targets.base import FRESH, Conversion, PlannedRanks, RankOptions, Target
from shardckpt.offline.targets.torch_archive import Content, can_pickle, full_content
from shardckpt.offline.write.conversion import Layout, PlannedFiles
from shardckpt.offline.write.stream import FileSink, OutputFile, TensorPart, TensorStream
from shardckpt.plan.layout.output_files import OutputTensor
from shardckpt.plan.layout.write_plan import LocalTensor, plan_save
from shardckpt.plan.optim.optim_keys import STATE
from shardckpt.plan.optim.output_keys import to_state_paths
from shardckpt.reader import Reader
from shardckpt.readers.dcp.writer import METADATA, SliceFile, encode_metadata, make_object, slice_files
from shardckpt.readers.torchsave.writer import TYPES, ArchiveWriter
from shardckpt.storage.replaceable import FolderKind


def plan(conversion: Conversion) -> PlannedFiles:
    """Plan `.distcp` files and `.metadata`."""
    content = build_content(conversion.selection)

    def plan_layout(unique_suffix: str, _: str) -> Layout:
        boxes = split_boxes_as_stored(content) if conversion.keeps_split else split_boxes(content, 1)
        layout = _plan_layout(content, boxes, conversion.max_file_bytes, unique_suffix)
        return replace(layout, small={**conversion.encode_config(), **layout.small})

    return PlannedFiles(_KIND, METADATA, plan_layout, conversion.nbytes)


def plan_ranks(reader: Reader, options: RankOptions) -> PlannedRanks:
    """Plan a full checkpoint as a save on several ranks."""
    content = full_content(
        reader,
        TARGET.title,
        allow_loss=options.allow_loss,
        holds_value=_holds_value,
        placed=to_torch_path,
        leaves=flatten_value,
    )
    boxes = split_boxes(content, options.world_size) if options.world_size else split_boxes_as_stored(content)
    files = PlannedFiles(
        _KIND,
        METADATA,
        lambda unique_suffix, _: _plan_layout(content, boxes, options.max_file_bytes, unique_suffix),
        sum(tensor.nbytes for tensor in content.arrays.values()),
    )
    return PlannedRanks(files, content.arrays, content.ties, (*reader.manifest.warnings, *content.left_out))


def _holds_value(value: object) -> bool:
    return can_pickle(value) and not _holds_open_ordered_dict(value)


def _holds_open_ordered_dict(value: object) -> bool:
    """Return True if a value contains an `OrderedDict` that torch's planner would flatten to a dict."""
    if isinstance(value, (OrderedDict, Ordered)):
        return bool(value)
    if isinstance(value, dict):
        return any(map(_holds_open_ordered_dict, value.values()))
    return isinstance(value, list) and any(map(_holds_open_ordered_dict, value))


def _parts(arrays: Mapping[Path, OutputTensor], chunks: Iterable[PayloadChunk]) -> Iterable[TensorPart]:
    for chunk in chunks:
        tensor = arrays[chunk.path]
        if tensor.members:
            yield from (TensorPart(member, full_box(member.shape)) for member in tensor.members)
        else:
            yield TensorPart(tensor, chunk.box)


class _Slices:
    """Writes a file's slices in order, from their elements' bytes."""

    def __init__(self, file: SliceFile, writer: FileSink) -> None:
        self._slices, self._writer = file.slices, writer
        self._next = self._at = self._missing = 0
        self._archive: ArchiveWriter | None = None
        self._advance()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write the next bytes, which may span several chunks."""
        rest = memoryview(data).cast("B")
        while len(rest):
            assert self._archive is not None, "more bytes than the slices have"
            part = rest[: self._missing]
            self._archive.write(part)
            self._missing -= len(part)
            rest = rest[len(part) :]
            self._advance()

    def close(self) -> None:
        """Check that every slice has been written."""
        assert self._next == len(self._slices) and self._archive is None, "a slice lacks bytes"

    def _advance(self) -> None:
        """Write slices until one needs a tensor's bytes."""
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
                assert not isinstance(what, PayloadChunk), "chunks have archives"
                self._writer.write(what.content)
                continue
            assert isinstance(what, PayloadChunk), "objects have their bytes"
            self._archive = ArchiveWriter(archive, self._writer.write)
            self._missing = what.nbytes


def build_content(selection: Selection) -> Content:
    """Build a selection's content in torch's form: `model` and `optim`."""
    arrays: dict[Path, OutputTensor] = {("model", tensor.name): tensor for tensor in selection.model}
    ties: dict[Path, Path] = {
        ("model", name): ("model", kept) for name, kept in selection.ties.items() if ("model", kept) in arrays
    }
    values: dict[Path, object] = {}
    if selection.groups is not None:
        state, rest = to_state_paths(selection.optim, selection.groups)
        arrays |= {to_torch_path(("optim", *path)): tensor for path, tensor in state.items()}
        for path, value in rest.items():
            values |= flatten_value(value, to_torch_path(("optim", *path)))
    order: tuple[Path, ...] = tuple(("model", name) for name in selection.order)
    return Content(arrays, ties, values, (*order, *arrays) if order else ())


def to_torch_path(path: Path) -> Path:
    """Return a path in torch's form."""
    # Numbers are list indexes, but parameter ids in optimizers are keys.
    return tuple(str(key) if i and path[i - 1] == STATE and isinstance(key, int) else key for i, key in enumerate(path))


def flatten_value(value: Any, path: Path) -> dict[Path, object]:
    """Flatten a value like torch's planner: dicts, and lists that contain dicts."""
    found: dict[Path, object] = {}
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            made = flatten_value(inner, (*path, str(key)))
            if not found.keys().isdisjoint(made):
                raise NameCollisionError("two dict keys are equal as text", where=dotted(path), found=repr(key))
            found |= made
    elif isinstance(value, list) and _is_opened(value):
        for i, inner in enumerate(value):
            found |= flatten_value(inner, (*path, i))
    else:
        found[path] = value
    return found


def _is_opened(value: list[Any]) -> bool:
    return any(isinstance(each, dict) or (isinstance(each, list) and _is_opened(each)) for each in value)


Boxes = Sequence[Sequence[tuple[Path, Box]]]  # for each rank


def split_boxes(content: Content, world_size: int) -> Boxes:
    """Split tensors along their first dimension, like `torch.chunk`."""
    local_tensors = [
        [LocalTensor(path, t.shape, t.dtype, tuple(_rows(t, world_size, rank))) for path, t in content.arrays.items()]
        for rank in range(world_size)
    ]
    plan = plan_save(local_tensors)
    return [[(plan.arrays[task.array].path, task.box) for task in tasks] for tasks in plan.tasks]


def split_boxes_as_stored(content: Content) -> Boxes:
    """Split tensors as in the source: a rank per file, a chunk per piece."""
    sources = dict.fromkeys(p.file for t in content.arrays.values() for m in t.output_parts for p in m.entry.pieces)
    ranks = {file: rank for rank, file in enumerate(sources)}
    boxes: list[list[tuple[Path, Box]]] = [[] for _ in sources or ("",)]
    for path, tensor in content.arrays.items():
        pieces = [p for p in tensor.entry.pieces if p.box.volume]
        if not pieces or not tensor.shape:
            boxes[ranks[pieces[0].file] if pieces else 0].append((path, full_box(tensor.shape)))
        for piece in pieces if tensor.shape else ():
            boxes[ranks[piece.file]].append((path, piece.box))
    return boxes


def _plan_layout(content: Content, boxes: Boxes, max_file_bytes: int, unique_suffix: str) -> Layout:
    """Return the files, with at least one for each rank."""
    items = [make_object(path, value) for path, value in content.values.items()]
    files: list[SliceFile] = []
    for rank, own_boxes in enumerate(boxes):
        chunks = [
            PayloadChunk(path, content.arrays[path].shape, content.arrays[path].dtype, b) for path, b in own_boxes
        ]
        own_items = items if rank == 0 else ()
        files += slice_files(rank, chunks, own_items, most_bytes=max_file_bytes, unique_suffix=unique_suffix)
    metadata = encode_metadata(files, content.ties, content.order or tuple(content.arrays))
    return Layout(tuple(_dcp_file(file, content.arrays) for file in files), {METADATA: metadata})


def _dcp_file(file: SliceFile, arrays: Mapping[Path, OutputTensor]) -> OutputFile:
    chunks = [piece.what for piece in file.slices if isinstance(piece.what, PayloadChunk)]

    def encode(stream: TensorStream, writer: FileSink) -> bytes:
        sink = _Slices(file, writer)
        stream.write_parts(_parts(arrays, chunks), sink)
        sink.close()
        return b""

    return OutputFile(file.name, file.nbytes, len(chunks), encode)


def _rows(tensor: OutputTensor, world_size: int, rank: int) -> Iterable[Box]:
    """Return a rank's box: its rows, or the full tensor if it cannot be split."""
    shape = tensor.shape
    if not shape or 0 in shape or tensor.members:
        return (full_box(shape),)
    rows = chunk_box(shape, 0, world_size, rank)
    return (rows,) if rows.volume else ()


_KIND = FolderKind(
    "one DCP checkpoint",
    payload=re.compile(rf"__\d+_\d+{FRESH}\.distcp"),
    other_names=re.compile(re.escape(METADATA)),
)
TARGET = Target(
    name="dcp",
    title="a DCP checkpoint",
    files="`__{rank}_{n}.distcp` and `.metadata`, which comes last",
    read_by="`torch.distributed.checkpoint`, `dcp_to_torch_save`",
    plan=plan,
    holds_dtype=TYPES.__contains__,
    holds_value=_holds_value,
    plan_ranks=plan_ranks,
)
