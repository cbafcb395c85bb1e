"""Shards of ranks become full tensors: replicas once, one dtype, missing boxes with the file that should hold them."""

from __future__ import annotations

import pytest

from shardckpt.boxes import Box
from shardckpt.errors import FormatError
from shardckpt.manifest import Lazy, Piece, TensorEntry
from shardckpt.readers.merge_shards import (
    MAX_MISSING,
    ManifestBuilder,
    RankOrigin,
    Shard,
    merge_shards,
    note_missing_ranks,
    require_one_save,
    slice_shard,
)
from shardckpt.readers.torchsave.storages import UnreadableTensor
from shardckpt.readers.torchsave.tensor_views import LegacyView, View

ROWS = [Box((2 * i, 0), (2, 3)) for i in range(3)]
PATH = ("model", "w")


def shard(index: int, file: str, dtype: str = "float32") -> Shard:
    return Shard(file, dtype, [Piece(ROWS[index], file, Lazy(0, 0))])


def test_of_replicas_the_first_is_taken() -> None:
    entry = merge_shards(ManifestBuilder("here"), PATH, (6, 3), [shard(0, "a"), shard(1, "b"), shard(0, "c")])
    assert [(piece.box, piece.file) for piece in entry.pieces] == [(ROWS[0], "a"), (ROWS[1], "b")]


def test_missing_boxes_are_named_and_refused() -> None:
    builder = ManifestBuilder("here")
    missing = [(box, f"the file of rank {i}") for i, box in enumerate(ROWS)]
    entry = merge_shards(builder, PATH, (6, 3), [shard(1, "b")], missing)
    lost = {piece.box: piece.layout.detail for piece in entry.pieces if isinstance(piece.layout, Lazy)}
    assert list(builder.missing_files) == ["the file of rank 0", "the file of rank 2"]
    assert isinstance(lost[ROWS[2]], UnreadableTensor)
    assert "the file of rank 2, which is missing" in str(lost[ROWS[2]].error("here"))
    many = ((Box((i,), (1,)), "gone") for i in range(10**9))
    assert len(merge_shards(builder, PATH, (10**9,), [], many).pieces) == MAX_MISSING


def test_a_missing_file_is_not_named_if_every_element_is_there() -> None:
    builder = ManifestBuilder("here")
    merge_shards(builder, PATH, (6, 3), [shard(i, "a") for i in range(3)], iter([(ROWS[0], "gone")]))
    assert not builder.missing_files


@pytest.mark.parametrize("dtype", ["", "float32"])
def test_shards_of_several_dtypes_are_refused(dtype: str) -> None:
    shards = [shard(0, "a"), shard(1, "b", "float16")]
    with pytest.raises(FormatError, match=r"here/b: 'model.w' has several dtypes; found float16; expected float32"):
        merge_shards(ManifestBuilder("here"), PATH, (6, 3), shards, dtype=dtype)


@pytest.mark.parametrize(
    ("strides", "order", "expected"),
    [(None, (), None), ((5,), (), (15, 5)), (None, (1, 0), (1, 2)), ((5,), (1, 0), (5, 10))],
    ids=["packed", "strided", "columns", "strided columns"],
)
def test_a_box_is_sliced_from_a_tensor_of_any_stride(
    strides: tuple[int, ...] | None, order: tuple[int, ...], expected: tuple[int, ...] | None
) -> None:
    """A 1-D tensor may be a view of every fifth element: its boxes are too."""
    layout = Lazy(0, 408, LegacyView(100, 400, View(7, strides, 4)))
    entry = TensorEntry(PATH, (20,), "float32", (Piece(Box((0,), (20,)), "a", layout),))
    [piece] = slice_shard(entry, [(ROWS[0], 4)], order)
    assert piece.box == ROWS[0]
    assert isinstance(piece.layout, Lazy)
    assert piece.layout.detail == LegacyView(100, 400, View(7 + 4 * (5 if strides else 1), expected, 4))


@pytest.mark.parametrize(
    ("origins", "found"),
    [
        ([("a", 0, 2), ("b", 1, 3)], "2 ranks in a and 3 in b"),
        ([("a", 1, 2), ("b", 1, 2)], "rank 1 in a and in b"),
        ([("a", 0, 2), ("b", 2, 0)], "rank 2 in b, of 2 ranks"),
    ],
)
def test_files_of_several_saves_are_refused(origins: list[tuple[str, int, int]], found: str) -> None:
    with pytest.raises(FormatError, match=rf"different saves are in one folder; found {found}"):
        require_one_save([RankOrigin(*origin) for origin in origins], "here")


def test_ranks_without_a_file_are_counted() -> None:
    builder = ManifestBuilder("here")
    note_missing_ranks(builder, 4, {0: ["w"], 2: ["w"]})
    assert builder.warnings == ["of 4 ranks, rank 1 and 1 more left no file here"]
    assert builder.missing == []
    note_missing_ranks(builder, 3, {0: ["w"], 2: ["v"]})
    assert builder.missing == ["the file of rank 1 of 3"]
