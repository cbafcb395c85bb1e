"""Find the first difference between a resumed step and its record, in causal order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shardckpt.divergence import Cause, Divergence, Since
from shardckpt.witness.records.step_records import (
    NO_FLOAT,
    BatchDigests,
    Environment,
    Observation,
    RankValues,
    StateDigests,
    StepRecord,
    WitnessRecord,
    from_bits,
)

_SHOWN = 3  # names or ranks in a sentence; others are only counted


def find_divergence(record: WitnessRecord, seen: Observation) -> Divergence | None:
    """Return a resumed step's first difference; None without one, or without a record."""
    recorded = record.find(seen.step.step)
    if recorded is None:
        return None
    pair = _Pair(record, recorded, seen)
    # On the same ranks with the same layout all bits have to be equal. On others, all ranks' samples together and the
    # state's settings have to be equal, and the loss within the tolerance for reordered sums.
    checks = _SAME_LAYOUT if record.environment.has_equal_layout(seen.environment) else _OTHER_LAYOUT
    return next((found for check in checks if (found := check(pair)) is not None), None)


@dataclass(frozen=True, slots=True)
class _Pair:
    """A recorded and a resumed step."""

    record: WitnessRecord
    recorded: StepRecord
    seen: Observation

    @property
    def now(self) -> StepRecord:
        return self.seen.step

    @property
    def number(self) -> int:
        return self.seen.step.step

    @property
    def is_exact(self) -> bool:
        """Whether both runs say that a step gives the same bits each time."""
        return self.record.environment.is_deterministic and self.seen.environment.is_deterministic

    @property
    def is_first(self) -> bool:
        """Whether it is the first step after the restored one."""
        return self.number == self.record.number + 1


# ------------------------------------------------------------------------------------------------------ batch


def _check_batch(pair: _Pair) -> Divergence | None:
    recorded, now = pair.recorded.batch, pair.now.batch
    if recorded is None or now is None or recorded.ordered == now.ordered:
        return None
    ranks = _differing_ranks(recorded.ordered, now.ordered)
    if recorded.total != now.total:
        return _build_sample_divergence(pair, recorded, now, ranks)
    if recorded.multisets == now.multisets:
        sentence = f"step {pair.number} got the recorded samples in another order{_on(ranks)}"
        return Divergence("batch", pair.number, "other order", sentence, _FIX_ORDER, ranks)
    sentence = f"step {pair.number} got the recorded samples, but other ranks' share of them{_on(ranks)}"
    return Divergence("batch", pair.number, "other ranks' share", sentence, _FIX_SHARE, ranks)


def _check_samples(pair: _Pair) -> Divergence | None:
    """Compare all ranks' samples together."""
    recorded, now = pair.recorded.batch, pair.now.batch
    if recorded is None or now is None or recorded.total == now.total:
        return None
    return _build_sample_divergence(pair, recorded, now, ())


def _build_sample_divergence(
    pair: _Pair, recorded: BatchDigests, now: BatchDigests, ranks: tuple[int, ...]
) -> Divergence:
    number, saved = pair.number, pair.record.number
    again, common = _count_common(pair.record.last_batch, now), _count_common(recorded, now)
    sizes = sum(recorded.counts), sum(now.counts)
    is_repeated = again > _count_common(pair.record.last_batch, recorded)
    twins = _find_twins(now)
    known = [(saved, pair.record.last_batch), *((step.step, step.batch) for step in pair.record.steps)]
    same = next((step for step, batch in known if batch is not None and batch.total == now.total), None)
    if twins and not _find_twins(recorded):
        how, fix = "same on several ranks", _FIX_SHARE
        sentence = f"in step {number}, ranks {twins[0]} and {twins[1]} got the same samples"
    elif pair.record.first_batch is not None and pair.record.first_batch.total == now.total:
        how, fix = "repeated", _FIX_POSITION
        sentence = f"step {number} got the batch of the run's first step again: the data starts over"
    elif same is not None:
        how, fix = ("repeated" if same < number else "skipped"), _FIX_POSITION
        verb = "again: samples are repeated" if same < number else "already: samples are skipped"
        sentence = f"step {number} got the batch of step {same} {verb}"
    elif sizes[0] != sizes[1] and common == min(sizes) > 0 and not is_repeated:
        how, fix = "other batch size", _FIX_BATCH_SIZE
        sentence = f"step {number} got {sizes[1]} samples, recorded {sizes[0]}: {common} are equal"
    else:
        how, fix = "other samples", _FIX_POSITION
        sentence = f"step {number} got other samples than were recorded{_on(ranks)}"
        total = len(now.all_samples)
        is_known = 2 * again >= total or again + common >= total  # another permutation has some of any batch
        if is_repeated and is_known:
            how = "repeated"
            sentence = f"{again} of {total} samples of step {number} were already in step {saved}"
        elif common > 0:
            sentence += f": {common} of {sizes[1]} are equal"
        elif sizes[0] != sizes[1]:
            sentence += f": {sizes[1]} samples, recorded {sizes[0]}"
    return Divergence("batch", number, how, sentence, fix, ranks)


