"""Stores all trained weights in one flat tensor, and all gradients in another.

An operation on all weights (norm, finite check, clipping, AdamW, average, all-reduce) is one kernel over one tensor
instead of a thousand launches. *Leaves* are the layers' weights in the compute dtype: views of flat memory, for which
autograd computes gradients. *Masters* are the authoritative weights, which the optimizer updates. If both have the same
dtype, they share memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

ALIGNMENT = 64
"""Alignment of each weight in the flat tensor, in elements, for aligned matrix products. The padding is always zero."""


class FlatWeights:
    """Moves leaves into flat memory. They keep their values, but are cast to ``leaf_dtype``.

    Args:
        leaves: the layers' float32 weights by name, all on one device.
        leaf_dtype: compute dtype of the layers.
        weight_dtype: dtype of the masters.

    Attributes:
        masters: flat master weights, ``weight_dtype`` [N].
        working: flat memory of the leaves, ``leaf_dtype`` [N]. The same tensor as ``masters`` if both dtypes are equal.
        parameters: views of ``masters`` by name.
        gradients: flat gradients, float32 [N]. Allocated on first use, and freed by ``drop_gradients`` unless
            ``keep_gradients`` is set.
    """

    def __init__(
        self,
        leaves: Mapping[str, nn.Parameter],
        leaf_dtype: torch.dtype = torch.float32,
        weight_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.leaves = dict(leaves)
        device = next(iter(self.leaves.values())).device
        self._places: dict[str, tuple[int, torch.Size]] = {}
        size = 0
        for name, leaf in self.leaves.items():
            self._places[name] = (size, leaf.shape)
            size += -(-leaf.numel() // ALIGNMENT) * ALIGNMENT
        self.masters = torch.zeros(size, dtype=weight_dtype, device=device)
        self.parameters = self.views(self.masters)
        self._gradients: Tensor | None = None
        self._keeps_gradients = False
        same = leaf_dtype is weight_dtype
        self.working = self.masters if same else torch.zeros(size, dtype=leaf_dtype, device=device)
        self._landing = torch.zeros(size, dtype=leaf_dtype, device=device)
        self._landings = self.views(self._landing)  # cached: creating a thousand views per pass is slow
        self._landing_bytes = self._landing.untyped_storage().nbytes()
        self._landing.untyped_storage().resize_(0)
        with torch.no_grad():
            for name, working in self.views(self.working).items():
                leaf = self.leaves[name]
                self.parameters[name].copy_(leaf)
                leaf.grad = None
                leaf.data = working
        self.publish()

    @property
    def gradients(self) -> Tensor:
        if self._gradients is None:
            self._gradients = torch.zeros(self.masters.numel(), device=self.masters.device)
        return self._gradients

    def keep_gradients(self, keeps: bool) -> None:
        """Set whether ``drop_gradients`` zeroes the gradient buffer instead of freeing it.

        Graph capture and gradient accumulation need this.
        """
        self._keeps_gradients = keeps
        if keeps:
            self._gradients = self.gradients

    def views(self, flat_N: Tensor) -> dict[str, Tensor]:
        """Return a view of each weight, keyed by name, into a flat tensor with the layout of ``masters``."""
        return {name: flat_N[at : at + shape.numel()].view(shape) for name, (at, shape) in self._places.items()}

    def slice_of(self, names: list[str]) -> slice:
        """Return the range of the flat tensors that contains these adjacent weights.

        Raises:
            ValueError: the weights are not adjacent in this order.
        """
        order = list(self._places)
        first = order.index(names[0])
        if order[first : first + len(names)] != names:
            raise ValueError(f"the weights are not neighbours in flat memory: {names}")
        after = first + len(names)
        end = self._places[order[after]][0] if after < len(order) else self.masters.numel()
        return slice(self._places[names[0]][0], end)

    @torch.no_grad()
    def gather(self) -> None:
        """Add the leaves' gradients to ``gradients``, then drop them. Does not synchronise, so a graph can capture it.

        The gradients are first copied into a temporary flat buffer. It has memory only during this call, when the
        activations are already freed.
        """
        found = {name: leaf.grad for name, leaf in self.leaves.items() if leaf.grad is not None}
        self._landing.untyped_storage().resize_(self._landing_bytes)
        try:
            self._landing.zero_()
            torch._foreach_copy_([self._landings[name] for name in found], list(found.values()))
            self.drop_leaf_gradients()
            self.gradients.add_(self._landing)
        finally:  # the block above may run out of memory
            self._landing.untyped_storage().resize_(0)

    def drop_leaf_gradients(self) -> None:
        for leaf in self.leaves.values():
            leaf.grad = None

    def drop_gradients(self) -> None:
        """Drop all gradients. If ``keep_gradients`` is set, the flat buffer is zeroed instead of freed."""
        self.drop_leaf_gradients()
        if self._keeps_gradients:
            self.gradients.zero_()
        else:
            self._gradients = None

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the masters to the layers' working weights, after a change."""
        if self.working is not self.masters:
            self.working.copy_(self.masters)
