"""The script that counts files and functions counts those of one package, on all threads; ceilings of its counts."""

from __future__ import annotations

import importlib
import os
import threading
from pathlib import Path

import pytest

from shardckpt.core import fully_shard
from tests.kit.models.torch_limits import HAS_INNERMOST_HOOKS
from tests.kit.ranks.harness import run

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "structure.py"
FORWARD, BACKWARD = (9, 50), (15, 142)
"""At most so many files and functions does an iteration of `fully_shard` enter."""
CALLS = {"save(state, path)": 37, "load(state, path)": 56, "consolidate(native)": 38, "consolidate(dcp)": 37}
"""At most so many files does a call enter."""
PUBLIC = {"FullyShardedDataParallel", "FSDPModule"}
"""Classes with as many methods as torch's."""


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


def test_other_classes_have_at_most_300_lines_and_25_methods(structure):
    lines, methods = structure.LARGE_CLASS_LINES, structure.LARGE_CLASS_METHODS
    large = [size for size in structure.measure_classes() if size[0] > lines or size[1] > methods]
    assert [size for size in large if size[2] not in PUBLIC] == []


def test_a_save_a_load_and_a_merge_enter_few_files(structure, tmp_path):
    counts = dict(run(1, lambda rank, world: structure.trace_calls(tmp_path))[0])
    assert {name: counts[name].files for name, most in CALLS.items() if counts[name].files > most} == {}


@pytest.mark.skipif("SHARDCKPT_TEST_STREAMS" in os.environ, reason="with streams it enters more")
@pytest.mark.skipif(not HAS_INNERMOST_HOOKS, reason="the engine records hooks that this torch does not return")
def test_an_iteration_enters_few_files_and_functions(structure):
    def body(rank, world):
        return structure.trace_iteration(fully_shard, structure.OURS)

    for counts, most in zip(run(1, body)[0], (FORWARD, BACKWARD), strict=True):
        assert counts.files <= most[0] and counts.functions <= most[1]
