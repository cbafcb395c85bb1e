"""What a step says of other folders is checked before any of them is looked at, and nothing else is read there."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import shardckpt
from shardckpt.errors import CheckpointError, ChecksumError, FormatError, StorageError, UnsafeError, UsageError
from shardckpt.native import base_store
from shardckpt.native.commit import COMMIT, Commit
from shardckpt.native.payload import encode_canonical
from shardckpt.readers.registry import open_checkpoint
from shardckpt.storage.store import Store
from tests.kit.stores.bucket import Bucket

GOLDEN = Path(__file__).parent / "golden" / "1"
Change = Callable[[dict[str, Any], dict[str, Any]], object]


@pytest.fixture
def step(tmp_path: Path) -> Path:
    for name in ("digests", "based"):
        shutil.copytree(GOLDEN / name, tmp_path / name)
    return tmp_path / "based"


def lied(step: Path, change: Change) -> None:
    """Change what manifest and COMMIT say, so that every digest is right again."""
    [file] = step.glob("*.manifest.json")
    commit, manifest = json.loads((step / COMMIT).read_text().splitlines()[0]), json.loads(file.read_text())
    change(commit, manifest)
    data = encode_canonical(manifest)
    file.write_bytes(data)
    commit["manifest"] = [file.name, len(data), hashlib.sha256(data).hexdigest()]
    line = encode_canonical(commit) + b"\n"
    (step / COMMIT).write_bytes(line + hashlib.sha256(line).hexdigest().encode() + b"\n")


def moved_to(url: object) -> Change:
    def change(commit: dict[str, Any], manifest: dict[str, Any]) -> None:
        commit["bases"][0][0] = url
        manifest["bases"][0][0] = url

    return change


def both(field: str, at: tuple[int, ...], value: object) -> Change:
    """Set a value in the manifest's field."""

    def change(_: dict[str, Any], manifest: dict[str, Any]) -> None:
        inner = manifest[field]
        for index in at[:-1]:
            inner = inner[index]
        inner[at[-1]] = value

    return change


def in_commit(field: str, value: object) -> Change:
    return lambda commit, _: commit.update({field: value})


