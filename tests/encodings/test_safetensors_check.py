"""Written safetensors files are read by the library's own reader, which has the last word before they are published."""

from __future__ import annotations

import io
import json
import struct
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.dtypes import SAFETENSORS_NAMES
from shardckpt.encodings import safetensors_check
from shardckpt.encodings.safetensors import HeaderTensor, encode_header
from shardckpt.encodings.safetensors_check import HeaderCopy, create_checked, require_readable
from shardckpt.errors import FormatError
from shardckpt.storage.local import LocalStore
from shardckpt.storage.publish import JoinedPublication, publish, start_publication
from tests.kit.stores.kinds import FILE, FOLDER

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def raw(body: object) -> bytes:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return struct.pack("<Q", len(text)) + text


def is_opened(path: Path, content: bytes) -> bool:
    """Tell what the library does with a real file."""
    path.write_bytes(content)
    try:
        with safetensors.safe_open(path, framework="numpy"):
            return True
    except safetensors.SafetensorError:
        return False


def is_accepted(header: bytes, nbytes: int) -> bool:
    try:
        require_readable(header, nbytes, where="x.safetensors")
    except FormatError:
        return False
    return True


HEADERS: dict[str, tuple[object, int]] = {
    "right": ({"a": F32}, 8),
    "spaces": (b'  {"a" : {"dtype": "F32", "shape": [2], "data_offsets": [ 0 , 8 ]}}   ', 8),
    "nothing": ({}, 0),
    "empty tensor": ({"a": {**F32, "shape": [0], "data_offsets": [0, 0]}}, 0),
    "any order": ({"b": {**F32, "data_offsets": [8, 16]}, "a": F32}, 16),
    "a name that looks like an end": ({'"data_offsets":[0,99]': F32}, 8),
    "escaped key": (b'{"a":{"dtype":"F32","shape":[2],"data\\u005foffsets":[0,8]}}', 8),
    "one byte short": ({"a": F32}, 7),
    "no data": ({"a": F32}, 0),
    "one byte more": ({"a": F32}, 9),
    "data of nothing": ({}, 1),
    "overlap": ({"a": F32, "b": F32}, 8),
    "hole": ({"a": F32, "b": {**F32, "data_offsets": [12, 20]}}, 20),
    "hole at the start": ({"a": {**F32, "data_offsets": [8, 16]}}, 16),
    "backward": ({"a": {**F32, "data_offsets": [8, 0]}}, 8),
    "unknown dtype": ({"a": {**F32, "dtype": "F7"}}, 8),
    "another shape": ({"a": {**F32, "shape": [3]}}, 8),
    "negative": ({"a": {**F32, "shape": [-1]}}, 8),
    "overflow": ({"a": {**F32, "shape": [2**40, 2**40]}}, 8),
    "half a byte": ({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}}, 1),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, 0),
    "no tensor": ({"a": 3}, 8),
    "no object": (b"[]", 0),
    "not closed": (b"{", 0),
    "not UTF-8": (b'{"a":\xff}', 0),
}


@pytest.mark.parametrize("case", HEADERS)
def test_it_accepts_exactly_what_the_library_opens(case: str, tmp_path: Path) -> None:
    body, data = HEADERS[case]
    header = raw(body)
    wanted = is_opened(tmp_path / "x.safetensors", header + bytes(data))
    assert is_accepted(header, len(header) + data) == wanted
    assert wanted == (list(HEADERS).index(case) < list(HEADERS).index("one byte short"))


@pytest.mark.parametrize("content", [b"", b"abc", struct.pack("<Q", 200_000_000) + b"{}", struct.pack("<Q", 9) + b"{}"])
def test_a_header_that_ends_early_is_refused(content: bytes, tmp_path: Path) -> None:
    assert not is_opened(tmp_path / "x.safetensors", content)
    assert not is_accepted(content, len(content))


