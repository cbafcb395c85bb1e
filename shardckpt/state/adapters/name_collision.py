"""Names that become equal without wrapper segments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from shardckpt.core.modules.dtensors import local
from shardckpt.core.modules.fqn_and_params import clean
from shardckpt.errors import NameCollisionError
from shardckpt.state.keys.kinds import is_sharded_tensor

_FIX = (
    "Names are without wrapper segments (`_orig_mod` from torch.compile, `_fsdp_wrapped_module`,"
    " `_checkpoint_wrapped_module`, `module` from DDP). Rename one of the two, or its module."
)


def build_collision(root: nn.Module, name: str, *places: tuple[nn.Module, str]) -> NameCollisionError:
    """Return the error for two tensors with one name."""
    paths = {id(module): path for path, module in root.named_modules()}
    return _build(name, [f"{paths[id(module)]}.{attribute}".removeprefix(".") for module, attribute in places])


def clean_keys(state: Mapping[str, Any]) -> dict[str, Any]:
    """Remove wrapper segments from a state's names."""
    cleaned: dict[str, Any] = {}
    for name, value in state.items():
        if not _is_same(cleaned.setdefault(clean(name), value), value):
            raise _build(clean(name), [each for each in state if clean(each) == clean(name)])
    return cleaned


def _is_same(one: Any, other: Any) -> bool:
    """Return True for one value, or two tensors with one memory, as a state dict has for a tied parameter."""
    are_tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    if one is other or not are_tensors or is_sharded_tensor(one) or is_sharded_tensor(other):
        return one is other
    first, second = local(one), local(other)
    return first.shape == second.shape and first.data_ptr() == second.data_ptr()


def _build(name: str, spellings: Iterable[str]) -> NameCollisionError:
    listed = " and ".join(map(repr, spellings))
    return NameCollisionError(f"{listed} would both be named {name!r}", fix=_FIX)
