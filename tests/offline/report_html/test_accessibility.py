"""axe-core finds nothing serious in any page: contrast, names and keyboard, light and dark, on a desk and a phone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import shardckpt
from shardckpt.native.run_directory import step_name
from shardckpt.offline.report_html import render_page, write_page
from shardckpt.offline.run_history.prove import describe_proof
from shardckpt.results import Divergence, Proof, Resume, StepProof
from tests.kit.runs.browser import Page
from tests.kit.writers.native_writer import write_step


def write_map(fixtures: Path, folder: Path) -> None:
    shardckpt.inspect(fixtures / "dcp_fsdp2_llama_w2" / "ckpt", html=folder / "page.html")


def write_run(folder: Path, *values: float) -> str:
    """Write a run with a step for each value of its weight."""
    for at, value in enumerate(values, 1):
        state = {"model": {"layers.0.w": torch.full((4,), value), "layers.1.w": torch.ones(4)}}
        write_step(folder / "run" / step_name(at), state)
    return str(folder / "run")


def write_history(fixtures: Path, folder: Path) -> None:
    shardckpt.history(write_run(folder, 1.0, 200.0, float("nan")), html=folder / "page.html")


def write_diff(fixtures: Path, folder: Path) -> None:
    run = write_run(folder, 1.0, 2.0)
    shardckpt.diff(f"{run}/{step_name(1)}", f"{run}/{step_name(2)}", html=folder / "page.html")


def write_proof(fixtures: Path, folder: Path) -> None:
    found = Divergence("schedule", 9, "optim.lr", "optim.lr is 1", "Put it into the state")
    resume = Resume("0mwtgz5lmk45jxm", 5.25, (9, 10), 2, 2, 3, "Net", "FSDP2", False, True, found)
    verdicts = ("no record", "proven", "unproven", "diverged")
    steps = tuple(StepProof(at, f"run/{at}", verdict, resumes=(resume,)) for at, verdict in enumerate(verdicts))
    write_page(render_page("run", describe_proof(Proof("run", steps))), str(folder / "page.html"))


@pytest.mark.parametrize("write", [write_map, write_history, write_diff, write_proof])
def test_axe_finds_nothing_serious(
    write: Callable[[Path, Path], None], page: Page, fixtures: Path, tmp_path: Path
) -> None:
    write(fixtures, tmp_path)
    for is_dark in (False, True):
        for width in (1280, 390):
            page.show_as(width=width, is_dark=is_dark)
            page.open((tmp_path / "page.html").as_uri())
            page.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
            page.run("document.querySelector('.grid [role=rowgroup] .row').click()")
            page.run("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
            assert page.find_violations() == [], (is_dark, width)
            assert page.run("document.documentElement.scrollWidth") == width, "the page itself scrolls down only"
    page.show_as()


def test_axe_finds_low_contrast(page: Page, fixtures: Path, tmp_path: Path) -> None:
    write_map(fixtures, tmp_path)
    page.open((tmp_path / "page.html").as_uri())
    page.run("document.documentElement.style.setProperty('--soft', 'light-dark(#ccc, #333)')")
    assert any(line.startswith("color-contrast (serious)") for line in page.find_violations())
