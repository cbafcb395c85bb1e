"""Steps of a PEFT model: each has the adapter and what trains with it, and refers to the frozen base."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

import shardckpt
from shardckpt.checkpoint.load.source import CheckpointSource
from shardckpt.checkpoint.save.render_model_files import find_adapters
from shardckpt.errors import ShardckptError, UsageError, require_bools
from shardckpt.events.warn_user import warn_user
from shardckpt.ranks.process_group import get_ranks

__all__ = ["AdapterSteps"]

_LOG = logging.getLogger("shardckpt")
_NAME, _REVISION = "peft.base", "peft.revision"  # names of a step's custom metadata
_COPY = "adapter-base"  # name of a model's copy next to the steps
_CHOSEN_BY_USER = frozenset({"base", "trainable_only", "base_key_map"})


class _Base(NamedTuple):
    """The model that an adapter was made for."""

    name: str  # on the Hugging Face hub, or a folder's absolute path; empty if the model has none
    revision: str = ""  # on the hub: the commit if a folder is found; empty if unknown
    folder: str = ""  # on this machine; empty without one

    def differs(self, other: _Base) -> bool:
        """Return True if this is another model than `other`, as far as both are known."""
        return self.name != other.name or len({self.revision, other.revision} - {""}) > 1

    def __str__(self) -> str:
        named = repr(self.name) if self.name else "a model without a name"
        return f"{named}, revision {self.revision}" if self.revision else named


class AdapterSteps:
    """Saves steps without the frozen parameters of models with PEFT adapters, and requires their base before a load.

    The steps refer to the base's folder. If it is not on this machine, or differs from the model, as with quantized
    weights, they refer to a copy of the model that the first save stores next to them.
    """

    def __init__(self, adapter_only: bool) -> None:
        require_bools(adapter_only=adapter_only)
        self.is_on = adapter_only
        self._base: _Base | None = None  # known after the first save; without a folder if steps are complete

    def _is_for(self, models: Iterable[nn.Module], options: Mapping[str, Any]) -> bool:
        """Return True if models have an adapter, and the user's options name no other base."""
        return self.is_on and not _CHOSEN_BY_USER & options.keys() and any(map(find_adapters, models))

    def save(
        self, save: Callable[..., Any], models: Mapping[str, nn.Module], root: str, options: Mapping[str, Any]
    ) -> Any:
        """Save a step in a root with a state's models, and return what `save` returns. Collective."""
        if not self._is_for(models.values(), options):
            return save(**options)
        if self._base is None:
            return self._save_first(save, models, root, options)
        options = _add_notes(options, self._base)
        return save(**options, base=self._base.folder, trainable_only=True) if self._base.folder else save(**options)

    def _save_first(
        self,
        save: Callable[..., Any],
        models: Mapping[str, nn.Module],
        root: str,
        options: Mapping[str, Any],
    ) -> Any:
        """Save the first step, and choose for all what they refer to."""
        base, copy = _find_base(models.values(), root), f"{root}/{_COPY}"
        options, reasons = _add_notes(options, base), list[str]()
        for folder in (base.folder, copy) if base.folder else (copy,):
            try:
                if folder == copy:
                    _store_base(models, copy)
                saved = save(**options, base=folder, trainable_only=True)
                if saved is not None:
                    saved.result()  # later saves in the background may rely on the base
            except ShardckptError as error:  # the same on all ranks
                reasons.append(str(error))
            else:
                self._base = base._replace(folder=folder)
                _LOG.info("the steps in %s have the adapter, and refer to the base in %s", root, folder)
                return saved
        self._base = base._replace(folder="")
        if get_ranks(None).rank == 0:
            warn_user(f"each step in {root} has the adapter's base, since it cannot refer to one: {'; '.join(reasons)}")
        return save(**options)

    def require_base(self, models: Sequence[nn.Module], path: str) -> None:
        """Require the base that a step's adapter was trained on. Collective. Raises UsageError."""
        if not self._is_for(models, {}):
            return

        def decide(messages: list[bytes]) -> list[bytes]:
            found, saved = _describe_base(models), _read_base(path)
            if saved is not None and found.differs(saved):
                raise UsageError(
                    "the step's adapter was trained on another base",
                    where=path,
                    found=str(found),
                    expected=str(saved),
                    fix="Build the model from that base, or pass adapter_only=False to replace the model's by it.",
                )
            return [b""] * len(messages)

        get_ranks(None).ask_rank0(f"reading the base's name in {path}", b"", decide)


def _add_notes(options: Mapping[str, Any], base: _Base) -> dict[str, Any]:
    notes = {**(options.get("custom_metadata") or {}), _NAME: base.name, _REVISION: base.revision}
    return {**options, "custom_metadata": notes}


def _describe_base(models: Iterable[nn.Module]) -> _Base:
    """Return the base of the first adapter as this machine knows it; nothing is downloaded."""
    config = next(config for model in models for config in find_adapters(model).values())
    name = getattr(config, "base_model_name_or_path", None) or ""
    revision = getattr(config, "revision", None) or ""
    if os.path.isdir(name):
        return _Base(os.path.realpath(name), "", os.path.realpath(name))
    try:
        from huggingface_hub import snapshot_download  # noqa: PLC0415  (not each framework has it)

        folder = str(snapshot_download(name, revision=revision or None, local_files_only=True))
    except (ImportError, OSError, ValueError):  # it is not in the cache, or has no name that the hub may know
        return _Base(name, revision)
    return _Base(name, os.path.basename(folder), folder)


def _find_base(models: Iterable[nn.Module], root: str) -> _Base:
    """Return the base as rank 0 finds it. Collective."""

    def decide(messages: list[bytes]) -> list[bytes]:
        base = _describe_base(models)
        if "://" in root:  # a load of a run on another store would need the folder by argument
            base = base._replace(folder="")
        return [json.dumps(base).encode()] * len(messages)

    return _Base(*json.loads(get_ranks(None).ask_rank0(f"looking for the base of {root}", b"", decide)))


def _store_base(models: Mapping[str, nn.Module], folder: str) -> None:
    """Save models in a folder unless it has a checkpoint. Collective."""

    def decide(messages: list[bytes]) -> list[bytes]:
        try:
            CheckpointSource(folder)
        except ShardckptError:  # there is none, or a save of it has not ended
            return [b"missing"] * len(messages)
        return [b""] * len(messages)

    if get_ranks(None).ask_rank0(f"looking for {folder}", b"", decide):
        shardckpt.save({**models}, folder, overwrite=True)


def _read_base(path: str) -> _Base | None:
    """Return the base that a step names; None if it names none, or is of another format."""
    texts = CheckpointSource(path).custom_metadata
    return _Base(texts[_NAME], texts.get(_REVISION, "")) if _NAME in texts else None
