"""Merging a sharded checkpoint, each case beside its peers in one run, with `cp` as the yardstick.

    python benchmarks/consolidate.py [--size 4GB] [--cases dcp,hf,...] [--rounds 5] [--fsync both|neither] [--record]

What is measured is the whole process, from its start to its end, and (with `--fsync both`) until its output is on the
disk: seconds, CPU, and the peak of resident memory. Every tool is warmed up once, and that output is compared with the
truth; then come the rounds, in alternating order, each with nothing left to be written back. Start-up is printed apart.
This process imports nothing large, since a child's peak of memory counts what it inherits before it execs.

torch_checkpointing is an optional peer: install it, or put it on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from results import RESULTS, machine, record

HERE = Path(__file__).resolve().parent
INPUTS = HERE / "inputs.py"
PYTHON = sys.executable
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}

NO_FSYNC = "import os; os.fsync = os.fdatasync = lambda fd: None; "
COMMAND = "from shardckpt_cli.app import main; main()"
TORCH_HF = """
import json, os, sys
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
src, dst = sys.argv[1:]
with open(os.path.join(src, next(f for f in os.listdir(src) if f.endswith(".safetensors"))), "rb") as file:
    names = json.loads(file.read(int.from_bytes(file.read(8), "little")))
os.makedirs(dst)
consolidate_safetensors_files(src, dst, {name: 1 for name in names if name != "__metadata__"}, num_threads=2)
"""
DCP_TO_TORCH = """
import os, sys
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
os.makedirs(sys.argv[2])
dcp_to_torch_save(sys.argv[1], os.path.join(sys.argv[2], "merged.pt"))
"""
TORCH_CHECKPOINTING = """
import os, sys
from torch_checkpointing.hf.consolidation import consolidate_hf_safetensors_checkpoint
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig
os.makedirs(sys.argv[2])
storage = LocalFileSystemStorageConfig(use_direct_io=False)
consolidate_hf_safetensors_checkpoint(sys.argv[1], output_dir=sys.argv[2], storage_config=storage)
"""


@dataclass(frozen=True)
class Tool:
    """A program that merges.

    Attributes:
        name: As printed.
        command: Makes the command line from source and target.
        startup: A command line that only starts it.
        source: Kind of input it needs, where that is not the case's own.
        checked: Whether its output is compared with the truth; a copy is not.
        needs: Module without which it does not take part.
    """

    name: str
    command: Callable[[str, str], list[str]]
    startup: list[str]
    source: str = ""
    checked: bool = True
    needs: str = ""


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        title: As printed.
        source: Kind of input, as `inputs.py` knows it.
        tools: Who takes part, the yardstick first, ours second.
        dtype: Of the output.
    """

    title: str
    source: str
    tools: tuple[Tool, ...]
    dtype: str = "float32"


@dataclass
class Runs:
    """What a tool needed, one number a round.

    Attributes:
        seconds: From start to end, and to the disk where asked for.
        cpu: Seconds of CPU.
        peak: Bytes of resident memory at the peak.
    """

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    peak: list[int] = field(default_factory=list)


def ours(*options: str) -> Tool:
    """Return shardckpt as a tool."""

    def command(src: str, dst: str) -> list[str]:
        code = (NO_FSYNC if Fsync.off else "") + COMMAND
        return [PYTHON, "-c", code, "consolidate", src, dst, "--quiet", *options]

    imports = "import shardckpt_cli.app, shardckpt.offline.consolidate"
    return Tool(" ".join(["shardckpt consolidate", *options]), command, [PYTHON, "-c", imports])


class Fsync:
    """Whether outputs are left to the page cache: by ours too, which otherwise always syncs."""

    off = False


def script(name: str, code: str, *, source: str = "", needs: str = "") -> Tool:
    """Return a peer that is a function of a library: `code` run on a source and a target."""
    imports = "\n".join(line for line in code.splitlines() if line.startswith(("import", "from")))
    return Tool(name, lambda src, dst: [PYTHON, "-c", code, src, dst], [PYTHON, "-c", imports], source, needs=needs)


CP = Tool("cp", lambda src, dst: ["cp", "-r", "--reflink=never", src, dst], ["cp", "--version"], checked=False)
ACCELERATE = Tool(
    "accelerate merge-weights",
    lambda src, dst: [PYTHON, "-m", "accelerate.commands.accelerate_cli", "merge-weights", src, dst],
    [PYTHON, "-m", "accelerate.commands.accelerate_cli", "merge-weights", "--help"],
)
TO_TORCH = script("torch dcp_to_torch_save", DCP_TO_TORCH)
HF = script("torch HF consolidation", TORCH_HF)
META = script("torch_checkpointing", TORCH_CHECKPOINTING, source="torch-checkpointing", needs="torch_checkpointing")

