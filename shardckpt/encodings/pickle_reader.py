"""Read pickles without executing them: an interpreter with an allow-list.

Supports the opcodes of protocols 0 to 5 (PEP 3154 and 574, and the notes in CPython's `pickletools`). Names that the
pickle would import, call or construct become values of `pickle_stubs`; those that can run code are a typed error.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from struct import Struct, unpack_from
from struct import error as StructError  # noqa: N812  # struct spells its exception in lower case
from typing import Any, ClassVar, NamedTuple

from shardckpt.encodings.budget import KeyGuard, ReadBudget
from shardckpt.encodings.pickle_stubs import (
    ALLOWED,
    NEVER_RUN,
    PLAIN_KEYS,
    Dtype,
    Global,
    InstanceStub,
    Ordered,
    StorageType,
    TensorStub,
    make_size,
    make_stub,
    make_unlisted,
)
from shardckpt.errors import FormatError, ShardckptError, TruncatedError, UnsafeError

__all__ = [
    "Dtype",
    "Global",
    "InstanceStub",
    "Limits",
    "Ordered",
    "PickleMachine",
    "StorageType",
    "TensorStub",
    "load",
    "load_at",
]

# Resolves a persistent id, such as torch's `("storage", type, key, device, count)`, to its value.
Persistent = Callable[[object], object]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits for one pickle, far above real checkpoints."""

    nbytes: int = 1 << 30  # bytes of the pickle; also limits its opcodes and strings
    depth: int = 200  # nesting of containers; 0 disables the depth and size checks, for callers that do not recurse
    int_bytes: int = 1024


DEFAULT_LIMITS = Limits()


def load(
    data: bytes | bytearray | memoryview,
    *,
    where: str,
    persistent: Persistent | None = None,
    limits: Limits = DEFAULT_LIMITS,
    budget: ReadBudget | None = None,
) -> object:
    """Return a pickle's object; ignore bytes after it."""
    return load_at(data, 0, where=where, persistent=persistent, limits=limits, budget=budget)[0]


def load_at(
    data: bytes | bytearray | memoryview,
    start: int,
    *,
    where: str,
    persistent: Persistent | None = None,
    limits: Limits = DEFAULT_LIMITS,
    budget: ReadBudget | None = None,
) -> tuple[object, int]:
    """Return the object of the pickle at byte `start`, with stubs for classes, and the pickle's end."""
    budget = ReadBudget(len(data) - start) if budget is None else budget
    machine = PickleMachine(data if type(data) is bytes else bytes(data), persistent, limits, budget)
    try:
        if len(data) - start > limits.nbytes:
            raise _over("bytes", limits.nbytes)
        return machine.run(start), machine.pos
    except ShardckptError as error:
        raise _add_position(error, f"{where}, byte {machine.pos}") from None


def _add_position(error: ShardckptError, where: str) -> ShardckptError:
    """Add the pickle's name and the byte where reading stopped to an error."""
    return type(error)(
        error.what,
        where=error.where or where,
        found=error.found,
        expected=error.expected,
        fix=error.fix or ("Copy the file again." if isinstance(error, TruncatedError) else ""),
    )


_ATOMS: frozenset[type] = frozenset({str, int, bool, float, complex, bytes, type(None), Dtype, StorageType, Global})
_TUPLE, _LIST, _DICT, _SET = 64, 80, 80, 232
# Cost in bytes: a call, an item in a dict or set, a value that is used again, an unlisted name.
_CALL, _ITEM, _SHARED, _NAME = 96, 64, 64, 1024

# Cost in bytes of each value beyond one per byte of the pickle; shared values count repeatedly.
_REPEATED = 256

_LONG_TEXT = 256
# Up to so many bytes, opcodes come from a list (three times as fast); memory cost of each.
_MAX_LISTED, _LISTED = 1 << 20, 8

_MAX_MARKS = 1 << 16

