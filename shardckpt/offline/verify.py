"""Implement `verify`: check structure, coverage, sizes, and stored checksums."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby

import xxhash

from shardckpt.encodings.codecs import CODECS
from shardckpt.errors import (
    CheckpointError,
    ChecksumError,
    FormatError,
    MissingFileError,
    OverlapError,
    SourceNotFoundError,
    UnsafeError,
    UsageError,
    escape,
)
from shardckpt.events.progress import Meter, OnProgress
from shardckpt.manifest import Encoded, Lazy, Manifest, TensorEntry, dotted
from shardckpt.native.payload import GROUP_BYTES, BlockHasher, group_hashes
from shardckpt.native.run_directory import read_run
from shardckpt.offline.results.computed_parts import ComputedPart, compute_parts
from shardckpt.offline.results.contents import (
    NO_SHAPES,
    FileRange,
    Problem,
    Verification,
    from_error,
    from_fault,
    missing_file,
)
from shardckpt.offline.select.config_files import load_param_shapes
from shardckpt.plan.layout.coverage import faults, locate
from shardckpt.reader import XXH3, XXH3_OF_BLOCKS, Checksum, HashBlocks, NamedBases, Reader, Source
from shardckpt.readers.registry import open_checkpoint, open_reader, open_source
from shardckpt.readers.step_paths import StepRange, resolve_range
from shardckpt.readers.torchsave.storages import find_value
from shardckpt.storage.resolve_url import as_url, open_store
from shardckpt.storage.store import Read, check_name

_MAX_FAULTS = 1000
_FULL_FILES = (XXH3, XXH3_OF_BLOCKS)  # kinds of checksums that cover all bytes in a file

_CHECKS = ("structure", "coverage", "sizes")
_SHOWN = 4
_MAX_TENSORS = 1000


def verify(
    src: str | os.PathLike[str],
    *,
    shapes_from: str | os.PathLike[str] = "",
    base: NamedBases = "",
    on_progress: OnProgress | None = None,
) -> Verification:
    """Check that a checkpoint is complete.

    Each element must exist once, files must have their sizes, and stored checksums must match. A damaged checkpoint is
    reported, not raised; only an unrecognized source or a failing storage raises.

    Args:
        src: Checkpoint in any readable format: path or URL of a folder or file. `RUN@latest` names a run's newest step,
            `RUN@1000..2000` all committed steps in this range, which share one result.
        shapes_from: Any checkpoint of the same model with full tensors, for flat parameters of FSDP1.
        base: Folder of the base checkpoint if it was moved, as for `load`.
        on_progress: Called while checksums are compared; an exception that it raises stops the work.

    Returns:
        All faults.

    Raises:
        UsageError: The source does not exist or is not recognized, or the shapes do not match.
        StorageError: Reading failed.
    """
    chosen = resolve_range(src)
    if not chosen.is_all:
        return _verify_range(chosen, base, on_progress)
    src = chosen.path
    try:
        reader = open_checkpoint(src, base)
        if shapes_from:
            reader = load_param_shapes(reader, as_url(shapes_from))
    except CheckpointError as error:
        return Verification(src, "", 0, 0, tuple(_list_unreadable(src, error)), ())
    manifest = reader.manifest
    dead = _find_dead_links(reader)
    problems = [*dead.values()]
    found = faults(manifest, manifest.tensors.values(), limit=_MAX_FAULTS)
    problems += [from_fault(fault) for fault in found if fault.file not in dead]
    problems += map(missing_file, manifest.missing)
    if not problems:  # a file that no tensor uses
        problems += [missing_file(name) for name, size in manifest.files.items() if size < 0]
    checked = 0
    if not problems:
        problems += _list_wrong_files(reader) or _list_changed_sizes(reader, lambda size, saved: size < saved)
    if not problems:
        problems += _containers(reader)
    without: tuple[str, ...] = ()
    if not problems:
        checked, wrong, without = _checksums(reader, on_progress)
        problems += wrong
    warnings = (*manifest.warnings, *(() if manifest.has_shapes else (NO_SHAPES,)))
    checks = (*_CHECKS, "checksums") if checked else _CHECKS
    return Verification(
        src, manifest.format, len(manifest.tensors), checked, tuple(problems), warnings, checks, without
    )


def _verify_range(chosen: StepRange, base: NamedBases, on_progress: OnProgress | None) -> Verification:
    """Verify a run's committed steps in a range, as one result."""
    run = read_run(open_store(chosen.path))
    names = [step.name for step in run.steps if step.is_committed and chosen.has_step(step.number)]
    root = chosen.path.rstrip("/")
    if not names:
        raise SourceNotFoundError("no step in this range is committed", where=f"{root}@{chosen.first}..{chosen.last}")

    def check(name: str) -> tuple[Verification]:
        return (verify(f"{root}/{name}", base=base, on_progress=on_progress),)

    parts = (ComputedPart(name, 0, partial(check, name)) for name in names)
    found = [(name, each) for name, [each] in zip(names, compute_parts(parts, Verification), strict=True)]
    return Verification(
        f"{root}@{chosen.first}..{chosen.last}",
        found[-1][1].format,
        sum(each.tensor_count for _, each in found),
        sum(each.checked_bytes for _, each in found),
        tuple(_with_folder(name, problem) for name, each in found for problem in each.problems),
        tuple(f"{name}: {warning}" for name, each in found for warning in each.warnings),
        tuple(dict.fromkeys(check for _, each in found for check in each.checks)),
        tuple(f"{name}/{file}" for name, each in found for file in each.files_without_checksums),
    )


