"""Every offline verb over many checkpoints, in a process of its own: with torch, or unable to import it.

    python all_verbs.py blocked|imported JOBS.json

`JOBS.json` maps a name to the `source`, the `options` of consolidate, the `base` of a LoRA adapter, and
`targets`, which third of the targets to write, or null for none: what a target writes depends on the
manifest, whatever the format that it came from. The process prints the result of each call as JSON: its report and the
SHA-256 of each file that it wrote, or its error. Two runs of one list print the same.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import Any

TARGETS = ("safetensors", "torch", "dcp", "deepspeed-universal")
RANK_TARGETS = ("native", "dcp", "torch")


def block_torch() -> None:
    """Make every import of torch fail, as if it were not installed."""
    sys.modules["torch"] = None  # type: ignore[assignment]


def fix_save_ids() -> None:
    """Give every save the same id: the files are compared byte by byte."""
    time.time_ns = lambda: 10**18
    secrets.choice = lambda choices: choices[0]


def run(jobs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the result of each call by the name of its job and its own."""
    calls = [(name, verb, call) for name, job in jobs.items() for verb, call in list_calls(name, job)]
    return {f"{name}: {verb}": attempt(call, Path(name)) for name, verb, call in calls}


def list_calls(name: str, job: dict[str, Any]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the calls for one checkpoint, those that read what another wrote after it."""
    import shardckpt

    source, options = job["source"], job["options"]
    kept = {**options, "part": "all", "allow_loss": True}
    step = f"{name}/run/step-1"
    yield "inspect", lambda: shardckpt.inspect(source)
    yield "open", lambda: hash_tensors(shardckpt.open(source, framework="numpy"))
    yield "verify", lambda: shardckpt.verify(source)
    yield "consolidate to a step", lambda: shardckpt.consolidate(source, step, to="native", **kept)
    yield "diff", lambda: shardckpt.diff(source, step)
    if job["base"]:
        yield "merge-adapter", lambda: shardckpt.merge_adapter(job["base"], source, f"{name}/merged")
    if job["targets"] is not None:
        yield "repair", lambda: shardckpt.repair(step, dry_run=True)
        yield "ls", lambda: shardckpt.ls(f"{name}/run")
        yield "doctor", lambda: check_health(f"{name}/run")
        yield "prune", lambda: shardckpt.prune(f"{name}/run", keep_last=1, dry_run=True)
        yield from list(list_target_calls(name, job, kept, step))[job["targets"] :: 3]


def check_health(run: str) -> Any:
    """Return a report without what differs between two calls: free space, and whether torch is here."""
    import shardckpt

    found = shardckpt.doctor(run)
    return replace(found, checks=tuple(each for each in found.checks if each.name not in ("disk space", "versions")))


def list_target_calls(
    name: str, job: dict[str, Any], kept: dict[str, Any], step: str
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the calls that write a checkpoint in other formats."""
    import shardckpt

    source, options = job["source"], job["options"]
    for to in TARGETS:
        folder = f"{name}/to-{to}"
        yield (
            f"consolidate --to {to}",
            lambda to=to, folder=folder: shardckpt.consolidate(source, folder, to=to, **kept),
        )
    yield "consolidate --dtype", lambda: shardckpt.consolidate(source, f"{name}/bf16", dtype="bf16", **options)
    yield "convert", lambda: shardckpt.convert(source, f"{name}/converted", **options)
    yield "one file", lambda: shardckpt.consolidate(source, f"{name}/last.pt", **options)
    yield "rekey", lambda: shardckpt.rekey(source, f"{name}/flat", to="flatten", **options)
    for to in RANK_TARGETS:
        folder = f"{name}/ranks-{to}"
        yield f"reshard --to {to}", lambda to=to, folder=folder: shardckpt.reshard(step, folder, world_size=3, to=to)


def attempt(call: Callable[[], Any], folder: Path) -> Any:
    """Return what a call did: its result and the files it wrote into its folder, or its error."""
    from shardckpt.errors import ShardckptError

    before = set(list_files(folder))
    try:
        result = call()
    except ShardckptError as error:
        return f"{type(error).__name__}: {error}"
    found = asdict(result) if is_dataclass(result) and not isinstance(result, type) else result
    if isinstance(found, dict):
        found.pop("seconds", None)
    new = [file for file in list_files(folder) if file not in before]
    return {"result": repr(found), "files": {str(file): hash_file(file) for file in new}}


def list_files(folder: Path) -> list[Path]:
    """Return the files of a folder and below it."""
    return sorted(file for file in folder.rglob("*") if file.is_file())


def hash_tensors(opened: Any) -> list[tuple[str, str]]:
    """Return the SHA-256 of each tensor of an open checkpoint, and each plain value that can be read as text."""
    return [(str(path), hash_tensor(opened, path)) for path in opened._source.saved.paths]


def hash_tensor(opened: Any, path: tuple[Any, ...]) -> str:
    """Return the SHA-256 of a tensor, a plain value as text, or the error."""
    from shardckpt.errors import UnsupportedError

    try:
        found = opened[path]
        return hashlib.sha256(found[...].tobytes()).hexdigest() if hasattr(found, "shape") else repr(found)
    except UnsupportedError as error:
        return str(error)


def hash_file(file: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


if __name__ == "__main__":
    if sys.argv[1] == "blocked":
        block_torch()
    else:
        import torch  # noqa: F401
    fix_save_ids()
    results = run(json.loads(Path(sys.argv[2]).read_text()))
    print(json.dumps({"torch": sys.modules.get("torch") is not None, "results": results}))
