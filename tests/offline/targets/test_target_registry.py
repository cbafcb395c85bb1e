"""Targets are found by name or by the suffix of the path; help, errors and documents list those of the registry.

`UPDATE_DOCS=1 pytest tests/offline/targets/test_target_registry.py` writes the table into docs/writing.md.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import shardckpt
from shardckpt.errors import UsageError
from shardckpt.offline.targets.target_registry import BUILT_IN, choose_target, find_rank_target, load_targets
from tests.kit.runs.command import run_here

PAGE = Path(__file__).resolve().parents[3] / "docs" / "writing.md"
START, END = "<!-- table: tests/offline/targets/test_target_registry.py -->\n", "<!-- end of table -->\n"
TARGETS = load_targets()
NAMES = [*BUILT_IN]


def table() -> str:
    rows = ["| `--to` | files | read by | `reshard` |", "|---|---|---|---|"]
    for number, target in enumerate(TARGETS):
        name = f"`{target.name}`" + (" (the default)" if number == 0 else "")
        rows.append(f"| {name} | {target.files} | {target.read_by} | {'yes' if target.plan_ranks else ''} |")
    return "\n".join(rows) + "\n"


def test_the_page_lists_every_target() -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(START)
    _, after = rest.split(END)
    expected = f"{before}{START}{table()}{END}{after}"
    if os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(expected, encoding="utf-8")
        return
    assert text == expected, "run with UPDATE_DOCS=1"


WITHOUT_RANKS = [name for name in NAMES if name != "vllm-sharded"]  # `merge-adapter` has no `--tp`


@pytest.mark.parametrize(
    ("verb", "names"), [("consolidate", NAMES), ("convert", NAMES), ("merge-adapter", WITHOUT_RANKS)]
)
def test_the_help_lists_every_target(verb: str, names: list[str]) -> None:
    words = " ".join(run_here(verb, "--help").out.split())
    assert ", ".join(names) in words.replace("- ", "-"), "lines may end at a hyphen"


def test_the_help_of_reshard_lists_what_it_writes() -> None:
    names = [target.name for target in TARGETS if target.plan_ranks]
    assert names == list(shardckpt.list_targets(for_ranks=True))
    assert f"{', '.join(names)}." in " ".join(run_here("reshard", "--help").out.split())


TARGETS_BY_PATH = [
    ("", "out", "safetensors"),
    ("", "out.safetensors", "safetensors"),
    ("", "out.pt", "torch"),
    ("", "s3://bucket/out.bin", "torch"),
    ("torch", "out", "torch"),
    ("torch", "out.pth", "torch"),
    ("dcp", "out.d", "dcp"),
    ("deepspeed-universal", "out", "deepspeed-universal"),
]


@pytest.mark.parametrize(("name", "path", "expected"), TARGETS_BY_PATH)
def test_a_target_is_found_by_name_or_suffix(name: str, path: str, expected: str) -> None:
    assert choose_target(name, path).name == expected


REFUSALS = [
    ("onnx", "out", r"--to must be a format that can be written; found onnx; expected safetensors, torch, dcp"),
    ("native", "out.pt", "a step is a folder"),
    ("torch", "out.safetensors", "--to torch does not write such a file.*expected --to safetensors, or a folder"),
    ("safetensors", "out.pt", "--to safetensors does not write such a file.*expected --to torch, or a folder"),
]


@pytest.mark.parametrize(("name", "path", "message"), REFUSALS)
def test_a_target_that_does_not_fit_is_an_error(name: str, path: str, message: str) -> None:
    """Also replaces the case of `--to` in tests/offline/select/test_options.py."""
    with pytest.raises(UsageError, match=message):
        choose_target(name, path)


def test_an_unknown_target_is_refused_before_the_source_is_opened(tmp_path: Path) -> None:
    for call in (shardckpt.consolidate, shardckpt.convert):
        with pytest.raises(UsageError, match="--to must be"):
            call(tmp_path / "absent", tmp_path / "out", to="onnx")


@pytest.mark.parametrize("name", ["onnx", "safetensors", "deepspeed-universal"])
def test_reshard_refuses_targets_without_ranks(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected torch, dcp, native"):
        find_rank_target(name)
    with pytest.raises(UsageError, match="--to must be a format that reshard writes"):
        shardckpt.reshard(tmp_path / "absent", tmp_path / "out", world_size=2, to=name)
