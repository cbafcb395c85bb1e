"""Cast loaded values; a value that the dtype cannot represent is an error."""

from __future__ import annotations

import math

import torch

from shardckpt.errors import PrecisionError
from shardckpt.manifest import TensorEntry, dotted


def put(values: torch.Tensor, into: torch.Tensor, entry: TensorEntry) -> None:
    """Copy elements to a target, converted to its dtype."""
    with torch.no_grad():
        lost = _copy(values, into)
    if lost is not None:
        raise PrecisionError(
            "a value does not fit the type that it is cast to",
            where=dotted(entry.path),
            found=f"{values[lost].flatten()[0].item()} of {_name(values)}",
            expected=_name(into),
            fix="Load it in a wider type." if into.is_complex() or not values.is_complex() else "Load it as complex.",
        )


def _copy(values: torch.Tensor, into: torch.Tensor) -> torch.Tensor | None:
    """Copy elements; return a mask for elements that changed too much, or None."""
    if values.is_complex() and not into.is_complex():
        lost = values.imag != 0  # NaN too
        return lost if lost.any() else _copy(values.real, into)
    if into.is_complex() and values.dtype != into.dtype:
        parts = torch.view_as_real(into)
        if values.is_complex():
            lost_parts = _copy(torch.view_as_real(values.resolve_conj()), parts)
            return None if lost_parts is None else lost_parts.any(-1)
        parts[..., 1] = 0
        return _copy(values, parts[..., 0])
    into.copy_(values)
    if _holds_all(into.dtype, values.dtype):
        return None
    lost = _lost(values, into.to(values.device))
    return lost if lost.any() else None


def _holds_all(wanted: torch.dtype, stored: torch.dtype) -> bool:
    """Return True if a real dtype represents another's values, up to rounding."""
    if stored in (wanted, torch.bool):
        return True
    if wanted.is_floating_point:
        most = torch.finfo(stored).max if stored.is_floating_point else torch.iinfo(stored).max
        return torch.finfo(wanted).max >= most
    if wanted == torch.bool or stored.is_floating_point:
        return False
    room, used = torch.iinfo(wanted), torch.iinfo(stored)
    return room.min <= used.min and used.max <= room.max


def _lost(values: torch.Tensor, cast: torch.Tensor) -> torch.Tensor:
    """Return a mask for elements that changed by more than rounding."""
    if cast.dtype.is_floating_point:
        wide = values.double()
        return wide.isfinite() & (~cast.float().isfinite() | (wide.abs() > _largest(cast.dtype)))
    return ~((cast.double() - values.double()).abs() < 1)


def _largest(dtype: torch.dtype) -> float:
    """Return the largest number that rounds to a dtype's maximum; some saturate."""
    info = torch.finfo(dtype)
    return info.max + info.eps / 2 * 2.0 ** (math.frexp(info.max)[1] - 1)


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
