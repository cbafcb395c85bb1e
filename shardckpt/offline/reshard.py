"""The verb `reshard`: all that a checkpoint holds, written anew for another number of ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardckpt.errors import UsageError
from shardckpt.format.dcp.writer import METADATA
from shardckpt.format.native.commit import COMMIT
from shardckpt.format.native.payload import new_save_id
from shardckpt.format.native.run_directory import read_referred_files
from shardckpt.format.reader import NamedBases, Reader
from shardckpt.format.registry import open_checkpoint
from shardckpt.manifest import Path, dotted
from shardckpt.offline.select.checkpoint_content import Content, full_content
from shardckpt.offline.select.native_tree import build_full_tree
from shardckpt.offline.select.options import DEFAULT_MEMORY_BYTES, LEAST_MEMORY_BYTES
from shardckpt.offline.select.param_shapes import load_param_shapes
from shardckpt.offline.targets.dcp import encode_content_metadata, flatten_value, plan_ranks, to_torch_path
from shardckpt.offline.targets.fsdp_rank_files import plan_rank_files, sharded_paths
from shardckpt.offline.targets.native import plan_step
from shardckpt.offline.targets.overwrite_kinds import RANK_FILES, kind_of_folder
from shardckpt.offline.write.report import Meter, OnProgress, Report, Stopwatch
from shardckpt.offline.write.target_writer import Layout, TargetWriter
from shardckpt.plan.layout.output_files import OutputTensor
from shardckpt.plan.layout.sizes import parse_size
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
        overwrite: Replace one checkpoint of the same format that lies at the target.
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
    reader = load_param_shapes(open_checkpoint(src, base), os.fspath(shapes_from))
    watch.end_phase("open")
    asked = _ReshardOptions(world_size, parse_size(max_shard_size), tuple(keep_whole), allow_loss)
    work = {"native": _plan_step, "dcp": _plan_dcp, "torch": _plan_rank_files}[to](reader, asked)
    layout = work.lay_out("")
    watch.end_phase("plan")
    total = sum(tensor.nbytes for tensor in work.arrays.values())
    if not dry_run:
        needed = sum(file.nbytes for file in layout.payload)
        kind = RANK_FILES if to == "torch" else kind_of_folder(to)
        kept = read_referred_files(dst) if to == "native" and overwrite else ()
        with publish(dst, kind, overwrite=overwrite, needed_bytes=needed, last=work.last, keep=kept) as publication:
            layout = work.lay_out(publication.unique_suffix) if publication.unique_suffix else layout
            hashes = TargetWriter(reader, memory, Meter(total, on_progress)).write(layout.payload, publication)
            watch.end_phase("copy")
            layout.write_rest(hashes, publication)
        watch.end_phase("publish")
    return Report(
        source=src,
        target=dst,
        format=reader.manifest.format,
        part="all",
        files=layout.files,
        carried=layout.others,
        tensors=len(work.arrays),
        nbytes=total,
        ties={dotted(path): dotted(kept) for path, kept in work.ties.items()},
        cast={},
        left_out=(),
        warnings=work.warnings,
        seconds=watch.seconds,
        dry_run=dry_run,
    )


class _ReshardOptions(NamedTuple):
    """Arguments of `reshard`, with sizes in bytes."""

    world_size: int
    most_bytes: int
    keep_whole: tuple[str, ...]
    allow_loss: bool


@dataclass(frozen=True, slots=True)
class _ReshardPlan:
    """The files to write.

    Attributes:
        arrays: Tensors by path, each once.
        ties: Further path of a tensor to its path in `arrays`.
        warnings: What is odd or was left out, a sentence each.
        last: The file that makes the result loadable.
        lay_out: Returns the files, given what to put into their names where the usual ones may still be read.
    """

    arrays: Mapping[Path, OutputTensor]
    ties: Mapping[Path, Path]
    warnings: tuple[str, ...]
    last: str
    lay_out: Callable[[str], Layout]


def _plan_step(reader: Reader, asked: _ReshardOptions) -> _ReshardPlan:
    nest = build_full_tree(reader, allow_loss=asked.allow_loss)
    step = plan_step(nest, asked.world_size, most_bytes=asked.most_bytes, save=new_save_id())
    layout, paths = step.layout({}), list(nest.arrays)
    ties = {path: paths[number] for path, number in nest.ties.items()}
    return _ReshardPlan(nest.arrays, ties, nest.warnings, COMMIT, lambda _fresh: layout)


def _plan_dcp(reader: Reader, asked: _ReshardOptions) -> _ReshardPlan:
    content = full_content(reader, "dcp", allow_loss=asked.allow_loss, placed=to_torch_path, leaves=flatten_value)

    def lay_out(unique_suffix: str) -> Layout:
        files = plan_ranks(content, asked.world_size, most_bytes=asked.most_bytes, unique_suffix=unique_suffix)
        return Layout(tuple(files), {METADATA: encode_content_metadata(files, content)})

    return _plan_content(content, reader, METADATA, lay_out)


def _plan_rank_files(reader: Reader, asked: _ReshardOptions) -> _ReshardPlan:
    content = full_content(reader, "torch", allow_loss=asked.allow_loss)
    files = tuple(plan_rank_files(content, sharded_paths(content, asked.keep_whole), asked.world_size))
    return _plan_content(content, reader, files[-1].name, lambda _fresh: Layout(files, {}))


def _plan_content(content: Content, reader: Reader, last: str, lay_out: Callable[[str], Layout]) -> _ReshardPlan:
    warnings = (*reader.manifest.warnings, *content.left_out)
    return _ReshardPlan(content.arrays, content.ties, warnings, last, lay_out)


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
