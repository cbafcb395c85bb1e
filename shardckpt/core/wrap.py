"""Which submodules become units: policies, annotation by hand, and the driver that wraps from the bottom up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn

from shardckpt.errors import ShardckptError

CallablePolicy = Callable[..., bool]


class WrapError(ShardckptError, ValueError):
    """Modules cannot be wrapped in this way."""


class NestedContextError(ShardckptError, NotImplementedError):
    """`enable_wrap` inside `enable_wrap`."""


def always_wrap_policy(*_: Any, **__: Any) -> bool:
    """Wrap every module."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Wrap the modules for which `lambda_fn` is true."""
    del nonwrapped_numel
    return True if recurse else bool(lambda_fn(module))


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: Iterable[type[nn.Module]]
) -> bool:
    """Wrap the instances of some classes."""
    del nonwrapped_numel
    return True if recurse else isinstance(module, tuple(transformer_layer_cls))


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
) -> bool:
    """Wrap modules whose parameters, those of wrapped children not counted, reach a number of elements.

    Args:
        module: The module in question.
        recurse: Whether the question is to go on below it; otherwise it is to wrap it.
        nonwrapped_numel: Elements of its parameters that are not wrapped.
        min_num_params: The number, in elements.
        force_leaf_modules: Classes that are not looked into; MultiheadAttention by default.
        exclude_wrap_modules: Classes that are not wrapped; ModuleList and ModuleDict by default.
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
    """Wrap every instance of some classes.

    Args:
        module_classes: The classes.
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self._module_classes = set(module_classes)

    def __call__(self, module: nn.Module, recurse: bool, *_: Any, **__: Any) -> bool:
        """Answer in the protocol of policies that are functions."""
        return True if recurse else isinstance(module, tuple(self._module_classes))

    def targets(
        self, root: nn.Module, ignored: set[nn.Module], settings: Mapping[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        """Return the modules to wrap, with the settings of each."""
        classes = tuple(self._module_classes)
        return {m: dict(settings) for m in root.modules() if m not in ignored and isinstance(m, classes)}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({sorted(each.__name__ for each in self._module_classes)})"


class CustomPolicy:
    """Wrap where a function says so, with settings of its own.

    Args:
        lambda_fn: Given a module, returns False, True, or settings that differ from the root's.
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        self._lambda_fn = lambda_fn

    def targets(
        self, root: nn.Module, ignored: set[nn.Module], settings: Mapping[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        """Return the modules to wrap, with the settings of each.

        Raises:
            WrapError: The function returned something else than a bool or a dict.
        """
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
    """Inside, `wrap` wraps.

    Args:
        wrapper_cls: What to wrap with.
        wrapper_kwargs: Its settings.

    Raises:
        NestedContextError: There is such a context around this one.
    """
    if _DEFAULTS.get() is not None:
        raise NestedContextError("You are already within an autowrap context and we do not support nested contexts")
    token = _DEFAULTS.set((wrapper_cls, wrapper_kwargs))
    try:
        yield
    finally:
        _DEFAULTS.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Return a module wrapped as the `enable_wrap` around says; outside of one, the module.

    Args:
        module: The module.
        wrap_overrides: Settings that beat the context's.
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
    settings: Mapping[str, Any],
    ignored: set[nn.Module],
    ignored_parameters: set[nn.Parameter],
    check: Callable[[nn.Module, str], None],
) -> None:
    """Replace the submodules that a policy names by wrapped ones, from the bottom up; the root itself stays.

    Args:
        root: The module to look into.
        policy: Says which.
        wrapper: Wraps one.
        settings: What it is given besides the module.
        ignored: Modules that are left alone.
        ignored_parameters: Parameters that do not count.
        check: Given a module that a policy object names, and its name, refuses what cannot be wrapped.

    Raises:
        WrapError: A submodule is wrapped already.
    """
    if isinstance(wrapper, type):
        for name, module in root.named_modules():
            if isinstance(module, wrapper):
                raise WrapError(
                    f"FSDP auto wrapping requires modules to not already have FSDP applied but found {name} in\n{root}",
                    fix="Wrap by hand everywhere, or nowhere.",
                )
    if isinstance(policy, (ModuleWrapPolicy, CustomPolicy)):
        targets = policy.targets(root, ignored, settings)
        targets.pop(root, None)
        names = {module: name for name, module in root.named_modules()}

        def wrapped(module: nn.Module) -> nn.Module:
            check(module, names[module])
            return wrapper(module, **targets[module])

        _replace(root, set(targets), wrapped, {})
    else:
        _Recursion(policy, wrapper, settings, ignored, ignored_parameters).below(root)


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


class _Recursion:
    """The descent that policies which are functions are asked along."""

    def __init__(
        self,
        policy: CallablePolicy,
        wrapper: Callable[..., nn.Module],
        settings: Mapping[str, Any],
        ignored: set[nn.Module],
        ignored_parameters: set[nn.Parameter],
    ) -> None:
        self._policy = policy
        self._wrapper = wrapper
        self._settings = settings
        self._ignored = ignored
        self._ignored_parameters = ignored_parameters
        self._done: dict[nn.Module, nn.Module] = {}

    def below(self, module: nn.Module) -> int | None:
        """Wrap below a module; return the elements that have been wrapped there, None where the policy stops."""
        numel = sum(p.numel() for p in module.parameters() if p not in self._ignored_parameters)
        if not self._policy(module=module, recurse=True, nonwrapped_numel=numel):
            return None
        wrapped = 0
        for name, child in list(module._modules.items()):
            if child is None or child in self._ignored:
                continue
            if child in self._done:
                setattr(module, name, self._done[child])
                continue
            made, inside = self._one(child)
            self._done[child] = made
            wrapped += inside
            if made is not child:
                setattr(module, name, made)
        return wrapped

    def _one(self, module: nn.Module) -> tuple[nn.Module, int]:
        numel = sum(p.numel() for p in module.parameters() if p not in self._ignored_parameters)
        inside = self.below(module)
        if inside is None:
            return module, 0
        if self._policy(module=module, recurse=False, nonwrapped_numel=numel - inside):
            return self._wrapper(module, **self._settings), numel
        return module, inside