def _find_twins(batch: BatchDigests) -> tuple[int, ...]:
    """Return two ranks with the same samples, else empty."""
    first: dict[tuple[int, int], int] = {}
    for rank, key in enumerate(zip(batch.counts, batch.multisets, strict=True)):
        if first.setdefault(key, rank) != rank and key[0]:
            return first[key], rank
    return ()


def _count_common(one: BatchDigests | None, other: BatchDigests) -> int:
    return 0 if one is None else (Counter(one.all_samples) & Counter(other.all_samples)).total()


# ---------------------------------------------------------------------------------------------- random states


def _check_random_before(pair: _Pair) -> Divergence | None:
    """Compare the generators that the recorded step drew from; others do not matter."""
    before, after = pair.recorded.random_before or {}, pair.recorded.random_after or {}
    now, now_after = pair.now.random_before or {}, pair.now.random_after or {}
    for name, values in before.items():
        drawn = set(_differing_ranks(values, after.get(name, values)))
        if name in after and name in now_after:
            drawn &= set(_differing_ranks(after[name], now_after[name]))  # equal if the step seeded it before it drew
        ranks = tuple(rank for rank in _differing_ranks(values, now.get(name, values)) if rank in drawn)
        if ranks:
            sentence = f"the random state of {name} differs before step {pair.number}{_on(ranks, len(values))}"
            since: Since = "load" if pair.is_first else "step"
            return Divergence("random state", pair.number, name, sentence, _FIX_RANDOM["before"], ranks, since)
    return None


def _check_random_after(pair: _Pair) -> Divergence | None:
    """Find ranks that drew other random numbers in the step, or between the restore and the step."""
    recorded, now = pair.recorded, pair.now
    for name, values in (recorded.random_after or {}).items():
        before = (recorded.random_before or {}).get(name, values)
        now_after = (now.random_after or {}).get(name, values)
        now_before = (now.random_before or {}).get(name, now_after)
        drawn = set(_differing_ranks(before, values))
        other = set(_differing_ranks(values, now_after)) & drawn
        extra = set(_differing_ranks(now_before, now_after)) - drawn
        ranks = tuple(sorted(other | extra))
        if ranks:
            draws_none = name in (now.random_before or {}) and not set(_differing_ranks(now_before, now_after)) & {
                *ranks
            }
            kind = "none" if draws_none else "after"
            sentence = (
                f"the random state of {name} differs after step {pair.number}{_on(ranks, len(values))}, though it was "
                f"equal before: {_RANDOM_CHANGES[kind]}"
            )
            return Divergence("random state", pair.number, name, sentence, _FIX_RANDOM[kind], ranks)
    return None


# ------------------------------------------------------------------------------------------------------ state


_ORDER: Sequence[str] = ("parameter", "buffer", "optimizer", "schedule", "state")


