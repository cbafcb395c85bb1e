"""`prove_resume`: a drill that saves, trains, restores and trains again."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist

from shardckpt.checkpoint.load.load import load
from shardckpt.checkpoint.save.save import save
from shardckpt.divergence import Divergence
from shardckpt.encodings import typed_json
from shardckpt.errors import ResumeDivergence, UsageError, require_bools
from shardckpt.events.warn_user import warn_user
from shardckpt.notebook import Result
from shardckpt.ranks.linked_group import LinkedGroup
from shardckpt.ranks.process_group import get_ranks
from shardckpt.storage.resolve_url import open_store, split
from shardckpt.witness.digests import digest_batch, digest_random_states
from shardckpt.witness.environment import describe_environment
from shardckpt.witness.rank_message import RankStep, encode_rank_step, merge_rank_steps, read_float
from shardckpt.witness.reachable import digest_reachable
from shardckpt.witness.records.step_records import NO_FLOAT, Observation, StepRecord, WitnessRecord
from shardckpt.witness.records.verdict import find_divergence
from shardckpt.witness.state_digests import FirstUse, StateReader
from shardckpt.witness.trained_objects import find_trained_objects

# One training step: returns None, the loss, or a dict with some of `loss`, `grad_norm` and `batch`.
TrainStep = Callable[[], Any]

_RESULTS = {"loss", "grad_norm", "batch"}


@dataclass(frozen=True, slots=True, repr=False)
class ResumeReport(Result):
    """Result of `prove_resume`, equal on all ranks.

    Attributes:
        path: Checkpoint path or URL.
        steps: How many steps were trained twice.
        divergence: The first difference the second time; None if all bits are equal.
        missing: Values that training changed and the load did not restore, with their types, as far as the step's
            function shows them.
        is_repeatable: Whether a third time was equal to the second; None if it was not needed. If not, a step is not
            deterministic.
    """

    path: str
    steps: int
    divergence: Divergence | None
    missing: tuple[str, ...]
    is_repeatable: bool | None = None

    @property
    def ok(self) -> bool:
        """Whether all bits are equal."""
        return self.divergence is None

    def __str__(self) -> str:
        if self.divergence is None:
            return f"the resume is proven: {self.steps} steps after {self.path} are equal, bit for bit"
        missing = f" Not restored: {', '.join(self.missing)}." if self.missing else ""
        noise = (
            " Two runs from the same state differ: a step is not deterministic." if self.is_repeatable is False else ""
        )
        return f"the resume diverges: {self.divergence}.{missing}{noise}"


def prove_resume(
    train_step: TrainStep,
    state: Any,
    path: str | os.PathLike[str],
    *,
    steps: int = 2,
    overwrite: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> ResumeReport:
    """Save a state, train, restore it in place, train again, and compare all bits. Collective.

    Afterwards the state is as after the steps: if the resume is proven, training may continue from there. The
    checkpoint stays.

    Args:
        train_step: Function that trains one step, and gets its own batch. It returns None, the loss, or a dict with
            some of `loss`, `grad_norm` and `batch`, which are compared too.
        state: As for `shardckpt.save` and `load`: all that a resume needs.
        path: Path or URL to save the checkpoint to.
        steps: How many steps to train each time.
        overwrite: Replace an existing checkpoint.
        process_group: Ranks that train; None for all ranks.

    Returns:
        The first difference, and values that were not restored.

    Raises:
        UsageError: An argument has an invalid value; `train_step` returns something else, or it returns nothing and
            changes nothing in the state, so that nothing is compared.
        ShardckptError: As for `shardckpt.save` and `shardckpt.load`.

    Examples:
        >>> report = shardckpt.prove_resume(lambda: train_step(next(batches)), state, "/tmp/drill")  # doctest: +SKIP
        >>> assert report.ok, report  # doctest: +SKIP
    """
    require_bools(overwrite=overwrite)
    require_train_step(train_step, steps)
    drill = _Drill(train_step, state, path, steps, process_group)
    save(state, path, overwrite=overwrite, process_group=process_group)
    saved = digest_reachable(train_step)
    first = drill.train(is_resumed=False)
    trained = digest_reachable(train_step)
    second = drill.resume()
    changed = [name for name, digest in saved.items() if trained.get(name, digest) != digest]
    missing = [name for name in changed if drill.restored.get(name, 0) != saved[name]]
    divergence, named = drill.compare(first, second, missing, has_restored=len(changed) > len(missing))
    is_repeatable = None
    if divergence is not None and divergence.since == "step" and not named:
        third = drill.resume()
        is_repeatable = drill.compare(second, third, [], has_restored=True)[0] is None
    return ResumeReport(os.fspath(path), steps, divergence, named, is_repeatable)


def require_train_step(train_step: object, steps: object) -> None:
    """Check the drill arguments that need no state."""
    if type(steps) is not int or steps < 1:
        raise UsageError("`steps` must be a positive integer", found=repr(steps))
    if not callable(train_step):
        raise UsageError("`train_step` must be a function", found=repr(train_step))


class _RankRuns(NamedTuple):
    """A rank's steps in both runs."""

    first: list[str]  # messages of `encode_rank_step`
    second: list[str]
    missing: list[str]  # values that the restore left out
    has_restored: bool


class _Comparison(NamedTuple):
    """Rank 0's comparison."""

    found: Divergence | None  # the first difference
    missing: tuple[str, ...]


