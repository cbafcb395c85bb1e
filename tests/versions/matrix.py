"""Run the suite of `make test-all` with several versions of torch and of Python, and write a table of the counts.

    python tests/versions/matrix.py [--pair PYTHON:TORCH ...] [--root FOLDER] [--table FILE] [-- ARGUMENTS OF PYTEST]
    python tests/versions/matrix.py --pair PYTHON:TORCH --reports FOLDER -- ARGUMENTS OF PYTEST

Each pair gets a virtual environment of its own below the root (`build/matrix`), which is used again: several gigabytes
each. Behind the suite, what each version below the root writes is read by all (`cross_version.py`). The table is in
`docs/compatibility.md`: a run replaces the rows of its own pairs and tests, and keeps the others. The exit code is 0 if
every pair ran and passed.

`--reports` adds up reports of parts of the suite (`--junit-xml` of pytest) in place of a run: of a test in several of
them the last outcome counts, by the names of the files. The row names the arguments: what the parts are together.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.repeat import Counts, count_outcomes, read_outcomes

ROOT = Path(__file__).resolve().parents[2]
CROSS_VERSION = Path(__file__).with_name("cross_version.py")
FAST = "not slow and not gpu"
BEGIN, END = "<!-- matrix: written by tests/versions/matrix.py -->\n", "<!-- matrix: end -->\n"


@dataclass(frozen=True)
class Pair:
    """A version of Python and one of torch: `3.11:2.13.0`."""

    python: str
    torch: str

    @classmethod
    def parse(cls, text: str) -> Pair:
        """Parse `PYTHON:TORCH`."""
        if re.fullmatch(r"3\.\d+:\d+\.\d+\.\d+", text) is None:
            raise argparse.ArgumentTypeError(f"a pair must be PYTHON:TORCH, such as 3.11:2.13.0; got {text}")
        return cls(*text.split(":"))

    @property
    def name(self) -> str:
        """Name of the environment's folder."""
        return f"python-{self.python}-torch-{self.torch}"


PAIRS = [
    Pair("3.10", "2.6.0"),
    Pair("3.12", "2.9.1"),
    Pair("3.11", "2.13.0"),
    Pair("3.13", "2.15.0"),
    Pair("3.14", "2.15.0"),
]
"""The oldest, one in the middle, the pinned and the newest torch, and each Python."""
KEY_COLUMNS = ("torch", "Python", "tests")
COLUMNS = (*KEY_COLUMNS, "passed", "failed", "skipped", "checkpoints of all versions read", "date", "commit")


@dataclass(frozen=True)
class Result:
    """A line of the table.

    Attributes:
        pair: The versions.
        counts: Outcomes of the suite; None if the environment could not be made.
        reading: How many forms of all versions were read, of how many.
        note: Why there are no counts.
    """

    pair: Pair
    counts: Counts | None = None
    reading: tuple[int, int] = (0, 0)
    note: str = ""

    @property
    def is_clean(self) -> bool:
        """True if nothing failed."""
        return self.counts is not None and self.counts.code == 0 and self.reading[0] == self.reading[1]


# ------------------------------------------------------------------------------------------------- environments


def make_environment(pair: Pair, root: Path) -> Path:
    """Return the Python of a pair's environment, made if it is not there.

    Raises:
        RuntimeError: There is no such Python, or the install failed.
    """
    folder = root / pair.name
    python = folder / "bin" / "python"
    if (folder / ".installed").exists():
        return python
    base = find_python(pair.python)
    shutil.rmtree(folder, ignore_errors=True)
    run_checked([base, "-m", "venv", str(folder)])
    constraints = folder / "constraints.txt"
    constraints.write_text(build_constraints(pair), encoding="utf-8")
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # Pip's own configuration may cap torch.
    run_checked([*install, f"torch=={pair.torch}"], PIP_CONFIG_FILE=os.devnull)
    run_checked([*install, "-c", str(constraints), "--editable", f"{ROOT}[test]"], PIP_CONFIG_FILE=os.devnull)
    (folder / ".installed").touch()
    return python


def find_installed(root: Path) -> dict[Pair, Path]:
    """Return the Python of each environment below the root."""
    found = {}
    for mark in sorted(root.glob("python-*-torch-*/.installed")):
        _, python, _, torch = mark.parent.name.split("-")
        found[Pair(python, torch)] = mark.with_name("bin") / "python"
    return found


def find_python(version: str) -> str:
    """Return the interpreter of a version.

    Raises:
        RuntimeError: It is neither on the path nor among pyenv's.
    """
    found = shutil.which(f"python{version}")
    kept = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python{version}"))
    if found is None or subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode:
        if not kept:
            raise RuntimeError(f"python{version} is not installed")
        return str(kept[-1])
    return found


def build_constraints(pair: Pair) -> str:
    """Return the pinned versions for a pair: torch's is its own, and newer ones of the rest need Python 3.11."""
    torch = f"torch=={pair.torch}\n"
    if pair.python == "3.10":
        return torch
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return torch + "".join(f"{line}\n" for line in pinned if not line.startswith(("torch==", "#")))


def run_checked(command: list[str], **environment: str) -> None:
    """Run a command.

    Raises:
        RuntimeError: It failed; with the last line that it printed.
    """
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines() or ["it printed nothing"]
        raise RuntimeError(f"{Path(command[0]).name} {' '.join(command[1:4])} failed: {lines[-1]}")


# --------------------------------------------------------------------------------------------------------- runs


