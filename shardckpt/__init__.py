"""Checkpoints for sharded PyTorch training: read any format, write safetensors.

Names are loaded on first use, so that `import shardckpt` is cheap and never imports torch. Names that train, save
or load need torch: without it they raise MissingTorchError, and all other names work.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardckpt import errors, events, results  # noqa: F401  (users reach them as attributes)
    from shardckpt.checkpoint.load.load import load
    from shardckpt.checkpoint.save.async_save import async_save
    from shardckpt.checkpoint.save.save import save
    from shardckpt.checkpoint.stateful.rng_state import RNGState
    from shardckpt.checkpoint.stateful.stateful import PerRank
    from shardckpt.checkpoint.stateful.variant import Variant
    from shardckpt.checkpointer import Checkpointer
    from shardckpt.errors import ShardckptError
    from shardckpt.offline.consolidate import consolidate, convert
    from shardckpt.offline.copy import copy
    from shardckpt.offline.diff import diff
    from shardckpt.offline.inspect import inspect
    from shardckpt.offline.merge_adapter import merge_adapter
    from shardckpt.offline.prune import ls, prune
    from shardckpt.offline.rekey import rekey
    from shardckpt.offline.repair import repair
    from shardckpt.offline.reshard import reshard
    from shardckpt.offline.run_history.bisect import bisect
    from shardckpt.offline.run_history.doctor import doctor
    from shardckpt.offline.run_history.history import history
    from shardckpt.offline.run_history.prove import prove
    from shardckpt.offline.select.options import Options
    from shardckpt.offline.stats import stats
    from shardckpt.offline.streams.compact_versions import compact_versions
    from shardckpt.offline.targets.target_registry import list_targets
    from shardckpt.offline.tasks.commit_plan import commit_plan, discard_plan
    from shardckpt.offline.tasks.run_plan import plan_tasks, read_plan_status, run_task
    from shardckpt.offline.verify import verify
    from shardckpt.open_checkpoint import open
    from shardckpt.readers.registry import formats
    from shardckpt.state.keys.slots import register_slot
    from shardckpt.state.model.load_model_state_dict import load_model_state_dict
    from shardckpt.state.model.model_state_dict import model_state_dict
    from shardckpt.state.optim.load_optim_state_dict import load_optim_state_dict
    from shardckpt.state.optim.optim_state_dict import optim_state_dict
    from shardckpt.stream.http_server import build_stream_server
    from shardckpt.stream.publish.ledger import Anchors
    from shardckpt.stream.publish.publisher import Publisher
    from shardckpt.stream.receive.subscriber import Subscriber
    from shardckpt.stream.versions.hf_delta import export_versions
    from shardckpt.stream.versions.version_list import list_versions, verify_versions
    from shardckpt.tiers.local_folder import Local
    from shardckpt.tiers.peer_memory import PeerMemory
    from shardckpt.tiers.tier_list import list_tiers, stop_tiers
    from shardckpt.witness.prove_resume import prove_resume
    from shardckpt.witness.witness import Witness

_HOMES = {
    "shardckpt.checkpoint.load.load": ("load",),
    "shardckpt.checkpoint.save.async_save": ("async_save",),
    "shardckpt.checkpoint.save.save": ("save",),
    "shardckpt.checkpoint.stateful.rng_state": ("RNGState",),
    "shardckpt.checkpoint.stateful.stateful": ("PerRank",),
    "shardckpt.checkpoint.stateful.variant": ("Variant",),
    "shardckpt.checkpointer": ("Checkpointer",),
    "shardckpt.offline.streams.compact_versions": ("compact_versions",),
    "shardckpt.offline.consolidate": ("consolidate", "convert"),
    "shardckpt.offline.copy": ("copy",),
    "shardckpt.offline.diff": ("diff",),
    "shardckpt.offline.inspect": ("inspect",),
    "shardckpt.offline.merge_adapter": ("merge_adapter",),
    "shardckpt.offline.prune": ("ls", "prune"),
    "shardckpt.offline.rekey": ("rekey",),
    "shardckpt.offline.repair": ("repair",),
    "shardckpt.offline.reshard": ("reshard",),
    "shardckpt.offline.run_history.bisect": ("bisect",),
    "shardckpt.offline.run_history.doctor": ("doctor",),
    "shardckpt.offline.run_history.history": ("history",),
    "shardckpt.offline.run_history.prove": ("prove",),
    "shardckpt.offline.select.options": ("Options",),
    "shardckpt.offline.stats": ("stats",),
    "shardckpt.offline.targets.target_registry": ("list_targets",),
    "shardckpt.offline.tasks.commit_plan": ("commit_plan", "discard_plan"),
    "shardckpt.offline.tasks.run_plan": ("plan_tasks", "read_plan_status", "run_task"),
    "shardckpt.offline.verify": ("verify",),
    "shardckpt.open_checkpoint": ("open",),
    "shardckpt.readers.registry": ("formats",),
    "shardckpt.state.keys.slots": ("register_slot",),
    "shardckpt.state.model.load_model_state_dict": ("load_model_state_dict",),
    "shardckpt.state.model.model_state_dict": ("model_state_dict",),
    "shardckpt.state.optim.load_optim_state_dict": ("load_optim_state_dict",),
    "shardckpt.state.optim.optim_state_dict": ("optim_state_dict",),
    "shardckpt.stream.http_server": ("build_stream_server",),
    "shardckpt.stream.publish.ledger": ("Anchors",),
    "shardckpt.stream.publish.publisher": ("Publisher",),
    "shardckpt.stream.receive.subscriber": ("Subscriber",),
    "shardckpt.stream.versions.hf_delta": ("export_versions",),
    "shardckpt.stream.versions.version_list": ("list_versions", "verify_versions"),
    "shardckpt.tiers.local_folder": ("Local",),
    "shardckpt.tiers.peer_memory": ("PeerMemory",),
    "shardckpt.tiers.tier_list": ("list_tiers", "stop_tiers"),
    "shardckpt.witness.prove_resume": ("prove_resume",),
    "shardckpt.witness.witness": ("Witness",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

_NEEDS_TORCH = (
    "shardckpt.checkpoint.",
    "shardckpt.checkpointer",
    "shardckpt.state.",
    "shardckpt.stream.publish.publisher",
    "shardckpt.stream.receive.subscriber",
    "shardckpt.tiers.local_folder",
    "shardckpt.tiers.peer_memory",
    "shardckpt.witness.prove_resume",
    "shardckpt.witness.witness",
)

__version__ = "0.2.0"

__all__ = [
    "Anchors",
    "Checkpointer",
    "Local",
    "Options",
    "PeerMemory",
    "PerRank",
    "Publisher",
    "RNGState",
    "ShardckptError",
    "Subscriber",
    "Variant",
    "Witness",
    "__version__",
    "async_save",
    "bisect",
    "build_stream_server",
    "commit_plan",
    "compact_versions",
    "consolidate",
    "convert",
    "copy",
    "diff",
    "discard_plan",
    "doctor",
    "export_versions",
    "formats",
    "history",
    "inspect",
    "list_targets",
    "list_tiers",
    "list_versions",
    "load",
    "load_model_state_dict",
    "load_optim_state_dict",
    "ls",
    "merge_adapter",
    "model_state_dict",
    "open",
    "optim_state_dict",
    "plan_tasks",
    "prove",
    "prove_resume",
    "prune",
    "read_plan_status",
    "register_slot",
    "rekey",
    "repair",
    "reshard",
    "run_task",
    "save",
    "stats",
    "stop_tiers",
    "verify",
    "verify_versions",
]


_MODULES = ("errors", "events", "results")
_PUBLIC = frozenset([*__all__, *_MODULES])


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
    if name in _MODULES:
        return import_module(f"shardckpt.{name}")
    home = _HOME_OF.get(name, "shardckpt.errors")
    if _needs_torch(name):
        import_module("shardckpt.errors").require_torch(f"shardckpt.{name}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted({*globals(), *_PUBLIC})
