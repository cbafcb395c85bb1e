"""Find weights that a model stores quantized, and plan fp8 weights with a scale for each block.

Quantized weights, and what belongs to them, are found by names, dtypes and shapes. This covers bitsandbytes, GPTQ, AWQ,
compressed-tensors, fp8 by rows, blocks and tensors, torchao, and others that keep a packed weight and its scales in one
module.

The layout of fp8 blocks follows DeepSeek-V3 (`README_WEIGHTS.md`, `inference/kernel.py` in its repository).
transformers (`integrations/finegrained_fp8.py`, 5.23) and vLLM (`layers/quantization/fp8.py`, 0.33) read it. A weight
is stored as `float8_e4m3fn`; `<name>_scale_inv` in float32 multiplies its blocks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from fnmatch import fnmatchcase

from shardckpt.boxes import Shape
from shardckpt.dtypes import FLOATS
from shardckpt.errors import UnsupportedError, UsageError
from shardckpt.manifest import TensorEntry
from shardckpt.plan.naming.fqn import require_matches

METHOD = "fp8-block"  # as `--quantize` spells it

DTYPE = "float8_e4m3fn"
LARGEST = 448.0  # largest finite value
Blocks = tuple[int, int]  # elements per dimension; the last blocks may have fewer
BLOCK: Blocks = (128, 128)  # for written weights

_KEPT_KEY = "modules_to_not_convert"
_SCALE_SUFFIX = "_scale_inv"
_WEIGHT_SUFFIX = ".weight"
# Last name parts of modules that stay unquantized: embeddings, heads and routers.
_NOT_LINEAR = re.compile(r".*embed.*|wte|wpe|shared|(.*_)?(head|gate|router)|output|score|classifier")

# Model types in transformers with `Conv1D` layers; their weights are transposed, and no reader takes them as fp8.
TRANSPOSED = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer"})

QUANTIZATION_CONFIG = "quantization_config"  # key in `config.json`

# Quantized weights have these dtypes; masks are `bool`, and indices and counters `int64`.
_PACKED = re.compile(r"u?int(8|16|32)|float[468]_.*")

_PART = ".absmax"  # each 4-bit weight of bitsandbytes has a part with this name

_SCALE = re.compile(r"(.*_)?scales?(_inv|_ub|_[0-9])?")
# Last name parts of ordinary floats in a quantized module.
_CAST = re.compile(r"(.*_)?bias|weight")


def name_scale(weight: str) -> str:
    """Return the name of a weight's scales."""
    return weight + _SCALE_SUFFIX


