"""Parse DTensors and ShardedTensors of one rank in a pickle, with checks.

Placements and meshes, or the list of shards, give the boxes; values are not compared. The pickle is not trusted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import NamedTuple

from shardckpt.boxes import Box, Shape, chunk_range, full_box, shift, strides
from shardckpt.encodings.budget import MAX_DIMENSIONS, check_count, check_counts, check_list, check_shape
from shardckpt.encodings.pickle_reader import Dtype, InstanceStub, TensorStub
from shardckpt.errors import FormatError, UnsupportedError, escape

DTENSOR, SHARDED_TENSOR = "DTensor", "ShardedTensor"

# Class of the placement, the dimension that it splits (-1 for none), and its split factor.
_Placement = tuple[str, int, int]

# For tensor dimensions with a stored order: the mesh dimensions that split them.
_Orders = tuple[tuple[int, tuple[int, ...]], ...]

_MAX_RANKS = 1 << 24
_DEEPEST = 4
# Fields: shards, metadata, process group, sharding spec, and whether remote references exist.
_SHARDED_STATE = 5


@dataclass(frozen=True, slots=True)
class Mesh:
    """A device mesh as stored by one rank."""

    sizes: Shape  # ranks in each dimension
    place: Shape | None  # this rank's coordinates; None if it is not in the mesh
    rank: int  # global rank; -1 if the mesh does not store it
    ranks: Shape  # all ranks of the root mesh; empty if not stored
    steps: tuple[tuple[tuple[int, int], ...], ...]  # for each dimension: sizes and strides in `ranks`
    at: int  # this rank's index in `ranks`; -1 if it is not there

    def rank_at(self, place: Sequence[int]) -> int:
        """Return the rank at some coordinates; -1 if the mesh does not store it."""
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
    """A tensor's sharding over a mesh."""

    shape: Shape  # in elements
    sizes: Shape
    # For each tensor dimension: the mesh dimensions that split it, in order.
    mesh_dims: tuple[tuple[int, ...], ...]

    def box(self, place: Sequence[int]) -> Box:
        """Return the box at some coordinates. Chunks are equal, except shorter or empty ones on the last ranks."""
        offset, size = [], []
        for length, mesh_dims in zip(self.shape, self.mesh_dims, strict=True):
            start, n = 0, length
            for mesh_dim in mesh_dims:
                first, n = chunk_range(n, self.sizes[mesh_dim], place[mesh_dim])
                start += first
            offset.append(start)
            size.append(n)
        return Box(tuple(offset), tuple(size))

    def places(self) -> Iterator[Shape]:
        """Yield each part's coordinates once: the first replica's."""
        splitting = {mesh_dim for mesh_dims in self.mesh_dims for mesh_dim in mesh_dims}
        yield from product(*(range(n) if dim in splitting else range(1) for dim, n in enumerate(self.sizes)))

    def __str__(self) -> str:
        splits = [(dim, "x".join(str(self.sizes[m]) for m in dims)) for dim, dims in enumerate(self.mesh_dims) if dims]
        text = ", ".join(f"dim {dim} by {sizes}" for dim, sizes in splits) or "full on each"
        return f"{self.shape} over {'x'.join(map(str, self.sizes))} ranks, {text}"


@dataclass(frozen=True, slots=True)
class ShardList:
    """A ShardedTensor's shards."""

    shape: Shape  # in elements
    boxes: tuple[Box, ...]
    owners: tuple[int, ...] = field(compare=False)  # each shard's rank; -1 if not stored

    def __str__(self) -> str:
        return f"{self.shape} in {len(self.boxes)} shards"


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """The layout of one rank's shard in the full tensor, without its elements."""

    kind: str  # `DTensor` or `ShardedTensor`
    shape: Shape
    dtype: str  # empty if only other ranks' files store it
    sharding: Grid | ShardList | None  # None for nested shards, which have no complete list
    mesh: Mesh | None = None  # only for a DTensor
    rank: int = -1  # global rank; -1 if not stored
    world: int = 0  # number of ranks; 0 if not stored
    place: int = 0  # this rank's index in the group that shares a ShardedTensor
    parts: int = 1  # ranks in that group
    refusal: str = ""  # why the shard cannot be read; usually empty

    def list_parts(self) -> Iterator[tuple[Box, int]]:
        """Yield every part of the tensor with its rank; -1 if not stored."""
        if isinstance(self.sharding, Grid):
            for place in self.sharding.places():
                yield self.sharding.box(place), self.mesh.rank_at(place) if self.mesh else -1
        elif isinstance(self.sharding, ShardList):
            yield from zip(self.sharding.boxes, self.sharding.owners, strict=True)


