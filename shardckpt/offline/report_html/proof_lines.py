"""Describe a run's resumes for the page: steps on a line, with a verdict each."""

from __future__ import annotations

from typing import Any

from shardckpt.errors import escape
from shardckpt.offline.results.proofs import Proof, StepProof
from shardckpt.plan.resume.resumes import Resume


def describe_proof(found: Proof) -> dict[str, Any]:
    """Return the data for the page about a run's resumes: JSON values only."""
    return {
        "schema_version": 1,
        "kind": "proof",
        "root": escape(found.root),
        "steps": [_describe_step(step) for step in (*found.removed, *found.steps, *found.captures)],
        "warnings": [*map(escape, found.warnings)],
    }


def _describe_step(step: StepProof) -> dict[str, Any]:
    return {
        "number": step.number,
        "tier": "removed" if step.is_removed else escape(step.tier),
        "verdict": step.verdict,
        "recorded": [*step.recorded],
        "rank_count": step.rank_count,
        "style": escape(step.style),
        "resumes": [*map(_describe_resume, step.resumes)],
    }


def _describe_resume(resume: Resume) -> dict[str, Any]:
    found = resume.divergence
    texts = {
        name: "" if found is None else escape(getattr(found, name)) for name in ("cause", "name", "sentence", "fix")
    }
    return {
        "began_at": resume.began_at,
        "verdict": resume.verdict,
        "steps": len(resume.steps),
        "compared": resume.compared,
        "rank_count_before": resume.rank_count_before,
        "rank_count": resume.rank_count,
        "style_before": escape(resume.style_before),
        "style": escape(resume.style),
        "is_exact": bool(resume.has_equal_layout and resume.is_deterministic),
        **texts,
    }
