"""What a DTensor or a ShardedTensor in a pickle says of itself, checked: which boxes of the whole array one rank holds.

Placements and meshes decide, or the list of shards; never what values are equal. Nothing that a pickle says is trusted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod

from shardckpt.boxes import Box, Shape, chunk_range, full_box, shift
from shardckpt.errors import FormatError, UnsupportedError, escape
from shardckpt.format.encodings.pickle_reader import Dtype, InstanceStub, TensorStub

DTENSOR, SHARDED_TENSOR = "DTensor", "ShardedTensor"

_MOST_DIMENSIONS = 64
_MOST_RANKS = 1 << 24
_MOST_ELEMENTS = 1 << 60
_DEEPEST = 4
_SHARDED_STATE = 5
"""Shards, metadata, the process group, the sharding spec, and whether remote references were made."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """A device mesh as one rank sees it.

    Attributes:
        sizes: Ranks in each dimension.
        place: This rank's coordinates; None where it is not in the mesh.
        rank: This rank's number; -1 where the mesh does not tell.
        ranks: Every rank of the root mesh; empty where it does not tell.
        steps: For each dimension the sizes and steps, in `ranks`, that a coordinate is made of.
        at: Where in `ranks` this rank stands; -1 where it does not.
    """

    sizes: Shape
    place: Shape | None
    rank: int
    ranks: Shape
    steps: tuple[tuple[tuple[int, int], ...], ...]
    at: int

    def rank_at(self, place: Sequence[int]) -> int:
        """Return which rank has some coordinates; -1 where the mesh does not tell."""
        if self.place is None or not self.steps or self.at < 0:
            return -1
        at = self.at + sum(_step(s, c) - _step(s, own) for s, c, own in zip(self.steps, place, self.place, strict=True))
        return self.ranks[at] if 0 <= at < len(self.ranks) else -1


def _step(parts: Sequence[tuple[int, int]], coordinate: int) -> int:
    found = 0
    for size, step in reversed(parts):
        found += coordinate % size * step
        coordinate //= size
    return found


@dataclass(frozen=True, slots=True)
class Grid:
    """How a mesh cuts an array.

    Attributes:
        shape: Of the array.
        sizes: Of the mesh.
        cuts: For each dimension of the array, the mesh dimensions that cut it, in the order in which they do.
    """

    shape: Shape
    sizes: Shape
    cuts: tuple[tuple[int, ...], ...]

    def box(self, place: Sequence[int]) -> Box:
        """Return what the rank at some coordinates holds: equal rows, fewer or none on the last ranks."""
        offset, size = [], []
        for length, mesh_dims in zip(self.shape, self.cuts, strict=True):
            start, n = 0, length
            for mesh_dim in mesh_dims:
                first, n = chunk_range(n, self.sizes[mesh_dim], place[mesh_dim])
                start += first
            offset.append(start)
            size.append(n)
        return Box(tuple(offset), tuple(size))

    def places(self) -> Iterator[Shape]:
        """Yield coordinates such that each part is met once: replicas count as the first of them."""
        cutting = {mesh_dim for mesh_dims in self.cuts for mesh_dim in mesh_dims}
        yield from product(*(range(n) if dim in cutting else range(1) for dim, n in enumerate(self.sizes)))

    def __str__(self) -> str:
        cut = [f"dim {d} by {'x'.join(str(self.sizes[m]) for m in dims)}" for d, dims in enumerate(self.cuts) if dims]
        return f"{self.shape} over {'x'.join(map(str, self.sizes))} ranks, {', '.join(cut) or 'whole on each'}"


@dataclass(frozen=True, slots=True)
class Shards:
    """The list of all shards of a ShardedTensor.

    Attributes:
        shape: Of the array.
        boxes: Of the shards.
        owners: The rank of each; -1 where it is not told.
    """

    shape: Shape
    boxes: tuple[Box, ...]
    owners: tuple[int, ...] = field(compare=False)

    def __str__(self) -> str:
        return f"{self.shape} in {len(self.boxes)} shards"


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """How one rank's shard lies in the full tensor.

    Attributes:
        kind: `DTensor` or `ShardedTensor`.
        shape: Of the whole array.
        dtype: Type of its elements; empty where only other ranks' files tell.
        held: Boxes of it, each with the local array that holds it.
        cut: How the whole is cut; None for nested shards, of which no list is complete.
        mesh: Of a DTensor.
        rank: This rank's number among all; -1 where it is not told.
        world: Ranks in all; 0 where it is not told.
        place: This rank's number in the group that shares the array, of a ShardedTensor.
        parts: Ranks of that group.
        refused: What makes it unreadable; empty for most.
    """

    kind: str
    shape: Shape
    dtype: str
    held: tuple[tuple[Box, TensorStub], ...]
    cut: Grid | Shards | None
    mesh: Mesh | None = None
    rank: int = -1
    world: int = 0
    place: int = 0
    parts: int = 1
    refused: str = ""

    def elsewhere(self) -> Iterator[tuple[Box, int]]:
        """Yield every part of the whole, and the rank that holds it, -1 where it is not told."""
        if isinstance(self.cut, Grid):
            for place in self.cut.places():
                yield self.cut.box(place), self.mesh.rank_at(place) if self.mesh else -1
        elif isinstance(self.cut, Shards):
            yield from zip(self.cut.boxes, self.cut.owners, strict=True)


class ShardParser:
    """Parses DTensors and ShardedTensors of one file; meshes are parsed once."""

    def __init__(self) -> None:
        self._meshes: dict[int, tuple[InstanceStub, Mesh]] = {}
        self._cuts: dict[object, Grid] = {}

    def parse(self, value: InstanceStub) -> ShardInfo:
        """Return what a DTensor or a ShardedTensor says.

        Raises:
            FormatError: It contradicts itself, or is of a form that no writer gives it.
            UnsupportedError: A form that is not read.
        """
        try:
            if value.name.rpartition(".")[2] == DTENSOR:
                return self._dtensor(value)
            return _sharded_tensor(value, _DEEPEST)
        except (FormatError, UnsupportedError):
            raise
        except (KeyError, TypeError, AttributeError, ValueError, IndexError, OverflowError, RecursionError) as error:
            what = f"what it says of its layout cannot be read: {type(error).__name__} {escape(error)}"
            raise FormatError(what) from None

    # --------------------------------------------------------------------------------------------------- DTensors

    def _dtensor(self, value: InstanceStub) -> ShardInfo:
        told = _fields(value)
        spec = _fields(told["_spec"])
        mesh = self._mesh(spec["mesh"])
        placements = _sequence(spec["placements"])
        shape, dtype = _meta(spec.get("tensor_meta"), value)
        if len(placements) != len(mesh.sizes):
            raise FormatError("it has not one placement for each dimension of its mesh", found=len(placements))
        common = {"mesh": mesh, "rank": mesh.rank, "world": len(mesh.ranks)}
        partial = next((name for p in placements if "Partial" in (name := _class(p))), "")
        if partial:
            kind = f"a DTensor of partial sums ({partial}), whose whole values lie in no file"
            return ShardInfo(DTENSOR, shape, dtype, (), None, refused=kind, **common)  # type: ignore[arg-type]
        grid = self._grid(shape, mesh.sizes, placements, spec.get("shard_order"))
        local = told["_local_tensor"]
        if mesh.place is None:
            return ShardInfo(DTENSOR, shape, dtype, (), grid, **common)  # type: ignore[arg-type]
        if not isinstance(local, TensorStub):
            kind = f"a DTensor over {getattr(local, 'name', type(local).__name__)}"
            return ShardInfo(DTENSOR, shape, dtype, (), grid, refused=kind, **common)  # type: ignore[arg-type]
        box = grid.box(mesh.place)
        if local.shape != box.size and (box.volume or prod(local.shape)):
            raise FormatError(
                f"what the rank at {mesh.place} holds does not fit its placements ({grid})",
                found=local.shape,
                expected=box.size,
            )
        held = ((box, local),) if box.volume or not shape else ()
        return ShardInfo(DTENSOR, shape, dtype, held, grid, **common)  # type: ignore[arg-type]

    def _mesh(self, value: object) -> Mesh:
        if not isinstance(value, InstanceStub):
            raise FormatError("it lies on no mesh", found=type(value).__name__)
        if id(value) not in self._meshes:
            self._meshes[id(value)] = (value, _mesh(_fields(value)))
        return self._meshes[id(value)][1]

    def _grid(self, shape: Shape, sizes: Shape, placements: Sequence[object], order: object) -> Grid:
        told = tuple((_class(p), *_parse_placement(p)) for p in placements)
        orders = _orders(order, len(shape), len(sizes))
        key = (shape, sizes, told, orders)
        if key not in self._cuts:
            self._cuts[key] = Grid(shape, sizes, _mesh_dims_by_dim(len(shape), sizes, told, orders))
        return self._cuts[key]


def _mesh(told: dict[str, object]) -> Mesh:
    ranks = _numbers(told.get("_flatten_rank_map", ()), _MOST_RANKS)
    layout = told.get("_layout")
    steps: tuple[tuple[tuple[int, int], ...], ...] = ()
    if layout is not None:
        steps = _steps(_fields(layout))
        sizes = tuple(prod(size for size, _ in axis) for axis in steps)
    else:
        mesh = told["mesh"]
        if not isinstance(mesh, TensorStub):
            raise FormatError("a mesh is no tensor of ranks", found=type(mesh).__name__)
        sizes = mesh.shape
    if not sizes or len(sizes) > _MOST_DIMENSIONS or not 0 < prod(sizes) <= _MOST_RANKS:
        raise FormatError("a mesh has impossible sizes", found=sizes)
    place = told["_coordinate_on_dim"]
    coordinates = None if place is None else _numbers(place, _MOST_RANKS)
    if coordinates is not None and (
        len(coordinates) != len(sizes) or any(c >= n for c, n in zip(coordinates, sizes, strict=True))
    ):
        raise FormatError("a rank lies outside of its mesh", found=coordinates, expected=f"below {sizes}")
    rank = told.get("_rank", -1)
    if type(rank) is not int or not -1 <= rank < _MOST_RANKS:
        raise FormatError("a mesh has an impossible rank", found=rank)
    return Mesh(sizes, coordinates, rank, ranks, steps, ranks.index(rank) if rank in ranks else -1)


def _steps(layout: dict[str, object]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return, for each dimension of a mesh, the sizes and steps in the list of ranks: in one of two forms."""
    if "axes" in layout:
        axes = [_fields(axis) for axis in _sequence(layout["axes"])]
    else:
        shape, stride = layout["shape"], layout["stride"]
        pairs = zip(_sequence(shape), _sequence(stride), strict=True) if isinstance(shape, tuple) else [(shape, stride)]
        axes = [{"shape": size, "stride": step} for size, step in pairs]
    found = []
    for axis in axes:
        sizes, steps = (
            _numbers(each if isinstance(each, tuple) else (each,), _MOST_RANKS)
            for each in (axis["shape"], axis["stride"])
        )
        if len(sizes) > _MOST_DIMENSIONS or not all(sizes):
            raise FormatError("a mesh has impossible sizes", found=sizes)
        found.append(tuple(zip(sizes, steps, strict=True)))
    return tuple(found)


