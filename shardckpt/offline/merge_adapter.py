"""Implement `merge-adapter`: add LoRA adapters to their base, block by block."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from sys import float_info

from typing_extensions import Unpack

from shardckpt.errors import UsageError
from shardckpt.events.progress import OnProgress
from shardckpt.offline.adapters.merge_selection import merge_selection
from shardckpt.offline.adapters.open_adapter import open_adapter
from shardckpt.offline.consolidate import export, parse_options
from shardckpt.offline.results.contents import Report
from shardckpt.offline.select.options import MergeParams, parse_dtype
from shardckpt.offline.select.selection import Selection
from shardckpt.readers.registry import resolve_step
from shardckpt.storage.resolve_url import as_url
from shardckpt.storage.store import Store


def merge_adapter(
    base: str | os.PathLike[str],
    adapter: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    dst: str | os.PathLike[str],
    *,
    adapter_weights: Sequence[float] | None = None,
    on_progress: OnProgress | None = None,
    **options: Unpack[MergeParams],
) -> Report:
    """Write a base model with one or more LoRA adapters merged into it.

    The result is the base plus `weight * scale * (B @ A)` for each adapter: `peft` calls this `cat`; its `linear` adds
    the factors instead. Products, norms (DoRA) and sums are computed in float32 (float64 for a base in float64), and
    rounded once to the written dtype. Fully trained tensors and tokens replace the base's. Memory is constant except
    for two factors per adapter at a time.

    Args:
        base: Checkpoint of the adapters' base model, in any readable format; or a step of the model with its adapter.
        adapter: Folder with `adapter_config.json` and the adapter's tensors, as `peft` saves it. Or a step that a
            trainer's callback saved from a model with one adapter. Several make a list.
        dst: As for `consolidate`.
        adapter_weights: A factor for each adapter's products, in adapter order; 1 by default.
        on_progress: As for `consolidate`.
        **options: Fields in `Options`, for the base; `part` is the model.

    Returns:
        Report with the written files.

    Raises:
        UsageError: The call is invalid: an adapter belongs to another base, two adapters set one tensor, or an option
            does not apply.
        CheckpointError: A checkpoint is damaged, incomplete or unsafe, the kind of adapter cannot be merged
            (by name), or a finite value would become infinite or NaN.
        StorageError: Reading or writing failed.

    Examples:
        >>> shardckpt.merge_adapter("llama", "run/adapter", "merged")  # doctest: +SKIP
        >>> shardckpt.merge_adapter("llama", ["a", "b"], "merged", adapter_weights=[0.7, 0.3])  # doctest: +SKIP
    """
    chosen = parse_options("merge_adapter", {**options, "part": options.get("part", "model")})
    if chosen.part != "model":
        raise UsageError("an adapter changes a model alone", found=f"part {chosen.part}", expected="model")
    base, dst = resolve_step(base), as_url(dst)
    paths = [adapter] if not isinstance(adapter, Sequence) or isinstance(adapter, str) else list(adapter)
    weights = _check_weights(adapter_weights, len(paths))
    opened = [open_adapter(resolve_step(path), weight) for path, weight in zip(paths, weights, strict=True)]

    def change(selection: Selection, config: Mapping[str, object], store: Store) -> Selection:
        dtype = parse_dtype(chosen.dtype)
        return merge_selection(selection, store, config, opened, dtype, allow_overflow=chosen.allow_overflow)

    return export(base, dst, chosen, on_progress, change=change)


def _check_weights(weights: Sequence[float] | None, adapters: int) -> Sequence[float]:
    """Return one finite weight for each adapter."""
    if not adapters:
        raise UsageError("merge-adapter needs an adapter", found="none")
    if weights is None:
        return [1.0] * adapters
    if len(weights) != adapters:
        raise UsageError(
            "each adapter must have a weight", found=f"{len(weights)} for {adapters}", fix="Give all weights, or none."
        )
    for weight in weights:
        is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if not is_number or not abs(weight) <= float_info.max:  # also without NaN and huge integers
            found = f"an integer in {weight.bit_length()} bits" if type(weight) is int else repr(weight)
            raise UsageError("the weight of an adapter must be a finite number", found=found)
    return [float(weight) for weight in weights]
