"""`load`: load a checkpoint in any format into a state, or as a tree of tensors."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import numpy as np
import torch.distributed as dist

from shardckpt.checkpoint.load.broadcast import BroadcastReader
from shardckpt.checkpoint.load.load_plan import LoadOptions, LoadPlan, Taker
from shardckpt.checkpoint.load.load_planner import plan_load
from shardckpt.checkpoint.load.source import (
    CheckpointSource,
    KeyMap,
    Rules,
    Verify,
    compile_key_map,
    require_rules,
    require_way_to_verify,
)
from shardckpt.checkpoint.load.tensor_loader import (
    PendingRead,
    ReadRequest,
    as_pending_reads,
    choose_readers,
    count_bytes,
    count_neighbors,
)
from shardckpt.checkpoint.stateful.flatten import LocalModels
from shardckpt.checkpoint.stateful.stateful import build_call_error
from shardckpt.devices import wait_for_deferred_copies
from shardckpt.encodings.budget import gc_paused
from shardckpt.errors import (
    MismatchError,
    RankError,
    ShardckptError,
    UsageError,
    require_bools,
)
from shardckpt.events import LoadEvent, OnEvent, Recorder, record_operation, require_on_event
from shardckpt.events.progress import Meter, OnProgress
from shardckpt.events.recorder import enter_call
from shardckpt.events.warn_user import warn_user
from shardckpt.manifest import Path, dotted
from shardckpt.plan.layout.read_sharing import (
    BroadcastGroup,
    FileSegments,
    assign_segments,
    decode_groups,
    encode_groups,
)
from shardckpt.ranks.linked_group import LinkedGroup
from shardckpt.ranks.process_group import get_ranks
from shardckpt.reader import NamedBases, ParamShapes
from shardckpt.readers.registry import resolve_step
from shardckpt.state.keys.slots import UnequalSteps, require_way_with_steps
from shardckpt.storage.resolve_url import as_url, split_step_suffix
from shardckpt.torchrun import MACHINE_BYTES, get_machine_id

if TYPE_CHECKING:
    from shardckpt.state.local.local_shards import LocalModel


class LoadParams(TypedDict, total=False):
    """Keyword parameters of `load`, which describes them."""

    strict: bool
    include: Sequence[str] | None
    ignore_extra: bool
    key_map: KeyMap
    rules: Rules
    cast: bool
    verify: Verify
    base: NamedBases | bool | None
    broadcast_reads: bool | None
    unequal_steps: UnequalSteps
    process_group: dist.ProcessGroup | None
    on_event: OnEvent | None
    on_progress: OnProgress | None


def load(
    state: Any,
    path: str | os.PathLike[str] | None = None,
    *,
    strict: bool = True,
    include: Sequence[str] | None = None,
    ignore_extra: bool = False,
    key_map: KeyMap = None,
    rules: Rules = None,
    cast: bool = False,
    verify: Verify = "read",
    base: NamedBases | bool | None = None,
    broadcast_reads: bool | None = None,
    unequal_steps: UnequalSteps = "error",
    process_group: dist.ProcessGroup | None = None,
    on_event: OnEvent | None = None,
    on_progress: OnProgress | None = None,
) -> Any:
    """Load a checkpoint: `load(state, path)` into a state, `load(path)` as a tree.

    With a state the call is collective; each rank reads exactly its shards' elements, whichever ranks wrote them.
    Every rank checks the manifest before anything is changed: names, shapes, dtypes, whether all elements exist, and
    whether all ranks opened the same checkpoint. A later error is raised on every rank too, and leaves the state partly
    filled; `verify="full"` finds damaged bytes before that.

    Args:
        state: As for `save`: models, optimizers (also new ones), objects and tensors are filled in place,
            plain values in its dicts are replaced. Without `path`, the checkpoint's path.
        path: Checkpoint path or URL, in any readable format.
        strict: Raise an error for missing or unexpected names, including optimizer parameters and unmatched globs;
            otherwise they are skipped.
        include: Globs of dotted names, for parts (`"model"`) or values in them; other names are neither loaded nor
            reported as missing.
        ignore_extra: Accept values that only the checkpoint has.
        key_map: Replacements by regular expression, for every key in the checkpoint's names, after `rules`.
        rules: TOML file with rules, or a rule set's name in the package; rules change names and shapes in the model
            and its optimizer.
        cast: Convert values whose dtype differs from the saved one; otherwise that is an error.
        verify: `"read"` to check the hashes of the blocks read. `"full"` to check all blocks before anything is
            changed. `"live"` to check as for `"read"`, and compare the state's memory with the checkpoint after the
            load. False for no checks, except in folders that have changed since the checkpoint referred to them.
        base: Folder that the checkpoint refers to, if it was moved or is on another store; such a store is opened only
            if it is given here. A path or URL if one folder is not next to the checkpoint, or a dict by the
            checkpoint's names. False to skip data in other folders, because the state has it already.
        broadcast_reads: Read replicated data on one rank and send it to the other ranks, so that data-parallel
            replicas together read every byte once. None to do so for checkpoints behind a URL. The operating system
            caches local files, so that reading them again is faster than sending; use True for network folders.
        unequal_steps: Handling if an optimizer's steps differ among one flat parameter's members, for which it has
            one step: `"error"`, or use the `"largest"`. Without flat parameters each parameter keeps its step.
        process_group: Ranks that load; None for all ranks.
        on_event: Called with this load's `LoadEvent` when it has ended.
        on_progress: Called with a `Progress` after each batch of reads, by one thread at a time. It counts this rank's
            elements in stored bytes. An exception that it raises stops the load on every rank.

    Returns:
        The given state; without a state the tree, with tensors on the CPU. Values that only another library can read
        safely, such as dates or configs, are omitted from the tree with a warning.

    Raises:
        UsageError: An argument has an invalid value.
        MismatchError: The checkpoint does not fit; the message lists all mismatches.
        SourceNotFoundError: Nothing is stored at `path`.
        CheckpointError: The checkpoint is damaged, incomplete, or cannot be read.
        ResumeDivergence: With `verify="live"`, a tensor's memory differs after the load.
        StateDictError: An object's `load_state_dict` raised an exception; the message names the object.
        RankError: Another rank failed or is lost.
        StorageError: The storage failed.
    """

    def checked_globs() -> tuple[str, ...] | None:
        require_bools(
            strict=strict,
            cast=cast,
            ignore_extra=ignore_extra,
            broadcast_reads=False if broadcast_reads is None else broadcast_reads,
        )
        require_way_to_verify(verify)
        require_way_with_steps(unequal_steps)
        compile_key_map(key_map)
        require_rules(rules)
        require_on_event(on_event)
        return _read_globs(include)

    if path is None:
        globs = checked_globs()
        if globs is not None or ignore_extra or cast or verify == "live":
            name = "cast" if cast else "ignore_extra" if ignore_extra else "include" if globs else "verify='live'"
            raise UsageError(f"`{name}` is for loads into a state", fix="Give the state first: load(state, path, ...).")
        skipped: list[Path] = []
        with gc_paused(), record_operation(LoadEvent, as_url(state), on_event) as recorder, recorder.phase("read"):
            recorder.path = resolve_step(state)
            saved = CheckpointSource(recorder.path, verify, rules, key_map, _named(base))
            saved.expect_most()
            if verify == "full":
                saved.check_blocks()
            if on_progress is not None:
                saved.elements.meter = Meter(saved.count_bytes(saved.tree), on_progress)
            tree = saved.read_tree(saved.tree, skipped)
            recorder.values["nbytes"] = sum(entry.nbytes for entry in saved.arrays.values())
        if skipped:
            names = ", ".join(map(dotted, skipped[:_SHOWN_NAMES])) + (", ..." if len(skipped) > _SHOWN_NAMES else "")
            warn_user(f"left out, since only the library that wrote them can read them: {names}")
        return tree
    order: _Order | Exception
    try:
        options = LoadOptions(
            strict, checked_globs(), ignore_extra, cast, is_own_only=base is False, unequal_steps=unequal_steps
        )
        order = _Order(_SourceArgs(as_url(path), verify, rules, key_map, _named(base)), options, broadcast_reads)
    except Exception as error:  # noqa: BLE001  (sent to every rank, then raised)
        order = error
    shown = order.source.path if isinstance(order, _Order) else str(path)
    sink = on_event if callable(on_event) else None
    with enter_call("load", shown, sink), gc_paused():
        coordinator = get_ranks(process_group)
        with coordinator.in_step(), record_operation(LoadEvent, shown, sink, rank=coordinator.rank) as recorder:
            order = _resolve_on_rank0(order, coordinator)
            recorder.path = order.source.path if isinstance(order, _Order) else shown
            _load_into(state, path, order, coordinator, recorder, on_progress)
    return state


def _resolve_on_rank0(order: _Order | Exception, coordinator: LinkedGroup) -> _Order | Exception:
    """Let rank 0 find the step for a path such as `RUN@latest`: a step may be saved meanwhile. Collective."""
    if isinstance(order, Exception) or split_step_suffix(order.source.path) is None:
        return order

    def resolve(messages: list[bytes]) -> list[bytes]:
        if len(set(messages)) > 1:
            raise UsageError("all ranks must load the same path", found=", ".join(map(repr, messages[:_SHOWN_NAMES])))
        return [os.fsencode(resolve_step(os.fsdecode(messages[0])))] * len(messages)

    path = order.source.path
    found = coordinator.ask_rank0(f"finding the step for {path}", os.fsencode(path), resolve)
    return order._replace(source=order.source._replace(path=os.fsdecode(found)))


def _named(base: NamedBases | bool | None) -> NamedBases:
    return "" if base is None or isinstance(base, bool) else base


class _SourceArgs(NamedTuple):
    """Arguments for `CheckpointSource`."""

    path: str
    verify: Verify
    rules: Rules
    key_map: KeyMap
    bases: NamedBases


class _Order(NamedTuple):
    """A load's arguments: source, options, and whether reads are broadcast."""

    source: _SourceArgs
    options: LoadOptions
    broadcast_reads: bool | None


