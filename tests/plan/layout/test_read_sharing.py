"""Segments that several ranks want are read by one of them: each by its share, and everybody knows by whom."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.plan.layout import read_sharing
from shardckpt.plan.layout.read_sharing import (
    SEGMENT_BYTES,
    BroadcastGroup,
    FileSegments,
    assign_segments,
    decode_groups,
    encode_groups,
)

S = SEGMENT_BYTES


def ids(*numbers: int) -> read_sharing.Ids:
    return np.array(numbers, np.int64)


class TestSegments:
    files = FileSegments({"b": 2 * S + 5, "a": S, "empty": 0, "gone": -1, "c": 1})

    def test_files_are_numbered_by_name_one_after_the_other(self) -> None:
        assert [self.files.extent(n) for n in range(5)] == [
            ("a", 0, S),
            ("b", 0, S),
            ("b", S, 2 * S),
            ("b", 2 * S, 2 * S + 5),
            ("c", 0, 1),
        ]

    def test_a_range_is_cut_where_segments_end(self) -> None:
        assert list(self.files.split("b", 7, 2 * S + 3)) == [(1, 7, S), (2, S, 2 * S), (3, 2 * S, 2 * S + 3)]
        assert list(self.files.split("b", S, S)) == []

    @pytest.mark.parametrize(
        ("ranges", "found"),
        [
            ([("a", 0, S)], [0]),
            ([("a", S // 2, S)], [0]),
            ([("a", S // 2 + 1, S)], []),
            ([("a", 0, S // 4), ("a", S // 2, 3 * S // 4)], [0]),
            ([("c", 0, 1), ("b", S, 2 * S + 2)], [2, 4]),
            ([("b", S, 2 * S + 6)], []),  # beyond the end: the store says what is wrong
            ([("unheard of", 0, S)], []),
        ],
    )
    def test_what_is_wanted_at_least_by_half_is_wanted(
        self, ranges: list[tuple[str, int, int]], found: list[int]
    ) -> None:
        assert self.files.wanted(ranges).tolist() == found

    @pytest.mark.parametrize(
        ("ranges", "found"),
        [
            ([("a", 0, 1), ("a", 2, 3)], []),  # one block of four
            ([("a", S // 4 - 1, S // 4 + 1)], [0]),  # two
            ([("a", 0, 1), ("a", S - 1, S)], [0]),
            ([("b", 2 * S, 2 * S + 1)], [3]),  # the last block is as short as its segment
        ],
    )
    def test_blocks_count_that_are_touched(self, ranges: list[tuple[str, int, int]], found: list[int]) -> None:
        assert self.files.wanted(ranges, S // 4).tolist() == found


class TestSharing:
    def test_what_one_rank_wants_is_nobody_elses(self) -> None:
        assert assign_segments([ids(1, 2), ids(3), ids()]) == [[], [], []]
        assert assign_segments([ids()]) == [[]]

    def test_replicas_take_turns(self) -> None:
        groups = assign_segments([ids(0, 1, 2, 3, 4)] * 2)
        for [group] in groups:
            assert group.members == (0, 1)
            assert [list(group.turns(n)) for n in range(group.rounds)] == [
                [(0, 0), (1, 1)],
                [(0, 2), (1, 3)],
                [(0, 4)],
            ]

    def test_those_who_want_different_things_have_groups_of_their_own_in_one_order(self) -> None:
        wanted = [ids(0, 1, 9), ids(2, 3, 9), ids(0, 1, 9), ids(2, 3, 9)]
        told = [[(c.members, c.ids.tolist()) for c in mine] for mine in assign_segments(wanted)]
        everybody, even, odd = ((0, 1, 2, 3), [9]), ((0, 2), [0, 1]), ((1, 3), [2, 3])
        assert told == [[even, everybody], [odd, everybody]] * 2

    @given(st.lists(st.sets(st.integers(0, 20)), min_size=1, max_size=5))
    def test_each_segment_that_several_want_is_read_once_for_all_of_them(self, wanted: list[set[int]]) -> None:
        given_ = assign_segments([ids(*sorted(each)) for each in wanted])
        for number in range(21):
            want = [rank for rank, each in enumerate(wanted) if number in each]
            readers = {
                (owner, group.members)
                for mine in given_
                for group in mine
                for at in range(group.rounds)
                for owner, which in group.turns(at)
                if which == number
            }
            assert len(readers) == (len(want) > 1)
            for owner, members in readers:
                assert list(members) == want and owner in want
        order = {}
        for mine in given_:
            for first, second in pairwise(mine):
                order[first.members, second.members] = True
        assert not any((b, a) in order for a, b in order), "groups come in one order everywhere"

    @pytest.mark.parametrize("groups", [[], [BroadcastGroup((0, 3), ids(1, 5)), BroadcastGroup((0, 1, 2), ids(9))]])
    def test_they_travel_as_bytes(self, groups: list[BroadcastGroup]) -> None:
        found = decode_groups(encode_groups(groups))
        assert [(c.members, c.ids.tolist()) for c in found] == [(c.members, c.ids.tolist()) for c in groups]
