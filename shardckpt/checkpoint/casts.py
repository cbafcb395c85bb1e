"""Casts of what is loaded: a value that the type cannot hold is an error, never another value."""

from __future__ import annotations

import math

import torch

from shardckpt.errors import PrecisionError
from shardckpt.manifest import TensorEntry, dotted


def put(values: torch.Tensor, into: torch.Tensor, entry: TensorEntry) -> None:
    """Copy elements to where they belong, in the type of that place.

    Args:
        values: What was read.
        into: Of the same shape, of any type.
        entry: What it is a part of.

    Raises:
        PrecisionError: One would lose more than rounding: a finite value would become infinite, a number would be
            another integer.
    """
    with torch.no_grad():
        into.copy_(values)
        if _holds_all(into.dtype, values.dtype):
            return
        lost = _lost(values, into.to(values.device))
        if lost.any():
            raise PrecisionError(
                "a value does not fit the type that it is cast to",
                where=dotted(entry.path),
                found=f"{values[lost].flatten()[0].item()} of {_name(values)}",
                expected=_name(into),
                fix="Load it in a wider type.",
            )


def _holds_all(wanted: torch.dtype, stored: torch.dtype) -> bool:
    """Tell whether a type has room for every value of another, rounding aside; complex ones are left to torch."""
    if wanted == stored or wanted.is_complex or stored.is_complex or stored == torch.bool:
        return True
    if wanted.is_floating_point:
        most = torch.finfo(stored).max if stored.is_floating_point else torch.iinfo(stored).max
        return torch.finfo(wanted).max >= most
    if wanted == torch.bool or stored.is_floating_point:
        return False
    room, used = torch.iinfo(wanted), torch.iinfo(stored)
    return room.min <= used.min and used.max <= room.max


def _lost(values: torch.Tensor, cast: torch.Tensor) -> torch.Tensor:
    """Tell which elements became others by more than rounding."""
    if cast.dtype.is_floating_point:
        wide = values.double()
        return wide.isfinite() & (~cast.float().isfinite() | (wide.abs() > _largest(cast.dtype)))
    return ~((cast.double() - values.double()).abs() < 1)


def _largest(dtype: torch.dtype) -> float:
    """Return up to where numbers are rounded to the largest of a type: some types saturate beyond."""
    told = torch.finfo(dtype)
    return told.max + told.eps / 2 * 2.0 ** (math.frexp(told.max)[1] - 1)


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