def _check_ties(pair: _Pair) -> Divergence | None:
    """Compare which parameters are one tensor: a missing tie changes the step's gradients."""
    states: tuple[tuple[StateDigests | None, StateDigests | None, Since], ...] = (
        (pair.recorded.before, pair.now.before, "load"),
        (pair.recorded.after, pair.now.after, "step"),
    )
    for recorded, now, since in states:
        if recorded is None or now is None or recorded.ties == now.ties:
            continue
        name = next(name for name in (*recorded.ties, *now.ties) if recorded.ties.get(name) != now.ties.get(name))
        before, found = (
            f"tied to {state.ties[name]}" if name in state.ties else "not tied" for state in (recorded, now)
        )
        when = "after the load" if since == "load" else f"after step {pair.number}"
        sentence = f"{name} is {found} {when}, recorded {before}"
        return Divergence("parameter", pair.number, name, sentence, _FIX_TIES, since=since)
    return None


def _check_state_before(pair: _Pair) -> Divergence | None:
    if pair.recorded.before is None or pair.now.before is None:
        return None
    return _compare_states(pair, pair.recorded.before, pair.now.before, "load", _ORDER)


def _check_state_in_use(pair: _Pair) -> Divergence | None:
    """Explain other results by the state at the optimizer's first step; buffers have changed by then."""
    # A step may set a learning rate or change a parameter before the optimizer runs. Then the step's results are equal,
    # or the setting equals the recorded one after the step. Values that `used` lacks were in the state after the load,
    # and moved elsewhere for the step.
    recorded, used, after = pair.recorded.before, pair.now.used, pair.recorded.after
    if recorded is None or used is None or not _has_other_results(pair):
        return None
    of_step = after.settings if after is not None else {}
    found = StateDigests(
        {name: each for name, each in recorded.tensors.items() if name in used.tensors},
        {
            name: each
            for name, each in recorded.settings.items()
            if name in used.settings and used.settings[name] != of_step.get(name)
        },
    )
    return _compare_states(pair, found, used, "use", ("parameter", "optimizer", "schedule"))


def _has_other_results(pair: _Pair) -> bool:
    return (_check_results(pair) or _check_random_after(pair)) is not None


def _check_settings_before(pair: _Pair) -> Divergence | None:
    if pair.recorded.before is None or pair.now.before is None:
        return None
    return _compare_states(pair, _only_settings(pair.recorded.before), _only_settings(pair.now.before), "load", _ORDER)


def _check_settings_after(pair: _Pair) -> Divergence | None:
    if pair.recorded.after is None or pair.now.after is None:
        return None
    return _compare_states(pair, _only_settings(pair.recorded.after), _only_settings(pair.now.after), "step", _CAUSES)


# The order of parts after a step: an optimizer changes parameters, a schedule both.
_CAUSES: Sequence[str] = ("schedule", "optimizer", "state", "parameter", "buffer")


def _check_state_after(pair: _Pair) -> Divergence | None:
    if pair.recorded.after is None or pair.now.after is None:
        return None
    return _compare_states(pair, pair.recorded.after, pair.now.after, "step", _CAUSES)


def _only_settings(state: StateDigests) -> StateDigests:
    return StateDigests({}, state.settings)


def _compare_states(
    pair: _Pair, recorded: StateDigests, now: StateDigests, since: Since, order: Sequence[str]
) -> Divergence | None:
    is_deep = bool(now.tensors)
    when = {
        "load": "after the load",
        "use": f"in step {pair.number}, though it was equal after the load",
        "step": f"after step {pair.number}",
    }[since]
    for part in order:
        for name, setting in recorded.settings.items():
            if setting.part == part and (found := now.settings.get(name)) != setting:
                shown = "missing" if found is None else found.text
                sentence = f"{name} is {shown} {when}, recorded {setting.text}"
                return _build_state_divergence(pair, part, name, sentence, since)
        names = [name for name, each in recorded.tensors.items() if each.part == part and is_deep]
        differing = [name for name in names if now.tensors.get(name) != recorded.tensors[name]]
        if not differing:
            continue
        name = next((each for each in differing if each.endswith(_COUNT)), differing[0])
        found_tensor, wanted = now.tensors.get(name), recorded.tensors[name]
        if found_tensor is not None and found_tensor.dtype != wanted.dtype:
            sentence = f"{name} has dtype {found_tensor.dtype} {when}, recorded {wanted.dtype}"
            return Divergence("precision", pair.number, name, sentence, _FIX_PRECISION, since=since)
        if name in recorded.uneven and name not in now.uneven:
            sentence = f"{name} has the values of rank 0 {when}, recorded other values on each rank"
            return Divergence("parameter", pair.number, name, sentence, _FIX_UNEVEN, since=since)
        verb = "is not in the state" if found_tensor is None else "differs"
        more = f" ({len(differing)} of {len(names)} {_PLURAL[part]} do)" if len(names) > 1 else ""
        return _build_state_divergence(pair, part, name, f"{name} {verb} {when}{more}", since)
    return None


