"""Describe a checkpoint for the page: tensors, pieces and files as columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from shardckpt.boxes import Box, strides
from shardckpt.dtypes import array_nbytes, bits
from shardckpt.errors import escape
from shardckpt.manifest import Manifest, Piece, Span, Strided, TensorEntry, dotted, split_numbers
from shardckpt.offline.results.contents import FileInfo, Inspection
from shardckpt.offline.results.problems import Problem

MAX_PIECES = 400_000  # a browser draws them at once; further pieces are counted, not listed

_MAX_OBJECTS = 20_000


class FileExtent(NamedTuple):
    """Bytes that hold a piece in a file."""

    offset: int
    nbytes: int
    is_exact: bool  # no other piece is in these bytes; False for compressed data and unopened containers


def find_file_extent(piece: Piece, dtype: str) -> FileExtent:
    """Return the bytes that hold a piece in its file; `dtype` is the tensor's."""
    layout = piece.layout
    if isinstance(layout, Span):
        return FileExtent(layout.offset, layout.nbytes, is_exact=True)
    if isinstance(layout, Strided):
        first, stop = _find_elements(layout, piece.box)
        at = layout.offset + first * bits(dtype) // 8
        is_exact = layout.strides == strides(piece.box.size)
        return FileExtent(at, array_nbytes(dtype, (stop - first,)), is_exact)
    return FileExtent(layout.offset, layout.nbytes, is_exact=False)


def _find_elements(layout: Strided, box: Box) -> tuple[int, int]:
    """Return a view's first element in its storage, and the end of the last."""
    if not box.volume:
        return layout.start, layout.start
    last = sum((size - 1) * stride for size, stride in zip(box.size, layout.strides, strict=True))
    return layout.start, layout.start + last + 1


def describe_checkpoint(manifest: Manifest, found: Inspection, *, max_pieces: int = MAX_PIECES) -> dict[str, Any]:
    """Return the data for a checkpoint's page: JSON values only."""
    # Names are coded by a segment table and pieces by columns: 100,000 tensors take a few MB.
    entries = list(manifest.tensors.values())
    files = sorted(found.files, key=_order)
    dtypes = list(dict.fromkeys(entry.dtype for entry in entries))
    return {
        "schema_version": 1,
        "kind": "checkpoint",
        "source": escape(found.source),
        "format": found.format,
        "nbytes": found.nbytes,
        "parts": {part: [*map(escape, places)] for part, places in found.parts.items()},
        "files": [
            {"name": escape(name), "nbytes": -1 if nbytes is None else nbytes, "rank": rank}
            for name, nbytes, rank in files
        ],
        "dtypes": dtypes,
        "names": _code_names([tensor.name for tensor in found.tensors]),
        "tensors": {
            "dtype": [dtypes.index(entry.dtype) for entry in entries],
            "shape": [entry.shape for entry in entries],
            "nbytes": [entry.nbytes for entry in entries],
            "pieces": [len(entry.pieces) for entry in entries],
        },
        "pieces": _list_pieces(entries, {file.name: index for index, file in enumerate(files)}, max_pieces),
        "ties": _code_ties(manifest),
        "objects": [(escape(name), text) for name, text in [*found.objects.items()][:_MAX_OBJECTS]],
        "objects_left_out": max(len(found.objects) - _MAX_OBJECTS, 0),
        "metadata": [(escape(name), escape(text)) for name, text in found.metadata.items()],
        "warnings": [*map(escape, found.warnings), *(each.message for each in found.problems if not each.tensors)],
        "faults": _list_faults(manifest, found.problems),
    }


def _order(file: FileInfo) -> tuple[bool, int, list[tuple[int, str]]]:
    """Return a key that sorts files by rank, then by name; numbers in a name count as numbers."""
    return file.rank is None, file.rank or 0, split_numbers(file.name)


def _code_names(names: Iterable[str]) -> dict[str, Any]:
    """Return dotted names as indexes into a list of segments."""
    known: dict[str, int] = {}
    coded = [[known.setdefault(segment, len(known)) for segment in escape(name).split(".")] for name in names]
    return {"segments": list(known), "tensors": coded}


def _code_ties(manifest: Manifest) -> list[tuple[int, int]]:
    """Return index pairs: a tied tensor, and the tensor that stores its elements."""
    index = {path: at for at, path in enumerate(manifest.tensors)}
    return [(index[path], index[kept]) for path, kept in manifest.aliases.items() if path in index and kept in index]


def _list_pieces(entries: list[TensorEntry], files: Mapping[str, int], limit: int) -> dict[str, Any]:
    """Return the pieces as columns, without boxes for full tensors."""
    total = sum(len(entry.pieces) for entry in entries)
    share = limit // max(len(entries), 1) if total > limit else total
    columns: dict[str, list[Any]] = {name: [] for name in ("tensor", "file", "offset", "nbytes", "is_exact", "box")}
    for index, entry in enumerate(entries):
        for piece in entry.pieces[:share]:
            where = find_file_extent(piece, entry.stored)
            is_full = piece.box.size == entry.shape
            row = (
                index,
                files[piece.file],
                where.offset,
                where.nbytes,
                int(where.is_exact),
                0 if is_full else piece.box,
            )
            for column, value in zip(columns.values(), row, strict=True):
                column.append(value)
    return {**columns, "total": total}


def _list_faults(manifest: Manifest, problems: Iterable[Problem]) -> list[dict[str, Any]]:
    """Return gaps, overlaps and missing bytes by tensor index."""
    index = {dotted(path): at for at, path in enumerate(manifest.tensors)}
    return [
        {"tensor": index[name], "kind": problem.kind, "box": str(problem.box), "text": problem.message}
        for problem in problems
        for name in problem.tensors
    ]
