"""Autograd hooks for saved tensors, gradients and the end of backward; what profilers and torch.compile see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol, TypeVar, cast
from weakref import WeakMethod

import torch
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from shardckpt.torch_features import disable_compiler, get_saved_tensor_hooks

_P = ParamSpec("_P")
_T = TypeVar("_T")

_DISABLED: list[tuple[type, str, bool]] = []

Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]


class _CompilerDisabled:
    """Stand-in for a method while its class is created, to record the class."""

    def __init__(self, function: Callable[..., Any], shallow: bool) -> None:
        self._function = function
        self._shallow = shallow

    def __set_name__(self, owner: type, name: str) -> None:
        setattr(owner, name, self._function)
        _DISABLED.append((owner, name, self._shallow))


def compiler_disabled(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Disable compilation for a method and for the functions that it calls."""
    return cast(Callable[_P, _T], _CompilerDisabled(method, shallow=False))


def compiler_disabled_shallow(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Disable compilation for a method, but not for the functions that it calls."""
    return cast(Callable[_P, _T], _CompilerDisabled(method, shallow=True))


def apply_compiler_disable() -> None:
    """Apply `torch.compiler.disable` to all marked methods, before a module with units is compiled."""
    # Not at import: torch then imports its compiler, which takes a second. Optimizers import it too.
    while _DISABLED:
        owner, name, nested = _DISABLED.pop()
        setattr(owner, name, disable_compiler(owner.__dict__[name], recursive=not nested))


def queue_backward_callback(function: Callable[[], None]) -> None:
    """Run `function` at the end of the current graph task; call it only inside a backward pass."""
    # Autograd does not have a public function for this; DistributedDataParallel uses the same private one.
    torch.autograd.Variable._execution_engine.queue_callback(function)


_NO_RANGE = nullcontext()


def profile_range(label: str, unit: str = "") -> AbstractContextManager[object]:
    """Return a context that a profiler shows as `FSDP::label (unit)`, with torch's labels."""
    if not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]  # without a profiler, this costs 0.2 us
        return _NO_RANGE
    return record_function(f"FSDP::{label} ({unit})" if unit else f"FSDP::{label}")


@contextmanager
def leave_inference_mode() -> Iterator[None]:
    """Make tensors that may be trained later, without a graph."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def in_backward() -> bool:
    """Return True if this thread is running a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def differentiating_functionally() -> bool:
    """Return True inside a differentiating `torch.func` transform, whose tensors do not have their own storage."""
    level = torch._C._functorch.peek_interpreter_stack()
    return level is not None and level.key().name in ("Grad", "Jvp")


class PostBackward(torch.autograd.Function):
    """Identity `apply(done, *tensors)`; its backward calls `done` first."""

    @staticmethod
    def forward(ctx: Any, done: Callable[[], None], *tensors: torch.Tensor) -> Any:
        """Return the tensors unchanged."""
        ctx.done = done
        ctx.set_materialize_grads(False)
        return tuple(map(torch.Tensor.view_as, tensors, tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Call `done` and return the gradients unchanged."""
        ctx.done()
        return (None, *grads)


class GradientWatch:
    """Calls back for the watched leaves' first gradient, once after each `rearm`."""

    __slots__ = ("_callback", "_has_fired")

    def __init__(self) -> None:
        self._has_fired = False
        self._callback: WeakMethod[Callable[[], None]] | None = None

    def set_callback(self, method: Callable[[], None]) -> None:
        """Set the method to call when a gradient arrives; keeps only a weak reference."""
        self._callback = WeakMethod(method)

    def rearm(self) -> None:
        """Call the callback again for the next gradient."""
        self._has_fired = False

    def watch(self, leaf: torch.Tensor) -> None:
        """Add a leaf to watch; it must require gradients."""
        leaf.register_post_accumulate_grad_hook(self.notify)  # type: ignore[no-untyped-call]

    def notify(self, _: torch.Tensor | None = None) -> None:
        """Call the callback if this is the first gradient since `rearm`."""
        if self._has_fired:
            return
        self._has_fired = True
        callback = self._callback() if self._callback is not None else None
        if callback is not None:
            callback()


class Owner(Protocol):
    """Owns a full buffer, and can unshard it again for backward."""

    @property
    def name(self) -> str:
        """The owner's name in messages."""

    def unshard_for_backward(self) -> None:
        """Unshard the buffer."""


class BufferOwners:
    """Finds the units that own full buffers."""

    def __init__(self) -> None:
        # Keys are data pointers, which are unique while a buffer has storage.
        self.by_address: dict[int, Owner] = {}
        # Owners whose tensors autograd saved through `SavedParamHooks` in their last forward.
        self.saved: set[Owner] = set()


@dataclass(frozen=True, slots=True)
class _Saved:
    """Saved tensor in a full buffer, its version, and the owner that can unshard it."""

    tensor: torch.Tensor
    version: int
    owner: Owner


@dataclass(frozen=True)
class SavedParamHooks:
    """Saved tensor hooks that keep tensors in full buffers by reference."""

    # Other tensors go to the hooks that were active before.

    owners: BufferOwners
    before: tuple[Pack, Unpack] | None  # pack and unpack; None without such hooks

    @compiler_disabled
    def pack(self, tensor: torch.Tensor) -> Any:
        """Return the object that autograd saves for a tensor."""
        try:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            owner = self.owners.by_address.get(local.untyped_storage().data_ptr())
        except (RuntimeError, NotImplementedError):  # tensors without their own storage
            owner = None
        if owner is not None:
            self.owners.saved.add(owner)
            return _Saved(tensor.detach(), tensor._version, owner)
        return (tensor.detach(), tensor._version) if self.before is None else self.before[0](tensor)

    def unpack(self, value: Any) -> torch.Tensor:
        """Unshard a saved tensor's owner and return the tensor."""
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
    """Return a context in which autograd saves references to full parameters; backward unshards their buffers again."""
    before = get_saved_tensor_hooks()
    ours = getattr(before[0], "__self__", None) if before else None
    if not torch.is_grad_enabled() or (isinstance(ours, SavedParamHooks) and ours.owners is owners):
        return nullcontext()
    hooks = SavedParamHooks(owners, before)
    return torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack)
