"""Streams are decoded forward in bounded memory; damage and bombs are typed errors."""

from __future__ import annotations

import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.encodings.codecs import MAX_WINDOW_BYTES, DecodedStream
from shardckpt.errors import CheckpointError, FormatError, TruncatedError
from shardckpt.manifest import Encoded, Span
from shardckpt.storage.resolve_url import open_store
from tests.kit.stores.counting import CountingStore


def deflated(data: bytes) -> bytes:
    deflate = zlib.compressobj(1, wbits=-15)
    return deflate.compress(data) + deflate.flush()


ENCODE = {"zstd": zstandard.ZstdCompressor().compress, "deflate": deflated}


def stream(folder: Path, codec: str, packed: bytes, before: bytes = b"") -> tuple[DecodedStream, CountingStore]:
    (folder / "a").write_bytes(before + packed + b"after")
    store = CountingStore(open_store(str(folder)))
    return DecodedStream(store, "a", Encoded(codec, len(before), len(packed), Span(0, 0))), store


@pytest.mark.parametrize("codec", ["zstd", "deflate"])
@given(data=st.data())
def test_ranges_come_out_in_any_order(
    codec: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytes(data.draw(st.lists(st.integers(0, 255), max_size=60))) * 9
    decoded, _ = stream(tmp_path_factory.mktemp("c"), codec, ENCODE[codec](content), b"junk")
    for _ in range(3):
        start = data.draw(st.integers(0, len(content)))
        out = bytearray(data.draw(st.integers(0, len(content) - start)))
        decoded.read_into(start, memoryview(out))
        assert bytes(out) == content[start : start + len(out)]
    assert decoded.head(20) == content[:20]


@pytest.mark.parametrize("codec", ["zstd", "deflate"])
def test_reading_forward_decodes_once(codec: str, tmp_path: Path) -> None:
    content = bytes(i * 7919 % 251 for i in range(3 << 20))
    packed = ENCODE[codec](content)
    decoded, store = stream(tmp_path, codec, packed)
    for start in range(0, len(content), 1 << 18):
        out = bytearray(1 << 18)
        decoded.read_into(start, memoryview(out))
    assert store.nbytes <= len(packed)


def test_frames_back_to_back_are_one_stream(tmp_path: Path) -> None:
    decoded, _ = stream(tmp_path, "zstd", b"".join(ENCODE["zstd"](bytes([i]) * 1000) for i in range(5)))
    out = bytearray(3000)
    decoded.read_into(500, memoryview(out))
    assert out[499] == 0
    assert out[500] == 1
    assert out[2999] == 3


@pytest.mark.parametrize("codec", ["zstd", "deflate"])
@given(packed=st.binary(max_size=80))
def test_any_bytes_are_a_stream_or_a_typed_error(
    codec: str, packed: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    decoded, _ = stream(tmp_path_factory.mktemp("c"), codec, packed)
    try:
        decoded.read_into(0, memoryview(bytearray(100)))
    except CheckpointError as error:
        assert str(error).isprintable()


@pytest.mark.parametrize("codec", ["zstd", "deflate"])
def test_a_stream_that_ends_early_says_where(codec: str, tmp_path: Path) -> None:
    decoded, _ = stream(tmp_path, codec, ENCODE[codec](bytes(100)))
    with pytest.raises(TruncatedError, match="100 decoded bytes"):
        decoded.read_into(50, memoryview(bytearray(51)))


@pytest.mark.parametrize("codec", ["zstd", "deflate"])
@pytest.mark.timeout(20)
def test_bytes_behind_a_stream_do_not_keep_it_open(codec: str, tmp_path: Path) -> None:
    """Read in small steps up to its end, with more behind it: zlib then holds those bytes back for ever."""
    decoded, _ = stream(tmp_path, codec, ENCODE[codec](bytes(range(200)) * 9) + b"more" * 50)
    with pytest.raises(FormatError):
        for start in range(0, 2000, 100):
            decoded.read_into(start, memoryview(bytearray(100)))


def test_a_window_that_only_asks_for_memory_is_refused(tmp_path: Path) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=29, compression_level=1, write_content_size=0)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    packed = packer.compress(bytes(1000)) + packer.flush()
    assert zstandard.get_frame_parameters(packed).window_size > MAX_WINDOW_BYTES
    decoded, _ = stream(tmp_path, "zstd", packed)
    with pytest.raises(FormatError):
        decoded.read_into(0, memoryview(bytearray(10)))


@pytest.mark.parametrize("codec", ["zstd", "deflate"])
def test_a_bomb_costs_no_memory(codec: str, tmp_path: Path) -> None:
    """128 MiB of zeros in few bytes: only what is asked for is ever held."""
    packer = zstandard.ZstdCompressor().compressobj() if codec == "zstd" else zlib.compressobj(9, wbits=-15)
    block = bytes(1 << 24)
    packed = b"".join(packer.compress(block) for _ in range(8)) + packer.flush()
    (tmp_path / "a").write_bytes(packed)
    code = f"""
import resource
from shardckpt.encodings.codecs import DecodedStream
from shardckpt.manifest import Encoded, Span
from shardckpt.storage.resolve_url import open_store
stream = DecodedStream(open_store({str(tmp_path)!r}), "a", Encoded({codec!r}, 0, {len(packed)}, Span(0, 0)))
stream.read_into(0, memoryview(bytearray(10)))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
out = bytearray(100)
stream.read_into((1 << 27) - 100, memoryview(out))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    grown = int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
    assert grown < 24 << 10, f"{grown} KiB"
