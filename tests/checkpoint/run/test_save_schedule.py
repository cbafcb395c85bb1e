"""Ranks that can commit the save of a notice without the others."""

from __future__ import annotations

import pytest

from shardckpt.checkpoint.notice.notice_saves import NoticeSaves
from shardckpt.checkpoint.notice.notices import Notices, RankNotice
from shardckpt.checkpoint.run.save_schedule import SaveSchedule

LEAVES, STAYS = RankNotice(True, 30.0, 1, "a"), RankNotice(False, None, 0, "b")


def schedule(deadline: float | None = 30.0, *, is_due: bool = True) -> SaveSchedule:
    made = SaveSchedule(None, notice_saves=NoticeSaves(notices=Notices(deadline)))
    made.set_requested(is_due)
    return made


@pytest.mark.parametrize(("notices", "staying"), [([LEAVES, STAYS], (1,)), ([STAYS, LEAVES], (0,)), ([STAYS] * 2, ())])
def test_they_are_the_ranks_without_a_notice_if_others_have_one(notices, staying):
    assert schedule().find_staying(notices, [[], []]) == staying


@pytest.mark.parametrize(("deadline", "is_due"), [(None, True), (30.0, False)], ids=["no deadline", "no notice is due"])
def test_without_a_save_before_a_deadline_all_ranks_commit(deadline, is_due):
    assert schedule(deadline, is_due=is_due).find_staying([LEAVES, STAYS], [[], []]) == ()


def test_a_run_may_need_all_ranks_in_any_case():
    made = schedule()
    made.needs_all_ranks = True
    assert made.find_staying([LEAVES, STAYS], [[], []]) == ()


def test_what_only_a_leaving_rank_0_gives_needs_all_ranks_with_a_warning():
    with pytest.warns(UserWarning, match="rank 0 leaves, and gives other metrics.* than rank 1: the save needs all"):
        assert schedule().find_staying([LEAVES, STAYS], [["loss"], []]) == ()
    assert schedule().find_staying([STAYS, LEAVES], [["loss"], []]) == (0,)
