"""Convert errors and signals to one line on stderr and an exit code."""

from __future__ import annotations

import functools
import io
import os
import shlex
import signal
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import NoReturn, ParamSpec

import typer

from shardckpt_cli import output

_Arguments = ParamSpec("_Arguments")


_interrupt_messages = ["no unfinished result was left"]


def on_interrupt_message(words: str) -> None:
    """Set how the message for an interrupted command ends."""
    _interrupt_messages.append(words)


class Terminated(BaseException):
    """Raised on SIGTERM; unwinds like Ctrl-C, so that unfinished work is rolled back."""


class CommandFailure(Exception):  # noqa: N818  (it only carries one)
    """Carries an error past the argument parser, which would handle it differently."""


def wrap_command(command: Callable[_Arguments, None]) -> Callable[_Arguments, None]:
    """Make a command's EOFErrors, interruptions and broken pipes reach `run_main`."""
    # A truncated checkpoint is an EOFError, which the parser would report as "Aborted" after an empty line. A closed
    # output pipe is not a failure, but the parser would exit with 1.

    @functools.wraps(command)
    def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        output.note_arguments(kwargs)
        try:
            command(*args, **kwargs)
        except (EOFError, KeyboardInterrupt, BrokenPipeError) as error:
            raise CommandFailure from error

    return run


def run_main(run: Callable[[], object]) -> NoReturn:
    """Run a command and exit with its code."""
    signal.signal(signal.SIGTERM, _terminate)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    warnings.showwarning = _print_warning
    _prepare_streams()
    sys.exit(_exit_code(run))


def _prepare_streams() -> None:
    """Make prints succeed, even to closed streams or with unencodable characters."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  (until the end of the process)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as for stderr


def _terminate(_number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated


def _print_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning as one line, without its source line."""
    output.warn([str(message)])


_INTERRUPTED = 128 + signal.SIGINT


def _exit_code(run: Callable[[], object]) -> int:
    try:
        done = _run_unwrapped(run)
    except (KeyboardInterrupt, typer.Abort):
        return _die(f"interrupted; {_interrupt_messages[-1]}", _INTERRUPTED)
    except Terminated:
        return _die(f"terminated; {_interrupt_messages[-1]}", 143)
    except BrokenPipeError:
        # the output pipe was closed; keep the interpreter from flushing into it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # noqa: BLE001  (an error that is not ours must still be one line; the traceback on request)
        return _failed(error)
    return done if isinstance(done, int) else 0


def _run_unwrapped(run: Callable[[], object]) -> object:
    try:
        done = run()
    except CommandFailure as carrier:
        assert carrier.__cause__ is not None
        raise carrier.__cause__ from None
    if done == _INTERRUPTED:  # typer returns this code for a Ctrl-C outside the command's function
        raise KeyboardInterrupt
    return done


def _failed(error: Exception) -> int:
    from shardckpt.errors import ShardckptError, UnknownFormatError, describe, describe_with_class, escape

    if isinstance(error, UnknownFormatError) and error.nearby:
        return _die(f"{error}{_suggest_command(str(error.where), error.nearby)}", error.exit_code)
    if isinstance(error, ShardckptError):
        return _die(str(error), error.exit_code)
    if hasattr(error, "format_message"):  # typer's own errors; their class depends on click's version
        message = " ".join(error.format_message().split())
        return _die(f"{message}{'' if message.endswith(('.', '?')) else '.'} See `{_find_help(error)}`", 2)
    if os.environ.get("SHARDCKPT_TRACEBACK"):
        raise error
    if isinstance(error, MemoryError):
        return _die("out of memory; lower --max-memory", 3)
    if isinstance(error, OSError):
        return _die(escape(describe(error)), 3)
    return _die(
        f"{escape(describe_with_class(error))}. This is a fault in shardckpt; SHARDCKPT_TRACEBACK=1 shows where", 1
    )


def _find_help(error: Exception) -> str:
    """Return the command that shows the help for a wrong command line, for its verb if that is known."""
    context = getattr(error, "ctx", None)
    verb = f"{context.info_name} " if context is not None and context.parent is not None else ""
    return f"shardckpt {verb}--help"


def _suggest_command(given: str, meant: str) -> str:
    """Return a sentence with the typed command and another path; empty if the path was typed in another form."""
    from shardckpt.errors import escape

    words = [meant if word.rstrip("/") == given.rstrip("/") else word for word in sys.argv[1:]]
    return f" Type `{escape(shlex.join(['shardckpt', *words]))}`" if meant in words else ""


def _die(line: str, code: int) -> int:
    print(f"shardckpt: {output.to_shell(line)}", file=sys.stderr)
    return code
