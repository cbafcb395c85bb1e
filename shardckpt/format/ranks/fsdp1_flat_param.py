"""One flat parameter of torch's FSDP1: who holds which chunk, what lies in it, and where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from shardckpt.boxes import Box, Shape, chunk_range
from shardckpt.dtypes import bits
from shardckpt.errors import FormatError
from shardckpt.format.ranks.rank_files import ManifestBuilder, RankContent
from shardckpt.format.torchsave.dtensor_spec import ShardInfo, Shards
from shardckpt.format.torchsave.tensor_views import narrow_layout
from shardckpt.layout import ALIGNMENT, FlatLayout, ParamSpec
from shardckpt.manifest import Lazy, Path, Piece, TensorEntry

FLAT = "_flat_param"

Fragments = dict[int, tuple[RankContent, TensorEntry]]
"""Place in the sharding group to the file that holds that part, and the part."""


@dataclass(slots=True)
class FlatParamUnit:
    """A flat parameter.

    Attributes:
        name: Cleaned.
        prefix: What the names of its members start with.
        numel: Elements of the whole, holes counted.
        parts: Ranks that share it.
        is_world: Whether those are all ranks.
        chunks: What each of them holds.
        members: Its parameters, once they are known.
        layout: How they lie in it, once that is known.
        boxes: Place to what lies there of each member, kept once it was asked for.
    """

    name: str
    prefix: str
    numel: int
    parts: int
    is_world: bool
    chunks: Fragments = field(default_factory=dict)
    members: tuple[ParamSpec, ...] = ()
    layout: FlatLayout | None = None
    boxes: dict[int, list[tuple[int, Box, int]]] = field(default_factory=dict)

    @property
    def chunk(self) -> int:
        """Elements of each rank's part, padding counted."""
        return chunk_range(self.numel, self.parts, 0)[1]

    @property
    def filled_ranks(self) -> int:
        """Ranks that hold an element; those behind them have padding alone, or nothing."""
        return -(-self.numel // self.chunk) if self.chunk else 0

    def entries_at(self, place: int) -> list[tuple[int, Box, int]]:
        """Return `(member, box, offset in the chunk)` of everything at a place."""
        if place not in self.boxes:
            self.boxes[place] = self.layout.boxes(place) if self.layout is not None else []
        return self.boxes[place]

    def add(self, url: str, content: RankContent, entry: TensorEntry, share: ShardInfo) -> None:
        """Take what a rank holds.

        Args:
            url: Of the store, for messages.
            content: The rank's file.
            entry: What lies there.
            share: Which part it is.

        Raises:
            FormatError: Ranks do not hold equal chunks, in order.
        """
        listed = sum(1 for box in share.cut.boxes if box.volume) if isinstance(share.cut, Shards) else -1
        if listed != self.filled_ranks:
            raise FormatError(
                f"{self.name!r} is not cut into equal chunks",
                where=f"{url}/{content.file}",
                found=f"{listed} shards",
                expected=f"{self.filled_ranks}, of {self.numel} elements over {self.parts} ranks",
            )
        held = self.count_elements(share.place)
        expected = [Box((share.place * self.chunk,), (held,))] if held else []
        if [piece.box for piece in entry.pieces] != expected:
            raise FormatError(
                f"what rank {content.rank} holds of {self.name!r} is not its chunk",
                where=f"{url}/{content.file}",
                found=", ".join(str(piece.box) for piece in entry.pieces) or "nothing",
                expected=", ".join(map(str, expected)) or "nothing",
            )
        self.chunks.setdefault(share.place, (content, entry))

    def count_elements(self, place: int) -> int:
        """Return how many elements of the unit a place holds, without padding."""
        return min(max(self.numel - place * self.chunk, 0), self.chunk)

    def fit_layout(self, specs: tuple[ParamSpec, ...], fragments: Mapping[str, Fragments]) -> FlatLayout | None:
        """Return how members lie so that they fill the unit, and fit the fragments; None for no such way.

        `use_orig_params=True` leaves fragments, puts each member at a multiple of 16 bytes of the type that is computed
        in, which the files do not tell, and fills the end up to a multiple of the ranks. Where several ways fit, they
        cut every fragment alike, and fragments are what is read.

        Args:
            specs: The members, in order.
            fragments: What ranks hold of members under their own names; of all of them, or of none.
        """
        width = max(bits(specs[0].dtype) // 8, 1) if specs else 1
        for alignment in dict.fromkeys((ALIGNMENT // width or 1, 8, 4, 2, 16, 1)) if fragments else (1,):
            layout = FlatLayout(specs, self.parts, alignment)
            padded = layout.numel if alignment == 1 else -(-layout.numel // self.parts) * self.parts
            if self.numel in (layout.numel, padded) and self._fits(layout, fragments):
                return layout
        return None

    def _fits(self, layout: FlatLayout, fragments: Mapping[str, Fragments]) -> bool:
        """Return True if fragments are as long as a layout says."""
        for place in self.chunks:
            runs = {layout.specs[run.index].name: run.numel for run in layout.runs(place)}
            for spec in layout.specs:
                part = fragments.get(spec.name, {}).get(place)
                if part is not None and part[1].shape[0] != runs.get(spec.name, 0):
                    return False
        return True

    def split_members(
        self, made: ManifestBuilder, parts: Fragments, below: Path, tail: Path = ()
    ) -> dict[str, TensorEntry]:
        """Return the members out of the 1-D arrays that ranks hold.

        Args:
            made: Knows what is not there.
            parts: Place to that rank's array: its chunk.
            below: What the members' paths start with.
            tail: What the members' paths end with.

        Raises:
            FormatError: Ranks hold several types.
        """
        if self.layout is None or not parts:
            return {}
        stored = next(iter(parts.values()))[1].stored
        pieces: dict[int, list[Piece]] = {}
        paths = [(*below, spec.name, *tail) for spec in self.members]
        for place in range(self.filled_ranks):
            boxes = self.entries_at(place)
            if place not in parts:
                for index, box, _ in boxes:
                    pieces.setdefault(index, []).append(made.lost(box, paths[index], self._label(place)))
                continue
            content, entry = parts[place]
            if entry.stored != stored:
                raise FormatError(
                    f"{self.name!r} has several types",
                    where=f"{made.url}/{content.file}",
                    found=entry.stored,
                    expected=stored,
                )
            for index, box, at in boxes:
                pieces.setdefault(index, []).append(_slice_piece(entry, box, at))
        return {
            spec.name: TensorEntry(path, spec.shape, stored, tuple(pieces.get(index, ())))
            for index, (spec, path) in enumerate(zip(self.members, paths, strict=True))
        }

    def member(self, made: ManifestBuilder, name: str, parts: Fragments, path: Path) -> TensorEntry:
        """Return one member's array out of fragments, whose lengths are those of the layout.

        Args:
            made: Knows what is not there.
            name: The member's.
            parts: Place to that rank's fragment.
            path: Of the array.
        """
        index = next(i for i, spec in enumerate(self.members) if spec.name == name)
        stored = next(iter(parts.values()))[1].stored
        pieces: list[Piece] = []
        for place in range(self.filled_ranks):
            mine = [(box, at) for i, box, at in self.entries_at(place) if i == index]
            if mine and place not in parts:
                pieces += [made.lost(box, path, self._label(place)) for box, _ in mine]
            elif mine:
                pieces += [_slice_piece(parts[place][1], box, at - mine[0][1]) for box, at in mine]
        return TensorEntry(path, self.members[index].shape, stored, tuple(pieces))

    def _label(self, place: int) -> str:
        return f"the file of rank {place}" if self.is_world else f"a file with part {place} of {self.parts}"


def are_fragments(parts: Fragments, shape: Shape, unit: FlatParamUnit) -> bool:
    """Return True if what ranks hold under a parameter's name are fragments of it, and not each the whole (a buffer).

    Where files are missing, a whole one is a fragment if it lies in the storage of its rank's chunk.
    """
    entries = [entry for _, entry in parts.values()]
    if not entries or any(len(entry.shape) != 1 for entry in entries):
        return False
    if any(entry.shape != shape for entry in entries):
        return True
    if len(parts) < unit.parts:
        return any(
            storage_key(entry) == storage_key(unit.chunks[at][1])
            for at, (_, entry) in parts.items()
            if at in unit.chunks
        )
    return sum(entry.shape[0] for entry in entries) == prod(shape)


def storage_key(entry: TensorEntry) -> object:
    """Return what tells one storage of a file from another."""
    layout = entry.pieces[0].layout if entry.pieces else None
    return layout.offset if isinstance(layout, Lazy) and layout.nbytes else None


def _slice_piece(entry: TensorEntry, box: Box, at: int) -> Piece:
    """Return the piece for some elements of a rank's 1-D array."""
    piece = entry.pieces[0]
    assert isinstance(piece.layout, Lazy), "files of torch.save are opened lazily"
    return piece._replace(box=box, layout=narrow_layout(piece.layout, at, None))
