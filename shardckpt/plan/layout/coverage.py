"""Check that pieces contain each element once, and that files contain pieces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from operator import mul
from typing import Literal, Protocol

from shardckpt.boxes import Box, Shape, cover, full_box, is_contiguous, is_grid, strides
from shardckpt.dtypes import array_nbytes, bits, nbytes
from shardckpt.errors import (
    CheckpointError,
    FormatError,
    IncompleteError,
    OverlapError,
    TruncatedError,
    describe_missing,
)
from shardckpt.manifest import Encoded, Lazy, Manifest, Piece, Span, Strided, TensorEntry, dotted

_MAX_ELEMENTS = 1 << 62
_MAX_BYTES = 1 << 62
_INCOMPLETE = "The save was interrupted or the copy is incomplete: `shardckpt verify` lists the faults of each file."
_MAX_COUNTED = 10_000
_ONE_OF_SEVERAL = "This is one file of several: put them into one folder and point at that."
_PLACEHOLDER = "it has no elements: a placeholder, as DeepSpeed's ZeRO-3 leaves for weights that it did not gather"
_OF_MODELS = ("safetensors", "adapter", "hf-torch", "accelerate")  # formats in which trainers write models

_GATHER = (
    "Name the folder of DeepSpeed's save_checkpoint, which holds the weights, or save the model again with"
    " stage3_gather_16bit_weights_on_model_save."
)
_RANK_FILES = ("ranks", "local")  # formats that do not list their files: one rank's file can be opened alone


FaultKind = Literal["gap", "overlap", "missing_file", "truncated", "invalid"]


class _Store(Protocol):
    @property
    def url(self) -> str:
        """Path or URL, as the user typed it."""


class PieceResolver(Protocol):
    """An open checkpoint that resolves `Lazy` pieces, such as a `Reader`."""

    @property
    def store(self) -> _Store:
        """Store that holds the files."""

    def resolve(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        """Return the pieces without `Lazy` layouts, in the same order."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault in one tensor."""

    kind: FaultKind
    tensor: str  # dotted name
    box: Box  # affected elements
    file: str  # affected file; empty if there is none
    detail: str
    byte_range: tuple[int, int] | None = None  # offset and number of affected bytes; None if unknown
    found: str = ""  # actual value; empty if `detail` says all
    expected: str = ""  # expected value; empty if `detail` says all

    @property
    def words(self) -> str:
        """The kind in words."""
        return self.kind.replace("_", " ")

    def __str__(self) -> str:
        place = f" in {self.file}" if self.file else ""
        return f"{self.tensor} {self.box}: {self.words}{place}: {self.detail}"


def faults(manifest: Manifest, entries: Iterable[TensorEntry], *, limit: int = 16) -> list[Fault]:
    """Return the faults that prevent reading `entries` in full, at most `limit`."""
    # For a lazy piece, only its container is compared with the file.
    found: list[Fault] = []
    for entry in entries:
        if entry.shape == (0,) and _is_placeholder(manifest, entry):
            file = entry.pieces[0].file if entry.pieces else ""
            found.append(Fault("gap", dotted(entry.path), full_box(entry.shape), file, _PLACEHOLDER))
        elif not _is_single_span(manifest, entry):
            found += _check_entry(manifest, entry, limit)
        if len(found) >= limit:
            break
    return found[:limit]


