"""Conformance suites for stores, readers and targets, to subclass, and a proof of training scripts. Needs pytest."""

import pytest

pytest.register_assert_rewrite(*(f"shardckpt.testing.{name}_suite" for name in ("reader", "store", "target")))

from shardckpt.testing.reader_suite import ReaderSuite  # noqa: E402  (rewriting comes first)
from shardckpt.testing.resume_across import (  # noqa: E402
    ResumeAcrossReport,
    ScriptError,
    prove_resume_across,
)
from shardckpt.testing.store_suite import StoreSuite  # noqa: E402
from shardckpt.testing.target_suite import TargetSuite  # noqa: E402

__all__ = ["ReaderSuite", "ResumeAcrossReport", "ScriptError", "StoreSuite", "TargetSuite", "prove_resume_across"]
