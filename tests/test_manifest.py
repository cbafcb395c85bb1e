"""Descriptions are values: frozen, hashable where they are keys, and free of data."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from shardckpt.boxes import full_box
from shardckpt.manifest import UNREAD, Encoded, Lazy, Manifest, ObjectEntry, Piece, Span, Strided, TensorEntry, dotted


def entry(**changes: object) -> TensorEntry:
    piece = Piece(full_box((2, 3)), "a.bin", Span(8, 24))
    return TensorEntry(("w",), (2, 3), "float32", (piece,))._replace(**changes)


def test_a_tensor_is_delivered_as_stored_unless_it_says_otherwise() -> None:
    assert (entry().dtype, entry().nbytes) == ("float32", 24)
    assert (entry(delivered="bfloat16").dtype, entry(delivered="bfloat16").nbytes) == ("bfloat16", 12)
    assert entry(shape=()).nbytes == 4
    assert entry(shape=(0, 5)).nbytes == 0


def test_descriptions_cannot_be_changed() -> None:
    manifest = Manifest("x", {}, {("w",): entry()})
    for thing, name in ((entry(), "shape"), (manifest, "tensors"), (ObjectEntry(("a",)), "value")):
        with pytest.raises(AttributeError):
            setattr(thing, name, None)


def test_layouts_are_equal_by_value_and_serve_as_keys() -> None:
    layouts = [
        Span(0, 4),
        Strided(0, 4, 0, (1,)),
        Encoded("zstd", 0, 9, Span(0, 4)),
        Lazy(0, 9, "detail"),
    ]
    assert len(set(layouts)) == 4
    assert {Encoded("zstd", 0, 9, Span(0, 4)): 1}[layouts[2]] == 1  # type: ignore[index]


def test_two_paths_with_one_dotted_name_are_two_things() -> None:
    assert dotted(("a.b",)) == dotted(("a", "b")) == "a.b"
    assert ("a.b",) != ("a", "b")
    assert dotted(("layers", 0, "w")) == "layers.0.w"


def test_an_unread_value_is_no_value_and_survives_copying() -> None:
    unread = ObjectEntry(("epoch",))
    assert unread.value is UNREAD
    assert pickle.loads(pickle.dumps(unread)).value is UNREAD
    assert ObjectEntry(("epoch",), None).value is not UNREAD


def test_leaves_import_neither_numpy_nor_torch() -> None:
    code = (
        "import sys, shardckpt.boxes, shardckpt.manifest, shardckpt.errors, shardckpt.dtypes;"
        "print([m for m in ('numpy', 'torch', 'fsspec') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"