def require_complete(manifest: Manifest, entries: Iterable[TensorEntry], where: str) -> None:
    """Require that each element is in exactly one piece, and each piece in its file."""
    if manifest.missing:
        raise IncompleteError(
            describe_missing(manifest.missing),
            where=where,
            found=f"{len(manifest.files)} files",
            fix="Copy the missing files next to the others.",
        )
    found = faults(manifest, entries, limit=_MAX_COUNTED)
    if not found:
        return
    kinds: dict[str, type[CheckpointError]] = {
        "gap": IncompleteError,
        "missing_file": IncompleteError,
        "truncated": TruncatedError,
        "overlap": OverlapError,
    }
    first = found[0]
    at_least = "at least " if len(found) == _MAX_COUNTED else ""
    more = f" ({at_least}{len(found) - 1} more such faults)" if len(found) > 1 else ""
    base = manifest.elsewhere.get(first.file, "")
    if base in manifest.closed:
        raise manifest.closed[base]
    if base and first.kind in ("missing_file", "truncated"):
        raise kinds[first.kind](
            f"{first.tensor} is stored in a file of a base that is missing or incomplete{more}",
            where=where,
            found=first.detail,
            expected=f"{first.file.rpartition('/')[2]} in {base}",
            fix="Put the base back there, or pass its new path: base=PATH (--base PATH).",
        )
    is_one_of_ranks = manifest.format in _RANK_FILES and sum(size >= 0 for size in manifest.files.values()) == 1
    if first.detail is _PLACEHOLDER:
        raise IncompleteError(f"{first.tensor}: {_PLACEHOLDER}{more}", where=f"{where}/{first.file}", fix=_GATHER)
    raise kinds.get(first.kind, FormatError)(
        f"{first.words}: {first.tensor} {first.box}: {first.detail}{more}",
        where=f"{where}/{first.file}" if first.file else where,
        fix=_ONE_OF_SEVERAL if first.kind == "missing_file" and is_one_of_ranks else _INCOMPLETE,
    )


def locate(reader: PieceResolver, manifest: Manifest, entries: Sequence[TensorEntry]) -> list[TensorEntry]:
    """Return the entries with every `Lazy` piece resolved; check coverage before and after."""
    where = reader.store.url
    require_complete(manifest, entries, where)
    lazy = [piece for entry in entries for piece in entry.pieces if isinstance(piece.layout, Lazy)]
    if not lazy:
        return list(entries)
    resolved = dict(zip(map(id, lazy), reader.resolve(lazy), strict=True))
    located = [entry._replace(pieces=tuple(resolved.get(id(p), p) for p in entry.pieces)) for entry in entries]
    require_complete(manifest, located, where)
    return located


def _is_placeholder(manifest: Manifest, entry: TensorEntry) -> bool:
    """Return True if an empty tensor stands for a weight; other states may have empty tensors for other reasons."""
    return manifest.format in _OF_MODELS and dotted(entry.path).endswith("weight")


def _check_entry(manifest: Manifest, entry: TensorEntry, limit: int) -> list[Fault]:
    if _is_plain_tiling(manifest, entry):
        return []
    name = dotted(entry.path)
    region = full_box(entry.shape)
    if any(n < 0 for n in entry.shape) or prod(entry.shape) > _MAX_ELEMENTS:
        return [Fault("invalid", name, region, "", f"no array has the shape {entry.shape}")]
    found = [fault for piece in entry.pieces if (fault := _check_piece(manifest, entry, piece, name))]
    if len(entry.pieces) == 1 and entry.pieces[0].box == region:
        return found
    pieces = [p for p in entry.pieces if len(p.box.offset) == len(p.box.size) == len(entry.shape)]
    covered = cover(region, [p.box for p in pieces], limit=limit)
    found += [Fault("gap", name, box, "", "no file holds these elements") for box in covered.gaps]
    for box, a, b in covered.overlaps:
        files = f"{pieces[a].file} and {pieces[b].file}"
        found.append(Fault("overlap", name, box, pieces[a].file, f"{files} both hold these elements"))
    return found


def _is_single_span(manifest: Manifest, entry: TensorEntry) -> bool:
    """Return True if a tensor is one span in one file, as in most checkpoints."""
    if len(entry.pieces) != 1:
        return False
    box, file, layout = entry.pieces[0]
    return (
        isinstance(layout, Span)
        and box == full_box(entry.shape)
        and min(entry.shape, default=0) >= 0
        and layout.nbytes == array_nbytes(entry.stored, entry.shape) < _MAX_BYTES
        and 0 <= layout.offset <= manifest.files.get(file, -1) - layout.nbytes
    )


