"""Every error is one line, is caught as the builtin it resembles, and has an exit code."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardckpt
from shardckpt import errors
from shardckpt.divergence import Divergence
from shardckpt.errors import (
    FormatError,
    RankError,
    ShardckptError,
    describe,
    describe_missing,
    describe_with_class,
    escape,
)

OWN_ARGUMENTS = {
    errors.MismatchError: errors.MismatchError(["a is missing"], note="Look."),
    errors.ResumeDivergence: errors.ResumeDivergence(Divergence("batch", 3, "x", "it differs", "Mend it."), "run"),
}
"""Classes that take other arguments than a text, with an example."""

CLASSES = sorted(
    (c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, ShardckptError)),
    key=lambda c: c.__name__,
)
EXIT_CODES = {
    errors.NoMemoryError: 3,
    errors.CheckpointError: 1,
    errors.StateDictError: 1,
    errors.UsageError: 2,
    errors.StorageError: 3,
    errors.RankError: 3,
    errors.PoisonedError: 3,
    errors.ServerError: 3,
    errors.StateMismatchError: 1,
    errors.ResumeDivergence: 1,
}
BUILTINS = {
    errors.TruncatedError: EOFError,
    errors.UnsupportedError: TypeError,
    errors.IncompleteError: LookupError,
    errors.NoCompleteCheckpoint: FileNotFoundError,
    errors.PrecisionError: OverflowError,
    errors.SourceNotFoundError: FileNotFoundError,
    errors.TargetExistsError: FileExistsError,
    errors.UnknownNameError: KeyError,
    errors.MissingPackageError: ModuleNotFoundError,
    errors.MissingTorchError: ModuleNotFoundError,
    errors.AmbiguousError: LookupError,
    errors.MissingFileError: FileNotFoundError,
    errors.StorageError: OSError,
    errors.CheckpointError: ValueError,
    errors.UsageError: ValueError,
    errors.RankError: RuntimeError,
    errors.StateDictError: RuntimeError,
    errors.StateMismatchError: RuntimeError,
}


@given(st.text(), st.text(), st.text(), st.text())
def test_a_message_is_one_printable_line(what: str, where: str, found: str, expected: str) -> None:
    text = str(FormatError(what, where=where, found=found, expected=expected, fix="Do this."))
    assert text.isprintable()
    assert text.endswith("Do this.")


@given(st.text())
def test_escaping_twice_is_escaping_once(text: str) -> None:
    once = escape(text)
    assert once.isprintable()
    if len(once) <= 1000:
        assert escape(once) == once
    if text.isprintable() and len(text) <= 1000:
        assert once == text


def test_missing_files_are_in_singular_or_plural() -> None:
    assert describe_missing(["a.bin"]) == "the file a.bin is missing"
    assert describe_missing(["a.bin", "b.bin"]) == "2 files are missing, the first is a.bin"


def test_hostile_names_are_escaped_and_cut() -> None:
    assert escape("a\nb\r\x1b[2J\u2028\ud800") == "a\\nb\\r\\x1b[2J\\u2028\\ud800"
    long = escape("x" * 10**6)
    assert len(long) < 1100
    assert "1000000 characters" in long


def test_a_message_says_what_where_found_expected_and_what_to_do() -> None:
    error = FormatError("a header is too long", where="a.bin", found="9 bytes", expected="8", fix="Copy it again.")
    assert str(error) == "a.bin: a header is too long; found 9 bytes; expected 8. Copy it again."
    assert (error.what, error.where, error.found, error.expected) == ("a header is too long", "a.bin", "9 bytes", "8")


def test_a_value_of_zero_is_shown() -> None:
    assert str(FormatError("short", found=0, expected=0)) == "short; found 0; expected 0"


@pytest.mark.parametrize("kind", CLASSES, ids=lambda c: c.__name__)
def test_every_class_has_the_exit_code_of_its_branch(kind: type[ShardckptError]) -> None:
    branch = next((b for b in EXIT_CODES if issubclass(kind, b)), None)
    assert kind is ShardckptError or branch is not None, "every error says who is at fault"
    if branch is not None:
        assert kind.exit_code == EXIT_CODES[branch]


@pytest.mark.parametrize(("kind", "builtin"), BUILTINS.items(), ids=lambda c: c.__name__)
def test_errors_are_caught_as_builtins(kind: type[ShardckptError], builtin: type[Exception]) -> None:
    with pytest.raises(builtin, match=r"^it broke"):
        raise kind("it broke")


def test_os_errors_keep_their_text() -> None:
    """OSError formats itself from errno where it can; ours must not."""
    assert str(errors.StorageError("disk", where="a", found=5)) == "a: disk; found 5"
    assert str(errors.NoSpaceError("full")) == "full"


def test_every_class_is_drawn_in_the_tree() -> None:
    drawn = errors.__doc__ or ""
    assert [c.__name__ for c in CLASSES if c.__name__ not in drawn] == []


def test_a_rank_error_names_its_rank() -> None:
    assert RankError("rank 3 is gone", rank=3).rank == 3
    assert RankError("somebody is gone").rank == -1


@pytest.mark.parametrize("kind", CLASSES, ids=lambda c: c.__name__)
def test_an_error_survives_a_process_boundary(kind: type[ShardckptError]) -> None:
    error = OWN_ARGUMENTS.get(kind) or kind("it broke", fix="Mend it.")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error)


@pytest.mark.parametrize("name", ["save", "async_save", "Checkpointer", "prune"])
def test_an_unknown_keyword_is_named_with_its_function(name: str, tmp_path: Path) -> None:
    positional = ({}, tmp_path / "step") if "save" in name else (tmp_path,)
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument 'keep_lst'$"):
        getattr(shardckpt, name)(*positional, keep_lst=1)
    assert not (tmp_path / "step").exists()


def test_an_error_without_a_text_is_described_by_its_class() -> None:
    assert describe(OSError()) == "OSError" and describe(OSError("disk")) == "disk"
    assert describe_with_class(KeyError()) == "KeyError" and describe_with_class(OSError("disk")) == "OSError: disk"
