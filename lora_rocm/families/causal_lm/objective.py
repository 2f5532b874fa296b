"""Cross-entropy of the next token, without keeping a whole batch's logits, and the DPO loss of pairs.

Logits are computed for a limited number of tokens at a time. With a frozen head, the forward pass overwrites them with
their gradient (``FusedHead``), as in Liger (arXiv 2410.10989). So the backward pass only scales the gradient of the
states, and the head is multiplied only twice. With any other head, the backward pass recomputes the logits (arXiv
1604.06174).

Dimensions: B batch, S tokens, D width, N tokens of a batch, V vocabulary, P the two answers of a pair (the chosen one
first).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, logsigmoid
from torch.utils.checkpoint import checkpoint

from lora_rocm.families.common.adopt import adopt
from lora_rocm.families.objectives.base import Draws
from lora_rocm.kernels.backend import Implementation
from lora_rocm.kernels.token_loss import to_loss_gradient

IGNORED = -100
AT_ONCE = 1024


class NextToken:
    """Implements ``Objective`` for next-token prediction, which draws no random numbers."""

    def draw(self, batch: Mapping[str, Tensor], seeds: Sequence[int]) -> Draws:
        return Draws({})

    def fixed_draw(self, batch: Mapping[str, Tensor], seeds: Sequence[int], position: float) -> Draws:
        return Draws({})


def token_distance(
    head: Callable[[Tensor], Tensor], states_BSD: Tensor, labels_BS: Tensor, at_once: int = AT_ONCE
) -> Tensor:
    """Return the cross-entropy of each token: float32 [B, S], and 0 where the label is ``IGNORED``.

    Args:
        head: maps last hidden states [N, D] to logits [N, V] in float32. It is a ``Head`` if the layer is a
            ``FusedHead``.
        states_BSD: last hidden states, in the dtype of the head.
        labels_BS: the next token of each position.
        at_once: number of tokens with logits in memory at the same time.
    """
    parts = zip(states_BSD.flatten(0, 1).split(at_once), labels_BS.flatten().split(at_once), strict=True)
    if isinstance(head, Head) and isinstance(head.layer, FusedHead) and torch.is_grad_enabled():
        with_gradient: Callable[..., Tensor] = _WithGradient.apply
        found = [with_gradient(head, head.layer.implementation, *part) for part in parts]
    else:
        found = [checkpoint(_each, head, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
    return torch.cat(found).view(labels_BS.shape)


def _each(head: Callable[[Tensor], Tensor], states_ND: Tensor, labels_N: Tensor) -> Tensor:
    return cross_entropy(head(states_ND), labels_N, ignore_index=IGNORED, reduction="none")


class FusedHead(nn.Linear):
    """A frozen output head. Its logits are overwritten with their gradient in the forward pass."""

    implementation: Implementation


def fuse_head(model: nn.Module, implementation: Implementation) -> None:
    """Replace the output head of a model if it is a plain frozen layer. A second call changes the kernel backend."""
    whole: Any = model
    head = whole.get_output_embeddings()
    if type(head) is nn.Linear and not any(parameter.requires_grad for parameter in head.parameters()):
        head = adopt(FusedHead, head)
        whole.set_output_embeddings(head)
    if isinstance(head, FusedHead):
        head.implementation = implementation


@dataclass(frozen=True)
class Head:
    """Maps last hidden states [N, D] to logits [N, V] in float32: ``cap * tanh(scale * layer(states) / cap)``.

    layer: output layer of the model. scale: factor of the logits. cap: soft cap of the logits, or None for no cap.
    """

    layer: nn.Module
    scale: float
    cap: float | None

    def __call__(self, states_ND: Tensor) -> Tensor:
        logits_NV: Tensor = self.layer(states_ND).float()
        if self.scale != 1:
            logits_NV = logits_NV * self.scale
        return logits_NV if self.cap is None else torch.tanh(logits_NV / self.cap) * self.cap


class _WithGradient(Function):
    """Maps (head, backend, states [N, D], labels [N]) to the cross-entropy of each token [N], with its gradient.

    The cross-entropy of a token depends only on its own state.
    """

    @staticmethod
    def forward(ctx: Any, head: Head, implementation: Implementation, states_ND: Tensor, labels_N: Tensor) -> Tensor:
        logits_NV = head.layer(states_ND)
        found_N = to_loss_gradient(logits_NV, labels_N, IGNORED, implementation, head.scale, head.cap)
        ctx.save_for_backward(logits_NV @ head.layer.get_parameter("weight") if ctx.needs_input_grad[2] else None)
        return found_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dfound_N: Tensor) -> tuple[None, None, Tensor, None]:
        (gradient_ND,) = ctx.saved_tensors
        return None, None, (gradient_ND * dfound_N[:, None]).to(gradient_ND.dtype), None


@dataclass(frozen=True)
class Preference:
    """Direct preference optimisation (DPO): makes the chosen answer more likely relative to the rejected one.

    Source: arXiv 2305.18290, equation 7; with label smoothing ericmitchell.ai/cdpo.pdf, equation 3.
    """

    beta: float
    label_smoothing: float

    def margin(self, log_probs_BP: Tensor, start_BP: Tensor) -> Tensor:
        """Return the reward of the chosen answer minus the reward of the rejected answer: float32 [B].

        Args:
            log_probs_BP: log-probability of each answer, summed over its tokens.
            start_BP: the same log-probabilities, computed by the model before training.
        """
        gained_BP = log_probs_BP - start_BP
        return self.beta * (gained_BP[:, 0] - gained_BP[:, 1])

    def distance(self, log_probs_BP: Tensor, start_BP: Tensor) -> Tensor:
        """Return the loss of each pair: float32 [B, 1]. For the arguments see ``margin``."""
        margin_B, wrong = self.margin(log_probs_BP, start_BP), self.label_smoothing
        return -((1 - wrong) * logsigmoid(margin_B) + wrong * logsigmoid(-margin_B))[:, None]
