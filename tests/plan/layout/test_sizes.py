"""Sizes as people type them are bytes, or a usage error."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.errors import UsageError
from shardckpt.plan.layout.output_files import parse_size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5GB", 5 * 10**9),
        ("5GiB", 5 * 2**30),
        ("5 gb", 5 * 10**9),
        ("5G", 5 * 10**9),
        ("1.5kB", 1500),
        ("1.5KiB", 1536),
        ("7", 7),
        ("7B", 7),
        (7, 7),
        ("2TiB", 2**41),
    ],
)
def test_sizes_are_decimal_or_binary(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "-1", "0", "5XB", "5iB", "1e9", "5 GB x", "\u0665GB", "nan", "0.1B"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="must be a number of bytes"):
        parse_size(text)


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_a_usage_error(text: str) -> None:
    with contextlib.suppress(UsageError):
        assert parse_size(text) > 0


def test_an_absurd_size_is_no_crash() -> None:
    with pytest.raises(UsageError):
        parse_size("9" * 400 + "PB")
