"""Placements and meshes decide what a rank holds: each box is the one that cutting the array in their order gives."""

from __future__ import annotations

import copy
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.boxes import Box, cover, full_box
from shardckpt.encodings.pickle_reader import Dtype, InstanceStub, TensorStub
from shardckpt.errors import CheckpointError, FormatError, UnsupportedError
from shardckpt.readers.torchsave.dtensor_spec import Grid, ParsedShard, ShardParser
from shardckpt.readers.torchsave.storages import StorageRef

PLACEMENTS = "torch.distributed.tensor.placement_types"


def placement(kind: str, **state: Any) -> InstanceStub:
    return InstanceStub(f"{PLACEMENTS}.{kind}", (), state)


def mesh(sizes: tuple[int, ...], place: tuple[int, ...], rank: int = -1) -> InstanceStub:
    """Return a mesh as torch 2.13 pickles it, over consecutive ranks."""
    steps = [prod(sizes[i + 1 :]) for i in range(len(sizes))]
    axes = tuple(
        InstanceStub("_FlatLayout", (), {"shape": (n,), "stride": (s,)}) for n, s in zip(sizes, steps, strict=True)
    )
    own = sum(c * s for c, s in zip(place, steps, strict=True)) if rank < 0 else rank
    state = {
        "_layout": InstanceStub("_MeshLayout", (), {"axes": axes}),
        "_flatten_rank_map": tuple(range(prod(sizes))),
        "_rank": own,
        "_coordinate_on_dim": place,
    }
    return InstanceStub("torch.distributed.device_mesh.DeviceMesh", (), state)


def old_mesh(sizes: tuple[int, ...], place: tuple[int, ...]) -> InstanceStub:
    """Return a mesh as torch up to 2.9 pickles it: ranks are a tensor, and a list without dimensions."""
    ranks = TensorStub(StorageRef("9", "int32", prod(sizes)), 0, sizes, sizes, "int32")
    state = {
        "device_type": "cuda",
        "mesh": ranks,
        "mesh_dim_names": None,
        "_flatten_mesh_list": tuple(range(prod(sizes))),
        "_coordinate_on_dim": list(place),
    }
    return InstanceStub("torch.distributed.device_mesh.DeviceMesh", (), state)


def stub(shape: tuple[int, ...]) -> TensorStub:
    return TensorStub(StorageRef("0", "float32", prod(shape)), 0, shape, shape)


def dtensor(shape: tuple[int, ...], over: InstanceStub, placements: Any, local: Any, order: Any = None) -> InstanceStub:
    meta = InstanceStub("TensorMeta", (shape, shape, Dtype("float32")))
    spec = {"mesh": over, "placements": placements, "tensor_meta": meta, "shard_order": order}
    state = (None, {"_local_tensor": local, "_spec": InstanceStub("DTensorSpec", (), spec)})
    return InstanceStub("torch.distributed.tensor.DTensor", (Dtype("float32"), shape, shape), state)


def shared(value: InstanceStub) -> ParsedShard:
    return ShardParser().parse(value)


@st.composite
def cut(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], list[list[int]]]:
    """Draw an array, a mesh of at most 8 ranks, and for each dimension which mesh dimensions cut it in what order."""
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    sizes = tuple(draw(st.sampled_from([(1,), (2,), (3,), (5,), (8,), (2, 2), (2, 3), (4, 2), (2, 2, 2), (3, 1, 2)])))
    orders: list[list[int]] = [[] for _ in shape]
    for mesh_dim in draw(st.permutations(range(len(sizes)))):
        dim = draw(st.integers(-1, len(shape) - 1))
        if dim >= 0:
            orders[dim].append(mesh_dim)
    return shape, sizes, orders


