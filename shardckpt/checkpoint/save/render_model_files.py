"""Model files of a save: configs, tokenizer and processor files, read or rendered on rank 0."""

from __future__ import annotations

import copy
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardckpt.checkpoint.stateful.walk import LeafKind, walk
from shardckpt.encodings.safetensors import parse_json
from shardckpt.errors import CheckpointError, UsageError
from shardckpt.events.warn_user import warn_user
from shardckpt.manifest import Path, dotted
from shardckpt.native.records import plain_name
from shardckpt.plan.naming.fqn import WRAPPERS
from shardckpt.plan.naming.model_files import CONFIG, GENERATION_CONFIG, MAX_BYTES, MODEL_FILE
from shardckpt.plan.naming.weights import PEFT_PART
from shardckpt.storage.local import LocalStore
from shardckpt.storage.resolve_url import as_url, kind, open_store
from shardckpt.storage.store import Listed, Store, read_bytes

_TAKES = "a folder, a model, a tokenizer, a processor or a config of transformers, or a list of them"
_KINDS = {"file": "which is a file", "missing": "which does not exist"}
# What transformers reads besides files with known names: code of a model, and a folder.
_UNSTORED = re.compile(r".*\.py|additional_chat_templates", re.DOTALL)


class CollectedFiles(NamedTuple):
    """What a framework stores; the files that the user gives win."""

    found: Sequence[Any]
    given: Any


class ModelFiles(NamedTuple):
    """What a step stores besides the state."""

    contents: Mapping[str, bytes] = {}  # by file name
    # Path in the state to the model that the config describes; empty for the state's only model, or if unknown.
    model: Path = ()


def read_model_files(given: Any, state: Any) -> ModelFiles:
    """Read or render the files for `model_files=`, and find their model in the state. On rank 0."""
    groups = [*given] if isinstance(given, CollectedFiles) else [given]
    parts = [[*_iter_parts(group)] for group in groups]
    contents: dict[str, bytes] = {}
    for group in parts:
        contents |= _join_files(group)
    for name in contents:
        plain_name(name, "model_files")
    models = _list_models(state)
    described = _choose_described(models, [part for group in parts for part in group])
    if models and len(described) != 1 and CONFIG in contents:
        names = ", ".join(dotted(path).removesuffix(".") for path, _ in models)
        warn_user(
            f"the step does not store {CONFIG}, as `model_files` does not say which model it describes; the state has"
            f" {names}: pass the model itself"
        )
        contents = {name: content for name, content in contents.items() if name not in (CONFIG, GENERATION_CONFIG)}
    (path,) = described if contents and len(described) == 1 else ((),)
    # PEFT's names are not those of the model, and its users convert them.
    is_adapted = any(PEFT_PART.search(f"{name}.") for name in path[-1:])
    return ModelFiles(contents, () if is_adapted else path)


def _join_files(parts: Iterable[Any]) -> dict[str, bytes]:
    """Return the files of several parts, which must not differ."""
    contents: dict[str, bytes] = {}
    for part in parts:
        files = _read_part(part)
        different = next((name for name, content in files.items() if contents.get(name, content) != content), None)
        if different is not None:
            raise UsageError(
                "two parts of `model_files` must not give different files with one name",
                found=different,
                fix="Pass one of them, or a folder with the files that you want.",
            )
        contents |= files
    return contents


def collect_model_files(modules: Sequence[nn.Module], others: Iterable[object], options: Mapping[str, Any]) -> Any:
    """Return a framework's `model_files=`: its only transformers model, its only tokenizer, and what `options` adds."""
    given = options.get("model_files")
    if given is None and "model_files" in options:
        return None
    found = [module for module in modules for _ in find_pretrained(module)]
    texts = list({id(each): each for each in others if _is_processor(each)}.values())
    parts = {id(part) for each in texts for part in vars(each).values()}  # a processor's tokenizer
    texts = [each for each in texts if id(each) not in parts]
    for kinds, names in ((found, "transformers models"), (texts, "tokenizers or processors")):
        if len(kinds) > 1 and given is None:
            warn_user(
                f"the run has {len(kinds)} {names}, so its steps store the files of none: name what to store with"
                " `model_files`, or pass `model_files=None`"
            )
    return CollectedFiles([*(found if len(found) == 1 else ()), *(texts if len(texts) == 1 else ())] or [None], given)


