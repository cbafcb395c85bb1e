"""How long a save takes in each place, and which places a deadline leaves time for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardckpt.checkpoint.notice.place_prediction import (
    LEAVING,
    MARGIN,
    ExpectedPlace,
    PastSave,
    choose_places,
    find_report_time,
    find_step_limit,
    find_survived_failures,
    predict_places,
    predict_seconds,
)
from shardckpt.native.step_copies import FAILURES

NAMES = ("memory", "local", "root")
SECONDS = st.floats(0, 1e6)
PAST = st.lists(st.builds(PastSave, st.integers(0, 1 << 40), SECONDS), max_size=8)
LEFT = st.none() | st.floats(-1e6, 1e6)
PLACES = st.lists(st.none() | SECONDS, min_size=1, max_size=3).map(
    lambda seconds: [ExpectedPlace(*each) for each in zip(NAMES[-len(seconds) :], seconds, strict=True)]
)


class TestPrediction:
    def test_a_place_without_a_past_save_has_none(self):
        assert predict_seconds([]) is None

    @given(PAST.filter(bool))
    def test_it_is_at_least_the_slowest_of_the_largest_saves(self, saves):
        most = max(save.nbytes for save in saves)
        assert predict_seconds(saves) >= MARGIN * max(save.seconds for save in saves if save.nbytes == most)

    @given(PAST, st.floats(1, 100))
    def test_slower_saves_never_give_a_shorter_one(self, saves, factor):
        slower = [save._replace(seconds=save.seconds * factor) for save in saves]
        assert (predict_seconds(slower) or 0.0) >= (predict_seconds(saves) or 0.0)

    def test_small_saves_with_a_base_do_not_count_by_their_latency(self):
        assert predict_seconds([PastSave(100, 10.0), PastSave(1, 9.0)]) == MARGIN * 10.0
        assert predict_seconds([PastSave(100, 10.0), PastSave(50, 9.0)]) == MARGIN * 18.0

    def test_a_folder_comes_after_memory_and_the_root_after_its_running_save(self):
        past = {"memory": [PastSave(1, 2.0)], "local": [PastSave(1, 4.0)], "root": [PastSave(1, 20.0)]}
        assert [each.seconds for each in predict_places(past, NAMES)] == [3.0, 9.0, 30.0]
        assert [each.seconds for each in predict_places(past, NAMES, 10.0)] == [3.0, 9.0, 50.0]
        assert [each.seconds for each in predict_places(past, NAMES, 99.0)] == [3.0, 9.0, 30.0]
        assert [each.seconds for each in predict_places(past, NAMES[1:])] == [6.0, 30.0]
        assert [each.seconds for each in predict_places({"root": past["root"]}, NAMES)] == [None, None, 30.0]


class TestChoice:
    @given(PLACES, st.floats(-1e6, 1e6))
    def test_no_place_that_does_not_fit_is_chosen_if_another_fits(self, places, left_s):
        found = choose_places(places, left_s)
        seconds = {place.name: place.seconds for place in places}
        fitting = [place.name for place in places if place.seconds is not None and place.seconds <= left_s]
        assert found.fits == bool(fitting)
        assert found.chosen == (fitting[-1] if fitting else places[0].name)
        assert set(found.names) >= {places[0].name, found.chosen}
        for name in {*found.names} - {places[0].name, found.chosen}:
            assert seconds[name] is None, "only what nobody has measured is tried besides"

    @given(PLACES, st.floats(-1e6, 1e6), st.floats(0, 1e6))
    def test_a_longer_grace_never_gives_a_nearer_place(self, places, left_s, more):
        names = [place.name for place in places]
        shorter, longer = (choose_places(places, each).chosen for each in (left_s, left_s + more))
        assert names.index(longer) >= names.index(shorter)

    @given(PLACES)
    def test_without_a_known_deadline_the_farthest_and_the_nearest_place_take_it(self, places):
        found = choose_places(places, None)
        assert found.chosen == places[-1].name
        assert found.names == tuple(dict.fromkeys([places[0].name, places[-1].name]))

    @given(PLACES, LEFT)
    def test_names_are_places_the_nearest_first(self, places, left_s):
        order = [place.name for place in places]
        names = choose_places(places, left_s).names
        assert list(names) == sorted(names, key=order.index) and names[0] == order[0]

    def test_after_the_deadline_nothing_unknown_is_tried(self):
        places = [ExpectedPlace("memory", 1.0), ExpectedPlace("root", None)]
        assert choose_places(places, -1.0).names == ("memory",)
        assert choose_places(places, 0.5).names == ("memory", "root")


class TestRules:
    @given(st.floats(0.1, 1e6), st.none() | SECONDS)
    def test_a_step_is_waited_for_until_half_of_the_grace_and_no_longer_than_nine_tenths(self, grace_s, nearest_s):
        assert 0.09 * grace_s < find_step_limit(grace_s, nearest_s) < 0.51 * grace_s

    @given(LEFT)
    def test_a_result_is_reported_before_the_deadline(self, left_s):
        limit = find_report_time(left_s)
        assert (limit is None) == (left_s is None or left_s <= 0)
        assert limit is None or 0 <= limit <= left_s

    def test_captures_survive_what_their_machines_allow(self):
        found = [find_survived_failures(["memory"], FAILURES, count, is_off_leaving=False) for count in (0, 1, 2, 3, 9)]
        assert found == [FAILURES[:1], FAILURES[:1], FAILURES[:2], FAILURES, FAILURES]

    def test_leaving_nodes_are_survived_by_copies_on_others_and_by_a_shared_root(self):
        assert find_survived_failures(["memory"], (), 1, is_off_leaving=True) == ("process", LEAVING)
        assert find_survived_failures(["memory"], FAILURES, 1, is_off_leaving=False) == ("process",)
        assert find_survived_failures(["root"], FAILURES, 1, is_off_leaving=False) == (*FAILURES, LEAVING)
        assert find_survived_failures(["root"], ("process",), 1, is_off_leaving=True) == ("process",)
        assert find_survived_failures([], FAILURES, 1, is_off_leaving=True) == ()
