"""Decide what overwriting may replace: one checkpoint of the written kind, or an empty folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardckpt.errors import TargetExistsError
from shardckpt.storage.orphans import is_partial
from shardckpt.storage.store import Listed, Read, Store, read_bytes

_HEAD_BYTES = 512  # first bytes of a file, which identify its kind
MAX_ENTRIES = 1_000_000  # maximum files and folders to list; a larger target does not count as one checkpoint

# Names of files that operating systems create in folders; they may be deleted.
_OF_A_SYSTEM = re.compile(r"\.DS_Store|Thumbs\.db|desktop\.ini|\._.+|\.(nfs|fuse_hidden)[0-9a-f]+")

_SHOWN = 8

# Returns a folder's content, relative to the target; the empty name is the target.
ListFolder = Callable[[str], Sequence[Listed]]


def _no_names(store: Store, sizes: Mapping[str, int]) -> Collection[str]:  # noqa: ARG001
    return ()


@dataclass(frozen=True, slots=True)
class FolderKind:
    """Patterns for the files in a checkpoint folder.

    Files in subfolders are matched by their relative path.

    Attributes:
        title: Name for such a checkpoint in messages.
        payload: Names that only such a checkpoint's files have; every checkpoint has at least one.
        other_names: Other names that a save of this kind writes.
        renewed: Names that the new result also has, so that any old file with such a name may be replaced.
        members: Returns the names that the checkpoint itself lists, from the store and its top-level files' sizes.
            Raises ShardckptError if the checkpoint must not be replaced.
        is_one: Recognizes a payload file by its first 512 bytes; None if the name is sufficient.
    """

    title: str
    payload: re.Pattern[str]
    other_names: re.Pattern[str] = re.compile(r"(?!)")
    renewed: frozenset[str] = field(default=frozenset())
    members: Callable[[Store, Mapping[str, int]], Collection[str]] = _no_names
    is_one: Callable[[bytes], bool] | None = None


@dataclass(frozen=True, slots=True)
class FileKind:
    """A checkpoint that is one file."""

    title: str  # in messages
    is_one: Callable[[bytes], bool]  # recognizes the file by its first 512 bytes


Kind = FolderKind | FileKind


def is_ignored(name: str) -> bool:
    """Return True if a file may be ignored: a system file or a temporary file."""
    return is_partial(name) or _OF_A_SYSTEM.fullmatch(name.rpartition("/")[2]) is not None


def find_replaceable_files(kind: FolderKind, store: Store, list_folder: ListFolder, where: str) -> list[str]:
    """Return all files of a folder if it may be replaced; the search ends at the first file that may not."""
    # It must hold one checkpoint of a kind, or the file that lists the rest of one, or only ignored files.
    top = list_folder("")
    sizes = {entry.name: entry.size for entry in top if not entry.is_folder}
    counting = [name for name in sizes if not is_ignored(name)]
    listed = frozenset(kind.members(store, sizes)) if counting else frozenset()
    others = [name for name in counting if not _belongs(name, kind, listed)]
    others += _find_other_content(kind, store, {name: sizes[name] for name in counting})
    folders = [entry.name for entry in top if entry.is_folder]
    if others:
        raise _other_content(kind, [*others, *_as_folders(folders)], where)
    files = list(sizes)
    holding = []
    for folder in folders:
        inside = []
        for name in files_below(list_folder, folder, where):
            if not (is_ignored(name) or _belongs(name, kind, listed)):
                raise _other_content(kind, _as_folders(folders), where)
            inside.append(name)
        files += inside
        holding += [folder] if inside else []
    if len(holding) > 1:
        raise _other_content(kind, _as_folders(holding), where)
    is_rest = bool(listed) and not holding and all(map(kind.other_names.fullmatch, counting))
    is_one = is_rest or any(map(kind.payload.fullmatch, files))
    if any(not is_ignored(name) for name in files) and not is_one:
        raise _other_content(kind, [*counting, *_as_folders(holding)], where)
    return files


def files_below(list_folder: ListFolder, folder: str, where: str) -> Iterator[str]:
    """Yield a folder's files recursively; list each folder when reached."""
    pending, count = [folder], 0
    while pending:
        for entry in list_folder(pending.pop()):
            count += 1
            if count > MAX_ENTRIES:
                raise TargetExistsError(
                    "the target holds too much to be one checkpoint",
                    where=where,
                    found=f"more than {MAX_ENTRIES} files and folders",
                    fix="Choose another target.",
                )
            if entry.is_folder:
                pending.append(entry.name)
            else:
                yield entry.name


def require_file(kind: FileKind, store: Store, name: str, where: str) -> None:
    """Require that a file to replace has the written kind, or is empty."""
    head = read_bytes(store, name, 0, min(store.size(name), _HEAD_BYTES))
    if head and not kind.is_one(head):
        raise TargetExistsError(
            f"overwriting replaces {kind.title} and nothing else, and this is another file",
            where=where,
            fix="Choose another target, or move that file away first.",
        )


def _find_other_content(kind: FolderKind, store: Store, sizes: Mapping[str, int]) -> list[str]:
    """Return files with payload names but other content. Empty files count as payload."""
    if kind.is_one is None:
        return []
    heads = {
        name: bytearray(min(size, _HEAD_BYTES)) for name, size in sizes.items() if size and kind.payload.fullmatch(name)
    }
    store.read([Read(name, 0, memoryview(head)) for name, head in heads.items()])
    return [name for name, head in heads.items() if not kind.is_one(bytes(head))]


def _belongs(name: str, kind: FolderKind, listed: Collection[str]) -> bool:
    is_payload = kind.payload.fullmatch(name) or kind.other_names.fullmatch(name)
    return is_payload is not None or name in kind.renewed or name in listed


def _as_folders(names: Sequence[str]) -> list[str]:
    return [f"{name}/" for name in names]


def _other_content(kind: FolderKind, names: Sequence[str], where: str) -> TargetExistsError:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return TargetExistsError(
        f"overwriting replaces {kind.title} and nothing else, and the target holds other content",
        where=where,
        found=", ".join(names[:_SHOWN]) + more,
        fix="Choose another target, or move that content away first.",
    )