def _is_processor(each: object) -> bool:
    """Return True for a tokenizer or a processor of transformers; False for its models and configs."""
    return hasattr(each, "save_pretrained") and not (hasattr(each, "config") or hasattr(each, "to_diff_dict"))


def find_pretrained(module: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost transformers models in a module, each once, by FQN."""
    found: dict[int, tuple[str, nn.Module]] = {}
    for path, model in _iter_pretrained(module, ()):
        found.setdefault(id(model), (dotted(path), model))
    return dict(found.values())


def _iter_pretrained(module: nn.Module, path: Path) -> Iterator[tuple[Path, nn.Module]]:
    # Wrappers such as FSDP1 return the attributes of the module inside, so only the class counts.
    if hasattr(type(module), "config_class") and hasattr(getattr(module, "config", None), "to_json_string"):
        yield path, module
        return
    is_parallel = isinstance(module, DistributedDataParallel)
    for name, child in module.named_children():
        is_wrapper = name in WRAPPERS or (is_parallel and name == "module")
        yield from _iter_pretrained(child, path if is_wrapper else (*path, name))


def _iter_parts(given: Any) -> Iterator[Any]:
    if isinstance(given, (Mapping, list, tuple)):
        if not given:
            found = f"an empty {type(given).__name__}"
            raise UsageError(f"`model_files` must be {_TAKES}", found=found, fix="Leave it out to store none.")
        for each in given.values() if isinstance(given, Mapping) else given:
            yield from _iter_parts(each)
    elif given is not None:
        yield given


def _require_one(found: Mapping[str, nn.Module], module: nn.Module) -> nn.Module:
    if len(found) != 1:
        raise UsageError(
            "`model_files` takes a module with one transformers model",
            found=f"{type(module).__name__} with {', '.join(found) or 'none'}",
            fix="Pass the model, or the folder with its config and tokenizer files.",
        )
    return next(iter(found.values()))


def _find_adapter_config(module: nn.Module) -> list[Any]:
    """Return the config of a module's only PEFT adapter, in a list; empty if it has none, or several."""
    adapters = [*find_adapters(module).values()]
    return adapters if len(adapters) == 1 else []


def find_adapters(module: nn.Module) -> Mapping[str, Any]:
    """Return the configs of a module's PEFT adapters by name; empty without one."""
    found = (getattr(part, "peft_config", None) for part in module.modules())
    return next((each for each in found if each and isinstance(each, Mapping)), {})


def _list_models(state: Any) -> list[tuple[Path, nn.Module]]:
    """Return the state's transformers models, each once, with their paths; the last key is an FQN."""
    modules = [leaf for leaf in walk(state) if leaf.kind is LeafKind.MODULE]
    found: dict[int, tuple[Path, nn.Module]] = {}
    for leaf in modules:
        for name, model in find_pretrained(leaf.value).items():
            is_only = not name and len(modules) == 1
            found.setdefault(id(model), (() if is_only else (*leaf.path, name), model))
    return [*found.values()]


def _choose_described(models: Sequence[tuple[Path, nn.Module]], parts: Sequence[Any]) -> list[Path]:
    """Return the paths to the models that the config may describe; a model or a config of the state says which."""
    given = [model for part in parts if isinstance(part, nn.Module) for model in find_pretrained(part).values()]
    ids, classes = {*map(id, parts), *map(id, given)}, {*map(_get_config_class, given)}
    known = [path for path, model in models if ids & {id(model), id(model.config)}]
    # A copy of a model has the model's names.
    return known or [path for path, model in models if not given or _get_config_class(model) in classes]


def _get_config_class(model: nn.Module) -> object:
    return getattr(type(model), "config_class", None)


def _read_part(part: Any) -> dict[str, bytes]:
    if isinstance(part, nn.Module):
        files = _render_configs(_require_one(find_pretrained(part), part))
        for config in _find_adapter_config(part):
            files |= _render_saved(config)
        return files
    if isinstance(part, type):
        found = f"the class {part.__name__}"
        raise UsageError(f"`model_files` must be {_TAKES}", found=found, fix="Pass an instance.")
    if isinstance(part, (str, os.PathLike)):
        return _read_folder(as_url(part))
    # Never what writes weights: a pipeline or another model has a `config`.
    if hasattr(part, "save_pretrained") and not hasattr(part, "config"):
        return _render_saved(part)
    files = _render_configs(part)
    if not files:
        raise UsageError(f"`model_files` must be {_TAKES}", found=f"type {type(part).__name__}")
    return files


def _read_folder(url: str) -> dict[str, bytes]:
    found = kind(url)
    if found != "folder":
        fix = (
            "Pass its folder." if found == "file" else "For a name on a hub, pass the model and the tokenizer instead."
        )
        raise UsageError("`model_files` must be a folder", found=f"{url}, {_KINDS[found]}", fix=fix)
    store = open_store(url)
    entries = store.list()
    _warn_of_unstored(entry.name for entry in entries if _UNSTORED.fullmatch(entry.name))
    empty = next((entry.name for entry in entries if _is_known(entry) and not entry.size), None)
    if empty is not None:
        raise UsageError(
            "a model file must have content",
            where=f"{store.url}/{empty}",
            found="an empty file, a pipe, or a link without its target",
            fix="Restore the file, or remove it.",
        )
    files = _read_known(store, entries)
    if not files:
        raise UsageError(
            "`model_files` must be a folder with config or tokenizer files",
            where=url,
            expected=f"{CONFIG}, tokenizer.json or others with known names",
        )
    if CONFIG in files:
        _require_object(files[CONFIG], f"{store.url}/{CONFIG}")
    return files


def _require_object(content: bytes, where: str) -> None:
    try:
        config = parse_json(content, where=where)
    except CheckpointError as error:
        raise UsageError("a model's config must be a JSON object", where=where, found=error.what) from error
    if not isinstance(config, dict):
        raise UsageError("a model's config must be a JSON object", where=where, found=f"type {type(config).__name__}")


def _is_known(entry: Listed) -> bool:
    return not entry.is_folder and bool(MODEL_FILE.fullmatch(entry.name))


def _warn_of_unstored(names: Iterable[str]) -> None:
    if found := ", ".join(sorted(names)):
        warn_user(f"`model_files` stores config, tokenizer and processor files only: the step does not have {found}")


def _read_known(store: Store, entries: Iterable[Listed]) -> dict[str, bytes]:
    sizes = {entry.name: entry.size for entry in entries if _is_known(entry)}
    large = next((name for name, size in sizes.items() if size > MAX_BYTES), None)
    if large is not None:
        found = f"{sizes[large]} bytes"
        raise UsageError("a model file is too large", where=f"{store.url}/{large}", found=found, expected=MAX_BYTES)
    return {name: read_bytes(store, name, 0, size) for name, size in sizes.items()}


def _render_configs(model: Any) -> dict[str, bytes]:
    """Return a model's configs as `save_pretrained` writes them, but without its checks of generation settings."""
    files = {}
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_json_string"):
        config = copy.deepcopy(config)
        if isinstance(model, nn.Module):
            config.architectures = [type(model).__name__.removeprefix("FSDP")]
            config.dtype = str(model.dtype).removeprefix("torch.")
        files[CONFIG] = config.to_json_string().encode()
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "to_json_string"):
        files[GENERATION_CONFIG] = generation.to_json_string().encode()
    return files


