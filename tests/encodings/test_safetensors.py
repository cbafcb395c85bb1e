"""Headers are read strictly and written as the reference library writes them."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save, save_file

from shardckpt.dtypes import SAFETENSORS_NAMES
from shardckpt.encodings.safetensors import (
    MAX_HEADER_BYTES,
    HeaderTensor,
    encode_header,
    file_order,
    looks_like_safetensors,
    parse_header,
    parse_json,
    read_headers,
)
from shardckpt.errors import CheckpointError, FormatError, TruncatedError, UnsafeError, UnsupportedError
from shardckpt.storage.resolve_url import open_store

KINDS = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    *([torch.float8_e8m0fnu] if hasattr(torch, "float8_e8m0fnu") else []),
]
names = st.text(max_size=8).filter(lambda s: s != "__metadata__" and s.isprintable())
shapes = st.lists(st.integers(0, 4), max_size=3)


def header(entries: object) -> bytes:
    return json.dumps(entries).encode()


def tensor(**changes: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


@settings(max_examples=40)
@given(st.dictionaries(names, st.tuples(st.sampled_from(KINDS), shapes), max_size=6))
def test_files_are_byte_for_byte_those_of_the_reference(spec: dict[str, tuple[torch.dtype, list[int]]]) -> None:
    """Order, offsets, padding: `safetensors.torch.save` of the same tensors gives the same file."""
    tensors = {name: torch.zeros(shape).to(kind) for name, (kind, shape) in spec.items()}
    theirs = save(tensors)
    placed = file_order(
        HeaderTensor(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items()
    )
    ours = encode_header(placed, {})
    assert ours == theirs[: len(ours)]
    assert len(theirs) == len(ours) + sum(p.nbytes for p in placed)


@given(st.dictionaries(st.text(max_size=8), st.tuples(st.sampled_from(sorted(SAFETENSORS_NAMES)), shapes), max_size=6))
def test_what_is_written_is_read_back(spec: dict[str, tuple[str, list[int]]]) -> None:
    placed = file_order(
        HeaderTensor(n, kind, tuple(8 * s for s in shape) or (8,))
        for n, (kind, shape) in spec.items()
        if n != "__metadata__"
    )
    if any(any(0xD800 <= ord(c) < 0xE000 for c in p.name) for p in placed):
        return
    raw = encode_header(placed, {"format": "pt"})
    assert len(raw) % 8 == 0, "A9: the data begins at a multiple of 8"
    found = parse_header(raw[8:], where="f")
    assert found.data_start == len(raw)
    assert found.metadata == {"format": "pt"}
    assert [(n, t[0], t[1]) for n, t in found.tensors.items()] == [(p.name, *_in_pairs(p)) for p in placed]
    assert found.data_bytes == sum(p.nbytes for p in placed)


def _in_pairs(tensor: HeaderTensor) -> tuple[str, tuple[int, ...]]:
    if tensor.dtype != "float4_e2m1fn":
        return tensor.dtype, tensor.shape
    return "float4_e2m1fn_x2", (*tensor.shape[:-1], tensor.shape[-1] // 2)


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no float4")
@pytest.mark.parametrize("shape", [(2, 2), (4,), (0,), (3, 0), (2, 1)])
def test_numbers_of_half_a_byte_have_the_shapes_of_the_reference(shape: tuple[int, ...], tmp_path: Path) -> None:
    theirs = save({"t": torch.zeros(shape, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)})
    ours = encode_header([HeaderTensor("t", "float4_e2m1fn_x2", shape)], {})
    assert ours == theirs[: len(ours)]
    (tmp_path / "t.safetensors").write_bytes(theirs)
    loaded = load_file(tmp_path / "t.safetensors")["t"]
    dtype, found, *_ = parse_header(ours[8:], where="f").tensors["t"]
    assert (f"torch.{dtype}", found) == (str(loaded.dtype), tuple(loaded.shape))


def test_an_odd_row_of_numbers_of_half_a_byte_keeps_its_shape() -> None:
    tensors = {"t": {"dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]}}
    found = parse_header(json.dumps(tensors).encode(), where="f").tensors["t"]
    assert found[:2] == ("float4_e2m1fn", (2, 3))
    with pytest.raises(UnsupportedError, match="float4_e2m1fn_x2 without dimensions"):
        encode_header([HeaderTensor("t", "float4_e2m1fn_x2", ())], {})


def test_names_beyond_ascii_are_read_by_the_reference_too() -> None:
    raw = encode_header([HeaderTensor('gewicht\n"\u00fc\U0001f600\\', "uint8", (1,))], {"k": "\u00e9"}) + b"\x07"
    assert {n: t.tolist() for n, t in load(raw).items()} == {'gewicht\n"\u00fc\U0001f600\\': [7]}


def test_an_unaligned_header_without_metadata_is_read(tmp_path: Path) -> None:
    """Files of other tools: their data begins anywhere."""
    body = header({"w": tensor()})
    while len(body) % 8 != 3:
        body += b" "
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(body)) + body + bytes(8))
    [found] = read_headers(open_store(str(tmp_path)), {"a.safetensors": 8 + len(body) + 8}).values()
    assert found.data_start % 8 == 3
    assert found.metadata == {}


@pytest.mark.parametrize(
    ("entries", "error"),
    [
        ([], FormatError),
        ("text", FormatError),
        (None, FormatError),
        ({"__metadata__": {"a": 1}}, FormatError),
        ({"__metadata__": ["a"]}, FormatError),
        ({"w": []}, FormatError),
        ({"w": {}}, FormatError),
        ({"w": tensor(dtype="F33")}, UnsupportedError),
        ({"w": tensor(dtype=5)}, UnsupportedError),
        ({"w": tensor(dtype=["F32"])}, UnsupportedError),
        ({"w": tensor(shape=[-2])}, FormatError),
        ({"w": tensor(shape=[2.0])}, FormatError),
        ({"w": tensor(shape=[True, 2])}, FormatError),
        ({"w": tensor(shape="2")}, FormatError),
        ({"w": tensor(shape=[1 << 70])}, FormatError),
        ({"w": tensor(shape=[1 << 40, 1 << 40])}, FormatError),
        ({"w": tensor(shape=[3])}, FormatError),
        ({"w": tensor(data_offsets=[0])}, FormatError),
        ({"w": tensor(data_offsets=[0, 8, 9])}, FormatError),
        ({"w": tensor(data_offsets=[8, 0])}, FormatError),
        ({"w": tensor(data_offsets=[-8, 0])}, FormatError),
        ({"w": tensor(data_offsets=[8, 16])}, FormatError),
        ({"w": tensor(data_offsets=[0, "8"])}, FormatError),
        ({"w": tensor(), "v": tensor()}, FormatError),
        ({"w": tensor(), "v": tensor(data_offsets=[4, 12])}, FormatError),
        ({"w": tensor(), "v": tensor(data_offsets=[12, 20])}, FormatError),
        ({"w": tensor(dtype="F4", shape=[3], data_offsets=[0, 2])}, FormatError),
    ],
)
def test_headers_that_lie_are_refused(entries: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        parse_header(header(entries), where="f")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"{}}",
        b"\xff\xfe",
        b'{"w": NaN}',
        b'{"w": Infinity}',
        b'{"a": 1, "a": 1}',
        b'{"w": {"dtype": "F32", "dtype": "F32"}}',
        b"[" * 200_000,
        b'{"a":' * 100_000,
        b'{"w": ' + b"9" * 10_000 + b"}",
        b'{"\\ud800": 1}',
    ],
)
def test_json_that_is_none_is_a_format_error(body: bytes) -> None:
    try:
        parse_header(body, where="f")
    except CheckpointError as error:
        assert str(error).isprintable()
    else:
        pytest.fail("accepted")


@given(st.binary(max_size=60))
def test_any_bytes_are_json_or_a_format_error(body: bytes) -> None:
    with contextlib.suppress(FormatError):
        assert parse_json(body, where="f") == json.loads(body)


@given(st.integers(0, 400), st.binary(min_size=1, max_size=3))
def test_a_damaged_header_is_refused_where_the_reference_refuses_it(at: int, patch: bytes) -> None:
    raw = bytearray(save({"a": torch.zeros(2, 3), "b": torch.zeros(5, dtype=torch.bool)}, {"format": "pt"}))
    raw[at % len(raw) : at % len(raw) + len(patch)] = patch
    length = struct.unpack_from("<Q", raw)[0]
    try:
        found = parse_header(raw[8 : 8 + length], where="f")
        ours = found.data_start + found.data_bytes <= len(raw) and length <= len(raw) - 8
    except CheckpointError:
        ours = False
    try:
        load(bytes(raw))
        theirs = True
    except (SafetensorError, ValueError, KeyError, RuntimeError):
        theirs = False
    assert ours or not theirs, "what they read, we read"


class TestFiles:
    def test_a_header_longer_than_the_format_allows_is_not_allocated(self, tmp_path: Path) -> None:
        with (tmp_path / "a").open("wb") as file:
            file.write(struct.pack("<Q", 1 << 30) + b"{")
            file.truncate(2 << 30)
        with pytest.raises(UnsafeError, match=str(MAX_HEADER_BYTES)):
            read_headers(open_store(str(tmp_path)), {"a": 2 << 30})

    @pytest.mark.parametrize("size", [0, 7, 8, 9, 40])
    def test_a_file_that_ends_in_its_header_is_truncated(self, tmp_path: Path, size: int) -> None:
        save_file({"w": torch.zeros(4)}, tmp_path / "a")
        data = (tmp_path / "a").read_bytes()[:size]
        (tmp_path / "a").write_bytes(data)
        with pytest.raises(TruncatedError):
            read_headers(open_store(str(tmp_path)), {"a": size})


def test_first_bytes_tell_a_safetensors_file() -> None:
    assert looks_like_safetensors(save({"w": torch.zeros(1)})[:9])
    for other in (b"", b"{", b"PK\x03\x04" + bytes(8), b"\x80\x02" + bytes(12), struct.pack("<Q", 1 << 40) + b"{"):
        assert not looks_like_safetensors(other)


def test_names_that_are_no_text_are_refused() -> None:
    """Half a surrogate pair can be pickled, but no UTF-8 holds it: the file could not be read by anybody."""
    with pytest.raises(UnsupportedError, match=r"\\ud800"):
        encode_header([HeaderTensor("\ud800", "uint8", (1,))], {})


def test_the_name_of_the_metadata_is_no_tensors() -> None:
    """Two keys of that name would make a file that no reader accepts."""
    with pytest.raises(UnsupportedError, match="__metadata__"):
        encode_header([HeaderTensor("__metadata__", "uint8", (1,))], {"format": "pt"})


def test_types_that_safetensors_cannot_name_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"w.*complex128"):
        encode_header([HeaderTensor("w", "complex128", (1,))], {})
