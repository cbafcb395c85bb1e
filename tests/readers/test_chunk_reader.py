"""Any box of a tensor out of any pieces, compared with numpy; and no more bytes read than it takes."""

from __future__ import annotations

import zlib
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from shardckpt.boxes import Box, full_box
from shardckpt.encodings.codecs import DecodedStream
from shardckpt.errors import FormatError, TruncatedError, UnsupportedError
from shardckpt.manifest import Encoded, Piece, Span, Strided
from shardckpt.readers import chunk_reader
from shardckpt.readers.chunk_reader import PieceReader, ReadItem, straight_reads
from shardckpt.storage.resolve_url import open_store
from tests.kit.stores.counting import CountingStore, open_counted

BLOCK = 4096
WIDTHS = {
    "uint8": np.uint8,
    "int16": np.int16,
    "float32": np.float32,
    "float64": np.float64,
    "complex128": np.complex128,
}


def at(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.offset, box.stop, strict=True))


@st.composite
def a_box(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    bounds = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds))


def encoded(codec: str, data: bytes) -> bytes:
    if codec == "zstd":
        return zstandard.ZstdCompressor().compress(data)
    deflate = zlib.compressobj(wbits=-15)
    return deflate.compress(data) + deflate.flush()


class Folder:
    """Pieces of arrays, put into files one after the other."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    def put(self, data: bytes, name: str = "a") -> int:
        file = self.path / name
        start = file.stat().st_size if file.exists() else 0
        with file.open("ab") as out:
            out.write(data)
        return start

    def reader(self) -> tuple[PieceReader, CountingStore]:
        store = CountingStore(open_store(str(self.path)))
        return PieceReader(store), store


def view_of(draw: st.DrawFn, part: np.ndarray) -> tuple[bytes, Strided]:
    """Store `part` as a view of a larger storage: permuted, with a stride, behind a start."""
    order = draw(st.permutations(range(part.ndim)))
    gaps = [draw(st.integers(1, 3)) for _ in order]
    start = draw(st.integers(0, 3))
    steps, step = [0] * part.ndim, 1
    for dim, gap in zip(reversed(order), gaps, strict=True):
        steps[dim] = step * gap
        step *= max(part.shape[dim], 1) * gap
    storage = np.full(start + step, 0x5A, np.uint8).astype(part.dtype)
    length = storage.size
    np.lib.stride_tricks.as_strided(storage[start:], part.shape, [s * part.itemsize for s in steps])[...] = part
    return storage.tobytes(), Strided(0, length * part.itemsize, start, tuple(steps))


@given(data=st.data())
def test_any_box_of_any_grid_of_any_layouts_is_numpys(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    kind = data.draw(st.sampled_from(sorted(WIDTHS)))
    shape = tuple(data.draw(st.lists(st.integers(1, 6), max_size=3)))
    array = np.random.default_rng(1).integers(0, 99, shape).astype(WIDTHS[kind])
    folder = Folder(tmp_path_factory.mktemp("pieces"))
    cuts = [sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    pieces = []
    for cell in product(*(list(pairwise(c)) for c in cuts)):
        box = Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell))
        part = np.array(array[at(box)], order="C")
        layout = data.draw(st.sampled_from(["span", "strided", "zstd", "deflate", "zstd view"]))
        inner: Span | Strided = Span(0, part.nbytes)
        raw = part.tobytes()
        if layout in {"strided", "zstd view"}:
            raw, inner = view_of(data.draw, part)
        if layout in {"span", "strided"}:
            pieces.append(Piece(box, "a", inner._replace(offset=folder.put(raw))))
        else:
            codec, prefix = layout.split()[0], b"x" * data.draw(st.integers(0, 9))
            packed = encoded(codec, prefix + raw)
            inner = inner._replace(offset=len(prefix))
            pieces.append(Piece(box, "a", Encoded(codec, folder.put(packed), len(packed), inner)))
    reader, _ = folder.reader()
    boxes = data.draw(st.lists(a_box(shape), min_size=1, max_size=4))
    buffers = [bytearray(array.itemsize * box.volume) for box in boxes]
    reader.fill([ReadItem(pieces, box, kind, memoryview(b)) for box, b in zip(boxes, buffers, strict=True)])
    for box, buffer in zip(boxes, buffers, strict=True):
        assert bytes(buffer) == np.ascontiguousarray(array[at(box)]).tobytes()
        straight = bytearray(len(buffer))
        reads = straight_reads(ReadItem(pieces, box, kind, memoryview(straight)))
        if reads is not None:
            open_store(str(folder.path)).read(reads)
            assert straight == buffer


@given(data=st.data())
def test_any_torch_view_is_what_torch_says(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Slices with steps, transposes, expanded and overlapping views of one storage."""
    base = torch.arange(120, dtype=torch.int16)
    rank = data.draw(st.integers(0, 3))
    size = tuple(data.draw(st.integers(1, 5)) for _ in range(rank))
    steps = tuple(data.draw(st.integers(0, 7)) for _ in range(rank))
    start = data.draw(st.integers(0, 20))
    view = base.as_strided(size, steps, start)
    folder = Folder(tmp_path_factory.mktemp("views"))
    offset = folder.put(b"junk" + base.numpy().tobytes()) + 4
    reader, _ = folder.reader()
    box = data.draw(a_box(size))
    out = bytearray(2 * box.volume)
    piece = Piece(full_box(size), "a", Strided(offset, 240, start, steps))
    reader.fill([ReadItem([piece], box, "int16", memoryview(out))])
    assert bytes(out) == np.ascontiguousarray(view.numpy()[at(box)]).tobytes()


