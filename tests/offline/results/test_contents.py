"""Problems: their kinds, places and messages."""

from __future__ import annotations

from typing import get_args

import pytest

from shardckpt.errors import ChecksumError, FormatError, MissingFileError, TruncatedError
from shardckpt.offline.results.contents import Problem, ProblemKind, find_rank, from_error
from shardckpt.plan.layout.coverage import FaultKind


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("__12_3.distcp", 12),
        ("pytorch_model_fsdp_0/__1_0.distcp", 1),
        ("global_step3/bf16_zero_pp_rank_7_mp_rank_00_optim_states.pt", 7),
        ("rank3.pt", 3),
        ("mp_rank_00_model_states.pt", None),
        ("model-00001-of-00004.safetensors", None),
        ("franking1.bin", None),
        ("0mwqkzsavex3s13-00012-00.safetensors", 12),
        ("../one/0mwqkzsavex3s13-00003-01.safetensors", 3),
        ("", None),
    ],
)
def test_the_rank_is_the_one_that_the_name_of_a_file_states(name: str, rank: int | None) -> None:
    assert find_rank(name) == rank


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TruncatedError.from_size("run/step/f", 1, 2), "truncated"),
        (ChecksumError("other bytes", where="run/step/f"), "checksum"),
        (FormatError("no header", where="run/step/f"), "unreadable"),
        (MissingFileError("no such file", where="run/step/f"), "missing_file"),
    ],
)
def test_an_error_of_reading_is_a_problem_with_its_file_and_message(error: FormatError, kind: str) -> None:
    found = from_error(error, "run/step/")
    assert (found.kind, found.file, str(found)) == (kind, "f", str(error))
    assert from_error(error, "other").file == ""


def test_every_kind_of_fault_is_a_kind_of_problem() -> None:
    assert {*get_args(FaultKind)} <= {*get_args(ProblemKind)}
    assert str(Problem("gap", "elements are missing")) == "elements are missing"
