"""Statistics over the steps of a run, and the first step that a condition is true for."""

from __future__ import annotations

import math
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import shardckpt
from shardckpt.errors import CheckpointError, UsageError
from shardckpt.native.run_directory import step_name
from shardckpt.offline.run_history.bisect import parse_condition
from shardckpt.readers.registry import open_checkpoint
from tests.kit.runs.command import run_here
from tests.kit.writers.native_writer import write_step

module = import_module("shardckpt.offline.run_history.history")


def write_run(root: Path, values: list[float]) -> Path:
    for number, value in enumerate(values):
        write_step(root / step_name(number), {"model": {"a": torch.tensor([value]), "b": torch.ones(4)}})
    return root


def test_a_history_has_the_statistics_of_every_step(tmp_path: Path) -> None:
    found = shardckpt.history(write_run(tmp_path, [1.0, 2.0, math.nan]), include=["a"])
    assert [(step.number, step.tensors[0].max, step.tensors[0].nans) for step in found.steps] == [
        (0, 1.0, 0),
        (1, 2.0, 0),
        (2, None, 1),
    ]


@pytest.mark.parametrize("first", range(8))
def test_a_bisection_finds_the_first_of_eight_in_four_looks(first: int, tmp_path: Path) -> None:
    root = write_run(tmp_path, [math.nan if number >= first else 1.0 for number in range(8)])
    found = shardckpt.bisect(root, when="nan")
    assert found.first is not None
    assert (found.first.number, [tensor.name for tensor in found.first.tensors]) == (first, ["a"])
    assert len(found.examined) <= 4


def test_a_condition_that_ends_again_is_found_by_a_scan_alone(tmp_path: Path) -> None:
    root = write_run(tmp_path, [1.0, 100.0, 1.0])
    assert shardckpt.bisect(root, when="max>10").first is None
    found = shardckpt.bisect(root, when="max>10", scan=True)
    assert found.first is not None
    assert (found.first.number, found.examined) == (1, (0, 1))


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("when", "values", "first"),
    [
        ("l2>100", [1, 1, 1e3, 1e5, NAN, NAN], 2),
        ("max>=1e4", [1, 1, 1e3, 1e5, NAN, NAN], 3),
        ("max>=1e4", [1, 1, 1e5, INF, INF, NAN], 2),
        ("inf", [1, 1, 1, INF, NAN, NAN], 3),
        ("mean<-10", [1, 1, -100, NAN, INF, -100], 2),
        ("max>10", [1, 1, NAN, NAN, 100, 100], 4),
        ("max>10", [1, 1, 1, 1, NAN, NAN], None),
        ("inf", [1, 1, 1, NAN, NAN, NAN], None),
    ],
)
def test_a_bisection_finds_what_came_before_nan(
    when: str, values: list[float], first: int | None, tmp_path: Path
) -> None:
    """Statistics leave NaN and Inf out, so the condition is no longer true for the newest step."""
    root = write_run(tmp_path, values)
    for scan in (False, True):
        found = shardckpt.bisect(root, when=when, scan=scan).first
        assert (None if found is None else found.number) == first


def test_other_values_of_a_tensor_with_nan_do_not_hide_that_it_grew(tmp_path: Path) -> None:
    for number, values in enumerate([[1.0, 1.0], [1.0, 500.0], [1.0, math.nan]]):
        write_step(tmp_path / step_name(number), {"model": {"a": torch.tensor(values)}})
    found = shardckpt.bisect(tmp_path, when="l2>100").first
    assert found is not None
    assert found.number == 1


def test_an_answer_without_a_scan_says_that_it_looked_at_some_steps(tmp_path: Path) -> None:
    root = write_run(tmp_path, [1.0, 100.0, 1.0])
    found = run_here("bisect", root, "--when", "max>10")
    assert (found.code, found.err) == (0, "")
    assert found.out.endswith(": max>10 in no step that was looked at: 1 step; --scan looks at all\n")
    found = run_here("bisect", root, "--when", "max>1000", "--scan")
    assert found.out.endswith(": max>1000 in no step that was looked at: 3 steps\n")


@pytest.mark.parametrize("verb", [["history"], ["bisect", "--when", "nan"]])
def test_a_run_without_a_complete_step_is_an_error(verb: list[str], tmp_path: Path) -> None:
    name, *options = verb
    found = run_here(name, tmp_path, *options)
    assert (found.code, found.out) == (2, "")
    assert "this run has no complete step" in found.err and "an empty folder" in found.err
    root = write_run(tmp_path / "run", [1.0])
    (root / step_name(0) / "COMMIT").unlink()
    found = run_here(name, root, *options)
    assert found.code == 2
    assert "1 incomplete" in found.err


