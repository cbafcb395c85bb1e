"""What is missing, doubled, cut short or impossible is found before a byte is read, and named."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.boxes import Box, full_box
from shardckpt.errors import FormatError, IncompleteError, OverlapError, TruncatedError
from shardckpt.manifest import Encoded, Lazy, Manifest, Piece, Span, Strided, TensorEntry
from shardckpt.plan.layout import coverage
from shardckpt.plan.layout.coverage import faults, require_complete

BIG = 1 << 80


def manifest(*pieces: Piece, shape: tuple[int, ...] = (4,), stored: str = "float32", size: int = 100) -> Manifest:
    entry = TensorEntry(("model", "w"), shape, stored, pieces)
    return Manifest("test", {"a.bin": size, "gone.bin": -1}, {entry.path: entry})


def kinds(found: Manifest) -> list[str]:
    return [fault.kind for fault in faults(found, found.tensors.values())]


def span(start: int, stop: int, offset: int = 0, file: str = "a.bin") -> Piece:
    return Piece(Box((start,), (stop - start,)), file, Span(offset, 4 * (stop - start)))


def test_pieces_that_cover_an_array_have_no_fault() -> None:
    assert kinds(manifest(span(0, 4))) == []
    assert kinds(manifest(span(2, 4), span(0, 2))) == []
    assert kinds(manifest(Piece(Box((), ()), "a.bin", Span(96, 4)), shape=())) == []
    assert kinds(manifest(shape=(0, 4))) == []
    assert kinds(manifest(Piece(full_box((4,)), "a.bin", Lazy(0, 100)))) == []
    assert kinds(manifest(Piece(full_box((4,)), "a.bin", Encoded("zstd", 0, 9, Span(7, 16))))) == []


def test_boxes_that_many_layers_have_are_checked_once_and_their_files_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked = 0
    is_grid = coverage.is_grid

    def count(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
        nonlocal checked
        checked += 1
        return is_grid(shape, boxes)

    monkeypatch.setattr(coverage, "is_grid", count)
    for layer in range(100):
        pieces = [span(0, 1013, 8 * layer), span(1013, 2027, 4052 + 8 * layer)]
        found = kinds(manifest(*pieces, shape=(2027,), size=8500))
        assert found == ([] if 8108 + 8 * layer <= 8500 else ["truncated"])
    assert checked == 1


def test_containers_that_tile_an_array_are_compared_with_their_files_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    covered = []
    monkeypatch.setattr(coverage, "cover", lambda *given, **_: covered.append(given))
    for layer in range(100):
        pieces = [Piece(Box((start,), (1000,)), "a.bin", Lazy(4 * start + layer, 4000)) for start in (0, 1000)]
        assert kinds(manifest(*pieces, shape=(2000,), size=8100)) == []
    assert covered == []


@pytest.mark.parametrize(
    ("pieces", "kind", "error"),
    [
        ([], "gap", IncompleteError),
        ([span(0, 3)], "gap", IncompleteError),
        ([span(0, 3), span(2, 4)], "overlap", OverlapError),
        ([span(0, 4), span(0, 4)], "overlap", OverlapError),
        ([span(0, 4, offset=85)], "truncated", TruncatedError),
        ([span(0, 4, file="gone.bin")], "missing_file", IncompleteError),
        ([span(0, 4, file="never.bin")], "missing_file", IncompleteError),
        ([span(0, 5)], "invalid", FormatError),
        ([span(-1, 3)], "invalid", FormatError),
        ([span(0, 4, offset=-1)], "invalid", FormatError),
        ([span(0, 4, offset=BIG)], "truncated", TruncatedError),
        ([Piece(full_box((4,)), "a.bin", Span(0, 15))], "invalid", FormatError),
        ([Piece(full_box((4,)), "a.bin", Span(0, -16))], "invalid", FormatError),
        ([Piece(Box((0,), (BIG,)), "a.bin", Span(0, 4 * BIG))], "invalid", FormatError),
        ([Piece(full_box((4, 1)), "a.bin", Span(0, 16))], "invalid", FormatError),
        ([Piece(full_box((4,)), "a.bin", Strided(0, 16, 0, (2,)))], "invalid", FormatError),
        ([Piece(full_box((4,)), "a.bin", Strided(0, 16, -1, (1,)))], "invalid", FormatError),
        ([Piece(full_box((4,)), "a.bin", Strided(0, 16, 3, (-1,)))], "invalid", FormatError),
        ([Piece(full_box((4,)), "a.bin", Strided(0, 16, 0, (1, 1)))], "invalid", FormatError),
        ([Piece(full_box((4,)), "a.bin", Strided(0, 16, 0, (BIG,)))], "invalid", FormatError),
        ([Piece(full_box((4,)), "a.bin", Encoded("zstd", 90, 11, Span(0, 16)))], "truncated", TruncatedError),
        ([Piece(full_box((4,)), "a.bin", Encoded("zstd", 0, 9, Span(0, 12)))], "invalid", FormatError),
        ([Piece(full_box((4,)), "a.bin", Lazy(90, 11))], "truncated", TruncatedError),
        ([Piece(full_box((4,)), "a.bin", Lazy(-1, 11))], "invalid", FormatError),
        ([Piece(full_box((4,)), "a.bin", Lazy(0, -1))], "invalid", FormatError),
        ([Piece(full_box((4,)), "gone.bin", Lazy(0, 0))], "missing_file", IncompleteError),
        ([Piece(full_box((3,)), "a.bin", Lazy(0, 11))], "gap", IncompleteError),
    ],
)
def test_every_fault_has_its_kind_and_its_error(pieces: list[Piece], kind: str, error: type[Exception]) -> None:
    broken = manifest(*pieces)
    assert kind in kinds(broken)
    with pytest.raises(error, match=r"model\.w"):
        require_complete(broken, broken.tensors.values(), "/ckpt")


@pytest.mark.parametrize("shape", [(-1,), (BIG,), (1 << 40, 1 << 40), (-1, -4)])
def test_shapes_that_no_array_has_are_refused(shape: tuple[int, ...]) -> None:
    broken = manifest(Piece(full_box(shape), "a.bin", Span(0, 16)), shape=shape)
    assert kinds(broken) == ["invalid"]


def test_a_message_names_tensor_box_file_and_sizes() -> None:
    broken = manifest(span(0, 4, offset=85))
    with pytest.raises(TruncatedError, match=r"/ckpt/a.bin: truncated: model.w \[0:4\]: found 100 bytes, .* 101"):
        require_complete(broken, broken.tensors.values(), "/ckpt")


def test_files_that_names_promise_must_be_there() -> None:
    whole_one = manifest(span(0, 4))
    broken = Manifest("test", whole_one.files, whole_one.tensors, missing=("b-00002-of-00002.bin",))
    with pytest.raises(IncompleteError, match="b-00002-of-00002"):
        require_complete(broken, broken.tensors.values(), "/ckpt")


def require_all_of(files: dict[str, int], form: str, tensors: int) -> None:
    entries = [TensorEntry((f"w{i}",), (4,), "float32", (span(0, 4, file="gone"),)) for i in range(tensors)]
    found = Manifest(form, {**files, "gone": -1}, {e.path: e for e in entries})
    require_complete(found, entries, "here")


def test_all_faults_are_counted_and_their_number_is_a_bound_from_10_000_on() -> None:
    with pytest.raises(IncompleteError, match=r"\(40 more such faults\)"):
        require_all_of({}, "dcp", 41)
    with pytest.raises(IncompleteError, match=r"\(at least 9999 more such faults\)"):
        require_all_of({}, "dcp", 10_001)


def test_one_of_two_files_of_a_distributed_checkpoint_is_not_asked_for_its_folder() -> None:
    with pytest.raises(IncompleteError, match="copy is incomplete"):
        require_all_of({"here": 100}, "dcp", 1)
    with pytest.raises(IncompleteError, match="put them into one folder"):
        require_all_of({"here": 100}, "ranks", 1)


def test_an_expanded_view_needs_only_its_one_element() -> None:
    one = Piece(full_box((4,)), "a.bin", Strided(0, 4, 0, (0,)))
    assert kinds(manifest(one)) == []


def test_a_thousand_faults_are_not_listed() -> None:
    entries = [TensorEntry((f"w{i}",), (4,), "float32", ()) for i in range(1000)]
    found = Manifest("test", {}, {e.path: e for e in entries})
    assert len(faults(found, entries, limit=5)) == 5


@given(st.lists(st.tuples(st.integers(0, 10), st.integers(0, 10)), max_size=6))
def test_coverage_of_a_line_is_right_for_any_cuts(cuts: list[tuple[int, int]]) -> None:
    parts = [span(min(c), max(c)) for c in cuts]
    times = [sum(p.box.offset[0] <= i < p.box.stop[0] for p in parts) for i in range(10)]
    found = set(kinds(manifest(*parts, shape=(10,))))
    assert ("gap" in found) == (0 in times)
    assert ("overlap" in found) == (max(times) > 1)


def least_seconds(check: Callable[[], list[object]]) -> float:
    """Return the least of what some checks take, each of which finds nothing: other work on the machine adds to it."""
    taken = []
    for _ in range(5):
        begun = time.process_time()
        assert check() == []
        taken.append(time.process_time() - begun)
    return min(taken)


def test_rows_of_a_thousand_ranks_are_checked_fast_and_as_strictly_as_ever() -> None:
    """Contiguous pieces take a path of their own; each fault of theirs is still found."""
    n = 1000
    pieces = [Piece(Box((2 * i, 0), (2, 3)), "f", Span(24 * i, 24)) for i in range(n)]

    def found(changed: dict[int, Piece]) -> list[str]:
        entry = TensorEntry(("w",), (2 * n, 3), "float32", tuple(changed.get(i, p) for i, p in enumerate(pieces)))
        return [f.kind for f in faults(Manifest("x", {"f": 24 * n}, {}), [entry])]

    assert least_seconds(lambda: found({})) < 0.05
    last = pieces[-1]
    assert found({5: last._replace(box=Box((10, 0), (1, 3)), layout=Span(120, 12))}) == ["gap"]
    assert found({5: pieces[4]}) == ["gap", "overlap"] or found({5: pieces[4]}) == ["overlap", "gap"]
    assert "invalid" in found({5: pieces[5]._replace(layout=Span(120, 23))})
    assert "invalid" in found({5: pieces[5]._replace(layout=Span(-24, 24))})
    assert "invalid" in found({5: pieces[5]._replace(box=Box((10, 2), (2, 3)))})
    assert "truncated" in found({5: pieces[5]._replace(layout=Span(24 * n - 23, 24))})
    assert "missing_file" in found({5: pieces[5]._replace(file="g")})


def test_a_box_that_leaves_its_row_is_not_taken_for_the_next_row() -> None:
    pieces = (
        Piece(Box((0, 0), (1, 2)), "f", Span(0, 2)),
        Piece(Box((0, 2), (1, 4)), "f", Span(2, 4)),
        Piece(Box((2, 0), (1, 3)), "f", Span(6, 3)),
    )
    entry = TensorEntry(("w",), (3, 3), "uint8", pieces)
    assert "invalid" in [f.kind for f in faults(Manifest("x", {"f": 9}, {}), [entry])]


def test_a_grid_of_a_thousand_ranks_is_checked_fast_and_as_strictly_as_ever() -> None:
    cells = [Box((2 * i, 3 * j), (2, 3)) for i in range(32) for j in range(32)]
    pieces = [Piece(box, "f", Span(24 * n, 24)) for n, box in enumerate(cells)]
    found = Manifest("x", {"f": 24 * len(cells)}, {})
    entries = [TensorEntry(("w",), (64, 96), "float32", tuple(pieces))]
    assert least_seconds(lambda: faults(found, entries)) < 0.05
    for wrong in (pieces[:-1], [*pieces, pieces[3]], [*pieces[1:], pieces[1]]):
        assert faults(found, [TensorEntry(("w",), (64, 96), "float32", tuple(wrong))])