_COUNT = "num_batches_tracked"  # explains other buffers in its module: it weights batch norm's averages

_PLURAL = {
    "parameter": "parameters",
    "buffer": "buffers",
    "optimizer": "optimizer slots",
    "schedule": "values of schedules",
    "state": "other tensors",
    "unsaved": "buffers that are not saved",
}


def _build_state_divergence(pair: _Pair, part: str, name: str, sentence: str, since: Since) -> Divergence:
    cause = _CAUSE_OF_PART[part]
    fix = _FIX_STATE[part, "step" if since == "step" else "load"]
    return Divergence(cause, pair.number, name, sentence, fix, since=since)


_CAUSE_OF_PART: Mapping[str, Cause] = {
    "parameter": "parameter",
    "buffer": "parameter",
    "optimizer": "optimizer",
    "schedule": "schedule",
    "state": "state",
    "unsaved": "parameter",
}


# ---------------------------------------------------------------------------------------------------- results


def _check_results(pair: _Pair) -> Divergence | None:
    """Compare loss and gradient norm bit for bit; name a difference's cause if it is known."""
    for what, recorded, now in _results(pair):
        ranks = _differing_ranks(recorded, now)
        if ranks:
            known = _check_random_after(pair) or _check_unsaved(pair) or _check_flags(pair)
            return known or _build_loss_divergence(pair, what, ranks)
    if not pair.is_exact:
        return _check_settings_after(pair)
    found = _check_state_after(pair)
    if found is None or found.cause in ("schedule", "precision"):
        return found
    return _check_unsaved(pair) or _check_flags(pair) or _blame_missing_optimizer(pair, found)


def _check_unsaved(pair: _Pair) -> Divergence | None:
    """Name a buffer that is not saved, and differs before and after the step; called for steps whose results differ."""
    # Many are caches that any step may fill again, so that alone is not a divergence.
    recorded, now = pair.recorded, pair.now
    if recorded.before is None or now.before is None:
        return None
    after, now_after = (state.tensors if state is not None else {} for state in (recorded.after, now.after))
    lost = {
        name: each
        for name, each in recorded.before.tensors.items()
        if name not in after or name not in now_after or after[name] != now_after[name]
    }
    return _compare_states(pair, replace(recorded.before, tensors=lost), now.before, "load", ("unsaved",))


def _blame_missing_optimizer(pair: _Pair, found: Divergence) -> Divergence:
    """Name the optimizer if parameters differ after equal gradients, and the state has no optimizer."""
    after = pair.recorded.after
    if found.cause != "parameter" or after is None:
        return found
    if "optimizer" in {each.part for each in after.tensors.values()} | {each.part for each in after.settings.values()}:
        return found
    sentence = f"{found.sentence}, and the state has no optimizer"
    return replace(found, cause="optimizer", name="", sentence=sentence, fix=_FIX_STATE["optimizer", "load"])


def _results(pair: _Pair) -> Iterator[tuple[str, RankValues, RankValues]]:
    for what, recorded, now in (
        ("loss", pair.recorded.loss, pair.now.loss),
        ("gradient norm", pair.recorded.grad_norm, pair.now.grad_norm),
    ):
        if recorded and now and not _has_only_noise(pair, recorded, now):
            yield what, recorded, now


def _has_only_noise(pair: _Pair, recorded: RankValues, now: RankValues) -> bool:
    """Return True if a run that is not deterministic differs no more than two runs of a step did."""
    if pair.is_exact:
        return False
    record = pair.record
    # Until a step ran twice, only reordered sums count as noise.
    tolerance = record.environment.rtol if record.noise is None else record.noise * _NOISE_MARGIN
    return relative_difference(recorded, now) <= tolerance * (pair.number - record.number)


