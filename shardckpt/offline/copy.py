"""Implement `copy`: copy a step or a run in the native format, byte for byte."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from shardckpt.errors import (
    CheckpointError,
    ChecksumError,
    MissingFileError,
    StorageError,
    TargetExistsError,
    UnknownFormatError,
    UsageError,
    require_bools,
)
from shardckpt.events.progress import Meter, OnProgress
from shardckpt.native.commit import COMMIT, STEP
from shardckpt.native.records import FileRecord, may_open, resolve_base, sibling
from shardckpt.native.run_directory import RunDirectory, is_saved_name, read_referred_files, read_run
from shardckpt.native.stored_folders import StoredFolder, read_blocks, read_stored_run, read_stored_step, write_commit
from shardckpt.native.verified_store import VerifiedStore
from shardckpt.notebook import Result
from shardckpt.offline.prune import StepInfo, describe_steps
from shardckpt.offline.results.computed_parts import ComputedPart, announce_record, compute_parts
from shardckpt.reader import NESTED_STEP, Source
from shardckpt.readers.registry import checkpoint_in, find_nested_step
from shardckpt.readers.run_start import require_start_of_run
from shardckpt.readers.step_paths import StepRange, resolve_range
from shardckpt.storage.local_publication import require_space
from shardckpt.storage.publication import Publication, target_exists_error
from shardckpt.storage.publish import find_missing_files, publish, require_apart
from shardckpt.storage.replaceable import find_replaceable_files, is_ignored
from shardckpt.storage.resolve_url import as_url, kind, local_path, not_found_error, open_store, read_version, split
from shardckpt.storage.store import Store, read_bytes
from shardckpt.storage.thread_pool import ThreadPool
from shardckpt.witness.files.record_file import copy_record
from shardckpt.witness.files.resume_file import copy_resumes

_FILES_AT_ONCE = 4  # each is copied through one buffer


@dataclass(frozen=True, slots=True, repr=False)
class Copied(Result):
    """Result of a copy; with `dry_run`, the expected result.

    Attributes:
        source: Path or URL of the step or run.
        target: Path or URL of its copy.
        copied: Names of copied folders: steps, and folders with files that steps refer to.
        present: Names of folders that the target already had.
        nbytes: Size of the copied folders, in bytes.
        checked_bytes: Bytes that matched their hashes; other files were saved without hashes.
        incomplete: Incomplete steps, which were not copied, with their faults.
        other_content: Names of files and folders in the steps that no save wrote; they were not copied.
        warnings: Bases on other stores, one sentence each.
        dry_run: Whether nothing was written.
        seconds: Seconds by phase: check, copy.
    """

    source: str
    target: str
    copied: tuple[str, ...]
    present: tuple[str, ...]
    nbytes: int
    checked_bytes: int
    incomplete: tuple[StepInfo, ...] = ()
    other_content: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    dry_run: bool = False
    seconds: Mapping[str, float] = field(default_factory=dict)


class CopiedFolder(NamedTuple):
    """A folder that was copied."""

    name: str  # for the user
    place: str  # name below the target; empty if it is the target
    save: str  # id of the step's save; empty if it is not a step any more
    files: tuple[str, ...]
    file: str = ""  # one of the files, of which no other copy has the version; empty without one
    version: str = ""


class _Transfer(NamedTuple):
    """A folder to copy."""

    folder: StoredFolder
    target: str  # path or URL of its copy
    held: Mapping[str, int]  # name to size in bytes, of files in the target
    is_present: bool  # the target has a complete copy

    @property
    def shown(self) -> str:
        """Name for the user."""
        return self.folder.name or self.target.rstrip("/").rpartition("/")[2]

    @property
    def is_unfinished(self) -> bool:
        """Whether the target has only files from an interrupted copy of this folder."""
        held = self._counting
        return bool(held) and COMMIT not in held and held <= self.folder.sizes.keys()

    @property
    def is_refused(self) -> bool:
        """Whether the target has other content, which only `overwrite` may replace."""
        return bool(self._counting) and not (self.is_present or self.is_unfinished)

    @property
    def _counting(self) -> set[str]:
        """Names of the target's files, without system files."""
        return {name for name in self.held if not is_ignored(name)}


class _Source(NamedTuple):
    """Content to copy from a step or a run."""

    folders: list[StoredFolder]
    incomplete: tuple[StepInfo, ...] = ()
    other_content: tuple[str, ...] = ()  # names of content that no save wrote


