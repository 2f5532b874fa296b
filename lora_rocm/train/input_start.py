"""EVA (arXiv 2410.07170): initialises A from the layers' inputs, read from some batches before the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lora_rocm.adapters.base import Adapter
from lora_rocm.adapters.kinds.lora import LoraAdapter
from lora_rocm.device.attention import training_context
from lora_rocm.device.transfer import DeviceTransfer
from lora_rocm.errors import AdapterError, ModelError, TransferError
from lora_rocm.families.base import LoadedModel, ModelFamily, Tensors
from lora_rocm.families.objectives.loss import measured
from lora_rocm.foundation.units import count_text
from lora_rocm.loader.batches import BatchPlan, loader
from lora_rocm.train.context import Data, StartContext, pins
from lora_rocm.train.held_out import HeldOutLoss

BATCHES = 8
"""Number of micro-batches to read: the first ones of training, with the positions and the noise of a held-out loss."""
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
    """Initialise A of the adapter's linear layers with the directions in which their inputs have the largest variance.

    Does nothing if the recipe selects another initialisation, or on a resume. The first rank reads the inputs, and the
    other ranks receive its values. ``parts``: number of parts of a micro-batch, as in training.

    Raises:
        AdapterError: "no-inputs-to-read", no linear layer is adapted.
        ModelError: "inputs-not-finite", the inputs of a layer are not finite.
        TransferError: a batch did not reach the device, or the values did not reach all ranks.
    """
    if not start.recipe.lora.reads_inputs or start.checkpoint is not None:
        return
    assert isinstance(adapter, LoraAdapter), "other kinds have no such start"
    weights, train = adapter.linear_downs(), start.recipe.train
    if not weights:
        raise AdapterError(
            "no-inputs-to-read",
            "init: eva needs the inputs of adapted linear layers, but no linear layer is adapted.",
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
        rest = f"; the default init remains in {count_text(others, 'convolution')}" if others else ""
        start.context.notice(
            f"init: eva read {read_text}. The initial directions of A cover {share:.0%} of the "
            f"variance of its layers' inputs{rest}."
        )

    start.world.first("inputs", read)
    if start.world.size > 1:
        _share(start, list(weights.values()))


def _sketched(
    adapter: LoraAdapter, weights: Mapping[str, Tensor], seed: int, run: Callable[[], object]
) -> dict[str, InputSketch]:
    """Sketches of the layers' inputs. ``run`` is called ``PASSES`` times and must repeat the same inputs."""
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
    """Write the leading directions to A.

    If the inputs span fewer directions than A has rows, the last rows are unchanged.

    Returns the mean share of the inputs' variance that the directions cover.
    """
    shares = list[float]()
    for name, weight in weights.items():
        try:
            directions_KD, share = sketches[name].leading(len(weight))
        except ValueError as error:
            raise ModelError(
                "inputs-not-finite",
                f"The inputs of a layer of the base are not finite: {name}.",
                where="lora.init: eva",
                fix="Set train.mixed_precision to bf16 or no, which hold larger numbers than fp16.",
            ) from error
        weight[: len(directions_KD)].copy_(directions_KD)
        shares.append(share)
    return sum(shares) / len(shares)


@torch.no_grad()
def _share(start: StartContext, weights: list[Tensor]) -> None:
    """Send the first rank's values to all ranks, as a sum to which the other ranks add zeros."""
    flat_N = torch.cat([weight.flatten() for weight in weights])
    flat_N = flat_N if start.world.is_first else torch.zeros_like(flat_N)
    if bool(start.world.sum_(flat_N, flat_N.new_zeros(1), stamp=0).wrong):
        raise TransferError(
            "sum-wrong",
            "The LoRA's initial values did not reach all GPUs unchanged.",
            where="lora.init: eva",
            fix="Copies from card to card fail on some boards: set NCCL_P2P_DISABLE=1 and run the same command again.",
        )
    for weight, part_N in zip(weights, flat_N.split([weight.numel() for weight in weights]), strict=True):
        weight.copy_(part_N.view_as(weight))


WIDTH = 2
"""Number of vectors in a layer's sketch, per rank. Vectors and products take 16 bytes per number of A.

They are 4 x rank x D float32 numbers. The gradients, moments and activations of a step need more memory, and are not
allocated yet while inputs are read.
"""
SMALLEST = 1e-6
"""Eigenvalues smaller than this share of the largest one are treated as float32 rounding errors."""


