"""Simulated time, threads, randomness and files, instead of the real ones that shardckpt uses.

Every shardckpt module refers to `os`, `time`, `threading` and others by a global. While `simulated` is active, those
globals refer to simulated twins, so product code runs unchanged.
"""

from __future__ import annotations

import fcntl
import os
import queue
import secrets
import shutil
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from functools import cache, cached_property, lru_cache, partial
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from shardckpt.checkpoint.save.async_save import CAPTURES, LOCAL_CAPTURES, SAVES, SaveLane
from shardckpt.checkpoint.save.handle import PENDING_SAVE, PendingSave
from shardckpt.checkpoint.save.save import SAVERS, SaverCache
from shardckpt.checkpoint.save.staging import BufferPool, StagingBuffer, is_unpinned, make_buffer, memory_size
from shardckpt.native.commit import decode_commit
from shardckpt.native.manifest_json import ManifestContents, decode_manifest
from shardckpt.native.step_copies import read_mounts
from shardckpt.native.verified_store import BlockMemory
from shardckpt.offline.targets.target_registry import list_targets
from shardckpt.ranks.process_group import GROUPS
from shardckpt.ranks.wait_notice import announce_wait
from shardckpt.readers.registry import iter_formats
from shardckpt.state.local.tensor_shards import get_tensor_shards
from shardckpt.storage.linux_syscalls import exchange, lower_priority, start_writeback
from shardckpt.storage.resolve_url import MOUNTED
from shardckpt.storage.retry import LOST, PAUSES, WATCH
from shardckpt.storage.thread_pool import ThreadPool
from shardckpt.tiers.memory import run_folders
from shardckpt.tiers.memory.free_memory import read_available_bytes
from shardckpt.tiers.memory.lease import HELD
from shardckpt.tiers.memory.memory_store import PLACES
from shardckpt.tiers.peer_memory import find_node, find_node_id
from shardckpt.tiers.peers.node_files import Node
from tests.simulation.scheduler import Process, Scheduler, Task
from tests.simulation.stores.node_memory import SHM, Janitors
from tests.simulation.stores.operating_system import OperatingSystem
from tests.simulation.trained_state import find_tensor_shards

T = TypeVar("T")

_LATE = (  # modules imported on first use
    "shardckpt.storage.fsspec_store",
    "shardckpt.tiers.memory.memory_store",
    "shardckpt.native.reader",
    "shardckpt.offline.prune",
    "shardckpt.checkpointer",
    "shardckpt.checkpoint.load.live_check",
    "shardckpt.checkpoint.load.optim_load_plan",
    "shardckpt.state.adapters.torch_fsdp1",
    "shardckpt.state.local.local_shards",
    "shardckpt.state.local.optim_shards",
)

_READS_BACK = "shardckpt.encodings.safetensors_check"  # uses the builtin `open`


_MAX_BUFFER_BYTES = 1 << 16

_MEMORY_BYTES = 1 << 40

# `COMMIT` files and manifests whose content is remembered: they are read again and again.
_MAX_DECODED = 64


def _make_small_buffer(nbytes: int) -> StagingBuffer:
    """Return a smaller staging buffer than asked for: states are small, and many histories share the addresses."""
    return make_buffer(min(nbytes, _MAX_BUFFER_BYTES))


class Twin:
    """A module with some simulated functions."""

    def __init__(self, real: ModuleType, **simulated: object) -> None:
        self._real = real
        self.__dict__.update(simulated)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _Owned:
    """A value that each simulated process or thread owns."""

    def __init__(self, find_own: Callable[[], dict[object, Any]], make: Callable[[], object]) -> None:
        self._find_own, self._make = find_own, make

    def __getattr__(self, name: str) -> Any:
        own = self._find_own()
        value = own.get(self)
        if value is None:
            value = own[self] = self._make()
        return getattr(value, name)

    def __setitem__(self, key: object, value: object) -> None:
        self.__getattr__("__setitem__")(key, value)

    def __delitem__(self, key: object) -> None:
        self.__getattr__("__delitem__")(key)


