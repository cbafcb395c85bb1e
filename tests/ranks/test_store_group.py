"""Ranks talk through a store: bytes of any length, in rank order, and no wait for one that is gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch.distributed as dist

from shardckpt.errors import RankError
from shardckpt.ranks import store_group
from shardckpt.ranks.bounded_store import BoundedStore
from shardckpt.ranks.store_group import StoreGroup
from tests.kit.ranks.transports import on_store_ranks


def test_bytes_of_different_lengths_are_gathered_in_rank_order_again_and_again() -> None:
    def work(group: StoreGroup) -> list[list[bytes]]:
        return [group.all_gather(b"ab" * group.rank * number) for number in range(3)]

    assert on_store_ranks(3, work) == [[[b"ab" * rank * number for rank in range(3)] for number in range(3)]] * 3


def test_messages_may_be_larger_than_the_values_of_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_group, "_PART_BYTES", 10)
    assert on_store_ranks(2, lambda g: g.all_gather(bytes(range(100)) * g.rank)) == [[b"", bytes(range(100))]] * 2


def test_nothing_stays_in_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_group, "_PART_BYTES", 10)
    store = dist.HashStore()
    on_store_ranks(3, lambda g: [g.all_gather(b"x" * 25) for _ in range(3)], store)
    assert store.num_keys() == 0


def test_a_message_that_a_rank_sent_before_it_left_is_received() -> None:
    class Late(BoundedStore):
        """Answers the first look for the message only when a rank has left, as if it had looked long before."""

        has_looked = False

        def has(self, keys: Sequence[str]) -> bool:
            if self.has_looked or list(keys) != ["1/0"]:
                return super().has(keys)
            self.has_looked = True
            while not super().has(["left"]):
                time.sleep(0.001)
            return False

    def work(group: StoreGroup) -> None:
        if group.rank == 1:
            group._store = Late(store, 20.0)
        with group.collective("writing"):
            if group.rank == 1:
                raise OSError("no space left")

    store = dist.HashStore()
    assert [type(each) for each in on_store_ranks(3, work, store)] == [RankError, OSError, RankError]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("gone")], ids=["interrupt", "error"])
@pytest.mark.parametrize("gone", [0, 1])
def test_a_rank_that_leaves_is_named_to_those_that_wait_for_it(gone: int, error: BaseException) -> None:
    def work(group: StoreGroup) -> None:
        if group.rank == gone:
            raise error
        group.all_gather(b"")

    outcomes = on_store_ranks(3, work)
    assert outcomes.pop(gone) is error
    for each in outcomes:
        assert isinstance(each, RankError)
        assert each.rank == gone
        assert f"rank {gone} left: {type(error).__name__}" in str(each)


def _leave_silently(group: StoreGroup) -> None:
    group._is_over.set()  # no more heartbeats, as of a process that was killed


@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_without_a_heartbeat_is_named_instead_of_waited_for(dead: int) -> None:
    def work(group: StoreGroup) -> None:
        if group.rank == dead:
            _leave_silently(group)
        else:
            group.all_gather(b"")

    outcomes = on_store_ranks(2, work, silence_s=0.5)
    told = outcomes[1 - dead]
    assert isinstance(told, RankError)
    assert told.rank == dead
    assert f"rank {dead} of 2 sent no heartbeat for 0.5 s" in str(told)


def test_a_rank_that_works_longer_than_the_limit_of_silence_is_waited_for() -> None:
    signs: list[int] = []

    go = threading.Event()
    store = dist.HashStore()

    class Watched(BoundedStore):
        """Lets the slow rank go on once it has sent more heartbeats than fit into the limit."""

        def set(self, key: str, value: bytes | str) -> None:
            super().set(key, value)
            if key == "heartbeat/1":
                signs.append(1)
                if len(signs) > 8:
                    go.set()

    found: dict[int, Any] = {}

    def run(rank: int) -> None:
        group = StoreGroup(Watched(store, 20.0), rank, 2, 0.4)
        with group.live():
            if rank == 1:
                assert go.wait(30)
            found[rank] = group.all_gather(b"%d" % rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert found == {0: [b"0", b"1"], 1: [b"0", b"1"]}


class Lost:
    """A store whose host has ended."""

    def __getattr__(self, name: str) -> Callable[..., object]:
        def ask(*_: object) -> object:
            raise RuntimeError("Connection reset by peer\nframe #0")

        return ask


class Stopped:
    """A store whose host does not answer."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def __getattr__(self, name: str) -> Callable[..., object]:
        return lambda *_: self.goes_on.wait(30)


def test_a_store_that_is_lost_is_an_error_of_one_line() -> None:
    group = StoreGroup(BoundedStore(Lost(), 20.0), 1, 2)
    with pytest.raises(
        RankError, match="the store that the 2 ranks send messages through is lost: Connection reset"
    ) as error:
        group.all_gather(b"")
    assert "frame" not in str(error.value)


def test_a_store_that_does_not_answer_counts_as_lost_after_its_limit() -> None:
    stopped = Stopped()
    with pytest.raises(RankError, match=r"is lost: no answer after 0\.1 s"):
        StoreGroup(BoundedStore(stopped, 0.1), 1, 2).all_gather(b"")
    stopped.goes_on.set()
