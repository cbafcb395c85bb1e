"""Implement `inspect`: show content from headers and metadata only, also as a map of files and bytes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from shardckpt.boxes import Box, strides
from shardckpt.dtypes import array_nbytes, bits
from shardckpt.encodings.budget import gc_paused
from shardckpt.errors import UsageError, escape
from shardckpt.manifest import UNREAD, Manifest, Piece, Span, Strided, TensorEntry, dotted, split_numbers
from shardckpt.notebook import draw_in_notebooks
from shardckpt.offline.report_html import render_page, require_report_target, write_page
from shardckpt.offline.results.contents import (
    FileInfo,
    Inspection,
    Problem,
    describe_entry,
    find_rank,
    from_fault,
    missing_file,
)
from shardckpt.offline.results.tensor_stats import TensorStats, describe_values
from shardckpt.offline.select.config_files import load_param_shapes
from shardckpt.plan.layout.coverage import faults
from shardckpt.plan.naming.sections import find_sections, model_paths, split_flat_names
from shardckpt.reader import NamedBases, Reader
from shardckpt.readers.registry import open_checkpoint, resolve_step
from shardckpt.storage.resolve_url import as_url

_SHOWN = 60
_MAX_FAULTS = 1_000

_MAX_PIECES = 400_000  # a browser draws them at once; further pieces are counted, not listed

_MAX_OBJECTS = 20_000


def inspect(
    src: str | os.PathLike[str],
    *,
    shapes_from: str | os.PathLike[str] = "",
    base: NamedBases = "",
    html: str | os.PathLike[str] = "",
) -> Inspection:
    """Describe a checkpoint without reading tensor data or executing code.

    Args:
        src: Checkpoint in any readable format: a path or URL.
        shapes_from: Any checkpoint of the same model with full tensors, to show FSDP1's flat parameters as their
            members.
        base: Folder of the base checkpoint if it was moved, as for `load`.
        html: Path or URL for one page, which needs no network. It shows sizes by name, the file, rank and bytes for
            every box, and missing or damaged content.

    Returns:
        Tensors, values, files and parts. Gaps, overlaps and short files are listed as problems, not raised.

    Raises:
        UsageError: The source does not exist or is not recognized, the shapes do not match, or `html` names another
            file than an earlier report.
        CheckpointError: Headers, metadata or pickles cannot be read, or are rejected.
        StorageError: Reading failed.

    Examples:
        >>> shardckpt.inspect("run/step-100").nbytes  # doctest: +SKIP
    """
    with gc_paused():
        return _inspect(resolve_step(src), as_url(shapes_from), base, as_url(html))


def _inspect(src: str, shapes_from: str, base: NamedBases, html: str) -> Inspection:
    if html:
        require_report_target(html)
    reader = open_checkpoint(src, base)
    if shapes_from:
        reader = load_param_shapes(reader, shapes_from)
    manifest = split_flat_names(reader.manifest)
    found = replace(describe_manifest(src, manifest), stats=_list_stored_stats(reader))
    if html:
        write_page(_render_map(found, manifest), html)
    return found


def _list_stored_stats(reader: Reader) -> tuple[TensorStats, ...]:
    tensors = reader.manifest.tensors
    stored = ((path, reader.value_stats(path)) for path in tensors if path not in reader.manifest.aliases)
    return tuple(
        describe_values(dotted(path), tensors[path], found, is_stored=True)
        for path, found in stored
        if found is not None
    )


def describe_manifest(src: str, manifest: Manifest) -> Inspection:
    """Return what `inspect` returns for a manifest that was read from `src`."""
    return Inspection(
        source=src,
        format=manifest.format,
        files=tuple(FileInfo(name, None if n < 0 else n, find_rank(name)) for name, n in manifest.files.items()),
        tensors=tuple(describe_entry(dotted(path), entry) for path, entry in manifest.tensors.items()),
        objects={dotted(path): _render(entry.value) for path, entry in manifest.objects.items()},
        ties={dotted(a): dotted(b) for a, b in manifest.aliases.items()},
        metadata=dict(manifest.metadata),
        parts=_parts(manifest),
        warnings=tuple(manifest.warnings),
        problems=(
            *map(missing_file, manifest.missing),
            *map(from_fault, faults(manifest, manifest.tensors.values(), limit=_MAX_FAULTS)),
        ),
    )


def _render(value: object) -> str:
    if value is UNREAD:
        return ""
    text = escape(repr(value))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _parts(manifest: Manifest) -> dict[str, tuple[str, ...]]:
    try:
        found = find_sections(manifest)
    except UsageError:
        return {}
    return {
        "model": (dotted(found.model),) if any(True for _ in model_paths(manifest, found)) else (),
        "optimizer": tuple(map(dotted, found.optimizers)),
        "variants": tuple(manifest.variants),
        "other": tuple(name for name in map(dotted, found.others) if name not in manifest.variants),
    }


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


def _render_map(found: Inspection, manifest: Manifest | None = None) -> str:
    return render_page(escape(found.source), describe_checkpoint(manifest, found))


draw_in_notebooks(Inspection, _render_map)


def describe_checkpoint(
    manifest: Manifest | None, found: Inspection, *, max_pieces: int = _MAX_PIECES
) -> dict[str, Any]:
    """Return the data for a checkpoint's page: JSON values only; without a manifest it has no pieces."""
    # Names are coded by a segment table and pieces by columns: 100,000 tensors take a few MB.
    tensors, entries = found.tensors, [] if manifest is None else list(manifest.tensors.values())
    index = {tensor.name: at for at, tensor in enumerate(tensors)}
    files = sorted(found.files, key=_order)
    dtypes = list(dict.fromkeys(tensor.dtype for tensor in tensors))
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
        "names": _code_names([tensor.name for tensor in tensors]),
        "tensors": {
            "dtype": [dtypes.index(tensor.dtype) for tensor in tensors],
            "shape": [tensor.shape for tensor in tensors],
            "nbytes": [tensor.nbytes for tensor in tensors],
            "pieces": [tensor.pieces for tensor in tensors],
        },
        "pieces": _list_pieces(entries, {file.name: index for index, file in enumerate(files)}, max_pieces),
        "ties": [(index[name], index[kept]) for name, kept in found.ties.items() if name in index and kept in index],
        "objects": [(escape(name), text) for name, text in [*found.objects.items()][:_MAX_OBJECTS]],
        "objects_left_out": max(len(found.objects) - _MAX_OBJECTS, 0),
        "metadata": [(escape(name), escape(text)) for name, text in found.metadata.items()],
        "warnings": [*map(escape, found.warnings), *(each.message for each in found.problems if not each.tensors)],
        "faults": _list_faults(index, found.problems),
    }


def _order(file: FileInfo) -> tuple[bool, int, list[tuple[int, str]]]:
    """Return a key that sorts files by rank, then by name; numbers in a name count as numbers."""
    return file.rank is None, file.rank or 0, split_numbers(file.name)


def _code_names(names: Iterable[str]) -> dict[str, Any]:
    """Return dotted names as indexes into a list of segments."""
    known: dict[str, int] = {}
    coded = [[known.setdefault(segment, len(known)) for segment in escape(name).split(".")] for name in names]
    return {"segments": list(known), "tensors": coded}


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


def _list_faults(index: Mapping[str, int], problems: Iterable[Problem]) -> list[dict[str, Any]]:
    """Return gaps, overlaps and missing bytes by tensor index."""
    return [
        {"tensor": index[name], "kind": problem.kind, "box": str(problem.box), "text": problem.message}
        for problem in problems
        for name in problem.tensors
    ]
