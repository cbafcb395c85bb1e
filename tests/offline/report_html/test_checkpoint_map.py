from __future__ import annotations

import json

import pytest

import shardckpt
from shardckpt.boxes import Box, full_box
from shardckpt.manifest import Encoded, Lazy, Manifest, Piece, Span, Strided, TensorEntry
from shardckpt.offline.inspect import FileExtent, describe_checkpoint, describe_manifest, find_file_extent
from shardckpt.readers.registry import open_checkpoint


def test_the_bytes_of_a_view_are_those_between_its_first_and_last_element():
    box = Box((0, 0), (2, 3))
    inside = Strided(100, 400, 10, (10, 1))
    assert find_file_extent(Piece(box, "f", inside), "float32") == FileExtent(140, 52, is_exact=False)
    assert find_file_extent(Piece(box, "f", Strided(100, 400, 1, (3, 1))), "float32") == FileExtent(
        104, 24, is_exact=True
    )
    assert find_file_extent(Piece(Box((0, 0), (0, 3)), "f", inside), "float32").nbytes == 0


@pytest.mark.parametrize("layout", [Encoded("zstd", 8, 20, Span(0, 24)), Lazy(8, 20)])
def test_bytes_of_compressed_data_and_containers_are_not_called_exact(layout):
    assert find_file_extent(Piece(full_box((6,)), "f", layout), "float32") == FileExtent(8, 20, is_exact=False)


def decode(data):
    segments = data["names"]["segments"]
    return [".".join(segments[at] for at in coded) for coded in data["names"]["tensors"]]


@pytest.mark.parametrize(
    "case", ["dcp_hsdp_fsdp2_gpt2_w4", "deepspeed_zero3_bf16_llama_w2", "fsdp1_local_gpt2_w2", "torch_save_zip_nasty"]
)
def test_a_map_says_the_same_as_inspect(fixtures, case):
    source = fixtures / case / "ckpt"
    found = shardckpt.inspect(source)
    data = json.loads(json.dumps(describe_checkpoint(open_checkpoint(str(source)).manifest, found)))
    tensors = data["tensors"]
    assert decode(data) == [tensor.name for tensor in found.tensors]
    assert [data["dtypes"][at] for at in tensors["dtype"]] == [tensor.dtype for tensor in found.tensors]
    assert [tuple(shape) for shape in tensors["shape"]] == [tensor.shape for tensor in found.tensors]
    assert tensors["pieces"] == [tensor.pieces for tensor in found.tensors]
    assert data["nbytes"] == found.nbytes
    assert {file["name"]: file["nbytes"] for file in data["files"]} == {f.name: f.nbytes for f in found.files}
    assert len(data["pieces"]["tensor"]) == data["pieces"]["total"] == sum(tensors["pieces"])
    ends = map(sum, zip(data["pieces"]["offset"], data["pieces"]["nbytes"], strict=True))
    sizes = (data["files"][at]["nbytes"] for at in data["pieces"]["file"])
    assert all(end <= size for end, size in zip(ends, sizes, strict=True))


def make_manifest(count, shards, files=None):
    """Return tensors of `shards` rows; row i is in the file of rank i."""
    tensors = {}
    for at in range(count):
        pieces = tuple(Piece(Box((i, 0), (1, 4)), f"rank{i}.bin", Span(at * 16, 16)) for i in range(shards))
        tensors["model", f"w{at}"] = TensorEntry(("model", f"w{at}"), (shards, 4), "float32", pieces)
    return Manifest("test", files or {f"rank{i}.bin": count * 16 for i in range(shards)}, tensors)


def describe(manifest, **options):
    return describe_checkpoint(manifest, describe_manifest("here", manifest), **options)


def test_files_are_sorted_by_rank_not_as_text():
    assert [file["rank"] for file in describe(make_manifest(1, 12))["files"]] == [*range(12)]


def test_too_many_pieces_are_counted_and_each_tensor_keeps_its_first():
    data = describe(make_manifest(10, 8), max_pieces=30)
    assert data["pieces"]["total"] == 80
    assert data["pieces"]["tensor"] == [at for at in range(10) for _ in range(3)]


def test_a_missing_file_is_a_fault_of_each_tensor_in_it():
    data = describe(make_manifest(3, 2, {"rank0.bin": 48, "rank1.bin": -1}))
    assert {fault["tensor"] for fault in data["faults"]} == {0, 1, 2}
    assert {fault["kind"] for fault in data["faults"]} == {"missing_file"}


def test_pieces_of_many_tensors_take_a_bounded_number_of_bytes_each():
    small, large = (len(json.dumps(describe(make_manifest(count, 4)), separators=(",", ":"))) for count in (100, 200))
    assert large - small < 100 * 4 * 60
