"""The page of a run's resumes shows the steps in order with their verdicts, and what differed first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardckpt.offline.report_html import render_page, write_page
from shardckpt.offline.run_history.prove import describe_proof
from shardckpt.results import Divergence, Proof, Resume, StepProof
from tests.kit.runs.browser import Page

HOSTILE = "</script><script>document.title='owned'</script>"
PROVEN = Resume("0mwtgz5lmk45jxm", 5.25, (9, 10), 2, 2, 3, "Net", "FSDP2", False, True)
FOUND = Divergence("schedule", 9, HOSTILE, "optim.lr is 1", "Put it into the state")
DIVERGED = replace(PROVEN, id="0mwtgz6i8zqkt25", began_at=6.5, compared=0, divergence=FOUND)
STEPS = (
    StepProof(1, "run/1", "no record"),
    StepProof(8, "run/8", "proven", (9, 10), 2, "Net", (PROVEN,)),
    StepProof(16, "run/16", "diverged", (17, 18), 2, "Net", (PROVEN, DIVERGED)),
)


def show(page: Page, steps: tuple[StepProof, ...], folder: Path) -> None:
    write_page(render_page("run", describe_proof(Proof("run", steps))), str(folder / "proof.html"))
    page.errors.clear()
    page.requests.clear()
    page.open((folder / "proof.html").as_uri())


def list_texts(page: Page, selector: str) -> list[str]:
    return page.run(f"[...document.querySelectorAll({selector!r})].map((each) => each.textContent)")


def test_a_browser_marks_each_step_and_names_what_differed_first(page: Page, tmp_path: Path) -> None:
    show(page, STEPS, tmp_path)
    assert list_texts(page, ".chart .step title") == [
        "step 1: no record",
        "step 8: proven, 1 resume",
        "step 16: diverged, 2 resumes",
    ]
    assert list_texts(page, ".facts li") == ["3steps", "1proven", "1diverged", "0unproven", "1no record"]
    assert list_texts(page, ".finding h3") == [f"schedule: {HOSTILE}"]
    rows = list_texts(page, ".grid [role=rowgroup] .row")
    assert len(rows) == 3
    assert "✕ diverged" in rows[0]
    assert "2 ranks, Net → 3 ranks, FSDP2" in rows[0]
    assert page.run("document.title") == "run"
    assert page.errors == []
    assert [url for url in page.requests if not url.startswith("file:")] == []


def test_captures_that_the_run_was_resumed_from_are_behind_its_steps(page: Page, tmp_path: Path) -> None:
    capture = replace(STEPS[2], number=12, tier="memory")
    write_page(render_page("run", describe_proof(Proof("run", STEPS[:2], (capture,)))), str(tmp_path / "proof.html"))
    page.open((tmp_path / "proof.html").as_uri())
    assert list_texts(page, ".chart .step title")[-1] == "step 12 (capture, memory): diverged, 2 resumes"
    assert "memory" in list_texts(page, ".grid [role=rowgroup] .row")[0]


def test_keys_walk_along_the_steps_and_say_their_verdicts(page: Page, tmp_path: Path) -> None:
    show(page, STEPS, tmp_path)
    status = "document.querySelector('[role=status]').textContent"
    assert page.run(status) == "step 16: diverged, 2 resumes", "the first step that diverged is shown at first"
    page.run("document.querySelector('.chart').focus()")
    page.press("ArrowLeft")
    assert page.run("document.getElementById('live').textContent") == "step 8: proven, 1 resume"


@pytest.mark.parametrize("steps", [0, 1, 2000])
def test_a_run_of_no_one_and_many_steps_has_a_page(steps: int, page: Page, tmp_path: Path) -> None:
    show(page, tuple(replace(STEPS[0], number=at) for at in range(steps)), tmp_path)
    assert len(list_texts(page, ".chart .step")) == steps
    assert len(list_texts(page, ".chart text")) <= 11 or steps < 50
    assert page.errors == []
