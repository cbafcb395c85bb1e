"""Convert a torch pickle's object to arrays and values by path."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple, Protocol

from shardckpt.boxes import Shape, full_box, strides
from shardckpt.dtypes import bits, is_known
from shardckpt.encodings.budget import ReadBudget
from shardckpt.encodings.pickle_reader import Dtype, Global, InstanceStub, Ordered, StorageType, TensorStub
from shardckpt.encodings.zip_archive import ZipEntry
from shardckpt.errors import FormatError, UnsupportedError, escape
from shardckpt.manifest import Lazy, ObjectEntry, Path, Piece, TensorEntry, dotted
from shardckpt.readers.torchsave.dtensor_spec import DTENSOR, SHARDED_TENSOR, ShardInfo, ShardParser
from shardckpt.readers.torchsave.storages import LEAVE_OUT, MAX_ELEMENTS, StorageRef, UnreadableTensor

_TENSOR_LIKE = {
    "torch._utils._rebuild_qtensor": "a quantised tensor",
    "torch._utils._rebuild_sparse_tensor": "a sparse tensor",
    "torch._utils._rebuild_nested_tensor": "a nested tensor",
    "torch.nested._internal.nested_tensor._rebuild_njt": "a nested tensor",
    "torch._utils._rebuild_meta_tensor_no_storage": "a meta tensor, which has no data",
    "torch._utils._rebuild_device_tensor_from_numpy": "a tensor that was pickled through numpy",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": "a tensor on an accelerator outside torch",
    "torch.storage._load_from_bytes": "a tensor that was pickled without torch.save",
}
# Key under which `shardckpt.state` stores a state's metadata, and the kind of rank states.
_NOTE, _LOCAL = "shardckpt", "LOCAL"

_KEY_CHARACTERS = 4  # characters that a numeric key adds to a path

_SHARDED = (f".{DTENSOR}", f".{SHARDED_TENSOR}")
_NO_STORAGE = "a tensor whose storage is not in the file"
_UNNAMED = "value whose key only its own library can read"
_SAVE_PLAIN = "Leave it out with --exclude, or save its state dict or its values instead."


class View(NamedTuple):
    """A tensor's layout in its storage."""

    start: int  # elements from the start of the storage
    strides: Shape | None  # elements between neighbors in each dimension; None for contiguous row-major
    width: int  # bytes per element


class ZipView(NamedTuple):
    """Details of a `Lazy` layout in a zip container: storage entry and view."""

    entry: ZipEntry
    view: View

    def content_key(self) -> Hashable:
        """Return the storage's checksum and size, and the view; None without a checksum."""
        return (self.entry.crc32, self.entry.size, self.view) if self.entry.crc32 else None

    def full_checksum(self, size: int) -> int | None:
        """Return the storage's checksum if the view covers all of it."""
        is_full = not self.view.start and self.view.strides is None and self.entry.size == size
        return self.entry.crc32 or None if is_full else None


class LegacyView(NamedTuple):
    """Details of a `Lazy` layout in a legacy container."""

    elements: int  # expected element count, in the 8 bytes before the storage
    nbytes: int
    view: View


def slice_layout(layout: Lazy, first: int, size: Shape, order: Sequence[int] = ()) -> Lazy:
    """Return the layout of a box in a 1-D tensor, from element `first`. An unreadable tensor keeps its layout."""
    detail = layout.detail
    if not isinstance(detail, ZipView | LegacyView):
        return layout
    view = detail.view
    step = view.strides[0] if view.strides else 1
    steps: Shape | None = None
    if order and prod(size) > 1:
        inner = dict(zip(order, strides(tuple(size[dim] for dim in order)), strict=True))
        steps = tuple(inner[dim] * step for dim in range(len(order)))
    elif view.strides is not None:
        steps = tuple(n * step for n in strides(size))
    return layout._replace(detail=detail._replace(view=View(view.start + first * step, steps, view.width)))


class RankNote(NamedTuple):
    """Metadata of a LOCAL state from `shardckpt.state`: its rank and its layout."""

    file: str  # relative to the store
    prefix: Path
    root: Path  # the state's full path
    fields: Mapping[object, object]  # unchecked


