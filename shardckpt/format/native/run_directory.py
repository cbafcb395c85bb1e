"""The steps of a run: a folder each, called `step-00001000`, which exists where its `COMMIT` says so."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace

from shardckpt.errors import (
    CheckpointError,
    IncompleteError,
    MissingFileError,
    StorageError,
    UnsupportedError,
    UsageError,
)
from shardckpt.format.native.base_refs import is_same_folder, resolve_base
from shardckpt.format.native.commit import COMMIT, MANIFEST_SUFFIX, WRITTEN, Commit, read_commit, read_contents
from shardckpt.format.native.manifest_json import decode_manifest
from shardckpt.format.native.payload import HF_INDEX
from shardckpt.format.native.records import group_files_by_base
from shardckpt.storage.orphans import PARTIAL, is_partial, remove_orphan
from shardckpt.storage.replaceable import is_ignored
from shardckpt.storage.resolve_url import local_path, open_store, split
from shardckpt.storage.store import Listed, Store, SubfolderStore, read_bytes

_STEP = re.compile(r"step-([0-9]{1,18})")
_PARTIAL = re.compile(rf"\.{_STEP.pattern}\.{PARTIAL}-[0-9a-f]{{12}}")

_SAVE_CHARACTERS = 15
_STAMP_CHARACTERS = 9
_AT_ONCE = 8
_SHOWN = 3
_LOOKS = 50
"""How often a run is listed whose steps come and go meanwhile."""


def step_name(number: int) -> str:
    """Return the name of a step's folder; folders sort as their numbers do up to 99,999,999."""
    return f"step-{number:08d}"


def is_step_name(name: str) -> bool:
    """Return True if a folder is called like a step."""
    return _STEP.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class StepFolder:
    """One folder of a run that is named like a step.

    Attributes:
        number: The step.
        name: Of the folder.
        save: Id of the save that wrote it; empty without a valid `COMMIT`.
        branch: How often the run had gone back to an older step before this one was saved.
        nbytes: Of its files, as they were committed.
        fault: Why it is not complete; empty where it is.
        is_committed: There is a file `COMMIT`, valid or not.
        is_ours: All files there are files of saves.
        is_base: It was removed, but for files that other steps refer to.
        is_double: It is complete, and another folder stands for the same number.
        is_newer: A newer version of shardckpt wrote it, so that its content and references are unknown.
        held: Name and size of the files there.
        others: Names of files that no save wrote, and of folders, with a slash at their end. They are never removed.
        own: Names of the files that were committed.
        refers: Folders beside it that it refers to, to name and size of the files there.
    """

    number: int
    name: str
    save: str = ""
    branch: int = 0
    nbytes: int = 0
    fault: str = ""
    is_committed: bool = False
    is_ours: bool = False
    is_base: bool = False
    is_double: bool = False
    is_newer: bool = False
    held: Mapping[str, int] = field(default_factory=dict, hash=False)
    others: tuple[str, ...] = ()
    own: frozenset[str] = frozenset()
    refers: Mapping[str, Mapping[str, int]] = field(default_factory=dict, hash=False)

    @property
    def is_complete(self) -> bool:
        """Whether it was committed, and every file that it needs has the size that was committed, beside it too."""
        return not self.fault

    @property
    def is_unfinished(self) -> bool:
        """Whether a save or a removal did not get to its end here."""
        return self.is_ours and not self.is_committed

    @property
    def saved(self) -> frozenset[str]:
        """Names of the files there that saves wrote."""
        return frozenset(self.held).difference(self.others)

    @property
    def is_foreign(self) -> bool:
        """Whether only other content is there and no file of a save, so that it is not a step, or not one any more."""
        return bool(self.others) and all(map(is_ignored, self.saved))

    @property
    def folders(self) -> tuple[str, ...]:
        """Names of the folders there."""
        return tuple(name[:-1] for name in self.others if name.endswith("/"))

    @property
    def saved_at(self) -> float | None:
        """When its save began, in seconds since the epoch; None where that is not known."""
        return _parse_start_time(self.save) if len(self.save) == _SAVE_CHARACTERS else None


def _parse_start_time(save: str) -> float:
    return int(save[:_STAMP_CHARACTERS], 36) / 1000


