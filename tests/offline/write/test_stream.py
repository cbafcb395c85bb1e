"""Copies are split where the source's blocks begin, as far as memory allows."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import shardckpt
from shardckpt.boxes import Box, full_box
from shardckpt.manifest import Piece, Span, TensorEntry
from shardckpt.native.payload import GROUP_BYTES
from shardckpt.offline.write.stream import TensorPart, batches, split_copy
from shardckpt.plan.layout.copy_plan import Copy
from shardckpt.plan.layout.output_files import OutputTensor

MIB = 1 << 20


@pytest.mark.parametrize(
    ("offset", "nbytes", "expected"),
    [
        (0, 20, [(0, 8), (8, 8), (16, 4)]),
        (5, 20, [(5, 3), (8, 8), (16, 8), (24, 1)]),
        (8, 8, [(8, 8)]),
        (9, 3, [(9, 3)]),
        (9, 0, []),
    ],
)
def test_copies_are_split_at_multiples_of_the_block(offset: int, nbytes: int, expected: list[tuple[int, int]]) -> None:
    assert list(split_copy(Copy("a", offset, nbytes), 8, is_aligned=True)) == [Copy("a", *each) for each in expected]


@pytest.mark.parametrize(
    ("offset", "nbytes", "expected"),
    [(0, 20, [(0, 8), (8, 8), (16, 4)]), (5, 16, [(5, 8), (13, 8)]), (9, 3, [(9, 3)]), (9, 0, [])],
)
def test_copies_without_blocks_are_split_into_as_few_parts_as_fit(
    offset: int, nbytes: int, expected: list[tuple[int, int]]
) -> None:
    assert list(split_copy(Copy("a", offset, nbytes), 8, is_aligned=False)) == [Copy("a", *each) for each in expected]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "q8_0"])
def test_parts_fit_into_a_batch_as_stored_and_as_written(dtype: str) -> None:
    entry = TensorEntry(("w",), (100, 64), "float32", (Piece(full_box((100, 64)), "f", Span(0, 100 * 64 * 4)),))
    tensor = OutputTensor("w", entry, dtype)
    rows = [TensorPart(tensor, Box((row, 0), (1, 64))) for row in reversed(range(100))]
    found = list(batches(rows, 1024))
    assert [take.box.offset[0] for batch in found for take in batch.takes] == [*reversed(range(100))]
    assert all(sum(take.box.volume for take in batch.takes) * 4 <= 1024 for batch in found)
    assert all(sum(take.nbytes for take in batch.takes) == batch.nbytes <= 1024 for batch in found)


@pytest.mark.parametrize(("max_memory", "most"), [(256 * MIB, GROUP_BYTES), (40 * MIB, MIB)])
def test_blocks_of_a_step_are_copied_as_they_are_verified(
    max_memory: int, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "src").mkdir()
    arrays = {name: np.random.default_rng(n).standard_normal(3 * MIB).astype(np.float32) for n, name in enumerate("ab")}
    save_file(arrays, tmp_path / "src" / "model.safetensors")
    shardckpt.convert(tmp_path / "src", tmp_path / "step", to="native")
    sizes, whole = [], os.write

    def write(fd: int, data: memoryview) -> int:
        sizes.append(len(data))
        return whole(fd, data)

    monkeypatch.setattr(os, "write", write)
    shardckpt.consolidate(tmp_path / "step", tmp_path / "out", jobs=2, max_memory=max_memory)
    assert max(sizes) == most
    assert sum(sizes[1:]) == 24 * MIB, "all but the header"
    assert shardckpt.diff(tmp_path / "src", tmp_path / "out").same
