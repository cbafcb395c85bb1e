"""The verdict names what differs first in causal order; nothing is trained here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardckpt.witness.records.step_records import (
    BatchDigests,
    Environment,
    Observation,
    Setting,
    StateDigests,
    StepRecord,
    TensorDigest,
    WitnessRecord,
    float_bits,
)
from shardckpt.witness.records.verdict import find_divergence
from shardckpt.witness.state_digests import LossFactors, loss_rtol

SAVED, FIRST, SECOND = 8, 9, 10


def batch_of(*ranks: tuple[int, ...]) -> BatchDigests:
    return BatchDigests(
        tuple(hash(samples) & 0xFFFFFFFF for samples in ranks), tuple(map(sum, ranks)), tuple(map(len, ranks)), ranks
    )


TENSORS = {
    "model.w": TensorDigest("parameter", "float32", 1),
    "model.mean": TensorDigest("buffer", "float32", 2),
    "optim.state.w.exp_avg": TensorDigest("optimizer", "float32", 3),
}
SETTINGS = {
    "optim.param_groups.0.lr": Setting("schedule", "0.1"),
    "optim.param_groups.0.weight_decay": Setting("optimizer", "0.01"),
    "optim.state.*.step": Setting("optimizer", "8.0"),
}
STATE = StateDigests(TENSORS, SETTINGS)
ENVIRONMENT = Environment(2, 77, "Net", True, 1e-4, {"torch": "2.13"}, {"threads": "1"})
STEP = StepRecord(
    FIRST,
    batch_of((11, 12), (13, 14)),
    (float_bits(1.5), float_bits(2.5)),
    (float_bits(0.5), float_bits(0.5)),
    {"python": (4, 4), "torch": (5, 6)},
    {"python": (4, 4), "torch": (7, 8)},
    STATE,
    STATE,
)
NEXT = replace(STEP, step=SECOND, batch=batch_of((15, 16), (17, 18)), before=None)
RECORD = WitnessRecord("save", SAVED, ENVIRONMENT, (STEP, NEXT), batch_of((1, 2), (3, 4)), batch_of((7, 8), (9, 10)))


def verdict(step: StepRecord = STEP, environment: Environment = ENVIRONMENT, record: WitnessRecord = RECORD) -> Any:
    return find_divergence(record, Observation(environment, step))


def changed(name: str, value: Any) -> StateDigests:
    if isinstance(value, str):
        return replace(STATE, settings={**SETTINGS, name: SETTINGS[name]._replace(text=value)})
    return replace(STATE, tensors={**TENSORS, name: TENSORS[name]._replace(digest=value)})


def told(found: Any) -> tuple[str, str]:
    return found.cause, found.name


def test_an_equal_step_has_no_divergence() -> None:
    assert verdict() is None
    assert verdict(NEXT) is None


def test_a_step_that_was_not_recorded_has_no_divergence() -> None:
    assert verdict(replace(STEP, step=99, loss=(0, 0))) is None


@pytest.mark.parametrize(
    ("batch", "name", "text"),
    [
        (RECORD.first_batch, "repeated", "the run's first step"),
        (RECORD.last_batch, "repeated", "the batch of step 8 again"),
        (NEXT.batch, "skipped", "the batch of step 10 already"),
        (batch_of((12, 11), (13, 14)), "other order", "on rank 0"),
        (batch_of((13, 14), (11, 12)), "other ranks' share", "on ranks 0, 1"),
        (batch_of((11, 12), (11, 12)), "same on several ranks", "ranks 0 and 1"),
        (batch_of((7, 12), (13, 14)), "repeated", "1 of 4 samples of step 9 were already in step 8"),
        (batch_of((11, 12), (13, 99)), "other samples", "3 of 4 are equal"),
        (batch_of((7, 12), (98, 99)), "other samples", "1 of 4 are equal"),
        (batch_of((11, 12), (13,)), "other batch size", "got 3 samples, recorded 4: 3 are equal"),
        (batch_of((11, 12, 13), (14, 15, 16)), "other batch size", "got 6 samples, recorded 4: 4 are equal"),
        (batch_of((11, 12, 13), (14, 7, 8)), "repeated", "2 of 6 samples of step 9 were already"),
        (batch_of((11, 12), (99,)), "other samples", "2 of 3 are equal"),
    ],
)
def test_a_batch_that_differs_is_described(batch: BatchDigests, name: str, text: str) -> None:
    found = verdict(replace(STEP, batch=batch, loss=(0, 0)))
    assert told(found) == ("batch", name)
    assert text in found.sentence


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {
                "random_before": {"python": (4, 4), "torch": (5, 9)},
                "random_after": {"python": (4, 4), "torch": (7, 10)},
                "before": changed("model.w", 9),
            },
            ("random state", "torch"),
        ),
        ({"before": changed("model.w", 9), "loss": (0, 0)}, ("parameter", "model.w")),
        ({"before": changed("model.mean", 9), "loss": (0, 0)}, ("parameter", "model.mean")),
        ({"before": changed("optim.state.w.exp_avg", 9)}, ("optimizer", "optim.state.w.exp_avg")),
        ({"before": changed("optim.state.*.step", "1.0")}, ("optimizer", "optim.state.*.step")),
        (
            {"before": changed("optim.param_groups.0.weight_decay", "0")},
            ("optimizer", "optim.param_groups.0.weight_decay"),
        ),
        ({"before": changed("optim.param_groups.0.lr", "1")}, ("schedule", "optim.param_groups.0.lr")),
        ({"used": changed("model.w", 9), "loss": (0, 0)}, ("parameter", "model.w")),
        ({"loss": (float_bits(1.5), 0)}, ("loss", "loss")),
        ({"grad_norm": (float_bits(1.5), 0)}, ("loss", "gradient norm")),
        ({"loss": (0, 0), "random_after": {"python": (4, 4), "torch": (7, 9)}}, ("random state", "torch")),
        ({"random_after": {"python": (4, 5), "torch": (7, 8)}}, ("random state", "python")),
        ({"after": changed("model.w", 9)}, ("parameter", "model.w")),
        ({"after": changed("optim.param_groups.0.lr", "1")}, ("schedule", "optim.param_groups.0.lr")),
    ],
)
def test_the_first_difference_in_causal_order_is_named(change: dict[str, Any], expected: tuple[str, str]) -> None:
    assert told(verdict(replace(STEP, **change))) == expected


def test_a_generator_that_no_step_draws_from_does_not_matter() -> None:
    unused = {"random_before": {"python": (1, 1), "torch": (5, 6)}, "random_after": {"python": (1, 1), "torch": (7, 8)}}
    assert verdict(replace(STEP, **unused)) is None


def test_ranks_with_another_random_state_are_named() -> None:
    other = {"random_before": {"python": (4, 4), "torch": (5, 9)}, "random_after": {"python": (4, 4), "torch": (7, 10)}}
    found = verdict(replace(STEP, **other))
    assert found.ranks == (1,)
    assert found.since == "load"


def test_a_generator_that_a_step_seeds_before_it_draws_does_not_matter() -> None:
    assert verdict(replace(STEP, random_before={"python": (4, 4), "torch": (5, 9)})) is None


@pytest.mark.parametrize("environment", [ENVIRONMENT, replace(ENVIRONMENT, layout=78)])
def test_a_tie_that_is_missing_is_named(environment: Environment) -> None:
    tied = replace(STATE, ties={"model.head": "model.w"})
    recorded = replace(RECORD, steps=(replace(STEP, before=tied, after=tied), NEXT))
    found = verdict(STEP, environment, recorded)
    assert (*told(found), found.since) == ("parameter", "model.head", "load")
    assert "is not tied after the load, recorded tied to model.w" in found.sentence
    lost = verdict(replace(STEP, before=tied), environment, recorded)
    assert lost.since == "step"


def test_a_buffer_that_is_not_saved_explains_other_results_and_alone_does_not_matter() -> None:
    def holding(digest: int) -> StateDigests:
        return replace(STATE, tensors={**TENSORS, "model.cache": TensorDigest("unsaved", "float32", digest)})

    weight = TENSORS["model.w"]._replace(digest=9)

    recorded = replace(RECORD, steps=(replace(STEP, before=holding(1), after=holding(2)), NEXT))
    assert verdict(replace(STEP, before=holding(3), after=holding(4)), record=recorded) is None
    for loss, tensors in (((0, 0), {}), (STEP.loss, {"model.w": weight})):
        after = holding(4)
        after = replace(after, tensors={**after.tensors, **tensors})
        found = verdict(replace(STEP, loss=loss, before=holding(3), after=after), record=recorded)
        assert told(found) == ("parameter", "model.cache")
    filled = replace(holding(2), tensors={**holding(2).tensors, "model.w": weight})
    found = verdict(replace(STEP, before=holding(3), after=filled), record=recorded)
    assert told(found) == ("parameter", "model.w"), "a cache that the step filled again"


def test_buffers_that_differ_between_ranks_and_are_those_of_one_are_described() -> None:
    uneven = replace(STATE, uneven=frozenset({"model.mean"}))
    recorded = replace(RECORD, steps=(replace(STEP, before=uneven), NEXT))
    found = verdict(replace(STEP, before=changed("model.mean", 9)), record=recorded)
    assert told(found) == ("parameter", "model.mean")
    assert "the values of rank 0 after the load" in found.sentence
    assert "SyncBatchNorm" in found.fix


def test_a_change_between_the_load_and_the_first_use_is_told_from_one_by_the_load() -> None:
    other = (float_bits(1.25), float_bits(2.5))
    used = verdict(replace(STEP, used=changed("model.w", 9), loss=other))
    loaded = verdict(replace(STEP, before=changed("model.w", 9), used=changed("model.w", 9)))
    assert (used.since, loaded.since) == ("use", "load")


def test_what_a_step_itself_changes_before_its_optimizer_is_no_divergence() -> None:
    assert verdict(replace(STEP, used=changed("model.w", 9))) is None
    rate = changed("optim.param_groups.0.lr", "0.2")
    assert verdict(replace(STEP, used=rate)) is None
    recorded = replace(RECORD, steps=(replace(STEP, after=rate), NEXT))
    found = verdict(replace(STEP, used=rate, after=rate, loss=(float_bits(1.25), float_bits(2.5))), record=recorded)
    assert told(found) == ("loss", "loss")


def test_a_count_is_named_before_the_averages_that_it_weights() -> None:
    count = TensorDigest("buffer", "int64", 3)
    recorded = replace(RECORD, steps=(replace(STEP, after=with_buffers(TENSORS["model.mean"], count)),))
    after = with_buffers(TENSORS["model.mean"]._replace(digest=9), count._replace(digest=1))
    assert told(verdict(replace(STEP, after=after), record=recorded)) == ("parameter", "model.num_batches_tracked")


def with_buffers(mean: TensorDigest, count: TensorDigest) -> StateDigests:
    return replace(STATE, tensors={**TENSORS, "model.mean": mean, "model.num_batches_tracked": count})


def test_another_dtype_is_a_matter_of_precision() -> None:
    half = {**TENSORS, "model.w": TensorDigest("parameter", "bfloat16", 9)}
    assert told(verdict(replace(STEP, before=replace(STATE, tensors=half)))) == ("precision", "model.w")


def test_the_optimizer_is_named_if_only_parameters_differ_after_equal_gradients() -> None:
    bare = StateDigests({"model.w": TENSORS["model.w"]}, {})
    other = StateDigests({"model.w": TENSORS["model.w"]._replace(digest=9)}, {})
    recorded = replace(RECORD, steps=(replace(STEP, before=bare, after=bare),))
    found = verdict(replace(STEP, before=bare, after=other), record=recorded)
    assert found.cause == "optimizer"
    assert "the state has no optimizer" in found.sentence


def test_advice_names_gradients_beside_the_optimizer_and_modes_beside_generators() -> None:
    """Other inputs, another clipping and autocast change gradients, and with them slots; eval() draws no numbers."""
    for name in ("optim.state.w.exp_avg", "model.w"):
        found = verdict(replace(STEP, after=changed(name, 9)))
        assert "inputs, clipping, accumulation" in found.fix and "autocast" in found.fix
    found = verdict(replace(STEP, random_after={"python": (4, 4), "torch": (7, 6)}))
    assert found.sentence.endswith("equal before: the recorded step drew numbers, this one none")
    assert found.fix.startswith("Call the model's train()") and "eval() mode" in found.fix
    found = verdict(replace(STEP, random_after={"python": (4, 4), "torch": (7, 9)}))
    assert found.sentence.endswith("it was seeded again, or other numbers were drawn")


def test_a_step_that_is_not_deep_is_compared_by_settings() -> None:
    assert verdict(replace(STEP, before=replace(STATE, tensors={}), after=replace(STATE, tensors={}))) is None


def test_parts_that_are_missing_after_the_load_are_named() -> None:
    bare = StateDigests({"model.w": TENSORS["model.w"], "model.mean": TENSORS["model.mean"]}, {})
    found = verdict(replace(STEP, before=bare))
    assert found.cause == "optimizer"
    assert "missing" in found.sentence


@pytest.mark.parametrize("field", ["flags", "versions"])
def test_flags_and_versions_are_named_only_if_results_differ(field: str) -> None:
    other = replace(ENVIRONMENT, **{field: {"threads": "8", "torch": "2.14"}})
    assert verdict(environment=other) is None
    found = verdict(replace(STEP, loss=(0, 0)), other)
    assert found.cause == "precision"
    assert found.name in ("threads", "torch")


def test_a_run_that_is_not_deterministic_may_differ_as_much_as_two_runs_of_a_step() -> None:
    noisy = replace(ENVIRONMENT, is_deterministic=False)
    record = replace(RECORD, environment=noisy, noise=1e-3)
    near = replace(STEP, loss=(float_bits(1.502), float_bits(2.5)), after=changed("model.w", 9))
    far = replace(STEP, loss=(float_bits(1.6), float_bits(2.5)))
    assert verdict(near, noisy, record) is None
    assert verdict(far, noisy, record).cause == "loss"
    assert verdict(near, noisy, replace(record, noise=1e-5)).cause == "loss"
    assert verdict(near, noisy, replace(record, noise=None)).cause == "loss", "more than reordered sums explain"


def test_on_other_ranks_samples_settings_and_the_mean_loss_are_compared() -> None:
    three = replace(ENVIRONMENT, world=3, layout=78)
    step = StepRecord(
        FIRST, batch_of((11,), (12, 13), (14,)), tuple(map(float_bits, (1.0, 2.0, 3.00001))), before=STATE, after=STATE
    )
    assert verdict(step, three) is None
    assert told(verdict(replace(step, batch=batch_of((7,), (8, 9), (10,))), three)) == ("batch", "repeated")
    assert verdict(replace(step, before=changed("model.w", 9)), three) is None, "digests of shards are not comparable"
    settings = changed("optim.state.*.step", "1.0")
    assert told(verdict(replace(step, before=settings), three)) == ("optimizer", "optim.state.*.step")
    assert told(verdict(replace(step, loss=tuple(map(float_bits, (1.0, 2.0, 3.1)))), three)) == ("loss", "loss")


def test_the_tolerance_of_the_loss_grows_with_sums_and_with_coarse_dtypes() -> None:
    small, large = LossFactors(("float32",), 100, 10), LossFactors(("float32",), 32_000, 100)
    assert 1e-7 < loss_rtol(small) < loss_rtol(large) < 1e-3
    assert loss_rtol(LossFactors(("bfloat16",), 32_000, 100)) > 1e-2
    assert loss_rtol(LossFactors(("float64",), 32_000, 100)) < 1e-11
