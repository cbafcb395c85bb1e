"""An open checkpoint in any format, as a load's source: state tree and arrays."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any

import torch

from shardckpt.boxes import full_box
from shardckpt.checkpoint.load.tensor_loader import BATCH_BYTES, ElementReader, ReadRequest
from shardckpt.checkpoint.stateful.numpy_arrays import array_from_tensor
from shardckpt.checkpoint.stateful.stateful import from_named_value
from shardckpt.errors import NameCollisionError, NoMemoryError, UnsupportedError, UsageError
from shardckpt.manifest import Path, TensorEntry, dotted
from shardckpt.native.payload import GROUP_BYTES
from shardckpt.native.reader import NativeReader
from shardckpt.plan.layout.coverage import locate
from shardckpt.plan.naming.sections import split_flat_names
from shardckpt.plan.subclass_record import SUBCLASS, find_record
from shardckpt.reader import NamedBases, ParamShapes, Reader, missing_shapes_error
from shardckpt.readers.opened.state_tree import TensorRef, build_tree, fill_tree, find, iter_refs
from shardckpt.readers.registry import open_checkpoint
from shardckpt.readers.torchsave.storages import find_value
from shardckpt.state.local.tensor_shards import LocalShard, TensorShards, empty_in_order
from shardckpt.state.local.tensor_subclasses import build
from shardckpt.storage.store import Read, Store

KeyMap = Mapping[str, str] | None  # replacements by regular expression, for every key of a checkpoint's names
Rules = str | os.PathLike[str] | None  # TOML file of rules, or the name of a set in the package

Verify = str | bool
VERIFY = (False, "read", "full", "live")


class CheckpointSource:
    """Open checkpoint in any format."""

    def __init__(
        self,
        url: str,
        verify: Verify = "read",
        rules: Rules = None,
        key_map: KeyMap = None,
        bases: NamedBases = "",
        get_shapes: Callable[[], ParamShapes | None] = lambda: None,
    ) -> None:
        require_way_to_verify(verify)
        self._key_map = compile_key_map(key_map)
        self._reader: Reader = _with_shapes(open_checkpoint(url, bases), get_shapes)
        self._files = self._reader
        if rules is not None:
            from shardckpt.readers.remap import remap_reader  # noqa: PLC0415  (0.02 s; most loads have no rules)

            self._reader = remap_reader(self._reader, os.fspath(rules))
        self.url = url
        # A native step stores the paths of the saved state, and a name in it may look like one of an old DCP folder.
        self.manifest = self._reader.manifest if self.is_native else split_flat_names(self._reader.manifest)
        self._store = self._reader.store if verify else self._reader.unverified_store
        self._is_live = verify == "live"

    @property
    def reader(self) -> Reader:
        """The reader for the checkpoint's format."""
        return self._reader

    @property
    def is_native(self) -> bool:
        """Whether the checkpoint has the native format."""
        return isinstance(self._reader, NativeReader)

    @property
    def custom_metadata(self) -> Mapping[str, str]:
        """Texts that were saved with a step; empty for other formats."""
        return self._files.contents.about if isinstance(self._files, NativeReader) else {}

    def expect_most(self) -> None:
        """Prepare for access to most arrays: parsing all entries at once is cheaper."""
        self.manifest.tensors.values()

    def is_elsewhere(self, entry: TensorEntry) -> bool:
        """Return True if an array is stored in another folder than the checkpoint."""
        return bool(entry.pieces) and all(piece.file in self.manifest.elsewhere for piece in entry.pieces)

    def check_blocks(self, share: int = 0, shares: int = 1, *, own_only: bool = False) -> None:
        """Check all block hashes in a share of the files."""
        hashed = self._files.list_hashed_files() if isinstance(self._files, NativeReader) else []
        left_out = self.manifest.elsewhere if own_only else {}
        for name in sorted(set(hashed) - left_out.keys())[share::shares]:
            size = self.manifest.files[name]
            for start in range(0, size, BATCH_BYTES):
                self._store.read([Read(name, start, memoryview(bytearray(min(BATCH_BYTES, size - start))))])

    def rename_key(self, key: Any) -> Any:
        """Return a key after the rules and the key map."""
        if isinstance(key, str):
            for pattern, new in self._key_map:
                key = pattern.sub(new, key)
        return key

    @cached_property
    def arrays(self) -> Mapping[Path, TensorEntry]:
        """Array entries by path."""
        if not self._key_map:
            return self.manifest.tensors
        arrays: dict[Path, TensorEntry] = {}
        for path, entry in self.manifest.tensors.items():
            new = tuple(map(self.rename_key, path))
            if new in arrays:
                raise NameCollisionError(
                    "`key_map` gives two tensors one name",
                    where=dotted(new),
                    found=f"{dotted(arrays[new].path)} and {dotted(path)}",
                    fix="Make the expressions narrower.",
                )
            arrays[new] = entry
        return arrays

    @cached_property
    def paths(self) -> list[Path]:
        """Paths to arrays and other values."""
        return [*self.arrays, *map(self._renamed_path, self.manifest.objects)]

    @cached_property
    def tree(self) -> Any:
        """Saved state tree, with arrays as `TensorRef`."""
        tree = build_tree(self._reader, self.arrays, self.manifest.objects, from_named_value, self._renamed_path)
        return self._renamed_keys(tree) if self.is_native else tree

    def _renamed_path(self, path: Path) -> Path:
        return tuple(map(self.rename_key, path))

    def _renamed_keys(self, tree: Any) -> Any:
        if not self._key_map:
            return tree
        if isinstance(tree, dict):
            return type(tree)({self.rename_key(key): self._renamed_keys(value) for key, value in tree.items()})
        if type(tree) in (list, tuple):
            return type(tree)(map(self._renamed_keys, tree))
        return tree

    def find(self, path: Path) -> tuple[Any, bool]:
        """Return the saved value at a path, and whether the path exists."""
        return find(self.tree, path)

    def read_tree(self, tree: Any, skipped: list[Path] | None = None) -> Any:
        """Return a subtree with its arrays as tensors on the CPU."""
        paths = list(dict.fromkeys(at.path for at in iter_refs(tree)))
        values = {path: found for path in paths if (found := find_value(self.arrays[path]))}
        if skipped is not None and len(values) < len(paths):
            paths = [path for path in paths if path not in values]
        entries = self.locate([self.arrays[path] for path in paths])  # before memory is allocated
        tensors: dict[Path, torch.Tensor] = {}
        wanted = []
        for path, entry in zip(paths, entries, strict=True):
            tensors[path] = allocate(entry, entry.shape)
            shard = LocalShard(full_box(entry.shape), tensors[path])
            wanted.append((entry, TensorShards(entry.shape, tensors[path].dtype, (shard,))))
        self.elements.read(wanted)

        def get_array(ref: TensorRef) -> object:
            if ref.path not in tensors:
                raise values[ref.path].error(self.url)
            return array_from_tensor(tensors[ref.path]) if ref.kind == "numpy" else tensors[ref.path]

        return fill_tree(tree, get_array, skipped, _build_subclass)

    def count_bytes(self, tree: Any) -> int:
        """Return the bytes that `read_tree` reads."""
        entries = [self.arrays[path] for path in {at.path for at in iter_refs(tree)}]
        entries = [entry for entry in entries if not find_value(entry)]
        return sum(prod(entry.shape) * getattr(torch, entry.stored).itemsize for entry in entries)

    def fill(self, wanted: Sequence[ReadRequest]) -> None:
        """Read exactly this rank's elements into its shards."""
        self.elements.read(self.locate_requests(wanted))

    def locate_requests(self, wanted: Sequence[ReadRequest]) -> list[ReadRequest]:
        """Return requests with located pieces, after a check that all elements exist. Elements are not read."""
        entries = self.locate([entry for entry, _ in wanted])
        return [(entry, array) for entry, (_, array) in zip(entries, wanted, strict=True)]

    @cached_property
    def elements(self) -> ElementReader:
        """Reader for requests that `locate_requests` returned."""
        return ElementReader(self._store)

    @property
    def store(self) -> Store:
        """Store to read from; it checks hashes if `verify` is set."""
        return self._store

    @property
    def unchecked_store(self) -> Store | None:
        """Store for bytes whose hashes `verify="live"` checks in the state's memory, after the load."""
        # None if all bytes are checked when they are read: a damaged block may have other copies elsewhere.
        is_checked_later = self._is_live and self.is_native and self._store.capabilities.is_local
        return self._reader.unverified_store if is_checked_later else None

    @property
    def grain(self) -> int:
        """Fewest bytes per read: a group of blocks if hashes are checked, otherwise 1."""
        return GROUP_BYTES if self._store is not self._reader.raw_store else 1

    @cached_property
    def identity(self) -> bytes:
        """The checkpoint's identity, 16 bytes: another one under its path has another."""
        if isinstance(self._reader, NativeReader):
            content: object = self._reader.commit.manifest_sha256
        else:
            content = sorted(self.manifest.files.items())
        return hashlib.blake2b(repr(content).encode(), digest_size=16).digest()

    def locate(self, entries: Sequence[TensorEntry]) -> list[TensorEntry]:
        """Return entries with located pieces, after a check that all elements exist."""
        return locate(self._reader, self.manifest, entries)