def _with_folder(name: str, problem: Problem) -> Problem:
    return replace(problem, file=f"{name}/{problem.file}" if problem.file else name)


_ALONE = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")  # suffixes of files that can be opened without others


def _list_unreadable(src: str, error: CheckpointError) -> list[Problem]:
    """Return the faults of a checkpoint that cannot be opened, and of its other files that cannot."""
    problems = [from_error(error, src)]
    source = open_source(src)
    alone = [name for name in source.files if name.endswith(_ALONE)] if source.file is None else []
    for name in alone:
        try:
            open_reader(Source(source.store, name))
        except (FormatError, UnsafeError) as other:
            problems.append(from_error(other, src))
        except (CheckpointError, UsageError, MissingFileError):
            continue  # not a checkpoint by itself
    return list({problem.message: problem for problem in problems}.values())[:_MAX_FAULTS]


def _find_dead_links(reader: Reader) -> dict[str, Problem]:
    """Return the problems of links without a target, which a folder lists as files without bytes."""
    manifest = reader.manifest
    dead: dict[str, Problem] = {}
    for name, size in manifest.files.items():
        if size == 0 and name not in manifest.elsewhere:
            try:
                reader.raw_store.size(name)
            except (CheckpointError, MissingFileError) as error:
                dead[name] = replace(from_error(error), file=name)
    return dead


def _list_wrong_files(reader: Reader) -> list[Problem]:
    """Compare the manifest's file names and sizes with the folder: a plugin's reader may be wrong."""
    manifest = reader.manifest
    sizes = {name: size for name, size in manifest.files.items() if name not in manifest.elsewhere}
    found: dict[str, int] = {}
    try:
        for name in sizes:
            check_name(name, reader.store.url)
        for folder in sorted({name.rpartition("/")[0] for name in sizes}):
            found |= {entry.name: entry.size for entry in reader.raw_store.list(folder) if not entry.is_folder}
    except (CheckpointError, MissingFileError) as error:
        return [from_error(error, reader.store.url)]
    wrong = [missing_file(name) for name in sizes if name not in found]
    wrong += [
        _wrong_size(f"{name} has {found[name]} bytes, not {size}", name, found[name], size)
        for name, size in sizes.items()
        if found.get(name, size) != size
    ]
    return wrong[:_MAX_FAULTS]


def _list_changed_sizes(reader: Reader, is_wrong: Callable[[int, int], bool]) -> list[Problem]:
    """Compare the files' sizes with those that the checkpoint stores; the files may have no checksums."""
    sizes = reader.manifest.files
    return [
        _wrong_size(
            f"{name} has {abs(sizes[name] - saved)} {'fewer' if sizes[name] < saved else 'more'} bytes than were saved",
            name,
            sizes[name],
            saved,
        )
        for name, saved in reader.saved_sizes.items()
        if is_wrong(sizes[name], saved)
    ][:_MAX_FAULTS]


