"""Compare the consolidation of other frameworks' checkpoints with the tools of these frameworks, and with `cp`.

    python benchmarks/formats.py [--size 1GB] [--cases zero3,local,...] [--rounds 5] [--fsync both|neither] [--record]

The measurements are those of `consolidate.py`: processes from start to end, with fsync, in alternating order. Each case
ends with its limits: the time relative to `cp` (with start-up, so larger sizes are more significant), the least
speed-up over the framework's tool, and the most memory. DeepSpeed and Lightning are compared if they are installed.
"""

from __future__ import annotations

import argparse
import datetime
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from consolidate import CP, PYTHON, Bench, Case, Fsync, Runs, Tool, file_system, ours, parse_size, scratch, script
from options import add_disk_options, add_selection
from results import RESULTS, machine, record, section_title

INPUTS = Path(__file__).resolve().parent / "foreign_inputs.py"
MOST_BYTES = 200e6
SPACE = 2
"""Disk space relative to `consolidate.py`: DeepSpeed's files contain the optimizer too."""

DEEPSPEED = """
import sys
from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict
convert_zero_checkpoint_to_fp32_state_dict(sys.argv[1], sys.argv[2], safe_serialization=True)
"""
LIGHTNING = """
import os, runpy, sys
import lightning.fabric
os.makedirs(sys.argv[2])
sys.argv = ["consolidate", sys.argv[1], "--output_file", os.path.join(sys.argv[2], "merged.pt")]
runpy.run_module("lightning.fabric.utilities.consolidate_checkpoint", run_name="__main__")
"""
ACCELERATE = """
import sys
from accelerate.utils import merge_fsdp_weights
merge_fsdp_weights(sys.argv[1] + "/pytorch_model_fsdp_0", sys.argv[2])
"""


def cp(source: str) -> Tool:
    """Return the baseline for a case whose files contain more than the consolidated tensors."""
    return Tool(CP.name, CP.command, CP.startup, source, is_checked=False)


@dataclass(frozen=True)
class Limits:
    """The limits of a case.

    Attributes:
        to_cp: Largest time relative to `cp`; 0 for no limit.
        faster: Least speed-up over every peer; 0 for no limit.
    """

    to_cp: float = 0
    faster: float = 0


_FILES = ("--max-shard-size", "128MB")
CASES = {
    "zero3": Case(
        "ZeRO-3 of 4 ranks, optimizer beside it, to float32 safetensors",
        "zero3",
        (cp("plain"), ours("--weights", "master"), script("DeepSpeed zero_to_fp32", DEEPSPEED, needs="deepspeed")),
    ),
    "local": Case("FSDP1 LOCAL files of 4 ranks to safetensors", "local", (CP, ours())),
    "dtensors": Case("DTensor files of 4 ranks to safetensors", "dtensors", (CP, ours())),
    "accelerate": Case(
        "Accelerate's sharded folder to safetensors",
        "accelerate",
        (CP, ours(), script("accelerate merge_fsdp_weights", ACCELERATE, needs="accelerate")),
    ),
    "fabric": Case(
        "Lightning's sharded folder to safetensors",
        "fabric",
        (CP, ours(), script("Lightning consolidate_checkpoint", LIGHTNING, needs="lightning")),
    ),
    "jobs": Case(
        "DTensor files to safetensors of 128 MB, one after another and side by side",
        "dtensors",
        (CP, ours(*_FILES), ours(*_FILES, "--jobs", "2")),
    ),
}
LIMITS = {
    "zero3": Limits(to_cp=1.2),
    "local": Limits(to_cp=1.3),
    "dtensors": Limits(to_cp=1.2),
    "accelerate": Limits(faster=4),
    "fabric": Limits(faster=4),
    "jobs": Limits(),
}


class FormatsBench(Bench):
    """Run cases with the files of other frameworks."""

    def inputs(self, verb: str, kind: str, folder: Path, *more: str) -> None:
        """Run `foreign_inputs.py`."""
        subprocess.run([PYTHON, str(INPUTS), verb, kind, str(folder), str(self.nbytes), *more], check=True)

    def table(self, case: Case, runs: dict[str, Runs], starts: dict[str, float]) -> None:
        """Print the table, then the limits."""
        super().table(case, runs, starts)
        limits = next(LIMITS[name] for name, other in CASES.items() if other is case)
        (_, baseline), (tool, own), *peers = runs.items()
        peak = max(own.peak)
        results = [f"peak {peak / 1e6:.0f} of at most {MOST_BYTES / 1e6:.0f} MB: {verdict(peak <= MOST_BYTES)}"]
        if limits.to_cp:
            to_cp = ratio(own, baseline)
            without_start = (median(own.seconds) - starts[tool]) / median(baseline.seconds)
            text = f"{to_cp:.2f} of at most {limits.to_cp} x cp, {without_start:.2f} without start-up"
            results.append(f"{text}: {verdict(to_cp <= limits.to_cp)}")
        for name, times in peers if limits.faster else ():
            faster = ratio(times, own)
            text = f"{faster:.1f} of at least {limits.faster} x faster than {name}"
            results.append(f"{text}: {verdict(faster >= limits.faster)}")
        if limits.faster and not peers:
            results.append("the framework's own tool is not installed")
        for name, times in peers:
            if "--jobs" in name:
                results.append(f"--jobs is {1 / ratio(times, own):.2f} x as fast")
        self.say(f"\nLimits: {'; '.join(results)}.")


def ratio(a: Runs, b: Runs) -> float:
    """Return the median of the ratios of the rounds."""
    return median(x / y for x, y in zip(a.seconds, b.seconds, strict=True))


def verdict(is_met: bool) -> str:
    """Return the word for a limit that is met or missed."""
    return "met" if is_met else "MISSED"


def main() -> None:
    """Run the selected cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=parse_size, default=parse_size("1GB"), help="bytes of the weights")
    add_selection(parser, "--cases", CASES)
    parser.add_argument("--rounds", type=int, default=5, help="measured runs of each tool")
    add_disk_options(parser)
    parser.add_argument("--record", action="store_true", help=f"write the tables into {RESULTS.name}")
    options = parser.parse_args()
    names = options.cases
    Fsync.off = options.fsync == "neither"
    with scratch(options.folder, SPACE * options.size) as folder:
        bench = FormatsBench(folder, options.size, options.rounds, fsync=not Fsync.off)
        today = datetime.datetime.now(tz=datetime.timezone.utc).date()
        bench.say(f"{today}, {machine()}, {file_system(folder)}; {options.rounds} rounds, fsync: {options.fsync}.")
        for i, name in enumerate(names):
            bench.compare(CASES[name])
            keep = {tool.source or CASES[n].source for n in names[i + 1 :] for tool in CASES[n].tools}
            for source in (folder / "src").iterdir():
                if source.name not in keep:
                    shutil.rmtree(source)
        if options.record:
            title = f"Formats, {options.size / 1e9:g} GB, fsync {options.fsync}"
            record(section_title(title, names, CASES), bench.lines)


if __name__ == "__main__":
    main()
