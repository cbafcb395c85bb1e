"""Shards of flat parameters are recognized by their storages."""

from __future__ import annotations

import pytest
import torch

from shardckpt.state.adapters import flat_shard_check
from shardckpt.state.adapters.flat_shard_check import FlatShards


def search(*shards: torch.Tensor) -> FlatShards:
    """Return a search that finds these shards and no others."""
    found = FlatShards()
    found.__dict__["_storages"] = frozenset(shard.untyped_storage().data_ptr() for shard in shards)
    return found


@pytest.fixture(autouse=True)
def _in_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat_shard_check, "has_group", lambda: True)


def test_a_shard_with_the_address_of_a_freed_full_tensor_is_recognized() -> None:
    memory = bytearray(64)
    full = torch.frombuffer(memory, dtype=torch.float32)
    assert not search().has_tensor(full)
    address = full.data_ptr()
    del full
    shard = torch.frombuffer(memory, dtype=torch.float32)
    assert shard.data_ptr() == address
    assert search(shard).has_tensor(shard)


def test_a_full_tensor_is_searched_for_once_while_it_lives() -> None:
    full = torch.ones(16)
    assert not search().has_tensor(full)
    assert not search(full).has_tensor(full.detach()), "the second search is not begun"
