"""The verb `reshard`: all that a checkpoint holds, written anew for another number of ranks."""

from __future__ import annotations

from shardckpt.convert.native_nest import whole_nest
from shardckpt.convert.native_target import plan_step, write_step
from shardckpt.convert.options import DEFAULT_MEMORY_BYTES, LEAST_MEMORY_BYTES
from shardckpt.convert.report import Meter, OnProgress, Report, Stopwatch
from shardckpt.convert.stream import Budget
from shardckpt.errors import UsageError
from shardckpt.format.detect import open_checkpoint
from shardckpt.format.native_manifest import COMMIT, manifest_name
from shardckpt.manifest import dotted
from shardckpt.plan.sizes import parse_size
from shardckpt.storage.publish import overlaps, publish

TARGETS = ("native",)
MOST_RANKS = 100_000


def reshard(
    src: str,
    dst: str,
    *,
    world_size: int,
    to: str = "native",
    max_shard_size: int | str = "5GB",
    max_memory: int | str = DEFAULT_MEMORY_BYTES,
    overwrite: bool = False,
    dry_run: bool = False,
    on_progress: OnProgress | None = None,
) -> Report:
    """Write all that a checkpoint holds as a native step of `world_size` ranks, each with a payload file at least.

    No value changes: loading the step gives the same bits as loading the source, at this world size or any other.
    Memory is constant.

    Args:
        src: Checkpoint in any readable format: a folder or file, a path or URL.
        dst: Folder to write.
        world_size: For how many ranks tensors are cut, in their first dimension.
        to: Format to write: `native`.
        max_shard_size: Bytes of tensor data in a file: a number, or `5GB`.
        max_memory: Bytes that the process may add to its start-up.
        overwrite: Replace what lies at the target.
        dry_run: Plan and check, write nothing.
        on_progress: Called as bytes are written; what it raises stops the work and leaves nothing.

    Returns:
        What was written.

    Raises:
        UsageError: The call cannot be done: no such source, a target that exists, an option that does not fit.
        CheckpointError: The checkpoint is damaged, incomplete or unsafe; the message names tensor and box.
        StorageError: Reading or writing failed, or the target has no room.

    Example:
        >>> shardckpt.reshard("run/step-100", "for-8", world_size=8)  # doctest: +SKIP
    """
    watch = Stopwatch()
    memory = _check(src, dst, world_size, to, max_memory)
    most_bytes = parse_size(max_shard_size)
    reader = open_checkpoint(src)
    watch.lap("open")
    nest = whole_nest(reader)
    step = plan_step(nest, world_size, most_bytes=most_bytes)
    total = sum(tensor.nbytes for tensor in nest.arrays.values())
    watch.lap("plan")
    if not dry_run:
        budget = Budget.of(memory, 1, is_local=reader.store.traits.is_local)
        with publish(dst, overwrite=overwrite, needed_bytes=step.nbytes, last=COMMIT) as publication:
            write_step(publication, reader, step, budget=budget, allow_overflow=False, meter=Meter(total, on_progress))
            watch.lap("copy")
        watch.lap("publish")
    paths = list(nest.arrays)
    return Report(
        source=src,
        target=dst,
        format=reader.manifest.format,
        part="all",
        files=step.files,
        carried=(manifest_name(step.contents.save), COMMIT),
        tensors=len(nest.arrays),
        nbytes=total,
        ties={dotted(path): dotted(paths[number]) for path, number in nest.ties.items()},
        cast={},
        left_out=(),
        warnings=nest.warnings,
        seconds=watch.seconds,
        dry_run=dry_run,
    )


def _check(src: str, dst: str, world_size: int, to: str, max_memory: int | str) -> int:
    """Return the memory cap in bytes, once the call makes sense."""
    if to not in TARGETS:
        raise UsageError(f"--to {to!r} is no format that reshard writes", expected=", ".join(TARGETS))
    if type(world_size) is not int or not 1 <= world_size <= MOST_RANKS:
        raise UsageError("--world-size is no number of ranks", found=repr(world_size), expected=f"1 to {MOST_RANKS}")
    memory = parse_size(max_memory)
    if memory < LEAST_MEMORY_BYTES:
        raise UsageError("--max-memory is too small to work in", found=str(max_memory), expected="24MiB or more")
    if overlaps(src, dst):
        raise UsageError("source and target overlap", found=dst, where=src, fix="Write to another folder.")
    return memory
