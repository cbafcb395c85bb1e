"""Check that a folder without steps may be the directory of a new run."""

from __future__ import annotations

import os

from shardckpt.errors import CheckpointError, StorageError, UnknownFormatError, UsageError
from shardckpt.native.run_directory import StepFolder, read_run
from shardckpt.readers.registry import checkpoint_in
from shardckpt.storage.resolve_url import find_missing_bucket, kind, local_path, missing_bucket_error, open_store
from shardckpt.storage.store import Store

_FIX = (
    "Name the folder that holds the steps of a run (step-00000100, ...). "
    "Other checkpoints are read by shardckpt.load and `shardckpt inspect`."
)


def require_start_of_run(url: str) -> None:
    """Require that a folder without steps contains no other checkpoint, so that a run may start there."""
    found = checkpoint_in(url)
    if found and not read_run(open_store(url)).steps:  # the first step may have been completed since the caller looked
        raise UnknownFormatError("no step of a run is here", where=url, found=found, fix=_FIX)
    path = local_path(url)
    if path is None:
        if bucket := find_missing_bucket(url):
            raise missing_bucket_error(bucket)
    else:
        _require_parent(os.path.abspath(path))


def describe_fault(store: Store, step: StepFolder) -> str:
    """Return why a step is not complete; if no save wrote the folder, what it is and how to start from it."""
    if not step.is_foreign:
        return step.fault
    url = f"{store.url.rstrip('/')}/{step.name}"
    try:
        found = checkpoint_in(url)
    except (CheckpointError, StorageError):
        found = ""
    return str(
        UnknownFormatError(
            "this is named like a step, but no shardckpt save wrote it",
            where=url,
            found=found or ", ".join(step.others[:_SHOWN]),
            fix=f"To start from it, load it with shardckpt.load({url!r}, state), and save steps into another folder."
            if found
            else "Save steps into another folder.",
        )
    )


_SHOWN = 3


def _require_parent(path: str) -> None:
    parent = os.path.dirname(path)
    while kind(parent) == "missing" and parent != os.path.dirname(parent):
        parent = os.path.dirname(parent)
    if kind(parent) == "file":
        raise UsageError("a folder above the run is a file", where=parent, fix="Choose another.")
