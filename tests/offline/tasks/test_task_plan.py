"""Plans are data: what is damaged, edited or hostile is refused, and shares divide the tasks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardckpt
from shardckpt.errors import FormatError, MissingFileError, ShardckptError, UnsupportedError, UsageError
from shardckpt.offline.tasks import task_plan
from shardckpt.offline.tasks.part_results import format_numbers
from shardckpt.offline.tasks.task_plan import TaskPlan, WorkPart, encode_arguments, parse_share, read_plan

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
PLAN = TaskPlan("0a", "consolidate", {"src": "a"}, "f", "f/files", "", "", "d", ((WorkPart("x", 3),), ()))


def write(folder: Path, content: object) -> Path:
    path = folder / "plan.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


@given(st.lists(st.lists(st.tuples(NAMES, st.integers(0, 2**60)), max_size=3), max_size=4), NAMES)
def test_a_plan_is_read_as_it_was_written(tmp_path_factory, tasks, text):
    names = [name for task in tasks for name, _ in task]
    if len(set(names)) < len(names):
        return
    plan = TaskPlan(
        "1",
        text,
        {"a": [text, 1.5, None]},
        text,
        "",
        text,
        "",
        "",
        tuple(tuple(WorkPart(*part) for part in task) for task in tasks),
    )
    assert read_plan(write(tmp_path_factory.mktemp("plan"), plan.encode())) == plan


def test_an_edited_plan_is_refused(tmp_path):
    content = json.loads(PLAN.encode())
    for name, value in {"verb": "convert", "folder": "/", "tasks": [[["y", 3]]], "arguments": {"src": "b"}}.items():
        with pytest.raises(FormatError, match="this plan was changed after it was made"):
            read_plan(write(tmp_path, {**content, name: value}))


@pytest.mark.parametrize(
    ("content", "error", "match"),
    [
        (b"", FormatError, "its JSON cannot be read"),
        (b"[" * 100_000, FormatError, "its JSON cannot be read"),
        (b"\xff", FormatError, "its JSON cannot be read"),
        ([], FormatError, "this is not a plan"),
        ({"format": "shardckpt-plan", "version": 2}, UnsupportedError, "the version that this program reads"),
        ({"format": "shardckpt-plan", "version": 1}, FormatError, "lacks a field"),
    ],
)
def test_what_is_no_plan_is_refused(content, error, match, tmp_path):
    with pytest.raises(error, match=match):
        shardckpt.run_task(write(tmp_path, content), 0)


def test_a_plan_removes_no_folder_that_is_not_its_own(tmp_path):
    """Its file lies in the folder that it names, where each plan's copy lies."""
    for name, staging in (("data", "data/files"), (".many.tasks-00000001", ".."), (".many.tasks-00000002", "")):
        folder = tmp_path / name
        folder.mkdir()
        staged = staging and f"{tmp_path}/{staging}"
        called = {"src": "a", "dst": "b"}
        plan = replace(PLAN, id="00000001", arguments=called, folder=str(folder), staging=staged)
        path = write(folder, plan.encode())
        for act in (shardckpt.discard_plan, shardckpt.commit_plan, lambda path: shardckpt.run_task(path, 0)):
            with pytest.raises(FormatError, match="a plan must use folders of its own"):
                act(path)
        assert path.exists()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({}, "the call that is planned is not complete"),
        ({"src": "a", "dst": "b", "on_progress": "x"}, "an argument that no plan stores"),
        ({"src": 5, "dst": "b"}, "a source in a plan must be a path or URL"),
        ({"src": ["a", None], "dst": "b"}, "a source in a plan must be a path or URL"),
    ],
)
def test_arguments_that_no_verb_takes_are_refused(arguments, match, tmp_path):
    plan = replace(PLAN, arguments=arguments)
    for act in (shardckpt.commit_plan, lambda path: shardckpt.run_task(path, 0)):
        with pytest.raises(ShardckptError, match=match):
            act(write(tmp_path, plan.encode()))


