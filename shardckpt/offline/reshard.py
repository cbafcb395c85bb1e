"""Implement `reshard`: write a checkpoint for another world size."""

from __future__ import annotations

import os
from collections.abc import Sequence

from shardckpt.errors import UsageError, require_bools
from shardckpt.events.progress import OnProgress
from shardckpt.manifest import dotted
from shardckpt.offline.results.contents import Report
from shardckpt.offline.select.config_files import ConfigFiles, find_config_files, load_param_shapes
from shardckpt.offline.select.options import DEFAULT_MEMORY_BYTES, Options, parse_globs, parse_memory
from shardckpt.offline.targets.base import RankOptions, Target
from shardckpt.offline.targets.target_registry import find_rank_target
from shardckpt.offline.write.conversion import ConversionPlan, Stopwatch, Write, run_conversion, write_alone
from shardckpt.plan.layout.output_files import parse_size
from shardckpt.reader import NamedBases
from shardckpt.readers.registry import open_checkpoint, open_source, resolve_step
from shardckpt.storage.publish import require_apart
from shardckpt.storage.resolve_url import as_url

MAX_RANKS = 16_384


def reshard(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    world_size: int,
    to: str = "native",
    max_shard_size: int | str = "5GB",
    max_memory: int | str = DEFAULT_MEMORY_BYTES,
    shapes_from: str | os.PathLike[str] = "",
    base: NamedBases = "",
    keep_whole: str | Sequence[str] = (),
    allow_loss: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    on_progress: OnProgress | None = None,
) -> Report:
    """Write a checkpoint as a save on `world_size` ranks would.

    Each rank has at least one payload file. No value changes: the result loads with the same bits as the source, at any
    world size. Memory is constant.

    Args:
        src: As for `consolidate`.
        dst: Folder to write.
        world_size: Ranks over which tensors are split, along their first dimension: at most 16,384; at most 4,096 with
            `torch`, where each file lists all ranks.
        to: Format to write: `native`; `dcp`, which `torch.distributed.checkpoint` loads; or `torch`, one `torch.save`
            file per rank with FSDP2's DTensors.
        max_shard_size: Maximum tensor data per file: a number of bytes, or `5GB`. With `torch` each rank has one file.
        max_memory: Maximum memory in bytes, in addition to the started process.
        shapes_from: Any checkpoint of the same model with full tensors, for FSDP1's flat parameters.
        base: Folder of the base checkpoint if it was moved, as for `load`.
        keep_whole: Globs for dotted names that `torch` does not split, such as buffers; every rank's file has them.
        allow_loss: Omit values that the format cannot store; otherwise they are an error that lists them.
        overwrite: Replace one existing checkpoint of the same format.
        dry_run: Plan and check, and write nothing.
        on_progress: As for `consolidate`.

    Returns:
        Report with the written files.

    Raises:
        ShardckptError: As for `consolidate`.

    Examples:
        >>> shardckpt.reshard("run/step-100", "for-8", world_size=8)  # doctest: +SKIP
    """
    src, dst = resolve_step(src), as_url(dst)
    target = find_rank_target(to, dst)
    if type(world_size) is not int or not 1 <= world_size <= MAX_RANKS:
        raise UsageError("--world-size must be a number of ranks", found=repr(world_size), expected=f"1 to {MAX_RANKS}")
    require_bools(allow_loss=allow_loss, overwrite=overwrite, dry_run=dry_run)
    unsplit = parse_globs("keep_whole", keep_whole)
    if unsplit and to != "torch":
        raise UsageError("--keep-whole needs --to torch: other formats load with any split", found=f"--to {to}")
    ranks = RankOptions(world_size, parse_size(max_shard_size), unsplit, allow_loss)
    options = Options(
        max_memory=max_memory, shapes_from=as_url(shapes_from), base=base, overwrite=overwrite, dry_run=dry_run
    )
    require_apart(src, dst)
    return write_all(src, dst, target, ranks, options, on_progress)


def write_all(
    src: str,
    dst: str,
    target: Target,
    rank_options: RankOptions,
    options: Options,
    on_progress: OnProgress | None,
    write: Write = write_alone,
) -> Report:
    """Write all of a checkpoint under the names that it has."""
    watch = Stopwatch()
    memory = parse_memory(options.max_memory)
    reader = load_param_shapes(open_checkpoint(src, options.base), options.shapes_from)
    watch.end_phase("open")
    assert target.plan_ranks is not None, "the registry returns no other target"
    ranks = target.plan_ranks(reader, rank_options)
    report = Report(
        source=src,
        target=dst,
        format=reader.manifest.format,
        part="all",
        tensor_count=len(ranks.tensors),
        nbytes=sum(tensor.nbytes for tensor in ranks.tensors.values()),
        ties={dotted(path): dotted(kept) for path, kept in ranks.ties.items()},
        warnings=ranks.warnings,
        dry_run=options.dry_run,
    )
    config = ConfigFiles(None, {}, {})
    if not rank_options.world_size:  # a conversion
        config = find_config_files(open_source(src, options.base), options.config_from, reader)
    plan = ConversionPlan(
        reader,
        ranks.files,
        report,
        memory,
        overwrite=options.overwrite,
        jobs=options.jobs,
        copied=config.files,
        copied_from=config.store,
    )
    return run_conversion(plan, watch, on_progress, write)
