"""Headers of GGUF files."""

from __future__ import annotations

import pytest

from shardckpt.errors import UnsupportedError
from shardckpt.offline.targets.gguf.gguf_header import GgufTensor, encode_header, looks_like_gguf, padding


def test_a_header_is_the_bytes_of_the_specification() -> None:
    header = encode_header({"a": 7, "b": [-1], "c": ["x", "yz"]}, [GgufTensor("w", "float16", (3, 5))])
    expected = (
        b"GGUF\x03\0\0\0\x01\0\0\0\0\0\0\0\x03\0\0\0\0\0\0\0"
        b"\x01\0\0\0\0\0\0\0a\x04\0\0\0\x07\0\0\0"
        b"\x01\0\0\0\0\0\0\0b\x09\0\0\0\x05\0\0\0\x01\0\0\0\0\0\0\0\xff\xff\xff\xff"
        b"\x01\0\0\0\0\0\0\0c\x09\0\0\0\x08\0\0\0\x02\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0x\x02\0\0\0\0\0\0\0yz"
        b"\x01\0\0\0\0\0\0\0w\x02\0\0\0\x05\0\0\0\0\0\0\0\x03\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\0\0\0\0"
    )
    assert header == expected + padding(len(expected))
    assert len(header) % 32 == 0
    assert looks_like_gguf(header)


def test_data_of_a_tensor_starts_at_a_multiple_of_the_alignment() -> None:
    header = encode_header({}, [GgufTensor("a", "float32", (9,)), GgufTensor("b", "q8_0", (2, 32))])
    assert b"b\x02\0\0\0\x20\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0\x08\0\0\0\x40\0\0\0\0\0\0\0" in header
    assert [len(padding(n)) for n in (0, 1, 31, 32, 33)] == [0, 31, 1, 0, 31]


@pytest.mark.parametrize("value", [1 << 32, -1, 1e300, "\ud800", [1 << 31]])
def test_a_value_that_gguf_cannot_hold_is_an_error_with_its_key(value: object) -> None:
    with pytest.raises(UnsupportedError, match=r"cannot hold the value of llama\.x"):
        encode_header({"llama.x": value}, [])  # type: ignore[dict-item]


@pytest.mark.parametrize("head", [b"", b"GGU", b"my notes", b"ggufxxxx"])
def test_other_files_are_not_taken_for_one(head: bytes) -> None:
    assert not looks_like_gguf(head)