def test_dimensions_of_one_index_count_for_nothing(tmp_path: Path) -> None:
    """Torch holds any number of them, numpy 64."""
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    folder = Folder(tmp_path / "s")
    ones = (1,) * 90
    layout = Strided(folder.put(array.tobytes()), 12, 0, (*ones, 1, 3))
    reader, _ = folder.reader()
    out = bytearray(12)
    box = full_box((*ones, 3, 2))
    reader.fill([ReadItem([Piece(box, "a", layout)], box, "int16", memoryview(out))])
    assert bytes(out) == array.T.tobytes()


def test_rows_go_straight_to_their_place_and_columns_do_not() -> None:
    pieces = [Piece(Box((0, n), (4, 2)), "a", Span(16 * n, 32)) for n in (0, 2)]
    rows = [Piece(Box((n, 0), (2, 4)), "b", Span(16 * n, 32)) for n in (0, 2)]
    column, whole_ = Box((1, 1), (2, 1)), Box((0, 0), (4, 4))
    for of, box, found in (
        (rows, whole_, [("b", 0, 32), ("b", 32, 32)]),
        (rows, Box((1, 0), (2, 4)), [("b", 16, 16), ("b", 32, 16)]),
        (rows, Box((0, 0), (2, 4)), [("b", 0, 32)]),
        (pieces, column, [("a", 12, 4), ("a", 20, 4)]),
        (pieces, whole_, None),
    ):
        reads = straight_reads(ReadItem(of, box, "float32", memoryview(bytearray(4 * box.volume))))
        assert (reads and [(name, at, len(buffer)) for name, at, buffer in reads]) == found


def test_layers_with_equal_boxes_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0
    intersect = chunk_reader.intersect

    def count(a: Box, b: Box) -> Box | None:
        nonlocal compared
        compared += 1
        return intersect(a, b)

    monkeypatch.setattr(chunk_reader, "intersect", count)
    rows, box = [Box((n, 0), (2, 1009)) for n in (0, 2, 4)], Box((1, 0), (2, 1009))
    for layer in range(100):
        pieces = [Piece(row, str(layer), Span(100 * layer, 8072)) for row in rows]
        reads = straight_reads(ReadItem(pieces, box, "float32", memoryview(bytearray(8072))))
        assert reads is not None
        assert [read[:2] for read in reads] == [(str(layer), 100 * layer + 4036), (str(layer), 100 * layer)]
    assert compared == 3