_NOISE_MARGIN = 4.0  # up to this factor above the difference between two runs of a step, a difference is noise


def relative_difference(recorded: RankValues, now: RankValues) -> float:
    """Return the largest relative difference on any rank; infinite if a value is not finite."""
    largest = 0.0
    for one, other in zip(recorded, now, strict=True):
        if one != other:
            before, after = from_bits(one), from_bits(other)
            scale = max(abs(before), abs(after))
            difference = abs(before - after) / scale if scale else 0.0
            largest = max(largest, difference if difference < float("inf") else float("inf"))
    return largest


def _check_flags(pair: _Pair) -> Divergence | None:
    """Name a flag or version that differs; called for steps whose results differ."""
    before, now = pair.record.environment, pair.seen.environment
    for name, text in {**before.flags, **before.versions}.items():
        found = now.flags.get(name, now.versions.get(name, "missing"))
        if found != text:
            sentence = f"results of step {pair.number} differ, and {name} is {found}, recorded {text}"
            return Divergence("precision", pair.number, name, sentence, _FIX_FLAGS)
    return None


def _build_loss_divergence(pair: _Pair, what: str, ranks: tuple[int, ...]) -> Divergence:
    recorded, now = ((each.loss, each.grad_norm)[what != "loss"] for each in (pair.recorded, pair.now))
    rank = ranks[0]
    sentence = (
        f"the {what} of step {pair.number} is {from_bits(now[rank])!r}, recorded {from_bits(recorded[rank])!r}, "
        f"on rank {rank}, and nothing that was recorded differs before it"
    )
    is_known = pair.recorded.before is not None and pair.now.before is not None
    fix = _FIX_LOSS if not pair.is_exact else _FIX_NOISE if is_known or not pair.is_first else _FIX_DEEP
    return Divergence("loss", pair.number, what, sentence, fix, ranks)


def _check_mean_loss(pair: _Pair) -> Divergence | None:
    """Compare the loss over all samples, within the tolerance for reordered sums."""
    recorded, now = (_mean_loss(step) for step in (pair.recorded, pair.now))
    if recorded is None or now is None:
        return None
    steps = pair.number - pair.record.number
    rtol = max(pair.record.environment.rtol, pair.seen.environment.rtol, pair.record.noise or 0.0) * steps
    if abs(now - recorded) <= rtol * max(abs(now), abs(recorded)) or (now != now and recorded != recorded):  # noqa: PLR0124
        return None
    sentence = (
        f"the mean loss of step {pair.number} is {now!r}, recorded {recorded!r}: more than reordered sums "
        f"explain (relative {rtol:.1e})"
    )
    return _check_flags(pair) or Divergence("loss", pair.number, "loss", sentence, _FIX_OTHER_RANKS)


def _mean_loss(step: StepRecord) -> float | None:
    """Return the ranks' mean loss, weighted by samples; None if no rank has one."""
    counts = step.batch.counts if step.batch is not None else (1,) * len(step.loss)
    pairs = [(from_bits(bits), n) for bits, n in zip(step.loss, counts, strict=True) if bits != NO_FLOAT]
    total = sum(n for _, n in pairs)
    return sum(loss * n for loss, n in pairs) / total if total else None


_SAME_LAYOUT: Sequence[Callable[[_Pair], Divergence | None]] = (
    _check_batch,
    _check_random_before,
    _check_ties,
    _check_state_before,
    _check_state_in_use,
    _check_results,
    _check_random_after,
)
_OTHER_LAYOUT: Sequence[Callable[[_Pair], Divergence | None]] = (
    _check_samples,
    _check_ties,
    _check_settings_before,
    _check_mean_loss,
    _check_settings_after,
)


def explain_topology(before: Environment, now: Environment) -> str:
    """Return how the ranks of two runs differ; empty if each rank holds the same elements."""
    if before.has_equal_layout(now):
        return ""
    ranks = (
        f"{before.world} to {now.world} ranks" if before.world != now.world else f"other shards on {now.world} ranks"
    )
    return ranks if before.style == now.style else f"{ranks}, {before.style} to {now.style}"


