"""Find, check and delete a run's steps.

A step is a folder named like `step-00001000` that contains a `COMMIT`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from shardckpt.errors import (
    CheckpointError,
    IncompleteError,
    MissingFileError,
    StorageError,
    UnsupportedError,
    UsageError,
)
from shardckpt.native.commit import (
    COMMIT,
    MANIFEST_SUFFIX,
    WRITTEN,
    Commit,
    SaveMark,
    is_of_save,
    read_commit,
    read_contents,
)
from shardckpt.native.manifest_json import ManifestContents, decode_manifest
from shardckpt.native.payload import HF_INDEX
from shardckpt.native.records import group_files_by_base, is_same_folder, resolve_base
from shardckpt.storage.orphans import PARTIAL, is_partial, remove_orphan
from shardckpt.storage.replaceable import is_ignored
from shardckpt.storage.resolve_url import local_path, open_store, split
from shardckpt.storage.store import Listed, Store, SubfolderStore, read_bytes
from shardckpt.storage.thread_pool import ThreadPool

_STEP = re.compile(r"step-([0-9]{1,18})")
_PARTIAL = re.compile(rf"\.{_STEP.pattern}\.{PARTIAL}-[0-9a-f]{{12}}")

_SAVE_CHARACTERS = 15
_STAMP_CHARACTERS = 9
_AT_ONCE = 8
_SHOWN = 3
_REMOVED = "removed, but for files of another save"
_LOOKS = 50  # maximum listings of a run whose steps change during the listing


def step_name(number: int) -> str:
    """Return the name of a step's folder; up to 99,999,999, names sort like numbers."""
    return f"step-{number:08d}"


RECORD = ".shardckpt-run.json"  # file in a run's root that says which captures belong to it

_WITNESS, _RESUMES = ".witness.json", ".resumes.json"


def witness_name(step: str) -> str:
    """Return the name of the file next to a step that records the training steps after it."""
    return f"{step}{_WITNESS}"


def resumes_name(step: str) -> str:
    """Return the name of the file next to a step that has the verdicts on its resumes."""
    return f"{step}{_RESUMES}"


def find_removed_steps(names: Iterable[str], kept: Set[str]) -> list[str]:
    """Return the names of removed steps with verdicts on their resumes, by number."""
    steps = {name.removesuffix(_RESUMES) for name in names if name.endswith(_RESUMES)}
    return sorted(filter(is_step_name, steps - kept), key=step_number)


CAPTURE_RESUMES = f".captures{_RESUMES}"  # file with the verdicts on resumes from tiers' captures


def is_run_file(name: str) -> bool:
    """Return True if a file in a run's root is not a user's: a record, verdicts, or a system file."""
    step = name.removesuffix(_WITNESS).removesuffix(_RESUMES)
    return is_ignored(name) or name in (RECORD, CAPTURE_RESUMES) or (step != name and is_step_name(step))


def is_step_name(name: str) -> bool:
    """Return True if a folder has a step's name."""
    return _STEP.fullmatch(name) is not None


def step_number(name: str) -> int:
    """Return the number in the name of a step's folder."""
    return int(name.rpartition("-")[2])


