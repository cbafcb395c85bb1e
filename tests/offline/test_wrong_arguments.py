"""Arguments of a wrong type are errors of usage that name the argument, in every function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardckpt
from shardckpt.errors import UsageError
from shardckpt.native.run_directory import step_name

PATHS: dict[str, tuple[tuple[object, ...], dict[str, Any]]] = {
    **dict.fromkeys(("inspect", "verify", "stats", "history", "ls", "repair", "prune"), ((3,), {})),
    **dict.fromkeys(("diff", "copy", "consolidate", "convert"), ((3, 4), {})),
    "bisect": ((3,), {"when": "nan"}),
    "reshard": ((3, 4), {"world_size": 2}),
    "rekey": ((3, 4), {"to": "names"}),
    "merge_adapter": ((3, 4, 5), {}),
}


@pytest.mark.parametrize("verb", PATHS)
def test_a_number_is_no_path(verb: str) -> None:
    arguments, options = PATHS[verb]
    with pytest.raises(UsageError, match="must be a path or a URL; found an object of type int"):
        getattr(shardckpt, verb)(*arguments, **options)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run")
    shardckpt.save({"w": torch.ones(3)}, root / step_name(1))
    return root


def test_progress_goes_to_a_function(run: Path, tmp_path: Path) -> None:
    step = run / step_name(1)
    calls: dict[str, tuple[object, ...]] = {"verify": (step,), "diff": (step, step), "load": (step,)}
    calls |= {name: (step, tmp_path / name) for name in ("copy", "consolidate", "convert")}
    for verb, arguments in calls.items():
        with pytest.raises(UsageError, match="`on_progress` must be a function; found 3"):
            getattr(shardckpt, verb)(*arguments, on_progress=3)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("verb", "options", "message"),
    [
        ("bisect", {"when": 3}, "a condition must be nan, inf"),
        ("bisect", {"when": ["nan"]}, "a condition must be nan, inf"),
        ("bisect", {"when": "nan", "scan": 3}, "`scan` is neither True nor False"),
        ("bisect", {"when": "nan", "include": 3}, "`include` must be globs of names; found 3"),
        ("history", {"exclude": [3]}, "`exclude` must be globs of names"),
        ("history", {"html": 3}, "must be a path or a URL"),
        ("history", {"part": 3}, "--part must be a part"),
    ],
)
def test_other_wrong_arguments_are_named(run: Path, verb: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        getattr(shardckpt, verb)(run, **options)


@pytest.mark.parametrize("options", [{"atol": "x"}, {"rtol": None}, {"include": 3}, {"html": 3}])
def test_wrong_arguments_of_diff_are_named(run: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="must be"):
        shardckpt.diff(run / step_name(1), run / step_name(1), **options)


def test_one_glob_is_a_glob(run: Path) -> None:
    assert [tensor.name for tensor in shardckpt.stats(run / step_name(1), include="w*").tensors] == ["w"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"jobs": "2"}, "--jobs must be a number of threads; found '2'"),
        ({"include": 3}, "`include` must be globs of names; found 3"),
        ({"rename": 3}, "`rename` must be texts FROM=TO; found 3"),
        ({"overwrite": "no"}, "`overwrite` is neither True nor False; found 'no'"),
        ({"dry_run": "no"}, "`dry_run` is neither True nor False"),
        ({"allow_loss": 1}, "`allow_loss` is neither True nor False"),
    ],
)
@pytest.mark.parametrize("verb", ["consolidate", "rekey"])
def test_wrong_arguments_of_conversions_are_named(
    run: Path, tmp_path: Path, verb: str, options: dict[str, Any], message: str
) -> None:
    more = {"to": "names"} if verb == "rekey" else {}
    with pytest.raises(UsageError, match=message):
        getattr(shardckpt, verb)(run / step_name(1), tmp_path / "out", **more, **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overwrite": "no"}, "`overwrite` is neither True nor False"),
        ({"keep_whole": 3, "to": "torch"}, "`keep_whole` must be globs of names; found 3"),
        ({"keep_whole": "b*", "to": "torch"}, r"the glob 'b\*' matches no tensor"),
    ],
)
def test_wrong_arguments_of_reshard_are_named(run: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        shardckpt.reshard(run / step_name(1), tmp_path / "out", world_size=2, **options)
