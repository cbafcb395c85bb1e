"""Copies are split where the source's blocks begin, as far as memory allows."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import shardckpt
from shardckpt.format.native.payload import BLOCK_BYTES
from shardckpt.offline.write.stream import split_copy
from shardckpt.plan.layout.copy_plan import Copy

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
    assert list(split_copy(Copy("a", offset, nbytes), 8)) == [Copy("a", *each) for each in expected]


@pytest.mark.parametrize(("max_memory", "most"), [(256 * MIB, BLOCK_BYTES), (40 * MIB, MIB)])
def test_blocks_of_a_step_are_copied_as_they_are_verified(
    max_memory: int, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "src").mkdir()
    arrays = {name: np.random.default_rng(n).standard_normal(3 * MIB).astype(np.float32) for n, name in enumerate("ab")}
    save_file(arrays, tmp_path / "src" / "model.safetensors")
    shardckpt.convert(tmp_path / "src", tmp_path / "step", to="native")
    sizes, whole = [], os.pwrite

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        sizes.append(len(data))
        return whole(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    shardckpt.consolidate(tmp_path / "step", tmp_path / "out", jobs=2, max_memory=max_memory)
    assert max(sizes) == most
    assert sum(sizes) == 24 * MIB
    assert shardckpt.diff(tmp_path / "src", tmp_path / "out").same
