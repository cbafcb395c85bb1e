"""Quantize a selection's weights to fp8, or dequantize fp8 weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

from shardckpt.errors import UsageError
from shardckpt.manifest import TensorEntry
from shardckpt.offline.fp8.block_scales import BlockDequantizer, BlockQuantizer, ScaleValues, WeightScales
from shardckpt.offline.select.config_files import CONFIG, ConfigFiles
from shardckpt.offline.select.options import Options, parse_dtype
from shardckpt.offline.select.selection import Selection
from shardckpt.plan import fp8_blocks
from shardckpt.plan.layout.output_files import OutputTensor
from shardckpt.plan.quantized_weights import QUANTIZATION_CONFIG, find_quantized, list_uncast
from shardckpt.reader import Reader


def quantize(
    reader: Reader, options: Options, selection: Selection, config: ConfigFiles
) -> tuple[Selection, ConfigFiles]:
    """Return a selection with fp8 weights and scales for linear layers, and the config that says so."""
    if not config.config:
        raise UsageError(
            f"--quantize needs the model's {CONFIG}, which lists the fp8 weights for readers",
            where=reader.store.url,
            fix="Name its folder with --config-from.",
        )
    tensors = {tensor.name: tensor for tensor in selection.model}
    entries = {name: tensor.entry for name, tensor in tensors.items()}
    exclude = (*options.quantize_exclude, *options.keep_fp32)
    chosen = fp8_blocks.choose_weights(entries, config.config, include=options.quantize_include, exclude=exclude)
    model: list[OutputTensor] = []
    for name, tensor in tensors.items():
        model += _quantize_weight(reader, tensor) if name in set(chosen) else [tensor]
    changed = {**config.config, QUANTIZATION_CONFIG: fp8_blocks.plan_config(entries, chosen)}
    left = [name for name in tensors if name not in set(chosen) and not any(fnmatchcase(name, g) for g in exclude)]
    warnings = (
        *selection.warnings,
        *_warn_of_shapes([tensors[name] for name in chosen]),
        *(() if options.quantize_include else _warn_of_left([tensors[name] for name in left])),
    )
    return replace(selection, model=tuple(model), warnings=warnings), replace(config, config=changed, is_changed=True)


def _quantize_weight(reader: Reader, weight: OutputTensor) -> list[OutputTensor]:
    scales = WeightScales(reader.store, weight)
    name = fp8_blocks.name_scale(weight.name)
    entry = TensorEntry((name,), fp8_blocks.count_blocks(weight.shape), "float32", ())
    return [
        replace(weight, dtype=fp8_blocks.DTYPE, change=BlockQuantizer(scales, weight)),
        OutputTensor(name, entry, "float32", change=ScaleValues(scales)),
    ]


def _warn_of_shapes(weights: list[OutputTensor]) -> Iterator[str]:
    odd = [weight for weight in weights if fp8_blocks.ends_in_smaller_blocks(weight.shape)]
    if odd:
        yield (
            f"{len(odd)} quantized weights end in smaller blocks, such as {odd[0].name} of {list(odd[0].shape)}: vLLM"
            " refuses some of them, and transformers dequantizes them wrongly without a GPU"
        )


def _warn_of_left(tensors: list[OutputTensor]) -> Iterator[str]:
    """Yield warnings about weights that are not quantized, although no option says so."""
    if odd := [t for t in tensors if fp8_blocks.is_linear(t.name, t.entry)]:
        yield (
            f"not quantized, since 128 does not divide a width: {_name_first(odd)} (--quantize-include quantizes"
            " them, but some readers reject them)"
        )
    if stacked := [t for t in tensors if fp8_blocks.is_stacked(t.name, t.entry)]:
        yield (
            f"not quantized, since experts are stacked: {_name_first(stacked)} (give each expert its own weights"
            " before, with rules that unstack)"
        )


def _name_first(tensors: list[OutputTensor]) -> str:
    more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    return f"{tensors[0].name} of {list(tensors[0].shape)}{more}"


def dequantize(
    reader: Reader, options: Options, selection: Selection, config: ConfigFiles
) -> tuple[Selection, ConfigFiles]:
    """Return a selection whose fp8 weights with scales are cast to `--dtype`, without the scales."""
    tensors = {tensor.name: tensor for tensor in selection.model}
    entries = {name: tensor.entry for name, tensor in tensors.items()}
    found = fp8_blocks.find_scaled(entries, config.config, options.keep_fp32)
    if not found:
        return selection, config
    dtype = parse_dtype(options.dtype)
    for name, block in found.items():
        scales = tensors.pop(fp8_blocks.name_scale(name)).entry
        tensors[name] = replace(tensors[name], dtype=dtype, change=BlockDequantizer(reader.store, scales, block))
    rest = [name for name, tensor in tensors.items() if tensor.dtype == fp8_blocks.DTYPE]
    changed = fp8_blocks.drop_quantization(config.config, found if rest else None)
    config = replace(config, config=changed, is_changed=changed != config.config)
    unused = _list_unused(entries, tensors, found)
    left_out = (*selection.left_out, *(f"{name} (for a dequantized weight)" for name in unused))
    model = tuple(tensor for name, tensor in tensors.items() if name not in unused)
    return replace(selection, model=model, left_out=left_out), config


def _list_unused(
    entries: Mapping[str, TensorEntry], tensors: Mapping[str, OutputTensor], found: Iterable[str]
) -> list[str]:
    """Return tensors that only fp8 weights needed and no dequantized weight needs, such as input scales."""
    written = {name: entries[name]._replace(stored=tensor.dtype, delivered="") for name, tensor in tensors.items()}
    plain = {name.rpartition(".")[0] for name in found} - find_quantized(written).keys()
    return [name for name in list_uncast(entries, {}) if name in tensors and name.rpartition(".")[0] in plain]