def _build_subclass(inner: dict[Any, Any], path: Path) -> object:
    """Return a tensor from its record and inner tensors; these unchanged if its class cannot be imported."""
    tensors = {name: value for name, value in inner.items() if name != SUBCLASS}
    record = find_record(inner)
    if record is None or not all(isinstance(value, torch.Tensor) for value in tensors.values()):
        return inner
    built = build(record, tensors, dotted(path))
    return inner if built is None else built


def _with_shapes(reader: Reader, get_shapes: Callable[[], ParamShapes | None]) -> Reader:
    """Return a reader that knows its flat parameters' members: the same one if the files list them."""
    known = get_shapes() if reader.needs_param_shapes else None
    if known is not None:
        reader = reader.with_param_shapes(known)
    if reader.needs_param_shapes:
        raise missing_shapes_error(
            reader,
            "Load into the model, `load({'model': model}, path)`; or load what `shardckpt consolidate SRC DST"
            " --shapes-from MODEL --part all` writes.",
        )
    return reader


def require_way_to_verify(verify: Any) -> None:
    """Check the argument `verify`."""
    if not (isinstance(verify, bool) or (isinstance(verify, str) and verify in VERIFY)):
        raise UsageError("`verify` must be False, 'read', 'full' or 'live'", found=repr(verify))


