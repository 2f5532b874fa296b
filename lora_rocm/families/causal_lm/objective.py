"""The cross-entropy of the next token, without the logits of a whole batch.

Logits are made of some tokens at a time, in float32. If the head is frozen, the gradient of a token's states is
computed with its loss, as Liger does (arXiv 2410.10989): the backward pass only scales it. Otherwise logits are made
again in the backward pass (arXiv 1604.06174).

Dimensions: B batch, S tokens, D width, N tokens of a batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from lora_rocm.families.objectives.base import Draws

IGNORED = -100
AT_ONCE = 1024


class NextToken:
    """Implements ``Objective``: nothing is drawn."""

    def draw(self, batch: Mapping[str, Tensor], seeds: Sequence[int]) -> Draws:
        return Draws({})

    def fixed_draw(self, batch: Mapping[str, Tensor], seeds: Sequence[int], position: float) -> Draws:
        return Draws({})


def token_distance(
    head: Callable[[Tensor], Tensor],
    states_BSD: Tensor,
    labels_BS: Tensor,
    at_once: int = AT_ONCE,
    head_is_frozen: bool = False,
) -> Tensor:
    """The cross-entropy of each token: float32 [B, S]; 0 where the label is ``IGNORED``.

    Args:
        head: maps last hidden states [N, D] to logits [N, V] in float32.
        states_BSD: last hidden states, in the dtype of the head.
        labels_BS: the next token of each place.
        at_once: number of tokens whose logits exist at once.
        head_is_frozen: nothing in the head gets a gradient.
    """
    parts = zip(states_BSD.flatten(0, 1).split(at_once), labels_BS.flatten().split(at_once), strict=True)
    if head_is_frozen and states_BSD.requires_grad and torch.is_grad_enabled():
        found = [_WithGradient.apply(partial(_each, head), *part) for part in parts]
    else:
        how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        found = [checkpoint(_each, head, *part, **how) for part in parts]
    return torch.cat(found).view(labels_BS.shape)


def _each(head: Callable[[Tensor], Tensor], states_ND: Tensor, labels_N: Tensor) -> Tensor:
    return cross_entropy(head(states_ND), labels_N, ignore_index=IGNORED, reduction="none")


class _WithGradient(Function):
    """(distance, states [N, D], labels [N]) -> distances [N]. The distance of a token depends on its states alone."""

    @staticmethod
    def forward(ctx: Any, distance: Callable[[Tensor, Tensor], Tensor], states_ND: Tensor, labels_N: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf_ND = states_ND.detach().requires_grad_()
            found_N = distance(leaf_ND, labels_N)
            (gradient_ND,) = torch.autograd.grad(found_N.sum(), leaf_ND)
        ctx.save_for_backward(gradient_ND)
        return found_N.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dfound_N: Tensor) -> tuple[None, Tensor, None]:
        (gradient_ND,) = ctx.saved_tensors
        return None, (gradient_ND * dfound_N[:, None]).to(gradient_ND.dtype), None