@dataclass(frozen=True, slots=True)
class Orphan:
    """Files of a save or a removal that was killed.

    Attributes:
        name: Of the folder.
        changed_at: When anything in it last changed, in seconds since the epoch; if the store has no times, when
            the last save into it began; None where not known.
    """

    name: str
    changed_at: float | None


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The steps and orphans in a run's folder.

    Attributes:
        steps: Complete or not, by number.
        partial: Folders that were to become steps, on a disk.
        others: Whatever else refers to folders of the run: checkpoints under other names, and saves under way that have
            written their manifest. Only `read_run_to_remove` looks for them.
    """

    steps: tuple[StepFolder, ...]
    partial: tuple[str, ...]
    others: tuple[StepFolder, ...] = ()

    @property
    def complete(self) -> tuple[StepFolder, ...]:
        """The steps that can be loaded, the oldest first: by branch, then by number."""
        return tuple(sorted((s for s in self.steps if s.is_complete), key=lambda s: (s.branch, s.number)))

    @property
    def incomplete(self) -> tuple[StepFolder, ...]:
        """The steps that cannot be loaded: no bases, nor folders of other content beside complete steps."""
        has_complete = any(step.is_complete for step in self.steps)
        return tuple(
            step for step in self.steps if not (step.is_complete or step.is_base or (step.is_foreign and has_complete))
        )

    def referred(self, but: Collection[str] = ()) -> dict[str, frozenset[str]]:
        """Return which files are referred to, by the name of their folder.

        Args:
            but: Names of folders whose references do not count.
        """
        return collect_referred(step for step in (*self.steps, *self.others) if step.name not in but)

    def require_readable(self) -> None:
        """Refuse to remove anything beside a step of a newer version: it may refer to any of the other folders.

        Raises:
            UnsupportedError: There is one.
        """
        newer = next((step for step in (*self.steps, *self.others) if step.is_newer), None)
        if newer is not None:
            raise UnsupportedError(
                "nothing is removed from a run that holds a step which this version cannot read",
                where=newer.name,
                found=newer.fault,
                fix="Update shardckpt.",
            )


def read_run(store: Store) -> RunDirectory:
    """Look at every step of a run: a list and a small read for each.

    Another process may save and remove steps meanwhile. A step that is complete when this begins, or one that was saved
    later, is in the result: where something that was listed is not complete, it may have been removed since, and all
    but the complete steps are looked at again, until two looks agree.

    Args:
        store: Rooted at the run. Open it anew for each call, since stores remember the files that they have read.

    Raises:
        StorageError: The store failed; steps come and go faster than they can be read.
    """
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


def read_run_to_remove(store: Store) -> RunDirectory:
    """Look at every step of a run, and at everything else in its folder that refers to them.

    Who removes a step deletes its `COMMIT`, then calls this, then removes the files that nothing refers to. Who saves a
    step writes the manifest, then makes sure that its base still has its `COMMIT`, then commits. So either the save is
    seen here, or it sees that its base has gone.

    Args:
        store: Rooted at the run. Open it anew for each call.

    Raises:
        StorageError: The store failed; folders come and go faster than they can be read.
    """
    folders = _folders(store)
    for _ in range(_LOOKS):
        run = read_run(store)
        others = (*_other_folders(store, folders, run.steps), *_find_unfinished(store, run.steps))
        store = open_store(store.url)
        now = _folders(store)
        if now == folders:
            return replace(run, steps=tuple(_with_bases(store, run.steps, others)), others=others)
        folders = now
    raise StorageError(
        "folders of this run come and go faster than they can be read", where=store.url, fix="Try again."
    )


def _folders(store: Store) -> list[str]:
    return [entry.name for entry in store.list() if entry.is_folder]


def _other_folders(store: Store, folders: Sequence[str], steps: Iterable[StepFolder]) -> list[StepFolder]:
    """Return the steps with references in folders that are not named like steps or are in steps, one level deep."""
    names = [name for name in folders if not _STEP.fullmatch(name)]
    names += [f"{step.name}/{folder}" for step in steps for folder in step.folders]
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="shardckpt-steps") as pool:
        return [step for found in pool.map(lambda name: _find_referring(store, name, depth=2), names) for step in found]


def _find_referring(store: Store, name: str, depth: int) -> list[StepFolder]:
    inside = SubfolderStore(store, name)
    try:
        entries = inside.list()
    except CheckpointError:  # a link that leads out of the run
        return []
    sizes = {name: size for name, size in _sizes(entries).items() if name == COMMIT or name.endswith(MANIFEST_SUFFIX)}
    found = [_reference(store, name, each, sizes) for each in sorted(sizes)]
    if depth > 1:
        below = [f"{name}/{entry.name}" for entry in entries if entry.is_folder]
        found += [step for each in below for step in _find_referring(store, each, depth - 1)]
    return found


def _find_unfinished(store: Store, steps: Iterable[StepFolder]) -> list[StepFolder]:
    """Return what the manifests in folders of steps refer to that are not committed."""
    found = []
    for step in steps:
        sizes = {name: step.held[name] for name in step.held if name.endswith(MANIFEST_SUFFIX) and name not in step.own}
        found += [_reference(store, step.name, name, sizes) for name in sizes]
    return found


def _reference(store: Store, folder: str, name: str, sizes: Mapping[str, int]) -> StepFolder:
    """Return what a `COMMIT` or a manifest refers to; nothing where it is damaged, or has gone meanwhile."""
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
    """Return the bases of a step that are folders of the run, by name."""
    found = {}
    for url, files in bases.items():
        where = resolve_base(step, url)
        name = where.rstrip("/").rpartition("/")[2]
        if is_same_folder(where, f"{store.url.rstrip('/')}/{name}"):
            found[name] = files
    return found


def _look_at_run(store: Store, known: Mapping[str, StepFolder]) -> RunDirectory:
    """Look once at every step of a run that is not known to be complete."""
    folders = [entry.name for entry in store.list() if entry.is_folder]
    named = sorted((int(match[1]), name) for name in folders if (match := _STEP.fullmatch(name)))

    def read(number: int, name: str) -> StepFolder:
        return known.get(name) or _read_step(store, number, name)

    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="shardckpt-steps") as pool:
        newest_first = list(pool.map(lambda each: read(*each), reversed(named)))
    steps = _with_bases(store, newest_first[::-1])
    return RunDirectory(tuple(_once(steps)), tuple(name for name in folders if _PARTIAL.fullmatch(name)))


def _outline(run: RunDirectory) -> list[tuple[str, str, bool]]:
    """Return the parts of a run that two looks at it have to agree on."""
    return [(step.name, step.save, step.is_complete) for step in run.steps]


def read_step(store: Store, number: int) -> StepFolder:
    """Look at one step, in the folder that it would be saved to; if nothing is there, it is just not complete.

    Args:
        store: Rooted at the run.
        number: The step.

    """
    return _with_bases(store, [_read_step(store, number, step_name(number))])[0]


def _with_bases(store: Store, steps: Sequence[StepFolder], others: Sequence[StepFolder] = ()) -> list[StepFolder]:
    """Return steps with what follows from one another: which lack files that they refer to, which are but bases."""
    known = {step.name: step.held for step in steps}
    needed = collect_referred((*steps, *others))
    for folder in needed:
        if folder not in known:
            with suppress(CheckpointError):  # a link that leads out of the run: whoever loads looks there
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
                step, fault=str(IncompleteError("files of its base are missing or end early", where=where, found=found))
            )
    return step


def collect_referred(steps: Iterable[StepFolder]) -> dict[str, frozenset[str]]:
    """Collect the files that steps refer to, by folder name.

    Args:
        steps: Those that count, complete or not.
    """
    found: dict[str, frozenset[str]] = {}
    for step in steps:
        for folder, files in step.refers.items():
            found[folder] = found.get(folder, frozenset()) | files.keys()
    return found


def read_referred_files(url: str) -> frozenset[str]:
    """Return the files in a folder of a run that something else in the run refers to, and that a new save there keeps.

    Args:
        url: URL of the folder. The run is not looked at if neither the folder nor one beside it is called like a
            step, or where it holds no files of saves.

    """
    try:
        parent, name = split(url)
    except UsageError:  # a bucket, or a root
        return frozenset()
    if not (_STEP.fullmatch(name) or _is_beside_steps(parent)):
        return frozenset()
    held = {entry.name for entry in open_store(url).list() if WRITTEN.fullmatch(entry.name)}
    if not held:
        return frozenset()
    run = read_run_to_remove(open_store(parent))
    if any(step.is_newer for step in (*run.steps, *run.others) if step.name != name):  # it may refer to any of them
        return frozenset(held)
    return run.referred(but={name}).get(name, frozenset())


def _is_beside_steps(parent: str) -> bool:
    try:
        return any(_STEP.fullmatch(folder) for folder in _folders(open_store(parent)))
    except StorageError:  # the folders around it cannot be listed
        return False


def _read_step(store: Store, number: int, name: str) -> StepFolder:
    inside = SubfolderStore(store, name)
    try:
        entries = inside.list()
    except CheckpointError as error:  # a link that leads out of the run
        return StepFolder(number, name, fault=str(error))
    sizes, others = _sizes(entries), _others(entries)
    step = StepFolder(
        number, name, is_committed=COMMIT in sizes, is_ours=_is_ours(sizes, others), held=sizes, others=others
    )
    try:
        commit = read_commit(inside, sizes)
    except UnsupportedError as error:
        return replace(step, fault=str(error).rstrip("."), is_newer=True)
    except (CheckpointError, MissingFileError) as error:  # missing: somebody removes it meanwhile
        return replace(step, fault=str(error))
    nbytes = commit.manifest_bytes + sum(commit.files.values())
    own = frozenset((*commit.files, commit.manifest, COMMIT))
    return replace(
        step,
        save=commit.save,
        branch=commit.branch,
        nbytes=nbytes,
        fault=_missing(inside.url, commit, sizes),
        own=own,
        others=tuple(each for each in others if each not in own),
        refers=_base_folders(store, inside.url, commit.bases),
    )


def _sizes(entries: Sequence[Listed]) -> dict[str, int]:
    return {entry.name: entry.size for entry in entries if not entry.is_folder}


def _others(entries: Sequence[Listed]) -> tuple[str, ...]:
    """Return the names of what no save wrote: it is somebody else's, whatever the folder is called."""
    folders = [f"{entry.name}/" for entry in entries if entry.is_folder]
    return (*folders, *(entry.name for entry in entries if not (entry.is_folder or _is_saved(entry.name))))


