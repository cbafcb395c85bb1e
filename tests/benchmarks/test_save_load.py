"""The benchmark of saves and loads still runs, checks what was loaded, and fails where it has to."""

from __future__ import annotations

import pytest

from tests.benchmarks.benchmark_scripts import exit_code, run_script, script_fixture

SMALL = ["--size", "2MB", "--many", "50", "--very-many", "50", "--rounds", "1", "--fsync", "neither"]


module = script_fixture("save_load")


@pytest.mark.slow
def test_a_small_run_prints_every_case_beside_its_peers(tmp_path):
    cases = "save,load,reshard,reshard-pieces,async,many,very-many,memory"
    done = run_script("save_load", *SMALL, "--cases", cases, "--folder", str(tmp_path))
    assert done.returncode in (0, 1), done.stderr
    assert "Traceback" not in done.stderr
    rows = [tuple(cell.strip() for cell in line.split("|")[1:3]) for line in done.stdout.splitlines() if "|" in line]
    kinds = {"save": "raw write", "load": "raw read", "2 ranks to 1": "raw read", "2 ranks to 4": "raw read"}
    kinds["2 ranks to 4, 1 MiB each"] = "raw read"
    assert {(what, by) for what, bare in kinds.items() for by in (bare, "shardckpt", "DCP")} <= set(rows)
    assert {("save 50 tensors", by) for by in ("safetensors", "shardckpt", "DCP")} <= set(rows)
    assert {("stall", by) for by in ("memcpy", "shardckpt", "DCP")} <= set(rows)
    assert {what for what, _ in rows} >= {"shardckpt.save", "shardckpt.async_save"}
    assert list(tmp_path.iterdir()) == []


def test_plans_of_few_ranks_are_made_for_rows_and_flat_ranges(module):
    assert module.time_planning(8, 3, flat=False)[1] == 24
    assert module.time_planning(8, 3, flat=True)[1] > 24  # a flat range is several boxes


@pytest.mark.parametrize("arguments", [("--cases", "no-such-case"), ("--size", "big"), ("--fsync", "one")])
def test_what_cannot_be_run_is_refused(arguments):
    assert exit_code("save_load", *arguments) == 2


def measured(module, by, role, seconds, limits=()):
    method = module.Method("save", by, role, module.nothing, limits=dict(limits))
    return module.Measurement(method, seconds, (seconds,) * 3, (seconds,) * 3)


@pytest.mark.parametrize(("seconds", "failures"), [(1.0, 0), (1.24, 0), (1.26, 1), (4.1, 2)])
def test_a_save_may_take_so_many_times_as_long_as_what_stands_beside_it(module, seconds, failures):
    report = module.Report()
    mine = measured(module, "shardckpt", "shardckpt", seconds, {"raw write": 1.25, "DCP": 1.0})
    report.table("Saving", [measured(module, "raw write", "bare", 1.0), mine, measured(module, "DCP", "peer", 4.0)])
    assert len(report.failed) == failures


def test_a_peer_that_takes_one_turn_is_compared_with_the_median(module):
    report = module.Report()
    slow = module.Measurement(module.Method("save", "DCP", "peer", module.nothing, is_slow=True), 9.0, (9.0,), (9.0,))
    report.table("Saving", [measured(module, "shardckpt", "shardckpt", 1.0, {"DCP": 0.1}), slow])
    assert report.failed == ["save, shardckpt: 0.11 x DCP; the limit is 0.1"]


def test_a_tensor_that_is_not_the_truth_stops_the_benchmark(module, monkeypatch):
    monkeypatch.setattr(module.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(module.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(module, "local", lambda tensor: tensor)
    state = {"weight": module.truth("weight", 0, 4, (4, 8))}
    module.check(state, "anybody")
    state["weight"][3, 7] += 1
    with pytest.raises(SystemExit, match="weight loaded by anybody differs"):
        module.check(state, "anybody")
