"""The verdict of an update as one tensor: packed values are unpacked, by name, without a wait for the device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lora_rocm.device.process_group import World
from lora_rocm.memory.op_counter import Ledger
from lora_rocm.train.loop import LOGGED, StepVerdict, means, pack, unpack

numbers = st.floats(width=32)
named = st.dictionaries(st.text(max_size=3), numbers, max_size=3)


def queued(
    values: list[float], logged: dict[str, float], measures: dict[str, float], losses: list[float]
) -> StepVerdict[Tensor]:
    """The verdict on the device; half of its scalars are float32, as most that a step makes."""
    dtypes = (torch.float64, torch.float32)
    fixed = [torch.tensor(value, dtype=dtypes[number % 2]) for number, value in enumerate(values)]
    rest = ({name: torch.tensor(value) for name, value in found.items()} for found in (logged, measures))
    return StepVerdict._make([*fixed, *rest, torch.tensor(losses)])


@given(st.lists(numbers, min_size=LOGGED, max_size=LOGGED), named, named, st.lists(numbers, max_size=4))
def test_what_was_packed_is_unpacked(
    values: list[float], logged: dict[str, float], measures: dict[str, float], losses: list[float]
) -> None:
    packed = pack(queued(values, logged, measures, losses))
    assert packed.dtype is torch.float64 and packed.shape == (LOGGED + len(logged) + len(measures) + len(losses),)
    found = unpack(packed.tolist(), logged, measures)
    assert str(found) == str(StepVerdict._make([*values, logged, measures, losses])), (
        "as text, in which NaN equals itself"
    )


def test_each_value_keeps_its_name() -> None:
    """Each field in turn is 1; the others are 0. A swap of two would be seen."""
    for position, name in enumerate(StepVerdict._fields[:LOGGED]):
        values = [float(number == position) for number in range(LOGGED)]
        found = unpack(pack(queued(values, {"a": 2.0}, {"a": 3.0}, [4.0])).tolist(), ["a"], ["a"])
        assert [field for field in StepVerdict._fields[:LOGGED] if getattr(found, field)] == [name]
        assert (found.logged, found.measures, found.losses_B) == ({"a": 2.0}, {"a": 3.0}, [4.0])


def test_packing_waits_for_nothing_and_launches_few_kernels() -> None:
    """On the meta device a wait for a number raises. A conversion for each float32 number, one stack and one cat."""
    found: StepVerdict[Tensor] = queued([0.0] * LOGGED, {}, {}, [0.0] * 3)
    hollow = StepVerdict._make(
        [*(value.to("meta") for value in found.scalars()), {}, {}, torch.zeros(3, device="meta")]
    )
    with Ledger(iter(())) as ledger:
        pack(hollow)
    assert ledger.tally.launches <= LOGGED // 2 + 2
    with pytest.raises(RuntimeError):  # the control
        float(next(hollow.scalars()))


class Operations(TorchDispatchMode):
    """Notes the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_the_flags_of_a_single_process_take_no_kernel() -> None:
    world, zero, flat_N, losses_B = World(), torch.zeros(()), torch.zeros(4), torch.ones(1)
    agreed = world.reduce_step(flat_N, zero, losses_B[0], losses_B, stop=True, save=True, stamp=1)
    loss = losses_B[0]
    with Operations() as operations:
        again = world.reduce_step(flat_N, zero, loss, losses_B, stop=True, save=True, stamp=1)
    assert set(operations.names) == {"aten::select"}, "views alone"
    for each in (agreed, again):
        assert [float(value) for value in (each.blocked, each.wrong, each.guilty, each.stops, each.saves)] == [0.0] * 5
        assert each.stops.dtype is torch.float64, "it is packed without a conversion"


def test_means_leave_out_what_is_not_finite() -> None:
    assert means({"a": 3.0, "b": math.nan, "c": math.inf}, 2.0) == {"a": 1.5} and means({"a": 3.0}, 0.0) == {}
