"""What a step says of other folders is checked before any of them is looked at, and nothing else is read there."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardckpt
from shardckpt.errors import CheckpointError, FormatError, UnsafeError, UsageError
from shardckpt.format.detect import open_checkpoint
from shardckpt.format.native_bases import is_base_url, reference, resolved
from shardckpt.format.native_manifest import COMMIT
from shardckpt.format.native_payload import canonical

GOLDEN = Path(__file__).parent / "golden" / "1.0"
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
    data = canonical(manifest)
    file.write_bytes(data)
    commit["manifest"] = [file.name, len(data), hashlib.sha256(data).hexdigest()]
    line = canonical(commit) + b"\n"
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


URLS = ["", "..", "../", "../..", "../../etc", "../a/b", "../a/../..", "one", "./one", "../a\0b", 7, None]
"""What is no reference."""

LIES: dict[str, Change] = {
    "a file of a base has no hashes": both("files", (1, 2), None),
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


@pytest.mark.parametrize("url", URLS, ids=range(len(URLS)))
def test_a_reference_is_a_folder_beside_the_step_or_absolute(step: Path, url: object) -> None:
    lied(step, moved_to(url))
    with pytest.raises(UnsafeError, match="no reference to a base"):
        open_checkpoint(str(step))
    assert not is_base_url(url)


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


def test_references_are_relative_beside_and_absolute_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert reference("run/two", "run/one/") == "../one"
    assert reference(str(tmp_path / "run" / "two"), "run/one") == "../one"
    assert reference("run/two", "other/one") == str(tmp_path / "other" / "one")
    assert reference("s3://b/run/two", "s3://b/run/one") == "../one"
    assert reference("s3://b/run/two", "s3://b/one") == "s3://b/one"
    assert reference("s3://b/run/two", str(tmp_path / "one")) == str(tmp_path / "one")
    assert resolved("s3://b/run/two/", "../one") == "s3://b/run/one"
    assert resolved("run/two", "../one") == str(tmp_path / "run" / "one")
    assert resolved("run/two", "gs://b/one") == "gs://b/one"
    with pytest.raises(UsageError, match="its own base"):
        reference("run/two", str(tmp_path / "run" / "two"))


def test_a_link_to_a_step_finds_what_lies_beside_the_step(step: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    link = tmp_path_factory.mktemp("links") / "latest"
    link.symlink_to(step)
    assert shardckpt.verify(str(link)).ok
    assert shardckpt.load(link)["step"] == 100


def test_without_its_base_it_can_be_looked_at(step: Path) -> None:
    shutil.rmtree(step.parent / "digests")
    found = shardckpt.inspect(str(step))
    assert len(found.tensors) == 3
    assert any("../digests/" in warning for warning in found.warnings)
    with pytest.raises(CheckpointError) as caught:
        shardckpt.load(step)
    assert not isinstance(caught.value, FormatError)