@dataclass(frozen=True, slots=True)
class StepFolder:
    """A folder with a step's name, in a run."""

    number: int
    name: str
    save: str = ""  # id of the save that wrote it; empty without a valid `COMMIT`
    branch: int = 0  # a step in a later branch is newer, whatever its number
    mark: SaveMark | None = None  # where it belongs in its run; None if no `Checkpointer` with tiers saved it
    nbytes: int = 0  # committed bytes of its files
    fault: str = ""  # reason why the step is not complete; empty if it is
    is_committed: bool = False  # whether a file `COMMIT` exists, valid or not
    is_ours: bool = False  # whether saves wrote all files in the folder
    is_base: bool = False  # whether the step was removed, except for files that other steps refer to
    is_double: bool = False  # whether the step is complete but another folder with the same number is used
    # Whether a newer version of shardckpt wrote it, so that its content and references are unknown.
    is_newer: bool = False
    # Name to size in bytes of the files in the folder.
    held: Mapping[str, int] = field(default_factory=dict, hash=False)
    # Names of files that no save wrote, and of subfolders, with a slash at the end. They are never removed.
    others: tuple[str, ...] = ()
    own: frozenset[str] = frozenset()  # names of the committed files
    # Referenced folders next to the step, each with name and size of its files.
    refers: Mapping[str, Mapping[str, int]] = field(default_factory=dict, hash=False)

    @property
    def order(self) -> tuple[int, int]:
        """Branch and number: a step with a greater order is newer."""
        return self.branch, self.number

    @property
    def is_complete(self) -> bool:
        """Whether the step is committed and all files have their committed sizes. Includes files in bases."""
        return not self.fault

    @property
    def is_part(self) -> bool:
        """Whether the step is committed, but files of it are not here: in a tier other machines may have them."""
        return bool(self.save) and not self.is_complete and not self.own <= self.held.keys()

    @property
    def is_unfinished(self) -> bool:
        """Whether a save into this folder, or a removal of the step, was interrupted."""
        return self.is_ours and not self.is_committed

    @property
    def has_only_begun(self) -> bool:
        """Whether it only has files of saves that did not get as far as their manifest: it was never complete."""
        is_planned = any(name.endswith(MANIFEST_SUFFIX) for name in self.held)
        return self.is_unfinished and bool(self.held) and not is_planned

    @property
    def saved(self) -> frozenset[str]:
        """Names of the files in the folder that saves wrote."""
        return frozenset(self.held).difference(self.others)

    @property
    def removable(self) -> frozenset[str]:
        """Names of the files that removing the step removes: all files in the folder but other saves'."""
        finals = {name: _final(name) for name in self.saved}
        others = {n for n, final in finals.items() if WRITTEN.fullmatch(final) and not is_of_save(final, self.save)}
        return self.own.union(self.saved) - others - {COMMIT}

    @property
    def is_foreign(self) -> bool:
        """Whether the folder contains only content that no save wrote."""
        return bool(self.others) and all(map(is_ignored, self.saved))

    @property
    def folders(self) -> tuple[str, ...]:
        """Names of the subfolders."""
        return tuple(name[:-1] for name in self.others if name.endswith("/"))

    @property
    def saved_at(self) -> float | None:
        """Start time of the save, in seconds since the epoch; None if unknown."""
        return _parse_start_time(self.save) if len(self.save) == _SAVE_CHARACTERS else None


def _parse_start_time(save: str) -> float:
    return int(save[:_STAMP_CHARACTERS], 36) / 1000


