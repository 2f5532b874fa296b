"""Builds a batch of zeros on the device, for passes in which only shapes matter."""

from __future__ import annotations

import torch

from lora_rocm.dataset.shape import SampleShape
from lora_rocm.device.transfer import DeviceTransfer, fingerprint
from lora_rocm.families.base import PlansMemory, Tensors


def send_zeros(family: PlansMemory, transfer: DeviceTransfer, shape: SampleShape, rows: int) -> tuple[Tensors, Tensors]:
    """Send a batch of zeros to the device and return (batch, draws). Every sample has weight 0."""
    batch = family.example(shape, rows)
    draws = family.objective.draw(batch, [0] * rows).tensors
    batch["weight"] = torch.zeros(rows)
    tensors = {**batch, **draws}
    sent, _ = transfer.send(tensors, {name: fingerprint(tensor_B) for name, tensor_B in tensors.items()})
    return {name: tensor for name, tensor in sent.items() if name not in draws}, {name: sent[name] for name in draws}
