"""Select what to convert, with its final names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from math import prod
from typing import TYPE_CHECKING, Any

from shardckpt.dtypes import FLOATS
from shardckpt.encodings.element_values import numpy_dtype
from shardckpt.encodings.pickle_stubs import PerRankValue
from shardckpt.encodings.safetensors import parse_json
from shardckpt.errors import AmbiguousError, FormatError, IncompleteError, UnsupportedError, UsageError
from shardckpt.layout import FlatLayout
from shardckpt.manifest import UNREAD, Manifest, Path, TensorEntry, dotted
from shardckpt.offline.results.contents import NO_SHAPES
from shardckpt.offline.select.config_files import TIE
from shardckpt.offline.select.options import Options, parse_dtype
from shardckpt.plan import packed_weights
from shardckpt.plan.layout.coverage import faults, locate
from shardckpt.plan.layout.output_files import OutputTensor
from shardckpt.plan.naming import fqn as names
from shardckpt.plan.naming import sections, weights
from shardckpt.plan.naming.fqn import NamedModel, name_model
from shardckpt.plan.quantized_weights import list_uncast
from shardckpt.reader import Reader
from shardckpt.readers.chunk_reader import read_blocks, same_bits
from shardckpt.readers.registry import open_checkpoint, resolve_step
from shardckpt.storage.resolve_url import open_store, split
from shardckpt.storage.store import read_bytes

if TYPE_CHECKING:
    from shardckpt.plan.optim import optimizer_state
    from shardckpt.plan.packed_weights import PackedWeight
    from shardckpt.plan.rules.rules import Rule

SMALL_ELEMENTS = 64  # larger arrays among hyperparameters are not read as numbers
_MAX_NAMES_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Selection:
    """The content to write."""

    model: tuple[OutputTensor, ...]  # in state-dict order, tied tensors once
    optim: tuple[OutputTensor, ...]  # named `<fqn>/<slot>`
    groups: Mapping[str, Any] | None  # `param_groups` and `non_tensor_state`; None without an optimizer
    units: Mapping[str, FlatLayout]  # members of stored flat parameters
    ties: Mapping[str, str]  # name that is not written to the name that is written for it
    left_out: tuple[str, ...]  # dotted paths outside the requested part
    warnings: tuple[str, ...]  # one sentence each
    order: tuple[str, ...] = ()  # all model names in state-dict order, also if not written
    keeps_order: bool = True  # False: the checkpoint has another order, such as sorted names
    # Values to set in the model's config, for example to untie a head that has values of its own.
    config_values: Mapping[str, object] = field(default_factory=dict)
    packed: Mapping[str, PackedWeight] = field(default_factory=dict)  # wrapper subclasses in the model, by name


def select(reader: Reader, options: Options, config: Mapping[str, object], *, is_for_config: bool = False) -> Selection:
    """Select the tensors to write, require all elements, and locate their bytes."""
    # With `is_for_config`, only those of the module that the stored config describes, under its own names.
    manifest = sections.split_flat_names(reader.manifest)
    if options.weights != "live":
        manifest = weights.choose(manifest, options.weights, options.model_key)
    described_root = manifest.pretrained[:-1] if is_for_config else ()
    found = sections.find_sections(manifest, options.model_key or dotted(described_root), options.optim_key)
    if described_root not in ((), found.model) and not options.config_from:
        raise UsageError(
            "the stored config describes another model",
            where=reader.store.url,
            found=dotted(found.model),
            expected=dotted(described_root),
            fix="Leave --model-key out, or give --config-from FOLDER.",
        )
    named = name_model(manifest, found)
    model = names.select_pretrained(named, manifest, found) if is_for_config else named
    described = {entry.path for entry in model.tensors.values()}
    if not model.tensors and options.part != "optim":
        raise IncompleteError("the checkpoint holds no model tensors", where=reader.store.url, found=_tops(manifest))
    if model.tensors:
        _check_shapes(model.tensors, options.shapes_from)
    rules = _read_rules(options, config)
    packed = packed_weights.find_subclasses(manifest, model.tensors) if found.wrapped else {}
    more = packed_weights.find_named(model.tensors, manifest.metadata) if options.dequantize else {}
    owners = dict(packed_weights.iter_parts({**packed, **more})) if packed or more else {}
    opened = _OpenModel(reader, manifest, found, model, options, config, owners)
    chosen = _choose_remapped(opened, rules) if rules else _choose_stored(opened)
    names.require_matches(options.keep_fp32, [*chosen.names, *(owners[n] for n in chosen.names if n in owners)])
    kept = [name for name in chosen.names if name not in chosen.ties] if options.part != "optim" else []
    state = chosen.state
    wanted = [chosen.tensors[n] for n in kept] + (list(state.tensors.values()) if state else [])
    resolved = iter(locate(reader, manifest, wanted))
    uncast = owners.keys() | (list_uncast(chosen.tensors, config) if options.dtype else ())
    unasked = [r for r in (found.model, *found.optimizers) if _is_unasked(r, found, options)]
    return Selection(
        model=tuple(
            OutputTensor(n, next(resolved), chosen.casts.get(n) or _target_dtype(n, chosen.tensors[n], options, uncast))
            for n in kept
        ),
        optim=tuple(OutputTensor(n, e, e.dtype) for n, e in zip(state.tensors, resolved, strict=True)) if state else (),
        groups=_read_groups(state) if state else None,
        units=state.units if state else {},
        ties=chosen.ties if options.part != "optim" else {},
        order=tuple(chosen.names),
        keeps_order=manifest.keeps_order,
        left_out=(
            *map(
                dotted,
                (*unasked, *_list_unwritten(manifest, found, options, has_optimizer=state is not None), *found.others),
            ),
            *chosen.dropped,
            *(dotted(entry.path) for entry in named.tensors.values() if entry.path not in described),
        ),
        warnings=(
            *_needed_warnings(manifest.warnings, unasked),
            *(() if manifest.has_shapes or options.shapes_from else (NO_SHAPES,)),
            *chosen.found_ties.warnings,
            *_warn_of_order(state),
            *(_warn_of_numbers(manifest, found.optimizers[0]) if state else ()),
            *(packed_weights.list_low_bit(manifest, found.optimizers[0]) if state and found.wrapped else ()),
            *_unneeded_faults(manifest, chosen.used or wanted),
        ),
        config_values=chosen.found_ties.config_values if options.part != "optim" else {},
        packed=packed if options.part != "optim" else {},
    )


def _read_groups(state: optimizer_state.OptimizerState) -> dict[str, Any]:
    from shardckpt.offline.select.group_settings import read_content  # noqa: PLC0415  (a sixth of the modules; most conversions write no optimizer)

    return read_content(state)


def _warn_of_order(state: optimizer_state.OptimizerState | None) -> tuple[str, ...]:
    if state is None or not state.is_by_order:
        return ()
    from shardckpt.plan.optim.optimizer_state import BY_ORDER  # noqa: PLC0415  (as in `_read_groups`)

    return (BY_ORDER,)


def _warn_of_numbers(manifest: Manifest, root: Path) -> Iterator[str]:
    """Yield a warning about small tensors among optimizer settings, such as learning rates."""
    paths = [path for path, _ in _iter_settings(manifest, root)]
    if paths:
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        yield f"{dotted(paths[0])}{more}: a tensor among the optimizer settings, written as a number"


def _iter_settings(manifest: Manifest, root: Path) -> Iterator[tuple[Path, TensorEntry]]:
    """Yield the small tensors among optimizer settings."""
    for path, entry in manifest.tensors.items():
        if path[: len(root) + 1] == (*root, "param_groups") and prod(entry.shape) <= SMALL_ELEMENTS:
            yield path, entry


def _read_rules(options: Options, config: Mapping[str, object]) -> tuple[Rule, ...]:
    if not options.rules and not options.rename:
        return ()
    from shardckpt.readers.remap import read_rules  # noqa: PLC0415  (a quarter of the modules; most checkpoints need no rules)

    return read_rules(options.rules, options.rename, config)


def _list_unwritten(
    manifest: Manifest, found: sections.Sections, options: Options, *, has_optimizer: bool
) -> Iterator[Path]:
    """Yield content that no target stores: the model's values, and an optimizer's extra content."""
    if options.part != "optim":
        values = sections.model_values(manifest, found)
        yield from packed_weights.drop_records(manifest, values) if found.wrapped else values
    if has_optimizer:
        root = found.optimizers[0]
        paths = (path for path in (*manifest.tensors, *manifest.objects) if sections.is_beside_state(path, root))
        yield from dict.fromkeys(path[: len(root) + 1] for path in paths)


@dataclass(frozen=True, slots=True)
class _OpenModel:
    """An open checkpoint with a named model."""

    reader: Reader
    manifest: Manifest
    found: sections.Sections
    model: NamedModel
    options: Options
    config: Mapping[str, object]
    owners: Mapping[str, str]  # weight's name by its parts' names

    def read_optimizer(self) -> optimizer_state.OptimizerState | None:
        """Return the optimizer; None if it is not requested or does not exist."""
        if self.options.part == "model":
            return None
        return _optimizer(self.reader, self.manifest, self.found, self.model, self.options)

    def find_ties(self, chosen: Sequence[str]) -> _Ties:
        """Return the tied names, and the heads that the config ties although they have other values."""
        tensors = {name: self.model.tensors[name] for name in chosen}
        paths = {name: entry.path for name, entry in tensors.items()}
        tied = names.read_config_ties(self.config, tensors)
        dropped = names.map_kept_names(chosen, paths, self.manifest.aliases, prefer=tied.values())
        for head, embedding in tied.items():
            if head in dropped or embedding in dropped:
                continue
            if same_bits(self.reader, self.manifest, tensors[head], tensors[embedding]):
                dropped[head] = embedding
        has_embedding = any(map(names.is_embedding, tensors))
        own = filter(names.is_head, tensors) if names.read_tie(self.config) and has_embedding else ()
        return _Ties(dropped, tuple(head for head in own if head not in dropped))


@dataclass(frozen=True, slots=True)
class _Ties:
    dropped: dict[str, str]  # name that is not written to the name that is written for it
    own: tuple[str, ...]  # heads with other values, though the config ties them

    @property
    def warnings(self) -> tuple[str, ...]:
        """A sentence for each head whose config is wrong."""
        text = f"config.json ties {{}} to the embeddings, but their values differ: a written one has {TIE} false"
        return tuple(text.format(head) for head in self.own)

    @property
    def config_values(self) -> dict[str, object]:
        """Values that the config has to have."""
        return {TIE: False} if self.own else {}


@dataclass(frozen=True, slots=True)
class _ChosenTensors:
    """Tensors under their final names."""

    names: Sequence[str]
    tensors: Mapping[str, TensorEntry]  # tied names may be missing
    ties: Mapping[str, str]  # name that is not written to the name that is written for it
    state: optimizer_state.OptimizerState | None
    found_ties: _Ties
    casts: Mapping[str, str] = field(default_factory=dict)  # name to the rule's dtype
    used: Sequence[TensorEntry] = ()  # source tensors, if rules make the results
    dropped: tuple[str, ...] = ()


def _choose_stored(opened: _OpenModel) -> _ChosenTensors:
    model, options = opened.model, opened.options
    chosen = names.select_names(model.tensors, options.include, options.exclude, opened.owners)
    found = opened.find_ties(chosen)
    state = opened.read_optimizer()
    if state is not None and (options.include or options.exclude):
        state = _restrict_state(state, set(chosen))
    return _ChosenTensors(chosen, model.tensors, found.dropped, state, found)


def _choose_remapped(opened: _OpenModel, rules: Sequence[Rule]) -> _ChosenTensors:
    """Return the tensors that rules make; globs match their new names."""
    from shardckpt.readers import remap  # noqa: PLC0415  (as in `_read_rules`)

    reader, manifest, model, options = opened.reader, opened.manifest, opened.model, opened.options
    if opened.owners:
        packed_weights.refuse_rules(opened.owners)
    before = opened.find_ties(list(model.tensors))
    state = opened.read_optimizer()
    remapped = remap.plan_rules(rules, model.tensors, state, before.dropped)
    chosen = names.select_names(remapped.model, options.include, options.exclude)
    dropped = {name: kept for name, kept in remapped.ties.items() if name in chosen and kept in chosen}
    kept = [name for name in chosen if name not in dropped] if options.part != "optim" else []
    tensors, used = remap.locate_model(reader, manifest, remapped, kept, model.tensors)
    if state is not None:
        wanted = [name for name in remapped.plan.made if name not in remapped.model or name in set(chosen)]
        used += state.tensors.values()
        state = remap.locate_state(reader, manifest, remap.restrict_plan(remapped.plan, wanted), state)
    casts = {name: remapped.model[name].cast for name in kept if remapped.model[name].cast}
    gone = tuple(f"{name} (by a rule)" for name in remapped.plan.dropped)
    return _ChosenTensors(chosen, tensors, dropped, state, before, casts, used, gone)


def _needed_warnings(warnings: Sequence[str], unasked: Sequence[Path]) -> list[str]:
    """Drop the warnings that start with the path of an unwritten part."""
    roots = tuple(f"{dotted(root)}: " for root in unasked if root)
    return [warning for warning in warnings if not warning.startswith(roots)]


def _unneeded_faults(manifest: Manifest, wanted: Sequence[TensorEntry]) -> list[str]:
    """Return faults in tensors that are not requested, as warnings."""
    needed = {entry.path for entry in wanted}
    rest = (entry for path, entry in manifest.tensors.items() if path not in needed)
    return [f"not needed here, but damaged: {fault}" for fault in faults(manifest, rest, limit=4)]


def _is_unasked(root: Path, found: sections.Sections, options: Options) -> bool:
    if root == found.model:
        return options.part == "optim" and root != ()
    return options.part == "model"


def _tops(manifest: Manifest) -> str:
    tops = dict.fromkeys(str(p[0]) for p in (*manifest.tensors, *manifest.objects) if p)
    return ", ".join(list(tops)[:8]) or "nothing"


def _target_dtype(name: str, entry: TensorEntry, options: Options, uncast: Set[str]) -> str:
    dtype = parse_dtype(options.dtype)
    is_kept = not dtype or entry.dtype not in FLOATS or name in uncast
    if is_kept or any(fnmatchcase(name, glob) for glob in options.keep_fp32):
        return entry.dtype
    return dtype


def _check_shapes(tensors: Mapping[str, TensorEntry], shapes_from: str) -> None:
    """Compare global shapes with another checkpoint: formats without shapes can hide missing rows."""
    if not shapes_from:
        return
    other, shapes = _read_model(shapes_from)
    for name, entry in tensors.items():
        if name in shapes and shapes[name].shape != entry.shape:
            raise IncompleteError(
                f"{name} has another shape than in --shapes-from",
                where=dotted(entry.path),
                found=entry.shape,
                expected=shapes[name].shape,
                fix="A file with the end of the tensor is probably missing.",
            )
    paths = {entry.path for name, entry in shapes.items() if name in tensors}
    kept = {other.aliases.get(path, path) for path in paths}
    missing = [n for n, e in shapes.items() if n not in tensors and other.aliases.get(e.path, e.path) not in kept]
    if missing and not paths:
        raise UsageError("--shapes-from shares no name with the checkpoint", where=shapes_from, found=missing[0])
    if missing:
        raise IncompleteError(
            f"{missing[0]} is in --shapes-from and not in the checkpoint",
            where=shapes_from,
            found=f"{len(missing)} such tensors",
            fix="The file that held it is probably missing.",
        )


def _read_model(url: str) -> tuple[Manifest, Mapping[str, TensorEntry]]:
    """Return a checkpoint's manifest, and its model tensors by name."""
    manifest = sections.split_flat_names(open_checkpoint(resolve_step(url)).manifest)
    return manifest, name_model(manifest, sections.find_sections(manifest)).tensors