@dataclass(frozen=True, slots=True)
class Orphan:
    """Files of a save or a removal that was killed."""

    name: str  # name of the folder
    # Time of the last change in the folder, in seconds since the epoch; if the store has no times, the start of the
    # last save into it; None if unknown.
    changed_at: float | None
    # Names of the files in a step's folder that had changed by then; later files do not belong to the orphan.
    files: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Steps and orphans in a run directory."""

    steps: tuple[StepFolder, ...]  # complete and incomplete steps, by number
    partial: tuple[str, ...]  # temporary folders of unfinished steps, on a disk
    # Other references to folders of the run: checkpoints with other names, and running saves that have written their
    # manifest. Only `read_run_to_remove` fills this.
    others: tuple[StepFolder, ...] = ()
    has_record: bool = False  # whether the run has a `RECORD`

    @property
    def has_lost_all(self) -> bool:
        """Whether no step is here, complete or damaged; saves may have begun."""
        return all(step.is_base or step.has_only_begun for step in self.steps)

    @property
    def complete(self) -> tuple[StepFolder, ...]:
        """Steps that can be loaded, oldest first: by branch, then by number."""
        return tuple(sorted((s for s in self.steps if s.is_complete), key=lambda step: step.order))

    @property
    def incomplete(self) -> tuple[StepFolder, ...]:
        """Steps that cannot be loaded, without bases and folders with other content."""
        has_complete = any(step.is_complete for step in self.steps)
        return tuple(
            step for step in self.steps if not (step.is_complete or step.is_base or (step.is_foreign and has_complete))
        )

    def referred(self, but: Collection[str] = ()) -> dict[str, frozenset[str]]:
        """Return the referenced files, by the name of their folder."""
        return collect_referred(step for step in (*self.steps, *self.others) if step.name not in but)

    def require_readable(self) -> None:
        """Require that no step has a newer version: such a step may refer to any folder of the run."""
        newer = next((step for step in (*self.steps, *self.others) if step.is_newer), None)
        if newer is not None:
            raise UnsupportedError(
                "nothing is removed from a run that holds a step which this version cannot read",
                where=newer.name,
                found=newer.fault,
                fix="Update shardckpt.",
            )


def read_run(store: Store) -> RunDirectory:
    """Read every step of a run: one listing and one small read for each."""
    # Open a new store for each call, since stores cache listings. Other processes may save and remove steps at the same
    # time. The result has each step that is complete when the call starts, or one saved later. An incomplete step may
    # have been removed since the listing, so all but the complete steps are read again until two consecutive results
    # are equal.
    run = _look_at_run(store, {})
    for _ in range(_LOOKS):
        if run.steps and all(step.is_complete or step.is_base for step in run.steps):
            return run
        known = {step.name: step for step in run.steps if step.is_complete}
        again = _look_at_run(open_store(store.url), known)
        if _outline(again) == _outline(run):
            return again
        run = again
    if run.complete:
        return run
    raise StorageError(
        "steps come and go faster than they can be read",
        where=store.url,
        found=f"no complete step in {_LOOKS} lists",
        fix="Try again, or let the job that saves here keep more steps.",
    )


def read_run_to_remove(store: Store, removed: Iterable[StepFolder] = ()) -> RunDirectory:
    """Read every step of a run, and all other references to steps in its folder."""
    # To remove a step, delete its `COMMIT`, call this function, and delete the files without references. To save a
    # step, write the manifest, check that the `COMMIT` of the base still exists, and commit. Thus either this function
    # sees the save's references, or the save sees that its base is gone. Open a new store for each call, since stores
    # cache listings.
    own = {step.name: step.own for step in removed}
    folders = _folders(store)
    for _ in range(_LOOKS):
        run = read_run(store)
        others = (*_other_folders(store, folders, run.steps), *_find_unfinished(store, run.steps, own))
        store = open_store(store.url)
        now = _folders(store)
        if now == folders:
            return replace(run, steps=tuple(_with_bases(store, run.steps, others)), others=others)
        folders = now
    raise StorageError(
        "folders in this run come and go faster than they can be read", where=store.url, fix="Try again."
    )


def _folders(store: Store) -> list[str]:
    return [entry.name for entry in store.list() if entry.is_folder]


def _other_folders(store: Store, folders: Sequence[str], steps: Iterable[StepFolder]) -> list[StepFolder]:
    """Return references in folders that are not steps, or that are in steps. Searches one level deep."""
    names = [name for name in folders if not _STEP.fullmatch(name)]
    names += [f"{step.name}/{folder}" for step in steps for folder in step.folders]
    with ThreadPool(_AT_ONCE, thread_name_prefix="shardckpt-steps") as pool:
        return [step for found in pool.map(lambda name: _find_referring(store, name, depth=2), names) for step in found]


def _find_referring(store: Store, name: str, depth: int) -> list[StepFolder]:
    inside = SubfolderStore(store, name)
    try:
        entries = inside.list()
    except CheckpointError:  # a link to a folder outside the run
        return []
    sizes = {name: size for name, size in _sizes(entries).items() if name == COMMIT or name.endswith(MANIFEST_SUFFIX)}
    found = [_reference(store, name, each, sizes) for each in sorted(sizes)]
    if depth > 1:
        below = [f"{name}/{entry.name}" for entry in entries if entry.is_folder]
        found += [step for each in below for step in _find_referring(store, each, depth - 1)]
    return found


def _find_unfinished(store: Store, steps: Iterable[StepFolder], removed: Mapping[str, Set[str]]) -> list[StepFolder]:
    """Return the references in uncommitted manifests in step folders."""
    found = []
    for step in steps:
        known = step.own | removed.get(step.name, frozenset())
        sizes = {name: step.held[name] for name in step.held if name.endswith(MANIFEST_SUFFIX) and name not in known}
        found += [_reference(store, step.name, name, sizes) for name in sizes]
    return found


def _reference(store: Store, folder: str, name: str, sizes: Mapping[str, int]) -> StepFolder:
    """Return the references in a `COMMIT` or manifest; none if damaged or removed."""
    inside, step = SubfolderStore(store, folder), StepFolder(-1, folder)
    try:
        if name == COMMIT:
            bases: Mapping[str, Mapping[str, int]] = read_commit(inside, sizes).bases
        else:
            contents = decode_manifest(read_bytes(inside, name, 0, sizes[name]), where=f"{inside.url}/{name}")
            bases = group_files_by_base(contents.files)
    except UnsupportedError as error:
        return replace(step, fault=str(error).rstrip("."), is_newer=True)
    except (CheckpointError, MissingFileError):
        return step
    return replace(step, refers=_base_folders(store, inside.url, bases))


def _base_folders(store: Store, step: str, bases: Mapping[str, Mapping[str, int]]) -> Mapping[str, Mapping[str, int]]:
    """Return a step's bases that are folders in the run, by name."""
    found = {}
    for url, files in bases.items():
        where = resolve_base(step, url)
        name = where.rstrip("/").rpartition("/")[2]
        if is_same_folder(where, f"{store.url.rstrip('/')}/{name}"):
            found[name] = files
    return found


