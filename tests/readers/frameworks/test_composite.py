"""Several readers as one checkpoint: paths move, pieces and objects go back to the reader they came from."""

import pytest
import torch

from shardckpt.errors import FormatError, IncompleteError
from shardckpt.manifest import ObjectEntry
from shardckpt.readers.dcp import reader as dcp
from shardckpt.readers.frameworks.composite import SubReader, join
from shardckpt.storage.local import LocalStore
from tests.kit.writers.dcp_writers import save
from tests.kit.writers.materialise import assert_same

A, B = torch.arange(6.0).reshape(2, 3), torch.arange(4)


@pytest.fixture
def store(tmp_path):
    save({"x": A, "step": 1}, tmp_path / "a")
    save({"x": B, "step": 2}, tmp_path / "b")
    torch.save({"epoch": 3}, tmp_path / "loop.pt")
    return LocalStore(str(tmp_path))


def below(key):
    return lambda path: (key, *path)


def joined(store, first="a", second="b"):
    parts = [
        SubReader(dcp.open_folder(store, "a"), below(first)),
        SubReader(dcp.open_folder(store, "b"), below(second)),
    ]
    return join("both", store, parts, {"loop.pt": store.size("loop.pt")}, ["odd"])


def test_tensors_lie_under_their_new_paths(store):
    reader = joined(store)

    assert_same(reader, ("a", "x"), A)
    assert_same(reader, ("b", "x"), B)
    assert reader.manifest.format == "both"
    assert set(reader.manifest.files) == {"a/__0_0.distcp", "b/__0_0.distcp", "loop.pt"}
    assert reader.manifest.warnings == ("odd",)


def test_pieces_of_several_readers_keep_their_order(store):
    reader = joined(store)
    (a,), (b,) = (reader.manifest.tensors[key, "x"].pieces for key in "ab")

    resolved = reader.resolve([b, a, b])

    assert [piece.file for piece in resolved] == [b.file, a.file, b.file]
    assert resolved[0] == resolved[2] != resolved[1]


def test_objects_are_read_by_their_reader_or_as_files(store):
    reader = joined(store)

    assert reader.load_object(reader.manifest.objects["a", "step"]) == 1
    assert reader.load_object(reader.manifest.objects["b", "step"]) == 2
    assert reader.load_object(reader.manifest.objects["loop.pt",]) == {"epoch": 3}
    assert reader.load_object(ObjectEntry(("known",), 7)) == 7
    with pytest.raises(IncompleteError):
        reader.load_object(ObjectEntry(("lost",)))


def test_checksums_of_all_readers_come_once(store):
    found = list(joined(store).checksums())

    assert {c.file for c in found} == {"a/__0_0.distcp", "b/__0_0.distcp"}
    assert len(found) == len(set(found))


def test_two_values_of_one_path_are_an_error(store):
    with pytest.raises(FormatError, match="is in two places"):
        joined(store, "same", "same")
