"""An open checkpoint as a load asks for it: the nest that was saved, whatever the format, and where its arrays lie."""

from __future__ import annotations

import hashlib
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice
from typing import Any

import torch

from shardckpt.boxes import Box, contiguous_blocks, shift, whole
from shardckpt.checkpoint import casts
from shardckpt.checkpoint.capture import ArrayAt
from shardckpt.checkpoint.holdings import revived
from shardckpt.checkpoint.ruled import ruled
from shardckpt.checkpoint.transfer import flat_bytes, lies_flat, narrowed
from shardckpt.dtypes import nbytes
from shardckpt.errors import NameCollisionError, UnsupportedError, UsageError
from shardckpt.format.detect import open_checkpoint
from shardckpt.format.inert import Dtype, Inert
from shardckpt.format.native import NativeReader
from shardckpt.format.native_payload import BLOCK_BYTES
from shardckpt.format.native_references import NamedBases
from shardckpt.format.pieces import PieceReader, Want, straight_reads
from shardckpt.format.reader import Reader, WholeShapes
from shardckpt.format.tagged import ArrayRef, Named
from shardckpt.manifest import UNREAD, Encoded, Lazy, Path, TensorEntry, dotted
from shardckpt.plan.coverage import require_complete
from shardckpt.plan.parts import split_flat_names
from shardckpt.state.pieces import LocalArray, Portion
from shardckpt.storage.store import Read, Store

BATCH_BYTES = 64 << 20
"""Bytes of one batch of reads; as much is held besides where elements do not go straight to where they belong."""

_WINDOW_BYTES = 1 << 29
_WINDOW_PIECES = 100_000
"""As much is planned ahead."""

_READERS = 2
"""Batches that are under way at once: one is read while the other is hashed and goes to where it belongs."""

Wish = tuple[TensorEntry, LocalArray]
"""A saved array, and where its elements go."""

Rules = Mapping[str, str] | str | os.PathLike[str] | None
"""Regular expressions to what stands for them in every key, or where a file of rules lies, or the name of a set."""

Verify = str | bool
VERIFY = (False, "read", "full")


