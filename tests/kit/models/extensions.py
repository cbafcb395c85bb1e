"""Tensor subclasses with all-gather extensions."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

KEPT = {
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_zeros.default,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.copy_.default,
    torch.ops.aten.view.default,
    torch.ops.aten.as_strided.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.split.Tensor,
    torch.ops.aten.clone.default,
    torch.ops.aten.detach.default,
}


class Halved(torch.Tensor):
    """Stored in float32, gathered in bfloat16 by itself."""

    asked: int = 0

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, data.size(), strides=data.stride(), dtype=data.dtype, device=data.device
        )

    def __init__(self, data: torch.Tensor) -> None:
        self.data_ = data

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(Halved, lambda t: t.data_, (args, kwargs or {}))
        out = func(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, cls, out) if func in KEPT else out

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        assert mesh.ndim == 1
        type(self).asked += 1
        return (self.data_.to(torch.bfloat16),), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> Any:
        assert metadata is None
        (gathered,) = outputs
        if out is not None:
            with torch.no_grad():
                out.copy_(gathered[: out.shape[0]].to(param_dtype))
            return None
        made = gathered.to(param_dtype)
        return made, (made,)


class Scaled(Halved):
    """Gathered as eight bits with a scale for each row."""

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:  # type: ignore[override]
        assert outer_size == (8, 6)
        assert outer_stride == (6, 1)
        assert isinstance(module, nn.Linear)
        assert mp_policy.param_dtype is None
        scale = self.data_.abs().amax(1, keepdim=True) / 127 + 1e-12
        return ((self.data_ / scale).round().to(torch.int8), scale), self.shape

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> Any:
        payload, scale = outputs
        made = (payload.to(param_dtype) * scale)[:8]
        if out is not None:
            with torch.no_grad():
                out.copy_(made)
            return None
        return made, (made,)