def _look_at_run(store: Store, known: Mapping[str, StepFolder]) -> RunDirectory:
    """Read once every step that is not known to be complete."""
    entries = store.list()
    folders = [entry.name for entry in entries if entry.is_folder]
    named = sorted((int(match[1]), name) for name in folders if (match := _STEP.fullmatch(name)))

    def read(number: int, name: str) -> StepFolder:
        return known.get(name) or _read_step(store, number, name)

    with ThreadPool(_AT_ONCE, thread_name_prefix="shardckpt-steps") as pool:
        newest_first = list(pool.map(lambda each: read(*each), reversed(named)))
    steps = _with_newer(store, _with_bases(store, newest_first[::-1]))
    partial = tuple(name for name in folders if _PARTIAL.fullmatch(name))
    return RunDirectory(tuple(_once(steps)), partial, has_record=any(entry.name == RECORD for entry in entries))


def _outline(run: RunDirectory) -> list[tuple[str, str, bool]]:
    """Return the properties of a run that must be equal in two consecutive reads."""
    return [(step.name, step.save, step.is_complete) for step in run.steps]


def read_step(store: Store, number: int, name: str = "") -> StepFolder:
    """Read one step in its usual folder; without a folder, the step is incomplete."""
    return _with_bases(store, [_read_step(store, number, name or step_name(number))])[0]


def _with_bases(store: Store, steps: Sequence[StepFolder], others: Sequence[StepFolder] = ()) -> list[StepFolder]:
    """Return steps with faults for missing referenced files, and with `is_base` set."""
    known = {step.name: step.held for step in steps}
    needed = collect_referred((*steps, *others))
    for folder in needed:
        if folder not in known:
            with suppress(CheckpointError):  # a link to a folder outside the run, which is checked on loading
                known[folder] = _sizes(SubfolderStore(store, folder).list())
    return [_with_base(store, step, known, needed.get(step.name, frozenset())) for step in steps]


def _with_base(store: Store, step: StepFolder, known: Mapping[str, Mapping[str, int]], needed: Set[str]) -> StepFolder:
    if not step.is_committed and step.saved and step.saved <= needed:
        return replace(step, is_base=True, fault=f"{step.name} was removed, but for what other steps refer to")
    for folder, files in step.refers.items():
        gone = [name for name, size in files.items() if folder in known and known[folder].get(name, -1) < size]
        if gone and step.is_complete:
            where = f"{store.url.rstrip('/')}/{step.name}"
            found = f"{folder}/{gone[0]}" + (f" and {len(gone) - 1} more" if len(gone) > 1 else "")
            return replace(
                step, fault=str(IncompleteError("files in its base are missing or end early", where=where, found=found))
            )
    return step


def _with_newer(store: Store, steps: Sequence[StepFolder]) -> list[StepFolder]:
    """Return steps with other faults for unfinished ones before a complete step: a killed removal may leave them."""
    # A step that was removed and one that was never committed look alike, if the removal got no further than `COMMIT`.
    newest = max((step.number for step in steps if step.is_complete), default=-1)
    return [
        replace(step, fault=_describe_unfinished(store, step, newest))
        if step.is_unfinished and not step.is_base and step.number < newest
        else step
        for step in steps
    ]