def copy(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    dry_run: bool = False,
    on_progress: OnProgress | None = None,
) -> Copied:
    """Copy a shardckpt step, or all complete steps in a run, byte for byte.

    While bytes are copied, through buffers of a fixed size, they are compared with the hashes in the manifests. On a
    disk, a folder appears at once; on other stores, its `COMMIT` is written last. Steps in a run keep their names, and
    are copied after the steps that they refer to. An interrupted copy can be repeated: steps with the same `COMMIT` and
    files with matching hashes are not copied again. Records of training steps (`Checkpointer(witness=...)`) are copied
    with their steps, and verdicts on resumes are added to the copy's verdicts.

    Args:
        src: Path or URL of a step or a run; `RUN@latest` copies one step, `RUN@1000..2000` some steps of a run.
        dst: Folder to write: the step, or the run's folder.
        overwrite: Replace different steps in the target.
        dry_run: Check source and target, and write nothing.
        on_progress: Called while bytes are copied, by one thread at a time. An exception from it stops the copy.

    Returns:
        Names of the folders, and the copied bytes.

    Raises:
        UsageError: The source is not a shardckpt step or run, or a base of the step is not next to the target.
        TargetExistsError: The target has another step or other files; nothing was written.
        CheckpointError: The source is damaged; the message names the file and the block.
        StorageError: Reading or writing failed; an incomplete copy of a step does not exist. If the target's disk has
            too little space for all steps, nothing was written.

    Examples:
        >>> shardckpt.copy("/scratch/run", "s3://bucket/run")  # doctest: +SKIP
    """
    start = time.perf_counter()
    chosen, dst = resolve_range(src), as_url(dst)
    src = chosen.path
    require_bools(overwrite=overwrite, dry_run=dry_run)
    require_apart(src, dst)
    source = _read_source(chosen)
    transfers = [_plan_transfer(folder, dst) for folder in source.folders]
    _require_vacant(transfers, dst, overwrite=overwrite)
    warnings = [note for transfer in transfers for note in _check_bases(transfer, transfers)]
    missing = [transfer for transfer in transfers if not transfer.is_present]
    path = local_path(dst)
    if path is not None and missing:
        require_space(os.path.abspath(path), _count_needed_bytes(missing))
    meter = Meter(sum(transfer.folder.nbytes for transfer in missing), on_progress)
    checked = time.perf_counter()
    parts = (
        ComputedPart(
            group[0].shown,
            sum(transfer.folder.nbytes for transfer in group),
            partial(_copy_group, group, meter, overwrite=overwrite, dry_run=dry_run),
            range(len(group) + 1),
        )
        for group in _group_by_references(transfers)
    )
    copied = {each.name for found in compute_parts(parts, CopiedFolder) for each in found}
    missing = [transfer for transfer in transfers if transfer.shown in copied]
    if not dry_run:
        _require_copied(missing)
    if not dry_run:
        warnings += [note for transfer in transfers for note in _copy_witness(transfer)]
    hashed = [f for t in missing for f in t.folder.files.values() if f.hashes is not None]
    manifests = [t.folder.commit.manifest_bytes for t in missing if t.folder.commit is not None]
    return Copied(
        src,
        dst,
        copied=tuple(transfer.shown for transfer in missing),
        present=tuple(transfer.shown for transfer in transfers if transfer.shown not in copied),
        nbytes=sum(transfer.folder.nbytes for transfer in missing),
        checked_bytes=sum(file.nbytes for file in hashed) + sum(manifests),
        incomplete=source.incomplete,
        other_content=source.other_content,
        warnings=tuple(warnings),
        dry_run=dry_run,
        seconds={"check": checked - start, "copy": time.perf_counter() - checked},
    )


def _read_source(chosen: StepRange) -> _Source:
    """Return the source's steps."""
    src = chosen.path
    found = kind(src)
    if found == "missing":
        raise not_found_error(src)
    store = open_store(src)
    entries = store.list() if found == "folder" else []
    names = [entry.name for entry in entries if not entry.is_folder]
    if COMMIT in names:
        folder = read_stored_step(store)
        inside = [f"{entry.name}/" for entry in entries if entry.is_folder]
        others = [*inside, *(name for name in names if not (name in folder.sizes or is_saved_name(name)))]
        return _Source([folder], other_content=tuple(others))
    nested = find_nested_step(Source(store)) if found == "folder" else None
    if nested is not None:
        others = [f"{entry.name}/" if entry.is_folder else entry.name for entry in entries if entry.name != NESTED_STEP]
        return _Source([replace(read_stored_step(nested.store), name=NESTED_STEP)], other_content=tuple(others))
    run, folders = _read_folders(chosen)
    if not run.complete:
        raise UnknownFormatError(
            "only shardckpt steps and runs can be copied",
            where=src,
            found=checkpoint_in(src) or "no complete step",
            fix="`shardckpt convert` reads other formats.",
        )
    others = [f"{step.name}/{name}" for step in run.complete for name in step.others]
    return _Source(folders, describe_steps(open_store(src), run.incomplete), tuple(others))


