"""The checkpoints that tests read lie beside the tests, whole and under the names that their README gives."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FIXTURES = ROOT / "tests" / "fixtures"
CASES = sorted(case.parent.name for case in FIXTURES.glob("*/case.json"))
LOCAL_PATH = re.compile(rb"/(?:home|root|work|tmp|usr|opt|mnt|srv|Users)/[\w.-]+")
REGISTRY = re.compile(rb"pypi|pythonhosted|artifactory|jfrog|npmjs|anaconda", re.IGNORECASE)
OUTSIDE = re.compile(r"\.\./shared|[\"']shared[\"'] */|/ *[\"']shared[\"']|SHARDCKPT_FIXTURES")


def test_the_readme_names_each_case() -> None:
    table = [line for line in (FIXTURES / "README.md").read_text().splitlines() if line.startswith("| `")]
    first_cells = [line.split("|")[1] for line in table]
    patterns = [
        re.sub(r"\{(.+?)\}", lambda choice: f"(?:{choice[1].replace(',', '|')})", name).replace("*", ".+")
        for cell in first_cells
        for name in re.findall(r"`(.+?)`", cell)
    ]
    assert len(CASES) == 24
    assert [case for case in CASES if not any(re.fullmatch(pattern, case) for pattern in patterns)] == []


@pytest.mark.parametrize("case", CASES)
def test_a_case_has_its_checkpoint_and_its_truth(case: str) -> None:
    folder = FIXTURES / case
    assert json.loads((folder / "case.json").read_text())["name"] == case
    assert (folder / "truth_model.safetensors").is_file()
    assert (folder / "ckpt").is_dir() or (folder / "ckpt.ckpt").is_file()


@pytest.mark.parametrize("case", CASES)
def test_no_file_of_a_case_names_a_folder_of_the_machine_that_wrote_it(case: str) -> None:
    files = [file for file in (FIXTURES / case).rglob("*") if file.is_file()]
    contents = {str(file.relative_to(FIXTURES)): file.read_bytes() for file in files}
    assert [name for name, content in contents.items() if LOCAL_PATH.search(content) or REGISTRY.search(content)] == []


def test_nothing_that_the_suite_runs_looks_outside_the_repository() -> None:
    roots = [ROOT / name for name in ("tests", "benchmarks", "examples")]
    sources = [path for root in roots for path in root.rglob("*.py") if path != Path(__file__)]
    assert [str(path.relative_to(ROOT)) for path in sources if OUTSIDE.search(path.read_text())] == []
