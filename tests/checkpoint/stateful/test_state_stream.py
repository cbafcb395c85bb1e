"""Streams of states: every state comes back, every damaged or hostile stream is a typed error, and costs no memory."""

from __future__ import annotations

import json
import tracemalloc
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import shardckpt
from shardckpt.checkpoint.stateful import state_stream
from shardckpt.checkpoint.stateful.state_stream import BLOCK_BYTES, MAGIC, build_stream, read_stream
from tests.kit.ranks.harness import run


def sent(state: Any) -> bytes:
    return b"".join(bytes(part) for part in build_stream(state))


class Source:
    """Reads from bytes; at their end it raises what a lost connection does."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def __call__(self, buffer: memoryview) -> None:
        part = self.data[self.at : self.at + len(buffer)]
        self.at += len(part)
        buffer[: len(part)] = part
        if len(part) < len(buffer):
            raise ConnectionError("it ended")


def received(data: bytes, target: Any = None) -> Any:
    return read_stream(Source(data), target, "rank 1")


def some_state() -> dict[str, Any]:
    return {
        "model": OrderedDict(weight=torch.arange(12.0).reshape(3, 4), bias=torch.ones(3, dtype=torch.bfloat16)),
        "optim": {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(4)[::2]}}, "lr": (0.1, [1, None])},
        "random": np.arange(5, dtype=np.uint32),
        "empty": torch.empty(0, 3),
        "kind": torch.bfloat16,
    }


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return type(one) is type(other) and list(one) == list(other) and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    return one == other


def test_a_state_comes_back_with_its_types() -> None:
    assert equal(received(sent(some_state())), some_state())


def test_tensors_larger_than_a_block_come_back() -> None:
    state = {"a": torch.arange(BLOCK_BYTES // 2), "b": torch.arange(BLOCK_BYTES // 8 + 3).t(), "c": torch.ones(1)}
    assert equal(received(sent(state)), state)


def test_tensors_of_a_target_are_filled_in_place() -> None:
    target = some_state()
    weight, average = target["model"]["weight"].zero_(), target["optim"]["state"][0]["exp_avg"].zero_()
    state = received(sent(some_state()), target)
    assert state["model"]["weight"].data_ptr() == weight.data_ptr()
    assert equal(weight, some_state()["model"]["weight"])
    assert average.tolist() == [1, 1], "with strides too"
    with pytest.raises(shardckpt.errors.UsageError, match=r"model\.weight"):
        received(sent(some_state()), {"model": {"weight": torch.zeros(4, 3)}})


@pytest.mark.parametrize("value", [print, torch.nn.Linear(1, 1), torch.eye(2).to_sparse(), {1, (print,)}], ids=type)
def test_a_value_that_cannot_be_sent_is_refused_by_name(value: Any) -> None:
    with pytest.raises(shardckpt.errors.UnsupportedError, match=r"user\.odd"):
        build_stream({"user": {"odd": value}})


def test_a_state_that_no_peer_can_read_is_refused_at_the_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    endless: list[Any] = []
    endless.append((endless,))
    with pytest.raises(shardckpt.errors.UnsupportedError, match="nested too deep"):
        build_stream({"user": endless})
    monkeypatch.setattr(state_stream, "MAX_HEADER_BYTES", 1000)
    with pytest.raises(shardckpt.errors.UnsupportedError, match="at most 1000"):
        build_stream({"user": list(range(1000))})


def test_a_target_that_cannot_be_filled_is_refused_before_anything_is_filled() -> None:
    freed = torch.zeros(3)
    freed.untyped_storage().resize_(0)
    for odd in (torch.zeros(1).expand(3), freed):
        target = {"first": torch.zeros(3), "odd": odd}
        with pytest.raises(shardckpt.ShardckptError, match="odd"):
            received(sent({"first": torch.ones(3), "odd": torch.ones(3)}), target)
        assert target["first"].sum() == 0


@settings(max_examples=300)
@given(st.data())
def test_a_flipped_bit_or_a_lost_end_is_a_typed_error(data: st.DataObject) -> None:
    good = sent(some_state())
    at = data.draw(st.integers(0, len(good) - 1))
    bad = bytearray(good)
    bad[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises((shardckpt.errors.CheckpointError, ConnectionError)):
        received(bytes(bad))
    with pytest.raises(ConnectionError):
        received(good[:at])


def hostile(header: Any, rest: bytes = b"") -> bytes:
    body = header if isinstance(header, bytes) else json.dumps(header).encode()
    head = MAGIC + len(body).to_bytes(8, "little") + body
    return head + xxhash.xxh3_64(head).digest() + rest


HUGE = [["a"], "float32", [1 << 40], ""]
HOSTILE = {
    "no json": b"{",
    "no dict": [],
    "no state": {"tensors": []},
    "no row": {"tensors": [1], "state": None},
    "negative": {"tensors": [[["a"], "float32", [-1], ""]], "state": None},
    "overflow": {"tensors": [[["a"], "float32", [1 << 40] * 3, ""]], "state": None},
    "many dims": {"tensors": [[["a"], "float32", [1] * 65, ""]], "state": None},
    "a module": {"tensors": [[["a"], "nn", [1], ""]], "state": None},
    "quantized": {"tensors": [[["a"], "qint8", [1], ""]], "state": None},
    "a DTensor": {"tensors": [[["a"], "float32", [0], "(1,) on (1,)"]], "state": None},
    "no such tensor": {"tensors": [], "state": {"$array": 0}},
    "no such numpy": {"tensors": [[["a"], "bfloat16", [0], ""]], "state": {"$array": [0, "numpy"]}},
    "no such device": {"tensors": [], "state": {"$device": "nowhere:7"}},
    "a negative device": {"tensors": [], "state": {"$device": "cuda:-99999999999999999999"}},
    "no such dtype": {"tensors": [], "state": {"$dtype": "nn"}},
    "unknown tag": {"tensors": [], "state": {"$code": "print"}},
    "deep": b'{"tensors":[],"state":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "huge": {"tensors": [HUGE, HUGE], "state": None},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_a_typed_error_that_costs_no_memory(name: str) -> None:
    data = hostile(HOSTILE[name])
    tracemalloc.start()
    try:
        with pytest.raises((shardckpt.ShardckptError, ConnectionError)):
            received(data)
        assert tracemalloc.get_traced_memory()[1] < BLOCK_BYTES + 40 * len(data) + 100_000
    finally:
        tracemalloc.stop()


def test_a_header_of_many_bytes_is_refused_before_it_is_read() -> None:
    with pytest.raises(shardckpt.errors.UnsafeError):
        received(MAGIC + (state_stream.MAX_HEADER_BYTES + 1).to_bytes(8, "little"))


def send_shards(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    full = torch.arange(10.0).reshape(5, 2)
    data = sent({"weight": distribute_tensor(full, mesh, [Shard(0)])})
    target = {"weight": distribute_tensor(torch.zeros(5, 2), mesh, [Shard(0)])}
    weight = received(data, target)["weight"]
    assert isinstance(weight, DTensor)
    assert torch.equal(weight.full_tensor(), full)
    assert torch.equal(target["weight"].full_tensor(), full)
    for other in (None, {"weight": distribute_tensor(torch.zeros(5, 2), mesh, [Shard(1)])}):
        with pytest.raises(shardckpt.errors.UsageError):
            received(data, other)


def test_a_rank_sends_its_shard_of_a_dtensor_into_one_of_the_same_sharding() -> None:
    run(2, send_shards)