@dataclass
class LoadSession:
    """One load on one rank, from its plan to its last read."""

    saved: CheckpointSource  # open checkpoint
    plan: LoadPlan
    requests: Sequence[ReadRequest]  # requests for all arrays of the plan, in its order
    wanted: Sequence[ReadRequest]  # requests of these that this rank reads itself
    pending_reads: Sequence[PendingRead] = ()  # reads of all other arrays, which may be broadcast

    @cached_property
    def segments(self) -> FileSegments:
        """The segments in the checkpoint's files."""
        return FileSegments(self.saved.manifest.files)

    def count_bytes(self) -> int:
        """Return the element bytes that this rank reads or is sent."""
        arrays = count_bytes((item.entry, item.array) for item in self.plan.arrays)
        return arrays + sum(self.saved.count_bytes(taker.tree) for taker in self.plan.values)

    def encode_request(self) -> bytes:
        """Return this rank's message: checkpoint identity, machine, whether its end is collective, paths, segments."""
        head = self.saved.identity + get_machine_id() + bytes([self.plan.is_collective])
        head += _join_paths(self.plan.of_others)
        if not self.pending_reads:
            return head
        reads = (read for pending in self.pending_reads for read in pending.reads)
        ranges = ((name, offset, offset + len(buffer)) for name, offset, buffer in reads)
        return head + self.segments.wanted(ranges, self.saved.grain).tobytes()

    def carry_out(self, coordinator: LinkedGroup, groups: Sequence[BroadcastGroup], failure: Exception | None) -> None:
        """Read all requests; broadcast segments that other ranks need too."""
        if not self.pending_reads:
            if failure is not None:
                raise failure
            self.saved.elements.read(self.wanted, self.saved.unchecked_store)
            return
        elements = self.saved.elements
        sharing = BroadcastReader(
            coordinator, self.saved.store, self.segments, groups, self.pending_reads, elements.meter
        )
        failure = sharing.run(failure)
        if failure is not None:
            raise failure
        if not sharing.is_over:
            elements.read_straight(sharing.own)
            sharing.mark_own_read()
            elements.read([*self.wanted, *sharing.alone])