def _describe_unfinished(store: Store, step: StepFolder, newest: int) -> str:
    return str(
        IncompleteError(
            f"this step has no {COMMIT}, and step {newest} after it is complete",
            where=f"{store.url.rstrip('/')}/{step.name}",
            found="1 file" if len(step.held) == 1 else f"{len(step.held)} files",
            fix=(
                "Its save or its removal was interrupted, or is still running: a prune or a save removes it a day after"
                " its last change. `shardckpt repair` brings it back if no file is missing."
            ),
        )
    )


def collect_referred(steps: Iterable[StepFolder]) -> dict[str, frozenset[str]]:
    """Collect the files that steps refer to, by folder name."""
    found: dict[str, frozenset[str]] = {}
    for step in steps:
        for folder, files in step.refers.items():
            found[folder] = found.get(folder, frozenset()) | files.keys()
    return found


def read_referred_files(url: str) -> frozenset[str]:
    """Return the files in a folder that other folders of its run refer to; a new save there must keep them."""
    # Call it when the new `COMMIT` is in the temporary folder, or, on a store without rename, when the old one is
    # replaced or removed: a save that writes its manifest later does not refer to the old step.
    try:
        parent, name = split(url)
    except UsageError:  # the folder is a bucket or a root
        return frozenset()
    if not (_STEP.fullmatch(name) or _is_beside_steps(parent)):
        return frozenset()
    held = {entry.name for entry in open_store(url).list() if WRITTEN.fullmatch(entry.name)}
    if not held:
        return frozenset()
    run = read_run_to_remove(open_store(parent))
    if any(step.is_newer for step in (*run.steps, *run.others) if step.name != name):  # it may refer to any folder
        return frozenset(held)
    return run.referred(but={name}).get(name, frozenset())


def _is_beside_steps(parent: str) -> bool:
    try:
        return any(_STEP.fullmatch(folder) for folder in _folders(open_store(parent)))
    except StorageError:  # the parent folder cannot be listed
        return False


def _read_step(store: Store, number: int, name: str) -> StepFolder:
    inside = SubfolderStore(store, name)
    try:
        entries = inside.list()
    except CheckpointError as error:  # a link to a folder outside the run
        return StepFolder(number, name, fault=str(error))
    sizes, others = _sizes(entries), _others(entries)
    step = StepFolder(
        number, name, is_committed=COMMIT in sizes, is_ours=_is_ours(sizes, others), held=sizes, others=others
    )
    try:
        commit = read_commit(inside, sizes)
    except UnsupportedError as error:
        return replace(step, fault=str(error).rstrip("."), is_newer=True)
    except (CheckpointError, MissingFileError) as error:  # missing: another process is removing it
        return replace(step, fault=str(error))
    nbytes = commit.manifest_bytes + sum(commit.files.values())
    own = frozenset((*commit.files, commit.manifest, COMMIT))
    return replace(
        step,
        save=commit.save,
        branch=commit.branch,
        mark=commit.mark,
        nbytes=nbytes,
        fault=_missing(inside.url, commit, sizes),
        own=own,
        is_ours=not others,  # also if all files but `COMMIT` are gone
        others=tuple(each for each in others if each not in own),
        refers=_base_folders(store, inside.url, commit.bases),
    )


def _sizes(entries: Sequence[Listed]) -> dict[str, int]:
    return {entry.name: entry.size for entry in entries if not entry.is_folder}


def _others(entries: Sequence[Listed]) -> tuple[str, ...]:
    """Return the files and folders that no save wrote; they are never removed."""
    folders = [f"{entry.name}/" for entry in entries if entry.is_folder]
    return (*folders, *(entry.name for entry in entries if not (entry.is_folder or is_saved_name(entry.name))))


def is_saved_name(name: str) -> bool:
    """Return True if saves write files with this name, or systems do, which may be deleted."""
    return is_ignored(name) or name in (HF_INDEX, COMMIT) or WRITTEN.fullmatch(name) is not None


def _is_ours(sizes: Mapping[str, int], others: Sequence[str]) -> bool:
    """Return True if a folder contains only files by saves."""
    return not others and (not sizes or any(WRITTEN.fullmatch(_final(name)) for name in sizes))


def _final(name: str) -> str:
    """Return the name that a file gets when it is complete."""
    return name[1:].rpartition(f".{PARTIAL}-")[0] if is_partial(name) else name


