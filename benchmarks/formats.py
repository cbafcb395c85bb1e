"""Merging what other frameworks leave, each case beside the framework's own tool, with `cp` as the yardstick.

    python benchmarks/formats.py [--size 1GB] [--cases zero3,local,...] [--rounds 5] [--fsync both|neither] [--record]

Measured as in `consolidate.py`: whole processes, outputs brought to the disk, in alternating order. A case ends with
what is asked of it: how many times the time of `cp` it may take (start-up counts, so larger sizes tell more); how many
times faster than the framework's tool it must be; and how much memory it may hold. DeepSpeed and Lightning take part
where they are installed.
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
from results import RESULTS, machine, record

INPUTS = Path(__file__).resolve().parent / "foreign_inputs.py"
MOST_BYTES = 200e6
SPACE = 2
"""Times as much as `consolidate.py` needs: DeepSpeed's files hold the optimizer too, and lie beside the weights."""

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
    """Return the yardstick where a case's own files hold more than what is merged."""
    return Tool(CP.name, CP.command, CP.startup, source, checked=False)


@dataclass(frozen=True)
class Asked:
    """What is asked of a case.

    Attributes:
        to_cp: Most times the seconds of `cp`; 0 for no such promise.
        faster: Least times faster than every peer; 0 for no such promise.
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
ASKED = {
    "zero3": Asked(to_cp=1.2),
    "local": Asked(to_cp=1.3),
    "dtensors": Asked(to_cp=1.2),
    "accelerate": Asked(faster=4),
    "fabric": Asked(faster=4),
    "jobs": Asked(),
}


class FormatsBench(Bench):
    """One session with the files of other frameworks."""

    def inputs(self, verb: str, kind: str, folder: Path, *more: str) -> None:
        """Run `foreign_inputs.py`."""
        subprocess.run([PYTHON, str(INPUTS), verb, kind, str(folder), str(self.nbytes), *more], check=True)

    def table(self, case: Case, runs: dict[str, Runs], starts: dict[str, float]) -> None:
        """Print what was measured, then what was asked."""
        super().table(case, runs, starts)
        asked = next(ASKED[name] for name, each in CASES.items() if each is case)
        yardstick, mine, *peers = runs.items()
        peak = max(mine[1].peak)
        found = [f"peak {peak / 1e6:.0f} of at most {MOST_BYTES / 1e6:.0f} MB: {verdict(peak <= MOST_BYTES)}"]
        if asked.to_cp:
            times = ratio(mine[1], yardstick[1])
            aside = (median(mine[1].seconds) - starts[mine[0]]) / median(yardstick[1].seconds)
            told = f"{times:.2f} of at most {asked.to_cp} x cp, {aside:.2f} start-up aside"
            found.append(f"{told}: {verdict(times <= asked.to_cp)}")
        for name, each in peers if asked.faster else ():
            times = ratio(each, mine[1])
            found.append(
                f"{times:.1f} of at least {asked.faster} x faster than {name}: {verdict(times >= asked.faster)}"
            )
        if asked.faster and not peers:
            found.append("the framework's own tool is not installed")
        for name, each in peers:
            if "--jobs" in name:
                found.append(f"--jobs is {1 / ratio(each, mine[1]):.2f} x as fast")
        self.say(f"\nAsked: {'; '.join(found)}.")


def ratio(a: Runs, b: Runs) -> float:
    """Return the median of the rounds' own ratios of seconds."""
    return median(x / y for x, y in zip(a.seconds, b.seconds, strict=True))


def verdict(is_met: bool) -> str:
    """Return words for a promise that is kept, or not."""
    return "met" if is_met else "MISSED"


def main() -> None:
    """Run the cases asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=parse_size, default=parse_size("1GB"), help="bytes of the weights")
    parser.add_argument("--cases", default=",".join(CASES), help="some of: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="measured runs of each tool")
    parser.add_argument("--fsync", choices=("both", "neither"), default="both", help="for every tool, or for none")
    parser.add_argument("--folder", help="where inputs and outputs go, instead of the temporary folder")
    parser.add_argument("--record", action="store_true", help=f"write the tables into {RESULTS.name}")
    given = parser.parse_args()
    names = given.cases.split(",")
    if unknown := set(names) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    Fsync.off = given.fsync == "neither"
    with scratch(given.folder, SPACE * given.size) as folder:
        bench = FormatsBench(folder, given.size, given.rounds, fsync=not Fsync.off)
        today = datetime.datetime.now(tz=datetime.timezone.utc).date()
        bench.say(f"{today}, {machine()}, {file_system(folder)}; {given.rounds} rounds, fsync: {given.fsync}.")
        for i, name in enumerate(names):
            bench.compare(CASES[name])
            keep = {tool.source or CASES[n].source for n in names[i + 1 :] for tool in CASES[n].tools}
            for made in (folder / "src").iterdir():
                if made.name not in keep:
                    shutil.rmtree(made)
        if given.record:
            record(f"Formats, {given.size / 1e9:g} GB, fsync {given.fsync}", bench.lines)


if __name__ == "__main__":
    main()
