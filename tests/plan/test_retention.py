"""What retention keeps: rules one by one, and as properties that no set of rules can break."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.errors import UsageError
from shardckpt.plan.retention import DEAD_AFTER_S, Retention, SavedStep, doomed, is_dead

NOW = 1_000_000.0
COUNTS = st.none() | st.integers(1, 5)
STEPS = st.lists(
    st.builds(
        SavedStep,
        number=st.integers(0, 40),
        is_complete=st.booleans(),
        saved_at=st.none() | st.floats(0, NOW),
        metric=st.none() | st.floats(),
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


def gone(numbers: range | list[int], rules: Retention, **metrics: float) -> list[int]:
    steps = [SavedStep(n, metric=metrics.get(f"m{n}"), saved_at=float(n)) for n in numbers]
    return list(doomed(steps, rules, now=100.0))


class TestRules:
    def test_without_a_rule_everything_stays(self) -> None:
        assert gone(range(9), Retention()) == []

    def test_the_last_ones_stay(self) -> None:
        assert gone(range(5), Retention(keep_last=2)) == [0, 1, 2]

    def test_multiples_stay_and_so_does_the_newest(self) -> None:
        assert gone([10, 15, 20, 25, 33], Retention(keep_every=10)) == [15, 25]

    def test_rules_add_up(self) -> None:
        assert gone(range(10), Retention(keep_last=2, keep_every=4)) == [1, 2, 3, 5, 6, 7]

    def test_the_best_stay(self) -> None:
        metrics = {"m1": 3.0, "m2": 1.0, "m3": 2.0, "m4": 9.0}
        assert gone(range(1, 6), Retention(keep_best=2), **metrics) == [1, 4]
        assert gone(range(1, 6), Retention(keep_best=2, mode="max"), **metrics) == [2, 3]

    def test_no_number_is_never_the_best_and_the_later_of_equals_is(self) -> None:
        assert gone([1, 2, 3, 4], Retention(keep_best=1), m1=float("nan"), m2=1.0, m3=1.0) == [1, 2]

    def test_what_was_saved_lately_stays_and_what_nobody_dated(self) -> None:
        steps = [SavedStep(1, saved_at=10.0), SavedStep(2), SavedStep(3, saved_at=95.0), SavedStep(4, saved_at=1.0)]
        assert doomed(steps, Retention(keep_for_s=10), now=100.0) == (1,)

    def test_an_incomplete_step_takes_no_place(self) -> None:
        steps = [SavedStep(1), SavedStep(2), SavedStep(3, is_complete=False), SavedStep(4, is_complete=False)]
        assert doomed(steps, Retention(keep_last=1), now=NOW) == (1,)

    def test_what_is_spared_stays(self) -> None:
        steps = [SavedStep(n) for n in range(4)]
        assert doomed(steps, Retention(keep_last=1), now=NOW, spared={1}) == (0, 2)

    @pytest.mark.parametrize(
        "rule",
        [{"keep_last": 0}, {"keep_every": -1}, {"keep_best": True}, {"keep_last": 1.0}, {"keep_for_s": float("nan")},
         {"keep_for_s": -1.0}, {"mode": "best"}],
    )  # fmt: skip
    def test_a_rule_that_means_nothing_is_refused(self, rule: dict[str, object]) -> None:
        with pytest.raises(UsageError, match=str(next(iter(rule)).removesuffix("_s"))):
            Retention(**rule)  # type: ignore[arg-type]


class TestWhateverTheRules:
    @given(STEPS, RULES)
    def test_the_newest_complete_step_is_never_removed(self, steps: list[SavedStep], rules: Retention) -> None:
        complete = [step.number for step in steps if step.is_complete]
        assert not complete or max(complete) not in doomed(steps, rules, now=NOW)

    @given(STEPS, RULES)
    def test_only_complete_steps_count_and_only_they_are_removed(
        self, steps: list[SavedStep], rules: Retention
    ) -> None:
        complete = [step for step in steps if step.is_complete]
        assert doomed(steps, rules, now=NOW) == doomed(complete, rules, now=NOW)
        assert set(doomed(steps, rules, now=NOW)) <= {step.number for step in complete}

    @given(STEPS, RULES)
    def test_a_second_time_removes_nothing_more(self, steps: list[SavedStep], rules: Retention) -> None:
        first = set(doomed(steps, rules, now=NOW))
        assert doomed([step for step in steps if step.number not in first], rules, now=NOW) == ()

    @given(STEPS, RULES, st.integers(0, 40))
    def test_a_kill_in_between_changes_nothing(self, steps: list[SavedStep], rules: Retention, after: int) -> None:
        """Removing some of the doomed and deciding anew comes to the same end."""
        first = doomed(steps, rules, now=NOW)
        left = [step for step in steps if step.number not in first[:after]]
        assert doomed(left, rules, now=NOW) == first[after:]

    @given(STEPS, RULES)
    def test_as_many_as_asked_for_stay(self, steps: list[SavedStep], rules: Retention) -> None:
        complete = sorted(step.number for step in steps if step.is_complete)
        removed = set(doomed(steps, rules, now=NOW))
        if rules.keep_last is not None:
            assert not removed & set(complete[-rules.keep_last :])
        if rules.keep_every is not None:
            assert all(number % rules.keep_every for number in removed)

    @given(STEPS, RULES)
    def test_the_oldest_go_first(self, steps: list[SavedStep], rules: Retention) -> None:
        found = doomed(steps, rules, now=NOW)
        assert list(found) == sorted(found)


class TestLeftovers:
    def test_what_changed_within_a_day_or_at_no_known_time_may_be_alive(self) -> None:
        assert is_dead(NOW - DEAD_AFTER_S - 1, NOW)
        assert not is_dead(NOW - DEAD_AFTER_S + 1, NOW)
        assert not is_dead(NOW + 5, NOW)
        assert not is_dead(None, NOW)
