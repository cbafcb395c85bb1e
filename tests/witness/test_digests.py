"""Digests of batches and tensors: what changes them, and what does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from shardckpt.checkpoint.stateful import tensor_bytes
from shardckpt.witness.digests import digest_batch, digest_random_states, digest_tensors

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.int8, torch.bool, torch.float16, torch.float64)


def rows_of(batch: Any, rows: list[int]) -> Any:
    return {
        name: each[rows] if isinstance(each, torch.Tensor) else [each[at] for at in rows]
        for name, each in batch.items()
    }


BATCH = {"tokens": torch.arange(24).view(6, 4), "weights": torch.rand(6, dtype=torch.float64), "ids": list("abcdef")}


def test_samples_have_the_same_digests_in_any_order_and_split() -> None:
    whole = digest_batch(BATCH)
    parts = [digest_batch(rows_of(BATCH, rows)) for rows in ([4, 1], [0, 5, 3], [2])]
    assert len(set(whole.samples)) == 6
    assert Counter(whole.samples) == sum((Counter(part.samples) for part in parts), Counter())


def test_the_order_of_samples_changes_the_digest_of_the_batch() -> None:
    assert digest_batch(rows_of(BATCH, [1, 0, 2, 3, 4, 5])).ordered != digest_batch(BATCH).ordered


@pytest.mark.parametrize("name", BATCH)
def test_each_part_of_a_sample_changes_its_digest_alone(name: str) -> None:
    changed = dict(BATCH)
    changed[name] = list("abcxef") if name == "ids" else BATCH[name].clone()
    if name != "ids":
        changed[name][3] += 1
    differing = [a != b for a, b in zip(digest_batch(changed).samples, digest_batch(BATCH).samples, strict=True)]
    assert differing == [False, False, False, True, False, False]


@pytest.mark.parametrize(
    "batch", [None, 3, [], {}, torch.tensor(1.0), [torch.rand(2, 3), torch.rand(2)], np.ones((2, 3)), "text"]
)
def test_batches_of_any_kind_have_a_digest(batch: Any) -> None:
    assert digest_batch(batch) == digest_batch(batch)


UNUSUAL = {
    "objects": lambda: [object(), object()],
    "array of objects": lambda: np.array([object()], dtype=object),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "compressed": lambda: torch.eye(3).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "meta": lambda: torch.empty(3, device="meta"),
    "other byte order": lambda: np.arange(3, dtype=">f4"),
    "long double": lambda: np.arange(3, dtype=np.longdouble),
}


@pytest.mark.parametrize("make", UNUSUAL.values(), ids=UNUSUAL)
def test_unusual_batches_that_are_equal_have_equal_digests(make: Callable[[], Any]) -> None:
    kept = make()
    assert digest_batch(kept) == digest_batch(make())


def test_an_accumulated_gradient_has_the_samples_of_its_batches() -> None:
    on_one = digest_batch([rows_of(BATCH, rows) for rows in ([0, 1], [2, 3], [4, 5])])
    on_two = [digest_batch([rows_of(BATCH, rows)]) for rows in ([0, 2, 4], [1, 3, 5])]
    assert Counter(on_one.samples) == Counter(on_two[0].samples) + Counter(on_two[1].samples)


@dataclass
class Example:
    """Batch, or sample, with fields."""

    tokens: Any
    weight: Any = None


def test_the_fields_of_a_dataclass_have_samples() -> None:
    of_fields = digest_batch(Example(BATCH["tokens"], BATCH["weights"]))
    of_dict = digest_batch({"tokens": BATCH["tokens"], "weight": BATCH["weights"]})
    assert of_fields == of_dict
    assert digest_batch([Example(1), Example(2)]).samples == digest_batch([Example(2), Example(1)]).samples[::-1]
    assert len(set(digest_batch([Example(1), Example(2)]).samples)) == 2


def test_a_container_inside_itself_counts_once() -> None:
    def make(value: int) -> dict[str, Any]:
        batch: dict[str, Any] = {"tokens": torch.full((2, 3), value)}
        batch |= {"self": batch, "all": [batch, batch]}
        return batch

    assert digest_batch(make(1)) == digest_batch(make(1))
    assert digest_batch(make(1)).samples != digest_batch(make(2)).samples


def test_a_single_value_beside_samples_belongs_to_none() -> None:
    assert digest_batch({"epoch": 3, **BATCH}).samples == digest_batch(BATCH).samples
    assert digest_batch({"epoch": 3, **BATCH}) != digest_batch({"epoch": 4, **BATCH})


def test_arrays_and_tensors_of_equal_values_have_equal_samples() -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert digest_batch(values).samples == digest_batch(torch.from_numpy(values)).samples


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5,), (3, 7), (4, 8), (0, 3)])
def test_sums_on_devices_change_with_every_element_and_place(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    tensor = torch.randint(0, 2, shape, generator=generator).to(dtype)
    if not tensor.numel():
        return
    before = tensor_bytes.sum_rows(tensor.reshape(1, -1)).item()
    assert tensor_bytes.sum_rows(tensor.clone().reshape(1, -1)).item() == before
    for at in range(tensor.numel()):
        other = tensor.clone().flatten()
        other[at] = ~other[at] if dtype is torch.bool else other[at] + 1
        assert tensor_bytes.sum_rows(other.reshape(1, -1)).item() != before


def test_sums_on_devices_change_if_elements_swap_places() -> None:
    tensor = torch.arange(64.0, dtype=torch.float64)  # a word each
    swapped = tensor.flip(0)
    assert tensor_bytes.sum_rows(tensor.view(1, -1)).item() != tensor_bytes.sum_rows(swapped.view(1, -1)).item()


def test_sums_are_the_same_in_chunks_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.rand(3, 1000)
    whole = tensor_bytes.sum_rows(tensor).tolist()
    monkeypatch.setattr(tensor_bytes, "_REDUCED_BYTES", 256)
    assert tensor_bytes.sum_rows(tensor).tolist() == whole


def test_tensors_with_other_strides_have_the_digest_of_their_elements() -> None:
    tensor = torch.rand(4, 6)
    assert digest_tensors([tensor.t()]) == digest_tensors([tensor.t().contiguous()])
    assert tensor_bytes.sum_rows(tensor.t()).tolist() == tensor_bytes.sum_rows(tensor.t().contiguous()).tolist()


@pytest.mark.parametrize(
    ("draw", "name"),
    [(__import__("random").random, "python"), (np.random.rand, "numpy"), (lambda: torch.rand(1), "torch")],
)
def test_a_drawn_number_changes_the_digest_of_its_generator_alone(draw: Any, name: str) -> None:
    before = digest_random_states()
    draw()
    after = digest_random_states()
    assert {each for each in before if before[each] != after[each]} == {name}
