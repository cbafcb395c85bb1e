"""`torch.distributed.checkpoint`, whose `save`, `async_save` and `load` write steps and read every format.

Change one line, `import shardckpt.integrations.dcp as dcp`: all other names come from torch. `StorageWriter` and
`StorageReader` do the same for code that keeps `torch.distributed.checkpoint`.
"""

from __future__ import annotations

from shardckpt.errors import require_packages

require_packages("shardckpt.integrations.dcp", "torch", install="'shardckpt[torch]'")

import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
import torch.distributed.checkpoint
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver, storage
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager

from shardckpt import ShardckptError
from shardckpt.checkpoint.dcp_storage_reader import StorageReader
from shardckpt.checkpoint.dcp_storage_writer import StorageWriter
from shardckpt.events import LoadEvent, Recorder, SaveEvent, emit, record_operation

__all__ = ["StorageReader", "StorageWriter", "async_save", "load", "save"]

_background_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = (
    WeakKeyDictionary()
)  # by group of all ranks


_Result = TypeVar("_Result")


def __getattr__(name: str) -> Any:
    """Return a name of `torch.distributed.checkpoint`."""
    if name.startswith("__"):  # with torch's `__path__`, Python would import its modules again, with other classes
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(torch.distributed.checkpoint, name)


