"""The errors a caller can catch, and how their one-line messages are put together.

ShardckptError
├── CheckpointError (ValueError)              the checkpoint is at fault               exit code 1
│   ├── FormatError                           a header, manifest or pickle cannot be read
│   │   └── TruncatedError (EOFError)         bytes that should be there are not
│   ├── UnsafeError                           reading it would run code or leave its folder
│   ├── UnsupportedError (TypeError)          valid, but holds something this reader does not know
│   ├── IncompleteError (LookupError)         elements that no file holds
│   ├── NoCompleteCheckpoint (FileNotFoundError)  steps are there, and none can be loaded
│   ├── OverlapError                          elements that two files claim
│   ├── ChecksumError                         bytes differ from their stored checksum
│   └── PrecisionError (OverflowError)        a cast would lose more than rounding
├── UsageError (ValueError)                   the call is at fault                     exit code 2
│   ├── SourceNotFoundError (FileNotFoundError)
│   ├── UnknownFormatError                    no reader recognizes the source
│   ├── TargetExistsError (FileExistsError)
│   ├── NameCollisionError                    two tensors would get one name
│   ├── UnknownNameError (KeyError)           nothing of that name in the checkpoint
│   ├── MissingTorchError (ModuleNotFoundError)  the call needs torch, which is not installed
│   └── AmbiguousError (LookupError)          more than one answer; the message says which option decides
├── StateDictError (RuntimeError)             an object's own method failed            exit code 1
├── RankError (RuntimeError)                  another rank failed or is gone           exit code 3
├── NoMemoryError (MemoryError)               a tensor does not fit into memory        exit code 3
└── StorageError (OSError)                    the storage is at fault                  exit code 3
    ├── MissingFileError (FileNotFoundError)  a file that was asked for is not there
    └── NoSpaceError                          the target cannot hold the result
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import ClassVar

_SHOWN = 1000
"""Characters of one part of a message that are shown; the rest is dropped, since names come from hostile files."""


_SHOWN_VALUES = 64
"""Values in nested containers that are shown: what a hostile pickle nested has more leaves than a machine has bytes."""


def show(value: object) -> str:
    """Return a value as text, of a container and of a number no more than is read."""
    if isinstance(value, (tuple, list, dict, set, frozenset)) and _count(value, _SHOWN_VALUES) < 0:
        return f"a {type(value).__name__} of {len(value)} values"
    try:
        return str(value)
    except ValueError:  # more digits than Python prints
        return f"a number of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"


def _count(value: object, left: int) -> int:
    """Return how many more values may be shown after this one; negative where it holds too many."""
    if isinstance(value, dict):
        inner: Iterable[object] = (part for pair in value.items() for part in pair)
    elif isinstance(value, (tuple, list, set, frozenset)):
        inner = value
    else:
        return left - 1 - (len(value) // _SHOWN if isinstance(value, (str, bytes)) else 0)
    left -= 1
    for part in inner:
        if left < 0:
            break
        left = _count(part, left)
    return left


def escape(text: object) -> str:
    """Return `text` on one line: control characters, newlines and lone surrogates as backslash escapes."""
    shown = text if isinstance(text, str) else show(text)
    if len(shown) > _SHOWN:
        shown = f"{shown[:_SHOWN]}... ({len(shown)} characters)"
    if shown.isprintable():
        return shown
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in shown)


class ShardckptError(Exception):
    """Root of the tree. Its text is one line: what, where, found, expected, what to do now.

    Args:
        what: What is wrong.
        where: File, tensor, box or rank it was met at.
        found: The value that was met.
        expected: The value that was expected.
        fix: What the reader of the message can do.
    """

    exit_code: ClassVar[int] = 1

    def __init__(
        self, what: str, *, where: object = "", found: object = "", expected: object = "", fix: str = ""
    ) -> None:
        self.what, self.where, self.found, self.expected, self.fix = what, where, found, expected, fix
        text = f"{escape(where)}: {escape(what)}" if where != "" else escape(what)
        if found != "":
            text += f"; found {escape(found)}"
        if expected != "":
            text += f"; expected {escape(expected)}"
        if fix:
            text += f". {fix}"
        super().__init__(text)

    def __str__(self) -> str:
        return str(self.args[0])


class CheckpointError(ShardckptError, ValueError):
    """The checkpoint is damaged, incomplete, unsafe, or beyond what its reader knows."""


class FormatError(CheckpointError):
    """A header, manifest, archive or pickle does not follow its format."""


class TruncatedError(FormatError, EOFError):
    """A file ends before the bytes that its format promises."""


class UnsafeError(CheckpointError):
    """Reading on would run code, leave the checkpoint's folder, or exceed a safety limit."""


