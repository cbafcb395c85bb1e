"""A release has one version, dated notes, and a README that does not depend on the files beside it."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import shardckpt

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / ".ci" / "release.py"
if not SCRIPT.exists():
    pytest.skip("not a clone", allow_module_level=True)
release = runpy.run_path(str(SCRIPT))
DOCS = "https://example.org/shardckpt"


def test_the_version_stands_in_one_place() -> None:
    assert release["read_version"](ROOT) == shardckpt.__version__ == metadata.version("shardckpt")
    assert shardckpt.__version__ not in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_the_notes_are_the_section_of_the_version() -> None:
    changelog = "# Changelog\n\n## 0.3.0 (2027-01-31)\n\n- new\n\n## 0.2.0 (2026-12-01)\n\n- old\n"
    assert release["read_notes"](changelog, "0.3.0") == "- new\n"
    assert release["read_notes"](changelog, "0.2.0") == "- old\n"


@pytest.mark.parametrize(
    ("changelog", "message"),
    [
        ("## 0.2.0 (2026-12-01)\n", "must have a section for 0.3.0"),
        ("## 0.3.0 (in preparation)\n", "must end with its date"),
    ],
)
def test_a_version_without_dated_notes_is_refused(changelog, message) -> None:
    with pytest.raises(SystemExit, match=message):
        release["read_notes"](changelog, "0.3.0")


@pytest.mark.parametrize(
    ("text", "with_docs", "without"),
    [
        ("[a](docs/x.md#y)", f"[a]({DOCS}/x/#y)", "a"),
        ("[a](docs/index.md)", f"[a]({DOCS}/)", "a"),
        ("![a](docs/images/m.png)", f"![a]({DOCS}/images/m.png)", ""),
        ("[a](SECURITY.md)", "a", "a"),
        ("[**4**](benchmarks/R.md#z)", "**4**", "**4**"),
        (
            "[a](https://example.org/docs/x.md)",
            "[a](https://example.org/docs/x.md)",
            "[a](https://example.org/docs/x.md)",
        ),
        ("[a](#b)", "[a](#b)", "[a](#b)"),
    ],
)
def test_links_to_files_become_addresses_or_text(text, with_docs, without) -> None:
    assert release["rewrite_links"](text, DOCS) == with_docs
    assert release["rewrite_links"](text, "") == without


@pytest.mark.parametrize("docs", ["", DOCS])
def test_the_readme_of_a_release_has_no_link_to_a_file(docs) -> None:
    text = release["rewrite_links"]((ROOT / "README.md").read_text(encoding="utf-8"), docs)
    assert re.findall(r"\]\((?!https?://|#)[^)]*\)", text) == []


def test_the_container_recipe_runs_targets_that_exist() -> None:
    lines = (ROOT / "examples" / "Containerfile").read_text(encoding="utf-8").splitlines()
    made = " ".join(line for line in lines if line.startswith(("RUN make", "CMD")))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "DEMO_STAMP := $(VENV)/.installed-demo" in makefile
    assert ".venv/.installed-demo" in made
    assert re.search(r"^demo:", makefile, re.MULTILINE)


@pytest.mark.slow
def test_both_archives_are_built_and_pass_twine(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    source, built = tmp_path / "source", tmp_path / "dist"
    subprocess.run(["git", "clone", "-q", ROOT, source], check=True)

    def python(*arguments: str) -> str:
        return subprocess.run([sys.executable, *arguments], check=True, capture_output=True, text=True).stdout

    names = [path.name for path in release["build"](source, built, DOCS, python)]
    version = shardckpt.__version__
    assert names == [f"shardckpt-{version}-py3-none-any.whl", f"shardckpt-{version}.tar.gz"]
