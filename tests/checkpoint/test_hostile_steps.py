"""Every field of COMMIT and of the manifest, whatever they hold today, may lie: an error of ours or a load, never more.

The lies are told with every digest made right again, so that nothing but the fields themselves gives them away.
"""

from __future__ import annotations

import copy
import hashlib
import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shardckpt
from shardckpt.errors import ShardckptError

LIES: list[Any] = [None, True, -1, 0, 1 << 31, 1 << 70, 0.5, "", "../../x", "/etc/passwd", "a" * 5000, [], {}, [[[]]]]


def paths(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Yield where every value of a JSON document stands; of long lists the first two members and the last."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, each in value.items():
            yield from paths(each, (*path, key))
    elif isinstance(value, list):
        for at in sorted({0, 1, len(value) - 1} & set(range(len(value)))):
            yield from paths(value[at], (*path, at))


def lied(document: Any, path: tuple, lie: Any) -> Any:
    changed = copy.deepcopy(document)
    holder = changed
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = lie
    return changed


def commit_bytes(content: Any) -> bytes:
    line = json.dumps(content).encode() + b"\n"
    return line + hashlib.sha256(line).hexdigest().encode() + b"\n"


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step that uses all that a manifest has: a tie, a nest of every kind, a base that it refers to."""
    folder = tmp_path_factory.mktemp("hostile")
    shared = torch.ones(4, 3)
    state = {"a": shared, "b": {"c": shared}, "n": (1, {2.5: b"x"}, [None, "s"]), "d": torch.arange(20_000)}
    shardckpt.save(state, folder / "base", store_digests=True)
    state["d"] = torch.arange(20_000) + 1
    shardckpt.save(state, folder / "c", base=folder / "base", custom_metadata={"by": "me"})
    return folder / "c"


def check(step: Path) -> bool:
    """Load, and tell whether that gave something; an error that is none of ours goes through."""
    try:
        shardckpt.load(step)
    except ShardckptError as error:
        assert len(str(error)) < 3000
        return False
    return True


def test_a_step_that_tells_the_truth_is_read(step: Path) -> None:
    line, _ = (step / "COMMIT").read_bytes().splitlines()
    (step / "COMMIT").write_bytes(commit_bytes(json.loads(line)))
    assert check(step), "the lies below would be refused for their digests alone"


@pytest.mark.parametrize("which", ["COMMIT", "manifest"])
def test_no_field_is_believed(step: Path, which: str) -> None:
    commit = (step / "COMMIT").read_bytes()
    content = json.loads(commit.splitlines()[0])
    (manifest,) = step.glob("*.manifest.json")
    raw = manifest.read_bytes()
    document = content if which == "COMMIT" else json.loads(raw)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    told = refused = 0
    try:
        for path in paths(document):
            for lie in LIES:
                changed = lied(document, path, lie)
                if which == "COMMIT":
                    (step / "COMMIT").write_bytes(commit_bytes(changed))
                else:
                    data = json.dumps(changed).encode()
                    manifest.write_bytes(data)
                    sized = lied(content, ("manifest",), [manifest.name, len(data), hashlib.sha256(data).hexdigest()])
                    (step / "COMMIT").write_bytes(commit_bytes(sized))
                told += 1
                refused += not check(step)
    finally:
        (step / "COMMIT").write_bytes(commit)
        manifest.write_bytes(raw)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"{told} lies about {which}, {refused} refused")
    assert refused > 0.7 * told
    assert grown_kib < 300_000, f"lies made the reader take {grown_kib} KiB"
