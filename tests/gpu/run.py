"""Run every check of one GPU, each in processes of its own with a budget of seconds, and print a table.

    tests/gpu/run.sh [--device cuda|cpu] [--parts late,kernels,tests,steps,saves,copies,sanitizer]

A part that fails or takes too long does not stop the others. Logs and `summary.json` go to $OUT, or to `build/gpu`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 480  # seconds of all budgets
GOOD = {"passed", "skipped"}
TAIL = 25  # printed lines of the log of a part that failed
SANITIZER = "compute-sanitizer"
PYTEST = [
    "-m",
    "pytest",
    "-v",
    "--confcutdir=tests/gpu",
    "-o",
    "addopts=--import-mode=importlib",
    "-p",
    "no:cacheprovider",
]
SMALL = ["--layers", "1", "--hidden", "64", "--tokens", "8", "--batch", "1", "--megabytes", "1", "--rounds", "1"]
SMALL += ["--steps", "4"]
SOME = "save_in_the_background and place"  # the test of processes that runs on the CPU


@dataclass(frozen=True)
class Part:
    """A check.

    Attributes:
        name: Its name, also of its log.
        budget: Seconds before it is ended.
        command: Its arguments behind the name of the program.
        program: The program.
        environment: More variables.
        skipped: Why it does not run here.
        refusal: Text of a log that says that the machine cannot run it.
        is_shown: Whether its log is printed in any case.
    """

    name: str
    budget: int
    command: Sequence[str]
    program: str = sys.executable
    environment: Mapping[str, str] = field(default_factory=dict)
    skipped: str = ""
    refusal: str = ""
    is_shown: bool = False


@dataclass(frozen=True)
class Result:
    """What became of a part.

    Attributes:
        name: Its name.
        status: "passed", "FAILED", "TIMED OUT" or "skipped".
        seconds: Its time.
        budget: Its budget.
        detail: The last line of its log, or why it was skipped.
        rows: The rows of its tables.
    """

    name: str
    status: str
    seconds: float
    budget: int
    detail: str
    rows: Sequence[str] = ()


# ------------------------------------------------------------------------------------------------------------- parts


def list_parts(device: str) -> list[Part]:
    """Return the parts, most telling first."""
    is_gpu, plugins = device == "cuda", find_plugins()
    patience = 1 if is_gpu else 6  # where other tests run beside
    benchmark = ["benchmarks/gpu.py", "--device", device, *(["--megabytes", "2048"] if is_gpu else SMALL)]
    few = [*benchmark, "--rounds", "2"] if is_gpu else benchmark
    tests = [*find_workers()] if is_gpu else ["-k", SOME]
    parts = [
        Part("late", 60, [*PYTEST, *plugins, "tests/gpu/test_late_collectives.py"]),
        Part("kernels", 40, [*PYTEST, *plugins, "tests/gpu/test_kernels.py"]),
        Part("tests", 125, [*PYTEST, *plugins, "tests/gpu/test_gpu.py", *tests]),
        Part(
            "steps",
            100,
            [*benchmark, *(["--rounds", "3"] if is_gpu else []), "--parts", "steps,overlap"],
            is_shown=is_gpu,
        ),
        Part("saves", 60, [*few, "--parts", "saves"], is_shown=is_gpu),
        Part("copies", 40, [*few, "--parts", "copies"], is_shown=is_gpu),
        build_sanitizer_part(device),
    ]
    return [replace(part, budget=part.budget * patience) for part in parts]


def build_sanitizer_part(device: str) -> Part:
    """Return two steps below compute-sanitizer; on the CPU two steps."""
    part = Part("sanitizer", 55, ["tests/kit/ranks/late_collectives.py", device, "2"])
    if device == "cpu":
        return part
    found = shutil.which(SANITIZER, path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin")
    return replace(
        part,
        command=["--tool", "memcheck", "--error-exitcode", "9", sys.executable, *part.command],
        program=found or SANITIZER,
        environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},  # it sees the end of each tensor's memory
        skipped="" if found else f"{SANITIZER} is not installed",
        refusal="Device not supported",
    )


def find_plugins() -> list[str]:
    """Return the plugins of pytest that are used; others that are installed are not loaded."""
    modules = {"pytest_timeout": "pytest_timeout", "xdist": "xdist.plugin"}
    return [word for name, module in modules.items() if importlib.util.find_spec(name) for word in ("-p", module)]


def find_workers() -> list[str]:
    """Return how many tests of processes run at a time."""
    count = min(8, (os.cpu_count() or 1) // 2)
    return ["-n", str(count)] if count > 1 and importlib.util.find_spec("xdist") else []


def make_environment(device: str, folder: Path) -> dict[str, str]:
    """Return the environment of all parts.

    Packages that are installed as `tests` would hide this repository's, which has no `__init__.py`: one comes first.
    """
    (folder / "tests").mkdir()
    (folder / "tests" / "__init__.py").write_text(f"__path__ = [{str(ROOT / 'tests')!r}]\n", encoding="utf-8")
    paths = [str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "GPU_TESTS_DEVICE": device,
        "OMP_NUM_THREADS": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }


# --------------------------------------------------------------------------------------------------------------- run


def run_part(part: Part, folder: Path, environment: Mapping[str, str]) -> Result:
    """Run a part, write its log, and print the end of the log if it failed."""
    if part.skipped:
        return Result(part.name, "skipped", 0.0, part.budget, part.skipped)
    path, start = folder / f"{part.name}.log", time.perf_counter()
    with path.open("wb") as log:
        process = subprocess.Popen(
            [part.program, *part.command],
            cwd=ROOT,
            env={**environment, **part.environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = "passed" if process.wait(timeout=part.budget) == 0 else "FAILED"
        except subprocess.TimeoutExpired:
            status = "TIMED OUT"
        finally:
            end_group(process)
    text = path.read_text(encoding="utf-8", errors="replace")
    detail = next((line.strip("= ") for line in reversed(text.splitlines()) if line.strip("= ")), "no output")
    if status == "FAILED" and part.refusal and part.refusal in text:
        status, detail = "skipped", f"{Path(part.program).name}: {part.refusal}"
    if part.is_shown:
        print(text, flush=True)
    elif status not in GOOD:
        print("\n".join(["", f"--- {part.name}: {status}", *text.splitlines()[-TAIL:]]), flush=True)
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    return Result(part.name, status, round(time.perf_counter() - start, 1), part.budget, detail, rows)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a part's processes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def describe_machine(device: str) -> dict[str, str]:
    """Return versions and the device."""
    import torch

    name = torch.cuda.get_device_name(0) if device == "cuda" else "CPU: figures without meaning"
    return {"device": name, "torch": torch.__version__, "python": platform.python_version()}


def has_gpu() -> bool:
    """Return True if torch sees a GPU; another process asks."""
    script = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def print_table(results: Sequence[Result]) -> None:
    """Print a line for each part."""
    print("\n| part | status | s | budget | |\n|---|---|---|---|---|")
    for each in results:
        print(f"| {each.name} | {each.status} | {each.seconds:.0f} | {each.budget} | {each.detail[:120]} |")
    print(flush=True)


def main() -> None:
    """Run the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--parts", default="", help="names with commas between; all by default")
    options = parser.parse_args()
    parts = list_parts(options.device)
    names = options.parts.split(",") if options.parts else [part.name for part in parts]
    if unknown := set(names) - {part.name for part in parts}:
        parser.error(f"--parts must name parts of {', '.join(part.name for part in parts)}, got {', '.join(unknown)}")
    if options.device == "cuda" and not has_gpu():
        sys.exit("no GPU that torch can use: nothing was tested; `--device cpu` proves the script")
    folder = Path(os.environ.get("OUT") or ROOT / "build" / "gpu")
    folder.mkdir(parents=True, exist_ok=True)
    found: list[Result] = []
    summary = {**describe_machine(options.device), "parts": []}
    print(", ".join(f"{key} {value}" for key, value in summary.items() if value), flush=True)
    with tempfile.TemporaryDirectory() as name:
        environment = make_environment(options.device, Path(name))
        chosen = [part for part in parts if part.name in names]
        with ThreadPoolExecutor(1 if options.device == "cuda" else 2) as pool:
            for result in pool.map(lambda part: run_part(part, folder, environment), chosen):
                found.append(result)
                print(f"{result.name}: {result.status}, {result.seconds:.0f} s", flush=True)
                summary["parts"] = [asdict(each) for each in found]
                (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print_table(found)
    sys.exit(any(each.status not in GOOD for each in found))


if __name__ == "__main__":
    main()
