"""A save at any world size is loaded at any other: what ranks wrote and what ranks want are boxes, 1 to 64 of each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import shardckpt
from shardckpt.boxes import Box, Shape, cover, flat_to_boxes, full_box, intersect
from shardckpt.plan.layout.write_plan import LocalTensor, plan_save
from tests.kit.writers.native_writer import write_step

WORLDS = range(1, 65)


def rows(shape: Shape, world: int, rank: int) -> list[Box]:
    """As `fully_shard` cuts: whole rows, the last ranks may get none."""
    step = -(-shape[0] // world)
    low, high = min(rank * step, shape[0]), min((rank + 1) * step, shape[0])
    return [Box((low, *(0 for _ in shape[1:])), (high - low, *shape[1:]))] if high > low else []


def flat(shape: Shape, world: int, rank: int) -> list[Box]:
    """As the wrapper cuts: a range of elements, which need not end with a row."""
    total = full_box(shape).volume
    step = -(-total // world)
    return flat_to_boxes(shape, min(rank * step, total), min((rank + 1) * step, total))


def replicated(shape: Shape, world: int, rank: int) -> list[Box]:
    return [full_box(shape)]


CUTS = {"rows": rows, "flat": flat, "replicated": replicated}


def written(shape: Shape, world: int, cut) -> list[tuple[int, Box]]:
    """Return which rank writes what."""
    plan = plan_save([[LocalTensor(("w",), shape, "float32", tuple(cut(shape, world, r)), None)] for r in range(world)])
    return [(rank, task.box) for rank, tasks in enumerate(plan.tasks) for task in tasks]


def other_worlds(world: int) -> set[int]:
    return {1, 2, 64, max(world - 1, 1), min(world + 1, 64), world, (world * 29) % 64 + 1}


@pytest.mark.parametrize("before", CUTS)
def test_every_box_of_every_rank_is_covered_once_by_what_was_written(before: str) -> None:
    shape = (37, 3)
    values = np.arange(37 * 3).reshape(shape)
    pairs = 0
    for saved_at in WORLDS:
        pieces = [box for _, box in written(shape, saved_at, CUTS[before])]
        found = cover(full_box(shape), pieces)
        assert not found.gaps and not found.overlaps, (saved_at, found)
        for loaded_at in other_worlds(saved_at):
            after = ("rows", "flat")[(saved_at + loaded_at) % 2]
            pairs += 1
            for rank in range(loaded_at):
                for wanted in CUTS[after](shape, loaded_at, rank):
                    into = np.full(wanted.size, -1)
                    for piece in pieces:
                        common = intersect(piece, wanted)
                        if common is not None:
                            where = tuple(
                                slice(o - w, o - w + n)
                                for o, w, n in zip(*common[:1], wanted.offset, common.size, strict=True)
                            )
                            into[where] = values[
                                tuple(slice(o, o + n) for o, n in zip(common.offset, common.size, strict=True))
                            ]
                    assert np.array_equal(
                        into, values[tuple(slice(o, o + n) for o, n in zip(wanted.offset, wanted.size, strict=True))]
                    )
    print(f"{pairs} pairs of world sizes from 1 to 64")


@pytest.mark.parametrize("before", ["rows", "flat"])
@pytest.mark.parametrize("saved_at", [1, 3, 63, 64])
def test_files_of_so_many_ranks_are_read_by_so_many_others(tmp_path: Path, saved_at: int, before: str) -> None:
    shape = (130, 7)
    values = torch.arange(130.0 * 7).view(shape)
    write_step(tmp_path / "c", {"w": values}, {("w",): written(shape, saved_at, CUTS[before])})
    saved = shardckpt.open(tmp_path / "c")["w"]
    for loaded_at in (1, 2, 5, 63, 64):
        for rank in range(loaded_at):
            for box in rows(shape, loaded_at, rank):
                low, high = box.offset[0], box.offset[0] + box.size[0]
                assert torch.equal(saved[low:high], values[low:high])
