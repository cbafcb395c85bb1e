"""Folders that each node has for itself under one URL: files appear one by one, in the folder of the process."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardckpt.errors import TargetExistsError, UnsafeError, UsageError
from shardckpt.native.commit import COMMIT, STEP
from shardckpt.storage import local
from shardckpt.storage.node_folder import find_folder, name_folder
from shardckpt.storage.publish import JoinedPublication, start_publication
from shardckpt.storage.resolve_url import kind, mount_store, open_store
from shardckpt.storage.store import read_bytes


def write(store, name: str, data: bytes, **options: bool) -> None:
    with store.create(name, **options) as writer:
        writer.write(data)


def test_a_url_leads_to_the_folder_that_this_process_has_given_it(tmp_path):
    url = name_folder("abc", str(tmp_path / "one"))
    store = open_store(f"{url}/step-00000001")
    write(store, "x", b"data")
    assert (tmp_path / "one" / "step-00000001" / "x").read_bytes() == b"data"
    assert read_bytes(store, "x", 1, 2) == b"at" and store.url == f"{url}/step-00000001"
    assert not store.capabilities.renames
    assert [kind(f"{url}{name}") for name in ("", "/step-00000001/x", "/y")] == ["folder", "file", "missing"]
    name_folder("abc", str(tmp_path / "two"))
    assert kind(f"{url}/step-00000001") == "missing" and find_folder(str(tmp_path)) is None


def test_a_power_failure_leaves_a_folder_whose_maker_was_killed_before_its_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    synced: list[str] = []
    sync_folder = local.sync_folder
    monkeypatch.setattr(local, "sync_folder", lambda path: synced.append(path) or sync_folder(path))
    store = open_store(name_folder("abc", str(tmp_path / "run")))
    write(store, "x", b"data")
    write(store, "COMMIT", b"1")
    assert synced.count(str(tmp_path)) == 1


def test_a_file_that_must_be_new_has_an_unused_name_and_names_stay_below_the_folder(tmp_path):
    store = open_store(name_folder("abc", str(tmp_path)))
    write(store, "COMMIT", b"1", is_new=True)
    with pytest.raises(TargetExistsError):
        store.create("COMMIT", is_new=True)
    assert [entry.name for entry in store.list()] == ["COMMIT"] and read_bytes(store, "COMMIT", 0, 1) == b"1"
    with pytest.raises(UnsafeError):
        store.create("../x")


def test_a_url_that_this_process_has_not_named_is_an_error():
    with pytest.raises(UsageError, match="no folder of this process has this URL"):
        open_store("shardckpt-local://0123/step-00000001")


def test_files_are_written_into_a_folder_whose_url_or_path_is_mounted_for_reads(tmp_path):
    other = open_store(str(tmp_path / "other"))
    (tmp_path / "own").mkdir()
    for url in (str(tmp_path / "own"), name_folder("abc", str(tmp_path / "own"))):
        with mount_store(url, other):
            assert open_store(url) is other
            with JoinedPublication(url).create("x") as writer:
                writer.write(b"data")
        assert read_bytes(open_store(url), "x", 0, 4) == b"data" and other.list() == []


def test_a_result_that_is_rolled_back_leaves_no_empty_folder_and_no_file_of_another(tmp_path):
    url = name_folder("abc", str(tmp_path)) + "/step-00000001"
    for other in ("", "of another save"):
        publication = start_publication(url, STEP, overwrite=True, needed_bytes=0, last=COMMIT, prefix="0123")
        with publication.create("0123-00000-00.safetensors") as writer:
            writer.write(b"data")
        if other:
            write(open_store(url), other, b"data")
        publication.rollback()
        assert [str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*")] == [f"step-00000001/{other}"] * bool(
            other
        )
        assert [*tmp_path.iterdir()] == [tmp_path / "step-00000001"] * bool(other)
