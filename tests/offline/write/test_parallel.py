"""Several ranks, or several threads, write the files of one conversion: the bytes that one writes, or nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import shardckpt
from shardckpt.plan.layout.output_files import share_out
from tests.kit.ranks.harness import raised_everywhere, run
from tests.kit.runs.command import Outcome, run_here

ROWS = 64
MODEL = {f"layers.{n}.w": torch.randn(ROWS, n + 1) for n in range(9)}
MOMENTS = {name: {"exp_avg": 2 * value, "step": torch.tensor(1.0)} for name, value in MODEL.items()}


def write(folder: Path) -> Path:
    state = {"state": MOMENTS, "param_groups": [{"params": list(MODEL), "lr": 0.1, "betas": (0.9, 0.99)}]}
    torch.save({"model": MODEL, "optimizer": state}, folder / "src.pt")
    return folder / "src.pt"


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def _convert(_rank: int, _world: int, folder: Path, to: str, jobs: int) -> int:
    report = shardckpt.consolidate(
        folder / "src.pt", folder / f"many-{to}", to=to, part="all", max_shard_size=4000, parallel=True, jobs=jobs
    )
    return len(report.files)


@pytest.mark.parametrize("to", ["safetensors", "torch", "dcp"])
def test_ranks_write_the_bytes_that_one_process_writes(tmp_path: Path, to: str) -> None:
    source = write(tmp_path)
    report = shardckpt.consolidate(source, tmp_path / "one", to=to, part="all", max_shard_size=4000)
    assert len(report.files) > 2
    assert run(2, _convert, tmp_path, to, 1) == [len(report.files)] * 2
    assert content(tmp_path / f"many-{to}") == content(tmp_path / "one")
    shardckpt.consolidate(source, tmp_path / "jobs", to=to, part="all", max_shard_size=4000, jobs=3)
    assert content(tmp_path / "jobs") == content(tmp_path / "one")


def test_ranks_write_a_native_step_of_which_the_first_knows_every_hash(tmp_path: Path) -> None:
    source = write(tmp_path)
    one = shardckpt.consolidate(source, tmp_path / "one", to="native", part="all", max_shard_size=4000)
    assert len(one.files) > 3
    assert run(2, _convert, tmp_path, "native", 1) == [len(one.files)] * 2
    shardckpt.consolidate(source, tmp_path / "jobs", to="native", part="all", max_shard_size=4000, jobs=3)
    for made in (tmp_path / "many-native", tmp_path / "jobs"):
        assert _by_kind(made) == _by_kind(tmp_path / "one"), "the id of the save alone differs"
        assert shardckpt.verify(made).problems == ()
        assert shardckpt.verify(made).checked_bytes == shardckpt.verify(tmp_path / "one").checked_bytes
        assert shardckpt.diff(made, tmp_path / "one").same


def _by_kind(folder: Path) -> dict[str, int]:
    """Return the sizes of a step's files by what their names are without the id of the save."""
    return {re.sub(r"^[0-9a-z]{15}", "", file.name): file.stat().st_size for file in folder.iterdir()}


def _convert_far(_rank: int, _world: int, source: Path, folder: Path) -> None:
    shardckpt.consolidate(source, folder, max_shard_size=4000, parallel=True)


def test_a_path_may_be_as_long_as_paths_are(tmp_path: Path) -> None:
    source = write(tmp_path)
    far = tmp_path.joinpath(*("x" * 200 for _ in range(3)), "out")
    run(2, _convert_far, source, far)
    shardckpt.consolidate(source, tmp_path / "one", max_shard_size=4000)
    assert content(far) == content(tmp_path / "one")


def _fail(rank: int, _world: int, folder: Path, where: str) -> None:
    if rank == 1 and where == "write":
        from shardckpt.offline.write.conversion import ConversionPlan

        def broken(*_args: object) -> None:
            raise OSError("no such luck")

        ConversionPlan.write_payload = broken  # type: ignore[method-assign]
    shardckpt.consolidate(folder / "src.pt", folder / "out", max_shard_size=4000, parallel=True)


def test_a_rank_that_fails_is_named_on_the_others_and_nothing_is_left(tmp_path: Path) -> None:
    write(tmp_path)
    first, second = raised_everywhere(2, _fail, tmp_path, "write")
    assert (first.name, second.name) == ("RankError", "OSError")
    assert "no such luck" in first.message
    assert "rank 1" in first.message
    assert sorted(file.name for file in tmp_path.iterdir()) == ["src.pt"]


def test_a_target_that_exists_is_refused_on_every_rank(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    first, second = raised_everywhere(2, _fail, tmp_path, "")
    assert (first.name, second.name) == ("TargetExistsError", "RankError")
    assert (tmp_path / "out" / "mine").read_text() == "x"


def _convert_to_one(_rank: int, _world: int, folder: Path, name: str) -> int:
    return len(shardckpt.consolidate(folder / "src.pt", folder / name, overwrite=True, parallel=True).files)


@pytest.mark.parametrize("name", ["out.pt", "out.safetensors"])
def test_one_file_is_written_by_the_first_rank(name: str, tmp_path: Path) -> None:
    source = write(tmp_path)
    (tmp_path / "alone").mkdir()
    shardckpt.consolidate(source, tmp_path / "alone" / name)
    for _ in range(2):  # the second time it is replaced
        assert run(2, _convert_to_one, tmp_path, name) == [1, 1]
        assert (tmp_path / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["alone", name, "src.pt"])


def test_files_are_shared_out_by_size() -> None:
    files = [SimpleNamespace(name=str(i), nbytes=n) for i, n in enumerate((5, 1, 1, 1, 1, 1))]
    shares = share_out(files, 2)  # type: ignore[arg-type]
    assert [sum(file.nbytes for file in share) for share in shares] == [5, 5]
    assert share_out([], 2) == [[], []]


@pytest.mark.slow
def test_the_command_works_under_torchrun(tmp_path: Path) -> None:
    source = write(tmp_path)
    shardckpt.consolidate(source, tmp_path / "one", max_shard_size=4000)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "shardckpt_cli"]
    command += ["consolidate", str(source), str(tmp_path / "many"), "--max-shard-size", "4000"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.count("wrote 9 tensors") == 1, "the first rank alone tells"
    assert content(tmp_path / "many") == content(tmp_path / "one")


@pytest.fixture
def run_in_world(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Runs the command with a WORLD_SIZE and without a RANK."""
    monkeypatch.delenv("RANK", raising=False)

    def run_command(world: str, *arguments: object) -> Outcome:
        monkeypatch.setenv("WORLD_SIZE", world)
        return run_here(*arguments)

    return run_command


def test_a_number_of_ranks_without_a_rank_is_an_error_that_says_so(
    run_in_world: Callable[..., Outcome], tmp_path: Path
) -> None:
    done = run_in_world("2", "consolidate", write(tmp_path), tmp_path / "out", "--parallel")
    assert done.code == 2
    assert "environment variable RANK expected, but not set" in done.err
    assert "--no-parallel" in done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("world", ["", "1", "many"])
def test_a_process_without_a_number_of_ranks_is_alone(
    run_in_world: Callable[..., Outcome], world: str, tmp_path: Path
) -> None:
    done = run_in_world(world, "consolidate", write(tmp_path), tmp_path / "out.pt", "--quiet")
    assert (done.code, done.err) == (0, "")
