"""What the writer of torch's files promises: torch reads them with its safe loader, mapped or not, and so do we."""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardckpt.encodings.pickle_stubs import Dtype, InstanceStub, Ordered
from shardckpt.encodings.pickle_writer import GlobalCall, GlobalName, encode_pickle
from shardckpt.encodings.tagged_json import NamedValue
from shardckpt.errors import UnsupportedError
from shardckpt.readers.registry import open_checkpoint
from shardckpt.readers.torchsave.writer import (
    ALIGNMENT,
    TYPES,
    ArchiveWriter,
    Storage,
    TensorValue,
    encode_archive,
    plan_archive,
)


def write(value: object, storages: list[tuple[Storage, bytes]], portion: int = 7) -> bytes:
    """Return a file whose storages were given in portions of a few bytes."""
    archive = plan_archive(value, [storage for storage, _ in storages])
    parts: list[bytes] = []
    writer = ArchiveWriter(archive, lambda data: parts.append(bytes(data)))
    data = b"".join(raw for _, raw in storages)
    for start in range(0, len(data), portion):
        writer.write(data[start : start + portion])
    writer.close()
    raw = b"".join(parts)
    assert len(raw) == archive.nbytes, "the size is known before the first byte"
    return raw


def raw_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def safe(raw: bytes, **options: Any) -> Any:
    return torch.load(io.BytesIO(raw), weights_only=True, **options)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", sorted(name for name in TYPES if hasattr(torch, name)))
def test_every_type_of_torch_comes_back(name: str) -> None:
    dtype = getattr(torch, name)
    data = torch.arange(24, dtype=torch.uint8).repeat_interleave(dtype.itemsize)[: 6 * dtype.itemsize]
    expected = (data % 2 if name == "bool" else data).view(dtype).reshape(2, 3)
    raw = write({"t": TensorValue(0, name, (2, 3))}, [(Storage(name, 6), raw_of(expected))])
    found = safe(raw)["t"]
    assert (found.dtype, found.shape, raw_of(found)) == (dtype, expected.shape, raw_of(expected))


def test_views_ties_scalars_and_empty_tensors(tmp_path: Path) -> None:
    data = torch.arange(12.0)
    value = {
        "a": TensorValue(0, "float32", (3, 4)),
        "tied": TensorValue(0, "float32", (3, 4)),
        "transposed": TensorValue(0, "float32", (4, 3), 0, (1, 4)),
        "part": TensorValue(0, "float32", (2,), 5),
        "empty": TensorValue(1, "float32", (0, 3)),
        "number": TensorValue(2, "int64", ()),
    }
    storages = [
        (Storage("float32", 12), raw_of(data)),
        (Storage("float32", 0), b""),
        (Storage("int64", 1), raw_of(torch.tensor(7))),
    ]
    file = tmp_path / "a.pt"
    file.write_bytes(write(value, storages))
    for options in ({}, {"mmap": True}):
        found = torch.load(file, weights_only=True, **options)
        assert torch.equal(found["a"], data.reshape(3, 4))
        assert torch.equal(found["transposed"], data.reshape(3, 4).T)
        assert found["part"].tolist() == [5.0, 6.0]
        assert found["empty"].shape == (0, 3)
        assert found["number"].item() == 7
        assert found["a"].untyped_storage().data_ptr() == found["tied"].untyped_storage().data_ptr()


def test_the_archive_is_a_sound_zip_file_whose_storages_lie_on_borders() -> None:
    storages = [(Storage("uint8", n), bytes(range(n))) for n in (1, 64, 0, 63, 200)]
    raw = write([TensorValue(i, "uint8", (s.elements,)) for i, (s, _) in enumerate(storages)], storages)
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        assert archive.testzip() is None, "every checksum fits"
        for i, (_, data) in enumerate(storages):
            info = archive.getinfo(f"archive/data/{i}")
            at = info.header_offset
            start = at + 30 + int.from_bytes(raw[at + 26 : at + 28], "little")
            start += int.from_bytes(raw[at + 28 : at + 30], "little")
            assert start % ALIGNMENT == 0
            assert raw[start : start + len(data)] == data


PLAIN: list[object] = [
    None,
    True,
    [0, 255, 256, 65535, 65536, -1, 2**31, -(2**31), -(2**31) - 1, 2**63, -(2**70), 10**400],
    [0.0, -0.0, 1e308, math.inf],
    1 + 2j,
    b"\x00\xff raw",
    "é \ud800",
    {"nested": {"a": [1, (2, 3), (), (1,), (1, 2, 3, 4)]}, 5: "x", (1, "k"): None, 1.5: False},
    {1, 2},
    OrderedDict([("z", 1), ("a", OrderedDict())]),
    list(range(2500)),
    {str(i): i for i in range(2500)},
]


@pytest.mark.parametrize("number", range(len(PLAIN)))
def test_plain_values_come_back_with_their_types(number: int) -> None:
    found = safe(encode_archive(PLAIN[number]))
    assert found == PLAIN[number]
    assert type(found) is type(PLAIN[number])
    assert repr(found) == repr(PLAIN[number])


def test_what_our_readers_made_becomes_what_it_was() -> None:
    value = [
        Ordered({"a": 1}),
        Dtype("bfloat16"),
        NamedValue("dtype", "float32"),
        NamedValue("size", (2, 3)),
        NamedValue("device", "cuda:1"),
        NamedValue("device", "cpu"),
    ]
    found = safe(encode_archive(value))
    expected = [OrderedDict(a=1), torch.bfloat16, torch.float32, torch.Size((2, 3))]
    assert found == [*expected, torch.device("cuda", 1), torch.device("cpu")]


