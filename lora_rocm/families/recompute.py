"""Activations of a block: kept for the backward pass, or computed again there (arXiv 1604.06174).

PyTorch's checkpoint without re-entrance. It is told to leave the state of the random generators alone wherever nothing
in the model draws from them: reading that state is forbidden while a graph is captured.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from lora_rocm.families.base import LoadedModel

Run = Callable[..., Any]
"""Calls its first argument, a block, with the others."""


def recomputing(model: LoadedModel, chosen: Collection[nn.Module] | None = None) -> Run:
    """How to call a block so that what it keeps is computed again in the backward pass.

    Args:
        model: looked at for dropout, whose draws have to come again.
        chosen: only these blocks; None: each.
    """
    wanted = None if chosen is None else {id(block) for block in chosen}
    draws = any(
        isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
        for component in model.components.values()
        for module in component.modules()
    )

    def run(block: nn.Module, *args: Any) -> Any:
        if wanted is not None and id(block) not in wanted:
            return block(*args)
        return checkpoint(block, *args, use_reentrant=False, preserve_rng_state=draws)

    return run
