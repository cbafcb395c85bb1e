"""Tensor boxes and other values that several ranks' files contain, and that must be equal.

Pieces become one piece if their checksums prove them equal. A `Replicas` keeps the others, and `resolve_replicas`
compares them where their bytes are read. Opening a checkpoint reads only small ones that may be per-rank values, such
as generator states, and that no checksum decides.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from shardckpt.boxes import full_box
from shardckpt.dtypes import bits, nbytes
from shardckpt.encodings.pickle_stubs import InstanceStub, PerRankValue
from shardckpt.errors import CheckpointError, OverlapError
from shardckpt.manifest import Lazy, Path, Piece, TensorEntry
from shardckpt.plan.optim.optim_keys import GROUPS
from shardckpt.plan.optim.param_groups import merge_groups
from shardckpt.reader import Reader
from shardckpt.readers.chunk_reader import PieceReader, ReadItem, have_equal_blocks

_SMALL_BYTES = 8192  # maximum bytes of a value to compare when a checkpoint is opened; a generator's state has 5,056

_NAME_ALL = (
    "Ranks with different tensors (experts, pipeline stages) must name them differently, or save DTensors on a mesh"
    " that has all of them. If they should be equal, the files are of different saves. --exclude leaves the tensor out."
)


@runtime_checkable
class Comparable(Protocol):
    """Details of a `Lazy` layout that can be compared without a read."""

    def content_key(self) -> Hashable:
        """Return a key that only details with equal elements share; None if unknown."""

    def full_checksum(self, size: int) -> int | None:
        """Return the checksum of elements that fill a storage of `size` bytes; None if unknown."""


class Replicas(NamedTuple):
    """Details of a `Lazy` layout: pieces from several files for one box, whose elements must be equal."""

    tensor: str  # dotted path
    dtype: str
    pieces: tuple[Piece, ...]  # the first is the one to use

    def find_different(self) -> Piece | None:
        """Return the first piece whose checksum proves it different from the piece to use."""
        first = _full_checksum(self.pieces[0], self.dtype)
        if first is None:
            return None
        return next((piece for piece in self.pieces if _full_checksum(piece, self.dtype) not in (None, first)), None)


def join_replicas(tensor: str, dtype: str, pieces: Iterable[Piece]) -> Piece:
    """Join pieces with one box: return the first."""
    first, *others = dict.fromkeys(pieces)
    key = _content_key(first)
    others = [piece for piece in others if first.box.volume and (key is None or _content_key(piece) != key)]
    if not others:
        return first
    detail = Replicas(tensor, dtype, (first, *others))
    # The others may have different elements: they are compared when the result is resolved.
    return first._replace(layout=Lazy(first.layout.offset, first.layout.nbytes, detail))


def list_replicas(piece: Piece) -> tuple[Piece, ...]:
    """Return the pieces that must be equal; only the piece itself if it has no replicas."""
    found = find_replicas(piece)
    return (piece,) if found is None else found.pieces


def find_replicas(piece: Piece) -> Replicas | None:
    """Return a piece's replicas; None if it is the only one."""
    detail = piece.layout.detail if isinstance(piece.layout, Lazy) else None
    return detail if isinstance(detail, Replicas) else None


def resolve_replicas(
    reader: Reader, pieces: Sequence[Piece], resolve: Callable[[Sequence[Piece]], list[Piece]]
) -> list[Piece]:
    """Resolve pieces, and compare replicas that may differ."""
    resolved = iter(resolve([each for piece in pieces for each in list_replicas(piece)]))
    results = []
    for piece in pieces:
        first, *others = [next(resolved) for _ in list_replicas(piece)]
        if (replicas := find_replicas(piece)) is not None:
            _require_equal(reader, replicas, first, others)
        results.append(first)
    return results


def _require_equal(reader: Reader, replicas: Replicas, first: Piece, others: Iterable[Piece]) -> None:
    """Compare resolved replicas block by block."""

    def as_entry(piece: Piece) -> TensorEntry:
        region = full_box(piece.box.size)
        return TensorEntry((), region.size, replicas.dtype, (piece._replace(box=region),))

    for other in others:
        if not have_equal_blocks(reader, as_entry(first), as_entry(other)):
            raise OverlapError(
                f"{replicas.tensor!r} differs between ranks",
                where=f"{reader.store.url}/{other.file}",
                found=f"other values for {first.box} than in {first.file}",
                fix=_NAME_ALL,
            )


def find_different_pieces(reader: Reader, values: Sequence[Replicas]) -> list[Piece | None]:
    """Return for each the first piece that is known to differ from the piece to use."""
    found = [each.find_different() for each in values]
    small = [at for at, each in enumerate(values) if found[at] is None and _is_small(each)]
    try:
        contents = _read_pieces(reader, [values[at] for at in small])
    except CheckpointError:  # whoever reads them gets the error
        return found
    for at, blocks in zip(small, contents, strict=True):
        found[at] = next((p for p, raw in zip(values[at].pieces, blocks, strict=True) if raw != blocks[0]), None)
    return found


def _is_small(replicas: Replicas) -> bool:
    volume = replicas.pieces[0].box.volume
    return bits(replicas.dtype) % 8 == 0 and nbytes(replicas.dtype, volume) <= _SMALL_BYTES


def _read_pieces(reader: Reader, values: Sequence[Replicas]) -> list[list[bytearray]]:
    """Return the bytes of all pieces, read in one batch."""
    contents = [[bytearray(nbytes(each.dtype, p.box.volume)) for p in each.pieces] for each in values]
    resolved = iter(reader.resolve([piece for each in values for piece in each.pieces]))
    items = [
        ReadItem((next(resolved),), piece.box, each.dtype, memoryview(raw))
        for each, blocks in zip(values, contents, strict=True)
        for piece, raw in zip(each.pieces, blocks, strict=True)
    ]
    PieceReader(reader.store).fill(items)
    return contents


def _content_key(piece: Piece) -> Hashable:
    detail = piece.layout.detail if isinstance(piece.layout, Lazy) else None
    return detail.content_key() if isinstance(detail, Comparable) else None


def _full_checksum(piece: Piece, dtype: str) -> int | None:
    detail = piece.layout.detail if isinstance(piece.layout, Lazy) else None
    return detail.full_checksum(nbytes(dtype, piece.box.volume)) if isinstance(detail, Comparable) else None


def combine_values(path: Path, values: Iterable[tuple[str, object]]) -> object:
    """Combine values from several files into one; a `PerRankValue` if they differ."""
    remaining = iter(values)
    file, first = next(remaining)
    odd = next(((other, value) for other, value in remaining if not is_same(value, first)), None)
    if odd is None:
        return first
    merged = None
    if path[-1:] == (GROUPS,):  # pipeline stages have different parameters
        distinct = [first, odd[1]]
        for _, value in remaining:
            if not any(is_same(value, known) for known in distinct):
                distinct.append(value)
        merged = merge_groups(distinct)
    return PerRankValue(file, odd[0]) if merged is None else merged


def is_same(a: object, b: object) -> bool:
    """Return True if two pickled values and their types are equal; the pickle reader has limited depth and size."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(is_same(value, b[key]) for key, value in a.items())
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(is_same, a, b))
    if isinstance(a, InstanceStub) and isinstance(b, InstanceStub):
        return a.name == b.name and is_same((a.args, a.state, a.items), (b.args, b.state, b.items))
    return a == b or (a != a and b != b)  # noqa: PLR0124  (NaN is the value that differs from itself)