def _differing_ranks(one: RankValues, other: RankValues) -> tuple[int, ...]:
    return tuple(rank for rank, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)


def _on(ranks: Sequence[int], world: int = 0) -> str:
    """Return a clause that names ranks."""
    if not ranks:
        return ""
    if len(ranks) <= _SHOWN:
        return f" on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    of = f" of {world}" if world else ""
    return f" on {len(ranks)}{of} ranks: {', '.join(map(str, ranks[:_SHOWN]))}, ..."


_FIX_POSITION = (
    "Put the position in the data into the state (a sampler or loader with state_dict), and restore before the loader "
    "is iterated"
)
_FIX_BATCH_SIZE = (
    "Set the batch size, ranks and accumulation so that a step has as many samples as in the run that saved. If the "
    'change is meant, resume without the witness, or with Witness(on_divergence="warn")'
)
_FIX_ORDER = "Put the generator or seed and epoch of the sampler into the state"
_FIX_SHARE = "Give each rank the share of the sampler that it had: its rank and the world size, the same seed on all"
_FIX_RANDOM = {
    "before": "Put shardckpt.RNGState() into the state, restore last, and seed nothing after it",
    "after": "Seed nothing after restore, and look for what draws other numbers since then: a loader's iterator, "
    "a warm-up, a model in train() mode that was in eval() mode before",
    "none": "Call the model's train() as in the run that saved: in eval() mode dropout draws no numbers; or look for "
    "what else draws none since the restore",
}
_RANDOM_CHANGES = {
    "after": "it was seeded again, or other numbers were drawn",
    "none": "the recorded step drew numbers, this one none",
}
_FIX_PRECISION = "Build the model, autocast and mixed precision as in the run that saved"
_FIX_FLAGS = "Set it as in the run that saved, or accept that this resume is not bit for bit the same"
_FIX_NOISE = (
    "Either a step is not deterministic (torch.use_deterministic_algorithms(True) makes it so, or "
    "Witness(deterministic=False) allows it), or something differs that is not in the state (inputs that are made from "
    "the batch, autocast, train() or eval() mode, the model's code), or a graph that was compiled before the "
    "restore holds old values (torch.compiler.reset() drops it)"
)
_FIX_LOSS = "Two runs of a step differed less: look for what is not in the state"
_FIX_DEEP = "Record with Witness(deep=1) to see whether parameters, optimizer or the computation differ"
_FIX_OTHER_RANKS = (
    "Check that the loss is a mean over samples, that gradients are averaged over all ranks, and that load(..., "
    "verify='full') finds no damage"
)
_FIX_TIES = "Tie the parameters before the optimizer is created and before restore, as in the run that saved"
_FIX_UNEVEN = (
    "A buffer is saved from rank 0: let ranks share it (SyncBatchNorm, or broadcast the buffers before each save)"
)
_FIX_STATE: Mapping[tuple[str, str], str] = {
    ("parameter", "load"): "Nothing may change the model after restore: initialize, tie and cast it before",
    ("parameter", "step"): (
        "Look for what changes parameters besides the optimizer (clamping, weight decay, an EMA swap), and for what "
        "changes gradients: the inputs, clipping, accumulation, autocast"
    ),
    ("buffer", "load"): "Nothing may change the model's buffers after restore",
    ("buffer", "step"): "Look for what updates buffers: evaluation mode, momentum, another number of forward passes",
    ("optimizer", "load"): "Put the optimizer into the state that is saved and restored; take no step before training",
    ("optimizer", "step"): (
        "Train with the optimizer object that was restored, and with its settings; if you do, the gradients differ: "
        "compare the inputs, clipping, accumulation and autocast"
    ),
    ("schedule", "load"): "Put the schedule into the state, create it before restore, and change no setting after it",
    ("schedule", "step"): "Put the schedule into the state that is saved and restored, and step it as often as before",
    (
        "unsaved",
        "load",
    ): "The state_dict omits this buffer: register it with persistent=True, or save it separately",
    ("state", "load"): "Put this value into the state that is saved and restored",
    ("state", "step"): "Look for what updates this value differently after a resume",
}