def _class(placement: object) -> str:
    if not isinstance(placement, InstanceStub):
        raise FormatError("a placement is of an unknown kind", found=type(placement).__name__)
    return placement.name.rpartition(".")[2]


def _parse_placement(placement: object) -> tuple[int, int]:
    """Return the dimension that a placement cuts, -1 for none, and how many parts of it are cut before."""
    assert isinstance(placement, InstanceStub)
    told = _fields(placement)
    if "dim" not in told:
        return -1, 1
    dim, before = told["dim"], told.get("split_factor", 1)
    if type(dim) is not int or type(before) is not int or not 0 < before < _MOST_RANKS or not -64 <= dim < 64:
        raise FormatError("a placement is malformed", found=(_class(placement), dim, before))
    return dim, before


def _orders(told: object, ndim: int, mesh_ndim: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Return the dimensions whose order of cuts is spelt out, and the order."""
    if told is None:
        return ()
    found = []
    for entry in _sequence(told):
        values = entry.args if isinstance(entry, InstanceStub) else entry
        if not isinstance(values, tuple) or len(values) != 2:
            raise FormatError("an order of cuts is malformed")
        dim, mesh_dims = values
        numbers = _numbers(mesh_dims, mesh_ndim - 1)
        if type(dim) is not int or not 0 <= dim < ndim or len(set(numbers)) < len(numbers):
            raise FormatError("an order of cuts is malformed", found=dim)
        found.append((dim, numbers))
    return tuple(found)


def _mesh_dims_by_dim(
    ndim: int,
    sizes: Shape,
    placements: Sequence[tuple[str, int, int]],
    orders: tuple[tuple[int, tuple[int, ...]], ...],
) -> tuple[tuple[int, ...], ...]:
    """Return, for each dimension, the mesh dimensions that cut it, first to last.

    They cut from left to right, unless one is strided: it cuts after as many parts as its factor says, which mesh
    dimensions to its right have made (FSDP over tensor parallel).
    """
    found: list[list[int]] = [[] for _ in range(ndim)]
    for mesh_dim in reversed(range(len(placements))):
        name, dim, before = placements[mesh_dim]
        if dim == -1 and name == "Replicate":
            continue
        dim = dim + ndim if dim < 0 and name != "Replicate" else dim
        if name not in ("Shard", "_StridedShard") or not 0 <= dim < ndim:
            raise UnsupportedError(f"its placement {name} is not one that is read", found=f"dim {dim} of {ndim}")
        made, at = 1, 0
        while made < before and at < len(found[dim]):
            made *= sizes[found[dim][at]]
            at += 1
        if made != before:
            raise UnsupportedError(
                "its strided placement follows no cut of the mesh", found=f"{name}(dim={dim}, split_factor={before})"
            )
        found[dim].insert(at, mesh_dim)
    for dim, order in orders:
        if sorted(order) != sorted(found[dim]):
            raise FormatError("its order of cuts is not that of its placements", found=order, expected=found[dim])
        found[dim] = list(order)
    return tuple(map(tuple, found))


def _meta(meta: object, value: InstanceStub) -> tuple[Shape, str]:
    """Return the whole shape and the type of a DTensor, from its spec or from how it is rebuilt."""
    parts = meta.args if isinstance(meta, InstanceStub) and meta.args else ()
    if not parts and isinstance(meta, InstanceStub) and meta.state is not None:
        told = _fields(meta)
        parts = (told.get("shape"), told.get("stride"), told.get("dtype"))
    values = parts or (value.args[1], value.args[2], value.args[0])
    dtype = values[2]
    if not isinstance(dtype, Dtype):
        raise FormatError("it has no type", found=type(dtype).__name__)
    return _shape(values[0]), dtype.name


# -------------------------------------------------------------------------------------------------- ShardedTensors


def _sharded_tensor(value: InstanceStub, depth: int) -> ShardInfo:
    state = value.state
    if not isinstance(state, tuple) or len(state) != _SHARDED_STATE or not depth:
        raise FormatError("a ShardedTensor is malformed")
    metadata = _fields(state[1])
    shape = _shape(metadata["size"])
    told = _fields(state[2])
    rank, world, place, parts = (
        _number(told[key]) for key in ("global_rank", "global_world_size", "local_rank", "local_world_size")
    )
    if rank >= world or place >= parts:
        raise FormatError("a ShardedTensor is of a rank that cannot be", found=f"{rank} of {world}, {place} of {parts}")
    boxes, owners = _read_shards(metadata["shards_metadata"], shape)
    held: list[tuple[Box, TensorStub]] = []
    dtype, is_nested = _read_dtype(metadata.get("tensor_properties"), value), False
    for shard in _sequence(state[0]):
        fields = _fields(shard)
        box, _ = _shard_box(fields["metadata"], shape)
        inner = fields["tensor"]
        if isinstance(inner, InstanceStub) and inner.name.rpartition(".")[2] == SHARDED_TENSOR:
            share = _sharded_tensor(inner, depth - 1)
            origin = tuple(-o for o in box.offset)
            held += [(_inside(shift(part, origin), shape), stub) for part, stub in share.held]
            is_nested, dtype = True, dtype or share.dtype
        elif isinstance(inner, TensorStub):
            if inner.shape != box.size:
                raise FormatError("a shard is not as large as it says", found=inner.shape, expected=box.size)
            held.append((box, inner))
        else:
            kind = f"a ShardedTensor of {getattr(inner, 'name', type(inner).__name__)}"
            return ShardInfo(SHARDED_TENSOR, shape, dtype, (), None, None, rank, world, place, parts, kind)
    cut = None if is_nested else Shards(shape, boxes, owners)
    kept = tuple((box, stub) for box, stub in held if box.volume)
    return ShardInfo(SHARDED_TENSOR, shape, dtype, kept, cut, None, rank, world, place, parts)


def _read_shards(shards: object, shape: Shape) -> tuple[tuple[Box, ...], tuple[int, ...]]:
    pairs = [_shard_box(each, shape) for each in _sequence(shards)]
    return tuple(box for box, _ in pairs), tuple(owner for _, owner in pairs)


def _shard_box(value: object, shape: Shape) -> tuple[Box, int]:
    told = _fields(value)
    box = Box(_numbers(told["shard_offsets"], _MOST_ELEMENTS), _numbers(told["shard_sizes"], _MOST_ELEMENTS))
    placement = told.get("placement")
    rank = _fields(placement).get("_rank") if isinstance(placement, InstanceStub) else None
    return _inside(box, shape), rank if type(rank) is int and rank >= 0 else -1


def _inside(box: Box, shape: Shape) -> Box:
    if not box.within(shape):
        raise FormatError(
            "a shard lies outside of its array", found=str(box)[:80], expected=f"inside {full_box(shape)}"
        )
    return box


def _read_dtype(properties: object, value: InstanceStub) -> str:
    for place in (*value.args[:1], *(_any(properties.state) if isinstance(properties, InstanceStub) else ())):
        if isinstance(place, Dtype):
            return place.name
    return ""


def _any(state: object) -> tuple[object, ...]:
    if isinstance(state, dict):
        return tuple(state.values())
    return state if isinstance(state, tuple) else ()


# ---------------------------------------------------------------------------------------------------------- values


def _fields(value: object) -> dict[str, object]:
    """Return the attributes of an instance: of its dict, of its slots, or of both."""
    if not isinstance(value, InstanceStub):
        raise FormatError("an instance was expected", found=type(value).__name__)
    found: dict[str, object] = {}
    for part in value.state if isinstance(value.state, tuple) else (value.state,):
        if isinstance(part, dict):
            found.update(part)
    return found


def _sequence(value: object) -> Sequence[object]:
    if not isinstance(value, list | tuple):
        raise FormatError("a list was expected", found=type(value).__name__)
    return value


def _number(value: object) -> int:
    return _numbers((value,), _MOST_RANKS)[0]


def _numbers(value: object, most: int) -> Shape:
    numbers = _sequence(value)
    if not all(type(n) is int and 0 <= n <= most for n in numbers):
        raise FormatError("a number is not whole, negative or too large", found=value)
    return tuple(n for n in numbers if isinstance(n, int))


def _shape(value: object) -> Shape:
    shape = _numbers(value, _MOST_ELEMENTS)
    if len(shape) > _MOST_DIMENSIONS or prod(shape) > _MOST_ELEMENTS:
        raise FormatError("an array is larger than any machine holds", found=shape)
    return shape
