"""Names and widths of types, compared with torch's and safetensors' own."""

from __future__ import annotations

import torch
from safetensors.torch import _TYPES

from shardckpt import dtypes


def test_every_type_of_torch_has_its_width() -> None:
    ours = {name: dtypes.bits(name) for name in dtypes._BITS if hasattr(torch, name)}
    sizes = {name: getattr(torch, name).itemsize * 8 for name in ours}
    assert ours == sizes
    assert len(ours) >= 20


def test_names_in_headers_are_those_of_safetensors() -> None:
    theirs = {str(kind).removeprefix("torch."): short for short, kind in _TYPES.items()}
    ours = {name: short for name, short in dtypes.SAFETENSORS_NAMES.items() if name in theirs}
    assert ours == {name: short for name, short in theirs.items() if name in ours}
    assert set(theirs) == set(ours)


def test_bytes_of_narrow_types_are_rounded_up() -> None:
    assert [dtypes.nbytes("float4_e2m1fn", n) for n in (0, 1, 2, 3)] == [0, 1, 1, 2]
    assert dtypes.nbytes("float6_e2m3fn", 4) == 3
    assert dtypes.nbytes("complex128", 3) == 48


def test_an_unknown_type_is_not_known() -> None:
    assert not dtypes.is_known(dtypes.UNKNOWN)
    assert not dtypes.is_known("float7")
