"""A run on a mount that uploads each file some time after it is closed, as rclone's: what other machines see of it."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path

import pytest
import torch

from shardckpt import Checkpointer
from shardckpt.storage.local import LocalWriter
from tests.kit.runs.tier_runs import make_state


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run as its own machine sees it."""
    run = tmp_path_factory.mktemp("mount") / "run"
    ck = Checkpointer(run)
    for step in (1, 2):
        ck.save(step, make_state(step))
    return run


def list_uploads(written: Path) -> list[str]:
    return sorted(path.name for path in (written / "step-00000002").iterdir())


def upload(written: Path, remote: Path, names: tuple[str, ...]) -> Iterator[int]:
    """Upload the last step's files in an order; yield after each how many are still missing."""
    shutil.copytree(written / "step-00000001", remote / "step-00000001")
    (remote / "step-00000002").mkdir()
    for number, name in enumerate(names, 1):
        shutil.copy(written / "step-00000002" / name, remote / "step-00000002" / name)
        yield len(names) - number


def restore(remote: Path) -> tuple[int | None, float]:
    into = make_state(-1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Checkpointer(remote).restore(into), float(into["w"][0])


def test_a_step_exists_elsewhere_once_its_commit_is_uploaded_last(written, tmp_path):
    """Such mounts upload in the order of closing, and `COMMIT` is closed last."""
    names = [name for name in list_uploads(written) if name != "COMMIT"]
    for number, missing in enumerate(upload(written, tmp_path, (*names, "COMMIT")), 1):
        assert Checkpointer(tmp_path).latest() == (1 if missing else 2), f"after {number} files"
        assert restore(tmp_path) == ((1, 1.0) if missing else (2, 2.0))


def test_a_step_that_is_half_uploaded_is_never_restored_in_any_order(written, tmp_path):
    """A renamed folder is uploaded in any order, so `COMMIT` may come first."""
    for at, names in enumerate(permutations(list_uploads(written))):
        remote = tmp_path / str(at)
        for missing in upload(written, remote, names):
            assert restore(remote) == ((1, 1.0) if missing else (2, 2.0)), names


def test_the_commit_is_the_last_file_that_a_save_closes(tmp_path, monkeypatch):
    closed: list[str] = []
    close = LocalWriter.close

    def note(writer: LocalWriter) -> None:
        if writer._fd >= 0:
            closed.append(Path(writer._path).name)
        close(writer)

    monkeypatch.setattr(LocalWriter, "close", note)
    Checkpointer(tmp_path / "run").save(1, {"w": torch.ones(3)})
    assert len(closed) == 3 and closed[-1] == "COMMIT"
