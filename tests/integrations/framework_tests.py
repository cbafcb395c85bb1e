"""Run the FSDP tests of Accelerate or Lightning, with torch's classes and with ours, and compare the outcomes.

    python tests/integrations/framework_tests.py accelerate CLONE    # of the version that is installed
    python tests/integrations/framework_tests.py lightning CLONE

Without a GPU, the tests of Accelerate that ask for one are run all the same; those of Lightning are skipped. Tests that
download a model fail without a network. Exits with 1 if a test has another outcome with our classes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

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
}
OUTCOME = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) (?:\[(\d+)\] )?(\S+)", re.MULTILINE)


def pytest_configure() -> None:
    """As a plugin of these tests: replace torch's classes if asked to, and let tests of Accelerate run on the CPU."""
    if os.environ.get("REPLACE_TORCH_FSDP"):
        import shardckpt.core

        shardckpt.core.replace_torch_fsdp()
    if os.environ["FRAMEWORK"] == "accelerate":
        import accelerate.test_utils.testing

        accelerate.test_utils.testing.require_non_cpu = lambda test: test


def run_tests(framework: str, clone: Path, is_replaced: bool) -> Counter[str]:
    """Return how often each outcome was that of each test."""
    folder = clone / "tests" if framework == "lightning" else clone
    here = Path(__file__).resolve()
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "FRAMEWORK": framework}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(here.parent), os.environ.get("PYTHONPATH", "")]))
    if is_replaced:
        environment["REPLACE_TORCH_FSDP"] = "1"
    found: Counter[str] = Counter()
    for patterns in TESTS[framework]:
        files = [str(path.relative_to(folder)) for pattern in patterns for path in sorted(folder.glob(pattern))]
        options = ["-q", "-rA", "-p", "no:cacheprovider", "-o", "addopts=", "-p", here.stem, "--timeout=120"]
        command = [sys.executable, "-W", "ignore", "-m", "pytest", *options, *files]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1200, check=False
        )
        for outcome, count, test in OUTCOME.findall(done.stdout):
            found[f"{outcome} {test.split('::', 1)[-1] if not count else test}"] += int(count or 1)
        if not any(key.startswith("PASSED") for key in found):
            raise SystemExit(done.stdout + done.stderr)
    return found


def main(framework: str, clone: str) -> None:
    """Print the counts of both runs, and the tests with other outcomes."""
    theirs, ours = (run_tests(framework, Path(clone).resolve(), is_replaced) for is_replaced in (False, True))
    for title, found in (("torch", theirs), ("shardckpt.core", ours)):
        counts: Counter[str] = Counter()
        for key, number in found.items():
            counts[key.split(" ")[0].lower()] += number
        print(f"{title}: {', '.join(f'{number} {outcome}' for outcome, number in sorted(counts.items()))}")
    others = [f"torch: {key}" for key in theirs - ours] + [f"shardckpt.core: {key}" for key in ours - theirs]
    print("\n".join(others) or "all outcomes are equal")
    raise SystemExit(1 if others else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