def _load_into(
    state: Any,
    path: Any,
    order: _Order | Exception,
    coordinator: LinkedGroup,
    recorder: Recorder,
    on_progress: OnProgress | None,
) -> None:
    session = None
    message: bytes | Exception
    with recorder.phase("plan"):
        coordinator.expect_messages()
        try:
            if isinstance(order, Exception):
                raise order
            session = _open_session(state, order, coordinator)
            message = session.encode_request()
        except Exception as error:  # noqa: BLE001  (sent to every rank, then raised)
            message = error
        answer = coordinator.ask_rank0(f"fitting {path}", message, _shared)
        assert session is not None, "what failed was raised by all"
        answer, paths, groups = _split_paths(answer, _COUNT_BYTES + 1)
        session.plan.add_unexpected(paths)
        _require_fit(session.plan, session.saved)
    neighbors, is_collective = int.from_bytes(answer[:_COUNT_BYTES], "little"), answer[_COUNT_BYTES]
    recorder.values["nbytes"] = session.plan.nbytes
    session.saved.elements.readers = choose_readers(neighbors)
    if on_progress is not None:
        session.saved.elements.meter = Meter(session.count_bytes(), on_progress)
    with recorder.phase("read"), _noting_mixed_state():
        coordinator.expect_messages()
        wait_for_deferred_copies()
        values = _read(session, coordinator, decode_groups(groups) if groups else [])
        if is_collective:  # or ranks would wait in a collective for one that could not read
            coordinator.ask_rank0(f"reading {path}", values if isinstance(values, Exception) else b"", _silent)
        coordinator.ask_rank0(f"loading {path}", _finish(session, values), _silent)
    if isinstance(order, _Order) and order.source.verify == "live":
        with recorder.phase("verify"):
            _check_live(state, path, session, coordinator)


