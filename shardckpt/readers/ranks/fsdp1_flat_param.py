"""One flat parameter by torch's FSDP1: the ranks' chunks, its members' locations, and metadata files for them.

The files are named `flat_param_metadata_rank{r}.json`. torch writes no such files. A job that saves LOCAL states can
write the fields in `FlatParameter` as `{"world_size", "rank", "handles": [{"module", "fqns", "shapes", "shared_params":
[[name, first name], ...]}, ...]}`, with names relative to `module`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from shardckpt.boxes import Box, Shape, chunk_range
from shardckpt.dtypes import bits
from shardckpt.encodings.budget import check_list, check_shape, check_text, require_small
from shardckpt.encodings.safetensors import parse_json
from shardckpt.errors import FormatError
from shardckpt.layout import ALIGNMENT, FlatLayout, ParamSpec
from shardckpt.manifest import Lazy, Path, TensorEntry
from shardckpt.plan.naming.fqn import strip_wrappers
from shardckpt.reader import ParamShapes
from shardckpt.readers.merge_shards import (
    KEEP_ONE_SAVE,
    ManifestBuilder,
    Shard,
    join_entries,
    label_rank_file,
    merge_shards,
    slice_shard,
)
from shardckpt.readers.ranks.rank_files import RankContent
from shardckpt.readers.torchsave.dtensor_spec import ShardInfo, ShardList
from shardckpt.storage.store import Read, Store

FLAT = "_flat_param"

# Rank in the sharding group to the file that contains its part, and the part.
Fragments = dict[int, tuple[RankContent, TensorEntry]]

_NAME = re.compile(r"flat_param_metadata_rank\d{1,9}\.json")
_MAX_BYTES = 1 << 26


def join_parts(path: Path, found: Iterable[tuple[int, RankContent, TensorEntry]]) -> Fragments:
    """Return the ranks' parts by place; parts with one place must be equal."""
    parts: dict[int, list[tuple[RankContent, TensorEntry]]] = {}
    for place, content, entry in found:
        parts.setdefault(place, []).append((content, entry))
    return {place: (pairs[0][0], join_entries(path, [entry for _, entry in pairs])) for place, pairs in parts.items()}