def placements_of(
    sizes: tuple[int, ...], orders: list[list[int]], ndim: int, *, spelt: bool
) -> tuple[InstanceStub, ...]:
    """Return placements that cut so: a strided one where a mesh dimension to the right cuts before."""
    found = []
    for mesh_dim in range(len(sizes)):
        dim = next((d for d in range(ndim) if mesh_dim in orders[d]), None)
        if dim is None:
            found.append(placement("Replicate"))
            continue
        before = orders[dim][: orders[dim].index(mesh_dim)]
        factor = prod(sizes[m] for m in before if m > mesh_dim)
        is_strided = not spelt and factor > 1
        state = {"dim": dim, "split_factor": factor} if is_strided else {"dim": dim}
        found.append(placement("_StridedShard" if is_strided else "Shard", **state))
    return tuple(found)


@given(given_cut=cut(), spelt=st.booleans(), old=st.booleans())
def test_each_rank_holds_what_cutting_the_array_gives(given_cut: Any, spelt: bool, old: bool) -> None:
    shape, sizes, orders = given_cut
    array = torch.arange(prod(shape)).view(shape)
    placements = placements_of(sizes, orders, len(shape), spelt=spelt)
    order = tuple((d, tuple(o)) for d, o in enumerate(orders) if o) if spelt else None
    boxes: list[Box] = []
    for place in product(*map(range, sizes)):
        local = array
        for dim, mesh_dims in enumerate(orders):
            for mesh_dim in mesh_dims:
                parts = local.chunk(sizes[mesh_dim], dim)
                local = parts[place[mesh_dim]] if place[mesh_dim] < len(parts) else local.narrow(dim, 0, 0)
        over = old_mesh(sizes, place) if old else mesh(sizes, place)
        share = shared(dtensor(shape, over, placements, stub(tuple(local.shape)), order))
        held = [box for box, _ in share.local]
        assert share.info.shape == shape
        if local.numel():
            [box] = held
            inside = tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))
            assert torch.equal(array[inside], local)
        else:
            assert held == []
        boxes += held
        told = dict(share.info.list_parts())
        assert set(boxes) <= set(told)
        replicas = [m for m in range(len(sizes)) if not any(m in o for o in orders)]
        if held and not any(place[m] for m in replicas):
            assert told[held[0]] == sum(c * prod(sizes[i + 1 :]) for i, c in enumerate(place))
    found = cover(full_box(shape), sorted(set(boxes)))
    assert found.gaps == found.overlaps == []


def test_a_submesh_knows_the_ranks_of_its_own_column() -> None:
    """Rank 3 of a 2 x 2 mesh, on the mesh of its first dimension: the other rank is 1, not 0."""
    axes = (InstanceStub("_FlatLayout", (), {"shape": (2,), "stride": (2,)}),)
    state = {
        "_layout": InstanceStub("_MeshLayout", (), {"axes": axes}),
        "_flatten_rank_map": (0, 1, 2, 3),
        "_rank": 3,
        "_coordinate_on_dim": (1,),
    }
    over = InstanceStub("torch.distributed.device_mesh.DeviceMesh", (), state)
    share = shared(dtensor((4,), over, (placement("Shard", dim=0),), stub((2,))))
    assert list(share.info.list_parts()) == [(Box((0,), (2,)), 1), (Box((2,), (2,)), 3)]


@pytest.mark.parametrize("listed", [None, (4, 5, 6), (7, 5)])
def test_a_mesh_of_an_older_torch_names_ranks_if_it_lists_them(listed: tuple[int, ...] | None) -> None:
    over = old_mesh((2,), (1,))
    if listed is None:
        del over.state["_flatten_mesh_list"]
    else:
        over.state["_flatten_mesh_list"] = listed
    info = shared(dtensor((4,), over, (placement("Shard", dim=0),), stub((2,)))).info
    is_known = listed == (7, 5)
    assert [rank for _, rank in info.list_parts()] == ([7, 5] if is_known else [-1, -1])
    assert info.rank == (5 if is_known else -1)


def test_partial_sums_are_refused_by_name() -> None:
    value = dtensor((4,), mesh((2,), (0,)), (placement("Partial", reduce_op="sum"),), stub((4,)))
    assert "partial sums (Partial)" in shared(value).info.refusal