@pytest.mark.parametrize("dtype", SAFETENSORS_NAMES)
def test_every_type_that_is_written_is_accepted(dtype: str) -> None:
    tensor = HeaderTensor("a", dtype, (8,))
    header = encode_header([tensor], {"format": "pt"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        require_readable(header, len(header) + tensor.nbytes, where="x.safetensors")


def test_a_refusal_says_what_the_library_said() -> None:
    with pytest.raises(
        FormatError, match=r"^x: the safetensors library refuses .* invalid offset for tensor `b`.*nothing"
    ):
        require_readable(raw({"a": F32, "b": {**F32, "data_offsets": [12, 20]}}), 999, where="x")


class OlderLibrary:
    """The library before it knew a type."""

    def __init__(self, lacks: str) -> None:
        self.lacks = lacks
        self.__version__ = "0.1.0"
        self.SafetensorError = safetensors.SafetensorError

    def deserialize(self, header: bytes) -> Any:
        if f'"{self.lacks}"'.encode() in header:
            raise safetensors.SafetensorError(f"unknown variant `{self.lacks}`")
        return safetensors.deserialize(header)


def test_a_type_that_an_older_library_does_not_know_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_check, "safetensors", OlderLibrary("F8_E4M3"))
    header = raw({"a": F32, "b": {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [8, 9]}})
    with pytest.warns(RuntimeWarning, match=r"safetensors 0\.1\.0 does not know the type F8_E4M3"):
        require_readable(header, len(header) + 9, where="x")
    with pytest.raises(FormatError):
        require_readable(raw({"a": {**F32, "dtype": "F7"}}), 999, where="x")


def test_numpy_is_not_imported() -> None:
    code = (
        "import sys, json, struct\n"
        "from shardckpt.encodings.safetensors_check import require_readable\n"
        f"require_readable({raw({'a': F32})!r}, {len(raw({'a': F32})) + 8}, where='x')\n"
        "assert not {'numpy', 'torch'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class Memory(io.BytesIO):
    """A writer into memory."""

    def copy_from(self, source: LocalStore, name: str, offset: int, nbytes: int) -> None:
        self.write((Path(source.url) / name).read_bytes()[offset : offset + nbytes])


@given(st.lists(st.tuples(st.integers(0, 90), st.booleans())))
def test_the_header_is_kept_however_it_is_written(tmp_path_factory: Any, steps: list[tuple[int, bool]]) -> None:
    header = raw({"a": F32})
    content = header + bytes(range(100)) * 2
    folder = tmp_path_factory.getbasetemp()
    (folder / "content").write_bytes(content)
    store, memory, at = LocalStore(str(folder)), Memory(), 0
    copy = HeaderCopy(memory)  # type: ignore[arg-type]
    for nbytes, is_copied in [*steps, (len(content), False)]:
        part = content[at : at + nbytes]
        copy.copy_from(store, "content", at, len(part)) if is_copied else copy.write(part)
        at += len(part)
    assert memory.getvalue() == content
    assert (bytes(copy.content), copy.nbytes) == (header, len(content))


BROKEN = raw({"a": {**F32, "shape": [3]}}) + bytes(8)
RIGHT = raw({"a": F32}) + bytes(8)


class TestPublishing:
    def write(self, url: str, content: bytes, *, overwrite: bool = False) -> None:
        kind = FILE if url.endswith(".safetensors") else FOLDER
        name = "model.safetensors" if kind is FOLDER else url.rpartition("/")[2]
        with (
            publish(url, kind, overwrite=overwrite, needed_bytes=0, last="index.json") as publication,
            create_checked(publication, name) as writer,
        ):
            writer.write(content[:20])
            writer.write(content[20:])

    @pytest.mark.parametrize("target", ["folder", "one.safetensors"])
    @pytest.mark.parametrize("place", ["DISK", "memory://checked"])
    def test_a_refused_file_is_not_published(self, place: str, target: str, tmp_path: Path) -> None:
        url = f"{tmp_path if place == 'DISK' else place}/{tmp_path.name}/{target}"
        with pytest.raises(FormatError, match="refuses the written file"):
            self.write(url, BROKEN)
        self.write(url, RIGHT)  # nothing is there, so that overwrite is not needed

    def test_a_link_is_followed_as_the_target_is(self, tmp_path: Path) -> None:
        (tmp_path / "real.safetensors").write_bytes(b"")
        (tmp_path / "link.safetensors").symlink_to("real.safetensors")
        with pytest.raises(FormatError):
            self.write(str(tmp_path / "link.safetensors"), BROKEN, overwrite=True)
        self.write(str(tmp_path / "link.safetensors"), RIGHT, overwrite=True)
        assert (tmp_path / "real.safetensors").read_bytes() == RIGHT

    def test_what_the_disk_has_is_read_and_not_what_was_meant(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write = LocalStore.create

        def spoilt(store: LocalStore, name: str) -> Any:
            writer = write(store, name)
            put = writer.write
            monkeypatch.setattr(writer, "write", lambda data: put(bytes(data).replace(b"F32", b"F16")))
            return writer

        monkeypatch.setattr(LocalStore, "create", spoilt)
        with pytest.raises(FormatError):
            self.write(str(tmp_path / "folder"), RIGHT)

    def test_a_rank_that_joined_checks_its_files_too(self, tmp_path: Path) -> None:
        first = start_publication(str(tmp_path / "out"), FOLDER, overwrite=False, needed_bytes=0)
        joined = JoinedPublication(first.staging_url)
        with pytest.raises(FormatError), create_checked(joined, "model.safetensors") as writer:
            writer.write(BROKEN)
        joined.rollback()
        first.rollback()
        assert list(tmp_path.iterdir()) == []

    def test_other_files_are_not_looked_at(self, tmp_path: Path) -> None:
        with (
            publish(str(tmp_path / "out"), FOLDER, overwrite=False, needed_bytes=0) as publication,
            create_checked(publication, "a.bin") as writer,
        ):
            writer.write(BROKEN)
        assert (tmp_path / "out" / "a.bin").read_bytes() == BROKEN
