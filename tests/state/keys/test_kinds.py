"""States that are got and loaded in inference mode, or without gradients, are those of training, which goes on."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from shardckpt.core import FullyShardedDataParallel
from shardckpt.state import load_model_state_dict, load_optim_state_dict, model_state_dict, optim_state_dict
from tests.kit.models.states import Net, built, differing, flat, local, looked_at, step, whole
from tests.kit.ranks.harness import run

MODES = {"inference": torch.inference_mode, "no grad": torch.no_grad}
FACES = ("orig", "flat", "in place", "torch in place", "plain")


def kept(model: nn.Module, optim: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """Yield all tensors that training changes: weights, buffers, gradients and the optimizer's."""
    for name, parameter in model.named_parameters():
        yield name, parameter
        yield f"{name}.grad", parameter.grad
        yield from ((f"{name}/{slot}", value) for slot, value in optim.state.get(parameter, {}).items())
    yield from model.named_buffers()


def inference_tensors(tensors) -> list[str]:
    return [name for name, each in tensors if isinstance(each, torch.Tensor) and local(each).is_inference()]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world", [1, 2])
def test_states_have_the_right_values_and_training_goes_on_from_them(world: int, mode: str) -> None:
    def body(rank: int, world: int) -> list[Any]:
        wrong: list[Any] = []
        for face in FACES:
            model, optim = built(face, steps=1)
            weights, moments = looked_at(model, optim)
            states = {}
            for kind in ("FULL", "SHARDED", "LOCAL"):
                with MODES[mode]():
                    found = model_state_dict(model, kind), optim_state_dict(model, optim, kind)
                wrong += [(face, kind, each) for each in inference_tensors(found[0].items())]
                if kind != "LOCAL":
                    wrong += differing({name: whole(value) for name, value in found[0].items()}, weights)
                    wrong += differing(flat(found[1]), moments)
                states[kind] = copy.deepcopy(found)
            step(model, optim, 7)
            wanted = looked_at(model, optim)
            for kind, (of_model, of_optim) in states.items():
                for steps in (0, 1):  # into an optimizer without a state, and into one that has some
                    other, again = built(face, 5, steps)
                    with MODES[mode]():
                        load_model_state_dict(other, of_model)
                        load_optim_state_dict(other, again, of_optim)
                    left = inference_tensors(kept(other, again))
                    wrong += [(face, kind, steps, each) for each in left]
                    if not left:
                        step(other, again, 7)
                        for mine, theirs in zip(looked_at(other, again), wanted, strict=True):
                            wrong += [(face, kind, steps, each) for each in differing(mine, theirs)]
        return wrong

    assert run(world, body) == [[]] * world


def test_the_methods_of_the_wrapper_leave_inference_mode_too() -> None:
    def body(rank: int, world: int) -> list[str]:
        model, optim = built("orig", steps=1)
        other, again = built("orig", 5, 0)
        with torch.inference_mode():
            weights, moments = model.state_dict(), FullyShardedDataParallel.optim_state_dict(model, optim)
            other.load_state_dict(weights)
            again.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(other, again, moments))
        left = inference_tensors([*weights.items(), *kept(other, again)])
        if left:
            return left
        for each in ((model, optim), (other, again)):
            step(*each, 7)
        pairs = zip(looked_at(other, again), looked_at(model, optim), strict=True)
        return [name for mine, theirs in pairs for name in differing(mine, theirs)]

    assert run(2, body) == [[], []]


def test_a_model_that_was_made_in_inference_mode_is_loaded_there() -> None:
    def body(rank: int, world: int) -> list[str]:
        state = model_state_dict(built("plain", steps=1)[0])
        with torch.inference_mode():
            model = Net((1,))
            load_model_state_dict(model, state)
            return differing(dict(model.state_dict()), dict(state))

    assert run(1, body) == [[]]
