"""Each wait and `record_stream` of engine and saves is needed: without it the checker of streams finds something."""

from __future__ import annotations
import __future__

import ast
import contextlib
import functools
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from tests.core import test_streams as scenarios
from tests.core.test_streams import Scenario, found
from tests.kit.models.under_test import TORCH, Style
from tests.kit.ranks.harness import run

pytestmark = pytest.mark.skipif(TORCH, reason="the engine's own streams are checked")

ROOT = Path(__file__).resolve().parents[2]
ORDERING = frozenset(
    {
        "wait",
        "wait_event",
        "wait_stream",
        "make_gathers_wait",
        "mark_shard_written",
        "wait_for_deferred_copies",
        "record_stream",
        "hold_gather_output",
        "release_input",
        "record",
    }
)
"""Calls that order streams, or tell the allocator of one."""
EVENTS = frozenset({"record_event", "record_events"})
"""Calls that mark a place in a stream; without one there is nothing to wait for."""
CONTEXTS = frozenset(
    {
        *("use", "use_stream", "copying"),
        *("use_gather_stream", "use_current_stream", "use_reduce_stream", "use_all_reduce_stream"),
    }
)
"""Calls that choose a stream."""
AMBIGUOUS = {"wait": ("core", "state.adapters.engine_bucket"), "record": ("devices",)}
"""Where a name is that of such a call; elsewhere threads wait by it."""