def _takes_store_by_position(function: Callable[..., _Result], store: str) -> Callable[..., _Result]:
    """Return a function whose second argument may be given by position, with a warning, as torch allows it."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> _Result:
        if len(args) != 2:
            return function(*args, **kwargs)
        warnings.warn(f"{function.__name__} takes its store by name: pass {store}=", UserWarning, stacklevel=2)
        return function(args[0], **{store: args[1]}, **kwargs)

    return call


def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: storage.StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Metadata:
    """Save a state as `torch.distributed.checkpoint.save` does, as a step. Collective.

    An existing step is replaced when the new one is in place; anything else under the path is an error.

    Args:
        state_dict: State; for an object with `state_dict` and `load_state_dict`, the result of `state_dict()` is saved.
        checkpoint_id: Path of the step, or a URL that fsspec supports.
        storage_writer: Writer to use; None for a `StorageWriter`. Torch's writers write torch's format.
        planner: As for torch. It must not cache plans.
        process_group: Ranks that save; None for all ranks.
        no_dist: Whether this process saves alone.
        use_collectives: As for torch; a step needs True.

    Returns:
        The planner's metadata, as torch returns it.

    Raises:
        ShardckptError: The step cannot be saved on some rank; all ranks raise the lowest such rank's error.
        CheckpointException: The planner, or an object's `state_dict`, raised an exception on some rank.
    """
    writer = StorageWriter(checkpoint_id) if storage_writer is None else storage_writer
    options = _build_options(planner, process_group, no_dist, use_collectives)
    with record_operation(SaveEvent, _show(writer, checkpoint_id), rank=_rank()) as recorder, _typed_errors(writer):
        saved: Metadata = state_dict_saver.save(
            state_dict, checkpoint_id=checkpoint_id, storage_writer=writer, **options
        )
        recorder.values["nbytes"] = getattr(writer, "nbytes", 0)
        return saved


def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: storage.StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    async_checkpointer_type: Any = None,
    async_stager: AsyncStager | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Any:
    """Copy a state and save it in the background, as `torch.distributed.checkpoint.async_save` does. Collective.

    Args:
        state_dict: As for `save`.
        checkpoint_id: As for `save`.
        storage_writer: As for `save`.
        planner: As for `save`.
        process_group: Ranks that save; None for all ranks. It must have a backend for the CPU, such as gloo, and
            the training loop must not use it. For None, a thread gets a separate gloo group.
        async_checkpointer_type: Whether a thread or a process saves; None for a thread.
        async_stager: Copies the state; None for torch's default.
        no_dist: As for `save`.
        use_collectives: As for `save`.

    Returns:
        A `Future` for the metadata, whose `result()` raises the same errors as `save`. With an `async_stager` that
        copies in the background, torch's `AsyncSaveResponse` with such a future.
    """
    writer = StorageWriter(checkpoint_id) if storage_writer is None else storage_writer
    has_own_group = process_group is None and not no_dist and _saves_in_thread(async_checkpointer_type)
    group = _get_background_group() if has_own_group else process_group
    options = _build_options(planner, group, no_dist, use_collectives)
    options |= {} if async_checkpointer_type is None else {"async_checkpointer_type": async_checkpointer_type}
    options |= {} if async_stager is None else {"async_stager": async_stager}
    recorder = Recorder(SaveEvent, _show(writer, checkpoint_id), {"rank": _rank(), "is_background": True})
    started: Any = state_dict_saver.async_save(
        state_dict, checkpoint_id=checkpoint_id, storage_writer=writer, **options
    )
    saving: Future[Metadata] = started if isinstance(started, Future) else started.upload_completion
    saved: Future[Metadata] = Future()
    saved.set_running_or_notify_cancel()  # a running save cannot be cancelled

    def finish(future: Future[Metadata]) -> None:
        failure = None
        try:
            with _typed_errors(writer):
                metadata = future.result()
        except BaseException as error:  # noqa: BLE001  (raised by `result`)
            failure = error
        recorder.values["nbytes"] = getattr(writer, "nbytes", 0)
        recorder.context.run(emit, recorder.build(failure))
        if failure is None:
            saved.set_result(metadata)
        else:
            saved.set_exception(failure)

    saving.add_done_callback(finish)
    return saved if isinstance(started, Future) else replace(started, upload_completion=saved)


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: storage.StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> None:
    """Load a checkpoint in any readable format, as `torch.distributed.checkpoint.load` does. Collective.

    Args:
        state_dict: State to load into: tensors are filled in place, other values are replaced, objects with
            `load_state_dict` get their state.
        checkpoint_id: Path or URL of a step, a DCP folder, or another checkpoint that `shardckpt.load` reads.
        storage_reader: Reader to use; None for a `StorageReader`.
        planner: As for torch: `DefaultLoadPlanner(allow_partial_load=True)` accepts that the checkpoint lacks values.
        process_group: Ranks that load; None for all ranks.
        no_dist: Whether this process loads alone.

    Raises:
        ShardckptError: The checkpoint cannot be read on some rank; all ranks raise the lowest such rank's error.
        CheckpointException: The checkpoint lacks a value, or a shape differs.
    """
    reader = StorageReader(checkpoint_id) if storage_reader is None else storage_reader
    options = _build_options(planner, process_group, no_dist)
    with record_operation(LoadEvent, _show(reader, checkpoint_id), rank=_rank()) as recorder, _typed_errors():
        state_dict_loader.load(state_dict, checkpoint_id=checkpoint_id, storage_reader=reader, **options)
        recorder.values["nbytes"] = getattr(reader, "nbytes", 0)


def _build_options(planner: Any, process_group: Any, no_dist: bool, use_collectives: bool = True) -> dict[str, Any]:
    """Return arguments for torch, without defaults that older versions of torch do not have."""
    options = {"planner": planner, "process_group": process_group}
    options |= {"no_dist": True} if no_dist else {}
    return options if use_collectives else {**options, "use_collectives": False}


def _saves_in_thread(async_checkpointer_type: Any) -> bool:
    """Return whether a thread saves; torch's process makes its own group."""
    return async_checkpointer_type is None or getattr(async_checkpointer_type, "name", "") == "THREAD"


def _get_background_group() -> dist.ProcessGroup | None:
    """Return a gloo group for all ranks that only background saves use; None without several ranks. Collective."""
    # In the training loop's group, collectives of save and loop would meet in another order on each rank: a deadlock.
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    world = dist.group.WORLD
    assert world is not None
    if world not in _background_groups:
        _background_groups[world] = dist.new_group(backend="gloo")
    return _background_groups[world]


def _show(store: Any, checkpoint_id: str | os.PathLike[str] | None) -> str:
    """Return the path to save to or load from, for the event."""
    return str(checkpoint_id or getattr(store, "checkpoint_id", None) or getattr(store, "path", ""))


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


@contextmanager
def _typed_errors(writer: Any = None) -> Iterator[None]:
    """Raise the lowest failed rank's error, if it is shardckpt's, instead of torch's collection."""
    try:
        yield
    except CheckpointException as error:
        first = error.failures[min(error.failures)][0]
        if isinstance(first, ShardckptError):
            raise first from error
        raise
    finally:
        if isinstance(writer, StorageWriter):
            writer.rollback()


if not TYPE_CHECKING:  # type checkers see the arguments as they are
    save = _takes_store_by_position(save, "storage_writer")
    load = _takes_store_by_position(load, "storage_reader")