CASES = {
    "dcp": Case("DCP shards of 4 ranks to safetensors", "dcp", (CP, ours(), ACCELERATE, TO_TORCH)),
    "hf": Case("HF shards of 4 ranks (torch's writer) to safetensors", "hf", (CP, ours(), HF, META)),
    "dcp-dim1": Case("DCP shards along dimension 1", "dcp-dim1", (CP, ours(), ACCELERATE, TO_TORCH)),
    "hf-dim1": Case("HF shards along dimension 1", "hf-dim1", (CP, ours(), HF)),
    "bf16": Case("DCP shards to safetensors in bfloat16", "dcp", (CP, ours("--dtype", "bf16")), "bfloat16"),
    "tiny": Case("20,000 tensors of 16 elements, DCP to safetensors", "tiny", (CP, ours(), ACCELERATE, TO_TORCH)),
}
FIGURES = ("help", "inspect")


def run(command: Sequence[str], log: Path) -> tuple[float, float, int]:
    """Run a process.

    Returns:
        Seconds, CPU seconds, and the peak of resident memory in bytes.
    """
    with log.open("ab") as out:
        start = time.perf_counter()
        actions = [(os.POSIX_SPAWN_DUP2, out.fileno(), 1), (os.POSIX_SPAWN_DUP2, out.fileno(), 2)]
        pid = os.posix_spawnp(command[0], list(command), dict(os.environ), file_actions=actions)
        _, status, usage = os.wait4(pid, 0)
        seconds = time.perf_counter() - start
    if os.waitstatus_to_exitcode(status) != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{log.read_text(errors='replace')[-2000:]}")
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def bring_to_disk(folder: Path) -> float:
    """Fsync every file and folder below a folder; return the seconds it took."""
    start = time.perf_counter()
    for path in [folder, *folder.rglob("*")]:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    return time.perf_counter() - start


class Bench:
    """One session: where it works, and how.

    Args:
        folder: Scratch space.
        nbytes: Size of the large inputs.
        rounds: Measured runs of each tool.
        fsync: Whether every output is brought to the disk within its time.
    """

    def __init__(self, folder: Path, nbytes: int, rounds: int, *, fsync: bool) -> None:
        self.folder, self.nbytes, self.rounds, self.fsync = folder, nbytes, rounds, fsync
        self.log = folder / "log"
        self.lines: list[str] = []

    def say(self, line: str = "") -> None:
        """Print a line and keep it for the record."""
        print(line, flush=True)
        self.lines.append(line)

    def note(self, line: str) -> None:
        """Tell on stderr what is going on."""
        print(f"  {line}", file=sys.stderr, flush=True)

    def source(self, kind: str) -> Path:
        """Return the input of a kind, written on first use."""
        made = self.folder / "src" / kind
        if not made.exists():
            self.note(f"writing {kind}")
            made.parent.mkdir(exist_ok=True)
            self.inputs("make", kind, made)
        return made

    def inputs(self, verb: str, kind: str, folder: Path, *more: str) -> None:
        """Run `inputs.py`."""
        subprocess.run([PYTHON, str(INPUTS), verb, kind, str(folder), str(self.nbytes), *more], check=True)

    def merge(self, tool: Tool, case: Case) -> tuple[float, float, int]:
        """Run a tool once, into an empty place, from clean buffers."""
        target = self.folder / "out"
        shutil.rmtree(target, ignore_errors=True)
        source = self.source(tool.source or case.source)
        os.sync()
        seconds, cpu, peak = run(tool.command(str(source), str(target)), self.log)
        return seconds + (bring_to_disk(target) if self.fsync else 0.0), cpu, peak

    def compare(self, case: Case) -> None:
        """Measure every tool of a case and print the table."""
        tools = [tool for tool in case.tools if not tool.needs or importlib.util.find_spec(tool.needs)]
        for tool in tools:
            self.note(f"warming up {tool.name}")
            self.merge(tool, case)
            if tool.checked:
                self.inputs("check", case.source, self.folder / "out", case.dtype)
        runs = {tool.name: Runs() for tool in tools}
        for number in range(self.rounds):
            self.note(f"round {number + 1} of {self.rounds}")
            for tool in tools if number % 2 == 0 else reversed(tools):
                seconds, cpu, peak = self.merge(tool, case)
                runs[tool.name].seconds.append(seconds)
                runs[tool.name].cpu.append(cpu)
                runs[tool.name].peak.append(peak)
        starts = {tool.name: median(run(tool.startup, self.log)[0] for _ in range(3)) for tool in tools}
        self.table(case, runs, starts)
        shutil.rmtree(self.folder / "out", ignore_errors=True)

    def table(self, case: Case, runs: dict[str, Runs], starts: dict[str, float]) -> None:
        """Print what was measured, as a Markdown table; ratios are medians of the rounds' own ratios."""
        written = sum(path.stat().st_size for path in self.source(case.source).rglob("*") if path.is_file())
        yardstick, mine = (runs[tool.name].seconds for tool in case.tools[:2])
        self.say(f"\n### {case.title}\n\nSource {written / 1e9:.3f} GB; output equal to the truth, bit for bit.\n")
        self.say(
            "| | seconds (least - most) | start-up | CPU s | peak MB | x cp | shardckpt is faster | start-up aside |"
        )
        self.say("|---|---|---|---|---|---|---|---|")
        for name, each in runs.items():
            to_cp = median(a / b for a, b in zip(each.seconds, yardstick, strict=True))
            to_us = median(a / b for a, b in zip(each.seconds, mine, strict=True))
            aside = (median(each.seconds) - starts[name]) / (median(mine) - starts[case.tools[1].name])
            faster = "| |" if each.seconds is mine else f"| {to_us:.1f} x | {aside:.1f} x |"
            spread = f"{median(each.seconds):.2f} ({min(each.seconds):.2f} - {max(each.seconds):.2f})"
            self.say(
                f"| {name} | {spread} | {starts[name]:.2f} | {median(each.cpu):.2f} | {max(each.peak) / 1e6:.0f} "
                f"| {to_cp:.2f} {faster}"
            )

    def figures(self, names: Sequence[str]) -> None:
        """Measure what has no peer: how long help takes, and looking at very many tensors."""
        commands = {"help": ["--help"], "inspect": ["inspect"]}
        rows = []
        for name in names:
            more = [str(self.source("listed"))] if name == "inspect" else []
            command = [PYTHON, "-m", "shardckpt_cli", *commands[name], *more]
            found = [run(command, self.log) for _ in range(self.rounds + 1)][1:]
            what = "`shardckpt --help`" if name == "help" else "`shardckpt inspect` of 100,000 tensors in 8 files"
            seconds, cpu, peak = (median(column) for column in zip(*found, strict=True))
            rows.append(f"| {what} | {seconds:.2f} | {cpu:.2f} | {peak / 1e6:.0f} |")
        if rows:
            self.say("\n### Start-up\n\n| | seconds | CPU s | peak MB |\n|---|---|---|---|\n" + "\n".join(rows))