def _read_folders(chosen: StepRange) -> tuple[RunDirectory, list[StoredFolder]]:
    """Return a run and its folders, without steps that another process removes meanwhile."""
    store = open_store(chosen.path)
    run = _read_chosen(store, chosen)
    while True:
        try:
            return run, read_stored_run(store, run)
        except (CheckpointError, StorageError):
            store = open_store(chosen.path)
            before, run = run, _read_chosen(store, chosen)
            if {step.save for step in before.complete} <= {step.save for step in run.complete}:
                raise


def _read_chosen(store: Store, chosen: StepRange) -> RunDirectory:
    """Return a run with the steps that a caller names."""
    run = read_run(store)
    return replace(run, steps=tuple(step for step in run.steps if chosen.has_step(step.number)))


def _plan_transfer(folder: StoredFolder, dst: str) -> _Transfer:
    """Compare a folder with its target."""
    target = f"{dst.rstrip('/')}/{folder.name}" if folder.name else dst
    store = open_store(target)
    held = {entry.name: entry.size for entry in store.list() if not entry.is_folder}
    has_all = all(held.get(name) == size for name, size in folder.sizes.items())
    is_present = has_all and (not folder.mark or read_bytes(store, COMMIT, 0, len(folder.mark)) == folder.mark)
    return _Transfer(folder, target, held, is_present)


def _require_vacant(transfers: list[_Transfer], dst: str, *, overwrite: bool) -> None:
    """Require that no folder has other content at its target, before anything is written."""
    files = {entry.name for entry in open_store(dst).list() if not entry.is_folder}
    for transfer in transfers:
        if transfer.folder.name in files:
            raise TargetExistsError("the target is a file", where=transfer.target, fix="Choose another name.")
        if transfer.is_refused and not overwrite:
            raise target_exists_error(transfer.target)
        if transfer.is_refused:
            store = open_store(transfer.target)
            find_replaceable_files(STEP, store, store.list, transfer.target)
    if any(transfer.folder.name for transfer in transfers) and not any(transfer.held for transfer in transfers):
        require_start_of_run(dst)


def _count_needed_bytes(transfers: Collection[_Transfer]) -> int:
    """Return the space that copies need in this order: a replaced folder is removed after its copy."""
    used = needed = 0
    for transfer in transfers:
        needed = max(needed, used + transfer.folder.nbytes)
        used += transfer.folder.nbytes - sum(transfer.held.values())
    return needed


def _check_bases(transfer: _Transfer, transfers: Collection[_Transfer]) -> list[str]:
    """Check that a copied step will find its bases; return warnings."""
    commit = transfer.folder.commit
    if commit is None:
        return []
    copied = {other.folder.name: other.folder.sizes for other in transfers}
    notes = []
    for url, sizes in commit.bases.items():
        name, where = sibling(url), resolve_base(transfer.target, url)
        if name is None:
            if not may_open(transfer.target, where):
                notes.append(f"{transfer.shown} refers to {where}: to load the copy, name it as base=")
        elif not sizes.keys() <= copied.get(name, {}).keys() and (missing := find_missing_files(where, [sizes])):
            raise UsageError(
                "the step refers to files that are not next to the target",
                where=transfer.target,
                found=f"no {name}/{min(missing)}",
                fix=f"Copy its run, or {name} first.",
            )
    return notes


@contextmanager
def _noticing_removal(folder: StoredFolder) -> Iterator[None]:
    """If a step was removed during its copy, report that instead of damage."""
    try:
        yield
    except (CheckpointError, StorageError) as error:
        if folder.was_removed():
            raise MissingFileError(
                "the step was removed or replaced while it was copied",
                where=folder.raw_store.url,
                fix="Copy the run again: steps that were copied completely are not read again.",
            ) from error
        raise