def _check_live(state: Any, path: Any, session: LoadSession, coordinator: LinkedGroup) -> None:
    """Compare the state's memory with the checkpoint; if one rank fails, all raise its error. Collective."""
    from shardckpt.checkpoint.load.live_check import check_live  # noqa: PLC0415  (few loads ask for it)

    message: bytes | Exception = b""
    try:
        items = zip((item.path for item in session.plan.arrays), session.requests, strict=True)
        check_live(state, session.saved, items, coordinator.rank, coordinator.size)
    except Exception as error:  # noqa: BLE001  (sent to every rank, then raised)
        message = error
    coordinator.ask_rank0(f"verifying the load from {path}", message, _silent)


def _open_session(state: Any, order: _Order, coordinator: LinkedGroup) -> LoadSession:
    """Plan the load and check it, without changing the state."""
    source, options, broadcast_reads = order
    models = LocalModels(state)  # first: collective under torch's wrapper, and what follows may fail on one rank alone
    saved = CheckpointSource(*source, get_shapes=lambda: find_param_shapes(models))
    if options.takes_all:
        saved.expect_most()
    if source.verify == "full":
        saved.check_blocks(coordinator.rank, coordinator.size, own_only=options.is_own_only)
    plan = plan_load(state, saved, options, coordinator.rank, coordinator.size, models)
    if coordinator.size == 1 or not plan.fits:
        plan.add_unexpected(plan.of_others)
    _require_fit(plan, saved)
    for path in plan.unmatched if coordinator.rank == 0 else ():
        warn_user(f"nothing was loaded into {dotted(path) or 'the model'}: the checkpoint has none of its names")
    for model in models if coordinator.rank == 0 else ():
        if model.index is not None and (text := model.index.describe_unmanaged()):
            warn_user(text)
    requests = saved.locate_requests([(target.entry, target.array) for target in plan.arrays])
    has = saved.store.capabilities
    if coordinator.size == 1 or not (
        broadcast_reads or (broadcast_reads is None and has.is_shared and not has.is_local)
    ):
        return LoadSession(saved, plan, requests, requests)
    pending_reads, rest = as_pending_reads(requests)
    return LoadSession(saved, plan, requests, rest, pending_reads)


