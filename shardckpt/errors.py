"""Errors that a caller can catch, and their one-line messages.

ShardckptError
├── CheckpointError (ValueError)              the checkpoint is at fault               exit code 1
│   ├── FormatError                           a header, manifest or pickle cannot be read
│   │   └── TruncatedError (EOFError)         bytes that should be there are not
│   ├── UnsafeError                           reading it would run code or leave its folder
│   ├── UnsupportedError (TypeError)          valid, but of a kind that no reader supports
│   ├── IncompleteError (LookupError)         no file contains some elements
│   ├── NoCompleteCheckpoint (FileNotFoundError)  there are steps, but none can be loaded
│   ├── OverlapError                          two files contain the same elements
│   ├── ChecksumError                         bytes differ from their stored checksum
│   └── PrecisionError (OverflowError)        a cast would lose more than rounding
├── UsageError (ValueError)                   the call is at fault                     exit code 2
│   ├── SourceNotFoundError (FileNotFoundError)
│   ├── UnknownFormatError                    no reader recognizes the source
│   ├── TargetExistsError (FileExistsError)
│   ├── NameCollisionError                    two tensors would get one name
│   ├── UnknownNameError (KeyError)           the checkpoint has no entry of that name
│   ├── MissingPackageError (ModuleNotFoundError)  the module needs a package that is not installed
│   │   └── MissingTorchError                 the call needs torch, which is not installed
│   ├── PublisherReplacedError                a later publisher writes the stream
│   └── AmbiguousError (LookupError)          several answers are possible; the message names the option that decides
├── StateDictError (RuntimeError)             a method of a user's object failed       exit code 1
├── RankError (RuntimeError)                  another rank failed or is gone           exit code 3
├── NoMemoryError (MemoryError)               a tensor does not fit into memory        exit code 3
├── StateMismatchError (RuntimeError)         a state does not fit the model
│   └── MismatchError (UsageError)            a checkpoint does not fit the state to load
├── PoisonedError (RuntimeError)              weights were changed in part          exit code 3
├── ServerError (RuntimeError)                a server that loads weights did not      exit code 3
├── ResumeDivergence (RuntimeError)           the resumed run is not the saved one
└── StorageError (OSError)                    the storage is at fault                  exit code 3
    ├── MissingFileError (FileNotFoundError)  a requested file does not exist
    └── NoSpaceError                          the target has too little space for the result

Errors of the engine are in `shardckpt.core.errors`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from shardckpt.divergence import Divergence

# Maximum characters in one part of a message; longer texts are truncated, since names come from hostile files.
__all__ = [
    "AmbiguousError",
    "CheckpointError",
    "ChecksumError",
    "FormatError",
    "IncompleteError",
    "MismatchError",
    "MissingFileError",
    "MissingPackageError",
    "MissingTorchError",
    "NameCollisionError",
    "NoCompleteCheckpoint",
    "NoMemoryError",
    "NoSpaceError",
    "OverlapError",
    "PoisonedError",
    "PrecisionError",
    "PublisherReplacedError",
    "RankError",
    "ResumeDivergence",
    "ServerError",
    "ShardckptError",
    "SourceNotFoundError",
    "StateDictError",
    "StateMismatchError",
    "StorageError",
    "TargetExistsError",
    "TruncatedError",
    "UnknownFormatError",
    "UnknownNameError",
    "UnsafeError",
    "UnsupportedError",
    "UsageError",
]

_SHOWN_NAMES = 10
_SHOWN_CHARACTERS = 40_000
_SHOWN = 1000


# Maximum values shown from nested containers: a hostile pickle can have more leaves than memory has bytes.
_SHOWN_VALUES = 64


def show(value: object) -> str:
    """Return a value as text; long containers and numbers are truncated."""
    if isinstance(value, (tuple, list, dict, set, frozenset)) and _count(value, _SHOWN_VALUES) < 0:
        return f"a {type(value).__name__} of {len(value)} values"
    try:
        return str(value)
    except ValueError:  # more digits than Python prints
        return f"a number of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"


def _count(value: object, left: int) -> int:
    """Return how many more values may be shown; negative if there are too many."""
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


def describe_missing(files: Sequence[str]) -> str:
    """Return a clause for one or more missing files: `the file model.bin is missing`."""
    if len(files) == 1:
        return f"the file {files[0]} is missing"
    return f"{len(files)} files are missing, the first is {files[0]}"


def escape(text: object) -> str:
    """Return `text` on one line, with control characters, newlines and lone surrogates as backslash escapes."""
    shown = text if isinstance(text, str) else show(text)
    if len(shown) > _SHOWN:
        shown = f"{shown[:_SHOWN]}... ({len(shown)} characters)"
    if shown.isprintable():
        return shown
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in shown)


def describe(error: BaseException) -> str:
    """Return an error's text, or its class if it has none."""
    return str(error) or type(error).__name__


