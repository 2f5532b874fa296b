"""A batch is cut into parts that are its rows, and nothing in it can be exchanged."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lora_rocm.dataset.shape import SampleShape
from lora_rocm.device.transfer import fingerprint
from lora_rocm.loader.batch import Batch, split


def batch_of(count: int) -> Batch:
    tensors = {"x": torch.arange(3 * count).reshape(count, 3), "weight": torch.full((count,), 1.0 / count)}
    sums = {name: fingerprint(tensor) for name, tensor in tensors.items()}
    return Batch(
        tensors,
        sums,
        tuple(map(str, range(count))),
        tuple(range(count)),
        SampleShape.of(tokens=3),
        4,
        1,
        True,
        (1,) * count,
    )


@pytest.mark.parametrize(("count", "parts", "sizes"), [(4, 1, [4]), (4, 2, [2, 2]), (5, 2, [3, 2]), (3, 8, [1, 1, 1])])
def test_parts_are_the_rows_in_order(count: int, parts: int, sizes: list[int]) -> None:
    whole = batch_of(count)
    pieces = split(whole, parts)
    assert [len(piece.positions) for piece in pieces] == sizes
    assert [key for piece in pieces for key in piece.sample_keys] == list(whole.sample_keys)
    for piece in pieces:
        assert (piece.shape, piece.iteration, piece.micro) == (whole.shape, 4, 1)
        assert piece.tensors["x"][0, 0] == 3 * piece.positions[0]
        assert all(torch.equal(fingerprint(tensor), piece.fingerprints[n]) for n, tensor in piece.tensors.items())
    assert torch.equal(sum(piece.tensors["weight"].sum() for piece in pieces), whole.tensors["weight"].sum())


def test_a_batch_that_is_not_cut_is_the_same_object() -> None:
    whole = batch_of(2)
    assert split(whole, 1) == [whole] and split(whole, 1)[0] is whole
    with pytest.raises(dataclasses.FrozenInstanceError):
        whole.iteration = 5  # type: ignore[misc]