@contextmanager
def _noting_mixed_state() -> Iterator[None]:
    """Add to an error that the state may be partly filled."""
    try:
        yield
    except Exception as error:
        _add_note(error, MIXED)
        raise


def _read(
    session: LoadSession, coordinator: LinkedGroup, groups: Sequence[BroadcastGroup]
) -> Sequence[Taker] | Exception:
    """Fill the planned arrays; return the plan's values, or the error."""
    values, failure = [], None
    try:
        values = [taker._replace(tree=session.saved.read_tree(taker.tree)) for taker in session.plan.values]
    except Exception as error:  # noqa: BLE001  (others may wait for what this rank was to read)
        failure = error
    try:
        session.carry_out(coordinator, groups, failure)
    except Exception as error:  # noqa: BLE001  (sent to every rank, then raised)
        return error
    return values


def _finish(session: LoadSession, values: Sequence[Taker] | Exception) -> bytes | Exception:
    """Put the values into models, optimizers and objects; return an error, or an empty message."""
    if isinstance(values, Exception):
        return values
    try:
        for finish in session.plan.after:
            finish()
        for at, taker in enumerate(values):
            try:
                taker.put(taker.tree)  # called here, so that warnings point at the caller of `load`
            except ShardckptError as error:
                _name_taker(error, values, at)
                raise
            except Exception as error:
                failure = build_call_error("load_state_dict", taker.path, error)
                _name_taker(failure, values, at)
                raise failure from error
    except Exception as error:  # noqa: BLE001  (sent to every rank, then raised)
        return error
    return b""


def _name_taker(error: ShardckptError, takers: Sequence[Taker], at: int) -> None:
    """Add to an error which object failed, and which objects were loaded or not yet."""
    before, after = (_listed(taker.path for taker in some) for some in (takers[:at], takers[at + 1 :]))
    text = f"{dotted(takers[at].path) or 'the state'} could not load its state"
    text += (f", {before} did" if before else "") + (f", and {after} was not reached" if after else "")
    _add_note(error, f"{text}.")


def _listed(paths: Iterable[Path]) -> str:
    names = [dotted(path) for path in paths]
    return ", ".join(names[:_SHOWN_NAMES]) + (", ..." if len(names) > _SHOWN_NAMES else "")


def _shared(messages: list[bytes]) -> list[bytes]:
    """Return for each rank its machine's number of ranks, whether the end is collective, unexpected paths, groups."""
    # The ranks of a group share segments.
    identities = [message[:_IDENTITY_BYTES] for message in messages]
    odd = next((rank for rank, identity in enumerate(identities) if identity != identities[0]), None)
    if odd is not None:
        raise RankError(
            f"rank {odd} opened a different checkpoint than rank 0: the paths differ, or it was replaced in between",
            rank=odd,
            fix="Load the same path on all ranks; else load again.",
        )
    neighbors = count_neighbors([message[_IDENTITY_BYTES:_MACHINE_END] for message in messages])
    is_collective = bytes([any(message[_MACHINE_END] for message in messages)])
    _, paths, segments = zip(*(_split_paths(message, _HEAD_BYTES) for message in messages), strict=True)
    unexpected = _join_paths(sorted(paths[0].intersection(*paths[1:]), key=repr))
    counts = [count.to_bytes(_COUNT_BYTES, "little") + is_collective + unexpected for count in neighbors]
    if not any(segments):
        return counts
    wanted = [np.frombuffer(each, np.int64) for each in segments]
    return [count + encode_groups(groups) for count, groups in zip(counts, assign_segments(wanted), strict=True)]


