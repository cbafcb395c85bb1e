"""Recognize, check and convert objects in a user's state."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim.swa_utils import AveragedModel

from shardckpt import dtypes
from shardckpt.encodings.tagged_json import SCALARS, NamedValue
from shardckpt.errors import ShardckptError, StateDictError, UnsupportedError, UsageError, describe_with_class
from shardckpt.manifest import Path, dotted
from shardckpt.state.keys.kinds import tensors
from shardckpt.state.keys.slots import has_own_elements, is_wrapper_subclass
from shardckpt.state.local.tensor_subclasses import fill_inner

PLAIN_TENSORS = frozenset({torch.Tensor, nn.Parameter})  # tensor classes without data besides their elements


@runtime_checkable
class Stateful(Protocol):
    """Object that returns and loads its state, such as a scheduler or data loader."""

    def state_dict(self) -> Any:
        """Return the state: plain values, tensors, or containers with these."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Load a state."""


class PerRank:
    """Marks a value or object that each rank saves and loads for itself.

    A load fills `held` in place if possible: tensors and arrays with the saved shape and dtype, and entries in dicts
    and lists. All other values are replaced, so that `held` equals the saved value.

    Args:
        held: Object with `state_dict` and `load_state_dict`, tensor, array, plain value, or dicts and lists with these.

    Attributes:
        held: The given value; after a load, this rank's saved value.
    """

    def __init__(self, held: Any) -> None:
        self.held = held

    def state_dict(self) -> Any:
        """Return this rank's state."""
        return self.held.state_dict() if _takes_state(self.held) else self.held

    def load_state_dict(self, state: Any) -> None:
        """Load this rank's state."""
        self.held = _fill_in_place(self.held, state)

    def load_other_world(self, states: list[Any], rank: int, world: int) -> bool:
        """Load states that another number of ranks saved, if the class supports that.

        Args:
            states: Saved states, in rank order.
            rank: This rank's index.
            world: Current number of ranks.

        Returns:
            Whether the class supports it; the base class does not.
        """
        del states, rank, world
        return False


def _takes_state(held: object) -> bool:
    return isinstance(held, Stateful) and not isinstance(held, type)


def _fill_in_place(held: Any, saved: Any) -> Any:
    """Return a saved value, in `held`'s memory and containers if it fits."""
    if _takes_state(held):
        held.load_state_dict(saved)
    elif isinstance(held, torch.Tensor) and isinstance(saved, torch.Tensor):
        if is_wrapper_subclass(held) or is_wrapper_subclass(saved):
            is_filled = is_wrapper_subclass(held) and is_wrapper_subclass(saved) and fill_inner(held, saved)
            return held if is_filled else saved.to(held.device)
        if held.shape != saved.shape or held.dtype != saved.dtype:
            return saved.to(held.device)
        with torch.no_grad():
            held.copy_(saved)
    elif type(held) is np.ndarray and isinstance(saved, np.ndarray):
        if held.shape != saved.shape or held.dtype != saved.dtype or not held.flags.writeable:
            return saved
        held[...] = saved
    elif isinstance(held, dict) and isinstance(saved, dict):
        given = {key: _fill_in_place(held.get(key), item) for key, item in saved.items()}
        held.clear()
        held.update(given)
    elif type(held) is list and type(saved) is list:
        rest = [None] * (len(saved) - len(held))
        held[:] = [_fill_in_place(own, item) for own, item in zip((*held, *rest), saved, strict=False)]
    else:
        return saved
    return held


def as_root(state: Any) -> Any:
    """Return a state as a dict if it is another mapping, which is read once."""
    return dict(state) if isinstance(state, Mapping) and not isinstance(state, dict) else state


def require_state(state: object) -> None:
    """Require that a state is more than one plain value."""
    if state is None or isinstance(state, (bool, int, float, complex, str, bytes)):
        fix = 'Pass the objects that a resume needs: {"model": model, "optim": optim}.'
        raise UsageError("the state must hold objects to save", found=repr(state), fix=fix)


def keeps_state_elsewhere(optim: torch.optim.Optimizer) -> bool:
    """Return True if an optimizer returns other optimizers' state. Its own `state` is empty."""
    if type(optim).state_dict is torch.optim.Optimizer.state_dict or optim.state:
        return False
    state: Any = optim.state_dict()
    return any(tensors(value) for key, value in state.items() if not str(key).startswith("param_groups"))


def has_step_hooks(optim: torch.optim.Optimizer) -> bool:
    """Return True if torch calls hooks before an optimizer's `step`: its class called `Optimizer.__init__`."""
    return bool(getattr(type(optim).step, "hooked", False))


def is_capturable(optim: torch.optim.Optimizer) -> bool:
    """Return True if an optimizer's steps may be captured in a graph."""
    return any(group.get("capturable") for group in optim.param_groups)