class _Drill:
    """One drill on this rank."""

    def __init__(
        self,
        train_step: TrainStep,
        state: Any,
        path: str | os.PathLike[str],
        steps: int,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        self._train_step, self._state, self._path, self._steps = train_step, state, path, steps
        self._process_group = process_group
        self.restored: dict[str, int] = {}  # digests of the values that a step uses, after the last load

    @property
    def _coordinator(self) -> LinkedGroup:
        return get_ranks(self._process_group)

    def resume(self) -> list[bytes]:
        """Restore the state, train, and return this rank's messages. Collective."""
        load(self._state, self._path, process_group=self._process_group)
        self.restored = digest_reachable(self._train_step)
        return self.train(is_resumed=True)

    def train(self, *, is_resumed: bool) -> list[bytes]:
        """Train, and return this rank's message about each step."""
        objects = find_trained_objects(self._state)
        digest = partial(StateReader(objects, self._coordinator.rank, self._coordinator.size).digest, is_deep=True)
        start = digest()
        environment = describe_environment(self._coordinator.size, objects, start, deterministic=True)
        messages, random = [], digest_random_states(objects.generators)
        for number in range(1, self._steps + 1):
            use = FirstUse(objects, digest) if is_resumed and number == 1 else None
            try:
                results = _read_results(self._train_step())
            finally:  # a step that raises leaves no hook on the optimizer
                used = None if use is None else use.end()
            before, random = random, digest_random_states(objects.generators)
            part = RankStep(
                number,
                environment,
                read_float("loss", results.get("loss")),
                read_float("grad_norm", results.get("grad_norm")),
                digest_batch(results["batch"]) if "batch" in results else None,
                random_before=before,
                random_after=random,
                before=start.digests if number == 1 else None,
                after=digest().digests,
                used=used,
            )
            messages.append(encode_rank_step(part))
        return messages

    def compare(
        self, first: list[bytes], second: list[bytes], missing: list[str], *, has_restored: bool
    ) -> _Comparison:
        """Return the first difference, and the values that are missing on any rank. Collective."""
        runs = [[part.decode("ascii") for part in run] for run in (first, second)]
        own = typed_json.dump(_RankRuns(runs[0], runs[1], missing, has_restored))

        def decide(messages: list[bytes]) -> list[bytes]:
            ranks = [typed_json.load(_RankRuns, each, where=f"rank {rank}") for rank, each in enumerate(messages)]
            names = list(dict.fromkeys(name for rank in ranks for name in rank.missing))
            once, again = (
                [merge_rank_steps([each.encode() for each in step]) for step in zip(*runs, strict=True)]
                for runs in ([rank.first for rank in ranks], [rank.second for rank in ranks])
            )
            record = WitnessRecord("drill", 0, once[0].environment, tuple(each.record for each in once))
            steps = (find_divergence(record, Observation(each.environment, each.record)) for each in again)
            found = next((each for each in steps if each is not None), None)
            if found is None and not any(rank.has_restored for rank in ranks):
                _require_content(record.steps, names)
            return [typed_json.dump(_Comparison(found, tuple(names)))] * len(messages)

        answer = self._coordinator.ask_rank0("comparing the steps", own, decide)
        return typed_json.load(_Comparison, answer, where="rank 0's answer")


def _require_content(steps: Sequence[StepRecord], missing: Sequence[str]) -> None:
    """Require that there is something to compare."""
    before = steps[0].before
    if any(_has_results(step) or step.random_before != step.random_after or step.after != before for step in steps):
        return
    fix = "Return the loss of the step, and pass the objects that it trains as the state"
    raise UsageError(
        "the drill proves nothing: the training steps return nothing and change nothing that it compares",
        fix=f"{fix}; it changes {', '.join(missing)}." if missing else f"{fix}.",
    )


def _has_results(step: StepRecord) -> bool:
    return step.batch is not None or any(bits != NO_FLOAT for bits in (*step.loss, *step.grad_norm))


def _read_results(results: Any) -> Mapping[str, Any]:
    """Return the results of a training step by name; UsageError for unknown names."""
    if results is None:
        return {}
    if not isinstance(results, Mapping):
        return {"loss": results}
    unknown = results.keys() - _RESULTS
    if unknown:
        raise UsageError(
            "`train_step` returns unknown results",
            found=", ".join(map(str, unknown)),
            expected="loss, grad_norm, batch",
        )
    return results


def run_drill(train_step: Callable[[], Any], state: Any, path: str, *, steps: int = 2) -> ResumeReport:
    """Save a state, train, restore, train again and compare, as `prove_resume`; then restore the state. Collective."""
    # A drill that fails leaves its checkpoints, which the next one replaces. One step is trained before: DDP orders its
    # buckets after its first backward pass, and libraries choose their kernels.
    require_train_step(train_step, steps)
    start = f"{path}/start"
    save(state, start, overwrite=True)
    train_step()
    load(state, start)
    report = prove_resume(train_step, state, f"{path}/resume", steps=steps, overwrite=True)
    load(state, start)
    _remove(path)
    return report


def drill_folder(run: str) -> str:
    """Return the folder for a run's drills; it is hidden, so that a run with nothing else in it counts as new."""
    return f"{run}/.drill"


def require_proven(report: ResumeReport) -> None:
    """Raise a drill's divergence; warn if the state lacks values, though no result depends on them."""
    missing = ", ".join(report.missing)
    if report.divergence is not None:
        found = report.divergence
        sentence = f"{found.sentence}; not restored: {missing}" if missing else found.sentence
        raise ResumeDivergence(replace(found, sentence=sentence), report.path)
    if missing and get_ranks(None).rank == 0:
        warn_user(f"training changes values that a resume does not restore: {missing}")


def _remove(path: str) -> None:
    """Remove the drill's checkpoints, once all ranks have read them. Collective."""
    folder, name = split(path)

    def decide(messages: list[bytes]) -> list[bytes]:
        open_store(folder).delete_folder(name)
        return messages

    get_ranks(None).ask_rank0(f"removing {path}", b"", decide)
