"""Autograd internals, which only this file uses: hooks around and at the end of a backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakMethod

import torch

Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]


def queue_backward_callback(function: Callable[[], None]) -> None:
    """Run `function` when the graph task that is under way ends; only inside a backward pass.

    Autograd has no public name for it; DistributedDataParallel uses the same one.
    """
    torch.autograd.Variable._execution_engine.queue_callback(function)


def in_backward() -> bool:
    """Tell whether a backward pass is under way on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def differentiating_functionally() -> bool:
    """Tell whether a `torch.func` transform that differentiates is around: its tensors have no storage of their own."""
    level = torch._C._functorch.peek_interpreter_stack()
    return level is not None and level.key().name in ("Grad", "Jvp")


def _hooks_on_entry() -> tuple[Pack, Unpack] | None:
    """Return the saved-tensor hooks that are active now: there is no public way to ask."""
    found: tuple[Pack, Unpack] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return found


class _PostBackward(torch.autograd.Function):
    """Identity; its backward, which runs once all gradients behind it are known, calls `done`."""

    @staticmethod
    def forward(ctx: Any, done: Callable[[], None], *tensors: torch.Tensor) -> Any:
        """Pass the tensors on."""
        ctx.done = done
        ctx.set_materialize_grads(False)
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Call `done` and pass the gradients on."""
        ctx.done()
        return (None, *grads)


def register_post_backward(tensors: list[torch.Tensor], done: Callable[[], None]) -> list[torch.Tensor]:
    """Pass tensors through an identity node that calls `done` in backward.

    Args:
        tensors: Tensors that require gradients; at least one.
        done: Called without arguments, once a backward pass.
    """
    return list(_PostBackward.apply(done, *tensors))  # type: ignore[no-untyped-call]


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

    def record_saved_tensor(self) -> None:
        """Note that a tensor in the buffer was saved by way of these hooks."""

    def unshard_for_backward(self) -> None:
        """Unshard the buffer."""

    def modified_param_message(self) -> str:
        """Return the message for a saved parameter that was changed since."""


class _Saved:
    """A saved tensor in a full buffer: the tensor, its version, and the owner that can unshard it."""

    __slots__ = ("owner", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, owner: Owner) -> None:
        self.tensor = tensor
        self.version = tensor._version
        self.owner = owner


class _Hooks:
    """One pair of hooks: tensors of our buffers are kept by reference, all others go where they went before."""

    def __init__(self, find: Callable[[torch.Tensor], Owner | None], before: tuple[Pack, Unpack] | None) -> None:
        self._find = find
        self._before = before

    @property
    def finder(self) -> Callable[[torch.Tensor], Owner | None]:
        """Whose buffers these hooks know."""
        return self._find

    def pack(self, tensor: torch.Tensor) -> Any:
        owner = self._find(tensor)
        if owner is not None:
            owner.record_saved_tensor()
            return _Saved(tensor.detach(), owner)
        return (tensor.detach(), tensor._version) if self._before is None else self._before[0](tensor)

    def unpack(self, value: Any) -> torch.Tensor:
        if isinstance(value, _Saved):
            value.owner.unshard_for_backward()
            if value.tensor._version != value.version:
                raise RuntimeError(value.owner.modified_param_message())
            return value.tensor
        if self._before is not None:
            return self._before[1](value)
        tensor: torch.Tensor = value[0]
        if tensor._version != value[1]:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {tuple(tensor.shape)} is at version {tensor._version}; expected version {value[1]}"
            )
        return tensor


@contextmanager
def saved_tensor_hooks(find: Callable[[torch.Tensor], Owner | None]) -> Iterator[None]:
    """Inside, unshard a buffer again when backward reads a tensor that was saved in it.

    Args:
        find: Returns the owner of the buffer that a tensor lies in, None for all others.
    """
    before = _hooks_on_entry()
    ours = getattr(before[0], "__self__", None) if before else None
    if not torch.is_grad_enabled() or (isinstance(ours, _Hooks) and ours.finder == find):
        yield
        return
    hooks = _Hooks(find, before)
    with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
        yield