class Saved:
    """A checkpoint that is open.

    Args:
        url: Where it lies.
        verify: Which blocks are checked against their hashes: none, those that are read, or all of them at once.
        rules: Regular expressions and what stands for them in every key of every path; or a file of rules.
        bases: Folders that the caller names of those that it refers to.
        tell: Tells what lies in flat parameters, where that is known; asked where no file tells it.

    Raises:
        SourceNotFoundError: Nothing lies there.
        CheckpointError: It cannot be read, or is damaged.
        UsageError: An unknown way to verify; it refers to no folder that could have been moved; flat parameters of
            which nothing tells the members.
    """

    def __init__(
        self,
        url: str,
        verify: Verify = "read",
        rules: Rules = None,
        bases: NamedBases = "",
        tell: Callable[[], WholeShapes | None] = lambda: None,
    ) -> None:
        require_way_to_verify(verify)
        self._rules = compiled(rules)
        self._reader: Reader = _with_shapes(open_checkpoint(url, bases), tell)
        self._files = self._reader
        if isinstance(rules, (str, os.PathLike)):
            self._reader = ruled(self._reader, os.fspath(rules))
        self.url = url
        self.manifest = split_flat_names(self._reader.manifest)
        self._store = self._reader.store if verify else self._reader.unverified
        self._pieces = PieceReader(self._store)

    @property
    def reader(self) -> Reader:
        """The reader of its format."""
        return self._reader

    @property
    def is_native(self) -> bool:
        """Tell whether it is of our own format."""
        return isinstance(self._reader, NativeReader)

    def expect_most(self) -> None:
        """Say that most arrays will be asked for: they are described in one go, which is cheaper than one by one."""
        self.manifest.tensors.values()

    def lies_elsewhere(self, entry: TensorEntry) -> bool:
        """Tell whether an array lies in other folders than the checkpoint."""
        return bool(entry.pieces) and all(piece.file in self.manifest.elsewhere for piece in entry.pieces)

    def check_blocks(self, share: int = 0, shares: int = 1, *, own_only: bool = False) -> None:
        """Hash every block of this share of the files.

        Args:
            share: Which, from 0.
            shares: How many there are.
            own_only: Leave out files that lie in other folders.

        Raises:
            ChecksumError: A block is not what was saved.
        """
        hashed = self._files.block_hashes() if isinstance(self._files, NativeReader) else {}
        left_out = self.manifest.elsewhere if own_only else {}
        for name in sorted(hashed.keys() - left_out.keys())[share::shares]:
            size = self.manifest.files[name]
            for start in range(0, size, BATCH_BYTES):
                self._store.read([Read(name, start, memoryview(bytearray(min(BATCH_BYTES, size - start))))])

    def renamed(self, key: Any) -> Any:
        """Return a key as the rules have it."""
        if isinstance(key, str):
            for pattern, new in self._rules:
                key = pattern.sub(new, key)
        return key

    @cached_property
    def arrays(self) -> Mapping[Path, TensorEntry]:
        """The arrays, by path."""
        if not self._rules:
            return self.manifest.tensors
        found: dict[Path, TensorEntry] = {}
        for path, entry in self.manifest.tensors.items():
            new = tuple(map(self.renamed, path))
            if new in found:
                raise NameCollisionError(
                    "`rules` give two tensors one name",
                    where=dotted(new),
                    found=f"{dotted(found[new].path)} and {dotted(path)}",
                    fix="Make the expressions narrower.",
                )
            found[new] = entry
        return found

    @cached_property
    def paths(self) -> list[Path]:
        """Where arrays and other values are."""
        return [*self.arrays, *(tuple(map(self.renamed, path)) for path in self.manifest.objects)]

    @cached_property
    def nest(self) -> Any:
        """What was saved; arrays as `ArrayAt`."""
        if isinstance(self._reader, NativeReader):
            records = self._reader.contents.arrays

            def revive(value: ArrayRef | Named) -> object:
                if isinstance(value, Named):
                    return revived(value)
                return ArrayAt(tuple(map(self.renamed, records[value.number].path)), value.kind)

            return self._renamed_keys(self._reader.nest(revive))
        return self._foreign_nest()

    def _renamed_keys(self, nest: Any) -> Any:
        if not self._rules:
            return nest
        if isinstance(nest, dict):
            return type(nest)((self.renamed(key), self._renamed_keys(value)) for key, value in nest.items())
        if type(nest) in (list, tuple):
            return type(nest)(map(self._renamed_keys, nest))
        return nest

    def _foreign_nest(self) -> Any:
        root: dict[Any, Any] = {}
        for path in self.arrays:
            _put(root, path, ArrayAt(path))
        for path, entry in self.manifest.objects.items():
            value = self._reader.load_object(entry) if entry.value is UNREAD else entry.value
            _put(root, tuple(map(self.renamed, path)), _Foreign(value, path))
        return _listed(root)

    def find(self, path: Path) -> tuple[Any, bool]:
        """Return what was saved at a path, and whether anything was."""
        found = self.nest
        for key in path:
            if isinstance(found, dict):
                match = next((k for k in _spellings(key, found) if k in found), found)
                if match is found:
                    return None, False
                found = found[match]
            elif type(found) in (list, tuple) and isinstance(key, int) and 0 <= key < len(found):
                found = found[key]
            else:
                return None, False
        return found, True

    def materialised(self, nest: Any) -> Any:
        """Return a part of the nest with its arrays read, on the CPU.

        Raises:
            CheckpointError: It cannot be read.
        """
        made: dict[Path, torch.Tensor] = {}
        wanted = []
        for at in _arrays_in(nest):
            if at.path not in made:
                entry = self.arrays[at.path]
                made[at.path] = torch.empty(entry.shape, dtype=torch_dtype(entry))
                portion = Portion(whole(entry.shape), made[at.path])
                wanted.append((entry, LocalArray(entry.shape, made[at.path].dtype, (portion,))))
        self.fill(wanted)
        return _filled(nest, made)

    def fill(self, wanted: Sequence[Wish]) -> None:
        """Read the elements that lie on this rank, and no others, into their places.

        Args:
            wanted: Arrays with where their elements go, of any type.

        Raises:
            CheckpointError: Elements are missing, damaged, or of a kind that cannot be read.
            StorageError: The store failed.
        """
        self.read(self.ready(wanted))

    def ready(self, wanted: Sequence[Wish]) -> list[Wish]:
        """Return what is wanted, once it is sure that all of its elements are there; nothing is read.

        Args:
            wanted: Arrays with where their elements go, of any type.

        Raises:
            CheckpointError: Elements are missing or doubled, or a container is damaged.
        """
        entries = self.located([entry for entry, _ in wanted])
        return [(entry, array) for entry, (_, array) in zip(entries, wanted, strict=True)]

    def read(self, wanted: Sequence[Wish]) -> None:
        """Read what is ready.

        Args:
            wanted: As `ready` returned it, or some of that.

        Raises:
            CheckpointError: Elements are damaged, or of a kind that cannot be read.
            StorageError: The store failed.
        """
        if any(isinstance(piece.layout, Encoded) for entry, _ in wanted for piece in entry.pieces):
            for batch in _batches(wanted):  # a decoder runs forward through all of them
                batch.carry_out(self._pieces)
            self._pieces.forget()
            return
        self._in_threads(self._planned(sorted(wanted, key=_place)))

    def _planned(self, wanted: Sequence[Wish]) -> Iterator[_Batch]:
        """Yield batches of reads; what is planned ahead is bounded, since it may be a million pieces."""
        for some in _windows(wanted):
            reads, rest = self.divided(some)
            yield from _batches_of_reads(reads)
            yield from _batches(rest)

    def read_straight(self, reads: Sequence[Read]) -> None:
        """Read bytes to where they belong.

        Raises:
            CheckpointError: They are damaged.
            StorageError: The store failed.
        """
        self._in_threads(_batches_of_reads(reads))

    def deliveries(self, wanted: Sequence[Wish]) -> tuple[list[Delivery], list[Wish]]:
        """Return what is wanted as bytes of files, and what has to be put together by other means.

        What is on a device, or of another type, gets a buffer, whose memory is not touched before bytes arrive.

        Args:
            wanted: As `ready` returned it.
        """
        found: list[Delivery] = []
        rest: list[Wish] = []
        for entry, array in wanted:
            others = []
            for portion in _portions(array, entry):
                buffer, finish = _buffer(portion.tensor, entry)
                reads = straight_reads(Want(entry.pieces, portion.box, entry.stored, buffer))
                if reads is None:
                    others.append(portion)
                else:
                    wish = entry, array._replace(portions=(portion,))
                    found.append(Delivery(reads, finish, wish))
            if others:
                rest.append((entry, array._replace(portions=tuple(others))))
        return found, rest

    def _in_threads(self, batches: Iterator[_Batch]) -> None:
        begun = list(islice(batches, 2))
        if len(begun) < 2:
            for batch in begun:
                batch.carry_out(self._pieces)
            return
        with ThreadPoolExecutor(_READERS, thread_name_prefix="shardckpt-read") as pool:
            running: deque[Future[None]] = deque()
            for batch in chain(begun, batches):
                running.append(pool.submit(batch.carry_out, PieceReader(self._store)))
                if len(running) > _READERS:
                    running.popleft().result()
            for each in running:
                each.result()

    @property
    def store(self) -> Store:
        """What is read through: it checks what it reads where that was asked for."""
        return self._store

    @property
    def grain(self) -> int:
        """Bytes that are read together, however few of them are wanted: blocks, where they are checked."""
        return BLOCK_BYTES if self._store is not self._reader.stored else 1

    @cached_property
    def identity(self) -> bytes:
        """16 bytes that tell this checkpoint from another one that lay or will lie in its place."""
        if isinstance(self._reader, NativeReader):
            told: object = self._reader.commit.manifest_sha256
        else:
            told = sorted(self.manifest.files.items())
        return hashlib.blake2b(repr(told).encode(), digest_size=16).digest()

    def divided(self, wanted: Sequence[Wish]) -> tuple[list[Read], list[Wish]]:
        """Return the reads that put bytes straight to where they belong, and what is wanted besides.

        Args:
            wanted: As `ready` returned it.
        """
        reads: list[Read] = []
        rest: list[Wish] = []
        for entry, array in wanted:
            others = []
            for portion in array.portions:
                found = _straight(portion, entry) if portion.box.volume else []
                if found is None:
                    others.append(portion)
                else:
                    reads += found
            if others:
                rest.append((entry, array._replace(portions=tuple(others))))
        return reads, rest

    def located(self, entries: Sequence[TensorEntry]) -> list[TensorEntry]:
        """Return arrays with every piece located, once it is sure that all of their elements are there.

        Raises:
            CheckpointError: Elements are missing or doubled, or a container is damaged.
        """
        require_complete(self.manifest, entries, self.url)
        lazy = [piece for entry in entries for piece in entry.pieces if isinstance(piece.layout, Lazy)]
        if not lazy:
            return list(entries)
        known = dict(zip(map(id, lazy), self._reader.resolve(lazy), strict=True))
        return [entry._replace(pieces=tuple(known.get(id(p), p) for p in entry.pieces)) for entry in entries]


