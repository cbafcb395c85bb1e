"""Whatever is read in whatever order: right bytes, none fetched twice, no request too long."""

import os
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardckpt.storage import fsspec_store, range_cache
from shardckpt.storage.fsspec_store import FsspecStore
from shardckpt.storage.range_cache import BlockCache
from shardckpt.storage.store import Read
from tests.kit.stores.bucket import Bucket

SIZE = 300
DATA = os.urandom(SIZE)

ranges = st.tuples(st.integers(0, SIZE), st.integers(0, 80)).map(lambda r: (r[0], min(r[1], SIZE - r[0])))
calls = st.lists(st.lists(ranges, min_size=1, max_size=4), min_size=1, max_size=12)


@pytest.fixture(scope="module", autouse=True)
def tiny():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"BLOCK": 8, "GAP": 8, "FULL_FILE": 20}.items():
            patch.setattr(range_cache, name, value)
        for module in (range_cache, fsspec_store):
            patch.setattr(module, "MAX_REQUEST", 32)
        yield


def fetched(size: int, made: list[list[tuple[int, int]]], cache_bytes: int) -> list[tuple[int, int]]:
    Bucket.reset()
    Bucket.objects["b/f"] = DATA[:size]
    store = FsspecStore("bucket://b", cache_bytes=cache_bytes)
    for call in made:
        buffers = [bytearray(max(min(nbytes, size - start), 0)) for start, nbytes in call]
        store.read([Read("f", min(start, size), memoryview(b)) for (start, _), b in zip(call, buffers, strict=True)])
        for (start, _), buffer in zip(call, buffers, strict=True):
            assert buffer == DATA[:size][start : start + len(buffer)]
    return sorted(tuple(map(int, what.split()[1].split("-"))) for verb, what in Bucket.requests if verb == "get")


@settings(max_examples=300, deadline=None)
@given(st.integers(0, SIZE), calls)
def test_with_room_for_all_no_byte_is_fetched_twice(size, made):
    spans = fetched(size, made, cache_bytes=SIZE)
    assert all(one[1] <= other[0] for one, other in pairwise(spans))
    assert all(0 < stop - start <= 32 and stop <= size for start, stop in spans)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, SIZE), calls, st.integers(0, 100))
def test_with_little_room_the_bytes_are_still_right(size, made, cache_bytes):
    spans = fetched(size, made, cache_bytes)
    assert all(0 < stop - start <= 32 and stop <= size for start, stop in spans)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 40), st.integers(1, 20)), max_size=30))
def test_a_cache_never_exceeds_its_budget_nor_loses_count(added):
    cache = BlockCache(64)
    for name, start, nbytes in added:
        cache.add(name, start, bytes(nbytes))
        held = [(name, start, len(data)) for name in "ab" for start, data in cache.overlapping(name, 0, 1000)]
        assert sum(nbytes for *_, nbytes in held) == cache._held <= 64
        for one, other in pairwise(held):
            assert one[0] != other[0] or one[1] + one[2] <= other[1]
    cache.forget("a")
    cache.forget("b")
    assert cache._held == 0