def _is_saved(name: str) -> bool:
    return is_ignored(name) or name in (HF_INDEX, COMMIT) or WRITTEN.fullmatch(name) is not None


def _is_ours(sizes: Mapping[str, int], others: Sequence[str]) -> bool:
    """Return True if a folder holds files of saves alone."""
    return not others and (not sizes or any(WRITTEN.fullmatch(_final(name)) for name in sizes))


def _final(name: str) -> str:
    """Return the name that a file gets once it is complete."""
    return name[1:].rpartition(f".{PARTIAL}-")[0] if is_partial(name) else name


def _missing(where: str, commit: Commit, sizes: Mapping[str, int]) -> str:
    """Say which committed files are not there, or are shorter than they were."""
    wanted = {**commit.files, commit.manifest: commit.manifest_bytes}
    short = [name for name, size in wanted.items() if sizes.get(name, -1) < size]
    if not short:
        return ""
    more = f" and {len(short) - _SHOWN} more" if len(short) > _SHOWN else ""
    fix = "Restore them from another copy."
    if short == [commit.manifest]:
        fix = "Restore it from another copy, or write it anew with `shardckpt repair`."
    return str(
        IncompleteError(
            f"files that were committed are missing or end early: {', '.join(short[:_SHOWN])}{more}",
            where=where,
            fix=fix,
        )
    )