def _with_shapes(reader: Reader, tell: Callable[[], WholeShapes | None]) -> Reader:
    """Return a reader that knows what lies in its flat parameters; the same one where files tell that."""
    known = tell() if reader.lacks_shapes else None
    if known is not None:
        reader = reader.with_shapes(known)
    if reader.lacks_shapes:
        raise UsageError(
            "these are flat parameters of FSDP1, and no file tells the shapes of what lies in them",
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
        raise UsageError("this is no way to verify", found=repr(verify), expected="False, 'read' or 'full'")


def compiled(rules: Any) -> list[tuple[re.Pattern[str], str]]:
    """Return regular expressions, and what stands for what they match; none for a file of rules.

    Args:
        rules: Both, as strings.

    Raises:
        UsageError: There is one that is neither, or no regular expression.
    """
    if isinstance(rules, (str, os.PathLike)):
        return []
    if rules is not None and not isinstance(rules, Mapping):
        expected = "regular expressions to what stands for them, or a file of rules"
        raise UsageError("`rules` are no mapping", found=rules, expected=expected)
    found = []
    for pattern, new in (rules or {}).items():
        if not (isinstance(pattern, str) and isinstance(new, str)):
            raise UsageError("a rule is not two strings", where="rules", found=f"{pattern!r}: {new!r}")
        try:
            made = re.compile(pattern)
            made.sub(new, "")  # what stands for a match may refer to groups that there are not
        except (re.error, IndexError) as error:
            raise UsageError(
                f"a rule is no regular expression: {error}", where="rules", found=f"{pattern!r}: {new!r}"
            ) from error
        found.append((made, new))
    return found


@dataclass
class Delivery:
    """Elements that come as bytes of files, from whoever reads them.

    Attributes:
        reads: The bytes, with where they go; let go once they are dealt with.
        finish: Takes what has arrived to its place; None where it arrives there.
        wish: The same elements, for reading them by oneself.
        left: Parts that have not arrived.
    """

    reads: list[Read]
    finish: Callable[[], object] | None
    wish: Wish
    left: int = 0

    def arrived(self) -> None:
        """Note that a part is there; the last one ends it."""
        self.left -= 1
        if not self.left and self.finish is not None:
            self.finish()
            self.finish = None


def _portions(array: LocalArray, entry: TensorEntry) -> Iterator[Portion]:
    """Yield what is held; what needs a buffer on its way in parts that fit a batch."""
    for portion in array.portions:
        if lies_flat(portion.tensor) and portion.tensor.dtype == getattr(torch, entry.stored):
            if portion.box.volume:
                yield portion
        else:
            yield from (Portion(*part) for part in _parts(array._replace(portions=(portion,)), entry))


@dataclass
class _Batch:
    """What is read at once, and what is to be done then."""

    wants: list[Want] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    after: list[Callable[[], object]] = field(default_factory=list)
    nbytes: int = 0

    def carry_out(self, pieces: PieceReader) -> None:
        """Read, and put what was staged into its place."""
        pieces.fill(self.wants, self.reads)
        for finish in self.after:
            finish()


def _place(wish: Wish) -> tuple[str, int]:
    """Return about where elements lie, so that they are read in the order in which they do."""
    pieces = wish[0].pieces
    return (pieces[0].file, getattr(pieces[0].layout, "offset", 0)) if pieces else ("", 0)


def _straight(portion: Portion, entry: TensorEntry) -> list[Read] | None:
    """Return the reads that fill a portion of an array; None where its elements do not lie as they are held."""
    if not lies_flat(portion.tensor) or portion.tensor.dtype != getattr(torch, entry.stored):
        return None
    return straight_reads(Want(entry.pieces, portion.box, entry.stored, flat_bytes(portion.tensor)))


def _batches(wanted: Sequence[Wish]) -> Iterator[_Batch]:
    """Cut what is wanted into batches; no buffer is made before its batch is asked for."""
    batch = _Batch()
    for entry, array in wanted:
        for box, tensor in _parts(array, entry):
            buffer, finish = _buffer(tensor, entry)
            batch.wants.append(Want(entry.pieces, box, entry.stored, buffer))
            if finish is not None:
                batch.after.append(finish)
            batch.nbytes += buffer.nbytes
            if batch.nbytes >= BATCH_BYTES:
                yield batch
                batch = _Batch()
    if batch.wants:
        yield batch


def _windows(wanted: Sequence[Wish]) -> Iterator[Sequence[Wish]]:
    """Cut what is wanted where a window is full, by bytes or by pieces."""
    start = held = pieces = 0
    for at, (entry, array) in enumerate(wanted):
        held += sum(portion.tensor.nbytes for portion in array.portions)
        pieces += len(entry.pieces)
        if held >= _WINDOW_BYTES or pieces >= _WINDOW_PIECES:
            yield wanted[start : at + 1]
            start, held, pieces = at + 1, 0, 0
    if start < len(wanted):
        yield wanted[start:]


def _batches_of_reads(reads: Sequence[Read]) -> Iterator[_Batch]:
    """Cut reads into batches in the order in which they lie; where a file's blocks end, so that none is in two."""
    batch = _Batch()
    last: tuple[str, int] = ("", 0)
    for name, offset, buffer in sorted(reads, key=lambda read: read[:2]):
        start, stop = offset, offset + len(buffer)
        while start < stop:
            slot = name, start // BATCH_BYTES
            end = min(stop, (slot[1] + 1) * BATCH_BYTES)
            if slot != last and 2 * batch.nbytes >= BATCH_BYTES:
                yield batch
                batch = _Batch()
            batch.reads.append(Read(name, start, buffer[start - offset : end - offset]))
            batch.nbytes += end - start
            start, last = end, slot
    if batch.reads:
        yield batch


def torch_dtype(entry: TensorEntry) -> torch.dtype:
    """Return the type that an array is handed out in.

    Raises:
        UnsupportedError: This torch has no such type.
    """
    found = getattr(torch, entry.dtype, None)
    if not isinstance(found, torch.dtype):
        raise UnsupportedError("torch has no such type", where=dotted(entry.path), found=entry.dtype)
    return found


def _parts(array: LocalArray, entry: TensorEntry) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield what is wanted in parts that fit a batch."""
    most = max(BATCH_BYTES // max(nbytes(entry.stored, 8) // 8, 1), 1)
    for box, tensor in array.portions:
        if box.volume <= most:
            if box.volume:
                yield box, tensor
            continue
        for part in contiguous_blocks(box, most):
            yield part, narrowed(tensor, shift(part, box.offset))


def _buffer(tensor: torch.Tensor, entry: TensorEntry) -> tuple[memoryview, Callable[[], object] | None]:
    """Return where to read to: the tensor's own memory where that is what is stored, else a copy to take from."""
    stored = getattr(torch, entry.stored)
    if lies_flat(tensor) and tensor.dtype == stored:
        return flat_bytes(tensor), None
    staged = torch.empty(tuple(tensor.shape), dtype=stored)
    delivered = getattr(torch, entry.dtype)

    def finish() -> None:
        casts.put(staged.to(delivered) if delivered != stored else staged, tensor, entry)

    return flat_bytes(staged), finish


class _Foreign:
    """A value of another format, looked at when somebody wants it."""

    def __init__(self, value: object, path: Path) -> None:
        self.value, self.path = value, path

    def plain(self) -> Any:
        """Return it as plain values. Raises UnsupportedError for what only its own library knows."""
        return _plain(self.value, self.path)


def _plain(value: Any, path: Path) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each, (*path, str(key))) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(each, (*path, at)) for at, each in enumerate(value))
    if isinstance(value, Dtype):
        return revived(Named("dtype", value.name))
    if isinstance(value, Inert) or type(value).__module__.startswith("shardckpt."):
        raise UnsupportedError("this value can only be read by what wrote it", where=dotted(path), found=repr(value))
    return value