def count_blocks(shape: Shape, block: Blocks = BLOCK) -> Shape:
    """Count blocks in each dimension."""
    return tuple(-(-n // step) for n, step in zip(shape, block, strict=True))


def choose_weights(
    tensors: Mapping[str, TensorEntry],
    config: Mapping[str, object],
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> list[str]:
    """Return names of weights to quantize."""
    if QUANTIZATION_CONFIG in config or (DTYPE in {entry.dtype for entry in tensors.values()}):
        raise UnsupportedError(
            "the model is already quantized",
            found=_describe(config.get(QUANTIZATION_CONFIG)),
            fix="Convert the original model; --dtype bf16 dequantizes fp8 blocks.",
        )
    if config.get("model_type") in TRANSPOSED:
        raise UnsupportedError(
            "this model's weights are transposed (Conv1D), and no reader takes such weights as fp8",
            found=f"model_type {config['model_type']}",
        )
    require_matches((*include, *exclude), list(tensors))
    # Float matrices named `*.weight` are taken, but no embeddings, heads and routers. Readers refuse matrices that end
    # in smaller blocks, or read them wrongly.
    taken = [name for name, entry in tensors.items() if _is_taken(name, entry, include)]
    found = [name for name in taken if not _matches(name, exclude)]
    if not found:
        odd = sum(ends_in_smaller_blocks(tensors[name].shape) for name in tensors if is_linear(name, tensors[name]))
        raise UsageError(
            "there are no weights to quantize",
            found=f"{len(tensors)} tensors{f', {odd} with a width that {BLOCK[0]} does not divide' if odd else ''}",
            fix="Choose them by globs.",
        )
    return found


def ends_in_smaller_blocks(shape: Shape) -> bool:
    """Return True if a weight has several blocks in a dimension, and the last one is smaller."""
    return len(shape) == 2 and any(n > step and n % step for n, step in zip(shape, BLOCK, strict=True))


def is_stacked(name: str, entry: TensorEntry) -> bool:
    """Return True for several experts' weights in one tensor, which stay unquantized."""
    return len(entry.shape) == 3 and entry.dtype in FLOATS and "experts" in name.split(".")


def is_linear(name: str, entry: TensorEntry) -> bool:
    """Return True for a linear layer's weight, by its name and shape."""
    return _is_matrix(name, entry) and not _NOT_LINEAR.fullmatch(_module(name).rpartition(".")[2])


def _is_matrix(name: str, entry: TensorEntry) -> bool:
    return name.endswith(_WEIGHT_SUFFIX) and len(entry.shape) == 2 and entry.dtype in FLOATS and all(entry.shape)


def _is_taken(name: str, entry: TensorEntry, include: Sequence[str]) -> bool:
    """Return True if a tensor is quantized unless it is excluded."""
    if not include:
        return is_linear(name, entry) and not ends_in_smaller_blocks(entry.shape)
    if not _matches(name, include):
        return False
    if not _is_matrix(name, entry):
        raise UsageError(
            f"--quantize-include matches {name}, which cannot be quantized",
            found=f"{entry.dtype} {list(entry.shape)}",
            expected="a float matrix named *.weight",
        )
    return True


def plan_config(names: Mapping[str, TensorEntry], quantized: Iterable[str]) -> dict[str, object]:
    """Return the `quantization_config` for a model."""
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        _KEPT_KEY: _list_kept_modules(names, frozenset(quantized)),
        "quant_method": "fp8",
        "weight_block_size": list(BLOCK),
    }


def _list_kept_modules(tensors: Mapping[str, TensorEntry], quantized: frozenset[str]) -> list[str]:
    """Return modules whose matrices stay unquantized."""
    # A module that contains a quantized one is not listed: transformers would skip both.
    within = {_module(name)[:at] for name in quantized for at in _dots(_module(name))}
    kept = (_module(name) for name, entry in tensors.items() if name not in quantized and len(entry.shape) > 1)
    return [module for module in dict.fromkeys(kept) if module and module not in within]


def _dots(name: str) -> list[int]:
    """Return where a name ends for each module that contains it, and for itself."""
    return [*(match.start() for match in re.finditer(r"\.", name)), len(name)]


def find_scaled(
    tensors: Mapping[str, TensorEntry], config: Mapping[str, object], keep: Sequence[str] = ()
) -> dict[str, Blocks]:
    """Return the block shape for each fp8 weight with scales; a weight with one scale is one block."""
    block = _read_block(config)
    found: dict[str, Blocks] = {}
    for name, entry in tensors.items():
        if entry.dtype == DTYPE and name_scale(name) in tensors and not _matches(name, keep):
            found[name] = _fit_block(name, entry.shape, tensors[name_scale(name)].shape, block)
    return found


def _fit_block(name: str, shape: Shape, scales: Shape, block: Blocks | None) -> Blocks:
    """Return a weight's block shape, which its scales have to fit."""
    if len(shape) == 2:
        if scales in ((), (1,)) or (block is None and scales == (1, 1)):
            return (shape[0], shape[1])
        if block is not None and scales == count_blocks(shape, block):
            return block
    size = "one for the weight" if block is None else f"one for each block of {' x '.join(map(str, block))}"
    raise UnsupportedError(
        f"the scales of {name} do not fit its blocks",
        found=list(scales),
        expected=f"{size}, of {list(shape)}",
        fix="Leave the weight as it is with --keep-fp32.",
    )


def drop_quantization(config: Mapping[str, object], names: Iterable[str] | None) -> dict[str, object]:
    """Return a config without quantization for some weights; None means all."""
    rest = {key: value for key, value in config.items() if key != QUANTIZATION_CONFIG}
    quantization = config.get(QUANTIZATION_CONFIG)
    if names is None or not isinstance(quantization, Mapping):
        return rest
    listed = quantization.get(_KEPT_KEY)
    kept = [*(listed if isinstance(listed, list) else ()), *map(_module, names)]
    return {**rest, QUANTIZATION_CONFIG: {**quantization, _KEPT_KEY: kept}}


def _read_block(config: Mapping[str, object]) -> Blocks | None:
    """Return the config's block shape: the usual one by default, None for `null`."""
    quantization = config.get(QUANTIZATION_CONFIG)
    block = quantization.get("weight_block_size", BLOCK) if isinstance(quantization, Mapping) else BLOCK
    if block is None:
        return None
    if isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block):
        return (block[0], block[1])
    return BLOCK


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _matches(name: str, globs: Iterable[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


def _describe(quantization: object) -> str:
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    return f"{QUANTIZATION_CONFIG} with quant_method {method}" if method else f"tensors of {DTYPE}"


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
