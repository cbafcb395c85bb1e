"""What the contracts in pyproject.toml cannot say about imports: `lint-imports` checks the contracts."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import grimp
import pytest

from tests.test_architecture_page import PROJECT, list_importers

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"shardckpt": ROOT / "shardckpt", "shardckpt_cli": ROOT / "cli" / "shardckpt_cli"}

TENSORS_ALONE = "0.04 s in all; a state of tensors alone needs neither the engine nor the states of models"

# Function-level imports; besides these the command imports the package and rich inside its functions: `is_late_in_cli`.
LATE_IMPORTS: dict[tuple[str, str], str] = {
    ("shardckpt.events.progress", "rich"): "0.05 s; most callers show no progress",
    ("shardckpt.events.progress", "rich.console"): "0.05 s; most callers show no progress",
    ("shardckpt.encodings.element_values", "ml_dtypes"): "numpy knows most types",
    ("shardckpt.encodings.element_values", "numpy"): "0.07 s; what casts nothing needs none",
    ("shardckpt.checkpoint.load.source", "shardckpt.readers.remap"): "0.02 s; most loads have no rules",
    ("shardckpt.readers.registry", "shardckpt.readers.step_paths"): "few paths name a run's step",
    ("shardckpt.integrations.vllm_plugin", "vllm.distributed.weight_transfer"): "vLLM's commands read the plugin",
    (
        "shardckpt.stream.versions.hf_delta_format",
        "shardckpt.stream.versions.hf_delta_reader",
    ): "0.1 s; most folders with an index are models",
    ("shardckpt.offline.write.stream", "shardckpt.native.payload"): "0.01 s; most files have no block hashes",
    ("shardckpt.torchrun", "importlib.metadata"): "0.02 s; few commands need it",
    ("shardckpt.checkpoint.load.load", "shardckpt.checkpoint.load.live_check"): "few loads ask for it",
    ("shardckpt.checkpoint.load.load_planner", "shardckpt.checkpoint.load.optim_load_plan"): TENSORS_ALONE,
    ("shardckpt.checkpoint.stateful.flatten", "shardckpt.state.adapters.model_index"): TENSORS_ALONE,
    ("shardckpt.checkpoint.stateful.flatten", "shardckpt.state.adapters.sharded_tensor"): TENSORS_ALONE,
    ("shardckpt.checkpoint.stateful.flatten", "shardckpt.state.adapters.torch_fsdp1"): TENSORS_ALONE,
    ("shardckpt.checkpoint.stateful.flatten", "shardckpt.state.local.local_shards"): TENSORS_ALONE,
    ("shardckpt.checkpoint.stateful.flatten", "shardckpt.state.local.optim_shards"): TENSORS_ALONE,
    ("shardckpt.checkpoint.stateful.flatten", "shardckpt.state.model.module_hooks"): TENSORS_ALONE,
    ("shardckpt.checkpoint.load.load_planner", "shardckpt.state.model.module_hooks"): TENSORS_ALONE,
    ("shardckpt.state.adapters.flat_shard_check", "shardckpt.core.params.param_bucket"): TENSORS_ALONE,
    ("shardckpt.state.adapters.flat_shard_check", "shardckpt.core.registration.base"): TENSORS_ALONE,
    ("shardckpt.state.adapters.flat_shard_check", "shardckpt.layout"): TENSORS_ALONE,
    ("shardckpt.readers.opened.state_tree", "numpy"): "0.07 s; most files have no arrays",
    ("shardckpt.readers.chunk_reader", "numpy"): "0.07 s; pieces that are read as they are need none",
    ("shardckpt.readers.registry", "shardckpt.native.commit"): "only the format of a checkpoint is imported",
    (
        "shardckpt.readers.registry",
        "shardckpt.native.run_directory",
    ): "only the format of a checkpoint is imported",
    ("shardckpt.integrations.sinks", "prometheus_client"): "each sink needs its own library only",
    ("shardckpt.integrations.sinks", "torch.utils.tensorboard"): "each sink needs its own library only",
    ("shardckpt.integrations.adapter_steps", "huggingface_hub"): "not each framework has it",
    ("shardckpt.integrations.sinks", "opentelemetry"): "each sink needs its own library only",
    ("shardckpt.integrations.sinks", "wandb"): "each sink needs its own library only",
    (
        "shardckpt.offline.consolidate",
        "shardckpt.offline.write.parallel",
    ): "ranks speak through torch; one process needs none",
    ("shardckpt.offline.consolidate", "shardckpt.offline.select.block_scales"): "NumPy; most checkpoints hold no fp8",
    ("shardckpt.offline.consolidate", "shardckpt.offline.select.inner_names"): "most checkpoints have no subclasses",
    ("shardckpt.offline.consolidate", "shardckpt.offline.select.dequantize"): "NumPy; most have no packed weights",
    ("shardckpt.offline.select.selection", "numpy"): "0.07 s; most optimizers have no such values",
    ("shardckpt.offline.select.selection", "shardckpt.readers.remap"): "most conversions have no rules",
    ("shardckpt.offline.write.numpy_casts", "numpy"): "0.07 s; what casts nothing needs none",
    ("shardckpt.open_checkpoint", "shardckpt.checkpoint.load.lazy"): "arrays need no torch",
    ("shardckpt.open_checkpoint", "shardckpt.offline.open_arrays"): "tensors need no arrays",
    ("shardckpt.plugins", "importlib.metadata"): "0.03 s, which most commands can do without",
    ("shardckpt.readers.dcp.storage_items", "zstandard"): "most checkpoints are not compressed",
    ("shardckpt.encodings.codecs", "zstandard"): "most checkpoints are not compressed",
    ("shardckpt.offline.consolidate", "shardckpt.plan.optim.output_keys"): "most conversions write no optimizer",
    (
        "shardckpt.offline.select.selection",
        "shardckpt.offline.select.group_settings",
    ): "most conversions write no optimizer",
    (
        "shardckpt.offline.select.selection",
        "shardckpt.plan.optim.optimizer_state",
    ): "most conversions write no optimizer",
    ("shardckpt.offline.targets.base", "shardckpt.encodings.tagged_json"): "most conversions write no optimizer",
    (
        "shardckpt.offline.targets.base",
        "shardckpt.offline.select.group_settings",
    ): "most conversions write no optimizer",
    (
        "shardckpt.offline.targets.safetensors_files",
        "shardckpt.offline.select.group_settings",
    ): "most conversions write no optimizer",
    ("shardckpt.plan.layout.output_files", "fractions"): "2 ms; most sizes are whole numbers",
    ("shardckpt.torchrun", "hashlib"): "loads OpenSSL; commands hash nothing",
    ("shardckpt.storage.resolve_url", "shardckpt.storage.fsspec_store"): "local paths do without fsspec's 0.1 s",
}

# Modules with a table of modules of which they import the one that is asked for, and the packages of those modules.
TABLES = {
    "shardckpt.readers.registry": ("shardckpt.readers.", "shardckpt.native.", "shardckpt.stream.versions."),
    "shardckpt.readers.step_paths": ("shardckpt.stream.versions.",),
    "shardckpt.offline.targets.target_registry": ("shardckpt.offline.targets.",),
    "shardckpt.offline.tasks.verbs": ("shardckpt.offline.",),
}

MOST_LINES = 300
"""The most lines of a module in `integrations`, which people read before they depend on it."""

USES_TORCH = list_importers()["torch"]
# How ranks talk, without the transport that is torch.
RANKS_WITHOUT_TORCH = ("bounded_store", "group", "linked_group", "store_group")

TORCH_FREE = ("encodings", "native", "readers", "plan", "storage", "offline")
WITH_RANKS = "shardckpt.offline.write.parallel"
# Packages of a feature: the modules that offline verbs reach need no torch.
WINGS = {"shardckpt.stream", "shardckpt.tiers", "shardckpt.witness"}


@dataclass(frozen=True)
class Import:
    """One imported name: by which module, what, where, and whether inside a function."""

    by: str
    target: str
    line: int
    late: bool

    def __str__(self) -> str:
        return f"{self.by}:{self.line} imports {self.target}"


def read_sources() -> dict[str, str]:
    """Return the source of every module of the project by its dotted name; a package is named as itself."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = (package, *path.relative_to(folder).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return found