def describe_with_class(error: BaseException) -> str:
    """Return an error's class and its text, if it has one."""
    name, text = type(error).__name__, str(error)
    return f"{name}: {text}" if text else name


class ShardckptError(Exception):
    """Root of the error classes, with a one-line text.

    The text contains what, where, found, expected, fix.

    Args:
        what: Description of the error.
        where: File, tensor, box or rank of the error.
        found: Actual value.
        expected: Expected value.
        fix: Action that the reader of the message can take.
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
    """The checkpoint is damaged, incomplete, unsafe, or not supported by its reader."""


class FormatError(CheckpointError):
    """A header, manifest, archive or pickle does not follow its format."""


class TruncatedError(FormatError, EOFError):
    """A file ends before the bytes that its format promises."""

    @classmethod
    def from_size(cls, where: object, size: int, needed: int) -> TruncatedError:
        """Return the error for a file that is too short.

        Args:
            where: Path or URL of the file.
            size: Its size in bytes.
            needed: The least size in bytes that it must have.
        """
        return cls(
            "the file ends early",
            where=where,
            found=f"{size} bytes",
            expected=f"at least {needed}",
            fix="Copy the file again, or restore it from the training run.",
        )


class UnsafeError(CheckpointError):
    """Reading would run code, leave the checkpoint's folder, or exceed a safety limit."""


class UnsupportedError(CheckpointError, TypeError):
    """The content is well-formed, but no reader supports its kind."""


class IncompleteError(CheckpointError, LookupError):
    """No file contains some elements of a tensor."""


class NoCompleteCheckpoint(CheckpointError, FileNotFoundError):  # noqa: N818  (a state of the folder, not only an error)
    """The folder has steps, but none of them is complete."""


class OverlapError(CheckpointError):
    """Two pieces contain the same elements of a tensor."""


class ChecksumError(CheckpointError):
    """Stored bytes do not match their stored checksum."""


class PrecisionError(CheckpointError, OverflowError):
    """A finite value would become infinite in the requested dtype."""


class NoMemoryError(ShardckptError, MemoryError):
    """The memory is too small for a tensor."""

    exit_code = 3

    @classmethod
    def from_array(cls, where: object, nbytes: int, dtype: str, shape: Sequence[int], fix: str) -> NoMemoryError:
        """Return the error for an array that cannot be allocated.

        Args:
            where: Name of the array.
            nbytes: Its size in bytes.
            dtype: Dtype of its elements.
            shape: Shape in elements.
            fix: Action that the reader of the message can take.
        """
        what = "this array does not fit into the memory of this machine"
        return cls(what, where=where, found=f"{nbytes} bytes for {dtype} {list(shape)}", fix=fix)


class UsageError(ShardckptError, ValueError):
    """The call is not possible as given: another path, key or option is needed."""

    exit_code = 2


class SourceNotFoundError(UsageError, FileNotFoundError):
    """Nothing is stored at the source."""


class UnknownFormatError(UsageError):
    """The source exists, but no reader recognizes it.

    Args:
        what: As for `ShardckptError`; so are `where`, `found`, `expected` and `fix`.
        nearby: Path or URL of the checkpoint that is meant, as far as it is known.

    Attributes:
        nearby: As given.
    """

    def __init__(
        self,
        what: str,
        *,
        where: object = "",
        found: object = "",
        expected: object = "",
        fix: str = "",
        nearby: str = "",
    ) -> None:
        self.nearby = nearby
        super().__init__(what, where=where, found=found, expected=expected, fix=fix)


class TargetExistsError(UsageError, FileExistsError):
    """The target is not empty, and overwriting was not requested."""


class NameCollisionError(UsageError):
    """Two tensors would get the same name."""


class UnknownNameError(UsageError, KeyError):
    """The checkpoint has no entry of this name."""


class MissingPackageError(UsageError, ModuleNotFoundError):
    """The module needs a package that is not installed."""


class MissingTorchError(MissingPackageError):
    """The call needs torch, which is not installed."""

    name = "torch"


class AmbiguousError(UsageError, LookupError):
    """The checkpoint allows more than one reading; an option decides."""


class PublisherReplacedError(UsageError):
    """A later publisher writes this stream of weights."""


class PoisonedError(ShardckptError, RuntimeError):
    """A version was applied in part, so the weights are of no version: only a full version replaces them."""

    exit_code = 3


class ServerError(ShardckptError, RuntimeError):
    """A server that loads weights refused a call, or did not answer in time."""

    exit_code = 3


class StateDictError(ShardckptError, RuntimeError):
    """The `state_dict` or `load_state_dict` of an object raised an exception.

    That exception is the cause of this error.
    """


class StorageError(ShardckptError, OSError):
    """The storage failed to read or write."""

    exit_code = 3


