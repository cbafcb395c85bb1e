"""Run the FSDP tests of a framework, with torch's classes and with ours, and compare the outcomes.

    python tests/kit/runs/framework_tests.py accelerate CLONE    # of the version that is installed
    python tests/kit/runs/framework_tests.py lightning CLONE
    python tests/kit/runs/framework_tests.py torchtitan CLONE

Without a GPU, the tests of Accelerate that ask for one are run all the same; those of Lightning are skipped. Tests that
download a model fail without a network. The tests of torchtitan start processes, in which the classes are ours as well;
they need triton and expecttest. Exits with 1 if a test has another outcome with our classes, or if these were not
called.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

PRECISION = "plugins/precision/test_fsdp.py"
TESTS = {
    "accelerate": [["tests/fsdp/test_fsdp.py"]],
    "lightning": [
        [
            f"tests_{part}/{files}"
            for files in ("strategies/test_fsdp*.py", "strategies/test_model_parallel*.py", PRECISION)
        ]
        for part in ("fabric", "pytorch")
    ],
    "torchtitan": [
        ["tests/unit_tests/test_fsdp_moe_sharding.py", "tests/unit_tests/test_parallel_dims.py"],
    ],
}
CHOSEN = {"torchtitan": "FSDP or Fsdp"}
"""Tests to run in these files; without an entry all of them."""

LIMIT = 300
"""Seconds for a test."""

OUTCOME = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) (?:\[(\d+)\] )?(\S+)", re.MULTILINE)


def replace_classes() -> None:
    """Replace torch's classes in this process, and note each call of ours in a file, by process."""
    import shardckpt.core

    wrapper = shardckpt.core.FullyShardedDataParallel
    wrapper.__init__ = note_calls(wrapper.__init__)
    shardckpt.core.fully_shard = note_calls(shardckpt.core.fully_shard)
    shardckpt.core.replace_torch_fsdp()


def note_calls(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with open(os.environ["CALLS"], "a") as file:
            file.write(f"{os.getpid()}\n")
        return function(*args, **kwargs)

    return call


def pytest_configure() -> None:
    """As a plugin of these tests: let tests of Accelerate run on the CPU, and fork the ranks of those of torchtitan."""
    if os.environ["FRAMEWORK"] == "accelerate":
        import accelerate.test_utils.testing

        accelerate.test_utils.testing.require_non_cpu = lambda test: test
    if os.environ["FRAMEWORK"] == "torchtitan":  # spawned, each of eight ranks imports torchtitan for seconds
        import torch.multiprocessing
        import torchtitan.models.qwen3

        assert torchtitan.models.qwen3
        torch.multiprocessing.get_context = lambda method=None: multiprocessing.get_context("fork")


def run_tests(framework: str, clone: Path, is_replaced: bool) -> tuple[Counter[str], Counter[str]]:
    """Return how often each outcome was that of each test, and how often each process called our classes."""
    folder = clone / "tests" if framework == "lightning" else clone
    here = Path(__file__).resolve()
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as start:
        calls = Path(start, "calls")
        calls.touch()
        if is_replaced:  # Python imports this module when it starts: processes that tests start are reached too
            Path(start, "sitecustomize.py").write_text(f"import {here.stem}\n\n{here.stem}.replace_classes()\n")
        paths = [start, str(here.parent), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "FRAMEWORK": framework,
            "CALLS": str(calls),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        for patterns in TESTS[framework]:
            found += run_files(framework, folder, patterns, environment)
        return found, Counter(calls.read_text().split())


def run_files(framework: str, folder: Path, patterns: list[str], environment: dict[str, str]) -> Counter[str]:
    """Return how often each outcome was that of each test in some files."""
    files = [str(path.relative_to(folder)) for pattern in patterns for path in sorted(folder.glob(pattern))]
    plugin = Path(__file__).stem
    options = ["-q", "-rA", "-p", "no:cacheprovider", "-o", "addopts=", "-p", plugin, f"--timeout={LIMIT}"]
    command = [sys.executable, "-W", "ignore", "-m", "pytest", *options, "-k", CHOSEN.get(framework, ""), *files]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1800, check=False
    )
    found: Counter[str] = Counter()
    for outcome, count, test in OUTCOME.findall(done.stdout):
        found[f"{outcome} {test.split('::', 1)[-1] if not count else test}"] += int(count or 1)
    if not any(key.startswith("PASSED") for key in found):
        raise SystemExit(done.stdout + done.stderr)
    return found


def main(framework: str, clone: str) -> None:
    """Print the counts of both runs, the calls of our classes, and the tests with other outcomes."""
    (theirs, none), (ours, calls) = (run_tests(framework, Path(clone).resolve(), each) for each in (False, True))
    for title, found in (("torch", theirs), ("shardckpt.core", ours)):
        counts: Counter[str] = Counter()
        for key, number in found.items():
            counts[key.split(" ")[0].lower()] += number
        print(f"{title}: {', '.join(f'{number} {outcome}' for outcome, number in sorted(counts.items()))}")
    print(f"calls of our classes: {calls.total()} in {len(calls)} processes; with torch's: {none.total()}")
    others = [f"torch: {key}" for key in theirs - ours] + [f"shardckpt.core: {key}" for key in ours - theirs]
    print("\n".join(others) or "all outcomes are equal")
    is_unused = not calls and framework != "accelerate"  # whose tests compare settings, and shard no model on the CPU
    raise SystemExit(1 if others or none or is_unused else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
