"""Alternatives for features that the oldest supported torch lacks.

Features are detected by attribute, never by version.

| feature | alternative |
|---|---|
| `torch.accelerator.current_accelerator` without a device | take its error for "no accelerator" |
| `ProcessGroup.get_group_store` | read the table of torch's process groups |
| `distribute_tensor(src_data_rank=)` | torch scatters the value of the mesh's first rank |
| `DeviceMesh._concatenate` | take the dimensions by name from the root mesh of both meshes |
| `Tensor.grad_dtype` | give the parameter the gradient's data while the gradient is assigned |
| `_top_saved_tensors_default_hooks` | record contexts of saved-tensor hooks when they are entered |
| `_torchdynamo_wrapper_id` | hide the function below `torch.compiler.disable`, for which bound methods lose `self` |
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from shardckpt.errors import UsageError

__all__ = [
    "assign_gradient_of_another_type",
    "concatenate_meshes",
    "disable_compiler",
    "find_accelerator",
    "get_group_store",
    "get_saved_tensor_hooks",
    "shard_replicated",
]

PackHook = Callable[[torch.Tensor], Any]
UnpackHook = Callable[[Any], torch.Tensor]


def find_accelerator() -> torch.device | None:
    """Return the accelerator that torch was built for, present or not; None without one."""
    # Old versions of torch return only one that is present. No version initializes it.
    try:
        return torch.accelerator.current_accelerator()
    except RuntimeError:
        return None


def get_group_store(group: dist.ProcessGroup) -> Any:
    """Return the store through which the ranks of a group connected."""
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    return dist.distributed_c10d._get_process_group_store(group)


_TAKES_SOURCE = "src_data_rank" in inspect.signature(distribute_tensor).parameters


def shard_replicated(value: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Return a DTensor from a value that every rank in a mesh has."""
    if _TAKES_SOURCE:
        return distribute_tensor(value, mesh, placements, src_data_rank=None)
    # This torch's `distribute_tensor` always sends: then this is a collective over the mesh.
    return distribute_tensor(value, mesh, placements)


def concatenate_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Return the mesh with the dimensions of several submeshes in one mesh."""
    if hasattr(DeviceMesh, "_concatenate"):
        return DeviceMesh._concatenate(list(meshes))
    resources = torch.distributed.device_mesh._mesh_resources
    roots = [resources.get_root_mesh(mesh) for mesh in meshes]
    if any(root != roots[0] for root in roots):
        raise RuntimeError(f"meshes must be parts of one mesh, got parts of {len(roots)} meshes")
    names = tuple(name for mesh in meshes for name in mesh.mesh_dim_names or ())
    try:
        found: DeviceMesh = roots[0][names]
    except KeyError as error:
        raise UsageError(
            "with this torch the dimensions of data parallelism must come before the others in the mesh",
            found=list(names),
            fix="Order them so in init_device_mesh, or use a newer torch.",
        ) from error
    return found


_HAS_GRAD_DTYPE = hasattr(torch.Tensor, "grad_dtype")


def assign_gradient_of_another_type(parameter: torch.Tensor, grad: torch.Tensor) -> None:
    """Set a parameter's gradient whose dtype differs from the parameter's."""
    if _HAS_GRAD_DTYPE:
        parameter.grad_dtype = grad.dtype
        parameter.grad = grad
        return
    data = parameter.data
    parameter.data = grad
    parameter.grad = grad
    parameter.data = data


def disable_compiler(function: Callable[..., Any], *, recursive: bool) -> Callable[..., Any]:
    """Return a function that torch.compile does not compile, and whose bound methods it calls with their `self`."""
    disable: Any = torch.compiler.disable
    made: Callable[..., Any] = disable(function, recursive=recursive)
    # A compiler that does not compare this id takes the innermost function for a method that is bound.
    if not recursive and not hasattr(made, "_torchdynamo_wrapper_id"):
        vars(made).pop("_torchdynamo_orig_callable", None)
    return made


# ----------------------------------------------------------------------------------------- hooks of saved tensors


class _EnteredHooks(threading.local):
    """Stack of saved-tensor hook contexts that a thread has entered."""

    def __init__(self) -> None:
        self.stack: list[tuple[PackHook, UnpackHook]] = []


_ENTERED = _EnteredHooks()


def _get_recorded_hooks() -> tuple[PackHook, UnpackHook] | None:
    return _ENTERED.stack[-1] if _ENTERED.stack else None


def _record_entered_hooks() -> None:
    """Record entered saved-tensor hook contexts if torch cannot return them."""
    context: Any = torch.autograd.graph.saved_tensors_hooks
    enter, leave = context.__enter__, context.__exit__

    @functools.wraps(enter)
    def record_enter(self: Any) -> None:
        enter(self)
        _ENTERED.stack.append((self.pack_hook, self.unpack_hook))

    @functools.wraps(leave)
    def record_leave(self: Any, *error: object) -> None:
        _ENTERED.stack.pop()
        leave(self, *error)

    context.__enter__, context.__exit__ = record_enter, record_leave


# Return the hooks through which autograd saves tensors on this thread; None if it saves them unchanged.
get_saved_tensor_hooks: Callable[[], tuple[PackHook, UnpackHook] | None] = _get_recorded_hooks

if hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"):
    # The argument makes the function work while torch.compile traces, too.
    get_saved_tensor_hooks = functools.partial(torch._C._autograd._top_saved_tensors_default_hooks, True)
else:
    _record_entered_hooks()