class Container(Protocol):
    """Storages in a torch file."""

    def storage_bytes(self, ref: StorageRef) -> int:
        """Return a storage's bytes. Raises FormatError."""

    def layout(self, ref: StorageRef, view: View) -> Lazy:
        """Return a view's layout, as far as it is known without reading."""


@dataclass(slots=True)
class StateTree:
    """Tensors and values from one or several files, by path."""

    tensors: dict[Path, TensorEntry] = field(default_factory=dict)  # in saved order
    objects: dict[Path, ObjectEntry] = field(default_factory=dict)
    aliases: dict[Path, Path] = field(default_factory=dict)  # tied array to the first one with the same elements
    warnings: list[str] = field(default_factory=list)  # one sentence each
    notes: list[RankNote] = field(default_factory=list)
    shards: dict[Path, ShardInfo] = field(default_factory=dict)  # without their elements

    def add(
        self, value: object, file: str, prefix: Path, container: Container | None, where: str, budget: ReadBudget
    ) -> None:
        """Add one file's object."""
        if not isinstance(value, dict | list | tuple):
            prefix = (*prefix, "tensor" if _is_tensor(value) else "object")
        self.notes += [RankNote(file, prefix, root, fields) for root, fields in _local_states(value, prefix)]
        _TreeBuilder(self, file, container, where, budget).visit(value, prefix, sum(len(str(key)) for key in prefix))