def _put(root: dict[Any, Any], path: Path, value: Any) -> None:
    for key in path[:-1]:
        root = root.setdefault(key, {})
        if not isinstance(root, dict):
            return  # a value lies above another: the one above holds it already
    if path:
        root[path[-1]] = value


def _listed(nest: Any) -> Any:
    """Turn dicts that were lists into lists again: foreign manifests number their elements."""
    if not isinstance(nest, dict):
        return nest
    made = {key: _listed(value) for key, value in nest.items()}
    if made and all(type(key) is int for key in made) and sorted(made) == list(range(len(made))):
        return [made[at] for at in range(len(made))]
    return made


def _spellings(key: Any, found: Mapping[Any, Any]) -> Iterator[Any]:
    """Yield the keys that a part of a path may stand for."""
    yield key
    if isinstance(key, str):
        yield from (each for each in found if type(each) not in (str, int) and str(each) == key)


def _arrays_in(nest: Any) -> Iterator[ArrayAt]:
    if isinstance(nest, ArrayAt):
        yield nest
    elif isinstance(nest, dict):
        for value in nest.values():
            yield from _arrays_in(value)
    elif type(nest) in (list, tuple):
        for value in nest:
            yield from _arrays_in(value)


def _filled(nest: Any, made: Mapping[Path, torch.Tensor]) -> Any:
    if isinstance(nest, ArrayAt):
        return made[nest.path].numpy() if nest.kind == "numpy" else made[nest.path]
    if isinstance(nest, _Foreign):
        return nest.plain()
    if isinstance(nest, dict):
        return type(nest)((key, _filled(value, made)) for key, value in nest.items())
    if type(nest) in (list, tuple):
        return type(nest)(_filled(value, made) for value in nest)
    return nest
