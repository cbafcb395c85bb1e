"""What overwriting may remove: the files of one checkpoint of the kind that is written, or an empty folder."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import pytest

from shardckpt.errors import TargetExistsError
from shardckpt.storage import replaceable
from shardckpt.storage.local import LocalStore
from shardckpt.storage.replaceable import FolderKind, find_replaceable_files
from shardckpt.storage.store import Listed

KIND = FolderKind(
    "one checkpoint of a test",
    payload=re.compile(r"data-\d\.bin|deep/data-\d\.bin"),
    other_names=re.compile("INDEX"),
    renewed=frozenset({"config.json"}),
)


class Folder:
    """A folder that counts how often it is listed."""

    def __init__(self, names: Iterable[str], empty: Iterable[str] = ()) -> None:
        self.names, self.empty, self.listed = list(names), list(empty), 0

    def __call__(self, folder: str) -> list[Listed]:
        self.listed += 1
        start = f"{folder}/" if folder else ""
        below = [name.removeprefix(start) for name in self.names if name.startswith(start)]
        folders = {name.partition("/")[0] for name in below if "/" in name} | set(() if folder else self.empty)
        files = {name for name in below if "/" not in name}
        return sorted(Listed(start + name, 0, name in folders) for name in folders | files)


def found(folder: Folder, kind: FolderKind = KIND) -> list[str]:
    return sorted(find_replaceable_files(kind, LocalStore("nowhere"), folder, "there"))


@pytest.mark.parametrize(
    "names",
    [
        [],
        ["data-1.bin"],
        ["data-1.bin", "INDEX", "config.json"],
        ["deep/data-1.bin", "INDEX"],
        [
            "data-1.bin",
            ".DS_Store",
            "deep/._data-1.bin",
            "Thumbs.db",
            "desktop.ini",
            ".nfs00000000012",
            ".fuse_hidden0006",
        ],
        [".DS_Store"],
        [".data-1.bin.partial-0123456789ab"],
    ],
    ids=repr,
)
def test_one_checkpoint_or_nothing_that_counts_may_go(names: list[str]) -> None:
    assert found(Folder(names)) == sorted(names)


def test_folders_without_files_count_for_nothing() -> None:
    assert found(Folder(["data-1.bin"], empty=["old", "older"])) == ["data-1.bin"]


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["data-1.bin", "README.md"], r"found README\.md\."),
        (["notes.txt", "a/b/c.txt"], r"found notes\.txt, a/\."),
        (["data-1.bin", "runs/a/data-1.bin"], r"found runs/\."),
        (["deep/data-1.bin", "deep/mine.bin"], r"found deep/\."),
        (["a/b/c/d/data-1.bin"], r"found a/\."),
        (["INDEX", "config.json"], r"found INDEX, config\.json\."),
        ([f"{number}.txt" for number in range(10, 30)], r"17\.txt and 12 more\."),
        ([".hidden"], r"found \.hidden\."),
    ],
    ids=repr,
)
def test_anything_else_is_refused_with_a_list(names: list[str], told: str) -> None:
    with pytest.raises(TargetExistsError, match=f"there: overwriting replaces one checkpoint of a test.*{told}"):
        found(Folder(names))


def test_two_checkpoints_in_folders_are_more_than_one() -> None:
    kind = FolderKind("one", payload=re.compile(r"step-\d/data\.bin"))
    assert found(Folder(["step-1/data.bin"]), kind) == ["step-1/data.bin"]
    with pytest.raises(TargetExistsError, match="found step-1/, step-2/"):
        found(Folder(["step-1/data.bin", "step-2/data.bin"]), kind)


def test_what_a_checkpoint_lists_itself_may_go() -> None:
    def members(store: LocalStore, sizes: Mapping[str, int]) -> list[str]:
        return ["extra"]

    kind = FolderKind("one", payload=re.compile("data"), members=members)
    assert found(Folder(["data", "extra"]), kind) == ["data", "extra"]
    with pytest.raises(TargetExistsError, match="found other"):
        found(Folder(["data", "extra", "other"]), kind)


def test_the_file_that_lists_a_checkpoint_may_go_alone_but_not_with_other_files() -> None:
    def members(store: LocalStore, sizes: Mapping[str, int]) -> list[str]:
        return ["extra"] if "INDEX" in sizes else []

    kind = FolderKind("one", payload=re.compile("data"), other_names=re.compile("INDEX"), members=members)
    assert {*found(Folder(["INDEX", ".DS_Store"]), kind)} == {"INDEX", ".DS_Store"}
    for names in (["INDEX", "extra"], ["INDEX", "other"], ["INDEX", "sub/data.txt"], ["extra"]):
        with pytest.raises(TargetExistsError):
            found(Folder(names), kind)


def test_a_search_ends_with_the_first_reason_to_refuse() -> None:
    many = Folder([f"a{number:04}/mine.txt" for number in range(1000)])
    with pytest.raises(TargetExistsError, match="and 992 more"):
        found(many)
    assert many.listed == 2
    beside = Folder(["mine.txt", *(f"deep/{number}/x" for number in range(1000))])
    with pytest.raises(TargetExistsError):
        found(beside)
    assert beside.listed == 1


def test_a_search_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaceable, "MAX_ENTRIES", 5)
    assert len(found(Folder([f"deep/data-{number}.bin" for number in range(5)]))) == 5
    with pytest.raises(TargetExistsError, match="found more than 5 files"):
        found(Folder([f"deep/data-{number}.bin" for number in range(6)]))