@functools.cache
def sites(names: frozenset[str] = ORDERING) -> dict[str, tuple[str, str, int]]:
    """Every call of these names: module, function and which of its calls; named by all three."""
    named: dict[str, tuple[str, str, int]] = {}
    for path in sorted((ROOT / "shardckpt").rglob("*.py")):
        text = path.read_text()
        if not any(each in text for each in names):
            continue
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for function, node in functions(ast.parse(text)):
            for index, call in enumerate(calls(node, names)):
                if not module.removeprefix("shardckpt.").startswith(AMBIGUOUS.get(called(call), "")):
                    continue
                name = f"{module.removeprefix('shardckpt.')}:{function}:{called(call)}"
                while name in named:
                    name += " again"
                named[name] = (module, function, index)
    return named


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """The functions of a module and the methods of its classes."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{each.name}", each) for each in node.body if isinstance(each, ast.FunctionDef))


def calls(node: ast.AST, names: frozenset[str]) -> list[ast.Call]:
    return [each for each in ast.walk(node) if isinstance(each, ast.Call) and called(each) in names]


def called(call: ast.Call) -> str:
    function = call.func
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


class Without(ast.NodeTransformer):
    """Leaves a call out; of `start().wait()` the start stays, in place of a context is one that does nothing."""

    def __init__(self, call: ast.Call) -> None:
        self._call = call

    def visit_Call(self, node: ast.Call) -> Any:
        if node is self._call:
            if called(node) in CONTEXTS:
                return ast.parse("__import__('contextlib').ExitStack()", mode="eval").body
            is_wait = isinstance(node.func, ast.Attribute) and node.func.attr == "wait"
            return node.func.value if is_wait else ast.Constant(None)
        return self.generic_visit(node)


@contextlib.contextmanager
def without(site: str, names: frozenset[str] = ORDERING) -> Iterator[None]:
    """The engine without one of the calls."""
    name, function, index = sites(names)[site]
    module = importlib.import_module(name)
    tree = next(node for each, node in functions(ast.parse(inspect.getsource(module))) if each == function)
    with put(module, function, Without(calls(tree, names)[index]).visit(tree)):
        yield


@contextlib.contextmanager
def changed(site: str, edits: Sequence[tuple[str, str]]) -> Iterator[None]:
    """The engine with other text in a function, which is named as `module:function`."""
    name, function = site.split(":")
    module = importlib.import_module(f"shardckpt.{name}")
    text = inspect.getsource(module)
    tree = next(node for each, node in functions(ast.parse(text)) if each == function)
    own = textwrap.dedent("\n".join(text.splitlines()[tree.lineno - 1 : tree.end_lineno]))
    for old, new in edits:
        assert own.count(old) == 1, f"{site} has {own.count(old)} times the text {old!r}: adapt the mutant"
        own = own.replace(old, new)
    made = ast.parse(own).body[0]
    assert isinstance(made, ast.FunctionDef)
    with put(module, function, made):
        yield


@contextlib.contextmanager
def put(module: Any, function: str, tree: ast.FunctionDef) -> Iterator[None]:
    """A module with another body of a function."""
    tree.decorator_list = []
    mutant = ast.fix_missing_locations(ast.Module([tree], []))
    made: dict[str, Any] = {}
    code = compile(mutant, inspect.getfile(module), "exec", __future__.annotations.compiler_flag)
    exec(code, module.__dict__, made)
    target: Any = module
    for part in function.split("."):
        target = inspect.getattr_static(target, part)
    target = inspect.unwrap(target)
    assert isinstance(target, FunctionType)
    original, target.__code__ = target.__code__, made[function.rsplit(".", maxsplit=1)[-1]].__code__
    try:
        yield
    finally:
        target.__code__ = original


FLAT, ORIGINAL, EACH = Style
HOST = "the host waits, which orders no streams"
KEPT = "the backend keeps the tensors of a user's collective until it is done"
QUEUED = "a device queues collectives on the current stream"
EQUIVALENT = {
    "core.params.unsharded_params:UnshardedParams._drop_all_gather:wait": KEPT,
    "core.tools.clip_grad_norm:_reduce_over_ranks:wait": QUEUED,
    "core.params.gradient_reduction:_Reduction._finish:wait": QUEUED,
    "core.params.full_params:gather_some:wait": QUEUED,
    "core.params.full_params:gather_full:wait": QUEUED,
    "core.params.full_params:gather_copies:wait": QUEUED,
    "core.comm_hooks:reduce_scatter_hook:wait": QUEUED,
    "core.comm_hooks:allreduce_hook:wait": QUEUED,
    "core.params.param_bucket:Bucket.replace_shard:mark_shard_written": (
        "a type changes only between forwards, whose begin orders it"
    ),
    "core.modules.dtensors:local:wait": "the engine's local tensors come from no collective that may be under way",
    "core.fsdp1.wrapper:FullyShardedDataParallel._unshard:wait": "it unshards, and a forward does so too",
    "core.fsdp2.fully_shard:FSDPModule.unshard:wait": "it unshards, and a forward does so too",
    "core.fsdp2.fully_shard:FSDPModule.finalize_backward:wait": "without it there are no gradients to read",
    "core.runtime.fsdp_unit:FSDPUnit.prefetch_unshard:wait": HOST,
    "core.runtime.fsdp_unit:UnitReducer.finish_gradients:wait": HOST,
    "core.runtime.fsdp_unit:UnitReducer.finish:wait": HOST,
    "core.runtime.fsdp_unit:UnitReducer.release_inputs:release_input": "it limits memory: `test_peak`",
    "core.params.gradient_reduction:GradientReducer.wait_reduce_scatter:release_input": (
        "it was released before, or its reducer releases it"
    ),
    "core.params.gradient_reduction:_Reduction.finish:wait": "`_queue_rest` has waited",
    "core.comm.collectives:DirectMessages._wait_for:wait": "devices with streams do not use it",
    "checkpoint.load.load:_load_into:wait_for_deferred_copies": "threads and the host write: `test_write_hooks`",
    "devices:TorchStreams.record:record_stream": "the checker's own streams take the place of torch's",
    "core.params.gradient_reduction:GradientReducer.reset_after_error:wait": (
        "the gradient is dropped, and the backend keeps its tensors until it is done"
    ),
}
"""Calls that may be taken away, and why."""

FOUND: dict[str, tuple[Scenario, Style]] = {
    "core.comm.streams:DeviceStreams.get_ones:wait_event": (scenarios.trains_two_models_on_two_streams, EACH),
    "core.params.unsharded_params:UnshardedParams._drop_all_gather:wait_event": (
        scenarios.drops_parameters_that_are_gathered,
        FLAT,
    ),
    "core.comm.collectives:Pending.wait:wait": (scenarios.uses_collectives_of_the_user, EACH),
    "core.params.gradient_reduction:GradientReducer._queue_rest:wait": (scenarios.uses_collectives_of_the_user, EACH),
    "core.params.unsharded_params:UnshardedParams.wait_all_gather:wait": (scenarios.uses_collectives_of_the_user, EACH),
    "core.params.unsharded_params:UnshardedParams.wait_all_gather:wait_event": (scenarios.trains, EACH),
    "core.params.tensor_extension:ExtendedParams._copy_out:record_stream": (
        scenarios.gathers_by_extensions_with_metadata,
        EACH,
    ),
    "core.params.gradient_reduction:GradientReducer._queue_rest:record_stream": (
        scenarios.averages_over_replicas_in_low_precision,
        EACH,
    ),
    "checkpoint.save.staging:SideStreams.copying:wait_stream": (scenarios.copies_for_a_background_save, EACH),
    "checkpoint.save.staging:SideStreams.copying:wait_event": (scenarios.copies_for_a_background_save, EACH),
    "core.comm.streams:DeviceStreams.make_gathers_wait:wait_event": (scenarios.steps_on_a_stream, EACH),
    "core.comm.streams:DeviceStreams.make_gathers_wait:wait_stream": (scenarios.trains, FLAT),
    "core.comm.streams:DeviceStreams.use_reduce_stream:wait_stream": (scenarios.trains_without_shards, FLAT),
    "core.fsdp2.fully_shard:_run_on_stream:wait_stream": (scenarios.changes_gradients_on_a_stream, EACH),
    "core.fsdp2.fully_shard:_run_on_stream:wait_stream again": (scenarios.changes_gradients_on_a_stream, EACH),
    "core.comm.streams:DeviceStreams.release_gather_outputs:make_gathers_wait": (scenarios.trains, EACH),
    "core.comm.streams:DeviceStreams.use_all_reduce_stream:wait_stream": (scenarios.trains_with_replicas, EACH),
    "core.comm.streams:DeviceStreams.use_current_stream:wait_stream": (scenarios.steps_on_a_stream_alone, EACH),
    "core.params.gradient_reduction:GradientReducer.__del__:release_input": (
        scenarios.is_dropped_while_gradients_are_reduced,
        EACH,
    ),
    "core.params.gradient_reduction:GradientReducer.release_input:wait_event": (scenarios.trains, EACH),
    "core.params.gradient_reduction:GradientReducer.release_input:record_stream": (
        scenarios.finalizes_backward_on_a_stream,
        EACH,
    ),
    "core.params.gradient_reduction:GradientReducer.reset_after_error:release_input": (scenarios.resets_one_unit, EACH),
    "core.params.gradient_reduction:GradientReducer.wait_reduce_scatter:wait_event": (scenarios.trains, FLAT),
    "core.params.unsharded_params:UnshardedParams._drop_rows:hold_gather_output": (scenarios.trains, EACH),
    "core.params.gradient_reduction:GradientReducer.wait_reduce_scatter:record_stream": (
        scenarios.averages_in_low_precision,
        FLAT,
    ),
    "core.params.param_bucket:Bucket.replace_shard:mark_shard_written again": (
        scenarios.replaces_data_within_a_forward,
        FLAT,
    ),
    "core.params.param_bucket:Bucket.write_back:mark_shard_written": (scenarios.changes_kept_parameters, EACH),
    "core.params.param_bucket:Bucket.mark_shard_written:make_gathers_wait": (
        scenarios.ties_across_units,
        FLAT,
    ),
    "core.params.unsharded_params:UnshardedParams.wait_all_gather:record_stream": (scenarios.trains, FLAT),
    "core.params.unsharded_params:UnshardedParams._make_gather_wait:make_gathers_wait": (
        scenarios.keeps_slices_within_a_forward,
        EACH,
    ),
    "core.registration.base:ParamRegistration.restore:mark_shard_written": (
        scenarios.ties_across_units,
        FLAT,
    ),
    "core.registration.base:PerParamRegistration._copy_moved:mark_shard_written": (
        scenarios.replaces_data_between_the_passes,
        ORIGINAL,
    ),
    "core.registration.flat_param:FlatParamRegistration._copy_user_param:mark_shard_written": (
        scenarios.puts_a_full_parameter_between_the_passes,
        FLAT,
    ),
    "core.runtime.root_state:RootState.prepare_all_gather:make_gathers_wait": (
        scenarios.unshards_by_hand_after_a_step,
        EACH,
    ),
    "core.runtime.root_state:RootState.start_backward:make_gathers_wait": (scenarios.writes_between_the_passes, FLAT),
    "core.runtime.root_state:RootState._start_forward:make_gathers_wait again": (
        scenarios.runs_a_unit_below_the_root_after_a_step,
        FLAT,
    ),
    "core.runtime.root_state:RootState._start_forward:make_gathers_wait": (scenarios.trains, FLAT),
    "core.runtime.fsdp_unit:ShardWrites.make_gathers_wait:make_gathers_wait": (scenarios.steps_on_a_stream, EACH),
    "core.runtime.fsdp_unit:ShardWrites.make_gathers_wait:make_gathers_wait again": (scenarios.trains, FLAT),
    "devices:record_stream:record": (scenarios.trains, FLAT),
    "state.adapters.engine_bucket:EngineBucketAdapter.mark_written:mark_shard_written": (
        scenarios.loads_within_a_forward,
        ORIGINAL,
    ),
    "checkpoint.save.handle:SaveHandle.wait_for_staging:wait_for_deferred_copies": (
        scenarios.writes_by_hand_after_overlapped_copies,
        EACH,
    ),
    "checkpoint.save.write_hooks:_before_step:wait_for_deferred_copies": (
        scenarios.steps_after_overlapped_copies,
        EACH,
    ),
    "checkpoint.save.write_hooks:_before_load:wait_for_deferred_copies": (
        scenarios.loads_by_torch_after_overlapped_copies,
        EACH,
    ),
    "checkpoint.stateful.state_stream:read_stream:wait_for_deferred_copies": (
        scenarios.receives_after_overlapped_copies,
        EACH,
    ),
    "core.materialize:broadcast:wait_for_deferred_copies": (scenarios.broadcasts_after_overlapped_copies, EACH),
    "core.params.param_bucket:Bucket.replace_shard:wait_for_deferred_copies": (
        scenarios.replaces_data_after_overlapped_copies,
        FLAT,
    ),
    "core.params.param_bucket:Bucket.write_back:wait_for_deferred_copies": (
        scenarios.changes_kept_parameters_after_overlapped_copies,
        EACH,
    ),
    "core.registration.base:PerParamRegistration._copy_moved:wait_for_deferred_copies": (
        scenarios.replaces_data_after_overlapped_copies,
        ORIGINAL,
    ),
    "core.registration.flat_param:FlatParamRegistration._copy_user_param:wait_for_deferred_copies": (
        scenarios.puts_a_parameter_after_overlapped_copies,
        FLAT,
    ),
    "core.tools.summon_full_params:summon_full_params:wait_for_deferred_copies": (
        scenarios.summons_after_overlapped_copies,
        ORIGINAL,
    ),
    "core.tools.summon_full_params:register_flat_params:wait_for_deferred_copies": (
        scenarios.registers_flats_after_overlapped_copies,
        FLAT,
    ),
    "state.model.load_model_state_dict:load_model_state_dict:wait_for_deferred_copies": (
        scenarios.loads_after_overlapped_copies,
        EACH,
    ),
    "state.optim.load_optim_state_dict:load_optim_state_dict:wait_for_deferred_copies": (
        scenarios.loads_an_optimizer_after_overlapped_copies,
        EACH,
    ),
    "devices:wait_for_deferred_copies:wait_event": (scenarios.steps_after_overlapped_copies, EACH),
    "checkpoint.save.staging:StagingArea._copy_deferred:record_stream": (
        scenarios.frees_a_state_after_overlapped_copies,
        EACH,
    ),
}
"""Each call that orders streams, and a scenario in which it is missed."""

EVENTS_FOUND: dict[str, tuple[Scenario, Style]] = {
    "core.comm.streams:DeviceStreams.get_ones:record_event": (scenarios.trains_two_models_on_two_streams, EACH),
    "core.params.unsharded_params:UnshardedParams._start_several:record_event": (scenarios.gathers_by_extensions, EACH),
    "core.params.unsharded_params:UnshardedParams._start_one:record_event": (scenarios.trains, EACH),
    "checkpoint.save.staging:SideStreams.copying:record_event": (scenarios.copies_for_a_background_save, EACH),
    "checkpoint.save.staging:SideStreams.record_events:record_event": (
        scenarios.copies_for_a_background_save,
        EACH,
    ),
    "checkpoint.save.staging:StagingArea._end_block:record_events": (scenarios.copies_for_a_background_save, EACH),
    "checkpoint.save.staging:StagingArea._copy_deferred:record_events": (
        scenarios.defers_copies_for_a_background_save,
        EACH,
    ),
    "core.comm.streams:DeviceStreams.record_event:record_event": (scenarios.trains, FLAT),
    "devices:record_event:record_event": (scenarios.trains, FLAT),
    "core.params.gradient_reduction:GradientReducer._queue_rest:record_event again": (scenarios.trains, FLAT),
}
"""Each event that streams, or the thread that writes a save, wait for, and a scenario in which it is missed."""

CONTEXTS_FOUND: dict[str, tuple[Scenario, Style]] = {
    "checkpoint.save.staging:StagingArea.fill:copying": (scenarios.copies_for_a_background_save, EACH),
    "checkpoint.save.staging:StagingArea.fill:copying again": (scenarios.defers_copies_for_a_background_save, EACH),
    "checkpoint.save.staging:SideStreams.copying:use_stream": (scenarios.copies_for_a_background_save, EACH),
    "devices:use_stream:use": (scenarios.copies_for_a_background_save, EACH),
}
"""Each choice of a stream without which something is unordered, and a scenario that finds it."""
SERIAL = {
    "core.comm.streams:DeviceStreams.use_gather_stream:use_stream",
    "core.comm.streams:DeviceStreams.use_reduce_stream:use_stream",
    "core.comm.streams:DeviceStreams.use_all_reduce_stream:use_stream",
    "core.params.gradient_reduction:GradientReducer._start_reduce_scatter:use_reduce_stream",
    "core.params.gradient_reduction:GradientReducer._queue_rest:use_reduce_stream",
    "core.params.gradient_reduction:GradientReducer._queue_rest:use_all_reduce_stream",
    "core.params.unsharded_params:UnshardedParams._start_one:use_gather_stream",
    "core.params.unsharded_params:UnshardedParams._start_one:use_current_stream",
    "core.params.unsharded_params:UnshardedParams._start_several:use_gather_stream",
    "core.params.unsharded_params:UnshardedParams._start_several:use_current_stream",
    "core.fsdp2.fully_shard:_run_on_stream:use_stream",
}
"""Choices without which everything runs on the stream of the computation: in order, and not beside it."""
ON_THREADS = {
    "checkpoint.dedup:chunk_digests:use",
    "checkpoint.load.uploads:UploadBuffers.take:use",
    "devices:CurrentStreams.use:use_stream",
}
"""Choices of threads, which `test_host_waits` takes away."""

GATHER, SCATTER = "core.params.unsharded_params:UnshardedParams.", "core.params.gradient_reduction:GradientReducer."
CHANGED: dict[str, tuple[str, tuple[tuple[str, str], ...], tuple[Scenario, Style]]] = {
    "the event of a gather is recorded before it starts": (
        f"{GATHER}_start_one",
        (
            ("if self._fills_buffer:", "event = streams.record_event()\n        if self._fills_buffer:"),
            ("self._gather_event = streams.record_event()", "self._gather_event = event"),
        ),
        (scenarios.trains, FLAT),
    ),
    "the input of a reduction is dropped at once": (
        f"{SCATTER}_queue_rest",
        (("_ReduceInput((source,),", "_ReduceInput((),"),),
        (scenarios.trains, FLAT),
    ),
    "what is gathered is recorded for the stream that owns it": (
        f"{GATHER}wait_all_gather",
        (("record_stream(full)", "with self.streams.use_gather_stream(): record_stream(full)"),),
        (scenarios.trains, FLAT),
    ),
    "the event of a reduction is recorded before the sums": (
        f"{SCATTER}_queue_rest",
        (
            (
                "results, event = reduction.finish(), streams.record_event()",
                "event = streams.record_event(); results = reduction.finish()",
            ),
        ),
        (scenarios.trains, FLAT),
    ),
    "gathers of a backward wait for the begin of the iteration alone": (
        "core.runtime.fsdp_unit:ShardWrites.make_gathers_wait",
        (("event is None or not starts_iteration", "event is None and starts_iteration"),),
        (scenarios.writes_between_the_passes, FLAT),
    ),
    "parameters are copied out on the stream of the gathers": (
        f"{GATHER}_copy_out",
        (("self._stored.packing.unpack", "with self.streams.use_gather_stream(): self._stored.packing.unpack"),),
        (scenarios.trains, EACH),
    ),
    "the step waits for what was queued before the copies of a save": (
        "checkpoint.save.staging:SideStreams.copying",
        (
            (
                "\n    try:\n",
                "\n    early = {each: stream.record_event() for each, stream in self._streams.items()}\n    try:\n",
            ),
            ("event = stream.record_event()", "event = early[device]"),
        ),
        (scenarios.copies_for_a_background_save, EACH),
    ),
    "a writer waits for what was queued before deferred copies": (
        "checkpoint.save.staging:SideStreams.copying",
        (("defer_wait(device, event)", "defer_wait(device, current[device].record_event())"),),
        (scenarios.steps_after_overlapped_copies, EACH),
    ),
    "copies of buffers are deferred": (
        "checkpoint.stateful.flatten:_StateFlattener._weights",
        (("name not in weights.buffers\n", "True\n"),),
        (scenarios.trains_buffers_after_overlapped_copies, EACH),
    ),
    "copies that nothing defers are queued with those that are": (
        "checkpoint.save.staging:StagingArea.fill",
        (("is_deferred=is_deferred", "is_deferred=True"),),
        (scenarios.trains_buffers_after_overlapped_copies, EACH),
    ),
    "the event of a slice is recorded before it is copied": (
        f"{GATHER}_keep_partial_shard",
        (
            ("self._partial_shard_event = self.streams.record_event()", "self._partial_shard_event = event"),
            ("self._partial_shard = ", "event = self.streams.record_event(); self._partial_shard = "),
        ),
        (scenarios.keeps_slices_within_a_forward, EACH),
    ),
    "the buffer of a gather belongs to the computation": (
        f"{GATHER}_start_one",
        (("context: Abstract", "buffer.allocate(); context: Abstract"),),
        (scenarios.trains, FLAT),
    ),
    "the output of a reduction belongs to the stream of the gathers": (
        f"{SCATTER}_launch_reduce_scatter",
        (("out = torch.empty", "with self._unsharded.streams.use_gather_stream(): out = torch.empty"),),
        (scenarios.trains, FLAT),
    ),
}
"""What is done at another place or on another stream: the function, its edits, and a scenario that finds it."""


def test_every_call_that_orders_streams_is_known():
    assert {*FOUND, *EQUIVALENT} == set(sites())


def test_every_choice_of_a_stream_is_known():
    assert {*CONTEXTS_FOUND, *SERIAL, *ON_THREADS} == set(sites(CONTEXTS))


def survivors(world: int, wanted: dict[str, tuple[Scenario, Style]], names: frozenset[str] = ORDERING) -> set[str]:
    """The calls without which no rank finds anything, or fails."""
    return unnoticed(world, {site: (functools.partial(without, site, names), row) for site, row in wanted.items()})


def unnoticed(world: int, mutants: dict[str, tuple[Callable[[], Any], tuple[Scenario, Style]]]) -> set[str]:
    """The mutants in whose scenarios no rank finds anything, or fails."""

    def body(rank, world):
        missed = []
        for name, (mutant, row) in mutants.items():
            with mutant(), contextlib.suppress(AttributeError, TypeError):  # no event to wait for
                if not found(*row):
                    missed.append(name)
        return missed

    return set.intersection(*map(set, run(world, body, timeout=240)))


FOUR = {site: row for site, row in FOUND.items() if row[0] in scenarios.FOUR_RANKS}


@pytest.mark.shown_by("core/test_streams.py::test_all_accesses_are_ordered")
def test_each_call_that_orders_streams_is_missed_when_it_is_gone():
    assert survivors(2, {site: row for site, row in FOUND.items() if site not in FOUR}) == set()


@pytest.mark.shown_by("core/test_streams.py::test_all_accesses_of_several_groups_are_ordered")
def test_each_call_that_orders_streams_of_several_groups_is_missed_when_it_is_gone():
    assert survivors(4, FOUR) == set()


def test_each_event_is_missed_when_it_is_gone():
    assert survivors(2, EVENTS_FOUND, EVENTS) == set()


def test_each_choice_of_a_stream_is_missed_when_it_is_gone():
    assert survivors(2, CONTEXTS_FOUND, CONTEXTS) == set()


@pytest.mark.parametrize("world", [2, 4])
def test_each_change_of_the_order_is_found(world):
    mutants = {
        name: (functools.partial(changed, site, edits), row)
        for name, (site, edits, row) in CHANGED.items()
        if (row[0] in scenarios.FOUR_RANKS) is (world == 4)
    }
    assert unnoticed(world, mutants) == set()