def _once(steps: Sequence[StepFolder]) -> Iterator[StepFolder]:
    """Choose one folder for each number: the one that is complete, of several the one with the longest name."""
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
    """Return what a complete step's manifest says about itself.

    Args:
        store: Rooted at the run.
        step: The step.

    Raises:
        CheckpointError: The manifest is damaged.
    """
    inside = SubfolderStore(store, step.name)
    sizes = _sizes(inside.list())
    return read_contents(inside, sizes, read_commit(inside, sizes)).about


METRIC = "metric."
"""What the names of metrics begin with in a manifest's `about`."""


def read_metrics(store: Store, step: StepFolder) -> Mapping[str, float]:
    """Return the numbers that were saved with a complete step, by name; none if they are unknown.

    Args:
        store: Rooted at the run.
        step: The step.

    """
    try:
        about = read_about(store, step)
    except (CheckpointError, MissingFileError):
        return {}
    found = {}
    for name, text in about.items():
        if name.startswith(METRIC):
            with suppress(ValueError):
                found[name[len(METRIC) :]] = float(text)
    return found


def manifest_fault(store: Store, step: StepFolder) -> str:
    """Return what is wrong with the manifest of a complete step; nothing where it is the one that was committed.

    Args:
        store: Rooted at the run.
        step: The step.

    """
    try:
        read_about(store, step)
    except (CheckpointError, MissingFileError) as error:
        return str(error)
    return ""


def with_sound_newest(run: RunDirectory, find_fault: Callable[[StepFolder], str]) -> RunDirectory:
    """Return a run after a closer look at its newest complete step: a faulty one is not complete any more.

    Args:
        run: As read.
        find_fault: Returns what is wrong with a step; asked of the newest ones until there is nothing.
    """
    for step in reversed(run.complete):
        fault = find_fault(step)
        if not fault:
            break
        faulty = replace(step, fault=fault)
        run = replace(run, steps=tuple(faulty if each is step else each for each in run.steps))
    return run


