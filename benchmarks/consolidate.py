"""Compare the consolidation of sharded checkpoints with other tools, and with `cp` as the baseline.

    python benchmarks/consolidate.py [--size 4GB] [--cases dcp,hf,...] [--rounds 5] [--fsync both|neither] [--record]
    python benchmarks/consolidate.py --pairs 9 [--cases dcp,bf16,dcp-dim1] --size 512MB --folder /dev/shm [--record]

Each measurement covers a process from start to end and, with `--fsync both`, until its output is on the disk: seconds,
CPU, and peak resident memory. Every tool has one warm-up run, whose output is compared with the expected tensors. Then
the tools run in alternating order, each after a `sync`. Start-up is printed separately. This process imports no large
modules, because the peak memory of a child includes the memory that it inherits before exec.

With `--pairs`, shardckpt and `cp` run alternately so many times, once inside one process and once as processes from
start to end. The ratios of pairs, above all those of CPU seconds, depend less on what else runs on the machine than
seconds do. The goals are those of 4 GB. Those of processes hold from 4 GB on: `cp` of 512 MB takes 0.2 s, and the start
of Python and its modules 0.1 s, half of it, so that 1.05 times `cp` cannot be met there whatever the copy costs;
smaller rows have no goal.

torch_checkpointing is an optional peer: install it, or put it on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from statistics import median

from options import add_disk_options, add_selection
from results import RESULTS, Lines, machine, record, section_title

HERE = Path(__file__).resolve().parent
INPUTS = HERE / "inputs.py"
PYTHON = sys.executable
CACHED = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
"""Environment of the compared processes: modules are cached, as those of installed tools are."""

LEAST_PROCESS_BYTES = 4 * 10**9
"""Bytes of inputs from which goals include the start of a process."""

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}

NO_FSYNC = "import os; os.fsync = os.fdatasync = lambda fd: None; "
COMMAND = "from shardckpt_cli.start import main; main()"
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

IN_PROCESS = """
import json, os, resource, shutil, sys, time
import shardckpt, shardckpt.offline.consolidate
source, folder, rounds, options = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
ours, copy = os.path.join(folder, "ours"), os.path.join(folder, "copy")
if options.pop("no_fsync", False):
    os.fsync = os.fdatasync = lambda fd: None

def consolidate():
    shardckpt.consolidate(source, ours, **options)

def cp():
    os.waitpid(os.posix_spawnp("cp", ["cp", "-r", "--reflink=never", source, copy], dict(os.environ)), 0)
    for parent, _, names in os.walk(copy):
        for path in (parent, *(os.path.join(parent, name) for name in names)):
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)

def measure(work, out, who):
    before, start = resource.getrusage(who), time.perf_counter()
    work()
    seconds, after = time.perf_counter() - start, resource.getrusage(who)
    shutil.rmtree(out)  # now: two outputs and the source may fill the memory
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

pairs = []
for number in range(rounds + 1):
    sides = [(consolidate, ours, resource.RUSAGE_SELF), (cp, copy, resource.RUSAGE_CHILDREN)]
    found = [measure(*side) for side in (sides if number % 2 else sides[::-1])]
    pairs.append(found if number % 2 else found[::-1])
print(json.dumps(pairs[1:]))
"""


@dataclass(frozen=True)
class Tool:
    """A program that consolidates.

    Attributes:
        name: Printed name.
        command: Builds the command line from source and target.
        startup: A command line that only starts it.
        source: Kind of its input, if it differs from the case's.
        is_checked: Whether its output is compared with the expected tensors; a copy is not.
        needs: Module that has to be installed for it.
    """

    name: str
    command: Callable[[str, str], list[str]]
    startup: list[str]
    source: str = ""
    is_checked: bool = True
    needs: str = ""


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        title: Printed title.
        source: Kind of input, one of those of `inputs.py`.
        tools: The compared tools: first the baseline, then shardckpt.
        dtype: Dtype of the output.
    """

    title: str
    source: str
    tools: tuple[Tool, ...]
    dtype: str = "float32"


