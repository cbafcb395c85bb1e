"""`load`: a checkpoint of any format into what a job holds, on any number of ranks; or into a nest of tensors."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from shardckpt.checkpoint.collecting import collector_at_rest
from shardckpt.checkpoint.save import star_of
from shardckpt.checkpoint.saved import Moved, Saved, Verify
from shardckpt.checkpoint.template import Fitting, Policy, fit
from shardckpt.errors import UsageError, escape
from shardckpt.groups import Star
from shardckpt.manifest import dotted
from shardckpt.state import StateMismatchError

_SHOWN_CHARACTERS = 40_000


class MismatchError(StateMismatchError, UsageError):
    """A checkpoint does not fit what it is loaded into.

    Args:
        problems: Everything that is wrong, a sentence each.
        shown: The same in fewer words, for the message.

    Attributes:
        problems: As given.
    """

    def __init__(self, problems: Sequence[str], shown: Sequence[str] = ()) -> None:
        self.problems = tuple(problems)
        self._shown = tuple(shown or problems)
        super().__init__(
            f"the checkpoint does not fit in {len(problems)} places",
            fix="Nothing was changed. Names may differ with strict=False, types with cast=True.",
        )

    def __str__(self) -> str:
        listed, length = [], 0
        for problem in map(escape, self._shown):
            length += len(problem)
            if length > _SHOWN_CHARACTERS:
                break
            listed.append(problem)
        more = f"; and {len(self._shown) - len(listed)} more" if len(listed) < len(self._shown) else ""
        return f"{self.what}: {'; '.join(listed)}{more}. {self.fix}"


def load(
    state: Any,
    path: Any = None,
    *,
    strict: bool = True,
    partial: Sequence[str] | bool = False,
    rules: Mapping[str, str] | None = None,
    cast: bool = False,
    verify: Verify = "read",
    base: Moved | bool | None = None,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """Load a checkpoint: `load(state, path)` into what a job holds, `load(path)` as the nest that was saved.

    With a state it is collective; each rank reads the elements that it holds, whoever wrote them, and no others. What
    can be seen from the manifest is checked on every rank before anything is changed: names, shapes, types.

    Args:
        state: As for `save`: models, optimizers (also new ones), objects and tensors are filled in place,
            plain values in its dicts replaced. Without `path`, where the checkpoint lies.
        path: Where the checkpoint lies: our own format, or any other that can be read.
        strict: Names that are missing or unexpected are errors; otherwise they are left alone.
        partial: True: what the checkpoint has besides is left alone. Or globs of dotted names: nothing else is loaded,
            or missed.
        rules: Regular expressions to what stands for them, for every key of the checkpoint's names.
        cast: Convert where a type differs from the saved one; otherwise that is an error.
        verify: `"read"`: blocks that are read are checked against their hashes; `"full"`: all blocks are; False: none.
        base: Where a folder lies now that the checkpoint refers to and that was moved: a path for the one that is not
            beside it, or a dict from what it calls them. False: leave alone what lies in other folders, since the state
            has it already.
        group: The ranks; all where None.

    Returns:
        The state that was given; without one the nest, with tensors on the CPU.

    Raises:
        StateMismatchError: The checkpoint does not fit; the message lists everything that is wrong.
        SourceNotFoundError: Nothing lies there.
        CheckpointError: It is damaged, incomplete, or cannot be read.
        RankError: Another rank failed or is gone.
        StorageError: The storage failed.
    """
    if path is None:
        with collector_at_rest():
            saved = Saved(str(state), verify, rules, _moved(base))
            saved.expect_most()
            if verify == "full":
                saved.check_blocks()
            return saved.materialised(saved.nest)
    policy = Policy(strict, globs_of(partial), cast, is_own_only=base is False)
    with collector_at_rest():
        _load_into(state, _Source(str(path), verify, rules, _moved(base)), policy, star_of(group))
    return state


def _moved(base: Moved | bool | None) -> str | Mapping[str, str]:
    """Return where bases lie now.

    Raises:
        UsageError: The argument means nothing.
    """
    if base is None or isinstance(base, bool):
        return ""
    return base if isinstance(base, Mapping) else os.fspath(base)


class _Source(NamedTuple):
    """What is loaded, and how it is read: as `Saved` takes it."""

    path: str
    verify: Verify
    rules: Mapping[str, str] | None
    moved: str | Mapping[str, str]


def _load_into(state: Any, source: _Source, policy: Policy, star: Star) -> None:
    fitting = Fitting()
    said: bytes | Exception = b""
    try:
        saved = Saved(*source)
        if policy.partial is None:
            saved.expect_most()
        if source.verify == "full":
            saved.check_blocks(star.rank, star.size, own_only=policy.is_own_only)
        fitting = fit(state, saved, policy, star.rank, star.size)
        _require_fit(fitting)
    except Exception as error:  # noqa: BLE001  (told to every rank, then raised)
        said = error
    star.consult(f"fitting {source.path}", said, _silent)
    try:
        values = [(saved.materialised(nest), put) for nest, put in fitting.values]
        saved.fill([(wanted.entry, wanted.array) for wanted in fitting.arrays])
        for finish in fitting.after:
            finish()
        for value, put in values:
            put(value)
    except Exception as error:  # noqa: BLE001  (as above)
        said = error
    star.consult(f"loading {source.path}", said, _silent)


def globs_of(partial: Any) -> tuple[str, ...] | None:
    """Return the globs that `partial` means; None for everything, the rest of the checkpoint included.

    Raises:
        UsageError: It is neither True, False nor names.
    """
    if partial is None or isinstance(partial, bool):
        return ("*",) if partial else None
    globs = (partial,) if isinstance(partial, str) else tuple(partial) if isinstance(partial, Iterable) else (partial,)
    if not all(isinstance(glob, str) for glob in globs):
        raise UsageError(
            "`partial` is neither True nor names", found=partial, expected="True, or globs of dotted names"
        )
    return globs


def _silent(told: list[bytes]) -> list[bytes]:
    return told


def _require_fit(fitting: Fitting) -> None:
    if fitting.problems or fitting.unexpected:
        listed = [f"unexpected: {dotted(path)}" for path in fitting.unexpected]
        raise MismatchError([*fitting.problems, *listed], [*fitting.problems, *fitting.unexpected_shown()])
