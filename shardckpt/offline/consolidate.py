"""Implement `consolidate` and `convert`: open, check, plan, stream, publish."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from types import ModuleType
from typing import Any

from shardckpt.errors import UsageError, require_keywords, require_torch
from shardckpt.events.progress import OnProgress
from shardckpt.offline.reshard import write_all
from shardckpt.offline.results.contents import Report
from shardckpt.offline.select.config_files import (
    add_kept_files,
    drop_adapter_config,
    find_config_files,
    load_param_shapes,
    with_values,
)
from shardckpt.offline.select.options import ConversionParams, Options, parse_dtype, parse_globs, parse_memory
from shardckpt.offline.select.selection import Selection, read_param_names, select
from shardckpt.offline.targets.base import (
    CONFIG_FILES,
    Conversion,
    RankOptions,
    Target,
    drop_unsupported,
    require_quantization,
)
from shardckpt.offline.targets.target_registry import DEFAULT, choose_target
from shardckpt.offline.write.conversion import (
    ConversionPlan,
    PlannedFiles,
    Stopwatch,
    Write,
    run_conversion,
    write_alone,
)
from shardckpt.plan.layout.output_files import parse_size
from shardckpt.plan.naming.model_files import ADAPTER_CONFIG, CONFIG
from shardckpt.plan.naming.weights import PEFT_PART, WAY_TO_BASE
from shardckpt.plan.quantized_weights import DTYPE as FP8
from shardckpt.readers.registry import open_reader, open_source, resolve_step
from shardckpt.storage.publish import require_apart
from shardckpt.storage.resolve_url import as_url, kind
from shardckpt.storage.store import Store

if sys.version_info >= (3, 11):  # typing_extensions takes 2 ms
    from typing import Unpack
else:
    from typing_extensions import Unpack

_LISTS = {
    **dict.fromkeys(("keep_fp32", "include", "exclude", "quantize_include", "quantize_exclude"), "globs of names"),
    "rename": "texts FROM=TO",
}
# Defaults of the options that neither choose nor change values.
_NEUTRAL: Mapping[str, Any] = {
    name: getattr(Options(), name)
    for name in (
        *("to", "base", "shapes_from", "allow_loss", "max_shard_size", "max_memory"),
        *("config_from", "overwrite", "dry_run", "jobs", "parallel"),
    )
}
_CONFIGS = frozenset({CONFIG, ADAPTER_CONFIG})
_NO_CONFIG = (
    "no config.json was found for the model, and transformers needs one: give --config-from FOLDER (config_from=)"
)
# Changes a selection, given the model's `config.json` and the tensors' store, before optimizer keys are converted.
Change = Callable[[Selection, Mapping[str, object], Store], Selection]


def _keep_selection(selection: Selection, _config: Mapping[str, object], _store: Store) -> Selection:
    return selection


def consolidate(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    on_progress: OnProgress | None = None,
    **options: Unpack[ConversionParams],
) -> Report:
    """Merge a sharded checkpoint into full tensors, as safetensors.

    Memory is constant: bytes are copied from file to file, or through a bounded buffer. Nothing appears under `dst`
    until the result is complete.

    Args:
        src: Checkpoint in any readable format: a path or URL.
        dst: Folder to write, or a file if it ends in `.safetensors`, `.pt`, `.pth`, `.bin` or `.gguf`.
        on_progress: Called while bytes are written, by one thread at a time. An exception from it stops the work and
            removes the result.
        **options: Fields in `Options`.

    Returns:
        Report with the written files.

    Raises:
        UsageError: The call is invalid: the source does not exist, the target exists, or an option does not apply.
        CheckpointError: The checkpoint is damaged, incomplete or unsafe; the message names tensor and box.
        StorageError: Reading or writing failed, or the target has too little space.

    Examples:
        >>> shardckpt.consolidate("run/step-100", "model", dtype="bf16")  # doctest: +SKIP
    """
    src, dst = resolve_step(src), as_url(dst)
    chosen = parse_options("consolidate", options)
    return _with_config_warning(export(src, dst, chosen, on_progress), chosen)


def _with_config_warning(report: Report, options: Options) -> Report:
    """Add a warning if transformers lacks a config for a merged folder."""
    target = choose_target(options.to, report.target)
    is_model_folder = (
        options.part == "model"
        and not options.include
        and target.name == DEFAULT
        and not report.target.endswith(target.suffixes)
    )
    if not is_model_folder or _CONFIGS & {*report.carried} or kind(report.source) != "folder":
        return report
    return replace(report, warnings=(*report.warnings, _NO_CONFIG))


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    on_progress: OnProgress | None = None,
    **options: Unpack[ConversionParams],
) -> Report:
    """Convert a checkpoint like `consolidate`, but keep its split into files.

    Tensors stay together if one source file contains them in full. Split tensors share one additional file.
    With `to="dcp"` and without `part` or other options that choose or change values, it writes the full checkpoint
    under the names that it was saved with.

    Args:
        src: As for `consolidate`.
        dst: As for `consolidate`.
        on_progress: As for `consolidate`.
        **options: Fields in `Options`; `max_shard_size` is not used.

    Returns:
        Report with the written files.

    Raises:
        UsageError: As for `consolidate`.
        CheckpointError: As for `consolidate`.
        StorageError: As for `consolidate`.
    """
    src, dst = resolve_step(src), as_url(dst)
    chosen = parse_options("convert", options)
    target = choose_target(chosen.to, dst)
    if target.name == "dcp" and "part" not in options and replace(chosen, **_NEUTRAL) == Options():
        require_apart(src, dst)
        ranks = RankOptions(0, parse_size(chosen.max_shard_size), allow_loss=chosen.allow_loss)
        return write_all(src, dst, target, ranks, chosen, on_progress, _find_way_to_write(chosen))
    return export(src, dst, chosen, on_progress, keeps_split=True)


def parse_options(function: str, given: Mapping[str, Any]) -> Options:
    """Return checked options from keyword arguments."""
    require_keywords(function, given, ConversionParams.__annotations__)
    lists = {key: parse_globs(key, given[key], _LISTS[key]) for key in _LISTS if key in given}
    paths = {key: os.fspath(value) for key, value in given.items() if isinstance(value, os.PathLike)}
    return Options(**{**given, **lists, **paths}).validated()


def export(
    src: str,
    dst: str,
    options: Options,
    on_progress: OnProgress | None,
    *,
    keeps_split: bool = False,
    change: Change = _keep_selection,
) -> Report:
    """Open, check, plan, write and publish."""
    watch = Stopwatch()
    require_apart(src, dst)
    target = choose_target(options.to, dst)
    require_quantization(target, options.dtype)
    target.check(options)
    is_file = dst.endswith(target.suffixes)
    if options.quantize and (is_file or target.name != DEFAULT):
        raise UsageError("--quantize writes a safetensors folder", found=dst if is_file else f"--to {target.name}")
    if options.parallel:
        require_torch("parallel=True (--parallel, or a start by torchrun)")  # ranks communicate through torch
    source = open_source(src, options.base)
    ids = read_param_names(options.param_names) if options.param_names else None
    reader = open_reader(source)
    if reader.is_flat:
        reader = load_param_shapes(reader, options.shapes_from, ids)
    config = find_config_files(source, options.config_from, reader)
    if reader.manifest.format != "adapter":
        config = drop_adapter_config(config)
    if options.overwrite and target.keeps_config and not is_file:
        config = add_kept_files(config, dst, CONFIG_FILES)
    watch.end_phase("open")
    is_for_config = _is_for_config(target, options, is_file=is_file)
    selection = select(reader, options, config.config, is_for_config=is_for_config)
    if options.dequantize:
        selection, config = _import_dequantize().dequantize(reader, options, selection, config)
    elif options.dtype and any(tensor.dtype == FP8 for tensor in selection.model):
        selection, config = _import_fp8().dequantize(reader, options, selection, config)
    selection = _with_warning_of_uncast(selection, options)
    if selection.packed:
        selection = _import_inner_names().name_inner_tensors(selection, is_read=target.name == DEFAULT)
    selection = drop_unsupported(selection, target, allow_loss=options.allow_loss)
    selection = _rekey(change(selection, config.config, reader.store), options)
    if target.name == DEFAULT and not is_file and reader.manifest.format != "adapter":
        selection = _with_warning_of_peft(selection)
    config = with_values(config, selection.config_values)
    if options.quantize:
        selection, config = _import_fp8().quantize(reader, options, selection, config)
    conversion = Conversion(dst, options, reader, config, selection, is_file, keeps_split)
    files = target.plan(conversion)
    plan = ConversionPlan(
        reader,
        files=files,
        report=_build_report(src, conversion, files),
        max_memory=parse_memory(options.max_memory),
        overwrite=options.overwrite,
        jobs=options.jobs,
        allow_overflow=options.allow_overflow,
        copied={} if is_file else config.files,
        copied_from=config.store,
    )
    return run_conversion(plan, watch, on_progress, _find_way_to_write(options))


def _find_way_to_write(options: Options) -> Write:
    if not options.parallel or options.dry_run:
        return write_alone
    from shardckpt.offline.write.parallel import write_with_ranks  # noqa: PLC0415  (one process needs no torch)

    return write_with_ranks


def _is_for_config(target: Target, options: Options, *, is_file: bool) -> bool:
    """Return True if readers of the target build the model from its config, and so need its own names."""
    # A user's rules are about the names in the checkpoint.
    is_read_with_config = target.name == "gguf" or (target.keeps_config and not is_file)
    return is_read_with_config and options.part == "model" and not (options.rename or options.rules)


def _with_warning_of_uncast(selection: Selection, options: Options) -> Selection:
    """Add a warning if parts of quantized weights keep their dtype although a cast is requested."""
    dtype = parse_dtype(options.dtype)
    left = [t.name for t in selection.model if dtype and t.dtype == t.entry.dtype != dtype and "float" in t.dtype]
    left = [name for name in left if not any(fnmatchcase(name, glob) for glob in options.keep_fp32)]
    if not left:
        return selection
    count = "1 part of quantized weights is" if len(left) == 1 else f"{len(left)} parts of quantized weights are"
    warning = (
        f"{count} not cast, such as {left[0]}: only fp8 with scales named *_scale_inv is dequantized by a cast;"
        " --dequantize takes torchao and bitsandbytes too"
    )
    return replace(selection, warnings=(*selection.warnings, warning))


def _with_warning_of_peft(selection: Selection) -> Selection:
    """Add a warning if a folder for transformers gets PEFT names."""
    names = (tensor.name for tensor in selection.model if ".lora_" not in tensor.name)
    wrapped = next(filter(PEFT_PART.search, names), "")
    if not wrapped:
        return selection
    warning = f"{wrapped} and others are PEFT names, which transformers does not find. {WAY_TO_BASE}"
    return replace(selection, warnings=(*selection.warnings, warning))


def _import_fp8() -> ModuleType:
    from shardckpt.offline.select import block_scales  # noqa: PLC0415  (needs NumPy; most checkpoints hold no fp8)

    return block_scales


def _import_inner_names() -> ModuleType:
    from shardckpt.offline.select import inner_names  # noqa: PLC0415  (most checkpoints have no wrapper subclasses)

    return inner_names


def _import_dequantize() -> ModuleType:
    from shardckpt.offline.select import dequantize  # noqa: PLC0415  (as in `_import_fp8`)

    return dequantize


def _rekey(selection: Selection, options: Options) -> Selection:
    """Return a selection with the requested optimizer keys."""
    if selection.groups is None or options.optim_keys == "names":
        return selection
    from shardckpt.plan.optim.output_keys import rekey_state  # noqa: PLC0415  (most conversions write no optimizer)

    by_number = options.optim_keys == "ids"
    numbers = read_param_names(options.param_names) if options.param_names and by_number else None
    optim, groups = rekey_state(selection.optim, selection.groups, "ids" if by_number else "flat", numbers)
    return replace(selection, optim=optim, groups=groups)


def _build_report(source: str, conversion: Conversion, files: PlannedFiles) -> Report:
    options, selection = conversion.options, conversion.selection
    tensors = (*selection.model, *selection.optim) if files.written is None else files.written
    kept = ", ".join(conversion.config.kept)
    notes = [f"{kept}: kept from the replaced checkpoint"] if kept else []
    return Report(
        source=source,
        target=conversion.target,
        format=conversion.reader.manifest.format,
        part=options.part,
        tensor_count=len(tensors),
        nbytes=files.nbytes,
        ties=selection.ties,
        cast=dict(Counter(f"{t.entry.stored} -> {t.dtype}" for t in tensors if t.is_cast)),
        left_out=selection.left_out,
        warnings=(*selection.warnings, *files.warnings, *notes),
        dry_run=options.dry_run,
    )
