"""Streams that only keep clocks: every access to memory that nothing orders is found on a CPU.

Inside `checked()` the CPU has streams, and everything runs at once and in order, so values are right whatever the
engine forgets to wait for. What counts is what a device might have done:

- **Streams** have vector clocks: for each stream, the last of its operations that they come after. An operation runs on
  the current stream and comes after what that stream waited for. Waiting on the host orders no streams here, so that no
  order rests on a synchronization that happens to be there (the rate limiter's, a value that is read). It is noted in a
  clock of the host, which tells what may be read in host memory, and what the host knows to be done.
- **Operations** are seen by a dispatch mode: the ranges of bytes that each reads and writes. Of DTensors it sees the
  operations on local tensors.
- **Collectives** run on a stream of their group, after what is queued on the current stream. Their `wait()` lets only
  the stream that is current then come after them, as NCCL's does. They keep their tensors until then. Those with
  `async_op=False` are operations of the current stream.
- **Memory** belongs to the stream that was current when it was allocated: as soon as it is freed, operations of that
  stream may get it again. Each access must come before, or be on a stream (or before what is on it) that
  `record_stream` named, by the storage that owns the memory: CUDA ignores the others. Other streams come after what
  its stream had queued when it was allocated, as that may still use what was there before. Memory of `copy_to_pinned`
  is the host's, which frees it when it has read it.

An access that is not ordered with an earlier one of the same bytes, of which one writes, is an error that names both
places, and so is memory that is freed while it may be in use. An access by a view counts for all bytes from its first
to its last element.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from shardckpt import devices
from shardckpt.checkpoint.save import staging
from shardckpt.core.comm import streams as engine_streams

Clock = dict[int, int]
"""For each stream the last of its operations that something comes after."""
Place = tuple[tuple[str, int, str], ...]
"""File, line and function of the frames of this project, the innermost first."""

_ROOT = Path(__file__).resolve().parents[3]
_SOURCES = (f"{_ROOT}/shardckpt/", f"{_ROOT}/tests/")
_NOT_PLACES = (__file__, f"{_ROOT}/tests/kit/ranks/harness.py")
_WITHOUT_READS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_", "resize_"}
"""Operations that look at no element of their arguments."""
_ALLOCATION = "allocation"
_WITHOUT_WRITES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_", "resize_"}

# Method of ProcessGroup -> positions of what it writes and of what it reads.
_COLLECTIVES = {
    "all_gather_single": (0, 1),
    "_allgather_base": (0, 1),
    "reduce_scatter_single": (0, 1),
    "_reduce_scatter_base": (0, 1),
    "allgather": (0, 1),
    "reduce_scatter": (0, 1),
    "allreduce": (0, 0),
    "allreduce_coalesced": (0, 0),
    "all_gather_single_coalesced": (0, 1),
    "allgather_into_tensor_coalesced": (0, 1),
    "reduce_scatter_single_coalesced": (0, 1),
    "reduce_scatter_tensor_coalesced": (0, 1),
    "all_to_all_single": (0, 1),
    "alltoall_base": (0, 1),
    "alltoall": (0, 1),
    "broadcast": (0, 0),
    "reduce": (0, 0),
    "gather": (0, 1),
    "scatter": (0, 1),
}


class UnorderedError(AssertionError):
    """Accesses to memory that no stream orders."""


@dataclass
class Capture:
    """Whether operations are recorded into a graph; as CUDA, events then refuse what they cannot do."""

    is_on: bool = False

    def refuse(self, what: str) -> None:
        if self.is_on:
            raise RuntimeError(f"operation not permitted when stream is capturing: {what}")


@dataclass(eq=False)
class FakeStream:
    """A queue of operations that only counts them."""

    number: int
    name: str
    clock: Clock = field(default_factory=dict)
    host: Clock = field(default_factory=dict)
    capture: Capture = field(default_factory=Capture)

    def wait_stream(self, stream: FakeStream) -> None:
        _merge(self.clock, stream.clock)

    def wait_event(self, event: FakeEvent) -> None:
        if event.is_captured is not self.capture.is_on:
            raise RuntimeError("a stream waits for an event across the bounds of a capture")
        _merge(self.clock, event.clock)

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = event or FakeEvent()
        event.clock, event.host, event.capture = dict(self.clock), self.host, self.capture
        event.is_captured = self.capture.is_on
        return event

    def synchronize(self) -> None:
        """Let the host wait, which orders no streams: see the module's text."""
        self.capture.refuse("synchronize")
        _merge(self.host, self.clock)

    def tick(self) -> int:
        """Queue an operation, and return its number."""
        self.clock[self.number] = self.clock.get(self.number, 0) + 1
        return self.clock[self.number]

    def comes_after(self, access: Access) -> bool:
        return self.clock.get(access.stream.number, 0) >= access.number