def compile_key_map(key_map: Any) -> list[tuple[re.Pattern[str], str]]:
    """Return compiled regular expressions with their replacements."""
    if key_map is not None and not isinstance(key_map, Mapping):
        expected = "a dict from regular expressions to their replacements"
        raise UsageError("`key_map` must be a dict", found=key_map, expected=expected, fix="Pass a file as `rules`.")
    patterns = []
    for pattern, new in (key_map or {}).items():
        shown = f"{pattern!r}: {new!r}"
        if not (isinstance(pattern, str) and isinstance(new, str)):
            raise UsageError("a key map must have two strings for each rule", where="key_map", found=shown)
        try:
            compiled = re.compile(pattern)
            compiled.sub(new, "")  # the replacement may refer to a group that does not exist
        except (re.error, IndexError) as error:
            raise UsageError(f"invalid regular expression: {error}", where="key_map", found=shown) from error
        patterns.append((compiled, new))
    return patterns


def require_rules(rules: Any) -> None:
    """Raise UsageError unless rules are a path, a set's name, or None."""
    if rules is not None and not isinstance(rules, (str, os.PathLike)):
        raise UsageError("`rules` must be a file with rules", found=rules, fix="Pass a dict as `key_map`.")


def allocate(entry: TensorEntry, size: Sequence[int]) -> torch.Tensor:
    """Return an uninitialized CPU tensor for array elements."""
    dtype = torch_dtype(entry)
    try:
        return empty_in_order(tuple(size), entry.order, dtype)
    except (RuntimeError, MemoryError) as error:
        fix = "Load it into a sharded model, or a part of it with shardckpt.open(path)[name][rows]."
        nbytes = prod(size) * dtype.itemsize
        raise NoMemoryError.from_array(dotted(entry.path), nbytes, entry.dtype, size, fix) from error


def torch_dtype(entry: TensorEntry) -> torch.dtype:
    """Return an array's torch dtype."""
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedError("torch has no such type", where=dotted(entry.path), found=entry.dtype)
    return dtype