LIES: dict[str, Change] = {
    "a file in a base has no hashes": both("files", (1, 2), None),
    "hashes that do not fit": both("files", (1, 2), "00"),
    "a base that is not there": both("files", (1, 3), 1),
    "a base below nought": both("files", (1, 3), -1),
    "a file name that climbs": both("files", (1, 0), "../secret"),
    "another size than in COMMIT": both("files", (1, 1), 4119),
    "a save that is none": both("bases", (0, 1), "A B"),
    "a digest that is none": both("bases", (0, 2), "zz"),
    "no digest": both("bases", (0, 2), ""),
    "bases that are no list": lambda _, manifest: manifest.update(bases={}),
    "a base twice": lambda _, manifest: manifest["bases"].append(manifest["bases"][0]),
    "digests of fewer arrays": lambda _, manifest: manifest["digests"].pop(),
    "digests too short": both("digests", (0,), "00"),
    "digests that are no digits": both("digests", (0,), "zz" * 16),
    "a variant twice": lambda _, manifest: manifest["variants"].append(manifest["variants"][0]),
    "a variant of nothing": both("variants", (0, 1), 3),
    "a variant without a path": both("variants", (0, 0), [1.5]),
    "no feature": in_commit("features", []),
    "a feature without bases": lambda commit, _: commit.pop("bases"),
    "files that climb in COMMIT": lambda commit, _: commit["bases"][0][1].append(["../x", 1]),
    "a base twice in COMMIT": lambda commit, _: commit["bases"].append(commit["bases"][0]),
    "a size below nought": lambda commit, _: commit["bases"][0][1][0].__setitem__(1, -1),
    "bases in COMMIT that are text": in_commit("bases", "../digests"),
    "more bases than anybody has": lambda commit, _: commit["bases"].extend([f"../{n}", []] for n in range(4096)),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_refused(step: Path, lie: str) -> None:
    lied(step, LIES[lie])
    with pytest.raises(CheckpointError):
        open_checkpoint(str(step))
    assert not shardckpt.verify(str(step)).ok


@pytest.mark.parametrize("url", ["../../etc", "one", 7], ids=["climbs", "relative", "no text"])
def test_a_reference_is_a_folder_beside_the_step_or_absolute(step: Path, url: object) -> None:
    lied(step, moved_to(url))
    with pytest.raises(UnsafeError, match="not a reference to a base"):
        open_checkpoint(str(step))


def test_of_an_absolute_folder_only_what_matches_its_hashes_is_read(step: Path, tmp_path: Path) -> None:
    away = tmp_path / "away"
    away.mkdir()
    name = json.loads((step / COMMIT).read_text().splitlines()[0])["bases"][0][1][0][0]
    (away / name).write_bytes(b"a secret of somebody else".ljust(5000))
    lied(step, moved_to(str(away)))
    with pytest.raises(CheckpointError):
        shardckpt.load(step)


def test_no_lie_about_rows_gets_at_bytes_outside_of_the_file(step: Path) -> None:
    def change(_: dict[str, Any], manifest: dict[str, Any]) -> None:
        manifest["arrays"][0][3][1] = 4120

    lied(step, change)
    with pytest.raises(CheckpointError):
        shardckpt.load(step)


def test_a_link_to_a_step_finds_what_lies_beside_the_step(step: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    link = tmp_path_factory.mktemp("links") / "latest"
    link.symlink_to(step)
    assert shardckpt.verify(str(link)).ok
    assert shardckpt.load(link)["step"] == 100


def test_without_its_base_it_can_be_looked_at(step: Path) -> None:
    shutil.rmtree(step.parent / "digests")
    found = shardckpt.inspect(str(step))
    assert len(found.tensors) == 3
    assert any("../digests/" in problem.message for problem in found.problems)
    with pytest.raises(CheckpointError) as caught:
        shardckpt.load(step)
    assert not isinstance(caught.value, FormatError)


def test_a_base_that_is_removed_while_the_step_is_opened_has_its_files(step: Path, monkeypatch) -> None:
    """Its `COMMIT` goes after the folder was listed; the files stay, since the step needs them."""
    read = base_store.read_commit

    def remove_first(store: Store, sizes: Mapping[str, int]) -> Commit:
        (step.parent / "digests" / COMMIT).unlink()
        return read(store, sizes)

    monkeypatch.setattr(base_store, "read_commit", remove_first)
    assert shardckpt.load(step)["step"] == 100


# Folders that a step has chosen


def arrays(value: float) -> dict[str, torch.Tensor]:
    return {"frozen": torch.zeros(3000), "trained": torch.full((10,), value)}


def based(folder: str, base: object) -> str:
    """Return a step that has `frozen` in a base, as its owner saves it."""
    shardckpt.save(arrays(0), base, store_digests=True)
    shardckpt.save(arrays(7), f"{folder}/step", base=base)
    return f"{folder}/step"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Folders of bases that were opened."""
    found: list[str] = []
    whole = base_store.open_store

    def open_store(url: str) -> object:
        found.append(url)
        return whole(url)

    monkeypatch.setattr(base_store, "open_store", open_store)
    return found


def refused(step: str, base: str, opened: list[str]) -> None:
    """Nothing of the folder is looked at, the rest of the step can be used, and the message says what to do."""
    opened.clear()
    with pytest.raises(UsageError, match="which the caller has not named") as caught:
        shardckpt.load(step)
    assert f"found {base}." in str(caught.value)
    with pytest.raises(UsageError):
        shardckpt.load(arrays(1), step, verify=False)
    assert float(shardckpt.open(step)["trained"][3]) == 7
    assert float(shardckpt.load(arrays(1), step, base=False)["trained"][3]) == 7
    found = shardckpt.inspect(step)
    assert len(found.tensors) == 2
    assert any(base in warning and "was not opened" in warning for warning in found.warnings)
    checked = shardckpt.verify(step)
    assert not checked.ok
    assert any(base in warning and "was not opened" in warning for warning in checked.warnings)
    assert not opened, "nobody but the step has named it"


def test_from_behind_a_url_no_folder_of_this_machine_is_opened(bucket: str, tmp_path: Path, opened: list[str]) -> None:
    step = based(f"{bucket}/run", tmp_path / "one")
    refused(step, str(tmp_path / "one"), opened)
    for named in (tmp_path / "one", {str(tmp_path / "one"): tmp_path / "one"}, [f"{tmp_path}/one={tmp_path}/one"]):
        assert float(shardckpt.load(step, base=named)["frozen"].sum()) == 0


def test_from_this_machine_no_url_is_asked(bucket: str, tmp_path: Path, opened: list[str]) -> None:
    step = based(str(tmp_path), f"{bucket}/models/one")
    Bucket.requests.clear()
    refused(step, f"{bucket}/models/one", opened)
    assert not Bucket.requests
    assert float(shardckpt.open(step, base=f"{bucket}/models/one")["frozen"][3]) == 0


def test_another_bucket_is_another_place(bucket: str, opened: list[str]) -> None:
    step = based(f"{bucket}/run", "bucket://other/one")
    refused(step, "bucket://other/one", opened)


@pytest.mark.parametrize("place", ["beside", "elsewhere in the bucket"])
def test_in_the_same_bucket_all_goes_by_itself(bucket: str, opened: list[str], place: str) -> None:
    step = based(f"{bucket}/run", f"{bucket}/run/one" if place == "beside" else f"{bucket}/models/one")
    assert float(shardckpt.load(step)["frozen"].sum()) == 0
    assert shardckpt.verify(step).ok
    assert opened


def test_a_folder_of_this_machine_needs_no_name(tmp_path: Path) -> None:
    step = based(str(tmp_path / "run"), tmp_path / "models" / "one")
    assert float(shardckpt.load(step)["frozen"].sum()) == 0


def test_a_save_onto_a_step_writes_what_that_has_in_a_folder_nobody_named(bucket: str, tmp_path: Path) -> None:
    step = based(f"{bucket}/run", tmp_path / "one")
    shardckpt.save(arrays(7), f"{bucket}/run/next", base=step)
    shutil.rmtree(tmp_path / "one")
    found = shardckpt.load(f"{bucket}/run/next")
    assert (float(found["frozen"].sum()), float(found["trained"][3])) == (0, 7)


def test_bases_can_be_named_by_what_the_step_calls_them(tmp_path: Path) -> None:
    elsewhere = {name: str(tmp_path / name / "one") for name in "ab"}
    shardckpt.save(arrays(0), elsewhere["a"], store_digests=True)
    shardckpt.save(arrays(1), elsewhere["b"], base=elsewhere["a"])
    shardckpt.save({**arrays(1), "new": torch.ones(5)}, tmp_path / "step", base=elsewhere["b"])
    moved = {name: f"{shutil.move(tmp_path / name, tmp_path / f'{name}=moved')}/one" for name in "ab"}
    told = [f"{elsewhere[name]}={moved[name]}" for name in "ab"]
    for named in (dict(zip(elsewhere.values(), moved.values(), strict=True)), told, tuple(reversed(told))):
        assert float(shardckpt.load(tmp_path / "step", base=named)["trained"][3]) == 1
    assert float(shardckpt.load(tmp_path / "step", base=[told[0], moved["b"]])["trained"][3]) == 1
    with pytest.raises(UsageError, match="could stand for several"):
        shardckpt.load(tmp_path / "step", base=moved["a"])
    with pytest.raises(UsageError, match="no base that this could be"):
        shardckpt.load(tmp_path / "step", base=[*told, moved["a"]])


def test_a_run_is_not_taken_for_damaged_since_nobody_named_its_base(bucket: str, tmp_path: Path) -> None:
    shardckpt.save(arrays(0), tmp_path / "one", store_digests=True)
    run = shardckpt.Checkpointer(f"{bucket}/run")
    for number in (1, 2):
        run.save(number, arrays(number), base=tmp_path / "one")
    with pytest.raises(UsageError, match="which the caller has not named"):
        run.restore(arrays(0))
    assert run.restore(arrays(0), base=tmp_path / "one") == 2


def test_a_base_that_a_store_does_not_answer_for_is_not_taken_for_lost(bucket: str) -> None:
    step = based(f"{bucket}/run", f"{bucket}/run/one")

    def fault(_: int, verb: str, path: str) -> None:
        if (verb, path) == ("list", "b/run/one"):
            raise PermissionError("broken")

    Bucket.fault = fault
    with pytest.raises(StorageError):
        shardckpt.load(step)
    assert float(shardckpt.open(step)["trained"][3]) == 7
    with pytest.raises(StorageError):
        shardckpt.save(arrays(7), f"{bucket}/run/next", base=f"{bucket}/run/one")
    Bucket.fault = None
    assert float(shardckpt.load(step)["frozen"].sum()) == 0


# verify=False


def damage(folder: Path) -> None:
    """Change the last byte of the tensors in a folder: of `frozen`, which lies there last or alone."""
    [file] = folder.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def unchecked(step: object) -> torch.Tensor:
    return shardckpt.load(step, verify=False)["frozen"]


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A base, and a step that refers to it."""
    based(str(tmp_path), tmp_path / "one")
    return tmp_path / "one", tmp_path / "step"


def rewrite_manifest(folder: Path) -> None:
    """Leave the files; say something else about the save that wrote them."""
    lied(folder, lambda _, manifest: manifest["about"].update(note="changed"))


def take_the_place(folder: Path) -> None:
    """Leave the files; commit another save."""

    def change(commit: dict[str, Any], manifest: dict[str, Any]) -> None:
        manifest["save"] = commit["save"] = "0another"

    lied(folder, change)


CHANGES: dict[str, Callable[[Path], object]] = {
    "removed but for the files": lambda folder: (folder / COMMIT).unlink(),
    "a damaged mark": lambda folder: (folder / COMMIT).write_bytes(b"{}"),
    "another manifest": rewrite_manifest,
    "another save": take_the_place,
}
"""What may become of a base, all but its files."""


class TestWithoutVerification:
    def test_a_base_that_is_what_it_was_is_not_hashed(self, pair: tuple[Path, Path]) -> None:
        base, step = pair
        damage(base)
        assert unchecked(step).any(), "the control: this is what verify=False asks for"
        with pytest.raises(ChecksumError):
            shardckpt.load(step)

    @pytest.mark.parametrize("change", CHANGES)
    def test_one_that_is_not_is_hashed_nevertheless(self, pair: tuple[Path, Path], change: str) -> None:
        base, step = pair
        CHANGES[change](base)
        assert not unchecked(step).any(), "its files are there and count"
        assert not shardckpt.load(step)["frozen"].any()
        damage(base)
        with pytest.raises(ChecksumError, match="block 0"):
            unchecked(step)

    def test_one_of_another_format_is_always_hashed(self, tmp_path: Path) -> None:
        net = torch.nn.Linear(50, 50).requires_grad_(False)
        (tmp_path / "hf").mkdir()
        save_file(dict(net.state_dict()), tmp_path / "hf" / "model.safetensors")
        shardckpt.save({"m": net}, tmp_path / "step", base=tmp_path / "hf", trainable_only=True)
        assert shardckpt.load(tmp_path / "step", verify=False)["m"]["weight"].equal(net.weight)
        damage(tmp_path / "hf")
        with pytest.raises(ChecksumError, match=r"model\.safetensors"):
            shardckpt.load(tmp_path / "step", verify=False)

    def test_the_files_of_the_step_itself_are_not(self, pair: tuple[Path, Path]) -> None:
        base, step = pair
        (base / COMMIT).unlink()
        damage(step)
        assert float(shardckpt.load(step, verify=False)["trained"][-1]) != 7

    def test_what_is_odd_about_a_base_is_told(self, pair: tuple[Path, Path]) -> None:
        base, step = pair
        assert not shardckpt.inspect(step).warnings
        rewrite_manifest(base)
        [warning] = shardckpt.inspect(step).warnings
        assert warning == f"the base {base} was changed since this was saved"
        (base / COMMIT).write_bytes(b"{}")
        [warning] = shardckpt.inspect(step).warnings
        assert "the base is damaged" in warning
        (base / COMMIT).unlink()
        assert not shardckpt.inspect(step).warnings, "this is what retention leaves"

    def test_every_damaged_block_of_a_changed_base_is_listed(self, pair: tuple[Path, Path]) -> None:
        base, step = pair
        (base / COMMIT).unlink()
        damage(base)
        [problem] = shardckpt.verify(step).problems
        assert "frozen" in problem.message
