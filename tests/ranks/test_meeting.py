"""Ranks of one call meet in a store that may hold a training's keys and what dead calls left, or say who is missing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from shardckpt.errors import RankError, UsageError
from shardckpt.ranks import meeting
from shardckpt.ranks.group import Group
from shardckpt.ranks.linked_group import ALONE
from shardckpt.ranks.meeting import Place, join_ranks, read_place


@pytest.fixture
def port() -> int:
    """Return a port that nobody uses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def place(rank: int, size: int, port: int, *, is_host: bool | None = None) -> Place:
    return Place(rank, size, "127.0.0.1", port, rank == 0 if is_host is None else is_host)


def join(places: list[Place], calls: list[str], work: Callable[[Group], Any], **limits: float) -> list[Any]:
    """Let threads join as ranks, and return what each gave or raised."""
    found: list[Any] = [None] * len(places)

    def run(at: int) -> None:
        try:
            with join_ranks(calls[at], place=places[at], **{"meeting_s": 30.0, "silence_s": 20.0, **limits}) as group:
                found[at] = work(group)
        except Exception as error:  # noqa: BLE001
            found[at] = error

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(places))]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    return found


def gather(group: Group) -> list[bytes]:
    return group.all_gather(b"%d of %d" % (group.rank, group.size))


def test_ranks_meet_as_often_as_they_like_in_a_store_that_one_of_them_hosts(port: int) -> None:
    for _ in range(3):
        found = join([place(rank, 3, port) for rank in range(3)], ["a"] * 3, gather)
        assert found == [[b"0 of 3", b"1 of 3", b"2 of 3"]] * 3


@pytest.fixture
def training(port: int) -> Any:
    """Return a store of a training, at the port where the ranks meet."""
    return dist.TCPStore("127.0.0.1", port, is_master=True, timeout=timedelta(seconds=10), wait_for_workers=False)


def test_no_key_of_a_training_is_changed_and_none_of_ours_stays(
    training: Any, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefixes: list[str] = []

    def watch(prefix: str, store: Any) -> Any:
        prefixes.append(prefix)
        return dist.PrefixStore(prefix, store)

    monkeypatch.setattr(meeting, "PrefixStore", watch)
    dist.PrefixStore("default_pg/0", training).set("0", "address")
    before = training.num_keys()
    assert join([place(rank, 2, port, is_host=False) for rank in range(2)], ["a"] * 2, gather)[0][1] == b"1 of 2"
    assert training.get("default_pg/0/0") == b"address"
    assert training.num_keys() - before == 1, "the key that says that no meeting begins"
    assert prefixes
    assert all(each.startswith("shardckpt/ranks/2/") for each in prefixes)


def test_a_rank_that_should_host_a_store_uses_one_that_is_there(training: Any, port: int) -> None:
    assert join([place(rank, 2, port) for rank in range(2)], ["a"] * 2, gather)[0][1] == b"1 of 2"
    assert ("127.0.0.1", port) not in meeting._HOSTED


def test_a_meeting_whose_first_rank_died_does_not_mislead_the_next(training: Any, port: int) -> None:
    late = threading.Event()
    found: list[Any] = []
    prefix = meeting._Meeting(place(1, 2, port), "a", 1.0)._prefix
    ours = dist.PrefixStore(prefix, training)
    ours.set("current", "dead")
    ours.set("dead/tokens", "another")

    def come_first() -> None:
        with join_ranks("a", place=place(1, 2, port), meeting_s=30.0) as group:
            found.append(gather(group))

    thread = threading.Thread(target=come_first)
    thread.start()
    while not ours.check(["dead/here/1"]):
        late.wait(0.01)
    with join_ranks("a", place=place(0, 2, port, is_host=False), meeting_s=30.0) as group:
        found.append(gather(group))
    thread.join(60)
    assert found == [[b"0 of 2", b"1 of 2"]] * 2


def test_ranks_of_different_calls_do_not_meet(training: Any, port: int) -> None:
    found = join([place(rank, 2, port, is_host=False) for rank in (0, 1)], ["a", "b"], gather, meeting_s=1.0)
    assert [type(each) for each in found] == [RankError, RankError]


def test_the_error_names_the_ranks_that_did_not_come_and_what_to_do(port: int) -> None:
    longer: list[Any] = []
    thread = threading.Thread(target=lambda: longer.extend(join([place(2, 4, port)], ["a"], gather, meeting_s=5.0)))
    thread.start()
    (error,) = join([place(0, 4, port)], ["a"], gather, meeting_s=2.0)
    assert isinstance(error, RankError)
    assert "rank 1, rank 3 of 4" in str(error)
    assert "--no-parallel" in str(error)
    thread.join(60)
    assert isinstance(longer[0], RankError)


def test_the_error_of_a_rank_whose_first_rank_did_not_come_says_where_it_waited(port: int) -> None:
    (error,) = join([place(1, 2, port)], ["a"], gather, meeting_s=0.3)
    assert f"rank 0 of 2 (127.0.0.1:{port}" in str(error)
    assert "did not come within 0.3 s" in str(error)


def test_a_rank_that_waits_says_so_once_before_the_limit(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "NOTICE_S", 0.1)
    with (
        pytest.warns(UserWarning, match="rank 0 waits for rank 1 of 2") as told,
        pytest.raises(RankError),
        join_ranks("a", place=place(0, 2, port), meeting_s=0.8),
    ):
        pass
    assert len(told) == 1


def test_something_else_at_the_port_is_no_wait_without_a_limit(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_ASK_S", 0.2)
    with socket.create_server(("127.0.0.1", port)):  # accepts, and never answers
        (error,) = join([place(1, 2, port)], ["a"], gather, meeting_s=0.5)
    assert isinstance(error, RankError)


def test_one_rank_is_alone(port: int) -> None:
    with join_ranks("a", place=place(0, 1, port)) as group:
        assert group is ALONE


SET = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        *[({name: ""}, f"environment variable {name} expected, but not set") for name in SET],
        ({"RANK": "two"}, "RANK must be a number, got two"),
        ({"RANK": "2"}, "RANK must be below WORLD_SIZE, 2, got 2"),
    ],
)
def test_an_environment_without_ranks_is_a_usage_error(
    changed: dict[str, str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**SET, **changed}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=text):
        read_place()


@pytest.mark.parametrize(("rank", "agent", "hosts"), [("0", "", True), ("0", "True", False), ("1", "", False)])
def test_the_first_rank_hosts_the_store_unless_the_launcher_does(
    rank: str, agent: str, hosts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**SET, "RANK": rank, "TORCHELASTIC_USE_AGENT_STORE": agent}.items():
        monkeypatch.setenv(name, value)
    assert read_place() == Place(int(rank), 2, "here", 29500, hosts)
