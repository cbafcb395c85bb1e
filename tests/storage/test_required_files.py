"""Files of several ranks are looked for where the first rank sees them; whoever wrote what is absent is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardckpt.errors import StorageError
from shardckpt.storage.local import LocalStore
from shardckpt.storage.publish import JoinedPublication, find_missing_files, format_ranks, require_files


def test_a_listing_that_lags_behind_is_no_loss(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "a").write_bytes(b"123")
    monkeypatch.setattr(LocalStore, "list", lambda self, folder="": [])
    assert find_missing_files(str(tmp_path), [{"a": 3, "b": 3}]) == {"b": None}


def test_ranks_of_which_nothing_is_seen_see_another_folder(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"123")
    require_files("run/c", str(tmp_path), [{"a": 3}, {}])
    with pytest.raises(StorageError, match=r"run/c: rank 0 does not see .* rank 2 wrote: they see another folder"):
        require_files("run/c", str(tmp_path), [{"a": 3}, {}, {"b": 3, "c": 4}])
    with pytest.raises(StorageError, match=r"ranks 1, 2 wrote.*found no b, c. .*every rank sees"):
        require_files("run/c", str(tmp_path), [{"a": 3}, {"b": 3}, {"c": 3}])


@pytest.mark.parametrize("sizes", [[{"a": 2}, {"b": 3}], [{"a": 3, "d": 1}, {"b": 3}], [{"a": 3}, {"b": 3, "c": 1}]])
def test_a_file_that_was_cut_or_removed_by_somebody_is_told_as_that(tmp_path: Path, sizes) -> None:
    (tmp_path / "a").write_bytes(b"123")
    (tmp_path / "b").write_bytes(b"123")
    with pytest.raises(StorageError, match=r"missing or truncated"):
        require_files("run/c", str(tmp_path), sizes)


def test_many_ranks_are_counted() -> None:
    assert format_ranks(list(range(1, 15))) == "ranks 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 4 more"


def test_a_folder_that_this_process_does_not_see_is_refused_and_not_made(tmp_path: Path) -> None:
    JoinedPublication(str(tmp_path))
    with pytest.raises(StorageError, match=r"does not see the folder that rank 0 writes into"):
        JoinedPublication(str(tmp_path / "run" / "deep" / ".c.partial-0123"))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_whose_parent_was_remembered_as_absent_is_seen_in_the_end(tmp_path: Path, monkeypatch) -> None:
    place, asked = tmp_path / "run" / ".c.partial-0123", []
    place.mkdir(parents=True)
    is_dir = os.path.isdir

    def remembering(path: str) -> bool:
        return is_dir(path) and (bool(asked) or path == str(tmp_path))

    make = os.mkdir
    monkeypatch.setattr(os.path, "isdir", remembering)
    monkeypatch.setattr(os, "mkdir", lambda path: (asked.append(path), make(path)))
    JoinedPublication(str(place))
    assert asked == [str(tmp_path / "run")]


def test_a_rank_that_gives_up_keeps_what_it_finished(tmp_path: Path) -> None:
    """Its word that rank 0 is lost may come while rank 0, which was late, renames the folder to its name."""
    joined = JoinedPublication(str(tmp_path))
    with joined.create("finished") as writer:
        writer.write(b"one")
    joined.create("unfinished").write(b"two")
    joined.rollback()
    assert [path.name for path in tmp_path.iterdir()] == ["finished"]
