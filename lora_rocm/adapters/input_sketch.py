"""The directions in which the inputs of linear layers vary most: what a LoRA of EVA starts from (arXiv 2410.07170).

The covariance of D inputs has D x D numbers, too many for a large model. Here a layer keeps its product with
W = ``WIDTH`` x rank vectors. The first pass over the data multiplies random vectors, each further pass the orthonormal
basis of the last product (subspace iteration), and the leading directions are those of the Nystroem approximation of
the last one (arXiv 1607.01404). With W >= D it is exact.

Dimensions: N inputs, D features of an input, W vectors, K directions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 2
"""Vectors per rank of a layer, kept with their products: 4 x rank x D float32 numbers, 16 bytes per number of A. The
gradients, moments and activations of a step need more, and are not there yet while inputs are read."""
SMALLEST = 1e-6
"""Eigenvalues below this share of the largest one are rounding of float32."""


class InputSketch:
    """The covariance of a layer's inputs, times some vectors; float32 on the device of the inputs.

    Args:
        vectors_DW: of the first pass.

    Attributes:
        count: number of inputs of this pass.
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
        """Add inputs [..., D]. Means are taken off each part first, for large ones would cost digits."""
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
        """Go on with the directions found so far, for another pass over the same inputs."""
        basis_DW, _ = torch.linalg.qr(self._scatter_DW.cpu().double())
        self.vectors_DW = basis_DW.to(self._scatter_DW)
        self._start_pass()

    def leading(self, rank: int) -> tuple[Tensor, float]:
        """The directions of the largest variance, largest first, and their share of the whole variance.

        Returns:
            Orthonormal rows, float32 [K, D] on the CPU. K is less than ``rank`` where the inputs span less. The entry
            of largest magnitude is positive in each.

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
    """A sketch for layers of a size. The same size and seed give the same vectors: equal inputs, equal directions."""
    rng = torch.Generator().manual_seed(seed)
    return InputSketch(torch.randn(inputs, min(WIDTH * rank, inputs), generator=rng).to(device))


@contextmanager
def reading(layers: Mapping[str, nn.Module], sketches: Mapping[str, InputSketch]) -> Iterator[None]:
    """Add the inputs of each call of these layers to the sketches of the same names, inside the context."""

    def adds_to(sketch: InputSketch) -> Any:
        return lambda layer, args: sketch.add(args[0])

    handles = [layer.register_forward_pre_hook(adds_to(sketches[name])) for name, layer in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
