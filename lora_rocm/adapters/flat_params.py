"""All trained weights in one piece of memory, and their gradients in another.

What works on all of them (norm, finite check, clipping, AdamW, average, a sum over ranks) is one pass over one tensor
instead of a launch for each of a thousand. The layers have views: *leaves*, in the format that they compute in, of
which autograd makes gradients; the truth are the *masters*, which the optimizer moves. Where both have one format, they
are one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

ALIGNMENT = 64
"""Elements: each weight begins at a multiple, as matrix products want it. What lies between is zero and stays zero."""


class FlatWeights:
    """Takes over the memory of leaves: their values stay, their format becomes ``leaf_dtype``.

    Args:
        leaves: name -> float32 weight of a layer, all on one device.
        leaf_dtype: of what the layers compute with.
        weight_dtype: of the masters.

    Attributes:
        masters: [N] ``weight_dtype``.
        working: [N] ``leaf_dtype``, the memory of the leaves; the masters themselves where both have one format.
        parameters: name -> view of it.
        gradients: float32 [N]; made when they are asked for, and gone when they are dropped, unless they are kept.
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
        self._landings = self.views(self._landing)  # a thousand views are not made anew for each pass
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
        """Whether they stay where they are, also once they are dropped: a graph writes there, or several passes add."""
        self._keeps_gradients = keeps
        if keeps:
            self._gradients = self.gradients

    def views(self, flat_N: Tensor) -> dict[str, Tensor]:
        """Name -> its part of a tensor of this layout, in its shape."""
        return {name: flat_N[at : at + shape.numel()].view(shape) for name, (at, shape) in self._places.items()}

    def slice_of(self, names: list[str]) -> slice:
        """Where neighbours lie.

        Raises:
            ValueError: they are not neighbours, in this order.
        """
        order = list(self._places)
        first = order.index(names[0])
        if order[first : first + len(names)] != names:
            raise ValueError(f"not neighbours: {names}")
        after = first + len(names)
        end = self._places[order[after]][0] if after < len(order) else self.masters.numel()
        return slice(self._places[names[0]][0], end)

    @torch.no_grad()
    def gather(self) -> None:
        """Add the leaves' gradients to ``gradients``, and drop them. Waits for nothing, so it may be captured.

        Where they land has memory only here, when the activations have gone.
        """
        found = {name: leaf.grad for name, leaf in self.leaves.items() if leaf.grad is not None}
        self._landing.untyped_storage().resize_(self._landing_bytes)
        try:
            self._landing.zero_()
            torch._foreach_copy_([self._landings[name] for name in found], list(found.values()))
            self.drop_leaf_gradients()
            self.gradients.add_(self._landing)
        finally:  # memory may run out in here
            self._landing.untyped_storage().resize_(0)

    def drop_leaf_gradients(self) -> None:
        for leaf in self.leaves.values():
            leaf.grad = None

    def drop_gradients(self) -> None:
        """Forget all gradients."""
        self.drop_leaf_gradients()
        if self._keeps_gradients:
            self.gradients.zero_()
        else:
            self._gradients = None

    @torch.no_grad()
    def publish(self) -> None:
        """After the masters have changed: the layers see it."""
        if self.working is not self.masters:
            self.working.copy_(self.masters)
