"""One piece of memory for all weights: values stay, views stay views, gradients add up."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lora_rocm.adapters.flat_params import ALIGNMENT, FlatWeights

SHAPES = {"a.x": (3, 5), "a.y": (64,), "b.z": (1, 2, 1, 1)}


def leaves() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("leaf_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_values_stay_and_layers_see_what_the_masters_become(leaf_dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    before, layers = {name: leaf.detach().clone() for name, leaf in leaves().items()}, leaves()
    flat = FlatWeights(layers, leaf_dtype, weight_dtype)
    for name, leaf in layers.items():
        assert torch.equal(flat.parameters[name], before[name].to(weight_dtype)) and leaf.dtype is leaf_dtype
        assert torch.equal(leaf, flat.parameters[name].to(leaf_dtype)) and leaf.is_leaf and leaf.requires_grad
        assert leaf.data_ptr() % (ALIGNMENT * leaf.element_size()) == flat.working.data_ptr() % (
            ALIGNMENT * leaf.element_size()
        )
    flat.masters.add_(1.0)
    flat.publish()
    assert all(torch.equal(leaf, flat.parameters[name].to(leaf_dtype)) for name, leaf in layers.items())


def test_gradients_of_several_passes_add_up_and_missing_ones_count_as_zero() -> None:
    layers = leaves()
    flat = FlatWeights(layers, torch.bfloat16)
    for seen in (("a.x", "a.y", "b.z"), ("a.x", "b.z")):
        sum((layers[name].float() * 2.0).sum() for name in seen).backward()  # type: ignore[union-attr]
        flat.gather()
        assert all(leaf.grad is None for leaf in layers.values())
    found = flat.views(flat.gradients)
    assert {name: float(gradient.unique()) for name, gradient in found.items()} == {"a.x": 4.0, "a.y": 2.0, "b.z": 4.0}
    assert float(flat.gradients.sum()) == sum(float(gradient.sum()) for gradient in found.values())  # nothing between
    flat.drop_gradients()
    assert not flat.gradients.any()


def test_gradients_take_memory_only_between_gathering_and_the_update_unless_they_are_kept() -> None:
    layers = leaves()
    flat = FlatWeights(layers, torch.bfloat16)

    def bytes_held() -> int:
        held = [flat._landing, *([flat._gradients] if flat._gradients is not None else [])]
        return sum(tensor.untyped_storage().nbytes() for tensor in held)

    places = []
    for keeps in (False, True):
        flat.keep_gradients(keeps)
        for _ in range(2):
            assert (bytes_held() > 0) is keeps
            layers["a.x"].float().sum().backward()
            flat.gather()
            assert bytes_held() == 4 * flat.masters.numel() and float(flat.gradients.sum()) == 15.0
            places.append(flat.gradients.data_ptr())
            flat.drop_gradients()
    assert places[-1] == places[-2]
    flat.keep_gradients(False)
    assert bytes_held() > 0  # their values are not lost
    flat.drop_gradients()
    assert bytes_held() == 0


def test_memory_that_runs_out_while_gradients_are_gathered_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = leaves()
    flat = FlatWeights(layers, torch.bfloat16)

    def full(*args: object) -> None:
        raise RuntimeError("out of memory")

    layers["a.x"].float().sum().backward()
    with monkeypatch.context() as broken:
        broken.setattr(torch, "_foreach_copy_", full)
        with pytest.raises(RuntimeError, match="out of memory"):
            flat.gather()
    flat.drop_gradients()
    assert flat._landing.untyped_storage().nbytes() == 0 and flat._gradients is None
    layers["a.x"].float().sum().backward()
    flat.gather()
    assert float(flat.gradients.sum()) == 15.0


@given(st.lists(st.integers(1, 200), min_size=1, max_size=9), st.data())
def test_neighbours_have_one_slice(sizes: list[int], data: st.DataObject) -> None:
    flat = FlatWeights({f"w{n}": nn.Parameter(torch.full((size,), n + 1.0)) for n, size in enumerate(sizes)})
    first = data.draw(st.integers(0, len(sizes) - 1))
    last = data.draw(st.integers(first, len(sizes) - 1))
    part = flat.masters[flat.slice_of([f"w{n}" for n in range(first, last + 1)])]
    assert set(part.unique().tolist()) - {0.0} == {n + 1.0 for n in range(first, last + 1)}
    assert int((part != 0).sum()) == sum(sizes[first : last + 1])


def test_who_are_no_neighbours_are_refused() -> None:
    with pytest.raises(ValueError, match="neighbours"):
        FlatWeights(leaves()).slice_of(["a.x", "b.z"])
