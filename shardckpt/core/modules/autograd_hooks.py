"""Autograd internals, which only this file uses: hooks around and at the end of a backward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakMethod

import torch
from torch.distributed.tensor import DTensor

from shardckpt.core.modules.compile_guard import compiler_disabled
from shardckpt.torch_features import get_saved_tensor_hooks

Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]


def queue_backward_callback(function: Callable[[], None]) -> None:
    """Run `function` when the graph task that is under way ends; only inside a backward pass.

    Autograd has no public name for it; DistributedDataParallel uses the same one.
    """
    torch.autograd.Variable._execution_engine.queue_callback(function)


def in_backward() -> bool:
    """Return True if a backward pass runs on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def differentiating_functionally() -> bool:
    """Return True inside a `torch.func` transform that differentiates: its tensors have no own storage."""
    level = torch._C._functorch.peek_interpreter_stack()
    return level is not None and level.key().name in ("Grad", "Jvp")


class PostBackward(torch.autograd.Function):
    """Identity, `apply(done, *tensors)`; its backward calls `done`, once all gradients behind it are known."""

    @staticmethod
    def forward(ctx: Any, done: Callable[[], None], *tensors: torch.Tensor) -> Any:
        """Pass the tensors on."""
        ctx.done = done
        ctx.set_materialize_grads(False)
        return tuple(map(torch.Tensor.view_as, tensors, tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Call `done` and pass the gradients on."""
        ctx.done()
        return (None, *grads)


class GradientWatch:
    """Calls back when a leaf gets a gradient: once, and once again after each `rearm`."""

    __slots__ = ("_callback", "_has_fired")

    def __init__(self) -> None:
        self._has_fired = False
        self._callback: WeakMethod[Callable[[], None]] | None = None

    def set_callback(self, method: Callable[[], None]) -> None:
        """Set the method to call when a gradient arrives; the object it is bound to is not kept alive."""
        self._callback = WeakMethod(method)

    def rearm(self) -> None:
        """Call back again when the next gradient arrives."""
        self._has_fired = False

    def watch(self, leaf: torch.Tensor) -> None:
        """Watch a leaf too; it must require gradients."""
        leaf.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]

    def _on_gradient(self, _: torch.Tensor) -> None:
        if self._has_fired:
            return
        self._has_fired = True
        callback = self._callback() if self._callback is not None else None
        if callback is not None:
            callback()


class Owner(Protocol):
    """Owner of a full buffer, which unshards it again after autograd saved its tensors."""

    @property
    def name(self) -> str:
        """What messages call it."""

    def unshard_for_backward(self) -> None:
        """Unshard the buffer."""


class BufferOwners:
    """Owners of full buffers.

    Attributes:
        by_address: By the address of the buffer, which is unique while the buffer has storage.
        saved: Owners of which autograd saved a tensor by way of `SavedParamHooks` in their last forward.
    """

    def __init__(self) -> None:
        self.by_address: dict[int, Owner] = {}
        self.saved: set[Owner] = set()


@dataclass(frozen=True, slots=True)
class _Saved:
    """A saved tensor in a full buffer, its version, and the owner that can unshard it."""

    tensor: torch.Tensor
    version: int
    owner: Owner


@dataclass(frozen=True)
class SavedParamHooks:
    """One pair of hooks: tensors of full buffers are kept by reference, all others go where they went before.

    Attributes:
        owners: The owners of the buffers.
        before: The hooks that are active outside.
    """

    owners: BufferOwners
    before: tuple[Pack, Unpack] | None

    @compiler_disabled
    def pack(self, tensor: torch.Tensor) -> Any:
        """Return what autograd keeps of a tensor."""
        try:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            owner = self.owners.by_address.get(local.untyped_storage().data_ptr())
        except (RuntimeError, NotImplementedError):  # tensors without a storage of their own
            owner = None
        if owner is not None:
            self.owners.saved.add(owner)
            return _Saved(tensor.detach(), tensor._version, owner)
        return (tensor.detach(), tensor._version) if self.before is None else self.before[0](tensor)

    def unpack(self, value: Any) -> torch.Tensor:
        """Return the tensor; unshard its owner first."""
        if isinstance(value, _Saved):
            value.owner.unshard_for_backward()
            if value.tensor._version != value.version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"a parameter of unit {value.owner.name} was changed between its forward and its backward"
                )
            return value.tensor
        if self.before is not None:
            return self.before[1](value)
        tensor: torch.Tensor = value[0]
        if tensor._version != value[1]:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {tuple(tensor.shape)} is at version {tensor._version}; expected version {value[1]}"
            )
        return tensor


def saved_tensor_hooks(owners: BufferOwners) -> AbstractContextManager[object]:
    """Return a context in which autograd saves full parameters so that backward unshards their buffers again."""
    before = get_saved_tensor_hooks()
    ours = getattr(before[0], "__self__", None) if before else None
    if not torch.is_grad_enabled() or (isinstance(ours, SavedParamHooks) and ours.owners is owners):
        return nullcontext()
    hooks = SavedParamHooks(owners, before)
    return torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack)
