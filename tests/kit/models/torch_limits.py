"""What the installed torch cannot do that newer ones can: a test in which torch itself fails for that is skipped."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch.distributed.checkpoint import state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from shardckpt.core.modules.dtensors import gather_full_tensor


def find_limits() -> dict[str, str]:
    """Return the errors of torch's own code that are no fault of ours here: a part of the message, and the reason."""
    found = {}
    if not hasattr(torch.cpu.Stream, "record_event"):
        found["Cannot use ReduceOp.AVG with Gloo"] = "gloo of this torch computes no means"
    if not hasattr(DeviceMesh, "_concatenate"):
        found["data parallelism must come before the others"] = "this torch joins meshes in their order alone"
    try:
        _StridedShard(0, split_factor=2)._split_tensor(torch.ones(6), 2)
    except AssertionError:
        found["_StridedShard requires even sharding"] = "this torch gathers no uneven rows of two mesh dimensions"
        found["sharding does not support uneven sharding"] = "this torch shards no uneven rows over two mesh dimensions"
    return found


def complete_fully_shard_on_cpu() -> None:
    """Let torch's own `fully_shard` run on the CPU with torch 2.6 too, where its authors ran it on GPUs only.

    So tests compare with it, and save and load its states. It lacks two methods, which newer versions leave empty;
    the end of a backward waits on CUDA's stream for a gather that nothing has used; autograd takes a gather into
    parameters for a change of them, which it does not on a GPU; and a reduce-scatter of gloo that is asked for the mean
    returns the sum, without an error.
    """
    if hasattr(torch.cpu.Stream, "record_event"):
        return
    torch.cpu.Stream.record_event = lambda self, event=None: event or torch.cpu.Event()
    torch.cpu.Stream.wait_event = lambda self, event: None
    module = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    copy_out, finalize = module.foreach_all_gather_copy_out, module.FSDPParamGroup.finalize_backward

    def finalize_without_event(group: Any) -> None:
        if group._all_gather_result is not None:
            group._all_gather_result = group._all_gather_result._replace(all_gather_event=None)
        finalize(group)

    def keep_versions(gathered: Any, params: list[Any], group: Any) -> None:
        before = [(output, output._version) for param in params for output in param.all_gather_outputs]
        copy_out(gathered, params, group)
        for output, version in before:
            torch._C._autograd._unsafe_set_version_counter(output, version)

    module.foreach_all_gather_copy_out = keep_versions
    module.FSDPParamGroup.finalize_backward = finalize_without_event
    collectives = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_collectives")
    collectives._get_gradient_divide_factors = divide_after_sum


def divide_after_sum(scattering: dist.ProcessGroup, replicas: dist.ProcessGroup | None, *_: Any) -> tuple[float, float]:
    """Return the divisors of gradients before and after a sum over all ranks of data parallelism."""
    return 1.0, float(scattering.size() * (replicas.size() if replicas is not None else 1))


def places_uneven_rows() -> bool:
    """Return whether this torch puts the rows of two mesh dimensions in their order, if the ranks do not divide them.

    Versions that do not return them in another order from `full_tensor()`, without an error.
    """
    try:
        first, _ = _StridedShard(0, split_factor=2)._split_tensor(torch.arange(6), 2, with_padding=False)[0]
    except AssertionError:
        return True  # it refuses them: `LIMITS`
    return bool(first.tolist() == [0, 1, 3, 4])


def full_tensor(value: DTensor) -> torch.Tensor:
    """Return the full tensor as torch joins it, or as we do where this torch would misplace its rows."""
    return value.full_tensor() if PLACES_UNEVEN_ROWS else gather_full_tensor(value)


PLACES_UNEVEN_ROWS = places_uneven_rows()
LIMITS = find_limits()
SHARDS_UNEVEN_ROWS_TWICE = not any("uneven sharding" in message for message in LIMITS)
"""True if torch's `fully_shard` takes tensor-parallel parameters whose rows the ranks do not divide."""
RUNS_FULLY_SHARD_ON_CPU = hasattr(torch.cpu.Stream, "record_event")
"""True if torch's `fully_shard` runs on the CPU without `complete_fully_shard_on_cpu`."""
SAVES_EMPTY_SHARDS = "is_meta" not in inspect.getsource(state_dict._get_model_state_dict)
"""True if torch's `get_state_dict` takes a wrapper of torch's on a rank that has no part of a parameter."""
HAS_INNERMOST_HOOKS = hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks")
"""True if torch returns the hooks through which it saves tensors, and our engine need not record them."""
complete_fully_shard_on_cpu()

needs_torch_fully_shard_on_cpu = pytest.mark.skipif(
    not RUNS_FULLY_SHARD_ON_CPU, reason="torch's `fully_shard` of this torch runs on GPUs only"
)
"""Of tests whose processes call it as users do."""

compares_with_newer_torch = pytest.mark.skipif(
    not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"), reason="this torch has fewer names and arguments"
)
"""Of tests that compare our names and arguments with torch's."""

needs_silent_sharding = pytest.mark.skipif(
    "src_data_rank" not in inspect.signature(distribute_tensor).parameters,
    reason="this torch shards through a collective, in which a rank waits for those that have failed",
)
"""Of tests in which one rank goes on with a load alone."""


def find_reason(messages: list[str]) -> str | None:
    """Return why a test cannot run, if each of some ranks' errors is a limit of the installed torch.

    Args:
        messages: Of the ranks that raised.
    """
    reasons = {next((why for part, why in LIMITS.items() if part in message), None) for message in messages}
    return reasons.pop() if len(reasons) == 1 else None