class _TreeBuilder:
    """Adds one file's object to a `StateTree`."""

    def __init__(self, tree: StateTree, file: str, container: Container | None, where: str, budget: ReadBudget) -> None:
        self._tree, self._file, self._container, self._where = tree, file, container, where
        self._budget = budget
        self._holding: dict[int, bool] = {}
        self._hidden: list[InstanceStub] = []  # kept, since `_holding` has their ids
        self._first: dict[tuple[object, ...], Path] = {}
        self._shards = ShardParser()

    def visit(self, value: object, path: Path, length: int) -> None:
        """Add a value and its content under a path with `length` characters."""
        # The recursion ends: the pickle reader has limited the depth. Path characters count for each value, since a
        # hostile file may have one long key and many values below it.
        if _is_tensor(value) or (isinstance(value, InstanceStub) and self._holds_tensor(value)):
            self._budget.spend_tensor(length)
            self._put_tensor(value, path)
        elif isinstance(value, dict) and value:
            for key, inner in self._named(value, path):
                self.visit(inner, (*path, key), length + (len(key) if isinstance(key, str) else _KEY_CHARACTERS))
        elif isinstance(value, list | tuple) and self._holds_tensor(value):
            for i, inner in enumerate(value):
                self.visit(inner, (*path, i), length + _KEY_CHARACTERS)
        else:
            self._budget.spend_entry(length)
            self._tree.objects[path] = ObjectEntry(path, value)

    def _holds_tensor(self, value: object) -> bool:
        """Return True if a value contains a tensor, at any depth. Each container is searched once."""
        if _is_tensor(value) or not isinstance(value, dict | list | tuple | InstanceStub):
            return _is_tensor(value)
        known = self._holding.get(id(value))
        if known is None:
            if isinstance(value, InstanceStub):
                inner: Iterable[object] = value.parts
            else:
                inner = value.values() if isinstance(value, dict) else value
            known = self._holding[id(value)] = any(map(self._holds_tensor, inner))
        return known

    def _named(self, value: dict[object, object], path: Path) -> Iterator[tuple[str | int, object]]:
        """Yield a dict's items, each with the path part for its key."""
        seen: set[str | int] = set()
        for key, inner in value.items():
            name = key if type(key) is str or type(key) is int else _spell_key(key)
            if _holds_instance(key):  # such as an enum member: it has no known name, so its value cannot be read
                name = f"{name} {len(seen)}" if name in seen else name
                inner = InstanceStub(_UNNAMED, items=[inner])
                self._hidden.append(inner)
            if name in seen:
                raise FormatError(
                    f"two keys in {dotted(path)!r} are spelt alike", where=self._where, found=f"{escape(name)!r}"
                )
            seen.add(name)
            yield name, inner

    def _put_tensor(self, value: object, path: Path) -> None:
        if isinstance(value, StorageRef):
            value = TensorStub(value, 0, (value.count,), (1,), value.dtype)
        if isinstance(value, TensorStub):
            kind = _refusal(value) if self._container else _NO_STORAGE
            shape, dtype = value.shape, value.dtype or _storage_dtype(value)
            fix, is_value = LEAVE_OUT, False
        else:
            assert isinstance(value, InstanceStub)
            if _is_sharded(value.name):
                self._put_shard(value, path)
                return
            kind = _TENSOR_LIKE.get(value.name, f"a {value.name}")
            is_value = not _is_tensor(value)
            fix = _SAVE_PLAIN if is_value else LEAVE_OUT
            shape, dtype = _read_declared(value)
        if prod(shape) > MAX_ELEMENTS:
            raise FormatError(
                f"{dotted(path)!r} has more elements than any machine holds", where=self._where, found=shape
            )
        if kind or not isinstance(value, TensorStub):
            self._tree.warnings.append(f"{dotted(path)} is {kind} and cannot be read")
            layout = Lazy(0, 0, UnreadableTensor(path, kind, fix, is_value))
            dtype = dtype if is_known(dtype) else "uint8"
        else:
            layout = self._layout(value, dtype, path)
        self._tree.tensors[path] = TensorEntry(path, shape, dtype, (Piece(full_box(shape), self._file, layout),))

    def _layout(self, stub: TensorStub, dtype: str, path: Path) -> Lazy:
        ref = stub.storage
        assert isinstance(ref, StorageRef) and self._container is not None
        width, numel, last = bits(dtype) // 8, prod(stub.shape), stub.offset
        for n, step in zip(stub.shape, stub.strides, strict=True):
            last += (n - 1) * step
        held = self._container.storage_bytes(ref) // width
        if numel and last >= held:
            raise FormatError(
                f"{dotted(path)!r} reaches beyond its storage",
                where=self._where,
                found=f"element {last}",
                expected=f"fewer than {held}",
                fix="The file was damaged or made by hand; save the checkpoint again.",
            )
        steps = (
            None
            if not numel or _is_packed(stub.shape, stub.strides)
            else tuple(0 if n == 1 else s for n, s in zip(stub.shape, stub.strides, strict=True))
        )
        if numel:  # steps, not strides: strides of dimensions of size 1 can be chosen to collide
            first = self._first.setdefault((ref.key, ref.base, stub.offset, stub.shape, steps, dtype), path)
            if first != path:
                self._tree.aliases[path] = first
        return self._container.layout(ref, View(ref.base + stub.offset, steps, width))

    def _put_shard(self, value: InstanceStub, path: Path) -> None:
        """Add one rank's shard of an array: its boxes in this file, and its layout."""
        try:
            shard, local = self._shards.parse(value)
        except (FormatError, UnsupportedError) as error:
            what = f"{dotted(path)!r} is one rank's shard of an array, and {error.what}"
            raise type(error)(
                what, where=self._where, found=error.found, expected=error.expected, fix=error.fix
            ) from None
        kinds = [_refusal(stub) if self._container else _NO_STORAGE for _, stub in local]
        kind = shard.refusal or next(filter(None, kinds), "")
        stored = {stub.dtype or _storage_dtype(stub) for _, stub in local}
        if shard.dtype:
            stored.add(shard.dtype)
        if kind:
            self._tree.warnings.append(f"{dotted(path)} is {kind} and cannot be read")
            lost = Piece(full_box(shard.shape), self._file, Lazy(0, 0, UnreadableTensor(path, kind)))
            dtype = shard.dtype if is_known(shard.dtype) else "uint8"
            self._tree.tensors[path] = TensorEntry(path, shard.shape, dtype, (lost,))
            self._tree.shards[path] = replace(shard, refusal=kind)
            return
        if len(stored) != 1 or not is_known(dtype := stored.pop()) or bits(dtype) % 8:
            raise FormatError(f"{dotted(path)!r} must have one known dtype", where=self._where, found=sorted(stored))
        pieces = tuple([Piece(box, self._file, self._layout(stub, dtype, path)) for box, stub in local])
        self._tree.tensors[path] = TensorEntry(path, shard.shape, dtype, pieces)
        self._tree.shards[path] = shard


