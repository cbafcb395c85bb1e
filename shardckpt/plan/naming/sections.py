"""Find the model, the optimizers and other parts of a checkpoint.

A subtree with `state` and `param_groups` is an optimizer. The model is the subtree `model`, `state_dict` or `module`,
else the only other subtree with tensors, else the top level. If the top level is a flat state dict, its subtrees are
other parts. Tensors below a listed optimizer never belong to the model. Options override these rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, replace
from math import prod

from shardckpt.errors import AmbiguousError, UsageError
from shardckpt.manifest import Manifest, Path, dotted
from shardckpt.plan.subclass_record import SUBCLASS

MODEL_KEYS = ("model", "state_dict", "module")
_STATE, _GROUPS = "state", "param_groups"
_PARTS = frozenset({_STATE, _GROUPS, "units", "originals"})
_FLAT = re.compile(r"(?P<root>optim|optimizer)\.(?P<rest>(state|param_groups)\..+)", re.DOTALL)
_DEEPEST = 3
_TORCH_FILES = (".pt", ".pth", ".bin", ".ckpt")


@dataclass(frozen=True, slots=True)
class Sections:
    """Paths to the model, the optimizers and other subtrees."""

    model: Path  # empty for the top level
    optimizers: tuple[Path, ...]  # in saved order
    others: tuple[Path, ...]  # all other subtrees and values
    # Paths below which nothing belongs to the model: all optimizers, also unwanted ones.
    foreign: frozenset[Path] = frozenset()
    # Whether the model is a state dict at the top level with each tensor under one key; then deeper values do not
    # belong to it.
    is_flat: bool = False
    wrapped: frozenset[Path] = frozenset()  # wrapper subclasses, whose inner tensors count as one tensor


def find_sections(manifest: Manifest, model_key: str = "", optim_key: str = "") -> Sections:
    """Find a checkpoint's model, optimizers and other subtrees."""
    stored, wrapped = _optimizers(manifest), _find_wrapped(manifest)
    optimizers = [find_key(manifest, optim_key, "--optim-key")] if optim_key else stored
    wanted = frozenset(optimizers)
    foreign = wanted.union(stored, manifest.optimizers)
    model = find_key(manifest, model_key, "--model-key") if model_key else _model(manifest, foreign, wrapped)
    if model_key:  # such as averaged weights that an optimizer has
        foreign = frozenset(root for root in foreign if root in wanted or not _below(model, root))
    inside = (model, *optimizers) if model else tuple(optimizers)
    others: dict[Path, None] = {}
    is_flat = model == () and not model_key and _is_flat(manifest, foreign, wrapped)
    for path in _paths(manifest) if model or foreign or is_flat else manifest.objects:
        is_array = path in manifest.tensors or path[:-1] in wrapped
        is_tensor = model == () and is_array and not _below_any(path, foreign)
        if is_tensor and not (is_flat and len(_join(path, wrapped)) > 1):
            continue
        is_of_model = model != () and _below(path, model) and not _below_any(path, foreign)
        if not is_of_model and not _below_any(path, wanted):
            others[_top(path, inside)] = None
    return Sections(model, tuple(optimizers), tuple(others), foreign, is_flat, wrapped)


def _find_wrapped(manifest: Manifest) -> frozenset[Path]:
    return frozenset(path[:-1] for path in manifest.objects if path and path[-1] == SUBCLASS)


def _join(path: Path, wrapped: Set[Path]) -> Path:
    """Return a tensor's path: the wrapper subclass's for an inner tensor."""
    return path[:-1] if wrapped and path[:-1] in wrapped else path


def model_paths(manifest: Manifest, found: Sections) -> Iterator[Path]:
    """Yield paths to the model's tensors, in saved order."""
    depth = len(found.model)
    for path in manifest.tensors:
        is_of_model = path[:depth] == found.model and not (found.is_flat and len(_join(path, found.wrapped)) > 1)
        if is_of_model and not _below_any(path, found.foreign):
            yield path


def model_values(manifest: Manifest, found: Sections) -> Iterator[Path]:
    """Yield paths to the model's other values, such as a module's extra state, in saved order."""
    depth = len(found.model)
    if depth:
        for path in manifest.objects:
            if path[:depth] == found.model and not _below_any(path, found.foreign):
                yield path


def is_beside_state(path: Path, root: Path) -> bool:
    """Return True for what an optimizer has next to its state and groups."""
    n = len(root)
    return path[:n] == root and len(path) > n and str(path[n]).partition(".")[0] not in _PARTS


