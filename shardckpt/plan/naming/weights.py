"""Names of a model's weights: trained, master weights or averages; names that PEFT gives, in memory and in files."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Literal

from shardckpt.errors import UsageError
from shardckpt.manifest import Manifest, Path, TensorEntry, dotted
from shardckpt.plan.naming.fqn import require_unique
from shardckpt.plan.naming.sections import find_sections

# The model's own weights, an optimizer's copies in higher precision, averages over steps, or a variant's name.
Weights = Literal["live", "master", "ema"] | str

LIVE = "live"
_USUAL = ("master", "ema")
_AVERAGED = "module"  # prefix that `torch.optim.swa_utils.AveragedModel` adds to every name

_PREFIX = re.compile(r"^base_model\.model\.")
_WRAPPED = re.compile(r"(\.token_adapter)?\.(base_layer|original_module)(?=\.|$)")
_SAVED_MODULE = re.compile(r"\.modules_to_save\.[^.]+(?=\.)")
_ADAPTER = re.compile(r"\.(lora_[A-Za-z_]+|trainable_tokens_[a-z]+)\.[^.]+(?=\.|$)")
_MAGNITUDE = re.compile(r"\.lora_magnitude_vector\.weight$")

# Name parts that mark a base model's tensors in a PEFT model's state dict.
PEFT_PART = re.compile(r"base_model\.model\.|\.base_layer\.|\.original_module\.")

# How to merge a PEFT model's state dict, or to write its model and its adapter.
WAY_TO_BASE = (
    r"Merge the adapter with `shardckpt merge-adapter`, whose base and adapter may be one step. Or write the model"
    r" alone with --exclude '*.lora_*' --rename 'base_model\.model\.(.*)=\1' --rename"
    r" '(.*)\.base_layer(\..*)=\1\2', and its adapter with --include '*.lora_*' --rename"
    r" '(.*\.lora_[^.]*)\.default(.*)=\1\2' to adapter_model.safetensors."
)


def names(manifest: Manifest) -> tuple[str, ...]:
    """List other weights: variants, and subtrees with usual names."""
    tops = dict.fromkeys(path[0] for path in manifest.tensors if len(path) > 1)
    return tuple(dict.fromkeys((*manifest.variants, *(name for name in _USUAL if name in tops))))


def choose(manifest: Manifest, kind: str, model_key: str = "") -> Manifest:
    """Return the checkpoint with the requested weights in place of the model's own."""
    # Other weights are at a variant's path, or in a subtree with the kind's name (`master`, `ema`), under the model's
    # names. Tensors without other weights, such as buffers and frozen parameters, stay unchanged.
    if kind == LIVE:
        return manifest
    known = names(manifest)
    if kind not in known:
        raise UsageError(
            f"--weights {kind}: the checkpoint holds no such weights",
            found=", ".join((LIVE, *known)),
            expected="one of these, or a saved variant",
            fix="Leave --weights out for the model's own.",
        )
    root, of = manifest.variants.get(kind, ((kind,), None))
    without = _without(manifest, root)
    model = find_sections(without, model_key).model if of is None or model_key else of
    live = {path[len(model) :] for path in without.tensors if path[: len(model)] == model}
    found = _by_name(manifest, root, live, is_variant=kind in manifest.variants)
    other = {(*model, *name): entry._replace(path=(*model, *name)) for name, entry in found.items()}
    return replace(without, tensors={**{path: other.get(path, e) for path, e in without.tensors.items()}, **other})


def _by_name(manifest: Manifest, root: Path, live: set[Path], *, is_variant: bool) -> dict[Path, TensorEntry]:
    """Return other weights by the model's names."""
    found: dict[Path, Path] = {}
    for path in manifest.tensors:
        if path[: len(root)] == root and len(path) > len(root):
            name = path[len(root) :]
            plain = _split_name(name)
            if name not in live and plain in live:
                name = plain
            if name in live or not (is_variant and live):  # a variant has only the model's tensors
                found[path] = name
    require_unique({dotted(path): dotted(name) for path, name in found.items()})
    return {name: manifest.tensors[path] for path, name in found.items()}


def _split_name(name: Path) -> Path:
    if name[0] == _AVERAGED and len(name) > 1:
        return name[1:]
    return (str(name[0]).removeprefix(f"{_AVERAGED}."), *name[1:])


def _without(manifest: Manifest, root: Path) -> Manifest:
    n = len(root)
    return replace(
        manifest,
        tensors={path: entry for path, entry in manifest.tensors.items() if path[:n] != root},
        objects={path: entry for path, entry in manifest.objects.items() if path[:n] != root},
        aliases={a: first for a, first in manifest.aliases.items() if a[:n] != root and first[:n] != root},
        variants={name: each for name, each in manifest.variants.items() if each[0] != root},
    )


def to_base_name(name: str) -> str:
    """Return a tensor's name in the base model, without PEFT's wrappers."""
    return _WRAPPED.sub("", _PREFIX.sub("", name))


def to_file_name(name: str) -> str:
    """Return a tensor's name in `save_pretrained` files, which omit the adapter's name."""
    return _MAGNITUDE.sub(".lora_magnitude_vector", _ADAPTER.sub(r".\1", _SAVED_MODULE.sub("", name)))