def _join_paths(paths: Sequence[Path]) -> bytes:
    data = json.dumps(paths).encode() if paths else b""
    return len(data).to_bytes(_COUNT_BYTES, "little") + data


def _split_paths(message: bytes, start: int) -> tuple[bytes, set[Path], bytes]:
    """Return what a message has before its paths, the paths, and what it has after them."""
    first = start + _COUNT_BYTES
    end = first + int.from_bytes(message[start:first], "little")
    paths = json.loads(message[first:end]) if end > first else ()
    return message[:start], set(map(tuple, paths)), message[end:]


_IDENTITY_BYTES = 16
_MACHINE_END = _IDENTITY_BYTES + MACHINE_BYTES
_HEAD_BYTES = _MACHINE_END + 1
_COUNT_BYTES = 4

# Note on an error after the first read of a load.
MIXED = "The state may be filled in part: load again, or start over, before using it."


_SHOWN_NAMES = 10


def _add_note(error: Exception, note: str) -> None:
    """Add a sentence to an error's message, or as a note if its class is not ours."""
    if isinstance(error, ShardckptError):
        error.args = (f"{error} {note}" if str(error).endswith(".") else f"{error}. {note}", *error.args[1:])
    elif hasattr(error, "add_note"):
        error.add_note(note)


def _read_globs(include: Any) -> tuple[str, ...] | None:
    """Return globs as a tuple; None for None."""
    if include is None:
        return None
    globs = (include,) if isinstance(include, str) else tuple(include) if isinstance(include, Iterable) else (include,)
    if not all(isinstance(glob, str) for glob in globs):
        raise UsageError("`include` must be globs of dotted names", found=include)
    if not globs:
        raise UsageError("`include` must name at least one pattern", found=repr(include), fix="Pass None to load all.")
    return globs


def _silent(messages: list[bytes]) -> list[bytes]:
    return messages


# Note of an error about names in a folder that `save_pretrained` may have written.
_RENAMED = (
    "The folder has a config.json: save_pretrained of transformers gives weights in some models, such as mixtures of "
    "experts and ViT, other names than the model in memory has. If it wrote this folder, load it with from_pretrained, "
    "or with rules that rename them, such as rules='mixtral-stack-experts' for Mixtral."
)


def _require_fit(plan: LoadPlan, saved: CheckpointSource) -> None:
    if plan.problems or plan.unexpected:
        listed = [f"unexpected: {dotted(path)}" for path in plan.unexpected]
        besides = [dotted(root) for root in plan.unexpected_roots()]
        note = _RENAMED if plan.missing and plan.unexpected and _has_model_config(saved) else ""
        raise MismatchError([*plan.problems, *listed], [*plan.problems, *plan.unexpected_shown()], besides, note)


def _has_model_config(saved: CheckpointSource) -> bool:
    """Return True if a model's config is stored next to Hugging Face's safetensors files."""
    return saved.manifest.format == "safetensors" and any(listed.name == "config.json" for listed in saved.store.list())


def find_param_shapes(models: Iterable[LocalModel]) -> ParamShapes | None:
    """Return the models' parameter names, shapes, order and ties; None without a model."""
    # A reader needs them for flat parameters if the files do not list the members.
    shapes = [_model_shapes(model) for model in models]
    return replace(shapes[0], others=tuple(shapes[1:])) if shapes else None


def _model_shapes(model: LocalModel) -> ParamShapes:
    """Return a model's parameters, shared ones under each name, without buffers."""
    # Flat parameters do not contain buffers.
    names = {name: model.aliases.get(name, name) for name in model.names}
    shapes = {
        name: model.arrays[first].shape
        for name, first in names.items()
        if first in model.arrays and first not in model.buffers
    }
    return ParamShapes(shapes, "the model that is loaded into", model.aliases)
