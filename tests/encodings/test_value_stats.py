from __future__ import annotations

import math

import pytest

from shardckpt.encodings.value_stats import STATS_BYTES, ValueStats, merge_stats, unpack_stats

ONE = ValueStats(nans=1, infs=2, zeros=0, finite=2, min=-1.5, max=4.0, total=2.5, squares=18.25)
OTHER = ValueStats(nans=0, infs=1, zeros=3, finite=4, min=0.0, max=1e-9, total=1e-9, squares=1e-18)


def test_packed_statistics_come_back() -> None:
    data = ONE.pack() + ValueStats().pack()
    assert len(data) == 2 * STATS_BYTES
    assert unpack_stats(data) == [ONE, ValueStats()]


def test_merged_statistics_are_those_of_all_parts() -> None:
    merged = merge_stats([ONE, ValueStats(), OTHER])
    assert merged == ValueStats(1, 3, 3, 6, -1.5, 4.0, 2.5 + 1e-9, 18.25 + 1e-18)
    assert merged.size == ONE.size + OTHER.size == 10


def test_the_order_of_parts_does_not_change_a_sum() -> None:
    parts = [ValueStats(finite=1, total=value, squares=value) for value in (1e16, 1.0, -1e16, 1.0, 0.1)]
    assert {merge_stats(order).total for order in (parts, parts[::-1], sorted(parts))} == {2.1}


@pytest.mark.parametrize("values", [(1e308, 1e308), (math.inf, 1.0)])
def test_a_sum_beyond_a_double_is_infinite(values: tuple[float, float]) -> None:
    assert merge_stats(ValueStats(squares=value) for value in values).squares == math.inf


def test_no_parts_have_no_values() -> None:
    assert merge_stats([]) == ValueStats()


@pytest.mark.parametrize(
    "change",
    [
        {"finite": 3},
        {"zeros": 3},
        {"squares": -1.0},
        {"squares": math.nan},
        {"min": math.nan},
        {"max": math.inf},
        {"min": 5.0, "max": 4.0},
    ],
    ids=str,
)
def test_statistics_that_no_values_have_are_recognized(change: dict[str, float]) -> None:
    assert ONE.may_describe(5)
    assert not ONE._replace(**change).may_describe(5)