@dataclass(frozen=True)
class FlatParamUnit:
    """A flat parameter."""

    name: str  # name without the names of wrapper modules
    prefix: str  # prefix of its members' names
    numel: int  # elements of the flat parameter, including padding
    parts: int  # number of ranks that share it
    world: int
    chunks: Fragments  # chunk of each rank
    layout: FlatLayout | None = None  # members and their positions; None if unknown

    @property
    def members(self) -> tuple[ParamSpec, ...]:
        """Parameters in the flat parameter, if known."""
        return self.layout.specs if self.layout is not None else ()

    @property
    def chunk(self) -> int:
        """Elements in each rank's chunk, including padding."""
        return chunk_range(self.numel, self.parts, 0)[1]

    @property
    def filled_parts(self) -> int:
        """Number of ranks with elements; other ranks have padding only, or nothing."""
        return -(-self.numel // self.chunk) if self.chunk else 0

    @cached_property
    def _member_boxes(self) -> Sequence[Mapping[int, list[tuple[Box, int]]]]:
        """For each member: rank in the group to its boxes and their offsets there."""
        found: list[dict[int, list[tuple[Box, int]]]] = [{} for _ in self.members]
        for place in range(self.filled_parts if self.layout is not None else 0):
            assert self.layout is not None
            for index, box, first in self.layout.boxes(place):
                found[index].setdefault(place, []).append((box, first))
        return found

    def count_elements(self, place: int) -> int:
        """Return how many elements a rank has, without padding."""
        return min(max(self.numel - place * self.chunk, 0), self.chunk)

    def require_chunk(self, url: str, content: RankContent, entry: TensorEntry, shard: ShardInfo) -> None:
        """Require that a rank's tensor is its chunk, and that chunks have equal lengths."""
        sharding = shard.sharding
        listed = sum(1 for box in sharding.boxes if box.volume) if isinstance(sharding, ShardList) else -1
        if listed != self.filled_parts:
            raise FormatError(
                f"{self.name!r} is not split into equal chunks",
                where=f"{url}/{content.file}",
                found=f"{listed} shards",
                expected=f"{self.filled_parts}, of {self.numel} elements over {self.parts} ranks",
            )
        numel = self.count_elements(shard.place)
        expected = [Box((shard.place * self.chunk,), (numel,))] if numel else []
        if [piece.box for piece in entry.pieces] != expected:
            raise FormatError(
                f"the shard of rank {content.rank} of {self.name!r} is not its chunk",
                where=f"{url}/{content.file}",
                found=", ".join(str(piece.box) for piece in entry.pieces) or "nothing",
                expected=", ".join(map(str, expected)) or "nothing",
            )

    def fit_layout(self, specs: tuple[ParamSpec, ...], fragments: Mapping[str, Fragments]) -> FlatLayout | None:
        """Return the members' layout that fills the unit and matches the fragments; None if no layout does."""
        # With `use_orig_params=True`, ranks have fragments, and each member starts at a multiple of 16 bytes of the
        # compute dtype, which the files do not store. The end is padded to a multiple of the number of ranks. If
        # several alignments match, all of them give the same fragments.
        width = max(bits(specs[0].dtype) // 8, 1) if specs else 1
        for alignment in dict.fromkeys((ALIGNMENT // width or 1, 8, 4, 2, 16, 1)) if fragments else (1,):
            layout = FlatLayout(specs, self.parts, alignment)
            padded = layout.numel if alignment == 1 else -(-layout.numel // self.parts) * self.parts
            if self.numel in (layout.numel, padded) and self._fits(layout, fragments):
                return layout
        return None

    def _fits(self, layout: FlatLayout, fragments: Mapping[str, Fragments]) -> bool:
        """Return True if fragments have a layout's lengths."""
        for place in self.chunks:
            runs = {layout.specs[run.index].name: run.numel for run in layout.runs(place)}
            for spec in layout.specs:
                part = fragments.get(spec.name, {}).get(place)
                if part is not None and part[1].shape[0] != runs.get(spec.name, 0):
                    return False
        return True

    def merge_members(
        self, builder: ManifestBuilder, parts: Fragments, below: Path, tail: Path = ()
    ) -> dict[str, TensorEntry]:
        """Return the members, merged from 1-D tensors with the layout of the chunks."""
        if not parts:
            return {}
        return {
            spec.name: self._merge(builder, index, parts, (*below, spec.name, *tail), are_fragments=False)
            for index, spec in enumerate(self.members)
        }

    def merge_member(self, builder: ManifestBuilder, name: str, parts: Fragments, path: Path) -> TensorEntry:
        """Return one member, merged from fragments."""
        index = next(i for i, spec in enumerate(self.members) if spec.name == name)
        return self._merge(builder, index, parts, path, are_fragments=True)

    def _merge(
        self, builder: ManifestBuilder, index: int, parts: Fragments, path: Path, *, are_fragments: bool
    ) -> TensorEntry:
        shards: list[Shard] = []
        missing: list[tuple[Box, str]] = []
        for place, boxes in self._member_boxes[index].items():
            if place not in parts:
                label = label_rank_file(place, self.parts, self.world)
                missing += [(box, label) for box, _ in boxes]
                continue
            content, entry = parts[place]
            base = boxes[0][1] if are_fragments else 0
            pieces = slice_shard(entry, [(box, first - base) for box, first in boxes])
            shards.append(Shard(content.file, entry.stored, pieces))
        dtype = next(iter(parts.values()))[1].stored
        return merge_shards(builder, path, self.members[index].shape, shards, missing, dtype)


def are_fragments(parts: Fragments, shape: Shape, unit: FlatParamUnit) -> bool:
    """Return True if the tensors under a parameter's name are fragments, not a buffer that is complete on each rank."""
    # If files are missing, a tensor of full size is a fragment if it shares the storage of its rank's chunk.
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


def storage_key(entry: TensorEntry) -> int | None:
    """Return where a tensor's storage starts in its file; None if it is empty."""
    layout = entry.pieces[0].layout if entry.pieces else None
    return layout.offset if isinstance(layout, Lazy) and layout.nbytes else None


def read_metadata(store: Store, sizes: Mapping[str, int]) -> ParamShapes | None:
    """Read the parameter shapes from metadata files; None if there are none."""
    names = sorted(name for name in sizes if _NAME.fullmatch(name))
    for name in names:
        require_small("a metadata file", sizes[name], _MAX_BYTES, f"{store.url}/{name}")
    buffers = {name: bytearray(sizes[name]) for name in names}
    store.read([Read(name, 0, memoryview(buffer)) for name, buffer in buffers.items()])
    first: tuple[str, ParamShapes] | None = None
    for name, raw in buffers.items():
        known = _parse(parse_json(bytes(raw), where=f"{store.url}/{name}"), f"{store.url}/{name}")
        if first is None:
            first = (name, known)
        elif (known.shapes, known.units, known.aliases) != (first[1].shapes, first[1].units, first[1].aliases):
            raise FormatError(f"{first[0]} and {name} store different layouts", where=store.url, fix=KEEP_ONE_SAVE)
    return first[1] if first else None


def _parse(value: object, where: str) -> ParamShapes:
    shapes: dict[str, Shape] = {}
    units: dict[str, Sequence[str]] = {}
    aliases: dict[str, str] = {}
    for handle in check_list(value.get("handles") if isinstance(value, dict) else None, where):
        fields = handle if isinstance(handle, dict) else {}
        module = strip_wrappers(check_text(fields.get("module"), where))
        prefix = f"{module}." if module else ""
        names = [strip_wrappers(prefix + check_text(name, where)) for name in check_list(fields.get("fqns"), where)]
        sizes = [check_shape(shape, where) for shape in check_list(fields.get("shapes"), where)]
        if len(names) != len(sizes) or len(set(names)) < len(names) or shapes.keys() & set(names):
            raise FormatError("a unit must have one shape for each name, each name once", where=where, found=module)
        shapes |= dict(zip(names, sizes, strict=True))
        units[prefix + FLAT] = names
        for pair in check_list(fields.get("shared_params", []), where):
            tied = [strip_wrappers(prefix + check_text(name, where)) for name in check_list(pair, where)[:2]]
            if len(tied) < 2:
                raise FormatError("a tie must name two parameters", where=where, found=str(pair)[:80])
            aliases[tied[0]] = tied[1]
    return ParamShapes(shapes, where, aliases, units)
