"""An object store in memory for tests: it counts requests, fails on demand, and objects appear when a writer closes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from io import BytesIO

import fsspec
import pytest
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from shardckpt.native.commit import COMMIT
from shardckpt.storage.remote_publication import RemoteFolder


class Bucket(AbstractFileSystem):
    """One bucket for the whole process; `reset` empties it."""

    # The second name says how its objects appear; no URL uses it.
    protocol = ("bucket", "s3a")
    cachable = False
    objects: dict[str, bytes] = {}  # noqa: RUF012
    uploads: dict[int, str] = {}  # noqa: RUF012
    requests: list[tuple[str, str]] = []  # noqa: RUF012
    fault: Callable[[int, str, str], object] | None = None
    answer: Callable[[int, str, str], object] | None = None
    dates: dict[str, float] = {}  # noqa: RUF012  (days since an object of a DatedBucket was written)

    @classmethod
    def reset(cls) -> None:
        cls.objects, cls.uploads, cls.requests = {}, {}, []
        cls.fault = cls.answer = None
        fsspec.register_implementation("bucket", cls, clobber=True)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("bucket://").rstrip("/")

    @classmethod
    def request(cls, verb: str, path: str) -> object:
        """Log a request; `fault` may raise, or return what is done to a body on its way."""
        cls.requests.append((verb, path))
        return cls.fault(len(cls.requests), verb, path) if cls.fault else None

    @classmethod
    def done(cls, verb: str, path: str) -> None:
        """Answer a request that took effect; `answer` may raise, so that nobody hears of it."""
        if cls.answer:
            cls.answer(len(cls.requests), verb, path)

    @classmethod
    def count(cls, verb: str) -> int:
        return sum(made == verb for made, _ in cls.requests)

    def ls(self, path, detail=True, **kwargs):
        path = self._strip_protocol(path)
        self.request("list", path)
        found = {}
        for key, data in self.objects.items():
            if key.startswith(path + "/"):
                first, slash, _ = key[len(path) + 1 :].partition("/")
                kind = "directory" if slash else "file"
                found[first] = {"name": f"{path}/{first}", "size": 0 if slash else len(data), "type": kind}
        if not found:
            raise FileNotFoundError(path)
        return list(found.values()) if detail else [entry["name"] for entry in found.values()]

    def info(self, path, **kwargs):
        path = self._strip_protocol(path)
        self.request("head", path)
        if path in self.objects:
            return {"name": path, "size": len(self.objects[path]), "type": "file"}
        if any(key.startswith(path + "/") for key in self.objects):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def cat_file(self, path, start=None, end=None, **kwargs):
        change = self.request("get", f"{path} {start}-{end}")
        if path not in self.objects:
            raise FileNotFoundError(path)
        body = self.objects[path][start:end]
        return change(body) if callable(change) else body

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        path = self._strip_protocol(path)
        self.request("put", path)
        if mode == "create" and path in self.objects:
            raise FileExistsError(path)
        self.objects[path] = bytes(value)
        self.done("put", path)

    def _rm(self, path):
        self.request("delete", path)
        self.objects.pop(path, None)
        self.done("delete", path)

    def _open(self, path, mode="rb", block_size=None, **kwargs):
        assert mode in {"wb", "xb"}
        return Upload(self, path, mode, block_size)


class DatedBucket(Bucket):
    """A bucket that tells when an object was written: now, by a clock of its own."""

    protocol = ("dated", "s3a")

    @classmethod
    def reset(cls) -> None:
        super().reset()
        cls.dates = {}

    def ls(self, path, detail=True, **kwargs):
        found = super().ls(path, detail=True, **kwargs)
        for entry in found:
            entry["LastModified"] = self._date(entry["name"])
        return found if detail else [entry["name"] for entry in found]

    def info(self, path, **kwargs):
        return {**super().info(path, **kwargs), "LastModified": self._date(self._strip_protocol(path))}

    def _date(self, path):
        return datetime.now(timezone.utc) - timedelta(days=self.dates.get(path, 0))


class Upload(AbstractBufferedFile):
    def _initiate_upload(self):
        self.parts = BytesIO()
        if self.tell() >= self.blocksize:
            self.fs.request("start", self.path)
            self.fs.uploads[id(self)] = self.path

    def _upload_chunk(self, final=False):
        self.fs.request("put" if final and id(self) not in self.fs.uploads else "part", self.path)
        self.parts.write(self.buffer.getvalue())
        if final:
            if self.fs.uploads.pop(id(self), None):
                self.fs.request("complete", self.path)
            if self.mode == "xb" and self.path in self.fs.objects:
                raise FileExistsError(self.path)
            self.fs.objects[self.path] = self.parts.getvalue()
            self.fs.done("put", self.path)
        return True

    def discard(self):
        if id(self) in self.fs.uploads:
            self.fs.request("abort", self.path)
            del self.fs.uploads[id(self)]

    def __del__(self):
        """Write nothing: fsspec would close a file of a killed process in the middle of a later test."""


class Dead(BaseException):
    """The process is gone: whatever it tries from now on does not happen."""


def break_at(k: int, how: str) -> None:
    """Break the bucket at request k: `killed`, `unheard` (killed once it took effect), `error` (`and no cleanup`)."""

    def fault(count: int, verb: str, path: str) -> None:
        if (how == "killed" and count >= k) or (how == "unheard" and count > k):
            raise Dead
        if how.startswith("error") and count == k:
            raise PermissionError("broken")
        if how == "error and no cleanup" and count > k and verb == "delete":
            raise PermissionError("broken too")

    def answer(count: int, verb: str, path: str) -> None:
        if how == "unheard" and count >= k:
            raise Dead

    Bucket.requests.clear()
    Bucket.fault, Bucket.answer = fault, answer


def mend() -> int:
    """Mend the bucket; return how many requests it got since it was broken."""
    Bucket.fault = Bucket.answer = None
    return len(Bucket.requests)


@contextmanager
def broken_at(k: int, how: str) -> Iterator[None]:
    """Break the bucket at request k, as `break_at`, for the block."""
    break_at(k, how)
    try:
        yield
    finally:
        mend()


def commit_comes_first(patch: pytest.MonkeyPatch) -> None:
    """The mark that makes a step exist is put there before what it names."""
    whole = RemoteFolder.create

    def create(self, name: str):
        if name != COMMIT:
            return whole(self, name)
        for old in self._old:
            self._store.delete(old)
        return self._store.create(name)

    patch.setattr(RemoteFolder, "create", create)
