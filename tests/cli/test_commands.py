"""The command: exit codes, one line on stderr, silence when nobody looks, and nothing half-written."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import shardckpt
from shardckpt.storage.local import LocalStore
from tests.kit.runs.command import ENVIRONMENT, Outcome, finish, run, run_here, start, start_slow
from tests.kit.writers.native_writer import SAVE, write_step

VERBS = ["consolidate", "convert", "rekey", "inspect", "verify", "diff", "ls", "prune"]


@pytest.fixture
def src(tmp_path: Path) -> Path:
    folder = tmp_path / "src"
    folder.mkdir()
    save_file({"a.w": torch.arange(6.0), "b": torch.ones(2)}, folder / "model.safetensors")
    return folder


def one_line(found: Outcome) -> str:
    """Return the one line on stderr; anything else is a failure."""
    lines = found.err.splitlines()
    assert len(lines) == 1, found
    assert lines[0].startswith("shardckpt: ")
    assert lines[0].isprintable()
    return lines[0]


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


@contextlib.contextmanager
def permissions_enforced() -> Iterator[None]:
    """Run the body bound by the permissions of files, as root too: without the capability to override them."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "capset"):
        pytest.skip("root may write anywhere, and this system has no capabilities to drop")
    header = _CapabilityHeader(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3 of this thread
    held = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable of capabilities 0 to 31, then of 32 to 63
    assert libc.capget(ctypes.byref(header), held) == 0
    dropped = (ctypes.c_uint32 * 6)(held[0] & ~(1 << 1), *held[1:])  # CAP_DAC_OVERRIDE is 1
    assert libc.capset(ctypes.byref(header), dropped) == 0
    try:
        yield
    finally:
        assert libc.capset(ctypes.byref(header), held) == 0


def sparse(folder: Path, nbytes: int) -> Path:
    """A model of zeros that takes no room, for copies that take their time."""
    folder.mkdir()
    body = json.dumps({"w": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(body)) + body)
        file.truncate(8 + len(body) + nbytes)
    return folder


class TestExitCodes:
    def test_done_is_0(self, src: Path, tmp_path: Path) -> None:
        assert run_here("consolidate", src, tmp_path / "out").code == 0
        assert run_here("convert", src, tmp_path / "out2").code == 0
        assert run_here("inspect", src).code == 0
        assert run_here("verify", src).code == 0
        assert run_here("diff", src, tmp_path / "out").code == 0

    def test_a_damaged_checkpoint_is_1(self, src: Path, tmp_path: Path) -> None:
        file = src / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
        found = run_here("consolidate", src, tmp_path / "out")
        assert found.code == 1
        assert "model.safetensors" in one_line(found)
        assert run_here("inspect", src).code == 0, "a short file is a warning here"
        assert run_here("verify", src).code == 1
        assert not (tmp_path / "out").exists()

    def test_problems_of_one_file_are_cut_and_counted(self, tmp_path: Path) -> None:
        folder = write_step(tmp_path / "step", {f"w{number:02}": torch.ones(2) for number in range(20)})
        [payload] = folder.glob("*.safetensors")
        payload.unlink()
        found = run_here("verify", folder)
        *listed, more, summary = found.out.splitlines()
        assert (found.code, len(listed)) == (1, 16)
        assert more == f"{payload.name}: missing file: 4 more problems: --json lists all"
        assert summary.endswith("20 tensors, 20 problems")
        assert len(json.loads(run_here("verify", folder, "--json").out)["problems"]) == 20

    def test_statistics_are_sorted_and_nans_are_1(self, tmp_path: Path) -> None:
        tensors = {f"layers.{at}.w": torch.full((4,), float(at)) for at in range(12)}
        save_file(tensors, tmp_path / "a.safetensors")
        found = run_here("stats", tmp_path / "a.safetensors", "--sort", "l2", "--top", "2")
        assert found.code == 0
        lines = found.out.splitlines()
        assert [line.split()[0] for line in lines[:3]] == ["tensor", "layers.11.w", "layers.10.w"]
        assert lines[3].endswith("12 tensors, 0 NaNs, 0 Infs; 0 stored at save, 12 computed")
        tensors["layers.7.w"][1] = float("nan")
        save_file(tensors, tmp_path / "a.safetensors")
        found = run_here("stats", tmp_path / "a.safetensors", "--by-layer", "--sort", "bad", "--top", "1")
        assert found.code == 1 and found.out.splitlines()[1].split()[:2] == ["layers.7", "1"]

    def test_differences_of_integers_come_after_those_of_floats(self, tmp_path: Path) -> None:
        for name, at in (("a", 0), ("b", 1)):
            tensors = {"rng": torch.tensor([at * 200], dtype=torch.uint8), "w": torch.tensor([float(at)])}
            save_file(tensors, tmp_path / f"{name}.safetensors")
        command = ("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors")
        for sort, first in (("l2", "w"), ("max", "w"), ("name", "rng")):
            assert run_here(*command, "--sort", sort).out.startswith(f"{first} "), sort
            assert run_here(*command, "--sort", sort, "--by-layer").out.startswith(f"{first} "), sort

    def test_differences_are_sorted_summed_by_layer_and_cut(self, tmp_path: Path) -> None:
        tensors = {f"layers.{at}.w": torch.ones(4) for at in range(12)}
        save_file(tensors, tmp_path / "a.safetensors")
        changed = {name: tensor + 10.0 ** -(at % 5) for at, (name, tensor) in enumerate(tensors.items())}
        save_file(changed | {"layers.3.w": tensors["layers.3.w"]}, tmp_path / "b.safetensors")
        command = ("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors")
        lines = run_here(*command, "--sort", "rel", "--top", "3").out.splitlines()
        assert [line.split()[0] for line in lines] == ["layers.0.w", "layers.10.w", "layers.5.w", "8", "12"]
        assert "L2 2, rel L2 0.5" in lines[0]
        assert lines[3:] == ["8 rows more", "12 tensors in both, 1 equal, 11 differences"]
        lines = run_here(*command, "--by-layer").out.splitlines()
        assert [line.split()[0] for line in lines[:-1]] == [f"layers.{at}" for at in range(12) if at != 3]
        assert "--sort must be one of" in run_here(*command, "--sort", "size").err

    def test_checkpoints_that_differ_are_1(self, src: Path, tmp_path: Path) -> None:
        save_file({"a.w": torch.zeros(6), "b": torch.ones(2)}, tmp_path / "b.safetensors")
        found = run_here("diff", src, tmp_path / "b.safetensors")
        assert (found.code, found.err) == (1, "")
        assert "a.w" in found.out

    def test_other_bits_of_equal_numbers_are_explained(self, tmp_path: Path) -> None:
        for name, zero in (("a", 0.0), ("b", -0.0)):
            save_file({"w": torch.full((2,), zero)}, tmp_path / f"{name}.safetensors")
        found = run_here("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors")
        assert found.code == 1
        assert "equal numbers with other bits" in found.out

    @pytest.mark.parametrize(
        "args",
        [
            ("consolidate", "SRC/none", "OUT"),
            ("consolidate", "SRC"),
            ("consolidate", "SRC", "OUT", "--part", "weights"),
            ("consolidate", "SRC", "OUT", "--dtype", "int8"),
            ("consolidate", "SRC", "OUT", "--max-memory", "1kB"),
            ("consolidate", "SRC", "OUT", "--jobs", "0"),
            ("consolidate", "SRC", "OUT", "--jobs", "many"),
            ("consolidate", "SRC", "OUT", "--no-such-option"),
            ("consolidate", "SRC", "OUT", "--include", "nothing.*"),
            ("consolidate", "SRC", "SRC"),
            ("consolidate", "SRC", "OUT.pt", "--to", "dcp"),
            ("consolidate", "nosuch://bucket/a", "OUT"),
            ("inspect", "SRC/none"),
            ("inspect", "EMPTY"),
            ("inspect", ""),
            ("inspect", "/dev/zero"),
            ("inspect", "x" * 5000),
            ("inspect", "a\0b"),
            ("consolidate", "SRC", ""),
            ("consolidate", "SRC", "/"),
            ("inspect",),
            ("verify", "SRC/none"),
            ("diff", "SRC"),
            ("diff", "SRC", "EMPTY"),
            ("merge",),
            ("--no-such-option",),
        ],
    )
    def test_a_call_that_cannot_be_is_2(self, args: tuple[str, ...], src: Path, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        places = {"SRC": src, "OUT": tmp_path / "out", "EMPTY": tmp_path / "empty"}
        pattern = re.compile("|".join(places))
        found = run_here(*(pattern.sub(lambda match: str(places[match[0]]), arg) for arg in args))
        assert found.code == 2
        one_line(found)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "src"]

    def test_a_target_that_is_taken_is_2(self, src: Path, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        save_file({"old": torch.ones(3)}, tmp_path / "out" / "model.safetensors")
        found = run_here("consolidate", src, tmp_path / "out")
        assert found.code == 2
        assert "--overwrite" in one_line(found)
        assert run_here("consolidate", src, tmp_path / "out", "--overwrite").code == 0

    def test_a_target_that_may_not_be_written_is_3(self, src: Path, tmp_path: Path) -> None:
        (tmp_path / "locked").mkdir(mode=0o500)
        with permissions_enforced():
            found = run_here("consolidate", src, tmp_path / "locked" / "out")
        assert found.code == 3
        one_line(found)

    def test_a_target_below_a_file_is_3_or_2(self, src: Path, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("x")
        found = run_here("consolidate", src, tmp_path / "file" / "out")
        assert found.code in {2, 3}
        one_line(found)


class TestOutput:
    def test_json_of_every_command_parses(self, src: Path, tmp_path: Path) -> None:
        for args in (
            ("consolidate", src, tmp_path / "out"),
            ("convert", src, tmp_path / "out2", "--dry-run"),
            ("inspect", src),
            ("verify", src),
            ("diff", src, src),
        ):
            found = run_here(*args, "--json")
            assert found.code == 0
            assert isinstance(json.loads(found.out), dict)
            assert found.err == ""

    def test_numbers_that_json_lacks_are_not_printed(self, tmp_path: Path) -> None:
        save_file({"w": torch.tensor([float("inf")])}, tmp_path / "a.safetensors")
        save_file({"w": torch.tensor([1.0])}, tmp_path / "b.safetensors")

        def refuse(name: str) -> None:
            raise AssertionError(f"{name} is no JSON")

        found = run_here("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--json")
        json.loads(found.out, parse_constant=refuse)

    def test_quiet_prints_nothing(self, src: Path, tmp_path: Path) -> None:
        found = run("consolidate", src, tmp_path / "out", "--quiet")
        assert (found.code, found.out, found.err) == (0, "", "")

    def test_what_is_left_out_is_said_on_stderr(self, tmp_path: Path) -> None:
        torch.save({"model": {"w": torch.ones(2)}, "trainer": {"step": 3}}, tmp_path / "run.pt")
        found = run_here("consolidate", tmp_path / "run.pt", tmp_path / "out")
        assert found.err == "left out: trainer\n"
        assert "trainer" not in found.out

    def test_without_a_terminal_there_is_no_progress(self, src: Path, tmp_path: Path) -> None:
        found = run("consolidate", src, tmp_path / "out")
        assert "no config.json" in found.err
        assert len(found.err.splitlines()) == 1
        assert "wrote 2 tensors" in found.out

    def test_a_dry_run_says_what_it_would_and_writes_nothing(self, src: Path, tmp_path: Path) -> None:
        found = run_here("consolidate", src, tmp_path / "out", "--dry-run")
        assert "would write 2 tensors" in found.out
        assert sorted(p.name for p in tmp_path.iterdir()) == ["src"]

    def test_a_report_of_many_files_is_cut(self, tmp_path: Path) -> None:
        save_file({f"w{i}": torch.ones(1) for i in range(100)}, tmp_path / "src.safetensors")
        found = run_here("consolidate", tmp_path / "src.safetensors", tmp_path / "out", "--max-shard-size", "4B")
        assert sum("-of-00100.safetensors" in line for line in found.out.splitlines()) == 40
        assert "  and 60 more files: --json lists all\n" in found.out

    def test_inspect_shows_a_table_or_a_tree(self, src: Path) -> None:
        table = run_here("inspect", src).out
        assert "a.w" in table
        assert "float32" in table
        tree = run_here("inspect", src, "--tree").out
        assert [line.split()[0] for line in tree.splitlines()[-4:]] == ["all", "a", "w", "b"]

    def test_names_with_newlines_and_colours_stay_on_their_line(self, tmp_path: Path) -> None:
        save_file({"a\nb\x1b[31m\u202e": torch.ones(1), "c\r": torch.ones(1)}, tmp_path / "a.safetensors")
        for args in (("inspect",), ("inspect", "--tree"), ("verify",)):
            found = run_here(args[0], tmp_path / "a.safetensors", *args[1:])
            assert found.code == 0
            assert all(line.isprintable() for line in found.out.splitlines())
        save_file({"a\nb\x1b[31m\u202e": torch.ones(2)}, tmp_path / "b.safetensors")
        found = run_here("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors")
        assert all(line.isprintable() for line in found.out.splitlines())
        assert len(found.out.splitlines()) == 3

    def test_a_reader_that_leaves_early_is_no_error(self, tmp_path: Path) -> None:
        save_file({f"layer.{i}.with.a.long.name": torch.ones(1) for i in range(4000)}, tmp_path / "a.safetensors")
        process = start("inspect", tmp_path / "a.safetensors")
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
        process.stderr.close()
        assert process.wait(60) == 0

    def test_help_is_0_and_names_every_command(self) -> None:
        found = run("--help")
        assert found.code == 0
        assert all(verb in found.out for verb in VERBS)
        for verb in VERBS:
            assert run_here(verb, "--help").code == 0

    def test_no_summary_of_a_command_is_cut(self) -> None:
        assert not [line for line in run("--help").out.splitlines()[1:] if line.endswith("...")]


def many(folder: Path) -> Path:
    """Eight tensors of a MiB, for copies of eight steps."""
    folder.mkdir()
    save_file({f"t{i}": torch.zeros(1 << 18) for i in range(8)}, folder / "model.safetensors")
    return folder


def begun(folder: Path, times: int = 2) -> None:
    """Wait until a copy below `folder` is well under way."""
    wait_for(lambda: sum(f.stat().st_size > 0 for f in folder.glob(".*.partial-*/*.safetensors")) >= times)


SHARDED = ("--max-shard-size", "1.5MB")


class TestSignals:
    @pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
    @pytest.mark.parametrize("jobs", [1, 2])
    def test_a_signal_in_the_middle_of_a_copy_leaves_nothing(
        self, number: signal.Signals, code: int, jobs: int, tmp_path: Path
    ) -> None:
        folder = many(tmp_path / "src")
        process = start_slow("consolidate", folder, tmp_path / "out", *SHARDED, "--jobs", jobs)
        begun(tmp_path)
        process.send_signal(number)
        found = finish(process)
        assert found.code == code
        assert "no unfinished result was left" in one_line(found)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["src"]

    def test_the_content_of_the_target_survives_a_signal(self, tmp_path: Path) -> None:
        folder = many(tmp_path / "src")
        (tmp_path / "out").mkdir()
        save_file({"old": torch.ones(3)}, tmp_path / "out" / "model.safetensors")
        before = (tmp_path / "out" / "model.safetensors").read_bytes()
        process = start_slow("consolidate", folder, tmp_path / "out", "--overwrite", *SHARDED)
        begun(tmp_path)
        process.send_signal(signal.SIGTERM)
        assert finish(process).code == 143
        assert [(p.name, p.read_bytes()) for p in (tmp_path / "out").iterdir()] == [("model.safetensors", before)]
        assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "src"]

    @pytest.mark.parametrize("jobs", [1, 2])
    def test_a_single_file_is_not_left_half_written(self, jobs: int, tmp_path: Path) -> None:
        folder = many(tmp_path / "src")
        process = start_slow("consolidate", folder, tmp_path / "one.safetensors", "--jobs", jobs)
        wait_for(lambda: any(f.stat().st_size for f in tmp_path.rglob("*") if f.is_file() and "src" not in f.parts))
        process.send_signal(signal.SIGTERM)
        assert finish(process).code == 143
        assert sorted(p.name for p in tmp_path.iterdir()) == ["src"]

    def test_a_killed_run_does_not_block_the_next(self, tmp_path: Path) -> None:
        folder = many(tmp_path / "src")
        process = start_slow("consolidate", folder, tmp_path / "out", *SHARDED)
        begun(tmp_path)
        process.kill()
        finish(process)
        assert len(list(tmp_path.iterdir())) == 2, "a killed run leaves its partial folder, and no target"
        assert run("consolidate", folder, tmp_path / "out").code == 0
        assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "src"]


class TestRoom:
    def test_a_result_larger_than_the_disk_is_refused_before_the_first_byte(self, src: Path, tmp_path: Path) -> None:
        free = shutil.disk_usage(tmp_path).free
        huge = sparse(tmp_path / "huge", min(free * 4, 1 << 43))
        found = run_here("consolidate", huge, tmp_path / "out")
        assert found.code == 3
        assert "space" in one_line(found) or "room" in found.err
        assert sorted(p.name for p in tmp_path.iterdir()) == ["huge", "src"]

    def test_a_disk_that_fills_up_meanwhile_is_3(
        self, src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        for name in ("write", "pwrite", "copy_file_range", "sendfile", "writev"):
            monkeypatch.setattr(os, name, full)
        found = run_here("consolidate", src, tmp_path / "out")
        monkeypatch.undo()
        assert found.code == 3
        one_line(found)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["src"]

    def test_a_limit_on_file_size_is_3_and_leaves_nothing(self, tmp_path: Path) -> None:
        folder = sparse(tmp_path / "src", 8 << 20)

        def limited() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

        found = run("consolidate", folder, tmp_path / "out", preexec_fn=limited)
        assert found.code == 3
        one_line(found)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["src"]

    def test_a_source_that_cannot_be_read_is_3(
        self, src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*_: object) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        real = LocalStore.read
        calls = 0

        def sometimes(self: LocalStore, reads: object) -> None:
            nonlocal calls
            calls += 1
            if calls > 3:
                broken()
            real(self, reads)  # type: ignore[arg-type]

        monkeypatch.setattr(LocalStore, "read", sometimes)
        found = run_here("consolidate", src, tmp_path / "out", "--dtype", "bf16")
        monkeypatch.undo()
        assert found.code == 3
        one_line(found)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["src"]


def test_a_fault_of_ours_is_one_line_too(src: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: str) -> None:
        raise RuntimeError("a\nb")

    monkeypatch.setattr(shardckpt, "inspect", broken)
    found = run_here("inspect", src)
    assert found.code == 1
    assert "fault in shardckpt" in one_line(found)


@pytest.mark.parametrize("verb", VERBS)
def test_no_command_imports_torch(verb: str, src: Path, tmp_path: Path) -> None:
    more = {"diff": [src], "rekey": [tmp_path / "out", "--to-ids"]}
    if verb == "rekey":
        save_file({"b/m": torch.ones(2)}, src / "optimizer.safetensors")
        (src / "param_groups.json").write_text('{"param_groups": [{"params": ["b"]}]}')
    place = src
    if verb in ("ls", "prune"):
        place = tmp_path / "run"
        place.mkdir()
    args = [verb, *map(str, [place, *more.get(verb, [tmp_path / "out"] if verb.startswith("con") else [])])]
    code = (
        "import sys; from shardckpt_cli.app import main\n"
        f"sys.argv[1:] = {args!r}\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "print([m for m in ('torch', 'transformers', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.stdout.splitlines()[-1] == "[]"


def wait_for(ready: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.002)


class TestRepair:
    def test_it_says_what_it_wrote_and_what_is_lost(self, tmp_path: Path) -> None:
        step = write_step(tmp_path / "step", {"model": {"w": torch.ones(3)}, "n": 5})
        assert run_here("repair", step).out == f"{step}: 1 tensor in 1 file: intact\n"
        (step / "COMMIT").unlink()
        assert run_here("verify", step).code == 1
        done = f"write {SAVE}.manifest.json and COMMIT"
        assert run_here("repair", step, "--dry-run").out == f"{step}: 1 tensor in 1 file: would {done}\n"
        found = run_here("repair", step)
        assert (found.code, found.out, found.err) == (
            0,
            f"{step}: 1 tensor in 1 file: wrote COMMIT\n".replace("wrote COMMIT", f"wrote{done[5:]}"),
            "",
        )
        assert run_here("verify", step).code == 0

    def test_what_cannot_be_repaired_is_one_line(self, src: Path) -> None:
        found = run_here("repair", src)
        assert found.code == 2
        assert "no payload files" in one_line(found)

    def test_json(self, tmp_path: Path) -> None:
        step = write_step(tmp_path / "step", {"model": {"w": torch.ones(3)}})
        assert json.loads(run_here("repair", step, "--json").out)["save"] == SAVE


class TestReshard:
    def test_it_says_what_it_wrote(self, src: Path, tmp_path: Path) -> None:
        found = run_here("reshard", src, tmp_path / "out", "--world-size", 3)
        assert (found.code, found.err) == (0, "")
        assert "wrote 2 tensors, 32 B, in 3 files" in found.out
        assert run_here("verify", tmp_path / "out").code == 0
        assert run_here("diff", src, tmp_path / "out").code == 0
        assert run_here("reshard", src, tmp_path / "out", "--world-size", 3).code == 2

    def test_the_world_size_is_needed(self, src: Path, tmp_path: Path) -> None:
        assert "--world-size" in one_line(run_here("reshard", src, tmp_path / "out"))


class TestRekey:
    def test_one_of_its_five_ways_is_chosen(self, src: Path, tmp_path: Path) -> None:
        for flags in ((), ("--to-ids", "--flatten")):
            found = run_here("rekey", src, tmp_path / "out", *flags)
            assert found.code == 2
            assert "--to-names" in one_line(found)

    def test_it_says_what_it_did(self, tmp_path: Path) -> None:
        state = {"state": {"w": {"m": torch.ones(3)}}, "param_groups": [{"lr": 0.1, "params": ["w"]}]}
        torch.save({"model": {"w": torch.zeros(3)}, "optimizer": state}, tmp_path / "x.pt")
        found = run_here("rekey", tmp_path / "x.pt", tmp_path / "out", "--to-ids")
        assert (found.code, found.err) == (0, "")
        assert "wrote 2 tensors" in found.out
        assert run_here("inspect", tmp_path / "out").code == 0


def test_formats_shows_the_formats_and_what_they_look_for() -> None:
    lines = run_here("formats").out.splitlines()
    assert lines[0].split() == ["format", "recognized", "by"]
    assert lines[1].split() == ["native", "a", "step", "of", "shardckpt", "(COMMIT)"]
    assert "dcp" in [line.split()[0] for line in lines]


@pytest.mark.parametrize("verb", ["diff", "stats", "history", "bisect"])
def test_commands_that_write_nothing_read_their_part(verb: str) -> None:
    assert "Sections to read" in " ".join(run_here(verb, "--help").out.split())


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("consolidate SRC OUT --keep-fp32 b", "--keep-fp32 does nothing without --dtype, --quantize or --dequantize"),
        ("consolidate SRC OUT --part optim --dtype bf16", "--dtype casts the model, which --part optim leaves out"),
        ("consolidate SRC OUT --part optim --weights ema", "--weights chooses model weights"),
        ("consolidate SRC OUT --optim-keys ids", "--optim-keys does nothing without --part optim or all"),
        ("inspect SRC --json --tree", "--tree does nothing with --json"),
        ("inspect SRC --html OUT.html --tree", "--tree does nothing with --html"),
        ("diff SRC SRC --json --top 3", "--top does nothing with --json"),
        ("diff SRC SRC --json --sort l2", "--sort does nothing with --json"),
        ("stats SRC --json --by-layer", "--by-layer does nothing with --json"),
        ("history SRC --json --stat max", "--stat does nothing with --json"),
        ("history SRC --html OUT.html --stat max", "--stat does nothing with --html"),
        ("ls SRC --json --metric loss", "--metric does nothing with --json"),
        ("ls SRC --mode max", "--mode does nothing without -l or --metric"),
        ("ls SRC --durability -l", "-l does nothing with --durability"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(args: str, words: str, src: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    found = run_here(*(word.replace("SRC", str(src)).replace("OUT", out) for word in args.split()))
    assert found.code == 2
    assert words in found.err
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("name", ["out.safetensor", "out.saftensors", "out.guf"])
@pytest.mark.parametrize("to", [(), ("--to", "torch")])
def test_a_typing_error_in_the_suffix_makes_no_folder(
    name: str, to: tuple[str, ...], src: Path, tmp_path: Path
) -> None:
    found = run_here("consolidate", src, tmp_path / name, *to)
    assert found.code == 2
    assert "expected a file that ends with ." in found.err and "a slash at its end" in found.err
    assert not (tmp_path / name).exists()
    assert run_here("consolidate", src, f"{tmp_path / name}/", *to).code == 0
    assert (tmp_path / name).is_dir()


def test_messages_have_options_and_no_arguments_of_python(src: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "x").write_text("x")
    found = run_here("consolidate", src, tmp_path / "out")
    assert "Pass --overwrite to replace it." in found.err
    assert "overwrite=" not in found.err
    done = run_here("consolidate", src, tmp_path / "new")
    assert "config_from=" not in done.err
