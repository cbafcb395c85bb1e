"""Plain lines for pipes; on a terminal progress and tables that rich draws, in which names are text."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from shardckpt_cli import output

import shardckpt
from shardckpt.events.progress import Progress
from tests.kit.runs.command import ENVIRONMENT, run, run_here, run_on_terminal

LONG = "model." + "x" * 150 + ".weight"
HOSTILE = "a[bold]b\n\x1b[31m\u202e:smile:"
ESCAPED = r"a[bold]b\n\x1b[31m\u202e:smile:"
SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


@pytest.fixture
def src(tmp_path: Path) -> Path:
    save_file({LONG: torch.ones(2), HOSTILE: torch.ones(1), "b": torch.ones(3)}, tmp_path / "src.safetensors")
    return tmp_path / "src.safetensors"


class Screen(io.StringIO):
    """A terminal, of which only the output exists."""

    def isatty(self) -> bool:
        return True


class TestPipes:
    def test_a_row_is_a_line_whatever_the_width(self, src: Path) -> None:
        lines = run_here("inspect", src).out.splitlines()
        assert len(lines) == 8
        assert {line.split()[0] for line in lines[-3:]} == {LONG, ESCAPED, "b"}
        assert all(line.split()[1] == "float32" for line in lines[-3:])

    def test_no_variable_makes_a_pipe_a_terminal(self, src: Path) -> None:
        variables = {"FORCE_COLOR": "1", "COLUMNS": "40", "TERM": "xterm", "TTY_COMPATIBLE": "1"}
        assert run("inspect", src, env={**ENVIRONMENT, **variables}).out == run_here("inspect", src).out

    def test_without_a_terminal_there_is_no_progress(self, src: Path, tmp_path: Path) -> None:
        found = run("consolidate", src, tmp_path / "out", env={**ENVIRONMENT, "FORCE_COLOR": "1"})
        assert (found.code, found.err) == (0, "")
        assert "wrote 3 tensors" in found.out

    @pytest.mark.parametrize("args", [("inspect", "SRC"), ("inspect", "SRC", "--tree"), ("diff", "SRC", "SRC")])
    def test_rich_is_not_imported(self, args: tuple[str, ...], src: Path) -> None:
        words = [str(src) if word == "SRC" else word for word in args]
        code = (
            "import sys; from shardckpt_cli.app import main\n"
            f"sys.argv[1:] = {words!r}\n"
            "try: main()\n"
            "except SystemExit as end: assert end.code == 0, end.code\n"
            "assert 'rich' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=ENVIRONMENT)


class TestStatus:
    """`--plan` and `shardckpt task` show how far a plan is; a bar is drawn on a terminal alone."""

    def test_a_plan_with_one_task_names_it(self, tmp_path: Path) -> None:
        shardckpt.save({"w": torch.ones(100)}, tmp_path / "step")
        plan = tmp_path / "plan.json"
        first, following = run_here("verify", tmp_path / "step", "--plan", plan).out.splitlines()
        assert first.startswith("planned 1 task, ")
        assert following == f"next: shardckpt task {plan} 0; then shardckpt commit {plan}"
        assert run_here("task", plan, "0").out.startswith(f"1 part done\n{plan}: 1 of 1 task ended, ")

    def test_a_commit_to_a_full_disk_keeps_its_verdict(self, tmp_path: Path) -> None:
        shardckpt.save({"w": torch.ones(100)}, tmp_path / "step")
        plan = tmp_path / "plan.json"
        run_here("verify", tmp_path / "step", "--plan", plan)
        run_here("task", plan, "0")
        with Path("/dev/full").open("w") as full:
            lost = run("commit", plan, stdout=full)
        assert lost.code == 3 and "No space left" in lost.err
        assert "intact" in run_here("commit", plan).out

    @pytest.mark.parametrize("verb", ["consolidate", "verify"])
    def test_of_a_plan(self, verb: str, tmp_path: Path) -> None:
        run_of_steps, plan = tmp_path / "run", tmp_path / "plan.json"
        for number in (1, 2):
            shardckpt.save({"w": torch.ones(100), "v": torch.ones(100)}, run_of_steps / f"step-{number:08d}")
        if verb == "verify":  # its parts, steps, have no sizes
            shardckpt.plan_tasks(plan, verb, f"{run_of_steps}@1..2")
        else:
            shardckpt.plan_tasks(plan, verb, run_of_steps / "step-00000001", tmp_path / "out", max_shard_size=400)
        shardckpt.run_task(plan, 0)
        words = ("task", str(plan), "--status")
        _, shown = run_on_terminal(*words)
        bar, text, left = SEQUENCE.sub("", shown).splitlines()
        assert {*bar.strip()} <= {*"━╸╺"} and len(bar.strip()) == 40
        assert "1 of 2 tasks ended" in text and left == "left: 1"
        assert run_here(*words).out.startswith(f"{plan}: 1 of 2 tasks ended")


class TestTerminal:
    @pytest.mark.parametrize("args", [("inspect", "SRC"), ("diff", "SRC", "OTHER")])
    def test_a_long_name_is_folded_within_its_column(self, args: tuple[str, ...], src: Path, tmp_path: Path) -> None:
        save_file({LONG: torch.zeros(2), "b": torch.ones(3)}, tmp_path / "other.safetensors")
        places = {"SRC": str(src), "OTHER": str(tmp_path / "other.safetensors")}
        _, shown = run_on_terminal(*(places.get(word, word) for word in args))
        lines = SEQUENCE.sub("", shown).split("\n")
        assert LONG in "".join(line.split(" ")[0] for line in lines)
        assert all(len(line) <= 80 for line in lines if "xxx" in line)

    @pytest.mark.parametrize("command", ["inspect", "stats", "diff"])
    def test_long_keys_with_all_arguments_of_a_callback_are_short_and_full_in_json(
        self, command: str, tmp_path: Path
    ) -> None:
        rest = "'mode': 'min', 'every_n_train_steps': 3, 'every_n_epochs': 0, 'train_time_interval': None"
        key = f"trainer.callbacks.Checkpoint{{'monitor': 'val_loss', {rest}}}.best_model_score"
        expert = f"model.{'encoder.' * 12}layers.0.weight"
        for name in ("a", "b"):
            tensors = {key: torch.tensor(float(name == "a")), expert: torch.ones(2) + (name == "a")}
            save_file(tensors, tmp_path / f"{name}.safetensors")
        sources = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"][: 2 if command == "diff" else 1]
        shown = run(command, *sources).out
        assert "trainer.callbacks.Checkpoint{'monitor': 'val_loss', ...}.best_model_score " in shown
        assert expert in shown
        assert rest not in shown
        assert rest in run(command, *sources, "--json").out

    def test_a_table_without_rows_is_nothing(self, src: Path) -> None:
        code, shown = run_on_terminal("diff", src, src)
        after_progress = shown.rpartition("\x1b[2K")[2]
        assert (code, after_progress) == (0, "3 tensors in both, 3 equal, 0 differences\r\n")

    @pytest.mark.parametrize("options", [(), ("--tree",)])
    def test_names_are_text_and_not_markup(self, options: tuple[str, ...], src: Path) -> None:
        code, shown = run_on_terminal("inspect", src, *options)
        assert code == 0
        drawn = SEQUENCE.sub("", shown)
        assert all(part in drawn for part in (":smile:", "[bold]", r"\x1b[31m", r"\u202e"))
        assert all(line.isprintable() for line in drawn.split("\n"))
        assert "\x1b[31m" not in shown

    @pytest.mark.parametrize("variable", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
    def test_who_asks_for_plain_text_gets_it(self, variable: dict[str, str], src: Path) -> None:
        shown = run_on_terminal("inspect", src, **variable)[1]
        assert shown.replace("\r\n", "\n") == run_here("inspect", src).out

    def test_a_table_of_very_many_rows_is_not_drawn(self, tmp_path: Path) -> None:
        save_file({f"t{i}": torch.ones(1) for i in range(1001)}, tmp_path / "many.safetensors")
        shown = run_on_terminal("inspect", tmp_path / "many.safetensors")[1]
        assert "\x1b" not in shown
        assert shown.count("\n") == 1006

    def test_progress_is_drawn_and_removed(self, src: Path, tmp_path: Path) -> None:
        code, shown = run_on_terminal("consolidate", src, tmp_path / "out")
        assert code == 0
        assert "24/24 bytes" in shown
        after = shown[shown.rindex("24/24 bytes") : shown.index("wrote 3 tensors")]
        assert "\x1b[1A\x1b[2K" in after, "the line is erased before the report"
        assert "\x1b[?25h" in shown, "the cursor is shown again"

    @pytest.mark.parametrize("words", [("verify",), ("diff", "SRC")])
    def test_so_is_that_of_reading(self, words: tuple[str, ...], src: Path) -> None:
        step = src.parent / "step"
        assert run_here("consolidate", src, step, "--to", "native").code == 0
        code, shown = run_on_terminal(words[0], *(step for word in words))
        assert code == 0
        assert "bytes" in shown or "B" in shown
        assert "\x1b[?25l" in shown, "the cursor is hidden while it is drawn"

    def test_progress_is_bytes_their_rate_and_the_time_left(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "stderr", screen := Screen())
        monkeypatch.setenv("TERM", "xterm")
        with output.show_progress(quiet=False) as show:
            assert show is not None
            assert screen.getvalue() == "", "nothing before the first byte"
            for done in range(4):
                show(Progress(done * 10**9, 8 * 10**9, 0.0))
                time.sleep(0.15)
        assert re.search(r"3.0/8.0 GB .*\d GB/s.* 0:00:0\d", SEQUENCE.sub("", screen.getvalue()))

    def test_an_error_in_the_middle_removes_it_and_is_one_line(self, tmp_path: Path) -> None:
        save_file({"a": torch.ones(2), "b": torch.full((2,), 1e30)}, tmp_path / "src.safetensors")
        code, shown = run_on_terminal("consolidate", tmp_path / "src.safetensors", tmp_path / "out", "--dtype", "fp16")
        assert code == 1
        last = SEQUENCE.sub("", shown).rstrip("\r\n").rpartition("\n")[2]
        assert last.startswith("shardckpt: ")

    def test_a_terminal_that_cannot_move_its_cursor_gets_no_progress(self, src: Path, tmp_path: Path) -> None:
        code, shown = run_on_terminal("consolidate", src, tmp_path / "out", TERM="dumb")
        assert code == 0
        assert "\x1b" not in shown

    @pytest.mark.parametrize("option", ["--quiet", "--json"])
    def test_quiet_and_json_show_no_progress(self, option: str, src: Path, tmp_path: Path) -> None:
        code, shown = run_on_terminal("consolidate", src, tmp_path / "out", option)
        assert code == 0
        assert "\x1b" not in shown
        assert (shown == "") == (option == "--quiet")


def test_one_is_singular(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "src.safetensors")
    assert (
        "wrote 1 tensor, 4 B, in 1 file to"
        in run_here("consolidate", tmp_path / "src.safetensors", tmp_path / "out").out
    )
    assert run_here("verify", tmp_path / "out").out.endswith(
        ": safetensors: 1 tensor, complete, no checksums in 1 file\n"
    )


def test_intact_is_said_only_where_checksums_of_all_files_were_compared(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "a.pt")
    assert run_here("verify", tmp_path / "a.pt").out.endswith(": 1 tensor, intact, 12 B match their checksums\n")
    torch.save({"a": torch.ones(3)}, tmp_path / "b.pt", _use_new_zipfile_serialization=False)
    assert run_here("verify", tmp_path / "b.pt").out.endswith(": 1 tensor, complete, no checksums in 1 file\n")
    index = {"metadata": {}, "weight_map": {"a": "x.bin", "b": "y.bin"}}
    (tmp_path / "sharded").mkdir()
    torch.save({"a": torch.ones(3)}, tmp_path / "sharded/x.bin")
    torch.save({"b": torch.ones(3)}, tmp_path / "sharded/y.bin", _use_new_zipfile_serialization=False)
    (tmp_path / "sharded/pytorch_model.bin.index.json").write_text(json.dumps(index))
    said = ": 2 tensors, complete, 12 B match their checksums, no checksums in 1 file\n"
    assert run_here("verify", tmp_path / "sharded").out.endswith(said)


def test_the_version_is_printed() -> None:
    found = run("--version", cwd=os.sep)
    assert (found.code, found.out, found.err) == (0, f"shardckpt {shardckpt.__version__}\n", "")
