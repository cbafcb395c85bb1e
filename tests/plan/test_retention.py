"""What retention keeps: rules one by one, and as properties that no set of rules can break."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.errors import UsageError
from shardckpt.plan.retention import (
    ORPHAN_TTL_S,
    Retention,
    SavedStep,
    is_expired,
    parse_age,
    steps_to_delete,
    with_trusted_times,
)

NOW = 1_000_000.0
DAY = 24 * 3600.0
COUNTS = st.none() | st.integers(1, 5)
STEPS = st.lists(
    st.builds(
        SavedStep,
        number=st.integers(0, 40),
        is_complete=st.booleans(),
        saved_at=st.none() | st.floats(0, NOW),
        branch=st.integers(0, 2),
        metrics=st.just({}) | st.fixed_dictionaries({"loss": st.floats()}),
    ),
    unique_by=lambda step: step.number,
)
RULES = st.builds(
    Retention,
    keep_last=COUNTS,
    keep_every=COUNTS,
    keep_best=COUNTS,
    mode=st.sampled_from(["min", "max"]),
    keep_for_s=st.none() | st.floats(0, NOW),
)


def gone(numbers: range | list[int], rules: Retention, **losses: float) -> list[int]:
    metrics = {n: {"loss": losses[f"m{n}"]} if f"m{n}" in losses else {} for n in numbers}
    return list(
        steps_to_delete([SavedStep(n, metrics=metrics[n], saved_at=float(n)) for n in numbers], rules, now=100.0)
    )


def in_order(steps: list[SavedStep]) -> list[int]:
    """Return the numbers of the complete steps, the oldest first."""
    return [number for _, number in sorted((step.branch, step.number) for step in steps if step.is_complete)]


def decided(steps: list[SavedStep], rules: Retention) -> tuple[int, ...]:
    """Return the doomed steps; none where they cannot be ranked, which is an error."""
    has_metric = any(step.is_complete and step.metrics for step in steps)
    if rules.keep_best is None or has_metric or not any(step.is_complete for step in steps):
        return steps_to_delete(steps, rules, now=NOW)
    with pytest.raises(UsageError, match="which no step has"):
        steps_to_delete(steps, rules, now=NOW)
    return ()


class TestRules:
    def test_without_a_rule_everything_stays(self) -> None:
        assert gone(range(9), Retention()) == []

    def test_the_last_ones_stay(self) -> None:
        assert gone(range(5), Retention(keep_last=2)) == [0, 1, 2]

    def test_those_of_a_later_branch_are_newer(self) -> None:
        steps = [SavedStep(9), SavedStep(10), SavedStep(4, branch=1), SavedStep(5, branch=1)]
        assert steps_to_delete(steps, Retention(keep_last=2), now=NOW) == (9, 10)
        assert steps_to_delete(steps, Retention(keep_last=3), now=NOW) == (9,)

    def test_multiples_stay_and_so_does_the_newest(self) -> None:
        assert gone([10, 15, 20, 25, 33], Retention(keep_every=10)) == [15, 25]

    def test_rules_add_up(self) -> None:
        assert gone(range(10), Retention(keep_last=2, keep_every=4)) == [1, 2, 3, 5, 6, 7]

    def test_the_best_stay(self) -> None:
        metrics = {"m1": 3.0, "m2": 1.0, "m3": 2.0, "m4": 9.0}
        assert gone(range(1, 6), Retention(keep_best=2), **metrics) == [1, 4]
        assert gone(range(1, 6), Retention(keep_best=2, mode="max"), **metrics) == [2, 3]

    @pytest.mark.parametrize("mode", ["min", "max"])
    def test_no_number_is_worse_than_any_and_the_later_of_equals_is_better(self, mode: str) -> None:
        losses = {"m1": float("nan"), "m2": 1.0, "m3": 1.0, "m4": -math.inf if mode == "max" else math.inf, "m5": 9.0}
        assert gone([1, 2, 3, 5], Retention(keep_best=1, mode="min"), **losses) == [1, 2]
        assert gone([1, 4, 5], Retention(keep_best=2, mode=mode), **losses) == [1]
        assert gone([1, 2], Retention(keep_best=2, mode=mode), **losses) == []

    @pytest.mark.parametrize("others", [{}, {"keep_last": 1}, {"keep_every": 3}, {"keep_for_s": 1.0}], ids=str)
    def test_a_metric_that_no_step_has_is_an_error_that_names_those_they_have(self, others: dict[str, object]) -> None:
        steps = [SavedStep(n, metrics={"accuracy": n, "f1": n}) for n in range(4)]
        with pytest.raises(UsageError, match=r"metric 'acc', which no step has; found accuracy, f1\."):
            steps_to_delete(steps, Retention(keep_best=3, metric="acc", **others), now=NOW)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="found no metrics"):
            steps_to_delete([SavedStep(1)], Retention(keep_best=3), now=NOW)

    def test_a_run_without_steps_lacks_no_metric(self) -> None:
        assert steps_to_delete([], Retention(keep_best=3), now=NOW) == ()

    def test_steps_without_the_metric_stay_unless_another_rule_decides(self) -> None:
        losses = {"m2": 2.0, "m4": 1.0, "m6": 3.0}
        assert gone(range(8), Retention(keep_best=1), **losses) == [2, 6]
        assert gone(range(8), Retention(keep_best=1, keep_last=2), **losses) == [0, 1, 2, 3, 5]

    def test_what_was_saved_lately_stays_and_what_nobody_dated(self) -> None:
        steps = [SavedStep(1, saved_at=10.0), SavedStep(2), SavedStep(3, saved_at=95.0), SavedStep(4, saved_at=1.0)]
        assert steps_to_delete(steps, Retention(keep_for_s=10), now=100.0) == (1,)

    def test_an_incomplete_step_takes_no_place(self) -> None:
        steps = [SavedStep(1), SavedStep(2), SavedStep(3, is_complete=False), SavedStep(4, is_complete=False)]
        assert steps_to_delete(steps, Retention(keep_last=1), now=NOW) == (1,)

    def test_what_is_spared_stays(self) -> None:
        steps = [SavedStep(n) for n in range(4)]
        assert steps_to_delete(steps, Retention(keep_last=1), now=NOW, protected={1}) == (0, 2)

    @pytest.mark.parametrize(
        "rule",
        [{"keep_last": 0}, {"keep_every": -1}, {"keep_best": True}, {"keep_last": 1.0}, {"keep_for_s": float("nan")},
         {"keep_for_s": -1.0}, {"keep_for_s": True}, {"keep_for_s": 10**400}, {"mode": "best"},
         {"metric": ["loss"], "keep_best": 1}],
    )  # fmt: skip
    def test_a_rule_that_means_nothing_is_refused(self, rule: dict[str, object]) -> None:
        with pytest.raises(UsageError, match=str(next(iter(rule)).removesuffix("_s"))):
            Retention(**rule)  # type: ignore[arg-type]


class TestClocks:
    """Times in days. Retention keeps the steps of the last day."""

    def kept(self, *days: float, now: float, may_be_over: bool = False) -> list[int]:
        steps = [SavedStep(n, saved_at=day * DAY) for n, day in enumerate(days, 1)]
        trusted = with_trusted_times(steps, now * DAY, may_be_over=may_be_over)
        gone = steps_to_delete(trusted, Retention(keep_for_s=DAY), now=now * DAY)
        return [step.number for step in steps if step.number not in gone]

    def test_right_ones_keep_the_steps_of_the_time_that_was_asked_for(self) -> None:
        assert self.kept(100, 100.4, 100.8, 101.2, 101.6, now=101.9) == [4, 5]
        assert self.kept(100, 110, 120, now=120.1) == [3], "days lie between the steps"

    @pytest.mark.parametrize("years", [10, -10])
    def test_one_that_is_years_wrong_makes_no_step_old(self, years: int) -> None:
        wrong = 365 * years
        assert self.kept(100, 100.1, 100.2, 100.3 + wrong, now=100.3 + wrong) == [1, 2, 3, 4]
        assert self.kept(100, 100.1, 100.2, 100.3 + wrong, 100.4, now=100.4) == [1, 2, 3, 4, 5]
        assert self.kept(100, 100.1, 100.2, 100.3 + wrong, 100.4 + wrong, now=100.4 + wrong) == [1, 2, 3, 4, 5]

    @pytest.mark.parametrize("behind", [0.5, 20, 365])
    def test_one_that_is_behind_makes_no_step_older_than_the_one_before(self, behind: float) -> None:
        assert self.kept(100, 100.1 - behind, 100.2, 100.3, now=100.4) == [1, 2, 3, 4]
        assert self.kept(100, 100.1 - behind, 100.2 - behind, now=100.4, may_be_over=True) == [1, 2, 3]

    def test_what_is_saved_under_one_that_is_behind_grows_old_with_the_one_before(self) -> None:
        assert self.kept(100, 80, 101.2, 101.3, now=101.4) == [3, 4]

    def test_one_that_is_ahead_keeps_no_later_step(self) -> None:
        assert self.kept(100, 5000, 100.2, 100.3, now=102) == [2, 4]

    def test_what_is_saved_under_it_grows_old_as_any_other(self) -> None:
        assert self.kept(100, 100.1, 3750, 3750.6, 3751.2, now=3751.5) == [4, 5]

    def test_the_steps_of_a_run_that_may_be_over_grow_old_however_long_ago_it_ended(self) -> None:
        assert self.kept(100, 100.1, 100.2, now=200) == [1, 2, 3], "it may have been paused"
        assert self.kept(100, 100.1, 100.2, now=200, may_be_over=True) == [3]
        assert self.kept(1, 100.1, 100.2, now=100.3, may_be_over=True) == [1, 2, 3], "the first clock may be wrong"
        assert self.kept(100, 100.1, 1, now=100.3, may_be_over=True) == [1, 2, 3], "or the last"

    def test_steps_of_unknown_time_stay(self) -> None:
        steps = [SavedStep(1), SavedStep(2, saved_at=DAY), SavedStep(3, saved_at=9 * DAY)]
        assert steps_to_delete(with_trusted_times(steps, 9 * DAY), Retention(keep_for_s=DAY), now=9 * DAY) == (2,)


class TestWhateverTheRules:
    @given(STEPS, RULES)
    def test_the_newest_complete_step_is_never_removed(self, steps: list[SavedStep], rules: Retention) -> None:
        complete = in_order(steps)
        assert not complete or complete[-1] not in decided(steps, rules)

    @given(STEPS, RULES)
    def test_only_complete_steps_count_and_only_they_are_removed(
        self, steps: list[SavedStep], rules: Retention
    ) -> None:
        complete = [step for step in steps if step.is_complete]
        assert decided(steps, rules) == decided(complete, rules)
        assert set(decided(steps, rules)) <= {step.number for step in complete}

    @given(STEPS, RULES)
    def test_a_second_time_removes_nothing_more(self, steps: list[SavedStep], rules: Retention) -> None:
        first = set(decided(steps, rules))
        assert decided([step for step in steps if step.number not in first], rules) == ()

    @given(STEPS, RULES, st.integers(0, 40))
    def test_a_kill_in_between_changes_nothing(self, steps: list[SavedStep], rules: Retention, after: int) -> None:
        """Removing some of the doomed and deciding anew comes to the same end."""
        first = decided(steps, rules)
        left = [step for step in steps if step.number not in first[:after]]
        assert decided(left, rules) == first[after:]

    @given(STEPS, RULES)
    def test_as_many_as_asked_for_stay(self, steps: list[SavedStep], rules: Retention) -> None:
        complete = in_order(steps)
        removed = set(decided(steps, rules))
        if rules.keep_last is not None:
            assert not removed & set(complete[-rules.keep_last :])
        if rules.keep_every is not None:
            assert all(number % rules.keep_every for number in removed)

    @given(STEPS, RULES)
    def test_the_oldest_go_first(self, steps: list[SavedStep], rules: Retention) -> None:
        found = decided(steps, rules)
        assert list(found) == [number for number in in_order(steps) if number in found]


class TestLeftovers:
    def test_what_changed_within_a_day_or_at_no_known_time_may_be_alive(self) -> None:
        assert is_expired(NOW - ORPHAN_TTL_S - 1, NOW)
        assert not is_expired(NOW - ORPHAN_TTL_S + 1, NOW)
        assert not is_expired(NOW + 5, NOW)
        assert not is_expired(None, NOW)


@pytest.mark.parametrize("time", [7, 7.5, "7", " 7 ", "0.5"], ids=repr)
@pytest.mark.parametrize("name", ["keep_for", "unfinished_for"])
def test_a_time_without_a_unit_is_refused_with_the_units(name: str, time: float | str) -> None:
    with pytest.raises(UsageError, match=rf"`{name}` must have a unit.*expected [\d.]+h, [\d.]+d or [\d.]+w"):
        parse_age(name, time)  # type: ignore[arg-type]  # what users pass


def test_nothing_needs_no_unit() -> None:
    assert (parse_age("unfinished_for", 0), parse_age("unfinished_for", "0")) == (0, 0)
