"""What `pip install shardckpt` brings: nothing that brings torch, also not through what it requires.

That it brings what the torch-free modules import, and no more, is tested in tests/test_architecture.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_range_of_torch_is_written_once() -> None:
    extras = PROJECT["optional-dependencies"]
    lines = [line for lines in [PROJECT["dependencies"], *extras.values()] for line in lines]
    assert [line for line in lines if Requirement(line).name == "torch"] == extras["torch"]
    assert "shardckpt[torch]" in extras["test"]


def required(name: str, extras: frozenset[str]) -> Iterator[Requirement]:
    """Yield what an installed distribution requires here."""
    for line in requires(name) or ():
        need = Requirement(line)
        environments = [{"extra": extra} for extra in ("", *extras)]
        if need.marker is None or any(map(need.marker.evaluate, environments)):
            yield need


def find_needs(lines: list[str]) -> dict[str, str]:
    """Return what requirements bring, recursively: name to the chain of names that leads there."""
    found: dict[str, str] = {}
    waiting = [(Requirement(line), "") for line in lines]
    while waiting:
        need, chain = waiting.pop()
        name = canonicalize_name(need.name)
        if name in found or (need.marker is not None and not need.marker.evaluate({"extra": ""})):
            continue
        found[name] = f"{chain} > {name}" if chain else name
        try:
            waiting += [(each, found[name]) for each in required(name, frozenset(need.extras))]
        except PackageNotFoundError:  # for another platform or Python
            continue
    return found


def test_no_base_dependency_requires_torch() -> None:
    found = find_needs(PROJECT["dependencies"])
    assert "torch" not in found, found["torch"]
    assert {"numpy", "click", "rich"} & found.keys(), "requirements of requirements are followed"


def test_a_dependency_that_requires_torch_would_be_found() -> None:
    assert find_needs([*PROJECT["dependencies"], "accelerate"])["torch"] == "accelerate > torch"


@pytest.mark.parametrize("extra", ["s3", "azure", "sftp", "docs"])
def test_no_other_extra_requires_torch(extra: str) -> None:
    assert "torch" not in find_needs(PROJECT["optional-dependencies"][extra])