def _is_plain_tiling(manifest: Manifest, entry: TensorEntry) -> bool:
    """Return True if pieces are spans or containers in a grid or in order, like rank shards."""
    boxes, width, files = tuple([piece.box for piece in entry.pieces]), bits(entry.stored), manifest.files
    volumes = _tile_often(entry.shape, boxes) if len(boxes) <= _USUAL_PIECES else _tile(entry.shape, boxes)
    if volumes is None:
        return False
    for (_, file, layout), volume in zip(entry.pieces, volumes, strict=True):
        if isinstance(layout, Span):
            has_right_size = layout.nbytes * 8 == volume * width
        else:
            has_right_size = isinstance(layout, Lazy) and layout.nbytes >= 0
        if not has_right_size or not 0 <= layout.offset <= files.get(file, -1) - layout.nbytes:
            return False
    return True


def _tile(shape: Shape, boxes: Sequence[Box]) -> tuple[int, ...] | None:
    """Return each box's volume if the boxes are in a grid or in order; else None."""
    if prod(shape) > _MAX_ELEMENTS or not all(box.within(shape) for box in boxes):
        return None
    return tuple([box.volume for box in boxes]) if is_grid(shape, boxes) or _follow_one_another(shape, boxes) else None


# Most layers have the same boxes, so results for a usual number of pieces are cached.
_tile_often = lru_cache(maxsize=1024)(_tile)

_USUAL_PIECES = 64


def _follow_one_another(shape: Shape, boxes: Sequence[Box]) -> bool:
    """Return True if boxes cover an array in row-major order, one after the other."""
    if not all(is_contiguous(shape, box) for box in boxes):
        return False
    steps, at = strides(shape), 0
    for start, volume in sorted((sum(map(mul, box.offset, steps)), box.volume) for box in boxes):
        if start != at:
            return False
        at += volume
    return at == prod(shape)


def _check_piece(manifest: Manifest, entry: TensorEntry, piece: Piece, name: str) -> Fault | None:
    box, file, layout = piece
    if not box.within(entry.shape):
        return Fault("invalid", name, box, file, f"outside the array's shape {entry.shape}")
    size, extent = manifest.files.get(file, -1), (layout.offset, layout.nbytes)
    if size < 0:
        return Fault("missing_file", name, box, file, "the file is not there", extent)
    if layout.offset < 0 or layout.nbytes < 0:
        return Fault("invalid", name, box, file, "a negative offset or length", extent)
    if sum(extent) > size:
        found, expected = f"{size} bytes", f"at least {sum(extent)}"
        return Fault("truncated", name, box, file, f"found {found}, expected {expected}", extent, found, expected)
    inner = layout.inner if isinstance(layout, Encoded) else layout
    if isinstance(inner, Span) and inner.nbytes != (needed := nbytes(entry.stored, box.volume)):
        found, expected = f"{inner.nbytes} bytes", f"{needed}"
        return Fault("invalid", name, box, file, f"found {found}, expected {expected}", extent, found, expected)
    if isinstance(inner, Strided) and (wrong := _describe_wrong_view(entry, box, inner)):
        return Fault("invalid", name, box, file, wrong, extent)
    return None


def _describe_wrong_view(entry: TensorEntry, box: Box, view: Strided) -> str:
    """Return the error text for a view that does not fit its box; else empty."""
    if view.start < 0 or len(view.strides) != len(box.size) or any(s < 0 for s in view.strides):
        return "a view with impossible strides"
    last = view.start + sum((n - 1) * s for n, s in zip(box.size, view.strides, strict=True))
    if box.volume and nbytes(entry.stored, last + 1) > view.nbytes:
        return f"the view reaches beyond its storage of {view.nbytes} bytes"
    return ""
