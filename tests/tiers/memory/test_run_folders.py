"""Folders for captures: found again by every process of their user, and by no other user."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from shardckpt.errors import StorageError, UnsafeError, UsageError
from shardckpt.storage import orphans
from shardckpt.tiers.memory import run_folders
from shardckpt.tiers.memory.run_folders import (
    find_base,
    find_first_mount,
    find_run_folder,
    list_run_folders,
    make_run_folder,
    remove_left,
    remove_run_folder,
)

RUN = "0123456789abcdef"
OTHER_USER = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


def make(mount: Path) -> Path:
    folder = Path(find_base(str(mount))) / RUN
    make_run_folder(str(folder))
    return folder


def test_a_run_has_a_folder_of_its_user_that_nobody_else_may_use(memory):
    folder = make(memory)
    assert folder == memory / f"shardckpt-{os.geteuid()}" / RUN
    assert [each.stat().st_mode & 0o777 for each in (folder, folder.parent)] == [0o700] * 2
    assert find_run_folder(RUN) == str(folder) and list_run_folders() == {RUN: str(folder)}
    make_run_folder(str(folder))


def test_a_folder_on_another_mount_is_found_without_its_name(memory, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    folder = make(other)
    assert find_run_folder(RUN) == str(folder) and list_run_folders() == {RUN: str(folder)}
    assert find_run_folder(RUN, str(memory)) is None
    assert list_run_folders(find_base(find_first_mount())) == {RUN: str(folder)}


def test_a_folder_on_another_mount_has_the_start_of_the_machine_in_its_name(memory, tmp_path, monkeypatch):
    """Machines may share it, and it may survive a restart, after which files that were not synced are torn."""
    first = find_base(str(tmp_path))
    monkeypatch.setattr(run_folders, "read_boot_id", lambda: "another start")
    assert find_base(str(tmp_path)) != first
    assert orphans.read_boot_id()[:8] in first and orphans.read_boot_id()[:8] not in find_base(str(memory))


def test_nodes_of_two_names_have_folders_of_their_own(memory, monkeypatch):
    make(memory)
    monkeypatch.setenv("SHARDCKPT_NODE", "b")
    assert list_run_folders() == {}
    make(memory)
    assert list_run_folders() == {RUN: str(memory / f"shardckpt-{os.geteuid()}-b" / RUN)}
    monkeypatch.setenv("SHARDCKPT_NODE", "../b")
    with pytest.raises(UsageError, match="SHARDCKPT_NODE"):
        list_run_folders()


def test_without_shared_memory_the_folder_for_temporary_files_comes_first(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folders, "SHARED_MEMORY", str(tmp_path / "none"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert find_first_mount() == str(tmp_path)
    folder = make(tmp_path)
    assert list_run_folders() == {RUN: str(folder)}


def test_without_a_folder_for_temporary_files_the_error_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folders, "SHARED_MEMORY", str(tmp_path / "none"))
    with monkeypatch.context() as container:
        container.setattr(tempfile, "tempdir", None)
        container.setattr(tempfile, "_candidate_tempdir_list", list)
        with pytest.raises(StorageError, match=r"no folder can be used for captures .* Set TMPDIR"):
            find_first_mount()


TAKEN: dict[str, Callable[[Path], object]] = {
    "folder": lambda path: path.mkdir(0o700),
    "file": Path.touch,
    "link": lambda path: path.symlink_to("/tmp"),
    "pipe": os.mkfifo,
}


@needs_root
@pytest.mark.parametrize("kind", TAKEN)
def test_names_that_another_user_has_taken_are_passed_over_for_good(kind, memory):
    first = Path(find_base(str(memory)))
    for path in (first, Path(f"{first}+1")):
        TAKEN[kind](path)
        os.chown(path, OTHER_USER, OTHER_USER, follow_symlinks=False)
    folder = make(memory)
    assert folder.parent == Path(f"{first}+2")
    first.rmdir() if kind == "folder" else first.unlink()
    assert list_run_folders() == {RUN: str(folder)}, "the folder that is there is found first"


@pytest.mark.parametrize("kind", ["open", "link", "file"])
def test_a_name_that_others_may_use_or_that_is_no_folder_is_passed_over(kind, memory, tmp_path):
    first = Path(find_base(str(memory)))
    if kind == "open":
        first.mkdir()
        first.chmod(0o755)
    elif kind == "link":
        (tmp_path / "mine").mkdir(0o700)
        first.symlink_to(tmp_path / "mine")
    else:
        first.touch()
    assert make(memory).parent == Path(f"{first}+1")


@needs_root
def test_a_folder_that_another_user_took_meanwhile_is_refused(memory):
    folder = Path(find_base(str(memory))) / RUN
    folder.parent.mkdir(0o700)
    os.chown(folder.parent, OTHER_USER, OTHER_USER)
    with pytest.raises(UnsafeError, match=r"must belong to this user.* Remove it, or pass `path=`"):
        make_run_folder(str(folder))


@needs_root
def test_a_link_of_another_user_leads_nowhere(memory, tmp_path):
    base = Path(find_base(str(memory)))
    base.mkdir(0o700)
    (tmp_path / "theirs" / RUN).mkdir(0o700, parents=True)
    os.chown(tmp_path / "theirs", OTHER_USER, OTHER_USER)
    (base / "at-00000000").symlink_to(tmp_path / "theirs")
    assert list_run_folders() == {} and find_run_folder(RUN) is None


@needs_root
def test_no_other_user_reads_fills_or_locks_a_folder(memory):
    folder = make(memory)
    (folder / "file").write_text("secret")
    acts = (folder.iterdir().__next__, (folder / "new").touch, lambda: os.open(folder / "file", os.O_RDONLY))
    memory.parent.chmod(0o777)
    memory.chmod(0o1777)
    child = os.fork()
    if child == 0:
        refused = 0
        os.setegid(OTHER_USER)
        os.seteuid(OTHER_USER)
        for act in acts:
            try:
                act()
            except PermissionError:
                refused += 1
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == len(acts)


def test_a_removed_folder_is_gone_at_once_and_what_a_killed_process_left_goes_later(memory, monkeypatch):
    folder = make(memory)
    (folder / "step-00000001").mkdir()
    with monkeypatch.context() as killed:
        killed.setattr(run_folders.shutil, "rmtree", lambda *_, **__: None)
        remove_run_folder(str(folder))
    assert list_run_folders() == {}
    (left,) = [each for each in folder.parent.iterdir() if each.name.startswith(".removed-")]
    remove_left(str(folder.parent))
    assert not left.exists()
    remove_run_folder(str(folder))


@pytest.mark.parametrize("run", ["", "../x", "a/b", "A", "x" * 33])
def test_an_id_that_is_no_name_of_a_run_is_refused(run):
    with pytest.raises(UnsafeError, match="1 to 32 lowercase letters and digits"):
        find_run_folder(run)
