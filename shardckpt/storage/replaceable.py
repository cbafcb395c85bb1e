"""What overwriting may remove: one checkpoint of the kind that is written, or an empty folder, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardckpt.errors import TargetExistsError
from shardckpt.storage.orphans import is_partial
from shardckpt.storage.store import Listed, Read, Store, read_bytes

_HEAD_BYTES = 512
"""First bytes of a file that show its kind."""

MOST_ENTRIES = 1_000_000
"""Files and folders that are looked at before a target counts as too large to be one checkpoint."""

_OF_A_SYSTEM = re.compile(r"\.DS_Store|Thumbs\.db|desktop\.ini|\._.+|\.nfs[0-9a-f]+")
"""Files that operating systems put into folders unasked: nobody misses them."""

_SHOWN = 8

ListFolder = Callable[[str], Sequence[Listed]]
"""Returns the content of a folder of the target; the target itself is the empty name."""


def _no_names(store: Store, sizes: Mapping[str, int]) -> Collection[str]:  # noqa: ARG001
    return ()


@dataclass(frozen=True, slots=True)
class FolderKind:
    """Which files make up a checkpoint that is a folder. Files in its folders are matched by their path below it.

    Attributes:
        title: One such checkpoint, for messages.
        payload: Names that files of such a checkpoint alone have; a folder without any is not one.
        beside: Other names that a save of this kind gives.
        renewed: Names of files that the new result has too, whoever wrote the old ones.
        members: Given the folder and the sizes of the files directly in it, returns names that the checkpoint itself
            lists. Raises ShardckptError where the checkpoint must not be replaced.
        is_one: Recognizes a payload file by its first 512 bytes, if other files may have its name.
    """

    title: str
    payload: re.Pattern[str]
    beside: re.Pattern[str] = re.compile(r"(?!)")
    renewed: frozenset[str] = field(default=frozenset())
    members: Callable[[Store, Mapping[str, int]], Collection[str]] = _no_names
    is_one: Callable[[bytes], bool] | None = None


@dataclass(frozen=True, slots=True)
class FileKind:
    """How to recognize a checkpoint that is one file.

    Attributes:
        title: One such file, for messages.
        is_one: Recognizes it by the first 512 bytes.
    """

    title: str
    is_one: Callable[[bytes], bool]


Kind = FolderKind | FileKind


def is_ignored(name: str) -> bool:
    """Return True if a file counts for nothing: an operating system put it there, or it never was complete."""
    return is_partial(name) or _OF_A_SYSTEM.fullmatch(name.rpartition("/")[2]) is not None


def find_replaceable_files(kind: FolderKind, store: Store, list_folder: ListFolder, where: str) -> list[str]:
    """Return all files of a folder that may be replaced: those of one checkpoint of a kind, or none that counts.

    The search ends at the first file that does not belong there.

    Args:
        kind: The kind that is written.
        store: Rooted at the folder.
        list_folder: Lists it; links do not count as folders.
        where: The target, for messages.

    Raises:
        TargetExistsError: It holds other content, which the message lists; or too many entries to look at.
        StorageError: The store failed.
    """
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
    if any(not is_ignored(name) for name in files) and not any(map(kind.payload.fullmatch, files)):
        raise _other_content(kind, [*counting, *_as_folders(holding)], where)
    return files


def files_below(list_folder: ListFolder, folder: str, where: str) -> Iterator[str]:
    """Yield the files at any depth of a folder, listing no folder before it is needed.

    Args:
        list_folder: Lists folders.
        folder: Where to begin.
        where: The target, for messages.

    Raises:
        TargetExistsError: There is too much to be looked at.
        StorageError: The store failed.
    """
    pending, count = [folder], 0
    while pending:
        for entry in list_folder(pending.pop()):
            count += 1
            if count > MOST_ENTRIES:
                raise TargetExistsError(
                    "the target holds too much to be one checkpoint",
                    where=where,
                    found=f"more than {MOST_ENTRIES} files and folders",
                    fix="Choose another target.",
                )
            if entry.is_folder:
                pending.append(entry.name)
            else:
                yield entry.name


def require_file(kind: FileKind, store: Store, name: str, where: str) -> None:
    """Refuse to replace a file of another kind; an empty one is replaced.

    Args:
        kind: The kind that is written.
        store: The store of the file.
        name: Of the file.
        where: The target, for messages.

    Raises:
        TargetExistsError: It is something else.
        StorageError: The store failed.
    """
    head = read_bytes(store, name, 0, min(store.size(name), _HEAD_BYTES))
    if head and not kind.is_one(head):
        raise TargetExistsError(
            f"overwriting replaces {kind.title} and nothing else, and this is another file",
            where=where,
            fix="Choose another target, or move that file away first.",
        )


def _find_other_content(kind: FolderKind, store: Store, sizes: Mapping[str, int]) -> list[str]:
    """Return payload files by name whose first bytes are those of something else; an empty one is a payload file."""
    if kind.is_one is None:
        return []
    heads = {
        name: bytearray(min(size, _HEAD_BYTES)) for name, size in sizes.items() if size and kind.payload.fullmatch(name)
    }
    store.read([Read(name, 0, memoryview(head)) for name, head in heads.items()])
    return [name for name, head in heads.items() if not kind.is_one(bytes(head))]


def _belongs(name: str, kind: FolderKind, listed: Collection[str]) -> bool:
    is_payload = kind.payload.fullmatch(name) or kind.beside.fullmatch(name)
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
