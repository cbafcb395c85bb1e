"""Conformance suites for stores, readers and targets, and a proof for training scripts. Needs pytest."""

from shardckpt.errors import require_packages

require_packages("shardckpt.testing", "pytest", install="pytest")

import pytest

pytest.register_assert_rewrite(*(f"shardckpt.testing.{name}_suite" for name in ("reader", "store", "target")))

from shardckpt.testing.reader_suite import ReaderSuite
from shardckpt.testing.resume_across import ResumeAcrossReport, ScriptError, prove_resume_across
from shardckpt.testing.store_suite import StoreSuite
from shardckpt.testing.target_suite import TargetSuite

__all__ = ["ReaderSuite", "ResumeAcrossReport", "ScriptError", "StoreSuite", "TargetSuite", "prove_resume_across"]
