"""Run the scripts of `benchmarks/`, or import them as they import each other."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def run_script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / f"{name}.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@contextmanager
def imported(name: str) -> Iterator[ModuleType]:
    """Import a script for the block; it and the scripts that it imports are forgotten afterwards."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))
        for script in FOLDER.glob("*.py"):
            sys.modules.pop(script.stem, None)


def script_fixture(name: str) -> Callable[..., Iterator[ModuleType]]:
    """Return a fixture that imports a script for a test."""

    @pytest.fixture
    def script() -> Iterator[ModuleType]:
        with imported(name) as module:
            yield module

    return script


def exit_code(name: str, *arguments: str) -> object:
    """Return the code with which a script exits, in this process."""
    with imported(name) as script, mock.patch.object(sys, "argv", [f"{name}.py", *arguments]):
        with pytest.raises(SystemExit) as caught:
            script.main()
        return caught.value.code