def _optimizer(
    reader: Reader, manifest: Manifest, found: sections.Sections, model: NamedModel, options: Options
) -> optimizer_state.OptimizerState | None:
    if not found.optimizers:
        if options.part == "optim":
            raise IncompleteError(
                "the checkpoint holds no optimizer",
                where=reader.store.url,
                found=_tops(manifest),
                expected="a subtree with `state` and `param_groups`",
                fix="Name it with --optim-key if it is somewhere else.",
            )
        unread = [name for name in manifest.unread if name.startswith("optim")]
        if unread:
            raise UnsupportedError(
                "the optimizer is stored in a file that is not read together with this model",
                where=reader.store.url,
                found=", ".join(unread),
                fix="Write the model with --part model; for the optimizer name its file, with --part optim,"
                " --shapes-from this folder and, where shapes fit several names, --param-names FILE.",
            )
        return None
    if len(found.optimizers) > 1:
        raise AmbiguousError(
            "the checkpoint holds several optimizers",
            where=reader.store.url,
            found=", ".join(map(dotted, found.optimizers)),
            fix="Choose one with --optim-key.",
        )
    from shardckpt.plan.optim import optimizer_state  # noqa: PLC0415  (as in `_read_groups`)

    root = found.optimizers[0]
    values = load_values(reader, manifest, root)
    raw = optimizer_state.read_raw(manifest, root, values)
    tensors: Mapping[str, TensorEntry] = model.tensors
    if not tensors and options.shapes_from:
        other, tensors = _read_model(options.shapes_from)
        raw = replace(raw, keeps_order=other.keeps_order)
    return optimizer_state.key_by_name(
        raw,
        {name: entry.shape for name, entry in tensors.items()},
        read_param_names(options.param_names) if options.param_names else None,
        model.clean,
    )


