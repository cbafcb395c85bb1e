"""`overwrite=True` replaces one checkpoint of shardckpt or an empty folder, and refuses everything else."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import shardckpt
from shardckpt.errors import IncompleteError, TargetExistsError
from shardckpt.native.commit import COMMIT
from shardckpt.storage.resolve_url import open_store
from shardckpt.storage.store import Store, read_bytes
from tests.kit.writers.torch_writers import ALONE

STATE = {"w": torch.arange(6.0)}


def put(url: str, *names: str) -> None:
    for name in names:
        with open_store(url).create(name) as writer:
            writer.write(b"mine")


def content(url: str) -> dict[str, bytes]:
    def below(store: Store, folder: str) -> dict[str, bytes]:
        found = {}
        for entry in store.list(folder):
            found |= (
                below(store, entry.name)
                if entry.is_folder
                else {entry.name: read_bytes(store, entry.name, 0, entry.size)}
            )
        return found

    return below(open_store(url), "")


def runs(place: str) -> None:
    shardckpt.save(STATE, f"{place}/a/step-00000001")
    shardckpt.save(STATE, f"{place}/b/step-00000001")


def own_files(place: str) -> None:
    put(place, "train.py", "data/train.csv")


def checkpoint_with_notes(place: str) -> None:
    shardckpt.save(STATE, place)
    put(place, "notes.txt")


def checkpoint_with_a_run_in_it(place: str) -> None:
    shardckpt.save(STATE, place)
    shardckpt.save(STATE, f"{place}/before/step-00000001")


def other_format(place: str) -> None:
    put(place, ".metadata", "__0_0.distcp")


def model_folder(place: str) -> None:
    put(place, "config.json", "model.safetensors", "model.safetensors.index.json")


CASES: dict[Callable[[str], None], str] = {
    runs: "a/, b/",
    own_files: "train.py, data/",
    checkpoint_with_notes: r"notes\.txt",
    checkpoint_with_a_run_in_it: "before/",
    other_format: r"\.metadata, __0_0\.distcp",
    model_folder: r"config\.json, model\.safetensors",
}


@pytest.mark.parametrize("prepare", CASES, ids=lambda prepare: prepare.__name__)
def test_other_content_is_refused_with_a_list_and_stays(place: str, prepare: Callable[[str], None]) -> None:
    prepare(place)
    before = content(place)
    with pytest.raises(TargetExistsError, match=f"one shardckpt checkpoint and nothing else.*found {CASES[prepare]}"):
        shardckpt.save(STATE, place, overwrite=True)
    with pytest.raises(TargetExistsError):
        shardckpt.async_save(STATE, place, overwrite=True)
    assert content(place) == before


def test_one_checkpoint_is_replaced_complete_or_not(place: str) -> None:
    shardckpt.save({"w": torch.zeros(3)}, place)
    put(place, ".DS_Store")
    shardckpt.save(STATE, place, overwrite=True)
    open_store(place).delete(COMMIT)
    shardckpt.save(STATE, place, overwrite=True)
    put(place, COMMIT)
    shardckpt.save(STATE, place, overwrite=True)
    assert shardckpt.load(place)["w"].equal(STATE["w"])


def test_a_step_of_which_only_the_commit_is_left_is_refused_by_loads_and_saved_again(place: str) -> None:
    """Somebody has removed the files of a run while, or after, a save wrote its last file."""
    ck = shardckpt.Checkpointer(place)
    ck.save(1, {"w": torch.zeros(6)})
    ck.save(2, STATE)
    for name in {*content(ck.path(2))} - {COMMIT}:
        open_store(ck.path(2)).delete(name)
    with pytest.raises(IncompleteError, match="the step's manifest is not there"):
        shardckpt.load(ck.path(2))
    ck = shardckpt.Checkpointer(place)
    with pytest.warns(UserWarning, match="restored step 1 from the root. Newer step 2 is not used"):
        assert ck.restore({"w": torch.ones(6)}) == 1
    put(ck.path(2), "notes.txt")
    with pytest.raises(TargetExistsError, match=r"the target exists|found notes\.txt"):
        ck.save(2, STATE)
    open_store(ck.path(2)).delete("notes.txt")
    ck.save(2, STATE)
    assert shardckpt.load(ck.path(2))["w"].equal(STATE["w"])


def test_a_step_that_a_newer_version_wrote_is_refused(place: str) -> None:
    shardckpt.save(STATE, place)
    raw = json.loads(content(place)[COMMIT].splitlines()[0])
    line = json.dumps({**raw, "features": ["sparse"]}).encode() + b"\n"
    with open_store(place).create(COMMIT) as writer:
        writer.write(line + hashlib.sha256(line).hexdigest().encode() + b"\n")
    before = content(place)
    with pytest.raises(TargetExistsError, match=r"cannot read the step.*'sparse'"):
        shardckpt.save(STATE, place, overwrite=True)
    assert content(place) == before


@pytest.mark.parametrize("name", ["step-00000001", "best"])
def test_files_that_something_beside_it_refers_to_stay(place: str, name: str) -> None:
    shared = {"w": torch.arange(5000.0)}
    shardckpt.save(shared, f"{place}/{name}", store_digests=True)
    shardckpt.save(shared, f"{place}/step-00000002", base=f"{place}/{name}")
    for _ in range(2):
        shardckpt.save(STATE, f"{place}/{name}", overwrite=True)
    assert shardckpt.load(f"{place}/step-00000002")["w"].equal(shared["w"])
    assert shardckpt.load(f"{place}/{name}")["w"].equal(STATE["w"])


def test_a_step_of_another_library_is_not_replaced_by_a_checkpointer(tmp_path: Path) -> None:
    ck = shardckpt.Checkpointer(tmp_path)
    dcp.save(STATE, checkpoint_id=ck.path(5), **ALONE)
    before = content(ck.path(5))
    with pytest.raises(TargetExistsError, match=r"found \.metadata, __0_0\.distcp"):
        ck.save(5, STATE, overwrite=True)
    assert content(ck.path(5)) == before


def test_what_comes_while_a_save_goes_on_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = str(tmp_path / "c")
    shardckpt.save(STATE, place)
    write = os.write

    def meanwhile(fd: int, data: bytes) -> int:
        (tmp_path / "c" / "notes.txt").write_text("mine")
        return write(fd, data)

    monkeypatch.setattr(os, "write", meanwhile)
    with pytest.raises(TargetExistsError, match=r"found notes\.txt"):
        shardckpt.save({"w": torch.zeros(3)}, place, overwrite=True)
    assert (tmp_path / "c" / "notes.txt").read_text() == "mine"
    assert shardckpt.load(place)["w"].equal(STATE["w"])
    assert os.listdir(tmp_path) == ["c"]


def test_links_are_no_part_of_a_checkpoint_and_are_not_followed(tmp_path: Path) -> None:
    shardckpt.save(STATE, tmp_path / "c")
    for to in ("..", "nowhere"):
        os.symlink(to, tmp_path / "c" / "link")
        with pytest.raises(TargetExistsError, match="found link"):
            shardckpt.save(STATE, tmp_path / "c", overwrite=True)
        os.unlink(tmp_path / "c" / "link")
    shardckpt.save(STATE, tmp_path / "c", overwrite=True)