class MissingFileError(StorageError, FileNotFoundError):
    """The store has no file of this name."""


class NoSpaceError(StorageError):
    """The target does not have enough free space for the result."""


class RankError(ShardckptError, RuntimeError):
    """A rank failed, died, or was too late; raised on every remaining rank.

    Args:
        what: Description of the error, with the rank.
        rank: Global rank that failed; -1 if unknown.
        fix: Action that the reader of the message can take.
    """

    exit_code = 3

    def __init__(self, what: str, *, rank: int = -1, fix: str = "") -> None:
        self.rank = rank
        super().__init__(what, fix=fix)


class StateMismatchError(ShardckptError, RuntimeError):
    """A state does not fit the model: names, shapes, dtypes or ranks differ."""


class MismatchError(StateMismatchError, UsageError):
    """A checkpoint does not fit the state to load.

    Args:
        problems: All mismatches, one sentence each.
        shown: Shorter version of the problems for the message; empty to use `problems`.
        besides: Names that only the checkpoint has.
        note: Another sentence for the message.

    Attributes:
        problems: All mismatches on this rank, one sentence each; empty if another rank has them.
    """

    def __init__(
        self, problems: Sequence[str], shown: Sequence[str] = (), besides: Sequence[str] = (), note: str = ""
    ) -> None:
        self.problems = tuple(problems)
        self._shown = tuple(shown or problems)
        fix = "Nothing was changed. Names may differ with strict=False, types with cast=True."
        if besides:
            names = ", ".join(map(escape, besides[:_SHOWN_NAMES])) + (", ..." if len(besides) > _SHOWN_NAMES else "")
            fix += f" The checkpoint also holds {names}: to load only what you passed, ignore_extra=True."
        if note:
            fix += f" {note}"
        super().__init__(f"the checkpoint does not fit in {len(problems)} place{'s' * (len(problems) != 1)}", fix=fix)

    @classmethod
    def on_other_rank(cls, text: str) -> MismatchError:
        """Return the error for a mismatch on another rank, given its text; `problems` is empty.

        Args:
            text: The other rank's error, and the rank.
        """
        error = cls(())
        ShardckptError.__init__(error, text)
        return error

    def __str__(self) -> str:
        if not self._shown:
            return super().__str__()
        listed, length = [], 0
        for problem in map(escape, self._shown):
            length += len(problem)
            if length > _SHOWN_CHARACTERS:
                break
            listed.append(problem)
        more = f"; and {len(self._shown) - len(listed)} more" if len(listed) < len(self._shown) else ""
        return f"{self.what}: {'; '.join(listed)}{more}. {self.fix}"


class ResumeDivergence(ShardckptError, RuntimeError):  # noqa: N818  (a finding, not only an error)
    """The resumed run is not the run that was saved.

    Args:
        divergence: The first difference.
        where: Path or URL of the restored step.

    Attributes:
        divergence: The first difference.
    """

    def __init__(self, divergence: Divergence, where: str) -> None:
        self.divergence = divergence
        super().__init__(f"the resumed run diverges: {divergence.sentence}", where=where, fix=divergence.fix)

    def __reduce__(self) -> tuple[type[ResumeDivergence], tuple[object, ...]]:
        return type(self), (self.divergence, self.where)


def require_keywords(function: str, given: Iterable[str], known: Container[str]) -> None:
    """Raise Python's TypeError unless a function has all keyword arguments of a call."""
    if unknown := [name for name in given if name not in known]:
        raise TypeError(f"{function}() got an unexpected keyword argument {min(unknown)!r}")


def require_bools(**arguments: object) -> None:
    """Raise UsageError, with the name of the argument, unless all arguments are bools."""
    for name, value in arguments.items():
        if not isinstance(value, bool):
            raise UsageError(f"`{name}` is neither True nor False", found=repr(value))


def require_torch(where: str, or_else: str = "") -> None:
    """Import torch, or raise MissingTorchError with instructions to install it or to do `or_else`."""
    if is_missing("torch"):
        fix = "Run pip install 'shardckpt[torch]'" + (f", or {or_else}." if or_else else ".")
        raise MissingTorchError("torch must be installed", where=where, fix=fix)


def require_packages(where: str, *packages: str, install: str) -> None:
    """Import packages, or raise MissingPackageError with instructions to install the first missing one."""
    for package in packages:
        if is_missing(package):
            kind = MissingTorchError if package == "torch" else MissingPackageError
            error = kind(f"{package} must be installed", where=where, fix=f"Run pip install {install}.")
            error.name = package
            raise error


def is_missing(package: str) -> bool:
    """Import a package; return True if it is not installed. A missing dependency of its own is an error."""
    try:
        import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:  # it is installed, but one dependency is missing
            raise
        return True
    return False
