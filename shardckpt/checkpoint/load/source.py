"""An open checkpoint as a load reads it: its state tree, whatever the format, and where its arrays are."""

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
from shardckpt.checkpoint.stateful.stateful import from_named_value
from shardckpt.errors import NameCollisionError, NoMemoryError, UnsupportedError, UsageError
from shardckpt.format.native.payload import BLOCK_BYTES
from shardckpt.format.native.reader import NativeReader
from shardckpt.format.opened.state_tree import TensorRef, build_tree, fill_tree, find, iter_refs
from shardckpt.format.reader import NamedBases, ParamShapes, Reader
from shardckpt.format.registry import open_checkpoint
from shardckpt.format.remap import remap_reader
from shardckpt.manifest import Path, TensorEntry, dotted
from shardckpt.plan.layout.coverage import locate
from shardckpt.plan.naming.sections import split_flat_names
from shardckpt.state.local.local_shards import LocalShard, TensorShards
from shardckpt.storage.store import Read, Store

KeyMap = Mapping[str, str] | None
"""Regular expressions to their replacements, for every key of the names of a checkpoint."""

Rules = str | os.PathLike[str] | None
"""A TOML file of rules, or the name of a set that comes with the package."""

Verify = str | bool
VERIFY = (False, "read", "full")


class CheckpointSource:
    """A checkpoint that is open.

    Args:
        url: Its path or URL.
        verify: Which blocks are checked against their hashes: none, those that are read, or all of them at once.
        rules: A file of rules.
        key_map: Regular expressions to their replacements, for every key of every path, after the rules.
        bases: Folders that the caller names of those that it refers to.
        get_shapes: Returns the parameters of flat parameters, where known; called where no file has them.

    Raises:
        SourceNotFoundError: Nothing is stored there.
        CheckpointError: It cannot be read, or is damaged.
        UsageError: An unknown way to verify; it refers to no folder that could have been moved; flat parameters of
            which no file lists the members.
    """

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
            self._reader = remap_reader(self._reader, os.fspath(rules))
        self.url = url
        self.manifest = split_flat_names(self._reader.manifest)
        self._store = self._reader.store if verify else self._reader.unverified_store

    @property
    def reader(self) -> Reader:
        """The reader of its format."""
        return self._reader

    @property
    def is_native(self) -> bool:
        """Whether it is in the native format."""
        return isinstance(self._reader, NativeReader)

    def expect_most(self) -> None:
        """Say that most arrays will be asked for: they are described in one go, which is cheaper than one by one."""
        self.manifest.tensors.values()

    def is_elsewhere(self, entry: TensorEntry) -> bool:
        """Return True if an array is stored in other folders than the checkpoint."""
        return bool(entry.pieces) and all(piece.file in self.manifest.elsewhere for piece in entry.pieces)

    def check_blocks(self, share: int = 0, shares: int = 1, *, own_only: bool = False) -> None:
        """Hash every block of this share of the files.

        Args:
            share: Which, from 0.
            shares: How many there are.
            own_only: Skip files in other folders.

        Raises:
            ChecksumError: A block is not what was saved.
        """
        hashed = self._files.block_hashes() if isinstance(self._files, NativeReader) else {}
        left_out = self.manifest.elsewhere if own_only else {}
        for name in sorted(hashed.keys() - left_out.keys())[share::shares]:
            size = self.manifest.files[name]
            for start in range(0, size, BATCH_BYTES):
                self._store.read([Read(name, start, memoryview(bytearray(min(BATCH_BYTES, size - start))))])

    def rename_key(self, key: Any) -> Any:
        """Return a key as the rules have it."""
        if isinstance(key, str):
            for pattern, new in self._key_map:
                key = pattern.sub(new, key)
        return key

    @cached_property
    def arrays(self) -> Mapping[Path, TensorEntry]:
        """The arrays, by path."""
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
        """Where arrays and other values are."""
        return [*self.arrays, *map(self._renamed_path, self.manifest.objects)]

    @cached_property
    def tree(self) -> Any:
        """What was saved; arrays as `TensorRef`."""
        tree = build_tree(self._reader, self.arrays, self.manifest.objects, from_named_value, self._renamed_path)
        return self._renamed_keys(tree) if self.is_native else tree

    def _renamed_path(self, path: Path) -> Path:
        return tuple(map(self.rename_key, path))

    def _renamed_keys(self, tree: Any) -> Any:
        if not self._key_map:
            return tree
        if isinstance(tree, dict):
            return type(tree)((self.rename_key(key), self._renamed_keys(value)) for key, value in tree.items())
        if type(tree) in (list, tuple):
            return type(tree)(map(self._renamed_keys, tree))
        return tree

    def find(self, path: Path) -> tuple[Any, bool]:
        """Return what was saved at a path, and whether anything was."""
        return find(self.tree, path)

    def read_tree(self, tree: Any, skipped: list[Path] | None = None) -> Any:
        """Return a part of the tree with its arrays read, on the CPU.

        Args:
            tree: The part.
            skipped: Gets the paths of what only its own library can read, which is left out; None: that is an error.

        Raises:
            CheckpointError: It cannot be read.
            NoMemoryError: An array does not fit into memory.
        """
        paths = list(dict.fromkeys(at.path for at in iter_refs(tree)))
        entries = self.locate([self.arrays[path] for path in paths])  # before memory is taken for them
        tensors: dict[Path, torch.Tensor] = {}
        wanted = []
        for path, entry in zip(paths, entries, strict=True):
            tensors[path] = allocate(entry, entry.shape)
            shard = LocalShard(full_box(entry.shape), tensors[path])
            wanted.append((entry, TensorShards(entry.shape, tensors[path].dtype, (shard,))))
        self.elements.read(wanted)

        def get_array(ref: TensorRef) -> object:
            return tensors[ref.path].numpy() if ref.kind == "numpy" else tensors[ref.path]

        return fill_tree(tree, get_array, skipped)

    def fill(self, wanted: Sequence[ReadRequest]) -> None:
        """Read the elements that this rank holds, and no others, into their places.

        Args:
            wanted: Arrays with where their elements go, of any type.

        Raises:
            CheckpointError: Elements are missing, damaged, or of a kind that cannot be read.
            StorageError: The store failed.
        """
        self.elements.read(self.locate_requests(wanted))

    def locate_requests(self, wanted: Sequence[ReadRequest]) -> list[ReadRequest]:
        """Return what is wanted, once it is sure that all of its elements are there; nothing is read.

        Args:
            wanted: Arrays with where their elements go, of any type.

        Raises:
            CheckpointError: Elements are missing or doubled, or a container is damaged.
        """
        entries = self.locate([entry for entry, _ in wanted])
        return [(entry, array) for entry, (_, array) in zip(entries, wanted, strict=True)]

    @cached_property
    def elements(self) -> ElementReader:
        """Reads what is `ready`."""
        return ElementReader(self._store)

    @property
    def store(self) -> Store:
        """What is read through: it checks what it reads where that was asked for."""
        return self._store

    @property
    def grain(self) -> int:
        """Bytes that are read together, however few of them are wanted: blocks, where they are checked."""
        return BLOCK_BYTES if self._store is not self._reader.raw_store else 1

    @cached_property
    def identity(self) -> bytes:
        """16 bytes that differ for another checkpoint under the same path."""
        if isinstance(self._reader, NativeReader):
            content: object = self._reader.commit.manifest_sha256
        else:
            content = sorted(self.manifest.files.items())
        return hashlib.blake2b(repr(content).encode(), digest_size=16).digest()

    def locate(self, entries: Sequence[TensorEntry]) -> list[TensorEntry]:
        """Return arrays with every piece located, once it is sure that all of their elements are there.

        Raises:
            CheckpointError: Elements are missing or doubled, or a container is damaged.
        """
        return locate(self._reader, self.manifest, entries)


