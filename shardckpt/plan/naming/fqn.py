"""Tensor names: remove wrappers, select by globs, choose shared names.

Shared tensors are detected from shared storages, alias records, and `tie_word_embeddings` in a model's config, never
from equal values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from shardckpt.errors import NameCollisionError, UsageError
from shardckpt.manifest import Manifest, Path, TensorEntry, dotted
from shardckpt.plan.naming.sections import Sections, model_paths

# Segments that torch.compile, FSDP1, activation checkpointing and Lightning insert into names, at any depth.
WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"})

_LEADING = "module"  # prefix that DDP and DeepSpeed add to every name; inside a name it may belong to the model

_HEADS = ("lm_head.weight", "*.lm_head.weight", "embed_out.weight", "cls.predictions.decoder.weight")
_EMBEDDINGS = (
    "shared.weight",
    "*embed_tokens.weight",
    "*wte.weight",
    "*word_embeddings.weight",
    "*tok_embeddings.weight",
    "*embed_in.weight",
)


def strip_wrappers(name: str) -> str:
    """Return a name without wrapper segments."""
    return ".".join(s for s in name.split(".") if s not in WRAPPERS) or name


def clean_names(names: Iterable[str]) -> dict[str, str]:
    """Return each name's FQN in the unwrapped model."""
    # `module.` is removed only if every name starts with it, at any depth among other wrappers. A name that
    # consists only of wrappers stays unchanged.
    cleaned = {name: strip_wrappers(name) for name in names}
    while cleaned and all(name.startswith(f"{_LEADING}.") and name != f"{_LEADING}." for name in cleaned.values()):
        cleaned = {name: new.removeprefix(f"{_LEADING}.") for name, new in cleaned.items()}
    require_unique(cleaned)
    return cleaned


def make_cleaner(names: Iterable[str]) -> Callable[[str], str]:
    """Return a function that cleans further names like `clean_names`."""
    known = clean_names(names)
    strips = [name for name, new in known.items() if name != new]
    depth = min((_leading_depth(name) for name in strips), default=0)

    def apply(name: str) -> str:
        if name in known:
            return known[name]
        segments = [s for s in name.split(".") if s not in WRAPPERS]
        drop = 0
        while drop < depth and drop < len(segments) - 1 and segments[drop] == _LEADING:
            drop += 1
        return ".".join(segments[drop:])

    return apply


def _leading_depth(name: str) -> int:
    segments = [s for s in name.split(".") if s not in WRAPPERS]
    return next((i for i, s in enumerate(segments) if s != _LEADING), len(segments))


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model's tensors by FQN."""

    tensors: dict[str, TensorEntry]  # in saved order
    clean: Callable[[str], str]  # cleans further names in the same way


def name_model(manifest: Manifest, found: Sections) -> NamedModel:
    """Return the model's tensors under the names of the unwrapped model."""
    depth = len(found.model)
    paths = list(model_paths(manifest, found))
    stored = {path: dotted(path[depth:]) or dotted(path) for path in paths}
    require_unique({str(path): name for path, name in stored.items()})
    cleaned = clean_names(stored.values())
    return NamedModel({cleaned[stored[path]]: manifest.tensors[path] for path in paths}, make_cleaner(stored.values()))


def select_pretrained(model: NamedModel, manifest: Manifest, found: Sections) -> NamedModel:
    """Return the part of a model that a stored config describes, under its own names; without one, the model."""
    *root, name = manifest.pretrained or ("",)
    if (*root,) != found.model or not name:
        return model
    inside = {n.removeprefix(f"{name}."): entry for n, entry in model.tensors.items() if n.startswith(f"{name}.")}
    return replace(model, tensors=inside)


def require_unique(renamed: Mapping[str, str]) -> None:
    """Require that no two names become equal."""
    taken: dict[str, str] = {}
    for old, new in renamed.items():
        if new in taken:
            raise NameCollisionError(
                f"{taken[new]!r} and {old!r} would both be named {new!r}",
                fix="Exclude one with --exclude, or convert one part at a time.",
            )
        taken[new] = old


def select_names(
    names: Iterable[str], include: Sequence[str], exclude: Sequence[str], owners: Mapping[str, str] | None = None
) -> list[str]:
    """Return names that match `include` (by default all) and not `exclude`; a weight's parts match by its name."""
    owned = {name: (owners or {}).get(name, name) for name in names}
    every = list(dict.fromkeys(owned.values()))
    require_matches((*include, *exclude), every)
    kept = [
        name
        for name, owner in owned.items()
        if (not include or any(fnmatchcase(owner, glob) for glob in include))
        and not any(fnmatchcase(owner, glob) for glob in exclude)
    ]
    if every and not kept:
        raise UsageError(
            "--include and --exclude leave nothing" if include else "--exclude leaves nothing",
            found=f"{len(every)} names such as {', '.join(every[:2])}, all excluded",
            fix="Give narrower globs.",
        )
    return kept


def require_matches(globs: Iterable[str], names: Sequence[str]) -> None:
    """Require that every glob matches a name."""
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in names):
            raise UsageError(
                f"the glob {glob!r} matches no tensor",
                found=f"{len(names)} names such as {', '.join(names[:2])}" if names else "no names at all",
                fix="Globs match names as they are written: a model's without its key in the file.",
            )


def is_head(name: str) -> bool:
    """Return True for a weight that a model's config may tie to the input embedding."""
    return any(fnmatchcase(name, glob) for glob in _HEADS)


def is_embedding(name: str) -> bool:
    """Return True for a token embedding's weight, by transformers' names."""
    return any(fnmatchcase(name, glob) for glob in _EMBEDDINGS)


def read_tie(config: Mapping[str, object]) -> bool | None:
    """Return whether a model's config ties the head to the embeddings; None if it leaves this to the class."""
    text = config.get("text_config")
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings") if isinstance(text, dict) else None)
    return tied if isinstance(tied, bool) else None


def read_config_ties(config: Mapping[str, object], names: Mapping[str, TensorEntry]) -> dict[str, str]:
    """Return output embedding to input embedding, if a model's config ties them and they are alike."""
    if not read_tie(config):
        return {}
    embedding = next((n for glob in _EMBEDDINGS for n in names if fnmatchcase(n, glob)), None)
    if embedding is None:
        return {}
    same = (names[embedding].shape, names[embedding].dtype)
    return {name: embedding for name, entry in names.items() if is_head(name) and (entry.shape, entry.dtype) == same}


def map_kept_names(
    names: Sequence[str], paths: Mapping[str, Path], aliases: Mapping[Path, Path], prefer: Iterable[str] = ()
) -> dict[str, str]:
    """Map each name that is not written to the name that is written for it."""
    preferred = set(prefer)
    groups: dict[Path, list[str]] = {}
    for name in names:
        groups.setdefault(aliases.get(paths[name], paths[name]), []).append(name)
    dropped: dict[str, str] = {}
    for members in groups.values():
        kept = next((name for name in members if name in preferred), members[0])
        dropped |= {name: kept for name in members if name != kept}
    return dropped
