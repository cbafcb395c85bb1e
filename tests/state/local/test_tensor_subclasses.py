"""Inner tensors follow the boxes of the full tensor, block by block."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchao.optim.subclass_8bit import OptimState8bit
from torchao.quantization import Int8Tensor

from shardckpt.boxes import Box, full_box
from shardckpt.errors import UnsupportedError
from shardckpt.plan.subclass_record import SUBCLASS, find_record
from shardckpt.state.local.tensor_shards import LocalShard, TensorShards
from shardckpt.state.local.tensor_subclasses import build, build_empty, take_apart


def int8(rows: int, columns: int, block: tuple[int, int]) -> Any:
    scales = (-(-rows // block[0]), -(-columns // block[1]))
    qdata = torch.zeros(rows, columns, dtype=torch.int8)
    return Int8Tensor(qdata, torch.rand(scales), list(block), torch.float32)


def shard(tensor: torch.Tensor, shape: tuple[int, ...], offset: tuple[int, ...]) -> TensorShards:
    box = Box(offset, tuple(tensor.shape))
    return TensorShards(shape, tensor.dtype, (LocalShard(box, tensor),))


@given(
    block=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    columns=st.integers(1, 12),
    spare=st.integers(0, 4),
)
def test_shards_cut_at_blocks_cover_each_inner_tensor_once(
    block: tuple[int, int], counts: list[int], columns: int, spare: int
) -> None:
    rows = [count * block[0] for count in counts]
    rows[-1] -= min(spare, block[0] - 1)  # the last block may be smaller
    shape = (sum(rows), columns)
    start, seen = 0, {"qdata": 0, "scale": 0}
    for each in rows:
        parts = take_apart(shard(int8(each, columns, block), shape, (start, 0)), "w").arrays
        assert parts["qdata"].shape == shape
        assert parts["scale"].shape == (-(-shape[0] // block[0]), -(-columns // block[1]))
        for name, done in seen.items():
            (found,) = parts[name].shards
            assert found.box.offset == (done, 0)
            assert found.box.size == tuple(found.tensor.shape)
            seen[name] = done + found.box.size[0]
        start += each
    assert seen == {"qdata": shape[0], "scale": -(-shape[0] // block[0])}


@pytest.mark.parametrize(("start", "rows"), [(0, 6), (2, 4), (4, 3)])
def test_a_shard_that_divides_a_block_is_refused(start: int, rows: int) -> None:
    with pytest.raises(UnsupportedError, match=r"w\.scale.*must not divide a block.*multiples of 4"):
        take_apart(shard(int8(rows, 8, (4, 8)), (20, 8), (start, 0)), "w")


def test_a_flattened_block_may_end_with_the_tensor_only() -> None:
    state = OptimState8bit.zeros((3, 512), block_size=256)
    parts = take_apart(shard(state, (5, 512), (2, 0)), "s").arrays
    assert parts["scale"].shape == (10,)
    assert parts["scale"].shards[0].box == Box((4,), (6,))
    assert parts["qmap"].shards[0].box == full_box((256,))
    with pytest.raises(UnsupportedError, match=r"s\.scale.*elements 100 to 868 of 1000"):
        take_apart(shard(OptimState8bit.zeros((768,), block_size=256), (1000,), (100,)), "s")


def test_a_flattened_block_cannot_be_sharded_by_columns() -> None:
    state = OptimState8bit.zeros((4, 256), block_size=256)
    with pytest.raises(UnsupportedError, match=r"s\.scale.*first dimension only"):
        take_apart(shard(state, (4, 512), (0, 0)), "s")


def test_a_shard_of_an_unknown_class_is_refused_by_name() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    tensor = TwoTensor(torch.zeros(2, 3), torch.ones(2, 3))
    whole = take_apart(shard(tensor, (2, 3), (0, 0)), "t")
    assert [part.shape for part in whole.arrays.values()] == [(2, 3), (2, 3)]
    with pytest.raises(UnsupportedError, match=r"t.*TwoTensor\.a"):
        take_apart(shard(tensor, (4, 3), (0, 0)), "t")


@given(st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_an_empty_target_has_the_inner_shapes_of_its_shard(counts: list[int]) -> None:
    whole = OptimState8bit.zeros((sum(counts), 512), block_size=256)
    taken = take_apart(shard(whole, tuple(whole.shape), (0, 0)), "s")
    inner = {name: (part.shape, part.dtype) for name, part in taken.arrays.items()}
    start = 0
    for count in counts:
        box = Box((start, 0), (count, 512))
        made: Any = build_empty(taken.record, inner, box, torch.device("cpu"), "s")
        assert (type(made), tuple(made.shape), made.block_size) == (OptimState8bit, (count, 512), 256)
        start += count


def test_a_record_is_read_back_and_builds_the_tensor() -> None:
    tensor = int8(4, 8, (1, 8))
    taken = take_apart(shard(tensor, (4, 8), (0, 0)), "w")
    record = find_record({SUBCLASS: taken.record.encode()})
    assert record == taken.record
    built: Any = build(record, {name: part.shards[0].tensor for name, part in taken.arrays.items()}, "w")
    assert torch.equal(built.scale, tensor.scale)
    assert built.block_size == tensor.block_size
    assert prod(built.shape) == 32


HOSTILE = [
    "",
    "{",
    "[]",
    '{"name":"torchao.Int8Tensor"}',
    '{"name":1,"package":"","dtype":"float32","shape":[2],"context":null}',
    '{"name":"os.system","package":"","dtype":"float32","shape":["x"],"context":null}',
]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_text_that_is_no_record_is_a_value_as_any_other(text: str) -> None:
    assert find_record({SUBCLASS: text}) is None


CONTEXTS = [
    {},
    {"block_size": "x"},
    {"block_size": {"$enum": ["system", "os"]}},
    {"block_size": [1, 8], "dtype": {"$dtype": "nothing"}},
    {"block_size": [1, 8], "dtype": {"$dtype": "float32"}, "act_quant_kwargs": {"$type": ["Popen", {"args": "ls"}]}},
    {"$type": ["PerRow", {"no": 1}]},
    None,
]


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_context_that_does_not_fit_is_refused_with_a_typed_error(context: object) -> None:
    from dataclasses import replace

    taken = take_apart(shard(int8(4, 8, (1, 8)), (4, 8), (0, 0)), "w")
    inner = {name: part.shards[0].tensor for name, part in taken.arrays.items()}
    with pytest.raises(UnsupportedError, match=r"w: .*Int8Tensor"):
        build(replace(taken.record, context=context), inner, "w")
    assert build(replace(taken.record, name="os.system", context=context), inner, "w") is None
    record = replace(taken.record, context=context, name="torchao.NF4Tensor", shape=(8, 8))
    sizes = {name: (tuple(value.shape), value.dtype) for name, value in inner.items()}
    with pytest.raises(UnsupportedError):
        build_empty(record, sizes, Box((0, 0), (4, 8)), torch.device("cpu"), "w")