def _with_shapes(reader: Reader, get_shapes: Callable[[], ParamShapes | None]) -> Reader:
    """Return a reader that knows the members of its flat parameters; the same one if files list them."""
    known = get_shapes() if reader.needs_param_shapes else None
    if known is not None:
        reader = reader.with_param_shapes(known)
    if reader.needs_param_shapes:
        raise UsageError(
            "these are flat parameters of FSDP1, and no file has the shapes of their members",
            where=reader.store.url,
            fix="Load into the model, `load({'model': model}, path)`; or load what `shardckpt consolidate SRC DST"
            " --shapes-from MODEL --part all` writes.",
        )
    return reader


def require_way_to_verify(verify: Any) -> None:
    """Check what `verify` is.

    Raises:
        UsageError: It means nothing.
    """
    if not (isinstance(verify, bool) or (isinstance(verify, str) and verify in VERIFY)):
        raise UsageError("`verify` must be False, 'read' or 'full'", found=repr(verify))


def compile_key_map(key_map: Any) -> list[tuple[re.Pattern[str], str]]:
    """Return regular expressions and their replacements.

    Args:
        key_map: Both, as strings.

    Raises:
        UsageError: It is not a mapping of strings to strings, or a string is not a regular expression.
    """
    if key_map is not None and not isinstance(key_map, Mapping):
        expected = "a dict of regular expressions to their replacements"
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
    """Raise UsageError unless rules are a file, the name of a set or None."""
    if rules is not None and not isinstance(rules, (str, os.PathLike)):
        raise UsageError("`rules` must be a file of rules", found=rules, fix="Pass a dict of expressions as `key_map`.")


def allocate(entry: TensorEntry, size: Sequence[int]) -> torch.Tensor:
    """Return memory on the CPU for elements of an array.

    Args:
        entry: The array.
        size: How many of its elements along each dimension.

    Raises:
        UnsupportedError: This torch has no such type.
        NoMemoryError: There is not as much memory.
    """
    dtype = torch_dtype(entry)
    try:
        return torch.empty(tuple(size), dtype=dtype)
    except (RuntimeError, MemoryError) as error:
        raise NoMemoryError(
            "this array does not fit into the memory of this machine",
            where=dotted(entry.path),
            found=f"{prod(size) * dtype.itemsize} bytes for {entry.dtype} {list(size)}",
            fix="Load it into a sharded model, or a part of it with shardckpt.open(path)[name][rows].",
        ) from error


def torch_dtype(entry: TensorEntry) -> torch.dtype:
    """Return the type that an array is loaded as.

    Raises:
        UnsupportedError: This torch has no such type.
    """
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedError("torch has no such type", where=dotted(entry.path), found=entry.dtype)
    return dtype