def _missing(where: str, commit: Commit, sizes: Mapping[str, int]) -> str:
    """Return an error with the missing or short committed files; empty if complete."""
    wanted = {**commit.files, commit.manifest: commit.manifest_bytes}
    short = [name for name, size in wanted.items() if sizes.get(name, -1) < size]
    return describe_missing_files(where, commit, short) if short else ""


def describe_missing_files(where: str, commit: Commit, names: Sequence[str]) -> str:
    """Return an error with files that were committed and are missing or short."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    fix = "Restore them from another copy."
    if [*names] == [commit.manifest]:
        fix = "Restore it from another copy, or rebuild it with `shardckpt repair`."
    return str(
        IncompleteError(
            f"files that were committed are missing or end early: {', '.join(names[:_SHOWN])}{more}",
            where=where,
            fix=fix,
        )
    )


def _once(steps: Sequence[StepFolder]) -> Iterator[StepFolder]:
    """Select one folder per number: the complete one with the longest name."""
    best: dict[int, StepFolder] = {}
    for step in steps:
        known = best.setdefault(step.number, step)
        if (step.is_complete, len(step.name)) > (known.is_complete, len(known.name)):
            best[step.number] = step
    for step in steps:
        if best[step.number] is step:
            yield step
        elif step.is_complete:
            yield replace(step, fault=f"{step.name}: {best[step.number].name} is the same step", is_double=True)
        else:
            yield step


def read_about(store: Store, step: StepFolder) -> Mapping[str, str]:
    """Return the `about` texts in a complete step's manifest, by name."""
    return _read_manifest(store, step).about


def _read_manifest(store: Store, step: StepFolder) -> ManifestContents:
    inside = SubfolderStore(store, step.name)
    sizes = _sizes(inside.list())
    return read_contents(inside, sizes, read_commit(inside, sizes))


RETENTION = "run.retention"  # name in a manifest's `about` for the rules of the run that saved
WRITER = "run.writer"  # name in a manifest's `about` for the versions that wrote the step
METRIC = "metric."  # prefix of metric names in a manifest's `about`


class StepMeasures(NamedTuple):
    """Numbers that were saved with a step."""

    metrics: Mapping[str, float]
    has_stats: bool  # whether it has statistics of any tensor's values


def read_measures(store: Store, step: StepFolder) -> StepMeasures:
    """Return the numbers that were saved with a complete step; none if its manifest cannot be read."""
    try:
        contents = _read_manifest(store, step)
    except (CheckpointError, MissingFileError):
        return StepMeasures({}, has_stats=False)
    metrics = {}
    for name, text in contents.about.items():
        if name.startswith(METRIC):
            with suppress(ValueError):
                metrics[name[len(METRIC) :]] = float(text)
    return StepMeasures(metrics, any(record.stats for record in contents.arrays))


def read_metrics(store: Store, step: StepFolder) -> Mapping[str, float]:
    """Return a complete step's metrics, by name; empty if unknown."""
    return read_measures(store, step).metrics


def manifest_fault(store: Store, step: StepFolder) -> str:
    """Return the fault in a complete step's manifest; empty if it is as committed."""
    try:
        read_about(store, step)
    except (CheckpointError, MissingFileError) as error:
        return str(error)
    return ""


def with_sound_newest(run: RunDirectory, find_fault: Callable[[StepFolder], str]) -> RunDirectory:
    """Check the run's newest complete step; mark a faulty one as incomplete."""
    for step in reversed(run.complete):
        fault = find_fault(step)
        if not fault:
            break
        faulty = replace(step, fault=fault)
        run = replace(run, steps=tuple(faulty if each is step else each for each in run.steps))
    return run