def test_a_tensor_without_a_finite_value_has_a_dash_for_its_norm(tmp_path: Path) -> None:
    root = write_run(tmp_path, [math.nan])
    assert run_here("stats", root / step_name(0), "--include", "a").out.splitlines()[1].split()[4:] == ["-"] * 3
    lines = run_here("history", root).out.splitlines()
    assert [line.split()[2:] for line in lines] == [["l2"], ["-"], ["2"]]
    assert run_here("history", root, "--stat", "zeros").out.splitlines()[1].split() == ["0", "a", "0"]
    assert "1 NaN  0 Inf  L2 -" in run_here("bisect", root, "--when", "nan").out


@pytest.mark.parametrize(
    ("text", "is_true"),
    [("l2>=5", True), ("l2>5", False), ("min<-3e0", True), (" mean <= 0 ", False), ("zeros>0", False), ("inf", True)],
)
def test_a_condition_compares_a_statistic(text: str, is_true: bool) -> None:
    tensor = shardckpt.results.TensorStats("w", "float32", (3,), 0, 1, 0, -4.0, 3.0, 0.5, 5.0)
    assert parse_condition(text).is_true(tensor) is is_true


@pytest.mark.parametrize(
    "text", ["", "nans", "l2>", "l2>x", "l2==1", "__import__('os')", "l2>1 or 1", "size>1", "l2>\u0661"]
)
def test_another_text_is_refused_and_never_evaluated(text: str) -> None:
    with pytest.raises(UsageError, match="condition"):
        parse_condition(text)


def test_the_exit_code_says_whether_a_step_was_found(tmp_path: Path) -> None:
    root = write_run(tmp_path, [1.0, math.inf])
    found = run_here("bisect", root, "--when", "inf", "--tensor", "a")
    assert (found.code, found.err) == (1, "")
    assert "step 1 is the first with inf, in 1 tensor; looked at 2 steps" in found.out
    assert run_here("bisect", root, "--when", "nan").code == 0
    assert run_here("bisect", root, "--when", "nonsense").code == 2
    assert run_here("bisect", root, "--when", "nan", "--tensor", "none").code == 2


def test_a_history_is_printed_a_value_a_line(tmp_path: Path) -> None:
    root = write_run(tmp_path, [1.0, 3.0])
    lines = run_here("history", root, "--tensor", "a", "--stat", "max").out.splitlines()
    assert [line.split() for line in lines] == [["step", "tensor", "max"], ["0", "a", "1"], ["1", "a", "3"]]
    assert run_here("history", root, "--stat", "name").code == 2


@pytest.fixture
def run_with_generators(tmp_path: Path) -> Path:
    """Return a run of three steps with the state of random generators; the model grows in the last one."""
    for number, value in enumerate([1.0, 2.0, 500.0]):
        model = torch.nn.Linear(1, 1)
        torch.nn.init.constant_(model.weight, value)
        model.register_buffer("batches", torch.tensor(1000))
        optim = torch.optim.Adam(model.parameters())
        optim.state[model.bias] = {"step": torch.tensor(1000.0), "exp_avg": torch.ones(1), "exp_avg_sq": torch.ones(1)}
        state = {"model": model, "optim": optim, "rng": shardckpt.RNGState(), "order": torch.arange(1000)}
        shardckpt.save(state, tmp_path / step_name(number))
    return tmp_path


COUNTERS = ("batches", "bias/step", "order", "rng.0.numpy.keys", "rng.0.torch")


SLOTS = ("bias/exp_avg", "bias/exp_avg_sq")


def test_counters_and_states_of_random_generators_are_no_training_values(run_with_generators: Path) -> None:
    """Their norms are above 100 in every step."""
    found = shardckpt.bisect(run_with_generators, when="l2>100")
    assert found.first is not None
    assert (found.first.number, [tensor.name for tensor in found.first.tensors]) == (2, ["weight"])
    assert sorted(found.left_out) == sorted(COUNTERS)
    steps = shardckpt.history(run_with_generators).steps
    assert all({tensor.name for tensor in step.tensors} == {"weight", "bias", *SLOTS} for step in steps)