class ParsedShard(NamedTuple):
    """One rank's shard of a tensor."""

    info: ShardInfo
    local: tuple[tuple[Box, TensorStub], ...] = ()  # this rank's boxes and local tensors


class ShardParser:
    """Parses the DTensors and ShardedTensors in one file."""

    def __init__(self) -> None:
        # Most tensors in a model share a few meshes and layouts.
        self._meshes: dict[int, tuple[InstanceStub, Mesh]] = {}
        self._layouts: dict[object, tuple[ShardInfo, Box | None]] = {}

    def parse(self, value: InstanceStub) -> ParsedShard:
        """Parse a DTensor or a ShardedTensor."""
        try:
            if value.name.rpartition(".")[2] == DTENSOR:
                return self._dtensor(value)
            return _sharded_tensor(value, _DEEPEST)
        except (FormatError, UnsupportedError):
            raise
        except (KeyError, TypeError, AttributeError, ValueError, IndexError, OverflowError, RecursionError) as error:
            what = f"its layout cannot be read: {type(error).__name__} {escape(error)}"
            raise FormatError(what) from None

    # --------------------------------------------------------------------------------------------------- DTensors

    def _dtensor(self, value: InstanceStub) -> ParsedShard:
        fields = _fields(value)
        spec = _fields(fields["_spec"])
        mesh = self._mesh(spec["mesh"])
        placements = tuple(map(_parse_placement, check_list(spec["placements"])))
        shape, dtype = _meta(spec.get("tensor_meta"), value)
        orders = _parse_orders(spec.get("shard_order"), len(shape), len(mesh.sizes))
        key = (id(mesh), shape, dtype, placements, orders)
        if key not in self._layouts:
            self._layouts[key] = _dtensor_layout(mesh, shape, dtype, placements, orders)
        info, box = self._layouts[key]
        if box is None:
            return ParsedShard(info)
        local = fields["_local_tensor"]
        if not isinstance(local, TensorStub):
            kind = f"a DTensor over {getattr(local, 'name', type(local).__name__)}"
            return ParsedShard(replace(info, refusal=kind))
        if local.shape != box.size and (box.volume or prod(local.shape)):
            raise FormatError(
                f"the local tensor at mesh position {mesh.place} does not fit its placements ({info.sharding})",
                found=local.shape,
                expected=box.size,
            )
        return ParsedShard(info, ((box, local),) if box.volume or not shape else ())

    def _mesh(self, value: object) -> Mesh:
        if not isinstance(value, InstanceStub):
            raise FormatError("it has no mesh", found=type(value).__name__)
        if id(value) not in self._meshes:
            self._meshes[id(value)] = (value, _parse_mesh(_fields(value)))
        return self._meshes[id(value)][1]


def _dtensor_layout(
    mesh: Mesh, shape: Shape, dtype: str, placements: tuple[_Placement, ...], orders: _Orders
) -> tuple[ShardInfo, Box | None]:
    """Return a DTensor's layout and this rank's box; the box is None if the rank stores nothing readable."""
    if len(placements) != len(mesh.sizes):
        raise FormatError("it must have one placement for each mesh dimension", found=len(placements))
    partial = next((name for name, _, _ in placements if "Partial" in name), "")
    if partial:
        kind = f"a DTensor with partial sums ({partial}), whose full values are in no file"
        return ShardInfo(DTENSOR, shape, dtype, None, mesh, mesh.rank, len(mesh.ranks), refusal=kind), None
    grid = Grid(shape, mesh.sizes, _mesh_dims_by_dim(len(shape), mesh.sizes, placements, orders))
    info = ShardInfo(DTENSOR, shape, dtype, grid, mesh, mesh.rank, len(mesh.ranks))
    return info, None if mesh.place is None else grid.box(mesh.place)