def _group_by_references(transfers: Sequence[_Transfer]) -> list[list[_Transfer]]:
    """Return folders that refer to each other together, in order: a step never appears before what it refers to."""
    group_of: dict[str, list[_Transfer]] = {}
    for transfer in transfers:
        commit = transfer.folder.commit
        named = [sibling(url) for url in commit.bases] if commit else []
        found = {id(group): group for name in named if name and (group := group_of.get(name))}
        joined = sorted([*(each for group in found.values() for each in group), transfer], key=transfers.index)
        for member in joined:
            group_of[member.folder.name] = joined
    return list({id(group): group for group in group_of.values()}.values())


def _copy_group(
    group: Sequence[_Transfer], meter: Meter, *, overwrite: bool, dry_run: bool
) -> tuple[CopiedFolder, ...]:
    """Copy folders that the target lacks, and return these."""
    copied = []
    for transfer in group:
        if not transfer.is_present:
            folder = transfer.folder
            record = CopiedFolder(transfer.shown, folder.name, folder.save, tuple(folder.sizes))
            with nullcontext() if dry_run else _noticing_removal(folder):
                copied.append(record if dry_run else _copy_folder(transfer, record, meter, overwrite=overwrite))
    return tuple(copied)


def _require_copied(transfers: Sequence[_Transfer]) -> None:
    """Require that folders are there: tasks may have copied them long ago."""
    gone = [transfer.target for transfer in transfers if kind(transfer.target) == "missing"]
    if gone:
        raise MissingFileError("a copied step was removed meanwhile", where=gone[0], fix="Copy the run again.")


def _copy_folder(transfer: _Transfer, record: CopiedFolder, meter: Meter, *, overwrite: bool) -> CopiedFolder:
    """Copy one folder, and publish it; return its record with the version."""
    folder = transfer.folder
    reused = _find_good_files(transfer, meter) if transfer.is_unfinished else frozenset()
    with publish(
        transfer.target,
        STEP,
        overwrite=overwrite or transfer.is_unfinished,
        needed_bytes=folder.nbytes,
        last=COMMIT if folder.mark else None,
        prefix=folder.prefix,
        find_kept=lambda: read_referred_files(transfer.target) | reused if overwrite else reused,
    ) as publication:
        new = [name for name in folder.files if name not in reused]
        _copy_files(folder, new, publication, meter)
        meter.add(write_commit(folder, publication))
        with suppress(MissingFileError):  # it replaces another at the commit
            for name in new[:1]:
                path = publication.find_written(name)
                version = read_version(*split(path)) if path else read_version(transfer.target, name)
                record = record._replace(file=name, version=version)
                announce_record(record)
    return record


def _copy_witness(transfer: _Transfer) -> list[str]:
    """Copy the files next to a step: the record of training steps, resumes. Return warnings."""
    try:
        source, target = split(transfer.folder.raw_store.url), split(transfer.target)
    except UsageError:  # a step that is a bucket has no place next to it
        return []
    notes = []
    for what, copy_file in (("witness", copy_record), ("verdicts", copy_resumes)):
        try:
            copy_file(open_store(source[0]), source[1], open_store(target[0]), target[1])
        except (CheckpointError, StorageError) as error:
            notes.append(f"the {what} of {transfer.shown} could not be copied: {error}")
    return notes


def _find_good_files(transfer: _Transfer, meter: Meter) -> frozenset[str]:
    """Return the files from an interrupted copy that match their hashes."""
    store = VerifiedStore(open_store(transfer.target), transfer.folder.hashes)
    good = set()
    for name, hashed in transfer.folder.hashes.items():
        if transfer.held.get(name) == hashed.nbytes:
            with suppress(ChecksumError):
                for block in read_blocks(store, name, hashed.nbytes):
                    meter.add(len(block))
                good.add(name)
    return frozenset(good)


def _copy_files(folder: StoredFolder, names: Collection[str], publication: Publication, meter: Meter) -> None:
    """Copy files side by side; once one fails, the others stop."""
    store = VerifiedStore(folder.raw_store, folder.hashes)
    with ThreadPool(_FILES_AT_ONCE, thread_name_prefix="shardckpt-copy") as pool:
        started = [pool.submit(_copy_file, store, folder.files[name], publication, meter) for name in names]
        try:
            for done in as_completed(started):
                done.result()
        except BaseException:
            meter.stop()
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _copy_file(store: Store, file: FileRecord, publication: Publication, meter: Meter) -> None:
    with publication.create(file.name) as writer:
        for block in read_blocks(store, file.name, file.nbytes):
            writer.write(block)
            meter.add(len(block))
