"""`save`: save a training state on any number of ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypedDict
from weakref import WeakKeyDictionary

import torch.distributed as dist
from typing_extensions import Unpack

from shardckpt.checkpoint.load.source import compile_key_map
from shardckpt.checkpoint.save.handle import PENDING_SAVE
from shardckpt.checkpoint.save.planner import NO_HOOKS, SaveHooks, SaveOptions
from shardckpt.checkpoint.save.session import Saver
from shardckpt.errors import UsageError, require_bools, require_keywords
from shardckpt.events import OnEvent, SaveEvent, record_operation, require_on_event
from shardckpt.events.recorder import enter_call
from shardckpt.native.commit import BRANCH, MARK
from shardckpt.native.run_directory import METRIC, RETENTION, WRITER
from shardckpt.ranks.linked_group import ALONE
from shardckpt.ranks.process_group import ProcessGroup, get_ranks, resolve_process_group
from shardckpt.storage.resolve_url import as_url

GetBase = Callable[[], str | None]  # returns the path or URL of a save's base; None to save without one


class SaveParams(TypedDict, total=False):
    """Keyword parameters for every function that saves; `save` describes them."""

    overwrite: bool
    checksums: bool
    process_group: dist.ProcessGroup | None
    custom_metadata: Mapping[str, str] | None
    base: str | os.PathLike[str] | GetBase | None
    store_digests: bool
    trainable_only: bool
    base_key_map: Mapping[str, str] | None
    on_event: OnEvent | None
    stats: bool
    model_files: Any


def save(
    state: Any,
    path: str | os.PathLike[str],
    **options: Unpack[SaveParams],
) -> None:
    """Save a training state. Collective.

    Every rank in the group calls it with its own state. The checkpoint appears under `path` once everything is stored
    durably; until then the previous content stays. The call first waits for a background save. If that save failed and
    its error was not retrieved, the call raises the error and does not save.

    Args:
        state: Models, optimizers, objects with `state_dict` and `load_state_dict`, tensors and plain values, in dicts
            and lists at any depth. Tensors other than DTensors, and plain values, must be equal on every rank.
        path: Folder for the new checkpoint, or a URL that fsspec supports.
        overwrite: Replace an existing checkpoint; False by default, like the options below.
        checksums: Store a hash for every 128 KiB block, and require that replicated data is equal; True by default.
        process_group: Ranks that save; by default all ranks.
        custom_metadata: Free text by name, stored in the manifest. Reserved for `Checkpointer`: `run.branch`,
            `run.mark` and names that start with `metric.`.
        base: Checkpoint to refer to for unchanged tensors, which are not written again. It must have been saved with
            `store_digests` or with a base, and must stay in its place. Or a function that returns it, called on rank 0
            when the save starts.
        store_digests: Store a hash for each tensor, so that a later save can use this checkpoint as its base;
            implied by `base`.
        trainable_only: Refer to the base for every parameter that does not require gradients, after a check that the
            base has equal bytes, or a narrower float type that casts to them. The base may have any readable format
            that stores tensors as in memory.
        base_key_map: Regular expressions with replacements, which change the model's names to names in the base.
            Patterns for wrappers and adapters (PEFT) are known.
        on_event: Called with this save's `SaveEvent` when it has ended.
        stats: Store statistics for each tensor's values, which `shardckpt stats`, `inspect`, `history` and `bisect`
            read: how many are NaN, infinite or zero, extremes, mean and L2 norm.
        model_files: What a model needs besides its weights, to store with the step: a folder with config and tokenizer
            files, or a model (for its configs), tokenizer, processor or config of transformers; or a list or dict of
            those, whose later files win. Rank 0's counts. `consolidate` writes the files next to the weights.

    Raises:
        TargetExistsError: The target exists and `overwrite` is False.
        UnsupportedError: A value in the state cannot be saved; the message contains its dotted path.
        UsageError: The state is None or another plain value; a value differs between ranks; a frozen parameter
            differs from the base; or `model_files` has no known files.
        RankError: Another rank failed or is lost; the message names it.
        StorageError: The storage failed. The written files were removed.
    """
    save_with(NO_HOOKS, state, path, options)


def save_with(hooks: SaveHooks, state: Any, path: str | os.PathLike[str], options: SaveParams) -> None:
    """Save a training state, as `save`. Collective."""
    checked, fault = check_options("save", path, options, hooks)
    with (
        enter_call("save", checked.path, checked.on_event),
        PENDING_SAVE.entry,
        record_operation(SaveEvent, checked.path, checked.on_event) as recorder,
    ):
        with recorder.phase("waiting"):
            PENDING_SAVE.wait()
        refusal = fault or PENDING_SAVE.unretrieved_error()
        saver_for(options.get("process_group"), refusal).save(state, checked, refusal, recorder)


def check_options(
    verb: str, path: object, options: SaveParams, hooks: SaveHooks
) -> tuple[SaveOptions, Exception | None]:
    """Return the checked options, and the error in them, to send to the other ranks."""
    require_keywords(verb, options, SaveParams.__annotations__)
    try:
        return _build_options(path, options, hooks), None
    except Exception as error:  # noqa: BLE001  (sent to every rank, then raised)
        shown = str(path) if isinstance(path, (str, os.PathLike)) else ""
        return SaveOptions(shown, overwrite=False, checksums=False, custom_metadata={}), error


def _build_options(path: object, options: SaveParams, hooks: SaveHooks) -> SaveOptions:
    """Return the checked options. Raises UsageError."""
    base, checksums = options.get("base"), options.get("checksums", True)
    overwrite, trainable_only = options.get("overwrite", False), options.get("trainable_only", False)
    store_digests, stats = options.get("store_digests", False), options.get("stats", False)
    require_bools(
        overwrite=overwrite,
        checksums=checksums,
        store_digests=store_digests,
        trainable_only=trainable_only,
        stats=stats,
    )
    if trainable_only and base is None:
        raise UsageError("trainable_only needs a base", fix="Pass base=PATH with the frozen parameters.")
    has_digests = store_digests or base is not None
    if has_digests and not checksums:
        raise UsageError("a save with a base or store_digests needs checksums", found="checksums=False")
    if not (base is None or callable(base) or isinstance(base, (str, os.PathLike))):
        raise UsageError("`base` must be a path or a URL, or a function that returns one", found=repr(base))
    require_on_event(options.get("on_event"))
    url = None if base is None or callable(base) else as_url(base)
    key_map = _require_texts("base_key_map", options.get("base_key_map"))
    if key_map:
        compile_key_map(key_map)
    return SaveOptions(
        as_url(path),
        overwrite,
        checksums,
        {**read_notes(options.get("custom_metadata")), **hooks.about},
        base if callable(base) else lambda: url,
        has_digests,
        trainable_only,
        key_map,
        options.get("on_event"),
        stats,
        options.get("model_files"),
        hooks,
    )


def read_notes(custom_metadata: Mapping[str, str] | None) -> dict[str, str]:
    """Return a checked copy of `custom_metadata`."""
    notes = _require_texts("custom_metadata", custom_metadata)
    reserved = [name for name in notes if name in {BRANCH, MARK, RETENTION, WRITER} or name.startswith(METRIC)]
    if reserved:
        raise UsageError(
            "`custom_metadata` must not have names that are reserved for `Checkpointer`",
            found=reserved[0],
            fix="Choose another name; give metrics with Checkpointer.save(..., metrics={...}).",
        )
    return notes


def _require_texts(argument: str, given: Any) -> dict[str, str]:
    """Copy a mapping from text to text, empty for None. Raises UsageError."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise UsageError(f"`{argument}` must be a mapping of text to text", found=f"type {type(given).__name__}")
    texts = dict(given)
    for name, text in texts.items():
        if not (isinstance(name, str) and isinstance(text, str)):
            raise UsageError(f"`{argument}` must be a mapping of text to text", found=f"{name!r}: {text!r}")
    return texts


class SaverCache:
    """Savers by process group, which save one after another."""

    def __init__(self) -> None:
        self._savers: WeakKeyDictionary[ProcessGroup, Saver] = WeakKeyDictionary()
        self._alone = Saver(ALONE)

    def get(self, group: dist.ProcessGroup | None, refusal: Exception | None = None) -> Saver:
        """Return a process group's saver. Collective at the first call, which links the ranks."""
        # `refusal` is raised if a rank is lost: the others cannot receive it.
        ranks, key = get_ranks(group, refusal), resolve_process_group(group)
        if key is None:
            return self._alone
        known = self._savers.get(key)
        if known is None or known.ranks is not ranks:
            known = self._savers[key] = Saver(ranks)
        return known


SAVERS = SaverCache()  # for all saves except captures


def saver_for(group: dist.ProcessGroup | None, refusal: Exception | None = None) -> Saver:
    """Return a process group's saver, as `SaverCache.get`."""
    return SAVERS.get(group, refusal)
