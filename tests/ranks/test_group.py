"""Ranks talk in bytes over every transport, and a failure on one is raised on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shardckpt.errors import MismatchError, RankError, UnknownNameError, UsageError
from shardckpt.ranks.group import Group
from shardckpt.ranks.linked_group import ALONE
from shardckpt.ranks.torch_group import current_group
from tests.kit.ranks.transports import on_linked_ranks, on_store_ranks, on_torch_ranks

OnRanks = Callable[[int, Callable[[Group], Any]], list[Any]]
TRANSPORTS = pytest.mark.parametrize("on_ranks", [on_torch_ranks, on_linked_ranks, on_store_ranks])


def test_a_world_of_one_gives_back_what_it_was_given():
    assert (ALONE.rank, ALONE.size, ALONE.all_gather(b"x"), ALONE.broadcast(b"y")) == (0, 1, [b"x"], b"y")
    assert current_group() is ALONE


def test_a_world_of_one_has_nobody_else_to_hear_from():
    with pytest.raises(RankError):
        ALONE.broadcast(None)


def test_a_world_of_one_answers_itself_and_raises_its_own_error():
    assert ALONE.ask_rank0("counting", b"one", lambda messages: [b"1" + messages[0]]) == b"1one"
    with pytest.raises(OSError, match=r"^no space left$"):
        ALONE.ask_rank0("counting", OSError("no space left"), lambda messages: messages)


@TRANSPORTS
def test_bytes_of_different_lengths_are_gathered_in_rank_order(on_ranks: OnRanks):
    assert on_ranks(3, lambda g: g.all_gather(b"ab" * g.rank)) == [[b"", b"ab", b"abab"]] * 3


@TRANSPORTS
def test_one_rank_broadcasts_and_the_others_need_give_nothing(on_ranks: OnRanks):
    assert on_ranks(3, lambda g: g.broadcast(b"names" if g.rank == 2 else None, source=2)) == [b"names"] * 3


@TRANSPORTS
def test_rank_0_answers_each_rank(on_ranks: OnRanks):
    def work(group: Group) -> list[bytes]:
        ask = group.ask_rank0
        doubled = ask("doubling", b"x" * group.rank, lambda messages: [each * 2 for each in messages])
        return [doubled, ask("counting", b"", lambda messages: [b"%d" % len(messages)] * len(messages))]

    assert on_ranks(3, work) == [[b"", b"3"], [b"xx", b"3"], [b"xxxx", b"3"]]


@TRANSPORTS
def test_a_failure_on_one_rank_is_raised_on_all_and_names_it(on_ranks: OnRanks):
    def work(group: Group) -> None:
        with group.collective("writing shards"):
            if group.rank == 1:
                raise OSError("no space left")

    first, second, third = on_ranks(3, work)
    assert [type(each) for each in (first, second, third)] == [RankError, OSError, RankError]
    assert first.rank == third.rank == 1
    assert "writing shards failed on rank 1: OSError: no space left" in str(first)


@TRANSPORTS
def test_a_message_that_is_an_error_is_raised_on_all_and_names_all_ranks_that_failed(on_ranks: OnRanks):
    def work(group: Group) -> None:
        group.ask_rank0("writing", OSError("no space left") if group.rank else b"", lambda messages: messages)

    first, *others = on_ranks(3, work)
    assert [type(each) for each in (first, *others)] == [RankError, OSError, OSError]
    assert (first.rank, str(first)) == (1, "writing failed on rank 1: OSError: no space left; ranks 1, 2 failed")


@TRANSPORTS
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("error", [UnknownNameError("no w"), MismatchError(["no w"])], ids=["name", "mismatch"])
def test_a_wrong_call_on_one_rank_is_a_usage_error_on_all(on_ranks: OnRanks, failing: int, error: UsageError):
    def work(group: Group) -> tuple[type, str]:
        with pytest.raises(UsageError) as caught:
            group.ask_rank0("loading", error if group.rank == failing else b"", lambda messages: messages)
        return type(caught.value), str(caught.value)

    outcomes = on_ranks(3, work)
    assert outcomes.pop(failing) == (type(error), str(error))
    assert outcomes == [(type(error), f"loading failed on rank {failing}: {error}")] * 2


@TRANSPORTS
def test_a_wrong_call_inside_a_block_is_a_rank_error_on_the_others(on_ranks: OnRanks):
    def work(group: Group) -> None:
        with group.collective("loading"):
            if group.rank == 1:
                raise UnknownNameError("no w")

    assert [type(each) for each in on_ranks(2, work)] == [RankError, UnknownNameError]


@TRANSPORTS
def test_an_error_of_rank_0_while_it_decides_is_raised_on_all(on_ranks: OnRanks):
    def fail(messages: list[bytes]) -> list[bytes]:
        raise OSError(f"{len(messages)} messages are too many")

    first, *others = on_ranks(3, lambda group: group.ask_rank0("planning", b"", fail))
    assert (type(first), str(first)) == (OSError, "3 messages are too many")
    assert [str(each) for each in others] == ["planning failed on rank 0: OSError: 3 messages are too many"] * 2


@TRANSPORTS
def test_ranks_that_did_not_fail_hear_what_the_others_say(on_ranks: OnRanks):
    def work(group: Group) -> list[bytes]:
        with group.collective("writing shards") as piggyback:
            piggyback.local = b"of %d" % group.rank
        return [each.rstrip(b"\0") for each in piggyback.gathered]

    assert on_ranks(2, work) == [[b"of 0", b"of 1"]] * 2


def test_a_rank_that_is_gone_is_an_error_that_says_who_waited():
    def work(group: Group) -> object:
        return "left" if group.rank == 1 else group.all_gather(b"hello")

    waited, _ = on_torch_ranks(2, work)
    assert isinstance(waited, RankError)
    assert "rank 0 of 2 could not complete" in str(waited)
