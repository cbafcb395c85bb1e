"""The run that owns a tier's folder: only its steps may be read and removed there."""

from __future__ import annotations

import hashlib
import json
import os
import secrets

from shardckpt.errors import CheckpointError, MissingFileError, ShardckptError, UsageError
from shardckpt.native.run_directory import is_step_name
from shardckpt.storage.resolve_url import local_path
from shardckpt.storage.store import Store, read_bytes

_OWNER = ".shardckpt-tier.json"  # file of a tier's folder that names its run

_MAX_BYTES = 1 << 16

_NO_OWNER = ("damaged", "missing")
_OTHER_FOLDER = "choose another folder, or remove this one"


def find_run_id(root: str) -> str:
    """Return the id under which a run's captures are found again: equal for equal roots."""
    path = local_path(root)
    place = root.rstrip("/") if path is None else os.path.realpath(path)
    return hashlib.sha256(place.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def require_own_folder(store: Store, root: str) -> None:
    """Require that a tier's folder is new, or has this run's steps."""
    owner = _read_owner(store)
    if not owner and not any(is_step_name(entry.name) for entry in store.list()):
        return
    run = find_run_id(root)
    if not owner:
        raise UsageError(
            f"the steps in Local's folder belong to an unknown run: {_OWNER} is {_NO_OWNER[owner is None]}",
            where=store.url,
            expected=root,
            fix=f'If they belong to this run, write {{"run": "{run}"}} into that file; otherwise {_OTHER_FOLDER}.',
        )
    if owner["run"] != run:
        raise UsageError(
            "Local's folder has steps of another run",
            where=store.url,
            found=str(owner.get("root", owner["run"]))[:200],
            expected=root,
            fix=f"{_OTHER_FOLDER.capitalize()}.",
        )


def claim_folder(store: Store, root: str) -> None:
    """Make a tier's folder a run's own."""
    require_own_folder(store, root)
    if not _read_owner(store):
        with store.create(_OWNER) as writer:
            record = {"run": find_run_id(root), "root": root, "id": secrets.token_hex(8)}
            writer.write(json.dumps(record).encode("ascii") + b"\n")
        require_own_folder(store, root)  # another run may have claimed it meanwhile


def read_folder_id(store: Store) -> str:
    """Return the id of a tier's folder, by which nodes notice that they share it; empty without one."""
    try:
        return str((_read_owner(store) or {}).get("id", ""))[:64]
    except ShardckptError:
        return ""


def _read_owner(store: Store) -> dict[str, object] | None:
    """Return the record about the run that owns a folder; None without one, empty if it is damaged."""
    try:
        size = store.size(_OWNER)
        found = json.loads(read_bytes(store, _OWNER, 0, size)) if size <= _MAX_BYTES else {}
    except MissingFileError:
        return None
    except (CheckpointError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) and isinstance(found.get("run"), str) else {}
