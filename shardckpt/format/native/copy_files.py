"""Copy the files of a step byte for byte, compared with their hashes on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext

from shardckpt.errors import UnsupportedError
from shardckpt.format.native.commit import COMMIT, STEP
from shardckpt.format.native.payload import GROUP_BYTES
from shardckpt.format.native.stored_folders import StoredFolder, read_stored_step
from shardckpt.format.native.verified_store import VerifiedStore
from shardckpt.storage.publication import Publication
from shardckpt.storage.publish import publish
from shardckpt.storage.resolve_url import open_store
from shardckpt.storage.store import Read, Store

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
