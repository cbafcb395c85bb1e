"""Small objects that torch saved: plain values, or a typed error; nothing runs."""

import io
import pickle
import zipfile
from argparse import Namespace

import pytest
import torch

from shardckpt.encodings.pickle_reader import InstanceStub, TensorStub
from shardckpt.errors import FormatError, UnsafeError, UnsupportedError
from shardckpt.manifest import Span
from shardckpt.readers.torchsave import objects
from shardckpt.readers.torchsave.objects import read_object
from shardckpt.storage.local import LocalStore
from tests.kit.writers.dcp_writers import Malicious, archive


@pytest.fixture
def read(tmp_path):
    def reading(raw):
        (tmp_path / "object").write_bytes(b"before" + raw)
        return read_object(LocalStore(str(tmp_path)), "object", Span(6, len(raw)))

    return reading


def zipped(records):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archived:
        for name, data in records.items():
            archived.writestr(name, data)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "value", [None, True, 3, 0.5, "text", b"bytes", [1, [2]], (1, "x"), {"a": {"b": 1}, 2: []}], ids=repr
)
@pytest.mark.parametrize("form", [archive, pickle.dumps], ids=["archive", "pickle"])
def test_plain_values_come_back(read, value, form):
    assert read(form(value)) == value


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.tensor(0.1, dtype=torch.float64), 0.1),
        (torch.tensor(1.5, dtype=torch.float16), 1.5),
        (torch.tensor([-3], dtype=torch.int8), -3),
        (torch.tensor(True), True),
        (torch.arange(5)[3], 3),
    ],
    ids=str,
)
def test_a_tensor_of_one_element_is_its_number(read, tensor, expected):
    assert read(archive({"lr": [tensor]})) == {"lr": [expected]}


def test_a_larger_tensor_is_only_described(read):
    stub = read(archive([torch.zeros(2, 3)]))[0]

    assert isinstance(stub, TensorStub)
    assert stub.shape == (2, 3)


def test_a_stream_of_bytes_is_its_bytes(read):
    assert read(archive({"extra": io.BytesIO(b"abc")})) == {"extra": b"abc"}


def test_what_is_used_twice_is_replaced_once(read):
    inner = {"stream": io.BytesIO(b"abc")}

    value = read(archive([inner, inner]))

    assert value[0] is value[1]


def test_an_instance_of_a_harmless_class_is_described(read):
    value = read(archive(Namespace(lr=1)))

    assert isinstance(value, InstanceStub)
    assert (value.name, value.state) == ("argparse.Namespace", {"lr": 1})


def test_a_payload_does_not_run(read, tmp_path):
    for form in (archive, pickle.dumps):
        with pytest.raises(UnsafeError, match="system"):
            read(form([Malicious(tmp_path / "ran")]))
    assert not (tmp_path / "ran").exists()


def test_big_endian_numbers_are_refused(read):
    records = {"a/data.pkl": pickle.dumps(1), "a/byteorder": b"big", "a/version": b"3"}

    with pytest.raises(UnsupportedError, match="byte order"):
        read(zipped(records))


@pytest.mark.parametrize(
    "raw",
    [b"", b"\x00\x01", zipped({"a/data.pkl": pickle.dumps(1)}), zipped({"a/version": b"3"}), archive([1, 2])[:300]],
    ids=["empty", "noise", "no version", "no pickle", "cut"],
)
def test_what_is_neither_archive_nor_pickle_is_a_typed_error(read, raw):
    with pytest.raises(FormatError, match="object at byte 6"):
        read(raw)


def test_an_object_beyond_the_limit_is_refused(read, monkeypatch):
    monkeypatch.setattr(objects, "_MAX_OBJECT_BYTES", 100)

    with pytest.raises(UnsafeError, match="too large"):
        read(archive("x"))