class Machine:
    """The machine on which all processes in a history run, instead of the real one."""

    def __init__(
        self, scheduler: Scheduler, system: OperatingSystem, janitors: Janitors, nodes: Mapping[str, Node]
    ) -> None:
        self.scheduler, self.system, self._janitors, self._nodes = scheduler, system, janitors, nodes
        self._observer = Process("observer", 1)

    def find_values_of_thread(self) -> dict[object, Any]:
        """Return the running thread's replacements for module globals, by key."""
        return self.scheduler.current.own if self.scheduler.current is not None else self._observer.own

    def find_values_of_process(self) -> dict[object, Any]:
        """Return the running process's replacements for module globals, by key."""
        return self.process.own

    @property
    def process(self) -> Process:
        """The running thread's process."""
        return self.scheduler.current.process if self.scheduler.current is not None else self._observer

    def find_node(self, rack: str = "") -> Node:
        """Return the running process's node, instead of `peer_memory.find_node`."""
        return self._nodes[self.process.node]._replace(rack=rack)

    def clock(self) -> float:
        """Return the wall clock as the process sees it, in seconds since the epoch."""
        return self.scheduler.clock + self.process.clock_shift

    def twins(self) -> list[tuple[object, object]]:
        """Return pairs: a value that modules refer to, and its simulated twin."""
        system, scheduler, chance = self.system, self.scheduler, self.scheduler.random
        pending, saves = _Owned(self.find_values_of_process, PendingSave), SaverCache()
        return [
            (os, system),
            (fcntl, Twin(fcntl, flock=system.flock, fcntl=lambda *_: 0)),
            (shutil, Twin(shutil, rmtree=system.rmtree)),
            (exchange, system.exchange),
            (start_writeback, lambda *_: None),
            (lower_priority, lambda: None),
            (read_mounts, lambda: ""),
            (read_available_bytes, lambda _needed: None),
            (memory_size, lambda: _MEMORY_BYTES),
            (time, Twin(time, **self._clocks())),
            (PAUSES, chance),
            (announce_wait, lambda *_of_ranks: nullcontext()),  # simulated waits take no time
            (LOST, {}),
            (WATCH, SimpleNamespace(waiting=lambda _where: nullcontext())),
            (secrets, Twin(secrets, choice=chance.choice, token_hex=lambda n: chance.randbytes(n).hex())),
            (threading, Twin(threading, **self._primitives())),
            (weakref, Twin(weakref, finalize=SimulatedFinalizer)),
            *((getattr(threading, name), twin) for name, twin in self._primitives().items()),
            (queue.SimpleQueue, lambda: SimulatedQueue(scheduler)),
            (ThreadPool, InlineExecutor),
            (subprocess, Twin(subprocess, run=self._janitors.start)),
            (HELD, _Owned(self.find_values_of_process, dict)),
            (PLACES, _Owned(self.find_values_of_process, dict)),
            (decode_commit, lru_cache(_MAX_DECODED)(decode_commit)),
            (decode_manifest, _remember_manifests()),
            (get_tensor_shards, find_tensor_shards),
            (BlockMemory, lambda: _Owned(self.find_values_of_thread, BlockMemory)),
            (find_node, self.find_node),
            (find_node_id, lambda: self.process.node),
            (MOUNTED, _Owned(self.find_values_of_process, dict)),
            (PENDING_SAVE, pending),
            (GROUPS, WeakKeyDictionary()),
            (SAVERS, saves),
            (SAVES, self._own_lane(SAVES, pending, saves)),
            *(
                (lane, self._own_lane(lane, _Owned(self.find_values_of_process, PendingSave), SaverCache()))
                for lane in (CAPTURES, LOCAL_CAPTURES)
            ),
        ]

    def _own_lane(self, lane: SaveLane, pending: Any, savers: SaverCache) -> SaveLane:
        buffers: Any = _Owned(self.find_values_of_process, lambda: BufferPool(_make_small_buffer, is_unpinned))
        return lane._replace(pending=pending, buffers=buffers, savers=savers)

    def _clocks(self) -> dict[str, object]:
        def monotonic() -> float:
            return self.scheduler.now

        return {
            "time": self.clock,
            "time_ns": lambda: int(self.clock() * 1e9),
            "monotonic": monotonic,
            "perf_counter": monotonic,
            "sleep": self.scheduler.sleep,
        }

    def _primitives(self) -> dict[str, object]:
        scheduler = self.scheduler
        return {
            "Thread": lambda **options: SimulatedThread(self, **options),
            "Lock": lambda: SimulatedLock(scheduler),
            "RLock": lambda: SimulatedLock(scheduler),
            "Event": lambda: SimulatedFlag(scheduler),
            "Condition": lambda: SimulatedCondition(scheduler),
            "local": _refuse_values_of_threads,
            "_register_atexit": lambda _act: None,
        }


