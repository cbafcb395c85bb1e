"""Checkpoints for sharded PyTorch training: read any format, write safetensors.

Names are loaded on first use, so that `import shardckpt` is cheap and never imports torch. The names in `checkpoint`
and `state` need torch: without it they raise MissingTorchError, and all other names work.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardckpt.checkpoint.load.load import MismatchError, load
    from shardckpt.checkpoint.save.async_save import async_save
    from shardckpt.checkpoint.save.handle import SaveHandle, SaveTimings
    from shardckpt.checkpoint.save.save import save
    from shardckpt.checkpoint.stateful.rng_state import RNGState
    from shardckpt.checkpoint.stateful.stateful import PerRank
    from shardckpt.checkpoint.stateful.variant import Variant
    from shardckpt.checkpointer import Checkpointer
    from shardckpt.divergence import Divergence, ResumeDivergence
    from shardckpt.errors import (
        AmbiguousError,
        CheckpointError,
        ChecksumError,
        FormatError,
        IncompleteError,
        MissingFileError,
        MissingPackageError,
        MissingTorchError,
        NameCollisionError,
        NoCompleteCheckpoint,
        NoMemoryError,
        NoSpaceError,
        OverlapError,
        PrecisionError,
        RankError,
        ShardckptError,
        SourceNotFoundError,
        StateDictError,
        StorageError,
        TargetExistsError,
        TruncatedError,
        UnknownFormatError,
        UnknownNameError,
        UnsafeError,
        UnsupportedError,
        UsageError,
    )
    from shardckpt.events.operations import LoadEvent, OperationEvent, SaveEvent
    from shardckpt.events.progress import Progress
    from shardckpt.events.run_events import (
        BackpressureEvent,
        FallbackEvent,
        PromotionEvent,
        PruneEvent,
        ReplicateEvent,
        RestoreEvent,
        ResumeEvent,
        WithdrawalEvent,
    )
    from shardckpt.native.step_copies import Durability, StepCopy
    from shardckpt.offline.consolidate import consolidate, convert
    from shardckpt.offline.copy import Copied, copy
    from shardckpt.offline.diff import diff
    from shardckpt.offline.inspect import inspect
    from shardckpt.offline.merge_adapter import merge_adapter
    from shardckpt.offline.prune import Pruned, StepInfo, StepList, UnfinishedFolder, ls, prune
    from shardckpt.offline.rekey import rekey
    from shardckpt.offline.repair import Repair, repair
    from shardckpt.offline.reshard import reshard
    from shardckpt.offline.results.comparison import (
        Comparison,
        LayerDifference,
        NotCompared,
        TensorDifference,
        ValueDifference,
    )
    from shardckpt.offline.results.contents import FileInfo, Inspection, TensorInfo, Verification
    from shardckpt.offline.results.problems import FileRange, Problem
    from shardckpt.offline.results.tensor_stats import (
        Bisection,
        History,
        LayerStats,
        Statistics,
        StepStats,
        TensorStats,
    )
    from shardckpt.offline.run_history.bisect import bisect
    from shardckpt.offline.run_history.history import history
    from shardckpt.offline.run_history.prove import prove
    from shardckpt.offline.select.options import Options
    from shardckpt.offline.stats import stats
    from shardckpt.offline.targets.target_registry import list_targets
    from shardckpt.offline.verify import verify
    from shardckpt.offline.write.report import Report, WrittenFile
    from shardckpt.open_checkpoint import open
    from shardckpt.readers.registry import FormatInfo, FormatList, formats
    from shardckpt.state.keys.kinds import StateKind
    from shardckpt.state.model.load_model_state_dict import load_model_state_dict
    from shardckpt.state.model.model_state_dict import iter_full_state_dict, model_state_dict
    from shardckpt.state.optim.load_optim_state_dict import load_optim_state_dict
    from shardckpt.state.optim.optim_state_dict import optim_state_dict
    from shardckpt.tiers.local_folder import Local
    from shardckpt.tiers.peer_memory import PeerMemory
    from shardckpt.tiers.tier_list import HolderInfo, HungHolderInfo, TierList, list_tiers, stop_tiers
    from shardckpt.witness.prove_resume import ResumeReport, prove_resume
    from shardckpt.witness.records.proofs import Proof, StepProof
    from shardckpt.witness.records.resumes import Resume
    from shardckpt.witness.witness import Witness

_HOMES = {
    "shardckpt.checkpointer": ("Checkpointer",),
    "shardckpt.witness.prove_resume": ("ResumeReport", "prove_resume"),
    "shardckpt.witness.witness": ("Witness",),
    "shardckpt.witness.records.resumes": ("Resume",),
    "shardckpt.divergence": ("Divergence", "ResumeDivergence"),
    "shardckpt.native.step_copies": ("Durability", "StepCopy"),
    "shardckpt.checkpoint.save.async_save": ("async_save",),
    "shardckpt.checkpoint.save.handle": ("SaveHandle", "SaveTimings"),
    "shardckpt.checkpoint.stateful.stateful": ("PerRank",),
    "shardckpt.checkpoint.load.load": ("MismatchError", "load"),
    "shardckpt.tiers.local_folder": ("Local",),
    "shardckpt.tiers.peer_memory": ("PeerMemory",),
    "shardckpt.open_checkpoint": ("open",),
    "shardckpt.checkpoint.stateful.rng_state": ("RNGState",),
    "shardckpt.checkpoint.save.save": ("save",),
    "shardckpt.checkpoint.stateful.variant": ("Variant",),
    "shardckpt.events.operations": ("LoadEvent", "OperationEvent", "SaveEvent"),
    "shardckpt.events.run_events": (
        "BackpressureEvent",
        "FallbackEvent",
        "PromotionEvent",
        "PruneEvent",
        "ReplicateEvent",
        "RestoreEvent",
        "ResumeEvent",
        "WithdrawalEvent",
    ),
    "shardckpt.offline.copy": ("Copied", "copy"),
    "shardckpt.readers.registry": ("FormatInfo", "FormatList", "formats"),
    "shardckpt.offline.diff": ("diff",),
    "shardckpt.offline.consolidate": ("consolidate", "convert"),
    "shardckpt.offline.inspect": ("inspect",),
    "shardckpt.offline.merge_adapter": ("merge_adapter",),
    "shardckpt.offline.select.options": ("Options",),
    "shardckpt.offline.targets.target_registry": ("list_targets",),
    "shardckpt.offline.rekey": ("rekey",),
    "shardckpt.offline.repair": ("Repair", "repair"),
    "shardckpt.offline.results.problems": ("FileRange", "Problem"),
    "shardckpt.offline.results.comparison": (
        "Comparison",
        "LayerDifference",
        "NotCompared",
        "TensorDifference",
        "ValueDifference",
    ),
    "shardckpt.offline.results.contents": ("FileInfo", "Inspection", "TensorInfo", "Verification"),
    "shardckpt.witness.records.proofs": ("Proof", "StepProof"),
    "shardckpt.offline.results.tensor_stats": (
        "Bisection",
        "History",
        "LayerStats",
        "Statistics",
        "StepStats",
        "TensorStats",
    ),
    "shardckpt.offline.write.report": ("Report", "WrittenFile"),
    "shardckpt.offline.reshard": ("reshard",),
    "shardckpt.offline.prune": ("Pruned", "StepInfo", "StepList", "UnfinishedFolder", "ls", "prune"),
    "shardckpt.offline.run_history.bisect": ("bisect",),
    "shardckpt.offline.run_history.history": ("history",),
    "shardckpt.offline.run_history.prove": ("prove",),
    "shardckpt.offline.stats": ("stats",),
    "shardckpt.offline.verify": ("verify",),
    "shardckpt.events.progress": ("Progress",),
    "shardckpt.tiers.tier_list": ("HolderInfo", "HungHolderInfo", "TierList", "list_tiers", "stop_tiers"),
    "shardckpt.state.keys.kinds": ("StateKind",),
    "shardckpt.state.model.load_model_state_dict": ("load_model_state_dict",),
    "shardckpt.state.model.model_state_dict": ("iter_full_state_dict", "model_state_dict"),
    "shardckpt.state.optim.load_optim_state_dict": ("load_optim_state_dict",),
    "shardckpt.state.optim.optim_state_dict": ("optim_state_dict",),
}
# Module of each public name; a public name without a module here is an error.
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

_NEEDS_TORCH = (
    "shardckpt.checkpoint.",
    "shardckpt.checkpointer",
    "shardckpt.state.",
    "shardckpt.tiers.local_folder",
    "shardckpt.tiers.peer_memory",
    "shardckpt.witness.prove_resume",
    "shardckpt.witness.witness",
)

__version__ = "0.2.0"

__all__ = [
    "AmbiguousError",
    "BackpressureEvent",
    "Bisection",
    "CheckpointError",
    "Checkpointer",
    "ChecksumError",
    "Comparison",
    "Copied",
    "Divergence",
    "Durability",
    "FallbackEvent",
    "FileInfo",
    "FileRange",
    "FormatError",
    "FormatInfo",
    "FormatList",
    "History",
    "HolderInfo",
    "HungHolderInfo",
    "IncompleteError",
    "Inspection",
    "LayerDifference",
    "LayerStats",
    "LoadEvent",
    "Local",
    "MismatchError",
    "MissingFileError",
    "MissingPackageError",
    "MissingTorchError",
    "NameCollisionError",
    "NoCompleteCheckpoint",
    "NoMemoryError",
    "NoSpaceError",
    "NotCompared",
    "OperationEvent",
    "Options",
    "OverlapError",
    "PeerMemory",
    "PerRank",
    "PrecisionError",
    "Problem",
    "Progress",
    "PromotionEvent",
    "Proof",
    "PruneEvent",
    "Pruned",
    "RNGState",
    "RankError",
    "Repair",
    "ReplicateEvent",
    "Report",
    "RestoreEvent",
    "Resume",
    "ResumeDivergence",
    "ResumeEvent",
    "ResumeReport",
    "SaveEvent",
    "SaveHandle",
    "SaveTimings",
    "ShardckptError",
    "SourceNotFoundError",
    "StateDictError",
    "StateKind",
    "Statistics",
    "StepCopy",
    "StepInfo",
    "StepList",
    "StepProof",
    "StepStats",
    "StorageError",
    "TargetExistsError",
    "TensorDifference",
    "TensorInfo",
    "TensorStats",
    "TierList",
    "TruncatedError",
    "UnfinishedFolder",
    "UnknownFormatError",
    "UnknownNameError",
    "UnsafeError",
    "UnsupportedError",
    "UsageError",
    "ValueDifference",
    "Variant",
    "Verification",
    "WithdrawalEvent",
    "Witness",
    "WrittenFile",
    "__version__",
    "async_save",
    "bisect",
    "consolidate",
    "convert",
    "copy",
    "diff",
    "formats",
    "history",
    "inspect",
    "iter_full_state_dict",
    "list_targets",
    "list_tiers",
    "load",
    "load_model_state_dict",
    "load_optim_state_dict",
    "ls",
    "merge_adapter",
    "model_state_dict",
    "open",
    "optim_state_dict",
    "prove",
    "prove_resume",
    "prune",
    "rekey",
    "repair",
    "reshard",
    "save",
    "stats",
    "stop_tiers",
    "verify",
]


_PUBLIC = frozenset(__all__)


def _needs_torch(name: str) -> bool:
    return _HOME_OF.get(name, "").startswith(_NEEDS_TORCH)


def _has_torch() -> bool:
    return sys.modules["torch"] is not None if "torch" in sys.modules else find_spec("torch") is not None


if not _has_torch():  # `from shardckpt import *` takes what works
    __all__[:] = [name for name in __all__ if not _needs_torch(name)]


def __getattr__(name: str) -> Any:
    """Load a public name from its module; raise MissingTorchError if it needs torch, which is not installed."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'shardckpt' has no attribute {name!r}")
    home = _HOME_OF.get(name, "shardckpt.errors")
    if _needs_torch(name):
        import_module("shardckpt.errors").require_torch(f"shardckpt.{name}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted({*globals(), *_PUBLIC})