# Objects with their description and their files: to render a large tokenizer takes a tenth of a second.
_RENDERED: WeakKeyDictionary[Any, tuple[str, dict[str, bytes]]] = WeakKeyDictionary()


def _render_saved(given: Any) -> dict[str, bytes]:
    """Return the files that an object's `save_pretrained` writes; rendered again once it looks different."""
    own: Any = type(given)
    if own.__repr__ is object.__repr__ or own.__hash__ is None:  # it does not show its content, or cannot be a key
        return _render_again(given)
    described = _describe(given)
    known = _RENDERED.get(given)
    if known is None or known[0] != described:
        known = _RENDERED[given] = described, _render_again(given)
    return known[1]


def _describe(given: Any) -> str:
    """Return a text that changes with a tokenizer or a processor."""
    tokenizer = getattr(given, "tokenizer", given)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = [getattr(backend, name, None) for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder")]
    names = ("chat_template", "init_kwargs")
    return repr((given, parts, *(getattr(each, name, None) for each in (given, tokenizer) for name in names)))


def _render_again(given: Any) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory(prefix="shardckpt-") as folder:
        given.save_pretrained(folder)
        store = LocalStore(folder)
        entries = store.list()
        _warn_of_unstored(entry.name for entry in entries if not _is_known(entry))
        files = _read_known(store, entries)
    if not files:
        raise UsageError(
            "`save_pretrained` must write config or tokenizer files", found=f"none by {type(given).__name__}"
        )
    return files
