"""The verb `reshard`: all that a checkpoint holds, written anew for another number of ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from shardckpt.convert.dcp_target import DcpFile, metadata_of, plan_ranks, whole_content
from shardckpt.convert.native_nest import whole_nest
from shardckpt.convert.native_target import plan_step, write_step
from shardckpt.convert.options import DEFAULT_MEMORY_BYTES, LEAST_MEMORY_BYTES
from shardckpt.convert.rank_target import plan_rank_files, rank_content
from shardckpt.convert.report import Meter, OnProgress, Report, Stopwatch, WrittenFile
from shardckpt.convert.stream import Budget
from shardckpt.convert.whole_shapes import with_whole_shapes
from shardckpt.errors import UsageError
from shardckpt.format.dcp_writer import METADATA
from shardckpt.format.detect import open_checkpoint
from shardckpt.format.native_manifest import COMMIT, manifest_name
from shardckpt.format.native_references import NamedBases
from shardckpt.format.reader import Reader
from shardckpt.manifest import dotted
from shardckpt.plan.sizes import parse_size
from shardckpt.storage.publish import overlaps, publish

TARGETS = ("native", "dcp", "torch")
MOST_RANKS = 100_000


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
    keep_whole: Sequence[str] = (),
    allow_loss: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    on_progress: OnProgress | None = None,
) -> Report:
    """Write all that a checkpoint holds as one of `world_size` ranks, each with a payload file at least.

    No value changes: loading the result gives the same bits as loading the source, at this world size or any other.
    Memory is constant.

    Args:
        src: Checkpoint in any readable format: a folder or file, a path or URL.
        dst: Folder to write.
        world_size: For how many ranks tensors are cut, in their first dimension.
        to: Format to write: `native`; `dcp`, which `torch.distributed.checkpoint` loads; or `torch`, a file of
            `torch.save` for each rank, with the DTensors of FSDP2.
        max_shard_size: Bytes of tensor data in a file: a number, or `5GB`. With `torch` each rank has one file.
        max_memory: Bytes that the process may add to its start-up.
        shapes_from: Any checkpoint of the same model that holds whole tensors, for flat parameters of FSDP1.
        base: Where a folder lies that the checkpoint refers to, as `load` takes it.
        keep_whole: Globs of dotted names that `torch` does not cut, such as buffers: every rank's file has them whole.
        allow_loss: Leave out values that the format cannot hold; otherwise that is an error which lists them.
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
    src, dst = os.fspath(src), os.fspath(dst)
    watch = Stopwatch()
    memory = _check(src, dst, world_size, to, max_memory)
    most_bytes = parse_size(max_shard_size)
    reader = with_whole_shapes(open_checkpoint(src, base), os.fspath(shapes_from))
    watch.lap("open")
    if to != "native":
        target = _Target(dst, world_size, most_bytes, memory, tuple(keep_whole), allow_loss, overwrite, dry_run)
        write = _to_dcp if to == "dcp" else _to_rank_files
        return write(reader, src, target, watch, on_progress)
    nest = whole_nest(reader, allow_loss=allow_loss)
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


@dataclass(frozen=True, slots=True)
class _Target:
    """Where the result goes, and how: arguments of `reshard`, with sizes in bytes."""

    url: str
    world_size: int
    most_bytes: int
    memory: int
    keep_whole: tuple[str, ...]
    allow_loss: bool
    overwrite: bool
    dry_run: bool


def _to_dcp(reader: Reader, src: str, target: _Target, watch: Stopwatch, on_progress: OnProgress | None) -> Report:
    content, lost = whole_content(reader, allow_loss=target.allow_loss)
    total = sum(tensor.nbytes for tensor in content.arrays.values())

    def planned(fresh: str) -> list[DcpFile]:
        return plan_ranks(content, target.world_size, most_bytes=target.most_bytes, fresh=fresh)

    files = planned("")
    watch.lap("plan")
    if not target.dry_run:
        budget = Budget.of(target.memory, 1, is_local=reader.store.traits.is_local)
        needed = sum(file.nbytes for file in files)
        with publish(target.url, overwrite=target.overwrite, needed_bytes=needed, last=METADATA) as publication:
            files = planned(publication.fresh) if publication.fresh else files
            meter = Meter(total, on_progress)
            for file in files:
                with publication.create(file.name) as writer:
                    file.write(reader, writer, budget=budget, allow_overflow=False, meter=meter)
            watch.lap("copy")
            with publication.create(METADATA) as writer:
                writer.write(metadata_of(files, content))
        watch.lap("publish")
    return Report(
        source=src,
        target=target.url,
        format=reader.manifest.format,
        part="all",
        files=tuple(WrittenFile(file.name, file.nbytes, file.count) for file in files),
        carried=(METADATA,),
        tensors=len(content.arrays),
        nbytes=total,
        ties={dotted(path): dotted(kept) for path, kept in content.ties.items()},
        cast={},
        left_out=(),
        warnings=(*reader.manifest.warnings, *lost),
        seconds=watch.seconds,
        dry_run=target.dry_run,
    )


def _to_rank_files(
    reader: Reader, src: str, target: _Target, watch: Stopwatch, on_progress: OnProgress | None
) -> Report:
    content, lost = rank_content(reader, keep_whole=target.keep_whole, allow_loss=target.allow_loss)
    files = plan_rank_files(content, target.world_size)
    total = sum(tensor.nbytes for tensor in content.arrays.values())
    watch.lap("plan")
    if not target.dry_run:
        budget = Budget.of(target.memory, 1, is_local=reader.store.traits.is_local)
        needed, last = sum(file.nbytes for file in files), files[-1].name
        with publish(target.url, overwrite=target.overwrite, needed_bytes=needed, last=last) as publication:
            meter = Meter(total, on_progress)
            for file in files:
                with publication.create(file.name) as writer:
                    file.write(reader, writer, budget=budget, meter=meter)
            watch.lap("copy")
        watch.lap("publish")
    return Report(
        source=src,
        target=target.url,
        format=reader.manifest.format,
        part="all",
        files=tuple(WrittenFile(file.name, file.nbytes, file.count) for file in files),
        carried=(),
        tensors=len(content.arrays),
        nbytes=total,
        ties={dotted(path): dotted(kept) for path, kept in content.ties.items()},
        cast={},
        left_out=(),
        warnings=(*reader.manifest.warnings, *lost),
        seconds=watch.seconds,
        dry_run=target.dry_run,
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
