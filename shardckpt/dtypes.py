"""Names and widths of dtypes in torch's and in safetensors' spelling.

Imports neither torch nor NumPy. Safetensors names: https://huggingface.co/docs/safetensors (format section), release
0.8.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

# A number with half a byte, and torch's type for two: where safetensors counts numbers, torch counts pairs.
HALF_BYTE, HALF_BYTE_PAIR = "float4_e2m1fn", "float4_e2m1fn_x2"

# Torch's dtype name to its name in a safetensors header. Types below one byte have names in torch's style. The order is
# that of the format's reference writer, which writes the last types first.
SAFETENSORS_NAMES = {
    "bool": "BOOL",
    HALF_BYTE_PAIR: "F4",
    HALF_BYTE: "F4",
    "float6_e2m3fn": "F6_E2M3",
    "float6_e3m2fn": "F6_E3M2",
    "uint8": "U8",
    "int8": "I8",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "complex64": "C64",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
}

TORCH_NAMES = {short: name for name, short in SAFETENSORS_NAMES.items()}

UNKNOWN = "unknown"  # dtype of a tensor whose name is known but whose file is missing; it has no bytes

_BITS = {
    "bool": 8,
    "uint8": 8,
    "int8": 8,
    "int16": 16,
    "uint16": 16,
    "int32": 32,
    "uint32": 32,
    "int64": 64,
    "uint64": 64,
    "float16": 16,
    "bfloat16": 16,
    "float32": 32,
    "float64": 64,
    "complex32": 32,
    "bcomplex32": 32,
    "complex64": 64,
    "complex128": 128,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
    "float8_e4m3fnuz": 8,
    "float8_e5m2fnuz": 8,
    "float8_e8m0fnu": 8,
    "float6_e2m3fn": 6,
    "float6_e3m2fn": 6,
    HALF_BYTE_PAIR: 8,
    HALF_BYTE: 4,
    UNKNOWN: 0,
}

# GGUF's quantized types, which only that target writes: elements and bytes in a block along the last dimension.
QUANTIZED = {"q8_0": (32, 34)}

# Dtypes that a cast between float types applies to; fp8 and narrower types have scales and are never cast.
FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})

# Pairs of float types, the narrower first: each value of the first is one of the second.
_EXACT_UPCASTS = frozenset(
    {
        ("float16", "float32"),
        ("bfloat16", "float32"),
        ("float16", "float64"),
        ("bfloat16", "float64"),
        ("float32", "float64"),
    }
)

# Short names that the command line accepts.
SHORT_NAMES = {
    "fp64": "float64",
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "f16": "float16",
    "half": "float16",
    "float": "float32",
    "double": "float64",
}


def bits(name: str) -> int:
    """Return the width of one element in bits; a quantized type's average is rounded up."""
    if name in QUANTIZED:
        elements, size = QUANTIZED[name]
        return -(-size * 8 // elements)
    return _BITS[name]


def block_elements(name: str) -> int:
    """Return the elements in a quantized type's block, else 1."""
    return QUANTIZED[name][0] if name in QUANTIZED else 1


def is_known(name: str) -> bool:
    """Return True if `name` is a dtype with a known width."""
    return name in _BITS and name != UNKNOWN


def is_exact_upcast(stored: str, wanted: str) -> bool:
    """Return True if a cast to a wider float type keeps every value."""
    return (stored, wanted) in _EXACT_UPCASTS


def nbytes(name: str, elements: int) -> int:
    """Return the bytes of `elements` packed elements, rounded up."""
    if name in QUANTIZED:
        block, size = QUANTIZED[name]
        return -(-elements // block) * size
    return (elements * _BITS[name] + 7) // 8


@lru_cache(maxsize=4096)  # checkpoints of 100,000 tensors have a few dozen dtypes and shapes
def array_nbytes(name: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a packed array with `shape`, rounded up."""
    return nbytes(name, prod(shape))
