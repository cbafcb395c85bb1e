"""Results of the functions of shardckpt: frozen values, each loaded on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardckpt.errors import require_torch

if TYPE_CHECKING:
    from shardckpt.checkpoint.save.handle import SaveHandle, SaveTimings
    from shardckpt.divergence import Divergence
    from shardckpt.events.progress import Progress
    from shardckpt.native.step_copies import Durability, StepCopy
    from shardckpt.offline.copy import Copied
    from shardckpt.offline.prune import Pruned, StepInfo, StepList, UnfinishedFolder
    from shardckpt.offline.repair import Repair
    from shardckpt.offline.results.comparison import (
        Comparison,
        LayerDifference,
        NotCompared,
        TensorDifference,
        ValueDifference,
    )
    from shardckpt.offline.results.contents import (
        FileInfo,
        FileRange,
        Inspection,
        Problem,
        Report,
        TensorInfo,
        Verification,
        WrittenFile,
    )
    from shardckpt.offline.results.tensor_stats import (
        Bisection,
        History,
        LayerStats,
        Statistics,
        StepStats,
        TensorStats,
    )
    from shardckpt.offline.run_history.doctor import HealthReport
    from shardckpt.offline.run_history.health_checks import HealthCheck
    from shardckpt.offline.tasks.run_plan import PlanStatus
    from shardckpt.readers.registry import FormatInfo, FormatList
    from shardckpt.stream.versions.version_list import VersionInfo, VersionList
    from shardckpt.tiers.tier_list import RunCaptures, TierList
    from shardckpt.witness.prove_resume import ResumeReport
    from shardckpt.witness.records.resumes import Proof, Resume, StepProof

_HOMES = {
    "shardckpt.checkpoint.save.handle": ("SaveHandle", "SaveTimings"),
    "shardckpt.divergence": ("Divergence",),
    "shardckpt.events.progress": ("Progress",),
    "shardckpt.native.step_copies": ("Durability", "StepCopy"),
    "shardckpt.offline.copy": ("Copied",),
    "shardckpt.offline.prune": ("Pruned", "StepInfo", "StepList", "UnfinishedFolder"),
    "shardckpt.offline.repair": ("Repair",),
    "shardckpt.offline.results.comparison": (
        "Comparison",
        "LayerDifference",
        "NotCompared",
        "TensorDifference",
        "ValueDifference",
    ),
    "shardckpt.offline.results.contents": (
        "FileInfo",
        "FileRange",
        "Inspection",
        "Problem",
        "Report",
        "TensorInfo",
        "Verification",
        "WrittenFile",
    ),
    "shardckpt.offline.results.tensor_stats": (
        "Bisection",
        "History",
        "LayerStats",
        "Statistics",
        "StepStats",
        "TensorStats",
    ),
    "shardckpt.offline.run_history.doctor": ("HealthReport",),
    "shardckpt.offline.run_history.health_checks": ("HealthCheck",),
    "shardckpt.offline.tasks.run_plan": ("PlanStatus",),
    "shardckpt.readers.registry": ("FormatInfo", "FormatList"),
    "shardckpt.stream.versions.version_list": ("VersionInfo", "VersionList"),
    "shardckpt.tiers.tier_list": ("RunCaptures", "TierList"),
    "shardckpt.witness.prove_resume": ("ResumeReport",),
    "shardckpt.witness.records.resumes": ("Proof", "Resume", "StepProof"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

_NEED_TORCH = ("ResumeReport", "SaveHandle", "SaveTimings")

__all__ = [
    "Bisection",
    "Comparison",
    "Copied",
    "Divergence",
    "Durability",
    "FileInfo",
    "FileRange",
    "FormatInfo",
    "FormatList",
    "HealthCheck",
    "HealthReport",
    "History",
    "Inspection",
    "LayerDifference",
    "LayerStats",
    "NotCompared",
    "PlanStatus",
    "Problem",
    "Progress",
    "Proof",
    "Pruned",
    "Repair",
    "Report",
    "Resume",
    "ResumeReport",
    "RunCaptures",
    "SaveHandle",
    "SaveTimings",
    "Statistics",
    "StepCopy",
    "StepInfo",
    "StepList",
    "StepProof",
    "StepStats",
    "TensorDifference",
    "TensorInfo",
    "TensorStats",
    "TierList",
    "UnfinishedFolder",
    "ValueDifference",
    "Verification",
    "VersionInfo",
    "VersionList",
    "WrittenFile",
]


def __getattr__(name: str) -> Any:
    """Load a result's class from its module."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _NEED_TORCH:
        require_torch(f"shardckpt.results.{name}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted({*globals(), *__all__})