def _remember_manifests() -> Callable[..., ManifestContents]:
    """Return a caching `decode_manifest`."""
    remembered = lru_cache(_MAX_DECODED)(decode_manifest)
    return lambda data, *, where="": remembered(bytes(data), where=str(where))


def _refuse_values_of_threads() -> object:
    """Raise TypeError: simulated threads share one real thread, so `threading.local` would mix their values."""
    raise TypeError("a threading.local in a history must have a twin, as BlockMemory has")


@contextmanager
def simulated(machine: Machine) -> Iterator[None]:
    """Run all modules of shardckpt on a simulated machine inside the context."""
    _import_late()
    twins = {id(real): twin for real, twin in machine.twins()}
    slots = _find_slots(tuple(twins), len(sys.modules))
    for slot in slots:
        slot.space[slot.name] = twins[id(slot.value)]
    reads_back = vars(sys.modules[_READS_BACK])
    reads_back["open"] = machine.system.open_stream
    locked = _find_locked_properties(len(sys.modules))
    for each, _ in locked:
        each.lock = nullcontext()
    shared_memory, run_folders.SHARED_MEMORY = run_folders.SHARED_MEMORY, SHM
    try:
        yield
    finally:
        run_folders.SHARED_MEMORY = shared_memory
        for each, lock in locked:
            each.lock = lock
        for slot in slots:
            slot.space[slot.name] = slot.value
        del reads_back["open"]


@cache
def _import_late() -> None:
    """Import lazy modules and plugin formats: a history must not depend on the first use."""
    for name in _LATE:
        import_module(name)
    list(iter_formats())
    list_targets()


class _Slot(NamedTuple):
    """A global in a shardckpt module: namespace, name, and value outside the simulation."""

    space: dict[str, object]
    name: str
    value: object


@lru_cache(maxsize=2)
def _find_slots(wanted: tuple[int, ...], _modules: int) -> list[_Slot]:
    """Return shardckpt's globals with the given value ids. Cached until more modules are imported."""
    ids = frozenset(wanted)
    return [_Slot(space, name, each) for space in _list_spaces() for name, each in space.items() if id(each) in ids]


def _list_spaces() -> list[dict[str, object]]:
    """Return the globals of each imported shardckpt module, without `testing`."""
    modules = sorted(
        name for name in sys.modules if name.startswith("shardckpt.") and not name.startswith("shardckpt.testing")
    )
    return [vars(sys.modules[name]) for name in modules]


@lru_cache(maxsize=2)
def _find_locked_properties(_modules: int) -> list[tuple[Any, object]]:
    """Return the cached properties with a lock (before Python 3.12): threads of all processes share it."""
    classes = (each for space in _list_spaces() for each in space.values() if isinstance(each, type))
    members = (member for each in set(classes) for member in vars(each).values())
    return [(each, each.lock) for each in members if isinstance(each, cached_property) and hasattr(each, "lock")]