def delete_steps(store: Store, run: RunDirectory, names: Collection[str]) -> list[str]:
    """Remove steps, each with its `COMMIT` first, so that from then on it does not exist.

    Files that other steps refer to stay, until nothing refers to them any more: then they go with the last that does.
    What no save wrote stays too, with the folder.

    Args:
        store: Rooted at the run.
        run: As read.
        names: Names of the folders of the steps that go.

    Returns:
        Names of what no save wrote, below the run.

    Raises:
        UnsupportedError: A newer version wrote a step of the run.
        StorageError: The store failed; of a step whose `COMMIT` is gone, what is left counts for nothing.
    """
    run.require_readable()
    gone = sorted((step for step in run.steps if step.name in names), key=lambda step: not step.is_double)
    if not gone:
        return []
    for step in gone:
        _delete_mark(store, step.name)
    now = read_run_to_remove(open_store(store.url))
    now.require_readable()
    needed = now.referred(but=names)
    left = {step.name: step for step in now.steps}
    rests = [_without(left[step.name], step.own) for step in gone if step.name in left]  # a link is gone already
    for rest in rests:
        _delete_saved(store, rest, needed.get(rest.name, frozenset()))
    others = {step.name: step for step in now.steps if step.name not in names}
    for folder, files in collect_referred(gone).items():
        if folder in others:
            _delete_unneeded(store, others[folder], files - needed.get(folder, frozenset()))
    return other_content(rests)


def other_content(steps: Iterable[StepFolder]) -> list[str]:
    """Return the names of files in steps that no save wrote, below their run.

    Args:
        steps: Where to look.
    """
    return [f"{step.name}/{name}" for step in steps for name in step.others]


def _without(step: StepFolder, own: Set[str]) -> StepFolder:
    """Return a step that knows which files its `COMMIT` named while it had one."""
    return replace(step, others=tuple(name for name in step.others if name not in own))


def _delete_mark(store: Store, name: str) -> None:
    """Remove what makes a step exist: its `COMMIT`; of a link the link, since the folder is not the run's."""
    store.delete(name if _is_link(store, name) else f"{name}/{COMMIT}")


def _is_link(store: Store, name: str) -> bool:
    root = local_path(store.url)
    return root is not None and os.path.islink(os.path.join(root, name))


def delete_step(store: Store, name: str, kept: Set[str] = frozenset()) -> None:
    """Remove a step: `COMMIT` first, so that from then on it does not exist, then the files that saves wrote.

    Args:
        store: Rooted at the run.
        name: Of the step's folder.
        kept: Names of files that stay.

    Raises:
        StorageError: The store failed; where `COMMIT` is gone, what is left counts for nothing.
    """
    _delete_mark(store, name)
    _delete_saved(store, _read_step(store, -1, name), kept)


def _delete_saved(store: Store, step: StepFolder, kept: Set[str]) -> None:
    """Remove the files of a step without its mark; the folder too, if it is empty then."""
    if not kept and not step.others:
        store.delete_folder(step.name)
        return
    for name in sorted(step.saved - kept):
        store.delete(f"{step.name}/{name}")


def _delete_unneeded(store: Store, step: StepFolder, files: Set[str]) -> None:
    """Remove files that a step was kept for, or that it keeps beside its own."""
    if step.is_base and not step.others and step.saved <= files:
        store.delete_folder(step.name)
        return
    for name in sorted(files - step.own):
        if name in step.held and WRITTEN.fullmatch(name):
            store.delete(f"{step.name}/{name}")


def find_orphans(store: Store, run: RunDirectory) -> tuple[Orphan, ...]:
    """Find what killed saves and removals have left in a run.

    Args:
        store: Rooted at the run.
        run: As read.

    """
    unfinished = [step.name for step in run.steps if step.is_unfinished and not step.is_base]
    return tuple(Orphan(name, _read_change_time(store, name)) for name in (*run.partial, *unfinished))


def _read_change_time(store: Store, name: str) -> float | None:
    known = store.changed_at(name)
    if known is not None:
        return known
    saved = [WRITTEN.fullmatch(_final(entry.name)) for entry in SubfolderStore(store, name).list()]
    return max((_parse_start_time(match[0]) for match in saved if match), default=None)


def delete_orphan(store: Store, name: str) -> bool:
    """Delete an orphan; return False if a process may still own it.

    Args:
        store: Rooted at the run.
        name: Name of the orphan; files in it that others refer to stay.

    """
    root = local_path(store.url)
    if root is not None and _PARTIAL.fullmatch(name):
        return remove_orphan(os.path.join(root, name))
    now = read_run_to_remove(open_store(store.url))
    now.require_readable()
    if not any(step.name == name and step.is_unfinished and not step.is_base for step in now.steps):
        return False
    delete_step(store, name, now.referred().get(name, frozenset()))
    return True