def _local_states(value: object, path: Path) -> Iterator[tuple[Path, Mapping[object, object]]]:
    """Yield the LOCAL states in nested dicts, with their metadata."""
    if not isinstance(value, dict):
        return
    attributes = value.attributes if isinstance(value, Ordered) else None
    metadata = attributes.get("_metadata") if isinstance(attributes, dict) else None
    fields = metadata.get(_NOTE) if isinstance(metadata, dict) else None
    if isinstance(fields, dict) and fields.get("kind") == _LOCAL:
        yield path, fields
        return
    for key, inner in value.items():
        if isinstance(key, str) and isinstance(inner, dict):
            yield from _local_states(inner, (*path, key))


def _is_tensor(value: object) -> bool:
    if isinstance(value, InstanceStub):
        return _is_sharded(value.name) or value.name in _TENSOR_LIKE or _wraps_tensor(value)
    return isinstance(value, TensorStub | StorageRef)


def _is_sharded(name: str) -> bool:
    return name.endswith(_SHARDED)


def _is_packed(shape: Shape, strides: Shape) -> bool:
    """Return True if strides are row-major without gaps."""
    expected = 1
    for n, step in zip(reversed(shape), reversed(strides), strict=True):
        if n != 1 and step != expected:
            return False
        expected *= n
    return True


def _wraps_tensor(value: InstanceStub) -> bool:
    """Return True for a tensor subclass from `_rebuild_from_type_v2`."""
    return len(value.args) == 1 and isinstance(value.args[0], TensorStub)


def _storage_dtype(stub: TensorStub) -> str:
    return stub.storage.dtype if isinstance(stub.storage, StorageRef) else ""


def _refusal(stub: TensorStub) -> str:
    """Return why a tensor cannot be read; empty for an ordinary tensor."""
    if not isinstance(stub.storage, StorageRef):
        return _NO_STORAGE
    if stub.bits:
        return f"a lazily changed view ({', '.join(stub.bits)} bit), whose bytes are not its values"
    dtype = stub.dtype or stub.storage.dtype
    return "" if is_known(dtype) and bits(dtype) % 8 == 0 else f"a tensor of dtype {dtype}"


def _read_declared(value: InstanceStub) -> tuple[Shape, str]:
    """Return the shape and dtype that an unreadable tensor declares, if known."""
    shape: Shape = ()
    dtype = inner = ""
    for part in _flat(value.args, 3):
        if isinstance(part, StorageRef):
            dtype = dtype or _UNQUANTISED.get(part.dtype, part.dtype)
        elif isinstance(part, Dtype):
            dtype = part.name
        elif isinstance(part, TensorStub):
            inner = part.dtype or _storage_dtype(part)
            shape = part.shape if _wraps_tensor(value) else shape
        elif isinstance(part, tuple) and not shape and _is_shape(part):
            shape = part
    return shape, dtype or inner


_UNQUANTISED = {"quint8": "uint8", "qint8": "int8", "qint32": "int32"}


def _is_shape(value: tuple[object, ...]) -> bool:
    return bool(value) and len(value) <= 64 and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _flat(values: Sequence[object], depth: int) -> Iterator[object]:
    for value in values:
        yield value
        if isinstance(value, tuple) and depth:
            yield from _flat(value, depth - 1)


def _holds_instance(key: object) -> bool:
    """Return True if a dict key is, or contains, an instance that only its own library can make."""
    return isinstance(key, InstanceStub) or (type(key) is tuple and any(map(_holds_instance, key)))


def _spell_key(key: object) -> str:
    """Return the path part for a key that is neither text nor an integer."""
    if isinstance(key, Dtype | Global | InstanceStub):
        return key.name
    if isinstance(key, tuple):
        return "(" + ", ".join(map(_spell_key, key)) + ")"
    if isinstance(key, StorageType):
        return key.dtype
    return str(key)
