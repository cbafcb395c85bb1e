"""Any change of a plan's or a result's fields is a typed error, or changes nothing."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import shardckpt
from shardckpt.errors import ShardckptError
from shardckpt.offline.tasks.task_plan import read_plan

VALUES = [None, True, -1, 1 << 70, "", "../x", "\ud800", "a\0b", [], ["x"], {"a": 1}, ...]
"""The last one removes the field."""
CALLS: dict[str, dict[str, Any]] = {
    "consolidate": {"dtype": "bf16", "include": ["*"]},
    "reshard": {"world_size": 2},
    "copy": {},
    "verify": {},
    "stats": {"include": ["*"]},
    "history": {},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("source") / "run"
    ck = shardckpt.Checkpointer(root)
    for number in (1, 2):
        ck.save(number, {"model": {f"w{at}": torch.full((10, 10), float(number)) for at in range(2)}})
    return root


def list_paths(value: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the places of all fields; of a list, the first ones."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, inner in items:
        yield from list_paths(inner, (*path, key))


def change(content: Any, path: tuple[Any, ...], value: object) -> Any:
    if not path:
        return value if value is not ... else {}
    changed = node = copy.deepcopy(content)
    for key in path[:-1]:
        node = node[key]
    if value is ...:
        del node[path[-1]]
    else:
        node[path[-1]] = value
    return changed


def with_digest(content: Any) -> bytes:
    """Return a plan as its writer writes it, with the digest of what it says."""
    if isinstance(content, dict):
        fields = {name: value for name, value in content.items() if name != "digest"}
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        content = {**fields, "digest": hashlib.sha256(text.encode()).hexdigest()}
    return json.dumps(content).encode()


@pytest.fixture(params=CALLS)
def plan(request: pytest.FixtureRequest, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    verb = request.param
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")  # a target may become a relative path
    source = run if verb in ("copy", "history") else sorted(run.glob("step-*"))[0]
    targets = [tmp_path / "many"] if verb in ("consolidate", "reshard", "copy") else []
    shardckpt.plan_tasks(tmp_path / "plan", verb, source, *targets, **CALLS[verb])
    return tmp_path / "plan"


def test_a_changed_plan_is_a_typed_error_or_one_that_works(plan):
    data, stored = plan.read_bytes(), read_plan(plan)
    content = json.loads(data)
    for path in [*list_paths(content), ("arguments", "unknown")]:
        for value in VALUES if path != ("arguments", "unknown") else VALUES[:-1]:
            plan.write_bytes(with_digest(change(content, path, value)))
            with suppress(ShardckptError):
                Path(stored.folder, "plan.json").write_bytes(read_plan(plan).encode())
                shardckpt.read_plan_status(plan)
                shardckpt.run_task(plan, share="1/1")
    for where in (plan, Path(stored.folder, "plan.json")):
        where.write_bytes(data)
    shutil.rmtree(Path(stored.folder, "results"), ignore_errors=True)  # of other targets
    shardckpt.run_task(plan, share="1/1")
    assert shardckpt.commit_plan(plan)


def test_a_changed_result_is_refused(plan):
    shardckpt.run_task(plan, share="1/1")
    result = min(Path(read_plan(plan).folder, "results").iterdir())
    data = result.read_bytes()
    content = json.loads(data)
    for path in list_paths(content):
        for value in VALUES:
            changed = change(content, path, value)
            if changed != content:
                result.write_text(json.dumps(changed))
                with pytest.raises(ShardckptError):
                    shardckpt.commit_plan(plan)
    result.write_bytes(data)
    assert shardckpt.commit_plan(plan)


def test_an_argument_that_the_verb_lacks_is_refused_when_it_is_read(plan):
    content = json.loads(plan.read_bytes())
    plan.write_bytes(with_digest(change(content, ("arguments", "unknown"), 1)))
    for act in (shardckpt.commit_plan, lambda path: shardckpt.run_task(path, 0), shardckpt.read_plan_status):
        with pytest.raises(ShardckptError, match="unexpected keyword argument 'unknown'"):
            act(plan)