def _parse_mesh(fields: dict[str, object]) -> Mesh:
    ranks = check_counts(fields.get("_flatten_rank_map", ()), _MAX_RANKS)
    layout = fields.get("_layout")
    steps: tuple[tuple[tuple[int, int], ...], ...] = ()
    if layout is not None:
        steps = _parse_steps(_fields(layout))
        sizes = tuple(prod(size for size, _ in axis) for axis in steps)
    else:
        mesh = fields["mesh"]
        if not isinstance(mesh, TensorStub):
            raise FormatError("a mesh must be a tensor with ranks", found=type(mesh).__name__)
        sizes = mesh.shape
    if not sizes or len(sizes) > MAX_DIMENSIONS or not 0 < prod(sizes) <= _MAX_RANKS:
        raise FormatError("a mesh has impossible sizes", found=sizes)
    place = fields["_coordinate_on_dim"]
    coordinates = None if place is None else check_counts(place, _MAX_RANKS)
    if coordinates is not None and (
        len(coordinates) != len(sizes) or any(c >= n for c, n in zip(coordinates, sizes, strict=True))
    ):
        raise FormatError("a rank is outside its mesh", found=coordinates, expected=f"below {sizes}")
    rank = fields.get("_rank", -1)
    if type(rank) is not int or not -1 <= rank < _MAX_RANKS:
        raise FormatError("a mesh has an impossible rank", found=rank)
    listed = check_counts(fields.get("_flatten_mesh_list", ()), _MAX_RANKS)
    if layout is None and len(listed) == prod(sizes):  # torch up to 2.9: the ranks of this mesh, row by row
        row_steps = strides(sizes)
        at = -1 if coordinates is None else sum(c * step for c, step in zip(coordinates, row_steps, strict=True))
        steps = tuple(((size, step),) for size, step in zip(sizes, row_steps, strict=True))
        return Mesh(sizes, coordinates, -1 if at < 0 else listed[at], listed, steps, at)
    return Mesh(sizes, coordinates, rank, ranks, steps, ranks.index(rank) if rank in ranks else -1)


