"""The benchmark of states still runs, what it compares is the same, and it fails where it has to."""

from __future__ import annotations

import pytest

from tests.benchmarks.benchmark_scripts import exit_code, run_script, script_fixture

SMALL = ["--size", "50K", "--trained", "50K", "--many", "100", "--rounds", "1"]


states = script_fixture("state_dict")


FACES = {
    "flat": ("shardckpt wrapper, flat", "torch FSDP1"),
    "composable": ("shardckpt fully_shard", "torch FSDP2"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "cases", "compared", "bare"),
    [
        (
            "flat",
            "full,sharded",
            ["model FULL", "model SHARDED"],
            ["bare gather", "bare all-to-all", "bare all-to-all, preallocated"],
        ),
        (
            "composable",
            "optimizer,many",
            ["Adam FULL", "Adam FULL, loaded", "model SHARDED", "Adam SHARDED, loaded"],
            [],
        ),
    ],
)
def test_a_small_run_prints_every_case_beside_torch(row, cases, compared, bare):
    done = run_script("state_dict", *SMALL, "--rows", row, "--cases", cases)
    assert done.returncode in (0, 1), done.stderr
    assert "Traceback" not in done.stderr
    printed = [tuple(cell.strip() for cell in line.split("|")[1:3]) for line in done.stdout.splitlines()]
    assert {(what, by) for what in compared for by in FACES[row]} <= set(printed)
    assert [each[1] for each in printed if each[1:] and each[1].startswith("bare")] == bare


@pytest.mark.parametrize("arguments", [("--rows", "no-such-row"), ("--cases", "no-such-case"), ("--size", "big")])
def test_what_cannot_be_run_is_refused(arguments):
    assert exit_code("state_dict", *arguments) == 2


def measured(states, role, seconds, limits=()):
    method = states.Method("model FULL", role, role, states.placeholder, dict(limits))
    return states.Measurement(method, (seconds,) * 3, (seconds,) * 3, (1, 1))


@pytest.mark.parametrize(("seconds", "failures"), [(1.0, 0), (1.49, 0), (1.51, 1), (4.1, 2)])
def test_a_state_may_take_so_many_times_as_long_as_what_stands_beside_it(states, seconds, failures):
    report = states.Report()
    mine = measured(states, "shardckpt", seconds, {"bare": 1.5, "torch": 1.0})
    report.add([measured(states, "bare", 1.0), mine, measured(states, "torch", 4.0)])
    assert len(report.failed) == failures


def test_a_limit_without_anything_beside_it_is_none(states):
    report = states.Report()
    report.add([measured(states, "shardckpt", 1.0, {"torch": 0.5})])
    assert report.failed == []


@pytest.mark.parametrize(("text", "number"), [("300M", 300_000_000), ("1.1b", 1_100_000_000), ("7", 7)])
def test_sizes_are_numbers_of_parameters(states, text, number):
    assert states.number(text) == number


@pytest.mark.parametrize("size", ["50K", "20M", "300M", "1.1B"])
def test_models_have_about_the_size_asked_for(states, size):
    numel = sum(states.count_unit_params(states.choose_shape(states.number(size))))
    assert 0.9 < numel / states.number(size) < 1.3


def test_states_that_differ_stop_the_benchmark(states):
    one, other = ({"weight": states.torch.full((2,), value)} for value in (1.0, 2.0))
    methods = [
        states.Method("model FULL", by, "torch", lambda state=state: state) for by, state in (("a", one), ("b", other))
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(states.dist, "all_reduce", lambda total: None)
        with pytest.raises(SystemExit, match="sum"):
            states.check(methods)
        states.check(methods[:1] * 2)
