"""A coordinator over a link: messages of a round are not taken for those of another, and arrive in few packets."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardckpt
from shardckpt.checkpoint.coordinator import Coordinator
from shardckpt.checkpoint.rank_link import BoundedStore, RankLink, TorchLink, Transfer, link_ranks, make_group, meet
from shardckpt.errors import RankError
from shardckpt.storage.linux_syscalls import LOW_PRIORITY
from shardckpt.storage.local import LocalStore
from shardckpt.torch_features import get_group_store
from tests.kit.ranks.harness import run


class QueueLink(RankLink):
    """The link of rank 0 of 2, with messages that a test puts there."""

    def __init__(self, *messages: bytes) -> None:
        super().__init__(0, 2, timedelta(seconds=1))
        self.arrived, self.sent, self.notes = deque(messages), [], {}

    def send_message(self, data: bytes, dst: int) -> None:
        self.sent.append(data)

    def recv_message(self, src: int, deadline: float) -> bytes:
        if not self.arrived:
            raise RuntimeError("timed out")
        return self.arrived.popleft()

    def start_send(self, tensor: torch.Tensor, dst: int) -> Transfer:
        raise NotImplementedError

    def start_recv(self, tensor: torch.Tensor, src: int) -> Transfer:
        raise NotImplementedError

    def leave_note(self, key: str, text: str) -> None:
        self.notes[key] = text

    def find_note(self, key: str, *, wait_s: float = 0.0) -> str:
        return self.notes.get(key, "")

    def renew(self) -> RankLink:
        raise NotImplementedError


def message(number: int, text: bytes) -> bytes:
    return number.to_bytes(8, "little") + b"\0" + text


def test_a_message_that_comes_twice_counts_once() -> None:
    coordinator = Coordinator(QueueLink(message(1, b"one"), message(1, b"one"), message(2, b"two")))
    for expected in (b"one", b"two"):
        got: list[bytes] = []
        coordinator.coordinate("step", b"", lambda messages, got=got: got.extend(messages) or messages)
        assert got == [b"", expected]


def test_a_rank_that_is_ahead_counts_as_lost() -> None:
    coordinator = Coordinator(QueueLink(message(2, b"two")))
    with pytest.raises(RankError, match="rank 1 sent a message for round 2, expected 1"):
        coordinator.coordinate("step", b"", lambda messages: messages)
    assert coordinator.has_lost_rank


class LoggingLink(QueueLink):
    """The link of rank 0 of 3, which logs what is expected and received."""

    def __init__(self, *messages: bytes) -> None:
        super().__init__(*messages)
        self.size, self.log = 3, []

    def expect_message(self, src: int) -> None:
        self.log.append(f"expect {src}")

    def recv_message(self, src: int, deadline: float) -> bytes:
        self.log.append(f"receive {src}")
        return super().recv_message(src, deadline)


def test_rank_0_expects_the_messages_of_all_ranks_before_it_waits_for_one() -> None:
    link = LoggingLink(message(1, b""), message(1, b""))
    Coordinator(link).coordinate("step", b"", lambda messages: messages)
    assert link.log == ["expect 1", "expect 2", "receive 1", "receive 2"]


def test_nothing_is_expected_of_a_lost_rank() -> None:
    link = LoggingLink()
    coordinator = Coordinator(link)
    coordinator.leave()
    coordinator.expect_messages()
    assert link.log == []


def test_no_rank_waits_until_another_has_time_for_a_message_that_it_expects() -> None:
    def body(rank: int, world: int) -> None:
        link, store = link_ranks(None), get_group_store(dist.group.WORLD)
        other = 1 - rank
        for _ in range(2):
            link.expect_message(other)  # the second time changes nothing
        link.send_message(b"early", other)
        store.set(f"sent by {rank}", "1")
        store.wait([f"sent by {other}"], timedelta(seconds=20))
        assert link.recv_message(other, time.monotonic() + 10) == b"early"

    run(2, body)


def test_a_load_expects_messages_before_it_plans_and_before_it_reads(tmp_path, monkeypatch) -> None:
    def body(rank: int, world: int) -> list[str]:
        state = {"t": torch.ones(2)}
        shardckpt.save(state, tmp_path / "step")
        log: list[str] = []
        for cls, name in ((TorchLink, "expect_message"), (TorchLink, "recv_message"), (LocalStore, "read")):
            monkeypatch.setattr(cls, name, _logged(getattr(cls, name), name, log))
        shardckpt.load(state, tmp_path / "step")
        return [name for name, _ in groupby(log)]

    work = ["expect_message", "read", "expect_message", "recv_message"]
    assert run(2, body) == [[*work, *work]] * 2


def _logged(function: Callable[..., Any], name: str, log: list[str]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        log.append(name)
        return function(*args, **options)

    return call


def test_messages_of_any_size_arrive_and_short_ones_are_one_packet() -> None:
    sizes = (0, 1, 1016, 1017, 5000)

    def body(rank: int, world: int) -> list[int]:
        link, packets, isend = link_ranks(None), [], dist.isend
        dist.isend = lambda *args, **options: packets.append(args) or isend(*args, **options)
        lengths = []
        for size in sizes:
            if rank:
                link.send_message(bytes(range(251)) * (size // 251) + b"\1" * (size % 251), 0)
                lengths.append(len(packets))
                packets.clear()
            else:
                got = link.recv_message(1, time.monotonic() + 10)
                assert got == bytes(range(251)) * (size // 251) + b"\1" * (size % 251)
                lengths.append(len(got))
        return lengths

    assert run(2, body) == [list(sizes), [1, 1, 1, 2, 2]]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a priority belongs to the process")
def test_only_a_link_for_the_background_has_threads_of_low_priority() -> None:
    def body(rank: int, world: int) -> list[set[int]]:
        own, found = os.getpriority(os.PRIO_PROCESS, 0), []
        for has_low_priority in (True, False):
            before = {*os.listdir("/proc/self/task")}
            link = link_ranks(None, has_low_priority=has_low_priority)
            new = {*os.listdir("/proc/self/task")} - before
            found.append({os.getpriority(os.PRIO_PROCESS, int(thread)) - own for thread in new})
            del link
        assert os.getpriority(os.PRIO_PROCESS, 0) == own
        return [min(LOW_PRIORITY, 19 - own), *found]

    for low, background, other in run(2, body):
        assert (background, other) == ({low}, {0})


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
    store.leave("key", "text")
    assert store.find("key", wait_s=0.1) == ""
    assert time.monotonic() - began < 2 * 2.0 + 2.0


def test_words_for_the_others_are_found() -> None:
    store = BoundedStore(dist.HashStore())
    assert store.find("key") == ""
    threading.Timer(0.1, store.leave, ("key", "rank 1 is gone")).start()
    assert store.find("key", wait_s=20.0) == "rank 1 is gone"


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