@dataclass
class Runs:
    """Measurements of a tool, one number for each round.

    Attributes:
        seconds: Wall time, with fsync if requested.
        cpu: CPU seconds.
        peak: Peak of resident memory in bytes.
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
    """Whether fsync is off for all tools; shardckpt otherwise always calls it."""

    off = False


def script(name: str, code: str, *, source: str = "", needs: str = "") -> Tool:
    """Return a tool that runs the Python code of a library on a source and a target."""
    imports = "\n".join(line for line in code.splitlines() if line.startswith(("import", "from")))
    return Tool(name, lambda src, dst: [PYTHON, "-c", code, src, dst], [PYTHON, "-c", imports], source, needs=needs)


CP = Tool("cp", lambda src, dst: ["cp", "-r", "--reflink=never", src, dst], ["cp", "--version"], is_checked=False)
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


@dataclass(frozen=True)
class Pairing:
    """A comparison of shardckpt with `cp` alone.

    Attributes:
        title: Printed title.
        case: Name of the case to which it belongs.
        options: Options of `shardckpt.consolidate`.
        in_process: Most times of `cp` inside one process; 0 without a goal.
        process: Most times of `cp` from start to end of a process; 0 without a goal.
    """

    title: str
    case: str
    options: dict[str, str | int]
    in_process: float = 0.0
    process: float = 0.0

    @property
    def source(self) -> str:
        """Kind of input."""
        return CASES[self.case].source

    @property
    def command_options(self) -> list[str]:
        """The options of the command."""
        return [word for key, value in self.options.items() for word in (f"--{key.replace('_', '-')}", str(value))]


PAIRINGS = (
    Pairing("DCP to one file", "dcp", {}, 0.9, 1.05),
    Pairing("the same, 1 thread", "dcp", {"jobs": 1}),
    Pairing("DCP to files of 100 MB", "dcp", {"max_shard_size": "100MB"}, 0.9, 1.05),
    Pairing("DCP in bfloat16", "bf16", {"dtype": "bf16"}, 1.3, 1.3),
    Pairing("DCP to a step, hashed", "dcp", {"to": "native"}),
    Pairing("DCP shards along dimension 1", "dcp-dim1", {}, 1.3, 1.3),
)

Measured = Sequence[tuple[float, float]]
"""Of shardckpt, then of `cp`: seconds and CPU seconds."""


def run(command: Sequence[str], log: Path) -> tuple[float, float, int]:
    """Run a process.

    Returns:
        Seconds, CPU seconds, and peak of resident memory in bytes.
    """
    with log.open("ab") as out:
        start = time.perf_counter()
        actions = [(os.POSIX_SPAWN_DUP2, out.fileno(), 1), (os.POSIX_SPAWN_DUP2, out.fileno(), 2)]
        pid = os.posix_spawnp(command[0], list(command), CACHED, file_actions=actions)
        _, status, usage = os.wait4(pid, 0)
        seconds = time.perf_counter() - start
    if os.waitstatus_to_exitcode(status) != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{log.read_text(errors='replace')[-2000:]}")
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def bring_to_disk(folder: Path) -> float:
    """Fsync every file and folder below a folder, and return the seconds."""
    start = time.perf_counter()
    for path in [folder, *folder.rglob("*")]:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    return time.perf_counter() - start


class Bench(Lines):
    """Run cases and print their tables.

    Args:
        folder: Scratch space.
        nbytes: Size of the large inputs.
        rounds: Measured runs of each tool.
        fsync: Whether the time includes an fsync of the output.
    """

    def __init__(self, folder: Path, nbytes: int, rounds: int, *, fsync: bool) -> None:
        super().__init__()
        self.folder, self.nbytes, self.rounds, self.fsync = folder, nbytes, rounds, fsync
        self.log = folder / "log"
        self.is_in_memory = file_system(folder) == "tmpfs"

    def note(self, line: str) -> None:
        """Print progress on stderr."""
        print(f"  {line}", file=sys.stderr, flush=True)

    def source(self, kind: str) -> Path:
        """Return the input of a kind; it is written at first use."""
        folder = self.folder / "src" / kind
        if not folder.exists():
            self.note(f"writing {kind}")
            folder.parent.mkdir(exist_ok=True)
            self.inputs("make", kind, folder)
        return folder

    def inputs(self, verb: str, kind: str, folder: Path, *more: str) -> None:
        """Run `inputs.py`."""
        subprocess.run([PYTHON, str(INPUTS), verb, kind, str(folder), str(self.nbytes), *more], check=True)

    def merge(self, tool: Tool, case: Case) -> tuple[float, float, int]:
        """Run a tool once, into a new folder, after a `sync`."""
        target = self.folder / "out"
        shutil.rmtree(target, ignore_errors=True)
        source = self.source(tool.source or case.source)
        if not self.is_in_memory:
            os.sync()
        seconds, cpu, peak = run(tool.command(str(source), str(target)), self.log)
        return seconds + (bring_to_disk(target) if self.fsync else 0.0), cpu, peak

    def compare(self, case: Case) -> None:
        """Measure every tool of a case and print the table."""
        tools = [tool for tool in case.tools if not tool.needs or importlib.util.find_spec(tool.needs)]
        for tool in tools:
            self.note(f"warming up {tool.name}")
            self.merge(tool, case)
            if tool.is_checked:
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
        """Print a Markdown table; ratios are medians of the ratios of the rounds."""
        written = sum(path.stat().st_size for path in self.source(case.source).rglob("*") if path.is_file())
        baseline, shardckpt = (runs[tool.name].seconds for tool in case.tools[:2])
        self.say(
            f"\n### {case.title}\n\nSource {written / 1e9:.3f} GB; output equal to the expected tensors, bit for bit.\n"
        )
        self.say(
            "| | seconds (least - most) | start-up | CPU s | peak MB | x cp | shardckpt is faster | without start-up |"
        )
        self.say("|---|---|---|---|---|---|---|---|")
        for name, times in runs.items():
            to_cp = median(a / b for a, b in zip(times.seconds, baseline, strict=True))
            to_us = median(a / b for a, b in zip(times.seconds, shardckpt, strict=True))
            without_start = (median(times.seconds) - starts[name]) / (median(shardckpt) - starts[case.tools[1].name])
            faster = "| |" if times.seconds is shardckpt else f"| {to_us:.1f} x | {without_start:.1f} x |"
            spread = f"{median(times.seconds):.2f} ({min(times.seconds):.2f} - {max(times.seconds):.2f})"
            self.say(
                f"| {name} | {spread} | {starts[name]:.2f} | {median(times.cpu):.2f} | {max(times.peak) / 1e6:.0f} "
                f"| {to_cp:.2f} {faster}"
            )

    def compare_pairs(self, pairings: Sequence[Pairing]) -> None:
        """Measure pairs of shardckpt and `cp`, and print a table of ratios."""
        self.say("\n| shardckpt, x cp | in one process | CPU | with start-up | CPU |\n|---|---|---|---|---|")
        for pairing in pairings:
            self.note(pairing.title)
            inside, processes = self.pairs_in_process(pairing), self.pairs_of_processes(pairing)
            self.say(f"| {pairing.title} | {show_ratios(inside)} | {show_ratios(processes)} |")
            what = f"{self.nbytes / 1e9:g} GB, {pairing.title}"
            for pairs, limit, where in (
                (inside, pairing.in_process, ""),
                (processes, pairing.process, ", with start-up"),
            ):
                if limit:
                    has_goal = inside is pairs or self.nbytes >= LEAST_PROCESS_BYTES
                    self.goal("consolidate", what + where, ratio_of_seconds(pairs), limit if has_goal else inf, "x cp")

    def pairs_in_process(self, pairing: Pairing) -> list[Measured]:
        """Run pairs inside one process."""
        options = json.dumps({**pairing.options, "no_fsync": not self.fsync})
        source = self.source(pairing.source)
        command = [PYTHON, "-c", IN_PROCESS, str(source), str(self.folder), str(self.rounds), options]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        pairs: list[Measured] = json.loads(done.stdout)
        return pairs

    def pairs_of_processes(self, pairing: Pairing) -> list[Measured]:
        """Run pairs of processes."""
        case = Case(pairing.title, pairing.source, ())
        tools = (ours(*pairing.command_options), CP)
        pairs: list[Measured] = []
        for number in range(self.rounds + 1):
            found = [self.merge(tool, case)[:2] for tool in (tools if number % 2 else tools[::-1])]
            pairs.append(found if number % 2 else found[::-1])
        return pairs[1:]

    def figures(self, names: Sequence[str]) -> None:
        """Measure commands without a peer: `--help`, and `inspect` of very many tensors."""
        commands = {"help": ["--help"], "inspect": ["inspect"]}
        rows = []
        for name in names:
            more = [str(self.source("listed"))] if name == "inspect" else []
            command = [PYTHON, "-m", "shardckpt_cli", *commands[name], *more]
            runs = [run(command, self.log) for _ in range(self.rounds + 1)][1:]
            title = "`shardckpt --help`" if name == "help" else "`shardckpt inspect` of 100,000 tensors in 8 files"
            seconds, cpu, peak = (median(column) for column in zip(*runs, strict=True))
            rows.append(f"| {title} | {seconds:.2f} | {cpu:.2f} | {peak / 1e6:.0f} |")
        if rows:
            self.say("\n### Start-up\n\n| | seconds | CPU s | peak MB |\n|---|---|---|---|\n" + "\n".join(rows))


def ratio_of_seconds(pairs: Sequence[Measured]) -> float:
    """Return the median of the ratios of seconds."""
    return median(mine[0] / copy[0] for mine, copy in pairs)


def show_ratios(pairs: Sequence[Measured]) -> str:
    """Return cells of a table: the median ratio of seconds (least by least), and that of CPU seconds."""
    least = min(mine[0] for mine, _ in pairs) / min(copy[0] for _, copy in pairs)
    cpu = median(mine[1] / max(copy[1], 1e-3) for mine, copy in pairs)
    return f"{ratio_of_seconds(pairs):.2f} ({least:.2f}) | {cpu:.2f}"


def parse_size(text: str) -> int:
    """Return a number of bytes: `4GB` is decimal, `4GiB` is binary."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z]*)", text.strip())
    if not match or match[2].upper() not in UNITS:
        raise argparse.ArgumentTypeError(f"a size must be like 4GB or 4GiB, got {text!r}")
    return int(float(match[1]) * UNITS[match[2].upper()])