class FakeEvent:
    """A place in a stream."""

    def __init__(self) -> None:
        self.clock: Clock = {}
        self.host: Clock = {}
        self.capture = Capture()
        self.is_captured = False

    def query(self) -> bool:
        self.capture.refuse("query")
        return False

    def synchronize(self) -> None:
        """Let the host wait, which orders no streams: see the module's text."""
        self.capture.refuse("synchronize")
        _merge(self.host, self.clock)


def _merge(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        if clock.get(stream, 0) < number:
            clock[stream] = number


@dataclass(frozen=True, eq=False)
class Access:
    """An operation that reads or writes the bytes at the addresses [start, stop)."""

    start: int
    stop: int
    stream: FakeStream
    number: int
    operation: str
    place: Place

    def __str__(self) -> str:
        return f"{self.operation} on the {self.stream.name} stream at {_told(self.place)}"


class Region:
    """The memory of a storage from when it is allocated until it is freed."""

    def __init__(self, home: FakeStream, born: Place, storage: torch.UntypedStorage) -> None:
        self.home = home
        self.born = born
        self.owner = storage._cdata
        self.start = storage.data_ptr()
        self.stop = self.start + storage.nbytes()
        self.reads: list[Access] = []
        self.writes: list[Access] = []
        self.users: list[FakeStream] = []  # as record_stream named them
        self.is_of_host = any(function == "copy_to_pinned" for _, _, function in born[:1])

    def note_allocation(self) -> None:
        """Count the allocation as a write: what the home stream has queued may still use what was there before."""
        if not self.is_of_host:
            number = self.home.clock.get(self.home.number, 0)
            self.writes.append(Access(self.start, self.stop, self.home, number, _ALLOCATION, self.born))


class Work:
    """What a collective returns."""

    def __init__(self, checker: Checker, clock: Clock, tensors: Any) -> None:
        self._checker = checker
        self._clock = clock
        if tensors is not None:
            checker.running[self] = tensors

    def wait(self, *_: Any) -> bool:
        _merge(self._checker.current.clock, self._clock)
        self._checker.running.pop(self, None)
        return True

    def is_completed(self) -> bool:
        return False


class FakeStreams(devices.TorchStreams):
    """Streams of all devices but meta."""

    def __init__(self, checker: Checker) -> None:
        self.checker = checker

    def has_streams(self, device: torch.device) -> bool:
        return device.type != "meta"

    def make(self, device: torch.device, priority: int) -> FakeStream:
        return self.checker.make_stream("gather" if priority < 0 else "other")

    def get_current(self, device: torch.device) -> FakeStream:
        return self.checker.current

    def is_capturing(self, device: torch.device) -> bool:
        return self.checker.capture.is_on

    def use(self, stream: FakeStream, device: torch.device) -> contextlib.AbstractContextManager[None]:
        return self.checker.on_stream(stream)

    def record(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        storage = tensor.untyped_storage()
        region = self.checker.region(storage)
        if stream not in region.users and region.owner == storage._cdata:
            region.users.append(stream)


class Checker:
    """The clocks of one process, and what it found."""

    def __init__(self) -> None:
        self.streams: list[FakeStream] = []
        self.host: Clock = {}
        self.capture = Capture()
        self.running: dict[Work, Any] = {}
        self.found: dict[tuple[Any, ...], str] = {}
        self.operations = 0
        self._compute = self.make_stream("compute")
        self._stack = [self._compute]
        self._regions: dict[int, Region] = {}
        self._watches: dict[int, Any] = {}
        self._groups: dict[str, FakeStream] = {}
        self._functional: dict[int, Clock] = {}
        self._thread = threading.get_ident()

    def make_stream(self, name: str) -> FakeStream:
        made = FakeStream(len(self.streams), name, host=self.host, capture=self.capture)
        self.streams.append(made)
        return made

    @property
    def current(self) -> FakeStream:
        return self._stack[-1]

    @contextlib.contextmanager
    def on_stream(self, stream: FakeStream) -> Iterator[None]:
        self._stack.append(stream)
        try:
            yield
        finally:
            self._stack.pop()

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Record what is done inside into a graph, after all that was queued before is done."""
        self.capture.is_on = True
        try:
            yield
        finally:
            self.capture.is_on = False

    def group_stream(self, name: str) -> FakeStream:
        if name not in self._groups:
            self._groups[name] = self.make_stream(f"group {name}")
        return self._groups[name]

    # ----------------------------------------------------------------------------------------------- memory

    def region(self, storage: torch.UntypedStorage, home: FakeStream | None = None) -> Region:
        """The region of a storage; memory from before the check, or from elsewhere, belongs to the computation."""
        key = storage._cdata
        found = self._regions.get(key)
        if found is None and home is None:
            found = self._find_around(storage)
            if found is not None:
                self._regions[key] = found
                self._watches[key] = weakref.ref(storage, lambda _: self._regions.pop(key, None))
        if found is None:
            found = self._regions[key] = Region(home or self._compute, _place(), storage)
            if home is not None:
                found.note_allocation()
            self._watches[key] = weakref.ref(storage, lambda _: self.free(key))
        return found

    def _find_around(self, storage: torch.UntypedStorage) -> Region | None:
        """Find the memory that a storage is a part of: that of a local tensor is a part of its bucket's."""
        start, stop = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        around = (each for each in self._regions.values() if each.start <= start and stop <= each.stop)
        return next(around, None) if start < stop else None

    def free(self, key: int) -> None:
        """Take the memory of a storage: check that nothing may use it when its home stream gets it again."""
        region = self._regions.pop(key, None)
        if region is None or region.is_of_host:
            return
        owners = [region.home, *region.users]
        for access in (*region.writes, *region.reads):
            if not any(owner.comes_after(access) for owner in owners):
                self._report(
                    ("freed", region.born, access.operation, access.place),
                    f"memory of the {region.home.name} stream, allocated at {_told(region.born)},\n"
                    f"    is freed at {_told(_place())}\n    while it may be in use by {access}",
                )

    def resize(self, storage: torch.UntypedStorage, nbytes: int, resize: Callable[..., Any]) -> Any:
        """Free the memory of a storage, and give it new memory on the current stream."""
        self.free(storage._cdata)
        result = resize(storage, nbytes)
        if nbytes:
            self.region(storage, self.current)
        return result

    def access(
        self, tensor: torch.Tensor, stream: FakeStream, number: int, operation: str, place: Place, *, writes: bool
    ) -> None:
        """Note an access, and check that it comes after those that it must not meet."""
        span = _span(tensor)
        if span is None:
            return
        region = self.region(tensor.untyped_storage())
        now = Access(*span, stream, number, operation, place)
        for before in (*region.writes, *region.reads) if writes else region.writes:
            if before.start < now.stop and now.start < before.stop and not stream.comes_after(before):
                self._report(
                    ("unordered", before.operation, before.place, operation, place),
                    f"{'write' if writes else 'read'} by {now}\n"
                    f"    is not ordered after {'write' if before in region.writes else 'read'} by {before}\n"
                    f"    memory of the {region.home.name} stream, allocated at {_told(region.born)}",
                )
        if writes:
            region.writes = [each for each in region.writes if not _covers(now, each)] + [now]
            region.reads = [each for each in region.reads if not _covers(now, each)]
        else:
            region.reads = [each for each in region.reads if not (each.stream is stream and _covers(now, each))] + [now]

    def read_on_host(self, start: int, nbytes: int) -> None:
        """Note that the host reads bytes in its memory: it must have waited for what streams write there."""
        place = _place()
        for region in self._regions.values():
            for write in region.writes:
                is_met = write.start < start + nbytes and start < write.stop and write.operation != _ALLOCATION
                if is_met and self.host.get(write.stream.number, 0) < write.number:
                    self._report(
                        ("read on the host", write.operation, write.place, place),
                        f"read by the host at {_told(place)}\n    which has not waited for write by {write}",
                    )

    def _report(self, key: tuple[Any, ...], text: str) -> None:
        self.found.setdefault(key, text)

    # ------------------------------------------------------------------------------------------- operations

    def run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on the current stream, and note what it reads and writes."""
        namespace, _, name = function._schema.name.partition("::")
        if namespace == "c10d":
            return function(*args, **kwargs)  # noted where the method of the group is called
        if namespace == "_c10d_functional":
            return self._run_functional(function, name, args, kwargs)
        self.operations += 1
        stream = self.current
        number, place = stream.tick(), _place()
        reads, writes = _arguments(function, name, args, kwargs)
        for tensor in reads:
            self.access(tensor, stream, number, name, place, writes=False)
        for tensor in writes:
            self.access(tensor, stream, number, name, place, writes=True)
        result = function(*args, **kwargs)
        self._note_results(result, function, args, kwargs, stream, number, name, place)
        return result

    def _note_results(
        self,
        result: Any,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        stream: FakeStream,
        number: int,
        name: str,
        place: Place,
    ) -> None:
        """Note memory that an operation allocated and wrote."""
        if not _facts(function).allocates:
            return
        known = {each.untyped_storage()._cdata for each in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata in known:
                continue
            self.region(storage, stream)
            if name not in _WITHOUT_WRITES:
                self.access(tensor, stream, number, name, place, writes=True)

    def _run_functional(self, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "wait_tensor":
            for tensor in _tensors(args):
                _merge(self.current.clock, self._functional.pop(tensor.untyped_storage()._cdata, {}))
            return function(*args, **kwargs)
        groups = [each for each in (*args, *kwargs.values()) if isinstance(each, str) and each not in _REDUCTIONS]
        if not groups:
            return function(*args, **kwargs)
        result = function(*args, **kwargs)
        stream, inputs, outputs = self.group_stream(groups[-1]), _tensors((args, kwargs)), _tensors(result)
        self._collect(stream, name, inputs, outputs)
        for tensor in outputs:
            self._functional[tensor.untyped_storage()._cdata] = dict(stream.clock)
        return result

    def _collect(self, stream: FakeStream, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """Queue a collective on the stream of its group."""
        _merge(stream.clock, self.current.clock)
        number, place = stream.tick(), _place()
        for tensor in outputs:
            self.region(tensor.untyped_storage(), self.current)
        for tensor in inputs:
            self.access(tensor, stream, number, name, place, writes=False)
        for tensor in outputs:
            self.access(tensor, stream, number, name, place, writes=True)

    def collective(self, name: str, method: Callable[..., Any], group: Any, args: tuple[Any, ...]) -> Any:
        """Run a collective on copies, so that no thread of the backend holds what the engine frees."""
        into, out = _COLLECTIVES[name]
        is_async = all(getattr(each, "asyncOp", True) for each in args)
        stream = self.group_stream(group.group_name) if is_async else self.current
        self._collect(stream, name, _tensors(args[out]), _tensors(args[into]))
        with _disable_current_modes(), torch.no_grad():
            copies = tuple(_copied(each) for each in args)
            method(group, *copies).wait()
            for theirs, ours in zip(_tensors(copies[into]), _tensors(args[into]), strict=True):
                ours.detach().copy_(theirs)
        return Work(self, dict(stream.clock), args if is_async else None)

    def raise_found(self) -> None:
        """Raise what was found, if anything was."""
        if self.found:
            raise UnorderedError("\n".join([f"{len(self.found)} unordered accesses", *self.found.values()]))


_REDUCTIONS = {"sum", "avg", "min", "max", "product", "band", "bor", "bxor"}


class _Mode(TorchDispatchMode):
    def __init__(self, checker: Checker) -> None:
        super().__init__()
        self._checker = checker

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, FakeTensor) for each in types):
            return function(*args, **(kwargs or {}))
        if any(each not in (torch.Tensor, torch.nn.Parameter) for each in types):
            return NotImplemented  # then of a DTensor the operations on local tensors come here
        return self._checker.run(function, args, kwargs or {})


@dataclass(frozen=True)
class _Facts:
    """What the schema of an operation says: names and writes of arguments, and whether results are new memory."""

    arguments: tuple[tuple[str, bool], ...]
    is_view: bool
    allocates: bool


@functools.cache
def _facts(function: Any) -> _Facts:
    schema = function._schema
    arguments = tuple(
        (each.name, each.alias_info is not None and each.alias_info.is_write) for each in schema.arguments
    )
    is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)
    return _Facts(arguments, is_view, any(each.alias_info is None for each in schema.returns))


def _arguments(
    function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What an operation reads and what it writes of its arguments."""
    facts = _facts(function)
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    values = [*zip(facts.arguments, args, strict=False)]
    values += [(each, kwargs[each[0]]) for each in facts.arguments if each[0] in kwargs]
    for (_, is_written), value in values:
        if is_written and name not in _WITHOUT_WRITES:
            writes += _tensors(value)
        elif not facts.is_view and name not in _WITHOUT_READS:
            reads += _tensors(value)
    return reads, writes


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in a value that have memory."""
    if isinstance(value, torch.Tensor):
        return [value] if type(value) in (torch.Tensor, torch.nn.Parameter) and value.device.type == "cpu" else []
    if isinstance(value, (tuple, list)):
        return [tensor for each in value for tensor in _tensors(each)]
    if isinstance(value, dict):
        return [tensor for each in value.values() for tensor in _tensors(each)]
    return []


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone(memory_format=torch.contiguous_format)
    if isinstance(value, (tuple, list)):
        return [_copied(each) for each in value]
    return value


def _span(tensor: torch.Tensor) -> tuple[int, int] | None:
    """The addresses from the first to the last element of a tensor."""
    if not tensor.numel() or tensor.layout is not torch.strided:
        return None
    size = tensor.element_size()
    start = tensor.data_ptr()
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * size


def _covers(one: Access, other: Access) -> bool:
    return one.start <= other.start and other.stop <= one.stop


def _place() -> Place:
    """The innermost frames of this project."""
    found: list[tuple[str, int, str]] = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < 4:
        file = frame.f_code.co_filename
        if file.startswith(_SOURCES) and file not in _NOT_PLACES:
            found.append((file, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(found)


def _told(place: Place) -> str:
    frames = [f"{Path(file).relative_to(_ROOT)}:{line} ({name})" for file, line, name in place]
    return " < ".join(frames) or "an unknown place"


@contextlib.contextmanager
def checked() -> Iterator[Checker]:
    """Check all that this process does inside.

    Raises:
        UnorderedError: Accesses to memory were not ordered; also in place of another exception.
    """
    checker = Checker()
    try:
        with _installed(checker), _Mode(checker):
            yield checker
    except BaseException as error:
        if checker.found and not isinstance(error, UnorderedError):
            checker.raise_found()
        raise
    checker.raise_found()


@contextlib.contextmanager
def _installed(checker: Checker) -> Iterator[None]:
    """Put the fakes in the place of streams, of methods of groups and of the resizing of storages."""
    with contextlib.ExitStack() as stack:
        _put(stack, devices, "_streams", FakeStreams(checker))
        _put(stack, engine_streams, "_device_streams", {})
        _put(stack, staging, "_side_streams", {})
        _put(stack, devices, "_deferred", {})
        _put(stack, torch.UntypedStorage, "resize_", _noted_resize(checker))
        _put(stack, torch.Tensor, "tolist", _noted_tolist(checker))
        for name in _COLLECTIVES:
            method = getattr(dist.ProcessGroup, name, None)
            if method is not None:
                _put(stack, dist.ProcessGroup, name, _noted_collective(checker, name, method))
        yield


def _put(stack: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _noted_resize(checker: Checker) -> Callable[..., Any]:
    original = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
        if storage.device.type == "cpu":
            return checker.resize(storage, nbytes, original)
        return original(storage, nbytes)

    return resize_


def _noted_tolist(checker: Checker) -> Callable[..., Any]:
    original = torch.Tensor.tolist

    def tolist(tensor: torch.Tensor) -> Any:
        for each in _tensors(tensor):
            stream = checker.current
            checker.access(each, stream, stream.tick(), "tolist", _place(), writes=False)
        return original(tensor)

    return tolist


def _noted_collective(checker: Checker, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def noted(group: Any, *args: Any, **kwargs: Any) -> Any:
        return checker.collective(name, method, group, args or tuple(kwargs.values()))

    return noted