def test_text_that_names_no_file_and_deep_arguments_are_refused(tmp_path):
    content = json.loads(PLAN.encode())
    deep = b'{"a":' * 900 + b"1" + b"}" * 900
    for data in (
        json.dumps({**content, "folder": "\ud800"}).encode(),
        json.dumps({**content, "arguments": "?"}).encode().replace(b'"?"', deep),
    ):
        with pytest.raises(FormatError):
            read_plan(write(tmp_path, data))


@pytest.mark.parametrize("tasks", [None, {}, [1], [[1]], [[["x"]]], [[["x", -1]]], [[["x", True]]], [[[1, 1]]]])
def test_tasks_of_another_form_are_refused(tasks, tmp_path):
    with pytest.raises(FormatError, match="tasks must be lists"):
        read_plan(write(tmp_path, {**json.loads(PLAN.encode()), "tasks": tasks}))


def test_a_plan_that_is_missing_or_too_large_is_refused(tmp_path, monkeypatch):
    with pytest.raises(MissingFileError):
        read_plan(tmp_path / "none")
    path = write(tmp_path, PLAN.encode())
    monkeypatch.setattr(task_plan, "MAX_PLAN_BYTES", 10)
    with pytest.raises(FormatError, match="a plan must be small"):
        read_plan(path)


def test_a_plan_for_a_verb_that_is_not_shared_runs_nothing(tmp_path):
    plan = TaskPlan("1", "prune", {}, str(tmp_path), "", "", "", "", ((WorkPart("x", 1),),))
    with pytest.raises(UsageError, match="a plan needs a verb that can be shared"):
        shardckpt.run_task(write(tmp_path, plan.encode()), 0)


@given(st.integers(1, 40), st.integers(0, 100))
def test_shares_divide_the_tasks(shares, count):
    found = [number for k in range(1, shares + 1) for number in parse_share(f"{k}/{shares}", count)]
    assert sorted(found) == [*range(count)]


@pytest.mark.parametrize(
    "text", ["0/3", "4/3", "3", "a/3", "3/", "/", "1/0", "-1/3", "1/3/3", "²/3", "1" * 5000 + "/3"]
)
def test_a_share_outside_its_range_is_refused(text):
    with pytest.raises(UsageError, match="a share must be K/N"):
        parse_share(text, 9)


@pytest.mark.parametrize("number", [-1, 2, True, "0", 1.0])
def test_a_number_outside_the_plan_is_refused(number):
    with pytest.raises(UsageError, match=r"must be in its plan.* expected 0 to 1"):
        PLAN.get_task(number)


def test_the_number_of_an_only_task_is_named():
    with pytest.raises(UsageError, match="found 3; expected 0, the only task"):
        replace(PLAN, tasks=PLAN.tasks[:1]).get_task(3)


def test_a_task_is_chosen_in_one_way(tmp_path):
    path = write(tmp_path, PLAN.encode())
    for arguments in ({}, {"number": 0, "share": "1/1"}):
        with pytest.raises(UsageError, match="by its number or by a share"):
            shardckpt.run_task(path, **arguments)


def test_local_paths_in_a_plan_are_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    found = encode_arguments({"src": "a", "dst": "b", "base": ["a", "other"], "dtype": "a", "adapter": Path("a")})
    here = str(tmp_path / "a")
    assert found == {"src": here, "dst": str(tmp_path / "b"), "base": [here, "other"], "dtype": "a", "adapter": here}
    assert encode_arguments({"src": "s3://b/a"}) == {"src": "s3://b/a"}


@pytest.mark.parametrize("value", [object(), float("nan"), b"x", {1, 2}])
def test_arguments_that_json_cannot_hold_are_refused(value):
    with pytest.raises(ShardckptError, match="a plan cannot store `x`"):
        encode_arguments({"x": value})


def test_numbers_are_written_as_ranges():
    assert format_numbers([0, 2, 3, 4, 9]) == "0,2-4,9"
    assert format_numbers([*range(0, 100, 2)]).endswith("and 30 more ranges")
    assert format_numbers([*range(0, 42, 2)]).endswith("and 1 more range")
