"""`shardckpt stream` lists, checks and exports versions."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.kit.runs.command import run_here
from tests.kit.writers.stream_writer import Weights, assert_same, delta_of, flip, publish


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Weights]]:
    url = tmp_path_factory.mktemp("cli") / "stream"
    return url, publish(url)


def test_versions_are_shown_in_a_table(made: tuple[Path, dict[int, Weights]]) -> None:
    found = run_here("stream", "ls", made[0])
    lines = found.out.splitlines()
    assert lines[0].split() == ["version", "epoch", "published", "base", "changes", "changed", "anchor"]
    assert lines[1].split()[:2] == ["10", "1"]
    assert lines[1].split()[-1] == lines[4].split()[-1] == "yes"
    assert lines[-1] == f"{made[0]}: 6 versions of 2.5 kB"


def test_a_stream_is_intact_or_its_problems_are_listed(made: tuple[Path, dict[int, Weights]]) -> None:
    found = run_here("stream", "verify", made[0])
    assert (found.code, found.out.splitlines()[-1]) == (0, f"{made[0]}: 6 versions of 2.5 kB, intact")
    file = delta_of(made[0], 12)
    good = file.read_bytes()
    flip(file, -1)
    found = run_here("stream", "verify", made[0])
    file.write_bytes(good)
    assert found.code == 1
    assert "version 12 (epoch 1): " in found.out
    assert found.out.splitlines()[-1].endswith("6 versions of 2.5 kB, 1 with problems")


def test_a_version_is_exported_for_transformers(made: tuple[Path, dict[int, Weights]], tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text('{"model_type": "llama"}')
    out = tmp_path / "out"
    found = run_here("stream", "export", f"{made[0]}@12", out, "--config-from", tmp_path / "base")
    assert found.code == 0, found.err
    assert_same(load_file(out / "model.safetensors"), made[1][12])
    assert (out / "config.json").exists()
    assert run_here("stream", "export", f"{made[0]}@12", out).code == 2, "it is not replaced"
    assert run_here("stream", "export", f"{made[0]}@13", out, "--overwrite").code == 0
    assert_same(load_file(out / "model.safetensors"), made[1][13])


def test_versions_are_exported_as_changes(made: tuple[Path, dict[int, Weights]], tmp_path: Path) -> None:
    found = run_here("stream", "export", made[0], tmp_path / "out", "--dialect", "hf-delta", "--checksum", "adler32")
    assert found.out.splitlines()[-1] == f"{made[0]}: 6 versions of 2.5 kB, written to {tmp_path / 'out'}"
    assert len([*(tmp_path / "out").iterdir()]) == 6


def test_an_export_follows_the_stream_for_a_time(made: tuple[Path, dict[int, Weights]], tmp_path: Path) -> None:
    found = run_here("stream", "export", made[0], tmp_path / "out", "--dialect", "hf-delta", "--follow", "0.01")
    assert found.out.splitlines()[-1].endswith(f"6 versions of 2.5 kB, written to {tmp_path / 'out'}")
    assert run_here("verify", tmp_path / "out" / f"weight_v{max(made[1]):06d}").code == 0


def test_a_compaction_writes_an_anchor_and_removes_old_versions(tmp_path: Path) -> None:
    made = publish(tmp_path / "s")
    newest = max(made)
    found = run_here("stream", "compact", tmp_path / "s", "--keep-anchors", "1", "--dry-run")
    assert "removed" in found.out
    assert run_here("stream", "ls", tmp_path / "s").out.splitlines()[-1].startswith(f"{tmp_path / 's'}: 6 versions")
    found = run_here("stream", "compact", tmp_path / "s", "--keep-anchors", "1")
    assert found.code == 0, found.err
    assert found.out.splitlines()[-1].endswith("1 version of 2.5 kB, 5 removed")
    assert run_here("stream", "verify", tmp_path / "s").code == 0
    out = tmp_path / "out"
    assert run_here("stream", "export", f"{tmp_path / 's'}@{newest}", out).code == 0
    assert_same(load_file(out / "model.safetensors"), made[newest])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prune", "S"], "unknown action of `stream`; found prune; expected ls, verify, export, compact, serve"),
        (["ls", "S", "x"], "`stream export` needs a folder to write, and no other action takes one"),
        (["export", "S"], "`stream export` needs a folder to write"),
        (["export", "S", "x", "--dialect", "y"], "unknown --dialect; found y"),
        (["ls", "S", "--dialect", "hf-delta"], "--dialect"),
        (["export", "S", "x", "--checksum", "adler32"], "--checksum"),
        (["export", "S", "x", "--dialect", "hf-delta", "--overwrite"], "--overwrite"),
        (["export", "S", "x", "--follow", "3"], "--follow"),
        (["ls", "S", "--keep-anchors", "1"], "--keep-anchors"),
        (["ls", "S", "--listen", "h:1"], "--listen"),
        (["serve", "S", "--listen", "h"], "--listen must be HOST:PORT; found h"),
        (["serve", "/no/such"], "no such folder"),
    ],
)
def test_options_that_do_nothing_are_refused(words: list[str], message: str) -> None:
    found = run_here("stream", *words)
    assert found.code == 2
    assert message in found.err