class UnsupportedError(CheckpointError, TypeError):
    """The content is well-formed, but of a kind that no reader here turns into arrays."""


class IncompleteError(CheckpointError, LookupError):
    """Some elements of a tensor are in no file."""


class NoCompleteCheckpoint(CheckpointError, FileNotFoundError):  # noqa: N818  (a state of the folder, not only an error)
    """The folder has steps, but none of them is complete."""


class OverlapError(CheckpointError):
    """Some elements of a tensor are claimed by two pieces."""


class ChecksumError(CheckpointError):
    """Stored bytes do not match their stored checksum."""


class PrecisionError(CheckpointError, OverflowError):
    """A finite value would become infinite in the requested dtype."""


class NoMemoryError(ShardckptError, MemoryError):
    """There is not as much memory as a tensor takes."""

    exit_code = 3


class UsageError(ShardckptError, ValueError):
    """The call asks for something that cannot be: another path, key or option is needed."""

    exit_code = 2


class SourceNotFoundError(UsageError, FileNotFoundError):
    """Nothing is stored at the source."""


class UnknownFormatError(UsageError):
    """The source exists, but no reader recognizes it."""


class TargetExistsError(UsageError, FileExistsError):
    """The target is not empty and overwriting was not asked for."""


class NameCollisionError(UsageError):
    """Two tensors would end up under one name."""


class UnknownNameError(UsageError, KeyError):
    """The checkpoint holds nothing of this name."""


class MissingTorchError(UsageError, ModuleNotFoundError):
    """The call needs torch, which is not installed."""

    name = "torch"


class AmbiguousError(UsageError, LookupError):
    """The checkpoint allows more than one reading; an option decides."""


class StateDictError(ShardckptError, RuntimeError):
    """The `state_dict` or `load_state_dict` of an object raised an exception, which is the cause of this one."""


class StorageError(ShardckptError, OSError):
    """Reading or writing failed underneath."""

    exit_code = 3


class MissingFileError(StorageError, FileNotFoundError):
    """The store holds no file of this name."""


class NoSpaceError(StorageError):
    """The target's free space cannot hold the result."""


class RankError(ShardckptError, RuntimeError):
    """A rank failed, died, or did not take part in time; raised on every rank that is left.

    Args:
        what: What is wrong, naming the rank.
        rank: The rank; -1 where it is not known.
        fix: What the reader of the message can do.
    """

    exit_code = 3

    def __init__(self, what: str, *, rank: int = -1, fix: str = "") -> None:
        self.rank = rank
        super().__init__(what, fix=fix)


def require_torch(where: str, or_else: str = "") -> None:
    """Import torch.

    Args:
        where: What needs it, for the message.
        or_else: What the caller can do instead of installing it.

    Raises:
        MissingTorchError: It is not installed.
    """
    try:
        import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":  # it is installed, and lacks a module that it needs itself
            raise
        fix = "Run pip install 'shardckpt[torch]'" + (f", or {or_else}." if or_else else ".")
        raise MissingTorchError("torch must be installed", where=where, fix=fix) from None