class TestBytesRead:
    """One row of one tensor costs that row, rounded to a block; nothing else of the file is touched."""

    SHAPE = (1000, 300)

    def fill(self, folder: Folder, piece: Piece, box: Box) -> tuple[np.ndarray, CountingStore]:
        reader, store = folder.reader()
        out = bytearray(4 * box.volume)
        reader.fill([ReadItem([piece], box, "float32", memoryview(out))])
        return np.frombuffer(out, np.float32).reshape(box.size), store

    def test_a_row_of_a_span(self, tmp_path: Path) -> None:
        array = np.arange(300_000, dtype=np.float32).reshape(self.SHAPE)
        folder = Folder(tmp_path / "s")
        piece = Piece(full_box(self.SHAPE), "a", Span(folder.put(array.tobytes()), array.nbytes))
        found, store = self.fill(folder, piece, Box((500, 0), (1, 300)))
        assert (found == array[500:501]).all()
        assert store.nbytes == 1200

    def test_a_column_of_a_span(self, tmp_path: Path) -> None:
        array = np.arange(300_000, dtype=np.float32).reshape(self.SHAPE)
        folder = Folder(tmp_path / "s")
        piece = Piece(full_box(self.SHAPE), "a", Span(folder.put(array.tobytes()), array.nbytes))
        found, store = self.fill(folder, piece, Box((0, 7), (1000, 2)))
        assert (found == array[:, 7:9]).all()
        assert store.nbytes == 8000
        assert store.batches == 1

    def test_a_row_of_a_slice_with_steps(self, tmp_path: Path) -> None:
        base = np.arange(600_000, dtype=np.float32)
        folder = Folder(tmp_path / "s")
        layout = Strided(folder.put(base.tobytes()), base.nbytes, 0, (600, 1))
        found, store = self.fill(folder, Piece(full_box(self.SHAPE), "a", layout), Box((500, 0), (1, 300)))
        assert (found == base.reshape(1000, 600)[500:501, :300]).all()
        assert store.nbytes <= 1200 + BLOCK

    def test_a_row_of_a_transposed_tensor(self, tmp_path: Path) -> None:
        """Its elements lie far apart: each costs at most a block, never the whole storage."""
        base = np.arange(300_000, dtype=np.float32).reshape(300, 1000)
        folder = Folder(tmp_path / "s")
        layout = Strided(folder.put(base.tobytes()), base.nbytes, 0, (1, 1000))
        found, store = self.fill(folder, Piece(full_box(self.SHAPE), "a", layout), Box((500, 0), (1, 300)))
        assert (found == base.T[500:501]).all()
        assert store.nbytes <= 300 * BLOCK // 2
        assert store.nbytes < base.nbytes

    def test_an_expanded_tensor_costs_its_one_row(self, tmp_path: Path) -> None:
        folder = Folder(tmp_path / "s")
        row = np.arange(300, dtype=np.float32)
        layout = Strided(folder.put(row.tobytes()), row.nbytes, 0, (0, 1))
        found, store = self.fill(folder, Piece(full_box(self.SHAPE), "a", layout), full_box(self.SHAPE))
        assert (found == row).all()
        assert store.nbytes == row.nbytes

    def test_pieces_beside_the_box_are_not_read(self, tmp_path: Path) -> None:
        folder = Folder(tmp_path / "s")
        halves = [np.full((5, 4), i, np.float32) for i in range(2)]
        pieces = [
            Piece(Box((5 * i, 0), (5, 4)), f"{i}", Span(folder.put(h.tobytes(), f"{i}"), h.nbytes))
            for i, h in enumerate(halves)
        ]
        reader, store = folder.reader()
        out = bytearray(16)
        reader.fill([ReadItem(pieces, Box((7, 0), (1, 4)), "float32", memoryview(out))])
        assert {name for name, _, _ in store.ranges} == {"1"}


READABLE = [
    "dcp_fsdp2_llama_w2/ckpt",
    "hf_pretrained_llama/ckpt",
    "hf_dcp_writer_llama_w2/ckpt",
    "torch_save_zip_nasty/ckpt",
    "torch_save_legacy_nasty/ckpt",
    "fabric_fsdp_full_nasty_w2/ckpt.ckpt",
    "fabric_fsdp_sharded_gpt2_w2/ckpt",
    "accelerate_fsdp1_sharded_llama_w2/ckpt",
    "accelerate_fsdp1_full_gpt2_w2/ckpt",
    "peft_lora_llama/ckpt",
]


