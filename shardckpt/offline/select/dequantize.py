"""Packed weights in a conversion: name their parts for readers, or dequantize them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from math import prod

from shardckpt.dtypes import FLOATS
from shardckpt.encodings.safetensors import parse_json
from shardckpt.errors import FormatError, UnsupportedError
from shardckpt.manifest import TensorEntry
from shardckpt.offline.select import block_scales
from shardckpt.offline.select.config_files import ConfigFiles, read_dtype
from shardckpt.offline.select.options import Options, parse_dtype
from shardckpt.offline.select.packed_values import PLANS, PartReader
from shardckpt.offline.select.selection import Selection
from shardckpt.plan.layout.output_files import OutputTensor
from shardckpt.plan.packed_weights import PackedWeight, find_bitsandbytes, find_torchao, iter_parts
from shardckpt.plan.quantized_weights import DTYPE as FP8
from shardckpt.plan.quantized_weights import drop_quantization, find_quantized
from shardckpt.reader import Reader
from shardckpt.readers.chunk_reader import read_blocks

_MAX_TEXT_BYTES = 1 << 16

# Inner tensors that a weight's values do not depend on; they belong to its layer's inputs.
_OF_INPUTS = ("act_quant_scale", "act_quant_zero_point")


def dequantize(
    reader: Reader, options: Options, selection: Selection, config: ConfigFiles
) -> tuple[Selection, ConfigFiles]:
    """Return a selection whose quantized weights are plain ones, and a config without quantization."""
    tensors = {tensor.name: tensor for tensor in selection.model}
    packed = {
        name: weight
        for name, weight in _find_packed(reader, options, selection, config).items()
        if not _is_kept(name, options) and any(part in tensors for part in weight.parts.values())
    }
    owners = dict(iter_parts(packed))
    made = {name: _plan_weight(reader, options, name, weight, tensors) for name, weight in packed.items()}
    model = {owners.get(name, name): made.get(owners.get(name, name), tensor) for name, tensor in tensors.items()}
    unused = [weight.parts[inner] for weight in packed.values() for inner in _OF_INPUTS if inner in weight.parts]
    changed = replace(
        selection,
        model=tuple(model.values()),
        packed={name: weight for name, weight in selection.packed.items() if name not in packed},
        ties=_join_ties(selection.ties, owners),
        order=tuple(dict.fromkeys(owners.get(name, name) for name in selection.order)),
        left_out=(*selection.left_out, *(f"{name} (for a dequantized weight)" for name in unused)),
    )
    if any(tensor.dtype == FP8 for tensor in changed.model):
        changed, config = block_scales.dequantize(reader, options, changed, config)
    rest = find_quantized({tensor.name: tensor.entry for tensor in changed.model if tensor.change is None})
    _require_known(rest, changed, options)
    values = drop_quantization(config.config, made if rest else None)
    return changed, replace(config, config=values, is_changed=config.is_changed or values != config.config)


def _find_packed(
    reader: Reader, options: Options, selection: Selection, config: ConfigFiles
) -> dict[str, PackedWeight]:
    entries = {tensor.name: tensor.entry for tensor in selection.model}
    dtype = parse_dtype(options.dtype) or read_dtype(config.config) or "float32"

    def read_form(name: str) -> tuple[str, tuple[int, ...], object]:
        return _read_form(reader, name, entries[name])

    described = find_torchao(reader.manifest.metadata, entries)
    return {**selection.packed, **described, **find_bitsandbytes(entries, read_form, dtype)}


def _read_form(reader: Reader, name: str, entry: TensorEntry) -> tuple[str, tuple[int, ...], object]:
    """Return dtype, shape and all values in a text that bitsandbytes stores as bytes."""
    if entry.stored != "uint8" or prod(entry.shape) > _MAX_TEXT_BYTES:
        raise FormatError("a text must be stored as bytes", where=name, found=f"{entry.stored} {list(entry.shape)}")
    text = parse_json(b"".join(read_blocks(reader, entry)), where=name)
    values = text if isinstance(text, Mapping) else {}
    dtype, shape = values.get("dtype"), values.get("shape")
    if dtype in FLOATS and isinstance(shape, list) and all(type(n) is int for n in shape):
        return str(dtype), tuple(shape), values
    raise FormatError(
        "a text of bitsandbytes must have a float dtype and a shape", where=name, found=f"{dtype} {shape}"
    )


def _plan_weight(
    reader: Reader, options: Options, name: str, weight: PackedWeight, tensors: Mapping[str, OutputTensor]
) -> OutputTensor:
    plan = PLANS.get(weight.kind)
    if plan is None:
        raise UnsupportedError(
            f"{weight.record.kind} cannot be dequantized",
            where=name,
            found=weight.record.name,
            expected=", ".join(PLANS),
            fix="Leave it as it is with --keep-fp32, or dequantize it in a program and save again.",
        )
    entries = {inner: tensors[part].entry for inner, part in weight.parts.items() if part in tensors}
    entry, change = plan(PartReader(reader.store, name, weight, entries))
    return OutputTensor(name, entry, parse_dtype(options.dtype) or weight.record.dtype, change=change)


def _is_kept(name: str, options: Options) -> bool:
    return any(fnmatchcase(name, glob) for glob in options.keep_fp32)


def _join_ties(ties: Mapping[str, str], owners: Mapping[str, str]) -> dict[str, str]:
    """Return ties of weights instead of their parts."""
    joined: dict[str, str] = {}
    for name, kept in ties.items():
        owner = owners.get(kept, kept)
        if kept.startswith(owner):
            joined[name.removesuffix(kept[len(owner) :])] = owner
    return joined


def _require_known(rest: Mapping[str, str], selection: Selection, options: Options) -> None:
    """Require that only weights stay quantized that the caller keeps."""
    owners = dict(iter_parts(selection.packed))
    for name in rest.values():
        if not _is_kept(name, options) and not _is_kept(owners.get(name, name), options):
            tensor = next(tensor for tensor in selection.model if tensor.name == name)
            raise UnsupportedError(
                "this quantized weight cannot be dequantized",
                where=name,
                found=f"{tensor.entry.dtype} {list(tensor.shape)}",
                expected=f"{', '.join(PLANS)}, or fp8 with *_scale_inv",
                fix="Leave it as it is with --keep-fp32.",
            )