def imports(sources: Mapping[str, str]) -> list[Import]:
    """Return every import of every module, each name of a `from` import resolved to the module it is or lies in."""
    return [
        Import(name, target, node.lineno, late)
        for name, text in sources.items()
        for node, late in _import_nodes(ast.parse(text), late=False)
        for target in _targets(node, sources)
    ]


def _import_nodes(node: ast.AST, *, late: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Yield the import statements of a source, and whether each is in a function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, late
        inside = late or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _import_nodes(child, late=inside)


def _targets(node: ast.Import | ast.ImportFrom, sources: Mapping[str, str]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    assert not node.level, f"line {node.lineno} must name the full path, got a relative import"
    names = [f"{node.module}.{alias.name}" for alias in node.names]
    return [name if name in sources else f"{node.module}" for name in names]


def is_ours(module: str) -> bool:
    return module.partition(".")[0] in PACKAGES


def private_names(sources: Mapping[str, str]) -> list[str]:
    """Return the private names that a module imports from another module of the project."""
    faults = []
    for name, text in sources.items():
        for node, _ in _import_nodes(ast.parse(text), late=False):
            if isinstance(node, ast.ImportFrom) and is_ours(node.module or ""):
                words = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                faults += [f"{name}:{node.lineno} imports {w}" for w in words if w.startswith("_") and w[:2] != "__"]
    return faults


def unlisted_late_imports(found: list[Import]) -> list[str]:
    """Return the function-level imports that nobody gave a reason for."""
    late = [each for each in found if each.late and not (each.by.startswith("shardckpt_cli") and is_late_in_cli(each))]
    return [str(each) for each in late if (each.by, each.target) not in LATE_IMPORTS]


def is_late_in_cli(each: Import) -> bool:
    """Return True for what functions of the command import, so that --help is quick and pipes do without rich."""
    return is_ours(each.target) or each.target.partition(".")[0] == "rich"


def find_named(table: str) -> set[str]:
    """Return the modules that a table names; no import says that they are used."""
    constants = (node.value for node in ast.walk(ast.parse(SOURCES[table])) if isinstance(node, ast.Constant))
    return {value for value in constants if value in SOURCES and "." in value}


def build_graph() -> grimp.ImportGraph:
    """Return the imports that modules and tables make at run time, but for conversions by several ranks."""
    graph = grimp.build_graph(
        *PACKAGES, include_external_packages=True, exclude_type_checking_imports=True, cache_dir=None
    )
    for table in TABLES:
        for name in find_named(table):
            graph.add_import(importer=table, imported=name)
    graph.remove_module(WITH_RANKS)
    return graph


def torch_free_modules(graph: grimp.ImportGraph) -> set[str]:
    """Return the modules that the command and the offline verbs reach, late imports included."""
    roots = ("shardckpt.offline", "shardckpt_cli")
    inside = set().union(*(graph.find_descendants(root) | {root} for root in roots))
    reached = inside.union(*(graph.find_upstream_modules(root, as_package=True) for root in roots))
    return {name for name in reached if is_ours(name)}


def third_party(graph: grimp.ImportGraph, modules: set[str]) -> set[str]:
    """Return the distributions that modules import; each is called like its module."""
    tops = {name for module in modules for name in graph.find_modules_directly_imported_by(module)}
    tops = {name.partition(".")[0] for name in tops} - set(PACKAGES) - sys.stdlib_module_names - {"tomllib"}
    return {top.replace("_", "-") for top in tops}  # tomllib: of Python 3.11


def base_dependencies() -> set[str]:
    """Return the names of what `pip install shardckpt` always brings."""
    return {re.match(r"[\w-]+", line)[0].replace("_", "-") for line in PROJECT["dependencies"]}  # type: ignore[index]


def loaded_by(statement: str) -> set[str]:
    """Return the top-level modules that a statement leaves in `sys.modules` of a fresh interpreter."""
    code = f"import sys\n{statement}\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {line.partition(".")[0] for line in done.stdout.split()}


SOURCES = read_sources()


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return build_graph()


class TestSources:
    def test_no_private_name_crosses_a_module(self) -> None:
        assert private_names(SOURCES) == []

    def test_modules_of_integrations_are_short(self) -> None:
        lines = {name: len(text.splitlines()) for name, text in SOURCES.items()}
        assert [name for name, n in lines.items() if name.startswith("shardckpt.integrations") and n > MOST_LINES] == []

    def test_function_level_imports_are_on_the_list(self) -> None:
        assert unlisted_late_imports(imports(SOURCES)) == []

    def test_the_list_of_function_level_imports_names_only_those_that_exist(self) -> None:
        assert set(LATE_IMPORTS) <= {(each.by, each.target) for each in imports(SOURCES) if each.late}

    @pytest.mark.parametrize("table", TABLES)
    def test_a_table_names_modules_below_it(self, graph: grimp.ImportGraph, table: str) -> None:
        named = find_named(table)
        assert named
        assert [name for name in named if not name.startswith(TABLES[table])] == []
        assert [name for name in named if graph.chain_exists(importer=name, imported=table)] == []

    def test_the_folder_of_the_command_is_no_package_itself(self) -> None:
        assert not (ROOT / "cli" / "__init__.py").exists()


class TestTheChecksCanFail:
    @pytest.mark.parametrize("text", ["from shardckpt.boxes import _cut", "from shardckpt.plan._x import y"])
    def test_a_private_name_is_found(self, text: str) -> None:
        assert len(private_names({"shardckpt.readers.huggingface.reader": text})) == 1

    def test_a_relative_import_is_found(self) -> None:
        with pytest.raises(AssertionError, match="line 1 must name the full path"):
            imports({"shardckpt.storage.local": "from ..plan import naming"})

    def test_a_late_import_without_a_reason_is_found(self) -> None:
        text = "class A:\n    def f(self):\n        if self:\n            import json"
        assert unlisted_late_imports(imports({"shardckpt.readers.huggingface.reader": text})) == [
            "shardckpt.readers.huggingface.reader:4 imports json"
        ]

    def test_what_an_import_leaves_in_memory_is_seen(self) -> None:
        assert "fsspec" in loaded_by("import fsspec")


class TestDependencies:
    def test_the_base_install_is_exactly_what_torch_free_modules_import(self, graph: grimp.ImportGraph) -> None:
        modules = torch_free_modules(graph)
        packages = {".".join(name.split(".")[:2]) for name in modules}
        assert packages.isdisjoint(USES_TORCH - WINGS)
        assert third_party(graph, modules) == base_dependencies()

    def test_training_imports_torch_and_else_only_the_base(self, graph: grimp.ImportGraph) -> None:
        packages = USES_TORCH - {"shardckpt.integrations", "shardckpt.testing"}
        modules = packages.union(*map(graph.find_descendants, packages))
        assert third_party(graph, modules) - base_dependencies() == {"torch"}

    def test_every_other_library_has_a_contract(self, graph: grimp.ImportGraph) -> None:
        listed = {name.replace("_", "-") for name in list_importers()}
        assert third_party(graph, set(SOURCES) - {WITH_RANKS}) - base_dependencies() - listed == set()

    @pytest.mark.parametrize("library", ["click", "torch"])
    def test_an_import_that_the_base_install_lacks_is_found(self, library: str) -> None:
        graph = build_graph()
        graph.add_import(importer="shardckpt.readers.dcp.reader", imported=library)
        assert third_party(graph, torch_free_modules(graph)) - base_dependencies() == {library}

    def test_an_offline_verb_that_reaches_training_is_found(self) -> None:
        graph = build_graph()
        graph.add_import(importer="shardckpt.offline.diff", imported="shardckpt.ranks.torch_group")
        assert "shardckpt.ranks.torch_group" in torch_free_modules(graph)


class TestImportsStayLight:
    def test_no_format_plan_storage_convert_or_command_module_imports_torch(self, graph: grimp.ImportGraph) -> None:
        packages = tuple(f"shardckpt.{each}." for each in TORCH_FREE)
        modules = {name for name in SOURCES if f"{name}.".startswith((*packages, "shardckpt_cli."))}
        modules |= {name for name in torch_free_modules(graph) if name.startswith(tuple(WINGS))}
        names = sorted(name for name in modules if not name.endswith("__main__") and name != WITH_RANKS)
        assert "torch" not in loaded_by("\n".join(f"import {name}" for name in names))

    def test_ranks_that_talk_over_a_store_or_are_alone_need_no_torch(self) -> None:
        names = [f"shardckpt.ranks.{name}" for name in RANKS_WITHOUT_TORCH]
        assert "torch" not in loaded_by("\n".join(f"import {name}" for name in names))

    def test_loading_tensors_imports_neither_the_engine_nor_the_states_of_models(self, tmp_path: Path) -> None:
        state = 'state = {"weight": torch.zeros(4, 4), "step": 1}'
        save = f"import torch, shardckpt\n{state}\nshardckpt.save(state, {str(tmp_path / 'step')!r})"
        subprocess.run([sys.executable, "-c", save], check=True)
        load = save.replace("shardckpt.save", "shardckpt.load")
        shown = "\nimport sys\nprint(*[name for name in sys.modules if name.startswith('shardckpt.')])"
        done = subprocess.run([sys.executable, "-c", load + shown], capture_output=True, text=True, check=True)
        folders = {".".join(name.split(".")[:3]) for name in done.stdout.split() if name in SOURCES}
        assert {name for name in folders if name.startswith(("shardckpt.core.", "shardckpt.state."))} == {
            "shardckpt.core.lazy_names",
            "shardckpt.core.modules",
            "shardckpt.state.adapters",
            "shardckpt.state.keys",
            "shardckpt.state.local",
        }
        assert "shardckpt.events.run_events" not in done.stdout.split()
        assert len(done.stdout.split()) <= 111

    def test_the_package_and_the_command_import_nothing_heavy(self) -> None:
        loaded = loaded_by("import shardckpt\nimport shardckpt_cli.app")
        assert not loaded & {"torch", "numpy", "fsspec", "zstandard", "ml_dtypes", "rich"}

    def test_help_does_without_the_library(self) -> None:
        assert "shardckpt" not in loaded_by("import shardckpt_cli.app")


STREAM_CALLS = re.compile(
    r"\btorch\.(cuda|accelerator\.current_stream|Stream|Event)\b\(?|\.record_stream\(|\.(Stream|Event)\(device"
    r"|\"cpu\", \"meta\""
)
"""What only `devices` asks torch for, and the predicate for devices with streams."""
OTHER_CALLS = {
    ("shardckpt.core.fsdp2.fully_shard", "torch.Event"): "the type of an argument",
}


def test_one_module_asks_torch_for_streams():
    found = {
        (name, match.group().rstrip("("))
        for name, text in SOURCES.items()
        for match in STREAM_CALLS.finditer(text)
        if name != "shardckpt.devices" and not name.startswith(("shardckpt.encodings", "shardckpt.readers"))
    }
    assert found == set(OTHER_CALLS)


def test_one_module_has_a_pool_of_threads_which_works_until_the_process_is_gone():
    found = {name for name, text in SOURCES.items() if "ThreadPoolExecutor" in text}
    assert found == {"shardckpt.storage.thread_pool"}
