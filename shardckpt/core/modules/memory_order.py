"""Memory order: a dense tensor's dimensions from the slowest to the fastest; empty if row-major."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return a dense tensor's dimensions from slowest to fastest; empty if row-major."""
    if tensor.is_contiguous():
        return ()
    steps = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda d: (-steps[d], d)))
    return order if tensor.permute(order).is_contiguous() else ()


def view_in_order(flat: torch.Tensor, shape: Sequence[int], order: tuple[int, ...]) -> torch.Tensor:
    """Return a view of a 1-D tensor, whose elements are in memory order, with a shape and that order."""
    if not order:
        return flat.view(shape)
    return flat.view([shape[d] for d in order]).permute([order.index(d) for d in range(len(order))])
