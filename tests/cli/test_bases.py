"""Every command that reads a step takes `--base`, for a folder that the step refers to and that lies elsewhere now."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import shardckpt
from shardckpt.native.commit import COMMIT
from tests.kit.runs.command import Outcome, run_here


@pytest.fixture
def moved(tmp_path: Path) -> Path:
    """A folder with a step, and the base that it refers to, under another name than when it was saved."""
    model = torch.nn.Linear(4, 3)
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optim.step()
    state = {"model": model, "optim": optim}
    shardckpt.save(state, tmp_path / "models" / "one", store_digests=True)
    shardckpt.save(state, tmp_path / "run" / "step", base=tmp_path / "models" / "one")
    os.rename(tmp_path / "models", tmp_path / "moved")
    return tmp_path


COMMANDS: dict[str, list[object]] = {
    "verify": [],
    "inspect": [],
    "consolidate": ["OUT"],
    "convert": ["OUT"],
    "reshard": ["OUT", "--world-size", 2],
    "rekey": ["OUT", "--to-ids"],
    "diff": ["SRC"],
    "repair": [],
}
"""What each takes besides the source."""


def called(verb: str, src: Path, *more: object) -> Outcome:
    places = {"OUT": src.parent / "out", "SRC": src}
    return run_here(verb, src, *(places.get(str(word), word) for word in COMMANDS[verb]), *more)


def as_told(folder: Path) -> str:
    return f"{folder}/models/one={folder}/moved/one"


@pytest.mark.parametrize("verb", COMMANDS)
def test_a_base_that_was_moved_can_be_named(moved: Path, verb: str) -> None:
    step = moved / "run" / "step"
    if verb == "repair":
        (step / COMMIT).unlink()
    without = called(verb, step)
    assert without.code == (0 if verb == "inspect" else 1), without
    assert f"{moved}/models/one" in without.out + without.err
    for place in (moved / "moved" / "one", as_told(moved)):
        found = called(verb, step, "--base", place, *(["--overwrite"] if (moved / "run" / "out").exists() else []))
        assert found.code == 0, found


@pytest.mark.parametrize("verb", [verb for verb in COMMANDS if verb not in {"diff", "repair"}])
def test_what_has_no_base_is_told_so(tmp_path: Path, verb: str) -> None:
    source = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(2)}, source)
    found = called(verb, source, "--base", tmp_path)
    assert found.code == 2, found
    assert "has no base" in found.err


def test_several_are_named_one_by_one(moved: Path) -> None:
    shardckpt.save({"a": torch.ones(3)}, moved / "two", store_digests=True)
    shardckpt.save({"a": torch.ones(3), "b": torch.ones(1)}, moved / "run" / "next", base=moved / "two")
    os.rename(moved / "two", moved / "three")
    named = ["--base", as_told(moved), "--base", f"{moved}/two={moved}/three"]
    found = run_here("diff", moved / "run" / "step", moved / "run" / "next", *named)
    assert (found.code, found.err) == (1, ""), "both are read, and differ"
    found = called("verify", moved / "run" / "step", *named)
    assert found.code == 2
    assert "no base that this could be" in found.err
