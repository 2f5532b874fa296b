"""Initial values of LoRA's factors, as in PEFT's ``init_lora_weights``. Convolution weights are flattened first.

PiSSA and OLoRA initialise the factors with a part of the base weight. PEFT subtracts this part from the base weight.
Here the base weight is unchanged, and a second, frozen pair of factors subtracts the part in each forward pass. The sum
is the same, and the result is a LoRA for the original base model.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from lora_rocm.adapters.kinds.lora_entry import LoraEntry

START = "peft_start"
"""PEFT's adapter name for the frozen pair of factors in a layer: the initial A, and the negated initial B."""
EXACT_SIDE = 1024
"""Size of a weight's smaller side up to which PiSSA is exact. Larger exact decompositions would take seconds."""
ITERATIONS, LEAST_SPARE = 4, 16  # of PiSSA's fast decomposition of larger weights (arXiv 2404.02948, 4.5)
Pair = tuple[Tensor, Tensor]


def attach_start(layer: LoraLayer, name: str) -> None:
    """Attach a zero-filled frozen pair, in the weight's dtype, to a layer with the adapter ``name``."""
    for pairs in (layer.lora_A, layer.lora_B):
        pair = copy.deepcopy(pairs[name])
        weight = pair.get_parameter("weight")
        del pair.weight
        pair.register_buffer("weight", torch.zeros_like(weight, dtype=layer.get_base_layer().weight.dtype))
        pairs[START] = pair
    layer.lora_dropout[START] = nn.Identity()
    for values in (layer.r, layer.lora_alpha, layer.scaling, layer.use_rslora):
        values[START] = values[name]
    layer.set_adapter([name, START])


def cast_start(layer: Any, dtype: torch.dtype) -> None:
    """Cast the frozen pair to the compute dtype. A packed weight needs this, because it has another dtype."""
    for pairs in (layer.lora_A, layer.lora_B):
        pairs[START].weight = pairs[START].weight.to(dtype)


def fill_start(layer: Any, down: Tensor, up: Tensor) -> dict[str, Tensor]:
    """Fill the frozen pair of a layer with its initial A and negated initial B.

    Returns:
        The values as the layer stores them, on the CPU, keyed by role ("start_A", "start_B").
    """
    found = {}
    for role, pairs, values in (("start_A", layer.lora_A, down), ("start_B", layer.lora_B, -up)):
        held = pairs[START].weight
        held.copy_(values)
        found[role] = held.detach().to("cpu", copy=True)
    return found


def less_start(entry: LoraEntry, held: Mapping[str, Tensor]) -> LoraEntry:
    """Return the update B A - B0 A0 as one pair of factors with twice the rank.

    It is computed as (B - B0) A + B0 (A - A0), which avoids cancellation. ``held``: result of ``fill_start``.
    """
    down, up = held["start_A"].float(), -held["start_B"].float()
    joined_down = torch.cat([entry.down, entry.down - down])
    return LoraEntry(joined_down, torch.cat([entry.up - up, up], dim=1), entry.scale)


def factors(how: str, weight: Tensor, rank: int, scale: float, rng: torch.Generator) -> Pair:
    """Return initial factors (A [k, in], B [out, k]) in float32.

    k is the rank; for pissa and olora it is lower if ``weight`` has fewer rows or columns than the rank.

    Args:
        how: initialisation method: gaussian, orthogonal, pissa or olora.
        weight: the base weight, float32 [out, in]. A convolution's weight is flattened.
        rank: rank of the layer.
        scale: factor of B @ A.
        rng: random generator on the CPU.
    """
    outputs, inputs = weight.shape
    if how == "gaussian":
        return torch.randn(rank, inputs, generator=rng) / rank, torch.zeros(outputs, rank)
    if how == "orthogonal":
        return _orthogonal(outputs, inputs, rank, rng)
    kept = min(rank, outputs, inputs)
    if how == "olora":
        q, _ = torch.linalg.qr(weight[:, :kept])  # the first columns of W's Q depend on the first columns of W alone
        return q.T @ weight, q
    if min(outputs, inputs) <= EXACT_SIDE:
        u, s, v_t = torch.linalg.svd(weight, full_matrices=False)
        u, s, v = u[:, :kept], s[:kept], v_t[:kept].T
    else:
        # without spare vectors, the last ones are inaccurate where singular values are close to each other
        tried = min(kept + max(kept, LEAST_SPARE), outputs, inputs)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(torch.randint(2**62, (), generator=rng)))
            u, s, v = torch.svd_lowrank(weight, tried, niter=ITERATIONS)
        u, s, v = u[:, :kept], s[:kept], v[:, :kept]
    root = (s / scale).sqrt()
    return root[:, None] * v.T, u * root


def _orthogonal(outputs: int, inputs: int, rank: int, rng: torch.Generator) -> Pair:
    """Return random (A, B) with B @ A = 0: each is built from one half of a set of orthogonal vectors."""
    q, _ = torch.linalg.qr(torch.randn(rank, rank, generator=rng))
    down = (torch.randn(inputs, rank // 2, generator=rng) @ q[0::2]).T / 10
    up = torch.randn(rank // 2, outputs, generator=rng).T @ q[1::2] / 10
    return down.contiguous(), up.contiguous()
