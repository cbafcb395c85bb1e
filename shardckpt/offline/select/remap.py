"""Rules applied to an open checkpoint: read, planned on names and shapes, then located; still no tensor is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shardckpt.format.reader import Reader
from shardckpt.manifest import Manifest, TensorEntry
from shardckpt.offline.write.resolve import read_blocks
from shardckpt.plan.layout.coverage import locate
from shardckpt.plan.optim.optimizer_state import OptimizerState
from shardckpt.plan.rules import rules as planning
from shardckpt.plan.rules.optimizer_rules import infer_shapes, remap_state
from shardckpt.plan.rules.rule_files import parse_rename, parse_rules, rules_text
from shardckpt.plan.rules.rules import RemappedTensor, RemapPlan, Rule
from shardckpt.storage.text_files import read_text


def read_rules(file: str, renames: Iterable[str] = (), config: Mapping[str, object] | None = None) -> tuple[Rule, ...]:
    """Return the rules of a file, then those of `--rename`.

    Args:
        file: Path or URL of a TOML file, or the name of a set that comes with the package; empty for none.
        renames: `FROM=TO`, in order.
        config: The model's `config.json`, whose numbers rules may name.

    Raises:
        UsageError: The file or set does not exist, or a rule is not valid.
        StorageError: The file cannot be read.
    """
    found = parse_rules(rules_text(file, lambda: read_text(file)), file, config) if file else ()
    return (*found, *map(parse_rename, renames))


@dataclass(frozen=True, slots=True)
class RemappedCheckpoint:
    """The plan of rules for a checkpoint.

    Attributes:
        plan: What becomes of every tensor, those of the optimizer alone included.
        model: Final names of the model's tensors to how they are made, in order.
        ties: Final name that is not written to the one that stands for it.
    """

    plan: RemapPlan
    model: Mapping[str, RemappedTensor]
    ties: Mapping[str, str]


def plan_rules(
    rules: Sequence[Rule], model: Mapping[str, TensorEntry], state: OptimizerState | None, ties: Mapping[str, str]
) -> RemappedCheckpoint:
    """Plan the rules for model and optimizer.

    Args:
        rules: In order.
        model: Canonical name to tensor.
        state: The optimizer by those names, if it is asked for.
        ties: Canonical name to the one that holds the same tensor.

    Raises:
        UsageError: A rule does not fit.
    """
    facts = {name: (entry.shape, entry.dtype) for name, entry in model.items()}
    if state is not None:
        facts |= infer_shapes(state, model)
    plan = planning.plan_remap(rules, facts)
    mine = {n: m for n, m in plan.made.items() if all(leaf.name in model for leaf in planning.iter_sources(m.recipe))}
    return RemappedCheckpoint(plan, mine, _ties(mine, ties))


def _ties(made: Mapping[str, RemappedTensor], ties: Mapping[str, str]) -> dict[str, str]:
    """Return which results are made alike of the same tensors."""
    groups: dict[RemappedTensor, list[str]] = {}
    for name, each in made.items():
        groups.setdefault(each._replace(recipe=planning.replace_sources(each.recipe, ties)), []).append(name)
    dropped: dict[str, str] = {}
    for tensor, names in groups.items():
        if all(leaf.name not in ties.values() for leaf in planning.iter_sources(tensor.recipe)):
            continue  # made alike by rules, and not tied in the checkpoint
        kept = next((name for name in names if made[name] == tensor), names[0])
        dropped |= {name: kept for name in names if name != kept}
    return dropped


def locate_model(
    reader: Reader,
    manifest: Manifest,
    remapped: RemappedCheckpoint,
    names: Sequence[str],
    model: Mapping[str, TensorEntry],
) -> tuple[dict[str, TensorEntry], list[TensorEntry]]:
    """Return results by name, located, and what of the checkpoint they are made of.

    Args:
        reader: The open checkpoint.
        manifest: What it holds.
        remapped: The results of the rules.
        names: Final names that are wanted.
        model: Canonical name to tensor.

    Raises:
        CheckpointError: Elements are missing or doubled, or a container is damaged.
        UsageError: A result would be of several types.
    """
    needed = list(
        dict.fromkeys(leaf.name for name in names for leaf in planning.iter_sources(remapped.model[name].recipe))
    )
    found = dict(zip(needed, locate(reader, manifest, [model[name] for name in needed]), strict=True))
    made = {name: planning.apply_recipe(remapped.model[name].recipe, name, found) for name in names}
    return made, [model[name] for name in needed]


def locate_state(reader: Reader, manifest: Manifest, plan: RemapPlan, state: OptimizerState) -> OptimizerState:
    """Return an optimizer as rules make it, located.

    Raises:
        CheckpointError: Elements are missing or doubled, or a container is damaged.
        UsageError: Slots or groups do not fit together.
    """
    used = {leaf.name for made in plan.made.values() for leaf in planning.iter_sources(made.recipe)}
    kept = {key: entry for key, entry in state.tensors.items() if key.rpartition("/")[0] in used}
    found = dict(zip(kept, locate(reader, manifest, list(kept.values())), strict=True))

    def same(entries: Sequence[TensorEntry]) -> bool:
        return len({(e.stored, b"".join(bytes(block) for block in read_blocks(reader, e))) for e in entries}) == 1

    return remap_state(plan, replace(state, tensors=found), same)


def restrict_plan(plan: RemapPlan, names: Iterable[str]) -> RemapPlan:
    """Restrict a plan to some of its results."""
    wanted = set(names)
    return replace(plan, made={name: made for name, made in plan.made.items() if name in wanted})