def _restrict_state(state: optimizer_state.OptimizerState, fqns: Set[str]) -> optimizer_state.OptimizerState:
    """Keep only some parameters' state; groups and values stay."""
    kept = {key: entry for key, entry in state.tensors.items() if key.rpartition("/")[0] in fqns}
    return replace(state, tensors=kept)


def load_values(reader: Reader, manifest: Manifest, root: Path) -> dict[Path, object]:
    """Return the objects below `root`, with small hyperparameter tensors as numbers."""
    n = len(root)
    values: dict[Path, object] = {}
    for path, entry in manifest.objects.items():
        if path[:n] == root:
            value = values[path] = reader.load_object(entry) if entry.value is UNREAD else entry.value
            if isinstance(value, PerRankValue):
                raise value.error(dotted(path))
    for path, tensor in _iter_settings(manifest, root):
        [located] = locate(reader, manifest, [tensor])
        data = b"".join(read_blocks(reader, located))
        import numpy as np  # noqa: PLC0415  (0.07 s; most optimizers keep such values as numbers)

        values[path] = np.frombuffer(data, numpy_dtype(tensor.stored)).reshape(tensor.shape).tolist()
    return values


def read_param_names(url: str) -> dict[int, str]:
    """Read `--param-names`: a JSON object from id to name, or an array of names."""
    parent, name = split(url)
    reader = open_store(parent)
    size = reader.size(name)
    if size > _MAX_NAMES_BYTES:
        raise UsageError("--param-names is too large", where=url, found=f"{size} bytes")
    try:
        raw = parse_json(read_bytes(reader, name, 0, size), where=url)
    except FormatError as error:
        raise UsageError(f"--param-names is not JSON: {error.what}", where=url) from error
    pairs = enumerate(raw) if isinstance(raw, list) else raw.items() if isinstance(raw, dict) else ()
    try:
        named = {int(key): value for key, value in pairs}
    except (TypeError, ValueError) as error:
        raise UsageError("--param-names has a key that is not an id", where=url) from error
    if not named or not all(isinstance(value, str) for value in named.values()):
        raise UsageError("--param-names holds no names", where=url, expected="an object from id to name, or an array")
    return named
