"""Shards of flat parameters are recognized by their storages."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from shardckpt.core.params import param_bucket
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


def test_a_search_through_all_objects_disturbs_no_tuple_that_another_thread_builds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such a tuple may not be referred to, also not by a list of all objects, when it grows."""

    class Wrapper:
        pass

    wrapper, begun, searched = Wrapper(), threading.Event(), threading.Event()
    built: list[tuple[int, ...]] = []

    def generate() -> Iterator[int]:
        yield 0
        begun.set()
        assert searched.wait(30.0)
        yield from range(1, 100)

    thread = threading.Thread(target=lambda: built.append(tuple(generate())), daemon=True)

    def finish_tuple(found: object) -> set[int]:
        assert found is wrapper
        searched.set()
        thread.join(30.0)
        return {7}

    monkeypatch.setattr(param_bucket, "Bucket", Wrapper)
    monkeypatch.setattr(flat_shard_check, "_shard_of_bucket", finish_tuple)
    thread.start()
    assert begun.wait(30.0)
    assert FlatShards()._storages == {7}
    assert built == [tuple(range(100))]
