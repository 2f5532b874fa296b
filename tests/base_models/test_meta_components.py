"""Tensors without values are not initialised; all others are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lora_rocm.base_models.meta_components import LargeOnMeta

STARTS = [nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_]


@pytest.mark.parametrize("start", STARTS, ids=lambda start: start.__name__)
def test_only_tensors_with_values_are_initialised(start: Callable[..., Tensor]) -> None:
    meta, here = torch.empty(4, 4, device="meta"), torch.full((4, 4), 9.0)
    with LargeOnMeta():
        assert start(meta) is meta
        assert start(here) is here and bool((here != 9).any())
    assert meta._version == 0, "nothing was computed"
