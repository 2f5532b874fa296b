"""Rank and module dropout of adapters. The factors are drawn before a pass and stay the same during it.

So a captured graph reads them at fixed addresses, and a recomputed block gets the same factors again. Random numbers
drawn during the pass would allow neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from lora_rocm.device.constants import constant


class AdapterDropout(nn.Module):
    """Multiplies the input by dropout factors from ``DropoutDraws``: one per index of ``axis``, or a single one.

    Args:
        p: probability that a factor is 0; at least 0 and less than 1.
        size: length of ``axis``, or 1 to drop the input as a whole.
        axis: dimension of the input that the factors belong to.
        per_sample: each sample has its own factors, and kept values are multiplied by 1 / (1 - p), as in kohya's
            rank_dropout. Otherwise all samples share the factors, and kept values are unchanged, as in LyCORIS.
    """

    draws: DropoutDraws | None = None

    def __init__(self, p: float, size: int = 1, axis: int = -1, per_sample: bool = False) -> None:
        super().__init__()
        self.p, self.size, self.axis, self.per_sample = p, size, axis, per_sample

    def forward(self, h: Tensor) -> Tensor:
        if not self.training:
            return h
        rows, shape = len(h) if self.per_sample else 1, [1] * h.ndim
        shape[0], shape[self.axis] = rows, self.size  # the axis of the samples is never ``axis``
        draws = self.draws or DropoutDraws([self])
        return h * draws.factors(self, rows, h.device).view(shape).to(h.dtype)


class DropoutDraws:
    """The dropout factors of all layers of a model. For each number of rows they are one tensor at a fixed address.

    They depend only on the pass's seed, the number of rows and the layer's position in the model. The tensor for a new
    number of rows is allocated when a layer first requests it, which must not happen during graph capture.

    The object is true if any module has dropout, including PyTorch's dropout modules.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        kinds = AdapterDropout, nn.modules.dropout._DropoutNd
        dropouts = [module for module in modules if isinstance(module, kinds) and module.p]
        self._layers = [layer for layer in dropouts if isinstance(layer, AdapterDropout)]
        for layer in self._layers:
            layer.draws = self
        self._any = bool(dropouts)
        self._seed = 0
        self._of_rows: dict[int, _Factors] = {}

    def __bool__(self) -> bool:
        return self._any

    def draw(self, seed: int) -> None:
        """Draw the factors for the next pass, and seed PyTorch's global generator, which its own dropout uses."""
        torch.manual_seed(seed)
        self._seed = seed
        for factors in self._of_rows.values():
            factors.draw(seed)

    def factors(self, layer: AdapterDropout, rows: int, device: torch.device) -> Tensor:
        """Return the factors of a layer for this pass, float32 [rows * size]."""
        found = self._of_rows.get(rows)
        if found is None:
            found = self._of_rows[rows] = _Factors(self._layers, rows, device)
            found.draw(self._seed)
        return found.of_layer[layer]


class _Factors:
    """The factors of all layers for one number of rows."""

    def __init__(self, layers: Sequence[AdapterDropout], rows: int, device: torch.device) -> None:
        counts = [layer.size * (rows if layer.per_sample else 1) for layer in layers]
        kept = [1 / (1 - layer.p) if layer.per_sample else 1.0 for layer in layers]
        self._p_N, self._kept_N = (
            torch.cat([torch.full((count,), value, device=device) for count, value in zip(counts, values, strict=True)])
            for values in ([layer.p for layer in layers], kept)
        )
        constant(self._p_N, "rates of dropout")
        constant(self._kept_N, "factors of dropout")
        self._flat_N = torch.ones_like(self._p_N)
        self._generator = None if device.type == "meta" else torch.Generator(device)
        self._rows = rows
        self.of_layer: dict[AdapterDropout, Tensor] = dict(zip(layers, self._flat_N.split(counts), strict=True))

    def draw(self, seed: int) -> None:
        if self._generator is not None:
            self._generator.manual_seed((seed + self._rows) % 2**63)
            self._flat_N.uniform_(generator=self._generator).ge_(self._p_N).mul_(self._kept_N)
