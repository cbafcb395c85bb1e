"""Attributes of modules: a tensor put there, a parameter registered, what a user registered instead."""

from __future__ import annotations

import torch
from torch import nn

from shardckpt.core.traverse import Managed, Place


def put(place: Place, value: torch.Tensor) -> None:
    """Make `value` an attribute of a module without registering it."""
    module, name = place.module, place.attribute
    if type(module).__setattr__ is nn.Module.__setattr__:
        module.__dict__[name] = value
        return
    module._parameters.pop(name, None)
    setattr(module, name, value)  # recurrent layers keep lists of their weights and watch their attributes
    if name in module._parameters:
        module._parameters.pop(name)
        module.__dict__[name] = value


def register(place: Place, value: nn.Parameter) -> None:
    """Make `value` the registered parameter of a module, in its old position."""
    module, name = place.module, place.attribute
    if type(module).__setattr__ is nn.Module.__setattr__:
        module._parameters[name] = value
    else:
        setattr(module, name, value)


def given_instead(member: Managed, exposed: nn.Parameter, leaf: nn.Parameter) -> nn.Parameter | None:
    """Return what a user registered in one of a parameter's places."""
    for place in member.places:
        found = place.module._parameters.get(place.attribute)
        if found is not None and found is not exposed and found is not leaf:
            return found
    return None
