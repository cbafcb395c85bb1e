"""Files are cut and named as Hugging Face's own tools cut and name them."""

from __future__ import annotations

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.boxes import Box, full_box
from shardckpt.manifest import Piece, Span, TensorEntry
from shardckpt.plan.layout.output_files import OutputTensor, index, name_files, split_as_stored, split_by_size


def out(name: str, elements: int, *files: str, dtype: str = "uint8") -> OutputTensor:
    pieces = tuple(Piece(Box((i,), (1,)), file, Span(0, 1)) for i, file in enumerate(files or ["a"]))
    return OutputTensor(name, TensorEntry((name,), (elements,), "uint8", pieces), dtype)


@given(st.lists(st.integers(1, 30), max_size=12), st.integers(1, 40))
def test_cuts_are_those_of_the_hub(sizes: list[int], limit: int) -> None:
    tensors = [out(f"t{i:02d}", n) for i, n in enumerate(sizes)]
    ours = name_files(split_by_size(tensors, limit), "model")
    theirs = split_torch_state_dict_into_shards(
        {t.name: torch.zeros(t.nbytes, dtype=torch.uint8) for t in tensors}, max_shard_size=limit
    )
    assert {f.name: [t.name for t in f.tensors] for f in ours if f.tensors} == {
        file: names for file, names in theirs.filename_to_tensors.items() if names
    }
    written = index(ours)
    if theirs.is_sharded:
        assert written["metadata"]["total_size"] == theirs.metadata["total_size"]  # type: ignore[index]
        assert written["weight_map"] == theirs.tensor_to_filename


@given(st.lists(st.integers(0, 30), max_size=12), st.integers(1, 40))
def test_no_tensor_is_lost_and_only_large_ones_exceed_a_file(sizes: list[int], limit: int) -> None:
    tensors = [out(f"t{i}", n) for i, n in enumerate(sizes)]
    groups = split_by_size(tensors, limit)
    assert sorted(t.name for g in groups for t in g) == sorted(t.name for t in tensors)
    for group in groups:
        assert len(group) == 1 or sum(t.nbytes for t in group) <= limit


def test_sizes_are_counted_as_written() -> None:
    cast = OutputTensor("w", TensorEntry(("w",), (10,), "float32", ()), "bfloat16")
    assert (cast.nbytes, cast.is_cast, cast.shape) == (20, True, (10,))
    assert len(split_by_size([cast, cast], 40)) == 1


def test_tensors_stay_with_their_file_and_cut_ones_share_one_more() -> None:
    tensors = [out("x", 1, "a"), out("y", 2, "a", "b"), out("z", 1, "b"), out("w", 1, "a"), out("v", 2, "a", "b")]
    groups = [[t.name for t in g] for g in split_as_stored(tensors)]
    assert groups == [["x", "w"], ["y", "v"], ["z"]]


@pytest.mark.parametrize(
    ("count", "unique_suffix", "names"),
    [
        (1, "", ["model.safetensors"]),
        (2, "", ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]),
        (1, "ab12", ["model-ab12.safetensors"]),
        (2, "ab12", ["model-ab12-00001-of-00002.safetensors", "model-ab12-00002-of-00002.safetensors"]),
    ],
)
def test_names_of_files(count: int, unique_suffix: str, names: list[str]) -> None:
    assert [f.name for f in name_files([(out(f"t{i}", 1),) for i in range(count)], "model", unique_suffix)] == names


def test_an_index_is_sorted_and_counts_bytes_and_parameters() -> None:
    files = name_files([(out("z", 3, dtype="float32"),), (out("a", 2),)], "model")
    assert index(files, {"more": 1}) == {
        "metadata": {"total_parameters": 5, "total_size": 14, "more": 1},
        "weight_map": {"a": "model-00002-of-00002.safetensors", "z": "model-00001-of-00002.safetensors"},
    }
    assert list(index(files)["weight_map"]) == ["a", "z"]  # type: ignore[call-overload]


def test_a_model_without_tensors_is_one_empty_file() -> None:
    assert name_files(split_by_size([], 5), "model")[0].tensors == ()
    assert full_box(()) == Box((), ())