class InputSketch:
    """The covariance of a layer's inputs, multiplied by some vectors; float32 on the device of the inputs.

    The covariance of D inputs has D x D numbers, too many for a large model. So only its product with W = ``WIDTH`` x
    rank vectors is computed. The first pass over the data uses random vectors. Each further pass uses the orthonormal
    basis of the last product (subspace iteration). The Nystroem approximation from the last product gives the leading
    directions (arXiv 1607.01404). With W >= D it is exact.

    Dimensions: N inputs, D features of an input, W vectors, K directions.

    Args:
        vectors_DW: the vectors for the first pass.

    Attributes:
        count: number of inputs added in this pass.
    """

    def __init__(self, vectors_DW: Tensor) -> None:
        self.vectors_DW = vectors_DW
        self._start_pass()

    def _start_pass(self) -> None:
        self.count = 0
        self._mean_D = torch.zeros_like(self.vectors_DW[:, 0])
        self._scatter_DW = torch.zeros_like(self.vectors_DW)
        self._variance = self._mean_D.new_zeros(())

    @torch.no_grad()
    def add(self, inputs: Tensor) -> None:
        """Add inputs of shape [..., D]. Their mean is subtracted first, because a large mean would cost precision."""
        inputs_ND = inputs.reshape(-1, inputs.shape[-1]).float()
        mean_D = inputs_ND.mean(dim=0)
        centred_ND = inputs_ND - mean_D
        step_D = mean_D - self._mean_D
        whole = self.count + len(inputs_ND)
        between = self.count * len(inputs_ND) / whole
        self._scatter_DW += centred_ND.T @ (centred_ND @ self.vectors_DW)
        self._scatter_DW += between * torch.outer(step_D, step_D @ self.vectors_DW)
        self._variance += centred_ND.square().sum() + between * step_D.square().sum()
        self._mean_D += step_D * (len(inputs_ND) / whole)
        self.count = whole

    def begin_next_pass(self) -> None:
        """Start another pass over the same inputs, with the directions found so far."""
        # float64: after some passes the columns are nearly parallel, and float32 would lose the smaller directions
        basis_DW, _ = torch.linalg.qr(self._scatter_DW.cpu().double())
        self.vectors_DW = basis_DW.to(self._scatter_DW)
        self._start_pass()

    def leading(self, rank: int) -> tuple[Tensor, float]:
        """The directions of the largest variance, largest first, and the share of the total variance that they cover.

        Returns:
            Orthonormal rows, float32 [K, D] on the CPU. K is smaller than ``rank`` if the inputs span fewer dimensions.
            In each row the entry of largest magnitude is positive.

        Raises:
            ValueError: the inputs are not finite.
        """
        scatter_DW, vectors_DW = self._scatter_DW.cpu().double(), self.vectors_DW.cpu().double()
        variance = float(self._variance)
        if not (torch.isfinite(scatter_DW).all() and torch.isfinite(self._variance)):
            raise ValueError("the inputs of a layer are not finite")
        core_WW = vectors_DW.T @ scatter_DW
        values_W, rotation_WW = torch.linalg.eigh((core_WW + core_WW.T) / 2)
        kept = values_W > max(SMALLEST * float(values_W[-1]), torch.finfo(torch.float32).tiny)
        root_DW = scatter_DW @ rotation_WW[:, kept] / values_W[kept].sqrt()
        found_DW, singular_W, _ = torch.linalg.svd(root_DW, full_matrices=False)
        found_KD, variance_K = found_DW[:, :rank].T, singular_W[:rank].square()
        signs_K1 = found_KD.gather(1, found_KD.abs().argmax(dim=1, keepdim=True)).sign()
        return (found_KD * signs_K1).float().contiguous(), float(variance_K.sum()) / variance if variance else 0.0


def new_sketch(inputs: int, rank: int, seed: int, device: torch.device) -> InputSketch:
    """A sketch for a layer with this number of inputs. Equal sizes and seeds give equal vectors."""
    rng = torch.Generator().manual_seed(seed)
    return InputSketch(torch.randn(inputs, min(WIDTH * rank, inputs), generator=rng).to(device))


@contextmanager
def reading(layers: Mapping[str, nn.Module], sketches: Mapping[str, InputSketch]) -> Iterator[None]:
    """Within this context, add the inputs of each call of a layer to the sketch with the same name."""

    def adds_to(sketch: InputSketch) -> Any:
        return lambda layer, args: sketch.add(args[0])

    handles = [layer.register_forward_pre_hook(adds_to(sketches[name])) for name, layer in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
