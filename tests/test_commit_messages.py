"""The hook for commit messages takes subjects of the form that CONTRIBUTING.md asks for, and no others."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

HOOK = Path(__file__).resolve().parents[1] / ".githooks" / "commit-msg"
find_fault = runpy.run_path(str(HOOK))["find_fault"]


@pytest.mark.parametrize(
    "message",
    [
        "core: free the buffer after the last reduction",
        "docs: say which stores support conditional puts\n\nAzure was missing.",
        "tests: run " + "y" * 61,
        "convert, format: name missing files",
        "Merge branch 'main' into topic",
        "storage: retry a lost answer\n# a comment of git's template\n",
    ],
)
def test_a_subject_of_the_form_is_taken(message: str) -> None:
    assert find_fault(message) is None


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        ("What is laid out again says what its own save is", "area: imperative verb object"),
        ("core: Free the buffer", "area: imperative verb object"),
        ("core: free the buffer.", "area: imperative verb object"),
        ("core:free the buffer", "area: imperative verb object"),
        ("core: free", "area: imperative verb object"),
        ("", "area: imperative verb object"),
        ("tests: run " + "y" * 62, "at most 72 characters, got 73"),
        ("core: free the buffer\nbecause it is large", "an empty line must follow"),
    ],
)
def test_another_subject_is_refused_with_the_rule(message: str, fault: str) -> None:
    assert fault in find_fault(message)


@pytest.mark.parametrize(("message", "code"), [("core: free the buffer", 0), ("What is free", 1)])
def test_the_hook_says_the_fault_and_its_exit_code_stops_the_commit(tmp_path: Path, message: str, code: int) -> None:
    (tmp_path / "message").write_text(message, encoding="utf-8")
    command = [sys.executable, str(HOOK), str(tmp_path / "message")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, bool(done.stderr)) == (code, code == 1)