def test_scores_of_a_callback_are_no_training_values(tmp_path: Path) -> None:
    """Lightning's `ModelCheckpoint` saves `kth_value`, which is infinite until enough steps have a score."""
    callback = {"kth_value": torch.tensor(math.inf), "best_k_models": {"runs/a/step-1": torch.tensor(0.5)}}
    state = {"model": torch.nn.Linear(1, 1), "average": torch.ones(2), "trainer": {"callbacks": {"saving": callback}}}
    shardckpt.save(state, tmp_path / step_name(1))
    found = shardckpt.bisect(tmp_path, when="inf")
    assert found.first is None
    assert all(name.startswith("trainer.callbacks.saving.") for name in found.left_out) and len(found.left_out) == 2
    [step] = shardckpt.history(tmp_path).steps
    assert {tensor.name for tensor in step.tensors} == {"weight", "bias", "average"}
    asked = shardckpt.bisect(tmp_path, when="inf", include=["*kth_value"])
    assert asked.first is not None and len(asked.first.tensors) == 1


def test_a_part_has_no_counters_either(run_with_generators: Path) -> None:
    for part, left_out in (("model", ("batches",)), ("optim", ("bias/step",))):
        found = shardckpt.bisect(run_with_generators, when="max>=1000", part=part)
        assert (found.first, found.left_out) == (None, left_out)


@pytest.mark.parametrize("options", [{"part": "all"}, {"include": ["rng.*"]}])
def test_states_of_random_generators_are_taken_if_asked_for(options: dict[str, Any], run_with_generators: Path) -> None:
    found = shardckpt.bisect(run_with_generators, when="l2>100", **options)
    assert found.first is not None
    assert (found.first.number, found.left_out) == (0, ())
    assert "rng.0.torch" in {tensor.name for tensor in found.first.tensors}


@pytest.mark.parametrize("verb", [["history"], ["bisect", "--when", "l2>100"], ["stats"]])
def test_what_is_left_out_is_counted(verb: list[str], run_with_generators: Path) -> None:
    name, *options = verb
    place = run_with_generators / step_name(0) if name == "stats" else run_with_generators
    found = run_here(name, place, *options)
    assert "rng" not in found.out
    assert found.err.startswith(
        "left out: 5 tensors with counters (steps, batches), single numbers outside the model and random"
    )
    assert "--part all" in found.err
    asked = run_here(name, place, *options, "--part", "all")
    assert "rng.0.torch" in asked.out and asked.err == ""


def test_states_of_random_generators_are_found_beside_several_models(tmp_path: Path) -> None:
    """Then no subtree is the model, and the top level counts as one."""
    state = {"left": torch.nn.Linear(1, 1), "right": torch.nn.BatchNorm1d(2), "rng": shardckpt.RNGState()}
    shardckpt.save(state, tmp_path / "step")
    found = shardckpt.stats(tmp_path / "step")
    assert sorted(found.left_out) == ["right.num_batches_tracked", "rng.0.numpy.keys", "rng.0.torch"]
    assert "right.running_var" in {tensor.name for tensor in found.tensors}


@pytest.mark.parametrize("moment", ["before", "while"])
@pytest.mark.parametrize("verb", ["history", "bisect", "scan"])
def test_a_step_that_is_pruned_meanwhile_is_passed_over_with_a_word(
    verb: str, moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prune begins with `COMMIT`, and another process may read manifest and payload while it goes on."""
    write_run(tmp_path, [1.0] * 5 + [math.nan] * 3)
    stats = module.stats

    def remove_middle() -> None:
        shardckpt.prune(tmp_path, steps=[4])

    def read(path: str, **options: Any) -> shardckpt.results.Statistics:
        if path.endswith(step_name(4)) and Path(path).exists():
            if moment == "before":
                remove_middle()
            else:
                reader = open_checkpoint(path)
                remove_middle()
                monkeypatch.setattr("shardckpt.offline.stats.open_checkpoint", lambda *_: reader)
                try:
                    return stats(path, **options)
                finally:
                    monkeypatch.setattr("shardckpt.offline.stats.open_checkpoint", open_checkpoint)
        return stats(path, **options)

    monkeypatch.setattr(module, "stats", read)
    if verb == "history":
        found = shardckpt.history(tmp_path)
        assert [step.number for step in found.steps] == [0, 1, 2, 3, 5, 6, 7]
    else:
        found = shardckpt.bisect(tmp_path, when="nan", scan=verb == "scan")
        assert found.first is not None and found.first.number == 5
    assert len(found.warnings) == 1
    assert step_name(4) in found.warnings[0] and "was removed while it was read" in found.warnings[0]


def test_a_step_that_is_damaged_is_an_error_and_not_passed_over(tmp_path: Path) -> None:
    write_run(tmp_path, [1.0] * 2)
    manifest = next((tmp_path / step_name(1)).glob("*.manifest.json"))
    manifest.write_bytes(manifest.read_bytes()[::-1])
    with pytest.raises(CheckpointError):
        shardckpt.history(tmp_path)
