"""Who writes what: every element once, shared values shared out by bytes, the same decision everywhere."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from shardckpt.boxes import Box, Shape, flat_to_boxes, full_box
from shardckpt.errors import IncompleteError, UsageError
from shardckpt.manifest import Path
from shardckpt.plan.layout.write_plan import LEAST_SHARE_BYTES, LocalTensor, SavePlan, digest, plan_save

W: Path = ("model", "w")


def held(
    boxes: Sequence[Box], shape: Shape, path: Path = W, dtype: str = "float32", value: int | None = None
) -> LocalTensor:
    return LocalTensor(path, shape, dtype, tuple(boxes), value)


def rows(shape: Shape, world: int, rank: int) -> list[Box]:
    """Return the rows of a rank, as `torch.chunk` cuts them."""
    step = -(-shape[0] // world)
    low, high = min(rank * step, shape[0]), min((rank + 1) * step, shape[0])
    return [Box((low, *(0 for _ in shape[1:])), (high - low, *shape[1:]))] if high > low else []


def check(plan: SavePlan, ranks: Sequence[Sequence[LocalTensor]]) -> None:
    """Hold a plan to its promise: every element once, by a rank that holds it."""
    for number, spec in enumerate(plan.arrays):
        times = np.zeros(spec.shape, int)
        for rank, tasks in enumerate(plan.tasks):
            mine = np.zeros(spec.shape, bool)
            for each in ranks[rank]:
                if each.path == spec.path:
                    for box in each.boxes:
                        mine[_slices(box)] = True
            for task in tasks:
                if task.array == number:
                    times[_slices(task.box)] += 1
                    assert mine[_slices(task.box)].all(), f"rank {rank} does not hold {task.box}"
        assert (times == 1).all()


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_shards_are_written_by_the_rank_that_has_them(world: int) -> None:
    ranks = [[held(rows((5, 3), world, r), (5, 3))] for r in range(world)]
    plan = plan_save(ranks)
    check(plan, ranks)
    assert [[t.box for t in tasks] for tasks in plan.tasks] == [rows((5, 3), world, r) for r in range(world)]


def test_flat_ranges_are_written_as_they_lie() -> None:
    cuts = [0, 5, 6, 17, 24]
    ranks = [[held(flat_to_boxes((2, 3, 4), a, b), (2, 3, 4))] for a, b in pairwise(cuts)]
    plan = plan_save(ranks)
    check(plan, ranks)
    assert [[t.box for t in tasks] for tasks in plan.tasks] == [list(each[0].boxes) for each in ranks]


def test_columns_and_grids_are_written_once() -> None:
    grid = [Box((i * 2, j * 3), (2, 3)) for i in range(3) for j in range(2)]
    ranks = [[held([box], (6, 6))] for box in grid]
    check(plan_save(ranks), ranks)
    with pytest.raises(IncompleteError):
        plan_save(ranks[1:])


def test_replicas_share_the_work_by_bytes() -> None:
    sizes = [100, 90, 50, 40, 30, 20, 10, 5, 5]
    mine = [held([full_box((n,))], (n,), ("m", i), "uint8") for i, n in enumerate(sizes)]
    plan = plan_save([mine, mine, mine])
    check(plan, [mine] * 3)
    assert [plan.count_rank_bytes(rank) for rank in range(3)] == [115, 120, 115]


def test_what_only_one_rank_has_counts_in_the_balance() -> None:
    mine = [held([full_box((10,))], (10,), ("m", i), "uint8") for i in range(6)]
    alone = held([full_box((40,))], (40,), ("big",), "uint8")
    plan = plan_save([[alone, *mine], mine, mine])
    assert [plan.count_rank_bytes(rank) for rank in range(3)] == [40, 30, 30]


def test_replicas_of_shards_are_balanced_over_each_other() -> None:
    """HSDP: two replicas of a sharding over two ranks."""
    shapes = [(8, 4), (6, 2), (4, 4), (10, 10)]
    ranks = [[held(rows(s, 2, rank % 2), s, ("m", i)) for i, s in enumerate(shapes)] for rank in range(4)]
    plan = plan_save(ranks)
    check(plan, ranks)
    assert max(map(plan.count_rank_bytes, range(4))) <= 200


def test_one_large_replicated_tensor_is_cut() -> None:
    n = 8 * LEAST_SHARE_BYTES
    ranks = [[held([full_box((n,))], (n,), dtype="uint8")]] * 4
    assert [plan_save(ranks).count_rank_bytes(rank) for rank in range(4)] == [n // 4] * 4
    small = [[held([full_box((100,))], (100,), dtype="uint8")]] * 4
    assert Counter(len(tasks) for tasks in plan_save(small).tasks) == {0: 3, 1: 1}


def test_boxes_that_overlap_in_part_are_carved() -> None:
    ranks = [
        [held([full_box((6, 4))], (6, 4))],
        [held([Box((0, 0), (3, 2))], (6, 4))],
        [held([Box((2, 1), (3, 3))], (6, 4))],
    ]
    check(plan_save(ranks), ranks)


def test_any_sharding_is_written_once() -> None:
    choose = random.Random(0)
    for _ in range(60):
        shape = tuple(choose.randint(1, 6) for _ in range(choose.randint(0, 3)))
        ranks = []
        for _ in range(choose.randint(1, 4)):
            boxes = []
            if choose.random() < 0.7:
                offset = tuple(choose.randrange(n) for n in shape)
                boxes = [Box(offset, tuple(choose.randint(1, n - o) for n, o in zip(shape, offset, strict=True)))]
            ranks.append([held(boxes, shape)])
        ranks.append([held([full_box(shape)], shape)])
        check(plan_save(ranks), ranks)


def test_scalars_and_empty_arrays_have_one_writer() -> None:
    mine = [held([full_box(())], (), ("s",)), held([], (0, 3), ("e",)), held([Box((0, 0), (0, 3))], (0, 3), ("f",))]
    plan = plan_save([mine, mine])
    assert sorted(task.array for tasks in plan.tasks for task in tasks) == [0, 1, 2]


def test_ranks_may_hold_different_arrays() -> None:
    ranks = [[held([full_box((2,))], (2,), (f"stage{r}",))] for r in range(3)]
    plan = plan_save(ranks)
    assert [spec.path for spec in plan.arrays] == [("stage0",), ("stage1",), ("stage2",)]
    check(plan, ranks)


def test_elements_that_nobody_holds_are_named() -> None:
    with pytest.raises(IncompleteError, match=r"model\.w \[2:4, 0:3\]"):
        plan_save([[held(rows((6, 3), 3, r), (6, 3))] for r in (0, 2)])
    with pytest.raises(IncompleteError, match=r"model\.w"):
        plan_save([[held([], (6, 3))]])


def test_ranks_that_disagree_are_named() -> None:
    with pytest.raises(UsageError, match=r"model\.w: .*rank 1: float32 \[3\].*rank 0: float32 \[2\]"):
        plan_save([[held([full_box((2,))], (2,))], [held([full_box((3,))], (3,))]])
    with pytest.raises(UsageError, match="bfloat16"):
        plan_save([[held([full_box((2,))], (2,))], [held([full_box((2,))], (2,), dtype="bfloat16")]])
    with pytest.raises(UsageError, match="outside"):
        plan_save([[held([Box((1,), (2,))], (2,))]])
    with pytest.raises(UsageError, match="outside"):
        plan_save([[held([Box((0,), (1,)), Box((1, 0), (1, 1))], (2,))]])


def test_a_value_that_claims_to_be_the_same_and_is_not_is_named() -> None:
    same = [[held([full_box((2,))], (2,), value=7)] for _ in range(3)]
    assert sum(len(tasks) for tasks in plan_save(same).tasks) == 1
    same[2] = [held([full_box((2,))], (2,), value=8)]
    with pytest.raises(UsageError, match=r"model\.w: .*rank 2 differs from rank 0"):
        plan_save(same)
    shards = [[held(rows((4,), 2, r), (4,), value=r)] for r in range(2)]
    plan_save(shards)


def test_every_rank_decides_the_same() -> None:
    ranks = [[held(rows((7, 3), 3, r % 3), (7, 3), ("m", i)) for i in range(5)] for r in range(6)]
    assert plan_save(ranks) == plan_save([list(mine) for mine in ranks])


def test_the_digest_changes_with_everything_a_plan_depends_on() -> None:
    base = [held([full_box((2, 3))], (2, 3))]
    others = [
        [],
        base * 2,
        [base[0]._replace(path=("model.w",))],
        [base[0]._replace(path=("model", 0))],
        [base[0]._replace(path=("model", "0"))],
        [base[0]._replace(shape=(3, 2))],
        [base[0]._replace(dtype="bfloat16")],
        [base[0]._replace(boxes=(Box((0, 0), (1, 3)),))],
        [base[0]._replace(boxes=())],
    ]
    assert len({digest(each) for each in [base, *others]}) == 1 + len(others)
    assert digest(base) == digest([base[0]._replace(digest=5)])


@pytest.mark.parametrize("kind", ["rows", "flat", "replicated"])
def test_many_arrays_on_many_ranks_are_planned_fast(kind: str) -> None:
    """The bound is 10 s for 1,024 ranks and 1,000 arrays; here for 25,600 holdings, with room for a busy machine."""
    world, arrays = 64, 400

    def boxes(rank: int, i: int) -> list[Box]:
        shape = (1024 + i, 64)
        if kind == "rows":
            return rows(shape, world, rank)
        if kind == "flat":
            n = -(-shape[0] * 64 // world)
            return flat_to_boxes(shape, min(rank * n, shape[0] * 64), min((rank + 1) * n, shape[0] * 64))
        return [full_box(shape)]

    ranks = [[held(boxes(r, i), (1024 + i, 64), ("m", str(i))) for i in range(arrays)] for r in range(world)]
    begun = time.process_time()
    plan = plan_save(ranks)
    assert time.process_time() - begun < 4
    loads = [plan.count_rank_bytes(rank) for rank in range(world)]
    assert max(loads) <= 1.05 * sum(loads) / world + (1024 + arrays) * 64 * 4
