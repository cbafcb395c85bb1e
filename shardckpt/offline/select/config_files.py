"""Find a model's config and tokenizer files and its parameters' shapes, near the checkpoint or elsewhere."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardckpt.dtypes import FLOATS
from shardckpt.encodings.safetensors import parse_json
from shardckpt.errors import FormatError, StorageError, UsageError
from shardckpt.manifest import Manifest, TensorEntry, dotted
from shardckpt.plan.naming import sections
from shardckpt.plan.naming.fqn import name_model
from shardckpt.plan.naming.model_files import ADAPTER_CONFIG, CONFIG, MAX_BYTES, MODEL_FILE
from shardckpt.reader import ParamShapes, Reader, Source
from shardckpt.readers.registry import is_step, open_checkpoint, open_reader, open_source, resolve_step
from shardckpt.storage.resolve_url import kind, open_store, split
from shardckpt.storage.store import Store, read_bytes

TIE = "tie_word_embeddings"  # config key that ties the head to the embeddings

_DTYPE_KEYS = ("dtype", "torch_dtype")
_MAX_CONFIG_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class ConfigFiles:
    """Config and tokenizer files that are copied unchanged."""

    store: Store | None  # None without files
    files: dict[str, int]  # name to size in bytes
    config: dict[str, object]  # parsed `config.json`; empty if it is missing
    # Name to content: config files that stay when a checkpoint is replaced, unless new ones replace them.
    kept: Mapping[str, bytes] = field(default_factory=dict)
    is_changed: bool = False  # `config` differs from the file


def find_config_files(source: Source, config_from: str = "", reader: Reader | None = None) -> ConfigFiles:
    """Find config files in `config_from`, else in the source (if a reader is given), its folder or its parent."""
    if config_from:
        if kind(config_from) != "folder":
            raise UsageError("--config-from is not a folder", found=config_from)
        given = open_source(config_from)
        carried = _list_config_files(given.store, open_reader(given) if is_step(given) else None)
        if not carried.files:
            raise UsageError("--config-from holds no config and no tokenizer files", where=config_from)
        return carried
    carried = _list_config_files(source.store, reader)
    if carried.files or source.file is not None:
        return carried
    try:
        above = open_store(split(source.store.url)[0])
        has_config = any(e.name == CONFIG and not e.is_folder for e in above.list())
    except (UsageError, StorageError):
        return carried
    if not has_config:
        return carried
    found = _list_config_files(above)
    # The parent counts only if its `config.json` describes a model.
    return found if "model_type" in found.config or "architectures" in found.config else carried


def drop_adapter_config(carried: ConfigFiles) -> ConfigFiles:
    """Return a model's config files without the config of an adapter in the same folder."""
    # Readers that find it next to a model would look for the adapter.
    if carried.store is None or ADAPTER_CONFIG not in carried.files:
        return carried
    if not any(entry.name.startswith("adapter_model.") for entry in carried.store.list()):
        return carried
    return replace(carried, files={name: size for name, size in carried.files.items() if name != ADAPTER_CONFIG})


def add_kept_files(carried: ConfigFiles, target: str, is_config: re.Pattern[str]) -> ConfigFiles:
    """Add a replaced checkpoint's config files."""
    if kind(target) != "folder":
        return carried
    store = open_store(target)
    sizes = {
        e.name: e.size
        for e in store.list()
        if not e.is_folder and is_config.fullmatch(e.name) and e.name not in carried.files
    }
    for name, size in sizes.items():
        _require_config_size(size, f"{target}/{name}")
    kept = {name: read_bytes(store, name, 0, size) for name, size in sizes.items()}
    config = carried.config or read_config(store, sizes.get(CONFIG, -1))
    return replace(carried, kept=kept, config=config)


def _list_config_files(store: Store, reader: Reader | None = None) -> ConfigFiles:
    """Return the config files in a folder, and those that its reader knows; these win."""
    files = {
        e.name: e.size for e in store.list() if not e.is_folder and e.size <= MAX_BYTES and MODEL_FILE.fullmatch(e.name)
    }
    # An adapter's config would make transformers look for the adapter next to the written model.
    stored = {} if reader is None else {n: size for n, size in reader.model_files.items() if n != ADAPTER_CONFIG}
    if reader is not None and stored:
        store, files = reader.model_store, files | stored
    return ConfigFiles(store, files, read_config(store, files.get(CONFIG, -1)))


