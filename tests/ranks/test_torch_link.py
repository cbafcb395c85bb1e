"""Ranks meet, or are told who is missing; a store that answers nobody keeps no rank for longer than its time-out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from shardckpt.errors import RankError
from shardckpt.ranks.bounded_store import BoundedStore
from shardckpt.ranks.torch_link import make_group, meet

SHORT = timedelta(seconds=0.3)


class Ranks:
    """As much of a process group as it takes to meet."""

    def __init__(self, store, rank: int, size: int = 2) -> None:
        self._store, self._rank, self._size = store, rank, size

    def get_group_store(self):
        return self._store

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


class Stopped:
    """A store whose host is stopped: no call of it ends."""

    def __init__(self, *, answers: tuple[str, ...] = ()) -> None:
        self._inner, self._answers, self.goes_on = dist.HashStore(), answers, threading.Event()

    def __getattr__(self, name: str) -> Callable[..., object]:
        def ask(*args: object) -> object:
            if name not in self._answers:
                self.goes_on.wait(30)
            return getattr(self._inner, name)(*args)

        return ask


@pytest.fixture(params=[(), ("set",), ("set", "check")], ids=["nothing", "set", "set and check"])
def stopped(request) -> Iterator[Stopped]:
    store = Stopped(answers=request.param)
    yield store
    store.goes_on.set()


def test_ranks_meet_as_often_as_they_like() -> None:
    store = dist.HashStore()
    ranks = [Ranks(store, rank, 3) for rank in range(3)]
    for _ in range(2):
        threads = [threading.Thread(target=meet, args=(each, timedelta(seconds=20))) for each in ranks[1:]]
        for thread in threads:
            thread.start()
        meet(ranks[0], timedelta(seconds=20))
        for thread in threads:
            thread.join()


def test_a_rank_that_comes_last_asks_for_all_others_in_one_request() -> None:
    store, size = dist.HashStore(), 1000
    for rank in range(1, size):
        store.set(f"shardckpt/here/1/{rank}", "1")
    asked: list[int] = []
    counting = SimpleNamespace(set=store.set, check=lambda keys: asked.append(len(keys)) or store.check(keys))
    meet(Ranks(counting, 0, size), timedelta(seconds=20))
    assert asked == [size]


def test_ranks_that_do_not_come_are_named() -> None:
    with pytest.raises(RankError, match=r"rank 0, rank 2 of 3 did not come .* in time") as caught:
        meet(Ranks(dist.HashStore(), 1, 3), SHORT)
    assert caught.value.rank == 0


def test_a_rank_that_waited_in_vain_is_waited_for_by_those_that_come_later() -> None:
    store = dist.HashStore()
    early, late = Ranks(store, 0), Ranks(store, 1)
    with pytest.raises(RankError, match="rank 1"):
        meet(early, SHORT)
    with pytest.raises(RankError, match="rank 0"):
        meet(late, SHORT)
    thread = threading.Thread(target=meet, args=(early, timedelta(seconds=20)))
    thread.start()
    meet(late, timedelta(seconds=20))
    thread.join()


def test_a_store_that_answers_nothing_keeps_no_rank_for_longer_than_the_time_out(stopped: Stopped) -> None:
    began = time.monotonic()
    with pytest.raises(RankError, match="rank 0"):
        meet(Ranks(stopped, 1), SHORT)
    assert time.monotonic() - began < 0.3 + 2.0 + 2.0


def test_words_for_the_others_are_dropped_where_the_store_does_not_answer(stopped: Stopped) -> None:
    store, began = BoundedStore(stopped), time.monotonic()
    store.leave_note("key", "text")
    assert store.find_note("key", wait_s=0.1) == ""
    assert time.monotonic() - began < 2 * 2.0 + 2.0


def test_words_for_the_others_are_found() -> None:
    store = BoundedStore(dist.HashStore())
    assert store.find_note("key") == ""
    threading.Timer(0.1, store.leave_note, ("key", "rank 1 is gone")).start()
    assert store.find_note("key", wait_s=20.0) == "rank 1 is gone"


def failing() -> None:
    raise RuntimeError("connectFullMesh failed with no error")


def test_a_rank_that_left_before_all_were_connected_is_named() -> None:
    store = dist.HashStore()
    group = Ranks(store, 1, 3)
    store.set("shardckpt/here/1/0", "1")
    store.set("shardckpt/here/1/2", "1")
    meet(group, SHORT)
    store.set("shardckpt/unconnected/1/2", "1")
    with pytest.raises(RankError, match=r"could not connect .*no word from rank 0: connectFullMesh failed") as caught:
        make_group(group, failing, SHORT)
    assert caught.value.rank == 0


def test_a_group_that_is_never_made_is_given_up() -> None:
    store, go = dist.HashStore(), threading.Event()
    group = Ranks(store, 0)
    store.set("shardckpt/here/1/1", "1")
    meet(group, SHORT)
    began = time.monotonic()
    with pytest.raises(RankError, match="no word from rank 1: no answer after"):
        make_group(group, lambda: go.wait(30), SHORT)
    assert time.monotonic() - began < 0.8 + 4.0 + 2.0
    go.set()
