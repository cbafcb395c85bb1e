"""Plan a save whose last ranks leave after the plan: they write nothing, and send what they alone keep."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from shardckpt.boxes import full_box
from shardckpt.checkpoint.planning.save_plan import GlobalSavePlan, LocalSavePlan, create_global_plan, drop_boxes
from shardckpt.checkpoint.stateful.flatten import FlattenedState
from shardckpt.checkpoint.stateful.stateful import dtype_name
from shardckpt.checkpoint.stateful.tensor_bytes import tensor_bytes, view_as_bytes
from shardckpt.errors import IncompleteError
from shardckpt.manifest import Path, dotted
from shardckpt.plan.layout.write_plan import LocalTensor
from shardckpt.state.local.tensor_shards import LocalShard, TensorShards

# With more tensors in `PerRank`, the save needs ranks that leave until its commit.
MAX_SENT_BYTES = 16 << 20  # of one rank
MAX_TAKEN_BYTES = 256 << 20  # of all ranks


def collect_own_tensors(flattened: FlattenedState, leaving: int) -> dict[Path, str]:
    """Return the tensors that this rank saves for itself (`PerRank`) as text, without those that are too large."""
    roots = flattened.per_rank_values
    own = {
        path: array.shards[0].tensor
        for path, array in flattened.arrays.items()
        if any(path[:length] in roots for length in range(len(path))) and _is_full(array)
    }
    left, sent = min(MAX_SENT_BYTES, MAX_TAKEN_BYTES // leaving), {}
    for path, tensor in sorted(own.items(), key=lambda item: item[1].nbytes):
        left -= tensor.nbytes
        if left < 0:  # the plan names this one
            break
        sent[path] = base64.b64encode(b"".join(tensor_bytes(tensor))).decode()
    return sent


def _is_full(array: TensorShards) -> bool:
    return [shard.box for shard in array.shards] == [full_box(array.shape)]


def take_tensors(
    flattened: FlattenedState, local_plans: Sequence[LocalSavePlan], sent: Sequence[Mapping[Path, str]]
) -> tuple[LocalSavePlan, ...]:
    """Add the tensors that ranks have sent to rank 0's state; return the plans, in which rank 0 has them."""
    taken = []
    for local_plan, contents in zip(local_plans, sent, strict=True):
        for tensor in local_plan.arrays if contents else ():
            if tensor.path in contents:
                flattened.arrays[tensor.path] = _decode(tensor, contents[tensor.path])
                taken.append(tensor)
    first, *others = local_plans
    return (replace(first, arrays=(*first.arrays, *taken)) if taken else first, *others)


def _decode(tensor: LocalTensor, content: str) -> TensorShards:
    dtype = getattr(torch, tensor.dtype)
    assert isinstance(dtype, torch.dtype) and dtype_name(dtype) == tensor.dtype
    values = torch.empty(tensor.shape, dtype=dtype)
    if values.nbytes:
        view_as_bytes(values).copy_(torch.frombuffer(bytearray(base64.b64decode(content)), dtype=torch.uint8))
    return TensorShards(tensor.shape, dtype, (LocalShard(full_box(tensor.shape), values),))


def plan_for_staying(
    local_plans: Sequence[LocalSavePlan], count: int, stages: Sequence[int] = ()
) -> GlobalSavePlan | str:
    """Plan a save that the first ranks write alone; return instead which elements only the others have, as text."""
    held = [*local_plans[:count], *map(drop_boxes, local_plans[count:])]
    try:
        plan = create_global_plan(held, stages)
    except IncompleteError as error:
        return str(error)
    others = next((chunk for rank_plan in plan.rank_plans[count:] for chunk in rank_plan.chunks), None)
    if others is not None:  # a tensor without elements
        return f"{dotted(others.path)}: no other rank has it"
    return replace(plan, rank_plans=plan.rank_plans[:count])
