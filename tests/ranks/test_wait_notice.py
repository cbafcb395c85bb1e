"""A rank that waits for others says so: the lowest one that waits, in one line, with the call and the ranks."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardckpt
from shardckpt.errors import RankError
from shardckpt.events import WaitEvent, subscribe
from shardckpt.ranks import wait_notice
from shardckpt.ranks.torch_group import TorchGroup
from shardckpt.ranks.wait_notice import WaitBoard, announce_wait
from tests.kit.ranks.harness import run

NOTICES_S = (0.45, 1.4)
LATE_S = 0.9  # seconds after which a late rank comes: between the first notice and the second


class Board(WaitBoard):
    """Notes of the ranks of one process."""

    def __init__(self, *waiting: int) -> None:
        self.waiting, self.log = set(waiting), []

    def note_wait(self, rank: int, *, is_waiting: bool) -> None:
        self.log.append(is_waiting)
        (self.waiting.add if is_waiting else self.waiting.discard)(rank)

    def is_waiting(self, rank: int) -> bool:
        return rank in self.waiting


@contextmanager
def told() -> Iterator[list[str]]:
    """The lines that this process logs meanwhile."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardckpt").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("shardckpt").removeHandler(handler)


def wait_until(is_so: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


@pytest.fixture
def soon(monkeypatch) -> None:
    """Notices after parts of a second."""
    monkeypatch.setattr(wait_notice, "NOTICES_S", NOTICES_S)
    monkeypatch.setattr(wait_notice, "_WATCH", wait_notice._Watch())  # another thread may wait for a later time


@pytest.mark.usefixtures("soon")
def test_a_wait_is_told_twice_then_at_intervals(monkeypatch) -> None:
    monkeypatch.setattr(wait_notice, "_EVERY_S", 0.2)
    with told() as lines, announce_wait(Board(), 0, 2, "a test"):
        wait_until(lambda: len(lines) == 4)
    assert lines[0] == "rank 0 waits in a test for rank 1, 0 s"
    assert not lines[4:]


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(
    ("rank", "waiting", "line"),
    [
        (0, (), "rank 0 waits in a test for rank 1, rank 2, rank 3"),
        (0, (1, 3), "rank 0 waits in a test for rank 2"),
        (1, (3,), "rank 1 waits in a test for rank 0, rank 2"),
        (0, (1, 2, 3), "rank 0 waits in a test for the other ranks, which wait too"),
    ],
)
def test_the_line_names_the_ranks_that_do_not_wait(rank, waiting, line) -> None:
    with told() as lines, announce_wait(Board(*waiting), rank, 4, "a test"):
        wait_until(lambda: bool(lines))
    assert lines[0].startswith(f"{line}, ")


@pytest.mark.usefixtures("soon")
def test_a_rank_is_silent_while_a_lower_one_waits() -> None:
    with told() as lines, announce_wait(Board(1), 2, 3, "a test"):
        time.sleep(NOTICES_S[0] * 2)
    assert not lines


@pytest.mark.usefixtures("soon")
def test_a_short_wait_leaves_no_note_and_a_long_one_removes_its_own() -> None:
    short, long = Board(), Board()
    with announce_wait(short, 0, 2, "a test"):
        pass
    with announce_wait(long, 0, 2, "a test"):
        wait_until(lambda: long.log == [True])
    wait_until(lambda: long.log == [True, False])
    assert not short.log


@pytest.mark.usefixtures("soon")
def test_the_thread_ends_when_nothing_waits() -> None:
    with announce_wait(Board(), 0, 2, "a test"):
        assert "wait notices" in {each.name for each in threading.enumerate()}
    wait_until(lambda: "wait notices" not in {each.name for each in threading.enumerate()})


@pytest.mark.usefixtures("soon")
def test_a_notice_that_fails_does_not_end_later_ones() -> None:
    class Broken(Board):
        def is_waiting(self, rank: int) -> bool:
            raise ValueError("no store")

    with told() as lines, announce_wait(Broken(), 0, 2, "a test"):
        time.sleep(NOTICES_S[0] * 1.5)
        with announce_wait(Board(), 0, 2, "another test"):
            wait_until(lambda: bool(lines))
    assert lines[0].startswith("rank 0 waits in another test for rank 1")


def late(own: int, call: Callable[[], Any]) -> Callable[[int, int], tuple[list[str], list[WaitEvent]]]:
    """A body in which one rank makes a call later than the others; returns what each rank told."""

    def body(rank: int, world: int) -> tuple[list[str], list[Any]]:
        wait_notice.NOTICES_S, wait_notice._WATCH = NOTICES_S, wait_notice._Watch()
        events: list[Any] = []
        subscribe(lambda event: events.append(event) if isinstance(event, WaitEvent) else None)
        dist.barrier()  # no rank is late because its process started late
        with told() as lines:
            time.sleep(LATE_S if rank == own else 0.0)
            call()
        dist.barrier()
        return [each for each in lines if "waits" in each], [each.as_dict() for each in events]

    return body


HERE = socket.gethostname()


@pytest.mark.parametrize(("own", "teller", "named"), [(1, 0, f"rank 1 (host {HERE})"), (0, 1, f"rank 0 (host {HERE})")])
def test_a_rank_tells_that_it_waits_for_a_late_one(tmp_path, own, teller, named) -> None:
    ck = shardckpt.Checkpointer(tmp_path / "run")

    def call() -> None:
        ck.durability(1)

    def body(rank: int, world: int) -> tuple[list[str], list[Any]]:
        ck.save(1, {"t": torch.ones(2)})
        return late(own, call)(rank, world)

    results = run(2, body)
    lines, events = results[teller]
    assert lines == [f"rank {teller} waits in durability for {named}, 0 s"]
    assert [(each["call"], each["waits_for"], each["path"]) for each in events] == [
        ("durability", (own,), str(ck.root))
    ]
    assert results[own] == ([], [])


def test_of_several_ranks_that_wait_the_lowest_tells(tmp_path) -> None:
    results = run(3, late(2, lambda: shardckpt.save({"t": torch.ones(2)}, tmp_path / "step")))
    assert [lines for lines, _ in results] == [["rank 0 waits in save for rank 2, 0 s"], [], []]


def test_a_collective_of_torch_names_the_late_rank_too() -> None:
    results = run(3, late(1, lambda: TorchGroup().all_gather_equal(b"1")))
    assert [lines for lines, _ in results] == [["rank 0 waits in an all-gather for rank 1, 0 s"], [], []]


def test_ranks_in_different_calls_raise_an_error_that_names_both(tmp_path) -> None:
    def body(rank: int, world: int) -> str:
        ck = shardckpt.Checkpointer(tmp_path / "run")
        ck.save(1, {"t": torch.ones(2)})
        with pytest.raises(RankError, match=r"rank 1 of 2 called `save` .* while rank 0 called `durability`") as caught:
            ck.durability(1) if rank == 0 else ck.save(2, {"t": torch.ones(2)})
        assert caught.value.rank == 1
        assert ck.durability(1).copies  # the ranks are together again
        return "went on"

    assert run(2, body) == ["went on"] * 2


ASKED_BY_RANK = {
    "durability": lambda ck, rank, _: ck.durability(1 + rank),
    "wait": lambda ck, rank, _: ck.wait(1 + rank),
    "restore": lambda ck, rank, _: ck.restore({"t": torch.zeros(2)}, step=1 + rank),
    "restore the newest": lambda ck, rank, _: ck.restore({"t": torch.zeros(2)}, step=1 if rank else None),
    "another root": lambda ck, rank, root: shardckpt.Checkpointer(f"{root}-{rank}").restore({"t": torch.zeros(2)}),
    "no Checkpointer": lambda ck, rank, root: (
        ck.save(9, {"t": torch.ones(2)}) if rank else shardckpt.save({"t": torch.ones(2)}, root / "step-00000009")
    ),
}


@pytest.mark.parametrize("ask", ASKED_BY_RANK.values(), ids=ASKED_BY_RANK)
def test_ranks_that_ask_for_different_things_get_an_error(tmp_path, ask) -> None:
    def body(rank: int, world: int) -> str:
        ck = shardckpt.Checkpointer(tmp_path / "run")
        for step in (1, 2):
            ck.save(step, {"t": torch.ones(2)})
        with pytest.raises(RankError, match=r"rank 1 of 2 called .* while rank 0 called"):
            ask(ck, rank, tmp_path / "run")
        assert ck.restore({"t": torch.zeros(2)}) == 2
        return "went on"

    assert run(2, body) == ["went on"] * 2


def test_a_rank_that_does_not_come_to_a_call_is_named_with_it(tmp_path) -> None:
    def body(rank: int, world: int) -> str | None:
        ck = shardckpt.Checkpointer(tmp_path / "run")
        ck.save(1, {"t": torch.ones(2)})
        if rank == 1:
            time.sleep(3)
            return None
        with pytest.raises(RankError) as caught:
            ck.durability(1)
        return str(caught.value)

    text, _ = run(2, body, group_timeout=2.0)
    assert text.startswith("rank 1 of 2 is gone or did not come to `durability` in time: ")


def test_any_rank_may_ask_for_the_steps_alone(tmp_path) -> None:
    def body(rank: int, world: int) -> Any:
        ck = shardckpt.Checkpointer(tmp_path / "run", keep_best=2, metric="loss")
        for step in (1, 2):
            ck.save(step, {"t": torch.ones(2)}, metrics={"loss": step})
        return (ck.steps(), ck.latest(), ck.best(), ck.path(2)) if rank == 1 else None

    assert run(2, body) == [None, ((1, 2), 2, 1, str(tmp_path / "run" / "step-00000002"))]