def delete_steps(store: Store, run: RunDirectory, names: Collection[str]) -> list[str]:
    """Remove steps, each starting with its `COMMIT`; return files that no save wrote, relative to the run."""
    # Without `COMMIT` a step no longer exists. Files that other steps refer to stay until the last of these is removed.
    # Files that no save wrote stay too, with their folder. So do files of other saves: such a save may still run, or
    # save the step again when its `COMMIT` is gone; otherwise they become an orphan.
    run.require_readable()
    gone = sorted((step for step in run.steps if step.name in names), key=lambda step: not step.is_double)
    if not gone:
        return []
    for step in gone:
        _delete_mark(store, step.name)
    fresh = open_store(store.url)
    now = read_run_to_remove(fresh, gone)
    now.require_readable()
    kept = {step.name for step in now.steps if step.is_committed or step.name not in names}
    _delete_records(store, fresh.list(), kept)
    needed, referred = now.referred(), collect_referred(gone)
    left = {step.name: step for step in now.steps}
    for step in gone:
        if step.name in left:  # links are removed already
            files = step.removable | referred.get(step.name, frozenset())
            store.delete_files(step.name, files - left[step.name].own - needed.get(step.name, frozenset()))
    others = {step.name: step for step in now.steps if step.name not in names}
    for folder, files in referred.items():
        if folder in others:
            _delete_unneeded(store, others[folder], files - needed.get(folder, frozenset()))
    return other_content(_without(left[step.name], step.own) for step in gone if step.name in left)


def without_steps(run: RunDirectory, removed: Collection[StepFolder]) -> RunDirectory:
    """Return a run without removed steps; what other saves have in their folders becomes unfinished steps."""
    needed = collect_referred(run.steps)
    kept = []
    for step in run.steps:
        if step not in removed:
            kept.append(step)
            continue
        rest = step.saved - step.removable - {COMMIT} - needed.get(step.name, frozenset())
        if rest:
            held = {name: step.held[name] for name in rest}
            kept.append(StepFolder(step.number, step.name, fault=_REMOVED, is_ours=step.is_ours, held=held))
    return replace(run, steps=tuple(kept))


def _delete_records(store: Store, entries: Sequence[Listed], kept: Set[str]) -> None:
    """Remove the records next to removed steps; their verdicts stay, like verdicts on captures."""
    for entry in entries:
        step = entry.name.removesuffix(_WITNESS)
        if not entry.is_folder and step != entry.name and is_step_name(step) and step not in kept:
            store.delete(entry.name)


def other_content(steps: Iterable[StepFolder]) -> list[str]:
    """Return the paths, relative to the run, of files in steps that no save wrote."""
    return [f"{step.name}/{name}" for step in steps for name in step.others]


def _without(step: StepFolder, own: Set[str]) -> StepFolder:
    """Return a step without its `COMMIT`, with its committed files' names."""
    return replace(step, others=tuple(name for name in step.others if name not in own))


def _delete_mark(store: Store, name: str) -> None:
    """Remove a step's `COMMIT`, or the step itself if it is a link, whose folder is outside the run."""
    store.delete(name if _is_link(store, name) else f"{name}/{COMMIT}")


def _is_link(store: Store, name: str) -> bool:
    root = local_path(store.url)
    return root is not None and os.path.islink(os.path.join(root, name))


def _delete_unneeded(store: Store, step: StepFolder, files: Set[str]) -> None:
    """Remove files that were kept for other steps, after their last reference is gone."""
    unneeded = {name for name in files - step.own if name in step.held and WRITTEN.fullmatch(name)}
    if unneeded:
        store.delete_files(step.name, unneeded)


def find_orphans(store: Store, run: RunDirectory) -> tuple[Orphan, ...]:
    """Find the folders that killed saves and removals left in a run. No link is one: they leave none."""
    unfinished = [step for step in run.steps if step.is_unfinished and not step.is_base]
    found = [(name, frozenset[str]()) for name in run.partial] + [(step.name, step.saved) for step in unfinished]
    return tuple(
        Orphan(name, _read_change_time(store, name), files) for name, files in found if not _is_link(store, name)
    )


def _read_change_time(store: Store, name: str) -> float | None:
    known = store.changed_at(name)
    if known is not None:
        return known
    saved = [WRITTEN.fullmatch(_final(entry.name)) for entry in SubfolderStore(store, name).list()]
    return max((_parse_start_time(match[0]) for match in saved if match), default=None)


def delete_orphan(store: Store, orphan: Orphan) -> bool:
    """Delete an orphan; return False if a process may still own it."""
    root = local_path(store.url)
    if root is not None and _PARTIAL.fullmatch(orphan.name):
        return remove_orphan(os.path.join(root, orphan.name))
    now = read_run_to_remove(open_store(store.url))
    now.require_readable()
    if not any(step.name == orphan.name and step.is_unfinished and not step.is_base for step in now.steps):
        return False
    store.delete_files(orphan.name, orphan.files - now.referred().get(orphan.name, frozenset()))
    return True
