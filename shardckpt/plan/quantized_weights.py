"""Find weights that a model stores quantized, and what belongs to them, by names, dtypes and shapes.

Covers bitsandbytes, GPTQ, AWQ, compressed-tensors, fp8 by rows, blocks and tensors, torchao, and others that keep a
packed weight and its scales in one module.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set

from shardckpt.dtypes import FLOATS
from shardckpt.manifest import TensorEntry

QUANTIZATION_CONFIG = "quantization_config"  # key in `config.json`

# Quantized weights have these dtypes; masks are `bool`, and indices and counters `int64`.
_PACKED = re.compile(r"u?int(8|16|32)|float[468]_.*")

_PART = ".absmax"  # each 4-bit weight of bitsandbytes has a part with this name

_SCALE = re.compile(r"(.*_)?scales?(_inv|_ub|_[0-9])?")
# Last name parts of ordinary floats in a quantized module.
_CAST = re.compile(r"(.*_)?bias|weight")


def find_quantized(tensors: Mapping[str, TensorEntry]) -> dict[str, str]:
    """Return modules with quantized weights, each with the first such tensor's name."""
    packed = _find_packed(tensors)
    return {_find_module(name, packed): name for name in reversed(list(tensors)) if name in packed}


def list_uncast(tensors: Mapping[str, TensorEntry], config: Mapping[str, object]) -> frozenset[str]:
    """Return the floats whose meaning a cast would change: scales, zero points, tables and packed bits."""
    packed = _find_packed(tensors)
    if not packed and QUANTIZATION_CONFIG not in config:
        return frozenset()
    modules = {_find_module(name, packed) for name in packed}

    def is_uncast(name: str) -> bool:
        parent, _, last = name.rpartition(".")
        if name in packed or parent in packed or _SCALE.fullmatch(last):
            return True
        return parent in modules and not _CAST.fullmatch(last)

    return frozenset(name for name, entry in tensors.items() if entry.dtype in FLOATS and is_uncast(name))


def _find_packed(tensors: Mapping[str, TensorEntry]) -> Set[str]:
    """Return quantized weights' names; parts below a name show weights that bitsandbytes packed in floats."""
    narrow = {name for name, entry in tensors.items() if len(entry.shape) > 1 and _PACKED.fullmatch(entry.dtype)}
    return narrow | {name.removesuffix(_PART) for name in tensors if name.endswith(_PART)} & tensors.keys()


def _find_module(name: str, packed: Set[str]) -> str:
    """Return a tensor's module; parts such as `weight.absmax` are in the weight's module."""
    parent = name.rpartition(".")[0]
    return parent.rpartition(".")[0] if parent in packed else parent
