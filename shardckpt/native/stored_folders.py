"""The folders of a step or a run with all files that its steps need, to copy them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace

from shardckpt.errors import ChecksumError, UnsupportedError
from shardckpt.native.commit import COMMIT, STEP, Commit, decode_commit, read_contents, read_mark
from shardckpt.native.payload import GROUP_BYTES
from shardckpt.native.reader import find_hashes
from shardckpt.native.records import FileRecord, sibling
from shardckpt.native.run_directory import RunDirectory
from shardckpt.native.verified_store import Hashed, VerifiedStore
from shardckpt.storage.publication import Publication
from shardckpt.storage.publish import publish
from shardckpt.storage.resolve_url import open_store
from shardckpt.storage.store import Read, Store, SubfolderStore, read_bytes


@dataclass(frozen=True, slots=True)
class StoredFolder:
    """A step, or a former step with files that other steps refer to."""

    name: str  # name of the folder in its run; empty for a single step
    raw_store: Store  # store whose root is the folder
    files: Mapping[str, FileRecord] = field(hash=False)  # name to record of the payload files
    commit: Commit | None = None  # content of `COMMIT`; None for a folder that is not a step any more
    mark: bytes = b""  # bytes of `COMMIT`

    @property
    def sizes(self) -> dict[str, int]:
        """Every file's bytes, by name; `COMMIT` is the last."""
        sizes = {file.name: file.nbytes for file in self.files.values()}
        if self.commit is not None:
            sizes |= {self.commit.manifest: self.commit.manifest_bytes, COMMIT: len(self.mark)}
        return sizes

    @property
    def hashes(self) -> dict[str, Hashed]:
        """Block hashes that were saved with the payload files, by name."""
        return {name: hashed for name, file in self.files.items() if (hashed := find_hashes(file)) is not None}

    @property
    def nbytes(self) -> int:
        """Bytes in all files."""
        return sum(self.sizes.values())

    @property
    def save(self) -> str:
        """The save's id; empty if the folder is not a step any more. Ids sort by time."""
        return "" if self.commit is None else self.commit.save

    @property
    def prefix(self) -> str:
        """Prefix in all file names but `COMMIT`; empty if they have none."""
        is_shared = all(name.startswith(self.save) for name in self.sizes if name != COMMIT)
        return self.save if is_shared else ""

    def was_removed(self) -> bool:
        """Return whether the step was removed or replaced since it was read."""
        sizes = {entry.name: entry.size for entry in self.raw_store.list()}
        return bool(self.mark) and (
            sizes.get(COMMIT) != len(self.mark) or read_bytes(self.raw_store, COMMIT, 0, len(self.mark)) != self.mark
        )

    def read_manifest(self) -> bytes:
        """Return the manifest's bytes."""
        assert self.commit is not None, "only a step has a manifest"
        data = read_bytes(self.raw_store, self.commit.manifest, 0, self.commit.manifest_bytes)
        digest = hashlib.sha256(data).hexdigest()
        if digest != self.commit.manifest_sha256:
            where = f"{self.raw_store.url}/{self.commit.manifest}"
            raise ChecksumError(
                "the manifest is not the one that was committed",
                where=where,
                found=digest,
                expected=self.commit.manifest_sha256,
            )
        return data


def read_stored_step(store: Store) -> StoredFolder:
    """Return a step with its files."""
    return _read_step("", store)[0]


def read_stored_run(store: Store, run: RunDirectory) -> list[StoredFolder]:
    """Return a run's complete steps, and folders with files that these refer to, each after its bases."""
    newer = next((step for step in run.steps if step.is_newer), None)
    if newer is not None:
        raise UnsupportedError(
            "the run holds a step that this version cannot read",
            where=f"{store.url.rstrip('/')}/{newer.name}",
            found=newer.fault,
            fix="Update shardckpt, or copy other steps one by one.",
        )
    folders: dict[str, StoredFolder] = {}
    referred: dict[str, dict[str, FileRecord]] = {}
    for step in run.complete:
        folders[step.name], records = _read_step(step.name, SubfolderStore(store, step.name))
        for record in records:
            name = sibling(record.base)
            if name is not None and name in step.refers:
                referred.setdefault(name, {})[record.name] = record
    for name, files in referred.items():
        known = folders.get(name)
        if known is None:
            folders[name] = StoredFolder(name, SubfolderStore(store, name), files)
        else:
            folders[name] = replace(known, files={**files, **known.files})
    return sorted(folders.values(), key=lambda folder: folder.save)


def _read_step(name: str, inside: Store) -> tuple[StoredFolder, list[FileRecord]]:
    """Return a step, and the records for its files in other folders."""
    sizes = {entry.name: entry.size for entry in inside.list() if not entry.is_folder}
    mark = read_mark(inside, sizes)
    commit = decode_commit(mark, where=f"{inside.url}/{COMMIT}")
    records = read_contents(inside, sizes, commit).files
    own = {record.name: record for record in records if not record.base}
    folder = StoredFolder(name, inside, own, commit, mark)
    return folder, [record for record in records if record.base]


_BUFFER_BYTES = 4 * GROUP_BYTES


def copy_stored_step(
    source: str, target: str, replacing: Callable[[], AbstractContextManager[object]] = nullcontext
) -> int:
    """Copy a step without bases, in place of an earlier one; return its bytes."""
    # Files are copied one after the other, through one buffer. `replacing` is entered before the manifest and `COMMIT`
    # are written, `COMMIT` last; the copy appears under its name inside it.
    folder = read_stored_step(open_store(source))
    if folder.commit is not None and folder.commit.bases:
        raise UnsupportedError("a step that refers to others is not copied alone", where=source)
    store = VerifiedStore(folder.raw_store, folder.hashes)
    with (
        ExitStack() as stack,  # it ends after the publication
        publish(
            target, STEP, overwrite=True, needed_bytes=folder.nbytes, last=COMMIT, prefix=folder.prefix
        ) as publication,
    ):
        for file in folder.files.values():
            with publication.create(file.name) as writer:
                for block in read_blocks(store, file.name, file.nbytes):
                    writer.write(block)
        stack.enter_context(replacing())
        write_commit(folder, publication)
    return folder.nbytes


def write_commit(folder: StoredFolder, publication: Publication) -> int:
    """Write a step's manifest and `COMMIT`, and return their bytes; 0 for a folder that is not a step."""
    if folder.commit is None:
        return 0
    parts = ((folder.commit.manifest, folder.read_manifest()), (COMMIT, folder.mark))
    for name, data in parts:
        with publication.create(name) as writer:
            writer.write(data)
    return sum(len(data) for _, data in parts)


def read_blocks(store: Store, name: str, nbytes: int) -> Iterator[memoryview]:
    """Yield a file's bytes in parts, through one buffer."""
    buffer = memoryview(bytearray(min(_BUFFER_BYTES, nbytes)))
    for start in range(0, nbytes, _BUFFER_BYTES):
        block = buffer[: min(_BUFFER_BYTES, nbytes - start)]
        store.read([Read(name, start, block)])
        yield block
