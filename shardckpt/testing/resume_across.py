"""`prove_resume_across`: run a training script under torchrun at other sizes, and compare its steps."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from shardckpt.divergence import Divergence
from shardckpt.errors import UsageError
from shardckpt.offline.run_history.prove import prove
from shardckpt.witness.records.resumes import Resume

ROOT = "{root}"  # in a script's arguments: stands for the run's folder
_LAUNCH = "SHARDCKPT_LAUNCH"  # environment variable that marks the processes of one launch
_GRACE = 10.0  # seconds that torchrun gets to end its ranks

_SHOWN_CHARACTERS = 4000


class ScriptError(AssertionError):
    """The training script failed or timed out; the message ends with its output."""


@dataclass(frozen=True, slots=True)
class ResumeAcrossReport:
    """Result of `prove_resume_across`.

    Attributes:
        step: The resumed step.
        saved_on: Number of ranks that saved it.
        resumes: The resumes, in size order.
    """

    step: int
    saved_on: int
    resumes: tuple[Resume, ...]

    @property
    def ok(self) -> bool:
        """Whether every resume was compared to the end without a difference."""
        return all(resume.verdict == "proven" for resume in self.resumes)

    @property
    def divergence(self) -> Divergence | None:
        """The first difference; None without one."""
        return next((resume.divergence for resume in self.resumes if resume.divergence is not None), None)

    def __str__(self) -> str:
        found = next((resume for resume in self.resumes if resume.verdict != "proven"), None)
        if found is None:
            sizes = ", ".join(str(resume.rank_count) for resume in self.resumes)
            return f"the resume of step {self.step} is proven: saved on {self.saved_on} ranks, resumed on {sizes}"
        if found.divergence is not None:
            return f"the resume of step {self.step} on {found.rank_count} ranks diverges: {found.divergence}"
        return (
            f"the resume of step {self.step} on {found.rank_count} ranks is not proven: {found.compared} of "
            f"{len(found.steps)} recorded steps were compared. The script has to train them, and to call `ck.witness`"
        )


def prove_resume_across(
    script: str | os.PathLike[str],
    worlds: Sequence[int] = (2, 3, 1),
    *,
    arguments: Sequence[str] = (ROOT,),
    timeout: float = 300.0,
) -> ResumeAcrossReport:
    """Run a training script under torchrun, resume it at other sizes, and compare its steps with the record.

    The script uses `Checkpointer(root, witness=...)`, restores the newest step, and trains to a fixed step, at least
    one after its last save. It runs at the first size in an empty folder, then at each other size in a copy. At other
    sizes, all ranks together must see the recorded samples, and the mean loss must agree within the tolerance for
    reordered sums.

    Args:
        script: Path to the script.
        worlds: Number of ranks that save, then the numbers that resume.
        arguments: Arguments for the script; `{root}` in them is the run's folder.
        timeout: Seconds that the script may take at each size.

    Returns:
        The resumes, each with its first difference.

    Raises:
        UsageError: An argument has an invalid value, or the script left no step with a record.
        AssertionError: The script failed or timed out: a `ScriptError` with the failed rank's output. No process is
            left.

    Examples:
        >>> report = prove_resume_across("train.py", worlds=(2, 3, 1))  # doctest: +SKIP
        >>> assert report.ok, report  # doctest: +SKIP
    """
    _require_valid(script, worlds, timeout)
    with tempfile.TemporaryDirectory(prefix="shardckpt-resume-") as folder:
        saved = Path(folder, "saved")
        saved.mkdir()
        _launch(script, worlds[0], arguments, saved, timeout)
        proof = prove(saved)
        if not proof.steps or not proof.steps[-1].recorded:
            raise UsageError(
                "the script left no step with recorded training steps",
                where=os.fspath(script),
                fix="Save, and train at least one step after the last save with `Checkpointer(witness=...)`.",
            )
        number = proof.steps[-1].number
        resumes = []
        for at, world in enumerate(worlds[1:]):
            root = Path(folder, f"resumed-{at}-on-{world}")
            shutil.copytree(saved, root)
            resumes.append(_resume(script, world, arguments, root, timeout, number))
    return ResumeAcrossReport(number, worlds[0], tuple(resumes))


def _require_valid(script: str | os.PathLike[str], worlds: Sequence[int], timeout: float) -> None:
    if not Path(script).is_file():
        raise UsageError("`script` must be a file", found=os.fspath(script))
    if len(worlds) < 2 or any(type(world) is not int or world < 1 for world in worlds):
        raise UsageError("`worlds` must be two or more positive integers", found=repr(worlds))
    if not timeout > 0:
        raise UsageError("`timeout` must be a positive number of seconds", found=repr(timeout))


def _resume(
    script: str | os.PathLike[str], world: int, arguments: Sequence[str], root: Path, timeout: float, number: int
) -> Resume:
    """Resume a step at one size. A script that ends with a divergence has not failed."""
    earlier = {resume.id for resume in _list_resumes(root, number)}
    failure: ScriptError | None = None
    try:
        _launch(script, world, arguments, root, timeout)
    except ScriptError as error:
        failure = error
    made = [resume for resume in _list_resumes(root, number) if resume.id not in earlier]
    if failure is not None and not (made and made[-1].divergence is not None):
        raise failure
    if not made:
        raise UsageError(
            f"the script did not compare a resume of step {number} on {world} ranks",
            where=os.fspath(script),
            fix="Restore the newest step with `Checkpointer(witness=...)` in it, and keep that step.",
        )
    return made[-1]


def _list_resumes(root: Path, number: int) -> tuple[Resume, ...]:
    return next((step.resumes for step in prove(root).steps if step.number == number), ())


def _launch(script: str | os.PathLike[str], world: int, arguments: Sequence[str], root: Path, timeout: float) -> None:
    """Run the script on ranks. Raises ScriptError unless all succeed; leaves no process."""
    launch = uuid.uuid4().hex
    environment = {"OMP_NUM_THREADS": "1", **os.environ, _LAUNCH: launch}
    given = [os.fspath(script), *(argument.replace(ROOT, str(root)) for argument in arguments)]
    with tempfile.TemporaryDirectory(prefix="shardckpt-logs-") as logs:
        output = Path(logs, "torchrun.txt")
        with output.open("wb") as written, _ended(launch):
            process = subprocess.Popen(  # noqa: S603  (the caller's own script)
                [*_build_command(world, logs), *given],
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=subprocess.STDOUT,
                env=environment,
            )
            code = _wait(process, timeout)
        if code != 0:
            what = f"did not end within {timeout:g} s" if code is None else "failed"
            text = _read_output(Path(logs), output)
            raise ScriptError(f"{os.fspath(script)} {what} on {world} ranks\n{text}")


def _build_command(world: int, logs: str) -> list[str]:
    options = ["--standalone", f"--nproc-per-node={world}", f"--log-dir={logs}", "--redirects=3"]
    return [sys.executable, "-m", "torch.distributed.run", *options]


def _wait(process: subprocess.Popen[bytes], timeout: float) -> int | None:
    """Return the exit code; None after a timeout, which ends the process."""
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
            process.kill()
            process.wait()


@contextmanager
def _ended(launch: str) -> Iterator[None]:
    """End all processes of a launch: torchrun puts its ranks into their own sessions."""
    try:
        yield
    finally:
        wanted = f"{_LAUNCH}={launch}".encode()
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)


def _read_output(logs: Path, output: Path) -> str:
    """Return the end of the first failed rank's output, or of torchrun's."""
    of_torchrun = output.read_text(encoding="utf-8", errors="replace")
    cause = re.search(r"Root Cause.*?local_rank: (\d+)", of_torchrun, re.DOTALL)
    ranks: Mapping[str, Path] = {path.parent.name: path for path in sorted(logs.glob("**/stderr.log"))}
    chosen = [cause[1]] if cause is not None and cause[1] in ranks else list(ranks)
    texts = [
        f"rank {rank}: {text}"
        for rank in chosen
        if (text := ranks[rank].read_text(encoding="utf-8", errors="replace").strip()[-_SHOWN_CHARACTERS:])
    ]
    return "\n".join(texts) or of_torchrun.strip()[-_SHOWN_CHARACTERS:]
