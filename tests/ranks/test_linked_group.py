"""Ranks with a link: messages of a round are not taken for those of another, and arrive in few packets."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from itertools import groupby
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardckpt
from shardckpt.errors import RankError
from shardckpt.ranks import linked_group
from shardckpt.ranks.linked_group import LinkedGroup, RankLink, Transfer
from shardckpt.ranks.torch_link import TorchLink, link_ranks
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

    def renew(self, *, has_low_priority: bool = False) -> RankLink:
        return QueueLink()


def message(number: int, text: bytes) -> bytes:
    return number.to_bytes(8, "little") + b"\0\0" + b"\0" + text  # outside of a named call, without an error


def test_a_message_that_comes_twice_counts_once() -> None:
    group = LinkedGroup(QueueLink(message(1, b"one"), message(1, b"one"), message(2, b"two")))
    for expected in (b"one", b"two"):
        got: list[bytes] = []
        group.ask_rank0("step", b"", lambda messages, got=got: got.extend(messages) or messages)
        assert got == [b"", expected]


def test_a_rank_that_is_ahead_counts_as_lost() -> None:
    group = LinkedGroup(QueueLink(message(2, b"two")))
    with pytest.raises(RankError, match="rank 1 sent a message for round 2, expected 1"):
        group.ask_rank0("step", b"", lambda messages: messages)
    assert group.has_lost_rank


def test_a_background_has_its_own_link_and_breaks_the_group_when_it_loses_a_rank() -> None:
    group = LinkedGroup(QueueLink())
    background = group.background("peers")
    assert background is group.background("peers") is not group.background("others")
    with pytest.raises(RankError, match="rank 1 of 2 is gone"):
        background.ask_rank0("step", b"", lambda messages: messages)
    assert (background.is_broken, group.has_lost_rank, group.is_broken) == (True, False, True)


def test_a_single_rank_is_its_own_background_and_is_never_broken() -> None:
    group = LinkedGroup()
    group.leave()
    assert group.background("peers") is group
    assert not group.is_broken


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
    LinkedGroup(link).ask_rank0("step", b"", lambda messages: messages)
    assert link.log == ["expect 1", "expect 2", "receive 1", "receive 2"]


def test_nothing_is_expected_of_a_lost_rank() -> None:
    link = LoggingLink()
    group = LinkedGroup(link)
    group.leave()
    group.expect_messages()
    assert link.log == []


class BrokenLink(QueueLink):
    """The link of rank 2 of 3, whose connections are broken.

    Args:
        timeout_s: Maximum time that ranks wait for each other.
        coming: Notes of ranks that come when somebody waits for them.
    """

    def __init__(self, timeout_s: float, coming: dict[int, str] | None = None) -> None:
        super().__init__()
        self.rank, self.size, self.timeout = 2, 3, timedelta(seconds=timeout_s)
        self.coming = {f"shardckpt/lost/{rank}": text for rank, text in (coming or {}).items()}
        self.log = []

    def start_recv(self, tensor: torch.Tensor, src: int) -> Transfer:
        raise RuntimeError("closed")

    def find_note(self, key: str, *, wait_s: float = 0.0) -> str:
        self.log.append(("find", key.rpartition("/")[2], wait_s))
        return self.notes.get(key, "") or (self.coming.get(key, "") if wait_s else "")

    def leave_note(self, key: str, text: str) -> None:
        self.log.append(("leave", key.rpartition("/")[2], text.partition(" is gone")[0]))
        super().leave_note(key, text)


@pytest.fixture
def lose_rank_0() -> Callable[[BrokenLink], RankError]:
    """Lets a rank lose rank 0 in a transfer, and returns its error."""

    def lose(link: BrokenLink) -> RankError:
        with pytest.raises(RankError) as caught:
            LinkedGroup(link).recv(torch.empty(1), 0)
        return caught.value

    return lose


def note(rank: int, *, is_sure: bool = True) -> str:
    return f"{'' if is_sure else linked_group._UNSURE}rank {rank} of 3 is gone or did not answer in time: timed out"


LOST_AFTER_TIMEOUT = {
    "no note": ({}, 0),
    "a note": ({0: note(1)}, 1),
    "an unsure note": ({0: note(1, is_sure=False)}, 1),
    "a circle": ({0: note(1, is_sure=False), 1: note(0, is_sure=False)}, 0),
    "an unsure note of this rank": ({0: note(2, is_sure=False)}, 0),
    "a note of this rank": ({0: note(2)}, -1),
}


@pytest.mark.parametrize(("coming", "named"), LOST_AFTER_TIMEOUT.values(), ids=LOST_AFTER_TIMEOUT)
def test_after_a_timeout_the_notes_of_ranks_that_left_lead_to_the_lost_one(lose_rank_0, coming, named) -> None:
    assert lose_rank_0(BrokenLink(0.0, coming)).rank == named


def test_a_rank_leaves_a_note_before_it_waits_for_others(lose_rank_0) -> None:
    link = BrokenLink(0.0, {0: note(1)})
    lose_rank_0(link)
    waited = [("leave", "2", "unsure: rank 0 of 3"), ("find", "first", 0.0), ("find", "0", linked_group._NOTICE_S)]
    assert link.log == [*waited, ("leave", "2", "rank 1 of 3"), ("leave", "first", "rank 1 of 3")]


def test_a_rank_that_is_lost_before_any_can_time_out_is_named_at_once(lose_rank_0) -> None:
    link = BrokenLink(60.0, {0: note(1)})
    assert lose_rank_0(link).rank == 0
    assert [each for each in link.log if each[0] == "find"] == [("find", "first", 0.0), ("find", "0", 0.0)]


def test_what_another_rank_found_out_first_is_believed(lose_rank_0) -> None:
    link = BrokenLink(60.0)
    link.notes["shardckpt/lost/first"] = note(1)
    assert lose_rank_0(link).rank == 1


def test_a_rank_names_the_first_that_it_lost_again() -> None:
    link = BrokenLink(60.0)
    group = LinkedGroup(link)
    for peer in (0, 1):
        with pytest.raises(RankError, match="rank 0 of 3 is gone"):
            group.recv(torch.empty(1), peer)
    assert len(link.log) == 4


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
            of_python = {str(each.native_id) for each in threading.enumerate()}
            new = {*os.listdir("/proc/self/task")} - before - of_python
            found.append({os.getpriority(os.PRIO_PROCESS, int(thread)) - own for thread in new})
            del link
        assert os.getpriority(os.PRIO_PROCESS, 0) == own
        return [min(LOW_PRIORITY, 19 - own), *found]

    for low, background, other in run(2, body):
        assert (background, other) == ({low}, {0})
