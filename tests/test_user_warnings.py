"""Warnings point to the line of the user that led to them, through frameworks, libraries and threads."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from shardckpt.events.warn_user import warn_user


def define(module: str, call: Callable[..., None], *args: str) -> Callable[[], None]:
    """Return a function of a module, in a file of its name, that calls another one on its second line."""
    names = {"__name__": module, "call": call, "args": args}
    exec(compile("def function():\n    call(*args)", f"{module}.py", "exec"), names)
    return names["function"]  # type: ignore[return-value]


def define_calls(*modules: str) -> Callable[[], None]:
    """Return a function of the first module, which calls one of the second, and so on; the last one warns."""
    call = define(modules[-1], warn_user, "careful")
    for module in reversed(modules[:-1]):
        call = define(module, call)
    return call


@pytest.mark.parametrize(
    "between",
    [
        (),
        ("lightning.pytorch.trainer",),
        ("transformers.trainer", "accelerate.accelerator"),
        ("torch.utils.data",),
        ("contextlib", "shardckpt.ranks.group", "concurrent.futures"),
    ],
)
def test_a_warning_points_to_the_innermost_line_of_the_user(between: tuple[str, ...]) -> None:
    call = define_calls("main", "train", *between, "shardckpt.checkpoint.anything")
    with pytest.warns(UserWarning, match="careful") as caught:
        call()
    assert [(each.filename, each.lineno) for each in caught] == [("train.py", 2)]


def test_a_warning_of_a_program_without_functions_points_to_its_line(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("from shardckpt.events.warn_user import warn_user\n\nwarn_user('careful')\n")
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=True)
    assert done.stderr.startswith(f"{program}:3: UserWarning: careful")


def test_a_thread_without_a_line_of_the_user_warns_with_its_own_name() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        thread = threading.Thread(target=define_calls("shardckpt.checkpoint.anything"), name="shardckpt-promote")
        thread.start()
        thread.join()
    assert [str(each.message) for each in caught] == ["careful"]
    assert caught[0].filename == "<thread shardckpt-promote>", "threading.py says nothing"
    shown = warnings.formatwarning(caught[0].message, caught[0].category, caught[0].filename, caught[0].lineno)
    assert shown == "<thread shardckpt-promote>:0: UserWarning: careful\n"


def test_where_warnings_are_errors_a_background_thread_logs_them_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    ended: list[bool] = []

    warn = define_calls("shardckpt.checkpoint.anything")
    work = eval("lambda: (warn(), ended.append(True))", {"__name__": "shardckpt.work", "warn": warn, "ended": ended})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        with pytest.raises(UserWarning, match="careful"):
            define_calls("shardckpt.checkpoint.anything")()
    assert ended and caplog.messages == ["careful"]