def test_a_rank_outside_of_the_mesh_holds_nothing() -> None:
    over = mesh((2,), (0,))
    assert isinstance(over.state, dict)
    over.state["_coordinate_on_dim"] = None
    assert shared(dtensor((4,), over, (placement("Shard", dim=0),), stub((0,)))).local == ()


@pytest.mark.parametrize(
    ("placements", "local", "error"),
    [
        ((placement("Shard", dim=0),), (4, 4), "does not fit its placements"),
        ((placement("Shard", dim=2),), (2, 4), "is not supported"),
        ((placement("_StridedShard", dim=0, split_factor=2),), (2, 4), "matches no mesh split"),
        ((placement("Shard", dim=0), placement("Shard", dim=0)), (2, 4), "one placement for each mesh dimension"),
        ((placement("Shard", dim="x"),), (2, 4), "malformed"),
        ((placement("RaggedShard", dim=0),), (2, 4), "is not supported"),
    ],
)
def test_what_cannot_be_is_refused(placements: Any, local: tuple[int, ...], error: str) -> None:
    with pytest.raises((FormatError, UnsupportedError), match=error):
        shared(dtensor((4, 4), mesh((2,), (0,)), placements, stub(local)))


def test_tensors_of_one_layout_share_it_and_others_do_not() -> None:
    parser, over, other = ShardParser(), mesh((2,), (0,)), mesh((2,), (1,))

    def parse(shape: tuple[int, ...], over: InstanceStub, dim: int) -> ParsedShard:
        local = tuple(n // 2 if at == dim else n for at, n in enumerate(shape))
        return parser.parse(dtensor(shape, over, (placement("Shard", dim=dim),), stub(local)))

    first = parse((4, 4), over, 0)
    assert parse((4, 4), over, 0).info is first.info
    others = [parse((4, 6), over, 0), parse((4, 4), over, 1), parse((4, 4), other, 0)]
    assert [share.local[0][0] for share in others] == [
        Box((0, 0), (2, 6)),
        Box((0, 0), (4, 2)),
        Box((2, 0), (2, 4)),
    ]
    with pytest.raises(FormatError, match="does not fit its placements"):
        parser.parse(dtensor((4, 4), over, (placement("Shard", dim=0),), stub((3, 4))))


# -------------------------------------------------------------------------------------------------- ShardedTensors


def shard_metadata(box: Box, rank: int) -> InstanceStub:
    state = {
        "shard_offsets": list(box.offset),
        "shard_sizes": list(box.size),
        "placement": InstanceStub("_remote_device", (), {"_rank": rank, "_worker_name": None, "_device": "cpu"}),
    }
    return InstanceStub("ShardMetadata", (), (None, state))


def sharded_tensor(shape: tuple[int, ...], boxes: list[Box], rank: int, locals_: list[Any]) -> InstanceStub:
    """Return a ShardedTensor as rank `rank` pickles it: box `i` is rank `i`'s."""
    shards = [
        InstanceStub("Shard", (), (None, {"tensor": local, "metadata": shard_metadata(boxes[rank], rank)}))
        for local in locals_
    ]
    listed = [shard_metadata(box, i) for i, box in enumerate(boxes)]
    metadata = InstanceStub("ShardedTensorMetadata", (), {"shards_metadata": listed, "size": shape})
    group = dict(zip(("local_rank", "global_rank"), (rank, rank), strict=True))
    group |= {"local_world_size": len(boxes), "global_world_size": len(boxes)}
    state = (
        shards,
        metadata,
        InstanceStub("ProcessGroupState", (), group),
        InstanceStub("ChunkShardingSpec", (), {}),
        False,
    )
    return InstanceStub("torch.distributed._shard.sharded_tensor.api.ShardedTensor", (Dtype("float32"),), state)


def test_a_sharded_tensor_lists_who_holds_what() -> None:
    boxes = [Box((0, 0), (2, 3)), Box((2, 0), (1, 3))]
    share = shared(sharded_tensor((3, 3), boxes, 1, [stub((1, 3))]))
    assert [box for box, _ in share.local] == boxes[1:]
    assert list(share.info.list_parts()) == [(boxes[0], 0), (boxes[1], 1)]
    assert (share.info.rank, share.info.world, share.info.place, share.info.parts) == (1, 2, 1, 2)


def test_shards_of_shards_lie_where_both_say() -> None:
    inner = sharded_tensor((2, 4), [Box((0, 0), (2, 2)), Box((0, 2), (2, 2))], 1, [stub((2, 2))])
    outer = sharded_tensor((4, 4), [Box((0, 0), (2, 4)), Box((2, 0), (2, 4))], 1, [inner])
    share = shared(outer)
    assert [box for box, _ in share.local] == [Box((2, 2), (2, 2))]
    assert share.info.sharding is None


@pytest.mark.parametrize(
    ("boxes", "local", "error"),
    [
        ([Box((0,), (2,)), Box((2,), (2,))], (3,), "size differs from its metadata"),
        ([Box((0,), (2,)), Box((2,), (9,))], (9,), "outside its tensor"),
        ([Box((0,), (2,)), Box((2, 0), (2, 1))], (2, 1), "outside its tensor"),
    ],
)
def test_shards_that_cannot_be_are_refused(boxes: list[Box], local: tuple[int, ...], error: str) -> None:
    with pytest.raises(FormatError, match=error):
        shared(sharded_tensor((4,), boxes, 1, [stub(local)]))


# --------------------------------------------------------------------------------------------------------- hostile

HOSTILE: tuple[Any, ...] = (None, -1, 2**62, 2**2000, 1.5, True, "x", (), {}, [[]], (-1,), (2**62,) * 3, (1,) * 5000)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every part of a pickled value."""
    found = [path]
    if isinstance(value, InstanceStub):
        found += places(value.state, (*path, "state")) + places(value.args, (*path, "args"))
    elif isinstance(value, dict | list | tuple):
        for key in value if isinstance(value, dict) else range(len(value)):
            found += places(value[key], (*path, key))
    return found


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    key, rest = path[0], path[1:]
    if isinstance(value, InstanceStub):
        made = InstanceStub(value.name, value.args, value.state)
        setattr(made, key, replaced(getattr(value, key), rest, new))
        return made
    inner = list(value) if isinstance(value, tuple) else copy.copy(value)
    inner[key] = replaced(value[key], rest, new)
    return tuple(inner) if isinstance(value, tuple) else inner


@pytest.mark.parametrize("kind", ["DTensor", "old DTensor", "ShardedTensor"])
def test_hostile_values_are_typed_errors_or_read(kind: str) -> None:
    """Every part of a share is replaced by every hostile value: an error of one line, or boxes inside the array."""
    if kind == "ShardedTensor":
        good = sharded_tensor((3, 3), [Box((0, 0), (2, 3)), Box((2, 0), (1, 3))], 1, [stub((1, 3))])
    else:
        over = old_mesh((2, 2), (1, 0)) if kind.startswith("old") else mesh((2, 2), (1, 0))
        cuts = (placement("_StridedShard", dim=0, split_factor=2), placement("Shard", dim=0))
        good = dtensor((8, 3), over, cuts, stub((2, 3)))
    refused = 0
    for path in places(good)[1:]:
        for bad in HOSTILE:
            try:
                share = shared(replaced(good, path, bad))
            except CheckpointError as error:
                assert "\n" not in str(error), path
                refused += 1
            else:
                assert all(box.within(share.info.shape) for box, _ in share.local)
    assert refused > 50


def test_a_grid_says_how_it_cuts() -> None:
    assert str(Grid((4, 6), (2, 3), ((1, 0), ()))) == "(4, 6) over 2x3 ranks, dim 0 by 3x2"