@pytest.mark.parametrize("name", READABLE)
def test_a15_one_row_of_a_checkpoint_costs_a_row_and_headers(name: str, fixtures: Path) -> None:
    reader, store = open_counted(str(fixtures / name))
    entry = max((e for e in reader.manifest.tensors.values() if len(e.shape) == 2), key=lambda e: e.nbytes)
    before = store.nbytes
    pieces = reader.resolve(entry.pieces)
    headers = store.nbytes - before
    before = store.nbytes
    out = bytearray(entry.nbytes // entry.shape[0])
    box = Box((entry.shape[0] // 2, 0), (1, entry.shape[1]))
    PieceReader(store).fill([ReadItem(pieces, box, entry.stored, memoryview(out))])
    assert store.nbytes - before <= len(out) + BLOCK
    assert headers <= 16 * BLOCK * len(pieces), "opening a container reads its directory, not its data"


def test_a15_a_row_of_a_large_tensor_does_not_read_the_tensor(tmp_path: Path) -> None:
    big = torch.arange(1 << 20, dtype=torch.float32).reshape(1024, 1024)
    save_file({"w": big}, tmp_path / "model.safetensors")
    torch.save({"w": big}, tmp_path / "a.pt")
    for source in (tmp_path / "model.safetensors", tmp_path / "a.pt"):
        reader, store = open_counted(str(source))
        entry = reader.manifest.tensors[("w",)]
        out = bytearray(4096)
        pieces = reader.resolve(entry.pieces)
        PieceReader(store).fill([ReadItem(pieces, Box((77, 0), (1, 1024)), "float32", memoryview(out))])
        assert bytes(out) == big[77].numpy().tobytes()
        assert store.nbytes <= 4096 + BLOCK + 80_000, "headers and one row"


class TestDamage:
    def want(self, piece: Piece, n: int = 16) -> ReadItem:
        return ReadItem([piece], full_box((n,)), "uint8", memoryview(bytearray(n)))

    def test_a_file_that_ends_early(self, tmp_path: Path) -> None:
        folder = Folder(tmp_path / "s")
        folder.put(bytes(10))
        with pytest.raises(TruncatedError):
            folder.reader()[0].fill([self.want(Piece(full_box((16,)), "a", Span(0, 16)))])

    @pytest.mark.parametrize("codec", ["zstd", "deflate"])
    @pytest.mark.parametrize("cut", ["short", "garbage", "short stream"])
    def test_a_stream_that_ends_early_or_is_none(self, tmp_path: Path, codec: str, cut: str) -> None:
        folder = Folder(tmp_path / "s")
        good = encoded(codec, bytes(range(16)) * (1 if cut != "short stream" else 0) + b"x")
        data = {"short": good[:-4], "garbage": b"\xff" * 40, "short stream": good}[cut]
        folder.put(data)
        layout = Encoded(codec, 0, len(data), Span(4, 16))
        with pytest.raises(FormatError):
            folder.reader()[0].fill([self.want(Piece(full_box((16,)), "a", layout))])

    def test_a_codec_that_nobody_knows(self, tmp_path: Path) -> None:
        folder = Folder(tmp_path / "s")
        folder.put(bytes(10))
        with pytest.raises(UnsupportedError, match="lzma"):
            folder.reader()[0].fill([self.want(Piece(full_box((16,)), "a", Encoded("lzma", 0, 10, Span(0, 16))))])

    def test_a_cut_inside_a_byte(self, tmp_path: Path) -> None:
        folder = Folder(tmp_path / "s")
        folder.put(bytes(10))
        piece = Piece(full_box((2, 3)), "a", Span(0, 3))
        with pytest.raises(UnsupportedError, match="inside a byte"):
            folder.reader()[0].fill([ReadItem([piece], Box((1, 0), (1, 3)), "float4_e2m1fn", memoryview(bytearray(2)))])


def test_a_large_box_of_a_scattered_view_is_read_in_few_pieces_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run of four elements lies 2 KiB from the next: neither a call for each, nor all of them held at once."""
    array = np.arange(1 << 21, dtype=np.float32).reshape(32, 128, 512)
    folder = Folder(tmp_path / "s")
    layout = Strided(folder.put(array.tobytes()), array.nbytes, 0, (1, 512, 512 * 128))
    reader, store = folder.reader()
    batches: list[list[int]] = []
    real = type(store).read
    monkeypatch.setattr(
        type(store), "read", lambda self, reads: (batches.append([len(r.buffer) for r in reads]), real(self, reads))[1]
    )
    box, piece = Box((4, 0, 0), (16, 128, 32)), Piece(full_box((512, 128, 32)), "a", layout)
    out = bytearray(box.volume * 4)
    reader.fill([ReadItem([piece], box, "float32", memoryview(out))])
    assert bytes(out) == array.transpose()[at(box)].tobytes()
    assert sum(map(len, batches)) <= 64, "not one call a run"
    assert max(map(sum, batches)) <= 3 << 20, "not all of the storage at once"


def test_a_scattered_view_of_a_stream_is_decoded_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.arange(1 << 16, dtype=np.float32).reshape(64, 1024)
    folder = Folder(tmp_path / "s")
    data = encoded("zstd", array.tobytes())
    layout = Encoded("zstd", folder.put(data), len(data), Strided(0, array.nbytes, 0, (1, 1024)))
    reader, _ = folder.reader()
    restarts: list[int] = []
    real = DecodedStream._restart
    monkeypatch.setattr(DecodedStream, "_restart", lambda self: (restarts.append(1), real(self))[1])
    box = Box((0, 0), (4, 64))
    out = bytearray(box.volume * 4)
    reader.fill([ReadItem([Piece(full_box((1024, 64)), "a", layout)], box, "float32", memoryview(out))])
    assert bytes(out) == array.transpose()[at(box)].tobytes()
    assert len(restarts) == 1
