"""Simulated object store, with requests that fail, and answers that are lost."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from typing import Any, ClassVar

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from tests.simulation.scheduler import Scheduler
from tests.simulation.stores.disk import ChangeCount


@dataclass(frozen=True)
class StoredObject:
    """An object in a bucket."""

    data: bytes
    etag: int  # changes with each write
    written: float  # seconds since the epoch


class SimulatedBucket:
    """Objects in a simulated store."""

    def __init__(self, scheduler: Scheduler, changes: ChangeCount | None = None) -> None:
        self._scheduler = scheduler
        self._changes = ChangeCount() if changes is None else changes
        self.objects: dict[str, StoredObject] = {}
        self.version = 0  # counts changes

    def start(self, verb: str, path: str) -> str:
        """Start a request, which is a scheduling point. Return the fault in its answer."""
        fault = self._scheduler.step(verb, path)
        if fault == "dropped":
            raise ConnectionError("the connection was reset")
        if fault == "refused":
            raise PermissionError("access denied")
        return fault

    def end(self, fault: str) -> None:
        """End a request that took effect. Raises ConnectionError if its answer is lost."""
        if fault == "answer lost":
            raise ConnectionError("the answer was lost")

    def put(self, verb: str, path: str, data: bytes, *, is_new: bool) -> None:
        """Write an object."""
        fault = self.start(verb, path)
        is_there = path in self.objects
        if not (is_new and is_there):
            self.note_change()
            self.objects[path] = StoredObject(data, self.version, self._scheduler.clock)
        if fault == "repeated below" and is_new:  # the client repeats the request, and hears of its own object
            raise FileExistsError(path)
        self.end(fault)
        if is_new and is_there:
            raise FileExistsError(path)

    def remove(self, path: str) -> None:
        """Remove an object."""
        fault = self.start("delete", path)
        if self.objects.pop(path, None) is not None:
            self.note_change()
        self.end(fault)

    def note_change(self) -> None:
        """Record that the content has changed."""
        self.version += 1
        self._changes.number += 1


class SimulatedBucketFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """fsspec file system over the running history's bucket, under `sim://`."""

    protocol: ClassVar[tuple[str, ...]] = ("sim", "s3a")  # "s3a" marks conditional creation, as on S3
    cachable = False
    bucket: ClassVar[SimulatedBucket]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.partition("://")[2].rstrip("/") if "://" in path else path.rstrip("/")

    def ls(self, path: str, detail: bool = True, **_options: Any) -> Any:
        """List a folder."""
        path = self._strip_protocol(path)
        self.bucket.end(self.bucket.start("list", path))
        found: dict[str, dict[str, Any]] = {}
        for key, stored in self.bucket.objects.items():
            if key.startswith(path + "/"):
                name, slash, _ = key[len(path) + 1 :].partition("/")
                entry = _folder(f"{path}/{name}") if slash else _info(f"{path}/{name}", stored)
                found[name] = entry
        if not found:
            raise FileNotFoundError(path)
        return list(found.values()) if detail else [str(each["name"]) for each in found.values()]

    def info(self, path: str, **_options: Any) -> Any:
        """Return an object's or folder's metadata."""
        path = self._strip_protocol(path)
        self.bucket.end(self.bucket.start("head", path))
        if path in self.bucket.objects:
            return _info(path, self.bucket.objects[path])
        if any(key.startswith(path + "/") for key in self.bucket.objects):
            return _folder(path)
        raise FileNotFoundError(path)

    def find(self, path: str, detail: bool = False, **_options: Any) -> Any:
        """Return the objects below a folder."""
        path = self._strip_protocol(path)
        self.bucket.end(self.bucket.start("list", path))
        found = {key: _info(key, each) for key, each in self.bucket.objects.items() if key.startswith(path + "/")}
        return found if detail else list(found)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_options: Any) -> bytes:
        """Return a byte range."""
        path = self._strip_protocol(path)
        fault = self.bucket.start("get", path)
        if path not in self.bucket.objects:
            raise FileNotFoundError(path)
        data = self.bucket.objects[path].data[start:end]
        self.bucket.end(fault)
        return data[: len(data) // 2] if fault == "short" else data

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_options: Any) -> None:
        """Write an object in one request."""
        self.bucket.put("put", self._strip_protocol(path), bytes(value), is_new=mode == "create")

    def _rm(self, path: str) -> None:
        self.bucket.remove(self._strip_protocol(path))

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **_options: Any) -> PartUpload:
        return PartUpload(self, path, mode, block_size)


class PlainBucketFileSystem(SimulatedBucketFileSystem):
    """The same without conditional requests, under `plain://`."""

    protocol: ClassVar[tuple[str, ...]] = ("plain", "hf")


class PartUpload(AbstractBufferedFile):  # type: ignore[misc]
    """A multipart upload; if it is dropped before its end, it never appears."""

    def __del__(self) -> None:
        """Do nothing: the base class would end the upload, even for a killed process."""

    def _initiate_upload(self) -> None:
        self._parts = BytesIO()
        self._is_multipart = self.loc >= self.blocksize
        if self._is_multipart:
            self.fs.bucket.end(self.fs.bucket.start("start", self.path))

    def _upload_chunk(self, final: bool = False) -> bool:
        if self._is_multipart:
            self.fs.bucket.end(self.fs.bucket.start("part", self.path))
        self._parts.write(self.buffer.getvalue())
        if final:
            verb = "complete" if self._is_multipart else "put"
            self.fs.bucket.put(verb, self.path, self._parts.getvalue(), is_new=self.mode == "xb")
        return True

    def discard(self) -> None:
        """Abort the upload."""
        self.fs.bucket.end(self.fs.bucket.start("abort", self.path))


def _info(name: str, stored: StoredObject) -> dict[str, Any]:
    return {
        "name": name,
        "size": len(stored.data),
        "type": "file",
        "ETag": str(stored.etag),
        "LastModified": stored.written,
    }


def _folder(name: str) -> dict[str, Any]:
    return {"name": name, "size": 0, "type": "directory"}


def mount(bucket: SimulatedBucket) -> None:
    """Use a bucket for the URLs `sim://` and `plain://`."""
    SimulatedBucketFileSystem.bucket = bucket
    for kind in (SimulatedBucketFileSystem, PlainBucketFileSystem):
        fsspec.register_implementation(kind.protocol[0], kind, clobber=True)


def unmount() -> None:
    """Forget the bucket of an ended history."""
    if "bucket" in vars(SimulatedBucketFileSystem):
        del SimulatedBucketFileSystem.bucket
