"""Describe the machine, and write the sections of RESULTS.md."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "RESULTS.md"
HEAD = """# Results

The scripts in this folder write this file with `--record`. Their docstrings describe the measurements.
"""


class Lines:
    """The printed lines of a benchmark, and the limits that it exceeded."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.failed: list[str] = []

    def say(self, line: str = "") -> None:
        """Print a line and keep it for RESULTS.md."""
        print(line, flush=True)
        self.lines.append(line)


def machine() -> str:
    """Return a line about the machine and the Python version."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    model = next((line.split(":")[1].strip() for line in info.splitlines() if line.startswith("model name")), "?")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    system = f"Linux {platform.release()}, Python {platform.python_version()}"
    return f"{os.cpu_count()} cores ({model}), {memory:.0f} GiB, {system}"


def record(title: str, lines: Sequence[str]) -> None:
    """Write a section of RESULTS.md, replacing the older one with the same title."""
    text = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else HEAD
    sections = [part for part in re.split(r"(?m)^(?=## )", text) if not part.startswith(f"## {title}\n")]
    sections.append(f"## {title}\n\n" + "\n".join(lines).strip() + "\n")
    RESULTS.write_text("\n\n".join(part.strip() for part in sections) + "\n", encoding="utf-8")