def _parse_steps(layout: dict[str, object]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return, for each mesh dimension, sizes and strides in the list of ranks."""
    if "axes" in layout:
        axes = [_fields(axis) for axis in check_list(layout["axes"])]
    else:
        shape, stride = layout["shape"], layout["stride"]
        pairs = (
            zip(check_list(shape), check_list(stride), strict=True) if isinstance(shape, tuple) else [(shape, stride)]
        )
        axes = [{"shape": size, "stride": step} for size, step in pairs]
    found = []
    for axis in axes:
        sizes, steps = (
            check_counts(value if isinstance(value, tuple) else (value,), _MAX_RANKS)
            for value in (axis["shape"], axis["stride"])
        )
        if len(sizes) > MAX_DIMENSIONS or not all(sizes):
            raise FormatError("a mesh has impossible sizes", found=sizes)
        found.append(tuple(zip(sizes, steps, strict=True)))
    return tuple(found)


def _class(placement: object) -> str:
    if not isinstance(placement, InstanceStub):
        raise FormatError("unknown placement", found=type(placement).__name__)
    return placement.name.rpartition(".")[2]


def _parse_placement(placement: object) -> _Placement:
    """Return a placement's class, the dimension that it splits (-1 for none), and the parts before it."""
    name = _class(placement)
    fields = _fields(placement)
    if "dim" not in fields:
        return name, -1, 1
    dim, before = fields["dim"], fields.get("split_factor", 1)
    if type(dim) is not int or type(before) is not int or not 0 < before < _MAX_RANKS or not -64 <= dim < 64:
        raise FormatError("a placement is malformed", found=(name, dim, before))
    return name, dim, before


def _parse_orders(value: object, ndim: int, mesh_ndim: int) -> _Orders:
    """Return the tensor dimensions with a stored order of mesh dimensions."""
    if value is None:
        return ()
    found = []
    for entry in check_list(value):
        values = entry.args if isinstance(entry, InstanceStub) else entry
        if not isinstance(values, tuple) or len(values) != 2:
            raise FormatError("a shard order is malformed")
        dim, mesh_dims = values
        numbers = check_counts(mesh_dims, mesh_ndim - 1)
        if type(dim) is not int or not 0 <= dim < ndim or len(set(numbers)) < len(numbers):
            raise FormatError("a shard order is malformed", found=dim)
        found.append((dim, numbers))
    return tuple(found)


def _mesh_dims_by_dim(
    ndim: int,
    sizes: Shape,
    placements: Sequence[_Placement],
    orders: _Orders,
) -> tuple[tuple[int, ...], ...]:
    """Return, for each tensor dimension, the mesh dimensions that split it, in order."""
    # Mesh dimensions split from left to right. A strided one splits after those to its right; its split factor is their
    # number of parts (FSDP over tensor parallelism).
    found: list[list[int]] = [[] for _ in range(ndim)]
    for mesh_dim in reversed(range(len(placements))):
        name, dim, before = placements[mesh_dim]
        if dim == -1 and name == "Replicate":
            continue
        dim = dim + ndim if dim < 0 and name != "Replicate" else dim
        if name not in ("Shard", "_StridedShard") or not 0 <= dim < ndim:
            raise UnsupportedError(f"its placement {name} is not supported", found=f"dim {dim} of {ndim}")
        made, at = 1, 0
        while made < before and at < len(found[dim]):
            made *= sizes[found[dim][at]]
            at += 1
        if made != before:
            raise UnsupportedError(
                "its strided placement matches no mesh split", found=f"{name}(dim={dim}, split_factor={before})"
            )
        found[dim].insert(at, mesh_dim)
    for dim, order in orders:
        if sorted(order) != sorted(found[dim]):
            raise FormatError("its shard order contradicts its placements", found=order, expected=found[dim])
        found[dim] = list(order)
    return tuple(map(tuple, found))


def _meta(meta: object, value: InstanceStub) -> tuple[Shape, str]:
    """Return a DTensor's full shape and dtype, from its spec or rebuild call."""
    parts = meta.args if isinstance(meta, InstanceStub) and meta.args else ()
    if not parts and isinstance(meta, InstanceStub) and meta.state is not None:
        fields = _fields(meta)
        parts = (fields.get("shape"), fields.get("stride"), fields.get("dtype"))
    values = parts or (value.args[1], value.args[2], value.args[0])
    dtype = values[2]
    if not isinstance(dtype, Dtype):
        raise FormatError("it has no dtype", found=type(dtype).__name__)
    return check_shape(values[0]), dtype.name


# -------------------------------------------------------------------------------------------------- ShardedTensors


def _sharded_tensor(value: InstanceStub, depth: int) -> ParsedShard:
    state = value.state
    if not isinstance(state, tuple) or len(state) != _SHARDED_STATE or not depth:
        raise FormatError("a ShardedTensor is malformed")
    metadata = _fields(state[1])
    shape = check_shape(metadata["size"])
    group = _fields(state[2])
    rank, world, place, parts = (
        check_count(group[key], _MAX_RANKS)
        for key in ("global_rank", "global_world_size", "local_rank", "local_world_size")
    )
    if rank >= world or place >= parts:
        raise FormatError("a ShardedTensor has an impossible rank", found=f"{rank} of {world}, {place} of {parts}")
    boxes, owners = _read_shards(metadata["shards_metadata"], shape)
    local: list[tuple[Box, TensorStub]] = []
    dtype, is_nested = _read_dtype(metadata.get("tensor_properties"), value), False
    for shard in check_list(state[0]):
        fields = _fields(shard)
        box, _ = _shard_box(fields["metadata"], shape)
        inner = fields["tensor"]
        if isinstance(inner, InstanceStub) and inner.name.rpartition(".")[2] == SHARDED_TENSOR:
            share = _sharded_tensor(inner, depth - 1)
            origin = tuple(-o for o in box.offset)
            local += [(_inside(shift(part, origin), shape), stub) for part, stub in share.local]
            is_nested, dtype = True, dtype or share.info.dtype
        elif isinstance(inner, TensorStub):
            if inner.shape != box.size:
                raise FormatError("a shard's size differs from its metadata", found=inner.shape, expected=box.size)
            local.append((box, inner))
        else:
            kind = f"a ShardedTensor of {getattr(inner, 'name', type(inner).__name__)}"
            return ParsedShard(ShardInfo(SHARDED_TENSOR, shape, dtype, None, None, rank, world, place, parts, kind))
    sharding = None if is_nested else ShardList(shape, boxes, owners)
    kept = tuple((box, stub) for box, stub in local if box.volume)
    return ParsedShard(ShardInfo(SHARDED_TENSOR, shape, dtype, sharding, None, rank, world, place, parts), kept)


def _read_shards(shards: object, shape: Shape) -> tuple[tuple[Box, ...], tuple[int, ...]]:
    pairs = [_shard_box(shard, shape) for shard in check_list(shards)]
    return tuple(box for box, _ in pairs), tuple(owner for _, owner in pairs)


def _shard_box(value: object, shape: Shape) -> tuple[Box, int]:
    fields = _fields(value)
    box = Box(check_counts(fields["shard_offsets"]), check_counts(fields["shard_sizes"]))
    placement = fields.get("placement")
    rank = _fields(placement).get("_rank") if isinstance(placement, InstanceStub) else None
    return _inside(box, shape), rank if type(rank) is int and rank >= 0 else -1


def _inside(box: Box, shape: Shape) -> Box:
    if not box.within(shape):
        raise FormatError("a shard is outside its tensor", found=str(box)[:80], expected=f"inside {full_box(shape)}")
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
    """Return an instance's attributes, from its dict and its slots; do not change them."""
    if not isinstance(value, InstanceStub):
        raise FormatError("an instance was expected", found=type(value).__name__)
    if isinstance(value.state, dict):
        return value.state
    parts = [part for part in value.state if isinstance(part, dict)] if isinstance(value.state, tuple) else []
    if len(parts) == 1:
        return parts[0]
    return {name: attribute for part in parts for name, attribute in part.items()}