@pytest.mark.parametrize(
    "value", [InstanceStub("a.B"), frozenset([1]), object(), NamedValue("numpy", "float32 0000003f")]
)
def test_what_the_safe_loader_would_refuse_is_refused_by_path(value: object) -> None:
    with pytest.raises(UnsupportedError, match=r"groups\.0\.odd"):
        encode_archive({"groups": [{"odd": value}]})


def test_types_that_torch_lacks_are_refused_by_path() -> None:
    with pytest.raises(UnsupportedError, match=r"model\.w.*float4"):
        plan_archive({"model": {"w": TensorValue(0, "float4_e2m1fn", (2,))}}, [Storage("float4_e2m1fn", 2)])


@pytest.mark.parametrize("is_mapped", [False, True])
def test_torch_loads_a_file_that_does_not_keep_the_order_of_the_model(is_mapped: bool, tmp_path: Path) -> None:
    plan = plan_archive({"t": TensorValue(0, "uint8", (4,))}, [Storage("uint8", 4)], keeps_order=False)
    with open(tmp_path / "a.pt", "wb") as file:
        writer = ArchiveWriter(plan, file.write)
        writer.write(b"abcd")
        writer.close()
    assert bytes(torch.load(tmp_path / "a.pt", weights_only=True, mmap=is_mapped)["t"].tolist()) == b"abcd"
    assert not open_checkpoint(str(tmp_path / "a.pt")).manifest.keeps_order


def test_a_cycle_ends() -> None:
    cycle: list[object] = []
    cycle.append(cycle)
    with pytest.raises(UnsupportedError, match="deep"):
        encode_archive(cycle)


def test_the_bytes_given_must_be_the_bytes_promised() -> None:
    archive = plan_archive([TensorValue(0, "uint8", (4,))], [Storage("uint8", 4)])
    writer = ArchiveWriter(archive, lambda data: None)
    writer.write(b"abc")
    with pytest.raises(ValueError, match="1 bytes of archive/data/0"):
        writer.close()
    with pytest.raises(ValueError, match="1 bytes more"):
        writer.write(b"de")


def test_calls_carry_state_and_items() -> None:
    made = GlobalCall(
        GlobalName("collections", "OrderedDict"), items={"a": 1}, state={"_metadata": {"": {"version": 1}}}
    )
    found = safe(encode_archive([made, GlobalName("torch", "float32")]))
    assert found == [OrderedDict(a=1), torch.float32]
    assert found[0]._metadata == {"": {"version": 1}}


def test_strings_and_names_are_written_once() -> None:
    name = "a_long_name_of_a_setting"
    assert encode_pickle([{name: 1}] * 300).count(name.encode()) == 1


def test_entries_and_places_beyond_four_gigabytes_use_the_wide_fields() -> None:
    """Without the bytes: a directory of such an archive is read by Python's zipfile and by us."""
    size = (1 << 32) + 5
    sizes = (size, 3)
    storages = [Storage("uint8", n) for n in sizes]
    archive = plan_archive([TensorValue(i, "uint8", (n,)) for i, n in enumerate(sizes)], storages)
    first, second = (r for r in archive.records if b"/data/" in r.name)
    assert (first.is_wide, first.end - first.start) == (True, size + 24)
    assert second.header > 1 << 32
    tail = _Tail(archive.nbytes)
    writer = ArchiveWriter(archive, tail.write)
    block = bytes(1 << 26)
    for _ in range(size // len(block)):
        writer.write(block)
    writer.write(bytes(size % len(block) + 3))
    writer.close()
    assert tail.at == archive.nbytes
    with zipfile.ZipFile(tail) as opened:
        infos = [opened.getinfo(r.name.decode()) for r in (first, second)]
    assert [(i.file_size, i.header_offset) for i in infos] == [(size, first.header), (3, second.header)]


class _Tail(io.RawIOBase):
    """The last bytes of a file that is too large to keep."""

    KEPT = 4096

    def __init__(self, nbytes: int) -> None:
        self.at = self._seek = 0
        self.nbytes, self._kept = nbytes, b""

    def write(self, data: Any) -> int:
        self.at += len(data)
        self._kept = (self._kept + bytes(data[-self.KEPT :]))[-self.KEPT :]
        return len(data)

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._seek = offset + (0, self._seek, self.nbytes)[whence]
        return self._seek

    def tell(self) -> int:
        return self._seek

    def read(self, size: int = -1) -> bytes:
        start = self._seek - (self.nbytes - len(self._kept))
        found = self._kept[start:] if size < 0 else self._kept[start : start + size]
        self._seek += len(found)
        return found


_leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
_values = st.recursive(
    _leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner), max_leaves=20
)


@settings(max_examples=60, deadline=None)
@given(_values)
def test_any_nest_of_plain_values_comes_back(value: object) -> None:
    assert safe(encode_archive(value)) == value


def test_a_stream_of_bytes_keeps_its_content_and_position() -> None:
    stream = io.BytesIO(b"state")
    stream.seek(2)
    found = pickle.loads(encode_pickle({"extra": [stream]}))["extra"][0]
    assert (found.getvalue(), found.tell()) == (b"state", 2)