def find_key(manifest: Manifest, key: str, option: str) -> Path:
    """Return the path for a user's key: keys joined by dots, `file`, or `file:keys`."""
    file, _, rest = key.rpartition(":")
    wanted = {dotted((file, rest)), key} if file else {key}
    for path in _paths(manifest):
        for n in range(1, len(path) + 1):
            if dotted(path[:n]) in wanted:
                return path[:n]
    tops = dict.fromkeys(str(path[0]) for path in _paths(manifest) if len(path) > 1)
    if not tops:
        fix = f"All tensors in this checkpoint are at the top level: omit {option}."
        raise UsageError(f"{option} {key!r} leads nowhere", found="no parts", fix=fix)
    raise UsageError(
        f"{option} {key!r} leads nowhere", found=", ".join(list(tops)[:12]), fix="Choose one, or a path below one."
    )


def split_flat_names(manifest: Manifest) -> Manifest:
    """Split one-key names such as `optim.state.w.exp_avg` into nested paths."""
    # Needed for old DCP folders, which store no paths; other checkpoints are returned unchanged.
    names = [*manifest.tensors, *manifest.objects]
    if any(len(path) != 1 for path in names) or not any(_FLAT.fullmatch(str(path[0])) for path in names):
        return manifest
    moved = {path: _split(path) for path in names}
    return replace(
        manifest,
        tensors={moved[p]: e._replace(path=moved[p]) for p, e in manifest.tensors.items()},
        objects={moved[p]: replace(e, path=moved[p]) for p, e in manifest.objects.items()},
        aliases={moved[p]: moved[q] for p, q in manifest.aliases.items()},
    )


def _split(path: Path) -> Path:
    name = str(path[0])
    if match := _FLAT.fullmatch(name):
        return match["root"], match["rest"]
    root, dot, rest = name.partition(".")
    return (root, rest) if dot and root in MODEL_KEYS else path


def _paths(manifest: Manifest) -> Iterable[Path]:
    yield from manifest.tensors
    yield from manifest.objects


def _below(path: Path, root: Path) -> bool:
    return path[: len(root)] == root


def _below_any(path: Path, roots: Set[Path]) -> bool:
    return bool(roots) and any(path[:n] in roots for n in range(len(path) + 1))


def _optimizers(manifest: Manifest) -> list[Path]:
    """Return every path that has both `state` and `param_groups` below it, nested or flattened into one key."""
    seen: dict[Path, set[str]] = {}
    for path in _paths(manifest):
        if len(path) == 1 and isinstance(path[0], str) and not path[0].startswith((_STATE, _GROUPS)):
            continue  # as most names in a flat state dict
        for n, key in enumerate(path[: _DEEPEST + 1]):
            if isinstance(key, str):
                kind = key.partition(".")[0]
                if kind in (_STATE, _GROUPS) and (key == kind or n == len(path) - 1):
                    seen.setdefault(path[:n], set()).add(kind)
    roots = [root for root, kinds in seen.items() if len(kinds) == 2]
    return [root for root in roots if not any(other != root and _below(root, other) for other in roots)]


def _model(manifest: Manifest, foreign: Set[Path], wrapped: Set[Path]) -> Path:
    known = {*foreign, *(path for path, _ in manifest.variants.values())}
    tensors = [path for path in manifest.tensors if not _below_any(path, known)] if known else [*manifest.tensors]
    tensors = [_join(path, wrapped) for path in tensors] if wrapped else tensors
    for depth in range(1, _DEEPEST):
        deeper = [path for path in tensors if len(path) > depth]
        for key in MODEL_KEYS:
            found = {path[:depth] for path in deeper if _stem(path[depth - 1]) == key}
            if len(found) > 1:
                raise AmbiguousError(
                    "several subtrees could be the model",
                    found=", ".join(sorted(map(dotted, found))),
                    fix="Choose one with --model-key.",
                )
            if found:
                return found.pop()
    tops = {path[:1] for path in tensors if len(path) > 1}
    if len(tops) == 1 and all(len(path) > 1 for path in tensors):
        return tops.pop()
    return ()


def _is_flat(manifest: Manifest, foreign: Set[Path], wrapped: Set[Path]) -> bool:
    """Return True if the tensors at the top level are a model's state dict."""
    # A state dict's names contain dots, and its tensors have most elements. Other tensors at the top level are a few
    # numbers next to subtrees.
    tensors = [(_join(path, wrapped), entry) for path, entry in manifest.tensors.items()]
    if any("." in str(path[0]) for path, _ in tensors if len(path) == 1):
        return True
    loose = [entry for path, entry in tensors if len(path) == 1]
    nested = [entry for path, entry in tensors if len(path) > 1 and not _below_any(path, foreign)]
    return bool(loose) and sum(prod(e.shape) for e in loose) >= sum(prod(e.shape) for e in nested)


def _stem(key: str | int) -> str:
    name = str(key)
    return name.rpartition(".")[0] if name.endswith(_TORCH_FILES) else name


def _top(path: Path, inside: tuple[Path, ...]) -> Path:
    """Return the shortest prefix of `path` without a part, for messages."""
    for n in range(1, len(path)):
        if not any(_below(part, path[:n]) for part in inside):
            return path[:n]
    return path
