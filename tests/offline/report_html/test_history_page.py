"""The page of a history draws the numbers of `history`: lines, and the same as tables."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import shardckpt
from shardckpt.errors import TargetExistsError
from shardckpt.native.run_directory import step_name
from shardckpt.offline.report_html import render_page, write_page
from shardckpt.offline.run_history.history import describe_history
from shardckpt.results import History, StepStats, TensorStats
from tests.kit.runs.browser import Page
from tests.kit.runs.command import run_here
from tests.kit.writers.native_writer import write_step

HOSTILE = "</script><script>document.title='owned'</script>"


def build_history(tensors: int, steps: int, bad: tuple[int, int] | None = None) -> History:
    """Return a history with a NaN in tensor and step `bad`, and without its last tensor in the first step."""

    def measure(at: int, step: int) -> TensorStats:
        return TensorStats(
            f"layers.{at}.w", "float32", (4,), int((at, step) == bad), 0, 0, -1.0, 1.0, 0.0, at + step / 10
        )

    found = [
        StepStats(10 * step, f"run/{step}", tuple(measure(at, step) for at in range(tensors - (step == 0))))
        for step in range(steps)
    ]
    return History("run", tuple(found))


def test_a_step_without_a_tensor_has_no_value_and_infinities_are_text() -> None:
    infinite = TensorStats("a", "float32", (1,), 0, 0, 0, None, 1 / 3, 0.0, math.inf)
    data = describe_history(History("run", (StepStats(1, "run/1", ()), StepStats(2, "run/2", (infinite,)))))
    assert (data["steps"], data["tensors"]) == ([1, 2], ["a"])
    shown = {stat: data["values"][stat][0] for stat in ("min", "max", "l2", "nans")}
    assert shown == {"min": [None, None], "max": [None, 0.333333], "l2": [None, "inf"], "nans": [None, 0]}


def test_the_command_writes_the_page_and_replaces_only_a_page(tmp_path: Path) -> None:
    write_step(tmp_path / "run" / step_name(3), {"model": {"a": torch.ones(2)}})
    found = run_here("history", tmp_path / "run", "--html", tmp_path / "page.html")
    assert (found.code, found.out.splitlines()) == (0, [f"{tmp_path}/run: 1 step", f"wrote {tmp_path}/page.html"])
    (tmp_path / "mine.html").write_text("mine")
    with pytest.raises(TargetExistsError, match="only an earlier report"):
        shardckpt.history(tmp_path / "run", html=tmp_path / "mine.html")


def show(page: Page, found: History, folder: Path) -> int:
    """Open the page of a history and return its length."""
    text = render_page("run", describe_history(found))
    write_page(text, str(folder / "history.html"))
    page.errors.clear()
    page.requests.clear()
    page.open((folder / "history.html").as_uri())
    return len(text)


def read_rows(page: Page, label: str) -> list[list[str]]:
    rows = f"[...document.querySelectorAll('.grid[aria-label=\"{label}\"] [role=rowgroup] .row')]"
    return page.run(f"{rows}.map((row) => [...row.children].map((cell) => cell.textContent))")


def read_values(page: Page, label: str) -> list[list[str]]:
    """Return the rows of a table that a panel shows when it is asked."""
    page.run("document.querySelector('.charts details').open = true")
    page.run("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
    return read_rows(page, label)


def list_lines(page: Page) -> list[str]:
    return page.run("[...document.querySelectorAll('.chart .line')].map((line) => line.dataset.name)")


def test_a_browser_draws_a_line_for_each_tensor_and_names_the_first_bad_step(page: Page, tmp_path: Path) -> None:
    show(page, build_history(3, 4, bad=(1, 2)), tmp_path)
    assert list_lines(page) == ["layers.0.w", "layers.1.w", "layers.2.w"]
    first = page.run("document.getElementById('first').textContent")
    assert first == "First step with NaN or Inf: 20, in 1 tensor, such as layers.1.w"
    assert page.run("document.querySelectorAll('.chart .cross').length") == 1
    assert read_values(page, "L2 norm by step, weights") == [
        ["0", "0", "1", ""],
        ["10", "0.1", "1.1", "2.1"],
        ["20", "0.2", "1.2 ✕", "2.2"],
        ["30", "0.3", "1.3", "2.3"],
    ]
    assert page.errors == []
    assert [url for url in page.requests if not url.startswith("file:")] == []


def test_another_statistic_is_drawn_when_it_is_chosen(page: Page, tmp_path: Path) -> None:
    show(page, build_history(2, 3), tmp_path)
    page.run("document.querySelector('select').value = 'max'")
    page.run("document.querySelector('select').dispatchEvent(new Event('change'))")
    assert [row[1] for row in read_values(page, "largest value by step, weights")] == ["1", "1", "1"]
    assert page.run("document.querySelector('.chart').getAttribute('aria-label')").startswith("largest value of 2 ten")


def test_keys_walk_along_the_lines_and_say_the_values(page: Page, tmp_path: Path) -> None:
    show(page, build_history(3, 4, bad=(1, 2)), tmp_path)
    page.run("document.querySelector('.chart').focus()")
    page.press("ArrowDown", "ArrowLeft")
    assert page.run("document.getElementById('live').textContent") == "step 20, layers.1.w: 1.2; 1 NaN, 0 Inf"
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "searchbox", "combobox", "grid", "application", "checkbox"}
    controls = [node for node in nodes if node.get("role", {}).get("value") in roles]
    assert len(controls) > 8
    assert [node for node in controls if not node.get("name", {}).get("value")] == []


def test_of_a_thousand_tensors_the_first_or_the_chosen_are_drawn(page: Page, tmp_path: Path) -> None:
    assert show(page, build_history(1000, 100, bad=(700, 50)), tmp_path) < 2_000_000
    status = "document.querySelector('[role=status]').textContent"
    assert (len(list_lines(page)), page.run(status)) == (9, "9 lines of 1,000 tensors")
    page.run("document.querySelector('input[type=search]').focus()")
    page.press(*"*.70?.w")
    assert list_lines(page)[0] == "layers.700.w"
    page.run("document.querySelector('.grid').focus()")
    page.press("ArrowDown", "Enter")
    assert list_lines(page) == ["layers.701.w"]
    assert page.run(status) == "1 line of 1,000 tensors, 1 chosen"
    assert page.run("document.querySelectorAll('*').length") < 2_000
    assert page.errors == []


def build_scales(steps: int = 3) -> History:
    """Return a run of a weight, its moments and two counters, whose second moment falls by 1,000."""

    def measure(name: str, value: float, dtype: str = "float32") -> TensorStats:
        return TensorStats(name, dtype, (), 0, 0, 0, value, value, value, value)

    return History(
        "run",
        tuple(
            StepStats(
                at,
                f"run/{at}",
                (
                    measure("w", 10.0 + at),
                    measure("w/exp_avg", 0.1 + at),
                    measure("w/exp_avg_sq", 10.0 ** (-2 * at)),
                    measure("w/step", at),
                    measure("norm.num_batches_tracked", 1000.0 * at, "int64"),
                ),
            )
            for at in range(1, steps + 1)
        ),
    )


def test_each_scale_has_a_panel_and_counters_are_the_last(page: Page, tmp_path: Path) -> None:
    show(page, build_scales(), tmp_path)
    panels = "[...document.querySelectorAll('.charts section')]"
    names = page.run(
        f"{panels}.map((panel) => [panel.querySelector('h3').textContent, "
        "[...panel.querySelectorAll('.line')].map((line) => line.dataset.name)])"
    )
    assert names == [
        ["weights", ["w"]],
        ["exp_avg", ["w/exp_avg"]],
        ["exp_avg_sq", ["w/exp_avg_sq"]],
        ["counters", ["norm.num_batches_tracked", "w/step"]],
    ]


def test_an_axis_is_logarithmic_from_a_ratio_of_100_on(page: Page, tmp_path: Path) -> None:
    show(page, build_scales(), tmp_path)
    labels = page.run("[...document.querySelectorAll('.chart')].map((chart) => chart.getAttribute('aria-label'))")
    assert [label.endswith("logarithmic") for label in labels] == [False, False, True, True]
    ends = "[...document.querySelectorAll('.chart')[2].querySelectorAll('text[text-anchor=end]')]"
    ticks = page.run(f"{ends}.map((tick) => tick.textContent)")
    assert ticks == ["1.00e-6", "1.00e-5", "1.00e-4", "0.001", "0.01"]


def test_many_slots_share_a_panel() -> None:
    stats = tuple(TensorStats(f"w/slot{at}", "float32", (1,), 0, 0, 0, 0.0, 0.0, 0.0, 0.0) for at in range(1000))
    data = describe_history(History("run", (StepStats(1, "run/1", stats),)))
    assert (len(data["scales"]), data["scales"][-1]) == (9, "other slots")


def test_letters_of_a_chart_have_12_pixels_on_a_phone(page: Page, tmp_path: Path) -> None:
    page.show_as(width=390)
    show(page, build_scales(), tmp_path)
    height = "document.querySelector('.chart text').getBoundingClientRect().height"
    assert page.run("getComputedStyle(document.querySelector('.chart text')).fontSize") == "12px"
    assert page.run(height) > 11, "no scaling makes them smaller"
    assert page.run("document.documentElement.scrollWidth") == 390
    page.show_as()


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_with_no_or_one_step_has_a_page(steps: int, page: Page, tmp_path: Path) -> None:
    show(page, build_history(2, steps), tmp_path)
    assert page.run("document.querySelector('.facts li').textContent") == f"{steps}step{'s' * (steps != 1)}"
    assert page.errors == []


def test_hostile_names_of_a_history_stay_text(page: Page, tmp_path: Path) -> None:
    tensor = TensorStats(HOSTILE, "float32", (1,), 0, 0, 0, 0.0, 0.0, 0.0, 0.0)
    show(page, History(HOSTILE, (StepStats(1, "run/1", (tensor,)),)), tmp_path)
    assert page.run("document.title") == "run"
    assert HOSTILE in [row[0] for row in read_rows(page, "Tensors")]
