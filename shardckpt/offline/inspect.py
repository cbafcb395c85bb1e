"""Implement `inspect`: show content from headers and metadata only."""

from __future__ import annotations

import os
from dataclasses import replace

from shardckpt.encodings.budget import gc_paused
from shardckpt.errors import UsageError, escape
from shardckpt.manifest import UNREAD, Manifest, dotted
from shardckpt.offline.report_html.checkpoint_map import describe_checkpoint
from shardckpt.offline.report_html.page import render_page, require_report_target, write_page
from shardckpt.offline.results.contents import FileInfo, Inspection, describe_entry
from shardckpt.offline.results.problems import find_rank, from_fault, missing_file
from shardckpt.offline.results.tensor_stats import TensorStats
from shardckpt.offline.select.param_shapes import load_param_shapes
from shardckpt.offline.write.stored_stats import describe_values
from shardckpt.plan.layout.coverage import faults
from shardckpt.plan.naming.sections import find_sections, model_paths, split_flat_names
from shardckpt.reader import NamedBases, Reader
from shardckpt.readers.registry import open_checkpoint
from shardckpt.storage.resolve_url import as_url

_SHOWN = 60
_MAX_FAULTS = 1_000


def inspect(
    src: str | os.PathLike[str],
    *,
    shapes_from: str | os.PathLike[str] = "",
    base: NamedBases = "",
    html: str | os.PathLike[str] = "",
) -> Inspection:
    """Describe a checkpoint without reading tensor data or executing code.

    Args:
        src: Checkpoint in any readable format: a path or URL.
        shapes_from: Any checkpoint of the same model with full tensors, to show FSDP1's flat parameters as their
            members.
        base: Folder of the base checkpoint if it was moved, as for `load`.
        html: Path or URL for one page, which needs no network. It shows sizes by name, the file, rank and bytes for
            every box, and missing or damaged content.

    Returns:
        Tensors, values, files and parts. Gaps, overlaps and short files are listed as problems, not raised.

    Raises:
        UsageError: The source does not exist or is not recognized, the shapes do not match, or `html` names another
            file than an earlier report.
        CheckpointError: Headers, metadata or pickles cannot be read, or are rejected.
        StorageError: Reading failed.

    Examples:
        >>> shardckpt.inspect("run/step-100").nbytes  # doctest: +SKIP
    """
    with gc_paused():
        return _inspect(as_url(src), as_url(shapes_from), base, as_url(html))


def _inspect(src: str, shapes_from: str, base: NamedBases, html: str) -> Inspection:
    if html:
        require_report_target(html)
    reader = open_checkpoint(src, base)
    if shapes_from:
        reader = load_param_shapes(reader, shapes_from)
    manifest = split_flat_names(reader.manifest)
    found = replace(describe_manifest(src, manifest), stats=_list_stored_stats(reader))
    if html:
        write_page(render_page(escape(src), describe_checkpoint(manifest, found)), html)
    return found


def _list_stored_stats(reader: Reader) -> tuple[TensorStats, ...]:
    tensors = reader.manifest.tensors
    stored = ((path, reader.value_stats(path)) for path in tensors if path not in reader.manifest.aliases)
    return tuple(
        describe_values(dotted(path), tensors[path], found, is_stored=True)
        for path, found in stored
        if found is not None
    )


def describe_manifest(src: str, manifest: Manifest) -> Inspection:
    """Return what `inspect` returns for a manifest that was read from `src`."""
    return Inspection(
        source=src,
        format=manifest.format,
        files=tuple(FileInfo(name, None if n < 0 else n, find_rank(name)) for name, n in manifest.files.items()),
        tensors=tuple(describe_entry(dotted(path), entry) for path, entry in manifest.tensors.items()),
        objects={dotted(path): _render(entry.value) for path, entry in manifest.objects.items()},
        ties={dotted(a): dotted(b) for a, b in manifest.aliases.items()},
        metadata=dict(manifest.metadata),
        parts=_parts(manifest),
        warnings=tuple(manifest.warnings),
        problems=(
            *map(missing_file, manifest.missing),
            *map(from_fault, faults(manifest, manifest.tensors.values(), limit=_MAX_FAULTS)),
        ),
    )


def _render(value: object) -> str:
    if value is UNREAD:
        return ""
    text = escape(repr(value))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _parts(manifest: Manifest) -> dict[str, tuple[str, ...]]:
    try:
        found = find_sections(manifest)
    except UsageError:
        return {}
    return {
        "model": (dotted(found.model),) if any(True for _ in model_paths(manifest, found)) else (),
        "optimizer": tuple(map(dotted, found.optimizers)),
        "variants": tuple(manifest.variants),
        "other": tuple(name for name in map(dotted, found.others) if name not in manifest.variants),
    }