def writes_own_parameters(model: nn.Module) -> bool:
    """Return True if a module in a model writes parameters itself: in its forward, or averages of others."""
    return any(
        isinstance(each, AveragedModel)
        or (isinstance(each, (nn.Embedding, nn.EmbeddingBag)) and each.max_norm is not None)
        for each in model.modules()
    )


def get_state_dict(value: Any, path: Path) -> Any:
    """Call an object's `state_dict`; name the object if it fails."""
    try:
        return value.state_dict()
    except ShardckptError:
        raise
    except Exception as error:
        raise build_call_error("state_dict", path, error) from error


def build_call_error(method: str, path: Path, error: Exception) -> StateDictError:
    """Return the error for an exception in a method that belongs to an object in the state."""
    return StateDictError(f"`{method}` failed", where=dotted(path), found=describe_with_class(error))


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name as torch spells it."""
    return str(dtype).removeprefix("torch.")


def check_tensor(value: torch.Tensor, path: Path) -> None:
    """Refuse tensors that are not fully described by dtype, shape and elements."""
    if type(value) in PLAIN_TENSORS and value.is_cpu and _is_dense(value):
        return
    if is_lazy(value):
        what = "this tensor of a lazy module has no shape yet"
        raise UsageError(what, where=dotted(path), found=type(value).__name__, fix="Run one forward first.")
    kind = ""
    if value.layout is not torch.strided or value.is_nested:
        kind = "a sparse or nested tensor"
    elif value.is_quantized or not dtypes.is_known(dtype_name(value.dtype)):
        kind = f"a tensor of type {dtype_name(value.dtype)}"
    elif value.is_meta:
        kind = "a tensor without data (on the meta device)"
    elif not isinstance(value, DTensor) and not has_own_elements(value):
        kind = f"a tensor of the class {type(value).__name__}"
    if kind:
        way = "save it with `shardckpt.save`" if is_wrapper_subclass(value) else "keep it with `torch.save`"
        raise UnsupportedError(
            f"{kind} can be neither saved nor filled",
            where=dotted(path),
            expected="a dense tensor",
            fix=f"Leave it out and {way}, or save it dense (`dequantize()`, `to_dense()`).",
        )


def _is_dense(value: torch.Tensor) -> bool:
    """Return True if a plain CPU tensor is dense and has a known dtype."""
    return value.layout is torch.strided and not value.is_nested and _is_known(value.dtype)


@cache
def _is_known(dtype: torch.dtype) -> bool:
    return dtypes.is_known(dtype_name(dtype))


def has_memory(tensor: torch.Tensor) -> bool:
    """Return True if a strided tensor's storage has the bytes for all elements."""
    # `tensor.untyped_storage().resize_(0)` frees a storage under its tensor, as FSDP does. A tensor that its class
    # composes from others has a storage that nobody writes.
    if type(tensor) not in PLAIN_TENSORS and not has_own_elements(tensor):
        return False
    elements = tensor.numel()
    if elements and not tensor.is_contiguous():
        elements = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    end = (tensor.storage_offset() + elements) * tensor.element_size()
    return not elements or tensor.untyped_storage().nbytes() >= end


def require_memory(tensor: torch.Tensor, path: Path) -> None:
    """Refuse a tensor whose storage lacks bytes for some elements."""
    if not has_memory(tensor):
        check_tensor(tensor, path)
        raise UnsupportedError(
            "the storage of this tensor was freed or made smaller",
            where=dotted(path),
            found=f"{tensor.untyped_storage().nbytes()} bytes for {list(tensor.shape)} of {dtype_name(tensor.dtype)}",
            fix="Save it while its elements are in memory, or leave it out.",
        )


def to_named_value(value: object) -> NamedValue | None:
    """Return a torch or numpy value as kind and text; None for other values."""
    if isinstance(value, NamedValue):
        return value
    if isinstance(value, torch.dtype):
        return NamedValue("dtype", dtype_name(value))
    if isinstance(value, torch.Size):
        return NamedValue("size", tuple(value))
    if isinstance(value, torch.device):
        return NamedValue("device", str(value))
    if isinstance(value, np.generic) and value.dtype.name in SCALARS:
        return NamedValue("numpy", f"{value.dtype.name} {value.tobytes().hex()}")
    return None


def from_named_value(value: NamedValue) -> object:
    """Return the value for a result of `to_named_value`."""
    if value.kind == "size":
        return torch.Size(value.value)  # type: ignore[arg-type]
    if value.kind == "device":
        try:
            return torch.device(str(value.value))
        except RuntimeError as error:
            what = "this torch has no such device"
            raise UnsupportedError(what, found=value.value, fix="Read it with a newer torch.") from error
    if value.kind == "numpy":
        name, data = str(value.value).split(" ")
        return np.frombuffer(bytes.fromhex(data), name)[0]
    dtype = getattr(torch, str(value.value), None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedError("this torch has no such type", found=value.value, fix="Read it with a newer torch.")
    return dtype