def _wrong_size(message: str, file: str, found: int, expected: int) -> Problem:
    return Problem("wrong_size", escape(message), file=file, found=f"{found} bytes", expected=f"{expected} bytes")


def _containers(reader: Reader) -> list[Problem]:
    """Open every container with a tensor's bytes and check its content."""
    entries = reader.manifest.tensors.values()
    try:
        readable = [entry for entry in entries if not find_value(entry)] or entries  # a warning names the others
        lazy = [entry for entry in readable if any(isinstance(piece.layout, Lazy) for piece in entry.pieces)]
        located = locate(reader, reader.manifest, lazy)
    except OverlapError:
        return _list_different(reader, lazy)
    except CheckpointError as error:
        return [from_error(error, reader.store.url)]
    unknown = {
        layout.codec: Problem(
            "unsupported",
            escape(f"no decoder for {layout.codec!r}, which {dotted(entry.path)} needs"),
            (dotted(entry.path),),
            box,
            file,
            FileRange(layout.offset, layout.nbytes),
            found=escape(layout.codec),
        )
        for entry in (*entries, *located)
        for box, file, layout in entry.pieces
        if isinstance(layout, Encoded) and layout.codec not in CODECS
    }
    return list(unknown.values())


def _list_different(reader: Reader, entries: Iterable[TensorEntry]) -> list[Problem]:
    """Return a problem for each tensor that differs between ranks."""
    problems: list[Problem] = []
    for entry in entries:
        try:
            locate(reader, reader.manifest, [entry])
        except CheckpointError as error:
            problems.append(replace(from_error(error, reader.store.url), tensors=(dotted(entry.path),)))
        if len(problems) == _MAX_FAULTS:
            break
    return problems


@dataclass(frozen=True, slots=True)
class FileCheck:
    """What the checksums of one file say."""

    checked: int  # bytes that match
    problems: tuple[Problem, ...]


def _checksums(reader: Reader, on_progress: OnProgress | None) -> tuple[int, list[Problem], tuple[str, ...]]:
    """Return the bytes that match their checksums, the problems, and the files without checksums."""
    checked = 0
    with_bytes = (name for name, size in reader.manifest.files.items() if size)
    without = dict.fromkeys((*reader.unverified_files, *with_bytes))
    meter = Meter(0, None)
    if on_progress is not None:
        meter = Meter(sum(checksum.nbytes for checksum in reader.checksums()), on_progress)
    problems: list[Problem] = []
    check = _ChecksumCheck(reader, meter)
    try:
        for [found] in compute_parts(check.list_parts(without), FileCheck):
            checked += found.checked
            problems += found.problems[: _MAX_FAULTS - len(problems)]
    except CheckpointError as error:
        problems.append(from_error(error, reader.store.url))
    problems += _list_changed_sizes(reader, lambda size, saved: size > saved)
    return checked, problems, () if problems else tuple(without)


class _ChecksumCheck:
    """Compares the stored checksums of files."""

    def __init__(self, reader: Reader, meter: Meter) -> None:
        self._reader = reader
        self._algorithms = {**_ALGORITHMS, **reader.algorithms}
        self._content = _Content(reader.manifest)
        self._blocks = _Blocks(reader, meter)

    def list_parts(self, without: dict[str, None]) -> Iterator[ComputedPart]:
        """Yield a part for each file with checksums, and remove the file from `without`."""
        for file, group in groupby(self._reader.checksums(), lambda checksum: checksum.file):
            without.pop(file, None)
            checksums = [*group]
            yield ComputedPart(file, sum(each.nbytes for each in checksums), partial(self._check_file, checksums))

    def _check_file(self, checksums: Sequence[Checksum]) -> tuple[FileCheck]:
        checked, problems = 0, list[Problem]()
        try:
            for checksum in checksums:
                if checksum.algorithm not in self._algorithms:
                    problems.append(_unknown_kind(checksum))
                    break
                value = self._algorithms[checksum.algorithm](self._blocks.read(checksum))
                if value == checksum.value:
                    checked += checksum.nbytes
                elif len(problems) < _MAX_FAULTS:
                    problems.append(_mismatch(self._reader, checksum, value, self._content))
        except CheckpointError as error:
            problems.append(from_error(error, self._reader.store.url))
        return (FileCheck(checked, tuple(problems)),)


