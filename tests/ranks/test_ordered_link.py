"""Ranks in another order: the first one answers, ranks that need no answer may be gone, and messages keep the names."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from shardckpt.errors import RankError
from shardckpt.ranks.linked_group import LinkedGroup
from shardckpt.ranks.ordered_link import keep_first, put_first, sort_by_number
from shardckpt.ranks.torch_link import link_ranks
from tests.kit.ranks.harness import outcomes, run


def ask(group: LinkedGroup, rank: int) -> list[str]:
    """Return all ranks' messages in the group's order."""
    return group.ask_rank0("asking", str(rank).encode(), lambda each: [b" ".join(each)] * len(each)).decode().split()


def test_the_first_of_the_chosen_ranks_answers_and_the_rest_follow() -> None:
    def body(rank: int, world: int) -> tuple[list[str], list[str], list[str]]:
        group = LinkedGroup(link_ranks(None))
        before = ask(group, rank)
        ordered = put_first(group, (1, 3))
        assert put_first(group, (1, 3)) is ordered
        first = ask(ordered, rank)
        alone = ask(keep_first(ordered, 2), rank) if rank in (1, 3) else []
        assert ask(group, rank) == before
        return first, alone, sort_by_number(ordered, first)

    found = run(4, body)
    assert [each[0] for each in found] == [["1", "3", "0", "2"]] * 4
    assert [each[1] for each in found] == [[], ["1", "3"], [], ["1", "3"]]
    assert found[0][2] == ["0", "1", "2", "3"]


def test_tensors_go_to_the_ranks_in_the_new_order() -> None:
    def body(rank: int, world: int) -> float:
        group = put_first(LinkedGroup(link_ranks(None)), (2,))
        value = torch.full((1,), float(rank))
        if group.rank == 0:
            group.wait(group.send(value, 1), 1)
        if group.rank == 1:
            group.recv(value, 0)
        return float(value)

    assert run(3, body) == [2.0, 1.0, 2.0]


def test_a_rank_that_needs_no_answer_may_be_gone_but_not_from_the_next_exchange() -> None:
    def body(rank: int, world: int) -> tuple[list[str], str, bool]:
        group = LinkedGroup(link_ranks(None))
        pids = group.all_gather(str(os.getpid()).encode())
        ordered = put_first(group, (1, 2))

        def decide(messages: list[bytes]) -> list[bytes]:
            os.kill(int(pids[0]), signal.SIGKILL)
            return [b" ".join(messages)] * 3

        first = ordered.ask_rank0("planning", str(rank).encode(), decide).decode().split()
        alone = ask(keep_first(ordered, 2), rank)
        assert first == ["1", "2", "0"] and not group.is_broken
        with pytest.raises(RankError) as caught:
            ask(ordered, rank)
        return alone, str(caught.value), group.is_broken

    found = outcomes(3, body, group_timeout=5.0)
    assert found[0].value is None
    for each in found[1:]:
        alone, text, is_broken = each.value
        assert alone == ["1", "2"] and is_broken
        assert text.startswith("rank 0 of 3 is gone"), "it has its own number"


def test_errors_name_ranks_by_their_own_numbers() -> None:
    def body(rank: int, world: int) -> list[str]:
        group, texts = put_first(LinkedGroup(link_ranks(None)), (2,)), []
        for failing in range(world):
            message: bytes | Exception = OSError("broken") if rank == failing else b""
            with pytest.raises((OSError, RankError)) as caught:
                group.ask_rank0("asking", message, lambda each: each)
            texts.append(str(caught.value))
        return texts

    for rank, texts in enumerate(run(3, body)):
        for failing, text in enumerate(texts):
            assert text == "broken" if rank == failing else f"asking failed on rank {failing}" in text


def test_a_background_of_ordered_ranks_has_the_same_order() -> None:
    def body(rank: int, world: int) -> list[str]:
        return ask(put_first(LinkedGroup(link_ranks(None)), (1,)).background("saves"), rank)

    assert run(2, body) == [["1", "0"]] * 2
