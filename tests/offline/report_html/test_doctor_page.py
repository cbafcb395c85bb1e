"""The page of a run's health shows problems first, each with what to type next."""

from __future__ import annotations

from pathlib import Path

from shardckpt.offline.report_html import render_page, write_page
from shardckpt.offline.run_history.doctor import describe_report
from shardckpt.results import HealthCheck, HealthReport
from tests.kit.runs.browser import Page

HOSTILE = "</script><script>document.title='owned'</script>"
CHECKS = (
    HealthCheck("newest step", "ok", "step 3: intact"),
    HealthCheck("retention", "info", "the newest step stores no rule"),
    HealthCheck("values", "problem", f"1 NaN: {HOSTILE}", "shardckpt bisect run --when nan"),
)


def list_texts(page: Page, selector: str) -> list[str]:
    return page.run(f"[...document.querySelectorAll({selector!r})].map((each) => each.textContent)")


def test_a_browser_shows_problems_first(page: Page, tmp_path: Path) -> None:
    for name, checks in (("bad", CHECKS), ("good", CHECKS[:2])):
        write_page(render_page("run", describe_report(HealthReport("run", 3, checks))), str(tmp_path / f"{name}.html"))
    page.errors.clear()
    page.requests.clear()
    page.open((tmp_path / "bad.html").as_uri())
    assert list_texts(page, "h3") == ["values ✕ problem", "newest step ✓ ok", "retention · info"]
    assert list_texts(page, "code") == ["shardckpt bisect run --when nan"]
    assert HOSTILE in list_texts(page, "article p")[0]
    assert list_texts(page, "[role=status]") == ["1 problem found."]
    page.open((tmp_path / "good.html").as_uri())
    assert list_texts(page, "[role=status]") == ["No problem found."]
    assert page.run("document.title") == "run"
    assert page.errors == []
    assert [url for url in page.requests if not url.startswith("file:")] == []
