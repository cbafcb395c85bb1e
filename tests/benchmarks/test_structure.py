"""The script that counts files and functions counts those of the package it is asked for, on all threads."""

from __future__ import annotations

import importlib
import threading
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "structure.py"


@pytest.fixture
def structure(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("structure")


def test_a_trace_counts_files_and_functions_of_one_package(structure, monkeypatch, tmp_path):
    (tmp_path / "inner.py").write_text("def one(): two()\ndef two(): pass\n")
    (tmp_path / "outer.py").write_text("import inner\ndef call(): inner.one(); inner.one(); str(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    outer = importlib.import_module("outer")
    assert structure.trace(outer.call, str(tmp_path)) == structure.Trace(files=2, functions=3, moves=2)
    assert structure.trace(outer.call, str(tmp_path / "inner")) == structure.Trace(files=1, functions=2, moves=1)


def test_a_trace_sees_other_threads(structure, monkeypatch, tmp_path):
    (tmp_path / "worker.py").write_text("def work(): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    worker = importlib.import_module("worker")

    def call():
        thread = threading.Thread(target=worker.work)
        thread.start()
        thread.join()

    assert structure.trace(call, str(tmp_path)).functions == 1


def test_classes_are_measured_the_longest_first(structure):
    sizes = structure.measure_classes()
    assert sizes == sorted(sizes, reverse=True)
    assert {"Box", "Checkpointer"} <= {name for _, _, name in sizes}
