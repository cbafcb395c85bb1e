"""The steps of an output file, carried out on bytes in memory, give the arrays: any sharding, any sizes, any cast."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, permutations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.boxes import Box, contiguous_blocks, full_box, is_contiguous, strides
from shardckpt.dtypes import bits
from shardckpt.manifest import Encoded, Layout, Piece, Span, Strided, TensorEntry
from shardckpt.plan.layout.copy_plan import Batch, Copy, narrow, permute, shift_pieces, squeeze, steps, unsqueeze
from shardckpt.plan.layout.output_files import OutputTensor

KINDS = {"uint8": np.uint8, "float16": np.float16, "float32": np.float32, "float64": np.float64}


class Files:
    """Files in memory, which arrays are put into piece by piece."""

    def __init__(self) -> None:
        self.content: dict[str, bytearray] = {}

    def put(self, file: str, data: bytes, gap: int = 0) -> int:
        content = self.content.setdefault(file, bytearray())
        content += b"\xee" * gap
        content += data
        return len(content) - len(data)


def execute(tensors: list[OutputTensor], files: Files, *, batch_bytes: int, copy_bytes: int) -> bytes:
    """Carry the steps out, naively, and check what they promise on the way."""
    out = bytearray()
    for step in steps(tensors, batch_bytes=batch_bytes, copy_bytes=copy_bytes):
        if isinstance(step, Copy):
            data = files.content[step.file][step.offset : step.offset + step.nbytes]
            assert len(data) == step.nbytes >= copy_bytes
            out += data
            continue
        assert isinstance(step, Batch)
        alone = max(bits(t.tensor.dtype) // 8 for t in step.takes)
        assert step.nbytes <= max(batch_bytes, copy_bytes, alone)
        at = len(out)
        for take in step.takes:
            assert len(out) - at == take.offset, "takes follow one another"
            assert is_contiguous(take.tensor.shape, take.box)
            block = taken(take.tensor, take.box, files)
            if take.source is not None:
                assert files.content[take.source.file][take.source.offset :].startswith(block), "it is stored there"
            out += block
        assert len(out) - at == step.nbytes
    return bytes(out)


def taken(tensor: OutputTensor, box: Box, files: Files) -> bytes:
    entry = tensor.entry
    array = np.zeros(entry.shape, KINDS[entry.stored])
    for piece in entry.pieces:
        raw = bytes(files.content[piece.file])
        width = array.itemsize
        if isinstance(piece.layout, Span):
            part = np.frombuffer(raw, array.dtype, piece.box.volume, piece.layout.offset).reshape(piece.box.size)
        else:
            assert isinstance(piece.layout, Strided)
            start = piece.layout.offset + piece.layout.start * width
            part = np.ndarray(piece.box.size, array.dtype, raw, start, [s * width for s in piece.layout.strides])
        array[where(piece.box)] = part
    return array[where(box)].astype(KINDS[tensor.dtype]).tobytes()


def where(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.offset, box.stop, strict=True))


@st.composite
def sharded(draw: st.DrawFn, files: Files, name: str) -> tuple[OutputTensor, np.ndarray]:
    """A tensor cut into a random grid, its pieces in a random order in two files, some of them as views."""
    kind = draw(st.sampled_from(sorted(KINDS)))
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    array = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 99, shape).astype(KINDS[kind])
    cuts = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    grid = [
        Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell))
        for cell in product(*map(list, map(pairwise, cuts)))
    ]
    pieces = []
    for box in draw(st.permutations(grid)):
        file = draw(st.sampled_from(["a", "b"]))
        part = array[where(box)]
        if draw(st.integers(0, 4)) == 0:
            offset = files.put(file, np.asfortranarray(part).tobytes("F"))
            steps_ = tuple(reversed(strides(tuple(reversed(part.shape)))))
            pieces.append(Piece(box, file, Strided(offset, part.nbytes, 0, steps_)))
        else:
            offset = files.put(file, part.tobytes(), draw(st.sampled_from([0, 0, 0, 3])))
            pieces.append(Piece(box, file, Span(offset, part.nbytes)))
    dtype = draw(st.sampled_from([kind, kind, kind, "float64", "float32"]))
    entry = TensorEntry((name,), shape, kind, tuple(pieces))
    return OutputTensor(name, entry, dtype), array.astype(KINDS[dtype])


@given(st.data(), st.sampled_from([1, 8, 30, 200, 10**6]), st.sampled_from([1, 16, 100, 10**6]))
def test_steps_give_the_arrays_back_to_back(data: st.DataObject, batch_bytes: int, copy_bytes: int) -> None:
    files = Files()
    made = [data.draw(sharded(files, f"t{i}")) for i in range(data.draw(st.integers(0, 5)))]
    out = execute([t for t, _ in made], files, batch_bytes=batch_bytes, copy_bytes=copy_bytes)
    assert out == b"".join(array.tobytes() for _, array in made)


def spans(files: Files, arrays: list[np.ndarray], *, parts: int = 1, dim: int = 0) -> list[OutputTensor]:
    tensors = []
    for i, array in enumerate(arrays):
        pieces, at = [], 0
        for part in np.array_split(array, parts, dim):
            offset = tuple(at if d == dim else 0 for d in range(array.ndim))
            at += part.shape[dim]
            pieces.append(Piece(Box(offset, part.shape), "a", Span(files.put("a", part.tobytes()), part.nbytes)))
        tensors.append(
            OutputTensor(
                f"t{i}", TensorEntry((f"t{i}",), array.shape, str(array.dtype), tuple(pieces)), str(array.dtype)
            )
        )
    return tensors


def test_neighbours_in_one_file_become_one_copy() -> None:
    """A file of many small tensors is copied at once, also where ranks were written one after the other."""
    files = Files()
    tensors = spans(files, [np.arange(10.0) + i for i in range(100)], parts=2)
    [step] = list(steps(tensors, batch_bytes=64, copy_bytes=1000))
    assert step == Copy("a", 0, 8000)


def test_runs_that_are_batched_keep_their_places_unless_their_elements_share_bytes() -> None:
    """A run of half bytes may end inside a byte; whoever assembles it checks that."""
    box, rest = Box((0,), (4,)), Box((4,), (4,))
    for dtype, size, places in (
        ("float32", 16, [Copy("a", 0, 16), Copy("b", 8, 16)]),
        ("float4_e2m1fn", 2, [None, None]),
    ):
        entry = TensorEntry(("w",), (8,), dtype, (Piece(box, "a", Span(0, size)), Piece(rest, "b", Span(8, size))))
        [batch] = steps([OutputTensor("w", entry, dtype)], batch_bytes=4096, copy_bytes=4096)
        assert isinstance(batch, Batch)
        assert [take.source for take in batch.takes] == places


def test_small_runs_are_batched_and_large_ones_copied() -> None:
    files = Files()
    [large] = spans(files, [np.arange(1000.0)])
    files.put("a", b"gap")
    [small] = spans(files, [np.arange(3.0)])
    found = list(steps([small, large, small], batch_bytes=4096, copy_bytes=4096))
    assert [type(s) for s in found] == [Batch, Copy, Batch]


def test_a_tensor_cut_in_its_second_dimension_is_read_in_blocks_of_rows() -> None:
    files = Files()
    array = np.arange(64.0).reshape(8, 8)
    tensors = spans(files, [array], parts=3, dim=1)
    found = list(steps(tensors, batch_bytes=128, copy_bytes=1))
    assert [s.nbytes for s in found] == [128] * 4
    assert execute(tensors, files, batch_bytes=128, copy_bytes=1) == array.tobytes()


def test_a_transposed_view_is_read_in_wide_blocks() -> None:
    """Each of its blocks touches much of the storage, so that every further one reads much of it again."""
    entry = TensorEntry(("t",), (8, 16), "float64", (Piece(full_box((8, 16)), "a", Strided(0, 1024, 0, (1, 8))),))
    rows = entry._replace(pieces=(Piece(full_box((8, 16)), "a", Strided(0, 2048, 0, (32, 1))),))
    sizes = [
        [
            step.nbytes
            for step in steps([OutputTensor("t", e, "float64")], batch_bytes=128, copy_bytes=1, wide_bytes=512)
        ]
        for e in (entry, rows)
    ]
    assert sizes == [[512] * 2, [128] * 8]


def test_a_cast_is_cut_by_the_wider_of_both_types() -> None:
    files = Files()
    [plain] = spans(files, [np.arange(100, dtype=np.float32)])
    cast = OutputTensor("t", plain.entry, "float16")
    found = list(steps([cast], batch_bytes=40, copy_bytes=1))
    assert {s.nbytes for s in found} == {20}
    assert execute([cast], files, batch_bytes=40, copy_bytes=1) == np.arange(100, dtype=np.float16).tobytes()


@pytest.mark.parametrize("batch_bytes", [1, 200, 1000, 5000])
def test_a_quantized_tensor_is_split_at_full_blocks(batch_bytes: int) -> None:
    entry = TensorEntry(("w",), (3, 96), "float32", (Piece(full_box((3, 96)), "f", Span(0, 3 * 96 * 4)),))
    found = list(steps([OutputTensor("w", entry, "q8_0")], batch_bytes=batch_bytes, copy_bytes=1))
    takes = [take for batch in found if isinstance(batch, Batch) for take in batch.takes]
    assert sum(take.box.volume for take in takes) == 3 * 96
    assert all(take.box.volume % 32 == 0 and take.nbytes == take.box.volume // 32 * 34 for take in takes)


@pytest.mark.parametrize("shape", [(101, 2), (7, 4, 2), (202,)])
def test_elements_narrower_than_a_byte_are_copied_as_bytes(shape: tuple[int, ...]) -> None:
    """Cuts between rows of an odd length would fall inside a byte."""
    files = Files()
    half = int(np.prod(shape)) // 2
    data = bytes(range(half)) if half < 256 else bytes(half)
    piece = Piece(full_box(shape), "a", Span(files.put("a", data, gap=5), half))
    tensor = OutputTensor("t", TensorEntry(("t",), shape, "float4_e2m1fn", (piece,)), "float4_e2m1fn")
    for batch_bytes, copy_bytes in ((3, 1), (3, 1000), (1000, 1000)):
        out = execute([tensor], files, batch_bytes=batch_bytes, copy_bytes=copy_bytes)
        assert out == data


def test_a_million_rows_are_planned_without_listing_them() -> None:
    files = Files()
    piece = Piece(full_box((1 << 30, 1 << 10)), "a", Span(0, 1 << 42))
    tensor = OutputTensor("t", TensorEntry(("t",), (1 << 30, 1 << 10), "float32", (piece,)), "float32")
    assert list(steps([tensor], batch_bytes=1 << 30, copy_bytes=1 << 18)) == [Copy("a", 0, 1 << 42)]
    assert not files.content


def test_empty_tensors_take_no_step() -> None:
    tensor = OutputTensor("t", TensorEntry(("t",), (0, 4), "float32", ()), "float32")
    assert list(steps([tensor], batch_bytes=8, copy_bytes=8)) == []
    assert list(contiguous_blocks(full_box((0, 4)), 3)) == []


ARRAY = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
AT = 12
DATA = b"x" * AT + ARRAY.tobytes() + np.ascontiguousarray(ARRAY.transpose(2, 0, 1)).tobytes()
SECOND = AT + ARRAY.nbytes
LAYOUTS: dict[str, Layout] = {
    "span": Span(AT, ARRAY.nbytes),
    "strided": Strided(SECOND, ARRAY.nbytes, 0, (3, 1, 6)),
    "encoded": Encoded("zstd", 0, 0, Span(AT, ARRAY.nbytes)),  # as if the decoded stream were the file
}


def read(pieces: Sequence[Piece], shape: tuple[int, ...]) -> np.ndarray:
    """Return what pieces hold together."""
    found = np.full(shape, -1, np.int32)
    for box, _, layout in pieces:
        inner = layout.inner if isinstance(layout, Encoded) else layout
        assert isinstance(inner, (Span, Strided))
        start, steps = (0, strides(box.size)) if isinstance(inner, Span) else (inner.start, inner.strides)
        part = np.ndarray(box.size, np.int32, DATA, inner.offset + 4 * start, [4 * step for step in steps])
        if isinstance(inner, Span):
            assert inner.nbytes == part.nbytes
        found[tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))] = part
    assert (found >= 0).all()
    return found


@pytest.fixture(params=sorted(LAYOUTS))
def pieces(request: pytest.FixtureRequest) -> list[Piece]:
    return [Piece(full_box(ARRAY.shape), "f", LAYOUTS[request.param])]


def test_every_part_is_found_and_whole_rows_stay_spans(pieces: list[Piece]) -> None:
    ranges = [[(o, n) for o in range(length) for n in range(1, length - o + 1)] for length in ARRAY.shape]
    for chosen in product(*ranges):
        box = Box(tuple(o for o, _ in chosen), tuple(n for _, n in chosen))
        found = narrow(pieces, box, "int32")
        expected = ARRAY[tuple(slice(o, o + n) for o, n in chosen)]
        assert (read(found, box.size) == expected).all()
    [row] = narrow(pieces, Box((1, 0, 0), (1, 3, 4)), "int32")
    assert isinstance(row.layout, type(pieces[0].layout))


def test_a_part_of_a_part_and_what_lies_outside(pieces: list[Piece]) -> None:
    once = narrow(pieces, Box((0, 1, 1), (2, 2, 3)), "int32")
    twice = narrow(once, Box((1, 0, 1), (1, 2, 2)), "int32")
    assert (read(twice, (1, 2, 2)) == ARRAY[1:, 1:, 2:]).all()
    half = [Piece(Box((0, 0, 0), (1, 3, 4)), "f", Span(AT, 48))]
    assert narrow(half, Box((1, 0, 0), (1, 3, 4)), "int32") == []


@pytest.mark.parametrize("dims", list(permutations(range(3))))
def test_every_turn(pieces: list[Piece], dims: tuple[int, ...]) -> None:
    expected = ARRAY.transpose(dims)
    found = permute(pieces, dims)
    assert (read(found, expected.shape) == expected).all()
    part = narrow(found, Box((1, 0, 0), (1, *expected.shape[1:])), "int32")
    assert (read(part, (1, *expected.shape[1:])) == expected[1:2]).all()


@pytest.mark.parametrize("dim", range(4))
def test_a_dimension_more_and_less(pieces: list[Piece], dim: int) -> None:
    more = unsqueeze(pieces, dim)
    assert (read(more, np.expand_dims(ARRAY, dim).shape) == np.expand_dims(ARRAY, dim)).all()
    assert (read(squeeze(more, dim), ARRAY.shape) == ARRAY).all()


def test_pieces_move(pieces: list[Piece]) -> None:
    both = [*pieces, *shift_pieces(pieces, 1, 3)]
    assert (read(both, (2, 6, 4)) == np.concatenate([ARRAY, ARRAY], 1)).all()
