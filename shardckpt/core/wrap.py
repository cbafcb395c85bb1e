"""Select submodules that become units: policies, manual wrapping, driver."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from shardckpt.core.errors import NestedContextError, WrapError
from shardckpt.core.modules.fqn_and_params import clean, is_incompatible, walk
from shardckpt.core.modules.pytree import mapped
from shardckpt.core.runtime.traversal import ShardedModule

CallablePolicy = Callable[..., bool]


def always_wrap_policy(*_: Any, **__: Any) -> bool:
    """Wrap every module."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Wrap the modules for which `lambda_fn` is true.

    Args:
        module: Module to decide on.
        recurse: True to decide whether to go into the module, False to decide whether to wrap it.
        nonwrapped_numel: Number of parameter elements in the module that are not wrapped.
        lambda_fn: Returns True for a module to wrap.
    """
    del nonwrapped_numel
    return True if recurse else bool(lambda_fn(module))


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: Iterable[type[nn.Module]]
) -> bool:
    """Wrap the instances of the given classes.

    Args:
        module: Module to decide on.
        recurse: True to decide whether to go into the module, False to decide whether to wrap it.
        nonwrapped_numel: Number of parameter elements in the module that are not wrapped.
        transformer_layer_cls: Classes to wrap.
    """
    del nonwrapped_numel
    return True if recurse else isinstance(module, tuple(transformer_layer_cls))


def _or_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, policies: Iterable[Callable[..., bool]]
) -> bool:
    """Wrap a module if any of several policies does; peft and others import this name."""
    asked = {"module": module, "recurse": recurse, "nonwrapped_numel": nonwrapped_numel}
    return any(policy(**asked) for policy in policies)


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
) -> bool:
    """Wrap modules with at least `min_num_params` elements, without wrapped children.

    Args:
        module: Module to decide on.
        recurse: True to decide whether to go into the module, False to decide whether to wrap it.
        nonwrapped_numel: Number of parameter elements in the module that are not wrapped.
        min_num_params: Minimum number of elements.
        force_leaf_modules: Classes not to go into; MultiheadAttention by default.
        exclude_wrap_modules: Classes not to wrap; ModuleList and ModuleDict by default.
    """
    leaves = force_leaf_modules if force_leaf_modules is not None else {nn.MultiheadAttention}
    excluded = exclude_wrap_modules if exclude_wrap_modules is not None else {nn.ModuleList, nn.ModuleDict}
    large = nonwrapped_numel >= min_num_params
    if recurse:
        return large and not isinstance(module, tuple(leaves))
    return large and not isinstance(module, tuple(excluded))


size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}  # type: ignore[attr-defined]
size_based_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # type: ignore[attr-defined]


class ModuleWrapPolicy:
    """Policy that wraps every instance of given classes.

    Args:
        module_classes: Classes to wrap.
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self._module_classes = set(module_classes)

    def __call__(self, module: nn.Module, recurse: bool, *_: Any, **__: Any) -> bool:
        """Decide on a module with the arguments of function policies."""
        return True if recurse else isinstance(module, tuple(self._module_classes))

    def targets(
        self, root: nn.Module, ignored: Set[nn.Module], settings: Mapping[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        """Return the modules to wrap, with the settings of each."""
        classes = tuple(self._module_classes)
        return {m: dict(settings) for m in root.modules() if m not in ignored and isinstance(m, classes)}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({sorted(each.__name__ for each in self._module_classes)})"


class CustomPolicy:
    """Policy that wraps the modules for which a function returns True or settings.

    Args:
        lambda_fn: Returns False or True for a module, or a dict with the settings that differ from the root's.
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        self._lambda_fn = lambda_fn

    def targets(
        self, root: nn.Module, ignored: Set[nn.Module], settings: Mapping[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        """Return the modules to wrap, with the settings of each."""
        found = {}
        for module in root.modules():
            if module in ignored:
                continue
            answer = self._lambda_fn(module)
            if not isinstance(answer, (bool, dict)):
                raise WrapError(
                    "The lambda_fn passed to CustomPolicy should return False/True or a kwarg dict",
                    where=type(module).__name__,
                    found=f"it returned {answer!r}",
                )
            if answer:
                found[module] = {**settings, **(answer if isinstance(answer, dict) else {})}
        return found


Policy = CallablePolicy | ModuleWrapPolicy | CustomPolicy

_DEFAULTS: ContextVar[tuple[Callable[..., nn.Module], dict[str, Any]] | None] = ContextVar("wrap", default=None)


@contextmanager
def enable_wrap(*, wrapper_cls: Any, **wrapper_kwargs: Any) -> Iterator[None]:
    """Enable `wrap` inside the context, which cannot be nested.

    Args:
        wrapper_cls: Wrapper class for `wrap`.
        wrapper_kwargs: Settings for the wrapper.

    Raises:
        NestedContextError: The context is inside another one.
    """
    if _DEFAULTS.get() is not None:
        raise NestedContextError("You are already within an autowrap context and we do not support nested contexts")
    token = _DEFAULTS.set((wrapper_cls, wrapper_kwargs))
    try:
        yield
    finally:
        _DEFAULTS.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Return a module wrapped with the settings from `enable_wrap`, if inside it.

    Args:
        module: Module to wrap.
        wrap_overrides: Settings that override the context's.

    Returns:
        The wrapper; outside the context, the module itself.
    """
    defaults = _DEFAULTS.get()
    if defaults is None:
        return module
    wrapper, settings = defaults
    return wrapper(module, **{**settings, **wrap_overrides})


def auto_wrap(
    root: nn.Module,
    policy: Policy,
    wrapper: Callable[..., nn.Module],
    settings: Mapping[str, Any] | None = None,
    ignored_modules: Set[nn.Module] = frozenset(),
    ignored_params: Set[nn.Parameter] = frozenset(),
) -> None:
    """Shard the submodules that a policy selects, bottom up, without the root."""
    # With `mixed_precision` in the settings, modules in the classes that it ignores become separate units, which
    # compute in float32.
    settings = dict(settings or {})
    _refuse_sharded(root)
    ignored = {below for each in root.modules() if is_incompatible(each) for below in each.modules()} | ignored_modules
    exact = _exact(root, settings.get("mixed_precision"), ignored)
    unmixed = {**settings, "mixed_precision": None}
    if isinstance(policy, (ModuleWrapPolicy, CustomPolicy)):
        targets = policy.targets(root, ignored, settings)
        targets |= {each: {**targets.get(each, unmixed), "mixed_precision": None} for each in exact}
        targets.pop(root, None)
        if "use_orig_params" in settings:
            _check_frozen(root, targets, ignored_params)
        _replace(root, set(targets), lambda module: wrapper(module, **targets[module]), {})
    else:
        shard = _Shard(wrapper, settings, unmixed, exact)
        _Recursion(policy, shard, ignored, ignored_params).below(root)


def _refuse_sharded(root: nn.Module) -> None:
    for name, module in root.named_modules():
        if isinstance(module, ShardedModule):
            raise WrapError(
                f"FSDP auto wrapping requires modules to not already have FSDP applied but found {name} in\n{root}",
                fix="Wrap by hand everywhere, or nowhere.",
            )


# -------------------------------------------------------------------------------------------- full precision


def _exact(root: nn.Module, mixed_precision: Any, ignored: Set[nn.Module]) -> set[nn.Module]:
    """Return modules whose classes mixed precision ignores; make them use float32."""
    classes = tuple(mixed_precision._module_classes_to_ignore) if mixed_precision is not None else ()
    found = [module for module in root.modules() if isinstance(module, classes) and module not in ignored]
    for module in found:
        _compute_exactly(module)
    if found:
        warnings.warn(
            "Both mixed precision and an auto_wrap_policy were specified to FSDP, where the wrapped module has "
            f"submodules of type: {sorted({type(module).__name__ for module in found})}. These modules will be wrapped "
            "as separate FSDP instances with mixed precision disabled.",
            stacklevel=5,
        )
    return set(found)


def _compute_exactly(module: nn.Module) -> None:
    """Cast floating inputs to float32, and outputs to the last input's dtype."""
    last: list[torch.dtype] = []

    def exact(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        last[:] = [tensor.dtype]
        return tensor.float()

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        last.clear()
        return mapped((args, kwargs), exact)

    def after(_: nn.Module, __: Any, output: Any) -> Any:
        return mapped(output, lambda t: t.to(last[0]) if last and t.is_floating_point() else t)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)


# --------------------------------------------------------------------------------------- frozen and trainable


def _check_frozen(root: nn.Module, targets: Mapping[nn.Module, Mapping[str, Any]], ignored: Set[nn.Parameter]) -> None:
    """Refuse units with frozen and trainable parameters, or warn about them, deepest first."""
    for name, module in reversed(list(_named_last_first(root))):
        if module not in targets:
            continue
        sides: dict[bool, dict[str, nn.Parameter]] = {True: {}, False: {}}
        for prefix, each in walk(module, lambda m: m in targets or is_incompatible(m), name):
            for key, parameter in each._parameters.items():
                if parameter is not None and parameter not in ignored:
                    sides[parameter.requires_grad][clean(f"{prefix}.{key}" if prefix else key)] = parameter
        if sides[True] and sides[False]:
            _mixed(clean(name), sides[True], sides[False], fatal=not targets[module].get("use_orig_params", False))


def _named_last_first(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield names and modules in reverse bottom-up order, with the registration order on each level."""
    seen, stack = {root}, [("", root)]
    while stack:
        name, module = stack.pop()
        yield name, module
        for key, child in module.named_children():
            if child not in seen:
                seen.add(child)
                stack.append((f"{name}.{key}" if name else key, child))


def _mixed(
    name: str, trainable: Mapping[str, nn.Parameter], frozen: Mapping[str, nn.Parameter], *, fatal: bool
) -> None:
    what = f"{name} has both parameters with requires_grad=True and False."
    lists = (
        f"The following parameters have requires_grad=True: {list(trainable)}. "
        f"The following parameters have requires_grad=False: {list(frozen)}"
    )
    if fatal:
        raise WrapError(
            f"{what} FSDP does not support wrapping such modules when use_orig_params=False. {lists}",
            fix="Pass use_orig_params=True, or wrap the frozen parameters separately.",
        )
    numel = sum(each.numel() for each in trainable.values())
    total = numel + sum(each.numel() for each in frozen.values())
    warnings.warn(
        f"{what} We do not recommend wrapping such modules: they are kept apart ({numel} of {total} numel have "
        f"gradients), which takes another collective for each unit. {lists}",
        stacklevel=5,
    )


# ------------------------------------------------------------------------------------------------- replacement


def _replace(
    module: nn.Module,
    targets: set[nn.Module],
    wrapped: Callable[[nn.Module], nn.Module],
    done: dict[nn.Module, nn.Module],
) -> None:
    for name, child in list(module._modules.items()):
        if child is None:
            continue
        if child not in done:
            done[child] = child
            _replace(child, targets, wrapped, done)
            if child in targets:
                done[child] = wrapped(child)
        if done[child] is not child:
            setattr(module, name, done[child])


class _Shard:
    """Function that shards one module, without mixed precision for excluded modules."""

    def __init__(
        self,
        wrapper: Callable[..., nn.Module],
        settings: Mapping[str, Any],
        unmixed: Mapping[str, Any],
        exact: Set[nn.Module],
    ) -> None:
        self._wrapper = wrapper
        self._settings = settings
        self._unmixed = unmixed
        self.exact = exact

    def __call__(self, module: nn.Module) -> nn.Module:
        return self._wrapper(module, **(self._unmixed if module in self.exact else self._settings))


class _Recursion:
    """Traverses modules for function policies."""

    def __init__(
        self, policy: CallablePolicy, shard: _Shard, ignored: Set[nn.Module], ignored_params: Set[nn.Parameter]
    ) -> None:
        self._policy = policy
        self._shard = shard
        self._ignored = ignored
        self._ignored_params = ignored_params
        self._done: dict[nn.Module, nn.Module] = {}

    def _numel(self, module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters() if p not in self._ignored_params)

    def below(self, module: nn.Module) -> int | None:
        """Wrap below a module; return the number of wrapped elements, or None if the policy does not recurse."""
        goes_on = self._policy(module=module, recurse=True, nonwrapped_numel=self._numel(module))
        if not goes_on and self._shard.exact.isdisjoint(module.modules()):
            return None
        wrapped = 0
        for name, child in list(module._modules.items()):
            if child is None or child in self._ignored:
                continue
            if child in self._done:
                setattr(module, name, self._done[child])
                continue
            made, inside = self._one(child, asked=goes_on)
            self._done[child] = made
            wrapped += inside
            if made is not child:
                setattr(module, name, made)
        return wrapped if goes_on else None

    def _one(self, module: nn.Module, *, asked: bool) -> tuple[nn.Module, int]:
        numel = self._numel(module)
        inside = self.below(module)
        if module in self._shard.exact:
            return self._shard(module), numel
        if not asked or inside is None:
            return module, inside or 0
        if self._policy(module=module, recurse=False, nonwrapped_numel=numel - inside):
            return self._shard(module), numel
        return module, inside
