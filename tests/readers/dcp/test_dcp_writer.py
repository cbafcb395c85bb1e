"""DCP folders without torch: slices on borders, one behind the other, and metadata that torch's classes take."""

from __future__ import annotations

import io
import pickle

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from shardckpt.boxes import Box, full_box
from shardckpt.errors import NameCollisionError, UnsupportedError
from shardckpt.native.payload import PayloadChunk
from shardckpt.readers.dcp.writer import encode_metadata, make_object, slice_files
from shardckpt.readers.torchsave.writer import ALIGNMENT

CHUNKS = [
    PayloadChunk(("model", "w"), (4, 3), "bfloat16", Box((0, 0), (2, 3))),
    PayloadChunk(("model", "w"), (4, 3), "bfloat16", Box((2, 0), (2, 3))),
    PayloadChunk(("model", "s"), (), "float32", full_box(())),
    PayloadChunk(("model", "none"), (0, 2), "int64", full_box((0, 2))),
]
ITEMS = [make_object(("optim", "param_groups", 0, "lr"), 0.1)]


def test_slices_follow_one_another_on_borders_and_files_are_cut() -> None:
    [file] = slice_files(3, CHUNKS, ITEMS, most_bytes=1 << 20, unique_suffix="abc")
    assert file.name == "__3_0-abc.distcp"
    at = 0
    for each in file.slices:
        assert each.offset % ALIGNMENT == 0
        assert 0 <= each.offset - at < ALIGNMENT
        at = each.offset + each.nbytes
    assert file.nbytes == at
    many = slice_files(0, CHUNKS, ITEMS, most_bytes=2000)
    assert [f.name for f in many] == [f"__0_{n}.distcp" for n in range(len(many))]
    assert len(many) > 2
    assert all(f.nbytes <= 2000 for f in many)
    assert [f.slices for f in slice_files(1, [], [], most_bytes=1)] == [()]


def test_the_metadata_is_what_torch_makes_of_it() -> None:
    files = slice_files(0, CHUNKS, ITEMS, most_bytes=2000)
    ties = {("model", "twin"): ("model", "w")}
    order = [("model", "s"), ("model", "twin"), ("model", "w")]
    found = pickle.loads(encode_metadata(files, ties, order))
    assert type(found) is Metadata
    assert found.version == "1.0.0"
    names = ["model.s", "model.twin", "model.w", "model.none", "optim.param_groups.0.lr"]
    assert list(found.state_dict_metadata) == list(found.planner_data) == names
    assert found.planner_data["optim.param_groups.0.lr"] == ("optim", "param_groups", 0, "lr")
    record = found.state_dict_metadata["model.w"]
    assert type(record) is TensorStorageMetadata
    assert (record.properties.dtype, record.size) == (torch.bfloat16, torch.Size((4, 3)))
    assert record.properties.memory_format == torch.contiguous_format
    assert [tuple(chunk.offsets) for chunk in record.chunks] == [(0, 0), (2, 0)]
    assert type(found.state_dict_metadata[names[-1]]) is BytesStorageMetadata
    second = found.storage_data[MetadataIndex("model.w", [2, 0])]
    assert second == found.storage_data[MetadataIndex("model.twin", [2, 0])]
    slices = {(f.name, s.offset): s for f in files for s in f.slices}
    assert slices[second.relative_path, second.offset].what == CHUNKS[1]
    assert found.storage_data[MetadataIndex(names[-1])].length == len(ITEMS[0].content)
    assert torch.load(io.BytesIO(ITEMS[0].content), weights_only=True) == 0.1


def test_paths_that_read_alike_and_values_that_torch_refuses() -> None:
    chunks = [PayloadChunk(path, (), "float32", full_box(())) for path in (("a.b",), ("a", "b"))]
    with pytest.raises(NameCollisionError, match=r"a\.b"):
        encode_metadata(slice_files(0, chunks, [], most_bytes=1 << 20), {})
    with pytest.raises(UnsupportedError, match="object"):
        make_object(("x",), object())