def file_system(folder: Path) -> str:
    """Return the type of the file system of a folder."""
    df = subprocess.run(["df", "--output=fstype", str(folder)], capture_output=True, text=True, check=True)
    return df.stdout.split()[-1]


@contextlib.contextmanager
def scratch(parent: str | None, nbytes: int) -> Iterator[Path]:
    """Yield a temporary folder; exit if the disk has too little space for the inputs and outputs."""
    with tempfile.TemporaryDirectory(prefix="shardckpt-bench-", dir=parent) as name:
        free = shutil.disk_usage(name).free
        if free < 3.2 * nbytes:
            raise SystemExit(f"{name} has {free / 1e9:.1f} GB free; inputs and outputs need {3.2 * nbytes / 1e9:.1f}")
        yield Path(name)


def main() -> None:
    """Run the selected cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=parse_size, default=parse_size("4GB"), help="bytes of the large inputs")
    add_selection(parser, "--cases", [*CASES, *FIGURES])
    parser.add_argument("--rounds", type=int, default=5, help="measured runs of each tool")
    parser.add_argument("--pairs", type=int, default=0, help="compare with cp alone, in so many pairs")
    add_disk_options(parser)
    parser.add_argument("--record", action="store_true", help=f"write the tables into {RESULTS.name}")
    options = parser.parse_args()
    names = options.cases
    if options.pairs and not any(pairing.case in names for pairing in PAIRINGS):
        parser.error("none of these cases has pairs")
    Fsync.off = options.fsync == "neither"
    with scratch(options.folder, options.size) as folder:
        bench = Bench(folder, options.size, options.pairs or options.rounds, fsync=not Fsync.off)
        today = datetime.datetime.now(tz=datetime.timezone.utc).date()
        rounds = f"{options.pairs} pairs" if options.pairs else f"{options.rounds} rounds"
        load = f"load {os.getloadavg()[0]:.1f}"
        bench.say(f"{today}, {machine()}, {file_system(folder)}, {load}; {rounds}, fsync: {options.fsync}.")
        if options.pairs:
            bench.compare_pairs([pairing for pairing in PAIRINGS if pairing.case in names])
            if options.record:
                title = f"Pairs with cp, {options.size / 1e9:g} GB, {file_system(folder)}"
                every = dict.fromkeys(pairing.case for pairing in PAIRINGS)
                record(section_title(title, names, every), bench.lines, bench.goals)
            return
        for name in names:
            if name in CASES:
                bench.compare(CASES[name])
                keep = {CASES[later].source for later in names[names.index(name) + 1 :] if later in CASES}
                for source in (folder / "src").iterdir():
                    if source.name not in keep:
                        shutil.rmtree(source)
        bench.figures([name for name in names if name in FIGURES])
        if options.record:
            title = f"{options.size / 1e9:g} GB, fsync {options.fsync}"
            record(section_title(title, names, [*CASES, *FIGURES]), bench.lines)


if __name__ == "__main__":
    main()
