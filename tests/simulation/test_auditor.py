"""Which claims of a copy in the root, and which late requests, the model of a history accepts."""

from __future__ import annotations

from typing import Any, cast

import pytest

from shardckpt.native.step_copies import ROOT, Durability, StepCopy
from tests.simulation.auditor import Auditor, CommittedStep, ReplacedFiles
from tests.simulation.scheduler import HistoryError
from tests.simulation.stores.disk import ChangeCount
from tests.simulation.tier_claims import Claims

OLD, NEW = 1001, 2001
IN_ROOT = Durability(1, (StepCopy(ROOT, "root/step-00000001", ("process",), None),))
CALL = ("job claims", 1)


class UnchangedStorage:
    version = -1


def build_auditor(content: int) -> Auditor:
    """Return an auditor of a root that has an attempt of step 1, of which two were committed."""
    auditor = Auditor(cast(Any, None), cast(Any, UnchangedStorage()), 1, Claims({}, {}), ChangeCount())
    auditor.ever |= {OLD, NEW}
    auditor.start_save(OLD, 1)
    auditor.start_save(NEW, 1)
    put_in_root(auditor, content)
    return auditor


def put_in_root(auditor: Auditor, content: int) -> None:
    auditor.steps["step-00000001"] = CommittedStep(1, content, 0, object(), {})


def claim(auditor: Auditor, content: int) -> None:
    auditor.claim(CALL, content, IN_ROOT, ())


@pytest.mark.parametrize("content", [OLD, NEW])
def test_a_copy_in_the_root_is_claimed_of_the_attempt_that_is_there(content: int) -> None:
    auditor = build_auditor(content)
    auditor.start_claim(CALL, 1, (), None)
    claim(auditor, content)


def test_a_copy_in_the_root_is_not_claimed_of_an_attempt_that_was_replaced() -> None:
    auditor = build_auditor(NEW)
    auditor.start_claim(CALL, 1, (), None)
    with pytest.raises(HistoryError, match="attempt 1001 of step 1 is claimed in the root, which does not have it"):
        claim(auditor, OLD)


def test_a_copy_in_the_root_may_change_or_go_between_the_question_and_the_answer() -> None:
    auditor = build_auditor(OLD)
    auditor.start_claim(CALL, 1, (), None)
    put_in_root(auditor, NEW)
    claim(auditor, OLD)
    auditor.steps.clear()
    claim(auditor, OLD)


def test_a_step_that_a_flipped_bit_makes_unreadable_may_be_any_attempt() -> None:
    auditor = build_auditor(0)
    auditor.start_claim(CALL, 1, (), None)
    claim(auditor, OLD)


class TestACommitThatNamesMissingFiles:
    FOLDER = "step-00000001"
    MANIFEST = f"{FOLDER}/1.manifest.json"

    def remove_manifest(self, step: CommittedStep) -> ReplacedFiles:
        """Return what the model knows after the manifest was removed while `step` was in the root."""
        replaced = ReplacedFiles()
        replaced.follow({self.MANIFEST: 1}, {})
        replaced.follow({}, {self.FOLDER: step})
        return replaced

    def test_is_excused_if_another_save_of_the_step_was_there_when_they_were_removed(self) -> None:
        replaced = self.remove_manifest(CommittedStep(1, NEW, 0, object(), {}))
        assert replaced.note_late_commit(self.FOLDER, [self.MANIFEST], {})
        assert replaced.folders == {self.FOLDER}

    def test_is_not_excused_if_the_step_itself_was_removed(self) -> None:
        replaced = self.remove_manifest(CommittedStep(1, OLD, 0, object(), {self.MANIFEST: 1}))
        assert not replaced.note_late_commit(self.FOLDER, [self.MANIFEST], {})
        assert not replaced.folders

    def test_is_not_excused_if_they_were_written_again(self) -> None:
        replaced = self.remove_manifest(CommittedStep(1, NEW, 0, object(), {}))
        assert not replaced.note_late_commit(self.FOLDER, [self.MANIFEST], {self.MANIFEST: 2})

    def test_is_not_excused_if_it_lacks_another_file_too(self) -> None:
        replaced = self.remove_manifest(CommittedStep(1, NEW, 0, object(), {}))
        assert not replaced.note_late_commit(self.FOLDER, [self.MANIFEST, f"{self.FOLDER}/1-0.safetensors"], {})