def run_suite(python: Path, arguments: list[str]) -> Counts:
    """Run what `make test-all` runs with an environment's Python."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [str(python), "-m", "pytest", "-q", "-m", FAST, f"--junit-xml={report}", *arguments]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        return count_outcomes(report.read_text(encoding="utf-8") if report.exists() else "<testsuites/>", code)


def read_across(pythons: dict[Pair, Path], folder: Path) -> dict[Pair, tuple[int, int]]:
    """Write with each version and read with each what all wrote; how many forms were read, of how many."""
    for pair, python in pythons.items():
        subprocess.run([str(python), str(CROSS_VERSION), "write", str(folder / pair.name)], cwd=ROOT, check=False)
    found = {}
    for reader, python in pythons.items():
        lines = []
        for writer in pythons:
            command = [str(python), str(CROSS_VERSION), "read", str(folder / writer.name)]
            done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
            read = re.findall(r"(?m)^[a-z_-]+: .*", done.stdout)  # torch 2.9's gloo prints, too
            print("\n".join(f"{reader.name} reads {writer.name}: {line}" for line in read), flush=True)
            lines += read
        found[reader] = sum(line.endswith(": ok") for line in lines), len(lines)
    return found


def add_up(reports: Sequence[str]) -> Counts:
    """Add up runs of parts of the suite; of a test in several reports the last outcome counts.

    Modules that were skipped when they were collected count as one test each, as in a run of all.
    """
    outcomes = {name: outcome for report in reports for name, outcome in read_outcomes(report)}
    failed = [name for name, outcome in outcomes.items() if outcome == "failed"]
    skipped = sum(outcome == "skipped" for outcome in outcomes.values())
    return Counts(len(outcomes) - len(failed) - skipped, failed, skipped, 1 if failed else 0)


# -------------------------------------------------------------------------------------------------------- table


@dataclass(frozen=True)
class Source:
    """What a run tested.

    Attributes:
        date: Day of the run.
        commit: Abbreviated commit; `-dirty` behind it if files differ from it.
        arguments: Tests that pytest was given; empty for all.
    """

    date: datetime.date
    commit: str
    arguments: tuple[str, ...] = ()


def find_commit() -> str:
    """Return the commit that is checked out; `unknown` outside a repository."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def build_row(result: Result, source: Source) -> str:
    """Return a line of the table in Markdown."""
    part = f"`{' '.join(source.arguments)}`" if source.arguments else "all fast ones"
    outcomes = [f"not run: {result.note}", "", "", ""]
    if result.counts is not None and result.counts.code > 1:
        outcomes[0] = f"not whole: pytest exited with code {result.counts.code}"
    elif result.counts is not None:
        counts, (read, of) = result.counts, result.reading
        outcomes = [f"{counts.passed:,}", f"{len(counts.failed)}", f"{counts.skipped:,}", f"{read} of {of}"]
    return _join([result.pair.torch, result.pair.python, part, *outcomes, source.date.isoformat(), source.commit])


def merge_rows(page: str, rows: Sequence[str]) -> str:
    """Return a page in whose table rows replace those of the same versions and tests; others stay.

    Raises:
        ValueError: The page has no place for the table.
    """
    before, _, rest = page.partition(BEGIN)
    old, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"the page must have the lines {BEGIN.strip()} and {END.strip()}")
    head = _join(COLUMNS) + _join(["---"] * len(COLUMNS))
    kept = [line for line in old.splitlines(keepends=True) if re.match(r"\| \d", line)]
    merged = {_split(row)[: len(KEY_COLUMNS)]: row for row in (*kept, *rows)}
    return f"{before}{BEGIN}\n{head}{''.join(merged[key] for key in sorted(merged, key=_rank))}\n{END}{after}"


def _join(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def _split(row: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in row.strip().strip("|").split("|"))


def _rank(key: tuple[str, ...]) -> tuple[list[int], list[int], str]:
    torch, python, part = key
    return [*map(int, torch.split("."))], [*map(int, python.split("."))], part


def main(argv: list[str]) -> int:
    """Run the pairs, write the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", action="append", type=Pair.parse, help="PYTHON:TORCH; by default those of PAIRS")
    parser.add_argument("--root", type=Path, default=ROOT / "build" / "matrix")
    parser.add_argument("--table", type=Path, default=ROOT / "docs" / "compatibility.md")
    parser.add_argument("--reports", type=Path, help="folder of JUnit files of parts of the suite, of one pair")
    parser.add_argument("pytest", nargs="*")
    options = parser.parse_args(argv)
    if options.reports is not None and len(options.pair or ()) != 1:
        parser.error("--reports must be of one --pair")
    named = tuple(each for each in options.pytest if options.reports or each.startswith("tests"))
    source = Source(datetime.datetime.now(datetime.timezone.utc).date(), find_commit(), named)
    pythons, results = {}, []
    for pair in options.pair or PAIRS:
        try:
            pythons[pair] = make_environment(pair, options.root.resolve())
        except RuntimeError as error:
            results.append(Result(pair, note=str(error)))
    if options.reports is not None:
        files = sorted(options.reports.glob("*.xml"))
        counts = dict.fromkeys(pythons, add_up([file.read_text(encoding="utf-8") for file in files]))
    else:
        counts = {pair: run_suite(python, options.pytest) for pair, python in pythons.items()}
    with tempfile.TemporaryDirectory() as folder:
        reading = read_across(find_installed(options.root.resolve()), Path(folder))
    results += [Result(pair, counts[pair], reading[pair]) for pair in pythons]
    rows = [build_row(result, source) for result in results]
    print("".join(rows))
    for pair, found in counts.items():
        print("".join(f"{pair.name} failed: {name}\n" for name in found.failed), end="")
    options.table.write_text(merge_rows(options.table.read_text(encoding="utf-8"), rows), encoding="utf-8")
    return 0 if all(result.is_clean for result in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
