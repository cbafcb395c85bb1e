"""Layouts of full parameters in shards: flat or per dimension, any world size.

Needs no torch. A rank's shard is one 1-D array with `chunk` elements, zero-padded to the same length on every rank.
A layout gives the position of each parameter's elements in the shard, as boxes and runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any

from shardckpt import dtypes
from shardckpt.boxes import Box, Shape, chunk_box, chunk_range, flat_to_boxes
from shardckpt.errors import FormatError

ALIGNMENT = 16  # in bytes, for each parameter's offset in an aligned flat layout

_FORMAT = 1


@dataclass(frozen=True)
class ParamSpec:
    """One parameter in a layout."""

    name: str  # fully qualified name, without the names of wrapper modules
    shape: Shape
    dtype: str  # stored dtype, in torch's spelling
    order: tuple[int, ...] = ()  # dimensions from the slowest to the fastest in memory; empty means row-major
    aliases: tuple[str, ...] = ()  # the parameter's other names

    def __post_init__(self) -> None:
        if any(n < 0 for n in self.shape):
            raise FormatError("a parameter has a negative size", where=self.name, found=self.shape)
        if not dtypes.is_known(self.dtype):
            raise FormatError("a parameter has an unknown dtype", where=self.name, found=self.dtype)
        if self.order and sorted(self.order) != list(range(len(self.shape))):
            raise FormatError("a memory order must be a permutation", where=self.name, found=self.order)

    @property
    def numel(self) -> int:
        """Number of elements in the full parameter."""
        return prod(self.shape)

    @property
    def memory_shape(self) -> Shape:
        """Shape in memory, row-major."""
        return tuple(self.shape[d] for d in self.order) if self.order else self.shape

    def boxes(self, start: int, stop: int) -> list[Box]:
        """Return the boxes for elements `[start, stop)` in memory order."""
        found = flat_to_boxes(self.memory_shape, start, stop)
        return [self._restored(box) for box in found] if self.order else found

    def _restored(self, box: Box) -> Box:
        place = {dim: at for at, dim in enumerate(self.order)}
        dims = range(len(self.shape))
        return Box(tuple(box.offset[place[d]] for d in dims), tuple(box.size[place[d]] for d in dims))


@dataclass(frozen=True)
class ShardRun:
    """One parameter's contiguous elements in one rank's shard."""

    index: int  # index of the parameter in the layout's `specs`
    rank: int  # rank whose shard contains the elements
    start: int  # first element, in the parameter's memory order
    stop: int  # end of the elements, exclusive
    offset: int  # the first element's position in the shard, in elements

    @property
    def numel(self) -> int:
        """Number of elements in the run."""
        return self.stop - self.start


@dataclass(frozen=True)
class FlatLayout:
    """Parameters concatenated to one flat parameter and split into equal chunks, which may end at any element."""

    specs: tuple[ParamSpec, ...]  # in order
    world: int
    alignment: int = 1  # elements; each parameter's offset is a multiple

    def __post_init__(self) -> None:
        _check_world(self.world)
        if self.alignment < 1:
            raise FormatError("the alignment must be at least 1", found=self.alignment)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Each parameter's offset in the flat parameter, in elements."""
        found, at = [], 0
        for spec in self.specs:
            at = -(-at // self.alignment) * self.alignment
            found.append(at)
            at += spec.numel
        return tuple(found)

    @cached_property
    def numel(self) -> int:
        """Elements in the flat parameter, with gaps between aligned parameters, without padding at the end."""
        return self.offsets[-1] + self.specs[-1].numel if self.specs else 0

    @cached_property
    def chunk(self) -> int:
        """Number of elements in every rank's shard, including padding."""
        return chunk_range(self.numel, self.world, 0)[1]

    def get_unpadded_size(self, rank: int) -> int:
        """Return the number of elements in a rank's shard without the padding at the end."""
        return chunk_range(self.numel, self.world, rank)[1]

    def runs(self, rank: int) -> list[ShardRun]:
        """Return the parameters' runs in a rank's shard, in order; parameters without elements there are skipped."""
        low, high = rank * self.chunk, (rank + 1) * self.chunk
        found = []
        for index, (spec, at) in enumerate(zip(self.specs, self.offsets, strict=True)):
            start, stop = max(at, low), min(at + spec.numel, high)
            if start < stop:
                found.append(ShardRun(index, rank, start - at, stop - at, start - low))
        return found

    def boxes(self, rank: int) -> list[tuple[int, Box, int]]:
        """Return a rank's `(parameter, box, offset in the shard)`, in order."""
        # A box's elements are permuted in the shard if the parameter's memory order is not row-major.
        return list(_boxes_of_runs(self.specs, self.runs(rank)))

    def with_world(self, world: int) -> FlatLayout:
        """Return the same parameters' layout for another number of ranks."""
        return FlatLayout(self.specs, world, self.alignment)

    def to_json(self) -> dict[str, Any]:
        """Return the layout as JSON values."""
        return {**_head("flat", self.world, self.specs), "alignment": self.alignment}


@dataclass(frozen=True)
class DimLayout:
    """Each parameter split along one dimension into equal chunks; later ranks may have shorter or empty chunks."""

    specs: tuple[ParamSpec, ...]  # in order; all in row-major memory order
    world: int
    dims: tuple[int, ...]  # the dimension that splits each parameter; a 0-dim parameter counts as one row
    # Elements; each parameter's place is a multiple. Not saved: states have each parameter's part as a tensor.
    alignment: int = field(default=1, compare=False)

    def __post_init__(self) -> None:
        _check_world(self.world)
        if len(self.dims) != len(self.specs):
            raise FormatError("every parameter must have a dimension to split along", found=len(self.dims))
        for spec, dim in zip(self.specs, self.dims, strict=True):
            if not 0 <= dim < max(len(spec.shape), 1) or spec.order:
                raise FormatError("a parameter cannot be split along this dimension", where=spec.name, found=dim)

    def box(self, index: int, rank: int) -> Box:
        """Return one parameter's box on a rank; its size is zero if the rank has no elements."""
        spec, dim = self.specs[index], self.dims[index]
        if not spec.shape:
            return Box((), ()) if rank == 0 else Box((0,), (0,))
        return chunk_box(spec.shape, dim, self.world, rank)

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        sizes = (self.box(index, 0).volume for index in range(len(self.specs)))
        return tuple(accumulate((size + -size % self.alignment for size in sizes), initial=0))

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Each parameter's offset in every rank's shard, in elements."""
        return self._ends[:-1]

    @cached_property
    def chunk(self) -> int:
        """Elements in every rank's shard, with padding: the size of rank 0's shard."""
        return self._ends[-1]

    def boxes(self, rank: int) -> list[tuple[int, Box, int]]:
        """Return a rank's `(parameter, box, offset in the shard)`, in order."""
        found = [(index, self.box(index, rank), self.places[index]) for index in range(len(self.specs))]
        return [each for each in found if each[1].volume]

    def with_world(self, world: int) -> DimLayout:
        """Return the same parameters' layout for another number of ranks."""
        return DimLayout(self.specs, world, self.dims, self.alignment)

    def to_json(self) -> dict[str, Any]:
        """Return the layout as JSON values."""
        return {**_head("dim", self.world, self.specs), "dims": list(self.dims)}


Layout = FlatLayout | DimLayout


def from_json(value: object) -> Layout:
    """Parse the layout that `to_json` wrote."""
    try:
        return _parse(value)
    except (KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise FormatError(f"a layout cannot be read: {type(error).__name__} {error}") from error


def _parse(value: Any) -> Layout:
    if not isinstance(value, Mapping) or value["format"] != _FORMAT:
        raise FormatError("unknown layout format", expected=_FORMAT)
    specs = tuple(_spec(each) for each in value["params"])
    world = _natural_number(value["world"])
    if value["kind"] == "flat":
        return FlatLayout(specs, world, _natural_number(value["alignment"]))
    if value["kind"] == "dim":
        return DimLayout(specs, world, tuple(_natural_number(d) for d in value["dims"]))
    raise FormatError("unknown kind of layout", found=value["kind"], expected="flat or dim")


def _spec(value: Mapping[str, Any]) -> ParamSpec:
    name, dtype, aliases = value["name"], value["dtype"], value.get("aliases", [])
    if not all(isinstance(each, str) for each in (name, dtype, *aliases)):
        raise FormatError("a name in a layout must be text", found=name)
    shape = tuple(_natural_number(n) for n in value["shape"])
    return ParamSpec(name, shape, dtype, tuple(_natural_number(d) for d in value.get("order", [])), tuple(aliases))


def _natural_number(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise FormatError("a number in a layout must be a nonnegative integer", found=value)
    return value


def _head(kind: str, world: int, specs: tuple[ParamSpec, ...]) -> dict[str, Any]:
    params = []
    for spec in specs:
        row: dict[str, Any] = {"name": spec.name, "shape": list(spec.shape), "dtype": spec.dtype}
        if spec.order:
            row["order"] = list(spec.order)
        if spec.aliases:
            row["aliases"] = list(spec.aliases)
        params.append(row)
    return {"format": _FORMAT, "kind": kind, "world": world, "params": params}


def _boxes_of_runs(specs: tuple[ParamSpec, ...], runs: list[ShardRun]) -> Iterator[tuple[int, Box, int]]:
    for run in runs:
        at = run.offset
        for box in specs[run.index].boxes(run.start, run.stop):
            yield run.index, box, at
            at += box.volume


def _check_world(world: int) -> None:
    if world < 1:
        raise FormatError("a layout needs at least one rank", found=world)
