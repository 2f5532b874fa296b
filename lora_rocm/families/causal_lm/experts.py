"""Which product computes the experts of a model.

transformers computes experts by PyTorch's grouped product where there is one, whatever the dtype. Up to torch 2.11 it
takes bfloat16 alone on a GPU. Where a try fails, transformers' own product, which goes from expert to expert, is used.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers.integrations import moe

SIDE = 16  # smallest rows that the product takes
LOG = logging.getLogger(__name__)


@cache
def takes_grouped(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether PyTorch's grouped product computes this dtype on this device, forward and backward. It is tried once."""
    product: Any = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    try:
        with torch.enable_grad():
            rows_SI = torch.ones(2 * SIDE, SIDE, device=device, dtype=dtype, requires_grad=True)
            weight_EIO = torch.ones(2, SIDE, SIDE, device=device, dtype=dtype)
            ends_E = torch.tensor([SIDE, 2 * SIDE], device=device, dtype=torch.int32)
            found_SO = product(rows_SI, weight_EIO, offs=ends_E)
            found_SO.backward(torch.ones_like(found_SO))  # a gradient of a sum has no strides that it takes
    except RuntimeError as error:
        if device.type != "meta":
            LOG.warning(
                "The experts are computed one after another: PyTorch's grouped product does not take %s on %s (%s)",
                dtype,
                device,
                str(error).splitlines()[0],
            )
        return False
    return True


def use_working_product() -> None:
    """Let transformers ask ``takes_grouped`` before it takes the grouped product. A second call does nothing."""
    known = moe._can_use_grouped_mm
    if getattr(known, "asks_dtype", False):
        return

    def can_use(input: Tensor, weight: Tensor, offs: Tensor) -> bool:  # noqa: A002 (transformers' name)
        return bool(known(input, weight, offs)) and takes_grouped(weight.device, weight.dtype)

    can_use.asks_dtype = True  # type: ignore[attr-defined]
    moe._can_use_grouped_mm = can_use