def _unknown_kind(checksum: Checksum) -> Problem:
    message = escape(f"{checksum.file} has checksums with an unknown algorithm: {checksum.algorithm}")
    return Problem("unsupported", message, file=checksum.file, found=escape(checksum.algorithm))


def _mismatch(reader: Reader, checksum: Checksum, value: int, content: _Content) -> Problem:
    digits = 8 if checksum.algorithm == "crc32" else 16
    end = checksum.offset + checksum.nbytes
    names = content.list_tensors(checksum.file, checksum.offset, end)
    error = ChecksumError(
        f"{checksum.label}bytes {checksum.offset} to {end} do not match their checksum{_describe(names)}",
        where=f"{reader.store.url}/{checksum.file}",
        found=f"{value:0{digits}x}",
        expected=f"{checksum.value:0{digits}x}",
        fix="Restore the file from another copy.",
    )
    return replace(
        from_error(error),
        tensors=tuple(names[:_MAX_TENSORS]),
        file=checksum.file,
        byte_range=FileRange(checksum.offset, checksum.nbytes),
    )


def _describe(names: Sequence[str]) -> str:
    """Return a clause that names tensors; empty without them."""
    if not names:
        return ""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f": {', '.join(names[:_SHOWN])}{more}"


class _Content:
    """Finds the tensors in a file's byte range."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest

    @cached_property
    def _ranges(self) -> Mapping[str, list[tuple[int, int, str]]]:
        found: dict[str, list[tuple[int, int, str]]] = {}
        for path, entry in self._manifest.tensors.items():
            for _, file, layout in entry.pieces:
                if not isinstance(layout, Lazy):
                    found.setdefault(file, []).append((layout.offset, layout.offset + layout.nbytes, dotted(path)))
        for ranges in found.values():
            ranges.sort()
        return found

    def list_tensors(self, file: str, start: int, end: int) -> list[str]:
        """Return the dotted names of tensors between two bytes."""
        overlapping = (name for low, high, name in self._ranges.get(file, ()) if low < end and high > start)
        return list(dict.fromkeys(overlapping))


class _Blocks:
    """Reads the bytes that checksums cover, in order and through one buffer; small ones together."""

    def __init__(self, reader: Reader, meter: Meter) -> None:
        self._store, self._sizes, self._meter = reader.raw_store, reader.manifest.files, meter
        self._buffer = memoryview(bytearray(GROUP_BYTES))
        self._file, self._start, self._end = "", 0, 0

    def read(self, checksum: Checksum) -> Iterator[memoryview]:
        """Yield the bytes that a checksum covers, in parts that are valid until the next one is requested."""
        at, end = checksum.offset, checksum.offset + checksum.nbytes
        while at < end:
            if self._file != checksum.file or not self._start <= at < self._end:
                self._fill(checksum, at)
            part = self._buffer[at - self._start : min(end, self._end) - self._start]
            yield part
            at += len(part)
            if at == self._end:
                self._meter.add(at - self._start)

    def _fill(self, checksum: Checksum, at: int) -> None:
        """Read a checksum's bytes, and the next ones if further checksums cover these too."""
        end = checksum.offset + checksum.nbytes
        if checksum.algorithm in _FULL_FILES:
            end = max(end, self._sizes.get(checksum.file, end))
        nbytes = min(GROUP_BYTES, end - at)
        self._file = ""
        self._store.read([Read(checksum.file, at, self._buffer[:nbytes])])
        self._file, self._start, self._end = checksum.file, at, at + nbytes


def _crc32(blocks: Iterable[memoryview]) -> int:
    value = 0
    for block in blocks:
        value = zlib.crc32(block, value)
    return value


def _xxh3(blocks: Iterable[memoryview]) -> int:
    digest = xxhash.xxh3_64()
    for block in blocks:
        digest.update(block)
    return int(digest.intdigest())


def _xxh3_of_blocks(blocks: Iterable[memoryview]) -> int:
    hasher = BlockHasher()
    for block in blocks:
        hasher.update(block)
    return int.from_bytes(group_hashes(hasher.digests()), "big")


_ALGORITHMS: Mapping[str, HashBlocks] = {
    "crc32": _crc32,
    XXH3: _xxh3,
    XXH3_OF_BLOCKS: _xxh3_of_blocks,
}