_TWO_BYTES = Struct("<H").unpack_from
_FOUR_BYTES = Struct("<I").unpack_from


class _Unset:
    """Marks memo slots that a pickle skipped."""


_UNSET = _Unset()


def _over(what: str, limit: int) -> UnsafeError:
    return UnsafeError(
        f"the pickle asks for more {what} than any checkpoint needs",
        expected=f"at most {limit}",
        fix="It looks made to exhaust this machine; do not trust where it came from.",
    )


def _ends_early(machine: PickleMachine, needed: int = 0) -> TruncatedError:
    """Return the error for a pickle that ends before its last opcode."""
    most = max(needed, machine.frames_end)
    nbytes, expected = len(machine.data), f"at least {most} bytes" if most else "more bytes"
    found = f"{nbytes} byte{'s' * (nbytes != 1)}"
    return TruncatedError("the pickle ends early", found=found, expected=expected)


class PickleMachine:
    """Pickle interpreter: stack, memo, opcode loop and shared operations."""

    atoms: ClassVar[frozenset[type]] = _ATOMS  # types that count once, however often the pickle uses a value
    # Types of arguments whose content a call may copy.
    sized: ClassVar[tuple[type[Sized], ...]] = (list, tuple, dict, set, frozenset, str, bytes)
    texts: ClassVar[tuple[type[Sized], ...]] = (str, bytes)
    table: ClassVar[Sequence[_Step]]

    __slots__ = (
        "budget",
        "data",
        "frames_end",
        "has_long_text",
        "keys",
        "left",
        "limits",
        "marks",
        "memo",
        "persistent",
        "pos",
        "shared",
        "stack",
    )

    def __init__(
        self,
        data: bytes,
        persistent: Persistent | None,
        limits: Limits,
        budget: ReadBudget,
    ) -> None:
        self.data = data
        self.persistent = persistent
        self.limits = limits
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[object] = []
        self.shared: set[int] = set()
        self.budget = budget
        self.left = budget.left
        self.keys = KeyGuard(PLAIN_KEYS)
        self.has_long_text = False
        self.frames_end = 0
        self.pos = 0

    def run(self, start: int) -> object:
        """Execute opcodes up to STOP, set `pos` to the pickle's end, and return the result."""
        try:
            self._loop(start)
            if self.frames_end > len(self.data):
                raise _ends_early(self)
            value: object = self.stack[-1]
            self.spend(_SHARED * len(self.shared))
            if self.limits.depth and value.__class__ in _CONTAINERS:
                nbytes = self.pos - start
                shape = _Shape(self.limits.depth, nbytes + self.left // _REPEATED, self)
                self.spend(_REPEATED * max(0, shape.measure(value, 1).values - nbytes))
        except StructError:
            raise _ends_early(self) from None
        except IndexError:
            if self.pos >= len(self.data):
                raise _ends_early(self) from None
            raise FormatError("the pickle pops from an empty stack") from None
        except ShardckptError:
            raise
        except (UnicodeError, ValueError, TypeError, AttributeError, OverflowError) as error:
            raise FormatError("the pickle is malformed", found=str(error)) from None
        except (MemoryError, RecursionError):
            raise UnsafeError("the pickle asks for more memory than there is") from None
        finally:
            self.budget.left = self.left
        return value

    def _loop(self, pos: int) -> None:
        """Execute opcodes: frequent short ones inline, by halves of the table; others by table."""
        data, stack, memo, marks = self.data, self.stack, self.memo, self.marks
        listed = len(data) if len(data) <= _MAX_LISTED else 0
        codes = list(data) if listed else data
        self.left -= _LISTED * listed  # until the loop ends
        table, atoms, four_bytes = self.table, self.atoms, _FOUR_BYTES
        push, pop, remember, set_mark = stack.append, stack.pop, memo.append, marks.append
        try:
            while True:
                op = codes[pos]
                pos += 1
                if op < 0x70:
                    if op == 0x68:  # BINGET
                        value = memo[codes[pos]]
                        pos += 1
                        if value.__class__ not in atoms:
                            self.share(value)
                        push(value)
                    elif op == 0x4B:  # BININT1
                        push(codes[pos])
                        pos += 1
                    elif op == 0x6A:  # LONG_BINGET
                        (index,) = four_bytes(data, pos)
                        value = memo[index]
                        pos += 4
                        if value.__class__ not in atoms:
                            self.share(value)
                        push(value)
                    elif op == 0x28:  # MARK
                        if len(marks) >= _MAX_MARKS:
                            raise _over("containers in one another", _MAX_MARKS)
                        set_mark(len(stack))
                    elif op == 0x2E:  # STOP
                        return
                    else:
                        pos = table[op](self, pos)
                elif op == 0x72:  # LONG_BINPUT
                    (index,) = four_bytes(data, pos)
                    pos += 4
                    if index == len(memo):
                        remember(stack[-1])
                    else:
                        self.put(index)
                elif op == 0x94:  # MEMOIZE
                    remember(stack[-1])
                elif 0x85 <= op <= 0x87 or op == 0x74:  # TUPLE1, TUPLE2, TUPLE3, TUPLE
                    self.left -= _TUPLE
                    if self.left < 0:
                        raise self.budget.exceeded()
                    if op == 0x86:
                        last = pop()
                        stack[-1] = (stack[-1], last)
                    elif op == 0x85:
                        stack[-1] = (stack[-1],)
                    elif op == 0x74:
                        mark = marks.pop()
                        values = tuple(stack[mark:])
                        del stack[mark:]
                        push(values)
                    else:
                        last, middle = pop(), pop()
                        stack[-1] = (stack[-1], middle, last)
                else:
                    pos = table[op](self, pos)
        finally:
            self.left += _LISTED * listed
            self.pos = pos

    def share(self, value: object) -> None:
        """Record a container that is used again: only these can make a result larger than its pickle."""
        if value is _UNSET:
            raise FormatError("the pickle uses a memo entry that it never set")
        self.shared.add(id(value))

    def put(self, index: int) -> None:
        """Store the top of the stack in the memo."""
        memo = self.memo
        if index == len(memo):
            memo.append(self.stack[-1])
        elif index < len(memo):
            memo[index] = self.stack[-1]
        elif index <= len(self.data):
            memo.extend([_UNSET] * (index - len(memo)))
            memo.append(self.stack[-1])
        else:
            raise _over("memo entries", len(self.data))

    def get(self, index: int) -> None:
        """Push a value from the memo."""
        if not 0 <= index < len(self.memo):
            raise FormatError("the pickle uses a memo entry that it never set")
        value = self.memo[index]
        if value.__class__ not in self.atoms:
            self.share(value)
        self.stack.append(value)

    def take(self, pos: int, length: int) -> bytes:
        """Return `length` bytes at `pos`."""
        if length < 0 or length > len(self.data) - pos:
            raise _ends_early(self, pos + length)
        return self.data[pos : pos + length]

    def line(self, pos: int) -> tuple[bytes, int]:
        """Return the line at `pos`, and the offset after its end."""
        end = self.data.find(b"\n", pos)
        if end < 0:
            raise _ends_early(self)
        return self.data[pos:end], end + 1

    def above_mark(self) -> list[Any]:
        """Pop the last mark and the values above it; return the values."""
        if not self.marks:
            raise FormatError("the pickle collects values without a mark")
        mark = self.marks.pop()
        items = self.stack[mark:]
        del self.stack[mark:]
        return items

    def spend(self, nbytes: int) -> None:
        """Subtract a cost from the budget; the most frequent callers do this inline."""
        self.left -= nbytes
        if self.left < 0:
            raise self.budget.exceeded()

    def resolve(self, module: str, name: str) -> None:
        """Push a global's stub."""
        found = ALLOWED.find(module, name)
        if found is None:
            self.spend(_NAME)
            found = make_unlisted(module, name)
        self.stack.append(found)

    def call(self, what: object, args: object) -> object:
        """Return the stub for an allowed call."""
        if type(what) is not Global:
            raise UnsafeError(f"the pickle calls {_describe(what)}", expected="a listed class", fix=NEVER_RUN)
        if type(args) is not tuple:
            raise FormatError(f"the pickle calls {what.name} without a tuple of arguments")
        if what.call is None:
            raise UnsafeError(f"the pickle calls {what.name}, which it may only name", fix=NEVER_RUN)
        self.left -= _CALL
        if self.left < 0:
            raise self.budget.exceeded()
        if what.copied and args:
            self.check_copies(what, args)
        return what.call(what, args)

    def check_copies(self, what: Global, args: tuple[object, ...]) -> None:
        """Charge the cost of copied arguments, and check the keys that a call hashes."""
        self.spend(what.copied * (len(args) + sum(len(a) for a in args if isinstance(a, self.sized))))
        if what.hashed is not None:
            self.keys.check_all(what.hashed(args))


def _describe(value: object) -> str:
    return value.name if isinstance(value, Global | InstanceStub) else f"a value of type {type(value).__name__}"


class _Extent(NamedTuple):
    """A container's size with its content."""

    values: int  # counts values as often as they are used, and each character of a long text
    depth: int


class _Shape:
    """Limits a result's depth and size, so that callers can recurse through it."""

    __slots__ = ("budget", "depth", "has_long_text", "known", "most", "shared", "spend", "texts")

    def __init__(self, depth: int, most: int, machine: PickleMachine) -> None:
        self.depth = depth
        self.most = most
        self.shared = machine.shared
        self.has_long_text = machine.has_long_text
        self.budget = machine.budget
        self.spend = machine.spend
        self.texts = machine.texts
        # Only for containers that are used twice: no others can contain themselves or make the result larger than the
        # pickle. All others are visited once, level by level.
        self.known: dict[int, _Extent | None] = {}

    def measure(self, value: object, level: int) -> _Extent:
        """Return a container's extent at depth `level`."""
        count, depth, deepest = 0, 0, 0
        found, shared = [value], self.shared
        while found:
            if level + depth > self.depth:
                raise _over("containers in one another", self.depth)
            depth += 1
            children = _children(found)
            count += len(children)
            if self.has_long_text:
                count += sum(len(child) for child in children if isinstance(child, self.texts))
            found = []
            for child in children:
                if child.__class__ in _CONTAINERS:
                    if id(child) in shared:
                        inner = self.measure_shared(child, level + depth)
                        count += inner.values
                        deepest = max(deepest, depth + inner.depth)
                    else:
                        found.append(child)
            if count > self.most:
                raise self.budget.exceeded()
        return _Extent(count, max(depth, deepest))

    def measure_shared(self, value: object, level: int) -> _Extent:
        """Return the extent of a container that is used repeatedly; measure it once."""
        key = id(value)
        if key not in self.known:
            self.known[key] = None
            self.known[key] = self.measure(value, level)
        extent = self.known[key]
        if extent is None and type(value) is InstanceStub:
            self.empty(value)
            return _Extent(0, 0)
        if extent is None:
            raise UnsafeError("the pickle holds a container that contains itself")
        if level + extent.depth - 1 > self.depth:
            raise _over("containers in one another", self.depth)
        return extent

    def empty(self, stub: InstanceStub) -> None:
        """Empty an instance that contains itself, up to one tensor, so that callers can recurse."""
        seen: dict[int, object] = {}
        found: list[object] = [stub]
        tensor: TensorStub | None = None
        while found and tensor is None:
            children = _children(found)
            self.spend(_SHARED * len(children))
            tensor = next((child for child in children if type(child) is TensorStub), None)
            new = {id(child): child for child in children if child.__class__ in _CONTAINERS and id(child) not in seen}
            seen |= new
            found = list(new.values())
        stub.args, stub.state, stub.items = (), None, None if tensor is None else [tensor]


_CONTAINERS = frozenset({tuple, list, dict, Ordered, set, frozenset, InstanceStub})


def _children(containers: list[Any]) -> list[object]:
    """Return the content of containers, one level deep."""
    children: list[object] = []
    for container in containers:
        kind = container.__class__
        if kind is InstanceStub:
            if container.args:
                children.append(container.args)
            children.append(container.state)
            if container.items:
                children.append(container.items)
        else:
            children.extend(container)
            if kind is dict or kind is Ordered:
                children.extend(container.values())
                if kind is Ordered:
                    children.append(container.attributes)
    return children


_Step = Callable[[PickleMachine, int], int]


def _unknown(machine: PickleMachine, pos: int) -> int:
    raise FormatError("the pickle has an unknown opcode", found=f"0x{machine.data[pos - 1]:02x}")


def _extension(machine: PickleMachine, pos: int) -> int:
    raise UnsafeError(
        "the pickle uses the copyreg extension registry", found=f"opcode 0x{machine.data[pos - 1]:02x}", fix=NEVER_RUN
    )


def _protocol(machine: PickleMachine, pos: int) -> int:
    if machine.data[pos] > 5:
        raise FormatError("the pickle has an unknown protocol", found=machine.data[pos], expected="0 to 5")
    return pos + 1


def _frame(machine: PickleMachine, pos: int) -> int:
    (length,) = unpack_from("<Q", machine.data, pos)
    machine.frames_end = max(machine.frames_end, pos + 8 + length)  # reading continues up to where the data ends
    return pos + 8


def _constant(value: object) -> _Step:
    def step(machine: PickleMachine, pos: int) -> int:
        machine.stack.append(value)
        return pos

    return step


def _packed(form: str, size: int) -> _Step:
    def step(machine: PickleMachine, pos: int) -> int:
        machine.stack.append(unpack_from(form, machine.data, pos)[0])
        return pos + size

    return step


def _sized(form: str, size: int, decode: Callable[[bytes], object]) -> _Step:
    """Return a step that pushes a value stored as its length and its bytes."""

    def step(machine: PickleMachine, pos: int) -> int:
        (length,) = unpack_from(form, machine.data, pos)
        pos += size
        if length >= _LONG_TEXT:
            machine.has_long_text = True
        machine.stack.append(decode(machine.take(pos, length)))
        return pos + int(length)

    return step


def _unicode(machine: PickleMachine, pos: int) -> int:
    (length,) = _FOUR_BYTES(machine.data, pos)
    pos += 4
    end: int = pos + length
    if end > len(machine.data):
        raise _ends_early(machine, end)
    if length >= _LONG_TEXT:
        machine.has_long_text = True
    machine.stack.append(machine.data[pos:end].decode("utf-8", "surrogatepass"))
    return end


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")


def _old_text(raw: bytes) -> str | bytes:
    """Decode a Python 2 string, which may be any bytes."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw


def _short_text(machine: PickleMachine, pos: int) -> int:
    end = pos + 1 + machine.data[pos]
    if end > len(machine.data):
        raise _ends_early(machine, end)
    machine.stack.append(machine.data[pos + 1 : end].decode("utf-8", "surrogatepass"))
    return end


def _long(form: str, size: int) -> _Step:
    def step(machine: PickleMachine, pos: int) -> int:
        (length,) = unpack_from(form, machine.data, pos)
        if length > machine.limits.int_bytes:
            raise _over("bytes of an integer", machine.limits.int_bytes)
        pos += size
        machine.stack.append(int.from_bytes(machine.take(pos, length), "little", signed=True))
        return pos + int(length)

    return step


def _text_number(convert: Callable[[bytes], object]) -> _Step:
    def step(machine: PickleMachine, pos: int) -> int:
        line, pos = machine.line(pos)
        if len(line) > machine.limits.int_bytes:
            raise _over("digits of a number", machine.limits.int_bytes)
        machine.stack.append(convert(line))
        return pos

    return step


def _text_int(line: bytes) -> object:
    return {b"00": False, b"01": True}.get(line, int(line))


def _text_long(line: bytes) -> int:
    return int(line.removesuffix(b"L"))


def _text_string(machine: PickleMachine, pos: int) -> int:
    line, pos = machine.line(pos)
    line = line.strip()
    if len(line) < 2 or line[:1] not in b"'\"" or line[:1] != line[-1:]:
        raise FormatError("the pickle has a string without quotes")
    machine.stack.append(_old_text(codecs.escape_decode(line[1:-1])[0]))
    return pos


def _text_unicode(machine: PickleMachine, pos: int) -> int:
    line, pos = machine.line(pos)
    machine.stack.append(line.decode("raw-unicode-escape"))
    return pos


def _pop(machine: PickleMachine, pos: int) -> int:
    if machine.marks and machine.marks[-1] == len(machine.stack):
        machine.marks.pop()
    else:
        machine.stack.pop()
    return pos


def _duplicate(machine: PickleMachine, pos: int) -> int:
    value = machine.stack[-1]
    machine.share(value)
    machine.stack.append(value)
    return pos


def _pop_mark(machine: PickleMachine, pos: int) -> int:
    machine.above_mark()
    return pos


def _short_put(machine: PickleMachine, pos: int) -> int:
    machine.put(machine.data[pos])
    return pos + 1


def _text_get(machine: PickleMachine, pos: int) -> int:
    line, pos = machine.line(pos)
    machine.get(int(line[:20]))
    return pos


def _text_put(machine: PickleMachine, pos: int) -> int:
    line, pos = machine.line(pos)
    index = int(line[:20])
    if index < 0:
        raise FormatError("the pickle has a negative memo index")
    machine.put(index)
    return pos


def _two_bytes(machine: PickleMachine, pos: int) -> int:
    machine.stack.append(_TWO_BYTES(machine.data, pos)[0])
    return pos + 2


def _empty_dict(machine: PickleMachine, pos: int) -> int:
    machine.left -= _DICT
    if machine.left < 0:
        raise machine.budget.exceeded()
    machine.stack.append({})
    return pos


def _empty_list(machine: PickleMachine, pos: int) -> int:
    machine.left -= _LIST
    if machine.left < 0:
        raise machine.budget.exceeded()
    machine.stack.append([])
    return pos


def _empty_set(machine: PickleMachine, pos: int) -> int:
    machine.spend(_SET)
    machine.stack.append(set())
    return pos


def _empty_tuple(machine: PickleMachine, pos: int) -> int:
    """Push an empty tuple, or create the instance directly if NEWOBJ follows, as it mostly does."""
    stack = machine.stack
    if machine.data[pos] != 0x81:
        stack.append(())
        return pos
    kind = stack[-1]
    if kind.__class__ is Global and kind.call is make_stub:
        machine.left -= _LIST
        if machine.left < 0:
            raise machine.budget.exceeded()
        stack[-1] = InstanceStub(kind.name)
    else:
        stack[-1] = machine.call(kind, ())
    return pos + 1


def _list(machine: PickleMachine, pos: int) -> int:
    machine.spend(_LIST)
    machine.stack.append(machine.above_mark())
    return pos


def _no_dict(target: object) -> UnsafeError:
    return UnsafeError(f"the pickle sets items in {_describe(target)}", expected="a dict", fix=NEVER_RUN)


def _dict(machine: PickleMachine, pos: int) -> int:
    items = machine.above_mark()
    made: dict[object, object] = {}
    machine.spend(_DICT + _ITEM * (len(items) // 2))
    if len(items) % 2:
        raise FormatError("the pickle has a key without a value")
    for key, value in zip(items[::2], items[1::2], strict=True):
        machine.keys.check(key, made)
        made[key] = value
    machine.stack.append(made)
    return pos


def _set_item(machine: PickleMachine, pos: int) -> int:
    stack = machine.stack
    value, key = stack.pop(), stack.pop()
    target = stack[-1]
    if type(target) is InstanceStub:
        _add_to_stub(machine, target, [key, value])
        return pos
    if not isinstance(target, dict):
        raise _no_dict(target)
    machine.left -= _ITEM
    if machine.left < 0:
        raise machine.budget.exceeded()
    if key.__class__ not in PLAIN_KEYS:
        machine.keys.check(key, target)
    target[key] = value
    return pos


def _set_items(machine: PickleMachine, pos: int) -> int:
    stack = machine.stack
    mark = machine.marks.pop()
    target = stack[mark - 1] if mark else None
    if type(target) is InstanceStub:
        _add_to_stub(machine, target, stack[mark:])
        del stack[mark:]
        return pos
    if not isinstance(target, dict):
        raise _no_dict(target)
    machine.left -= _ITEM * (len(stack) - mark) // 2
    if machine.left < 0:
        raise machine.budget.exceeded()
    for i in range(mark, len(stack), 2):
        key = stack[i]
        if key.__class__ not in PLAIN_KEYS:
            machine.keys.check(key, target)
        target[key] = stack[i + 1]
    del stack[mark:]
    return pos


def _add_to_stub(machine: PickleMachine, target: InstanceStub, items: list[object]) -> None:
    """Keep the items of an instance whose class extends a container."""
    if target.items is None:
        machine.spend(_LIST)
        target.items = []
    target.items += items


def _append_items(machine: PickleMachine, items: list[object]) -> None:
    target = machine.stack[-1]
    if type(target) is InstanceStub:
        _add_to_stub(machine, target, items)
        return
    if type(target) is not list:
        raise UnsafeError(f"the pickle appends to {_describe(target)}", expected="a list", fix=NEVER_RUN)
    target.extend(items)


def _append(machine: PickleMachine, pos: int) -> int:
    _append_items(machine, [machine.stack.pop()])
    return pos


def _appends(machine: PickleMachine, pos: int) -> int:
    _append_items(machine, machine.above_mark())
    return pos


def _add_items(machine: PickleMachine, pos: int) -> int:
    items = machine.above_mark()
    target = machine.stack[-1]
    if type(target) is InstanceStub:
        _add_to_stub(machine, target, items)
        return pos
    if type(target) is not set:
        raise UnsafeError(f"the pickle adds to {_describe(target)}", expected="a set", fix=NEVER_RUN)
    machine.spend(_ITEM * len(items))
    for item in items:
        machine.keys.check(item, target)
        target.add(item)
    return pos


def _frozen_set(machine: PickleMachine, pos: int) -> int:
    items = machine.above_mark()
    machine.spend(_SET + _ITEM * len(items))
    machine.keys.check_all(items)
    machine.stack.append(frozenset(items))
    return pos


def _global(machine: PickleMachine, pos: int) -> int:
    module, pos = machine.line(pos)
    name, pos = machine.line(pos)
    machine.resolve(_text(module), _text(name))
    return pos


def _stack_global(machine: PickleMachine, pos: int) -> int:
    name, module = machine.stack.pop(), machine.stack.pop()
    if type(name) is not str or type(module) is not str:
        raise FormatError("the pickle names a global with a value that is not text")
    machine.resolve(module, name)
    return pos


def _reduce(machine: PickleMachine, pos: int) -> int:
    stack = machine.stack
    args = stack.pop()
    kind = stack[-1]
    if kind.__class__ is Global and kind.call is make_size and args.__class__ is tuple:
        stack[-1] = make_size(kind, args)  # a size is not counted as a separate container
    else:
        stack[-1] = machine.call(kind, args)
    return pos


def _new_object_ex(machine: PickleMachine, pos: int) -> int:
    stack = machine.stack
    keywords, args = stack.pop(), stack.pop()
    made = machine.call(stack[-1], args)
    if type(made) is not InstanceStub or type(keywords) is not dict:
        raise FormatError(f"the pickle constructs {_describe(stack[-1])} with keywords")
    machine.spend(_TUPLE + 8 * len(made.args))
    made.args = (*made.args, keywords)
    stack[-1] = made
    return pos


def _instance(machine: PickleMachine, pos: int) -> int:
    pos = _global(machine, pos)
    kind = machine.stack.pop()
    machine.stack.append(machine.call(kind, tuple(machine.above_mark())))
    return pos


def _object(machine: PickleMachine, pos: int) -> int:
    items = machine.above_mark()
    if not items:
        raise FormatError("the pickle constructs an object without a class")
    machine.stack.append(machine.call(items[0], tuple(items[1:])))
    return pos


def _build(machine: PickleMachine, pos: int) -> int:
    state = machine.stack.pop()
    target = machine.stack[-1]
    if type(target) is InstanceStub:
        target.state = state
    elif type(target) is Ordered:
        target.attributes = state
    else:
        raise UnsafeError(f"the pickle sets the state of {_describe(target)}", expected="a listed class", fix=NEVER_RUN)
    return pos


def _persistent(machine: PickleMachine, key: object) -> None:
    if machine.persistent is None:
        raise FormatError("the pickle refers to data outside itself", found=key)
    machine.left -= _CALL
    if machine.left < 0:
        raise machine.budget.exceeded()
    machine.stack.append(machine.persistent(key))


def _text_persistent(machine: PickleMachine, pos: int) -> int:
    line, pos = machine.line(pos)
    _persistent(machine, _text(line))
    return pos


def _binary_persistent(machine: PickleMachine, pos: int) -> int:
    _persistent(machine, machine.stack.pop())
    return pos


# The opcodes that `_loop` handles itself are missing here.
_STEPS: dict[bytes, _Step] = {
    b"0": _pop,
    b"1": _pop_mark,
    b"2": _duplicate,
    b"B": _sized("<I", 4, bytes),
    b"C": _sized("<B", 1, bytes),
    b"F": _text_number(float),
    b"G": _packed(">d", 8),
    b"I": _text_number(_text_int),
    b"J": _packed("<i", 4),
    b"L": _text_number(_text_long),
    b"N": _constant(None),
    b"P": _text_persistent,
    b"Q": _binary_persistent,
    b"S": _text_string,
    b"T": _sized("<i", 4, _old_text),
    b"U": _sized("<B", 1, _old_text),
    b"M": _two_bytes,
    b"R": _reduce,
    b"V": _text_unicode,
    b"X": _unicode,
    b")": _empty_tuple,
    b"]": _empty_list,
    b"}": _empty_dict,
    b"a": _append,
    b"b": _build,
    b"c": _global,
    b"d": _dict,
    b"e": _appends,
    b"g": _text_get,
    b"i": _instance,
    b"l": _list,
    b"o": _object,
    b"p": _text_put,
    b"q": _short_put,
    b"s": _set_item,
    b"u": _set_items,
    b"\x80": _protocol,
    b"\x81": _reduce,
    b"\x82": _extension,
    b"\x83": _extension,
    b"\x84": _extension,
    b"\x88": _constant(True),
    b"\x89": _constant(False),
    b"\x8a": _long("<B", 1),
    b"\x8b": _long("<i", 4),
    b"\x8c": _short_text,
    b"\x8d": _sized("<Q", 8, _text),
    b"\x8e": _sized("<Q", 8, bytes),
    b"\x8f": _empty_set,
    b"\x90": _add_items,
    b"\x91": _frozen_set,
    b"\x92": _new_object_ex,
    b"\x93": _stack_global,
    b"\x95": _frame,
    b"\x96": _sized("<Q", 8, bytes),
}
PickleMachine.table = [_STEPS.get(bytes([code]), _unknown) for code in range(256)]