def parse_size(text: str) -> int:
    """Return bytes: `4GB` is decimal, `4GiB` binary."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z]*)", text.strip())
    if not found or found[2].upper() not in UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; 4GB and 4GiB are")
    return int(float(found[1]) * UNITS[found[2].upper()])


def file_system(folder: Path) -> str:
    """Return the type of the file system that a folder lies in."""
    done = subprocess.run(["df", "--output=fstype", str(folder)], capture_output=True, text=True, check=True)
    return done.stdout.split()[-1]


@contextlib.contextmanager
def scratch(parent: str | None, nbytes: int) -> Iterator[Path]:
    """Yield an empty folder, removed afterwards; stop where three times the size does not fit."""
    with tempfile.TemporaryDirectory(prefix="shardckpt-bench-", dir=parent) as name:
        free = shutil.disk_usage(name).free
        if free < 3.2 * nbytes:
            raise SystemExit(f"{name} has {free / 1e9:.1f} GB free; inputs and outputs need {3.2 * nbytes / 1e9:.1f}")
        yield Path(name)


def main() -> None:
    """Run the cases asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=parse_size, default=parse_size("4GB"), help="bytes of the large inputs")
    parser.add_argument("--cases", default=",".join([*CASES, *FIGURES]), help="some of: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="measured runs of each tool")
    parser.add_argument("--fsync", choices=("both", "neither"), default="both", help="for every tool, or for none")
    parser.add_argument("--folder", help="where inputs and outputs go, instead of the temporary folder")
    parser.add_argument("--record", action="store_true", help=f"write the tables into {RESULTS.name}")
    given = parser.parse_args()
    names = given.cases.split(",")
    if unknown := set(names) - {*CASES, *FIGURES}:
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    Fsync.off = given.fsync == "neither"
    with scratch(given.folder, given.size) as folder:
        bench = Bench(folder, given.size, given.rounds, fsync=not Fsync.off)
        today = datetime.datetime.now(tz=datetime.timezone.utc).date()
        bench.say(f"{today}, {machine()}, {file_system(folder)}; {given.rounds} rounds, fsync: {given.fsync}.")
        for name in names:
            if name in CASES:
                bench.compare(CASES[name])
                keep = {CASES[later].source for later in names[names.index(name) + 1 :] if later in CASES}
                for made in (folder / "src").iterdir():
                    if made.name not in keep:
                        shutil.rmtree(made)
        bench.figures([name for name in names if name in FIGURES])
        if given.record:
            record(f"{given.size / 1e9:g} GB, fsync {given.fsync}", bench.lines)


if __name__ == "__main__":
    main()