class SimulatedThread:
    """A thread of a simulated process, with the interface of `threading.Thread`."""

    def __init__(self, machine: Machine, target: Callable[[], object], name: str = "", daemon: bool = False) -> None:
        del daemon
        self._machine, self._target, self._name = machine, target, name
        self._task: Task | None = None

    def start(self) -> None:
        """Start the thread."""
        process = self._machine.process
        self._task = self._machine.scheduler.spawn(process, f"{process.name}/{self._name}", self._target)

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread ends."""
        self._machine.scheduler.wait(lambda: not self.is_alive(), f"thread {self._name}", timeout, (self._task,))

    def is_alive(self) -> bool:
        """Return True until the thread ends."""
        return self._task is not None and not self._task.is_over


class SimulatedFinalizer:
    """A call at an object's end, if the object keeps this: the list of `weakref.finalize` would keep the history."""

    def __init__(self, value: object, act: Callable[..., object], *args: object) -> None:
        self._act: Callable[[], object] | None = partial(act, *args)
        self._value = weakref.ref(value, self)

    def __call__(self, _: object = None) -> None:
        """Make the call, once."""
        act, self._act = self._act, None
        if act is not None:
            act()


class SimulatedLock:
    """A reentrant lock between the threads of one process."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._owner: Task | None = None
        self._depth = 0
        self._is_watched = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock."""
        task = self._scheduler.current
        if self._owner is not None and self._owner is not task:
            if not blocking:
                return False
            self._is_watched = True
            seconds = None if timeout < 0 else timeout
            if not self._scheduler.wait(lambda: self._owner is None, "a process lock", seconds, (self,)):
                return False
        if not blocking and self._depth:
            return False
        self._owner = task
        self._depth += 1
        if self._is_watched:
            self._scheduler.notify(self)
        return True

    def release(self) -> None:
        """Release the lock."""
        self._depth -= 1
        if not self._depth:
            self._owner = None
            if self._is_watched:
                self._scheduler.notify(self)

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimulatedFlag:
    """A flag that threads wait for, with the interface of `threading.Event`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_set = False

    def set(self) -> None:
        """Set the flag."""
        self._is_set = True
        self._scheduler.notify(self)

    def is_set(self) -> bool:
        """Return True if the flag is set."""
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the flag is set."""
        return self._is_set or self._scheduler.wait(lambda: self._is_set, "a flag", timeout, (self,))


class SimulatedCondition(SimulatedLock):
    """A condition variable; only one thread runs, so its lock is never contended."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self._notices = 0
        self._is_watched = True

    def wait_for(self, predicate: Callable[[], object]) -> None:
        """Wait until a condition holds, with the lock released meanwhile."""
        self.release()
        self._scheduler.wait(lambda: bool(predicate()) and self._owner is None, "a condition", None, (self,))
        self.acquire()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for a notice, with the lock released meanwhile."""
        before = self._notices
        self.release()
        has_come = self._scheduler.wait(
            lambda: self._notices > before and self._owner is None, "a notice", timeout, (self,)
        )
        self.acquire()
        return has_come

    def notify_all(self) -> None:
        """Wake the threads that wait, at the next scheduling point."""
        self._notices += 1
        self._scheduler.notify(self)

    notify = notify_all


class SimulatedQueue:
    """A queue between threads, with the interface of `queue.SimpleQueue`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._items: deque[object] = deque()

    def put(self, item: object) -> None:
        """Append an item."""
        self._items.append(item)
        self._scheduler.notify(self)

    def get(self, timeout: float | None = None) -> object:
        """Return the next item, after waiting for it. Raises Empty."""
        if not self._items and not self._scheduler.wait(lambda: bool(self._items), "a queue item", timeout, (self,)):
            raise queue.Empty
        return self._items.popleft()


class InlineExecutor:
    """A thread pool that runs each function when it is submitted."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def submit(self, act: Callable[..., T], *args: Any) -> Future[T]:
        """Run a function, and return its result."""
        done: Future[T] = Future()
        try:
            done.set_result(act(*args))
        except Exception as error:  # noqa: BLE001  (raised by whoever asks)
            done.set_exception(error)
        return done

    def map(self, act: Callable[..., T], *iterables: Iterable[Any]) -> Iterator[T]:
        """Return the results of a function for each item."""
        return iter([act(*items) for items in zip(*iterables, strict=False)])

    def shutdown(self, **_: object) -> None:
        """Do nothing."""

    def __enter__(self) -> InlineExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        pass
