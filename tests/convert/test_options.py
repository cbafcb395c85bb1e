"""What people type: sizes, types, and options that cannot be."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.convert.options import Options, parse_dtype, parse_size
from shardckpt.errors import UsageError


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
    with pytest.raises(UsageError, match="no size"):
        parse_size(text)


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_a_usage_error(text: str) -> None:
    with contextlib.suppress(UsageError):
        assert parse_size(text) > 0


def test_an_absurd_size_is_no_crash() -> None:
    with pytest.raises(UsageError):
        parse_size("9" * 400 + "PB")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp32", "float32"), ("half", "float16"), ("", "")],
)
def test_types_have_short_names(text: str, expected: str) -> None:
    assert parse_dtype(text) == expected


@pytest.mark.parametrize("text", ["int8", "float8_e4m3fn", "complex64", "BF16", "torch.float16"])
def test_only_float_types_can_be_cast_to(text: str) -> None:
    with pytest.raises(UsageError, match="--dtype"):
        parse_dtype(text)


@pytest.mark.parametrize(
    ("given_options", "message"),
    [
        ({"to": "onnx"}, "--to"),
        ({"part": "weights"}, "--part"),
        ({"dtype": "int8"}, "--dtype"),
        ({"max_shard_size": "much"}, "no size"),
        ({"max_memory": "1MiB"}, "--max-memory"),
        ({"jobs": 0}, "--jobs"),
    ],
)
def test_options_are_checked_before_any_file_is(given_options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Options(**given_options).validated()  # type: ignore[arg-type]
