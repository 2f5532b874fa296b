"""EVA initialisation: some batches run through the base before the first step, and A starts from the layers' inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from lora_rocm.adapters.base import Adapter
from lora_rocm.adapters.input_sketch import InputSketch, new_sketch, reading
from lora_rocm.adapters.lora import LoraAdapter
from lora_rocm.device.attention import training_context
from lora_rocm.device.transfer import DeviceTransfer
from lora_rocm.errors import AdapterError, ModelError, TransferError
from lora_rocm.families.base import LoadedModel, ModelFamily, Tensors
from lora_rocm.families.objectives.loss import measured
from lora_rocm.loader.batches import BatchPlan, loader
from lora_rocm.train.context import Data, StartContext, pins
from lora_rocm.train.held_out import HeldOutLoss

BATCHES = 8
"""Micro-batches that are read: the first ones of training, at the positions and with the noise of a held-out loss."""
PASSES = 2


def start_from_inputs(
    start: StartContext,
    family: ModelFamily,
    model: LoadedModel,
    adapter: Adapter,
    transfer: DeviceTransfer,
    data: Data,
    parts: int,
) -> None:
    """Put the directions in which their inputs vary most into the A of the adapter's linear layers.

    Does nothing if the recipe asks for another start, and on a resume. The first rank reads, and the others get its
    values. ``parts``: of a micro-batch, as in training.

    Raises:
        AdapterError: "no-inputs-to-read", no linear layer is adapted.
        ModelError: "inputs-not-finite", the inputs of a layer are not finite.
        TransferError: a batch did not arrive, or the values did not reach all ranks.
    """
    if not start.recipe.lora.reads_inputs or start.checkpoint is not None:
        return
    assert isinstance(adapter, LoraAdapter), "other kinds have no such start"
    weights, train = adapter.linear_downs(), start.recipe.train
    if not weights:
        raise AdapterError(
            "no-inputs-to-read",
            "init: eva reads the inputs of linear layers, and none of these is adapted.",
            where="lora.init: eva",
            fix="Choose lora.targets with linear layers, such as attention-mlp, or another lora.init.",
        )
    attention = training_context(start.settings.attention) or nullcontext

    def base_alone(batch: Tensors, draws: Tensors) -> tuple[Tensor, Tensors]:
        with attention():
            return measured(family, model, batch, draws)[0], {}

    passes = HeldOutLoss(family, model, transfer, base_alone, start.context, parts)
    plan = BatchPlan(data.prepared.items, train.batch_size, 1, train.seed)
    count = min(BATCHES, plan.steps_per_epoch)
    batches = partial(loader, plan, family, data.workers, 0, count, pin_memory=pins(start), repair=data.prepared.repair)

    def read() -> None:
        share = _fill(weights, _sketched(adapter, weights, train.seed, lambda: passes.of(batches())))
        others = len(adapter.modules) - len(weights)
        read_text = "1 batch" if count == 1 else f"{count} batches"
        start.context.notice(
            f"init: eva read {read_text}. The directions that A starts from hold {share:.0%} of the variance of "
            f"its layers' inputs{f'; {others} convolutions start as by default' if others else ''}."
        )

    start.world.first("inputs", read)
    if start.world.size > 1:
        _share(start, list(weights.values()))


def _sketched(
    adapter: LoraAdapter, weights: Mapping[str, Tensor], seed: int, run: Callable[[], object]
) -> dict[str, InputSketch]:
    """What the layers are given in ``run``, which is called ``PASSES`` times and does the same each time."""
    sketches = {
        name: new_sketch(inputs, rank, seed, weight.device)
        for name, weight in weights.items()
        for rank, inputs in [weight.shape]
    }
    with adapter.disabled(), reading({name: adapter.modules[name][2] for name in weights}, sketches):
        run()
        for _ in range(PASSES - 1):
            for sketch in sketches.values():
                sketch.begin_next_pass()
            run()
    return sketches


@torch.no_grad()
def _fill(weights: Mapping[str, Tensor], sketches: Mapping[str, InputSketch]) -> float:
    """Fill A. Ranks beyond what the inputs span stay as they are. Returns the mean share of the variance."""
    shares = list[float]()
    for name, weight in weights.items():
        try:
            directions_KD, share = sketches[name].leading(len(weight))
        except ValueError as error:
            raise ModelError(
                "inputs-not-finite",
                f"A layer of the base is given numbers that are not finite: {name}.",
                where="lora.init: eva",
                fix="Set train.mixed_precision to bf16 or no, which hold larger numbers than fp16.",
            ) from error
        weight[: len(directions_KD)].copy_(directions_KD)
        shares.append(share)
    return sum(shares) / len(shares)


@torch.no_grad()
def _share(start: StartContext, weights: list[Tensor]) -> None:
    """Give all ranks the values of the first: a sum to which the others add zeros."""
    flat_N = torch.cat([weight.flatten() for weight in weights])
    flat_N = flat_N if start.world.is_first else torch.zeros_like(flat_N)
    if bool(start.world.sum_(flat_N, flat_N.new_zeros(1), stamp=0).wrong):
        raise TransferError(
            "sum-wrong",
            "What the LoRA starts from did not reach all GPUs as it was.",
            where="lora.init: eva",
            fix="Copies from card to card fail on some boards: set NCCL_P2P_DISABLE=1 and run the same command again.",
        )
    for weight, part_N in zip(weights, flat_N.split([weight.numel() for weight in weights]), strict=True):
        weight.copy_(part_N.view_as(weight))