def read_config(store: Store, size: int) -> dict[str, object]:
    """Return a folder's parsed `config.json`; empty if it is missing."""
    if size < 0:
        return {}
    where = f"{store.url}/{CONFIG}"
    _require_config_size(size, where)
    config = parse_json(read_bytes(store, CONFIG, 0, size), where=where)
    if not isinstance(config, dict):
        raise FormatError("no JSON object", where=where)
    return config


def _require_config_size(size: int, where: str) -> None:
    if size > _MAX_CONFIG_BYTES:
        raise FormatError("too large for a model's config", where=where, found=f"{size} bytes")


def with_values(carried: ConfigFiles, values: Mapping[str, object]) -> ConfigFiles:
    """Return config files with other values, also in the text model's config."""
    if not carried.config or not values:
        return carried
    config, text = dict(carried.config), carried.config.get("text_config")
    in_text = values.keys() & text.keys() if isinstance(text, dict) else frozenset()
    if isinstance(text, dict):
        config["text_config"] = {**text, **{key: values[key] for key in in_text}}
    config |= {key: value for key, value in values.items() if key == TIE or key in config or key not in in_text}
    return replace(carried, config=config, is_changed=True)


def read_dtype(config: Mapping[str, object]) -> str:
    """Return the float dtype that a model's config names; empty without one."""
    text = config.get("text_config")
    for values in (config, text if isinstance(text, dict) else {}):
        found = [values[key] for key in _DTYPE_KEYS if key in values]
        if found and isinstance(found[0], str) and found[0] in FLOATS:
            return found[0]
    return ""


def with_dtype(config: Mapping[str, object], dtype: str) -> dict[str, object]:
    """Return a model's config with its dtypes set to the cast's dtype."""
    # Otherwise `from_pretrained` would cast the tensors back.
    changed: dict[str, object] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            changed[key] = with_dtype(value, dtype) if key.endswith("_config") else value
        else:
            is_float = isinstance(value, str) and value in FLOATS
            changed[key] = dtype if key in _DTYPE_KEYS and is_float else value
    return changed


def load_param_shapes(reader: Reader, shapes_from: str, ids: Mapping[int, str] | None = None) -> Reader:
    """Return a reader that knows its flat parameters' members."""
    if not reader.is_flat:
        return reader
    if reader.needs_param_shapes and not shapes_from:
        raise UsageError(
            "these are flat parameters, and no file has the shapes of their members",
            where=reader.store.url,
            found="a chunk of each unit on each rank, as FSDP1's LOCAL_STATE_DICT gives it",
            fix="Give --shapes-from SRC, any checkpoint of the same model that holds full tensors.",
        )
    if not shapes_from and not ids:
        return reader
    known_ids = dict(ids or {})
    if not shapes_from:
        return reader.with_param_shapes(ParamShapes({}, reader.store.url, ids=known_ids))
    opened = open_checkpoint(resolve_step(shapes_from))
    if opened.needs_param_shapes:
        raise UsageError(
            "this checkpoint has no shapes: it holds flat parameters itself",
            where=shapes_from,
            expected="full tensors",
            fix="Give another checkpoint of the same model, or save model.state_dict() on the meta device.",
        )
    other = sections.split_flat_names(opened.manifest)
    model = name_model(other, sections.find_sections(other)).tensors
    names = {entry.path: name for name, entry in model.items()}
    aliases = {names[a]: names[b] for a, b in other.aliases.items() if a in names and b in names}
    shapes = {name: entry.shape for name, entry in model.items()}
    known = ParamShapes(
        shapes, shapes_from, aliases, ids=known_ids, is_ordered=_keeps_order(other, list(model.values()))
    )
    return reader.with_param_shapes(known)


def _keeps_order(manifest: Manifest, entries: Sequence[TensorEntry]) -> bool:
    """Return True if a checkpoint's tensors are in model order."""
    if manifest.keeps_order:
        return True
    # safetensors files are usually sorted by dtype and name; DCP spreads replicated tensors over ranks.
    by_file: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        for file in {piece.file for piece in entry.pieces}:
            by_file.setdefault((file, entry.stored), []).append(dotted(entry.path))
    if len({file for file, _ in by_file}) > 1 and all(len(entry.pieces) <= 1 for entry in entries):
        return False
    return not all(names == sorted(names) for names in by_file.values())
